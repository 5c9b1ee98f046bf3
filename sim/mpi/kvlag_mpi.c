/* kvlag-mpi sim ...: one `kvlag sim` command, one shard a rank, merged by rank 0 (docs/cluster.md). Ranks need a folder
 * that all of them see; results are the bytes of one process. Other commands are kvlag's. */
#include "base/err.h"
#include "base/mem.h"
#include "base/options.h"
#include "base/outfile.h"
#include "sim/part.h"

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void interrupted(int signal_number) {
    outfile_abort_all();
    _exit(128 + signal_number);
}

/* The first rank that failed speaks for all, through rank 0. Returns its code, or 0. */
static int agree(int rank, int code) {
    int mine[2] = {code == 0, rank}, first[2]; /* a failure is the smaller value */
    char message[ERR_MESSAGE_MAX] = "";
    MPI_Allreduce(mine, first, 1, MPI_2INT, MPI_MINLOC, MPI_COMM_WORLD);
    if (first[0]) return 0;
    strncpy(message, err_message(), sizeof message - 1);
    MPI_Bcast(&code, 1, MPI_INT, first[1], MPI_COMM_WORLD);
    MPI_Bcast(message, sizeof message, MPI_CHAR, first[1], MPI_COMM_WORLD);
    if (code != OPT_HELPED && rank == 0) fprintf(stderr, "kvlag: %s\n", message);
    return code;
}

static int run(int argc, char **argv, shard part) {
    int rank = (int)part.k - 1;
    char *out = NULL;
    bool force = false, is_sim = argc > 1 && strcmp(argv[1], "sim") == 0;
    int code = is_sim ? cmd_sim_part(argc - 2, argv + 2, part, &out, &force)
                      : err_set(ERR_USAGE, "kvlag-mpi runs kvlag-mpi sim ...; for the rest there is kvlag");
    code = agree(rank, code);
    if (!code) code = agree(rank, rank == 0 ? part_join(out, part.n, force) : 0);
    /* Without the merged file, journals are what a new run takes up. */
    if (out) part_remove(out, part, code == 0);
    mem_free(out);
    return code == OPT_HELPED ? 0 : code;
}

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    signal(SIGTERM, interrupted);
    signal(SIGXFSZ, SIG_IGN);
    bool silent = rank != 0 && freopen("/dev/null", "w", stderr) && freopen("/dev/null", "w", stdout);
    int code = rank == 0 || silent ? 0 : err_set(ERR_DATA, "/dev/null cannot be opened");
    code = agree(rank, code);
    if (!code) code = run(argc, argv, (shard){(size_t)rank + 1, (size_t)size});
    MPI_Finalize();
    return code;
}
