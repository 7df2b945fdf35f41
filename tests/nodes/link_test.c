/* Both links of the protocol between a lead and the agent of a node (nodes/link/lead_link.h,
 * agent_link.h), joined by a network in memory that loses, repeats, delays and reorders, under
 * seeds; and the bytes of frames and answers.
 *
 * The world has one node, two leads of which the second takes over, and agents that follow each
 * other. Subjects are as those of NATS: what a lead sends goes to the agent of the moment, what an
 * agent sends to every lead. The agent's clock is not the lead's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "channel/recorder/recorder.h"
#include "channel/base/version.h"
#include "nodes/link/agent_link.h"
#include "nodes/link/lead_link.h"
#include "nodes/link/recorder_fetch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RANK_FIRST 2u
#define RANK_COUNT 2u
#define WORLD_SIZE 6u
#define DEPTH 4u
#define LEAD_COUNT 2u
#define MS COX_NSEC_PER_MSEC
#define SKEW_NS (UINT64_C(7777) * MS)
#define LEAD_TICK_MS 10
#define AGENT_TICK_MS 5
#define SEED_COUNT 3000
#define PACKET_MAX 4096

/* ---- the world ---- */

struct packet {
    uint64_t due_ns;
    bool to_lead;
    uint8_t *bytes;
    size_t size;
};

/* A request, as the executor of the lead sees it. */
struct asked {
    /* 0: none */
    uint64_t sequence;
    uint64_t incarnation;
    uint64_t deadline_ns;
    /* bits, of RANK_FIRST on */
    uint32_t owed, replied;
    bool replies, taken;
};

struct lead {
    bool alive;
    struct cox_lead_link link;
    struct cox_lead_events events;
    uint64_t seek_ns, heard_ns;
    uint64_t next[COX_TWO_WAY_COUNT];
    struct asked asked[COX_TWO_WAY_COUNT][DEPTH];
    uint64_t last_reply[COX_TWO_WAY_COUNT][RANK_COUNT];
    uint32_t wanted[RANK_COUNT];
    bool attached[RANK_COUNT];
    /* another lead has taken the node over */
    bool superseded;
    uint32_t ended, late, suspicions, deaths, ups;
    char died_text[256];
};

/* A request that the ranks of the agent have. */
struct work {
    /* 0: none */
    uint64_t sequence;
    uint64_t epoch, incarnation;
    uint64_t finish_ns, done_ns;
    uint32_t asked;
    bool answered;
};

struct faults {
    /* of 1000 */
    uint32_t loss, repeat;
    uint32_t delay_ms, delay_max_ms;
    bool reorder;
    /* each happens at any ms with this chance, of 100,000 */
    uint32_t partition, restart, rank_death, takeover;
    /* of 1000 answers, those that leave out a rank */
    uint32_t late;
};

struct world {
    uint64_t random;
    uint64_t now_ns;
    struct faults faults;
    /* until */
    uint64_t cut_to_lead_ns, cut_to_agent_ns;
    uint64_t last_due_ns[2];
    struct packet packets[PACKET_MAX];
    size_t packet_count;
    struct lead leads[LEAD_COUNT];
    uint32_t lead_now;
    struct cox_agent_link agent;
    uint64_t agent_id;
    uint32_t claimed[RANK_COUNT];
    bool dead[RANK_COUNT];
    struct work work[COX_TWO_WAY_COUNT][DEPTH];
    /* of the last request that ran, on any agent: epoch and number */
    uint64_t run_epoch[COX_TWO_WAY_COUNT], run_sequence[COX_TWO_WAY_COUNT];
    uint64_t followed_epoch, followed_incarnation;
    /* of frames that the agent took */
    uint64_t transit_min_ns;
    bool publishing;
    /* half of the requests go to all nodes, where the lead could send them so */
    bool to_all;
    uint64_t runs, resent, expired;
    /* frames that were sent, and their bytes, by kind */
    uint64_t sent[COX_FRAME_KIND_COUNT], sent_bytes[COX_FRAME_KIND_COUNT];
};

static const struct cox_node_times times = COX_NODE_TIMES_DEFAULT;
static uint64_t seed_now;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            print_message("seed %" PRIu64 "\n", seed_now);                                         \
            fail_msg("%s:%d: %s", __FILE__, __LINE__, #condition);                                 \
        }                                                                                          \
    } while (0)

static uint64_t random_next(struct world *world)
{
    world->random ^= world->random << 13;
    world->random ^= world->random >> 7;
    world->random ^= world->random << 17;
    return world->random * UINT64_C(0x2545f4914f6cdd1d) >> 16;
}

static bool chance(struct world *world, uint32_t of, uint32_t among)
{
    return of && random_next(world) % among < of;
}

/* Takes bytes. */
static void net_put(struct world *world, bool to_lead, uint8_t *bytes, size_t size, bool again)
{
    const uint64_t cut_ns = to_lead ? world->cut_to_lead_ns : world->cut_to_agent_ns;
    const struct faults *faults = &world->faults;
    world->sent[bytes[4]] += !again;
    world->sent_bytes[bytes[4]] += again ? 0 : size;
    if (world->now_ns < cut_ns || chance(world, faults->loss, 1000)) {
        free(bytes);
        return;
    }
    uint64_t due_ns = world->now_ns + faults->delay_ms * MS;
    if (faults->delay_max_ms > faults->delay_ms)
        due_ns += random_next(world) % (faults->delay_max_ms - faults->delay_ms) * MS;
    if (!faults->reorder && !again && due_ns < world->last_due_ns[to_lead])
        due_ns = world->last_due_ns[to_lead];
    if (!again)
        world->last_due_ns[to_lead] = due_ns;
    CHECK(world->packet_count < PACKET_MAX);
    world->packets[world->packet_count++] =
        (struct packet){.due_ns = due_ns, .to_lead = to_lead, .bytes = bytes, .size = size};
    if (!again && chance(world, faults->repeat, 1000)) {
        uint8_t *copy = malloc(size);
        assert_non_null(copy);
        memcpy(copy, bytes, size);
        world->faults.delay_max_ms += 400; /* as late as after a reconnection */
        net_put(world, to_lead, copy, size, true);
        world->faults.delay_max_ms -= 400;
    }
}

/* ---- the agent ---- */

struct value {
    uint64_t epoch, incarnation, sequence;
    uint32_t channel, rank;
};

static uint64_t agent_now(const struct world *world)
{
    return world->now_ns + SKEW_NS;
}

static void on_agent_send(void *context, uint8_t *bytes, size_t size)
{
    struct world *world = context;
    struct cox_frame frame;
    struct cox_answer answer;
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    CHECK(frame.epoch == world->agent.epoch && frame.incarnation == world->agent.incarnation);
    if (frame.kind == COX_FRAME_ANSWER) {
        CHECK(cox_answer_unpack(frame.payload, frame.size, RANK_FIRST, RANK_FIRST + RANK_COUNT,
                                &answer, NULL) == 0);
        /* Not run: then its deadline has passed on the lead's clock as well. */
        if (answer.status == COX_TIMEOUT && answer.count == 0) {
            world->expired++;
            for (uint32_t i = 0; i < LEAD_COUNT; i++) {
                const struct asked *asked =
                    &world->leads[i].asked[frame.channel][frame.sequence % DEPTH];
                if (world->leads[i].link.epoch == frame.epoch && asked->sequence == frame.sequence)
                    CHECK(asked->deadline_ns <= world->now_ns);
            }
        }
    }
    net_put(world, true, bytes, size, false);
}

static void agent_start(struct world *world)
{
    cox_agent_link_init(&world->agent, ++world->agent_id);
    world->agent.context = world;
    world->agent.send = on_agent_send;
    memset(world->claimed, 0, sizeof world->claimed);
    memset(world->dead, 0, sizeof world->dead);
    memset(world->work, 0, sizeof world->work);
}

static void agent_hello(struct world *world)
{
    CoxNode__Hello hello = COX_NODE__HELLO__INIT;
    CoxNode__Channel channels[COX_TWO_WAY_COUNT], *pointers[COX_TWO_WAY_COUNT];
    size_t size;
    hello.has_agent = 1;
    hello.agent = world->agent.agent;
    cox_agent_link_describe(&world->agent, agent_now(world), &hello, channels, pointers);
    const struct cox_frame head = {
        .kind = COX_FRAME_HELLO, .epoch = hello.epoch, .sent_ns = agent_now(world)};
    uint8_t *bytes = cox_frame_of_message(&head, &hello.base, &size);
    assert_non_null(bytes);
    net_put(world, true, bytes, size, false);
}

static void agent_answer(struct world *world, uint32_t c, struct work *work)
{
    struct cox_answer answer = {.status = 0};
    struct value values[RANK_COUNT];
    bool late = chance(world, world->faults.late, 1000), done = true;
    for (uint32_t i = 0; i < RANK_COUNT; i++) {
        if (!(work->asked >> i & 1))
            continue;
        struct cox_answer_reply *reply = &answer.replies[answer.count++];
        *reply = (struct cox_answer_reply){.rank = RANK_FIRST + i};
        if (world->dead[i]) {
            reply->flags = COX_ANSWER_DEAD;
        } else if (late) {
            late = done = false;
            answer.status = COX_TIMEOUT;
        } else {
            values[i] =
                (struct value){work->epoch, work->incarnation, work->sequence, c, reply->rank};
            reply->flags = COX_ANSWER_REPLIED;
            reply->bytes = (const uint8_t *)&values[i];
            reply->size = sizeof values[i];
        }
    }
    cox_agent_link_answer(&world->agent, c, work->sequence, &answer, done, agent_now(world));
    work->answered = true;
    if (done)
        *work = (struct work){0};
    else
        work->done_ns = world->now_ns + random_next(world) % 80 * MS;
}

