"""Whether transformers makes a mask for a fake batch as it would for the real one: none where nothing is padded."""

import gc
import importlib

import pytest
import torch
from storage_ledger import fake_ledger

from autofit.harness.shadow.semantics.attention import cuda_attention
from autofit.harness.shadow.semantics.masks import is_full, is_packed, remember_full, remember_packed, skipped_masks

B, S = 2, 16
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
FAMILIES = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT | {"num_key_value_heads": 2}),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "d_model": 32,
            "vocab_size": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        }
        | SPECIAL,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64} | SPECIAL,
    ),
}


def train(family, mask_is_full=None, attention="sdpa", position_ids_are_packed=None, skip=True):
    """Ledger of the forward pass, after a backward pass has run too; `None` gives the model no mask."""
    transformers = importlib.import_module("transformers")
    model_class, config_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**settings)
    overlays = [cuda_attention((8, 0)), *([skipped_masks()] if skip else [])]
    for overlay in overlays:
        overlay.__enter__()
    try:
        with fake_ledger() as ledger:
            model = getattr(transformers, model_class)._from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
            tokens = torch.zeros(B, S, dtype=torch.long)
            batch = {"input_ids": tokens, "labels": tokens}
            if mask_is_full is not None:
                batch["attention_mask"] = torch.empty(B, S, dtype=torch.long)
                remember_full(batch["attention_mask"], mask_is_full)
            if position_ids_are_packed is not None:
                batch["position_ids"] = torch.empty(B, S, dtype=torch.long)
                remember_packed(batch["position_ids"], position_ids_are_packed)
                batch["use_cache"] = False
            ledger.forget()
            loss = model.train()(**batch).loss
            made, calls = list(ledger.made), list(ledger.calls)
            loss.backward()
            ledger.made, ledger.calls = made, calls
            return ledger
    finally:
        for overlay in reversed(overlays):
            overlay.__exit__(None, None, None)


def kernels(ledger):
    return ledger.calls.count(FLASH), ledger.calls.count(EFFICIENT)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_an_unpadded_batch_goes_without_mask_and_a_padded_one_with(family):
    assert kernels(train(family, mask_is_full=None)) == (2, 0)
    assert kernels(train(family, mask_is_full=True)) == (2, 0)
    padded = train(family, mask_is_full=False)
    assert kernels(padded) == (0, 2)
    # Every layer negates and converts the mask by itself.
    assert padded.sizes("logical_not") == [B * S * S] * 2


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_without_the_overlay_a_full_mask_is_kept(family):
    assert kernels(train(family, mask_is_full=True, skip=False)) == (0, 2)


def test_a_padded_encoder_leaves_the_decoder_its_causal_kernel():
    """Two encoder layers and two crossings are masked; two decoder layers have no mask of their own."""
    assert kernels(train("bart", mask_is_full=True)) == (6, 0)
    assert kernels(train("bart", mask_is_full=False)) == (2, 4)


def test_the_position_bias_of_t5_is_a_mask_in_every_layer():
    assert kernels(train("t5", mask_is_full=True)) == kernels(train("t5", mask_is_full=False)) == (0, 6)


def test_eager_attention_adds_no_mask_to_a_full_bidirectional_batch():
    full, padded = (train("bert", mask_is_full=value, attention="eager") for value in (True, False))
    scores = B * 4 * S * S * 2
    assert padded.sizes("add").count(scores) == 2
    assert scores not in full.sizes("add")
    assert B * S * S * 2 in padded.sizes("where")
    assert B * S * S * 2 not in full.sizes("where")


def test_rows_of_several_sequences_need_a_mask():
    assert kernels(train("llama", position_ids_are_packed=False)) == (2, 0)
    assert kernels(train("llama", position_ids_are_packed=True)) == (0, 2)


def test_a_vision_model_has_no_mask_either_way():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **{k: v for k, v in TEXT.items() if k != "vocab_size"}, image_size=16, patch_size=4, attn_implementation="sdpa"
    )
    with cuda_attention((8, 0)), skipped_masks(), fake_ledger() as ledger:
        model = ViTForImageClassification._from_config(config, dtype=torch.bfloat16).train()
        images = torch.empty(B, 3, 16, 16, dtype=torch.bfloat16)
        model(pixel_values=images, labels=torch.zeros(B, dtype=torch.long)).loss.backward()
        assert kernels(ledger) == (2, 0)


