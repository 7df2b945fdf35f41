#include "report.h"

#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/shm/state.h"
#include "coordinator/stacks/sentence.h"
#include "coordinator/transport/transport.h"
#include "proto/executor.pb-c.h"
#include "proto/operation.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The number of ranks per kind of failure whose own text is included, and the bytes for all of
 * these together. */
#define REPORTED_COUNT 4
#define TOLD_SIZE 600
/* Of a step's reply: the begin of its chain, and the digests (StepResult in executor.proto). */
#define DIGESTS_SIZE (1 + COX_DIGEST_COUNT)
/* Values of one digest that are told apart. */
#define SIDE_COUNT_MAX 4

void cox_report_death(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                      size_t buffer_size)
{
    char lines[400];
    if (cox_supervisor_dead(supervisor, rank, NULL))
        cox_supervisor_describe(supervisor, rank, buffer, buffer_size);
    else
        snprintf(buffer, buffer_size,
                 "rank %" PRIu32 " (pid %jd) left the group, its process lives", rank,
                 (intmax_t)cox_supervisor_pid(supervisor, rank));
    if (cox_supervisor_last_lines(supervisor, rank, lines, sizeof lines))
        cox_sentence_append(buffer, buffer_size, "; its last lines: %s", lines);
}

static void rank_read_hold(const struct cox_collector *collector, uint32_t rank, pid_t pid,
                           char text[COX_PEER_HOLD_SIZE])
{
    const struct cox_transport *transport = collector->transport;
    if (!transport) {
        cox_peer_read_hold(pid, text);
        return;
    }
    struct cox_transport_process process = {0};
    if (transport->process)
        transport->process(transport->context, rank, &process);
    snprintf(text, COX_PEER_HOLD_SIZE, "%s", process.stopped ? "stopped by a signal" : "");
}

/* Adds to the text of each late rank that could go on whom it may wait for. Ranks exchange values
 * within a step: one that cannot go on holds up the others, which look busy. */
static void report_delays(const struct cox_collector *collector, struct cox_replies *replies)
{
    struct cox_rank_set delaying = {{0}};
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        const bool delays =
            replies->results[rank].outcome == COX_OUTCOME_LATE && replies->ranks[rank].delays;
        if (delays)
            cox_rank_set_add(&delaying, rank);
        count += delays;
    }
    for (uint32_t rank = 0; count && rank < collector->rank_count; rank++) {
        if (replies->results[rank].outcome != COX_OUTCOME_LATE || replies->ranks[rank].delays)
            continue;
        char *text = replies->ranks[rank].text;
        cox_sentence_append(text, COX_RANK_TEXT_SIZE, ", and may wait for rank%s ",
                            count > 1 ? "s" : "");
        cox_sentence_append_set(text, COX_RANK_TEXT_SIZE, &delaying);
    }
}

void cox_report_look(const struct cox_collector *collector, struct cox_replies *replies,
                     uint32_t rank)
{
    rank_read_hold(collector, rank, replies->results[rank].pid, replies->ranks[rank].text);
}

void cox_report_late(const struct cox_collector *collector, const struct cox_entry *entry,
                     int status, struct cox_replies *replies)
{
    static const char *const states[] = {"idle", "taken", "running", "replying"};
    uint64_t now = cox_now_ns();
    /* Looks began at most so long before the deadline, at which this thread may have been late. */
    const uint64_t looks_ns = collector->rank_count * COX_REPORT_LOOK_NS + COX_NSEC_PER_MSEC;
    const uint32_t looked_count = now - entry->looked_ns < looks_ns ? entry->look_rank : 0;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        struct cox_rank_result *result = &replies->results[rank];
        if (result->outcome != COX_OUTCOME_LATE)
            continue;
        char *text = replies->ranks[rank].text;
        uint64_t since = entry->published_ns;
        const struct cox_layout_rank_line *line =
            cox_state_line(collector->channel->control, rank, collector->channel->id);
        const struct cox_rank_word said = cox_state_of_rank(line);
        result->taken = cox_state_taken(line) >= entry->sequence;
        if (result->taken && said.stamp_ns > since && said.stamp_ns <= now)
            since = said.stamp_ns;
        const char *state =
            result->taken ? states[(said.word >> COX_STATE_SHIFT) & 3] : "never took it";
        result->silent_ns = now > since ? now - since : 0;
        bool alive = !cox_rank_is_dead(&collector->records[rank]);
        char hold[COX_PEER_HOLD_SIZE] = "";
        /* /proc is not read for a death, so that its report is not delayed. */
        if (alive && rank < looked_count)
            snprintf(hold, sizeof hold, "%.*s", COX_PEER_HOLD_SIZE - 1, text);
        else if (alive && status != COX_PEER_DEAD)
            rank_read_hold(collector, rank, result->pid, hold);
        replies->ranks[rank].delays = alive && (!result->taken || hold[0]);
        snprintf(text, COX_RANK_TEXT_SIZE,
                 "rank %" PRIu32 " (pid %jd) had not replied: %s, silent for %.3f s, %s%s%s", rank,
                 (intmax_t)result->pid, state, (double)result->silent_ns / 1e9,
                 alive ? "alive" : "dead", hold[0] ? " but " : "", hold);
        result->text = text;
    }
    if (status != COX_PEER_DEAD)
        report_delays(collector, replies);
}

