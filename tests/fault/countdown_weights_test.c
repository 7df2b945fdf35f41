/* The model's weights for all ranks: loaded by the coordinator, and taken by a rank, with each of
 * their calls failing in turn. */
#include "engine/batching/shared_weights.h"
#include "engine/rank/weights_subscriber.h"
#include "countdown.h"
#include "testing.h"

#include <coxswain/handle.h>

#define MODEL COX_TEST_SOURCE_DIR "/models/sums"
#define IMAGE_SIZE 4096

static const int codes[] = {COX_NO_SPACE, COX_UNSUPPORTED, 0};

/* ---- the coordinator's ---- */

CONSTRUCT(weights_load, cox_shared_weights_load(MODEL, NULL, NULL, object, err))
DESTROY(weights_free, cox_shared_weights_freep(object))

/* ---- a rank's ---- */

static struct cox_exporter *exporter;
static struct cox_weights_candidate candidate;

static void candidate_make(void)
{
    struct cox_region region = {0};
    int fd = -1;
    candidate = (struct cox_weights_candidate){.version = 1, .size = IMAGE_SIZE};
    assert_int_equal(cox_region_create_image(&region, "cox_weights", IMAGE_SIZE, &fd, NULL), 0);
    assert_int_equal(cox_region_seal_image(&region, "cox_weights", &fd, NULL), 0);
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &candidate.handle, NULL), 0);
    cox_close_fd(&fd);
}

static void candidate_end(void)
{
    exporter = cox_exporter_free(exporter);
}

static int rank_take(void *object, struct cox_error *err)
{
    struct cox_weights_subscriber *weights = NULL;
    const void *bytes;
    uint64_t size;
    int r = cox_weights_subscriber_new("/nowhere", &weights);
    if (r)
        return cox_fail(err, r, "no memory");
    r = cox_weights_subscriber_take(weights, 1, &candidate, cox_deadline_after_ms(10000), &bytes,
                                    &size, err);
    if (r)
        cox_weights_subscriber_free(weights);
    else
        *(struct cox_weights_subscriber **)object = weights;
    return r;
}

DESTROY(rank_free, cox_weights_subscriber_free(*(struct cox_weights_subscriber **)object))

PLAIN_TEST(b15_b19_weights_are_taken_whole_or_not_at_all)
{
    COUNTDOWN(FAIL_ONE | FAIL_REST,
              SUBJECT(weights_load, MAKES(struct cox_shared_weights *, weights_free),
                      .codes = codes, .word = "memory", .costly = true, .lenient = true),
              SUBJECT(rank_take, MAKES(struct cox_weights_subscriber *, rank_free),
                      AROUND(candidate_make, candidate_end), .codes = codes, .word = "memory",
                      .lenient = true));
}
