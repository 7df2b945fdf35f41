/*
 * gate: one two-way channel of a group of two ranks, as channel/, coordinator/collector/collector.c
 * and pass.c, and worker/loop/worker.c implement it.
 *
 * State words carry the events, semaphores only wake. README.md lists what is left out and why;
 * check.sh runs this file in several sizes, and once more for each rule with that rule removed (the
 * NO_ switches), which must fail.
 *
 * Sizes (-D): DEPTH frames; REQUESTS; CRASHES, FAILURES (failed replies), DEADLINES (that pass),
 * LOSSES and SPURS (tokens that vanish or appear), STALLS (wakers that stop half-way): each at most
 * that many; SLICE: a waiter checks again after a while; NO_REPLY_TOO: requests without a reply as
 * well; SUBSETS: also requests to one rank only; HANG: rank 1 hangs in that request until nothing
 * else is in flight, and gets no later request (with NO_REPLY_TOO the earlier ones have no reply);
 *
 * STOP: the group is stopped at any moment; WILD: a rank once stores `done` too early. FAIR and
 * SLICE_ALWAYS: below.
 *
 * RESTARTS: only rank 1 dies, and is started again, at most that often, while submitters continue;
 * rank 0 serves in one step; STRAYS: a process of an earlier incarnation attaches in place of the
 * new one. Not with SLICE.
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
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef SPURS
#define SPURS 0
#endif
#ifndef STALLS
#define STALLS 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef STRAYS
#define STRAYS 0
#endif
#if RESTARTS > 0
#define SUBSETS
#endif
/* A rank may find its frame overwritten by requests to other ranks. */
#if defined(SUBSETS) || defined(HANG)
#define LAPS
#endif

#define TORN 255    /* bytes that are being written */
#ifndef TOKENS_MAX
#define TOKENS_MAX 6 /* a full semaphore: posting to it is no error */
#endif
#define HAS(set, r) (((set) >> (r)) & 1)
#define POST(tokens) tokens = (tokens < TOKENS_MAX -> tokens + 1 : tokens)
#if RESTARTS > 0
/* Rank 0 does not sleep. */
#define WAKE_RANK(r) request_tokens[r] = ((r) == 1 && request_tokens[r] < TOKENS_MAX -> request_tokens[r] + 1 : request_tokens[r])
#else
/* A dead process has no waiting thread. */
#define WAKE_RANK(r) request_tokens[r] = (request_tokens[r] < TOKENS_MAX && !killed[r] -> request_tokens[r] + 1 : request_tokens[r])
#endif

/* ---- control region: written by the coordinator ---- */
byte published, void_through;
byte record_sequence[DEPTH], record_asked[DEPTH];
/* ---- control region: one line per rank ---- */
byte taken[2], returned[2], done[2], tag[2 * DEPTH];
/* ---- the request and response regions: a sequence number stands for the bytes ---- */
byte frame[DEPTH];
bool frame_replies[DEPTH];
byte slot[2 * DEPTH];
bool slot_failed[2 * DEPTH];

/* ---- the semaphores that threads block on. gate.c counts `taken` and `due`; absorb uses only due
 * - taken, and treats all values below -1 alike: due_tokens is that difference plus one, at least 0
 * ---- */
byte request_tokens[2], request_due[2] = 1;
byte response_tokens[2], response_due[2] = 1;

/* ---- the collector's private half ---- */
bool submit_lock, lock;
byte entry_sequence[DEPTH], entry_asked[DEPTH], entry_consumed[DEPTH];
bool entry_replies[DEPTH], entry_ended[DEPTH];
byte ended;    /* every request up to here */
byte sleeping; /* rank + 1 */
bool stopping;
bool causes; /* differ from the causes that the collector has seen */
#ifdef SLICE_ALWAYS
bool due, claim_due; /* a slice has passed since the collector, since a refused claim sent a rewake */
bool claims, publishes; /* where the submitter is */
#endif

/* ---- processes of ranks ---- */
bool killed[2]; /* makes no more steps */
bool dead[2];   /* and the supervisor has seen it */
byte notices;   /* reports on the error channel */

/* ---- rank 1's incarnations ---- */
#if RESTARTS > 0
byte incarnation = 1;  /* the one whose replies the collector accepts */
byte line_incarnation = 1; /* as the process wrote it in its lines */
bool detached;        /* requests may not ask it */
bool told;            /* the wakeups for its death are done */
bool gone;            /* its process has made its last step */
bool born;            /* a process was forked and has read nothing yet */
byte identity;        /* the incarnation of the attached process; 0: none */
byte restarts = RESTARTS, strays = STRAYS;
byte record_incarnation[DEPTH], slot_incarnation[DEPTH]; /* which incarnation was asked, and which replied */
#define DETACHED(r) ((r) == 1 && detached)
#ifdef NO_INCARNATION
#define OF_THIS_LIFE(r) true
#else
#define OF_THIS_LIFE(r) ((r) == 0 || line_incarnation == incarnation)
#endif
#else
#define DETACHED(r) false
#define OF_THIS_LIFE(r) true
#endif

