/*
 * replay: runs a fuzz target without libFuzzer: every file of its corpus, then random changes of
 * them.
 *
 *     fuzz_TARGET FOLDER [COUNT [SEED]]    the files of a folder, COUNT changes of them
 *     fuzz_TARGET FILE                     one file, as libFuzzer's artifacts are given
 *
 * The changes depend on the seed alone, so a failure comes again; its input is left in
 * replay-crash-TARGET. Ends early, and says so, after TIME_MAX_MS.
 */
#include "channel/base/idioms.h"
#include "fuzz.h"

#define TIME_MAX_MS 8000
#define INPUT_SIZE_MAX 8192
#define FILE_COUNT_MAX 256

struct file {
    char *name;
    uint8_t *bytes;
    size_t size;
};

static struct file files[FILE_COUNT_MAX];
static size_t file_count;
static const uint8_t *current; /* the input under way, for leave_input */
static size_t current_size;
static char crash_path[256];

/* Async-signal-safe. */
static void leave_input(void)
{
    int fd = open(crash_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    ssize_t written = write(fd, current, current_size);
    (void)written;
    close(fd);
    static const char text[] = "the input is left in ";
    written = write(STDERR_FILENO, text, sizeof text - 1);
    written = write(STDERR_FILENO, crash_path, strlen(crash_path));
    written = write(STDERR_FILENO, "\n", 1);
}

static void on_signal(int number)
{
    leave_input();
    signal(number, SIG_DFL);
    raise(number);
}

/* The sanitizers end a program without a signal. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void watch_crashes(const char *program)
{
    const char *slash = strrchr(program, '/');
    snprintf(crash_path, sizeof crash_path, "replay-crash-%s", slash ? slash + 1 : program);
    unlink(crash_path);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(leave_input);
    static const int numbers[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i] == SIGABRT || !__sanitizer_set_death_callback)
            signal(numbers[i], on_signal);
}

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static bool file_read(const char *path, const char *name)
{
    struct stat st;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || file_count == FILE_COUNT_MAX)
        return false;
    struct file *file = &files[file_count];
    file->size = (size_t)st.st_size;
    file->bytes = malloc(file->size + 1);
    file->name = strdup(name);
    FUZZ_CHECK(file->bytes && file->name);
    FUZZ_CHECK(read(fd, file->bytes, file->size) == (ssize_t)file->size);
    file_count++;
    return true;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct file *)a)->name, ((const struct file *)b)->name);
}

static void folder_read(const char *folder)
{
    DIR *dir = opendir(folder);
    if (!dir) {
        fprintf(stderr, "%s: %s\n", folder, strerror(errno));
        exit(2);
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        file_read(path, entry->d_name);
    }
    closedir(dir);
    qsort(files, file_count, sizeof files[0], by_name); /* readdir has an order of its own */
}

/* The bytes are a heap block of exactly their size: a sanitizer sees one step beyond. */
static void run(const uint8_t *bytes, size_t size)
{
    uint8_t *exact = malloc(size ? size : 1);
    FUZZ_CHECK(exact);
    memcpy(exact, bytes, size);
    current = exact;
    current_size = size;
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
}

static void byte_change(uint8_t *byte, uint64_t *state)
{
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, 0x20, 0x22, 0x2d, 0x30, 0x39, 0x7b};
    uint64_t r = random_next(state);
    if (r % 3 == 0)
        *byte ^= (uint8_t)(1u << (r >> 8) % 8);
    else if (r % 3 == 1)
        *byte = edges[(r >> 8) % sizeof edges];
    else
        *byte = (uint8_t)(r >> 8);
}

static void word_change(uint8_t *bytes, size_t size, uint64_t *state)
{
    static const uint64_t edges[] = {0,          1,          0x7fffffff,       0x80000000,
                                     0xffffffff, UINT64_MAX, (uint64_t)1 << 63};
    uint64_t r = random_next(state);
    uint64_t word = edges[r % (sizeof edges / sizeof edges[0])];
    size_t width = (r >> 8) % 2 ? 4 : 8;
    if (size < width)
        return;
    memcpy(bytes + (r >> 16) % (size - width + 1), &word, width);
}

/* One change of the input in place. Returns the new size. */
static size_t change(uint8_t *bytes, size_t size, uint64_t *state)
{
    uint64_t r = random_next(state);
    size_t at = size ? (r >> 16) % size : 0;
    size_t length = size ? 1 + random_next(state) % (size - at < 32 ? size - at : 32) : 0;
    switch (r % 8) {
    case 0: /* cut off */
        return at;
    case 1: /* take out */
        memmove(bytes + at, bytes + at + length, size - at - length);
        return size - length;
    case 2: /* repeat */
        if (length == 0 || size + length > INPUT_SIZE_MAX)
            return size;
        memmove(bytes + at + length, bytes + at, size - at);
        return size + length;
    case 3: /* behind it, part of another file */
    {
        const struct file *other = &files[random_next(state) % file_count];
        size_t from = other->size ? random_next(state) % other->size : 0;
        size_t count = other->size - from;
        if (count > INPUT_SIZE_MAX - at)
            count = INPUT_SIZE_MAX - at;
        memcpy(bytes + at, other->bytes + from, count);
        return at + count > size ? at + count : size;
    }
    case 4:
        word_change(bytes, size, state);
        return size;
    default:
        if (size)
            byte_change(&bytes[at], state);
        return size;
    }
}

static uint64_t run_changes(uint64_t count, uint64_t seed)
{
    static uint8_t bytes[INPUT_SIZE_MAX];
    uint64_t deadline_ns = cox_deadline_after_ms(TIME_MAX_MS);
    uint64_t state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    for (uint64_t i = 0; i < count; i++) {
        if (cox_now_ns() >= deadline_ns)
            return i;
        const struct file *file = &files[random_next(&state) % file_count];
        size_t size = file->size < INPUT_SIZE_MAX ? file->size : INPUT_SIZE_MAX;
        memcpy(bytes, file->bytes, size);
        for (uint64_t n = 1 + random_next(&state) % 4; n > 0; n--)
            size = change(bytes, size, &state);
        run(bytes, size);
    }
    return count;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s FOLDER [COUNT [SEED]]\n", argv[0]);
        return 2;
    }
    watch_crashes(argv[0]);
    if (!file_read(argv[1], argv[1]))
        folder_read(argv[1]);
    if (file_count == 0) {
        fprintf(stderr, "%s: no corpus there\n", argv[1]);
        return 2;
    }
    for (size_t i = 0; i < file_count; i++)
        run(files[i].bytes, files[i].size);
    uint64_t wanted = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    uint64_t done = run_changes(wanted, seed);
    printf("%zu files, %" PRIu64 " of %" PRIu64 " changes of them, seed %" PRIu64 "\n", file_count,
           done, wanted, seed);
    for (size_t i = 0; i < file_count; i++) {
        free(files[i].name);
        free(files[i].bytes);
    }
    return 0;
}
