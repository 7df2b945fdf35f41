/*
 * without: runs a command on a kernel that lacks, or a seccomp profile that denies, some calls.
 *
 * Usage: without CALL=ERRNO[,CALL=ERRNO...] COMMAND [ARGUMENT...]
 *
 * ERRNO: ENOSYS, as an older kernel says; EPERM, as a seccomp profile says; EINVAL.
 * `CALL<SIZE=ERRNO` fails only where the second argument is less, `CALL>SIZE=ERRNO` only where it
 * is greater. Exit status 77: filters are not allowed here.
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

static const struct {
    const char *name;
    uint32_t number;
} calls[] = {
    {"bind", SYS_bind},
    {"bpf", SYS_bpf},
    {"clone3", SYS_clone3},
    {"close_range", SYS_close_range},
    {"futex", SYS_futex},
    {"futex_waitv", SYS_futex_waitv},
    {"getsockopt", SYS_getsockopt},
    {"kcmp", SYS_kcmp},
    {"linkat", SYS_linkat},
    {"madvise", SYS_madvise},
    {"memfd_create", SYS_memfd_create},
    {"mount", SYS_mount},
    {"perf_event_open", SYS_perf_event_open},
    {"pidfd_getfd", SYS_pidfd_getfd},
    {"pidfd_open", SYS_pidfd_open},
    {"prlimit64", SYS_prlimit64},
    {"process_madvise", SYS_process_madvise},
    {"process_vm_readv", SYS_process_vm_readv},
    {"ptrace", SYS_ptrace},
    {"sched_getaffinity", SYS_sched_getaffinity},
    {"setns", SYS_setns},
    {"umount2", SYS_umount2},
    {"unshare", SYS_unshare},
    {"waitid", SYS_waitid},
};

static const struct {
    const char *name;
    uint32_t number;
} errors[] = {{"ENOSYS", ENOSYS}, {"EPERM", EPERM}, {"EINVAL", EINVAL}};

static struct sock_filter filter[64];
static unsigned short filter_length;

static void add(uint16_t code, uint32_t k, uint8_t jump_true, uint8_t jump_false)
{
    filter[filter_length++] = (struct sock_filter)BPF_JUMP(code, k, jump_true, jump_false);
}

static void add_load(size_t offset)
{
    add(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0);
}

static int deny(char *text)
{
    char *error = strchr(text, '='), *size = strpbrk(text, "<>");
    if (!error)
        return -1;
    *error++ = '\0';
    const bool greater = size && *size == '>';
    if (size)
        *size++ = '\0';
    size_t call = 0, number = 0;
    while (call < sizeof calls / sizeof calls[0] && strcmp(calls[call].name, text) != 0)
        call++;
    while (number < sizeof errors / sizeof errors[0] && strcmp(errors[number].name, error) != 0)
        number++;
    if (call == sizeof calls / sizeof calls[0] || number == sizeof errors / sizeof errors[0])
        return -1;
    add_load(offsetof(struct seccomp_data, nr));
    add(BPF_JMP | BPF_JEQ | BPF_K, calls[call].number, 0, size ? 3 : 1);
    if (size) {
        add_load(offsetof(struct seccomp_data, args[1])); /* its lower half: little-endian */
        if (greater)
            add(BPF_JMP | BPF_JGT | BPF_K, (uint32_t)atoi(size), 0, 1);
        else
            add(BPF_JMP | BPF_JGE | BPF_K, (uint32_t)atoi(size), 1, 0);
    }
    add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | errors[number].number, 0, 0);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "Usage: without CALL=ERRNO,... COMMAND [ARGUMENT...]\n");
        return 2;
    }
    for (char *text = strtok(argv[1], ","); text; text = strtok(NULL, ","))
        if (deny(text)) {
            fprintf(stderr, "without: '%s' is not known here\n", text);
            return 2;
        }
    add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW, 0, 0);
    struct sock_fprog program = {.len = filter_length, .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0) {
        perror("without: a filter");
        return 77;
    }
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 127;
}
