/* Bytes between a lead and its nodes: frames, the messages, answers and flight recorders in them,
 * what mirrors of a rank group tell each other, and words that a rank of this machine may have left
 * in its memory. The first byte chooses. Refused in words, or taken within their bounds. */
#include "fuzz.h"

#include "nodes/link/agent_link.h"
#include "channel/recorder/recorder.h"
#include "nodes/link/lead_link.h"
#include "nodes/link/recorder_fetch.h"
#include "nodes/link/stacks_fetch.h"
#include "worker/group/group_layout.h"
#include "worker/group/group_mirror.h"

#define RANK_FIRST 2u
#define RANK_COUNT 3u
#define WORLD 8u
#define DEPTH 4u
#define EPOCH 7u
#define INCARNATION 1u
#define PEERS_VERSION 5u
#define AGENT 42u
#define MS COX_NSEC_PER_MSEC
#define STEP_COUNT_MAX 64

/* ---- frames ---- */

struct links {
    struct cox_lead_link lead;
    struct cox_lead_events events;
    struct cox_agent_link agent;
    uint64_t now_ns;
    uint64_t next[COX_TWO_WAY_COUNT];
};

/* What a link sends can be read. */
static void sent(const uint8_t *bytes, size_t size)
{
    struct cox_frame frame;
    FUZZ_CHECK(cox_frame_unpack(bytes, size, &frame, NULL) == 0);
    fuzz_touch(bytes, size);
}

static void on_lead_send(void *context, const struct cox_lead_link *link, uint8_t *bytes,
                         size_t size, struct cox_large_request *large)
{
    (void)large;
    (void)context;
    FUZZ_CHECK(link->state != COX_NODE_ABSENT);
    sent(bytes, size);
    free(bytes);
}

static void on_agent_send(void *context, uint8_t *bytes, size_t size)
{
    (void)context;
    sent(bytes, size);
    free(bytes);
}

static void links_open(struct links *links)
{
    static const struct cox_node_times times = COX_NODE_TIMES_DEFAULT;
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    memset(links, 0, sizeof *links);
    links->now_ns = 1000 * MS;
    cox_lead_events_init(&links->events);
    cox_lead_link_init(&links->lead, "b", RANK_FIRST, RANK_COUNT, WORLD, DEPTH);
    links->lead.times = &times;
    links->lead.epoch = EPOCH;
    links->lead.send = on_lead_send;
    links->lead.events = &links->events;
    cox_lead_link_admit(&links->lead, AGENT, links->now_ns);
    for (uint32_t i = 0; i < RANK_COUNT; i++)
        cox_lead_link_want(&links->lead, RANK_FIRST + i, 1);
    cox_agent_link_init(&links->agent, AGENT);
    links->agent.send = on_agent_send;
    welcome.epoch = EPOCH;
    welcome.incarnation = INCARNATION;
    welcome.rank_first = RANK_FIRST;
    welcome.rank_count = RANK_COUNT;
    welcome.depth = DEPTH;
    welcome.peers_version = PEERS_VERSION;
    FUZZ_CHECK(cox_agent_link_follow(&links->agent, &welcome, links->now_ns) == 0);
}

static void links_pump(struct links *links)
{
    struct cox_lead_event *event;
    while ((event = cox_lead_events_take(&links->events))) {
        FUZZ_CHECK(event->channel < COX_TWO_WAY_COUNT);
        if (event->kind == COX_LEAD_REPLY || event->kind == COX_LEAD_RANK_UP ||
            event->kind == COX_LEAD_RANK_DIED)
            FUZZ_CHECK(event->rank >= RANK_FIRST && event->rank < RANK_FIRST + RANK_COUNT);
        if (event->bytes)
            fuzz_touch(event->bytes, event->size);
        FUZZ_CHECK(memchr(event->text, '\0', sizeof event->text));
        cox_lead_event_free(event);
    }
}

static void links_close(struct links *links)
{
    links_pump(links);
    cox_lead_link_deinit(&links->lead);
    cox_agent_link_deinit(&links->agent);
}

