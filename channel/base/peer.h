/* peer: what the library has beyond the part of handle.h on peers. Its contract is the same. */
#ifndef COX_CHANNEL_PEER_H
#define COX_CHANNEL_PEER_H

#include <coxswain/handle.h>

/* Start time of a process.
 * Returns
 *   0
 *   COX_PEER_DEAD: there is none
 *   COX_CORRUPT
 *   -errno; -EACCES: /proc hides the process, or hid it when it ended
 */
int cox_peer_start_time(pid_t pid, uint64_t *ret_start);

/* True if /proc shows that a signal or a debugger has stopped the process, or the kernel says so to
 * this process, its parent; false also if it is unknown. A tracer that this process has started is
 * no debugger: it reads the stack of a child of this process, and lets it go on. */
bool cox_peer_stopped(pid_t pid);

/* What keeps the process from going on, as far as /proc shows: "stopped by a signal", "frozen by its
 * control group", "in the kernel (state D, FUNCTION)"; "": nothing does. The last is said of a
 * process one of whose threads waits in the kernel so that no signal wakes it: for a disk, a file
 * server, a driver. */
#define COX_PEER_HOLD_SIZE 96
void cox_peer_read_hold(pid_t pid, char text[COX_PEER_HOLD_SIZE]);
/* function: where a thread sleeps, of /proc/PID/wchan. One that a control group has frozen is in
 * __refrigerator (first version), or in do_freezer_trap (second), which compilers inline into
 * get_signal: no thread sleeps there for another reason. */
bool cox_peer_freezes_in(const char *function);

/* Sets whether the process is exiting, see cox_peer_exiting.
 * Returns
 *   0
 *   COX_PEER_DEAD: there is none
 *   COX_CORRUPT
 *   -errno
 */
int cox_peer_check_exiting(pid_t pid, bool *ret_exiting);
/* True if /proc shows that the process is exiting, or was killed and will exit, even though its
 * pidfd is not readable yet. The kernel closes its files about then, so other processes may already
 * have noticed. False also if it is unknown. */
bool cox_peer_exiting(pid_t pid);
/* True if /proc shows that the kernel writes the core of a process. None of its threads runs any
 * more, but its pidfd is readable only when the core is written. *ret_signal: what killed it; 0:
 * the kernel does not tell (before Linux 5.16). False also if it is unknown. */
bool cox_peer_dumps_core(pid_t pid, int *ret_signal);
/* Number of threads of a process, its first one included.
 * Returns
 *   0
 *   COX_PEER_DEAD
 *   COX_CORRUPT
 *   -errno
 */
int cox_peer_thread_count(pid_t pid, uint64_t *ret_count);

/* Processor time that all threads of a process have used, those that have ended included.
 * Returns
 *   0
 *   COX_PEER_DEAD
 *   -errno
 */
int cox_peer_cpu_time(pid_t pid, uint64_t *ret_ns);

/* Memory of a process that is resident, shared pages included.
 * Returns
 *   0
 *   COX_PEER_DEAD
 *   -errno
 */
int cox_peer_resident(pid_t pid, uint64_t *ret_bytes);

/* The mark of a process that a coordinator has started: its hard limit RLIMIT_LOCKS, which no
 * kernel since Linux 2.4 applies to anything. A coordinator gives its ranks one less than it has
 * itself. Children inherit the limit, also those whose parent has ended, and only a process with
 * CAP_SYS_RESOURCE can raise it again: a process below what the coordinator had before its first
 * rank is a rank or was started by one. Every process of the user can lower the limit of every
 * other one: what the coordinator has later says nothing. */
uint64_t cox_peer_own_mark(void);
/* False: ranks cannot have a lower limit, since this process has 0, or no limit can be set (gVisor,
 * a seccomp profile). */
bool cox_peer_can_mark(void);
/* Returns
 *   0
 *   COX_PEER_DEAD
 *   COX_CORRUPT
 *   -errno; -EACCES: /proc hides the process
 */
int cox_peer_read_mark(pid_t pid, uint64_t *ret_mark);
/* Lowers the mark of another process of this user to that of its ranks, for good.
 * Returns
 *   0
 *   COX_PEER_DEAD
 *   -errno
 */
int cox_peer_lower_mark(pid_t pid);
/* Name of the program that a process executes, as it has it in /proc (at most 15 bytes). Bytes that
 * are not printable ASCII are question marks; "?": unknown. */
#define COX_PEER_PROGRAM_SIZE 16
void cox_peer_read_program(pid_t pid, char text[COX_PEER_PROGRAM_SIZE]);

/* True if /proc shows that `ancestor` is pid itself or one of its ancestors. */
bool cox_peer_descends(pid_t pid, pid_t ancestor);
/* Another process that has the file open, as far as /proc shows; 0: none. */
pid_t cox_peer_find_holder(dev_t device, ino_t inode);

/* Fds that show other processes, as long as one of them is open, that this process lives: a lock, a
 * socket on which it listens. A child of fork would hold them beyond its parent's death, and so
 * closes them first of all. Such an fd is opened after hold, and ends with remove or close. At most
 * COX_UNFORKED_MAX are possible; a further one is left to the child. */
#define COX_UNFORKED_MAX 512
/* Until the release no thread forks. */
void cox_unforked_hold(void);
/* Takes the fd that was opened, -1 with errno for none.
 * Returns
 *   0
 *   -errno: *fd is -1
 */
int cox_unforked_release(int *fd);
/* Before it is closed; another fd is left alone. */
void cox_unforked_remove(int fd);
/* Removes and closes it. */
void cox_unforked_close(int *fd);

#endif
