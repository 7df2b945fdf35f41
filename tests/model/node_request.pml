/*
 * node_request: the requests of a lead to the agent of one node, within one epoch and incarnation.
 *
 * The link is a set of frames: any of them may be delivered next, be lost, or be delivered and
 * stay (a duplicate, which may then come as late as it likes). A request n has a `previous`: n - 1,
 * or 0 if it starts a chain, which is "base 0": it announces everything, and an agent takes it
 * whatever it took before. README.md lists what is left out; check.sh runs this file in several
 * sizes, and once more for each rule with that rule removed, which must fail.
 *
 * A timer fires only when it would matter: a retry when no frame is under way (earlier ones are
 * DUPS), a beat when it says what the lead does not know. So no run is endless, and "every request
 * ends" means "no deadlock".
 *
 * Sizes (-D): REQUESTS, DEPTH; LOSSES, DUPS, DEADLINES (requests whose deadline passes at some
 * time), FAILURES (a rank fails in a request), HANGS (a rank hangs in a request, until the lead has
 * given it up), each at most that many.
 */
#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef DUPS
#define DUPS 0
#endif
#ifndef DEADLINES
#define DEADLINES 0
#endif
#ifndef FAILURES
#define FAILURES 0
#endif
#ifndef HANGS
#define HANGS 0
#endif

#define SIZE (REQUESTS + 1)
#define TORN 255 /* the state of a rank that failed in a request */

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define ADD(set, n) set = set | BIT(n)
#define DEL(set, n) set = set & ~BIT(n)
/* One copy is delivered; another may stay. */
#define TAKE_FRAME(set, n)                                                                         \
    if                                                                                             \
    :: DEL(set, n)                                                                                 \
    :: dups > 0 -> dups--                                                                          \
    fi

/* ---- the link: REQUEST n, VOID n, ANSWER n, GAP (last taken t), BEAT (last taken, last answered) ---- */
byte requests, voids, good, bad, gaps, beats_taken, beats_answered;
#define QUIET                                                                                      \
    (requests == 0 && voids == 0 && good == 0 && bad == 0 && gaps == 0 && beats_taken == 0 && beats_answered == 0)
byte losses = LOSSES, dups = DUPS, deadlines = DEADLINES, failures = FAILURES, hangs = HANGS;

/* ---- the frames' fields, and time ---- */
bool starts[SIZE];    /* previous is 0 */
byte awaits[SIZE];    /* the oldest request that the lead awaited when it sent this one */
bool late[SIZE];      /* its deadline has passed by the agent's clock */
#ifdef LEAD_FIRST
#define LEAD_LATE(n) (lead_late[n])
bool lead_late[SIZE];
#else
#define LEAD_LATE(n) late[n] /* the lead's clock has the margin */
#endif

/* ---- the lead ---- */
#define NONE 0
#define AWAITED 1
#define GOOD 2
#define BAD 3
#define GIVEN_UP 4
byte outcome[SIZE];
byte sent, known_taken, known_answered, awaited;
bool start_next = true;
bool clean[SIZE]; /* ghost: submitted when no fault but a loss was left */

/* ---- the agent ---- */
#define HELD 1
#define TAKEN 2
#define RUNNING 3
#define DONE_GOOD 4
#define DONE_BAD 5
#define GONE 6
byte status[SIZE];
bool voided[SIZE];
byte taken, answered, running;
bool broken, hung;
byte state; /* ghost: what the rank's state was made by last */
byte ran;   /* ghost */

/* The oldest awaited; else the next one. */
#define OLDEST(m)                                                                                  \
    m = 1;                                                                                         \
    do                                                                                             \
    :: m <= sent && outcome[m] != AWAITED -> m++                                                   \
    :: else -> break                                                                               \
    od

#define END(n, how)                                                                                \
    assert(how == GOOD || !clean[n]);                                                              \
    outcome[n] = how;                                                                              \
    awaited--;                                                                                     \
    if                                                                                             \
    :: how == GOOD                                                                                 \
    :: else -> start_next = true                                                                   \
    fi

#ifdef NO_START_AFTER_ERROR
#define START (sent == 0)
#else
#define START start_next
#endif
#ifdef START_EARLY
#define MAY_START true
#else
#define MAY_START (!START || awaited == 0)
#endif
#ifdef NO_RETRY
#define UNHEARD(n) false
#else
#define UNHEARD(n) (n > known_taken)
#endif
#ifdef NO_ASK_ANSWER
#define UNSEEN(n) false
#else
#define UNSEEN(n) (n <= known_answered)
#endif
#ifdef NO_GIVE_UP
#define GIVES_UP(n) false
#else
#define GIVES_UP(n) LEAD_LATE(n)
#endif

/* Beats come meanwhile, and what the agent keeps for later is not helped by another copy. */
#define RETRY(n)                                                                                   \
    :: atomic { n <= sent && outcome[n] == AWAITED && QUIET && !late[n] && status[n] != HELD &&    \
       known_taken == taken && known_answered == answered &&                                       \
       (UNHEARD(n) || UNSEEN(n)) -> ADD(requests, n) }