static void agent_run(struct world *world)
{
    struct cox_agent_link *link = &world->agent;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct cox_frame frame;
        uint64_t deadline_ns;
        while (cox_agent_link_next(link, c, agent_now(world), &frame, &deadline_ns)) {
            struct work *work = &world->work[c][frame.sequence % DEPTH];
            if (work->sequence || chance(world, 100, 1000))
                break; /* the frame is in use, or so says the executor */
            /* Never again, in order, and of the lead that is followed. */
            CHECK(frame.epoch == world->followed_epoch);
            CHECK(frame.incarnation == world->followed_incarnation);
            CHECK(frame.epoch > world->run_epoch[c] ||
                  (frame.epoch == world->run_epoch[c] && frame.sequence > world->run_sequence[c]));
            CHECK(frame.deadline_ns == COX_DEADLINE_NEVER ||
                  world->now_ns < frame.deadline_ns + world->transit_min_ns);
            CHECK(frame.size == sizeof(uint64_t) && !memcmp(frame.payload, &frame.sequence, 8));
            world->run_epoch[c] = frame.epoch;
            world->run_sequence[c] = frame.sequence;
            world->runs++;
            const bool no_reply = frame.type == 1;
            cox_agent_link_taken(link, c, frame.sequence, no_reply);
            if (no_reply)
                continue;
            *work = (struct work){.sequence = frame.sequence,
                                  .epoch = frame.epoch,
                                  .incarnation = frame.incarnation,
                                  .finish_ns = world->now_ns + random_next(world) % 40 * MS};
            for (uint32_t i = 0; i < RANK_COUNT; i++)
                if (cox_rank_set_has(&frame.asked, RANK_FIRST + i))
                    work->asked |= 1u << i;
        }
    }
}

static void agent_work(struct world *world)
{
    struct cox_agent_link *link = &world->agent;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t k = 0; k < DEPTH; k++) {
            struct work *work = &world->work[c][k];
            if (!work->sequence)
                continue;
            if (!work->answered && work->finish_ns <= world->now_ns) {
                agent_answer(world, c, work);
            } else if (work->answered && work->done_ns <= world->now_ns) {
                cox_agent_link_done(link, c, work->sequence);
                *work = (struct work){0};
            }
        }
    for (uint32_t i = 0; i < RANK_COUNT && link->state == COX_LEAD_FOLLOWING; i++) {
        struct cox_agent_rank is = {.incarnation = link->wanted[i], .pid = 100 + i};
        if (world->claimed[i] && !world->dead[i] &&
            chance(world, world->faults.rank_death, 100000 / AGENT_TICK_MS)) {
            is.state = COX_NODE__RANK_STATE__DEAD;
            is.incarnation = world->claimed[i];
            is.known = true;
            is.signal = 9;
            snprintf(is.text, sizeof is.text, "was killed");
            world->dead[i] = true;
            cox_agent_link_set_rank(link, RANK_FIRST + i, &is);
        } else if (link->wanted[i] && link->wanted[i] != world->claimed[i]) {
            is.state = COX_NODE__RANK_STATE__UP;
            world->claimed[i] = link->wanted[i];
            world->dead[i] = false;
            cox_agent_link_set_rank(link, RANK_FIRST + i, &is);
        }
    }
}

static void agent_take(struct world *world, const uint8_t *bytes, size_t size)
{
    struct cox_agent_link *link = &world->agent;
    struct cox_frame frame;
    struct cox_error err = {0};
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, &err), 0);
    if (frame.kind == COX_FRAME_SEEK) {
        if (cox_agent_link_greets(link, &frame, COX_STALE, agent_now(world)))
            agent_hello(world);
    } else if (frame.kind == COX_FRAME_WELCOME) {
        CoxNode__Welcome *welcome = cox_node__welcome__unpack(NULL, frame.size, frame.payload);
        assert_non_null(welcome);
        if (welcome->agent == link->agent &&
            cox_agent_link_follow(link, welcome, agent_now(world)) == 0) {
            CHECK(welcome->epoch > world->followed_epoch ||
                  (welcome->epoch == world->followed_epoch &&
                   welcome->incarnation > world->followed_incarnation));
            world->followed_epoch = welcome->epoch;
            world->followed_incarnation = welcome->incarnation;
            world->transit_min_ns = UINT64_MAX / 2;
            memset(world->work, 0, sizeof world->work); /* what they do is of no use */
            memset(world->claimed, 0, sizeof world->claimed);
            memset(link->ranks, 0, sizeof link->ranks);
        }
        cox_node__welcome__free_unpacked(welcome, NULL);
    } else {
        const uint64_t transit_ns = world->now_ns - frame.sent_ns, repeated = link->repeated;
        int r = cox_agent_link_receive(link, &frame, agent_now(world), &err);
        const bool ours = frame.epoch == link->epoch && frame.incarnation == link->incarnation;
        CHECK(r != COX_CORRUPT);
        CHECK(ours || r == COX_STALE);
        if (ours && transit_ns < world->transit_min_ns)
            world->transit_min_ns = transit_ns;
        CHECK(link->repeated == repeated || frame.sequence <= link->channels[frame.channel].taken);
        if (cox_agent_link_greets(link, &frame, r, agent_now(world)))
            agent_hello(world);
    }
    agent_run(world);
    if (link->changed)
        cox_agent_link_tick(link, agent_now(world));
}

/* ---- the lead ---- */

static void on_lead_send(void *context, const struct cox_lead_link *link, uint8_t *bytes,
                         size_t size)
{
    struct world *world = context;
    struct cox_frame frame;
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    CHECK(link->state != COX_NODE_ABSENT);
    CHECK(link->state != COX_NODE_SUSPECT || frame.kind == COX_FRAME_LEAD_BEAT);
    CHECK(frame.epoch == link->epoch && frame.incarnation == link->incarnation);
    if (world->to_all && frame.kind == COX_FRAME_REQUEST && link->state == COX_NODE_ALIVE &&
        link->peers_there == link->peers_version && chance(world, 1, 2))
        cox_frame_address_all(bytes, link->peers_version);
    net_put(world, false, bytes, size, false);
}

static void lead_start(struct world *world, uint32_t index, uint64_t epoch, uint64_t first)
{
    struct lead *lead = &world->leads[index];
    memset(lead, 0, sizeof *lead);
    cox_lead_events_init(&lead->events);
    cox_lead_link_init(&lead->link, "b", RANK_FIRST, RANK_COUNT, WORLD_SIZE, DEPTH);
    lead->link.times = &times;
    lead->link.epoch = epoch;
    lead->link.context = world;
    lead->link.send = on_lead_send;
    lead->link.events = &lead->events;
    lead->alive = true;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        lead->link.channels[c].published = first;
        lead->next[c] = first + 1;
    }
    for (uint32_t i = 0; i < RANK_COUNT; i++)
        cox_lead_link_want(&lead->link, RANK_FIRST + i, lead->wanted[i] = 1);
    world->lead_now = index;
}

static void lead_message(struct world *world, struct lead *lead, enum cox_frame_kind kind,
                         const ProtobufCMessage *message)
{
    const struct cox_frame head = {.kind = kind,
                                   .epoch = lead->link.epoch,
                                   .incarnation = lead->link.incarnation,
                                   .sent_ns = world->now_ns};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, message, &size);
    assert_non_null(bytes);
    net_put(world, false, bytes, size, false);
}

static void lead_admit(struct world *world, struct lead *lead, uint64_t agent)
{
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    uint64_t start_after[COX_TWO_WAY_COUNT];
    cox_lead_link_admit(&lead->link, agent, world->now_ns);
    lead->link.peers_version += world->to_all;
    welcome.has_peers_version = world->to_all;
    welcome.peers_version = lead->link.peers_version;
    lead->heard_ns = world->now_ns;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        start_after[c] = lead->link.channels[c].published;
    welcome.has_epoch = welcome.has_agent = welcome.has_incarnation = 1;
    welcome.epoch = lead->link.epoch;
    welcome.agent = agent;
    welcome.incarnation = lead->link.incarnation;
    welcome.has_rank_first = welcome.has_rank_count = welcome.has_world = welcome.has_depth = 1;
    welcome.rank_first = RANK_FIRST;
    welcome.rank_count = RANK_COUNT;
    welcome.world = WORLD_SIZE;
    welcome.depth = DEPTH;
    welcome.n_start_after = COX_TWO_WAY_COUNT;
    welcome.start_after = start_after;
    lead_message(world, lead, COX_FRAME_WELCOME, &welcome.base);
}

static void owed_end(struct lead *lead, uint32_t c, struct asked *asked, uint32_t bit)
{
    (void)c;
    if (!(asked->owed >> bit & 1))
        return;
    asked->owed &= ~(1u << bit);
    lead->ended += !asked->owed;
}

static void rank_died(struct world *world, struct lead *lead, uint32_t i)
{
    lead->attached[i] = false;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t k = 0; k < DEPTH; k++)
            owed_end(lead, c, &lead->asked[c][k], i);
    cox_lead_link_want(&lead->link, RANK_FIRST + i, ++lead->wanted[i]);
    (void)world;
}

static void lead_event(struct world *world, struct lead *lead, const struct cox_lead_event *event)
{
    const uint32_t i = event->rank - RANK_FIRST, c = event->channel;
    struct asked *asked = &lead->asked[c][event->sequence % DEPTH];
    const uint64_t silent_ns = world->now_ns - lead->heard_ns;
    struct value value;
    switch (event->kind) {
    case COX_LEAD_REPLY:
        CHECK(i < RANK_COUNT);
        if (asked->sequence > event->sequence)
            break; /* its ranks have died, and the frame was used again */
        CHECK(asked->sequence == event->sequence && asked->replies);
        CHECK(!(asked->replied >> i & 1));
        asked->replied |= 1u << i;
        /* Not before it has. */
        if (!event->bytes && world->agent.epoch == lead->link.epoch &&
            world->agent.incarnation == lead->link.incarnation)
            CHECK(world->work[c][event->sequence % DEPTH].sequence != event->sequence);
        if (event->bytes) {
            CHECK(event->sequence > lead->last_reply[c][i]); /* once, in order */
            lead->last_reply[c][i] = event->sequence;
            CHECK(event->size == sizeof value);
            memcpy(&value, event->bytes, sizeof value);
            CHECK(value.epoch == lead->link.epoch && value.incarnation == asked->incarnation);
            CHECK(value.incarnation == lead->link.incarnation);
            CHECK(value.sequence == event->sequence && value.channel == c);
            CHECK(value.rank == event->rank);
        }
        lead->late += !event->bytes && (asked->owed >> i & 1);
        owed_end(lead, c, asked, i);
        break;
    case COX_LEAD_TAKEN:
        if (asked->sequence > event->sequence)
            break;
        CHECK(asked->sequence == event->sequence && !asked->taken);
        CHECK(asked->incarnation == lead->link.incarnation);
        asked->taken = true;
        if (!asked->replies)
            for (uint32_t k = 0; k < RANK_COUNT; k++)
                owed_end(lead, c, asked, k);
        break;
    case COX_LEAD_RANK_UP:
        CHECK(i < RANK_COUNT && !lead->attached[i] && event->pid == 100 + i);
        lead->attached[i] = true;
        lead->ups++;
        break;
    case COX_LEAD_RANK_DIED:
        CHECK(i < RANK_COUNT);
        if (lead->link.state == COX_NODE_ABSENT)
            CHECK(strstr(event->text, "is lost: node b "));
        snprintf(lead->died_text, sizeof lead->died_text, "%.200s", event->text);
        rank_died(world, lead, i);
        break;
    case COX_LEAD_NODE_STATE:
        CHECK(strncmp(event->text, "node b ", 7) == 0);
        if (event->state == COX_NODE_SUSPECT) {
            lead->suspicions++;
            CHECK(silent_ns >= times.suspect_ms * MS);
            CHECK(silent_ns < (times.suspect_ms + LEAD_TICK_MS) * MS);
        } else if (event->state == COX_NODE_ABSENT) {
            lead->deaths++;
            CHECK(lead->superseded || silent_ns >= times.dead_ms * MS);
            CHECK(silent_ns < (times.dead_ms + LEAD_TICK_MS) * MS);
        }
        break;
    }
}

