"""The whole search on made-up machines: stages, confirmation, files, journal, Optuna's mirror. No child is started."""

import json
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from landscapes import BASELINE, MACHINE, Landscape, make_description
from test_predictor import MadeUpShadows

from autofit.errors import WorkloadError
from autofit.knobs import make_space
from autofit.launch import Ended
from autofit.records import Candidate, Failure, ModelTask, Outcome, Prediction, Reply, Speed, Task
from autofit.store import RunDirectory
from autofit.study.decision import Decision
from autofit.study.driver import Limits, Search
from autofit.study.listener import Listener
from autofit.trainer_args import candidate_values

GB = 10**9
FIELDS = (
    "output_dir", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "optim",
    "per_device_eval_batch_size", "eval_accumulation_steps", "activation_checkpointing", "bf16", "fp16", "tf32", "use_cpu",
)  # fmt: skip
TASK = Task(model=ModelTask("m", {}, "text-classification", 64, "float32", 1000))


class MadeUpLauncher:
    """Answers requests from a landscape, as children would; `twist` may spoil an answer."""

    snapshot = lost = None
    way = "fork"

    def __init__(self, landscape: Landscape, twist=lambda request, reply: reply) -> None:
        self.landscape, self.twist, self.requests = landscape, twist, []

    def warm(self, modules) -> None:
        pass

    def probe(self, request, *, how, **_) -> Ended:
        if request.shadow is not None:
            failure = Failure("train", None, "CannotShadowError", "a landscape has no operators")
            return Ended(Reply(Outcome.CRASHED, failure=failure), 1.0, 10**8, how)
        self.requests.append((request, how))
        arguments, kwargs, logits = dict(request.arguments), dict(request.model_kwargs), request.logits
        if request.files:
            folder = Path(request.files)
            arguments = json.loads((folder / "training_args.json").read_text())
            if (folder / "model_kwargs.json").exists():
                kwargs = json.loads((folder / "model_kwargs.json").read_text())
            logits = (
                "argmax"
                if (folder / "snippet.py").exists() and "argmax" in (folder / "snippet.py").read_text()
                else "full"
            )
        values = candidate_values({**arguments, "activation_checkpointing": arguments["activation_checkpointing"]})
        candidate = Candidate({**values, "attention": kwargs.get("attn_implementation", "sdpa"), "logits": logits})
        m = self.landscape.measure(candidate, "baseline" if request.schedule.evaluate else "train")
        reply = Reply(
            m.outcome if m.outcome is not Outcome.OVER_BUDGET else Outcome.FITS,
            phases=m.phases,
            train_speed=m.train_speed if request.schedule.timed_steps else None,
            eval_speed=m.eval_speed,
            growth=m.growth,
            failure=m.failure,
            steps=9,
        )
        return Ended(self.twist(request, reply), 10.0, 10**9, how)


def make_search(tmp_path: Path, landscape: Landscape, launcher=None, max_probes: int = 40, listener=None) -> Search:
    directory = RunDirectory.open(tmp_path / "run", {"identity": "x"})
    return Search(
        task=TASK,
        machine=MACHINE,
        budget=landscape.budget,
        description=landscape.description,
        space=landscape.space,
        directory=directory,
        launcher=launcher or MadeUpLauncher(landscape),
        limits=Limits(max_probes, None, 0.01, 0),
        listener=listener or Listener(),
        began=time.monotonic(),
    )


def decide(search: Search, tmp_path: Path):
    try:
        return Decision(search, tmp_path / "run", search._description, MACHINE, 0.01, search._task).run()
    finally:
        search.close()
        search._directory.close()


def make_landscape(seed: int = 0, budget_bytes: int = 24 * GB, **changes) -> Landscape:
    given = {"learning_rate": 3e-5, "output_dir": "out"}
    return Landscape(seed, budget_bytes, description=make_description(fields=FIELDS, arguments=given), **changes)


def test_the_winner_is_confirmed_from_its_files_in_fresh_processes_beside_the_baseline(tmp_path):
    landscape = make_landscape()
    launcher = MadeUpLauncher(landscape)
    best, _ = decide(make_search(tmp_path, landscape, launcher), tmp_path)
    confirmations = [(r, how) for r, how in launcher.requests if r.schedule.save]
    assert len(confirmations) >= 4
    assert {how for _, how in confirmations} == {"fresh"}
    from_files = [r for r, _ in confirmations if r.files]
    assert len(from_files) >= 2
    assert all(r.model_kwargs == {} and r.logits is None for r in from_files)
    assert best.gain == pytest.approx(
        landscape.train_rate(best.candidate) / landscape.train_rate(landscape.space.baseline)
    )
    assert best.gain > 1.2


