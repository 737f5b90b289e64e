"""What a real device says of memory and time: the CPU, and CUDA behind a counter interface that tests can fake.

A meter lives in one child and is asked in this order: `attach` when the Trainer is about to be constructed, `enter_training`
when it is about to train (which closes the loading), then `begin_phase` and `peaks` around each phase, and `release` before the reply is written.
Not here: what a phase is (`phases`), and other processes on the device (the parent watches those).
"""

import contextlib
import ctypes
import gc
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MiB = 2**20


@dataclass(frozen=True)
class Peaks:
    """Since the phase began. Bytes; None where the device does not tell."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    retries: int | None


class DeviceMeter(Protocol):
    name: str
    cap: str  # enforced, judged or none
    context_bytes: int | None

    def attach(self, budget_bytes: int | None) -> None: ...
    def enter_training(self, model: Any, budget_bytes: int | None) -> Peaks: ...
    def begin_phase(self) -> None: ...
    def peaks(self) -> Peaks: ...
    def settle(self) -> None: ...
    def held_bytes(self) -> int: ...
    def held_peak(self) -> int: ...
    def live_window(self) -> contextlib.AbstractContextManager[Callable[[], int | None]]: ...
    def synchronize(self) -> None: ...
    def free_share(self) -> float | None: ...
    def release(self) -> None: ...


def make_meter(device: str) -> "DeviceMeter":
    return CpuMeter() if device == "cpu" else CudaMeter(TorchCudaCounters())


class BudgetBelowWeightsError(Exception):
    """The weights alone are larger than the budget; raised into the harness, which replies `device_oom`."""


class CpuMeter:
    """Resident memory of this process above its state after warm-up, the model's own weights counted.

    `allocated` is live tensor bytes, read in an untimed window by torch's own profiler hook in the CPU allocator;
    `reserved` is the growth of peak resident memory, which malloc levels off only after a few steps. The cap is the soft
    RLIMIT_DATA: private writable memory of this process, so that a candidate above the budget really runs out.
    """

    name = "cpu"
    context_bytes = None

    def __init__(self) -> None:
        self.cap = "none"
        self._base_resident = self._base_file = 0
        self._old_limit: tuple[int, int] | None = None

    def attach(self, budget_bytes: int | None) -> None:
        """Nothing: on the CPU what the workload did before it trains (data, imports) is no device memory."""

    def enter_training(self, model: Any, budget_bytes: int | None) -> Peaks:
        """Warm up, set the zero point, then the cap. What loading holds is the weights: all else lies below the zero."""
        _warm_up_cpu()
        weights = tensor_bytes(_state_tensors(model))
        _touch(model)
        self.settle()
        status = _status_bytes()
        self._base_resident = status["VmRSS"] - weights
        self._base_file = status.get("RssFile", 0)
        if budget_bytes is not None:
            if weights > budget_bytes:
                raise BudgetBelowWeightsError(
                    f"the model's weights alone take {weights / MiB:.0f} MiB and the budget is {budget_bytes / MiB:.0f} MiB"
                )
            self._set_cap(status["VmData"] + budget_bytes - weights)
        self.begin_phase()
        return Peaks(None, None, weights, None)

    def _set_cap(self, data_bytes: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            data_bytes = min(data_bytes, hard)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, hard))
        except (OSError, ValueError):  # a sandbox without the call: the peak is judged afterwards
            self.cap = "judged"
        else:
            self._old_limit, self.cap = (soft, hard), "enforced"

    def begin_phase(self) -> None:
        _reset_resident_peak()

    def peaks(self) -> Peaks:
        grown = self.held_peak()
        return Peaks(None, grown, grown, None)

    def settle(self) -> None:
        """Give back what malloc keeps free: what comes next would use it again, and `held_bytes` counts it."""
        gc.collect()
        _trim_heap()

    def held_bytes(self) -> int:
        """Bytes in use now, in the terms of the budget."""
        return self._above_zero("VmRSS")

    def held_peak(self) -> int:
        """The highest `held_bytes` since the phase began."""
        return self._above_zero("VmHWM")

    def _above_zero(self, name: str) -> int:
        """Without what files have brought in since (kernels' code, a mapped data set): the system takes it back when it
        has need, and the cap does not count it either."""
        status = _status_bytes()
        from_files = max(status.get("RssFile", 0) - self._base_file, 0)
        return max(status[name] - self._base_resident - from_files, 0)

    @contextlib.contextmanager
    def live_window(self) -> Iterator[Callable[[], int | None]]:
        """Peak of live tensor bytes in the window: what was alive when it opened, and what torch allocated since.

        To be opened between two optimizer steps, when gradients are gone: what is freed without having been allocated
        in the window is not seen. The function that the context gives is to be called after the window has closed.
        """
        alive = tensor_bytes(_watched_tensors())
        peak: int | None = None
        with torch_allocations() as highest:
            yield lambda: peak
        peak = alive + highest()

    def synchronize(self) -> None:
        """Nothing: CPU operators return when they are done."""

    def free_share(self) -> float | None:
        return None

    def release(self) -> None:
        """Lift the cap, so that the reply can be written."""
        if self._old_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._old_limit)
            self._old_limit = None


class CudaCounters(Protocol):
    """The counters of one CUDA device, as one process sees them. Bytes."""

    def touch(self) -> None: ...
    def total_bytes(self) -> int: ...
    def free_bytes(self) -> int: ...
    def allocated_bytes(self) -> int: ...
    def reserved_bytes(self) -> int: ...
    def peak_allocated_bytes(self) -> int: ...
    def peak_reserved_bytes(self) -> int: ...
    def reset_peaks(self) -> None: ...
    def empty_cache(self) -> None: ...
    def retries(self) -> int: ...
    def set_fraction(self, fraction: float) -> None: ...
    def synchronize(self) -> None: ...
    def process_bytes(self) -> int | None: ...
    def used_bytes_without_context(self) -> int | None: ...


class CudaMeter:
    """Torch's allocator counters, and what the process holds beyond them (context, kernels, libraries).

    The budget counts process bytes: reserved plus context. The cap is torch's memory fraction after the context has
    been subtracted; it caps torch's own memory only, so process bytes are judged on top. The context is measured again
    at the end of every phase, since kernels load lazily.
    """

    name = "cuda"

    def __init__(self, counters: CudaCounters) -> None:
        self._counters = counters
        self.cap = "none"
        self.context_bytes: int | None = None
        self._used_before: int | None = None
        self._retries_before = 0

    def attach(self, budget_bytes: int | None) -> None:
        """Make the context, measure it with one kernel run, and cap torch's share of the budget."""
        counters = self._counters
        self._used_before = counters.used_bytes_without_context()
        counters.touch()
        self._measure_context()
        if budget_bytes is not None:
            share = (budget_bytes - (self.context_bytes or 0)) / counters.total_bytes()
            if share <= 0:
                raise BudgetBelowWeightsError(
                    f"the device context alone takes {(self.context_bytes or 0) / MiB:.0f} MiB "
                    f"and the budget is {budget_bytes / MiB:.0f} MiB"
                )
            counters.set_fraction(min(share, 1.0))
            self.cap = "enforced"
        self.begin_phase()

    def _measure_context(self) -> None:
        """NVML's figure for this process, else the driver's growth since before the context existed; never shrinking."""
        counters = self._counters
        held = counters.process_bytes()
        if held is None and self._used_before is not None:
            held = counters.total_bytes() - counters.free_bytes() - self._used_before
        if held is not None:
            context = max(held - counters.reserved_bytes(), 0)
            self.context_bytes = max(context, self.context_bytes or 0)

    def enter_training(self, model: Any, budget_bytes: int | None) -> Peaks:
        """The peaks of loading, whose cached blocks are given back, so that none of it counts as training."""
        peaks = self.peaks()
        self._counters.empty_cache()
        self.begin_phase()
        return peaks

    def begin_phase(self) -> None:
        self._counters.reset_peaks()
        self._retries_before = self._counters.retries()

    def peaks(self) -> Peaks:
        self._measure_context()
        reserved = self._counters.peak_reserved_bytes()
        return Peaks(
            self._counters.peak_allocated_bytes(),
            reserved,
            reserved + (self.context_bytes or 0),
            self._counters.retries() - self._retries_before,
        )

    def settle(self) -> None:
        """Nothing: live bytes are counted, and cached blocks are not among them."""

    def held_bytes(self) -> int:
        """Live tensors and the context: cached blocks are free for what comes next, so they are not in use."""
        return self._counters.allocated_bytes() + (self.context_bytes or 0)

    def held_peak(self) -> int:
        return self._counters.peak_allocated_bytes() + (self.context_bytes or 0)

    @contextlib.contextmanager
    def live_window(self) -> Iterator[Callable[[], int | None]]:
        """Nothing to add: CUDA counts live bytes all the time, and `peaks` tells them."""
        yield lambda: None

    def synchronize(self) -> None:
        self._counters.synchronize()

    def free_share(self) -> float | None:
        """Share of the device, or of the cap where there is one, that was free; what decides an ambiguous message."""
        total = self._counters.total_bytes()
        return self._counters.free_bytes() / total if total else None

    def release(self) -> None:
        if self.cap == "enforced":
            self._counters.set_fraction(1.0)


class TorchCudaCounters:
    """The current device's counters through torch and NVML."""

    def __init__(self) -> None:
        from autofit.machine import Nvml

        self._nvml = Nvml.open()

    def touch(self) -> None:
        import torch

        # One matmul with its backward: makes the context, the cuBLAS handles and the autograd thread's workspace.
        a = torch.ones(64, 64, device="cuda", requires_grad=True)
        (a @ a).sum().backward()
        torch.cuda.synchronize()

    def total_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[1]

    def free_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[0]

    def allocated_bytes(self) -> int:
        import torch

        return torch.cuda.memory_allocated()

    def reserved_bytes(self) -> int:
        import torch

        return torch.cuda.memory_reserved()

    def peak_allocated_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()

    def peak_reserved_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_reserved()

    def reset_peaks(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def retries(self) -> int:
        import torch

        return torch.cuda.memory_stats().get("num_alloc_retries", 0)

    def set_fraction(self, fraction: float) -> None:
        import torch

        torch.cuda.set_per_process_memory_fraction(fraction)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def process_bytes(self) -> int | None:
        import os

        import torch

        if self._nvml is None:
            return None
        return self._nvml.process_bytes(str(torch.cuda.get_device_properties().uuid), os.getpid())

    def used_bytes_without_context(self) -> int | None:
        import os

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if self._nvml is None or not visible:
            return None
        return self._nvml.used_bytes(visible.split(",")[0])


def tensor_bytes(tensors: Iterator[Any]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = storage.nbytes()  # not its address: fake tensors have none
    return sum(seen.values())


def _state_tensors(model: Any) -> Iterator[Any]:
    if model is not None:
        yield from model.parameters()
        yield from model.buffers()


@contextlib.contextmanager
def torch_allocations() -> Iterator[Callable[[], int]]:
    """The context gives a function that tells, after its end, the highest sum of what torch allocated on the CPU in it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    highest = grown = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as window:
        yield lambda: highest
    events = [e for e in window.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            grown += event.nbytes()
            highest = max(highest, grown)


_WATCHED: list[Any] = []


def watch_training(model: Any, optimizer: Any) -> None:
    """Count these among what is alive in `live_window`. To be told once training has begun: `model_init` makes another."""
    _WATCHED[:] = [model, optimizer]


def _watched_tensors() -> Iterator[Any]:
    import torch

    if _WATCHED:
        model, optimizer = _WATCHED
        yield from _state_tensors(model)
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _warm_up_cpu() -> None:
    """One small training step and one profiler window, so that thread pools, kernels and hooks are not counted later.

    Everything is made and gone inside the window: torch remembers the size of a block that was allocated in a window and
    freed outside, and counts it in the next one, when something else is freed at its address.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    def train() -> None:
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 64),
            torch.nn.LayerNorm(64),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(64, 4),
        )
        optimizer = torch.optim.AdamW(network.parameters())
        torch.nn.functional.cross_entropy(network(torch.randn(32, 64)), torch.zeros(32, dtype=torch.long)).backward()
        optimizer.step()

    state = torch.get_rng_state()
    with torch.enable_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        train()
        gc.collect()
    torch.set_rng_state(state)


def _touch(model: Any) -> None:
    """Read one value per page of the weights, so that lazily mapped files are resident before the zero point."""
    for tensor in _state_tensors(model):
        if tensor.numel() and not tensor.is_meta:
            tensor.detach().reshape(-1)[:: max(4096 // tensor.element_size(), 1)].sum()


def _trim_heap() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


_STATUS_LINE = re.compile(r"^(Vm\w+|RssFile):\s+(\d+) kB$", re.MULTILINE)


def _status_bytes() -> dict[str, int]:
    """VmRSS, VmHWM, VmData, RssFile … of this process, in bytes."""
    return {name: int(kib) * 1024 for name, kib in _STATUS_LINE.findall(Path("/proc/self/status").read_text())}


def _reset_resident_peak() -> None:
    """Set VmHWM to the present resident size (proc(5), clear_refs 5)."""
    with contextlib.suppress(OSError):  # refused in some sandboxes: the peak is then that of the whole process
        Path("/proc/self/clear_refs").write_text("5")
