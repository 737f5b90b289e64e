"""fp16 training, of which a CPU makes nothing: the autocast to float16, and the gradient scaler.

With `fp16=True` on CUDA accelerate keeps a `torch.amp.GradScaler` (`Accelerator.__init__`), which multiplies the loss
(`Accelerator.backward`), divides the gradients before they are clipped (`Accelerator.unscale_gradients`), and decides
whether the optimizer steps (`AcceleratedOptimizer.step`). On the CPU it makes none, and no autocast either. A shadow
run asks the Trainer for bf16, whose outputs come back in float32 through the same wrapper (`convert_outputs_to_fp32` in
`Accelerator.prepare_model`, for either type), has autocast cast to float16 all the same, since kernels are chosen by dtype (below
capability 8.0 efficient attention takes float16 and no bfloat16), and lays the scaler over.

What it takes of the device, each rounded up to 512 bytes by the caching allocator (torch/amp/grad_scaler.py):

    kept                      scale (float32), growth tracker (int32)                                  8 bytes
    for each micro-batch      the scaled loss and, in backward, its gradient                           4 bytes each
    for each optimizer step   inverse scale (by way of float64) and found_inf, one copy of each        at most 28 bytes
    until the update          the copy of found_inf                                                    4 bytes
    gradients                 none: `_amp_foreach_non_finite_check_and_unscale_` works in place

About 4 KiB at once, so it never decides what fits. A real scaler skips steps until its scale fits; here every step is
applied, as later ones are.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

_WRAPPER = ("_accelerate_step_called", "_optimizer_original_step_method", "_optimizer_patched_step_method")


class ShadowScaler(torch.amp.GradScaler):
    """A scaler that finds no infinities. On the real one the host reads `found_inf`, which takes no memory."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("cpu", **kwargs)  # the default, cuda, turns itself off where there is none

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


@contextlib.contextmanager
def float16_autocast() -> Iterator[None]:
    """`torch.autocast` casts to float16 where it is asked for bfloat16."""
    original = torch.autocast.__init__

    def make(autocast: Any, *args: Any, **kwargs: Any) -> None:
        args = tuple(torch.float16 if arg is torch.bfloat16 else arg for arg in args)
        if kwargs.get("dtype") is torch.bfloat16:
            kwargs["dtype"] = torch.float16
        original(autocast, *args, **kwargs)

    torch.autocast.__init__ = make
    try:
        yield
    finally:
        torch.autocast.__init__ = original


@contextlib.contextmanager
def cuda_grad_scaler(holder: Any) -> Iterator[ShadowScaler]:
    """Give an accelerator, or a Trainer's, the scaler that it would have on CUDA. Yields the scaler.

    Optimizers that are prepared already get it too. Raises ValueError where there is a scaler already.
    """
    accelerator = getattr(holder, "accelerator", holder)
    if accelerator.scaler is not None:
        raise ValueError("the accelerator has a gradient scaler of its own: ask for bf16 in a shadow run of fp16")
    handler = accelerator.scaler_handler
    scaler = ShadowScaler(**(handler.to_kwargs() if handler is not None else {}))

    def unscale_gradients(optimizer: Any = None) -> None:
        """As accelerate's, which does nothing unless its mixed precision is fp16."""
        chosen = accelerator._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            while isinstance(one, AcceleratedOptimizer):
                one = one.optimizer
            scaler.unscale_(one)

    prepared = list(accelerator._optimizers)
    accelerator.scaler = scaler
    accelerator.unscale_gradients = unscale_gradients
    for optimizer in prepared:
        optimizer.__setstate__({"scaler": scaler})  # also makes what `step` needs with a scaler
    try:
        yield scaler
    finally:
        accelerator.scaler = None
        del accelerator.unscale_gradients
        for optimizer in {id(one): one for one in (*prepared, *accelerator._optimizers)}.values():
            optimizer.scaler = None
            for name in _WRAPPER:
                vars(optimizer).pop(name, None)
