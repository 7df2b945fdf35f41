/*
 * weights_attack: what a hostile rank does to the weights that its coordinator shares: it finds
 * their memory in its own address space, and tries every way to change them that a process of the
 * same user has.
 *
 * Process: a rank. Thread: that of the execute channel, between two steps.
 * Ownership: report_fd is the caller's, open for appending.
 * Blocks: nothing.
 * If the process dies: the lines written so far are in the report.
 */
#ifndef COX_TESTS_MULTI_WEIGHTS_ATTACK_H
#define COX_TESTS_MULTI_WEIGHTS_ATTACK_H

/* The kinds of attempts, one line "KIND: done" or "KIND: why not" each. */
#define WEIGHTS_ATTACK_KINDS(X)                                                                    \
    X("mprotect")                                                                                  \
    X("write by /proc/self/mem")                                                                   \
    X("madvise")                                                                                   \
    X("pwrite")                                                                                    \
    X("mmap")                                                                                      \
    X("punch")                                                                                     \
    X("shrink")                                                                                    \
    X("grow")                                                                                      \
    X("seal")

/* On every mapping that begins with a model's head, and every fd of that memory that this process
 * or its coordinator has. */
void weights_attack_memory(int report_fd);
/* Fills with zeros the words of pools and queues that both this process and its coordinator have:
 * "words: done". */
void weights_attack_words(int report_fd);

#endif
