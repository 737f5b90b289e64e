"""Optimizers over fake CPU tensors against what their implementations hold on CUDA, counted by hand."""

import sys
import types
from typing import Any

import pytest
import torch
import transformers
from test_shadow_answers import SmallLedger, make_mode
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from autofit.harness.shadow.semantics.optimizers import (
    OPTIMIZERS,
    CannotShadowError,
    check_optimizer,
    cuda_optimizers,
)

SHAPE, COUNT = (1024, 256), 10  # ten matrices of 1 MiB
ONE = 4 * 1024 * 256
PARAMETERS = COUNT * ONE
MIB = 2**20


@pytest.fixture
def ledger() -> Any:
    ledger = SmallLedger()
    with make_mode(), ledger, cuda_optimizers(ledger.on_host):
        yield ledger


def make_parameters(count: int = COUNT, shape: tuple[int, ...] = SHAPE, **options: Any) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.empty(shape, **options)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters


def step_twice(ledger: SmallLedger, optimizer: torch.optim.Optimizer, before: int) -> tuple[float, float]:
    """(state, what the second step takes beyond it), in units of the parameters' bytes."""
    optimizer.step()
    state = ledger.restart() - before
    optimizer.step()
    assert ledger.live - before == state
    return round(state / PARAMETERS, 3), round((ledger.peak - ledger.live) / PARAMETERS, 3)


@pytest.mark.parametrize(
    ("make", "state", "transient"),
    [
        (lambda p: torch.optim.AdamW(p), 2, 1),
        (lambda p: torch.optim.AdamW(p, fused=True), 2, 0),
        (lambda p: torch.optim.AdamW(p, foreach=False), 2, 3 / COUNT),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), 2, 1),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), 1, 1),
        (lambda p: torch.optim.RMSprop(p), 1, 1),
        (lambda p: torch.optim.RMSprop(p, weight_decay=0.1), 1, 2),
        (lambda p: torch.optim.Adagrad(p), 1, 2),
    ],
    ids=["adamw", "fused", "for-loop", "adam-decay", "sgd", "momentum", "sgd-decay", "rmsprop", "rms-decay", "adagrad"],
)
def test_state_and_transient(ledger: SmallLedger, make: Any, state: float, transient: float) -> None:
    before = ledger.live if (parameters := make_parameters()) else 0
    assert step_twice(ledger, make(parameters), before) == (state, transient)


def test_adagrad_has_its_state_when_it_is_made(ledger: SmallLedger) -> None:
    parameters = make_parameters()
    before = ledger.live
    optimizer = torch.optim.Adagrad(parameters)
    assert ledger.live - before == PARAMETERS + COUNT * 4
    assert optimizer


def test_step_counters_are_host_memory_unless_fused(ledger: SmallLedger) -> None:
    parameters = make_parameters()
    before = ledger.live
    first = torch.optim.AdamW(parameters)
    first.step()
    assert (ledger.live - before, ledger.host) == (2 * PARAMETERS, COUNT * 4)
    first.step()
    assert ledger.host == COUNT * 4
    before = ledger.live
    second = torch.optim.AdamW(parameters, fused=True)
    second.step()
    assert (ledger.live - before, ledger.host) == (2 * PARAMETERS + COUNT * 4, COUNT * 4)


def test_clipping_takes_norms_together(ledger: SmallLedger) -> None:
    parameters = make_parameters()
    before = ledger.restart()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert "aten._foreach_norm.Scalar" in ledger.operators
    assert "aten._foreach_mul_.Tensor" in ledger.operators
    assert ledger.peak - before == COUNT * (1024 * 256 // 65536) * 4 + COUNT * 4  # partial sums, then one norm each


def test_gradients_go_with_zero_grad(ledger: SmallLedger) -> None:
    parameters = make_parameters()
    before = ledger.live
    torch.optim.AdamW(parameters).zero_grad()
    assert ledger.live == before - PARAMETERS


def test_adafactor_keeps_rows_and_columns(ledger: SmallLedger) -> None:
    parameters = make_parameters()
    before = ledger.live
    optimizer = Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    optimizer.step()
    kept = COUNT * (1024 + 256 + 1) * 4  # a row, a column, and the root mean square
    assert ledger.live - before <= kept + 8  # two numbers of the last parameter are still named inside
    ledger.restart()
    optimizer.step()
    assert ledger.peak - ledger.live == 3 * ONE


# ---- bitsandbytes ----


class Embedded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 128)
        self.linear = torch.nn.Linear(128, 1000)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.linear(self.embedding(input_ids))