/* ---- faults that may still happen, and variables of the properties ---- */
byte crashes = CRASHES, failures = FAILURES, deadlines = DEADLINES, losses = LOSSES, spurs = SPURS, stalls = STALLS;
byte failed_through;            /* published before a failed step's completion was handed over */
byte accepted, completed;       /* requests with a reply */
bool sent;                      /* all requests are submitted */
bool wild_used;
bool finished;                  /* everything submitted has ended */

/* What cox_gate_wait counts after its token. */
#define COUNT(due_tokens) due_tokens = (due_tokens > 0 -> due_tokens - 1 : 0)

/* cox_gate_absorb: the shared state showed the event of one token. One step: between its exchange
 * and its last take a token can only arrive, and taking it now or later is the same. */
#define ABSORB(tokens, due_tokens, r)                                                                      \
    if                                                                                             \
    :: due_tokens[r] > tokens[r] -> due_tokens[r] = due_tokens[r] - tokens[r] + 1; tokens[r] = 0;                          \
    :: else -> tokens[r] = tokens[r] - due_tokens[r]; due_tokens[r] = 1;                                           \
    fi

/* cox_collector_wake: the cause was stored and counted; `sleeping` is read, then that semaphore is
 * posted, unless the thread stalls from here on. */
inline wake(who)
{
    who = sleeping;
    atomic {
        if
        :: stalls > 0 && who > 0 -> stalls--;
        :: who > 0 -> POST(response_tokens[who - 1]);
        :: who == 0
        fi;
        who = 0;
    }
}

#define PENDING_LATE(i, r)                                                                            \
    (entry_sequence[i] > 0 && entry_ended[i] && entry_replies[i] && HAS(entry_asked[i], r) &&      \
     !HAS(entry_consumed[i], r))
#define LATE(i, r) (PENDING_LATE(i, r) && done[r] < entry_sequence[i] && !dead[r])
#define DROPPABLE(i, r) (PENDING_LATE(i, r) && done[r] >= entry_sequence[i])

#define CONSUME(i, r)                                                                              \
    assert(!HAS(entry_consumed[i], r)); /* no reply is taken twice */                              \
    entry_consumed[i] = entry_consumed[i] | (1 << r);                                              \
    ABSORB(response_tokens, response_due, r)

/* collector_drop_late, with lock held. The counts that ABSORB leaves do not depend on the order of
 * the entries. */
#if RESTARTS > 0
#define DROP(i, r)                                                                                 \
    if                                                                                             \
    :: DROPPABLE(i, r) ->                                                                          \
        assert(slot[(r) * DEPTH + (i)] == entry_sequence[i]); /* a rank has given that reply */       \
        CONSUME(i, r);                                                                             \
    :: else                                                                                        \
    fi
#else
#define DROP(i, r)                                                                                 \
    if                                                                                             \
    :: DROPPABLE(i, r) -> CONSUME(i, r);                                                           \
    :: else                                                                                        \
    fi
#endif

#if DEPTH == 1
#define DROP_LATE DROP(0, 0); DROP(0, 1)
#define ANY_LATE (LATE(0, 0) || LATE(0, 1))
#define ANY_DROPPABLE (DROPPABLE(0, 0) || DROPPABLE(0, 1))
#else
#define DROP_LATE DROP(0, 0); DROP(0, 1); DROP(1, 0); DROP(1, 1)
#define ANY_LATE (LATE(0, 0) || LATE(0, 1) || LATE(1, 0) || LATE(1, 1))
#define ANY_DROPPABLE (DROPPABLE(0, 0) || DROPPABLE(0, 1) || DROPPABLE(1, 0) || DROPPABLE(1, 1))
#endif
#ifdef NO_LATE_RULE
#undef ANY_LATE
#define ANY_LATE false
#endif

/* collector_advance: never past a request that has not ended. */
#ifdef NO_PREFIX
#define ADVANCE(sequence) ended = (ended < (sequence) -> (sequence) : ended)
#else
#define ADVANCE(sequence)                                                                          \
    do                                                                                             \
    :: ended < published && entry_ended[(ended + 1) % DEPTH] -> ended++;                           \
    :: else -> break                                                                               \
    od
#endif

/* ---- submit: cox_executor_submit: cox_collector_begin and cox_collector_commit ---- */

#define HOLDS(i, r)                                                                                \
    (entry_sequence[i] > 0 && HAS(entry_asked[i], r) && returned[r] < entry_sequence[i] && !dead[r])
#ifdef NO_FULL_RULE
#define IN_FLIGHT(i) false
#else
#define IN_FLIGHT(i) (entry_sequence[i] > 0 && !entry_ended[i])
#endif
#ifdef NO_RETURNED_RULE
#define READ(i) false
#else
#define READ(i) (HOLDS(i, 0) || HOLDS(i, 1))
#endif
#define DEAD_ASKED ((HAS(asked, 0) && dead[0]) || (HAS(asked, 1) && (dead[1] || DETACHED(1))))

