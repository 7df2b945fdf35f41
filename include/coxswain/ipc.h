/*
 * ipc: the parts that need no group of workers.
 *
 *   base     status codes, errors with text, deadlines on the monotonic clock
 *   peer     the identity of a process, and whether it is alive
 *   handle   an fd as 64 bytes, with which another process opens the same object
 *   region   shared memory without a name
 *   image    memory that is filled once and then sealed
 *   spin     how long a wait spins before it blocks
 */
#ifndef COX_IPC_H
#define COX_IPC_H

#include "channel/base/version.h"
#include <coxswain/base.h>
#include "channel/base/peer.h"
#include <coxswain/handle.h>
#include "channel/memory/image.h"
#include "channel/shm/region.h"
#include "channel/base/spin.h"

#endif
