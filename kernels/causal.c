/* Exact causal attention of bfloat16 rows on a processor that multiplies bfloat16 in vectors (AVX512-BF16): what
`causal.py` defines, scores and softmax in float32.

Compiled by native.py for one head dimension (HEAD_DIM). Keys and values are packed once a call, so that one instruction
adds two products to each of 16 sums: of two channels of 16 keys in scores, of two tokens of 16 channels in outputs. A
tile of queries then goes through all blocks of keys that any of them sees, six queries at a time, whose scores never
leave the registers and the nearest cache. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define KEYS 64                   /* of a block */
#define LANES 16                  /* float32 numbers of a vector */
#define ROWS 6                    /* queries at a time: 24 sums of 16 numbers fill the registers */
#define TILE 96                   /* queries of a tile, a multiple of ROWS */
#define PAIRS (HEAD_DIM / 2)      /* of channels */
#define BLOCK (KEYS * HEAD_DIM)   /* 32-bit words of a packed block: pairs of keys' channels, then pairs of values */
#define WIDE (HEAD_DIM % 64 ? 2 : 4) /* vectors of an output row that are summed together */

/* One call. Rows of q, k, v and out lie `_head` and `_token` numbers apart. Row r of a KV head's group * m queries is
head r % group's query r / group, which sees the last `window` of the tokens up to `reach` + r / group. `begun`: out and
lse have the attention over other tokens, and become that over both. */
typedef struct {
    const uint16_t *q, *k, *v;
    void *out;          /* bfloat16; float32 where there is lse */
    uint32_t *packed;   /* [kv_heads][blocks][BLOCK]; NULL for one tile a head, which packs what it reads */
    const float *sinks; /* [kv_heads * group], or NULL */
    float *lse;         /* [kv_heads * group][m]: the natural log of what a softmax divides by, -inf of none; or NULL */
    const int64_t *ids; /* [kv_heads][n]: the row of each token, for keys and values that lie anywhere; or NULL */
    int64_t q_head, q_token, k_head, k_token, v_head, v_token, out_head, out_token;
    int64_t kv_heads, group, m, n, first, window, reach, begun;
    float scale, softcap; /* 0: scores are not capped */
} Call;

static inline int64_t blocks_of(const Call *call) { return (call->n - call->first + KEYS - 1) / KEYS; }

static inline int64_t row_of(const Call *call, int64_t head, int64_t token) {
    return call->ids ? call->ids[head * call->n + token] : token;
}

/* Asks for the row of a token that comes a block later: where rows lie in no cache, that hides most of the waiting. */
static inline void ask_for(const Call *call, const uint16_t *k, const uint16_t *v, int64_t head, int64_t token) {
    if (token >= call->n) return;
    int64_t row = row_of(call, head, token);
    for (int c = 0; c < HEAD_DIM; c += 32) {
        __builtin_prefetch(k + row * call->k_token + c);
        __builtin_prefetch(v + row * call->v_token + c);
    }
}

/* Packs block `b` of KV head `head`, keys and values; what the last block lacks is 0. */
static void pack_block(const Call *call, int64_t head, int64_t b, uint32_t *restrict keys) {
    int64_t start = call->first + b * KEYS, left = call->n - start;
    const uint16_t *k = call->k + head * call->k_head, *v = call->v + head * call->v_head;
    uint32_t *restrict values = keys + BLOCK / 2;
    int count = left < KEYS ? (int)left : KEYS;
    if (count < KEYS) memset(keys, 0, BLOCK * sizeof *keys);
    for (int t = 0; t < count; t++) {
        const uint16_t *row = k + row_of(call, head, start + t) * call->k_token;
        ask_for(call, k, v, head, start + t + KEYS);
        for (int j = 0; j < PAIRS; j++) memcpy(&keys[j * KEYS + t], row + 2 * j, 4);
    }
    for (int t = 0; t < count; t += 2) {
        const uint16_t *even = v + row_of(call, head, start + t) * call->v_token;
        const uint16_t *odd = t + 1 < count ? v + row_of(call, head, start + t + 1) * call->v_token : even;
        uint32_t odd_counts = t + 1 < count ? 0xffff0000u : 0;
        for (int c = 0; c < HEAD_DIM; c++) values[t / 2 * HEAD_DIM + c] = even[c] | ((uint32_t)odd[c] << 16 & odd_counts);
    }
}

/* Packs the KV heads [begin, end), where several tiles read them. */
void pack(const Call *call, int64_t begin, int64_t end) {
    for (int64_t b = begin * blocks_of(call); b < end * blocks_of(call); b++)
        pack_block(call, b / blocks_of(call), b % blocks_of(call), call->packed + b * BLOCK);
}

