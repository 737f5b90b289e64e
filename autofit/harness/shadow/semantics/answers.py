"""What operators are told whose result depends on values, which fake tensors do not have.

Whoever runs a model on fake tensors asks here first; NotImplemented means that the operator can run by itself.

    operator                                     answer
    _local_scalar_dense, item (`.item()`,        the true number where the tensor was made of one by `torch.tensor` and
    `bool(t)`, `float(t)`, `if t:`)              is still known; else False, 1, 0.5 or 0.5+0j, by dtype
    equal, allclose, all                         True
    any                                          False
    isfinite (`x == x`, `x.abs() != inf`)        True everywhere
    nonzero, nonzero of `where(mask)`            every element is one: numel rows
    masked_select                                every element is taken
    index with Boolean masks (`x[mask]`)         every element is taken
    _unique, _unique2, unique_consecutive        every element is another
    unique_consecutive of one dimension alone    all are equal: it is how code asks whether rows agree
    unique_dim                                   every slice is another
    repeat_interleave(repeats)                   `output_size`, where it is given; else each index once
    bincount                                     `minlength`, or one bin where that is 0
    isnan, isinf                                 False throughout
    _is_all_true (`torch._check_tensor_all`)     True: what code asserts of its inputs holds
    _ctc_loss                                    the longest target is as long as targets are wide
    _grouped_mm                                  of any dtype, as on CUDA: sizes do not depend on where groups begin

Selections are answered with all there is, so that what follows is an upper bound: exact for masks that keep everything
(rows without padding), too much for a mask that routes each token to one of many experts. A half is neither zero, which
would divide, nor one, whose logarithm and complement vanish; 1 is a number of steps or repeats that every loop
survives; False skips what `if x.isnan().any()` guards.

Only fake tensors are answered whose values their mode does not know: a real one that came along has its values, and torch
answers truly by itself where all that is given is known (small tensors that code has made; see `fake_tensors`). Not
answered: operators whose output depends on values in other ways (`_pack_padded_sequence`, `to_sparse`), which raise torch's
DynamicOutputShapeException by name.
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
    if known is None or not isinstance(args[0], FakeTensor) or _all_known(args):
        return NotImplemented
    return known(func, *args, **kwargs)


def _all_known(args: tuple[Any, ...]) -> bool:
    """Whether the mode knows the values of every tensor given, so that torch itself answers with the true result."""
    for part in args:
        for tensor in part if isinstance(part, (list, tuple)) else (part,):
            if isinstance(tensor, FakeTensor) and tensor.constant is None:
                return False
    return True


def scalar_of(dtype: torch.dtype) -> bool | int | float | complex:
    """The number that any element of an unknown tensor of `dtype` is taken for."""
    if dtype == torch.bool:
        return False
    if dtype.is_complex:
        return 0.5 + 0j
    return 0.5 if dtype.is_floating_point else 1


def _scalar(func: Any, tensor: FakeTensor) -> Any:
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
    alone = tensor.dim() == 1 and not (return_inverse or return_counts)
    count = min(tensor.numel(), 1) if alone else tensor.numel()
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


def _all_true(func: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(True)


def _ctc_loss(
    func: Any,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and log_alpha, which is kept for backward (aten/src/ATen/native/cuda/LossCTC.cu)."""
    steps, rows = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    # Targets that lie behind one another have been selected from rows of one width, all elements of them: see above.
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // rows)
    return log_probs.new_empty(rows), log_probs.new_empty((rows, steps, 2 * longest + 1))


def _ctc_loss_backward(func: Any, grad: torch.Tensor, log_probs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _nowhere(func: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)


def _everywhere(func: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)


def _equal_to_itself(func: Any, tensor: torch.Tensor, other: Any) -> Any:
    """`x == x`, half of what `isfinite` is made of."""
    return _everywhere(func, tensor) if other is tensor else NotImplemented


def _not_infinite(func: Any, tensor: torch.Tensor, other: Any) -> Any:
    """`x.abs() != inf`, the other half."""
    return _everywhere(func, tensor) if other in (math.inf, -math.inf) else NotImplemented


def _all_of_them(func: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    """What guards ask; that data are as they should be is what most of them expect."""
    return torch.tensor(True)


def _any_of_them(func: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    return torch.tensor(False)


def _grouped_mm(
    func: Any,
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """torch's own shape function takes bf16 alone, which is true of the fast kernel; CUDA has another for other dtypes.

    Rows are as wide as a multiple of 16 bytes (aten/src/ATen/native/cuda/GroupedBlas.cpp).
    """
    dtype = out_dtype or left.dtype
    if left.dim() == right.dim() == 2:  # the groups lie in the dimension that is summed over
        shape = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == right.dim():
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:
        shape = (left.shape[-2], right.shape[-1])
    alignment = 16 // dtype.itemsize
    width = -(-shape[-1] // alignment) * alignment
    strides = (width, 1) if len(shape) == 2 else (shape[1] * width, width, 1)
    return left.new_empty_strided(shape, strides, dtype=dtype)


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
    _aten._is_all_true.default: _all_true,
    _aten.all.default: _all_of_them,
    _aten.any.default: _any_of_them,
    _aten.eq.Tensor: _equal_to_itself,
    _aten.ne.Scalar: _not_infinite,
    _aten.isnan.default: _nowhere,
    _aten.isinf.default: _nowhere,
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    **({_aten._grouped_mm.default: _grouped_mm} if hasattr(_aten, "_grouped_mm") else {}),
}

# Answered with all there is: what follows is an upper bound.
SELECTIONS = {
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.index.Tensor,
    _aten._unique.default,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim.default,
}
