/*
 * One round: a rank stores its operation, then its arrival, and waits until every member's word
 * shows the same arrival. The words are the shared state. A wakeup, with a count of the arrivals,
 * only says when to check them.
 *
 * Why a value slot is free again two rounds later. A rank arrives at round i + 1 only after it has
 * returned from round i and copied its values. So when round i + 1 is complete, every member has
 * finished reading round i, and what is written to the slots of i's parity in round i + 2
 * overwrites nothing that is read. The same holds for `what`. Therefore two members of one epoch
 * are at most one round apart, and an index of 24 bits may wrap around.
 *
 * Why epochs do not mix. align replaces a rank's word by one of the new epoch and reads it back
 * before it writes anything else in that epoch. Let A wait at round 3 of epoch e, and B align to e
 * + 1. A sees B's word in a later epoch and cannot tell whether B had arrived at round 3: A ends
 * with ABORTED. If A had seen B at round 3 and copies its value while B, in its new epoch,
 * overwrites it, then A's second check of B's word, after the copy, sees the later epoch, because
 * the word is ordered before the new value. For B, A's word is of an older epoch, which is no
 * arrival: B waits until A has aligned as well. A word of an older epoch is never completed: align
 * is monotone, so A cannot arrive at e + 1 before it has left e. If C never aligns, B ends at its
 * deadline and aborts e + 1.
 *
 * Why incarnations do not mix although a rank has the same words in each (the sealed form). Let B
 * join incarnation L + 1 while A still waits or reads in L. Before B changes any other word it
 * stores in `holder` that it is in no incarnation, and inverts the mirror of each part, so that the
 * word beside it is no arrival. Then it sets its words to zero, stores L + 1, and arrives there
 * with mirrors of L + 1. So A sees of B either an earlier arrival of L, or none. If A had seen B
 * arrive in L and copies its value while B writes a new one in L + 1, A's second check finds a
 * mirror that is not of L: the inverted mirror is ordered before the new value, as the word of an
 * align is. B in L + 1 waits for A before its first round can complete, since each rank must have
 * stored L + 1 first. Once `holder` and the incarnation beside it show that B has moved on, which
 * are changed first, A ignores the state of B's subgroups, its round, and what B has aborted: that
 * incarnation is over for A as well. Nor does what B left in L count in L + 1: B had set it to zero
 * before it stored that it is there. The death of a rank plays no part in this: its successor has
 * other memory.
 *
 * Why a failure reaches all members. A rank that fails aborts the epoch: it stores that in its own
 * line and wakes the others. A member whose round is incomplete checks all lines at every wake and
 * every 50 ms, and ends with ABORTED if one has aborted its epoch. A member whose round is complete
 * returns 0 and finds the word in its next round, because a rank that has aborted never arrives in
 * that epoch again. Deaths are checked before ABORTED is returned: a rank that has seen a death has
 * aborted for good because of it, and the death counts for all, in whatever epoch they are. The
 * dead rank is part of what is stored: a rank that aborts for good stores it first, and a rank that
 * learns of it from there stores the same. So all name the rank that died, and not one that left
 * because of it, even if they cannot see the death themselves. A member that has arrived is not
 * checked otherwise: whether it lives makes no difference to this round.
 *
 * A member that was counted, and is not the last, waits without checking the others: the last one
 * wakes it. Anything else that can end a round is counted in `news`, which a waiter reads before it
 * waits; if it has changed, the waiter checks the words of all. News are finished when a check of
 * them has found nothing, not when the round is complete: a member that has aborted may have
 * arrived at this round, and not at the next one.
 *
 * Why no wakeup is lost for longer than 50 ms. A waiter reads `word` before it counts itself and
 * checks. The last one to count wakes after that, so a waiter that did not see all arrivals does
 * not block on the old value. A rank that is overtaken between its arrival and its count finds a
 * later round counted, leaves that count, and wakes for its own round. A count that was damaged (by
 * a flipped bit, by a rank of an older epoch) makes no rank wake the others; then all check after a
 * slice.
 *
 * Why a flipped bit is no arrival. Each arrival is stored twice, as it is and as its complement.
 * Owners store all their words again in every slice.
 */
#include "group_private.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/options.h"
#include "channel/recorder/probes.h"
#include "channel/recorder/recorder.h"

/* ---- wakeups ---- */

static void wakeup_post(struct cox_group_layout_wakeup *wakeup)
{
    uint32_t seen = atomic_load_explicit(&wakeup->word, memory_order_relaxed), next;
    /* A waiter marks this word itself, so no order between two words decides who is woken: either
     * the mark came before this change, or the waiter finds another value. The mark of a process
     * that was killed costs one wake. release: a reader of this sees everything stored before;
     * partner is the load before a check. */
    do
        next = (seen & ~COX_GROUP_WAKEUP_SLEEPS) + COX_GROUP_WAKEUP_STEP;
    while (!atomic_compare_exchange_weak_explicit(&wakeup->word, &seen, next, memory_order_release,
                                                  memory_order_relaxed));
    cox_fault_point(COX_FAULT_GROUP_WAKES);
    if (seen & COX_GROUP_WAKEUP_SLEEPS)
        cox_futex_wake(&wakeup->word);
    cox_fault_point(COX_FAULT_GROUP_WOKEN);
}

