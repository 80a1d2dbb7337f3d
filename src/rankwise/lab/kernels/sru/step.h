/* One step of one unit, forward. */

#pragma once

#include "native.h"

/* Within 2e-7 of the value. */
INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

typedef struct {
    float wf, wr, bf, br, mask;
} Unit;

/* From the projections v, p, q, the highway y and the state, which it changes, the output. */
INLINE float step(Unit unit, float v, float p, float q, float y, float *state) {
    float c = *state;
    float f = sigmoid(p + unit.bf + unit.wf * c);
    float r = sigmoid(q + unit.br + unit.wr * c);
    *state = c = f * c + (1.0f - f) * v;
    return y + unit.mask * r * (c - y);
}
