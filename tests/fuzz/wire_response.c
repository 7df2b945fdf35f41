/* An ExecuteResponse. */
#define MESSAGE Coxswain__ExecuteResponse
#define UNPACK cox_wire_response_unpack
#define PACK cox_wire_response_pack
#define SIZE cox_wire_response_size
#include "wire_message.h"
