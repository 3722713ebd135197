/* Sixteen lanes of float, int32 or 64 bytes of weights, on whatever instruction set this file is compiled for.
 *
 * vf  16 floats        vi  16 int32        vw  64 bytes: 16 lanes of 4 weights, or of 2 bf16
 * vf_fma(a, b, c) = a * b + c. vf_max and vf_min return b where a comparison is false, so a NaN in b survives.
 * vf_hadd adds lanes i and i + 8, then i and i + 4, i + 2, i + 1: one order on every path.
 * vi_dot8: acc + the dot product of each lane's 4 weights with 4 int8, exact, weights stored with 128 added; where
 * NS_DOT8_BIASED the caller starts from what that adds. vi_dot4_group: of a group's 32 weights in 0..15 with 32 int8.
 * vf_dot_bf16: with a pair of bf16.
 * NS_TILE_*: how many accumulators of each kind the register file holds.
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

#if defined(NS_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(NS_ISA_AVX2)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
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
