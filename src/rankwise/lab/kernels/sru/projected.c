/* The last product before the recurrence and the recurrence itself, for inference; `cpu.py` calls it.

   A task is a panel of neighbouring units: their rows of the matrix are laid out once, then u is made for some steps of
   one sequence and used at once, while it is in the L2 cache; u as a whole, by far the largest tensor of a layer, is
   never written. Results do not depend on the number of threads.

   With bytes, inputs are 128 + round(x / s) of each row, weights round(w / s) of each unit, and u follows from the
   sums of products: s_x s_w (sum - 128 sum of weights). */

#include "tile.h"
#include "step.h"

enum { STEPS = 96 };

typedef struct {
    long T, B, R, K, D;
    long stride; /* from row to row of x, in numbers (of four bytes) */
    long bytes;
    float scale;
    const void *p_x, *p_w;                /* (T, B, R) and (K D, R), floats or bytes */
    const float *p_x_scale, *p_w_scale;   /* (T, B) and (K D), with bytes */
    const float *p_highway;               /* (T, B, D), with K = 3 */
    const float *p_weight, *p_bias, *p_c0;
    float *p_h, *p_c;
    float *p_rooms; /* one for each thread */
    long room;      /* numbers in one */
} Arguments;

INLINE long depth(const Arguments *a) { return a->bytes ? (a->R + 3) / 4 : a->R; }

/* Rows of units first ... first + n of all K projections: (K, depth, PANEL), zeros where there is none. */
static void lay_panels(const Arguments *a, long first, long n, float *p, int32_t *p_sums) {
    const long R = a->R, size = depth(a) * PANEL;
    memset(p, 0, a->K * size * sizeof *p);
    for (long k = 0; k < a->K; k++, p += size) {
        for (long j = 0; j < n; j++) {
            const long row = k * a->D + first + j;
            if (!a->bytes) {
                const float *w = (const float *)a->p_w + row * R;
                for (long i = 0; i < R; i++) p[i * PANEL + j] = w[i];
                continue;
            }
            const int8_t *w = (const int8_t *)a->p_w + row * R;
            int32_t sum = 0;
            for (long i = 0; i < R; i++) sum += w[i];
            p_sums[k * PANEL + j] = 128 * sum;
            for (long i = 0; i < R; i += 4) memcpy(p + i / 4 * PANEL + j, w + i, least(4, R - i));
        }
    }
}

static void product(const Arguments *a, long rows, const float *x, const float *panel, float *u) {
    const long lda = a->B * a->stride, ldc = a->K * PANEL;
    if (a->bytes) {
        multiply(BYTES, rows, 0, x, lda, panel, PANEL, u, ldc, depth(a));
    } else {
        multiply(FLOATS, rows, 0, x, lda, panel, PANEL, u, ldc, depth(a));
    }
}

/* u (n, K, PANEL) of the steps from `start` of sequence i_b. */
static void project(const Arguments *a, long i_b, long start, long n, long first, long units, const float *panels,
                    const int32_t *sums, float *u) {
    const float *x = (const float *)a->p_x + (start * a->B + i_b) * a->stride;
    for (long k = 0; k < a->K; k++) {
        for (long i = 0; i < n; i += ROWS) {
            product(a, least(ROWS, n - i), x + i * a->B * a->stride, panels + k * depth(a) * PANEL,
                    u + (i * a->K + k) * PANEL);
        }
    }
    if (!a->bytes) return;
    for (long i = 0; i < n; i++) {
        const float x_scale = a->p_x_scale[(start + i) * a->B + i_b];
        for (long k = 0; k < a->K; k++) {
            const float *restrict w_scale = a->p_w_scale + k * a->D + first;
            const int32_t *restrict sum = sums + k * PANEL;
            float *restrict b_u = u + (i * a->K + k) * PANEL;
            _Pragma("omp simd") for (long j = 0; j < units; j++) {
                b_u[j] = (float)((int32_t)bits_of(b_u[j]) - sum[j]) * (x_scale * w_scale[j]);
            }
        }
    }
}

INLINE void recur(const Arguments *a, int K, long i_b, long start, long n, long first, long units, const float *u,
                  float *b_c) {
    const long D = a->D;
    const float *restrict b_wf = a->p_weight + first, *restrict b_wr = b_wf + D;
    const float *restrict b_bf = a->p_bias + first, *restrict b_br = b_bf + D;
    for (long i = 0; i < n; i++) {
        const long row = ((start + i) * a->B + i_b) * D + first;
        const float *restrict b_v = u + i * K * PANEL, *restrict b_p = b_v + PANEL, *restrict b_q = b_p + PANEL;
        const float *restrict b_y = K == 4 ? b_q + PANEL : a->p_highway + row;
        float *restrict b_h = a->p_h + row;
        _Pragma("omp simd") for (long j = 0; j < units; j++) {
            const Unit unit = {b_wf[j], b_wr[j], b_bf[j], b_br[j], 1.0f};
            b_h[j] = step(unit, b_v[j], b_p[j], b_q[j], K == 4 ? b_y[j] : b_y[j] * a->scale, b_c + j);
        }
    }
}

static void tasks(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    float *panels = a->p_rooms + atomic_fetch_add(&work->next_thread, 1) * a->room;
    float *u = panels + a->K * depth(a) * PANEL;
    int32_t sums[4 * PANEL];
    float b_c[PANEL];
    for (long first; (first = atomic_fetch_add(&work->next_task, 1) * PANEL) < a->D;) {
        const long units = least(PANEL, a->D - first);
        lay_panels(a, first, units, panels, sums);
        for (long i_b = 0; i_b < a->B; i_b++) {
            memcpy(b_c, a->p_c0 + i_b * a->D + first, units * sizeof *b_c);
            for (long start = 0; start < a->T; start += STEPS) {
                const long n = least(STEPS, a->T - start);
                project(a, i_b, start, n, first, units, panels, sums, u);
                a->K == 4 ? recur(a, 4, i_b, start, n, first, units, u, b_c)
                          : recur(a, 3, i_b, start, n, first, units, u, b_c);
            }
            memcpy(a->p_c + i_b * a->D + first, b_c, units * sizeof *b_c);
        }
    }
}

long sru_projected_has_bytes(void) { return HAS_BYTES; }

/* How many numbers a room holds. */
long sru_projected_room(const Arguments *a) { return a->K * PANEL * (depth(a) + STEPS); }

void sru_projected(const Arguments *a, Parallel *parallel, unsigned num_threads) {
    run(tasks, a, parallel, num_threads);
}
