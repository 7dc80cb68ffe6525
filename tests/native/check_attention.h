/* Includes causal.c for the type of rows in BFLOAT16, and compares it with plain loops. */

#include "../../kernels/causal.c"
#include "check.h"
#include "check_numbers.h"

enum { HEADS = 2, MAX_QUERIES = 70, MAX_TOKENS = 200, GROUP = 3 };

#define MAX_ERROR (BFLOAT16 ? 0.02 : 2e-5) /* bfloat16: weights and outputs are rounded to 8 bits */

static double score_of(const Call *call, int64_t query, int64_t at, int64_t token) {
    const Number *q = call->q + query * call->q_head + at * call->q_token;
    const Number *k = call->k + query / call->group * call->k_head + token * call->k_token;
    double score = 0;
    for (int c = 0; c < HEAD_DIM; c++) score += (double)as_float(q[c]) * as_float(k[c]);
    score *= call->scale;
    return call->softcap ? call->softcap * tanh(score / call->softcap) : score;
}

/* out [HEAD_DIM] of query `at` of head `query`; returns the log of the sum. */
static double expected_row(const Call *call, int64_t query, int64_t at, double *out) {
    double total = call->sinks ? exp(call->sinks[query]) : 0;
    for (int c = 0; c < HEAD_DIM; c++) out[c] = 0;
    for (int64_t t = 0; t < call->n; t++) {
        if (t > call->last_visible + at || t <= call->last_visible + at - call->window) continue;
        double weight = exp(score_of(call, query, at, t));
        const Number *v = call->v + query / call->group * call->v_head + t * call->v_token;
        total += weight;
        for (int c = 0; c < HEAD_DIM; c++) out[c] += weight * as_float(v[c]);
    }
    for (int c = 0; c < HEAD_DIM; c++) out[c] /= total;
    return log(total);
}

static int check_call(int64_t m, int64_t n, int64_t window, float softcap, int with_sinks, int with_lse) {
    static float sinks[] = {-1, 0, 1, 2, 3, 0.5f}, lse[HEADS * GROUP * MAX_QUERIES], got[HEAD_DIM];
    double want[HEAD_DIM], want_lse;
    int64_t tiles = (GROUP * m + TILE - 1) / TILE, rows = HEADS * GROUP * m;
    Call call = {.q = random_numbers(rows * HEAD_DIM, 2), .k = random_numbers(HEADS * n * HEAD_DIM, 2),
                 .v = random_numbers(HEADS * n * HEAD_DIM, 2),
                 .out = room_for((size_t)(rows * HEAD_DIM) * 4), .sinks = with_sinks ? sinks : NULL,
                 .lse = with_lse ? lse : NULL, .q_head = m * HEAD_DIM, .q_token = HEAD_DIM, .k_head = n * HEAD_DIM,
                 .k_token = HEAD_DIM, .v_head = n * HEAD_DIM, .v_token = HEAD_DIM, .out_head = m * HEAD_DIM,
                 .out_token = HEAD_DIM, .kv_heads = HEADS, .group = GROUP, .m = m, .n = n,
                 .first = n - m - window + 1 > 0 ? n - m - window + 1 : 0, .window = window, .last_visible = n - m,
                 .scale = 1 / sqrtf(HEAD_DIM), .softcap = softcap};
    int64_t blocks = blocks_of(&call);
    if (tiles > 1) {
        call.packed = room_for((size_t)(HEADS * blocks * block_bytes()));
        for (int64_t part = 0; part < HEADS * blocks; part++) pack(&call, part);
    }
    for (int64_t part = 0; part < HEADS * tiles; part++) attend(&call, part);
    int failed = 0;
    for (int64_t row = 0; row < rows; row++) {
        want_lse = expected_row(&call, row / m, row % m, want);
        for (int c = 0; c < HEAD_DIM; c++)
            got[c] = with_lse || !BFLOAT16 ? ((float *)call.out)[row * HEAD_DIM + c]
                                           : number(((uint16_t *)call.out)[row * HEAD_DIM + c]);
        failed += differ("attention", got, want, HEAD_DIM, MAX_ERROR);
        if (with_lse) failed += differ("lse of attention", &lse[row], &want_lse, 1, 1e-4);
    }
    return failed;
}

static int check_attention(void) {
    return check_call(1, 1, 1, 0, 0, 1) + check_call(5, 130, 130, 0, 0, 1) + check_call(5, 65, 65, 3, 1, 0) +
           check_call(MAX_QUERIES, MAX_TOKENS, MAX_TOKENS, 0, 0, 0) + check_call(MAX_QUERIES, 129, 20, 2, 1, 0);
}
