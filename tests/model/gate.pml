/*
 * gate: one two-way channel of a group of two ranks, as channel/, coordinator/collect.c and worker/worker.c do it.
 *
 * Truth words tell what happened, semaphores only wake. README.md tells what is left out and why; check.sh runs this
 * file in several sizes, and once more for each rule with that rule removed (the NO_ switches), which must fail.
 *
 * Sizes (-D): DEPTH frames; REQUESTS; CRASHES, FAILURES (answers that tell of one), DEADLINES (that pass), LOSSES and
 * SPURS (tokens that vanish or appear) each at most that many; SLICE: whoever is owed something looks again after a
 * while; NO_REPLY_TOO: requests without answer as well; SUBSETS: also requests to one rank only; STOP: the group is
 * stopped at any moment; WILD: a rank once claims to be done before it is. FAIR and SLICE_ALWAYS: below.
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

#define TORN 255    /* bytes that are being written */
#ifndef TOKENS_MAX
#define TOKENS_MAX 6 /* a full semaphore: posting to it is no error */
#endif
#define HAS(set, r) (((set) >> (r)) & 1)
#define POST(bell) bell = (bell < TOKENS_MAX -> bell + 1 : bell)
/* Nobody sleeps in a process that is gone. */
#define RING(r) request_bell[r] = (request_bell[r] < TOKENS_MAX && !killed[r] -> request_bell[r] + 1 : request_bell[r])

/* ---- control region: written by the coordinator ---- */
byte published, void_through;
byte record_sequence[DEPTH], record_asked[DEPTH];
/* ---- control region: one line per rank ---- */
byte taken[2], returned[2], done[2], tag[2 * DEPTH];
/* ---- the request and response regions: what the bytes say, their sequence number standing for all of them ---- */
byte frame[DEPTH];
bool frame_replies[DEPTH];
byte slot[2 * DEPTH];
bool slot_failed[2 * DEPTH];

/* ---- the bells that somebody sleeps on. gate.c counts `taken` and `due`; settle looks only at due - taken, and all
 * that is below -1 is the same to it: debt is that difference, plus one, not below 0 ---- */
byte request_bell[2], request_debt[2] = 1;
byte response_bell[2], response_debt[2] = 1;

/* ---- the collector's private half ---- */
bool submit_lock, lock;
byte entry_sequence[DEPTH], entry_asked[DEPTH], entry_consumed[DEPTH];
bool entry_replies[DEPTH], entry_ended[DEPTH];
byte ended, sleeping;
bool stopping;
bool causes; /* differ from those the collector has seen */

/* ---- processes of ranks ---- */
bool killed[2]; /* makes no step any more */
bool dead[2];   /* and the supervisor has seen it */
byte notices;   /* reports on the error channel */

/* ---- what may still happen, and what the properties speak of ---- */
byte crashes = CRASHES, failures = FAILURES, deadlines = DEADLINES, losses = LOSSES, spurs = SPURS;
byte failed_through;            /* published before a failed step's completion was handed over */
byte accepted, completed;       /* requests with an answer */
bool wild_used;
bool finished;                  /* everything submitted has ended */

/* What cox_gate_wait counts after its token. */
#define COUNT(debt) debt = (debt > 0 -> debt - 1 : 0)

/* cox_gate_settle: the truth showed the event of one token. One step: between its exchange and its last take a token
 * can only arrive, and taking it now or later is the same. */
#define SETTLE(bell, debt, r)                                                                      \
    if                                                                                             \
    :: debt[r] > bell[r] -> debt[r] = debt[r] - bell[r] + 1; bell[r] = 0;                          \
    :: else -> bell[r] = bell[r] - debt[r]; debt[r] = 1;                                           \
    fi

/* cox_collector_wake: the cause was stored and counted; `sleeping` is read, then that bell is rung. */
inline wake(who)
{
    who = sleeping;
    atomic {
        if
        :: who > 0 -> POST(response_bell[who - 1]);
        :: else
        fi;
        who = 0;
    }
}

#define OWED_LATE(i, r)                                                                            \
    (entry_sequence[i] > 0 && entry_ended[i] && entry_replies[i] && HAS(entry_asked[i], r) &&      \
     !HAS(entry_consumed[i], r))
#define LATE(i, r) (OWED_LATE(i, r) && done[r] < entry_sequence[i] && !dead[r])
#define DROPPABLE(i, r) (OWED_LATE(i, r) && done[r] >= entry_sequence[i])

