"""The scaler of fp16 training, laid over a bf16 Trainer on fake tensors."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import GradScalerKwargs
from test_shadow_answers import SmallLedger, make_mode
from transformers import Trainer, TrainerCallback, TrainingArguments

from autofit.harness.shadow.semantics.grad_scaler import cuda_grad_scaler
from autofit.harness.shadow.semantics.optimizers import cuda_optimizers

KEPT = 4 + 4  # scale, growth tracker
STEP = 4 + 8 + 4 + 4 + 4  # inverse scale in float64 (one of two at a time) and float32, found_inf, a copy of each


@pytest.fixture
def ledger() -> Any:
    ledger = SmallLedger()
    with make_mode(), ledger, cuda_optimizers(ledger.on_host):
        yield ledger


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64, bias=False)

    def to(self, *_: Any, **__: Any) -> Any:
        """Fake parameters cannot be swapped."""
        return self

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = self.linear(features)
        return {"loss": self.seen.float().sum(), "logits": self.seen}


class StillTrainer(Trainer):
    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The fake model is where it is."""


class Steps(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.skipped = trainer, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)


def make_trainer(tmp_path: Any, **arguments: Any) -> Any:
    fixed = {"use_cpu": True, "report_to": [], "max_steps": 2, "bf16": True, "per_device_train_batch_size": 2}
    quiet = {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "dataloader_pin_memory": False}
    rows = [{"features": [0.0] * 64} for _ in range(16)]
    chosen = TrainingArguments(str(tmp_path), **{**fixed, **quiet, **arguments}, remove_unused_columns=False)
    return StillTrainer(Head(), chosen, train_dataset=rows)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_training_applies_every_step(tmp_path: Any, ledger: SmallLedger, optim: str, clip: float) -> None:
    trainer = make_trainer(tmp_path, optim=optim, max_grad_norm=clip)
    steps = Steps(trainer)
    trainer.add_callback(steps)
    with cuda_grad_scaler(trainer) as scaler:
        trainer.train()
        assert scaler._scale.shape == scaler._growth_tracker.shape == ()
    assert steps.skipped == [False, False]
    assert len(trainer.optimizer.state) == 1
    unscaled = ledger.operators.count("aten._amp_foreach_non_finite_check_and_unscale_.default")
    assert unscaled == 2  # once for each step, also to look for infinities only
    assert ledger.operators.count("aten._amp_update_scale_.default") == 2
    assert trainer.model.seen.dtype == torch.bfloat16


def test_the_scaler_takes_some_bytes(ledger: SmallLedger) -> None:
    parameter = torch.nn.Parameter(torch.empty(1000))
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD([parameter], lr=0.1))
    with cuda_grad_scaler(accelerator) as scaler:
        loss = parameter.sum()
        before = ledger.live
        scaled = scaler.scale(loss)
        assert ledger.live - before == KEPT + 4
        del scaled
        accelerator.backward(loss)
        before = ledger.restart()
        accelerator.unscale_gradients()
        assert 0 < ledger.peak - before <= STEP + 8
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer.step_was_skipped


def test_gradients_that_are_fp16_are_refused_as_on_the_device(ledger: SmallLedger) -> None:
    parameter = torch.nn.Parameter(torch.empty(1000, dtype=torch.float16))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_optimizer(torch.optim.SGD([parameter], lr=0.1))
    with cuda_grad_scaler(accelerator):
        accelerator.backward(parameter.sum())
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            accelerator.unscale_gradients()


def test_settings_of_the_scaler_are_kept() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    with cuda_grad_scaler(accelerator) as scaler:
        assert scaler.get_scale() == 8.0
        assert scaler.is_enabled()


def test_everything_is_as_before_afterwards() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    accelerator = Accelerator(cpu=True)
    early = accelerator.prepare_optimizer(torch.optim.SGD([parameter], lr=0.1))
    with cuda_grad_scaler(accelerator) as scaler:
        late = accelerator.prepare_optimizer(torch.optim.SGD([parameter], lr=0.1))
        assert isinstance(early, AcceleratedOptimizer)
        assert early.scaler is late.scaler is scaler
        with pytest.raises(ValueError, match="scaler of its own"), cuda_grad_scaler(accelerator):
            pass
    assert accelerator.scaler is early.scaler is late.scaler is None
    assert "unscale_gradients" not in vars(accelerator)
    parameter.grad = torch.ones(3)
    early.step()
    assert parameter.detach().allclose(torch.full((3,), 0.9))
