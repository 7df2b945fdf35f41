#include "agent_link.h"

#include "channel/base/idioms.h"
#include "channel/memory/payload_memory.h"
#include "lead_link.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limits.h"
/* The period over which the smallest difference of the clocks is kept. */
#define OFFSET_PERIOD_NS (5 * COX_NSEC_PER_SEC)
/* How often a lead that is not followed is told so. */
#define HELLO_NS (100 * COX_NSEC_PER_MSEC)

static struct cox_agent_request *request_of(struct cox_agent_link *link, uint32_t channel,
                                            uint64_t sequence)
{
    return &link->channels[channel].requests[sequence % link->depth];
}

static void request_clear(struct cox_agent_request *request)
{
    free(request->frame);
    free(request->answer);
    cox_payload_memory_unref(request->memory);
    *request = (struct cox_agent_request){0};
}

static void link_forget(struct cox_agent_link *link)
{
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t i = 0; i < COX_NODE_DEPTH_MAX; i++)
            request_clear(&link->channels[c].requests[i]);
}

void cox_agent_link_init(struct cox_agent_link *link, uint64_t agent)
{
    memset(link, 0, sizeof *link);
    link->times = (struct cox_node_times)COX_NODE_TIMES_DEFAULT;
    link->agent = agent;
    link->depth = 1;
}

void cox_agent_link_deinit(struct cox_agent_link *link)
{
    link_forget(link);
}

static void take_peers(struct cox_agent_link *link, CoxNode__Peer *const *peers, size_t count,
                       uint64_t version)
{
    link->peer_count = 0;
    link->peers_version = version;
    for (size_t i = 0; i < count && i < COX_NODE_COUNT_MAX; i++) {
        if (!peers[i]->incarnation)
            continue; /* it is not there */
        struct cox_agent_peer *peer = &link->peers[link->peer_count++];
        memset(peer, 0, sizeof *peer);
        snprintf(peer->node, sizeof peer->node, "%s", peers[i]->node ? peers[i]->node : "");
        snprintf(peer->address, sizeof peer->address, "%s",
                 peers[i]->address ? peers[i]->address : "");
        peer->rank_first = peers[i]->rank_first;
        peer->rank_count = peers[i]->rank_count;
        peer->incarnation = peers[i]->incarnation;
    }
}

int cox_agent_link_follow(struct cox_agent_link *link, const CoxNode__Welcome *welcome,
                          uint64_t now_ns)
{
    if (link->state == COX_LEAD_OVER || welcome->epoch < link->epoch ||
        (welcome->epoch == link->epoch && welcome->incarnation <= link->incarnation))
        return COX_STALE;
    link_forget(link);
    link->epoch = welcome->epoch;
    link->incarnation = welcome->incarnation;
    link->rank_first = welcome->rank_first;
    link->rank_count = welcome->rank_count;
    link->depth = welcome->depth;
    link->times.beat_ms = welcome->beat_ms ? welcome->beat_ms : link->times.beat_ms;
    link->times.dead_ms = welcome->dead_ms ? welcome->dead_ms : link->times.dead_ms;
    link->times.suspect_ms = welcome->suspect_ms ? welcome->suspect_ms : link->times.suspect_ms;
    link->times.lead_grace_ms =
        welcome->has_lead_grace_ms ? welcome->lead_grace_ms : link->times.lead_grace_ms;
    memset(link->wanted, 0, sizeof link->wanted);
    memset(link->killed, 0, sizeof link->killed);
    link->finishing = link->failed = false;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const uint64_t after = c < welcome->n_start_after ? welcome->start_after[c] : 0;
        link->channels[c].taken = link->channels[c].done = link->channels[c].said = after;
        link->channels[c].void_through = link->channels[c].ended = 0;
        link->channels[c].gone = 0;
    }
    take_peers(link, welcome->peers, welcome->n_peers, welcome->peers_version);
    snprintf(link->lead_address, sizeof link->lead_address, "%s",
             welcome->address ? welcome->address : "");
    link->state = COX_LEAD_FOLLOWING;
    link->heard_ns = now_ns;
    link->beat_ns = link->spoke_ns = 0;
    link->changed = true;
    link->offset_since_ns = 0;
    return 0;
}

