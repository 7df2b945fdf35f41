/* A lead that takes over, requests to all nodes, and what else a lead asks of its nodes
 * (nodes/link). */
#include "channel/recorder/recorder.h"
#include "nodes/link/limits.h"
#include "nodes/link/recorder_fetch.h"
#include "nodes/link/stacks_fetch.h"
#include "link_world.h"

#include <coxswain/version.h>

/* ---- two leads ---- */

/* From its next tick on: it believes then that it has heard the node suspect_ms ago. */
static void lead_wakes(struct world *world, struct lead *lead)
{
    const uint64_t tick_ns = LEAD_TICK_MS * MS;
    lead->alive = true;
    lead->heard_ns = (world->now_ns / tick_ns + 1) * tick_ns - times.suspect_ms * MS;
}

WORLD_TEST(a_lead_learns_that_it_was_taken_over)
{
    struct lead *old = &world->leads[0], *new = &world->leads[1];
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 50);
    old->alive = false; /* stopped */
    world_run(world, times.dead_ms + 50);
    assert_int_equal(world->agent.state, COX_LEAD_LOST);
    lead_start(world, 1, 11, 1000);
    world_run(world, 500);
    assert_true(new->attached[0] && new->attached[1]);
    /* A rank of it is being started. */
    cox_lead_link_want(&old->link, RANK_FIRST, old->wanted[0] = 2);
    old->attached[0] = false;
    old->link.ranks[0].attached = 0;
    lead_wakes(world, old);
    world_run(world, 50);
    assert_true(old->superseded);
    assert_int_equal(old->link.state, COX_NODE_ABSENT);
    assert_false(old->attached[0] || old->attached[1]);
    assert_string_equal(old->died_text, "is lost: node b is gone: another lead has taken over");
    assert_int_equal(old->wanted[0], 3); /* and so has that one */
    assert_int_equal(world->agent.epoch, 11);
    assert_int_equal(new->link.state, COX_NODE_ALIVE);
    /* Once in 100 ms, whatever it sends. */
    const struct cox_frame of_old = {.kind = COX_FRAME_REQUEST, .epoch = 10, .incarnation = 1};
    const uint64_t said_ns = world->agent.hello_ns;
    assert_true(said_ns > 0);
    assert_false(cox_agent_link_greets(&world->agent, &of_old, COX_STALE, said_ns + 99 * MS));
    assert_true(cox_agent_link_greets(&world->agent, &of_old, COX_STALE, said_ns + 100 * MS));
    const struct cox_frame seek = {.kind = COX_FRAME_SEEK, .epoch = 10};
    assert_false(cox_agent_link_greets(&world->agent, &seek, COX_STALE, said_ns + 99 * MS));
    assert_true(cox_agent_link_greets(&world->agent, &seek, COX_STALE, said_ns + 100 * MS));
    const struct cox_frame of_new = {.kind = COX_FRAME_REQUEST, .epoch = 11, .incarnation = 7};
    assert_false(cox_agent_link_greets(&world->agent, &of_new, COX_STALE, said_ns + 100 * MS));
    world_run(world, 300);
    const uint32_t ended = new->ended;
    assert_true(lead_publish(world, new, COX_CHANNEL_EXECUTE, 3, true, COX_DEADLINE_NEVER));
    world_run(world, 100);
    assert_int_equal(new->ended, ended + 1);
}

/* What was sent to it meanwhile is yet to be read. */
WORLD_TEST(a_lead_that_was_stopped_blames_no_node)
{
    lead->alive = false;
    world_run(world, 700);
    lead_wakes(world, lead);
    world->cut_to_lead_ns = world->now_ns + 200 * MS;
    world_run(world, 100);
    assert_int_equal(lead->link.state, COX_NODE_SUSPECT);
    world_run(world, 300);
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    assert_int_equal(lead->deaths, 0);
    /* But silence of 500 ms more is its death. */
    lead->alive = false;
    world_run(world, 700);
    lead_wakes(world, lead);
    world->cut_to_lead_ns = world->now_ns + 2000 * MS;
    world_run(world, times.dead_ms - times.suspect_ms + 20);
    assert_int_equal(lead->deaths, 1);
}

