"""What goes wrong with a snapshot is told and leaves nothing: scripts that fail or are not safe to fork, processes that die.

Real processes throughout. Scripts that need no torch cost an interpreter's start; those that stand at a Trainer serve
several tests each.
"""

import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import OneThreadLauncher
from standing import SHORT, TRAINING, Standing, descendants, lives, running, wait_until

import autofit
from autofit.errors import Interrupted, WorkloadError
from autofit.harness.template import INNER, OUTER
from autofit.launch import Ended
from autofit.records import Candidate, Machine, Measurement, Outcome, PhaseRecord, Schedule, Speed
from autofit.study.judgement import difference_of
from autofit.study.listener import Listener

DESCRIBE = Schedule(describe_only=True)


def ran(ended: Ended, *hows: str) -> Ended:
    assert ended.reply.outcome is Outcome.FITS, ended.reply.failure
    assert ended.how in (hows or ("snapshot",))
    return ended


# ---- scripts that do not come to a Trainer, or go on from it in a way of their own ----


@pytest.mark.parametrize(
    ("source", "message", "log"),
    [
        ("def read_rows():\n    raise LookupError('no rows')\nread_rows()", "LookupError: no rows", "read_rows"),
        ("import sys\nprint('said before')\nsys.exit(3)", "exited with 3 before it trained", ""),
        ("print('nothing to train')", "without making a Trainer", ""),
        ("def broken(:", "SyntaxError", "train.py"),
        (
            "import torch\nw = torch.zeros(1, requires_grad=True)\nsgd = torch.optim.SGD([w])\nwhile True:\n"
            "    w.grad = torch.ones(1)\n    sgd.step()",
            "optimizer steps outside of the train() of a transformers Trainer",
            "",
        ),
    ],
)
def test_a_script_that_comes_to_no_trainer_is_told_once_in_its_own_words(machine, tmp_path, source, message, log):
    with Standing(tmp_path, machine, source) as standing:
        with pytest.raises(WorkloadError) as error:
            standing.describe()
        assert message in str(error.value)
        assert log in error.value.log
        assert standing.noted("runs") == ([] if message == "SyntaxError" else ["once"])
        assert standing.launcher.snapshot is None


def test_a_script_that_hangs_before_its_trainer_is_ended_and_told_where(machine, tmp_path):
    source = "import time\ndef wait_for_data():\n    while True:\n        time.sleep(0.05)\nwait_for_data()"
    with Standing(tmp_path, machine, source) as standing:
        began = time.monotonic()
        ended, why = standing.launcher.take_snapshot(standing.request(schedule=DESCRIBE), time_limit=2)
        assert time.monotonic() - began < 10
        assert ended.reply.outcome is Outcome.TIMEOUT
        assert "no end after 2 s" in ended.reply.failure.message
        assert "wait_for_data" in ended.reply.failure.traceback
        assert running(descendants(standing.launcher._server.pid)) == []


@pytest.mark.parametrize("how", ["os._exit(7)", "os.kill(os.getpid(), 9)", "import ctypes; ctypes.string_at(0)"])
def test_a_script_that_dies_before_its_trainer_is_explained_by_its_exit(machine, tmp_path, how):
    with Standing(tmp_path, machine, how) as standing:
        with pytest.raises(WorkloadError) as error:
            standing.describe()
        expected = {"os._exit(7)": "exit 7", "os.kill(os.getpid(), 9)": "signal 9"}.get(how, "signal 11")
        assert expected in str(error.value)
        assert standing.noted("runs") == ["once"]


# ---- processes that die ----

# `hold` in `case.json`: a probe stays in its first step until it is killed. A helper of the script's own runs all along.
HOLDING = (
    TRAINING
    + """
import subprocess, time

helper = subprocess.Popen(["sleep", "1000"])
note("helpers", helper.pid)

class Hold(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if case("helper") and state.global_step == 0:
            note("children", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        if case("hold"):
            note("held", os.getpid())
            while case("hold"):
                time.sleep(0.05)

class Mine(Trainer):
    def __init__(self, model, args, **named):
        super().__init__(model, args, **named)
        if case("end") == "own train":
            self.train = self.run

    def run(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        while True:
            self.model(**torch.utils.data.default_collate([Rows()[0]])).loss.backward()
            optimizer.step()

trainer = Mine(make_model(), TrainingArguments("out", per_device_train_batch_size=8), train_dataset=Rows(),
               callbacks=[Seen(), Hold()])
if case("end") == "exit":
    sys.exit(4)
if case("end") != "no training":
    trainer.train()
"""
)


