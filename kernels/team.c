/* A persistent team of threads that computes the parts of one call at a time.

The caller computes parts from the start, and workers take the next parts when they wake up. A worker that wakes late
therefore costs no time, and the caller waits only for parts that a worker has begun. This wait is long if a worker
loses its processor to another process in the middle of a part. The team measures the time that workers save. If they
save none, the caller works alone for a while and then tries again.

Workers sleep without spinning. The caller runs Python between calls, and spinning for so long would waste time. */

#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include "team.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

#define MAX_WORKERS 255
#define SPINS 200            /* spins of the caller before it sleeps, about 10 us */
#define SHORTEST_REST 1000000 /* ns */
#define LONGEST_REST 200000000

typedef struct {
    _Atomic uint32_t sleeping __attribute__((aligned(64)));
    _Atomic int thread, processor; /* kernel thread id, and the processor where it ran last */
} Worker;

static struct {
    /* Round in the upper half, next part in the lower half. A worker takes a part by a compare-and-swap of both, so a
    worker that is late for an earlier round takes no part. The call stays valid until all of its parts are done. */
    _Atomic uint64_t next __attribute__((aligned(64)));
    _Atomic(Function) function;
    _Atomic(const void *) call;
    _Atomic uint32_t parts, members;
    _Atomic uint32_t left __attribute__((aligned(64))); /* parts that are not done; the caller sleeps on it */
    _Atomic uint32_t helped;                            /* parts that workers have done */
    _Atomic uint32_t waiting;                           /* the caller sleeps */
    pthread_mutex_t busy;                               /* held by the current caller */
    uint32_t round;
    int started;
    int64_t saved;       /* nanoseconds that workers have saved recently */
    int64_t rest;        /* nanoseconds for which the caller works alone if workers save no time */
    int64_t alone_until; /* time at which this rest ends */
    Worker workers[MAX_WORKERS];
} team = {.busy = PTHREAD_MUTEX_INITIALIZER, .rest = SHORTEST_REST};

static int64_t nanoseconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t now(void) { return nanoseconds(CLOCK_MONOTONIC); }

#if defined(__linux__)
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static void note_processor(Worker *worker) {
    if (!worker->thread) worker->thread = (int)syscall(SYS_gettid);
    worker->processor = sched_getcpu();
}

/* Move a worker away from the caller's processor. The operating system wakes a thread where it ran last. If processors
share no cache, it can stay there for 100 ms although others are idle. */
static void keep_away(Worker *worker) {
    int own = sched_getcpu();
    cpu_set_t others;
    if (!worker->thread || worker->processor != own || sched_getaffinity(0, sizeof others, &others)) return;
    CPU_CLR(own, &others);
    if (CPU_COUNT(&others)) sched_setaffinity(worker->thread, sizeof others, &others);
}
#else
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    struct timespec time = {0, 50000};
    if (atomic_load(word) == value) nanosleep(&time, NULL);
}

static void wake(_Atomic uint32_t *word) { (void)word; }

static void note_processor(Worker *worker) { (void)worker; }