PLAIN_TEST(another_release_is_refused)
{
    struct world *world = world_new(0, NULL);
    const struct cox_lead_link *link = &world->leads[0].link;
    CoxNode__Hello hello = COX_NODE__HELLO__INIT;
    char text[320];
    hello.protocol = COX_FRAME_PROTOCOL;
    hello.version = (char *)(uintptr_t)COX_VERSION_TEXT;
    assert_true(cox_lead_link_release_agrees(link, &hello, text, sizeof text));
    hello.version = (char *)(uintptr_t) "0.9.7";
    assert_false(cox_lead_link_release_agrees(link, &hello, text, sizeof text));
    assert_string_equal(text, "node b has Coxswain 0.9.7, the lead has " COX_VERSION_TEXT
                              ": install the same version");
    hello.protocol = COX_FRAME_PROTOCOL + 7;
    assert_false(cox_lead_link_release_agrees(link, &hello, text, sizeof text));
    assert_contains(text, "0.9.7, whose protocol between nodes is 8; the lead has ");
    hello.version = NULL;
    hello.protocol = COX_FRAME_PROTOCOL;
    assert_false(cox_lead_link_release_agrees(link, &hello, text, sizeof text));
    assert_contains(text, "Coxswain ?, ");
    world_free(world);
}

/* A lead whose numbers are nonsense does not keep the agent busy. */
/* One frame for all nodes: an agent takes it only if it has the peers that the frame is of. */
WORLD_TEST(a_request_to_all)
{
    struct cox_agent_link *agent = &world->agent;
    uint8_t bytes[COX_FRAME_HEAD_SIZE + 4] = {0}, other[sizeof bytes];
    struct cox_frame frame = {.kind = COX_FRAME_REQUEST,
                              .epoch = agent->epoch,
                              .incarnation = 1,
                              .sequence = 1,
                              .asked = {{UINT64_C(3) << RANK_FIRST, 0}},
                              .deadline_ns = COX_DEADLINE_NEVER,
                              .size = 4};
    uint64_t deadline_ns;
    agent->peers_version = 5;
    cox_frame_pack_head(&frame, bytes);
    frame.incarnation = 2;
    cox_frame_pack_head(&frame, other);
    memset(other + COX_FRAME_HEAD_SIZE, 0, 4);
    assert_true(cox_frame_same_for_all(bytes, other, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++) {
        other[i] ^= 1;
        assert_int_equal(cox_frame_same_for_all(bytes, other, sizeof bytes), i / 8 == 3);
        other[i] ^= 1;
    }
    for (uint64_t version = 4; version <= 6; version++) {
        cox_frame_address_all(bytes, version);
        assert_int_equal(cox_frame_unpack(bytes, sizeof bytes, &frame, NULL), 0);
        assert_true(frame.kind == COX_FRAME_REQUEST_ALL && frame.sequence == 1);
        const int r = cox_agent_link_receive(agent, &frame, agent_now(world), NULL);
        assert_int_equal(r, version == 5 ? 0 : COX_STALE);
        assert_int_equal(cox_agent_link_next(agent, 0, agent_now(world), &frame, &deadline_ns),
                         version >= 5);
    }
    frame.epoch--;
    assert_int_equal(cox_agent_link_receive(agent, &frame, agent_now(world), NULL), COX_STALE);
}

WORLD_TEST(numbers_far_apart)
{
    struct cox_frame next;
    uint64_t deadline_ns;
    alarm(20);
    for (uint32_t i = 0; i < 2; i++) {
        const struct cox_frame frame = {.kind = COX_FRAME_REQUEST,
                                        .epoch = 10,
                                        .incarnation = 1,
                                        .sequence = UINT64_MAX / 2 + i,
                                        .previous = i ? UINT64_MAX / 2 : 0,
                                        .deadline_ns = COX_DEADLINE_NEVER,
                                        .sent_ns = world->now_ns};
        assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), NULL), 0);
        assert_true(cox_agent_link_next(&world->agent, 0, agent_now(world), &next, &deadline_ns));
        cox_agent_link_taken(&world->agent, 0, next.sequence, true);
    }
    alarm(0);
    assert_true(world->agent.channels[0].done == UINT64_MAX / 2 + 1);
}

