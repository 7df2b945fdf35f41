#include "stacks.h"

#include "channel/base/idioms.h"
#include "helper_process.h"
#include "paragraph.h"

#include <coxswain/version.h>

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define PROGRAM "coxswain"
/* Helpers at a time, or as many as there are processors; each is a process with 20 MB of address
 * space that it touches little of. */
#define HELPER_COUNT_LEAST 16
/* Of the time, what is left to print and to read when a helper's own budget is over. */
#define PRINT_MS 150
#define SUMMARY "summary: "
/* The rank comes once or twice. */
#define LISTEN_COUNT 8

struct reading {
    const struct cox_stacks_target *target;
    struct cox_helper_process helper;
    bool started, ended;
    uint64_t started_ns;
    char *text;
    size_t size;
    char why[640];
};

/* ---- the program ---- */

static bool program_try(const char *file, const char *where, char path[PATH_MAX])
{
    const char *slash = strrchr(file, '/');
    if (!slash || (size_t)(slash - file) + strlen(where) + sizeof PROGRAM + 2 > PATH_MAX)
        return false;
    snprintf(path, PATH_MAX, "%.*s/%s" PROGRAM, (int)(slash - file), file, where);
    return access(path, X_OK) == 0;
}

static bool program_in_path(char path[PATH_MAX])
{
    const char *list = getenv("PATH");
    for (const char *at = list ? list : "/usr/bin:/usr/local/bin"; *at;) {
        const size_t length = strcspn(at, ":");
        if (length && *at == '/' && length + sizeof PROGRAM + 1 < PATH_MAX) {
            snprintf(path, PATH_MAX, "%.*s/" PROGRAM, (int)length, at);
            if (access(path, X_OK) == 0)
                return true;
        }
        at += length + (at[length] == ':');
    }
    return false;
}

/* Of the installation, or the Python package, that this library is of; beside this program; in
 * PATH. */
static bool program_find(char path[PATH_MAX])
{
    static const char *const places[] = {"", "bin/", "../bin/", "../../bin/"};
    char own[PATH_MAX];
    Dl_info library;
    const ssize_t size = readlink("/proc/self/exe", own, sizeof own - 1);
    own[size > 0 ? size : 0] = '\0';
    if (dladdr((void *)(uintptr_t)cox_stacks_gather, &library) && library.dli_fname)
        for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
            if (program_try(library.dli_fname, places[i], path))
                return true;
    return program_try(own, "", path) || program_try(own, "../bin/", path) || program_in_path(path);
}

/* ---- helpers ---- */

/* That this process listens is what the rank trusts (channel/stacks/stack_protocol.h). Returns an
 * fd; -1: there are no frames of an interpreter then. */
static int listener_make(void)
{
    const struct sockaddr_un any = {.sun_family = AF_UNIX};
    _cox_cleanup_(cox_close_fd) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* The kernel chooses an abstract name. */
    if (fd < 0 || bind(fd, (const struct sockaddr *)&any, sizeof any.sun_family) < 0 ||
        listen(fd, LISTEN_COUNT) < 0)
        return -1;
    return cox_steal_fd(&fd);
}

/* program: NULL: there is none. */
static void reading_start(struct reading *reading, const char *program, uint64_t deadline_ns)
{
    char pid[16], budget[24], limit[24], path[PATH_MAX + 8], libraries[PATH_MAX + 24];
    const uint64_t now = cox_now_ns();
    const uint64_t left_ms = deadline_ns > now ? (deadline_ns - now) / COX_NSEC_PER_MSEC : 0;
    const uint64_t limit_ms = left_ms > PRINT_MS ? left_ms - PRINT_MS : 1;
    const uint64_t budget_ms = COX_STACKS_MS - PRINT_MS;
    reading->started = true;
    reading->started_ns = now;
    if (reading->text || reading->target->why[0] || !program) {
        reading->ended = true;
        snprintf(reading->why, sizeof reading->why, "%s",
                 reading->text || program || reading->target->why[0]
                     ? reading->target->why
                     : "stacks are read by the program " PROGRAM
                       ", which is neither beside this program nor in PATH: install the package "
                       "coxswain");
        return;
    }
    snprintf(pid, sizeof pid, "%jd", (intmax_t)reading->target->pid);
    snprintf(budget, sizeof budget, "%" PRIu64, budget_ms < limit_ms ? budget_ms : limit_ms);
    snprintf(limit, sizeof limit, "%" PRIu64, limit_ms);
    const char *search = getenv("LD_LIBRARY_PATH"), *own_path = getenv("PATH");
    snprintf(path, sizeof path, "PATH=%s", own_path ? own_path : "/usr/bin:/bin");
    snprintf(libraries, sizeof libraries, "LD_LIBRARY_PATH=%s", search ? search : "");
    char *const arguments[] = {(char[]){PROGRAM}, (char[]){"__stacks"}, pid, budget, limit, NULL};
    char *const environment[] = {path, (char[]){"LC_ALL=C"}, search ? libraries : NULL, NULL};
    _cox_cleanup_(cox_close_fd) int listen_fd = listener_make();
    const int r =
        cox_helper_process_start(program, arguments, environment, listen_fd, &reading->helper);
    if (r == 0)
        return;
    reading->ended = true;
    snprintf(reading->why, sizeof reading->why, "%.180s cannot be started: %s", program,
             cox_status_text(r));
}

