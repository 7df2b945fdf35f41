#include "kv_group.h"

#include "channel/base/fault.h"
#include "engine_worker.h"
#include "steps.h"
#include "proto/wire.h"
#include "worker/loop/kv_layout.h"

#include <coxswain/handle.h>

#define SHIPPED COX_TEST_SOURCE_DIR "/models/sums"

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__PullKVRequest__PullKVInfo PullInfo;

const int32_t kv_prompt[KV_PROMPT_LENGTH] = {1, 5, 10, 13, 8, 11};

uint64_t kv_patience(void)
{
    return cox_deadline_after_ms(TEST_PATIENCE_MS);
}

/* ---- the worker ---- */

static struct cox_kv_pool told;

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    int r = cox_engine_callbacks.init(context, request, result, err);
    told = result->kv_pool;
    return r;
}

/* ---- a hostile rank ---- */

#define GARBAGE_SIZE 64

/* What it could do. */
struct attack {
    char *text;
    size_t size;
    uint8_t garbage[GARBAGE_SIZE];
    uint64_t length;
};

static void did(struct attack *attack, bool done, const char *what)
{
    const size_t used = strlen(attack->text);
    if (done && used < attack->size)
        snprintf(attack->text + used, attack->size - used, "%s ", what);
}

/* Everywhere, as a hostile library would. */
static void spoil(const struct attack *attack, void *base)
{
    for (uint64_t at = 0; at + GARBAGE_SIZE <= attack->length; at += 512)
        memcpy((uint8_t *)base + at, attack->garbage, GARBAGE_SIZE);
}

static void attack_mapped(struct attack *attack, int fd, const char *what)
{
    void *base = mmap(NULL, attack->length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    did(attack, base != MAP_FAILED, what);
    if (base != MAP_FAILED) {
        spoil(attack, base);
        munmap(base, attack->length);
    }
    base = mmap(NULL, attack->length, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return;
    did(attack, madvise(base, attack->length, MADV_REMOVE) == 0, "remove");
    if (mprotect(base, attack->length, PROT_READ | PROT_WRITE) == 0) {
        did(attack, true, "mprotect");
        spoil(attack, base);
    }
    munmap(base, attack->length);
}

static void attack_fd(struct attack *attack, int fd, const char *mapped)
{
    attack_mapped(attack, fd, mapped);
    did(attack, pwrite(fd, attack->garbage, GARBAGE_SIZE, 0) >= 0, "pwrite");
    did(attack,
        pwrite(fd, attack->garbage, GARBAGE_SIZE, (off_t)attack->length - GARBAGE_SIZE) >= 0,
        "pwrite");
    did(attack, fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192) == 0, "punch");
    did(attack, fallocate(fd, 0, 0, (off_t)attack->length + 8192) == 0, "grow");
    did(attack, ftruncate(fd, 4096) == 0, "truncate");
    did(attack, fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0, "seal");
}

static void attack_handle(struct attack *attack, const struct cox_handle *handle)
{
    char path[64];
    struct stat st;
    int fd, again;
    if (cox_handle_open(handle, NULL, kv_patience(), &fd, NULL) || fstat(fd, &st) < 0) {
        did(attack, true, "nothing-was-opened");
        return;
    }
    attack->length = (uint64_t)st.st_size;
    attack_fd(attack, fd, "mmap");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    again = open(path, O_RDWR | O_CLOEXEC);
    if (again >= 0)
        attack_fd(attack, again, "mmap-opened-anew");
    close(again);
    again = open(path, O_RDWR | O_TRUNC | O_CLOEXEC);
    did(attack, again >= 0, "open-truncated");
    close(again);
    close(fd);
}

/* And what this process has of the same memory already. */
static void attack_mappings(struct attack *attack, const struct cox_handle *handle)
{
    struct cox_handle_info info;
    FILE *maps = fopen("/proc/self/maps", "re");
    unsigned long begin, end, inode;
    char line[512];
    if (!maps || cox_handle_parse(handle, &info, NULL)) {
        did(attack, true, "nothing-was-found");
        return;
    }
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &begin, &end, &inode) == 3 &&
            inode == info.ino) {
            attack->length = end - begin;
            if (mprotect((void *)begin, end - begin, PROT_READ | PROT_WRITE) == 0) {
                did(attack, true, "mprotect-own");
                spoil(attack, (void *)begin);
            }
            did(attack, madvise((void *)begin, end - begin, MADV_REMOVE) == 0, "remove-own");
        }
    fclose(maps);
}

