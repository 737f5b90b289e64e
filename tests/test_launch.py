"""Children that hang, die, flood, vanish and leave others behind: each is a result, and nothing is left of it.

Real processes throughout. Most scripts need no torch, so that a child costs the start of an interpreter.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
from conftest import OneThreadLauncher

from autofit.errors import WorkloadError
from autofit.launch import Ended, Launcher, MismatchError, Progress
from autofit.launch import launcher as launch
from autofit.probe_folder import last_progress, log_tail
from autofit.records import Machine, Outcome, Request, Schedule, Task

MiB = 2**20
LIMIT = 30.0
GRACE = 3.0  # what ending a child may take beyond its time limit
# In a script: the probe's own folder, which a script is not told.
FOLDER = 'import os\nFOLDER = os.path.dirname(os.readlink("/proc/self/fd/1"))\n'


def alive(pids: Iterable[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    return {pid for pid in pids if psutil.pid_exists(pid) and not _is_zombie(pid)}


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def numbers(path: Path) -> set[int]:
    """Process ids that a script has written, one a line."""
    return {int(line) for line in path.read_text().split()} if path.exists() else set()


def below(pid: int) -> set[int]:
    return {process.pid for process in psutil.Process(pid).children(recursive=True)}


def logs(request: Request) -> tuple[Path, Path]:
    return Path(request.folder) / "stdout.log", Path(request.folder) / "stderr.log"


# ---- children that hang ----


@pytest.mark.parametrize("how", ["fresh", "fork"])
def test_a_child_that_hangs_is_a_timeout_and_its_log_says_where(cold_launcher, ask, script, how):
    request = ask(
        script("""
        import time
        def wait_for_ever():
            while True:
                time.sleep(0.05)
        wait_for_ever()
        """)
    )
    ended = cold_launcher.probe(request, how=how, time_limit=2)
    assert ended.reply.outcome is Outcome.TIMEOUT
    assert ended.reply.failure.phase == "load"
    assert "no end after 2 s" in ended.reply.failure.message
    assert 2 <= ended.seconds < 2 + GRACE
    stack = logs(request)[1].read_text()
    assert "wait_for_ever" in stack and "train.py" in stack
    assert "wait_for_ever" in ended.reply.failure.traceback


def test_a_child_that_ignores_signals_is_killed_in_time(cold_launcher, ask, script):
    request = ask(
        script("""
        import os, signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        open("pid", "w").write(str(os.getpid()))
        while True:
            time.sleep(60)
        """)
    )
    ended = cold_launcher.probe(request, how="fresh", time_limit=1)
    assert ended.reply.outcome is Outcome.TIMEOUT
    assert ended.seconds < 1 + GRACE
    assert not alive(numbers(Path(request.task.script.directory) / "pid"))


def test_a_child_that_stops_itself_is_killed_in_time(cold_launcher, ask, script):
    ended = cold_launcher.probe(
        ask(script("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")), how="fresh", time_limit=2
    )
    assert ended.reply.outcome is Outcome.TIMEOUT
    assert ended.seconds < 2 + GRACE


# ---- children that die ----


@pytest.mark.parametrize(
    ("source", "outcome", "kind"),
    [
        ("import os\nos.kill(os.getpid(), 9)", Outcome.KILLED, "signal 9 (SIGKILL)"),
        ("import os\nos.kill(os.getpid(), 15)", Outcome.KILLED, "signal 15 (SIGTERM)"),
        ("import ctypes\nctypes.string_at(0)", Outcome.CRASHED, "signal 11 (SIGSEGV)"),
        ("import os\nos.abort()", Outcome.CRASHED, "signal 6 (SIGABRT)"),
        ("import os\nos._exit(0)", Outcome.CRASHED, "exit 0 without a reply"),
        ("import os\nos._exit(7)", Outcome.CRASHED, "exit 7 without a reply"),
        ("import os\nos.execvp('true', ['true'])", Outcome.CRASHED, "exit 0 without a reply"),
    ],
)
@pytest.mark.parametrize("how", ["fresh", "fork"])
def test_a_death_without_a_reply_is_explained_by_its_exit(cold_launcher, ask, script, how, source, outcome, kind):
    ended = cold_launcher.probe(ask(script(source)), how=how, time_limit=LIMIT)
    assert (ended.reply.outcome, ended.reply.failure.kind) == (outcome, kind)
    assert ended.reply.failure.phase == "load"


def test_a_segfault_leaves_its_stack_in_the_failure(cold_launcher, ask, script):
    source = "import ctypes\ndef read_nothing():\n    ctypes.string_at(0)\nread_nothing()"
    ended = cold_launcher.probe(ask(script(source)), how="fresh", time_limit=LIMIT)
    assert "Segmentation fault" in ended.reply.failure.traceback
    assert "read_nothing" in ended.reply.failure.traceback


@pytest.mark.parametrize(
    ("kills", "outcome"),
    [([3, 4], Outcome.HOST_OOM), ([3, 3], Outcome.KILLED), ([None, None], Outcome.KILLED)],
)
def test_sigkill_is_host_oom_only_where_the_kernel_counted_a_kill(
    cold_launcher, ask, script, monkeypatch, kills, outcome
):
    counter = iter(kills)
    monkeypatch.setattr(launch, "oom_kills", lambda: next(counter))
    ended = cold_launcher.probe(ask(script("import os\nos.kill(os.getpid(), 9)")), how="fresh", time_limit=LIMIT)
    assert ended.reply.outcome is outcome


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("print('nothing to train')", "no_trainer", "ended without calling Trainer.train()"),
        ("import sys\nsys.exit(3)", "no_trainer", "exited with 3 before it trained"),
        ("import sys\nsys.exit('no data')", "no_trainer", "exited with 'no data'"),
        ("raise KeyError('a column')", "KeyError", "a column"),
        ("def broken(:", "SyntaxError", "invalid syntax"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Odd(Exception):\n    kind = 5\nraise Odd('not ours')", "Odd", "not ours"),
        ("class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd", "Odd", ""),
        ("raise RuntimeError('a lone surrogate: \\ud800')", "RuntimeError", "a lone surrogate"),
    ],
)
def test_a_script_that_never_trains_is_a_crash_that_says_so(cold_launcher, ask, script, source, kind, message):
    ended = cold_launcher.probe(ask(script(source)), how="fork", time_limit=LIMIT)
    assert (ended.reply.outcome, ended.reply.failure.kind) == (Outcome.CRASHED, kind)
    assert message in ended.reply.failure.message


def test_a_script_that_is_not_there_is_a_crash(cold_launcher, ask, script):
    request = ask(script("pass"))
    os.unlink(request.task.script.command[0])
    ended = cold_launcher.probe(request, how="fresh", time_limit=LIMIT)
    assert (ended.reply.outcome, ended.reply.failure.kind) == (Outcome.CRASHED, "FileNotFoundError")


# ---- what a script sees ----


def test_a_script_sees_the_interpreter_that_python_would_give_it(cold_launcher, ask, script):
    task = script(
        """
        import inspect, json, os, pickle, sys
        import beside
        class Mine:
            pass
        pickle.loads(pickle.dumps(Mine()))
        facts = dict(argv=sys.argv, name=__name__, file=__file__, cwd=os.getcwd(), beside=beside.HERE,
                     source=inspect.getsource(Mine), dev=sys.flags.dev_mode, stdin=sys.stdin.read())
        json.dump(facts, open("facts.json", "w"))
        """,
        "--rows",
        "a b",
    )
    folder = Path(task.script.directory)
    (folder / "beside.py").write_text("HERE = 1")
    for how, options in (("fresh", ()), ("fork", ()), ("fork", ("-X", "dev"))):
        (folder / "facts.json").unlink(missing_ok=True)
        cold_launcher.probe(ask(task), how=how, time_limit=LIMIT, options=options)
        facts = json.loads((folder / "facts.json").read_text())
        assert facts["argv"] == [task.script.command[0], "--rows", "a b"]
        assert (facts["name"], facts["file"]) == ("__main__", task.script.command[0])
        assert facts["cwd"] == str(folder)
        assert facts["beside"] == 1
        assert "class Mine" in facts["source"]
        assert facts["stdin"] == ""
        assert facts["dev"] is bool(options)  # options mean a fresh interpreter, whatever was asked for


def test_a_module_runs_as_with_dash_m(cold_launcher, ask, script):
    task = script("")
    folder = Path(task.script.directory)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "train.py").write_text(
        "import json, sys\nfrom . import __name__ as parent\n"
        "json.dump([sys.argv[1:], __name__, parent], open('facts.json', 'w'))"
    )
    module = Task(script=type(task.script)(("-m", "package.train", "--x"), str(folder)))
    for how in ("fresh", "fork"):
        (folder / "facts.json").unlink(missing_ok=True)
        ended = cold_launcher.probe(ask(module), how=how, time_limit=LIMIT)
        assert ended.reply.failure.kind == "no_trainer"
        assert json.loads((folder / "facts.json").read_text()) == [["--x"], "__main__", "package"]


# ---- output and files ----


def test_a_flood_of_output_is_cut_and_the_end_of_it_kept(cold_launcher, ask, script, monkeypatch):
    monkeypatch.setattr("autofit.probe_folder.LOG_BYTES", MiB)
    request = ask(
        script(r"""
        import os, sys
        sys.stdout.buffer.write(b"the beginning\n")
        for _ in range(8):
            sys.stdout.buffer.write(b"\xff\xfe\x00 garbage \xc3\x28" + os.urandom(2**20))
        sys.stdout.buffer.write(b"\nthe end")
        """)
    )
    ended = cold_launcher.probe(request, how="fork", time_limit=LIMIT)
    assert ended.reply.failure.kind == "no_trainer"
    text = logs(request)[0].read_bytes()
    assert MiB < len(text) < MiB + 100
    assert text.startswith(b"the beginning") and text.endswith(b"the end")


def test_a_child_that_prints_for_ever_does_not_fill_the_disk(cold_launcher, ask, script, monkeypatch):
    monkeypatch.setattr("autofit.probe_folder.LOG_BYTES", MiB)
    largest = []
    cold_launcher._on_progress = lambda progress: largest.append(logs(request)[1].stat().st_size)
    request = ask(
        script("""
        import sys, time
        while True:
            sys.stderr.buffer.write(b"x" * 2**20)
            time.sleep(0.02)
        """)
    )
    ended = cold_launcher.probe(request, how="fresh", time_limit=4)
    assert ended.reply.outcome is Outcome.TIMEOUT
    assert max(largest) < 40 * MiB  # it wrote some 200
    assert logs(request)[1].stat().st_size < MiB + 100


def test_bytes_that_are_no_text_reach_the_failure_as_text(cold_launcher, ask, script):
    source = r'import os; os.write(2, b"\xff\xfe last words \xc3\x28"); os._exit(1)'
    ended = cold_launcher.probe(ask(script(source)), how="fork", time_limit=LIMIT)
    assert "last words" in ended.reply.failure.traceback


@pytest.mark.parametrize("text", ["half", '{"schema": 1, "outcome": "fits"', '{"schema": 99, "outcome": "fits"}', ""])
def test_a_damaged_reply_is_a_crash(cold_launcher, ask, script, text):
    source = FOLDER + f'open(FOLDER + "/reply.json", "w").write({text!r})\nos._exit(0)'
    ended = cold_launcher.probe(ask(script(source)), how="fork", time_limit=LIMIT)
    assert ended.reply.outcome is Outcome.CRASHED
    assert ended.reply.failure.kind == "exit 0 without a reply"


def test_half_a_draft_is_no_reply(cold_launcher, ask, script):
    write = FOLDER + 'open(FOLDER + "/reply.json.part", "w").write(\'{"schema": 1, "outc\')\n'
    ended = cold_launcher.probe(ask(script(write + "os._exit(0)")), how="fork", time_limit=LIMIT)
    assert ended.reply.failure.kind == "exit 0 without a reply"
    ended = cold_launcher.probe(ask(script(write)), how="fork", time_limit=LIMIT)
    assert ended.reply.failure.kind == "no_trainer"


def test_a_child_that_deletes_its_own_folder_is_a_crash(cold_launcher, ask, script):
    request = ask(script(FOLDER + "import shutil\nshutil.rmtree(FOLDER)"))
    ended = cold_launcher.probe(request, how="fork", time_limit=LIMIT)
    assert (ended.reply.outcome, ended.reply.failure.kind) == (Outcome.CRASHED, "exit 74 without a reply")


def test_a_folder_that_was_used_before_gives_no_old_reply(cold_launcher, ask, script):
    request = ask(script("raise ValueError('first')"))
    assert cold_launcher.probe(request, how="fork", time_limit=LIMIT).reply.failure.kind == "ValueError"
    script("import os\nos._exit(9)")
    ended = cold_launcher.probe(request, how="fork", time_limit=LIMIT)
    assert ended.reply.failure.kind == "exit 9 without a reply"
    assert "first" not in logs(request)[1].read_text()


def test_a_relative_folder_is_one_of_the_parent_not_of_the_script(cold_launcher, ask, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for how in ("fork", "fresh"):
        request = ask(script("raise ValueError('told')"), folder=f"runs/{how}")
        assert cold_launcher.probe(request, how=how, time_limit=LIMIT).reply.failure.kind == "ValueError"
        assert (tmp_path / "runs" / how / "reply.json").exists()


def test_progress_of_a_running_child_is_told(cold_launcher, ask, script):
    told: list[Progress] = []
    cold_launcher._on_progress = told.append
    cold_launcher.probe(ask(script("import time\ntime.sleep(1)")), how="fork", time_limit=LIMIT)
    assert {"load"} <= {progress.phase for progress in told} <= {"load", "reply"}
    assert all(MiB < progress.host_bytes < 2**32 for progress in told)


def test_progress_is_read_from_the_last_whole_line(tmp_path):
    assert last_progress(tmp_path) is None
    path = tmp_path / "progress.jsonl"
    path.write_bytes(b'{"phase": "load"}\n{"phase": "train", "step": 3}\n{"pha')
    assert last_progress(tmp_path) == ("train", 3)
    path.write_bytes(b'{"phase": "load"}\n[1]\nnull\n\xff\n{}\n')
    assert last_progress(tmp_path) == ("load", None)
    path.write_bytes(b'{"phase": "load"')
    assert last_progress(tmp_path) is None


def test_the_tail_of_a_log_is_stdout_where_stderr_is_empty(tmp_path):
    assert log_tail(tmp_path) == ""
    (tmp_path / "stderr.log").write_text("  \n")
    (tmp_path / "stdout.log").write_text("x" * 5000 + "the end\n")
    assert log_tail(tmp_path).endswith("x" + "the end")
    assert len(log_tail(tmp_path)) <= 4000


# ---- what a child leaves behind ----

LEAVE = """
import os, signal, sys, time
def note():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note()
    time.sleep(600)
    os._exit(0)
