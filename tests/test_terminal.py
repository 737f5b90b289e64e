"""What is printed: whole at 60 and at 120 columns, free of control characters in a pipe, and deaf to markup in names."""

import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_cases import BASELINE, BUDGET, DESCRIPTION, LARGE, MACHINE, MB, SMALL, choice, probe, selection, usual
from rich.console import Console

from autofit.launch import Progress
from autofit.records import ArgumentsSource, Candidate, Failure, ModelTask, Outcome, ScriptTask, Task
from autofit.report.outlook import PlannedStep
from autofit.report.tables import draw_plan, draw_result, shown_path, timing_text
from autofit.report.terminal import TerminalListener, make_console, probe_parts

HOSTILE = "[bold red]x[/bold red] [link=http://a]y[/link] :smile: [/] \x1b[31m\r\x07\u202e"
MODEL = Task(model=ModelTask("bert-base-uncased", {}, "text-classification", 32, "float32", 1000, seq_len=128))
TIMING = {"total": 151.2, "measured": 110.0, "overhead": 41.2, "import": 12.0, "contention": 1.2}


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def console_of(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)


def result_of(measurements, chosen, folder="runs/x", task=MODEL, description=DESCRIPTION):
    return SimpleNamespace(
        task=task,
        folder=Path(folder),
        selection=chosen,
        budget=BUDGET,
        machine=MACHINE,
        description=description,
        measurements=measurements,
        timing=TIMING,
    )


def draw(width, measurements=None, chosen=None, folder="runs/x", **script):
    usual_measurements, usual_selection = usual()
    console = console_of(width)
    draw_result(result_of(measurements or usual_measurements, chosen or usual_selection, folder, **script), console)
    return console.file.getvalue()


def listen(console, measurements, task=MODEL, folder="runs/x"):
    listener = TerminalListener(console)
    listener.prepared(task, MACHINE, BUDGET, folder, 3)
    listener.described(DESCRIPTION, BASELINE, 540)
    best = None
    for m in measurements:
        listener.probe_started(m.probe, m.purpose, m.candidate, "why", 240.0)
        listener.probe_progressed(Progress("evaluate", 4, 12.5, 1200 * MB))
        fits = m.outcome is Outcome.FITS and m.train_speed is not None
        best = m if fits and (best is None or m.train_speed.per_second > best.train_speed.per_second) else best
        listener.probe_ended(m, best)
    listener.said("the same configuration again")
    listener.close()
    return console.file.getvalue()


def words(text):
    return " ".join(text.split())


# The result


def test_the_table_has_one_line_for_each_candidate_where_there_is_room():
    text = draw(200)
    assert re.search(r"^best +32×1 +off +41\.2 ±0\.2% +2\.1× +402 MB +~412 MB +310 +fits +0006$", text, re.M)
    assert re.search(
        r"^yours +8×4 +off +19\.6 ±0\.5% +1\.00× +300 MB +~380 MB +120 +fits +52% slower +0005$", text, re.M
    )
    assert re.search(r"^ +32×1 +on +– +device_oom +0004$", text, re.M)
    assert "the same for all: precision fp32 · attention sdpa" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_number_is_lost_at_any_width(width):
    text = words(draw(width))
    for expected in (
        "41.2 ±0.2%",
        "19.6 ±0.5%",
        "2.1×",
        "402 MB",
        "~412 MB",
        "~380 MB",
        "250 MB",
        "device_oom",
        "0.46×",
    ):
        assert expected in text
    for expected in (
        "8 → 32",
        "tried to allocate 101 MB",
        "runs/x/probes/0004",
        "2 min 31 s",
        "the fastest of 3 that fit",
    ):
        assert expected in text
    assert "…" not in text


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_keeps_to_the_width(width):
    lines = draw(width).splitlines()
    assert max(len(line) for line in lines if "HfArgumentParser" not in line and "json.load" not in line) <= width
    assert sum("parse_json_file('" in line and line.endswith("')") for line in lines) == 1


