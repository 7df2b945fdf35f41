/*
 * futex_gate: one two-way channel of a sealed group of two ranks: state words, and futexes that
 * only wake.
 *
 * gate.pml has the parts that are the same for both gates (the order of completions, seqlock, void,
 * tags). This model has the rest: the wake memory that all processes may write, with the ranks'
 * word, which idle ranks block on, the collector's word, which the collector blocks on, and a hint
 * {sequence, left} per frame. README.md lists what is left out and why; check.sh runs this file in
 * several sizes, and once more for each rule with that rule removed (the NO_ switches), which must
 * fail.
 *
 * Sizes (-D): DEPTH frames; REQUESTS; CRASHES, FAILURES (failed replies), DEADLINES (that pass),
 * MEDDLES (arbitrary writes to wake memory, and wakes), STALLS (the submitter stalls for ever
 * between `published` and its wake): each at most that many; CRASH_AT_WAKE: a rank dies only
 * between its hint and its wake; SUBSETS: also requests to one rank only; HANG: that request asks
 * rank 1 alone, which hangs in it until nothing else is in flight; later requests ask rank 0 alone;
 * FAIL_HANG: in that request rank 0 fails, and rank 1 hangs until it has ended; STOP: the group is
 * stopped at any moment; LEAVE: rank 1 gets a stop at any moment; SLICE: a waiter checks again
 * after a while; SLICE_QUIET: only when no other process can make a step, and no more often than
 * there were faults.
 *
 * RESTARTS: only rank 1 dies, and is started again in new memory, at most that often, while
 * submitters continue; LATES: that many times its old process, which was taken for dead, still
 * replies to a request. ELIDE: a sleeper counts itself beside the word, and submitters and replying
 * ranks wake only if the count is not 0.
 */
#ifndef DEPTH
#define DEPTH 1
#endif
#ifndef REQUESTS
#define REQUESTS 2
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef FAILURES
#define FAILURES 0
#endif
#ifndef DEADLINES
#define DEADLINES 0
#endif
#ifndef MEDDLES
#define MEDDLES 0
#endif
#ifndef STALLS
#define STALLS 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef LATES
#define LATES 0
#endif
#if RESTARTS > 0
#define SUBSETS
#endif

#define TORN 255 /* bytes that are being written */
#define HAS(set, r) (((set) >> (r)) & 1)

/* ---- coordinator's memory: ranks only read it. Of a futex word only one thing matters: whether it
 * is still what the sleeper read. That is kept here, one bit per reader, as if words never wrapped
 * between two reads ---- */
byte published;
byte record_sequence[DEPTH], record_asked[DEPTH];
byte frame[DEPTH]; /* a sequence number stands for the request's bytes */

/* ---- one memory per rank: the coordinator and the other ranks only read it ---- */
byte taken[2], returned[2], done[2];
byte slot[2 * DEPTH];
bool slot_failed[2 * DEPTH];

/* ---- wake memory: written by all processes ---- */
bool ranks_word_moved[2];
bool collector_word_moved;
#ifdef ELIDE
byte ranks_counted, collector_counted; /* counted sleepers */
#endif
byte hint_sequence[DEPTH], hint_left[DEPTH]; /* one word: read and changed in one step */

/* ---- threads in FUTEX_WAIT ---- */
bool rank_sleeps[2], collector_sleeps;
#if RESTARTS > 0
bool await_moved, await_sleeps; /* restart_await reads and blocks on the same word */
#define COLLECTOR_WORD_MOVE d_step { collector_word_moved = true; await_moved = true; }
#define COLLECTOR_WAKE d_step { collector_sleeps = false; await_sleeps = false; }
#else
#define COLLECTOR_WORD_MOVE collector_word_moved = true
#define COLLECTOR_WAKE collector_sleeps = false
#endif
#if RESTARTS > 0
#define RANKS_WORD_MOVE ranks_word_moved[1] = true
#define RANKS_WAKE rank_sleeps[1] = false
#else
#define RANKS_WORD_MOVE ranks_word_moved[0] = true; ranks_word_moved[1] = true
#define RANKS_WAKE rank_sleeps[0] = false; rank_sleeps[1] = false
#endif

