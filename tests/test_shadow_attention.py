"""Which attention kernel a CUDA device would take, and what it and the code around it allocate."""

import math

import pytest
import torch
import torch.nn.functional as F
from storage_ledger import fake_ledger
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.harness.shadow.semantics.attention import cuda_attention
from autofit.harness.shadow.semantics.dropout import cuda_dropout

B, H, S, D = 2, 4, 17, 64  # a length that is no multiple of 8
A100, RTX3090, L4, H100, B200, RTX5090, T4, V100 = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (7, 5), (7, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_softmax": "math",
}


def make_qkv(dtype=BF16, dim=D, key_heads=H, value_dim=None, length=S, key_length=None, requires_grad=True):
    """Projections as models make them: (batch, length, heads, dim), with length and heads swapped."""

    def make(heads, rows, width):
        return torch.empty(B, rows, heads, width, dtype=dtype, requires_grad=requires_grad).transpose(1, 2)

    rows = key_length or length
    return make(H, length, dim), make(key_heads, rows, dim), make(key_heads, rows, value_dim or dim)


def kernel_of(capability, mask=None, run=None, qkv=None, **options):
    with cuda_attention(capability), fake_ledger() as ledger:
        if mask is not None:
            options["attn_mask"] = mask()
        F.scaled_dot_product_attention(*make_qkv(**(qkv or {})), **options)
        (kernel,) = {KERNELS[call] for call in ledger.calls if call in KERNELS}
        return kernel


def boolean_mask():
    return torch.ones(B, 1, S, S, dtype=torch.bool)


@pytest.mark.parametrize(
    ("capability", "case", "kernel"),
    [
        (A100, {}, "flash"),
        (A100, {"is_causal": True, "dropout_p": 0.1}, "flash"),
        (RTX5090, {}, "flash"),
        (T4, {"qkv": {"dtype": FP16}}, "efficient"),
        (V100, {"qkv": {"dtype": FP16}}, "efficient"),
        (T4, {"qkv": {"dtype": BF16}}, "math"),
        ((13, 0), {}, "math"),
        ((4, 0), {"qkv": {"dtype": FP32}}, "math"),
        # fp32
        (A100, {"qkv": {"dtype": FP32}}, "efficient"),
        (A100, {"qkv": {"dtype": FP32, "dim": 30}}, "math"),
        (V100, {"qkv": {"dtype": FP32, "dim": 30}}, "efficient"),
        (A100, {"qkv": {"dtype": torch.float64}}, "math"),
        # masks
        (A100, {"mask": boolean_mask}, "efficient"),
        (H100, {"mask": boolean_mask}, "cudnn"),
        (H100, {"mask": boolean_mask, "dropout_p": 0.1}, "efficient"),
        (H100, {"mask": boolean_mask, "dropout_p": 0.125}, "cudnn"),
        (H100, {"mask": lambda: torch.empty(S, S, dtype=BF16, requires_grad=True)}, "efficient"),
        (A100, {"mask": lambda: torch.ones(B, 1, S, 1, dtype=torch.bool).expand(B, 1, S, S)}, "math"),
        # cuDNN comes first on 9.x and 10.x alone
        (H100, {}, "cudnn"),
        (B200, {}, "cudnn"),
        (H100, {"dropout_p": 0.1}, "flash"),
        (H100, {"qkv": {"dim": 256}}, "flash"),
        (H100, {"qkv": {"dim": 60}}, "flash"),
        # head dimensions
        (A100, {"qkv": {"dim": 264}}, "efficient"),
        (A100, {"qkv": {"dim": 60}}, "flash"),
        (A100, {"mask": boolean_mask, "qkv": {"dim": 60}}, "math"),
        (A100, {"qkv": {"dim": 192, "value_dim": 128}}, "efficient"),
        (H100, {"qkv": {"dim": 192, "value_dim": 128}}, "cudnn"),
        (RTX3090, {"qkv": {"dim": 200}}, "efficient"),
        (RTX3090, {"qkv": {"dim": 200, "requires_grad": False}}, "flash"),
        (RTX3090, {"qkv": {"dim": 256}}, "flash"),
        (RTX3090, {"qkv": {"dim": 256}, "dropout_p": 0.1}, "efficient"),
        (L4, {"qkv": {"dim": 224}}, "efficient"),
        (RTX5090, {"qkv": {"dim": 224}}, "efficient"),
        (A100, {"qkv": {"dim": 224}}, "flash"),
        # grouped queries
        (A100, {"enable_gqa": True, "qkv": {"key_heads": 2}}, "flash"),
        (A100, {"enable_gqa": True, "qkv": {"key_heads": 2, "dtype": FP32}}, "math"),
        (A100, {"enable_gqa": True, "qkv": {"key_heads": 2}, "mask": boolean_mask}, "math"),
        (H100, {"enable_gqa": True, "qkv": {"key_heads": 2}, "mask": boolean_mask}, "cudnn"),
        # lengths
        (A100, {"is_causal": True, "qkv": {"key_length": 24}}, "efficient"),
        (A100, {"qkv": {"key_length": 24}}, "flash"),
        (H100, {"qkv": {"key_length": 1}}, "flash"),
    ],
)
def test_each_call_takes_the_kernel_of_the_card(capability, case, kernel):
    assert kernel_of(capability, **case) == kernel


