#include "lead_link.h"

#include "channel/base/idioms.h"

#include <coxswain/version.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"
/* ---- events ---- */

void cox_lead_events_init(struct cox_lead_events *events)
{
    events->first = NULL;
    events->end = &events->first;
}

struct cox_lead_event *cox_lead_events_take(struct cox_lead_events *events)
{
    struct cox_lead_event *event = events->first;
    if (event) {
        events->first = event->next;
        if (!events->first)
            events->end = &events->first;
    }
    return event;
}

void cox_lead_event_free(struct cox_lead_event *event)
{
    if (event)
        free(event->owned);
    free(event);
}

/* Without memory for an event the lead cannot go on. */
static struct cox_lead_event *event_add(struct cox_lead_link *link, enum cox_lead_event_kind kind)
{
    struct cox_lead_event *event = calloc(1, sizeof *event);
    COX_ASSERT(event);
    event->kind = kind;
    event->node = link->index;
    *link->events->end = event;
    link->events->end = &event->next;
    return event;
}

/* ---- frames ---- */

uint8_t *cox_frame_of_message(const struct cox_frame *head, const ProtobufCMessage *message,
                              size_t *ret_size)
{
    struct cox_frame frame = *head;
    frame.size = message ? protobuf_c_message_get_packed_size(message) : 0;
    *ret_size = COX_FRAME_HEAD_SIZE + frame.size;
    uint8_t *bytes = malloc(*ret_size);
    if (bytes) {
        cox_frame_pack_head(&frame, bytes);
        if (message)
            protobuf_c_message_pack(message, bytes + COX_FRAME_HEAD_SIZE);
    }
    return bytes;
}

static struct cox_lead_request *request_of(struct cox_lead_link *link, uint32_t channel,
                                           uint64_t sequence)
{
    return &link->channels[channel].requests[sequence % link->depth];
}

/* What would be sent again. */
static void request_drop_frame(struct cox_lead_request *request)
{
    free(request->frame);
    request->frame = NULL;
    request->large = cox_large_request_unref(request->large);
}

static void request_clear(struct cox_lead_request *request)
{
    request_drop_frame(request);
    free(request->answer);
    *request = (struct cox_lead_request){0};
}

/* The node has taken it. What was given up before it does not concern the node any more: its frames
 * are those of other nodes again. */
static void request_acknowledge(struct cox_lead_channel *channel, struct cox_lead_request *request)
{
    request->acknowledged = true;
    if (request->sequence > channel->gone)
        channel->gone = 0;
}

/* Sends a copy: the request may be asked for again. What is in memory of its own is not copied. */
static void request_send(struct cox_lead_link *link, struct cox_lead_request *request,
                         uint64_t now_ns)
{
    const size_t size =
        request->size + (request->large ? cox_large_request_size(request->large) : 0);
    uint8_t *copy = cox_allocate_large(NULL, request->size);
    if (!copy)
        return; /* as if it were lost: it is sent again */
    memcpy(copy, request->frame, request->size);
    request->sent_ns = now_ns;
    request->again_ns =
        now_ns + link->times->again_ms * COX_NSEC_PER_MSEC + cox_frame_transfer_ns(size);
    link->asked_again += request->sent_count > 0;
    request->sent_count++;
    link->sent++;
    if (cox_frame_shows_life(size))
        link->spoke_ns = now_ns;
    link->send(link->context, link, copy, request->size, request->large);
}

/* The request with the smallest number behind `sequence`; NULL: none. Not by counting numbers: the
 * ring has old ones where later requests asked no rank of the node. */
static struct cox_lead_request *request_next(struct cox_lead_channel *channel, uint32_t depth,
                                             uint64_t sequence)
{
    struct cox_lead_request *next = NULL;
    for (uint32_t i = 0; i < depth; i++) {
        struct cox_lead_request *request = &channel->requests[i];
        if (request->sequence > sequence && (!next || request->sequence < next->sequence))
            next = request;
    }
    return next;
}

