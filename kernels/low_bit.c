/* Scores with low-bit keys, and low-bit values weighted by them, on a processor: what low_bit.py defines.

Compiled by native.py for one head dimension (HEAD_DIM), one number of bits of a value (VALUE_BITS) and pages of so many
blocks of each head (PAGE_BLOCKS). A block holds 64 tokens: keys byte by byte of all tokens (byte i: channels i and i +
KEY_BYTES), values token by token, steps of keys, steps of values. Loops run over 64 tokens or HEAD_DIM channels without
branches, so that compilers turn them into vector instructions. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define BLOCK 64
#define KEY_BYTES (HEAD_DIM / 2)
#define VALUE_BYTES (HEAD_DIM * VALUE_BITS / 8)
#define STEPS (BLOCK * (KEY_BYTES + VALUE_BYTES)) /* where steps begin, first the keys' */
#define BLOCK_BYTES (STEPS + 2 * BLOCK)
#define FIELDS (8 / VALUE_BITS)
#define LANES 16
#define MOST_QUERIES 32
#define AT_ONCE 4 /* queries whose sums stay in registers; a group is padded to a multiple */
#define WIDE (HEAD_DIM % 64 ? 2 : 4) /* vectors of an output row that are summed together */
#define VERY_SMALL -3e38f

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

/* Where block b of a head lies: every page holds PAGE_BLOCKS blocks of each head, from `offset` bytes on. */
static inline uint8_t *block_of(uint8_t *const *pages, int64_t offset, int head, int64_t b) {
    return pages[b / PAGE_BLOCKS] + offset + ((int64_t)head * PAGE_BLOCKS + b % PAGE_BLOCKS) * BLOCK_BYTES;
}

/* Asks for bytes [from, to) of the block after `b`, if it is before `last`, while `b` is computed: where it lies in
other pages of memory no processor looks ahead. Twice as fast where rows lie in no cache. */
static inline void ask_for(uint8_t *const *pages, int64_t offset, int head, int64_t b, int64_t last, int from, int to) {
    if (b + 1 >= last) return;
    const uint8_t *block = block_of(pages, offset, head, b + 1);
    for (int i = from; i < to; i += 64) __builtin_prefetch(block + i);
}

static inline float step_of(uint8_t code) {
    uint32_t bits = ((uint32_t)code + ((127 - 20) << 3)) << 20;
    float step;
    memcpy(&step, &bits, sizeof step);
    return step;
}

#define LOG2E 1.44269504f

/* 2^x for x <= 0, 2e-7 off at most; 2^-100 below that (numbers too small to be normal would be slow). The sum with
1.5 * 2^23 is x rounded, in the lowest bits of its fraction, from where it goes to the exponent. */
static inline float exp2_of(float x) {
    x = x < -100.0f ? -100.0f : x;
    float rounded = x + 12582912.0f, f = x - (rounded - 12582912.0f);
    float power = 1.0f + f * (0.6931472f + f * (0.24022651f + f * (0.05550411f + f * (0.009618129f +
                  f * 0.0013333558f))));
    uint32_t whole, bits;
    memcpy(&whole, &rounded, sizeof whole);
    memcpy(&bits, &power, sizeof bits);
    bits += whole << 23;
    memcpy(&power, &bits, sizeof power);
    return power;
}

