/* The rules between a lead and an agent (nodes/link), under seeds and one by one. */
#include "link_world.h"

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

#define SEEDS_TEST(name, first, count, ms, ...)                                                    \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        seeds_run(&(struct faults){__VA_ARGS__}, first, count, ms);                                \
    }

SEEDS_TEST(a_good_network, 1, SEED_COUNT / 10, 1000, .delay_max_ms = 3, .late = 50)
SEEDS_TEST(frames_are_lost_and_repeated, 100000, SEED_COUNT / 3, 1500, .loss = 100, .repeat = 100,
           .delay_max_ms = 5, .late = 50)
SEEDS_TEST(frames_change_places, 200000, SEED_COUNT / 3, 1500, .loss = 50, .repeat = 50,
           .delay_max_ms = 60, .reorder = true, .late = 30, .rank_death = 50)
SEEDS_TEST(the_network_parts, 300000, SEED_COUNT / 3, 3000, .loss = 20, .repeat = 20,
           .delay_max_ms = 10, .late = 30, .partition = 100, .rank_death = 20)
SEEDS_TEST(agents_and_leads_end, 400000, SEED_COUNT / 3, 3000, .loss = 20, .repeat = 30,
           .delay_max_ms = 20, .reorder = true, .late = 20, .partition = 60, .restart = 40,
           .takeover = 60)

/* ---- one rule after the other ---- */

WORLD_TEST(a_request_runs_and_is_answered)
{
    for (uint32_t k = 0; k < DEPTH; k++)
        publish(world, COX_CHANNEL_EXECUTE, 3, true);
    assert_false(lead_publish(world, lead, COX_CHANNEL_EXECUTE, 3, true, COX_DEADLINE_NEVER));
    world_run(world, 100);
    assert_int_equal(world->runs, DEPTH);
    assert_int_equal(lead->ended, DEPTH);
    assert_int_equal(lead->link.asked_again, 0);
    assert_int_equal(lead->late, 0);
}

WORLD_TEST(a_lost_request_is_sent_again)
{
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
}

/* Replies do not say that a request without a reply has come. */
WORLD_TEST(a_lost_request_without_a_reply_is_sent_again)
{
    world->cut_to_agent_ns = world->now_ns + 20 * MS;
    publish(world, COX_CHANNEL_EXECUTE, 3, false);
    world_run(world, 120); /* beats come meanwhile */
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 500);
    assert_int_equal(world->runs, 2);
    assert_int_equal(lead->ended, 2);
}

/* Their ranks are dead before the node has them; then others are sent in their place. */
WORLD_TEST(requests_that_are_given_up_are_not_waited_for)
{
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
}

WORLD_TEST(a_lost_answer_is_sent_again_and_nothing_runs_twice)
{
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
}

WORLD_TEST(a_deadline_passes_on_the_way)
{
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
}

WORLD_TEST(ranks_that_are_late_reply_by_done)
{
    world->faults.late = 1000;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 300);
    assert_int_equal(world->runs, 1);
    assert_int_equal(lead->late, 1);
    assert_int_equal(lead->ended, 1);
}

/* The answer, and a beat that says it is done, come before the node says why the rank died. */
WORLD_TEST(a_dead_rank_is_not_late)
{
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
}

/* One rank is dead, and the node does not say why; the other is late, and does not wait for it. */
WORLD_TEST(a_late_rank_beside_a_dead_one)
{
    world->dead[1] = true;
    world->faults.late = 1000;
    publish(world, COX_CHANNEL_EXECUTE, 3, true);
    world_run(world, 300);
    assert_int_equal(lead->late, 1);
    assert_int_equal(lead->ended, 0);
    world_run(world, 2000);
    assert_int_equal(lead->late, 2);
    assert_int_equal(lead->ended, 1);
}

WORLD_TEST(silence_is_suspect_and_then_death)
{
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
    assert_contains(text, "node b is suspect: not heard for 3");
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
    assert_contains(lead->died_text, "is lost: node b has not been heard for 8");
    assert_int_equal(lead->ended, 2);
    assert_true(cox_lead_link_trouble(&lead->link, world->now_ns, text, sizeof text));
    assert_contains(text, "node b has not been heard for");
    world_heal(world);
}

WORLD_TEST(a_suspect_node_gets_what_was_held_back)
{
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
}

/* A frame of a lead and its node, other than the present one. */
WORLD_TEST(frames_of_other_lives_are_dropped)
{
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
}

static int beat_of(struct world *world, uint64_t agent)
{
    CoxNode__AgentBeat beat = COX_NODE__AGENT_BEAT__INIT;
    beat.has_agent = 1;
    beat.agent = agent;
    const struct cox_frame frame = frame_of(world, COX_FRAME_AGENT_BEAT, &beat.base);
    return cox_lead_link_receive(&world->leads[0].link, &frame, world->now_ns, NULL);
}

WORLD_TEST(beats_of_a_second_agent_are_dropped)
{
    const uint64_t heard_ns = lead->link.heard_ns;
    world->now_ns += 50 * MS;
    assert_int_equal(beat_of(world, world->agent.agent + 1), COX_STALE);
    assert_true(lead->link.heard_ns == heard_ns); /* it does not keep a dead node alive */
    assert_int_equal(beat_of(world, world->agent.agent), 0);
    assert_true(lead->link.heard_ns == world->now_ns);
}

