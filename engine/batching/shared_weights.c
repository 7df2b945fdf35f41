#include "shared_weights.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "engine/model/model_image.h"

#include <coxswain/handle.h>

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LABEL "cox_weights"

struct version {
    /* 0: no version */
    uint64_t number;
    uint64_t digest;
    /* group epoch in which a step with it has succeeded; 0: none */
    uint64_t epoch;
    /* image, until it is exported; -1 afterwards */
    int fd;
    /* exports only this image; NULL: not exported */
    struct cox_exporter *exporter;
    struct cox_handle handle;
};
#define VERSION_NONE                                                                               \
    {                                                                                              \
        .fd = -1                                                                                   \
    }

struct cox_shared_weights {
    /* of the first version; later ones have the same shapes */
    struct cox_model_config config;
    /* bytes of one version */
    uint64_t size;
    struct cox_executor *executor;

    /* protects everything below */
    pthread_mutex_t lock;
    pthread_cond_t change;
    struct version present, next;
    /* highest number given so far */
    uint64_t newest;
    /* versions that were replaced and are not dropped yet */
    uint32_t retiring;
    /* a replace loads or waits */
    bool replacing;
    bool stopped;
    /* why the last NEXT was withdrawn; code 0: it was not */
    struct cox_error withdrawn;

    /* protects the next two; held while wake runs */
    pthread_mutex_t wake_lock;
    void (*wake)(void *context);
    void *wake_context;
};

/* ---- versions ---- */

static int image_fill(const struct cox_shared_weights *weights,
                      const struct cox_model_config *config, const char *directory,
                      bool (*progress)(void *context, uint32_t done, uint32_t count), void *context,
                      void *memory, uint64_t *ret_digest, struct cox_error *err)
{
    struct cox_model_image image;
    int r = cox_model_image_fill(config, directory, memory, progress, context, err);
    if (!r)
        r = cox_model_image_read(memory, weights->size, &image, err);
    if (!r)
        *ret_digest = image.digest;
    return r;
}

static int version_load(const struct cox_shared_weights *weights,
                        const struct cox_model_config *config, const char *directory,
                        bool (*progress)(void *context, uint32_t done, uint32_t count),
                        void *context, struct version *ret_version, struct cox_error *err)
{
    struct version version = VERSION_NONE;
    struct cox_region region = {0};
    _cox_cleanup_(cox_close_fd) int fd = -1;
    struct cox_error why = {0};
    int r = cox_region_create_image(&region, LABEL, weights->size, &fd, &why);
    if (r)
        return cox_fail(err, r, "memory for the %" PRIu64 " bytes of %s: %s", weights->size,
                        directory, why.text);
    r = image_fill(weights, config, directory, progress, context, region.base, &version.digest,
                   err);
    if (r) {
        cox_region_detach(&region);
        return r;
    }
    r = cox_region_seal_image(&region, LABEL, &fd, &why);
    if (r)
        return cox_fail(err, r, "the weights of %s: %s", directory, why.text);
    version.fd = cox_steal_fd(&fd);
    cox_fault_point(COX_FAULT_WEIGHTS_FILLED);
    *ret_version = version;
    return 0;
}

static int version_export_at(const struct cox_shared_weights *weights, struct version *version,
                             const char *control_socket, struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = control_socket};
    struct cox_exporter *exporter = NULL;
    int r = cox_exporter_new(&options, &exporter, err);
    if (!r)
        r = cox_exporter_export(exporter, version->fd, 0, 0, &version->handle, err);
    if (!r)
        r = cox_executor_share(weights->executor, &version->handle, version->fd, weights->size,
                               version->digest, err);
    if (r) {
        cox_exporter_free(exporter);
        return r;
    }
    version->exporter = exporter;
    cox_close_fd(&version->fd); /* the exporter has a dup */
    return 0;
}

/* Called without the lock, because it connects to the control socket. If the socket refuses the fd,
 * ranks may still get it in other ways. A lack of fds is an error, since it would only recur later.
 */
