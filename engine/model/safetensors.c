#include "safetensors.h"
#include "digest.h"
#include "file.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"
#include "channel/base/hash.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the numbers of a file are read in place");

/* The limit of the reference implementation; a header of 100 MB would name a million tensors. */
#define HEADER_SIZE_MAX UINT64_C(100000000)

/* Half-precision numbers converted per read; 16 KiB of stack. */
#define CHUNK_LENGTH ((size_t)8192)

enum dtype {
    DTYPE_OTHER, /* size known, but cannot be read here */
    DTYPE_F32,
    DTYPE_F16,
    DTYPE_BF16,
};

/* Bytes of each piece of a sampled file. */
#define DIGEST_PIECE_SIZE UINT64_C(4096)

struct dtype_entry {
    const char *name;
    enum dtype dtype;
    uint64_t size;
};

static const struct dtype_entry dtypes[] = {
    {"F32", DTYPE_F32, 4},       {"F16", DTYPE_F16, 2},    {"BF16", DTYPE_BF16, 2},
    {"F64", DTYPE_OTHER, 8},     {"I64", DTYPE_OTHER, 8},  {"U64", DTYPE_OTHER, 8},
    {"I32", DTYPE_OTHER, 4},     {"U32", DTYPE_OTHER, 4},  {"I16", DTYPE_OTHER, 2},
    {"U16", DTYPE_OTHER, 2},     {"I8", DTYPE_OTHER, 1},   {"U8", DTYPE_OTHER, 1},
    {"F8_E4M3", DTYPE_OTHER, 1}, {"BOOL", DTYPE_OTHER, 1}, {"F8_E5M2", DTYPE_OTHER, 1},
};

struct tensor {
    /* owned */
    char *name;
    const struct dtype_entry *dtype;
    size_t dimension_count;
    uint64_t shape[COX_TENSOR_DIMENSION_COUNT_MAX];
    /* in the data, which starts at data_offset of the file */
    uint64_t begin;
    uint64_t end;
};

struct cox_safetensors {
    int fd;
    char *path;
    uint64_t data_offset;
    uint64_t data_size;
    size_t tensor_count;
    /* sorted by name once the file is open */
    struct tensor *tensors;
};

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static int compare_begin(const void *a, const void *b)
{
    const struct tensor *x = a, *y = b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    /* Empty tensors sort before a tensor that starts at the same byte. */
    return x->end < y->end ? -1 : x->end > y->end;
}

