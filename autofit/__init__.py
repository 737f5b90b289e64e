"""autofit: the fastest Hugging Face TrainingArguments that fit a memory budget, found by measuring.

`autofit.search(...)` and `autofit.predict(...)` are the commands `autofit search` and `autofit predict` as functions;
`autofit.load(folder)` reads a finished run. Neither torch nor optuna is imported by importing this package.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Forecasts", "Result", "load", "predict", "search"]

if TYPE_CHECKING:
    from autofit.api import Forecasts, Result, load, predict, search


def __getattr__(name: str) -> Any:
    if name in __all__:
        from autofit import api

        return getattr(api, name)
    raise AttributeError(f"module 'autofit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
