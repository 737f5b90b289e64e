"""Which rows a probe trains and evaluates on: the longest for memory, the same typical ones for every candidate's speed.

Training takes rows in blocks of one effective batch, so the rows of optimizer step k do not depend on how the batch is
divided. A worst-case block holds the largest rows, largest first, so that every micro-batch size meets its own worst
case first. A batch is padded field by field (source and target), and the longest of each field may be another row: the
block holds all of these, and where a micro-batch takes that many rows, it begins with them, so that the first
micro-batch is padded to the longest of every field at once. Smaller ones begin with the row of the largest sum. Typical
blocks are drawn evenly from the distribution of sizes. How rows are found and measured is `row_sample`'s.
"""

import contextlib
import dataclasses
import functools
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from autofit.harness.row_sample import RowSample, has_rows, largest_set, sample_rows
from autofit.harness.row_sizes import Reader, Sizes, kept_columns, main_size

TYPICAL_BLOCKS = 2  # blocks in one timed window
FIELDS_TOLD = 3


@dataclasses.dataclass(frozen=True)
class _Order:
    """What follows from a sample, whatever is asked of it: rows by index, largest first."""

    ranked: tuple[int, ...]  # that a worst-case block is made of
    cover: tuple[int, ...]  # the rows of these that together are the longest in every field
    even: tuple[int, ...]  # that typical blocks are made of
    largest: Sizes  # of each field that varies, those that grow together once
    typical: Sizes  # the same of the middle row
    longest_row: int
    whole: int  # rows that are the longest in every field, without padding