#ifdef __AVX512VNNI__
/* sums[g][t]: over channels of weight and code, whole numbers. Four bytes of a token side by side make one number of
its own in a vector: vpdpbusd adds four products at once. */
static void code_sums(const uint8_t *restrict block, const int8_t *restrict weights, int group,
                      float sums[][BLOCK]) {
    __m512i codes[2][KEY_BYTES / 4][4];
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int i = 0; i < KEY_BYTES / 4; i++) {
        const uint8_t *rows = block + 4 * i * BLOCK;
        __m512i a = _mm512_permutexvar_epi32(turned, _mm512_loadu_si512(rows));
        __m512i b = _mm512_permutexvar_epi32(turned, _mm512_loadu_si512(rows + BLOCK));
        __m512i c = _mm512_permutexvar_epi32(turned, _mm512_loadu_si512(rows + 2 * BLOCK));
        __m512i d = _mm512_permutexvar_epi32(turned, _mm512_loadu_si512(rows + 3 * BLOCK));
        __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
        __m512i ba = _mm512_unpackhi_epi8(a, b), dc = _mm512_unpackhi_epi8(c, d);
        __m512i mixed[4] = {_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd),
                            _mm512_unpacklo_epi16(ba, dc), _mm512_unpackhi_epi16(ba, dc)};
        for (int k = 0; k < 4; k++) {
            codes[0][i][k] = _mm512_and_si512(mixed[k], nibble);
            codes[1][i][k] = _mm512_and_si512(_mm512_srli_epi16(mixed[k], 4), nibble);
        }
    }
    for (int g = 0; g < group; g += AT_ONCE) {
        __m512i found[AT_ONCE][4];
        for (int j = 0; j < AT_ONCE; j++)
            for (int k = 0; k < 4; k++) found[j][k] = _mm512_setzero_si512();
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < KEY_BYTES / 4; i++)
                for (int j = 0; j < AT_ONCE; j++) {
                    int32_t four;
                    memcpy(&four, weights + (g + j) * HEAD_DIM + half * KEY_BYTES + 4 * i, 4);
                    __m512i w = _mm512_set1_epi32(four);
                    for (int k = 0; k < 4; k++) found[j][k] = _mm512_dpbusd_epi32(found[j][k], codes[half][i][k], w);
                }
        for (int j = 0; j < AT_ONCE; j++)
            for (int k = 0; k < 4; k++) _mm512_storeu_ps(&sums[g + j][16 * k], _mm512_cvtepi32_ps(found[j][k]));
    }
}
#else
/* sums[g][t]: over channels of weight and code, whole numbers below 2^24. */
static void code_sums(const uint8_t *restrict block, const int8_t *restrict weights, int group,
                      float sums[][BLOCK]) {
    float codes[HEAD_DIM][BLOCK] __attribute__((aligned(64)));
    for (int i = 0; i < KEY_BYTES; i++)
        for (int t = 0; t < BLOCK; t++) {
            codes[i][t] = (float)(block[i * BLOCK + t] & 15);
            codes[KEY_BYTES + i][t] = (float)(block[i * BLOCK + t] >> 4);
        }
    for (int g = 0; g < group; g += AT_ONCE)
        for (int t = 0; t < BLOCK; t += 2 * LANES) {
            vec found[AT_ONCE][2] = {{{0}}};
            for (int c = 0; c < HEAD_DIM; c++) {
                vec left = *(const vec *)&codes[c][t], right = *(const vec *)&codes[c][t + LANES];
                for (int i = 0; i < AT_ONCE; i++) {
                    float weight = (float)weights[(g + i) * HEAD_DIM + c];
                    found[i][0] += weight * left;
                    found[i][1] += weight * right;
                }
            }
            for (int i = 0; i < AT_ONCE; i++) memcpy(&sums[g + i][t], found[i], sizeof found[i]);
        }
}
#endif

/* The same queries for block_scores, rounded as low_bit.py does: HEAD_DIM int8 weights each, a multiple of AT_ONCE. */
typedef struct {
    int8_t weights[MOST_QUERIES * HEAD_DIM];
    float middle[MOST_QUERIES], scale[MOST_QUERIES], shift[MOST_QUERIES];
} Queries;