static int version_export(const struct cox_shared_weights *weights, struct version *version,
                          struct cox_error *err)
{
    struct cox_executor_status status;
    cox_executor_read_status(weights->executor, &status, NULL);
    const char *control_socket = status.socket;
    struct cox_error why = {0};
    int r =
        control_socket ? version_export_at(weights, version, control_socket, &why) : COX_NOT_FOUND;
    if (r && r != -EMFILE && r != -ENFILE) {
        why = (struct cox_error){0};
        r = version_export_at(weights, version, NULL, &why);
    }
    return r ? cox_fail(err, r, "publishing the model's weights: %s", why.text) : 0;
}

/* Called without the lock, because it connects to the control socket. */
static void version_drop(const struct cox_shared_weights *weights, struct version *version)
{
    if (version->exporter)
        cox_executor_unshare(weights->executor, &version->handle);
    if (version->exporter)
        cox_exporter_put(version->exporter, &version->handle);
    version->exporter = cox_exporter_free(version->exporter);
    cox_close_fd(&version->fd);
}

static struct version *version_newest(struct cox_shared_weights *weights)
{
    return weights->next.number ? &weights->next : &weights->present;
}

static struct cox_weights_announcement version_tell(const struct cox_shared_weights *weights,
                                                    const struct version *version)
{
    return (struct cox_weights_announcement){
        .handle = version->handle, .size = weights->size, .version = version->number};
}

/* ---- constructor and destructor ---- */

int cox_shared_weights_load(const char *directory,
                            bool (*progress)(void *context, uint32_t done, uint32_t count),
                            void *context, struct cox_shared_weights **ret_weights,
                            struct cox_error *err)
{
    _cox_cleanup_(cox_shared_weights_freep) struct cox_shared_weights *weights =
        calloc(1, sizeof *weights);
    if (!weights)
        return cox_fail(err, -ENOMEM, "no memory for the model's weights");
    weights->present = weights->next = (struct version)VERSION_NONE;
    pthread_mutex_init(&weights->lock, NULL);
    pthread_mutex_init(&weights->wake_lock, NULL);
    cox_condition_init(&weights->change);
    int r = cox_model_folder_config(directory, &weights->config, err);
    if (r)
        return r;
    weights->size = cox_model_image_size(&weights->config);
    r = version_load(weights, &weights->config, directory, progress, context, &weights->present,
                     err);
    if (r)
        return r;
    weights->present.number = weights->newest = 1;
    *ret_weights = cox_steal_ptr(&weights);
    return 0;
}

struct cox_shared_weights *cox_shared_weights_free(struct cox_shared_weights *weights)
{
    if (!weights)
        return NULL;
    weights->executor = NULL; /* it has ended */
    version_drop(weights, &weights->next);
    version_drop(weights, &weights->present);
    pthread_cond_destroy(&weights->change);
    pthread_mutex_destroy(&weights->wake_lock);
    pthread_mutex_destroy(&weights->lock);
    free(weights);
    return NULL;
}

static void on_init(void *context, struct cox_weights_announcement *ret_announcement)
{
    struct cox_shared_weights *weights = context;
    pthread_mutex_lock(&weights->lock);
    *ret_announcement = version_tell(weights, version_newest(weights));
    pthread_mutex_unlock(&weights->lock);
}

int cox_shared_weights_publish(struct cox_shared_weights *weights, struct cox_executor *executor,
                               struct cox_error *err)
{
    weights->executor = executor;
    int r = version_export(weights, &weights->present, err);
    if (r)
        return r;
    cox_executor_announce_weights(executor, on_init, weights);
    return 0;
}

/* ---- replace ---- */

static bool is_stopped(void *context, uint32_t done, uint32_t count)
{
    (void)done, (void)count;
    struct cox_shared_weights *weights = context;
    pthread_mutex_lock(&weights->lock);
    bool stopped = weights->stopped;
    pthread_mutex_unlock(&weights->lock);
    return stopped;
}

