"""Counts what every storage of a run takes, from the instant it is made to the instant it is gone.

A dispatch mode above the fake tensors: it sees every operator, takes each new storage for an allocation, and hears of
the storage's end through a weak reference, at the very moment at which a real tensor would give its memory back. Each
storage has a category, and the module in whose forward pass it was made. What a kernel takes and gives back within one
operator is not seen.
"""

import collections
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.harness.shadow.op_cost import OpCost, cost_of
from autofit.harness.shadow.semantics import CannotShadowError
from autofit.harness.shadow.semantics.answers import answer
from autofit.harness.shadow.source_lines import Line, line_text, running_line
from autofit.harness.shadow.trace import Trace

# Categories, in the order in which they are shown.
PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER = "parameters", "buffers", "gradients", "optimizer state"
ACTIVATIONS, LOGITS, BATCH, EVALUATION = "activations", "logits and loss", "batch", "evaluation accumulation"
TEMPORARIES, WORKSPACE = "temporaries", "workspace"
CATEGORIES = (
    PARAMETERS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    LOGITS,
    EVALUATION,
    BATCH,
    TEMPORARIES,
    WORKSPACE,
)
STAYING = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER, BATCH, WORKSPACE)  # of which a training keeps what it needs
_CODES = {name: code for code, name in enumerate(CATEGORIES)}
_TEMPORARIES, _LOGITS = _CODES[TEMPORARIES], _CODES[LOGITS]


_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


def is_in_place(held: Any, other: Any, **kwargs: Any) -> bool:
    """Whether this sum is autograd's, of two gradients of one tensor, and would be made in the first one's memory.

    Autograd adds out of place to every subclass of Tensor, and a fake tensor is one; to a plain one it adds in place when
    it holds the last reference (`can_accumulate_inplace`, torch/csrc/autograd/input_buffer.cpp). The storage then has two
    owners here: that tensor, and the object through which it is asked.
    """
    return (
        not kwargs
        and not torch.is_grad_enabled()
        and torch._C._current_autograd_node() is not None
        and isinstance(other, torch.Tensor)
        and held.shape == other.shape
        and held.dtype == other.dtype
        and _asked_by_autograd()
        and torch._C._storage_Use_Count(held.untyped_storage()._cdata) == 2
        and is_non_overlapping_and_dense_or_false(held)
    )


def _asked_by_autograd() -> bool:
    """Whether the operator that is dispatched comes from autograd's C++, not from Python code within a backward pass."""
    frame = sys._getframe(2)  # of the mode
    while frame is not None and frame.f_code.co_name in ("__torch_dispatch__", "_fn", "inner"):  # torch wraps it
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


