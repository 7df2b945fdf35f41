/* What can be had of the installed library without a coordinator: two processes, a named region, a
 * socket that an fd goes through, and a rank group (K28). */
#include <coxswain/coxswain.h>
#include <coxswain/ipc.h>

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

static void helpers(const char *name, int socket, int is_child)
{
    struct cox_region region = {0};
    char byte = 0;
    int fd = -1;
    uint32_t count = 0;
    if (!is_child) {
        CHECK(cox_region_create_unnamed(&region, "given", 4096, 0, false, &fd, NULL) == 0);
        strcpy(region.base, "given");
        CHECK(cox_socket_send(socket, "x", 1, &fd, 1, patience()) == 0);
        close(fd);
        CHECK(cox_socket_receive(socket, &byte, 1, NULL, 0, NULL, patience()) == 0);
        cox_region_detach(&region);
        CHECK(cox_region_attach(&region, name, 8192, COX_REGION_READ, NULL) == 0);
        CHECK(strcmp(region.base, "named") == 0);
        CHECK(cox_region_unlink(name) == 0);
    } else {
        CHECK(cox_socket_receive(socket, &byte, 1, &fd, 1, &count, patience()) == 0 && count == 1);
        CHECK(cox_region_attach_fd(&region, fd, "given", 4096, COX_REGION_WRITE, NULL) == 0);
        close(fd);
        CHECK(strcmp(region.base, "given") == 0);
        cox_region_detach(&region);
        CHECK(cox_region_create(&region, name, 8192, NULL) == 0);
        strcpy(region.base, "named");
        CHECK(cox_socket_send(socket, "y", 1, NULL, 0, patience()) == 0);
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
    char object[64], name[64];
    char path[64];
    int listening = -1, fd = -1, status = -1;
    snprintf(object, sizeof object, "/cox_alone_%d", (int)getpid());
    snprintf(name, sizeof name, "cox_alone_%d", (int)getpid());
    snprintf(path, sizeof path, "/tmp/cox_alone_%d.socket", (int)getpid());
    CHECK(cox_socket_listen(path, &listening, NULL) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        CHECK(cox_socket_connect(path, patience(), &fd, NULL) == 0);
    else
        CHECK(cox_socket_accept(listening, patience(), &fd) == 0 &&
              cox_socket_unlink(path, NULL) == 0);
    helpers(object, fd, pid == 0);
    ranks(name, pid == 0);
    if (pid == 0)
        return 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    puts("alone");
    return 0;
}
