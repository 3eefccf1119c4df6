"""Descriptions of oracles that are equal in every process and change when the question changes.

Labels and cached answers are reused only when the description is the same, so it must see what a
function depends on: its code, what it closes over, and the helpers and constants of its module. Code
is read from the running function and not from its file, which may have changed since; so another
version of Python describes it otherwise, and asks again. What a description cannot
see (a file read at run time, a server's weights) is the operator's to name, with the `version` of a
remote oracle or a new folder for labels.
"""

import dataclasses
import functools
import hashlib
import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

PLAIN = (str, bytes, int, float, complex, bool, type(None))

# Metadata of a dataclass's field that came later: at its default the question is what it was without it.
UNSAID = {"unsaid": True}


def describe_object(value: object) -> str:
    """A class with its public arguments: ``Length(min_words=3, max_words=None)``.

    Classes of this package are described by name, others with a digest of their methods as well.
    """
    kind = type(value)
    if dataclasses.is_dataclass(value):
        fields = [f for f in dataclasses.fields(value) if f.init]
        arguments = {f.name: getattr(value, f.name) for f in fields}
        for f in fields:
            if f.metadata.get("unsaid") and arguments[f.name] == f.default:
                del arguments[f.name]
    else:
        arguments = {k: v for k, v in sorted(vars(value).items()) if not k.startswith("_") and k != "origin"}
    inner = ", ".join(f"{name}={describe(argument)}" for name, argument in arguments.items())
    ours = kind.__module__.split(".")[0] == "nado"
    return f"{kind.__qualname__}{'' if ours else '#' + _digest(_methods_of(kind).encode())}({inner})"


def describe(value: Any, seen: frozenset[int] = frozenset()) -> str:
    """Any value: plain ones as they are, containers item by item, functions and arrays by digest."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, PurePath):
        return repr(str(value))
    if id(value) in seen:
        return "…"
    seen = seen | {id(value)}
    if isinstance(value, Mapping):
        pairs = sorted(f"{describe(k, seen)}: {describe(v, seen)}" for k, v in value.items())
        return _shorten("{" + ", ".join(pairs) + "}")
    if isinstance(value, (set, frozenset)):
        return _shorten("{" + ", ".join(sorted(describe(item, seen) for item in value)) + "}")
    if isinstance(value, (list, tuple)):
        return _shorten("[" + ", ".join(describe(item, seen) for item in value) + "]")
    if isinstance(value, np.ndarray):
        return f"array#{_digest(f'{value.dtype}{value.shape}'.encode() + value.tobytes())}"
    if isinstance(value, functools.partial):
        return f"partial({describe(value.func, seen)}, {describe([value.args, value.keywords], seen)})"
    if isinstance(value, types.MethodType):
        return f"{describe(value.__self__, seen)}.{describe_function(value.__func__, seen)}"
    if isinstance(value, types.FunctionType):
        return describe_function(value, seen)
    if isinstance(value, types.CodeType):
        inner = describe([value.co_code, value.co_names, value.co_consts], seen)
        return f"{value.co_name}#{_digest(inner.encode())}"
    spec = getattr(value, "spec", None)
    return spec if isinstance(spec, str) else f"{type(value).__module__}.{type(value).__qualname__}"


def describe_function(function: Any, seen: frozenset[int] = frozenset()) -> str:
    """A function by its name and a digest of everything in its module that its answer rests on."""
    seen = seen | {id(function)}
    used = {**_closed_over(function), **_used_globals(function)}
    pieces = [function.__code__, function.__defaults__, function.__kwdefaults__, used]
    return f"{function.__qualname__}#{_digest('|'.join(describe(p, seen) for p in pieces).encode())}"


def _closed_over(function: Any) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a name that has not been given a value yet
            continue
    return found


def _used_globals(function: Any) -> dict[str, Any]:
    """Constants, helpers and other values of the function's own module, also those its inner code uses.

    Modules and imported names are left to the versions in the manifest.
    """
    names: set[str] = set()
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    known = function.__globals__
    return {n: known[n] for n in sorted(names) if n in known and _belongs_to(known[n], function.__module__)}


def _belongs_to(value: object, module: str) -> bool:
    if isinstance(value, (*PLAIN, tuple, list, dict, set, frozenset, np.ndarray)):
        return True
    is_oracle = hasattr(type(value), "judge_parts")
    return is_oracle or (getattr(value, "__module__", None) == module and not isinstance(value, type))


def _methods_of(kind: type) -> str:
    ours = [c for c in kind.__mro__ if c is not object and c.__module__.split(".")[0] != "nado"]
    members = [
        f"{name}={describe(getattr(v, 'fget', v))}"
        for c in ours
        for name, v in sorted(vars(c).items())
        if (isinstance(v, (types.FunctionType, property, *PLAIN)) and name != "__module__")
        or (isinstance(v, tuple) and not name.startswith("__"))
    ]
    return "; ".join(members)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"#{_digest(text.encode())}"
