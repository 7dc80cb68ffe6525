/* A linear layer of a few bfloat16 rows on a processor that multiplies bfloat16 in vectors (AVX512-BF16), bound by
reading weights: each row of them is read once, asked for a page of memory ahead, and each piece of it multiplied with up
to ROWS rows of x. How many rows come together changes no sum: each is two, of even and odd pieces of 32 channels. */

#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 2048 /* numbers: where processors stop looking ahead by themselves */
#define ROWS 8     /* of x at once: 16 sums and a piece of each stay in 32 registers */
#define MOST_THREADS 256

static inline __m512bh piece(const uint16_t *at) { return (__m512bh)_mm512_loadu_si512(at); }

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

/* Sums over ins channels, a multiple of 32, of w with rows of x: out [rows]. */
static inline __attribute__((always_inline)) void sums_of(const uint16_t *x, const uint16_t *w, int64_t ins, int rows,
                                                           float *out) {
    __m512 sums[ROWS][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    int64_t c = 0;
    for (; c + 64 <= ins; c += 64)
        for (int half = 0; half < 2; half++) {
            const uint16_t *at = w + c + 32 * half;
            __m512bh weight = piece(at);
            _mm_prefetch((const char *)(at + AHEAD), _MM_HINT_T0);
            for (int r = 0; r < rows; r++)
                sums[r][half] = _mm512_dpbf16_ps(sums[r][half], piece(x + r * ins + c + 32 * half), weight);
        }
    for (int r = 0; r < rows; r++) {
        if (c < ins) sums[r][0] = _mm512_dpbf16_ps(sums[r][0], piece(x + r * ins + c), piece(w + c));
        out[r] = _mm512_reduce_add_ps(_mm512_add_ps(sums[r][0], sums[r][1]));
    }
}

/* Each number of rows has its code, whose sums stay in registers. */
static void products(const uint16_t *x, const uint16_t *w, int64_t ins, int rows, float *out) {
    switch (rows) {
    case 1: sums_of(x, w, ins, 1, out); break;
    case 2: sums_of(x, w, ins, 2, out); break;
    case 3: sums_of(x, w, ins, 3, out); break;
    case 4: sums_of(x, w, ins, 4, out); break;
    case 5: sums_of(x, w, ins, 5, out); break;
    case 6: sums_of(x, w, ins, 6, out); break;
    case 7: sums_of(x, w, ins, 7, out); break;
    default: sums_of(x, w, ins, ROWS, out);
    }
}

/* One call: out [rows][outs] of x [rows][ins], weight [outs][ins] and bias [outs] or NULL, summed in float32. */
typedef struct {
    const uint16_t *x, *weight, *bias;
    uint16_t *out;
    int64_t rows, outs, ins;
} Call;

/* The numbers [begin, end) of each row of out. */
typedef struct {
    const Call *call;
    int64_t begin, end;
} Part;

static void *compute(void *given) {
    const Part *part = given;
    const Call *call = part->call;
    float sums[ROWS];
    int64_t rows = call->rows, ins = call->ins, parts = (rows + ROWS - 1) / ROWS;
    int64_t most = (rows + parts - 1) / parts; /* 9 rows are 5 and 4, not 8 and 1 */
    for (int64_t o = part->begin; o < part->end; o++)
        for (int64_t first = 0; first < rows; first += most) {
            int count = (int)(rows - first < most ? rows - first : most);
            products(call->x + first * ins, call->weight + o * ins, ins, count, sums);
            for (int r = 0; r < count; r++)
                call->out[(first + r) * call->outs + o] =
                    rounded(call->bias ? sums[r] + number(call->bias[o]) : sums[r]);
        }
    return NULL;
}

/* By `threads` threads, this one included, each of which has numbers of out of its own; by fewer where none can be had.
A thread is begun and ended in 23 us, in which one reads 0.3 MB. */
void linear(const uint16_t *x, const uint16_t *weight, const uint16_t *bias, uint16_t *out, int64_t rows, int64_t outs,
            int64_t ins, int64_t threads) {
    const Call call = {x, weight, bias, out, rows, outs, ins};
    pthread_t others[MOST_THREADS];
    Part parts[MOST_THREADS];
    int begun[MOST_THREADS] = {0};
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    for (int64_t t = threads - 1; t >= 0; t--) {
        parts[t] = (Part){&call, outs * t / threads, outs * (t + 1) / threads};
        begun[t] = t > 0 && pthread_create(&others[t], NULL, compute, &parts[t]) == 0;
    }
    for (int64_t t = 0; t < threads; t++)
        if (!begun[t]) compute(&parts[t]);
    for (int64_t t = 1; t < threads; t++)
        if (begun[t]) pthread_join(others[t], NULL);
}