void cox_group_wake(struct cox_group_layout_wakeup *wakeup)
{
    /* release: the event itself; partner is the acquire in round_wait. Before the wake: a thread
     * that is woken sees this. */
    atomic_fetch_add_explicit(&wakeup->news, 1, memory_order_release);
    wakeup_post(wakeup);
}

uint32_t cox_group_listen(struct cox_group_layout_wakeup *wakeup)
{
    /* acquire: partner is the release in wakeup_post. */
    return atomic_load_explicit(&wakeup->word, memory_order_acquire) & ~COX_GROUP_WAKEUP_SLEEPS;
}

int cox_group_sleep(struct cox_group_layout_wakeup *wakeup, uint32_t seen, uint64_t until_ns)
{
    uint32_t word = seen;
    /* relaxed, both: the kernel compares the word again. Marked already: by another waiter. */
    if (!atomic_compare_exchange_strong_explicit(&wakeup->word, &word,
                                                 seen | COX_GROUP_WAKEUP_SLEEPS,
                                                 memory_order_relaxed, memory_order_relaxed) &&
        word != (seen | COX_GROUP_WAKEUP_SLEEPS))
        return 0;
    cox_fault_point(COX_FAULT_GROUP_SLEEPS);
    int r = cox_futex_wait(&wakeup->word, seen | COX_GROUP_WAKEUP_SLEEPS, until_ns);
    return r == COX_TIMEOUT ? 0 : r;
}

/* The slot of the member's parts, found by name. Returns 0: not formed yet. *ret_other: formed with
 * other members. */
static uint32_t member_slot(struct cox_group *group, uint32_t place, bool *ret_other)
{
    *ret_other = false;
    if (group->slot == 0)
        return 0;
    /* relaxed, here and below: a thread that does not see it finds it again. */
    uint32_t known = atomic_load_explicit(&group->slots[place], memory_order_relaxed);
    if (known)
        return known;
    const struct cox_group_layout_rank *rank = group->base->ranks[group->ranks[place]];
    for (uint32_t slot = 1; slot < COX_GROUP_PART_COUNT; slot++) {
        const struct cox_group_layout_part *part = &rank->parts[slot];
        /* acquire: members_hash was stored before; partner is cox_group_subgroup. */
        if (atomic_load_explicit(&part->name_hash, memory_order_acquire) != group->name_hash)
            continue;
        /* relaxed: see above */
        if (atomic_load_explicit(&part->members_hash, memory_order_relaxed) ==
            group->members_hash) {
            atomic_store_explicit(&group->slots[place], (uint8_t)slot, memory_order_relaxed);
            return slot;
        }
        *ret_other = true;
    }
    return 0;
}

struct cox_group_layout_wakeup *cox_group_wakeup(struct cox_group *group)
{
    bool other;
    if (group->slot == 0)
        return group->base->wakeup;
    uint32_t slot = member_slot(group, 0, &other);
    return slot ? &group->base->wakeups[group->ranks[0] * COX_SUBGROUP_COUNT_MAX + slot - 1] : NULL;
}

/* Returns true if the count belongs to a later round than `tag`. */
static bool count_is_later(uint64_t seen, uint64_t tag)
{
    int32_t epochs = (int32_t)((uint32_t)(seen >> 32) - (uint32_t)(tag >> 32));
    uint32_t rounds = (uint32_t)((seen >> 8) - (tag >> 8)) & COX_GROUP_INDEX_MASK;
    return epochs > 0 || (epochs == 0 && rounds == 1);
}

/* Counts an arrival. Returns true if the caller must wake the others: all are counted, this rank as
 * the last; or others are counted in a later round already, having seen this rank arrive before it
 * was counted. Then their count stays, and waiters of this round, which is complete, are woken. */
static bool wakeup_count(struct cox_group_layout_wakeup *wakeup, uint64_t incarnation,
                         uint64_t word, uint32_t count)
{
    /* The upper bits of incarnation and epoch do not matter for a hint. */
    uint64_t tag = incarnation << 56 | (word << 8 & (UINT64_MAX >> 8));
    /* relaxed: the exchange below decides. */
    uint64_t seen = atomic_load_explicit(&wakeup->counted, memory_order_relaxed), next;
    do {
        if (seen && count_is_later(seen, tag))
            return true;
        next = (seen & ~UINT64_C(0xff)) == tag ? seen + 1 : tag | 1;
    }
    /* acq_rel: the last one sees the arrivals of those that counted before it, and wakes after they
     * have read `word`; partner is this exchange. */
    while (!atomic_compare_exchange_weak_explicit(&wakeup->counted, &seen, next,
                                                  memory_order_acq_rel, memory_order_relaxed));
    cox_fault_point(COX_FAULT_GROUP_COUNTED);
    return (next & 0xff) == count;
}

/* ---- what a rank says ---- */

static uint64_t own_word(const struct cox_group *group)
{
    return cox_group_arrived(cox_group_present(group->base), group->index);
}

static void part_arrive(struct cox_group *group, enum cox_group_operation operation,
                        uint32_t detail)
{
    struct cox_group_layout_part *part = cox_group_own_part(group);
    group->index = (group->index + 1) & COX_GROUP_INDEX_MASK;
    group->said_what = cox_group_what(group->index, detail, (uint8_t)operation);
    uint64_t word = own_word(group);
    /* relaxed, both: ordered by the release below. */
    atomic_store_explicit(&part->what[group->index & 1], group->said_what, memory_order_relaxed);
    atomic_store_explicit(&part->mirror, cox_group_mirror(group->base->incarnation, word),
                          memory_order_relaxed);
    /* release: what this rank wrote before, here and anywhere; partner is the acquire in
     * member_read. */
    atomic_store_explicit(&part->arrived, word, memory_order_release);
    cox_group_tell_mirror(group->base);
    cox_fault_point(COX_FAULT_GROUP_ARRIVED);
}

