/*
 * node_takeover: two leads, of epochs 1 and 2, and the agent of one node.
 *
 * Lead 1 has admitted the agent. Lead 2 begins at any time; lead 1 may then be gone (KILLS) or live
 * on behind a partition. The link is a set of frames, as in node_request.pml; a HELLO and an ANSWER
 * go to both leads, as on a subject both listen to. An incarnation is {epoch, try}: each HELLO of
 * the agent that a lead answers. Requests of a lead go one at a time; the first of an incarnation
 * starts a chain (previous 0). Beats are not frames here, as in node_rejoin.pml.
 *
 * RESET: the other way to separate the epochs: an agent that is welcomed into a new incarnation
 * forgets what it took and the answers it kept, and sequences may begin anew.
 *
 * Sizes (-D): OLD and NEW (requests of lead 1 and of lead 2), LOSSES, DUPS, KILLS (of lead 1),
 * SILENCES (the agent takes its lead for lost, in error), GRACES (its ranks are dropped then),
 * RESUMES (lead 1 answers a HELLO), each at most that many.
 */
#ifndef OLD
#define OLD 2
#endif
#ifndef NEW
#define NEW 2
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef DUPS
#define DUPS 0
#endif
#ifndef KILLS
#define KILLS 0
#endif
#ifndef SILENCES
#define SILENCES 0
#endif
#ifndef GRACES
#define GRACES 0
#endif
#ifndef RESUMES
#define RESUMES 0
#endif

#define SEQUENCES (OLD + NEW + 2)
#define KEY(l, n) ((l) * SEQUENCES + (n)) /* lead 0 or 1, whose epochs are 1 and 2 */
#define TRIES 5

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define ADD(set, n) set = set | BIT(n)
#define DEL(set, n) set = set & ~BIT(n)
#define TAKE_FRAME(set, n)                                                                         \
    if                                                                                             \
    :: DEL(set, n)                                                                                 \
    :: dups > 0 -> dups--                                                                          \
    fi

/* ---- the link ---- */
byte hellos[2], welcomes[2];  /* to a lead, and from it: tries */
int requests, answers[2];     /* keys; answers to each lead */
/* Nothing is under way, but to a lead that is gone. */
#define QUIET                                                                                      \
    (hellos[1] == 0 && welcomes[0] == 0 && welcomes[1] == 0 && requests == 0 && answers[1] == 0 && \
     (!up[0] || hellos[0] == 0 && answers[0] == 0))
byte losses = LOSSES, dups = DUPS, kills = KILLS, silences = SILENCES, graces = GRACES,
     resumes = RESUMES;

/* ---- the frames' fields ---- */
byte hello_taken[TRIES];          /* the last sequence that the agent had taken */
byte hello_epoch[TRIES];          /* the epoch whose ranks it has, or 0 */
byte request_try[2 * SEQUENCES];  /* the incarnation */
byte previous[2 * SEQUENCES];

/* ---- the leads ---- */
bool up[2];
bool admitted[2];
byte admitted_try[2];
byte count[2], sequence[2], last_sent[2], awaited[2];
bool clean; /* ghost: lead 2's request was sent when no fault but a loss was left */
#define DONE (count[1] == NEW && awaited[1] == 0)

/* ---- the agent ---- */
byte epoch = 1, try = 1, incarnation = 1;
bool in = true, has_ranks = true;
byte taken, queued, running; /* a sequence, and two keys */
byte kept;                   /* the key whose answer is kept */
byte state;                  /* ghost: the key of what the ranks' state was made by last */
int ran;                     /* ghost */

#define SERVES(l) (epoch == l + 1 && in && incarnation == admitted_try[l] && admitted[l])
#ifdef NO_BEAT_EPOCH
#define LIFE(l) (admitted[l]) /* any beat of the agent */
#else
#define LIFE(l) SERVES(l)
#endif
#ifdef NO_ANSWER_EPOCH
#define OF_EPOCH(l, k) true
#else
#define OF_EPOCH(l, k) (k / SEQUENCES == l)
#endif

#ifdef NO_TRY_CHECK
#define NEWER(l, k) (!(admitted[l] && k == admitted_try[l]))
#else
#define NEWER(l, k) (k > admitted_try[l])
#endif
#ifdef NO_START_ABOVE
#define ABOVE(l, k) sequence[l]
#else
#define ABOVE(l, k) (sequence[l] > hello_taken[k] -> sequence[l] : hello_taken[k])
#endif
#ifdef NO_START_AT_TAKEOVER
#define FIRST_PREVIOUS(k) hello_taken[k]
#else
#define FIRST_PREVIOUS(k) 0
#endif
#ifdef NO_FAIL
#define FAIL(l)
#else
#define FAIL(l)                                                                                    \
    assert(l == 0 || awaited[l] == 0 || !clean);                                                   \
    awaited[l] = 0
