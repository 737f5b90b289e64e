"""Which rows of a data set are looked at, once in a process, and what was found: kept for everything that follows.

At most so many rows are read, for at most so long, in an order in which every beginning is spread evenly over the set.
Of a table that holds lists or texts, the lengths of all rows are known without reading one, and the longest are looked
at too. Where the size of a row varies from one reading to the next (random transforms), the largest that were seen are
kept, to be what the worst-case batch is made of. A process that is forked later finds what was read before; one that
starts afresh is told how many rows the first one read, so that it chooses the same. Trainer's own options for the order
of rows are not looked at.
"""

import copy
import dataclasses
import heapq
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from autofit.harness.row_sizes import Measured, Reader, Sizes, is_table, unchanged_randomness

SAMPLE_ROWS = 2000  # rows that are read at most; at some 20 µs a row, or 300 through a collator that tokenises
READ_SECONDS = 5.0  # then no more rows are read: images take 5 to 50 ms each
FIRST_ROWS = 8  # read however long it takes
TWICE = 4  # of these, read a second time to see whether sizes vary
KEPT_ROWS = 32  # of varying size, kept as they were read; 20 MB of images of 224 × 224
STORED_ROWS = 128  # the longest by their stored lengths


@dataclasses.dataclass(frozen=True, eq=False)
class RowSample:
    """What was read of one data set. `given` is held so that no other object takes its place."""

    given: Any
    dataset: Any  # to take rows from: `given`, or where sizes vary, one that gives the kept rows as they were read
    total: int
    indices: tuple[int, ...]
    sizes: tuple[Sizes, ...]  # of the same rows, as they reach the model
    full: tuple[bool, ...]  # whether no position of the row is padding
    even: tuple[bool, ...]  # whether the row belongs to an even spread, and is not only there for its stored length
    kept: frozenset[int]  # of varying size: the indices of the largest
    varies: bool
    stored: bool  # the longest of all rows are known by their stored lengths
    reader: Reader
    state: Any  # changes where a table is given another format in place


_SAMPLES: list[RowSample] = []
_STREAMS: list[tuple[Any, "KeptRows"]] = []


def sample_rows(dataset: Any, reader: Reader | None = None, sample: int | None = None) -> RowSample:
    """Look at rows of `dataset`, or find what was seen of it before in this process.

    `sample`: exactly so many rows, as another process has chosen under the bounds; None applies the bounds here.
    Without a `reader`, what was seen with any will do. Raises ValueError for a set without rows, and whatever reading a
    row raises.
    """
    if not len(dataset):
        raise ValueError("the data set has no rows")
    for known in _SAMPLES:
        mine = dataset is known.given or dataset is known.dataset
        fits = reader is None or reader.same(known.reader)
        current = _state(known.given) == known.state and sample in (None, len(known.indices))
        if mine and fits and current:
            return known
    made = _read(dataset, reader or Reader(), sample)
    _SAMPLES.append(made)
    return made


def largest_set(dataset: Any) -> tuple[str | None, Any]:
    """Of several evaluation sets the one with the most rows, and its name."""
    if not isinstance(dataset, dict):
        return None, dataset
    sized = {name: len(part) if hasattr(part, "__len__") else 0 for name, part in dataset.items()}
    name = max(sized, key=sized.__getitem__, default=None)
    return name, None if name is None else dataset[name]


def has_rows(dataset: Any) -> bool:
    """Whether rows can be asked for by index. An iterable set inherits the method, and a length may be its own."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(dataset, data.IterableDataset):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class KeptRows:
    """Rows in memory, given as copies: a collator may take fields out of the rows that it is given."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return copy.copy(self._rows[index])


class SteadyRows:
    """A data set whose largest rows are given as they were first read; all others are read anew."""

    def __init__(self, dataset: Any, kept: dict[int, Any]) -> None:
        self._dataset, self._kept = dataset, kept

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return copy.copy(self._kept[index]) if index in self._kept else self._dataset[index]


def buffered(dataset: Any, rows: int, sample: int | None = None) -> KeptRows:
    """The first rows of an iterable set, at most `rows` and for at most READ_SECONDS; `sample`: exactly so many.

    They are read once in a process: a generator may have nothing more to give the second time.
    """
    for given, kept in _STREAMS:
        if given is dataset:
            return kept
    found: list[Any] = []
    with unchanged_randomness():
        began = time.perf_counter()
        for row in itertools.islice(iter(dataset), rows if sample is None else sample):
            found.append(row)
            late = time.perf_counter() - began > READ_SECONDS
            if sample is None and len(found) >= FIRST_ROWS and late:
                break
    kept = KeptRows(found)
    _STREAMS.append((dataset, kept))
    return kept


