#include "answers.h"

#include <inttypes.h>
#include <string.h>

#include "tests/bench/load.h"

void answers_init(struct answers *answers, const struct subject_options *options, uint64_t round)
{
    *answers = (struct answers){
        .reply_size = options->reply_size, .round = round, .left = options->rank_count};
    for (uint32_t rank = 0; rank < options->rank_count; rank++)
        answers->missing[rank / 64] |= UINT64_C(1) << rank % 64;
}

int answers_take(struct answers *answers, const uint8_t *reply, size_t size, struct cox_error *err)
{
    uint64_t rank;
    if (size != answers->reply_size)
        return cox_fail(err, -EBADMSG, "a reply of %zu bytes, expected %zu", size,
                        answers->reply_size);
    memcpy(&rank, reply + sizeof(uint64_t), sizeof rank);
    if (rank >= COX_RANK_COUNT_MAX || !(answers->missing[rank / 64] >> rank % 64 & 1))
        return cox_fail(err, -EBADMSG, "an answer too many, of rank %" PRIu64, rank);
    if (!load_matches(reply, (uint32_t)rank, answers->round))
        return cox_fail(err, -EBADMSG, "rank %" PRIu64 " answered wrongly", rank);
    answers->missing[rank / 64] &= ~(UINT64_C(1) << rank % 64);
    answers->left--;
    return 0;
}