/* Returns false: the helper has written all. */
static bool reading_read(struct reading *reading)
{
    if (!reading->text)
        reading->text = malloc(COX_STACKS_TEXT_MAX + 1);
    if (!reading->text)
        return false;
    /* What is too much is read no more: the helper is killed. */
    const size_t room = COX_STACKS_TEXT_MAX - reading->size;
    const ssize_t size =
        room ? read(reading->helper.output_fd, reading->text + reading->size, room) : 0;
    if (size > 0)
        reading->size += (size_t)size;
    return size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
}

static void reading_end(struct reading *reading, const char *why)
{
    if (reading->ended)
        return;
    reading->ended = true;
    cox_helper_process_end(&reading->helper);
    if (!reading->size || why)
        snprintf(reading->why, sizeof reading->why, "%s",
                 why ? why : "its helper wrote nothing: is coxswain of another release in PATH?");
}

uint32_t cox_stacks_at_a_time(void)
{
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (processors <= HELPER_COUNT_LEAST)
        return HELPER_COUNT_LEAST;
    return processors < COX_RANK_COUNT_MAX ? (uint32_t)processors : COX_RANK_COUNT_MAX;
}

/* Starts those whose turn it is. Returns how many run. */
static uint32_t readings_start(struct reading *list, uint32_t count, const char *program,
                               uint64_t deadline_ns)
{
    const uint32_t most = cox_stacks_at_a_time();
    uint32_t running = 0;
    for (uint32_t i = 0; i < count; i++)
        running += list[i].started && !list[i].ended;
    for (uint32_t i = 0; i < count && running < most; i++) {
        if (list[i].started)
            continue;
        reading_start(&list[i], program, deadline_ns);
        running += !list[i].ended;
    }
    return running;
}

static void readings_run(struct reading *list, uint32_t count, int cancelled, const char *program,
                         uint64_t deadline_ns)
{
    while (readings_start(list, count, program, deadline_ns) > 0) {
        struct pollfd fds[COX_RANK_COUNT_MAX + 1] = {{.fd = cancelled, .events = POLLIN}};
        struct reading *of[COX_RANK_COUNT_MAX + 1] = {NULL};
        nfds_t used = 1;
        for (uint32_t i = 0; i < count && used <= COX_RANK_COUNT_MAX; i++) {
            if (!list[i].started || list[i].ended)
                continue;
            of[used] = &list[i];
            fds[used++] = (struct pollfd){.fd = list[i].helper.output_fd, .events = POLLIN};
        }
        const uint64_t now = cox_now_ns();
        if (now >= deadline_ns)
            break;
        const uint64_t left_ms = (deadline_ns - now) / COX_NSEC_PER_MSEC + 1;
        if (poll(fds, used, (int)(left_ms < 1000 ? left_ms : 1000)) < 0 && errno != EINTR)
            break;
        if (fds[0].revents)
            break;
        for (nfds_t i = 1; i < used; i++)
            if (fds[i].revents && !reading_read(of[i]))
                reading_end(of[i], of[i]->size >= COX_STACKS_TEXT_MAX
                                       ? "more than 256 KiB: the rest is cut"
                                       : NULL);
    }
    for (uint32_t i = 0; i < count; i++)
        if (list[i].started && !list[i].ended)
            cox_helper_process_ask(&list[i].helper);
    for (uint32_t i = 0; i < count; i++) {
        char why[96];
        const uint64_t taken_ns = cox_now_ns() - list[i].started_ns;
        snprintf(why, sizeof why,
                 "the time was up after %.1f s: the machine, or the rank, was too slow",
                 (double)taken_ns / 1e9);
        if (!list[i].started)
            snprintf(list[i].why, sizeof list[i].why, "the time was up before it was its turn");
        else
            reading_end(&list[i], why);
    }
}

/* ---- the result ---- */

struct cox_stacks *cox_stacks_free(struct cox_stacks *stacks)
{
    if (!stacks)
        return NULL;
    for (uint32_t i = 0; stacks->ranks && i < stacks->count; i++) {
        free((char *)(uintptr_t)stacks->ranks[i].summary);
        free((char *)(uintptr_t)stacks->ranks[i].text);
    }
    free(stacks->ranks);
    free((char *)(uintptr_t)stacks->paragraph);
    free(stacks);
    return NULL;
}