void cox_group_blame(struct cox_group *group, uint32_t rank)
{
    /* relaxed: the number carries no other data. Partner is part_say_gone. */
    atomic_store_explicit(&group->blamed, rank + 1, memory_order_relaxed);
}

static void part_say_gone(struct cox_group *group)
{
    struct cox_group_layout_part *part = cox_group_own_part(group);
    /* relaxed, both: before the release below; partner is member_because. */
    uint32_t because = atomic_load_explicit(&group->blamed, memory_order_relaxed);
    uint64_t gone;
    atomic_store_explicit(&part->because, because ? cox_group_said_dead(because - 1) : 0,
                          memory_order_relaxed);
    /* Two threads may do this at once: the later epoch stays. seq_cst, all, and where gone is
     * raised: the thread that stores the earlier epoch loads gone after its store, and sees that it
     * was raised if the other's store came first. release: partner is words_trouble. */
    do {
        gone = atomic_load_explicit(&group->gone, memory_order_seq_cst);
        atomic_store_explicit(&part->aborted, gone, memory_order_seq_cst);
    } while (atomic_load_explicit(&group->gone, memory_order_seq_cst) != gone);
    cox_group_tell_mirror(group->base);
    cox_fault_point(COX_FAULT_GROUP_ABORTED);
}

void cox_group_say_again(struct cox_group *group)
{
    struct cox_group_layout_part *part = cox_group_own_part(group);
    uint64_t word = own_word(group);
    /* relaxed, all: the words have these values already, unless a process has overwritten them. */
    atomic_store_explicit(&part->members_hash, group->members_hash, memory_order_relaxed);
    atomic_store_explicit(&part->name_hash, group->name_hash, memory_order_relaxed);
    atomic_store_explicit(&part->what[group->index & 1], group->said_what, memory_order_relaxed);
    atomic_store_explicit(&part->mirror, cox_group_mirror(group->base->incarnation, word),
                          memory_order_relaxed);
    atomic_store_explicit(&part->arrived, word, memory_order_release);
    part_say_gone(group);
}

/* The first one stays: later ends may follow from it. */
static void say_dead(struct cox_group *group)
{
    struct cox_group_base *base = group->base;
    uint32_t none = 0;
    /* relaxed, all: the number carries no other data. Partner is the same on a thread that operates
     * in a subgroup. */
    if (group->dead)
        atomic_compare_exchange_strong_explicit(&base->dead, &none, group->dead,
                                                memory_order_relaxed, memory_order_relaxed);
    uint32_t dead = atomic_load_explicit(&base->dead, memory_order_relaxed);
    if (dead)
        /* relaxed: before the release in part_say_gone; partner is cox_group_cause. */
        atomic_store_explicit(&base->ranks[base->rank]->identity.said_dead,
                              cox_group_said_dead(dead - 1), memory_order_relaxed);
}

void cox_group_give_up(struct cox_group *group, bool for_good)
{
    if (for_good)
        say_dead(group);
    uint64_t epoch = for_good ? COX_GROUP_EPOCH_NONE : cox_group_present(group->base);
    uint64_t word = cox_group_aborted(epoch);
    /* relaxed: part_say_gone checks again. */
    uint64_t seen = atomic_load_explicit(&group->gone, memory_order_relaxed);
    while (seen < word &&
           !atomic_compare_exchange_weak_explicit(&group->gone, &seen, word, memory_order_seq_cst,
                                                  memory_order_relaxed))
        ;
    part_say_gone(group);
    struct cox_group_layout_wakeup *wakeup = cox_group_wakeup(group);
    if (wakeup)
        cox_group_wake(wakeup);
    /* Members that wait for the first one to form the subgroup block there. */
    if (group->slot)
        cox_group_wake(group->base->wakeup);
}

bool cox_group_is_over(const struct cox_group *group)
{
    uint64_t gone = atomic_load_explicit(&group->gone, memory_order_acquire);
    return gone == cox_group_aborted(cox_group_present(group->base)) ||
           gone == cox_group_aborted(COX_GROUP_EPOCH_NONE);
}

/* ---- what the others say ---- */

enum member_state {
    MEMBER_MISSING, /* not there yet */
    MEMBER_HERE,
    MEMBER_LATER, /* in a later epoch */
    MEMBER_NONSENSE,
    MEMBER_OTHER, /* has formed the subgroup with other members */
};

static enum member_state word_read(const struct cox_group *group, uint64_t word)
{
    uint64_t present = cox_group_present(group->base), epoch = word >> COX_GROUP_INDEX_BITS;
    if (epoch != present)
        return epoch < present ? MEMBER_MISSING : MEMBER_LATER;
    switch (((uint32_t)word - group->index) & COX_GROUP_INDEX_MASK) {
    case 0:
    case 1: /* it has finished this one */
        return MEMBER_HERE;
    case COX_GROUP_INDEX_MASK:
        return MEMBER_MISSING;
    default:
        return MEMBER_NONSENSE;
    }
}

