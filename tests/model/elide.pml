/*
 * elide: wakes that are skipped when no thread sleeps (channel/attach/sealed/futex_gate.c: word_wake, word_sleep),
 * alone: a publisher and replying ranks, without deadlines, failures and slices, so that any lost
 * wakeup is a deadlock. futex_gate.pml has the rest, and with ELIDE this, too.
 *
 * Sizes (-D): REQUESTS; CRASHES of ranks, at most that many, between any two steps.
 */
#ifndef REQUESTS
#define REQUESTS 3
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#define RANKS 2

byte published, done[RANKS]; /* the shared state */
byte word, asleep;           /* the word that ranks block on, and how many are counted there */
byte collector_word;                   /* the coordinator's */
byte coordinator_sleeps;
byte left, left_of;          /* replies that the request lacks, and its number */
bool in_kernel[RANKS], coordinator_in_kernel; /* really blocked */
bool dead[RANKS];
byte crashes = CRASHES;

#define REPLIED(r) (done[r] >= published || dead[r])

/* word_wake: changes the word, then reads the count, then wakes. */
inline wake_ranks()
{
#ifdef CHECK_FIRST
    byte seen = asleep;
    word++;
    if
    :: seen > 0 -> in_kernel[0] = false; in_kernel[1] = false
    :: else
    fi
#else
    word++;
    if
    :: asleep > 0 -> atomic { in_kernel[0] = false; in_kernel[1] = false }
    :: else
    fi
#endif
}

inline wake_coordinator()
{
#ifdef CHECK_FIRST
    bool no_sleeper = coordinator_sleeps == 0;
    collector_word++;
#else
    collector_word++;
    bool no_sleeper = coordinator_sleeps == 0;
#endif
    if
    :: !no_sleeper -> coordinator_in_kernel = false
    :: else
    fi
}

active proctype coordinator()
{
    byte seen_word;
    do
    :: published < REQUESTS ->
        atomic { left = RANKS; left_of = published + 1 };
        published++;
        wake_ranks();
        do
        :: seen_word = collector_word;
            if
            :: REPLIED(0) && REPLIED(1) -> break
            :: else
            fi;
#ifdef COUNT_AFTER_CHECK
            atomic { coordinator_in_kernel = (collector_word == seen_word) };
            coordinator_sleeps = 1;
#else
            coordinator_sleeps++;
            /* the kernel compares the word again */
            atomic { coordinator_in_kernel = (collector_word == seen_word) };
#endif
            !coordinator_in_kernel;
            coordinator_sleeps--
        od
    :: else -> break
    od
}

proctype rank(byte r)
{
    byte seen_word, taken;
    bool last;
    do
    :: taken == REQUESTS -> break
    :: else ->
        seen_word = word;
        if
        :: published > taken ->
            taken++;
            done[r] = taken;
            /* The hint has the request's number: a late reply counts for no other request. The last
             * rank wakes; so does one that finds the other rank dead, whose reply is not counted. */
            atomic {
                last = false;
                if
                :: left_of == taken -> left--; last = left == 0
                :: else
                fi
            };
            if
            :: last || dead[1 - r] -> wake_coordinator()
            :: else
            fi
        :: else ->
#ifdef COUNT_AFTER_CHECK
            atomic { in_kernel[r] = (word == seen_word) };
            asleep++;
#else
            asleep++;
            atomic { in_kernel[r] = (word == seen_word) };
#endif
            if
            :: dead[r] -> break /* it stays counted */
            :: !in_kernel[r] && !dead[r] -> asleep--
            fi
        fi
    :: crashes > 0 && !dead[1 - r] -> /* the supervisor always wakes for a death */
        crashes--;
        atomic { dead[r] = true; collector_word++; coordinator_in_kernel = false };
        break
    od
}

/* Killed in its sleep. */
active proctype killer()
{
    if
    :: atomic { crashes > 0 && in_kernel[0] -> crashes--; dead[0] = true; collector_word++; coordinator_in_kernel = false }
    :: true
    fi
}

init
{
    atomic { run rank(0); run rank(1) }
}