static int compare_name(const void *a, const void *b)
{
    return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

static int parse_dtype(const struct cox_safetensors *file, const json_t *entry,
                       struct tensor *tensor, struct cox_error *err)
{
    const char *word = json_string_value(json_object_get(entry, "dtype"));

    if (!word)
        return cox_fail(err, COX_CORRUPT, "%s: tensor %s has no dtype", file->path, tensor->name);
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        if (!strcmp(word, dtypes[i].name)) {
            tensor->dtype = &dtypes[i];
            return 0;
        }
    return cox_fail(
        err, COX_CORRUPT,
        "%s: tensor %s has the unknown dtype \"%.32s\"; expected F32, F16, BF16 or another of the safetensors format",
        file->path, tensor->name, word);
}

/* Fills the shape and computes its size in bytes. */
static int parse_shape(const struct cox_safetensors *file, const json_t *entry,
                       struct tensor *tensor, uint64_t *ret_size, struct cox_error *err)
{
    const json_t *shape = json_object_get(entry, "shape");
    uint64_t size = tensor->dtype->size;

    if (!json_is_array(shape) || json_array_size(shape) > COX_TENSOR_DIMENSION_COUNT_MAX)
        return cox_fail(err, COX_CORRUPT,
                        "%s: the shape of tensor %s is not a list of at most %d numbers",
                        file->path, tensor->name, COX_TENSOR_DIMENSION_COUNT_MAX);
    tensor->dimension_count = json_array_size(shape);
    for (size_t i = 0; i < tensor->dimension_count; i++) {
        const json_t *extent = json_array_get(shape, i);

        if (!json_is_integer(extent) || json_integer_value(extent) < 0)
            return cox_fail(err, COX_CORRUPT,
                            "%s: dimension %zu of tensor %s is not a number from 0 up", file->path,
                            i, tensor->name);
        tensor->shape[i] = (uint64_t)json_integer_value(extent);
        if (__builtin_mul_overflow(size, tensor->shape[i], &size))
            return cox_fail(err, COX_CORRUPT,
                            "%s: the shape of tensor %s has a product beyond 64 bits", file->path,
                            tensor->name);
    }
    *ret_size = size;
    return 0;
}

static int parse_offsets(const struct cox_safetensors *file, const json_t *entry,
                         struct tensor *tensor, uint64_t size, struct cox_error *err)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *begin = json_array_get(offsets, 0);
    const json_t *end = json_array_get(offsets, 1);

    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin))
        return cox_fail(err, COX_CORRUPT,
                        "%s: data_offsets of tensor %s is not [begin, end] with 0 <= begin <= end",
                        file->path, tensor->name);
    tensor->begin = (uint64_t)json_integer_value(begin);
    tensor->end = (uint64_t)json_integer_value(end);
    if (tensor->end > file->data_size)
        return cox_fail(
            err, COX_CORRUPT,
            "%s: tensor %s ends at byte %llu of the data, which has only %llu; is the file complete?",
            file->path, tensor->name, (unsigned long long)tensor->end,
            (unsigned long long)file->data_size);
    if (tensor->end - tensor->begin != size)
        return cox_fail(err, COX_CORRUPT,
                        "%s: tensor %s has %llu bytes of data; its shape and dtype %s need %llu",
                        file->path, tensor->name, (unsigned long long)(tensor->end - tensor->begin),
                        tensor->dtype->name, (unsigned long long)size);
    if (tensor->begin % tensor->dtype->size)
        return cox_fail(
            err, COX_CORRUPT,
            "%s: tensor %s starts at byte %llu of the data; %s needs a multiple of %llu",
            file->path, tensor->name, (unsigned long long)tensor->begin, tensor->dtype->name,
            (unsigned long long)tensor->dtype->size);
    return 0;
}

static int parse_tensor(const struct cox_safetensors *file, const json_t *entry,
                        struct tensor *tensor, struct cox_error *err)
{
    uint64_t size = 0;
    int r;

    if (!json_is_object(entry))
        return cox_fail(err, COX_CORRUPT, "%s: the header entry %s is not an object", file->path,
                        tensor->name);
    r = parse_dtype(file, entry, tensor, err);
    if (r)
        return r;
    r = parse_shape(file, entry, tensor, &size, err);
    if (r)
        return r;
    return parse_offsets(file, entry, tensor, size, err);
}

/* The tensors must cover every byte of the data exactly once. */
static int check_cover(struct cox_safetensors *file, struct cox_error *err)
{
    uint64_t covered = 0;

    qsort(file->tensors, file->tensor_count, sizeof(file->tensors[0]), compare_begin);
    for (size_t i = 0; i < file->tensor_count; i++) {
        const struct tensor *tensor = &file->tensors[i];

        if (tensor->begin < covered)
            return cox_fail(
                err, COX_CORRUPT,
                "%s: tensor %s starts at byte %llu of the data and overlaps tensor %s, which ends at %llu",
                file->path, tensor->name, (unsigned long long)tensor->begin,
                file->tensors[i - 1].name, (unsigned long long)covered);
        if (tensor->begin > covered)
            return cox_fail(
                err, COX_CORRUPT,
                "%s: bytes %llu to %llu of the data, before tensor %s, belong to no tensor",
                file->path, (unsigned long long)covered, (unsigned long long)tensor->begin,
                tensor->name);
        covered = tensor->end;
    }
    if (covered != file->data_size)
        return cox_fail(err, COX_CORRUPT,
                        "%s: the tensors end at byte %llu of the data, which has %llu", file->path,
                        (unsigned long long)covered, (unsigned long long)file->data_size);
    return 0;
}

