"""What leaves the device in evaluation, with a real Trainer on fake tensors; sizes counted by hand."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
import transformers.trainer
from test_shadow_answers import SmallLedger, make_mode
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import EvalLoopContainer

from autofit.harness.evaluation import AccumulationLog
from autofit.harness.shadow.semantics import host_transfer
from autofit.harness.shadow.semantics.host_transfer import host_transfers

ROWS, BATCH, LENGTH, CLASSES = 8, 2, 4, 10_000
LOGITS = ROWS * LENGTH * CLASSES * 4  # 1.28 MB, a quarter of it for each batch
ELSE = 20_000  # labels, losses, inputs


@pytest.fixture
def ledger() -> Any:
    ledger = SmallLedger()
    with make_mode(), ledger, host_transfers(ledger.on_host):
        yield ledger


# ---- tensors ----


def test_a_copy_on_the_host_takes_nothing_of_the_device(ledger: SmallLedger) -> None:
    values = torch.empty(1000)
    on_host = values.cpu()
    assert (ledger.live, ledger.host) == (4000, 4000)
    assert on_host.cpu() is on_host
    del values
    assert (ledger.live, ledger.host) == (0, 4000)
    del on_host
    assert ledger.host == 0


def test_a_copy_on_the_host_has_a_gradient_on_the_device(ledger: SmallLedger) -> None:
    values = torch.empty(1000, requires_grad=True)
    values.cpu().sum().backward()
    assert values.grad.shape == (1000,)
    assert values.detach().cpu().grad_fn is None


def test_arrays_are_zeros_of_the_right_kind(ledger: SmallLedger) -> None:
    for dtype, expected in ((torch.float32, np.float32), (torch.int64, np.int64), (torch.bool, np.bool_)):
        array = torch.empty(3, 4, dtype=dtype).numpy()
        assert (array.shape, array.dtype, array.any()) == ((3, 4), expected, False)
    array = np.asarray(torch.empty(5))
    array[0] = 1.0
    assert array.tolist() == [1, 0, 0, 0, 0]


def test_what_torch_refuses_is_refused(ledger: SmallLedger) -> None:
    with pytest.raises(TypeError, match="BFloat16"):
        torch.empty(3, dtype=torch.bfloat16).numpy()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.empty(3, requires_grad=True).numpy()
    assert torch.empty(3, requires_grad=True).numpy(force=True).shape == (3,)


def test_an_array_keeps_its_tensor(ledger: SmallLedger) -> None:
    view = torch.empty(1000).cpu().numpy()[:10]
    assert (ledger.live, ledger.host) == (0, 4000)
    del view
    assert ledger.host == 0


def test_huge_arrays_own_nothing_and_are_read_only(ledger: SmallLedger) -> None:
    array = torch.empty(1000, 1000, 1000).numpy()
    assert (array.shape, array.strides, array.flags.writeable) == ((1000, 1000, 1000), (0, 0, 0), False)


def test_lists_have_the_numbers_of_items(ledger: SmallLedger) -> None:
    assert torch.empty(2, 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert torch.empty(2, dtype=torch.int64).tolist() == [1, 1]
    assert torch.tensor([7]).tolist() == [7]
    assert torch.empty(()).tolist() == 0.5
    long = torch.empty(2000, 1000).tolist()
    assert (len(long), len(long[1999]), long[1999][999]) == (2000, 1000, 0.5)


# ---- evaluation ----


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, CLASSES, bias=False)

    def to(self, *_: Any, **__: Any) -> Any:
        """Fake parameters cannot be swapped."""
        return self

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(features)
        loss = logits.detach().sum(dtype=torch.float32) * 0
        return {"loss": loss, "logits": logits}


class StillTrainer(Trainer):
    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The fake model is where it is."""


def evaluate(
    tmp_path: Any, ledger: SmallLedger, metrics: Any, lengths: Any = None, **arguments: Any
) -> dict[str, float]:
    """Run an evaluation; the ledger's peaks, above what was live before, are left in it."""
    sizes = lengths or [LENGTH] * ROWS
    rows = [{"features": [[0.0, 0.0]] * n, "labels": [1] * n} for n in sizes]
    fixed = {"use_cpu": True, "report_to": [], "per_device_eval_batch_size": BATCH, "disable_tqdm": True}
    trainer = StillTrainer(
        Tagger(),
        TrainingArguments(str(tmp_path), **fixed, **arguments),
        eval_dataset=rows,
        compute_metrics=metrics,
    )
    gc.collect()
    ledger.restart()
    return trainer.evaluate()


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.parametrize(
    ("arguments", "device", "host"),
    [
        ({}, 2, 1),
        ({"eval_do_concat_batches": False}, 1, 1),
        # two batches at once on the device; on the host two halves, and the whole that is made of them
        ({"eval_accumulation_steps": 2}, 1, 2),
        # one batch, and the next one's logits while they are computed
        ({"eval_accumulation_steps": 1}, 0.25, 2),
        ({"eval_accumulation_steps": 1, "eval_do_concat_batches": False}, 0.25, 1),
        ({"prediction_loss_only": True}, 0.25, 0),
    ],
    ids=["concatenated", "listed", "by-two", "by-one", "by-one-listed", "loss-only"],
)
def test_the_peak_of_an_evaluation(
    tmp_path: Any, ledger: SmallLedger, arguments: dict[str, Any], device: float, host: float
) -> None:
    metrics = (lambda _: {}) if not arguments.get("eval_do_concat_batches", True) else accuracy
    evaluate(tmp_path, ledger, metrics, **arguments)
    weight = CLASSES * 2 * 4
    # Nothing else lives then but one batch of logits that are computed while as many are kept.
    assert device * LOGITS <= ledger.peak - weight <= device * LOGITS + ELSE
    assert host * LOGITS <= ledger.host_peak <= host * LOGITS + ELSE