def test_a_pipe_gets_no_control_characters():
    text = draw(120, folder=f"runs/{HOSTILE}") + listen(console_of(120), usual()[0], folder=HOSTILE)
    assert all(c == "\n" or c.isprintable() for c in text)


@pytest.mark.parametrize("width", [60, 120])
def test_markup_in_names_is_printed_as_it_is(width):
    strange = Candidate({**LARGE.values, "attention": HOSTILE})
    failure = Failure("train", 1, "RuntimeError", HOSTILE)
    measurements = [
        probe(1, BASELINE, "baseline", rates=(20.0, 20.2), train=300),
        probe(2, strange, rates=(40.0, 40.1), train=300),
        probe(3, SMALL, outcome=Outcome.CRASHED, failure=failure),
    ]
    chosen = selection(choice(strange, 40.0, 2.0), reasons={SMALL.key: HOSTILE}, notes=(HOSTILE,))
    result = result_of(measurements, chosen, folder=f"runs/{HOSTILE}")
    console = console_of(width)
    draw_result(result, console)
    model = Task(model=replace(MODEL.model, model=HOSTILE))
    script = Task(script=ScriptTask(("train.py", HOSTILE), "/x"))
    listener = TerminalListener(console)
    listener.said(HOSTILE)
    for task in (model, script):
        listen(console, measurements, task, folder=HOSTILE)
    text = console.file.getvalue()
    assert all(c == "\n" or c.isprintable() for c in text)
    seen = words(text)
    assert seen.count("[bold red]x[/bold red] [link=http://a]y[/link] :smile: [/] [31m") >= 8


def test_a_terminal_gets_colours_and_NO_COLOR_takes_them_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        console = Console(file=Screen(), width=120, force_terminal=True, color_system="256", markup=False)
        draw_result(result_of(*usual()), console)
        assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", console.file.getvalue())) is (not no_color)


def test_a_judged_budget_is_told_below_the_table():
    measurements = [probe(1, BASELINE, "baseline", rates=(20.0,), cap="judged")]
    assert "budget: judged, not enforced" in words(draw(60, measurements, selection(choice(BASELINE, 20.0, None))))


def test_the_difference_is_left_out_where_there_is_none():
    assert "in place of yours" not in draw(120, usual()[0], selection(choice(BASELINE, 20.0, None)))
    assert "in place of yours" in draw(120)


def test_a_busy_machine_is_told_on_the_last_line():
    disturbed = [replace(m, outcome=Outcome.CONTAMINATED) if m.outcome is Outcome.FITS else m for m in usual()[0]]
    told = draw(200, disturbed).splitlines()[-1]
    assert told.startswith("the machine was busy: 5 of 6 probes were disturbed")
    assert "busy" not in draw(200)


def test_a_script_is_told_its_own_command_with_the_settings_in_it(tmp_path):
    own = tmp_path / "mine.json"
    own.write_text('{"per_device_train_batch_size": 4}')
    task = Task(script=ScriptTask(("train.py", "mine.json"), str(tmp_path)))
    described = replace(DESCRIPTION, source=ArgumentsSource("json", str(own)))
    text = draw(200, folder=tmp_path / "run", task=task, description=described)
    after = text[text.index("next:") :]
    assert "mine.json is your mine.json with the tuned fields" in after
    assert re.search(r"^ +python train.py \S*mine\.json$", after, re.MULTILINE)
    assert "HfArgumentParser" not in text


def test_a_probe_that_did_not_run_tells_no_peak():
    parts = probe_parts(probe(1, LARGE, outcome=Outcome.DEVICE_OOM, train=200), None, BASELINE, "MB")
    assert not any("peak" in part for part in parts)


def test_time_is_told_as_far_as_it_is_known():
    told = (
        "search 2 min 31 s = measured 1 min 50 s + overhead 41 s (of which import 12 s); "
        "contention: threads waited 1.2 s for a processor, all of them added up"
    )
    assert timing_text(TIMING) == told
    assert timing_text({"total": 3.0}) == "search 3.0 s"


