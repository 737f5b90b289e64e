"""Keys tell candidates apart exactly when they differ, names are safe in a path, and peaks are the ones meant."""

import itertools
import os
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autofit.records import (
    Candidate,
    EvaluationGrowth,
    Machine,
    Measurement,
    ModelTask,
    Outcome,
    PhaseRecord,
    ScriptTask,
    Speed,
    Task,
    digest,
)

settings.register_profile("records", deadline=None)  # a busy machine must not fail a property
settings.load_profile("records")

KNOB_VALUES = (
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=5) | st.sampled_from(["1", "True", "true"])
)
KNOBS = st.dictionaries(st.text(max_size=5), KNOB_VALUES, max_size=5)
LOOKALIKES = [True, 1, "1", "True", "true", False, 0, "0", "", None, "None", "null"]


def same_values(first: dict, second: dict) -> bool:
    """Equality that takes True and 1 for two values."""
    return first == second and all(type(first[name]) is type(second[name]) for name in first)


def measurement(*phases: PhaseRecord, growth: EvaluationGrowth | None = None, outcome=Outcome.FITS) -> Measurement:
    return Measurement("0001", "train", Candidate({}), outcome, 1.0, phases=phases, growth=growth)


def growth_to(projected_bytes: int) -> EvaluationGrowth:
    return EvaluationGrowth(8, 800, 1.0, 1.0, projected_bytes, projected_host_bytes=10**15)


def model_task(name: str) -> Task:
    return Task(model=ModelTask(name, {}, "text-classification", 32, "float32", 100))


# Candidate


@given(KNOBS, st.randoms())
def test_the_key_does_not_depend_on_the_order_of_knobs(values, random):
    items = list(values.items())
    random.shuffle(items)
    assert Candidate(dict(items)).key == Candidate(values).key
    assert hash(Candidate(dict(items))) == hash(Candidate(values))


@given(KNOBS, KNOBS)
def test_keys_are_equal_exactly_when_the_values_are(first, second):
    assert (Candidate(first).key == Candidate(second).key) == same_values(first, second)


def test_values_that_look_alike_have_different_keys():
    assert len({Candidate({"knob": value}).key for value in LOOKALIKES}) == len(LOOKALIKES)


def test_a_knob_that_is_none_is_not_a_knob_that_is_missing():
    assert Candidate({"a": 1, "b": None}).key != Candidate({"a": 1}).key


def test_candidates_are_equal_exactly_when_their_keys_are():
    candidates = [Candidate({"knob": value}) for value in LOOKALIKES]
    for one, other in itertools.product(candidates, candidates):
        assert (one == other) == (one.key == other.key), f"{one} and {other}"


@given(KNOBS, KNOBS)
def test_a_changed_candidate_has_the_changes_and_leaves_the_original_alone(values, changes):
    original, before = Candidate(values), dict(values)
    changed = original.but(changes)
    assert same_values(changed.values, {**before, **changes})
    assert same_values(original.values, before)


def test_changes_by_name_win_over_changes_by_mapping():
    assert Candidate({"a": 1}).but({"a": 2, "b": 3}, a=4).values == {"a": 4, "b": 3}


@given(KNOBS)
def test_reading_a_knob_gives_its_value_and_an_absent_one_its_default(values):
    candidate = Candidate(values)
    assert all(candidate[name] is candidate.get(name, "other") for name in values)
    assert candidate.get("no such knob", 7) == 7
    with pytest.raises(KeyError):
        candidate["no such knob"]


def test_a_key_is_twelve_hex_digits_and_the_same_in_every_release():
    assert Candidate({"per_device_train_batch_size": 8, "bf16": True}).key == "bd0c7400c8fe"  # keys lie on users' disks


@given(
    st.dictionaries(st.text(max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=3), max_size=3)
)
def test_a_digest_does_not_depend_on_the_order_of_inner_keys(value):
    reordered = {key: dict(reversed(inner.items())) for key, inner in reversed(value.items())}
    assert digest(reordered) == digest(value)


def test_a_machine_with_another_library_version_has_another_key():
    def machine(torch: str, device: str = "cpu") -> Machine:
        return Machine(device, "cpu", 2**34, 2**34, "a cpu", 2, "linux", {"torch": torch})

    assert machine("2.8").key != machine("2.9").key
    assert machine("2.8", "cuda:0").key == machine("2.8", "cuda:1").key  # the same card in another slot


# Task.name

HOSTILE = [
    *("", "/", "//", ".", "..", "../..", "../../etc/passwd", "-rf", "--help", "~", "~root", "a b", "a\nb", "a\0b"),
    *("$(reboot)", "a;b", "a\\b", "C:\\x", "*", "train.py/", ".py", "…", "\udcff", "x" * 5000, "é" * 5000, "数" * 5000),
]
NAMES = (
    st.text(st.characters(), max_size=300)
    | st.text(st.sampled_from("./-~ ab\\\n\0"), max_size=20)
    | st.sampled_from(HOSTILE)
)