static void publish(struct links *links, uint8_t how)
{
    const uint32_t c = how % COX_TWO_WAY_COUNT;
    struct cox_rank_set asked = {{(uint64_t)(how >> 2 & 7) << RANK_FIRST, 0}};
    const uint64_t sequence = ++links->next[c];
    const struct cox_transport_request request = {.channel = (enum cox_channel_id)c,
                                                  .sequence = sequence,
                                                  .deadline_ns = COX_DEADLINE_NEVER,
                                                  .replies = how >> 5 & 1,
                                                  .asked = &asked,
                                                  .bytes = &sequence,
                                                  .size = sizeof sequence};
    cox_lead_link_publish(&links->lead, &request, NULL, links->now_ns);
}

/* As the agent does. */
static void run(struct links *links, uint8_t how)
{
    struct cox_agent_link *link = &links->agent;
    struct cox_frame frame;
    uint64_t deadline_ns;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        while (cox_agent_link_next(link, c, links->now_ns, &frame, &deadline_ns)) {
            const struct cox_answer answer = {.count = how & 1,
                                              .replies = {{.rank = RANK_FIRST,
                                                           .flags = COX_ANSWER_REPLIED,
                                                           .bytes = (const uint8_t *)"ok",
                                                           .size = 2}}};
            FUZZ_CHECK(frame.channel == c && frame.sequence > link->channels[c].taken);
            FUZZ_CHECK(deadline_ns > links->now_ns);
            fuzz_touch(frame.payload, frame.size);
            const uint64_t sequence = frame.sequence; /* the frame is lent until taken */
            cox_agent_link_taken(link, c, sequence, how & 2);
            FUZZ_CHECK(link->channels[c].taken == sequence);
            if (!(how & 6))
                cox_agent_link_answer(link, c, sequence, &answer, how & 8, links->now_ns);
        }
}

/* As the agent checks it. */
static void welcome_take(struct links *links, const CoxNode__Welcome *welcome)
{
    if (welcome->refusal || welcome->rank_count == 0 || welcome->world > COX_RANK_COUNT_MAX ||
        welcome->rank_first >= welcome->world ||
        welcome->rank_count > welcome->world - welcome->rank_first || welcome->depth == 0 ||
        welcome->depth > COX_NODE_DEPTH_MAX)
        return;
    int r = cox_agent_link_follow(&links->agent, welcome, links->now_ns);
    FUZZ_CHECK(r == 0 || r == COX_STALE);
    FUZZ_CHECK(r || links->agent.epoch == welcome->epoch);
}

static void messages_read(struct links *links, const struct cox_frame *frame)
{
    CoxNode__Hello *hello = cox_node__hello__unpack(NULL, frame->size, frame->payload);
    CoxNode__Welcome *welcome = cox_node__welcome__unpack(NULL, frame->size, frame->payload);
    CoxNode__Text *text = cox_node__text__unpack(NULL, frame->size, frame->payload);
    if (welcome)
        welcome_take(links, welcome);
    if (hello) {
        char refusal[320] = "";
        FUZZ_CHECK(cox_lead_link_release_agrees(&links->lead, hello, refusal, sizeof refusal) ==
                   !refusal[0]);
    }
    cox_node__hello__free_unpacked(hello, NULL);
    cox_node__welcome__free_unpacked(welcome, NULL);
    cox_node__text__free_unpacked(text, NULL);
}

static void frame_take(struct links *links, const uint8_t *bytes, size_t size)
{
    struct cox_frame frame;
    struct cox_error err = {0};
    int r = cox_frame_unpack(bytes, size, &frame, &err);
    if (r) {
        FUZZ_CHECK(r == COX_CORRUPT);
        fuzz_check_error(r, &err);
        return;
    }
    FUZZ_CHECK(strcmp(cox_frame_kind_name(frame.kind), "unknown") != 0);
    r = cox_lead_link_receive(&links->lead, &frame, links->now_ns, &err);
    FUZZ_CHECK(r == 0 || r == COX_STALE || r == COX_CORRUPT);
    if (r == COX_CORRUPT)
        fuzz_check_error(r, &err);
    links_pump(links);
    err = (struct cox_error){0};
    r = cox_agent_link_receive(&links->agent, &frame, links->now_ns, &err);
    FUZZ_CHECK(r == 0 || r == COX_STALE || r == COX_CORRUPT);
    if (cox_agent_link_greets(&links->agent, &frame, r, links->now_ns))
        FUZZ_CHECK(r == COX_STALE || frame.kind == COX_FRAME_SEEK);
    if (frame.kind == COX_FRAME_HELLO || frame.kind == COX_FRAME_WELCOME ||
        frame.kind == COX_FRAME_TEXT)
        messages_read(links, &frame);
}