static int parse_header(struct cox_safetensors *file, json_t *root, struct cox_error *err)
{
    const char *name;
    json_t *entry;
    int r;

    file->tensors = calloc(json_object_size(root) + 1, sizeof(file->tensors[0]));
    if (!file->tensors)
        return cox_fail(err, -ENOMEM, "%s: no memory for its header", file->path);
    json_object_foreach(root, name, entry)
    {
        struct tensor *tensor = &file->tensors[file->tensor_count];

        if (!strcmp(name, "__metadata__")) /* free text of the writer */
            continue;
        tensor->name = strdup(name);
        if (!tensor->name)
            return cox_fail(err, -ENOMEM, "%s: no memory for its header", file->path);
        file->tensor_count++;
        r = parse_tensor(file, entry, tensor, err);
        if (r)
            return r;
    }
    r = check_cover(file, err);
    if (r)
        return r;
    qsort(file->tensors, file->tensor_count, sizeof(file->tensors[0]), compare_name);
    return 0;
}

static int read_header(struct cox_safetensors *file, uint64_t file_size, struct cox_error *err)
{
    _cox_cleanup_(cox_json_unref) json_t *root = NULL;
    _cox_cleanup_(cox_free_ptr) char *text = NULL;
    uint64_t size;
    int r;

    if (file_size < sizeof(size))
        return cox_fail(
            err, COX_CORRUPT,
            "%s has %llu bytes; a safetensors file starts with 8 bytes of header length",
            file->path, (unsigned long long)file_size);
    r = cox_file_read(file->fd, file->path, 0, &size, sizeof(size), err);
    if (r)
        return r;
    if (size < 2 || size > HEADER_SIZE_MAX || size > file_size - sizeof(size))
        return cox_fail(
            err, COX_CORRUPT,
            "%s: its header would have %llu bytes; expected 2 to %llu, and the file has %llu after the length. Is it a safetensors file, and complete?",
            file->path, (unsigned long long)size, (unsigned long long)HEADER_SIZE_MAX,
            (unsigned long long)(file_size - sizeof(size)));
    text = malloc((size_t)size);
    if (!text)
        return cox_fail(err, -ENOMEM, "%s: no memory for a header of %llu bytes", file->path,
                        (unsigned long long)size);
    r = cox_file_read(file->fd, file->path, sizeof(size), text, (size_t)size, err);
    if (r)
        return r;
    file->data_offset = sizeof(size) + size;
    file->data_size = file_size - file->data_offset;
    r = cox_json_parse(text, (size_t)size, file->path, "header", &root, err);
    if (r)
        return r;
    return parse_header(file, root, err);
}

int cox_safetensors_new(const char *path, struct cox_safetensors **ret_file, struct cox_error *err)
{
    _cox_cleanup_(cox_safetensors_freep) struct cox_safetensors *file = calloc(1, sizeof(*file));
    uint64_t file_size;
    int r;

    if (!file)
        return cox_fail(err, -ENOMEM, "no memory to open %s", path);
    file->fd = -1;
    file->path = strdup(path);
    if (!file->path)
        return cox_fail(err, -ENOMEM, "no memory to open %s", path);
    r = cox_file_open(path, &file->fd, &file_size, err);
    if (r)
        return r;
    r = read_header(file, file_size, err);
    if (r)
        return r;
    *ret_file = cox_steal_ptr(&file);
    return 0;
}

struct cox_safetensors *cox_safetensors_free(struct cox_safetensors *file)
{
    if (!file)
        return NULL;
    for (size_t i = 0; i < file->tensor_count; i++)
        free(file->tensors[i].name);
    free(file->tensors);
    free(file->path);
    cox_close_fd(&file->fd);
    free(file);
    return NULL;
}

size_t cox_safetensors_count(const struct cox_safetensors *file)
{
    return file->tensor_count;
}

