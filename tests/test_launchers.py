"""What a script gets from `accelerate launch` and `torchrun`, against the launchers themselves."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

import pytest

from autofit.errors import UsageError
from autofit.records import Task
from autofit.workloads.launchers import AT_START, complete_environment, describe_launch
from autofit.workloads.script_task import command_line, make_script_task, redact, source_digest

SCRIPTS = sysconfig.get_path("scripts")
# Of a torchrun: what an agent beside the script serves, and what is new in every run.
OF_THE_AGENT = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
SHOW = """
import json, os, sys
json.dump({"argv": sys.argv, "unbuffered": sys.stdout.write_through, "environment": dict(os.environ)}, open("shown.json", "w"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a script that shows what it was started with, entered; no configuration of this machine counts."""
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "_"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_and_read(folder, words, environment) -> dict:
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, timeout=120)
    shown = json.loads((folder / "shown.json").read_text())
    shown["environment"].pop("_", None)
    return shown


@pytest.mark.parametrize(
    "words",
    [
        ("accelerate", "launch", "show.py", "a", "--b=1"),
        pytest.param(
            ("accelerate", "launch", "--cpu", "--mixed_precision=bf16", "-m", "show", "-m"), marks=pytest.mark.long
        ),
        ("torchrun", "--nproc_per_node", "1", "show.py", "a", "${local_rank}"),
        pytest.param(("torchrun", "--role", "x", "-m", "show", "--nnodes", "2"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_a_script_gets_what_the_launcher_itself_gives_it(folder, words):
    theirs = run_and_read(folder, [os.path.join(SCRIPTS, words[0]), *words[1:]], dict(os.environ))
    task, notes = make_script_task((os.path.join(SCRIPTS, words[0]), *words[1:]))
    ours = run_and_read(
        folder,
        [sys.executable, *task.interpreter_options, *task.command],
        {**os.environ, **complete_environment(task.environment)},
    )
    assert notes == []
    assert ours["argv"] == theirs["argv"] and ours["unbuffered"] == theirs["unbuffered"]
    left_out = OF_THE_AGENT if words[0] == "torchrun" else set()
    assert {k: v for k, v in ours["environment"].items() if k not in left_out} == {
        k: v for k, v in theirs["environment"].items() if k not in left_out
    }
    assert set(ours["environment"]) | {"TORCHELASTIC_ERROR_FILE"} == set(theirs["environment"]) | {
        "TORCHELASTIC_ERROR_FILE"
    }


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("python", "-m", "accelerate.commands.launch"), marks=pytest.mark.long),
        ("python", "-u", "-m", "torch.distributed.run"),
    ],
    ids=" ".join,
)
def test_a_launcher_as_a_module_is_the_launcher(folder, words):
    task, _ = make_script_task((*words, "show.py", "--x"))
    assert task.command == ("show.py", "--x")
    assert task.launcher == words
    assert ("RANK" in task.environment) == ("torch.distributed.run" in words)
    assert task.interpreter_options == (("-u",) if "RANK" in task.environment else ())


def test_the_task_tells_the_command_as_it_was_written_and_keeps_no_secret_of_it(folder):
    words = ("env", "A=1", "MY_TOKEN=abcdef", "accelerate", "launch", "--cpu", "-m", "show", "--hub_token", "ghijkl")
    task, _ = make_script_task(words)
    assert command_line(task) == " ".join(words)
    assert task.command == ("-m", "show", "--hub_token", "ghijkl")
    assert task.environment["A"] == "1" and task.environment["MY_TOKEN"] == "abcdef"
    assert Task(script=task).name == "show"
    assert task.digest == source_digest(("show.py",))
    kept = repr(redact(Task(script=task)))
    assert "A=1" in kept and "abcdef" not in kept and "ghijkl" not in kept


def test_two_equal_commands_are_one_task(folder):
    """What is new in every run is decided by the process that runs."""
    with mock.patch.dict(os.environ):
        first = describe_launch("torchrun", ["show.py"])
    with mock.patch.dict(os.environ):
        assert describe_launch("torchrun", ["show.py"]) == first
    assert first["environment"]["MASTER_PORT"] == AT_START


def test_a_refusal_of_the_launcher_is_one_line(folder):
    with pytest.raises(UsageError) as error:
        make_script_task(("torchrun", "--nproc_per_node", "2", "show.py"))
    assert str(error.value) == (
        "several processes are not supported yet, and torchrun would start 2; search with --nproc_per_node 1"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accelerate --num_processes 2 show.py", "several processes are not supported yet"),
        ("accelerate --num_machines 2 --num_processes 1 show.py", "search with --num_machines 1"),
        ("accelerate --multi_gpu --num_processes 1 show.py", "at least 2 processes"),
        ("accelerate --use_fsdp --num_processes 2 show.py", "FSDP"),
        ("accelerate --use_deepspeed show.py", "DeepSpeed"),
        ("accelerate --tpu show.py", "TPU"),
        ("accelerate --nothing 1 show.py", "--nothing"),
        ("accelerate --no_python ls", "starts no Python script"),
        ("torchrun --nproc_per_node 2 show.py", "search with --nproc_per_node 1"),
        ("torchrun --nproc_per_node gpu show.py", "Cuda is not available"),
        ("torchrun --nnodes 1:2 show.py", "search with --nnodes 1"),
        ("torchrun --no_python ls", "starts no Python script"),
        ("torchrun --run-path show.py", "--run-path"),
        ("torchrun --help", "names no script"),
        ("torchrun --nproc_per_node 1", "training_script"),
    ],
)
def test_what_one_process_cannot_show_is_refused_with_the_way_out(folder, words, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with mock.patch.dict(os.environ):
        (error,) = describe_launch(words.split()[0], words.split()[1:]).values()
    assert expected in error and "\n" not in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accelerate config", "starts no training"),
        ("deepspeed show.py", "give the script itself"),
        ("mpirun -n 2 python show.py", "give the script itself"),
        ("uv run show.py", "run autofit itself under it"),
        ("bash run.sh", "give the command that it comes to"),
        ("ls", "no Python command"),
        ("env", "names no program"),
        ("env -i python show.py", "env -i is not supported"),
        ("python -m", "names no module"),
        ("/nowhere/torchrun show.py", "there is no launcher"),
    ],
)
def test_no_python_command_is_refused_at_once_with_what_to_write(folder, words, expected):
    with pytest.raises(UsageError) as error:
        make_script_task(tuple(words.split()))
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("more", "processes"), [((), 2), (("--num_processes", "1"), 1)], ids=str)
def test_the_users_own_configuration_of_accelerate_counts(folder, more, processes):
    """Of several GPUs; told to start one process, accelerate does it by torchrun."""
    where = folder / "home/accelerate/default_config.yaml"
    where.parent.mkdir(parents=True)
    where.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n"
        "mixed_precision: bf16\nuse_cpu: false\n"
    )
    words = ("accelerate", "launch", *more, "show.py", "x")
    if processes == 2:
        with pytest.raises(UsageError, match="would start 2"):
            make_script_task(words)
    else:
        task, _ = make_script_task(words)
        assert task.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert task.environment["WORLD_SIZE"] == "1" and task.command == ("show.py", "x")


def test_a_module_is_found_without_being_imported_and_an_edited_one_is_another_task(folder):
    package = folder / "pkg/inner"
    package.mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/inner/__init__.py"):
        (folder / name).write_text("raise RuntimeError")
    (package / "__main__.py").write_text("1")
    first = make_script_task(("python", "-m", "pkg.inner"))[0].digest
    (package / "__main__.py").write_text("2")
    assert make_script_task(("python", "-m", "pkg.inner"))[0].digest != first
    assert make_script_task(("python", "-m", "no.such.module"))[0].digest  # its own error comes when it runs


def test_a_port_is_free_and_anothers_where_two_start():
    environment = {"MASTER_PORT": AT_START, "TORCHELASTIC_RUN_ID": AT_START, "RANK": "0"}
    found = [complete_environment(environment) for _ in range(2)]
    assert found[0]["TORCHELASTIC_RUN_ID"] != found[1]["TORCHELASTIC_RUN_ID"]
    for one in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", int(one["MASTER_PORT"])))
        assert one["RANK"] == "0"
    assert complete_environment({"MASTER_PORT": "29500"}) == {"MASTER_PORT": "29500"}


def test_the_device_is_the_parents_to_choose_in_a_probe_and_the_scripts_in_a_real_run():
    environment = {"CUDA_VISIBLE_DEVICES": "1", "A": "2"}
    assert complete_environment(environment) == {"A": "2"}
    assert complete_environment(environment, devices=True) == environment


def test_the_parent_loads_neither_torch_nor_accelerate_to_ask(folder):
    source = (
        "import sys\nfrom autofit.workloads.script_task import make_script_task\n"
        "make_script_task(('accelerate', 'launch', 'show.py'))\nprint({'torch', 'accelerate'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


@pytest.mark.long
def test_the_store_of_a_torchrun_is_kept_by_the_script_itself(folder):
    """Its process group is there, of one process, without an agent beside it."""
    Path("show.py").write_text(
        "import torch\ntorch.distributed.init_process_group('gloo')\nvalue = torch.ones(1)\n"
        "torch.distributed.all_reduce(value)\nprint(torch.distributed.get_world_size(), value.item())\n"
    )
    task, _ = make_script_task(("torchrun", "show.py"))
    run = subprocess.run(
        [sys.executable, *task.command],
        env={**os.environ, **complete_environment(task.environment)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert run.stdout == "1 1.0\n"
