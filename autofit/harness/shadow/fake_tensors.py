"""Tensors that own no memory, in place of a workload's own: its model, and each batch on its way to the device.

Fake tensors here are CPU tensors of torch's `FakeTensorMode`: shape, dtype and strides without data. Fake CUDA tensors are
of no use without a GPU: autograd asks the driver for their device. Rows, collators and loaders run on real tensors.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autofit.harness.shadow.semantics.answers import answer
from autofit.harness.take_hold import when_imported


class Answering(TorchDispatchMode):
    """Answers what code asks of values, above the fakes that have none; see `answers`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = answer(func, args, kwargs)
        return func(*args, **kwargs) if given is NotImplemented else given


class FakeTensors:
    """One mode for the whole child: tensors of two modes cannot meet."""

    def __init__(self) -> None:
        # Real tensors that user code brings along (class weights, constants) are taken for fakes of the same shape.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def install(self) -> None:
        """Have transformers make models from configurations without weights, and let them be moved and converted.

        Torch swaps parameters that are fake, which fails wherever anything refers to them; here a converted parameter
        takes the old one's place, and one that stays what it is stays.
        """
        torch.nn.Module._apply = lambda module, fn, recurse=True: _apply(module, fn, recurse, {})
        when_imported("transformers.modeling_utils", self._take_models)

    def _take_models(self, module: Any) -> None:
        fakes, original = self, module.PreTrainedModel._from_config.__func__

        def from_config(cls: type, *args: Any, **kwargs: Any) -> Any:
            with fakes.mode, Answering():
                return original(cls, *args, **kwargs)

        module.PreTrainedModel._from_config = classmethod(from_config)

    def convert_model(self, model: torch.nn.Module) -> dict[int, torch.Tensor]:
        """Replace real parameters and buffers by fakes, in place. Returns the fakes by the id of what they replace."""
        replaced: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for values in (module._parameters, module._buffers):
                for name, value in values.items():
                    if value is not None and not isinstance(value, FakeTensor):
                        values[name] = replaced[id(value)] = self.mode.from_tensor(value)
        return replaced

    def convert_batch(self, batch: Any, seen: Callable[[str, torch.Tensor, torch.Tensor], None]) -> Any:
        """The batch with a fake in place of each tensor, whatever its nesting; `seen(name, real, fake)` hears of each.

        Only the shape and storage of each are kept: views of one storage become tensors of their own.
        """
        return self._convert("", batch, seen)

    def _convert(self, name: str, value: Any, seen: Callable[[str, torch.Tensor, torch.Tensor], None]) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return value
            fake = self.mode.from_tensor(value.detach().contiguous())
            seen(name, value, fake)
            return fake
        if isinstance(value, Mapping):
            converted = {key: self._convert(str(key), part, seen) for key, part in value.items()}
            try:
                return type(value)(converted)
            except TypeError:
                return converted
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._convert(name, part, seen) for part in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._convert(name, part, seen) for part in value)
        return value

    @contextlib.contextmanager
    def real_loading(self) -> Iterator[None]:
        """Data loaders run without the modes while this is open, whoever asks them for a batch."""
        loader = torch.utils.data.DataLoader
        original = loader.__iter__

        def iterate(self: Any) -> "_RealIterator":
            with _disable_current_modes():
                return _RealIterator(original(self))

        loader.__iter__ = iterate
        try:
            yield
        finally:
            loader.__iter__ = original


def _apply(module: torch.nn.Module, fn: Callable, recurse: bool, done: dict[int, torch.Tensor]) -> torch.nn.Module:
    if recurse:
        for child in module.children():
            _apply(child, fn, recurse, done)
    for values in (module._parameters, module._buffers):
        for name, value in values.items():
            if value is None:
                continue
            if id(value) not in done:
                with torch.no_grad():
                    applied = fn(value)
                if applied is not value and isinstance(value, torch.nn.Parameter):
                    applied = torch.nn.Parameter(applied, value.requires_grad)
                done[id(value)] = applied
            values[name] = done[id(value)]
    return module


class _RealIterator:
    """A data loader's iterator that is asked outside the modes."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> "_RealIterator":
        return self

    def __next__(self) -> Any:
        with _disable_current_modes():
            return next(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)