/* ---- ranks that disagree ---- */

/* NULL: the rank is not compared. */
COX_HOT static const uint64_t *step_digests(const struct cox_rank_result *result)
{
    const Coxswain__ExecuteResponse *response = result->response;
    if (!response ||
        response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE ||
        !response->execute_model_response || !response->execute_model_response->step ||
        response->execute_model_response->step->n_digests != DIGESTS_SIZE)
        return NULL;
    return response->execute_model_response->step->digests;
}

/* Ranks with the same digest. */
struct side {
    uint64_t digest;
    struct cox_rank_set ranks;
    uint32_t rank_count;
};

/* The number that more than half of the ranks have; 0: there is none. It is what is left when each
 * rank cancels one that has another number. */
static uint64_t number_of_most(const struct cox_replies *replies, uint32_t index)
{
    uint64_t number = 0;
    uint32_t left = 0, total = 0, same = 0;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        const uint64_t *digests = step_digests(&replies->results[rank]);
        if (!digests || !digests[index])
            continue;
        total++;
        if (left == 0)
            number = digests[index];
        if (digests[index] == number)
            left++;
        else
            left--;
    }
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        const uint64_t *digests = step_digests(&replies->results[rank]);
        same += digests && digests[index] == number;
    }
    return 2 * same > total ? number : 0;
}

/* Groups the ranks by one of their numbers; the largest side comes first, of several the one with
 * the lowest rank. Returns how many there are. Ranks beyond SIDE_COUNT_MAX sides go to `others`; a
 * side that has more than half of the ranks is never among these. */
static uint32_t sides_find(const struct cox_replies *replies, uint32_t index,
                           struct side sides[SIDE_COUNT_MAX], struct cox_rank_set *others)
{
    const uint64_t most = number_of_most(replies, index);
    uint32_t side_count = 0;
    if (most)
        sides[side_count++] = (struct side){.digest = most};
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        const uint64_t *digests = step_digests(&replies->results[rank]);
        if (!digests || !digests[index])
            continue;
        uint32_t i = 0;
        while (i < side_count && sides[i].digest != digests[index])
            i++;
        if (i == SIDE_COUNT_MAX) {
            cox_rank_set_add(others, rank);
            continue;
        }
        if (i == side_count)
            sides[side_count++] = (struct side){.digest = digests[index]};
        cox_rank_set_add(&sides[i].ranks, rank);
        sides[i].rank_count++;
    }
    for (uint32_t i = 1; i < side_count; i++)
        if (sides[i].rank_count > sides[0].rank_count) {
            const struct side largest = sides[i];
            sides[i] = sides[0];
            sides[0] = largest;
        }
    return side_count;
}

/* Appends who has what, and adds the ranks that are not on the largest side, or, where two sides
 * are as large, all of them. */
