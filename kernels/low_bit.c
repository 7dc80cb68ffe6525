/* Scores of low-bit keys, and attention over low-bit values, on a CPU. low_bit.py defines the results.

Compiled by native.py for one head dimension (HEAD_DIM), one number of bits per value (VALUE_BITS), and PAGE_BLOCKS
blocks per head and page. A block holds 64 tokens: transposed keys (byte i of all tokens, with channels i and i +
KEY_BYTES), values token by token, steps of keys, steps of values.

Lower bounds per block and KV head with G queries:
* Memory: `score` reads 64 * (HEAD_DIM / 2 + 1) bytes and writes 256 * G. `mix` reads 64 * (VALUE_BYTES + 1) + 256 * G.
* Arithmetic: `score` and `mix` compute 64 * HEAD_DIM * G products each. One vector instruction of `score` computes 64
  (VNNI), 32 (AVX-512, plus one addition), 16 (AVX2) or 8 (NEON) of them. One instruction of `mix` computes 2 * LANES
  (plus one addition without VNNI) or 4 (NEON). Each of the 64 * G scores needs two exponentials, about 14 instructions
  per LANES of them. */

#if HEAD_DIM * VALUE_BITS / 8 % 16
#define NARROW_VECTORS
#endif
#include "code_products.h"
#include "fields.h"
#include "low_bit_layout.h"
#include "low_bit_store.h"
#include "team.h"
#include "value_products.h"

#define QUADS (HEAD_DIM / 4)
#define FIELDS (8 / VALUE_BITS)
#define COLUMNS (VALUE_BITS == 2 || VALUE_BYTES % (2 * LANES) ? 1 : 2) /* vectors of bytes that are unpacked together */
#define TILE (COLUMNS * FIELDS)
#define MAX_QUERIES 32
#define SCORED 4                          /* queries whose sums stay in registers: for scores */
#define MIXED (REGISTERS == 32 ? 6 : 3)   /* for values */
#define LINE 64                           /* bytes of a cache line */
#define PARTS_OF_SUM (16 / LANES)         /* 16 partial sums at every level, so that all levels round alike */
#define VERY_SMALL -3e38f

/* Arguments of score_all and mix_all. Tokens [start, stop) are in blocks [first, last) = [start / 64, (stop + 63) /
64). A part is `per_part` of these blocks of one head. */
typedef struct {
    uint8_t *const *pages;
    int64_t offset, heads, group, start, stop, per_part;
    const float *q, *mean; /* [heads][group][HEAD_DIM], [heads][HEAD_DIM] */
    float *scores;         /* [heads][group][(last - first) * 64] */
    float *peaks, *lses;   /* [heads][group]: the largest score, the log of the sum of e^score */
    float *part_peaks, *part_sums; /* [heads][parts][group] */
    const int64_t *skip;           /* [heads][skipped]; negative entries are ignored */
    int64_t skipped;
    uint64_t *hidden; /* [heads][last - first]: one bit per token, set if the token is excluded */
    float softcap;    /* 0: scores are not capped */
    float *part_outs, *mixed_sums; /* [heads][parts][group][HEAD_DIM], [heads][parts][group] */
    const float *unmixing;         /* [HEAD_DIM][HEAD_DIM]: stored value * unmixing = value of the model */
    float *outs, *lses_of_outs;    /* [heads][group][HEAD_DIM], [heads][group]: exact, then merged attention */
} Call;

FIELDS_OF(Call) = {
    FIELD(Call, pages), FIELD(Call, offset), FIELD(Call, heads), FIELD(Call, group), FIELD(Call, start),
    FIELD(Call, stop), FIELD(Call, per_part), FIELD(Call, q), FIELD(Call, mean), FIELD(Call, scores),
    FIELD(Call, peaks), FIELD(Call, lses), FIELD(Call, part_peaks), FIELD(Call, part_sums), FIELD(Call, skip),
    FIELD(Call, skipped), FIELD(Call, hidden), FIELD(Call, softcap), FIELD(Call, part_outs), FIELD(Call, mixed_sums),
    FIELD(Call, unmixing), FIELD(Call, outs), FIELD(Call, lses_of_outs),
    END_OF_FIELDS(Call),
};

