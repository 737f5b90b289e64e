"""One small batch of the script's own rows, once whole and once in parts, with the same numbers in both.

The script's own loader and collator make the batch, once, since a collator may draw at random (masks, augmentation);
it is then divided by rows. What cannot be divided so, rows packed into one or pairs laid one after the other, is
collated in parts from the same rows. Rows are short and of one length, and the parts hold equally many labels, so that
a mean over tokens is the same either way: where no two rows are alike in that, a row is repeated. What a loss makes of
parts with unequal labels is therefore not covered.
"""

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from autofit.harness.data_sets import has_own_train_loader, pick_training_set
from autofit.harness.row_sample import sample_rows
from autofit.harness.row_sizes import Reader
from autofit.harness.rows import subset

PARTS = 2
CANDIDATES = 16  # rows of one size that are collated, of which those with equally many labels are taken
MOST_SIZES = 8  # sizes that are looked at for rows with labels, the smallest first
IGNORED = -100  # a label that losses of torch and transformers leave out


class IndivisibleBatch(Exception):
    """No batch of this workload can be had whole and in parts."""


@dataclass(frozen=True)
class DividedBatch:
    """The same rows twice. `whole` holds one batch, `parts` holds `PARTS` of them."""

    whole: tuple[Any, ...]
    parts: tuple[Any, ...]
    rows: int


def make_divided_batch(trainer: Any, count: int) -> DividedBatch:
    """`count` rows of the smallest size of which there are that many. Raises IndivisibleBatch, or what loading raises."""
    if trainer.train_dataset is None:
        raise IndivisibleBatch("the Trainer has no train_dataset to take rows from")
    dataset = pick_training_set(trainer, [])
    if has_own_train_loader(trainer):
        # It may weigh or sort the whole data set, so it is asked for a batch of that before it is given a few rows.
        with contextlib.suppress(IndivisibleBatch):
            batch = next(_collate(trainer, trainer.train_dataset, CANDIDATES, most=1), None)
            labels, divided = _split(batch, CANDIDATES, count)
            if labels:
                return divided
    if not len(dataset):
        raise IndivisibleBatch("the training set has no rows")
    best: tuple[int, DividedBatch] | None = None
    for indices in itertools.islice(_rows_by_size(trainer, dataset, count), MOST_SIZES):
        indices = indices[:CANDIDATES] if len(indices) > 1 else indices * 2
        labels, divided = _divide(trainer, dataset, indices, count)
        if best is None or labels > best[0]:
            best = labels, divided
        if labels:
            break
    assert best is not None
    return best[1]


def _rows_by_size(trainer: Any, dataset: Any, count: int) -> Iterator[list[int]]:
    """Indices of rows of one size in every field; sizes with `count` rows come first, then the smallest."""
    sample = sample_rows(dataset, Reader.of(trainer))
    groups: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for index, sizes in zip(sample.indices, sample.sizes, strict=True):
        groups[tuple(sorted(sizes.items()))].append(index)
    order = sorted(groups, key=lambda sizes: (len(groups[sizes]) < count, sum(n for _, n in sizes)))
    yield from (groups[sizes] for sizes in order)


