/* The engine behind fibers.h: fibers, the order they run in, barriers. */
#include "tests/cuda/fibers.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __has_feature
#define CLANG_FEATURE(f) __has_feature(f)
#else
#define CLANG_FEATURE(f) 0
#endif
#if defined __SANITIZE_ADDRESS__ || CLANG_FEATURE(address_sanitizer)
#define WITH_ASAN 1
#include <sanitizer/common_interface_defs.h>
#endif
#if defined __SANITIZE_THREAD__ || CLANG_FEATURE(thread_sanitizer)
#define WITH_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif
#if !defined __x86_64__ || defined FIBERS_UCONTEXT
#define WITH_UCONTEXT 1
#include <ucontext.h>
#endif

enum { MOST_THREADS = 1024, LANES = 32, MOST_WARPS = MOST_THREADS / LANES, STACK_BYTES = 256 << 10 };

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

/* ---- fibers: a stack each, and where it stands ------------------------------------------------------------------- */

struct fiber {
#ifdef WITH_UCONTEXT
    ucontext_t context;
#else
    void *sp; /* of a fiber that does not run */
#endif
    const void *stack; /* lowest usable byte; the main fiber's where a sanitizer wants it */
    size_t stack_bytes;
    void *sanitizer; /* ASan's fake stack, TSan's fiber */
};

static fiber main_fiber, *running = &main_fiber, *came_from;

/* First thing when a fiber begins or goes on. */
static void arrive() {
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(running->sanitizer, &came_from->stack, &came_from->stack_bytes);
#endif
}

#ifndef WITH_UCONTEXT
/* Registers that a call preserves go on the stack; swapcontext would ask the kernel for the signal mask each time. */
extern "C" void fibers_switch_stack(void **sp, void *to);
asm(R"(
    .text
    .globl fibers_switch_stack
    .hidden fibers_switch_stack
    .type fibers_switch_stack, @function
fibers_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fibers_switch_stack, . - fibers_switch_stack
)");
#endif

static void switch_to(fiber *to) {
    fiber *from = running;
    running = to;
    came_from = from;
#ifdef WITH_ASAN
    __sanitizer_start_switch_fiber(&from->sanitizer, to->stack, to->stack_bytes);
#elif defined WITH_TSAN
    __tsan_switch_to_fiber(to->sanitizer, 0);
#endif
#ifdef WITH_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    fibers_switch_stack(&from->sp, to->sp);
#endif
    arrive();
}

static void work();
static void first_entry() {
    arrive();
    work();
}

static void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* A fiber that will begin in work(). Below its stack lies a page that nobody may touch. */
static void fiber_make(fiber *f) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *base = (char *)mmap(nullptr, page + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base, page, PROT_NONE)) die("no memory for another thread's stack");
    f->stack = base + page;
    f->stack_bytes = STACK_BYTES;
#ifdef WITH_TSAN
    f->sanitizer = __tsan_create_fiber(0);
#endif
#ifdef WITH_UCONTEXT
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = base + page;
    f->context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f->context, first_entry, 0);
#else
    /* first_entry is entered by the switch's return: six registers, its address, and the stack as after a call. */
    void **top = (void **)(base + page + STACK_BYTES);
    top[-2] = (void *)first_entry;
    f->sp = top - 8;
#endif
}

/* ---- the block under way ----------------------------------------------------------------------------------------- */

struct thread {
    uint3 index;
    fiber *on;        /* nullptr: not begun */
    const char *what; /* what it waits at, nullptr: nothing */
    fibers_site site;
    bool left;
    unsigned mask; /* of a warp's exchange; 0 at a barrier */
    int source;
    uint64_t value, result;
};

static struct {
    bool busy, reverse;
    fibers_site launch;
    void (*body)(void *);
    void *context;
    int n, current, left;
    thread threads[MOST_THREADS];
    unsigned arrived[MOST_WARPS]; /* lanes that wait in an exchange */
    /* Threads that can run; the next one last. */
    int ready[MOST_THREADS], n_ready;
    /* At the block's barrier. */
    int waiting, held, result, first;
    /* All fibers ever made; the last n_idle wait for a thread to run. */
    fiber fibers[MOST_THREADS], *idle[MOST_THREADS];
    int n_fibers, n_idle;
    char refused[160];
} now;

