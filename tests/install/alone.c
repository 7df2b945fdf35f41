/* What can be had of the installed library without a coordinator: two processes, memory
 * whose handle goes from one to the other, and a rank group (K28). */
#include <coxswain/coxswain.h>
#include <coxswain/handle.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))
#define PATIENCE_MS 30000

static void failed(int line, const char *condition)
{
    fprintf(stderr, "alone.c:%d: %s\n", line, condition);
    exit(1);
}

static uint64_t patience(void)
{
    return cox_deadline_after_ms(PATIENCE_MS);
}

/* pipes: one in each direction; a byte or a handle goes through. */
static void helpers(const int pipes[2][2], int is_child)
{
    struct cox_region region = {0};
    struct cox_handle handle;
    char byte = 0;
    int fd = -1;
    if (!is_child) {
        const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                     .ptrace_policy = COX_PTRACE_ANY};
        struct cox_exporter *exporter = NULL;
        CHECK(cox_region_create_unnamed(&region, "given", 4096, 0, false, &fd, NULL) == 0);
        strcpy(region.base, "given");
        CHECK(cox_exporter_new(&options, &exporter, NULL) == 0);
        CHECK(cox_exporter_export(exporter, fd, 0, 0, &handle, NULL) == 0);
        close(fd);
        CHECK(write(pipes[0][1], &handle, sizeof handle) == sizeof handle);
        CHECK(read(pipes[1][0], &byte, 1) == 1);
        CHECK(strcmp(region.base, "taken") == 0);
        cox_exporter_free(exporter);
    } else {
        CHECK(read(pipes[0][0], &handle, sizeof handle) == sizeof handle);
        CHECK(cox_handle_open(&handle, NULL, patience(), &fd, NULL) == 0);
        CHECK(cox_region_attach_fd(&region, fd, "given", 4096, COX_REGION_WRITE, NULL) == 0);
        close(fd);
        CHECK(strcmp(region.base, "given") == 0);
        strcpy(region.base, "taken");
        CHECK(write(pipes[1][1], "y", 1) == 1);
    }
    cox_region_detach(&region);
}

static void ranks(const char *name, uint32_t rank)
{
    const struct cox_group_options options = {.size = sizeof(struct cox_group_options),
                                              .name = name,
                                              .rank = rank,
                                              .rank_count = 2,
                                              .deadline_ns = patience()};
    struct cox_group *group = NULL;
    struct cox_error err = {0};
    uint32_t value = 10 + rank, values[2];
    int fds[2];
    CHECK(cox_group_join(&options, &group, &err) == 0);
    CHECK(cox_group_barrier(group, patience(), &err) == 0);
    CHECK(cox_group_gather(group, &value, sizeof value, values, patience(), &err) == 0);
    CHECK(values[0] == 10 && values[1] == 11);
    CHECK(cox_group_gather_fds(group, STDERR_FILENO, COX_GROUP_FD_KEEP, fds, patience(), &err) ==
          0);
    CHECK(fds[rank] == -1 && fds[1 - rank] > STDERR_FILENO);
    close(fds[1 - rank]);
    CHECK(cox_group_barrier(group, patience(), &err) == 0);
    cox_group_leave(group);
}

int main(void)
{
    char name[64];
    int pipes[2][2], status = -1;
    snprintf(name, sizeof name, "cox_alone_%d", (int)getpid());
    CHECK(pipe(pipes[0]) == 0 && pipe(pipes[1]) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    helpers((const int(*)[2])pipes, pid == 0);
    ranks(name, pid == 0);
    if (pid == 0)
        return 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    puts("alone");
    return 0;
}