typedef struct {
    int64_t head, part, parts, first, from, to, last; /* blocks [from, to) of [first, last) */
} Range;

static Range range_of(const Call *call, int64_t index) {
    Range range = {.first = call->start / BLOCK, .last = (call->stop + BLOCK - 1) / BLOCK};
    range.parts = (range.last - range.first + call->per_part - 1) / call->per_part;
    range.head = index / range.parts;
    range.part = index % range.parts;
    range.from = range.first + range.part * call->per_part;
    range.to = range.from + call->per_part < range.last ? range.from + call->per_part : range.last;
    return range;
}

/* Return the block that is prefetched while block `b` is computed: the next one, or `b` itself at the end of the range.
The processor does not prefetch it, because keys and values alternate and pages are scattered. Prefetches are spread over
the computation: a core has buffers for 10 to 16 lines, and waits if they are full. */
INLINE const uint8_t *next_block(const Call *call, const Range *own, int64_t b) {
    return block_of(call->pages, call->offset, own->head, b + 1 < own->to ? b + 1 : b);
}

/* Prefetch the lines that begin in bytes [from, from + count). `count` is a divisor or a multiple of LINE. */
INLINE void prefetch(const uint8_t *next, int from, const int count) {
    if (from % LINE == 0)
        for (int i = 0; i < count; i += LINE) __builtin_prefetch(next + from + i);
}

/* ------------------------------------------------------------------------------------------------------ scores */

/* Unpack the keys of 4 * LANES tokens to codes[quad][k]. `order_tokens` restores the order of tokens. */
static void unpack_keys(const uint8_t *span, bytes codes[QUADS][4]) {
    for (int i = 0; i < KEY_BYTES / 4; i++) {
        const uint8_t *rows = span + 4 * i * BLOCK;
        bytes ab[2], cd[2], quads[4];
        zip_bytes(load_bytes(rows), load_bytes(rows + BLOCK), &ab[0], &ab[1]);
        zip_bytes(load_bytes(rows + 2 * BLOCK), load_bytes(rows + 3 * BLOCK), &cd[0], &cd[1]);
        zip_pairs(ab[0], cd[0], &quads[0], &quads[1]);
        zip_pairs(ab[1], cd[1], &quads[2], &quads[3]);
        for (int k = 0; k < 4; k++) {
            codes[i][k] = quads[k] & 15;
            codes[KEY_BYTES / 4 + i][k] = (bytes)((u32)quads[k] >> 4) & 15;
        }
    }
}

/* Compute sums[g][t], the sum over channels of weight * code, for `n` queries and 4 * LANES tokens: integers below
2^24. Prefetch from `next` on as many bytes as the codes occupy in memory. */
INLINE void sum_codes(const int n, const bytes codes[QUADS][4], const int8_t *weights, const uint8_t *next,
                      float sums[][BLOCK]) {
    enum { AT_ONCE = REGISTERS == 32 ? 4 : 2, QUAD_BYTES = 2 * AT_ONCE * LANES };
    i32 totals[SCORED][4];
    for (int k = 0; k < 4; k += AT_ONCE) {
        i32 found[SCORED][AT_ONCE];
        for (int g = 0; g < n; g++)
            for (int j = 0; j < AT_ONCE; j++) found[g][j] = (i32){0};
        for (int first = 0; first < QUADS; first += PARTIAL_QUADS) {
            Partial partial[SCORED][AT_ONCE];
            memset(partial, 0, sizeof partial);
            for (int quad = first; quad < first + PARTIAL_QUADS; quad++) {
                prefetch(next + k * LANES * KEY_BYTES, quad * QUAD_BYTES, QUAD_BYTES);
                for (int g = 0; g < n; g++) {
                    i32 w = four_weights(weights + g * HEAD_DIM + 4 * quad);
                    for (int j = 0; j < AT_ONCE; j++) partial[g][j] = add_products(partial[g][j], codes[quad][k + j], w);
                }
            }
            for (int g = 0; g < n; g++)
                for (int j = 0; j < AT_ONCE; j++) found[g][j] += total_of(partial[g][j]);
        }
        for (int g = 0; g < n; g++)
            for (int j = 0; j < AT_ONCE; j++) totals[g][k + j] = found[g][j];
    }
    for (int g = 0; g < n; g++) {
        order_tokens(totals[g]);
        for (int k = 0; k < 4; k++) store(&sums[g][k * LANES], __builtin_convertvector(totals[g][k], f32));
    }
}

