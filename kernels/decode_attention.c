/* Exact attention of a decode step: a few queries per KV head over all of its rows, contiguous or scattered.

Compiled for one head dimension and one type of rows (BFLOAT16 or float32). Keys and values are read once, in place. The
time is therefore limited by memory bandwidth: 2 * HEAD_DIM numbers per row. A part is a range of tokens of one KV head.
Its result, not yet divided by the softmax denominator, is kept until `finish` merges all parts. */

#include "fields.h"
#include "simd.h"
#include "team.h"

#define KEYS 64   /* keys of a block, which stay in the first-level cache with their values */
#define QUERIES 4 /* queries computed together: their sums stay in registers */

/* q and out are [kv_heads][group][HEAD_DIM], lse is [kv_heads][group]. Strides of k and v are `_head` and `_token`
numbers. `outs` [kv_heads][parts][group][HEAD_DIM], `peaks` and `sums` [kv_heads][parts][group] hold the results of
parts.

If `block_rows` is NULL, the n tokens are rows 0 to n - 1. Otherwise the call attends to tokens [sinks, sinks_stop),
[recent, recent_stop), and `tokens` [kv_heads][selected]. Token t is in row t + block_rows[t / 64]. */
typedef struct {
    const Number *q, *k, *v;
    const int64_t *tokens, *block_rows;
    int64_t sinks, sinks_stop, recent, recent_stop, selected;
    float *outs, *peaks, *sums, *out, *lse;
    int64_t k_head, k_token, v_head, v_token, kv_heads, group, n, per_part;
    float scale, softcap; /* 0: scores are not capped */
} Call;

FIELDS_OF(Call) = {
    FIELD(Call, q), FIELD(Call, k), FIELD(Call, v), FIELD(Call, tokens), FIELD(Call, block_rows), FIELD(Call, sinks),
    FIELD(Call, sinks_stop), FIELD(Call, recent), FIELD(Call, recent_stop), FIELD(Call, selected), FIELD(Call, outs),
    FIELD(Call, peaks), FIELD(Call, sums), FIELD(Call, out), FIELD(Call, lse), FIELD(Call, k_head),
    FIELD(Call, k_token), FIELD(Call, v_head), FIELD(Call, v_token), FIELD(Call, kv_heads), FIELD(Call, group),
    FIELD(Call, n), FIELD(Call, per_part), FIELD(Call, scale), FIELD(Call, softcap),
    END_OF_FIELDS(Call),
};

static inline int64_t parts_of(const Call *call) { return (call->n + call->per_part - 1) / call->per_part; }

/* Load 2 * LANES numbers as two vectors of float32. For bfloat16, these are the even and the odd numbers. */
INLINE void load_two(const Number *at, f32 *even, f32 *odd) {
#if BFLOAT16
    u32 pairs;
    memcpy(&pairs, at, sizeof pairs);
    *even = (f32)(pairs << 16), *odd = (f32)(pairs & 0xffff0000u);
#else
    *even = load(at), *odd = load(at + LANES);
#endif
}

/* Return the index of channel `c` in the order of `load_two`. */
static inline int place_of(int c) {
#if BFLOAT16
    int within = c % (2 * LANES);
    return c - within + within / 2 + within % 2 * LANES;
#else
    return c;
#endif
}

/* Rows of the tokens of a block, padded with the last row. */
typedef struct {
    const Number *keys[KEYS], *values[KEYS];
    int count, in_order;
} Block;

/* Return token number `i` of the tokens that KV head `head` attends to. */
static inline int64_t token_at(const Call *call, int64_t head, int64_t i) {
    int64_t sinks = call->sinks_stop - call->sinks, resident = sinks + call->recent_stop - call->recent;
    if (i < sinks) return call->sinks + i;
    return i < resident ? call->recent + i - sinks : call->tokens[head * call->selected + i - resident];
}

/* Return the row of token number `i` if the `count` tokens from it on are certainly in consecutive rows, else -1. */
static inline int64_t first_row(const Call *call, int64_t i, int count) {
    if (!call->block_rows) return i;
    int64_t sinks = call->sinks_stop - call->sinks, resident = sinks + call->recent_stop - call->recent;
    if (i + count > resident || (i < sinks && i + count > sinks)) return -1;
    int64_t token = token_at(call, 0, i);
    return token / KEYS == (token + count - 1) / KEYS ? token + call->block_rows[token / KEYS] : -1;
}

