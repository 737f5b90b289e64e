"""`torch.autocast("cpu")` under CUDA's operator lists: what is cast, what it costs, and that the CPU gets its own back."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from storage_ledger import fake_ledger

from autofit.harness.shadow.semantics import autocast
from autofit.harness.shadow.semantics.autocast import cuda_autocast, find_overload
from autofit.harness.shadow.semantics.dropout import cuda_dropout

ROWS, WIDTH = 32, 64
ELEMENTS = ROWS * WIDTH
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def under_autocast(dtype=BF16):
    return torch.autocast("cpu", dtype=dtype)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the lists are those of torch 2.13")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("AT_FORALL_FP32", autocast.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FP32_OUTPUT),
        ("AT_FORALL_PROMOTE", autocast.PROMOTE),
    ],
)
def test_the_lists_are_those_of_the_header_that_torch_ships(macro, ours):
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    block = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*\n)", header).group(1)
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", block)
    theirs = [f"{name}.{overload}" if overload else name for name, overload in entries]
    assert theirs == ours
    assert all(find_overload(name) is not None for name in ours)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda h, w: F.linear(h, w), None),
        (lambda h, w: h @ w, None),
        (lambda h, w: torch.einsum("ij,jk->ik", h.float(), w), None),
        (lambda h, w: torch.mv(w, w[0]), None),
        (lambda h, w: F.layer_norm(h, (WIDTH,)), FP32),
        (lambda h, w: F.rms_norm(h, (WIDTH,)), FP32),
        (lambda h, w: F.group_norm(h, 4), FP32),
        (lambda h, w: h.softmax(-1), FP32),
        (lambda h, w: h.log_softmax(-1), FP32),
        (lambda h, w: h.softmax(-1, dtype=h.dtype), None),
        (lambda h, w: F.softmax(h, -1), FP32),
        (lambda h, w: h.sum(), FP32),
        (lambda h, w: h.sum(-1), FP32),
        (lambda h, w: h.cumsum(-1), FP32),
        (lambda h, w: h.prod(), FP32),
        (lambda h, w: h.prod(1), FP32),
        (lambda h, w: torch.ops.aten.norm.Scalar(h), FP32),
        (lambda h, w: torch.ops.aten.norm.ScalarOpt_dim(h, 2, [1]), FP32),
        (lambda h, w: torch.linalg.vector_norm(h), FP32),
        (lambda h, w: h.pow(2), FP32),
        (lambda h, w: h.exp(), FP32),
        (lambda h, w: torch.rsqrt(h), FP32),
        (lambda h, w: F.mse_loss(h, h), FP32),
        (lambda h, w: F.binary_cross_entropy_with_logits(h, h), FP32),
        (lambda h, w: F.cross_entropy(h, torch.empty(ROWS, dtype=torch.long)), FP32),
        (lambda h, w: F.gelu(h), None),
        (lambda h, w: F.silu(h), None),
        (lambda h, w: h.mean(), None),
        (lambda h, w: torch.addcmul(h, h, h.float()), FP32),
        (lambda h, w: torch.addcmul(h, h, h), None),
        # On the CPU's lists and not on CUDA's: torch promotes by itself, and leaves a 16-bit input as it is.
        (lambda h, w: torch.cat([h, h]), None),
        (lambda h, w: torch.cat([h, h.float()]), FP32),
        (lambda h, w: F.pad(h[None], (1, 1), mode="reflect"), None),
        (lambda h, w: F.max_pool3d(h[None, None, None], (1, 2, 2)), None),
    ],
)
def test_each_operator_answers_in_the_dtype_of_cuda(run, expected, dtype):
    with cuda_autocast(), fake_ledger(), under_autocast(dtype):
        h = torch.empty(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.empty(WIDTH, WIDTH, requires_grad=True)
        assert run(h, weight).dtype == (expected or dtype)


@pytest.mark.parametrize(
    "run",
    [
        lambda h: F.layer_norm(h, (WIDTH,)).dtype == FP32,
        lambda h: h.softmax(-1).dtype == FP32,
        lambda h: F.max_pool3d(h[None, None, None], (1, 2, 2)).dtype == BF16,
    ],
)
def test_the_cpu_by_itself_has_other_lists(run):
    with fake_ledger(), under_autocast():
        assert not run(torch.empty(ROWS, WIDTH, dtype=BF16))


def test_outside_a_region_nothing_is_cast():
    with cuda_autocast(), fake_ledger():
        h = torch.empty(ROWS, WIDTH, dtype=BF16)
        assert F.layer_norm(h, (WIDTH,)).dtype == BF16
        assert h.softmax(-1).dtype == BF16
        assert h.sum().dtype == BF16


def test_disabled_regions_inside_stay_disabled():
    with cuda_autocast(), fake_ledger(), under_autocast(), torch.autocast("cpu", enabled=False):
        assert F.linear(torch.empty(ROWS, WIDTH), torch.empty(WIDTH, WIDTH)).dtype == FP32


def test_double_precision_is_never_cast():
    with cuda_autocast(), fake_ledger(), under_autocast():
        assert torch.empty(8, dtype=torch.float64).softmax(-1).dtype == torch.float64
        assert torch.empty(8, dtype=torch.float64).exp().dtype == torch.float64


def test_a_leaf_weight_is_cast_once_per_region():
    with cuda_autocast(), fake_ledger() as ledger:
        weight = torch.empty(WIDTH, WIDTH, requires_grad=True)
        x = torch.empty(ROWS, WIDTH, dtype=BF16)
        ledger.forget()
        with under_autocast():
            for _ in range(3):
                F.linear(x, weight)
            assert ledger.sizes("_to_copy") == [WIDTH * WIDTH * 2]
        with under_autocast():
            F.linear(x, weight)
        assert ledger.sizes("_to_copy") == [WIDTH * WIDTH * 2] * 2


def test_layer_norm_keeps_an_fp32_copy_of_its_input():
    with cuda_autocast(), fake_ledger() as ledger:
        x = torch.empty(ROWS, WIDTH, dtype=BF16, requires_grad=True)
        weight, bias = torch.empty(WIDTH, requires_grad=True), torch.empty(WIDTH, requires_grad=True)
        before = ledger.live
        with under_autocast():
            out = F.layer_norm(x, (WIDTH,), weight, bias)
        # The copy, the output, and mean and inverse deviation of each row.
        assert ledger.live - before == 2 * ELEMENTS * 4 + 2 * ROWS * 4
        ledger.forget()
        grads = torch.autograd.grad(out, (x, weight, bias), torch.empty_like(out))
        assert [g.dtype for g in grads] == [BF16, FP32, FP32]
        assert ledger.sizes("native_layer_norm_backward")[0] == ELEMENTS * 4
        assert ledger.sizes("_to_copy") == [ELEMENTS * 2]  # the cast is in the graph, and undone in it


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
@pytest.mark.parametrize("region", [True, False])
@pytest.mark.parametrize(("dtype", "is_fused"), [(FP16, True), (BF16, False)])
def test_softmax_to_fp32_copies_bf16_inputs_and_no_fp16_ones(dtype, is_fused, region, function):
    """In a region the output is asked for in fp32 by autocast, outside by the caller, as eager attention does."""
    with cuda_autocast(), fake_ledger() as ledger:
        x = torch.empty(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        before = ledger.live
        ledger.forget()
        if region:
            with under_autocast(dtype):
                out = function(x, -1)
        else:
            out = function(x, -1, dtype=FP32)
        assert ledger.live - before == ELEMENTS * 4, "the result alone is kept"
        assert ledger.peak - before == (1 if is_fused else 2) * ELEMENTS * 4
        ledger.forget()
        (grad,) = torch.autograd.grad(out, x, torch.empty_like(out))
        assert grad.dtype == dtype
        backward = [(op, size) for op, size in ledger.made if op != "empty_like"]
        name = f"_{function.__name__}_backward_data"
        expected = [(name, ELEMENTS * 2)] if is_fused else [(name, ELEMENTS * 4), ("_to_copy", ELEMENTS * 2)]
        assert backward == expected


def test_sum_to_fp32_copies_no_input():
    with cuda_autocast(), fake_ledger() as ledger, under_autocast():
        x = torch.empty(ROWS, WIDTH, dtype=BF16)
        ledger.forget()
        x.sum(-1)
        assert [(op, size) for op, size in ledger.made] == [("sum", ROWS * 4)]


def test_cuda_refuses_binary_cross_entropy():
    with cuda_autocast(), fake_ledger(), under_autocast(), pytest.raises(RuntimeError, match="with_logits"):
        F.binary_cross_entropy(torch.empty(4), torch.empty(4))


def test_real_numbers_are_right_inside():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with cuda_autocast(), under_autocast():
        h = F.linear(x, weight)
        out = F.layer_norm(h, (8,)).softmax(-1)
        half = F.softmax(x.to(FP16), -1, dtype=FP32)
    expected = F.layer_norm((x.to(BF16) @ weight.to(BF16).t()).float(), (8,)).softmax(-1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(half, F.softmax(x.to(FP16).float(), -1))
    out[:, 0].sum().backward()
    assert x.grad.dtype == weight.grad.dtype == FP32
    assert x.grad.abs().sum() > 0


def test_leaving_restores_the_cpu_bit_by_bit():
    def run():
        torch.manual_seed(0)
        x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with under_autocast():
            h = F.linear(x, weight)
            tensors = [
                F.layer_norm(h, (8,)),
                h.softmax(-1),
                F.softmax(h, -1, dtype=FP32),
                h.exp(),
                h.sum(),
                torch.cat([h, x]),
                F.mse_loss(h, x),
                F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
                F.pad(h[None], (1, 1), mode="reflect"),
                torch.einsum("ij,jk->ik", x, weight),
            ]
        sum(t.float().sum() for t in tensors).backward()
        return [t.detach() for t in tensors] + [x.grad, weight.grad]

    before, operators = run(), autocast.cpu_autocast_operators()
    with cuda_autocast():
        assert autocast.cpu_autocast_operators() != operators
    after = run()
    assert autocast.cpu_autocast_operators() == operators
    assert [t.dtype for t in after] == [t.dtype for t in before]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_small_models_train_in_a_region(family, attention):
    import transformers

    config = {
        "bert": lambda: transformers.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        ),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    }[family]()
    model_class = {"bert": transformers.BertForMaskedLM, "gpt2": transformers.GPT2LMHeadModel}[family]

    def run():
        with fake_ledger() as ledger:
            model = model_class._from_config(config, attn_implementation=attention).train()
            tokens = torch.zeros(2, 16, dtype=torch.long)
            before = ledger.live
            with under_autocast():
                loss = model(input_ids=tokens, labels=tokens).loss
            held = ledger.live - before
            loss.backward()
            assert all(p.grad is None or p.grad.dtype == FP32 for p in model.parameters())
            return held

    with cuda_dropout():
        cpu = run()
        with cuda_autocast():
            assert run() > cpu
