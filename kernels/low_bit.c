/* Scores with low-bit keys, and attention over low-bit rows, on a processor: what low_bit.py defines, in one pass.

Compiled by native.py for one head dimension (HEAD_DIM), one number of bits of a value (VALUE_BITS) and pages of so many
blocks of each head (PAGE_BLOCKS). A block holds 64 tokens: keys byte by byte of all tokens (byte i: channels i and i + KEY_BYTES), values token by token, steps of keys,
steps of values. Loops run over 64 tokens or HEAD_DIM channels without branches, so that compilers turn them into vector
instructions. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define BLOCK 64
#define KEY_BYTES (HEAD_DIM / 2)
#define VALUE_BYTES (HEAD_DIM * VALUE_BITS / 8)
#define BLOCK_BYTES (BLOCK * (KEY_BYTES + VALUE_BYTES + 2))
#define FIELDS (8 / VALUE_BITS)
#define LANES 16
#define MOST_QUERIES 32
#define AT_ONCE 4 /* queries whose sums stay in registers; a group is padded to a multiple */

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

/* Where block b of a head lies: every page holds PAGE_BLOCKS blocks of each head, from `offset` bytes on. */
static inline uint8_t *block_of(uint8_t *const *pages, int64_t offset, int head, int64_t b) {
    return pages[b / PAGE_BLOCKS] + offset + ((int64_t)head * PAGE_BLOCKS + b % PAGE_BLOCKS) * BLOCK_BYTES;
}

static inline float step_of(uint8_t code) {
    uint32_t bits = ((uint32_t)code + ((127 - 20) << 3)) << 20;
    float step;
    memcpy(&step, &bits, sizeof step);
    return step;
}

/* e^x for x <= 0: a power of two and a polynomial of degree 6, 2e-7 off at most; 0 below -60 (numbers too small to be
normal would be slow). */
static inline float exp_of(float y) {
    float x = y < -60.0f ? -60.0f : y;
    float scaled = x * 1.44269504f;
    float whole = __builtin_floorf(scaled + 0.5f);
    float f = scaled - whole;
    float power = 1.0f + f * (0.6931472f + f * (0.24022651f + f * (0.05550327f + f * (0.009618437f +
                  f * (0.0013338f + f * 0.00015403530f)))));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float two;
    memcpy(&two, &bits, sizeof two);
    return y < -60.0f ? 0.0f : two * power;
}

#ifdef __AVX512VNNI__
/* sums[g][t]: over channels of weight and code, whole numbers. Four bytes of a token side by side make one number of
its own in a vector: vpdpbusd adds four products at once. */
static void code_sums(const uint8_t *restrict block, const int8_t *restrict weights, int group,
                      float sums[][BLOCK]) {
    __m512i codes[2][KEY_BYTES / 4][4];
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int i = 0; i < KEY_BYTES / 4; i++) {
        const uint8_t *rows = block + 4 * i * BLOCK;
        __m512i a = _mm512_loadu_si512(rows), b = _mm512_loadu_si512(rows + BLOCK);
        __m512i c = _mm512_loadu_si512(rows + 2 * BLOCK), d = _mm512_loadu_si512(rows + 3 * BLOCK);
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
        /* found[j][k] has the tokens 16 l + 4 k and following in its quarter l */
        for (int j = 0; j < AT_ONCE; j++)
            for (int k = 0; k < 4; k++) {
                __m512 f = _mm512_cvtepi32_ps(found[j][k]);
                _mm_storeu_ps(&sums[g + j][4 * k], _mm512_extractf32x4_ps(f, 0));
                _mm_storeu_ps(&sums[g + j][16 + 4 * k], _mm512_extractf32x4_ps(f, 1));
                _mm_storeu_ps(&sums[g + j][32 + 4 * k], _mm512_extractf32x4_ps(f, 2));
                _mm_storeu_ps(&sums[g + j][48 + 4 * k], _mm512_extractf32x4_ps(f, 3));
            }
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

/* scores[g][t] of one block: (sum over channels of weight and code - middle) * step * scale + shift. */
static void block_scores(const uint8_t *restrict block, const int8_t *restrict weights, const float *restrict middle,
                         const float *restrict scale, const float *restrict shift, int group,
                         float scores[][BLOCK]) {
    float step[BLOCK];
    const uint8_t *steps = block + BLOCK * (KEY_BYTES + VALUE_BYTES);
    code_sums(block, weights, group, scores);
    for (int t = 0; t < BLOCK; t++) step[t] = step_of(steps[t]);
    for (int g = 0; g < group; g++)
        for (int t = 0; t < BLOCK; t++) scores[g][t] = (scores[g][t] - middle[g]) * step[t] * scale[g] + shift[g];
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
    const __m512i table = _mm512_loadu_si512(levels), fields = _mm512_set1_epi16((1 << VALUE_BITS) - 1);
    __m512i rows[BLOCK / 2][HEAD_DIM / LANES];
    for (int pair = 0; pair < BLOCK / 2; pair++)
        for (int c = 0; c < VALUE_BYTES; c += LANES) {
            const uint8_t *first = values + 2 * pair * VALUE_BYTES + c;
            __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)first));
            __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(first + VALUE_BYTES)));
            __m512i both = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            for (int field = 0; field < FIELDS; field++) {
                __m512i codes = _mm512_and_si512(_mm512_srli_epi32(both, VALUE_BITS * field), fields);
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
        for (int c = 0; c < HEAD_DIM / LANES; c += 2) {
            __m512 sums[AT_ONCE][2];
            for (int i = 0; i < AT_ONCE; i++)
                for (int j = 0; j < 2; j++) sums[i][j] = _mm512_loadu_ps(&out[g + i][(c + j) * LANES]);
            for (int pair = 0; pair < BLOCK / 2; pair++)
                for (int i = 0; i < AT_ONCE; i++) {
                    int32_t two;
                    memcpy(&two, &pairs[i][2 * pair], 4);
                    __m512bh w = (__m512bh)_mm512_set1_epi32(two);
                    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], (__m512bh)rows[pair][c], w);
                    sums[i][1] = _mm512_dpbf16_ps(sums[i][1], (__m512bh)rows[pair][c + 1], w);
                }
            for (int i = 0; i < AT_ONCE; i++)
                for (int j = 0; j < 2; j++) _mm512_storeu_ps(&out[g + i][(c + j) * LANES], sums[i][j]);
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