def test_a_path_below_the_working_directory_is_told_relative_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "runs" / "x") == "runs/x"
    assert shown_path("runs/x") == "runs/x"
    assert shown_path("/elsewhere/x") == "/elsewhere/x"


# Progress


def test_a_probe_is_one_line_in_a_pipe():
    measurements, _ = usual()
    lines = [line for line in listen(console_of(200), measurements).splitlines() if re.match(r"\d{4} ", line)]
    assert [line[:4] for line in lines] == [m.probe for m in measurements]
    assert lines[0].endswith(
        "baseline: your settings · fits · 19.7 samples/s · evaluation 120 rows/s · peak ~380 MB · 12 s · best so far"
    )
    assert lines[3].endswith(
        "train: batch 32×1, ckpt on · device_oom in the backward pass · 12 s · best so far 41.2 (0002)"
    )


def test_before_anything_fits_there_is_no_best_so_far():
    failed = probe(1, BASELINE, "baseline", Outcome.CRASHED)
    assert not any("best" in part for part in probe_parts(failed, None, BASELINE, "MB"))


def test_a_disturbed_probe_says_by_what():
    disturbed = replace(
        probe(1, LARGE, outcome=Outcome.CONTAMINATED), notes=("rows: sampled", "waited 30% of the time")
    )
    parts = probe_parts(disturbed, None, BASELINE, "MB")
    assert "waited 30% of the time" in parts and "rows: sampled" not in parts


def test_the_facts_that_the_baseline_noted_are_told_once_after_its_line():
    noted = ("evaluation: val, the largest of 3 sets", "rows: the longest of 2000 sampled from 4096")
    measurements = [replace(m, notes=noted) for m in usual()[0]]
    lines = listen(console_of(200), measurements).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("0001  "))
    assert lines[first + 1 : first + 3] == [f"- {note}" for note in noted]
    assert sum(noted[0] in line for line in lines) == 1


def test_the_result_tells_what_its_chosen_probes_noted():
    measurements = [replace(m, notes=("the projection covers only these",)) for m in usual()[0]]
    assert draw(120, measurements).count("the projection covers only these") == 1


def test_the_time_that_is_left_is_told_once_after_the_baseline_in_a_pipe_too():
    lines = listen(console_of(200), usual()[0]).splitlines()
    told = [n for n, line in enumerate(lines) if "left" in line]
    assert [lines[n] for n in told] == ["- about 4 min left (an estimate)"]
    assert lines[told[0] - 1].startswith("0001  ") and lines[told[0] + 1].startswith("0002  ")


def test_a_resumed_search_tells_the_time_before_its_first_probe():
    listener = TerminalListener(console := console_of(200))
    listener.probe_started("0007", "train", LARGE, "why", 3.0)
    assert console.file.getvalue() == "- about 5 s left (an estimate)\n"


def test_sizes_in_messages_of_children_are_told_in_the_users_unit():
    disturbed = replace(probe(1, LARGE, outcome=Outcome.CONTAMINATED), notes=("others' memory changed by 50 MiB",))
    text = listen(console_of(200), [disturbed]) + draw(200)
    assert "changed by 52.4 MB" in text and "tried to allocate 101 MB" in text
    assert "MiB" not in text


@pytest.mark.parametrize("width", [60, 120])
def test_the_head_tells_the_task_the_machine_and_what_the_budget_counts(width):
    text = words(listen(console_of(width), []))
    for expected in (
        "bert-base-uncased",
        "128 tokens",
        "Some CPU",
        "torch 2.9.0",
        "500 MB",
        "above its state before training",
    ):
        assert expected in text
    for expected in (
        "runs/x",
        "3 measurements found there",
        "BertForSequenceClassification",
        "109 M parameters",
        "540",
    ):
        assert expected in text
    listener = TerminalListener(console := console_of(200))
    listener.prepared(MODEL, replace(MACHINE, device="cuda:0"), BUDGET, "runs/x", 0)
    assert "reserves on the device, and its context" in console.file.getvalue()
    assert "found there" not in console.file.getvalue()


