#include "tokenizer.h"

#include "file.h"

#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel/base/hash.h"
#include "channel/base/idioms.h"

/* A tokenizer.json of a 128k vocabulary has 9 MiB, a config.json a few KiB. */
#define JSON_SIZE_MAX ((size_t)64 << 20)
/* Ids index an array. */
#define TOKEN_MAX (1 << 22)
/* Characters listed in an error text. */
#define LISTED_MAX 48

/* Values of codes that are not a character. */
#define CODE_SPECIAL UINT32_MAX
#define CODE_UNUSED (UINT32_MAX - 1)
#define REPLACEMENT "\xef\xbf\xbd"

struct character {
    /* Unicode code point */
    uint32_t code;
    int32_t token;
};

struct cox_tokenizer {
    /* sorted by code */
    struct character *characters;
    size_t character_count;
    /* by token: its character, CODE_SPECIAL, or CODE_UNUSED: no such token */
    uint32_t *codes;
    uint32_t code_count;
    /* -1: none */
    int32_t bos;
};

/* Reads a JSON object of the folder. */
static int json_read(const char *path, json_t **ret_root, struct cox_error *err)
{
    struct cox_error why = {0};
    int r = cox_json_load(path, JSON_SIZE_MAX, ret_root, &why);
    if (r == COX_NOT_FOUND)
        return cox_fail(err, r,
                        "%s does not exist: a model folder has config.json, model.safetensors and, "
                        "for prompts as text, tokenizer.json; without that, prompts are token ids "
                        "(--tokens)",
                        path);
    if (r)
        cox_fail(err, r, "%s", why.text);
    return r < 0 ? cox_file_blame(r, err) : r;
}

/* Reads one UTF-8 character. Returns its bytes, 0 at the end of text, -1 for invalid bytes,
 * including overlong forms, surrogates and codes above U+10FFFF. */
static int utf8_get(const char *text, uint32_t *ret_code)
{
    const unsigned char *bytes = (const unsigned char *)text;
    if (bytes[0] < 0x80) {
        *ret_code = bytes[0];
        return bytes[0] != 0;
    }
    int size = bytes[0] >= 0xf0 ? 4 : bytes[0] >= 0xe0 ? 3 : 2;
    if (bytes[0] < 0xc2 || bytes[0] > 0xf4)
        return -1;
    uint32_t code = bytes[0] & (0x7fu >> size);
    for (int i = 1; i < size; i++) {
        if ((bytes[i] & 0xc0) != 0x80) /* true for a terminating 0 too */
            return -1;
        code = code << 6 | (bytes[i] & 0x3fu);
    }
    static const uint32_t code_min[] = {[2] = 0x80, [3] = 0x800, [4] = 0x10000};
    if (code < code_min[size] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return -1;
    *ret_code = code;
    return size;
}

/* Writes the character and a 0 to buffer (5 bytes). Returns its bytes. */
static size_t utf8_set(char *buffer, uint32_t code)
{
    size_t size = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = size; i-- > 1; code >>= 6)
        buffer[i] = (char)(0x80 | (code & 0x3f));
    buffer[0] = (char)(lead[size] | code);
    buffer[size] = 0;
    return size;
}

static int character_compare(const void *a, const void *b)
{
    uint32_t x = ((const struct character *)a)->code, y = ((const struct character *)b)->code;
    return (x > y) - (x < y);
}

static bool is_special(const json_t *added, const char *content)
{
    size_t i;
    const json_t *entry;
    json_array_foreach(added, i, entry)
    {
        const char *text = json_string_value(json_object_get(entry, "content"));
        if (text && !strcmp(text, content))
            return json_is_true(json_object_get(entry, "special"));
    }
    return false;
}

