"""What a prediction can be told, how the answer is put together from shadow runs, and what is kept between calls."""

import dataclasses
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import make_task
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import BASELINE, DESCRIPTION

from autofit import api
from autofit.catalog import find_gpu, gpu_names
from autofit.errors import UsageError, WorkloadError
from autofit.forecast import Forecast, PredictOptions, predict, trace_cache
from autofit.forecast import options as forecast_options
from autofit.forecast.asking import MOST_ROWS, NO_FAMILY, _Asked, _Tracer
from autofit.forecast.options import (
    HEADROOM,
    allocator_of,
    candidate_of,
    check_options,
    place_notes,
    places_of,
    process_notes,
    task_and_knobs,
    traced_task,
    with_lean_evaluation,
)
from autofit.forecast.trace_cache import DESCRIPTION_FILE, MOST_TASKS, TraceCache, cache_home
from autofit.harness.shadow.allocator import AllocatorSettings
from autofit.harness.shadow.trace import Trace
from autofit.harness.trainer_hooks import TRACE_FILE
from autofit.prediction import BORDERLINE, DOES_NOT_FIT, FITS, judge, largest_batch
from autofit.prediction.verdict import ABOVE, BELOW, MOST_BATCH
from autofit.records import Failure, Machine, PhaseRecord, Prediction, Task

GIB = 2**30
CPU_MACHINE = Machine("cpu", "Some CPU", 16 * GIB, 16 * GIB, "Some CPU", 2, "Linux", {"transformers": "5.0.0"})


def small_trace(category="parameters", phase="train") -> Trace:
    return Trace(
        events=np.array([0, 1, ~1]),
        sizes=np.array([1000, 2000]),
        phases=np.zeros(3),
        phase_names=(phase,),
        categories=np.zeros(2),
        category_names=(category,),
        modules=np.zeros(2),
        module_names=("",),
        micro_batches=np.full(2, -1),
        op_flops=np.zeros(0),
        op_bytes=np.zeros(0),
        op_kinds=np.zeros(0),
        op_kind_names=(),
        op_phases=np.zeros(0),
    )


