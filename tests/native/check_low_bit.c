#include "../../kernels/low_bit.c"
#include "check.h"

enum { HEADS = 2, BLOCKS = 20, PAGES = (BLOCKS + PAGE_BLOCKS - 1) / PAGE_BLOCKS, PER_PART = 16, PARTS = 2 };
enum { START = 5, STOP = BLOCKS * BLOCK - 7, SKIPPED = 200, OFFSET = 128 };

static uint8_t *pages[PAGES];

static double step_from(uint8_t code) { return ldexp(1.0 + (code & 7) / 8.0, (code >> 3) - 20); }

static double key_level(int head, int64_t token, int channel) {
    const uint8_t *block = block_of(pages, OFFSET, head, token / BLOCK), t = token % BLOCK;
    int byte = block[channel % KEY_BYTES * BLOCK + t];
    return ((channel < KEY_BYTES ? byte & 15 : byte >> 4) - 7.5) * step_from(block[STEPS + t]);
}

static double value_step(int head, int64_t token) {
    return step_from(block_of(pages, OFFSET, head, token / BLOCK)[STEPS + BLOCK + token % BLOCK]);
}

/* Returns a value in steps. */
static double value_steps(int head, int64_t token, int channel) {
    const uint8_t *block = block_of(pages, OFFSET, head, token / BLOCK), t = token % BLOCK;
    int byte = block[BLOCK * KEY_BYTES + t * VALUE_BYTES + channel % VALUE_BYTES];
    int code = byte >> (channel / VALUE_BYTES * VALUE_BITS) & ((1 << VALUE_BITS) - 1);
    return code - ((1 << VALUE_BITS) - 1) / 2.0;
}

static double value_level(int head, int64_t token, int channel) {
    return value_steps(head, token, channel) * value_step(head, token);
}

static void fill_pages(void) {
    for (int p = 0; p < PAGES; p++) {
        size_t bytes = OFFSET + (size_t)HEADS * PAGE_BLOCKS * BLOCK_BYTES;
        pages[p] = room_for(bytes);
        for (size_t i = 0; i < bytes; i++) pages[p][i] = (uint8_t)random_bits();
        for (int b = 0; b < HEADS * PAGE_BLOCKS; b++)
            for (int i = 0; i < 2 * BLOCK; i++) /* steps from 1/16 to 1/2 */
                pages[p][OFFSET + b * BLOCK_BYTES + STEPS + i] = (uint8_t)(128 + random_bits() % 24);
    }
}

static void expected_scores(const Call *call, double *scores, double *peaks, double *lses) {
    for (int64_t query = 0; query < HEADS * call->group; query++) {
        const float *q = call->q + query * HEAD_DIM, *mean = call->mean + query / call->group * HEAD_DIM;
        double shift = 0, total = 0, *s = scores + query * BLOCKS * BLOCK;
        float most = 0;
        for (int c = 0; c < HEAD_DIM; c++) most = fabsf(q[c]) > most ? fabsf(q[c]) : most, shift += (double)q[c] * mean[c];
        float scale = most / 127.0f;
        peaks[query] = -INFINITY;
        for (int64_t t = 0; t < BLOCKS * BLOCK; t++) {
            s[t] = shift;
            for (int c = 0; c < HEAD_DIM; c++)
                s[t] += rintf(q[c] / scale) * (double)scale * key_level((int)(query / call->group), t, c);
            if (t < START || t >= STOP) s[t] = VERY_SMALL;
            peaks[query] = s[t] > peaks[query] ? s[t] : peaks[query];
        }
        for (int64_t t = START; t < STOP; t++) total += exp(s[t] - peaks[query]);
        lses[query] = peaks[query] + log(total);
    }
}

/* Rounds the weights of a block as the kernel does (value_products.h). Without this, the difference of outs depends on
the distribution of the scores. */
static void round_weights(double weights[BLOCK]) {
    double largest = 0;
    for (int t = 0; t < BLOCK; t++) largest = fmax(largest, weights[t]);
    if (largest == 0) return;
    for (int t = 0; t < BLOCK; t++) weights[t] = rint(weights[t] / largest * LARGEST_WEIGHT) * largest / LARGEST_WEIGHT;
}

/* Merges outs and lses, exact attention, with the attention to the tokens that are not skipped. */
static void expected_merge(const Call *call, const double *scores, double *outs, double *lses) {
    for (int64_t query = 0; query < HEADS * call->group; query++) {
        const int64_t head = query / call->group, *skip = call->skip + head * SKIPPED;
        double total = exp(lses[query]), *out = outs + query * HEAD_DIM, sums[HEAD_DIM] = {0};
        for (int c = 0; c < HEAD_DIM; c++) out[c] *= total;
        for (int64_t first = 0; first < BLOCKS * BLOCK; first += BLOCK) {
            double weights[BLOCK];
            for (int64_t t = first; t < first + BLOCK; t++) {
                int hidden = t < START || t >= STOP;
                for (int i = 0; i < SKIPPED; i++) hidden |= skip[i] == t;
                double s = scores[query * BLOCKS * BLOCK + t], cap = call->softcap;
                double weight = hidden ? 0 : exp(cap > 0 ? cap * tanh(s / cap) : s);
                total += weight;
                weights[t - first] = weight * value_step((int)head, t);
            }
            round_weights(weights);
            for (int t = 0; t < BLOCK; t++)
                for (int c = 0; c < HEAD_DIM; c++) sums[c] += weights[t] * value_steps((int)head, first + t, c);
        }
        for (int from = 0; from < HEAD_DIM; from++)
            for (int c = 0; c < HEAD_DIM; c++) out[c] += sums[from] * (double)call->unmixing[from * HEAD_DIM + c];
        for (int c = 0; c < HEAD_DIM; c++) out[c] /= total;
        lses[query] = log(total);
    }
}

