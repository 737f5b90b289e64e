"""What transformers did in 2020 to 2022 where that shows in memory: BERT's attention and the AdamW of its own.

BERT up to 4.40 had one attention, in plain operators (models/bert/modeling_bert.py, `BertSelfAttention.forward`): the
scores are divided into a new tensor, and a mask is always added into another one, whether or not it masks anything: the
model makes one of ones where it is given none. AdamW up to 4.x (optimization.py) went over the parameters one by one.
"""

import math
from typing import Any

import torch
from torch import Tensor

from published.old_torch import softmax_keeping_input


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """BERT's attention of then, called as transformers calls an implementation now. Shapes are (B, heads, T, width).

    The mask has the type of the weights, so that under autocast the sum is fp32 again.
    """
    mask = torch.zeros(query.shape[0], 1, 1, key.shape[-2], dtype=module.query.weight.dtype, device=query.device)
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores + mask
    shares = softmax_keeping_input(scores)
    shares = torch.nn.functional.dropout(shares, dropout, module.training)
    context = torch.matmul(shares, value)
    return context.permute(0, 2, 1, 3).contiguous(), None


def use_old_attention() -> None:
    """Have BERT models of eager attention attend as they did then."""
    from transformers.models.bert import modeling_bert

    modeling_bert.eager_attention_forward = attend


class AdamW(torch.optim.Optimizer):
    """What `transformers.AdamW` held: two states like each parameter, and one tensor of its size at a time.

    The last one stays until the next parameter's is made, since a name refers to it.
    """

    def __init__(self, params: Any, lr: float = 5e-5, weight_decay: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                root = state["exp_avg_sq"].sqrt().add_(1e-6)
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"])
                if group["weight_decay"]:
                    parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
