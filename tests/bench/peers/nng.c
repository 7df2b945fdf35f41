/* bench-nng: nng's SURVEYOR/RESPONDENT over ipc: a survey is a request to all, its responses are
 * the replies.
 *
 * Messages are nng's own throughout (nng_sendmsg, nng_recvmsg), so nothing is copied but the
 * request into one, once for all. No limit on sizes; a survey never ends before its last response.
 * Endpoints are abstract, so nothing has a name in the file system. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nng/nng.h>
#include <nng/protocol/survey0/respond.h>
#include <nng/protocol/survey0/survey.h>

#include "tests/bench/load.h"
#include "tests/bench/subject.h"
#include "answers.h"
#include "workers.h"

#define SURVEY_MS (24 * 60 * 60 * 1000)
#define GREETING_MS 60000
/* A greeting is smaller than every request. */
#define GREETING_SIZE 1

struct survey {
    struct subject_options options;
    struct workers workers;
    char url[64];
    /* owned, once opened */
    nng_socket socket;
    bool opened;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    /* under mutex: respondents that surveys go to */
    uint32_t pipes;
};

static int fail(struct cox_error *err, const char *what, int r)
{
    return cox_fail(err, -EIO, "%s: %s", what, nng_strerror(r));
}

/* Answers for ever; returns nng's error. */
static int respond(nng_socket socket, struct load *load, uint32_t rank)
{
    for (;;) {
        nng_msg *request, *reply;
        int r = nng_recvmsg(socket, &request, 0);
        if (r)
            return r;
        r = nng_msg_alloc(&reply, load->reply_size);
        if (r)
            return r;
        if (nng_msg_len(request) == load->request_size)
            load_answer(load, nng_msg_body(request), rank, nng_msg_body(reply));
        else
            load_reply(load, LOAD_SUM, rank, nng_msg_body(reply));
        nng_msg_free(request);
        r = nng_sendmsg(socket, reply, 0);
        if (r)
            return r;
    }
}

static const char *worker_main(const void *context, uint32_t rank)
{
    const struct survey *survey = context;
    struct load load;
    nng_socket socket;
    if (load_init(&load, survey->options.request_size, survey->options.reply_size))
        return "load_init";
    int r = nng_respondent0_open(&socket);
    if (r == 0)
        r = nng_socket_set_size(socket, NNG_OPT_RECVMAXSZ, 0);
    if (r == 0)
        r = nng_dial(socket, survey->url, NULL, NNG_FLAG_NONBLOCK);
    if (r == 0)
        r = respond(socket, &load, rank);
    return nng_strerror(r);
}

static void pipe_changed(nng_pipe pipe, nng_pipe_ev event, void *context)
{
    struct survey *survey = context;
    (void)pipe;
    pthread_mutex_lock(&survey->mutex);
    survey->pipes += event == NNG_PIPE_EV_ADD_POST ? 1 : UINT32_MAX;
    pthread_cond_signal(&survey->changed);
    pthread_mutex_unlock(&survey->mutex);
}

static void survey_stop(void *subject)
{
    struct survey *survey = subject;
    if (survey->opened)
        nng_close(survey->socket);
    workers_stop(&survey->workers);
    free(survey);
}

static int receive(struct survey *survey, uint64_t round, struct cox_error *err)
{
    struct answers answers;
    answers_init(&answers, &survey->options, round);
    while (answers.left > 0) {
        nng_msg *reply;
        int r = nng_recvmsg(survey->socket, &reply, 0);
        if (r)
            return fail(err, "receiving", r);
        r = answers_take(&answers, nng_msg_body(reply), nng_msg_len(reply), err);
        nng_msg_free(reply);
        if (r)
            return r;
    }
    return 0;
}

static int send_survey(struct survey *survey, const uint8_t *bytes, size_t size,
                       struct cox_error *err)
{
    nng_msg *message;
    int r = nng_msg_alloc(&message, size);
    if (r)
        return fail(err, "a message", r);
    memcpy(nng_msg_body(message), bytes, size);
    r = nng_sendmsg(survey->socket, message, 0);
    if (r) {
        nng_msg_free(message);
        return fail(err, "sending", r);
    }
    return 0;
}

/* All are connected, and one survey went through. */
static int greet(struct survey *survey, struct cox_error *err)
{
    static const uint8_t greeting[GREETING_SIZE];
    struct timespec until;
    int r = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += GREETING_MS / 1000;
    pthread_mutex_lock(&survey->mutex);
    while (r == 0 && survey->pipes < survey->options.rank_count)
        r = pthread_cond_timedwait(&survey->changed, &survey->mutex, &until);
    const uint32_t pipes = survey->pipes;
    pthread_mutex_unlock(&survey->mutex);
    if (r)
        return cox_fail(err, COX_TIMEOUT, "%u of %u workers connected", pipes,
                        survey->options.rank_count);
    r = send_survey(survey, greeting, sizeof greeting, err);
    return r ? r : receive(survey, 0, err);
}

static int survey_open(struct survey *survey, struct cox_error *err)
{
    int r = nng_surveyor0_open(&survey->socket);
    if (r)
        return fail(err, "opening", r);
    survey->opened = true;
    r = nng_socket_set_size(survey->socket, NNG_OPT_RECVMAXSZ, 0);
    if (r == 0)
        r = nng_socket_set_ms(survey->socket, NNG_OPT_SURVEYOR_SURVEYTIME, SURVEY_MS);
    if (r == 0)
        r = nng_pipe_notify(survey->socket, NNG_PIPE_EV_ADD_POST, pipe_changed, survey);
    if (r == 0)
        r = nng_pipe_notify(survey->socket, NNG_PIPE_EV_REM_POST, pipe_changed, survey);
    if (r == 0)
        r = nng_listen(survey->socket, survey->url, NULL, 0);
    return r ? fail(err, "listening", r) : 0;
}

static int survey_start(const struct subject_options *options, void **ret_subject,
                        struct cox_error *err)
{
    struct survey *survey = calloc(1, sizeof *survey);
    if (!survey)
        return cox_fail(err, -ENOMEM, "no memory");
    survey->options = *options;
    pthread_mutex_init(&survey->mutex, NULL);
    pthread_cond_init(&survey->changed, NULL);
    snprintf(survey->url, sizeof survey->url, "abstract://coxswain-bench-%d", getpid());
    int r = workers_start(&survey->workers, options->rank_count, worker_main, survey, err);
    if (r == 0)
        r = survey_open(survey, err);
    workers_go(&survey->workers);
    if (r == 0)
        r = greet(survey, err);
    if (r) {
        survey_stop(survey);
        return r;
    }
    *ret_subject = survey;
    return 0;
}

static int survey_round(void *subject, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct survey *survey = subject;
    int r = send_survey(survey, request, survey->options.request_size, err);
    return r ? r : receive(survey, round, err);
}

int main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = survey_start, .round = survey_round, .stop = survey_stop};
    return subject_main(argc, argv, &ops);
}
