"""Lets transformers decide about attention masks as it would on a device, where it can read them.

A mask that masks nothing is dropped by transformers, so that attention may use its fastest kernel. For a fake tensor,
whose values nobody has, transformers assumes that it is being traced and always keeps the mask. `skipped_masks` puts
back the decision, and `remember_full` and `remember_packed` tell it what only the maker of a batch knows.

A mask that nobody was told about counts as full: models make such masks themselves, of ones, where the caller gave none.
It covers `transformers.masking_utils` and every `if mask.all()` and `if torch.all(mask == 1)` elsewhere, as older
versions and models with code of their own have it. Not covered: masks combined by other operators out of full and
padded ones (they count as full unless a padded mask of their shape is alive), and static caches, which training has not.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_full = WeakTensorKeyDictionary()  # mask -> whether it masks nothing
_packed = WeakTensorKeyDictionary()  # position_ids -> whether a row holds several sequences


def remember_full(mask: Tensor, is_full: bool) -> None:
    """Say of this very tensor whether all its values are ones (no padding). Forgotten when the tensor is gone."""
    _full[mask] = is_full


def remember_packed(position_ids: Tensor, is_packed: bool) -> None:
    """Say of this very tensor whether some row of it starts anew in the middle (several sequences in one row)."""
    _packed[position_ids] = is_packed


def is_full(mask: Tensor) -> bool:
    """What was said of the mask, or of the tensor that it is a view of; else full, unless a padded mask of its shape lives.

    The last rule serves copies: a model that converts its padded mask before use makes a tensor that nobody knows.
    """
    known = _look_up(_full, mask)
    if known is not None:
        return known
    return not any(not full and other.shape == mask.shape for other, full in list(_full.items()))


def is_packed(position_ids: Tensor) -> bool:
    """What was said of the positions, or of the tensor that they are a view of; else one sequence per row."""
    return bool(_look_up(_packed, position_ids))


def _look_up(known: WeakTensorKeyDictionary, tensor: Tensor) -> bool | None:
    if tensor in known:
        return known[tensor]
    base = tensor._base
    return known.get(base) if base is not None else None


class _Decisions(TorchFunctionMode):
    """Answers `bool(mask.all())` of fake masks, and hands on what is known of a mask to its plain copies."""

    _REDUCTIONS = {torch.all, Tensor.all}
    _COPIES = {
        Tensor.to,
        Tensor.bool,
        Tensor.int,
        Tensor.long,
        Tensor.float,
        Tensor.type,
        Tensor.clone,
        Tensor.contiguous,
    }
    _ONES = {torch.ones, torch.ones_like, Tensor.new_ones}
    _TRUTHS = {Tensor.__bool__, Tensor.item}

    def __init__(self) -> None:
        super().__init__()
        self._answers = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in self._TRUTHS and args[0] in self._answers:
            return self._answers[args[0]]
        result = func(*args, **kwargs)
        if func in self._REDUCTIONS:
            if len(args) == 1 and not kwargs and isinstance(result, FakeTensor):
                self._answers[result] = is_full(args[0])
        elif func in self._COPIES:
            known = _look_up(_full, args[0])
            if known is not None and result is not args[0]:
                _full[result] = known
        elif func in self._ONES and isinstance(result, FakeTensor) and result.dim() == 2:
            _full[result] = True
        return result


@contextmanager
def skipped_masks() -> Iterator[None]:
    """While open, transformers reads fake masks as `is_full` and fake positions as `is_packed` know them.

    Replaced, where the installed transformers has them: in `masking_utils`, `is_tracing` (a fake tensor is no longer a
    reason), `fast_all`, and `find_packed_sequence_indices`.
    """
    import transformers.masking_utils as masking

    is_tracing = getattr(masking, "is_tracing", None)
    wrapped: dict[str, Callable] = {}
    if is_tracing is not None:
        wrapped["is_tracing"] = _wrap_is_tracing(is_tracing)
    if hasattr(masking, "fast_all"):
        wrapped["fast_all"] = _wrap_fast_all(masking.fast_all)
    if is_tracing is not None and hasattr(masking, "find_packed_sequence_indices"):

        def with_tracing(position_ids: Tensor) -> Tensor | None:
            with patch.object(masking, "is_tracing", is_tracing):
                return find_packed(position_ids)

        find_packed = masking.find_packed_sequence_indices
        wrapped["find_packed_sequence_indices"] = lambda ids: (with_tracing if is_packed(ids) else find_packed)(ids)
    with ExitStack() as stack:
        for name, function in wrapped.items():
            stack.enter_context(patch.object(masking, name, function))
        stack.enter_context(_Decisions())
        yield


def _wrap_is_tracing(original: Callable) -> Callable:
    def is_tracing(tensor: Any = None) -> bool:
        # A fake scalar is the query offset of a static cache: no mask, and nobody knows its value.
        if isinstance(tensor, FakeTensor) and tensor.dim() > 0:
            tensor = None
        return original(tensor)

    return is_tracing


def _wrap_fast_all(original: Callable) -> Callable:
    """Sum and comparison still take place, as small as they are; their outcome is known beforehand."""

    def fast_all(tensor: Tensor) -> Any:
        result = original(tensor)
        return is_full(tensor) if isinstance(tensor, FakeTensor) else result

    return fast_all