static void lead_pump(struct world *world, struct lead *lead)
{
    struct cox_lead_event *event;
    while ((event = cox_lead_events_take(&lead->events))) {
        lead_event(world, lead, event);
        cox_lead_event_free(event);
    }
    if (lead->link.state != COX_NODE_ABSENT)
        return;
    /* A dead node owes nothing; what was never taken ends with it. */
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t k = 0; k < DEPTH; k++) {
            struct asked *asked = &lead->asked[c][k];
            CHECK(!asked->replies || !asked->owed);
            for (uint32_t i = 0; i < RANK_COUNT; i++)
                owed_end(lead, c, asked, i);
        }
    for (uint32_t i = 0; i < RANK_COUNT; i++)
        CHECK(!lead->attached[i]);
}

static void lead_take(struct world *world, struct lead *lead, const uint8_t *bytes, size_t size)
{
    struct cox_frame frame;
    struct cox_error err = {0};
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, &err), 0);
    if (frame.kind == COX_FRAME_HELLO) {
        CoxNode__Hello *hello = cox_node__hello__unpack(NULL, frame.size, frame.payload);
        assert_non_null(hello);
        if (hello->epoch > lead->link.epoch && !lead->superseded) {
            lead->superseded = true;
            cox_lead_link_give_up(&lead->link, "is gone: another lead has taken over");
        }
        if (lead->link.state == COX_NODE_ABSENT && !lead->superseded)
            lead_admit(world, lead, hello->agent);
        cox_node__hello__free_unpacked(hello, NULL);
    } else {
        const bool ours = lead->link.state != COX_NODE_ABSENT && frame.epoch == lead->link.epoch &&
                          frame.incarnation == lead->link.incarnation;
        if (ours)
            lead->heard_ns = world->now_ns;
        int r = cox_lead_link_receive(&lead->link, &frame, world->now_ns, &err);
        CHECK(r != COX_CORRUPT);
        CHECK(ours || r == COX_STALE);
    }
    lead_pump(world, lead);
}

static void lead_tick(struct world *world, struct lead *lead)
{
    if (lead->link.state == COX_NODE_ABSENT && !lead->superseded &&
        world->now_ns - lead->seek_ns >= 100 * MS) {
        lead->seek_ns = world->now_ns;
        lead_message(world, lead, COX_FRAME_SEEK, NULL);
    }
    cox_lead_link_tick(&lead->link, world->now_ns);
    lead_pump(world, lead);
    const uint64_t silent_ns = world->now_ns - lead->heard_ns;
    CHECK(lead->link.state != COX_NODE_ALIVE || silent_ns < times.suspect_ms * MS);
    CHECK(lead->link.state == COX_NODE_ABSENT || silent_ns < times.dead_ms * MS);
}

/* The next request of the channel, if it has room. */
static bool lead_publish(struct world *world, struct lead *lead, uint32_t c, uint32_t bits,
                         bool replies, uint64_t deadline_ns)
{
    const uint64_t sequence = lead->next[c];
    struct asked *own = &lead->asked[c][sequence % DEPTH];
    struct cox_rank_set asked = {{0}};
    for (uint32_t k = 0; k < DEPTH; k++)
        if (lead->asked[c][k].owed && lead->asked[c][k].sequence + DEPTH <= sequence)
            return false; /* FULL, or LATE */
    for (uint32_t i = 0; i < RANK_COUNT; i++) {
        if (!lead->attached[i])
            bits &= ~(1u << i);
        if (bits >> i & 1)
            cox_rank_set_add(&asked, RANK_FIRST + i);
    }
    cox_rank_set_add(&asked, 0); /* of another node */
    *own = (struct asked){.sequence = sequence,
                          .incarnation = lead->link.incarnation,
                          .deadline_ns = deadline_ns,
                          .owed = bits,
                          .replies = replies};
    const struct cox_transport_request request = {.channel = (enum cox_channel_id)c,
                                                  .type = replies ? 0 : 1,
                                                  .sequence = sequence,
                                                  .deadline_ns = deadline_ns,
                                                  .replies = replies,
                                                  .asked = &asked,
                                                  .bytes = &sequence,
                                                  .size = sizeof sequence};
    lead->next[c]++;
    cox_lead_link_publish(&lead->link, &request, world->now_ns);
    return true;
}

static void lead_work(struct world *world, struct lead *lead)
{
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        while (chance(world, 60, 1000)) {
            const uint32_t bits = chance(world, 300, 1000) ? (uint32_t)random_next(world) & 3 : 3;
            const bool replies = !chance(world, 200, 1000);
            const uint64_t deadline_ns = replies && chance(world, 200, 1000)
                                             ? world->now_ns + random_next(world) % 60 * MS
                                             : COX_DEADLINE_NEVER;
            if (!lead_publish(world, lead, c, bits, replies, deadline_ns))
                break;
        }
}

/* As the collector of the executor: a request whose deadline has passed has ended. */
static void lead_expire(struct world *world, struct lead *lead)
{
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        uint64_t through = 0, open = UINT64_MAX;
        for (uint32_t k = 0; k < DEPTH; k++) {
            const struct asked *asked = &lead->asked[c][k];
            if (asked->owed && asked->deadline_ns > world->now_ns && asked->sequence < open)
                open = asked->sequence;
        }
        for (uint32_t k = 0; k < DEPTH; k++) {
            const struct asked *asked = &lead->asked[c][k];
            if (asked->owed && asked->sequence < open && asked->sequence > through)
                through = asked->sequence;
        }
        if (through)
            cox_lead_link_end(&lead->link, c, through);
    }
}

static uint32_t lead_owed(const struct lead *lead)
{
    uint32_t owed = 0;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t k = 0; k < DEPTH; k++)
            owed += lead->asked[c][k].owed != 0;
    return owed;
}

/* ---- time ---- */

static void net_deliver(struct world *world)
{
    for (;;) {
        size_t first = world->packet_count;
        for (size_t i = 0; i < world->packet_count; i++)
            if (world->packets[i].due_ns <= world->now_ns &&
                (first == world->packet_count ||
                 world->packets[i].due_ns < world->packets[first].due_ns))
                first = i;
        if (first == world->packet_count)
            return;
        const struct packet packet = world->packets[first];
        memmove(&world->packets[first], &world->packets[first + 1],
                (--world->packet_count - first) * sizeof packet);
        for (uint32_t i = 0; i < LEAD_COUNT && packet.to_lead; i++)
            if (world->leads[i].alive)
                lead_take(world, &world->leads[i], packet.bytes, packet.size);
        if (!packet.to_lead)
            agent_take(world, packet.bytes, packet.size);
        free(packet.bytes);
    }
}

static void take_over(struct world *world)
{
    uint64_t through = 0;
    const struct lead *before = &world->leads[world->lead_now];
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        if (world->agent.channels[c].taken > through)
            through = world->agent.channels[c].taken;
    lead_start(world, 1, before->link.epoch + 1, through + 1000);
    world->leads[0].alive = chance(world, 1, 2); /* it was only partitioned */
}

static void faults_now(struct world *world)
{
    const struct faults *faults = &world->faults;
    if (chance(world, faults->partition, 100000)) {
        const uint64_t until_ns = world->now_ns + random_next(world) % 1200 * MS;
        const uint64_t how = random_next(world) % 3;
        if (how != 1)
            world->cut_to_lead_ns = until_ns;
        if (how != 2)
            world->cut_to_agent_ns = until_ns;
    }
    if (chance(world, faults->restart, 100000)) {
        /* An agent that begins knows of no epoch: a lead that was followed by another is gone. */
        if (world->lead_now == 1)
            world->leads[0].alive = false;
        cox_agent_link_deinit(&world->agent);
        agent_start(world);
    }
    if (world->lead_now == 0 && chance(world, faults->takeover, 100000))
        take_over(world);
}

static void world_run(struct world *world, uint64_t ms)
{
    for (const uint64_t until_ns = world->now_ns + ms * MS; world->now_ns < until_ns;) {
        world->now_ns += MS;
        net_deliver(world);
        faults_now(world);
        if (world->publishing)
            lead_work(world, &world->leads[world->lead_now]);
        lead_expire(world, &world->leads[world->lead_now]);
        if (world->now_ns / MS % AGENT_TICK_MS == 0) {
            agent_work(world);
            cox_agent_link_tick(&world->agent, agent_now(world));
            agent_run(world);
        }
        for (uint32_t i = 0; i < LEAD_COUNT && world->now_ns / MS % LEAD_TICK_MS == 0; i++)
            if (world->leads[i].alive)
                lead_tick(world, &world->leads[i]);
    }
}

static struct world *world_new(uint64_t seed, const struct faults *faults)
{
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    seed_now = seed;
    world->random = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    world->now_ns = 5000 * MS;
    world->agent_id = 1000;
    if (faults)
        world->faults = *faults;
    world->to_all = faults != NULL;
    agent_start(world);
    lead_start(world, 0, 10, 0);
    return world;
}

static void world_free(struct world *world)
{
    struct cox_lead_event *event;
    for (uint32_t i = 0; i < LEAD_COUNT; i++) {
        while (world->leads[i].link.depth &&
               (event = cox_lead_events_take(&world->leads[i].events)))
            cox_lead_event_free(event);
        cox_lead_link_deinit(&world->leads[i].link);
    }
    cox_agent_link_deinit(&world->agent);
    for (size_t i = 0; i < world->packet_count; i++)
        free(world->packets[i].bytes);
    free(world);
}

