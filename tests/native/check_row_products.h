/* Includes row_products.c for the type of weights in BFLOAT16, and compares it with plain loops. */

#include "../../kernels/row_products.c"
#include "check.h"

enum { ROWS = 12, OUTS = 21, MOST_INS = 416, PER_PART = 8 };

#if BFLOAT16
static Number number_from(float x) { return rounded(x); }
static float float_from(Number x) { return number(x); }
#define MOST_ERROR 0.063 /* of outputs below 32, which are rounded to 8 bits */
#else
static Number number_from(float x) { return x; }
static float float_from(Number x) { return x; }
#define MOST_ERROR 1e-4
#endif

static Number *random_numbers(int64_t count) {
    Number *found = room_for(sizeof *found * (size_t)count);
    for (int64_t i = 0; i < count; i++) found[i] = number_from(random_float());
    return found;
}

static int check_product(int64_t rows, int64_t ins, int biased) {
    static float got[ROWS * OUTS];
    static double want[ROWS * OUTS];
    Call call = {.x = random_numbers(rows * ins), .weight = random_numbers(OUTS * ins),
                 .bias = biased ? random_numbers(OUTS) : NULL, .out = room_for(sizeof(Number) * ROWS * OUTS),
                 .rows = rows, .outs = OUTS, .ins = ins, .size = PER_PART};
    for (int64_t part = 0; part < (OUTS + PER_PART - 1) / PER_PART; part++) linear(&call, part);
    for (int64_t i = 0; i < rows * OUTS; i++) {
        const Number *x = call.x + i / OUTS * ins, *w = call.weight + i % OUTS * ins;
        got[i] = float_from(call.out[i]);
        want[i] = biased ? float_from(call.bias[i % OUTS]) : 0;
        for (int64_t c = 0; c < ins; c++) want[i] += (double)float_from(x[c]) * float_from(w[c]);
    }
    return differ("row products", got, want, rows * OUTS, MOST_ERROR);
}

static int check_products(void) {
    int failed = 0;
    for (int64_t rows = 1; rows <= ROWS; rows++)
        failed += check_product(rows, 32, 0) + check_product(rows, MOST_INS, 1);
    return failed;
}