# ---- what can be told ----


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "give either --model NAME, or your own script"),
        ({"model": "gpt2", "command": ("python", "x.py")}, "give either --model"),
        ({"model": "gpt2", "batch": 0}, "--batch 0 makes no sense; give a whole number from 1"),
        ({"model": "gpt2", "eval_batch": -3}, "--eval-batch -3 makes no sense"),
        ({"model": "gpt2", "accumulation": 2**21}, "--accumulation 2097152 makes no sense"),
        ({"model": "gpt2", "precision": "int8"}, "--precision 'int8' is not known; use one of fp32, tf32, bf16, fp16"),
        (
            {"model": "gpt2", "max_batch": True, "batch": 4},
            "--max-batch looks for the batch by itself; leave --batch out",
        ),
        ({"model": "gpt2", "max_batch": True, "effective_batch": 4}, "leave --effective-batch out"),
        ({"model": "gpt2", "max_batch": True, "gpu": "all"}, "--max-batch is for one card; name it with --gpu"),
        ({"model": "gpt2", "verify": True, "gpu": "all"}, "--verify is for one prediction"),
        ({"model": "gpt2", "processes": 0}, "--processes 0 makes no sense; give a whole number from 1"),
        ({"model": "gpt2", "processes": 2**21}, "--processes 2097152 makes no sense"),
        ({"model": "gpt2", "processes": 2, "gpu": "cpu"}, "--processes is for cards"),
        ({"command": ("python", "x.py"), "processes": 2}, "--processes belongs to --model"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(given, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        check_options(PredictOptions(**given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "budget", "expected"),
    [
        ("3090", None, "no card that autofit knows; did you mean rtx-3090"),
        ("quantum-9000-xyz", None, "known cards are .*rtx-3090"),
        ("24GB", None, "is a size, not a card; name a card, and give the size as --budget"),
        ("all", "24GB", "--budget means nothing with --gpu all"),
        ("rtx-3090", "20", "has no unit"),
        ("rtx-3090", "0GB", "no memory at all"),
    ],
)
def test_a_card_or_budget_that_is_none_is_refused_with_the_way_out(gpu, budget, expected):
    with pytest.raises(UsageError, match=expected):
        places_of(PredictOptions(model="gpt2", gpu=gpu, budget=budget))


def test_without_a_gpu_here_a_card_has_to_be_named(monkeypatch):
    monkeypatch.setattr(forecast_options, "read_machine", lambda device: CPU_MACHINE)
    with pytest.raises(UsageError, match="there is no GPU here; name a card .* --gpu rtx-3090"):
        places_of(PredictOptions(model="gpt2"))


def test_the_gpu_of_this_machine_is_the_default_and_what_is_not_known_of_it_is_told(monkeypatch):
    machine = dataclasses.replace(CPU_MACHINE, device="cuda:0", device_name="NVIDIA Unheard-of 1", capability=(9, 0))
    monkeypatch.setattr(forecast_options, "read_machine", lambda device: machine)
    (place,) = places_of(PredictOptions(model="gpt2"))
    assert (place.label, place.native_bf16) == ("NVIDIA Unheard-of 1", True)
    assert len(place_notes([place])) == 3


@pytest.mark.parametrize("gpu", [None, "cpu"])
def test_the_default_budget_of_this_machine_leaves_the_headroom_of_a_search_and_says_so(monkeypatch, gpu):
    machine = dataclasses.replace(CPU_MACHINE, device="cuda:0", device_name="NVIDIA RTX 3090", capability=(8, 6))
    monkeypatch.setattr(forecast_options, "read_machine", lambda device: machine if device is None else CPU_MACHINE)
    assert api.Options().headroom == HEADROOM
    (place,) = places_of(PredictOptions(model="gpt2", gpu=gpu))
    assert place.budget_bytes == int(16 * GIB * (1 - HEADROOM))
    (note,) = [note for note in place_notes([place]) if "budget" in note]
    assert "a budget of 15.2 GiB, the 16.0 GiB of this machine's" in note and "less 5% headroom" in note
    (place,) = places_of(PredictOptions(model="gpt2", gpu=gpu, budget="16GiB"))
    assert place.budget_bytes == 16 * GIB and not any("budget" in note for note in place_notes([place]))


def test_all_cards_come_with_their_own_memory_the_smallest_first():
    places = places_of(PredictOptions(model="gpt2", gpu="all"))
    assert [place.target.name for place in places] == gpu_names()
    assert [place.budget_bytes for place in places] == sorted(find_gpu(name).usable_bytes for name in gpu_names())


def test_a_budget_of_a_size_or_a_card_replaces_what_the_card_has():
    for budget, expected in (("20GB", 20 * 10**9), ("t4", find_gpu("t4").usable_bytes)):
        (place,) = places_of(PredictOptions(model="gpt2", gpu="rtx-3090", budget=budget))
        assert place.budget_bytes == expected


def ask(**given):
    notes = []
    task, wanted = task_and_knobs(PredictOptions(**given), CPU_MACHINE, notes.append)
    return task, wanted, notes


def test_a_batch_and_an_accumulation_are_the_effective_batch():
    task, wanted, _ = ask(model="gpt2", batch=6, accumulation=4)
    assert task.model.effective_batch == 24
    assert (wanted["per_device_train_batch_size"], wanted["gradient_accumulation_steps"]) == (6, 4)


def test_a_batch_alone_does_not_accumulate_and_with_an_effective_batch_it_does():
    assert ask(model="gpt2", batch=6)[1]["gradient_accumulation_steps"] == 1
    assert ask(model="gpt2", batch=6, effective_batch=24)[1]["gradient_accumulation_steps"] == 4


def test_the_largest_batch_is_looked_for_without_accumulation_unless_it_is_asked_for():
    assert ask(model="gpt2", max_batch=True)[1]["gradient_accumulation_steps"] == 1
    assert ask(model="gpt2", max_batch=True, accumulation=4)[1]["gradient_accumulation_steps"] == 4
    assert (
        ask(model="gpt2", max_batch=True, args={"gradient_accumulation_steps": 2})[1]["gradient_accumulation_steps"]
        == 2
    )


def test_a_precision_of_the_users_arguments_is_a_knob_and_never_reaches_the_cpu_that_traces():
    task, wanted, _ = ask(model="gpt2", args={"fp16": True, "weight_decay": 0.1})
    assert wanted["precision"] == "fp16"
    assert "fp16" not in task.model.base_args and task.model.base_args["weight_decay"] == 0.1
    assert ask(model="gpt2", args={"fp16": True}, precision="bf16")[1]["precision"] == "bf16"


def test_what_belongs_to_a_model_is_refused_with_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    with pytest.raises(UsageError, match="--seq-len, --effective-batch belongs to --model"):
        ask(command=("python", "train.py"), seq_len=128, effective_batch=8)


def test_one_task_is_traced_for_every_batch():
    tasks = [
        traced_task(ask(model="gpt2", seq_len=64, batch=b, accumulation=a)[0]) for b, a in ((1, 1), (8, 4), (96, 1))
    ]
    assert tasks[0] == tasks[1] == tasks[2]
    assert traced_task(ask(model="gpt2", seq_len=32, batch=1)[0]) != tasks[0]


@pytest.mark.parametrize(
    ("wanted", "changes", "expected"),
    [
        ({"per_device_eval_batch_size": 4}, {"eval_rows": None}, "nothing that --eval-batch could set; leave it out"),
        ({"attention": "flash"}, {}, "--attention 'flash' cannot be used; use one of sdpa, eager"),
        ({"activation_checkpointing": True}, {"can_checkpoint": False}, "no activation checkpointing"),
        (
            {"logits": "top5"},
            {"reductions": ("full", "argmax")},
            "--logits 'top5' cannot be used; use one of full, argmax",
        ),
        ({"precision": "fp16"}, {"dtypes": {"float16": 9}}, "fp16 needs float32 weights"),
    ],
)
def test_a_knob_that_the_workload_has_not_is_refused(wanted, changes, expected):
    resolved = {**BASELINE.values, "bf16": False}
    description = dataclasses.replace(DESCRIPTION, resolved=resolved, **changes)
    with pytest.raises(UsageError, match=expected):
        candidate_of(description, wanted, None)


def test_tables_assume_a_lean_evaluation_where_the_user_says_none():
    description = dataclasses.replace(DESCRIPTION, reductions=("full", "argmax"))
    lean = with_lean_evaluation(BASELINE, description, {})
    names = ("per_device_eval_batch_size", "eval_accumulation_steps", "logits")
    assert [lean[name] for name in names] == [2, 1, "argmax"]
    said = dataclasses.replace(description, arguments={"per_device_eval_batch_size": 8})
    lean = with_lean_evaluation(BASELINE, said, {"logits": "full"})
    assert [lean[name] for name in names] == [8, 1, "full"]
    assert with_lean_evaluation(BASELINE, dataclasses.replace(DESCRIPTION, reductions=()), {})["logits"] == "full"


def test_tf32_is_refused_where_a_card_has_none():
    (place,) = places_of(PredictOptions(model="gpt2", gpu="t4"))
    description = dataclasses.replace(DESCRIPTION, resolved={**BASELINE.values, "bf16": False})
    with pytest.raises(UsageError, match="T4 16 GB has no tf32; use --precision fp32 or fp16"):
        candidate_of(description, {"precision": "tf32"}, place)


# ---- several processes ----


@pytest.mark.parametrize(
    ("given", "batch", "accumulation", "effective"),
    [
        ({}, 8, 1, 32),
        ({"processes": 3}, 1, 11, 33),
        ({"processes": 64}, 1, 1, 64),
        ({"batch": 6}, 6, 1, 24),
        ({"batch": 6, "accumulation": 2}, 6, 2, 48),
        ({"effective_batch": 64}, 8, 2, 64),
        ({"effective_batch": 64, "batch": 4}, 4, 4, 64),
        ({"effective_batch": 64, "batch": 4, "accumulation": 4}, 4, 4, 64),
        ({"args": {"per_device_train_batch_size": 2}}, 2, 1, 8),
        ({"max_batch": True}, 8, 1, 32),
    ],
)
def test_the_effective_batch_is_that_of_all_processes(given, batch, accumulation, effective):
    task, wanted, notes = ask(model="gpt2", **{"processes": 4, **given})
    assert (wanted["per_device_train_batch_size"], wanted["gradient_accumulation_steps"]) == (batch, accumulation)
    assert task.model.effective_batch == effective
    told = [note for note in notes if "effective batch" in note]
    assert all(f"effective batch {effective} " in note for note in told)
    assert bool(told) == (not given or list(given) == ["processes"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"effective_batch": 30}, "--effective-batch 30 is no multiple of the 4 rows of 4 processes"),
        ({"effective_batch": 32, "batch": 3}, "is no multiple of the 4 × 3 rows of 4 processes"),
        ({"effective_batch": 32, "batch": 2, "accumulation": 2}, "is not the 4 × 2 × 2 rows of 4 processes"),
        ({"effective_batch": 0}, "--effective-batch 0 makes no sense"),
        ({"effective_batch": 32, "args": {"per_device_train_batch_size": "2"}}, "give a positive whole number"),
    ],
)
def test_an_effective_batch_that_processes_cannot_share_is_refused(given, expected):
    with pytest.raises(UsageError, match=expected):
        ask(model="gpt2", processes=4, **given)


