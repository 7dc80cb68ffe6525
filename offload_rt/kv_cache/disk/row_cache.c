/* Per-row operations of the row cache. row_cache.py defines the results. A function returns -1 if a row index of `out`
   or `rows` is out of range. */
#include <stdint.h>
#include <string.h>

#define MIX 0x9E3779B97F4A7C15u
#define NEAR 8 /* rows whose slot is looked up ahead of the copy */
#define FAR 16 /* rows whose set is prefetched ahead of the look-up */

struct cache {
    int64_t *owner; /* row + 1 of each slot; 0 if the slot is free */
    float *score;
    uint32_t *last;
    char *rows; /* `size` bytes each */
    int64_t size, sets, ways;
};

static int within(int64_t n, const int64_t *numbers, int64_t stop) {
    for (int64_t i = 0; i < n; i++)
        if (numbers[i] < 0 || numbers[i] >= stop) return 0;
    return 1;
}

/* Return the first slot of the set of a row. */
static int64_t first_of(const struct cache *c, int64_t id) {
    uint64_t mixed = ((uint64_t)id * MIX) >> 32;
    return (int64_t)((mixed * (uint64_t)c->sets) >> 32) * c->ways;
}

static int64_t find(const struct cache *c, int64_t id) {
    int64_t first = first_of(c, id), found = -1;
    for (int64_t slot = first; slot < first + c->ways; slot++) found = c->owner[slot] == id + 1 ? slot : found;
    return found;
}

static void ask_for_set(const struct cache *c, int64_t id) {
    const char *owners = (const char *)(c->owner + first_of(c, id));
    for (int64_t b = 0; b < c->ways * (int64_t)sizeof *c->owner; b += 64) __builtin_prefetch(owners + b);
}

static void ask_for_slot(const struct cache *c, int64_t slot) {
    __builtin_prefetch(c->score + slot, 1);
    __builtin_prefetch(c->last + slot, 1);
    for (int64_t b = 0; b < c->size; b += 64) __builtin_prefetch(c->rows + slot * c->size + b);
}

/* Copy the cached rows among the n rows `ids` to the rows `into` of `out`, which has `m` rows, and count them as used.
   Write the ids that are not cached to `missing`, and their target rows to `missing` + n. Returns their number. */
int64_t lookup(const struct cache *c, float weight, uint32_t now, int64_t n, const int64_t *ids, const int64_t *into,
             char *out, int64_t m, int64_t *missing) {
    if (!within(n, into, m)) return -1;
    int64_t gone = 0, slots[NEAR] = {0};
    for (int64_t next = 0; next < n + NEAR; next++) {
        int64_t i = next - NEAR, slot = slots[next % NEAR];
        if (i >= 0 && slot < 0) {
            missing[gone] = ids[i];
            missing[n + gone++] = into[i];
        } else if (i >= 0) {
            c->score[slot] += weight;
            c->last[slot] = now;
            memcpy(out + into[i] * c->size, c->rows + slot * c->size, (size_t)c->size);
        }
        if (next >= n) continue;
        if (next + FAR < n) ask_for_set(c, ids[next + FAR]);
        if ((slots[next % NEAR] = find(c, ids[next])) >= 0) ask_for_slot(c, slots[next % NEAR]);
    }
    return gone;
}

/* Return the slot for a new row, or -1: a free slot, else the slot with the lowest score that was not used at `now`. */
static int64_t slot_for(const struct cache *c, uint32_t now, int64_t id) {
    int64_t first = first_of(c, id), least = -1;
    for (int64_t slot = first; slot < first + c->ways; slot++) {
        if (!c->owner[slot]) return slot;
        if (c->last[slot] != now && (least < 0 || c->score[slot] < c->score[least])) least = slot;
    }
    return least;
}

/* Cache row at[i] of the m `rows` as row ids[i], if there is a slot for it. Returns the number of free slots taken. */
int64_t insert(const struct cache *c, float weight, uint32_t now, int64_t n, const int64_t *ids, const int64_t *at,
              const char *rows, int64_t m) {
    if (!within(n, at, m)) return -1;
    int64_t fresh = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + FAR < n) ask_for_set(c, ids[i + FAR]);
        int64_t slot = slot_for(c, now, ids[i]);
        if (slot < 0) continue;
        fresh += !c->owner[slot];
        memcpy(c->rows + slot * c->size, rows + at[i] * c->size, (size_t)c->size);
        c->owner[slot] = ids[i] + 1;
        c->score[slot] = weight;
        c->last[slot] = now;
    }
    return fresh;
}

/* Remove the rows start, start + step, ... below stop. Returns the number of rows that were cached. */
int64_t drop(const struct cache *c, int64_t start, int64_t stop, int64_t step) {
    int64_t here = 0;
    for (int64_t id = start; id < stop; id += step) {
        int64_t slot = find(c, id);
        if (slot < 0) continue;
        c->owner[slot] = 0;
        here++;
    }
    return here;
}