static void link_measure_offset(struct cox_agent_link *link, uint64_t sent_ns, uint64_t now_ns)
{
    const int64_t offset = (int64_t)(now_ns - sent_ns);
    if (!link->offset_since_ns) {
        link->offset_ns = link->offset_before_ns = offset;
        link->offset_since_ns = now_ns;
    } else if (now_ns - link->offset_since_ns >= OFFSET_PERIOD_NS) {
        link->offset_before_ns = link->offset_ns;
        link->offset_ns = offset;
        link->offset_since_ns = now_ns;
    } else if (offset < link->offset_ns) {
        link->offset_ns = offset;
    }
}

static void link_advance(struct cox_agent_channel *channel, uint32_t depth)
{
    /* The first that is not done. A number that is not in the ring asked no rank here, or is older
     * than the ring. */
    uint64_t end = channel->taken;
    for (uint32_t i = 0; i < depth; i++) {
        const struct cox_agent_request *request = &channel->requests[i];
        if (request->sequence > channel->done && request->sequence <= end && !request->done)
            end = request->sequence - 1;
    }
    channel->done = end;
}

static void answer_send(struct cox_agent_link *link, struct cox_agent_request *request,
                        uint64_t now_ns)
{
    uint8_t *copy = cox_allocate_large(NULL, request->answer_size);
    if (!copy)
        return; /* as if it were lost */
    memcpy(copy, request->answer, request->answer_size);
    request->again_ns = now_ns + cox_frame_transfer_ns(request->answer_size);
    if (cox_frame_shows_life(request->answer_size))
        link->spoke_ns = now_ns;
    link->send(link->context, copy, request->answer_size);
}

/* What a frame came in: a request takes the bytes, or refers to the memory; NULL: it copies. */
struct source {
    uint8_t **bytes;
    struct cox_payload_memory *memory;
};

/* Of the request, which is clear. Returns 0 or -ENOMEM. */
static int request_keep(struct cox_agent_request *request, const struct cox_frame *frame,
                        const struct source *source)
{
    const bool copies = !source->bytes && !source->memory;
    request->size = COX_FRAME_HEAD_SIZE + frame->size;
    request->frame =
        source->bytes ? *source->bytes : malloc(copies ? request->size : COX_FRAME_HEAD_SIZE);
    if (!request->frame)
        return -ENOMEM;
    if (source->bytes)
        *source->bytes = NULL;
    if (source->memory)
        request->memory = cox_payload_memory_ref(source->memory);
    cox_frame_pack_head(frame, request->frame);
    if (copies && frame->size)
        memcpy(request->frame + COX_FRAME_HEAD_SIZE, frame->payload, frame->size);
    return 0;
}

static int receive_request(struct cox_agent_link *link, const struct cox_frame *frame,
                           const struct source *source, uint64_t now_ns)
{
    struct cox_agent_channel *channel = &link->channels[frame->channel];
    struct cox_agent_request *request = request_of(link, frame->channel, frame->sequence);
    if (channel->void_through < frame->void_through)
        channel->void_through = frame->void_through;
    if (channel->gone < frame->gone)
        channel->gone = frame->gone;
    if (frame->sequence <= channel->taken) {
        link->repeated++;
        if (request->sequence != frame->sequence || !request->answer)
            link->changed = true; /* the beat says that it is there */
        else if (now_ns >= request->again_ns)
            answer_send(link, request, now_ns);
        return COX_STALE;
    }
    if (request->sequence == frame->sequence)
        return COX_STALE; /* it waits already */
    if (request->sequence > frame->sequence)
        return COX_STALE;
    if (frame->previous != channel->taken) {
        link->gaps++;
        link->changed = true; /* the lead sends again what is missing */
    }
    request_clear(request);
    if (request_keep(request, frame, source))
        return -ENOMEM; /* as if it were lost */
    request->sequence = frame->sequence;
    request->came_ns = now_ns;
    return 0;
}

