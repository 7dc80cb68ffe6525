/* Numbers of the type that the kernel included before is compiled for. */

#if BFLOAT16
static Number number_from(float x) { return rounded(x); }
#else
static Number number_from(float x) { return x; }
#endif

/* Returns numbers in [-most, most). */
static Number *random_numbers(int64_t count, float most) {
    Number *found = room_for(sizeof *found * (size_t)count);
    for (int64_t i = 0; i < count; i++) found[i] = number_from(most * random_float());
    return found;
}