static void attack(const uint8_t *handles, size_t size, char *text, size_t text_size)
{
    struct attack attack = {.text = text, .size = text_size};
    memset(attack.garbage, 0x7f, sizeof attack.garbage);
    text[0] = '\0';
    for (size_t at = 0; at + sizeof(struct cox_handle) <= size; at += sizeof(struct cox_handle)) {
        struct cox_handle handle;
        memcpy(&handle, handles + at, sizeof handle);
        attack_handle(&attack, &handle);
        attack_mappings(&attack, &handle);
    }
}

/* 'k': what init told of the KV cache. 'f': a plan. 'a': handles that it attacks. */
static int on_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                     size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    (void)context, (void)err;
    *ret_reply_size = 0;
    if (request_size && request[0] == 'k') {
        memcpy(reply, &told, sizeof told);
        *ret_reply_size = sizeof told;
    }
    if (request_size && request[0] == 'a') {
        attack(request + 1, request_size - 1, (char *)reply, reply_capacity);
        *ret_reply_size = strlen((char *)reply);
    }
    if (request_size && request[0] == 'f') {
        static char plan[256];
        snprintf(plan, sizeof plan, "%.*s", (int)request_size - 1, (const char *)request + 1);
        cox_fault_arm(plan[0] ? plan : NULL);
    }
    return 0;
}

static void *let_pull(void *unused)
{
    AWAIT(cox_worker_cancelled(engine_worker, COX_CHANNEL_TRANSFER, 0));
    cox_fault_arm(NULL);
    return unused;
}

/* A paused rank takes no plan: a pull that is held continues once it was cancelled. */
static int on_pause_net(void *context, struct cox_error *err)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, let_pull, NULL))
        return cox_fail(err, COX_NO_SPACE, "no thread");
    int r = cox_engine_callbacks.pause_net(context, err);
    pthread_join(thread, NULL);
    return r;
}

static uint32_t number_of(const char *name, uint32_t otherwise)
{
    const char *text = getenv(name);
    return text ? (uint32_t)atoi(text) : otherwise;
}

static void leave_stuck(struct cox_worker_options *options)
{
    options->leave_stuck = true;
}

int kv_worker_main(int argc, char **argv)
{
    struct cox_worker_callbacks callbacks = cox_engine_callbacks;
    struct cox_engine_options engine_options = {
        .model_dir = SHIPPED,
        .block_size = number_of("KV_BLOCK_SIZE", KV_BLOCK_SIZE),
        .block_count = KV_BLOCK_COUNT,
        .swap_block_count = 4,
    };
    callbacks.init = on_init;
    callbacks.opaque = on_opaque;
    callbacks.pause_net = on_pause_net;
    snprintf(engine_options.control_socket, sizeof engine_options.control_socket, "%s",
             getenv("COXSWAIN_SOCKET") ? getenv("COXSWAIN_SOCKET") : "");
    return engine_worker_main(argc, argv, &engine_options, &callbacks, leave_stuck);
}

/* ---- groups ---- */

static void take_pools(struct kv_group *g)
{
    OWN_COMPLETION c = {0};
    if (test_call(g->group, &c, "k"))
        fail_msg("%s", test_error_text(g->group));
    for (uint32_t rank = 0; rank < g->rank_count; rank++) {
        assert_int_equal(c.ranks[rank].size, sizeof g->pools[rank]);
        memcpy(&g->pools[rank], c.ranks[rank].bytes, sizeof g->pools[rank]);
    }
}

