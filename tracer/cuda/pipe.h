/* Results on their way to the host: a kernel fills a slot of device memory, the copy lane brings it into pinned memory
 * while the compute lane goes on, and the host takes it in, in order, when it needs the slot again. With three slots
 * one is being filled, one copied and one taken in. */
#pragma once

#include "tracer/cuda/device.h"

#include <stdint.h>

typedef struct pipe pipe;

/* What a packet is; the meaning is between sender and taker. */
typedef struct pipe_note {
    int kind, layer, set;
    size_t first, n;
} pipe_note;

/* Take in a packet: `bytes` are pinned memory, valid during the call. A code other than 0 ends the run. */
typedef int (*pipe_taker)(void *context, const pipe_note *note, const uint8_t *bytes);

/* Slots of `bytes` each. */
int pipe_new(device *d, size_t bytes, pipe_taker take, void *context, pipe **out);
void pipe_free(pipe *p); /* accepts NULL; packets under way are dropped */
size_t pipe_slot_bytes(const pipe *p);

/* The device memory of the next packet; takes in an old one where no slot is free. */
int pipe_room(pipe *p, void **device_memory);
/* Send the first `bytes` of that room, once all that is ordered on the compute lane so far is done. */
int pipe_send(pipe *p, size_t bytes, const pipe_note *note);
/* Take in everything that was sent. */
int pipe_drain(pipe *p);