static const struct tensor *find_tensor(const struct cox_safetensors *file, const char *name)
{
    size_t low = 0, high = file->tensor_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->tensors[middle].name);

        if (order == 0)
            return &file->tensors[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const char *cox_safetensors_name(const struct cox_safetensors *file, size_t i)
{
    COX_ASSERT(i < file->tensor_count);
    return file->tensors[i].name;
}

bool cox_safetensors_has(const struct cox_safetensors *file, const char *name)
{
    return find_tensor(file, name) != NULL;
}

int cox_safetensors_shape(const struct cox_safetensors *file, const char *name,
                          uint64_t ret_shape[COX_TENSOR_DIMENSION_COUNT_MAX], size_t *ret_count,
                          struct cox_error *err)
{
    const struct tensor *tensor = find_tensor(file, name);

    if (!tensor)
        return cox_fail(err, COX_NOT_FOUND, "%s has no tensor %s", file->path, name);
    memcpy(ret_shape, tensor->shape, tensor->dimension_count * sizeof(ret_shape[0]));
    *ret_count = tensor->dimension_count;
    return 0;
}

/* "[2, 3]" for an error text. */
static void shape_text(const uint64_t *shape, size_t count, char *text, size_t size)
{
    size_t used = 0;

    for (size_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%llu", i ? ", " : "",
                                 (unsigned long long)shape[i]);
    if (count == 0)
        snprintf(text, size, "%s", "");
}

static float f32_from_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float number;

    memcpy(&number, &bits, sizeof(number));
    return number;
}

/* IEEE 754 binary16, exact: every half is representable as a float. */
static float f32_from_f16(uint16_t half)
{
    uint32_t exponent = (half >> 10) & 31;
    uint32_t fraction = half & 1023;
    float number;

    if (exponent == 0)
        number = ldexpf((float)fraction, -24); /* zero and subnormals */
    else if (exponent == 31)
        number = fraction ? NAN : INFINITY;
    else
        number = ldexpf((float)(fraction + 1024), (int)exponent - 25);
    return half & 0x8000 ? -number : number;
}

static int read_halves(const struct cox_safetensors *file, const struct tensor *tensor,
                       uint64_t first, uint64_t length, float *buffer, struct cox_error *err)
{
    uint16_t chunk[CHUNK_LENGTH];
    bool brain = tensor->dtype->dtype == DTYPE_BF16;

    for (uint64_t done = 0; done < length;) {
        size_t count = length - done < CHUNK_LENGTH ? (size_t)(length - done) : CHUNK_LENGTH;
        int r = cox_file_read(file->fd, file->path,
                              file->data_offset + tensor->begin + 2 * (first + done), chunk,
                              2 * count, err);

        if (r)
            return r;
        for (size_t i = 0; i < count; i++)
            buffer[done + i] = brain ? f32_from_bf16(chunk[i]) : f32_from_f16(chunk[i]);
        done += count;
    }
    return 0;
}

/* Reads numbers first to first + length - 1 of a tensor. */
static int read_run(const struct cox_safetensors *file, const struct tensor *tensor, uint64_t first,
                    uint64_t length, float *buffer, struct cox_error *err)
{
    int r;

    if (tensor->dtype->dtype == DTYPE_F32)
        r = cox_file_read(file->fd, file->path,
                          file->data_offset + tensor->begin + first * sizeof(float), buffer,
                          (size_t)length * sizeof(float), err);
    else
        r = read_halves(file, tensor, first, length, buffer, err);
    if (r)
        return r;
    for (uint64_t i = 0; i < length; i++)
        if (!isfinite(buffer[i]))
            return cox_fail(err, COX_INVALID, "%s: number %llu of tensor %s is not finite",
                            file->path, (unsigned long long)(first + i), tensor->name);
    return 0;
}

