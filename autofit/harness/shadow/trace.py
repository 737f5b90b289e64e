"""What a shadow run recorded, and what follows from it without another run.

A trace is the list of every allocation and free of a run, with its phase, and what each block was for. From batch 2 on
the list is the same at every batch size, and every size in it is affine in the batch: two traces, at 2 and 3, give a
`Family` that writes the trace of any other batch. Peaks are not affine, their maximum moves; so the events are rewritten and
replayed, never the peaks extrapolated. Replayed through the simulated allocator a trace tells what CUDA reserves; without
one it tells what is alive, byte by byte, which is what the CPU takes.

Nothing here needs torch.
"""

import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from autofit.harness.shadow.allocator import Allocator, AllocatorOutOfMemory, AllocatorSettings, round_sizes

VERSION = 1  # of the file; one of another version is made anew, never migrated
EVALUATE = "evaluate"  # the phase whose rows are those of the evaluation batch
TRACED_ACCUMULATION = 2  # micro-batches per step in a trace for `with_accumulation`: more change only what is fetched

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


class TracesDifferError(ValueError):
    """Two traces that are not one program at two batch sizes: the other batch sizes have to be traced themselves."""


@dataclass(frozen=True, eq=False)
class Family:
    """The traces of one program at every batch size: each size is `base + slope * rows`.

    Rows are those of the evaluation batch for what is allocated, or computed, in the phase `evaluate`, else those of the
    train batch.
    """

    template: Trace
    size_bases: np.ndarray  # int64 by block
    size_slopes: np.ndarray
    op_bases: np.ndarray  # float64, row 0 flops, row 1 bytes
    op_slopes: np.ndarray

    @cached_property
    def _blocks_of_evaluation(self) -> np.ndarray:
        return _is_phase(self.template, self.template.phases)[self.template.allocated_at]

    @cached_property
    def _ops_of_evaluation(self) -> np.ndarray:
        return _is_phase(self.template, self.template.op_phases)

    def at(self, batch: int, eval_batch: int | None = None) -> Trace:
        """The trace at `batch` rows, and as many or `eval_batch` in evaluation.

        At 1 row PyTorch takes other views and copies than from 2 on: what comes back is then near the truth, not it. Raises
        ValueError for less, and where a size would be negative.
        """
        eval_batch = batch if eval_batch is None else eval_batch
        if batch < 1 or eval_batch < 1:
            raise ValueError(f"batches of {batch} and {eval_batch} rows: a batch has at least one")
        sizes = self.size_bases + self.size_slopes * np.where(self._blocks_of_evaluation, eval_batch, batch)
        ops = self.op_bases + self.op_slopes * np.where(self._ops_of_evaluation, eval_batch, batch)
        facts = {**self.template.facts, "batch": batch, "eval_batch": eval_batch}
        return replace(self.template, sizes=sizes, op_flops=ops[0], op_bytes=ops[1], facts=facts)


def fit(low: Trace, high: Trace) -> Family:
    """The family of two traces, each with one batch for training and evaluation: 2 and 3 rows.

    Raises TracesDifferError, which says where, when they are not one program or a size is not affine in whole bytes.
    Facts that differ belong to a run and not to the family; it drops them.
    """
    batches = []
    for trace in (low, high):
        batch, eval_batch = trace.facts.get("batch"), trace.facts.get("eval_batch")
        if not isinstance(batch, int) or batch != eval_batch:
            raise ValueError(
                f"a trace of batch {batch} and evaluation batch {eval_batch}: a fit needs the same for both"
            )
        batches.append(batch)
    if batches[0] >= batches[1]:
        raise ValueError(f"traces of batch {batches[0]} and {batches[1]}: a fit needs a smaller and a larger one")
    _compare(low, high, *batches)
    step = batches[1] - batches[0]
    slopes, rests = np.divmod(high.sizes - low.sizes, step)
    if rests.any():
        block = int(np.flatnonzero(rests)[0])
        raise TracesDifferError(
            f"{_where(low, int(low.allocated_at[block]))}: {low.sizes[block]} bytes at batch {batches[0]} and "
            f"{high.sizes[block]} at {batches[1]} are not affine in whole bytes"
        )
    costs = np.stack([low.op_flops, low.op_bytes])
    op_slopes = (np.stack([high.op_flops, high.op_bytes]) - costs) / step
    facts = {name: value for name, value in low.facts.items() if high.facts.get(name) == value}
    return Family(
        template=replace(low, facts=facts),
        size_bases=low.sizes - slopes * batches[0],
        size_slopes=slopes,
        op_bases=costs - op_slopes * batches[0],
        op_slopes=op_slopes,
    )


