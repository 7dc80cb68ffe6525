/* Copy scattered rows to scattered rows. Each row is read once and written once. */
#include <stdint.h>
#include <string.h>

#define AHEAD 8 /* rows to prefetch ahead */

/* Copy row i (`size` bytes at `source` + at[i]) to row into[i] of `out`. */
void copy_rows(int64_t n, int64_t size, const char *source, const int64_t *at, char *out, const int64_t *into) {
    for (int64_t i = 0; i < n; i++) {
        if (i + AHEAD < n)
            for (int64_t c = 0; c < size; c += 64) __builtin_prefetch(source + at[i + AHEAD] + c);
        memcpy(out + into[i] * size, source + at[i], (size_t)size);
    }
}
