"""Costs of operators as they pass a dispatch mode over fake tensors; torch's own counter over real ones is the judge."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autofit.catalog.gpus import find_gpu
from autofit.harness.shadow.op_cost import KINDS, OpCost, cost_of
from autofit.harness.shadow.step_time import gpu_rates, step_seconds

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Every operator with its cost, those that start no kernel left out."""

    def __init__(self):
        super().__init__()
        self.costs: list[tuple[Any, OpCost]] = []
        self.free: set[Any] = set()
        self.calls = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outs = func(*args, **(kwargs or {}))
        start = time.perf_counter()
        cost = cost_of(func, args, kwargs, outs)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        if cost is None:
            self.free.add(func.overloadpacket)
        else:
            self.costs.append((func.overloadpacket, cost))
        return outs

    @property
    def flops(self) -> float:
        return sum(cost.flops for _, cost in self.costs)

    @property
    def kernels(self) -> int:
        return sum(cost.kernels for _, cost in self.costs)

    def of(self, packet: Any) -> list[OpCost]:
        return [cost for called, cost in self.costs if called is packet]

    def step_seconds(self, gpu: str, tf32: bool = False) -> float:
        flops, moved, kinds, kernels = zip(*(cost for _, cost in self.costs), strict=True)
        codes = [KINDS.index(kind) for kind in kinds]
        return step_seconds(flops, moved, codes, KINDS, gpu_rates(find_gpu(gpu)), tf32, kernels)


@contextmanager
def recording() -> Iterator[Recorder]:
    with FakeTensorMode(), Recorder() as recorder:
        yield recorder


def record(work: Callable[[], Any]) -> Recorder:
    """The costs of a function that makes its own tensors, which are fake."""
    with recording() as recorder:
        work()
    return recorder


def count_flops(work: Callable[[], Any]) -> int:
    """What torch counts for the same function on real tensors."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def make_gpt2(
    layers: int = 2,
    width: int = 32,
    vocab: int = 100,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=2,
        n_positions=64,
        vocab_size=vocab,
        attn_implementation=attention,
        use_cache=False,
        **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
    )
    return GPT2LMHeadModel._from_config(config, dtype=dtype)  # fake parameters cannot be cast afterwards


def train_gpt2(
    batch: int = 2,
    length: int = 16,
    dtype: torch.dtype = torch.float32,
    reentrant: bool | None = None,
    **sizes: Any,
) -> None:
    """One forward and backward pass; with activation checkpointing unless `reentrant` is None."""
    model = make_gpt2(dtype=dtype, **sizes)
    if reentrant is not None:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ids = torch.zeros(batch, length, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()


# --- arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_costs_6mnk_forward_and_backward(dtype, bias):
    m, n, k = 24, 40, 56

    def work():
        layer = nn.Linear(k, n, bias=bias, dtype=dtype)
        layer(torch.zeros(m, k, dtype=dtype, requires_grad=True)).sum().backward()

    recorder = record(work)
    assert recorder.flops == 6 * m * n * k
    products = [cost for _, cost in recorder.costs if cost.flops]
    assert {cost.kind for cost in products} == {"matmul_fp32" if dtype is torch.float32 else "matmul_half"}
    assert len(products) == 3
    width = dtype.itemsize
    assert products[0].bytes == width * (m * k + k * n + m * n + (n if bias else 0))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_costs_as_much_again_for_each_gradient(transposed):
    def work(needs_input_gradient=True):
        layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(6, 10, 3, stride=2, padding=1)
        layer(torch.zeros(4, 6, 17, 13, requires_grad=needs_input_gradient)).sum().backward()

    recorder = record(work)
    (forward,), (backward,) = recorder.of(aten.convolution), recorder.of(aten.convolution_backward)
    assert backward.flops == 2 * forward.flops
    assert recorder.flops == count_flops(work)
    assert record(lambda: work(False)).of(aten.convolution_backward)[0].flops == forward.flops


def test_a_depthwise_convolution_costs_one_filter_per_channel():
    def work():
        nn.Conv2d(8, 8, 3, padding=1, groups=8)(torch.zeros(2, 8, 10, 10, requires_grad=True)).sum().backward()

    assert record(work).flops == 3 * 2 * 2 * 8 * 100 * 9


def attend(name: str, dtype: torch.dtype, lengths: tuple[int, int] = (24, 24), value_width: int = 8) -> None:
    """Forward and backward of one fused kernel's operators, whose shape functions need no such device."""
    queries, keys = lengths
    q = torch.empty(2, 3, queries, 8, dtype=dtype)
    k = torch.empty(2, 3, keys, 8, dtype=dtype)
    v = torch.empty(2, 3, keys, value_width, dtype=dtype)
    if name == "flash_for_cpu":
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, logsumexp, 0.0, False)
    elif name == "flash":
        out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v)
        aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset
        )
    elif name == "efficient":
        out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        aten._scaled_dot_product_efficient_attention_backward(
            out, q, k, v, None, out, logsumexp, seed, offset, 0.0, [True, True, True, False]
        )


