/*
 * A recording, as a crash file or a live group gives it: a message of any bytes, and recorders in
 * which a process has written anything. What is told of it is text, JSON and a trace.
 */
#include "fuzz.h"

#include "channel/recorder/recorder.h"
#include "coordinator/recording/recording.h"
#include "program/trace/story.h"
#include "proto/recording.pb-c.h"

#define RANK_COUNT_MAX 3
#define MAGIC "COXREC1\n"

/* One write of a process to its own recorder. */
struct patch {
    uint8_t recorder;
    uint8_t size;
    uint32_t offset;
    uint64_t word;
};

static bool recorder_new(uint32_t rank, ProtobufCBinaryData *ret_recorder)
{
    const uint64_t size = cox_recorder_area_size(rank == COX_RECORDER_COORDINATOR);
    ret_recorder->data = calloc(1, size);
    FUZZ_CHECK(ret_recorder->data);
    ret_recorder->len = size;
    cox_recorder_area_init(ret_recorder->data, rank, 7, NULL, COX_RECORDER_NS);
    return true;
}

/* Gives the message recorders in place of its own, which are too long for a fuzzer to make. */
static void recorders_put(CoxswainRecording__Recording *recording, struct fuzz_input *input)
{
    ProtobufCBinaryData *recorders[RANK_COUNT_MAX + 1];
    uint32_t count = 0;
    free(recording->recorder.data);
    recording->has_recorder = recorder_new(COX_RECORDER_COORDINATOR, &recording->recorder);
    recorders[count++] = &recording->recorder;
    for (uint32_t rank = 0; rank < recording->n_ranks && rank < RANK_COUNT_MAX; rank++) {
        CoxswainRecording__Rank *of = recording->ranks[rank];
        free(of->recorder.data);
        of->has_recorder = recorder_new(rank, &of->recorder);
        recorders[count++] = &of->recorder;
    }
    for (uint32_t patches = fuzz_eat_byte(input); patches > 0; patches--) {
        struct patch patch;
        fuzz_eat(input, &patch, sizeof patch);
        const ProtobufCBinaryData *to = recorders[patch.recorder % count];
        /* Most in the first records of the first ring, where they meet. */
        const uint64_t range = patch.size & 0x80 ? to->len : 4096;
        const uint64_t offset = patch.offset % (range / 8) * 8;
        memcpy(to->data + offset, &patch.word, sizeof patch.word);
    }
}

static void tell(const CoxswainRecording__Recording *recording, const struct cox_story_range *range)
{
    struct cox_story *story = NULL;
    struct cox_error err = {0};
    int r = cox_story_new(recording, range, &story, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT && !story);
        return;
    }
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    FUZZ_CHECK(file);
    cox_story_print(story, 3, file);
    FUZZ_CHECK(cox_story_write_trace(story, file) == 0);
    FUZZ_CHECK(fclose(file) == 0);
    fuzz_touch(text, size);
    free(text);
    json_t *root = cox_story_json(story);
    FUZZ_CHECK(root);
    text = json_dumps(root, JSON_COMPACT);
    FUZZ_CHECK(text);
    free(text);
    json_decref(root);
    cox_story_free(story);
}

/* The first byte: what part is told. Then the number of patches, these, and the message. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    CoxswainRecording__Recording *recording = NULL;
    struct cox_error err = {0};
    const uint8_t part = fuzz_eat_byte(&input);
    const struct cox_story_range range = {.seconds_ns = part & 1 ? 1000 : 0,
                                          .last = part & 2 ? part >> 2 : 0};
    /* The message is what follows the patches. */
    const size_t patches_size = 1 + (input.size ? input.bytes[0] : 0) * sizeof(struct patch);
    const size_t skipped = patches_size < input.size ? patches_size : input.size;
    const size_t file_size = sizeof MAGIC - 1 + input.size - skipped;
    uint8_t *file = malloc(file_size);
    FUZZ_CHECK(file);
    memcpy(file, MAGIC, sizeof MAGIC - 1);
    if (input.size > skipped)
        memcpy(file + sizeof MAGIC - 1, input.bytes + skipped, input.size - skipped);
    int r = cox_recording_unpack(file, file_size, &recording, &err);
    free(file);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT);
        return 0;
    }
    tell(recording, &range); /* as it is */
    recorders_put(recording, &input);
    tell(recording, &range);
    cox_recording_free(recording);
    return 0;
}