/* Without faults the node is there again, every request ends, and new ones do. */
static void world_heal(struct world *world)
{
    struct lead *lead = &world->leads[world->lead_now];
    world->faults = (struct faults){0};
    world->cut_to_agent_ns = world->cut_to_lead_ns = 0;
    world->publishing = false;
    world_run(world, 2500);
    for (uint32_t i = 0; i < LEAD_COUNT; i++)
        if (world->leads[i].alive)
            CHECK(lead_owed(&world->leads[i]) == 0);
    /* A lead that was taken over knows it. */
    CHECK(world->lead_now == 0 || !world->leads[0].alive || world->leads[0].superseded);
    CHECK(lead->link.state == COX_NODE_ALIVE && lead->link.agent == world->agent.agent);
    CHECK(world->agent.state == COX_LEAD_FOLLOWING && world->agent.epoch == lead->link.epoch);
    CHECK(lead->attached[0] && lead->attached[1]);
    const uint32_t ended = lead->ended;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t k = 0; k < DEPTH; k++)
            CHECK(lead_publish(world, lead, c, 3, true, COX_DEADLINE_NEVER));
    world_run(world, 400);
    CHECK(lead->ended == ended + COX_TWO_WAY_COUNT * DEPTH);
}

/* ---- seeds ---- */

static void seeds_run(const struct faults *faults, uint64_t first, uint64_t count, uint64_t ms)
{
    struct world sums = {0};
    uint32_t suspicions = 0, deaths = 0, ups = 0;
    uint64_t again = 0, gaps = 0, ended = 0;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct world *world = world_new(seed, faults);
        world->publishing = true;
        world_run(world, ms);
        sums.runs += world->runs;
        for (uint32_t i = 0; i < LEAD_COUNT; i++) {
            suspicions += world->leads[i].suspicions;
            deaths += world->leads[i].deaths;
            ups += world->leads[i].ups;
            again += world->leads[i].link.asked_again;
            ended += world->leads[i].ended;
        }
        gaps += world->agent.gaps;
        sums.expired += world->expired;
        world_heal(world);
        world_free(world);
    }
    print_message("%" PRIu64 " seeds: %" PRIu64 " run, %" PRIu64 " ended, %" PRIu64
                  " sent again, %" PRIu64 " gaps, %" PRIu64
                  " expired, %u suspicions, %u deaths, %u "
                  "ranks up\n",
                  count, sums.runs, ended, again, gaps, sums.expired, suspicions, deaths, ups);
    assert_true(sums.runs > 0 && ended > 0);
}

static void a_good_network(void **state)
{
    (void)state;
    seeds_run(&(struct faults){.delay_max_ms = 3, .late = 50}, 1, SEED_COUNT / 10, 1000);
}

static void frames_are_lost_and_repeated(void **state)
{
    (void)state;
    seeds_run(&(struct faults){.loss = 100, .repeat = 100, .delay_max_ms = 5, .late = 50}, 100000,
              SEED_COUNT / 3, 1500);
}

static void frames_change_places(void **state)
{
    (void)state;
    seeds_run(&(struct faults){.loss = 50,
                               .repeat = 50,
                               .delay_max_ms = 60,
                               .reorder = true,
                               .late = 30,
                               .rank_death = 50},
              200000, SEED_COUNT / 3, 1500);
}

static void the_network_parts(void **state)
{
    (void)state;
    seeds_run(&(struct faults){.loss = 20,
                               .repeat = 20,
                               .delay_max_ms = 10,
                               .late = 30,
                               .partition = 100,
                               .rank_death = 20},
              300000, SEED_COUNT / 3, 3000);
}

static void agents_and_leads_end(void **state)
{
    (void)state;
    seeds_run(&(struct faults){.loss = 20,
                               .repeat = 30,
                               .delay_max_ms = 20,
                               .reorder = true,
                               .late = 20,
                               .partition = 60,
                               .restart = 40,
                               .takeover = 60},
              400000, SEED_COUNT / 3, 3000);
}

/* ---- one rule after the other ---- */

static struct world *world_up(void)
{
    struct world *world = world_new(0, NULL);
    const struct lead *lead = &world->leads[0];
    world_run(world, 500);
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    assert_int_equal(world->agent.state, COX_LEAD_FOLLOWING);
    assert_true(lead->attached[0] && lead->attached[1]);
    return world;
}

static void publish(struct world *world, uint32_t c, uint32_t bits, bool replies)
{
    assert_true(lead_publish(world, &world->leads[0], c, bits, replies, COX_DEADLINE_NEVER));
}

static void a_request_runs_and_is_answered(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    for (uint32_t k = 0; k < DEPTH; k++)
        publish(world, COX_CHANNEL_EXECUTE, 3, true);
    assert_false(lead_publish(world, lead, COX_CHANNEL_EXECUTE, 3, true, COX_DEADLINE_NEVER));
    world_run(world, 100);
    assert_int_equal(world->runs, DEPTH);
    assert_int_equal(lead->ended, DEPTH);
    assert_int_equal(lead->link.asked_again, 0);
    assert_int_equal(lead->late, 0);
    world_free(world);
}

static void a_lost_request_is_sent_again(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->cut_to_agent_ns = world->now_ns + 20 * MS;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    publish(world, COX_CHANNEL_EXECUTE, 1, true);
    world_run(world, 25);
    publish(world, COX_CHANNEL_EXECUTE, 3, true); /* comes, and waits for the two */
    world_run(world, 100);
    assert_int_equal(world->runs, 0);
    assert_int_equal(world->agent.gaps, 1);
    assert_int_equal(lead->link.asked_again, 0); /* again_ms has not passed */
    world_run(world, 100);
    assert_int_equal(world->runs, 3);
    assert_int_equal(lead->ended, 3);
    assert_in_range(lead->link.asked_again, 2, 3);
    world_free(world);
}

/* Replies do not say that a request without a reply has come. */
static void a_lost_request_without_a_reply_is_sent_again(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->cut_to_agent_ns = world->now_ns + 20 * MS;
    publish(world, COX_CHANNEL_EXECUTE, 3, false);
    world_run(world, 120); /* beats come meanwhile */
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 500);
    assert_int_equal(world->runs, 2);
    assert_int_equal(lead->ended, 2);
    world_free(world);
}

/* Their ranks are dead before the node has them; then others are sent in their place. */
static void requests_that_are_given_up_are_not_waited_for(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->cut_to_agent_ns = world->now_ns + 20 * MS;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    publish(world, COX_CHANNEL_EXECUTE, 0, true);
    publish(world, COX_CHANNEL_EXECUTE, 0, true);
    world_run(world, 25);
    for (uint32_t k = 0; k < DEPTH; k++)
        lead->asked[COX_CHANNEL_EXECUTE][k].owed = 0;
    publish(world, COX_CHANNEL_EXECUTE, 0, true); /* in the place of 1, which is sent again */
    publish(world, COX_CHANNEL_EXECUTE, 3, true); /* of 2 */
    assert_int_equal(lead->link.channels[COX_CHANNEL_EXECUTE].gone, 2);
    world_run(world, 300);
    assert_int_equal(lead->link.channels[COX_CHANNEL_EXECUTE].gone,
                     0); /* known, and not repeated */
    assert_int_equal(world->agent.channels[COX_CHANNEL_EXECUTE].taken, 6);
    assert_int_equal(world->runs, 1);
    assert_int_equal(lead_owed(lead), 0);
    world_free(world);
}

static void a_lost_answer_is_sent_again_and_nothing_runs_twice(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 2);
    world->cut_to_lead_ns = world->now_ns + 60 * MS;
    world_run(world, 70);
    assert_int_equal(world->runs, 1);
    assert_true(world->agent.channels[COX_CHANNEL_EXECUTE].done ==
                world->agent.channels[COX_CHANNEL_EXECUTE].taken);
    assert_int_equal(lead->ended, 0);
    world_run(world, 400);
    assert_int_equal(lead->ended, 1);
    assert_int_equal(world->runs, 1);
    assert_int_equal(lead->link.asked_again, 1);
    assert_int_equal(world->agent.repeated, 1);
    assert_int_equal(lead->late, 0);
    world_free(world);
}

static void a_deadline_passes_on_the_way(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->faults.delay_ms = 50;
    assert_true(lead_publish(world, lead, COX_CHANNEL_EXECUTE, 3, true, world->now_ns + 49 * MS));
    assert_true(lead_publish(world, lead, COX_CHANNEL_EXECUTE, 3, true, world->now_ns + 51 * MS));
    world_run(world, 49);
    assert_int_equal(world->expired, 0);
    world_run(world, 2);
    assert_int_equal(world->expired, 1);
    assert_int_equal(world->agent.expired, 1);
    assert_true(world->runs == 1 ||
                world->expired == 2); /* or the executor was full for a moment */
    world_run(world, 300);
    assert_int_equal(lead->ended, 2);

    world_free(world);
}

static void ranks_that_are_late_reply_by_done(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->faults.late = 1000;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 300);
    assert_int_equal(world->runs, 1);
    assert_int_equal(lead->late, 1);
    assert_int_equal(lead->ended, 1);
    world_free(world);
}

/* The answer, and a beat that says it is done, come before the node says why the rank died. */
static void a_dead_rank_is_not_late(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    const struct asked *asked = &lead->asked[COX_CHANNEL_EXECUTE][1 % DEPTH];
    struct cox_agent_rank is = {.incarnation = 1,
                                .state = COX_NODE__RANK_STATE__DEAD,
                                .pid = 101,
                                .known = true,
                                .signal = 9};
    snprintf(is.text, sizeof is.text, "was killed by signal 9");
    world->dead[1] = true;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 300);
    assert_int_equal(asked->sequence, 1);
    assert_int_equal(asked->replied, 1);
    assert_int_equal(lead->late, 0);
    assert_int_equal(lead->ended, 0);
    cox_agent_link_set_rank(&world->agent, RANK_FIRST + 1, &is);
    world_run(world, 300);
    assert_string_equal(lead->died_text, "was killed by signal 9");
    assert_int_equal(lead->ended, 1);
    world_free(world);
}

/* One rank is dead, and the node does not say why; the other is late, and does not wait for it. */
static void a_late_rank_beside_a_dead_one(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->dead[1] = true;
    world->faults.late = 1000;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 300);
    assert_int_equal(lead->late, 1);
    assert_int_equal(lead->ended, 0);
    world_run(world, 2000);
    assert_int_equal(lead->late, 2);
    assert_int_equal(lead->ended, 1);
    world_free(world);
}

