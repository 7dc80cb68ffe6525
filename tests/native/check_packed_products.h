/* Includes packed_products.c for the type in BFLOAT16, and compares it with plain loops. */

#include "../../kernels/packed_products.c"
#include "check.h"
#include "check_numbers.h"

enum { ROWS = 5, OUTS = 37, PER_PART = 16, LONGEST = 2176 };

static float plain_half(const uint8_t *at) {
    const int bits = at[0] | at[1] << 8, exponent = (bits >> 10) & 31;
    const float size = exponent ? ldexpf((float)((bits & 1023) | 1024), exponent - 25) : ldexpf((float)(bits & 1023), -24);
    return bits & 0x8000 ? -size : size;
}

static int plain_code(const Call *call, const uint8_t *row, int64_t i) {
    if (call->bits == 8) return row[i];
    const uint8_t *high = row + call->high;
    int code = (row[i / 64 * 32 + i % 32] >> (i % 64 < 32 ? 0 : 4)) & 15;
    if (call->bits == 5) code |= ((high[i / 8] >> i % 8) & 1) << 4;
    if (call->bits == 6) code |= ((high[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) << 4;
    return code;
}

static double plain_weight(const Call *call, const uint8_t *rows, int64_t out, int64_t i) {
    const uint8_t *row = rows + out * call->stride;
    const double scale = plain_half(row + call->scales + i / call->group * 2);
    const double minimum =
        call->minima < 0 ? -call->offset * scale : plain_half(row + call->minima + i / call->group * 2);
    return plain_code(call, row, i) * scale + minimum;
}

/* Random bytes, but scales below 2: the highest bit of the exponent is not set. */
static uint8_t *random_rows(const Call *call) {
    uint8_t *rows = room_for(OUTS * call->stride);
    for (int64_t i = 0; i < OUTS * call->stride; i++) {
        rows[i] = (uint8_t)random_bits();
        if (i % call->stride >= call->scales && (i % call->stride - call->scales) % 2) rows[i] &= 0xbf;
    }
    return rows;
}

/* Interleave the rows of each tile in words of 4 bytes. */
static uint8_t *interleaved(const Call *call, const uint8_t *rows) {
    uint8_t *tiles = room_for(OUTS * call->stride);
    for (int64_t out = 0; out < OUTS; out++) {
        const int64_t first = out / TILE * TILE, height = OUTS - first < TILE ? OUTS - first : TILE;
        for (int64_t w = 0; w < call->stride / 4; w++)
            memcpy(tiles + first * call->stride + 4 * (w * height + out - first), rows + out * call->stride + 4 * w, 4);
    }
    return tiles;
}

static int check_product(int64_t ins, int bits, int64_t group, int with_minima) {
    static float got[OUTS * LONGEST];
    static double want[OUTS * LONGEST];
    const int64_t units = ins / unit_of(bits), scales = ins * bits / 8, minima = scales + (ins / group * 2 + 3) / 4 * 4;
    Call call = {.x = random_numbers(ROWS * ins, 1), .bias = random_numbers(OUTS, 1),
                 .out = room_for(sizeof(Number) * OUTS * ins), .whole = room_for(2 * ROWS * ins),
                 .factors = room_for(4 * ROWS * units), .sums = room_for(4 * ROWS * units), .rows = ROWS, .outs = OUTS,
                 .ins = ins, .size = PER_PART, .stride = with_minima ? 2 * minima - scales : minima, .bits = bits,
                 .group = group, .high = ins / 2, .scales = scales, .minima = with_minima ? minima : -1,
                 .zeros = -1, .factors_of_scales = -1, .factors_of_minima = -1, .units = units,
                 .offset = with_minima ? 0.0f : (float)(1 << (bits - 1)), .power = 1.0f};
    const uint8_t *rows = random_rows(&call);
    call.codes = interleaved(&call, rows);
#if BFLOAT16
    for (int64_t row = 0; row < ROWS; row++) prepare(&call, row);
#endif
    const int64_t parts = (OUTS + PER_PART - 1) / PER_PART;
    for (int64_t part = 0; part < parts; part++) linear(&call, part);
    for (int64_t i = 0; i < ROWS * OUTS; i++) {
        double size = 1, sum = as_float(call.bias[i % OUTS]);
        for (int64_t c = 0; c < ins; c++) {
            const double product = as_float(call.x[i / OUTS * ins + c]) * plain_weight(&call, rows, i % OUTS, c);
            sum += product;
            size += fabs(product);
        }
        got[i] = (float)(as_float(call.out[i]) / size);
        want[i] = sum / size;
    }
    int failed = differ("packed products", got, want, ROWS * OUTS, BFLOAT16 ? 0.004 : 1e-5);
    for (int tiled = 0; tiled < 2; tiled++) {
        call.codes = tiled ? interleaved(&call, rows) : rows;
        call.tile = tiled ? room_for(TILE * call.stride) : NULL;
        for (int64_t part = 0; part < parts; part++) unpack(&call, part);
        for (int64_t i = 0; i < OUTS * ins; i++) {
            want[i] = plain_weight(&call, rows, i / ins, i % ins);
            got[i] = as_float(call.out[i]);
            if (BFLOAT16) got[i] /= (float)(fabs(want[i]) + 1), want[i] /= fabs(want[i]) + 1;
        }
        failed += differ("unpacked weights", got, want, OUTS * ins, BFLOAT16 ? 0.004 : 1e-3);
    }
    return failed;
}

static int check_all_formats(void) {
    int failed = 0;
    for (int bits = 4; bits <= 8; bits += bits == 6 ? 2 : 1)
        for (int with_minima = 0; with_minima < 2; with_minima++)
            failed += check_product(128, bits, bits == 6 ? 16 : 32, with_minima) +
                      check_product(LONGEST, bits, bits == 6 ? 16 : 128, with_minima);
    return failed;
}
