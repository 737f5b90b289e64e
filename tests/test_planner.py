"""The planner against made-up machines whose truth it does not know."""

from dataclasses import replace

import pytest
from landscapes import BASELINE, MACHINE, Landscape, make_description

from autofit.knobs import make_space, needs_code
from autofit.prediction import Predictor
from autofit.records import AccumulationCheck, Candidate, Failure, Measurement, Outcome
from autofit.study.planner import EvaluatePlan, TrainPlan

GB = 10**9


def run_train(landscape: Landscape, in_code: bool = False, most: int = 60) -> list[Measurement]:
    """The whole training search; the planner's view of memory is corrected as the driver does it."""
    predictor = Predictor(landscape.description, "cuda:0")
    plan = TrainPlan(landscape.space, predictor, landscape.description, landscape.budget)
    history: list[Measurement] = []
    for _ in range(most):
        step = plan.next(history, in_code)
        if step is None:
            return history
        history.append(landscape.measure(step.candidate, step.purpose))
        predictor.learn(history[-1])
    raise AssertionError(f"no end after {most} probes")


def run_evaluate(
    landscape: Landscape, chosen: Candidate, history: list[Measurement], in_code: bool
) -> list[Measurement]:
    plan = EvaluatePlan(landscape.space, chosen, landscape.budget, "cuda:0")
    history = list(history)
    for _ in range(30):
        step = plan.next(history, in_code)
        if step is None:
            return history
        history.append(landscape.measure(step.candidate, step.purpose))
    raise AssertionError("no end after 30 probes")


def best_found(history: list[Measurement]) -> float:
    return max((m.train_speed.per_second for m in history if m.ran and m.train_speed), default=0.0)


@pytest.mark.parametrize("budget_gb", [3, 5, 8, 16, 24])
@pytest.mark.parametrize("error", [0.0, 0.1, 0.3])
def test_the_search_ends_near_the_best_of_the_whole_grid(budget_gb, error):
    regrets, probes = [], []
    for seed in range(10):
        landscape = Landscape(seed, int(budget_gb * GB), error)
        history = run_train(landscape)
        best = landscape.best_rate()
        if best:
            regrets.append(1 - best_found(history) / best)
        probes.append(len(history))
    regrets.sort()
    assert regrets[len(regrets) // 2] <= 0.02, regrets
    assert regrets[-1] <= max(0.05, error), regrets  # the error is each structure's own, and not to be foreseen
    assert max(probes) <= 24, probes


def test_no_candidate_is_probed_twice():
    for seed in range(30):
        history = run_train(Landscape(seed, 6 * GB), in_code=True)
        keys = [m.candidate.key for m in history]
        assert len(keys) == len(set(keys))


def test_the_users_own_settings_come_first_and_the_full_batch_second():
    history = run_train(Landscape(0, 24 * GB))
    assert history[0].purpose == "baseline"
    assert history[0].candidate == Candidate(BASELINE)
    assert history[1].candidate["per_device_train_batch_size"] == 64
    assert history[1].candidate["gradient_accumulation_steps"] == 1


def test_the_effective_batch_is_held_by_every_candidate():
    for m in run_train(Landscape(3, 5 * GB), in_code=True):
        assert m.candidate["per_device_train_batch_size"] * m.candidate["gradient_accumulation_steps"] == 64


def test_knobs_in_code_are_only_tried_when_asked_for():
    assert all(m.candidate["attention"] == "sdpa" for m in run_train(Landscape(1, 24 * GB), in_code=False))
    assert any(m.candidate["attention"] == "eager" for m in run_train(Landscape(1, 24 * GB), in_code=True))


def test_where_every_batch_that_is_left_needs_code_nothing_is_tried_without_it():
    check = AccumulationCheck(4, 2, 1.0, (1.0, 2.0), "", "loss_is_scaled_for_ga", False)
    description = make_description(accumulation=check)
    landscape = Landscape(0, 24 * GB, baseline={**BASELINE, "loss": "own"}, description=description)
    narrowed = {"per_device_train_batch_size": (16, 32)}
    landscape.space = make_space(description, MACHINE, Candidate(landscape.baseline), narrowed, frozenset())
    assert landscape.space.batches_for(in_code=False) == ()
    assert [m.purpose for m in run_train(landscape)] == ["baseline"]
    tried = [m.candidate for m in run_train(landscape, in_code=True)[1:]]
    assert tried and all(c["loss"] == "scaled" for c in tried)


def test_a_search_in_which_nothing_fits_gives_up_after_a_handful():
    history = run_train(Landscape(0, 500 * 10**6, error=0.0))
    assert 2 <= len(history) <= 10
    assert not any(m.ran for m in history)


def test_what_only_the_smallest_candidate_fits_is_found():
    landscape = Landscape(0, 24 * GB, error=0.0)
    smallest = min(landscape.train_bytes(c) for c in landscape.space.train_candidates())
    landscape = Landscape(0, int(smallest * 1.02), error=0.0)
    assert any(m.ran for m in run_train(landscape))


def test_an_out_of_memory_does_not_rule_out_a_smaller_batch():
    landscape = Landscape(0, 24 * GB, error=0.0)
    full = landscape.space.with_batch(landscape.space.baseline, 64)
    landscape = Landscape(0, int(landscape.train_bytes(full) * 0.9), error=0.0)
    history = run_train(landscape)
    assert history[1].outcome is Outcome.DEVICE_OOM
    assert any(m.ran and m.candidate["per_device_train_batch_size"] == 32 for m in history)


def test_a_baseline_that_only_fails_in_evaluation_is_timed_without_it():
    landscape = Landscape(0, 24 * GB)
    predictor = Predictor(landscape.description, "cuda:0")
    plan = TrainPlan(landscape.space, predictor, landscape.description, landscape.budget)
    failed = landscape.measure(landscape.space.baseline, "baseline")
    failed = replace(failed, outcome=Outcome.DEVICE_OOM, train_speed=None, failure=Failure("evaluate", 3, "X", "x"))
    step = plan.next([failed], in_code=False)
    assert (step.purpose, step.candidate) == ("train", landscape.space.baseline)


def test_fp16_is_never_tried_with_fp16_weights():
    description = make_description(dtypes={"float16": 110_000_000})
    history = run_train(Landscape(2, 24 * GB, description=description))
    assert all(m.candidate["precision"] != "fp16" for m in history)


def test_small_logits_take_the_fastest_evaluation_batch_and_no_code():
    landscape = Landscape(0, 24 * GB, eval_bytes_per_row=8.0)
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=True)
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, "cuda:0")
    plan.next(history, in_code=True)
    best = plan.best(in_code=True)
    assert best["per_device_eval_batch_size"] >= 64
    assert best["logits"] == "full"
    assert len(history) <= 6


