/*
 * plain: small plain values as messages, for arguments and results of methods (objects.py). Plain
 * are None, bools, integers of 64 bits, floats, texts, bytes, and tuples, lists and dicts of them,
 * of exactly these types. All other values are pickled. What is read equals what was written, and
 * what pickle would have made of it. Reading calls no function of the program, so the thread that
 * gathers replies does it. An allocation may run Python's collector, which sees complete objects only.
 *
 * A message is MAGIC, a value, and one byte for its kind. A value is one byte for its type, and then
 *     N, T, F       nothing: None, True, False
 *     i, f          8 bytes, little-endian
 *     s, b          the size in 2 bytes, and UTF-8 or bytes
 *     (, [, {       the count in 2 bytes, and the values; of a dict key and value in turn
 *
 * It is the module _plain, in the file of _native.
 * Threads: with the GIL, which is not released. Nothing blocks.
 * If the process dies: private memory; nothing is left.
 */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <endian.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Messages are written and read on the stack. Of a larger one the pickle is a small part. */
#define MESSAGE_SIZE_MAX 4096
/* In a message, at most. */
#define VALUE_COUNT_MAX 512
#define CONTAINER_COUNT_MAX 64
#define DEPTH_MAX 16
/* Begins no text in UTF-8, and no pickle. */
#define MAGIC 0xC1

PyMODINIT_FUNC PyInit__plain(void);

/* ---- writing ---- */

struct writer {
    uint8_t *at, *end;
    size_t value_count;
    /* All but empty tuples. One that occurs twice is one object at the receiver, too, which takes a
     * pickle. */
    const PyObject *containers[CONTAINER_COUNT_MAX];
    size_t container_count;
};

static bool put(struct writer *writer, const void *bytes, size_t size)
{
    if (size > (size_t)(writer->end - writer->at))
        return false;
    memcpy(writer->at, bytes, size);
    writer->at += size;
    return true;
}

static bool put_word(struct writer *writer, uint8_t type, uint64_t word)
{
    const uint64_t ordered = htole64(word);
    return put(writer, &type, 1) && put(writer, &ordered, sizeof ordered);
}

/* size: of what follows, or how many values do. */
static bool put_size(struct writer *writer, uint8_t type, Py_ssize_t size)
{
    const uint8_t head[3] = {type, (uint8_t)size, (uint8_t)(size >> 8)};
    return size < MESSAGE_SIZE_MAX && put(writer, head, sizeof head);
}

static bool put_text(struct writer *writer, PyObject *value)
{
    Py_ssize_t size;
    if (PyUnicode_GetLength(value) >= MESSAGE_SIZE_MAX)
        return false;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text)
        PyErr_Clear(); /* a lone surrogate */
    return text && put_size(writer, 's', size) && put(writer, text, (size_t)size);
}

static bool put_once(struct writer *writer, const PyObject *value)
{
    for (size_t i = 0; i < writer->container_count; i++)
        if (writer->containers[i] == value)
            return false;
    if (writer->container_count == CONTAINER_COUNT_MAX)
        return false;
    writer->containers[writer->container_count++] = value;
    return true;
}

static bool put_value(struct writer *writer, PyObject *value, int depth);

static bool put_tuple(struct writer *writer, PyObject *value, int depth)
{
    const Py_ssize_t count = PyTuple_Size(value);
    bool good = (count == 0 || put_once(writer, value)) && put_size(writer, '(', count);
    for (Py_ssize_t i = 0; i < count && good; i++)
        good = put_value(writer, PyTuple_GetItem(value, i), depth);
    return good;
}

static bool put_list(struct writer *writer, PyObject *value, int depth)
{
    const Py_ssize_t count = PyList_Size(value);
    bool good = put_once(writer, value) && put_size(writer, '[', count);
    for (Py_ssize_t i = 0; i < count && good; i++)
        good = put_value(writer, PyList_GetItem(value, i), depth);
    return good;
}

