"""A plan is the search's own path over estimates, in its order, and says how long it takes."""

import json
import os
import subprocess
import sys

import pytest
from landscapes import MACHINE, Landscape, make_description
from test_predictor import MadeUpShadows

from autofit.knobs import make_space
from autofit.prediction import Predictor
from autofit.records import Candidate
from autofit.report.outlook import CONFIRM_PROBES, plan_seconds, plan_steps, reply_seconds
from autofit.study.planner import TrainPlan

GB = 10**9


def steps_of(landscape, history=(), most=60):
    return plan_steps(landscape.space, landscape.description, MACHINE, landscape.budget, history, most)


@pytest.mark.parametrize("budget", [3 * GB, 8 * GB, 24 * GB])
def test_a_plan_is_what_a_search_probes_where_every_estimate_is_true(budget):
    landscape = Landscape(0, budget, error=0.0)
    predictor = Predictor(landscape.description, MACHINE.device)
    plan = TrainPlan(landscape.space, predictor, landscape.description, landscape.budget)
    history = []
    while (step := plan.next(history, False)) is not None:
        history.append(landscape.measure(step.candidate, step.purpose))
        predictor.learn(history[-1])
    planned = [s for s in steps_of(landscape) if s.purpose != "evaluate"]
    assert [s.candidate for s in planned[: len(history)]] == [m.candidate for m in history]
    assert [s.purpose for s in planned[: len(history)]] == [m.purpose for m in history]


def test_a_plan_begins_with_the_users_settings_and_holds_evaluations():
    landscape = Landscape(0, 24 * GB)
    steps = steps_of(landscape)
    assert (steps[0].purpose, steps[0].candidate, steps[0].relative_seconds) == (
        "baseline",
        landscape.space.baseline,
        1,
    )
    assert {s.purpose for s in steps} == {"baseline", "train", "evaluate"}
    assert all(s.why and s.train_bytes > 0 and s.relative_seconds > 0 for s in steps)
    assert len(steps) < landscape.space.size / 4  # and not the whole product
    assert len({(s.candidate, s.purpose) for s in steps}) == len(steps)


def test_without_an_evaluation_set_none_is_planned():
    description = make_description(eval_rows=None)
    baseline = {k: v for k, v in Landscape(0, GB).baseline.items() if "eval" not in k and k != "logits"}
    space = make_space(description, MACHINE, Candidate(baseline), {}, frozenset())
    budget = Landscape(0, 24 * GB).budget
    assert "evaluate" not in {s.purpose for s in plan_steps(space, description, MACHINE, budget, (), 60)}


def test_what_was_measured_is_not_planned_again_and_a_limit_is_kept():
    landscape = Landscape(0, 24 * GB, error=0.0)
    history = [landscape.measure(landscape.space.baseline, "baseline")]
    assert [s.candidate for s in steps_of(landscape, history)] == [s.candidate for s in steps_of(landscape)[1:]]
    assert len(steps_of(landscape, most=4)) <= 4
    assert len(history) == 1


def test_evaluation_that_gathers_too_much_is_planned_with_what_would_help():
    description = make_description(
        model_class="GPT2LMHeadModel", eval_rows=100_000, reductions=("full", "argmax"), has_metrics=True
    )
    steps = steps_of(Landscape(0, 24 * GB, description=description))
    helped = [s.candidate for s in steps if s.purpose == "evaluate"]
    assert any(c["eval_accumulation_steps"] is not None for c in helped)
    assert any(c["logits"] == "argmax" for c in helped)


def test_the_time_of_a_plan_is_that_of_earlier_probes_else_that_of_the_describing_child():
    landscape = Landscape(0, 24 * GB)
    done = [landscape.measure(landscape.space.baseline, "baseline")] * 3
    assert plan_seconds(6, done, 99.0) == pytest.approx((6 + CONFIRM_PROBES) * 10.0)
    assert plan_seconds(6, (), 3.0, 7.0) == pytest.approx(6 * 13.0 + 4 * 20.0)
    assert plan_seconds(6, (), None) is None


def test_the_describing_childs_time_is_read_from_its_folder(tmp_path):
    assert reply_seconds(tmp_path) is None
    (tmp_path / "request.json").write_text(json.dumps({"requested_at": 1000.0}))
    assert reply_seconds(tmp_path) is None
    (tmp_path / "reply.json").write_text("{}")
    os.utime(tmp_path / "reply.json", (1004.5, 1004.5))
    assert reply_seconds(tmp_path) == pytest.approx(4.5)
    (tmp_path / "request.json").write_text("{")
    assert reply_seconds(tmp_path) is None


def test_a_plan_needs_neither_optuna_nor_torch():
    code = (
        "import sys, autofit.api, autofit.report.outlook; print({'optuna', 'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "set()", run.stderr


def test_a_plan_takes_what_fits_under_the_cap_to_fit():
    """18 GB alive in 36 GB reserved: what is cached goes back, so no smaller batch is looked for."""
    landscape = Landscape(0, 24 * GB)
    shadows = MadeUpShadows(lambda c: 18 * GB, cached=2.0)
    steps = plan_steps(landscape.space, landscape.description, MACHINE, landscape.budget, (), 4, shadows)
    assert all(s.train_bytes == 24 * GB for s in steps if s.traced)
    assert any(s.traced for s in steps)
    assert steps[2].why != "the smallest estimated peak"


def test_the_seconds_of_shadow_runs_are_said_once():
    import autofit.prediction.predictor as predictor
    import autofit.report.outlook as outlook
    import autofit.study.driver as driver

    assert outlook.SHADOW_SECONDS is driver.SHADOW_SECONDS is predictor.SHADOW_SECONDS
