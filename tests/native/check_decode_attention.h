/* Includes decode_attention.c for the type of rows in BFLOAT16, and compares it with plain loops. */

#include "../../kernels/decode_attention.c"
#include "check.h"
#include "check_numbers.h"

enum { HEADS = 2, MOST_GROUP = 9, MOST_TOKENS = 300, PER_PART = 128, MOST_PARTS = 3 };

static void expected_row(const Call *call, int64_t query, double *out, double *lse) {
    const Number *q = call->q + query * HEAD_DIM;
    int64_t head = query / call->group;
    double total = 0;
    for (int c = 0; c < HEAD_DIM; c++) out[c] = 0;
    for (int64_t t = 0; t < call->n; t++) {
        int64_t row = call->ids ? call->ids[head * call->n + t] : t;
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

static int check_step(int64_t group, int64_t n, int scattered, float softcap) {
    enum { RESULTS = HEADS * MOST_PARTS * MOST_GROUP };
    static float outs[RESULTS * HEAD_DIM], peaks[RESULTS], sums[RESULTS], out[HEADS * MOST_GROUP * HEAD_DIM];
    static float lse[HEADS * MOST_GROUP];
    static double want[HEADS * MOST_GROUP * HEAD_DIM], want_lse[HEADS * MOST_GROUP];
    static int64_t ids[HEADS * MOST_TOKENS];
    for (int64_t i = 0; i < HEADS * n; i++) ids[i] = random_bits() % (uint32_t)(HEADS * n);
    Call call = {.q = random_numbers(HEADS * group * HEAD_DIM, 2), .k = random_numbers(HEADS * n * HEAD_DIM, 2),
                 .v = random_numbers(HEADS * n * HEAD_DIM, 2),
                 .ids = scattered ? ids : NULL, .outs = outs, .peaks = peaks, .sums = sums, .out = out, .lse = lse,
                 .k_head = scattered ? 0 : n * HEAD_DIM, .k_token = HEAD_DIM, .v_head = scattered ? 0 : n * HEAD_DIM,
                 .v_token = HEAD_DIM, .kv_heads = HEADS, .group = group, .n = n, .per_part = PER_PART,
                 .scale = 1 / sqrtf(HEAD_DIM), .softcap = softcap};
    for (int64_t part = 0; part < HEADS * parts_of(&call); part++) attend_part(&call, part);
    finish(&call);
    for (int64_t query = 0; query < HEADS * group; query++)
        expected_row(&call, query, want + query * HEAD_DIM, want_lse + query);
    return differ("decode attention", out, want, HEADS * group * HEAD_DIM, 2e-5) +
           differ("lse of decode attention", lse, want_lse, HEADS * group, 1e-4);
}

static int check_decode_attention(void) {
    return check_step(1, 1, 0, 0) + check_step(2, 63, 0, 3) + check_step(3, MOST_TOKENS, 1, 0) +
           check_step(MOST_GROUP, 130, 0, 0) + check_step(4, MOST_TOKENS, 1, 2);
}
