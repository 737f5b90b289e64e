"""What a training keeps and never gives back: read after equal steps, and after evaluations of the same rows.

On the host that is what malloc has given out (`heap`), on the device what torch has allocated. A reading takes 0.1 ms, after
an evaluation some more for its processes. Only where something looks like a leak, equal steps or evaluations are added, with
garbage collected before each reading; what grows in every one of them is one.

Not here: who holds it (`leak_holders`), and whether it fits the budget (`study.judgement`).
"""

import dataclasses
import gc
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autofit.harness.heap import heap_bytes
from autofit.harness.leak_holders import KeptTensors
from autofit.leak_words import MUCH_BYTES
from autofit.machine import private_bytes, process_tree, tree_bytes
from autofit.records import LeakCheck

MUCH_SHARE = 0.02  # of what the process tree holds; a training that keeps less in all is let be
STEP_FLOOR, EVALUATION_FLOOR = 16 * 2**10, 64 * 2**10  # bytes; several times what equal ones differ by
STEADY = 0.5  # of the median growth, that each repetition of a leak grows by at least
MORE_STEPS = 4  # that confirm
FIXED = 0.1  # an evaluation of half the rows that keeps as much but for this share keeps the same of any number


@dataclass(frozen=True)
class Level:
    """What is in use at one place. On the CPU the device's bytes are this process's host memory."""

    device_bytes: int = 0
    host_bytes: int = 0  # of this process: what malloc has given out, and small Python objects
    processes: int = 0  # that descend from this one
    process_bytes: int = 0  # that would be free if those were gone
    files: int = 0  # descriptors

    def since(self, before: "Level") -> "Level":
        """By how much it is more. Processes' memory counts where there are more of them: that of each varies."""
        more = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in dataclasses.fields(Level)}
        if more["processes"] <= 0:
            more["process_bytes"] = 0
        return Level(**more)

    @property
    def tree_bytes(self) -> int:
        return self.host_bytes + self.process_bytes

    @property
    def largest(self) -> int:
        return max(self.device_bytes, self.tree_bytes)


class LeakWatch:
    """The readings of one probe, in the order of its schedule, and what they come to in `check`."""

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self._planned_steps: int | None = None
        self._planned_evaluations: int | None = None
        self._steps: list[tuple[int, Level]] = []  # (steps so far, level)
        self._evaluations: dict[int, list[Level]] = {}  # by the number of rows
        self._works = meter.name != "shadow" and heap_bytes() is not None
        self.check: LeakCheck | None = None  # None: nothing was compared

    def plan(self, steps: int | None, evaluations: int | None) -> None:
        """Those that the user's own training would make; None where they are not known."""
        self._planned_steps, self._planned_evaluations = steps, evaluations

    # ---- readings ----

    def begin_steps(self) -> None:
        """The steps that follow are equal to each other, and not to those before."""
        self._steps = []

    def step_ended(self, steps: int) -> None:
        """`steps`: so many in all, at a place that is equal to the last one."""
        if self._works:
            self._steps.append((steps, self._read()))

    def evaluation_ended(self, rows: int) -> None:
        """`rows`: so many, and the same as at the last call with this number."""
        if self._works:
            self._evaluations.setdefault(rows, []).append(self._read_tree())

    @property
    def evaluated_twice(self) -> bool:
        """Whether some rows were evaluated more than once, or nothing would come of it."""
        return not self._works or any(len(series) > 1 for series in self._evaluations.values())

    def _read(self) -> Level:
        host = heap_bytes() or 0
        if self._meter.name == "cpu":
            return Level(host, host)
        return Level(self._meter.held_bytes() - (self._meter.context_bytes or 0), host)

    def _read_tree(self) -> Level:
        told = [private_bytes(pid) for pid in process_tree(os.getpid())[1:]]
        held = [size for size in told if size is not None]  # of those that have not ended meanwhile
        files = len(os.listdir("/proc/self/fd"))
        return dataclasses.replace(self._read(), processes=len(held), process_bytes=sum(held), files=files)

    # ---- steps ----

    def suspects_steps(self) -> bool:
        """Whether the steps of this series keep something that comes to much over the whole training."""
        grown = step_growth(self._steps)
        if not grown:
            return False
        self._note()
        largest = middle(grown).largest
        return largest >= STEP_FLOOR and self._matters(largest * (self._planned_steps or 1))

    def confirm_steps(self, step: str, steps: Callable[[], int]) -> Iterator[str]:
        """Yield `step` for more of them, all equal to each other, and keep what was suspected if it goes on.

        `steps` tells how many there were. The figure is that of the suspected series where it is the longer one: that
        of typical rows. The other one is of the longest.
        """
        series, tensors = [], KeptTensors()
        for turn in range(MORE_STEPS + 1):
            gc.collect()
            series.append((steps(), self._read()))
            tensors.look()
            if turn < MORE_STEPS:
                yield step
        grown, before = step_growth(series), step_growth(self._steps)
        if not is_steady(grown) or middle(grown).largest < max(STEP_FLOOR, STEADY * middle(before).largest):
            return  # what was suspected came once
        one = middle(before if self._steps[-1][0] - self._steps[0][0] > MORE_STEPS else grown)
        self._note(
            device_bytes_per_step=float(max(one.device_bytes, 0)),
            host_bytes_per_step=float(max(one.host_bytes, 0)),
            holders=tensors.holders(),
        )

    # ---- evaluations ----

    def suspects_evaluations(self, rows_total: int) -> bool:
        """Whether evaluations keep something that comes to much where each is of `rows_total` rows."""
        suspect = False
        for rows, series in self._evaluations.items():
            grown = [after.since(before) for before, after in pairwise(series)]
            if not grown:
                continue
            self._note()
            one = middle(grown)
            whole = one.largest * max(rows_total / max(rows, 1), 1.0)
            much = one.largest >= EVALUATION_FLOOR and self._matters(whole * (self._planned_evaluations or 1))
            suspect |= much or one.processes > 0
        return suspect

    def confirm_evaluations(
        self, turns: Sequence[tuple[int, Callable[[], Iterator[str]]]], rows_total: int
    ) -> Iterator[str]:
        """Go through `turns`, evaluations of so many rows, each number of rows three times in a row; keep what one adds."""
        tensors, levels = KeptTensors(), []
        for _, evaluate in turns:
            yield from evaluate()
            gc.collect()
            levels.append(self._read_tree())
            tensors.look()
        one = evaluation_growth([count for count, _ in turns], levels, rows_total)
        if one is None or not (one.processes > 0 or self._matters(one.largest * (self._planned_evaluations or 1))):
            return
        self._note(
            device_bytes_per_evaluation=float(max(one.device_bytes, 0)),
            host_bytes_per_evaluation=float(max(one.tree_bytes, 0)),
            processes_per_evaluation=max(one.processes, 0),
            files_per_evaluation=max(one.files, 0),
            holders=tuple(dict.fromkeys((*self.check.holders, *tensors.holders()))),
        )

    def _matters(self, grown: float) -> bool:
        """Whether a training that keeps so many bytes in all is told of."""
        return grown > max(MUCH_BYTES, MUCH_SHARE * tree_bytes(os.getpid()))

    def _note(self, **found: Any) -> None:
        before = self.check or LeakCheck(steps=self._planned_steps, evaluations=self._planned_evaluations)
        self.check = dataclasses.replace(before, **found)


