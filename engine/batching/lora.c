#include "lora.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "proto/executor.pb-c.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STATUS(name) COXSWAIN__LORA_OPERATION_STATUS__##name
#define OPERATION(name) COXSWAIN__LORA_OPERATION_TYPE__##name
/* Time to revert a command on the ranks, granted even when the command's own deadline has passed.
 */
#define RECONCILE_MS 10000

enum state { LOADING, LOADED, UNLOADING, UNSETTLED };

struct loaded_adapter {
    struct loaded_adapter *next;
    enum state state;
    /* for UNSETTLED: whether the ranks must end up with it */
    bool wanted;
    uint64_t uses;
    /* of the files that the ranks loaded; 0: unknown */
    uint64_t digest;
    char *path;
    char name[COX_LORA_NAME_MAX + 1];
};

struct cox_lora {
    struct cox_executor *executor;
    struct cox_log log;
    uint32_t rank_count;
    /* protects everything below; not held across a wait on ranks */
    pthread_mutex_t lock;
    /* CLOCK_MONOTONIC; signals any change below */
    pthread_cond_t wake;
    bool stopped;
    /* Replays that wait for their turn. While there is one, no command waiting for prompts can
     * progress: prompts end only after the replay. */
    uint32_t replay_count;
    /* A command is running; only it adds, removes and changes entries. */
    bool busy;
    struct loaded_adapter *entries;
};

int cox_lora_new(struct cox_executor *executor, const struct cox_log *log,
                 struct cox_lora **ret_lora)
{
    struct cox_lora *lora = calloc(1, sizeof *lora);
    if (!lora)
        return -ENOMEM;
    lora->executor = executor;
    lora->log = *log;
    struct cox_executor_status status;
    cox_executor_read_status(executor, &status, NULL);
    lora->rank_count = status.rank_count;
    pthread_mutex_init(&lora->lock, NULL);
    cox_condition_init(&lora->wake);
    *ret_lora = lora;
    return 0;
}

static void entry_free(struct loaded_adapter *entry)
{
    free(entry->path);
    free(entry);
}

void cox_lora_stop(struct cox_lora *lora)
{
    pthread_mutex_lock(&lora->lock);
    lora->stopped = true;
    pthread_cond_broadcast(&lora->wake);
    pthread_mutex_unlock(&lora->lock);
}

struct cox_lora *cox_lora_free(struct cox_lora *lora)
{
    if (lora) {
        while (lora->entries) {
            struct loaded_adapter *entry = lora->entries;
            lora->entries = entry->next;
            entry_free(entry);
        }
        pthread_cond_destroy(&lora->wake);
        pthread_mutex_destroy(&lora->lock);
        free(lora);
    }
    return NULL;
}

/* ---- entries ---- */

static struct loaded_adapter *entry_find(const struct cox_lora *lora, const char *name)
{
    struct loaded_adapter *entry = lora->entries;
    while (entry && strcmp(entry->name, name) != 0)
        entry = entry->next;
    return entry;
}

/* Appends an entry. NULL: no memory. */
static struct loaded_adapter *entry_add(struct cox_lora *lora, const char *name, const char *path)
{
    struct loaded_adapter *entry = calloc(1, sizeof *entry), **link = &lora->entries;
    if (!entry || !(entry->path = strdup(path))) {
        free(entry);
        return NULL;
    }
    snprintf(entry->name, sizeof entry->name, "%s", name);
    pthread_mutex_lock(&lora->lock);
    while (*link)
        link = &(*link)->next;
    *link = entry;
    pthread_mutex_unlock(&lora->lock);
    return entry;
}

static void entry_set(struct cox_lora *lora, struct loaded_adapter *entry, enum state state,
                      bool wanted)
{
    pthread_mutex_lock(&lora->lock);
    entry->state = state;
    entry->wanted = wanted;
    pthread_mutex_unlock(&lora->lock);
}

static void entry_remove(struct cox_lora *lora, struct loaded_adapter *entry)
{
    struct loaded_adapter **link = &lora->entries;
    pthread_mutex_lock(&lora->lock);
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    pthread_mutex_unlock(&lora->lock);
    entry_free(entry);
}

/* ---- commands, one at a time ---- */

