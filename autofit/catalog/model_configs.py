"""Configurations of widely used models, so that `--model` works without the hub.

One file for each model in `models/`. A configuration has the values of the hub's own config.json, save for bookkeeping
(the version and path that wrote it) and label names, whose number stands in `num_labels`. Weights are not here.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class CatalogModel:
    """A model as its publisher configured it. `AutoConfig.for_model(**model.config)` builds its configuration."""

    id: str  # on the hub, with the organisation
    aliases: tuple[str, ...]  # the id without its organisation, and former ids
    task: str  # what it is trained for unless the user says otherwise: a `ModelTask.task`
    parameters: int  # published count; tied weights once, buffers not
    parameters_class: str  # the class in transformers that has this count
    source: str
    config: dict[str, Any]


def find_model(name: str) -> CatalogModel | None:
    """The model with this id or alias in any case, None when there is none. Its `config` is the caller's to change."""
    model = _models_by_name().get(name.strip().lower())
    return None if model is None else replace(model, config=deepcopy(model.config))


def model_names() -> list[str]:
    """Ids on the hub, in alphabetical order."""
    return sorted({model.id for model in _models_by_name().values()}, key=str.lower)


@cache
def _models_by_name() -> dict[str, CatalogModel]:
    by_name = {}
    for file in (files(__package__) / "models").iterdir():
        if file.name.endswith(".json"):
            facts = json.loads(file.read_text(encoding="utf-8"))
            model = CatalogModel(**{**facts, "aliases": tuple(facts["aliases"])})
            by_name.update({name.lower(): model for name in (model.id, *model.aliases)})
    return by_name