static enum member_state member_read(struct cox_group *group, uint32_t place)
{
    bool other;
    uint32_t slot = member_slot(group, place, &other);
    if (group->slot && !slot)
        return other ? MEMBER_OTHER : MEMBER_MISSING;
    const struct cox_group_layout_part *part =
        &group->base->ranks[group->ranks[place]]->parts[slot];
    /* acquire: partner is the release in part_arrive. */
    uint64_t word = atomic_load_explicit(&part->arrived, memory_order_acquire);
    const uint64_t incarnation = group->base->incarnation;
    uint64_t mirror = atomic_load_explicit(&part->mirror, memory_order_relaxed);
    enum member_state state = word_read(group, word);
    /* It may have been here, and be about to arrive at the next round. Any other value is about to
     * change, or was overwritten. */
    uint64_t next = cox_group_arrived(word >> COX_GROUP_INDEX_BITS, (uint32_t)word + 1);
    return mirror == cox_group_mirror(incarnation, word) ||
                   (mirror == cox_group_mirror(incarnation, next) && state == MEMBER_HERE)
               ? state
               : MEMBER_MISSING;
}

bool cox_group_went_on(struct cox_group *group, uint32_t place)
{
    bool other;
    uint32_t slot = member_slot(group, place, &other);
    if (group->slot && !slot)
        return false;
    const struct cox_group_layout_part *part =
        &group->base->ranks[group->ranks[place]]->parts[slot];
    const uint64_t next = cox_group_arrived(cox_group_present(group->base), group->index + 1);
    /* acquire: as in member_read. */
    return atomic_load_explicit(&part->arrived, memory_order_acquire) == next &&
           atomic_load_explicit(&part->mirror, memory_order_relaxed) ==
               cox_group_mirror(group->base->incarnation, next);
}

/* Returns true if a member is missing. */
static bool round_missing(struct cox_group *group, struct cox_rank_set *ret_missing)
{
    bool any = false;
    memset(ret_missing, 0, sizeof *ret_missing);
    for (uint32_t place = 0; place < group->count; place++) {
        if (place == group->self || member_read(group, place) == MEMBER_HERE)
            continue;
        cox_rank_set_add(ret_missing, group->ranks[place]);
        any = true;
    }
    return any;
}

/* ---- deaths, and the rest that ends a wait ---- */

/* It lives, and reports that its epochs are over: no other rank can tell whether because of the
 * rank that it names. */
static int fail_for_good(const struct cox_group_base *base, uint32_t rank, struct cox_error *err)
{
    int32_t cause = cox_group_said_cause(base, rank);
    char text[64] = "";
    if (cause >= 0)
        snprintf(text, sizeof text, "; it says because of rank %" PRId32, cause);
    return cox_fail(err, COX_PEER_DEAD,
                    "rank %" PRIu32 " (pid %jd) has given up for good%s: form another group", rank,
                    (intmax_t)base->peers[rank].pid, text);
}

static int fail_dead(struct cox_group *group, uint32_t rank, struct cox_error *err)
{
    const struct cox_group_base *base = group->base;
    group->dead = rank + 1;
    cox_group_blame(group, rank);
    if (base->memory && !cox_group_has_left(base, rank) && cox_group_peer_known(base, rank) &&
        cox_group_peer_alive(base, rank))
        return fail_for_good(base, rank, err);
    if (cox_group_has_left(base, rank))
        return cox_fail(err, COX_PEER_DEAD,
                        "rank %" PRIu32 " (pid %jd) has left the group: form another one", rank,
                        (intmax_t)base->peers[rank].pid);
    return cox_fail(err, COX_PEER_DEAD, "rank %" PRIu32 " (pid %jd) is dead: form another group",
                    rank, (intmax_t)base->peers[rank].pid);
}

/* The first member that has left, preferably one that names a cause. -1: none. */
static int32_t left_among(const struct cox_group_base *base, const struct cox_rank_set *set)
{
    int32_t left = -1;
    for (uint32_t rank = 0; rank < base->rank_count; rank++) {
        if (!cox_rank_set_has(set, rank) || !cox_group_has_left(base, rank))
            continue;
        if (cox_group_cause(base, rank) >= 0)
            return (int32_t)rank;
        if (left < 0)
            left = (int32_t)rank;
    }
    return left;
}

/* The aborted word of the member. 0: none, or it has not formed the subgroup yet. */
static uint64_t member_aborted(struct cox_group *group, uint32_t place)
{
    bool other;
    uint32_t slot = member_slot(group, place, &other);
    if (group->slot && !slot)
        return 0;
    /* acquire: partner is part_say_gone. */
    return atomic_load_explicit(&group->base->ranks[group->ranks[place]]->parts[slot].aborted,
                                memory_order_acquire);
}

/* A member that has aborted for good, preferably one that names a cause; -1: none. */
static int32_t member_reported_dead(struct cox_group *group)
{
    int32_t reported = -1;
    for (uint32_t place = 0; place < group->count; place++) {
        int32_t rank = group->ranks[place];
        if (place == group->self ||
            member_aborted(group, place) != cox_group_aborted(COX_GROUP_EPOCH_NONE))
            continue;
        if (cox_group_cause(group->base, (uint32_t)rank) >= 0)
            return rank;
        if (reported < 0)
            reported = rank;
    }
    return reported;
}

/* The rank to name in the error: of one that was seen dead, one that left and one that reports a
 * death, each -1 if there is none. A rank that ended because of another one leads to that one. -1:
 * none is known. */