#define CONSUME(i, r)                                                                              \
    assert(!HAS(entry_consumed[i], r)); /* no reply is taken twice */                              \
    entry_consumed[i] = entry_consumed[i] | (1 << r);                                              \
    SETTLE(response_bell, response_debt, r)

/* collector_drop_late, with lock held. Entries of a ring of two are independent for different ranks and in order for the
 * same: a rank answers in order, and droppable ones are dropped together. */
#define DROP(i, r)                                                                                 \
    if                                                                                             \
    :: DROPPABLE(i, r) -> CONSUME(i, r);                                                           \
    :: else                                                                                        \
    fi

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

/* ---- submit: cox_executor_submit, cox_collector_claim and publish ---- */

/* Never taken, and asleep without a token: a wake-up was lost. Ringing where nobody is any more changes nothing. */
#define UNRUNG(s, r) (taken[r] < (s) && !killed[r] && request_bell[r] == 0)
#define HOLDS(i, r)                                                                                \
    (entry_sequence[i] > 0 && HAS(entry_asked[i], r) && returned[r] < entry_sequence[i] && !dead[r])

#ifdef NO_RETURNED_RULE
#define FULL(i) (entry_sequence[i] > 0 && !entry_ended[i])
#else
#define FULL(i) (entry_sequence[i] > 0 && (!entry_ended[i] || HOLDS(i, 0) || HOLDS(i, 1)))
#endif
#define DEAD_ASKED ((HAS(asked, 0) && dead[0]) || (HAS(asked, 1) && dead[1]))
/* Somebody without whom there is no room was never woken. */
#define NEVER_RUNG(i, r)                                                                                 \
    (entry_sequence[i] > 0 && entry_ended[i] && HAS(entry_asked[i], r) &&                          \
     UNRUNG(entry_sequence[i], r))

proctype submitter()
{
    byte n = 0, sequence = 0, i = 0, asked = 0;
    bool replies = false;
    do
    :: n < REQUESTS ->
        atomic {
            n++;
            if
            :: asked = 3;
#ifdef SUBSETS
            :: asked = 1;
            :: asked = 2;
#endif
            fi;
            if
            :: replies = true;
#ifdef NO_REPLY_TOO
            :: replies = false;
#endif
            fi;
        }
        /* Refused for now: again later, also because await_room returns. Attempts that change nothing are left out. */
        do
        :: atomic {
            !lock && !submit_lock && (stopping || DEAD_ASKED) -> sequence = 0; break
           }
        :: atomic {
            !lock && !submit_lock && !stopping && !DEAD_ASKED && !ANY_LATE &&
            !FULL((published + 1) % DEPTH) ->
            d_step { DROP_LATE; }
            submit_lock = true;
            sequence = published + 1;
            i = sequence % DEPTH;
            break
           }
        :: atomic { !lock && ANY_DROPPABLE -> d_step { DROP_LATE; } }
#ifndef NO_CLAIM_RING
        :: atomic { !lock && NEVER_RUNG((published + 1) % DEPTH, 0) -> RING(0); }
        :: atomic { !lock && NEVER_RUNG((published + 1) % DEPTH, 1) -> RING(1); }
#if DEPTH > 1
        :: atomic { !lock && NEVER_RUNG(published % DEPTH, 0) -> RING(0); }
        :: atomic { !lock && NEVER_RUNG(published % DEPTH, 1) -> RING(1); }
#endif
#endif
        od;
        if
        :: sequence == 0
        :: else ->
            /* Packed in place, under submit_lock alone; then cox_truth_publish under lock. */
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
            d_step { record_asked[i] = asked; record_sequence[i] = sequence; published = sequence; lock = false; }
            atomic {
                if
                :: HAS(asked, 0) -> RING(0);
                :: else
                fi;
                if
                :: HAS(asked, 1) -> RING(1);
                :: else
                fi;
                submit_lock = false;
                sequence = 0;
                i = 0;
                replies = false;
                asked = 0;
            }
        fi
    :: else -> break
    od;
    /* Every request ends, each once. */
    atomic { ended == published && !lock -> assert(completed == accepted); finished = true; }
}

/* ---- collect: cox_collector_gather and what it calls ---- */

mtype = { NOT_ASKED, OWING, OK, ERROR, DEAD };

/* One rank in gather_look; gather_answer is one step, with lock held and the slot the coordinator's. */
#ifdef NO_SEQUENCE
#define ANSWERED(r) (done[r] > 0)
#else
#define ANSWERED(r) (done[r] >= sequence)
#endif
#ifdef NO_TAG_CHECK
#define TAGGED(r) true
#else
#define TAGGED(r) (tag[r * DEPTH + i] == sequence)
#endif