"""
WAYS = {
    "a child": "if os.fork() == 0:\n    stay()\n",
    "a session of its own": "if os.fork() == 0:\n    os.setsid()\n    stay()\n",
    "a double fork": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        stay()\n    os._exit(0)\n",
    "ten at once": "for _ in range(10):\n    if os.fork() == 0:\n        os.setsid()\n        stay()\n",
    "a tree": "for _ in range(3):\n    os.fork()\nnote()\nif os.getpid() != int(os.environ['ROOT']):\n    time.sleep(600)\n",
    "another program": "import subprocess\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, env={})\n"
    "open('pids', 'a').write(f'{p.pid}\\n')\n",
}
COUNTS = {"ten at once": 10, "a tree": 7}


@pytest.mark.parametrize("ending", ["the script ends", "os._exit(0)", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_probe_leaves_behind_is_dead_when_it_has_ended(cold_launcher, ask, script, way, ending):
    wait = f"while len(open('pids').read().split()) < {COUNTS.get(way, 1)}:\n    time.sleep(0.01)\n"
    source = LEAVE + "open('pids', 'a')\nos.environ['ROOT'] = str(os.getpid())\n" + WAYS[way] + wait
    request = ask(script(source + ("" if ending.startswith("the") else ending)))
    ended = cold_launcher.probe(request, how="fork", time_limit=LIMIT)
    left = numbers(Path(request.task.script.directory) / "pids")
    assert len(left) >= COUNTS.get(way, 1)
    assert not alive(left)
    assert ended.left_behind == COUNTS.get(way, 1)
    assert not below(cold_launcher._server.pid)


def test_processes_that_keep_forking_are_all_ended_by_a_timeout(cold_launcher, ask, script):
    request = ask(
        script(
            LEAVE + "for _ in range(4):\n    if os.fork() == 0:\n        os.setsid()\n        while True:\n"
            "            note()\n            if os.fork():\n                os._exit(0)\n            time.sleep(0.01)\n"
            "time.sleep(600)"
        )
    )
    ended = cold_launcher.probe(request, how="fork", time_limit=1)
    assert ended.reply.outcome is Outcome.TIMEOUT
    assert ended.seconds < 1 + GRACE
    left = numbers(Path(request.task.script.directory) / "pids")
    assert len(left) > 20
    assert not alive(left)
    assert cold_launcher.probe(ask(script("pass")), how="fork", time_limit=LIMIT).reply.failure.kind == "no_trainer"


# ---- host memory ----

GROW = """
held = []
while len(held) < 100:
    held.append(b"x" * (16 * 2**20))
    time.sleep(0.02)