/* The next one that the node has not acknowledged. Not from `delivered` on: one without replies may
 * be behind that. */
static struct cox_lead_request *request_open(struct cox_lead_link *link, uint32_t c,
                                             uint64_t sequence)
{
    struct cox_lead_request *request = request_next(&link->channels[c], link->depth, sequence);
    while (request && (!request->frame || request->acknowledged))
        request = request_next(&link->channels[c], link->depth, request->sequence);
    return request;
}

/* ---- life ---- */

void cox_lead_link_init(struct cox_lead_link *link, const char *node, uint32_t rank_first,
                        uint32_t rank_count, uint32_t world, uint32_t depth)
{
    memset(link, 0, sizeof *link);
    snprintf(link->node, sizeof link->node, "%s", node);
    link->rank_first = rank_first;
    link->rank_count = rank_count;
    link->world = world;
    link->depth = depth;
}

static void link_forget(struct cox_lead_link *link)
{
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t i = 0; i < COX_NODE_DEPTH_MAX; i++)
            request_clear(&link->channels[c].requests[i]);
}

void cox_lead_link_deinit(struct cox_lead_link *link)
{
    link_forget(link);
}

static void link_set_state(struct cox_lead_link *link, enum cox_node_state state, const char *text)
{
    struct cox_lead_event *event = event_add(link, COX_LEAD_NODE_STATE);
    link->state = state;
    event->state = state;
    snprintf(event->text, sizeof event->text, "node %s %s", link->node, text);
}

void cox_lead_link_admit(struct cox_lead_link *link, uint64_t agent, uint64_t now_ns)
{
    link_forget(link);
    link->incarnation++;
    link->refused_said = link->agent == agent ? link->refused_said : 0;
    link->agent = agent;
    link->heard_ns = link->tick_ns = now_ns;
    link->beat_ns = link->spoke_ns = 0;
    link->changed = true;
    link->reason[0] = '\0';
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct cox_lead_channel *channel = &link->channels[c];
        channel->last_sent = channel->delivered = channel->published;
        channel->gone = 0;
    }
    link_set_state(link, COX_NODE_ALIVE, "is there");
}

void cox_lead_link_lost(struct cox_lead_link *link, uint64_t now_ns)
{
    const uint64_t again_ns = now_ns + link->times->again_ms * COX_NSEC_PER_MSEC;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t i = 0; i < link->depth; i++) {
            struct cox_lead_request *request = &link->channels[c].requests[i];
            if (request->again_ns > again_ns && !request->acknowledged)
                request->again_ns = again_ns;
        }
}

void cox_lead_link_suspect(struct cox_lead_link *link, const char *text)
{
    if (link->state != COX_NODE_ALIVE)
        return;
    link->suspicions++;
    link_set_state(link, COX_NODE_SUSPECT, text);
}

void cox_lead_link_die(struct cox_lead_link *link, const char *text)
{
    if (link->state == COX_NODE_ABSENT)
        return;
    link->deaths++;
    link_forget(link);
    snprintf(link->reason, sizeof link->reason, "%s", text);
    for (uint32_t i = 0; i < link->rank_count; i++) {
        if (link->ranks[i].attached == 0)
            continue;
        /* Processes of it that come back are wanted when the executor opens the rank again. */
        link->ranks[i] = (struct cox_lead_rank){0};
        struct cox_lead_event *event = event_add(link, COX_LEAD_RANK_DIED);
        event->rank = link->rank_first + i;
        event->exit_status = -1;
        snprintf(event->text, sizeof event->text, "is lost: node %s %s", link->node, text);
    }
    char state_text[368];
    snprintf(state_text, sizeof state_text, "is dead: it %s", text);
    link_set_state(link, COX_NODE_ABSENT, state_text);
}