/* ---- word_wake, word_sleep: stores the word, then reads the count, then wakes ---- */
#ifdef ELIDE
/* A count that is too high costs calls. A count below 0, after another process overwrote it, is
 * corrected: otherwise no sleeper would be counted any more. */
#define BELOW(n) ((n) > 127)
#if MEDDLES == 0
#define COUNT_LESS(counts, sleepers) counts--
#define COUNT_RIGHT(counts, sleepers) skip
#else
byte ranks_sleepers, collector_sleepers; /* in truth */
#define COUNT_LESS(counts, sleepers) puts_right = counts == 0 || PUTS_RIGHT_BELOW(counts); counts--
#define COUNT_RIGHT(counts, sleepers)                                                              \
    counts = counts + puts_right;                                                                  \
    puts_right = false;                                                                            \
    sleepers--;                                                                                    \
    assert(sleepers > 0 || !BELOW(counts))
#endif
#ifdef PUTS_RIGHT_ONCE
#define PUTS_RIGHT_BELOW(n) false
#else
#define PUTS_RIGHT_BELOW(n) BELOW(n)
#endif
#ifdef COUNT_AFTER_CHECK
#define COUNT_FIRST(counts, sleepers) skip
#define COUNT_LAST(counts, sleepers) counts++
#elif MEDDLES == 0
#define COUNT_FIRST(counts, sleepers) counts++
#else
#define COUNT_FIRST(counts, sleepers) atomic { counts++; sleepers++; }
#endif
#define COLLECTOR_AWAKE awake
#define RANK_AWAKE awake
#define AWAIT_AWAKE awake
#else
#define COLLECTOR_AWAKE round
#define RANK_AWAKE top
#define AWAIT_AWAKE look
#endif
inline reply_wake()
{
#ifndef ELIDE
    COLLECTOR_WORD_MOVE;
    COLLECTOR_WAKE;
#elif defined(CHECK_FIRST)
    if
    :: collector_counted > 0 -> COLLECTOR_WORD_MOVE; COLLECTOR_WAKE;
    :: collector_counted == 0 -> COLLECTOR_WORD_MOVE;
    fi
#else
    COLLECTOR_WORD_MOVE;
    if
    :: collector_counted > 0 -> COLLECTOR_WAKE;
    :: collector_counted == 0
    fi
#endif
}

/* ---- the coordinator's private half ---- */
byte entry_sequence[DEPTH], entry_asked[DEPTH], entry_consumed[DEPTH];
bool entry_failed[DEPTH], entry_ended[DEPTH];
byte ended; /* every request up to here */
bool submit_lock, stopping;
bool dead[2]; /* the supervisor has seen it */

/* ---- processes of ranks ---- */
bool killed[2];  /* makes no more steps */
bool leaving[2]; /* its own flag: it must stop */
bool at_wake[2]; /* has changed the hint, and has not woken the collector yet */

/* ---- rank 1's incarnations ---- */
#if RESTARTS > 0
byte incarnation = 1;      /* the one whose replies the collector accepts */
byte line_incarnation = 1; /* as the process wrote it in its lines */
bool detached;            /* requests may not ask it */
bool gone;                /* its process has made its last step */
bool told;                /* the wakeups for its death are done */
bool born;                /* a process was forked and has read nothing yet */
bool attached;
bool restarting; /* a restart is in progress */
byte restarts = RESTARTS;
byte record_incarnation[DEPTH], slot_incarnation[DEPTH]; /* which incarnation was asked, and which replied */
byte lates = LATES, late_next, miscounted;
#define DETACHED detached
#define RESTARTING restarting
#else
#define DETACHED false
#define RESTARTING false
#endif

/* ---- faults that may still happen, and variables of the properties ---- */
byte crashes = CRASHES, failures = FAILURES, deadlines = DEADLINES, meddles = MEDDLES, stalls = STALLS;
byte completed;
bool sent;              /* all requests are submitted */
bool claims, publishes; /* where the submitter is */
bool reports;           /* a process is between a death, or stop, and its wake of the collector */
byte slices;
#if LATES > 0
#define WENT_WRONG (CRASHES - crashes + miscounted)
#else
#define WENT_WRONG (CRASHES - crashes + MEDDLES - meddles + STALLS - stalls)
#endif

/* ---- submit ---- */

