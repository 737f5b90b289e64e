"""Which rows a probe trains and evaluates on: the longest for memory, the same typical ones for every candidate's speed.

Training takes rows in blocks of one effective batch, so the rows of optimizer step k do not depend on how the batch is
divided. A worst-case block holds the longest rows, longest first, so that every micro-batch size meets its own worst
case first. Typical blocks are drawn evenly from the distribution of lengths. Lengths are those of a sample where the
data set is large; what was sampled is reported.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

SAMPLE_ROWS = 2000  # rows whose length is read; at some 20 µs a row this is paid in every child of a script
TYPICAL_BLOCKS = 2  # blocks in one timed window


def row_elements(row: Any) -> int:
    """Elements of the largest field of a row: tokens, or pixel values. 1 where a row has no size."""
    values = row.values() if hasattr(row, "values") else row if isinstance(row, (tuple, list)) else (row,)
    largest = 1
    for value in values:
        if hasattr(value, "numel"):
            largest = max(largest, value.numel())
        elif hasattr(value, "size") and isinstance(value.size, int):
            largest = max(largest, value.size)
        elif hasattr(value, "__len__"):
            largest = max(largest, len(value))
    return largest


class RowPlan:
    """The indices of the longest rows of one data set, and of typical ones."""

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self._seed = seed
        self.total = len(dataset)
        if self.total == 0:
            raise ValueError("the data set has no rows")
        sampled = range(self.total)
        if self.total > SAMPLE_ROWS:
            sampled = sorted(random.Random(0).sample(range(self.total), SAMPLE_ROWS))
        self.sampled = len(sampled)
        lengths = [(row_elements(dataset[index]), index) for index in sampled]
        lengths.sort(key=lambda pair: (-pair[0], pair[1]))
        self.longest_row = lengths[0][0]
        self.uniform = lengths[0][0] == lengths[-1][0]  # every row has the same length
        self.longest_rows = sum(1 for length, _ in lengths if length == self.longest_row)
        self._by_length = [index for _, index in lengths]

    def longest(self, count: int) -> list[int]:
        """`count` indices, longest first; a smaller set is gone through again, the whole list staying in order."""
        repeats = -(-count // len(self._by_length))
        return [index for index in self._by_length for _ in range(repeats)][:count]

    def typical(self, count: int) -> list[int]:
        """`count` indices spread evenly over the lengths, in a fixed shuffled order."""
        ranked = self._by_length
        chosen = [ranked[(2 * k + 1) * len(ranked) // (2 * count) % len(ranked)] for k in range(count)]
        random.Random(self._seed).shuffle(chosen)
        return chosen

    def cycled(self, order: Sequence[int], count: int) -> list[int]:
        return list(itertools.islice(itertools.cycle(order), count))


class BlockSampler:
    """Indices for training, one block of `effective_batch` rows after the other, of the kind that is asked for meanwhile.

    Loaders fetch ahead, so a change of `kind` shows a few steps later: `kinds[k]` tells which block optimizer step k
    consumes. Kinds are `worst` and `typical-0` … `typical-n`.
    """

    def __init__(self, plan: RowPlan, effective_batch: int, blocks: int) -> None:
        self.kinds: list[str] = []
        self.kind = "worst"
        self._blocks, self._effective_batch = blocks, effective_batch
        self._worst = plan.longest(effective_batch)
        typical = plan.typical(effective_batch * TYPICAL_BLOCKS)
        self._typical = [typical[k * effective_batch :][:effective_batch] for k in range(TYPICAL_BLOCKS)]

    def __len__(self) -> int:
        return self._blocks * self._effective_batch

    def __iter__(self) -> Iterator[int]:
        turn = 0
        for _ in range(self._blocks):
            if self.kind == "worst":
                turn = 0
                self.kinds.append("worst")
                yield from self._worst
            else:
                self.kinds.append(f"typical-{turn}")
                yield from self._typical[turn]
                turn = (turn + 1) % TYPICAL_BLOCKS


def subset(dataset: Any, indices: list[int]) -> Any:
    """The chosen rows as a data set of the same kind: `datasets.Dataset` stays one, so that Trainer drops its columns."""
    if hasattr(dataset, "select") and hasattr(dataset, "column_names"):
        return dataset.select(indices)
    from torch.utils.data import Subset

    return Subset(dataset, indices)


def buffered(dataset: Any, rows: int) -> list[Any]:
    """The first rows of an iterable data set, so that they can be ordered by length."""
    return list(itertools.islice(iter(dataset), rows))


def has_rows(dataset: Any) -> bool:
    """Whether rows can be asked for by index."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
