"""The predictor of a search over made-up shadow runs: what it believes, what corrects it, and what it never starts."""

import pytest
from landscapes import Landscape

from autofit.prediction import Predictor, structure
from autofit.prediction.formula import Formula
from autofit.records import Candidate, Failure, Measurement, Outcome, PhaseRecord, Prediction
from autofit.study.planner import TrainPlan

GB = 10**9


class MadeUpShadows:
    """Peaks of `bytes_of(candidate)` for structures that were traced, each trace taking `seconds` of the clock."""

    def __init__(self, bytes_of, failing=(), seconds=0.0, clock=None) -> None:
        self.bytes_of, self.failing, self.seconds, self.clock = bytes_of, failing, seconds, clock
        self.traced: list[str] = []
        self.failed: set[str] = set()

    def is_known(self, candidate: Candidate) -> bool:
        return structure(candidate) in self.traced

    def has_failed(self, candidate: Candidate) -> bool:
        return structure(candidate) in self.failed

    def predict(self, candidate: Candidate) -> Prediction:
        name = structure(candidate)
        if name not in self.traced and name not in self.failed:
            if self.clock is not None:
                self.clock[0] += self.seconds
            (self.failed.add if candidate.get("precision") in self.failing else self.traced.append)(name)
        if name in self.failed:
            return Prediction(candidate, "cpu", "traced", failure=Failure("train", None, "Odd", "cannot be traced"))
        peak = self.bytes_of(candidate)
        phases = (PhaseRecord("train", 0.0, peak, peak, peak),)
        rows = int(candidate["per_device_train_batch_size"])
        return Prediction(candidate, "cpu", "rewritten", phases, step_seconds=rows * 0.1 + 0.4)


def linear(candidate: Candidate) -> int:
    batch = int(candidate["per_device_train_batch_size"])
    return 2 * GB + batch * GB // (4 if candidate.get("activation_checkpointing") else 1)


@pytest.fixture
def landscape() -> Landscape:
    return Landscape(0, 24 * GB)


def predictor_of(landscape: Landscape, shadows, device="cuda:0") -> Predictor:
    return Predictor(landscape.description, device, shadows)


def measured(candidate: Candidate, peak: int) -> Measurement:
    phases = (PhaseRecord("train", 1.0, process_bytes=peak),)
    return Measurement("0001", "train", candidate, Outcome.FITS, 1.0, phases)


def at(landscape: Landscape, batch: int, **changes) -> Candidate:
    return landscape.space.with_batch(landscape.space.start, batch).but(changes)


def test_an_estimate_starts_no_shadow_run(landscape):
    shadows = MadeUpShadows(linear)
    predictor = predictor_of(landscape, shadows)
    formula = Formula(landscape.description, "cuda:0")
    assert predictor.train_bytes(at(landscape, 4)) == formula.train_bytes(at(landscape, 4))
    assert predictor.seconds_per_row(at(landscape, 4)) == formula.seconds_per_row(at(landscape, 4))
    assert shadows.traced == []