#endif

/* Lead 1: only an agent that still has its ranks is resumed. */
#define HELLO_OLD(k)                                                                               \
    :: atomic { up[0] && HAS(hellos[0], k) -> DEL(hellos[0], k);                                   \
       if                                                                                          \
       :: admitted[0] && resumes > 0 && hello_epoch[k] == 1 && NEWER(0, k) ->                      \
          resumes--;                                                                               \
          ADD(welcomes[0], k)                                                                      \
       :: true                                                                                     \
       fi }
#define HELLO_NEW(k)                                                                               \
    :: atomic { up[1] && HAS(hellos[1], k) -> TAKE_FRAME(hellos[1], k);                            \
       if                                                                                          \
       :: NEWER(1, k) ->                                                                           \
          assert(!SERVES(1)); /* a node that is there and beats loses no incarnation */            \
          FAIL(1);                                                                                 \
          admitted[1] = true;                                                                      \
          admitted_try[1] = k;                                                                     \
          sequence[1] = ABOVE(1, k);                                                               \
          last_sent[1] = FIRST_PREVIOUS(k);                                                        \
          ADD(welcomes[1], k)                                                                      \
       :: !NEWER(1, k) && admitted[1] && k == admitted_try[1] -> ADD(welcomes[1], k)               \
       :: else                                                                                     \
       fi }

#define ANSWER(l, k)                                                                               \
    :: atomic { up[l] && HAS(answers[l], k) -> TAKE_FRAME(answers[l], k);                          \
       if                                                                                          \
       :: awaited[l] > 0 && OF_EPOCH(l, k) && awaited[l] == k % SEQUENCES ->                       \
          assert(k == KEY(l, awaited[l]));                                                         \
          assert(HAS(ran, k));                                                                     \
          awaited[l] = 0                                                                           \
       :: else                                                                                     \
       fi }
#define ANSWERS(l, n) ANSWER(l, KEY(0, n)) ANSWER(l, KEY(1, n))

#define LEAD_STEPS(l, most)                                                                        \
    :: atomic {                                                                                    \
        up[l] && admitted[l] && count[l] < most && awaited[l] == 0 && sequence[l] + 1 < SEQUENCES ->\
        count[l]++;                                                                                \
        sequence[l]++;                                                                             \
        request_try[KEY(l, sequence[l])] = admitted_try[l];                                        \
        previous[KEY(l, sequence[l])] = last_sent[l];                                              \
        last_sent[l] = sequence[l];                                                                \
        awaited[l] = sequence[l];                                                                  \
        clean = (l == 1 -> SERVES(1) && silences == 0 && graces == 0 : clean);                     \
        ADD(requests, KEY(l, sequence[l]))                                                         \
       }                                                                                           \
    :: atomic {                                                                                    \
        up[l] && awaited[l] > 0 && QUIET && SERVES(l) && queued != KEY(l, awaited[l]) &&           \
        running != KEY(l, awaited[l]) -> ADD(requests, KEY(l, awaited[l]))                         \
       }                                                                                           \
    /* Silence, death: what it awaits fails, and a lead of epoch 1 has no other node. */           \
    :: atomic {                                                                                    \
        up[l] && admitted[l] && (in || l == 0 && epoch == 2 || !has_ranks) && !LIFE(l) ->          \
        FAIL(l); admitted[l] = false }

active proctype old_lead()
{
    do
    HELLO_OLD(2) HELLO_OLD(3) HELLO_OLD(4)
    ANSWERS(0, 1) ANSWERS(0, 2) ANSWERS(0, 3) ANSWERS(0, 4) ANSWERS(0, 5)
    LEAD_STEPS(0, OLD)
    :: atomic { kills > 0 && up[0] -> kills--; up[0] = false; admitted[0] = false; awaited[0] = 0; break }
    :: atomic { awaited[0] == 0 && (count[0] == OLD || !admitted[0]) && DONE -> up[0] = false; break }
    od
}

active proctype new_lead()
{
    atomic { up[1] = true };
    do
    HELLO_NEW(2) HELLO_NEW(3) HELLO_NEW(4)
    ANSWERS(1, 1) ANSWERS(1, 2) ANSWERS(1, 3) ANSWERS(1, 4) ANSWERS(1, 5)
    LEAD_STEPS(1, NEW)
    :: atomic { DONE -> break }
    od
}

#ifdef KEEP_INCARNATION
#define HAS_INCARNATION true
#else
#define HAS_INCARNATION has_ranks
#endif
#ifdef NO_VOID_AT_WELCOME
#define VOID
#else
#define VOID queued = 0
#endif
#ifdef RESET
#define FORGET taken = 0; kept = 0
#else
#define FORGET
#endif
#ifdef NO_TRY_CHECK
#define THIS_TRY(k) (k > 1)
#else
#define THIS_TRY(k) (!in && k == try)
#endif

