"""What a script gave to `TrainingArguments`, so that they can be built again with a candidate's fields.

Building from *resolved* fields loses candidates without a word: deprecated names have been resolved into others by
then. So the keyword arguments of the constructor are kept, and what was assigned afterwards.
"""

import dataclasses
import functools
import inspect
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autofit.trainer_args import ALIASES, SECRETS


@dataclass
class _Given:
    instance: Any
    keywords: dict[str, Any]
    constructed: dict[str, Any] = field(default_factory=dict)


class GivenArguments:
    """Remembers how each `TrainingArguments` object of this process was made."""

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}

    def install(self, arguments_class: type) -> None:
        """Listen to the constructors of `arguments_class` and of every subclass."""
        remember = self

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            remember._listen(cls)
            return object.__new__(cls)

        arguments_class.__new__ = make

    def _listen(self, cls: type) -> None:
        owner = next(c for c in cls.__mro__ if "__init__" in vars(c))
        original = vars(owner)["__init__"]
        if getattr(original, "_autofit", False):
            return

        @functools.wraps(original)
        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            outermost = id(instance) not in self._given
            if outermost:
                self._given[id(instance)] = _Given(instance, _named(original, instance, args, kwargs))
            original(instance, *args, **kwargs)
            if outermost:
                self._given[id(instance)].constructed = dict(vars(instance))

        construct._autofit = True
        owner.__init__ = construct

    def keywords(self, arguments: Any) -> dict[str, Any]:
        """Constructor keywords that make `arguments` as it stands now, later assignments included."""
        names = {f.name for f in dataclasses.fields(arguments) if f.init}
        given = self._given.get(id(arguments))
        if given is None:  # copied, unpickled: only its fields are known
            return {name: value for name, value in vars(arguments).items() if name in names}
        missing = object()
        later = {
            name: value
            for name, value in vars(arguments).items()
            if name in names and not _same(value, given.constructed.get(name, missing))
        }
        return {**given.keywords, **later}

    def rebuild(self, arguments: Any, overrides: dict[str, Any]) -> None:
        """Set `overrides` in `arguments`, in place, with validation run again.

        In place, so that the script's own variable and the Trainer's stay one object. Attributes that are no fields and
        that the script has added stay. Raises what the class raises.
        """
        keywords = self.keywords(arguments)
        for name in overrides:
            for alias in ALIASES.get(name, ()):
                keywords.pop(alias, None)
        rebuilt = type(arguments)(**{**keywords, **overrides})
        vars(arguments).update(vars(rebuilt))


def _named(constructor: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, as the constructor itself would bind them."""
    signature = inspect.signature(constructor)
    try:
        bound = signature.bind_partial(instance, *args, **kwargs).arguments
    except TypeError:  # the constructor will say so
        return dict(kwargs)
    named: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:  # without the instance
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named


def plain_arguments(arguments: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """What of `keywords` differs from the class's defaults, as JSON values; secrets and objects left out.

    Parsers give every field: None for a list that has no flag, False for a default of "no". So an empty value that the
    class resolves to its default is no difference either. (A value that is not empty may have been moved to a newer
    name, which leaves the default behind under the old one.)
    """
    defaults = {f.name: json_value(_default(f)) for f in dataclasses.fields(arguments)}
    plain = {}
    for name, value in keywords.items():
        value, default = json_value(value), defaults.get(name)
        resolved = json_value(getattr(arguments, name, value))
        same = value == default or (not value and resolved == default) or (value is None and not default)
        if name not in SECRETS and value is not UNSAYABLE and not same:
            plain[name] = value
    return plain


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


UNSAYABLE = object()


def json_value(value: Any) -> Any:
    """`value` as JSON would hold it, or UNSAYABLE."""
    if isinstance(value, Enum):
        value = value.value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return UNSAYABLE


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a is b or a == b)
    except (TypeError, ValueError, RuntimeError):  # arrays, and objects that refuse to be compared
        return False
