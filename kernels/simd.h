/* Vectors of float32 and bfloat16 for one instruction set level, chosen by the compiler's flags (native_code.py):
AVX-512, AVX2, NEON, or GCC's generic vectors of 16 bytes (SSE2 on x86). Kernels are written once with these names. They
use intrinsics of one level only if measurements justify it. A kernel whose rows do not fill vectors of 16 numbers
defines NARROW_VECTORS before it includes this file, and gets vectors of 8 on AVX-512. */

#ifndef OFFLOAD_RT_SIMD_H
#define OFFLOAD_RT_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && !defined(NARROW_VECTORS)
#define WIDE_VECTORS
#endif

#if defined(WIDE_VECTORS)
#define LANES 16 /* float32 numbers per vector */
#define REGISTERS 32
#elif defined(__AVX2__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32 __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t i32 __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t u32 __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t u16 __attribute__((vector_size(2 * LANES), may_alias));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES), may_alias));
typedef f32 f32_unaligned __attribute__((aligned(4)));
typedef u16 u16_unaligned __attribute__((aligned(2)));
typedef bytes bytes_unaligned __attribute__((aligned(1)));

INLINE f32 load(const float *at) { return *(const f32_unaligned *)at; }
INLINE void store(float *at, f32 x) { *(f32_unaligned *)at = x; }
INLINE f32 all(float x) { return x - (f32){0}; }
/* Fused multiply-add with one rounding, if the level has it. The compiler contracts the expression
(-ffp-contract=fast). */
INLINE f32 fma_of(f32 a, f32 b, f32 c) { return a * b + c; }
/* Choose a where mask is -1 and b where it is 0. Comparisons of vectors return such masks. */
INLINE f32 choose(i32 mask, f32 a, f32 b) { return (f32)(((i32)a & mask) | ((i32)b & ~mask)); }

INLINE f32 max_of(f32 a, f32 b) {
#if defined(WIDE_VECTORS)
    return (f32)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (f32)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* The numbers 0 to LANES - 1. */
INLINE i32 lane_numbers(void) {
#if LANES == 16
    return (i32){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
    return (i32){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (i32){0, 1, 2, 3};
#endif
}

/* Bit i is set if lane i of the mask is -1. */
INLINE uint32_t bits_of(i32 mask) {
#if defined(WIDE_VECTORS)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__x86_64__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#elif defined(__aarch64__)
    return vaddvq_u32(vandq_u32((uint32x4_t)mask, (uint32x4_t){1, 2, 4, 8}));
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= ((uint32_t)mask[i] & 1) << i;
    return bits;
#endif
}

/* -1 in the lanes whose bits are set, 0 in all other lanes: the inverse of bits_of. */
INLINE i32 mask_of(uint32_t bits) {
#if defined(WIDE_VECTORS)
    return (i32)_mm512_movm_epi32((__mmask16)bits);
#else
    u32 lane = ((u32){0} + 1) << (u32)lane_numbers();
    return (lane & bits) != 0;
#endif
}

/* Conversions of bytes, which GCC does not vectorise. */
INLINE u32 load_u8(const uint8_t *at) {
#if defined(WIDE_VECTORS)
    return (u32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (u32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    int32_t four;
    memcpy(&four, at, 4);
#if defined(__x86_64__)
    __m128i zero = _mm_setzero_si128();
    return (u32)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero);
#elif defined(__aarch64__)
    return (u32)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8((uint32_t)four))));
#else
    return (u32){at[0], at[1], at[2], at[3]};
#endif
#endif
}

/* Store the lowest byte of each number. */
INLINE void store_u8(uint8_t *at, i32 x) {
#if defined(WIDE_VECTORS)
    _mm_storeu_si128((__m128i *)at, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int i = 0; i < LANES; i++) at[i] = (uint8_t)x[i];
#endif
}

INLINE bytes load_bytes(const uint8_t *at) { return *(const bytes_unaligned *)at; }
INLINE f32 abs_of(f32 x) { return (f32)((i32)x & 0x7fffffff); }
/* Return the magnitude of x with the sign of `sign`. */
INLINE f32 with_sign(f32 x, f32 sign) { return (f32)(((i32)x & 0x7fffffff) | ((i32)sign & (int32_t)0x80000000)); }
/* Round to the nearest integer, ties to even, for |x| < 2^22. */
INLINE f32 nearest(f32 x) { return (x + 12582912.0f) - 12582912.0f; }

/* bfloat16 is the upper half of float32. */
INLINE f32 widen(u16 half) { return (f32)(__builtin_convertvector(half, u32) << 16); }
INLINE f32 load_bf16(const uint16_t *at) { return widen(*(const u16_unaligned *)at); }

/* Round to the nearest bfloat16, ties to even. NaN stays NaN. */
INLINE void store_bf16(uint16_t *at, f32 x) {
    u32 bits = (u32)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32 number = (u32)(x == x);
    *(u16_unaligned *)at = __builtin_convertvector((rounded & number) | ((bits >> 16 | 64) & ~number), u16);
}

INLINE float number(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float whole;
    memcpy(&whole, &bits, sizeof whole);
    return whole;
}

INLINE uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float sum_of(f32 x) {
#if defined(WIDE_VECTORS)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[LANES], sum = 0.0f;
    store(lanes, x);
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
#endif
}

INLINE float largest_of(f32 x) {
#if defined(WIDE_VECTORS)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES];
    store(lanes, x);
    float most = lanes[0];
    for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
#endif
}

#define LOG2E 1.44269504f

/* Return 2^x for x <= 0, with an error of at most 2e-7. For x < -100, return 2^-100, because denormal numbers are slow.
Adding 1.5 * 2^23 rounds x to an integer in the low fraction bits, which is then shifted to the exponent. */
INLINE f32 exp2_of(f32 x) {
    x = max_of(x, all(-100.0f));
    f32 rounded_x = x + 12582912.0f, f = x - (rounded_x - 12582912.0f);
    f32 power = all(0.0013333558f);
    power = fma_of(power, f, all(0.009618129f));
    power = fma_of(power, f, all(0.05550411f));
    power = fma_of(power, f, all(0.24022651f));
    power = fma_of(power, f, all(0.6931472f));
    power = fma_of(power, f, all(1.0f));
    return (f32)((u32)power + ((u32)rounded_x << 23));
}

#ifdef BFLOAT16
/* Type of the rows or weights that the kernel is compiled for. */
#if BFLOAT16
typedef uint16_t Number;
#else
typedef float Number;
#endif

INLINE float as_float(Number x) {
#if BFLOAT16
    return number(x);
#else
    return x;
#endif
}
#endif

/* Return cap * tanh(s / cap), computed from e^(-2 |s| / cap), or s if cap is 0. */
INLINE f32 capped(f32 s, float cap) {
    if (cap == 0.0f) return s;
    f32 decays = exp2_of(-2.0f * LOG2E * abs_of(s) / cap);
    return with_sign(cap * (1.0f - decays) / (1.0f + decays), s);
}

/* Turn `count` scores in units of ln 2 (a multiple of LANES) into softmax weights relative to the largest score so far.
Update this score (`peak`) and the sum of all weights. Return the factor by which earlier weights must be scaled. */
INLINE float softmax_weights(float *scores, int count, float *peak, float *sum) {
    f32 most = all(*peak), added = all(0.0f);
    for (int i = 0; i < count; i += LANES) most = max_of(most, load(scores + i));
    const float before = *peak, highest = largest_of(most);
    for (int i = 0; i < count; i += LANES) {
        f32 weight = exp2_of(load(scores + i) - all(highest));
        added += weight;
        store(scores + i, weight);
    }
    const float factor = exp2_of(all(before - highest))[0];
    *sum = *sum * factor + sum_of(added);
    *peak = highest;
    return factor;
}

/* Lane i is the sum of the lanes of x[i]. */
INLINE f32 lane_sums(const f32 x[LANES]) {
#if defined(__aarch64__)
    float32x4_t first = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
    return (f32)vpaddq_f32(first, vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]));
