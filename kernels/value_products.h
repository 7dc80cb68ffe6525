/* Products of integer weights with codes of values of VALUE_BITS bits, exact at every level. A code c stands for the
level c - MIDDLE / 2. The weights of a block are rounded to 16 bits: the error is at most 2^-16 of the largest one. */

#ifndef OFFLOAD_RT_VALUE_PRODUCTS_H
#define OFFLOAD_RT_VALUE_PRODUCTS_H

#include "simd.h"

#define VALUE_BYTES (HEAD_DIM * VALUE_BITS / 8)
#define MIDDLE ((1 << VALUE_BITS) - 1)
#define LARGEST_WEIGHT 32767.0f

/* Load bytes of two tokens. Each lane has a byte of the first token in its lower half, one of the second in the upper. */
INLINE u32 load_two_tokens(const uint8_t *at) { return load_u8(at) | load_u8(at + VALUE_BYTES) << 16; }

INLINE u32 codes_of(u32 two, int field) { return two >> (VALUE_BITS * field) & (0x10001 * MIDDLE); }

/* Add the codes of two tokens times their weights. */
INLINE i32 add_weighted(i32 sums, u32 codes, const int16_t *weights) {
    int32_t two;
    memcpy(&two, weights, 4);
#if defined(__AVX512VNNI__) && LANES == 16
    return (i32)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(two));
#elif LANES == 16
    return sums + (i32)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(two));
#elif LANES == 8
    return sums + (i32)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(two));
#elif defined(__x86_64__)
    return sums + (i32)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(two));
#else
    return sums + (i32)(codes & 0xffff) * weights[0] + (i32)(codes >> 16) * weights[1];
#endif
}

/* Round x >= 0 to integers below 2^16 and store them. Return them. */
INLINE i32 store_weights(int16_t *at, f32 x) {
    i32 whole = (i32)(x + 12582912.0f) & 0xffff; /* the rounded number is in the low fraction bits */
    *(u16_unaligned *)at = __builtin_convertvector((u32)whole, u16);
    return whole;
}

#endif