/* q [group][HEAD_DIM], of keys whose mean was taken away. */
static int round_queries(Queries *queries, const float *q, const float *mean, int group) {
    memset(queries, 0, sizeof *queries);
    for (int g = 0; g < group; g++, q += HEAD_DIM) {
        float most = 1.1754944e-38f * 127.0f, shift = 0.0f;
        int sum = 0;
        for (int c = 0; c < HEAD_DIM; c++) most = fabsf(q[c]) > most ? fabsf(q[c]) : most;
        float scale = most / 127.0f;
        for (int c = 0; c < HEAD_DIM; c++) {
            int8_t weight = (int8_t)rintf(q[c] / scale);
            queries->weights[g * HEAD_DIM + c] = weight;
            sum += weight;
            shift += q[c] * mean[c];
        }
        queries->middle[g] = 7.5f * (float)sum;
        queries->scale[g] = scale;
        queries->shift[g] = shift;
    }
    return (group + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
}

/* scores[g][t] of one block: (sum over channels of weight and code - middle) * step * scale + shift. */
static void block_scores(const uint8_t *restrict block, const Queries *restrict queries, int group,
                         float scores[][BLOCK]) {
    float step[BLOCK];
    code_sums(block, queries->weights, group, scores);
    for (int t = 0; t < BLOCK; t++) step[t] = step_of(block[STEPS + t]);
    for (int g = 0; g < group; g++) {
        float middle = queries->middle[g], scale = queries->scale[g], shift = queries->shift[g];
        for (int t = 0; t < BLOCK; t++) scores[g][t] = (scores[g][t] - middle) * step[t] * scale + shift;
    }
}

static inline int any_above(const float *restrict x, float peak) {
    int32_t above = 0;
    for (int t = 0; t < BLOCK; t++) above |= x[t] > peak;
    return above;
}

static float largest(const float *restrict x) {
    float lanes[LANES];
    for (int j = 0; j < LANES; j++) lanes[j] = x[j];
    for (int t = LANES; t < BLOCK; t += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] = lanes[j] > x[t + j] ? lanes[j] : x[t + j];
    float most = lanes[0];
    for (int j = 1; j < LANES; j++) most = lanes[j] > most ? lanes[j] : most;
    return most;
}

#if defined(__AVX512BF16__) && VALUE_BYTES % 16 == 0
/* out[g] += the values of one block under weights[g][t], which have the steps in them. Levels are exact in bfloat16,
weights are rounded to it; vdpbf16ps adds the products of two tokens at once. */
static void add_values(const uint8_t *restrict values, float weights[][BLOCK], int group, float out[][HEAD_DIM]) {
    uint16_t levels[32];
    for (int code = 0; code < 32; code++) {
        float level = (float)(code & ((1 << VALUE_BITS) - 1)) - ((1 << VALUE_BITS) - 1) * 0.5f;
        uint32_t bits;
        memcpy(&bits, &level, 4);
        levels[code] = (uint16_t)(bits >> 16);
    }
    const __m512i table = _mm512_loadu_si512(levels);
    __m512i rows[BLOCK / 2][HEAD_DIM / LANES];
    for (int pair = 0; pair < BLOCK / 2; pair++)
        for (int c = 0; c < VALUE_BYTES; c += LANES) {
            const uint8_t *first = values + 2 * pair * VALUE_BYTES + c;
            __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)first));
            __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(first + VALUE_BYTES)));
            __m512i both = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            for (int field = 0; field < FIELDS; field++) {
                __m512i codes = field ? _mm512_srli_epi16(both, VALUE_BITS * field) : both;
                rows[pair][(field * VALUE_BYTES + c) / LANES] = _mm512_permutexvar_epi16(codes, table);
            }
        }
    for (int g = 0; g < group; g += AT_ONCE) {
        uint16_t pairs[AT_ONCE][BLOCK] __attribute__((aligned(64)));
        for (int i = 0; i < AT_ONCE; i++)
            for (int t = 0; t < BLOCK; t += 2 * LANES) {
                __m512 low = _mm512_loadu_ps(&weights[g + i][t]), high = _mm512_loadu_ps(&weights[g + i][t + LANES]);
                _mm512_store_si512((void *)&pairs[i][t], (__m512i)_mm512_cvtne2ps_pbh(high, low));
            }
        for (int c = 0; c < HEAD_DIM / LANES; c += WIDE) {
            __m512 sums[AT_ONCE][WIDE];
            for (int i = 0; i < AT_ONCE; i++)
                for (int j = 0; j < WIDE; j++) sums[i][j] = _mm512_loadu_ps(&out[g + i][(c + j) * LANES]);
            for (int pair = 0; pair < BLOCK / 2; pair++)
                for (int i = 0; i < AT_ONCE; i++) {
                    int32_t two;
                    memcpy(&two, &pairs[i][2 * pair], 4);
                    __m512bh w = (__m512bh)_mm512_set1_epi32(two);
                    for (int j = 0; j < WIDE; j++)
                        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)rows[pair][c + j], w);
                }
            for (int i = 0; i < AT_ONCE; i++)
                for (int j = 0; j < WIDE; j++) _mm512_storeu_ps(&out[g + i][(c + j) * LANES], sums[i][j]);
        }
    }
}
#else
/* out[g] += the values of one block under weights[g][t], which have the steps in them. */
static void add_values(const uint8_t *restrict values, float weights[][BLOCK], int group, float out[][HEAD_DIM]) {
    float rows[BLOCK][HEAD_DIM] __attribute__((aligned(64)));
    for (int t = 0; t < BLOCK; t++)
        for (int field = 0; field < FIELDS; field++)
            for (int c = 0; c < VALUE_BYTES; c++) {
                int code = (values[t * VALUE_BYTES + c] >> (VALUE_BITS * field)) & ((1 << VALUE_BITS) - 1);
                rows[t][field * VALUE_BYTES + c] = (float)code - ((1 << VALUE_BITS) - 1) * 0.5f;
            }
    for (int g = 0; g < group; g += AT_ONCE)
        for (int c = 0; c < HEAD_DIM; c += 2 * LANES) {
            vec sums[AT_ONCE][2];
            for (int i = 0; i < AT_ONCE; i++) memcpy(sums[i], &out[g + i][c], sizeof sums[i]);
            for (int t = 0; t < BLOCK; t++) {
                vec left = *(const vec *)&rows[t][c], right = *(const vec *)&rows[t][c + LANES];
                for (int i = 0; i < AT_ONCE; i++) {
                    sums[i][0] += weights[g + i][t] * left;
                    sums[i][1] += weights[g + i][t] * right;
                }
            }
            for (int i = 0; i < AT_ONCE; i++) memcpy(&out[g + i][c], sums[i], sizeof sums[i]);
        }
}
#endif

