/* Choosing tokens: the definition of nanoserve/kernels/sampling.py, without sorting the vocabulary. A job is one row.
 *
 * One pass turns logits into unnormalised probabilities. top-k, top-p and min-p each keep what lies above a threshold
 * and the first few entries that equal it, by id, so their meet is one threshold and one count; the draw walks what is
 * left in vocabulary order. Sums are double, so that their order does not show.
 */
#include "kernels.h"
#include "softmax.h"

/* The splitmix64 finaliser (Steele, Lea & Flood 2014). */
static uint64_t ns_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static double ns_uniform(int64_t seed, int64_t choice, int64_t position)
{
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t x = ns_mix((uint64_t)seed + golden);
    x = ns_mix(x + (uint64_t)choice * golden);
    x = ns_mix(x + (uint64_t)position * golden);
    return (double)(x >> 40) * 0x1p-24;
}

/* Entries above `least`, and the first `ties` that equal it. */
typedef struct {
    float least;
    int64_t ties;
} ns_cut;

/* Copies entries >= `least` and their ids, in order; returns how many. */
static int32_t ns_collect(const float *p, int32_t n, float least, float *out)
{
    int32_t count = 0;
    for (int32_t i = 0; i < n; i += 16) {
        float lanes[16];
        vf v = vf_load(p + i);
        if (!vf_any_ge(v, least)) continue;
        vf_store(lanes, v);
        const int stop = n - i < 16 ? n - i : 16;
        for (int j = 0; j < stop; j++) {
            out[count] = lanes[j];
            count += lanes[j] >= least;
        }
    }
    return count;
}

/* Cuts `x` (n >= 1 entries >= 0) where, from the largest down, their count or their mass first reaches a limit: the
 * last entry kept is the one before which fewer than `count` entries and less than `mass` are. Radix selection on
 * the bits, which order as the values do. Reorders x. */
static ns_cut ns_select(float *x, int32_t n, int64_t count, double mass)
{
    uint32_t prefix = 0;
    int64_t entries = 0;
    double before = 0.0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        double masses[256] = {0};
        for (int32_t i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            counts[bits >> shift & 255]++;
            masses[bits >> shift & 255] += x[i];
        }
        int digit = 256, lowest = 0, found = 0;
        while (!found && digit-- > 0) {
            if (!counts[digit]) continue;
            lowest = digit;
            found = entries + counts[digit] >= count || before + masses[digit] >= mass;
            if (!found) {
                entries += counts[digit];
                before += masses[digit];
            }
        }
        if (!found) { /* rounding put the limit past the last entry: cut there */
            digit = lowest;
            entries -= counts[digit];
            before -= masses[digit];
        }
        prefix |= (uint32_t)digit << shift;
        int32_t kept = 0;
        for (int32_t i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            x[kept] = x[i];
            kept += (bits >> shift & 255) == (uint32_t)digit;
        }
        n = kept;
    }
    ns_cut cut = {0.0f, 0};
    memcpy(&cut.least, &prefix, sizeof prefix);
    do
        cut.ties++;
    while (cut.ties < n && entries + cut.ties < count && before + cut.least * (double)cut.ties < mass);
    return cut;
}

static ns_cut ns_tighter(ns_cut a, ns_cut b)
{
    if (a.least != b.least) return a.least > b.least ? a : b;
    return a.ties < b.ties ? a : b;
}

/* Whether entries >= `least` are enough to hold the cut of top-k, or of top-p. */
static int ns_enough(const float *p, int32_t n, float least, int64_t count, double mass)
{
    int64_t entries = 0;
    double sum = 0.0;
    for (int32_t i = 0; i < n; i += 16) {
        if (!vf_any_ge(vf_load(p + i), least)) continue;
        for (int j = 0; j < 16; j++) {
            entries += p[i + j] >= least;
            sum += p[i + j] >= least ? p[i + j] : 0.0f;
        }
    }
    return entries >= count || sum >= mass;
}

/* Candidates by falling powers of two below the largest probability, which is 1, then the exact cut among them. */
static ns_cut ns_cut_of(const float *p, int32_t n, int64_t count, double mass, float *spare)
{
    float least = 0x1p-6f;
    while (least > 0x1p-60f && !ns_enough(p, n, least, count, mass)) least *= 0x1p-6f;
    if (least <= 0x1p-60f) least = 0.0f;
    return ns_select(spare, ns_collect(p, n, least, spare), count, mass);
}

/* Sum of what a cut keeps. */
static double ns_kept_mass(const float *p, int32_t n, ns_cut cut)
{
    double sum = (double)cut.ties * cut.least;
    for (int32_t i = 0; i < n; i += 16) {
        if (!vf_any_ge(vf_load(p + i), cut.least)) continue;
        for (int j = 0; j < 16; j++) sum += p[i + j] > cut.least ? p[i + j] : 0.0f;
    }
    return sum;
}

static int32_t ns_draw(const float *p, int32_t n, ns_cut cut, double target)
{
    double sum = 0.0;
    int32_t last = 0;
    for (int32_t i = 0; i < n; i += 16) {
        if (!vf_any_ge(vf_load(p + i), cut.least)) continue;
        for (int32_t j = i; j < i + 16 && j < n; j++) {
            if (p[j] < cut.least || (p[j] == cut.least && cut.ties-- <= 0)) continue;
            sum += p[j];
            last = j;
            if (sum > target) return j;
        }
    }
    return last;
}

static int32_t ns_sample_row(const ns_sample_rec *r, int64_t row, float *scratch)
{
    const float *x = r->logits + row * r->vocab;
    const int32_t n = r->vocab, best = ns_argmax(x, n);
    float temperature = r->temperature[row];
    if (!(temperature > 0.0f)) return best;
    temperature = temperature < 1e-4f ? 1e-4f : temperature;
    float *p = scratch, *spare = scratch + (n + 15) / 16 * 16;
    double total = ns_soft_row(x, n, x[best], temperature, p);
    ns_cut cut = {0.0f, INT64_MAX};
    const int64_t top_k = r->top_k[row];
    if (top_k > 0 && top_k < n) {
        cut = ns_cut_of(p, n, top_k, INFINITY, spare);
        total = ns_kept_mass(p, n, cut);
    }
    if (r->top_p[row] < 1.0f) {
        ns_cut nucleus = ns_cut_of(p, n, INT64_MAX, (double)r->top_p[row] * total, spare);
        cut = ns_tighter(cut, nucleus);
    }
    if (r->min_p[row] > 0.0f) {
        float least = r->min_p[row] < 1.0f ? r->min_p[row] : 1.0f;
        cut = ns_tighter(cut, (ns_cut){least, INT64_MAX});
    }
    total = cut.least > 0.0f ? 0.0 : total;
    if (cut.least > 0.0f) {
        ns_cut all = cut;
        for (int32_t i = 0; i < n; i += 16) {
            if (!vf_any_ge(vf_load(p + i), cut.least)) continue;
            for (int j = 0; j < 16; j++) {
                if (p[i + j] < cut.least || (p[i + j] == cut.least && all.ties-- <= 0)) continue;
                total += p[i + j];
            }
        }
    }
    const int64_t at = r->index ? r->index[row] : row;
    return ns_draw(p, n, cut, ns_uniform(r->seed[row], r->choice[row], r->positions[at]) * total);
}

void ns_run_sample(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_sample_rec *r = &record->sample;
    for (int64_t row = begin; row < end; row++) r->tokens[row] = ns_sample_row(r, row, worker->scratch);
}
