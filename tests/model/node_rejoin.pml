/*
 * node_rejoin: one lead and the agents of one node name, over HELLO, death and return.
 *
 * Agent 0 is admitted first; agent 1 has the same name (SECOND: it is there from the beginning,
 * else it is started when agent 0 has crashed). The link is a set of frames, as in
 * node_request.pml; every frame may reach either agent, as on a subject both listen to. Requests go
 * one at a time. Beats are not frames here: the lead has signs of life of the node if an agent
 * beats that it listens to, an agent if the lead beats under its incarnation.
 *
 * A request may go to all nodes: then it counts for an agent that has its version of the peers, which
 * stands for the incarnations of all. WELCOME has the version, and so have beats with a table
 * (frames, then). Other nodes are only their admissions, which change the version. The lead need not
 * know whether the node has the version: if not, the request is as if lost.
 *
 * A timer that would change nothing is left out, so that no run is endless. Wrong verdicts, which
 * lost beats cause, are counted: the lead's (DEATHS) and an agent's (SILENCES).
 *
 * Sizes (-D): REQUESTS; LOSSES, DUPS, DEATHS, SILENCES, CRASHES (of agent 0), RANK_LOSSES (an agent
 * drops its ranks: they died, or its grace time is over), ALLS (requests that go to all), PEERS
 * (admissions of other nodes), each at most that many; SECOND.
 */
#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef DUPS
#define DUPS 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef SILENCES
#define SILENCES 0
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef RANK_LOSSES
#define RANK_LOSSES 0
#endif
#ifndef ALLS
#define ALLS 0
#endif
#ifndef PEERS
#define PEERS 0
#endif

#define SIZE (REQUESTS + 1)
#define TRIES 6 /* HELLOs of an agent */
#define KEY(i, try) ((i) * TRIES + (try))
#define NOBODY 2
#define VERSIONS 8

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define ADD(set, n) set = set | BIT(n)
#define DEL(set, n) set = set & ~BIT(n)
#define TAKE_FRAME(set, n)                                                                         \
    if                                                                                             \
    :: DEL(set, n)                                                                                 \
    :: dups > 0 -> dups--                                                                          \
    fi

/* ---- the link: HELLO and WELCOME (agent, try), REQUEST, REQUEST_ALL and ANSWER (sequence), a table of
 * the peers (version) ---- */
short hellos, welcomes;
byte requests, requests_all, answers, tables;
#define QUIET (hellos == 0 && welcomes == 0 && requests == 0 && requests_all == 0 && answers == 0)
byte losses = LOSSES, dups = DUPS, deaths = DEATHS, silences = SILENCES, crashes = CRASHES,
     rank_losses = RANK_LOSSES, alls = ALLS, peers = PEERS;

/* ---- the frames' fields ---- */
byte hello_holds[2 * TRIES]; /* the incarnation whose ranks the agent has, or 0 */
byte welcome_is[2 * TRIES];  /* the incarnation */
byte ended_before[2 * TRIES]; /* ghost: requests up to this one have ended at the lead */
byte request_of[SIZE];       /* its incarnation */
byte previous[SIZE];
#if ALLS
byte welcome_version[2 * TRIES];
byte version_of[SIZE];       /* of a request to all: the version of the peers */
byte table_of[VERSIONS];     /* the incarnation that the table has for this node */
#endif

/* ---- the lead ---- */
byte present, given;    /* the node's incarnation, or 0; the last one given */
byte holder = NOBODY;
byte last_try[2];
byte sent, last_sent, awaited;
bool clean; /* ghost: the awaited request was sent when no fault but a loss was left */
bool done;
byte version = 1;            /* of the peers */

/* ---- the agents ---- */
bool alive[2], in[2];
byte try[2], incarnation[2];
byte taken[2], queued[2], running[2];
byte kept[2];
byte has_version[2];
byte state[2], void_to[2]; /* ghosts: the last request in the ranks' state; WELCOME's ended_before */
byte ran;                  /* ghost */

/* Without the check any frame of this name counts, also a HELLO. */
#ifdef NO_LEAD_INCARNATION
#define BEATS_OF(i) (alive[i] && present != 0)
#else
#define BEATS_OF(i) (alive[i] && present != 0 && in[i] && incarnation[i] == present)
#endif
#define BEATS (BEATS_OF(0) || BEATS_OF(1))
#define SILENT (!BEATS && holder < 2 && (!alive[holder] || in[holder]))
#define FAULTLESS                                                                                  \
    (deaths == 0 && silences == 0 && crashes == 0 && rank_losses == 0 && holder < 2 &&             \
     alive[holder] && in[holder] && incarnation[holder] == present)

