/*
 * steps: Coxswain with real decode steps, as a subject: what the engine loop plans and packs,
 * protobuf unpacked in every rank and made into a batch, a token per sequence replied, gathered and
 * handed over. Options of its own (group.h): --attach, --sequences N. --bytes is not looked at.
 *
 * The sequences are announced in the first step; from then on steps are deltas on their base. A
 * round is from the packing of a planned step to the entry of the handler that gets the tokens,
 * which the next step is planned from; what the batcher takes is no part of it. Every token is
 * checked.
 */
#ifndef BENCH_STEPS_H
#define BENCH_STEPS_H

/* Both return the exit status. */
int steps_subject_main(int argc, char **argv);
int steps_worker_main(int argc, char **argv);
#define STEPS_WORDS "steps"

#endif