static int order_enter(struct cox_lora *lora, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int r = 0;
    pthread_mutex_lock(&lora->lock);
    while (lora->busy && !lora->stopped && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&lora->wake, &lora->lock, &until);
    r = lora->stopped ? COX_CLOSED : lora->busy ? COX_TIMEOUT : 0;
    lora->busy = lora->busy || r == 0;
    pthread_mutex_unlock(&lora->lock);
    if (r == COX_CLOSED)
        return cox_fail(err, r, "the group stops");
    return r ? cox_fail(err, r, "another LoRA operation was running until the deadline") : 0;
}

static void order_leave(struct cox_lora *lora)
{
    pthread_mutex_lock(&lora->lock);
    lora->busy = false;
    pthread_cond_broadcast(&lora->wake);
    pthread_mutex_unlock(&lora->lock);
}

/* digest: the only files that a load may find there; 0: any. */
static int ask(struct cox_lora *lora, Coxswain__LoraOperationType operation, const char *name,
               const char *path, uint64_t digest, uint64_t deadline_ns,
               struct cox_lora_result *results, struct cox_error *err)
{
    Coxswain__LoraOperationRequest request = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    request.lora_name = (char *)(uintptr_t)name;
    request.lora_path = (char *)(uintptr_t)path;
    COX_SET(&request, lora_op_type, operation);
    request.has_digest = digest != 0;
    request.digest = digest;
    return cox_executor_lora_results(lora->executor, &request, deadline_ns, results, err);
}

/* Returns whether a rank may have executed the command. */
static bool any_did(const struct cox_lora *lora, const struct cox_lora_result *results)
{
    bool did = false;
    for (uint32_t rank = 0; rank < lora->rank_count; rank++)
        did = did || results[rank].status == STATUS(LORA_CMD_SUCCESS) ||
              (results[rank].status < 0 && results[rank].asked);
    return did;
}

/* Makes all ranks have the adapter, or none. Returns 0, or what kept a rank from it. */
static int reconcile(struct cox_lora *lora, struct loaded_adapter *entry, bool wanted,
                     uint64_t deadline_ns, struct cox_error *err)
{
    const int32_t already = wanted ? STATUS(DUPLICATED_LORA_ID) : STATUS(INVALID_LORA_ID);
    _cox_cleanup_(cox_free_ptr) struct cox_lora_result *results =
        calloc(lora->rank_count, sizeof *results);
    if (!results)
        return cox_fail(err, -ENOMEM, "no memory for a LoRA operation");
    struct cox_error error = {0};
    int r = ask(lora, wanted ? OPERATION(LOAD) : OPERATION(UNLOAD), entry->name, entry->path,
                wanted ? entry->digest : 0, deadline_ns, results, &error);
    bool agreed = r == 0 || r == COX_REJECTED;
    for (uint32_t rank = 0; agreed && rank < lora->rank_count; rank++)
        agreed =
            results[rank].status == STATUS(LORA_CMD_SUCCESS) || results[rank].status == already;
    return agreed ? 0 : cox_fail(err, r, "%s", error.text);
}

/* Reverts a command that succeeded on some ranks only. wanted: it was an unload. err has what went
 * wrong. Returns 0 when ranks agree, otherwise why they may not. */
static int take_back(struct cox_lora *lora, struct loaded_adapter *entry, bool wanted,
                     struct cox_error *err)
{
    struct cox_error error = {0};
    entry_set(lora, entry, UNSETTLED, wanted);
    int r = reconcile(lora, entry, wanted, cox_deadline_after_ms(RECONCILE_MS), &error);
    if (r) {
        struct cox_error first = *err;
        *err = (struct cox_error){0};
        cox_fail(
            err, first.code,
            "%.600s; ranks may disagree on '%s' until the group is recovered or the operation is repeated: %.200s",
            first.text, entry->name, error.text);
    } else if (wanted) {
        entry_set(lora, entry, LOADED, false);
    } else {
        entry_remove(lora, entry);
    }
    return r;
}

/* Blames the files named by the user rather than the ranks: each rank may have refused them. */
static int load_blame(const struct cox_lora *lora, const struct cox_lora_result *results, int r)
{
    bool files = false, others = r != COX_REJECTED;
    for (uint32_t rank = 0; rank < lora->rank_count; rank++)
        if (results[rank].status == STATUS(INVALID_LORA_PATH) ||
            results[rank].status == STATUS(INVALID_LORA_RANK))
            files = true;
        else if (results[rank].status != STATUS(LORA_CMD_SUCCESS))
            others = true;
    return files && !others ? COX_INVALID : r;
}

