/*
 * pool: one block of coxswain/memory/pool.h: reference counts by owner, pins, epochs, and
 * what sweep releases for the dead.
 *
 * `word` is {epoch, phase, by}, changed by compare-and-swap only; `count` has one byte per
 * process, which it alone writes (for a dead one: the sweeping process). `data` is the block's
 * content, TORN while it is written. README.md lists what is left out; check.sh runs this file in
 * several sizes, and once more for each rule with that rule removed (the NO_ switches), which must
 * fail.
 *
 * Kinds of runs (-D): by default every process OPS times either allocates the block, writes it,
 * publishes its epoch and releases it; or takes a published reference, reads and releases it.
 *
 * QUEUE: process 0 publishes the block as a message that pins it, and releases it at once; the
 * others take it, each once, under the queue's lock; the last one clears the pin. PROCESSES;
 * CRASHES: so many processes are killed, between any two steps; survivors sweep.
 */
#ifndef PROCESSES
#define PROCESSES 2
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef CRASHES
#define CRASHES 0
#endif

#define TORN 255
#define NONE 255

#define FREE 0
#define CLAIMED 1
#define USED 2
#define CLOSING 3
#define W(epoch, phase, by) ((epoch) * 16 + (phase) * 4 + (by))
#define EPOCH(w) ((w) / 16)
#define PHASE(w) (((w) / 4) % 4)
#define BY(w) ((w) % 4)

byte word;
byte count[PROCESSES];
byte data;
byte told; /* epoch that a process with a reference published; 0: none */
bool pin;
byte interest;     /* takers that have not taken the message */
byte lock = NONE;  /* of the queue; taken over from the dead */
bool dead[PROCESSES];
bool swept[PROCESSES]; /* its rows were swept */
bool ended[PROCESSES];
byte crashes;

/* ---- variables of the properties; no part of the protocol ---- */
byte valid[PROCESSES]; /* epoch of the reference that a process has; 0: none */

#define LIVE(p) (!dead[p])
/* One step of a live process; G: where the guard holds. */
#define S(statement) atomic { LIVE(me) -> statement }
#define G(guard, statement) atomic { LIVE(me) && (guard) -> statement }

inline swap(from, to)
{
    atomic {
        LIVE(me) ->
        if
        :: word == from -> word = to; swapped = true
        :: else -> swapped = false
        fi
    }
}

inline scan()
{
    S(found = false; i = 0);
    do
    :: G(i < PROCESSES, found = found || count[i] > 0; i++)
    :: G(i == PROCESSES, found = found || pin; i = 0; break)
    od
}

/* After a count of this process, or of a swept one, went to 0. */
inline reclaim()
{
    scan();
    S(w = word);
    do
    :: G(found || PHASE(w) == FREE || PHASE(w) == CLAIMED, break)
#ifdef NO_TAKE_OVER
    :: G(!found && PHASE(w) == CLOSING, break)
    :: G(!found && PHASE(w) == USED, skip);
#else
    :: G(!found && (PHASE(w) == USED || PHASE(w) == CLOSING), skip);
#endif
       swap(w, W(EPOCH(w), CLOSING, me));
       if
       :: G(!swapped, w = word)
       :: G(swapped, w = W(EPOCH(w), CLOSING, me));
#ifdef NO_CLOSING_SCAN
          S(found = false);
#else
          scan();
#endif
          if
          :: G(found, skip);
             swap(w, W(EPOCH(w), USED, 0))
#ifdef STORE_FREE
          :: G(!found, word = W(EPOCH(w) + 1, FREE, 0))
#else
          :: G(!found, skip);
             swap(w, W(EPOCH(w) + 1, FREE, 0))
#endif
          fi;
          S(break)
       fi
    od;
    S(found = false)
}

/* ref: `epoch` is the published one. Sets got. */
inline take(epoch)
{
#ifdef CHECK_BEFORE_COUNT
    S(w = word);
    S(count[me]++);
#else
    S(count[me]++);
    S(w = word);
#endif
    do
    :: G(PHASE(w) == USED && EPOCH(w) == epoch, got = true; valid[me] = epoch; break)
#ifdef NO_PUT_BACK
    :: G(!(PHASE(w) == USED && EPOCH(w) == epoch), got = false; break)
#else
    :: G(PHASE(w) == CLOSING && EPOCH(w) == epoch, skip);
       swap(w, W(epoch, USED, 0));
       S(w = word)
    :: G(!((PHASE(w) == USED || PHASE(w) == CLOSING) && EPOCH(w) == epoch), got = false; break)
#endif
    od;
    if
    :: G(got, skip)
    :: atomic {
           LIVE(me) && !got ->
           /* No reference to a block that is counted is refused. */
           i = 0;
           do
           :: i < PROCESSES -> assert(i == me || valid[i] != epoch || dead[i]); i++
           :: else -> i = 0; break
           od;
           count[me]--
       };
#ifndef NO_RECLAIM_AFTER_REFUSAL
       reclaim()
#endif
    fi
}

inline let_go()
{
    S(valid[me] = 0; count[me]--);
    reclaim()
}

inline write(epoch)
{
    atomic {
        LIVE(me) -> i = 0;
        do
        :: i < PROCESSES -> assert(i == me || valid[i] == 0 || dead[i]); i++
        :: else -> i = 0; break
        od;
        data = TORN
    }
    S(data = epoch)
}

