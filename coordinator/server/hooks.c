#include "hooks.h"

#include <stdlib.h>

void cox_lora_infos_free(struct cox_lora_info *infos, size_t count)
{
    for (size_t i = 0; infos && i < count; i++) {
        free(infos[i].name);
        free(infos[i].path);
    }
    free(infos);
}
