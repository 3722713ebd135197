/* 16 lanes in plain C11, for any machine. See vec.h for what each name means.
 *
 * Where the compiler has no fused multiply-add to emit, vf_fma rounds twice: a library call per lane costs too much.
 */
typedef struct { float f[16]; } vf;
typedef struct { int32_t i[16]; } vi;
typedef struct { uint8_t b[64]; } vw;
typedef float ns_operand;

#define NS_TILE_QUERIES 1
#define NS_TILE_BLOCKS 1
#define NS_TILES 1
#define NS_TILE_ROWS 1
#define NS_TILE_DIMS 1
#define NS_DOT8_BIASED 1
#define NS_FAR_BELOW 0
#define NS_EACH(expression) for (int i = 0; i < 16; i++) out.f[i] = (expression); return out

NS_INLINE float ns_fma1(float a, float b, float c)
{
#ifdef __FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

NS_INLINE float ns_float_of(uint32_t bits)
{
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

NS_INLINE uint32_t ns_bits_of(float x)
{
    uint32_t out;
    memcpy(&out, &x, sizeof out);
    return out;
}

NS_INLINE vf vf_load(const float *p) { vf out; memcpy(&out, p, sizeof out); return out; }
NS_INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
NS_INLINE vf vf_load_n(const float *p, int n) { vf out; NS_EACH(i < n ? p[i] : 0.0f); }
NS_INLINE void vf_store_n(float *p, vf x, int n) { memcpy(p, &x, (size_t)n * sizeof *p); }
NS_INLINE vf vf_set1(float x) { vf out; NS_EACH(x); }
NS_INLINE vf vf_add(vf a, vf b) { vf out; NS_EACH(a.f[i] + b.f[i]); }
NS_INLINE vf vf_sub(vf a, vf b) { vf out; NS_EACH(a.f[i] - b.f[i]); }
NS_INLINE vf vf_mul(vf a, vf b) { vf out; NS_EACH(a.f[i] * b.f[i]); }
NS_INLINE vf vf_div(vf a, vf b) { vf out; NS_EACH(a.f[i] / b.f[i]); }
NS_INLINE vf vf_fma(vf a, vf b, vf c) { vf out; NS_EACH(ns_fma1(a.f[i], b.f[i], c.f[i])); }
NS_INLINE vf vf_max(vf a, vf b) { vf out; NS_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
NS_INLINE vf vf_min(vf a, vf b) { vf out; NS_EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }

/* Nearest even for |x| < 2^22, by the addition that leaves no fraction bits. */
NS_INLINE vf vf_round(vf a) { vf out; NS_EACH((a.f[i] + 12582912.0f) - 12582912.0f); }
NS_INLINE vf vf_keep(vf x, int lo, int hi, float other) { vf out; NS_EACH(i >= lo && i < hi ? x.f[i] : other); }

NS_INLINE vf vf_pow2(vf n)
{
    vf out;
    NS_EACH(n.f[i] == n.f[i] ? ns_float_of((uint32_t)((int32_t)n.f[i] + 127) << 23) : n.f[i]);
}

NS_INLINE float vf_hadd(vf x)
{
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x.f[i] += x.f[i + width];
    return x.f[0];
}

NS_INLINE float vf_hmax(vf x)
{
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x.f[i] = x.f[i] > x.f[i + width] ? x.f[i] : x.f[i + width];
    return x.f[0];
}

NS_INLINE int vf_any_ge(vf x, float least)
{
    int any = 0;
    for (int i = 0; i < 16; i++) any |= x.f[i] >= least;
    return any;
}

NS_INLINE float ns_half(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return ns_float_of(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return ns_float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24 */
    return sign ? -tiny : tiny;
}

NS_INLINE vf vf_load_f16(const uint16_t *p) { vf out; NS_EACH(ns_half(p[i])); }
NS_INLINE vf vf_load_bf16(const uint16_t *p) { vf out; NS_EACH(ns_float_of((uint32_t)p[i] << 16)); }

NS_INLINE void vf_store_bf16(uint16_t *p, vf x)
{
    for (int i = 0; i < 16; i++) {
        uint32_t bits = ns_bits_of(x.f[i]);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        p[i] = (uint16_t)(x.f[i] == x.f[i] ? rounded : (bits >> 16) | 0x40);
    }
}

NS_INLINE vi vi_zero(void) { return (vi){{0}}; }
NS_INLINE vi vi_set1(int32_t x) { vi out; for (int i = 0; i < 16; i++) out.i[i] = x; return out; }
NS_INLINE vf vi_float(vi x) { vf out; NS_EACH((float)x.i[i]); }

NS_INLINE vw vw_load(const void *p) { vw out; memcpy(&out, p, sizeof out); return out; }
NS_INLINE vw vw_low(vw x) { for (int i = 0; i < 64; i++) x.b[i] &= 15; return x; }
NS_INLINE vw vw_high(vw x) { for (int i = 0; i < 64; i++) x.b[i] >>= 4; return x; }

NS_INLINE vi vi_dot8(vi acc, vw w, int32_t x)
{
    int8_t v[4];
    memcpy(v, &x, sizeof v);
    for (int i = 0; i < 16; i++)
        acc.i[i] += w.b[4 * i] * v[0] + w.b[4 * i + 1] * v[1] + w.b[4 * i + 2] * v[2] + w.b[4 * i + 3] * v[3];
    return acc;
}

NS_INLINE void vf_store_operand(ns_operand *p, vf x) { vf_store(p, x); }

NS_INLINE vf vf_dot_pair(vf acc, vw w, const ns_operand *pair)
{
    uint32_t lanes[16];
    memcpy(lanes, &w, sizeof lanes);
    for (int i = 0; i < 16; i++) {
        float sum = ns_fma1(ns_float_of(lanes[i] << 16), pair[0], acc.f[i]);
        acc.f[i] = ns_fma1(ns_float_of(lanes[i] & 0xffff0000u), pair[1], sum);
    }
    return acc;
}

NS_INLINE vf vf_dot_bf16(vf acc, vw w, uint32_t pair)
{
    const float wide[2] = {ns_float_of(pair << 16), ns_float_of(pair & 0xffff0000u)};
    return vf_dot_pair(acc, w, wide);
}

NS_INLINE vw vw_and(vw x, uint32_t mask)
{
    uint32_t lanes[16];
    memcpy(lanes, &x, sizeof lanes);
    for (int i = 0; i < 16; i++) lanes[i] &= mask;
    memcpy(&x, lanes, sizeof lanes);
    return x;
}

NS_INLINE void ns_prefetch(const void *p) { (void)p; }
NS_INLINE void ns_prefetch_far(const void *p) { (void)p; }

NS_INLINE void ns_round32(const float *x, float scale, int8_t *q, int32_t sums[2])
{
    for (int half = 0; half < 2; half++) {
        sums[half] = 0;
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            float rounded = (x[i] * scale + 12582912.0f) - 12582912.0f;
            q[i] = rounded == rounded ? (int8_t)rounded : 0;
            sums[half] += q[i];
        }
    }
}

NS_INLINE float ns_amax32(const float *x)
{
    uint32_t best = 0;
    for (int i = 0; i < 32; i++) {
        uint32_t bits = ns_bits_of(x[i]) & 0x7fffffffu;
        best = bits > best ? bits : best;
    }
    return ns_float_of(best);
}
