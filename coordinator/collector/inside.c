#include "inside.h"

static _Thread_local const struct cox_inside *inside_innermost;

void cox_inside_enter(struct cox_inside *frame, const void *owner)
{
    *frame = (struct cox_inside){.owner = owner, .outer = inside_innermost};
    inside_innermost = frame;
}

void cox_inside_leave(const struct cox_inside *frame)
{
    inside_innermost = frame->outer;
}

bool cox_inside(const void *owner)
{
    for (const struct cox_inside *frame = inside_innermost; frame; frame = frame->outer)
        if (frame->owner == owner)
            return true;
    return false;
}
