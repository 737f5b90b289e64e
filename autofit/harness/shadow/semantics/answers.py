"""What operators are told whose result depends on values, which fake tensors do not have.

Whoever runs a model on fake tensors asks here first; NotImplemented means that the operator can run by itself.

    operator                                     answer
    _local_scalar_dense, item (`.item()`,        the true number where the tensor was made of one by `torch.tensor` and
    `bool(t)`, `float(t)`, `if t:`)              is still known; else False, 1, 0.5 or 0.5+0j, by dtype
    equal, allclose                              True
    nonzero, nonzero of `where(mask)`            every element is one: numel rows
    masked_select                                every element is taken
    index with Boolean masks (`x[mask]`)         every element is taken
    _unique, _unique2, unique_consecutive        every element is another
    unique_dim                                   every slice is another
    repeat_interleave(repeats)                   `output_size`, where it is given; else each index once
    bincount                                     `minlength`, or one bin where that is 0

Selections are answered with all there is, so that what follows is an upper bound: exact for masks that keep everything
(rows without padding), too much for a mask that routes each token to one of many experts. A half is neither zero, which
would divide, nor one, whose logarithm and complement vanish; 1 is a number of steps or repeats that every loop
survives; False skips what `if x.isnan().any()` guards.

Only fake tensors are answered: a real one that came along has its values. Not answered: operators whose output depends
on values in other ways (`_pack_padded_sequence`, `to_sparse`), which raise torch's DynamicOutputShapeException by name.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of operator `func`, or NotImplemented where it needs no answer.

    To be called from a dispatch mode above a `FakeTensorMode`: results are fakes of that mode, with own storages.
    """
    known = _ANSWERS.get(func)
    if known is None or not isinstance(args[0], FakeTensor):
        return NotImplemented
    return known(func, *args, **kwargs)


def scalar_of(dtype: torch.dtype) -> bool | int | float | complex:
    """The number that any element of an unknown tensor of `dtype` is taken for."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0.5 + 0j
    return 0.5 if dtype.is_floating_point else 1


def _scalar(func: Any, tensor: FakeTensor) -> Any:
    if tensor.constant is not None:  # what torch's own fake implementation answers with
        return NotImplemented
    return scalar_of(tensor.dtype)


def _true(func: Any, *_: Any, **__: Any) -> bool:
    return True


def _nonzero(func: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Laid out by columns, as torch/_subclasses/fake_impls.py `nonzero` has it."""
    return tensor.new_empty((tensor.dim(), tensor.numel()), dtype=torch.int64).t()


def _masked_select(func: Any, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)))


def _index(func: Any, tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> Any:
    """Each mask becomes the indices of all its elements, one tensor for each dimension that it covers."""
    masks = (torch.bool, torch.uint8)
    if not any(index is not None and index.dtype in masks for index in indices):
        return NotImplemented
    chosen: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in masks:
            chosen += [tensor.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            chosen.append(index)
    return func(tensor, chosen)


def _unique(func: Any, tensor: torch.Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple:
    return tensor.new_empty(tensor.numel()), _inverse(tensor, return_inverse)


def _unique2(
    func: Any, tensor: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple:
    count = tensor.numel()
    return tensor.new_empty(count), _inverse(tensor, return_inverse), _counts(tensor, count, return_counts)


def _unique_consecutive(
    func: Any, tensor: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple:
    if dim is not None:
        return _unique_dim(func, tensor, dim, True, return_inverse, return_counts)
    count = tensor.numel()
    return tensor.new_empty(count), _inverse(tensor, return_inverse), _counts(tensor, count, return_counts)


def _unique_dim(
    func: Any,
    tensor: torch.Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple:
    count = tensor.shape[dim]
    inverse = tensor.new_empty(count if return_inverse else 0, dtype=torch.int64)
    return tensor.new_empty(tensor.shape), inverse, _counts(tensor, count, return_counts)


def _inverse(tensor: torch.Tensor, asked: bool) -> torch.Tensor:
    return tensor.new_empty(tensor.shape if asked else 0, dtype=torch.int64)


def _counts(tensor: torch.Tensor, count: int, asked: bool) -> torch.Tensor:
    return tensor.new_empty(count if asked else 0, dtype=torch.int64)


def _repeat_interleave(func: Any, repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    return repeats.new_empty(repeats.numel() if output_size is None else output_size)


def _bincount(func: Any, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    return tensor.new_empty(max(minlength, 1), dtype=dtype)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.item.default: _scalar,
    _aten.equal.default: _true,
    _aten.allclose.default: _true,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique.default: _unique,
    _aten._unique2.default: _unique2,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.unique_dim.default: _unique_dim,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.bincount.default: _bincount,
}