static void frames(struct fuzz_input *input)
{
    struct links links;
    links_open(&links);
    for (int step = 0; step < STEP_COUNT_MAX && input->size; step++) {
        const uint8_t what = fuzz_eat_byte(input);
        if (what == 255)
            cox_lead_link_give_up(&links.lead, "another lead has taken over");
        uint8_t bytes[COX_FRAME_HEAD_SIZE + 255];
        if (what < 64) {
            /* Of the links' life; bits 0-2: kind; bit 5: a request to all, or of a recorder */
            const uint32_t kind = what & 32 && 1 + what % 8 != COX_FRAME_REQUEST
                                      ? COX_FRAME_RECORDER_ASK + what % 2
                                      : 1 + what % 8;
            struct cox_frame frame = {.kind = (enum cox_frame_kind)kind,
                                      .channel = fuzz_eat_byte(input) % COX_TWO_WAY_COUNT,
                                      .epoch = links.agent.epoch,
                                      .incarnation = links.agent.incarnation,
                                      .deadline_ns = COX_DEADLINE_NEVER};
            if (what & 32 && frame.kind == COX_FRAME_REQUEST) {
                frame.kind = COX_FRAME_REQUEST_ALL;
                frame.incarnation = links.agent.peers_version;
            }
            uint64_t *const words[] = {&frame.sequence, &frame.previous, &frame.sent_ns,
                                       &frame.void_through};
            for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
                *words[i] = fuzz_eat_byte(input);
            if (what & 8)
                fuzz_eat(input, &frame.sequence, sizeof frame.sequence);
            if (what & 16)
                fuzz_eat(input, &frame.deadline_ns, sizeof frame.deadline_ns);
            frame.size = fuzz_eat_byte(input);
            cox_frame_pack_head(&frame, bytes);
            fuzz_eat(input, bytes + COX_FRAME_HEAD_SIZE, frame.size);
            uint8_t *exact = malloc(COX_FRAME_HEAD_SIZE + frame.size);
            FUZZ_CHECK(exact);
            memcpy(exact, bytes, COX_FRAME_HEAD_SIZE + frame.size);
            frame_take(&links, exact, COX_FRAME_HEAD_SIZE + frame.size);
            free(exact);
        } else if (what < 96) {
            publish(&links, fuzz_eat_byte(input));
        } else if (what < 128) {
            run(&links, what);
        } else if (what < 192) {
            links.now_ns += (uint64_t)fuzz_eat_byte(input) * 4 * MS;
            cox_lead_link_tick(&links.lead, links.now_ns);
            cox_agent_link_tick(&links.agent, links.now_ns);
            if (links.lead.state == COX_NODE_ABSENT)
                cox_lead_link_admit(&links.lead, AGENT, links.now_ns);
        } else {
            size_t size = fuzz_eat_byte(input);
            fuzz_eat(input, bytes, size);
            frame_take(&links, bytes, size);
        }
    }
    links_close(&links);
}

/* ---- answers ---- */

static void answers(const struct fuzz_input *input)
{
    struct cox_answer answer;
    struct cox_error err = {0};
    int r = cox_answer_unpack(input->bytes, input->size, RANK_FIRST, RANK_FIRST + RANK_COUNT,
                              &answer, &err);
    if (r) {
        FUZZ_CHECK(r == COX_CORRUPT);
        fuzz_check_error(r, &err);
        return;
    }
    FUZZ_CHECK(answer.count <= RANK_COUNT && cox_answer_size(&answer) == input->size);
    for (uint32_t i = 0; i < answer.count; i++)
        fuzz_touch(answer.replies[i].bytes, answer.replies[i].size);
    uint8_t *again = malloc(input->size);
    FUZZ_CHECK(again);
    cox_answer_pack(&answer, again);
    FUZZ_CHECK(memcmp(again, input->bytes, input->size) == 0);
    free(again);
}

/* ---- mirrors ---- */

#define VALUE_SIZE 4096u

struct memory {
    void *words[WORLD], *values[WORLD];
    void *wakeups;
    struct cox_group_mirror *mirror;
};

