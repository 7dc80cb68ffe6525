/* Linear layers of packed weights: codes of 4, 5, 6 or 8 bits with a scale and a minimum for each group of inputs.

A weight is (code * scale + minimum) * 2^exponent. Rows of x in bfloat16 are converted to 16-bit integers with one
scale per 32 numbers. The products of a group are then exact integer sums, and one instruction adds two products per
sum. The error of x is 2^-16 of the largest of 32 numbers, less than the error of bfloat16. Minima are multiplied with
the sums of x. Reading 14 million 4-bit weights takes 0.5 ms on one core with AVX-512 or AVX2. torch's operator takes
0.8 or 1.7 ms.

packed_format.py defines a row of weights: [codes][scales][minima or zeros][factors]. The lower 4 bits of 64 codes are
32 bytes (code i and code 32 + i in byte i). After the lower bits of the whole row, 5-bit codes have 8 bytes per 64
codes (bit i belongs to code i), and 6-bit codes have 32 bytes per 128 codes (bits 2k and 2k + 1 of byte i belong to
code 32k + i). 8-bit codes are plain bytes. Scales and minima are float16, or int8 with a float16 factor per 256 inputs.
Zeros are the codes that stand for 0, one uint8 per group. */

#include "simd.h"

#define AT_ONCE 4 /* rows of x whose sums stay in registers */
#define BLOCK 256 /* inputs with a common factor of scales */
#define SPAN 2048 /* inputs whose scales are converted at a time */
#define AHEAD 4096
#define X_GROUP 32
#define WORDS (2 * LANES) /* 16-bit numbers per vector */

typedef uint16_t words __attribute__((vector_size(4 * LANES), may_alias));
typedef words words_unaligned __attribute__((aligned(2)));
typedef uint8_t half_bytes __attribute__((vector_size(2 * LANES), may_alias));

/* out [rows][outs] = x [rows][ins] * weight [outs][ins] + bias [outs] (or NULL). `codes` are rows of `stride` bytes.
Offsets of parts that a row lacks are negative. Rows without minima have the minima -zero * scale, or -offset * scale
if they have no zeros either. `power` is 2^exponent. `whole` [rows][ins] is x as integers. Factors and sums are
[rows][units], one for each unit of inputs, padded with zeros to a multiple of 16. A part is the columns
[part * size, (part + 1) * size) of out. In `unpack`, a part is these rows of weights, written to out [outs][ins]. */
typedef struct {
    const Number *x, *bias;
    const uint8_t *codes;
    Number *out;
    int16_t *whole;
    float *factors, *sums;
    int64_t rows, outs, ins, size, stride, bits, group, high, scales, minima, zeros, factors_of_scales;
    int64_t factors_of_minima, units;
    float offset, power;
} Call;

/* Convert float16 to float32. Infinities and NaN do not occur, because importers reject them. */
INLINE f32 widen_halves(u16 halves) {
#if defined(WIDE_VECTORS)
    return (f32)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__)
    return (f32)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__aarch64__)
    return (f32)vcvt_f32_f16((float16x4_t)halves);
