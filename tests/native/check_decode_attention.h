/* Includes decode_attention.c for the type of rows in BFLOAT16, and compares it with plain loops. */

#include "../../kernels/decode_attention.c"
#include "check.h"
#include "check_numbers.h"

enum { HEADS = 2, MAX_GROUP = 9, MAX_TOKENS = 300, PER_PART = 128, MAX_PARTS = 3 };

static void expected_row(const Call *call, int64_t query, double *out, double *lse) {
    const Number *q = call->q + query * HEAD_DIM;
    int64_t head = query / call->group;
    double total = 0;
    for (int c = 0; c < HEAD_DIM; c++) out[c] = 0;
    for (int64_t i = 0; i < call->n; i++) {
        int64_t row = i;
        if (call->block_rows) {
            int64_t sinks = call->sinks_stop - 1, resident = sinks + 3;
            row = i < sinks ? 1 + i : i < resident ? 170 + i - sinks : call->tokens[head * call->selected + i - resident];
            row += call->block_rows[row / 64];
        }
        const Number *k = call->k + head * call->k_head + row * call->k_token;
        const Number *v = call->v + head * call->v_head + row * call->v_token;
        double score = 0;
        for (int c = 0; c < HEAD_DIM; c++) score += (double)as_float(q[c]) * as_float(k[c]);
        score *= call->scale;
        double weight = exp(call->softcap ? call->softcap * tanh(score / call->softcap) : score);
        total += weight;
        for (int c = 0; c < HEAD_DIM; c++) out[c] += weight * as_float(v[c]);
    }
    for (int c = 0; c < HEAD_DIM; c++) out[c] /= total;
    *lse = log(total);
}

/* If `sinks` is not 0, the call attends to so many tokens from 1 on, to tokens 170 to 172, and to random ones, in blocks in
another order. */
static int check_step(int64_t group, int64_t n, int sinks, float softcap) {
    enum { RESULTS = HEADS * MAX_PARTS * MAX_GROUP };
    static float outs[RESULTS * HEAD_DIM], peaks[RESULTS], sums[RESULTS], out[HEADS * MAX_GROUP * HEAD_DIM];
    static float lse[HEADS * MAX_GROUP];
    static double want[HEADS * MAX_GROUP * HEAD_DIM], want_lse[HEADS * MAX_GROUP];
    enum { BLOCKS = (MAX_TOKENS + 63) / 64, ROWS = BLOCKS * 64 };
    static int64_t tokens[HEADS * MAX_TOKENS], block_rows[BLOCKS];
    for (int64_t i = 0; i < HEADS * MAX_TOKENS; i++) tokens[i] = random_bits() % ROWS;
    for (int64_t b = 0; b < BLOCKS; b++) block_rows[b] = (b * 3 % BLOCKS - b) * 64;
    Call call = {.q = random_numbers(HEADS * group * HEAD_DIM, 2), .k = random_numbers(HEADS * ROWS * HEAD_DIM, 2),
                 .v = random_numbers(HEADS * ROWS * HEAD_DIM, 2), .tokens = sinks ? tokens : NULL,
                 .block_rows = sinks ? block_rows : NULL, .sinks = 1, .sinks_stop = 1 + sinks, .recent = 170, .recent_stop = 173,
                 .selected = n - sinks - 3, .outs = outs, .peaks = peaks, .sums = sums, .out = out, .lse = lse,
                 .k_head = ROWS * HEAD_DIM, .k_token = HEAD_DIM, .v_head = ROWS * HEAD_DIM, .v_token = HEAD_DIM,
                 .kv_heads = HEADS, .group = group, .n = n, .per_part = PER_PART,
                 .scale = 1 / sqrtf(HEAD_DIM), .softcap = softcap};
    attend_all(&call, run_alone, 1);
    for (int64_t query = 0; query < HEADS * group; query++)
        expected_row(&call, query, want + query * HEAD_DIM, want_lse + query);
    return differ("decode attention", out, want, HEADS * group * HEAD_DIM, 2e-5) +
           differ("lse of decode attention", lse, want_lse, HEADS * group, 1e-4);
}

static int check_decode_attention(void) {
    return check_step(1, 1, 0, 0) + check_step(2, 63, 0, 3) + check_step(3, MAX_TOKENS, 2, 0) +
           check_step(MAX_GROUP, 130, 0, 0) + check_step(4, MAX_TOKENS, 150, 2);
}
