"""`autofit apply`: the script runs for real, as Python would run it, with the settings of a search laid over."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from report_cases import BASELINE, BUDGET, DESCRIPTION, MACHINE, choice, probe, selection

from autofit import codec
from autofit.cli.options import APPLY_EPILOG
from autofit.records import AccumulationCheck, ScriptTask, Task
from autofit.store import RunDirectory
from autofit.workloads.script_task import source_digest

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = 1274  # of MODEL below
OWN = BASELINE.but(per_device_train_batch_size=2, gradient_accumulation_steps=4)
FOUND = OWN.but(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    precision="bf16",
    optim="adafactor",
    activation_checkpointing=True,
    per_device_eval_batch_size=16,
)
IN_CODE = FOUND.but(attention="eager", logits="argmax", loss="scaled")
SWITCHED = AccumulationCheck(4, 2, 1.0, switch="loss_is_scaled_for_ga", switch_value=False)

# Trains two steps and writes down what it ran with.
MODEL = """
    import json, sys
    import numpy, torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, n):
            return {"input_ids": torch.tensor([n % 20, 1, 2, 3]), "labels": torch.tensor(n % 2)}

    def make_model():
        torch.manual_seed(0)
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=20)
        return BertForSequenceClassification(BertConfig(max_position_embeddings=8, **sizes))

    def metrics(found):
        shapes.append(list(numpy.shape(found.predictions)))
        return {"accuracy": 1.0}

    shapes, batches = [], []
    FIELDS = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "optim", "activation_checkpointing",
              "per_device_eval_batch_size", "max_steps", "output_dir", "learning_rate", "logging_steps", "seed")

    def show(args, trainer, **more):
        facts = {name: getattr(args, name, getattr(args, "gradient_checkpointing", None)) for name in FIELDS}
        facts |= {"steps": trainer.state.global_step, "attention": trainer.model.config._attn_implementation}
        facts |= {"argv": sys.argv, "shapes": shapes, "batches": batches, "optimizer": type(trainer.optimizer.optimizer).__name__}
        json.dump(facts | more, open("facts.json", "w"))

    def train(args, kind=Trainer, **more):
        model = make_model()
        model.register_forward_pre_hook(lambda _, a, k: batches.append(len(k["input_ids"])), with_kwargs=True)
        trainer = kind(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=metrics)
        trainer.train()
        trainer.evaluate()
        return trainer
