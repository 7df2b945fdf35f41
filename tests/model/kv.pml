/*
 * kv: one block of coxswain/kv.h: the owner takes or expects it, writes it and
 * gives it, readers copy it between two loads of its count of changes, and wait while it is expected.
 *
 * `half` stands for the block's bytes, in two pieces, each with the number of the take that wrote
 * it; `whose` is the one of two users that the take's content was given to, so that a
 * user returns with other content. `tail` is behind the positions filled at the give: it is
 * written at any time, and no reader uses it. README.md lists what is left out; check.sh runs this
 * file in several sizes, and once more for each rule with that rule removed (the NO_ and other
 * switches), which must fail. A step of the owner or a reader is a load or a store: the orders of
 * the atomic operations keep these steps in this order, and each switch is what a weaker one would
 * allow.
 */
#ifndef READERS
#define READERS 1
#endif
#ifndef TAKES
#define TAKES 3
#endif
#ifndef COPIES
#define COPIES 2
#endif

#define NOBODY 0
/* Users are 1 and 2. */
#define EXPECTED 3

byte change;
byte user;
byte half[2];
byte tail;
byte whose[TAKES + 1];
/* Readers that the kernel has put to sleep on the user, and calls that woke all of them. */
byte sleepers;
byte wakes;

inline write()
{
    half[0] = n;
    half[1] = n
}

/* All that sleep. */
inline wake()
{
#ifndef NO_WAKE
    d_step {
        if
        :: sleepers > 0 -> sleepers = 0; wakes = wakes + 1
        :: else
        fi
    }
#else
    skip
#endif
}

active proctype owner()
{
    byte n, g, nobody, before;

    do
    :: n < TAKES ->
       n++;
       if
       :: g = 1
       :: g = 2
       fi;
       if
       :: nobody = NOBODY
       :: nobody = EXPECTED
       fi;
       before = user;
       /* take */
#ifdef COUNT_FIRST
       change = change + 1;
       user = nobody;
#elif defined(COUNT_LAST)
       user = nobody;
#elif defined(NO_COUNT)
       user = nobody;
#elif defined(WRITE_FIRST)
       half[0] = n;
       user = nobody;
       change = change + 1;
#else
       user = nobody;
       change = change + 1;
#endif
       /* Of what was expected and does not come. */
       if
       :: before == EXPECTED -> wake()
       :: else
       fi;
       whose[n] = g;
#ifdef GIVE_FIRST
       user = g;
       write();
#else
       write();
#ifdef COUNT_LAST
       change = change + 1;
#endif
       /* or it does not come */
       if
       :: user = g
       :: n < TAKES -> skip
       fi;
#endif
       if
       :: nobody == EXPECTED && user == g -> wake()
       :: else
       fi;
       /* Written by the block's sequence, behind the positions given. */
       tail = tail + 1
    :: n == TAKES -> break
    od
}

active [READERS] proctype reader()
{
    byte n, g, now, before, a, b;

    do
    :: n < COPIES ->
       n++;
       if
       :: g = 1
       :: g = 2
       fi;
#ifdef USER_FIRST
       now = user;
       before = change;
#else
       before = change;
       now = user;
#endif
       if
       :: now == EXPECTED ->
          /* The kernel compares once more, and puts it to sleep in the same step. */
          if
#ifdef NO_COMPARE
          :: atomic { true -> sleepers = sleepers + 1; before = wakes };
#else
          :: atomic { user == EXPECTED -> sleepers = sleepers + 1; before = wakes };
#endif
             wakes != before
          :: user != EXPECTED
          fi
       :: now != EXPECTED && now != g -> skip
       :: now == g ->
          /* In any order, as memcpy may. */
          if
          :: a = half[0]; b = half[1]
          :: b = half[1]; a = half[0]
          fi;
#ifdef NO_SECOND_CHECK
          if
          :: true ->
#else
          if
          :: change != before -> skip
          :: change == before ->
#endif
             assert(a == b);
             assert(whose[a] == g);
          fi
       fi
    :: n == COPIES -> break
    od
}