/* Adds one entry of the vocabulary. */
static int entry_take(struct cox_tokenizer *tokenizer, const char *path, const json_t *added,
                      const char *content, const json_t *value, struct cox_error *err)
{
    json_int_t token = json_integer_value(value);
    if (!json_is_integer(value) || token < 0 || token >= TOKEN_MAX)
        return cox_fail(err, COX_CORRUPT,
                        "%s: the id of the token \"%.32s\" is not an integer from 0 to %d", path,
                        content, TOKEN_MAX - 1);
    if (token >= tokenizer->code_count) {
        uint32_t count = (uint32_t)token + 1 + tokenizer->code_count;
        uint32_t *codes = reallocarray(tokenizer->codes, count, sizeof *codes);
        if (!codes)
            return cox_fail(err, -ENOMEM, "no memory for the vocabulary of %s", path);
        for (uint32_t i = tokenizer->code_count; i < count; i++)
            codes[i] = CODE_UNUSED;
        tokenizer->codes = codes;
        tokenizer->code_count = count;
    }
    if (tokenizer->codes[token] != CODE_UNUSED)
        return cox_fail(err, COX_CORRUPT, "%s: the id %lld is given to two tokens", path,
                        (long long)token);

    uint32_t code;
    int size = utf8_get(content, &code);
    if (size > 0 && !content[size] && !is_special(added, content)) {
        tokenizer->codes[token] = code;
        tokenizer->characters[tokenizer->character_count++] =
            (struct character){.code = code, .token = (int32_t)token};
        return 0;
    }
    size_t length = strlen(content);
    bool bracketed = length > 2 && content[0] == '<' && content[length - 1] == '>';
    if (!bracketed && !is_special(added, content))
        return cox_fail(
            err, COX_UNSUPPORTED,
            "%s: the token \"%.32s\" is neither one character nor a special token; only vocabularies of single characters are read here: pass token ids (--tokens)",
            path, content);
    tokenizer->codes[token] = CODE_SPECIAL;
    if (!strcmp(content, "<bos>"))
        tokenizer->bos = (int32_t)token;
    return 0;
}

static int vocabulary_take(struct cox_tokenizer *tokenizer, const char *path, json_t *root,
                           struct cox_error *err)
{
    json_t *model = json_object_get(root, "model");
    if (!json_is_object(model))
        return cox_fail(err, COX_CORRUPT, "%s has no object \"model\"", path);
    const char *type = json_string_value(json_object_get(model, "type"));
    if (!type || strcmp(type, "WordLevel"))
        return cox_fail(
            err, COX_UNSUPPORTED,
            "%s is a tokenizer of type \"%.32s\"; only WordLevel with single characters is read here: pass token ids (--tokens)",
            path, type ? type : "?");
    json_t *vocabulary = json_object_get(model, "vocab");
    if (!json_is_object(vocabulary) || json_object_size(vocabulary) == 0)
        return cox_fail(err, COX_CORRUPT, "%s: \"model\" has no object \"vocab\" with tokens in it",
                        path);
    tokenizer->characters = calloc(json_object_size(vocabulary), sizeof *tokenizer->characters);
    if (!tokenizer->characters)
        return cox_fail(err, -ENOMEM, "no memory for the vocabulary of %s", path);

    const json_t *added = json_object_get(root, "added_tokens");
    const char *content;
    json_t *value;
    json_object_foreach(vocabulary, content, value)
    {
        int r = entry_take(tokenizer, path, added, content, value, err);
        if (r)
            return r;
    }
    qsort(tokenizer->characters, tokenizer->character_count, sizeof *tokenizer->characters,
          character_compare);
    return 0;
}

static int path_make(char *path, const char *folder, const char *file, struct cox_error *err)
{
    if (snprintf(path, PATH_MAX, "%s/%s", folder, file) >= PATH_MAX)
        return cox_fail(err, COX_INVALID, "the path of the model folder is too long");
    return 0;
}

int cox_tokenizer_load(const char *folder, struct cox_tokenizer **ret_tokenizer,
                       struct cox_error *err)
{
    char path[PATH_MAX];
    _cox_cleanup_(cox_json_unref) json_t *root = NULL;
    int r = path_make(path, folder, "tokenizer.json", err);
    if (!r)
        r = json_read(path, &root, err);
    if (r)
        return r;
    _cox_cleanup_(cox_tokenizer_freep) struct cox_tokenizer *tokenizer =
        calloc(1, sizeof *tokenizer);
    if (!tokenizer)
        return cox_fail(err, -ENOMEM, "no memory for the tokenizer");
    tokenizer->bos = -1;
    r = vocabulary_take(tokenizer, path, root, err);
    if (r)
        return r;
    *ret_tokenizer = cox_steal_ptr(&tokenizer);
    return 0;
}