static int replace_enter(struct cox_shared_weights *weights, struct cox_error *err)
{
    pthread_mutex_lock(&weights->lock);
    int r =
        weights->stopped ? cox_fail(err, COX_CLOSED, "the group ends")
        : weights->replacing || weights->next.number
            ? cox_fail(
                  err, COX_BUSY,
                  "a switch to another version of the weights is in progress: try again when it has ended")
            : 0;
    if (!r)
        weights->replacing = true;
    pthread_mutex_unlock(&weights->lock);
    return r;
}

static int replace_load(struct cox_shared_weights *weights, const char *directory,
                        struct version *ret_version, struct cox_error *err)
{
    struct cox_model_config config;
    struct cox_error why = {0};
    int r = cox_model_folder_config(directory, &config, err);
    if (r)
        return r;
    r = cox_model_config_compare(&weights->config, &config, &why);
    if (r)
        return cox_fail(err, r, "%s: %s", directory, why.text);
    r = version_load(weights, &config, directory, is_stopped, weights, ret_version, err);
    if (r == COX_CORRUPT && err)
        err->code = COX_INVALID; /* the named files are at fault, not bytes of another process */
    if (!r)
        r = version_export(weights, ret_version, err);
    return r == COX_ABORTED ? COX_CLOSED : r == COX_CORRUPT ? COX_INVALID : r;
}

/* Makes the version NEXT and returns its new number. */
static uint64_t next_publish(struct cox_shared_weights *weights, struct version *version)
{
    pthread_mutex_lock(&weights->lock);
    const uint64_t number = version->number = ++weights->newest;
    weights->withdrawn = (struct cox_error){0};
    cox_fault_point(COX_FAULT_WEIGHTS_PUBLISHED);
    weights->next = *version;
    pthread_mutex_unlock(&weights->lock);
    return number;
}

static void wake_call(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->wake_lock);
    if (weights->wake)
        weights->wake(weights->wake_context);
    pthread_mutex_unlock(&weights->wake_lock);
}

/* Waits until number is PRESENT or withdrawn. */
static int replace_wait(struct cox_shared_weights *weights, uint64_t number, uint64_t deadline_ns,
                        uint64_t *ret_version, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int r = 0, waited = 0;
    pthread_mutex_lock(&weights->lock);
    while ((weights->next.number || weights->retiring) && !weights->stopped && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&weights->change, &weights->lock, &until);
    if (!weights->next.number && weights->withdrawn.code)
        r = cox_fail(err, weights->withdrawn.code, "the ranks keep their current weights: %.900s",
                     weights->withdrawn.text);
    else if (weights->next.number && weights->stopped)
        r = cox_fail(err, COX_CLOSED, "the group ends");
    else if (weights->next.number)
        r = cox_fail(err, COX_TIMEOUT,
                     "no step has ended with version %" PRIu64
                     " in time: the ranks switch to it in the next step",
                     number);
    else
        *ret_version = weights->present.number;
    pthread_mutex_unlock(&weights->lock);
    return r;
}

static void replace_leave(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->lock);
    weights->replacing = false;
    pthread_mutex_unlock(&weights->lock);
}

int cox_shared_weights_replace(struct cox_shared_weights *weights, const char *directory,
                               uint64_t deadline_ns, uint64_t *ret_version, struct cox_error *err)
{
    struct version version = VERSION_NONE;
    int r = replace_enter(weights, err);
    if (r)
        return r;
    r = replace_load(weights, directory, &version, err);
    if (r) {
        version_drop(weights, &version);
    } else {
        const uint64_t number = next_publish(weights, &version);
        wake_call(weights);
        r = replace_wait(weights, number, deadline_ns, ret_version, err);
    }
    replace_leave(weights);
    return r;
}

void cox_shared_weights_on_next(struct cox_shared_weights *weights, void (*wake)(void *context),
                                void *context)
{
    pthread_mutex_lock(&weights->wake_lock);
    weights->wake = wake;
    weights->wake_context = context;
    pthread_mutex_unlock(&weights->wake_lock);
}

