/*
 * legacy: the same channel with two ranks that know no state words: depth 1, every token counts
 * (gate.pml models ranks with state words; README.md and check.sh describe both).
 *
 * Sizes (-D): REQUESTS; CRASHES, FAILURES, DEADLINES each at most that many; STOP. No token is lost
 * here: a legacy group does not survive that.
 */
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

#define TORN 255
#define HAS(set, r) (((set) >> (r)) & 1)

/* The regions: the bytes of the frame, and of rank 0's slot. */
byte frame, slot;
bool frame_replies, slot_failed;
/* The four semaphores of each rank. */
byte request_produce[2] = 1, request_consume[2], response_produce[2] = 1, response_consume[2];

/* The collector's private half: one entry. */
bool lock, submit_lock, stopping, causes;
byte published, ended, sleeping;
byte entry_sequence, entry_consumed;
bool entry_replies, entry_ended;
byte legacy_done[2], foreign[2];
bool legacy_free[2];

bool killed[2], dead[2];
byte crashes = CRASHES, failures = FAILURES, deadlines = DEADLINES;
byte replied[2]; /* the last request a rank has replied to, known or not */
byte accepted, completed;

/* rank_count_token (channel/attach/legacy/legacy_bridge.c) */
#define COUNT_TOKEN(r)                                                                             \
    if                                                                                             \
    :: foreign[r] > 0 -> foreign[r]--;                                                             \
    :: else ->                                                                                     \
        legacy_done[r] = entry_sequence;                                                           \
        assert(replied[r] >= entry_sequence); /* the n-th token is the n-th reply */              \
    fi

/* cox_legacy_bridge_update_rank: takes tokens until the reply is there, or there are none. */
#define TAKE_TOKENS(r)                                                                             \
    do                                                                                             \
    :: legacy_done[r] < entry_sequence && response_consume[r] > 0 ->                               \
        response_consume[r]--;                                                                     \
        COUNT_TOKEN(r)                                                                             \
    :: else -> break                                                                               \
    od
#define REPLIED(r) (legacy_done[r] >= entry_sequence)

#define CONSUME(r)                                                                                 \
    assert(!HAS(entry_consumed, r));                                                               \
    entry_consumed = entry_consumed | (1 << r);                                                    \
    response_produce[r]++

#define PENDING_LATE(r) (entry_sequence > 0 && entry_ended && entry_replies && !HAS(entry_consumed, r))
#define DROP(r)                                                                                    \
    if                                                                                             \
    :: PENDING_LATE(r) ->                                                                             \
        TAKE_TOKENS(r);                                                                            \
        if                                                                                         \
        :: REPLIED(r) -> CONSUME(r);                                                              \
        :: else                                                                                    \
        fi                                                                                         \
    :: else                                                                                        \
    fi
#ifdef NO_LATE_RULE
#define LATE(r) false
#else
#define LATE(r) (PENDING_LATE(r) && !REPLIED(r) && !dead[r])
#endif
#ifdef NO_PRODUCE_RULE
#define ROOM(r) true
#else
#define ROOM(r) (request_produce[r] > 0)
#endif

inline wake(who)
{
    who = sleeping;
    if
    :: atomic { who == 0 }
    :: who > 0 ->
#ifndef NO_FOREIGN
#ifdef FOREIGN_AFTER_POST
        response_consume[who - 1]++;
        foreign[who - 1]++;
#else
        foreign[who - 1]++;
        response_consume[who - 1]++;
#endif
#else
        response_consume[who - 1]++;
#endif
    fi;
    who = 0
}

proctype submitter()
{
    byte n = 0, sequence = 0;
    bool replies = false;
    do
    :: n < REQUESTS ->
        atomic {
            n++;
            if
            :: replies = true;
            :: replies = false;
            fi;
        }
        do
        :: atomic { !lock && (stopping || dead[0] || dead[1]) -> sequence = 0; break }
        :: atomic {
            !lock && PENDING_LATE(0) && response_consume[0] > 0 -> d_step { DROP(0); }
           }
        :: atomic {
            !lock && PENDING_LATE(1) && response_consume[1] > 0 -> d_step { DROP(1); }
           }
        :: atomic {
            !lock && !stopping && !dead[0] && !dead[1] && !LATE(0) && !LATE(1) &&
            (entry_sequence == 0 || entry_ended) && ROOM(0) && ROOM(1) ->
            d_step { DROP(0); DROP(1); }
            request_produce[0] = (request_produce[0] > 0 -> request_produce[0] - 1 : 0);
            request_produce[1] = (request_produce[1] > 0 -> request_produce[1] - 1 : 0);
            submit_lock = true;
            sequence = published + 1;
            break
           }
        od;
        if
        :: sequence == 0
        :: else ->
            frame = TORN;
            atomic {
                !lock ->
                frame = sequence;
                frame_replies = replies;
                entry_sequence = sequence;
                entry_consumed = 0;
                entry_replies = replies;
                entry_ended = false;
                accepted = accepted + replies;
                published = sequence;
            }
            request_consume[0]++;
            atomic { request_consume[1]++; submit_lock = false; sequence = 0; replies = false; }
        fi
    :: else -> break
    od;
    atomic { ended == published && !lock -> assert(completed == accepted); }
}

