/* Linear layers of packed weights: codes of 4, 5, 6 or 8 bits with a scale and a minimum for each group of inputs.

A weight is (code * scale + minimum) * 2^exponent. packed_format.py defines a row of weights: [codes][scales][minima or
zeros][factors]. The lower 4 bits of 64 codes are 32 bytes (code i and code 32 + i in byte i). After the lower bits of
the whole row, 5-bit codes have 8 bytes per 64 codes (bit i belongs to code i), and 6-bit codes have 32 bytes per 128
codes (bits 2k and 2k + 1 of byte i belong to code 32k + i). 8-bit codes are plain bytes. Scales and minima are float16,
or int8 with a float16 factor per 256 inputs. Zeros are the codes that stand for 0, one uint8 per group.

`linear` reads rows that are interleaved in tiles, so that each lane of a vector computes one output, and neither scales
nor sums are moved between lanes. `unpack` reads rows that are not interleaved.

Rows of x in bfloat16 are converted to 16-bit integers with one scale per 32 numbers. The products of a group are then
exact integer sums, and one instruction adds two products per sum. The error of x is 2^-16 of the largest of 32 numbers,
less than the error of bfloat16. Minima are multiplied with the sums of x. */

#include "simd.h"

#define AT_ONCE 4 /* rows of x whose sums stay in registers */
#define TILE 16   /* rows of weights that are interleaved */
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
if they have no zeros either. `power` is 2^exponent. `whole` [rows][ins] is x as integers, the numbers 0, 2, 1 and 3 of
each four. Factors and sums are [rows][units], one for each unit of inputs. A part is the columns
[part * size, (part + 1) * size) of out; `size` is a multiple of TILE. In `unpack`, a part is these rows of weights,
written to out [outs][ins]. */
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

/* Convert float16 in the lower half of each number to float32. Infinities and NaN do not occur, because importers reject
them. */
INLINE f32 widen_low_halves(u32 bits) { /* the exponent biases differ by 112 */
    return (f32)((u32)((f32)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
}

INLINE f32 widen_halves(u16 halves) {
#if defined(WIDE_VECTORS)
    return (f32)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__AVX2__)
    return (f32)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__aarch64__)
    return (f32)vcvt_f32_f16((float16x4_t)halves);
#else
    return widen_low_halves(__builtin_convertvector(halves, u32));
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

/* A tile of rows of weights: `height` rows at `at`, of which LANES rows from `first` on are computed. */
typedef struct {
    const uint8_t *at;
    int height, first;
} Tile;

/* Return the 4 bytes at `offset` of each row. */
INLINE u32 word_of(Tile tile, int64_t offset) {
    u32 word = {0};
    const uint8_t *at = tile.at + offset * tile.height + 4 * tile.first;
    if (tile.height == TILE) return (u32)load_bytes(at);
    memcpy(&word, at, 4 * (size_t)(tile.height - tile.first < LANES ? tile.height - tile.first : LANES));
    return word;
}

/* Return the byte at `offset` of each row. */
INLINE u32 byte_of(Tile tile, int64_t offset) { return word_of(tile, offset & ~3) >> 8 * (uint32_t)(offset & 3) & 255; }

INLINE f32 half_of(Tile tile, int64_t offset) {
    return widen_low_halves(word_of(tile, offset & ~3) >> 8 * (uint32_t)(offset & 3));
}

/* Return the scales or minima of a group. `factor` is 2^exponent or, if they are int8, their factor. */
INLINE f32 numbers_of(const Call *call, Tile tile, int64_t at, int64_t group, f32 factor) {
    if (call->factors_of_scales < 0) return half_of(tile, at + 2 * group) * factor;
    return __builtin_convertvector((i32)(byte_of(tile, at + group) << 24) >> 24, f32) * factor;
}

/* Read the scales and minima of each unit of inputs in a block of 64. A group has 2^shift units. */
INLINE void scales_of(const Call *call, Tile tile, int64_t block, int per, int shift, f32 factors[2], f32 *scales,
                      f32 *minima) {
    if (call->factors_of_scales >= 0 && block % (BLOCK / 64) == 0) {
        const int64_t at = block / (BLOCK / 64) * 2;
        factors[0] = half_of(tile, call->factors_of_scales + at) * call->power;
        if (call->minima >= 0) factors[1] = half_of(tile, call->factors_of_minima + at) * call->power;
    }
#pragma GCC unroll 4
    for (int u = 0; u < per; u++) {
        const int64_t group = (block * per + u) >> shift;
        scales[u] = numbers_of(call, tile, call->scales, group, factors[0]);
        if (call->minima >= 0)
            minima[u] = numbers_of(call, tile, call->minima, group, factors[1]);
        else if (call->zeros >= 0)
            minima[u] = -scales[u] * __builtin_convertvector((i32)byte_of(tile, call->zeros + group), f32);
        else
            minima[u] = -scales[u] * call->offset;
    }
}

/* Read codes [4j, 4j + 4) and [32 + 4j, 32 + 4j + 4) of a block of 64 of each row. A result has two codes per lane:
codes 0 and 2, then 1 and 3, of the first and of the second four. */
INLINE void codes_of(const Call *call, Tile tile, int64_t block, int j, int bits, u32 codes[4]) {
    if (bits == 8) {
        for (int side = 0; side < 2; side++) {
            u32 four = word_of(tile, 64 * block + 32 * side + 4 * j);
            codes[2 * side] = four & 0x00ff00ff;
            codes[2 * side + 1] = four >> 8 & 0x00ff00ff;
        }
        return;
    }
    u32 low = word_of(tile, 32 * block + 4 * j);
    for (int i = 0; i < 4; i++) codes[i] = low >> (4 * (i >> 1) + 8 * (i & 1)) & 0x000f000f;
    if (bits == 5)
        for (int side = 0; side < 2; side++) {
            u32 four = word_of(tile, call->high + 8 * block + 4 * side) >> 4 * j;
            codes[2 * side] |= (four & 1) << 4 | (four & 4) << 18;
            codes[2 * side + 1] |= (four & 2) << 3 | (four & 8) << 17;
        }
    if (bits == 6) {
        u32 high = word_of(tile, call->high + 32 * (block / 2) + 4 * j) >> 4 * (uint32_t)(block & 1);
        for (int i = 0; i < 4; i++) codes[i] |= (high >> (2 * (i >> 1) + 8 * (i & 1)) & 0x00030003) << 4;
    }
}

/* Prefetch one of `blocks` parts of the next tile. Hardware prefetches the codes of this tile, but not its scales. */
INLINE void prefetch_next(const Call *call, Tile tile, int64_t block, int64_t lines) {
    if (tile.height < TILE || tile.first) return;
    const uint8_t *next = tile.at + TILE * call->stride + block * lines * 64;
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch(next + 64 * line);
}

#if BFLOAT16
/* Multiply the two codes of each lane with two numbers of x, and add the products to `sums`. */
INLINE i32 add_products(i32 sums, u32 codes, const int16_t *x) {
#if defined(__x86_64__)
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
#endif
#if defined(WIDE_VECTORS) && defined(__AVX512VNNI__)
    return (i32)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(pair));
#elif defined(WIDE_VECTORS)
    return sums + (i32)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    return sums + (i32)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(pair));