time.sleep(600)
"""


@pytest.mark.parametrize("who", ["the child", "its child", "an orphan of it"])
def test_a_tree_above_the_host_budget_is_killed_as_host_oom(cold_launcher, ask, script, who):
    before = {
        "the child": "note()\n",
        "its child": "if os.fork():\n    time.sleep(600)\nnote()\n",
        "an orphan of it": "if os.fork():\n    time.sleep(600)\nos.setsid()\nif os.fork():\n    os._exit(0)\nnote()\n",
    }[who]
    request = ask(script(LEAVE + before + GROW))
    ended = cold_launcher.probe(request, how="fork", time_limit=LIMIT, host_budget=300 * MiB)
    assert ended.reply.outcome is Outcome.HOST_OOM
    assert "more than the host budget" in ended.reply.failure.message
    assert 300 * MiB < ended.host_bytes < 1600 * MiB
    assert not alive(numbers(Path(request.task.script.directory) / "pids"))


def test_a_tree_below_the_host_budget_is_let_be(cold_launcher, ask, script):
    source = "import time\nheld = b'x' * (100 * 2**20)\ntime.sleep(0.6)"
    ended = cold_launcher.probe(ask(script(source)), how="fork", time_limit=LIMIT, host_budget=600 * MiB)
    assert ended.reply.failure.kind == "no_trainer"
    assert 100 * MiB < ended.host_bytes < 600 * MiB


# ---- the server and the parent go ----

HANG = LEAVE + "if os.fork() == 0:\n    os.setsid()\n    stay()\nnote()\ntime.sleep(600)"


@pytest.mark.parametrize("how", ["fork", "fresh"])
def test_a_server_that_is_killed_is_a_crash_and_the_next_probe_works(cold_launcher, ask, script, how):
    request = ask(script(HANG))
    pids = Path(request.task.script.directory) / "pids"

    def kill_server(progress: Progress) -> None:
        if len(numbers(pids)) == 2:
            os.kill(cold_launcher._server.pid, signal.SIGKILL)

    cold_launcher._on_progress = kill_server
    ended = cold_launcher.probe(request, how=how, time_limit=LIMIT)
    assert (ended.reply.outcome, ended.reply.failure.kind) == (Outcome.CRASHED, "the probe server died")
    assert len(numbers(pids)) == 2
    assert not alive(numbers(pids))
    cold_launcher._on_progress = lambda progress: None
    ended = cold_launcher.probe(ask(script("pass")), how=how, time_limit=LIMIT)
    assert ended.reply.failure.kind == "no_trainer"


def test_a_server_that_dies_between_probes_is_replaced_with_what_it_had_imported(cold_launcher, ask, script):
    cold_launcher.warm(("antigravity_is_not_there", "colorsys"))
    source = "import json, sys\njson.dump('colorsys' in sys.modules, open('facts.json', 'w'))"
    for _ in range(2):
        os.kill(cold_launcher._server.pid, signal.SIGKILL)
        request = ask(script(source))
        assert cold_launcher.probe(request, how="fork", time_limit=LIMIT).reply.failure.kind == "no_trainer"
        assert json.loads((Path(request.task.script.directory) / "facts.json").read_text()) is True


def test_a_module_that_cannot_be_imported_spoils_nothing_unless_it_ends_the_server(
    cold_launcher, ask, script, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, source in (
        ("raises", "1 / 0"),
        ("exits", "raise SystemExit(3)"),
        ("good", "value = 1"),
        ("dies", "import os\nos._exit(3)"),
    ):
        (tmp_path / f"module_that_{name}.py").write_text(source)
    cold_launcher.warm(("module_that_raises", "module_that_exits", "module_that_good"))
    server = cold_launcher._server.pid
    assert cold_launcher.probe(ask(script("pass")), how="fork", time_limit=LIMIT).reply.failure.kind == "no_trainer"
    assert cold_launcher._server.pid == server
    with pytest.raises(WorkloadError, match="killed while it imported"):
        cold_launcher.warm(("module_that_dies",))
    assert cold_launcher.probe(ask(script("pass")), how="fork", time_limit=LIMIT).reply.failure.kind == "no_trainer"


def test_a_server_that_dies_when_it_is_told_to_kill_does_not_stall_the_probe(cold_launcher, ask, script, monkeypatch):
    server_pid = []
    hear = cold_launcher._hear

    def hear_and_kill(seconds: float) -> dict | None:
        told = hear(seconds)
        if told is not None and told["did"] == "start":
            server_pid.append(cold_launcher._server.pid)
        elif told is None and len(server_pid) == 1 and time.monotonic() > deadline:
            os.kill(server_pid[0], signal.SIGKILL)
            cold_launcher._server.wait()
            server_pid.append(0)
        return told

    monkeypatch.setattr(cold_launcher, "_hear", hear_and_kill)
    deadline = time.monotonic() + 1
    began = time.monotonic()
    ended = cold_launcher.probe(ask(script("import time\ntime.sleep(600)")), how="fork", time_limit=1)
    assert ended.reply.failure.kind == "the probe server died"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["fork", "fresh"])
def test_a_parent_that_is_killed_takes_server_and_children_along(ask, script, tmp_path, how):
    task = script(HANG)
    source = f"""
    import pathlib
    from autofit.launch import Launcher
    from autofit.machine import read_machine
    from autofit.records import Request, Schedule, ScriptTask, Task
    launcher = Launcher(read_machine("cpu"), lambda p: pathlib.Path("server").write_text(str(launcher._server.pid)))
    task = Task(script=ScriptTask({task.script.command!r}, {task.script.directory!r}))
    launcher.probe(Request("1", {str(tmp_path / "probe")!r}, task, "cpu", Schedule()), how={how!r}, time_limit=600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], cwd=tmp_path)
    try:
        pids = Path(task.script.directory) / "pids"
        assert wait_until(lambda: len(numbers(pids)) == 2 and bool(numbers(tmp_path / "server")), 30)
        everyone = numbers(pids) | numbers(tmp_path / "server")
        assert alive(everyone) == everyone
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not alive(everyone), 5)