void cox_lead_link_give_up(struct cox_lead_link *link, const char *text)
{
    cox_lead_link_die(link, text);
    for (uint32_t i = 0; i < link->rank_count; i++) {
        if (!link->ranks[i].wanted)
            continue;
        link->ranks[i] = (struct cox_lead_rank){0};
        struct cox_lead_event *event = event_add(link, COX_LEAD_RANK_DIED);
        event->rank = link->rank_first + i;
        event->sequence = 1; /* it never attached */
        event->exit_status = -1;
        snprintf(event->text, sizeof event->text, "is lost: node %s %s", link->node, text);
    }
}

bool cox_lead_link_release_agrees(const struct cox_lead_link *link, const CoxNode__Hello *hello,
                                  char *refusal, size_t size)
{
    const char *theirs = hello->version ? hello->version : "?";
    if (hello->protocol != COX_FRAME_PROTOCOL)
        snprintf(refusal, size,
                 "node %s has Coxswain %.40s, whose protocol between nodes is %" PRIu32
                 "; the lead has %s with %u: install the same version",
                 link->node, theirs, hello->protocol, COX_VERSION_TEXT, COX_FRAME_PROTOCOL);
    else if (strcmp(theirs, COX_VERSION_TEXT) != 0)
        snprintf(refusal, size,
                 "node %s has Coxswain %.40s, the lead has %s: install the same version",
                 link->node, theirs, COX_VERSION_TEXT);
    else
        return true;
    return false;
}

/* ---- what the executor wants ---- */

/* The executor has ended the requests up to this number, whose ranks are dead, and uses the frame
 * of the last one again. They are not sent any more, and the node does not wait for them. */
static void channel_give_up(const struct cox_lead_link *link, struct cox_lead_channel *channel,
                            uint64_t through)
{
    for (uint32_t i = 0; i < link->depth; i++)
        if (channel->requests[i].sequence <= through)
            request_clear(&channel->requests[i]);
    channel->gone = through;
}

static void publish_fail(struct cox_lead_link *link, const struct cox_transport_request *request,
                         const struct cox_rank_set *owed)
{
    for (uint32_t i = 0; i < link->rank_count; i++) {
        if (!cox_rank_set_has(owed, link->rank_first + i))
            continue;
        struct cox_lead_event *event = event_add(link, COX_LEAD_REPLY);
        event->channel = request->channel;
        event->sequence = request->sequence;
        event->rank = link->rank_first + i;
    }
}

void cox_lead_link_publish(struct cox_lead_link *link, const struct cox_transport_request *request,
                           struct cox_large_request *large, uint64_t now_ns)
{
    struct cox_lead_channel *channel = &link->channels[request->channel];
    struct cox_rank_set owed = {{0}};
    bool asked = false;
    channel->published = request->sequence;
    for (uint32_t i = 0; i < link->rank_count; i++)
        if (cox_rank_set_has(request->asked, link->rank_first + i)) {
            cox_rank_set_add(&owed, link->rank_first + i);
            asked = true;
        }
    if (!asked || link->state == COX_NODE_ABSENT)
        return;
    struct cox_lead_request *own = request_of(link, request->channel, request->sequence);
    if (own->frame && !own->acknowledged)
        channel_give_up(link, channel, own->sequence);
    request_clear(own);
    const struct cox_frame frame = {
        .kind = COX_FRAME_REQUEST,
        .channel = request->channel,
        .type = request->type,
        .epoch = link->epoch,
        .incarnation = link->incarnation,
        .sequence = request->sequence,
        .previous = channel->last_sent,
        .deadline_ns = request->deadline_ns,
        .sent_ns = now_ns,
        .void_through = channel->void_through,
        .gone = channel->gone,
        .asked = *request->asked,
        .size = request->size,
    };
    own->size = COX_FRAME_HEAD_SIZE + (large ? 0 : request->size);
    own->frame = cox_allocate_large(NULL, own->size);
    if (!own->frame) { /* the node does not hear of it, and waits for none of its number */
        if (request->replies)
            publish_fail(link, request, &owed);
        return;
    }
    own->large = large ? cox_large_request_ref(large) : NULL;
    cox_frame_pack_head(&frame, own->frame);
    if (request->size && !large)
        memcpy(own->frame + COX_FRAME_HEAD_SIZE, request->bytes, request->size);
    own->sequence = request->sequence;
    own->replies = request->replies;
    own->owed = owed;
    channel->last_sent = request->sequence;
    if (link->state == COX_NODE_ALIVE)
        request_send(link, own, now_ns);
}