#elif defined(__x86_64__)
    return sums + (i32)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(pair));
#else
    return sums + (i32)(codes & 0xffff) * x[0] + (i32)(codes >> 16) * x[1];
#endif
}

/* Add the products of a block of 64 inputs to the sums of `rows` rows of x, from row `first` on. */
INLINE void add_block(const Call *call, Tile tile, int64_t block, int64_t first, int rows, int bits, const f32 *scales,
                      const f32 *minima, f32 sums[AT_ONCE][2]) {
    const int per = 64 / unit_of(bits);
    const int16_t *x = call->whole + first * call->ins + 64 * block;
    const int64_t units = first * call->units + block * per;
#pragma GCC unroll 2
    for (int part = 0; part < per / 2; part++) {
        i32 whole[AT_ONCE][2] = {0};
#pragma GCC unroll 8
        for (int j = part * 4; j < part * 4 + 16 / per; j++) {
            u32 codes[4];
            codes_of(call, tile, block, j, bits, codes);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    whole[r][i / 2] = add_products(whole[r][i / 2], codes[i], x + r * call->ins + 16 * (i & 2) + 4 * j + 2 * (i & 1));
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                const int u = side * per / 2 + part;
                const int64_t at = units + r * call->units + u;
                f32 product = __builtin_convertvector(whole[r][side], f32) * call->factors[at];
                sums[r][0] = fma_of(product, scales[u], sums[r][0]);
                sums[r][1] = fma_of(minima[u], all(call->sums[at]), sums[r][1]);
            }
    }
}

#else
/* As above, but multiply unpacked weights in float32, because 16-bit integers would be less exact. */
INLINE void add_block(const Call *call, Tile tile, int64_t block, int64_t first, int rows, int bits, const f32 *scales,
                      const f32 *minima, f32 sums[AT_ONCE][2]) {
    for (int j = 0; j < 8; j++) {
        u32 codes[4];
        codes_of(call, tile, block, j, bits, codes);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) { /* input i % 4 of side i / 4 */
            const int u = unit_of(bits) == 16 ? 2 * (i / 4) + j / 4 : i / 4;
            u32 code = codes[2 * (i / 4) + (i & 1)] >> (i & 2 ? 16 : 0) & 0xffff;
            f32 weight = fma_of(__builtin_convertvector((i32)code, f32), scales[u], minima[u]);
            const float *x = call->x + first * call->ins + 64 * block + 32 * (i / 4) + 4 * j + i % 4;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][i & 1] = fma_of(weight, all(x[r * call->ins]), sums[r][i & 1]);
        }
    }
}
#endif

