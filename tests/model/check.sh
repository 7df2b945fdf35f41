#!/bin/sh
# Runs the models: sh check.sh [short|long] [jobs] ["model..."]. Every line of `runs` below is one verification: the whole
# protocol must pass, and without one of its rules spin must find the counterexample that rule prevents.
# Exit status: 0; 1: a run did not end as expected; 77: spin or a C compiler is missing.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
compiler=${CC:-cc}

# name            length kind    expected    model and size
# kind: all = every state; bits = a bit per state, nearly every, where every state does not fit into memory;
#       cycles = no endless run, every state; fair = an LTL formula under weak fairness, every state
# expected: pass, or what spin must complain about: assert, deadlock, cycle (of `fair`), endless (a run, of `cycles`)
runs() {
    cat <<'RUNS'
depth2_failure           short  bits    pass      gate -DREQUESTS=2 -DDEPTH=2 -DFAILURES=1
fair_hang                short  fair    pass      gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DNO_REPLY_TOO -DSLICE -DSLICE_ALWAYS -DLOSSES=1 -DTOKENS_MAX=1 -DFAIR
no_cycle                 short  cycles  pass      gate -DREQUESTS=1 -DSLICE -DLOSSES=1 -DDEADLINES=1
deadline                 short  all     pass      gate -DREQUESTS=2 -DDEADLINES=1
failure                  short  all     pass      gate -DREQUESTS=2 -DFAILURES=1
crash                    short  all     pass      gate -DREQUESTS=2 -DCRASHES=1
stall                    short  all     pass      gate -DREQUESTS=1 -DCRASHES=1 -DSTALLS=1 -DSLICE
hang                     short  all     pass      gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DSLICE
hang_loss                short  all     pass      gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DNO_REPLY_TOO -DSLICE -DLOSSES=1
loss                     short  all     pass      gate -DREQUESTS=2 -DSLICE -DLOSSES=1
subsets                  short  all     pass      gate -DREQUESTS=3 -DSUBSETS
no_reply                 short  all     pass      gate -DREQUESTS=3 -DNO_REPLY_TOO
depth2                   short  all     pass      gate -DREQUESTS=3 -DDEPTH=2
depth2_subsets           short  all     pass      gate -DREQUESTS=2 -DDEPTH=2 -DSUBSETS
stop                     short  all     pass      gate -DREQUESTS=2 -DSTOP
wild                     short  all     pass      gate -DREQUESTS=1 -DWILD
fair                     short  fair    pass      gate -DREQUESTS=1 -DSLICE -DSLICE_ALWAYS -DLOSSES=1 -DTOKENS_MAX=2 -DFAIR
restart                  short  all     pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1
restart_twice            short  all     pass      gate -DREQUESTS=2 -DCRASHES=2 -DRESTARTS=2
restart_depth2           short  all     pass      gate -DREQUESTS=2 -DDEPTH=2 -DCRASHES=1 -DRESTARTS=1
restart_deadline         short  all     pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DDEADLINES=1
restart_failure          short  all     pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DFAILURES=1
restart_stop             short  all     pass      gate -DREQUESTS=1 -DCRASHES=1 -DRESTARTS=1 -DSTOP
restart_stray            short  all     pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSTRAYS=1
restart_stray_in         short  all     pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSTRAYS=1 -DNO_IDENTITY_CHECK
restart_no_cycle         short  cycles  pass      gate -DREQUESTS=1 -DCRASHES=1 -DRESTARTS=1
legacy                   short  all     pass      legacy -DREQUESTS=3
legacy_late              short  all     pass      legacy -DREQUESTS=2 -DDEADLINES=1 -DFAILURES=1
legacy_crash             short  all     pass      legacy -DREQUESTS=1 -DCRASHES=1 -DDEADLINES=1
legacy_stop              short  all     pass      legacy -DREQUESTS=2 -DSTOP
legacy_no_cycle          short  cycles  pass      legacy -DREQUESTS=2 -DDEADLINES=1
-NO_SEQUENCE             short  all     assert    gate -DREQUESTS=2 -DNO_SEQUENCE
-NO_TAG_CHECK            short  all     assert    gate -DREQUESTS=1 -DWILD -DNO_TAG_CHECK
-NO_FULL_RULE            short  all     assert    gate -DREQUESTS=2 -DNO_FULL_RULE
-NO_RETURNED_RULE        short  all     assert    gate -DREQUESTS=2 -DNO_REPLY_TOO -DNO_RETURNED_RULE
-NO_SEQLOCK              short  all     assert    gate -DREQUESTS=2 -DSUBSETS -DNO_SEQLOCK
-NO_VOID                 short  all     assert    gate -DREQUESTS=2 -DDEPTH=2 -DFAILURES=1 -DNO_VOID
-NO_DEAD_FIRST           short  all     assert    gate -DREQUESTS=1 -DCRASHES=1 -DNO_DEAD_FIRST
-NO_FULL_SCAN            short  all     deadlock  gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DSLICE -DNO_FULL_SCAN
-NO_SLICE_hang           short  all     deadlock  gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2
-NO_SLICE_stall          short  all     deadlock  gate -DREQUESTS=1 -DCRASHES=1 -DSTALLS=1
-NO_RESCAN               short  all     assert    gate -DREQUESTS=2 -DDEPTH=2 -DNO_RESCAN
-NO_LOOK_AGAIN_F         short  all     assert    gate -DREQUESTS=2 -DDEPTH=2 -DCRASHES=1 -DNO_RESCAN_FAILED
-NO_PREFIX               short  all     assert    gate -DREQUESTS=2 -DDEPTH=2 -DSUBSETS -DNO_PREFIX
-NO_REWAKE               short  all     deadlock  gate -DREQUESTS=2 -DSLICE -DLOSSES=1 -DNO_REWAKE
-NO_REWAKE_fair          short  fair    cycle     gate -DREQUESTS=1 -DSLICE -DSLICE_ALWAYS -DLOSSES=1 -DTOKENS_MAX=2 -DFAIR -DNO_REWAKE
-NO_CLAIM_REWAKE         short  all     deadlock  gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DNO_REPLY_TOO -DSLICE -DLOSSES=1 -DNO_CLAIM_REWAKE
-NO_CLOCKS               short  fair    cycle     gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DNO_REPLY_TOO -DSLICE -DSLICE_ALWAYS -DLOSSES=1 -DTOKENS_MAX=1 -DFAIR -DNO_CLOCKS
-NO_CAUSES               short  all     deadlock  gate -DREQUESTS=1 -DCRASHES=1 -DNO_CAUSES
-NO_STOP_LOCK            short  all     deadlock  gate -DREQUESTS=1 -DSTOP -DNO_STOP_LOCK
-restart_PROOF           short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_PROOF
-restart_OUT_LOCK        short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_DETACH_LOCK
-restart_OUT_WAIT        short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_DETACH_WAIT
-restart_RESET           short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_RESET_LOCK
-restart_TOKENS          short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_SEMAPHORES_RENEWED
-restart_LINE            short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_LINE_RESET
-restart_PASSED          short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DNO_PASSED_OVER
-restart_ADMIT           short  all     deadlock  gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DADMIT_EARLY
-restart_INCARNATION     short  all     assert    gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSTRAYS=1 -DNO_INCARNATION
-legacy_LATE             short  all     assert    legacy -DREQUESTS=2 -DDEADLINES=1 -DNO_LATE_RULE
-legacy_FOREIGN          short  all     assert    legacy -DREQUESTS=2 -DNO_FOREIGN
-legacy_POST             short  all     assert    legacy -DREQUESTS=2 -DFOREIGN_AFTER_POST
-legacy_PRODUCE          short  all     assert    legacy -DREQUESTS=2 -DNO_PRODUCE_RULE
-legacy_CAUSES           short  all     deadlock  legacy -DREQUESTS=1 -DCRASHES=1 -DNO_CAUSES
futex_depth2             short  all     pass      futex_gate -DREQUESTS=3 -DDEPTH=2
futex_subsets            short  all     pass      futex_gate -DREQUESTS=2 -DDEPTH=2 -DSUBSETS
futex_failure            short  all     pass      futex_gate -DREQUESTS=2 -DFAILURES=1
futex_fail_hang          short  all     pass      futex_gate -DREQUESTS=2 -DDEPTH=2 -DFAIL_HANG=1
futex_hang               short  all     pass      futex_gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2
futex_deadline           short  all     pass      futex_gate -DREQUESTS=3 -DDEADLINES=1
futex_deadline2          short  all     pass      futex_gate -DREQUESTS=2 -DDEPTH=2 -DDEADLINES=1
futex_crash_wake         short  all     pass      futex_gate -DREQUESTS=2 -DDEPTH=2 -DCRASHES=1 -DCRASH_AT_WAKE
futex_crash              short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DSLICE
futex_crash_once         short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DSLICE_QUIET
futex_meddle             short  all     pass      futex_gate -DREQUESTS=1 -DMEDDLES=2 -DSLICE
futex_meddle_once        short  all     pass      futex_gate -DREQUESTS=2 -DMEDDLES=1 -DSLICE_QUIET
futex_meddle_twice       short  all     pass      futex_gate -DREQUESTS=1 -DMEDDLES=2 -DSLICE_QUIET
futex_stall_once         short  all     pass      futex_gate -DREQUESTS=2 -DSTALLS=1 -DSLICE_QUIET
futex_stop               short  all     pass      futex_gate -DREQUESTS=2 -DSTOP
futex_leave              short  all     pass      futex_gate -DREQUESTS=2 -DLEAVE -DSLICE
futex_no_cycle           short  cycles  pass      futex_gate -DREQUESTS=1 -DSLICE -DDEADLINES=1 -DMEDDLES=1
futex_restart            short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE
futex_restart_wake       short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DCRASH_AT_WAKE
futex_restart_once       short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE_QUIET
futex_restart_twice      short  all     pass      futex_gate -DREQUESTS=1 -DCRASHES=2 -DRESTARTS=2 -DSLICE
futex_restart_late       short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DCRASH_AT_WAKE -DRESTARTS=1 -DLATES=1 -DSLICE_QUIET
futex_restart_dead       short  all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DDEADLINES=1 -DSLICE
futex_restart_cycle      short  cycles  pass      futex_gate -DREQUESTS=1 -DCRASHES=1 -DRESTARTS=1 -DSLICE
futex_elide              short  all     pass      futex_gate -DELIDE -DREQUESTS=2
futex_elide_depth2       short  all     pass      futex_gate -DELIDE -DREQUESTS=2 -DDEPTH=2
futex_elide_crash        short  all     pass      futex_gate -DELIDE -DREQUESTS=1 -DCRASHES=1 -DSLICE_QUIET
futex_elide_stall        short  all     pass      futex_gate -DELIDE -DREQUESTS=2 -DSTALLS=1 -DSLICE_QUIET
futex_elide_meddle       short  all     pass      futex_gate -DELIDE -DREQUESTS=1 -DMEDDLES=1 -DSLICE
futex_elide_late         short  all     pass      futex_gate -DELIDE -DREQUESTS=2 -DCRASHES=1 -DCRASH_AT_WAKE -DRESTARTS=1 -DLATES=1 -DSLICE_QUIET
-futex_SEQUENCE          short  all     assert    futex_gate -DREQUESTS=2 -DNO_SEQUENCE
-futex_RETURNED          short  all     assert    futex_gate -DREQUESTS=2 -DDEADLINES=1 -DNO_RETURNED_RULE
-futex_HINT_SEQ          short  all     deadlock  futex_gate -DREQUESTS=2 -DDEADLINES=1 -DNO_HINT_SEQUENCE
-futex_HINT_FIRST        short  all     deadlock  futex_gate -DREQUESTS=1 -DNO_HINT_FIRST
-futex_SWAP              short  all     deadlock  futex_gate -DREQUESTS=1 -DNO_SWAP
-futex_DONE              short  all     deadlock  futex_gate -DREQUESTS=1 -DDONE_AFTER_HINT
-futex_WORD_FIRST        short  all     deadlock  futex_gate -DREQUESTS=1 -DNO_WORD_FIRST
-futex_WORD_LATE         short  all     deadlock  futex_gate -DREQUESTS=1 -DWORD_AFTER_WAKE
-futex_RANKS_FIRST       short  all     deadlock  futex_gate -DREQUESTS=1 -DNO_RANKS_WORD_FIRST
-futex_RANKS_LATE        short  all     deadlock  futex_gate -DREQUESTS=1 -DRANKS_WORD_AFTER_WAKE
-futex_REWAKE            short  all     deadlock  futex_gate -DREQUESTS=1 -DSTALLS=1 -DSLICE -DNO_REWAKE
-futex_FULL_SCAN         short  all     deadlock  futex_gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DNO_FULL_SCAN
-futex_FAILURE           short  all     deadlock  futex_gate -DREQUESTS=2 -DFAIL_HANG=1 -DNO_FAILURE_WAKE
-futex_DEATH             short  all     deadlock  futex_gate -DREQUESTS=1 -DCRASHES=1 -DCRASH_AT_WAKE -DNO_DEATH_WAKE
-futex_REPEAT            short  all     deadlock  futex_gate -DREQUESTS=1 -DLEAVE -DSLICE -DNO_REPEATED_WAKE
-futex_SLICE_1           short  all     deadlock  futex_gate -DREQUESTS=1 -DMEDDLES=1
-futex_SLICE_2           short  all     deadlock  futex_gate -DREQUESTS=1 -DCRASHES=1
-futex_SLICE_3           short  all     deadlock  futex_gate -DREQUESTS=1 -DSTALLS=1
-futex_OUT_LOCK          short  all     assert    futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE -DNO_DETACH_LOCK
-futex_OUT_WAIT          short  all     assert    futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE -DNO_DETACH_WAIT
-futex_LINE              short  all     assert    futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE -DNO_LINE_RESET
-futex_MEMORY            short  all     assert    futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE -DLATES=1 -DNO_MEMORY_RENEWED
-futex_SEQUENCE_FIRST    short  all     deadlock  futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSLICE -DNO_WAKE_SEQUENCE_FIRST
-futex_SLICE_4           short  all     deadlock  futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DCRASH_AT_WAKE -DLATES=1
-futex_CHECK             short  all     deadlock  futex_gate -DELIDE -DREQUESTS=1 -DCHECK_FIRST
-futex_COUNT_LATE        short  all     deadlock  futex_gate -DELIDE -DREQUESTS=1 -DCOUNT_AFTER_CHECK
-futex_RIGHT             short  all     assert    futex_gate -DELIDE -DREQUESTS=1 -DMEDDLES=1 -DSLICE -DPUTS_RIGHT_ONCE
elide                    short  all     pass      elide
elide_crash              short  all     pass      elide -DCRASHES=1
-elide_CHECK             short  all     deadlock  elide -DCHECK_FIRST
-elide_COUNT_LATE        short  all     deadlock  elide -DCOUNT_AFTER_CHECK
group_epochs             short  all     pass      group
group_ops                short  all     pass      group -DEPOCHS=1 -DOPS=3
group_barrier            short  all     pass      group -DBARRIER
group_abort              short  all     pass      group -DEPOCHS=1 -DABORTS=1
group_deadline           short  all     pass      group -DOPS=1 -DDEADLINES=1
group_crash              short  all     pass      group -DEPOCHS=1 -DCRASHES=1 -DSLICE
group_crash2             short  bits    pass      group -DOPS=1 -DCRASHES=1 -DCRASH_LAST -DBARRIER -DSLICE
group_all2               short  all     pass      group -DRANKS=2 -DCRASHES=1 -DABORTS=1 -DDEADLINES=1 -DALIGNS=1 -DSLICE
group_aborts2            short  all     pass      group -DRANKS=2 -DOPS=3 -DABORTS=2 -DDEADLINES=1 -DALIGNS=1
group_meddle             short  all     pass      group -DEPOCHS=1 -DOPS=1 -DMEDDLES=1 -DSLICE
group_meddle2            short  all     pass      group -DRANKS=2 -DMEDDLES=2 -DSLICE
group_no_cycle           short  cycles  pass      group -DRANKS=2 -DOPS=1 -DCRASHES=1 -DABORTS=1 -DALIGNS=1 -DSLICE
group_incarnations       short  all     pass      group -DRANKS=2 -DEPOCHS=1 -DCRASHES=1 -DSLICE -DINCARNATIONS=2
group_incarnations_epochs short  all     pass      group -DRANKS=2 -DOPS=1 -DCRASHES=1 -DSLICE -DINCARNATIONS=2
group_incarnations_late  short  all     pass      group -DRANKS=2 -DEPOCHS=1 -DCRASHES=1 -DSLICE -DINCARNATIONS=2 -DDEADLINES=1
group_incarnations_3     short  all     pass      group -DRANKS=2 -DEPOCHS=1 -DOPS=1 -DCRASHES=2 -DSLICE -DINCARNATIONS=3
group_incarnations_turn  short  all     pass      group -DRANKS=2 -DEPOCHS=1 -DOPS=1 -DCRASHES=2 -DSLICE -DINCARNATIONS=3 -DWINDOWS=2 -DIN_TURN
group_incarnations_ranks3 short  all     pass      group -DEPOCHS=1 -DOPS=1 -DCRASHES=1 -DCRASH_LAST -DSLICE -DINCARNATIONS=2
group_incarnations_cycle short  cycles  pass      group -DRANKS=2 -DEPOCHS=1 -DCRASHES=1 -DSLICE -DINCARNATIONS=2 -DOPS=1
-group_BEHIND            short  all     deadlock  group -DEPOCHS=1 -DNO_WAKE_BEHIND
-group_OVERWRITES        short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DOPS=3 -DCOUNT_OVERWRITES
-group_WORD_LATE         short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DWORD_AFTER_WAKE
-group_MARK              short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DNO_MARK
-group_NEWS              short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DABORTS=1 -DNO_NEWS
-group_NEWS_KEPT         short  all     deadlock  group -DEPOCHS=1 -DABORTS=1 -DNO_NEWS_KEPT
-group_WORD_FIRST        short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DNO_WORD_FIRST
-group_SLICE_1           short  all     deadlock  group -DEPOCHS=1 -DCRASHES=1
-group_SLICE_2           short  all     deadlock  group -DRANKS=2 -DMEDDLES=1
-group_DEAD_FIRST        short  all     assert    group -DEPOCHS=1 -DCRASHES=1 -DSLICE -DNO_DEAD_FIRST
-group_BEFORE            short  all     assert    group -DEPOCHS=1 -DCRASHES=1 -DSLICE -DNO_DEAD_FOR_GOOD -DNO_DEAD_BEFORE_GONE
-group_FOR_GOOD          short  all     deadlock  group -DOPS=1 -DCRASHES=1 -DSLICE -DNO_DEAD_FOR_GOOD
-group_ABORT_WORD        short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DABORTS=1 -DNO_ABORT_WORD
-group_GROWING           short  all     deadlock  group -DRANKS=2 -DABORTS=1 -DDEADLINES=1 -DNO_GROWING
-group_VALUE             short  all     assert    group -DRANKS=2 -DEPOCHS=1 -DNO_VALUE_FIRST
-group_PARITY            short  all     assert    group -DRANKS=2 -DEPOCHS=1 -DNO_PARITY
-group_RECHECK           short  all     assert    group -DRANKS=2 -DOPS=1 -DNO_RECHECK
-group_ALIGN             short  all     assert    group -DRANKS=2 -DOPS=1 -DNO_ALIGN_STORE
-group_EPOCH             short  all     assert    group -DRANKS=2 -DBARRIER -DDEADLINES=1 -DNO_EPOCH_CHECK
-group_WINDOW            short  all     assert    group -DRANKS=2 -DEPOCHS=1 -DCRASHES=1 -DSLICE -DINCARNATIONS=2 -DWINDOWS=1
-group_WINDOWS           short  all     assert    group -DRANKS=2 -DEPOCHS=1 -DOPS=1 -DCRASHES=2 -DSLICE -DINCARNATIONS=3 -DWINDOWS=2
-group_HOLE              short  all     assert    group -DRANKS=2 -DEPOCHS=1 -DOPS=1 -DCRASHES=2 -DSLICE -DINCARNATIONS=3 -DWINDOWS=2 -DIN_TURN -DNO_HOLE
-group_KEEP              short  all     assert    group -DRANKS=2 -DEPOCHS=1 -DCRASHES=1 -DSLICE -DINCARNATIONS=2 -DKEEP_EARLY
-group_LEAVE             short  all     deadlock  group -DEPOCHS=1 -DOPS=1 -DCRASHES=1 -DCRASH_LAST -DSLICE -DINCARNATIONS=2 -DNO_LEAVE
-group_INIT              short  all     deadlock  group -DRANKS=2 -DEPOCHS=1 -DOPS=1 -DCRASHES=2 -DSLICE -DINCARNATIONS=3 -DCRASH_LAST -DNO_INIT_ABORTED
pool_share               short  all     pass      pool
pool_share_3             short  all     pass      pool -DPROCESSES=3 -DOPS=1
pool_crash               short  all     pass      pool -DCRASHES=1
pool_crash_both          short  all     pass      pool -DCRASHES=2 -DOPS=1
pool_queue               short  all     pass      pool -DQUEUE -DPROCESSES=3
pool_queue_crash         short  all     pass      pool -DQUEUE -DPROCESSES=3 -DCRASHES=2
-pool_COUNT_FIRST        short  all     assert    pool -DCHECK_BEFORE_COUNT
-pool_PUT_BACK           short  all     assert    pool -DNO_PUT_BACK
-pool_TAKE_OVER          short  all     assert    pool -DNO_TAKE_OVER
-pool_SWAP_FREE          short  all     assert    pool -DSTORE_FREE
-pool_SCAN               short  all     assert    pool -DNO_CLOSING_SCAN
-pool_REFUSAL            short  all     assert    pool -DNO_RECLAIM_AFTER_REFUSAL
-pool_UNDO               short  all     assert    pool -DNO_UNDO -DCRASHES=1 -DOPS=1
-pool_EVERY_BLOCK        short  all     assert    pool -DRECLAIM_COUNTED -DCRASHES=1 -DOPS=1
kv_one                   short  all     pass      kv
kv_two                   short  all     pass      kv -DREADERS=2 -DCOPIES=1
kv_many                  short  all     pass      kv -DTAKES=4 -DCOPIES=3
-kv_COUNT                short  all     assert    kv -DNO_COUNT
-kv_COUNT_FIRST          short  all     assert    kv -DCOUNT_FIRST
-kv_COUNT_LAST           short  all     assert    kv -DCOUNT_LAST
-kv_WRITE_FIRST          short  all     assert    kv -DWRITE_FIRST
-kv_GIVE_FIRST           short  all     assert    kv -DGIVE_FIRST
-kv_USER                 short  all     assert    kv -DUSER_FIRST
-kv_SECOND_CHECK         short  all     assert    kv -DNO_SECOND_CHECK
-kv_WAKE                 short  all     deadlock  kv -DNO_WAKE
-kv_COMPARE              short  all     deadlock  kv -DNO_COMPARE
node_request             short   all     pass      node_request -DLOSSES=1 -DDUPS=1
node_request_losses      short   all     pass      node_request -DLOSSES=2 -DDUPS=1
node_request_late        short   all     pass      node_request -DDEADLINES=1 -DLOSSES=1
node_request_late2       short   all     pass      node_request -DDEADLINES=2
node_request_fail        short   all     pass      node_request -DDEADLINES=1 -DFAILURES=1 -DLOSSES=1
node_request_fail_dup    short   all     pass      node_request -DDUPS=1 -DFAILURES=1
node_request_hang        short   all     pass      node_request -DHANGS=1 -DLOSSES=1
node_request_hang_late   short   all     pass      node_request -DHANGS=1 -DDEADLINES=1
node_request_4           short   all     pass      node_request -DREQUESTS=4 -DLOSSES=1
node_request_4_late      short   all     pass      node_request -DREQUESTS=4 -DDEADLINES=1
node_request_cycle       short   cycles  pass      node_request -DLOSSES=1 -DDUPS=1
node_request_cycle_late  short   cycles  pass      node_request -DDEADLINES=1 -DLOSSES=1
node_request_cycle_fail  short   cycles  pass      node_request -DFAILURES=1 -DLOSSES=1
-node_DEDUPE             short   all     assert    node_request -DDUPS=1 -DNO_DEDUPE
-node_PREVIOUS           short   all     assert    node_request -DNO_PREVIOUS
-node_RETRY              short   all     deadlock  node_request -DLOSSES=1 -DNO_RETRY
-node_ASK_ANSWER         short   all     deadlock  node_request -DLOSSES=1 -DNO_ASK_ANSWER
-node_KEPT               short   cycles  endless   node_request -DLOSSES=1 -DNO_KEPT
-node_KEEP_DEPTH         short   cycles  endless   node_request -DLOSSES=1 -DKEEP_DEPTH
-node_DEADLINE           short   all     assert    node_request -DDEADLINES=1 -DNO_DEADLINE_DROP
-node_LEAD_FIRST         short   all     assert    node_request -DDEADLINES=1 -DLEAD_FIRST
-node_GIVE_UP            short   all     deadlock  node_request -DHANGS=1 -DNO_GIVE_UP
-node_GAP                short   all     deadlock  node_request -DDEADLINES=1 -DLOSSES=1 -DNO_GAP
-node_VOID_FRAME         short   cycles  endless   node_request -DDEADLINES=1 -DLOSSES=1 -DNO_VOID_FRAME
-node_VOID               short   all     assert    node_request -DDEADLINES=1 -DNO_VOID
-node_VOID_FAIL          short   all     assert    node_request -DFAILURES=1 -DNO_VOID
-node_START_AFTER        short   all     assert    node_request -DDEADLINES=1 -DLOSSES=1 -DNO_START_AFTER_ERROR
-node_START_EARLY        short   all     deadlock  node_request -DDEADLINES=1 -DSTART_EARLY
rejoin                   short   all     pass      node_rejoin -DLOSSES=1 -DDUPS=1 -DDEATHS=1 -DSILENCES=1
rejoin_deaths            short   all     pass      node_rejoin -DDUPS=1 -DDEATHS=2
rejoin_silences          short   all     pass      node_rejoin -DDUPS=2 -DSILENCES=2 -DLOSSES=1
rejoin_ranks             short   all     pass      node_rejoin -DRANK_LOSSES=1 -DDEATHS=1 -DSILENCES=1 -DDUPS=1 -DLOSSES=1
rejoin_crash             short   all     pass      node_rejoin -DCRASHES=1 -DDEATHS=1 -DDUPS=1 -DLOSSES=1
rejoin_second            short   all     pass      node_rejoin -DSECOND -DCRASHES=1 -DDEATHS=1 -DDUPS=1
rejoin_cycle             short   cycles  pass      node_rejoin -DLOSSES=1 -DSILENCES=1 -DDEATHS=1
rejoin_cycle_second      short   cycles  pass      node_rejoin -DSECOND -DCRASHES=1 -DDEATHS=1
rejoin_cycle_ranks       short   cycles  pass      node_rejoin -DRANK_LOSSES=1 -DDEATHS=1 -DLOSSES=1
rejoin_answer            short   all     pass      node_rejoin -DDEATHS=1 -DDUPS=2 -DSILENCES=1 -DNO_ANSWER_INCARNATION
rejoin_all               short   all     pass      node_rejoin -DALLS=2 -DLOSSES=1 -DDUPS=1 -DDEATHS=1 -DSILENCES=1
rejoin_all_peers         short   all     pass      node_rejoin -DALLS=3 -DPEERS=1 -DLOSSES=1 -DDEATHS=1
rejoin_all_second        short   all     pass      node_rejoin -DALLS=3 -DPEERS=1 -DSECOND -DDEATHS=1
rejoin_all_ranks         short   all     pass      node_rejoin -DALLS=2 -DRANK_LOSSES=1 -DDEATHS=1 -DDUPS=1
rejoin_cycle_all         short   cycles  pass      node_rejoin -DALLS=2 -DPEERS=1 -DLOSSES=1 -DDEATHS=1
-rejoin_REFUSAL          short   all     assert    node_rejoin -DSECOND -DNO_REFUSAL
-rejoin_TRY              short   all     assert    node_rejoin -DDUPS=1 -DRANK_LOSSES=1 -DNO_TRY_CHECK
-rejoin_RESUME           short   all     assert    node_rejoin -DRANK_LOSSES=1 -DRESUME_ALWAYS
-rejoin_KEEP             short   all     assert    node_rejoin -DRANK_LOSSES=1 -DKEEP_INCARNATION
-rejoin_START            short   all     assert    node_rejoin -DDEATHS=1 -DNO_START_AT_REJOIN
-rejoin_FAIL             short   cycles  endless   node_rejoin -DDEATHS=1 -DNO_FAIL_AT_DEATH
-rejoin_LEAD             short   all     deadlock  node_rejoin -DSECOND -DCRASHES=1 -DNO_LEAD_INCARNATION
-rejoin_AGENT            short   all     assert    node_rejoin -DDEATHS=1 -DNO_AGENT_INCARNATION
-rejoin_AGENT_TWO        short   all     assert    node_rejoin -DSECOND -DDEATHS=1 -DNO_AGENT_INCARNATION
-rejoin_VERSION          short   all     assert    node_rejoin -DALLS=1 -DDEATHS=1 -DNO_VERSION_CHECK
-rejoin_SAME             short   all     assert    node_rejoin -DALLS=1 -DDEATHS=1 -DSAME_VERSION
-rejoin_TABLE            short   all     assert    node_rejoin -DALLS=1 -DPEERS=1 -DSECOND -DDEATHS=1 -DNO_TABLE_INCARNATION
-rejoin_VOID             short   all     assert    node_rejoin -DDEATHS=1 -DNO_VOID_AT_WELCOME
-rejoin_SILENCE          short   all     deadlock  node_rejoin -DDEATHS=1 -DNO_HELLO_AT_SILENCE
-rejoin_SEQUENCE         short   all     assert    node_rejoin -DDUPS=1 -DNO_SEQUENCE_CHECK
takeover                 short   all     pass      node_takeover -DRESUMES=1 -DLOSSES=1 -DDUPS=1
takeover_kill            short   all     pass      node_takeover -DKILLS=1 -DLOSSES=1 -DDUPS=1
takeover_silence         short   all     pass      node_takeover -DSILENCES=1 -DLOSSES=1 -DRESUMES=1
takeover_grace           short   all     pass      node_takeover -DGRACES=1 -DRESUMES=1 -DLOSSES=1
takeover_cycle           short   cycles  pass      node_takeover -DLOSSES=1 -DRESUMES=1
takeover_cycle_silence   short   cycles  pass      node_takeover -DSILENCES=1 -DKILLS=1
takeover_cycle_grace     short   cycles  pass      node_takeover -DGRACES=1 -DRESUMES=1
takeover_reset           short   all     pass      node_takeover -DRESET -DNO_START_ABOVE -DNO_FREEZE -DRESUMES=1 -DLOSSES=1 -DDUPS=1
takeover_reset_grace     short   all     pass      node_takeover -DRESET -DNO_START_ABOVE -DNO_FREEZE -DSILENCES=1 -DGRACES=1
takeover_reset_cycle     short   cycles  pass      node_takeover -DRESET -DNO_START_ABOVE -DNO_FREEZE -DRESUMES=1 -DLOSSES=1
-takeover_AGENT          short   all     assert    node_takeover -DNO_AGENT_EPOCH
-takeover_ANSWER         short   all     assert    node_takeover -DNO_ANSWER_EPOCH
-takeover_BEAT           short   all     deadlock  node_takeover -DNO_BEAT_EPOCH
-takeover_ABOVE          short   cycles  endless   node_takeover -DNO_START_ABOVE
-takeover_FREEZE         short   cycles  endless   node_takeover -DNO_FREEZE
-takeover_TRY            short   all     assert    node_takeover -DRESUMES=1 -DNO_TRY_CHECK
-takeover_START          short   all     assert    node_takeover -DNO_START_AT_TAKEOVER
-takeover_VOID           short   all     assert    node_takeover -DNO_VOID_AT_WELCOME
-takeover_KEEP           short   all     assert    node_takeover -DGRACES=1 -DRESUMES=1 -DKEEP_INCARNATION
-takeover_FAIL           short   all     deadlock  node_takeover -DNO_FAIL
-reset_AGENT             short   all     assert    node_takeover -DRESET -DNO_START_ABOVE -DNO_FREEZE -DNO_AGENT_EPOCH
-reset_ANSWER            short   all     assert    node_takeover -DRESET -DNO_START_ABOVE -DNO_FREEZE -DNO_ANSWER_EPOCH
node_request_late_dup    long    all     pass      node_request -DDEADLINES=1 -DLOSSES=1 -DDUPS=1
rejoin_second_silence    long    all     pass      node_rejoin -DSECOND -DCRASHES=1 -DDEATHS=1 -DSILENCES=1 -DDUPS=1
kv_two_long              long   all     pass      kv -DREADERS=2 -DTAKES=4
pool_crash_3             long   bits    pass      pool -DPROCESSES=3 -DCRASHES=1 -DOPS=1
no_cycle_crash           long   cycles  pass      gate -DREQUESTS=1 -DSLICE -DCRASHES=1
no_cycle_spurious        long   cycles  pass      gate -DREQUESTS=1 -DSLICE -DLOSSES=1 -DSPURS=1 -DDEADLINES=1
loss_spurious            long   all     pass      gate -DREQUESTS=2 -DSLICE -DLOSSES=1 -DSPURS=1
hang_subsets             long   bits    pass      gate -DREQUESTS=3 -DDEPTH=2 -DHANG=2 -DSUBSETS -DSLICE
hang_late                long   bits    pass      gate -DREQUESTS=2 -DDEPTH=2 -DHANG=1 -DDEADLINES=1 -DSLICE -DLOSSES=1
no_late_rule             long   bits    pass      gate -DREQUESTS=2 -DDEADLINES=1 -DNO_LATE_RULE
depth2_crash             long   bits    pass      gate -DREQUESTS=2 -DDEPTH=2 -DCRASHES=1
depth2_deadline          long   bits    pass      gate -DREQUESTS=2 -DDEPTH=2 -DDEADLINES=1
depth2_failure3          long   bits    pass      gate -DREQUESTS=3 -DDEPTH=2 -DSUBSETS -DFAILURES=1
depth2_subsets3          long   bits    pass      gate -DREQUESTS=3 -DDEPTH=2 -DSUBSETS -DNO_REPLY_TOO
depth2_loss              long   bits    pass      gate -DREQUESTS=2 -DDEPTH=2 -DSUBSETS -DSLICE -DLOSSES=1
crash_failure            long   bits    pass      gate -DREQUESTS=2 -DCRASHES=1 -DFAILURES=1
stall_failure            long   bits    pass      gate -DREQUESTS=2 -DCRASHES=1 -DSTALLS=1 -DFAILURES=1 -DSLICE
deadline_loss            long   bits    pass      gate -DREQUESTS=2 -DDEADLINES=1 -DSLICE -DLOSSES=1
stop_crash               long   bits    pass      gate -DREQUESTS=2 -DSTOP -DCRASHES=1
futex_meddle2_1          long   all     pass      futex_gate -DREQUESTS=2 -DDEPTH=2 -DMEDDLES=1 -DSLICE_QUIET
futex_meddle_late        long   all     pass      futex_gate -DREQUESTS=2 -DMEDDLES=1 -DDEADLINES=1 -DSLICE
futex_meddle_die         long   bits    pass      futex_gate -DREQUESTS=1 -DMEDDLES=1 -DCRASHES=1 -DSLICE
futex_crash2             long   bits    pass      futex_gate -DREQUESTS=2 -DDEPTH=2 -DCRASHES=1 -DSLICE
group_abort2             long   bits    pass      group -DOPS=1 -DABORTS=1
group_crash3             long   bits    pass      group -DOPS=1 -DCRASHES=1 -DSLICE
restart_3                long   all     pass      gate -DREQUESTS=3 -DCRASHES=1 -DRESTARTS=1
restart_stop2            long   all     pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DSTOP
restart_late2            long   bits    pass      gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DDEPTH=2 -DDEADLINES=1
futex_restart_2          long   all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DDEPTH=2 -DSLICE
futex_restart_22         long   all     pass      futex_gate -DREQUESTS=2 -DCRASHES=2 -DRESTARTS=2 -DSLICE
futex_restart_late2      long   all     pass      futex_gate -DREQUESTS=2 -DCRASHES=1 -DRESTARTS=1 -DLATES=2 -DSLICE_QUIET
group_incarnations_3_ops long   all     pass      group -DRANKS=2 -DEPOCHS=1 -DCRASHES=2 -DSLICE -DINCARNATIONS=3 -DCRASH_LAST
legacy_crash2            long   all     pass      legacy -DREQUESTS=2 -DCRASHES=1 -DDEADLINES=1
RUNS
}

