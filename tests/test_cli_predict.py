"""`autofit predict` from the command line: what it takes, what it prints, and one real prediction through real children."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import make_task
from report_cases import BASELINE, DESCRIPTION
from test_forecast import GIB, RTX, small_trace

from autofit import api, errors
from autofit.cli import commands
from autofit.cli.options import PREDICT_EPILOG, PREDICT_OPTIONS
from autofit.forecast import Forecast, Forecasts, PredictOptions, asking
from autofit.forecast.options import process_notes
from autofit.prediction import Verdict, make_target
from autofit.prediction.verdict import MOST_BATCH
from autofit.records import Failure, PhaseRecord, Prediction
from autofit.report.forecasts import draw_forecasts, verdict_sentence
from autofit.report.memory_plot import BUDGET_IN_SCALE, POINTS, draw_memory
from autofit.report.terminal import make_console

ROOT = Path(__file__).resolve().parent.parent
PREDICTION = Prediction(
    BASELINE,
    "cuda-8.6",
    "rewritten",
    tuple(PhaseRecord(name, 0.0, size, 2 * size, 3 * size) for name, size in (("load", GIB), ("train", 2 * GIB))),
    step_seconds=0.25,
    categories={"activations": 3 * GIB // 2, "parameters": GIB // 2},
    modules=(("encoder.layer.0", GIB), ("", GIB // 4)),
)


def answer(kind="one", label=RTX.label, trace=True, **changes):
    prediction = dataclasses.replace(PREDICTION, **changes)
    verdict = Verdict("fits", 5 * GIB, 7 * GIB, 20 * GIB)
    row = Forecast(RTX.target, label, BASELINE, prediction, verdict, 20 * GIB)
    return Forecasts(kind, make_task(), DESCRIPTION, (row,), ("assumed: much",), {}, small_trace() if trace else None)


def drawn(found, width=120):
    stream = io.StringIO()
    console = make_console(stream)
    console.width = width
    draw_forecasts(found, "GiB", console)
    return stream.getvalue()


@pytest.fixture
def fake(monkeypatch):
    def install(error=None, found=None):
        asked = []

        def predict(*, say, **options):
            asked.append(options)
            say("a shadow run")
            if error is not None:
                raise error
            return found or answer()

        monkeypatch.setattr(api, "predict", predict)
        return asked

    return install


# ---- parsing ----


def test_every_option_of_a_prediction_is_on_the_command_line_with_its_default(fake):
    asked = fake()
    assert commands.run(["predict", "--model", "gpt2"]) == 0
    assert asked == [dataclasses.asdict(PredictOptions(model="gpt2"))]


def test_options_reach_the_prediction_as_they_were_typed(fake):
    asked = fake()
    line = (
        "predict --model gpt2 --gpu t4 --batch 4 --accumulation 2 --eval-batch 16 --eval-accumulation 3 --logits argmax --precision bf16 --no-checkpointing "
        "--optim adafactor --attention eager --budget 20GB --task causal-lm --seq-len 64 --dtype float32 --lora r=8 "
        "--args a.json --eval-rows 50 --verify --processes 4"
    )
    assert commands.run(line.split()) == 0
    expected = PredictOptions(
        model="gpt2",
        gpu="t4",
        batch=4,
        accumulation=2,
        eval_batch=16,
        eval_accumulation=3,
        logits="argmax",
        precision="bf16",
        checkpointing=False,
        optim="adafactor",
        attention="eager",
        budget="20GB",
        task="causal-lm",
        seq_len=64,
        dtype="float32",
        lora_rank=8,
        args="a.json",
        eval_rows=50,
        verify=True,
        processes=4,
    )
    assert asked == [dataclasses.asdict(expected)]


def test_the_examples_in_the_help_can_be_typed(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = fake()
    examples = [line.split()[1:] for line in PREDICT_EPILOG.splitlines() if line.startswith("  autofit ")]
    assert [commands.run(example) for example in examples] == [0] * len(examples) and len(asked) == len(examples) >= 5


def test_help_tells_the_default_of_every_option():
    for option in PREDICT_OPTIONS:
        said = option.is_flag or option.name == "model" or "Default: " in option.help or option.group == "settings"
        assert said, option.name


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("predict", "nothing to predict; name a model .*or give your own command after --"),
        ("predict --gpu rtx-3090", "nothing to predict"),
        ("predict --model gpt2 -- python train.py", "exclude each other"),
        ("predict --model gpt2 --", "nothing stands after --.*autofit predict --gpu rtx-3090 -- python train.py"),
        ("predict python train.py", "'python' is no option.*put -- before.*autofit predict"),
        ("predict --model gpt2 --batch many", "'many' is not a valid integer"),
        ("predict --model gpt2 --checkpointing maybe", "'maybe' is no option"),
        ("predict --model gpt2 --budget", "--budget' requires an argument"),
        ("predict --model gpt2 --headroom 0.1", "no such option.*--headroom"),
        ("predict --model gpt2 --gpu all --plot x.html", "--plot draws one prediction"),
        ("predict --model gpt2 --gpu t4 --max-batch --plot x.html", "--plot draws one prediction"),
        ("predict --model gpt2 --gpu t4 --plot /no/such/folder/x.html", "no folder that can be written"),
        ("predict --model gpt2 --gpu t4 --plot .", "is no file"),
    ],
)
def test_a_line_that_cannot_be_served_is_one_error_line_with_the_way_out(fake, capsys, line, expected):
    asked = fake()
    assert commands.run(line.split()) == 2
    told = capsys.readouterr()
    assert (told.out, asked) == ("", [])
    assert re.fullmatch(rf"error: [^\n]*{expected}[^\n]*\n", told.err)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--gpu rtx-3091", "--gpu 'rtx-3091' is no card that autofit knows; did you mean .*rtx-3090"),
        ("--gpu rtx-3090 --batch 0", "--batch 0 makes no sense"),
        ("--gpu rtx-3090 --processes 0", "--processes 0 makes no sense"),
        ("--gpu cpu --processes 2", "--processes is for cards"),
        ("--gpu rtx-3090 --precision int4", "--precision 'int4' is not known"),
        ("--gpu rtx-3090 --budget much", "'much' is neither a size"),
        ("--gpu rtx-3090 --seq-len 100000", "more than the 1024 positions"),
        ("--gpu rtx-3090 --args /no/such/file", "--args /no/such/file cannot be read"),
    ],
)
def test_what_can_be_refused_without_a_child_is(capsys, monkeypatch, line, expected):
    monkeypatch.setattr(asking, "Launcher", None)
    assert commands.run(["predict", "--model", "gpt2", *line.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and re.fullmatch(rf"error: [^\n]*{expected}[^\n]*\n", told.err)


# ---- output ----


def test_json_is_one_object_on_stdout_while_progress_is_on_stderr(fake, capsys):
    fake()
    assert commands.run(["predict", "--model", "gpt2", "--json"]) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 1 and told.err == "- a shadow run\n"
    value = json.loads(told.out)
    assert (value["schema"], value["kind"], value["measured"]) == (1, "one", False)
    (row,) = value["forecasts"]
    assert (row["gpu"], row["calibrated"], row["peak_bytes"]) == ("rtx-3090", False, 6 * GIB)
    assert row["verdict"]["answer"] == "fits" and row["verified"] is None


def test_quiet_prints_the_answer_alone(fake, capsys):
    fake()
    assert commands.run(["predict", "--model", "gpt2", "-q"]) == 0
    told = capsys.readouterr()
    assert "a shadow run" not in told.out + told.err and "PREDICTED" in told.out


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (KeyboardInterrupt(), 130, "stopped; nothing was predicted\n"),
        (errors.WorkloadError("it takes 400 MiB", "a log"), 3, "error: it takes 419 MB\n    a log\n"),
        (errors.UsageError("no"), 2, "error: no\n"),
    ],
)
def test_an_error_is_told_on_stderr_and_is_the_exit_code(fake, capsys, error, code, expected):
    fake(error)
    assert commands.run(["predict", "--model", "gpt2", "-q", "--json", "--budget", "20GB"]) == code
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", expected)


@pytest.mark.parametrize("kind", ["one", "max-batch", "gpus"])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_answer_says_that_it_is_predicted_and_not_calibrated(kind, width):
    text = " ".join(drawn(answer(kind), width).split())
    assert "PREDICTED, nothing was measured. Uncalibrated" in text
    assert "is an estimate by formula, of which only the order counts" in text


def test_one_prediction_tells_peaks_verdict_interval_budget_categories_and_modules():
    text = drawn(answer(), 200)
    for part in ("2.00 GiB", "4.00 GiB", "6.00 GiB", "fits: ", "between 5.00 GiB and 7.00 GiB", "budget is 20.0 GiB"):
        assert part in text
    assert re.search(r"activations +1\.50 GiB +75\.0%", text) and re.search(
        r"encoder\.layer\.0 +1\.00 GiB +50\.0%", text
    )
    assert "~128 rows/s" in text and "assumed: much" in text and "(outside of modules" in text


def test_what_the_description_and_a_shadow_run_both_note_is_told_once():
    text = drawn(answer(notes=("assumed: much", "of the shadow run alone")), 200)
    assert text.count("assumed: much") == text.count("of the shadow run alone") == 1


def test_a_peak_above_the_budget_that_runs_through_is_explained():
    row = answer().rows[0]
    squeezed = dataclasses.replace(row, verdict=Verdict("borderline", 19 * GIB, 21 * GIB, 20 * GIB))
    assert "gives back what it only caches" in verdict_sentence(squeezed, "GiB")
    over = dataclasses.replace(row, verdict=Verdict("does not fit", 22 * GIB, 24 * GIB, 20 * GIB))
    assert verdict_sentence(over, "GiB").startswith("does not fit: ") and "caches" not in verdict_sentence(over, "GiB")


def test_where_evaluation_decides_that_is_told_with_the_way_out():
    phases = (*PREDICTION.phases, PhaseRecord("evaluate", 0.0, GIB, 2 * GIB, 30 * GIB))
    row = answer(phases=phases).rows[0]
    over = dataclasses.replace(row, verdict=Verdict("does not fit", 29 * GIB, 31 * GIB, 20 * GIB))
    told = verdict_sentence(over, "GiB")
    assert "evaluation decides, training alone peaks at 6.00 GiB" in told and "--logits argmax" in told
    assert "evaluation decides" not in verdict_sentence(row, "GiB")


def on_target(found, target, **changes):
    return dataclasses.replace(found, rows=(dataclasses.replace(found.rows[0], target=target, **changes),))


def test_the_interval_of_a_card_is_not_told_as_what_was_published():
    told = verdict_sentence(answer().rows[0], "GiB")
    assert "4% less or 5% more" in told and "with a margin" in told and "in published" not in told


def test_on_the_cpu_the_interval_is_that_of_a_process_beyond_its_live_tensors():
    near = Verdict("borderline", 19 * GIB, 21 * GIB, 20 * GIB)
    found = on_target(answer(), make_target(), verdict=near)
    told = verdict_sentence(found.rows[0], "GiB")
    assert "up to 28% more than its live tensors" in told
    assert "published" not in told and "torch" not in told
    assert "28%" in " ".join(drawn(found).split()).split("verdict")[0]
    assert "28% above the predicted one" in " ".join(drawn(dataclasses.replace(found, kind="max-batch")).split())
    page = draw_memory(found, "GiB")
    assert "peak of live tensors" in page and "up to 28% more" in page and "peak of the process" not in page


def test_a_largest_batch_at_the_end_of_the_search_is_told_as_at_least_that():
    candidate = BASELINE.but(per_device_train_batch_size=MOST_BATCH)
    found = on_target(answer("max-batch"), RTX.target, candidate=candidate)
    assert f"≥ {MOST_BATCH} " in drawn(found)
    assert "≥" not in drawn(answer("max-batch"))


@pytest.mark.parametrize("kind", ["one", "max-batch", "gpus"])
def test_figures_of_several_processes_say_whose_they_are(kind):
    device = dataclasses.replace(RTX.target.device, processes=4)
    found = on_target(answer(kind), dataclasses.replace(RTX.target, device=device))
    found = dataclasses.replace(found, notes=tuple(process_notes(4)))
    text = " ".join(drawn(found, 200).split())
    assert "of all 4 processes" in text and "communication" in text and "NCCL" in text
    assert "processes" not in drawn(answer(kind), 200)
    if kind == "one":
        assert "4 processes, one on each" in text and "each of the 4 processes is expected" in text
        assert "~512 rows/s of all 4 processes" in text
    assert json.loads(commands._forecasts_json(found))["forecasts"][0]["processes"] == 4


def test_a_verification_that_differs_shows_by_how_much():
    other = dataclasses.replace(PREDICTION, phases=(PhaseRecord("load", 0.0, GIB, 2 * GIB, 3 * GIB),), source="traced")
    found = answer()
    found = dataclasses.replace(found, rows=(dataclasses.replace(found.rows[0], verified=other),))
    text = drawn(found)
    assert re.search(r"load, allocated +1073741824 +1073741824 +0\n", text)
    assert re.search(r"train, reserved +4294967296 +– +–\n", text) and "not equal" in text
    failed = dataclasses.replace(other, phases=(), failure=Failure("train", None, "E", "no way"))
    found = dataclasses.replace(found, rows=(dataclasses.replace(found.rows[0], verified=failed),))
    assert "not verified: no way" in drawn(found)


HOSTILE = '<script src="http://x.example/a.js">alert(1)</script>\x1b[31m\n&"\''


def test_hostile_names_reach_neither_the_terminal_nor_the_page():
    task = make_task(model=HOSTILE)
    description = dataclasses.replace(DESCRIPTION, model_class=HOSTILE)
    candidate = BASELINE.but(optim=HOSTILE)
    found = answer(label=HOSTILE, categories={HOSTILE: 5}, modules=((HOSTILE, 5),), candidate=candidate)
    row = dataclasses.replace(found.rows[0], candidate=candidate)
    found = dataclasses.replace(
        found, task=task, description=description, notes=(HOSTILE,), failed={HOSTILE: HOSTILE}, rows=(row,)
    )
    for kind in ("one", "max-batch", "gpus"):
        assert "\x1b" not in drawn(dataclasses.replace(found, kind=kind))
    page = draw_memory(dataclasses.replace(found, trace=small_trace(HOSTILE, HOSTILE)), "GiB")
    assert "\x1b" not in page and "<script src" not in page
    reader = Page()
    reader.feed(page)
    assert [kind for kind, _ in reader.scripts] == ["application/json", None]
    assert reader.links == []
    data = json.loads(reader.scripts[0][1])
    assert "<" not in reader.scripts[0][1] and data["phases"][0].startswith("<script")


class Page(HTMLParser):
    """What a browser would run or fetch."""

    def __init__(self):
        super().__init__()
        self.scripts, self.links, self._inside = [], [], False

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        assert not any(name.startswith("on") for name in attributes)
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append((attributes.get("type"), ""))

    def handle_data(self, data):
        if self._inside:
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)

    def handle_endtag(self, tag):
        self._inside = False


# ---- the picture ----


def heights(page, name):
    points = re.search(rf'points="([^"]*)"><title>{name}</title>', page)[1].split()
    return [tuple(map(float, point.split(","))) for point in points]


def test_the_picture_is_as_high_as_the_trace_and_its_areas_lie_on_each_other():
    page = draw_memory(answer(phases=()), "GiB")
    outline = heights(page, "parameters")
    assert len(outline) == 2 * 3  # three events, there and back
    assert min(y for _, y in outline) < max(y for _, y in outline)
    assert "2.93 KiB" in page  # 3000 bytes at the highest point


def test_a_long_trace_is_drawn_with_few_points_and_keeps_its_highest():
    count = 30_000
    sizes = np.random.default_rng(0).integers(1, 10**6, count)
    sizes[17_321] = 10**12
    events = np.stack([np.arange(count), ~np.arange(count)], axis=1).reshape(-1)
    one = small_trace()
    trace = dataclasses.replace(
        one,
        events=events,
        sizes=sizes,
        phases=np.zeros(2 * count),
        categories=np.zeros(count),
        modules=np.zeros(count),
        micro_batches=np.full(count, -1),
    )
    page = draw_memory(dataclasses.replace(answer(), trace=trace), "GB")
    assert len(heights(page, "parameters")) <= 2 * POINTS
    assert "1.00 TB" in page and len(page) < 500_000


@pytest.mark.parametrize("times", [0.5, 1.01, BUDGET_IN_SCALE - 0.01, BUDGET_IN_SCALE + 0.01, 50])
def test_the_budget_is_a_line_where_it_is_near_and_a_sentence_where_it_is_far(times):
    found = answer()
    drawn = int(found.trace.live_bytes.max())
    row = dataclasses.replace(found.rows[0], budget_bytes=int(times * drawn))
    page = draw_memory(dataclasses.replace(found, rows=(row,)), "GiB")
    assert ('class="budget"' in page) == (times <= BUDGET_IN_SCALE)
    # Its process, 6 GiB, lies far above what was traced, and would press that to the ground.
    assert 'class="process"' not in page and "above this picture" in page
    assert ("budget" in page and page.count("above this picture")) == 1 + (times > BUDGET_IN_SCALE)


def test_an_answer_without_a_trace_has_no_picture():
    with pytest.raises(ValueError, match="no trace to draw"):
        draw_memory(answer("gpus", trace=False), "GiB")


# ---- the real thing ----


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`run(*arguments)` through the command line, on a BERT of some kilobytes and a cache of its own."""
    base = tmp_path_factory.mktemp("predict")
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 500,
        "max_position_embeddings": 64,
    }
    (base / "tiny").mkdir()
    (base / "tiny" / "config.json").write_text(json.dumps(config))
    environment = {
        "XDG_CACHE_HOME": str(base / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "150",
    }

    def run(*arguments, model=True):
        what = ["--model", str(base / "tiny"), "--seq-len", "16"] if model else []
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            for name, value in environment.items():
                patch.setenv(name, value)
            code = commands.run(["predict", *what, *arguments])
        return code, out.getvalue(), err.getvalue()

    run.base = base
    run.environment = environment
    return run


@pytest.fixture(scope="module")
def first(real):
    page = real.base / "memory.html"
    code, out, err = real("--gpu", "rtx-3090", "--batch", "4", "--verify", "--json", "--plot", str(page))
    assert code == 0, err
    return json.loads(out), err, page.read_text()


def test_a_real_prediction_has_phases_that_grow_and_equals_its_verification(first):
    value, err, _ = first
    (row,) = value["forecasts"]
    phases = {phase["name"]: phase for phase in row["prediction"]["phases"]}
    assert set(phases) == {"load", "train", "evaluate"}
    for phase in phases.values():
        assert type(phase["allocated_bytes"]) is int
        assert 0 < phase["allocated_bytes"] <= phase["reserved_bytes"] < phase["process_bytes"]
    assert phases["load"]["allocated_bytes"] < phases["train"]["allocated_bytes"]
    assert row["values"]["per_device_train_batch_size"] == 4 and row["values"]["gradient_accumulation_steps"] == 1
    assert row["verdict"]["answer"] == "fits" and row["prediction"]["source"] == "rewritten"
    assert row["verified"]["source"] == "traced" and row["verified"]["phases"] == row["prediction"]["phases"]
    assert sum(row["prediction"]["categories"].values()) <= phases["train"]["allocated_bytes"]
    assert "shadow run of fp32" in err


def test_the_page_of_a_real_prediction_is_whole_and_fetches_nothing(first):
    page = first[2]
    reader = Page()
    reader.feed(page)
    assert reader.links == [] and len(reader.scripts) == 2 and "http" not in page
    assert all(
        name in page
        for name in (">load<", ">train<", ">evaluate<", "optimizer state", "budget", "prefers-color-scheme")
    )


def test_a_known_structure_at_another_batch_and_budget_starts_no_process(real, first, monkeypatch):
    monkeypatch.setattr(asking.Launcher, "_start_server", None)
    began = time.perf_counter()
    code, out, _ = real("--gpu", "rtx-3090", "--batch", "64", "--budget", "100MB")
    assert time.perf_counter() - began < 2
    assert code == 0
    assert "does not fit: the process is expected to peak between" in out and "the budget is 100 MB" in out
    assert "PREDICTED" in out and "shadow run" not in out
    assert "batch 64×1" in out and "bert.encoder.layer.0" in out


def test_several_processes_hold_the_buckets_of_their_gradients_and_count_all_rows(real, first):
    one = first[0]["forecasts"][0]
    code, out, err = real("--gpu", "rtx-3090", "--batch", "4", "--processes", "2", "--json")
    assert code == 0, err
    value = json.loads(out)
    (two,) = value["forecasts"]
    assert value["task"]["model"]["effective_batch"] == 8
    assert two["values"]["per_device_train_batch_size"] == 4
    trained = 4 * value["description"]["trainable_parameters"]
    more = two["prediction"]["categories"]["gradients"] - one["prediction"]["categories"]["gradients"]
    assert trained <= more < 1.1 * trained
    assert any("NCCL" in note for note in value["notes"])
    seconds = two["prediction"]["step_seconds"]
    assert two["estimated_rows_per_second"] == pytest.approx(8 / seconds)


def test_the_environment_of_the_allocator_reaches_the_figures(real, first, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:2")
    code, out, err = real("--gpu", "rtx-3090", "--batch", "4", "--json")
    assert (code, err) == (0, "")
    value, before = json.loads(out), first[0]["forecasts"][0]
    assert "assumed: PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:2, as set here" in value["notes"]
    after = value["forecasts"][0]["prediction"]["phases"]
    assert after != before["prediction"]["phases"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:[256:1,>:2]")
    code, out, err = real("--gpu", "rtx-3090", "--batch", "4")
    assert (code, out) == (2, "") and re.fullmatch(r"error: PYTORCH_CUDA_ALLOC_CONF: [^\n]*\n", err)


@pytest.mark.parametrize("budget", ["1B", "1KB", "500MB", "1TB"])
def test_any_budget_has_a_verdict(real, first, budget):
    code, out, err = real("--gpu", "rtx-3090", "--batch", "4", "--budget", budget, "-q", "--json")
    assert (code, err) == (0, "")
    expected = "fits" if budget == "1TB" else "does not fit"
    assert json.loads(out)["forecasts"][0]["verdict"]["answer"] == expected


def test_the_largest_batch_fits_and_twice_of_it_does_not(real, first):
    settings = (
        "--precision",
        "fp32",
        "--optim",
        "adamw_torch_fused",
        "--no-checkpointing",
        "--budget",
        "600MB",
        "--logits",
        "full",
    )
    code, out, _ = real("--gpu", "rtx-3090", "--max-batch", "--json", *settings)
    (row,) = json.loads(out)["forecasts"]
    batch = row["values"]["per_device_train_batch_size"]
    assert code == 0 and row["verdict"]["answer"] == "fits" and batch > 4
    for size, expected in ((batch, True), (2 * batch, False)):
        _, out, _ = real("--gpu", "rtx-3090", "--batch", str(size), "--json", *settings)
        assert (json.loads(out)["forecasts"][0]["verdict"]["answer"] == "fits") == expected


@pytest.mark.long
def test_all_cards_share_their_shadow_runs_and_a_damaged_one_is_made_again(real, first):
    kept = list((real.base / "cache").rglob("*.npz"))
    assert len(kept) >= 3  # at batches 2 and 3, and the verification's
    for file in kept:
        file.write_bytes(file.read_bytes()[:50])
    code, out, _ = real(
        "--gpu", "all", "--precision", "fp32", "--no-checkpointing", "--effective-batch", "4", "--logits", "full"
    )
    assert code == 0 and out.count("shadow run of fp32") == 6, (
        out
    )  # at two batches, before and from capability 8.0 on, and of 9.0
    for name in ("T4 16 GB", "RTX 3090", "H200"):
        assert re.search(rf"{name} .*4×1 .*fits", out)
    assert real("--gpu", "l4", "--batch", "4", "-q")[0] == 0


SCRIPT = """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments

    config = AutoConfig.from_pretrained(MODEL)
    rows = [{"input_ids": torch.arange(12) + 3, "labels": torch.tensor(n % 2)} for n in range(32)]
    arguments = TrainingArguments("out", per_device_train_batch_size=4, report_to="none")
    Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=rows, eval_dataset=rows).train()
"""


def test_a_script_is_predicted_unchanged_and_nothing_of_it_is_kept(real, first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = textwrap.dedent(SCRIPT).replace("MODEL", repr(str(real.base / "tiny")))
    Path("train.py").write_text(source)
    before = sorted((real.base / "cache").rglob("*"))
    code, out, err = real("--gpu", "t4", "--json", "--", "python", "train.py", "--hub_token", "abc123", model=False)
    assert code == 0, err
    value = json.loads(out)
    assert value["forecasts"][0]["values"]["per_device_train_batch_size"] == 4
    assert {phase["name"] for phase in value["forecasts"][0]["prediction"]["phases"]} == {"load", "train", "evaluate"}
    assert "abc123" not in out + err
    assert any("each shadow run is a fork" in note for note in value["notes"]) and "probe" not in str(value["notes"])
    assert sorted((real.base / "cache").rglob("*")) == before and not Path("out").exists()


def test_a_script_that_never_trains_is_named(real, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('done')")
    code, out, err = real("--gpu", "t4", "-q", "--", "python", "train.py", model=False)
    assert (code, out) == (3, "")
    assert "error: the script ended without calling Trainer.train()" in err and "Traceback" not in err
    assert "its whole output" not in err  # which is in a folder that is gone


def test_ctrl_c_while_children_run_ends_them_without_a_traceback(real, tmp_path):
    command = [sys.executable, "-m", "autofit", "predict", "--model", str(real.base / "tiny"), "--seq-len", "8"]
    environment = {**os.environ, **real.environment, "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.Popen(
        [*command, "--gpu", "t4"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(2.0)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(run.pid)], capture_output=True, text=True
    ).stdout.split()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "stopped; nothing was predicted\n")
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