static void silence_is_suspect_and_then_death(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    char text[128];
    assert_false(cox_lead_link_trouble(&lead->link, world->now_ns, text, sizeof text));
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world->cut_to_lead_ns = world->now_ns + 5000 * MS;
    const uint64_t heard_ns = lead->heard_ns;
    world_run(world, (heard_ns + 299 * MS - world->now_ns) / MS);
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    world_run(world, 12);
    assert_int_equal(lead->link.state, COX_NODE_SUSPECT);
    assert_int_equal(lead->link.suspicions, 1);
    assert_true(cox_lead_link_trouble(&lead->link, world->now_ns, text, sizeof text));
    assert_non_null(strstr(text, "node b is suspect: not heard for 3"));
    const uint64_t sent = lead->link.sent;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 400);
    assert_int_equal(lead->link.sent, sent);
    assert_int_equal(lead->link.state, COX_NODE_SUSPECT);
    assert_int_equal(world->agent.state, COX_LEAD_FOLLOWING); /* beats still come */
    world_run(world, (heard_ns + 799 * MS - world->now_ns) / MS);
    assert_int_equal(lead->link.state, COX_NODE_SUSPECT);
    world_run(world, 12);
    assert_int_equal(lead->link.state, COX_NODE_ABSENT);
    assert_non_null(strstr(lead->died_text, "is lost: node b has not been heard for 8"));
    assert_int_equal(lead->ended, 2);
    assert_true(cox_lead_link_trouble(&lead->link, world->now_ns, text, sizeof text));
    assert_non_null(strstr(text, "node b has not been heard for"));
    world_heal(world);
    world_free(world);
}

static void a_suspect_node_gets_what_was_held_back(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    world->cut_to_lead_ns = world->cut_to_agent_ns = world->now_ns + 400 * MS;
    world_run(world, 350);
    assert_int_equal(lead->link.state, COX_NODE_SUSPECT);
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    publish(world, COX_CHANNEL_EXECUTE, 3, false);
    world_run(world, 10);
    assert_int_equal(lead->link.sent, 0);
    while (lead->link.state == COX_NODE_SUSPECT)
        world_run(world, 1);
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    assert_int_equal(lead->link.sent, 2); /* at once */
    world_run(world, 200);
    assert_int_equal(world->runs, 2);
    assert_int_equal(lead->ended, 2);
    world_free(world);
}

/* A frame of a lead and its node, other than the present one. */
static void frames_of_other_lives_are_dropped(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    const struct cox_answer none = {.status = 0};
    uint8_t answer[8];
    cox_answer_pack(&none, answer);
    const struct {
        uint64_t epoch, incarnation;
    } others[] = {{9, 1}, {11, 1}, {10, 0}, {10, 2}};
    const uint64_t heard_ns = lead->link.heard_ns, there_ns = world->agent.heard_ns;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        struct cox_frame frame = {.kind = COX_FRAME_ANSWER,
                                  .epoch = others[i].epoch,
                                  .incarnation = others[i].incarnation,
                                  .sequence = 1,
                                  .payload = answer,
                                  .size = sizeof answer};
        assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns + 1, NULL),
                         COX_STALE);
        frame.kind = COX_FRAME_REQUEST;
        assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world) + 1, NULL),
                         COX_STALE);
    }
    assert_true(lead->link.heard_ns == heard_ns && world->agent.heard_ns == there_ns);
    assert_int_equal(lead->link.stale, 4);
    world_run(world, 100);
    assert_int_equal(lead->ended, 1);
    assert_int_equal(lead->late, 0);
    /* An answer for which nothing was asked; a second one. */
    const struct cox_frame again = {.kind = COX_FRAME_ANSWER,
                                    .epoch = 10,
                                    .incarnation = 1,
                                    .sequence = 1,
                                    .payload = answer,
                                    .size = sizeof answer};
    struct cox_frame unknown = again;
    unknown.sequence = 0;
    assert_int_equal(cox_lead_link_receive(&lead->link, &again, world->now_ns, NULL), COX_STALE);
    assert_int_equal(cox_lead_link_receive(&lead->link, &unknown, world->now_ns, NULL), COX_STALE);
    world_free(world);
}

static int beat_of(struct world *world, uint64_t agent)
{
    CoxNode__AgentBeat beat = COX_NODE__AGENT_BEAT__INIT;
    const struct lead *lead = &world->leads[0];
    size_t size;
    beat.has_agent = 1;
    beat.agent = agent;
    const struct cox_frame head = {.kind = COX_FRAME_AGENT_BEAT,
                                   .epoch = lead->link.epoch,
                                   .incarnation = lead->link.incarnation};
    uint8_t *bytes = cox_frame_of_message(&head, &beat.base, &size);
    struct cox_frame frame;
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    int r = cox_lead_link_receive(&world->leads[0].link, &frame, world->now_ns, NULL);
    free(bytes);
    return r;
}

static void beats_of_a_second_agent_are_dropped(void **state)
{
    (void)state;
    struct world *world = world_up();
    const struct lead *lead = &world->leads[0];
    const uint64_t heard_ns = lead->link.heard_ns;
    world->now_ns += 50 * MS;
    assert_int_equal(beat_of(world, world->agent.agent + 1), COX_STALE);
    assert_true(lead->link.heard_ns == heard_ns); /* it does not keep a dead node alive */
    assert_int_equal(beat_of(world, world->agent.agent), 0);
    assert_true(lead->link.heard_ns == world->now_ns);
    world_free(world);
}

static void beats_that_cannot_be_read(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct cox_error err = {0};
    static const uint8_t bad[] = {0x0a, 0x7f};
    struct cox_frame frame = {.kind = COX_FRAME_AGENT_BEAT,
                              .epoch = 10,
                              .incarnation = 1,
                              .payload = bad,
                              .size = sizeof bad};
    assert_int_equal(cox_lead_link_receive(&world->leads[0].link, &frame, world->now_ns, &err),
                     COX_CORRUPT);
    assert_non_null(strstr(err.text, "2 bytes"));
    frame.kind = COX_FRAME_LEAD_BEAT;
    assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), &err),
                     COX_CORRUPT);
    frame.kind = COX_FRAME_HELLO;
    assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), &err),
                     COX_CORRUPT);
    frame.kind = COX_FRAME_ANSWER;
    assert_int_equal(cox_lead_link_receive(&world->leads[0].link, &frame, world->now_ns, &err),
                     COX_CORRUPT);
    world_free(world);
}

static void a_lead_is_lost_and_found(void **state)
{
    (void)state;
    struct world *world = world_up();
    world->cut_to_agent_ns = world->now_ns + 900 * MS;
    const uint64_t heard_ns = world->agent.heard_ns;
    world_run(world, (heard_ns + 799 * MS - agent_now(world)) / MS);
    assert_int_equal(world->agent.state, COX_LEAD_FOLLOWING);
    world_run(world, 7);
    assert_int_equal(world->agent.state, COX_LEAD_LOST);
    assert_int_equal(world->leads[0].link.state, COX_NODE_ALIVE); /* hears it still */
    world_run(world, 400);
    assert_int_equal(world->agent.state, COX_LEAD_FOLLOWING);
    world_heal(world);
    world_free(world);
}

static void grace_ends(void **state)
{
    (void)state;
    struct world *world = world_up();
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    struct cox_frame frame;
    uint64_t deadline_ns;
    world->leads[0].alive = false;
    world_run(world, 810);
    assert_int_equal(world->agent.state, COX_LEAD_LOST);
    assert_false(cox_agent_link_next(&world->agent, 0, agent_now(world), &frame, &deadline_ns));
    world_run(world, times.lead_grace_ms - 200);
    assert_int_equal(world->agent.state, COX_LEAD_LOST);
    world_run(world, 300);
    assert_int_equal(world->agent.state, COX_LEAD_OVER);
    welcome.epoch = 99;
    welcome.incarnation = 1;
    assert_int_equal(cox_agent_link_follow(&world->agent, &welcome, agent_now(world)), COX_STALE);
    world_free(world);
}

static void a_greater_epoch_takes_over(void **state)
{
    (void)state;
    struct world *world = world_up();
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    uint64_t after[COX_TWO_WAY_COUNT] = {100, 200};
    struct cox_agent_link *link = &world->agent;
    for (uint32_t k = 0; k < 3; k++)
        publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 60);
    const uint64_t runs = world->runs;
    welcome.rank_first = RANK_FIRST;
    welcome.rank_count = RANK_COUNT;
    welcome.depth = DEPTH;
    welcome.incarnation = 1;
    welcome.n_start_after = COX_TWO_WAY_COUNT;
    welcome.start_after = after;
    welcome.has_lead_grace_ms = 1;
    welcome.lead_grace_ms = 5;
    const uint64_t epochs[] = {9, 10};
    for (size_t i = 0; i < 2; i++) {
        welcome.epoch = epochs[i];
        assert_int_equal(cox_agent_link_follow(link, &welcome, agent_now(world)), COX_STALE);
    }
    welcome.epoch = 12;
    assert_int_equal(cox_agent_link_follow(link, &welcome, agent_now(world)), 0);
    assert_int_equal(link->times.lead_grace_ms, 5);
    assert_int_equal(link->times.beat_ms, 100);
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        assert_true(link->channels[c].taken == after[c] && link->channels[c].done == after[c]);
    assert_true(link->wanted[0] == 0 && link->wanted[1] == 0 && !link->finishing);
    /* The lead before is not heard any more, and its requests do not run. */
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 100);
    assert_int_equal(world->runs, runs);
    assert_true(link->stale > 0);
    welcome.epoch = 11;
    assert_int_equal(cox_agent_link_follow(link, &welcome, agent_now(world)), COX_STALE);
    /* Requests begin behind start_after. */
    struct cox_frame frame = {.kind = COX_FRAME_REQUEST,
                              .epoch = 12,
                              .incarnation = 1,
                              .sequence = 100,
                              .previous = 99,
                              .deadline_ns = COX_DEADLINE_NEVER,
                              .sent_ns = world->now_ns};
    struct cox_frame next;
    uint64_t deadline_ns;
    assert_int_equal(cox_agent_link_receive(link, &frame, agent_now(world), NULL), COX_STALE);
    frame.sequence = 105;
    frame.previous = 100;
    assert_false(cox_agent_link_next(link, 0, agent_now(world), &next, &deadline_ns));
    assert_int_equal(cox_agent_link_receive(link, &frame, agent_now(world), NULL), 0);
    assert_int_equal(cox_agent_link_receive(link, &frame, agent_now(world), NULL), COX_STALE);
    assert_true(cox_agent_link_next(link, 0, agent_now(world), &next, &deadline_ns));
    assert_true(next.sequence == 105 && deadline_ns == COX_DEADLINE_NEVER);
    link->state = COX_LEAD_LOST;
    assert_false(cox_agent_link_next(link, 0, agent_now(world), &next, &deadline_ns));
    link->state = COX_LEAD_FOLLOWING;
    cox_agent_link_taken(link, 0, 105, false);
    /* The next lead begins at 1; what still runs for the one before is not its answer. */
    const struct cox_answer none = {.status = 0};
    after[0] = 0;
    welcome.epoch = frame.epoch = 13;
    assert_int_equal(cox_agent_link_follow(link, &welcome, agent_now(world)), 0);
    frame.sequence = 1;
    frame.previous = 0;
    assert_int_equal(cox_agent_link_receive(link, &frame, agent_now(world), NULL), 0);
    assert_true(cox_agent_link_next(link, 0, agent_now(world), &next, &deadline_ns));
    cox_agent_link_taken(link, 0, 1, false);
    world->followed_epoch = 13;
    const size_t packet_count = world->packet_count;
    cox_agent_link_answer(link, 0, 105, &none, true, agent_now(world));
    assert_int_equal(world->packet_count, packet_count);
    cox_agent_link_answer(link, 0, 1, &none, true, agent_now(world));
    assert_int_equal(world->packet_count, packet_count + 1);
    world_free(world);
}