#else
    u32 bits = __builtin_convertvector(halves, u32); /* the exponent biases differ by 112 */
    return (f32)((u32)((f32)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

INLINE int unit_of(int bits) { return bits == 6 ? 16 : 32; } /* inputs that share scales of weights and of x */

INLINE words widen_bytes(const uint8_t *at) {
#if defined(WIDE_VECTORS)
    return (words)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__)
    return (words)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
#else
    half_bytes narrow;
    memcpy(&narrow, at, sizeof narrow);
    return __builtin_convertvector(narrow, words);
#endif
}

/* Return 16 in the words whose bits are set, 0 in all other words. */
INLINE words fifth_bits(const uint8_t *at) {
#if defined(WIDE_VECTORS)
    uint32_t bits;
    memcpy(&bits, at, sizeof bits);
    return (words)_mm512_maskz_mov_epi16((__mmask32)bits, _mm512_set1_epi16(16));
#elif LANES == 8
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    words lane = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return (words)((((words){0} + bits) & lane) == lane) & 16;
#else
    words lane = {1, 2, 4, 8, 16, 32, 64, 128};
    return (words)((((words){0} + (uint16_t)*at) & lane) == lane) & 16;
#endif
}

/* Expand codes [64 * block, 64 * block + 64) of a row to 16-bit integers. */
INLINE void expand(const Call *call, const uint8_t *row, int64_t block, int bits, words found[64 / WORDS]) {
    if (bits == 8) {
        for (int v = 0; v < 64 / WORDS; v++) found[v] = widen_bytes(row + 64 * block + v * WORDS);
        return;
    }
    const uint8_t *low = row + 32 * block, *high = row + call->high;
    for (int v = 0; v < 32 / WORDS; v++) {
        words both = widen_bytes(low + v * WORDS), lower = both & 15, upper = both >> 4;
        if (bits == 5) {
            lower |= fifth_bits(high + 8 * block + v * WORDS / 8);
            upper |= fifth_bits(high + 8 * block + 4 + v * WORDS / 8);
        }
        if (bits == 6) {
            words more = widen_bytes(high + 32 * (block / 2) + v * WORDS) << 4 >> (uint16_t)(4 * (block & 1));
            lower |= more & 0x30;
            upper |= more >> 2 & 0x30;
        }
        found[v] = lower;
        found[32 / WORDS + v] = upper;
    }
}

/* Multiply WORDS codes with 16-bit integers, and add adjacent products in each lane. */
INLINE i32 products_of(words codes, const int16_t *x) {
#if defined(WIDE_VECTORS)
    return (i32)_mm512_madd_epi16((__m512i)codes, _mm512_loadu_si512(x));
#elif defined(__AVX2__)
    return (i32)_mm256_madd_epi16((__m256i)codes, _mm256_loadu_si256((const __m256i *)x));
#elif defined(__x86_64__)
    return (i32)_mm_madd_epi16((__m128i)codes, _mm_loadu_si128((const __m128i *)x));
#elif defined(__aarch64__)
    int16x8_t a = (int16x8_t)codes, b = vld1q_s16(x);
    return (i32)vmlal_high_s16(vmull_s16(vget_low_s16(a), vget_low_s16(b)), a, b);
#else
    i32 sums = {0};
    for (int i = 0; i < WORDS; i++) sums[i / 2] += codes[i] * x[i];
    return sums;
#endif
}

/* Read `count` float16 numbers as float32 times a factor, padded with zeros to a multiple of LANES. */
INLINE void read_halves(const uint8_t *at, int64_t count, float factor, float *found) {
    u16 halves;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        memcpy(&halves, at + 2 * i, sizeof halves);
        store(found + i, widen_halves(halves) * factor);
    }
    if (i == count) return;
    uint16_t last[LANES] = {0};
    memcpy(last, at + 2 * i, (size_t)(2 * (count - i)));
    memcpy(&halves, last, sizeof halves);
    store(found + i, widen_halves(halves) * factor);
}

/* Read LANES bytes from byte i of `count`, padded with zeros. */
INLINE u32 read_bytes(const uint8_t *at, int64_t i, int64_t count) {
    if (i + LANES <= count) return load_u8(at + i);
    uint8_t last[LANES] = {0};
    memcpy(last, at + i, (size_t)(count - i));
    return load_u8(last);
}

/* Read `count` scales or minima from group `first` on: float16 at `at`, or int8 with factors at `factors`. */
INLINE void read_numbers(const Call *call, const uint8_t *row, int64_t at, int64_t factors, int64_t first,
                         int64_t count, float *found) {
    if (call->factors_of_scales < 0) {
        read_halves(row + at + 2 * first, count, call->power, found);
        return;
    }
    const int64_t each = BLOCK / call->group; /* 2, 4, 8 or 16 */
    float blocks[SPAN / BLOCK + LANES] = {0};
    read_halves(row + factors + 2 * (first / each), count / each, call->power, blocks);
    for (int64_t g = 0; g < count; g += LANES) {
        f32 whole = __builtin_convertvector((i32)(read_bytes(row + at + first, g, count) << 24) >> 24, f32);
        const int shift = each == 16 ? 4 : each == 8 ? 3 : each == 4 ? 2 : 1;
        f32 factor = each >= LANES ? all(blocks[g / each])
                                   : __builtin_shuffle(load(blocks + g / each), lane_numbers() >> shift);
        store(found + g, whole * factor);
    }
}

/* Read the scales and minima of the units of `count` inputs from `first` on, padded with zeros to a multiple of LANES.
*/
INLINE void read_scales(const Call *call, const uint8_t *row, int64_t first, int64_t count, int unit, float *scales,
                        float *minima) {
    const int64_t group = call->group, groups = count / group, each = group / unit, units = count / unit;
    read_numbers(call, row, call->scales, call->factors_of_scales, first / group, groups, scales);
    if (call->minima >= 0)
        read_numbers(call, row, call->minima, call->factors_of_minima, first / group, groups, minima);
    for (int64_t g = 0; call->zeros >= 0 && g < groups; g += LANES) {
        u32 zeros = read_bytes(row + call->zeros + first / group, g, groups);
        store(minima + g, -load(scales + g) * __builtin_convertvector((i32)zeros, f32));
    }
    const int has_minima = call->minima >= 0 || call->zeros >= 0;
    if (each > 1) {
        for (int64_t u = units; u--;) scales[u] = scales[u / each];
        if (has_minima)
            for (int64_t u = units; u--;) minima[u] = minima[u / each];
        for (int64_t u = units; u % LANES; u++) scales[u] = minima[u] = 0.0f;
    }
    if (!has_minima)
        for (int64_t u = 0; u < units; u += LANES) store(minima + u, all(-call->offset) * load(scales + u));
}

