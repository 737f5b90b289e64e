"""What evaluation copies of what has accumulated: counted against the very containers of transformers, and timed in children."""

import dataclasses
import json

import pytest
import torch
from conftest import QUICK
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import trainer_pt_utils
from transformers.trainer_pt_utils import EvalLoopContainer

from autofit import codec
from autofit.harness.copy_speed import device_rate, host_rate, with_copies
from autofit.harness.evaluation import copied_rows, copy_seconds, device_bytes, project
from autofit.records import Candidate, EvaluationGrowth, Measurement, Outcome, Speed

LIMIT = 300.0


def written(rows: int, batch: int, accumulation: int | None, concatenates: bool) -> tuple[int, int]:
    """(rows that concatenation wrote of tensors, of arrays) in the evaluation loop of Trainer, without a model."""
    counted = {"tensors": 0, "arrays": 0}

    def counting(kind, original):
        def concatenate(*args, **kwargs):
            result = original(*args, **kwargs)
            counted[kind] += result.shape[0]
            return result

        return concatenate

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in (("tensors", "torch_pad_and_concatenate"), ("arrays", "numpy_pad_and_concatenate")):
            patch.setattr(trainer_pt_utils, name, counting(kind, getattr(trainer_pt_utils, name)))
        container = EvalLoopContainer(concatenates)
        for step, done in enumerate(range(0, rows, batch)):
            container.add(torch.zeros(min(batch, rows - done), 1))
            if accumulation and (step + 1) % accumulation == 0:
                container.to_cpu_and_numpy()
        container.get_arrays()
    return counted["tensors"], counted["arrays"]


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 200),
    batch=st.integers(1, 40),
    accumulation=st.one_of(st.none(), st.integers(1, 50)),
    concatenates=st.booleans(),
)
def test_the_rows_that_are_copied_are_those_that_the_containers_of_transformers_write(
    rows, batch, accumulation, concatenates
):
    assert copied_rows(rows, batch, accumulation, concatenates) == written(rows, batch, accumulation, concatenates)


def make_growth(**changes) -> EvaluationGrowth:
    facts = {"rows_measured": 32, "rows_total": 10_000, "device_bytes_per_row": 1e5, "host_bytes_per_row": 1e5,
             "projected_process_bytes": 0, "projected_host_bytes": 0, "outputs": {"logits": 1e5}, "batch": 8}  # fmt: skip
    return EvaluationGrowth(**{**facts, **changes})


def test_a_journal_without_copies_has_the_linear_speed_alone():
    line = codec.encode(Measurement("1", "train", Candidate({}), Outcome.FITS, 1.0, growth=make_growth()))
    known = json.loads(line)
    for name in ("base_bytes", "step_bytes", "batch", "copy_seconds", "timed_copy_seconds", "device_copy_rate",
                 "host_copy_rate", "metrics_seconds"):  # fmt: skip
        del known["growth"][name]
    m = codec.decode(json.dumps(known).encode(), Measurement, "journal")
    m = dataclasses.replace(m, eval_speed=Speed(100, (2.0, 4.0)))
    assert m.eval_seconds == (200.0, 400.0)
    assert m.eval_rates == (50.0, 25.0)
    assert device_bytes(m.growth, 8, 4, True) is None


def test_copies_count_with_the_square_of_the_rows_and_the_rest_with_the_rows():
    growth = make_growth(copy_seconds=80.0, timed_copy_seconds=0.5)
    assert growth.seconds(Speed(100, (1.5,))) == (100 * 1.0 + 80.0,)
    assert growth.seconds(Speed(100, (0.4,)))[0] == pytest.approx(100 * 0.04 + 80)  # no rate is as good as that


def test_what_comes_to_little_at_any_rate_is_not_measured():
    timed, device = Speed(100, (1.0,)), torch.device("cpu")
    refuse = lambda: pytest.fail("measured")  # noqa: E731
    small = make_growth(device_bytes_per_row=8.0, host_bytes_per_row=8.0)
    assert with_copies(small, timed, None, True, device, refuse) is small
    assert with_copies(make_growth(), timed, None, False, device, refuse) == make_growth()  # a list has no copies
    rated = with_copies(make_growth(), timed, None, True, device, lambda: None)
    assert rated.copy_seconds == copy_seconds(rated, 10_000, 8, None, True) > 100 * rated.timed_copy_seconds > 0


