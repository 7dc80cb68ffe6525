/* A persistent team of threads that shares out the parts of one call at a time.

The caller takes parts itself from the start, so a worker that wakes late costs nothing: the next part goes to whoever
asks first. A caller waits only for parts that a worker has begun. Where workers lose their processor to other processes
in the middle of a part, that wait is long. The team measures it and works alone for a while if workers do not pay. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_WORKERS 255

typedef void (*Function)(const void *call, int64_t part);

static struct {
    Function function;
    const void *call;
    int64_t parts;
    int members;               /* workers with a lower number take part */
    _Atomic uint32_t round;    /* of the present call; workers sleep on it */
    _Atomic int64_t next;      /* part that nobody has taken */
    _Atomic uint32_t active;   /* workers that may hold a part; the caller sleeps on it */
    pthread_mutex_t busy;      /* held by the caller whose call it is */
    pthread_t workers[MOST_WORKERS];
    int started;
} team = {.busy = PTHREAD_MUTEX_INITIALIZER};

/* TODO(R): replaced by the threads helper */
void team_run(Function function, const void *call, int64_t parts, int threads) {
    (void)threads;
    for (int64_t part = 0; part < parts; part++) function(call, part);
}
