/* The writer's own thread: it puts finished blocks into the file, in the order in which they were handed over, while
 * others compute and pack. HDF5 is not thread-safe, so whoever else calls it waits until nothing is under way. */
#include "base/mem.h"
#include "base/progress.h"
#include "traces/writer_private.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define QUEUE_BYTES ((size_t)256 << 20) /* more than this waits only as a single block */
enum { QUEUE_BLOCKS = 1024 };

struct write_queue {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more, less;       /* a block came, or the end; a block is done */
    write_block block[QUEUE_BLOCKS]; /* a ring; the first is being written */
    size_t first, n, bytes;
    bool quit;
    int code; /* of the first failure: what follows is dropped */
    char message[ERR_MESSAGE_MAX];
    double busy, waited;
};

static int write_one(const write_block *b) {
    /* Where HDF5 was built thread-safe each thread has an error stack of its own, and prints it. */
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    if (!b->frame) return hdf_write_block(b->set, b->type, b->rank, b->start, b->count, b->data);
    return H5Dwrite_chunk(b->set, H5P_DEFAULT, 0, b->start, b->bytes, b->data) < 0 ? hdf_error("write failed") : 0;
}

static void *write_blocks(void *context) {
    write_queue *q = context;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        while (!q->n && !q->quit) pthread_cond_wait(&q->more, &q->lock);
        if (q->quit) break;
        write_block *b = &q->block[q->first];
        bool skip = q->code != 0;
        pthread_mutex_unlock(&q->lock);
        double start = progress_seconds();
        int code = skip ? 0 : write_one(b);
        double end = progress_seconds();
        mem_free(b->data);
        pthread_mutex_lock(&q->lock);
        if (code) {
            q->code = code;
            snprintf(q->message, sizeof q->message, "%s", err_message());
        }
        q->busy += end - start;
        q->bytes -= b->bytes;
        q->first = (q->first + 1) % QUEUE_BLOCKS;
        q->n--;
        pthread_cond_signal(&q->less);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

int write_queue_new(write_queue **out) {
    write_queue *q = mem_new(1, sizeof *q, "write queue");
    *out = NULL;
    if (!q) return ERR_DATA;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->more, NULL);
    pthread_cond_init(&q->less, NULL);
    if (pthread_create(&q->thread, NULL, write_blocks, q) != 0) {
        mem_free(q);
        return err_set(ERR_DATA, "cannot start the thread that writes");
    }
    *out = q;
    return 0;
}

void write_queue_free(write_queue *q) {
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->quit = true;
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    for (; q->n; q->n--, q->first = (q->first + 1) % QUEUE_BLOCKS) mem_free(q->block[q->first].data);
    pthread_cond_destroy(&q->less);
    pthread_cond_destroy(&q->more);
    pthread_mutex_destroy(&q->lock);
    mem_free(q);
}

static bool full(const write_queue *q, size_t bytes) {
    return q->n == QUEUE_BLOCKS || (q->n && q->bytes + bytes > QUEUE_BYTES);
}

/* Under the lock. */
static void wait_for_less(write_queue *q) {
    double start = progress_seconds();
    pthread_cond_wait(&q->less, &q->lock);
    q->waited += progress_seconds() - start;
}

static int fault_of(const write_queue *q) {
    return q->code ? err_set(q->code, "%s", q->message) : 0;
}

int write_queue_add(write_queue *q, const write_block *b) {
    pthread_mutex_lock(&q->lock);
    while (full(q, b->bytes)) wait_for_less(q);
    int code = fault_of(q);
    if (!code) {
        q->block[(q->first + q->n++) % QUEUE_BLOCKS] = *b;
        q->bytes += b->bytes;
        pthread_cond_signal(&q->more);
    }
    pthread_mutex_unlock(&q->lock);
    if (code) mem_free(b->data);
    return code;
}

int write_queue_drain(write_queue *q) {
    pthread_mutex_lock(&q->lock);
    while (q->n) wait_for_less(q);
    int code = fault_of(q);
    pthread_mutex_unlock(&q->lock);
    return code;
}

void write_queue_times(write_queue *q, double *busy, double *waited) {
    pthread_mutex_lock(&q->lock);
    *busy = q->busy;
    *waited = q->waited;
    pthread_mutex_unlock(&q->lock);
}