static int32_t dead_choose(const struct cox_group_base *base, int32_t dead, int32_t left,
                           int32_t reported)
{
    int32_t ended = dead >= 0 ? dead : left;
    int32_t cause = ended >= 0 ? cox_group_cause(base, (uint32_t)ended) : -1;
    if (cause < 0 && dead < 0 && reported >= 0)
        cause = cox_group_cause(base, (uint32_t)reported);
    return cause >= 0 ? cause : ended;
}

static bool has_aborted(struct cox_group *group, uint32_t place)
{
    uint64_t aborted = member_aborted(group, place);
    return aborted == cox_group_aborted(cox_group_present(group->base)) ||
           aborted == cox_group_aborted(COX_GROUP_EPOCH_NONE);
}

/* The rank because of which, or after which, the member aborted, by its own words. -1: it names
 * none. */
static int32_t member_because(const struct cox_group *group, uint32_t place)
{
    const struct cox_group_layout_part *part =
        &group->base->ranks[group->ranks[place]]->parts[group->slots[place]];
    /* relaxed: stored before the word that was loaded with acquire, see part_say_gone. */
    int32_t rank = cox_group_said_rank(group->base,
                                       atomic_load_explicit(&part->because, memory_order_relaxed));
    return rank == group->ranks[place] ? -1 : rank;
}

/* The members that have aborted this epoch, and because of whom, as each reports. Read once. */
struct reasons {
    struct cox_rank_set gave_up;
    /* for these members: another rank; -1: it names none */
    int16_t because[COX_RANK_COUNT_MAX];
};

/* Returns the first rank that has aborted; -1: none has. */
static int32_t reasons_read(struct cox_group *group, struct reasons *ret_reasons)
{
    int32_t first = -1;
    memset(&ret_reasons->gave_up, 0, sizeof ret_reasons->gave_up);
    for (uint32_t place = 0; place < group->count; place++) {
        uint32_t rank = group->ranks[place];
        if (place == group->self || !has_aborted(group, place))
            continue;
        cox_rank_set_add(&ret_reasons->gave_up, rank);
        ret_reasons->because[rank] = (int16_t)member_because(group, place);
        if (first < 0)
            first = (int32_t)rank;
    }
    return first;
}

static bool reasons_follow(const struct reasons *reasons, uint32_t rank)
{
    int32_t because = reasons->because[rank];
    return because >= 0 && cox_rank_set_has(&reasons->gave_up, (uint32_t)because);
}

/* Follows the reasons from this rank to one that did not follow another. If they form a circle (one
 * ended because of numbers from the other, which followed it), returns one of the circle. */
static uint32_t reasons_root(const struct reasons *reasons, uint32_t rank)
{
    struct cox_rank_set seen = {{0}};
    while (reasons_follow(reasons, rank) && !cox_rank_set_has(&seen, rank)) {
        cox_rank_set_add(&seen, rank);
        rank = (uint32_t)reasons->because[rank];
    }
    return rank;
}

/* Fails because a rank has aborted. If it names another one, no third rank can tell which of the
 * two is at fault, so both are named. Of a circle all are named. */
static int fail_aborted(struct cox_group *group, const struct reasons *reasons, uint32_t root,
                        struct cox_error *err)
{
    char text[512] = "";
    size_t used = 0;
    int32_t because = reasons->because[root];
    cox_group_blame(group, root);
    while (because >= 0 && used < sizeof text) {
        int n = snprintf(text + used, sizeof text - used, "%s because of rank %" PRId32,
                         used ? ", which says" : "; it says", because);
        used += n > 0 ? (size_t)n : 0;
        if (because == (int32_t)root || !cox_rank_set_has(&reasons->gave_up, (uint32_t)because))
            break;
        because = reasons->because[because];
    }
    return cox_fail(err, COX_ABORTED,
                    "rank %" PRIu32 " has given up the operations of epoch %" PRIu64 "%s", root,
                    cox_group_present(group->base), text);
}

/* Returns COX_ABORTED or COX_CORRUPT if a member's words end this epoch, else 0. */
static int words_trouble(struct cox_group *group, struct cox_error *err)
{
    const struct cox_group_base *base = group->base;
    uint64_t present = cox_group_present(base);
    for (uint32_t place = 0; place < group->count; place++) {
        uint32_t rank = group->ranks[place];
        if (place == group->self)
            continue;
        enum member_state state = member_read(group, place);
        if (state == MEMBER_MISSING || state == MEMBER_HERE)
            continue;
        /* The words of a rank that is in another incarnation by now, which it stores first, mean
         * nothing here. */
        if (base->memory && cox_group_has_left(base, rank))
            continue;
        cox_group_blame(group, rank);
        if (state == MEMBER_LATER)
            return cox_fail(err, COX_ABORTED,
                            "rank %" PRIu32 " is past epoch %" PRIu64 ": align with it", rank,
                            present);
        if (state == MEMBER_OTHER)
            return cox_fail(err, COX_CORRUPT,
                            "rank %" PRIu32 " has formed subgroup '%s' with other members", rank,
                            group->name);
        return cox_fail(err, COX_CORRUPT,
                        "rank %" PRIu32 " is at an operation that cannot be, this one at %" PRIu32
                        " of epoch %" PRIu64,
                        rank, group->index, present);
    }
    struct reasons reasons;
    int32_t first = reasons_read(group, &reasons);
    return first >= 0 ? fail_aborted(group, &reasons, reasons_root(&reasons, (uint32_t)first), err)
                      : 0;
}