/* s as cap * tanh(s / cap), from e^(-2 |s| / cap). */
static inline float capped(float s, float cap) {
    float decays = exp_of(-2.0f * __builtin_fabsf(s) / cap);
    return __builtin_copysignf(cap * (1.0f - decays) / (1.0f + decays), s);
}

/* One KV head over blocks [first, last): hidden[t] is 0 where token t of them counts, else 1. */
static void attend_head(uint8_t *const *pages, int64_t offset, int head, const int8_t *weights, const float *middle,
                        const float *scale, const float *shift, const uint8_t *hidden, int64_t first, int64_t last,
                        float softcap, int group, float out[][HEAD_DIM], float *peak, float *total) {
    float scores[MOST_QUERIES][BLOCK], sums[MOST_QUERIES][LANES];
    memset(sums, 0, sizeof sums);
    for (int g = 0; g < group; g++) {
        peak[g] = -3e38f;
        memset(out[g], 0, sizeof out[g]);
    }
    for (int64_t b = first; b < last; b++) {
        const uint8_t *block = block_of(pages, offset, head, b), *hides = hidden + (b - first) * BLOCK;
        const uint8_t *steps = block + BLOCK * (KEY_BYTES + VALUE_BYTES + 1);
        float shown[BLOCK], step[BLOCK];
        int any = 0;
        for (int t = 0; t < BLOCK; t++) {
            shown[t] = 1.0f - (float)hides[t];
            step[t] = step_of(steps[t]);
            any |= !hides[t];
        }
        if (!any) continue;
        block_scores(block, weights, middle, scale, shift, group, scores);
        for (int g = 0; g < group; g++) {
            float *s = scores[g];
            if (softcap > 0.0f)
                for (int t = 0; t < BLOCK; t++) s[t] = capped(s[t], softcap);
            for (int t = 0; t < BLOCK; t++) s[t] = shown[t] > 0.0f ? s[t] : -3e38f;
            float most = largest(s);
            if (most > peak[g]) {
                float kept = exp_of(peak[g] - most);
                for (int c = 0; c < HEAD_DIM; c++) out[g][c] *= kept;
                for (int j = 0; j < LANES; j++) sums[g][j] *= kept;
                peak[g] = most;
            }
            float high = peak[g];
            for (int t = 0; t < BLOCK; t++) s[t] = shown[t] * exp_of(s[t] - high);
            for (int t = 0; t < BLOCK; t += LANES)
                for (int j = 0; j < LANES; j++) sums[g][j] += s[t + j];
            for (int t = 0; t < BLOCK; t++) s[t] *= step[t];
        }
        add_values(block + BLOCK * KEY_BYTES, scores, group, out);
    }
    for (int g = 0; g < group; g++) {
        total[g] = 0.0f;
        for (int j = 0; j < LANES; j++) total[g] += sums[g][j];
    }
}