static void ranks_come_and_go(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    struct cox_agent_rank is = {.incarnation = 1,
                                .state = COX_NODE__RANK_STATE__DEAD,
                                .pid = 101,
                                .known = true,
                                .signal = 9};
    snprintf(is.text, sizeof is.text, "was killed by signal 9");
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    cox_lead_link_kill(&lead->link, RANK_FIRST + 1);
    world_run(world, 15);
    assert_true(world->agent.killed[1] == 1 && world->agent.killed[0] == 0);
    world->dead[1] = true;
    cox_agent_link_set_rank(&world->agent, RANK_FIRST + 1, &is);
    cox_agent_link_tick(&world->agent, agent_now(world)); /* at once, not at the next beat */
    world->now_ns += 1;
    net_deliver(world);
    assert_string_equal(lead->died_text, "was killed by signal 9");
    assert_true(lead->attached[0] && !lead->attached[1]);
    assert_int_equal(lead->wanted[1], 2);
    world_run(world, 100);
    assert_true(lead->attached[1]);
    assert_int_equal(world->agent.wanted[1], 2);
    assert_int_equal(lead->ups, 3);
    /* What an earlier process of the rank says is not of this one. */
    is.incarnation = 1;
    cox_agent_link_set_rank(&world->agent, RANK_FIRST + 1, &is);
    world_run(world, 150);
    assert_true(lead->attached[1]);
    assert_int_equal(lead->wanted[1], 2);
    cox_lead_link_want(&lead->link, RANK_FIRST, lead->wanted[0] = 9);
    lead->attached[0] = false;
    world->agent.changed = true;
    cox_agent_link_tick(&world->agent, agent_now(world));
    world->now_ns += 1;
    net_deliver(world);
    assert_false(lead->attached[0]);
    world_run(world, 150);
    assert_true(lead->attached[0]);
    world_free(world);
}

/* The executor wants another process for each rank of a dead node. */
static void ranks_of_a_dead_node_do_not_come_again(void **state)
{
    (void)state;
    struct world *world = world_new(0, NULL);
    struct lead *lead = &world->leads[0];
    world_run(world, 500);
    cox_lead_link_die(&lead->link, "is gone");
    cox_lead_link_die(&lead->link, "is gone twice");
    assert_int_equal(lead->link.deaths, 1);
    struct cox_lead_event *event;
    uint32_t count = 0;
    while ((event = cox_lead_events_take(&lead->events))) {
        if (event->kind == COX_LEAD_RANK_DIED) {
            assert_string_equal(event->text, "is lost: node b is gone");
            assert_true(event->exit_status == -1 && !event->known && event->sequence == 0);
            assert_int_equal(event->rank, RANK_FIRST + count++);
        } else {
            assert_string_equal(event->text, "node b is dead: it is gone");
        }
        cox_lead_event_free(event);
    }
    assert_int_equal(count, RANK_COUNT);
    lead->attached[0] = lead->attached[1] = false;
    world_run(world, 500); /* it comes again, with the processes that it had */
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    assert_int_equal(lead->link.incarnation, 2);
    assert_false(lead->attached[0] || lead->attached[1]);
    cox_lead_link_want(&lead->link, RANK_FIRST, 2);
    world_run(world, 100);
    assert_true(lead->attached[0] && !lead->attached[1]);
    world_free(world);
}

static void a_rank_that_never_attached(void **state)
{
    (void)state;
    struct world *world = world_new(0, NULL);
    struct lead *lead = &world->leads[0];
    world_run(world, 150);
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    cox_lead_link_want(&lead->link, RANK_FIRST, 7);
    CoxNode__AgentBeat beat = COX_NODE__AGENT_BEAT__INIT;
    CoxNode__Rank rank = COX_NODE__RANK__INIT, *ranks[] = {&rank};
    beat.agent = world->agent.agent;
    beat.has_agent = rank.has_incarnation = rank.has_state = 1;
    beat.n_ranks = 1;
    beat.ranks = ranks;
    rank.incarnation = 7;
    rank.state = COX_NODE__RANK_STATE__DEAD;
    const struct cox_frame head = {.kind = COX_FRAME_AGENT_BEAT, .epoch = 10, .incarnation = 1};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, &beat.base, &size);
    struct cox_frame frame;
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    lead_pump(world, lead);
    assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns, NULL), 0);
    struct cox_lead_event *event = cox_lead_events_take(&lead->events);
    assert_true(event && event->kind == COX_LEAD_RANK_DIED && event->sequence == 1);
    assert_string_equal(event->text, "is dead");
    cox_lead_event_free(event);
    /* Once, though every beat says it. */
    assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns, NULL), 0);
    assert_null(cox_lead_events_take(&lead->events));
    free(bytes);
    world_free(world);
}

static void cancelled_steps_and_the_end(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    const struct cox_agent_channel *channel = &world->agent.channels[COX_CHANNEL_EXECUTE];
    cox_lead_link_cancel(&lead->link, COX_CHANNEL_EXECUTE, 5);
    cox_lead_link_cancel(&lead->link, COX_CHANNEL_EXECUTE, 4);
    cox_lead_link_tick(&lead->link, world->now_ns);
    world_run(world, 1); /* not at the next beat */
    assert_int_equal(channel->void_through, 5);
    cox_lead_link_cancel(&lead->link, COX_CHANNEL_EXECUTE, 6);
    publish(world, COX_CHANNEL_EXECUTE, 3, true); /* says so as well */
    world->now_ns += 1;
    net_deliver(world);
    assert_int_equal(channel->void_through, 6);
    lead->link.finishing = lead->link.changed = true;
    world_run(world, 15);
    assert_true(world->agent.finishing);
    cox_agent_link_leave(&world->agent, "was told to end", agent_now(world));
    assert_int_equal(world->agent.state, COX_LEAD_OVER);
    const struct packet *last = &world->packets[world->packet_count - 1];
    struct cox_frame frame;
    assert_true(last->to_lead);
    assert_int_equal(cox_frame_unpack(last->bytes, last->size, &frame, NULL), 0);
    assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns, NULL), 0);
    assert_int_equal(lead->link.state, COX_NODE_ABSENT);
    assert_string_equal(lead->link.reason, "was told to end");
    world_free(world);
}

static void peers_and_hello(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    CoxNode__Peer peers[2], *pointers[2] = {&peers[0], &peers[1]};
    for (uint32_t i = 0; i < 2; i++) {
        cox_node__peer__init(&peers[i]);
        peers[i].has_incarnation = peers[i].has_rank_first = peers[i].has_rank_count = 1;
        peers[i].node = (char *)(uintptr_t)(i ? "b" : "a");
        peers[i].address = (char *)(uintptr_t) "10.0.0.1:7";
        peers[i].incarnation = i; /* a is not there */
        peers[i].rank_first = 2 * i;
        peers[i].rank_count = 2;
    }
    lead->link.peers = pointers;
    lead->link.peer_count = 2;
    lead->link.peers_version = 1;
    lead->link.changed = true;
    world_run(world, 15);
    assert_int_equal(world->agent.peer_count, 1);
    assert_string_equal(world->agent.peers[0].node, "b");
    assert_string_equal(world->agent.peers[0].address, "10.0.0.1:7");
    assert_true(world->agent.peers[0].rank_first == 2 && world->agent.peers[0].rank_count == 2);
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 10);
    CoxNode__Hello hello = COX_NODE__HELLO__INIT;
    CoxNode__Channel channels[COX_TWO_WAY_COUNT], *channel_pointers[COX_TWO_WAY_COUNT];
    cox_agent_link_describe(&world->agent, world->agent.heard_ns + 42 * MS, &hello, channels,
                            channel_pointers);
    assert_true(hello.epoch == 10 && hello.silent_ms == 42 && hello.rank_first == RANK_FIRST);
    assert_true(hello.n_channels == COX_TWO_WAY_COUNT && hello.channels[0]->through == 1);
    world_free(world);
}

/* A table that is larger than everything else in a beat. */
static uint64_t beat_bytes(struct world *world, uint64_t ms)
{
    const uint64_t bytes = world->sent_bytes[COX_FRAME_LEAD_BEAT];
    const uint64_t count = world->sent[COX_FRAME_LEAD_BEAT];
    world_run(world, ms);
    assert_true(world->sent[COX_FRAME_LEAD_BEAT] > count);
    return (world->sent_bytes[COX_FRAME_LEAD_BEAT] - bytes) /
           (world->sent[COX_FRAME_LEAD_BEAT] - count);
}

