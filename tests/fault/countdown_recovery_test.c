/* Recovery of a group, with each of its calls failing in turn. */
#include "countdown.h"
#include "testing.h"

#include "engine/batching/lora.h"
#include "coordinator/recovery/recovery.h"

static struct test_group *group;

static int recovery_start(void *object, struct cox_error *err)
{
    static const struct cox_recovery_options options = {.policy.on_death = COX_ON_DEATH_RESTART};
    return cox_recovery_start(test_group_executor(group), &options, object, err);
}

DESTROY(recovery_free, cox_recovery_free(*(struct cox_recovery **)object))

static int lora_new(void *object, struct cox_error *err)
{
    static const struct cox_log log;
    (void)err;
    return cox_lora_new(test_group_executor(group), &log, object);
}

DESTROY(lora_free, cox_lora_free(*(struct cox_lora **)object))

GROUP_TEST(b15_every_call_of_recovery_may_fail, 2)
{
    group = g;
    COUNTDOWN(FAIL_ONE | FAIL_REST,
              SUBJECT(recovery_start, MAKES(struct cox_recovery *, recovery_free)),
              SUBJECT(lora_new, MAKES(struct cox_lora *, lora_free), .wordless = true));
}