int cox_group_trouble(struct cox_group *group, const struct cox_rank_set *missing, bool due,
                      struct cox_error *err)
{
    const struct cox_group_base *base = group->base;
    struct cox_error why = {0};
    int r = words_trouble(group, &why);
    /* A reported death counts, whatever others report. */
    int32_t reported = r ? member_reported_dead(group) : -1;
    if (reported >= 0) {
        why = (struct cox_error){0};
        r = cox_fail(&why, COX_PEER_DEAD,
                     "rank %" PRId32 " has seen a member die: form another group", reported);
        if (base->memory)
            cox_group_blame(group, (uint32_t)reported);
    }
    int32_t left = left_among(base, missing), dead = -1;
    if (r || left >= 0) {
        /* The epoch ends in any case. A rank that died after its arrival may be why others
         * continued without this rank. */
        struct cox_rank_set others = {{0}};
        for (uint32_t place = 0; place < group->count; place++)
            if (place != group->self)
                cox_rank_set_add(&others, group->ranks[place]);
        dead = cox_group_dead_among(base, &others);
    } else if (due) {
        dead = cox_group_dead_among(base, missing);
    }
    dead = dead_choose(base, dead, left, reported);
    /* No rank is known to be dead: then the rank that reports it has aborted for its own reasons.
     */
    if (base->memory && dead < 0 && reported >= 0)
        dead = reported;
    if (dead >= 0)
        return fail_dead(group, (uint32_t)dead, err);
    if (cox_group_is_over(group))
        return cox_fail(err, COX_ABORTED, "epoch %" PRIu64 " was ended by this rank",
                        cox_group_present(base));
    if (r)
        return cox_fail(err, r, "%s", why.text);
    if (due && base->cancelled && base->cancelled(base->context))
        return cox_fail(err, COX_ABORTED, "given up by the caller");
    return 0;
}

const char *cox_group_list(const struct cox_rank_set *ranks, char *text, size_t size)
{
    size_t used = 0, count = 0;
    text[0] = '\0';
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++) {
        if (!cox_rank_set_has(ranks, rank) || used >= size)
            continue;
        uint32_t last = rank;
        while (last + 1 < COX_RANK_COUNT_MAX && cox_rank_set_has(ranks, last + 1))
            last++;
        int n = snprintf(text + used, size - used,
                         last > rank ? "%s%" PRIu32 "-%" PRIu32 : "%s%" PRIu32, used ? ", " : "",
                         rank, last);
        used += n > 0 ? (size_t)n : 0;
        count += last - rank + 1;
        rank = last;
    }
    char list[256];
    snprintf(list, sizeof list, "%s", text);
    snprintf(text, size, "%s %s", count > 1 ? "ranks" : "rank", list);
    return text;
}

static int fail_timeout(struct cox_group *group, const struct cox_rank_set *missing,
                        struct cox_error *err)
{
    char list[256];
    for (uint32_t rank = 0; rank < group->base->rank_count; rank++)
        if (cox_rank_set_has(missing, rank)) {
            cox_group_blame(group, rank);
            break;
        }
    return cox_fail(
        err, COX_TIMEOUT, "%s did not arrive at operation %" PRIu32 " of epoch %" PRIu64,
        cox_group_list(missing, list, sizeof list), group->index, cox_group_present(group->base));
}

/* ---- the round ---- */

struct wakeup_read {
    struct cox_group_layout_wakeup *wakeup;
    uint32_t seen;
};

static bool wakeup_moved(const void *context)
{
    const struct wakeup_read *read = context;
    return cox_group_listen(read->wakeup) != read->seen;
}

static int round_wait(struct cox_group *group, uint64_t deadline_ns, struct cox_error *err)
{
    uint64_t word = own_word(group), look_ns = 0, say_ns = 0;
    struct cox_rank_set missing;
    bool counted = group->count == 1;
    for (;;) {
        struct cox_group_layout_wakeup *wakeup = cox_group_wakeup(group), *awaited = wakeup;
        bool early = false; /* the last one to arrive wakes; there is nothing to check yet */
        if (!wakeup)        /* its first member wakes here when it forms the subgroup */
            awaited = group->base->wakeup;
        uint32_t seen = cox_group_listen(awaited);
        if (!counted && wakeup) {
            counted = true;
            if (wakeup_count(wakeup, group->base->incarnation, word, group->count))
                wakeup_post(wakeup);
            else
                early = true;
        }
        if (!early && !round_missing(group, &missing))
            return 0;
        uint64_t now = cox_now_ns();
        if (look_ns == 0) {
            look_ns = now + COX_GROUP_LOOK_NS;
            say_ns = now + COX_GROUP_SLICE_NS;
        }
        bool late = now >= deadline_ns, due = late || now >= look_ns;
        /* acquire: partner is the release in cox_group_wake. Read before the words that it
         * announces. */
        uint32_t news = atomic_load_explicit(&awaited->news, memory_order_acquire);
        int r = 0;
        if (due || !wakeup || news != group->news || !group->news_known) {
            struct cox_error why = {0};
            if (early && !round_missing(group, &missing))
                return 0;
            r = cox_group_trouble(group, &missing, due, &why);
            /* A member that is seen dead, or gone, may have arrived after it was found missing. */
            if (r && !round_missing(group, &missing)) {
                group->dead = 0;
                return 0;
            }
            if (r)
                return cox_fail(err, r, "%s", why.text);
            /* Only now: the next round must also see what ends the epoch, if this one is complete.
             */
            group->news = news;
            group->news_known = wakeup != NULL;
        }
        if (late)
            return fail_timeout(group, &missing, err);
        if (due)
            look_ns = now + COX_GROUP_LOOK_NS;
        if (now >= say_ns) {
            say_ns = now + COX_GROUP_SLICE_NS;
            cox_group_say_again(group);
        }
        /* A spinning thread has not marked the wakeup, so waking it needs no system call. */
        const struct wakeup_read read = {awaited, seen};
        if (cox_spin_until(&group->spinner, wakeup_moved, &read,
                           cox_deadline_min(look_ns, deadline_ns)))
            continue;
        r = cox_group_sleep(awaited, seen, cox_deadline_min(look_ns, deadline_ns));
        if (r)
            return cox_fail(err, r, "waiting for the others: %s", cox_status_text(r));
    }
}