void cox_lead_link_cancel(struct cox_lead_link *link, uint32_t channel, uint64_t through)
{
    if (link->channels[channel].void_through >= through)
        return;
    link->channels[channel].void_through = through;
    link->changed = true;
}

void cox_lead_link_end(struct cox_lead_link *link, uint32_t channel, uint64_t through)
{
    if (link->channels[channel].ended >= through)
        return;
    link->channels[channel].ended = through;
    link->changed = true;
}

static struct cox_lead_rank *rank_of(struct cox_lead_link *link, uint32_t rank)
{
    return &link->ranks[rank - link->rank_first];
}

void cox_lead_link_want(struct cox_lead_link *link, uint32_t rank, uint32_t incarnation)
{
    rank_of(link, rank)->wanted = incarnation;
    link->changed = true;
}

void cox_lead_link_kill(struct cox_lead_link *link, uint32_t rank)
{
    rank_of(link, rank)->killed = rank_of(link, rank)->attached;
    link->changed = true;
}

/* ---- what the node says ---- */

static void deliver_reply(struct cox_lead_link *link, uint32_t channel,
                          struct cox_lead_request *request, uint32_t rank,
                          const struct cox_answer_reply *reply, uint8_t *owned)
{
    struct cox_lead_event *event = event_add(link, COX_LEAD_REPLY);
    event->channel = channel;
    event->sequence = request->sequence;
    event->rank = rank;
    event->owned = owned;
    if (reply) {
        event->bytes = reply->bytes;
        event->size = reply->size;
        event->failed = reply->flags & COX_ANSWER_FAILED;
    }
    request->owed.words[rank / 64] &= ~(UINT64_C(1) << (rank % 64));
}

/* The answer of a request, whose turn it is. A dead rank is not late: the request ends for it when
 * the node says why it died, which may be after this. */
static void deliver_answer(struct cox_lead_link *link, uint32_t channel,
                           struct cox_lead_request *request)
{
    struct cox_answer answer;
    uint8_t *bytes = request->answer;
    request->answer = NULL;
    cox_answer_unpack(bytes, request->answer_size, link->rank_first,
                      link->rank_first + link->rank_count, &answer, NULL); /* it was checked */
    uint32_t last = answer.count;
    for (uint32_t i = 0; i < answer.count; i++) {
        const struct cox_answer_reply *reply = &answer.replies[i];
        if (reply->flags & COX_ANSWER_REPLIED && cox_rank_set_has(&request->owed, reply->rank))
            last = i;
        else if (reply->flags & COX_ANSWER_DEAD)
            cox_rank_set_add(&request->dead, reply->rank);
    }
    for (uint32_t i = 0; i < answer.count && last < answer.count; i++) {
        const struct cox_answer_reply *reply = &answer.replies[i];
        if (!(reply->flags & COX_ANSWER_REPLIED) || !cox_rank_set_has(&request->owed, reply->rank))
            continue;
        /* Events are handled in this order: the last one frees the bytes of all. */
        deliver_reply(link, channel, request, reply->rank, reply, i == last ? bytes : NULL);
    }
    if (last == answer.count)
        free(bytes);
    request->answered = true;
    request->answered_ns = link->heard_ns;
    request_drop_frame(request);
}

