"""Wall time of the whole run: how long the user's schedule is, what is chosen by it, what is told of it."""

import dataclasses
import json
from dataclasses import replace

import pytest
from conftest import make_task
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import BASELINE, MACHINE, Landscape, make_description
from report_cases import BASELINE as OWN
from report_cases import BUDGET, LARGE, choice, probe, usual
from test_search import FIELDS, MadeUpLauncher, decide, make_search
from transformers import TrainerCallback, TrainingArguments

from autofit import api, codec
from autofit.extrapolation import RunSeconds, WholeRun
from autofit.knobs import make_space
from autofit.records import Candidate, Choice, Outcome, Schedule, ScriptTask, Selection, Task
from autofit.report.advice import nothing_fits
from autofit.report.run_time import run_sentences
from autofit.report.sentences import answer
from autofit.report.summary import summarize
from autofit.schedule import NO_EVALUATIONS, NO_LENGTH, NO_SET, plan_run, planned
from autofit.selection import RUN_LONGER, reasons
from autofit.study.decision import Decision

GB = 10**9
SCHEDULE = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 2,
    "eval_strategy": "steps",
    "eval_steps": 0.1,
}
ONLY_BATCHES = {"precision": ("fp32",), "optim": ("adamw_torch",), "activation_checkpointing": (False,)}


# ---- the schedule ----


class Counter(TrainerCallback):
    """Stands in for a whole training: Trainer's own callback decides, step by step."""

    def __init__(self) -> None:
        self.evaluations = 0

    def on_evaluate(self, *args, **kwargs) -> None:
        self.evaluations += 1


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    epochs=st.sampled_from([1, 2, 1.5, 0.4]),
    max_steps=st.sampled_from([-1, -1, 1, 7, 13]),
    strategy=st.sampled_from(["no", "steps", "epoch"]),
    every=st.sampled_from([1, 3, 0.3]),
    delay=st.sampled_from([0, 0, 1, 4]),
    at_start=st.booleans(),
    drop=st.booleans(),
)
def test_steps_and_evaluations_are_those_that_a_trainer_makes(
    tmp_path_factory, rows, batch, accumulation, epochs, max_steps, strategy, every, delay, at_start, drop
):
    import torch
    from transformers import Trainer

    if drop and rows < batch:
        return  # Trainer trains on nothing
    arguments = TrainingArguments(
        str(tmp_path_factory.mktemp("out")), report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, num_train_epochs=epochs,
        max_steps=max_steps, eval_strategy=strategy, eval_steps=every, eval_delay=delay, eval_on_start=at_start,
        dataloader_drop_last=drop, logging_strategy="no",
    )  # fmt: skip

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, labels=None):
            return {"loss": (x * self.weight).mean()}

    made, data = Counter(), [{"x": torch.ones(1), "labels": torch.ones(1)}] * rows
    trainer = Trainer(Line(), arguments, train_dataset=data, eval_dataset=data[:1], callbacks=[made])
    trainer.train()
    user = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    user["eval_strategy"] = arguments.eval_strategy.value
    assert planned(user, rows) == (trainer.state.global_step, made.evaluations)


def describe(user: dict, **changes):
    return make_description(fields=FIELDS, resolved={**SCHEDULE, **user}, **{"train_rows": 4000, **changes})


@pytest.mark.parametrize(
    ("user", "changes", "found"),
    [
        ({}, {}, WholeRun(8000, 10, 1000, 1000)),
        ({"max_steps": 30}, {"train_rows": None}, WholeRun(1920, 10, 1000, 1000)),
        ({"eval_strategy": "no"}, {}, WholeRun(8000, 1, 1000, 1000, NO_EVALUATIONS)),
        ({}, {"train_rows": None}, WholeRun(None, 0, 1000, 1000, NO_LENGTH)),
        ({}, {"eval_rows": None}, WholeRun(8000, 0, None, 0, NO_SET)),
        ({}, {"all_eval_rows": 3000}, WholeRun(8000, 10, 1000, 3000)),
    ],
)
def test_a_run_is_as_long_as_the_schedule_says_and_what_is_assumed_is_said(user, changes, found):
    # 126 steps, one in thirteen of which is evaluated, and the last
    assert plan_run(describe(user, **changes)) == found