@pytest.fixture(scope="module")
def holding(machine: Machine, tmp_path_factory) -> Iterator[Standing]:
    with Standing(tmp_path_factory.mktemp("holding"), machine, HOLDING) as standing:
        standing.describe()
        yield standing


@pytest.fixture
def stands(holding) -> Standing:
    """`holding`, standing again where a test before has killed it."""
    launcher = holding.launcher
    launcher._retakes = 0
    standing = launcher._server.poll() is None and holding.template and all(map(lives, holding.template.values()))
    if launcher.snapshot is None or not standing:
        holding.tell()
        launcher.close()
        (holding.folder / "runs").unlink(missing_ok=True)
        holding.describe()
    return holding


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        ("own train", "own_loop", "a train() of its own"),
        ("exit", "no_training", "exited with 4 before it trained"),
        ("no training", "no_training", "ended without calling Trainer.train()"),
    ],
)
def test_a_script_that_makes_a_trainer_and_does_not_train_is_told_so(stands, end, kind, message):
    ended = stands.probe(case={"end": end}, schedule=DESCRIBE)
    assert (ended.reply.outcome, ended.reply.failure.kind) == (Outcome.CRASHED, kind)
    assert message in ended.reply.failure.message


def test_a_helper_of_the_script_lives_as_long_as_the_snapshot_and_a_probes_own_does_not(stands):
    ran(stands.probe())
    ended = ran(stands.probe(case={"helper": True}))
    helpers = [psutil.Process(int(pid)) for pid in stands.noted("helpers")[-1:]]
    assert running(helpers) == helpers
    assert ended.left_behind == 1
    assert not lives(int(stands.noted("children")[-1]))
    stands.launcher.drop_snapshot()
    assert wait_until(lambda: running(helpers) == [], 5)
    assert ran(stands.probe(), "fork", "fresh")


@pytest.mark.parametrize(
    "places", [(OUTER, INNER), *(pytest.param(p, marks=pytest.mark.long) for p in ((OUTER,), (INNER,)))]
)
def test_a_snapshot_that_was_killed_between_probes_costs_no_probe(stands, places):
    for place in places:
        os.kill(stands.template[place], signal.SIGKILL)
    time.sleep(0.3)
    ran(stands.probe({"bf16": True}), "snapshot" if INNER not in places else "fresh", "fork", "fresh")
    ran(stands.probe(), "snapshot", "fork", "fresh")


def hold(standing: Standing, kill) -> Ended:
    """A probe that stays in its first step; `kill(its pid)` is called then, and it goes on where that leaves it alive."""
    (standing.folder / "held").unlink(missing_ok=True)

    class Kill:
        done = False

        def __call__(self, progress) -> None:
            held = standing.noted("held")
            if held and not self.done:
                self.done = True
                kill(int(held[0]))
                standing.tell()

    standing.launcher._on_progress = Kill()
    try:
        ended = standing.probe(case={"hold": True}, time_limit=60)
    finally:
        standing.launcher._on_progress = lambda progress: None
    assert standing.noted("held")
    return ended


def test_a_killed_probe_is_told_and_the_next_one_branches_off_as_before(stands):
    ended = hold(stands, lambda pid: os.kill(pid, signal.SIGKILL))
    assert (ended.how, ended.reply.outcome) == ("snapshot", Outcome.KILLED)
    assert ended.reply.failure.kind == "signal 9 (SIGKILL)"
    ran(stands.probe())


def test_a_probe_outlives_its_snapshot(stands):
    def kill(_: int) -> None:
        for pid in stands.template.values():
            os.kill(pid, signal.SIGKILL)

    ran(hold(stands, kill))
    ran(stands.probe(), "fork", "fresh")


def test_a_server_that_was_killed_is_replaced_and_the_snapshot_taken_again(stands):
    runs = len(stands.noted("runs"))
    left = descendants(stands.launcher._server.pid)
    assert len(left) >= 2
    os.kill(stands.launcher._server.pid, signal.SIGKILL)
    time.sleep(0.2)
    ran(stands.probe({"bf16": True}))
    assert len(stands.noted("runs")) == runs + 1
    assert running(left) == []


@pytest.mark.long
def test_a_server_that_dies_with_a_probe_is_told_and_replaced(stands):
    left = []

    def kill(_: int) -> None:
        left.extend(descendants(stands.launcher._server.pid))
        os.kill(stands.launcher._server.pid, signal.SIGKILL)

    ended = hold(stands, kill)
    assert ended.reply.outcome is Outcome.CRASHED
    assert ended.reply.failure.kind == "the probe server died"
    ran(stands.probe())
    assert running(left) == []


