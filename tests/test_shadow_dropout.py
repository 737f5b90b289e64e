"""CUDA's dropout over fake CPU tensors keeps one byte per element, and nothing else changes."""

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from storage_ledger import fake_ledger
from torch import nn

from autofit.harness.shadow.semantics.dropout import cuda_dropout

ROWS, WIDTH = 64, 128
ELEMENTS = ROWS * WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.1), nn.Dropout(0.1), lambda x: torch.dropout(x, 0.1, True)])
def test_forward_keeps_output_and_a_byte_per_element_and_backward_makes_one_gradient(drop, dtype):
    with cuda_dropout(), fake_ledger() as ledger:
        x = torch.empty(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        before = ledger.live
        out = drop(x)
        assert ledger.live - before == ELEMENTS * dtype.itemsize + ELEMENTS
        ledger.forget()
        (grad,) = torch.autograd.grad(out, x, torch.empty_like(out))
        assert ledger.sizes("native_dropout_backward") == [ELEMENTS * dtype.itemsize]
        assert [name for name, _ in ledger.made] == ["empty_like", "native_dropout_backward"]
        assert grad.shape == x.shape


def test_the_cpu_keeps_noise_as_wide_as_the_input():
    """What the overlay is there to change: were this no longer so, it would not be needed."""
    with fake_ledger() as ledger:
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        before = ledger.live
        out = F.dropout(x, 0.1)
        assert ledger.live - before == 2 * ELEMENTS * 4
        assert out.shape == x.shape


def test_no_gradient_needed_takes_the_fused_kernel_all_the_same():
    with cuda_dropout(), fake_ledger() as ledger:
        out = F.dropout(torch.empty(ROWS, WIDTH), 0.5)
        assert ledger.sizes("native_dropout") == [ELEMENTS * 4, ELEMENTS]
        assert not out.requires_grad
        assert ledger.live == ELEMENTS * 4  # the input and the mask are gone


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (1.0, False)])
def test_nothing_to_drop_returns_the_input_itself(p, training):
    with cuda_dropout(), fake_ledger() as ledger:
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        ledger.forget()
        assert F.dropout(x, p, training).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert ledger.made == []


def test_dropping_everything_multiplies_by_a_zero_and_keeps_no_mask():
    with cuda_dropout(), fake_ledger() as ledger:
        x = torch.empty(ROWS, WIDTH, requires_grad=True)
        ledger.forget()
        F.dropout(x, 1.0)
        assert [size for _, size in ledger.made if size > 16] == [ELEMENTS * 4]
        assert "native_dropout" not in ledger.calls


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: F.dropout2d(x[None, None], 0.5),
    ],
)
def test_kinds_without_a_fused_kernel_are_as_on_the_cpu(drop):
    def run():
        with fake_ledger() as ledger:
            drop(torch.empty(ROWS, WIDTH, requires_grad=True) * 2)
            return ledger.made, ledger.calls

    plain = run()
    with cuda_dropout():
        assert run() == plain
    assert "bernoulli_" in plain[1]


def test_an_empty_tensor_passes_through():
    with cuda_dropout(), fake_ledger() as ledger:
        F.dropout(torch.empty(0, 3, requires_grad=True), 0.5)
        assert "native_dropout" not in ledger.calls


def test_real_tensors_are_dropped_and_scaled():
    x = torch.arange(1.0, 1001.0, requires_grad=True)
    with cuda_dropout():
        out = F.dropout(x, 0.25)
        assert torch.equal(F.dropout(x, 0.0), x)
    kept = out != 0
    assert 650 < int(kept.sum()) < 850
    torch.testing.assert_close(out[kept], x[kept] / 0.75)
    out.sum().backward()
    torch.testing.assert_close(x.grad, kept / 0.75)


def test_probabilities_outside_zero_to_one_raise_as_ever():
    with cuda_dropout(), pytest.raises(RuntimeError, match="probability"):
        torch.dropout(torch.ones(3), 1.5, True)


def test_leaving_restores_the_cpu_bit_by_bit():
    def run():
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 1000, requires_grad=True)
        out = F.dropout(x, 0.3)
        out.sum().backward()
        return torch.cat([out.detach(), x.grad])

    before = run()
    with ExitStack() as stack:
        stack.enter_context(cuda_dropout())
        assert "native_dropout" in _calls_of_fake_dropout()
    assert torch.equal(run(), before)
    assert "bernoulli_" in _calls_of_fake_dropout()


def _calls_of_fake_dropout():
    with fake_ledger() as ledger:
        F.dropout(torch.empty(8), 0.5)
        return ledger.calls


def test_a_bert_keeps_a_byte_per_dropped_element():
    from transformers import BertConfig, BertForMaskedLM

    batch, length, hidden, heads, layers = 2, 16, 32, 4, 2
    config = BertConfig(
        vocab_size=64,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=64,
        max_position_embeddings=length,
        attn_implementation="eager",
    )
    with cuda_dropout(), fake_ledger() as ledger:
        model = BertForMaskedLM(config).train()
        tokens = torch.zeros(batch, length, dtype=torch.long)
        ledger.forget()
        loss = model(input_ids=tokens, labels=tokens).loss
        hidden_elements, attention_elements = batch * length * hidden, batch * heads * length * length
        masks = [hidden_elements] + layers * [attention_elements, hidden_elements, hidden_elements]
        assert ledger.sizes("native_dropout") == [size for n in masks for size in (4 * n, n)]
        loss.backward()
        assert sorted(ledger.sizes("native_dropout_backward")) == sorted(4 * n for n in masks)