#define NEXT ((published + 1) % DEPTH)
#define HOLDS(i, r)                                                                                \
    (entry_sequence[i] > 0 && HAS(entry_asked[i], r) && returned[r] < entry_sequence[i] && !dead[r])
#define IN_FLIGHT(i) (entry_sequence[i] > 0 && !entry_ended[i])
#ifdef NO_RETURNED_RULE
#define READ(i) false
#else
#define READ(i) (HOLDS(i, 0) || HOLDS(i, 1))
#endif
#define DEAD_ASKED ((HAS(asked, 0) && dead[0]) || (HAS(asked, 1) && (dead[1] || DETACHED)))

#define STORE_HINT                                                                                 \
    hint_sequence[i] = sequence;                                                                   \
    hint_left[i] = (asked == 3 -> 2 : 1)

proctype submitter()
{
    byte n = 0, sequence = 0, i = 0, asked = 0;
    do
    :: n < REQUESTS ->
        atomic {
            n++;
            claims = true;
            if
#ifdef HANG
            :: n == HANG -> asked = 2;
            :: n > HANG -> asked = 1;
            :: n < HANG -> asked = 3;
#else
            :: asked = 3;
#ifdef SUBSETS
            :: asked = 1;
            :: asked = 2;
#endif
#endif
            fi;
        }
        /* Refused for now: tries again later. A rank that is late with a reply blocks no claim of a
         * frame that was returned. */
        if
        :: atomic { !submit_lock && (stopping || DEAD_ASKED) -> claims = false; sequence = 0; }
        :: atomic {
            !submit_lock && !stopping && !DEAD_ASKED && !IN_FLIGHT(NEXT) && !READ(NEXT) ->
            claims = false;
            publishes = true;
            submit_lock = true;
            sequence = published + 1;
            i = sequence % DEPTH;
           }
        fi;
        if
        :: sequence == 0
        :: else ->
            atomic {
#ifndef NO_HINT_FIRST
                STORE_HINT;
#endif
                frame[i] = TORN;
                record_sequence[i] = 0;
            }
            d_step {
                frame[i] = sequence;
                record_asked[i] = asked;
                record_sequence[i] = sequence;
                entry_sequence[i] = sequence;
                entry_asked[i] = asked;
                entry_consumed[i] = 0;
                entry_failed[i] = false;
                entry_ended[i] = false;
#if RESTARTS > 0
                record_incarnation[i] = incarnation;
#endif
                published = sequence;
                sent = n == REQUESTS;
            }
#ifdef NO_HINT_FIRST
            atomic { STORE_HINT; }
#endif
            if
            :: atomic { stalls > 0 -> stalls--; submit_lock = false; publishes = false; sent = true; goto stands; }
            :: true
            fi;
#ifdef RANKS_WORD_AFTER_WAKE
            atomic { RANKS_WAKE; }
            atomic { RANKS_WORD_MOVE; submit_lock = false; }
#elif !defined(ELIDE)
            atomic { RANKS_WORD_MOVE; }
            atomic { RANKS_WAKE; submit_lock = false; }
#elif defined(CHECK_FIRST)
            if
            :: ranks_counted > 0 ->
                atomic { RANKS_WORD_MOVE; }
                atomic { RANKS_WAKE; submit_lock = false; }
            :: ranks_counted == 0 -> atomic { RANKS_WORD_MOVE; submit_lock = false; }
            fi;
#else
            atomic { RANKS_WORD_MOVE; }
            if
            :: ranks_counted > 0 -> atomic { RANKS_WAKE; submit_lock = false; }
            :: atomic { ranks_counted == 0 -> submit_lock = false; }
            fi;
#endif
            atomic { publishes = false; sequence = 0; i = 0; asked = 0; }
        fi
    :: else -> break
    od;
    sent = true;
stands:
    /* Every request ends, each once. */
    atomic { ended == published -> assert(completed == published); }
}

/* ---- collect ---- */

#ifdef NO_SEQUENCE
#define REPLIED(i, r) (done[r] > 0)
#else
#define REPLIED(i, r) (done[r] >= entry_sequence[i])
#endif
#define IS_OUTSTANDING(i, r) (HAS(entry_asked[i], r) && !HAS(entry_consumed[i], r))
#define ANY_OUTSTANDING(i) (IS_OUTSTANDING(i, 0) || IS_OUTSTANDING(i, 1))