def test_a_fork_that_hangs_is_a_timeout_that_says_where_and_spares_the_snapshot(stands):
    ended = stands.probe(case={"hold": True}, time_limit=3)
    assert (ended.how, ended.reply.outcome) == ("snapshot", Outcome.TIMEOUT)
    assert "on_step_begin" in ended.reply.failure.traceback
    ran(stands.probe())


DRIVER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import OneThreadLauncher
from standing import Standing
from test_snapshot_faults import HOLDING
from autofit.machine import read_machine

folder = Path({folder!r})
with Standing(folder, read_machine("cpu"), HOLDING) as standing:
    standing.describe()
    (folder / "server").write_text(str(standing.launcher._server.pid))
    (folder / "ready").write_text("")
    standing.probe(case={{"hold": True}})
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_parent_that_goes(machine, tmp_path, ending):
    folder = tmp_path / "run"
    folder.mkdir()
    source = DRIVER.format(tests=str(Path(__file__).parent), folder=str(folder))
    parent = subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: (folder / "work/held").exists() or parent.poll() is not None, 120)
        assert parent.poll() is None, parent.stderr.read()
        server = int((folder / "server").read_text())
        left = [psutil.Process(server), *descendants(server)]
        names = [" ".join(process.cmdline()) for process in left]
        assert any("sleep 1000" in name for name in names) and len(left) >= 5  # server, two places, probe, helper
        parent.send_signal(ending)
        parent.wait(timeout=15)
        assert wait_until(lambda: running(left) == [], 10), [p.cmdline() for p in running(left)]
    finally:
        parent.kill()
        parent.stderr.close()


# ---- scripts whose forks could not be trusted ----

UNSAFE = {
    "it runs threads (reader)": """
        import threading, time
        threading.Thread(target=lambda: time.sleep(1000), name="reader", daemon=True).start()
        train()
        """,
    "it holds network connections": """
        import socket
        listening = socket.create_server(("127.0.0.1", 0))
        train()
        """,
    "it has initialised torch.distributed": """
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        train()
        """,
    "it runs threads (MainThread, trainer)": """
        import threading
        thread = threading.Thread(target=train, name="trainer")
        thread.start()
        thread.join()
        """,
}
TRAIN = """
def train():
    Trainer(make_model(), TrainingArguments("out", per_device_train_batch_size=8), train_dataset=Rows()).train()
"""


@pytest.mark.parametrize(
    "why", [w if "distributed" in w or "reader" in w else pytest.param(w, marks=pytest.mark.long) for w in UNSAFE]
)
def test_a_script_that_is_not_safe_to_fork_is_described_all_the_same_and_not_run_twice(machine, tmp_path, why):
    with Standing(tmp_path, machine, TRAINING + TRAIN + textwrap.dedent(UNSAFE[why])) as standing:
        described = standing.describe(check_snapshot=False)
        assert described.train_rows == 64
        assert standing.launcher.snapshot is None
        assert standing.noted("runs") == ["once"]
        assert any(text.endswith(f": {why}") for text in standing.said), standing.said
        assert standing.template == {}


def test_idle_executors_and_the_monitor_of_a_progress_bar_are_harmless(machine, tmp_path):
    source = """
    import concurrent.futures, threading, tqdm
    pool = concurrent.futures.ThreadPoolExecutor(2)
    list(pool.map(abs, range(4)))
    bar = tqdm.tqdm(range(3))
    next(iter(bar))
    note("threads", threading.active_count())
    train()
    """
    with Standing(tmp_path, machine, TRAINING + TRAIN + textwrap.dedent(source)) as standing:
        standing.describe()
        assert int(standing.noted("threads")[0]) >= 3
        ran(standing.probe(schedule=SHORT))


# ---- held against a fresh start ----


MiB = 2**20


def measurement(outcome=Outcome.FITS, peak: int | None = 1000 * MiB, seconds=(1.0, 1.1)) -> Measurement:
    phases = () if peak is None else (PhaseRecord("train", 1.0, process_bytes=peak),)
    speed = Speed(8, seconds) if seconds else None
    return Measurement("1", "baseline", Candidate({}), outcome, 9.0, phases=phases, train_speed=speed)