#ifdef NO_FAIL_AT_DEATH
#define FAIL_AWAITED
#else
#define FAIL_AWAITED                                                                               \
    assert(awaited == 0 || !clean);                                                                \
    awaited = 0
#endif

#ifdef NO_REFUSAL
#define REFUSES(i) false
#else
#define REFUSES(i) (present != 0 && holder != i)
#endif
#ifdef NO_TRY_CHECK
#define NEWER(i, k) true
#else
#define NEWER(i, k) (k > last_try[i])
#endif
#ifdef RESUME_ALWAYS
#define RESUMES(i, k) (present != 0 && holder == i)
#else
#define RESUMES(i, k) (present != 0 && holder == i && hello_holds[KEY(i, k)] == present)
#endif
#ifdef NO_START_AT_REJOIN
#define START_SENT
#else
#define START_SENT last_sent = 0
#endif

#if ALLS
#define NEW_VERSION                                                                                \
    version++;                                                                                     \
    assert(version < VERSIONS);                                                                    \
    table_of[version] = present
#define SAY_VERSION(i, k) welcome_version[KEY(i, k)] = version
#define TAKE_VERSION(i, k) has_version[i] = welcome_version[KEY(i, k)]
#else
#define NEW_VERSION
#define SAY_VERSION(i, k)
#define TAKE_VERSION(i, k)
#endif
#ifdef SAME_VERSION
#define ADMIT_VERSION
#else
#define ADMIT_VERSION NEW_VERSION
#endif

#define WELCOME(i, k)                                                                              \
    last_try[i] = k;                                                                               \
    SAY_VERSION(i, k);                                                                             \
    welcome_is[KEY(i, k)] = present;                                                               \
    ended_before[KEY(i, k)] = (awaited > 0 -> awaited - 1 : sent);                                 \
    ADD(welcomes, KEY(i, k))

/* A HELLO: known (its WELCOME was lost), refused, resumed, or a new incarnation. */
#define HELLO(i, k)                                                                                \
    :: atomic { HAS(hellos, KEY(i, k)) -> TAKE_FRAME(hellos, KEY(i, k));                           \
       if                                                                                          \
       :: REFUSES(i)                                                                               \
       :: !REFUSES(i) && !NEWER(i, k) && k < last_try[i]                                           \
       :: !REFUSES(i) && !NEWER(i, k) && k == last_try[i] && present != 0 &&                       \
          welcome_is[KEY(i, k)] == present -> WELCOME(i, k)                                        \
       :: !REFUSES(i) && NEWER(i, k) && RESUMES(i, k) -> WELCOME(i, k)                             \
       :: else ->                                                                                  \
          /* Nobody who is there and beats loses its place. */                                     \
          assert(holder == NOBODY || present == 0 || !alive[holder] || !in[holder] ||              \
              incarnation[holder] != present);                                                     \
          FAIL_AWAITED;                                                                            \
          given++;                                                                                 \
          present = given;                                                                         \
          holder = i;                                                                              \
          ADMIT_VERSION;                                                                           \
          START_SENT;                                                                              \
          WELCOME(i, k)                                                                            \
       fi }

#ifdef NO_SEQUENCE_CHECK
#define WAITS_FOR(n) (awaited > 0)
#else
#define WAITS_FOR(n) (awaited == n)
#endif
#if defined(NO_LEAD_INCARNATION) || defined(NO_ANSWER_INCARNATION)
#define OF_PRESENT(n) true
#else
#define OF_PRESENT(n) (request_of[n] == present)
#endif
#define ANSWER(n)                                                                                  \
    :: atomic { HAS(answers, n) -> TAKE_FRAME(answers, n);                                         \
       if                                                                                          \
       :: WAITS_FOR(n) && OF_PRESENT(n) ->                                                         \
          assert(awaited == n && request_of[n] == present && HAS(ran, n));                         \
          awaited = 0                                                                              \
       :: else                                                                                     \
       fi }

