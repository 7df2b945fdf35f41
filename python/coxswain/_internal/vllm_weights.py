"""Weights that the ranks of coxswain.vllm.Executor share with later processes of their shard.

A loader of vLLM, registered as the load format `coxswain`, around the loader of another format. The
first process of a shard loads as ever, and puts its parameters and buffers into `WeightStore` as
they are after vLLM's post-processing. A later one makes the model without reading a file, and its
parameters become what it maps. Buffers are copied, since vLLM writes some of them. What a layer
keeps beside its parameters, vLLM makes anew from these, as it does for its own weight cache
(`weights_already_processed`).

On a CPU vLLM packs the weight of a linear layer into memory of oneDNN's own, which no process can
share. Where weights are shared they stay tensors, and torch multiplies them.

Weights are shared in the memory of the device that the rank computes on. On a GPU, vLLM is told how
many bytes of it are held already: they belong to its budget, and are not free.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import vllm_interface as interface
from .errors import Error
from .weights import Weights, WeightStore

#: Of the option `weights`: seconds for which they stay when no process uses them; None: until they
#: are dropped.
KEEP = {"shared": 600.0, "kept": None}
KINDS = ("private", *KEEP)
_FORMAT = "coxswain"


def obstacles(config: Any) -> list[str]:
    """Why the weights of an engine cannot be shared."""
    found = []
    if config.device_config.device_type not in ("cpu", "cuda"):
        found.append(f"the device {config.device_config.device_type}, whose memory is not shared")
    elif config.device_config.device_type == "cuda" and not interface.optional("external_weights"):
        found.append(
            f"vLLM {interface.version()}, for which weights on a device are no free memory"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        found.append("sleep mode, which owns the weights' memory")
    if getattr(config.parallel_config, "enable_eplb", False):
        found.append("load balancing of experts, which moves weights")
    offload = getattr(config, "offload_config", None)
    if offload and (offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size):
        found.append("weights that are offloaded to the host's memory")
    if interface.optional("already_processed") is None:
        found.append(f"vLLM {interface.version()}, which has no weights_already_processed")
    if interface.optional("register_loader") is None:
        found.append(f"vLLM {interface.version()}, which registers no loaders")
    return found


class Shared:
    """What a rank shares: of its model, and of a drafter. One for each process."""

    def __init__(self, kind: str, logger: Any) -> None:
        self.keep = KEEP[kind]
        self.logger = logger
        self.weights: list[Weights] = []
        self.written = False

    @contextlib.contextmanager
    def loading(self, config: Any) -> Iterator[None]:
        """vLLM makes the rank's device ready, and loads the models of this configuration, through
        this object. Afterwards it has its own loader again, with which it reloads weights."""
        shared, given = self, config.load_config
        if config.device_config.device_type == "cpu":
            _leave_unpacked()
        inner = "auto" if given.load_format == _FORMAT else given.load_format
        base = interface.optional("base_loader")

        class Loader(base):  # type: ignore[misc,valid-type]
            """Around the loader of the format that the engine was given."""

            def __init__(self, load_config: Any) -> None:
                super().__init__(load_config)
                self.inner = interface.optional("get_loader")(
                    dataclasses.replace(load_config, load_format=inner)
                )

            def get_external_weight_memory(self, vllm_config: Any) -> int:
                return shared.held(inner, vllm_config)

            def download_model(self, model_config: Any) -> None:
                self.inner.download_model(model_config)

            def load_weights(self, model: nn.Module, model_config: Any) -> None:
                self.inner.load_weights(model, model_config)

            def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
                return shared.load(
                    inner,
                    {"vllm_config": vllm_config, "model_config": model_config, "prefix": prefix},
                    self.inner,
                )

        interface.optional("register_loader")(_FORMAT)(Loader)
        # In place: vLLM's model runner has the same object.
        given.load_format = _FORMAT
        try:
            yield
        finally:
            given.load_format = inner

    def store(self, config: Any) -> WeightStore:
        """For the device of this rank, which is the current one."""
        kind = config.device_config.device_type
        if kind != "cpu":
            kind = f"{kind}:{torch.accelerator.current_device_index()}"
        return WeightStore(self.keep, kind)

    def held(self, load_format: str, config: Any) -> int:
        """How many bytes of the rank's model are on its device already."""
        try:
            key = _key(load_format, config, config.model_config, "")
            return self.store(config).held(key)
        except Error as error:
            self.logger.warning("Weights are not shared: %s", error)
            return 0

    def load(self, load_format: str, arguments: dict[str, Any], loader: Any) -> Any:
        """The model of a rank, by its files or by what another process has put. arguments: of
        vLLM's load_model."""
        before = time.monotonic()

        def load() -> Any:
            return loader.load_model(**arguments)

        try:
            key = _key(load_format, **arguments)
            store = self.store(arguments["vllm_config"])
            weights = store.get(key)
        except Error as error:
            self.logger.warning("Weights are not shared: %s", error)
            return load()
        if weights is not None:
            try:
                model = _map(weights, **arguments)
            except Exception as error:  # pylint: disable=broad-exception-caught
                self.logger.warning("Shared weights do not fit, and are loaded: %r", error)
                weights.close()
                return load()
            self._tell(weights, model, "mapped", before)
            return model
        try:
            model = load()
            self._put(store, key, model, before)
        finally:
            store.give_up(key)
        return model

    def _put(self, store: WeightStore, key: str, model: nn.Module, before: float) -> None:
        try:
            weights = _put(store, key, model)
        except Error as error:
            self.logger.warning("Weights are not shared: %s", error)
        else:
            self._tell(weights, model, "loaded and shared", before)

    def _tell(self, weights: Weights, model: nn.Module, what: str, before: float) -> None:
        self.weights.append(weights)
        self.logger.info(
            "Weights %s in %.2f s: %.1f MiB, %d tensors, of which %d are copies of this "
            "rank's own, since vLLM may write them (coxswain weights).",
            what,
            time.monotonic() - before,
            weights.bytes / 2**20,
            len(weights),
            len(dict(model.named_buffers(remove_duplicate=False))),
        )

    def unshare(self) -> None:
        """Before something writes weights: that becomes this process's own. Idempotent."""
        if self.weights and not self.written:
            self.logger.info("The weights of this rank become its own where they are written.")
        self.written = True
        for weights in self.weights:
            weights.unshare()


