"""Memory and speed of GPUs by name, so that a budget can be written `rtx-3090`, also on a machine that has none.

Usable memory is what torch and the driver report as the card's total, which is less than what the card is sold with
and differs between drivers by up to 1 %: the lowest figure that is commonly reported. Messages print hundredths of a
GiB, so figures that come from them are true to 5 MiB.

Rates are the peaks of NVIDIA's data sheets and architecture whitepapers at boost clock, dense, that is without
structured sparsity, which doubles what many sheets print. Where a name stands for several boards (SXM and PCIe) they
are the faster one's. No kernel reaches them: what a step takes is estimated elsewhere.
"""

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from autofit.errors import UsageError
from autofit.units import looks_like_size, parse_bytes

_BRANDS = {"nvidia", "geforce", "tesla"}  # words that drivers put before a name and people leave out


@dataclass(frozen=True)
class Gpu:
    """One card, alone in its machine, no display attached."""

    name: str  # as it is written in a budget, `rtx-3090`
    label: str  # as it is printed
    aliases: tuple[str, ...]  # other names, those that drivers use included
    usable_bytes: int  # for one process: its context and everything that torch reserves
    capability: tuple[int, int]  # CUDA's compute capability
    context_bytes: int | None  # most that one training process held outside torch's allocator; None when unknown
    source: str
    fp32_flops: float  # floating-point operations per second of its CUDA cores
    tf32_flops: float | None  # of its tensor cores on fp32 rounded to tf32; None before capability 8.0
    half_flops: float  # of its tensor cores on fp16, sums kept in fp32 as torch does: half the sheet's on GeForce cards
    bandwidth_bytes: float  # per second, of its own memory
    rates_source: str

    @property
    def native_bf16(self) -> bool:
        """Whether tensor cores take bf16, at `half_flops`; older cards emulate it, slower than fp32."""
        return self.capability >= (8, 0)


def find_gpu(name: str) -> Gpu | None:
    """The card with this name or alias, whatever its case and separators: `RTX 3090`, `NVIDIA GeForce RTX 3090`."""
    return _gpus_by_key().get(_key(name))


def gpu_names() -> list[str]:
    """Names, cards with the least memory first."""
    return [gpu.name for gpu in sorted(_gpus(), key=lambda gpu: gpu.usable_bytes)]


def parse_budget(text: str) -> int:
    """Bytes that `text` allows the training process: a size such as `24GB`, or all that a card named in it can use.

    Raises UsageError.
    """
    gpu = find_gpu(text)
    if gpu is not None:
        return gpu.usable_bytes
    near = near_gpus(text)
    if looks_like_size(text):
        try:
            return parse_bytes(text)
        except UsageError as error:
            if not near:
                raise
            raise UsageError(f"{error}; a card is written like {' or '.join(near)}") from None
    way_out = f"did you mean {' or '.join(near)}?" if near else f"known cards are {', '.join(gpu_names())}"
    raise UsageError(f"{text!r} is neither a size such as 24GB or 24GiB nor a card that autofit knows; {way_out}")


def near_gpus(text: str) -> list[str]:
    """Up to three names that `text` may have meant: cut short (`3090`, `a100`) or misspelt."""
    key = _key(text)
    by_key = _gpus_by_key()
    keys = [known for known in by_key if len(key) >= 4 and key in known] or get_close_matches(key, by_key, cutoff=0.75)
    return list(dict.fromkeys(by_key[known].name for known in keys))[:3]


def _key(name: str) -> str:
    """What all spellings of a name have in common: its words without brand and separators, in lower case."""
    return "".join(word for word in re.split(r"[\s_-]+", name.lower()) if word not in _BRANDS)


@cache
def _gpus() -> tuple[Gpu, ...]:
    rows = json.loads((files(__package__) / "gpus.json").read_text(encoding="utf-8"))
    return tuple(
        Gpu(**{**row, "aliases": tuple(row["aliases"]), "capability": tuple(row["capability"])}) for row in rows
    )


@cache
def _gpus_by_key() -> dict[str, Gpu]:
    return {_key(name): gpu for gpu in _gpus() for name in (gpu.name, *gpu.aliases)}
