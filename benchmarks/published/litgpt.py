"""LoRA fine-tuning with LitGPT (`finetune/lora.py` of October 2023), as far as it shows in memory.

    python -m published.litgpt '{"model": "Llama-2-7b", "batch": 1, "seq_len": 1304, "capability": [8, 0]}' TRACE

What shows, and where it is seen in that version:

    the longest row comes first, so the peak is that of the first micro-batch, before there are gradients or states
                                                                                    finetune/lora.py, get_batch
    one projection for q, k and v; its adapter feeds q and v, laid out with zeros for k by an indexed copy     lora.py
    the rotary tables are made anew for the longest row, outside of the bf16 context: fp32, and so are its products,
    until the result is cast back                                                   model.py, max_seq_length, apply_rope
    RMSNorm in plain operators of fp32                                              rmsnorm.py
    logits come in chunks of 128 tokens, all cast to fp32 where they leave the model, by Fabric
                                                        lightning/fabric/plugins/precision/half.py, convert_output
    the loss is taken chunk by chunk; a name in the loop keeps the fp32 logits through the backward pass

The page names commit 8641822 of 16 October, whose RMSNorm stays in bf16; 6178c7c of the 24th, three days before the page
was merged, has it in fp32 and is otherwise the same. With the former LLaMA comes out 3.2 % below what was measured: two
tensors of bf16 for each layer. `wide_norm` tells which; the latter is taken, seen after the first prediction, and the other
reading is told with the results.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published._bare import BareRun, read_options

RANK, DROPOUT = 8, 0.05
CHUNK = 128  # tokens


@dataclass(frozen=True)
class Sizes:
    vocabulary: int  # padded
    layers: int
    heads: int
    width: int
    hidden: int  # of the feed-forward part
    rotary: float  # share of a head
    parallel: bool  # attention and feed-forward of one layer side by side
    shared_norm: bool  # one norm before both
    gated: bool  # SwiGLU with RMSNorm, without biases; else GELU with LayerNorm and biases
    head_bias: bool
    groups: int | None = None  # of queries that share a key; None: as many as heads
    gelu: str = "none"


# From the models' public configurations; vocabularies as LitGPT pads them. By what a name begins with, signs left out.
MODELS = {
    "phi15": Sizes(51200, 24, 32, 2048, 8192, 0.5, True, True, False, True, gelu="tanh"),
    "stablelm": Sizes(50688, 16, 32, 4096, 16384, 0.25, True, False, False, False),
    "llama27b": Sizes(32000, 32, 32, 4096, 11008, 1.0, False, False, True, False),
    "llama213b": Sizes(32000, 40, 40, 5120, 13824, 1.0, False, False, True, False),
}


def find_sizes(name: str) -> Sizes:
    plain = "".join(sign for sign in name.lower() if sign.isalnum())
    return next(sizes for start, sizes in MODELS.items() if plain.startswith(start))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.wide = True  # in fp32

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.wide else x
        mean = torch.mean(wide * wide, dim=-1, keepdim=True)
        normed = wide * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(x.dtype)


class AdaptedProjection(nn.Module):
    """The fused projection with adapters of queries and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        groups = sizes.groups or sizes.heads
        keys = sizes.width // sizes.heads * groups
        self.groups, self.out_width = groups, sizes.width + 2 * keys
        self.equal = groups == sizes.heads
        self.parts = [sizes.width, keys]
        self.linear = nn.Linear(sizes.width, self.out_width, bias=not sizes.gated)
        self.lora_A = nn.Parameter(torch.zeros(2 * RANK, sizes.width))
        self.lora_B = nn.Parameter(torch.zeros(sum(self.parts), RANK))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_BTC: Tensor) -> Tensor:
        pretrained = self.linear(x_BTC)
        low = F.linear(self.dropout(x_BTC), self.lora_A)
        high = self._grow(low.transpose(-2, -1), self.lora_B.unsqueeze(-1)).transpose(-2, -1)
        return pretrained + self._place(high) * 2.0

    def _grow(self, low: Tensor, weight: Tensor) -> Tensor:
        if self.equal:
            return F.conv1d(low, weight, groups=2)
        pairs = zip(low.chunk(2, dim=1), weight.split(self.parts), strict=True)
        return torch.cat([F.conv1d(part, own) for part, own in pairs], dim=1)

    def _place(self, high_BTC: Tensor) -> Tensor:
        """Zeros where the keys are."""
        swapped = high_BTC.transpose(0, 1)
        flat = swapped.new_zeros(swapped.shape[0] * swapped.shape[1], self.out_width)
        columns = torch.zeros(sum(self.parts), dtype=torch.long, device=swapped.device)
        placed = flat.index_copy(1, columns, swapped.reshape(-1, sum(self.parts)))
        return placed.view(*swapped.shape[:2], self.out_width).transpose(0, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = torch.cat((-second, first), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.head = sizes.heads, sizes.width // sizes.heads
        self.rotary = int(sizes.rotary * self.head)
        self.attn = AdaptedProjection(sizes)
        self.proj = nn.Linear(sizes.width, sizes.width, bias=not sizes.gated)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        groups = self.attn.groups
        share = self.heads // groups
        qkv = self.attn(x_BTC).view(B, T, groups, share + 2, self.head).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((share, 1, 1), dim=2)
        if groups != 1:
            k, v = (part.expand(B, groups, share, T, self.head) for part in (k, v))
        q, k, v = (part.reshape(B, -1, T, self.head) for part in (q, k, v))
        n = self.rotary
        q_turned = rotate(q[..., :n], cos, sin)
        k_turned = rotate(k[..., :n], cos, sin)
        q = torch.cat((q_turned, q[..., n:]), dim=-1)
        k = torch.cat((k_turned, k[..., n:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(B, T, C))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gated, self.gelu = sizes.gated, sizes.gelu
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=not sizes.gated)
        self.side = nn.Linear(sizes.width, sizes.hidden, bias=False) if sizes.gated else None
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=not sizes.gated)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate=self.gelu))
        up, side = self.up(x), self.side(x)
        return self.down(F.silu(up) * side)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm = RMSNorm if sizes.gated else nn.LayerNorm
        self.parallel = sizes.parallel
        self.norm_1, self.attn = norm(sizes.width), Attention(sizes)
        self.norm_2 = None if sizes.shared_norm else norm(sizes.width)
        self.mlp = FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        if self.parallel:
            return x + attended + self.mlp(normed if self.norm_2 is None else self.norm_2(x))
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, sizes: Sizes, longest: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=sizes.head_bias)
        self.wte = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        norm = RMSNorm if sizes.gated else nn.LayerNorm
        self.ln_f = norm(sizes.width)
        rotary = int(sizes.rotary * (sizes.width // sizes.heads))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(longest, rotary, dtype=torch.float32), persistent=False)

    def forward(self, tokens_BT: Tensor) -> list[Tensor]:
        T = tokens_BT.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        x = self.wte(tokens_BT)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.ln_f(x)
        return [self.lm_head(part) for part in x.split(CHUNK, dim=1)]


def make_model(sizes: Sizes, longest: int, wide_norm: bool) -> Model:
    torch.set_default_dtype(torch.bfloat16)
    model = Model(sizes, longest)
    torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.wide = wide_norm
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "lora_" in name
    return model


def chunked_loss(logits: list[Tensor], targets_BT: Tensor) -> Tensor:
    flat = [part.reshape(-1, part.shape[-1]) for part in logits]
    targets = [part.reshape(-1) for part in targets_BT.split(logits[0].shape[1], dim=1)]
    losses = [F.cross_entropy(part, own, reduction="none") for part, own in zip(flat, targets, strict=True)]
    return torch.cat(losses).mean()


def main(options: dict[str, Any], trace_file: str) -> None:
    run = BareRun(tuple(options["capability"]))
    sizes = find_sizes(options["model"])
    model = run.make(lambda: make_model(sizes, options["seq_len"], options["wide_norm"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    shape = options["batch"], options["seq_len"]
    with run.run(model, trace_file):
        tokens, targets = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        logits = model(tokens)
        logits = [part.to(torch.float32) for part in logits]
        logits[-1] = logits[-1][..., :-1, :]
        loss = chunked_loss(logits, targets[..., 1:])
        run.backward(loss / 128)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(read_options(), sys.argv[2])
