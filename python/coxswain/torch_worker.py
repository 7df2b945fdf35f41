"""A rank that computes a Llama checkpoint with PyTorch, divided among the ranks of its group::

    coxswain generate -n 2 --worker "python3 -m coxswain.torch_worker" "27+58="
    coxswain run -n 2 --worker "python3 -m coxswain.torch_worker" --model DIR

It is short so that you can copy it, and put your own model in the place of `Model`. A `Batch` says
what to compute, `RankGroup` gathers the parts of all ranks, and the coordinator replaces a rank
that dies. Each rank loads its own part of DIR, a folder of Hugging Face (torch_checkpoint.py), on
--device: a GPU if there is one.
"""

# torch may be missing, and declares no types for some of its functions.
# mypy: disable-error-code="import-not-found,no-untyped-call,no-any-return"
from __future__ import annotations

import argparse
import math
import pathlib
import sys
from types import SimpleNamespace
from typing import Any
from collections.abc import Callable

try:
    import safetensors as _  # noqa: F401
    import torch
    import torch.nn.functional as F
except ImportError as missing:
    sys.exit(f"coxswain.torch_worker: {missing}: {sys.executable} needs torch and safetensors")

import coxswain
from coxswain.torch_checkpoint import Checkpoint, read_config
from coxswain.torch_sampling import sample

VALUE_SIZE = 4 << 20  # bytes of a gather; longer tensors go in pieces
# Of --weights: seconds that they stay without a user; None: until they are dropped.
KEEP = {"shared": 600.0, "kept": None}