def test_ctrl_c_while_a_probe_runs_leaves_nothing(machine: Machine, ask, script):
    task = script(HANG)
    pids = Path(task.script.directory) / "pids"

    def interrupt(progress: Progress) -> None:
        if len(numbers(pids)) == 2:
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), OneThreadLauncher(machine, interrupt) as launcher:
        launcher._order(do="kill")
        server = launcher._server.pid
        launcher.probe(ask(task), how="fork", time_limit=LIMIT)
    assert time.monotonic() - began < 8
    assert len(numbers(pids)) == 2
    assert not alive(numbers(pids) | {server})


def test_after_an_interrupted_probe_the_next_one_is_told_its_own_end(cold_launcher, ask, script):
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    cold_launcher._on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        cold_launcher.probe(ask(script("import time\ntime.sleep(1)\nraise KeyError")), how="fork", time_limit=LIMIT)
    cold_launcher._on_progress = lambda progress: None
    ended = cold_launcher.probe(
        ask(script("import time\ntime.sleep(2)\nraise ValueError")), how="fork", time_limit=LIMIT
    )
    assert ended.reply.failure.kind == "ValueError"
    assert ended.seconds > 2


def test_closing_twice_and_closing_unused_are_harmless(machine: Machine):
    launcher = Launcher(machine)
    launcher.close()
    launcher._order(do="kill")
    server = launcher._server.pid
    launcher.close()
    launcher.close()
    assert not alive({server})


