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
#ifdef __clang__ /* whose pedantry sys/sdt.h does not meet */
#define COX_PROBE_BEGIN                                                                            \
    _Pragma("clang diagnostic push")                                                               \
        _Pragma("clang diagnostic ignored \"-Wgnu-zero-variadic-macro-arguments\"")
#define COX_PROBE_END _Pragma("clang diagnostic pop")
#else
#define COX_PROBE_BEGIN
#define COX_PROBE_END
#endif
/* channel, sequence, and two more numbers. */
#define COX_PROBE(name, channel, sequence, a, b)                                                   \
    do {                                                                                           \
        COX_PROBE_BEGIN                                                                            \
        DTRACE_PROBE4(coxswain, name, channel, sequence, a, b);                                    \
        COX_PROBE_END                                                                              \
    } while (0)
#else
#define COX_PROBE(name, channel, sequence, a, b)                                                   \
    ((void)(channel), (void)(sequence), (void)(a), (void)(b))
#endif

#endif
