#!/usr/bin/python3
"""What is read of texts and files, and which of them are refused, in which words; texts.c says it.

Usage: texts_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import MODEL, check, program, test  # pylint: disable=wrong-import-position

harness.begin(harness.parser(__doc__))



def source(*path):
    with open(os.path.join(harness.SOURCE_DIR, *path), encoding="utf-8") as file:
        return file.read()


# In the order of their numbers.
CODES = re.findall(r"^    COX_([A-Z_]+)\b", source("include", "coxswain", "base.h")
                   .split("enum cox_status {")[1].split("}")[0], re.M)


def call(function, *arguments, text="", **env):
    env.update({key: value for key, value in os.environ.items() if not key.startswith("COXSWAIN_")})
    result = subprocess.run([program("test_texts"), function, *arguments], input=os.fsencode(text), env=env,
                            capture_output=True, check=False)
    result.code = None
    if result.returncode == 1:
        number, result.err = result.stderr.decode("utf-8", "surrogateescape").split(" ", 1)
        result.code = CODES[int(number)]
    else:
        check(result.returncode == 0, "%s %s: status %d: %s" % (function, arguments, result.returncode, result.stderr))
    return result


def said(function, *arguments, **more):
    result = call(function, *arguments, **more)
    check(result.code is None, "%s %s: %s" % (function, arguments, result.stderr))
    return result.stdout.decode("utf-8", "surrogateescape")


def fields(text):
    return dict(line.split(" ", 1) for line in text.splitlines() if " " in line)


def refused(code, words, function, *arguments, **more):
    result = call(function, *arguments, **more)
    check(result.code == code, "%s %s: %s" % (function, arguments, result.stderr))
    for word in words:
        check(word in result.err, "%s %s: '%s' is not in %s" % (function, arguments, word, result.err))


def same(found, wanted):
    check(found == wanted, "%r instead of %r" % (found, wanted))


def put(folder, name, text):
    path = folder + "/" + name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


# ---- config.json ----

# The keys without which nothing works.
KEYS = {"model_type": '"llama"', "hidden_size": "128", "intermediate_size": "352", "num_hidden_layers": "4",
        "vocab_size": "16", "num_attention_heads": "8", "num_key_value_heads": "4"}
LLAMA3 = '"factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":64'


def config_file(key, value):
    """With another value for a key, and what stands behind it; None: without it."""
    keys = {**KEYS, key: value}
    text = ",".join('"%s":%s' % item for item in keys.items() if item[1] is not None)
    return put(tempfile.mkdtemp(), "config.json", "{%s}" % text)


def config(key="x", value="0"):
    return fields(said("config", config_file(key, value)))


def config_refused(key, value, word, code="INVALID"):
    refused(code, (word, "config.json"), "config", config_file(key, value))


@test
def the_defaults_are_those_of_hugging_face():
    same(config(), {
        "hidden_size": "128", "intermediate_size": "352", "layer_count": "4", "head_count": "8", "kv_head_count": "4",
        "head_dim": "16", "vocab_size": "16", "position_count_max": "2048", "rms_norm_eps": "9.99999997e-07",
        "rope_theta": "10000", "rope_type": "default", "tied_embeddings": "0", "bos_token": "1", "eos_tokens": "2"})
    same(config("num_key_value_heads", None)["kv_head_count"], "8")


@test
def what_is_written_is_read():
    for key, value, field, wanted in (
            ("eos_token_id", "[3, 7, 15]", "eos_tokens", "3 7 15"),
            ("eos_token_id", "9", "eos_tokens", "9"),
            ("eos_token_id", "null", "eos_tokens", None),
            ("bos_token_id", "null", "bos_token", "-1"),
            ("bos_token_id", "0", "bos_token", "0"),
            ("head_dim", "64", "head_dim", "64"),
            ("head_dim", "null", "head_dim", "16"),
            ("tie_word_embeddings", "true", "tied_embeddings", "1"),
            ("rope_theta", "500000.0", "rope_theta", "500000"),
            ("rope_parameters", '{"rope_type":"default","rope_theta":77}', "rope_theta", "77"),
            ("intermediate_size", "353", "intermediate_size", "353")):
        same(config(key, value).get(field), wanted)
    for key, value in (
            ("rope_scaling", "null"), ("attention_bias", "false"), ("hidden_act", '"silu"'), ("hidden_act", '"swish"'),
            # Keys that transformers' LlamaForCausalLM does not look at either.
            ("qk_norm", "true"), ("embedding_multiplier", "12.0"), ("sliding_window", "null"),
            ("layer_types", '["full_attention","full_attention"]'), ("architectures", '["LlamaForCausalLM"]')):
        config(key, value)


@test
def g4a_rotary_positions_are_those_of_transformers():
    for key, value, theta in (
            ("rope_parameters", "{}", "10000"),
            ("rope_parameters", '{},"rope_theta":50', "50"),
            ("rope_parameters", 'null,"rope_theta":50', "50"),
            ("rope_parameters", '{"type":"default"}', "10000"),
            ("rope_parameters", '{"type":"default"},"rope_theta":50', "50"),
            ("rope_parameters", '{"rope_type":"default","rope_theta":70},"rope_theta":50', "70"),
            ("rope_parameters", '{"rope_theta":70}', "70"),
            ("rope_parameters", '{"rope_type":"default","type":"yarn"}', "10000"),
            ("rope_parameters", '{"rope_theta":70,"factor":null}', "70"),
            ("rope_parameters", '{"rope_theta":70,"partial_rotary_factor":1.0}', "70"),
            ("rope_scaling", 'null,"rope_theta":50', "50"),
            ("rope_scaling", 'false,"rope_theta":50', "50"),
            ("rope_scaling", '{},"rope_parameters":{"rope_theta":70},"rope_theta":50', "70"),
            ("rope_scaling", '{"type":"default"},"rope_parameters":{"rope_theta":70}', "10000"),
            ("rope_scaling", '{"type":"default"},"rope_theta":50', "50"),
            ("rope_scaling", '{"rope_type":"default","rope_theta":60},"rope_theta":50', "60")):
        found = config(key, value)
        same((found["rope_type"], found["rope_theta"]), ("default", theta))


@test
def g4b_llama3_is_read_in_every_spelling():
    for key, value, theta, original in (
            ("rope_parameters", '{"rope_type":"llama3",%s}', "10000", "64"),
            ("rope_parameters", '{"rope_type":"llama3","rope_theta":70,%s}', "70", "64"),
            ("rope_parameters", '{"type":"llama3",%s},"rope_theta":50', "50", "64"),
            ("rope_scaling", '{"rope_type":"llama3",%s},"rope_theta":50', "50", "64"),
            ("rope_scaling", '{"type":"llama3",%s}', "10000", "64"),
            ("rope_scaling", '{"rope_type":"llama3",%s},"original_max_position_embeddings":32', "10000", "32"),
            ("rope_scaling", '{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0}',
             "10000", "2048")):
        found = config(key, value.replace("%s", LLAMA3))
        same((found["rope_type"], found["rope_theta"], found["rope"]), ("llama3", theta, "8 1 4 " + original))


@test
def g4a_other_rotary_positions_are_refused_by_name():
    for value, words in (
            ('{"type":"linear","factor":2}', 'type is "linear"'),
            ('{"rope_type":"dynamic","factor":2}', 'rope_type is "dynamic"'),
            ('{"rope_type":"yarn","factor":2}', 'rope_type is "yarn"'),
            ('{"rope_type":"longrope"}', 'rope_type is "longrope"'),
            ('{"rope_type":"proportional"}', 'rope_type is "proportional"'),
            ('{"type":"su"}', 'type is "su"'),
            ('{"type":"mrope","mrope_section":[1,2]}', 'type is "mrope"'),
            ('{"rope_type":null,"type":"default"}', "rope_type is null"),
            ('{"type":null}', "type is null"),
            ('{"type":7}', "type is 7"),
            ('{"rope_theta":null}', "rope_theta is null"),
            ('{"rope_theta":"1e4"}', 'rope_theta is "1e4"'),
            ('{"partial_rotary_factor":0.5}', "partial_rotary_factor is 0.5"),
            ('{"mrope_section":[2,3,3]}', "mrope_section is [2,3,3]"),
            ('{"full_attention":{"rope_theta":7}}', "full_attention is {"),
            ('{"rope_type":"default","factor":2}', "factor is 2"),
            ('{"rope_type":"llama3"}', "factor is missing"),
            ('{"rope_type":"llama3","factor":0.5}', "factor is 0.5"),
            ('{"rope_type":"llama3","factor":8,"low_freq_factor":1}', "high_freq_factor is missing"),
            ('{"rope_type":"llama3","factor":8,"high_freq_factor":1}', "low_freq_factor is missing"),
            ('{"rope_type":"llama3","factor":8,"low_freq_factor":0,"high_freq_factor":1}', "low_freq_factor is 0"),
            ('{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4}', "high_freq_factor is 4"),
            ('{"rope_type":"llama3","attention_factor":2,%s}', "attention_factor is 2"),
            ('{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,'
             '"original_max_position_embeddings":null}', "original_max_position_embeddings is null"),
            ('{"rope_type":"llama3",%s},"original_max_position_embeddings":0', "original_max_position_embeddings is 0"),
            ("[1]", "is [1]"),
            ('"llama3"', 'is "llama3"'),
            ("true", "is true")):
        config_refused("rope_scaling", value.replace("%s", LLAMA3), words)
        config_refused("rope_parameters", value.replace("%s", LLAMA3), words)


@test
def absurd_values_are_refused_by_name():
    for key, value, word in (
            ("hidden_size", None, "hidden_size is missing"),
            ("hidden_size", "null", "hidden_size is missing"),
            ("hidden_size", "0", "hidden_size is 0; allowed: an integer from 1 to 65536"),
            ("hidden_size", "-128", "hidden_size is -128"),
            ("hidden_size", "128.0", "hidden_size is 128.0"),
            ("hidden_size", '"128"', 'hidden_size is "128"'),
            ("hidden_size", "9223372036854775807", "hidden_size is 9223372036854775807"),
            ("hidden_size", "132", "not a multiple of num_attention_heads"),
            ("intermediate_size", "0", "intermediate_size is 0"),
            ("num_hidden_layers", "0", "num_hidden_layers is 0"),
            ("num_hidden_layers", "1025", "from 1 to 1024"),
            ("num_attention_heads", "12", "not a multiple of num_attention_heads"),
            ("num_attention_heads", "0", "num_attention_heads is 0"),
            ("num_key_value_heads", "0", "num_key_value_heads is 0"),
            ("num_key_value_heads", "3", "divisor of num_attention_heads"),
            ("num_key_value_heads", "16", "divisor of num_attention_heads"),
            ("head_dim", "15", "head_dim is 15"),
            ("head_dim", "4096", "head_dim is 4096"),
            ("vocab_size", "1", "vocab_size is 1"),
            ("vocab_size", "1e3", "vocab_size is 1000.0"),
            ("vocab_size", "16777217", "from 2 to 16777216"),
            ("max_position_embeddings", "0", "max_position_embeddings is 0"),
            ("rms_norm_eps", "0", "rms_norm_eps is 0"),
            ("rms_norm_eps", "-1e-5", "rms_norm_eps is"),
            ("rms_norm_eps", "1e300", "rms_norm_eps is"),
            ("rms_norm_eps", '"small"', 'rms_norm_eps is "small"'),
            ("rope_theta", "0.5", "rope_theta is 0.5"),
            ("rope_theta", "true", "rope_theta is true"),
            ("rope_theta", "null", "rope_theta is null"),
            ("rope_scaling", "7", "rope_scaling is 7"),
            ("rope_parameters", "7", "rope_parameters is 7"),
            ("sliding_window", "16", "sliding_window is 16"),
            ("attention_chunk_size", "16", "attention_chunk_size is 16"),
            ("num_kv_shared_layers", "1", "num_kv_shared_layers is 1"),
            ("per_layer_config", '{"0":{}}', "per_layer_config is {"),
            ("is_causal", "false", "is_causal is false"),
            ("is_causal", "null", "is_causal is null"),
            ("is_encoder_decoder", "true", "is_encoder_decoder is true"),
            ("transformers_weights", '"other.safetensors"', "transformers_weights is"),
            ("configuration_files", '["config.5.0.0.json"]', "configuration_files is"),
            ("layer_types", '["full_attention","sliding_attention"]', "layer_types is ["),
            ("layer_types", '"full_attention"', 'layer_types is "full_attention"'),
            ("partial_rotary_factor", "0.5", "partial_rotary_factor is 0.5"),
            ("partial_rotary_factor", '"1"', 'partial_rotary_factor is "1"'),
            ("tie_word_embeddings", "1", "tie_word_embeddings is 1; allowed: true or false"),
            ("attention_bias", "true", "attention_bias is true"),
            ("mlp_bias", "true", "mlp_bias is true"),
            ("quantization_config", '{"bits":4}', "quantization_config is"),
            ("hidden_act", '"gelu"', 'hidden_act is "gelu"'),
            ("model_type", '"qwen2"', 'model_type is "qwen2"'),
            ("model_type", None, "model_type is missing"),
            ("eos_token_id", "16", "eos_token_id is 16; allowed: an integer from 0 to 15"),
            ("eos_token_id", "-1", "eos_token_id is -1"),
            ("eos_token_id", '[2, "x"]', 'eos_token_id is "x"'),
            ("eos_token_id", "[1,1,1,1,1,1,1,1,1]", "lists 9 tokens"),
            ("eos_token_id", "{}", "eos_token_id is {}"),
            ("bos_token_id", "99", "bos_token_id is 99"),
            ("rms_norm_eps", '"%s"' % ("a value that is longer than what fits into the text of an error " * 3),
             "a long value")):
        config_refused(key, value, word)


@test
def a_config_that_is_no_json_is_refused():
    config_refused("rms_norm_eps", "NaN", "not valid JSON", "CORRUPT")
    config_refused("rms_norm_eps", "Infinity", "not valid JSON", "CORRUPT")
    config_refused("hidden_size", "99999999999999999999", "not valid JSON", "CORRUPT")
    config_refused("x", '1,"x":2', "duplicate", "CORRUPT")
    for text, code in (("", "CORRUPT"), ("[]", "CORRUPT"), ("\0" * (2 << 20), "TOO_LARGE")):
        refused(code, (), "config", put(tempfile.mkdtemp(), "config.json", text))
    refused("NOT_FOUND", (), "config", "/nonexistent/config.json")


# ---- tokenizers ----


def tokenizer(vocab, **more):
    model = {"model": {"type": "WordLevel", "vocab": vocab}, **more}
    return put(tempfile.mkdtemp(), "tokenizer.json", json.dumps(model, ensure_ascii=False))


def tokenizer_refused(text, code, word):
    folder = tempfile.mkdtemp()
    put(folder, "tokenizer.json", text)
    refused(code, (word,), "encode", folder, "1")


@test
def the_sums_model_there_and_back():
    same(said("encode", MODEL, "27+58="), "1 5 10 13 8 11 14 ")
    same(said("decode", MODEL, *"1 5 10 13 8 11 14".split()), "27+58=")
    # Specials are dropped, ids that do not exist are shown.
    same(said("decode", MODEL, *"8 2 15 99 -1 3".split()), "5\ufffd\ufffd0")
    # <bos> alone is a prompt.
    same(said("encode", MODEL, ""), "1 ")


@test
def an_unknown_character_is_named_with_its_position():
    for text, words in (
            ("27-58=", ("'-'", "position 3", "+0123456789=")),
            ("ä", ("'ä'", "position 1", "0123456789")),
            ("1+€", ("'€'", "position 3", "0123456789")),
            ("1\t", ("U+0009", "position 2", "0123456789")),
            (b"12\xff", ("0xff", "position 3", "not UTF-8")),
            (b"12\xc3", ("0xc3", "position 3", "not UTF-8")),  # cut short
            (b"\xc0\xb1", ("0xc0", "position 1", "not UTF-8")),  # overlong
            (b"\xed\xa0\x80", ("0xed", "position 1", "not UTF-8"))):  # surrogate
        refused("INVALID", words, "encode", MODEL, text)


@test
def characters_have_all_lengths():
    folder = os.path.dirname(tokenizer({"a": 4, "ä": 0, "€": 7, "\U0001f6a3": 2, "<": 9}))
    same(said("encode", folder, "\U0001f6a3<a€ä"), "2 9 4 7 0 ")
    same(said("decode", folder, *"2 9 4 7 0".split()), "\U0001f6a3<a€ä")
    # No <bos>, no text: nothing to compute.
    refused("INVALID", ("<bos>",), "encode", folder, "")


@test
def odd_tokenizers_are_refused():
    refused("NOT_FOUND", ("/nonexistent/tokenizer.json",), "encode", "/nonexistent", "1")
    refused("NOT_FOUND", (), "encode", MODEL + "/config.json", "1")
    for text, code, word in (
            ("", "CORRUPT", "not valid JSON"),
            ('{"model": {"type": "WordLevel", "voc', "CORRUPT", "not valid JSON"),
            ("[]", "CORRUPT", "not an object"),
            ("{}", "CORRUPT", '"model"'),
            ('{"model":[]}', "CORRUPT", '"model"'),
            ('{"model":{"type":"BPE","vocab":{"a":0}}}', "UNSUPPORTED", "--tokens"),
            ('{"model":{"vocab":{"a":0}}}', "UNSUPPORTED", "--tokens"),
            ('{"model":{"type":"WordLevel"}}', "CORRUPT", "vocab"),
            ('{"model":{"type":"WordLevel","vocab":{}}}', "CORRUPT", "vocab"),
            ('{"model":{"type":"WordLevel","vocab":{"a":"0"}}}', "CORRUPT", '"a"'),
            ('{"model":{"type":"WordLevel","vocab":{"a":-1}}}', "CORRUPT", '"a"'),
            ('{"model":{"type":"WordLevel","vocab":{"a":99999999999}}}', "CORRUPT", '"a"'),
            ('{"model":{"type":"WordLevel","vocab":{"a":0,"b":0}}}', "CORRUPT", "two tokens"),
            ('{"model":{"type":"WordLevel","vocab":{"a":0,"a":1}}}', "CORRUPT", "duplicate"),
            ('{"model":{"type":"WordLevel","vocab":{"the":0}}}', "UNSUPPORTED", '"the"')):
        tokenizer_refused(text, code, word)
    # A word that added_tokens declares special is fine.
    special = tokenizer({"END": 0, "a": 1}, added_tokens=[{"content": "END", "special": True}])
    same(said("encode", os.path.dirname(special), "a"), "1 ")
    os.unlink(special)
    os.mkfifo(special)
    refused("CORRUPT", ("not a regular file",), "encode", os.path.dirname(special), "1")


@test
def the_end_of_a_text_is_a_number_a_list_or_absent():
    same(said("eos", MODEL), "2 ")
    folder = tempfile.mkdtemp()
    for text, wanted in (("[5, 7]", "5 7 "), ("null", "")):
        put(folder, "config.json", '{"eos_token_id": %s}' % text)
        same(said("eos", folder), wanted)
    for text, code, word in (('{"eos_token_id": "2"}', "CORRUPT", ""), ('{"eos_token_id": 2', "CORRUPT", ""),
                             ('{"eos_token_id": [1,2,3,4,5,6,7,8,9]}', "INVALID", "9 tokens")):
        put(folder, "config.json", text)
        refused(code, (word,), "eos", folder)
    refused("NOT_FOUND", (), "eos", "/nonexistent")


# ---- safetensors ----


def checkpoint(header, data=b"", cut=None):
    text = header if isinstance(header, str) else json.dumps(header)
    path = tempfile.mkdtemp() + "/model.safetensors"
    with open(path, "wb") as file:
        file.write((struct.pack("<Q", len(text)) + text.encode() + data)[:cut])
    return path


def at_bytes(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def floats(path, name, *more, cut=-1):
    data = call("tensor", path, str(cut), name, *map(str, more)).stdout
    return struct.unpack("<%df" % (len(data) // 4), data)


@test
def three_dtypes_are_read_as_f32():
    # The halves stand first, so that the file also has a tensor at an odd place of memory.
    halves, wanted = (0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x8000), (1, -2, 65504, 2 ** -14, 2 ** -24, 0)
    path = checkpoint({"__metadata__": {"format": "pt"}, "half": at_bytes("F16", [6], 0, 12),
                       "brain": at_bytes("BF16", [1, 2], 12, 16), "full": at_bytes("F32", [2], 16, 24),
                       "none": at_bytes("F32", [0, 3], 24, 24)},
                      struct.pack("<6H2H2f", *halves, 0x3fc0, 0xc2f7, 0.1, -3e38))
    found = said("tensors", path, "half").split()
    same((sorted(found[:-1]), found[-1]), (["brain", "full", "half", "none"], "1"))
    same(said("tensors", path, "__metadata__").split()[-1], "0")
    same(floats(path, "half", 6), wanted)
    check(math.copysign(1, floats(path, "half", 6)[5]) < 0, "minus zero")
    same(floats(path, "brain", 1, 2), (1.5, -123.5))
    same(floats(path, "full", 2), struct.unpack("<2f", struct.pack("<2f", 0.1, -3e38)))
    same(said("tensor", path, "-1", "none", "0", "3"), "")


@test
def parts_of_a_matrix_are_read():
    # Rows, columns, both and neither of a 3 x 4 matrix that counts from 1, in each dtype.
    for dtype, data in (("F32", struct.pack("<12f", *range(1, 13))), ("F16", struct.pack("<12e", *range(1, 13))),
                        ("BF16", b"".join(struct.pack("<f", i)[2:] for i in range(1, 13)))):
        path = checkpoint({"t": at_bytes(dtype, [3, 4], 0, len(data))}, data)
        for row, rows, column, columns in ((0, 3, 0, 4), (1, 1, 0, 4), (1, 2, 0, 4), (0, 3, 1, 2), (2, 1, 3, 1),
                                           (3, 0, 0, 4), (1, 2, 2, 0)):
            part = list(map(str, (row, rows, column, columns)))
            same(floats(path, "t", 3, 4, "/", *part),
                 tuple(4 * i + k + 1 for i in range(row, row + rows) for k in range(column, column + columns)))
            refused("INVALID", (), "tensor", path, "-1", "t", "4", "3", "/", *part)
            refused("NOT_FOUND", (), "tensor", path, "-1", "u", "3", "4", "/", *part)


@test
def a_part_is_refused_for_its_own_numbers_alone():
    # Only what is read is looked at, and the text counts in the whole tensor.
    path = checkpoint({"t": at_bytes("F32", [2, 3], 0, 24)}, struct.pack("<6f", 1, 2, 3, 4, math.inf, 6))
    same(floats(path, "t", 2, 3, "/", 0, 2, 2, 1), (3, 6))
    refused("INVALID", ("number 4 of tensor t is not finite",), "tensor", path, "-1", "t", *"2 3 / 1 1 1 2".split())


@test
def every_half_is_the_float_of_its_value():
    data = struct.pack("<31744H", *range(31744))  # all that are positive and finite
    path = checkpoint({"t": at_bytes("F16", [31744], 0, len(data))}, data)
    same(floats(path, "t", 31744), struct.unpack("<31744e", data))


def checkpoint_refused(path, word, code="CORRUPT"):
    refused(code, (word, "model.safetensors"), "tensors", path, "a")


@test
def files_that_are_too_short_or_something_else_are_refused():
    for size in (0, 7):
        checkpoint_refused(checkpoint("", cut=size), "%d bytes" % size)
    for size in (0, 1, 100, 100000001, (1 << 64) - 1):
        path = checkpoint("")
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", size))
        checkpoint_refused(path, "its header would have")
    os.unlink(path)
    checkpoint_refused(path, "does not exist", "NOT_FOUND")
    os.mkdir(path)
    checkpoint_refused(path, "not a regular file")
    os.rmdir(path)
    os.mkfifo(path)
    checkpoint_refused(path, "not a regular file")
    # Every length of a good file but the whole one, and a byte more.
    header = {"a": at_bytes("F32", [2], 0, 8), "b": at_bytes("BF16", [2, 2], 8, 16)}
    size = os.path.getsize(checkpoint(header, bytes(16)))
    for cut in range(size):
        checkpoint_refused(checkpoint(header, bytes(16), cut=cut), "")
    checkpoint_refused(checkpoint(header, bytes(17)), "which has 17")
    said("tensors", checkpoint(header, bytes(16)), "a")


@test
def headers_that_make_no_sense_are_refused():
    # All with 16 bytes of data.
    whole = json.dumps(at_bytes("F32", [4], 0, 16))
    for header, word in (
            ("nonsense", "not valid JSON"),
            ("[1, 2]", "not an object"),
            ('{"a": NaN}', "not valid JSON"),
            ('{"a": 7}', "not an object"),
            ("{}", "which has 16"),
            ('{"a":%s,"a":%s}' % (whole, whole), "duplicate"),
            ({"a": at_bytes("F31", [4], 0, 16)}, 'unknown dtype "F31"'),
            ({"a": {"shape": [4], "data_offsets": [0, 16]}}, "no dtype"),
            ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, "shape"),
            ({"a": {"dtype": "F32", "shape": [4]}}, "data_offsets"),
            ({"a": at_bytes("F32", 8 * [1] + [4], 0, 16)}, "at most 8"),
            ({"a": at_bytes("F32", [-4], 0, 16)}, "from 0 up"),
            ({"a": at_bytes("F32", [4.0], 0, 16)}, "from 0 up"),
            ({"a": at_bytes("F32", [1 << 32, 1 << 32], 0, 16)}, "beyond 64 bits"),
            ({"a": at_bytes("F32", [1 << 62], 0, 16)}, "beyond 64 bits"),
            ({"a": at_bytes("F32", [5], 0, 20)}, "is the file complete"),
            ({"a": at_bytes("F32", [4], 8, (1 << 63) - 1)}, "is the file complete"),
            ({"a": at_bytes("F32", [4], 0, 10 ** 20 - 1)}, "not valid JSON"),
            ({"a": at_bytes("F32", [4], 16, 0)}, "begin <= end"),
            ({"a": at_bytes("F32", [4], -8, 8)}, "begin <= end"),
            ({"a": at_bytes("F32", [3], 0, 16)}, "need 12"),
            ({"a": at_bytes("F16", [1], 0, 2), "b": at_bytes("F32", [3], 2, 14), "c": at_bytes("F16", [1], 14, 16)},
             "multiple of 4"),
            ({"a": at_bytes("F32", [3], 0, 12), "b": at_bytes("F32", [2], 8, 16)}, "overlaps tensor a"),
            ({"a": at_bytes("F32", [1], 0, 4), "b": at_bytes("F32", [2], 8, 16)}, "belong to no tensor"),
            ({"a": at_bytes("F32", [3], 0, 12)}, "which has 16")):
        checkpoint_refused(checkpoint(header, struct.pack("<4f", 1, 2, 3, 4)), word)


@test
def wrong_tensors_are_refused():
    path = checkpoint({"a": at_bytes("F32", [2, 1], 0, 8), "i": at_bytes("I32", [2], 8, 16),
                       "n": at_bytes("F32", [2], 16, 24), "h": at_bytes("F16", [2], 24, 28),
                       "s": at_bytes("F32", [], 28, 32)},
                      struct.pack("<6f2Hf", 1, 2, 3, 4, 5, math.nan, 0, 0xfc00, 1))
    for tensor, code, word in (
            ("b 2 1", "NOT_FOUND", "no tensor b"),
            ("a 2", "INVALID", "shape [2, 1]"),
            ("a 1 2", "INVALID", "implies [1, 2]"),
            ("s 2", "INVALID", "shape []"),
            ("i 2", "INVALID", "dtype I32"),
            ("n 2", "INVALID", "number 1 of tensor n is not finite"),
            ("h 2", "INVALID", "number 1 of tensor h is not finite")):
        refused(code, (word, "model.safetensors"), "tensor", path, "-1", *tensor.split())
    # Cut short after it was opened: an error, not a signal.
    refused("CORRUPT", ("truncated",), "tensor", path, "100", "a", "2", "1")


# ---- LoRA adapters ----


class Adapter:
    """A folder as PEFT writes it, for the shipped model: of rank 4, with all projections."""

    def __init__(self, rank=4, b_rank=None, seed=1, modules="qkvo", alpha=16):
        with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
            self.model = json.load(file)
        hidden, heads = self.model["hidden_size"], self.model["num_attention_heads"]
        shared = hidden // heads * self.model["num_key_value_heads"]
        self.folder = tempfile.mkdtemp()
        self.numbers = [(seed + i % 97) / 200 for i in range(1 << 18)]
        self.shapes = {}
        for layer in range(self.model["num_hidden_layers"]):
            for module in modules:
                prefix = "base_model.model.model.layers.%d.self_attn.%s_proj.lora_" % (layer, module)
                self.shapes[prefix + "A.weight"] = [rank, hidden]
                self.shapes[prefix + "B.weight"] = [hidden if module in "qo" else shared, b_rank or rank]
        self.config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha,
                       "target_modules": [module + "_proj" for module in modules]}

    def reshape(self, index, more):
        """The tensors with this index, from the end, get more rows and columns."""
        name = list(self.shapes)[index]
        self.shapes[name] = [old + new for old, new in zip(self.shapes[name], more)]
        return self

    def write(self):
        header, end = {}, 0
        for name, shape in self.shapes.items():
            begin, end = end, end + 4 * math.prod(shape)
            header[name] = at_bytes("F32", shape, begin, end)
        text = json.dumps(header).encode()
        count = end // 4
        data = struct.pack("<Q", len(text)) + text + struct.pack("<%df" % count, *self.numbers[-count:])
        with open(self.folder + "/adapter_model.safetensors", "wb") as file:
            file.write(data)
        config = self.config if isinstance(self.config, str) else json.dumps(self.config)
        put(self.folder, "adapter_config.json", config)
        return os.path.join(MODEL, "config.json"), self.folder

    def digest(self):
        return said("adapter", *self.write())


def adapter_refused(adapter, code, word):
    refused(code, (word,), "adapter", *adapter.write())


@test
def m13_an_adapter_of_another_shape_is_refused():
    adapter_refused(Adapter(b_rank=5), "DIVERGED", "has rank 5; adapter_config.json says 4")
    adapter_refused(Adapter(rank=65), "DIVERGED", "r is 65; allowed: 1 to 64")
    adapter_refused(Adapter().reshape(-2, (0, 1)), "INVALID", "has the shape")
    adapter_refused(Adapter().reshape(-1, (1, 0)), "INVALID", "has the shape")
    vector, less, more, infinite = Adapter(), Adapter(), Adapter(), Adapter()
    vector.shapes[list(vector.shapes)[-2]] = [4]
    adapter_refused(vector, "INVALID", "has the shape")
    del less.shapes["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"]
    adapter_refused(less, "NOT_FOUND", "has no tensor")
    more.shapes["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = [4, 128]
    adapter_refused(more, "INVALID", "tensors; target_modules and the model imply")
    infinite.numbers[-1] = math.inf
    adapter_refused(infinite, "INVALID", "not finite")


@test
def m13_an_adapter_of_another_kind_is_refused():
    adapter = Adapter(modules="q")
    for text, code, word in (
            ('{"r":6,"lora_alpha":8,"target_modules":["q_proj"]}', "DIVERGED",
             "has rank 4; adapter_config.json says 6"),
            ('{"r":0,"lora_alpha":8,"target_modules":["q_proj"]}', "DIVERGED", "r is 0"),
            ('{"r":-1,"lora_alpha":8,"target_modules":["q_proj"]}', "DIVERGED", "r is -1"),
            ('{"r":"4","lora_alpha":8,"target_modules":["q_proj"]}', "DIVERGED", "r is not an integer"),
            ('{"lora_alpha":8,"target_modules":["q_proj"]}', "DIVERGED", "r is not an integer"),
            ("{", "CORRUPT", "adapter_config.json"),
            ("[]", "CORRUPT", "adapter_config.json"),
            ('{"r":4,"target_modules":["q_proj"]}', "INVALID", "lora_alpha is not a number"),
            ('{"r":4,"lora_alpha":1e300,"target_modules":["q_proj"]}', "INVALID", "lora_alpha is 1e+300"),
            ('{"r":4,"lora_alpha":8,"target_modules":"all-linear"}', "INVALID", "target_modules"),
            ('{"r":4,"lora_alpha":8,"target_modules":[]}', "INVALID", "target_modules"),
            ('{"r":4,"lora_alpha":8,"target_modules":["up_proj"]}', "INVALID", "'up_proj'"),
            ('{"r":4,"lora_alpha":8,"target_modules":[7]}', "INVALID", "no name")):
        adapter.config = text
        adapter_refused(adapter, code, word)
    for more, word in (
            ('"peft_type":"LOHA"', "LOHA"),
            ('"use_dora":true', "use_dora"),
            ('"bias":"all"', "bias"),
            ('"use_dora":"true"', 'use_dora is "true"'),
            ('"use_dora":1', "use_dora is 1"),
            ('"use_dora":{}', "use_dora is {}"),
            ('"lora_bias":"no"', 'lora_bias is "no"'),
            ('"fan_in_fan_out":0', "fan_in_fan_out is 0"),
            ('"use_rslora":"true"', "use_rslora"),
            ('"bias":1', "bias is 1"),
            ('"bias":false', "bias is false"),
            ('"bias":["all"]', 'bias is ["all"]'),
            ('"peft_type":3', "peft_type is 3"),
            ('"peft_type":["LOHA"]', 'peft_type is ["LOHA"]'),
            ('"rank_pattern":{"a":1}', "rank_pattern"),
            ('"modules_to_save":["lm_head"]', "modules_to_save"),
            ('"layers_to_transform":0', "layers_to_transform")):
        adapter.config = '{"r":4,"lora_alpha":8,"target_modules":["q_proj"],%s}' % more
        adapter_refused(adapter, "INVALID", word)
    # null is what PEFT writes for "nothing".
    adapter.config = ('{"r":4,"lora_alpha":8,"target_modules":["q_proj"],"peft_type":"LORA","bias":null,'
                      '"use_dora":null,"lora_bias":false,"use_rslora":null,"rank_pattern":{}}')
    adapter.digest()


@test
def m13_missing_or_broken_files_of_an_adapter_are_refused():
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        config_path, folder = Adapter().write()
        path = put(folder, name, "nothing")
        refused("CORRUPT", (name,), "adapter", config_path, folder)
        os.unlink(path)
        refused("NOT_FOUND", (name,), "adapter", config_path, folder)
        # A pipe without a writer: it is not waited for.
        os.mkfifo(path)
        check(call("adapter", config_path, folder).code, path)
    refused("NOT_FOUND", (), "adapter", config_path, "/nonexistent")


@test
def m13_other_files_have_another_digest():
    # Of the numbers and of what they are multiplied with.
    others = ({}, {"seed": 2}, {"alpha": 5}, {"modules": "qkv"}, {"rank": 5})
    digests = [Adapter(**other).digest() for other in others]
    same(len(set(digests)), len(others))
    same([Adapter(**other).digest() for other in others], digests)


# ---- control groups ----

V2_MOUNT = ("24 1 0:22 / /proc rw,nosuid - proc proc rw\n"
            "31 23 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
V1_MOUNTS = ("31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
             "32 31 0:29 %s /sys/fs/cgroup/cpu,cpuacct rw master:9 - cgroup cgroup rw,cpu,cpuacct\n"
             "34 31 0:31 %s /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
             "35 31 0:32 %s /sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory\n"
             "38 31 0:36 %s /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
             "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")


class Root:
    """A folder that stands for /."""

    def __init__(self, groups="0::/\n", mounts=V2_MOUNT):
        self.folder = tempfile.mkdtemp()
        self.see(groups, mounts)

    def see(self, groups, mounts):
        put(self.folder, "proc/self/cgroup", groups)
        put(self.folder, "proc/self/mountinfo", mounts)

    def group(self, path, **files):
        """A group is a folder with the first of these files; _ stands for the dot of the others."""
        put(self.folder, "sys/fs/cgroup" + path + "/cgroup.procs", "")
        for name, text in files.items():
            put(self.folder, "sys/fs/cgroup%s/%s" % (path, name.replace("_", ".", 1)), text + "\n")

    def limits(self):
        """Of processors, memory and processes."""
        lines = said("cgroup", self.folder).replace(self.folder + "/sys/fs/cgroup", "").splitlines()
        return dict(zip(("cpu", "memory", "pids"), lines))


def version_1(mounted):
    lines = "12:cpuset:%s 9:name=systemd:%s 8:pids:%s 4:memory:%s 1:cpu,cpuacct:%s 0::%s".replace("%s", "/docker/ab")
    return lines.replace(" ", "\n") + "\n", V1_MOUNTS.replace("%s", mounted)


@test
def limits_that_are_not_mounted_are_unknown():
    unknown = {"cpu": "unknown", "memory": "unknown", "pids": "unknown"}
    root = Root(mounts="24 1 0:22 / /proc rw - proc proc rw\n")
    same(root.limits(), unknown)
    root.see("0::/\n", V2_MOUNT)  # mounted, it is said, but nothing is there
    same(root.limits()["cpu"], "unknown")
    root.see("\n:\n0\n0:\n", "\n - \n1 2 3\n - cgroup2 x y\n1 2 3 4 - cgroup2\n")
    same(root.limits()["cpu"], "unknown")
    root.folder = tempfile.mkdtemp()  # no /proc at all
    same(root.limits()["cpu"], "unknown")


@test
def version_2_without_limits():
    root = Root("0::/a.slice/b.scope\n")
    root.group("")  # the root of all has no such files
    root.group("/a.slice", cpu_max="max 100000")
    root.group("/a.slice/b.scope", memory_max="max", pids_max="max")
    same(root.limits(), {"cpu": "none", "memory": "none", "pids": "none"})


@test
def of_version_2_the_smallest_on_the_way_up_counts():
    root = Root("0::/a.slice/b c/d.scope\n")
    root.group("")
    root.group("/a.slice", cpu_max="150000 100000", memory_max="1073741824", memory_current="1000")
    root.group("/a.slice/b c", cpu_max="max 100000", memory_max="536870912", memory_current="4096")
    root.group("/a.slice/b c/d.scope", cpu_max="400000 100000", pids_max="100", pids_current="7")
    # A neighbour's and a child's do not.
    for others in range(2):
        same(root.limits(), {"cpu": "limited 1500000 0 /a.slice/cpu.max",
                             "memory": "limited 536870912 4096 /a.slice/b c/memory.max",
                             "pids": "limited 100 7 /a.slice/b c/d.scope/pids.max"})
        if not others:
            root.group("/a.slice/other", cpu_max="1000 100000")
            root.group("/a.slice/b c/d.scope/child", cpu_max="1000 100000")


@test
def version_2_in_a_namespace_of_its_own():
    root = Root()
    root.group("", cpu_max="50000 100000")
    same(root.limits(), {"cpu": "limited 500000 0 /cpu.max", "memory": "none", "pids": "none"})
    root.see("0::/../x\n", V2_MOUNT)  # a group outside of it cannot be seen
    same(root.limits()["cpu"], "unknown")


@test
def version_1_with_co_mounted_controllers():
    root = Root(*version_1("/"))
    root.group("/unified/docker/ab")  # it has no controllers
    root.group("/cpu,cpuacct", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    root.group("/my memory", memory_limit_in_bytes="9223372036854771712")
    root.group("/pids")
    root.group("/cpu,cpuacct/docker", cpu_cfs_quota_us="300000", cpu_cfs_period_us="200000")
    root.group("/cpu,cpuacct/docker/ab", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    root.group("/my memory/docker/ab", memory_limit_in_bytes="9223372036854771712")
    root.group("/pids/docker/ab", pids_max="64", pids_current="3")
    root.group("/pids/docker", pids_max="max")
    same(root.limits(), {"cpu": "limited 1500000 0 /cpu,cpuacct/docker/cpu.cfs_quota_us", "memory": "none",
                         "pids": "limited 64 3 /pids/docker/ab/pids.max"})
    root.group("/my memory/docker", memory_limit_in_bytes="33554432", memory_usage_in_bytes="5")
    same(root.limits()["memory"], "limited 33554432 5 /my memory/docker/memory.limit_in_bytes")


@test
def version_1_mounted_from_the_own_group_on():
    # As a container without a namespace for groups sees it: only its own is mounted.
    root = Root(*version_1("/docker/ab"))
    root.group("/unified/docker/ab")
    root.group("/cpu,cpuacct", cpu_cfs_quota_us="50000", cpu_cfs_period_us="100000")
    root.group("/my memory", memory_limit_in_bytes="67108864")
    # pids is at version 1, and not mounted: version 2 knows nothing of it.
    same(root.limits(), {"cpu": "limited 500000 0 /cpu,cpuacct/cpu.cfs_quota_us",
                         "memory": "limited 67108864 0 /my memory/memory.limit_in_bytes", "pids": "unknown"})
    root.see(*version_1("/docker/abc"))  # another one's, whose name only begins like that
    same(root.limits()["cpu"], "unknown")


@test
def limits_that_are_no_numbers_are_unknown():
    root = Root("0::/a/b\n")
    root.group("")
    root.group("/a", cpu_max="max 100000")
    for text in ("x 100000", "1000", "1000 0", "-5 100000"):
        root.group("/a/b", cpu_max=text)
        same(root.limits()["cpu"], "unknown")
    put(root.folder, "sys/fs/cgroup/a/b/cpu.max", "")
    same(root.limits()["cpu"], "unknown")
    root.group("/a", cpu_max="200000 100000")  # a limit that is known stays one
    same(root.limits()["cpu"], "limited 2000000 0 /a/cpu.max")


@test
def the_limits_of_this_machine_are_read():
    for line in said("cgroup", "").splitlines():
        state, *more = line.split(" ", 3)
        check(state != "limited" or os.path.exists(more[2]), line)


# ---- stacks ----


def stacks(*texts):
    """Of ranks 0, 1, ...; "!": it is silent; "-": it is not asked. Their summaries, texts, and the paragraph."""
    found = said("stacks", *texts).split("\0")
    return found[0:-2:2], found[1:-2:2], found[-2]


def paragraph(*texts):
    return stacks(*texts)[2]


@test
def a_text_has_its_summary_and_its_lines():
    summaries, texts, words = stacks("summary: in a\nprocess 1: ...\n", "!", "process 3\n", "summary: in a\n")
    same(summaries[:3], ["in a", "node b is silent", "nothing is known"])
    same(texts[:2], ["process 1: ...\n", "not there: node b is silent\n"])
    same(words, "rank 1: node b is silent; rank 2: nothing is known; ranks 0,3: in a")


@test
def what_a_terminal_obeys_is_gone():
    text = b"summary: in \x1b[2J\x9b2J\ttab\r\nline\x07\x1b]0;title\x07\n\x7f\n"
    same(stacks(text)[:2], (["in ?[2J?2J?tab?"], ["line??]0;title?\n?\n"]))


@test
def a_summary_has_no_path_of_a_machine():
    secret = 'File "/srv/secret/model.py"\n'
    for line, summary in (
            ("in f (/srv/secret/model.py:97) called from g (/a/b.py:1)", "in f (model.py:97) called from g (b.py:1)"),
            ("/usr/bin/coxswain cannot be started: no such file", "coxswain cannot be started: no such file"),
            ("where its core is: /var/crash/core.%e", "where its core is: core.%e"),
            ("40 tokens/s, and/or 1/2", "40 tokens/s, and/or 1/2"),
            ("'/etc/passwd' \"/etc/shadow\"", "'passwd' \"shadow\""),
            ("in /", "in "),
            ("path=/a/b/", "path=")):
        same(stacks("summary: %s\n%s" % (line, secret))[:2], ([summary], [secret]))


@test
def a_summary_is_cut():
    summaries, texts, _ = stacks(*2 * ["summary: " + 99991 * "a"])
    size = int(re.search(r"COX_STACKS_SUMMARY_SIZE (\d+)", source("coordinator", "stacks", "paragraph.h"))[1])
    same([len(summary) for summary in summaries], 2 * [size - 1])
    same(texts, ["", ""])


def at(letters):
    """A rank for each letter: those with the same are at the same place."""
    return paragraph(*("-" if letter == "-" else "summary: in %s\n" % letter for letter in letters))


@test
def ranks_at_one_place_are_one_part():
    same(at("aaaa"), "ranks 0-3: in a")
    same(at("a"), "rank 0: in a")
    same(at(""), "")
    same(at("abcdefg"), "rank 0: in a; rank 1: in b; rank 2: in c; rank 3: in d; the others at 3 more places")


@test
def a_rank_that_is_alone_comes_first():
    same(at("abaa"), "rank 1: in b; ranks 0,2-3: in a, and may wait for it")
    same(at("ab"), "rank 0: in a; rank 1: in b")
    same(at("aabb"), "ranks 0-1: in a; ranks 2-3: in b")
    same(at("aabc"), "rank 2: in b; rank 3: in c; ranks 0-1: in a")
    same(at("--ab-bb"), "rank 2: in a; ranks 3,5-6: in b, and may wait for it")


@test
def a_thread_that_looks_now_and_then_is_where_the_others_wait():
    places = ("in wait (a.c:1), running", "in wait (a.c:1)", "in loop (b.c:2), running")
    same(paragraph(*("summary: main thread %s\n" % place for place in places), "summary: main thread, running\n",
                   "summary: main thread, asleep\n"),
         "rank 2: main thread in loop (b.c:2), running; rank 3: main thread, running; rank 4: main thread, asleep; "
         "ranks 0-1: main thread in wait (a.c:1)")


@test
def a_request_is_a_suspect_for_its_last_second_and_a_half_at_most():
    for published_s, deadline_s, due in ((10, 40, "38500000000"), (10, 12, "11500000000"), (10, 9, "never"),
                                         (10, "never", "never")):
        same(said("due", str(published_s), str(deadline_s)), due)


def waits(name, entered, where):
    return "summary: in a\ntorch: group %s: entered %d, waits in %s\n" % (name, entered, where)


@test
def the_rank_that_the_others_wait_for_is_named():
    first = "0 (default_pg)"
    same(paragraph(waits(first, 4711, "all_reduce 4711"), waits(first, 4710, "none"),
                   waits(first, 4713, "all_reduce 4711"), waits(first, 4711, "all_reduce 4711")),
         "PyTorch: rank 1 never entered all_reduce 4711; ranks 0,2-3 wait in it; ranks 0-3: in a")
    # Ranks that are not read are not named.
    same(paragraph(waits(first, 5, "broadcast 5"), "!", waits(first, 4, "none"), "summary: in a\n"),
         "PyTorch: rank 2 never entered broadcast 5; rank 0 waits in it; "
         "rank 1: node b is silent; ranks 0,2-3: in a, and may wait for it")
    # No rank waits.
    same(paragraph(waits(first, 5, "none"), waits(first, 4, "none")), "ranks 0-1: in a")
    # All ranks wait in it.
    same(paragraph(*2 * [waits("7 (undefined)", 5, "all_gather 5")]),
         "PyTorch: ranks 0-1 wait in all_gather 5 of process group 7; ranks 0-1: in a")
    # A rank has completed it.
    same(paragraph(waits("0 (tp)", 5, "all_reduce 5"), waits("0 (tp)", 6, "all_reduce 6"), waits("0 (tp)", 5, "none")),
         "PyTorch: ranks 1-2 have completed all_reduce 5 of process group tp; rank 0 waits in it; ranks 0-2: in a")
    # A rank is in another collective of that number.
    same(paragraph(waits(first, 5, "all_reduce 5"), waits(first, 5, "broadcast 5"), waits(first, 5, "all_reduce 5")),
         "PyTorch: rank 1 waits in broadcast 5; ranks 0,2 wait in all_reduce 5; ranks 0-2: in a")
    # A group that a rank is missing in comes first.
    both = waits(first, 5, "all_reduce 5") + "torch: group 1 (tp): entered %d, waits in %s\n"
    same(paragraph(both % (9, "broadcast 9"), both % (8, "none")),
         "PyTorch: rank 1 never entered broadcast 9 of process group tp; rank 0 waits in it; "
         "PyTorch: ranks 0-1 wait in all_reduce 5; ranks 0-1: in a")


@test
def lines_that_are_none_say_nothing():
    for line in ("torch: group",
                 "torch: group  (x): entered 5, waits in all_reduce 5",
                 "torch: group 0 (): entered 5, waits in all_reduce 5",
                 "torch: group 0 (x): entered five, waits in all_reduce 5",
                 "torch: group 0 (x): entered 5, waits in ",
                 "torch: group 0 (x): entered 5, waits in all_reduce",
                 "torch: group 0 (x): entered 5, waits in all_reduce x",
                 " torch: group 0 (x): entered 5, waits in all_reduce 5"):
        same(paragraph("summary: in a\n%s\n" % line), "rank 0: in a")
    # More groups than are compared.
    many = "".join("torch: group %d (g%d): entered 5, waits in none\n" % (i, i) for i in range(1000))
    same(paragraph(*3 * ["summary: in a\n" + many]), "ranks 0-2: in a")


# ---- PyTorch's flight recorder ----

DEFAULT = ["0", "default_pg"]
SAID = "PyTorch's flight recorder: "


def entry(group, number, name, state, **more):
    return {"process_group": group, "collective_seq_id": number, "profiling_name": name, "state": state,
            "input_sizes": [[4, 2]], "input_dtypes": ["Float"], **more}


def dump(*entries, groups=()):
    return json.dumps({"pg_config": dict(groups), "entries": entries, "version": "2.10"}) + "\n"


def flight(text):
    return said("flight", text=text)


@test
def a_rank_waits_in_the_first_that_has_not_completed():
    same(flight(dump(entry(DEFAULT, 1, "gloo:all_reduce", "completed"),
                     entry(DEFAULT, 2, "gloo:broadcast", "started", time_created_ns=95500000000),
                     entry(DEFAULT, 3, "nccl:all_gather", "scheduled"))),
         SAID + "1 process groups, 3 collectives, the last ones first\n"
         "torch: group 0 (default_pg): entered 3, waits in broadcast 2\n"
         "  0 3 all_gather [[4, 2]] Float: scheduled\n"
         "  0 2 broadcast [[4, 2]] Float: started, entered 5.0 s ago\n"
         "  0 1 all_reduce [[4, 2]] Float: completed\n")
    # What is retired has completed.
    same(flight(dump(entry(DEFAULT, 7, "gloo:all_reduce", "scheduled", retired=True))),
         SAID + "1 process groups, 1 collectives, the last ones first\n"
         "torch: group 0 (default_pg): entered 7, waits in none\n"
         "  0 7 all_reduce [[4, 2]] Float: completed\n")


@test
def groups_have_a_line_each():
    # One without a name, as gloo has it, is none.
    for text, words in (
            (dump(entry(DEFAULT, 4, "gloo:all_reduce", "scheduled", retired=False),
                  groups={"": {"name": "", "desc": "", "ranks": "[]"}}),
             ("1 process groups, 1 collectives", "torch: group 0 (default_pg): entered 4, waits in all_reduce 4\n")),
            # Sends between two ranks are no collectives.
            (dump(entry(DEFAULT, 5, "nccl:send", "started", is_p2p=True)),
             ("1 process groups, 0 collectives", "torch: group 0 (default_pg): entered 0, waits in none\n")),
            # Two libraries.
            (dump(entry(DEFAULT, 5, "nccl:all_reduce", "started"))
             + dump(entry(["1", "cpu"], 2, "gloo:barrier", "started")),
             ("2 process groups, 2 collectives", "torch: group 0 (default_pg): entered 5, waits in all_reduce 5\n",
              "torch: group 1 (cpu): entered 2, waits in barrier 2\n"))):
        lines = flight(text)
        check(all(word in lines for word in words), lines)
    # Nothing was recorded of a group.
    same(flight(dump(groups={"3": {"name": "3", "desc": "tp", "ranks": "[0, 1]"}})),
         SAID + "2 process groups, 0 collectives, the last ones first\n"
         "torch: group 3 (tp): entered 0, waits in none\n"
         "torch: group 0 (default_pg): entered 0, waits in none\n")


@test
def words_of_a_rank_are_plain():
    same(flight(dump(entry(["a b)\x1b[2J", ""], 5, "x y\n:z (q)", "st\x07"))),
         SAID + "2 process groups, 1 collectives, the last ones first\n"
         "torch: group a_b___2J (-): entered 5, waits in z__q_ 5\n"
         "torch: group 0 (default_pg): entered 0, waits in none\n"
         "  a_b___2J 5 z__q_ [[4, 2]] Float: st_\n")


@test
def what_is_no_dump_is_said_to_be_none():
    for text in ("x", "[1]", "{", "5", '"text"', "\n", '{"a":1}x\n'):
        same(flight(text), "not there: %sits dump cannot be read\n" % SAID)
    for text in ("{}", '{"entries":5,"pg_config":[]}', '{"entries":[5,null,{}]}',
                 '{"entries":[{"collective_seq_id":-5}]}', '{"pg_config":{}}'):
        check(SAID + "1 process groups" in flight(text), text)


@test
def the_last_collectives_have_lines():
    lines = flight(json.dumps({"entries": [{"process_group": DEFAULT, "collective_seq_id": i + 1}
                                           for i in range(1000)]}))
    for line in ("torch: group 0 (default_pg): entered 1000, waits in - 1\n", "  0 1000 - ", "  0 951 - "):
        check(line in lines, lines)
    check("  0 950 - " not in lines, lines)


# ---- the table of coxswain top ----

S = 1000000000
RANK, STATE, MEMORY, DEATHS, CPU = 0, 1, 6, 7, 5  # columns
ALIVE, DEAD, ABSENT = 0, 1, 3  # liveness


def status(*ranks, ended=0, channels=True):
    """The file of a group's status. Ranks: what there is of each but its number and its incarnation."""
    text = "rank_count: %d\n" % len(ranks)
    if channels:
        text += "channels { ended: %d }\n" % ended
    for number, fields_of_rank in enumerate(ranks):
        first = "" if "incarnation" in fields_of_rank else "incarnation: 1 "
        text += "ranks { rank: %d %s%s }\n" % (number, first, fields_of_rank)
    data = subprocess.run(["protoc-c", "--encode=coxswain_control.StatusReply", "-Iproto", "proto/control.proto"],
                          input=text.encode(), cwd=harness.SOURCE_DIR, stdout=subprocess.PIPE, check=True).stdout
    path = tempfile.mkdtemp() + "/status"
    with open(path, "wb") as file:
        file.write(data)
    return path