/* Multiply LANES rows of weights with `rows` rows of x, from row `first` on. */
INLINE void multiply(const Call *call, Tile tile, int64_t first, int rows, int bits, f32 found[AT_ONCE]) {
    f32 sums[AT_ONCE][2], scales[4], minima[4], factors[2] = {all(call->power), all(call->power)};
    const int64_t blocks = call->ins / 64, lines = (TILE * call->stride / blocks + 63) / 64;
    const int shift = __builtin_ctzll((uint64_t)(call->group / unit_of(bits)));
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = all(0.0f);
    for (int64_t block = 0; block < blocks; block++) {
        prefetch_next(call, tile, block, lines);
        scales_of(call, tile, block, 64 / unit_of(bits), shift, factors, scales, minima);
        add_block(call, tile, block, first, rows, bits, scales, minima, sums);
    }
    for (int r = 0; r < rows; r++) found[r] = sums[r][0] + sums[r][1];
}

/* The code is specialised for each number of rows and bits, so that sums stay in registers. */
INLINE void multiply_rows(const Call *call, Tile tile, int64_t first, int rows, int bits, f32 found[AT_ONCE]) {
    if (tile.height < TILE) {
        for (int r = 0; r < rows; r++) multiply(call, tile, first + r, 1, bits, found + r);
        return;
    }
    tile.height = TILE; /* a constant */
    switch (rows) {
    case 1: multiply(call, tile, first, 1, bits, found); return;
    case 2: multiply(call, tile, first, 2, bits, found); return;
    case 3: multiply(call, tile, first, 3, bits, found); return;
    default: multiply(call, tile, first, 4, bits, found);
    }
}

static void products(const Call *call, Tile tile, int64_t first, int rows, f32 found[AT_ONCE]) {
    switch (call->bits) {
    case 4: multiply_rows(call, tile, first, rows, 4, found); return;
    case 5: multiply_rows(call, tile, first, rows, 5, found); return;
    case 6: multiply_rows(call, tile, first, rows, 6, found); return;
    default: multiply_rows(call, tile, first, rows, 8, found);
    }
}

INLINE void store_number(Number *at, float x) {
#if BFLOAT16
    *at = rounded(x);
#else
    *at = x;
#endif
}

/* Multiply LANES rows of weights, from output `o` on, with all rows of x. */
static void columns(const Call *call, Tile tile, int64_t o) {
    f32 found[AT_ONCE];
    const int64_t rows = call->rows, groups = (rows + AT_ONCE - 1) / AT_ONCE;
    const int64_t most = (rows + groups - 1) / groups; /* split 5 rows into 3 and 2, not 4 and 1 */
    for (int64_t first = 0; first < rows; first += most) {
        const int count = (int)(rows - first < most ? rows - first : most);
        products(call, tile, first, count, found);
        for (int r = 0; r < count; r++)
            for (int i = 0; i < LANES && tile.first + i < tile.height; i++) {
                float bias = call->bias ? as_float(call->bias[o + i]) : 0.0f;
                store_number(call->out + (first + r) * call->outs + o + i, found[r][i] + bias);
            }
    }
}

void linear(const void *given, int64_t part) {
    const Call *call = given;
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    for (int64_t o = begin; o < end; o += TILE) {
        Tile tile = {call->codes + o * call->stride, end - o < TILE ? (int)(end - o) : TILE, 0};
        for (; tile.first < tile.height; tile.first += LANES) columns(call, tile, o + tile.first);
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
            whole[c + (i & ~3) + (i & 1) * 2 + (i >> 1 & 1)] = (int16_t)rintf(scaled);
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

/* Copy the rows of a tile, which are interleaved, to `rows`. */
static void copy_rows(const uint8_t *tile, int64_t height, int64_t words, uint32_t *rows) {
    for (int64_t start = 0; start < words; start += TILE)
        for (int64_t r = 0; r < height; r++)
            for (int64_t w = start; w < start + TILE && w < words; w++)
                memcpy(rows + r * words + w, tile + 4 * (w * height + r), 4);
}

void unpack(const void *given, int64_t part) {
    const Call *call = given;
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    const uint8_t *row = call->codes + begin * call->stride;
    for (int64_t o = begin; o < end; o++, row += call->stride) {
        if (call->tile && (o - begin) % TILE == 0) {
            copy_rows(call->codes + o * call->stride, end - o < TILE ? end - o : TILE, call->stride / 4, call->tile);
            row = (const uint8_t *)call->tile;
        }
        Number *out = call->out + o * call->ins;
        switch (call->bits) {
        case 4: unpack_row(call, row, out, 4); break;
        case 5: unpack_row(call, row, out, 5); break;
        case 6: unpack_row(call, row, out, 6); break;
        default: unpack_row(call, row, out, 8);
        }
    }
}