def test_seconds_are_those_of_training_and_of_every_evaluation_of_every_set():
    run = WholeRun(8000, 10, 1000, 3000)
    assert run.seconds(100.0, 2.0) == RunSeconds(80.0, 60.0)
    assert run.seconds(100.0, 2.0).eval_share == pytest.approx(60 / 140)
    assert run.seconds(100.0, None) is None
    assert WholeRun(8000, 0, None).seconds(100.0, None) == RunSeconds(80.0, 0.0)
    assert WholeRun(None, 10, 1000, 1000).seconds(100.0, 2.0) is None


def test_what_a_schedule_needs_is_described_of_a_script(launcher, ask, script):
    task = script(
        """
        import torch
        from transformers import Trainer, TrainingArguments
        class Line(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(1))
            def forward(self, x, labels=None):
                return {"loss": (x * self.weight).mean()}
        rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 100
        arguments = TrainingArguments("out", report_to="none", use_cpu=True, eval_strategy="steps", eval_steps=5,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=3, hub_token="hf_secret")
        Trainer(Line(), arguments, train_dataset=rows, eval_dataset={"a": rows[:10], "b": rows[:30]}).train()
        """
    )
    request = ask(task, schedule=Schedule(describe_only=True))
    described = launcher.probe(request, how="fork", time_limit=120).reply.description
    assert plan_run(described) == WholeRun(300, 15, 30, 40)
    assert "hf_secret" not in json.dumps(codec.to_json_value(described))


# ---- the search ----


def tight(evaluations: float = 0.05, eval_speed: float = 0.2) -> Landscape:
    """Only the train batch varies, and the largest leaves room for small evaluation batches alone."""
    description = describe({"eval_steps": evaluations}, eval_rows=4000, arguments={"output_dir": "out"})
    landscape = Landscape(0, 24 * GB, 0.0, 8.0, description=description, eval_speed=eval_speed)
    landscape.space = make_space(description, MACHINE, Candidate(dict(BASELINE)), ONLY_BATCHES, frozenset())
    sizes = {b: landscape.train_bytes(landscape.space.with_batch(landscape.space.baseline, b)) for b in (8, 32, 64)}
    landscape.budget_bytes = int(1.02 * sizes[64])
    landscape.__post_init__()
    landscape.space = make_space(description, MACHINE, Candidate(dict(BASELINE)), ONLY_BATCHES, frozenset())
    # 64 rows fit beside the states of a train batch of 32, and not of one of 64
    landscape.eval_step_bytes = (landscape.budget_bytes - 0.5 * (sizes[32] + sizes[64]) / 2) / 64
    return landscape


def shortest(landscape: Landscape, run: WholeRun) -> float:
    """Of all candidates that fit, in seconds."""
    found = []
    for train in landscape.space.train_candidates():
        for batch in landscape.space.values["per_device_eval_batch_size"]:
            m = landscape.measure(train.but(per_device_eval_batch_size=batch), "baseline")
            if m.outcome is Outcome.FITS:
                found.append(run.seconds(landscape.train_rate(train), m.eval_seconds[0]).total)
    return min(found)


def search(tmp_path, landscape: Landscape, run: WholeRun | None, launcher=None) -> tuple[Choice, list]:
    made = make_search(tmp_path, landscape, launcher, max_probes=80)
    try:
        best, _ = Decision(made, tmp_path / "run", landscape.description, MACHINE, 0.01, made._task, run).run()
        return best, made.history()
    finally:
        made.close()
        made._directory.close()


def test_slower_training_that_leaves_room_for_evaluation_wins_where_the_whole_run_decides(tmp_path):
    landscape = tight()
    run = plan_run(landscape.description)
    for name, by in (("wall", run), ("train", None)):
        (tmp_path / name).mkdir()
        best, history = search(tmp_path / name, landscape, by)
        taken = run.seconds(best.train_per_second, best.eval_seconds).total
        tuned = {m.candidate["per_device_train_batch_size"] for m in history if m.purpose == "evaluate"}
        if by is None:
            assert best.candidate["per_device_train_batch_size"] == 64
            assert taken > 1.1 * shortest(landscape, run)
            assert tuned == {64}
        else:
            assert best.candidate["per_device_train_batch_size"] < 64
            assert taken <= 1.02 * shortest(landscape, run)
            assert len(tuned) > 1
            own = landscape.measure(landscape.space.baseline, "baseline")
            before = run.seconds(own.train_speed.per_second, own.eval_seconds[0]).total
            assert best.gain == pytest.approx(before / taken)
        assert any(m.candidate == best.candidate and m.purpose == "evaluate" for m in history)  # nothing unmeasured


