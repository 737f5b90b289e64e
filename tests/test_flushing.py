"""When evaluation moves what it accumulates to the host: an integer that follows from what is free and from what copies cost."""

import json
from dataclasses import replace

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import BASELINE, MACHINE, Landscape, make_description
from test_planner import run_evaluate
from test_search import decide, make_landscape, make_search, trials

from autofit.errors import UsageError
from autofit.harness.evaluation import copied_rows, device_bytes
from autofit.knobs import make_space
from autofit.records import Budget, Candidate, Failure, Measurement, Outcome
from autofit.report.labels import knob_texts
from autofit.study.flushing import SPARE, choose_steps
from autofit.study.judgement import judge
from autofit.study.mirror import Mirror
from autofit.study.planner import EvaluatePlan

GB = 10**9
ROWS = 20_000
OOM = Failure("evaluate", 3, "OutOfMemoryError", "out of memory")
DEVICE_FAST = (1e12, 5e9)  # bytes per second on the device and on the host, as a GPU and its host have them


def make(eval_bytes_per_row: float, own: int | None = None, rows: int = ROWS, knobs=None, **changes) -> Landscape:
    description = make_description(eval_rows=rows)
    landscape = Landscape(
        0,
        24 * GB,
        0.0,
        eval_bytes_per_row,
        baseline={**BASELINE, "eval_accumulation_steps": own},
        description=description,
        **changes,
    )
    landscape.space = make_space(description, MACHINE, Candidate(landscape.baseline), knobs or {}, frozenset())
    return landscape


def best_of(landscape: Landscape, history: list[Measurement], device: str = "cuda:0") -> Measurement:
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, device)
    assert plan.next(history, in_code=False) is None
    best = plan.best(in_code=False)
    return next(m for m in history if m.candidate == best)


def flushed(history: list[Measurement]) -> list[int]:
    return [m.candidate["eval_accumulation_steps"] for m in history if m.candidate["eval_accumulation_steps"]]


def test_scores_that_do_not_fit_are_moved_as_rarely_as_memory_allows():
    landscape = make(2e6)  # 40 GB over the set
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
    best = best_of(landscape, history)
    batch, steps = best.candidate["per_device_eval_batch_size"], best.candidate["eval_accumulation_steps"]
    assert max(flushed(history)) > 500  # with small batches
    room = SPARE * landscape.budget_bytes
    assert device_bytes(best.growth, batch, steps, True) <= room < device_bytes(best.growth, batch, steps + 1, True)
    assert batch * steps > 0.4 * (room - best.growth.base_bytes) / 2e6  # twice for the concatenation
    assert len(flushed(history)) <= 4


def test_each_batch_has_a_number_of_its_own():
    landscape = make(2e6)
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
    held = {
        m.candidate["per_device_eval_batch_size"] * m.candidate["eval_accumulation_steps"]
        for m in history
        if m.candidate["eval_accumulation_steps"]
    }
    assert len({m.candidate["per_device_eval_batch_size"] for m in history}) > 2
    assert max(held) < 1.1 * min(held)  # the same rows, whatever the batch


def test_a_users_own_small_number_is_raised_where_that_pays_and_fits():
    landscape = make(1e5, own=1, copy_rates=DEVICE_FAST)  # 2 GB: no reason to move anything before the end
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
    own, best = history[0], best_of(landscape, history)
    assert own.candidate["eval_accumulation_steps"] == 1
    assert best.candidate["eval_accumulation_steps"] > 50
    assert best.eval_per_second > 1.3 * max(
        m.eval_per_second for m in history if m.candidate["eval_accumulation_steps"] == 1
    )


def test_where_nothing_accumulates_only_the_batch_is_searched():
    for own in (None, 1000):
        landscape = make(8.0, own=own, copy_rates=DEVICE_FAST)
        history = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
        assert {m.candidate["eval_accumulation_steps"] for m in history} == {own}


def test_on_the_cpu_two_arrays_of_middle_size_are_copied_faster_than_one_that_grows_with_every_step():
    landscape = make(1e5, copy_rates=(2e9, 9e9), rows=5000)  # as measured here
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, "cpu")
    history: list[Measurement] = []
    while (step := plan.next(history, in_code=False)) is not None:
        history.append(landscape.measure(step.candidate, "evaluate"))
    best = best_of(landscape, history, "cpu")
    without = max(m.eval_per_second for m in history if m.candidate["eval_accumulation_steps"] is None)
    assert best.candidate["eval_accumulation_steps"] is not None
    assert best.eval_per_second > 1.15 * without
    assert len(history) <= 10


def test_a_first_step_that_ran_out_leaves_one_step_as_a_start_and_what_it_measures_the_number():
    landscape = make(2e6)
    died = landscape.measure(landscape.space.baseline, "baseline")
    died = replace(died, growth=None, outcome=Outcome.DEVICE_OOM, eval_speed=None, failure=OOM)
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, "cuda:0")
    history = [
        replace(died, candidate=died.candidate.but(per_device_eval_batch_size=b))
        for b in landscape.space.values["per_device_eval_batch_size"]
    ]
    found = []
    while (step := plan.next(history, in_code=False)) is not None:
        found.append(step.candidate["eval_accumulation_steps"])
        history.append(landscape.measure(step.candidate, step.purpose))
    assert found[0] == 1
    assert found[1] > 100


def test_a_number_that_did_not_fit_is_halved():
    landscape = make(2e6)
    plan = EvaluatePlan(landscape.space, landscape.space.baseline, landscape.budget, "cuda:0")
    history: list[Measurement] = []
    failed: list[int] = []
    while (step := plan.next(history, in_code=False)) is not None:
        m = landscape.measure(step.candidate, step.purpose)
        steps = step.candidate["eval_accumulation_steps"]
        if steps and len(failed) < 2:
            failed.append(steps)
            m = replace(m, outcome=Outcome.DEVICE_OOM, eval_speed=None)
        history.append(m)
    assert failed[1] == failed[0] // 2
    assert plan.best(in_code=False)["eval_accumulation_steps"]