active proctype lead()
{
    do
    HELLO(0, 1) HELLO(0, 2) HELLO(0, 3) HELLO(0, 4) HELLO(0, 5)
    HELLO(1, 1) HELLO(1, 2) HELLO(1, 3) HELLO(1, 4) HELLO(1, 5)
    ANSWER(1) ANSWER(2) ANSWER(3)
    :: atomic {
        sent < REQUESTS && present != 0 && awaited == 0 ->
        sent++;
        request_of[sent] = present;
        previous[sent] = last_sent;
        last_sent = sent;
        awaited = sent;
        clean = FAULTLESS;
        if
        :: ADD(requests, sent)
#if ALLS
        :: alls > 0 -> alls--; version_of[sent] = version; ADD(requests_all, sent)
#endif
        fi
       }
#if PEERS
    /* Another node is admitted; the beats have the table until the agent has it. */
    :: atomic { peers > 0 && !done -> peers--; NEW_VERSION }
    :: atomic {
        present != 0 && !done && holder < 2 && alive[holder] && in[holder] && incarnation[holder] == present &&
        has_version[holder] != version && !HAS(tables, version) ->
        ADD(tables, version)
       }
#endif
    /* Asked again, if no agent's beat says that it has been taken. */
    :: atomic {
        awaited > 0 && QUIET && present != 0 && holder < 2 && alive[holder] && incarnation[holder] == present &&
        in[holder] && queued[holder] != awaited && running[holder] != awaited ->
        ADD(requests, awaited)
       }
    /* Silence, suspicion, death. An agent that says HELLO will be back before that. */
    :: atomic {
        present != 0 && !done && (deaths > 0 || SILENT) ->
        deaths = (SILENT -> deaths : deaths - 1);
        FAIL_AWAITED;
        present = 0
       }
    :: atomic { sent == REQUESTS && awaited == 0 && !done -> done = true }
    :: atomic { done && QUIET -> break }
    od
}

#ifdef NO_VOID_AT_WELCOME
#define VOID(i)
#else
#define VOID(i) queued[i] = 0
#endif

/* Ranks that are still in a request of the old incarnation end it first. */
#define WELCOMED(i, k)                                                                             \
    :: atomic { HAS(welcomes, KEY(i, k)) -> TAKE_FRAME(welcomes, KEY(i, k));                       \
       if                                                                                          \
       :: alive[i] && !in[i] && try[i] == k ->                                                     \
          in[i] = true;                                                                            \
          if                                                                                       \
          :: incarnation[i] != welcome_is[KEY(i, k)] -> VOID(i)                                    \
          :: else                                                                                  \
          fi;                                                                                      \
          incarnation[i] = welcome_is[KEY(i, k)];                                                  \
          TAKE_VERSION(i, k);                                                                      \
          void_to[i] = ended_before[KEY(i, k)]                                                     \
       :: else                                                                                     \
       fi }

#ifdef NO_AGENT_INCARNATION
#define FOR(i, n) alive[i]
#else
#define FOR(i, n) (alive[i] && incarnation[i] == request_of[n])
#endif
#ifdef NO_VERSION_CHECK
#define FOR_ALL(i, n) (alive[i] && incarnation[i] != 0)
#else
#define FOR_ALL(i, n) (alive[i] && incarnation[i] != 0 && has_version[i] == version_of[n])
#endif
#ifdef NO_TABLE_INCARNATION
#define TABLE_FOR(i, v) (alive[i] && in[i])
#else
#define TABLE_FOR(i, v) (alive[i] && in[i] && incarnation[i] == table_of[v])
#endif
/* Depth 1: one that does not follow is not kept. */
#define REQUEST(i, n) TAKE_REQUEST(i, n, requests, FOR(i, n))
#define TAKE_REQUEST(i, n, set, for)                                                               \
    :: atomic { HAS(set, n) && for -> TAKE_FRAME(set, n);                                          \
       if                                                                                          \
       :: n > taken[i] && (previous[n] == 0 || previous[n] == taken[i]) && queued[i] == 0 ->       \
          taken[i] = n; queued[i] = n                                                              \
       :: n <= taken[i] && kept[i] == n -> ADD(answers, n)                                         \
       :: else                                                                                     \
       fi }
#define STRAY(n)                                                                                   \
    :: atomic { HAS(requests, n) && !FOR(0, n) && !FOR(1, n) -> TAKE_FRAME(requests, n) }

#if ALLS
#define REQUEST_ALL(i, n)                                                                          \
    TAKE_REQUEST(i, n, requests_all, FOR_ALL(i, n))                                                \
    :: atomic { HAS(requests_all, n) && !FOR_ALL(0, n) && !FOR_ALL(1, n) -> TAKE_FRAME(requests_all, n) }
#else
#define REQUEST_ALL(i, n)
#endif
#if PEERS
#define TABLE(i, v)                                                                                \
    :: atomic { HAS(tables, v) && TABLE_FOR(i, v) -> TAKE_FRAME(tables, v);                        \
       has_version[i] = (has_version[i] > v -> has_version[i] : v) }                               \
    :: atomic { HAS(tables, v) && !TABLE_FOR(0, v) && !TABLE_FOR(1, v) -> TAKE_FRAME(tables, v) }
