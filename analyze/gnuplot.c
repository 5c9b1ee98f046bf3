#include "analyze/gnuplot.h"
#include "base/err.h"
#include "base/progress.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* One inch is 485 pixels of a PNG, so that a picture for a column of 3.3 inches is 1600 wide. The scales make the same
 * font size and line width mean the same in all of them. */
const gnuplot_format gnuplot_formats[] = {
    {"png", "pngcairo size 485*width,485*height fontscale 5.05 linewidth 5.05 pointscale 5.05"},
    {"svg", "svg size 72*width,72*height dynamic linewidth 0.75"},
    {"pdf", "pdfcairo size width,height fontscale 0.75 linewidth 1.5 pointscale 0.75"},
    {"term", "dumb size columns,rows"},
    {NULL, NULL},
};

int gnuplot_quote(text *t, const char *word) {
    TRY(text_add(t, "'"));
    for (const char *at = word; *at; at++) {
        unsigned char c = (unsigned char)*at;
        /* gnuplot 5.4 takes a doubled quote for one only inside a word and not twice in a row. */
        bool alone = at > word && at[-1] != '\'';
        if (c == '\'') TRY(text_add(t, alone ? "''" : "'.\"'\".'"));
        else TRY(text_add(t, "%c", c < 0x20 || c == 0x7f ? '?' : c));
    }
    return text_add(t, "'");
}

static int add_default(text *t, const char *variable, const char *stem, const char *rest) {
    TRY(text_add(t, "if (!exists('%s')) %s = ", variable, variable));
    TRY(gnuplot_quote(t, stem));
    return text_add(t, "%s\n", rest);
}

int gnuplot_header(text *t, const char *name, double width, double height) {
    TRY(text_add(t, "# Drawn by kvlag analyze. Again, or as another picture: gnuplot -e \"format='svg'\" THIS FILE\n"));
    TRY(add_default(t, "format", "png", ""));
    TRY(add_default(t, "data", name, ".'.dat'"));
    TRY(add_default(t, "picture", name, ".'.'.format"));
    TRY(text_add(t, "if (!exists('columns')) columns = 79\nif (!exists('rows')) rows = 24\n"));
    TRY(text_add(t, "width = %g\nheight = %g\nset encoding utf8\n", width, height));
    for (const gnuplot_format *f = gnuplot_formats; f->name; f++)
        TRY(text_add(t, "if (format eq '%s') set terminal %s noenhanced%s\n", f->name, f->terminal,
                     strcmp(f->name, "term") ? " font 'DejaVu Sans,7'" : ""));
    return text_add(t, "paper = format ne 'term'\nset output picture\n");
}

/* A path that gnuplot takes as it is: "<x" and "|x" would start a program, "~" would be expanded. */
static int add_path(text *t, const char *variable, const char *path) {
    text safe = {0};
    int code = text_add(&safe, "%s%s", *path == '/' ? "" : "./", path);
    if (!code) code = text_add(t, "%s = ", variable);
    if (!code) code = gnuplot_quote(t, safe.data);
    if (!code) code = text_add(t, "\n");
    text_free(&safe);
    return code;
}

static int add_settings(text *t, const char *format, const char *data, const char *picture) {
    const char *columns = getenv("COLUMNS");
    long n = columns ? strtol(columns, NULL, 10) : 0;
    if (strpbrk(data, "\r\n") || strpbrk(picture, "\r\n"))
        return err_set(ERR_DATA, "%s: gnuplot takes no file name with a line break", picture);
    TRY(text_add(t, "format = '%s'\ncolumns = %ld\n", format, n >= 40 && n <= 400 ? n : 79));
    TRY(add_path(t, "data", data));
    return add_path(t, "picture", picture);
}

/* In the child, between fork and exec: only async-signal-safe calls and setenv (the parent has one thread here). */
static void become_gnuplot(int script, int complaints, int failed) {
    signal(SIGPIPE, SIG_DFL);
    setenv("LC_ALL", "C", 1);
    dup2(script, STDIN_FILENO);
    dup2(complaints, STDOUT_FILENO);
    dup2(complaints, STDERR_FILENO);
    execlp("gnuplot", "gnuplot", "-d", (char *)NULL);
    int why = errno;
    if (write(failed, &why, sizeof why) < 0) _exit(126);
    _exit(127);
}

