/* The selection that selection.py defines (InfiniGen, paper 4.3), from scores as low_bit.c leaves them. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The n-th largest of values [count], 1 <= n <= count, whose order is lost. */
static float nth_largest(float *values, int64_t count, int64_t n) {
    int64_t low = 0, high = count - 1, at = n - 1;
    while (low < high) {
        float pivot = values[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float other = values[i];
                values[i++] = values[j];
                values[j--] = other;
            }
        }
        if (at <= j)
            high = j;
        else if (at >= i)
            low = i;
        else
            break;
    }
    return values[at];
}

/* values [heads][n]: of each token the largest score - lse of a head's queries. passing [n]: 1 where a score of any head
is within alpha of its query's largest; returns how many scores are. scores [heads * group] lie `stride` apart. */
static int64_t rank(const float *scores, int64_t stride, int heads, int group, int64_t n, const float *peaks,
                    const float *lses, float alpha, float *restrict values, uint8_t *restrict passing) {
    int64_t within = 0;
    memset(passing, 0, (size_t)n);
    for (int query = 0; query < heads * group; query++) {
        const float *restrict s = scores + query * stride;
        float *restrict best = values + query / group * n;
        float less = lses[query], least = peaks[query] - alpha;
        int32_t more = 0, first = query % group == 0;
        for (int64_t t = 0; t < n; t++) {
            float value = s[t] - less;
            best[t] = first || value > best[t] ? value : best[t];
            passing[t] |= s[t] >= least;
            more += s[t] >= least;
        }
        within += more;
    }
    return within;
}

#define EVERY 16 /* of values that are looked at to guess how large the n-th largest is */

/* Something that more than `most` of the values [n] are likely to reach, and not many more: room has n / EVERY + 1. */
static float low_guess(const float *values, int64_t n, int64_t most, float *room) {
    int64_t count = 0, reach = most * 3 / (2 * EVERY) + EVERY;
    for (int64_t t = 0; t < n; t += EVERY) room[count++] = values[t];
    return reach < count ? nth_largest(room, count, reach) : -INFINITY;
}

/* tokens: those of n that pass and whose value is `least` or more, rising; returns how many. `kept` has room for n. */
static int64_t gather(const float *restrict values, const uint8_t *restrict passing, int64_t n, float least,
                      uint8_t *restrict kept, int64_t *tokens) {
    int64_t count = 0;
    for (int64_t t = 0; t < n; t++) kept[t] = passing[t] & (values[t] >= least);
    for (int64_t t = 0; t < n; t += 8) {
        uint64_t eight = 0;
        memcpy(&eight, kept + t, (size_t)(n - t < 8 ? n - t : 8));
        for (int64_t i = t; eight; i++, eight >>= 8)
            if (eight & 1) tokens[count++] = i;
    }
    return count;
}

/* Selects among n tokens: chosen [heads][limit], of which the first ones of each head, as many as are returned, rise.
That many are, of all heads and `group` queries of each, the mean of how many scores are within alpha of the largest,
rounded up, at most `limit`: the tokens with the largest score - lse of a head's queries, among those that
pass any; of equals the first. values [heads][n], sorted [n], passing [2][n], tokens [n] are room. */
int64_t select_best(const float *scores, int64_t stride, int heads, int group, int64_t n, const float *peaks,
                    const float *lses, float alpha, int64_t limit, float *values, float *sorted, uint8_t *passing,
                    int64_t *tokens, int64_t *chosen) {
    int64_t within = rank(scores, stride, heads, group, n, peaks, lses, alpha, values, passing);
    int64_t mean = (within + heads * group - 1) / (heads * group), most = mean < limit ? mean : limit;
    if (most < 1) return 0; /* scores that are no numbers */
    for (int head = 0; head < heads; head++, values += n, chosen += limit) {
        int64_t count = gather(values, passing, n, low_guess(values, n, most, sorted), passing + n, tokens);
        if (count < most) count = gather(values, passing, n, -INFINITY, passing + n, tokens);
        for (int64_t i = 0; i < count; i++) sorted[i] = values[tokens[i]];
        float least = count ? nth_largest(sorted, count, most) : 0.0f;
        int64_t above = 0, taken = 0;
        for (int64_t i = 0; i < count; i++) above += values[tokens[i]] > least;
        for (int64_t i = 0; i < count && taken < most; i++) {
            float value = values[tokens[i]];
            if (value < least || (value == least && above == most)) continue;
            above += value == least;
            chosen[taken++] = tokens[i];
        }
        while (taken < most) chosen[taken++] = 0; /* scores that are no numbers */
    }
    return most;
}
