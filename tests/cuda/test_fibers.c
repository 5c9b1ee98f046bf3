/* The harness that runs kernels on the CPU: what it computes, what it refuses, and its device. */
#include "base/err.h"
#include "tests/cuda/fiber_probe.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int setup(void **state) {
    unsetenv("KVLAG_FIBERS_ORDER");
    return device_open("", (device **)state);
}

static int teardown(void **state) {
    unsetenv("KVLAG_FIBERS_ORDER");
    device_close(*state);
    return 0;
}

static void *memory(device *d, size_t bytes) {
    void *p;
    assert_int_equal(device_new(d, bytes, "a test", &p), 0);
    return p;
}

static const char *const orders[] = {"forward", "reverse"};
#define EACH_ORDER(i) for (int i = 0; i < 2 && !setenv("KVLAG_FIBERS_ORDER", orders[i], 1); i++)

/* ---- threads and barriers --------------------------------------------------------------------------------------- */

static void test_indices(void **state) {
    int *out = memory(*state, 12 * 24 * sizeof *out);
    EACH_ORDER(o) {
        memset(out, 0xff, 12 * 24 * sizeof *out);
        assert_int_equal(probe_indices(*state, (probe_dim){3, 2, 2}, (probe_dim){4, 3, 2}, out), 0);
        assert_int_equal(out[0], 0);
        assert_int_equal(out[1], 1);           /* thread x */
        assert_int_equal(out[4], 10);          /* thread y */
        assert_int_equal(out[23], 123);        /* thread (3,2,1) */
        assert_int_equal(out[24], 1000);       /* block x */
        assert_int_equal(out[3 * 24], 10000);  /* block y */
        assert_int_equal(out[6 * 24], 100000); /* block z */
        assert_int_equal(out[11 * 24 + 23], 112123);
    }
}

/* After r rounds each has the number of the r-th neighbour. */
static void test_barriers(void **state) {
    static const probe_dim blocks[] = {{1, 1, 1}, {5, 3, 2}, {33, 1, 1}, {31, 7, 1}, {1024, 1, 1}};
    int *out = memory(*state, 3 * 1024 * sizeof *out);
    for (size_t k = 0; k < sizeof blocks / sizeof *blocks; k++) EACH_ORDER(o) {
            int n = (int)(blocks[k].x * blocks[k].y * blocks[k].z);
            memset(out, 0xff, 3 * 1024 * sizeof *out);
            assert_int_equal(probe_ring(*state, 3, blocks[k], 10, true, out), 0);
            for (int i = 0; i < 3 * n; i++) assert_int_equal(out[i], (i % n + 10) % n);
        }
}

/* Without barriers, order decides: forward, a thread's neighbour has not written yet. */
static void test_race_shows(void **state) {
    int *out = memory(*state, 2 * 64 * sizeof *out), differ = 0;
    EACH_ORDER(o) assert_int_equal(probe_ring(*state, 1, (probe_dim){64, 1, 1}, 1, false, out + 64 * o), 0);
    for (int i = 0; i < 64; i++) differ += out[i] != out[64 + i];
    assert_true(differ > 0);
}

static void test_orders(void **state) {
    unsigned *out = memory(*state, 2 * sizeof *out);
    EACH_ORDER(o) {
        assert_int_equal(probe_last(*state, 5, 40, out), 0);
        assert_int_equal(out[0], o ? 0 : 4);
        assert_int_equal(out[1], o ? 0 : 39);
    }
}

static void test_early_return(void **state) {
    int *out = memory(*state, 160 * sizeof *out);
    EACH_ORDER(o) {
        memset(out, 0xff, 160 * sizeof *out);
        assert_int_equal(probe_early(*state, 5, 32, 77, out), 0);
        for (int i = 0; i < 160; i++) assert_int_equal(out[i], i < 77 ? i : -1);
    }
}

/* ---- warps ------------------------------------------------------------------------------------------------------ */