static void sides_report(struct cox_replies *replies, const char *name, const struct side *sides,
                         uint32_t side_count, const struct cox_rank_set *others, bool first,
                         struct cox_rank_set *odd)
{
    char *buffer = replies->text;
    const size_t buffer_size = sizeof replies->text;
    bool even = false;
    cox_sentence_append(buffer, buffer_size, "%s %s:", first ? "" : ";", name);
    for (uint32_t i = 0; i < side_count; i++) {
        cox_sentence_append(buffer, buffer_size, "%s %s ", i ? "," : "",
                            sides[i].rank_count == 1 ? "rank" : "ranks");
        cox_sentence_append_set(buffer, buffer_size, &sides[i].ranks);
        cox_sentence_append(buffer, buffer_size, " %s %016" PRIx64,
                            sides[i].rank_count == 1 ? "has" : "have", sides[i].digest);
        even |= i && sides[i].rank_count == sides[0].rank_count;
    }
    if (memcmp(others, &(struct cox_rank_set){{0}}, sizeof *others) != 0) {
        cox_sentence_append(buffer, buffer_size, ", ranks ");
        cox_sentence_append_set(buffer, buffer_size, others);
        cox_sentence_append(buffer, buffer_size, " have others");
    }
    for (size_t w = 0; w < COX_RANK_COUNT_MAX / 64; w++) {
        odd->words[w] |= others->words[w];
        for (uint32_t i = even ? 0 : 1; i < side_count; i++)
            odd->words[w] |= sides[i].ranks.words[w];
    }
}

static int divergence_report(struct cox_collector *collector, const struct cox_entry *entry,
                             struct cox_replies *replies, struct cox_rank_set *ret_odd)
{
    static const char *const names[DIGESTS_SIZE] = {
        "steps since", "sequence ids", "positions", "block tables", "sampled tokens",
    };
    struct side sides[SIDE_COUNT_MAX];
    uint64_t begin = 0;
    bool diverged = false;
    *ret_odd = (struct cox_rank_set){{0}};
    for (uint32_t index = 0; index < DIGESTS_SIZE; index++) {
        struct cox_rank_set others = {{0}};
        const uint32_t side_count = sides_find(replies, index, sides, &others);
        if (index == 0 && side_count)
            begin = sides[0].digest;
        if (side_count < 2)
            continue;
        if (!diverged) {
            snprintf(replies->text, sizeof replies->text, "%s sequence %" PRIu64 " (%s): %s",
                     cox_channel_name(collector->channel->id), entry->sequence,
                     entry->operation->name, cox_status_text(COX_DIVERGED));
            cox_sentence_append(replies->text, sizeof replies->text, "; they differ in");
        }
        sides_report(replies, names[index], sides, side_count, &others, !diverged, ret_odd);
        diverged = true;
    }
    if (!diverged)
        return 0;
    /* Steps that were published already continue the chain, and differ as well. */
    if (collector->diverged_begin != begin || !collector->diverged_sequence) {
        collector->diverged_begin = begin;
        collector->diverged_sequence = entry->sequence;
    }
    cox_sentence_append(replies->text, sizeof replies->text,
                        "; first in step %" PRIu64 ", of the chain that began with step %" PRIu64,
                        collector->diverged_sequence, begin);
    return COX_DIVERGED;
}

COX_HOT int cox_report_divergence(struct cox_collector *collector, const struct cox_entry *entry,
                                  struct cox_replies *replies, struct cox_rank_set *ret_odd)
{
    const uint64_t *expected = NULL;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        const uint64_t *digests = step_digests(&replies->results[rank]);
        if (!digests)
            continue;
        if (!expected)
            expected = digests;
        else if (((digests[0] ^ expected[0]) | (digests[1] ^ expected[1]) |
                  (digests[2] ^ expected[2]) | (digests[3] ^ expected[3]) |
                  (digests[4] ^ expected[4])) != 0)
            return divergence_report(collector, entry, replies, ret_odd);
    }
    return 0;
}

/* Late ranks that delay no others come after those that do. */
static bool is_second(const struct cox_replies *replies, uint32_t rank)
{
    return replies->results[rank].outcome == COX_OUTCOME_LATE && !replies->ranks[rank].delays;
}

/* Appends the ranks with this outcome; the first few with their own text, in equal shares. Of late
 * ranks only those that delay others, or (second) only the rest. */