@pytest.mark.parametrize(
    ("forked", "fresh", "expected"),
    [
        (measurement(), measurement(), None),
        (measurement(peak=1050 * MiB), measurement(), None),
        (measurement(peak=1060 * MiB), measurement(), f"peak {1060 * MiB} bytes against {1000 * MiB} bytes"),
        (measurement(peak=940 * MiB), measurement(), f"peak {940 * MiB} bytes against {1000 * MiB} bytes"),
        (measurement(peak=115 * MiB), measurement(peak=100 * MiB), None),  # malloc keeps so much by chance
        (measurement(peak=117 * MiB), measurement(peak=100 * MiB), f"peak {117 * MiB} bytes against {100 * MiB} bytes"),
        (measurement(peak=30), measurement(peak=20), None),  # what malloc keeps is no share of it
        (measurement(peak=None), measurement(), None),
        (measurement(seconds=(1.4, 9.0)), measurement(), None),  # the fastest window decides
        (measurement(seconds=(3.0, 3.1)), measurement(), "steps take 3.00 times as long"),
        (measurement(), measurement(seconds=(3.0, 3.1)), "steps take 0.33 times as long"),
        (measurement(Outcome.CONTAMINATED, seconds=(3.0,)), measurement(), None),
        (
            measurement(Outcome.CONTAMINATED, peak=1200 * MiB),
            measurement(),
            f"peak {1200 * MiB} bytes against {1000 * MiB} bytes",
        ),
        (measurement(seconds=()), measurement(), None),
        (measurement(Outcome.CRASHED, None, ()), measurement(), "crashed against fits"),
        (measurement(), measurement(Outcome.TIMEOUT, None, ()), "fits against timeout"),
        (measurement(Outcome.CRASHED, None, ()), measurement(Outcome.TIMEOUT, None, ()), None),
        (measurement(Outcome.OVER_BUDGET), measurement(), None),
        (measurement(), measurement(Outcome.DEVICE_OOM, None, ()), None),
    ],
)
def test_a_probe_of_the_snapshot_differs_from_a_fresh_one_in_outcome_memory_or_time(forked, fresh, expected):
    assert difference_of(forked, fresh) == expected


SLOW = """
import time

BEGAN = os.getpid()

class Slow(TrainerCallback):
    def on_step_begin(self, *given, **named):
        time.sleep(0.02 if os.getpid() == BEGAN else 0.1)

Trainer(make_model(), TrainingArguments("out", per_device_train_batch_size=8), train_dataset=Rows(),
        callbacks=[Slow()]).train()
"""


class Hearing(Listener):
    """Keeps what is told, and stops the search at the first probe after the snapshot has been dropped."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.measurements: list[Measurement] = []

    def said(self, text: str) -> None:
        self.texts.append(text)

    def probe_ended(self, measurement: Measurement, best: Measurement | None) -> None:
        self.measurements.append(measurement)
        dropped = any("does not measure as a fresh start does" in text for text in self.texts)
        if dropped or len(self.measurements) > 4:
            raise KeyboardInterrupt


@pytest.mark.long
def test_a_search_whose_snapshot_measures_otherwise_says_so_and_goes_on_without_it(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    standing = Standing(tmp_path, machine, TRAINING + SLOW)
    heard = Hearing()
    with pytest.raises(Interrupted):
        autofit.search(
            command=("python", str(standing.folder / "train.py")),
            device="cpu",
            budget="2GB",
            max_probes=8,
            out=tmp_path / "run",
            listener=heard,
        )
    first, canary, *rest = heard.measurements
    if Outcome.CONTAMINATED in (first.outcome, canary.outcome):
        pytest.skip("others use this machine, so that its times say nothing")
    assert any("does not measure as a fresh start does (steps take" in text for text in heard.texts), heard.texts
    assert (first.purpose, first.start) == ("baseline", "snapshot")
    assert (canary.purpose, canary.start) == ("canary", "fresh")
    assert rest and all(m.start in ("fork", "fresh") and m.outcome is Outcome.FITS for m in rest)


# ---- what one probe leaves must not reach the next ----

WRITING = (
    TRAINING
    + """
import concurrent.futures, threading

arguments = TrainingArguments("out", per_device_train_batch_size=8)
folder = arguments.output_dir
os.makedirs(folder, exist_ok=True)
if case("written") != "nothing":
    with open(os.path.join(folder, "vocabulary.txt"), "w") as file:
        file.write("before")

