"""Full fine-tuning of Llama 3.2 3B with torchtune (`full_finetune_single_device.py` at 1814feb, November 2024, which brought
the table), as far as it shows in memory.

    python -m published.torchtune '{"batch": 2, "seq_len": 4096, "chunks": 0, …, "capability": [8, 0]}' TRACE

What shows, and where it is seen in that version:

    everything in bf16, states of the optimizer included                            recipes/full_finetune_single_device.py
    packed rows: position ids of (B, T), by which each layer takes its own rows of the fp32 rotary table, once for queries
    and once for keys; rotation in fp32                                             models/llama3_1/_position_embeddings.py
    keys and values are copied for each query head that shares them                 modules/attention.py
    FlexAttention with a block mask keeps what flash attention does: inputs, output, one fp32 number a query. The package has
    no shape function for it, so that flash stands in; the block mask itself is left out
    norms in fp32, the result cast before the weight, which is trained              modules/rms_norm.py
    AdamW in its fused form, which the page does not say; but its row without techniques, 25.5 GiB, is less than the five
    copies of the parameters that the form with lists takes, 29.9 GiB
    logits are cast to fp32 as a whole and dropped before the backward pass; in chunks they stay in bf16, and are cast chunk
    by chunk in the loss                                                            modules/transformer.py, modules/loss
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from published._bare import BareRun, read_options

VOCABULARY, LAYERS, WIDTH, HIDDEN = 128256, 28, 3072, 8192  # meta-llama/Llama-3.2-3B, config.json
HEADS, KEY_HEADS, HEAD = 24, 8, 128
POSITIONS = 131072


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def rotate(x_BTHD: Tensor, table: Tensor, positions_BT: Tensor) -> Tensor:
    rows = table[positions_BT]
    pairs = x_BTHD.float().reshape(*x_BTHD.shape[:-1], -1, 2)
    rows = rows.view(-1, pairs.shape[1], 1, pairs.shape[3], 2)
    turned = torch.stack(
        [
            pairs[..., 0] * rows[..., 0] - pairs[..., 1] * rows[..., 1],
            pairs[..., 1] * rows[..., 0] + pairs[..., 0] * rows[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x_BTHD)


class Layer(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table  # one for all layers, a buffer of the model
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.attention_norm, self.mlp_norm = Norm(), Norm()

    def attend(self, x_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q = rotate(self.q(x_BTC).view(B, T, HEADS, HEAD), self.table, positions_BT).transpose(1, 2)
        k = self.k(x_BTC)
        v = self.v(x_BTC)
        k = rotate(k.view(B, T, KEY_HEADS, HEAD), self.table, positions_BT).transpose(1, 2)
        v = v.view(B, T, KEY_HEADS, HEAD).transpose(1, 2)
        shape = B, KEY_HEADS, HEADS // KEY_HEADS, -1, HEAD
        k = k.unsqueeze(2).expand(shape).flatten(1, 2)
        v = v.unsqueeze(2).expand(shape).flatten(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, T, -1))

    def forward(self, x: Tensor, positions_BT: Tensor) -> Tensor:
        h = self.attend(self.attention_norm(x), positions_BT) + x
        normed = self.mlp_norm(h)
        gated = F.silu(self.gate(normed))
        gated = gated * self.up(normed)
        return h + self.down(gated)


class Model(nn.Module):
    def __init__(self, checkpointing: bool, chunks: int) -> None:
        super().__init__()
        self.checkpointing, self.chunks = checkpointing, chunks
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        table = torch.zeros(POSITIONS, HEAD // 2, 2, dtype=torch.float32)
        self.layers = nn.ModuleList(Layer(table) for _ in range(LAYERS))
        self.norm = Norm()
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor | list[Tensor]:
        h = self.embed(tokens)
        for layer in self.layers:
            h = checkpoint(layer, h, positions, use_reentrant=False) if self.checkpointing else layer(h, positions)
        h = self.norm(h)
        if self.chunks:
            return [F.linear(part, self.embed.weight) for part in h.chunk(self.chunks, dim=1)]
        return F.linear(h, self.embed.weight).float()


def make_model(options: dict[str, Any]) -> Model:
    torch.set_default_dtype(torch.bfloat16)
    model = Model(options["checkpointing"], options["chunks"])
    torch.set_default_dtype(torch.float32)
    return model


def loss_of(model: Model, batch: dict[str, Tensor], ignored: Tensor) -> Tensor:
    labels = batch["labels"]
    logits = model(batch["tokens"], batch["positions"])
    labels = torch.hstack((labels[..., 1:], ignored))
    if not model.chunks:
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
    parts = zip([part.reshape(-1, VOCABULARY) for part in logits], labels.chunk(model.chunks, dim=1), strict=True)
    return sum(F.cross_entropy(part.float(), own.reshape(-1), reduction="sum") for part, own in parts) / labels.numel()


def main(options: dict[str, Any], trace_file: str) -> None:
    run = BareRun(tuple(options["capability"]))
    model = run.make(lambda: make_model(options))
    shape = options["batch"], options["seq_len"]
    with run.run(model, trace_file):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
        ignored = torch.full((options["batch"], 1), -100)
        for _ in range(2):
            batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("tokens", "labels", "positions")}
            tokens = torch.tensor(1)
            loss = loss_of(model, batch, ignored) * tokens
            run.backward(loss)
            for parameter in model.parameters():
                parameter.grad *= 1 / tokens
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main(read_options(), sys.argv[2])
