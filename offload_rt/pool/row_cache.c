/* What row_cache.py does for every row that is asked for, as it defines it. A number out of range is told by -1. */
#include <stdint.h>
#include <string.h>

#define NEAR 8 /* rows whose slot is asked for before they are copied */
#define FAR 16 /* rows whose place in the index is */

struct cache {
    int32_t *index;  /* of a row: its slot, and 1; 0 */
    int64_t *owner;  /* of a slot: its row */
    float *score;
    uint32_t *last;
    char *rows;      /* `size` bytes each */
    int64_t size, entries;
};

static int within(int64_t n, const int64_t *numbers, int64_t stop) {
    for (int64_t i = 0; i < n; i++)
        if (numbers[i] < 0 || numbers[i] >= stop) return 0;
    return 1;
}

/* Those of the n rows `ids` that are here have been used, and go to the rows `into` of `out`, which has `m`. The others,
   and where they go, are the first of missing and of missing + n; returns how many. */
int64_t take(const struct cache *c, float weight, uint32_t now, int64_t n, const int64_t *ids, const int64_t *into,
             int64_t *missing, char *out, int64_t m) {
    if (!within(n, ids, c->entries) || !within(n, into, m)) return -1;
    int64_t gone = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + FAR < n) __builtin_prefetch(c->index + ids[i + FAR]);
        if (i + NEAR < n) {
            int64_t slot = c->index[ids[i + NEAR]] - 1;
            if (slot >= 0) {
                __builtin_prefetch(c->score + slot, 1);
                __builtin_prefetch(c->last + slot, 1);
                for (int64_t b = 0; b < c->size; b += 64) __builtin_prefetch(c->rows + slot * c->size + b);
            }
        }
        int64_t slot = c->index[ids[i]] - 1;
        if (slot < 0) {
            missing[gone] = ids[i];
            missing[n + gone++] = into[i];
            continue;
        }
        c->score[slot] += weight;
        c->last[slot] = now;
        memcpy(out + into[i] * c->size, c->rows + slot * c->size, (size_t)c->size);
    }
    return gone;
}

/* Row ids[i], which is row at[i] of the m `rows`, takes slots[i]. */
int64_t enter(const struct cache *c, float weight, uint32_t now, int64_t n, const int64_t *ids, const int64_t *at,
              const int32_t *slots, const char *rows, int64_t m) {
    if (!within(n, ids, c->entries) || !within(n, at, m)) return -1;
    for (int64_t i = 0; i < n; i++) {
        int64_t slot = slots[i];
        memcpy(c->rows + slot * c->size, rows + at[i] * c->size, (size_t)c->size);
        c->index[ids[i]] = (int32_t)(slot + 1);
        c->owner[slot] = ids[i];
        c->score[slot] = weight;
        c->last[slot] = now;
    }
    return 0;
}
