/* Attention with relative positions on a CPU, for inference; `cpu.py` says what it computes, and calls it.

   First every head's keys and distances are laid out in panels of neighbours, and its values densely. Then a task is a
   block of queries of one head, whose scores stay in the L2 cache. Results do not depend on the number of threads.

   Scores by distance become scores by key without a copy: query i has distance d in column S - d, and needs it in column
   j = M + i - d. In rows that are one number shorter, it is there.

   With half, products are of pairs of bfloat16 in the place of a float, and their sums float: half as many steps.

   Letters: B sequences, T queries, S keys, M = S - T, H heads, E width of a head; S + 1 distances, from S down to 0. */

#include "tile.h"

#include <math.h>

enum { BLOCK = 96, CHUNK = 64 }; /* queries of a block; keys whose values stay in the L1 cache */

typedef struct {
    float *p;
    long b, row, h; /* strides */
} Strided;

typedef struct {
    long B, T, S, H, E;
    long reach; /* keys that a query sees at most */
    long half;
    float scale;
    Strided content, position, k, v, r, y;
    float *p_panels; /* keys (B, H, panels, E, PANEL), then distances (H, panels, E, PANEL) */
    float *p_values; /* (B, H, S, E), S and E filled up to whole panels */
    float *p_rooms;  /* one for each thread */
    long room;       /* numbers in one */
} Arguments;

INLINE long pairs(const Arguments *a) { return a->half ? (a->E + 1) / 2 : a->E; }
INLINE float *at(Strided x, long b, long row, long h) { return x.p + b * x.b + row * x.row + h * x.h; }

/* The compiler makes loops of its own for each combination. */
static void product(long half, long rows, int add, const float *a, long lda, const float *b, long ldb, float *c,
                    long ldc, long n) {
    if (half) {
        add ? multiply(HALVES, rows, 1, a, lda, b, ldb, c, ldc, n) : multiply(HALVES, rows, 0, a, lda, b, ldb, c, ldc, n);
    } else {
        add ? multiply(FLOATS, rows, 1, a, lda, b, ldb, c, ldc, n) : multiply(FLOATS, rows, 0, a, lda, b, ldb, c, ldc, n);
    }
}

/* A row of numbers, or of their pairs, times scale; those of a panel stand PANEL apart. */
INLINE void lay_row(const Arguments *a, const float *p_x, float scale, float *p, long step) {
    if (!a->half) {
        for (long e = 0; e < a->E; e++) p[e * step] = p_x[e] * scale;
        return;
    }
    for (long e = 0; e < a->E / 2; e++) p[e * step] = pair_of(p_x[2 * e] * scale, p_x[2 * e + 1] * scale);
    if (a->E % 2) p[a->E / 2 * step] = pair_of(p_x[a->E - 1] * scale, 0);
}

static void lay_panels(const Arguments *a, Strided x, long b, long h, long rows, float *p) {
    const long size = pairs(a) * PANEL;
    for (long first = 0; first < rows; first += PANEL, p += size) {
        if (rows - first < PANEL) memset(p, 0, size * sizeof *p);
        for (long i = 0; i < least(PANEL, rows - first); i++) lay_row(a, at(x, b, first + i, h), 1, p + i, PANEL);
    }
}

static void lay_values(const Arguments *a, long b, long h, float *p) {
    const long S = a->S, E = a->E, wide = whole(E), per = a->half ? 2 : 1;
    memset(p, 0, whole(S) / per * wide * sizeof *p);
    for (long s = 0; s < S; s += per, p += wide) {
        const float *p_v = at(a->v, b, s, h), *p_next = at(a->v, b, s + 1, h);
        if (!a->half) {
            memcpy(p, p_v, E * sizeof *p);
        } else if (s + 1 < S) {
            for (long e = 0; e < E; e++) p[e] = pair_of(p_v[e], p_next[e]);
        } else {
            for (long e = 0; e < E; e++) p[e] = pair_of(p_v[e], 0);
        }
    }
}

static void lay_out(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    const long heads = a->B * a->H, keys = whole(a->S) * pairs(a), distances = whole(a->S + 1) * pairs(a);
    for (long i; (i = atomic_fetch_add(&work->next_task, 1)) < heads + a->H;) {
        if (i < heads) {
            lay_panels(a, a->k, i / a->H, i % a->H, a->S, a->p_panels + i * keys);
            lay_values(a, i / a->H, i % a->H, a->p_values + i * whole(a->S) * whole(a->E));
        } else {
            lay_panels(a, a->r, 0, i - heads, a->S + 1, a->p_panels + heads * keys + (i - heads) * distances);
        }
    }
}

