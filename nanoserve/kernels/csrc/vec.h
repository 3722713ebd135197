/* Sixteen lanes of float, int32 or 64 bytes of weights, on whatever instruction set this file is compiled for.
 *
 * vf  16 floats        vi  16 int32        vw  64 bytes: 16 lanes of 4 weights, or of 2 bf16
 * vf_fma(a, b, c) = a * b + c. vf_max and vf_min return b where a comparison is false, so a NaN in b survives.
 * vf_any_ge: whether a lane is at least `least`; NaN is not.
 * vf_hadd adds lanes i and i + 8, then i and i + 4, i + 2, i + 1: one order on every path.
 * vi_dot8_rows(sum, quants, tiles, from, to, q, count) adds to sum[t * count + i] the dot product of words from..to of
 * each lane's 32 weights at quants[t] with those of q[i], for `count` <= NS_TILE_ROWS rows and `tiles` <= NS_TILES, and
 * exactly; weights are stored with 128 added, and where NS_DOT8_BIASED the caller starts from what that adds.
 * vi_dot4_rows: all 8 words, weights in 0..15.
 * ns_operand is what attention holds queries and probabilities in; vf_dot_pair(acc, w, x) adds the products of a pair
 * of them with pairs of bf16, the first of each first. vf_dot_bf16: with a pair of bf16.
 * NS_TILE_*: how many accumulators of each kind the register file holds; NS_TILES: of how many tiles of a linear.
 * ns_prefetch fetches a line into the first-level cache, ns_prefetch_far into the second: more can be under way there.
 * NS_FAR_BELOW: a linear's passes of fewer rows leave the first-level cache to the core's own prefetcher.
 */
#ifndef NS_VEC_H
#define NS_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The generic vectors are loops: inlined everywhere, they would take the compiler longer than all the rest. */
#if defined(NS_ISA_AVX512) || defined(NS_ISA_AVX2)
#define NS_INLINE static inline __attribute__((always_inline, unused))
#else
#define NS_INLINE static inline __attribute__((unused))
#endif

NS_INLINE int32_t ns_four(const int8_t *q)
{
    int32_t out;
    memcpy(&out, q, sizeof out);
    return out;
}

#if defined(NS_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(NS_ISA_AVX2)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
#endif

#if !defined(NS_ISA_AVX2) /* which has too few registers for this */
/* Rows take turns, since each adds up one long chain, and a row's word is loaded once for all tiles: loads are what a
 * core runs out of. */
NS_INLINE void vi_dot_rows(vi *sum, const vw *w, const int tiles, int v, const int8_t (*q)[32], const int count)
{
    for (int i = 0; i < count; i++)
        for (int t = 0; t < tiles; t++) sum[t * count + i] = vi_dot8(sum[t * count + i], w[t], ns_four(q[i] + 4 * v));
}

NS_INLINE void vi_dot8_rows(vi *sum, const uint8_t *const *quants, const int tiles, int from, int to,
                            const int8_t (*q)[32], const int count)
{
    vw w[NS_TILES];
    for (int v = from; v < to; v++) {
        for (int t = 0; t < tiles; t++) w[t] = vw_load(quants[t] + 64 * v);
        vi_dot_rows(sum, w, tiles, v, q, count);
    }
}

NS_INLINE void vi_dot4_rows(vi *sum, const uint8_t *const *quants, const int tiles, const int8_t (*q)[32],
                            const int count)
{
    vw w[NS_TILES];
    for (int v = 0; v < 8; v++) {
        for (int t = 0; t < tiles; t++) {
            vw both = vw_load(quants[t] + 64 * (v % 4));
            w[t] = v < 4 ? vw_low(both) : vw_high(both);
        }
        vi_dot_rows(sum, w, tiles, v, q, count);
    }
}
#endif

/* 2^x to 2e-8: degree 6 interpolation of 2^f on [-1/2, 1/2] at Chebyshev's nodes; 0 below -126.5, NaN stays NaN. */
NS_INLINE vf vf_exp2(vf x)
{
    x = vf_min(vf_set1(128.0f), vf_max(vf_set1(-127.0f), x));
    vf n = vf_round(x), f = vf_sub(x, n);
    vf p = vf_set1(0x1.444000p-13f);
    p = vf_fma(p, f, vf_set1(0x1.5f48c0p-10f));
    p = vf_fma(p, f, vf_set1(0x1.3b2a1cp-7f));
    p = vf_fma(p, f, vf_set1(0x1.c6aeccp-5f));
    p = vf_fma(p, f, vf_set1(0x1.ebfbe0p-3f));
    p = vf_fma(p, f, vf_set1(0x1.62e430p-1f));
    p = vf_fma(p, f, vf_set1(1.0f));
    return vf_mul(p, vf_pow2(n));
}

NS_INLINE float ns_exp2(float x)
{
    float lanes[16];
    vf_store(lanes, vf_exp2(vf_set1(x)));
    return lanes[0];
}

#endif
