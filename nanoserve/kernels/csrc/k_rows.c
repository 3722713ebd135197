/* Kernels whose job is one row: embedding, RMS norm, quantisation, gating, gather, remember. */
#include "gate.h"
#include "quantise.h"
#include "weights.h"

void ns_run_embed(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_embed_rec *r = &record->embed;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        int64_t id = r->ids[row];
        if (id < 0) id = r->last_tokens[r->table_rows[row]];
        float *out = r->out + row * r->ld;
        if (id < 0 || id >= r->table.rows)
            memset(out, 0, (size_t)r->table.cols * sizeof *out);
        else
            ns_weight_row(&r->table, id, out);
    }
}

/* One row of a norm, into `line`. */
NS_INLINE void ns_norm_row(const ns_norm_rec *r, int64_t row, float *line)
{
    const int32_t cols = r->cols;
    const float *x = r->x + row * r->x_ld, *residual = r->residual ? r->residual + row * cols : NULL;
    float *total = r->total ? r->total + row * cols : NULL;
    vf squares = vf_set1(0.0f);
    for (int32_t i = 0; i < cols; i += 16) {
        int n = cols - i < 16 ? cols - i : 16;
        vf v = vf_load_n(x + i, n);
        if (residual) v = vf_add(v, vf_load_n(residual + i, n));
        if (total) vf_store_n(total + i, v, n);
        vf_store(line + i, v);
        squares = vf_fma(v, v, squares);
    }
    vf scale = vf_set1(1.0f / sqrtf(vf_hadd(squares) / (float)cols + r->eps));
    for (int32_t i = 0; i < cols; i += 16) {
        int n = cols - i < 16 ? cols - i : 16;
        vf v = vf_mul(vf_mul(vf_load(line + i), scale), vf_load_n(r->weight + i, n));
        vf_store(line + i, v);
        if (r->out) vf_store_n(r->out + row * cols + i, v, n);
    }
}

void ns_run_norm(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_norm_rec *r = &record->norm;
    const int32_t pitch = ns_ceil_div(r->cols, NS_LANES) * NS_LANES;
    float *lines = worker->scratch;
    for (int64_t row = begin; row < end; row += NS_ROWS) {
        const int count = end - row < NS_ROWS ? (int)(end - row) : NS_ROWS;
        for (int i = 0; i < count; i++) ns_norm_row(r, row + i, lines + i * pitch);
        if (r->quants) ns_quantise_rows(r->quants, (int32_t)row, count, lines, pitch, r->cols);
    }
}

void ns_run_quant(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_quant_rec *r = &record->quant;
    const int32_t cols = r->cols, pitch = cols + cols % 2;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const float *x = r->x + row * r->x_ld;
        if (r->quants) ns_quantise_rows(r->quants, (int32_t)row, 1, x, r->x_ld, cols);
        for (int32_t i = 0; r->halves && i < pitch; i += 16) {
            uint16_t lanes[16];
            int n = cols - i < 16 ? cols - i : 16, stored = pitch - i < 16 ? pitch - i : 16;
            vf_store_bf16(lanes, vf_load_n(x + i, n));
            memcpy(r->halves + row * pitch + i, lanes, (size_t)stored * sizeof *lanes);
        }
    }
}

void ns_run_gate(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_gate_rec *r = &record->gate;
    float *line = worker->scratch;
    for (int64_t row = begin; row < end; row++) {
        const float *gate = r->x + row * r->x_ld, *up = gate + r->n;
        for (int32_t i = 0; i < r->n; i += 16) {
            int n = r->n - i < 16 ? r->n - i : 16;
            vf v = vf_mul(ns_gated(vf_load_n(gate + i, n), r->gate), vf_load_n(up + i, n));
            vf_store(line + i, v);
            if (r->out) vf_store_n(r->out + row * r->n + i, v, n);
        }
        if (r->quants) ns_quantise_rows(r->quants, (int32_t)row, 1, line, r->n, r->n);
    }
}

void ns_run_gather(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_gather_rec *r = &record->gather;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const float *x = r->x + r->index[row] * r->x_ld;
        if (r->out) memcpy(r->out + row * r->cols, x, (size_t)r->cols * sizeof *x);
        if (r->quants) ns_quantise_rows(r->quants, (int32_t)row, 1, x, r->x_ld, r->cols);
    }
}

void ns_run_remember(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_remember_rec *r = &record->remember;
    (void)worker;
    for (int64_t row = begin; row < end; row++)
        r->last_tokens[r->table_rows[r->index ? r->index[row] : row]] = r->tokens[row];
}

void ns_run_copy(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    (void)worker;
    (void)begin;
    (void)end;
    memcpy(record->copy.to, record->copy.from, (size_t)record->copy.bytes);
}
