/*
 * group: the round of worker/group.h that every operation is made of, here a gather of values, with epochs, aborts,
 * deadlines and death.
 *
 * The words of the ranks tell what happened: `arrived` {epoch, index} and `given_up`, each written by its rank alone and
 * only growing. The bell and `counted` {epoch, index, how many} are hints that anybody may write. README.md tells what is
 * left out and why; check.sh runs this file in several sizes, and once more for each rule with that rule removed (the
 * NO_ switches), which must fail.
 *
 * Every rank does OPS operations in each epoch and then aligns to the next one, without waiting for the others; so it does
 * after COX_ABORTED and COX_TIMEOUT. After COX_PEER_DEAD it ends.
 *
 * Sizes (-D): RANKS, EPOCHS, OPS; CRASHES, ABORTS (of rank 0's present epoch, from a thread of its own), DEADLINES (that
 * pass), ALIGNS (between any two operations, without cause), MEDDLES (arbitrary writes to the hints) each at most that
 * many; CRASH_LAST: of three ranks only the last may die; BARRIER: no values; SLICE: who waits looks again after a while,
 * also for who is dead.
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

#define TORN 255 /* bytes that are being written */
#define WORD(epoch, index) ((epoch) * 8 + (index))
#define EPOCH(word) ((word) / 8)

/* ---- one line and two slots per rank, which it alone writes ---- */
byte arrived[RANKS] = WORD(1, 0);
byte given_up[RANKS];      /* the last epoch that is over for this rank */
byte slot[2 * RANKS];      /* the word of the operation the value is for stands for the bytes */

/* ---- hints ---- */
byte counted_word, counted; /* one word: read and changed in one step */
bool bell_moved[RANKS];     /* the futex word is no more what this rank read there */
bool sleeps[RANKS];         /* in FUTEX_WAIT */

/* ---- private to the process of a rank ---- */
byte present[RANKS] = 1; /* epoch */
bool killed[RANKS];      /* makes no step any more; its pidfd says so */

/* ---- what may still happen, and what the properties speak of ---- */
byte crashes = CRASHES, aborts = ABORTS, deadlines = DEADLINES, aligns = ALIGNS, meddles = MEDDLES;
#ifdef BARRIER
byte reached[EPOCHS * RANKS]; /* the index of the last operation that the rank began in the epoch */
#define REACHED(q) reached[(epoch - 1) * RANKS + (q)]
#endif
byte spoiled; /* the last epoch that somebody aborted, or left, or had a deadline pass in */

#define SPOIL(epoch) spoiled = (spoiled < (epoch) -> (epoch) : spoiled)
#if RANKS == 2
#define ALL(what, value) what[0] = value; what[1] = value
#else
#define ALL(what, value) what[0] = value; what[1] = value; what[2] = value
#endif

inline ring()
{
#ifdef BELL_AFTER_WAKE
    d_step { ALL(sleeps, false); }
    d_step { ALL(bell_moved, true); }
#else
    d_step { ALL(bell_moved, true); }
    d_step { ALL(sleeps, false); }
#endif
}

/* Whoever gives up tells of it in a word that only grows: an abort that was held up does not take back a later one. */
#ifdef NO_GROWING
#define GIVE_UP(r, epoch) given_up[r] = epoch
#else
#define GIVE_UP(r, epoch) given_up[r] = (given_up[r] < (epoch) -> (epoch) : given_up[r])
#endif

#define FOR_GOOD 254
#define MINE WORD(epoch, index)
#define SLOT(q) slot[(q) * 2 + index % 2]
#ifdef NO_PARITY
#undef SLOT
#define SLOT(q) slot[(q) * 2]
#endif
#ifdef NO_EPOCH_CHECK
#define THERE(q) (arrived[q] >= MINE)
#define GONE(q) (given_up[q] >= epoch)
#else
#define THERE(q) (arrived[q] >= MINE && EPOCH(arrived[q]) == epoch)
#define GONE(q) (given_up[q] >= epoch || EPOCH(arrived[q]) > epoch)
#endif

