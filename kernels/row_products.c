/* A linear layer of a few bfloat16 rows on a processor that multiplies bfloat16 in vectors (AVX512-BF16), bound by
reading weights: each row of them is read once, asked for a page of memory ahead, and multiplied with every row of x. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 2048 /* numbers: where processors stop looking ahead by themselves */

/* Sum over n channels of x and w, n a multiple of 32. */
static inline float product(const uint16_t *x, const uint16_t *w, int64_t n) {
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t c = 0;
    for (; c + 128 <= n; c += 128)
        for (int i = 0; i < 4; i++) {
            const uint16_t *at = w + c + 32 * i;
            __m512bh left = (__m512bh)_mm512_loadu_si512(x + c + 32 * i), right = (__m512bh)_mm512_loadu_si512(at);
            _mm_prefetch((const char *)(at + AHEAD), _MM_HINT_T0);
            sums[i] = _mm512_dpbf16_ps(sums[i], left, right);
        }
    for (; c < n; c += 32)
        sums[0] = _mm512_dpbf16_ps(sums[0], (__m512bh)_mm512_loadu_si512(x + c), (__m512bh)_mm512_loadu_si512(w + c));
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

static inline float number(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float whole;
    memcpy(&whole, &bits, sizeof whole);
    return whole;
}

/* The nearest bfloat16, of two the even one; what is no number stays none. */
static inline uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* out [rows][outs] of x [rows][ins], weight [outs][ins] and bias [outs] or NULL, summed in float32. */
void linear(const uint16_t *x, const uint16_t *weight, const uint16_t *bias, uint16_t *out, int64_t rows, int64_t outs,
            int64_t ins) {
    for (int64_t o = 0; o < outs; o++)
        for (int64_t row = 0; row < rows; row++) {
            float sum = product(x + row * ins, weight + o * ins, ins);
            out[row * outs + o] = rounded(bias ? sum + number(bias[o]) : sum);
        }
}