static const char *operation_name(uint64_t what)
{
    static const char *const names[COX_GROUP_OPERATION_COUNT] = {
        [COX_GROUP_BARRIER] = "a barrier",
        [COX_GROUP_GATHER] = "a gather",
        [COX_GROUP_GATHER_FDS] = "a gather of fds",
        [COX_GROUP_BROADCAST_FD] = "a broadcast of an fd",
    };
    uint8_t operation = (uint8_t)what;
    return operation < COX_GROUP_OPERATION_COUNT && names[operation] ? names[operation] : "nothing";
}

/* Checks that what was read belongs to this epoch: no member has moved on meanwhile. */
static int epoch_verify(struct cox_group *group, struct cox_error *err)
{
    uint64_t present = cox_group_present(group->base);
    /* seq_cst, on a word of this rank and on theirs: release keeps the copies before it, and a
     * later seq_cst load stays behind it. Acquire alone is not enough on machines where an exchange
     * is a load and a store, between which other loads can move. */
    atomic_fetch_or_explicit(&group->gone, 0, memory_order_seq_cst);
    for (uint32_t place = 0; place < group->count; place++) {
        const struct cox_group_layout_part *part =
            &group->base->ranks[group->ranks[place]]->parts[group->slots[place]];
        /* Partner is part_align. */
        uint64_t word = atomic_load_explicit(&part->arrived, memory_order_seq_cst);
        bool stayed = word >> COX_GROUP_INDEX_BITS == present;
        /* In another incarnation a word may have the same value, but not with this mirror. Partner
         * is cox_group_parts_reset. */
        if (stayed && group->base->memory && place != group->self) {
            const uint64_t incarnation = group->base->incarnation;
            uint64_t mirror = atomic_load_explicit(&part->mirror, memory_order_seq_cst);
            stayed = mirror == cox_group_mirror(incarnation, word) ||
                     mirror == cox_group_mirror(incarnation,
                                                cox_group_arrived(present, (uint32_t)word + 1));
        }
        if (!stayed) {
            cox_group_blame(group, group->ranks[place]);
            return cox_fail(err, COX_ABORTED, "rank %d went on to another epoch while it was read",
                            group->ranks[place]);
        }
    }
    return 0;
}

/* All have arrived: checks that all are at the same operation. Every member checks all, so all get
 * the same result. */
static int round_agree(struct cox_group *group, struct cox_error *err)
{
    int r = 0;
    struct cox_error why = {0};
    for (uint32_t place = 0; place < group->count; place++) {
        uint32_t rank = group->ranks[place];
        if (place == group->self)
            continue;
        const struct cox_group_layout_part *part =
            &group->base->ranks[rank]->parts[group->slots[place]];
        /* relaxed: ordered by the arrival that was seen. */
        uint64_t what = atomic_load_explicit(&part->what[group->index & 1], memory_order_relaxed);
        if (what == group->said_what)
            continue;
        int gone = epoch_verify(group, err);
        if (gone)
            return gone;
        cox_group_blame(group, rank);
        if (what >> 40 != group->said_what >> 40)
            return cox_fail(err, COX_CORRUPT, "rank %" PRIu32 " does not say what it is at", rank);
        if ((uint8_t)what != (uint8_t)group->said_what)
            return cox_fail(err, COX_CORRUPT, "rank %" PRIu32 " is at %s, this one at %s", rank,
                            operation_name(what), operation_name(group->said_what));
        if (r == 0)
            r = cox_fail(&why, (uint8_t)what == COX_GROUP_GATHER ? COX_INVALID : COX_CORRUPT,
                         "%s: rank %" PRIu32 " says %" PRIu32 ", this one %" PRIu32,
                         (uint8_t)what == COX_GROUP_GATHER ? "bytes that every rank gives"
                                                           : operation_name(what),
                         rank, (uint32_t)(what >> 8), (uint32_t)(group->said_what >> 8));
    }
    return r ? cox_fail(err, r, "%s", why.text) : 0;
}

static int round_enter(struct cox_group *group, struct cox_error *err)
{
    if (group->dead)
        return fail_dead(group, group->dead - 1, err);
    if (atomic_load_explicit(&group->gone, memory_order_acquire) ==
        cox_group_aborted(COX_GROUP_EPOCH_NONE))
        return cox_fail(err, COX_PEER_DEAD, "a member has died: form another group");
    if (cox_group_is_over(group))
        return cox_fail(err, COX_ABORTED,
                        "an operation of epoch %" PRIu64 " has failed: align with a later one",
                        cox_group_present(group->base));
    return 0;
}

