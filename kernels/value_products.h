/* Products of weights with values of VALUE_BITS bits, which are unpacked in registers. A code c stands for the level
c - (2^VALUE_BITS - 1) / 2. */

#ifndef OFFLOAD_RT_VALUE_PRODUCTS_H
#define OFFLOAD_RT_VALUE_PRODUCTS_H

#include "simd.h"

#define VALUE_BYTES (HEAD_DIM * VALUE_BITS / 8)

#if defined(__AVX512BF16__) && LANES == 16
/* Levels are exact in bfloat16. Weights are rounded to bfloat16. vdpbf16ps adds the products of two tokens at once. */
#define TOKENS_AT_ONCE 2
typedef uint16_t Weight;
typedef __m512i Levels;
INLINE void store_weights(Weight *at, f32 x) { _mm256_storeu_si256((void *)at, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
INLINE u32 load_codes(const uint8_t *at) { return load_u8(at) | load_u8(at + VALUE_BYTES) << 16; }
INLINE Levels level_table(void) {
    uint16_t levels[32];
    for (int code = 0; code < 32; code++)
        levels[code] = rounded((float)(code & ((1 << VALUE_BITS) - 1)) - ((1 << VALUE_BITS) - 1) * 0.5f);
    return _mm512_loadu_si512(levels);
}
INLINE Levels levels_of(u32 codes, int field, Levels table) {
    return _mm512_permutexvar_epi16((__m512i)(codes >> (VALUE_BITS * field)), table);
}
INLINE f32 add_weighted(f32 sum, Levels levels, const Weight *weights) {
    int32_t two;
    memcpy(&two, weights, 4);
    return (f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)levels, (__m512bh)_mm512_set1_epi32(two));
}
#else
#define TOKENS_AT_ONCE 1
typedef float Weight;
typedef f32 Levels;
INLINE void store_weights(Weight *at, f32 x) { store(at, x); }
INLINE u32 load_codes(const uint8_t *at) { return load_u8(at); }
INLINE Levels level_table(void) {
    float levels[LANES];
    for (int code = 0; code < LANES; code++)
        levels[code] = (float)(code & ((1 << VALUE_BITS) - 1)) - ((1 << VALUE_BITS) - 1) * 0.5f;
    return load(levels);
}
/* Permutations ignore the upper bits of a code: 4 bits choose from 16 numbers, 2 bits from 4. */
INLINE Levels levels_of(u32 codes, int field, Levels table) {
    u32 shifted = codes >> (VALUE_BITS * field);
#if LANES == 16
    return (f32)_mm512_permutexvar_ps((__m512i)shifted, (__m512)table);
#elif LANES == 8 && VALUE_BITS == 2
    return (f32)_mm256_permutevar_ps((__m256)table, (__m256i)shifted);
#else
    (void)table;
    i32 code = (i32)(shifted & ((1 << VALUE_BITS) - 1));
    return __builtin_convertvector(code, f32) - ((1 << VALUE_BITS) - 1) * 0.5f;
#endif
}
INLINE f32 add_weighted(f32 sum, Levels levels, const Weight *weights) { return fma_of(levels, all(*weights), sum); }
#endif

#endif
