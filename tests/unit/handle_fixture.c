#include "handle_fixture.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <grp.h>

uint8_t object_byte(unsigned seed, uint64_t i)
{
    return (uint8_t)(seed * 37 + i * 11 + i / 251);
}

int object_new(size_t size, unsigned seed)
{
    int fd = memfd_create("handle", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
    uint8_t *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(bytes != MAP_FAILED);
    for (size_t i = 0; i < size; i++)
        bytes[i] = object_byte(seed, i);
    munmap(bytes, size);
    return fd;
}

bool object_is(int fd, uint64_t offset, size_t size, unsigned seed)
{
    uint8_t byte;
    for (uint64_t i = offset; i<offset + size; i += size> 64 ? size / 64 : 1)
        if (pread(fd, &byte, 1, (off_t)i) != 1 || byte != object_byte(seed, i))
            return false;
    return true;
}

void handle_forge(struct cox_handle *handle, size_t offset, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i++)
        handle->bytes[offset + i] = (uint8_t)(value >> 8 * i);
    uint32_t crc = cox_handle_crc(handle->bytes, 60);
    for (size_t i = 0; i < 4; i++)
        handle->bytes[60 + i] = (uint8_t)(crc >> 8 * i);
}

static int filter_install(uint32_t number, unsigned which, uint64_t argument, int error)
{
    uint32_t verdict = error ? SECCOMP_RET_ERRNO | (uint32_t)error : SECCOMP_RET_KILL_PROCESS;
    uint8_t any = argument == ANY_ARGUMENT;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, any ? 1 : 3),
        any ? (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, verdict)
            : (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                           offsetof(struct seccomp_data, args) + 8 * which),
        any ? (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
            : (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)argument, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, verdict),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

void call_deny(uint32_t number, uint64_t argument, int error)
{
    CHECK(filter_install(number, 0, argument, error) == 0);
}

void argument_deny(uint32_t number, unsigned which, uint32_t argument, int error)
{
    CHECK(filter_install(number, which, argument, error) == 0);
}

bool filters_possible(void)
{
    pid_t pid = fork();
    if (pid == 0)
        _exit(filter_install(SYS_pidfd_getfd, 0, ANY_ARGUMENT, EPERM) == 0 ? 0 : 1);
    int status = -1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

void user_change(uid_t uid)
{
    CHECK(setgroups(0, NULL) == 0);
    CHECK(setresgid((gid_t)uid, (gid_t)uid, (gid_t)uid) == 0 && setresuid(uid, uid, uid) == 0);
    CHECK(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0); /* the change took it away */
}

int handle_open_plain(const struct cox_handle *handle, int *ret_fd, struct cox_error *err)
{
    return cox_handle_open(handle, NULL, cox_deadline_after_ms(1000), ret_fd, err);
}

void handle_opens(const struct cox_handle *handle, unsigned seed)
{
    struct cox_handle_info info;
    int fd = -1;
    assert_ok(handle_open_plain(handle, &fd, test_err()));
    assert_true(fd > STDERR_FILENO && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    assert_int_equal(cox_handle_parse(handle, &info, NULL), 0);
    assert_true(object_is(fd, info.offset, info.size, seed));
    close(fd);
}

void handle_refused(const struct cox_handle *handle, int code, const char *word)
{
    int fd = -77;
    assert_refused(handle_open_plain(handle, &fd, test_err()), code, word);
    assert_int_equal(fd, -77);
}
