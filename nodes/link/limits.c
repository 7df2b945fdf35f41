#include "limits.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "channel/text/text.h"

/* How much the clocks of two machines may differ. */
#define CLOCKS_DIFFER_NS (UINT64_C(86400) * COX_NSEC_PER_SEC)
uint64_t cox_real_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec;
}

bool cox_epoch_can_be(uint64_t epoch, uint64_t real_ns)
{
    return epoch <= real_ns + CLOCKS_DIFFER_NS;
}

/* Text of a peer that goes into logs as it is: no byte of it moves a cursor or begins a line. */
static int text_check(const char *what, const char *text, struct cox_error *err)
{
    const char *bad = text ? cox_text_find_control(text) : NULL;
    if (bad)
        return cox_fail(err, COX_CORRUPT,
                        "its hello has a byte 0x%02x in its %s: expected printable UTF-8",
                        (unsigned char)*bad, what);
    return 0;
}

static int texts_check(const CoxNode__Hello *hello, struct cox_error *err)
{
    int r = text_check("version", hello->version, err);
    if (r == 0)
        r = text_check("address", hello->address, err);
    if (r == 0)
        r = text_check("lead's address", hello->lead_address, err);
    for (size_t i = 0; r == 0 && i < hello->n_facts; i++) {
        r = text_check("facts", hello->facts[i]->name, err);
        if (r == 0)
            r = text_check("facts", hello->facts[i]->value, err);
    }
    return r;
}

int cox_hello_check(const CoxNode__Hello *hello, uint64_t real_ns, struct cox_error *err)
{
    if (hello->n_facts > COX_HELLO_FACT_MAX)
        return cox_fail(err, COX_CORRUPT, "its hello has %zu facts: at most %d are taken",
                        hello->n_facts, COX_HELLO_FACT_MAX);
    if (!cox_epoch_can_be(hello->epoch, real_ns))
        return cox_fail(err, COX_CORRUPT,
                        "its hello says that it follows epoch %" PRIu64 ", %" PRIu64
                        " h ahead of the clock of this machine: an epoch is the time at which a "
                        "lead began: set the clocks",
                        hello->epoch, (hello->epoch - real_ns) / (3600 * COX_NSEC_PER_SEC));
    for (size_t c = 0; c < hello->n_channels; c++)
        if (hello->channels[c]->through > COX_NODE_SEQUENCE_MAX)
            return cox_fail(err, COX_CORRUPT,
                            "its hello says that it has requests up to %" PRIu64
                            " of channel %zu: no lead can have sent more than %" PRIu64,
                            hello->channels[c]->through, c, COX_NODE_SEQUENCE_MAX);
    if (hello->rank_group_incarnation > COX_NODE_SEQUENCE_MAX)
        return cox_fail(err, COX_CORRUPT,
                        "its hello says that its ranks have incarnation %" PRIu64
                        " of the rank group: there can be %" PRIu64 " at most",
                        hello->rank_group_incarnation, COX_NODE_SEQUENCE_MAX);
    if (hello->rank_first > COX_RANK_COUNT_MAX || hello->rank_count > COX_RANK_COUNT_MAX ||
        hello->world > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_CORRUPT,
                        "its hello says that it has %" PRIu32 " ranks, from %" PRIu32
                        " on, of %" PRIu32 ": a group has %d at most",
                        hello->rank_count, hello->rank_first, hello->world, COX_RANK_COUNT_MAX);
    return texts_check(hello, err);
}

int cox_agent_beat_check(const CoxNode__AgentBeat *beat, uint32_t channel, uint64_t last_sent,
                         struct cox_error *err)
{
    if (channel >= beat->n_channels)
        return 0;
    const CoxNode__Channel *said = beat->channels[channel];
    uint64_t most = said->through > said->done ? said->through : said->done;
    for (size_t i = 0; i < said->n_answered; i++)
        most = said->answered[i] > most ? said->answered[i] : most;
    return most <= last_sent ? 0
                             : cox_fail(err, COX_CORRUPT,
                                        "a beat speaks of request %" PRIu64 " of channel %" PRIu32
                                        ": the last one that was sent is %" PRIu64,
                                        most, channel, last_sent);
}
