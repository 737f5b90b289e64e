"""The floors of the package, read from its import statements: a module imports only from below, lazily too.

Read from source with `ast`, so that imports inside functions count and nothing heavy is loaded; a name that is put
together at run time escapes. What loading really brings in is held by a fresh interpreter.
"""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autofit"
FLOORS = [
    {"errors", "units"},
    {"extrapolation"},
    {"records"},
    {
        "codec",
        "machine",
        "failure",
        "knobs",
        "trainer_args",
        "schedule",
        "selection",
        "logits",
        "catalog",
        "leak_words",
    },
    {"store", "workloads", "probe_folder", "own_files", "own_command"},
    {"harness"},
    {"launch", "own_settings"},
    {"prediction", "emission"},
    {"study"},
    {"forecast"},
    {"report"},
    {"api"},
    {"cli", "__main__"},
]
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}
# The two steps within a floor: units raises what errors declares, and `python -m autofit` opens the command line.
STEPS = {("units", "errors"), ("__main__", "cli")}
ONLY_IN = {
    "optuna": {"study"},
    **dict.fromkeys(["torch", "transformers", "accelerate"], {"harness", "workloads", "logits"}),
}
NEVER_LOADED = {"torch", "optuna", "pandas"}


def read_package() -> dict[str, str]:
    """Source by path within the package: `harness/worker.py`."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def read_imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports; `from a import b` is a.b, whether b is a module or not."""
    package = ".".join(["autofit", *PurePosixPath(path).parent.parts])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((node.lineno, a.value) for a in node.args[:1] if isinstance(a, ast.Constant))


