"""The command line: parse, call `api`, print, exit code. The one place that catches and exits.

click only parses: what it returns is run outside of it, since it takes any broken pipe for that of the output and ends
quietly. Whatever is not needed for `--help` is imported after parsing, so that help is there at once.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import click

from autofit import __version__
from autofit.cli.options import (
    APPLY_EPILOG,
    APPLY_EXAMPLE,
    APPLY_OPTIONS,
    EPILOG,
    OPTIONS,
    PREDICT_EPILOG,
    PREDICT_EXAMPLE,
    PREDICT_OPTIONS,
    SCRIPT_EXAMPLE,
    ApplyCommand,
    PredictCommand,
    WorkloadCommand,
)
from autofit.errors import AutofitError, Interrupted, UsageError, WorkloadError

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
PIPE_CLOSED = 141  # as a shell reports a program that SIGPIPE ended
_AFTER_STOP = {"predict": "nothing was predicted", "apply": "nothing was started"}


class OutputClosedError(Exception):
    """Whoever read the output is gone. No BrokenPipeError, which a dead child may raise too."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="autofit", message="%(prog)s %(version)s")
def autofit() -> None:
    """The fastest Hugging Face TrainingArguments that fit a memory budget, found by measuring."""


@autofit.command("search", cls=WorkloadCommand, params=OPTIONS, epilog=EPILOG)
def search_command(**given: Any) -> Callable[[], None]:
    """Find the fastest settings that fit, for a model that autofit trains by itself (--model) or for your own script
    (after --), which runs unchanged. Every candidate is measured in a process of its own.

    The same command again resumes. Ctrl-C stops and keeps what was measured.
    """
    return lambda: run_search(**given)


@autofit.command("predict", cls=PredictCommand, params=PREDICT_OPTIONS, epilog=PREDICT_EPILOG)
def predict_command(**given: Any) -> Callable[[], None]:
    """Predict what training takes on a card that need not be here, for a model (--model) or for your own script (after --):
    peak memory by phase, whether it fits, what holds most, the largest batch, the best settings for each card.
    """
    return lambda: run_predict(**given)


@autofit.command("apply", cls=ApplyCommand, params=APPLY_OPTIONS, epilog=APPLY_EPILOG)
def apply_command(**given: Any) -> Callable[[], None]:
    """Train for real, with the settings that a search found: your script (after --; default: the command that was
    searched) runs unchanged and in full, the tuned TrainingArguments laid over. RUN is the run directory of the search.
    """
    return lambda: run_apply(**given)


def run(argv: Sequence[str]) -> int:
    """The exit code of `autofit ARGV`. Raises what is a bug of autofit."""
    before = {number: signal.signal(number, _interrupt) for number in INTERRUPTS}
    try:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a path or a terminal may know other characters than ours
        action = _parse(list(argv) or ["--help"])
        if callable(action):
            action()
        return _flush()
    except AutofitError as error:
        return _explain(error)
    except (KeyboardInterrupt, click.Abort):
        after = _AFTER_STOP.get(argv[0] if argv else "", "the same command resumes")
        return _explain(Interrupted(f"stopped; {after}"))
    except OutputClosedError:
        return _abandon_output()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_search(*, dry_run: bool, as_json: bool, quiet: bool, **options: Any) -> None:
    """Search or plan, and print the answer. With `as_json` stdout gets one JSON object and nothing else."""
    from autofit import api
    from autofit.report import tables, terminal
    from autofit.report.labels import in_unit
    from autofit.units import unit_of

    _check_workload(options, "search for", "autofit search --model bert-base-uncased --budget 24GB", SCRIPT_EXAMPLE)
    console = terminal.make_console(_Output(sys.stdout))
    progress = terminal.make_console(_Output(sys.stderr)) if as_json else console
    listener = None if quiet else terminal.TerminalListener(progress)
    try:
        found = (api.plan if dry_run else api.search)(listener=listener, **options)
    except WorkloadError as error:
        unit = unit_of(options["budget"]) if options["budget"] else "GiB"
        raise WorkloadError(in_unit(error, unit), error.log) from error
    finally:
        if listener is not None:
            listener.close()
    if as_json:
        console.file.write(_plan_json(found) if dry_run else _result_json(found))
        console.file.flush()
    elif dry_run:
        tables.draw_plan(found, console)
    else:
        tables.draw_result(found, console)


def run_predict(*, as_json: bool, quiet: bool, plot: str | None, **options: Any) -> None:
    """Predict and print the answer. With `as_json` stdout gets one JSON object and nothing else."""
    from autofit import api
    from autofit.report import forecasts, terminal
    from autofit.report.labels import in_unit
    from autofit.units import looks_like_size, unit_of

    _check_workload(options, "predict", "autofit predict --model bert-base-uncased --gpu rtx-3090", PREDICT_EXAMPLE)
    if plot is not None:
        _check_plot(plot, options)
    unit = unit_of(options["budget"]) if options["budget"] and looks_like_size(options["budget"]) else "GiB"
    console = terminal.make_console(_Output(sys.stdout))
    progress = terminal.make_console(_Output(sys.stderr)) if as_json else console

    def say(text: str) -> None:
        if not quiet:
            terminal.print_folded(progress, f"- {in_unit(text, unit)}")

    try:
        found = api.predict(say=say, **options)
    except WorkloadError as error:
        raise WorkloadError(in_unit(error, unit), error.log) from error
    if plot is not None:
        _write_plot(plot, found, unit)
    if as_json:
        console.file.write(_forecasts_json(found))
        console.file.flush()
        return
    forecasts.draw_forecasts(found, unit, console)
    if plot is not None:
        terminal.print_line(console, "")
        terminal.print_folded(console, f"memory over the steps is drawn in {_printable(plot)[0]}")