#define ANSWERS(n)                                                                                 \
    :: atomic { HAS(good, n) -> TAKE_FRAME(good, n);                                               \
       if                                                                                          \
       :: outcome[n] == AWAITED -> assert(HAS(ran, n)); END(n, GOOD)                               \
       :: else                                                                                     \
       fi }                                                                                        \
    :: atomic { HAS(bad, n) -> TAKE_FRAME(bad, n);                                                 \
       if                                                                                          \
       :: outcome[n] == AWAITED -> END(n, BAD)                                                     \
       :: else                                                                                     \
       fi }                                                                                        \
    :: atomic { outcome[n] == AWAITED && GIVES_UP(n) -> END(n, GIVEN_UP) }
#define BEATS(n)                                                                                   \
    :: atomic { HAS(beats_taken, n) -> TAKE_FRAME(beats_taken, n);                                 \
       known_taken = (known_taken > n -> known_taken : n) }                                        \
    :: atomic { HAS(beats_answered, n) -> TAKE_FRAME(beats_answered, n);                           \
       known_answered = (known_answered > n -> known_answered : n) }
/* What is missing is sent again; or that it never comes, if it has been given up. */
#define GAP(t)                                                                                     \
    :: atomic { HAS(gaps, t) -> TAKE_FRAME(gaps, t);                                               \
       m = t + 1;                                                                                  \
       if                                                                                          \
       :: m <= sent && outcome[m] == AWAITED && !late[m] -> ADD(requests, m)                       \
       :: m <= sent && outcome[m] == GIVEN_UP -> SAY_VOID(m)                                       \
       :: else                                                                                     \
       fi;                                                                                         \
       m = 0 }
#ifdef NO_VOID_FRAME
#define SAY_VOID(n) skip
#else
#define SAY_VOID(n) ADD(voids, n)
#endif

active proctype lead()
{
    byte m;

    do
    :: atomic {
        sent < REQUESTS && awaited < DEPTH && MAY_START ->
        sent++;
        starts[sent] = START;
        start_next = false;
        outcome[sent] = AWAITED;
        clean[sent] = (awaited == 0 && deadlines == 0 && failures == 0 && hangs == 0);
        awaited++;
        OLDEST(m);
        awaits[sent] = m;
        m = 0;
        ADD(requests, sent)
       }
    RETRY(1) RETRY(2) RETRY(3)
    ANSWERS(1) ANSWERS(2) ANSWERS(3)
    BEATS(1) BEATS(2) BEATS(3)
    GAP(0) GAP(1) GAP(2)
#if REQUESTS > 3
    RETRY(4)
    ANSWERS(4)
    BEATS(4)
    GAP(3)
#endif
    :: atomic { sent == REQUESTS && awaited == 0 -> break }
    od
}

#ifdef NO_PREVIOUS
#define FOLLOWS(n) true
#else
#define FOLLOWS(n) (starts[n] || taken == n - 1)
#endif
#ifdef NO_DEADLINE_DROP
#define TOO_LATE(n) false
#else
#define TOO_LATE(n) late[n]
#endif

/* Takes n, and what was kept behind it. */
#define ACCEPT(n)                                                                                  \
    status[n] = TAKEN;                                                                             \
    taken = n;                                                                                     \
    do                                                                                             \
    :: taken < REQUESTS && status[taken + 1] == HELD && !TOO_LATE(taken + 1) ->                    \
       taken++;                                                                                    \
       status[taken] = TAKEN                                                                       \
    :: else -> break                                                                               \
    od

/* Answers that the lead has, or waits for no more, are forgotten. */
#define FORGET(upto)                                                                               \
    m = 1;                                                                                         \
    do                                                                                             \
    :: m < upto ->                                                                                 \
       if                                                                                          \
       :: status[m] == DONE_GOOD || status[m] == DONE_BAD -> status[m] = GONE                      \
       :: else                                                                                     \
       fi;                                                                                         \
       m++                                                                                         \
    :: else -> break                                                                               \
    od;                                                                                            \
    m = 0
#ifdef KEEP_DEPTH
#define KEPT(n) (answered > DEPTH -> answered - DEPTH + 1 : 1)
#else
#define KEPT(n) awaits[n]
#endif
#ifdef NO_DEDUPE
#define TAKE_AGAIN(n) (status[n] == DONE_GOOD)
#else
#define TAKE_AGAIN(n) false
#endif
#ifdef NO_KEPT
#define HAS_KEPT false
#else
#define HAS_KEPT true
#endif