def unit_of(path: str) -> str:
    """The file or folder directly in the package that `path` belongs to: what has a floor."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


def find_broken_floors(path: str, source: str) -> list[str]:
    unit = unit_of(path)
    if unit != "__init__" and unit not in FLOOR:
        return [f"{path} is on no floor"]
    broken = []
    for line, name in read_imports(path, source):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top in ONLY_IN and unit not in ONLY_IN[top]:
            broken.append(f"{path}:{line} imports {name}, which is for {sorted(ONLY_IN[top])}")
        if top != "autofit" or target == "__version__" or unit == "__init__":
            continue
        if target not in FLOOR:
            broken.append(f"{path}:{line} imports {name}, which is on no floor")
        elif target != unit and FLOOR[target] >= FLOOR[unit] and (unit, target) not in STEPS:
            broken.append(f"{path}:{line} imports {name} from floor {FLOOR[target]} on floor {FLOOR[unit]}")
    return broken


def find_dangers(path: str, source: str) -> list[str]:
    """What could run code from a file or a name: pickle, torch.load, a shell."""
    imports = list(read_imports(path, source))
    found = [
        (line, name) for line, name in imports if name.split(".")[0] in ("pickle", "_pickle") or name == "torch.load"
    ]
    tree = ast.parse(source)
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) in aliases | {"torch"}:
            found.append((node.lineno, "torch.load"))
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            found.append((node.value.lineno, f"shell={ast.unparse(node.value)}"))
    return [f"{path}:{line} uses {what}" for line, what in found]


def find_names_of_modules(sources: dict[str, str]) -> list[str]:
    """Functions, methods apart, that are called like a file or folder of the package and would hide it."""
    modules = {part.removesuffix(".py") for path in sources for part in PurePosixPath(path).parts}
    found = []
    for path, source in sources.items():
        tree = ast.parse(source)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        methods = {id(member) for node in classes for member in node.body}
        for node in ast.walk(tree):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and id(node) not in methods
            if is_function and node.name in modules:
                found.append(f"{path}:{node.lineno} calls a function {node.name} like a module")
    return found


def load_and_list(*arguments: str) -> set[str]:
    """Names of the top-level packages that a fresh interpreter loads."""
    command = [sys.executable, "-X", "importtime", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    timed = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    assert run.returncode == 0, [line for line in run.stderr.splitlines() if line not in timed]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in timed}


def test_every_module_is_on_a_floor_and_imports_only_from_below():
    assert [line for path, source in read_package().items() for line in find_broken_floors(path, source)] == []


def test_nothing_in_the_package_can_run_code_from_a_file_or_a_shell():
    assert [line for path, source in read_package().items() for line in find_dangers(path, source)] == []


def test_no_function_shares_its_name_with_a_module():
    assert find_names_of_modules(read_package()) == []


@pytest.mark.parametrize("arguments", [("-c", "import autofit"), ("-m", "autofit", "--help")], ids=" ".join)
def test_the_package_and_its_help_load_neither_torch_nor_optuna_nor_pandas(arguments):
    loaded = load_and_list(*arguments)
    assert "autofit" in loaded
    assert loaded & NEVER_LOADED == set()


# The readers above, shown to see what they are for.


def test_a_fresh_interpreter_is_seen_loading_what_it_loads():
    assert "json" in load_and_list("-c", "import json")
    assert "json" not in load_and_list("-c", "")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("records.py", "from autofit.codec import encode"),
        ("records.py", "def f():\n    from autofit import api"),
        ("records.py", "import autofit.store"),
        ("codec.py", "from autofit.knobs import KNOBS"),
        ("codec.py", "from . import knobs"),
        ("errors.py", "from autofit.units import parse_bytes"),
        ("cli/search.py", "import autofit.__main__"),
        ("report/summary.py", "from .. import api"),
        ("report/summary.py", "from ..api import search"),
        ("catalog/models.py", "from autofit.machine import read"),
        ("harness/shadow/mode.py", "import importlib\nimportlib.import_module('autofit.launch')"),
        ("harness/worker.py", "if TYPE_CHECKING:\n    from autofit.study import driver"),
        ("api.py", "from autofit import search"),
        ("api.py", "import autofit"),
        ("api.py", "from autofit import *"),
        ("helpers.py", ""),
        ("cli/main.py", "from autofit import helpers"),
        ("api.py", "import optuna"),
        ("harness/worker.py", "import optuna.storages"),
        ("study/driver.py", "def f():\n    import torch"),
        ("machine.py", "from torch import cuda"),
        ("trainer_args.py", "from transformers import TrainingArguments"),
        ("launch.py", "import accelerate.utils"),
        ("__init__.py", "import torch"),
    ],
)
def test_an_import_from_above_or_beside_is_seen(path, source):
    assert len(find_broken_floors(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("units.py", "from autofit.errors import UsageError"),
        ("__main__.py", "def main():\n    from autofit.cli import commands"),
        ("records.py", "from autofit.errors import AutofitError"),
        ("report/summary.py", "from autofit.report import text\nfrom . import tables\nfrom ..records import Task"),
        ("harness/shadow/mode.py", "import torch\nfrom ..worker import run\nfrom autofit.logits import reduce"),
        ("study/driver.py", "import optuna"),
        ("machine.py", "from autofit import __version__\nimport torchmetrics"),
        ("__init__.py", "def f():\n    from autofit import api"),
    ],
)
def test_an_import_from_below_or_inside_its_own_folder_is_let_through(path, source):
    assert find_broken_floors(path, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "torch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "run('ls', shell=True)",
        "run('ls', shell=wanted)",
    ],
)
def test_a_danger_is_seen(source):
    assert len(find_dangers("harness/worker.py", source)) == 1


def test_what_only_looks_like_a_danger_is_let_through():
    assert find_dangers("api.py", "json.load(file)\nload(folder)\nrun(['ls'], shell=False)\nshell = True") == []


def test_a_function_called_like_a_module_is_seen_and_a_method_is_not():
    sources = {
        "launch.py": "def study(): ...",
        "study/driver.py": "class A:\n    def launch(self): ...\ndef ask(): ...",
    }
    assert find_names_of_modules(sources) == ["launch.py:1 calls a function study like a module"]