/* Zeroed; allocated once, since that takes longer than a run. */
static void memory_open(struct memory *memory, uint32_t rank_first, uint32_t rank_here)
{
    struct cox_error err = {0};
    const size_t wakeups = (1 + WORLD * COX_SUBGROUP_COUNT_MAX) * COX_GROUP_LINE_SIZE;
    const size_t words = sizeof(struct cox_group_layout_rank);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        if (!memory->words[rank])
            memory->words[rank] = aligned_alloc(COX_GROUP_LINE_SIZE, words);
        if (!memory->values[rank])
            memory->values[rank] = calloc(1, cox_group_values_stride(VALUE_SIZE));
        FUZZ_CHECK(memory->words[rank] && memory->values[rank]);
        memset(memory->words[rank], 0, words);
    }
    if (!memory->wakeups)
        memory->wakeups = aligned_alloc(COX_GROUP_LINE_SIZE, wakeups);
    FUZZ_CHECK(memory->wakeups);
    memset(memory->wakeups, 0, wakeups);
    const struct cox_group_mirror_options options = {.fd = -1,
                                                     .words = memory->words,
                                                     .values = memory->values,
                                                     .wakeups = memory->wakeups,
                                                     .rank_count = WORLD,
                                                     .value_size = VALUE_SIZE,
                                                     .incarnation = 1,
                                                     .rank_first = rank_first,
                                                     .rank_here = rank_here};
    FUZZ_CHECK(cox_group_mirror_open(&options, &memory->mirror, &err) == 0);
}

static void memory_close(struct memory *memory)
{
    memory->mirror = cox_group_mirror_close(memory->mirror);
}

/* Ranks 5 and 6 are elsewhere. */
static void mirror_apply(const struct fuzz_input *input)
{
    static struct memory memory;
    struct cox_error err = {0};
    memory_open(&memory, RANK_FIRST, RANK_COUNT);
    int r = cox_group_mirror_apply(memory.mirror, 5, 2, input->bytes, input->size, &err);
    FUZZ_CHECK(r == 0 || r == COX_CORRUPT);
    if (r)
        fuzz_check_error(r, &err);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        const uint8_t *bytes = memory.words[rank];
        for (size_t i = 0; (rank < 5 || rank > 6) && i < sizeof(struct cox_group_layout_part); i++)
            FUZZ_CHECK(bytes[i] == 0); /* not theirs */
    }
    memory_close(&memory);
}

/* Whatever a rank has left there, what is collected fits, and can be applied. */
static void mirror_collect(struct fuzz_input *input)
{
    static struct memory memory, other;
    static uint8_t *buffer;
    struct cox_error err = {0};
    memory_open(&memory, RANK_FIRST, RANK_COUNT);
    const size_t size_max = cox_group_mirror_size_max(memory.mirror);
    buffer = buffer ? buffer : malloc(size_max);
    FUZZ_CHECK(buffer);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < RANK_COUNT; i++) {
            struct cox_group_layout_rank *rank = memory.words[RANK_FIRST + i];
            fuzz_eat(input, &rank->identity, 32);
            atomic_store(&rank->identity.incarnation, 1);
            for (uint32_t slot = 0; slot < COX_GROUP_PART_COUNT; slot++) {
                struct cox_group_layout_part *part = &rank->parts[slot];
                const uint8_t how = fuzz_eat_byte(input);
                if (how & 1)
                    fuzz_eat(input, part, 60);
                else
                    atomic_fetch_add(&part->arrived, how >> 2 & 3);
                /* As if the rank had arrived. */
                const uint64_t arrived = atomic_load(&part->arrived);
                const uint32_t index = (uint32_t)arrived & COX_GROUP_INDEX_MASK;
                if (how & 2) {
                    atomic_store(&part->mirror, cox_group_mirror(1, arrived));
                    for (uint32_t k = 0; k < 2; k++)
                        atomic_store(&part->what[(index - k) & 1],
                                     cox_group_what(index - k, VALUE_SIZE + 1, how >> 4));
                }
            }
        }
        const size_t size = cox_group_mirror_collect(memory.mirror, buffer);
        FUZZ_CHECK(size <= size_max);
        memory_open(&other, 0, 1);
        FUZZ_CHECK(
            cox_group_mirror_apply(other.mirror, RANK_FIRST, RANK_COUNT, buffer, size, &err) == 0);
        memory_close(&other);
    }
    memory_close(&memory);
}

/* ---- flight recorders ---- */