#define WELCOME(l, k)                                                                              \
    :: atomic { HAS(welcomes[l], k) -> TAKE_FRAME(welcomes[l], k);                                 \
       if                                                                                          \
       :: THIS_TRY(k) && l + 1 >= epoch && (l == 1 || HAS_INCARNATION) ->                                \
          in = true;                                                                               \
          if                                                                                       \
          :: l == 1 ->                                                                             \
             epoch = 2; incarnation = k; has_ranks = true;                                         \
             VOID;                                                                                 \
             FORGET                                                                                \
          :: l == 0 /* the incarnation it had */                                                   \
          fi                                                                                       \
       :: else                                                                                     \
       fi }

#ifdef NO_FREEZE
#define FROZEN false
#else
#define FROZEN (!in)
#endif
#ifdef NO_AGENT_EPOCH
#define MINE(l, n) HAS_INCARNATION
#else
#define MINE(l, n) (epoch == l + 1 && request_try[KEY(l, n)] == incarnation && HAS_INCARNATION)
#endif
#define REPLY(k) ADD(answers[0], k); ADD(answers[1], k)

#define REQUEST(l, n)                                                                              \
    :: atomic { HAS(requests, KEY(l, n)) -> TAKE_FRAME(requests, KEY(l, n));                       \
       if                                                                                          \
       :: MINE(l, n) && !FROZEN && n > taken && queued == 0 &&                                     \
          (previous[KEY(l, n)] == 0 || previous[KEY(l, n)] == taken) ->                            \
          taken = n; queued = KEY(l, n)                                                            \
       :: MINE(l, n) && n <= taken && kept != 0 && kept % SEQUENCES == n -> REPLY(kept)            \
       :: else                                                                                     \
       fi }

#define HELLO_NEXT                                                                                 \
    try++;                                                                                         \
    assert(try < TRIES); /* no more than the faults are */                                         \
    in = false;                                                                                    \
    hello_taken[try] = taken;                                                                      \
    hello_epoch[try] = (has_ranks -> epoch : 0);                                                   \
    ADD(hellos[0], try); ADD(hellos[1], try)

active proctype agent()
{
end:
    do
    WELCOME(0, 2) WELCOME(0, 3) WELCOME(0, 4) WELCOME(1, 2) WELCOME(1, 3) WELCOME(1, 4)
    REQUEST(0, 1) REQUEST(0, 2) REQUEST(0, 3) REQUEST(1, 1) REQUEST(1, 2) REQUEST(1, 3)
    REQUEST(1, 4) REQUEST(1, 5)
    :: atomic {
        queued != 0 && running == 0 ->
        assert(!HAS(ran, queued));
        assert(queued / SEQUENCES + 1 == epoch);
        assert(previous[queued] == 0 ||
            state == KEY(queued / SEQUENCES, previous[queued]));
        ADD(ran, queued);
        running = queued;
        queued = 0
       }
    :: atomic { running != 0 -> state = running; kept = running; REPLY(running); running = 0 }
    /* Its lead is silent, or it hears of a greater epoch. */
    :: atomic {
        in && !DONE && up[1] &&
        (epoch == 1 || silences > 0 || !SERVES(1)) ->
        silences = (epoch == 2 && SERVES(1) -> silences - 1 : silences);
        HELLO_NEXT
       }
    /* Again. */
    :: atomic { !in && !DONE && up[1] && QUIET -> ADD(hellos[1], try) }
    /* The grace time is over. */
    :: atomic {
        graces > 0 && has_ranks && !in ->
        graces--;
        has_ranks = false; state = 0; queued = 0; running = 0
       }
    od
}

#define LOSE(set, n) :: atomic { losses > 0 && HAS(set, n) -> losses--; DEL(set, n) }

active proctype faults()
{
end:
    do
    LOSE(welcomes[1], 2) LOSE(welcomes[1], 3) LOSE(hellos[1], 2) LOSE(hellos[1], 3)
    LOSE(requests, KEY(0, 1)) LOSE(requests, KEY(0, 2)) LOSE(requests, KEY(1, 1))
    LOSE(requests, KEY(1, 2)) LOSE(requests, KEY(1, 3)) LOSE(requests, KEY(1, 4))
    LOSE(answers[0], KEY(0, 1)) LOSE(answers[0], KEY(0, 2)) LOSE(answers[1], KEY(1, 1))
    LOSE(answers[1], KEY(1, 2)) LOSE(answers[1], KEY(1, 3)) LOSE(answers[1], KEY(1, 4))
    od
}

init { atomic { up[0] = true; admitted[0] = true; admitted_try[0] = 1 } }
