/* 16 lanes on AVX-512 with VNNI, and with BF16 where the CPU has it. See vec.h for what each name means. */
#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vw;

#define NS_TILE_QUERIES 4
#define NS_TILE_BLOCKS 4
#define NS_TILES 2
#define NS_TILE_ROWS 4
#define NS_TILE_DIMS 4
#define NS_DOT8_BIASED 1
#define NS_FAR_BELOW 4

NS_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
NS_INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
NS_INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
NS_INLINE void vf_store_n(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
NS_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
NS_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
NS_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
NS_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
NS_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
NS_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
NS_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
NS_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
NS_INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

NS_INLINE float vf_hadd(vf x)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

NS_INLINE float vf_hmax(vf x)
{
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

NS_INLINE int vf_any_ge(vf x, float least) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0; }

/* 2^n for whole n in -127..128, exactly 0 at -127 and infinite at 128. */
NS_INLINE vf vf_pow2(vf n)
{
    vi biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

/* Keeps lanes lo <= i < hi, sets the others to `other`. */
NS_INLINE vf vf_keep(vf x, int lo, int hi, float other)
{
    __mmask16 mask = (__mmask16)(((1u << hi) - 1) & ~((1u << lo) - 1));
    return _mm512_mask_blend_ps(mask, _mm512_set1_ps(other), x);
}

NS_INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

NS_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

#if defined(NS_ISA_AVX512_BF16)
NS_INLINE void vf_store_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
#else
/* Nearest even, NaN kept quiet. */
NS_INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

NS_INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
NS_INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
NS_INLINE vf vi_float(vi x) { return _mm512_cvtepi32_ps(x); }

NS_INLINE vw vw_load(const void *p) { return _mm512_loadu_si512(p); }
NS_INLINE vw vw_low(vw x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
NS_INLINE vw vw_high(vw x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

NS_INLINE vi vi_dot8(vi acc, vw w, int32_t x) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)); }

#if defined(NS_ISA_AVX512_BF16)
typedef uint16_t ns_operand;

NS_INLINE void vf_store_operand(ns_operand *p, vf x) { vf_store_bf16(p, x); }

NS_INLINE vf vf_dot_bf16(vf acc, vw w, uint32_t pair)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int32_t)pair));
}

NS_INLINE vf vf_dot_pair(vf acc, vw w, const ns_operand *pair)
{
    uint32_t both;
    memcpy(&both, pair, sizeof both);
    return vf_dot_bf16(acc, w, both);
}
#else
typedef float ns_operand;

NS_INLINE void vf_store_operand(ns_operand *p, vf x) { vf_store(p, x); }

NS_INLINE vf vf_dot_pair(vf acc, vw w, const ns_operand *pair)
{
    __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    __m512 second = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int32_t)0xffff0000u)));
    return _mm512_fmadd_ps(second, _mm512_set1_ps(pair[1]), _mm512_fmadd_ps(first, _mm512_set1_ps(pair[0]), acc));
}

NS_INLINE vf vf_dot_bf16(vf acc, vw w, uint32_t pair)
{
    const uint32_t bits[2] = {pair << 16, pair & 0xffff0000u};
    float wide[2];
    memcpy(wide, bits, sizeof wide);
    return vf_dot_pair(acc, w, wide);
}
#endif

NS_INLINE vw vw_and(vw x, uint32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32((int32_t)mask)); }
NS_INLINE void ns_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
NS_INLINE void ns_prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* round(x * scale) as int8 for 32 values in -127.5..127.5, and the sums of either half. */
NS_INLINE void ns_round32(const float *x, float scale, int8_t *q, int32_t sums[2])
{
    for (int half = 0; half < 2; half++) {
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * half), _mm512_set1_ps(scale));
        __m512i i = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(scaled, scaled, _CMP_ORD_Q), scaled);
        _mm_storeu_si128((__m128i *)(q + 16 * half), _mm512_cvtepi32_epi8(i));
        sums[half] = _mm512_reduce_add_epi32(i);
    }
}

/* The largest magnitude of 32 values; NaN if there is one. */
NS_INLINE float ns_amax32(const float *x)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
    __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude);
    uint32_t bits = (uint32_t)_mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}