/* A claim is refused with LATE because of the oldest late entry's first late rank, or with FULL
 * because of the first rank that has the frame to be claimed. That rank is woken again if it has
 * not taken its request. */
#define NEXT ((published + 1) % DEPTH) /* at depth 2 also the older entry */
#define REFUSED_LATE(i, r)                                                                         \
    (LATE(i, r) && ((r) == 0 || !LATE(i, 0)) && ((i) == NEXT || (!LATE(NEXT, 0) && !LATE(NEXT, 1))))
#define REFUSED_READ(i, r)                                                                         \
    (!ANY_LATE && (i) == NEXT && !IN_FLIGHT(i) && HOLDS(i, r) && ((r) == 0 || !HOLDS(i, 0)))
#define REFUSED(i, r) (!stopping && !DEAD_ASKED && (REFUSED_LATE(i, r) || REFUSED_READ(i, r)))

/* Never taken, and blocked without a token: a wakeup was lost. A rewake of a dead process changes
 * nothing. */
#define UNWOKEN(s, r) (taken[r] < (s) && !killed[r] && request_tokens[r] == 0)

#ifdef SLICE_ALWAYS
#ifdef NO_CLOCKS
#define CLAIM_DUE due /* only the first in a slice sends a rewake */
#else
#define CLAIM_DUE claim_due
#endif
#define CLAIM_REWAKE(i, r)                                                                           \
    atomic {                                                                                       \
        !lock && CLAIM_DUE && REFUSED(i, r) ->                                                     \
        CLAIM_DUE = false;                                                                         \
        if                                                                                         \
        :: taken[r] < entry_sequence[i] -> WAKE_RANK(r);                                                \
        :: else                                                                                    \
        fi                                                                                         \
    }
#else
#define CLAIM_REWAKE(i, r)                                                                           \
    atomic { !lock && REFUSED(i, r) && UNWOKEN(entry_sequence[i], r) -> WAKE_RANK(r); }
#endif

proctype submitter()
{
    byte n = 0, sequence = 0, i = 0, asked = 0;
    bool replies = false;
    do
    :: n < REQUESTS ->
        atomic {
            n++;
#ifdef SLICE_ALWAYS
            claims = true;
#endif
            if
#ifdef HANG
            :: n == HANG -> asked = 2;
            :: n > HANG -> asked = 1;
            :: n < HANG -> asked = 3;
#ifdef SUBSETS
            :: n == HANG -> asked = 3;
            :: n < HANG -> asked = 1;
            :: n < HANG -> asked = 2;
#endif
#else
            :: asked = 3;
#ifdef SUBSETS
            :: asked = 1;
            :: asked = 2;
#endif
#endif
            fi;
#if defined(HANG) && defined(NO_REPLY_TOO)
            replies = n >= HANG;
#else
            if
            :: replies = true;
#ifdef NO_REPLY_TOO
            :: replies = false;
#endif
            fi;
#endif
        }
        /* Refused for now: tries again later, also because await_room returns. Attempts that change
         * nothing are left out. */
        do
        :: atomic {
            !lock && !submit_lock && (stopping || DEAD_ASKED) ->
            sequence = 0;
#ifdef SLICE_ALWAYS
            claims = false;
#endif
            break
           }
        :: atomic {
            !lock && !submit_lock && !stopping && !DEAD_ASKED && !ANY_LATE && !IN_FLIGHT(NEXT) &&
            !READ(NEXT) ->
            d_step { DROP_LATE; }
            submit_lock = true;
            sequence = published + 1;
            i = sequence % DEPTH;
#ifdef SLICE_ALWAYS
            claims = false;
            publishes = true;
#endif
            break
           }
        :: atomic { !lock && ANY_DROPPABLE -> d_step { DROP_LATE; } }
#ifndef NO_CLAIM_REWAKE
        :: CLAIM_REWAKE(0, 0)
        :: CLAIM_REWAKE(0, 1)
#if DEPTH > 1
        :: CLAIM_REWAKE(1, 0)
        :: CLAIM_REWAKE(1, 1)
#endif
#endif
        od;
        if
        :: sequence == 0
        :: else ->
            /* Packed in place, under submit_lock alone; then cox_state_publish under lock. */
            frame[i] = TORN;
            atomic {
                !lock -> lock = true;
                frame[i] = sequence;
                frame_replies[i] = replies;
                entry_sequence[i] = sequence;
                entry_asked[i] = asked;
                entry_consumed[i] = 0;
                entry_replies[i] = replies;
                entry_ended[i] = false;
                accepted = accepted + replies;
#ifndef NO_SEQLOCK
                record_sequence[i] = 0;
#endif
            }
#ifdef SUBSETS
            record_asked[i] = asked;
#endif
#ifdef LAPS
            /* The record is complete, `published` is not stored yet. */
            d_step { record_asked[i] = asked; record_sequence[i] = sequence; }
#endif
            d_step {
                record_asked[i] = asked;
                record_sequence[i] = sequence;
#if RESTARTS > 0
                record_incarnation[i] = incarnation;
#endif
                published = sequence;
                if
                :: !replies -> entry_ended[i] = true; ADVANCE(sequence); /* no reply, so no gathering */
                :: else
                fi;
                sent = n == REQUESTS;
#ifdef SLICE_ALWAYS
                claim_due = false;
#endif
                lock = false;
            }
            atomic {
                if
                :: HAS(asked, 0) -> WAKE_RANK(0);
                :: else
                fi;
                if
                :: HAS(asked, 1) -> WAKE_RANK(1);
                :: else
                fi;
                submit_lock = false;
#ifdef SLICE_ALWAYS
                publishes = false;
#endif
                sequence = 0;
                i = 0;
                replies = false;
                asked = 0;
            }
        fi
    :: else -> break
    od;
    /* Every request ends, each once. */
    atomic { ended == published && !lock -> assert(completed == accepted); sent = true; finished = true; }
}