"""
LAID_OVER = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "optim": "adafactor",
    "activation_checkpointing": True,
    "per_device_eval_batch_size": 16,
}
UNTOUCHED = {"max_steps": 2, "output_dir": "out", "learning_rate": 0.25, "logging_steps": 1, "seed": 7, "steps": 2}
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 2,
    "learning_rate": 0.25,
    "logging_steps": 1,
    "seed": 7,
    "report_to": "none",
}


@pytest.fixture
def work(tmp_path):
    """`work(source)`: the script in a folder of its own, and a run directory of its search beside it."""
    folder = tmp_path / "work"
    folder.mkdir()

    def write(source: str, best=FOUND, with_code=None, baseline=OWN, script=None, **changes) -> Path:
        (folder / "train.py").write_text(textwrap.dedent(source), encoding="utf-8")
        script = script or ScriptTask(("train.py",), str(folder))
        before = os.getcwd()
        os.chdir(folder)
        script = dataclasses.replace(script, digest=source_digest(("train.py",)))
        os.chdir(before)
        task = changes.pop("task", Task(script=script))
        write_run(folder / "run", task, best, with_code, baseline, **changes)
        return folder

    return write


def write_run(path, task, best, with_code, baseline, answered=True, measured=True, **changes):
    description = dataclasses.replace(DESCRIPTION, **{"parameters": PARAMETERS, **changes})
    values = {"task": task, "machine": MACHINE, "budget": BUDGET, "description": description}
    run = {"identity": "abc", "command": "train.py", **{name: codec.to_json_value(v) for name, v in values.items()}}
    with RunDirectory.open(path, run) as directory:
        if measured:
            directory.record(probe(1, baseline, "baseline"))
        if answered:
            chosen = [None if candidate is None else choice(candidate, 41.2, 2.1) for candidate in (best, with_code)]
            directory.write_selection(selection(*chosen, baseline=baseline))


def environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet}


def run_apply(folder, *words, options=("run",), timeout=120, **settings):
    line = [sys.executable, "-m", "autofit", "apply", *options]
    if words:
        line += ["--", *words]
    return subprocess.run(
        line, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment(), check=False, **settings
    )


def facts_of(folder) -> dict:
    return json.loads((folder / "facts.json").read_text())


def check(folder, run, **expected):
    assert run.returncode == 0, run.stderr
    facts = facts_of(folder)
    expected = {**LAID_OVER, **UNTOUCHED, **expected}
    assert {name: facts[name] for name in expected} == expected
    return facts


def said(run) -> list[str]:
    return [line for line in run.stderr.splitlines() if line.startswith("autofit: ")]


# What is laid over, however the script comes to its arguments


def test_flags_are_laid_over_in_a_whole_training_and_nothing_else_is(work):
    folder = work(
        MODEL
        + """
    from transformers import HfArgumentParser
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    seen = args.per_device_train_batch_size
    trainer = train(args)
    trainer.save_model()
    show(args, trainer, seen=seen)
    """
    )
    words = [word for name, value in ARGUMENTS.items() for word in (f"--{name}", str(value))]
    run = run_apply(folder, sys.executable, "train.py", *words)
    facts = check(folder, run, seen=4, optimizer="Adafactor", argv=["train.py", *words], attention="sdpa")
    assert facts["batches"][:4] == [4, 4, 4, 4] and set(facts["batches"][4:]) == {16}
    assert facts["shapes"] == [[16, 2]]
    assert (folder / "out/model.safetensors").exists() and (folder / "out/checkpoint-2").exists()
    assert said(run) == [
        "autofit: per_device_train_batch_size: 2 → 4",
        "autofit: gradient_accumulation_steps: 4 → 2",
        "autofit: activation_checkpointing: False → True",
        "autofit: precision: fp32 → bf16",
        "autofit: optim: adamw_torch_fused → adafactor",
        "autofit: per_device_eval_batch_size: 8 → 16",
    ]


def test_a_json_file_is_read_and_left_as_it_is_and_code_is_applied_without_a_line_of_it(work):
    """Also what needs code: the attention implementation, and a reduction of logits."""
    folder = work(
        MODEL
        + """
    from transformers import HfArgumentParser
    (args,) = HfArgumentParser(TrainingArguments).parse_json_file("config.json")
    trainer = train(args)
    show(args, trainer, scaled=trainer.loss_is_scaled_for_ga)
    """,
        with_code=IN_CODE,
        accumulation=SWITCHED,
    )
    written = json.dumps(ARGUMENTS, indent=3)
    (folder / "config.json").write_text(written)
    run = run_apply(folder, sys.executable, "train.py", options=("run", "--with-code"))
    facts = check(folder, run, attention="eager", scaled=False)
    assert facts["shapes"] == [[16]]
    assert (folder / "config.json").read_text() == written
    assert said(run)[-3:] == [
        "autofit: attention: sdpa → eager",
        "autofit: logits: full → argmax",
        "autofit: trainer.loss_is_scaled_for_ga: None → False",
    ]


def test_what_the_script_assigns_itself_is_laid_over_before_the_trainer_and_told_after_it(work):
    """With values in code, by a Trainer of its own that makes its arguments anew, as some do."""
    folder = work(
        MODEL
        + f"""
    class Own(Trainer):
        def __init__(self, args, **more):
            super().__init__(args=TrainingArguments(**args.to_dict()), **more)
        def train(self):
            self.args.per_device_eval_batch_size = 3
            return super().train()

    args = TrainingArguments(**{ARGUMENTS!r})
    args.optim = "sgd"
    args.learning_rate = 0.25
    trainer = train(args, Own)
    show(trainer.args, trainer)
    """,
        parameters=PARAMETERS + 1,
    )
    run = run_apply(folder)  # the command of the run
    check(folder, run, per_device_eval_batch_size=3, optimizer="Adafactor")
    lines = said(run)
    assert lines[0] == f"autofit: train.py in {folder}"
    assert "autofit: per_device_train_batch_size: 2 → 4" in lines
    assert "autofit: the script set optim = 'sgd' itself; 'adafactor' is laid over it" in lines
    assert any("set per_device_eval_batch_size = 3 itself after its Trainer was made" in line for line in lines)
    assert any("1,274 parameters" in line and "1,275" in line for line in lines)


@pytest.mark.long
def test_the_arguments_class_of_trl_is_taken_like_any_other(work):
    folder = work(
        f"""
    import json
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
    rows = Dataset.from_dict({{"input_ids": [[n % 20, 1, 2, 3] for n in range(16)]}})
    args = SFTConfig(**{ARGUMENTS!r}, bf16=False, max_length=4, dataset_kwargs={{"skip_prepare_dataset": True}})
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    words = {{str(n): n for n in range(20)}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "0")), pad_token="0", eos_token="1")
    trainer = SFTTrainer(LlamaForCausalLM(LlamaConfig(**sizes)), args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "optim", "max_length", "max_steps")
    json.dump({{name: getattr(trainer.args, name) for name in names}}, open("facts.json", "w"))
    """,
        parameters=1,
    )
    run = run_apply(folder, sys.executable, "train.py")
    assert run.returncode == 0, run.stderr
    facts = facts_of(folder)
    assert facts == {
        **{name: LAID_OVER[name] for name in LAID_OVER if name in facts},
        "max_length": 4,
        "max_steps": 2,
    }
    assert "per_device_train_batch_size: 2 → 4" in run.stderr


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 1", "accelerate launch --cpu"])
def test_a_launcher_of_one_process_is_honoured(work, launcher):
    folder = work(
        MODEL
        + f"""
    import os
    args = TrainingArguments(**{ARGUMENTS!r})
    more = {{"mode": str(args.parallel_mode), "rank": os.environ.get("LOCAL_RANK"), "cpu": os.environ.get("ACCELERATE_USE_CPU")}}
    show(args, train(args), **more)
    """
    )
    run = run_apply(folder, *launcher.split(), "train.py", "--x")
    if launcher.startswith("torchrun"):
        check(folder, run, mode="ParallelMode.DISTRIBUTED", rank="0", argv=["train.py", "--x"])
    else:
        check(folder, run, rank=None, cpu="True", argv=["train.py", "--x"])


@pytest.mark.long
def test_settings_that_cannot_be_used_here_are_one_line(work):
    script = f"from transformers import TrainingArguments, Trainer\nTrainer(args=TrainingArguments(**{ARGUMENTS!r}))\n"
    folder = work(script, best=FOUND.but(optim="no_such_optimizer"))
    run = run_apply(folder, sys.executable, "train.py")
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("autofit: the settings of run cannot be used here: ")
    assert "Traceback" not in run.stderr


# It is the script's own process

SHOW = """
    import json, os, sys
    main = sys.modules["__main__"]
    names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
    facts = {name: getattr(main, name, "missing") for name in names}
    facts |= {"argv": sys.argv, "path": sys.path, "spec": str(main.__spec__)[:25], "loader": type(main.__loader__).__name__}
    facts |= {"orig": sys.orig_argv[1:], "input": sys.stdin.read(), "globals": sorted(globals()), "cwd": os.getcwd()}
    facts |= {"environment": sorted(set(os.environ) - {"_"}), "verbose": sys.flags.utf8_mode}
    print(json.dumps(facts))