class Ledger(TorchDispatchMode):
    """Records allocations and operations while it is the active mode; frees are heard of at any time.

    `on_matmul` is called before each matrix product, convolution or attention is recorded.
    """

    def __init__(self, on_matmul: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._happened: list[int] = []
        self._event_phases: list[int] = []
        self._sizes: list[int] = []
        self._categories: list[int] = []
        self._modules: list[int] = []
        self._micro_batches: list[int] = []
        self._lines: list[Line | None] = []
        self._steps: list[int] = []  # blocks made before the first step, and up to the end of each
        self._blocks: dict[int, int] = {}  # storage -> block, of what is alive
        self._references: dict[int, weakref.ref] = {}
        self._ignored: dict[int, weakref.ref] = {}  # storages that are host memory
        self._phases: list[str] = []
        self._phase = 0
        self._costs: list[tuple[float, float, int, int]] = []
        self._kinds: dict[str, int] = {}
        self._module_codes: dict[str, int] = {"": 0}
        self._stack: list[tuple[int, bool]] = [(0, False)]  # (module, whether what it makes are logits)
        self._category = _CODES[ACTIVATIONS]
        self._logit_width: int | None = None
        self._on_matmul = on_matmul
        self.live_bytes = self.peak_bytes = 0
        self.answered: set[Any] = set()  # operators that were answered instead of run

    @property
    def events(self) -> int:
        """Allocations and frees so far."""
        return len(self._happened)

    @property
    def operations(self) -> int:
        """Kernels so far."""
        return len(self._costs)

    # ---- what is running ----

    def begin_phase(self, name: str) -> None:
        """What follows belongs to phase `name`; the peak starts anew."""
        if name not in self._phases:
            self._phases.append(name)
        self._phase = self._phases.index(name)
        self.peak_bytes = self.live_bytes

    def end_step(self) -> None:
        """To be called before the first optimizer step as well."""
        self._steps.append(len(self._sizes))

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """New storages are of `category` unless their module or shape tells otherwise."""
        before, self._category = self._category, _CODES[category]
        try:
            yield
        finally:
            self._category = before

    def set_category(self, category: str) -> None:
        self._category = _CODES[category]

    def enter_module(self, name: str, makes_logits: bool) -> None:
        code = self._module_codes.setdefault(name, len(self._module_codes))
        self._stack.append((code, makes_logits))

    def leave_module(self) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    def forget_modules(self) -> None:
        """After an exception, or where a forward pass has ended early."""
        del self._stack[1:]

    def watch_logits(self, width: int | None) -> None:
        """Tensors whose last dimension is this wide are logits, whoever makes them: their gradients are made elsewhere."""
        self._logit_width = width

    # ---- storages ----

    def add(self, tensor: torch.Tensor, category: str, module: str = "", micro_batch: int = -1) -> None:
        """Count the storage of `tensor` as allocated now; where it is counted already, name its category and module."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._allocate(storage, _CODES[category])
        self._categories[block] = _CODES[category]
        self._micro_batches[block] = micro_batch
        if module:
            self._modules[block] = self._module_codes.setdefault(module, len(self._module_codes))

    def label(self, tensors: Iterable[tuple[str, torch.Tensor]], category: str) -> None:
        """Name category and module of storages that are counted already; others are let be."""
        code = _CODES[category]
        for module, tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is not None:
                self._categories[block] = code
                if module:
                    self._modules[block] = self._module_codes.setdefault(module, len(self._module_codes))

    def add_bytes(self, size: int, category: str) -> None:
        """Count memory that no tensor stands for, such as a library's workspace, until the end of the run."""
        self._record(size, _CODES[category])

    def on_host(self, tensor: torch.Tensor) -> None:
        """`tensor` is host memory from now on: what the device held for it is given back."""
        key = tensor.untyped_storage()._cdata
        reference = self._references.pop(key, None)
        if reference is not None:
            self._free(key)
        storage = tensor.untyped_storage()
        self._ignored[key] = weakref.ref(storage, lambda _, key=key: self._ignored.pop(key, None))

    def _allocate(self, storage: Any, category: int) -> int:
        key = storage._cdata
        block = self._record(storage.nbytes(), category)
        self._blocks[key] = block
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))
        return block

    def _record(self, size: int, category: int) -> int:
        block = len(self._sizes)
        self._happened.append(block)
        self._event_phases.append(self._phase)
        self._sizes.append(size)
        self._categories.append(category)
        self._modules.append(self._stack[-1][0])
        self._micro_batches.append(-1)
        self._lines.append(running_line())
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return block

    def _gone(self, key: int) -> None:
        if self._references.pop(key, None) is not None:
            self._free(key)

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._happened.append(~block)
        self._event_phases.append(self._phase)
        self.live_bytes -= self._sizes[block]

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ADD and is_in_place(*args, **kwargs):
            func = _ADD_IN_PLACE
        given = answer(func, args, kwargs)
        if given is NotImplemented:
            outputs = func(*args, **kwargs)
        else:
            outputs = given
            self.answered.add(func)
        cost = cost_of(func, args, kwargs, outputs)
        if cost is not None:
            self._count(cost)
        if isinstance(outputs, torch.Tensor):
            self._see(outputs)
        elif isinstance(outputs, (tuple, list)):
            for output in outputs:
                if isinstance(output, torch.Tensor):
                    self._see(output)
        return outputs

    def _count(self, cost: OpCost) -> None:
        flops, moved, kind, kernels = cost
        code = self._kinds.get(kind)
        if code is None:
            code = self._kinds[kind] = len(self._kinds)
        if flops and self._on_matmul is not None:
            self._on_matmul()
        self._costs += [(flops / kernels, moved / kernels, code, self._phase)] * kernels

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise CannotShadowError(f"a tensor of layout {tensor.layout} cannot be traced; turn sparse gradients off")
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks or key in self._ignored:
            return
        is_wide = tensor.dim() > 1 and tensor.shape[-1] == self._logit_width
        self._allocate(storage, _LOGITS if self._stack[-1][1] or is_wide else self._category)

    # ---- the record ----

    def kept(self) -> dict[int, str]:
        """Blocks that the second step made and nothing gives back, and the line of the workload that made each.

        As many of one kind as are there of the first step too: what is made once stays, what is made anew each time
        takes the last one's place. To be called when the trace has been taken: it collects garbage.
        """
        if len(self._steps) < 3:
            return {}
        staying = {_CODES[name] for name in STAYING}

        def alive(step: int) -> Iterator[tuple[tuple[Any, ...], int]]:
            start, stop = self._steps[step : step + 2]
            for block in sorted(self._blocks.values()):
                if start <= block < stop and self._categories[block] not in staying:
                    yield (self._modules[block], self._sizes[block], self._lines[block]), block

        if not any(alive(0)):
            return {}
        gc.collect()
        first = collections.Counter(kind for kind, _ in alive(0))
        found = {}
        for kind, block in alive(1):
            if first[kind] > 0:
                first[kind] -= 1
                found[block] = line_text(self._lines[block])
        return found

    def trace(self, facts: dict[str, Any]) -> Trace:
        """Everything so far. `facts` goes with it."""
        costs = np.array(self._costs, dtype=np.float64).reshape(-1, 4)
        return Trace(
            events=_with_ordered_frees(np.array(self._happened, dtype=np.int64), np.array(self._event_phases)),
            sizes=np.array(self._sizes, dtype=np.int64),
            phases=np.array(self._event_phases, dtype=np.uint8),
            phase_names=tuple(self._phases),
            categories=np.array(self._categories, dtype=np.uint8),
            category_names=CATEGORIES,
            modules=np.array(self._modules, dtype=np.int32),
            module_names=tuple(self._module_codes),
            micro_batches=np.array(self._micro_batches, dtype=np.int16),
            op_flops=costs[:, 0],
            op_bytes=costs[:, 1],
            op_kinds=costs[:, 2].astype(np.uint8),
            op_kind_names=tuple(self._kinds),
            op_phases=costs[:, 3].astype(np.uint8),
            facts=facts,
        )


def _with_ordered_frees(events: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """The same with frees that follow one another ordered by their blocks.

    What is alive before and after them, and what an allocator makes of it, does not depend on their order; and where a
    hash table of pointers is cleared (autocast's cached weights), the order is another one in every run.
    """
    if not len(events):
        return events
    is_free = events < 0
    # A new group at every allocation, at the first free after one, and at every change of phase.
    starts = np.ones(len(events), dtype=bool)
    starts[1:] = ~(is_free[1:] & is_free[:-1] & (phases[1:] == phases[:-1]))
    return events[np.lexsort((-events, np.cumsum(starts)))]
