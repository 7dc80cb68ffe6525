/* Token selection as defined in selection.py (InfiniGen, paper 4.3). First `rank` runs for parts of the tokens, then
`choose_best` for each head.

Memory traffic in bytes per token and KV head with G queries: `rank` reads 4 * G and writes 4, `choose_best` reads 4.
Arithmetic: four vector instructions per LANES scores. */

#include "fields.h"
#include "simd.h"
#include "team.h"

#define BLOCK 64
#define PADDING 64 /* numbers after the end of an array that may be read or written */
#define EVERY 16   /* one value of this many is sampled to estimate the n-th largest */

typedef struct {
    const float *scores; /* [heads * group][n], with a distance of `stride` */
    int64_t stride, heads, group, n, per_part; /* per_part: tokens of a part of rank, a multiple of 64 */
    const float *peaks, *lses;                 /* [heads * group] */
    float alpha;
    int64_t most;      /* number of tokens that each head selects */
    float *values;     /* [heads][n], plus PADDING */
    uint64_t *passing; /* [(n + 63) / 64]: a bit for each token */
    int64_t *within;   /* [parts] */
    float *best;       /* [heads][n + PADDING] */
    int32_t *tokens;   /* [heads][n] */
    int64_t *chosen;   /* [heads][most] */
} Ranking;

FIELDS_OF(Ranking) = {
    FIELD(Ranking, scores), FIELD(Ranking, stride), FIELD(Ranking, heads), FIELD(Ranking, group), FIELD(Ranking, n),
    FIELD(Ranking, per_part), FIELD(Ranking, peaks), FIELD(Ranking, lses), FIELD(Ranking, alpha),
    FIELD(Ranking, most), FIELD(Ranking, values), FIELD(Ranking, passing), FIELD(Ranking, within),
    FIELD(Ranking, best), FIELD(Ranking, tokens), FIELD(Ranking, chosen),
    END_OF_FIELDS(Ranking),
};

/* Compute for each token: `values`, the largest score - lse over the queries of a KV head; `passing`, whether any score
is within alpha of the largest score of its query. `within` is the number of such scores in the part. */
static void rank(const void *given, int64_t part) {
    const Ranking *call = given;
    int64_t first = part * call->per_part, last = first + call->per_part < call->n ? first + call->per_part : call->n;
    int64_t within = 0;
    memset(call->passing + first / BLOCK, 0, (size_t)((last - first + BLOCK - 1) / BLOCK) * sizeof *call->passing);
    for (int64_t query = 0; query < call->heads * call->group; query++) {
        const float *s = call->scores + query * call->stride;
        float *best = call->values + query / call->group * call->n;
        float less = call->lses[query], least = call->peaks[query] - call->alpha;
        int begins = query % call->group == 0;
        i32 more = {0};
        int64_t t = first;
        for (; t + BLOCK <= last; t += BLOCK) {
            uint64_t bits = 0;
            for (int i = 0; i < BLOCK; i += LANES) {
                f32 score = load(s + t + i), value = score - less;
                i32 passes = score >= all(least);
                store(best + t + i, begins ? value : max_of(value, load(best + t + i)));
                more -= passes;
                bits |= (uint64_t)bits_of(passes) << i;
            }
            call->passing[t / BLOCK] |= bits;
        }
        for (; t < last; t++) {
            float value = s[t] - less;
            best[t] = begins || value > best[t] ? value : best[t];
            call->passing[t / BLOCK] |= (uint64_t)(s[t] >= least) << t % BLOCK;
            within += s[t] >= least;
        }
        for (int i = 0; i < LANES; i++) within += more[i];
    }
    call->within[part] = within;
}

/* Map float32 to integers in the same order. */
INLINE i32 ordered(f32 x) { return (i32)x ^ (((i32)x >> 31) & 0x7fffffff); }

INLINE float number_of(int32_t ordered) {
    int32_t bits = ordered ^ ((ordered >> 31) & 0x7fffffff);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Count the values [count], padded with -inf, whose integer (`ordered`) is at least `least`. */
static int64_t count_from(const float *values, int64_t count, int32_t least) {
    i32 more[2] = {{0}};
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += 2 * LANES)
        for (int j = 0; j < 2; j++) more[j] -= ordered(load(values + i + j * LANES)) >= least;
    for (int i = 0; i < LANES; i++) found += more[0][i] + more[1][i];
    return found;
}