static bool put_dict(struct writer *writer, PyObject *value, int depth)
{
    PyObject *key, *item;
    Py_ssize_t at = 0;
    bool good = put_once(writer, value) && put_size(writer, '{', PyDict_Size(value));
    while (good && PyDict_Next(value, &at, &key, &item))
        good = put_value(writer, key, depth) && put_value(writer, item, depth);
    return good;
}

/* False: it is no plain value, or too large. */
static bool put_value(struct writer *writer, PyObject *value, int depth)
{
    const PyTypeObject *type = Py_TYPE(value);
    int overflow;
    if (writer->value_count++ == VALUE_COUNT_MAX)
        return false;
    if (type == &PyLong_Type) {
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow && put_word(writer, 'i', (uint64_t)number);
    }
    if (type == &PyUnicode_Type)
        return put_text(writer, value);
    if (value == Py_None || value == Py_True || value == Py_False)
        return put(writer, value == Py_None ? "N" : value == Py_True ? "T" : "F", 1);
    if (type == &PyFloat_Type) {
        const double number = PyFloat_AsDouble(value);
        uint64_t word;
        memcpy(&word, &number, sizeof word);
        return put_word(writer, 'f', word);
    }
    if (type == &PyBytes_Type)
        return put_size(writer, 'b', PyBytes_Size(value)) &&
               put(writer, PyBytes_AsString(value), (size_t)PyBytes_Size(value));
    if (depth == DEPTH_MAX)
        return false;
    if (type == &PyTuple_Type)
        return put_tuple(writer, value, depth + 1);
    if (type == &PyList_Type)
        return put_list(writer, value, depth + 1);
    return type == &PyDict_Type && put_dict(writer, value, depth + 1);
}

/* dumps(value, kind): the message, or None where that is pickle's. */
static PyObject *dumps(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    uint8_t message[MESSAGE_SIZE_MAX];
    struct writer writer = {.at = message, .end = message + sizeof message};
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "dumps takes a value and a kind");
    const long kind = PyLong_AsLong(arguments[1]);
    if (kind == -1 && PyErr_Occurred())
        return NULL;
    const uint8_t first = MAGIC, last = (uint8_t)kind;
    if (!put(&writer, &first, 1) || !put_value(&writer, arguments[0], 0) || !put(&writer, &last, 1))
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)message, writer.at - message);
}

/* ---- reading: bytes of another process ---- */

struct reader {
    const uint8_t *at, *end;
    /* of containers that are not made yet; with a reference */
    PyObject *values[VALUE_COUNT_MAX];
    size_t value_count;
};

static const uint8_t *get(struct reader *reader, size_t size)
{
    const uint8_t *at = reader->at;
    if (size > (size_t)(reader->end - at))
        return NULL;
    reader->at += size;
    return at;
}

static bool get_word(struct reader *reader, uint64_t *ret_word)
{
    const uint8_t *at = get(reader, sizeof *ret_word);
    if (!at)
        return false;
    memcpy(ret_word, at, sizeof *ret_word);
    *ret_word = le64toh(*ret_word);
    return true;
}

/* No more than there are bytes: a value has one at least. */
static bool get_size(struct reader *reader, Py_ssize_t *ret_size)
{
    const uint8_t *at = get(reader, 2);
    if (!at)
        return false;
    *ret_size = at[0] | at[1] << 8;
    return *ret_size <= reader->end - reader->at;
}

static PyObject *get_value(struct reader *reader, int depth);

static PyObject *tuple_of(PyObject *const *values, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count && tuple; i++)
        if (PyTuple_SetItem(tuple, i, Py_NewRef(values[i])) < 0)
            Py_CLEAR(tuple);
    return tuple;
}

static PyObject *list_of(PyObject *const *values, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; i < count && list; i++)
        if (PyList_SetItem(list, i, Py_NewRef(values[i])) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *dict_of(PyObject *const *values, Py_ssize_t count)
{
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; i < count && dict; i++)
        if (PyDict_SetItem(dict, values[2 * i], values[2 * i + 1]) < 0)
            Py_CLEAR(dict);
    return dict;
}