/* Settles what earlier commands left open. A rank that does not reply now leaves it open for the
 * next command. Returns 0, or COX_TIMEOUT when that took all of the command's time. */
static int reconcile_open(struct cox_lora *lora, uint64_t deadline_ns, struct cox_error *err)
{
    struct loaded_adapter *next;
    for (struct loaded_adapter *entry = lora->entries; entry; entry = next) {
        struct cox_error error = {0};
        next = entry->next;
        if (entry->state != UNSETTLED)
            continue;
        int r = reconcile(lora, entry, entry->wanted, deadline_ns, &error);
        if (r && cox_now_ns() >= deadline_ns)
            return cox_fail(
                err, COX_TIMEOUT,
                "ranks may disagree on the LoRA adapter '%s', which must be settled first, and did not reply in time: %.600s",
                entry->name, error.text);
        if (r)
            continue;
        if (entry->wanted)
            entry_set(lora, entry, LOADED, false);
        else
            entry_remove(lora, entry);
    }
    return 0;
}

static void results_clear(const struct cox_lora *lora, struct cox_lora_result *results)
{
    for (uint32_t rank = 0; rank < lora->rank_count; rank++)
        results[rank] = (struct cox_lora_result){.status = -1};
}

static int name_check(const char *name, struct cox_error *err)
{
    bool plain = name && *name && strlen(name) <= COX_LORA_NAME_MAX;
    for (const char *c = name; plain && *c; c++)
        plain = (unsigned char)*c >= ' ' && *c != 127;
    return plain ? 0
                 : cox_fail(err, COX_INVALID,
                            "the name of an adapter has 1 to %d bytes, and no control characters",
                            COX_LORA_NAME_MAX);
}

/* ---- load ---- */

/* Each rank reads the files itself, and files may change in between. A rank that reports no digest
 * is trusted. */
static int digest_take(const struct cox_lora *lora, struct loaded_adapter *entry,
                       const struct cox_lora_result *results, struct cox_error *err)
{
    for (uint32_t rank = 0; rank < lora->rank_count; rank++) {
        if (!entry->digest)
            entry->digest = results[rank].digest;
        if (results[rank].digest && results[rank].digest != entry->digest)
            return cox_fail(err, COX_REJECTED,
                            "LoRA operation on '%s': rank %" PRIu32
                            " has read other files in %.400s than those before it",
                            entry->name, rank, entry->path);
    }
    return 0;
}

static int load_new(struct cox_lora *lora, const char *name, const char *path, uint64_t deadline_ns,
                    struct cox_lora_result *results, struct cox_error *err)
{
    struct loaded_adapter *entry = entry_add(lora, name, path);
    struct cox_error error = {0};
    if (!entry)
        return cox_fail(err, -ENOMEM, "no memory for a LoRA adapter");
    int r = ask(lora, OPERATION(LOAD), name, path, 0, deadline_ns, results, &error);
    if (r == 0)
        r = digest_take(lora, entry, results, &error);
    if (r == 0) {
        entry_set(lora, entry, LOADED, false);
        return 0;
    }
    bool agree = true;
    if (any_did(lora, results))
        agree = take_back(lora, entry, false, &error) == 0;
    else
        entry_remove(lora, entry);
    return cox_fail(err, agree ? load_blame(lora, results, r) : r, "%s", error.text);
}

static int fail_unsettled(const struct loaded_adapter *entry, struct cox_error *err)
{
    return cox_fail(err, COX_STATE,
                    "ranks may disagree on the LoRA adapter '%s', and do not reply now",
                    entry->name);
}

/* The adapter is loaded already, which the ranks report themselves. A rank that was just restarted
 * lacks it until the replay. It gets the files that the others have, whatever folder was named now,
 * and then reports the same. */
static int load_known(struct cox_lora *lora, const struct loaded_adapter *entry,
                      uint64_t deadline_ns, struct cox_lora_result *results, struct cox_error *err)
{
    if (entry->state != LOADED)
        return fail_unsettled(entry, err);
    int r = ask(lora, OPERATION(LOAD), entry->name, entry->path, entry->digest, deadline_ns,
                results, err);
    return r ? r
             : ask(lora, OPERATION(LOAD), entry->name, entry->path, entry->digest, deadline_ns,
                   results, err);
}

