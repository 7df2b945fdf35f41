#include "large_payload_ref.h"

#include <string.h>

#include "proto/executor.pb-c.h"

void cox_large_payload_ref_fill(struct Coxswain__LargePayloadRef *message,
                                struct cox_large_payload_ref *ref)
{
    coxswain__large_payload_ref__init(message);
    message->has_handle = message->has_size = 1;
    message->handle.data = ref->handle.bytes;
    message->handle.len = sizeof ref->handle.bytes;
    message->size = ref->size;
}

int cox_large_payload_ref_read(const struct Coxswain__LargePayloadRef *message,
                               struct cox_large_payload_ref *ret_ref, struct cox_error *err)
{
    if (!message->has_handle || !message->has_size ||
        message->handle.len != sizeof ret_ref->handle.bytes)
        return cox_fail(err, COX_CORRUPT, "a block's handle of %zu bytes, expected %zu, and a size",
                        message->handle.len, sizeof ret_ref->handle.bytes);
    memcpy(ret_ref->handle.bytes, message->handle.data, sizeof ret_ref->handle.bytes);
    ret_ref->size = message->size;
    return 0;
}
