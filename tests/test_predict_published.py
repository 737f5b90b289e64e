"""The rows of published measurements, and what the benchmark makes of them before anything is run."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setups(monkeypatch):
    """The module `benchmarks/published/setups.py`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("published.setups")
    for name in [name for name in sys.modules if name.partition(".")[0] == "published"]:
        sys.modules.pop(name)


def test_every_row_names_its_source_and_a_metric_that_is_known(setups):
    rows = setups.read_rows()
    assert len(rows) >= 23
    for row in rows:
        assert row.source
        assert row.metric in setups.COUNTERS
        assert row.value_mib > 0


def test_every_row_has_a_program_or_a_reason_why_not(setups):
    for row in setups.read_rows():
        setup = setups.set_up(row)
        assert setup.program or setup.unclear, row.name
        if setup.program:
            assert (ROOT / "benchmarks" / "published" / f"{setup.program}.py").exists()


def test_a_clear_row_whose_metric_counts_the_context_knows_the_context(setups):
    for row in setups.read_rows():
        setup = setups.set_up(row)
        if setups.COUNTERS[row.metric] == setups.PROCESS and not setup.unclear:
            assert setup.context_mib


def test_no_setup_knows_what_was_measured(setups):
    """Options may come from every column but the value, which only cards' capacities are read from."""
    for row in setups.read_rows():
        if setups.COUNTERS[row.metric] == setups.FITS:
            continue
        other = type(row)(**{**vars(row), "value_mib": 1.0})
        assert setups.set_up(other) == setups.set_up(row)


def test_a_row_of_an_unknown_source_is_unclear(setups):
    row = setups.read_rows()[0]
    setup = setups.set_up(type(row)(**{**vars(row), "source": "somewhere else"}))
    assert setup.program is None
    assert setup.unclear


@pytest.mark.long
def test_quick_rows_hold_the_claim_and_figures_are_those_of_the_rows(tmp_path):
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "predict_published.py"),
        "--quick",
        "--check",
        "--out",
        str(out),
    ]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert told.returncode == 0, told.stdout + told.stderr
    result = json.loads(out.read_text())
    for row in result["rows_of_the_file"]:
        assert row["error"] == pytest.approx(row["predicted_mib"] / row["measured_mib"] - 1)
    assert f"worst {100 * result['worst_error']:+.2f} %" in told.stdout.splitlines()[-1]
    assert str(ROOT) not in out.read_text()
