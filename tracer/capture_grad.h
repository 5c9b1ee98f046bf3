#pragma once

#include "tracer/capture.h"

/* A sequence's forward pass, to `sink`, and back from the losses of its counted steps; gradients and labels drawn are
 * packed layer by layer and put into the file, in its order, at the end. c->plan has grad_loss. */
int capture_gradients(capture *c, const trace_sequence *s, const forward_sink *sink);
