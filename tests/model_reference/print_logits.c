/*
 * print_logits DIR 1,5,6 [prefill|decode [ADAPTER_DIR]]
 *
 * Prints the logits after each token of a list, one line of numbers per position, as
 * tests/lib/reference_llama.py does. prefill (the default) computes every prefix of the list as a
 * row of one batch; decode computes one token per step.
 */
#include "engine/compute/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKEN_COUNT_MAX 256u
#define BLOCK_SIZE 4u
#define TABLE_LENGTH (TOKEN_COUNT_MAX / BLOCK_SIZE)

/* The worker library's function; no batch is cancelled here. */
bool cox_batch_cancelled(const struct cox_batch *batch)
{
    (void)batch;
    return false;
}

struct printer {
    struct cox_model *model;
    struct cox_cache *cache;
    int32_t tokens[TOKEN_COUNT_MAX];
    uint32_t token_count;
    /* a table of its own for every row */
    int32_t blocks[TOKEN_COUNT_MAX][TABLE_LENGTH];
    struct cox_block_table tables[TOKEN_COUNT_MAX];
    struct cox_batch_row rows[TOKEN_COUNT_MAX];
    struct cox_batch_output outputs[TOKEN_COUNT_MAX];
    /* [token_count][vocab_size] */
    float *logits;
    /* of all rows; NULL: none */
    struct cox_adapter *adapter;
};

static const struct cox_adapter *find_adapter(void *context, const char *lora_id)
{
    const struct printer *p = context;

    (void)lora_id;
    return p->adapter;
}

static uint32_t parse_tokens(const char *text, int32_t *tokens)
{
    uint32_t count = 0;

    while (count < TOKEN_COUNT_MAX) {
        char *end;
        long token = strtol(text, &end, 10);

        if (end == text || token < INT32_MIN || token > INT32_MAX)
            return 0;
        tokens[count++] = (int32_t)token;
        if (*end == '\0')
            return count;
        text = end + 1;
    }
    return 0;
}

static void set_row(struct printer *p, uint32_t row, uint32_t position, uint32_t token_count,
                    uint32_t table)
{
    p->rows[row] = (struct cox_batch_row){
        .id = row,
        .position = position,
        .token_count = token_count,
        .tokens = p->tokens,
        .tables = &p->tables[table],
        .lora_id = p->adapter ? "adapter" : NULL,
    };
}

static int run(struct printer *p, bool decode, struct cox_error *err)
{
    const uint32_t vocab_size = cox_model_config(p->model)->vocab_size;
    struct cox_batch batch = {.rows = p->rows, .table_count = 1};
    int r = 0;

    for (uint32_t i = 0; i < p->token_count; i++) {
        for (uint32_t j = 0; j < TABLE_LENGTH; j++)
            p->blocks[i][j] = (int32_t)(i * TABLE_LENGTH + j);
        p->tables[i] = (struct cox_block_table){p->blocks[i], TABLE_LENGTH};
        set_row(p, i, 0, i + 1, i);
    }
    if (!decode) {
        batch.row_count = p->token_count;
        return cox_model_step(p->model, p->cache, &batch, p->outputs, p->logits, err);
    }
    batch.row_count = 1;
    for (uint32_t i = 0; !r && i < p->token_count; i++) {
        set_row(p, 0, i, 1, 0);
        r = cox_model_step(p->model, p->cache, &batch, p->outputs,
                           p->logits + (size_t)i * vocab_size, err);
    }
    return r;
}

static void print(const struct printer *p)
{
    const uint32_t vocab_size = cox_model_config(p->model)->vocab_size;

    for (uint32_t i = 0; i < p->token_count; i++)
        for (uint32_t token = 0; token < vocab_size; token++)
            printf("%.9g%c", (double)p->logits[(size_t)i * vocab_size + token],
                   token + 1 < vocab_size ? ' ' : '\n');
}

int main(int argc, char **argv)
{
    static struct printer printer;
    const struct cox_model_options options = {.adapters = {find_adapter, &printer}};
    const struct cox_share all = {0};
    struct cox_error err = {0};
    int r;

    if (argc < 3 || !(printer.token_count = parse_tokens(argv[2], printer.tokens))) {
        fprintf(stderr, "usage: print_logits DIR 1,5,6 [prefill|decode]\n");
        return 2;
    }
    r = cox_model_load(argv[1], &options, &printer.model, &err);
    if (!r && argc > 4)
        r = cox_adapter_load(argv[4], cox_model_config(printer.model), &all, &printer.adapter,
                             &err);
    if (!r)
        r = cox_model_cache_new(printer.model, printer.token_count * TABLE_LENGTH, BLOCK_SIZE, 0,
                                &printer.cache, &err);
    if (!r) {
        printer.logits =
            calloc((size_t)printer.token_count * cox_model_config(printer.model)->vocab_size,
                   sizeof(float));
        r = printer.logits ? run(&printer, argc > 3 && !strcmp(argv[3], "decode"), &err) : -ENOMEM;
    }
    if (r)
        fprintf(stderr, "print_logits: %s\n", err.code ? err.text : cox_status_text(r));
    else
        print(&printer);
    free(printer.logits);
    cox_cache_free(printer.cache);
    cox_model_free(printer.model);
    cox_adapter_free(printer.adapter);
    return r ? 1 : 0;
}
