/* Exact causal attention of many queries, with scores and softmax in float32. `causal.py` defines the results.

Compiled for one head dimension (HEAD_DIM) and one type of rows (BFLOAT16 or float32). Keys and values are packed once
per call. Each tile of queries then processes all blocks of keys that any of its queries sees. Six queries are computed
at a time, so that their sums stay in registers. The time is limited by arithmetic: 2 * HEAD_DIM products for each pair
of a query and a key.

With AVX512-BF16, one instruction adds two products to each of 16 sums: two channels of 16 keys for scores, two tokens
of 16 channels for outputs. Otherwise, keys and values are packed as float32. */

#include "fields.h"
#include "simd.h"

#define KEYS 64                   /* keys per block */
#define ROWS 6                    /* queries computed together */
#define TILE 96                   /* queries per tile, a multiple of ROWS */

#if BFLOAT16 && defined(__AVX512BF16__)
#define BF16_DOT 1
typedef uint32_t Packed;          /* two bfloat16 */
typedef uint32_t Query;
#define QUERY (HEAD_DIM / 2)
#define PAIRS (HEAD_DIM / 2)      /* pairs of channels */
#define WIDE (HEAD_DIM % 64 ? 2 : 4) /* vectors of an output row that are summed together */
#else
typedef float Packed;
typedef float Query;
#define QUERY HEAD_DIM
#define COLUMNS (REGISTERS == 32 ? 4 : 2) /* vectors that are summed together: 6 * COLUMNS sums stay in registers */
#endif
#define HALF (KEYS * QUERY)       /* half of a packed block: first the keys, then the values */
#define BLOCK (2 * HALF)

/* Arguments of a call. Strides of q, k, v and out are `_head` and `_token` numbers. A KV head has group * m queries.
Row r is query r / group of head r % group, and sees the last `window` tokens up to `last_visible` + r / group. If
`begun` is set, out and lse contain the attention to other tokens, and the result is merged into them. */
typedef struct {
    const Number *q, *k, *v;
    void *out;          /* like q, but float32 if lse is given */
    Packed *packed;     /* [kv_heads][blocks][BLOCK]. NULL if a head has one tile, which packs its blocks itself */
    const float *sinks; /* [kv_heads * group], or NULL */
    float *lse;         /* [kv_heads * group][m]: log of the softmax denominator, -inf without tokens; or NULL */
    int64_t q_head, q_token, k_head, k_token, v_head, v_token, out_head, out_token;
    int64_t kv_heads, group, m, n, first, window, last_visible, begun;
    float scale, softcap; /* 0: scores are not capped */
} Call;

FIELDS_OF(Call) = {
    FIELD(Call, q), FIELD(Call, k), FIELD(Call, v), FIELD(Call, out), FIELD(Call, packed), FIELD(Call, sinks),
    FIELD(Call, lse), FIELD(Call, q_head), FIELD(Call, q_token), FIELD(Call, k_head), FIELD(Call, k_token),
    FIELD(Call, v_head), FIELD(Call, v_token), FIELD(Call, out_head), FIELD(Call, out_token), FIELD(Call, kv_heads),
    FIELD(Call, group), FIELD(Call, m), FIELD(Call, n), FIELD(Call, first), FIELD(Call, window), FIELD(Call, last_visible),
    FIELD(Call, begun), FIELD(Call, scale), FIELD(Call, softcap),
    END_OF_FIELDS(Call),
};

INLINE f32 load_numbers(const Number *at) {
#if BFLOAT16
    return load_bf16(at);
#else
    return load(at);
#endif
}

static inline int64_t blocks_of(const Call *call) { return (call->n - call->first + KEYS - 1) / KEYS; }