/* ---- collect: gather_round and what it calls ---- */

mtype = { NOT_ASKED, OUTSTANDING, OK, ERROR, DEAD };

/* One rank in gather_look; cox_replies_take is one step, with lock held and the slot the
 * coordinator's. */
#ifdef NO_SEQUENCE
#define REPLIED(i, r) (done[r] > 0)
#else
#define REPLIED(i, r) (done[r] >= entry_sequence[i])
#endif
#ifdef NO_TAG_CHECK
#define TAGGED(r) true
#else
#define TAGGED(r) (tag[r * DEPTH + i] == sequence)
#endif
#define OUTCOME(i, r) outcome[(r) * DEPTH + (i)]
#define IS_FAILED(i, r) (OUTCOME(i, r) == ERROR || OUTCOME(i, r) == DEAD)
#define IS_PENDING(i, r) (OUTCOME(i, r) == OUTSTANDING)

#if STRAYS > 0
#define CORRUPTED (strays < STRAYS)
#else
#define CORRUPTED wild_used
#endif
inline count_reply(r)
{
    d_step {
        if
        :: !TAGGED(r) || !OF_THIS_LIFE(r) ->
            assert(CORRUPTED); /* COX_CORRUPT only where a rank is */
            OUTCOME(i, r) = ERROR;
        :: else ->
#if RESTARTS > 0
            assert(r == 0 || slot_incarnation[i] == record_incarnation[i]); /* of the process that was asked */
#endif
            assert(slot[r * DEPTH + i] == sequence); /* the reply to this request, and complete */
            if
            :: slot_failed[r * DEPTH + i] -> OUTCOME(i, r) = ERROR;
            :: else -> OUTCOME(i, r) = OK;
            fi
        fi;
        CONSUME(i, r);
    }
}

/* Reads dead first, then the reply: two steps, and anything may happen in between. */
#if CRASHES == 0
#define HAS_REPLIED(r) REPLIED(i, r)
#define HAS_DIED(r) false
#elif defined(NO_DEAD_FIRST)
#define SCAN_RANK(r) before = REPLIED(i, r)
#define HAS_REPLIED(r) before
#define HAS_DIED(r) dead[r]
#else
#define SCAN_RANK(r) before = IS_PENDING(i, r) && dead[r]
#define HAS_REPLIED(r) REPLIED(i, r)
#define HAS_DIED(r) before
#endif
inline take(r)
{
    if
    :: IS_PENDING(i, r) && HAS_REPLIED(r) -> count_reply(r);
    :: IS_PENDING(i, r) && !HAS_REPLIED(r) ->
        if
        :: HAS_DIED(r) ->
            assert(done[r] < sequence); /* a reply that was complete before the death counts */
            OUTCOME(i, r) = DEAD;
        :: else -> first = (first == 0 -> r + 1 : first);
        fi
    :: !IS_PENDING(i, r)
    fi;
    before = false;
}

#define IN_ORDER                                                                                   \
    ((IS_FAILED(i, 0) && !IS_PENDING(1 - i, 0)) || (IS_FAILED(i, 1) && !IS_PENDING(1 - i, 1)) ||       \
     (!IS_FAILED(i, 0) && !IS_FAILED(i, 1) &&                                                      \
      (IS_PENDING(i, 0) || IS_PENDING(i, 1) ||                                                         \
       (entry_asked[i] & entry_asked[1 - i] & (3 - entry_consumed[1 - i])) == 0)))
#define CAN_END (first == 0 || IS_FAILED(i, 0) || IS_FAILED(i, 1))
#ifdef NO_RESCAN
#define RESCANS false
#elif defined(NO_RESCAN_FAILED)
#define RESCANS                                                                                \
    (first == 0 && !IS_FAILED(i, 0) && !IS_FAILED(i, 1) && !again && (pending & entry_asked[i]) != 0)
#else
#define RESCANS (CAN_END && !again && (pending & entry_asked[i]) != 0)
#endif

/* A slice that finds nothing new changes nothing but time, and is left out: then no run is endless,
 * and a request that does not end is a deadlock. With SLICE_ALWAYS it may end at any time, and
 * fairness is needed. */
