/*
 * elide: wake-ups that are spared where nobody sleeps (channel/shm/gate.c: word_ring, word_sleep), alone: who publishes and who
 * answers, without deadlines, failures and slices, so that any wake-up that is missed is a deadlock. futex_gate.pml has all
 * the rest, and with ELIDE this, too.
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
byte word, asleep;           /* the ring that ranks sleep on, and how many say that they do */
byte bell;                   /* the coordinator's */
byte coordinator_sleeps;
byte left, left_of;          /* answers that the request lacks, and its number */
bool in_kernel[RANKS], coordinator_in_kernel; /* asleep in truth */
bool dead[RANKS];
byte crashes = CRASHES;

#define ANSWERED(r) (done[r] >= published || dead[r])

/* word_ring: moves the word, then looks, then wakes. */
inline ring_ranks()
{
#ifdef LOOK_FIRST
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

inline ring_coordinator()
{
#ifdef LOOK_FIRST
    bool nobody = coordinator_sleeps == 0;
    bell++;
#else
    bell++;
    bool nobody = coordinator_sleeps == 0;
#endif
    if
    :: !nobody -> coordinator_in_kernel = false
    :: else
    fi
}

active proctype coordinator()
{
    byte ticket;
    do
    :: published < REQUESTS ->
        atomic { left = RANKS; left_of = published + 1 };
        published++;
        ring_ranks();
        do
        :: ticket = bell;
            if
            :: ANSWERED(0) && ANSWERED(1) -> break
            :: else
            fi;
#ifdef TELL_LAST
            atomic { coordinator_in_kernel = (bell == ticket) };
            coordinator_sleeps = 1;
#else
            coordinator_sleeps++;
            /* the kernel looks at the word again */
            atomic { coordinator_in_kernel = (bell == ticket) };
#endif
            !coordinator_in_kernel;
            coordinator_sleeps--
        od
    :: else -> break
    od
}

proctype rank(byte r)
{
    byte ticket, taken;
    bool last;
    do
    :: taken == REQUESTS -> break
    :: else ->
        ticket = word;
        if
        :: published > taken ->
            taken++;
            done[r] = taken;
            /* The hint carries the number: who comes late counts for nobody. Who was last rings; and who finds that the
             * other is dead, whose answer nobody counts. */
            atomic {
                last = false;
                if
                :: left_of == taken -> left--; last = left == 0
                :: else
                fi
            };
            if
            :: last || dead[1 - r] -> ring_coordinator()
            :: else
            fi
        :: else ->
#ifdef TELL_LAST
            atomic { in_kernel[r] = (word == ticket) };
            asleep++;
#else
            asleep++;
            atomic { in_kernel[r] = (word == ticket) };
#endif
            if
            :: dead[r] -> break /* it stays counted */
            :: !in_kernel[r] && !dead[r] -> asleep--
            fi
        fi
    :: crashes > 0 && !dead[1 - r] -> /* its death is told: the supervisor wakes, always */
        crashes--;
        atomic { dead[r] = true; bell++; coordinator_in_kernel = false };
        break
    od
}

/* Killed in its sleep. */
active proctype killer()
{
    if
    :: atomic { crashes > 0 && in_kernel[0] -> crashes--; dead[0] = true; bell++; coordinator_in_kernel = false }
    :: true
    fi
}

init
{
    atomic { run rank(0); run rank(1) }
}