static void keep_away(Worker *worker) { (void)worker; }
#endif

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Compute the next part of the current call that no thread has taken, if there is one. */
static int take_part(uint32_t helper) {
    uint64_t seen = atomic_load_explicit(&team.next, memory_order_acquire);
    for (;;) {
        Function function = atomic_load_explicit(&team.function, memory_order_relaxed);
        const void *call = atomic_load_explicit(&team.call, memory_order_relaxed);
        uint32_t parts = atomic_load_explicit(&team.parts, memory_order_relaxed), part = (uint32_t)seen;
        if (part >= parts) return 0;
        /* If the swap succeeds, the round is still the one in `seen`, and the three values above belong to it. */
        if (!atomic_compare_exchange_weak_explicit(&team.next, &seen, seen + 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        function(call, part);
        if (helper) atomic_fetch_add_explicit(&team.helped, 1, memory_order_relaxed);
        if (atomic_fetch_sub_explicit(&team.left, 1, memory_order_acq_rel) == 1 && atomic_load(&team.waiting))
            wake(&team.left);
        return 1;
    }
}

static void *work(void *given) {
    uint32_t index = (uint32_t)(intptr_t)given;
    _Atomic uint32_t *sleeping = &team.workers[index].sleeping;
    note_processor(&team.workers[index]);
    for (;;) {
        if (index + 1 < atomic_load(&team.members) && take_part(1)) continue;
        note_processor(&team.workers[index]);
        atomic_store(sleeping, 1);
        /* A call published before `sleeping` was set is seen here. For a later call, the caller wakes this worker. */
        uint64_t seen = atomic_load(&team.next);
        if ((uint32_t)seen < atomic_load(&team.parts) && index + 1 < atomic_load(&team.members)) {
            atomic_store(sleeping, 0);
            continue;
        }
        while (atomic_load(sleeping)) sleep_while(sleeping, 1);
    }
    return NULL;
}

/* A forked child process has no workers. */
static void in_child(void) {
    team.started = 0;
    team.members = 0;
    team.parts = 0;
    team.busy = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (int i = 0; i < MAX_WORKERS; i++) team.workers[i].sleeping = team.workers[i].thread = 0;
}

static void start(int workers) {
    static int registered = 0;
    if (team.started >= workers) return;
    if (!registered) registered = pthread_atfork(NULL, NULL, in_child) == 0;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are for the program's own threads */
    while (team.started < workers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)team.started)) break;
        pthread_detach(thread);
        team.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void run_alone(Function function, const void *call, int64_t parts) {
    for (int64_t part = 0; part < parts; part++) function(call, part);
}

/* Update the time that workers save. In this call, the caller computed parts - helped in `own` ns of processor time,
and all parts took `total` ns. */
static void judge(int64_t own, int64_t total, int64_t parts, int64_t helped) {
    int64_t mine = parts - helped, alone = mine ? own * parts / mine : total;
    team.saved += alone - total - team.saved / 16;
    if (team.saved < 0) {
        team.alone_until = now() + team.rest;
        team.rest = team.rest * 2 < LONGEST_REST ? team.rest * 2 : LONGEST_REST;
        team.saved = 0;
    } else if (team.saved > 16 * SHORTEST_REST) {
        team.rest = SHORTEST_REST;
        team.saved = 16 * SHORTEST_REST; /* so that a change has an effect soon */
    }
}

/* Call function(call, part) for each part in [0, parts), on up to `threads` threads including this one. */
void team_run(Function function, const void *call, int64_t parts, int threads) {
    if (threads > MAX_WORKERS + 1) threads = MAX_WORKERS + 1;
    if (threads < 2 || parts < 2 || parts > UINT32_MAX || pthread_mutex_trylock(&team.busy)) {
        run_alone(function, call, parts);
        return;
    }
    int64_t began = now(), spent = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    if (began < team.alone_until) {
        pthread_mutex_unlock(&team.busy);
        run_alone(function, call, parts);
        return;
    }
    start(threads - 1);
    int members = threads - 1 < team.started ? threads : team.started + 1;
    /* No worker can take a part before `next` is set, because the last round has no parts left. */
    atomic_store(&team.function, function);
    atomic_store(&team.call, call);
    atomic_store(&team.left, (uint32_t)parts);
    atomic_store(&team.helped, 0);
    atomic_store(&team.members, (uint32_t)members);
    /* `parts` and `next` cannot change together. A worker that reads between both stores must find no part. */
    atomic_store(&team.next, ((uint64_t)++team.round << 32) | UINT32_MAX);
    atomic_store(&team.parts, (uint32_t)parts);
    atomic_store(&team.next, (uint64_t)++team.round << 32);
    for (int i = 0; i + 1 < members; i++)
        if (atomic_exchange(&team.workers[i].sleeping, 0)) {
            keep_away(&team.workers[i]);
            wake(&team.workers[i].sleeping);
        }
    while (take_part(0)) {}
    int64_t own = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - spent;
    for (int spin = 0; atomic_load(&team.left) && spin < SPINS; spin++) relax();
    atomic_store(&team.waiting, 1);
    for (uint32_t left; (left = atomic_load(&team.left));) sleep_while(&team.left, left);
    atomic_store(&team.waiting, 0);
    judge(own, now() - began, parts, atomic_load(&team.helped));
    pthread_mutex_unlock(&team.busy);
}
