"""What evaluation accumulates and what that comes to, held against the very containers and concatenations of transformers."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_ledger import StorageLedger
from transformers import trainer_pt_utils
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalPrediction

from autofit.harness import evaluation, metrics_memory
from autofit.harness.evaluation import ADDED, CONTAINERS, AccumulationLog, output_names, project
from autofit.harness.evaluation_phases import full_length

UNIT = 16 * 1024  # bytes: large beside what Python itself allocates meanwhile


def evaluate(sizes, rows, batch, accumulation, concatenates, apart):
    """The evaluation loop of Trainer without a model: (peak of tensors, peak of arrays, peak of both, log).

    `sizes`: units a row of each container. `apart`: the host's memory is another one than the device's.
    """
    log = AccumulationLog(batch)
    module = SimpleNamespace(EvalLoopContainer=EvalLoopContainer)
    log.install(module)
    containers = {name: module.EvalLoopContainer(concatenates) for name in CONTAINERS}
    device = host = both = 0
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]

    def copied(tensors):
        return [copied(t) for t in tensors] if isinstance(tensors, list) else tensors.numpy().copy()

    numpify = trainer_pt_utils.nested_numpify
    with StorageLedger() as ledger, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_pt_utils, "nested_numpify", copied if apart else numpify)

        def move():
            nonlocal host, both
            for container in containers.values():
                tracemalloc.reset_peak()
                live = ledger.live
                container.to_cpu_and_numpy()
                arrays = tracemalloc.get_traced_memory()[1] - base
                host, both = max(host, arrays), max(both, live + arrays)

        for step, done in enumerate(range(0, rows, batch)):
            take = min(batch, rows - done)
            ledger.peak = ledger.live
            variables = {name: torch.zeros(take, size * UNIT // 4) for name, size in sizes.items()}
            for name in ADDED:
                if sizes[name]:
                    containers[name].add(variables[name])
            both = max(both, ledger.peak + tracemalloc.get_traced_memory()[0] - base)
            device = max(device, ledger.peak)
            if accumulation and (step + 1) % accumulation == 0:
                move()
                del variables
        move()
    tracemalloc.stop()
    return device, host, both, log


@pytest.fixture(scope="module", autouse=True)
def no_holes():
    """No counter here sees what malloc keeps of freed memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "HOLE_BYTES", 0)
        yield


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "losses": st.just(0),
            "predictions": st.integers(4, 60),
            "labels": st.integers(0, 60),
            "inputs": st.sampled_from([0, 0, 20]),
        }
    ),
    rows=st.integers(1, 60),
    batch=st.integers(1, 9),
    accumulation=st.sampled_from([None, None, 1, 2, 3, 7]),
    concatenates=st.booleans(),
)
def test_the_projection_is_what_the_containers_of_transformers_take(sizes, rows, batch, accumulation, concatenates):
    for apart in (True, False):
        device, host, both, log = evaluate(sizes, rows, batch, accumulation, concatenates, apart)
        growth = project(
            on_host=not apart,
            base_bytes=0,
            first_step_peak=0,
            measured_peak=0,
            outputs=log.bytes_per_row,
            host_outputs=log.host_bytes_per_row,
            rows_measured=rows,
            rows_total=rows,
            batch=batch,
            accumulation_steps=accumulation,
            concatenates=concatenates,
        )
        slack = batch * sum(sizes.values()) * UNIT + 16 * UNIT  # the last batch may be smaller
        assert growth.projected_process_bytes == pytest.approx(device if apart else both, abs=slack)
        assert growth.projected_host_bytes == pytest.approx(host if apart else both, abs=slack)


def test_on_the_cpu_a_hole_of_malloc_is_allowed_for_each_array_that_grows(monkeypatch):
    monkeypatch.setattr(evaluation, "HOLE_BYTES", 1000)
    asked = {"base_bytes": 0, "first_step_peak": 0, "measured_peak": 0, "rows_measured": 4, "batch": 1,
             "outputs": {"logits": 100.0, "labels": 1.0}, "host_outputs": {"logits": 100.0, "labels": 1.0},
             "accumulation_steps": None}  # fmt: skip
    grown = [
        project(on_host=True, rows_total=100, concatenates=concatenates, **asked).projected_process_bytes
        for concatenates in (True, False)
    ]
    assert grown == [20100 + 1000 + 100, 10100]  # both arrays, the scores twice, the last batch; holes of 1000 and 100


def test_names_are_those_of_the_model_where_nothing_has_changed_them():
    one, two = torch.zeros(2, 3), (torch.zeros(2, 3), torch.zeros(2, 4))
    assert output_names(["logits"], one, True) == ["logits"]
    assert output_names(["logits", "hidden_states"], two, True) == ["logits", "hidden_states"]
    assert output_names(["logits"], one, False) == ["predictions"]
    assert output_names(None, one, True) == ["predictions"]
    assert output_names(["logits", "hidden_states"], one, True) == ["predictions"]
    assert output_names(["a", "b", "c"], two, True) == ["predictions"]


def test_bytes_of_each_output_are_told_by_its_name():
    log = AccumulationLog(2, lambda _: ["logits", "hidden_states"])
    log._count("predictions", (torch.zeros(2, 3, 5), (torch.zeros(2, 3, 7), torch.zeros(2, 3, 7))))
    log._count("labels", torch.zeros(2, 3, dtype=torch.long))
    assert log.bytes_per_row == {"logits": 60, "hidden_states": 168, "labels": 24}


def prediction(rows, width=1000):
    return EvalPrediction(predictions=np.zeros((rows, width), np.float32), label_ids=np.zeros(rows, np.int64))


def softmax(p):
    e = np.exp(p.predictions)
    return {"x": float((e / e.sum(-1, keepdims=True)).mean())}


def with_torch(p):
    return {"x": float(torch.tensor(p.predictions).log_softmax(-1).mean())}


@pytest.mark.parametrize(
    ("function", "bytes_per_row"),
    [
        (lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}, 9),  # integers and booleans
        (softmax, 8000),
        (with_torch, 8000),
        (lambda p: {"rows": len(p.label_ids)}, 0),
    ],
)
def test_what_metrics_take_is_told_by_the_row(function, bytes_per_row):
    found = metrics_memory.bytes_per_row(function, prediction(64))
    assert found == pytest.approx(bytes_per_row, rel=0.1, abs=60)


def test_metrics_that_refuse_half_their_rows_or_take_long_are_not_known():
    def picky(p):
        assert len(p.label_ids) == 64
        return {}

    assert metrics_memory.bytes_per_row(picky, prediction(64)) is None
    assert metrics_memory.bytes_per_row(lambda p: {}, prediction(1)) is None
    assert metrics_memory.bytes_per_row(lambda p: {}, EvalPrediction(predictions=None, label_ids=None)) is None


@pytest.mark.parametrize(
    ("given_", "config", "expected"),
    [
        ({"max_length": 30}, {}, {"min_length": 30}),
        ({"max_new_tokens": 7, "max_length": 30}, {}, {"min_new_tokens": 7}),
        ({}, {"max_new_tokens": 9, "max_length": 20}, {"min_new_tokens": 9}),
        ({"max_length": 30}, {"max_new_tokens": 9}, {"min_length": 30}),
        ({}, {"max_length": 20}, {"min_length": 20}),
        ({}, {"max_length": None}, {}),
    ],
)
def test_generation_is_held_to_its_full_length_as_it_was_asked_for(given_, config, expected):
    assert full_length(given_, SimpleNamespace(**config)) == expected
