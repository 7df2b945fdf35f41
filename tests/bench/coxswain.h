/*
 * coxswain: Coxswain with opaque bytes, as a subject. Options of its own (group.h): --attach, --by,
 * --spin, --depth, --callers.
 *
 * A round is from submit to handler entry on the response thread, and the next submit is in the
 * handler; by call, it is one synchronous call. With several requests in flight, or several threads
 * that call, a sample is the time between two completions: its mean is what a request takes of the
 * whole.
 */
#ifndef BENCH_COXSWAIN_H
#define BENCH_COXSWAIN_H

/* Both return the exit status. */
int coxswain_subject_main(int argc, char **argv);
int coxswain_worker_main(int argc, char **argv);
#define COXSWAIN_WORDS "bytes"

#endif
