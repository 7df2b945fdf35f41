/* kv_reference: references to KV blocks (server.h) in messages. */
#ifndef COX_COORDINATOR_KV_REFERENCE_H
#define COX_COORDINATOR_KV_REFERENCE_H

#include <coxswain/server.h>

struct CoxswainControl__KvReference;
/* From a message of another process, lent.
 * Returns
 *   0
 *   COX_INVALID: a field is missing or out of range
 */
int cox_kv_reference_read(const struct CoxswainControl__KvReference *message,
                          struct cox_kv_reference *ret_reference, struct cox_error *err);
/* Fills in a message, which borrows all of reference. */
void cox_kv_reference_write(const struct cox_kv_reference *reference,
                            struct CoxswainControl__KvReference *message);

#endif