int cox_lora_load(struct cox_lora *lora, const char *name, const char *path, uint64_t deadline_ns,
                  struct cox_lora_result *ret_results, struct cox_error *err)
{
    results_clear(lora, ret_results);
    int r = name_check(name, err);
    if (!r && (!path || path[0] != '/'))
        r = cox_fail(err, COX_INVALID, "the folder of an adapter must be an absolute path");
    if (!r)
        r = order_enter(lora, deadline_ns, err);
    if (r)
        return r;
    r = reconcile_open(lora, deadline_ns, err);
    const struct loaded_adapter *entry = r ? NULL : entry_find(lora, name);
    if (r == 0)
        r = entry ? load_known(lora, entry, deadline_ns, ret_results, err)
                  : load_new(lora, name, path, deadline_ns, ret_results, err);
    order_leave(lora);
    return r;
}

/* ---- unload ---- */

static int await_unused(struct cox_lora *lora, struct loaded_adapter *entry, uint64_t deadline_ns,
                        struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int r = 0;
    pthread_mutex_lock(&lora->lock);
    entry->state = UNLOADING; /* from now on, take refuses it */
    while (entry->uses && !lora->stopped && !lora->replay_count && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&lora->wake, &lora->lock, &until);
    const uint64_t uses = entry->uses;
    const bool replays = lora->replay_count > 0;
    r = lora->stopped ? COX_CLOSED : uses ? COX_BUSY : 0;
    if (r)
        entry->state = LOADED;
    pthread_mutex_unlock(&lora->lock);
    if (r == COX_CLOSED)
        return cox_fail(err, r, "the group stops");
    return r ? cox_fail(err, r, "the LoRA adapter '%s' is still in use by %" PRIu64 " prompt%s%s",
                        entry->name, uses, uses == 1 ? "" : "s",
                        replays ? ", and ranks were replaced meanwhile" : "")
             : 0;
}

static int unload_known(struct cox_lora *lora, struct loaded_adapter *entry, uint64_t deadline_ns,
                        struct cox_lora_result *results, struct cox_error *err)
{
    struct cox_error error = {0};
    int r = await_unused(lora, entry, deadline_ns, err);
    if (r)
        return r;
    r = ask(lora, OPERATION(UNLOAD), entry->name, NULL, 0, deadline_ns, results, &error);
    if (r == 0) {
        entry_remove(lora, entry);
        return 0;
    }
    if (any_did(lora, results))
        take_back(lora, entry, true, &error);
    else
        entry_set(lora, entry, LOADED, false);
    return cox_fail(err, r, "%s", error.text);
}

int cox_lora_unload(struct cox_lora *lora, const char *name, uint64_t deadline_ns,
                    struct cox_lora_result *ret_results, struct cox_error *err)
{
    results_clear(lora, ret_results);
    int r = name_check(name, err);
    if (!r)
        r = order_enter(lora, deadline_ns, err);
    if (r)
        return r;
    r = reconcile_open(lora, deadline_ns, err);
    struct loaded_adapter *entry = r ? NULL : entry_find(lora, name);
    if (entry && entry->state != LOADED)
        r = fail_unsettled(entry, err);
    else if (entry)
        r = unload_known(lora, entry, deadline_ns, ret_results, err);
    else if (r == 0) /* the ranks report that themselves */
        r = ask(lora, OPERATION(UNLOAD), name, NULL, 0, deadline_ns, ret_results, err);
    order_leave(lora);
    return r;
}

/* ---- a rank was replaced ---- */

static int replay_entry(struct cox_lora *lora, struct loaded_adapter *entry, uint64_t deadline_ns,
                        struct cox_error *err)
{
    struct cox_error error = {0};
    const bool wanted = entry->state == UNSETTLED ? entry->wanted : true;
    int r = reconcile(lora, entry, wanted, deadline_ns, &error);
    if (r == 0 && wanted) {
        entry_set(lora, entry, LOADED, false);
        return 0;
    }
    if (r == 0) {
        entry_remove(lora, entry);
        return 0;
    }
    pthread_mutex_lock(&lora->lock);
    /* Missing files must not cost the group, unless a prompt needs them. */
    const bool dispensable = wanted && r == COX_REJECTED && entry->uses == 0;
    if (dispensable) {
        entry->state = UNSETTLED;
        entry->wanted = false;
    }
    pthread_mutex_unlock(&lora->lock);
    if (!dispensable)
        return cox_fail(err, r, "the LoRA adapter '%s' is not loaded again: %.800s", entry->name,
                        error.text);
    cox_log_write(&lora->log, 4,
                  "the LoRA adapter '%s' cannot be loaded again and is unloaded: %.800s",
                  entry->name, error.text);
    if (reconcile(lora, entry, false, deadline_ns, NULL) == 0)
        entry_remove(lora, entry);
    return 0;
}

