"""What is said when nothing fits: only figures that were measured, bounds and estimates marked, and what helps first."""

import re
from dataclasses import replace

import pytest
from report_cases import BASELINE, BUDGET, DESCRIPTION, LARGE, MB, SMALL, probe

from autofit.records import EvaluationGrowth, Failure, ModelTask, Outcome, PhaseRecord, ScriptTask, Task
from autofit.report.advice import nothing_fits, option_size
from autofit.units import parse_bytes

MODEL = Task(model=ModelTask("bert-base-uncased", {}, "text-classification", 32, "float32", 1000, seq_len=128))
SCRIPT = Task(script=ScriptTask(("train.py",), "/x"))


def oom(number, candidate, message="out of memory", phase="backward", **more):
    failure = Failure(phase, 1, "OutOfMemoryError", message)
    return probe(number, candidate, outcome=Outcome.DEVICE_OOM, failure=failure, **more)


def over(number, candidate, train, **more):
    failure = Failure("train", None, "peak_above_budget", "")
    return probe(number, candidate, outcome=Outcome.OVER_BUDGET, train=train, rates=(10.0,), failure=failure, **more)


def evaluation_fails():
    """Training fits; the projection of evaluation does not, by far."""
    growth = EvaluationGrowth(32, 10_000, 200_000.0, 0.0, 4300 * MB, 0)
    failure = Failure("evaluate", None, "eval_growth", "")
    m = probe(1, BASELINE, "baseline", Outcome.OVER_BUDGET, rates=(10.0,), train=300, evaluate=320, failure=failure)
    return [replace(m, growth=growth), probe(2, LARGE, rates=(20.0,), train=400)]


def told(history, task=MODEL, budget=BUDGET, description=DESCRIPTION):
    return nothing_fits(history, budget, description, task)


def test_a_larger_budget_is_advised_from_peaks_above_the_present_one_alone():
    text = told([*evaluation_fails(), over(3, SMALL, 610)], description=replace(DESCRIPTION, eval_rows=None))
    assert "--budget 641MB (what probe 0003 took" in text  # 610 MB and 5 %
    for history in (evaluation_fails(), [over(1, BASELINE, 610)], [oom(1, BASELINE)], [probe(2, LARGE, train=400)]):
        advised = re.findall(r"--budget (\S+)", told(history))
        assert all(parse_bytes(size) > BUDGET.device_bytes for size in advised)


def test_the_smallest_peak_above_the_budget_and_the_gap_are_told():
    text = told([over(1, BASELINE, 700), over(2, SMALL, 610)])
    assert "the smallest peak above the budget of 500 MB is 610 MB (probe 0002), 110 MB too much" in text


def test_under_an_enforced_cap_what_was_held_is_a_lower_bound_with_what_was_refused():
    message = "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 23.6 GiB"
    text = told([oom(1, BASELINE, message, train=480), oom(2, SMALL, message, train=450)])
    assert "all 2 candidates tried ran out of memory under the budget of 500 MB" in text
    assert "probe 0002 held at least 450 MB when it was refused 101 MB more" in text
    assert "every candidate" not in text
    small = replace(DESCRIPTION, parameter_bytes=MB, trainable_bytes=MB, longest_row=1, config={"hidden_size": 1})
    text = told([oom(1, BASELINE, message, train=480), oom(2, SMALL, message, train=450)], description=small)
    assert "at least --budget 579MB (what probe 0002 held and was refused, with 5 % to spare)" in text