static int receive_beat(struct cox_agent_link *link, const struct cox_frame *frame,
                        struct cox_error *err)
{
    CoxNode__LeadBeat *beat = cox_node__lead_beat__unpack(NULL, frame->size, frame->payload);
    if (!beat)
        return cox_fail(err, COX_CORRUPT, "a beat of %zu bytes that cannot be read", frame->size);
    for (size_t c = 0; c < beat->n_channels && c < COX_TWO_WAY_COUNT; c++) {
        if (link->channels[c].void_through < beat->channels[c]->through)
            link->channels[c].void_through = beat->channels[c]->through;
        if (link->channels[c].ended < beat->channels[c]->done)
            link->channels[c].ended = beat->channels[c]->done;
    }
    /* An older beat may come after a newer one. */
    for (size_t i = 0; i < beat->n_wanted && i < link->rank_count; i++)
        if (link->wanted[i] < beat->wanted[i])
            link->wanted[i] = beat->wanted[i];
    for (size_t i = 0; i < beat->n_killed && i < link->rank_count; i++)
        if (link->killed[i] < beat->killed[i])
            link->killed[i] = beat->killed[i];
    link->finishing = link->finishing || beat->finishing;
    link->failed = link->failed || beat->failed;
    if (beat->peers_version > link->peers_version) {
        take_peers(link, beat->peers, beat->n_peers, beat->peers_version);
        link->changed = true; /* the lead sends them until it knows */
    }
    cox_node__lead_beat__free_unpacked(beat, NULL);
    return 0;
}

static int frame_receive(struct cox_agent_link *link, const struct cox_frame *frame,
                         const struct source *source, uint64_t now_ns, struct cox_error *err)
{
    /* To all nodes: of the same peers, of which this one is the incarnation that it is. */
    const bool to_all = frame->kind == COX_FRAME_REQUEST_ALL;
    if ((link->state != COX_LEAD_FOLLOWING && link->state != COX_LEAD_LOST) ||
        frame->epoch != link->epoch ||
        frame->incarnation != (to_all ? link->peers_version : link->incarnation)) {
        link->stale++;
        return COX_STALE;
    }
    link->heard_ns = now_ns;
    link_measure_offset(link, frame->sent_ns, now_ns);
    if (link->state == COX_LEAD_LOST) {
        link->state = COX_LEAD_FOLLOWING;
        link->changed = true;
    }
    return frame->kind == COX_FRAME_REQUEST || to_all ? receive_request(link, frame, source, now_ns)
           : frame->kind == COX_FRAME_LEAD_BEAT       ? receive_beat(link, frame, err)
           : frame->kind == COX_FRAME_RECORDER_ASK || frame->kind == COX_FRAME_STACKS_ASK
               ? 0
               : COX_CORRUPT;
}

int cox_agent_link_receive(struct cox_agent_link *link, const struct cox_frame *frame,
                           uint64_t now_ns, struct cox_error *err)
{
    return frame_receive(link, frame, &(struct source){0}, now_ns, err);
}

int cox_agent_link_receive_owned(struct cox_agent_link *link, const struct cox_frame *frame,
                                 uint8_t **bytes, uint64_t now_ns, struct cox_error *err)
{
    return frame_receive(link, frame, &(struct source){.bytes = bytes}, now_ns, err);
}

int cox_agent_link_receive_memory(struct cox_agent_link *link, const struct cox_frame *frame,
                                  struct cox_payload_memory *memory, uint64_t now_ns,
                                  struct cox_error *err)
{
    COX_ASSERT(frame->kind == COX_FRAME_REQUEST);
    return frame_receive(link, frame, &(struct source){.memory = memory}, now_ns, err);
}