/* Passes on the answers whose turn it is. */
static void deliver_ready(struct cox_lead_link *link, uint32_t c)
{
    struct cox_lead_channel *channel = &link->channels[c];
    while (channel->delivered < channel->last_sent) {
        const uint64_t next = channel->delivered + 1;
        struct cox_lead_request *request = request_of(link, c, next);
        if (request->sequence == next && request->replies && !request->answered) {
            if (!request->answer)
                return;
            deliver_answer(link, c, request);
        }
        channel->delivered = next;
    }
}

static int receive_answer(struct cox_lead_link *link, const struct cox_frame *frame,
                          struct cox_error *err)
{
    struct cox_answer answer;
    struct cox_lead_request *request = request_of(link, frame->channel, frame->sequence);
    int r = cox_answer_unpack(frame->payload, frame->size, link->rank_first,
                              link->rank_first + link->rank_count, &answer, err);
    if (r)
        return r;
    if (request->sequence != frame->sequence || request->answer || request->answered ||
        !request->sequence) {
        link->stale++;
        return COX_STALE;
    }
    request_acknowledge(&link->channels[frame->channel], request);
    request->answer = cox_allocate_large(NULL, frame->size);
    COX_ASSERT(request->answer);
    memcpy(request->answer, frame->payload, frame->size);
    request->answer_size = frame->size;
    deliver_ready(link, frame->channel);
    return 0;
}

static void receive_channel(struct cox_lead_link *link, uint32_t c, const CoxNode__Channel *said,
                            uint64_t now_ns)
{
    struct cox_lead_channel *channel = &link->channels[c];
    /* In their order, in which a rank replies, too: its reply to one says that those before are
     * there. */
    for (struct cox_lead_request *request = request_next(channel, link->depth, 0); request;
         request = request_next(channel, link->depth, request->sequence)) {
        if (request->sequence <= said->through && !request->acknowledged) {
            request_acknowledge(channel, request);
            struct cox_lead_event *event = event_add(link, COX_LEAD_TAKEN);
            event->channel = c;
            event->sequence = request->sequence;
            if (!request->replies)
                request_drop_frame(request);
        }
        bool answered = request->sequence <= said->done;
        for (size_t k = 0; k < said->n_answered; k++)
            answered = answered || said->answered[k] == request->sequence;
        /* The answer was lost. */
        if (answered && request->replies && !request->answered && !request->answer &&
            request->frame && now_ns >= request->again_ns)
            request_send(link, request, now_ns);
        /* Ranks that were late have replied. */
        const bool overdue =
            now_ns >= request->answered_ns + link->times->dead_ms * COX_NSEC_PER_MSEC;
        if (request->answered && request->sequence <= said->done)
            for (uint32_t k = 0; k < link->rank_count; k++)
                if (cox_rank_set_has(&request->owed, link->rank_first + k) &&
                    (overdue || !cox_rank_set_has(&request->dead, link->rank_first + k)))
                    deliver_reply(link, c, request, link->rank_first + k, NULL, NULL);
    }
    deliver_ready(link, c);
}

static void receive_rank(struct cox_lead_link *link, uint32_t i, const CoxNode__Rank *said)
{
    struct cox_lead_rank *rank = &link->ranks[i];
    rank->stopped = said->state == COX_NODE__RANK_STATE__UP && said->stopped;
    if (said->state == COX_NODE__RANK_STATE__UP && said->incarnation == rank->wanted &&
        rank->attached != rank->wanted && rank->wanted) {
        rank->attached = rank->wanted;
        rank->cpu_ns = rank->resident_bytes = 0; /* those of the process before it */
        struct cox_lead_event *event = event_add(link, COX_LEAD_RANK_UP);
        event->rank = link->rank_first + i;
        event->pid = said->pid;
    }
    if (said->state == COX_NODE__RANK_STATE__UP && said->incarnation == rank->attached) {
        rank->cpu_ns = said->has_cpu_ns ? said->cpu_ns : rank->cpu_ns;
        rank->resident_bytes =
            said->has_resident_bytes ? said->resident_bytes : rank->resident_bytes;
    }
    if (said->state == COX_NODE__RANK_STATE__DEAD && said->incarnation == rank->wanted &&
        rank->wanted) {
        struct cox_lead_event *event = event_add(link, COX_LEAD_RANK_DIED);
        event->rank = link->rank_first + i;
        event->pid = said->pid;
        event->sequence = rank->attached != rank->wanted; /* it never attached */
        event->known = said->known;
        event->signal = said->signal;
        event->exit_status = said->exit_status;
        snprintf(event->text, sizeof event->text, "%s", said->text ? said->text : "is dead");
        rank->attached = 0;
        rank->wanted = 0;
    }
}