def _key(load_format: str, vllm_config: Any, model_config: Any, prefix: str) -> str:
    parallel = vllm_config.parallel_config
    return WeightStore.key(
        model_config.model,
        revision=model_config.revision or getattr(model_config.hf_config, "_commit_hash", None),
        shard=parallel.rank,
        shards=parallel.world_size,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=model_config.quantization,
        more={
            "vllm": interface.version(),
            "torch": torch.__version__,
            "model": model_config.compute_hash(),
            "config": str(model_config.hf_config),
            "parts": [
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                bool(parallel.enable_expert_parallel) and parallel.data_parallel_rank,
            ],
            "format": load_format,
            "prefix": prefix,
        },
    )


def _leave_unpacked() -> None:
    """vLLM leaves the weights of this process's linear layers as they are, also when it reloads
    them."""
    from vllm import _custom_ops as ops

    ops._supports_onednn = False


def _put(store: WeightStore, key: str, model: nn.Module) -> Weights:
    """Moves the parameters of a model into memory that its shard shares."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    packed = [name for name, parameter in parameters.items() if not parameter.numel()]
    if packed:
        raise Error(f"vLLM has packed {packed[0]} and {len(packed) - 1} others")
    tensors = {name: tensor.detach() for name, tensor in (parameters | buffers).items()}

    def free(name: str) -> None:
        """The model's own memory, one tensor at a time: there is never a second copy of all."""
        del tensors[name]
        if name in parameters:
            parameters[name].data = torch.empty(0, dtype=parameters[name].dtype)

    weights = store.put(key, tensors, written=free)
    for name, parameter in parameters.items():
        parameter.data = weights[name]
    # What the parameters were is free for others, too, and not kept for later ones of this process.
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    with contextlib.suppress(AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    return weights


def _map(weights: Weights, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
    """A model whose parameters are these weights."""
    device = torch.device(vllm_config.device_config.device)
    with interface.optional("default_dtype")(model_config.dtype):
        # On the host, memory that nothing is read into costs nothing. What a model makes there
        # beside parameters and buffers is moved to the device below.
        with torch.device("cpu"):
            model = interface.optional("initialize_model")(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, tensor in weights.items():
            module, _, leaf = name.rpartition(".")
            if name in parameters:
                parameters[name].data = tensor
            elif name in buffers:
                modules[module]._buffers[leaf] = tensor.clone()
            else:  # vLLM's post-processing has made it
                modules[module].register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        for module in modules.values() if device.type != "cpu" else ():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    setattr(module, name, value.to(device))
        missing = sorted(set(parameters) - set(weights))
        if missing:
            raise Error(f"{', '.join(missing[:3])} and so on are not among them")
        with interface.optional("already_processed")():
            interface.optional("process_weights")(model, model_config, device)
    return model.eval()
