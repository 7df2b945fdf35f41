#include "complaints.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void cox_complaints_init(struct cox_complaints *complaints)
{
    memset(complaints, 0, sizeof *complaints);
    pthread_mutex_init(&complaints->lock, NULL);
}

void cox_complaints_deinit(struct cox_complaints *complaints)
{
    pthread_mutex_destroy(&complaints->lock);
}

void cox_complaints_add(struct cox_complaints *complaints, uint32_t rank, const char *format, ...)
{
    char text[COX_COMPLAINT_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cox_text_trim(text);
    pthread_mutex_lock(&complaints->lock);
    complaints->ranks[rank].when_ns = cox_now_ns();
    memcpy(complaints->ranks[rank].text, text, sizeof text);
    pthread_mutex_unlock(&complaints->lock);
}

uint64_t cox_complaints_last(struct cox_complaints *complaints, uint32_t rank, char *buffer,
                             size_t buffer_size)
{
    pthread_mutex_lock(&complaints->lock);
    uint64_t when_ns = complaints->ranks[rank].when_ns;
    snprintf(buffer, buffer_size, "%s", complaints->ranks[rank].text);
    pthread_mutex_unlock(&complaints->lock);
    return when_ns;
}