bool cox_shared_weights_pending(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->lock);
    bool pending = weights->next.number != 0;
    pthread_mutex_unlock(&weights->lock);
    return pending;
}

void cox_shared_weights_stop(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->lock);
    weights->stopped = true;
    pthread_cond_broadcast(&weights->change);
    pthread_mutex_unlock(&weights->lock);
}

/* ---- steps ---- */

bool cox_shared_weights_step(struct cox_shared_weights *weights, uint64_t epoch,
                             struct cox_weights_announcement *ret_announcement)
{
    pthread_mutex_lock(&weights->lock);
    const struct version *newest = version_newest(weights);
    const bool offered = newest->epoch != epoch;
    *ret_announcement = version_tell(weights, newest);
    pthread_mutex_unlock(&weights->lock);
    return offered;
}

/* Releases the lock: the version is unlinked already, and dropping it may connect to the control
 * socket. replace returns only after this, so that nothing of the old version is left. */
static void retire_and_unlock(struct cox_shared_weights *weights, struct version *former)
{
    weights->retiring++;
    pthread_mutex_unlock(&weights->lock);
    version_drop(weights, former);
    cox_fault_point(COX_FAULT_WEIGHTS_RETIRED);
    pthread_mutex_lock(&weights->lock);
    weights->retiring--;
    pthread_cond_broadcast(&weights->change);
    pthread_mutex_unlock(&weights->lock);
}

void cox_shared_weights_used(struct cox_shared_weights *weights, uint64_t version, uint64_t epoch)
{
    pthread_mutex_lock(&weights->lock);
    struct version *newest = version_newest(weights);
    if (version == newest->number)
        newest->epoch = epoch;
    if (!weights->next.epoch) {
        pthread_mutex_unlock(&weights->lock);
        return;
    }
    struct version former = weights->present;
    weights->present = weights->next;
    weights->next = (struct version)VERSION_NONE;
    /* Before leases made since are published, and before replace returns success. */
    cox_executor_renew_kv(weights->executor, weights->present.digest);
    retire_and_unlock(weights, &former);
}

/* Called with the lock held, and releases it. Ranks that have switched switch back in the next
 * step. */
static void next_withdraw_and_unlock(struct cox_shared_weights *weights, int status,
                                     const char *text)
{
    struct version former = weights->next;
    cox_fail(&weights->withdrawn, status, "%s", text);
    weights->next = (struct version)VERSION_NONE;
    weights->present.number = ++weights->newest;
    weights->present.epoch = 0; /* ranks that have switched do not have it any more */
    /* Ranks that had switched have lost the blocks that other groups could pull. */
    cox_executor_renew_kv(weights->executor, weights->present.digest);
    retire_and_unlock(weights, &former);
}

void cox_shared_weights_failed(struct cox_shared_weights *weights, uint64_t version, int status,
                               const char *text)
{
    pthread_mutex_lock(&weights->lock);
    /* Other failures are not caused by the weights: the step is repeated with them. */
    if (weights->next.number && version == weights->next.number && status == COX_REJECTED)
        next_withdraw_and_unlock(weights, status, text);
    else
        pthread_mutex_unlock(&weights->lock);
}

void cox_shared_weights_give_up(struct cox_shared_weights *weights, int status, const char *text)
{
    pthread_mutex_lock(&weights->lock);
    if (weights->next.number)
        next_withdraw_and_unlock(weights, status, text);
    else
        pthread_mutex_unlock(&weights->lock);
}

void cox_shared_weights_status(struct cox_shared_weights *weights,
                               struct cox_weights_status *ret_status)
{
    pthread_mutex_lock(&weights->lock);
    *ret_status = (struct cox_weights_status){
        .version = weights->present.number,
        .next = weights->next.number,
        .digest = weights->present.digest,
        .size = weights->size,
    };
    pthread_mutex_unlock(&weights->lock);
}
