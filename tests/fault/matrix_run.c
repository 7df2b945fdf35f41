#include "channel/socket/control_socket.h"
#include "matrix.h"

#if COX_TESTING

/* A driver, everything included. */
#define DRIVER_PATIENCE_MS (4 * TEST_PATIENCE_MS)
/* How long a stopped coordinator is left so. */
#define NAP_MS 50

extern char **environ;

void matrix_journal_parse(struct matrix_journal *journal)
{
    memcpy(journal->copy, journal->bytes, sizeof journal->copy);
    char *rest = journal->copy, *text;
    journal->line_count = 0;
    while ((text = strsep(&rest, "\n")) != NULL && journal->line_count < MATRIX_LINE_COUNT) {
        struct matrix_line *line = &journal->lines[journal->line_count];
        int used = 0;
        if (sscanf(text, "%31s %d %7s %7s %7s |%n", line->name, &line->status, line->outcomes[0],
                   line->outcomes[1], line->outcomes[2], &used) == 5 &&
            used > 0 && text[0] != '#') {
            line->text = text + used;
            journal->line_count++;
        }
    }
}

void matrix_complain(struct matrix_run *run, enum matrix_verdict verdict, const char *format, ...)
{
    if (run->verdict != MATRIX_WRONG)
        run->verdict = verdict;
    size_t used = strlen(run->problems);
    va_list args;
    va_start(args, format);
    vsnprintf(run->problems + used, sizeof run->problems - used, format, args);
    va_end(args);
    used = strlen(run->problems);
    snprintf(run->problems + used, sizeof run->problems - used, "\n");
}

const char *matrix_process_name(int process)
{
    static const char *const names[MATRIX_PROCESS_COUNT] = {"coordinator", "0", "1", "2"};
    return names[process + 1];
}

void matrix_counts_new(struct matrix_run *run)
{
    run->counts_fd = memfd_create("counts", MFD_CLOEXEC);
    COX_ASSERT(run->counts_fd >= 0 && ftruncate(run->counts_fd, sizeof *run->counts) == 0);
    run->counts =
        mmap(NULL, sizeof *run->counts, PROT_READ | PROT_WRITE, MAP_SHARED, run->counts_fd, 0);
    COX_ASSERT(run->counts != MAP_FAILED);
}

/* ---- the folder of its sockets ---- */

void matrix_sockets_new(struct matrix_run *run)
{
    snprintf(run->folder, sizeof run->folder, "/tmp/cox_matrix_XXXXXX");
    COX_ASSERT(mkdtemp(run->folder));
    setenv("XDG_RUNTIME_DIR", run->folder, 1);
}

uint32_t matrix_sockets_count(char *name)
{
    char path[COX_SOCKET_PATH_SIZE];
    uint32_t count = 0;
    snprintf(path, sizeof path, "%s/coxswain", getenv("XDG_RUNTIME_DIR"));
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        count++;
        if (name)
            snprintf(name, COX_SOCKET_PATH_SIZE, "%s", entry->d_name);
    }
    if (folder)
        closedir(folder);
    return count;
}

void matrix_sockets_end(struct matrix_run *run)
{
    char file[COX_SOCKET_PATH_SIZE], path[2 * COX_SOCKET_PATH_SIZE];
    for (uint32_t count; (count = matrix_sockets_count(file)) > 0;) {
        matrix_complain(run, MATRIX_WRONG, "%s is left in the runtime directory", file);
        snprintf(path, sizeof path, "%s/coxswain/%s", run->folder, file);
        if (unlink(path) < 0)
            break;
    }
    snprintf(path, sizeof path, "%s/coxswain", run->folder);
    /* Only a coordinator that was killed before it came so far has made none. */
    if ((rmdir(path) < 0 && access(path, F_OK) == 0) || rmdir(run->folder) < 0)
        matrix_complain(run, MATRIX_WRONG, "the folder %s cannot be removed", run->folder);
}

/* ---- the driver ---- */