static void code_sums(const uint8_t *block, const uint8_t *next, const int8_t *weights, int group,
                      float sums[][BLOCK]) {
    bytes codes[QUADS][4];
    int sets = (group + SCORED - 1) / SCORED;
    for (int t = 0; t < BLOCK; t += 4 * LANES) {
        unpack_keys(block + t, codes);
        for (int set = 0; set < sets; set++) {
            int g = group * set / sets, n = group * (set + 1) / sets - g;
            const int8_t *own = weights + g * HEAD_DIM;
            float(*found)[BLOCK] = (float(*)[BLOCK])&sums[g][t];
            if (n == 1) sum_codes(1, codes, own, next + t * KEY_BYTES, found);
            if (n == 2) sum_codes(2, codes, own, next + t * KEY_BYTES, found);
            if (n == 3) sum_codes(3, codes, own, next + t * KEY_BYTES, found);
            if (n == 4) sum_codes(4, codes, own, next + t * KEY_BYTES, found);
        }
    }
}

/* Queries of a head, quantised like in low_bit.py. */
typedef struct {
    int8_t weights[MAX_QUERIES * HEAD_DIM];
    float middle[MAX_QUERIES], scale[MAX_QUERIES], shift[MAX_QUERIES];
} Queries;

/* Add 16 partial sums, in the same order at every level. */
INLINE float sum_of_parts(const f32 parts[PARTS_OF_SUM]) {
    float numbers[16], sum = 0.0f;
    memcpy(numbers, parts, sizeof numbers);
    for (int i = 0; i < 16; i++) sum += numbers[i];
    return sum;
}

/* Quantise the queries of a head. `mean` was subtracted from the keys. */
static void round_queries(Queries *queries, const float *q, const float *mean, int64_t group) {
    for (int64_t g = 0; g < group; g++, q += HEAD_DIM) {
        f32 most = all(1.1754944e-38f * 127.0f), shift[PARTS_OF_SUM], sum = {0};
        memset(shift, 0, sizeof shift);
        for (int c = 0; c < HEAD_DIM; c += LANES) most = max_of(abs_of(load(q + c)), most);
        float scale = largest_of(most) / 127.0f;
        for (int c = 0; c < HEAD_DIM; c += LANES) {
            f32 weight = nearest(load(q + c) / scale);
            sum += weight;
            shift[c / LANES % PARTS_OF_SUM] = fma_of(load(q + c), load(mean + c), shift[c / LANES % PARTS_OF_SUM]);
            float numbers[LANES];
            store(numbers, weight);
            for (int j = 0; j < LANES; j++) queries->weights[g * HEAD_DIM + c + j] = (int8_t)(int)numbers[j];
        }
        queries->middle[g] = 7.5f * sum_of(sum);
        queries->scale[g] = scale;
        queries->shift[g] = sum_of_parts(shift);
    }
}

/* Update the peak with the largest of s [BLOCK], and add e^(s - peak) to sums. */
INLINE void add_shares(const float *s, float *peak, f32 sums[PARTS_OF_SUM]) {
    f32 most = load(s);
    for (int t = LANES; t < BLOCK; t += LANES) most = max_of(most, load(s + t));
    if (bits_of(most > all(*peak))) {
        float larger = largest_of(most);
        f32 kept = exp2_of(all((*peak - larger) * LOG2E));
        for (int j = 0; j < PARTS_OF_SUM; j++) sums[j] *= kept;
        *peak = larger;
    }
    f32 high = all(*peak * LOG2E);
    for (int t = 0; t < BLOCK; t += 16)
        for (int j = 0; j < PARTS_OF_SUM; j++) sums[j] += exp2_of(load(s + t + j * LANES) * LOG2E - high);
}

