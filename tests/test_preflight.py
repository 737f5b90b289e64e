"""Bad input: one clear line with the way out, before anything is started. No child runs here but the described scripts."""

import json

import pytest
from landscapes import make_description

import autofit
from autofit.errors import AutofitError, DeviceError, RunDirectoryError, UsageError, WorkloadError
from autofit.knobs import needs_code
from autofit.machine import read_machine
from autofit.records import Machine, ScriptTask, Task
from autofit.study.preflight import baseline_of, make_budget, space_of
from autofit.workloads.model_task import make_model_task, read_config
from autofit.workloads.script_task import make_script_task, redact


def refused(tmp_path, **options) -> str:
    """The one line that a search is refused with."""
    with pytest.raises(AutofitError) as error:
        autofit.search(**{"device": "cpu", "out": tmp_path / "run", **options})
    message = str(error.value)
    assert "\n" not in message
    assert error.value.exit_code not in (0, 1)
    return message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "no-such-org/no-such-model"}, "no configuration of"),
        ({"model": "bert-base-uncasd"}, "bert-base-uncased"),
        ({"model": "./no-such-folder"}, "no folder"),
        ({"model": "gpt2", "task": "image-classification", "image_size": 32}, "has no image-classification head"),
        ({"model": "gpt2", "task": "translation"}, "--task"),
        ({"model": "gpt2", "budget": "24"}, "unit"),
        ({"model": "gpt2", "budget": "rtx-9999"}, "rtx-"),
        ({"model": "gpt2", "budget": "100MB", "task": "causal-lm", "seq_len": 16}, "the weights alone take"),
        ({"model": "gpt2", "seq_len": 5000}, "positions"),
        ({"model": "gpt2", "image_size": 224}, "--seq-len"),
        ({"model": "gpt2", "knobs": ("precison=bf16",)}, "did you mean precision"),
        ({"model": "gpt2", "knobs": ("precision=",)}, "lists no value"),
        ({"model": "gpt2", "knobs": ("precision=fp8",), "seq_len": 16}, "cannot be used here"),
        ({"model": "gpt2", "knobs": ("gradient_accumulation_steps=2",)}, "follows from"),
        ({"model": "gpt2", "max_time": "5"}, "write it like"),
        ({"model": "gpt2", "max_probes": 2}, "too few"),
        ({"model": "gpt2", "headroom": 1.5}, "--headroom"),
        ({"model": "gpt2", "allow": ("everything",), "seq_len": 16}, "--allow"),
        ({"model": "gpt2", "dtype": "int8"}, "--dtype"),
        ({"model": "gpt2", "effective_batch": 0}, "--effective-batch"),
        ({"model": "gpt2", "device": "tpu"}, "tpu"),
        ({"model": "gpt2", "args": {"no_cuda": True, "evaluation_strategy": "no"}, "seq_len": 16}, "no_cuda → use_cpu"),
        ({"model": "gpt2", "args": {"deepspeed": "ds.json"}, "seq_len": 16}, "deepspeed"),
        ({"model": "gpt2", "args": {"per_device_train_batch_size": "many"}}, "per_device_train_batch_size"),
        ({"model": "gpt2", "args": "/no/such/file.json"}, "cannot be read"),
        ({}, "--model"),
        ({"model": "gpt2", "command": ("python", "x.py")}, "either"),
        ({"command": ("python", "no_such_script.py")}, "no script"),
        ({"command": ("python", "-c", "print(1)")}, "no file"),
        ({"command": ("bash", "train.sh")}, "no Python command"),
        ({"command": ("deepspeed", "train.py")}, "not supported"),
        ({"command": ("python", "x.py"), "seq_len": 5}, "--seq-len belongs to --model"),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(tmp_path, options, expected):
    assert expected in refused(tmp_path, **options)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{half", "\x00\xff"])
def test_arguments_that_are_no_json_object_are_refused(tmp_path, content):
    (tmp_path / "args.json").write_text(content)
    assert "--args" in refused(tmp_path, model="gpt2", args=tmp_path / "args.json")


@pytest.mark.parametrize("content", [None, "", "{}", '{"model_type": "no-such-type"}', "[]"])
def test_a_folder_that_is_no_model_is_refused(tmp_path, content):
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    refused(tmp_path, model=str(folder), task="causal-lm", seq_len=16)


def test_an_unwritable_out_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out" in refused(tmp_path, model="gpt2", out=tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('hello')", "without making a Trainer"),
        ("import sys; sys.exit('no data')", "exited with 'no data'"),
        ("raise ValueError('my own bug')", "my own bug"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_script_that_never_trains_is_told_in_its_own_words(tmp_path, source, expected):
    (tmp_path / "train.py").write_text(source)
    with pytest.raises(WorkloadError) as error:
        autofit.search(command=("python", str(tmp_path / "train.py")), device="cpu", out=tmp_path / "run")
    assert expected in str(error.value) + error.value.log
    assert "\n" not in str(error.value)


def test_a_run_directory_of_a_newer_version_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(RunDirectoryError, match="upgrade autofit"):
        autofit.search(model="gpt2", device="cpu", out=tmp_path / "run")


def test_a_budget_above_the_machine_is_clamped_and_said():
    machine, said = read_machine("cpu"), []
    budget = make_budget("100TB", None, 0.05, machine, said.append)
    assert budget.device_bytes < machine.device_bytes
    assert "100TB" in said[0]
    assert make_budget("1GB", None, 0.05, machine, said.append).device_bytes == 10**9
    assert len(said) == 1


def test_a_device_that_others_use_is_refused(monkeypatch):
    machine = Machine("cuda:0", "Card", 24 * 10**9, 10**11, "cpu", 2, "Linux", {}, "GPU-1", (8, 6))
    monkeypatch.setattr("autofit.study.preflight.available_device_bytes", lambda machine: 10 * 10**9)
    with pytest.raises(DeviceError, match="gpu_busy"):
        make_budget(None, None, 0.05, machine, print)


def test_what_nobody_said_is_assumed_and_said():
    task, assumed = make_model_task("bert-base-uncased", transformers_version="5.24.0")
    assert (task.task, task.seq_len, task.effective_batch, task.dtype) == ("text-classification", 512, 32, "float32")
    assert task.base_args == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    for word in ("text-classification", "512", "32", "1000"):
        assert any(word in sentence for sentence in assumed)


def test_the_dtype_is_what_the_installed_from_pretrained_gives(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    made = {
        v: make_model_task(str(tmp_path), transformers_version=v, task="causal-lm", seq_len=8)[0]
        for v in ("4.57.6", "5.24.0")
    }
    assert made["4.57.6"].dtype == "float32"
    assert made["5.24.0"].dtype == "bfloat16"


def test_tokens_in_the_users_arguments_reach_no_record():
    task, _ = make_model_task(
        "gpt2", transformers_version="5.24.0", base_args={"hub_token": "hf_secret", "learning_rate": 1}
    )
    assert "hf_secret" not in repr(task)
    assert task.base_args["learning_rate"] == 1


def test_flags_that_sound_like_secrets_are_left_out_of_what_is_written(tmp_path):
    (tmp_path / "x.py").write_text("")
    command = (
        "python",
        str(tmp_path / "x.py"),
        "--hub_token",
        "hf_a",
        "--api-key=hf_b",
        "--tokenizer",
        "t5",
        "--lr",
        "1",
    )
    task = Task(script=make_script_task(command)[0])
    assert "hf_a" in task.script.command
    written = redact(task).script.command
    assert "hf_a" not in written
    assert not any("hf_b" in part for part in written)
    assert "1" in written


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        (("--token", "a", "SECRET"), True),
        (("wandb.api_key=SECRET",), True),
        (("+hub_token=SECRET",), True),
        (("--config", '{"hub_token": "SECRET", "lr": "1"}'), True),
        (("postgres://user:SECRET@host/db",), True),
        (("hf_SECRETSECRET",), True),
        (("--passphrase", "SECRET"), True),
        (("--secret_key=SECRET",), True),
        (("--max_tokens", "SECRET"), False),
        (("--tokenizer", "SECRET"), False),
        (("--author", "SECRET"), False),
        (("--output_dir", "SECRET"), False),
    ],
    ids=str,
)
def test_what_is_a_secret_goes_and_what_is_none_stays(command, hidden):
    written = redact(Task(script=ScriptTask(("x.py", *command), "/"))).script.command
    assert any("SECRET" in part for part in written) is not hidden


