#include "last_errors.h"

#include "channel/base/idioms.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void cox_last_errors_init(struct cox_last_errors *last_errors)
{
    memset(last_errors, 0, sizeof *last_errors);
    pthread_mutex_init(&last_errors->lock, NULL);
}

void cox_last_errors_deinit(struct cox_last_errors *last_errors)
{
    pthread_mutex_destroy(&last_errors->lock);
}

void cox_last_errors_add(struct cox_last_errors *last_errors, uint32_t rank, const char *format,
                         ...)
{
    char text[COX_LAST_ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cox_text_trim(text);
    pthread_mutex_lock(&last_errors->lock);
    last_errors->ranks[rank].when_ns = cox_now_ns();
    memcpy(last_errors->ranks[rank].text, text, sizeof text);
    pthread_mutex_unlock(&last_errors->lock);
}

uint64_t cox_last_errors_get(struct cox_last_errors *last_errors, uint32_t rank, char *buffer,
                             size_t buffer_size)
{
    pthread_mutex_lock(&last_errors->lock);
    uint64_t when_ns = last_errors->ranks[rank].when_ns;
    snprintf(buffer, buffer_size, "%s", last_errors->ranks[rank].text);
    pthread_mutex_unlock(&last_errors->lock);
    return when_ns;
}