/* Compute a part of the scores, its peaks and its sums of e^(score - peak). A score is (sum over channels of weight *
code - middle) * step * scale + shift, and VERY_SMALL for tokens outside [start, stop). */
static void score(const void *given, int64_t index) {
    const Call *call = given;
    Range own = range_of(call, index);
    int64_t group = call->group, stride = (own.last - own.first) * BLOCK;
    float found[MAX_QUERIES][BLOCK], peaks[MAX_QUERIES];
    f32 sums[MAX_QUERIES][PARTS_OF_SUM];
    Queries queries;
    round_queries(&queries, call->q + own.head * group * HEAD_DIM, call->mean + own.head * HEAD_DIM, group);
    memset(sums, 0, sizeof sums[0] * (size_t)group);
    for (int64_t g = 0; g < group; g++) peaks[g] = VERY_SMALL;
    for (int64_t b = own.from; b < own.to; b++) {
        const uint8_t *block = block_of(call->pages, call->offset, own.head, b), *next = next_block(call, &own, b);
        prefetch(next, STEPS, BLOCK);
        code_sums(block, next, queries.weights, (int)group, found);
        int64_t from = b * BLOCK < call->start ? call->start - b * BLOCK : 0;
        int64_t to = call->stop < (b + 1) * BLOCK ? call->stop - b * BLOCK : BLOCK;
        for (int64_t g = 0; g < group; g++) {
            float *s = call->scores + (own.head * group + g) * stride + (b - own.first) * BLOCK;
            f32 middle = all(queries.middle[g]), scale = all(queries.scale[g]), shift = all(queries.shift[g]);
            for (int t = 0; t < BLOCK; t += LANES)
                store(s + t, (load(&found[g][t]) - middle) * load_steps(block + STEPS + t) * scale + shift);
            for (int64_t t = 0; t < from; t++) s[t] = VERY_SMALL;
            for (int64_t t = to; t < BLOCK; t++) s[t] = VERY_SMALL;
            add_shares(s, &peaks[g], sums[g]);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        call->part_peaks[index * group + g] = peaks[g];
        call->part_sums[index * group + g] = sum_of_parts(sums[g]);
    }
}

/* Merge the peaks and lses of all parts of `score`. */
static void finish_scores(const Call *call) {
    int64_t parts = range_of(call, 0).parts;
    for (int64_t query = 0; query < call->heads * call->group; query++) {
        int64_t first = query / call->group * parts * call->group + query % call->group;
        const float *peaks = call->part_peaks + first, *sums = call->part_sums + first;
        float peak = peaks[0], total = 0.0f;
        for (int64_t part = 1; part < parts; part++)
            peak = peaks[part * call->group] > peak ? peaks[part * call->group] : peak;
        for (int64_t part = 0; part < parts; part++)
            total += sums[part * call->group] * expf(peaks[part * call->group] - peak);
        call->peaks[query] = peak;
        call->lses[query] = peak + logf(total);
    }
}

/* Compute scores, peaks and lses of all queries. */
void score_all(const Call *call, TeamRun run, int threads) {
    run(score, call, call->heads * range_of(call, 0).parts, threads);
    finish_scores(call);
}

/* ------------------------------------------------------------------------------------------------------ values */

/* Weights of the tokens of a block for one query: `scale` times integers. */
typedef struct {
    int16_t numbers[BLOCK];
    int32_t total; /* sum of the integers */
    float scale;
} Weights;

/* Add the weighted values of one block to outs[g] of `n` queries: TILE vectors of channels, from byte `c` on. Prefetch
as many bytes of the values `next`. */
INLINE void add_tile(const int n, const uint8_t *values, const uint8_t *next, const Weights *weights, int c,
                     float outs[][HEAD_DIM]) {
    enum { WIDTH = COLUMNS * LANES };
    i32 sums[MIXED][TILE];
    for (int g = 0; g < n; g++)
        for (int i = 0; i < TILE; i++) sums[g][i] = (i32){0};
    for (int t = 0; t < BLOCK; t += 2) {
        u32 two[COLUMNS];
        prefetch(next + c * BLOCK, t * WIDTH, 2 * WIDTH);
        for (int i = 0; i < COLUMNS; i++) two[i] = load_two_tokens(values + t * VALUE_BYTES + c + i * LANES);
        for (int i = 0; i < TILE; i++) {
            u32 codes = codes_of(two[i / FIELDS], i % FIELDS);
            for (int g = 0; g < n; g++) sums[g][i] = add_weighted(sums[g][i], codes, &weights[g].numbers[t]);
        }
    }
    for (int g = 0; g < n; g++)
        for (int i = 0; i < TILE; i++) {
            float *out = &outs[g][i % FIELDS * VALUE_BYTES + c + i / FIELDS * LANES];
            f32 twice = __builtin_convertvector(2 * sums[g][i] - MIDDLE * weights[g].total, f32);
            store(out, fma_of(all(0.5f * weights[g].scale), twice, load(out)));
        }
}

static void add_values(const uint8_t *values, const uint8_t *next, const Weights *weights, int group,
                       float outs[][HEAD_DIM]) {
    int sets = (group + MIXED - 1) / MIXED;
    for (int set = 0; set < sets; set++) {
        int g = group * set / sets, n = group * (set + 1) / sets - g;
        for (int c = 0; c < VALUE_BYTES; c += COLUMNS * LANES) {
            if (n == 1) add_tile(1, values, next, weights + g, c, outs + g);
            if (n == 2) add_tile(2, values, next, weights + g, c, outs + g);
            if (n == 3) add_tile(3, values, next, weights + g, c, outs + g);
#if REGISTERS == 32
            if (n == 4) add_tile(4, values, next, weights + g, c, outs + g);
            if (n == 5) add_tile(5, values, next, weights + g, c, outs + g);
            if (n == 6) add_tile(6, values, next, weights + g, c, outs + g);
#endif
        }
    }
}

INLINE float capped_peak(float peak, float cap) { return capped(all(peak), cap)[0]; }

/* Set the bits of the tokens of a head that are outside [start, stop) or in `skip`. */
static void hide(const void *given, int64_t head) {
    const Call *call = given;
    Range all_blocks = range_of(call, 0);
    int64_t first = all_blocks.first * BLOCK, blocks = all_blocks.last - all_blocks.first;
    uint64_t *hidden = call->hidden + head * blocks;
    const int64_t *skip = call->skip + head * call->skipped;
    memset(hidden, 0, (size_t)blocks * sizeof *hidden);
    hidden[0] = ((uint64_t)1 << (call->start - first)) - 1;
    if (call->stop % BLOCK) hidden[blocks - 1] |= ~(uint64_t)0 << call->stop % BLOCK;
    for (int64_t i = 0; i < call->skipped; i++)
        if (skip[i] >= call->start && skip[i] < call->stop)
            hidden[(skip[i] - first) / BLOCK] |= (uint64_t)1 << skip[i] % BLOCK;
}

/* Compute the weights of one query and block: e^(s - peak) times the steps of the values, 0 for hidden tokens. Add the
weights without the steps to sums. */
INLINE void weigh(const float *s, float peak, uint64_t hidden, const f32 steps[BLOCK / LANES], float softcap,
                  Weights *weights, f32 sums[PARTS_OF_SUM]) {
    f32 high = all(peak * LOG2E), found[BLOCK / LANES], most = {0};
    i32 total = {0};
    for (int t = 0; t < BLOCK; t += LANES) {
        f32 share = exp2_of(capped(load(s + t), softcap) * LOG2E - high);
        share = choose(mask_of((uint32_t)(hidden >> t) & ((1u << LANES) - 1)), (f32){0}, share);
        sums[t / LANES % PARTS_OF_SUM] += share;
        found[t / LANES] = share * steps[t / LANES];
        most = max_of(most, found[t / LANES]);
    }
    float largest = largest_of(most), factor = largest > 1e-30f ? LARGEST_WEIGHT / largest : 0.0f;
    for (int t = 0; t < BLOCK; t += LANES) total += store_weights(weights->numbers + t, found[t / LANES] * factor);
    weights->total = (int32_t)sum_of(__builtin_convertvector(total, f32));
    weights->scale = largest / LARGEST_WEIGHT;
}

/* Compute a part of the attention to tokens that are not hidden, from the scores and peaks of `score`. */
static void mix(const void *given, int64_t index) {
    const Call *call = given;
    Range own = range_of(call, index);
    int64_t group = call->group, stride = (own.last - own.first) * BLOCK;
    float(*outs)[HEAD_DIM] = (float(*)[HEAD_DIM])(call->part_outs + index * group * HEAD_DIM), peaks[MAX_QUERIES];
    Weights weights[MAX_QUERIES];
    f32 sums[MAX_QUERIES][PARTS_OF_SUM];
    memset(outs, 0, sizeof outs[0] * (size_t)group);
    memset(sums, 0, sizeof sums[0] * (size_t)group);
    for (int64_t g = 0; g < group; g++) peaks[g] = capped_peak(call->peaks[own.head * group + g], call->softcap);
    for (int64_t b = own.from; b < own.to; b++) {
        const uint8_t *block = block_of(call->pages, call->offset, own.head, b), *next = next_block(call, &own, b);
        const float *scores = call->scores + own.head * group * stride + (b - own.first) * BLOCK;
        uint64_t hidden = call->hidden[own.head * (own.last - own.first) + b - own.first];
        f32 steps[BLOCK / LANES];
        prefetch(next, STEPS + BLOCK, BLOCK);
        if (hidden == ~(uint64_t)0) continue;
        for (int t = 0; t < BLOCK; t += LANES) steps[t / LANES] = load_steps(block + STEPS + BLOCK + t);
        for (int64_t g = 0; g < group; g++)
            weigh(scores + g * stride, peaks[g], hidden, steps, call->softcap, &weights[g], sums[g]);
        add_values(block + BLOCK * KEY_BYTES, next + BLOCK * KEY_BYTES, weights, (int)group, outs);
    }
    for (int64_t g = 0; g < group; g++) call->mixed_sums[index * group + g] = sum_of_parts(sums[g]);
}

/* Add all parts of `mix` for one query: the weighted sum of stored values. Return the sum of weights. */
static float sum_mixed_parts(const Call *call, int64_t query, float whole[HEAD_DIM]) {
    int64_t parts = range_of(call, 0).parts, first = query / call->group * parts * call->group + query % call->group;
    float total = 0.0f;
    for (int64_t part = 0; part < parts; part++) total += call->mixed_sums[first + part * call->group];
    for (int c = 0; c < HEAD_DIM; c += LANES) {
        f32 sum = {0};
        for (int64_t part = 0; part < parts; part++)
            sum += load(call->part_outs + (first + part * call->group) * HEAD_DIM + c);
        store(whole + c, sum);
    }
    return total;
}

/* outs += factor * values * unmixing */
static void add_unmixed(float *out, const float *values, float factor, const float *unmixing) {
    for (int from = 0; from < HEAD_DIM; from++)
        for (int c = 0; c < HEAD_DIM; c += LANES)
            store(out + c, fma_of(all(factor * values[from]), load(unmixing + from * HEAD_DIM + c), load(out + c)));
}

/* Merge approximate attention into the exact attention in `outs`, as one softmax over both. */
static void finish_mix(const Call *call) {
    for (int64_t query = 0; query < call->heads * call->group; query++) {
        float whole[HEAD_DIM], total = sum_mixed_parts(call, query, whole), *out = call->outs + query * HEAD_DIM;
        if (!(total > 0.0f)) continue; /* all tokens are excluded */
        float exact = call->lses_of_outs[query], peak = capped_peak(call->peaks[query], call->softcap);
        float approximate = peak + logf(total), larger = exact > approximate ? exact : approximate;
        float lse = larger + logf(expf(exact - larger) + expf(approximate - larger));
        for (int c = 0; c < HEAD_DIM; c++) out[c] *= expf(exact - lse);
        add_unmixed(out, whole, expf(peak - lse), call->unmixing);
        call->lses_of_outs[query] = lse;
    }
}

/* Merge into `outs` the attention to all tokens of `score_all` that are not in `skip`. */
void mix_all(const Call *call, TeamRun run, int threads) {
    run(hide, call, call->heads, threads);
    run(mix, call, call->heads * range_of(call, 0).parts, threads);
    finish_mix(call);
}
