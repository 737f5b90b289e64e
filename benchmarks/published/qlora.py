"""LoRA on LLaMA 7B whose weights bitsandbytes holds in 4 or 8 bits: whether it gets through on a T4 (June 2023).

    python -m published.qlora '{"weights": "4bit", "batch": 1, "seq_len": 512, "checkpointing": false, …}' TRACE

Only a verdict is published, and not all of the setup. Assumed here: adapters of rank 64 on queries and values, as PEFT
chooses for LLaMA; everything that is not quantized in fp32, as PEFT prepares such models, and no autocast, so that the
residual stream is fp32; attention in plain operators. What the kernels hold, from bitsandbytes 0.39:

    4 bits     half a byte a weight, a float32 for each 64; the 16-bit weight exists during a product, and nothing of the
               input is kept (autograd/_functions.py, MatMul4Bit)
    8 bits     a byte a weight; the input is kept in 8 bits, and the 16-bit weight exists in backward (MatMul8bitLt)
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from published._bare import BareRun, read_options

RANK, BLOCK = 64, 64
ADAPTED = ("q_proj", "v_proj")
HALF = torch.bfloat16


class _Product(torch.autograd.Function):
    """x (.., in) times a quantized weight (out, in), in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "QuantizedLinear") -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        narrow = x.to(HALF)
        if layer.bits == 8:
            ctx.save_for_backward(torch.empty_like(narrow, dtype=torch.int8))
            out = narrow.new_empty(*x.shape[:-1], layer.out_width)
        else:
            ctx.save_for_backward()
            out = torch.nn.functional.linear(narrow, layer.widen())
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(grad.to(HALF), ctx.layer.widen()).to(grad.dtype), None


class QuantizedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, bits: int, adapted: bool) -> None:
        super().__init__()
        count = linear.weight.numel()
        self.bits, self.in_width, self.out_width = bits, linear.in_features, linear.out_features
        self.register_buffer("codes", torch.zeros(count * bits // 8, dtype=torch.uint8))
        scales = count // BLOCK if bits == 4 else self.out_width
        self.register_buffer("scales", torch.zeros(scales))
        self.lora_A = nn.Parameter(torch.zeros(RANK, self.in_width)) if adapted else None
        self.lora_B = nn.Parameter(torch.zeros(self.out_width, RANK)) if adapted else None

    def widen(self) -> Tensor:
        return torch.empty(self.out_width, self.in_width, dtype=HALF, device=self.codes.device)

    def forward(self, x: Tensor) -> Tensor:
        out = _Product.apply(x, self)
        if self.lora_A is None:
            return out
        dropped = torch.nn.functional.dropout(x, 0.1, self.training)
        return out + nn.functional.linear(nn.functional.linear(dropped, self.lora_A), self.lora_B) * 0.25


def make_model(options: dict[str, Any]) -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(attn_implementation="eager", use_cache=False))  # its defaults are LLaMA 7B
    for parameter in model.parameters():
        parameter.requires_grad = False
    bits = 8 if options["weights"] == "int8" else 4
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, QuantizedLinear(linear, bits, name in ADAPTED))
    if options["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model.train()


def main(options: dict[str, Any], trace_file: str) -> None:
    run = BareRun(tuple(options["capability"]))
    model = run.make(lambda: make_model(options))
    # PEFT has the embeddings' output require a gradient, for reentrant checkpointing and in general.
    model.get_input_embeddings().register_forward_hook(lambda module, given, out: out.requires_grad_(True))
    shape = options["batch"], options["seq_len"]
    with run.run(model, trace_file):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(2):
            for _ in range(2):  # more accumulation is the same
                tokens = torch.zeros(shape, dtype=torch.long)
                outputs = model(input_ids=tokens, labels=tokens)
                run.backward(outputs.loss / 4)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(read_options(), sys.argv[2])
