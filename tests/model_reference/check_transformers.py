#!/usr/bin/python3
"""Compares the tokens of `coxswain generate` with those of transformers' own LlamaForCausalLM, over a table of configurations.

usage: check_transformers.py COXSWAIN_BINARY PYTHON

Each row of the table is a small random checkpoint with one peculiarity: a spelling of rotary positions, a key that changes the
arithmetic, numbers of heads, tensors that nobody uses. It says which of two is right: the tokens of LlamaForCausalLM, for every
number of ranks named; or exit status 2 before anything starts, and the key's or tensor's name on standard error. Exit status
0 with other tokens is right for no row.

PYTHON is that of an environment with python/requirements-torch.txt and requirements.txt, in which this script starts
itself again (tools/torch makes it). Exit status 77 (skip) where there is none, or where it has other versions.
"""

import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
import harness  # pylint: disable=wrong-import-position

REQUIREMENTS = [os.path.join(HERE, "..", "..", "python", "requirements-torch.txt"),
                os.path.join(HERE, "requirements.txt")]
NEW_TOKENS = 20
PROMPT_LENGTHS = (40, 9, 1)
# Rounding makes differences of 1e-5; greedy tokens are compared only where none was as near as this to another one.
MARGIN = 5e-4

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ABSENT = object()  # as a value: the key is left out

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LLAMA32 = {**LLAMA3, "factor": 32.0}
NEAR = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 1.5, "original_max_position_embeddings": 48}
FRACTIONS = {"factor": 2.5, "low_freq_factor": 0.25, "high_freq_factor": 8, "original_max_position_embeddings": 100}


class Row:
    """refused: words of the message; else tokens are expected, which differ from those of the same model without the
    peculiarity, or do not."""

    def __init__(self, name, config=None, ranks=(1, 2), refused=None, differs=None, tensors=None, dtype="float32",
                 wrong_ranks=()):
        self.name, self.config, self.ranks, self.refused = name, config or {}, ranks, refused
        self.differs, self.tensors, self.dtype, self.wrong_ranks = differs, tensors, dtype, wrong_ranks


def default(**more):
    return {"rope_type": "default", **more}


def add(suffix, like, of_layer=True):
    """For every tensor whose name ends with `like` another one beside it, of its rows."""

    def change(torch, weights):
        for name in [name for name in weights if name.endswith(like)]:
            weights[name.removesuffix(like) + suffix] = torch.randn(weights[name].shape[0])

    return change


def add_norms(torch, weights):
    for name in [name for name in weights if name.endswith("q_proj.weight")]:
        weights[name.replace("q_proj", "q_norm")] = 1 + torch.rand(8)
        weights[name.replace("q_proj", "k_norm")] = 1 + torch.rand(8)


def add_frequencies(torch, weights):
    for name in [name for name in weights if name.endswith("q_proj.weight")]:
        weights[name.replace("q_proj.weight", "rotary_emb.inv_freq")] = torch.rand(4)


def add_layer(torch, weights):
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        weights[name.replace(".1.", ".2.")] = weights[name].clone()


def drop_head(torch, weights):
    del weights["lm_head.weight"]


