#include "load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int load_init(struct load *load, size_t request_size, size_t reply_size)
{
    *load = (struct load){.request_size = request_size, .reply_size = reply_size};
    load->copy = calloc(1, request_size); /* touched here, not in the first round */
    return load->copy ? 0 : -ENOMEM;
}

void load_deinit(struct load *load)
{
    free(load->copy);
    load->copy = NULL;
}

void load_answer(struct load *load, const uint8_t *request, uint32_t rank, uint8_t *reply)
{
    memcpy(load->copy, request, load->request_size);
    /* The compiler must not find out that most of the copy is never looked at. */
    __asm__ volatile("" : : "r"(load->copy) : "memory");
    const uint64_t who = rank;
    memcpy(reply, load->copy, sizeof(uint64_t));
    memcpy(reply + sizeof(uint64_t), &who, sizeof who);
    memset(reply + LOAD_SIZE_MIN, 0x5a, load->reply_size - LOAD_SIZE_MIN);
}

void load_number(uint8_t *request, uint64_t round)
{
    memcpy(request, &round, sizeof round);
}

bool load_matches(const uint8_t *reply, uint32_t rank, uint64_t round)
{
    const uint64_t expected[2] = {round, rank};
    return memcmp(reply, expected, sizeof expected) == 0;
}
