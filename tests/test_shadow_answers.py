"""Answers to operators whose results depend on values: shape by shape, against what the device would make at most."""

import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofit.harness.shadow.semantics.answers import answer


class SmallLedger(TorchDispatchMode):
    """Live bytes of all storages made while it is active, answers given; nothing is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.host = self.host_peak = 0
        self.operators: list[str] = []
        self._known: dict[int, tuple[weakref.ref, bool, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        result = answer(func, args, kwargs or {})
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage(), False)
        return result

    def on_host(self, tensor: torch.Tensor) -> None:
        """Host memory from now on, whatever it was."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            self._see(storage, True)
        elif not known[1]:
            self._count(False, -known[2])
            self._known[storage._cdata] = (known[0], True, known[2])
            self._count(True, known[2])

    def restart(self) -> int:
        """Forget the peak. Returns the live bytes."""
        self.peak = self.live
        self.operators.clear()
        return self.live

    def _see(self, storage: Any, on_host: bool) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = (weakref.ref(storage, lambda _, key=key: self._gone(key)), on_host, storage.nbytes())
            self._count(on_host, storage.nbytes())

    def _gone(self, key: int) -> None:
        _, on_host, size = self._known.pop(key)
        self._count(on_host, -size)

    def _count(self, on_host: bool, size: int) -> None:
        if on_host:
            self.host += size
            self.host_peak = max(self.host_peak, self.host)
        else:
            self.live += size
            self.peak = max(self.peak, self.live)


def make_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture
def ledger() -> Any:
    with make_mode(), SmallLedger() as ledger:
        yield ledger


def test_scalars_are_answered_by_dtype(ledger: SmallLedger) -> None:
    unknown = torch.empty(3, 4)
    assert unknown.sum().item() == 0.5
    assert unknown.long().max().item() == 1
    assert not unknown.isnan().any()
    assert torch.empty((), dtype=torch.complex64).item() == 0.5 + 0j


def test_a_number_that_torch_still_knows_is_itself(ledger: SmallLedger) -> None:
    assert torch.tensor(7).item() == 7
    counter = torch.tensor(0.0)
    counter += 1
    assert counter.item() == 1.0


def test_comparisons_are_true(ledger: SmallLedger) -> None:
    values = torch.empty(3)
    assert torch.equal(values, values + 1)
    assert torch.allclose(values, values + 1)


def test_selections_take_every_element(ledger: SmallLedger) -> None:
    values = torch.empty(3, 4)
    mask = values > 0
    assert mask.nonzero().shape == (12, 2)
    assert mask.nonzero().stride() == (1, 12)
    assert [part.shape for part in torch.where(mask)] == [(12,), (12,)]
    assert values[mask].shape == (12,)
    assert values[mask[:, 0]].shape == (3, 4)
    assert values[:, mask[0], None].shape == (3, 4, 1)
    assert torch.masked_select(values, mask[0]).shape == (12,)
    assert all(isinstance(part, FakeTensor) for part in torch.where(mask))


def test_a_selection_is_counted_once(ledger: SmallLedger) -> None:
    values = torch.empty(3, 4)
    mask = values > 0
    before = ledger.restart()
    chosen = mask.nonzero()
    assert ledger.live - before == 12 * 2 * 8
    del chosen
    assert ledger.live == before


def test_a_selection_has_a_gradient(ledger: SmallLedger) -> None:
    weight = torch.empty(3, 4, requires_grad=True)
    (weight * 1)[weight > 0].sum().backward()
    assert weight.grad.shape == (3, 4)


def test_plain_indices_are_not_answered(ledger: SmallLedger) -> None:
    assert torch.empty(3, 4)[torch.empty(5, dtype=torch.int64)].shape == (5, 4)


def test_unique_values_are_as_many_as_elements(ledger: SmallLedger) -> None:
    values = torch.empty(3, 4)
    unique, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    assert (unique.shape, inverse.shape, counts.shape) == ((12,), (3, 4), (12,))
    rows, counts = values.unique(dim=0, return_counts=True)
    assert (rows.shape, counts.shape) == ((3, 4), (3,))
    assert torch.unique_consecutive(values).shape == (12,)


def test_repeats_and_bins(ledger: SmallLedger) -> None:
    counts = torch.empty(4, dtype=torch.int64)
    assert torch.repeat_interleave(counts).shape == (4,)
    assert torch.repeat_interleave(counts, output_size=9).shape == (9,)
    assert torch.bincount(counts, minlength=6).shape == (6,)
    assert torch.bincount(counts).shape == (1,)


def test_real_tensors_keep_their_values() -> None:
    assert answer(torch.ops.aten.nonzero.default, (torch.ones(2),), {}) is NotImplemented


def test_what_has_no_answer_is_named_by_torch(ledger: SmallLedger) -> None:
    with pytest.raises(DynamicOutputShapeException, match="_pack_padded_sequence"):
        torch.ops.aten._pack_padded_sequence(torch.empty(2, 3, 4), torch.empty(2, dtype=torch.int64), True)