#else
#define TABLE(i, v)
#endif

#define HELLO_NEXT(i, holds)                                                                       \
    try[i]++;                                                                                      \
    assert(try[i] < TRIES);                                                                        \
    in[i] = false;                                                                                 \
    hello_holds[KEY(i, try[i])] = holds;                                                           \
    ADD(hellos, KEY(i, try[i]))

#ifdef KEEP_INCARNATION
#define LEAVE(i)
#else
#define LEAVE(i) incarnation[i] = 0
#endif

#ifdef NO_HELLO_AT_SILENCE
#define HELLO_AT_SILENCE false
#else
#define HELLO_AT_SILENCE true
#endif

proctype agent(byte i)
{
end:
    do
    WELCOMED(i, 1) WELCOMED(i, 2) WELCOMED(i, 3) WELCOMED(i, 4) WELCOMED(i, 5)
    REQUEST(i, 1) REQUEST(i, 2) REQUEST(i, 3)
    STRAY(1) STRAY(2) STRAY(3)
    REQUEST_ALL(i, 1) REQUEST_ALL(i, 2) REQUEST_ALL(i, 3)
    TABLE(i, 2) TABLE(i, 3) TABLE(i, 4) TABLE(i, 5) TABLE(i, 6) TABLE(i, 7)
    :: atomic {
        alive[i] && queued[i] > 0 && running[i] == 0 ->
        assert(!HAS(ran, queued[i]));
        assert(queued[i] > void_to[i]);
        assert(previous[queued[i]] == 0 || previous[queued[i]] == state[i]);
        ADD(ran, queued[i]);
        running[i] = queued[i];
        queued[i] = 0
       }
    :: atomic {
        alive[i] && running[i] > 0 ->
        state[i] = running[i];
        kept[i] = running[i];
        ADD(answers, running[i]);
        running[i] = 0
       }
    /* The lead's beats stay out: HELLO, with the ranks kept. */
    :: atomic {
        alive[i] && in[i] && !done && HELLO_AT_SILENCE && (silences > 0 || incarnation[i] != present) ->
        silences = (incarnation[i] != present -> silences : silences - 1);
        HELLO_NEXT(i, incarnation[i])
       }
    /* Again, if the lead would not refuse it. */
    :: atomic {
        alive[i] && !in[i] && !done && QUIET && !REFUSES(i) -> ADD(hellos, KEY(i, try[i]))
       }
    :: atomic {
        alive[i] && in[i] && rank_losses > 0 ->
        rank_losses--;
        state[i] = 0; queued[i] = 0; running[i] = 0;
        LEAVE(i);
        HELLO_NEXT(i, incarnation[i])
       }
    od
}

#define LOSE(set, n) :: atomic { losses > 0 && HAS(set, n) -> losses--; DEL(set, n) }
#define LOSE_TRY(k)                                                                                \
    LOSE(hellos, KEY(0, k)) LOSE(hellos, KEY(1, k)) LOSE(welcomes, KEY(0, k)) LOSE(welcomes, KEY(1, k))

active proctype faults()
{
end:
    do
    LOSE_TRY(1) LOSE_TRY(2) LOSE_TRY(3) LOSE_TRY(4) LOSE_TRY(5)
    LOSE(answers, 1) LOSE(answers, 2) LOSE(answers, 3)
    LOSE(requests, 1) LOSE(requests, 2) LOSE(requests, 3)
    LOSE(requests_all, 1) LOSE(requests_all, 2) LOSE(requests_all, 3)
#if PEERS
    LOSE(tables, 2) LOSE(tables, 3) LOSE(tables, 4) LOSE(tables, 5) LOSE(tables, 6) LOSE(tables, 7)
#endif
    /* The machine is started again: another process, without ranks. */
    :: atomic {
        crashes > 0 && alive[0] ->
        crashes--;
        alive[0] = false; queued[0] = 0; running[0] = 0;
        if
        :: !alive[1] -> alive[1] = true; try[1] = 1; ADD(hellos, KEY(1, 1))
        :: else
        fi
       }
    od
}

init
{
    atomic {
        alive[0] = true;
        try[0] = 1;
        ADD(hellos, KEY(0, 1));
#ifdef SECOND
        alive[1] = true;
        try[1] = 1;
        ADD(hellos, KEY(1, 1));
#endif
        run agent(0);
        run agent(1)
    }
}
