/* Includes row_products.c for the type of weights in BFLOAT16, and compares it with plain loops. */

#include "../../kernels/row_products.c"
#include "check.h"
#include "check_numbers.h"

enum { ROWS = 12, OUTS = 21, MOST_INS = 416, PER_PART = 8 };

#define MOST_ERROR (BFLOAT16 ? 0.063 : 1e-4) /* bfloat16: of outputs below 32, which are rounded to 8 bits */

static int check_product(int64_t rows, int64_t ins, int biased) {
    static float got[ROWS * OUTS];
    static double want[ROWS * OUTS];
    Call call = {.x = random_numbers(rows * ins, 1), .weight = random_numbers(OUTS * ins, 1),
                 .bias = biased ? random_numbers(OUTS, 1) : NULL, .out = room_for(sizeof(Number) * ROWS * OUTS),
                 .rows = rows, .outs = OUTS, .ins = ins, .size = PER_PART};
    for (int64_t part = 0; part < (OUTS + PER_PART - 1) / PER_PART; part++) linear(&call, part);
    for (int64_t i = 0; i < rows * OUTS; i++) {
        const Number *x = call.x + i / OUTS * ins, *w = call.weight + i % OUTS * ins;
        got[i] = as_float(call.out[i]);
        want[i] = biased ? as_float(call.bias[i % OUTS]) : 0;
        for (int64_t c = 0; c < ins; c++) want[i] += (double)as_float(x[c]) * as_float(w[c]);
    }
    return differ("row products", got, want, rows * OUTS, MOST_ERROR);
}

static int check_products(void) {
    int failed = 0;
    for (int64_t rows = 1; rows <= ROWS; rows++)
        failed += check_product(rows, 32, 0) + check_product(rows, MOST_INS, 1);
    return failed;
}