int kv_try(struct kv_group *g, const struct kv_options *options, struct cox_error *err)
{
    static const char *denied[] = {COX_TEST_BIN_DIR "/without", "pidfd_getfd=EPERM", test_program,
                                   "worker", NULL};
    struct cox_init_summary summary;
    char number[16];
    *g = (struct kv_group){.rank_count = options->rank_count};
    snprintf(number, sizeof number, "%u",
             options->block_size ? options->block_size : KV_BLOCK_SIZE);
    setenv("KV_BLOCK_SIZE", number, 1);
    if (options->plan)
        setenv("COXSWAIN_FAULT", options->plan, 1);
    g->group = test_group_start(
        options->rank_count,
        START_WITH(.workers.command = options->denied ? denied : test_own_command, .depth = 4));
    unsetenv("COXSWAIN_FAULT");
    unsetenv("KV_BLOCK_SIZE");
    return cox_executor_init(test_group_executor(g->group), NULL, 0, kv_patience(), &summary, err);
}

void kv_start(struct kv_group *g, const struct kv_options *options)
{
    assert_ok(kv_try(g, options, test_err()));
    take_pools(g);
}

void kv_stop(struct kv_group *g)
{
    g->group = g->group ? test_group_free(g->group) : NULL;
}

void kv_init(struct kv_group *g, bool replayed)
{
    struct cox_init_summary summary;
    struct cox_executor *executor = test_group_executor(g->group);
    int r = replayed ? cox_executor_replay_init(executor, kv_patience(), test_err())
                     : cox_executor_init(executor, NULL, 0, kv_patience(), &summary, test_err());
    assert_ok(r);
    g->base = 0;
    take_pools(g);
}

void kv_arm(struct kv_group *g, uint32_t rank, const char *plan)
{
    OWN_COMPLETION c = {0};
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    assert_int_equal(test_call_how(g->group, &c, &how, "f%s", plan), 0);
}

/* ---- steps ---- */

void kv_sequence(struct kv_sequence *s, int64_t id, const int32_t *blocks)
{
    *s = (struct kv_sequence){.id = id, .token_count = KV_PROMPT_LENGTH};
    memcpy(s->tokens, kv_prompt, sizeof kv_prompt);
    while (blocks[s->block_count] >= 0) {
        s->blocks[s->block_count] = blocks[s->block_count];
        s->block_count++;
    }
}

int kv_try_step(struct kv_group *g, struct kv_sequence *s, uint32_t position, bool announce,
                int finished, struct cox_error *err)
{
    uint32_t finished_slot = (uint32_t)finished;
    struct test_step step;
    OWN_COMPLETION c = {0};
    test_step_init(&step, g->base, COXSWAIN__FORWARD_TYPE__MIXED);
    step.delta.n_finished = finished >= 0;
    step.delta.finished = &finished_slot;
    test_step_add(&step, &(struct test_row){.id = s->id,
                                            .slot = s->slot,
                                            .tokens = s->tokens,
                                            .token_count = s->token_count,
                                            .position = position,
                                            .announce = announce,
                                            .blocks = s->blocks,
                                            .block_count = s->block_count});
    int r = test_step_call(g->group, &step, kv_patience(), &c, err);
    g->base = r ? 0 : c.sequence;
    if (r)
        return r;
    if (c.token_count != 1 || c.logprob_count != 1)
        return cox_fail(err, COX_CORRUPT, "a step without a token");
    s->tokens[s->token_count] = c.tokens[0];
    s->logprobs[s->token_count++] = c.logprobs[0];
    return 0;
}

void kv_step(struct kv_group *g, struct kv_sequence *s, uint32_t position, bool announce,
             int finished)
{
    assert_ok(kv_try_step(g, s, position, announce, finished, test_err()));
}