def test_the_message_alone_gives_what_was_refused_and_what_was_held():
    text = told([oom(1, BASELINE, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 96000000 bytes.")])
    assert "probe 0001 was refused 96.0 MB there" in text
    message = "out of memory. Tried to allocate 96 MiB. Of the allocated memory 400.00 MiB is allocated by PyTorch"
    assert "held at least 419 MB when it was refused 101 MB more" in told([oom(1, BASELINE, message)])


def test_without_any_figure_the_estimate_is_said_to_be_one():
    text = told([oom(1, BASELINE), oom(2, SMALL)])
    (estimate,) = re.findall(r"the smallest needs (~\S+ \S+), an estimate by formula", text)
    assert estimate.startswith("~")
    assert re.search(r"a larger budget, about --budget \S+ \(an estimate by formula", text)
    small = replace(DESCRIPTION, parameter_bytes=MB, trainable_bytes=MB, longest_row=1, config={"hidden_size": 1})
    text = told([oom(1, BASELINE)], description=small)
    assert "an estimate by formula" not in text and "--budget" not in text  # it would be below the present one


def test_candidates_that_failed_otherwise_are_not_said_to_be_out_of_memory():
    crashed = probe(2, SMALL, outcome=Outcome.CRASHED, failure=Failure("train", 1, "ValueError", "no"))
    assert "1 of the candidates tried ran out" in told([oom(1, BASELINE), crashed])


def test_a_logits_reduction_is_advised_for_scripts_that_were_not_tried_with_one():
    assert "preprocess_logits_for_metrics" in told(evaluation_fails(), SCRIPT)
    assert "preprocess_logits_for_metrics" not in told(evaluation_fails(), MODEL)
    reduced = [replace(m, candidate=m.candidate.but(logits="argmax")) for m in evaluation_fails()]
    assert "preprocess_logits_for_metrics" not in told(reduced, SCRIPT)
    assert "preprocess_logits_for_metrics" not in told([oom(1, BASELINE)], SCRIPT)


@pytest.mark.parametrize("task", [MODEL, SCRIPT])
def test_where_only_evaluation_fails_its_remedies_come_first(task):
    first, *rest = told(evaluation_fails(), task).splitlines()[1:]
    assert "training fits and evaluation does not" in told(evaluation_fails(), task)
    assert "evaluat" in first
    last = max(n for n, line in enumerate(rest) if "evaluat" in line)
    assert last < min(n for n, line in enumerate(rest) if "adapters" in line)


@pytest.mark.parametrize("task", [MODEL, SCRIPT])
def test_remedies_are_ranked_by_their_estimated_saving(task):
    lines = told([oom(1, LARGE)], task).splitlines()[1:]
    saved = [re.search(r"saves ~([\d.]+) (\w+)", line) for line in lines if "budget" not in line]
    sizes = [parse_bytes("".join(found.groups())) for found in saved]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) >= 4


def test_every_remedy_is_something_to_type_and_none_that_is_in_use():
    for line in told([oom(1, BASELINE), *evaluation_fails()]).splitlines()[1:]:
        assert re.search(r" --[a-z-]+ \S", line), line
    text = told([oom(1, BASELINE.but(optim="sgd"))])
    assert "--allow training" not in text
    adapters = replace(DESCRIPTION, trainable_parameters=1000, trainable_bytes=4000)
    assert "--lora" not in told([oom(1, BASELINE)], description=adapters)


def test_where_the_budget_is_all_that_the_device_has_another_device_is_advised():
    text = told([over(1, BASELINE, 610)], budget=replace(BUDGET, text=""))
    assert "--budget" not in text and "a device with at least 641MB, which --device names" in text


def test_where_the_host_ran_out_its_own_budget_is_named():
    failure = Failure("evaluate", None, "host_budget", "")
    killed = replace(
        probe(1, BASELINE, "baseline", Outcome.HOST_OOM, rates=(10.0,), train=300, failure=failure),
        host_bytes=1200 * MB,
    )
    text = told([killed], budget=replace(BUDGET, host_bytes=900 * MB))
    assert "1 of the candidates tried ran out of host memory under the host budget of 900 MB" in text
    assert "--host-budget 1" in text


def test_a_projected_host_peak_names_the_host_budget_that_it_needs():
    growth = EvaluationGrowth(32, 10_000, 0.0, 9.0, 320 * MB, 14_000 * MB)
    failure = Failure("evaluate", None, "host_growth", "")
    m = probe(1, BASELINE, "baseline", Outcome.HOST_OOM, rates=(10.0,), train=300, evaluate=320, failure=failure)
    assert "--host-budget 15GB" in told([replace(m, growth=growth, host_bytes=1000 * MB)])


def test_evaluation_beyond_its_own_memory_is_told_the_smaller_batch_by_measured_parts():
    failing = oom(1, BASELINE, phase="evaluate", rates=(10.0,))
    phases = tuple(
        PhaseRecord(n, 1.0, process_bytes=b * MB) for n, b in (("load", 100), ("train", 300), ("evaluate", 420))
    )
    assert "--knob per_device_eval_batch_size=1 (saves ~280 MB)" in told([replace(failing, phases=phases)])


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (524_400_001, "MB", "525MB"),
        (26 * 10**9 + 1, "GB", "26.1GB"),
        (2**30 + 1, "GiB", "1025MiB"),
        (12 * 2**30, "MiB", "12GiB"),
    ],
)
def test_an_advised_size_is_rounded_up_in_the_users_family_and_can_be_typed(amount, unit, text):
    assert option_size(amount, unit) == text
    assert parse_bytes(text) >= amount