def _divide(trainer: Any, dataset: Any, indices: list[int], count: int) -> tuple[int, DividedBatch]:
    """The batch, and whether every chosen row has labels (more than 0)."""
    read = _read(trainer, dataset, indices)
    try:
        return _split(next(_collate(trainer, read, len(read)), None), len(read), count)
    except IndivisibleBatch:
        alone = [next(_collate(trainer, _read(trainer, dataset, [index]), 1), None) for index in indices]
        keys = [sum(_label_counts(one, None)) for one in alone]
        chosen = deal(keys, count // PARTS)
        whole, *parts = _collate_apart(trainer, _read(trainer, dataset, [indices[i] for part in chosen for i in part]))
    return min(keys[i] for part in chosen for i in part), DividedBatch((whole,), tuple(parts), count)


def _split(batch: Any, rows: int, count: int) -> tuple[int, DividedBatch]:
    """`count` of the `rows` rows of a collated batch, as `_divide` gives them. Raises IndivisibleBatch."""
    if batch is None:
        raise IndivisibleBatch("its training loader makes no batch")
    keys = _label_counts(batch, rows)
    chosen = deal(keys, count // PARTS)
    whole = take_rows(batch, rows, [i for part in chosen for i in part])
    parts = tuple(take_rows(batch, rows, part) for part in chosen)
    return min(keys[i] for part in chosen for i in part), DividedBatch((whole,), parts, count)


def _read(trainer: Any, dataset: Any, indices: list[int]) -> Any:
    """These rows as a data set. A list, so that a row that is augmented at random is drawn once, unless the script has
    a loader of its own, which may ask its data set for more than rows."""
    if has_own_train_loader(trainer):
        return subset(dataset, indices)
    return [dataset[index] for index in indices]


def _collate(trainer: Any, read: Any, batch: int, seed: int = 0, most: int | None = None) -> Iterator[Any]:
    """Batches of `batch` rows as the Trainer's own loader makes them; `most`: no more than so many."""
    settings = {
        "per_device_train_batch_size": batch,
        "dataloader_num_workers": 0,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
    }
    with restored(trainer), restored(trainer.args), seeded(trainer, seed):
        for name, value in settings.items():
            setattr(trainer.args, name, value)
        trainer.train_dataset, trainer._train_batch_size = read, batch
        trainer._get_train_sampler = lambda *_: SequentialSampler(read)
        # One more than there should be, so that a loader of the script's own that makes others is noticed.
        most = len(read) // batch + 1 if most is None else most
        batches = list(itertools.islice(trainer.get_train_dataloader(), most))
    return iter(batches)


def _collate_apart(trainer: Any, read: Any) -> list[Any]:
    """The batch of all rows, and its parts. Raises IndivisibleBatch where they would not hold the same numbers."""
    whole = list(_collate(trainer, read, len(read)))
    again = list(_collate(trainer, read, len(read), seed=1))
    parts = list(_collate(trainer, read, len(read) // PARTS))
    if len(whole) != 1 or len(parts) != PARTS:
        raise IndivisibleBatch("its training loader does not make batches of the size that it is asked for")
    if not _same(whole, again):
        raise IndivisibleBatch("its batches are made at random and cannot be divided by rows")
    return whole + parts


def take_rows(value: Any, count: int, chosen: Sequence[int]) -> Any:
    """The chosen ones of the `count` rows of a collated batch. Raises IndivisibleBatch where it is not laid out in rows.

    Tensors and arrays are laid out in rows along their first dimension, lists hold one item a row or such tensors.
    What every row shares can only be a word, a flag, or nothing: a number may have been counted over the rows.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if _is_array(value):
        if not value.ndim or len(value) != count:
            raise IndivisibleBatch(f"a tensor of shape {tuple(value.shape)} is not {count} rows")
        return value[list(chosen)]
    if isinstance(value, Mapping):
        return _remake(value, {key: take_rows(item, count, chosen) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        holds_arrays = bool(value) and all(_is_array(item) and item.ndim and len(item) == count for item in value)
        if len(value) == count and not holds_arrays:
            return type(value)([value[i] for i in chosen])
        if len(value) != count and holds_arrays:
            items = [take_rows(item, count, chosen) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise IndivisibleBatch(f"{type(value).__name__} is not {count} rows")


def deal(keys: Sequence[Hashable], size: int) -> tuple[list[int], ...]:
    """Indices of `PARTS` parts of `size` rows, such that the parts hold the same keys; a key of 0 only where all are.

    Other rows are in each part as far as two have the same key; else the same ones are in every part.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        if key or not any(keys):
            alike[key].append(index)
    groups = sorted(alike.values(), key=len, reverse=True)
    hands = [tuple(group[i : i + PARTS]) for group in groups for i in range(0, len(group) - PARTS + 1, PARTS)]
    hands = hands or [(group[0],) * PARTS for group in groups]
    dealt = list(itertools.islice(itertools.cycle(hands), size))
    return tuple([hand[part] for hand in dealt] for part in range(PARTS))


def _label_counts(batch: Any, count: int | None) -> list[int]:
    """A number for each row that is equal where rows have equally many labels that count, and 0 where they have none;
    1 each where that cannot be told. With `count` None the batch is one row."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.ndim:
        return [1] * (count or 1)
    labels = labels.reshape(1, -1) if count is None else labels
    kept = (labels != IGNORED).reshape(len(labels), -1)
    width, counts = kept.shape[1], kept.sum(1)
    if width > 1:
        # Causal models predict no first label: rows are alike where both counts are, and have none where that is all.
        shifted = kept[:, 1:].sum(1)
        counts = torch.where(shifted > 0, shifted * (width + 1) + counts, 0)
    return counts.tolist()


def _same(a: Any, b: Any) -> bool:
    """Whether two batches hold the same numbers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _remake(original: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same kind, as the Trainer itself makes one when it moves a batch to the device."""
    if isinstance(original, defaultdict):
        return defaultdict(original.default_factory, items)
    return type(original)(items)


@contextlib.contextmanager
def restored(instance: Any, but: Sequence[str] = ()) -> Iterator[None]:
    """Whatever is set on `instance` inside is undone, `but` for some attributes."""
    before = dict(vars(instance))
    try:
        yield
    finally:
        after = {name: vars(instance)[name] for name in but}
        vars(instance).clear()
        vars(instance).update(before | after)


@contextlib.contextmanager
def seeded(trainer: Any, seed: int) -> Iterator[None]:
    """Everything that draws at random starts from `seed`, and goes on afterwards as if nothing had been drawn."""
    device = trainer.args.device
    forked = [device] if device.type in ("cuda", "xpu") else []
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(forked, device_type=device.type if forked else "cuda"):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
