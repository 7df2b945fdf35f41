/*
 * group: the round of coxswain/group.h that every operation is made of, here a gather of
 * values, with epochs, aborts, deadlines and death.
 *
 * The words of the ranks carry the events: `arrived` {epoch, index} and `aborted_at`, each written
 * by its rank alone and only growing. The wakeup word and `counted` {epoch, index, how many} are
 * hints that all ranks may write. README.md lists what is left out and why; check.sh runs this file
 * in several sizes, and once more for each rule with that rule removed (the NO_ switches), which
 * must fail.
 *
 * Every rank does OPS operations in each epoch and then aligns to the next one, without waiting for
 * the others; also after COX_ABORTED and COX_TIMEOUT. After COX_PEER_DEAD it ends.
 *
 * Sizes (-D): RANKS, EPOCHS, OPS; CRASHES, ABORTS (of rank 0's present epoch, from a thread of its
 * own), DEADLINES (that pass), ALIGNS (between any two operations, without cause), MEDDLES
 * (arbitrary writes to the hints) each at most that many; CRASH_LAST: of three ranks only the last
 * may die; BARRIER: no values; SLICE: a waiter checks again after a while, also for deaths.
 *
 * INCARNATIONS: a dead rank is started again, and all form the group anew, at most that many times,
 * each in the next of WINDOWS windows (IN_TURN: once all have taken the previous init), where
 * CRASH_LAST is of two ranks, too; with SLICE, and without ABORTS, ALIGNS, MEDDLES, BARRIER.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef ABORTS
#define ABORTS 0
#endif
#ifndef DEADLINES
#define DEADLINES 0
#endif
#ifndef ALIGNS
#define ALIGNS 0
#endif
#ifndef MEDDLES
#define MEDDLES 0
#endif

#ifndef INCARNATIONS
#define INCARNATIONS 1
#endif
#ifndef WINDOWS
#define WINDOWS INCARNATIONS
#endif

#define TORN 255 /* bytes that are being written */
#define WORD(epoch, index) ((epoch) * 8 + (index))
#define EPOCH(word) ((word) / 8)

/* ---- one line and two slots per rank, their only writer ---- */
#if INCARNATIONS > 1
byte arrived[RANKS * WINDOWS]; /* per window; a local `window` is the current one */
#else
#define window 0
byte arrived[RANKS] = WORD(1, 0);
#endif
byte aborted_at[RANKS * WINDOWS]; /* the last epoch that is over for this rank */
byte slot[2 * RANKS * WINDOWS]; /* the word of the value's operation stands for its bytes */

/* ---- hints ---- */
byte counted_word[WINDOWS], counted[WINDOWS]; /* one word: read and changed in one step */
bool wakeup_moved[RANKS * WINDOWS];             /* the futex word is no longer what this rank read */
bool wakeup_news[RANKS * WINDOWS] = true;       /* woken, since this rank's last check, for more than arrivals */
bool marked[WINDOWS];                         /* in the futex word itself: a rank sleeps, or did */
bool sleeps[RANKS * WINDOWS];                 /* in FUTEX_WAIT */
#define AT(q) (window * RANKS + (q))

/* ---- private to the process of a rank ---- */
byte present[RANKS] = 1; /* epoch */
bool killed[RANKS];      /* makes no more steps; its pidfd shows that */

/* ---- faults that may still happen, and variables of the properties ---- */
byte crashes = CRASHES, aborts = ABORTS, deadlines = DEADLINES, aligns = ALIGNS, meddles = MEDDLES;
#ifdef BARRIER
byte reached[EPOCHS * RANKS]; /* the index of the last operation that the rank began in the epoch */
#define REACHED(q) reached[(epoch - 1) * RANKS + (q)]
#endif
#if INCARNATIONS > 1
byte spoiled[INCARNATIONS + 1];
#else
byte spoiled; /* the last epoch that a rank aborted or left, or in which a deadline passed */
#define SPOILED spoiled
#endif

#if INCARNATIONS > 1
#define SPOILED spoiled[incarnation]
#endif
#define SPOIL(epoch) SPOILED = (SPOILED < (epoch) -> (epoch) : SPOILED)
#if RANKS == 2
#define ALL(what, value) what[AT(0)] = value; what[AT(1)] = value
#else
#define ALL(what, value) what[AT(0)] = value; what[AT(1)] = value; what[AT(2)] = value
#endif

