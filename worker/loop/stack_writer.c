#include "stack_writer.h"

#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

struct entry64 { /* struct linux_dirent64 */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

/* ---- copies of the other threads' stacks, where ptrace is denied ---- */

/* Reads "NUMBER ... SP PC" or "-1 SP PC". Returns false: it runs, or the kernel says nothing. */
static bool thread_registers(int folder_fd, const char *name, struct cox_stack_thread *thread)
{
    char path[64], text[512];
    size_t used = 0;
    for (const char *c = name; *c && used < 16; c++)
        path[used++] = *c;
    memcpy(path + used, "/syscall", sizeof "/syscall");
    const int fd = openat(folder_fd, path, O_RDONLY | O_CLOEXEC);
    const ssize_t size = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (size <= 0)
        return false;
    text[size] = '\0';
    char *pc = strrchr(text, ' ');
    if (!pc)
        return false;
    *pc = '\0';
    char *sp = strrchr(text, ' ');
    if (!sp)
        return false;
    thread->pc = strtoull(pc + 1, NULL, 16);
    thread->sp = strtoull(sp + 1, NULL, 16);
    thread->known = 1;
    return thread->sp != 0;
}

/* /proc/self/mem, since the address may be invalid by now. */
static void thread_copy(struct cox_stack_area *area, int memory_fd, struct cox_stack_thread *thread,
                        uint32_t *used)
{
    const uint32_t room = COX_STACK_POOL_SIZE - *used;
    const uint32_t want = room < COX_STACK_COPY_MAX ? room : COX_STACK_COPY_MAX;
    const ssize_t size = want ? pread(memory_fd, area->pool + *used, want, (off_t)thread->sp) : 0;
    thread->at = *used;
    thread->size = size > 0 ? (uint32_t)size : 0;
    *used += thread->size;
}

static void copies_write(struct cox_stack_area *area)
{
    char entries[4096];
    const int folder_fd = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int memory_fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    uint32_t count = 0, used = 0;
    for (;;) {
        const long size = folder_fd < 0 || memory_fd < 0
                              ? -1
                              : syscall(SYS_getdents64, folder_fd, entries, sizeof entries);
        if (size <= 0)
            break;
        for (long at = 0; at < size && count < COX_STACK_THREAD_MAX;) {
            const struct entry64 *entry = (const struct entry64 *)(const void *)(entries + at);
            struct cox_stack_thread thread = {.tid = (int32_t)strtol(entry->name, NULL, 10)};
            at += entry->length;
            if (thread.tid <= 0 || thread.tid == area->tid)
                continue;
            if (thread_registers(folder_fd, entry->name, &thread))
                thread_copy(area, memory_fd, &thread, &used);
            area->threads[count++] = thread;
        }
    }
    if (folder_fd >= 0)
        close(folder_fd);
    if (memory_fd >= 0)
        close(memory_fd);
    area->thread_count = count;
    area->pool_used = used;
}

/* ---- the thread ---- */

static void frames_write(struct cox_stack_writer *writer)
{
    const off_t begin = (off_t)offsetof(struct cox_stack_area, text);
    if (lseek(writer->fd, begin, SEEK_SET) != begin)
        return;
    if (writer->write_frames)
        writer->write_frames(writer->context, writer->fd);
    else if (writer->python_dump)
        writer->python_dump(writer->fd, NULL, NULL);
    const off_t end = lseek(writer->fd, 0, SEEK_CUR);
    const off_t size = end > begin ? end - begin : 0;
    writer->area->text_size =
        size < (off_t)COX_STACK_TEXT_MAX ? (uint32_t)size : COX_STACK_TEXT_MAX;
}

static void *writer_main(void *argument)
{
    struct cox_stack_writer *writer = argument;
    struct cox_stack_area *area = writer->area;
    pthread_setname_np(pthread_self(), "cox-stacks");
    area->tid = (int32_t)syscall(SYS_gettid);
    bool consented = false;
    for (;;) {
        /* acquire: what the reader stored before; partner: ask in program/stacks/rank_area.c. */
        const uint32_t wanted = atomic_load_explicit(&area->wanted, memory_order_acquire);
        const uint32_t done = atomic_load_explicit(&area->written, memory_order_relaxed);
        /* acquire: with stop, below. */
        if (atomic_load_explicit(&writer->stopping, memory_order_acquire))
            return NULL;
        if (wanted == done) {
            cox_futex_wait(&area->wanted, wanted, COX_DEADLINE_NEVER);
            continue;
        }
        const uint32_t flags = area->flags;
        /* The exporter of handles may have a policy of its own (PR_SET_PTRACER): it is left alone
         * unless a reader says that it is denied. */
        if (flags & COX_STACK_CONSENT)
            prctl(PR_SET_PTRACER, (unsigned long)area->tracer, 0UL, 0UL, 0UL);
        else if (consented)
            prctl(PR_SET_PTRACER, 0UL, 0UL, 0UL, 0UL);
        consented = (flags & COX_STACK_CONSENT) != 0;
        area->text_size = area->thread_count = area->pool_used = 0;
        if (flags & COX_STACK_FRAMES)
            frames_write(writer);
        if (flags & COX_STACK_COPIES)
            copies_write(area);
        /* release: the sizes and bytes above; partner: ask in program/stacks/rank_area.c. */
        atomic_store_explicit(&area->written, wanted, memory_order_release);
        cox_futex_wake_some(&area->written, 1);
    }
}

static int area_make(struct cox_stack_writer *writer)
{
    const unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    struct rlimit limit;
    /* Beyond it the kernel would raise SIGXFSZ. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < sizeof *writer->area)
        return -EFBIG;
    _cox_cleanup_(cox_close_fd) int fd =
        memfd_create(COX_STACK_AREA_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int r = fd < 0 ? -errno : 0;
    while (r == 0 && ftruncate(fd, (off_t)sizeof *writer->area) < 0)
        r = errno == EINTR ? 0 : -errno;
    if (r == 0 && fcntl(fd, F_ADD_SEALS, seals) < 0)
        r = -errno;
    if (r)
        return r;
    void *base = mmap(NULL, sizeof *writer->area, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return -errno;
    writer->area = base;
    writer->fd = cox_steal_fd(&fd);
    return 0;
}

int cox_stack_writer_start(struct cox_stack_writer *writer,
                           void (*write_frames)(void *context, int fd), void *context,
                           struct cox_error *err)
{
    *writer = (struct cox_stack_writer){.fd = -1, .write_frames = write_frames, .context = context};
    if (!write_frames)
        *(void **)(void *)&writer->python_dump = dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads");
    int r = area_make(writer);
    if (r == -ENOSYS || r == -EPERM || r == -EACCES || r == -EFBIG)
        return 0;
    if (r)
        return cox_fail(err, r, "the memory file of the stacks: %s", cox_status_text(r));
    r = cox_thread_start(&writer->thread, writer_main, writer);
    if (r) {
        munmap(writer->area, sizeof *writer->area);
        writer->area = NULL;
        cox_close_fd(&writer->fd);
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    }
    writer->area->magic = COX_STACK_AREA_MAGIC;
    return 0;
}

void cox_stack_writer_stop(struct cox_stack_writer *writer)
{
    if (!writer->area)
        return;
    /* release: with the thread's load. The word changes, so that the thread does not block again.
     */
    atomic_store_explicit(&writer->stopping, true, memory_order_release);
    atomic_fetch_add_explicit(&writer->area->wanted, 1, memory_order_release);
    cox_futex_wake_some(&writer->area->wanted, 1);
    pthread_join(writer->thread, NULL);
    munmap(writer->area, sizeof *writer->area);
    writer->area = NULL;
    cox_close_fd(&writer->fd);
}
