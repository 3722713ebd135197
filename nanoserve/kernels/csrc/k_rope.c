/* Rotary positions and the K/V write. A job is one row. The layout of a K/V block is in ns_abi.h (ns_rope_rec). */
#include "kernels.h"
#include "vec.h"

/* One head: optional RMS norm, then (a, b) -> (a cos - b sin, b cos + a sin) over the two halves. */
NS_INLINE void ns_rotate(const float *x, const float *norm, float eps, const float *cos, const float *sin, int dim,
                         float *out)
{
    const int half = dim / 2;
    float line[NS_MAX_HEAD_DIM];
    memcpy(line, x, (size_t)dim * sizeof *line);
    if (norm) {
        vf squares = vf_set1(0.0f);
        for (int i = 0; i < dim; i += 16) {
            vf v = vf_load_n(line + i, dim - i < 16 ? dim - i : 16);
            squares = vf_fma(v, v, squares);
        }
        vf scale = vf_set1(1.0f / sqrtf(vf_hadd(squares) / (float)dim + eps));
        for (int i = 0; i < dim; i += 16) {
            int n = dim - i < 16 ? dim - i : 16;
            vf_store_n(line + i, vf_mul(vf_mul(vf_load_n(line + i, n), scale), vf_load_n(norm + i, n)), n);
        }
    }
    for (int i = 0; i < half; i += 16) {
        int n = half - i < 16 ? half - i : 16;
        vf a = vf_load_n(line + i, n), b = vf_load_n(line + half + i, n);
        vf c = vf_load_n(cos + i, n), s = vf_load_n(sin + i, n);
        vf_store_n(out + i, vf_sub(vf_mul(a, c), vf_mul(b, s)), n);
        vf_store_n(out + half + i, vf_fma(b, c, vf_mul(a, s)), n);
    }
}

NS_INLINE void ns_to_bf16(const float *x, int count, uint16_t *out)
{
    for (int i = 0; i < count; i += 16) {
        uint16_t lanes[16];
        int n = count - i < 16 ? count - i : 16;
        vf_store_bf16(lanes, vf_load_n(x + i, n));
        memcpy(out + i, lanes, (size_t)n * sizeof *lanes);
    }
}

void ns_run_rope(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_rope_rec *r = &record->rope;
    const int dim = r->head_dim, half = dim / 2;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        float *q = r->qkv + row * r->qkv_ld;
        const float *k = q + (int64_t)r->heads * dim, *v = k + (int64_t)r->kv_heads * dim;
        const float *cos = r->cos + r->positions[row] * half, *sin = r->sin + r->positions[row] * half;
        for (int32_t head = 0; head < r->heads; head++)
            ns_rotate(q + head * dim, r->q_norm, r->eps, cos, sin, dim, q + head * dim);
        const int64_t block = r->write_slots[row] / NS_BLOCK, key = r->write_slots[row] % NS_BLOCK;
        for (int32_t head = 0; head < r->kv_heads; head++) {
            float rotated[NS_MAX_HEAD_DIM];
            uint16_t halves[NS_MAX_HEAD_DIM];
            const int64_t start = (block * r->kv_heads + head) * dim * NS_BLOCK;
            ns_rotate(k + head * dim, r->k_norm, r->eps, cos, sin, dim, rotated);
            ns_to_bf16(rotated, dim, halves);
            uint16_t *keys = r->keys + start + key * 2;
            for (int i = 0; i < half; i++) memcpy(keys + i * 2 * NS_BLOCK, halves + 2 * i, 2 * sizeof *halves);
            ns_to_bf16(v + head * dim, dim, halves);
            uint16_t *values = r->values + start + key / 2 * 2 * dim + key % 2;
            for (int i = 0; i < dim; i++) values[2 * i] = halves[i];
        }
    }
}