@pytest.mark.parametrize("name", ["flash_for_cpu", "flash", "efficient"])
def test_attention_costs_two_products_forward_and_five_backward(name):
    dtype = torch.float32 if name == "efficient" else torch.bfloat16
    recorder = record(lambda: attend(name, dtype))
    forward, backward = (cost for _, cost in recorder.costs if cost.flops)
    product = 2 * 2 * 3 * 24 * 24 * 8
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert {forward.kind, backward.kind} == {"matmul_fp32" if name == "efficient" else "matmul_half"}
    # It moves what it is given and what it gives, and no scores.
    tensor = 2 * 3 * 24 * 8 * dtype.itemsize
    assert 4 * tensor <= forward.bytes <= 4.5 * tensor
    assert 8 * tensor <= backward.bytes <= 8.5 * tensor


def test_attention_of_few_queries_to_many_keys_costs_their_pairs():
    (forward, backward) = (
        c for _, c in record(lambda: attend("efficient", torch.float32, (5, 40), 16)).costs if c.flops
    )
    pairs = 2 * 2 * 3 * 5 * 40
    assert (forward.flops, backward.flops) == (pairs * (8 + 16), pairs * (3 * 8 + 2 * 16))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_small_gpt2_costs_what_torch_counts(attention):
    recorder = record(lambda: train_gpt2(attention=attention))
    # torch's table lacks the CPU's fused attention: it is counted apart.
    fused = [
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ]
    own = sum(cost.flops for packet in fused for cost in recorder.of(packet))
    assert recorder.flops - own == count_flops(lambda: train_gpt2(attention=attention))
    product = 2 * 2 * 16 * 16 * 32  # of all heads, in one layer
    assert own == (2 * 7 * product if attention == "sdpa" else 0)
    parameters = sum(p.numel() for p in make_gpt2().parameters())
    assert recorder.flops == pytest.approx(6 * parameters * 2 * 16, rel=0.15)


def test_an_operator_that_only_torch_knows_is_counted_by_torch(monkeypatch):
    from torch.utils import flop_counter

    with torch.library._scoped_library("autofit_test", "DEF") as library:
        library.define("blend(Tensor a, Tensor b) -> Tensor")
        library.impl("blend", lambda a, b: a + b, "CompositeExplicitAutograd")
        packet = torch.ops.autofit_test.blend
        monkeypatch.setitem(
            flop_counter.flop_registry, packet, flop_counter.shape_wrapper(lambda a, b, out_shape=None: 7 * a[0])
        )
        a = torch.empty(3, 4)
        assert cost_of(packet.default, (a, a), {}, a + a) == OpCost(21, 3 * a.nbytes, "matmul_fp32", 1)


def test_experts_cost_one_product_over_all_their_rows():
    rows = torch.empty(20, 8, dtype=torch.bfloat16)
    experts = torch.empty(4, 8, 6, dtype=torch.bfloat16)
    out = torch.empty(20, 6, dtype=torch.bfloat16)
    ends = torch.zeros(4, dtype=torch.int32)
    cost = cost_of(aten._grouped_mm.default, (rows, experts, ends), {}, out)
    assert (cost.flops, cost.kind) == (2 * 20 * 8 * 6, "matmul_half")
    gradient = torch.empty(4, 8, 6, dtype=torch.bfloat16)
    assert cost_of(aten._grouped_mm.default, (rows.t(), out, ends), {}, gradient).flops == 2 * 20 * 8 * 6