/* ---- incarnations ---- */
#if INCARNATIONS > 1
#define EMPTY 0
#define JOINED 1
#define WHOLE 2
#define LEFT 3
#define FAILED 4
/* In each window, per rank: its state, its incarnation, and which process of the rank it is. */
byte holder[RANKS * WINDOWS];
byte holder_incarnation[RANKS * WINDOWS], holder_process[RANKS * WINDOWS];
byte told = 1;       /* the last incarnation that an init was sent for */
byte init_ended = 1; /* the inits up to here have ended, with a death */
byte process[RANKS] = 1;
bool gone[RANKS]; /* its process has made its last step */
byte born[RANKS]; /* the first incarnation for a process that has read nothing yet */
byte trouble; /* a rank has died in this incarnation, or was dead when it began */
byte in_incarnation[RANKS] = 1; /* the incarnation whose words the rank writes */
#define VALUE (MINE + 32 * incarnation)
#else
#define VALUE MINE
#endif

/* With several incarnations a scan of all ranks, or a wake, is one step: the other runs have the
 * steps in between. */
#if INCARNATIONS > 1
#define STEP atomic
#else
#define STEP
#endif

/* The futex word gets another value and loses its mark, in one step; sleepers are woken if it had
 * one. */
inline wake_all()
{
    STEP {
#ifdef WORD_AFTER_WAKE
    if
    :: d_step { marked[window] -> ALL(sleeps, false); }
    :: atomic { !marked[window] }
    fi;
    d_step { ALL(wakeup_moved, true); marked[window] = false; }
#else
    if
    :: d_step { marked[window] -> ALL(wakeup_moved, true); marked[window] = false; }
        d_step { ALL(sleeps, false); }
    :: d_step { !marked[window] -> ALL(wakeup_moved, true); }
    fi;
#endif
    }
}

/* A wake for other news than arrivals: a waiter without it checks arrivals only. */
inline wake_news()
{
    STEP {
#ifndef NO_NEWS
    d_step { ALL(wakeup_news, true); }
#endif
    wake_all();
    }
}

/* The mark is set if the word is still what was read; the kernel compares the word including the
 * mark. */
#ifdef NO_MARK
#define SET_MARK skip
#else
#define SET_MARK marked[window] = true
#endif

/* A rank that aborts stores it in a word that only grows: a delayed abort does not undo a later
 * one. */
#ifdef NO_GROWING
#define GIVE_UP(r, epoch) aborted_at[AT(r)] = epoch
#else
#define GIVE_UP(r, epoch) aborted_at[AT(r)] = (aborted_at[AT(r)] < (epoch) -> (epoch) : aborted_at[AT(r)])
#endif

#define FOR_GOOD 254
#define MINE WORD(epoch, index)
#define SLOT(q) slot[AT(q) * 2 + index % 2]
#ifdef NO_PARITY
#undef SLOT
#define SLOT(q) slot[AT(q) * 2]
#endif
#ifdef NO_EPOCH_CHECK
#define THERE(q) (arrived[AT(q)] >= MINE)
#define GONE(q) (aborted_at[AT(q)] >= epoch)
#else
#define THERE(q) (arrived[AT(q)] >= MINE && EPOCH(arrived[AT(q)]) == epoch)
#define GONE(q) (aborted_at[AT(q)] >= epoch || EPOCH(arrived[AT(q)]) > epoch)
#endif

#if INCARNATIONS > 1
/* Its pidfd is that of the process which joined. */
#define DIED(q) ((q) != r && (killed[q] || process[q] != met[q]))
#define LEFT_IT(q) (holder[AT(q)] == LEFT || holder[AT(q)] == FAILED)
#define IS_WHOLE(q) (holder[AT(q)] == WHOLE || holder[AT(q)] == LEFT)
#if RANKS == 2
#define SOME_WHOLE (IS_WHOLE(0) || IS_WHOLE(1))
#else
#define SOME_WHOLE (IS_WHOLE(0) || IS_WHOLE(1) || IS_WHOLE(2))
#endif
#elif CRASHES > 0
#define DIED(q) killed[q]
#define LEFT_IT(q) false
#else
#define DIED(q) false
#define LEFT_IT(q) false
#endif
#define OTHERS (((1 << RANKS) - 1) & ~(1 << r))
#define DIED_MISSING(q) (DIED(q) && ((missing >> (q)) & 1))
#ifdef NO_DEAD_BEFORE_GONE
#define ABORTED_FIRST true
#else
#define ABORTED_FIRST false
#endif