def is_safe_in_a_path(name: str) -> bool:
    return (
        name.isprintable()
        and not name.startswith(("-", "."))
        and not set(name) & set("/\\~ $;*:'\"")
        and 0 < len(os.fsencode(name)) <= 240  # a file name has 255 bytes; a digest and a dash want some
    )


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:12]))
def test_a_hostile_model_or_script_name_becomes_a_safe_name(name):
    assert is_safe_in_a_path(model_task(name).name)
    assert is_safe_in_a_path(Task(script=ScriptTask((name,), "/")).name)


@given(NAMES)
def test_every_task_has_a_name_that_is_safe_in_a_path(name):
    assert is_safe_in_a_path(model_task(name).name)
    assert is_safe_in_a_path(Task(script=ScriptTask((name,), "/")).name)
    assert is_safe_in_a_path(Task(script=ScriptTask(("-m", name), "/")).name)


def test_a_task_is_named_after_what_is_trained():
    assert model_task("Qwen/Qwen3-0.6B").name == "Qwen3-0.6B-text-classification"
    assert Task(script=ScriptTask(("jobs/train_bert.py", "--lr", "1"), "/")).name == "train_bert"
    assert Task(script=ScriptTask(("-m", "jobs.train", "x.py"), "/")).name == "jobs.train"
    assert Task(script=ScriptTask((), "/")).name == "script"


# Speed

WINDOWS = st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=9)


@given(st.integers(1, 10**6), WINDOWS)
def test_rows_per_second_is_the_rate_of_the_median_window(rows, seconds):
    assert Speed(rows, tuple(seconds)).per_second == pytest.approx(rows / statistics.median(seconds))


@given(st.integers(1, 10**6), WINDOWS, st.randoms())
def test_the_order_of_windows_does_not_matter(rows, seconds, random):
    shuffled = list(seconds)
    random.shuffle(shuffled)
    assert Speed(rows, tuple(shuffled)).per_second == Speed(rows, tuple(seconds)).per_second


def test_one_disturbed_window_in_three_does_not_move_the_speed():
    assert Speed(80, (2.0, 900.0, 2.0)).per_second == 40


# Measurement

BYTES = st.none() | st.integers(0, 2**45)
NAMES_OF_PHASES = ["load", "train", "evaluate", "train-again", "save"]
PHASES = st.lists(
    st.builds(PhaseRecord, st.sampled_from(NAMES_OF_PHASES), st.just(1.0), process_bytes=BYTES), max_size=6
)


@given(PHASES)
def test_the_peak_is_the_highest_phase_and_unknown_when_no_phase_is_known(phases):
    known = [phase.process_bytes for phase in phases if phase.process_bytes is not None]
    assert measurement(*phases).peak_bytes == (max(known) if known else None)


@given(PHASES, st.integers(0, 2**45))
def test_the_peak_is_never_below_a_phase_nor_below_the_projected_evaluation(phases, projected):
    peak = measurement(*phases, growth=growth_to(projected)).peak_bytes
    assert peak in [projected, *(phase.process_bytes for phase in phases)]
    assert all(peak >= phase.process_bytes for phase in phases if phase.process_bytes is not None)
    assert peak >= projected


@given(PHASES, st.integers(0, 2**45))
def test_the_peak_of_evaluation_is_measured_or_projected_whichever_is_higher(phases, projected):
    seen = [p.process_bytes for p in phases if p.name == "evaluate" and p.process_bytes is not None]
    assert measurement(*phases).eval_bytes == max(seen, default=None)
    with_growth = measurement(*phases, growth=growth_to(projected)).eval_bytes
    assert with_growth == (max(*seen, projected) if seen else None)


@given(PHASES)
def test_the_peak_of_training_counts_both_training_phases_and_no_other(phases):
    seen = [p.process_bytes for p in phases if p.name in ("train", "train-again") and p.process_bytes is not None]
    assert measurement(*phases).train_bytes == max(seen, default=None)


def test_the_peak_is_what_the_process_held_and_not_what_the_allocator_counted():
    assert (
        measurement(PhaseRecord("train", 1.0, allocated_bytes=900, reserved_bytes=950, process_bytes=10)).peak_bytes
        == 10
    )


@given(PHASES)
def test_a_phase_is_found_by_name_and_absent_when_it_did_not_run(phases):
    assume(phases)
    found = measurement(*phases)
    assert all(found.phase(phase.name).name == phase.name for phase in phases)
    assert found.phase("no such phase") is None


def test_only_a_whole_run_has_ran():
    whole = {outcome for outcome in Outcome if measurement(outcome=outcome).ran}
    assert whole == {Outcome.FITS, Outcome.OVER_BUDGET, Outcome.CONTAMINATED}
