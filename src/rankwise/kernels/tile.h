/* Products of matrices in tiles whose sums fill the registers.

   A number may also stand for two halves (bfloat16) or for four bytes, unsigned in the first matrix and signed in the
   second, whose products are added up at once: sums are floats then, or integers of 32 bits. Numbers lie as floats do. */

#pragma once

#include "native.h"
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 8")

/* ROWS x VECTORS sums, a row of factors and one factor more must fit into the registers. */
#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, VECTORS = 2 };
#elif defined(__ARM_NEON)
enum { LANES = 4, VECTORS = 4 };
#else
enum { LANES = 4, VECTORS = 2 };
#endif
enum { ROWS = 6, PANEL = LANES * VECTORS };

enum { FLOATS, HALVES, BYTES };

#ifdef __AVX512BF16__
enum { HAS_HALVES = 1 };
#else
enum { HAS_HALVES = 0 };
#endif
#ifdef __AVX512VNNI__
enum { HAS_BYTES = 1 };
#else
enum { HAS_BYTES = 0 };
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

INLINE long whole(long n) { return (n + PANEL - 1) / PANEL * PANEL; }
INLINE float pair_of(float x, float y) { return float_of(half_of(x) | half_of(y) << 16); }

INLINE Vector multiply_add(int kind, float x, Vector y, Vector sum) {
#ifdef __AVX512BF16__
    if (kind == HALVES) return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)y);
#endif
#ifdef __AVX512VNNI__
    if (kind == BYTES) return (Vector)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)_mm512_set1_ps(x), (__m512i)y);
#endif
    return sum + x * y;
}

/* c (rows, PANEL) = a (rows, n) b (n, PANEL), or added to it. */
INLINE void tile(int kind, int rows, int add, const float *a, long lda, const float *b, long ldb, float *c, long ldc,
                 long n) {
    Vector sum[ROWS][VECTORS];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            sum[i][v] = add ? *(const Vector *)(c + i * ldc + v * LANES) : (Vector){0};
        }
    }
    for (long k = 0; k < n; k++) {
        Vector row[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) row[v] = *(const Vector *)(b + k * ldb + v * LANES);
        UNROLL for (int i = 0; i < rows; i++) {
            UNROLL for (int v = 0; v < VECTORS; v++) sum[i][v] = multiply_add(kind, a[i * lda + k], row[v], sum[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int v = 0; v < VECTORS; v++) *(Vector *)(c + i * ldc + v * LANES) = sum[i][v];
    }
}

/* The same for up to ROWS rows; the compiler makes a loop of its own for each number. */
INLINE void multiply(int kind, long rows, int add, const float *a, long lda, const float *b, long ldb, float *c, long ldc,
                     long n) {
    switch (rows) {
        case 1: tile(kind, 1, add, a, lda, b, ldb, c, ldc, n); break;
        case 2: tile(kind, 2, add, a, lda, b, ldb, c, ldc, n); break;
        case 3: tile(kind, 3, add, a, lda, b, ldb, c, ldc, n); break;
        case 4: tile(kind, 4, add, a, lda, b, ldb, c, ldc, n); break;
        case 5: tile(kind, 5, add, a, lda, b, ldb, c, ldc, n); break;
        case 6: tile(kind, 6, add, a, lda, b, ldb, c, ldc, n); break;
    }
}