/* Reads dead first, then the reply: two steps, and anything may happen in between. */
#if CRASHES > 0 || defined(LEAVE)
#define SCAN_RANK(r) before = IS_OUTSTANDING(i, r) && dead[r];
#else
#define SCAN_RANK(r)
#endif
inline take(r)
{
    d_step {
        if
        :: IS_OUTSTANDING(i, r) && REPLIED(i, r) ->
#if RESTARTS > 0
            if
            :: r == 1 && line_incarnation != incarnation ->
                assert(lates < LATES); /* COX_CORRUPT only if a rank is late */
                entry_failed[i] = true;
            :: else ->
                assert(r == 0 || slot_incarnation[i] == record_incarnation[i]); /* of the process that was asked */
#endif
                assert(slot[r * DEPTH + i] == sequence); /* the reply to this request, and complete */
                entry_failed[i] = entry_failed[i] || slot_failed[r * DEPTH + i];
#if RESTARTS > 0
            fi;
#endif
            entry_consumed[i] = entry_consumed[i] | (1 << r);
        :: IS_OUTSTANDING(i, r) && !REPLIED(i, r) && before ->
            assert(done[r] < sequence); /* a reply that was complete before the death counts */
            entry_failed[i] = true;
        :: else
        fi;
        before = false;
    }
}

#ifdef NO_REWAKE
#define WOULD_REWAKE(i, r) false
#else
#define WOULD_REWAKE(i, r) (IS_OUTSTANDING(i, r) && taken[r] < entry_sequence[i] && rank_sleeps[r])
#endif
#ifdef NO_FULL_SCAN
#define WITHIN(i) (entry_sequence[i] == ended + 1)
#else
#define WITHIN(i) (entry_sequence[i] > ended)
#endif

/* What a slice would find. One that finds nothing new changes nothing but time, and is left out:
 * then no run is endless, and a request that does not end is a deadlock. */
#define NEWS(i, r) (IS_OUTSTANDING(i, r) && (REPLIED(i, r) || dead[r]))
#define SCANNED(i)                                                                                  \
    (WITHIN(i) && !entry_ended[i] &&                                                               \
     (NEWS(i, 0) || NEWS(i, 1) || WOULD_REWAKE(i, 0) || WOULD_REWAKE(i, 1)))
#if DEPTH == 1
#define SLICE_HELPS (SCANNED(0) || stopping)
#else
#define SLICE_HELPS (SCANNED(0) || SCANNED(1) || stopping)
#endif
#ifdef SLICE_QUIET
#define SLICE
#if RESTARTS > 0
#define QUIET(r) ((r) == 0 -> done[0] == published : rank_sleeps[r] || dead[r])
#else
#define QUIET(r) (rank_sleeps[r] || dead[r])
#endif
#define SLICE_PASSES                                                                               \
    (SLICE_HELPS && collector_sleeps && QUIET(0) && QUIET(1) && !reports && !publishes && !RESTARTING && \
     (sent || (claims && (IN_FLIGHT(NEXT) || READ(NEXT)))))
#define COUNT_SLICE slices++; assert(slices <= WENT_WRONG)
#else
#define SLICE_PASSES SLICE_HELPS
#define COUNT_SLICE skip
#endif