/* Scores of queries q [heads][group][HEAD_DIM] at tokens [start, stop), whose blocks are [first, last): scores [heads]
[group][(last - first) * 64], of the tokens in these blocks outside [start, stop) very small. Of each query the largest,
peaks, and the log of the sum of e^score, lses [heads][group]. mean [heads][HEAD_DIM]. */
void score(uint8_t *const *pages, int64_t offset, int heads, int group, const float *q, const float *mean,
           int64_t start, int64_t stop, float *scores, float *peaks, float *lses) {
    float found[MOST_QUERIES][BLOCK];
    int64_t first = start / BLOCK, last = (stop + BLOCK - 1) / BLOCK, tokens = (last - first) * BLOCK;
    Queries queries;
    for (int head = 0; head < heads; head++, scores += group * tokens, peaks += group, lses += group) {
        float sums[MOST_QUERIES][LANES];
        int padded = round_queries(&queries, q + (int64_t)head * group * HEAD_DIM, mean + head * HEAD_DIM, group);
        memset(sums, 0, sizeof sums);
        for (int g = 0; g < group; g++) peaks[g] = VERY_SMALL;
        for (int64_t b = first; b < last; b++) {
            ask_for(pages, offset, head, b, last, 0, BLOCK * KEY_BYTES);
            ask_for(pages, offset, head, b, last, STEPS, STEPS + BLOCK);
            block_scores(block_of(pages, offset, head, b), &queries, padded, found);
            int from = b * BLOCK < start ? (int)(start - b * BLOCK) : 0;
            int to = stop < (b + 1) * BLOCK ? (int)(stop - b * BLOCK) : BLOCK;
            for (int g = 0; g < group; g++) {
                float *s = found[g];
                for (int t = 0; t < from; t++) s[t] = VERY_SMALL;
                for (int t = to; t < BLOCK; t++) s[t] = VERY_SMALL;
                if (any_above(s, peaks[g])) {
                    float most = largest(s), kept = exp2_of((peaks[g] - most) * LOG2E);
                    for (int j = 0; j < LANES; j++) sums[g][j] *= kept;
                    peaks[g] = most;
                }
                float high = peaks[g] * LOG2E;
                for (int t = 0; t < BLOCK; t += LANES)
                    for (int j = 0; j < LANES; j++) sums[g][j] += exp2_of(s[t + j] * LOG2E - high);
                memcpy(scores + g * tokens + (b - first) * BLOCK, s, sizeof found[g]);
            }
        }
        for (int g = 0; g < group; g++) {
            float total = 0.0f;
            for (int j = 0; j < LANES; j++) total += sums[g][j];
            lses[g] = peaks[g] + logf(total);
        }
    }
}

/* s as cap * tanh(s / cap), from e^(-2 |s| / cap); as it is where cap is 0. */
static inline float capped(float s, float cap) {
    if (cap == 0.0f) return s;
    float decays = exp2_of(-2.0f * LOG2E * __builtin_fabsf(s) / cap);
    return __builtin_copysignf(cap * (1.0f - decays) / (1.0f + decays), s);
}

/* What of [first * 64, last * 64) is outside [start, stop) or in skip [count], negative entries apart: hidden is 1. */
static void hide(uint8_t *hidden, int64_t start, int64_t stop, int64_t first, int64_t last, const int64_t *skip,
                 int64_t count) {
    memset(hidden, 1, (size_t)((last - first) * BLOCK));
    memset(hidden + start - first * BLOCK, 0, (size_t)(stop - start));
    for (int64_t i = 0; i < count; i++)
        if (skip[i] >= 0) hidden[skip[i] - first * BLOCK] = 1;
}

/* weights[g][t] of one block: what e^(s - peak) is of scores, times the values' steps; adds to sums what it is without
them. `bias` is 0 where a token counts, else very small. */
static void weigh(const float *scores, int64_t stride, const float *peaks, const float *restrict bias,
                  const float *restrict step, float softcap, int group, float weights[][BLOCK], float sums[][LANES]) {
    for (int g = 0; g < group; g++) {
        const float *restrict s = scores + g * stride;
        float *restrict own = weights[g], high = capped(peaks[g], softcap) * LOG2E;
        for (int t = 0; t < BLOCK; t++) own[t] = capped(s[t], softcap) + bias[t];
        for (int t = 0; t < BLOCK; t += LANES)
            for (int j = 0; j < LANES; j++) {
                float share = exp2_of(own[t + j] * LOG2E - high);
                sums[g][j] += share;
                own[t + j] = share * step[t + j];
            }
    }
}