def run_apply(*, run: str | None, with_code: bool, command: tuple[str, ...] | None) -> None:
    """Become the training; returns only by an exception."""
    from pathlib import Path

    from autofit.cli.training import become_training

    if not run:
        raise UsageError(f"no run directory is named; give that of a search: {APPLY_EXAMPLE}")
    become_training(Path(run), with_code, command)


def _check_workload(options: dict[str, Any], what: str, model_example: str, script_example: str) -> None:
    """Exactly one of `--model` and a command. Raises UsageError."""
    if options["model"] is None and options["command"] is None:
        raise UsageError(
            f"nothing to {what}; name a model ({model_example}) or give your own command after -- ({script_example})"
        )
    if options["model"] is not None and options["command"] is not None:
        raise UsageError("--model and a command after -- exclude each other; leave one of them out")


def _check_plot(plot: str, options: dict[str, Any]) -> None:
    """Refuse what could not be drawn or written, before anything runs. Raises UsageError."""
    from pathlib import Path

    if options["max_batch"] or options["gpu"] == "all":
        raise UsageError("--plot draws one prediction; leave out --max-batch, and name one card with --gpu")
    folder = Path(plot).parent
    if not plot.strip() or Path(plot).is_dir():
        raise UsageError(f"--plot {plot!r} is no file; give one such as --plot memory.html")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"--plot {plot}: {folder} is no folder that can be written; give another file")


def _write_plot(plot: str, found: Any, unit: str) -> None:
    from pathlib import Path

    from autofit.report.memory_plot import draw_memory
    from autofit.store import write_atomically

    try:
        write_atomically(Path(plot), draw_memory(found, unit).encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"--plot {plot} cannot be written ({error.strerror}); give another file") from error


def _parse(argv: list[str]) -> Any:
    """What the command returns; None or 0 after --help and --version. Raises UsageError."""
    try:
        return autofit.main(argv, prog_name="autofit", standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "autofit"
        message = error.format_message().removesuffix(".")
        raise UsageError(f"{message[:1].lower()}{message[1:]} ({where} --help lists what there is)") from error


def _result_json(result: Any) -> str:
    from autofit import codec

    value = {name: codec.to_json_value(getattr(result, name)) for name in ("selection", "budget", "machine", "timing")}
    value["folder"] = str(result.folder)
    value["measurements"] = [codec.to_json_value(m) for m in result.measurements]
    return codec.encode(value).decode() + "\n"


def _plan_json(plan: Any) -> str:
    from autofit import codec

    names = ("budget", "machine", "description", "baseline", "estimated_seconds")
    value = {name: codec.to_json_value(getattr(plan, name)) for name in names}
    value["folder"] = None if plan.folder is None else str(plan.folder)
    value["candidates"] = [
        {
            "values": step.candidate.values,
            "purpose": step.purpose,
            "why": step.why,
            "estimated_train_bytes": step.train_bytes,
            "estimated_relative_seconds": step.relative_seconds,
        }
        for step in plan.candidates
    ]
    return codec.encode(value).decode() + "\n"


def _forecasts_json(found: Any) -> str:
    from autofit import codec

    value = {
        "kind": found.kind,
        "measured": False,
        "task": codec.to_json_value(found.task),
        "description": codec.to_json_value(found.description),
        "notes": list(found.notes),
        "failed": found.failed,
        "forecasts": [
            {
                "gpu": row.target.name,
                "label": row.label,
                "processes": row.processes,
                "calibrated": False,
                "budget_bytes": row.budget_bytes,
                "context_bytes": row.target.context_bytes,
                "values": row.candidate.values,
                "peak_bytes": row.prediction.peak_bytes,
                "estimated_rows_per_second": row.rows_per_second,
                **{name: codec.to_json_value(getattr(row, name)) for name in ("verdict", "prediction", "verified")},
            }
            for row in found.rows
        ],
    }
    return codec.encode(value).decode() + "\n"


def _explain(error: AutofitError) -> int:
    """Tell on stderr. Returns the exit code."""
    prefix = "" if isinstance(error, Interrupted) else "error: "
    lines = _printable(str(error) or type(error).__name__)
    if isinstance(error, WorkloadError):
        lines += _printable(error.log, "    ")
    with contextlib.suppress(OSError):  # nobody listens
        print(prefix + "\n".join(lines), file=sys.stderr, flush=True)
    return error.exit_code


def _printable(text: str, indent: str = "") -> list[str]:
    """Lines without control characters, their own indentation kept."""
    from autofit.report.labels import plain

    lines = [line.expandtabs(4) for line in text.splitlines()]
    return [(indent + " " * (len(line) - len(line.lstrip())) + plain(line)).rstrip() for line in lines]


def _interrupt(*_: object) -> None:
    """The first one stops; later ones would only stop the clearing up, which takes moments."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _flush() -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosedError from None
    return 0


def _abandon_output() -> int:
    """Keep the interpreter from complaining about the closed pipe once more when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return PIPE_CLOSED


class _Output:
    """A stream that tells of its own broken pipe in its own words."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise OutputClosedError from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise OutputClosedError from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
