/* Integer products of 4-bit codes with int8 weights, exact at every level. A vector of bytes holds four channels of
each of LANES tokens. If the level has no instruction that sums the products in 32 bits, they are summed in 16 bits and
moved to 32 bits after PARTIAL_QUADS vectors, before they can overflow. */

#ifndef OFFLOAD_RT_CODE_PRODUCTS_H
#define OFFLOAD_RT_CODE_PRODUCTS_H

#include "simd.h"

typedef int16_t i16 __attribute__((vector_size(4 * LANES), may_alias));

#if defined(__AVX512VNNI__) && LANES == 16
#define PARTIAL_QUADS (HEAD_DIM / 4)
typedef i32 Partial;
INLINE Partial add_products(Partial sums, bytes codes, i32 weights) {
    return (i32)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)weights);
}
INLINE i32 total_of(Partial sums) { return sums; }
#elif defined(__aarch64__)
#define PARTIAL_QUADS 8 /* one product of at most 1,905 per vector: up to 17 fit */
typedef struct {
    int16x8_t low, high;
} Partial;
INLINE Partial add_products(Partial sums, bytes codes, i32 weights) {
    int8x16_t c = (int8x16_t)codes, w = (int8x16_t)weights;
    return (Partial){vmlal_s8(sums.low, vget_low_s8(c), vget_low_s8(w)), vmlal_high_s8(sums.high, c, w)};
}
INLINE i32 total_of(Partial sums) { return (i32)vpaddq_s32(vpaddlq_s16(sums.low), vpaddlq_s16(sums.high)); }
#else
#define PARTIAL_QUADS 8 /* two products, at most 3,810, per vector: up to 8 fit */
typedef i16 Partial;
/* Prevents the compiler from delaying additions, because it would store all products first. */
INLINE i16 in_order(i16 sums) {
#if LANES > 4
    __asm__("" : "+v"(sums));
#endif
    return sums;
}
INLINE Partial add_products(Partial sums, bytes codes, i32 weights) {
#if LANES == 16
    return in_order(sums + (i16)_mm512_maddubs_epi16((__m512i)codes, (__m512i)weights));
#elif LANES == 8
    return in_order(sums + (i16)_mm256_maddubs_epi16((__m256i)codes, (__m256i)weights));
#else
    i16 even = (i16)codes & 0xff, odd = (i16)((u32)codes >> 8) & 0xff;
    return sums + even * (((i16)weights << 8) >> 8) + odd * ((i16)weights >> 8);
#endif
}
INLINE i32 total_of(Partial sums) {
#if LANES == 16
    return (i32)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif LANES == 8
    return (i32)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
    return (((i32)sums << 16) >> 16) + ((i32)sums >> 16);
#endif
}
#endif

/* Return a vector that repeats four weights for each token. */
INLINE i32 four_weights(const int8_t *weights) {
    int32_t four;
    memcpy(&four, weights, 4);
    return four - (i32){0};
}

/* Interleave the bytes of a and b within each group of 16 bytes: lower halves to `low`, upper halves to `high`. */
INLINE void zip_bytes(bytes a, bytes b, bytes *low, bytes *high) {
#if LANES == 16
    *low = (bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
    *high = (bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
#elif LANES == 8
    *low = (bytes)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
    *high = (bytes)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    *low = (bytes)_mm_unpacklo_epi8((__m128i)a, (__m128i)b);
    *high = (bytes)_mm_unpackhi_epi8((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    *low = (bytes)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b);
    *high = (bytes)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b);
#else
    for (int i = 0; i < 8; i++) {
        (*low)[2 * i] = a[i], (*low)[2 * i + 1] = b[i];
        (*high)[2 * i] = a[8 + i], (*high)[2 * i + 1] = b[8 + i];
    }
#endif
}

/* Like `zip_bytes`, for pairs of bytes. */
INLINE void zip_pairs(bytes a, bytes b, bytes *low, bytes *high) {
#if LANES == 16
    *low = (bytes)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    *high = (bytes)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8
    *low = (bytes)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
    *high = (bytes)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    *low = (bytes)_mm_unpacklo_epi16((__m128i)a, (__m128i)b);
    *high = (bytes)_mm_unpackhi_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    *low = (bytes)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
    *high = (bytes)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
#else
    uint16_t x[8], y[8], zipped[16];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y);
    for (int i = 0; i < 8; i++) zipped[2 * i] = x[i], zipped[2 * i + 1] = y[i];
    memcpy(low, zipped, sizeof *low), memcpy(high, zipped + 8, sizeof *high);
#endif
}

/* Sums of zipped rows come in groups of four tokens. Restore the order of 4 * LANES tokens. */
INLINE void order_tokens(i32 sums[4]) {
#if LANES == 16
    __m512i a = (__m512i)sums[0], b = (__m512i)sums[1], c = (__m512i)sums[2], d = (__m512i)sums[3];
    __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ba = _mm512_shuffle_i32x4(a, b, 0xee);
    __m512i cd = _mm512_shuffle_i32x4(c, d, 0x44), dc = _mm512_shuffle_i32x4(c, d, 0xee);
    sums[0] = (i32)_mm512_shuffle_i32x4(ab, cd, 0x88);
    sums[1] = (i32)_mm512_shuffle_i32x4(ab, cd, 0xdd);
    sums[2] = (i32)_mm512_shuffle_i32x4(ba, dc, 0x88);
    sums[3] = (i32)_mm512_shuffle_i32x4(ba, dc, 0xdd);
#elif LANES == 8
    __m256i a = (__m256i)sums[0], b = (__m256i)sums[1], c = (__m256i)sums[2], d = (__m256i)sums[3];
    sums[0] = (i32)_mm256_permute2x128_si256(a, b, 0x20);
    sums[1] = (i32)_mm256_permute2x128_si256(c, d, 0x20);
    sums[2] = (i32)_mm256_permute2x128_si256(a, b, 0x31);
    sums[3] = (i32)_mm256_permute2x128_si256(c, d, 0x31);
#else
    (void)sums;
#endif
}

#endif