inline answer(r)
{
    d_step {
        if
        :: !TAGGED(r) ->
            assert(wild_used); /* COX_CORRUPT only where a rank is */
            outcome[r] = ERROR;
        :: else ->
            assert(slot[r * DEPTH + i] == sequence); /* the reply to this request, and complete */
            if
            :: slot_failed[r * DEPTH + i] -> outcome[r] = ERROR;
            :: else -> outcome[r] = OK;
            fi
        fi;
        CONSUME(i, r);
    }
}

inline look(r)
{
    if
    :: outcome[r] == OWING ->
#ifndef NO_DEAD_FIRST
        was_dead = dead[r];
#endif
        if
        :: atomic { ANSWERED(r) -> answer(r); }
        :: atomic {
            !ANSWERED(r);
#ifdef NO_DEAD_FIRST
           }
           atomic {
            was_dead = dead[r];
#endif
            if
            :: was_dead ->
                assert(done[r] < sequence); /* an answer complete before the death counts */
                outcome[r] = DEAD;
            :: else -> owing = (owing == 0 -> r + 1 : owing);
            fi
           }
        fi;
        was_dead = false;
    :: else
    fi
}

#define FAILED(r) (outcome[r] == ERROR || outcome[r] == DEAD)

/* A slice that finds nothing new changes nothing but time, and is left out: then no run is endless, and a request that
 * does not end is a deadlock. With SLICE_ALWAYS it may end at any time, and fairness is needed. */
#ifdef NO_RING
#define WOULD_RING(r) false
#elif defined(SLICE_ALWAYS)
#define WOULD_RING(r) (outcome[r] == OWING && taken[r] < sequence && !killed[r])
#else
#define WOULD_RING(r) (outcome[r] == OWING && UNRUNG(sequence, r))
#endif
#define NEWS(r) (outcome[r] == OWING && (ANSWERED(r) || dead[r]))
#ifdef SLICE_ALWAYS
#define SLICE_HELPS true
#else
#define SLICE_HELPS                                                                                \
    (NEWS(0) || NEWS(1) || WOULD_RING(0) || WOULD_RING(1) || stopping || causes)
#endif

proctype collector()
{
    byte sequence = 0, i = 0, owing = 0, took = 0;
    mtype outcome[2] = NOT_ASKED;
    bool was_dead = false, ring = false, passed = false;
end_idle:
    do
    :: atomic {
        /* The condition variable `work`, under lock. */
        !lock && ended < published ->
        sequence = ended + 1;
        i = sequence % DEPTH;
        if
        :: !entry_replies[i] ->
            entry_ended[i] = true;
            ended = sequence;
            goto next;
        :: else ->
            outcome[0] = (HAS(entry_asked[i], 0) -> OWING : NOT_ASKED);
            outcome[1] = (HAS(entry_asked[i], 1) -> OWING : NOT_ASKED);
            lock = true;
        fi
       }
        do
        :: atomic {
            causes = false;
            d_step { DROP_LATE; }
            owing = 0;
           }
            look(0);
            look(1);
            if
            :: atomic { owing == 0 || FAILED(0) || FAILED(1) -> break }
            :: atomic { !(owing == 0 || FAILED(0) || FAILED(1)) && stopping -> break }
            :: atomic { !(owing == 0 || FAILED(0) || FAILED(1)) && !stopping && passed -> break }
            :: atomic {
                !(owing == 0 || FAILED(0) || FAILED(1)) && !stopping && !passed;
                if
                :: ring && WOULD_RING(0) -> RING(0);
                :: else
                fi;
                if
                :: ring && WOULD_RING(1) -> RING(1);
                :: else
                fi;
                ring = false;
                lock = false;
               }
            fi;
            /* cox_collector_sleep */
            sleeping = owing;
            if
#ifndef NO_CAUSES
            :: causes
            :: !causes ->
#else
            :: true ->
#endif
                if
                :: atomic { response_bell[owing - 1] > 0 -> response_bell[owing - 1]--; took = owing; }
#ifdef SLICE
                :: atomic { SLICE_HELPS -> ring = true; }
#endif
                :: atomic { deadlines > 0 -> deadlines--; passed = true; }
                fi
            fi;
            /* The count follows its token, and a settle of the submitter may come between. */
            atomic {
                !lock -> lock = true;
                sleeping = 0;
                if
                :: took > 0 -> COUNT(response_debt[took - 1]); took = 0;
                :: else
                fi;
            }
        od;
        lock = false;
        /* gather_finish */
        atomic {
            !lock;
            if
            :: FAILED(0) || FAILED(1) || outcome[0] == OWING || outcome[1] == OWING ->
                failed_through = published;
#ifndef NO_VOID
                void_through = published;
#endif
            :: else
            fi;
            entry_ended[i] = true;
            ended = sequence;
            completed++;
next:
            assert(completed <= accepted);
            sequence = 0;
            i = 0;
            owing = 0;
            outcome[0] = NOT_ASKED;
            outcome[1] = NOT_ASKED;
            passed = false;
            ring = false;
        }
#ifdef STOP
    :: atomic { !lock && ended == published && stopping -> break }
#endif
    od
}