proctype collector()
{
    byte sequence = 0, i = 0, passed = 0;
    bool before = false, rewake = false;
#if MEDDLES > 0 && defined(ELIDE)
    bool puts_right = false;
#endif
end_idle:
    do
    :: atomic {
        /* The condition variable `work`: nothing is pending, no timeout. */
        ended < published;
round:
#ifndef NO_WORD_FIRST
        collector_word_moved = false; /* the word is read, then everything is scanned */
#endif
        sequence = ended + 1;
       }
        do
        :: atomic { sequence <= published && entry_ended[sequence % DEPTH] -> sequence++; }
        :: atomic { sequence <= published && !entry_ended[sequence % DEPTH] -> i = sequence % DEPTH; }
            SCAN_RANK(0)
            atomic { take(0); }
            SCAN_RANK(1)
            atomic {
                take(1);
                if
                :: !ANY_OUTSTANDING(i) || entry_failed[i] || stopping || HAS(passed, i) -> goto ends;
                :: ANY_OUTSTANDING(i) && deadlines > 0 && !(entry_failed[i] || stopping || HAS(passed, i)) -> deadlines--; goto ends;
                :: ANY_OUTSTANDING(i) && !(entry_failed[i] || stopping || HAS(passed, i))
                fi;
                if
                :: rewake && (WOULD_REWAKE(i, 0) || WOULD_REWAKE(i, 1)) -> d_step { RANKS_WORD_MOVE; RANKS_WAKE; }
                :: else
                fi;
                sequence++;
#ifdef NO_FULL_SCAN
                sequence = published + 1;
#endif
                i = 0;
            }
        :: atomic { sequence > published -> sequence = 0; i = 0; passed = 0; rewake = false; break }
        od;
        /* FUTEX_WAIT: blocks only if the word is what was read. */
#ifdef NO_WORD_FIRST
        collector_word_moved = false;
#endif
#ifdef ELIDE
        COUNT_FIRST(collector_counted, collector_sleepers);
#endif
        if
        :: atomic { collector_word_moved -> goto COLLECTOR_AWAKE; }
        :: atomic { !collector_word_moved -> collector_sleeps = true; }
        fi;
#if defined(ELIDE) && defined(COUNT_AFTER_CHECK)
        COUNT_LAST(collector_counted, collector_sleepers);
#endif
        if
        :: atomic { !collector_sleeps -> goto COLLECTOR_AWAKE; }
#if defined(SLICE) || defined(SLICE_QUIET)
        :: atomic { SLICE_PASSES -> collector_sleeps = false; COUNT_SLICE; rewake = true; goto COLLECTOR_AWAKE; }
#endif
        :: atomic { deadlines > 0 && IN_FLIGHT(0) -> collector_sleeps = false; deadlines--; passed = 1; goto COLLECTOR_AWAKE; }
#if DEPTH > 1
        :: atomic { deadlines > 0 && IN_FLIGHT(1) -> collector_sleeps = false; deadlines--; passed = 2; goto COLLECTOR_AWAKE; }
#endif
        fi;
#ifdef ELIDE
awake:  atomic { COUNT_LESS(collector_counted, collector_sleepers); }
        atomic { COUNT_RIGHT(collector_counted, collector_sleepers); goto round; }
#endif
ends:   atomic {
            /* One completion each; it may leave the flight before its handler runs. */
            assert(!entry_ended[i] && entry_sequence[i] == sequence && sequence > ended);
            completed++;
            assert(completed <= published);
            entry_ended[i] = true;
            do
            :: ended < published && entry_ended[(ended + 1) % DEPTH] -> ended++;
            :: else -> break
            od;
            sequence = 0;
            i = 0;
            passed = 0;
            rewake = false;
            if
            :: ended < published -> goto round;
            :: else -> goto end_idle;
            fi
        }
    od
}

/* ---- a rank ---- */

#ifdef HANG
#define HANGS (next == HANG && r == 1)
#define HANGS_UNTIL (sent && completed + 1 == published)
#elif defined(FAIL_HANG)
#define HANGS (next == FAIL_HANG && r == 1)
#define HANGS_UNTIL (ended >= FAIL_HANG)
#endif

#ifdef NO_HINT_SEQUENCE
#define COUNTS true
#else
#define COUNTS (hint_sequence[i] == next)
#endif