#ifdef NO_REWAKE
#define WOULD_REWAKE(i, r) false
#elif defined(SLICE_ALWAYS)
#define WOULD_REWAKE(i, r) (IS_PENDING(i, r) && taken[r] < entry_sequence[i] && !killed[r])
#else
#define WOULD_REWAKE(i, r) (IS_PENDING(i, r) && UNWOKEN(entry_sequence[i], r))
#endif
/* What a check of this entry would find: it was not begun, or has a reply, a death, or a rank to
 * wake again. */
#define NEWS(i, r) (IS_PENDING(i, r) && (REPLIED(i, r) || dead[r]))
#define GATHERED(i) (entry_sequence[i] > ended && !entry_ended[i] && entry_sequence[i] <= begun)
#ifdef NO_FULL_SCAN
#define WITHIN(i) (entry_sequence[i] == ended + 1)
#else
#define WITHIN(i) (entry_sequence[i] > ended)
#endif
#define SCANNED(i)                                                                                  \
    (WITHIN(i) && !entry_ended[i] && (entry_sequence[i] > begun || NEWS(i, 0) ||   \
     NEWS(i, 1) || WOULD_REWAKE(i, 0) || WOULD_REWAKE(i, 1)))
#if DEPTH == 1
#define SLICE_HELPS (SCANNED(0) || stopping || causes)
#else
#define SLICE_HELPS (SCANNED(0) || SCANNED(1) || stopping || causes)
#endif

/* The next that has not ended, begun if it is new. */
inline enter()
{
    do
    :: sequence <= published && entry_ended[sequence % DEPTH] -> sequence++;
    :: else -> break
    od;
    if
    :: sequence <= published ->
        i = sequence % DEPTH;
        if
        :: begun < sequence ->
            begun = sequence;
            OUTCOME(i, 0) = (HAS(entry_asked[i], 0) -> OUTSTANDING : NOT_ASKED);
            OUTCOME(i, 1) = (HAS(entry_asked[i], 1) -> OUTSTANDING : NOT_ASKED);
        :: else
        fi
    :: else
    fi
}

proctype collector()
{
    /* first: rank + 1 in gather_scan; wait_rank: rank + 1 to block on; pending: ranks that owe a
     * reply to the scanned requests. */
    byte sequence = 0, i = 0, first = 0, wait_rank = 0, pending = 0, took = 0, begun = 0;
    mtype outcome[2 * DEPTH] = NOT_ASKED;
    bool passed[DEPTH], before = false, rewake = false, again = false;
end_idle:
    do
    :: atomic {
        /* The condition variable `work`, under lock. */
        !lock && ended < published -> lock = true;
       }
        /* gather_round: reads the causes, drops late replies, then scans everything in flight,
         * oldest first. */
round:  atomic {
            causes = false;
            d_step { DROP_LATE; }
#ifdef SLICE_ALWAYS
            rewake = due;
            due = false;
#endif
            sequence = ended + 1;
            enter();
        }
        do
        ::
#if CRASHES > 0
           SCAN_RANK(0);
#endif
           atomic { take(0); }
#if CRASHES > 0
           SCAN_RANK(1);
#endif
           atomic {
            take(1);
            if
            :: RESCANS ->
                /* A rank replies in order: a reply that was missing a moment ago may be complete by
                 * now. */
                again = true;
                first = 0;
                wait_rank = 0;
                pending = 0;
                i = 0;
                rewake = false;
                goto round;
            :: else
            fi;
            pending = pending | IS_PENDING(i, 0) | (IS_PENDING(i, 1) << 1);
            if
            :: CAN_END || stopping || passed[i] -> break
            :: deadlines > 0 && !(CAN_END || stopping || passed[i]) -> deadlines--; break
            :: !(CAN_END || stopping || passed[i])
            fi;
            if
            :: rewake && WOULD_REWAKE(i, 0) -> WAKE_RANK(0);
            :: else
            fi;
            if
            :: rewake && WOULD_REWAKE(i, 1) -> WAKE_RANK(1);
            :: else
            fi;
            wait_rank = (wait_rank == 0 -> first : wait_rank);
            first = 0;
            i = 0;
            sequence++;
#ifdef NO_FULL_SCAN
            sequence = published + 1;
#endif
            enter();
            if
            :: sequence <= published
            :: else -> sequence = 0; pending = 0; rewake = false; lock = false; goto sleep;
            fi
           }
        od;
        lock = false;
        /* gather_finish; the handler runs without the lock. */
        atomic {
            !lock;
            if
            :: IS_FAILED(i, 0) || IS_FAILED(i, 1) || IS_PENDING(i, 0) || IS_PENDING(i, 1) ->
                failed_through = published;
#ifndef NO_VOID
                void_through = published;
#endif
            :: else
            fi;
            /* One completion each. */
            assert(!entry_ended[i] && entry_replies[i] && entry_sequence[i] == sequence && sequence > ended);
            completed++;
            entry_ended[i] = true;
            assert(completed <= accepted);
#if DEPTH > 1
            /* The replies of a rank are used in the order of the requests: no request ends by a
             * reply of a rank whose reply to an earlier request is still unused. */
            assert(entry_sequence[1 - i] == 0 || entry_sequence[1 - i] > sequence || entry_ended[1 - i] ||
                   IN_ORDER);
#endif
            ADVANCE(sequence);
            OUTCOME(i, 0) = NOT_ASKED;
            OUTCOME(i, 1) = NOT_ASKED;
            passed[i] = false;
            sequence = 0;
            i = 0;
            first = 0;
            wait_rank = 0;
            pending = 0;
            again = false;
            rewake = false;
        }
        goto end_idle;
        /* cox_collector_sleep */
sleep:  sleeping = wait_rank;
        if
#ifndef NO_CAUSES
        :: causes
        :: !causes ->
#else
        :: true ->
#endif
            if
            :: atomic { response_tokens[wait_rank - 1] > 0 -> response_tokens[wait_rank - 1]--; took = wait_rank; }
#ifdef SLICE_ALWAYS
            :: due
#elif defined(SLICE)
            :: atomic { SLICE_HELPS -> rewake = true; }
#endif
            :: atomic { deadlines > 0 && GATHERED(0) -> deadlines--; passed[0] = true; }
#if DEPTH > 1
            :: atomic { deadlines > 0 && GATHERED(1) -> deadlines--; passed[1] = true; }
#endif
            fi
        fi;
        /* The count follows its token, and an absorb of the submitter may run in between. */
        atomic {
            !lock -> lock = true;
            sleeping = 0;
            wait_rank = 0;
            again = false;
            if
            :: took > 0 -> COUNT(response_due[took - 1]); took = 0;
            :: else
            fi;
            goto round;
        }
#ifdef STOP
    :: atomic { !lock && ended == published && stopping -> break }
#endif
    od
}