# ---- reading ----


def _read(given: Any, reader: Reader, sample: int | None) -> RowSample:
    rows, total = reader.narrow(given), len(given)
    longest = [] if isinstance(given, KeptRows) else _longest_stored(rows, STORED_ROWS)
    order = _order(total, longest, in_turn=isinstance(given, KeptRows))[:sample]
    measured: list[Measured] = []
    largest: list[tuple[int, int, Any]] = []  # a heap: elements, index, row
    with unchanged_randomness():
        began = time.perf_counter()
        varies = collates = False
        for index in order:
            late = time.perf_counter() - began > READ_SECONDS
            if sample is None and len(measured) >= FIRST_ROWS and late:
                break
            row = rows[index]
            collates = not measured or collates
            seen = reader.measure(row, collates)
            collates = seen.collated is not None
            if len(measured) < TWICE:
                varies = varies or reader.measure(rows[index], collates) != seen
            measured.append(seen)
            if varies or len(measured) < TWICE:
                heapq.heappush(largest, (sum((seen.collated or seen.fields).values()), -index, row))
            if len(largest) > KEPT_ROWS:
                heapq.heappop(largest)
    kept = {-index: row for _, index, row in largest} if varies else {}
    through = collates and all(m.collated is not None for m in measured)
    even = set(itertools.islice(_evenly(total), len(measured)))
    return RowSample(
        given=given,
        dataset=SteadyRows(rows, kept) if kept else given,
        total=total,
        indices=tuple(order[: len(measured)]),
        sizes=tuple((m.collated or {}) if through else m.fields for m in measured),
        full=tuple(m.full for m in measured),
        even=tuple(index in even for index in order[: len(measured)]),
        kept=frozenset(kept),
        varies=varies,
        stored=bool(longest),
        reader=reader,
        state=_state(given),
    )


def _order(total: int, longest: Sequence[int], in_turn: bool) -> list[int]:
    """Indices in the order of reading: the longest known and an even spread, in turn; no index comes twice."""
    count = min(total, SAMPLE_ROWS)
    if in_turn:
        return list(range(count))
    found = dict.fromkeys(longest)
    spread = (index for index in _evenly(total) if index not in found)
    paired = itertools.chain.from_iterable(zip(longest, spread, strict=False))
    return list(itertools.islice(itertools.chain(paired, spread), count))


def _evenly(total: int) -> Iterator[int]:
    """Every index once, in steps of the golden section round the set: the largest gap that any beginning of `k` leaves is
    below two mean gaps, whatever the rows are sorted by."""
    step, met = (math.sqrt(5) - 1) / 2, set()
    for k in itertools.count():
        if len(met) == total:
            return
        index = int((k * step % 1.0) * total)
        if index not in met:
            met.add(index)
            yield index


def _longest_stored(dataset: Any, count: int) -> list[int]:
    """The indices of the longest rows of a `datasets.Dataset` by the lengths of its lists and texts as they are stored:
    by their sum, and the longest of each column. Empty where the set is no table, is small, or has none.
    """
    data = getattr(dataset, "data", None)
    if not is_table(dataset) or data is None or len(dataset) <= 2 * count:
        return []
    import numpy
    import pyarrow
    import pyarrow.compute

    taken = getattr(dataset, "_indices", None)
    taken = None if taken is None else taken.column(0).to_numpy()
    columns = []
    for name in dataset.column_names:
        column = data.column(name)
        kind = column.type
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            lengths = pyarrow.compute.list_value_length(column)
        elif pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
            lengths = pyarrow.compute.binary_length(column)
        else:
            continue
        values = lengths.fill_null(0).to_numpy()
        columns.append(values if taken is None else values[taken])
    if not columns:
        return []
    whole = numpy.sum(columns, axis=0, dtype=numpy.int64)
    if whole.min() == whole.max():
        return []
    share = max(1, count // (8 * len(columns)))
    ranked = [whole, *columns]
    chosen = (numpy.argsort(-v.astype(numpy.int64), kind="stable")[: count if v is whole else share] for v in ranked)
    return list(dict.fromkeys(int(index) for part in chosen for index in part))


def _state(dataset: Any) -> Any:
    return len(dataset), getattr(dataset, "_fingerprint", None)