def test_the_emitted_arguments_hold_the_users_own_and_the_tuned_fields_and_nothing_else(tmp_path):
    best, _ = decide(make_search(tmp_path, make_landscape()), tmp_path)
    emitted = json.loads((tmp_path / "run/best/training_args.json").read_text())
    assert emitted["learning_rate"] == 3e-5
    assert set(emitted) <= set(FIELDS)
    assert emitted["per_device_train_batch_size"] == best.candidate["per_device_train_batch_size"]
    assert "attn_implementation" not in emitted


def test_what_only_code_can_say_goes_to_its_own_folder(tmp_path):
    landscape = make_landscape(eval_bytes_per_row=5e6)  # 5 GB of logits, held twice
    best, with_code = decide(make_search(tmp_path, landscape), tmp_path)
    assert best is not None
    assert best.candidate["logits"] == "full"
    assert with_code is None or with_code.candidate["logits"] == "argmax" or with_code.candidate["attention"] == "eager"


def test_code_that_is_needed_to_fit_is_emitted_alone(tmp_path):
    landscape = make_landscape(eval_bytes_per_row=6e9)  # one flush of one batch is more than the card
    best, with_code = decide(make_search(tmp_path, landscape, max_probes=60), tmp_path)
    assert best is None
    assert not (tmp_path / "run/best").exists()
    assert with_code.candidate["logits"] == "argmax"
    snippet = (tmp_path / "run/best-with-code/snippet.py").read_text()
    assert "preprocess_logits_for_metrics" in snippet
    compile(snippet, "snippet.py", "exec")
    assert "logits" not in (tmp_path / "run/best-with-code/training_args.json").read_text()


def test_a_winner_that_fails_its_confirmation_gives_way_to_the_next_best(tmp_path):
    landscape = make_landscape()
    spoiled = []

    def twist(request, reply):
        if request.files and not spoiled:
            spoiled.append(json.loads((Path(request.files) / "training_args.json").read_text()))
            return replace(
                reply, outcome=Outcome.DEVICE_OOM, train_speed=None, failure=Failure("save", 3, "OOM", "out of memory")
            )
        return reply

    best, _ = decide(make_search(tmp_path, landscape, MadeUpLauncher(landscape, twist)), tmp_path)
    emitted = json.loads((tmp_path / "run/best/training_args.json").read_text())
    assert best is not None
    assert emitted != spoiled[0]


def test_nothing_is_emitted_when_nothing_fits(tmp_path):
    landscape = make_landscape(budget_bytes=450 * 10**6)
    assert decide(make_search(tmp_path, landscape), tmp_path) == (None, None)
    assert not list((tmp_path / "run").glob("best*"))
    assert not list((tmp_path / "run").glob("unconfirmed*"))


def test_a_contaminated_probe_is_repeated_and_a_machine_that_is_never_quiet_still_gives_an_answer(tmp_path):
    def delay(request, reply):
        slow = replace(reply.train_speed, delay_share=0.5) if reply.train_speed else None
        return replace(reply, train_speed=slow)

    landscape = make_landscape()
    search = make_search(tmp_path, landscape, MadeUpLauncher(landscape, delay), max_probes=60)
    best, _ = decide(search, tmp_path)
    marked = [m for m in search.history() if m.outcome is Outcome.CONTAMINATED]
    assert len(marked) > 5
    assert [m.purpose for m in search.history()][:2] == ["baseline", "baseline"]
    assert best is not None


def test_the_probes_of_a_search_stay_within_max_probes(tmp_path):
    for most in (8, 12, 20):
        landscape = make_landscape(seed=most)
        launcher = MadeUpLauncher(landscape)
        folder = tmp_path / str(most)
        folder.mkdir()
        best, _ = decide(make_search(folder, landscape, launcher, max_probes=most), folder)
        assert best is not None
        assert len(launcher.requests) <= most


