"""What torch did before the versions that autofit models. For comparing with old publications, and nothing else.

until     what                                                           source
1.10      softmax keeps its input for the backward pass beside its       tools/autograd/derivatives.yaml, `_softmax`:
          result; from 1.11 on only the input's type                     `_softmax_backward_data(grad, result, dim, self)`
1.13      `zero_grad` fills gradients with zeros and keeps them; from    torch/nn/modules/module.py and
          2.0 on it drops them                                           torch/optim/optimizer.py, `set_to_none`
1.13      gradients are clipped and optimizers step one tensor after     torch/nn/utils/clip_grad.py, torch/optim
          the other
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class _SoftmaxKeepingInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        result = aten._softmax.default(scores, -1, False)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, result = ctx.saved_tensors
        return aten._softmax_backward_data.default(grad, result, -1, result.dtype)


def softmax_keeping_input(scores: Tensor) -> Tensor:
    """In place of `softmax(scores, dim=-1)` in a model's code, where scores are fp32."""
    return _SoftmaxKeepingInput.apply(scores)


def keep_gradients() -> None:
    """Have `zero_grad` of models and optimizers fill gradients with zeros, as it did by default before 2.0."""

    def keeping(zero_grad: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(zero_grad)
        def zero(holder: Any, set_to_none: bool = False) -> None:
            zero_grad(holder, set_to_none)

        return zero

    for owner in (torch.nn.Module, torch.optim.Optimizer):
        owner.zero_grad = keeping(owner.zero_grad)


def clip_one_by_one() -> None:
    """Have gradients clipped without lists of tensors, as before 2.0."""
    torch.nn.utils.clip_grad_norm_ = functools.partial(torch.nn.utils.clip_grad_norm_, foreach=False)