def test_metrics_are_given_all_rows(tmp_path: Any, ledger: SmallLedger) -> None:
    seen: list[Any] = []
    result = evaluate(tmp_path, ledger, lambda p: seen.append(p) or accuracy(p))
    assert seen[0].predictions.shape == (ROWS, LENGTH, CLASSES)
    assert seen[0].label_ids.shape == (ROWS, LENGTH)
    assert result["eval_accuracy"] == 1.0
    assert ledger.host == LOGITS + ROWS * LENGTH * 8  # the arrays that a metrics function may keep
    seen.clear()
    gc.collect()
    assert ledger.host == 0


def test_outputs_under_autocast_come_back_in_float32(tmp_path: Any, ledger: SmallLedger) -> None:
    seen: list[Any] = []
    evaluate(tmp_path, ledger, lambda p: seen.append(p.predictions.dtype) or {}, bf16=True)
    assert seen == [np.float32]
    assert ledger.peak >= 2 * LOGITS


def test_bfloat16_outputs_are_doubled_on_the_host(ledger: SmallLedger) -> None:
    container = EvalLoopContainer()
    container.add(torch.empty(1000, dtype=torch.bfloat16))
    container.to_cpu_and_numpy()
    assert (ledger.live, ledger.host, ledger.host_peak) == (0, 4000, 6000)
    assert container.get_arrays().dtype == np.float32


def test_arrays_are_cut_to_the_same_rows(tmp_path: Any, ledger: SmallLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_transfer, "MAX_ELEMENTS", 3 * LENGTH * CLASSES)
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions.shape, prediction.label_ids.shape, prediction.losses.shape))
        return accuracy(prediction)

    evaluate(tmp_path, ledger, metrics, include_for_metrics=["loss"])
    assert seen == [((3, LENGTH, CLASSES), (3, LENGTH), (3,))]
    monkeypatch.setattr(host_transfer, "MAX_ELEMENTS", 2 * CLASSES)
    evaluate(tmp_path, ledger, metrics, include_for_metrics=["loss"])
    assert seen[1] == ((1, 2, CLASSES), (1, 2), (1,))


def test_listed_batches_are_cut_each(tmp_path: Any, ledger: SmallLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_transfer, "MAX_ELEMENTS", 4 * LENGTH * CLASSES)
    seen: list[Any] = []
    evaluate(tmp_path, ledger, lambda p: seen.append(p.predictions) or {}, eval_do_concat_batches=False)
    assert [array.shape for array in seen[0]] == [(1, LENGTH, CLASSES)] * (ROWS // BATCH)


def test_rows_of_other_lengths_are_padded(tmp_path: Any, ledger: SmallLedger) -> None:
    seen: list[Any] = []
    lengths = [2, 2, 4, 4, 3, 3, 1, 1]
    for steps in (None, 1):
        evaluate(tmp_path, ledger, lambda p: seen.append(p) or {}, lengths, eval_accumulation_steps=steps)
    assert [p.predictions.shape for p in seen] == [(ROWS, 4, CLASSES)] * 2
    assert [p.label_ids.shape for p in seen] == [(ROWS, 4)] * 2


def test_metrics_batch_by_batch(tmp_path: Any, ledger: SmallLedger) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append(prediction.predictions.argmax(-1).cpu().numpy().shape)
        return {"batches": len(seen)}

    assert evaluate(tmp_path, ledger, metrics, batch_eval_metrics=True)["eval_batches"] == 4
    assert seen == [(BATCH, LENGTH)] * 4


def test_the_accumulation_log_still_counts(tmp_path: Any, ledger: SmallLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.trainer, "EvalLoopContainer", EvalLoopContainer)  # restored afterwards
    log = AccumulationLog(BATCH)
    log.install(transformers.trainer)
    assert evaluate(tmp_path, ledger, accuracy)["eval_accuracy"] == 1.0
    assert log.bytes_per_row == {"losses": 4, "predictions": LENGTH * CLASSES * 4, "labels": LENGTH * 8}


def test_everything_is_as_before_afterwards() -> None:
    methods = ("__init__", "to_cpu_and_numpy", "get_arrays")
    before = [vars(EvalLoopContainer)[name] for name in methods], FakeTensor.tolist, set(vars(FakeTensor))
    with host_transfers(lambda _: None):
        assert "cpu" in vars(FakeTensor)
    assert before == ([vars(EvalLoopContainer)[name] for name in methods], FakeTensor.tolist, set(vars(FakeTensor)))
    container = EvalLoopContainer()
    container.add(torch.ones(2))
    assert container.get_arrays().tolist() == [1, 1]


def test_real_tensors_keep_their_values(ledger: SmallLedger) -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        real = torch.tensor([1.0, 2.0])
    container = EvalLoopContainer()
    container.add(real)
    assert container.get_arrays().tolist() == [1, 2]
