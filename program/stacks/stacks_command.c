/* coxswain stacks: where the threads of a group's ranks are. */
#include "stacks_command.h"

#include "program/cli/client_command.h"
#include "program/cli/command.h"
#include "program/cli/group_options.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <stdio.h>

/* Of 128 ranks, and others that ask at the same time. */
#define TIMEOUT_MS 35000

typedef CoxswainControl__StacksReply stacks_reply;

struct stacks_choice {
    struct cox_connection connection;
    bool rank_given;
    uint32_t rank;
};

int cox_stacks_ask(struct cox_client *client, const uint32_t *rank, uint64_t deadline_ns,
                   const stacks_reply **ret_reply, struct cox_error *err)
{
    CoxswainControl__StacksRequest stacks = COXSWAIN_CONTROL__STACKS_REQUEST__INIT;
    const ProtobufCMessage *reply = NULL;
    stacks.has_rank = rank != NULL;
    stacks.rank = rank ? *rank : 0;
    int r = cox_client_expect(client, COX_REQUEST(STACKS), &stacks.base, COX_REPLY(STACKS),
                              deadline_ns, &reply, err);
    if (r == 0)
        *ret_reply = (const stacks_reply *)reply;
    return r;
}

static int ask(const void *context, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct stacks_choice *choice = context;
    const stacks_reply *reply = NULL;
    (void)timeout_ms;
    int r =
        cox_stacks_ask(client, choice->rank_given ? &choice->rank : NULL, deadline_ns, &reply, err);
    if (r == 0)
        *ret_reply = &reply->base;
    return r;
}

static void print(const void *context, const ProtobufCMessage *message)
{
    const stacks_reply *reply = (const stacks_reply *)message;
    (void)context;
    printf("%s\n", reply->text ? reply->text : "");
    for (size_t i = 0; i < reply->n_ranks; i++) {
        const CoxswainControl__RankStacks *rank = reply->ranks[i];
        printf("\nrank %" PRIu32 " (pid %" PRId64 ")", rank->rank, rank->pid);
        if (rank->has_age_ns)
            printf(", at its request since %.3f s", (double)rank->age_ns / 1e9);
        printf(": %s\n%s", rank->summary ? rank->summary : "", rank->text ? rank->text : "");
    }
}

static int run(void *context)
{
    const struct stacks_choice *choice = context;
    static const struct cox_client_command command = {
        .reply = &coxswain_control__stacks_reply__descriptor,
        .timeout_ms = TIMEOUT_MS,
        .ask = ask,
        .print = print,
    };
    return cox_client_command_run(&command, &choice->connection, choice);
}

static const struct cox_option options[] = {
    {"rank", "R", "of this rank alone",
     COX_COUNT(struct stacks_choice, rank, 0, COX_RANK_COUNT_MAX - 1),
     COX_GIVEN(struct stacks_choice, rank_given)},
    {0},
};
static const struct cox_option_group stacks_options = {.title = "Which stacks:",
                                                       .options = options};

const struct cox_command cox_command_stacks = {
    .name = "stacks",
    .summary = "show where each rank stands: its threads, with all frames",
    .arguments = "[NAME]",
    .text = "Shows for each rank of a running group where its threads are: frames of Python and "
            "native frames, whether a thread sleeps, runs, or gets no processor, and in which "
            "system call. Each rank is stopped for some milliseconds, 50 at most, and goes on. No "
            "rank takes part, so it works while all of them are stuck. What could not be read is "
            "named, with the reason. Native frames need libdw1 of elfutils.",
    .examples = "  coxswain stacks mine\n"
                "  coxswain stacks mine --rank 2\n",
    .choice_size = sizeof(struct stacks_choice),
    .groups = {{&stacks_options, 0},
               {&cox_connection_options, offsetof(struct stacks_choice, connection)}},
    .words = cox_connection_words,
    .run = run,
};