/* Unpack the weights of `count` inputs from `start` on. */
INLINE void unpack_span(const Call *call, const uint8_t *row, int64_t start, int64_t count, int bits, Number *out) {
    const int unit = unit_of(bits);
    float scales[SPAN / 16], minima[SPAN / 16];
    read_scales(call, row, start, count, unit, scales, minima);
    for (int64_t block = 0; block < count / 64; block++) {
        uint16_t codes[64];
        words found[64 / WORDS];
        expand(call, row, start / 64 + block, bits, found);
        memcpy(codes, found, sizeof codes);
        for (int i = 0; i < 64; i += LANES) {
            u16 narrow;
            memcpy(&narrow, codes + i, sizeof narrow);
            const int64_t u = block * (64 / unit) + i / unit;
            f32 code = __builtin_convertvector((i32)__builtin_convertvector(narrow, u32), f32);
            f32 weight = fma_of(code, all(scales[u]), all(minima[u]));
#if BFLOAT16
            store_bf16(out + 64 * block + i, weight);
#else
            store(out + 64 * block + i, weight);
#endif
        }
    }
}

#if BFLOAT16
/* Multiply a block of 64 codes with one row of x, and add the products to two sums. */
INLINE void add_block(const words codes[64 / WORDS], const int16_t *x, const float *scale, int unit, f32 sums[2]) {
#if LANES == 16
    if (unit == 16) { /* two units in each vector */
        const f32 scales = load(scale);
        const i32 upper = lane_numbers() >> 3;
        for (int v = 0; v < 2; v++) {
            f32 whole = __builtin_convertvector(products_of(codes[v], x + v * WORDS), f32);
            sums[v] = fma_of(whole, __builtin_shuffle(scales, upper + 2 * v), sums[v]);
        }
        return;
    }
#endif
    for (int u = 0; u < 64 / unit; u++) {
        i32 whole = {0};
        for (int v = u * unit / WORDS; v < (u + 1) * unit / WORDS; v++) whole += products_of(codes[v], x + v * WORDS);
        sums[u & 1] = fma_of(__builtin_convertvector(whole, f32), all(scale[u]), sums[u & 1]);
    }
}