proctype rank(byte r)
{
    byte next = 1, i = 0, left = 0;
    bool fails = false;
#if MEDDLES > 0 && defined(ELIDE)
    bool puts_right = false;
#endif
#if RESTARTS > 0
    byte own_incarnation = 1;
#endif
begin:
    {
#if RESTARTS > 0
        /* cox_worker_claim and after it, but for the first, which is there from the beginning. */
        if
        :: atomic { !born }
        :: atomic { born -> born = false; own_incarnation = incarnation; }
            line_incarnation = own_incarnation;
            next = taken[r] + 1;
            attached = true; /* cox_worker_announce */
            COLLECTOR_WORD_MOVE;
            COLLECTOR_WAKE;
        fi;
#endif
        do
        ::
#ifndef NO_RANKS_WORD_FIRST
top:        ranks_word_moved[r] = false; /* the word is read, then the state that it announces */
#else
top:        skip;
#endif
#ifdef LEAVE
            if
            :: atomic { leaving[r] -> killed[r] = true; } /* the channel thread ends, and its process */
            :: !leaving[r]
            fi;
#endif
            if
            :: atomic { published < next }
#ifdef NO_RANKS_WORD_FIRST
                ranks_word_moved[r] = false;
#endif
                /* FUTEX_WAIT: nothing is pending, no timeout. */
#ifdef ELIDE
                COUNT_FIRST(ranks_counted, ranks_sleepers);
#endif
                if
                :: atomic { ranks_word_moved[r] -> goto RANK_AWAKE; }
                :: atomic { !ranks_word_moved[r] -> rank_sleeps[r] = true; }
                fi;
#if defined(ELIDE) && defined(COUNT_AFTER_CHECK)
                COUNT_LAST(ranks_counted, ranks_sleepers);
#endif
end_idle:       atomic { !rank_sleeps[r] -> goto RANK_AWAKE; }
#ifdef ELIDE
awake:          atomic { COUNT_LESS(ranks_counted, ranks_sleepers); }
                atomic { COUNT_RIGHT(ranks_counted, ranks_sleepers); goto top; }
#endif
            :: atomic {
                published >= next ->
                i = next % DEPTH;
                if
                :: record_sequence[i] != next || !HAS(record_asked[i], r) ->
                    taken[r] = next;
                    returned[r] = next;
                    done[r] = next;
                    goto served;
                :: else ->
#if RESTARTS > 0
                    assert(record_incarnation[i] == own_incarnation); /* no process begins a request to its predecessor */
                    line_incarnation = own_incarnation;
#endif
                    taken[r] = next;
                fi
               }
            fi;
            /* The bytes are this request's from the first to the last. */
            assert(frame[i] == next);
            atomic {
                assert(frame[i] == next);
                returned[r] = next;
                if
                :: failures > 0 -> failures--; fails = true;
                :: fails = false;
                fi;
#ifdef FAIL_HANG
                fails = next == FAIL_HANG && r == 0;
#endif
                slot[r * DEPTH + i] = TORN;
            }
#ifdef HANGS
            if
            :: !HANGS
            :: HANGS && HANGS_UNTIL
            fi;
#endif
            d_step {
                slot[r * DEPTH + i] = next;
                slot_failed[r * DEPTH + i] = fails;
#if RESTARTS > 0
                slot_incarnation[i] = own_incarnation;
#endif
            }
#ifdef DONE_AFTER_HINT
            skip;
#else
            done[r] = next;
#endif
            /* The exchange succeeds, or the hint has another request's sequence, or its count is 0. */
            if
            :: atomic { !COUNTS || hint_left[i] == 0 -> left = 1; }
            :: atomic {
                COUNTS && hint_left[i] > 0 ->
                assert(entry_sequence[i] == next || meddles < MEDDLES); /* a late reply counts for no later request */
                left = hint_left[i] - 1;
#ifndef NO_SWAP
                hint_left[i] = left;
#endif
               }
#ifdef NO_SWAP
                hint_left[i] = left;
#endif
            fi;
#ifdef DONE_AFTER_HINT
            done[r] = next;
#endif
#ifdef NO_FAILURE_WAKE
            fails = false;
#endif
            if
            :: atomic { left > 0 && !fails -> goto served; }
            :: atomic { left == 0 || fails -> at_wake[r] = true; }
#ifdef WORD_AFTER_WAKE
                COLLECTOR_WAKE;
                COLLECTOR_WORD_MOVE;
#else
                reply_wake();
#endif
            fi;
served:     atomic { at_wake[r] = false; next++; left = 0; i = 0; fails = false; goto top; }
        od
    } unless {
        atomic {
            killed[r] ->
#if RESTARTS > 0
            born = false;
            gone = true;
#if LATES > 0
            late_next = (late_next == 0 -> next + at_wake[r] : late_next);
#endif
#endif
            next = 0;
            i = 0;
            left = 0;
            fails = false;
            rank_sleeps[r] = false;
            at_wake[r] = false;
        }
    }
#if RESTARTS > 0
end_dead:
    atomic { born -> goto begin; }
#endif
}