static void report_outcome(struct cox_replies *replies, enum cox_outcome outcome, bool second)
{
    char *buffer = replies->text;
    size_t buffer_size = sizeof replies->text;
    struct cox_rank_set others = {{0}};
    uint32_t count = 0, reported = 0;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++)
        count += replies->results[rank].outcome == outcome;
    int share = (int)(TOLD_SIZE / (count < REPORTED_COUNT ? count + !count : REPORTED_COUNT));
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        if (replies->results[rank].outcome != outcome || is_second(replies, rank) != second)
            continue;
        if (reported == REPORTED_COUNT) {
            cox_rank_set_add(&others, rank);
            continue;
        }
        if (outcome == COX_OUTCOME_ERROR)
            cox_sentence_append(buffer, buffer_size, "; rank %" PRIu32 " failed: %.*s", rank, share,
                                replies->results[rank].text);
        else
            cox_sentence_append(buffer, buffer_size, "; %.*s", share, replies->results[rank].text);
        reported++;
    }
    if (outcome != COX_OUTCOME_LATE && count > reported) {
        cox_sentence_append(buffer, buffer_size, "; %s too: ranks ",
                            outcome == COX_OUTCOME_DEAD ? "dead" : "failed");
        cox_sentence_append_set(buffer, buffer_size, &others);
    }
}

/* Appends late ranks as a list, if there are too many for a sentence each. second: without those
 * that delay others. */
static void report_late_ranks(struct cox_replies *replies, bool taken, bool second)
{
    struct cox_rank_set ranks = {{0}};
    uint64_t silent_ns = 0;
    for (uint32_t rank = 0; rank < replies->rank_count; rank++) {
        const struct cox_rank_result *result = &replies->results[rank];
        if (result->outcome != COX_OUTCOME_LATE || result->taken != taken ||
            (second && !is_second(replies, rank)))
            continue;
        cox_rank_set_add(&ranks, rank);
        silent_ns = result->silent_ns > silent_ns ? result->silent_ns : silent_ns;
    }
    if (silent_ns == 0)
        return;
    cox_sentence_append(replies->text, sizeof replies->text, "; ranks ");
    cox_sentence_append_set(replies->text, sizeof replies->text, &ranks);
    cox_sentence_append(replies->text, sizeof replies->text, " %s, silent for up to %.3f s",
                        taken ? "took it and have not replied" : "never took it",
                        (double)silent_ns / 1e9);
}

void cox_report_failure(const struct cox_collector *collector, const struct cox_entry *entry,
                        int status, struct cox_replies *replies)
{
    char *buffer = replies->text;
    size_t buffer_size = sizeof replies->text;
    snprintf(buffer, buffer_size, "%s sequence %" PRIu64 " (%s): %s",
             cox_channel_name(collector->channel->id), entry->sequence, entry->operation->name,
             cox_status_text(status));
    if (status == COX_TIMEOUT)
        cox_sentence_append(buffer, buffer_size, " after %.3f s",
                            (double)(cox_now_ns() - entry->submitted_ns) / 1e9);
    uint32_t replied = 0, asked = 0, late = 0, first = 0;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        asked += replies->results[rank].outcome != COX_OUTCOME_NOT_ASKED;
        replied += replies->results[rank].outcome == COX_OUTCOME_OK;
        late += replies->results[rank].outcome == COX_OUTCOME_LATE;
        first += replies->results[rank].outcome == COX_OUTCOME_LATE && !is_second(replies, rank);
    }
    cox_sentence_append(buffer, buffer_size, "; %" PRIu32 " of %" PRIu32 " ranks replied", replied,
                        asked);
    /* the caller's buffer may cut the rest off */
    report_outcome(replies, COX_OUTCOME_DEAD, false);
    report_outcome(replies, COX_OUTCOME_ERROR, false);
    if (status != COX_TIMEOUT && status != COX_CLOSED)
        return;
    if (first <= REPORTED_COUNT)
        report_outcome(replies, COX_OUTCOME_LATE, false);
    if (late <= REPORTED_COUNT) {
        report_outcome(replies, COX_OUTCOME_LATE, true);
        return;
    }
    report_late_ranks(replies, true, first <= REPORTED_COUNT);
    report_late_ranks(replies, false, first <= REPORTED_COUNT);
}