class StillTrainer(Trainer):
    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The fake model is where it is."""


def optimize(ledger: SmallLedger, tmp_path: Any, name: str) -> int:
    """Bytes of state on the device after a step of what Trainer makes of `optim=name`."""
    model = Embedded()
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to=[])
    optimizer = StillTrainer(model, arguments).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    before = ledger.live
    optimizer.step()
    return ledger.live - before


WEIGHT, BIAS = 128_000, 1000  # elements; both matrices have the same
ABSMAX = 4 * WEIGHT // 256
TABLES = 2 * 256 * 4


@pytest.mark.parametrize(
    ("name", "device_bytes", "host_bytes"),
    [
        # the linear's weight in 8 bits; its bias is too small, and Trainer keeps embeddings in 32
        ("adamw_bnb_8bit", 2 * (WEIGHT + ABSMAX) + 8 * (WEIGHT + BIAS) + TABLES, 0),
        ("lion_8bit", WEIGHT + ABSMAX + 4 * (WEIGHT + BIAS) + TABLES // 2, 0),
        ("lion_32bit", 4 * (2 * WEIGHT + BIAS), 0),
        ("rmsprop_bnb_8bit", WEIGHT + ABSMAX + 4 * (WEIGHT + BIAS) + TABLES // 2, 0),
        ("ademamix_8bit", 3 * (WEIGHT + ABSMAX) + 12 * (WEIGHT + BIAS) + TABLES, 0),
        ("paged_adamw_32bit", 8 * BIAS, 8 * 2 * WEIGHT),
        ("paged_adamw_8bit", 2 * ABSMAX + 8 * BIAS + TABLES, 2 * WEIGHT + 8 * WEIGHT),
    ],
)
def test_bitsandbytes_state(ledger: SmallLedger, tmp_path: Any, name: str, device_bytes: int, host_bytes: int) -> None:
    assert optimize(ledger, tmp_path, name) == device_bytes
    assert ledger.host_peak == host_bytes


def test_stand_ins_are_importable_only_while_an_optimizer_is_made(ledger: SmallLedger, tmp_path: Any) -> None:
    optimize(ledger, tmp_path, "adamw_8bit")
    assert "bitsandbytes" not in sys.modules


def test_a_loaded_bitsandbytes_keeps_its_modules_and_gets_its_classes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = types.ModuleType("bitsandbytes.optim")
    loaded.AdamW8bit = real = type("AdamW8bit", (), {})
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", loaded)
    with make_mode(), SmallLedger() as ledger, cuda_optimizers(ledger.on_host):
        parameters = make_parameters(1)
        before = ledger.live
        optimizer = loaded.AdamW8bit(parameters, lr=1e-3)
        optimizer.step()
        assert ledger.live - before == 2 * (ONE // 4 + ONE // 256) + TABLES
    assert loaded.AdamW8bit is real


def test_every_optimizer_of_transformers_is_classified() -> None:
    assert {name.value for name in OptimizerNames} <= set(OPTIMIZERS)


def test_what_cannot_be_traced_is_refused_by_name(ledger: SmallLedger, tmp_path: Any) -> None:
    with pytest.raises(CannotShadowError, match="optim=galore_adamw"):
        optimize(ledger, tmp_path, "galore_adamw")
    with pytest.raises(CannotShadowError, match="optim=lomo"):
        check_optimizer("lomo")
    check_optimizer("adamw_torch_fused")


def test_an_optimizer_that_the_script_chose_is_not_refused(ledger: SmallLedger, tmp_path: Any) -> None:
    arguments = TrainingArguments(str(tmp_path), optim="lomo", use_cpu=True, report_to=[])
    chosen = (torch.optim.SGD, {"lr": 0.1})
    assert StillTrainer(Embedded(), arguments, optimizer_cls_and_kwargs=chosen).create_optimizer()


def test_everything_is_as_before_afterwards() -> None:
    def state() -> list[Any]:
        return [
            torch._foreach_norm,
            torch_optimizer._foreach_supported_types,
            _foreach_utils._foreach_supported_types,
            torch_optimizer._get_foreach_kernels_supported_devices,
            transformers.Trainer.create_optimizer,
            dict(torch_optimizer._global_optimizer_post_hooks),
            sys.modules.get("bitsandbytes"),
        ]

    before = state()
    with make_mode(), cuda_optimizers():
        assert state() != before
    assert state() == before
