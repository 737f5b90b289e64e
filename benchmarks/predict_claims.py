"""Claim: four rules of thumb about fine-tuning can be looked up without a GPU; what shadow runs say of each.

The rules: fp16 saves about 40 % of memory; checkpointing saves 60 to 70 % of activations and costs about
30 % of time; evaluation fell from 14 to 3 GB and training from 12 to 10 GB by accumulation and reduced logits; a job of an A100
with 40 GB was made to fit a RTX 3090. Each is asked of bert-base (text classification, 512 tokens) and vit-base (384 and 512
pixels), and, where what is claimed grows with what evaluation keeps, of gpt2.

    python benchmarks/predict_claims.py [--quick] [--check]

Writes results/claims.md, with the command that shows each figure, and results/predict_claims.json. Nothing is measured: the
figures are predictions, and step times are estimates of which only the order counts. `--check` exits 1 where a prediction could
not be made; whether a claim holds is the answer, not the aim.
"""

import sys
from typing import Any

import common

from autofit.forecast import Forecast, predict
from autofit.store import write_atomically
from autofit.units import format_bytes

BERT = {"model": "bert-base-uncased", "seq_len": 512}
VIT_384 = {"model": "google/vit-base-patch16-224", "image_size": 384}
VIT_512 = {"model": "google/vit-base-patch16-224", "image_size": 512}
GPT2 = {"model": "gpt2", "seq_len": 512}
CARD = "a100-40gb"
FLAGS = {"seq_len": "--seq-len", "image_size": "--image-size", "eval_batch": "--eval-batch", "eval_rows": "--eval-rows",
         "eval_accumulation": "--eval-accumulation"}  # fmt: skip


class Asked:
    """Predictions by their options, and the command of each."""

    def __init__(self) -> None:
        self._known: dict[str, Forecast] = {}

    def __call__(self, **options: Any) -> Forecast:
        options = {"gpu": CARD, "accumulation": 1, "checkpointing": False, **options}
        command = command_of(options)
        if command not in self._known:
            self._known[command] = predict(**options).rows[0]
        return self._known[command]

    def facts(self) -> dict[str, Any]:
        return {
            command: {
                "train_process_bytes": row.prediction.train_bytes,
                "eval_process_bytes": row.prediction.eval_bytes,
                "categories": row.prediction.categories,
                "step_seconds": row.prediction.step_seconds,
                "verdict": None if row.verdict is None else row.verdict.answer,
            }
            for command, row in self._known.items()
        }


def command_of(options: dict[str, Any]) -> str:
    words = ["autofit predict"]
    for name, value in options.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        words.append(flag if value is True else f"--no-{flag[2:]}" if value is False else f"{flag} {value}")
    return " ".join(words)


def title_of(options: dict[str, Any]) -> str:
    size = f"{options['seq_len']} tokens" if "seq_len" in options else f"{options['image_size']} pixels"
    return f"{options['model'].rsplit('/', 1)[-1]}, {size}"


def percent(part: float, whole: float) -> str:
    return f"{1 - part / whole:.0%}"


def train(row: Forecast) -> int:
    """Peak of live bytes in training: what a saving is a share of, context and cached blocks apart."""
    return row.prediction.phase("train").allocated_bytes


def activations(row: Forecast) -> int:
    held = row.prediction.categories
    return held.get("activations", 0) + held.get("logits and loss", 0)


def half_precision(ask: Asked, workloads: list[tuple[dict[str, Any], int]]) -> list[list[str]]:
    rows = []
    for workload, batch in workloads:
        full, half = (ask(**workload, batch=batch, precision=p) for p in ("fp32", "fp16"))
        saved = percent(train(half), train(full))
        rows.append([title_of(workload), str(batch), size(train(full)), size(train(half)), saved])
    return rows


def checkpointing(ask: Asked, workloads: list[tuple[dict[str, Any], int]]) -> list[list[str]]:
    rows = []
    for workload, batch in workloads:
        kept, recomputed = (ask(**workload, batch=batch, precision="fp16", checkpointing=c) for c in (False, True))
        slower = recomputed.prediction.step_seconds / kept.prediction.step_seconds - 1
        rows.append(
            [
                title_of(workload),
                str(batch),
                size(activations(kept)),
                size(activations(recomputed)),
                percent(activations(recomputed), activations(kept)),
                percent(train(recomputed), train(kept)),
                f"{slower:+.0%}",
            ]
        )
    return rows