static void receive_beat(struct cox_lead_link *link, const CoxNode__AgentBeat *beat,
                         uint64_t now_ns)
{
    if (beat->server_id && strcmp(beat->server_id, link->server_id) != 0)
        snprintf(link->server_id, sizeof link->server_id, "%s", beat->server_id);
    link->client_id = beat->client_id;
    link->peers_there = beat->peers_version;
    if (beat->refused > link->refused_said) {
        link->refused += beat->refused - link->refused_said;
        link->refused_said = beat->refused;
    }
    for (size_t c = 0; c < beat->n_channels && c < COX_TWO_WAY_COUNT; c++)
        receive_channel(link, (uint32_t)c, beat->channels[c], now_ns);
    for (size_t i = 0; i < beat->n_ranks && i < link->rank_count; i++)
        receive_rank(link, (uint32_t)i, beat->ranks[i]);
    if (beat->leaving)
        cox_lead_link_die(link, beat->leaving_text ? beat->leaving_text : "has left");
}

int cox_lead_link_receive(struct cox_lead_link *link, const struct cox_frame *frame,
                          uint64_t now_ns, struct cox_error *err)
{
    if (link->state == COX_NODE_ABSENT || frame->epoch != link->epoch ||
        frame->incarnation != link->incarnation) {
        link->stale++;
        return COX_STALE;
    }
    CoxNode__AgentBeat *beat = NULL;
    if (frame->kind == COX_FRAME_AGENT_BEAT) {
        beat = cox_node__agent_beat__unpack(NULL, frame->size, frame->payload);
        if (!beat)
            return cox_fail(err, COX_CORRUPT, "a beat of %zu bytes that cannot be read",
                            frame->size);
        /* Another agent of the same name does not keep this one alive. */
        if (beat->agent != link->agent) {
            cox_node__agent_beat__free_unpacked(beat, NULL);
            link->stale++;
            return COX_STALE;
        }
        int r = 0;
        for (uint32_t c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
            r = cox_agent_beat_check(beat, c, link->channels[c].last_sent, err);
        if (r) { /* it shows no life either */
            cox_node__agent_beat__free_unpacked(beat, NULL);
            return r;
        }
    }
    link->heard_ns = now_ns;
    if (link->state == COX_NODE_SUSPECT) {
        link_set_state(link, COX_NODE_ALIVE, "answers again");
        /* What was held back, or may be lost. */
        for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
            for (struct cox_lead_request *request = request_open(link, c, 0); request;
                 request = request_open(link, c, request->sequence))
                if (!request->sent_ns)
                    request_send(link, request, now_ns);
    }
    if (beat)
        receive_beat(link, beat, now_ns);
    cox_node__agent_beat__free_unpacked(beat, NULL);
    return frame->kind == COX_FRAME_ANSWER ? receive_answer(link, frame, err) : 0;
}

/* ---- time ---- */

static void link_beat(struct cox_lead_link *link, uint64_t now_ns)
{
    CoxNode__LeadBeat beat = COX_NODE__LEAD_BEAT__INIT;
    CoxNode__Channel channels[COX_TWO_WAY_COUNT];
    CoxNode__Channel *pointers[COX_TWO_WAY_COUNT];
    uint32_t wanted[COX_RANK_COUNT_MAX], killed[COX_RANK_COUNT_MAX];
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        cox_node__channel__init(&channels[c]);
        COX_SET(&channels[c], through, link->channels[c].void_through);
        COX_SET(&channels[c], done, link->channels[c].ended);
        pointers[c] = &channels[c];
    }
    for (uint32_t i = 0; i < link->rank_count; i++) {
        wanted[i] = link->ranks[i].wanted;
        killed[i] = link->ranks[i].killed;
    }
    beat.n_channels = COX_TWO_WAY_COUNT;
    beat.channels = pointers;
    beat.n_wanted = beat.n_killed = link->rank_count;
    beat.wanted = wanted;
    beat.killed = killed;
    beat.has_finishing = beat.finishing = link->finishing;
    beat.has_failed = beat.failed = link->failed;
    if (link->peers_there != link->peers_version) {
        beat.n_peers = link->peer_count;
        beat.peers = (CoxNode__Peer **)(uintptr_t)link->peers;
        COX_SET(&beat, peers_version, link->peers_version);
    }
    const struct cox_frame head = {.kind = COX_FRAME_LEAD_BEAT,
                                   .epoch = link->epoch,
                                   .incarnation = link->incarnation,
                                   .sent_ns = now_ns};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, &beat.base, &size);
    if (!bytes)
        return;
    link->beat_ns = link->spoke_ns = now_ns;
    link->again = link->changed;
    link->changed = false;
    link->send(link->context, link, bytes, size, NULL);
}

