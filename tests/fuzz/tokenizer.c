/* A tokenizer.json and a config.json of any bytes, and a text of any bytes to encode. */
#include "fuzz.h"

#include "engine/model/tokenizer.h"

#define TEXT_SIZE_MAX 255

static char folder[32];
static char links[2][64];
static int fd = -1;

static void folder_remove(void)
{
    for (int i = 0; i < 2; i++)
        unlink(links[i]);
    rmdir(folder);
}

/* Both files of the folder are one file in memory. */
static void folder_create(void)
{
    char path[64];
    snprintf(folder, sizeof folder, "/tmp/cox_fuzz_%d", (int)getpid());
    FUZZ_CHECK(mkdir(folder, 0700) == 0);
    fd = memfd_create("tokenizer", MFD_CLOEXEC);
    FUZZ_CHECK(fd >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    snprintf(links[0], sizeof links[0], "%s/tokenizer.json", folder);
    snprintf(links[1], sizeof links[1], "%s/config.json", folder);
    atexit(folder_remove);
    FUZZ_CHECK(symlink(path, links[0]) == 0 && symlink(path, links[1]) == 0);
}

static void round_trip(const struct cox_tokenizer *tokenizer, const char *text)
{
    int32_t *tokens = NULL;
    uint32_t count = 0;
    char *again = NULL;
    struct cox_error err = {0};
    int r = cox_tokenizer_encode(tokenizer, text, &tokens, &count, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_INVALID || r == COX_TOO_LARGE);
        return;
    }
    FUZZ_CHECK(count > 0 && count <= strlen(text) + 1);
    fuzz_touch(tokens, count * sizeof *tokens);
    FUZZ_CHECK(cox_tokenizer_decode(tokenizer, tokens, count, &again) == 0);
    FUZZ_CHECK(strlen(again) <= strlen(text));
    free(again);
    free(tokens);
}

/* The first byte is the length of the text, which follows; then the file. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int32_t odd[] = {0, -1, 1, INT32_MAX, INT32_MIN, 7};
    struct fuzz_input input = {data, size};
    char text[TEXT_SIZE_MAX + 1] = "";
    if (fd < 0)
        folder_create();
    size_t length = fuzz_eat_byte(&input);
    fuzz_eat(&input, text, length < TEXT_SIZE_MAX ? length : TEXT_SIZE_MAX);
    FUZZ_CHECK(ftruncate(fd, 0) == 0 &&
               pwrite(fd, input.bytes, input.size, 0) == (ssize_t)input.size);
    struct cox_tokenizer *tokenizer = NULL;
    struct cox_error err = {0};
    int r = cox_tokenizer_load(folder, &tokenizer, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(!tokenizer);
        FUZZ_CHECK(r == COX_CORRUPT || r == COX_UNSUPPORTED || r == COX_TOO_LARGE);
    } else {
        char *words = NULL;
        round_trip(tokenizer, text);
        FUZZ_CHECK(cox_tokenizer_decode(tokenizer, odd, sizeof odd / sizeof odd[0], &words) == 0);
        free(words);
        cox_tokenizer_free(tokenizer);
    }
    int32_t eos[COX_EOS_COUNT_MAX];
    uint32_t eos_count = UINT32_MAX;
    err = (struct cox_error){0};
    r = cox_eos_load(folder, eos, &eos_count, &err);
    if (r)
        fuzz_check_error(r, &err);
    else
        FUZZ_CHECK(eos_count <= COX_EOS_COUNT_MAX);
    return 0;
}
