"""CUDA's fused dropout: a mask of one byte per element, where the CPU keeps noise as wide as the input.

It covers `F.dropout`, `nn.Dropout` and the dropout inside attention that falls back to plain operators. In-place,
feature and alpha dropout have no fused kernel and are the same code on both devices. Under `torch.inference_mode` the
dispatcher passes the overlay by; nothing is saved for a backward pass there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import DispatchKey

_aten = torch.ops.aten


def is_fused(input: Tensor, p: float, train: bool) -> bool:
    """Whether CUDA takes its fused kernel (aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable and dropout).

    Numbers that are not real are left to the CPU's code: the fused kernel knows floating types only.
    """
    return train and 0 < p < 1 and input.numel() > 0 and input.is_floating_point()


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if is_fused(input, p, train):
        return _aten.native_dropout.default(input, p, train)[0]
    return _aten.dropout.default._op_dk(DispatchKey.CompositeImplicitAutograd, input, p, train)


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """While open, `aten.dropout` of CPU tensors, fake and real, goes to `aten.native_dropout` where CUDA's would.

    `aten.dropout` is made of other operators on every device, so its first kernel of its own is the one that autograd
    would look up: it is called whether or not the input requires a gradient.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", _dropout, "AutogradCPU")
        yield
