"""Moving tensors to the host, where fake CPU tensors have no other place to go.

On CUDA `.cpu()` makes a copy in host memory and the device's own goes with its last reference; on fake CPU tensors it
is the tensor itself, which then stays on the device for as long as its copy would on the host, and `.numpy()` is
refused. While `host_transfers` is active:

    `.cpu()`                     a fake of its own that is host memory; differentiable, its gradient is on the device
    `.numpy()`, `np.asarray`     zeros of the right shape and dtype. bfloat16 and requires_grad are refused as ever
    `.tolist()`                  the number that `answers` gives for `.item()`, in lists of the right shape
    Trainer's evaluation         `EvalLoopContainer` moves what it has to the host as fakes, concatenates them there,
                                 and makes arrays of zeros of them at the end. `Accelerator.pad_across_processes`, which
                                 compares the sizes of all processes, knows of one only

Bytes on the device come out as they are on CUDA without more: concatenation makes the new array while the old one is
alive, and a flush drops both. Host memory is told of by `on_host`: the copy of each tensor, the float32 copy of each
bfloat16 one (NumPy has no such type), and each concatenation, which again is made while the old array is alive. They
live as long as the array that stands for them; what user code makes of that array is real memory and is not told of.

Zeros are taken from the system as untouched pages, so that they cost nothing until written. A metrics function would
still have to read them, so the arrays of one evaluation are cut to at most `MAX_ELEMENTS` in the largest: first rows,
the same number of predictions, labels, losses and inputs; then, where one row is larger than that, the second
dimension. Arrays that are larger still (`.numpy()` by hand) are one zero seen through strides of 0, and read-only.

Not covered: `.to("cpu")`, which is how a script says "to the device" where it sees no GPU: it does nothing, so that
what is moved that way counts as memory of the device. Neither are `copy_` into pinned memory and
`torch.autograd.graph.save_on_cpu`.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autofit.harness.shadow.semantics.answers import scalar_of

MAX_ELEMENTS = 50_000_000  # of float32: an argmax takes 0.1 s, a softmax 1 s and 400 MB, measured on one core
_DISTINCT = 1_000_000  # lists of more elements share their rows

_MISSING = object()


@contextlib.contextmanager
def host_transfers(on_host: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Have what is moved to the host leave the device. `on_host` hears of each tensor that is host memory from now on.

    The tensors given to it are made outside all dispatch modes, so a ledger has not counted them.
    """
    from accelerate import Accelerator
    from transformers.trainer_pt_utils import EvalLoopContainer

    host = HostMemory(on_host)
    accumulation = _Accumulation(host)
    made = EvalLoopContainer.__init__

    def make(container: Any, *args: Any, **kwargs: Any) -> None:
        made(container, *args, **kwargs)
        accumulation.begin(container)

    def cpu(tensor: FakeTensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        if host.holds(tensor):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            return _ToHost.apply(tensor, host)
        return host.copy(tensor)

    def numpy(tensor: FakeTensor, *, force: bool = False) -> np.ndarray:
        dtype = _numpy_dtype(tensor.dtype, tensor.requires_grad and not force)
        array = _zeros(tuple(tensor.shape), dtype)
        if host.holds(tensor):
            _keep_with(array, tensor)
        return array

    patches = (
        (FakeTensor, "cpu", cpu),
        (FakeTensor, "numpy", numpy),
        (FakeTensor, "tolist", _tolist),
        (Accelerator, "pad_across_processes", lambda accelerator, tensor, *_, **__: tensor),
        (EvalLoopContainer, "__init__", make),
        (EvalLoopContainer, "to_cpu_and_numpy", lambda container: accumulation.move(container)),
        (EvalLoopContainer, "get_arrays", lambda container: accumulation.arrays(container)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(replaced(owner, name, value))
        yield


class HostMemory:
    """Fakes that stand for host memory: made where no ledger sees them, and told of."""

    def __init__(self, on_host: Callable[[torch.Tensor], None]) -> None:
        self._on_host = on_host
        self._storages: dict[int, weakref.ref] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, or what it is a view of, has been made here."""
        return tensor.untyped_storage()._cdata in self._storages

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the same shape, detached; its values are unknown as those of any fake."""
        with _disable_current_modes():
            return self.take(torch.empty_like(tensor.detach(), dtype=dtype))

    def empty(self, like: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the same mode as `like`."""
        with _disable_current_modes():
            return self.take(like.detach().new_empty(shape, dtype=dtype))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count `tensor` as host memory. Returns it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
            self._on_host(tensor)
        return tensor


class _ToHost(torch.autograd.Function):
    """A differentiable `.cpu()`, as torch's ToCopyBackward is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, host: HostMemory) -> torch.Tensor:
        return host.copy(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(gradient), None


class _Accumulation:
    """What the containers of one evaluation hold (`EvalLoopContainer` of transformers/trainer_pt_utils.py)."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._containers: list[weakref.ref] = []
        self._limits: tuple[int, int, int] | None = None

    def begin(self, container: Any) -> None:
        """`container` has been made. All of an evaluation are made before any of them gives its arrays."""
        if self._limits is not None:
            self._limits = None
            self._containers.clear()
        self._containers.append(weakref.ref(container))

    def move(self, container: Any) -> None:
        """In place of `to_cpu_and_numpy`."""
        from transformers.trainer_pt_utils import nested_concat

        if container.tensors is None:
            return
        moved = _map(self._move, container.tensors)
        if container.arrays is None:
            container.arrays = moved
        elif container.do_nested_concat:
            with _disable_current_modes():
                joined = nested_concat(container.arrays, moved, padding_index=container.padding_index)
            # Told of while what it was made of is alive.
            container.arrays = _map(
                lambda part: self._host.take(part) if isinstance(part, FakeTensor) else part, joined
            )
        else:
            container.arrays.extend(moved)
        container.tensors = None

    def arrays(self, container: Any) -> Any:
        """In place of `get_arrays`."""
        container.to_cpu_and_numpy()
        if container.arrays is None:
            return None
        if self._limits is None:
            self._limits = self._limit()
        rows, width, columns = self._limits
        if not container.do_nested_concat:
            rows = max(1, rows // max(1, len(container.arrays)))
        return _map(lambda part: _array(part, rows, width, columns), container.arrays)

    def _move(self, part: Any) -> Any:
        from transformers.trainer_pt_utils import nested_numpify

        with _disable_current_modes():
            if not isinstance(part, FakeTensor):
                return nested_numpify(part)
            moved = self._host.copy(part)
            return self._host.copy(moved, torch.float32) if moved.dtype == torch.bfloat16 else moved

    def _limit(self) -> tuple[int, int, int]:
        """How many rows arrays may have, and those that have a second dimension of `width`, how many columns."""
        shapes: list[tuple[int, ...]] = []
        for container in (reference() for reference in self._containers):
            if container is not None:
                held = (held for held in (container.arrays, container.tensors) if held is not None)
                _map(lambda part: shapes.append(tuple(part.shape)), list(held))
        largest = max((shape[1:] for shape in shapes if shape), key=math.prod, default=())
        elements = math.prod(largest)
        if elements <= MAX_ELEMENTS:
            return max(1, MAX_ELEMENTS // max(1, elements)), -1, -1
        return 1, largest[0], max(2, MAX_ELEMENTS // max(1, math.prod(largest[1:])))


def _array(part: Any, rows: int, width: int, columns: int) -> np.ndarray:
    shape = list(part.shape)
    if shape:
        shape[0] = min(shape[0], rows)
    if len(shape) > 1 and shape[1] == width:
        shape[1] = min(shape[1], columns)
    if not isinstance(part, FakeTensor):
        return part[tuple(slice(size) for size in shape)]
    array = _zeros(tuple(shape), _numpy_dtype(part.dtype, False))
    _keep_with(array, part)
    return array


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if math.prod(shape) <= MAX_ELEMENTS:
        return np.zeros(shape, dtype)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _keep_with(array: np.ndarray, tensor: torch.Tensor) -> None:
    """Keep `tensor`, whose memory `array` stands for, until the array and its views are gone."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    weakref.finalize(owner, lambda _: None, tensor).atexit = False


def _numpy_dtype(dtype: torch.dtype, requires_grad: bool) -> np.dtype:
    """What `.numpy()` makes of `dtype`; raises what it raises, torch's own error."""
    with _disable_current_modes():
        return torch.empty((), dtype=dtype, requires_grad=requires_grad).numpy().dtype


def _tolist(tensor: FakeTensor) -> Any:
    if tensor.constant is not None:
        with _disable_current_modes():
            return tensor.constant.tolist()
    if not tensor.dim():
        return tensor.item()
    value = scalar_of(tensor.dtype)
    if tensor.numel() <= _DISTINCT:
        return np.full(tuple(tensor.shape), value, dtype=object).tolist()
    for size in reversed(tensor.shape):
        value = [value] * size
    return value


def _map(function: Callable[[Any], Any], tensors: Any) -> Any:
    """Nested as `nested_numpify` sees it."""
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(_map(function, part) for part in tensors)
    if isinstance(tensors, Mapping):
        return type(tensors)({key: _map(function, part) for key, part in tensors.items()})
    return function(tensors)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; afterwards what it was, inherited where it was inherited."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