static void find_block(const Call *call, int64_t head, int64_t start, int64_t stop, Block *block) {
    const Number *k = call->k + head * call->k_head, *v = call->v + head * call->v_head;
    block->count = stop - start < KEYS ? (int)(stop - start) : KEYS;
    int64_t row = first_row(call, start, block->count);
    block->in_order = row >= 0;
    for (int t = 0; row >= 0 && t < KEYS; t++) {
        int64_t at = row + (t < block->count ? t : block->count - 1);
        block->keys[t] = k + at * call->k_token, block->values[t] = v + at * call->v_token;
    }
    for (int t = 0; row < 0 && t < KEYS; t++) {
        int64_t token = start + (t < block->count ? t : block->count - 1);
        int64_t at = token_at(call, head, token);
        at += call->block_rows[at / KEYS];
        block->keys[t] = k + at * call->k_token, block->values[t] = v + at * call->v_token;
    }
}

/* Scattered rows are not cached, and processors do not prefetch them. Request the rows of the next block early. */
static inline void prefetch_block(const Block *block) {
    for (int t = 0; t < block->count; t++)
        for (int c = 0; c < HEAD_DIM * (int)sizeof(Number); c += 64) {
            __builtin_prefetch((const char *)block->keys[t] + c);
            __builtin_prefetch((const char *)block->values[t] + c);
        }
}

/* Queries of a KV head, multiplied by the scale. Channels of queries and outputs are in the order of `load_two`. */
typedef struct {
    float q[QUERIES][HEAD_DIM] __attribute__((aligned(64)));
    float out[QUERIES][HEAD_DIM] __attribute__((aligned(64)));
    float peak[QUERIES], sum[QUERIES];
} Tile;

INLINE void block_scores(const Tile *tile, const Block *block, int queries, float scores[QUERIES][KEYS]) {
    for (int first = 0; first < block->count; first += LANES) {
        f32 sums[QUERIES][LANES];
        for (int t = 0; t < LANES; t++) {
            const Number *key = block->keys[first + t];
            f32 sum[QUERIES];
            for (int i = 0; i < queries; i++) sum[i] = all(0.0f);
            for (int c = 0; c < HEAD_DIM; c += 2 * LANES) {
                f32 even, odd;
                load_two(key + c, &even, &odd);
                for (int i = 0; i < queries; i++) {
                    sum[i] = fma_of(even, load(&tile->q[i][c]), sum[i]);
                    sum[i] = fma_of(odd, load(&tile->q[i][c + LANES]), sum[i]);
                }
            }
            for (int i = 0; i < queries; i++) sums[i][t] = sum[i];
        }
        for (int i = 0; i < queries; i++) store(&scores[i][first], lane_sums(sums[i]));
    }
}

/* Turn the scores of query `i` into softmax weights. Return the factor by which its earlier sums must be scaled. */
INLINE float block_weights(const Call *call, Tile *tile, int i, int count, float *s) {
    const int whole = (count + LANES - 1) / LANES * LANES;
    if (call->softcap)
        for (int t = 0; t < count; t += LANES) store(s + t, capped(load(s + t), call->softcap) * LOG2E);
    for (int t = count; t < whole; t++) s[t] = -3e38f;
    return softmax_weights(s, whole, &tile->peak[i], &tile->sum[i]);
}

/* Add weighted values: `vectors` vectors of channels from `column` on. */
INLINE void add_columns(Tile *tile, const Block *block, int queries, int vectors, int column,
                        float weights[QUERIES][KEYS], const float *kept) {
    f32 out[QUERIES][8];
    for (int i = 0; i < queries; i++)
        for (int c = 0; c < vectors; c++) out[i][c] = load(&tile->out[i][column + c * LANES]) * all(kept[i]);
    for (int t = 0; t < block->count; t++)
        for (int c = 0; c < vectors; c += 2) {
            f32 even, odd;
            load_two(block->values[t] + column + c * LANES, &even, &odd);
            for (int i = 0; i < queries; i++) {
                f32 weight = all(weights[i][t]);
                out[i][c] = fma_of(weight, even, out[i][c]);
                out[i][c + 1] = fma_of(weight, odd, out[i][c + 1]);
            }
        }
    for (int i = 0; i < queries; i++)
        for (int c = 0; c < vectors; c++) store(&tile->out[i][column + c * LANES], out[i][c]);
}

#define SUMS (REGISTERS == 32 ? 24 : 12) /* vectors of outputs that stay in registers */
#define FIT(VECTORS, queries) (HEAD_DIM / LANES % (VECTORS) == 0 && (queries) * (VECTORS) <= SUMS)

