#include "reentrancy.h"

static _Thread_local const struct cox_reentrancy *inside_innermost;

void cox_reentrancy_enter(struct cox_reentrancy *frame, const void *owner)
{
    *frame = (struct cox_reentrancy){.owner = owner, .outer = inside_innermost};
    inside_innermost = frame;
}

void cox_reentrancy_exit(const struct cox_reentrancy *frame)
{
    inside_innermost = frame->outer;
}

bool cox_reentrancy_inside(const void *owner)
{
    for (const struct cox_reentrancy *frame = inside_innermost; frame; frame = frame->outer)
        if (frame->owner == owner)
            return true;
    return false;
}
