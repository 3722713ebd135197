/* Activations as int8 groups on AVX-512, several rows at once: what is one number a row fills a vector. */
#ifndef NS_QUANTISE_AVX512_H
#define NS_QUANTISE_AVX512_H

#include "kernels.h"
#include "vec.h"

/* From vectors a and b of each pair, one that has in every 128 bits two lanes of a's sum or maximum and two of b's. */
#define NS_HALVE(combine, a, b) combine(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
#define NS_QUARTER(combine, a, b) combine(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))

/* Lane i is the maximum over vector i, as signed integers. */
NS_INLINE vi ns_max_of_each(vi *a)
{
    vi quarters[4], halves[2];
    for (int i = 0; i < 4; i++) {
        vi *four = a + 4 * i, low = NS_HALVE(_mm512_max_epi32, four[0], four[1]);
        vi high = NS_HALVE(_mm512_max_epi32, four[2], four[3]);
        quarters[i] = NS_QUARTER(_mm512_max_epi32, low, high);
    }
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(quarters[2 * i], quarters[2 * i + 1], 0x88),
                                     _mm512_shuffle_i32x4(quarters[2 * i], quarters[2 * i + 1], 0xdd));
    return _mm512_max_epi32(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88),
                            _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd));
}

NS_INLINE vi ns_round16(const float *x, float scale)
{
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(scale)));
}

/* 32 values of each of `count` rows (a multiple of 2, 16 at most), `stride` floats apart, as lanes `lane`.. of a group.
 * Returns 0, having stored nothing, if one of them is not finite. */
NS_INLINE int ns_quantise_lanes(ns_qgroup *out, int lane, const float *x, int64_t stride, const int count)
{
    const __mmask16 rows = (__mmask16)((1u << count) - 1);
    const vi magnitude = _mm512_set1_epi32(0x7fffffff);
    vi a[16];
    for (int i = 0; i < 16; i++) {
        if (i >= count) {
            a[i] = vi_zero();
            continue;
        }
        vi low = _mm512_and_si512(_mm512_loadu_si512(x + i * stride), magnitude);
        a[i] = _mm512_max_epi32(low, _mm512_and_si512(_mm512_loadu_si512(x + i * stride + 16), magnitude));
    }
    const vi top = ns_max_of_each(a);
    if (_mm512_cmpge_epi32_mask(top, _mm512_set1_epi32(0x7f800000))) return 0;
    const vf amax = _mm512_castsi512_ps(top), dx = vf_div(amax, vf_set1(127.0f));
    const __mmask16 some = _mm512_cmp_ps_mask(amax, vf_set1(1e-30f), _CMP_GE_OQ);
    float inverse[16];
    vf_store(inverse, _mm512_maskz_div_ps(some, vf_set1(127.0f), amax));

    /* Packing goes by 128 bits: four bytes each of the first half of row i, its second half, and those of row i + 1. */
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    vi fours[8];
    for (int i = 0; i < 16; i += 2) {
        if (i >= count) {
            fours[i / 2] = vi_zero();
            continue;
        }
        const float *row = x + i * stride, *next = row + stride;
        vi words = _mm512_packs_epi32(ns_round16(row, inverse[i]), ns_round16(row + 16, inverse[i]));
        vi others = _mm512_packs_epi32(ns_round16(next, inverse[i + 1]), ns_round16(next + 16, inverse[i + 1]));
        vi bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words, others));
        _mm512_storeu_si512(out->q[lane + i], bytes);
        fours[i / 2] = _mm512_dpbusd_epi32(vi_zero(), _mm512_set1_epi8(1), bytes);
    }
    /* Sums of row 2i in 128 bits 0 (first half) and 1, of row 2i + 1 in 2 and 3. */
    vi sums[2];
    for (int i = 0; i < 2; i++) {
        vi *four = fours + 4 * i, low = NS_HALVE(_mm512_add_epi32, four[0], four[1]);
        vi high = NS_HALVE(_mm512_add_epi32, four[2], four[3]);
        sums[i] = NS_QUARTER(_mm512_add_epi32, low, high);
    }
    const vi of_first = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
    const vi first = _mm512_permutex2var_epi32(sums[0], of_first, sums[1]);
    const vi of_second = _mm512_add_epi32(of_first, _mm512_set1_epi32(4));
    const vi sum = _mm512_add_epi32(first, _mm512_permutex2var_epi32(sums[0], of_second, sums[1]));
    const vi all128 = _mm512_sub_epi32(vi_zero(), _mm512_slli_epi32(sum, 7));
    _mm512_mask_storeu_ps(out->dx + lane, rows, dx);
    _mm512_mask_storeu_ps(out->sx + lane, rows, vf_mul(dx, vi_float(sum)));
    _mm512_mask_storeu_epi32(out->z8 + lane, rows, _mm512_sub_epi32(vi_zero(), _mm512_slli_epi32(sum, 3)));
    _mm512_mask_storeu_epi32(out->z128 + lane, rows, all128);
    _mm512_mask_storeu_epi32(out->z128_first + lane, rows, _mm512_sub_epi32(vi_zero(), _mm512_slli_epi32(first, 7)));
    return 1;
}

#endif
