/* A linear layer of a few rows, bound by reading its weights: a decode step reads every weight once.

Compiled by native.py for one type of weights (BFLOAT16 or float32). Each row of weights is read once for up to ROWS rows
of x. Without products of bfloat16, weights are widened in registers: a vector of 32-bit words holds two bfloat16 each,
which a shift and a mask make two vectors of float32 (even and odd channels). x is brought into that order before.

How many rows come together changes no sum: each is two sums, of alternating pieces of it. */

#include "simd.h"

#define AHEAD 4096 /* bytes: where processors stop prefetching by themselves */
#define MOST_ROWS 8
#define AT_ONCE (REGISTERS == 32 ? 8 : 4) /* rows of x: their sums stay in registers */

#if BFLOAT16 && defined(__AVX512BF16__)
#define BF16_DOT 1
typedef uint16_t Weight;
typedef uint16_t Input;
#define STEP 64 /* channels that both sums take together */
#elif BFLOAT16
typedef uint16_t Weight;
typedef float Input;
#define STEP (2 * LANES)
#else
typedef float Weight;
typedef float Input;
#define STEP (2 * LANES)
#endif

/* out [rows][outs] = x [rows][ins] * weight [outs][ins] + bias [outs] (or NULL), summed in float32. bfloat16: x, bias and
out are, too. `prepared` has room for x as `Input`. A part is the numbers [part * size, (part + 1) * size) of each row. */
typedef struct {
    const void *x;
    const Weight *weight;
    const void *bias;
    void *out, *prepared;
    int64_t rows, outs, ins, size;
} Call;

typedef struct {
    f32 even, odd;
} Sums;

INLINE void add_products(Sums *sums, const Input *x, const Weight *w) {
#if BF16_DOT
    sums->even = (f32)_mm512_dpbf16_ps((__m512)sums->even, (__m512bh)_mm512_loadu_si512(x),
                                       (__m512bh)_mm512_loadu_si512(w));
    sums->odd = (f32)_mm512_dpbf16_ps((__m512)sums->odd, (__m512bh)_mm512_loadu_si512(x + 32),
                                      (__m512bh)_mm512_loadu_si512(w + 32));
#elif BFLOAT16
    u32 pairs;
    memcpy(&pairs, w, sizeof pairs);
    sums->even = fma_of((f32)(pairs << 16), load(x), sums->even);
    sums->odd = fma_of((f32)(pairs & 0xffff0000u), load(x + LANES), sums->odd);
#else
    sums->even = fma_of(load(w), load(x), sums->even);
    sums->odd = fma_of(load(w + LANES), load(x + LANES), sums->odd);
#endif
}

/* Sums of one row of w with `rows` rows of x, which stay in registers. */
INLINE void tile(const Input *x, const Weight *w, int64_t ins, int rows, float *found) {
    Sums sums[MOST_ROWS];
    for (int r = 0; r < rows; r++) sums[r] = (Sums){all(0.0f), all(0.0f)};
    int64_t c = 0;
    for (; c + STEP <= ins; c += STEP) {
        __builtin_prefetch((const char *)(w + c) + AHEAD);
        if (sizeof(Weight) * STEP > 64) __builtin_prefetch((const char *)(w + c) + AHEAD + 64);
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

/* Each number of rows has its code, so that sums stay in registers. */
static void products(const Input *x, const Weight *w, int64_t ins, int rows, float *found) {
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
    float whole = call->bias ? sum + number(((const uint16_t *)call->bias)[out]) : sum;
    ((uint16_t *)call->out)[row * call->outs + out] = rounded(whole);
#else
    ((float *)call->out)[row * call->outs + out] = call->bias ? sum + ((const float *)call->bias)[out] : sum;
#endif
}

static void compute(const void *given, int64_t part) {
    const Call *call = given;
    float found[MOST_ROWS] = {0};
    int64_t rows = call->rows, ins = call->ins, groups = (rows + AT_ONCE - 1) / AT_ONCE;
    int64_t most = (rows + groups - 1) / groups; /* 9 rows are 5 and 4, not 8 and 1 */
    int64_t begin = part * call->size, end = begin + call->size < call->outs ? begin + call->size : call->outs;
    for (int64_t o = begin; o < end; o++)
        for (int64_t first = 0; first < rows; first += most) {
            int count = (int)(rows - first < most ? rows - first : most);
            products((const Input *)call->prepared + first * ins, call->weight + o * ins, ins, count, found);
            for (int r = 0; r < count; r++) store_number(call, first + r, o, found[r]);
        }
}

/* x in the order in which weights are widened: of each step the even channels, then the odd ones. */
static void prepare(const Call *call) {
#if BFLOAT16 && !BF16_DOT
    const uint16_t *x = call->x;
    float *to = call->prepared;
    for (int64_t c = 0; c < call->rows * call->ins; c += STEP)
        for (int i = 0; i < LANES; i++) {
            to[c + i] = number(x[c + 2 * i]);
            to[c + LANES + i] = number(x[c + 2 * i + 1]);
        }
#else
    (void)call;
#endif
}

/* `run` is team.c's team_run. Where x need not be prepared, `prepared` is x. */
void linear(const Call *call, void (*run)(void (*)(const void *, int64_t), const void *, int64_t, int), int threads) {
    prepare(call);
    run(compute, call, (call->outs + call->size - 1) / call->size, threads);
}

int needs_room(void) { return BFLOAT16 && sizeof(Input) == 4; }