class Write(TrainerCallback):
    def on_train_begin(self, *given, **named):
        note("found", ",".join(sorted(os.listdir(folder))) + " " + open(os.path.join(folder, "vocabulary.txt")).read())
        with open(os.path.join(folder, "vocabulary.txt"), "a") as file:
            file.write(" and after")
        os.makedirs(os.path.join(folder, "cache"))

Trainer(make_model(), arguments, train_dataset=Rows(), callbacks=[Write()]).train()
"""
)


def test_no_probe_finds_what_another_has_written_to_the_output_directory(machine, tmp_path):
    with Standing(tmp_path, machine, WRITING) as standing:
        standing.describe()
        for _ in range(3):
            ran(standing.probe())
        assert standing.noted("found") == ["vocabulary.txt before"] * 3
        folders = [path.name for path in (tmp_path / "template").iterdir()]
    left = [path for path in tmp_path.rglob("*") if path.name.startswith("output")]
    assert left == [], (left, folders)


def test_an_output_that_cannot_be_restored_costs_the_snapshot_and_not_the_probe(machine, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with Standing(tmp_path, machine, WRITING) as standing:
        standing.describe()
        monkeypatch.setattr("autofit.launch.launcher.restore_output", full)
        ran(standing.probe())
        assert standing.launcher.snapshot is None
        assert "could not be restored: No space left on device" in standing.launcher.lost
        ran(standing.probe(), "fork", "fresh")


BUSY = """
import concurrent.futures, threading

held = threading.Event()
pool = concurrent.futures.ThreadPoolExecutor(1)
"""
TAKES_WORK = """
class Prepares(Trainer):
    def __init__(self, *given, **named):
        pool.submit(held.wait)
        super().__init__(*given, **named)

trainer = Prepares(make_model(), TrainingArguments("out", per_device_train_batch_size=8), train_dataset=Rows())
"""


def test_an_executor_that_works_makes_a_fork_unsafe(machine, tmp_path):
    source = TRAINING + BUSY + "pool.submit(held.wait)\n" + TRAIN + "import atexit\nhold = atexit\ntrain()\n"
    with Standing(tmp_path, machine, source) as standing:
        standing.describe(check_snapshot=False)
        assert standing.launcher.snapshot is None
        assert any("thread" in text for text in standing.said), standing.said


def test_a_trainer_that_sets_an_executor_to_work_is_forked_before_it_does(machine, tmp_path):
    source = TRAINING + BUSY + TAKES_WORK + "trainer.train()\n"
    with Standing(tmp_path, machine, source) as standing:
        standing.describe()
        assert INNER not in standing.template and OUTER in standing.template
        ran(standing.probe())
        ran(standing.probe({"bf16": True}))


def test_values_that_a_script_changes_between_two_trainers_do_not_undo_the_candidate(machine, tmp_path):
    source = """
    arguments = TrainingArguments("out", per_device_train_batch_size=4, learning_rate=0.1)
    Trainer(make_model(), arguments, train_dataset=Rows())
    arguments.per_device_train_batch_size = 2
    arguments.learning_rate = 0.2
    Trainer(make_model(), arguments, train_dataset=Rows(), callbacks=[Seen()]).train()
    """
    with Standing(tmp_path, machine, TRAINING + textwrap.dedent(source)) as standing:
        standing.describe(check_snapshot=False)
        ran(standing.probe({"per_device_train_batch_size": 8}), "snapshot", "fork", "fresh")
        seen = standing.seen()
        assert seen["batches"] == [8] and seen["rate"] == 0.2


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # which keeps connections open

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Nothing: it is no part of the test's output."""


class OnlineLauncher(OneThreadLauncher):
    def environment(self) -> dict[str, str]:
        return {**super().environment(), "HF_HUB_OFFLINE": "0"}


def test_connections_that_a_hub_client_has_kept_open_do_not_cost_the_snapshot(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = f"""
        from huggingface_hub.utils import get_session
        get_session().get("http://127.0.0.1:{server.server_port}/config.json").raise_for_status()
        import psutil
        note("kept", len(psutil.Process().net_connections()))
        arguments = TrainingArguments("out", per_device_train_batch_size=8)
        trainer = Trainer(make_model(), arguments, train_dataset=Rows())
        get_session().get("http://127.0.0.1:{server.server_port}/config.json").raise_for_status()
        trainer.train()
        """
        with Standing(tmp_path, machine, TRAINING + textwrap.dedent(source), make=OnlineLauncher) as standing:
            standing.describe()
            ran(standing.probe())
        assert standing.noted("kept") == ["1"]
        server.shutdown()