/* Attention with the scores, peaks of `score` over tokens [start, stop) without skip [heads][count]: outs [heads][group]
[HEAD_DIM] and lses [heads][group], 0 and -inf where no token is left. hidden: room for (last - first) * 64 bytes.
softcap 0: scores are not capped. */
void mix(uint8_t *const *pages, int64_t offset, int heads, int group, const float *scores, const float *peaks,
         int64_t start, int64_t stop, const int64_t *skip, int64_t count, float softcap, uint8_t *hidden, float *outs,
         float *lses) {
    float out[MOST_QUERIES][HEAD_DIM], weights[MOST_QUERIES][BLOCK], sums[MOST_QUERIES][LANES];
    int64_t first = start / BLOCK, last = (stop + BLOCK - 1) / BLOCK, tokens = (last - first) * BLOCK;
    int padded = (group + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    memset(weights, 0, sizeof weights);
    for (int head = 0; head < heads; head++, scores += group * tokens, peaks += group, lses += group) {
        memset(out, 0, sizeof out);
        memset(sums, 0, sizeof sums);
        hide(hidden, start, stop, first, last, skip + head * count, count);
        for (int64_t b = first; b < last; b++) {
            const uint8_t *block = block_of(pages, offset, head, b), *hides = hidden + (b - first) * BLOCK;
            float bias[BLOCK], step[BLOCK];
            int shown = 0;
            for (int t = 0; t < BLOCK; t++) {
                bias[t] = hides[t] ? VERY_SMALL : 0.0f;
                step[t] = step_of(block[STEPS + BLOCK + t]);
                shown |= !hides[t];
            }
            ask_for(pages, offset, head, b, last, BLOCK * KEY_BYTES, STEPS);
            ask_for(pages, offset, head, b, last, STEPS + BLOCK, BLOCK_BYTES);
            if (!shown) continue;
            weigh(scores + (b - first) * BLOCK, tokens, peaks, bias, step, softcap, group, weights, sums);
            add_values(block + BLOCK * KEY_BYTES, weights, padded, out);
        }
        for (int g = 0; g < group; g++, outs += HEAD_DIM) {
            float total = 0.0f;
            for (int j = 0; j < LANES; j++) total += sums[g][j];
            for (int c = 0; c < HEAD_DIM; c++) outs[c] = total > 0.0f ? out[g][c] / total : 0.0f;
            lses[g] = capped(peaks[g], softcap) + (total > 0.0f ? logf(total) : -INFINITY);
        }
    }
}

/* Rows [heads][count][HEAD_DIM] take the slots from `slot` on: as keys, or as values. */
void store(uint8_t *const *pages, int64_t offset, int heads, int64_t slot, int64_t count, const float *rows,
           int values) {
    int bits = values ? VALUE_BITS : 4, half = 1 << (bits - 1), most_code = 2 * half - 1, width = HEAD_DIM * bits / 8;
    for (int head = 0; head < heads; head++)
        for (int64_t i = 0; i < count; i++) {
            const float *row = rows + (head * count + i) * HEAD_DIM;
            uint8_t *block = block_of(pages, offset, head, (slot + i) / BLOCK);
            int t = (int)((slot + i) % BLOCK);
            float most = 0.0f;
            for (int c = 0; c < HEAD_DIM; c++) most = fabsf(row[c]) > most ? fabsf(row[c]) : most;
            float step = most / (float)half;
            uint32_t pattern;
            memcpy(&pattern, &step, 4);
            int upper = (int)((pattern + ((1u << 20) - 1)) >> 20) - ((127 - 20) << 3);
            uint8_t code = (uint8_t)(upper < 0 ? 0 : upper > 255 ? 255 : upper);
            step = step_of(code);
            block[STEPS + (values ? BLOCK : 0) + t] = code;
            for (int c = 0; c < width; c++) {
                int byte = 0;
                for (int field = 0; field < 8 / bits; field++) {
                    int level = (int)floorf(row[field * width + c] / step) + half;
                    byte |= (level < 0 ? 0 : level > most_code ? most_code : level) << (bits * field);
                }
                block[values ? BLOCK * KEY_BYTES + t * VALUE_BYTES + c : c * BLOCK + t] = (uint8_t)byte;
            }
        }
}
