/* What a linear's job does with its products: bias and store, or gate and up into one activation. */
#include "gate.h"
#include "linear_tile.h"

NS_INLINE vf ns_biased(const ns_linear_rec *r, int32_t first, int valid, vf x)
{
    return r->bias ? vf_add(x, vf_load_n(r->bias + first, valid)) : x;
}

/* `tiles` tiles of outputs, from `tile` on. */
NS_INLINE void ns_plain_jobs(const ns_linear_plan *plan, int32_t tile, int tiles, int64_t row, int rows)
{
    const ns_linear_rec *r = plan->r;
    float products[NS_TILES_A_JOB][NS_TILE_FLOATS];
    ns_tile_products(plan, tile, 1, tiles, row, rows, products);
    for (int t = 0; t < tiles; t++) {
        const int32_t first = (tile + t) * NS_LANES;
        const int valid = r->w.rows - first < NS_LANES ? r->w.rows - first : NS_LANES;
        for (int i = 0; i < rows; i++) {
            vf y = ns_biased(r, first, valid, vf_load(products[t] + 16 * i));
            vf_store_n(r->out + (row + i) * r->out_ld + first, y, valid);
        }
    }
}

/* 32 outputs of a gated layer: one quantisation group. Half a group where n is not a multiple of 32. */
NS_INLINE void ns_gated_job(const ns_linear_plan *plan, int32_t pair, int64_t row, int rows)
{
    const ns_linear_rec *r = plan->r;
    const int32_t n = r->w.rows / 2, tiles = n / NS_LANES;
    float products[NS_TILES_A_JOB][NS_TILE_FLOATS], both[NS_ROWS][NS_GROUP];
    int halves = tiles - 2 * pair < 2 ? 1 : 2;
    for (int half = 0; half < halves; half++) {
        const int32_t tile = 2 * pair + half, first = tile * NS_LANES;
        ns_tile_products(plan, tile, tiles, 2, row, rows, products);
        for (int i = 0; i < rows; i++) {
            vf g = ns_biased(r, first, NS_LANES, vf_load(products[0] + 16 * i));
            vf u = ns_biased(r, n + first, NS_LANES, vf_load(products[1] + 16 * i));
            vf y = vf_mul(r->gate == NS_GELU ? ns_gated(g, NS_GELU) : ns_gated(g, NS_SILU), u);
            vf_store(both[i] + 16 * half, y);
            if (r->out) vf_store(r->out + (row + i) * r->out_ld + first, y);
        }
    }
    if (r->out_quants) ns_quantise_group(r->out_quants, n / NS_GROUP, pair, (int32_t)row, rows, both[0], NS_GROUP);
}

void ns_run_linear(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_linear_rec *r = &record->linear;
    const int32_t rows = ns_rows(&r->head);
    const int32_t units = r->gate < 0 ? ns_ceil_div(r->w.rows, NS_LANES) : ns_ceil_div(r->w.rows / 2, NS_GROUP);
    const ns_linear_plan plan = {r, ns_tile_bytes(r->w.kind, r->w.cols), r->w.cols / NS_GROUP};
    const int32_t span = ns_row_span(rows, worker->threads);
    int taken;
    for (int64_t job = begin; job < end; job += taken) {
        const int64_t start = job / units * span;
        const int32_t unit = (int32_t)(job % units);
        taken = r->gate < 0 && job + 1 < end && unit + 1 < units ? NS_TILES_A_JOB : 1;
        const int64_t stop = start + span < rows ? start + span : rows;
        for (int64_t row = start; row < stop; row += NS_ROWS) {
            const int count = stop - row < NS_ROWS ? (int)(stop - row) : NS_ROWS;
            if (r->gate < 0)
                ns_plain_jobs(&plan, unit, taken, row, count);
            else
                ns_gated_job(&plan, unit, row, count);
        }
    }
}