def test_a_default_budget_is_said_to_be_one():
    listener = TerminalListener(console := console_of(200))
    listener.prepared(MODEL, MACHINE, replace(BUDGET, text=""), "runs/x", 0)
    assert "500 MB (the default" in console.file.getvalue()


def test_a_terminal_shows_where_the_running_probe_is_on_one_line_that_is_removed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=Screen(), width=68, force_terminal=True, color_system=None)
    listener = TerminalListener(console)
    listener.prepared(MODEL, MACHINE, BUDGET, "runs/x", 0)
    listener.described(DESCRIPTION, BASELINE, 540)
    head = console.file.getvalue()
    listener.probe_started("0001", "baseline", LARGE, "why", 60.0)
    listener.probe_progressed(Progress("evaluate", 4, 12.5, 1200 * MB))
    nothing, first, last = console.file.getvalue().removeprefix(head).split("\r\x1b[2K")
    assert (nothing, first) == ("", "0001 baseline · about 1 min left · batch 32×1 · why")
    assert last == "0001 baseline · evaluate step 4 · 12 s · host 1.20 GB of 12.0 GB"  # the rest has no room
    listener.probe_ended(probe(1, LARGE, rates=(40.0,)), None)
    assert console.file.getvalue().removeprefix(head).split(last)[1].startswith("\r\x1b[2K0001  train: ")


def test_a_pipe_shows_nothing_while_a_probe_runs():
    listener = TerminalListener(console := console_of(60))
    listener.probe_started("0001", "baseline", LARGE, "why", None)
    listener.probe_progressed(Progress("train", 1, 1.0, MB))
    listener.close()
    assert console.file.getvalue() == ""


def test_a_pipe_is_as_wide_as_COLUMNS_or_wide_enough_for_one_line(monkeypatch):
    for columns, width in (("", 200), ("72", 72), ("0", 200), ("wide", 200)):
        monkeypatch.setenv("COLUMNS", columns)
        assert make_console(io.StringIO()).width == width


# The plan


def plan_of(steps, seconds):
    return SimpleNamespace(budget=BUDGET, baseline=BASELINE, candidates=steps, estimated_seconds=seconds)


@pytest.mark.parametrize("width", [60, 120, 200])
def test_a_plan_is_told_in_its_order_as_estimates(width):
    console = console_of(width)
    steps = [
        PlannedStep(BASELINE, "baseline", "the user's own settings", 300 * MB, 1.0),
        PlannedStep(SMALL, "train", "the smallest", 620 * MB, 2.0),
        PlannedStep(LARGE, "evaluate", "a larger evaluation batch", 420 * MB, 0.5),
    ]
    draw_plan(plan_of(steps, 610.0), console)
    text = words(console.file.getvalue())
    places = [text.index(t) for t in ("1 baseline 8×4", "2 train 2×16", "3 evaluate 32×1")]
    assert places == sorted(places)
    for expected in ("~300 MB", "~1.00×", "~620 MB", "~0.50×", "above the budget by estimate", "~420 MB", "~2.0×"):
        assert expected in text
    assert "a larger evaluation batch" in text
    assert "nothing was probed" in text and "a search takes about 10 min, an estimate" in text


def test_a_long_plan_says_how_much_more_there_is():
    console = console_of(120)
    draw_plan(plan_of([PlannedStep(BASELINE, "train", "why", 300 * MB, 1.0)] * 33, None), console)
    assert "and 13 more" in console.file.getvalue()
    assert "a search takes" not in console.file.getvalue()


def test_a_plan_of_which_nothing_is_left_says_so():
    draw_plan(plan_of([], 60.0), console := console_of(120))
    assert "no candidate is left to try" in console.file.getvalue()