def test_a_sliding_window_shorter_than_the_row_keeps_its_mask():
    from transformers import MistralConfig, MistralForCausalLM

    def run(window):
        config = MistralConfig(**TEXT, num_key_value_heads=4, sliding_window=window, attn_implementation="sdpa")
        with cuda_attention((8, 0)), skipped_masks(), fake_ledger() as ledger:
            model = MistralForCausalLM._from_config(config, dtype=torch.bfloat16).train()
            tokens = torch.zeros(B, S, dtype=torch.long)
            mask = torch.empty(B, S, dtype=torch.long)
            remember_full(mask, True)
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
            return kernels(ledger)

    assert run(64) == (2, 0)
    assert run(8) == (0, 2)


def test_layers_with_a_state_multiply_by_a_padded_mask_only():
    from transformers import Qwen3NextConfig
    from transformers.masking_utils import create_recurrent_attention_mask

    with skipped_masks(), fake_ledger():
        embeddings, mask = torch.empty(B, S, 8), torch.empty(B, S, dtype=torch.long)
        remember_full(mask, True)
        assert create_recurrent_attention_mask(Qwen3NextConfig(), embeddings, mask) is None
        remember_full(mask, False)
        assert create_recurrent_attention_mask(Qwen3NextConfig(), embeddings, mask) is not None


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask: bool(mask.all()),
        lambda mask: bool(torch.all(mask == 1)),
        lambda mask: bool(torch.all(mask)),
        lambda mask: bool(mask.to(torch.bool).all()),
        lambda mask: mask.bool().all().item(),
        lambda mask: bool(mask[:, :-1].all()),
        lambda mask: bool(mask.long().all()) and True,
    ],
)
def test_code_that_reads_a_mask_by_itself_gets_the_answer(ask):
    with skipped_masks(), fake_ledger():
        mask = torch.empty(B, S, dtype=torch.long)
        remember_full(mask, True)
        assert ask(mask) is True
        remember_full(mask, False)
        assert ask(mask) is False


def test_unknown_masks_are_full_unless_a_padded_one_of_their_shape_lives():
    with skipped_masks(), fake_ledger():
        padded = torch.empty(B, S, dtype=torch.long)
        remember_full(padded, False)
        assert not is_full(torch.empty(B, S))
        assert is_full(torch.empty(B, S + 1))
        assert is_full(torch.ones(B, S)), "ones are full by themselves"
        assert is_full(torch.ones(B, S, dtype=torch.long).to(torch.bool))
        assert not is_full(padded.to(torch.bool))
        assert not is_packed(torch.empty(B, S))
        del padded
        gc.collect()
        assert is_full(torch.empty(B, S))


def test_a_view_of_packed_positions_is_packed():
    with fake_ledger():
        positions = torch.empty(1, S, dtype=torch.long)
        remember_packed(positions, True)
        assert is_packed(positions.expand(B, -1))


def test_real_masks_are_read_inside_as_outside():
    from transformers import masking_utils

    def run():
        full, padded = torch.ones(B, S, dtype=torch.bool), torch.ones(B, S, dtype=torch.bool)
        padded[0, -1] = False
        return [
            masking_utils._ignore_causal_mask_sdpa(full, S, S, 0, 0),
            masking_utils._ignore_causal_mask_sdpa(padded, S, S, 0, 0),
            bool(masking_utils._ignore_bidirectional_mask_sdpa(padded, S)),
            bool(padded.all()),
            masking_utils.find_packed_sequence_indices(torch.arange(S)[None]) is None,
            masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])) is None,
        ]

    before = run()
    with skipped_masks():
        assert run() == before
    assert before == [True, False, False, False, True, False]


def test_leaving_restores_transformers():
    from transformers import masking_utils

    names = ["is_tracing", "fast_all", "find_packed_sequence_indices"]
    before = [getattr(masking_utils, name) for name in names]
    with pytest.raises(KeyError), skipped_masks():
        assert all(getattr(masking_utils, name) is not old for name, old in zip(names, before, strict=True))
        raise KeyError
    assert [getattr(masking_utils, name) for name in names] == before
    with fake_ledger():
        mask = torch.empty(B, S, dtype=torch.bool)
        assert masking_utils.is_tracing(mask)
        remember_full(mask, True)
        assert not bool(mask.all()), "the ledger answers, not the overlay"