static void test_exchange(void **state) {
    enum { N = 96 };
    static const int any[] = {0, 3, 2}, all[] = {0, 2, 2};
    device *d = *state;
    size_t bytes = N * sizeof(int);
    probe_exchanged e = {memory(d, bytes),     memory(d, bytes), memory(d, bytes), memory(d, bytes),
                         memory(d, 2 * bytes), memory(d, bytes), memory(d, bytes), memory(d, bytes),
                         memory(d, bytes),     memory(d, bytes), memory(d, bytes), memory(d, bytes)};
    EACH_ORDER(o) {
        assert_int_equal(probe_exchange(d, N, &e), 0);
        for (int i = 0; i < N; i++) {
            int warp = i / 32 * 32, lane = i % 32;
            assert_int_equal(e.from_3[i], warp + 3);
            assert_int_equal(e.xor_5[i], warp + (lane ^ 5));
            assert_int_equal(e.down_4[i], lane < 28 ? i + 4 : i);
            assert_int_equal(e.up_4[i], lane < 4 ? i : i - 4);
            assert_true(e.wide[i] == (i ^ 1) + 0.25);
            assert_int_equal(e.odd[i], 0xaaaaaaaau);
            assert_int_equal(e.any[i], any[i / 32]);
            assert_int_equal(e.all[i], all[i / 32]);
            assert_int_equal(e.count[i], 64);
            assert_int_equal(e.block_or[i], 3);
            assert_int_equal(e.block_and[i], 1);
        }
        assert_int_equal(e.half[0], 0x9249);      /* 0 3 6 9 12 15 */
        assert_int_equal(e.half[20], 0x49240000); /* 18 21 24 27 30 */
        assert_int_equal(e.half[40], 0x2492);     /* 33 36 39 42 45 */
    }
}

static void test_sum(void **state) {
    float *out = memory(*state, sizeof *out);
    EACH_ORDER(o)
    for (unsigned n = 32; n <= 1024; n += 32) {
        assert_int_equal(probe_sum(*state, n, out), 0);
        assert_true(*out == (float)(n * (n - 1) / 2));
    }
}

static void test_atomics(void **state) {
    probe_counters *c = memory(*state, sizeof *c);
    EACH_ORDER(o) {
        *c = (probe_counters){.least = 3, .most = -3};
        assert_int_equal(probe_atomics(*state, 3, 50, c), 0);
        assert_int_equal(c->least, -149);
        assert_int_equal(c->most, 149);
        assert_int_equal(c->total, 150);
        assert_true(c->wide_total == 11175ull << 32);
        assert_true(c->wide_most == 149ull << 32);
        assert_int_equal(c->set, 0xffffffffu);
        assert_int_equal(c->replaced, 5);
        assert_int_equal(c->swaps, 1);
    }
}

static void test_arithmetic(void **state) {
    static const double want[PROBE_VALUES] = {7,  0x1p40, 1, 2, 2.5, 2.5, 2.25, 0x3f800000,
                                              -2, 0.25,   8, 4, 31,  32,  8,    0x1p-11};
    double *out = memory(*state, sizeof want);
    assert_int_equal(probe_arithmetic(*state, out), 0);
    for (int i = 0; i < PROBE_VALUES; i++) assert_true(out[i] == want[i]);
}

/* ---- misuse ----------------------------------------------------------------------------------------------------- */

/* Run `act` in a child, which must abort with a line on stderr that holds `words`. */
static void expect_abort(device *d, void (*act)(device *d, int which), int which, const char *words) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        dup2(ends[1], STDERR_FILENO);
        act(d, which);
        _exit(0);
    }
    close(ends[1]);
    char text[4096];
    size_t n = 0;
    for (ssize_t got; n < sizeof text - 1 && (got = read(ends[0], text + n, sizeof text - 1 - n)) > 0;)
        n += (size_t)got;
    text[n] = 0;
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || !strstr(text, words))
        fail_msg("fault %d: status %d, '%s', not '%s'", which, status, text, words);
}

static void launch_fault(device *d, int which) {
    probe_misuse(d, which == FAULT_SHORT_WARP ? 48 : 64, (probe_fault)which);
}

