"""What a script gave to `TrainingArguments`, so that they can be built again with a candidate's fields.

Building from *resolved* fields loses candidates without a word: deprecated names have been resolved into others by
then. So the keyword arguments of the constructor are kept, and what was assigned afterwards.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autofit.trainer_args import ALIASES, SECRETS
from autofit.workloads.redaction import is_secret_name


@dataclass
class _Given:
    instance: Any
    keywords: dict[str, Any]  # of the user, later assignments included as far as they have been looked at
    resolved: dict[str, Any] = field(default_factory=dict)  # the fields that the user's own keywords came to
    now: dict[str, Any] = field(default_factory=dict)  # attributes as the constructor or the last rebuild left them
    assigned: list[str] = field(default_factory=list)  # fields that the script has set by itself


class GivenArguments:
    """Remembers how each `TrainingArguments` object of this process was made.

    `constructed(arguments)` is called when the script has made one, before the script sees it.
    """

    def __init__(self, constructed: Callable[[Any], None] = lambda arguments: None) -> None:
        self._given: dict[int, _Given] = {}
        self._constructed = constructed
        self._rebuilding = False
        self._environment: dict[str, str | None] = {}
        self.reads: set[str] | None = None  # fields that anybody reads are added here; None: nobody listens
        self._silent = 0

    def install(self, arguments_class: type) -> None:
        """Listen to the constructors of `arguments_class` and of every subclass."""
        remember = self

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            remember._listen(cls)
            return object.__new__(cls)

        arguments_class.__new__ = make

    def watch_reads(self, arguments_class: type) -> None:
        """Have `reads` filled, and not by what constructs, prints or copies the whole object."""
        original = arguments_class.__getattribute__
        remember = self

        def read(instance: Any, name: str) -> Any:
            if remember.reads is not None and not remember._silent and not name.startswith("__"):
                remember.reads.add(name)
            return original(instance, name)

        arguments_class.__getattribute__ = read
        for name in WHOLE:
            if hasattr(arguments_class, name):
                setattr(arguments_class, name, self._silently(getattr(arguments_class, name)))

    def _silently(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.unwatched():
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """What is read in here is not the script's doing."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def _listen(self, cls: type) -> None:
        owner = next(c for c in cls.__mro__ if "__init__" in vars(c))
        original = vars(owner)["__init__"]
        if getattr(original, "_autofit", False):
            return

        @functools.wraps(original)
        def construct(instance: Any, *args: Any, **kwargs: Any) -> None:
            outermost = id(instance) not in self._given
            if outermost:
                for name in LEFT_IN_ENVIRONMENT:
                    self._environment.setdefault(name, os.environ.get(name))
                self._given[id(instance)] = _Given(instance, _named(original, instance, args, kwargs))
            with self.unwatched():
                original(instance, *args, **kwargs)
            if outermost:
                given = self._given[id(instance)]
                given.now = dict(vars(instance))
                given.resolved = _fields_of(instance)
                if not self._rebuilding:
                    self._constructed(instance)

        construct._autofit = True
        owner.__init__ = construct

    def _look(self, arguments: Any) -> _Given:
        """What is known of `arguments`, with what the script has assigned since taken in."""
        given = self._given.get(id(arguments))
        names = {f.name for f in dataclasses.fields(arguments) if f.init}
        attributes = object.__getattribute__(arguments, "__dict__")
        if given is None:  # copied, unpickled: only its fields are known
            known = {name: value for name, value in attributes.items() if name in names}
            given = self._given[id(arguments)] = _Given(arguments, known, dict(known), dict(attributes))
            return given
        missing = object()
        for name, value in attributes.items():
            if name in names and not _same(value, given.now.get(name, missing)):
                given.keywords[name] = given.resolved[name] = given.now[name] = value
                if name not in given.assigned:
                    given.assigned.append(name)
        return given

    def keywords(self, arguments: Any) -> dict[str, Any]:
        """Constructor keywords that make `arguments` as the user has it, later assignments included."""
        return dict(self._look(arguments).keywords)

    def resolved(self, arguments: Any) -> dict[str, Any]:
        """Every field as the user's own keywords and assignments came to, whatever has been laid over them."""
        return dict(self._look(arguments).resolved)

    def assigned(self, arguments: Any) -> tuple[str, ...]:
        """Fields that the script has set by itself after `arguments` was made."""
        return tuple(self._look(arguments).assigned)

    def rebuild(self, arguments: Any, overrides: dict[str, Any]) -> None:
        """Set `overrides` in `arguments`, in place, with validation run again; what was set so before is undone.

        In place, so that the script's own variable and the Trainer's stay one object. Attributes that are no fields and
        that the script has added stay. Raises what the class raises.
        """
        given = self._look(arguments)
        keywords = dict(given.keywords)
        for name in overrides:
            for alias in ALIASES.get(name, ()):
                keywords.pop(alias, None)
        for name, value in self._environment.items():  # older releases leave the first object's precision there
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._rebuilding = True
        try:
            rebuilt = type(arguments)(**{**keywords, **overrides})
        finally:
            self._rebuilding = False
        attributes = object.__getattribute__(arguments, "__dict__")
        attributes.update(vars(rebuilt))
        given.now = dict(attributes)
        del self._given[id(rebuilt)]


# Methods that go over all fields: what they read decides nothing.
WHOLE = ("to_dict", "to_json_string", "to_sanitized_dict", "__repr__", "__str__", "__eq__")
# Set by `TrainingArguments.__post_init__` of older releases from the precision, and read where the next one leaves it open.
LEFT_IN_ENVIRONMENT = ("ACCELERATE_MIXED_PRECISION",)


def _fields_of(arguments: Any) -> dict[str, Any]:
    attributes = vars(arguments)
    return {f.name: attributes[f.name] for f in dataclasses.fields(arguments) if f.name in attributes}


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
        secret = name in SECRETS or is_secret_name(name)  # also of a class of the user's own
        if not secret and value is not UNSAYABLE and not same:
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