/* s[first ... last) becomes exp(s - max), the rest of the row zero; returns the sum. */
static float soften(float *s, long first, long last, long width, long half) {
    float max = -INFINITY, sum = 0;
    _Pragma("omp simd reduction(max : max)") for (long j = first; j < last; j++) max = s[j] > max ? s[j] : max;
    _Pragma("omp simd reduction(+ : sum)") for (long j = first; j < last; j++) {
        s[j] = exponential(s[j] - max);
        sum += s[j];
    }
    memset(s, 0, first * sizeof *s);
    memset(s + last, 0, (width - last) * sizeof *s);
    if (half) {
        /* a pair is written where its numbers, and all after them, are read already */
        _Pragma("omp simd") for (long j = 0; j < width / 2; j++) s[j] = pair_of(s[2 * j], s[2 * j + 1]);
    }
    return sum;
}

static void attend_block(const Arguments *a, long b, long h, long start, float *room) {
    const long T = a->T, S = a->S, E = pairs(a), wide = whole(a->E), M = S - T;
    const long half = a->half, per = half ? 2 : 1;
    const long n = least(BLOCK, T - start), head = b * a->H + h;
    /* keys of the block, and the distances from its queries to them: whole panels */
    const long first = most(M + start - a->reach + 1, 0) / PANEL * PANEL, keys = whole(M + start + n - first);
    const long farthest = (T - start - n + 1 + first) / PANEL * PANEL, distances = whole(S + 1 - farthest);
    const float *p_k = a->p_panels + (head * whole(S) + first) * E;
    const float *p_r = a->p_panels + (a->B * a->H * whole(S) + h * whole(S + 1) + farthest) * E;
    const float *p_v = a->p_values + (head * whole(S) + first / per) * wide;
    const long width = most(distances, keys + 1), step = width - 1;
    float *q = room, *y = q + n * E, *by_distance = y + n * wide, *by_key = by_distance + T - start + first - farthest;
    float sums[BLOCK];

    for (long i = 0; i < n; i++) lay_row(a, at(a->position, b, start + i, h), a->scale, q + i * E, 1);
    for (long c = 0; c < distances; c += PANEL) {
        for (long i = 0; i < n; i += ROWS) {
            product(half, least(ROWS, n - i), 0, q + i * E, E, p_r + c * E, PANEL, by_distance + i * width + c, width,
                     E);
        }
    }
    for (long i = 0; i < n; i++) lay_row(a, at(a->content, b, start + i, h), a->scale, q + i * E, 1);
    for (long j = 0; j < keys; j += PANEL) {
        for (long i = 0; i < n; i += ROWS) {
            const long rows = least(ROWS, n - i);
            if (first + j >= M + start + i + rows) continue; /* none of them sees these keys */
            product(half, rows, 1, q + i * E, E, p_k + j * E, PANEL, by_key + i * step + j, step, E);
        }
    }
    for (long i = 0; i < n; i++) {
        const long self = M + start + i - first;
        sums[i] = soften(by_key + i * step, most(self - a->reach + 1, 0), self + 1, keys, half);
    }
    for (long j = 0; j < keys; j += CHUNK) {
        for (long c = 0; c < wide; c += PANEL) {
            for (long i = 0; i < n; i += ROWS) {
                const long rows = least(ROWS, n - i);
                if (first + j >= M + start + i + rows) continue;
                product(half, rows, j > 0, by_key + i * step + j / per, step, p_v + j / per * wide + c, wide,
                         y + i * wide + c, wide, least(CHUNK, keys - j) / per);
            }
        }
    }
    for (long i = 0; i < n; i++) {
        float *p = at(a->y, b, start + i, h);
        for (long e = 0; e < a->E; e++) p[e] = y[i * wide + e] / sums[i];
    }
}

static void attend(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    float *room = a->p_rooms + atomic_fetch_add(&work->next_thread, 1) * a->room;
    const long heads = a->B * a->H, blocks = (a->T + BLOCK - 1) / BLOCK;
    /* the last queries see most keys: they go first, so that threads end together */
    for (long i; (i = atomic_fetch_add(&work->next_task, 1)) < heads * blocks;) {
        const long head = i % heads;
        attend_block(a, head / a->H, head % a->H, (blocks - 1 - i / heads) * BLOCK, room);
    }
}

long relative_attention_has_half(void) { return HAS_HALVES; }

/* How many numbers `p_panels`, `p_values` and a room hold. */
void relative_attention_sizes(const Arguments *a, long sizes[3]) {
    const long n = least(BLOCK, a->T), keys = whole(a->S), wide = whole(a->E);
    sizes[0] = a->H * (a->B * keys + whole(a->S + 1)) * pairs(a);
    sizes[1] = a->B * a->H * keys * wide;
    sizes[2] = n * (pairs(a) + wide) + (n + 1) * (keys + 2 * PANEL);
}

void relative_attention(const Arguments *a, Parallel *parallel, unsigned num_threads) {
    run(lay_out, a, parallel, num_threads);
    run(attend, a, parallel, num_threads);
}