/* Pack block `b` of KV head `head`: keys [QUERY][KEYS], then values. The last block is padded with 0. */
static void pack_block(const Call *call, int64_t head, int64_t b, Packed *restrict keys) {
    int64_t start = call->first + b * KEYS, left = call->n - start;
    const Number *k = call->k + head * call->k_head, *v = call->v + head * call->v_head;
    Packed *restrict values = keys + HALF;
    int count = left < KEYS ? (int)left : KEYS;
    if (count < KEYS) memset(keys, 0, BLOCK * sizeof *keys);
    for (int t = 0; t < count; t++) {
        const Number *row = k + (start + t) * call->k_token;
#if BF16_DOT
        for (int j = 0; j < PAIRS; j++) memcpy(&keys[j * KEYS + t], row + 2 * j, 4);
#else
        for (int c = 0; c < HEAD_DIM; c++) keys[c * KEYS + t] = as_float(row[c]);
#endif
    }
#if BF16_DOT
    for (int t = 0; t < count; t += 2) {
        const Number *even = v + (start + t) * call->v_token;
        const Number *odd = t + 1 < count ? v + (start + t + 1) * call->v_token : even;
        uint32_t odd_counts = t + 1 < count ? 0xffff0000u : 0;
        for (int c = 0; c < HEAD_DIM; c++) values[t / 2 * HEAD_DIM + c] = even[c] | ((uint32_t)odd[c] << 16 & odd_counts);
    }
#else
    for (int t = 0; t < count; t++) {
        const Number *row = v + (start + t) * call->v_token;
        for (int c = 0; c < HEAD_DIM; c += LANES) store(&values[t * HEAD_DIM + c], load_numbers(row + c));
    }
#endif
}

/* Pack block number `part` of all blocks of all KV heads. Used if several tiles read them. */
void pack(const void *given, int64_t part) {
    const Call *call = given;
    pack_block(call, part / blocks_of(call), part % blocks_of(call), call->packed + part * BLOCK);
}

#define NOTHING -1e30f /* lower than any score, but differences to it are finite */

/* State of the queries of a tile: rows, and outputs and sums of weights before normalisation. */
typedef struct {
    Query q[TILE][QUERY] __attribute__((aligned(64)));
    float out[TILE][HEAD_DIM] __attribute__((aligned(64)));
    float peak[TILE], mass[TILE];
    int64_t token[TILE];
} Tile;

/* Compute the keys [first, behind) of a block that query `row` sees. The block begins at token `start`. */
INLINE void seen_keys(const Call *call, const Tile *tile, int row, int64_t start, int *first, int *behind) {
    int64_t newest = tile->token[row] - start, oldest = newest - call->window;
    *behind = newest < 0 ? 0 : newest >= KEYS - 1 ? KEYS : (int)newest + 1;
    *first = oldest < 0 ? 0 : oldest >= KEYS - 1 ? KEYS : (int)oldest + 1;
}

