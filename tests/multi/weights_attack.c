#include "weights_attack.h"

#include "engine/model/model_image_layout.h"
#include "tests/lib/posix.h"

#define TARGET_COUNT_MAX 8
#define PAGE 4096u

struct target {
    uint8_t *base;
    uint64_t size;
    uint64_t ino;
};

static void attempt(int report_fd, const char *kind, bool done)
{
    dprintf(report_fd, "%s: %s\n", kind, done ? "done" : strerror(errno));
}

static bool is_model(const uint8_t *page)
{
    const uint64_t magic = COX_MODEL_IMAGE_MAGIC;
    return memcmp(page, &magic, sizeof magic) == 0;
}

/* Shared mappings of memory of these names with these rights; up to TARGET_COUNT_MAX. */
static size_t find(const char *const names[2], const char *rights, struct target *ret_targets)
{
    char line[512], mode[8];
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && count < TARGET_COUNT_MAX && fgets(line, sizeof line, maps)) {
        uint64_t begin, end, ino;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*x %*x:%*x %" SCNu64, &begin, &end, mode,
                   &ino) == 4 &&
            mode[3] == 's' && strncmp(mode, rights, strlen(rights)) == 0 &&
            (strstr(line, names[0]) || strstr(line, names[1])))
            ret_targets[count++] = (struct target){(uint8_t *)begin, end - begin, ino};
    }
    if (maps)
        fclose(maps);
    return count;
}

/* ---- one way in ---- */

static void spoil(uint8_t *base, uint64_t size)
{
    for (uint64_t at = 0; at < size; at += PAGE)
        memset(base + at + COX_MODEL_IMAGE_HEAD_SIZE, 0, PAGE - COX_MODEL_IMAGE_HEAD_SIZE);
}

static bool spoil_by_write(int fd, uint64_t first, uint64_t size)
{
    static const uint8_t zeros[PAGE - COX_MODEL_IMAGE_HEAD_SIZE];
    bool done = false;
    for (uint64_t at = 0; at < size; at += PAGE)
        done |=
            pwrite(fd, zeros, sizeof zeros, (off_t)(first + at + COX_MODEL_IMAGE_HEAD_SIZE)) > 0;
    return done;
}

static void attack_path(int report_fd, const struct target *target, const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) /* which is refused, too, where the user may not */
        return;
    attempt(report_fd, "pwrite", spoil_by_write(fd, 0, target->size));
    void *map = mmap(NULL, target->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    attempt(report_fd, "mmap", map != MAP_FAILED);
    if (map != MAP_FAILED) {
        spoil(map, target->size);
        munmap(map, target->size);
    }
    attempt(report_fd, "punch",
            fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE,
                      (off_t)target->size - PAGE) == 0);
    attempt(report_fd, "shrink", ftruncate(fd, PAGE) == 0);
    attempt(report_fd, "grow", ftruncate(fd, (off_t)target->size * 2) == 0);
    attempt(report_fd, "seal", fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    close(fd);
}

static void attack_fds(int report_fd, const struct target *target, pid_t pid)
{
    char folder[64], path[512];
    struct stat st;
    snprintf(folder, sizeof folder, "/proc/%d/fd", (int)pid);
    DIR *fds = opendir(folder);
    for (struct dirent *entry; fds && (entry = readdir(fds));) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_ino == target->ino)
            attack_path(report_fd, target, path);
    }
    if (fds)
        closedir(fds);
}

static void attack_mapping(int report_fd, const struct target *target)
{
    char path[128];
    int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    attempt(report_fd, "write by /proc/self/mem",
            fd >= 0 && spoil_by_write(fd, (uintptr_t)target->base, target->size));
    close(fd);
    bool done = mprotect(target->base, target->size, PROT_READ | PROT_WRITE) == 0;
    attempt(report_fd, "mprotect", done);
    if (done)
        spoil(target->base, target->size);
    attempt(report_fd, "madvise",
            madvise(target->base + PAGE, target->size - PAGE, MADV_REMOVE) == 0);
    snprintf(path, sizeof path, "/proc/self/map_files/%" PRIxPTR "-%" PRIxPTR,
             (uintptr_t)target->base, (uintptr_t)target->base + (uintptr_t)target->size);
    attack_path(report_fd, target, path);
}

/* ---- both ---- */

void weights_attack_memory(int report_fd)
{
    static const char *const names[2] = {"memfd:cox_blocks", "memfd:cox_weights"};
    struct target targets[TARGET_COUNT_MAX];
    const size_t count = find(names, "r-", targets);
    for (size_t i = 0; i < count; i++) {
        bool found = false;
        for (uint64_t at = 0; at < targets[i].size && !found; at += PAGE)
            found = is_model(targets[i].base + at);
        if (!found)
            continue;
        attack_mapping(report_fd, &targets[i]);
        attack_fds(report_fd, &targets[i], getpid());
        attack_fds(report_fd, &targets[i], getppid());
    }
}

static bool has_fd(pid_t pid, uint64_t ino)
{
    char folder[64], path[512];
    struct stat st;
    bool found = false;
    snprintf(folder, sizeof folder, "/proc/%d/fd", (int)pid);
    DIR *fds = opendir(folder);
    for (struct dirent *entry; fds && !found && (entry = readdir(fds));) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        found = stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_ino == ino;
    }
    if (fds)
        closedir(fds);
    return found;
}

void weights_attack_words(int report_fd)
{
    static const char *const names[2] = {"memfd:cox_pool", "memfd:cox_queue"};
    struct target targets[TARGET_COUNT_MAX];
    const size_t count = find(names, "rw", targets);
    for (size_t i = 0; i < count; i++)
        if (has_fd(getppid(), targets[i].ino)) {
            memset(targets[i].base, 0, targets[i].size);
            attempt(report_fd, "words", true);
        }
}