def test_a_card_of_several_processes_is_traced_as_such_and_what_is_not_counted_is_told():
    for gpu in ("rtx-3090", "all"):
        assert {p.target.device.processes for p in places_of(PredictOptions(model="gpt2", gpu=gpu, processes=4))} == {4}
    assert RTX.target.device.processes == 1 and process_notes(1) == []
    text = " ".join(process_notes(4))
    assert "4 processes" in text and "of one process" in text and "communication" in text and "NCCL" in text


def test_rows_per_second_count_all_processes():
    prediction = Prediction(BASELINE, "cuda", "traced", step_seconds=2.0)
    (four,) = places_of(PredictOptions(model="gpt2", gpu="rtx-3090", processes=4))
    one = Forecast(RTX.target, "x", BASELINE, prediction, None, 1)
    assert Forecast(four.target, "x", BASELINE, prediction, None, 1).rows_per_second == 4 * one.rows_per_second


# ---- the allocator's settings ----


def test_settings_of_this_environment_are_assumed_for_cards_and_told(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_of([RTX]) == (AllocatorSettings(), [])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found, notes = allocator_of([RTX])
    assert found.expandable_segments
    assert notes == ["assumed: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, as set here"]
    cpu = places_of(PredictOptions(model="gpt2", gpu="cpu"))
    assert allocator_of(cpu) == (AllocatorSettings(), [])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:maybe")
    monkeypatch.setattr("autofit.forecast.asking.Launcher", None)  # refused before anything starts
    with pytest.raises(UsageError, match="PYTORCH_CUDA_ALLOC_CONF: expandable_segments is 'maybe'"):
        predict(model="gpt2", gpu="rtx-3090")


def test_shadow_runs_are_replayed_under_the_settings(tmp_path):
    chosen = AllocatorSettings(expandable_segments=True)
    tracer = _Tracer(make_task(), DESCRIPTION, None, tmp_path, {}, chosen, lambda text: None)
    assert tracer.on(RTX)._settings == chosen


# ---- putting the answer together ----


class FakeRuns:
    """Stands for `ShadowRuns`: `peak` gives the bytes of a candidate, `seconds` its step."""

    def __init__(self, target, peak, seconds):
        self.target, self._peak, self._seconds = target, peak, seconds
        self.asked = []

    def predict(self, candidate):
        self.asked.append(candidate)
        size = self._peak(candidate)
        if isinstance(size, Failure):
            return Prediction(candidate, "cuda", "traced", failure=size)
        phase = PhaseRecord("train", 0.0, size, size, size)
        return Prediction(candidate, "cuda", "rewritten", (phase,), step_seconds=self._seconds(candidate))

    def family(self, candidate):
        size = self._peak(candidate)
        return size if isinstance(size, Failure) else object()

    def fits(self, candidate, cap_bytes):
        return False


class FakeTracer:
    def __init__(self, peak, seconds=lambda candidate: 1.0):
        self._peak, self._seconds = peak, seconds
        self.runs = {}

    def on(self, place):
        made = FakeRuns(dataclasses.replace(place.target, context_bytes=0), self._peak, self._seconds)
        return self.runs.setdefault(place.target.name, made)


def asked(peak, seconds=lambda candidate: 1.0, **given):
    tracer = FakeTracer(peak, seconds)
    return _Asked(PredictOptions(model="gpt2", **given), make_task(), DESCRIPTION, tracer), tracer


def slower_with_less(candidate):
    """Seconds of a step: per micro-batch one, with recomputation a third more, in 16 bits half."""
    seconds = float(candidate["gradient_accumulation_steps"]) + 10
    seconds *= 4 / 3 if candidate["activation_checkpointing"] else 1
    return seconds * (0.5 if candidate["precision"] in ("bf16", "fp16") else 1)


RTX = places_of(PredictOptions(model="gpt2", gpu="rtx-3090"))[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 96), st.lists(st.integers(1, 10), min_size=4, max_size=4), st.integers(0, 60), st.integers(1, 900)
)
def test_the_best_of_a_card_is_the_best_of_all_that_could_be_tried(effective, slopes, fixed, budget):
    def peak(candidate):
        slope = slopes[2 * (candidate["precision"] == "fp32") + bool(candidate["activation_checkpointing"])]
        return (fixed + slope * candidate["per_device_train_batch_size"]) * GIB

    place = dataclasses.replace(RTX, budget_bytes=budget * GIB)
    ask_all, _ = asked(peak, slower_with_less)
    start = BASELINE.but(per_device_train_batch_size=effective, gradient_accumulation_steps=1)
    (found,) = ask_all.best_by_gpu([place], start, []).rows
    everything = [
        ask_all._forecast(
            place, structure.but(per_device_train_batch_size=b, gradient_accumulation_steps=effective // b)
        )
        for structure in ask_all._structures(start, place, ("adamw_torch",))
        for b in range(1, effective + 1)
        if effective % b == 0
    ]
    fitting = [row for row in everything if row.verdict.answer == FITS]
    fitting = [row for row in fitting if row.candidate["precision"] == "bf16"] or fitting
    if fitting:
        assert found.verdict.answer == FITS
        assert found.rows_per_second == max(row.rows_per_second for row in fitting)
    else:
        smallest = [row for row in everything if row.candidate["per_device_train_batch_size"] == 1]
        assert found.prediction.peak_bytes == min(row.prediction.peak_bytes for row in smallest)


def test_a_card_that_takes_the_whole_batch_is_not_asked_about_recomputation():
    ask_all, tracer = asked(lambda candidate: GIB)
    ask_all.best_by_gpu([RTX], BASELINE, [])
    (runs,) = tracer.runs.values()
    (only,) = runs.asked
    assert not only["activation_checkpointing"] and only["precision"] == "bf16"


def test_cards_without_tensor_cores_for_bf16_are_asked_about_fp16():
    t4 = places_of(PredictOptions(model="gpt2", gpu="t4"))[0]
    ask_all, _ = asked(lambda candidate: GIB, slower_with_less)
    rows = ask_all.best_by_gpu([t4, RTX], BASELINE, []).rows
    assert [row.candidate["precision"] for row in rows] == ["fp16", "bf16"]


def test_among_all_cards_those_without_tf32_are_named_and_not_predicted():
    t4 = places_of(PredictOptions(model="gpt2", gpu="t4"))[0]
    ask_all, _ = asked(lambda candidate: GIB, precision="tf32")
    found = ask_all.best_by_gpu([t4, RTX], BASELINE.but(precision="tf32"), [])
    assert [(row.label, row.candidate["precision"]) for row in found.rows] == [(RTX.label, "tf32")]
    assert found.failed == {t4.label: "it has no tf32; use --precision fp32 or fp16"}


def test_the_largest_batch_ends_at_the_most_that_is_looked_for():
    sizes = []

    def peak(candidate):
        sizes.append(candidate["per_device_train_batch_size"])
        return 1000

    ask_all, tracer = asked(peak, max_batch=True)
    assert largest_batch(tracer.on(RTX), BASELINE, RTX.budget_bytes) == MOST_BATCH == max(sizes)
    found = ask_all.largest_batches(RTX, BASELINE, [])
    assert {row.candidate["per_device_train_batch_size"] for row in found.rows} == {MOST_BATCH}
    assert found.notes.count(MOST_ROWS) == 1
    below = asked(lambda c: c["per_device_train_batch_size"] * GIB)[1].on(RTX)
    assert largest_batch(below, BASELINE, 100_000 * GIB) == MOST_BATCH
    assert largest_batch(below, BASELINE, int(1.06 * 60_000 * GIB)) in range(60_000, MOST_BATCH)


@pytest.mark.parametrize(
    ("gpu", "times", "expected"),
    [
        ("cpu", 0.99, DOES_NOT_FIT),
        ("cpu", 1.01, BORDERLINE),
        ("cpu", 1.27, BORDERLINE),
        ("cpu", 1.29, FITS),
        ("rtx-3090", 0.95, DOES_NOT_FIT),
        ("rtx-3090", 1.0, BORDERLINE),
        ("rtx-3090", 1.06, FITS),
    ],
)
def test_the_interval_of_a_verdict_is_that_of_the_device(gpu, times, expected):
    (place,) = places_of(PredictOptions(model="gpt2", gpu=gpu))
    runs = FakeTracer(lambda candidate: 10 * GIB).on(place)
    verdict = judge(runs, runs.predict(BASELINE), int(times * 10 * GIB))
    low, high = (1.0, 1.28) if gpu == "cpu" else (BELOW, ABOVE)
    assert verdict.answer == expected
    assert (verdict.low_bytes, verdict.high_bytes) == (int(low * 10 * GIB), int(high * 10 * GIB))


def test_the_largest_batches_are_sorted_by_speed_and_what_does_not_fit_comes_last():
    def peak(candidate):
        each = 1 if candidate["activation_checkpointing"] else 4
        return (
            candidate["per_device_train_batch_size"] * each + (50 if candidate["optim"] == "adamw_torch" else 0)
        ) * GIB

    ask_all, _ = asked(peak, slower_with_less, max_batch=True)
    found = ask_all.largest_batches(RTX, BASELINE.but(gradient_accumulation_steps=1), [])
    fits = [row.verdict.answer == FITS for row in found.rows]
    speeds = [row.rows_per_second for row, fit in zip(found.rows, fits, strict=True) if fit]
    assert fits == sorted(fits, reverse=True) and not all(fits) and any(fits)
    assert speeds == sorted(speeds, reverse=True)
    assert all(
        row.candidate["per_device_train_batch_size"] == 1 for row, fit in zip(found.rows, fits, strict=True) if not fit
    )
    assert {row.candidate["optim"] for row in found.rows} == {"adamw_torch", "adafactor", "adamw_bnb_8bit"}


def test_a_structure_that_cannot_be_traced_is_named_beside_the_others():
    failure = Failure("train", None, "SomeError", "cannot be traced")
    ask_all, _ = asked(lambda c: failure if c["activation_checkpointing"] else GIB * c["per_device_train_batch_size"])
    found = ask_all.largest_batches(RTX, BASELINE, [])
    assert all(not row.candidate["activation_checkpointing"] for row in found.rows)
    assert found.failed["bf16, checkpointing, adafactor"] == "SomeError: cannot be traced"


def test_where_nothing_can_be_traced_the_error_says_why():
    ask_all, _ = asked(lambda candidate: Failure("train", None, "SomeError", "cannot be traced"))
    for answer in (ask_all.largest_batches, lambda place, *more: ask_all.best_by_gpu([place], *more)):
        with pytest.raises(WorkloadError, match="could not be traced; a search measures it instead") as caught:
            answer(RTX, BASELINE, [])
        assert "cannot be traced" in caught.value.log


def test_a_structure_that_differs_at_every_batch_is_not_searched_by_one_shadow_run_after_the_other():
    ask_all, tracer = asked(lambda candidate: GIB)
    runs = tracer.on(RTX)
    runs.family = lambda candidate: object() if candidate["precision"] == "bf16" else None
    runs.predict = lambda candidate, original=runs.predict: original(candidate.but(precision="bf16"))
    found = ask_all.largest_batches(RTX, BASELINE, [])
    assert found.failed["fp32, checkpointing, adafactor"] == NO_FAMILY


def test_no_rows_per_second_are_told_where_no_time_is_estimated():
    prediction = Prediction(BASELINE, "cuda", "traced", step_seconds=None)
    assert Forecast(RTX.target, "x", BASELINE, prediction, None, 1).rows_per_second is None


# ---- what is kept ----


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autofit" / "shadow"


def put(runs: Path, name: str, trace: Trace) -> Path:
    (runs / name).mkdir(parents=True)
    trace.save(runs / name / TRACE_FILE)
    return runs / name / TRACE_FILE


def test_what_was_kept_comes_back(home, tmp_path):
    task = make_task()
    kept = TraceCache.of(task, {"torch": "1"})
    assert kept.description() is None
    kept.keep_description(DESCRIPTION)
    made = put(tmp_path / "a", "0123", small_trace())
    kept.take_in(tmp_path / "a")
    again = TraceCache.of(task, {"torch": "1"})
    assert again.description() == DESCRIPTION
    again.lay_out(tmp_path / "b")
    assert (tmp_path / "b" / "0123" / TRACE_FILE).read_bytes() == made.read_bytes()
    assert TraceCache.of(task, {"torch": "2"}).description() is None
    assert TraceCache.of(make_task(seq_len=8), {"torch": "1"}).description() is None


def test_what_is_kept_is_for_the_user_alone_also_where_an_earlier_version_made_the_folder(home):
    home.mkdir(parents=True, mode=0o755)
    TraceCache.of(make_task(), {}).keep_description(DESCRIPTION)
    (folder,) = home.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (home, folder)] == [0o700, 0o700]