#if CRASHES > 0
#define DIED(q) killed[q]
#else
#define DIED(q) false
#endif
#define DIED_MISSING(q) (killed[q] && ((missing >> (q)) & 1))
#ifdef NO_DEAD_BEFORE_GONE
#define ABORTED_FIRST true
#else
#define ABORTED_FIRST false
#endif

#if RANKS == 2
#define TOLD_DEAD (given_up[1 - r] == FOR_GOOD)
#else
#define TOLD_DEAD (given_up[(r + 1) % RANKS] == FOR_GOOD || given_up[(r + 2) % RANKS] == FOR_GOOD)
#endif

/* What a slice would find; one that finds nothing is left out. */
#define NEWS(q) (q != r && (THERE(q) -> ((missing >> (q)) & 1) : GONE(q) || DIED(q)))
#if RANKS == 2
#define SLICE_HELPS (NEWS(0) || NEWS(1))
#else
#define SLICE_HELPS (NEWS(0) || NEWS(1) || NEWS(2))
#endif

proctype rank(byte r)
{
    byte epoch = 1, index = 0, q = 0, missing = 0;
    bool due = false, gone = false, whole = true;
    {
        skip;
begin:  if
        :: atomic { index == OPS -> goto next; }
        :: atomic { index < OPS && given_up[r] >= epoch -> goto aborted; }
        :: atomic {
            index < OPS && given_up[r] < epoch ->
            index++;
#ifdef NO_VALUE_FIRST
            arrived[r] = MINE;
#endif
#ifndef BARRIER
            SLOT(r) = TORN;
#endif
           }
#if ALIGNS > 0
        :: atomic { aligns > 0 && epoch < EPOCHS && index < OPS -> aligns--; goto next; }
#endif
        fi;
#ifndef BARRIER
        SLOT(r) = MINE;
#endif
        /* The bell is read before this rank is counted, and then, as before each other look, before the words are. */
#ifdef BARRIER
        atomic { arrived[r] = MINE; REACHED(r) = index; }
#else
        arrived[r] = MINE;
#endif
#ifndef NO_BELL_FIRST
        bell_moved[r] = false;
#endif
        if
#ifdef COUNT_OVERWRITES
        :: atomic { counted_word != MINE -> counted_word = MINE; counted = 1; goto scan; }
#else
        :: atomic { counted_word < MINE -> counted_word = MINE; counted = 1; goto scan; }
        /* Somebody has seen all arrive, and is further. Who sleeps is woken by whoever can be counted no more. */
        :: atomic { counted_word > MINE }
#ifndef NO_RING_BEHIND
            ring();
#endif
#endif
        :: atomic {
            counted_word == MINE ->
            counted++;
            if
            :: counted >= RANKS
            :: else -> goto scan;
            fi
           }
            ring();
        fi;
        goto scan;
look:
#ifndef NO_BELL_FIRST
        bell_moved[r] = false;
#endif
scan:   atomic { q = 0; missing = 0; gone = false; }
        do
        :: d_step {
            q < RANKS ->
            if
            :: q != r && !THERE(q) -> missing = missing | (1 << q);
            :: else
            fi;
#ifndef NO_GIVEN_UP
            gone = gone || GONE(q);
#endif
            q++;
           }
        :: atomic { q == RANKS -> q = 0; break }
        od;
        if
        :: atomic { missing == 0 -> due = false; gone = false; }
        :: atomic { missing > 0 }
#if CRASHES > 0
            /* Whoever believes that the epoch is over looks for the dead then: they may be why. */
            if
            :: atomic { due || (gone && !ABORTED_FIRST) }
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
            :: atomic { !due && !(gone && !ABORTED_FIRST) }
            fi;
#endif
            if
            :: atomic { gone && TOLD_DEAD -> goto peer_dead; }
            :: atomic { gone && !TOLD_DEAD -> goto aborted; }
            :: atomic { !gone -> due = false; }
            fi;
#ifdef NO_BELL_FIRST
            bell_moved[r] = false;
#endif
            if
            :: atomic { bell_moved[r] -> goto look; }
            :: atomic { !bell_moved[r] -> sleeps[r] = true; }
            fi;
            if
            :: atomic { !sleeps[r] -> goto look; }
#ifdef SLICE
            :: atomic { SLICE_HELPS -> sleeps[r] = false; due = true; goto look; }
#endif
            :: atomic { deadlines > 0 -> sleeps[r] = false; deadlines--; SPOIL(epoch); goto aborted; }
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
        /* Everybody has arrived. The values are copied, each in two steps ... */
        do
        :: atomic { q < RANKS && q != r -> whole = whole && SLOT(q) == MINE; }
            atomic { whole = whole && SLOT(q) == MINE; q++; }
        :: atomic { q == r -> q++; }
        :: atomic { q == RANKS -> q = 0; break }
        od;
        /* ... and are those of this operation if nobody has begun another epoch. */
#ifndef NO_RECHECK
        do
        :: atomic {
            q < RANKS ->
            if
            :: EPOCH(arrived[q]) > epoch -> goto aborted;
            :: else -> q++;
            fi
           }
        :: atomic { q == RANKS -> q = 0; break }
        od;
#endif
        atomic { assert(whole); missing = 0; goto begin; }
#endif

peer_dead:
        /* For this rank every epoch is over: whoever comes to wait for it, in whichever epoch, is to end as well. */
#ifdef NO_DEAD_FOR_GOOD
        atomic { GIVE_UP(r, epoch); }
#else
        atomic { given_up[r] = FOR_GOOD; }
#endif
        ring();
        goto ends;
aborted:
        atomic {
            /* Nobody else's death or lateness is told as an abort. */
            assert(spoiled >= epoch);
            GIVE_UP(r, epoch);
            due = false;
            gone = false;
            missing = 0;
            whole = true;
            q = 0;
        }
        ring();
next:   if
        :: atomic {
            epoch < EPOCHS ->
            SPOIL(epoch);
            epoch++;
            index = 0;
            present[r] = epoch;
#ifndef NO_ALIGN_STORE
            arrived[r] = MINE; /* before any slot of this rank is written again */
#endif
           }
            ring();
            goto begin;
        :: atomic { epoch == EPOCHS }
        fi;
ends:   atomic { epoch = 0; index = 0; q = 0; missing = 0; due = false; gone = false; whole = true; }
    } unless {
        atomic {
            killed[r] ->
            epoch = 0;
            index = 0;
            q = 0;
            missing = 0;
            due = false;
            gone = false;
            whole = true;
            sleeps[r] = false;
        }
    }
}

/* cox_group_abort in rank 0. */
proctype aborter()
{
    byte epoch = 0;
    {
        do
        :: atomic { aborts > 0 -> aborts--; epoch = present[0]; }
            atomic { SPOIL(epoch); GIVE_UP(0, epoch); epoch = 0; }
            ring();
        :: atomic { aborts == 0 -> break }
        od
    } unless {
        atomic { killed[0] -> epoch = 0; }
    }
}

proctype killer()
{
end_idle:
    do
#ifndef CRASH_LAST
    :: atomic { crashes > 0 -> crashes--; killed[0] = true; }
    :: atomic { crashes > 0 -> crashes--; killed[1] = true; }
#endif
#if RANKS > 2
    :: atomic { crashes > 0 -> crashes--; killed[2] = true; }
#endif
    od
}

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
        counted_word = WORD(epoch, index);
        counted = r;
        epoch = 0;
        index = 0;
        r = 0;
       }
    :: atomic { meddles > 0 -> meddles--; select(r : 0 .. RANKS - 1); bell_moved[r] = !bell_moved[r]; r = 0; }
    :: atomic { meddles > 0 -> meddles--; select(r : 0 .. RANKS - 1); sleeps[r] = false; r = 0; }
    od
}

init {
    atomic {
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