#define REQUEST(n)                                                                                 \
    :: atomic { HAS(requests, n) -> TAKE_FRAME(requests, n);                                       \
       FORGET(KEPT(n));                                                                            \
       if                                                                                          \
       :: n > taken && TOO_LATE(n) -> status[n] = NONE                                             \
       :: n > taken && !TOO_LATE(n) && FOLLOWS(n) -> ACCEPT(n)                                     \
       :: n > taken && !TOO_LATE(n) && !FOLLOWS(n) -> status[n] = HELD                             \
       :: n <= taken && TAKE_AGAIN(n) -> status[n] = TAKEN                                         \
       :: n <= taken && !TAKE_AGAIN(n) && HAS_KEPT && status[n] == DONE_GOOD -> ADD(good, n)       \
       :: n <= taken && HAS_KEPT && status[n] == DONE_BAD -> ADD(bad, n)                           \
       :: else /* the beat says so */                                                              \
       fi }                                                                                        \
    :: atomic { HAS(voids, n) -> TAKE_FRAME(voids, n);                                             \
       if                                                                                          \
       :: n > taken && FOLLOWS(n) -> ACCEPT(n); status[n] = TAKEN; voided[n] = true                \
       :: else                                                                                     \
       fi }

#ifdef NO_VOID
#define REFUSED(n) false
#else
#define REFUSED(n) (broken && !starts[n])
#endif
#define FIRST(n) (running == 0 && status[n] == TAKEN && \
    (n < 2 || status[1] != TAKEN) && (n < 3 || status[2] != TAKEN) && (n < 4 || status[3] != TAKEN))

#define BEGIN(n)                                                                                   \
    :: atomic { FIRST(n) ->                                                                        \
       if                                                                                          \
       :: TOO_LATE(n) || voided[n] -> status[n] = GONE; broken = true                              \
       :: !TOO_LATE(n) && !voided[n] && REFUSED(n) -> status[n] = DONE_BAD; answered = n; ADD(bad, n)            \
       :: else ->                                                                                  \
          assert(!HAS(ran, n));                                                                    \
          assert(outcome[n] == AWAITED);                                                           \
          assert(starts[n] || state == n - 1);                                                     \
          ADD(ran, n);                                                                             \
          status[n] = RUNNING;                                                                     \
          running = n;                                                                             \
          broken = false;                                                                          \
          if                                                                                       \
          :: hangs > 0 -> hangs--; hung = true                                                     \
          :: true                                                                                  \
          fi                                                                                       \
       fi }

active proctype agent()
{
    byte m;

end:
    do
    REQUEST(1) REQUEST(2) REQUEST(3)
    BEGIN(1) BEGIN(2) BEGIN(3)
#if REQUESTS > 3
    REQUEST(4)
    BEGIN(4)
#endif
    :: atomic {
        running > 0 && !hung ->
        state = running;
        status[running] = DONE_GOOD;
        answered = running;
        ADD(good, running);
        running = 0
       }
    /* A rank fails, or was killed since it hung. */
    :: atomic {
        running > 0 && (hung -> outcome[running] != AWAITED : failures > 0) ->
        failures = (hung -> failures : failures - 1);
        hung = false;
        state = TORN;
        broken = true;
        status[running] = DONE_BAD;
        answered = running;
        ADD(bad, running);
        running = 0
       }
    :: atomic { taken > known_taken && !HAS(beats_taken, taken) -> ADD(beats_taken, taken) }
    :: atomic { answered > known_answered && !HAS(beats_answered, answered) -> ADD(beats_answered, answered) }
#ifndef NO_GAP
    /* What is kept and late counts as missing. Left out when the lead has nothing to say to it. */
    :: atomic {
        QUIET && taken + 1 < SIZE && (status[taken + 1] != HELD || TOO_LATE(taken + 1)) &&
        (taken + 2 < SIZE && status[taken + 2] == HELD && outcome[taken + 2] == AWAITED ||
         taken + 3 < SIZE && status[(taken + 3) % SIZE] == HELD && outcome[(taken + 3) % SIZE] == AWAITED) &&
        !(outcome[taken + 1] == AWAITED && late[taken + 1]) ->
        ADD(gaps, taken)
       }
#endif
    od
}

#define LOSE(set, n) :: atomic { losses > 0 && HAS(set, n) -> losses--; DEL(set, n) }
#define LOSE_ALL(n)                                                                                \
    LOSE(requests, n) LOSE(voids, n) LOSE(good, n) LOSE(bad, n) LOSE(gaps, n) LOSE(beats_taken, n)                \
    LOSE(beats_answered, n)
#ifdef LEAD_FIRST
#define PASS(n)                                                                                    \
    :: atomic { deadlines > 0 && outcome[n] == AWAITED && !late[n] && !lead_late[n] ->             \
       deadlines--; lead_late[n] = true }                                                          \
    :: atomic { lead_late[n] && !late[n] -> late[n] = true }
#else
#define PASS(n)                                                                                    \
    :: atomic { outcome[n] == AWAITED && !late[n] && (deadlines > 0 || hung && running == n) ->            \
       deadlines = (hung && running == n -> deadlines : deadlines - 1); late[n] = true }
#endif

active proctype faults()
{
end:
    do
    LOSE_ALL(1) LOSE_ALL(2) LOSE_ALL(3) LOSE(gaps, 0)
    PASS(1) PASS(2) PASS(3)
#if REQUESTS > 3
    LOSE_ALL(4)
    PASS(4)
#endif
    od
}
