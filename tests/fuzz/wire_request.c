/* An ExecuteRequest. */
#define MESSAGE Coxswain__ExecuteRequest
#define UNPACK cox_wire_request_unpack
#define PACK cox_wire_request_pack
#define SIZE cox_wire_request_size
#include "wire_message.h"
