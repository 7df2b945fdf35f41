"""The files of a Llama checkpoint: config.json, and *.safetensors in F32, F16 or BF16."""

# torch may be missing, and declares no types for some of its functions.
# mypy: disable-error-code="import-not-found,no-untyped-call,no-any-return"
from __future__ import annotations

import hashlib
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import safetensors
import torch

from ._internal.errors import Invalid, NotFound

# The values of keys of config.json with which LlamaForCausalLM of transformers computes what
# coxswain.torch_worker computes. The last one is that of a key that is absent.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "is_causal": (True,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "is_encoder_decoder": (False, None),
    "quantization_config": (False, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "attention_chunk_size": (None,),
    "num_kv_shared_layers": (None,),
    "per_layer_config": (None,),
    "transformers_weights": (None,),
    "configuration_files": (None,),
}
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_LLAMA3 = _ROPE | {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


class _Config:
    """config.json, with its path for errors."""

    def __init__(self, path: pathlib.Path) -> None:
        if not path.exists():
            raise NotFound(f"{path} does not exist; a model is a folder of Hugging Face")
        self.path = path
        self.keys: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self.rope: dict[str, Any] = (
            self.keys.get("rope_scaling") or self.keys.get("rope_parameters") or {}
        )

    def expect(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        """Raises unless the value is one of these."""
        if value not in allowed:
            raise Invalid(
                f"{self.path}: {key} is {json.dumps(value)}; this worker computes only "
                f"models where it is {' or '.join(map(json.dumps, allowed))}"
            )

    def number(self, key: str, value: Any) -> Any:
        """The value, which is a number above 0."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise Invalid(f"{self.path}: {key} is {json.dumps(value)}, expected a number above 0")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; a key that is absent or null is the default."""
        value = self.keys.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float):
            raise Invalid(f"{self.path}: {key} is {value}, expected a whole number")
        return int(self.number(key, value))

    def frequencies(self, head_dim: int, positions: int) -> torch.Tensor:
        """Of the rotary positions: [head_dim / 2], float32."""
        rope = self.rope
        kind = rope.get("rope_type", rope.get("type", "default"))
        self.expect("rope_type", kind, ("default", "llama3"))
        for key in rope.keys() - (_ROPE_LLAMA3 if kind == "llama3" else _ROPE):
            self.expect(key, rope[key], (None,))
        self.expect("partial_rotary_factor", rope.get("partial_rotary_factor"), (1, None))
        theta = self.keys.get("rope_theta", 10000.0)
        theta = self.number("rope_theta", rope.get("rope_theta", theta))
        found = (1.0 / theta ** (torch.arange(0, head_dim, 2).double() / head_dim)).float()
        if kind == "default":
            return found
        key = "original_max_position_embeddings"
        original = self.number(key, self.keys.get(key, rope.get(key, positions)))
        factor, low, high = (
            self.number(key, rope.get(key))
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        waves = 2 * torch.pi * (1.0 / found)
        smooth = (original * (1.0 / waves) - low) / (high - low)
        between = (1 - smooth) * found / factor + smooth * found
        return torch.where(
            waves > original / low,
            found / factor,
            torch.where(waves < original / high, found, between),
        )


def read_config(folder: pathlib.Path) -> SimpleNamespace:
    """The sizes of the model in a folder. Raises Invalid, with the key, for what torch_worker does
    not compute."""
    config = _Config(folder / "config.json")
    config.expect("model_type", config.keys.get("model_type"), ("llama",))
    for key, allowed in _SUPPORTED.items():
        config.expect(key, config.keys.get(key, allowed[-1]), allowed)
    for layer_type in config.keys.get("layer_types") or ():
        config.expect("layer_types", layer_type, ("full_attention",))
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    positions = config.size("max_position_embeddings", 2048)
    head_dim = config.size("head_dim", hidden // heads)
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise Invalid(
            f"{config.path}: {kv_heads} KV heads, {heads} heads of {head_dim}; expected "
            "KV heads that divide the heads, and heads of an even size"
        )
    return SimpleNamespace(
        hidden=hidden,
        feed_forward=config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=config.size("num_hidden_layers"),
        vocabulary=config.size("vocab_size"),
        positions=positions,
        frequencies=config.frequencies(head_dim, positions),
        eps=config.number("rms_norm_eps", config.keys.get("rms_norm_eps") or 1e-6),
        tied=config.keys.get("tie_word_embeddings") is True,
    )


class Checkpoint:
    """The tensors of a folder, of which a rank reads only its own part."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        files, index = ["model.safetensors"], folder / "model.safetensors.index.json"
        if not (folder / files[0]).exists():
            if not index.exists():
                raise NotFound(f"{folder} contains neither {files[0]} nor {index.name}")
            found = json.loads(index.read_text(encoding="utf-8"))
            files = sorted(set(found["weight_map"].values()))
        self.tensors: dict[str, Any] = {}
        for file in files:
            opened: Any = safetensors.safe_open(folder / file, framework="pt")
            names = opened.keys()
            self.tensors.update((name, opened.get_slice(name)) for name in names)
        self._unread = {name for name in self.tensors if not name.endswith("rotary_emb.inv_freq")}

    def read(
        self, name: str, *shape: int, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """These rows and columns of a tensor that has this shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise Invalid(f"{self.folder}: there is no tensor {name}")
        dtype, found = tensor.get_dtype(), tensor.get_shape()
        if found != list(shape) or dtype not in ("F32", "F16", "BF16"):
            raise Invalid(
                f"{self.folder}: {name} is {dtype} {found}, expected F32, F16 or BF16 {list(shape)}"
            )
        self._unread.discard(name)
        part: torch.Tensor = tensor[rows, columns] if len(shape) == 2 else tensor[rows]
        return part

    def digest(self) -> int:
        """64 bits that differ for another model: of config.json, and of each tensor its name, type,
        shape and the beginning of its first row."""
        found = hashlib.blake2b((self.folder / "config.json").read_bytes(), digest_size=8)
        for name, tensor in sorted(self.tensors.items()):
            row = tensor[:1, :64] if len(tensor.get_shape()) == 2 else tensor[:64]
            raw = bytes(row.contiguous().view(torch.uint8).flatten().tolist())
            found.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()}".encode() + raw)
        return int.from_bytes(found.digest(), "little")

    def check_all_read(self) -> None:
        """Raises Invalid for a tensor that was not read: it was trained, and results need it."""
        if self._unread:
            raise Invalid(f"{self.folder}: this worker does not compute with {min(self._unread)}")