void kv_decode(struct kv_group *g, struct kv_sequence *s, uint32_t count)
{
    while (count--)
        kv_step(g, s, s->token_count - 1, false, -1);
}

/* ---- links ---- */

void kv_link(struct kv_group *g, const struct kv_group *other, const struct kv_link *how)
{
    Coxswain__PDLinkRequest request = COXSWAIN__PDLINK_REQUEST__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo *infos = &info;
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT;
    Coxswain__RemoteInfo *remotes = &remote;
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT;
    Coxswain__HostInfo *hosts = &host;
    static struct cox_kv_pool_message messages[KV_RANK_COUNT_MAX];
    Coxswain__KvPool *pools[KV_RANK_COUNT_MAX];
    char *cancelled = (char *)(uintptr_t)how->cancelled;
    host.cluster_id = (char *)(uintptr_t)how->cluster;
    remote.n_host_info = 1;
    remote.host_info = &hosts;
    remote.has_epoch = how->epoch != 0;
    remote.epoch = how->epoch;
    if (other) {
        remote.n_kv_pools = how->pool_count ? how->pool_count : other->rank_count;
        remote.kv_pools = pools;
        for (size_t rank = 0; rank < remote.n_kv_pools; rank++)
            pools[rank] = cox_kv_pool_fill(&messages[rank],
                                           how->pools ? &how->pools[rank] : &other->pools[rank]);
        remote.control_socket =
            (char *)(uintptr_t)(other->group
                                    ? cox_executor_socket(test_group_executor(other->group))
                                    : NULL);
    }
    if (how->unlink) {
        info.n_unlink_info = 1;
        info.unlink_info = &remotes;
    } else if (other) {
        info.n_link_info = 1;
        info.link_info = &remotes;
    }
    if (how->role >= 0) {
        info.has_pd_role = info.has_change_role = 1;
        info.pd_role = (Coxswain__PDRole)how->role;
        info.change_role = how->change_role;
    }
    request.n_pd_link_info = 1;
    request.pd_link_info = &infos;
    request.n_cancelled_pulls = how->cancelled != NULL;
    request.cancelled_pulls = &cancelled;
    assert_ok(
        cox_executor_link(test_group_executor(g->group), &request, kv_patience(), test_err()));
}

struct asked {
    uint32_t rank;
    const char *cluster;
    char *text;
    size_t size;
    bool settled;
};

static bool lists(char **list, size_t count, const char *cluster)
{
    bool found = false;
    for (size_t i = 0; i < count; i++)
        found = found || strcmp(list[i], cluster) == 0;
    return found;
}

static void on_status(void *context, const struct cox_completion *completion)
{
    struct asked *asked = context;
    const Coxswain__ExecuteResponse *response =
        completion->status == 0 ? completion->ranks[asked->rank].response : NULL;
    const Coxswain__PDLinkStatusResponse *status =
        response ? response->pd_link_status_response : NULL;
    asked->text[0] = '\0';
    asked->settled =
        status && !lists(status->waiting_link_info, status->n_waiting_link_info, asked->cluster) &&
        !lists(status->running_link_info, status->n_running_link_info, asked->cluster);
    if (!asked->settled)
        return;
    if (lists(status->success_link_info, status->n_success_link_info, asked->cluster))
        snprintf(asked->text, asked->size, "success");
    for (size_t i = 0; i < status->n_failed_link_info; i++)
        if (strcmp(status->failed_link_info[i]->cluster_id, asked->cluster) == 0)
            snprintf(asked->text, asked->size, "failed %s", status->failed_link_info[i]->text);
}