def equal_head(torch, weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def nothing(torch, weights):
    pass


def heads(count, kv_count, dim=8, **more):
    return {"num_attention_heads": count, "num_key_value_heads": kv_count, "hidden_size": count * dim, **more}


TABLE = [
    # Rotary positions of the default type, in all spellings.
    Row("no key of rotary positions", differs=False),
    Row("rope_theta", {"rope_theta": 50.0}, differs=True),
    Row("rope_theta, a whole number", {"rope_theta": 500000}, differs=True),
    Row("rope_parameters", {"rope_parameters": default(rope_theta=50.0)}, differs=True),
    Row("rope_parameters with type", {"rope_parameters": {"type": "default", "rope_theta": 50.0}}, differs=True),
    Row("rope_parameters with type, theta beside", {"rope_parameters": {"type": "default"}, "rope_theta": 50.0}, differs=True),
    Row("rope_parameters with rope_type, theta beside", {"rope_parameters": default(), "rope_theta": 50.0}, differs=True),
    Row("empty rope_parameters, theta beside", {"rope_parameters": {}, "rope_theta": 50.0}, differs=True),
    Row("rope_parameters null, theta beside", {"rope_parameters": None, "rope_theta": 50.0}, differs=True),
    Row("theta inside and beside", {"rope_parameters": {"rope_theta": 50.0}, "rope_theta": 7.0}, differs=True),
    Row("two types", {"rope_parameters": {"rope_type": "default", "type": "linear", "factor": None}, "rope_theta": 50.0},
        differs=True),
    Row("rope_scaling null", {"rope_scaling": None, "rope_theta": 50.0}, differs=True),
    Row("rope_scaling default", {"rope_scaling": {"type": "default"}, "rope_theta": 50.0}, differs=True),
    Row("rope_scaling with theta", {"rope_scaling": default(rope_theta=50.0), "rope_theta": 7.0}, differs=True),
    Row("empty rope_scaling", {"rope_scaling": {}, "rope_parameters": default(rope_theta=50.0), "rope_theta": 7.0},
        differs=True),
    Row("rope_scaling before rope_parameters",
        {"rope_scaling": {"type": "default"}, "rope_parameters": default(rope_theta=7.0)}, differs=False),
    Row("rope_theta null", {"rope_theta": None}, refused="rope_theta is null"),
    Row("rope_parameters with theta null", {"rope_parameters": default(rope_theta=None)}, refused="rope_theta is null"),
    Row("no type", {"rope_parameters": {"rope_type": None}}, refused="rope_type is null"),
    # Others.
    Row("linear", {"rope_scaling": {"type": "linear", "factor": 2.0}}, refused='rope_scaling.type is "linear"'),
    Row("linear, new", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        refused='rope_parameters.rope_type is "linear"'),
    Row("linear, spelled type", {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        refused='rope_parameters.type is "linear"'),
    Row("dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
        refused="dynamic"),
    Row("yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        refused="yarn"),
    Row("longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
                                         "original_max_position_embeddings": 16, "factor": 2.0}}, refused="longrope"),
    Row("proportional", {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        refused="partial_rotary_factor"),
    Row("mrope", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, refused="mrope"),
    Row("nested", {"rope_parameters": {"full_attention": default(rope_theta=50.0)}, "layer_types": ["full_attention"] * 2},
        refused="rope_parameters.full_attention"),
    Row("partial", {"partial_rotary_factor": 0.5}, refused="partial_rotary_factor is 0.5"),
    Row("partial inside", {"rope_parameters": default(partial_rotary_factor=0.5)}, refused="partial_rotary_factor is 0.5"),
    Row("not partial", {"partial_rotary_factor": 1.0}, differs=False),
    Row("a factor that the type has no use for", {"rope_parameters": default(factor=4.0)}, refused="rope_parameters.factor"),
    # Llama 3.1 and later.
    Row("llama3 as in 3.1", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500.0}, ranks=(1, 2, 4, 8),
        differs=True),
    Row("llama3 as in 3.2", {"rope_scaling": {"rope_type": "llama3", **LLAMA32}, "rope_theta": 500.0}, differs=True),
    Row("llama3, spelled type", {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 500.0}, differs=True),
    Row("llama3, new", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}, differs=True),
    Row("llama3, new, theta beside", {"rope_parameters": {"type": "llama3", **LLAMA3}, "rope_theta": 500.0}, differs=True),
    Row("llama3, a narrow band", {"rope_parameters": {"rope_type": "llama3", **NEAR}}, differs=True),
    Row("llama3, fractions", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 80, **FRACTIONS}}, differs=True),
    Row("llama3, no original positions", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                              "high_freq_factor": 4.0}}, differs=True),
    Row("llama3, original positions beside",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 12}, differs=True),
    Row("llama3, not whole", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, refused="low_freq_factor is missing"),
    Row("llama3 of a part", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "partial_rotary_factor": 0.5},
        refused="partial_rotary_factor"),
    # Attention to other positions.
    Row("sliding_window", {"sliding_window": 6}, refused="sliding_window is 6"),
    Row("sliding_window null", {"sliding_window": None, "use_sliding_window": False}, differs=False),
    Row("attention_chunk_size", {"attention_chunk_size": 6}, refused="attention_chunk_size is 6"),
    Row("layer_types", {"layer_types": ["full_attention"] * 2}, differs=False),
    Row("layer_types, one sliding", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        refused="sliding_window"),
    Row("is_causal", {"is_causal": False}, refused="is_causal is false"),
    Row("num_kv_shared_layers", {"num_kv_shared_layers": 1}, refused="num_kv_shared_layers is 1"),
    Row("per_layer_config", {"per_layer_config": {"1": {"intermediate_size": 48}}}, refused="per_layer_config"),
    # Keys of other architectures, and of training.
    Row("multipliers", {"embedding_multiplier": 12.0, "attention_multiplier": 0.01, "residual_multiplier": 0.2,
                        "logits_scaling": 8.0, "scale_emb": 12, "scale_depth": 1.4}, differs=False),
    Row("soft caps", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 3},
        differs=False),
    Row("qk_norm", {"qk_norm": True, "use_qk_norm": True}, differs=False),
    Row("of training", {"attention_dropout": 0.5, "pretraining_tp": 2, "initializer_range": 0.5, "use_cache": False,
                        "chunk_size_feed_forward": 3, "torch_dtype": "float32"}, differs=False),
    Row("attention_bias", {"attention_bias": True}, tensors=add("q_proj.bias", "q_proj.weight"), refused="attention_bias"),
    Row("mlp_bias", {"mlp_bias": True}, tensors=add("up_proj.bias", "up_proj.weight"), refused="mlp_bias"),
    Row("gelu", {"hidden_act": "gelu"}, refused='hidden_act is "gelu"'),
    Row("swish", {"hidden_act": "swish"}, differs=False),
    Row("rms_norm_eps", {"rms_norm_eps": 0.05}, differs=True),
    # transformers has no code for this method here, and says so.
    Row("quantization_config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, refused="quantization_config"),
    Row("transformers_weights", {"transformers_weights": "model.safetensors"}, refused="transformers_weights"),
    # Tensors.
    Row("norms of queries and keys", tensors=add_norms, refused="self_attn.k_norm.weight"),
    Row("biases that no key speaks of", tensors=add("q_proj.bias", "q_proj.weight"), refused="self_attn.q_proj.bias"),
    Row("a layer too many", tensors=add_layer, refused="model.layers.2."),
    Row("frequencies of rotary positions", tensors=add_frequencies, differs=False),
    Row("tied", {"tie_word_embeddings": True}, tensors=drop_head, differs=True),
    Row("tied, and the same again", {"tie_word_embeddings": True}, tensors=equal_head, differs=True),
    Row("tied, and another one", {"tie_word_embeddings": True}, tensors=nothing, refused="lm_head.weight"),
    Row("not tied, and none", tensors=drop_head, refused="lm_head.weight"),
    Row("bfloat16", dtype="bfloat16", differs=True),
    Row("float16", dtype="float16"),
    # Sizes.
    Row("one KV head", {"num_key_value_heads": 1}, ranks=(1, 8)),
    Row("KV heads for all", {"num_key_value_heads": ABSENT}, ranks=(1, 4)),
    Row("a head_dim of its own", {"head_dim": 12}),
    Row("sizes that 8 does not divide", {"intermediate_size": 101, "vocab_size": 83}, ranks=(1, 2, 8)),
    Row("few columns", {"intermediate_size": 5}, ranks=(1, 8)),
    Row("9 heads over 3", heads(9, 3), ranks=(1, 3), wrong_ranks=(2, 4, 8, 9)),
    Row("9 heads over 3, llama3, tied", heads(9, 3, rope_scaling={"rope_type": "llama3", **LLAMA3}, rope_theta=500.0,
                                              tie_word_embeddings=True, intermediate_size=100), ranks=(1, 3),
        tensors=drop_head),
    Row("15 heads over 5", heads(15, 5, 4), ranks=(1, 5), wrong_ranks=(2, 3, 4, 15)),
    Row("12 heads over 4", heads(12, 4), ranks=(1, 2, 4), wrong_ranks=(3, 8)),
    Row("10 heads over 10", heads(10, 10, 6, intermediate_size=99), ranks=(1, 2, 5, 10), wrong_ranks=(3, 4)),
    Row("7 heads over 1", heads(7, 1), ranks=(1,), wrong_ranks=(2, 7)),
    # Where a text ends.
    Row("no eos_token_id", {"eos_token_id": ABSENT, "vocab_size": 5}, differs=False),
    Row("eos_token_id", {"eos_token_id": 4, "vocab_size": 5}, differs=True),
    Row("several eos_token_id", {"eos_token_id": [3, 4], "vocab_size": 7}, differs=True),
]