def test_a_search_that_was_stopped_goes_on_and_measures_nothing_twice(tmp_path):
    class Stop(Exception):
        pass

    landscape = make_landscape()
    whole = MadeUpLauncher(landscape)
    (tmp_path / "whole").mkdir()
    expected, _ = decide(make_search(tmp_path / "whole", landscape, whole), tmp_path / "whole")

    def stop_at_five(request, reply):
        if len(launcher.requests) == 5:
            raise Stop
        return reply

    launcher = MadeUpLauncher(landscape, stop_at_five)
    search = make_search(tmp_path, landscape, launcher)
    with pytest.raises(Stop):
        decide(search, tmp_path)
    assert (tmp_path / "run/provisional/training_args.json").exists()
    again = MadeUpLauncher(landscape)
    best, _ = decide(make_search(tmp_path, landscape, again), tmp_path)
    assert best.candidate == expected.candidate
    assert len(again.requests) == len(whole.requests) - 4
    once_more = MadeUpLauncher(landscape)
    best, _ = decide(make_search(tmp_path, landscape, once_more), tmp_path)
    assert best.candidate == expected.candidate
    assert once_more.requests == []


def test_the_gain_is_told_from_undisturbed_turns_only(tmp_path):
    def disturb(request, reply):
        """Every second confirming run is twice as slow and says that its threads waited."""
        if request.schedule.save and len([r for r, _ in launcher.requests if r.schedule.save]) in (3, 4):
            slow = replace(reply.train_speed, seconds=tuple(2 * s for s in reply.train_speed.seconds), delay_share=0.4)
            return replace(reply, train_speed=slow)
        return reply

    landscape = make_landscape()
    launcher = MadeUpLauncher(landscape, disturb)
    best, _ = decide(make_search(tmp_path, landscape, launcher), tmp_path)
    true = landscape.train_rate(best.candidate)
    assert best.train_per_second == pytest.approx(true)
    assert best.gain == pytest.approx(true / landscape.train_rate(landscape.space.baseline))


def test_no_gain_is_told_where_every_turn_was_disturbed(tmp_path):
    def disturb(request, reply):
        if request.schedule.save:
            return replace(reply, train_speed=replace(reply.train_speed, delay_share=0.4))
        return reply

    landscape = make_landscape()
    best, _ = decide(make_search(tmp_path, landscape, MadeUpLauncher(landscape, disturb)), tmp_path)
    assert best is not None
    assert best.gain is None


def test_a_contaminated_probe_above_the_budget_is_over_budget(tmp_path):
    def grow(request, reply):
        if request.files and reply.outcome is Outcome.FITS:
            phases = tuple(replace(p, process_bytes=30 * GB) for p in reply.phases)
            return replace(reply, outcome=Outcome.CONTAMINATED, phases=phases)
        return reply

    landscape = make_landscape()
    search = make_search(tmp_path, landscape, MadeUpLauncher(landscape, grow))
    assert decide(search, tmp_path) == (None, None)
    assert {m.outcome for m in search.history() if m.purpose == "confirm"} == {Outcome.OVER_BUDGET}


def test_a_winner_that_failed_its_confirmation_is_not_confirmed_again_on_resume(tmp_path):
    landscape = make_landscape()
    spoiled = []

    def twist(request, reply):
        if request.files and not spoiled:
            spoiled.append(1)
            return replace(reply, outcome=Outcome.DEVICE_OOM, failure=Failure("save", 3, "OOM", "out of memory"))
        return reply

    first, _ = decide(make_search(tmp_path, landscape, MadeUpLauncher(landscape, twist)), tmp_path)
    again = MadeUpLauncher(landscape)
    second, _ = decide(make_search(tmp_path, landscape, again), tmp_path)
    assert second.candidate == first.candidate
    assert again.requests == []


def test_a_child_that_applied_too_few_steps_does_not_fit(tmp_path):
    landscape = make_landscape()
    launcher = MadeUpLauncher(landscape, lambda request, reply: replace(reply, steps=2))
    search = make_search(tmp_path, landscape, launcher)
    with pytest.raises(WorkloadError, match="too_few_steps"):
        decide(search, tmp_path)


@pytest.mark.parametrize(
    "narrowed",
    [
        {"per_device_train_batch_size": (4, 16)},
        {"precision": ("fp16",)},
        {"per_device_eval_batch_size": (64,)},
        {"eval_accumulation_steps": (4,)},
        {"optim": ("adamw_torch_fused",), "precision": ("bf16", "tf32"), "per_device_train_batch_size": (2,)},
    ],
)
def test_only_values_that_the_user_narrowed_a_knob_to_are_chosen(tmp_path, narrowed):
    landscape = make_landscape()
    description = landscape.description
    landscape.space = make_space(description, MACHINE, Candidate(dict(BASELINE)), narrowed, frozenset({"code"}))
    search = make_search(tmp_path, landscape)
    best, _ = decide(search, tmp_path)
    for name, values in narrowed.items():
        assert best.candidate[name] in values
        tried = {
            m.candidate[name]
            for m in search.history()
            if m.purpose in ("train", "evaluate") and name.startswith("per_device_train")
        }
        assert tried <= set(values)


