"""Train a small GPT-2 from random weights to write Python, on the source code of the standard library.

Evaluation gives the perplexity and the share of tokens that the model would have guessed. For the latter the Trainer
keeps the whole logits of the evaluation set (rows × tokens × vocabulary), as most scripts with `compute_metrics` do.

    python examples/causal_lm.py examples/causal_lm.json                         every argument from one JSON file
    python examples/causal_lm.py --output_dir out --hidden_size 64 --eval_strategy epoch       or as flags
"""

import math
import os
import sys
import sysconfig
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

END = "<|endoftext|>"


@dataclass
class ModelArguments:
    hidden_size: int = field(default=128, metadata={"help": "Width of the model."})
    num_layers: int = field(default=3, metadata={"help": "Transformer blocks."})
    num_heads: int = field(default=4, metadata={"help": "Attention heads per block."})
    vocab_size: int = field(default=2048, metadata={"help": "Tokens of the byte-level BPE that is trained first."})


@dataclass
class DataArguments:
    packages: list[str] = field(
        default_factory=lambda: ["asyncio", "concurrent", "json", "logging", "unittest"],
        metadata={"help": "Packages of the standard library whose source is read."},
    )
    block_size: int = field(default=96, metadata={"help": "Tokens of one row."})
    max_train_rows: int | None = field(default=2000, metadata={"help": "Rows to train on at most."})
    max_eval_rows: int | None = field(default=200, metadata={"help": "Rows to evaluate on at most."})


def read_files(packages: list[str]) -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for package in packages for path in sorted((library / package).rglob("*.py"))]
    if not files:
        raise SystemExit(f"no source of {', '.join(packages)} in {library}")
    return [text for path in files if (text := path.read_text(encoding="utf-8"))]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token=END, eos_token=END)


def compute_metrics(prediction) -> dict[str, float]:
    logits_NTV, labels_NT = prediction  # N rows, T tokens, V vocabulary
    guessed_NT = np.argmax(logits_NTV[:, :-1], axis=-1)  # token t + 1 is guessed at position t
    return {"token_accuracy": float((guessed_NT == labels_NT[:, 1:]).mean())}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        # If we pass only one argument to the script and it's the path to a json file, let's parse it to get our arguments.
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    texts = read_files(data_args.packages)
    tokenizer = train_tokenizer(texts, model_args.vocab_size)
    raw_datasets = Dataset.from_dict({"text": texts}).train_test_split(test_size=0.1, seed=training_args.seed)

    def tokenize_function(examples):
        return tokenizer([text + END for text in examples["text"]])

    def group_texts(examples):
        """Join all files and cut them into rows of `block_size` tokens; what is left over at the end is dropped."""
        joined = {key: list(chain(*examples[key])) for key in examples}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        result = {
            key: [tokens[i : i + data_args.block_size] for i in range(0, total, data_args.block_size)]
            for key, tokens in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    tokenized = raw_datasets.map(tokenize_function, batched=True, remove_columns=["text"])
    lm_datasets = tokenized.map(group_texts, batched=True)
    train_dataset, eval_dataset = lm_datasets["train"], lm_datasets["test"]
    if data_args.max_train_rows is not None:
        train_dataset = train_dataset.select(range(min(len(train_dataset), data_args.max_train_rows)))
    if data_args.max_eval_rows is not None:
        eval_dataset = eval_dataset.select(range(min(len(eval_dataset), data_args.max_eval_rows)))

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=data_args.block_size,
        n_embd=model_args.hidden_size,
        n_layer=model_args.num_layers,
        n_head=model_args.num_heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {len(train_dataset)} rows to train on")

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    print(f"perplexity {math.exp(metrics['eval_loss']):.1f}, token accuracy {metrics['eval_token_accuracy']:.3f}")


if __name__ == "__main__":
    main()