def test_flags_and_priorities_of_the_user_count():
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(A100) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert kernel_of(A100) == "efficient"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="8.0"):
        kernel_of(A100, mask=boolean_mask)
    assert kernel_of(A100) == "flash"


def test_the_variable_that_puts_cudnn_last_is_heard(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernel_of(H100) == "flash"
    assert kernel_of(H100, mask=boolean_mask) == "efficient"


def attend(capability, mask=None, **case):
    """Bytes made forward and backward, without inputs: (op, bytes) of every storage of more than a scalar."""
    qkv = case.pop("qkv", {})
    with cuda_attention(capability), cuda_dropout(), fake_ledger() as ledger:
        inputs = make_qkv(**qkv)
        if mask is not None:
            case["attn_mask"] = mask()
        ledger.forget()
        out = F.scaled_dot_product_attention(*inputs, **case)
        forward = [(op, size) for op, size in ledger.made if size > 16]
        grad = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
        ledger.forget()
        torch.autograd.grad(out, inputs, grad)
        return out, forward, [(op, size) for op, size in ledger.made if size > 16]


def test_flash_keeps_its_output_and_one_fp32_number_per_row():
    out, forward, backward = attend(A100, is_causal=True, dropout_p=0.1)
    op = "_scaled_dot_product_flash_attention"
    assert forward == [(op, B * H * S * D * 2), (op, B * H * S * 4)]
    assert backward == [(op + "_backward", B * H * S * D * 2)] * 3
    assert out.transpose(1, 2).is_contiguous()


def test_flash_with_grouped_queries_copies_no_keys():
    _, forward, backward = attend(A100, enable_gqa=True, qkv={"key_heads": 2})
    op = "_scaled_dot_product_flash_attention"
    assert forward == [(op, B * H * S * D * 2), (op, B * H * S * 4)]
    assert [size for _, size in backward] == [B * H * S * D * 2, B * 2 * S * D * 2, B * 2 * S * D * 2]


def test_flash_pads_head_dimensions_to_eights_and_slices_the_output():
    out, forward, backward = attend(A100, qkv={"dim": 60})
    op = "_scaled_dot_product_flash_attention"
    padded = B * H * S * 64 * 2
    assert forward == [("constant_pad_nd", padded)] * 3 + [(op, padded), (op, B * H * S * 4)]
    assert out.shape[-1] == 60
    assert out.untyped_storage().nbytes() == padded
    assert backward == [
        ("slice_backward", padded),
        *[(op + "_backward", padded)] * 3,
        *[("constant_pad_nd", B * H * S * 60 * 2)] * 3,
    ]


def test_a_boolean_mask_is_negated_converted_and_widened_for_the_efficient_kernel():
    op = "_scaled_dot_product_efficient_attention"
    out, forward, backward = attend(A100, mask=boolean_mask)
    assert forward == [
        ("logical_not", B * S * S),
        ("where", B * S * S * 2),
        ("constant_pad_nd", B * S * 24 * 2),
        (op, B * H * S * D * 2),
        (op, B * H * 32 * 4),  # rows to the next multiple of 32
    ]
    assert backward == [(op + "_backward", B * H * S * D * 2)] * 3
    assert out.transpose(1, 2).is_contiguous()


def test_an_aligned_mask_is_not_copied_again():
    _, forward, _ = attend(A100, mask=lambda: torch.ones(B, 1, 16, 16, dtype=torch.bool), qkv={"length": 16})
    assert [op for op, _ in forward[:3]] == ["logical_not", "where", "_scaled_dot_product_efficient_attention"]


def test_a_mask_of_eights_whose_rows_are_not_aligned_grows_by_eight():
    _, forward, _ = attend(A100, mask=lambda: torch.empty(B, 1, 16, 20, dtype=BF16)[..., :16], qkv={"length": 16})
    assert forward[0] == ("constant_pad_nd", B * 16 * 24 * 2)


def test_a_learned_additive_mask_gets_a_gradient_for_every_head():
    with cuda_attention(A100), fake_ledger() as ledger:
        inputs = make_qkv(FP32, length=16)
        bias = torch.empty(1, H, 16, 16, requires_grad=True)
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
        ledger.forget()
        torch.autograd.grad(out, bias, torch.empty_like(out))
        made = ledger.sizes("_scaled_dot_product_efficient_attention_backward")
        assert made == [B * H * 16 * D * 4] * 3 + [B * H * 16 * 16 * 4]


def test_cudnn_converts_the_mask_without_widening_it():
    _, forward, backward = attend(H100, mask=boolean_mask)
    op = "_scaled_dot_product_cudnn_attention"
    assert forward == [
        ("logical_not", B * S * S),
        ("where", B * S * S * 2),
        (op, B * H * S * D * 2),
        (op, B * H * S * 4),
    ]
    assert backward == [(op + "_backward", B * H * S * D * 2)] * 3


@pytest.mark.parametrize("without", [torch.no_grad, None])
def test_the_efficient_kernel_keeps_row_sums_for_gradients_only(without):
    with cuda_attention(A100), fake_ledger() as ledger:
        inputs = make_qkv(FP32, requires_grad=without is not None)
        with without() if without else torch.enable_grad():
            F.scaled_dot_product_attention(*inputs)
        assert ledger.sizes("_scaled_dot_product_efficient_attention") == [B * H * S * D * 4]


def test_math_in_half_precision_works_in_fp32_and_keeps_matrix_and_mask():
    _, forward, backward = attend(T4, dropout_p=0.1, is_causal=True)
    wide, matrix = B * H * S * D * 4, B * H * S * S * 4
    assert forward == [
        *[("_to_copy", wide)] * 3,
        ("mul", wide),  # the scaled query
        ("ones", S * S),
        ("tril", S * S),
        ("logical_not", S * S),
        ("where", S * S * 4),
        ("mul", wide),  # the scaled key
        *[("clone", wide)] * 2,  # both made contiguous for the product
        ("bmm", matrix),
        ("_softmax", matrix),
        ("eq", matrix // 4),
        ("all", B * H * S),
        ("where", matrix),
        ("native_dropout", matrix),
        ("native_dropout", matrix // 4),
        ("clone", wide),
        ("bmm", wide),
        ("_to_copy", wide // 2),
        ("_to_copy", matrix // 2),
    ]
    assert ("native_dropout_backward", matrix) in backward
    assert ("_softmax_backward_data", matrix) in backward


def test_math_keeps_one_fp32_matrix_for_backward_without_dropout():
    with cuda_attention(T4), fake_ledger() as ledger:
        inputs = make_qkv(FP32, dim=D, key_heads=H)
        with sdpa_kernel(SDPBackend.MATH):
            before = ledger.live
            out = F.scaled_dot_product_attention(*inputs)
        wide, matrix = B * H * S * D * 4, B * H * S * S * 4
        # The product saves contiguous query, key and value, softmax and product share the matrix, and the output is new.
        assert ledger.live - before == 3 * wide + matrix + wide
        assert out.shape == (B, H, S, D)


def test_math_repeats_grouped_keys_and_values():
    _, forward, _ = attend(A100, enable_gqa=True, qkv={"key_heads": 2, "dtype": FP32})
    assert forward.count(("clone", B * H * S * D * 4)) >= 2
    assert ("bmm", B * H * S * S * 4) in forward


def test_math_gives_the_numbers_of_torch():
    """The steps written out here, run on real numbers, against the operator itself."""
    from autofit.harness.shadow.semantics import attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(B, h, S, D, requires_grad=True) for h in (H, 2, 2))
    mask = torch.rand(B, 1, S, S) > 0.3
    mask[0, 0, 3] = False  # a row that sees nothing
    for options in ({"attn_mask": mask}, {"is_causal": True}, {"scale": -0.3}):
        call = attention._Call(
            query,
            key,
            value,
            options.get("attn_mask"),
            0.0,
            options.get("is_causal", False),
            options.get("scale"),
            True,
        )
        ours = attention._run_math(call)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
        grads = [torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (ours, theirs)]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-3)


def test_real_tensors_keep_the_cpu_kernel_inside_and_after():
    def run():
        torch.manual_seed(0)
        inputs = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return torch.cat([out.detach().flatten(), *(g.flatten() for g in torch.autograd.grad(out.sum(), inputs))])

    before = run()
    with cuda_attention(A100):
        assert torch.equal(run(), before)
    assert torch.equal(run(), before)
    with fake_ledger() as ledger:
        F.scaled_dot_product_attention(*make_qkv())
        assert not {call for call in ledger.calls if call in list(KERNELS)[:3]}


def test_multi_head_attention_of_torch_goes_the_same_way():
    with cuda_attention(A100), fake_ledger() as ledger:
        layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=BF16)
        x = torch.empty(B, 8, 32, dtype=BF16)
        out, _ = layer(x, x, x, need_weights=False)
        out.sum().backward()
        assert "_scaled_dot_product_flash_attention_backward" in ledger.calls


def test_scale_of_padded_heads_is_that_of_the_true_width():
    seen = []
    with cuda_attention(A100), fake_ledger():
        library = torch.library.Library("aten", "IMPL")

        def spy(*args, scale=None):
            seen.append(scale)
            raise InterruptedError

        library.impl("_scaled_dot_product_flash_attention", spy, "AutogradCPU")
        try:
            with pytest.raises(InterruptedError):
                F.scaled_dot_product_attention(*make_qkv(dim=60))
        finally:
            library._destroy()
    assert seen == [pytest.approx(1 / math.sqrt(60))]


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [(A100, BF16, "flash"), (H100, BF16, "cudnn"), (A100, FP32, "math"), (T4, BF16, "math")],
)
def test_a_small_llama_runs_forward_and_backward(capability, dtype, kernel):
    """Unmasked grouped queries in fp32 leave every fused kernel of torch 2.13: transformers asks for enable_gqa."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from autofit.harness.shadow.semantics.masks import skipped_masks

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    with cuda_attention(capability), cuda_dropout(), skipped_masks(), fake_ledger() as ledger:
        model = LlamaForCausalLM._from_config(config, dtype=dtype).train()
        tokens = torch.zeros(2, 16, dtype=torch.long)
        ledger.forget()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        op = next(op for op, name in KERNELS.items() if name == kernel)
        assert ledger.calls.count(op) == 2
        assert {KERNELS[call] for call in ledger.calls if call in KERNELS} == {kernel}
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_kernel_under_all_overlays_at_once(reentrant):
    from contextlib import ExitStack

    from transformers import LlamaConfig, LlamaForCausalLM

    from autofit.harness.shadow.semantics.autocast import cuda_autocast
    from autofit.harness.shadow.semantics.masks import remember_full, skipped_masks

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    overlays = (cuda_dropout(), cuda_attention(A100), cuda_autocast(), skipped_masks())
    with ExitStack() as stack:
        for overlay in overlays:
            stack.enter_context(overlay)
        ledger = stack.enter_context(fake_ledger())
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        tokens, mask = torch.zeros(2, 16, dtype=torch.long), torch.empty(2, 16, dtype=torch.long)
        remember_full(mask, True)
        with torch.autocast("cpu", dtype=BF16):
            loss = model(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
        loss.backward()
        op = "_scaled_dot_product_flash_attention"
        assert ledger.calls.count(op) == 4
        assert ledger.calls.count(op + "_backward") == 2
