"""The predictor of a search over made-up shadow runs: what it believes, what corrects it, and what it never starts."""

from dataclasses import replace

import pytest
from landscapes import Landscape

from autofit.prediction import Predictor, make_target, structure
from autofit.prediction.formula import Formula
from autofit.records import Candidate, Failure, Measurement, Outcome, PhaseRecord, Prediction
from autofit.study.planner import TrainPlan

GB = 10**9


class MadeUpShadows:
    """Peaks of `bytes_of(candidate)` for structures that were traced, each trace taking `seconds` of the clock.

    The allocator reserves `cached` times as much, and `fits` answers by live bytes unless `replays` is None. What was
    `traced` may be handed in, as the run directory keeps it.
    """

    def __init__(
        self, bytes_of, failing=(), seconds=0.0, clock=None, cached=1.0, context=0, replays=True, traced=None
    ) -> None:
        self.bytes_of, self.failing, self.seconds, self.clock = bytes_of, failing, seconds, clock
        self.cached, self.replays = cached, replays
        self.target = replace(make_target(), context_bytes=context)
        self.traced: list[str] = [] if traced is None else traced
        self.failed: set[str] = set()
        self.asked: list[tuple[str, int]] = []

    def fits(self, candidate: Candidate, cap_bytes: int) -> bool | None:
        self.asked.append((candidate.key, cap_bytes))
        return self.bytes_of(candidate) <= cap_bytes if self.replays else None

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
        reserved = int(peak * self.cached)
        phases = (PhaseRecord("train", 0.0, peak, reserved, reserved + self.target.context_bytes),)
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


def plan_of(landscape: Landscape, predictor: Predictor) -> TrainPlan:
    return TrainPlan(landscape.space, predictor, landscape.description, landscape.budget)


def failed(candidate: Candidate, outcome: Outcome) -> Measurement:
    return Measurement("0001", "train", candidate, outcome, 1.0, failure=Failure("train", 1, "OutOfMemory", "x"))


# ---- what fits under a cap ----


def test_what_the_allocator_only_caches_does_not_keep_a_candidate_from_fitting(landscape):
    """18 GB alive and 36 GB reserved: under a cap of 24 GB the cached segments go back."""
    shadows = MadeUpShadows(linear, cached=2.0)
    predictor = predictor_of(landscape, shadows)
    plain = at(landscape, 16, activation_checkpointing=False)
    predictor.trace(plain, 10.0)
    assert predictor.train_bytes(plain) == 36 * GB
    assert predictor.fits(plain, 24 * GB)
    assert plan_of(landscape, predictor)._ruled_out(plain) is None
    assert plan_of(landscape, predictor)._largest_fitting(plain, [4, 8, 16, 32]) == 16
    assert not predictor.fits(at(landscape, 32, activation_checkpointing=False), 24 * GB)


def test_the_cap_is_the_budget_less_the_context_by_what_was_measured_over_predicted(landscape):
    shadows = MadeUpShadows(linear, cached=2.0, context=GB)
    predictor = predictor_of(landscape, shadows)
    plain = at(landscape, 16, activation_checkpointing=False)
    predictor.trace(plain, 10.0)
    for _ in range(2):
        predictor.fits(plain, 24 * GB)
    assert shadows.asked == [(plain.key, 23 * GB)]  # one replay, and kept
    predictor.learn(measured(plain, int(1.25 * predictor.train_bytes(plain))))
    predictor.fits(plain, 24 * GB, 1.15)
    assert shadows.asked[1:] == [(plain.key, pytest.approx((1.15 * 24 * GB - GB) / 1.25, rel=1e-6))]
    assert not predictor.fits(plain, 23 * GB)  # 22 GB by 1.25 are fewer than what is alive
    assert len(shadows.asked) == 2


def test_a_peak_that_the_cap_has_cut_corrects_nothing(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear, cached=2.0))
    plain = at(landscape, 16, activation_checkpointing=False)
    predictor.trace(plain, 10.0)
    cut = PhaseRecord("train", 1.0, 18 * GB, 24 * GB, 24 * GB, retries=3)
    predictor.learn(replace(measured(plain, 0), phases=(cut,)))
    assert predictor.train_bytes(plain) == 36 * GB


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_what_cannot_be_replayed_is_told_by_formula_and_a_cpu_replays_nothing(landscape, device):
    shadows = MadeUpShadows(linear, cached=2.0, replays=False)
    predictor = predictor_of(landscape, shadows, device)
    plain = at(landscape, 16, activation_checkpointing=False)
    predictor.trace(plain, 10.0)
    by_formula = Formula(landscape.description, device).train_bytes(plain)
    budget = 24 * GB
    if device == "cpu":
        assert predictor.fits(plain, budget) == (predictor.train_bytes(plain) <= budget)
        assert shadows.asked == []
    else:
        assert predictor.fits(plain, budget) == (by_formula <= budget)
        assert len(shadows.asked) == 1