def test_a_rate_is_that_of_one_more_concatenation():
    array, tensor = host_rate(10**9), device_rate(10**9, torch.device("cpu"), lambda: None)
    assert 1e8 < array < 1e11 and 1e8 < tensor < 1e11


@pytest.mark.parametrize("concatenates", [True, False])
def test_the_peak_at_another_batch_and_flush_is_the_one_that_is_projected_there(concatenates):
    asked = {"on_host": False, "base_bytes": 10**9, "measured_peak": 0, "outputs": {"logits": 1e6, "labels": 8.0},
             "host_outputs": {"logits": 1e6, "labels": 8.0}, "rows_measured": 32, "rows_total": 5000,
             "concatenates": concatenates}  # fmt: skip
    at = lambda batch, steps: project(  # noqa: E731
        batch=batch, accumulation_steps=steps, first_step_peak=10**9 + batch * (10**6 + 8 + 3 * 10**6), **asked
    )
    measured = at(8, None)
    for batch, steps in ((8, 1), (8, 40), (16, 40), (32, 10_000), (4, 1)):
        assert device_bytes(measured, batch, steps, concatenates) == pytest.approx(
            at(batch, steps).projected_process_bytes, rel=1e-6
        )


WIDE = """
import time

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

class Wide(torch.nn.Module):
    '''Scores of 100 kB a row, for next to no work.'''
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(25_000))
    def forward(self, x, labels):
        logits = x[:, None] * self.weight
        return {"loss": (logits.mean(1) - labels).pow(2).mean(), "logits": logits}

class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return self.rows
    def __getitem__(self, index):
        return {"x": torch.tensor(index / 100), "labels": torch.tensor(1.0)}

def metrics(given):
    time.sleep(len(given.label_ids) * METRICS_SECONDS)
    return {}

arguments = TrainingArguments("out", report_to="none", use_cpu=True)
Trainer(Wide(), arguments, train_dataset=Rows(64), eval_dataset=Rows(1200), compute_metrics=metrics).train()
"""


@pytest.fixture
def evaluate(launcher, ask, script):
    def run(rows: int, accumulation: int | None, metrics_seconds: float = 0.0) -> Measurement:
        """A probe in which so many rows are timed."""
        arguments = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "use_cpu": True,
                     "eval_accumulation_steps": accumulation}  # fmt: skip
        task = script(WIDE.replace("METRICS_SECONDS", str(metrics_seconds)))
        quick = dataclasses.replace(QUICK, timed_steps=0, timed_seconds=1.0)
        request = ask(task, schedule=quick, arguments=arguments, timed_eval_rows=rows)
        reply = launcher.probe(request, how="fork", time_limit=LIMIT).reply
        assert reply.outcome is Outcome.FITS, reply.failure
        facts = {"eval_speed": reply.eval_speed, "growth": reply.growth}
        return Measurement("1", "evaluate", Candidate({}), reply.outcome, 1.0, **facts)

    return run


@pytest.mark.parametrize("accumulation", [1, None])
def test_a_whole_evaluation_takes_the_seconds_that_few_rows_and_the_rate_of_copies_say(evaluate, accumulation):
    """120 MB of scores, copied anew with every batch: on the host, or as tensors. Turn by turn until the machine is quiet
    enough for one; without the copies no turn comes near."""
    ratios = []
    for _ in range(4):
        few, whole = evaluate(128, accumulation), evaluate(1200, accumulation)
        projected, taken = min(few.eval_seconds), min(whole.eval_speed.seconds)
        linear = min(few.eval_speed.seconds) * 1200 / 128
        print(f"accumulation {accumulation}: projected {projected:.2f} s, taken {taken:.2f} s, linear {linear:.2f} s")
        assert linear < taken / 1.5
        ratios.append(projected / taken)
        if 1 / 1.5 < ratios[-1] < 1.5:
            return
    pytest.fail(f"projected over taken: {ratios}")


def test_time_of_the_metrics_is_part_of_the_evaluation_and_told(evaluate):
    m = evaluate(64, None, metrics_seconds=0.005)
    assert m.growth.metrics_seconds == pytest.approx(0.32, rel=0.2)
    assert min(m.eval_speed.seconds) > 0.32
    assert min(m.eval_seconds) > 1200 * 0.005