def top(*samples, sort=RANK, reverse=False):
    """The lines of groups, the heading, and the lines of ranks; samples: group, status and time."""
    parts = (str(part) for sample in samples for part in sample)
    lines = said("top", str(sort), str(int(reverse)), *parts).splitlines()
    heading = next(number for number, line in enumerate(lines) if "DEATHS" in line)
    return lines[:heading], lines[heading], lines[heading + 1:]


IDLE = "channels { state: 0 }"


@test
def m18_rates_are_those_between_two_samples_of_one_process():
    phase = "execute { count: 7 p50_ns: 1500 p99_ns: 2500000 } group_ns: 1 resident_bytes: 3145728 "
    first = ("mine", status("channels { state: 0 sequence: 100 }", phase + "cpu_ns: 10 " + IDLE, IDLE), S)
    same(top(first)[2][:2], [
        "   0 idle          -       100       -      -      -     -     -        -      0  mine",
        "   1 idle          -         0       - 1.50us 2.50ms     -     -  3.00MiB      0  mine"])
    # Half a second later.
    groups, _, ranks = top(first, ("mine", status(
        "channels { state: 2 sequence: 150 age_ns: 12000 }",
        phase + "cpu_ns: %d group_wait_ns: %d %s" % (10 + S // 4, S // 8, IDLE),
        "incarnation: 2 deaths: 1 " + IDLE, ended=30), S + S // 2))
    same(ranks, [
        "   0 running  12.0us       150   100.0      -      -     -    0%        -      0  mine",
        "   1 idle          -         0     0.0 1.50us 2.50ms   25%   50%  3.00MiB      0  mine",
        "   2 idle          -         0       -      -      -     -     -        -      1  mine"])
    check("mine: 3 ranks, ?, degraded, up 0ns, 60.0/s" in groups[0], groups)


@test
def nodes_are_a_column_where_there_are_some():
    first = ("mine", status(IDLE, IDLE, IDLE), S)
    check("NODE" not in top(first)[1], "a column of nodes")
    second = ("mine", status('node: "a" ' + IDLE, 'node: "machine-b" ' + IDLE, IDLE), 2 * S)
    _, heading, ranks = top(first, second)
    check(" DEATHS  NODE       GROUP" in heading, heading)
    for line, node in zip(ranks, ("a        ", "machine-b", "-        ")):
        check("      0  %s  mine" % node in line, line)
    _, heading, ranks = top(first, second, ("mine", status('node: "a" ' + IDLE, IDLE, IDLE), 3 * S))
    check(" DEATHS  NODE  GROUP" in heading and "      0  a     mine" in ranks[0], heading)


@test
def m18_rows_are_sorted():
    made = status(*("channels { state: 0 age_ns: %d } resident_bytes: %d deaths: %d liveness: %d" % (
        1000 * (rank + 1), (rank + 1) % 3 + 1, rank == 1, DEAD if rank == 0 else ALIVE) for rank in range(3)))
    for sort, reverse, first, last in ((RANK, False, "b0", "a2"), (RANK, True, "a2", "b0"), (STATE, False, "b0", "a1"),
                                       (MEMORY, False, "b1", "a2"), (DEATHS, False, "b1", "a2"),
                                       (DEATHS, True, "a2", "b1"), (CPU, False, "b0", "a2")):
        ranks = top(("b", made, 5), ("a", made, 5), sort=sort, reverse=reverse)[2]
        same((len(ranks), [line[-1] + line[3] for line in (ranks[0], ranks[-1])]), (6, [first, last]))


@test
def m18_groups_go_and_come_and_tell_little():
    same(top()[0] + top()[2], [])
    gone = (("mine", status(IDLE, IDLE, IDLE), 5), ("mine", "the group\nis ä gone", "-"))
    groups, _, ranks = top(*gone)
    same((groups, ranks), (["mine: the group is    gone"], []))
    # Another one of that name, of another size, that says nothing of its channels.
    other = status("liveness: %d deaths: 4294967295 resident_bytes: 18446744073709551615" % ABSENT, channels=False)
    ranks = top(*gone, ("mine", other, 9), (399 * "n", other, 9), sort=STATE)[2]
    same(len(ranks), 2)
    check("starting" in ranks[0], ranks)


# ---- lines of the log ----


def logged(form, level, rank, text, priority=False):
    return said("log", form, str(int(priority)), str(level), str(rank), text)


TIME = "2025-11-25T14:58:27.123Z"


@test
def a_line_of_the_log_has_its_format():
    same(logged("plain", 4, -1, "a\nb\tc"), "coxswain: a\\nb\tc\n")
    same(logged("plain", 6, 2, "a"), "[rank 2] a\n")
    same(logged("plain", 3, -1, "a", priority=True), "<3>coxswain: a\n")
    same(logged("text", 4, -1, "a\nb"), TIME + " warning coxswain: a\\nb\n")
    same(logged("text", 6, 12, "a", priority=True), "<6>%s info rank 12: a\n" % TIME)
    same(logged("json", 5, -1, "a"),
         '{"time":"%s","level":"notice","source":"coxswain","message":"a"}\n' % TIME)
    same(logged("json", 6, 0, "a"),
         '{"time":"%s","level":"info","source":"worker","rank":0,"message":"a"}\n' % TIME)
    refused("INVALID", ("expected text or json",), "log", "xml", "0", "6", "0", "a")


@test
def no_line_of_the_log_is_forged_or_spoilt():
    # What a worker writes is bytes.
    for text, wanted in (
            ("tab\tcr\resc\x1b[31m", "tab\\tcr\\resc\\u001b[31m"),
            ("ä € \U0001f6a3", "ä € \U0001f6a3"),
            # Alone, too long, a surrogate, beyond Unicode, cut off.
            (b"\x80", "\ufffd"),
            (b"\xc0\xaf", 2 * "\ufffd"),
            (b"\xed\xa0\x80", 3 * "\ufffd"),
            (b"\xf4\x90\x80\x80", 4 * "\ufffd"),
            (b"a\xe2\x82", "a" + 2 * "\ufffd")):
        same(logged("text", 6, 1, text), "%s info rank 1: %s\n" % (TIME, wanted))
    same(logged("plain", 6, 1, "a\rcoxswain: rank 0 was killed\x1b[2J\x9b2J\u202e"),
         "[rank 1] a\\rcoxswain: rank 0 was killed\\u001b[2J\\u009b2J\\u202e\n")
    same(logged("plain", 6, 1, b"\xc3\xa4\t\xe2\x82\xac\x80"), "[rank 1] ä\t€\ufffd\n")
    same(logged("json", 6, 1, '"\\\x7f'),
         '{"time":"%s","level":"info","source":"worker","rank":1,"message":"\\"\\\\\\u007f"}\n' % TIME)


# ---- the options of a worker ----

ENVIRONMENT = {"COXSWAIN_PREFIX": "/4242_7", "COXSWAIN_RANK": "3", "COXSWAIN_WORLD_SIZE": "8"}


def options(*arguments, function="options", program_name=("worker",), **env):
    """The fields, and what is left of the arguments."""
    text = said(function, *program_name, *arguments, **env)
    found = fields(text)
    found["left"] = text.splitlines()[-1].split("|")[:-1] if "|" in text else []
    return found


def expect_options(found, **wanted):
    same({key: found.get(key) for key in wanted}, wanted)


@test
def the_environment_alone_is_enough():
    found = options("--verbose", COXSWAIN_DEVICE="-1", COXSWAIN_PARENT_PID="4242", COXSWAIN_INCARNATION="4294967295",
                    **ENVIRONMENT)
    expect_options(found, prefix="/4242_7", rank="3", rank_count="8", device="-1", parent_pid="4242",
                   incarnation="4294967295", left=["worker", "--verbose"])
    # Flags win over the environment, and the last flag over the first.
    expect_options(options("--local_rank=5", "--shm_name_prefix=/other", "--local_rank", "1", **ENVIRONMENT),
                   prefix="/other", rank="1", rank_count="8", left=["worker"])


@test
def b8_fds_are_sent_to_one_process():
    # Once they are taken, no other process is told of them.
    found = options("--verbose", COXSWAIN_FDS="7:28", **ENVIRONMENT)
    expect_options(found, fds="7 28", kept="")
    without = {key: value for key, value in ENVIRONMENT.items() if key != "COXSWAIN_RANK"}
    refused("INVALID", ("which rank",), "options", "worker", "--verbose", COXSWAIN_FDS="7:28", **without)


@test
def m14_the_legacy_command_line_alone_is_enough():
    found = options("--local_rank", "2", "--local_world_size", "4", "--npu_num_per_dp", "4", "--npu_device_id", "6",
                    "--parent_pid", "77", "--shm_name_prefix", "/77_1")
    expect_options(found, prefix="/77_1", rank="2", rank_count="4", device="6", parent_pid="77", incarnation="1",
                   left=["worker"])


@test
def the_flags_of_several_groups_on_a_node_give_the_rank_in_its_own():
    for rank in range(8):
        found = options("--local_rank", str(rank), "--local_world_size=8", "--npu_num_per_dp=2", "--shm_name_prefix=/g",
                        "--global_rank", "9", "--global_world_size=16")
        expect_options(found, rank=str(rank % 2), rank_count="2", left=["worker"])
    found = options("--local_rank=5", "--local_world_size=8", "--npu_num_per_dp=8", "--shm_name_prefix=/g")
    expect_options(found, rank="5", rank_count="8")


@test
def what_is_not_known_stays_in_order():
    found = options("first", "--local_rankx", "9", "--local_rank", "0", "-v", "--local_ran=1", "--npu_num_per_dp=8",
                    "x=--local_rank", "--global_rankx", "7", "", **ENVIRONMENT)
    expect_options(found, rank="0", left=["worker", "first", "--local_rankx", "9", "-v", "--local_ran=1",
                                          "x=--local_rank", "--global_rankx", "7", ""])
    # A program that is named like a flag, and none at all.
    expect_options(options(program_name=("--local_rank",), **ENVIRONMENT), rank="3", left=["--local_rank"])
    expect_options(options(program_name=(), **ENVIRONMENT), rank="3", left=[])


@test
def what_the_caller_set_stays():
    expect_options(options("--local_rank=0", function="options_kept", **ENVIRONMENT), incarnation="7", device="3",
                   on_orphan="1", token_count_max="5")


def options_refused(arguments, *words, **env):
    refused("INVALID", words, "options", "worker", *arguments, **env)


@test
def what_is_missing_is_named():
    options_refused(["x"], "not given, which group, which rank, how many ranks;", "coordinator")
    options_refused(["--local_rank=0", "--local_world_size=1"], "not given, which group;", "--shm_name_prefix")
    options_refused(["--shm_name_prefix=/g", "--local_world_size=1"], "not given, which rank;", "--local_rank")
    options_refused(["--shm_name_prefix=/g", "--local_rank=1"], "not given, how many ranks;", "--local_world_size")


@test
def a_flag_without_its_value_is_named():
    options_refused(["a", "--local_rank=1", "b", "--parent_pid"], "--parent_pid", "needs a value", **ENVIRONMENT)
    options_refused(["--npu_num_per_dp"], "--npu_num_per_dp", "needs a value", **ENVIRONMENT)
    options_refused(["--local_rank="], "--local_rank is ''", "0 to 127", **ENVIRONMENT)


@test
def numbers_out_of_range_are_named_with_their_range():
    for argument, *words in (
            ("--local_rank=-1", "--local_rank is '-1'", "0 to 127"),
            ("--local_rank=128", "'128'", "0 to 127"),
            ("--local_rank=1x", "'1x'", "0 to 127"),
            ("--local_rank=x", "'x'", "0 to 127"),
            ("--local_rank=0x1", "'0x1'", "0 to 127"),
            ("--local_rank=4294967296", "'4294967296'", "0 to 127"),
            ("--local_rank=99999999999999999999999", "'9999", "0 to 127"),
            ("--local_rank=1.5", "'1.5'", "0 to 127"),
            ("--local_world_size=0", "--local_world_size is '0'", "1 to 128"),
            ("--local_world_size=129", "'129'", "1 to 128"),
            ("--npu_device_id=2147483648", "--npu_device_id is", "2147483647"),
            ("--npu_device_id=-2147483649", "--npu_device_id is", "-2147483648"),
            ("--npu_num_per_dp=0", "--npu_num_per_dp is '0'", "1 to 128"),
            ("--npu_num_per_dp=129", "'129'", "1 to 128"),
            ("--parent_pid=0", "--parent_pid is '0'", "1 to"),
            ("--parent_pid=-5", "--parent_pid is '-5'", "1 to"),
            ("--shm_name_prefix=g", "--shm_name_prefix is 'g'", "slash"),
            ("--shm_name_prefix=", "--shm_name_prefix is ''", "slash"),
            ("--shm_name_prefix=/", "empty"),
            ("--shm_name_prefix=/a/b", "'/' at position 2"),
            ("--shm_name_prefix=/..", "dot"),
            ("--shm_name_prefix=/" + 129 * "n", "129 characters", "128")):
        options_refused(["kept", "--npu_device_id=1", "kept too", argument], *words, **ENVIRONMENT)
    for name, value, *words in (("COXSWAIN_INCARNATION", "0", "COXSWAIN_INCARNATION is '0'", "1 to 4294967295"),
                                ("COXSWAIN_INCARNATION", "4294967296", "COXSWAIN_INCARNATION", "1 to 4294967295"),
                                ("COXSWAIN_RANK", "", "COXSWAIN_RANK is ''", "0 to 127")):
        options_refused(["x"], *words, **{**ENVIRONMENT, name: value})
    # Names may be as long as a group's.
    same(options("--shm_name_prefix", "/" + 128 * "n", **ENVIRONMENT)["prefix"], "/" + 128 * "n")


if __name__ == "__main__":
    sys.exit(harness.main())