static float *random_floats(int64_t count, float largest) {
    float *room = room_for((size_t)count * sizeof *room);
    for (int64_t i = 0; i < count; i++) room[i] = random_float() * largest;
    return room;
}

static int check_group(int64_t group, float softcap) {
    int64_t queries = HEADS * group, skip[HEADS * SKIPPED];
    for (int i = 0; i < HEADS * SKIPPED; i++) skip[i] = i % 9 ? START + (int)(random_bits() % (STOP - START)) : -1;
    Call call = {
        .pages = pages, .offset = OFFSET, .heads = HEADS, .group = group, .start = START, .stop = STOP,
        .per_part = PER_PART, .q = random_floats(queries * HEAD_DIM, 0.2f), .mean = random_floats(HEADS * HEAD_DIM, 1),
        .scores = random_floats(queries * BLOCKS * BLOCK, 1), .peaks = random_floats(queries, 1),
        .lses = random_floats(queries, 1), .part_peaks = random_floats(queries * PARTS, 1),
        .part_sums = random_floats(queries * PARTS, 1), .skip = skip, .skipped = SKIPPED,
        .hidden = room_for(HEADS * BLOCKS * 8), .softcap = softcap,
        .part_outs = random_floats(queries * PARTS * HEAD_DIM, 1), .mixed_sums = random_floats(queries * PARTS, 1),
        .unmixing = random_floats(HEAD_DIM * HEAD_DIM, 0.2f),
        .outs = random_floats(queries * HEAD_DIM, 1), .lses_of_outs = random_floats(queries, 5),
    };
    double *scores = room_for(sizeof(double) * (size_t)queries * BLOCKS * BLOCK), peaks[2 * MAX_QUERIES];
    double lses[2 * MAX_QUERIES], *outs = room_for(sizeof(double) * (size_t)queries * HEAD_DIM);
    score_all(&call, run_alone, 1);
    expected_scores(&call, scores, peaks, lses);
    int failed = differ("scores", call.scores, scores, queries * BLOCKS * BLOCK, 2e-5);
    failed += differ("peaks", call.peaks, peaks, queries, 2e-5) + differ("lses", call.lses, lses, queries, 2e-5);
    call.lses_of_outs[0] = -INFINITY; /* no exact attention */
    for (int64_t i = 0; i < queries * HEAD_DIM; i++) outs[i] = call.outs[i];
    for (int64_t i = 0; i < queries; i++) lses[i] = call.lses_of_outs[i];
    expected_merge(&call, scores, outs, lses);
    mix_all(&call, run_alone, 1);
    failed += differ("outs", call.outs, outs, queries * HEAD_DIM, 2e-5);
    return failed + differ("merged lses", call.lses_of_outs, lses, queries, 2e-5);
}

static int check_store(int values) {
    enum { COUNT = 3 * BLOCK, SLOT = 37 };
    float *rows = random_floats(HEADS * COUNT * HEAD_DIM, 1);
    for (int c = 0; c < HEAD_DIM; c++) rows[HEAD_DIM + c] = 0, rows[2 * HEAD_DIM + c] *= 1e6f;
    StoreCall call = {pages, OFFSET, HEADS, SLOT, COUNT, rows, values};
    int failed = 0, most = values ? (1 << VALUE_BITS) - 1 : 15;
    for (int head = 0; head < HEADS; head++) store_rows(&call, head);
    for (int head = 0; head < HEADS; head++)
        for (int i = 0; i < COUNT; i++) {
            const float *row = rows + (head * COUNT + i) * HEAD_DIM;
            int64_t token = SLOT + i;
            uint8_t code = block_of(pages, OFFSET, head, token / BLOCK)[STEPS + (values ? BLOCK : 0) + token % BLOCK];
            double largest = 0, step = step_from(code);
            for (int c = 0; c < HEAD_DIM; c++) largest = fabs(row[c]) > largest ? fabs(row[c]) : largest;
            largest /= (most + 1) / 2;
            failed += code < 255 && (step < largest || step > fmax(largest * 1.125, ldexp(1, -20)));
            for (int c = 0; c < HEAD_DIM; c++) {
                double level = floor(row[c] / (float)step) + (most + 1) / 2;
                level = (level < 0 ? 0 : level > most ? most : level) - most / 2.0;
                failed += level * step != (values ? value_level(head, token, c) : key_level(head, token, c));
            }
        }
    if (failed) printf("%d stored %s differ\n", failed, values ? "values" : "keys");
    return failed;
}

int check_low_bit(void) {
    fill_pages();
    int failed = 0;
    for (int64_t group = 1; group <= 9; group++) failed += check_group(group, group % 2 ? 0.0f : 1.5f);
    return failed + check_store(0) + check_store(1);
}
