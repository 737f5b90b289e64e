"""Tensors that own no memory, in place of a workload's own: its model, and each batch on its way to the device.

Fake tensors here are CPU tensors of torch's `FakeTensorMode`: shape, dtype and strides without data. Fake CUDA tensors are
of no use without a GPU: autograd asks the driver for their device. Rows, collators and loaders run on real tensors.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autofit.harness.shadow.semantics.answers import answer
from autofit.harness.take_hold import when_imported

# Enough for depths, grids and offsets, and for masks that detectors make for each row of a batch. Whether a tensor that
# grows with the batch is known never changes what is allocated, but for selections by it: true sizes, else upper bounds.
KNOWN_ELEMENTS = 4096
KNOWN_PER_ROW = 8  # height, width and frames of an image, corners of a box; tokens and labels of tokens are more


class Answering(TorchDispatchMode):
    """Answers what code asks of values, above the fakes that have none; see `answers`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = answer(func, args, kwargs)
        return func(*args, **kwargs) if given is NotImplemented else given


class KnowingMode(FakeTensorMode):
    """Knows the values of small tensors that come from code, such as the depths of a model's stages.

    Code reads such tensors to decide on shapes (`torch.tensor(depths).cumsum(0).tolist()`), or to leave something out
    (`torch.linspace(0, rate, depth)[i].item() > 0`). Torch carries the values of single numbers through every operator
    whose inputs are all known; here of up to `KNOWN_ELEMENTS`, and of what factories make. Values of model and data stay
    unknown.
    """

    _FACTORIES = frozenset(
        getattr(getattr(torch.ops.aten, name), overload)
        for name, overload in (
            ("arange", "default"),
            ("arange", "start"),
            ("arange", "start_step"),
            ("linspace", "default"),
            ("zeros", "default"),
            ("ones", "default"),
            ("full", "default"),
            ("scalar_tensor", "default"),
        )
    )

    def __init__(self) -> None:
        # Real tensors that user code brings along (class weights, constants) are taken for fakes of the same shape.
        super().__init__(allow_non_fake_inputs=True)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Which results torch's own propagation keeps; without the override single numbers."""
        return t.numel() <= KNOWN_ELEMENTS and type(t) is torch.Tensor and t.device.type == "cpu" and not t.is_sparse

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = super().dispatch(func, types, args, kwargs)
        if func not in self._FACTORIES or made.numel() > KNOWN_ELEMENTS:
            return made
        with no_dispatch():
            real = func(*args, **kwargs)
        return self.know(real) if self.may_turn_const(real) else made

    def know(self, real: torch.Tensor) -> FakeTensor:
        """A fake whose values are those of `real`, which is its own from now on."""
        return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)


class FakeTensors:
    """One mode for the whole child: tensors of two modes cannot meet."""

    def __init__(self) -> None:
        self.mode = KnowingMode()

    def install(self) -> None:
        """Have transformers make models from configurations without weights, and let them be moved and converted.

        Torch swaps parameters that are fake, which fails wherever anything refers to them; here a converted parameter
        takes the old one's place, and one that stays what it is stays.
        """
        torch.nn.Module._apply = lambda module, fn, recurse=True: _apply(module, fn, recurse, {})
        when_imported("transformers.modeling_utils", self._take_models)
        when_imported("transformers.training_args", _allow_precisions)
        when_imported("peft", self._take_adapters)

    def _take_adapters(self, module: Any) -> None:
        """Adapters of a model without weights have none either."""
        fakes, original = self, module.get_peft_model

        def get_peft_model(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(next(model.parameters(), None), FakeTensor):
                return original(model, *args, **kwargs)
            with fakes.mode, Answering():
                return original(model, *args, **kwargs)

        module.get_peft_model = get_peft_model

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

        Only the shape and storage of each are kept: views of one storage become tensors of their own. Whole numbers that are
        few in each row, such as the sizes of images, keep their values: code makes shapes of them.
        """
        return self._convert("", batch, seen)

    def _fake(self, value: torch.Tensor) -> FakeTensor:
        return self.mode.from_tensor(value.detach().contiguous())

    def _convert(self, name: str, value: Any, seen: Callable[[str, torch.Tensor, torch.Tensor], None]) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                return value
            fake = self.mode.know(value.detach().clone()) if _is_small(value) else self._fake(value)
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


def _is_small(value: torch.Tensor) -> bool:
    rows = value.shape[0] if value.dim() else 1
    is_whole = not value.is_floating_point() and not value.is_complex()
    return is_whole and value.numel() <= min(KNOWN_ELEMENTS, KNOWN_PER_ROW * rows)


def _allow_precisions(module: Any) -> None:
    """`TrainingArguments` refuses bf16 and tf32 where it sees no GPU; the card that is meant is another."""
    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        if hasattr(module, name):
            setattr(module, name, lambda: True)
    if hasattr(module, "enable_tf32"):
        module.enable_tf32 = lambda enable: None


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