/* 2^x for x <= 0: a power of two and a polynomial, 2e-7 off at most. */
static inline __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole), power = _mm512_set1_ps(0.0013333558f);
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(0.009618129f));
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(0.05550411f));
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(0.24022651f));
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(0.6931472f));
    power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, whole);
}

#define LOG2E 1.44269504f
#define NOTHING -1e30f /* lower than any score, and less of it is still a number */

/* x in units of ln 2, capped: cap * tanh(x / cap), from 1 - 2 / (1 + e^2y) for y >= 0. */
static inline __m512 capped(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    __m512 decays = exp2_of(_mm512_or_ps(_mm512_mul_ps(x, _mm512_set1_ps(2.0f * LOG2E / cap)), sign));
    __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, decays), _mm512_add_ps(one, decays));
    tanh = _mm512_or_ps(tanh, _mm512_and_ps(x, sign));
    return _mm512_mul_ps(tanh, _mm512_set1_ps(cap * LOG2E));
}

static inline __m512bh twice(const void *pair) {
    int32_t both;
    memcpy(&both, pair, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* What is known of the queries of a tile: rows, out and sums of weights not yet brought to the end. */
typedef struct {
    uint32_t q[TILE][PAIRS] __attribute__((aligned(64)));
    float out[TILE][HEAD_DIM] __attribute__((aligned(64)));
    float peak[TILE], mass[TILE];
    int64_t token[TILE];
} Tile;

/* Six queries from `row` on over one block, whose first key is token `start`; `edge`: not all of them see all of it. */
static void attend_block(const Call *call, Tile *tile, int row, const uint32_t *block, int64_t start, int edge) {
    uint16_t weights[ROWS][KEYS] __attribute__((aligned(64)));
    __m512 kept[ROWS], s[ROWS][KEYS / LANES];
    for (int i = 0; i < ROWS; i++)
        for (int c = 0; c < KEYS / LANES; c++) s[i][c] = _mm512_setzero_ps();
    for (int j = 0; j < PAIRS; j++) {
        __m512bh keys[KEYS / LANES];
        for (int c = 0; c < KEYS / LANES; c++) keys[c] = (__m512bh)_mm512_load_si512(block + j * KEYS + c * LANES);
        for (int i = 0; i < ROWS; i++) {
            __m512bh q = twice(&tile->q[row + i][j]);
            for (int c = 0; c < KEYS / LANES; c++) s[i][c] = _mm512_dpbf16_ps(s[i][c], q, keys[c]);
        }
    }
    const __m512 factor = _mm512_set1_ps(call->softcap ? call->scale : call->scale * LOG2E);
    for (int i = 0; i < ROWS; i++) {
        for (int c = 0; c < KEYS / LANES; c++) {
            s[i][c] = _mm512_mul_ps(s[i][c], factor);
            if (call->softcap) s[i][c] = capped(s[i][c], call->softcap);
        }
        if (edge) {
            int64_t newest = tile->token[row + i] - start, oldest = newest - call->window;
            uint64_t seen = newest < 0 ? 0 : newest >= KEYS - 1 ? ~0ull : (2ull << newest) - 1;
            if (oldest >= 0) seen &= oldest >= KEYS - 1 ? 0 : ~0ull << (oldest + 1);
            for (int c = 0; c < KEYS / LANES; c++)
                s[i][c] = _mm512_mask_mov_ps(_mm512_set1_ps(-3e38f), (__mmask16)(seen >> (c * LANES)), s[i][c]);
        }
        __m512 most = _mm512_max_ps(_mm512_max_ps(s[i][0], s[i][1]), _mm512_max_ps(s[i][2], s[i][3]));
        float before = tile->peak[row + i], found = _mm512_reduce_max_ps(most), peak = found > before ? found : before;
        const __m512 high = _mm512_set1_ps(peak);
        kept[i] = exp2_of(_mm512_set1_ps(before - peak));
        for (int c = 0; c < KEYS / LANES; c++) s[i][c] = exp2_of(_mm512_sub_ps(s[i][c], high));
        __m512 sum = _mm512_add_ps(_mm512_add_ps(s[i][0], s[i][1]), _mm512_add_ps(s[i][2], s[i][3]));
        tile->mass[row + i] = tile->mass[row + i] * _mm512_cvtss_f32(kept[i]) + _mm512_reduce_add_ps(sum);
        tile->peak[row + i] = peak;
        for (int c = 0; c < KEYS / LANES; c += 2)
            _mm512_store_si512(&weights[i][c * LANES], (__m512i)_mm512_cvtne2ps_pbh(s[i][c + 1], s[i][c]));
    }
    const uint32_t *values = block + BLOCK / 2;
    for (int column = 0; column < HEAD_DIM; column += WIDE * LANES) {
        __m512 out[ROWS][WIDE];
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < WIDE; c++)
                out[i][c] = _mm512_mul_ps(_mm512_load_ps(&tile->out[row + i][column + c * LANES]), kept[i]);
        for (int pair = 0; pair < KEYS / 2; pair++) {
            __m512bh rows[WIDE];
            for (int c = 0; c < WIDE; c++)
                rows[c] = (__m512bh)_mm512_load_si512(values + pair * HEAD_DIM + column + c * LANES);
            for (int i = 0; i < ROWS; i++) {
                __m512bh weight = twice(&weights[i][2 * pair]);
                for (int c = 0; c < WIDE; c++) out[i][c] = _mm512_dpbf16_ps(out[i][c], weight, rows[c]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int c = 0; c < WIDE; c++) _mm512_store_ps(&tile->out[row + i][column + c * LANES], out[i][c]);
    }
}

/* Where the sums of query row `row` of a KV head begin: with what it attended to before, with a sink, or with nothing. */
static void begin_row(const Call *call, Tile *tile, int r, int64_t query, int64_t at) {
    int64_t place = query * call->out_head + at * call->out_token;
    float before = call->begun ? call->lse[query * call->m + at] : call->sinks ? call->sinks[query] : NOTHING;
    int some = before > NOTHING;
    tile->peak[r] = some ? before * LOG2E : NOTHING;
    tile->mass[r] = some;
    if (call->begun && some) memcpy(tile->out[r], (float *)call->out + place, sizeof tile->out[r]);
}

static void begin_tile(const Call *call, Tile *tile, int64_t head, int64_t from, int count, int padded) {
    memset(tile->q, 0, sizeof tile->q);
    memset(tile->out, 0, sizeof tile->out);
    for (int r = 0; r < padded; r++) {
        int64_t row = from + (r < count ? r : count - 1), at = row / call->group;
        int64_t query = head * call->group + row % call->group, seen = call->reach + at;
        if (r < count) memcpy(tile->q[r], call->q + query * call->q_head + at * call->q_token, HEAD_DIM * 2);
        tile->token[r] = seen < call->n ? seen : call->n - 1;
        begin_row(call, tile, r, query, at);
    }
}

static void end_tile(const Call *call, const Tile *tile, int64_t head, int64_t from, int count) {
    for (int r = 0; r < count; r++) {
        int64_t at = (from + r) / call->group, query = head * call->group + (from + r) % call->group;
        int64_t place = query * call->out_head + at * call->out_token;
        const __m512 share = _mm512_set1_ps(1.0f / tile->mass[r]);
        for (int c = 0; c < HEAD_DIM; c += LANES) {
            __m512 row = _mm512_mul_ps(_mm512_load_ps(&tile->out[r][c]), share);
            if (call->lse)
                _mm512_storeu_ps((float *)call->out + place + c, row);
            else
                _mm256_storeu_si256((void *)((uint16_t *)call->out + place + c), (__m256i)_mm512_cvtneps_pbh(row));
        }
        if (call->lse) call->lse[query * call->m + at] = tile->peak[r] / LOG2E + logf(tile->mass[r]);
    }
}

static int64_t tiles_of(const Call *call) { return (call->group * call->m + TILE - 1) / TILE; }

static void attend_tile(const Call *call, int64_t head, int64_t index) {
    Tile tile;
    uint32_t alone[BLOCK] __attribute__((aligned(64)));
    int64_t from = index * TILE, left = call->group * call->m - from, blocks = blocks_of(call);
    int count = left < TILE ? (int)left : TILE, padded = (count + ROWS - 1) / ROWS * ROWS;
    begin_tile(call, &tile, head, from, count, padded);
    int64_t newest = tile.token[padded - 1], oldest = tile.token[0] - call->window + 1;
    int64_t begin = oldest > call->first ? (oldest - call->first) / KEYS : 0;
    for (int64_t b = begin; b < blocks && call->first + b * KEYS <= newest; b++) {
        int64_t start = call->first + b * KEYS;
        const uint32_t *block = call->packed ? call->packed + (head * blocks + b) * BLOCK : alone;
        if (!call->packed) pack_block(call, head, b, alone);
        int edge = start + KEYS - 1 > tile.token[0] || start < newest - call->window + 1;
        for (int row = 0; row < padded; row += ROWS) attend_block(call, &tile, row, block, start, edge);
    }
    end_tile(call, &tile, head, from, count);
}

/* Tiles [begin, end) of all KV heads': head by head, of each the last queries, which see the most, first. */
void attend(const Call *call, int64_t begin, int64_t end) {
    int64_t tiles = tiles_of(call);
    for (int64_t i = begin; i < end; i++) attend_tile(call, i / tiles, tiles - 1 - i % tiles);
}

int tile_rows(void) { return TILE; }