/* Return the n-th largest of values [count], 1 <= n <= count. Writes -inf after the last value. A binary search over
the range of numbers finds a bound that n values reach, without a branch per value. */
static float nth_largest(float *values, int64_t count, int64_t n) {
    int64_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits, order;
        memcpy(&bits, values + i, sizeof bits);
        order = bits ^ ((bits >> 31) & 0x7fffffff);
        low = order < low ? order : low;
        high = order > high ? order : high;
    }
    for (int i = 0; i < PADDING; i++) values[count + i] = -INFINITY;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2, found = count_from(values, count, (int32_t)middle);
        if (found == n) {
            float smallest = INFINITY, least = number_of((int32_t)middle);
            for (int64_t i = 0; i < count; i++)
                smallest = values[i] >= least && values[i] < smallest ? values[i] : smallest;
            return smallest;
        }
        if (found > n) low = middle;
        else high = middle - 1;
    }
    return number_of((int32_t)low);
}

/* Estimate a bound that slightly more than `most` of the values [n] reach. `room` has n / EVERY + 1 numbers, plus
PADDING. */
static float low_guess(const float *values, int64_t n, int64_t most, float *room) {
    int64_t count = 0, reach = most * 3 / (2 * EVERY) + EVERY;
    for (int64_t t = 0; t < n; t += EVERY) room[count++] = values[t];
    return reach < count ? nth_largest(room, count, reach) : -INFINITY;
}

/* Collect the tokens that pass and whose value is at least `least`, ascending, and their values `best`. Return the
count. */
static int64_t gather(const Ranking *call, const float *values, float least, int32_t *tokens, float *best) {
    int64_t count = 0;
    for (int64_t first = 0; first < call->n; first += BLOCK) {
        uint64_t bits = 0;
        for (int t = 0; t < BLOCK; t += LANES) bits |= (uint64_t)bits_of(load(values + first + t) >= all(least)) << t;
        for (bits &= call->passing[first / BLOCK]; bits; bits &= bits - 1) {
            int64_t t = first + __builtin_ctzll(bits);
            tokens[count] = (int32_t)t;
            best[count++] = values[t];
        }
    }
    return count;
}

/* Select the `most` passing tokens of a head with the largest values, ascending. Of equal values, select the first. */
static void choose_best(const void *given, int64_t head) {
    const Ranking *call = given;
    const float *values = call->values + head * call->n;
    float *best = call->best + head * (call->n + PADDING);
    int32_t *tokens = call->tokens + head * call->n;
    int64_t *chosen = call->chosen + head * call->most, most = call->most, taken = 0;
    int64_t count = gather(call, values, low_guess(values, call->n, most, best), tokens, best);
    if (count < most) count = gather(call, values, -INFINITY, tokens, best);
    float least = count < most ? -INFINITY : nth_largest(best, count, most);
    int64_t equals = most;
    for (int64_t i = 0; i < count; i++) equals -= best[i] > least;
    for (int64_t i = 0; i < count && taken < most; i++) {
        int equal = best[i] == least && equals > 0;
        chosen[taken] = tokens[i];
        taken += equal || best[i] > least;
        equals -= equal;
    }
    for (int32_t t = 0; taken < most; t++) { /* only if scores are NaN */
        int there = 0;
        for (int64_t i = 0; i < taken; i++) there |= chosen[i] == t;
        if (!there) chosen[taken++] = t;
    }
}

/* Write at most `limit` tokens per head to `chosen` [heads][most], and return `most`. */
int64_t select_all(Ranking *call, int64_t limit, TeamRun run, int threads) {
    int64_t parts = (call->n + call->per_part - 1) / call->per_part, queries = call->heads * call->group, within = 0;
    run(rank, call, parts, threads);
    for (int64_t part = 0; part < parts; part++) within += call->within[part];
    call->most = (within + queries - 1) / queries < limit ? (within + queries - 1) / queries : limit;
    if (call->most > 0) run(choose_best, call, call->heads, threads);
    return call->most;
}