def test_a_failed_projection_of_evaluation_does_not_rule_out_training(tmp_path):
    landscape = make_landscape(eval_bytes_per_row=6e9)
    search = make_search(tmp_path, landscape, max_probes=60)
    decide(search, tmp_path)
    assert search.baseline_measurement().outcome is Outcome.OVER_BUDGET
    timed = [m for m in search.history() if m.train_speed is not None and m.purpose == "train"]
    assert max(m.train_speed.per_second for m in timed) >= 0.95 * landscape.best_rate()


def test_a_winner_that_loses_to_the_users_own_settings_in_turn_gives_way_to_them(tmp_path):
    def slow_from_files(request, reply):
        own = request.files and json.loads((Path(request.files) / "training_args.json").read_text())
        if own and own["per_device_train_batch_size"] != BASELINE["per_device_train_batch_size"]:
            return replace(reply, train_speed=replace(reply.train_speed, seconds=(99.0, 99.0)))
        return reply

    landscape = make_landscape()
    best, _ = decide(make_search(tmp_path, landscape, MadeUpLauncher(landscape, slow_from_files)), tmp_path)
    assert best.candidate == landscape.space.baseline
    emitted = json.loads((tmp_path / "run/best/training_args.json").read_text())
    assert emitted["per_device_train_batch_size"] == BASELINE["per_device_train_batch_size"]


def test_measurements_of_other_versions_do_not_count(tmp_path):
    landscape = make_landscape()
    first = make_search(tmp_path, landscape)
    decide(first, tmp_path)
    launcher = MadeUpLauncher(landscape)
    second = make_search(tmp_path, landscape, launcher)
    second._machine = replace(MACHINE, versions={"torch": "9.9"})
    decide(second, tmp_path)
    assert len(launcher.requests) > 5


# ---- shadow runs ----


def alive(candidate: Candidate) -> int:
    """Half of it under bf16, and less without recomputing: other than any formula has it."""
    batch = int(candidate["per_device_train_batch_size"])
    rows = batch * GB // (4 if candidate.get("precision") == "bf16" else 2)
    return 2 * GB + (2 * rows if candidate.get("activation_checkpointing") else rows)


@pytest.fixture
def traced(monkeypatch):
    """Makes every search find made-up shadow runs. Their traces are kept, and each was given a `limit` to ask."""
    kept, made = [], []

    def make(*_, limit, **__):
        made.append(MadeUpShadows(alive, cached=1.5, traced=kept))
        made[-1].limit = limit
        return made[-1]

    monkeypatch.setattr("autofit.study.driver.ShadowRuns", make)
    return made


def asked_of(launcher: MadeUpLauncher) -> list:
    return [(r.arguments, r.model_kwargs, r.logits, r.schedule) for r, _ in launcher.requests]


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_a_resumed_search_with_kept_traces_takes_the_same_next_step(tmp_path, traced, stop_at):
    class Stop(Exception):
        pass

    landscape = make_landscape(budget_bytes=12 * GB)
    untraced, whole = MadeUpLauncher(landscape), MadeUpLauncher(landscape)
    (tmp_path / "whole").mkdir()
    decide(make_search(tmp_path / "whole", landscape, whole), tmp_path / "whole")
    assert traced[-1].traced
    kept = list(traced[-1].traced)

    def stop(request, reply):
        if len(launcher.requests) == stop_at:
            raise Stop
        return reply

    traced[-1].traced.clear()
    launcher = MadeUpLauncher(landscape, stop)
    with pytest.raises(Stop):
        decide(make_search(tmp_path, landscape, launcher), tmp_path)
    assert traced[-1].traced
    again = MadeUpLauncher(landscape)
    decide(make_search(tmp_path, landscape, again), tmp_path)
    assert asked_of(launcher)[:-1] + asked_of(again) == asked_of(whole)
    assert sorted(traced[-1].traced) == sorted(kept)
    # Without them it would go another way: they are part of what the next step follows from.
    (tmp_path / "untraced").mkdir()
    search = make_search(tmp_path / "untraced", landscape, untraced)
    search._predictor._shadows = None
    decide(search, tmp_path / "untraced")
    assert asked_of(untraced) != asked_of(whole)


