/* Merge scattered pieces of a file into few requests of whole blocks. requests.py defines the result. */
#include <stdint.h>
#include <stdlib.h>

struct piece {
    int64_t offset, number;
};

static int by_offset(const void *a, const void *b) {
    int64_t x = ((const struct piece *)a)->offset, y = ((const struct piece *)b)->offset;
    return (x > y) - (x < y);
}

/* Fill six consecutive lists of n + 1 numbers in `lists`. For the n pieces, in the order of the file: their numbers,
   and their offsets in the buffer. For the requests: the first piece of each (followed by n), the offset in the file,
   the size, and the offset in the buffer. Returns the number of requests, or -1 if memory allocation fails. */
int64_t merge(int64_t n, int64_t piece, int64_t block, int64_t gap, int64_t most, const int64_t *offsets,
              int64_t *lists) {
    int64_t *order = lists, *starts = order + n + 1, *first = starts + n + 1, *offset = first + n + 1;
    int64_t *size = offset + n + 1, *at = size + n + 1;
    struct piece *own = malloc(sizeof *own * (size_t)(n ? n : 1));
    if (!own) return -1;
    int rises = 1;
    for (int64_t i = 0; i < n; i++) {
        own[i] = (struct piece){offsets[i], i};
        rises &= !i || offsets[i - 1] <= offsets[i];
    }
    if (!rises) qsort(own, (size_t)n, sizeof *own, by_offset);
    int64_t r = -1, filled = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t begin = own[i].offset / block * block, stop = (own[i].offset + piece + block - 1) / block * block;
        if (r < 0 || begin - (offset[r] + size[r]) > gap || stop - offset[r] > most) {
            if (r >= 0) filled += size[r];
            r++;
            offset[r] = begin, at[r] = filled, first[r] = i;
        }
        size[r] = stop - offset[r];
        order[i] = own[i].number;
        starts[i] = at[r] + own[i].offset - offset[r];
    }
    first[r + 1] = n;
    free(own);
    return r + 1;
}