#elif defined(WIDE_VECTORS)
    __m512 four[4], even, odd;
    for (int i = 0; i < 4; i++) {
        __m512 a = (__m512)x[4 * i], b = (__m512)x[4 * i + 1], c = (__m512)x[4 * i + 2], d = (__m512)x[4 * i + 3];
        __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
        __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
        four[i] = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
    }
    even = _mm512_shuffle_f32x4(four[0], four[1], 0x88) + _mm512_shuffle_f32x4(four[0], four[1], 0xdd);
    odd = _mm512_shuffle_f32x4(four[2], four[3], 0x88) + _mm512_shuffle_f32x4(four[2], four[3], 0xdd);
    return (f32)(_mm512_shuffle_f32x4(even, odd, 0x88) + _mm512_shuffle_f32x4(even, odd, 0xdd));
#elif defined(__AVX2__)
    __m256 four[2];
    for (int i = 0; i < 2; i++) {
        __m256 a = (__m256)x[4 * i], b = (__m256)x[4 * i + 1], c = (__m256)x[4 * i + 2], d = (__m256)x[4 * i + 3];
        __m256d ab = (__m256d)(_mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b));
        __m256d cd = (__m256d)(_mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d));
        four[i] = (__m256)_mm256_unpacklo_pd(ab, cd) + (__m256)_mm256_unpackhi_pd(ab, cd);
    }
    return (f32)(_mm256_permute2f128_ps(four[0], four[1], 0x20) + _mm256_permute2f128_ps(four[0], four[1], 0x31));
#elif defined(__x86_64__)
    __m128d ab = (__m128d)(_mm_unpacklo_ps((__m128)x[0], (__m128)x[1]) + _mm_unpackhi_ps((__m128)x[0], (__m128)x[1]));
    __m128d cd = (__m128d)(_mm_unpacklo_ps((__m128)x[2], (__m128)x[3]) + _mm_unpackhi_ps((__m128)x[2], (__m128)x[3]));
    return (f32)((__m128)_mm_unpacklo_pd(ab, cd) + (__m128)_mm_unpackhi_pd(ab, cd));
#else
    f32 sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(x[i]);
    return sums;
#endif
}

#endif
