/* Layout of the low-bit rows of a block (`Layout` in low_bit.py), and the codes of their steps. */

#ifndef OFFLOAD_RT_LOW_BIT_LAYOUT_H
#define OFFLOAD_RT_LOW_BIT_LAYOUT_H

#include "simd.h"
#include "value_products.h"

#define BLOCK 64
#define KEY_BYTES (HEAD_DIM / 2)
#define STEPS (BLOCK * (KEY_BYTES + VALUE_BYTES)) /* offset of the steps of keys; the steps of values follow */
#define BLOCK_BYTES (STEPS + 2 * BLOCK)

/* Return the address of block b of a head. Every page holds PAGE_BLOCKS blocks of each head, from `offset` bytes on. */
INLINE uint8_t *block_of(uint8_t *const *pages, int64_t offset, int64_t head, int64_t b) {
    return pages[b / PAGE_BLOCKS] + offset + ((int64_t)head * PAGE_BLOCKS + b % PAGE_BLOCKS) * BLOCK_BYTES;
}

/* Decode steps. A code holds the exponent and three fraction bits of a float32. */
INLINE f32 load_steps(const uint8_t *codes) { return (f32)((load_u8(codes) + ((127 - 20) << 3)) << 20); }

/* Encode the step of a row, rounded up to three fraction bits, from 2^-20 to 2^12. */
INLINE uint8_t step_code(float step) {
    uint32_t pattern;
    memcpy(&pattern, &step, 4);
    int upper = (int)((pattern + ((1u << 20) - 1)) >> 20) - ((127 - 20) << 3);
    return (uint8_t)(upper < 0 ? 0 : upper > 255 ? 255 : upper);
}

#endif