static void die(const char *format, ...) {
    fprintf(stderr, "fibers: launch in %s (%s:%d), block (%u,%u,%u): ", now.launch.function, now.launch.file,
            now.launch.line, blockIdx.x, blockIdx.y, blockIdx.z);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

/* "thread (3,0,0) at __syncthreads in norm (rows.cu:12)". One of two buffers, in turn. */
static const char *describe(const thread *t) {
    static char texts[2][320];
    static int turn;
    char *text = texts[turn ^= 1];
    int n = snprintf(text, sizeof *texts, "thread (%u,%u,%u)", t->index.x, t->index.y, t->index.z);
    if (t->left) snprintf(text + n, sizeof *texts - (size_t)n, ", which has returned");
    else if (t->what)
        snprintf(text + n, sizeof *texts - (size_t)n, " at %s in %s (%s:%d)", t->what, t->site.function, t->site.file,
                 t->site.line);
    return text;
}

static bool same_text(const char *a, const char *b) {
    return a == b || !strcmp(a, b);
}

static bool same_site(const thread *a, const thread *b) {
    return a->site.line == b->site.line && a->what && b->what && same_text(a->what, b->what) &&
           same_text(a->site.file, b->site.file);
}

/* The i-th from last to run of n. */
static int from_last(int i, int n) {
    return now.reverse ? i : n - 1 - i;
}

static void make_ready(int i) {
    now.threads[i].what = nullptr;
    now.ready[now.n_ready++] = i;
}

/* Does `t`, which waits, wait for thread k? */
static bool awaits(const thread *t, int k) {
    int i = (int)(t - now.threads);
    return t->mask == 0 || (k / LANES == i / LANES && (t->mask >> k % LANES & 1));
}

/* Nobody can run, yet not all have returned: somebody waits for what will not come. */
static void die_of_deadlock() {
    for (int i = 0; i < now.n; i++)
        for (int k = 0; k < now.n && now.threads[i].what; k++) {
            const thread *t = &now.threads[i], *other = &now.threads[k];
            if (awaits(t, k) && (other->left || !same_site(t, other)))
                die("%s waits in vain for %s", describe(t), describe(other));
        }
    die("no thread can run");
}

/* Whose turn it is. */
static thread *next_thread() {
    if (now.n_ready == 0) die_of_deadlock();
    now.current = now.ready[--now.n_ready];
    thread *t = &now.threads[now.current];
    threadIdx = t->index;
    return t;
}

/* The current thread waits; others run. */
static void pause_thread() {
    fiber *self = running;
    thread *t = next_thread();
    if (!t->on) {
        if (now.n_idle == 0) {
            fiber *f = &now.fibers[now.n_fibers++];
            fiber_make(f);
            now.idle[now.n_idle++] = f;
        }
        t->on = now.idle[--now.n_idle];
    }
    if (t->on != self) switch_to(t->on);
}

/* What a fiber does for ever: run the current thread to its end, then further ones on the same stack while they have
 * not begun, so that kernels without barriers never switch. */
static void work() {
    for (;;) {
        now.body(now.context);
        now.threads[now.current].left = true;
        if (++now.left == now.n) {
            now.idle[now.n_idle++] = running;
            switch_to(&main_fiber);
            continue;
        }
        thread *t = next_thread();
        if (!t->on) {
            t->on = running;
            continue;
        }
        now.idle[now.n_idle++] = running;
        switch_to(t->on);
    }
}

static void run_block() {
    now.left = now.waiting = now.held = now.n_ready = 0;
    memset(now.arrived, 0, sizeof now.arrived);
    int i = 0;
    for (unsigned z = 0; z < blockDim.z; z++)
        for (unsigned y = 0; y < blockDim.y; y++)
            for (unsigned x = 0; x < blockDim.x; x++) {
                thread *t = &now.threads[i++];
                t->index = {x, y, z};
                t->on = nullptr;
                t->left = false;
                t->mask = 0;
            }
    for (int k = 0; k < now.n; k++) make_ready(from_last(k, now.n));
    pause_thread();
}

void fibers_run_body(dim3 grid, dim3 block, void (*body)(void *context), void *context, fibers_site launch) {
    now.launch = launch;
    if (now.busy) die("a launch from within a kernel or from a second thread");
    size_t n = (size_t)block.x * block.y * block.z;
    if (n == 0 || n > MOST_THREADS || block.z > 64 || grid.x == 0 || grid.x > INT32_MAX || grid.y == 0 ||
        grid.y > UINT16_MAX || grid.z == 0 || grid.z > UINT16_MAX) {
        snprintf(now.refused, sizeof now.refused, "invalid configuration argument: grid (%u,%u,%u), block (%u,%u,%u)",
                 grid.x, grid.y, grid.z, block.x, block.y, block.z);
        return;
    }
    const char *order = getenv("KVLAG_FIBERS_ORDER");
    now.busy = true;
    now.reverse = order && !strcmp(order, "reverse");
    now.body = body;
    now.context = context;
    now.n = (int)n;
    gridDim = grid;
    blockDim = block;
#ifdef WITH_TSAN
    main_fiber.sanitizer = __tsan_get_current_fiber();
#endif
    size_t blocks = (size_t)grid.x * grid.y * grid.z;
    for (size_t i = 0; i < blocks; i++) {
        size_t b = now.reverse ? blocks - 1 - i : i;
        blockIdx = {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)};
        run_block();
    }
    now.busy = false;
}