/* Compute the scores of six queries, from `row` on, with the keys of a block. */
INLINE void block_scores(const Tile *tile, int row, const Packed *block, float scores[ROWS][KEYS]) {
#if BF16_DOT
    __m512 s[ROWS][KEYS / LANES];
    for (int i = 0; i < ROWS; i++)
        for (int c = 0; c < KEYS / LANES; c++) s[i][c] = _mm512_setzero_ps();
    for (int j = 0; j < PAIRS; j++) {
        __m512bh keys[KEYS / LANES];
        for (int c = 0; c < KEYS / LANES; c++) keys[c] = (__m512bh)_mm512_load_si512(block + j * KEYS + c * LANES);
        for (int i = 0; i < ROWS; i++) {
            __m512bh q = (__m512bh)_mm512_set1_epi32((int)tile->q[row + i][j]);
            for (int c = 0; c < KEYS / LANES; c++) s[i][c] = _mm512_dpbf16_ps(s[i][c], q, keys[c]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int c = 0; c < KEYS / LANES; c++) _mm512_store_ps(&scores[i][c * LANES], s[i][c]);
#else
    for (int column = 0; column < KEYS; column += COLUMNS * LANES) {
        f32 s[ROWS][COLUMNS];
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < COLUMNS; c++) s[i][c] = all(0.0f);
        for (int j = 0; j < HEAD_DIM; j++) {
            f32 keys[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) keys[c] = load(&block[j * KEYS + column + c * LANES]);
            for (int i = 0; i < ROWS; i++) {
                f32 q = all(tile->q[row + i][j]);
                for (int c = 0; c < COLUMNS; c++) s[i][c] = fma_of(q, keys[c], s[i][c]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < COLUMNS; c++) store(&scores[i][column + c * LANES], s[i][c]);
    }
#endif
}

/* Turn the scores of query `row` into softmax weights. Return the factor by which its earlier sums must be scaled. */
INLINE float block_weights(const Call *call, Tile *tile, int row, int64_t start, int edge, float *s) {
    const f32 scale = all(call->scale);
    for (int c = 0; c < KEYS; c += LANES) {
        store(s + c, capped(load(s + c) * scale, call->softcap) * LOG2E);
    }
    if (edge) {
        int first, behind;
        seen_keys(call, tile, row, start, &first, &behind);
        for (int t = 0; t < first; t++) s[t] = -3e38f;
        for (int t = behind; t < KEYS; t++) s[t] = -3e38f;
    }
    return softmax_weights(s, KEYS, &tile->peak[row], &tile->mass[row]);
}

/* Scale the outputs of six queries by `kept`, and add the values of a block with weights [ROWS][KEYS]. */
INLINE void add_values(Tile *tile, int row, const Packed *values, float weights[ROWS][KEYS], const float *kept) {
#if BF16_DOT
    uint16_t halves[ROWS][KEYS] __attribute__((aligned(64)));
    for (int i = 0; i < ROWS; i++)
        for (int t = 0; t < KEYS; t += 2 * LANES)
            _mm512_store_si512(&halves[i][t], (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(&weights[i][t + LANES]),
                                                                           _mm512_load_ps(&weights[i][t])));
    for (int column = 0; column < HEAD_DIM; column += WIDE * LANES) {
        __m512 out[ROWS][WIDE];
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < WIDE; c++)
                out[i][c] = _mm512_mul_ps(_mm512_load_ps(&tile->out[row + i][column + c * LANES]),
                                          _mm512_set1_ps(kept[i]));
        for (int pair = 0; pair < KEYS / 2; pair++) {
            __m512bh rows[WIDE];
            for (int c = 0; c < WIDE; c++)
                rows[c] = (__m512bh)_mm512_load_si512(values + pair * HEAD_DIM + column + c * LANES);
            for (int i = 0; i < ROWS; i++) {
                int32_t both;
                memcpy(&both, &halves[i][2 * pair], 4);
                __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
                for (int c = 0; c < WIDE; c++) out[i][c] = _mm512_dpbf16_ps(out[i][c], weight, rows[c]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < WIDE; c++) _mm512_store_ps(&tile->out[row + i][column + c * LANES], out[i][c]);
    }
#else
    int column = 0;
    for (; column + COLUMNS * LANES <= HEAD_DIM; column += COLUMNS * LANES) {
        f32 out[ROWS][COLUMNS];
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < COLUMNS; c++)
                out[i][c] = load(&tile->out[row + i][column + c * LANES]) * all(kept[i]);
        for (int t = 0; t < KEYS; t++) {
            f32 rows[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) rows[c] = load(&values[t * HEAD_DIM + column + c * LANES]);
            for (int i = 0; i < ROWS; i++) {
                f32 weight = all(weights[i][t]);
                for (int c = 0; c < COLUMNS; c++) out[i][c] = fma_of(weight, rows[c], out[i][c]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < COLUMNS; c++) store(&tile->out[row + i][column + c * LANES], out[i][c]);
    }
    for (; column < HEAD_DIM; column += LANES)
        for (int i = 0; i < ROWS; i++) {
            f32 out = load(&tile->out[row + i][column]) * all(kept[i]);
            for (int t = 0; t < KEYS; t++)
                out = fma_of(all(weights[i][t]), load(&values[t * HEAD_DIM + column]), out);
            store(&tile->out[row + i][column], out);
        }
#endif
}

/* Attend with six queries, from `row` on, to a block that begins at token `start`. `edge` is set if a query may not see
all of its keys. */
static void attend_block(const Call *call, Tile *tile, int row, const Packed *block, int64_t start, int edge) {
    float weights[ROWS][KEYS] __attribute__((aligned(64))), kept[ROWS];
    block_scores(tile, row, block, weights);
    for (int i = 0; i < ROWS; i++) kept[i] = block_weights(call, tile, row + i, start, edge, weights[i]);
    add_values(tile, row, block + HALF, weights, kept);
}

/* Initialise the sums of row `r`: from earlier attention, from a sink, or empty. */
static void begin_row(const Call *call, Tile *tile, int r, int64_t query, int64_t at) {
    int64_t place = query * call->out_head + at * call->out_token;
    float before = call->begun ? call->lse[query * call->m + at] : call->sinks ? call->sinks[query] : NOTHING;
    int some = before > NOTHING;
    tile->peak[r] = some ? before * LOG2E : NOTHING;
    tile->mass[r] = some;
    if (call->begun && some) memcpy(tile->out[r], (float *)call->out + place, sizeof tile->out[r]);
}

INLINE void read_query(Query *query, const Number *row) {
#if BF16_DOT
    memcpy(query, row, HEAD_DIM * 2);
#else
    for (int c = 0; c < HEAD_DIM; c += LANES) store(query + c, load_numbers(row + c));
#endif
}

static void begin_tile(const Call *call, Tile *tile, int64_t head, int64_t from, int count, int padded) {
    memset(tile->q, 0, sizeof tile->q);
    memset(tile->out, 0, sizeof tile->out);
    for (int r = 0; r < padded; r++) {
        int64_t row = from + (r < count ? r : count - 1), at = row / call->group;
        int64_t query = head * call->group + row % call->group, seen = call->last_visible + at;
        if (r < count) read_query(tile->q[r], call->q + query * call->q_head + at * call->q_token);
        tile->token[r] = seen < call->n ? seen : call->n - 1;
        begin_row(call, tile, r, query, at);
    }
}

static void end_tile(const Call *call, const Tile *tile, int64_t head, int64_t from, int count) {
    for (int r = 0; r < count; r++) {
        int64_t at = (from + r) / call->group, query = head * call->group + (from + r) % call->group;
        int64_t place = query * call->out_head + at * call->out_token;
        const f32 share = all(1.0f / tile->mass[r]);
        for (int c = 0; c < HEAD_DIM; c += LANES) {
            f32 row = load(&tile->out[r][c]) * share;
            if (call->lse || !BFLOAT16)
                store((float *)call->out + place + c, row);
            else
                store_bf16((uint16_t *)call->out + place + c, row);
        }
        if (call->lse) call->lse[query * call->m + at] = tile->peak[r] / LOG2E + logf(tile->mass[r]);
    }
}

static int64_t tiles_of(const Call *call) { return (call->group * call->m + TILE - 1) / TILE; }

static void attend_tile(const Call *call, int64_t head, int64_t index) {
    Tile tile;
    Packed alone[BLOCK] __attribute__((aligned(64)));
    int64_t from = index * TILE, left = call->group * call->m - from, blocks = blocks_of(call);
    int count = left < TILE ? (int)left : TILE, padded = (count + ROWS - 1) / ROWS * ROWS;
    begin_tile(call, &tile, head, from, count, padded);
    int64_t newest = tile.token[padded - 1], oldest = tile.token[0] - call->window + 1;
    int64_t begin = oldest > call->first ? (oldest - call->first) / KEYS : 0;
    for (int64_t b = begin; b < blocks && call->first + b * KEYS <= newest; b++) {
        int64_t start = call->first + b * KEYS;
        const Packed *block = call->packed ? call->packed + (head * blocks + b) * BLOCK : alone;
        if (!call->packed) pack_block(call, head, b, alone);
        int edge = start + KEYS - 1 > tile.token[0] || start < newest - call->window + 1;
        for (int row = 0; row < padded; row += ROWS) attend_block(call, &tile, row, block, start, edge);
    }
    end_tile(call, &tile, head, from, count);
}

/* Compute tile number `part`. Tiles are ordered by head. Within a head, the last queries come first: they see most
keys. */
void attend(const void *given, int64_t part) {
    const Call *call = given;
    int64_t tiles = tiles_of(call);
    attend_tile(call, part / tiles, tiles - 1 - part % tiles);
}

int tile_rows(void) { return TILE; }

/* Return the bytes of a packed block. */
int block_bytes(void) { return BLOCK * sizeof(Packed); }
