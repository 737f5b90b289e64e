"""The run directory under crashes, damage, other versions and other processes."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from landscapes import make_description

from autofit import codec
from autofit.api import Result
from autofit.errors import RunDirectoryError, UsageError
from autofit.records import (
    Budget,
    Candidate,
    EvaluationGrowth,
    Machine,
    Measurement,
    ModelTask,
    Outcome,
    PhaseRecord,
    Prediction,
    Selection,
    Task,
)
from autofit.store import RunDirectory, read_run, replaced_folder, run_name, write_atomically

RUN = {"identity": "abc", "command": "--model m"}
MACHINE = Machine("cpu", "cpu", 10, 10, "cpu", 2, "Linux", {})


def make_measurement(probe: str = "0001") -> Measurement:
    return Measurement(probe, "train", Candidate({"optim": "sgd"}), Outcome.FITS, 1.0)


def test_what_was_recorded_is_there_when_opened_again(tmp_path):
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        directory.record(make_measurement("0001"))
        directory.record(make_measurement("0002"))
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        assert directory.measurements == [make_measurement("0001"), make_measurement("0002")]


@pytest.mark.parametrize("cut", [1, 2, 10, 100])
def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path, cut):
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        directory.record(make_measurement("0001"))
        directory.record(make_measurement("0002"))
    journal = tmp_path / "run/journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        assert [m.probe for m in directory.measurements] == ["0001"]
        directory.record(make_measurement("0003"))
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        assert [m.probe for m in directory.measurements] == ["0001", "0003"]


def test_a_damaged_line_in_the_middle_is_refused_by_its_number(tmp_path):
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        for probe in ("0001", "0002", "0003"):
            directory.record(make_measurement(probe))
    journal = tmp_path / "run/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"{half\n" + lines[2])
    with pytest.raises(RunDirectoryError, match="line 2 is damaged"):
        RunDirectory.open(tmp_path / "run", RUN)


def test_a_newer_schema_is_refused_with_the_way_out(tmp_path):
    RunDirectory.open(tmp_path / "run", RUN).close()
    (tmp_path / "run/run.json").write_text(json.dumps({**RUN, "schema": codec.SCHEMA + 1}))
    with pytest.raises(RunDirectoryError, match="upgrade autofit"):
        RunDirectory.open(tmp_path / "run", RUN)


def test_another_search_is_not_mixed_in(tmp_path):
    RunDirectory.open(tmp_path / "run", RUN).close()
    with pytest.raises(RunDirectoryError, match="another search"):
        RunDirectory.open(tmp_path / "run", {**RUN, "identity": "other"})


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="no run directory"):
        RunDirectory.open(tmp_path, RUN)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert not (tmp_path / "run.json").exists()


def test_two_searches_cannot_hold_one_directory_and_a_killed_one_lets_go(tmp_path):
    source = f"""
        import sys, time
        from pathlib import Path
        from autofit.store import RunDirectory
        directory = RunDirectory.open(Path({str(tmp_path / "run")!r}), {RUN!r})
        print("held", flush=True)
        time.sleep(60)
    """
    holder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"in use by process {holder.pid}"):
            RunDirectory.open(tmp_path / "run", RUN)
    finally:
        holder.kill()
        holder.wait()
    RunDirectory.open(tmp_path / "run", RUN).close()


def test_a_file_in_the_place_of_the_directory_is_the_users_to_mend(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UsageError, match="give another --out"):
        RunDirectory.open(tmp_path / "run", RUN)


def test_a_full_disk_loses_no_earlier_measurement_and_says_how_to_go_on(tmp_path, monkeypatch):
    directory = RunDirectory.open(tmp_path / "run", RUN)
    directory.record(make_measurement("0001"))
    real = os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError, match="it resumes"):
        directory.record(make_measurement("0002"))
    monkeypatch.setattr(os, "fsync", real)
    assert [m.probe for m in directory.measurements] == ["0001"]
    directory.record(make_measurement("0003"))
    directory.close()
    assert [m.probe for m in read_run(tmp_path / "run")[1]] == ["0001", "0003"]


def test_folders_of_probes_that_never_ended_are_kept(tmp_path):
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        assert directory.new_probe().name == "0001"
        assert directory.new_probe().name == "0002"
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        assert directory.new_probe().name == "0003"


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    target = tmp_path / "file.json"
    write_atomically(target, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "best"
    with replaced_folder(folder) as draft:
        (draft / "a").write_text("1")
    with pytest.raises(ValueError, match="no"), replaced_folder(folder) as draft:
        (draft / "b").write_text("2")
        raise ValueError("no")
    assert [p.name for p in folder.iterdir()] == ["a"]
    with replaced_folder(folder) as draft:
        (draft / "c").write_text("3")
    assert [p.name for p in folder.iterdir()] == ["c"]
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_the_same_task_and_budget_have_the_same_name_and_others_another():
    task = Task(model=ModelTask("org/m", {}, "causal-lm", 8, "float32", 10))
    budget = Budget(10**9, 10**9, text="1GB")
    name = run_name(task, budget, MACHINE)
    assert name == run_name(task, Budget(10**9, 5, text="1GB"), MACHINE)
    assert name != run_name(task, Budget(2 * 10**9, 10**9, text="2GB"), MACHINE)
    assert "/" not in name


def test_a_run_directory_of_the_first_schema_stays_readable():
    run, measurements, _ = read_run(Path(__file__).parent / "data" / "schema-1")
    assert run["command"] == "examples/text_classification.py"
    assert [m.probe for m in measurements] == ["0001", "0002", "0003"]
    assert all(m.outcome is Outcome.FITS and m.train_speed.per_second > 10 for m in measurements)


def make_prediction(**changes) -> Prediction:
    made = Prediction(
        candidate=Candidate({"optim": "sgd"}),
        device="cuda-8.6",
        source="rewritten",
        phases=(PhaseRecord("train", 0.0, 4, 5, 6, 0), PhaseRecord("evaluate", 0.0, 1, 2, 3, 0)),
        growth=EvaluationGrowth(8, 80, 0.5, 0.5, 40, 40, {"predictions": 0.5}),
        step_seconds=0.25,
        categories={"parameters": 3},
        modules=(("model.layers", 2),),
        machine=MACHINE.key,
    )
    return replace(made, **changes)


def test_a_prediction_comes_back_from_the_journal_as_it_went_in(tmp_path):
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        directory.record(make_measurement("0001"))
        directory.record_prediction(make_prediction())
    _, measurements, predictions = read_run(tmp_path / "run")
    assert measurements == [make_measurement("0001")]
    assert predictions == [make_prediction()]


def test_predictions_of_an_older_journal_are_of_no_machine_and_one_of_its_own_has_none(tmp_path):
    with RunDirectory.open(tmp_path / "run", RUN) as directory:
        directory.record_prediction(make_prediction())
    journal = tmp_path / "run/journal.jsonl"
    entry = json.loads(journal.read_text())
    del entry["record"]["machine"]
    journal.write_text(json.dumps(entry) + "\n")
    assert read_run(tmp_path / "run")[2] == [make_prediction(machine="")]
    assert read_run(Path(__file__).parent / "data" / "schema-1")[2] == []


def test_a_frame_joins_predictions_with_what_the_same_machine_measured(tmp_path):
    other = replace(MACHINE, versions={"torch": "9.9"})
    measurements = [replace(make_measurement(p), device=m.key) for p, m in (("0001", MACHINE), ("0002", other))]
    predictions = [
        make_prediction(),
        make_prediction(machine="", phases=(PhaseRecord("train", 0.0, 7, 8, 9, 0),)),  # of an older journal
    ]
    result = Result(
        tmp_path, Selection(None, None, None, None), Budget(10**9, 10**9), MACHINE, make_description(), measurements,
        predictions=predictions,
    )  # fmt: skip
    frame = result.frame().set_index("probe")
    assert frame.loc["0001", "predicted_train_bytes"] == 6
    assert frame["predicted_train_bytes"].isna().tolist() == [False, True]