int64_t cox_agent_link_offset(const struct cox_agent_link *link)
{
    return link->offset_ns < link->offset_before_ns ? link->offset_ns : link->offset_before_ns;
}

bool cox_agent_link_greets(const struct cox_agent_link *link, const struct cox_frame *frame, int r,
                           uint64_t now_ns)
{
    const bool older = frame->epoch < link->epoch;
    if (frame->kind == COX_FRAME_SEEK && !older)
        return true;
    return r == COX_STALE && (older || link->state == COX_LEAD_FREE) &&
           now_ns - link->hello_ns >= HELLO_NS;
}

uint64_t cox_agent_link_here(const struct cox_agent_link *link, uint64_t lead_ns)
{
    const uint64_t offset = (uint64_t)cox_agent_link_offset(link);
    return lead_ns == COX_DEADLINE_NEVER ? lead_ns : lead_ns + offset;
}

bool cox_agent_link_next(struct cox_agent_link *link, uint32_t c, uint64_t now_ns,
                         struct cox_frame *ret_frame, uint64_t *ret_deadline_ns)
{
    struct cox_agent_channel *channel = &link->channels[c];
    if (link->state != COX_LEAD_FOLLOWING)
        return false;
    for (;;) {
        struct cox_agent_request *next = NULL;
        for (uint32_t i = 0; i < link->depth; i++) {
            struct cox_agent_request *request = &channel->requests[i];
            if (request->frame && request->sequence > channel->taken &&
                (!next || request->sequence < next->sequence))
                next = request;
        }
        if (!next)
            return false;
        cox_frame_unpack(next->frame, next->size, ret_frame, NULL); /* it was packed here */
        if (next->memory)
            ret_frame->payload = NULL;
        ret_frame->memory = next->memory;
        /* What does not come any more is not waited for. */
        if (ret_frame->previous != channel->taken && ret_frame->previous > channel->gone)
            return false;
        *ret_deadline_ns = cox_agent_link_here(link, ret_frame->deadline_ns);
        if (*ret_deadline_ns > now_ns)
            return true;
        const struct cox_answer late = {.status = COX_TIMEOUT};
        link->expired++;
        const uint64_t sequence = next->sequence;
        cox_agent_link_taken(link, c, sequence, false);
        cox_agent_link_answer(link, c, sequence, &late, true, now_ns);
    }
}

void cox_agent_link_taken(struct cox_agent_link *link, uint32_t c, uint64_t sequence, bool no_reply)
{
    struct cox_agent_channel *channel = &link->channels[c];
    struct cox_agent_request *request = request_of(link, c, sequence);
    if (request->sequence != sequence)
        return;
    free(request->frame);
    request->frame = NULL;
    request->memory = cox_payload_memory_unref(request->memory);
    request->taken = true;
    channel->taken = sequence;
    if (no_reply) {
        request->done = request->answered = true;
        link->changed = true;
    }
    link_advance(channel, link->depth);
}

void cox_agent_link_lost(struct cox_agent_link *link)
{
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t i = 0; i < link->depth; i++)
            link->channels[c].requests[i].again_ns = 0;
}