"""


@pytest.mark.parametrize(
    "words",
    [("train.py", "a b", "--", "-m"), ("./sub/../train.py",), ("-X", "utf8", "-m", "train", "x"), ("-P", "train.py")],
    ids=" ".join,
)
def test_a_script_finds_everything_as_python_gives_it(work, words):
    folder = work(SHOW)
    (folder / "sub").mkdir()
    plain = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, input="in", env=environment(), check=True
    )
    applied = run_apply(folder, sys.executable, *words, input="in")
    assert applied.stdout and json.loads(applied.stdout) == json.loads(plain.stdout)
    assert said(applied) == []


@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")], ids=" ".join)
def test_workers_that_are_spawned_find_what_the_script_defines(work, words):
    folder = work(
        """
        import multiprocessing
        def double(n):
            return 2 * n
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """
    )
    run = run_apply(folder, sys.executable, *words)
    assert (run.stdout, run.stderr) == ("[2, 4]\n", "")


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(3)",
        "raise SystemExit('some words')",
        "def f():\n    raise ValueError('no')\ntry:\n    f()\nexcept ValueError as error:\n    raise KeyError(1) from error",
        "x = (",
        "raise KeyboardInterrupt",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "import sys\nsys.excepthook = lambda *a: print(a[0].__name__, a[2].tb_frame.f_code.co_name)\n1/0",
        "import atexit, threading\natexit.register(print, 'end')\nthreading.Thread(target=print, args=['thread']).start()\n1/0",
    ],
)
@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")], ids=" ".join)
def test_a_script_ends_as_it_ends_under_python(work, source, words):
    """Exit code, signal, and the traceback to the letter."""
    folder = work(source)
    plain = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, env=environment(), check=False
    )
    applied = run_apply(folder, sys.executable, *words)
    assert (applied.returncode, applied.stdout, applied.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_ctrl_c_goes_to_the_script(work):
    folder = work(
        """
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("saved")
            raise SystemExit(5)
        """
    )
    line = [sys.executable, "-m", "autofit", "apply", "run", "--", sys.executable, "train.py"]
    process = subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "saved\n"
    assert process.returncode == 5


@pytest.mark.long
def test_an_error_in_transformers_shows_no_frame_of_autofit(work):
    folder = work(
        """
        from transformers import Trainer, TrainingArguments
        class Own(Trainer):
            def train(self):
                return super().train()
        trainer = Own(args=TrainingArguments(output_dir="out", report_to="none"), model_init=lambda: None)
        """
    )
    run = run_apply(folder, sys.executable, "train.py")
    assert run.returncode == 1
    assert "Traceback" in run.stderr and "in <module>" in run.stderr
    assert "real_run" not in run.stderr and "given_arguments" not in run.stderr and "runpy" not in run.stderr


# Which settings, for which script


def refused(run, code: int) -> str:
    assert run.returncode == code, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    return line


NOTHING = "print('ran')"


def test_a_run_without_an_answer_is_refused(work):
    assert "has no answer" in refused(run_apply(work(NOTHING, answered=False), sys.executable, "train.py"), 5)


def test_a_run_in_which_nothing_was_probed_is_refused_with_what_to_do(work):
    folder = work(NOTHING, answered=False, measured=False)
    line = refused(run_apply(folder, sys.executable, "train.py"), 5)
    assert line == "error: nothing was probed in run; run its search, without --dry-run"


def test_a_folder_that_is_no_run_is_refused(work):
    for name, what in ((".", "it has no run.json"), ("nowhere", "it is not there")):
        line = refused(run_apply(work(NOTHING), sys.executable, "train.py", options=(name,)), 5)
        assert line == f"error: {name} is no run directory: {what}; give the folder that a search has named"


def test_with_code_and_what_the_run_has_must_agree(work):
    folder = work(NOTHING, best=None, with_code=IN_CODE)
    assert "--with-code" in refused(run_apply(folder, sys.executable, "train.py"), 2)
    assert run_apply(folder, sys.executable, "train.py", options=("run", "--with-code")).stdout == "ran\n"


def test_there_is_no_best_with_code_where_none_was_better(work):
    folder = work(NOTHING)
    assert "leave out --with-code" in refused(run_apply(folder, options=("--with-code", "run")), 2)


def test_a_command_whose_secret_was_not_kept_is_asked_for(work):
    script = ScriptTask(("train.py", "--hub_token", "[redacted]"), "/")
    assert "secret" in refused(run_apply(work(NOTHING, script=script)), 2)


def test_a_script_that_has_changed_is_told_and_run(work):
    folder = work(NOTHING)
    (folder / "train.py").write_text("print('ran')\n# more\n")
    run = run_apply(folder, sys.executable, "train.py")
    assert run.stdout == "ran\n"
    assert [line for line in said(run) if "has changed since the search" in line] and len(said(run)) <= 2


def test_the_command_of_the_run_is_run_in_its_folder(work, tmp_path):
    folder = work("import os\nprint(os.getcwd())")
    run = run_apply(tmp_path, options=(str(folder / "run"),))
    assert run.stdout.strip() == str(folder)
    assert said(run) == [f"autofit: train.py in {folder}"]


def test_the_parent_becomes_the_training_and_loads_no_torch_for_it(work):
    folder = work("import os, sys\nprint(os.getpid(), 'torch' in sys.modules, 'click' in sys.modules)")
    line = [sys.executable, "-m", "autofit", "apply", "run"]
    process = subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment())
    began = time.monotonic()
    assert process.communicate(timeout=60)[0] == f"{process.pid} False False\n"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "no run directory is named"),
        (("run", "train.py"), "put -- before your own command"),
        (("run", "--output_dir", "x"), "comes after --"),
        (("run", "--"), "nothing stands after --"),
        (("run", "--", "bash", "x.sh"), "bash"),
    ],
)
def test_a_line_that_cannot_be_meant_is_one_line_with_the_way_out(work, words, expected):
    folder = work(NOTHING)
    line = [sys.executable, "-m", "autofit", "apply", *words]
    assert expected in refused(subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False), 2)


def test_the_examples_of_the_help_name_what_there_is():
    examples = [line for line in APPLY_EPILOG.splitlines() if line.startswith("  autofit apply ")]
    assert len(examples) >= 3 and all("autofit-runs/" in line for line in examples)
