"""Tensors as arguments and results, in an interpreter that has torch: test_objects.py runs it."""

import coxswain
import objects
import torch

SECONDS = 60


def tensors():
    large = torch.arange(30_000, dtype=torch.float32).reshape(100, 300)
    return {
        "large": large,
        "small": torch.arange(3),
        "half": large.to(torch.bfloat16),
        "bool": large > 5,
        "complex": torch.complex(large, large),
        "transposed": large.t(),
        "gaps": large[:, ::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5.0),
        "parameter": torch.nn.Parameter(large.clone()),
        "grad": large.clone().requires_grad_(),
        "sparse": large.to_sparse(),
        "expanded": torch.ones(1, 5).expand(4000, 5),
    }


def main():
    given = tensors()
    with coxswain.Group(objects.Engine, 1, codec="pickle") as group:
        for found in group.call_method("same", given, timeout=SECONDS):
            for name, tensor in given.items():
                one = found[name]
                assert type(one) is type(tensor) and one.dtype == tensor.dtype, name
                assert one.requires_grad == tensor.requires_grad and one.layout == tensor.layout
                assert torch.equal(one.to_dense(), tensor.to_dense()), name
            found["large"] += 1  # it is the receiver's
        for _ in range(3):
            group.call_method("keep", torch.ones(700_000), timeout=SECONDS)
            group.call_method("same", torch.zeros(700_000), timeout=SECONDS)
        assert group.call_method("sums", timeout=SECONDS) == [[700_000.0] * 3]
        for found in group.call_method("add_to", given["large"], timeout=SECONDS):
            assert torch.equal(found, given["large"] + 1)
        message = coxswain._internal.objects.dumps(
            given["transposed"], coxswain._internal.objects.REPLY
        )
        assert max(part.iov_len for part in message.vectors) == given["transposed"].nbytes
    with coxswain.Group(objects.serve_bytes, 1) as group:
        try:
            group.call(torch.zeros(3))
            raise AssertionError("a tensor was sent as bytes")
        except TypeError as error:
            assert "pass tensor.numpy()" in str(error)
        assert group.call(torch.zeros(3).numpy()) == [bytes(12)]