static uint8_t *value_slot(const struct cox_group *group, uint32_t place, uint32_t index)
{
    const struct cox_group_base *base = group->base;
    uint64_t offset = 0, rounded = cox_group_round_up(base->value_size, COX_GROUP_LINE_SIZE);
    uint32_t slot = group->slots[place], parity = index & 1;
    if (group->slot == 0)
        offset += parity * rounded;
    else
        offset += 2 * rounded + (2 * (slot - 1) + parity) * (uint64_t)COX_SUBGROUP_SLOT_SIZE;
    return base->values[group->ranks[place]] + offset;
}

/* What the recorder has of an operation in progress; number 0: nothing is recorded. */
struct recorded {
    uint64_t number, begin_ns;
};

static struct recorded record_begin(const struct cox_group *group,
                                    enum cox_group_operation operation, uint32_t size)
{
    struct cox_recorder *recorder = group->base->recorder;
    const struct cox_recorder_operation begun = {.kind = (uint32_t)operation,
                                                 .slot = group->slot,
                                                 .round = group->index + 1,
                                                 .size = size,
                                                 .epoch = cox_group_present(group->base)};
    struct recorded recorded = {0};
    COX_PROBE(operation__enter, operation, begun.round, size, group->slot);
    if (recorder) {
        recorded.begin_ns = cox_now_ns();
        recorded.number = cox_recorder_operation_begin(recorder, &begun, recorded.begin_ns);
    }
    return recorded;
}

static void record_arrived(const struct cox_group *group, enum cox_group_operation operation,
                           const struct recorded *recorded)
{
    COX_PROBE(operation__arrive, operation, group->index, group->slot, 0);
    if (recorded->number)
        cox_recorder_operation_arrived(group->base->recorder, recorded->number, recorded->begin_ns,
                                       cox_now_ns());
}

static void record_end(const struct cox_group *group, enum cox_group_operation operation,
                       const struct recorded *recorded, int r)
{
    COX_PROBE(operation__return, operation, group->index, group->slot, r);
    if (recorded->number)
        cox_recorder_operation_end(group->base->recorder, recorded->number, r, cox_now_ns());
}

int cox_group_round_values(struct cox_group *group, enum cox_group_operation operation,
                           uint32_t detail, const void *value, uint32_t size, uint8_t *values,
                           size_t stride, uint64_t deadline_ns, struct cox_error *err)
{
    int r = cox_deadline_check(deadline_ns, err);
    if (r == 0)
        r = round_enter(group, err);
    if (r)
        return r;
    const struct recorded recorded = record_begin(group, operation, size);
    if (size) {
        memcpy(value_slot(group, group->self, group->index + 1), value, size);
        cox_fault_point(COX_FAULT_GROUP_VALUE);
    }
    part_arrive(group, operation, detail);
    r = round_wait(group, deadline_ns, err);
    record_arrived(group, operation, &recorded);
    if (r == 0)
        r = round_agree(group, err);
    if (r == 0 && size) {
        memmove(values + group->self * stride, value, size);
        for (uint32_t place = 0; place < group->count; place++)
            if (place != group->self)
                memcpy(values + place * stride, value_slot(group, place, group->index), size);
        r = epoch_verify(group, err);
    }
    /* A death ends every epoch, also for a member that waits in a later one for a rank that stays
     * in this one. */
    if (r == COX_INVALID) /* all are in step: the error ends no epoch */
        atomic_store_explicit(&group->blamed, 0, memory_order_relaxed);
    else if (r)
        cox_group_give_up(group, r == COX_PEER_DEAD);
    record_end(group, operation, &recorded, r);
    cox_fault_point(COX_FAULT_GROUP_DONE);
    return r;
}

int cox_group_barrier(struct cox_group *group, uint64_t deadline_ns, struct cox_error *err)
{
    return cox_group_round_values(group, COX_GROUP_BARRIER, 0, NULL, 0, NULL, 0, deadline_ns, err);
}

int cox_group_gather(struct cox_group *group, const void *value, size_t size, void *values,
                     uint64_t deadline_ns, struct cox_error *err)
{
    if (!value || !values)
        return cox_fail(err, COX_INVALID, "no value, or no place for those of all");
    uint32_t size_max = group->base->value_size;
    if (size == 0 || size > size_max) {
        /* Reports it to the others. */
        struct cox_error why = {0};
        int r = cox_group_round_values(group, COX_GROUP_GATHER, size > size_max ? UINT32_MAX : 0,
                                       NULL, 0, NULL, 0, deadline_ns, &why);
        if (r && r != COX_INVALID)
            return cox_fail(err, r, "%s", why.text);
        return cox_fail(err, COX_INVALID, "a value of %zu bytes: expected 1 to %" PRIu32, size,
                        size_max);
    }
    const uint8_t *from = value;
    uint8_t *to = values;
    int r = 0;
    for (size_t done = 0, part; r == 0 && done < size; done += part) {
        part = size - done < group->slot_size ? size - done : group->slot_size;
        r = cox_group_round_values(group, COX_GROUP_GATHER, (uint32_t)size, from + done,
                                   (uint32_t)part, to + done, size, deadline_ns, err);
    }
    return r;
}
