#include "base/pool.h"
#include "base/err.h"
#include "base/mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

struct pool {
    int n_threads;
    pthread_t *threads; /* n_threads - 1: the caller is worker 0 */
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    unsigned long round; /* counts pool_run calls; a worker starts when it changes */
    int running;         /* workers still in this round */
    bool quit;

    pool_task run;
    void *context;
    size_t n_tasks;
    atomic_size_t next;
    atomic_bool failed;

    size_t bad_task; /* lowest failing task of this round, under lock */
    int bad_code;
    char bad_message[ERR_MESSAGE_MAX];
};

typedef struct worker_arg {
    pool *p;
    int worker;
} worker_arg;

static void work(pool *p, int worker) {
    while (!atomic_load_explicit(&p->failed, memory_order_relaxed)) {
        size_t task = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (task >= p->n_tasks) return;
        int code = p->run(p->context, task, worker);
        if (!code) continue;
        /* Tasks are handed out in order, so every task below the lowest failing one has been run to its end. */
        pthread_mutex_lock(&p->lock);
        if (task < p->bad_task) {
            p->bad_task = task;
            p->bad_code = code;
            snprintf(p->bad_message, sizeof p->bad_message, "%s", err_message());
        }
        pthread_mutex_unlock(&p->lock);
        atomic_store(&p->failed, true);
    }
}

static void *worker_main(void *raw) {
    worker_arg arg = *(worker_arg *)raw;
    mem_free(raw);
    pool *p = arg.p;
    unsigned long seen = 0;
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (p->round == seen && !p->quit) pthread_cond_wait(&p->work, &p->lock);
        seen = p->round;
        bool quit = p->quit;
        pthread_mutex_unlock(&p->lock);
        if (quit) return NULL;
        work(p, arg.worker);
        pthread_mutex_lock(&p->lock);
        if (--p->running == 0) pthread_cond_signal(&p->done);
        pthread_mutex_unlock(&p->lock);
    }
}

static int usable_processors(void) {
    cpu_set_t set;
    int n = 0;
    if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
    if (n < 1) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n;
}

int pool_new(int threads, pool **out) {
    *out = NULL;
    pool *p = mem_new(1, sizeof *p, "thread pool");
    if (!p) return ERR_DATA;
    int want = threads > 0 ? threads : usable_processors();
    p->n_threads = 1;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    p->threads = mem_new((size_t)want, sizeof *p->threads, "thread pool");
    if (!p->threads) {
        pool_free(p);
        return ERR_DATA;
    }
    for (int i = 1; i < want; i++) {
        worker_arg *arg = mem_new(1, sizeof *arg, "thread");
        if (arg) *arg = (worker_arg){.p = p, .worker = i};
        if (!arg || pthread_create(&p->threads[i - 1], NULL, worker_main, arg) != 0) {
            mem_free(arg);
            pool_free(p);
            return err_set(ERR_DATA, "cannot start thread %d of %d (try --threads with a smaller number)", i + 1, want);
        }
        p->n_threads = i + 1;
    }
    *out = p;
    return 0;
}

void pool_free(pool *p) {
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 1; i < p->n_threads; i++) pthread_join(p->threads[i - 1], NULL);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    mem_free(p->threads);
    mem_free(p);
}

int pool_threads(const pool *p) {
    return p->n_threads;
}

int pool_run(pool *p, size_t n, pool_task run, void *context) {
    if (n == 0) return 0;
    pthread_mutex_lock(&p->lock);
    p->run = run;
    p->context = context;
    p->n_tasks = n;
    atomic_store(&p->next, 0);
    atomic_store(&p->failed, false);
    p->bad_task = SIZE_MAX;
    p->bad_code = 0;
    p->running = p->n_threads - 1;
    p->round++;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);

    work(p, 0);

    pthread_mutex_lock(&p->lock);
    while (p->running > 0) pthread_cond_wait(&p->done, &p->lock);
    int code = p->bad_code;
    pthread_mutex_unlock(&p->lock);
    return code ? err_set(code, "%s", p->bad_message) : 0;
}
