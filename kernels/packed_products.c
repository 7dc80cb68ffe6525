/* Linear layers of packed weights: codes of 4, 5, 6 or 8 bits with a scale and a minimum for each group of inputs.

A weight is (code * scale + minimum) * 2^exponent. `linear` reads rows that are interleaved in tiles, so that each lane
of a vector computes one output, and neither scales nor sums are moved between lanes.

Rows of x in bfloat16 are converted to 16-bit integers with one scale per 32 numbers. The products of a group are then
exact integer sums, and one instruction adds two products per sum. The error of x is 2^-16 of the largest of 32 numbers,
less than the error of bfloat16. Minima are multiplied with the sums of x. */

#include "packed_rows.h"

#define AT_ONCE 4 /* rows of x whose sums stay in registers */
#define X_GROUP 32

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
    return widen_halves(__builtin_convertvector(word_of(tile, offset & ~3) >> 8 * (uint32_t)(offset & 3), u16));
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

/* Read codes c = 4j to 4j + 3, and d = 32 + c, of a block of 64 of each row. Each lane of a result has two 16-bit codes:
codes[0] has c0 and c2, codes[1] c1 and c3, codes[2] d0 and d2, and codes[3] d1 and d3. */
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

/* Prefetch `lines` cache lines of the next tile, from line `block * lines` on. Hardware prefetches the codes of a tile,
but not its scales. */
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
        for (int word = 0; word < 16 / per; word++) {
            const int j = 4 * part + word;
            u32 codes[4];
            codes_of(call, tile, block, j, bits, codes);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const int16_t *pair = x + r * call->ins + 32 * (i / 2) + 4 * j + 2 * (i & 1);
                    whole[r][i / 2] = add_products(whole[r][i / 2], codes[i], pair);
                }
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