static void test_misuse(void **state) {
    static const struct {
        probe_fault fault;
        const char *forward, *reverse;
    } cases[] = {
        {FAULT_BARRIER_LEFT, "block (0,0,0): thread (0,0,0) at __syncthreads in misuse (tests/cuda/fiber_probe.cc:",
         "block (1,0,0): thread (0,0,0) at __syncthreads in misuse"},
        {FAULT_BARRIER_ELSEWHERE, "block (0,0,0): thread (1,0,0) at __syncthreads",
         "block (1,0,0): thread (62,0,0) at __syncthreads"},
        {FAULT_BARRIER_SHUFFLE, "thread (0,0,0) at __shfl_sync", "thread (0,0,0) at __shfl_sync"},
        {FAULT_LANE_LEFT, " waits in vain for thread (9,0,0), which has returned", "which has returned"},
        {FAULT_OWN_MASK, "thread (4,0,0) at __syncwarp", "thread (36,0,0) at __syncwarp"},
        {FAULT_OTHER_MASK, "with mask 0000003f", "with mask 0000003f"},
        {FAULT_SOURCE, "reads lane 20, which is not in its mask 0000ffff", "reads lane 20"},
        {FAULT_SHORT_WARP, "thread (32,0,0) at __syncwarp", "its warp has 16 lanes"},
        {FAULT_NESTED, "a launch from within a kernel", "a launch from within a kernel"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) EACH_ORDER(o) {
            const char *words = o ? cases[i].reverse : cases[i].forward;
            expect_abort(*state, launch_fault, (int)cases[i].fault, words);
        }
}

enum { RELEASE_TWICE, UNPIN_DEVICE, COPY_BEYOND, COPY_TO_HOST, BUSY_TWICE, FOREIGN_MARK, SHORT_STRIDE };

static void misuse_device(device *d, int which) {
    void *p, *pinned;
    char host[256] = {0};
    device *other;
    device_mark *m;
    float *f;
    if (device_new(d, 200, "a test", &p) || device_pinned(d, 200, "a test", &pinned) || device_open("0", &other) ||
        device_mark_new(other, &m))
        return;
    f = p;
    device_product product = {2, 2, 4, DTYPE_F32, f, f + 8, 3, 4, false, false, f + 16, 2};
    switch (which) {
    case RELEASE_TWICE:
        device_release(d, p);
        device_release(d, p);
        break;
    case UNPIN_DEVICE:
        device_unpin(d, p);
        break;
    case COPY_BEYOND:
        device_to(d, STREAM_COPY, p, host, 201);
        break;
    case COPY_TO_HOST:
        device_to(d, STREAM_COMPUTE, pinned, host, 200);
        break;
    case BUSY_TWICE:
        device_busy_begin(d, STREAM_COMPUTE);
        device_busy_begin(d, STREAM_COMPUTE);
        break;
    case FOREIGN_MARK:
        device_wait(d, STREAM_COMPUTE, m);
        break;
    case SHORT_STRIDE:
        device_multiply(d, &product);
        break;
    }
}

static void test_device_misuse(void **state) {
    expect_abort(*state, misuse_device, RELEASE_TWICE, "device: device_release of ");
    expect_abort(*state, misuse_device, UNPIN_DEVICE, "device: device_unpin of ");
    expect_abort(*state, misuse_device, COPY_BEYOND, "device: device_to: 201 bytes at ");
    expect_abort(*state, misuse_device, COPY_TO_HOST, "are not device memory");
    expect_abort(*state, misuse_device, BUSY_TWICE, "device: device_busy_begin twice");
    expect_abort(*state, misuse_device, FOREIGN_MARK, "another device's mark");
    expect_abort(*state, misuse_device, SHORT_STRIDE, "a stride is less than a row");
}

/* ---- the device ------------------------------------------------------------------------------------------------- */

static void test_refused_launch(void **state) {
    int *out = memory(*state, sizeof *out);
    *out = 4;
    device_at(*state, "layer %d", 3);
    assert_int_equal(probe_early(*state, 0, 32, 1, out), ERR_DATA);
    assert_non_null(strstr(err_message(), "kernel early failed at tests/cuda/fiber_probe.cc:"));
    assert_non_null(strstr(err_message(), "invalid configuration argument: grid (0,1,1), block (32,1,1) (layer 3)"));
    assert_int_equal(probe_early(*state, 1, 1025, 1, out), ERR_DATA);
    assert_int_equal(probe_indices(*state, (probe_dim){1, 65536, 1}, (probe_dim){1, 1, 1}, out), ERR_DATA);
    assert_int_equal(*out, 4);
    assert_int_equal(probe_early(*state, 1, 32, 1, out), 0);
    assert_int_equal(*out, 0);
}

static void test_open(void **state) {
    (void)state;
    device *d = NULL;
    assert_int_equal(device_open("3", &d), ERR_DATA);
    assert_string_equal(err_message(), "no CUDA device 3 (1 found)");
    setenv("KVLAG_FIBERS_ABSENT", "1", 1);
    assert_int_equal(device_open("", &d), ERR_DATA);
    assert_string_equal(err_message(), "no CUDA device (driver not found); use --backend cpu");
    unsetenv("KVLAG_FIBERS_ABSENT");
    assert_int_equal(device_open("0", &d), 0);
    assert_string_equal(device_name(d), "CPU fibers");
    device_close(d);
    device_close(NULL);
}

static void test_memory(void **state) {
    (void)state;
    device *d;
    void *p, *q, *r;
    setenv("KVLAG_FIBERS_MEMORY", "5242880", 1);
    assert_int_equal(device_open("", &d), 0);
    unsetenv("KVLAG_FIBERS_MEMORY");
    assert_int_equal(device_new(d, 3 << 20, "weights", &p), 0);
    assert_int_equal((uintptr_t)p % 256, 0);
    assert_int_equal(device_free_bytes(d), 2 << 20);
    assert_true(isnan(((float *)p)[12345])); /* undefined until written */
    assert_int_equal(device_new(d, (2 << 20) + 1, "logits", &q), ERR_DATA);
    assert_string_equal(err_message(), "out of device memory for logits: 3 MiB needed, 2 MiB free; use fewer --tokens, "
                                       "--precision bf16, --weights blocks or --offload");
    assert_null(q);
    device_release(d, p);
    device_release(d, NULL);
    assert_int_equal(device_new(d, 5 << 20, "logits", &q), 0); /* device_close releases it, and the pinned memory */
    assert_int_equal(device_pinned(d, 64, "results", &r), 0);
    assert_int_equal(((char *)r)[63], 0);
    device_close(d);
}

/* The copy lane works no sooner than it must. */
static void test_copy_lane(void **state) {
    device *d = *state;
    device_mark *first, *second;
    int *x = memory(d, 8 * sizeof *x), plain[2] = {5, 6};
    void *pinned;
    assert_int_equal(device_pinned(d, 8 * sizeof(int), "a test", &pinned), 0);
    int *host = pinned;
    host[0] = 1, host[1] = 2;
    assert_int_equal(device_mark_new(d, &first), 0);
    assert_int_equal(device_mark_new(d, &second), 0);
    assert_int_equal(device_wait(d, STREAM_COMPUTE, first), 0); /* was never set: nobody waits */
    assert_int_equal(device_to(d, STREAM_COPY, x, host, 4), 0);
    assert_int_equal(device_mark_set(d, first, STREAM_COPY), 0);
    assert_int_equal(device_to(d, STREAM_COPY, x + 1, host + 1, 4), 0);
    assert_int_equal(device_mark_set(d, second, STREAM_COPY), 0);
    assert_int_equal(x[0], -1);
    assert_int_equal(device_wait(d, STREAM_COMPUTE, first), 0);
    assert_int_equal(x[0], 1);
    assert_int_equal(x[1], -1);
    assert_int_equal(device_reach(d, second), 0);
    assert_int_equal(x[1], 2);
    /* Host memory that is not pinned: the call waits. */
    assert_int_equal(device_to(d, STREAM_COPY, x + 2, plain, 8), 0);
    assert_int_equal(x[3], 6);
    /* The compute lane is in order with the host. */
    assert_int_equal(device_fill(d, STREAM_COMPUTE, x + 4, 0, 16), 0);
    assert_int_equal(device_copy(d, STREAM_COMPUTE, x + 5, x, 4), 0);
    assert_int_equal(x[4], 0);
    assert_int_equal(x[5], 1);
    /* Two rows of one value, to rows of two. */
    assert_int_equal(device_from_rows(d, STREAM_COPY, host, 8, x, 12, 4, 2), 0);
    assert_int_equal(host[0], 1);
    assert_int_equal(host[2], 0);
    assert_int_equal(device_sync(d), 0);
    assert_int_equal(host[2], 6);
    device_mark_free(first);
    device_mark_free(second);
    device_mark_free(NULL);
    device_unpin(d, pinned);
}

static void test_busy(void **state) {
    device *d = *state;
    assert_int_equal(device_busy_begin(d, STREAM_COPY), 0);
    assert_int_equal(device_busy_end(d, STREAM_COPY), 0);
    assert_true(device_busy(d, STREAM_COPY) >= 0);
    assert_int_equal(device_busy_begin(d, STREAM_COMPUTE), 0);
    usleep(2000);
    assert_int_equal(device_busy_end(d, STREAM_COMPUTE), 0);
    assert_true(device_busy(d, STREAM_COMPUTE) >= 0.002);
}

/* a = (1 2 3; 4 5 6), w = (1 0 -1; 2 1 0): a w' = (-2 4; -2 13); of w as [inner][cols], (4 5) times it = (14 5 -4). */
static void test_multiply(void **state) {
    static const float a[] = {1, 2, 3, 99, 4, 5, 6, 99}, w[] = {1, 0, -1, 99, 99, 2, 1, 0, 99, 99};
    static const uint16_t a16[] = {0x3f80, 0x4000, 0x4040, 0, 0x4080, 0x40a0, 0x40c0, 0};
    static const uint16_t w16[] = {0x3f80, 0, 0xbf80, 0, 0, 0x4000, 0x3f80, 0, 0, 0};
    device *d = *state;
    float *out = memory(d, 6 * sizeof *out);
    void *da = memory(d, sizeof a), *dw = memory(d, sizeof w);
    for (int type = DTYPE_F32; type <= DTYPE_BF16; type++) {
        bool wide = type == DTYPE_F32;
        memcpy(da, wide ? (const void *)a : a16, wide ? sizeof a : sizeof a16);
        memcpy(dw, wide ? (const void *)w : w16, wide ? sizeof w : sizeof w16);
        device_fill(d, STREAM_COMPUTE, out, 0xff, 6 * sizeof *out);
        device_product p = {2, 2, 3, (dtype)type, da, dw, 4, 5, false, false, out, 3};
        assert_int_equal(device_multiply(d, &p), 0);
        assert_true(out[0] == -2 && out[1] == 4 && isnan(out[2]) && out[3] == -2 && out[4] == 13);
        p.accumulate = true;
        assert_int_equal(device_multiply(d, &p), 0);
        assert_true(out[0] == -4 && out[1] == 8 && out[4] == 26);
        device_product back = {1,     3,   2, (dtype)type, (char *)da + 4 * dtype_size((dtype)type), dw, 4, 5, true,
                               false, out, 3};
        assert_int_equal(device_multiply(d, &back), 0);
        assert_true(out[0] == 14 && out[1] == 5 && out[2] == -4 && out[3] == -4);
    }
}

static void test_coverage(void **state) {
    (void)state;
    char path[] = "/tmp/kvlag-coverage-XXXXXX", text[256] = "";
    int file = mkstemp(path);
    device *d;
    assert_true(file >= 0);
    assert_int_equal(device_open("", &d), 0);
    int *out = memory(d, 64 * sizeof *out);
    for (int i = 0; i < 3; i++) assert_int_equal(probe_ring(d, 1, (probe_dim){64, 1, 1}, 1, true, out), 0);
    assert_int_equal(probe_early(d, 1, 32, 1, out), 0);
    setenv("KVLAG_FIBERS_COVERAGE", path, 1);
    device_close(d);
    unsetenv("KVLAG_FIBERS_COVERAGE");
    assert_true(read(file, text, sizeof text - 1) > 0);
    assert_string_equal(text, "early 1\nring<true> 3\n");
    close(file);
    unlink(path);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_indices),
        TEST(test_barriers),
        TEST(test_race_shows),
        TEST(test_orders),
        TEST(test_early_return),
        TEST(test_exchange),
        TEST(test_sum),
        TEST(test_atomics),
        TEST(test_arithmetic),
        TEST(test_misuse),
        TEST(test_device_misuse),
        TEST(test_refused_launch),
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_memory),
        TEST(test_copy_lane),
        TEST(test_busy),
        TEST(test_multiply),
        cmocka_unit_test(test_coverage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