INLINE void attend_block(const Call *call, Tile *tile, const Block *block, int queries) {
    float weights[QUERIES][KEYS] __attribute__((aligned(64))), kept[QUERIES];
    const int vectors = FIT(8, queries) ? 8 : FIT(4, queries) ? 4 : 2;
    block_scores(tile, block, queries, weights);
    for (int i = 0; i < queries; i++) kept[i] = block_weights(call, tile, i, block->count, weights[i]);
    for (int column = 0; column < HEAD_DIM; column += vectors * LANES)
        add_columns(tile, block, queries, vectors, column, weights, kept);
}

/* The code is specialised for each number of queries, so that sums stay in registers. */
static void attend_queries(const Call *call, Tile *tile, const Block *block, int queries) {
    switch (queries) {
    case 1: attend_block(call, tile, block, 1); return;
    case 2: attend_block(call, tile, block, 2); return;
    case 3: attend_block(call, tile, block, 3); return;
    default: attend_block(call, tile, block, QUERIES);
    }
}

static void begin_tile(const Call *call, Tile *tile, int64_t first, int queries) {
    float factor = call->softcap ? call->scale : call->scale * LOG2E;
    memset(tile, 0, sizeof *tile);
    for (int i = 0; i < queries; i++) {
        const Number *q = call->q + (first + i) * HEAD_DIM;
        for (int c = 0; c < HEAD_DIM; c++) tile->q[i][place_of(c)] = as_float(q[c]) * factor;
        tile->peak[i] = -1e30f;
    }
}

static void attend_range(const Call *call, int64_t head, int64_t start, int64_t stop, Tile *tiles, int count) {
    Block blocks[2];
    find_block(call, head, start, stop, &blocks[0]);
    for (int now = 0; start < stop; start += KEYS, now = !now) {
        if (start + KEYS < stop) {
            find_block(call, head, start + KEYS, stop, &blocks[!now]);
            if (!blocks[!now].in_order) prefetch_block(&blocks[!now]);
        }
        for (int i = 0; i < count; i++) {
            int64_t left = call->group - i * QUERIES;
            attend_queries(call, &tiles[i], &blocks[now], left < QUERIES ? (int)left : QUERIES);
        }
    }
}

/* Compute range `part` % parts of KV head `part` / parts. */
static void attend_part(const void *given, int64_t part) {
    const Call *call = given;
    int64_t parts = parts_of(call), head = part / parts, start = part % parts * call->per_part;
    int64_t stop = start + call->per_part < call->n ? start + call->per_part : call->n;
    int count = (int)((call->group + QUERIES - 1) / QUERIES);
    Tile tiles[count];
    for (int i = 0; i < count; i++) {
        int64_t left = call->group - i * QUERIES;
        begin_tile(call, &tiles[i], head * call->group + i * QUERIES, left < QUERIES ? (int)left : QUERIES);
    }
    attend_range(call, head, start, stop, tiles, count);
    for (int64_t i = 0; i < call->group; i++) {
        int64_t at = part * call->group + i;
        const Tile *tile = &tiles[i / QUERIES];
        call->peaks[at] = tile->peak[i % QUERIES], call->sums[at] = tile->sum[i % QUERIES];
        memcpy(call->outs + at * HEAD_DIM, tile->out[i % QUERIES], sizeof tile->out[0]);
    }
}

/* Merge the parts of all queries into out and lse (natural log). */
static void finish(const Call *call) {
    int64_t parts = parts_of(call);
    for (int64_t query = 0; query < call->kv_heads * call->group; query++) {
        int64_t first = query / call->group * parts * call->group + query % call->group;
        float peak = -INFINITY, sum = 0.0f, whole[HEAD_DIM] = {0};
        for (int64_t p = 0; p < parts; p++) peak = fmaxf(peak, call->peaks[first + p * call->group]);
        for (int64_t p = 0; p < parts; p++) {
            int64_t at = first + p * call->group;
            float share = exp2f(call->peaks[at] - peak);
            sum += share * call->sums[at];
            for (int c = 0; c < HEAD_DIM; c++) whole[c] += share * call->outs[at * HEAD_DIM + c];
        }
        for (int c = 0; c < HEAD_DIM; c++) call->out[query * HEAD_DIM + c] = whole[place_of(c)] / sum;
        call->lse[query] = peak / LOG2E + logf(sum);
    }
}

void attend_all(const Call *call, TeamRun run, int threads) {
    run(attend_part, call, call->kv_heads * parts_of(call), threads);
    finish(call);
}
