/* The full head beside the sampler: penalties and bias, log-probabilities, the history. A job is one row.
 *
 * A history is the list of a sequence's tokens, not a count for each token of the vocabulary: it is short, appending to
 * it is all that a new token changes, and a position says how much of it counts. Counts are taken where they are used.
 */
#include "kernels.h"
#include "softmax.h"

/* Repetition divides what is positive and multiplies what is not, of every token of the history (Keskar et al. 2019);
 * presence and frequency subtract presence + frequency * count for tokens past the prompt (OpenAI API). `marks` has an
 * entry for each token of the vocabulary, of which those of the history are used: the count, then -1 once x has it. */
static void ns_penalise(const int32_t *tokens, int64_t prompt, int64_t length, const ns_penalties *p, float *x, int32_t n,
                        int32_t *marks)
{
    const int repeats = p->repetition != 1.0f;
    const int64_t start = repeats ? 0 : prompt;
    for (int64_t i = start; i < length; i++)
        if (tokens[i] >= 0 && tokens[i] < n) marks[tokens[i]] = 0;
    for (int64_t i = prompt; i < length; i++)
        if (tokens[i] >= 0 && tokens[i] < n) marks[tokens[i]]++;
    for (int64_t i = start; i < length; i++) {
        const int32_t id = tokens[i];
        if (id < 0 || id >= n || marks[id] < 0) continue;
        float value = x[id];
        if (repeats) value = value > 0.0f ? value / p->repetition : value * p->repetition;
        if (marks[id]) value -= p->presence + p->frequency * (float)marks[id];
        x[id] = value;
        marks[id] = -1;
    }
}

void ns_run_adjust(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_adjust_rec *r = &record->adjust;
    const int32_t n = r->vocab;
    for (int64_t row = begin; row < end; row++) {
        const int64_t at = r->index ? r->index[row] : row, table_row = r->table_rows[at];
        const ns_history_counts *counts = r->counts + table_row;
        const ns_penalties *penalties = r->penalties + table_row;
        float *out = r->out + row * n;
        memcpy(out, r->logits + row * n, (size_t)n * sizeof *out);
        if (penalties->repetition != 1.0f || penalties->presence != 0.0f || penalties->frequency != 0.0f) {
            const int64_t length = r->positions[at] < r->tokens_ld ? r->positions[at] : r->tokens_ld;
            ns_penalise(r->tokens + table_row * r->tokens_ld, counts->prompt_tokens, length, penalties, out, n,
                        worker->scratch);
        }
        for (int64_t i = 0; i < counts->biases; i++) {
            const int32_t id = r->bias_ids[table_row * r->bias_ld + i];
            if (id >= 0 && id < n) out[id] += r->bias_values[table_row * r->bias_ld + i];
        }
    }
}

/* The `count` largest entries, the lowest id first among equals. count is at most NS_MAX_TOP and n. */
static void ns_rank(const float *x, int32_t n, int32_t count, float *values, int32_t *ids)
{
    int32_t found = 0;
    for (int32_t i = 0; count && i < n; i += 16) {
        const int width = n - i < 16 ? n - i : 16;
        if (found == count && !(vf_hmax(vf_load_n(x + i, width)) > values[count - 1])) continue;
        for (int32_t j = i; j < i + width; j++) {
            if (found == count && !(x[j] > values[count - 1])) continue;
            int32_t place = found < count ? found++ : count - 1;
            for (; place && x[j] > values[place - 1]; place--) {
                values[place] = values[place - 1];
                ids[place] = ids[place - 1];
            }
            values[place] = x[j];
            ids[place] = j;
        }
    }
}

void ns_run_logprobs(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_logprobs_rec *r = &record->logprobs;
    for (int64_t row = begin; row < end; row++) {
        const int64_t wanted = r->counts[r->table_rows[r->index ? r->index[row] : row]].top;
        if (wanted < 0) continue;
        const float *x = r->logits + row * r->vocab;
        const float top = x[ns_argmax(x, r->vocab)];
        const float mass = (float)log(ns_soft_row(x, r->vocab, top, 1.0f, worker->scratch));
        const int32_t count = wanted < r->top_ld ? (int32_t)wanted : r->top_ld;
        float *values = r->top + row * r->top_ld;
        ns_rank(x, r->vocab, count, values, r->top_ids + row * r->top_ld);
        for (int32_t i = 0; i < count; i++) values[i] = values[i] - top - mass;
        r->chosen[row] = x[r->tokens[row]] - top - mass;
    }
}

void ns_run_append(const ns_record *record, const ns_worker *worker, int64_t begin, int64_t end)
{
    const ns_append_rec *r = &record->append;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const int64_t at = r->index ? r->index[row] : row;
        if (r->positions[at] < r->tokens_ld)
            r->tokens[r->table_rows[at] * r->tokens_ld + r->positions[at]] = (int32_t)r->chosen[row];
    }
}