def evaluation(ask: Asked, workloads: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for workload in workloads:
        common_options = {**workload, "batch": 8, "eval_batch": 8, "eval_rows": 1000, "precision": "fp16"}
        cells = [title_of(workload)]
        for changes in ({}, {"eval_accumulation": 1}, {"logits": "argmax"}):
            row = ask(**common_options, **changes)
            cells.append(size(row.prediction.eval_bytes))
        rows.append(cells)
    return rows


def accumulation(ask: Asked, workloads: list[tuple[dict[str, Any], int]]) -> list[list[str]]:
    rows = []
    for workload, batch in workloads:
        whole = ask(**workload, batch=batch, precision="fp16")
        halves = ask(**workload, batch=batch // 2, accumulation=2, precision="fp16")
        rows.append(
            [
                title_of(workload),
                str(batch),
                size(train(whole)),
                size(train(halves)),
                percent(train(halves), train(whole)),
            ]
        )
    return rows


def largest(workload: dict[str, Any]) -> int:
    """The largest batch in fp32 without checkpointing on the large card."""
    options = {"gpu": CARD, "accumulation": 1, "checkpointing": False, "precision": "fp32"}
    return int(
        predict(**workload, **options, optim="adamw_torch_fused", max_batch=True)
        .rows[0]
        .candidate["per_device_train_batch_size"]
    )


def smaller_card(ask: Asked, workloads: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for workload in workloads:
        batch = largest(workload)
        as_is = ask(**workload, batch=batch, precision="fp32")
        there = ask(**workload, batch=batch, precision="fp32", gpu="rtx-3090")
        fitted = ask(**workload, batch=batch, precision="bf16", checkpointing=True, gpu="rtx-3090")
        rows.append(
            [
                title_of(workload),
                str(batch),
                *(f"{size(r.prediction.train_bytes)}, {r.verdict.answer}" for r in (as_is, there, fitted)),
            ]
        )
    return rows


def size(count: int) -> str:
    return format_bytes(count, "GB")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def answer(ask: Asked, quick: bool) -> str:
    text_and_images = [(BERT, 32), (VIT_384, 32), (VIT_512, 32)][: 1 if quick else None]
    growing = [BERT, VIT_384, VIT_512, GPT2][:: 3 if quick else 1]
    parts = [
        (
            "fp16 saves about 40 %",
            "Peak of live bytes in training on one A100, fp32 against fp16 (mixed precision: weights stay in 32 bits).",
            table(["workload", "batch", "fp32", "fp16", "saved"], half_precision(ask, text_and_images)),
        ),
        (
            "checkpointing saves 60–70 % of activations at about 30 % time",
            "Activations and logits alive at the peak, with the whole peak and the estimated step time beside them, all in fp16.",
            table(
                ["workload", "batch", "kept", "recomputed", "activations saved", "peak saved", "step time (estimate)"],
                checkpointing(ask, text_and_images),
            ),
        ),
        (
            "evaluation falls from 14 to 3 GB, training from 12 to 10 GB",
            "Peak of the process over an evaluation of 1000 rows at batch 8, after training at batch 8: as it is, with "
            "`eval_accumulation_steps=1`, and with logits reduced to their argmax. What evaluation keeps of a classifier are a few "
            "bytes a row, so nothing is there to be saved; a language model keeps a score for every token of the vocabulary.",
            table(["workload", "as it is", "accumulation", "argmax"], evaluation(ask, growing)),
        ),
        (
            "… and training by accumulation",
            "Peak of live bytes in training, the batch at once against half of it twice.",
            table(["workload", "batch", "at once", "in halves", "saved"], accumulation(ask, text_and_images)),
        ),
        (
            "a job of an A100-40 made to fit a RTX 3090",
            "Peak of the process in training: the largest batch that fits in fp32 on the A100 (40 GB), the same on the RTX 3090 (24 GB), and there in bf16 with "
            "checkpointing, the batch unchanged.",
            table(
                ["workload", "batch", "A100-40, fp32", "RTX 3090, fp32", "RTX 3090, bf16 + checkpointing"],
                smaller_card(ask, [w for w, _ in text_and_images]),
            ),
        ),
    ]
    chapters = "\n\n".join(f"## {title}\n\n{text}\n\n{shown}" for title, text, shown in parts)
    commands = "\n".join(sorted(ask.facts()))
    return (
        "# Claims, and what shadow runs say of them\n\n"
        "Written by `python benchmarks/predict_claims.py`. Nothing here was measured: these are predictions of shadow runs, "
        "uncalibrated, and step times are estimates of which only the order counts.\n\n"
        f"{chapters}\n\n## The commands\n\nEach figure above is in the output of one of these:\n\n```\n{commands}\n```\n"
    )


def main(argv: list[str]) -> int:
    options = common.make_parser(__doc__, "predict_claims").parse_args(argv)
    path = common.results_path(options)
    ask = Asked()
    text = answer(ask, options.quick)
    facts = ask.facts()
    made = sum(1 for told in facts.values() if told["train_process_bytes"])
    holds = made == len(facts)
    common.write_results(path, {"holds": holds, "machine": common.machine_facts(), "predictions": facts})
    write_atomically(path.with_name("claims.md"), text.encode())
    print(text)
    print(f"{made} of {len(facts)} predictions made: {common.format_verdict(holds)}")
    return 0 if holds or not options.check else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