def test_where_evaluation_is_little_one_setting_is_enough(tmp_path):
    landscape = tight(evaluations=0.5, eval_speed=1000.0)
    best, history = search(tmp_path, landscape, plan_run(landscape.description))
    assert best.candidate["per_device_train_batch_size"] == 64
    assert {m.candidate["per_device_train_batch_size"] for m in history if m.purpose == "evaluate"} == {64}


def test_a_gain_of_wall_time_is_of_undisturbed_turns(tmp_path):
    landscape = tight()
    run = plan_run(landscape.description)
    launcher = MadeUpLauncher(landscape)

    def disturb(request, reply):
        """The first turn of the winner: four times as slow, and its threads waited."""
        if request.files and len([r for r, _ in launcher.requests if r.files]) == 1:
            slow = replace(reply.eval_speed, seconds=tuple(4 * s for s in reply.eval_speed.seconds), delay_share=0.4)
            return replace(reply, eval_speed=slow)
        return reply

    launcher.twist = disturb
    best, history = search(tmp_path, landscape, run, launcher)
    assert any(m.outcome is Outcome.CONTAMINATED for m in history if m.purpose == "confirm")
    own = landscape.measure(landscape.space.baseline, "baseline")
    its = landscape.measure(best.candidate, "baseline")
    before, after = (run.seconds(m.train_speed.per_second, m.eval_seconds[0]).total for m in (own, its))
    assert best.gain == pytest.approx(before / after)


def test_a_winner_whose_whole_run_lost_in_turn_gives_way_to_the_users_own_settings(tmp_path):
    landscape = tight()

    def slow_from_files(request, reply):
        if request.files:
            return replace(reply, eval_speed=replace(reply.eval_speed, seconds=(9999.0,)))
        return reply

    best, _ = search(tmp_path, landscape, plan_run(landscape.description), MadeUpLauncher(landscape, slow_from_files))
    assert best.candidate == landscape.space.baseline


# ---- what is told ----


def shown(chosen: Selection, measurements) -> str:
    rows = summarize(measurements, chosen, BUDGET, "").rows
    return " ".join(run_sentences(chosen, rows))


def test_the_whole_run_is_told_of_both_where_evaluation_is_more_than_a_twentieth_of_it():
    measurements, chosen = usual()
    # 19.6 and 41.2 rows/s of training, 120 and 310 of evaluation over 10,000 rows
    text = shown(replace(chosen, run=WholeRun(100_000, 10, 10_000, 10_000)), measurements)
    assert text == (
        "Your whole run, projected: yours 1 h 38 min (training 1 h 25 min, 10 evaluations 13 min 53 s); "
        "best 45 min 50 s (training 40 min 27 s, 10 evaluations 5 min 23 s)."
    )
    assert shown(replace(chosen, run=WholeRun(10_000_000, 10, 10_000, 10_000)), measurements) == ""
    assert shown(replace(chosen, run=WholeRun(None, 0, 10_000, 10_000, NO_LENGTH)), measurements) == ""
    assert shown(chosen, measurements) == ""  # an older search
    assumed = WholeRun(10_000, 1, 10_000, 10_000, NO_EVALUATIONS)
    assert f"projected ({NO_EVALUATIONS}): yours" in shown(replace(chosen, run=assumed), measurements)
    by_run = replace(chosen, run=WholeRun(10_000_000, 10, 10_000, 10_000), objective="wallclock")
    assert "yours" in shown(by_run, measurements)


def test_settings_that_do_not_fit_have_no_run():
    measurements, chosen = usual()
    chosen = replace(chosen, run=WholeRun(100_000, 10, 10_000, 10_000), baseline_outcome=Outcome.DEVICE_OOM)
    failed = [replace(m, outcome=Outcome.DEVICE_OOM) for m in measurements if m.candidate == OWN]
    others = [m for m in measurements if m.candidate != OWN]
    assert "yours" not in shown(chosen, [*failed, *others])