def test_an_evaluation_that_does_not_fit_says_nothing_of_training(landscape):
    class Evaluating(MadeUpShadows):
        def predict(self, candidate):
            found = super().predict(candidate)
            return replace(found, phases=(*found.phases, PhaseRecord("evaluate", 0.0, 90 * GB, 90 * GB, 90 * GB)))

        def fits(self, candidate, cap_bytes):
            return cap_bytes >= 90 * GB  # of the whole run

    predictor = predictor_of(landscape, Evaluating(linear, cached=2.0))
    plain = at(landscape, 16, activation_checkpointing=False)
    predictor.trace(plain, 10.0)
    assert predictor.fits(plain, 24 * GB)


def test_an_untraced_candidate_fits_by_formula(landscape):
    predictor = predictor_of(landscape, MadeUpShadows(linear))
    needed = predictor.train_bytes(at(landscape, 8))
    assert predictor.fits(at(landscape, 8), needed)
    assert not predictor.fits(at(landscape, 8), needed - 1)
    assert predictor.fits(at(landscape, 8), int(needed / 1.2), 1.25)
    assert predictor.least_bytes(at(landscape, 8)) is None


def test_what_ran_out_of_memory_rules_out_what_keeps_more_alive_not_what_reserves_more(landscape):
    class Caching(MadeUpShadows):
        """bf16 reserves three times what it keeps alive, which is less."""

        def predict(self, candidate):
            self.cached = 3.0 if candidate["precision"] == "bf16" else 1.0
            return super().predict(candidate)

    oom, other = at(landscape, 8, precision="fp32"), at(landscape, 8, precision="bf16")
    for alive, ruled_out in ((0.5, False), (1.2, True)):
        shadows = Caching(lambda c, alive=alive: int(15 * GB * (alive if c["precision"] == "bf16" else 1)))
        predictor = predictor_of(landscape, shadows)
        predictor.trace(oom, 10.0)
        predictor.trace(other, 10.0)
        plan = plan_of(landscape, predictor)
        plan._learn([failed(oom, Outcome.DEVICE_OOM)])
        assert (plan._ruled_out(other) is not None) == ruled_out


@pytest.mark.parametrize(
    ("outcome", "others"), [(Outcome.DEVICE_OOM, True), (Outcome.OVER_BUDGET, True), (Outcome.HOST_OOM, False)]
)
def test_a_host_that_ran_out_rules_out_larger_batches_of_the_structure_and_no_other_structure(
    landscape, outcome, others
):
    shadows = MadeUpShadows(lambda c: linear(c) * (2 if c["precision"] == "bf16" else 1))
    predictor = predictor_of(landscape, shadows)
    own, other = at(landscape, 4, precision="fp32"), at(landscape, 4, precision="bf16")
    predictor.trace(own, 10.0)
    predictor.trace(other, 10.0)
    plan = plan_of(landscape, predictor)
    plan._learn([failed(own, outcome)])
    assert plan._ruled_out(at(landscape, 8, precision="fp32")) is not None
    assert plan._ruled_out(at(landscape, 2, precision="fp32")) is None
    assert (plan._ruled_out(other) is not None) == others


def test_speeds_do_not_depend_on_what_was_asked_before(landscape):
    """A resumed search has asked for nothing yet, and finds the traces kept."""
    own, untraced = at(landscape, 8), at(landscape, 8, precision="bf16")
    first = predictor_of(landscape, MadeUpShadows(linear))
    first.trace(own, 10.0)
    first.learn(measured(own, 10 * GB))
    for batch in (2, 32, 64):
        first.seconds_per_row(at(landscape, batch))
    resumed = predictor_of(landscape, MadeUpShadows(linear, traced=[structure(own)]))
    resumed.learn(measured(own, 10 * GB))
    assert resumed.seconds_per_row(untraced) == first.seconds_per_row(untraced)


def test_the_whole_batch_at_once_is_not_tried_where_a_shadow_run_says_that_it_cannot_fit(landscape):
    space, budget = landscape.space, landscape.budget
    own = Measurement(
        "0001",
        "baseline",
        space.baseline,
        Outcome.DEVICE_OOM,
        1.0,
        failure=Failure("train", 1, "OutOfMemoryError", "x"),
    )
    for traced in (False, True):
        shadows = MadeUpShadows(lambda c: int(c["per_device_train_batch_size"]) * budget.device_bytes // 8)
        predictor = predictor_of(landscape, shadows)
        if traced:
            predictor.trace(space.baseline, 10.0)
            predictor.trace(space.with_batch(space.start, space.batches[-1]), 10.0)
        step = TrainPlan(space, predictor, landscape.description, budget).next([own], in_code=False)
        assert (step.candidate == space.with_batch(space.start, space.batches[-1])) is not traced