const char *kv_link_state(struct kv_group *g, uint32_t rank, const char *cluster)
{
    static char text[2048];
    Coxswain__PDLinkStatusRequest body = COXSWAIN__PDLINK_STATUS_REQUEST__INIT;
    ExecuteRequest request = REQUEST_OF(PD_LINK_STATUS_QUERY, PD_LINK_STATUS_REQUEST, &body);
    struct asked asked = {.rank = rank, .cluster = cluster, .text = text, .size = sizeof text};
    const struct cox_submit_options *options =
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = kv_patience());
    while (!asked.settled)
        assert_ok(cox_executor_call(test_group_executor(g->group), &request, options, on_status,
                                    &asked, test_err()));
    return text;
}

void kv_link_all(struct kv_group *g, const struct kv_group *other, const char *cluster,
                 uint64_t epoch)
{
    kv_link(g, other, &(struct kv_link){.cluster = cluster, .epoch = epoch, .role = -1});
    for (uint32_t rank = 0; rank < g->rank_count; rank++)
        assert_string_equal(kv_link_state(g, rank, cluster), "success");
}

/* ---- pulls ---- */

#define TABLES_MAX 6u

struct packed {
    PullInfo info;
    Coxswain__SequenceGroupMetadata metadata;
    ProtobufCBinaryData from[TABLES_MAX], to[TABLES_MAX];
    uint8_t from_bytes[8 * KV_BLOCKS_MAX], to_bytes[8 * KV_BLOCKS_MAX];
};

/* The blocks in order, as evenly as they go. */
static void deal(ProtobufCBinaryData *tables, uint32_t table_count, uint8_t *bytes,
                 const int64_t *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cox_wire_int64_set(bytes, i, blocks[i]);
    for (uint32_t t = 0; t < table_count; t++) {
        const uint32_t first = count * t / table_count, end = count * (t + 1) / table_count;
        tables[t] = (ProtobufCBinaryData){8 * (size_t)(end - first), bytes + 8 * (size_t)first};
    }
}

static void pack(struct packed *packed, const struct kv_pull *pull)
{
    const uint32_t tables = pull->table_count ? pull->table_count : 1;
    coxswain__pull_kvrequest__pull_kvinfo__init(&packed->info);
    coxswain__sequence_group_metadata__init(&packed->metadata);
    packed->metadata.request_id = (char *)(uintptr_t)pull->id;
    deal(packed->from, tables, packed->from_bytes, pull->from, pull->from_count);
    deal(packed->to, tables, packed->to_bytes, pull->to, pull->to_count);
    packed->info.n_src_block_tables = packed->info.n_dst_block_tables = tables;
    packed->info.src_block_tables = packed->from;
    packed->info.dst_block_tables = packed->to;
    packed->info.cluster_id = (char *)(uintptr_t)pull->cluster;
    packed->info.seq_group_metadata = &packed->metadata;
    packed->info.has_src_sequence = pull->from_sequence != 0;
    packed->info.src_sequence = pull->from_sequence;
    packed->info.has_dst_sequence = pull->to_sequence != 0;
    packed->info.dst_sequence = pull->to_sequence;
    packed->info.has_deadline_ns = pull->deadline_ns != 0;
    packed->info.deadline_ns = pull->deadline_ns;
    packed->info.has_lease_ns = pull->lease_ns != 0;
    packed->info.lease_ns = pull->lease_ns;
    packed->info.has_epoch = pull->epoch != 0;
    packed->info.epoch = pull->epoch;
}

static void on_pulled(void *context, const struct cox_completion *completion)
{
    struct kv_replies *replies = context;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const Coxswain__ExecuteResponse *response = completion->ranks[rank].response;
        const Coxswain__PullKVResponse *body = response ? response->pull_kv_response : NULL;
        for (size_t i = 0; body && i < body->n_pull_kv_results && i < KV_PULLS_MAX; i++) {
            const Coxswain__PullKVResponse__PullKVResult *from = body->pull_kv_results[i];
            struct kv_reply *to = &replies->ranks[rank][i];
            to->code = (int32_t)from->pd_error_code;
            to->status = from->status;
            to->bytes = from->copied_bytes;
            snprintf(to->text, sizeof to->text, "%s", from->text ? from->text : "");
        }
    }
}