#if RESTARTS > 0
/* Rank 0: only its replies matter. */
proctype quick()
{
    byte next = 1, i = 0;
end_idle:
    do
    :: atomic {
        published >= next ->
        i = next % DEPTH;
        taken[0] = next;
        returned[0] = next;
        done[0] = next;
        if
        :: record_sequence[i] == next && HAS(record_asked[i], 0) ->
            slot[i] = next;
            if
            :: hint_sequence[i] == next && hint_left[i] > 0 ->
                hint_left[i] = hint_left[i] - 1;
                if
                :: hint_left[i] == 0 -> reply_wake();
                :: else
                fi
            :: else
            fi
        :: else
        fi;
        next++;
        i = 0;
       }
    od
}

/* ---- restart.c ---- */

#define ASKS(i) (IN_FLIGHT(i) && HAS(entry_asked[i], 1))
#if DEPTH == 1
#define ANY_ASKS ASKS(0)
#else
#define ANY_ASKS (ASKS(0) || ASKS(1))
#endif
/* The lines of zeroed memory; no request reads its slots. */
#define ZERO taken[1] = 0; returned[1] = 0; done[1] = 0; line_incarnation = 0

proctype restarter()
{
end_watch:
    do
    :: atomic { restarts > 0 && dead[1] && told -> restarts--; }
        /* cox_collector_detach */
#ifdef NO_DETACH_LOCK
        detached = true;
#else
        atomic { !submit_lock -> detached = true; }
#endif
#ifdef NO_DETACH_WAIT
        restarting = true;
#else
        atomic { !ANY_ASKS -> restarting = true; }
#endif
        /* cox_sealed_renew_rank, cox_collector_reset_rank */
        d_step { ZERO; }
        d_step {
            incarnation++;
#ifndef NO_LINE_RESET
            taken[1] = published;
            returned[1] = published;
            done[1] = published;
#endif
            attached = false;
        }
        /* cox_supervisor_relaunch */
        atomic { told = false; born = true; killed[1] = false; }
        dead[1] = false;
        /* restart_await */
look:
#ifndef NO_WAKE_SEQUENCE_FIRST
        await_moved = false;
#endif
        if
        :: atomic { attached || dead[1] || stopping -> goto admit; }
        :: atomic { !(attached || dead[1] || stopping) }
        fi;
#ifdef NO_WAKE_SEQUENCE_FIRST
        await_moved = false;
#endif
#ifdef ELIDE
        COUNT_FIRST(collector_counted, collector_sleepers);
#endif
        if
        :: atomic { await_moved -> goto AWAIT_AWAKE; }
        :: atomic { !await_moved -> await_sleeps = true; }
        fi;
#if defined(ELIDE) && defined(COUNT_AFTER_CHECK)
        COUNT_LAST(collector_counted, collector_sleepers);
#endif
        if
        :: atomic { !await_sleeps -> goto AWAIT_AWAKE; }
        :: atomic { dead[1] || stopping -> await_sleeps = false; goto AWAIT_AWAKE; } /* a slice */
        fi;
#ifdef ELIDE
awake:  atomic { COUNT_LESS(collector_counted, collector_sleepers); }
        atomic { COUNT_RIGHT(collector_counted, collector_sleepers); goto look; }
#endif
admit:  atomic { detached = false; restarting = false; }
    od
}

/* An old process of rank 1 that continues in the memory that it has mapped. It shares only wake
 * memory with its successor. */
proctype late()
{
    byte next = 0, i = 0, left = 0;
end_idle:
    do
    :: atomic { lates > 0 && late_next > 0 && restarts < RESTARTS && published >= late_next -> next = late_next; i = next % DEPTH; }
        if
        :: atomic { record_sequence[i] != next || !HAS(record_asked[i], 1) -> late_next++; }
        :: atomic {
            record_sequence[i] == next && HAS(record_asked[i], 1) ->
            lates--;
            late_next++;
#ifdef NO_MEMORY_RENEWED
            line_incarnation = 1;
            slot[DEPTH + i] = next;
            slot_incarnation[i] = 1;
           }
            done[1] = next;
            atomic {
#endif
            if
            :: hint_sequence[i] == next && hint_left[i] > 0 ->
                miscounted = miscounted + (record_incarnation[i] != 1);
                hint_left[i] = hint_left[i] - 1;
                left = hint_left[i];
            :: else -> left = 1;
            fi
           }
            if
            :: atomic { left > 0 }
            :: atomic { left == 0 }
                reply_wake();
            fi
        fi;
        atomic { next = 0; i = 0; left = 0; }
    od
}
#endif

