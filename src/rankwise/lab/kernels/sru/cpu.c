/* The SRU recurrence on a CPU, forward and backward; `reference.py` says what it computes, `cpu.py` builds and calls it.

   All tensors are dense, u (T, B, K, D), x and h (T, B, D), the rest (B, D) or (D,). A task is a block of neighbouring
   lanes of one sequence, from its first step to its last: a step is a loop over lanes that the compiler vectorizes, the
   state stays in the L1 cache, and no task waits for another. So results do not depend on the number of threads.

   Letters: p_ pointer, b_ block of lanes, i_ index; f and r the gates, y the highway; d... a gradient. */

#include "step.h"

#define EACH_LANE _Pragma("omp simd") for (long j = 0; j < n; j++)

enum { MAX_WIDTH = 512 };

typedef struct {
    long T, B, K, D;
    long width; /* lanes of a block, at most MAX_WIDTH */
    long u_is_half, x_is_half; /* bfloat16, otherwise float */
    float scale;
    const void *p_u, *p_x;
    const float *p_weight, *p_bias, *p_c0, *p_mask; /* p_mask may be NULL */
    /* forward */
    void *p_h;
    float *p_c;
    /* backward */
    const void *p_dh;
    const float *p_dc;
    void *p_du, *p_dx;
    float *p_dgates; /* (B, 4, D): weight of f and r, bias of f and r, not yet summed over B */
    float *p_dc0, *p_dmask, *p_scratch; /* p_scratch: (threads, T, 2, width) */
} Arguments;

INLINE float load(const void *p, long i, int is_half) {
    return is_half ? float_of((uint32_t)((const uint16_t *)p)[i] << 16) : ((const float *)p)[i];
}

INLINE void store(void *p, long i, float x, int is_half) {
    if (is_half) {
        ((uint16_t *)p)[i] = (uint16_t)half_of(x);
    } else {
        ((float *)p)[i] = x;
    }
}

INLINE const void *at(const void *p, long i, int is_half) {
    return (const char *)p + i * (is_half ? 2 : 4);
}

/* Block of a mask: ones where there is none. */
INLINE void load_mask(float *b_mask, const float *p_mask, long i, long n) {
    for (long j = 0; j < n; j++) b_mask[j] = p_mask ? p_mask[i + j] : 1.0f;
}

INLINE void forward_lanes(const Arguments *a, long i_b, long i_d, long n, int K, int u_half, int x_half) {
    const long D = a->D;
    const float scale = a->scale;
    float b_c[MAX_WIDTH], b_mask[MAX_WIDTH];
    const float *restrict b_wf = a->p_weight + i_d, *restrict b_wr = b_wf + D;
    const float *restrict b_bf = a->p_bias + i_d, *restrict b_br = b_bf + D;
    memcpy(b_c, a->p_c0 + i_b * D + i_d, n * sizeof *b_c);
    load_mask(b_mask, a->p_mask, i_b * D + i_d, n);

    for (long i_t = 0; i_t < a->T; i_t++) {
        const long row = i_t * a->B + i_b;
        const void *restrict p_v = at(a->p_u, row * K * D + i_d, u_half);
        const void *restrict p_p = at(p_v, D, u_half), *restrict p_q = at(p_v, 2 * D, u_half);
        const void *restrict p_y = K == 4 ? at(p_v, 3 * D, u_half) : at(a->p_x, row * D + i_d, x_half);
        void *restrict p_h = (void *)at(a->p_h, row * D + i_d, u_half);
        EACH_LANE {
            const Unit unit = {b_wf[j], b_wr[j], b_bf[j], b_br[j], b_mask[j]};
            float v = load(p_v, j, u_half), p = load(p_p, j, u_half), q = load(p_q, j, u_half);
            float y = K == 4 ? load(p_y, j, u_half) : load(p_y, j, x_half) * scale;
            store(p_h, j, step(unit, v, p, q, y, b_c + j), u_half);
        }
    }
    memcpy(a->p_c + i_b * D + i_d, b_c, n * sizeof *b_c);
}

