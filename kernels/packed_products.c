/* Linear layers of packed weights: codes of 4, 5, 6 or 8 bits with a scale and a minimum for each group of inputs.

A weight is (code * scale + minimum) * 2^exponent. `linear` reads rows that are interleaved in tiles, so that each lane
of a vector computes one output, and neither scales nor sums are moved between lanes.

Rows of x in bfloat16 are converted to 16-bit integers with one scale per 32 numbers. The products of a group are then
exact integer sums. On x86, each integer is split into two signed bytes if one instruction can multiply codes and bytes
without overflow. The error of x is about 2^-16 of the largest of 32 numbers, less than the error of bfloat16. Minima
are multiplied with the sums of x. */

#include "packed_rows.h"

#define AT_ONCE 4 /* rows of x whose sums stay in registers */
#define X_GROUP 32
#define LARGEST (127 * 256 + 127) /* the largest integer that is two signed bytes */
#define VECTORS (LANES < TILE ? 2 : 1) /* vectors of outputs that are computed together for one row of x */

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

/* Read the scales or minima at `at` of each unit of inputs in a block of 64. A group has 2^shift units. `factor` is
2^exponent or, if they are int8, their factor. */
INLINE void numbers_of(const Call *call, Tile tile, int64_t at, int64_t block, int per, int shift, f32 factor,
                       f32 *numbers) {
    u32 word = {0};
    if (call->factors_of_scales >= 0) word = word_of(tile, at + (block * per & ~3)) >> 8 * (block * per & 3);
#pragma GCC unroll 4
    for (int u = 0; u < per; u++)
        if (call->factors_of_scales >= 0)
            numbers[u] = __builtin_convertvector((i32)(word << (24 - 8 * u)) >> 24, f32) * factor;
        else
            numbers[u] = half_of(tile, at + 2 * ((block * per + u) >> shift)) * factor;
}

/* Read the scales and minima of each unit of inputs in a block of 64. */
INLINE void scales_of(const Call *call, Tile tile, int64_t block, int per, int shift, f32 factors[2], f32 *scales,
                      f32 *minima) {
    if (call->factors_of_scales >= 0 && block % (BLOCK / 64) == 0) {
        const int64_t at = block / (BLOCK / 64) * 2;
        factors[0] = half_of(tile, call->factors_of_scales + at) * call->power;
        if (call->minima >= 0) factors[1] = half_of(tile, call->factors_of_minima + at) * call->power;
    }
    numbers_of(call, tile, call->scales, block, per, shift, factors[0], scales);
    if (call->minima >= 0) {
        numbers_of(call, tile, call->minima, block, per, shift, factors[1], minima);
        return;
    }
#pragma GCC unroll 4
    for (int u = 0; u < per; u++) {
        f32 zero = all(call->offset);
        if (call->zeros >= 0)
            zero = __builtin_convertvector((i32)byte_of(tile, call->zeros + ((block * per + u) >> shift)), f32);
        minima[u] = -scales[u] * zero;
    }
}

