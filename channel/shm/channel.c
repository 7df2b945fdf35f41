#include "channel.h"

#include "region.h"

void cox_channel_close(struct cox_channel *channel)
{
    if (channel->tokens)
        channel->tokens = channel->tokens->ops->free(channel->tokens);
    cox_gate_close(&channel->gate);
    if (channel->lent)
        channel->request = (struct cox_region){0};
    cox_region_detach(&channel->request);
    cox_region_detach(&channel->response);
}