void kv_pull(struct kv_group *g, const struct kv_pull *pulls, uint32_t count, uint64_t timeout_ms,
             struct kv_replies *ret_replies)
{
    Coxswain__PullKVRequest body = COXSWAIN__PULL_KVREQUEST__INIT;
    ExecuteRequest request = REQUEST_OF(KV_TRANSFER, PULL_KV_REQUEST, &body);
    struct packed packed[KV_PULLS_MAX];
    PullInfo *infos[KV_PULLS_MAX];
    *ret_replies = (struct kv_replies){0};
    for (uint32_t rank = 0; rank < KV_RANK_COUNT_MAX; rank++)
        for (uint32_t i = 0; i < KV_PULLS_MAX; i++)
            ret_replies->ranks[rank][i].status = -1;
    for (uint32_t i = 0; i < count; i++) {
        pack(&packed[i], &pulls[i]);
        infos[i] = &packed[i].info;
    }
    body.n_pull_kv_infos = count;
    body.pull_kv_infos = infos;
    ret_replies->status = cox_executor_call(
        test_group_executor(g->group), &request,
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = cox_deadline_after_ms(
                                                  timeout_ms ? timeout_ms : TEST_PATIENCE_MS)),
        on_pulled, ret_replies, &ret_replies->err);
}

int kv_pull_one(struct kv_group *g, const struct kv_pull *pull, int32_t *ret_code,
                const char **ret_text)
{
    static struct kv_replies replies;
    kv_pull(g, pull, 1, 0, &replies);
    if (replies.status)
        fail_msg("pull: %s", replies.err.text);
    for (uint32_t rank = 1; rank < g->rank_count; rank++)
        if (replies.ranks[rank][0].status != replies.ranks[0][0].status)
            fail_msg("rank 0: %s; rank %u: %s", replies.ranks[0][0].text, rank,
                     replies.ranks[rank][0].text);
    *ret_code = replies.ranks[0][0].code;
    *ret_text = replies.ranks[0][0].text;
    return replies.ranks[0][0].status;
}

void kv_expect_pull(struct kv_group *g, const struct kv_pull *pull, int status, int32_t code,
                    const char *text)
{
    const char *told_text;
    int32_t told_code;
    const int r = kv_pull_one(g, pull, &told_code, &told_text);
    if (r != status || told_code != code || !strstr(told_text, text))
        fail_msg("pull %s: expected %s, %d, '%s'; got %s, %d, '%s'", pull->id,
                 cox_status_text(status), code, text, cox_status_text(r), told_code, told_text);
}

/* ---- the blocks, from outside ---- */

struct cox_kv_view *kv_attach(const struct kv_group *g, uint32_t rank)
{
    struct cox_handle handle;
    struct cox_kv_view *view = NULL;
    int fd = -1;
    memcpy(&handle, g->pools[rank].handle, sizeof handle);
    assert_ok(cox_handle_open(&handle, NULL, kv_patience(), &fd, test_err()) ||
              cox_kv_view_attach(fd, &view, test_err()));
    close(fd);
    return view;
}

const char *kv_attack(struct kv_group *g, const struct kv_group *other, uint32_t rank)
{
    static char text[1024];
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = TEST_ALL_RANKS};
    char request[1 + sizeof other->pools[0].handle] = "a";
    OWN_COMPLETION c = {0};
    size_t used = 0;
    memcpy(request + 1, other->pools[rank].handle, sizeof other->pools[0].handle);
    if (test_call_bytes(g->group, &c, &how, request, sizeof request))
        fail_msg("%s", test_error_text(g->group));
    text[0] = '\0';
    for (uint32_t i = 0; i < g->rank_count && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%.*s", (int)c.ranks[i].size,
                                 (const char *)c.ranks[i].bytes);
    return text;
}