/* Attention of all heads over blocks [first, last): outs [heads * group][HEAD_DIM] not yet divided, peaks and totals
[heads * group]. hidden [heads][(last - first) * 64]; weights [heads * group][HEAD_DIM], a multiple of AT_ONCE queries in
a group; middle, scale, shift [heads * group]; softcap 0: scores are not capped. */
void attend(uint8_t *const *pages, int64_t offset, int heads, int group, const int8_t *weights,
            const float *middle, const float *scale, const float *shift, const uint8_t *hidden, int64_t first,
            int64_t last, float softcap, float *outs, float *peaks, float *totals) {
    for (int head = 0; head < heads; head++) {
        int64_t row = (int64_t)head * group;
        attend_head(pages, offset, head, weights + row * HEAD_DIM, middle + row, scale + row, shift + row,
                    hidden + head * (last - first) * BLOCK, first, last, softcap, group,
                    (float(*)[HEAD_DIM])(outs + row * HEAD_DIM), peaks + row, totals + row);
    }
}

/* Scores of tokens [start, stop) in blocks [first, last): scores [heads * group][(last - first) * 64], of the tokens in
these blocks outside [start, stop) very small; of each query the largest, peaks, and the sum of exp(score - largest),
totals [heads * group]. */
void score(uint8_t *const *pages, int64_t offset, int heads, int group, const int8_t *weights,
           const float *middle, const float *scale, const float *shift, int64_t start, int64_t stop, float *scores,
           float *peaks, float *totals) {
    float found[MOST_QUERIES][BLOCK];
    int64_t first = start / BLOCK, last = (stop + BLOCK - 1) / BLOCK, tokens = (last - first) * BLOCK;
    for (int head = 0; head < heads; head++) {
        int64_t row = (int64_t)head * group;
        float sums[MOST_QUERIES][LANES];
        memset(sums, 0, sizeof sums);
        for (int g = 0; g < group; g++) peaks[row + g] = -3e38f;
        for (int64_t b = first; b < last; b++) {
            block_scores(block_of(pages, offset, head, b), weights + row * HEAD_DIM, middle + row, scale + row,
                         shift + row, group, found);
            int from = b * BLOCK < start ? (int)(start - b * BLOCK) : 0;
            int to = stop < (b + 1) * BLOCK ? (int)(stop - b * BLOCK) : BLOCK;
            for (int g = 0; g < group; g++) {
                float *s = found[g];
                for (int t = 0; t < from; t++) s[t] = -3e38f;
                for (int t = to; t < BLOCK; t++) s[t] = -3e38f;
                float most = largest(s);
                if (most > peaks[row + g]) {
                    float kept = exp_of(peaks[row + g] - most);
                    for (int j = 0; j < LANES; j++) sums[g][j] *= kept;
                    peaks[row + g] = most;
                }
                float high = peaks[row + g], shares[BLOCK];
                for (int t = 0; t < BLOCK; t++) shares[t] = exp_of(s[t] - high);
                for (int t = 0; t < BLOCK; t += LANES)
                    for (int j = 0; j < LANES; j++) sums[g][j] += shares[t + j];
                memcpy(scores + (row + g) * tokens + (b - first) * BLOCK, s, sizeof found[g]);
            }
        }
        for (int g = 0; g < group; g++) {
            totals[row + g] = 0.0f;
            for (int j = 0; j < LANES; j++) totals[row + g] += sums[g][j];
        }
    }
}

/* values[heads][n]: the largest score - lse of a KV head's first `group` of `padded` queries, of tokens that lie
`stride` floats apart from query to query. passing[t] is 1 where a score reaches its query's threshold in any head;
returns how many scores do. */
int64_t rank(const float *scores, int64_t stride, int heads, int group, int padded, int64_t n, const float *lse,
             const float *threshold, float *restrict values, uint8_t *restrict passing) {
    int64_t count = 0;
    memset(passing, 0, (size_t)n);
    for (int head = 0; head < heads; head++)
        for (int g = 0; g < group; g++) {
            const float *restrict s = scores + ((int64_t)head * padded + g) * stride;
            float *restrict best = values + head * n;
            float less = lse[head * padded + g], least = threshold[head * padded + g];
            int32_t more = 0;
            for (int64_t t = 0; t < n; t++) {
                float value = s[t] - less;
                best[t] = g == 0 || value > best[t] ? value : best[t];
                passing[t] |= s[t] >= least;
                more += s[t] >= least;
            }
            count += more;
        }
    return count;
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
            block[BLOCK * (KEY_BYTES + VALUE_BYTES) + (values ? BLOCK : 0) + t] = code;
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