/* Up the steps for the states and forget gates, which the forward pass does not keep, then down for the gradients. */
INLINE void backward_lanes(const Arguments *a, float *p_scratch, long i_b, long i_d, long n, int K, int u_half,
                           int x_half) {
    enum { W = MAX_WIDTH };
    const long D = a->D, width = a->width;
    const float scale = a->scale;
    float b_c[W], b_mask[W], b_dc[W], b_dmask[W], b_dwf[W], b_dwr[W], b_dbf[W], b_dbr[W];
    const float *restrict b_wf = a->p_weight + i_d, *restrict b_wr = b_wf + D;
    const float *restrict b_bf = a->p_bias + i_d, *restrict b_br = b_bf + D;
    const long lane = i_b * D + i_d;
    memcpy(b_c, a->p_c0 + lane, n * sizeof *b_c);
    memcpy(b_dc, a->p_dc + lane, n * sizeof *b_dc);
    load_mask(b_mask, a->p_mask, lane, n);
    for (long j = 0; j < n; j++) b_dmask[j] = b_dwf[j] = b_dwr[j] = b_dbf[j] = b_dbr[j] = 0;

    for (long i_t = 0; i_t < a->T; i_t++) {
        const void *restrict p_v = at(a->p_u, (i_t * a->B + i_b) * K * D + i_d, u_half);
        const void *restrict p_p = at(p_v, D, u_half);
        float *restrict b_before = p_scratch + i_t * 2 * width, *restrict b_f = b_before + width;
        EACH_LANE {
            float c = b_c[j];
            float f = sigmoid(load(p_p, j, u_half) + b_bf[j] + b_wf[j] * c);
            b_before[j] = c;
            b_f[j] = f;
            b_c[j] = f * c + (1.0f - f) * load(p_v, j, u_half);
        }
    }
    for (long i_t = a->T - 1; i_t >= 0; i_t--) {
        const long row = i_t * a->B + i_b;
        const void *restrict p_v = at(a->p_u, row * K * D + i_d, u_half);
        const void *restrict p_q = at(p_v, 2 * D, u_half);
        const void *restrict p_y = K == 4 ? at(p_v, 3 * D, u_half) : at(a->p_x, row * D + i_d, x_half);
        const void *restrict p_dh = at(a->p_dh, row * D + i_d, u_half);
        void *restrict p_dv = (void *)at(a->p_du, row * K * D + i_d, u_half);
        void *restrict p_dp = (void *)at(p_dv, D, u_half), *restrict p_dq = (void *)at(p_dv, 2 * D, u_half);
        void *restrict p_dy = (void *)(K == 4 ? at(p_dv, 3 * D, u_half) : at(a->p_dx, row * D + i_d, x_half));
        const float *restrict b_before = p_scratch + i_t * 2 * width, *restrict b_f = b_before + width;
        EACH_LANE {
            float c = b_before[j], after = b_c[j], v = load(p_v, j, u_half), f = b_f[j], m = b_mask[j];
            float r = sigmoid(load(p_q, j, u_half) + b_br[j] + b_wr[j] * c);
            float y = K == 4 ? load(p_y, j, u_half) : load(p_y, j, x_half) * scale;
            float dh = load(p_dh, j, u_half), dr = dh * (after - y), dy = dh - dh * m * r;
            float dq = dr * m * r * (1.0f - r), dc = b_dc[j] + dh * m * r, dp = dc * (c - v) * f * (1.0f - f);
            store(p_dv, j, dc * (1.0f - f), u_half);
            store(p_dp, j, dp, u_half);
            store(p_dq, j, dq, u_half);
            if (K == 4) {
                store(p_dy, j, dy, u_half);
            } else {
                store(p_dy, j, dy * scale, x_half);
            }
            b_dmask[j] += dr * r;
            b_dwf[j] += dp * c;
            b_dwr[j] += dq * c;
            b_dbf[j] += dp;
            b_dbr[j] += dq;
            b_dc[j] = dc * f + dp * b_wf[j] + dq * b_wr[j];
            b_c[j] = c;
        }
    }
    float *p_dgates = a->p_dgates + i_b * 4 * D + i_d;
    memcpy(p_dgates, b_dwf, n * sizeof *b_dwf);
    memcpy(p_dgates + D, b_dwr, n * sizeof *b_dwr);
    memcpy(p_dgates + 2 * D, b_dbf, n * sizeof *b_dbf);
    memcpy(p_dgates + 3 * D, b_dbr, n * sizeof *b_dbr);
    memcpy(a->p_dc0 + lane, b_dc, n * sizeof *b_dc);
    if (a->p_dmask) memcpy(a->p_dmask + lane, b_dmask, n * sizeof *b_dmask);
}

/* The compiler makes loops of its own for each combination. */
#define SPECIALIZE(lanes, ...)                                                  \
    if (a->K == 4) {                                                            \
        a->u_is_half ? lanes(__VA_ARGS__, 4, 1, 1) : lanes(__VA_ARGS__, 4, 0, 0); \
    } else if (a->u_is_half) {                                                  \
        a->x_is_half ? lanes(__VA_ARGS__, 3, 1, 1) : lanes(__VA_ARGS__, 3, 1, 0); \
    } else {                                                                    \
        a->x_is_half ? lanes(__VA_ARGS__, 3, 0, 1) : lanes(__VA_ARGS__, 3, 0, 0); \
    }

static int take_task(Work *work, long *i_b, long *i_d, long *n) {
    const Arguments *a = work->arguments;
    const long D = a->D, width = a->width, num_blocks = (D + width - 1) / width;
    const long i = atomic_fetch_add(&work->next_task, 1);
    *i_b = i / num_blocks;
    *i_d = i % num_blocks * width;
    *n = D - *i_d < width ? D - *i_d : width;
    return *i_b < a->B;
}

static void forward_tasks(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    for (long i_b, i_d, n; take_task(work, &i_b, &i_d, &n);) {
        SPECIALIZE(forward_lanes, a, i_b, i_d, n)
    }
}

static void backward_tasks(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    float *p_scratch = a->p_scratch + atomic_fetch_add(&work->next_thread, 1) * a->T * 2 * a->width;
    for (long i_b, i_d, n; take_task(work, &i_b, &i_d, &n);) {
        SPECIALIZE(backward_lanes, a, p_scratch, i_b, i_d, n)
    }
}

void sru_forward(const Arguments *a, Parallel *parallel, unsigned num_threads) {
    if (a->D) run(forward_tasks, a, parallel, num_threads);
}

void sru_backward(const Arguments *a, Parallel *parallel, unsigned num_threads) {
    if (a->D) run(backward_tasks, a, parallel, num_threads);
}
