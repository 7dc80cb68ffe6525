/* The layout of packed weights (packed_format.py), and reading of rows that are not interleaved.

A row of weights is [codes][scales][minima or zeros][factors]. The lower 4 bits of 64 codes are 32 bytes (code i and
code 32 + i in byte i). After the lower bits of the whole row, 5-bit codes have 8 bytes per 64 codes (bit i belongs to
code i), and 6-bit codes have 32 bytes per 128 codes (bits 2k and 2k + 1 of byte i belong to code 32k + i). 8-bit codes
are plain bytes. Scales and minima are float16, or int8 with a float16 factor per 256 inputs. Zeros are the codes that
stand for 0, one uint8 per group. */

#ifndef OFFLOAD_RT_PACKED_ROWS_H
#define OFFLOAD_RT_PACKED_ROWS_H

#include "simd.h"

#define TILE 16   /* rows of weights that are interleaved */
#define BLOCK 256 /* inputs with a common factor of scales */
#define SPAN 2048 /* inputs whose scales are converted at a time */
#define WORDS (2 * LANES) /* 16-bit numbers per vector */

typedef uint16_t words __attribute__((vector_size(4 * LANES), may_alias));
typedef uint8_t half_bytes __attribute__((vector_size(2 * LANES), may_alias));

/* out [rows][outs] = x [rows][ins] * weight [outs][ins] + bias [outs] (or NULL). `codes` are rows of `stride` bytes.
Offsets of parts that a row lacks are negative. Rows without minima have the minima -zero * scale, or -offset * scale
if they have no zeros either. `power` is 2^exponent. `whole` [rows][ins] is x as integers, in the order of
`store_integers`. Factors and sums are [rows][units], one for each unit of inputs. A part is the columns
[part * size, (part + 1) * size) of out; `size` is a multiple of TILE. In `unpack`, a part is these rows of weights,
written to out [outs][ins]. If the rows are interleaved, `tile` has room for the rows of one tile. */
typedef struct {
    const Number *x, *bias;
    const uint8_t *codes;
    Number *out;
    int16_t *whole;
    uint32_t *tile;
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
    const int64_t each = BLOCK / call->group; /* 8 or 16 */
    float blocks[SPAN / BLOCK + LANES] = {0};
    read_halves(row + factors + 2 * (first / each), count / each, call->power, blocks);
    for (int64_t g = 0; g < count; g += LANES) {
        f32 whole = __builtin_convertvector((i32)(read_bytes(row + at + first, g, count) << 24) >> 24, f32);
        const int shift = each == 16 ? 4 : 3;
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

#endif