static void peers_are_sent_until_the_agent_has_them(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct cox_lead_link *link = &world->leads[0].link;
    char address[120];
    CoxNode__Peer peer = COX_NODE__PEER__INIT, *pointers[] = {&peer};
    memset(address, 'x', sizeof address - 1);
    address[sizeof address - 1] = '\0';
    peer.node = (char *)(uintptr_t) "b";
    peer.address = address;
    peer.has_incarnation = 1;
    peer.incarnation = 1;
    assert_true(beat_bytes(world, 1000) < 200);
    link->peers = pointers;
    link->peer_count = 1;
    link->peers_version = 1;
    link->changed = true;
    world->cut_to_lead_ns = world->now_ns + 250 * MS; /* its word does not come */
    assert_true(beat_bytes(world, 240) > 200);
    assert_true(world->agent.peer_count == 1 && world->agent.peers_version == 1);
    assert_int_equal(link->peers_there, 0);
    world_run(world, 150);
    assert_int_equal(link->peers_there, 1);
    assert_true(beat_bytes(world, 1000) < 200);
    assert_int_equal(world->agent.peer_count, 1);
    /* The first beats of a version are lost. */
    address[0] = 'y';
    link->peers_version = 2;
    link->changed = true;
    world->cut_to_agent_ns = world->now_ns + 150 * MS;
    world_run(world, 140);
    assert_true(world->agent.peers[0].address[0] == 'x');
    world_run(world, 150);
    assert_true(world->agent.peers[0].address[0] == 'y');
    assert_int_equal(link->peers_there, 2);
    /* One that was late is older. */
    CoxNode__LeadBeat beat = COX_NODE__LEAD_BEAT__INIT;
    const struct cox_frame head = {.kind = COX_FRAME_LEAD_BEAT, .epoch = 10, .incarnation = 1};
    struct cox_frame frame;
    size_t size;
    beat.has_peers_version = 1;
    beat.peers_version = 1;
    uint8_t *bytes = cox_frame_of_message(&head, &beat.base, &size);
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), NULL), 0);
    assert_true(world->agent.peers_version == 2 && world->agent.peer_count == 1);
    free(bytes);
    /* An agent that comes in its place has none, and gets them. */
    cox_agent_link_deinit(&world->agent);
    agent_start(world);
    world_run(world, 1500);
    assert_int_equal(link->state, COX_NODE_ALIVE);
    assert_int_equal(link->incarnation, 2);
    assert_true(world->agent.peer_count == 1 && link->peers_there == 2);
    world_free(world);
}

/* ---- beats ---- */

/* One request and its answer each step_ms. */
static void steps_run(struct world *world, uint64_t ms, uint64_t step_ms)
{
    struct lead *lead = &world->leads[0];
    for (uint64_t i = 0; i < ms / step_ms; i++) {
        lead_publish(world, lead, COX_CHANNEL_EXECUTE, 3, true, COX_DEADLINE_NEVER);
        world_run(world, step_ms);
    }
}

static void beats_where_nothing_else_is_said(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    uint64_t *sent = world->sent;
    world_run(world, 1000);
    sent[COX_FRAME_LEAD_BEAT] = sent[COX_FRAME_AGENT_BEAT] = 0;
    world_run(world, 3000);
    assert_in_range(sent[COX_FRAME_LEAD_BEAT], 29, 31);
    assert_in_range(sent[COX_FRAME_AGENT_BEAT], 29, 31);
    sent[COX_FRAME_LEAD_BEAT] = sent[COX_FRAME_AGENT_BEAT] = 0;
    steps_run(world, 3000, 50);
    assert_in_range(lead->ended, 55, 60);
    assert_in_range(sent[COX_FRAME_LEAD_BEAT], 2, 4); /* one per second */
    assert_in_range(sent[COX_FRAME_AGENT_BEAT], 2, 4);
    assert_int_equal(lead->suspicions, 0);
    assert_int_equal(lead->link.asked_again, 0);
    assert_int_equal(world->agent.repeated, 0);
    /* A change is said at once, and once more. */
    sent[COX_FRAME_LEAD_BEAT] = 0;
    cox_lead_link_cancel(&lead->link, COX_CHANNEL_EXECUTE, 1);
    cox_lead_link_tick(&lead->link, world->now_ns);
    assert_int_equal(sent[COX_FRAME_LEAD_BEAT], 1);
    steps_run(world, 150, 50);
    assert_in_range(sent[COX_FRAME_LEAD_BEAT], 2, 3);
    world_free(world);
}

/* Answers of another channel do not keep the agent from saying that a request has come. */
static void a_long_request_is_said_to_be_there(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
    struct cox_frame frame;
    uint64_t deadline_ns;
    /* Its ranks are at it throughout. */
    publish(world, COX_CHANNEL_TRANSFER, 3, true);
    world->now_ns += 1;
    while (world->packet_count) {
        const struct packet packet = world->packets[--world->packet_count];
        assert_int_equal(cox_frame_unpack(packet.bytes, packet.size, &frame, NULL), 0);
        if (!packet.to_lead)
            cox_agent_link_receive(&world->agent, &frame, agent_now(world), NULL);
        free(packet.bytes);
    }
    assert_true(cox_agent_link_next(&world->agent, COX_CHANNEL_TRANSFER, agent_now(world), &frame,
                                    &deadline_ns));
    cox_agent_link_taken(&world->agent, COX_CHANNEL_TRANSFER, frame.sequence, false);
    steps_run(world, 500, 20);
    assert_true(lead->asked[COX_CHANNEL_TRANSFER][1].taken);
    assert_int_equal(lead->link.asked_again, 0);
    world_free(world);
}

/* What was sent may be on its way for long: it is no sign of life. */
static void large_frames_do_not_stand_for_beats(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct cox_lead_link *link = &world->leads[0].link;
    static const uint8_t large[100000];
    const struct cox_rank_set asked = {{1u << RANK_FIRST}};
    struct cox_transport_request request = {.channel = COX_CHANNEL_EXECUTE,
                                            .deadline_ns = COX_DEADLINE_NEVER,
                                            .replies = true,
                                            .asked = &asked,
                                            .bytes = large};
    world_run(world, 500);
    for (uint32_t i = 0; i < 2; i++) {
        request.size = i ? sizeof large : 10;
        const uint64_t now_ns = world->now_ns += 1000 * MS;
        link->heard_ns = link->tick_ns = link->beat_ns = link->spoke_ns = now_ns;
        link->changed = link->again = false;
        world->sent[COX_FRAME_LEAD_BEAT] = 0;
        request.sequence++;
        cox_lead_link_publish(link, &request, now_ns + times.beat_ms * MS / 2);
        cox_lead_link_tick(link, now_ns + times.beat_ms * MS);
        assert_int_equal(world->sent[COX_FRAME_LEAD_BEAT], i);
    }
    world_free(world);
}

/* ---- two leads ---- */

/* From its next tick on: it believes then that it has heard the node suspect_ms ago. */
static void lead_wakes(struct world *world, struct lead *lead)
{
    const uint64_t tick_ns = LEAD_TICK_MS * MS;
    lead->alive = true;
    lead->heard_ns = (world->now_ns / tick_ns + 1) * tick_ns - times.suspect_ms * MS;
}

static void a_lead_learns_that_it_was_taken_over(void **state)
{
    (void)state;
    struct world *world = world_up();
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
    world_free(world);
}

/* What was sent to it meanwhile is yet to be read. */
static void a_lead_that_was_stopped_blames_no_node(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
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
    world_free(world);
}

static void another_release_is_refused(void **state)
{
    (void)state;
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
    assert_non_null(strstr(text, "0.9.7, whose protocol between nodes is 9; the lead has "));
    hello.version = NULL;
    hello.protocol = COX_FRAME_PROTOCOL;
    assert_false(cox_lead_link_release_agrees(link, &hello, text, sizeof text));
    assert_non_null(strstr(text, "Coxswain ?, "));
    world_free(world);
}

/* A lead whose numbers are nonsense does not keep the agent busy. */
/* One frame for all nodes: an agent takes it only if it has the peers that the frame is of. */
static void a_request_to_all(void **state)
{
    (void)state;
    struct world *world = world_up();
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
    world_free(world);
}

static void numbers_far_apart(void **state)
{
    (void)state;
    struct world *world = world_up();
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
    world_free(world);
}

/* ---- flight recorders ---- */

/* A reply to the fetch, of that many bytes more than a recorder has. */
static uint8_t *recorder_reply(const struct cox_recorder_fetch *fetch, const void *copy, int more,
                               struct cox_frame *ret_frame)
{
    const struct cox_frame ask = {.kind = COX_FRAME_RECORDER_ASK, .sequence = fetch->number};
    size_t size;
    uint8_t *bytes = cox_recorder_fetch_reply(&ask, fetch->rank, copy, 7, &size);
    assert_non_null(bytes);
    assert_int_equal(cox_frame_unpack(bytes, size, ret_frame, NULL), 0);
    if (more) {
        size = (size_t)((int64_t)size + more);
        uint8_t *other = calloc(1, size);
        assert_non_null(other);
        ret_frame->size = size - COX_FRAME_HEAD_SIZE;
        memcpy(other, bytes, more < 0 ? size : size - (size_t)more);
        cox_frame_pack_head(ret_frame, other);
        free(bytes);
        bytes = other;
        assert_int_equal(cox_frame_unpack(bytes, size, ret_frame, NULL), 0);
    }
    return bytes;
}