def test_once_the_host_is_short_no_other_number_is_tried_and_code_reduces():
    landscape = make(2e6)
    landscape.space = make_space(landscape.description, MACHINE, Candidate(landscape.baseline), {}, frozenset({"code"}))
    tight = Budget(landscape.budget_bytes, 30 * GB)  # 40 GB of scores, twice while they are concatenated
    for in_code in (False, True):
        plan = EvaluatePlan(landscape.space, landscape.space.baseline, tight, "cuda:0")
        history: list[Measurement] = []
        while (step := plan.next(history, in_code)) is not None:
            history.append(judge(replace(landscape.measure(step.candidate, step.purpose), host_bytes=0), tight))
        short = [m for m in history if m.outcome is Outcome.HOST_OOM]
        assert [m.failure.kind for m in short] == ["host_growth"]
        assert len(flushed(history)) == 1
        assert (plan.best(in_code) is not None) == in_code
        assert any(m.candidate["logits"] == "argmax" for m in history) == in_code


@settings(max_examples=100, deadline=None)
@given(
    batch=st.integers(1, 64),
    rows=st.integers(1, 3000),
    rates=st.sampled_from([None, (1e12, 5e9), (2e9, 9e9)]),
    limit=st.sampled_from([None, 24 * GB, 2 * GB]),
)
def test_no_other_number_that_fits_copies_less(batch, rows, rates, limit):
    landscape = make(1e6, rows=rows, copy_rates=rates)
    m = landscape.measure(landscape.space.baseline, "baseline")
    chosen = choose_steps(m, batch, limit)
    per_row = m.growth.device_bytes_per_row

    def cost(steps):
        here, there = copied_rows(rows, batch, steps, True)
        return 0.0 if rates is None else per_row * (here / rates[0] + there / rates[1])

    fitting = [
        n
        for n in range(1, -(-rows // batch) + 1)
        if limit is None or device_bytes(m.growth, batch, n, True) <= SPARE * limit
    ]
    assert chosen in (fitting or [1])
    if fitting:
        assert cost(chosen) <= 1.1 * min(map(cost, fitting)) + 1e-9
    if fitting and rates is None:
        assert chosen == max(fitting)


# ---- the knob ----


def test_a_number_can_be_given_and_is_the_only_one_then():
    landscape = make(2e6, knobs={"eval_accumulation_steps": (7, 19)})
    history = run_evaluate(landscape, landscape.space.baseline, [], in_code=False)
    assert set(flushed(history)) <= {7, 19}
    assert best_of(landscape, history).candidate["eval_accumulation_steps"] in (7, 19)
    with pytest.raises(UsageError, match="eval_accumulation_steps: 0 cannot"):
        make(2e6, knobs={"eval_accumulation_steps": (0,)})


def test_any_integer_up_to_the_rows_is_in_the_space_and_its_size_counts_the_ends():
    space = make(2e6).space
    at = lambda steps: space.baseline.but(eval_accumulation_steps=steps)  # noqa: E731
    assert all(space.holds(at(n), "evaluate") for n in (None, 1, 137, ROWS))
    assert not any(space.holds(at(n), "evaluate") for n in (0, ROWS + 1, True, "137"))
    others = [len(v) for n, v in space.values.items() if n not in ("eval_accumulation_steps",)]
    assert space.size % 2 == 0 and len(space.values["eval_accumulation_steps"]) == 2 and others
    assert knob_texts(at(137))["eval acc"] == "137"


def test_the_study_holds_the_number_as_an_integer_and_an_older_study_is_made_anew(tmp_path):
    landscape = make_landscape(eval_bytes_per_row=20e6)
    search = make_search(tmp_path, landscape, max_probes=40)
    decide(search, tmp_path)
    told = {t.user_attrs["probe"]: t for t in trials(tmp_path, "evaluate")}
    numbers = {m.probe: m.candidate["eval_accumulation_steps"] for m in search.history() if m.probe in told}
    assert any(numbers.values())
    assert {p: t.params["eval_accumulation_steps"] for p, t in told.items()} == {p: n or 0 for p, n in numbers.items()}
    space = search.space
    (tmp_path / "run/study.db").unlink()
    listed = {"eval_accumulation_steps": (None, 1, 2, 4, 8, 16, 32)}
    old = replace(space, values={**space.values, **listed}, integers={})
    history = [m for m in search.history() if (m.candidate["eval_accumulation_steps"] or 1) in (1, 2, 4, 8, 16, 32)]
    Mirror(tmp_path / "run/study.db", old, history, landscape.budget, pytest.fail).close()
    kinds = {type(t.distributions["eval_accumulation_steps"]) for t in trials(tmp_path, "train")}
    assert kinds == {optuna.distributions.CategoricalDistribution}
    Mirror(tmp_path / "run/study.db", space, search.history(), landscape.budget, pytest.fail).close()
    again = trials(tmp_path, "evaluate")
    assert {t.user_attrs["probe"] for t in again} == set(told)
    assert {type(t.distributions["eval_accumulation_steps"]) for t in again} == {optuna.distributions.IntDistribution}


def test_the_number_is_emitted_as_it_was_measured(tmp_path):
    landscape = make_landscape(eval_bytes_per_row=12e6)
    best, _ = decide(make_search(tmp_path, landscape, max_probes=60), tmp_path)
    emitted = json.loads((tmp_path / "run/best/training_args.json").read_text())
    assert emitted["eval_accumulation_steps"] == best.candidate["eval_accumulation_steps"] > 1