def test_of_a_script_nothing_is_kept(home, script):
    kept = TraceCache.of(script("print(1)"), {})
    kept.keep_description(DESCRIPTION)
    assert kept.description() is None and not home.exists()


def test_another_source_of_this_package_reads_nothing_old(home, monkeypatch):
    TraceCache.of(make_task(), {}).keep_description(DESCRIPTION)
    monkeypatch.setattr(trace_cache, "_source_digest", lambda: "another")
    assert TraceCache.of(make_task(), {}).description() is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 999}', b"[]"])
def test_a_damaged_description_is_none(home, damage):
    kept = TraceCache.of(make_task(), {})
    kept.keep_description(DESCRIPTION)
    (file,) = home.glob(f"*/{DESCRIPTION_FILE}")
    file.write_bytes(damage)
    assert kept.description() is None
    kept.keep_description(DESCRIPTION)
    assert kept.description() == DESCRIPTION


def test_a_trace_that_was_torn_is_not_kept_and_a_kept_one_that_is_damaged_is_replaced(home, tmp_path):
    kept = TraceCache.of(make_task(), {})
    kept.keep_description(DESCRIPTION)
    torn = put(tmp_path / "runs", "torn", small_trace())
    torn.write_bytes(torn.read_bytes()[:100])
    whole = put(tmp_path / "runs", "whole", small_trace())
    (file,) = home.glob(f"*/{DESCRIPTION_FILE}")
    (file.parent / "whole.npz").write_bytes(b"damaged")
    kept.take_in(tmp_path / "runs")
    assert not (file.parent / "torn.npz").exists()
    assert (file.parent / "whole.npz").read_bytes() == whole.read_bytes()