static bool beat_is_due(const struct cox_lead_link *link, uint64_t now_ns)
{
    const uint64_t beat_ns = link->times->beat_ms * COX_NSEC_PER_MSEC;
    if (link->changed || now_ns - link->beat_ns >= COX_NODE_BEATS_MAX * beat_ns)
        return true;
    return now_ns - (link->again ? link->beat_ns : link->spoke_ns) >= beat_ns;
}

void cox_lead_link_tick(struct cox_lead_link *link, uint64_t now_ns)
{
    if (link->state == COX_NODE_ABSENT)
        return;
    const uint64_t suspect_ns = link->times->suspect_ms * COX_NSEC_PER_MSEC;
    /* This process was stopped: what came meanwhile is yet to be read. */
    if (now_ns > link->tick_ns + suspect_ns && now_ns > link->heard_ns + suspect_ns)
        link->heard_ns = now_ns - suspect_ns;
    link->tick_ns = now_ns;
    const uint64_t silent_ns = now_ns > link->heard_ns ? now_ns - link->heard_ns : 0;
    char text[96];
    if (silent_ns >= link->times->dead_ms * COX_NSEC_PER_MSEC) {
        snprintf(text, sizeof text, "has not been heard for %" PRIu64 " ms",
                 silent_ns / COX_NSEC_PER_MSEC);
        cox_lead_link_die(link, text);
        return;
    }
    if (silent_ns >= suspect_ns) {
        snprintf(text, sizeof text, "is suspect: not heard for %" PRIu64 " ms",
                 silent_ns / COX_NSEC_PER_MSEC);
        cox_lead_link_suspect(link, text);
    }
    if (beat_is_due(link, now_ns))
        link_beat(link, now_ns);
    if (link->state != COX_NODE_ALIVE)
        return;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (struct cox_lead_request *request = request_open(link, c, 0); request;
             request = request_open(link, c, request->sequence))
            if (now_ns >= request->again_ns)
                request_send(link, request, now_ns);
}

bool cox_lead_link_trouble(const struct cox_lead_link *link, uint64_t now_ns, char *buffer,
                           size_t buffer_size)
{
    if (link->state == COX_NODE_ALIVE)
        return false;
    if (link->state == COX_NODE_SUSPECT)
        snprintf(buffer, buffer_size, "node %s is suspect: not heard for %" PRIu64 " ms",
                 link->node, (now_ns - link->heard_ns) / COX_NSEC_PER_MSEC);
    else
        snprintf(buffer, buffer_size, "node %s %s", link->node,
                 link->reason[0] ? link->reason : "has not come");
    return true;
}
