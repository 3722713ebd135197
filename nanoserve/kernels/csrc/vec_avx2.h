/* 16 lanes as two registers of AVX2, FMA and F16C. See vec.h for what each name means. */
#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vw;
typedef float ns_operand;

#define NS_TILE_QUERIES 4
#define NS_TILE_BLOCKS 1
#define NS_TILES 1
#define NS_TILE_ROWS 4
#define NS_TILE_DIMS 1
#define NS_DOT8_BIASED 0
#define NS_FAR_BELOW 0

/* Emits nothing. The compiler would compute products long before it has registers for them. */
#define NS_IN_ORDER(a, b) __asm__ volatile("" : "+x"(a), "+x"(b))

NS_INLINE vf vf_pair(__m256 a, __m256 b) { return (vf){a, b}; }
NS_INLINE vi vi_pair(__m256i a, __m256i b) { return (vi){a, b}; }

NS_INLINE vf vf_load(const float *p) { return vf_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
NS_INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }

NS_INLINE vf vf_load_n(const float *p, int n)
{
    if (n == 16) return vf_load(p);
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return vf_load(lanes);
}

NS_INLINE void vf_store_n(float *p, vf x, int n)
{
    float lanes[16];
    vf_store(n == 16 ? p : lanes, x);
    if (n < 16) memcpy(p, lanes, (size_t)n * sizeof *p);
}