# --- what starts no kernel


def test_views_and_allocations_cost_nothing():
    def work():
        x = torch.empty(4, 6)
        x.view(24).view(2, 12).t().detach()
        x[1:3, None].expand(2, 5, 6).unsqueeze(0).squeeze(0).transpose(0, 1)
        x.chunk(2), x.split(3, dim=1), x.unbind(0), x.select(0, 1), x.unfold(0, 2, 1)
        torch.empty_like(x), x.new_empty(3), torch.empty_strided((2, 3), (3, 1)), x.diagonal(), x.as_strided((2,), (1,))
        aten._unsafe_view(x, (24,))
        x.squeeze_(), x.t_(), x.detach_(), x.requires_grad_(False)
        x.is_contiguous(), x.size(), x.stride(), x.device, x.shape

    recorder = record(work)
    assert recorder.costs == []
    assert {aten.view, aten.detach, aten.expand, aten.split, aten.empty, aten._unsafe_view} <= recorder.free


def test_reading_a_value_costs_nothing():
    x = torch.ones(())
    assert cost_of(aten._local_scalar_dense.default, (x,), {}, 1.0) is None
    assert cost_of(torch.ops.prim.device.default, (x,), {}, x.device) is None
    assert cost_of(aten.sym_size.int, (x, 0), {}, 1) is None


def test_an_answer_that_is_the_question_costs_nothing():
    x = torch.empty(4)
    assert cost_of(aten.clone.default, (x,), {}, x) is None
    assert cost_of(aten.clone.default, (x,), {}, x.clone()) is not None
    assert cost_of(aten.add_.Tensor, (x, x), {}, x) is not None


# --- bytes


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (lambda x: x + x.clone(), 400 * 3),  # beside the 800 of clone
        (lambda x: x.add_(1), 800),
        (lambda x: x.zero_(), 400),
        (lambda x: x.copy_(x.clone()), 800),
        (lambda x: x.to(torch.bfloat16), 600),
        (lambda x: torch.cat([x, x]), 1600),
        (lambda x: torch.zeros_like(x), 400),
        (lambda x: torch.arange(100, dtype=torch.float32), 400),
        (lambda x: torch.add(x, 1, out=torch.empty(100)), 800),
        (lambda x: aten.native_dropout(x, 0.1, True), 400 + 400 + 100),
        (lambda x: F.embedding(torch.zeros(3, dtype=torch.int64), x.view(50, 2)), 3 * 8 + 2 * 3 * 8),
        (lambda x: x[torch.zeros(3, dtype=torch.int64)], 3 * 8 + 2 * 3 * 4),
        (lambda x: x.index_add_(0, torch.zeros(3, dtype=torch.int64), torch.empty(3)), 3 * (3 * 8 + 3 * 4)),
        (lambda x: F.cross_entropy(x.view(5, 20), torch.zeros(5, dtype=torch.int64)), 5 * 8 + 4 + 4),
    ],
)
def test_an_operator_moves_what_it_reads_and_what_it_writes(work, moved):
    with FakeTensorMode():
        x = torch.empty(100)
        with Recorder() as recorder:
            work(x)
    _, last = recorder.costs[-1]
    assert last == OpCost(0, moved, "other", 1)


# --- optimizers


def optimize(parameters: int, elements: int = 1000, **kwargs: Any) -> Recorder:
    """The second step of AdamW, when its state exists."""
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(elements)) for _ in range(parameters)]
        for weight in weights:
            weight.grad = torch.empty(elements)
        optimizer = torch.optim.AdamW(weights, lr=1e-3, **kwargs)
        optimizer.step()
        with Recorder() as recorder:
            optimizer.step()
    return recorder


def test_fused_adamw_reads_four_copies_and_writes_three_in_few_launches():
    recorder = optimize(100, fused=True)
    (fused,) = recorder.of(aten._fused_adamw_)
    assert fused.bytes == pytest.approx(7 * 4 * 100 * 1000, rel=0.01)  # and its counts of steps
    assert fused.kernels == 3
    assert fused.kind == "other"