/* ---- other wakers of the collector: the supervisor, stop ---- */

#ifdef CRASH_AT_WAKE
#define MAY_DIE(r) at_wake[r]
#else
#define MAY_DIE(r) true
#endif

inline report()
{
#ifdef NO_DEATH_WAKE
    reports = false;
#else
    COLLECTOR_WORD_MOVE;
    atomic { COLLECTOR_WAKE; reports = false; }
#endif
}

proctype supervisor()
{
end_watch:
    do
#if RESTARTS > 0
    :: atomic { crashes > 0 && !killed[1] && MAY_DIE(1) -> crashes--; killed[1] = true; reports = true; }
    :: atomic { gone && !dead[1] -> gone = false; reports = true; dead[1] = true; }
        report()
        told = true;
#else
    :: atomic { crashes > 0 && !killed[0] && MAY_DIE(0) -> crashes--; killed[0] = true; reports = true; }
    :: atomic { crashes > 0 && !killed[1] && MAY_DIE(1) -> crashes--; killed[1] = true; reports = true; }
    :: atomic { killed[0] && !dead[0] -> reports = true; dead[0] = true; }
        report()
    :: atomic { killed[1] && !dead[1] -> reports = true; dead[1] = true; }
        report()
#endif
    od
}

proctype stopper()
{
    /* No claim is between its read of `stopping` and its publish. */
    atomic { !submit_lock -> stopping = true; reports = true; }
    report()
}

/* Rank 1's own process stops it, which cannot change the word that its channel thread blocks on. A
 * wake without a sleeper is left out. */
proctype leaver()
{
    leaving[1] = true;
#ifdef NO_REPEATED_WAKE
    rank_sleeps[1] = false;
    killed[1];
#else
    do
    :: atomic { killed[1] -> break }
    :: atomic { rank_sleeps[1] -> RANKS_WAKE; }
    od
#endif
}

/* ---- a process that corrupts wake memory ---- */

proctype meddler()
{
    byte i = 0, sequence = 0, left = 0;
end_idle:
    do
    :: atomic {
        meddles > 0 ->
        meddles--;
        select(i : 0 .. DEPTH - 1);
        select(sequence : 0 .. REQUESTS);
        select(left : 0 .. 2);
        hint_sequence[i] = sequence;
        hint_left[i] = left;
        i = 0;
        sequence = 0;
        left = 0;
       }
    :: atomic { meddles > 0 && collector_word_moved -> meddles--; collector_word_moved = false; }
    :: atomic { meddles > 0 && !collector_word_moved -> meddles--; COLLECTOR_WORD_MOVE; }
    :: atomic { meddles > 0 && (ranks_word_moved[0] || ranks_word_moved[1]) -> meddles--; ranks_word_moved[0] = false; ranks_word_moved[1] = false; }
    :: atomic { meddles > 0 && !(ranks_word_moved[0] && ranks_word_moved[1]) -> meddles--; RANKS_WORD_MOVE; }
#ifdef ELIDE
    :: atomic { meddles > 0 && ranks_counted > 0 -> meddles--; ranks_counted = 0; }
    :: atomic { meddles > 0 && collector_counted > 0 -> meddles--; collector_counted = 0; }
#endif
    :: atomic { meddles > 0 && collector_sleeps -> meddles--; COLLECTOR_WAKE; }
    :: atomic { meddles > 0 && (rank_sleeps[0] || rank_sleeps[1]) -> meddles--; RANKS_WAKE; }
    od
}

init {
    atomic {
        run submitter();
        run collector();
#if RESTARTS > 0
        run quick();
#else
        run rank(0);
#endif
        run rank(1);
#if RESTARTS > 0
        run restarter();
#endif
#if LATES > 0
        run late();
#endif
#if CRASHES > 0 || defined(LEAVE)
        run supervisor();
#endif
#ifdef STOP
        run stopper();
#endif
#ifdef LEAVE
        run leaver();
#endif
#if MEDDLES > 0
        run meddler();
#endif
    }
}
