/* What the kernels in C share: numbers and their bits, an exponential that vectorizes, threads that take tasks. */

#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE long least(long x, long y) { return x < y ? x : y; }
INLINE long most(long x, long y) { return x > y ? x : y; }

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The nearest bfloat16, ties to even; a NaN must not be rounded up to infinity. */
INLINE uint32_t half_of(float x) {
    uint32_t bits = bits_of(x);
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

/* exp(x) within 1e-7 of the value, as 2^n exp(z) with |z| <= log(2) / 2; 0 below -88.1, infinite above 88.8. */
INLINE float exponential(float x) {
    /* 1.5 * 2^23 + 127: adding it rounds to an integer n, and leaves in the low bits n + 127, the exponent of 2^n */
    const float shift = 0x1.8000fep23f;
    /* at the limits the power of two becomes 0 and infinity; both comparisons let a NaN pass */
    x = x < -88.1f ? -88.1f : x;
    x = x > 88.8f ? 88.8f : x;
    float shifted = x * 0x1.715476p0f + shift;
    float n = shifted - shift;
    float z = x - n * 0x1.62e4p-1f; /* log(2) in two parts, the first short enough for an exact product */
    z = z - n * 0x1.7f7d1cp-20f;
    /* of the polynomials that start with 1 + z, the one with the least relative error, 3e-9 */
    float q = 0x1.6a241ap-10f;
    q = q * z + 0x1.1239f2p-7f;
    q = q * z + 0x1.5558f2p-5f;
    q = q * z + 0x1.555492p-3f;
    q = q * z + 0x1.fffffcp-2f;
    q = q * z + 1.0f;
    q = q * z + 1.0f;
    return q * float_of(bits_of(shifted) << 23);
}

/* Threads take tasks in turn: right for a team of any size, and a busy core holds no other up. */
typedef struct {
    const void *arguments;
    atomic_long next_task, next_thread;
} Work;

/* GOMP_parallel of the OpenMP runtime that torch uses, so that both share its threads; may be NULL. */
typedef void Parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);

INLINE void run(void (*body)(void *), const void *arguments, Parallel *parallel, unsigned num_threads) {
    Work work = {.arguments = arguments};
    if (parallel && num_threads > 1) {
        parallel(body, &work, num_threads, 0);
    } else {
        body(&work);
    }
}