/* Read codes 4j to 4j + 3 (codes[0]) and 32 + 4j to 32 + 4j + 3 (codes[1]) of a block of 64 of each row, as bytes of
a lane. */
INLINE void codes_of(const Call *call, Tile tile, int64_t block, int j, int bits, u32 codes[2]) {
    if (bits == 8) {
        for (int side = 0; side < 2; side++) codes[side] = word_of(tile, 64 * block + 32 * side + 4 * j);
        return;
    }
    u32 low = word_of(tile, 32 * block + 4 * j);
    codes[0] = low & 0x0f0f0f0f;
    codes[1] = low >> 4 & 0x0f0f0f0f;
    if (bits == 5)
        for (int side = 0; side < 2; side++) {
            u32 four = word_of(tile, call->high + 8 * block + 4 * side) >> 4 * j;
            codes[side] |= (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
        }
    if (bits == 6) {
        u32 high = word_of(tile, call->high + 32 * (block / 2) + 4 * j) >> 4 * (uint32_t)(block & 1);
        codes[0] |= (high & 0x03030303) << 4;
        codes[1] |= (high & 0x0c0c0c0c) << 2;
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
/* The largest number of bits of codes for which x is split into bytes. Without VNNI, the sum of two products with 8-bit
codes would not fit 16 bits. */
#if defined(WIDE_VECTORS) && defined(__AVX512VNNI__)
#define SPLIT_BITS 8
#elif defined(__AVX2__)
#define SPLIT_BITS 6
#else
#define SPLIT_BITS 0
#endif

INLINE int splits(int bits) { return bits <= SPLIT_BITS; }

/* Whether sums of products are 16-bit integers. */
INLINE int has_narrow_sums(int bits) { return SPLIT_BITS == 6 && splits(bits); }

/* How often `add_products` can be called until `widened` must convert the sums: 128 * 2 * 15 * 8, 128 * 2 * 31 * 4 and
128 * 2 * 63 * 2 fit 16 bits. */
INLINE int most_sums(int bits) { return !has_narrow_sums(bits) || bits == 4 ? 8 : bits == 5 ? 4 : 2; }

/* Add products of the four codes of each lane with `half` of four numbers of x to `sums`. The halves are the low and the
high bytes of the numbers or, if they are not split, the numbers 0 and 2, and 1 and 3. */
INLINE i32 add_products(i32 sums, u32 codes, const int16_t *x, int half, int bits) {
    int32_t two;
    memcpy(&two, x + 2 * half, sizeof two);
    if (!splits(bits)) codes = codes >> 8 * half & 0x00ff00ff;
#if defined(WIDE_VECTORS)
    const __m512i to = (__m512i)sums, from = (__m512i)codes, with = _mm512_set1_epi32(two);
#if defined(__AVX512VNNI__)
    return (i32)_mm512_dpbusd_epi32(to, from, with);
#else
    if (splits(bits)) return (i32)_mm512_add_epi16(to, _mm512_maddubs_epi16(from, with));
    return sums + (i32)_mm512_madd_epi16(from, with);
#endif
#elif defined(__AVX2__)
    const __m256i to = (__m256i)sums, from = (__m256i)codes, with = _mm256_set1_epi32(two);
    if (splits(bits)) return (i32)_mm256_add_epi16(to, _mm256_maddubs_epi16(from, with));
    return sums + (i32)_mm256_madd_epi16(from, with);
#elif defined(__x86_64__)
    return sums + (i32)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(two));
#else
    return sums + (i32)(codes & 0xffff) * x[2 * half] + (i32)(codes >> 16) * x[2 * half + 1];
#endif
}

/* Convert sums of products to 32 bits: add the two 16-bit sums of each lane. */
INLINE i32 widened(i32 sums, int bits) {
    if (!has_narrow_sums(bits)) return sums;
#if defined(WIDE_VECTORS)
    return (i32)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return (i32)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
    return sums;
#endif
}

/* Add the products of a block of 64 inputs to the sums of `rows` rows of x, from row `first` on. */
INLINE void add_block(const Call *call, Tile tile, int64_t block, int64_t first, int rows, int bits, const f32 *scales,
                      const f32 *minima, f32 sums[AT_ONCE][2]) {
    const int per = 64 / unit_of(bits), words = 16 / per;
    const int64_t units = first * call->units + block * per;
#pragma GCC unroll 2
    for (int part = 0; part < per / 2; part++) {
        i32 whole[AT_ONCE][2][2] = {0}, narrow[AT_ONCE][2][2] = {0}; /* [row of x][side][half] */
#pragma GCC unroll 8
        for (int word = 0; word < words; word++) {
            const int j = 4 * part + word;
            u32 codes[2];
            codes_of(call, tile, block, j, bits, codes);
#pragma GCC unroll 16
            for (int i = 0; i < 4 * rows; i++) {
                const int r = i / 4, side = i / 2 & 1, half = i & 1;
                const int16_t *x = call->whole + (first + r) * call->ins + 64 * block + 32 * side + 4 * j;
                i32 *to = &narrow[r][side][half];
                *to = add_products(*to, codes[side], x, half, bits);
                if ((word + 1) % most_sums(bits) && word + 1 < words) continue;
                whole[r][side][half] += widened(*to, bits);
                *to = (i32){0};
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < 2 * rows; i++) {
            const int r = i / 2, side = i & 1, u = side * per / 2 + part;
            const int64_t at = units + r * call->units + u;
            i32 both = whole[r][side][0] + (splits(bits) ? whole[r][side][1] << 8 : whole[r][side][1]);
            f32 product = __builtin_convertvector(both, f32) * call->factors[at];
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
        u32 codes[2];
        codes_of(call, tile, block, j, bits, codes);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) { /* input i % 4 of side i / 4 */
            const int u = unit_of(bits) == 16 ? 2 * (i / 4) + j / 4 : i / 4;
            u32 code = codes[i / 4] >> 8 * (uint32_t)(i % 4) & 255;
            f32 weight = fma_of(__builtin_convertvector((i32)code, f32), scales[u], minima[u]);
            const float *x = call->x + first * call->ins + 64 * block + 32 * (i / 4) + 4 * j + i % 4;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][i & 1] = fma_of(weight, all(x[r * call->ins]), sums[r][i & 1]);
        }
    }
}
#endif

/* Multiply LANES * vectors rows of weights with `rows` rows of x, from row `first` on. */
INLINE void multiply(const Call *call, Tile tile, int64_t first, int rows, int vectors, int bits,
                     f32 found[AT_ONCE][VECTORS]) {
    f32 sums[VECTORS][AT_ONCE][2], scales[4], minima[4], factors[VECTORS][2];
    const int64_t blocks = call->ins / 64, lines = (TILE * call->stride / blocks + 63) / 64;
    const int shift = __builtin_ctzll((uint64_t)(call->group / unit_of(bits)));
    for (int v = 0; v < vectors; v++) {
        factors[v][0] = factors[v][1] = all(call->power);
        for (int r = 0; r < rows; r++) sums[v][r][0] = sums[v][r][1] = all(0.0f);
    }
    for (int64_t block = 0; block < blocks; block++) {
        prefetch_next(call, tile, block, lines);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            const Tile part = {tile.at, tile.height, tile.first + v * LANES};
            scales_of(call, part, block, 64 / unit_of(bits), shift, factors[v], scales, minima);
            add_block(call, part, block, first, rows, bits, scales, minima, sums[v]);
        }
    }
    for (int v = 0; v < vectors; v++)
        for (int r = 0; r < rows; r++) found[r][v] = sums[v][r][0] + sums[v][r][1];
}

/* The code is specialised for each number of rows and bits, so that sums stay in registers. */
INLINE void multiply_rows(const Call *call, Tile tile, int64_t first, int rows, int bits,
                          f32 found[AT_ONCE][VECTORS]) {
    if (tile.height < TILE) {
        for (int r = 0; r < rows; r++) multiply(call, tile, first + r, 1, 1, bits, found + r);
        return;
    }
    tile.height = TILE; /* a constant */
    if (call->rows == 1) {
        multiply(call, tile, first, 1, VECTORS, bits, found);
        return;
    }
    switch (rows) {
    case 1: multiply(call, tile, first, 1, 1, bits, found); return;
    case 2: multiply(call, tile, first, 2, 1, bits, found); return;
    case 3: multiply(call, tile, first, 3, 1, bits, found); return;
    default: multiply(call, tile, first, 4, 1, bits, found);
    }
}

static void products(const Call *call, Tile tile, int64_t first, int rows, f32 found[AT_ONCE][VECTORS]) {
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

/* Multiply LANES * vectors rows of weights, from output `o` on, with all rows of x. */
static void columns(const Call *call, Tile tile, int64_t o, int vectors) {
    f32 found[AT_ONCE][VECTORS];
    const int64_t rows = call->rows, groups = (rows + AT_ONCE - 1) / AT_ONCE;
    const int64_t most = (rows + groups - 1) / groups; /* split 5 rows into 3 and 2, not 4 and 1 */
    for (int64_t first = 0; first < rows; first += most) {
        const int count = (int)(rows - first < most ? rows - first : most);
        products(call, tile, first, count, found);
        for (int r = 0; r < count; r++)
            for (int i = 0; i < LANES * vectors && tile.first + i < tile.height; i++) {
                float bias = call->bias ? as_float(call->bias[o + i]) : 0.0f;
                store_number(call->out + (first + r) * call->outs + o + i, found[r][i / LANES][i % LANES] + bias);
            }
    }
}

void linear(const void *given, int64_t part) {
    const Call *call = given;
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    for (int64_t o = begin; o < end; o += TILE) {
        Tile tile = {call->codes + o * call->stride, end - o < TILE ? (int)(end - o) : TILE, 0};
        const int vectors = call->rows == 1 && tile.height == TILE ? VECTORS : 1;
        for (; tile.first < tile.height; tile.first += LANES * vectors) columns(call, tile, o + tile.first, vectors);
    }
}

#if BFLOAT16
/* Store each four integers in the order of `add_products`. */
INLINE void store_integers(const int16_t integers[X_GROUP], int split, int16_t *whole) {
    int8_t low[X_GROUP], high[X_GROUP];
    for (int i = 0; i < X_GROUP; i++) low[i] = (int8_t)integers[i];
    for (int i = 0; i < X_GROUP; i++) high[i] = (int8_t)((integers[i] - low[i]) >> 8);
    for (int i = 0; i < X_GROUP; i += 4) {
        const int16_t pairs[4] = {integers[i], integers[i + 2], integers[i + 1], integers[i + 3]};
        memcpy(whole + i, split ? (const void *)(low + i) : pairs, 4);
        memcpy(whole + i + 2, split ? (const void *)(high + i) : pairs + 2, 4);
    }
}

/* Convert row `part` of x to integers. If a number is not finite, the factor is NaN, and so are all results. */
void prepare(const void *given, int64_t part) {
    const Call *call = given;
    const int64_t ins = call->ins, unit = unit_of((int)call->bits);
    const Number *x = call->x + part * ins;
    for (int64_t c = 0; c < ins; c += X_GROUP) {
        f32 most = all(0.0f), odd = all(0.0f); /* odd is NaN if a number is not finite */
        for (int i = 0; i < X_GROUP; i += LANES) {
            f32 numbers = load_bf16(x + c + i);
            most = max_of(most, abs_of(numbers));
            odd += numbers - numbers;
        }
        const float factor = largest_of(most) / LARGEST + sum_of(odd);
        const float inverse = factor >= 0x1p-120f ? 1.0f / factor : 0.0f;
        int16_t integers[X_GROUP];
        for (int i = 0; i < X_GROUP; i += LANES) {
            f32 scaled = max_of(load_bf16(x + c + i) * inverse, all(-LARGEST));
            i32 whole = __builtin_convertvector(nearest(-max_of(-scaled, all(-LARGEST))), i32);
            *(u16_unaligned *)(integers + i) = __builtin_convertvector(whole, u16);
        }
        store_integers(integers, splits((int)call->bits), call->whole + part * ins + c);
        for (int64_t u = 0; u < X_GROUP; u += unit) {
            const int64_t at = part * call->units + (c + u) / unit;
            int32_t sum = 0;
            for (int64_t i = u; i < u + unit; i++) sum += integers[i];
            call->factors[at] = factor;
            call->sums[at] = (float)sum * factor;
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
