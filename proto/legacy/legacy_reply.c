#include "legacy_reply.h"

#include "proto/executor.pb-c.h"

void cox_legacy_reply_read(Coxswain__ExecuteResponse *response, uint32_t rank)
{
    const Coxswain__ExecuteModelResponse *step =
        response->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE
            ? response->execute_model_response
            : NULL;
    response->rank = (int32_t)rank;
    response->large_payload = NULL;
    if (response->status == 0 && step && step->n_outputs == 0 && step->err_msg && step->err_msg[0])
        response->status = COX_REJECTED;
}