def step_growth(series: Sequence[tuple[int, Level]]) -> list[Level]:
    """By how much each reading is above the one before, for one step."""
    found = []
    for (first, before), (last, after) in pairwise(series):
        more, count = after.since(before), max(last - first, 1)
        found.append(Level(more.device_bytes // count, more.host_bytes // count))
    return found


def evaluation_growth(counts: Sequence[int], levels: Sequence[Level], rows_total: int) -> Level | None:
    """What one evaluation of `rows_total` rows adds, from some of `counts` rows; None where not all of them add to it.

    `levels`: after each. Only what follows one of as many rows says something, since results of the last one may be held.
    What is kept is some bytes for each row and some for each evaluation; the memory of processes is not taken to grow
    with rows, since what they touch they hold once.
    """
    grown: dict[int, list[Level]] = {}
    for (last, before), (count, after) in pairwise(zip(counts, levels, strict=True)):
        if count == last:
            grown.setdefault(count, []).append(after.since(before))
    if not grown or not all(map(is_steady, grown.values())):
        return None
    many, few = max(grown), min(grown)
    of_many, of_few = middle(grown[many]), middle(grown[few])

    def whole(name: str) -> int:
        most, less = getattr(of_many, name), getattr(of_few, name)
        if many == few or most - less <= FIXED * most:
            return most
        per_row = (most - less) / (many - few)
        return int(max(most - per_row * many, 0) + per_row * rows_total)

    return dataclasses.replace(of_many, device_bytes=whole("device_bytes"), host_bytes=whole("host_bytes"))


def is_steady(grown: Sequence[Level]) -> bool:
    """Whether each repetition adds about as much: what is made once, or comes and goes, does not."""
    if not grown:
        return False
    one = middle(grown)
    if one.processes > 0 and all(more.processes > 0 for more in grown):
        return True
    return one.largest > 0 and all(more.largest >= STEADY * one.largest for more in grown)


def middle(grown: Sequence[Level]) -> Level:
    """The median of each figure."""
    names = [f.name for f in dataclasses.fields(Level)]
    return Level(**{name: int(statistics.median(getattr(one, name) for one in grown)) for name in names})