/* Multiply one row of weights with `rows` rows of x, from row `first` on. */
INLINE void tile(const Call *call, const uint8_t *row, int64_t first, int rows, int bits, float *found) {
    const int unit = unit_of(bits), per = 64 / unit;
    const int64_t ins = call->ins;
    float scales[SPAN / 16], minima[SPAN / 16], factors[AT_ONCE][SPAN / 16 + LANES];
    f32 sums[AT_ONCE][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = all(0.0f);
    for (int64_t start = 0; start < ins; start += SPAN) {
        const int64_t count = ins - start < SPAN ? ins - start : SPAN;
        read_scales(call, row, start, count, unit, scales, minima);
        for (int r = 0; r < rows; r++) {
            const int64_t at = (first + r) * call->units + start / unit;
            for (int64_t u = 0; u < count / unit; u += LANES) {
                store(factors[r] + u, load(scales + u) * load(call->factors + at + u));
                sums[r][0] = fma_of(load(minima + u), load(call->sums + at + u), sums[r][0]);
            }
        }
        for (int64_t block = 0; block < count / 64; block++) {
            words codes[64 / WORDS];
            const int64_t at = start / 64 + block;
            __builtin_prefetch(row + (bits == 8 ? 64 : 32) * at + AHEAD);
            expand(call, row, at, bits, codes);
            for (int r = 0; r < rows; r++)
                add_block(codes, call->whole + (first + r) * ins + 64 * at, factors[r] + block * per, unit, sums[r]);
        }
    }
    for (int r = 0; r < rows; r++) found[r] = sum_of(sums[r][0] + sums[r][1]);
}

#else
/* Multiply one row of weights with `rows` rows of x in float32, because 16-bit integers would be less exact. */
INLINE void tile(const Call *call, const uint8_t *row, int64_t first, int rows, int bits, float *found) {
    const int64_t ins = call->ins;
    float weights[SPAN];
    f32 sums[AT_ONCE][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = all(0.0f);
    for (int64_t start = 0; start < ins; start += SPAN) {
        const int64_t count = ins - start < SPAN ? ins - start : SPAN;
        unpack_span(call, row, start, count, bits, weights);
        for (int r = 0; r < rows; r++) {
            const float *x = call->x + (first + r) * ins + start;
            for (int64_t i = 0; i < count; i += 2 * LANES) {
                sums[r][0] = fma_of(load(weights + i), load(x + i), sums[r][0]);
                sums[r][1] = fma_of(load(weights + i + LANES), load(x + i + LANES), sums[r][1]);
            }
        }
    }
    for (int r = 0; r < rows; r++) found[r] = sum_of(sums[r][0] + sums[r][1]);
}
#endif

/* The code is specialised for each number of rows and bits, so that sums stay in registers. */
INLINE void tiles(const Call *call, const uint8_t *row, int64_t first, int rows, int bits, float *found) {
    switch (rows) {
    case 1: tile(call, row, first, 1, bits, found); return;
    case 2: tile(call, row, first, 2, bits, found); return;
    case 3: tile(call, row, first, 3, bits, found); return;
    default: tile(call, row, first, 4, bits, found);
    }
}

static void products(const Call *call, const uint8_t *row, int64_t first, int rows, float *found) {
    switch (call->bits) {
    case 4: tiles(call, row, first, rows, 4, found); return;
    case 5: tiles(call, row, first, rows, 5, found); return;
    case 6: tiles(call, row, first, rows, 6, found); return;
    default: tiles(call, row, first, rows, 8, found);
    }
}

INLINE void store_number(Number *at, float x) {
#if BFLOAT16
    *at = rounded(x);
#else
    *at = x;
#endif
}

void linear(const void *given, int64_t part) {
    const Call *call = given;
    float found[AT_ONCE] = {0};
    int64_t rows = call->rows, groups = (rows + AT_ONCE - 1) / AT_ONCE;
    int64_t most = (rows + groups - 1) / groups; /* split 5 rows into 3 and 2, not 4 and 1 */
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    for (int64_t o = begin; o < end; o++)
        for (int64_t first = 0; first < rows; first += most) {
            int count = (int)(rows - first < most ? rows - first : most);
            products(call, call->codes + o * call->stride, first, count, found);
            for (int r = 0; r < count; r++) {
                float sum = call->bias ? found[r] + as_float(call->bias[o]) : found[r];
                store_number(call->out + (first + r) * call->outs + o, sum);
            }
        }
}

#if BFLOAT16
/* Convert row `part` of x to integers. If a number is not finite, the factor is NaN, and so are all results. */
void prepare(const void *given, int64_t part) {
    const Call *call = given;
    const int64_t ins = call->ins, unit = unit_of((int)call->bits);
    const Number *x = call->x + part * ins;
    int16_t *whole = call->whole + part * ins;
    for (int64_t c = 0; c < ins; c += X_GROUP) {
        float numbers[X_GROUP], most = 0.0f, odd = 0.0f;
        for (int i = 0; i < X_GROUP; i++) numbers[i] = as_float(x[c + i]);
        for (int i = 0; i < X_GROUP; i++) most = fabsf(numbers[i]) > most ? fabsf(numbers[i]) : most;
        for (int i = 0; i < X_GROUP; i++) odd += numbers[i] - numbers[i];
        const float factor = most > 0.0f ? most / 32767.0f : 0.0f, inverse = factor >= 0x1p-120f ? 1.0f / factor : 0.0f;
        for (int i = 0; i < X_GROUP; i++) {
            float scaled = odd == 0.0f ? numbers[i] * inverse : 0.0f;
            scaled = scaled > 32767.0f ? 32767.0f : scaled < -32767.0f ? -32767.0f : scaled;
            whole[c + i] = (int16_t)rintf(scaled);
        }
        for (int64_t u = 0; u < X_GROUP; u += unit) {
            const int64_t at = part * call->units + (c + u) / unit;
            int32_t sum = 0;
            for (int64_t i = u; i < u + unit; i++) sum += whole[c + i];
            call->factors[at] = odd == 0.0f ? factor : NAN;
            call->sums[at] = odd == 0.0f ? (float)sum * factor : NAN;
        }
    }
}
#endif

INLINE void unpack_row(const Call *call, const uint8_t *row, Number *out, int bits) {
    for (int64_t start = 0; start < call->ins; start += SPAN) {
        const int64_t count = call->ins - start < SPAN ? call->ins - start : SPAN;
        unpack_span(call, row, start, count, bits, out + start);
    }
}

void unpack(const void *given, int64_t part) {
    const Call *call = given;
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    for (int64_t o = begin; o < end; o++) {
        const uint8_t *row = call->codes + o * call->stride;
        Number *out = call->out + o * call->ins;
        switch (call->bits) {
        case 4: unpack_row(call, row, out, 4); break;
        case 5: unpack_row(call, row, out, 5); break;
        case 6: unpack_row(call, row, out, 6); break;
        default: unpack_row(call, row, out, 8);
        }
    }
}