static void recorders_are_awaited_and_checked(void **state)
{
    (void)state;
    const size_t size = cox_recorder_block_size(false);
    uint8_t *block = calloc(1, size), *copy = calloc(1, size);
    struct cox_recorder_fetches fetches = {0};
    struct cox_recorder_fetch fetch = {.rank = RANK_FIRST + 1, .copy = copy}, other = fetch;
    struct cox_frame frame;
    assert_true(block && copy);
    cox_recorder_block_init(block, fetch.rank, 1, NULL);
    memset(block + 4096, 0x5a, 64);
    cox_recorder_fetch_begin(&fetches, &other);
    cox_recorder_fetch_begin(&fetches, &fetch);
    assert_true(fetch.number != other.number);
    uint8_t *bytes = recorder_reply(&fetch, block, 0, &frame);
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
    assert_memory_equal(copy, block, size);
    assert_false(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    cox_recorder_fetch_end(&fetches, &other);
    cox_recorder_fetch_end(&fetches, &fetch);
    assert_null(fetches.first);
    assert_false(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    free(bytes);
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
        memset(block, 0, size);
        memset(copy, 0, size);
        cox_recorder_block_init(block, bad[i].rank, 1, NULL);
        if (bad[i].value)
            block[bad[i].offset] = bad[i].value;
        cox_recorder_fetch_begin(&fetches, &fetch);
        bytes = recorder_reply(&fetch, block, bad[i].more, &frame);
        assert_true(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
        assert_int_equal(fetch.status, COX_CORRUPT);
        assert_int_equal(fetch.err.code, COX_CORRUPT);
        if (!strstr(fetch.err.text, bad[i].text))
            fail_msg("'%s' instead of '%s'", fetch.err.text, bad[i].text);
        for (size_t k = 0; k < size; k++)
            assert_int_equal(copy[k], 0);
        cox_recorder_fetch_end(&fetches, &fetch);
        free(bytes);
    }
    /* Nothing is recorded. */
    cox_recorder_fetch_begin(&fetches, &fetch);
    bytes = recorder_reply(&fetch, NULL, 0, &frame);
    assert_int_equal(frame.size, 0);
    assert_true(cox_recorder_fetch_take(&fetches, &frame, "b", RANK_FIRST, RANK_COUNT));
    assert_true(fetch.status == COX_NOT_FOUND && fetch.err.code == 0);
    free(bytes);
    free(block);
    free(copy);
}

static void recorders_are_asked_for_by_the_lead_that_is_followed(void **state)
{
    (void)state;
    struct world *world = world_up();
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
    world_free(world);
}

static void usage_is_in_one_beat(void **state)
{
    (void)state;
    struct world *world = world_up();
    struct lead *lead = &world->leads[0];
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
    world_free(world);
}

/* ---- bytes ---- */

static void frames_as_bytes(void **state)
{
    (void)state;
    uint8_t bytes[COX_FRAME_HEAD_SIZE + 5] = {0};
    struct cox_frame frame = {.kind = COX_FRAME_REQUEST,
                              .channel = COX_TWO_WAY_COUNT - 1,
                              .type = 0x01020304,
                              .epoch = UINT64_C(0x1112131415161718),
                              .incarnation = 3,
                              .sequence = 4,
                              .previous = 5,
                              .deadline_ns = 6,
                              .sent_ns = 7,
                              .void_through = 8,
                              .gone = 11,
                              .asked = {{9, 10}},
                              .size = 5};
    static const uint8_t head[] = {'C',  'X',  'N',  '1',  3,    COX_TWO_WAY_COUNT - 1,
                                   0,    0,    4,    3,    2,    1,
                                   5,    0,    0,    0,    0x18, 0x17,
                                   0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
                                   3};
    struct cox_frame again;
    struct cox_error err = {0};
    cox_frame_pack_head(&frame, bytes);
    assert_memory_equal(bytes, head, sizeof head);
    for (int i = 0; i < 6; i++) { /* from sequence on */
        static const uint8_t offsets[] = {32, 40, 48, 56, 64, 72}, values[] = {4, 5, 6, 7, 9, 10};
        assert_int_equal(bytes[offsets[i]], values[i]);
    }
    assert_int_equal(bytes[80], 8);
    assert_int_equal(bytes[88], 11);
    assert_int_equal(cox_frame_unpack(bytes, sizeof bytes, &again, &err), 0);
    frame.payload = bytes + COX_FRAME_HEAD_SIZE;
    assert_true(again.kind == frame.kind && again.channel == frame.channel &&
                again.type == frame.type && again.epoch == frame.epoch &&
                again.incarnation == frame.incarnation && again.sequence == frame.sequence &&
                again.previous == frame.previous && again.deadline_ns == frame.deadline_ns &&
                again.sent_ns == frame.sent_ns && again.void_through == frame.void_through &&
                again.gone == frame.gone && again.payload == frame.payload &&
                again.size == frame.size &&
                !memcmp(&again.asked, &frame.asked, sizeof again.asked));
    for (size_t size = 0; size < sizeof bytes; size++)
        assert_int_equal(cox_frame_unpack(bytes, size, &again, &err), COX_CORRUPT);
    static const struct {
        uint8_t offset, value;
        const char *text;
    } bad[] = {
        {0, 'D', "begins with"},
        {4, 0, "kind 0"},
        {4, COX_FRAME_KIND_COUNT, "kind"},
        {4, 255, "kind 255"},
        {5, COX_TWO_WAY_COUNT, "channel"},
        {5, 255, "channel 255"},
        {12, 4, "payload has 4"},
        {12, 6, "payload has 6"},
        {15, 1, "payload has"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t broken[sizeof bytes];
        memcpy(broken, bytes, sizeof bytes);
        broken[bad[i].offset] = bad[i].value;
        memset(&err, 0, sizeof err);
        assert_int_equal(cox_frame_unpack(broken, sizeof broken, &again, &err), COX_CORRUPT);
        assert_non_null(strstr(err.text, bad[i].text));
    }
    for (int kind = 1; kind < COX_FRAME_KIND_COUNT; kind++)
        assert_string_not_equal(cox_frame_kind_name((enum cox_frame_kind)kind), "unknown");
    assert_string_equal(cox_frame_kind_name((enum cox_frame_kind)0), "unknown");
    assert_string_equal(cox_frame_kind_name(COX_FRAME_KIND_COUNT), "unknown");
}

static void answers_as_bytes(void **state)
{
    (void)state;
    const struct cox_answer answer = {
        .status = -5,
        .count = 3,
        .replies = {
            {.rank = 5, .flags = COX_ANSWER_REPLIED, .bytes = (const uint8_t *)"abc", .size = 3},
            {.rank = 4, .flags = COX_ANSWER_DEAD},
            {.rank = 6,
             .flags = COX_ANSWER_REPLIED | COX_ANSWER_FAILED,
             .bytes = (const uint8_t *)"defg",
             .size = 4}}};
    struct cox_answer again;
    struct cox_error err = {0};
    uint8_t bytes[64];
    const size_t size = cox_answer_size(&answer);
    assert_int_equal(size, 8 + 3 * 12 + 7);
    cox_answer_pack(&answer, bytes);
    assert_int_equal(cox_answer_unpack(bytes, size, 4, 7, &again, &err), 0);
    assert_true(again.status == -5 && again.count == 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(again.replies[i].rank == answer.replies[i].rank &&
                    again.replies[i].flags == answer.replies[i].flags &&
                    again.replies[i].size == answer.replies[i].size);
        assert_memory_equal(again.replies[i].bytes, i ? (i == 2 ? "defg" : "") : "abc",
                            again.replies[i].size);
    }
    /* Of all sizes but this. */
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *exact = malloc(cut ? cut : 1);
        assert_non_null(exact);
        memcpy(exact, bytes, cut);
        assert_int_equal(cox_answer_unpack(exact, cut, 4, 7, &again, &err), COX_CORRUPT);
        free(exact);
    }
    bytes[size] = 0;
    err = (struct cox_error){0};
    assert_int_equal(cox_answer_unpack(bytes, size + 1, 4, 7, &again, &err), COX_CORRUPT);
    assert_non_null(strstr(err.text, "1 bytes too many"));
    /* Of other ranks: of the first, of the last, and too many. */
    err = (struct cox_error){0};
    assert_int_equal(cox_answer_unpack(bytes, size, 5, 8, &again, &err), COX_CORRUPT);
    assert_non_null(strstr(err.text, "rank 4"));
    err = (struct cox_error){0};
    assert_int_equal(cox_answer_unpack(bytes, size, 3, 6, &again, &err), COX_CORRUPT);
    assert_non_null(strstr(err.text, "rank 6"));
    err = (struct cox_error){0};
    assert_int_equal(cox_answer_unpack(bytes, size, 5, 7, &again, &err), COX_CORRUPT);
    assert_non_null(strstr(err.text, "3 replies of 2 ranks"));
    static const struct {
        uint8_t offset, value;
    } bad[] = {
        {4, 4},          /* more replies than there are */
        {7, 255},        /* many more */
        {8, 4},          /* rank 4 twice */
        {8 + 12 + 3, 5}, /* rank 5 twice */
        {8 + 2, 1},      /* a rank over all */
        {8 + 8, 4},
        {8 + 8, 2},    /* another size */
        {8 + 11, 255}, /* a very large one */
        {8 + 12 + 3 + 12 + 8 + 3, 128},
        {8 + 4, COX_ANSWER_FAILED << 1}, /* flags that there are not */
        {8 + 7, 128},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t broken[64];
        memcpy(broken, bytes, size);
        broken[bad[i].offset] = bad[i].value;
        if (cox_answer_unpack(broken, size, 4, 7, &again, &err) != COX_CORRUPT)
            fail_msg("form %zu was taken", i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recorders_are_awaited_and_checked),
        cmocka_unit_test(recorders_are_asked_for_by_the_lead_that_is_followed),
        cmocka_unit_test(usage_is_in_one_beat),
        cmocka_unit_test(frames_as_bytes),
        cmocka_unit_test(answers_as_bytes),
        cmocka_unit_test(a_request_runs_and_is_answered),
        cmocka_unit_test(a_lost_request_is_sent_again),
        cmocka_unit_test(a_lost_request_without_a_reply_is_sent_again),
        cmocka_unit_test(requests_that_are_given_up_are_not_waited_for),
        cmocka_unit_test(a_lost_answer_is_sent_again_and_nothing_runs_twice),
        cmocka_unit_test(a_deadline_passes_on_the_way),
        cmocka_unit_test(ranks_that_are_late_reply_by_done),
        cmocka_unit_test(a_dead_rank_is_not_late),
        cmocka_unit_test(a_late_rank_beside_a_dead_one),
        cmocka_unit_test(silence_is_suspect_and_then_death),
        cmocka_unit_test(a_suspect_node_gets_what_was_held_back),
        cmocka_unit_test(frames_of_other_lives_are_dropped),
        cmocka_unit_test(beats_of_a_second_agent_are_dropped),
        cmocka_unit_test(beats_that_cannot_be_read),
        cmocka_unit_test(a_lead_is_lost_and_found),
        cmocka_unit_test(grace_ends),
        cmocka_unit_test(a_greater_epoch_takes_over),
        cmocka_unit_test(ranks_come_and_go),
        cmocka_unit_test(ranks_of_a_dead_node_do_not_come_again),
        cmocka_unit_test(a_rank_that_never_attached),
        cmocka_unit_test(cancelled_steps_and_the_end),
        cmocka_unit_test(peers_and_hello),
        cmocka_unit_test(peers_are_sent_until_the_agent_has_them),
        cmocka_unit_test(beats_where_nothing_else_is_said),
        cmocka_unit_test(a_long_request_is_said_to_be_there),
        cmocka_unit_test(large_frames_do_not_stand_for_beats),
        cmocka_unit_test(a_lead_learns_that_it_was_taken_over),
        cmocka_unit_test(a_lead_that_was_stopped_blames_no_node),
        cmocka_unit_test(another_release_is_refused),
        cmocka_unit_test(a_request_to_all),
        cmocka_unit_test(numbers_far_apart),
        cmocka_unit_test(a_good_network),
        cmocka_unit_test(frames_are_lost_and_repeated),
        cmocka_unit_test(frames_change_places),
        cmocka_unit_test(the_network_parts),
        cmocka_unit_test(agents_and_leads_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