def test_logits_that_do_not_fit_are_flushed_to_the_host_with_arguments_alone():
    landscape = Landscape(0, 24 * GB, eval_bytes_per_row=20e6)  # 20 GB over the set, twice for the concatenation
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, "cuda:0")
    plan.next(history, in_code=False)
    best = plan.best(in_code=False)
    assert best is not None
    assert isinstance(best["eval_accumulation_steps"], int)
    assert best["logits"] == "full"


def test_logits_that_do_not_fit_are_reduced_where_code_is_allowed():
    landscape = Landscape(0, 24 * GB, eval_bytes_per_row=20e6)
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=True)
    assert any(m.candidate["logits"] == "argmax" and m.outcome is Outcome.FITS for m in history)


def test_of_several_reductions_that_leave_metrics_alone_the_smallest_is_enough():
    description = make_description(reductions=("full", "argmax", "top_k", "first"))
    landscape = Landscape(0, 24 * GB, eval_bytes_per_row=20e6, description=description)
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=True)
    assert {m.candidate["logits"] for m in history} == {"full", "argmax"}


FORMS = {"eval_do_concat_batches": (True, False), "batch_eval_metrics": (False, True), "prediction_loss_only": (False,)}


def with_forms(**more) -> Landscape:
    description = make_description(metrics_forms=FORMS, **more)
    baseline = {**BASELINE, **{name: values[0] for name, values in FORMS.items()}}
    return Landscape(0, 24 * GB, eval_bytes_per_row=20e6, description=description, baseline=baseline)


def test_what_the_metrics_function_receives_is_changed_in_code_only_and_where_no_reduction_does():
    landscape = with_forms(reductions=("full",))
    own = {name: values[0] for name, values in FORMS.items()}
    without = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
    assert all(m.candidate[name] == value for m in without for name, value in own.items())
    history = run_evaluate(landscape, landscape.space.baseline, without, in_code=True)
    tried = [m.candidate for m in history[len(without) :]]
    assert {c["batch_eval_metrics"] for c in tried} == {True}
    assert {c["eval_do_concat_batches"] for c in tried} == {True}  # nothing accumulates any more
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, "cuda:0")
    plan.next(history, in_code=False)
    assert all(plan.best(in_code=False)[name] == value for name, value in own.items())
    assert all(needs_code(c, landscape.space.baseline) for c in tried)
    reduced = run_evaluate(with_forms(), landscape.space.baseline, [], in_code=True)
    assert all(m.candidate["batch_eval_metrics"] is False for m in reduced)