def with_accumulation(trace: Trace, steps: int) -> Trace:
    """A trace of two micro-batches per step, made into one of `steps`.

    The Trainer fetches all micro-batches of a step before the first: those beyond the second are fetched right after it, as it
    was, and live as long. Operations stay those of two; the fact `traced_accumulation` says so.
    """
    traced = trace.facts.get("accumulation")
    if traced != TRACED_ACCUMULATION or steps < TRACED_ACCUMULATION:
        raise ValueError(
            f"accumulation {steps} from a trace of {traced}: it takes one of {TRACED_ACCUMULATION}, for more"
        )
    copies = steps - TRACED_ACCUMULATION
    events, phases, origins = trace.events.tolist(), trace.phases.tolist(), list(range(len(trace.sizes)))
    micro_batches = trace.micro_batches.tolist()
    new_events: list[int] = []
    new_phases: list[int] = []
    copied: dict[int, list[int]] = {}  # block -> its copies that are alive
    fetches = _last_fetches(trace)
    for event, phase in zip(events, phases, strict=True):
        block = event if event >= 0 else ~event
        added = [event, *(~one for one in copied.pop(block, ()))] if event < 0 else [event]
        for micro_batch in range(TRACED_ACCUMULATION, TRACED_ACCUMULATION + copies if event in fetches else 0):
            made: dict[int, int] = {}
            for fetched in fetches[event]:
                if fetched < 0:
                    added.append(~made.pop(~fetched))
                    continue
                made[fetched] = len(origins)
                added.append(len(origins))
                origins.append(fetched)
                micro_batches.append(micro_batch)
            for original, copy in made.items():
                copied.setdefault(original, []).append(copy)
        new_events += added
        new_phases += [phase] * len(added)
    taken = np.array(origins, dtype=np.int64)
    return replace(
        trace,
        events=np.array(new_events, dtype=np.int64),
        phases=np.array(new_phases, dtype=np.uint8),
        sizes=trace.sizes[taken],
        categories=trace.categories[taken],
        modules=trace.modules[taken],
        micro_batches=np.array(micro_batches, dtype=np.int16),
        facts={**trace.facts, "accumulation": steps, "traced_accumulation": TRACED_ACCUMULATION},
    )


def _last_fetches(trace: Trace) -> dict[int, list[int]]:
    """By the event that allocates the last block of a step's last micro-batch: the events that fetched that micro-batch."""
    fetches: dict[int, list[int]] = {}
    group: list[int] = []
    members: set[int] = set()
    last = 0  # how many events of the group lie up to its last allocation

    def close() -> None:
        if members:
            fetches[group[last - 1]] = group[:last]
        group.clear()
        members.clear()

    micro_batches = trace.micro_batches.tolist()
    for place in np.flatnonzero(trace.micro_batches[trace.blocks] >= 0).tolist():
        event = int(trace.events[place])
        if event >= 0 and micro_batches[event] == TRACED_ACCUMULATION - 1:
            group.append(event)
            members.add(event)
            last = len(group)
        elif event >= 0:
            close()  # another step's first micro-batch
        elif ~event in members:
            group.append(event)
    close()
    return fetches


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


def _index(names: tuple[str, ...], name: str) -> int:
    """-1 where there is none."""
    return names.index(name) if name in names else -1


def _is_phase(trace: Trace, phases: np.ndarray, name: str = EVALUATE) -> np.ndarray:
    return phases == _index(trace.phase_names, name)


def _named(indices: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    return np.array(names or ("",))[indices]


def _where(trace: Trace, event: int) -> str:
    """An event in words."""
    module = trace.module_names[trace.modules[trace.blocks[event]]]
    phase = trace.phase_names[trace.phases[event]]
    return f"event {event} (phase {phase}, {f'module {module}' if module else 'no module'})"


def _compare(low: Trace, high: Trace, low_batch: int, high_batch: int) -> None:
    """Raises TracesDifferError at the first event or operation that is not the same."""
    labels: dict[str, Callable[[Trace], np.ndarray]] = {
        "is about another block": lambda one: one.events,
        "is in another phase": lambda one: _named(one.phases, one.phase_names),
        "is of another category": lambda one: _named(one.categories, one.category_names)[one.blocks],
        "is made by another module": lambda one: _named(one.modules, one.module_names)[one.blocks],
        "is of another micro-batch": lambda one: one.micro_batches[one.blocks],
    }
    count = min(len(low.events), len(high.events))
    first: dict[str, int] = {}
    for what, label in labels.items():
        differs = label(low)[:count] != label(high)[:count]
        if differs.any():
            first[what] = int(differs.argmax())
    if first:
        what = min(first, key=lambda one: first[one])
        raise TracesDifferError(f"{_where(low, first[what])} of batch {low_batch} {what} at batch {high_batch}")
    if len(low.events) != len(high.events):
        longer, batch, other = (
            (low, low_batch, high_batch) if len(low.events) > count else (high, high_batch, low_batch)
        )
        raise TracesDifferError(f"{_where(longer, count)} of batch {batch} has no counterpart at batch {other}")
    _compare_ops(low, high, low_batch, high_batch)


def _compare_ops(low: Trace, high: Trace, low_batch: int, high_batch: int) -> None:
    count = min(len(low.op_kinds), len(high.op_kinds))
    kinds = [_named(one.op_kinds, one.op_kind_names) for one in (low, high)]
    phases = [_named(one.op_phases, one.phase_names) for one in (low, high)]
    other = (kinds[0][:count] != kinds[1][:count]) | (phases[0][:count] != phases[1][:count])
    if other.any():
        at = int(other.argmax())
        sides = [
            f"{kind[at]} (phase {phase[at]}) at batch {batch}"
            for kind, phase, batch in zip(kinds, phases, (low_batch, high_batch), strict=True)
        ]
        raise TracesDifferError(f"operation {at} is {' and '.join(sides)}")
    if len(low.op_kinds) != len(high.op_kinds):
        raise TracesDifferError(
            f"there are {len(low.op_kinds)} operations at batch {low_batch} and {len(high.op_kinds)} at {high_batch}"
        )
