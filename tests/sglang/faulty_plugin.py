"""A plugin of SGLang, for tests: schedulers do what a file says, and draw by seeds.

The file is that of SGLANG_TEST_FAULT: "RANK FAULT". FAULT: "raise" an exception, "drop" a request
that the other ranks run, "spin" for ever.
"""

import os

import torch


def fault(scheduler, *_, **__):
    """Before Scheduler.get_next_batch_to_run."""
    path = os.environ.get("SGLANG_TEST_FAULT", "")
    try:
        with open(path) as file:
            rank, name = file.read().split()
    except (FileNotFoundError, ValueError):
        return
    from sglang.srt.runtime_context import get_parallel

    if int(rank) != get_parallel().tp_rank or (name != "raise" and not scheduler.waiting_queue):
        return
    os.unlink(path)
    if name == "raise":
        raise ValueError("the device is on fire")
    if name == "drop":
        scheduler.waiting_queue.pop()
    while name == "spin":
        pass


def seeds(info, _, batch, *__, **___):
    """After SamplingBatchInfo.from_schedule_batch: as with --enable-deterministic-inference, which
    SGLang refuses on a CPU."""
    found = [req.sampling_params.sampling_seed or 42 for req in batch.reqs]
    info.sampling_seed = torch.tensor(found, dtype=torch.int64)
    return info


def murmur_hash32(seed, positions, columns):
    """In place of SGLang's, which needs a package that PyPI has for GPUs only: a number of 32 bits
    for each seed, position and column."""
    rows = seed.to(torch.int64) * 1000003 + positions.to(torch.int64) * 69069
    mixed = (rows[:, None] ^ (columns.to(torch.int64)[None, :] * 40503)) * 2654435761
    mixed = (mixed ^ (mixed >> 15)) * 2246822519
    return ((mixed ^ (mixed >> 13)) & 0xFFFFFFFF).to(torch.uint32)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    batch = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"
    HookRegistry.register(batch, fault, HookType.BEFORE)
    sampling = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(sampling, seeds, HookType.AFTER)
    murmur = "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32"
    HookRegistry.register(murmur, murmur_hash32, HookType.REPLACE)