#if RANKS == 2
#define TOLD_DEAD (aborted_at[AT(1 - r)] == FOR_GOOD)
#else
#define TOLD_DEAD (aborted_at[AT((r + 1) % RANKS)] == FOR_GOOD || aborted_at[AT((r + 2) % RANKS)] == FOR_GOOD)
#endif

/* What a slice would find; one that finds nothing is left out. */
#define NEWS(q) (q != r && (THERE(q) -> ((missing >> (q)) & 1) : GONE(q) || DIED(q) || LEFT_IT(q)))
#if RANKS == 2
#define SLICE_HELPS (NEWS(0) || NEWS(1))
#else
#define SLICE_HELPS (NEWS(0) || NEWS(1) || NEWS(2))
#endif

#if INCARNATIONS > 1
#define HAS_LEFT left
#if RANKS == 2
#define STILL_THERE(q) ((q) < 2 && ((missing >> (q)) & 1) && THERE((q) % 2))
#else
#define STILL_THERE(q) (((missing >> (q)) & 1) && THERE(q))
#endif
#else
#define HAS_LEFT false
#endif

proctype rank(byte r)
{
    byte epoch = 1, index = 0, q = 0, missing = 0;
    bool due = false, gave_up = false, whole = true, heard = false;
#if INCARNATIONS > 1
    byte incarnation = 1, window = 1 % WINDOWS, met[RANKS] = 1;
    bool left = false, member = true;
again:
    {
        if
        :: atomic { member }
        :: atomic { !member -> goto idle; }
        fi;
#else
    {
        skip;
#endif
begin:  if
#if INCARNATIONS > 1
        /* The next request is an init. */
        :: atomic { told > incarnation -> goto idle; }
#endif
        :: atomic { index == OPS -> goto next; }
        :: atomic { index < OPS && aborted_at[AT(r)] >= epoch -> goto aborted; }
        :: atomic {
            index < OPS && aborted_at[AT(r)] < epoch ->
            index++;
#ifdef NO_VALUE_FIRST
            arrived[AT(r)] = MINE;
#endif
#ifndef BARRIER
            SLOT(r) = TORN;
#endif
           }
#if ALIGNS > 0
        :: atomic { aligns > 0 && epoch < EPOCHS && index < OPS -> aligns--; goto next; }
#endif
        fi;
        STEP {
#ifndef BARRIER
        SLOT(r) = VALUE;
#endif
        /* The wakeup word is read before this rank is counted, and before each check of the words. */
#ifdef BARRIER
        atomic { arrived[AT(r)] = MINE; REACHED(r) = index; }
#else
        arrived[AT(r)] = MINE;
#endif
#ifndef NO_WORD_FIRST
        wakeup_moved[AT(r)] = false;
#endif
        }
        if
#ifdef COUNT_OVERWRITES
        :: atomic { counted_word[window] != MINE -> counted_word[window] = MINE; counted[window] = 1; goto early; }
#else
        :: atomic { counted_word[window] < MINE -> counted_word[window] = MINE; counted[window] = 1; goto early; }
        /* A rank has seen all arrive, and is further. A rank that can no longer be counted wakes
         * the sleepers. */
        :: atomic { counted_word[window] > MINE }
#ifndef NO_WAKE_BEHIND
            wake_all();
#endif
#endif
        :: atomic {
            counted_word[window] == MINE ->
            counted[window]++;
            if
            :: counted[window] >= RANKS
            :: else -> goto early;
            fi
           }
            wake_all();
        fi;
        goto scan;
        /* The last rank to arrive will wake: without news there is nothing to check. */
early:  if
        :: atomic { wakeup_news[AT(r)] -> goto scan; }
        :: atomic { !wakeup_news[AT(r)] -> missing = OTHERS; goto sleeps_on; }
        fi;
look:
#ifndef NO_WORD_FIRST
        wakeup_moved[AT(r)] = false;
#endif
scan:   atomic {
            q = 0;
            missing = 0;
            gave_up = false;
#if INCARNATIONS > 1
            left = false;
#endif
        }
        STEP {
        do
        :: d_step {
            q < RANKS ->
            if
            :: q != r && !THERE(q) -> missing = missing | (1 << q);
            :: else
            fi;
            q++;
           }
        :: atomic { q == RANKS -> q = 0; break }
        od
        }
        if
        /* News that end the epoch stay news in the next round. */
#ifndef NO_NEWS_KEPT
        :: atomic { missing == 0 -> due = false; wakeup_news[AT(r)] = wakeup_news[AT(r)] || heard; heard = false; }
#else
        :: atomic { missing == 0 -> due = false; wakeup_news[AT(r)] = false; heard = false; }
#endif
        :: atomic { missing > 0 && !due && !heard && !wakeup_news[AT(r)] -> goto sleeps_on; }
        :: atomic { missing > 0 && (due || heard || wakeup_news[AT(r)]) -> heard = true; wakeup_news[AT(r)] = false; }
            /* News are taken before the words that they announce are read. Those words only grow,
             * so reading one after the other finds what one atomic read at the beginning or at the
             * end would have found. */
            d_step {
                do
                :: q < RANKS ->
#ifndef NO_ABORT_WORD
                    gave_up = gave_up || GONE(q);
#endif
#if INCARNATIONS > 1
                    left = left || (q != r && LEFT_IT(q) && ((missing >> (q)) & 1) && !THERE(q));
#endif
                    q++;
                :: else -> q = 0; break
                od
            }
#if CRASHES > 0
            /* A rank that finds the epoch over then checks for deaths: they may be the cause. */
            if
            :: atomic { due || HAS_LEFT || (gave_up && !ABORTED_FIRST) }
                do
                :: atomic { q < RANKS && !DIED_MISSING(q) -> q++; }
                :: atomic {
                    q < RANKS && DIED_MISSING(q) ->
#ifndef NO_DEAD_FIRST
                    if
                    :: THERE(q) -> q = 0; goto look; /* it had arrived by then */
                    :: else
                    fi;
#endif
                    assert(!THERE(q));
                    goto peer_dead;
                   }
                :: atomic { q == RANKS -> q = 0; break }
                od
            :: atomic { !due && !HAS_LEFT && !(gave_up && !ABORTED_FIRST) }
            fi;
#endif
#if INCARNATIONS > 1
            /* A rank that has left may have arrived before. */
            if
            :: atomic { left && (STILL_THERE(0) || STILL_THERE(1) || STILL_THERE(2)) -> goto look; }
            :: atomic { left && !(STILL_THERE(0) || STILL_THERE(1) || STILL_THERE(2)) -> goto peer_dead; }
            :: atomic { !left }
            fi;
#endif
            if
            :: atomic { gave_up && TOLD_DEAD -> goto peer_dead; }
            :: atomic { gave_up && !TOLD_DEAD -> goto aborted; }
            :: atomic { !gave_up -> due = false; heard = false; }
            fi;
sleeps_on:
#ifdef NO_WORD_FIRST
            wakeup_moved[AT(r)] = false;
#endif
            if
            :: atomic { wakeup_moved[AT(r)] -> goto look; }
            :: atomic { !wakeup_moved[AT(r)] -> SET_MARK; }
            fi;
            atomic { sleeps[AT(r)] = !wakeup_moved[AT(r)]; }
            if
            :: atomic { !sleeps[AT(r)] -> goto look; }
#ifdef SLICE
            :: atomic { SLICE_HELPS -> sleeps[AT(r)] = false; due = true; goto look; }
#endif
            :: atomic { deadlines > 0 -> sleeps[AT(r)] = false; deadlines--; SPOIL(epoch); goto aborted; }
            fi
        fi;
#ifdef BARRIER
        atomic {
            assert(REACHED(0) >= index && REACHED(1) >= index);
#if RANKS > 2
            assert(REACHED(2) >= index);
#endif
            missing = 0;
            goto begin;
        }
#else
        /* All have arrived. The values are copied, each in two steps ... */
        STEP {
        do
        :: atomic { q < RANKS && q != r -> whole = whole && SLOT(q) == VALUE; }
            atomic { whole = whole && SLOT(q) == VALUE; q++; }
        :: atomic { q == r -> q++; }
        :: atomic { q == RANKS -> q = 0; break }
        od
        }
        /* ... and are those of this operation if no rank has begun another epoch. */
#ifndef NO_RECHECK
        do
        :: atomic {
            q < RANKS ->
            if
            :: EPOCH(arrived[AT(q)]) != epoch -> goto aborted;
            :: else -> q++;
            fi
           }
        :: atomic { q == RANKS -> q = 0; break }
        od;
#endif
        atomic { assert(whole); missing = 0; goto begin; }
#endif

peer_dead:
        /* For this rank every epoch is over: a rank that waits for it later, in any epoch, must end
         * as well. */
#ifdef NO_DEAD_FOR_GOOD
        atomic { GIVE_UP(r, epoch); }
#else
        atomic { aborted_at[AT(r)] = FOR_GOOD; }
#endif
        wake_news();
        goto ends;
aborted:
        atomic {
            /* A death or deadline of another rank is not reported as an abort. */
            assert(SPOILED >= epoch);
            GIVE_UP(r, epoch);
            due = false;
            gave_up = false;
            heard = false;
            missing = 0;
            whole = true;
            q = 0;
        }
        wake_news();
next:   if
        :: atomic {
            epoch < EPOCHS ->
            SPOIL(epoch);
            epoch++;
            index = 0;
            present[r] = epoch;
#ifndef NO_ALIGN_STORE
            arrived[AT(r)] = MINE; /* before any slot of this rank is written again */
#endif
           }
            wake_news();
            goto begin;
        :: atomic { epoch == EPOCHS }
        fi;
ends:   atomic { epoch = 0; index = 0; q = 0; missing = 0; due = false; gave_up = false; heard = false; whole = true; }
#if INCARNATIONS > 1
        left = false;
        /* engine_init */
idle:
end_idle:
        atomic { told > incarnation -> epoch = 0; index = 0; q = 0; missing = 0; }
#ifndef NO_LEAVE
        if
        :: atomic { member -> member = false; holder[AT(r)] = LEFT; }
            wake_news();
        :: atomic { !member }
        fi;
#endif
        atomic {
            incarnation++; /* each init is a request, served in order */
            window = incarnation % WINDOWS;
            in_incarnation[r] = incarnation;
            met[0] = 0;
            met[1] = 0;
#if RANKS > 2
            met[2] = 0;
#endif
        }
        /* cox_group_join */
        atomic {
            if
            :: holder[AT(r)] == EMPTY ->
                holder[AT(r)] = JOINED;
                holder_incarnation[AT(r)] = incarnation;
                holder_process[AT(r)] = process[r];
            :: else -> goto failed;
            fi
        }
        wake_news();
meet:   atomic {
        wakeup_moved[AT(r)] = false;
        do
        :: atomic {
            q < RANKS ->
            if
            :: q == r
            :: q != r && holder[AT(q)] == EMPTY -> missing = 1;
            :: q != r && holder[AT(q)] == FAILED -> goto failed;
            :: else ->
                assert(holder_incarnation[AT(q)] == incarnation);
                if
                :: met[q] == 0 ->
                    met[q] = holder_process[AT(q)];
                    if
                    :: DIED(q) && !SOME_WHOLE -> goto failed;
                    :: else
                    fi
                :: else
                fi
            fi;
            q++;
           }
        :: atomic { q == RANKS -> q = 0; break }
        od
        }
        if
        :: atomic { missing > 0 && wakeup_moved[AT(r)] -> missing = 0; goto meet; }
        :: atomic { missing > 0 && !wakeup_moved[AT(r)] -> SET_MARK; missing = 0; }
            atomic { sleeps[AT(r)] = !wakeup_moved[AT(r)]; }
            if
            :: atomic { !sleeps[AT(r)] -> goto meet; }
            /* meeting_due, in a slice: deaths, and whether the init has ended without this rank. */
            :: atomic { met[0] > 0 && DIED(0) && !SOME_WHOLE -> sleeps[AT(r)] = false; goto failed; }
            :: atomic { met[1] > 0 && DIED(1) && !SOME_WHOLE -> sleeps[AT(r)] = false; goto failed; }
#if RANKS > 2
            :: atomic { met[2] > 0 && DIED(2) && !SOME_WHOLE -> sleeps[AT(r)] = false; goto failed; }
#endif
#ifndef NO_INIT_ABORTED
            :: atomic { init_ended >= incarnation -> sleeps[AT(r)] = false; goto failed; }
#endif
            fi
        :: atomic { missing == 0 }
        fi;
        /* All ranks are in this incarnation, or were. */
        assert(in_incarnation[0] >= incarnation && in_incarnation[1] >= incarnation && (RANKS == 2 || in_incarnation[RANKS - 1] >= incarnation));
        atomic { holder[AT(r)] = WHOLE; member = true; }
        wake_news();
        atomic { epoch = 1; index = 0; present[r] = 1; arrived[AT(r)] = WORD(1, 0); }
        wake_news();
        goto begin;
failed: atomic {
            assert(trouble >= incarnation); /* a join fails only if a rank has died since the init was sent */
            q = 0;
            missing = 0;
            holder[AT(r)] = FAILED;
        }
        wake_news();
        goto idle;
#endif
    } unless {
        atomic {
            killed[r] ->
#if INCARNATIONS > 1
            gone[r] = true;
            incarnation = 0;
            member = false;
            left = false;
            met[0] = 0;
            met[1] = 0;
#if RANKS > 2
            met[2] = 0;
#endif
#endif
            epoch = 0;
            index = 0;
            q = 0;
            missing = 0;
            due = false;
            gave_up = false;
            heard = false;
            whole = true;
            sleeps[AT(r)] = false;
#if INCARNATIONS > 1
            window = 0;
#endif
        }
    }
#if INCARNATIONS > 1
end_dead:
    atomic { born[r] > 0 -> incarnation = born[r] - 1; born[r] = 0; goto again; }
#endif
}

#if INCARNATIONS > 1
#if RANKS == 2
#define SOMEBODY_DIED (gone[0] || gone[1])
#define ANY_KILLED (killed[0] || killed[1])
#define ALL_WHOLE (holder[AT(0)] == WHOLE && holder[AT(1)] == WHOLE)
#else
#define SOMEBODY_DIED (gone[0] || gone[1] || gone[2])
#define ANY_KILLED (killed[0] || killed[1] || killed[2])
#define ALL_WHOLE (holder[AT(0)] == WHOLE && holder[AT(1)] == WHOLE && holder[AT(2)] == WHOLE)
#endif

/* A window is used again when no rank is in it. With 16 windows that concerns the incarnation of 16
 * inits ago. */
#ifdef IN_TURN
#define TAKEN(q) (gone[q] || in_incarnation[q] >= told)
#if RANKS == 2
#define ALL_TAKEN (TAKEN(0) && TAKEN(1))
#else
#define ALL_TAKEN (TAKEN(0) && TAKEN(1) && TAKEN(2))
#endif
#else
#define ALL_TAKEN true
#endif

#define SLOTS_ZERO(q) slot[2 * AT(q)] = 0; slot[2 * AT(q) + 1] = 0
#if RANKS == 2
#define PUNCH_SLOTS SLOTS_ZERO(0); SLOTS_ZERO(1)
#else
#define PUNCH_SLOTS SLOTS_ZERO(0); SLOTS_ZERO(1); SLOTS_ZERO(2)
#endif
#define PUNCH                                                                                      \
    ALL(arrived, 0);                                                                               \
    ALL(aborted_at, 0);                                                                           \
    ALL(holder, EMPTY);                                                                            \
    ALL(holder_incarnation, 0);                                                                           \
    ALL(holder_process, 0);                                                                        \
    ALL(wakeup_moved, true);                                                                         \
    ALL(wakeup_news, true);                                                                          \
    marked[window] = false;                                                                        \
    PUNCH_SLOTS;                                                                                   \
    counted_word[window] = 0;                                                                      \
    counted[window] = 0

/* Restarts dead ranks, then sends the init again, to all. */
proctype coordinator()
{
    byte window = 1 % WINDOWS, q = 0, kept = 1;
end_watch:
    do
    /* Every rank has replied to the init: cox_windows_keep. */
    :: d_step {
        kept < told && ALL_WHOLE ->
        kept = told;
        q = 1;
        do
        :: q < WINDOWS -> window = (told + q) % WINDOWS; PUNCH; q++;
        :: else -> q = 0; break
        od;
        window = told % WINDOWS;
       }
    :: atomic { SOMEBODY_DIED && ALL_TAKEN -> init_ended = told; } /* an init ends with the first death */
        if
        :: atomic { told < INCARNATIONS }
            /* cox_executor_restart */
            d_step {
                do
                :: q < RANKS ->
                    if
                    :: gone[q] -> gone[q] = false; killed[q] = false; process[q]++; born[q] = told + 1; in_incarnation[q] = told;
                    :: else
                    fi;
                    q++;
                :: else -> q = 0; break
                od
            }
            d_step {
                window = (told + 1) % WINDOWS;
#ifndef NO_HOLE
                PUNCH;
#endif
#ifdef KEEP_EARLY
                window = told % WINDOWS;
                PUNCH;
#endif
            }
            atomic { told++; window = told % WINDOWS; trouble = (ANY_KILLED -> told : trouble); }
        :: atomic { told == INCARNATIONS -> break }
        fi
    od
}
#endif

#if INCARNATIONS == 1
/* cox_group_abort in rank 0. */
proctype aborter()
{
    byte epoch = 0;
    {
        do
        :: atomic { aborts > 0 -> aborts--; epoch = present[0]; }
            atomic { SPOIL(epoch); GIVE_UP(0, epoch); epoch = 0; }
            wake_news();
        :: atomic { aborts == 0 -> break }
        od
    } unless {
        atomic { killed[0] -> epoch = 0; }
    }
}
#endif

#if INCARNATIONS > 1
#define KILL(r) killed[r] = true; trouble = told
#else
#define KILL(r) killed[r] = true
#endif

proctype killer()
{
end_idle:
    do
#ifndef CRASH_LAST
    :: atomic { crashes > 0 -> crashes--; KILL(0); }
    :: atomic { crashes > 0 -> crashes--; KILL(1); }
#endif
#if RANKS > 2 || defined(CRASH_LAST)
    :: atomic { crashes > 0 -> crashes--; KILL(RANKS - 1); }
#endif
    od
}

#if INCARNATIONS == 1
proctype meddler()
{
    byte epoch = 0, index = 0, r = 0;
end_idle:
    do
    :: atomic {
        meddles > 0 ->
        meddles--;
        select(epoch : 0 .. EPOCHS + 1);
        select(index : 0 .. OPS);
        select(r : 0 .. RANKS);
        counted_word[0] = WORD(epoch, index);
        counted[0] = r;
        epoch = 0;
        index = 0;
        r = 0;
       }
    :: atomic { meddles > 0 -> meddles--; select(r : 0 .. RANKS - 1); wakeup_moved[r] = !wakeup_moved[r]; r = 0; }
    :: atomic { meddles > 0 -> meddles--; select(r : 0 .. RANKS - 1); wakeup_news[r] = !wakeup_news[r]; r = 0; }
    :: atomic { meddles > 0 -> meddles--; marked[0] = !marked[0]; }
    :: atomic { meddles > 0 -> meddles--; select(r : 0 .. RANKS - 1); sleeps[r] = false; r = 0; }
    od
}
#endif

init {
    atomic {
#if INCARNATIONS > 1
        byte window = 1 % WINDOWS;
        ALL(arrived, WORD(1, 0));
        ALL(holder, WHOLE);
        ALL(holder_incarnation, 1);
        ALL(holder_process, 1);
        run coordinator();
#endif
        run rank(0);
        run rank(1);
#if RANKS > 2
        run rank(2);
#endif
#if ABORTS > 0
        run aborter();
#endif
#if CRASHES > 0
        run killer();
#endif
#if MEDDLES > 0
        run meddler();
#endif
    }
}
