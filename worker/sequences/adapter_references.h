/*
 * adapter_references: the names of LoRA adapters that live sequences of the table are computed
 * with, and how many of them there are.
 *
 * A sequence takes its adapter's name when it is announced and gives it when nothing can bring it
 * back, so a name in a step is counted from before the step's callback until after its end. That is
 * what lets an adapter be looked up without a lock in the callback: an unload has closed the
 * name first and found no sequence.
 *
 * Threads: take, again and give on the execute thread; close and open on any one thread at a time;
 *   count from any.
 * Ownership: the object owns the names; one that was taken lives until it was given as often.
 * Blocks: close, until its deadline; the rest for the length of a list of names.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_ADAPTER_REFERENCES_H
#define COX_WORKER_ADAPTER_REFERENCES_H

#include <coxswain/worker.h>

struct cox_adapter_references;

/* A name in use; the same pointer for the same name, as long as one is in use. */
struct cox_adapter_reference {
    struct cox_adapter_reference *next;
    uint32_t count;
    bool closed;
    /* with its 0 */
    char name[];
};

/* Returns 0 or -ENOMEM. */
int cox_adapter_references_new(struct cox_adapter_references **ret_references);
struct cox_adapter_references *cox_adapter_references_free(
    struct cox_adapter_references *references); /* NULL-safe */

/* Counts a sequence. Returns 0; COX_TOO_LARGE: a name longer than COX_LORA_NAME_LENGTH_MAX;
 * COX_BUSY: it is closed; -ENOMEM. */
int cox_adapter_references_take(struct cox_adapter_references *references, const char *name,
                                struct cox_adapter_reference **ret_reference);
/* Counts a copy of a sequence: never refused. reference NULL: nothing. */
struct cox_adapter_reference *cox_adapter_references_again(
    struct cox_adapter_references *references, struct cox_adapter_reference *reference);
/* Releases one count; reference NULL: nothing. */
void cox_adapter_references_give(struct cox_adapter_references *references,
                                 struct cox_adapter_reference *reference);

/* Refuses the name from now on and waits until no sequence uses it. cancelled is called every 50 ms
 * meanwhile.
 * Returns
 *   0: no sequence uses it, and the name stays closed
 *   COX_BUSY: *ret_count still use it at the deadline or when cancelled returned true; the name is
 *     open again
 *   -ENOMEM
 */
int cox_adapter_references_close(struct cox_adapter_references *references, const char *name,
                                 uint64_t deadline_ns, bool (*cancelled)(void *context),
                                 void *context, uint32_t *ret_count);
/* Accepts every name again. */
void cox_adapter_references_open(struct cox_adapter_references *references);

uint32_t cox_adapter_references_count(struct cox_adapter_references *references, const char *name);

#endif