def missing(python):
    """What is not there, in words; None: all is."""
    if not os.access(python, os.X_OK):
        return "there is no " + python
    wanted = [line.strip() for name in REQUIREMENTS for line in open(name) if "==" in line]
    script = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]: print(n + '==' + m.version(n).split('+')[0])"
    found = subprocess.run([python, "-c", script, *[word.split("==")[0] for word in wanted]], capture_output=True,
                           text=True, check=False)
    if found.returncode or found.stdout.split() != wanted:
        return "%s does not have %s" % (python, " ".join(wanted))
    return None


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    binary, python = sys.argv[1:]
    if os.environ.get("COX_JUDGE") != "1":
        reason = missing(python)
        if reason:
            harness.skip("%s. LlamaForCausalLM is not there to compare with; "
                         "`sh tools/torch` installs it from PyPI, with access to it" % reason)
        os.execve(python, [python, __file__, binary, python],
                  {**os.environ, "COX_JUDGE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
                   "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"})
    judge = Judge(binary)
    bad = [row.name for row in TABLE if not judge.check(row)]
    print("%d configurations, %d runs of the command, %d wrong" % (len(TABLE), judge.runs, len(bad)))
    if bad:
        sys.exit("FAILED: " + "; ".join(bad))


class Judge:
    def __init__(self, binary):
        import safetensors.torch
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.transformers, self.save = torch, transformers, safetensors.torch.save_file
        self.binary, self.runs, self.plain = binary, 0, {}

    def weights_of(self, config, seed):
        """Of such a model without any peculiarity. The scale makes attention sharp: positions matter."""
        torch = self.torch
        torch.manual_seed(seed)
        hidden, columns, count = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        dim = config.get("head_dim") or hidden // count
        width, kv = count * dim, config.get("num_key_value_heads", count) * dim
        shapes = {"model.embed_tokens": (config["vocab_size"], hidden)}
        for layer in range(config["num_hidden_layers"]):
            for name, shape in {"input_layernorm": (hidden,), "self_attn.q_proj": (width, hidden),
                                "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
                                "self_attn.o_proj": (hidden, width), "post_attention_layernorm": (hidden,),
                                "mlp.gate_proj": (columns, hidden), "mlp.up_proj": (columns, hidden),
                                "mlp.down_proj": (hidden, columns)}.items():
                shapes["model.layers.%d.%s" % (layer, name)] = shape
        shapes.update({"model.norm": (hidden,), "lm_head": (config["vocab_size"], hidden)})
        weights = {}
        for name, shape in shapes.items():
            values = torch.randn(shape)
            if len(shape) == 1:
                values = 1 + values / 10
            elif name.endswith(("q_proj", "k_proj")):
                values *= 2 / shape[1] ** 0.5
            elif name != "model.embed_tokens":
                values *= 1.5 / shape[1] ** 0.5
            weights[name + ".weight"] = values
        return weights

    def write(self, folder, config, weights, dtype):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(config, file)
        values = {name: value.to(getattr(self.torch, dtype)).contiguous() for name, value in weights.items()}
        self.save(values, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})

    def prompts_of(self, config, seed):
        generator = self.torch.Generator().manual_seed(seed + 1000)
        return [self.torch.randint(3, config["vocab_size"], (length,), generator=generator).tolist()
                for length in PROMPT_LENGTHS]

    def their_tokens(self, folder, prompts):
        """Lines of tokens, prompt and new ones, and how near another token ever was. Raises what they raise."""
        model = self.transformers.LlamaForCausalLM.from_pretrained(folder, dtype=self.torch.float32)
        model.eval()
        lines, nearest = [], float("inf")
        for prompt in prompts:
            # Without a configuration of its own for texts: eos_token_id is that of config.json.
            result = model.generate(self.torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS,
                                    return_dict_in_generate=True, output_logits=True, pad_token_id=0)
            lines.append(result.sequences[0].tolist())
            for logits in result.logits:
                top = logits[0].topk(2).values
                nearest = min(nearest, float(top[0] - top[1]))
        return lines, nearest

    def their_plain(self, config, seed, folder, prompts):
        """The tokens of the same sizes and seed without any peculiarity."""
        sizes = {key: config[key] for key in BASE if key in config and isinstance(BASE[key], int)}
        key = (json.dumps(sizes, sort_keys=True), seed)
        if key not in self.plain:
            plain = {**BASE, **sizes, "tie_word_embeddings": False}
            self.write(folder, plain, self.weights_of(plain, seed), "float32")
            self.plain[key] = self.their_tokens(folder, prompts)[0]
        return self.plain[key]

    def our_run(self, folder, prompts, ranks):
        self.runs += 1
        text = "".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("COXSWAIN_", "COX_"))}
        return subprocess.run(
            [self.binary, "generate", "--model", folder, "-n", str(ranks), "--tokens", "--quiet", "--max-tokens",
             str(NEW_TOKENS), "-"], input=text, capture_output=True, text=True, check=False,
            timeout=120, env=environment)

    def compare(self, row, ranks, result, expected):
        """What is wrong, in words; None: nothing."""
        if expected is None:
            words = row.refused if ranks in row.ranks else "use 1"
            if result.returncode != 2 or words not in result.stderr or result.stdout:
                return "on %d ranks expected exit status 2 and '%s', got %d:\n%s%s" % (
                    ranks, words, result.returncode, result.stdout, result.stderr)
            return None
        lines = [list(map(int, line.split())) for line in result.stdout.splitlines()] if result.returncode == 0 else []
        if lines != expected:
            return "on %d ranks expected the tokens %s, got exit status %d and %s\n%s" % (
                ranks, expected, result.returncode, lines, result.stderr)
        return None

    def check(self, row):
        config = {key: value for key, value in {**BASE, **row.config}.items() if value is not ABSENT}
        with tempfile.TemporaryDirectory(prefix="coxswain_model_") as top:
            folder = os.path.join(top, "model")
            for seed in range(50):
                weights, prompts = self.weights_of(config, seed), self.prompts_of(config, seed)
                if row.tensors:
                    row.tensors(self.torch, weights)
                elif config["tie_word_embeddings"]:
                    drop_head(self.torch, weights)
                self.write(folder, config, weights, row.dtype)
                theirs, nearest = None, float("inf")
                try:
                    theirs, nearest = self.their_tokens(folder, prompts)
                except Exception as error:  # noqa: BLE001: a refusal of any kind is reported as it is
                    reason = "%s: %s" % (type(error).__name__, str(error).splitlines()[0][:60] if str(error) else "")
                if row.refused or theirs is None or nearest >= MARGIN:
                    break
            else:
                print("%s: no seed with tokens that are far enough from others" % row.name)
                return False
            problems = []
            if row.refused is None and theirs is None:
                problems.append("LlamaForCausalLM does not take it: " + reason)
            told = "not taken (%s)" % reason if theirs is None else "tokens"
            if theirs is not None:
                plain = self.their_plain(config, seed, os.path.join(top, "plain"), prompts)
                told = "the plain tokens" if theirs == plain else "other tokens"
                if row.differs is not None and row.differs != (theirs != plain):
                    problems.append("LlamaForCausalLM gives " + told)
            for ranks in row.ranks[:1] if row.refused else row.ranks:
                result = self.our_run(folder, prompts, ranks)
                problems.append(self.compare(row, ranks, result, None if row.refused else theirs))
            for ranks in row.wrong_ranks:
                problems.append(self.compare(row, ranks, self.our_run(folder, prompts, ranks), None))
        problems = [problem for problem in problems if problem]
        ours = "refused" if row.refused else "equal on %s ranks" % ", ".join(map(str, row.ranks))
        print("%s: LlamaForCausalLM: %s; here: %s%s" % (row.name, told, ours, " - WRONG" if problems else ""), flush=True)
        for problem in problems:
            print("    " + problem)
        return not problems


harness.script(main)
