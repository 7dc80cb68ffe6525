/* Quantise keys or values and store them in blocks of low-bit KV. */

#ifndef OFFLOAD_RT_LOW_BIT_STORE_H
#define OFFLOAD_RT_LOW_BIT_STORE_H

#include "fields.h"
#include "low_bit_layout.h"

/* Arguments of store_rows: rows [heads][count][HEAD_DIM] are stored in the slots from `slot` on, as keys or as values.
*/
typedef struct {
    uint8_t *const *pages;
    int64_t offset, heads, slot, count;
    const float *rows;
    int32_t values;
} StoreCall;

FIELDS_OF(StoreCall) = {
    FIELD(StoreCall, pages), FIELD(StoreCall, offset), FIELD(StoreCall, heads), FIELD(StoreCall, slot),
    FIELD(StoreCall, count), FIELD(StoreCall, rows), FIELD(StoreCall, values),
    END_OF_FIELDS(StoreCall),
};

/* Quantise a row to codes of `bits` bits and pack them into bytes. */
INLINE void pack_row(const float *row, float step, const int bits, uint8_t *packed) {
    const int half = 1 << (bits - 1), width = HEAD_DIM * bits / 8;
    for (int c = 0; c < width; c += LANES) {
        i32 byte = {0};
        for (int field = 0; field < 8 / bits; field++) {
            f32 x = load(row + field * width + c) / step;
            x = choose(x > all(-half), x, all(-half)); /* also for NaN */
            x = choose(x < all(half), x, all(half));
            i32 level = __builtin_convertvector(x, i32);
            level += __builtin_convertvector(level, f32) > x; /* rounds down: a mask is -1 */
            level += half + (level == half); /* the largest magnitude can reach the upper end */
            byte |= level << (bits * field);
        }
        store_u8(packed + c, byte);
    }
}

/* Store the rows of one head. */
void store_rows(const void *given, int64_t head) {
    const StoreCall *call = given;
    for (int64_t i = 0; i < call->count; i++) {
        const float *row = call->rows + (head * call->count + i) * HEAD_DIM;
        uint8_t *block = block_of(call->pages, call->offset, head, (call->slot + i) / BLOCK), packed[HEAD_DIM];
        int64_t t = (call->slot + i) % BLOCK;
        f32 most = {0};
        for (int c = 0; c < HEAD_DIM; c += LANES) most = max_of(abs_of(load(row + c)), most);
        float half = call->values ? 1 << (VALUE_BITS - 1) : 8;
        uint8_t code = step_code(largest_of(most) / half), *steps = block + STEPS + (call->values ? BLOCK : 0);
        uint32_t bits = ((uint32_t)code + ((127 - 20) << 3)) << 20;
        float step;
        memcpy(&step, &bits, 4);
        steps[t] = code;
        if (call->values) {
            pack_row(row, step, VALUE_BITS, block + BLOCK * KEY_BYTES + t * VALUE_BYTES);
        } else {
            pack_row(row, step, 4, packed);
            for (int c = 0; c < KEY_BYTES; c++) block[c * BLOCK + t] = packed[c];
        }
    }
}

#endif
