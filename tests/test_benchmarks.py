"""The benchmarks run, say what they measure, and never pass where they measured nothing."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.name != "common.py")
GB = 10**9


def run(script: str, *options: str, limit: float = 60, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
    )


@pytest.fixture
def acceptance(monkeypatch):
    """The module `benchmarks/gpu_acceptance.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("gpu_acceptance")
    for name in ("gpu_acceptance", "acceptance.predictions", "acceptance", "common"):
        sys.modules.pop(name, None)


class FakeNvml:
    """A device that 2 GB of another process lie on, and on which a second process takes 1, 3, then 2 GB."""

    def __init__(self, lists_processes: bool) -> None:
        self._lists, self._began, self._held = lists_processes, None, 0

    def used_bytes(self, device_id: str) -> int:
        if self._began is None:  # the reading before the probe
            self._began = time.monotonic()
            return 2 * GB
        passed = time.monotonic() - self._began
        self._held = (1 if passed < 0.1 else 3 if passed < 0.3 else 2) * GB
        return 2 * GB + self._held

    def processes(self, device_id: str) -> tuple[tuple[int, int], ...]:
        if not self._lists:
            return ()
        return ((7, 2 * GB), (8, self._held)) if self._held else ((7, 2 * GB),)


def watch_fake(module, lists_processes: bool):
    with module.Witness(FakeNvml(lists_processes), "GPU-0") as witness:
        time.sleep(0.5)
    return witness


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_help_states_the_claim_and_how_to_run_it_at_once(script):
    began = time.monotonic()
    told = run(script, "--help")
    assert told.returncode == 0
    assert "Claim: " in told.stdout
    assert f"python benchmarks/{script}" in told.stdout
    assert {"--quick", "--check", "--out"} <= set(told.stdout.replace(",", " ").split())
    assert time.monotonic() - began < 5


def test_gpu_acceptance_without_a_gpu_ends_with_2_and_one_clear_line(tmp_path):
    out = tmp_path / "result.json"
    told = run("gpu_acceptance.py", "--out", str(out), CUDA_VISIBLE_DEVICES="")
    assert told.returncode == 2
    lines = told.stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gpu_acceptance was not run: cuda ")
    assert told.stderr == ""
    assert not out.exists()


def test_help_time_tells_its_figure_and_writes_machine_facts_that_name_no_machine(tmp_path):
    out = tmp_path / "result.json"
    told = run("help_time.py", "--quick", "--check", "--out", str(out))
    assert told.returncode == 0, told.stdout + told.stderr
    result = json.loads(out.read_text())
    assert result["holds"] is True
    assert f"{result['processor_seconds']['median']:.2f} s" in told.stdout.splitlines()[-1]
    assert {"cpu_name", "versions"} <= set(result["machine"])
    assert "device_id" not in result["machine"]
    assert os.uname().nodename not in out.read_text()
    assert str(ROOT) not in out.read_text()


def test_finished_parts_are_not_measured_again_and_those_of_another_machine_are_ignored(acceptance, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"identity": "this", "parts": {"8GB": {"holds": True}}}))
    assert acceptance.read_results(path, "this")["parts"] == {"8GB": {"holds": True}}
    assert acceptance.read_results(path, "another") == {}
    path.write_text('{"identity": "this", "par')
    assert acceptance.read_results(path, "this") == {}
    assert acceptance.read_results(tmp_path / "missing.json", "this") == {}


def test_the_witness_sees_the_peak_of_the_new_process_alone(acceptance):
    witness = watch_fake(acceptance, lists_processes=True)
    assert witness.process_bytes == witness.seen_bytes == 3 * GB


def test_the_witness_takes_the_growth_of_the_device_where_no_process_is_listed(acceptance):
    witness = watch_fake(acceptance, lists_processes=False)
    assert witness.process_bytes is None
    assert witness.seen_bytes == 3 * GB


def test_the_witness_sees_nothing_where_there_is_no_device(acceptance):
    with acceptance.Witness(None, None) as witness:
        pass
    assert witness.seen_bytes is None


@pytest.mark.long
def test_probe_overhead_runs_and_its_figures_are_those_of_its_samples(tmp_path):
    out = tmp_path / "result.json"
    told = run("probe_overhead.py", "--quick", "--out", str(out), limit=280)
    assert told.returncode == 0, told.stdout + told.stderr
    result = json.loads(out.read_text())
    assert [sample["how"] for sample in result["samples"]] == ["fresh", "fork", "fork", "fresh"]
    for sample in result["samples"]:
        assert 0 < sample["before_first_step_seconds"] < sample["first_step_seconds"] < sample["seconds"]
    fresh, fork = (result["seconds"][how]["before_first_step"]["median"] for how in ("fresh", "fork"))
    assert 0 < fork < fresh
    assert result["ratios"]["before_first_step"] == pytest.approx(fresh / fork)
    assert f"{fresh / fork:.1f}×" in told.stdout.splitlines()[-1]


@pytest.mark.long
def test_script_overhead_runs_and_its_figures_are_those_of_its_samples(tmp_path):
    out = tmp_path / "result.json"
    told = run("script_overhead.py", "--quick", "--out", str(out), limit=280)
    assert told.returncode == 0, told.stdout + told.stderr
    result = json.loads(out.read_text())
    assert [sample["how"] for sample in result["samples"]] == ["fresh", "snapshot", "snapshot", "fresh"]
    for sample in result["samples"]:
        assert 0 < sample["before_first_step_seconds"] < sample["overhead_seconds"]
        assert sample["overhead_seconds"] == pytest.approx(sample["seconds"] - sample["measured_seconds"])
    fresh, snapshot = (result["seconds"][how]["overhead"]["median"] for how in ("fresh", "snapshot"))
    assert 0 < snapshot < fresh
    assert result["ratios"]["overhead"] == pytest.approx(fresh / snapshot)
    assert f"{fresh / snapshot:.1f}×" in told.stdout.splitlines()[-1]
    assert "CUDA" in result["note"]


@pytest.mark.long
def test_the_acceptance_holds_on_the_cpu_and_resumes_at_once(tmp_path):
    options = ("--device", "cpu", "--quick", "--out", str(tmp_path / "result.json"))
    told = run("gpu_acceptance.py", *options, limit=280)
    assert told.returncode == 0, told.stdout + told.stderr
    began = time.monotonic()
    again = run("gpu_acceptance.py", *options)
    assert again.returncode == 0
    assert again.stdout.count("finished before") == 2
    assert time.monotonic() - began < 5
