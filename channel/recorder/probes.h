/*
 * probes: USDT probes of the provider `coxswain`, at the points that the recorder records; see
 * docs/tracing.md for the names and arguments, which are an interface. A probe is one nop until a
 * tracer replaces it; without sys/sdt.h at build time there are none. They do not depend on whether
 * a recorder is on.
 *
 * Threads: any.
 */
#ifndef COX_CHANNEL_PROBES_H
#define COX_CHANNEL_PROBES_H

#if COX_HAVE_SDT
#include <sys/sdt.h>
/* channel, sequence, and two more numbers. */
#define COX_PROBE(name, channel, sequence, a, b)                                                   \
    DTRACE_PROBE4(coxswain, name, channel, sequence, a, b)
#else
#define COX_PROBE(name, channel, sequence, a, b)                                                   \
    ((void)(channel), (void)(sequence), (void)(a), (void)(b))
#endif

#endif