def test_what_is_predicted_of_a_candidate_is_kept_once_for_each_machine(tmp_path, traced):
    landscape = make_landscape()
    search = make_search(tmp_path, landscape)
    candidate = landscape.space.baseline
    search._directory.record_prediction(Prediction(candidate, "cuda-8.6", "traced"))  # an old journal's: of no machine
    search._trace(candidate)
    for machine in (MACHINE, MACHINE, replace(MACHINE, versions={"torch": "9.9"})):
        search._machine = machine
        search._keep_prediction(candidate)
    kept = [p.machine for p in search._directory.predictions]
    assert kept == ["", MACHINE.key, replace(MACHINE, versions={"torch": "9.9"}).key]
    search.close()
    search._directory.close()


def test_the_predictions_of_a_search_join_its_measurements(tmp_path, traced):
    search = make_search(tmp_path, make_landscape())
    decide(search, tmp_path)
    told = {(p.candidate.key, p.machine) for p in search._directory.predictions}
    assert told == {(m.candidate.key, m.device) for m in search.history() if alive_is_known(search, m.candidate)}
    assert len(told) == len(search._directory.predictions) > 3


def alive_is_known(search: Search, candidate: Candidate) -> bool:
    return search._predictor.prediction(candidate) is not None


@pytest.mark.parametrize(
    ("max_seconds", "used", "limit"), [(None, 0, 600), (3600, 0, 600), (300, 200, 84), (300, 280, 10), (300, 900, 10)]
)
def test_a_shadow_run_may_take_what_is_left_less_the_confirmation(tmp_path, traced, max_seconds, used, limit):
    search = make_search(tmp_path, make_landscape())
    search._limits = replace(search._limits, max_seconds=max_seconds)
    search._began = time.monotonic() - used
    assert traced[-1].limit() == pytest.approx(limit, abs=2)
    search.close()
    search._directory.close()


def test_no_shadow_run_begins_when_the_time_is_over(tmp_path, traced):
    search = make_search(tmp_path, make_landscape())
    search._limits = replace(search._limits, max_seconds=60.0)
    search._began = time.monotonic() - 50  # the confirmation takes 16 s
    assert not search._trace(search.space.baseline)
    assert traced[-1].traced == []
    search._began = time.monotonic()
    assert search._trace(search.space.baseline)
    search.close()
    search._directory.close()


# ---- Optuna's mirror ----


def trials(tmp_path: Path, phase: str):
    storage = f"sqlite:///{tmp_path / 'run/study.db'}"
    return optuna.load_study(study_name=phase, storage=storage).get_trials()


def test_the_study_mirrors_the_journal(tmp_path):
    landscape = make_landscape(budget_bytes=5 * GB)
    search = make_search(tmp_path, landscape)
    decide(search, tmp_path)
    told = {t.user_attrs["probe"]: t for phase in ("train", "evaluate") for t in trials(tmp_path, phase)}
    searched = [m for m in search.history() if m.purpose in ("baseline", "train", "evaluate")]
    assert set(told) == {m.probe for m in searched}
    for m in searched:
        trial = told[m.probe]
        assert trial.state is optuna.trial.TrialState.COMPLETE
        assert trial.params["per_device_train_batch_size"] == m.candidate["per_device_train_batch_size"]
        assert (trial.constraints["memory"] > 0) == (m.outcome in (Outcome.DEVICE_OOM, Outcome.OVER_BUDGET))
    best = optuna.load_study(study_name="train", storage=f"sqlite:///{tmp_path / 'run/study.db'}").best_trial
    fitting = [m for m in searched if m.outcome is Outcome.FITS and m.train_speed]
    assert best.value == pytest.approx(max(m.train_speed.per_second for m in fitting))


@pytest.mark.parametrize("spoil", ["missing", "garbage", "running", "behind"])
def test_the_study_is_rebuilt_when_it_does_not_match_the_journal(tmp_path, spoil):
    landscape = make_landscape()
    decide(make_search(tmp_path, landscape), tmp_path)
    database = tmp_path / "run/study.db"
    before = {t.user_attrs["probe"] for t in trials(tmp_path, "train")}
    if spoil == "missing":
        database.unlink()
    elif spoil == "garbage":
        database.write_bytes(b"no database" * 1000)
    elif spoil == "running":
        optuna.load_study(study_name="train", storage=f"sqlite:///{database}").ask()
    else:
        optuna.delete_study(study_name="train", storage=f"sqlite:///{database}")
    decide(make_search(tmp_path, landscape), tmp_path)
    after = trials(tmp_path, "train")
    assert {t.user_attrs["probe"] for t in after} == before
    assert all(t.state is optuna.trial.TrialState.COMPLETE for t in after)