/* A payload of about a recorder's size: zeroes with pieces of the input in it. */
static void recorder(struct fuzz_input *input)
{
    const uint64_t size_right = cox_recorder_area_size(false);
    const uint8_t how = fuzz_eat_byte(input);
    const uint64_t sizes[] = {size_right,     size_right,           size_right - 1,
                              size_right + 1, fuzz_eat_byte(input), 0};
    const uint64_t size = sizes[how % 6];
    struct cox_recorder_fetches fetches = {0};
    struct cox_recorder_fetch fetch = {.rank = RANK_FIRST, .copy = malloc(size_right)};
    uint8_t *payload = calloc(1, size + 1);
    struct cox_frame frame = {.kind = COX_FRAME_RECORDER, .sequence = fuzz_eat_byte(input)};
    FUZZ_CHECK(payload && fetch.copy);
    frame.asked.words[0] = fuzz_eat_byte(input);
    if (how & 64 && size >= size_right)
        cox_recorder_area_init(payload, RANK_FIRST, 1, NULL, COX_RECORDER_NS);
    while (input->size && size) {
        uint16_t at;
        fuzz_eat(input, &at, sizeof at);
        const uint64_t offset = (uint64_t)at * 8 % size, left = size - offset;
        fuzz_eat(input, payload + offset, left < 64 ? left : 64);
    }
    frame.payload = payload;
    frame.size = size;
    cox_recorder_fetch_begin(&fetches, &fetch);
    const bool done = cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT);
    FUZZ_CHECK(done == fetch.done);
    FUZZ_CHECK(!done || (frame.sequence == 1 && cox_rank_set_has(&frame.asked, RANK_FIRST)));
    FUZZ_CHECK(!done || fetch.status || size == size_right);
    if (fetch.err.code)
        fuzz_check_error(fetch.status, &fetch.err);
    if (done && fetch.status == 0) {
        int64_t by = 0;
        memcpy(&by, payload + 64, sizeof by);
        cox_recorder_shift(fetch.copy, by);
        for (int ring = 0; ring < COX_TWO_WAY_COUNT; ring++)
            for (uint32_t i = 0; i < cox_recorder_capacity(ring); i++) {
                struct cox_record before, after;
                const bool there = cox_recorder_read(payload, false, ring, i, &before);
                FUZZ_CHECK(there == cox_recorder_read(fetch.copy, false, ring, i, &after));
                FUZZ_CHECK(!there || !before.taken_ns == !after.taken_ns);
            }
    }
    cox_recorder_fetch_end(&fetches, &fetch);
    FUZZ_CHECK(!fetches.first);
    free(payload);
    free(fetch.copy);
}

/* ---- stacks ---- */

static void stacks(struct fuzz_input *input)
{
    struct cox_stacks_fetch fetch = {0};
    struct cox_frame frame = {.kind = COX_FRAME_STACKS, .sequence = fuzz_eat_byte(input) % 4};
    cox_stacks_fetch_begin(&fetch);
    fuzz_eat(input, &fetch.awaited, sizeof fetch.awaited);
    fuzz_eat(input, &frame.asked, sizeof frame.asked);
    uint8_t *payload = malloc(input->size + 1);
    FUZZ_CHECK(payload);
    frame.size = input->size;
    fuzz_eat(input, payload, frame.size);
    frame.payload = payload;
    if (cox_stacks_fetch_take(&fetch, &frame, RANK_FIRST, RANK_COUNT)) {
        uint32_t taken = RANK_FIRST;
        while (!fetch.texts[taken])
            FUZZ_CHECK(++taken < RANK_FIRST + RANK_COUNT);
        FUZZ_CHECK(!cox_rank_set_has(&fetch.awaited, taken));
        FUZZ_CHECK(memcmp(fetch.texts[taken], payload, frame.size) == 0);
        FUZZ_CHECK(fetch.texts[taken][frame.size] == '\0');
        free(fetch.texts[taken]);
    }
    free(payload);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    switch (fuzz_eat_byte(&input) % 6) {
    case 0:
        frames(&input);
        break;
    case 1:
        answers(&input);
        break;
    case 2:
        mirror_apply(&input);
        break;
    case 3:
        mirror_collect(&input);
        break;
    case 4:
        recorder(&input);
        break;
    default:
        stacks(&input);
        break;
    }
    return 0;
}