/* What a terminal obeys, or is no ASCII: names of threads are a foreign program's. */
static void text_plain(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c; c++)
        if ((*c < ' ' && *c != '\n') || *c >= 0x7f)
            *c = '?';
}

/* Takes the lines that begin with SUMMARY out of a text, and keeps the last one of them. */
static void summary_take(char *text, char line[COX_STACKS_SUMMARY_SIZE])
{
    char *to = text;
    for (char *from = text; *from;) {
        const size_t length = strcspn(from, "\n") + (strchr(from, '\n') != NULL);
        if (strncmp(from, SUMMARY, strlen(SUMMARY)) == 0) {
            snprintf(line, COX_STACKS_SUMMARY_SIZE, "%.*s",
                     (int)strcspn(from + strlen(SUMMARY), "\n"), from + strlen(SUMMARY));
        } else {
            memmove(to, from, length);
            to += length;
        }
        from += length;
    }
    *to = '\0';
}

/* A path of the machine becomes its last part: the summary is in errors, which clients of a server
 * may get. */
static void folders_cut(char *line)
{
    char *to = line;
    for (const char *from = line; *from;) {
        const bool begins = from == line || strchr(" ('\"=", from[-1]);
        const size_t length = begins && *from == '/' ? strcspn(from, " '\"),;:") : 0;
        const char *name = from;
        for (const char *c = from; c < from + length; c++)
            name = *c == '/' ? c + 1 : name;
        const char *end = length ? from + length : from + 1;
        while (name < end)
            *to++ = *name++;
        from = end;
    }
    *to = '\0';
}

static int rank_fill(struct reading *reading, struct cox_rank_stacks *rank)
{
    char line[COX_STACKS_SUMMARY_SIZE] = "";
    rank->rank = reading->target->rank;
    rank->pid = reading->target->pid;
    rank->age_ns = reading->target->age_ns;
    if (reading->text) {
        reading->text[reading->size] = '\0';
        text_plain(reading->text);
        summary_take(reading->text, line);
    }
    text_plain(reading->why);
    const char *rest = reading->text ? reading->text : "";
    const size_t size = strlen(rest) + sizeof reading->why + 32;
    char *whole = malloc(size);
    if (whole)
        snprintf(whole, size, "%s%s%s%s", rest, reading->why[0] ? "not there: " : "", reading->why,
                 reading->why[0] ? "\n" : "");
    for (char *c = reading->why; *c; c++)
        if (*c == '\n')
            *c = ' ';
    /* A line that the helper wrote before it had frames. */
    if (line[0] && reading->why[0] && !strstr(line, " in "))
        snprintf(line + strlen(line), sizeof line - strlen(line), " (%.200s)", reading->why);
    if (!line[0])
        snprintf(line, sizeof line, "%s", reading->why[0] ? reading->why : "nothing is known");
    folders_cut(line);
    rank->summary = strdup(line);
    rank->text = whole;
    return rank->summary && whole ? 0 : -ENOMEM;
}

int cox_stacks_gather(const struct cox_stacks_target *targets, uint32_t count, int cancelled,
                      uint64_t deadline_ns, struct cox_stacks **ret_stacks)
{
    char program[PATH_MAX];
    struct reading *list = calloc(count ? count : 1, sizeof *list);
    struct cox_stacks *stacks = calloc(1, sizeof *stacks);
    int r = list && stacks ? 0 : -ENOMEM;
    if (r == 0)
        stacks->ranks = calloc(count ? count : 1, sizeof *stacks->ranks);
    if (r == 0 && !stacks->ranks)
        r = -ENOMEM;
    const bool found = program_find(program);
    for (uint32_t i = 0; i < count; i++) {
        if (list)
            list[i] = (struct reading){.target = &targets[i],
                                       .helper = COX_HELPER_PROCESS_NONE,
                                       .text = targets[i].text,
                                       .size = targets[i].text ? strlen(targets[i].text) : 0};
        else
            free(targets[i].text);
    }
    if (r == 0) {
        stacks->count = count;
        readings_run(list, count, cancelled, found ? program : NULL, deadline_ns);
        stacks->taken_ns = cox_now_ns();
    }
    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = rank_fill(&list[i], &stacks->ranks[i]);
    if (r == 0)
        r = cox_stacks_paragraph(stacks);
    for (uint32_t i = 0; list && i < count; i++)
        free(list[i].text);
    free(list);
    if (r)
        cox_stacks_free(stacks);
    else
        *ret_stacks = stacks;
    return r;
}
