"""What a shadow run recorded, and what follows from it without another run.

A trace is the list of every allocation and free of a run, with its phase, and what each block was for. Replayed through the
simulated allocator it tells what CUDA reserves; without one it tells what is alive, byte by byte, which is what the CPU takes.

Nothing here needs torch. Not here: the trace of another batch size (`family`).
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from autofit.harness.shadow.allocator import Allocator, AllocatorOutOfMemory, AllocatorSettings, round_sizes

VERSION = 1  # of the file; one of another version is made anew, never migrated

_ARRAYS = {
    "events": np.int64,
    "sizes": np.int64,
    "phases": np.uint8,
    "categories": np.uint8,
    "modules": np.int32,
    "micro_batches": np.int16,
    "op_flops": np.float64,
    "op_bytes": np.float64,
    "op_kinds": np.uint8,
    "op_phases": np.uint8,
}


@dataclass(frozen=True, eq=False)
class Trace:
    """One run. Blocks are numbered; each is allocated once and freed at most once. Raises ValueError for anything else."""

    events: np.ndarray  # int64: k >= 0, block k is allocated; ~k, it is freed
    sizes: np.ndarray  # int64 by block: bytes asked for
    phases: np.ndarray  # uint8 by event: index of phase_names
    phase_names: tuple[str, ...]
    categories: np.ndarray  # uint8 by block: index of category_names
    category_names: tuple[str, ...]
    modules: np.ndarray  # int32 by block: index of module_names, the module that made the block; "" for none
    module_names: tuple[str, ...]
    micro_batches: np.ndarray  # int16 by block: of the batch, its place in its accumulation window; else -1
    op_flops: np.ndarray  # float64 by operation, in order
    op_bytes: np.ndarray  # float64 by operation: read and written
    op_kinds: np.ndarray  # uint8 by operation: index of op_kind_names
    op_kind_names: tuple[str, ...]
    op_phases: np.ndarray  # uint8 by operation: index of phase_names
    facts: dict[str, Any] = field(default_factory=dict)  # JSON values: batch, eval_batch, accumulation, …

    def __post_init__(self):
        for name, kind in _ARRAYS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        for name in ("phase_names", "category_names", "module_names", "op_kind_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check()

    def _check(self) -> None:
        lengths = {
            "phases": self.events,
            **dict.fromkeys(["categories", "modules", "micro_batches"], self.sizes),
            **dict.fromkeys(["op_bytes", "op_kinds", "op_phases"], self.op_flops),
        }
        for name, like in lengths.items():
            if len(getattr(self, name)) != len(like):
                raise ValueError(f"a trace with {len(getattr(self, name))} {name} where there should be {len(like)}")
        for indices, names in [
            (self.phases, self.phase_names),
            (self.op_phases, self.phase_names),
            (self.categories, self.category_names),
            (self.modules, self.module_names),
            (self.op_kinds, self.op_kind_names),
        ]:
            if len(indices) and not 0 <= indices.min() <= indices.max() < len(names):
                raise ValueError(f"a trace with an index outside its names {names}")
        if len(self.sizes) and self.sizes.min() < 0:
            raise ValueError(f"a trace with a block of {self.sizes.min()} bytes")
        blocks = self.blocks
        if len(blocks) and blocks.max() >= len(self.sizes):
            raise ValueError(f"a trace with an event of block {blocks.max()} of {len(self.sizes)}")
        made = np.bincount(blocks[self.events >= 0], minlength=len(self.sizes))
        gone = np.bincount(blocks[self.events < 0], minlength=len(self.sizes))
        if (made != 1).any() or (gone > 1).any() or (self.freed_at <= self.allocated_at).any():
            raise ValueError("a trace with a block that is not allocated once, or freed before or twice")

    @cached_property
    def allocated_at(self) -> np.ndarray:
        """By block, the event that allocates it."""
        at = np.empty(len(self.sizes), dtype=np.int64)
        where = np.flatnonzero(self.events >= 0)
        at[self.events[where]] = where
        return at

    @cached_property
    def freed_at(self) -> np.ndarray:
        """By block, the event that frees it; the number of events where none does."""
        at = np.full(len(self.sizes), len(self.events), dtype=np.int64)
        where = np.flatnonzero(self.events < 0)
        at[~self.events[where]] = where
        return at

    @cached_property
    def blocks(self) -> np.ndarray:
        """By event, the block that it is about."""
        return np.where(self.events < 0, ~self.events, self.events)

    @cached_property
    def live_bytes(self) -> np.ndarray:
        """By event, the bytes alive after it, each block counted as asked."""
        return np.cumsum(_changes(self, self.sizes))

    def save(self, path: str | PathLike[str]) -> None:
        """Write to `path` itself, under any name, as .npz without pickles. Not atomic: that is the caller's."""
        texts = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _ARRAYS}
        header = json.dumps({"version": VERSION, **texts}).encode()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        with open(path, "wb") as file:
            np.savez_compressed(file, header=np.frombuffer(header, dtype=np.uint8), **arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Trace":
        """What `save` wrote. Raises ValueError for a file of another version or one that is damaged."""
        try:
            with np.load(path, allow_pickle=False) as file:
                header = json.loads(file["header"].tobytes())
                arrays = {name: file[name] for name in _ARRAYS if name in file}
            version = header.pop("version")
            if version != VERSION:
                raise ValueError(f"it has version {version}, and this autofit reads {VERSION}")
            return cls(**arrays, **header)
        except FileNotFoundError:
            raise
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OSError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            raise ValueError(
                f"{path} is no trace that can be read: {error}. Delete it to have it made again"
            ) from error


@dataclass(frozen=True)
class PhasePeaks:
    """The highest that one phase saw, what it found at its start included. Without an allocator the two are the same."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class OutOfMemory:
    """Where a replay ended because the cap left no room."""

    phase: str
    event: int
    requested_bytes: int  # as asked
    allocated_bytes: int  # at that moment, without what was asked
    reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """What a trace takes. After running out of memory, what it took until then."""

    peaks: dict[str, PhasePeaks]  # by phase, in order of first appearance
    peak_event: int | None  # the first event after which the most was allocated; None without events
    out_of_memory: OutOfMemory | None = None
    retries: int = 0  # allocations that made everything free return to the device first

    @property
    def peak_allocated_bytes(self) -> int:
        return max((one.allocated_bytes for one in self.peaks.values()), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        return max((one.reserved_bytes for one in self.peaks.values()), default=0)


def replay(trace: Trace, settings: AllocatorSettings | None, base_bytes: int = 0) -> Replay:
    """Run a trace through the allocator; with settings None count live bytes as asked, as the CPU does.

    `base_bytes` is held throughout beside the trace: every peak includes it, and it counts against the cap.
    """
    if settings is None:
        return _replay_live(trace, base_bytes)
    if settings.cap_bytes is not None:
        settings = replace(settings, cap_bytes=settings.cap_bytes - base_bytes)
    allocator = Allocator(settings)
    take, free = allocator.take, allocator.free
    sizes = round_sizes(trace.sizes, settings.roundup_power2_divisions)
    places = np.flatnonzero(sizes[trace.blocks])  # of the events that count: blocks of zero bytes take nothing
    events, rounded = trace.events[places].tolist(), sizes.tolist()
    handles: list[Any] = [None] * len(rounded)
    granted: list[int] = []  # bytes, in order of allocation
    grant = granted.append
    peaks: dict[str, PhasePeaks] = {}
    out_of_memory = None
    for start, stop, phase in _runs(trace):
        allocator.reset_peaks()
        try:
            for event in events[np.searchsorted(places, start) : np.searchsorted(places, stop)]:
                if event >= 0:
                    handles[event] = block = take(rounded[event])
                    grant(block.size)
                else:
                    free(handles[~event])
        except AllocatorOutOfMemory as error:
            place = int(places[trace.events[places] >= 0][len(granted)])
            out_of_memory = OutOfMemory(
                phase=phase,
                event=place,
                requested_bytes=int(trace.sizes[trace.events[place]]),
                allocated_bytes=error.allocated_bytes + base_bytes,
                reserved_bytes=error.reserved_bytes + base_bytes,
            )
        _raise_peak(peaks, phase, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, base_bytes)
        if out_of_memory is not None:
            break
    by_block = np.zeros(len(sizes), dtype=np.int64)
    allocations = trace.events[places]
    by_block[allocations[allocations >= 0][: len(granted)]] = granted
    # Blocks beyond an early end count nothing, and neither do their frees.
    allocated = np.cumsum(_changes(trace, by_block))[: None if out_of_memory is None else out_of_memory.event]
    return Replay(peaks, int(allocated.argmax()) if len(allocated) else None, out_of_memory, allocator.retries)


def _replay_live(trace: Trace, base_bytes: int) -> Replay:
    live = trace.live_bytes
    peaks: dict[str, PhasePeaks] = {}
    for start, stop, phase in _runs(trace):
        peak = max(int(live[start:stop].max()), int(live[start - 1]) if start else 0)
        _raise_peak(peaks, phase, peak, peak, base_bytes)
    return Replay(peaks, int(live.argmax()) if len(live) else None)


def _raise_peak(peaks: dict[str, PhasePeaks], phase: str, allocated: int, reserved: int, base_bytes: int) -> None:
    before = peaks.get(phase, PhasePeaks(0, 0))
    peaks[phase] = PhasePeaks(
        max(before.allocated_bytes, allocated + base_bytes), max(before.reserved_bytes, reserved + base_bytes)
    )


def breakdown(trace: Trace, event: int) -> dict[str, int]:
    """Bytes alive after `event` by category, the largest first, as asked: the allocator's rounding is not in them."""
    return _sum_by_name(trace, event, trace.categories, trace.category_names)


def by_module(trace: Trace, event: int, top: int = 10) -> dict[str, int]:
    """Bytes alive after `event` by the module that made them, the `top` largest first."""
    sums = _sum_by_name(trace, event, trace.modules, trace.module_names)
    return dict(list(sums.items())[:top])


def _sum_by_name(trace: Trace, event: int, indices: np.ndarray, names: tuple[str, ...]) -> dict[str, int]:
    if not 0 <= event < len(trace.events):
        raise ValueError(f"event {event} of a trace with {len(trace.events)}")
    alive = (trace.allocated_at <= event) & (event < trace.freed_at)
    sums = np.zeros(len(names), dtype=np.int64)
    np.add.at(sums, indices[alive], trace.sizes[alive])
    return {names[i]: int(sums[i]) for i in np.argsort(-sums, kind="stable") if sums[i]}


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes alive after some of a trace's events, as asked: enough of them to draw."""

    events: np.ndarray  # int64, increasing
    phases: tuple[str, ...]  # by point
    total_bytes: np.ndarray  # by point
    category_bytes: Mapping[str, np.ndarray]  # category -> by point; they add up to the total


def timeline(trace: Trace, points: int = 400) -> Timeline:
    """At most `points` points: of equal stretches of events, the one with the most bytes; and the last event of all.

    So the highest point of the trace is among them, and what a plot shows between two points is never too low.
    """
    if points < 2:
        raise ValueError(f"a timeline of {points} points: it takes two or more")
    total, count = trace.live_bytes, len(trace.events)
    if count > points:
        edges = np.linspace(0, count, points, dtype=np.int64)
        highest = [start + int(total[start:stop].argmax()) for start, stop in zip(edges[:-1], edges[1:], strict=True)]
        chosen = np.unique([*highest, count - 1])
    else:
        chosen = np.arange(count)
    changes, categories = _changes(trace, trace.sizes), trace.categories[trace.blocks]
    return Timeline(
        events=chosen,
        phases=tuple(trace.phase_names[i] for i in trace.phases[chosen]),
        total_bytes=total[chosen],
        category_bytes={
            trace.category_names[code]: np.cumsum(np.where(categories == code, changes, 0))[chosen]
            for code in np.unique(categories).tolist()
        },
    )


def _changes(trace: Trace, sizes: np.ndarray) -> np.ndarray:
    """By event, by how much it changes a sum of `sizes` over live blocks."""
    changes = sizes[trace.blocks]
    return np.where(trace.events < 0, -changes, changes)


def _runs(trace: Trace) -> list[tuple[int, int, str]]:
    """Stretches of events of one phase: (first, end, phase)."""
    if not len(trace.phases):
        return []
    starts = [0, *(np.flatnonzero(np.diff(trace.phases.astype(np.int16))) + 1).tolist()]
    names = [trace.phase_names[trace.phases[start]] for start in starts]
    return list(zip(starts, [*starts[1:], len(trace.phases)], names, strict=True))


def index_of(names: tuple[str, ...], name: str) -> int:
    """-1 where there is none."""
    return names.index(name) if name in names else -1
