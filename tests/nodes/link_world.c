#include "link_world.h"

const struct cox_node_times times = COX_NODE_TIMES_DEFAULT;
uint64_t seed_now;

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

uint64_t agent_now(const struct world *world)
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

void agent_start(struct world *world)
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
            uint64_t number = 0;
            if (frame.payload)
                memcpy(&number, frame.payload, sizeof number);
            else
                assert_int_equal(
                    pread(cox_payload_memory_fd(frame.memory), &number, sizeof number, 0), 8);
            CHECK(frame.size == sizeof number && number == frame.sequence);
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

/* Some of the requests come in memory, to which the link refers or not. */
static int agent_receive(struct world *world, struct cox_frame *frame, struct cox_error *err)
{
    struct cox_payload_memory *memory = NULL;
    if (frame->kind != COX_FRAME_REQUEST || !chance(world, 1, 32))
        return cox_agent_link_receive(&world->agent, frame, agent_now(world), err);
    assert_int_equal(cox_payload_memory_take(&world->memory, frame->size, &memory, NULL), 0);
    uint8_t *kept = cox_payload_memory_bytes(memory);
    if (kept)
        memcpy(kept, frame->payload, frame->size);
    else
        assert_int_equal(cox_payload_memory_fill(memory, 0, frame->payload, frame->size, NULL), 0);
    assert_int_equal(cox_payload_memory_finish(memory, NULL), 0);
    frame->payload = NULL;
    int r = cox_agent_link_receive_memory(&world->agent, frame, memory, agent_now(world), err);
    cox_payload_memory_unref(memory);
    return r;
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
        int r = agent_receive(world, &frame, &err);
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
                         size_t size, struct cox_large_request *large)
{
    struct world *world = context;
    struct cox_frame frame;
    if (large) {
        bytes = realloc(bytes, size + cox_large_request_size(large));
        assert_non_null(bytes);
        memcpy(bytes + size, cox_large_request_bytes(large), cox_large_request_size(large));
        size += cox_large_request_size(large);
    }
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    CHECK(link->state != COX_NODE_ABSENT);
    CHECK(link->state != COX_NODE_SUSPECT || frame.kind == COX_FRAME_LEAD_BEAT);
    CHECK(frame.epoch == link->epoch && frame.incarnation == link->incarnation);
    if (world->to_all && frame.kind == COX_FRAME_REQUEST && link->state == COX_NODE_ALIVE &&
        link->peers_there == link->peers_version && chance(world, 1, 2))
        cox_frame_address_all(bytes, link->peers_version);
    net_put(world, false, bytes, size, false);
}

void lead_start(struct world *world, uint32_t index, uint64_t epoch, uint64_t first)
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

void lead_pump(struct world *world, struct lead *lead)
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
bool lead_publish(struct world *world, struct lead *lead, uint32_t c, uint32_t bits, bool replies,
                  uint64_t deadline_ns)
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
    /* Some as if they were large, in memory of their own: sent again, given up, forgotten like
     * others. */
    struct cox_large_request *large =
        chance(world, 1, 32) ? cox_large_request_new(sizeof sequence) : NULL;
    if (large)
        cox_large_request_fill(large, &sequence);
    cox_lead_link_publish(&lead->link, &request, large, world->now_ns);
    cox_large_request_unref(large);
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

uint32_t lead_owed(const struct lead *lead)
{
    uint32_t owed = 0;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t k = 0; k < DEPTH; k++)
            owed += lead->asked[c][k].owed != 0;
    return owed;
}

/* ---- time ---- */

void net_deliver(struct world *world)
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

void world_run(struct world *world, uint64_t ms)
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

struct world *world_new(uint64_t seed, const struct faults *faults)
{
    struct world *world = calloc(1, sizeof *world);
    assert_non_null(world);
    seed_now = seed;
    world->random = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    world->now_ns = 5000 * MS;
    world->agent_id = 1000;
    cox_payload_memory_pool_init(&world->memory);
    if (faults)
        world->faults = *faults;
    world->to_all = faults != NULL;
    agent_start(world);
    lead_start(world, 0, 10, 0);
    return world;
}

void world_free(struct world *world)
{
    struct cox_lead_event *event;
    for (uint32_t i = 0; i < LEAD_COUNT; i++) {
        while (world->leads[i].link.depth &&
               (event = cox_lead_events_take(&world->leads[i].events)))
            cox_lead_event_free(event);
        cox_lead_link_deinit(&world->leads[i].link);
    }
    cox_agent_link_deinit(&world->agent);
    cox_payload_memory_pool_deinit(&world->memory);
    for (size_t i = 0; i < world->packet_count; i++)
        free(world->packets[i].bytes);
    free(world);
}

/* Without faults the node is there again, every request ends, and new ones do. */
void world_heal(struct world *world)
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

struct cox_frame frame_of(const struct world *world, enum cox_frame_kind kind,
                          const ProtobufCMessage *message)
{
    const struct cox_lead_link *link = &world->leads[0].link;
    const struct cox_frame head = {
        .kind = kind, .epoch = link->epoch, .incarnation = link->incarnation};
    struct cox_frame frame;
    size_t size;
    const uint8_t *bytes = test_own(cox_frame_of_message(&head, message, &size), free);
    assert_int_equal(cox_frame_unpack(bytes, size, &frame, NULL), 0);
    return frame;
}

struct world *world_up(void)
{
    struct world *world = world_new(0, NULL);
    const struct lead *lead = &world->leads[0];
    world_run(world, 500);
    assert_int_equal(lead->link.state, COX_NODE_ALIVE);
    assert_int_equal(world->agent.state, COX_LEAD_FOLLOWING);
    assert_true(lead->attached[0] && lead->attached[1]);
    return world;
}

void publish(struct world *world, uint32_t c, uint32_t bits, bool replies)
{
    assert_true(lead_publish(world, &world->leads[0], c, bits, replies, COX_DEADLINE_NEVER));
}