def test_a_traced_structure_is_told_from_its_trace_at_every_batch(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    assert predictor.trace(at(landscape, 4), 10.0)
    assert not predictor.trace(at(landscape, 8), 10.0)  # the same structure
    assert predictor.train_bytes(at(landscape, 8)) == linear(at(landscape, 8))
    assert predictor.train_bytes(at(landscape, 16)) == linear(at(landscape, 16))


def test_an_estimate_made_before_the_trace_is_forgotten(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    before = predictor.train_bytes(at(landscape, 8))
    predictor.trace(at(landscape, 8), 10.0)
    assert predictor.train_bytes(at(landscape, 8)) == linear(at(landscape, 8)) != before


def test_on_the_cpu_a_process_is_taken_to_hold_more_than_its_live_bytes(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear), "cpu")
    predictor.trace(at(landscape, 4), 10.0)
    assert predictor.train_bytes(at(landscape, 4)) == pytest.approx(1.2 * linear(at(landscape, 4)))


def test_what_was_measured_corrects_what_was_traced_the_nearest_batch_first(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    predictor.trace(at(landscape, 4), 10.0)
    predictor.learn(measured(at(landscape, 4), int(1.1 * linear(at(landscape, 4)))))
    assert predictor.train_bytes(at(landscape, 4)) == pytest.approx(1.1 * linear(at(landscape, 4)), rel=1e-6)
    predictor.learn(measured(at(landscape, 32), int(1.3 * linear(at(landscape, 32)))))
    assert predictor.train_bytes(at(landscape, 16)) == pytest.approx(1.1 * linear(at(landscape, 16)), rel=1e-6)
    assert predictor.train_bytes(at(landscape, 64)) == pytest.approx(1.3 * linear(at(landscape, 64)), rel=1e-6)


def test_another_structure_is_corrected_by_the_median(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    other = at(landscape, 8, activation_checkpointing=not landscape.space.start["activation_checkpointing"])
    for candidate in (at(landscape, 4), other):
        predictor.trace(candidate, 10.0)
    predictor.learn(measured(at(landscape, 4), int(1.2 * linear(at(landscape, 4)))))
    assert predictor.train_bytes(other) == pytest.approx(1.2 * linear(other), rel=1e-6)


def test_a_probe_that_did_not_run_corrects_nothing(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    predictor.trace(at(landscape, 4), 10.0)
    refused = Measurement(
        "0001", "train", at(landscape, 4), Outcome.DEVICE_OOM, 1.0, (PhaseRecord("load", 1.0, 5, 5, 5),)
    )
    predictor.learn(refused)
    assert predictor.train_bytes(at(landscape, 4)) == linear(at(landscape, 4))


def test_speeds_of_traced_and_untraced_structures_can_be_compared(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    formula = Formula(landscape.description, "cuda:0")
    own, other = at(landscape, 8), at(landscape, 8, precision="bf16")
    predictor.trace(own, 10.0)
    ratio = predictor.seconds_per_row(other) / predictor.seconds_per_row(own)
    assert ratio == pytest.approx(formula.seconds_per_row(other) / formula.seconds_per_row(own))


def test_tracing_ends_when_its_time_is_used_up(landscape, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("autofit.prediction.predictor.time.monotonic", lambda: clock[0])
    shadows = MadeUpShadows(linear, seconds=6.0, clock=clock)
    predictor = predictor_of(landscape, shadows)
    precisions = ("fp32", "bf16", "fp16", "tf32")
    traced = [predictor.trace(at(landscape, 8, precision=p), 10.0) for p in precisions]
    assert traced == [True, True, False, False]
    assert predictor.trace(at(landscape, 8, precision="fp16"), 13.0)


def test_a_workload_whose_first_structure_cannot_be_traced_is_left_to_the_formula(landscape):
    shadows = MadeUpShadows(linear, failing=("fp32",))
    predictor = predictor_of(landscape, shadows)
    assert not predictor.trace(at(landscape, 8, precision="fp32"), 10.0)
    assert predictor.untraceable.kind == "Odd"
    assert not predictor.trace(at(landscape, 8, precision="bf16"), 10.0)
    assert shadows.traced == []
    assert predictor.train_bytes(at(landscape, 8)) == Formula(landscape.description, "cuda:0").train_bytes(
        at(landscape, 8)
    )


def test_a_later_structure_that_cannot_be_traced_does_not_end_the_others(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear, failing=("bf16",)))
    assert predictor.trace(at(landscape, 8, precision="fp32"), 10.0)
    assert not predictor.trace(at(landscape, 8, precision="bf16"), 10.0)
    assert predictor.untraceable is None
    assert predictor.trace(at(landscape, 8, precision="fp16"), 10.0)


def test_an_out_of_memory_rules_out_what_is_predicted_to_need_more_in_another_structure(landscape):
    """Without shadow runs only larger batches of the very structure are ruled out."""
    space, budget = landscape.space, landscape.budget
    oom = at(landscape, 8)
    other = at(landscape, 8, precision="bf16")
    history = [
        Measurement(
            "0001", "baseline", oom, Outcome.DEVICE_OOM, 1.0, failure=Failure("train", 1, "OutOfMemoryError", "x")
        )
    ]
    for traced, ruled_out in ((False, False), (True, True)):
        shadows = MadeUpShadows(lambda c: budget.device_bytes // (1 if c["precision"] == "bf16" else 2))
        predictor = predictor_of(landscape, shadows)
        if traced:
            assert predictor.trace(oom, 10.0)
            assert predictor.trace(other, 10.0)
        plan = TrainPlan(space, predictor, landscape.description, budget)
        plan._learn(history)
        assert (plan._ruled_out(other) is not None) == ruled_out