def test_a_gain_of_wall_time_is_told_as_one():
    measurements, chosen = usual()
    run = WholeRun(100_000, 10, 10_000, 10_000)
    chosen = replace(chosen, objective="wallclock", run=run, best=replace(chosen.best, gain=2.14))
    text = " ".join(answer(chosen, measurements, BUDGET))
    assert text.startswith("2.1× as fast as your settings over the whole run, projected; training 41.2")
    summary = summarize(measurements, chosen, BUDGET, "")
    assert {row.role: row.gain for row in summary.rows if row.gain} == {"best": 2.14, "yours": 1.0}
    assert any("projected time of the whole run" in note for note in summary.notes)


def test_what_trains_faster_and_lost_is_said_to():
    faster = LARGE.but(precision="bf16")
    measurements = [probe(1, faster, rates=(60.0, 60.2), train=300)]
    chosen = choice(LARGE, 41.2, 2.1)
    assert reasons(measurements, chosen, None, (), by_run=True)[faster.key] == RUN_LONGER
    listed, by = usual()
    by = replace(by, objective="wallclock", run=WholeRun(100_000, 10, 10_000, 10_000))
    rows = summarize([*listed, replace(measurements[0], probe="0007")], by, BUDGET, "").rows
    assert next(row for row in rows if row.candidate == faster).reason == RUN_LONGER


# ---- the option ----


def test_an_objective_that_is_not_known_is_refused():
    with pytest.raises(api.UsageError, match="--objective 'speed' is not known; use throughput or wallclock"):
        api.search(model="x", objective="speed")


@pytest.mark.long
def test_a_search_by_wall_time_says_what_it_assumes_and_tells_the_whole_run(tmp_path):
    heard = []

    class Hears(api.Listener):
        def said(self, text):
            heard.append(text)

    config = make_task().model.config
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    found = api.search(
        model=str(folder), task="causal-lm", seq_len=16, effective_batch=8, eval_rows=64, device="cpu", max_probes=8,
        objective="wallclock", out=tmp_path / "run", listener=Hears(), knobs=("precision=fp32",),
    )  # fmt: skip
    assert any(NO_EVALUATIONS in text for text in heard)
    assert (found.selection.objective, found.selection.run.evaluations) == ("wallclock", 1)
    again = api.load(tmp_path / "run")
    assert again.selection.run == found.selection.run
    assert found.selection.best.eval_seconds > 0


def test_where_no_evaluation_can_be_timed_training_decides(tmp_path):
    landscape = tight()
    untimed = MadeUpLauncher(landscape, lambda request, reply: replace(reply, eval_speed=None, growth=None))
    best, _ = search(tmp_path, landscape, plan_run(landscape.description), untimed)
    assert best.candidate["per_device_train_batch_size"] == 64
    assert best.gain == pytest.approx(
        landscape.train_rate(best.candidate) / landscape.train_rate(landscape.space.baseline)
    )


@pytest.mark.parametrize("reductions", [("full", "argmax"), ("full",)])
def test_a_host_that_is_too_small_for_what_accumulates_is_asked_once_and_then_code_or_advice(tmp_path, reductions):
    landscape = tight()
    landscape.description = replace(landscape.description, reductions=reductions)
    own = Candidate(dict(BASELINE))
    landscape.space = make_space(landscape.description, MACHINE, own, ONLY_BATCHES, frozenset())
    landscape.eval_step_bytes, landscape.eval_bytes_per_row = 0.0, 20e6  # 80 GB, of 64 GB of host memory
    made = make_search(tmp_path, landscape, max_probes=80)
    best, with_code = decide(made, tmp_path)
    short = [m for m in made.history() if m.failure is not None and m.failure.kind == "host_growth"]
    assert [m.candidate["per_device_train_batch_size"] for m in short] == [64]
    assert best is None
    if len(reductions) > 1:
        assert with_code.candidate["logits"] == "argmax"
    else:
        assert with_code is None
        task = Task(script=ScriptTask(("train.py",), "."))
        text = nothing_fits(made.history(), landscape.budget, landscape.description, task)
        assert "training fits and evaluation does not" in text
        assert "more host memory: add --host-budget" in text
        assert "preprocess_logits_for_metrics" in text
