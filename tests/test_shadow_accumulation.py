"""Two gradients of one tensor are added as autograd adds them to plain tensors: in place where nobody else holds the first."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from autofit.harness.shadow.ledger import Ledger


class Doubled(torch.autograd.Function):
    """Adds in Python within its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        first = grad * 1
        return first + grad


def tied(half: bool) -> torch.Tensor:
    weight, layer = torch.nn.Parameter(torch.zeros(50, 8)), torch.nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        x = torch.nn.functional.embedding(torch.arange(6).reshape(2, 3), weight)
        for _ in range(2):
            x = x + torch.nn.functional.gelu(layer(x))
        return torch.nn.functional.linear(x, weight).float().sum()


class Adds(Ledger):
    """Names of the sums that the fakes are asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self._sizes)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.sums.append("add" if len(self._sizes) > before else "add_")
        return result


def fake_sums(make) -> list[str]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        ledger = Adds()
        ledger.sums = []
        with ledger:
            make().backward()
    return ledger.sums


@pytest.mark.parametrize("half", [False, True])
def test_gradients_meet_in_place_exactly_where_real_ones_do(half):
    loss = tied(half)
    with profile(activities=[ProfilerActivity.CPU]) as window:
        loss.backward()
    real = [event.name.removeprefix("aten::") for event in window.events() if event.name in ("aten::add", "aten::add_")]
    assert {"add", "add_"} <= set(real)
    assert fake_sums(lambda: tied(half)) == real


def test_a_sum_that_a_backward_pass_in_python_makes_stays_out_of_place():
    assert fake_sums(lambda: Doubled.apply(torch.zeros(7, 7, requires_grad=True)).sum()) == ["add"]