def test_many_probes_leave_no_descriptor_open(cold_launcher, ask, script):
    source = "import json, os\njson.dump(sorted(os.listdir('/proc/self/fd')), open('fds.json', 'w'))"
    counts = []
    for _ in range(4):
        request = ask(script(source))
        cold_launcher.probe(request, how="fork", time_limit=LIMIT)
        server = len(os.listdir(f"/proc/{cold_launcher._server.pid}/fd"))
        child = len(json.loads((Path(request.task.script.directory) / "fds.json").read_text()))
        counts.append((server, child, len(os.listdir("/proc/self/fd"))))
    assert len(set(counts)) == 1
    assert counts[0][1] == 5  # in the child: three streams, the progress file, and the listing itself


# ---- a child that ran something else ----


def test_a_child_that_reports_other_settings_is_a_bug_and_raised(launcher: Launcher, ask, tiny_task):
    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    schedule = Schedule(timed_steps=0, evaluate=False)
    request = ask(tiny_task, arguments=arguments, schedule=schedule)
    with pytest.raises(MismatchError, match=r"per_device_train_batch_size=4 and reports 8.*" + request.folder):
        launcher.probe(request, how="fork", time_limit=LIMIT, expected={"per_device_train_batch_size": 4})
    ended = launcher.probe(ask(tiny_task, arguments=arguments, schedule=schedule), how="fork", time_limit=LIMIT)
    assert ended.reply.outcome is Outcome.FITS
    assert ended.reply.echo["arguments"] == arguments


def test_every_probe_of_one_server_is_a_process_of_its_own(cold_launcher, ask, script):
    source = "import os, sys\nopen('pids', 'a').write(f'{os.getpid()}\\n')\nassert not hasattr(os, 'spoiled')\nos.spoiled = 1"
    ended: list[Ended] = [
        cold_launcher.probe(ask(script(source)), how=how, time_limit=LIMIT)
        for how in itertools.islice(itertools.cycle(("fork", "fresh")), 4)
    ]
    assert {e.reply.failure.kind for e in ended} == {"no_trainer"}
    assert all(0 < e.seconds < LIMIT for e in ended)