/* Finds the tensor of that name, if it is readable and has that shape. */
static int choose_tensor(const struct cox_safetensors *file, const char *name,
                         const uint64_t *shape, size_t dimension_count,
                         const struct tensor **ret_tensor, struct cox_error *err)
{
    const struct tensor *tensor = find_tensor(file, name);
    char found[192], expected[192];

    COX_ASSERT(dimension_count >= 1 && dimension_count <= COX_TENSOR_DIMENSION_COUNT_MAX);
    if (!tensor)
        return cox_fail(err, COX_NOT_FOUND, "%s has no tensor %s", file->path, name);
    if (tensor->dimension_count != dimension_count ||
        memcmp(tensor->shape, shape, dimension_count * sizeof(shape[0])) != 0) {
        shape_text(tensor->shape, tensor->dimension_count, found, sizeof(found));
        shape_text(shape, dimension_count, expected, sizeof(expected));
        return cox_fail(err, COX_INVALID,
                        "%s: tensor %s has the shape [%s]; config.json implies [%s]", file->path,
                        name, found, expected);
    }
    if (tensor->dtype->dtype == DTYPE_OTHER)
        return cox_fail(err, COX_INVALID,
                        "%s: tensor %s has dtype %s; this worker reads F32, F16 and BF16",
                        file->path, name, tensor->dtype->name);
    *ret_tensor = tensor;
    return 0;
}

int cox_safetensors_read(const struct cox_safetensors *file, const char *name,
                         const uint64_t *shape, size_t dimension_count, float *buffer,
                         struct cox_error *err)
{
    const struct tensor *tensor = NULL;
    int r = choose_tensor(file, name, shape, dimension_count, &tensor, err);

    if (r)
        return r;
    return read_run(file, tensor, 0, (tensor->end - tensor->begin) / tensor->dtype->size, buffer,
                    err);
}

int cox_safetensors_read_part(const struct cox_safetensors *file, const char *name, uint64_t rows,
                              uint64_t columns, const struct cox_tensor_part *part, float *buffer,
                              struct cox_error *err)
{
    const uint64_t shape[] = {rows, columns};
    const struct tensor *tensor = NULL;
    int r = choose_tensor(file, name, shape, 2, &tensor, err);

    if (r)
        return r;
    COX_ASSERT(part->row_first <= rows && part->row_count <= rows - part->row_first);
    COX_ASSERT(part->column_first <= columns && part->column_count <= columns - part->column_first);
    if (part->column_count == columns)
        return read_run(file, tensor, part->row_first * columns, part->row_count * columns, buffer,
                        err);
    for (uint64_t row = 0; !r && row < part->row_count; row++)
        r = read_run(file, tensor, (part->row_first + row) * columns + part->column_first,
                     part->column_count, buffer + row * part->column_count, err);
    return r;
}

/* Hashes bytes of the file at offset. */
static int digest_piece(const struct cox_safetensors *file, uint64_t offset, size_t size,
                        uint64_t *digest, struct cox_error *err)
{
    unsigned char piece[DIGEST_PIECE_SIZE];
    int r = cox_file_read(file->fd, file->path, offset, piece, size, err);

    if (!r)
        *digest = cox_hash_bytes(*digest, piece, size);
    return r;
}

/* Offset of piece i. */
static uint64_t sample_offset(const struct cox_safetensors *file, uint64_t i)
{
    const uint64_t count = COX_DIGEST_SAMPLE_SIZE / DIGEST_PIECE_SIZE;

    /* The last piece ends with the file. No overflow: a tensor file is far below 2^56 bytes. */
    return file->data_size <= COX_DIGEST_SAMPLE_SIZE
               ? i * DIGEST_PIECE_SIZE
               : (file->data_size - DIGEST_PIECE_SIZE) * i / (count - 1);
}

int cox_safetensors_digest(const struct cox_safetensors *file, uint64_t *digest,
                           struct cox_error *err)
{
    const uint64_t count = COX_DIGEST_SAMPLE_SIZE / DIGEST_PIECE_SIZE;
    uint64_t sum = cox_hash_bytes(*digest, &file->data_size, sizeof(file->data_size));
    int r = 0;

    for (uint64_t at = 0; !r && at < file->data_offset; at += DIGEST_PIECE_SIZE)
        r = digest_piece(file, at, (size_t)least(DIGEST_PIECE_SIZE, file->data_offset - at), &sum,
                         err);
    for (uint64_t i = 0; !r && i < count && sample_offset(file, i) < file->data_size; i++)
        r = digest_piece(file, file->data_offset + sample_offset(file, i),
                         (size_t)least(DIGEST_PIECE_SIZE, file->data_size - sample_offset(file, i)),
                         &sum, err);
    if (!r)
        *digest = sum;
    return r;
}
