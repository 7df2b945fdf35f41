/*
 * handle_fixture: what the tests of by-value handles share: objects to export, forged handles, and
 * filters that take system calls away from a child.
 */
#ifndef COX_TESTS_UNIT_HANDLE_FIXTURE_H
#define COX_TESTS_UNIT_HANDLE_FIXTURE_H

#include <coxswain/handle.h>
#include "channel/handle/handle_internal.h"

#include "channel_fixture.h"

#define NOBODY 65534

/* A memfd of `size` bytes, byte i of which is pattern(seed, i). Close-on-exec. */
int object_new(size_t size, unsigned seed);
uint8_t object_byte(unsigned seed, uint64_t i);
/* Whether the fd's object, from offset on, holds what object_new put there. */
bool object_is(int fd, uint64_t offset, size_t size, unsigned seed);

/* Writes the value into the bytes of a handle and makes the crc right again. */
void handle_forge(struct cox_handle *handle, size_t offset, size_t size, uint64_t value);

/* Without a control socket, for a second at most. */
int handle_open_plain(const struct cox_handle *handle, int *ret_fd, struct cox_error *err);
/* Asserts that it opens, and is the object of this seed. */
void handle_opens(const struct cox_handle *handle, unsigned seed);
/* Asserts that it is refused with this code and word, and that nothing is given. */
void handle_refused(const struct cox_handle *handle, int code, const char *word);

/* In a child: from now on the system call fails with this error; 0: it kills the process, with
 * SIGSYS. argument is compared with the first one; ANY_ARGUMENT: whatever it is. */
#define ANY_ARGUMENT UINT64_MAX
void call_deny(uint32_t number, uint64_t argument, int error);
/* The same of another argument than the first, by its lower 32 bits. */
void argument_deny(uint32_t number, unsigned which, uint32_t argument, int error);
bool filters_possible(void);

/* In a child of root: another user, with ordinary rights in /proc. */
void user_change(uid_t uid);

#endif
