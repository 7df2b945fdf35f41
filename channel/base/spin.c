#include "spin.h"

const char *cox_spin_name(uint32_t spin)
{
    static const char *const names[COX_SPIN_COUNT] = {"auto", "off", "max"};
    return spin < COX_SPIN_COUNT ? names[spin] : NULL;
}

uint32_t cox_spin_budget_ns(enum cox_spin spin)
{
    static const uint32_t budgets[COX_SPIN_COUNT] = {
        [COX_SPIN_AUTO] = COX_SPIN_AUTO_NS,
        [COX_SPIN_MAX] = COX_SPIN_MAX_NS,
    };
    return spin < COX_SPIN_COUNT ? budgets[spin] : COX_SPIN_AUTO_NS;
}
