"""How large one row is when it reaches the model, field by field.

A row is laid out by the script's own collator, alone, after the columns that Trainer drops: so tokenising, truncation,
padding to a multiple and the joining of prompts and completions are the script's. Where the collator does not take one
row, the row's own fields are counted. How fields grow when rows meet in a batch is not asked here: a batch is padded,
field by field, to the largest of its rows. Nothing here imports torch before the workload has.
"""

import contextlib
import copy
import dataclasses
import math
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

TOKENS = ("input_ids", "decoder_input_ids", "labels")
Sizes = dict[str, int]  # field -> elements


@dataclasses.dataclass(frozen=True)
class Measured:
    """One row: its own fields, what the collator makes of it (None: it takes no single row), and whether no position of
    that is padding."""

    fields: Sizes
    collated: Sizes | None = None
    full: bool = True


class Reader:
    """How a Trainer comes from a data set to a batch. Equal where it reads the same columns with the same collator."""

    def __init__(self, collator: Any = None, columns: frozenset[str] | None = None) -> None:
        self._collator, self.columns = collator, columns

    @classmethod
    def of(cls, trainer: Any) -> "Reader":
        """As `trainer` reads. Its own methods say which columns are kept; None where it keeps all."""
        return cls(trainer.data_collator, kept_columns(trainer))

    def same(self, other: "Reader") -> bool:
        return self.columns == other.columns and _same_collator(self._collator, other._collator)

    def narrow(self, dataset: Any) -> Any:
        """Without the columns that are dropped before a row is read: those of `datasets.Dataset`, as Trainer does it."""
        if self.columns is None or not is_table(dataset):
            return dataset
        dropped = [name for name in dataset.column_names if name not in self.columns]
        if len(dropped) in (0, len(dataset.column_names)):  # with none left, the training says so in Trainer's words
            return dataset
        return dataset.remove_columns(dropped)

    def measure(self, row: Any, collate: bool = True) -> Measured:
        """Sizes of one row. The collator gets a copy, since some take fields out of the rows that they are given."""
        kept = row
        if self.columns is not None and isinstance(row, dict):
            kept = {name: value for name, value in row.items() if name in self.columns}
        fields = field_sizes(kept)
        if self._collator is None or not collate:
            return Measured(fields)
        try:
            batch = self._collator([copy.copy(kept)])
        except Exception:  # noqa: BLE001 - it takes no single row, or the row is broken, which the training itself shows
            return Measured(fields)
        leaves = dict(_tensors(batch))
        sizes = {name: int(math.prod(value.shape)) for name, value in leaves.items()}
        masks = (v for name, v in leaves.items() if name.endswith("attention_mask") and len(v.shape) == 2)
        return Measured(fields, sizes or None, all(bool((mask != 0).all()) for mask in masks))


def kept_columns(trainer: Any) -> frozenset[str] | None:
    """The columns that `trainer` lets through to its collator; None where all, or where it cannot say yet."""
    if not trainer.args.remove_unused_columns:
        return None
    try:
        trainer._set_signature_columns_if_needed()
    except (AttributeError, TypeError, ValueError):  # a model whose signature cannot be read
        return None
    return frozenset(trainer._signature_columns)


def field_sizes(row: Any) -> Sizes:
    """Elements of each field that has a size; lengths of texts only where nothing else has one."""
    if isinstance(row, Mapping) or hasattr(row, "items"):
        named = dict(row.items())
    elif isinstance(row, (tuple, list)):
        named = {str(position): value for position, value in enumerate(row)}
    else:
        named = {"": row}
    sizes = {str(name): size for name, value in named.items() if (size := _elements(value)) is not None}
    return sizes or {str(name): len(value) for name, value in named.items() if isinstance(value, (str, bytes))}


def main_size(sizes: Sizes) -> int:
    """Elements of the longest input: tokens where there are any, else pixels or samples. At least 1."""
    tokens = [size for name, size in sizes.items() if name.rpartition(".")[2] in TOKENS]
    return max([1, *(tokens if any(name.endswith("input_ids") for name in sizes) else sizes.values())])


def is_table(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset`, or does as one: columns that can be dropped, rows that can be selected."""
    return hasattr(dataset, "select") and hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")


@contextlib.contextmanager
def unchanged_randomness() -> Iterator[None]:
    """Random transforms may draw here; the script goes on as if they had not.

    Python's, numpy's and torch's own states are put back. A generator that a data set or a collator keeps for itself is
    not known here, and moves on.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    states = random.getstate(), numpy and numpy.random.get_state(), torch and torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


def _elements(value: Any) -> int | None:
    """Elements of a tensor, an array, an image, or a list of numbers, however deep. None where it has no size."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):  # torch.Size is one
        return math.prod(shape)
    size = getattr(value, "size", None)
    if isinstance(size, tuple):  # an image of Pillow: width and height
        return math.prod(size) * len(getattr(value, "getbands", tuple)() or "1")
    if not isinstance(value, (list, tuple)):
        return None
    if not value or not isinstance(value[0], (list, tuple)) and not hasattr(value[0], "shape"):
        return None if value and isinstance(value[0], (str, bytes, Mapping)) else len(value)
    return sum(_elements(part) or 0 for part in value)


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and arrays of a batch by name, those of nested groups as `group.name`."""
    if hasattr(batch, "shape"):
        yield name, batch
    elif isinstance(batch, Mapping) or hasattr(batch, "items"):
        for key, value in batch.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, (tuple, list)):
        for position, value in enumerate(batch):
            yield from _tensors(value, f"{name}.{position}" if name else str(position))


def _same_collator(first: Any, second: Any) -> bool:
    """Whether it is the same, or one of the same class over the same things: Trainer makes its default one anew."""
    if first is second:
        return True
    if type(first) is not type(second) or not dataclasses.is_dataclass(first):
        return False
    pairs = zip(vars(first).items(), vars(second).items(), strict=False)
    return len(vars(first)) == len(vars(second)) and all(
        a == b and (x is y or (isinstance(x, (bool, int, float, str)) and type(x) is type(y) and x == y))
        for (a, x), (b, y) in pairs
    )