/* The values first: the collector may run while they are made, and must not see a container that
 * has holes. */
static PyObject *get_container(struct reader *reader, uint8_t type, Py_ssize_t count, int depth)
{
    const size_t begin = reader->value_count;
    const Py_ssize_t value_count = type == '{' ? 2 * count : count;
    PyObject *const *values = reader->values + begin, *made = NULL;
    Py_ssize_t left = value_count;
    while (left > 0 && reader->value_count < VALUE_COUNT_MAX) {
        PyObject *value = get_value(reader, depth);
        if (!value)
            break;
        reader->values[reader->value_count++] = value;
        left--;
    }
    if (left == 0)
        made = type == '('   ? tuple_of(values, count)
               : type == '[' ? list_of(values, count)
                             : dict_of(values, count);
    while (reader->value_count > begin)
        Py_DECREF(reader->values[--reader->value_count]);
    return made;
}

/* A value whose size comes first. */
static PyObject *get_sized(struct reader *reader, uint8_t type, int depth)
{
    Py_ssize_t size;
    if (!get_size(reader, &size))
        return NULL;
    if (type == 's')
        return PyUnicode_DecodeUTF8((const char *)get(reader, (size_t)size), size, NULL);
    if (type == 'b')
        return PyBytes_FromStringAndSize((const char *)get(reader, (size_t)size), size);
    if (depth == DEPTH_MAX || (type != '(' && type != '[' && type != '{'))
        return NULL;
    return get_container(reader, type, size, depth + 1);
}

/* NULL: it is none, also without an exception. */
static PyObject *get_value(struct reader *reader, int depth)
{
    const uint8_t *type = get(reader, 1);
    uint64_t word;
    double number;
    switch (type ? *type : 0) {
    case 'N':
        Py_RETURN_NONE;
    case 'T':
        Py_RETURN_TRUE;
    case 'F':
        Py_RETURN_FALSE;
    case 'i':
        return get_word(reader, &word) ? PyLong_FromLongLong((long long)word) : NULL;
    case 'f':
        if (!get_word(reader, &word))
            return NULL;
        memcpy(&number, &word, sizeof number);
        return PyFloat_FromDouble(number);
    default:
        return type ? get_sized(reader, *type, depth) : NULL;
    }
}

/* loads(message, kind): the value, or NotImplemented: it is no plain message of this kind. */
static PyObject *loads(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    uint8_t message[MESSAGE_SIZE_MAX];
    Py_buffer view;
    (void)module;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "loads takes a message and a kind");
    const long kind = PyLong_AsLong(arguments[1]);
    if ((kind == -1 && PyErr_Occurred()) ||
        PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const size_t size = (size_t)view.len <= sizeof message ? (size_t)view.len : 0;
    if (size) /* copied first, as another process may still write there */
        memcpy(message, view.buf, size);
    PyBuffer_Release(&view);
    if (size < 2 || message[0] != MAGIC || message[size - 1] != kind)
        Py_RETURN_NOTIMPLEMENTED;
    struct reader reader; /* values as far as they are counted */
    reader.at = message + 1;
    reader.end = message + size - 1;
    reader.value_count = 0;
    PyObject *value = get_value(&reader, 0);
    if (value && reader.at == reader.end)
        return value;
    Py_XDECREF(value);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError))
        return NULL;
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
}

/* ---- the module ---- */

static PyMethodDef methods[] = {
    {"dumps", (PyCFunction)(void (*)(void))dumps, METH_FASTCALL, NULL},
    {"loads", (PyCFunction)(void (*)(void))loads, METH_FASTCALL, NULL},
    {0},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_plain", .m_methods = methods};

PyMODINIT_FUNC PyInit__plain(void)
{
    return PyModuleDef_Init(&definition);
}
