"""What DistributedDataParallel holds beside the model when several processes train it, one device each.

Its reducer copies gradients into flat buckets, over which it sums between processes: one more copy of every trainable
parameter's gradient, from its construction on (torch/csrc/distributed/c10d/reducer.cpp, `initialize_buckets`). Trainer leaves
`gradient_as_bucket_view` off, which would make the gradients views of the buckets, and `bucket_cap_mb` at its default
(torch/nn/parallel/distributed.py: 25 MiB, the first bucket 1 MiB). After the first backward pass the buckets are made anew
in the order in which gradients appear; old and new are not alive at once.

Not here: what NCCL takes, which is outside torch's allocator, and the time of communication.
"""

from collections.abc import Iterable

import torch

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


def bucket_bytes(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Bytes of each bucket for the trainable ones of `parameters`, which are given in the order of registration.

    A bucket closes once it has reached its limit, and holds one dtype (`compute_bucket_assignment_by_size` in reducer.cpp).
    """
    buckets: list[int] = []
    filling: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        kind = parameter.dtype
        filling[kind] = filling.get(kind, 0) + parameter.numel() * parameter.element_size()
        if filling[kind] >= limits.get(kind, FIRST_BUCKET_BYTES):
            buckets.append(filling.pop(kind))
            limits[kind] = BUCKET_BYTES
    return [*buckets, *filling.values()]