inline read(epoch)
{
    S(assert(data == epoch));
    S(assert(data == epoch))
}

/* What sweep does for this block, one dead process after the other. Only then are their rows free. */
inline sweep()
{
    S(j = 0);
    do
    :: G(j < PROCESSES && dead[j] && !swept[j], w = word);
       if
#ifndef NO_UNDO
       :: G(PHASE(w) == CLOSING && BY(w) == j, skip);
          swap(w, W(EPOCH(w), USED, 0))
       :: G(PHASE(w) == CLAIMED && BY(w) == j, count[j] = 0);
          swap(w, W(EPOCH(w) + 1, FREE, 0))
       :: G(!((PHASE(w) == CLOSING || PHASE(w) == CLAIMED) && BY(w) == j), skip)
#else
       :: S(skip)
#endif
       fi;
#ifdef RECLAIM_COUNTED
       if
       :: G(count[j] > 0, count[j] = 0);
          reclaim()
       :: G(count[j] == 0, skip)
       fi;
#else
       S(count[j] = 0);
       reclaim();
#endif
       S(swept[j] = true);
       S(j++)
    :: G(j < PROCESSES && (!dead[j] || swept[j]), j++)
    :: G(j == PROCESSES, j = 0; break)
    od
}

inline allocate()
{
    S(w = word; got = false);
    if
    :: G(PHASE(w) == FREE, skip);
       swap(w, W(EPOCH(w), CLAIMED, me));
       if
       :: G(swapped, count[me]++);
          swap(W(EPOCH(w), CLAIMED, me), W(EPOCH(w), USED, 0));
          S(got = true; valid[me] = EPOCH(w))
       :: G(!swapped, skip)
       fi
    :: G(PHASE(w) != FREE, skip)
    fi
}

#if defined(QUEUE)
inline locked()
{
    atomic {
        LIVE(me) && (lock == NONE || dead[lock]) ->
        lock = me
    }
}

proctype user(byte me)
{
    byte i, j, w;
    bool found, swapped, got, last;
    byte epoch;

    {
        if
        :: me == 0 ->
           allocate();
           S(assert(got); epoch = EPOCH(w));
           write(epoch);
           locked();
           S(pin = true);
           S(told = epoch);
           S(lock = NONE);
           let_go()
        :: else ->
           atomic { LIVE(me) && (told > 0 || ended[0] || dead[0]) -> skip };
           locked();
           if
           :: G(told > 0, epoch = told);
              take(epoch);
              S(assert(got)); /* pinned by the message, which ends only under the lock */
              S(interest--; last = interest == 0);
              if
              :: G(last, pin = false); reclaim()
              :: G(!last, skip)
              fi;
              S(lock = NONE);
              read(epoch);
              let_go()
           :: G(told == 0, lock = NONE)
           fi
        fi;
        sweep();
        S(ended[me] = true)
    } unless {
        dead[me]
    }
}
#else
proctype user(byte me)
{
    byte i, j, w, n;
    bool found, swapped, got;
    byte epoch;

    {
        do
        :: G(n < OPS, n++);
           if
           :: S(skip); allocate();
              if
              :: G(got, epoch = EPOCH(w));
                 write(epoch);
                 S(told = epoch);
                 let_go()
              :: G(!got, skip)
              fi
           :: G(told > 0, epoch = told);
              take(epoch);
              if
              :: G(got, skip); read(epoch); let_go()
              :: G(!got, skip)
              fi
           fi
        :: G(n == OPS, break)
        od;
        sweep();
        S(ended[me] = true)
    } unless {
        dead[me]
    }
}
#endif

/* Kills. */
active proctype killer()
{
end:
    do
    :: atomic { crashes < CRASHES && !dead[0] && !ended[0] -> dead[0] = true; crashes++ }
    :: atomic { crashes < CRASHES && !dead[PROCESSES - 1] && !ended[PROCESSES - 1] -> dead[PROCESSES - 1] = true; crashes++ }
    :: crashes == CRASHES -> break
    od
}

#define OUT(p) (ended[p] || dead[p])
#if PROCESSES == 2
#define ALL_OUT (OUT(0) && OUT(1))
#else
#define ALL_OUT (OUT(0) && OUT(1) && OUT(2))
#endif

/* Once all have ended or are dead, a live process sweeps once more, and nothing is lost. */
proctype judge()
{
    byte me, i, j, w;
    bool found, swapped;

    atomic {
        ALL_OUT ->
        do
        :: me < PROCESSES && dead[me] -> me++
        :: else -> break
        od
    }
    if
    :: me == PROCESSES -> skip /* no process is left: the kernel frees it */
    :: else ->
#ifdef QUEUE
       /* The queue's sweep: the dead take no more messages. */
       S(pin = false);
       reclaim();
#endif
       sweep();
       atomic {
           assert(PHASE(word) == FREE);
           assert(count[0] == 0);
           assert(count[1] == 0);
           assert(count[PROCESSES - 1] == 0)
       }
    fi
}

init
{
    byte p;

    atomic {
        word = W(1, FREE, 0);
        interest = PROCESSES - 1;
        do
        :: p < PROCESSES -> run user(p); p++
        :: else -> break
        od;
        run judge()
    }
}
