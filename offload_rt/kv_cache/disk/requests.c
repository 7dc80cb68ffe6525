/* Concurrent reads of open files with io_uring, without liburing. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <linux/io_uring.h>

struct ring {
    int fd;
    unsigned depth, *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *rings;
    size_t rings_bytes, sqes_bytes;
};

void ring_close(struct ring *r) {
    if (r->rings != MAP_FAILED) munmap(r->rings, r->rings_bytes);
    if (r->sqes != MAP_FAILED) munmap(r->sqes, r->sqes_bytes);
    close(r->fd);
    free(r);
}

/* One thread uses the ring. Completions are processed when this thread waits, and do not interrupt it (Linux 6.1). */
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
#define ONE_THREAD (IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN)
#else
#define ONE_THREAD 0
#endif

/* Open a ring for `depth` requests of this thread. Returns NULL if the kernel does not support it. */
struct ring *ring_open(unsigned depth) {
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    p.flags = ONE_THREAD;
    int fd = (int)syscall(__NR_io_uring_setup, depth, &p);
    if (fd < 0) {
        memset(&p, 0, sizeof p);
        fd = (int)syscall(__NR_io_uring_setup, depth, &p);
    }
    if (fd < 0) return NULL;
    struct ring *r = calloc(1, sizeof *r);
    if (!r || !(p.features & IORING_FEAT_SINGLE_MMAP)) { close(fd); free(r); return NULL; }
    size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    r->fd = fd;
    r->depth = depth < p.sq_entries ? depth : p.sq_entries;
    r->rings_bytes = sq > cq ? sq : cq;
    r->sqes_bytes = p.sq_entries * sizeof(struct io_uring_sqe);
    r->rings = mmap(NULL, r->rings_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQ_RING);
    r->sqes = mmap(NULL, r->sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQES);
    if (r->rings == MAP_FAILED || r->sqes == MAP_FAILED) { ring_close(r); return NULL; }
    char *base = r->rings;
    r->sq_tail = (unsigned *)(base + p.sq_off.tail);
    r->sq_mask = (unsigned *)(base + p.sq_off.ring_mask);
    r->sq_array = (unsigned *)(base + p.sq_off.array);
    r->cq_head = (unsigned *)(base + p.cq_off.head);
    r->cq_tail = (unsigned *)(base + p.cq_off.tail);
    r->cq_mask = (unsigned *)(base + p.cq_off.ring_mask);
    r->cqes = (struct io_uring_cqe *)(base + p.cq_off.cqes);
    return r;
}

/* Return whether requests refer to existing files and lie within the buffer, and rows within the buffer and `out`. */
static int within(int64_t files, int64_t bits, int64_t n, int64_t rows, int64_t bytes, const int64_t *offset,
                  const int64_t *size, const int64_t *at, const int64_t *first, const int64_t *row_at,
                  const int64_t *into, int64_t row, int64_t out_rows) {
    for (int64_t i = 0; i < n; i++)
        if (offset[i] < 0 || offset[i] >> bits >= files || size[i] < 0 || at[i] < 0 || at[i] > bytes - size[i] || first[i] < 0 || first[i] > first[i + 1]) return 0;
    if (row && first[n] > rows) return 0;
    for (int64_t j = 0; row && j < first[n]; j++)
        if (row_at[j] < 0 || row_at[j] > bytes - row || into[j] < 0 || into[j] >= out_rows) return 0;
    return 1;
}

/* Withdraw `unsent` requests, and wait for all requests in flight. Completions may arrive although the call fails. */
static void ring_settle(struct ring *r, unsigned flying, unsigned unsent) {
    __atomic_store_n(r->sq_tail, *r->sq_tail - unsent, __ATOMIC_RELEASE);
    flying -= unsent;
    while (flying) {
        long sent = syscall(__NR_io_uring_enter, r->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        unsigned tail = __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE);
        flying -= tail - *r->cq_head;
        __atomic_store_n(r->cq_head, tail, __ATOMIC_RELEASE);
        if (flying && sent < 0) usleep(1000);
    }
}

/* Read size[i] bytes to buffer + at[i] for each request i. offset[i] contains the file number (from bit `bits` on) and
   the offset in the file (the bits below). A short read is continued. When a request is complete, its rows j with
   first[i] <= j < first[i + 1] are copied: `row` bytes at buffer + row_at[j] to row into[j] of `out`.

   Returns 0, or the first error as -errno (-ENODATA if a file ends early). After a failed read or system call, the
   function waits for all requests in flight, so the buffer is not written after it returns. */
int64_t ring_read(struct ring *r, const int32_t *files, int64_t file_count, int64_t bits, int64_t n, int64_t rows,
                  int64_t bytes, char *buffer, const int64_t *offset, const int64_t *size, const int64_t *at,
                  const int64_t *first, const int64_t *row_at, const int64_t *into, int64_t row, char *out,
                  int64_t out_rows) {
    if (!within(file_count, bits, n, rows, bytes, offset, size, at, first, row_at, into, row, out_rows)) return -EINVAL;
    int64_t next = 0, failed = 0, again = 0;
    unsigned flying = 0, unsent = 0;
    int64_t *done = calloc((size_t)(n ? n : 1), sizeof *done), *retry = malloc(sizeof *retry * r->depth);
    if (!done || !retry) { free(done); free(retry); return -ENOMEM; }
    while (flying || (!failed && (next < n || again))) {
        unsigned tail = *r->sq_tail;
        while (!failed && flying < r->depth && (again || next < n)) {
            int64_t i = again ? retry[--again] : next++;
            if (size[i] <= done[i]) continue;
            struct io_uring_sqe *e = &r->sqes[tail & *r->sq_mask];
            memset(e, 0, sizeof *e);
            e->opcode = IORING_OP_READ;
            e->fd = files[offset[i] >> bits];
            e->addr = (uint64_t)(uintptr_t)(buffer + at[i] + done[i]);
            e->len = (unsigned)(size[i] - done[i]);
            e->off = (uint64_t)((offset[i] & (((int64_t)1 << bits) - 1)) + done[i]);
            e->user_data = (uint64_t)i;
            r->sq_array[tail & *r->sq_mask] = tail & *r->sq_mask;
            tail++, unsent++, flying++;
        }
        __atomic_store_n(r->sq_tail, tail, __ATOMIC_RELEASE);
        while (flying) {
            long sent = syscall(__NR_io_uring_enter, r->fd, unsent, (flying + 3) / 4, IORING_ENTER_GETEVENTS, NULL, 0);
            if (sent >= 0) { unsent -= (unsigned)sent; if (!unsent) break; continue; }
            if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
                failed = failed ? failed : -errno;
                ring_settle(r, flying, unsent);
                free(done);
                free(retry);
                return failed;
            }
            if (errno != EINTR) break;
        }
        unsigned head = *r->cq_head;
        while (head != __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE)) {
            struct io_uring_cqe *c = &r->cqes[head++ & *r->cq_mask];
            int64_t i = (int64_t)c->user_data;
            flying--;
            if (c->res == -EINTR || c->res == -EAGAIN) retry[again++] = i;
            else if (c->res < 0) failed = failed ? failed : c->res;
            else if (c->res == 0) failed = failed ? failed : -ENODATA;
            else if ((done[i] += c->res) < size[i]) retry[again++] = i;
            else
                for (int64_t j = first[i]; j < first[i + 1]; j++)
                    memcpy(out + into[j] * row, buffer + row_at[j], (size_t)row);
        }
        __atomic_store_n(r->cq_head, head, __ATOMIC_RELEASE);
    }
    free(done);
    free(retry);
    return failed;
}