void cox_agent_link_answer(struct cox_agent_link *link, uint32_t c, uint64_t sequence,
                           const struct cox_answer *answer, bool done, uint64_t now_ns)
{
    struct cox_agent_request *request = request_of(link, c, sequence);
    if (request->sequence != sequence || !request->taken || request->answered)
        return; /* of a lead that is not followed any more */
    const struct cox_frame head = {.kind = COX_FRAME_ANSWER,
                                   .channel = c,
                                   .epoch = link->epoch,
                                   .incarnation = link->incarnation,
                                   .sequence = sequence,
                                   .sent_ns = now_ns,
                                   .size = cox_answer_size(answer)};
    request->answer_size = COX_FRAME_HEAD_SIZE + head.size;
    request->answer = cox_allocate_large(NULL, request->answer_size);
    COX_ASSERT(request->answer);
    cox_frame_pack_head(&head, request->answer);
    cox_answer_pack(answer, request->answer + COX_FRAME_HEAD_SIZE);
    request->answered = true;
    request->done = done;
    link_advance(&link->channels[c], link->depth);
    if (link->state == COX_LEAD_FOLLOWING)
        answer_send(link, request, now_ns);
}

void cox_agent_link_done(struct cox_agent_link *link, uint32_t c, uint64_t sequence)
{
    struct cox_agent_request *request = request_of(link, c, sequence);
    if (request->sequence != sequence || !request->answered)
        return;
    request->done = true;
    link->changed = true;
    link_advance(&link->channels[c], link->depth);
}

void cox_agent_link_set_rank(struct cox_agent_link *link, uint32_t rank,
                             const struct cox_agent_rank *is)
{
    link->ranks[rank - link->rank_first] = *is;
    link->changed = true;
}

static void link_beat(struct cox_agent_link *link, const char *leaving, uint64_t now_ns)
{
    CoxNode__AgentBeat beat = COX_NODE__AGENT_BEAT__INIT;
    CoxNode__Channel channels[COX_TWO_WAY_COUNT], *channel_pointers[COX_TWO_WAY_COUNT];
    CoxNode__Rank ranks[COX_RANK_COUNT_MAX], *rank_pointers[COX_RANK_COUNT_MAX];
    uint64_t answered[COX_TWO_WAY_COUNT][COX_NODE_DEPTH_MAX];
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct cox_agent_channel *channel = &link->channels[c];
        cox_node__channel__init(&channels[c]);
        channels[c].has_through = channels[c].has_done = 1;
        channels[c].through = channel->said = channel->taken;
        channels[c].done = channel->done;
        channels[c].answered = answered[c];
        for (uint32_t i = 0; i < link->depth; i++)
            if (channel->requests[i].answered && channel->requests[i].sequence > channel->done)
                answered[c][channels[c].n_answered++] = channel->requests[i].sequence;
        channel_pointers[c] = &channels[c];
    }
    for (uint32_t i = 0; i < link->rank_count; i++) {
        struct cox_agent_rank *rank = &link->ranks[i];
        cox_node__rank__init(&ranks[i]);
        COX_SET(&ranks[i], incarnation, rank->incarnation);
        COX_SET(&ranks[i], state, rank->state);
        COX_SET(&ranks[i], pid, rank->pid);
        ranks[i].has_stopped = ranks[i].stopped = rank->stopped;
        ranks[i].has_cpu_ns = rank->cpu_ns != 0;
        ranks[i].cpu_ns = rank->cpu_ns;
        ranks[i].has_resident_bytes = rank->resident_bytes != 0;
        ranks[i].resident_bytes = rank->resident_bytes;
        rank->cpu_ns = rank->resident_bytes = 0;
        if (rank->state == COX_NODE__RANK_STATE__DEAD) {
            ranks[i].text = (char *)(uintptr_t)rank->text;
            COX_SET(&ranks[i], known, rank->known);
            COX_SET(&ranks[i], signal, rank->signal);
            COX_SET(&ranks[i], exit_status, rank->exit_status);
        }
        rank_pointers[i] = &ranks[i];
    }
    beat.n_channels = COX_TWO_WAY_COUNT;
    beat.channels = channel_pointers;
    beat.n_ranks = link->rank_count;
    beat.ranks = rank_pointers;
    COX_SET(&beat, peers_version, link->peers_version);
    COX_SET(&beat, agent, link->agent);
    beat.server_id = link->server_id;
    COX_SET(&beat, client_id, link->client_id);
    COX_SET(&beat, refused, link->refused);
    beat.has_leaving = beat.leaving = leaving != NULL;
    beat.leaving_text = (char *)(uintptr_t)leaving;
    const struct cox_frame head = {.kind = COX_FRAME_AGENT_BEAT,
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
    link->send(link->context, bytes, size);
}

