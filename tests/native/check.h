/* Checks of the C kernels without Python, so that they run under an emulator: each check_*.c includes one kernel and
compares it with plain loops on random data. */

#ifndef CHECK_H
#define CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int check_low_bit(void);
int check_best_scores(void);
int check_row_products_bfloat16(void);
int check_row_products_float32(void);
int check_packed_products_bfloat16(void);
int check_packed_products_float32(void);
int check_attention_bfloat16(void);
int check_attention_float32(void);
int check_decode_attention_bfloat16(void);
int check_decode_attention_float32(void);

/* The same numbers on every machine. */
static uint64_t random_state = 88172645463325252ULL;

static inline uint32_t random_bits(void) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* In [-1, 1). */
static inline float random_float(void) { return (float)(int32_t)random_bits() / 2147483648.0f; }

static inline void *room_for(size_t bytes) {
    void *room = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (room == NULL) abort();
    memset(room, 0x5a, bytes);
    return room;
}

/* A team of one. */
static inline void run_alone(void (*function)(const void *, int64_t), const void *call, int64_t parts, int threads) {
    (void)threads;
    for (int64_t part = 0; part < parts; part++) function(call, part);
}

/* Prints the first difference above `most`; returns how many there are. */
static inline int differ(const char *name, const float *got, const double *want, int64_t count, double most) {
    int found = 0;
    for (int64_t i = 0; i < count; i++)
        if (!(fabs(got[i] - want[i]) <= most) && !(isinf(want[i]) && got[i] == want[i]) && found++ == 0)
            printf("%s[%lld] is %g instead of %g\n", name, (long long)i, got[i], want[i]);
    return found;
}

#endif
