/*
 * inverted_domain: a domain outside the library that stores every bit inverted. Code that reads its
 * bytes past its functions, or forgets a conversion, gets wrong bytes. It includes the public
 * header alone, as a user's domain would. Threads, ownership, blocks, deaths: as
 * coxswain/memory/domain.h says; the context is the caller's.
 */
#ifndef COX_TESTS_LIB_INVERTED_DOMAIN_H
#define COX_TESTS_LIB_INVERTED_DOMAIN_H

#include <coxswain/memory/domain.h>

#define INVERTED_KIND 77

/* The context that it is registered with. */
struct inverted_context {
    /* of all memories together; 0: as much as there is */
    uint64_t size_max;
    /* of those that are there */
    uint64_t size;
    /* so often */
    uint32_t created, attached;
    /* so often */
    uint32_t copied_to, copied_from;
};

extern const struct cox_domain_functions inverted_domain_functions;

#endif