def test_an_interrupted_probe_leaves_no_running_trial(tmp_path):
    def interrupt(request, reply):
        if len(launcher.requests) == 3:
            raise KeyboardInterrupt
        return reply

    landscape = make_landscape()
    launcher = MadeUpLauncher(landscape, interrupt)
    with pytest.raises(KeyboardInterrupt):
        decide(make_search(tmp_path, landscape, launcher), tmp_path)
    assert all(t.state.is_finished() for t in trials(tmp_path, "train"))


def test_a_study_that_cannot_be_written_does_not_stop_the_search(tmp_path):
    said = []

    class Hears(Listener):
        def said(self, text):
            said.append(text)

    landscape = make_landscape()
    (tmp_path / "run/study.db").mkdir(parents=True)  # a folder in its place
    (tmp_path / "run/study.db/file").write_text("x")
    (tmp_path / "run/run.json").write_text('{"schema": 1, "identity": "x"}')
    best, _ = decide(make_search(tmp_path, landscape, listener=Hears()), tmp_path)
    assert best is not None
    assert any("study.db" in text for text in said)


def test_a_speed_without_windows_in_common_is_still_a_speed():
    assert Speed(10, (2.0, 4.0)).per_second == pytest.approx(10 / 3)


# ---- an evaluation that fails by itself ----


def broken(request, reply):
    """Evaluation raises whatever is tried, behind a training that runs."""
    if not request.schedule.evaluate:
        return reply
    return replace(
        reply,
        outcome=Outcome.CRASHED,
        failure=Failure("metrics", 4, "ValueError", "my metrics"),
        phases=tuple(p for p in reply.phases if p.name == "train"),
        train_speed=None,
        eval_speed=None,
        growth=None,
    )


def test_c09_where_evaluation_fails_by_itself_training_is_tuned_alone_and_the_answer_says_so(tmp_path):
    """transformers#30631: a crash in evaluation is no lack of memory, and training can be tuned without it."""
    landscape = make_landscape()
    launcher = MadeUpLauncher(landscape, broken)
    search = make_search(tmp_path, landscape, launcher)
    decision = Decision(search, tmp_path / "run", search._description, MACHINE, 0.01, search._task)
    try:
        best, _ = decision.run()
        notes = decision.notes()
    finally:
        search.close()
        search._directory.close()
    assert best is not None and best.eval_per_second is None
    assert best.gain == pytest.approx(
        landscape.train_rate(best.candidate) / landscape.train_rate(landscape.space.baseline)
    )
    assert json.loads((tmp_path / "run/best/training_args.json").read_text())
    assert "computing the metrics (ValueError: my metrics), so this holds for training alone" in notes[0]
    tried = [r for r, _ in launcher.requests if r.schedule.evaluate]
    assert len(tried) == 2  # the user's own settings, and the chosen ones once


def test_an_evaluation_that_runs_out_of_memory_everywhere_is_not_taken_for_a_broken_one(tmp_path):
    def short(request, reply):
        return replace(
            broken(request, reply), outcome=Outcome.DEVICE_OOM, failure=Failure("evaluate", 4, "OutOfMemoryError", "no")
        ) if request.schedule.evaluate else reply  # fmt: skip

    landscape = make_landscape()
    search = make_search(tmp_path, landscape, MadeUpLauncher(landscape, short))
    assert decide(search, tmp_path) == (None, None)
    assert search.broken_evaluation() is None


def test_an_evaluation_that_fails_with_the_users_settings_only_is_measured_on_the_others(tmp_path):
    landscape = make_landscape()
    own = landscape.space.baseline

    def sometimes(request, reply):
        is_own = request.arguments["per_device_train_batch_size"] == own["per_device_train_batch_size"]
        return broken(request, reply) if is_own else reply

    best, _ = decide(make_search(tmp_path, landscape, MadeUpLauncher(landscape, sometimes)), tmp_path)
    assert best is not None and best.eval_per_second is not None
    assert best.candidate["per_device_train_batch_size"] != own["per_device_train_batch_size"]