NS_INLINE vf vf_set1(float x) { return vf_pair(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
NS_INLINE vf vf_add(vf x, vf y) { return vf_pair(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
NS_INLINE vf vf_sub(vf x, vf y) { return vf_pair(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
NS_INLINE vf vf_mul(vf x, vf y) { return vf_pair(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
NS_INLINE vf vf_div(vf x, vf y) { return vf_pair(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
NS_INLINE vf vf_max(vf x, vf y) { return vf_pair(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
NS_INLINE vf vf_min(vf x, vf y) { return vf_pair(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }

NS_INLINE vf vf_fma(vf x, vf y, vf z)
{
    return vf_pair(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}

NS_INLINE vf vf_round(vf x)
{
    return vf_pair(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                   _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

NS_INLINE float vf_hadd(vf x)
{
    __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

NS_INLINE float vf_hmax(vf x)
{
    __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

NS_INLINE int vf_any_ge(vf x, float least)
{
    const __m256 bound = _mm256_set1_ps(least);
    __m256 any = _mm256_or_ps(_mm256_cmp_ps(x.a, bound, _CMP_GE_OQ), _mm256_cmp_ps(x.b, bound, _CMP_GE_OQ));
    return _mm256_movemask_ps(any) != 0;
}

NS_INLINE __m256 ns_pow2_8(__m256 n)
{
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

NS_INLINE vf vf_pow2(vf n) { return vf_pair(ns_pow2_8(n.a), ns_pow2_8(n.b)); }

NS_INLINE __m256 ns_keep_8(__m256 x, int lo, int hi, float other)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane);
    __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(other), x, _mm256_castsi256_ps(_mm256_andnot_si256(below, inside)));
}

NS_INLINE vf vf_keep(vf x, int lo, int hi, float other)
{
    return vf_pair(ns_keep_8(x.a, lo, hi, other), ns_keep_8(x.b, lo - 8, hi - 8, other));
}

NS_INLINE vf vf_load_f16(const uint16_t *p)
{
    return vf_pair(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}

NS_INLINE __m256 ns_load_bf16_8(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

NS_INLINE vf vf_load_bf16(const uint16_t *p) { return vf_pair(ns_load_bf16_8(p), ns_load_bf16_8(p + 8)); }

/* Nearest even, NaN kept quiet; the upper halves of each lane. */
NS_INLINE __m256i ns_round_bf16_8(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_srli_epi32(rounded, 16);
}

NS_INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    __m256i packed = _mm256_packus_epi32(ns_round_bf16_8(x.a), ns_round_bf16_8(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

NS_INLINE vi vi_zero(void) { return vi_pair(_mm256_setzero_si256(), _mm256_setzero_si256()); }
NS_INLINE vi vi_set1(int32_t x) { return vi_pair(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
NS_INLINE vf vi_float(vi x) { return vf_pair(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }

NS_INLINE vw vw_load(const void *p)
{
    return vi_pair(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1));
}

/* A whole group is added up in int16: 16 products of 15 * 127 at most are 30480. The rows take turns at each vector of
 * weights, so that sums and weights stay in registers. */
NS_INLINE void vi_dot4_rows(vi *sum, const uint8_t *const *quants, const int tiles, const int8_t (*q)[32],
                            const int count)
{
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    (void)tiles;
    __m256i a[NS_TILE_ROWS], b[NS_TILE_ROWS];
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) {
        vw both = vw_load(quants[0] + 64 * (v / 2));
        if (v % 2) both = vi_pair(_mm256_srli_epi16(both.a, 4), _mm256_srli_epi16(both.b, 4));
        both = vi_pair(_mm256_and_si256(both.a, nibble), _mm256_and_si256(both.b, nibble));
        for (int i = 0; i < count; i++) {
            __m256i x = _mm256_set1_epi32(ns_four(q[i] + 4 * (v / 2) + 16 * (v % 2)));
            __m256i dot_a = _mm256_maddubs_epi16(both.a, x), dot_b = _mm256_maddubs_epi16(both.b, x);
            a[i] = v ? _mm256_add_epi16(a[i], dot_a) : dot_a;
            b[i] = v ? _mm256_add_epi16(b[i], dot_b) : dot_b;
            NS_IN_ORDER(a[i], b[i]);
        }
    }
    for (int i = 0; i < count; i++) {
        sum[i].a = _mm256_add_epi32(sum[i].a, _mm256_madd_epi16(a[i], ones));
        sum[i].b = _mm256_add_epi32(sum[i].b, _mm256_madd_epi16(b[i], ones));
    }
}

/* Weights are stored with 128 added. Here they are taken signed, and their sign moves to x: 128 * 127 * 2 < 2^15. */
NS_INLINE void vi_dot8_rows(vi *sum, const uint8_t *const *quants, const int tiles, int from, int to,
                            const int8_t (*q)[32], const int count)
{
    const __m256i ones = _mm256_set1_epi16(1), sign = _mm256_set1_epi8((char)0x80);
    (void)tiles;
#pragma GCC unroll 8
    for (int v = from; v < to; v++) {
        __m256i a = _mm256_xor_si256(vw_load(quants[0] + 64 * v).a, sign), size_a = _mm256_abs_epi8(a);
        __m256i b = _mm256_xor_si256(vw_load(quants[0] + 64 * v).b, sign), size_b = _mm256_abs_epi8(b);
        for (int i = 0; i < count; i++) {
            __m256i x = _mm256_set1_epi32(ns_four(q[i] + 4 * v));
            __m256i dot_a = _mm256_madd_epi16(_mm256_maddubs_epi16(size_a, _mm256_sign_epi8(x, a)), ones);
            __m256i dot_b = _mm256_madd_epi16(_mm256_maddubs_epi16(size_b, _mm256_sign_epi8(x, b)), ones);
            sum[i] = vi_pair(_mm256_add_epi32(sum[i].a, dot_a), _mm256_add_epi32(sum[i].b, dot_b));
            NS_IN_ORDER(sum[i].a, sum[i].b);
        }
    }
}

NS_INLINE __m256 ns_dot_bf16_8(__m256 acc, __m256i w, __m256 even, __m256 odd)
{
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
    __m256 second = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int32_t)0xffff0000u)));
    return _mm256_fmadd_ps(second, odd, _mm256_fmadd_ps(first, even, acc));
}

NS_INLINE vf vf_dot_bf16(vf acc, vw w, uint32_t pair)
{
    __m256i both = _mm256_set1_epi32((int32_t)pair);
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int32_t)0xffff0000u)));
    return vf_pair(ns_dot_bf16_8(acc.a, w.a, even, odd), ns_dot_bf16_8(acc.b, w.b, even, odd));
}

NS_INLINE void vf_store_operand(ns_operand *p, vf x) { vf_store(p, x); }

NS_INLINE vf vf_dot_pair(vf acc, vw w, const ns_operand *pair)
{
    __m256 even = _mm256_broadcast_ss(pair), odd = _mm256_broadcast_ss(pair + 1);
    return vf_pair(ns_dot_bf16_8(acc.a, w.a, even, odd), ns_dot_bf16_8(acc.b, w.b, even, odd));
}

NS_INLINE vw vw_and(vw x, uint32_t mask)
{
    __m256i m = _mm256_set1_epi32((int32_t)mask);
    return vi_pair(_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m));
}

NS_INLINE void ns_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
NS_INLINE void ns_prefetch_far(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

/* The rounded products as int32; 0 for NaN, whose group is NaN by its scale. */
NS_INLINE __m256i ns_round8(const float *x, __m256 scale)
{
    __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x), scale);
    __m256i number = _mm256_castps_si256(_mm256_cmp_ps(scaled, scaled, _CMP_ORD_Q));
    return _mm256_and_si256(_mm256_cvtps_epi32(scaled), number);
}

NS_INLINE void ns_round32(const float *x, float scale, int8_t *q, int32_t sums[2])
{
    const __m256 by = _mm256_set1_ps(scale);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing goes by 128-bit halves */
    __m256i low = _mm256_packs_epi32(ns_round8(x, by), ns_round8(x + 8, by));
    __m256i high = _mm256_packs_epi32(ns_round8(x + 16, by), ns_round8(x + 24, by));
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256((__m256i *)q, bytes);
    __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    __m256i twos = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    __m256i all = _mm256_add_epi32(twos, _mm256_shuffle_epi32(twos, 0xb1));
    sums[0] = _mm256_extract_epi32(all, 0);
    sums[1] = _mm256_extract_epi32(all, 4);
}

/* The largest magnitude of 32 values; NaN if there is one, for as an integer it is larger than every number. */
NS_INLINE float ns_amax32(const float *x)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++)
        top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 8 * i)), magnitude));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    __m128i one = _mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(one));
}