class Model:
    """A rank's part: some heads, some columns of the feed-forward, the logits of some tokens."""

    def __init__(
        self,
        folder: pathlib.Path,
        rank: int,
        rank_count: int,
        device: torch.device,
        dtype: torch.dtype,
        shared: coxswain.Weights | None = None,
    ) -> None:
        """shared: what another process has made of the same files."""
        self.config = config = read_config(folder)
        self.rank, self.rank_count, self.device, self.dtype = rank, rank_count, device, dtype
        if rank_count > config.heads:
            raise coxswain.Invalid(
                f"{rank_count} ranks cannot divide {config.heads} attention "
                f"heads: use {config.heads} ranks at most"
            )
        hidden, width, dim = config.hidden, config.feed_forward, config.head_dim

        def own(size: int) -> slice:
            return slice(size * rank // rank_count, size * (rank + 1) // rank_count)

        heads, columns, group = own(config.heads), own(width), config.heads // config.kv_heads
        # A KV head that serves heads of two ranks is on both.
        first, last = heads.start // group, (heads.stop - 1) // group
        self.kv_head_first, self.kv_heads = first, last - first + 1
        self.kv_head_of = torch.arange(heads.start, heads.stop, device=device) // group - first
        q, kv = slice(heads.start * dim, heads.stop * dim), slice(first * dim, (last + 1) * dim)
        q_size, kv_size = config.heads * dim, config.kv_heads * dim
        checkpoint = Checkpoint(folder)
        #: for other processes: what was read, by name
        self.tensors: dict[str, torch.Tensor] = {}

        def read(name: str, *shape: int, **part: slice) -> torch.Tensor:
            if shared is not None:
                return shared[name]
            found = checkpoint.read(name + ".weight", *shape, **part).to(device, dtype)
            self.tensors[name] = found
            return found

        self.layers = [
            SimpleNamespace(
                norm=read(at + "input_layernorm", hidden),
                query=read(at + "self_attn.q_proj", q_size, hidden, rows=q),
                key=read(at + "self_attn.k_proj", kv_size, hidden, rows=kv),
                value=read(at + "self_attn.v_proj", kv_size, hidden, rows=kv),
                output=read(at + "self_attn.o_proj", hidden, q_size, columns=q),
                feed_forward_norm=read(at + "post_attention_layernorm", hidden),
                gate=read(at + "mlp.gate_proj", width, hidden, rows=columns),
                up=read(at + "mlp.up_proj", width, hidden, rows=columns),
                down=read(at + "mlp.down_proj", hidden, width, columns=columns),
            )
            for at in (f"model.layers.{i}." for i in range(config.layers))
        ]
        self.norm = read("model.norm", hidden)
        self.embedding = read("model.embed_tokens", config.vocabulary, hidden)
        if shared is None:
            self.tensors["head"] = self.read_head(checkpoint, read)
            self.tensors.pop("lm_head", None)
            checkpoint.check_all_read()
        self.head = (shared or self.tensors)["head"]
        self.digest = checkpoint.digest()
        self.frequencies = config.frequencies.to(device)

    def read_head(self, checkpoint: Checkpoint, read: Callable[..., torch.Tensor]) -> torch.Tensor:
        """All ranks give equally many logits; those of the last rank are padded."""
        config = self.config
        count = -(-config.vocabulary // self.rank_count)
        ends = (self.rank, self.rank + 1)
        tokens = slice(*(min(end * count, config.vocabulary) for end in ends))
        head = self.embedding[tokens]
        if not config.tied or "lm_head.weight" in checkpoint.tensors:
            head = read("lm_head", config.vocabulary, config.hidden, rows=tokens)
        if config.tied and not head.equal(self.embedding[tokens]):
            raise coxswain.Invalid(
                f"{checkpoint.folder}: tie_word_embeddings is true, but lm_head.weight is not the "
                "embedding"
            )
        return F.pad(head, (0, 0, 0, count - len(head)))

    def layout(self, block_size: int) -> coxswain.KvLayout:
        """Of a block of the KV cache: [layer, 2, offset, kv_head, head_dim]."""
        dim, size = self.config.head_dim, self.dtype.itemsize
        block_bytes = self.config.layers * 2 * block_size * self.kv_heads * dim * size
        return coxswain.KvLayout(
            layer_count=self.config.layers,
            kv_head_first=self.kv_head_first,
            kv_head_count=self.kv_heads,
            head_dim=dim,
            block_size=block_size,
            element_bytes=size,
            model_digest=self.digest,
            block_bytes=-(-block_bytes // 64) * 64,
        )

    def new_cache(
        self, block_count: int, block_size: int, memory: memoryview | None = None
    ) -> torch.Tensor:
        """Keys and values: [block, layer, 2, offset, kv_head, head_dim]."""
        shape = (self.config.layers, 2, block_size, self.kv_heads, self.config.head_dim)
        if memory is None:
            return torch.zeros(block_count, *shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype).view(block_count, -1)
        return flat[:, : math.prod(shape)].unflatten(1, shape)

    def forward(self, step: Step, ranks: coxswain.RankGroup, cache: torch.Tensor) -> torch.Tensor:
        """The logits of the rows that emit, float32 on the CPU: the same bits on every rank."""
        angles = (step.positions.float()[:, None] * self.frequencies)[:, None]
        cos, sin, eps = angles.cos(), angles.sin(), self.config.eps

        def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return (x @ weight.T).unflatten(-1, (-1, self.config.head_dim))

        def rotate(x: torch.Tensor) -> torch.Tensor:
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(self.dtype)

        x = self.embedding[step.tokens]
        for i, layer in enumerate(self.layers):
            keys, values = cache[:, i].unbind(1)
            if step.batch.cancelled:
                raise coxswain.Aborted("the step was cancelled")
            y = F.rms_norm(x, x.shape[-1:], layer.norm, eps)
            query = rotate(heads(y, layer.query))
            keys[step.blocks, step.offsets] = rotate(heads(y, layer.key))
            values[step.blocks, step.offsets] = heads(y, layer.value)
            attended = torch.empty_like(query)
            for tokens, blocks, offsets, mask in step.groups:
                attended[tokens] = F.scaled_dot_product_attention(
                    query[tokens].transpose(1, 2),
                    keys[blocks, offsets][:, :, self.kv_head_of].transpose(1, 2),
                    values[blocks, offsets][:, :, self.kv_head_of].transpose(1, 2),
                    mask,
                ).transpose(1, 2)
            x = x + self.add_up(attended.flatten(1) @ layer.output.T, ranks)
            y = F.rms_norm(x, x.shape[-1:], layer.feed_forward_norm, eps)
            x = x + self.add_up((F.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T, ranks)
        last = F.rms_norm(x[step.emitting], x.shape[-1:], self.norm, eps)
        logits = self.gather(last @ self.head.T, ranks).transpose(0, 1).flatten(1)
        return logits[:, : self.config.vocabulary].cpu()

    def add_up(self, part: torch.Tensor, ranks: coxswain.RankGroup) -> torch.Tensor:
        """The sum of the ranks' parts, in order of rank: the same bits on every rank."""
        first, *others = self.gather(part, ranks)
        return sum(others, first).to(self.dtype)

    def gather(self, part: torch.Tensor, ranks: coxswain.RankGroup) -> torch.Tensor:
        """The parts of all ranks as float32: [rank, ...]."""
        if self.rank_count == 1 or not part.numel():
            return part.float().expand(self.rank_count, *part.shape)
        pieces = []
        for piece in part.float().cpu().flatten().split(VALUE_SIZE // 4):
            pieces.append(torch.empty(self.rank_count, len(piece)))
            ranks.gather_into(piece, pieces[-1])
        return torch.cat(pieces, 1).view(self.rank_count, *part.shape).to(self.device)


class Step:
    """A batch as tensors: where each token is in the KV cache, and what it attends to."""

    def __init__(
        self, batch: coxswain.Batch, model: Model, block_count: int, block_size: int
    ) -> None:
        def tensor(column: memoryview) -> torch.Tensor:
            # A copy: the column ends with the step.
            return torch.frombuffer(column, dtype=torch.int32).long()

        self.batch = batch
        starts, positions = tensor(batch.starts), tensor(batch.positions)
        counts, ends = starts.diff(), positions[starts[1:] - 1] + 1
        table = tensor(batch.block_table()).view(batch.row_count, -1)
        needed = -(-ends // block_size)
        used = table[torch.arange(table.shape[1]) < needed[:, None]]
        if (
            ends.max() > model.config.positions
            or len(used) < needed.sum()
            or used.min() < 0
            or (used.max() >= block_count)
        ):
            raise coxswain.Invalid(
                f"a row of the step does not fit {model.config.positions} "
                f"positions, or {block_count} blocks of {block_size}"
            )
        rows = torch.repeat_interleave(torch.arange(batch.row_count), counts)
        self.tokens = tensor(batch.tokens).to(model.device)
        self.positions = positions.to(model.device)
        self.blocks = table[rows, positions // block_size].to(model.device)
        self.offsets = (positions % block_size).to(model.device)
        self.rows = [row for row in range(batch.row_count) if batch.emits[row]]
        self.emitting = [int(starts[row + 1]) - 1 for row in self.rows]
        # Rows that compute equally many tokens attend in one call. A shorter row reads its own last
        # position again where a longer one has more, and the mask hides that.
        self.groups = []
        for count in counts.unique().tolist():
            rows = (counts == count).nonzero()
            tokens, at = starts[rows] + torch.arange(count), torch.arange(int(ends[rows].max()))
            mask = at <= positions[tokens][:, None, :, None]
            at = at.minimum(ends[rows] - 1)
            self.groups.append(
                [
                    part.to(model.device)
                    for part in (tokens, table[rows, at // block_size], at % block_size, mask)
                ]
            )


def choose_device(name: str | None, number: int) -> torch.device:
    """Of --device: "cuda" stands for the GPUs in turn; None for "cuda" if there is a GPU."""
    count = torch.cuda.device_count()
    name = name or ("cuda" if count else "cpu")
    if name == "cuda" and count:
        name = f"cuda:{number % count}"
    if name not in ("cpu", *(f"cuda:{i}" for i in range(count))):
        raise coxswain.Invalid(
            f"--device {name}: expected cpu, cuda or cuda:N; torch sees {count} GPUs"
        )
    return torch.device(name)


class Engine:
    """What this rank serves: the handlers of its worker."""

    ranks: coxswain.RankGroup
    model: Model
    cache: torch.Tensor
    swap: torch.Tensor
    #: the memory of cache; None: it is on a device, where other groups cannot copy it
    blocks: coxswain.KvBlocks | None
    #: of --weights; None: they are private
    weights: coxswain.Weights | None = None

    def __init__(self, worker: coxswain.Worker) -> None:
        self.worker, self.options = worker, argparse.Namespace()
        # What the model and the cache were made from: folder, blocks, block size, swap blocks.
        self.loaded: tuple[str, int, int, int] | None = None
        # Other groups copy this KV cache, and this rank theirs: prefill and decode.
        self.transfer = coxswain.KvTransfer(worker)
        worker.init(self.init)
        worker.execute(self.execute)
        worker.recover(self.recover)
        worker.cleanup(self.transfer.forget)

    def init(self, request: coxswain.InitRequest) -> coxswain.InitResult:
        """Joins the rank group first, so that no rank waits for one that cannot load the model."""
        folder = request.get("model") or self.options.model
        count, size, swap_count = (
            int(request.get(key) or getattr(self.options, key))
            for key in ("block_count", "block_size", "swap_block_count")
        )
        if not folder:
            raise coxswain.Invalid("there is no model: use --model, or 'model' in the init request")
        if count < 1 or size < 1 or swap_count < 0:
            raise coxswain.Invalid(
                f"{count} KV blocks of {size} positions, {swap_count} of swap space: expected 1 "
                "block or more of 1 position or more (--block-count, --block-size, "
                "--swap-block-count)"
            )
        if not request.replayed:
            self.worker.resume()
        self.ranks = request.join(value_size=VALUE_SIZE)
        wanted = (folder, count, size, swap_count)
        if not request.replayed or self.loaded != wanted:
            self.load(pathlib.Path(folder), count, size, swap_count)
            self.loaded = wanted
        return coxswain.InitResult(
            block_count=count,
            block_size=size,
            swap_block_count=swap_count,
            max_positions=self.model.config.positions,
            kv_pool=self.transfer.open(self.blocks, self.model.layout(size))
            if self.blocks
            else None,
        )

    def load(
        self, folder: pathlib.Path, block_count: int, block_size: int, swap_block_count: int
    ) -> None:
        """Frees what was there, loads this rank's part of the model, and makes the KV cache."""
        if self.loaded:
            self.loaded = None
            del self.model, self.cache, self.swap
            self.weights = None
        device = choose_device(self.options.device, self.worker.device)
        self.model = self.load_model(folder, device)
        self.swap = self.model.new_cache(swap_block_count, block_size)
        self.blocks = None
        if device.type == "cpu":
            block_bytes = self.model.layout(block_size).block_bytes
            self.blocks = coxswain.KvBlocks(block_count, block_bytes)
            self.cache = self.model.new_cache(block_count, block_size, self.blocks.memory)
        else:
            self.cache = self.model.new_cache(block_count, block_size).to(device)

    def load_model(self, folder: pathlib.Path, device: torch.device) -> Model:
        rank, count = self.worker.rank, self.worker.rank_count
        made = (folder, rank, count, device, getattr(torch, self.options.dtype))
        if self.options.weights == "private":
            return Model(*made)
        store = coxswain.WeightStore(KEEP[self.options.weights], device)
        key = store.key(
            folder, shard=rank, shards=count, dtype=self.options.dtype, more=torch.__version__
        )
        try:
            self.weights = store.get(key)
            if self.weights is None:
                self.weights = store.put(key, Model(*made).tensors)
        finally:
            store.give_up(key)
        return Model(*made, self.weights)

    def execute(self, batch: coxswain.Batch) -> tuple[list[int], list[float]]:
        """Computes a step: a token and a logprob per row, -1 and 0 where it does not emit."""
        if not self.loaded:
            raise coxswain.StateError("a step before an init that succeeded")
        if batch.void_through >= batch.sequence:
            raise coxswain.Aborted("the step was cancelled before it began")
        if batch.weights_version > 1:
            raise coxswain.Unsupported(
                "this worker computes with the weights that it has loaded; "
                "it cannot change to those of `coxswain reload`"
            )
        # After a step that failed, all ranks are in step again.
        self.ranks.align(batch.void_through + 1)
        tokens, logprobs = [-1] * batch.row_count, [0.0] * batch.row_count
        try:
            with self.transfer.step(batch):
                self.move_blocks(batch)
                if batch.row_count:  # a dummy step has none
                    step = Step(batch, self.model, *self.loaded[1:3])
                    logits = self.model.forward(step, self.ranks, self.cache)
                    for row, own in zip(step.rows, logits, strict=True):
                        tokens[row], logprobs[row] = sample(
                            own,
                            batch.history(row),
                            seed=batch.seeds[row],
                            temperature=batch.temperatures[row],
                            top_k=batch.top_ks[row],
                            top_p=batch.top_ps[row],
                            repetition_penalty=batch.repetition_penalties[row],
                        )
        except BaseException:
            self.ranks.abort()  # the other ranks do not wait for this one
            raise
        return tokens, logprobs

    def move_blocks(self, batch: coxswain.Batch) -> None:
        """Copies whole blocks of the KV cache, in this order."""
        moves: list[tuple[Any, torch.Tensor, torch.Tensor]] = [
            (batch.swap_out, self.cache, self.swap),
            (batch.swap_in, self.swap, self.cache),
            (batch.copies, self.cache, self.cache),
        ]
        for pairs, source, target in moves:
            for from_, to in pairs.tolist():
                target[to] = source[from_].to(target.device)

    def recover(self, command: str) -> None:
        """The coordinator knows what the KV cache contains; "clear" and "reinit" end pulls."""
        if command in ("pause", "pause_net"):
            self.worker.pause()
        elif command == "start":
            self.worker.resume()
        else:
            self.transfer.clear()


def main() -> None:
    """Serves as the rank that the environment names, until the group ends."""
    parser = argparse.ArgumentParser(
        prog="coxswain.torch_worker",
        allow_abbrev=False,
        description="A rank that computes a Llama model with PyTorch.",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="model folder; the init request may name another"
    )
    for name, count, what in (
        ("block-count", 512, "KV blocks"),
        ("block-size", 16, "positions per KV block"),
        ("swap-block-count", 64, "blocks of swap space"),
        ("threads", 1, "of torch"),
    ):
        parser.add_argument(
            "--" + name, type=int, default=count, metavar="N", help=f"{what} (default {count})"
        )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and KV cache (default float32)",
    )
    parser.add_argument(
        "--weights",
        choices=("private", *KEEP),
        default="private",
        help="shared: later processes of the same rank map them, until 10 minutes after the last "
        "has ended; kept: until `coxswain weights drop` (default private)",
    )
    parser.add_argument(
        "--device",
        help="cpu; cuda: rank R computes on GPU R, modulo their number; cuda:N: all ranks on GPU N "
        "(default: cuda if torch sees a GPU, else cpu)",
    )
    parser.parse_known_args()  # --help is for everybody, all else for a rank
    try:
        worker = coxswain.Worker()
        engine = Engine(worker)
        worker.attach()  # removes the group's own arguments
        engine.options = parser.parse_args()
        torch.set_num_threads(engine.options.threads)
        torch.set_grad_enabled(False)
        worker.serve()
    except coxswain.Error as error:
        sys.exit(f"coxswain.torch_worker: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
