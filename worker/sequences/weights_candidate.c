#include "weights_candidate.h"

#include <inttypes.h>
#include <string.h>

#include "proto/executor.pb-c.h"

int cox_weights_candidate_read(const Coxswain__ExecuteRequest *request,
                               struct cox_weights_candidate *ret_candidate, struct cox_error *err)
{
    const Coxswain__WeightsCandidate *message = request->weights;
    struct cox_weights_candidate candidate = {
        .version = request->weights_version,
        .deadline_ns = request->deadline_ns ? request->deadline_ns : COX_DEADLINE_NEVER,
    };

    if (!message)
        return COX_EMPTY;
    candidate.size = message->size;
    if (!candidate.version || !candidate.size ||
        message->handle.len != sizeof candidate.handle.bytes)
        return cox_fail(err, COX_CORRUPT,
                        "version %" PRIu64 " of the model's weights is offered as %" PRIu64
                        " bytes with a handle of %zu: expected a version, a size and %zu",
                        candidate.version, candidate.size, message->handle.len,
                        sizeof candidate.handle.bytes);
    memcpy(candidate.handle.bytes, message->handle.data, sizeof candidate.handle.bytes);
    *ret_candidate = candidate;
    return 0;
}