static void replay_count_add(struct cox_lora *lora, int count)
{
    pthread_mutex_lock(&lora->lock);
    lora->replay_count += (uint32_t)count;
    pthread_cond_broadcast(&lora->wake);
    pthread_mutex_unlock(&lora->lock);
}

int cox_lora_replay(struct cox_lora *lora, uint64_t deadline_ns, struct cox_error *err)
{
    struct loaded_adapter *next;
    /* A command that was running has ended with the rank's death, or soon will. Or it waits for
     * prompts, and these wait for the replay. */
    replay_count_add(lora, 1);
    int r = order_enter(lora, deadline_ns, err);
    replay_count_add(lora, -1);
    if (r)
        return r;
    for (struct loaded_adapter *entry = lora->entries; entry && !r; entry = next) {
        next = entry->next;
        r = replay_entry(lora, entry, deadline_ns, err);
    }
    order_leave(lora);
    return r;
}

/* ---- prompts ---- */

/* Called with the lock held. */
static int fail_unknown(const struct cox_lora *lora, const char *name, struct cox_error *err)
{
    char list[512] = "";
    for (const struct loaded_adapter *entry = lora->entries; entry; entry = entry->next) {
        size_t used = strlen(list);
        if (entry->state == LOADED)
            snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", entry->name);
    }
    return cox_fail(err, COX_INVALID, "no LoRA adapter '%.*s' is loaded%s%s", COX_LORA_NAME_MAX,
                    name, list[0] ? "; there are: " : "", list);
}

int cox_lora_take(struct cox_lora *lora, const char *name, struct cox_error *err)
{
    int r = 0;
    pthread_mutex_lock(&lora->lock);
    struct loaded_adapter *entry = entry_find(lora, name);
    if (!entry)
        r = fail_unknown(lora, name, err);
    else if (entry->state == LOADED)
        entry->uses++;
    else
        r = cox_fail(err, COX_STATE, "the LoRA adapter '%s' is %s", name,
                     entry->state == LOADING     ? "still being loaded"
                     : entry->state == UNLOADING ? "being unloaded"
                                                 : "not loaded by all ranks");
    pthread_mutex_unlock(&lora->lock);
    return r;
}

void cox_lora_give(struct cox_lora *lora, const char *name)
{
    pthread_mutex_lock(&lora->lock);
    struct loaded_adapter *entry = entry_find(lora, name);
    COX_ASSERT(entry && entry->uses); /* an adapter in use is never removed */
    if (--entry->uses == 0)
        pthread_cond_broadcast(&lora->wake);
    pthread_mutex_unlock(&lora->lock);
}

/* ---- state ---- */

int cox_lora_list(struct cox_lora *lora, struct cox_lora_info **ret_infos, size_t *ret_count)
{
    static const char *const names[] = {"loading", "loaded", "unloading", "unsettled"};
    size_t count = 0, size = sizeof **ret_infos;
    pthread_mutex_lock(&lora->lock);
    for (const struct loaded_adapter *entry = lora->entries; entry; entry = entry->next, count++)
        size += sizeof **ret_infos + strlen(entry->name) + 1 + strlen(entry->path) + 1;
    struct cox_lora_info *infos = malloc(size), *info = infos;
    char *text = infos ? (char *)(infos + count + 1) : NULL;
    for (const struct loaded_adapter *entry = lora->entries; infos && entry; entry = entry->next) {
        *info =
            (struct cox_lora_info){.name = text, .state = names[entry->state], .uses = entry->uses};
        text = stpcpy(text, entry->name) + 1;
        info++->path = text;
        text = stpcpy(text, entry->path) + 1;
    }
    pthread_mutex_unlock(&lora->lock);
    if (!infos)
        return -ENOMEM;
    *ret_infos = infos;
    *ret_count = count;
    return 0;
}