static pid_t driver_spawn(struct matrix_run *run, enum matrix_mode mode, int *ret_out)
{
    int out[2];
    char path[64], mode_text[2] = {(char)mode}, brief[24];
    COX_ASSERT(pipe2(out, O_CLOEXEC | O_NONBLOCK) == 0);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), run->counts_fd);
    snprintf(brief, sizeof brief, "%" PRIu64, run->brief_ms);
    setenv("COXSWAIN_FAULT_COUNTS", path, 1);
    unsetenv("COXSWAIN_FAULT");
    if (run->death && mode != MATRIX_AFTER && mode != MATRIX_OTHER) {
        char plan[128];
        snprintf(plan, sizeof plan, "%s:%s:%s:%" PRIu32, cox_fault_name(run->death->point),
                 run->death->signal == SIGKILL ? "kill" : "stop",
                 matrix_process_name(run->death->process), run->death->passage);
        setenv("COXSWAIN_FAULT", plan, 1);
    }
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_adddup2(&actions, out[1], 2);
    /* A process group of its own, to end all of it at once. */
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    const char *rank = matrix_process_name(run->death ? run->death->process : MATRIX_COORDINATOR);
    char *const argv[] = {"matrix", "driver", run->name, mode_text, (char *)(uintptr_t)rank,
                          brief,    NULL};
    pid_t pid;
    COX_ASSERT(posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, argv, environ) == 0);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    *ret_out = out[0];
    return pid;
}

static void journal_read(struct matrix_journal *journal, int fd)
{
    size_t room;
    ssize_t got;
    while ((room = sizeof journal->bytes - 1 - journal->used) > 0 &&
           (got = read(fd, journal->bytes + journal->used, room)) > 0)
        journal->used += (size_t)got;
    journal->bytes[journal->used] = '\0';
}

static void pause_ms(uint64_t ms)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)(ms * COX_NSEC_PER_MSEC)}, NULL);
}

/* Until the driver has ended; a stopped one is continued after a pause. */
static void driver_follow(struct matrix_run *run, pid_t pid, int out)
{
    uint64_t deadline_ns = cox_deadline_after_ms(DRIVER_PATIENCE_MS);
    run->hung = false;
    for (;;) {
        struct pollfd p = {.fd = out, .events = POLLIN};
        poll(&p, 1, 5);
        journal_read(&run->journal, out);
        if (waitpid(pid, &run->status, WNOHANG | WUNTRACED) == pid) {
            if (!WIFSTOPPED(run->status))
                break;
            pause_ms(NAP_MS);
            kill(pid, SIGCONT);
        }
        if (cox_now_ns() >= deadline_ns && !run->hung) {
            run->hung = true;
            kill(-pid, SIGKILL);
        }
    }
    journal_read(&run->journal, out);
    close(out);
}

/* The leak check of AddressSanitizer clones a process, which ends a moment after a worker that is
 * killed during it. There only a process that stays is a fault. */
#ifdef __SANITIZE_ADDRESS__
#define HELPERS_OF_SANITIZER true
#else
#define HELPERS_OF_SANITIZER false
#endif

/* Orphans are children of the runner now. Returns how many there were. */
static int orphans_reap(struct matrix_run *run, pid_t group)
{
    int count = 0;
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid < 0)
            return count;
        count += pid > 0 && !HELPERS_OF_SANITIZER;
        if (pid == 0)
            pause_ms(1);
        if (cox_now_ns() >= deadline_ns) {
            matrix_complain(run, MATRIX_WRONG, "a process goes on without its coordinator");
            kill(-group, SIGKILL);
            deadline_ns = COX_DEADLINE_NEVER;
        }
    }
}

int matrix_driver_run(struct matrix_run *run, enum matrix_mode mode)
{
    int out;
    pid_t pid = driver_spawn(run, mode, &out);
    driver_follow(run, pid, out);
    if (run->hung)
        matrix_complain(run, MATRIX_WRONG, "the driver does not come to an end");
    int orphans = orphans_reap(run, pid);
    matrix_journal_parse(&run->journal);
    return orphans;
}

#endif