/* ---- a rank: lane_main, cox_lane_serve ---- */

proctype rank(byte r)
{
    byte next = 1, i = 0, asked = 0;
    bool fails = false, replies = false;
    {
top:    do
        :: atomic { published < next -> goto idle; }
        :: atomic {
            published >= next ->
            if
            :: published - next >= DEPTH -> next = published - DEPTH + 1;
            :: else
            fi;
            i = next % DEPTH;
           }
            /* cox_truth_read_frame; in one step where nobody can be lapped. */
#ifdef SUBSETS
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
                SETTLE(request_bell, request_debt, r);
                taken[r] = next;
               }
            fi;
            /* lane_copy: the bytes are this request's from the first to the last. */
            assert(frame[i] == next);
            atomic { assert(frame[i] == next); replies = frame_replies[i]; returned[r] = next; }
            if
            :: atomic { !replies -> done[r] = next; goto served; }
            :: atomic {
                replies;
                if
                :: void_through >= next -> fails = true;
                :: else ->
                    assert(next > failed_through); /* what was given up is not begun */
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
            d_step {
                slot[r * DEPTH + i] = next;
                slot_failed[r * DEPTH + i] = fails;
                tag[r * DEPTH + i] = next;
            }
            done[r] = next;
            atomic { POST(response_bell[r]); if :: fails :: !fails -> goto served; fi; }
            atomic { notices++; goto served; } /* cox_worker_tell */
pass:       /* Not asked: no bell is touched, and nobody looks at the three words one by one. */
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
idle:       /* Nothing is owed: no timeout. */
end_idle:   atomic { request_bell[r] > 0 -> request_bell[r]--; COUNT(request_debt[r]); goto top; }
        od
    } unless {
        atomic {
            killed[r] ->
            next = 0;
            i = 0;
            asked = 0;
            fails = false;
            replies = false;
            request_bell[r] = 0;
            request_debt[r] = 0;
        }
    }
}

/* ---- who wakes the collector: the supervisor, the error thread, stop ---- */

proctype supervisor()
{
    byte who = 0;
end_watch:
    do
    :: atomic { crashes > 0 && !killed[0] -> crashes--; killed[0] = true; }
    :: atomic { crashes > 0 && !killed[1] -> crashes--; killed[1] = true; }
    :: atomic { killed[0] && !dead[0] -> dead[0] = true; causes = true; }
        wake(who)
    :: atomic { killed[1] && !dead[1] -> dead[1] = true; causes = true; }
        wake(who)
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
    /* No claim stands between its look at `stopping` and its publish. */
    atomic { !submit_lock -> stopping = true; causes = true; }
#else
    atomic { stopping = true; causes = true; }
#endif
    wake(who)
}

/* ---- whoever spoils semaphores ---- */

proctype meddler()
{
end_idle:
    do
    :: atomic { losses > 0 && request_bell[0] > 0 -> losses--; request_bell[0]--; }
    :: atomic { losses > 0 && request_bell[1] > 0 -> losses--; request_bell[1]--; }
    :: atomic { losses > 0 && response_bell[0] > 0 -> losses--; response_bell[0]--; }
    :: atomic { losses > 0 && response_bell[1] > 0 -> losses--; response_bell[1]--; }
    :: atomic { spurs > 0 -> spurs--; RING(0); }
    :: atomic { spurs > 0 -> spurs--; RING(1); }
    :: atomic { spurs > 0 -> spurs--; POST(response_bell[0]); }
    :: atomic { spurs > 0 -> spurs--; POST(response_bell[1]); }
    od
}

#ifdef FAIR
ltl every_request_ends { <> finished }
#endif

init {
    atomic {
        run submitter();
        run collector();
        run rank(0);
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