class RowPlan:
    """The order of the largest rows of one data set, and typical ones.

    `sample` and `reader` are those of `sample_rows`, which finds what was read of the set before. Raises ValueError for a
    set without rows.
    """

    def __init__(self, dataset: Any, seed: int = 0, sample: int | None = None, reader: Reader | None = None) -> None:
        self._seed = seed
        self._sample = sample_rows(dataset, reader, sample)
        self._order = _order_of(self._sample)
        self.dataset = self._sample.dataset
        self.total, self.sampled = self._sample.total, len(self._sample.indices)
        self.longest_row = self._order.longest_row
        self.longest_rows = max(1, self._order.whole)  # so many make a batch without padding; one row always does
        self.uniform = not self._order.largest  # every row has the same size

    def longest(self, count: int, batch: int | None = None) -> list[int]:
        """`count` indices, largest first; a smaller set is gone through again, the whole list staying in order.

        Which they are does not depend on `batch`, the rows of one micro-batch (None: all of them); their order does, where
        the longest of each field are several rows.
        """
        ranked = self._order.ranked
        cover = self._order.cover if len(self._order.cover) <= count else ()
        if count <= len(ranked):
            block = list(dict.fromkeys([*cover, *ranked]))[:count]
        else:
            repeats = -(-count // len(ranked))
            repeated = [index for index in ranked for _ in range(repeats)]
            block = [*(cover if len(cover) > 1 else ()), *repeated][:count]
        if batch is not None and batch < len(cover):
            block.sort(key=ranked.index)
        return block

    def typical(self, count: int) -> list[int]:
        """`count` indices spread evenly over the sizes, in a fixed shuffled order."""
        ranked = self._order.even
        chosen = [ranked[(2 * k + 1) * len(ranked) // (2 * count) % len(ranked)] for k in range(count)]
        random.Random(self._seed).shuffle(chosen)
        return chosen

    def cycled(self, order: Sequence[int], count: int) -> list[int]:
        return list(itertools.islice(itertools.cycle(order), count))

    def told(self) -> str:
        """What was looked at and the sizes that decide, in a line; empty where every row was, and all are of a size."""
        words = ""
        if self._sample.varies:
            words = f"sizes vary between reads of the same row: the largest of a sample of {self.sampled}"
        elif self._sample.stored and self.sampled < self.total:
            words = f"the longest of {self.total} by their stored lengths, {self.sampled} of them read"
        elif self.sampled < self.total:
            words = f"the longest of {self.sampled} sampled from {self.total}"
        if self.uniform:
            return words and f"{words}, all of {self.longest_row} elements"
        told = list(self._order.largest)[:FIELDS_TOLD]
        worst = ", ".join(f"{name or 'values'} {self._order.largest[name]}" for name in told)
        typical = ", ".join(str(self._order.typical[name]) for name in told)
        sizes = f"the worst-case batch is padded to {worst}; typical {typical}"
        return f"{words}: {sizes}" if words else sizes


@functools.lru_cache(maxsize=16)
def _order_of(sample: RowSample) -> _Order:
    """Computed once for a sample, which is asked for again by each phase of a probe."""
    columns = _varying(sample.sizes)
    largest = {name: max(column) for name, column in columns.items()}
    totals = [sum(values) for values in zip(*columns.values(), strict=True)] or [0] * len(sample.sizes)
    # Of rows of one size those without padding come first, then as they lie in the set.
    by_size = sorted(range(len(totals)), key=lambda k: (-totals[k], not sample.full[k], sample.indices[k]))
    ranked = [k for k in by_size if sample.indices[k] in sample.kept] if sample.kept else by_size
    even = [k for k in by_size if sample.even[k]] or by_size
    cover: list[int] = []
    for column in columns.values():
        longest = max(
            ranked, key=column.__getitem__
        )  # the first of them, which is the longest in other fields too, if any
        if all(column[k] < column[longest] for k in cover):
            cover.append(longest)
    return _Order(
        ranked=tuple(sample.indices[k] for k in ranked),
        cover=tuple(sample.indices[k] for k in cover),
        even=tuple(sample.indices[k] for k in even),
        largest=largest,
        typical={name: statistics.median_high(column[k] for k in even) for name, column in columns.items()},
        longest_row=max(main_size(sizes) for sizes in sample.sizes),
        whole=sum(
            sample.full[k] and all(column[k] == largest[name] for name, column in columns.items()) for k in by_size
        ),
    )


def _varying(rows: Sequence[Sizes]) -> dict[str, tuple[int, ...]]:
    """Sizes of every row in each field where they are not the same; of fields that grow together one, tokens before their
    masks."""
    seen: dict[tuple[int, ...], str] = {}
    names = list(dict.fromkeys(name for sizes in rows for name in sizes))
    for name in sorted(names, key=lambda name: "mask" in name or "type" in name):
        column = tuple(sizes.get(name, 0) for sizes in rows)
        if min(column) != max(column):
            seen.setdefault(column, name)
    return {name: column for column, name in seen.items()}


def prepare_rows(
    trainer: Any,
    model: Any = None,
    args: Any = None,
    data_collator: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    """Read the rows at the entry of `Trainer.__init__`, whose arguments these are, for every process forked from here.

    `trainer` is the object that is about to be made: of its class's own attributes some may be there already. Streams
    are not read: a script may read them itself before it trains. What cannot be read now is left to the fork.
    """
    from transformers import PreTrainedTokenizerBase, SequenceFeatureExtractor
    from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
    from transformers.utils.generic import find_labels

    if model is None or args is None:
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    labels = args.label_names
    if labels is None:
        labels = find_labels(type(base)) if hasattr(base, "forward") else []
    standin = object.__new__(type(trainer))
    standin.__dict__.update(vars(trainer), model=model, args=args, label_names=labels, _signature_columns=None)
    if data_collator is None:
        pads = isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor))
        data_collator = DataCollatorWithPadding(processing_class) if pads else default_data_collator
    reader = Reader(data_collator, kept_columns(standin))
    for dataset in (train_dataset, largest_set(eval_dataset)[1]):
        if has_rows(dataset) and len(dataset):
            with contextlib.suppress(Exception):  # the fork reads it again, and the script shows its own error there
                RowPlan(dataset, reader=reader)


class BlockSampler:
    """Indices for training, one block of `effective_batch` rows after the other, of the kind that is asked for meanwhile.

    Loaders fetch ahead, so a change of `kind` shows a few steps later: `kinds[k]` tells which block optimizer step k
    consumes. Kinds are `worst` and `typical-0` … `typical-n`. `batch` is the size of a micro-batch.
    """

    def __init__(self, plan: RowPlan, effective_batch: int, blocks: int, batch: int | None = None) -> None:
        self.kinds: list[str] = []
        self.kind = "worst"
        self._blocks, self._effective_batch = blocks, effective_batch
        self._worst = plan.longest(effective_batch, batch)
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
