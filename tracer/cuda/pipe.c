#include "tracer/cuda/pipe.h"
#include "base/err.h"
#include "base/mem.h"

enum { SLOTS = 3 };

typedef struct slot {
    void *device, *host;
    device_mark *filled, *copied;
    pipe_note note;
} slot;

struct pipe {
    device *d;
    size_t bytes;
    pipe_taker take;
    void *context;
    slot slot[SLOTS];
    size_t sent, taken; /* packets so far */
};

int pipe_new(device *d, size_t bytes, pipe_taker take, void *context, pipe **out) {
    pipe *p = *out = mem_new(1, sizeof *p, "results on their way");
    if (!p) return ERR_DATA;
    *p = (pipe){.d = d, .bytes = bytes, .take = take, .context = context};
    for (slot *s = p->slot; s < p->slot + SLOTS; s++) {
        TRY(device_new(d, bytes, "results", &s->device));
        TRY(device_pinned(d, bytes, "results", &s->host));
        TRY(device_mark_new(d, &s->filled));
        TRY(device_mark_new(d, &s->copied));
    }
    return 0;
}

void pipe_free(pipe *p) {
    if (!p) return;
    for (slot *s = p->slot; s < p->slot + SLOTS; s++) {
        device_release(p->d, s->device); /* waits: nothing is copied any more */
        device_unpin(p->d, s->host);
        device_mark_free(s->filled);
        device_mark_free(s->copied);
    }
    mem_free(p);
}

size_t pipe_slot_bytes(const pipe *p) {
    return p->bytes;
}

static int take_oldest(pipe *p) {
    slot *s = &p->slot[p->taken % SLOTS];
    TRY(device_reach(p->d, s->copied));
    p->taken++;
    return p->take(p->context, &s->note, s->host);
}

int pipe_room(pipe *p, void **device_memory) {
    if (p->sent - p->taken == SLOTS) TRY(take_oldest(p));
    *device_memory = p->slot[p->sent % SLOTS].device;
    return 0;
}

int pipe_send(pipe *p, size_t bytes, const pipe_note *note) {
    slot *s = &p->slot[p->sent % SLOTS];
    if (bytes > p->bytes)
        return err_set(ERR_DATA, "internal error: a packet of %zu bytes in a slot of %zu", bytes, p->bytes);
    s->note = *note;
    TRY(device_mark_set(p->d, s->filled, STREAM_COMPUTE));
    TRY(device_wait(p->d, STREAM_COPY, s->filled));
    TRY(device_busy_begin(p->d, STREAM_COPY));
    TRY(device_from(p->d, STREAM_COPY, s->host, s->device, bytes));
    TRY(device_busy_end(p->d, STREAM_COPY));
    TRY(device_mark_set(p->d, s->copied, STREAM_COPY));
    p->sent++;
    return 0;
}

int pipe_drain(pipe *p) {
    while (p->taken < p->sent) TRY(take_oldest(p));
    return 0;
}
