#define select_all select_best
#include "../../kernels/best_scores.c"
#include "check.h"

enum { HEADS = 2, MAX_TOKENS = 3000 };

/* Chooses token after token: the one with the largest value that passes, of equals the first. */
static int expected_differ(const Ranking *call) {
    int failed = 0;
    for (int64_t head = 0; head < HEADS; head++) {
        const int64_t *chosen = call->chosen + head * call->most;
        char taken[MAX_TOKENS] = {0};
        for (int64_t i = 0; i < call->most; i++) {
            int64_t best = -1;
            float largest = -INFINITY;
            for (int64_t t = 0; t < call->n; t++) {
                int passes = 0;
                float value = -INFINITY;
                for (int64_t query = 0; query < HEADS * call->group; query++) {
                    float score = call->scores[query * call->stride + t];
                    passes |= score >= call->peaks[query] - call->alpha;
                    if (query / call->group == head && score - call->lses[query] > value)
                        value = score - call->lses[query];
                }
                if (passes && !taken[t] && value > largest) largest = value, best = t;
            }
            if (best < 0) return 1;
            taken[best] = 1;
        }
        for (int64_t t = 0, i = 0; t < call->n; t++)
            if (taken[t]) failed += chosen[i++] != t;
    }
    return failed;
}

static int check_choice(int64_t group, int64_t n, float alpha, double fraction) {
    enum { PER_PART = 1024, STRIDE = MAX_TOKENS + 64 };
    float *scores = room_for(sizeof(float) * (size_t)(HEADS * group * STRIDE)), peaks[64], lses[64];
    int64_t within[8], expected = 0;
    for (int64_t query = 0; query < HEADS * group; query++) {
        peaks[query] = -INFINITY, lses[query] = 8 + random_float();
        for (int64_t t = 0; t < n; t++) {
            float score = (float)(int)(random_float() * 4000) / 256; /* some are equal */
            scores[query * STRIDE + t] = score;
            peaks[query] = score > peaks[query] ? score : peaks[query];
        }
        for (int64_t t = 0; t < n; t++) expected += scores[query * STRIDE + t] >= peaks[query] - alpha;
    }
    Ranking call = {
        .scores = scores, .stride = STRIDE, .heads = HEADS, .group = group, .n = n, .per_part = PER_PART,
        .peaks = peaks, .lses = lses, .alpha = alpha, .values = room_for(sizeof(float) * (size_t)(HEADS * n + PADDING)),
        .passing = room_for((size_t)(n / BLOCK + 1) * 8), .within = within,
        .best = room_for(sizeof(float) * (size_t)(HEADS * (n + PADDING))), .tokens = room_for((size_t)(HEADS * n) * 4),
        .chosen = room_for((size_t)(HEADS * n) * 8),
    };
    int64_t mean = (expected + HEADS * group - 1) / (HEADS * group), limit = (int64_t)(fraction * (double)n);
    int64_t most = select_all(&call, limit, run_alone, 1);
    int failed = expected_differ(&call) + (most != (mean < limit ? mean : limit));
    if (failed) printf("%d of %lld choices differ\n", failed, (long long)call.most);
    return failed;
}

int check_best_scores(void) {
    return check_choice(1, 130, 4, 0.5) + check_choice(3, 1037, 2, 0.3) + check_choice(7, 3000, INFINITY, 0.05) +
           check_choice(2, 65, INFINITY, 1) + check_choice(2, 2048, 30, 0.2);
}