WORLD_TEST(beats_that_cannot_be_read)
{
    static const uint8_t bad[] = {0x0a, 0x7f};
    struct cox_frame frame = {.kind = COX_FRAME_AGENT_BEAT,
                              .epoch = 10,
                              .incarnation = 1,
                              .payload = bad,
                              .size = sizeof bad};
    assert_refused(cox_lead_link_receive(&world->leads[0].link, &frame, world->now_ns, test_err()),
                   COX_CORRUPT, "2 bytes");
    frame.kind = COX_FRAME_LEAD_BEAT;
    assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), NULL),
                     COX_CORRUPT);
    frame.kind = COX_FRAME_HELLO;
    assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), NULL),
                     COX_CORRUPT);
    frame.kind = COX_FRAME_ANSWER;
    assert_int_equal(cox_lead_link_receive(&world->leads[0].link, &frame, world->now_ns, NULL),
                     COX_CORRUPT);
}

WORLD_TEST(a_lead_is_lost_and_found)
{
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
}

WORLD_TEST(grace_ends)
{
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
}

WORLD_TEST(a_greater_epoch_takes_over)
{
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
    assert_true(link->wanted[0] == 0 && link->wanted[1] == 0 && !link->finishing && !link->failed);
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
}

WORLD_TEST(ranks_come_and_go)
{
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
}

/* The executor wants another process for each rank of a dead node. */
PLAIN_TEST(ranks_of_a_dead_node_do_not_come_again)
{
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

PLAIN_TEST(a_rank_that_never_attached)
{
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
    const struct cox_frame frame = frame_of(world, COX_FRAME_AGENT_BEAT, &beat.base);
    lead_pump(world, lead);
    assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns, NULL), 0);
    struct cox_lead_event *event = cox_lead_events_take(&lead->events);
    assert_true(event && event->kind == COX_LEAD_RANK_DIED && event->sequence == 1);
    assert_string_equal(event->text, "is dead");
    cox_lead_event_free(event);
    /* Once, though every beat says it. */
    assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns, NULL), 0);
    assert_null(cox_lead_events_take(&lead->events));
    world_free(world);
}

WORLD_TEST(cancelled_steps_and_the_end)
{
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
    lead->link.finishing = lead->link.failed = lead->link.changed = true;
    world_run(world, 15);
    assert_true(world->agent.finishing && world->agent.failed);
    cox_agent_link_leave(&world->agent, "was told to end", agent_now(world));
    assert_int_equal(world->agent.state, COX_LEAD_OVER);
    const struct packet *last = &world->packets[world->packet_count - 1];
    struct cox_frame frame;
    assert_true(last->to_lead);
    assert_int_equal(cox_frame_unpack(last->bytes, last->size, &frame, NULL), 0);
    assert_int_equal(cox_lead_link_receive(&lead->link, &frame, world->now_ns, NULL), 0);
    assert_int_equal(lead->link.state, COX_NODE_ABSENT);
    assert_string_equal(lead->link.reason, "was told to end");
}

WORLD_TEST(peers_and_hello)
{
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

WORLD_TEST(peers_are_sent_until_the_agent_has_them)
{
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
    beat.has_peers_version = 1;
    beat.peers_version = 1;
    const struct cox_frame frame = frame_of(world, COX_FRAME_LEAD_BEAT, &beat.base);
    assert_int_equal(cox_agent_link_receive(&world->agent, &frame, agent_now(world), NULL), 0);
    assert_true(world->agent.peers_version == 2 && world->agent.peer_count == 1);
    /* An agent that comes in its place has none, and gets them. */
    cox_agent_link_deinit(&world->agent);
    agent_start(world);
    world_run(world, 1500);
    assert_int_equal(link->state, COX_NODE_ALIVE);
    assert_int_equal(link->incarnation, 2);
    assert_true(world->agent.peer_count == 1 && link->peers_there == 2);
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

WORLD_TEST(beats_where_nothing_else_is_said)
{
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
}

/* Answers of another channel do not keep the agent from saying that a request has come. */
WORLD_TEST(a_long_request_is_said_to_be_there)
{
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
}

/* What was sent may be on its way for long: it is no sign of life. */
/* Of so many bytes nobody has a copy. */
WORLD_TEST(a_request_without_memory_is_late_and_the_next_one_runs)
{
    struct cox_lead_link *link = &lead->link;
    const uint32_t c = COX_CHANNEL_EXECUTE;
    struct cox_rank_set asked = {{0}};
    cox_rank_set_add(&asked, RANK_FIRST);
    const struct cox_transport_request request = {.channel = (enum cox_channel_id)c,
                                                  .sequence = lead->next[c]++,
                                                  .deadline_ns = COX_DEADLINE_NEVER,
                                                  .replies = true,
                                                  .asked = &asked,
                                                  .bytes = &asked,
                                                  .size = PTRDIFF_MAX - 4096};
    const uint64_t last = link->channels[c].last_sent;
    cox_lead_link_publish(link, &request, NULL, world->now_ns);
    struct cox_lead_event *event = cox_lead_events_take(link->events);
    assert_non_null(event);
    assert_int_equal(event->kind, COX_LEAD_REPLY);
    assert_int_equal(event->rank, RANK_FIRST);
    assert_int_equal(event->sequence, request.sequence);
    assert_null(event->bytes);
    cox_lead_event_free(event);
    assert_null(cox_lead_events_take(link->events));
    assert_int_equal(link->channels[c].last_sent, last);
    publish(world, c, 3, true);
    world_run(world, 100);
    assert_int_equal(world->runs, 1);
    assert_int_equal(lead->ended, 1);
    assert_int_equal(world->agent.gaps, 0);
}

WORLD_TEST(large_frames_do_not_stand_for_beats)
{
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
        cox_lead_link_publish(link, &request, NULL, now_ns + times.beat_ms * MS / 2);
        cox_lead_link_tick(link, now_ns + times.beat_ms * MS);
        assert_int_equal(world->sent[COX_FRAME_LEAD_BEAT], i);
    }
}