/* A child that died closes the pipe: SIGPIPE is held off, and its exit status tells what happened. */
static void feed(int pipe, const text *t) {
    struct sigaction ignore = {.sa_handler = SIG_IGN}, before;
    sigaction(SIGPIPE, &ignore, &before);
    for (size_t at = 0; at < t->n;) {
        ssize_t n = write(pipe, t->data + at, t->n - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) break;
        at += (size_t)n;
    }
    sigaction(SIGPIPE, &before, NULL);
}

static void close_pair(int pair[2]) {
    for (int i = 0; i < 2; i++)
        if (pair[i] >= 0) close(pair[i]);
    pair[0] = pair[1] = -1;
}

/* Run gnuplot on the settings and the script. *why: errno of an exec that failed, or 0; *status: of the child. */
static int run(const text *settings, const text *script, FILE *complaints, int *why, int *status) {
    int feeding[2] = {-1, -1}, failing[2] = {-1, -1};
    pid_t child = -1;
    fflush(NULL);
    if (pipe2(feeding, O_CLOEXEC) == 0 && pipe2(failing, O_CLOEXEC) == 0) child = fork();
    if (child < 0) {
        int code = err_set(ERR_DATA, "gnuplot cannot be started: %s", strerror(errno));
        close_pair(feeding);
        close_pair(failing);
        return code;
    }
    if (child == 0) become_gnuplot(feeding[0], fileno(complaints), failing[1]);
    close(feeding[0]);
    close(failing[1]);
    feeding[0] = failing[1] = -1;
    *why = 0;
    if (read(failing[0], why, sizeof *why) <= 0) { /* closed by a successful exec */
        feed(feeding[1], settings);
        feed(feeding[1], script);
    }
    close_pair(feeding);
    close_pair(failing);
    while (waitpid(child, status, 0) < 0)
        if (errno != EINTR) return err_set(ERR_DATA, "gnuplot: %s", strerror(errno));
    return 0;
}

/* The first line gnuplot wrote that says something, and is no warning where another one is there; "" if none. */
static const char *first_complaint(FILE *complaints, char line[256]) {
    for (int warnings = 0; warnings < 2; warnings++) {
        rewind(complaints);
        while (fgets(line, 256, complaints)) {
            line[strcspn(line, "\n")] = 0;
            char *word = line + strspn(line, " \t^");
            if (*word && (warnings || !strstr(word, "warning:"))) return word;
        }
    }
    return "";
}

static int judge(int why, int status, const char *complaint, const char *data, const char *picture) {
    struct stat st;
    bool there = stat(picture, &st) == 0;
    if (there && st.st_size == 0) unlink(picture);
    if (why == ENOENT) return err_set(ERR_DATA, "gnuplot not found (data written to %s)", data);
    if (why) return err_set(ERR_DATA, "gnuplot cannot be started: %s (data written to %s)", strerror(why), data);
    if (WIFSIGNALED(status))
        return err_set(ERR_DATA, "gnuplot was ended by signal %d (data written to %s)", WTERMSIG(status), data);
    if (WEXITSTATUS(status)) return err_set(ERR_DATA, "gnuplot failed: %s (data written to %s)", complaint, data);
    if (!there || st.st_size == 0)
        return err_set(ERR_DATA, "gnuplot left no picture: %s (data written to %s)", complaint, data);
    if (*complaint) say_more("gnuplot: %s", complaint);
    return 0;
}

int gnuplot_draw(const text *script, const char *format, const char *data, const char *picture) {
    text settings = {0};
    char line[256];
    int why, status, code = add_settings(&settings, format, data, picture);
    FILE *complaints = code ? NULL : tmpfile();
    if (!code && !complaints) code = err_set(ERR_DATA, "no temporary file: %s", strerror(errno));
    if (!code) code = run(&settings, script, complaints, &why, &status);
    if (!code) code = judge(why, status, first_complaint(complaints, line), data, picture);
    if (complaints) fclose(complaints);
    text_free(&settings);
    return code;
}