/* ---- a rank: thread_main, cox_channel_thread_serve ---- */

/* All other requests have ended, also later ones, except those refused because this request is
 * late. */
#ifdef HANG
#define HUNG (HANG % DEPTH)
#define NOTHING_ELSE                                                                               \
    (entry_ended[HUNG] -> completed == accepted : sent && completed + 1 == accepted)
#endif

/* A process gets the tokens of its own requests, and those of rewakes. */
#if RESTARTS > 0 && DEADLINES == 0
#define COUNT_REQUEST(r) assert(request_due[r] > 0); COUNT(request_due[r])
#else
#define COUNT_REQUEST(r) COUNT(request_due[r])
#endif

proctype rank(byte r)
{
    byte next = 1, i = 0, asked = 0, seen = 0;
    bool fails = false, replies = false;
#if RESTARTS > 0
    byte own_incarnation = 1;
#endif
begin:
    {
#if RESTARTS > 0
        /* cox_worker_claim and after it, but for the first, which is there from the beginning. */
        if
        :: atomic { !born }
        :: atomic {
            born ->
            born = false;
            if
            :: strays > 0 -> strays--; own_incarnation = incarnation - 1;
            :: own_incarnation = incarnation;
            fi;
            request_due[r] = 1;
           }
            line_incarnation = own_incarnation;
            next = taken[r] + 1;
            identity = own_incarnation; /* cox_worker_announce */
            POST(response_tokens[r]);
        fi;
#endif
top:    do
        :: atomic { published < next -> goto idle; }
        :: atomic {
            published >= next ->
            if
            :: published - next < DEPTH -> i = next % DEPTH;
            :: else -> seen = published;
            fi;
           }
#ifdef LAPS
            /* thread_await: requests older than the ring of frames were for other ranks, unless the
             * number differs from that of its frame. */
            if
            :: seen == 0
            :: atomic {
                seen > 0 && record_sequence[seen % DEPTH] == seen ->
                next = seen - DEPTH + 1;
                i = next % DEPTH;
                seen = 0;
               }
            :: seen > 0 && record_sequence[seen % DEPTH] != seen ->
                if
                :: atomic { published != seen -> seen = 0; goto top; }
                :: atomic { published == seen -> seen = 0; }
                    if
                    :: atomic { record_sequence[next % DEPTH] == next -> i = next % DEPTH; }
                    :: atomic { record_sequence[next % DEPTH] != next -> goto idle; }
                    fi
                fi
            fi;
#endif
            /* cox_state_read_frame; one step where no rank can be lapped. */
#ifdef LAPS
            if
            :: atomic { record_sequence[i] != next -> goto pass; }
            :: atomic { record_sequence[i] == next }
            fi;
            asked = record_asked[i];
#else
            atomic {
                assert(record_sequence[i] == next);
                asked = record_asked[i];
            }
#endif
            if
#ifndef NO_SEQLOCK
            :: atomic { record_sequence[i] != next -> goto pass; }
            :: atomic { record_sequence[i] == next && !HAS(asked, r) -> goto pass; }
            :: atomic {
                record_sequence[i] == next && HAS(asked, r) ->
#else
            :: atomic { !HAS(asked, r) -> goto pass; }
            :: atomic {
                HAS(asked, r) ->
#endif
                asked = 0;
                ABSORB(request_tokens, request_due, r);
#if RESTARTS > 0
                assert(record_incarnation[i] >= own_incarnation); /* no process begins a request to its predecessor */
                line_incarnation = own_incarnation;
#endif
                taken[r] = next;
               }
            fi;
            /* thread_copy: the bytes are this request's from the first to the last. */
            assert(frame[i] == next);
            atomic { assert(frame[i] == next); replies = frame_replies[i]; returned[r] = next; }
            if
            :: atomic { !replies -> done[r] = next; goto served; }
            :: atomic {
                replies;
                if
                :: void_through >= next -> fails = true;
                :: else ->
                    assert(next > failed_through); /* a cancelled request is not begun */
                    if
                    :: failures > 0 -> failures--; fails = true;
                    :: fails = false;
                    fi
                fi;
#ifdef WILD
                if
                :: !wild_used -> wild_used = true; done[r] = next;
                :: true
                fi;
#endif
                slot[r * DEPTH + i] = TORN;
               }
            fi;
#ifdef HANG
            if
            :: next != HANG || r == 0
            :: next == HANG && r == 1 && NOTHING_ELSE
            fi;
#endif
            d_step {
                slot[r * DEPTH + i] = next;
#if RESTARTS > 0
                slot_incarnation[i] = own_incarnation;
#endif
                slot_failed[r * DEPTH + i] = fails;
                tag[r * DEPTH + i] = next;
            }
            done[r] = next;
            atomic { POST(response_tokens[r]); if :: fails :: !fails -> goto served; fi; }
            atomic { notices++; goto served; } /* cox_worker_tell */
pass:       /* Not asked: touches no semaphore, and no reader depends on the order of the three stores. */
            atomic {
                taken[r] = next;
                returned[r] = next;
                done[r] = next;
served:         next++;
                asked = 0;
                i = 0;
                fails = false;
                replies = false;
                goto top;
            }
idle:       /* Nothing is pending: no timeout. */
end_idle:   atomic { request_tokens[r] > 0 -> request_tokens[r]--; COUNT_REQUEST(r); goto top; }
        od
    } unless {
        atomic {
            killed[r] ->
            next = 0;
            i = 0;
            asked = 0;
            seen = 0;
            fails = false;
            replies = false;
#if RESTARTS > 0
            born = false;
            gone = true;
#else
            request_tokens[r] = 0;
            request_due[r] = 0;
#endif
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
        if
        :: record_sequence[i] == next && HAS(record_asked[i], 0) ->
            slot[i] = next;
            tag[i] = next;
            POST(response_tokens[0]);
        :: else
        fi;
        taken[0] = next;
        returned[0] = next;
        done[0] = next;
        next++;
        i = 0;
       }
    od
}

/* ---- restart.c ---- */

#define ASKS(i) (entry_sequence[i] > 0 && !entry_ended[i] && HAS(entry_asked[i], 1))
#define PASS_OVER(i) entry_consumed[i] = entry_consumed[i] | (entry_asked[i] & 2)
#if DEPTH == 1
#define ANY_ASKS ASKS(0)
#define PASS_OVER_ALL PASS_OVER(0)
#define TAGS_RESET tag[1] = 0
#else
#define ANY_ASKS (ASKS(0) || ASKS(1))
#define PASS_OVER_ALL PASS_OVER(0); PASS_OVER(1)
#define TAGS_RESET tag[2] = 0; tag[3] = 0
#endif

proctype restarter()
{
end_watch:
    do
    :: atomic { restarts > 0 && dead[1] && told -> restarts--; }
        /* cox_collector_detach */
#ifdef NO_DETACH_LOCK
        atomic { !lock -> detached = true; }
#else
        atomic { !submit_lock && !lock -> detached = true; }
#endif
#ifndef NO_DETACH_WAIT
        atomic { !lock && !ANY_ASKS }
#endif
        /* cox_collector_reset_rank */
#ifdef NO_RESET_LOCK
        atomic {
            taken[1] = published;
            returned[1] = published;
            done[1] = published;
        }
        atomic {
#else
        atomic {
            !lock ->
#endif
            incarnation++;
#ifndef NO_SEMAPHORES_RENEWED
            request_tokens[1] = 0;
            response_tokens[1] = 0;
            response_due[1] = 1;
#endif
#ifndef NO_LINE_RESET
            TAGS_RESET;
            line_incarnation = 0;
            taken[1] = published;
            returned[1] = published;
            done[1] = published;
#endif
#ifndef NO_PASSED_OVER
            PASS_OVER_ALL;
#endif
            identity = 0;
        }
        /* cox_supervisor_relaunch */
        atomic {
            told = false;
            born = true;
            killed[1] = false;
#ifdef NO_PROOF
            run rank(1);
#endif
        }
        dead[1] = false;
#ifdef ADMIT_EARLY
        atomic { !lock -> detached = false; }
#endif
        /* restart_await */
look:   if
        :: atomic { identity > 0 }
        :: atomic { identity == 0 && (dead[1] || stopping) -> goto admit; }
        :: atomic { identity == 0 && !(dead[1] || stopping) }
            if
            :: atomic { response_tokens[1] > 0 -> response_tokens[1]--; }
                atomic { COUNT(response_due[1]); goto look; }
            :: atomic { dead[1] || stopping -> goto look; } /* a slice */
            fi
        fi;
        atomic {
            !lock ->
            ABSORB(response_tokens, response_due, 1);
#if STRAYS > 0 && !defined(NO_INCARNATION) && !defined(NO_IDENTITY_CHECK)
            if
            :: identity != incarnation -> killed[1] = true;
            :: else -> goto admit;
            fi
#else
            goto admit;
#endif
        }
        dead[1];
admit:  atomic { !lock -> detached = false; }
    od
}
#endif

/* ---- the wakers of the collector: the supervisor, the error thread, stop ---- */

proctype supervisor()
{
    byte who = 0;
end_watch:
    do
#ifdef NO_PROOF
    :: atomic { crashes > 0 && !killed[1] -> crashes--; dead[1] = true; causes = true; }
        wake(who)
        told = true;
#elif RESTARTS > 0
    :: atomic { crashes > 0 && !killed[1] -> crashes--; killed[1] = true; }
    :: atomic { gone && !dead[1] -> gone = false; dead[1] = true; causes = true; }
        wake(who)
        told = true;
#else
    :: atomic { crashes > 0 && !killed[0] -> crashes--; killed[0] = true; }
    :: atomic { crashes > 0 && !killed[1] -> crashes--; killed[1] = true; }
    :: atomic { killed[0] && !dead[0] -> dead[0] = true; causes = true; }
        wake(who)
    :: atomic { killed[1] && !dead[1] -> dead[1] = true; causes = true; }
        wake(who)
#endif
    od
}

proctype error_thread()
{
    byte who = 0;
end_idle:
    do
    :: atomic { notices > 0 -> notices--; causes = true; }
        wake(who)
    od
}

proctype stopper()
{
    byte who = 0;
#ifndef NO_STOP_LOCK
    /* No claim is between its read of `stopping` and its publish. */
    atomic { !submit_lock -> stopping = true; causes = true; }
#else
    atomic { stopping = true; causes = true; }
#endif
    wake(who)
}

/* ---- a process that corrupts semaphores ---- */

proctype meddler()
{
end_idle:
    do
    :: atomic { losses > 0 && request_tokens[0] > 0 -> losses--; request_tokens[0]--; }
    :: atomic { losses > 0 && request_tokens[1] > 0 -> losses--; request_tokens[1]--; }
    :: atomic { losses > 0 && response_tokens[0] > 0 -> losses--; response_tokens[0]--; }
    :: atomic { losses > 0 && response_tokens[1] > 0 -> losses--; response_tokens[1]--; }
    :: atomic { spurs > 0 -> spurs--; WAKE_RANK(0); }
    :: atomic { spurs > 0 -> spurs--; WAKE_RANK(1); }
    :: atomic { spurs > 0 -> spurs--; POST(response_tokens[0]); }
    :: atomic { spurs > 0 -> spurs--; POST(response_tokens[1]); }
    od
}

/* ---- time ---- */

#ifdef SLICE_ALWAYS
/* A slice is long: within it the collector scans, and a submitter that can continue, or send a
 * rewake, does. */
#define REFUSED_NOW (ANY_LATE || IN_FLIGHT(NEXT) || READ(NEXT))
#if DEPTH == 1
#define ANY_REFUSED_REWAKE (REFUSED_LATE(0, 0) || REFUSED_LATE(0, 1) || REFUSED_READ(0, 0) || REFUSED_READ(0, 1))
#else
#define ANY_REFUSED_REWAKE                                                                           \
    (REFUSED_LATE(0, 0) || REFUSED_LATE(0, 1) || REFUSED_READ(0, 0) || REFUSED_READ(0, 1) ||       \
     REFUSED_LATE(1, 0) || REFUSED_LATE(1, 1) || REFUSED_READ(1, 0) || REFUSED_READ(1, 1))
#endif
#define WAITS                                                                                      \
    (claims && REFUSED_NOW && !ANY_DROPPABLE && !(CLAIM_DUE && ANY_REFUSED_REWAKE))

proctype clock()
{
end_tick:
    do
    :: atomic {
        (!due || ended == published) && !(due && claim_due) && !publishes && (!claims || WAITS) ->
        due = true;
        claim_due = true;
       }
    od
}
#endif

#ifdef FAIR
ltl every_request_ends { <> finished }
#endif

init {
    atomic {
        run submitter();
        run collector();
#ifdef SLICE_ALWAYS
        run clock();
#endif
#if RESTARTS > 0
        run quick();
        run restarter();
#else
        run rank(0);
#endif
        run rank(1);
#if CRASHES > 0
        run supervisor();
#endif
#if FAILURES > 0 || DEADLINES > 0 || CRASHES > 0 || defined(WILD)
        run error_thread();
#endif
#ifdef STOP
        run stopper();
#endif
#if LOSSES > 0 || SPURS > 0
        run meddler();
#endif
    }
}