fail() {
    echo "$name: $1" >&2
    grep -v "^Depth=" "$out" | head -n 40 >&2
    exit 1
}

one() {
    name=$2
    set -- "$1" $(runs | awk -v name="$name" '$1 == name')
    work=$1/$name kind=$4 expected=$5 model=$6
    shift 6
    out=$work/out
    mkdir "$work"
    cd "$work"
    for switch in "$@"; do
        switch=${switch#-D}
        grep -qw "${switch%%=*}" "$here/$model.pml" || fail "$model.pml has no switch ${switch%%=*}"
    done
    spin -a "$@" "$here/$model.pml" >out 2>&1 || fail "spin refuses the model"
    case $kind in
    all) compile="-DSAFETY -DNOCLAIM -DCOLLAPSE" run= ;;
    bits) compile="-DSAFETY -DNOCLAIM -DBITSTATE" run=-w30 ;;
    cycles) compile="-DNP -DCOLLAPSE" run=-l ;;
    fair) compile="-DNFAIR=3 -DCOLLAPSE" run="-a -f" ;;
    esac
    # 1,800 MiB at most; -w22: what does not know its size yet starts small.
    $compiler -O2 -w $compile -DVECTORSZ=1024 -DMEMLIM=1800 -o pan pan.c >out 2>&1 ||
        fail "the verifier does not compile"
    begin=$(date +%s)
    nice ./pan -m1000000 ${run:--w22} >out 2>&1 || true
    seconds=$(($(date +%s) - begin))
    case $expected in
    pass) pattern='errors: 0$' ;;
    assert) pattern='^pan:.*assertion violated' ;;
    deadlock) pattern='^pan:.*invalid end state' ;;
    cycle) pattern='^pan:.*acceptance cycle' ;;
    endless) pattern='^pan:.*non-progress cycle' ;;
    esac
    grep -q "$pattern" out || fail "expected '$expected', found another end"
    if grep -q 'max search depth too small\|reached -DMEMLIM\|out of memory\|Interrupted' out; then
        fail "not searched to the end"
    fi
    states=$(awk '/states, stored/ { print $1; exit }' out)
    printf '%-18s %-6s %-8s %9s states %4d s\n' "$name" "$kind" "$expected" "$states" "$seconds"
    cd /
    rm -r "$work"
}

if [ "${1:-}" = --one ]; then
    one "$2" "$3"
    exit
fi

for command in spin "$compiler" awk; do
    command -v "$command" >/dev/null || { echo "$0: no $command: skipped"; exit 77; }
done
length=${1:-short} jobs=${2:-2} models=${3:-}
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
trap 'exit 1' HUP INT TERM
runs | awk -v length_="$length" -v models=" $models " \
    '($2 == "short" || length_ == "long") && (models == "  " || index(models, " " $5 " ")) { print $1 }' |
    xargs -P "$jobs" -n 1 sh "$here/check.sh" --one "$directory"