def test_the_catalogs_models_need_no_network(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: (_ for _ in ()).throw(AssertionError("network")))
    assert read_config("google-bert/bert-base-uncased")[0]["model_type"] == "bert"


def test_usage_errors_name_an_exit_code_of_their_own():
    codes = [kind("x").exit_code for kind in (UsageError, WorkloadError, RunDirectoryError, DeviceError)]
    assert len(set(codes)) == 4


def test_a_resumed_search_survives_a_driver_that_no_longer_tells_what_is_free(tmp_path, monkeypatch):
    """The budget of the earlier run is kept; the refusal that follows is about the weights, not a traceback."""
    options = {"model": "gpt2", "task": "causal-lm", "seq_len": 16, "budget": "100MB"}
    assert "the weights alone take" in refused(tmp_path, **options)
    monkeypatch.setattr("autofit.api.available_device_bytes", lambda machine: None)
    assert "the weights alone take" in refused(tmp_path, **options)


FORMS = {"eval_do_concat_batches": (True, False), "batch_eval_metrics": (False,), "prediction_loss_only": (False,)}
RESOLVED = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch",
    "per_device_eval_batch_size": 8,
}


def test_what_a_metrics_function_receives_varies_only_where_code_is_allowed():
    description = make_description(resolved=RESOLVED, metrics_forms=FORMS)
    machine = read_machine("cpu")
    plain = space_of(description, machine, None, (), ())
    assert plain.baseline == baseline_of(description)
    assert not set(FORMS) & (set(plain.values) | set(plain.baseline.values))
    coded = space_of(description, machine, None, (), ("code",))
    assert {name: coded.values[name] for name in FORMS} == FORMS
    assert all(coded.baseline[name] == values[0] for name, values in FORMS.items())
    assert needs_code(coded.baseline.but(eval_do_concat_batches=False), coded.baseline)
    narrowed = space_of(description, machine, None, ("eval_do_concat_batches=false",), ("code",))
    assert narrowed.values["eval_do_concat_batches"] == (False,)
    with pytest.raises(UsageError, match="it changes what the metrics function receives; add --allow code"):
        space_of(description, machine, None, ("eval_do_concat_batches=false",), ())
    with pytest.raises(UsageError, match="True cannot be used here; possible: False"):
        space_of(description, machine, None, ("batch_eval_metrics=true",), ("code",))