def test_foreach_adamw_moves_more_and_launches_more_than_fused():
    fused, foreach, loop = (
        optimize(100, fused=True),
        optimize(100, foreach=True),
        optimize(100, foreach=False, fused=False),
    )
    moved = [sum(cost.bytes for _, cost in each.costs) for each in (fused, foreach, loop)]
    assert 1.5 * moved[0] < moved[1] < 5 * moved[0]
    assert fused.kernels < foreach.kernels < loop.kernels / 10


def test_large_tensors_take_launches_by_their_elements():
    few = optimize(2, elements=10**6, fused=True).of(aten._fused_adamw_)[0].kernels
    many = optimize(2, elements=10**8, fused=True).of(aten._fused_adamw_)[0].kernels
    assert (few, many) == (1, 10)


def test_an_empty_list_starts_no_kernel():
    assert cost_of(aten._foreach_add_.Scalar, ([], 1), {}, None) is None


# --- what follows for a step


SIZES = {"layers": 6, "width": 512, "vocab": 200}


@pytest.fixture(scope="module")
def steps() -> dict[str, Recorder]:
    """Passes of one model that is large enough for arithmetic to matter."""
    big = {"batch": 256, "length": 64, **SIZES}
    return {
        "fp32": record(lambda: train_gpt2(**big)),
        "bf16": record(lambda: train_gpt2(dtype=torch.bfloat16, **big)),
        "checkpointed": record(lambda: train_gpt2(reentrant=True, **big)),
        "checkpointed, stopping early": record(lambda: train_gpt2(reentrant=False, **big)),
        "half batch": record(lambda: train_gpt2(**{**big, "batch": 128})),
        "one row": record(lambda: train_gpt2(**{**big, "batch": 1})),
        "two rows": record(lambda: train_gpt2(**{**big, "batch": 2})),
    }


@pytest.mark.parametrize("gpu", ["t4", "v100-16", "rtx-3090", "a100-80", "h100-80"])
def test_bf16_and_tf32_are_faster_than_fp32(steps, gpu):
    fp32, bf16 = steps["fp32"].step_seconds(gpu), steps["bf16"].step_seconds(gpu)
    assert bf16 < fp32 / 1.5
    tf32 = steps["fp32"].step_seconds(gpu, tf32=True)
    if find_gpu(gpu).tf32_flops in (None, find_gpu(gpu).fp32_flops):
        assert tf32 == fp32
    else:
        assert bf16 < tf32 < fp32


def test_checkpointing_computes_the_forward_pass_again(steps):
    plain, again = steps["fp32"], steps["checkpointed"]
    assert again.flops / plain.flops == pytest.approx(4 / 3, rel=0.03)
    assert again.step_seconds("rtx-3090") / plain.step_seconds("rtx-3090") == pytest.approx(4 / 3, rel=0.05)
    # Without reentrance it stops at the last tensor that backward needs: the last product of a layer is a third of it.
    early = steps["checkpointed, stopping early"]
    assert early.flops / plain.flops == pytest.approx(1 + 2 / 9, rel=0.03)


def test_more_rows_are_free_until_the_device_is_busy(steps):
    gpu = "a100-80"
    rows_per_second = {
        name: rows / steps[name].step_seconds(gpu)
        for name, rows in (("one row", 1), ("two rows", 2), ("half batch", 128), ("fp32", 256))
    }
    assert rows_per_second["two rows"] == pytest.approx(2 * rows_per_second["one row"], rel=0.05)
    assert rows_per_second["two rows"] < rows_per_second["half batch"] <= rows_per_second["fp32"]
    assert rows_per_second["fp32"] < 1.3 * rows_per_second["half batch"]


def test_a_call_costs_microseconds(steps):
    calls = sum(recorder.calls for recorder in steps.values())
    seconds = sum(recorder.seconds for recorder in steps.values())
    assert calls > 3000
    assert seconds / calls < 40e-6  # 3e-6 on an idle core; a shared one is slower
