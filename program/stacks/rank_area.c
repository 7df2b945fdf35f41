#include "rank_area.h"

#include "channel/base/futex.h"
#include "channel/base/idioms.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define LINK "/memfd:" COX_STACK_AREA_NAME

/* Returns an fd, -1: none. */
static int area_find(pid_t pid, int *ret_error)
{
    char path[300], target[64];
    snprintf(path, sizeof path, "/proc/%" PRId32 "/fd", (int32_t)pid);
    DIR *folder = opendir(path);
    int fd = -1;
    *ret_error = folder ? 0 : errno;
    for (const struct dirent *entry; folder && fd < 0 && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/%" PRId32 "/fd/%s", (int32_t)pid, entry->d_name);
        const ssize_t size = readlink(path, target, sizeof target - 1);
        if (size < (ssize_t)strlen(LINK) || strncmp(target, LINK, strlen(LINK)) != 0)
            continue;
        fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            *ret_error = errno;
    }
    if (folder)
        closedir(folder);
    return fd;
}

int cox_rank_area_open(struct cox_rank_area *area, pid_t pid)
{
    int error;
    struct stat status;
    *area = (struct cox_rank_area){.fd = area_find(pid, &error)};
    if (area->fd < 0)
        return error ? -error : COX_NOT_FOUND;
    int r = 0;
    /* A file that could shrink would end this process by SIGBUS. */
    const int seals = fcntl(area->fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(area->fd, &status) < 0 ||
        status.st_size != (off_t)sizeof *area->area)
        r = COX_CORRUPT;
    else if (flock(area->fd, LOCK_EX | LOCK_NB) < 0)
        r = errno == EWOULDBLOCK ? COX_BUSY : -errno;
    void *base =
        r ? MAP_FAILED
          : mmap(NULL, sizeof *area->area, PROT_READ | PROT_WRITE, MAP_SHARED, area->fd, 0);
    if (base != MAP_FAILED)
        area->area = base;
    if (!r && (!area->area || area->area->magic != COX_STACK_AREA_MAGIC))
        r = area->area ? COX_CORRUPT : -errno;
    if (r)
        cox_rank_area_close(area);
    return r;
}

void cox_rank_area_close(struct cox_rank_area *area)
{
    if (area->area)
        munmap(area->area, sizeof *area->area);
    area->area = NULL;
    cox_close_fd(&area->fd);
}

pid_t cox_rank_area_tid(const struct cox_rank_area *area)
{
    return area->area ? area->area->tid : 0;
}

int cox_rank_area_ask(struct cox_rank_area *area, uint32_t flags, pid_t tracer,
                      uint64_t deadline_ns)
{
    struct cox_stack_area *words = area->area;
    words->tracer = (int32_t)tracer;
    words->flags = flags;
    /* release: the words above; partner: writer_main in worker/loop/stack_writer.c. */
    const uint32_t number = atomic_fetch_add_explicit(&words->wanted, 1, memory_order_release) + 1;
    cox_futex_wake_some(&words->wanted, 1);
    for (;;) {
        /* acquire: what the rank stored before; partner: the same. */
        const uint32_t written = atomic_load_explicit(&words->written, memory_order_acquire);
        if (written == number)
            return 0;
        if (cox_now_ns() >= deadline_ns)
            return COX_TIMEOUT;
        cox_futex_wait(&words->written, written, deadline_ns);
    }
}

uint32_t cox_rank_area_text(const struct cox_rank_area *area, char *text)
{
    uint32_t size = area->area->text_size;
    if (size > COX_STACK_TEXT_MAX)
        size = COX_STACK_TEXT_MAX;
    memcpy(text, area->area->text, size);
    for (uint32_t i = 0; i < size; i++)
        if ((text[i] < ' ' && text[i] != '\n') || text[i] == 0x7f)
            text[i] = '?';
    text[size] = '\0';
    return size;
}
