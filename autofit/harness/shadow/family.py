"""The traces of one program at every batch size, from two of them.

From batch 2 on the list of events is the same at every batch size, and every size in it is affine in the batch: traces at 2
and 3 give a `Family` that writes the trace of any other batch. Peaks are not affine, their maximum moves; so the events are
rewritten and replayed, never the peaks extrapolated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autofit.harness.shadow.trace import Trace, index_of

EVALUATE = "evaluate"  # the phase whose rows are those of the evaluation batch
TRACED_ACCUMULATION = 2  # micro-batches per step in a trace for `with_accumulation`: more change only what is fetched


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


def _is_phase(trace: Trace, phases: np.ndarray, name: str = EVALUATE) -> np.ndarray:
    return phases == index_of(trace.phase_names, name)


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