mtype = { OUTSTANDING, OK, ERROR, DEAD };
#define FAILED(r) (outcome[r] == ERROR || outcome[r] == DEAD)

inline look(r)
{
    if
    :: outcome[r] == OUTSTANDING ->
        was_dead = dead[r];
        d_step {
            TAKE_TOKENS(r);
            if
            :: REPLIED(r) ->
                if
                :: r == 0 ->
                    assert(slot == entry_sequence); /* rank 0's reply is the payload; the others only complete */
                    outcome[r] = (slot_failed -> ERROR : OK);
                :: else -> outcome[r] = OK;
                fi;
                CONSUME(r);
            :: else ->
                if
                :: was_dead -> outcome[r] = DEAD;
                :: else -> wait_rank = (wait_rank == 0 -> r + 1 : wait_rank);
                fi
            fi;
            was_dead = false;
        }
    :: else
    fi
}

proctype collector()
{
    byte wait_rank = 0;
    mtype outcome[2] = OUTSTANDING;
    bool was_dead = false, passed = false, took = false;
end_idle:
    do
    :: atomic {
        !lock && ended < published && !entry_replies -> entry_ended = true; ended = published;
       }
    :: atomic { !lock && ended < published && entry_replies -> lock = true; }
        outcome[0] = OUTSTANDING;
        outcome[1] = OUTSTANDING;
        do
        :: atomic { causes = false; wait_rank = 0; }
            look(0);
            look(1);
            if
            :: atomic { wait_rank == 0 || FAILED(0) || FAILED(1) || stopping || passed -> break }
            :: atomic {
                !(wait_rank == 0 || FAILED(0) || FAILED(1) || stopping || passed) -> lock = false;
               }
            fi;
            sleeping = wait_rank;
            if
#ifdef NO_CAUSES
            :: true ->
#else
            :: causes
            :: !causes ->
#endif
                if
                :: atomic { response_consume[wait_rank - 1] > 0 -> response_consume[wait_rank - 1]--; took = true; }
                :: atomic { deadlines > 0 -> deadlines--; passed = true; }
                fi
            fi;
            atomic {
                !lock -> lock = true;
                sleeping = 0;
                if
                :: took -> COUNT_TOKEN(wait_rank - 1);
                :: else
                fi;
                took = false;
            }
        od;
        lock = false;
        atomic {
            !lock ->
            entry_ended = true;
            ended = published;
            completed++;
            passed = false;
            wait_rank = 0;
        }
#ifdef STOP
    :: atomic { !lock && ended == published && stopping -> break }
#endif
    od
}

/* A legacy worker, from its contract alone. */
proctype rank(byte r)
{
    byte sequence = 0;
    bool replies = false, fails = false;
    {
        do
        :: true ->
end_idle:   atomic { request_consume[r] > 0 -> request_consume[r]--; }
            atomic { sequence = frame; assert(sequence != TORN); }
            atomic { assert(frame == sequence); replies = frame_replies; request_produce[r]++; }
            if
            :: atomic {
                replies ->
                if
                :: r == 0 && failures > 0 -> failures--; fails = true;
                :: fails = false;
                fi;
               }
                atomic {
                    response_produce[r] > 0 ->
                    response_produce[r]--;
                    if
                    :: r == 0 -> slot = TORN;
                    :: else
                    fi;
                }
                atomic {
                    if
                    :: r == 0 -> slot = sequence; slot_failed = fails;
                    :: else
                    fi;
                    fails = false;
                }
                atomic { replied[r] = sequence; response_consume[r]++; }
            :: atomic { !replies }
            fi;
            atomic { replies = false; sequence = 0; }
        od
    } unless { atomic { killed[r] -> sequence = 0; replies = false; fails = false; } }
}

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

/* Any other cause for a scan: the error thread, stop. */
proctype waker()
{
    byte who = 0;
#ifdef STOP
    atomic { !submit_lock -> stopping = true; causes = true; }
#else
    atomic { causes = true; }
#endif
    wake(who)
}

init {
    atomic {
        run submitter();
        run collector();
        run rank(0);
        run rank(1);
        run waker();
#if CRASHES > 0
        run supervisor();
#endif
    }
}