const char *fibers_refused(void) {
    static char text[sizeof now.refused];
    if (!now.refused[0]) return nullptr;
    memcpy(text, now.refused, sizeof text);
    now.refused[0] = 0;
    return text;
}

/* ---- waiting ---------------------------------------------------------------------------------------------------- */

int fibers_barrier(const char *what, bool predicate, const char *file, const char *function, int line) {
    thread *t = &now.threads[now.current];
    t->what = what;
    t->site = {file, function, line};
    t->mask = 0;
    if (now.waiting == 0) now.first = now.current;
    else if (!same_site(t, &now.threads[now.first])) die("%s, but %s", describe(t), describe(&now.threads[now.first]));
    now.held += predicate;
    if (++now.waiting == now.n) {
        now.result = now.held;
        now.waiting = now.held = 0;
        for (int i = 0; i < now.n; i++) make_ready(from_last(i, now.n));
    }
    pause_thread();
    /* The next barrier is complete only after all have left this one. */
    return now.result;
}

int fibers_lane(void) {
    return now.current % LANES;
}

static void complete_exchange(thread *lanes, unsigned mask, const thread *last) {
    unsigned ballot = 0;
    for (int k = 0; k < LANES; k++) {
        if (!(mask >> k & 1)) continue;
        if (lanes[k].mask != mask || !same_site(&lanes[k], last))
            die("%s with mask %08x, but %s with mask %08x", describe(last), mask, describe(&lanes[k]), lanes[k].mask);
        if (lanes[k].source >= 0 && !(mask >> lanes[k].source & 1))
            die("%s reads lane %d, which is not in its mask %08x", describe(&lanes[k]), lanes[k].source, mask);
        if (lanes[k].value) ballot |= 1u << k;
    }
    for (int k = 0; k < LANES; k++)
        if (mask >> k & 1) lanes[k].result = lanes[k].source < 0 ? ballot : lanes[lanes[k].source].value;
}

uint64_t fibers_exchange(const char *what, unsigned mask, uint64_t value, int source, const char *file,
                         const char *function, int line) {
    int warp = now.current / LANES, lane = now.current % LANES, first = warp * LANES;
    thread *t = &now.threads[now.current];
    t->what = what;
    t->site = {file, function, line};
    t->mask = mask;
    t->source = source;
    t->value = value;
    if (!(mask >> lane & 1)) die("%s is not in its own mask %08x", describe(t), mask);
    int exist = now.n - first < LANES ? now.n - first : LANES;
    if (exist < LANES && mask >> exist) die("%s: mask %08x, but its warp has %d lanes", describe(t), mask, exist);
    unsigned *arrived_lanes = &now.arrived[warp];
    *arrived_lanes |= 1u << lane;
    if ((*arrived_lanes & mask) == mask) {
        complete_exchange(&now.threads[first], mask, t);
        *arrived_lanes &= ~mask;
        for (int i = 0; i < LANES; i++) {
            int k = from_last(i, LANES);
            if (mask >> k & 1) make_ready(first + k);
        }
    }
    pause_thread();
    return t->result;
}
