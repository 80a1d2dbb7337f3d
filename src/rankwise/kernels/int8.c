/* Rows of floats as bytes and back, around a product of bytes; `int8.py` says what it computes and calls it. */

#include "native.h"

enum { CHUNK = 16 }; /* rows of a task */

typedef struct {
    long N, D;
    long stride, bytes_stride; /* from row to row */
    float *p_x;
    const float *p_bias; /* may be NULL */
    float *p_scale;
    uint8_t *p_bytes;
} Arguments;

static long take_rows(Work *work, long *last) {
    const long first = atomic_fetch_add(&work->next_task, 1) * CHUNK;
    *last = least(first + CHUNK, ((const Arguments *)work->arguments)->N);
    return first;
}

static void round_tasks(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    const long D = a->D;
    for (long i, last; (i = take_rows(work, &last)) < a->N;) {
        for (; i < last; i++) {
            const float *restrict x = a->p_x + i * a->stride;
            uint8_t *restrict bytes = a->p_bytes + i * a->bytes_stride;
            /* of numbers without a sign, larger ones have larger bits, and a NaN the largest */
            uint32_t max_bits = 0;
            _Pragma("omp simd reduction(max : max_bits)") for (long j = 0; j < D; j++) {
                const uint32_t bits = bits_of(x[j]) & 0x7fffffff;
                max_bits = bits > max_bits ? bits : max_bits;
            }
            const float largest = float_of(max_bits) / 127;
            /* a row of zeros has some scale too */
            const float scale = largest < 0x1p-126f ? 0x1p-126f : largest, inverse = 1 / scale;
            a->p_scale[i] = scale;
            _Pragma("omp simd") for (long j = 0; j < D; j++) {
                /* 1.5 * 2^23 + 128: adding it rounds to an integer, ties to even, and leaves it in the low bits */
                bytes[j] = (uint8_t)bits_of(x[j] * inverse + 0x1.8001p23f);
            }
        }
    }
}

static void scale_tasks(void *data) {
    Work *work = data;
    const Arguments *a = work->arguments;
    for (long i, last; (i = take_rows(work, &last)) < a->N;) {
        for (; i < last; i++) {
            float *restrict x = a->p_x + i * a->stride;
            const float *restrict bias = a->p_bias;
            const float scale = a->p_scale[i];
            if (bias) {
                _Pragma("omp simd") for (long j = 0; j < a->D; j++) x[j] = x[j] * scale + bias[j];
            } else {
                _Pragma("omp simd") for (long j = 0; j < a->D; j++) x[j] *= scale;
            }
        }
    }
}

void round_rows(const Arguments *a, Parallel *parallel, unsigned num_threads) {
    run(round_tasks, a, parallel, num_threads);
}

void scale_rows(const Arguments *a, Parallel *parallel, unsigned num_threads) {
    run(scale_tasks, a, parallel, num_threads);
}
