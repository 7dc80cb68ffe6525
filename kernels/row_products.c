/* A linear layer with few input rows. A decode step reads every weight once, so its time is at least the bytes of the
weights divided by the memory bandwidth of a thread (eval/speed/cpu_kernels.py measures both).

Compiled for one type of weights (BFLOAT16 or float32). Each row of weights is read once for up to AT_ONCE rows of x.
Without bfloat16 instructions, both operands are widened in registers: a vector of 32-bit words holds two bfloat16 per
word, and a shift and a mask make two vectors of float32 (even and odd channels). Storing x in float32 would save two
instructions, but a long x and the row of weights would not fit into the first-level cache together (896 x 4864 with
AVX2: 0.57 ms instead of 0.35).

The results do not depend on the number of rows: each result is always the sum of two sums over alternating pieces. */

#include "fields.h"
#include "simd.h"

#define AHEAD 4096 /* bytes to prefetch ahead: hardware prefetching stops at page boundaries */
#define MAX_ROWS 8
#define AT_ONCE (REGISTERS == 32 ? 8 : 4) /* rows of x whose sums stay in registers */

#if BFLOAT16 && defined(__AVX512BF16__)
#define BF16_DOT 1
#define STEP 64 /* channels added to both sums per iteration */
#else
#define STEP (2 * LANES)
#endif

/* out [rows][outs] = x [rows][ins] * weight [outs][ins] + bias [outs] (or NULL), summed in float32. A part is the
columns [part * size, (part + 1) * size) of out. */
typedef struct {
    const Number *x, *weight, *bias;
    Number *out;
    int64_t rows, outs, ins, size;
} Call;

FIELDS_OF(Call) = {
    FIELD(Call, x), FIELD(Call, weight), FIELD(Call, bias), FIELD(Call, out), FIELD(Call, rows), FIELD(Call, outs),
    FIELD(Call, ins), FIELD(Call, size),
    END_OF_FIELDS(Call),
};

typedef struct {
    f32 even, odd;
} Sums;

INLINE void add_products(Sums *sums, const Number *x, const Number *w) {
#if BF16_DOT
    sums->even = (f32)_mm512_dpbf16_ps((__m512)sums->even, (__m512bh)_mm512_loadu_si512(x),
                                       (__m512bh)_mm512_loadu_si512(w));
    sums->odd = (f32)_mm512_dpbf16_ps((__m512)sums->odd, (__m512bh)_mm512_loadu_si512(x + 32),
                                      (__m512bh)_mm512_loadu_si512(w + 32));
#elif BFLOAT16
    u32 pairs, of_x;
    memcpy(&pairs, w, sizeof pairs);
    memcpy(&of_x, x, sizeof of_x);
    sums->even = fma_of((f32)(pairs << 16), (f32)(of_x << 16), sums->even);
    sums->odd = fma_of((f32)(pairs & 0xffff0000u), (f32)(of_x & 0xffff0000u), sums->odd);
#else
    sums->even = fma_of(load(w), load(x), sums->even);
    sums->odd = fma_of(load(w + LANES), load(x + LANES), sums->odd);
#endif
}

/* Multiply one row of w with `rows` rows of x. The sums stay in registers. */
INLINE void tile(const Number *x, const Number *w, int64_t ins, int rows, float *found) {
    Sums sums[MAX_ROWS];
    for (int r = 0; r < rows; r++) sums[r] = (Sums){all(0.0f), all(0.0f)};
    int64_t c = 0;
    for (; c + STEP <= ins; c += STEP) {
        __builtin_prefetch((const char *)(w + c) + AHEAD);
        if (sizeof(Number) * STEP > 64) __builtin_prefetch((const char *)(w + c) + AHEAD + 64);
        for (int r = 0; r < rows; r++) add_products(&sums[r], x + r * ins + c, w + c);
    }
    for (int r = 0; r < rows; r++) {
#if BF16_DOT
        if (c < ins)
            sums[r].even = (f32)_mm512_dpbf16_ps((__m512)sums[r].even, (__m512bh)_mm512_loadu_si512(x + r * ins + c),
                                                 (__m512bh)_mm512_loadu_si512(w + c));
#endif
        found[r] = sum_of(sums[r].even + sums[r].odd);
    }
}

/* The code is specialised for each number of rows, so that sums stay in registers. */
static void products(const Number *x, const Number *w, int64_t ins, int rows, float *found) {
    switch (rows) {
    case 1: tile(x, w, ins, 1, found); return;
    case 2: tile(x, w, ins, 2, found); return;
    case 3: tile(x, w, ins, 3, found); return;
#if REGISTERS == 32
    case 4: tile(x, w, ins, 4, found); return;
    case 5: tile(x, w, ins, 5, found); return;
    case 6: tile(x, w, ins, 6, found); return;
    case 7: tile(x, w, ins, 7, found); return;
#endif
    default: tile(x, w, ins, AT_ONCE, found);
    }
}

static void store_number(const Call *call, int64_t row, int64_t out, float sum) {
#if BFLOAT16
    float whole = call->bias ? sum + number(call->bias[out]) : sum;
    call->out[row * call->outs + out] = rounded(whole);
#else
    call->out[row * call->outs + out] = call->bias ? sum + call->bias[out] : sum;
#endif
}

void linear(const void *given, int64_t part) {
    const Call *call = given;
    float found[MAX_ROWS] = {0};
    int64_t rows = call->rows, ins = call->ins, groups = (rows + AT_ONCE - 1) / AT_ONCE;
    int64_t most = (rows + groups - 1) / groups; /* split 9 rows into 5 and 4, not 8 and 1 */
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    for (int64_t o = begin; o < end; o++)
        for (int64_t first = 0; first < rows; first += most) {
            int count = (int)(rows - first < most ? rows - first : most);
            products(call->x + first * ins, call->weight + o * ins, ins, count, found);
            for (int r = 0; r < count; r++) store_number(call, first + r, o, found[r]);
        }
}