def test_a_home_that_cannot_be_written_is_as_if_nothing_were_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept = TraceCache.of(make_task(), {})
    kept.keep_description(DESCRIPTION)
    put(tmp_path / "runs", "one", small_trace())
    kept.take_in(tmp_path / "runs")
    kept.lay_out(tmp_path / "more")
    assert kept.description() is None


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_home() == Path.home() / ".cache" / "autofit" / "shadow"

    def no_home():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_home() is None
    TraceCache.of(make_task(), {}).keep_description(DESCRIPTION)


def test_many_at_once_leave_whole_files(home, tmp_path):
    put(tmp_path / "runs", "one", small_trace())
    kept = TraceCache.of(make_task(), {})

    def keep():
        for _ in range(5):
            kept.keep_description(DESCRIPTION)
            kept.take_in(tmp_path / "runs")

    threads = [threading.Thread(target=keep) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder,) = home.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [DESCRIPTION_FILE, "one.npz"]
    assert kept.description() == DESCRIPTION
    Trace.load(folder / "one.npz")


def test_the_oldest_tasks_are_forgotten(home):
    for n in range(MOST_TASKS + 5):
        folder = home / f"{n:04}"
        folder.mkdir(parents=True)
        os.utime(folder, (n, n))
    TraceCache.of(make_task(), {}).keep_description(DESCRIPTION)
    names = {folder.name for folder in home.iterdir()}
    assert len(names) == MOST_TASKS and "0000" not in names and f"{MOST_TASKS + 4:04}" in names


def test_a_model_that_cannot_be_had_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr("autofit.forecast.asking.Launcher", None)
    with pytest.raises(UsageError, match="no configuration of 'no-such/model-xyz' can be had"):
        predict(model="no-such/model-xyz", gpu="rtx-3090")


def test_a_task_of_a_model_is_told_with_its_own_batch():
    task = ask(model="gpt2", batch=6)[0]
    assert isinstance(task, Task) and task.model.base_args["per_device_train_batch_size"] == 6