struct cox_tokenizer *cox_tokenizer_free(struct cox_tokenizer *tokenizer)
{
    if (tokenizer) {
        free(tokenizer->characters);
        free(tokenizer->codes);
        free(tokenizer);
    }
    return NULL;
}

/* The first LISTED_MAX characters of the vocabulary as text. */
static void known_text(const struct cox_tokenizer *tokenizer, char *text, size_t size)
{
    size_t used = 0, i = 0;
    for (; i < tokenizer->character_count && i < LISTED_MAX; i++) {
        char character[5] = " ";
        if (tokenizer->characters[i].code >= 0x20 && tokenizer->characters[i].code != 0x7f)
            utf8_set(character, tokenizer->characters[i].code);
        used += (size_t)snprintf(text + used, size - used, "%s", character);
    }
    if (i < tokenizer->character_count)
        snprintf(text + used, size - used, " and %zu more", tokenizer->character_count - i);
}

/* Fails for a character outside the vocabulary. */
static int refuse(const struct cox_tokenizer *tokenizer, uint32_t code, uint32_t position,
                  struct cox_error *err)
{
    char known[LISTED_MAX * 4 + 32] = "", character[16];
    known_text(tokenizer, known, sizeof known);
    if (code >= 0x20 && code != 0x7f) {
        size_t size = utf8_set(character + 1, code);
        character[0] = '\'';
        memcpy(character + 1 + size, "'", 2);
    } else {
        snprintf(character, sizeof character, "U+%04X", code);
    }
    return cox_fail(err, COX_INVALID,
                    "the character %s at position %u is unknown to the model, which knows: %s",
                    character, position, known);
}

int cox_tokenizer_encode(const struct cox_tokenizer *tokenizer, const char *text,
                         int32_t **ret_tokens, uint32_t *ret_count, struct cox_error *err)
{
    size_t size = strlen(text);
    if (size >= UINT32_MAX / sizeof(int32_t))
        return cox_fail(err, COX_TOO_LARGE, "a text of %zu bytes", size);
    _cox_cleanup_(cox_free_ptr) int32_t *tokens = calloc(size + 1, sizeof *tokens);
    if (!tokens)
        return cox_fail(err, -ENOMEM, "no memory for a text of %zu bytes", size);
    uint32_t count = 0, code;
    if (tokenizer->bos >= 0)
        tokens[count++] = tokenizer->bos;
    int n;
    for (uint32_t position = 1; (n = utf8_get(text, &code)) != 0; position++, text += n) {
        if (n < 0)
            return cox_fail(err, COX_INVALID, "the byte 0x%02x at position %u is not UTF-8",
                            (unsigned char)*text, position);
        struct character wanted = {.code = code};
        const struct character *found =
            bsearch(&wanted, tokenizer->characters, tokenizer->character_count, sizeof wanted,
                    character_compare);
        if (!found)
            return refuse(tokenizer, code, position, err);
        tokens[count++] = found->token;
    }
    if (count == 0)
        return cox_fail(err, COX_INVALID, "the text is empty and the model has no <bos> token");
    *ret_tokens = cox_steal_ptr(&tokens);
    *ret_count = count;
    return 0;
}

int cox_tokenizer_decode(const struct cox_tokenizer *tokenizer, const int32_t *tokens,
                         uint32_t count, char **ret_text)
{
    char *text = malloc((size_t)count * 4 + 1);
    if (!text)
        return -ENOMEM;
    char *end = text;
    for (uint32_t i = 0; i < count; i++) {
        bool known = tokens[i] >= 0 && (uint32_t)tokens[i] < tokenizer->code_count;
        uint32_t code = known ? tokenizer->codes[tokens[i]] : CODE_UNUSED;
        if (code == CODE_UNUSED)
            end = stpcpy(end, REPLACEMENT);
        else if (code != CODE_SPECIAL)
            end += utf8_set(end, code);
    }
    *end = 0;
    *ret_text = text;
    return 0;
}