/* A request that the ranks have since beat_ms, of which neither a beat nor an answer has spoken. */
static bool request_is_unsaid(const struct cox_agent_link *link, uint64_t before_ns)
{
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t i = 0; i < link->depth; i++) {
            const struct cox_agent_request *request = &link->channels[c].requests[i];
            if (request->taken && !request->answered && request->came_ns <= before_ns &&
                request->sequence > link->channels[c].said)
                return true;
        }
    return false;
}

static bool beat_is_due(const struct cox_agent_link *link, uint64_t now_ns)
{
    const uint64_t beat_ns = link->times.beat_ms * COX_NSEC_PER_MSEC;
    if (link->changed || now_ns - link->beat_ns >= COX_NODE_BEATS_MAX * beat_ns)
        return true;
    return now_ns - (link->again ? link->beat_ns : link->spoke_ns) >= beat_ns ||
           request_is_unsaid(link, now_ns - beat_ns);
}

void cox_agent_link_tick(struct cox_agent_link *link, uint64_t now_ns)
{
    if (link->state == COX_LEAD_FOLLOWING &&
        now_ns - link->heard_ns >= link->times.dead_ms * COX_NSEC_PER_MSEC) {
        link->state = COX_LEAD_LOST;
        link->lost_ns = now_ns;
    }
    if (link->state == COX_LEAD_LOST &&
        now_ns - link->lost_ns >= link->times.lead_grace_ms * COX_NSEC_PER_MSEC)
        link->state = COX_LEAD_OVER;
    /* Also to a lead that is lost: it may hear, and answers then. */
    if ((link->state == COX_LEAD_FOLLOWING || link->state == COX_LEAD_LOST) &&
        beat_is_due(link, now_ns))
        link_beat(link, NULL, now_ns);
}

void cox_agent_link_release(struct cox_agent_link *link)
{
    link_forget(link);
    link->state = COX_LEAD_FREE;
    link->finishing = link->failed = false;
    /* Its ranks end: no later lead goes on behind their numbers. */
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        link->channels[c].taken = link->channels[c].done = link->channels[c].said = 0;
    memset(link->ranks, 0, sizeof link->ranks);
}

bool cox_agent_link_forget(struct cox_agent_link *link, uint64_t real_ns)
{
    if (link->state != COX_LEAD_FREE || cox_epoch_can_be(link->epoch, real_ns))
        return false;
    link->epoch = link->incarnation = 0;
    return true;
}

void cox_agent_link_leave(struct cox_agent_link *link, const char *text, uint64_t now_ns)
{
    if (link->state == COX_LEAD_FOLLOWING || link->state == COX_LEAD_LOST)
        link_beat(link, text, now_ns);
    link->state = COX_LEAD_OVER;
}

void cox_agent_link_describe(struct cox_agent_link *link, uint64_t now_ns, CoxNode__Hello *message,
                             CoxNode__Channel *channels, CoxNode__Channel **pointers)
{
    link->hello_ns = now_ns;
    COX_SET(message, epoch, link->epoch);
    message->lead_address = link->lead_address;
    COX_SET(message, silent_ms, link->epoch ? (now_ns - link->heard_ns) / COX_NSEC_PER_MSEC : 0);
    COX_SET(message, rank_first, link->rank_first);
    COX_SET(message, rank_count, link->rank_count);
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        cox_node__channel__init(&channels[c]);
        COX_SET(&channels[c], through, link->channels[c].taken);
        pointers[c] = &channels[c];
    }
    message->n_channels = COX_TWO_WAY_COUNT;
    message->channels = pointers;
}
