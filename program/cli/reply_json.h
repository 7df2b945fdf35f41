/*
 * reply_json: messages of proto/control.proto as JSON, made from their descriptors.
 *
 * A field has the key of its name. Times, fields named ..._ns, become seconds, named ..._s; fixed64
 * fields, digests, become 16 hexadecimal digits; bytes become hexadecimal digits. Enum values
 * become words. An absent field is null; an absent list is empty. A list of messages in which
 * nothing repeats the name of an item is an object by name.
 *
 * Threads: any. Blocks: nothing. Ownership: the JSON is the caller's.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_REPLY_JSON_H
#define COX_PROGRAM_REPLY_JSON_H

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

/* NULL: no memory. */
json_t *cox_reply_json(const ProtobufCMessage *message);

#endif
