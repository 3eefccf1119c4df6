"""Frozen dataclasses to JSON-ready values and back, by their type annotations.

Nothing is guessed on the way back: an unknown key, a missing one and a wrong type are errors that name their
place, because a report that was read wrongly would look like a measurement.
"""

import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from nado.errors import InputError


def to_record(value: Any, where: str) -> Any:
    """Dataclasses as dicts, tuples as lists; fields that have their default value are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {each.name: getattr(value, each.name) for each in fields(value)}
        defaults = {each.name: each.default for each in fields(value)}
        return {
            name: to_record(each, f"{where}.{name}")
            for name, each in kept.items()
            if defaults[name] is MISSING or each != defaults[name]
        }
    if isinstance(value, tuple):
        return [to_record(each, f"{where}[{place}]") for place, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(
            "finite numbers in a report", f"{value} at {where}", "Leave out what has no value: None says so."
        )
    return value


def from_record(kind: Any, value: Any, where: str) -> Any:
    """A value of type `kind` from a JSON value."""
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    if get_origin(kind) in (Union, UnionType):
        inner = [each for each in get_args(kind) if each is not NoneType]
        return None if value is None else from_record(inner[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _mismatch("a list", value, where)
        inner = get_args(kind)[0]
        return tuple(from_record(inner, each, f"{where}[{place}]") for place, each in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise _mismatch(_NAMES[kind], value, where)
    return value


_NAMES = {str: "a string", int: "a whole number", float: "a finite number", bool: "true or false"}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, where)
    known = {each.name: each for each in fields(kind)}
    unknown = sorted(set(value) - set(known))
    missing = [name for name, each in known.items() if each.default is MISSING and name not in value]
    if unknown or missing:
        raise InputError(
            f"the keys {', '.join(known)} at {where}",
            f"{unknown[0]!r}" if unknown else f"no {missing[0]!r}",
            "Give a report.json as nado has written it.",
        )
    hints = _hints(kind)
    return kind(**{name: from_record(hints[name], each, f"{where}.{name}") for name, each in value.items()})


def _mismatch(expected: str, value: Any, where: str) -> InputError:
    found = repr(value)
    return InputError(
        f"{expected} at {where}",
        found if len(found) <= 60 else found[:57] + "...",
        "Give a report.json as nado has written it.",
    )