/* ---- flight recorders ---- */

/* A reply to the fetch, of that many bytes more than a recorder has. */
static void recorder_reply(const struct cox_recorder_fetch *fetch, const void *copy, int more,
                           struct cox_frame *ret_frame)
{
    const struct cox_frame ask = {.kind = COX_FRAME_RECORDER_ASK, .sequence = fetch->number};
    size_t size;
    uint8_t *bytes = test_own(cox_recorder_fetch_reply(&ask, fetch->rank, copy, 7, &size), free);
    assert_int_equal(cox_frame_unpack(bytes, size, ret_frame, NULL), 0);
    if (more) {
        size = (size_t)((int64_t)size + more);
        uint8_t *other = test_own(calloc(1, size), free);
        ret_frame->size = size - COX_FRAME_HEAD_SIZE;
        memcpy(other, bytes, more < 0 ? size : size - (size_t)more);
        cox_frame_pack_head(ret_frame, other);
        assert_int_equal(cox_frame_unpack(other, size, ret_frame, NULL), 0);
    }
}

PLAIN_TEST(recorders_are_awaited_and_checked)
{
    const size_t size = cox_recorder_area_size(false);
    uint8_t *area = test_own(calloc(1, size), free), *copy = test_own(calloc(1, size), free);
    struct cox_recorder_fetches fetches = {0};
    struct cox_recorder_fetch fetch = {.rank = RANK_FIRST + 1, .copy = copy}, other = fetch;
    struct cox_frame frame;
    cox_recorder_area_init(area, fetch.rank, 1, NULL, COX_RECORDER_NS);
    memset(area + 4096, 0x5a, 64);
    cox_recorder_fetch_begin(&fetches, &other);
    cox_recorder_fetch_begin(&fetches, &fetch);
    assert_true(fetch.number != other.number);
    recorder_reply(&fetch, area, 0, &frame);
    assert_true(frame.kind == COX_FRAME_RECORDER && frame.size == size);
    /* Not from a node that does not have the rank, nor for another rank, nor twice. */
    assert_false(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST + 2, RANK_COUNT));
    assert_false(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, 1));
    struct cox_frame wrong = frame;
    wrong.asked = (struct cox_rank_set){{0}};
    assert_false(cox_recorder_fetch_take(&fetches, &wrong, "b", RANK_FIRST, RANK_COUNT));
    wrong = frame;
    wrong.sequence += 100;
    assert_false(cox_recorder_fetch_take(&fetches, &wrong, "b", RANK_FIRST, RANK_COUNT));
    assert_true(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    assert_true(fetch.done && fetch.status == 0 && !other.done);
    assert_memory_equal(copy, area, size);
    assert_false(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    cox_recorder_fetch_end(&fetches, &other);
    cox_recorder_fetch_end(&fetches, &fetch);
    assert_null(fetches.first);
    assert_false(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    /* Bytes that are no recorder of this rank are refused in words, and not copied. */
    static const struct {
        int more;
        uint32_t rank;
        uint8_t offset, value;
        const char *text;
    } bad[] = {
        {.more = 1, .rank = RANK_FIRST + 1, .text = "node b sent 223233 bytes"},
        {.more = -1, .rank = RANK_FIRST + 1, .text = "node b sent 223231 bytes"},
        {.more = 8 - (int)223232, .rank = RANK_FIRST + 1, .text = "node b sent 8 bytes"},
        {.rank = RANK_FIRST, .text = "of another process than rank"},
        {.rank = COX_RECORDER_COORDINATOR, .text = "node b sent no recorder"},
        {.rank = COX_RANK_COUNT_MAX, .text = "node b sent no recorder"},
        {.rank = RANK_FIRST + 1, .offset = 0, .value = 1, .text = "magic"},
        {.rank = RANK_FIRST + 1, .offset = 8, .value = 9, .text = "version 9"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(area, 0, size);
        memset(copy, 0, size);
        cox_recorder_area_init(area, bad[i].rank, 1, NULL, COX_RECORDER_NS);
        if (bad[i].value)
            area[bad[i].offset] = bad[i].value;
        cox_recorder_fetch_begin(&fetches, &fetch);
        recorder_reply(&fetch, area, bad[i].more, &frame);
        assert_true(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
        assert_int_equal(fetch.status, COX_CORRUPT);
        assert_int_equal(fetch.err.code, COX_CORRUPT);
        if (!strstr(fetch.err.text, bad[i].text))
            fail_msg("'%s' instead of '%s'", fetch.err.text, bad[i].text);
        for (size_t k = 0; k < size; k++)
            assert_int_equal(copy[k], 0);
        cox_recorder_fetch_end(&fetches, &fetch);
    }
    /* Nothing is recorded. */
    cox_recorder_fetch_begin(&fetches, &fetch);
    recorder_reply(&fetch, NULL, 0, &frame);
    assert_int_equal(frame.size, 0);
    assert_true(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    assert_true(fetch.status == COX_NOT_FOUND && fetch.err.code == 0);
}

WORLD_TEST(recorders_are_asked_for_by_the_lead_that_is_followed)
{
    struct cox_agent_link *agent = &world->agent;
    struct cox_frame ask = {.kind = COX_FRAME_RECORDER_ASK,
                            .epoch = agent->epoch,
                            .incarnation = agent->incarnation,
                            .sent_ns = world->now_ns};
    assert_int_equal(cox_agent_link_receive(agent, &ask, agent_now(world), NULL), 0);
    /* That frame had no way at all: the clocks differ by no more. */
    assert_true(cox_agent_link_offset(agent) == (int64_t)SKEW_NS);
    ask.epoch--;
    assert_int_equal(cox_agent_link_receive(agent, &ask, agent_now(world), NULL), COX_STALE);
}

/* ---- stacks ---- */

static struct cox_frame stacks_unpack(uint8_t *bytes, size_t size)
{
    struct cox_frame frame;
    test_own(bytes, free);
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    assert_int_equal(frame.kind, COX_FRAME_STACKS);
    return frame;
}

PLAIN_TEST(stacks_are_awaited)
{
    struct cox_stacks_fetch fetch = {0};
    struct cox_frame ask = {.kind = COX_FRAME_STACKS_ASK, .epoch = 3, .incarnation = 4};
    size_t size;
    cox_stacks_fetch_begin(&fetch);
    assert_false(cox_stacks_fetch_awaits(&fetch));
    cox_rank_set_add(&fetch.awaited, RANK_FIRST);
    cox_rank_set_add(&fetch.awaited, RANK_FIRST + 1);
    ask.sequence = fetch.number;
    uint8_t *bytes = cox_stacks_fetch_reply(&ask, RANK_FIRST, "in a", "process 7\n", 7, &size);
    struct cox_frame frame = stacks_unpack(bytes, size), wrong = frame;
    assert_true(frame.epoch == 3 && frame.incarnation == 4);
    /* Not from a node that does not have the rank, nor for another question, nor twice. */
    assert_false(cox_stacks_fetch_take(&fetch, &frame, RANK_FIRST + 1, 1));
    wrong.sequence++;
    assert_false(cox_stacks_fetch_take(&fetch, &wrong, RANK_FIRST, RANK_COUNT));
    wrong = frame;
    wrong.asked = (struct cox_rank_set){{0}};
    assert_false(cox_stacks_fetch_take(&fetch, &wrong, RANK_FIRST, RANK_COUNT));
    assert_true(cox_stacks_fetch_take(&fetch, &frame, RANK_FIRST, RANK_COUNT));
    assert_string_equal(fetch.texts[RANK_FIRST], "summary: in a\nprocess 7\n");
    assert_false(cox_stacks_fetch_take(&fetch, &frame, RANK_FIRST, RANK_COUNT));
    assert_true(cox_stacks_fetch_awaits(&fetch));
    free(fetch.texts[RANK_FIRST]);
    /* What was asked before is awaited no more. */
    cox_stacks_fetch_begin(&fetch);
    cox_rank_set_add(&fetch.awaited, RANK_FIRST);
    assert_false(cox_stacks_fetch_take(&fetch, &frame, RANK_FIRST, RANK_COUNT));
}

PLAIN_TEST(stacks_have_a_limit)
{
    struct cox_stacks_fetch fetch = {0};
    const struct cox_frame ask = {.kind = COX_FRAME_STACKS_ASK, .sequence = 1};
    char *text = test_own(malloc(2 * COX_FRAME_STACKS_MAX), free);
    size_t size;
    memset(text, 'a', 2 * COX_FRAME_STACKS_MAX);
    text[2 * COX_FRAME_STACKS_MAX - 1] = '\0';
    cox_stacks_fetch_begin(&fetch);
    cox_rank_set_add(&fetch.awaited, RANK_FIRST);
    uint8_t *bytes = cox_stacks_fetch_reply(&ask, RANK_FIRST, "in a", text, 7, &size);
    const struct cox_frame frame = stacks_unpack(bytes, size);
    assert_int_equal(frame.size, COX_FRAME_STACKS_MAX);
    assert_true(cox_stacks_fetch_take(&fetch, &frame, RANK_FIRST, RANK_COUNT));
    assert_int_equal(strlen(fetch.texts[RANK_FIRST]), COX_FRAME_STACKS_MAX);
    free(fetch.texts[RANK_FIRST]);
}

WORLD_TEST(stacks_are_asked_for_by_the_lead_that_is_followed)
{
    struct cox_agent_link *agent = &world->agent;
    struct cox_frame ask = {.kind = COX_FRAME_STACKS_ASK,
                            .epoch = agent->epoch,
                            .incarnation = agent->incarnation,
                            .sent_ns = world->now_ns};
    assert_int_equal(cox_agent_link_receive(agent, &ask, agent_now(world), NULL), 0);
    ask.epoch--;
    assert_int_equal(cox_agent_link_receive(agent, &ask, agent_now(world), NULL), COX_STALE);
}

WORLD_TEST(usage_is_in_one_beat)
{
    const struct cox_lead_rank *rank = &lead->link.ranks[1];
    struct cox_agent_rank is = {.incarnation = 1, .state = COX_NODE__RANK_STATE__DEAD, .pid = 101};
    assert_true(lead->attached[1] && !rank->cpu_ns && !rank->resident_bytes);
    world->agent.ranks[1].cpu_ns = 5;
    world->agent.ranks[1].resident_bytes = 6;
    world_run(world, 150);
    assert_true(rank->cpu_ns == 5 && rank->resident_bytes == 6);
    assert_true(!world->agent.ranks[1].cpu_ns && !world->agent.ranks[1].resident_bytes);
    world_run(world, 150); /* beats without it change nothing */
    assert_true(rank->cpu_ns == 5 && rank->resident_bytes == 6);
    /* It is not the next process's. */
    world->dead[1] = true;
    cox_agent_link_set_rank(&world->agent, RANK_FIRST + 1, &is);
    world_run(world, 300);
    assert_true(lead->attached[1] && lead->wanted[1] == 2);
    assert_true(!rank->cpu_ns && !rank->resident_bytes);
}

/* ---- peers that lie ---- */

#define REAL_NS (UINT64_C(1800000000) * COX_NSEC_PER_SEC)
#define HOUR_NS (3600 * COX_NSEC_PER_SEC)

static void hello_refused(const CoxNode__Hello *hello, const char *text)
{
    struct cox_error err = {0};
    assert_int_equal(cox_hello_check(hello, REAL_NS, &err), COX_CORRUPT);
    assert_contains(err.text, text);
}

PLAIN_TEST(hellos_that_cannot_be_are_refused)
{
    CoxNode__Channel channels[2] = {COX_NODE__CHANNEL__INIT, COX_NODE__CHANNEL__INIT};
    CoxNode__Channel *channel_pointers[] = {&channels[0], &channels[1]};
    CoxNode__Fact fact = COX_NODE__FACT__INIT;
    CoxNode__Fact *facts[COX_HELLO_FACT_MAX + 1];
    for (size_t i = 0; i < COX_HELLO_FACT_MAX + 1; i++)
        facts[i] = &fact;
    fact.name = (char *)(uintptr_t) "model digest";
    fact.value = (char *)(uintptr_t) "\xc3\xa4";
    const CoxNode__Hello honest = {.base = PROTOBUF_C_MESSAGE_INIT(&cox_node__hello__descriptor),
                                   .version = (char *)(uintptr_t)COX_VERSION_TEXT,
                                   .address = (char *)(uintptr_t) "10.0.0.3:4000",
                                   .epoch = REAL_NS + 23 * HOUR_NS,
                                   .n_channels = 2,
                                   .channels = channel_pointers,
                                   .n_facts = COX_HELLO_FACT_MAX,
                                   .facts = facts};
    channels[1].through = COX_NODE_SEQUENCE_MAX;
    assert_ok(cox_hello_check(&honest, REAL_NS, test_err()));
    CoxNode__Hello lie = honest;
    lie.epoch = REAL_NS + 25 * HOUR_NS;
    hello_refused(&lie, "25 h ahead of the clock");
    lie.epoch = UINT64_MAX - 1;
    hello_refused(&lie, "its hello says that it follows epoch 18446744073709551614");
    lie = honest;
    lie.rank_group_incarnation = REAL_NS;
    hello_refused(&lie, "incarnation 1800000000000000000");
    lie = honest;
    lie.world = COX_RANK_COUNT_MAX + 1;
    hello_refused(&lie, "of 129: a group has 128");
    lie = honest;
    lie.n_facts++;
    hello_refused(&lie, "its hello has 65 facts: at most 64");
    lie = honest;
    lie.address = (char *)(uintptr_t) "10.0.0.3:4000\nnode a is dead";
    hello_refused(&lie, "0x0a in its address");
    lie.address = honest.address;
    lie.lead_address = (char *)(uintptr_t) "\033[2J";
    hello_refused(&lie, "0x1b in its lead's address");
    lie.lead_address = NULL;
    fact.value = (char *)(uintptr_t) "\r";
    hello_refused(&honest, "0x0d in its facts");
    fact.value = (char *)(uintptr_t) "\xc2\x9b";
    hello_refused(&honest, "0xc2 in its facts");
    fact.value = NULL;
    for (int bits = 40; bits < 64; bits++) {
        channels[1].through = UINT64_C(1) << bits;
        hello_refused(&honest, "of channel 1: no lead can have sent more");
    }
}

WORLD_TEST(beats_of_requests_that_were_not_sent)
{
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 50);
    const uint64_t sent = lead->link.channels[COX_CHANNEL_EXECUTE].last_sent;
    const uint64_t heard_ns = lead->link.heard_ns;
    CoxNode__Channel channel = COX_NODE__CHANNEL__INIT, *channels = &channel;
    CoxNode__AgentBeat beat = COX_NODE__AGENT_BEAT__INIT;
    uint64_t answered = sent + 1;
    beat.has_agent = 1;
    beat.agent = lead->link.agent;
    beat.n_channels = 1;
    beat.channels = &channels;
    channel.has_through = channel.has_done = 1;
    for (int lie = 0; lie < 4; lie++) {
        channel.through = sent + (lie == 0);
        channel.done = lie == 1 ? UINT64_MAX : sent;
        channel.n_answered = lie == 2;
        channel.answered = lie == 2 ? &answered : NULL;
        const struct cox_frame frame = frame_of(world, COX_FRAME_AGENT_BEAT, &beat.base);
        struct cox_error err = {0};
        const int r = cox_lead_link_receive(&lead->link, &frame, heard_ns + 7, &err);
        assert_int_equal(r, lie < 3 ? COX_CORRUPT : 0);
        assert_true(lie == 3 || strstr(err.text, "the last one that was sent is "));
        assert_int_equal(lead->link.heard_ns, lie < 3 ? heard_ns : heard_ns + 7); /* no life */
    }
}

/* Each agent counts from its start on; what nodes have said is not counted again. */
WORLD_TEST(refused_connections_are_summed)
{
    struct cox_lead_link *link = &world->leads[0].link;
    world->agent.refused = 5;
    world->agent.changed = true;
    world_run(world, 50);
    assert_int_equal(link->refused, 5);
    world->agent.refused = 7;
    world->agent.changed = true;
    world_run(world, 500);
    assert_int_equal(link->refused, 7);
    cox_lead_link_admit(link, link->agent, world->now_ns);
    assert_int_equal(link->refused_said, 7);
    cox_lead_link_admit(link, link->agent + 1, world->now_ns);
    assert_true(link->refused == 7 && link->refused_said == 0);
}

/* The lead had a clock of the future, which is over. */
WORLD_TEST(an_epoch_of_the_future_is_forgotten_when_no_lead_is_followed)
{
    struct cox_agent_link *agent = &world->agent;
    agent->epoch = REAL_NS + 25 * HOUR_NS;
    assert_false(cox_agent_link_forget(agent, REAL_NS)); /* it is followed */
    cox_agent_link_release(agent);
    assert_int_equal(agent->channels[COX_CHANNEL_EXECUTE].taken, 0);
    assert_false(cox_agent_link_forget(agent, REAL_NS + 2 * HOUR_NS));
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    welcome.epoch = REAL_NS;
    welcome.incarnation = 1;
    welcome.depth = 4;
    assert_int_equal(cox_agent_link_follow(agent, &welcome, agent_now(world)), COX_STALE);
    assert_true(cox_agent_link_forget(agent, REAL_NS));
    assert_int_equal(cox_agent_link_follow(agent, &welcome, agent_now(world)), 0);
}

PLAIN_TEST(frames_have_limits_by_kind)
{
    uint8_t *bytes = test_own(calloc(1, COX_FRAME_HEAD_SIZE + ((size_t)1 << 20) + 1), free);
    for (int kind = 1; kind < COX_FRAME_KIND_COUNT; kind++) {
        const size_t most = cox_frame_size_max((enum cox_frame_kind)kind);
        struct cox_frame frame = {.kind = (enum cox_frame_kind)kind}, again;
        struct cox_error err = {0};
        if (most > (size_t)1 << 20)
            continue;
        for (frame.size = most; frame.size <= most + 1; frame.size++) {
            cox_frame_pack_head(&frame, bytes);
            assert_int_equal(
                cox_frame_unpack(bytes, COX_FRAME_HEAD_SIZE + frame.size, &again, &err),
                frame.size > most ? COX_CORRUPT : 0);
        }
        assert_contains(err.text, "are taken");
    }
    assert_int_equal(cox_frame_size_max(COX_FRAME_HELLO), 1 << 20);
}