/* path receives the file's path, for error texts. */
static int file_digest(const char *path, uint64_t *digest, struct cox_error *err)
{
    uint8_t bytes[8192];
    ssize_t size = 0;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return 0;
    while (fd >= 0 && ((size = read(fd, bytes, sizeof bytes)) > 0 || (size < 0 && errno == EINTR)))
        *digest = cox_hash_bytes(*digest, bytes, size > 0 ? (size_t)size : 0);
    if (fd < 0 || size < 0) {
        int r = -errno;
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    }
    return 0;
}

int cox_text_digest_load(const char *folder, uint64_t *ret_digest, struct cox_error *err)
{
    static const char *const files[] = {"tokenizer.json", "config.json"};
    char path[PATH_MAX];
    uint64_t digest = COX_HASH_START;
    int r = 0;
    for (size_t i = 0; r == 0 && i < sizeof files / sizeof files[0]; i++) {
        digest = cox_hash_bytes(digest, files[i], strlen(files[i]) + 1);
        r = path_make(path, folder, files[i], err);
        if (r == 0)
            r = file_digest(path, &digest, err);
    }
    if (r == 0)
        *ret_digest = digest ? digest : 1;
    return r;
}

static int config_read(const char *folder, char path[PATH_MAX], json_t **ret_root,
                       struct cox_error *err)
{
    int r = path_make(path, folder, "config.json", err);
    return r ? r : json_read(path, ret_root, err);
}

/* A number of config.json; without one *ret_number stays. */
static int config_number(const char *folder, const char *key, uint32_t *ret_number,
                         struct cox_error *err)
{
    char path[PATH_MAX];
    _cox_cleanup_(cox_json_unref) json_t *root = NULL;
    int r = config_read(folder, path, &root, err);
    if (r)
        return r;
    const json_t *value = json_object_get(root, key);
    json_int_t number = json_integer_value(value);
    if (value && (!json_is_integer(value) || number < 1 || number > TOKEN_MAX))
        return cox_fail(err, COX_CORRUPT, "%s: %s is not a number from 1 to %d", path, key,
                        TOKEN_MAX);
    if (value)
        *ret_number = (uint32_t)number;
    return 0;
}

int cox_vocab_size_load(const char *folder, uint32_t *ret_size, struct cox_error *err)
{
    uint32_t size = 0;
    int r = config_number(folder, "vocab_size", &size, err);
    if (r == 0)
        *ret_size = size;
    return r;
}

int cox_positions_load(const char *folder, uint32_t *ret_count, struct cox_error *err)
{
    return config_number(folder, "max_position_embeddings", ret_count, err);
}

int cox_eos_load(const char *folder, int32_t *ret_tokens, uint32_t *ret_count,
                 struct cox_error *err)
{
    char path[PATH_MAX];
    _cox_cleanup_(cox_json_unref) json_t *root = NULL;
    int r = config_read(folder, path, &root, err);
    if (r)
        return r;
    const json_t *value = json_object_get(root, "eos_token_id");
    uint32_t count = 0;
    if (value && !json_is_null(value))
        count = json_is_array(value) ? (uint32_t)json_array_size(value) : 1;
    if (count > COX_EOS_COUNT_MAX)
        return cox_fail(err, COX_INVALID,
                        "%s: eos_token_id lists %u tokens; at most %d are allowed", path, count,
                        COX_EOS_COUNT_MAX);
    int32_t tokens[COX_EOS_COUNT_MAX];
    for (uint32_t i = 0; i < count; i++) {
        const json_t *entry = json_is_array(value) ? json_array_get(value, i) : value;
        json_int_t token = json_integer_value(entry);
        if (!json_is_integer(entry) || token < 0 || token >= TOKEN_MAX)
            return cox_fail(err, COX_CORRUPT,
                            "%s: eos_token_id is neither a token id nor a list of them", path);
        tokens[i] = (int32_t)token;
    }
    memcpy(ret_tokens, tokens, count * sizeof *tokens);
    *ret_count = count;
    return 0;
}
