"""Oracles by name: a shipped one with its arguments, or the operator's own file.

A file is executed when it is loaded. So this is for what the operator wrote on the command line or in
the config, never for a name that came with someone else's guide or samples.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from nado.errors import InputError, OracleError
from nado.oracles.function import FunctionOracle
from nado.oracles.protocol import AllOf, AnyOf, Oracle
from nado.oracles.suggestion import suggest
from nado.storage import read_json

# Name in a config → module and attribute; imported only when asked for.
SHIPPED = {
    "ends_with": "nado.oracles.text_rules:EndsWith",
    "forbidden_words": "nado.oracles.keywords:ForbiddenWords",
    "huggingface_classifier": "nado.oracles.huggingface_classifier:HuggingFaceClassifier",
    "json": "nado.oracles.text_rules:Json",
    "keywords": "nado.oracles.keywords:Keywords",
    "language": "nado.oracles.language_tools:Language",
    "length": "nado.oracles.text_rules:Length",
    "linear_classifier": "nado.oracles.linear_classifier:LinearClassifier.load",
    "pattern": "nado.oracles.text_rules:Pattern",
    "readability": "nado.oracles.readability:Readability",
    "sentiment": "nado.oracles.language_tools:Sentiment",
    "starts_with": "nado.oracles.text_rules:StartsWith",
}


class Origin(NamedTuple):
    """Where an oracle came from, so that a worker process of this run can load it again."""

    source: str
    arguments: dict[str, Any]

    def reload(self) -> Oracle:
        """The same oracle, loaded again."""
        return load_oracle(self.source, self.arguments)


def load_oracle(source: str | Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Oracle:
    """An oracle from ``"file.py:name"``, a shipped name, or a table.

    A table has the `name` and its arguments (``{name = "keywords", at_least = 2}``), or combines other
    tables and names: ``{all = [...]}``, ``{any = [...]}``, ``{not = ...}``. The text of a TOML inline
    table is read as one.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        source = _parse_table(source)
    if isinstance(source, Mapping):
        return _load_table({**source, **(arguments or {})})
    given = dict(arguments or {})
    if ".py:" in source or source.endswith(".py"):
        return _load_from_file(source, given)
    if source not in SHIPPED:
        hint = suggest(source, SHIPPED)
        raise InputError("a shipped oracle or file.py:name", repr(source), hint)
    return _build(_resolve(SHIPPED[source]), source, given)


def _parse_table(text: str) -> Mapping[str, Any]:
    try:
        table: Mapping[str, Any] = tomllib.loads(f"oracle = {text}")["oracle"]
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "an oracle as a TOML inline table",
            f"{text!r}: {error}",
            'Write {name = "keywords", at_least = 2}.',
        ) from error
    return table


def _load_table(table: Mapping[str, Any]) -> Oracle:
    combined = {"all", "any", "not", "name"} & set(table)
    if len(combined) != 1 or ("name" not in combined and len(table) > 1):
        raise InputError(
            "an oracle table with a name and its arguments, or with one of all, any, not",
            f"the keys {', '.join(map(str, table)) or 'none'}",
            'Write {name = "keywords", at_least = 2} or {all = ["keywords", "json"]}.',
        )
    if "not" in table:
        return ~load_oracle(table["not"])
    for key, kind in (("all", AllOf), ("any", AnyOf)):
        if key in table:
            members = table[key]
            if not isinstance(members, list) or not members:
                raise InputError(f"a list of oracles under {key}", repr(members), "Name at least one.")
            return kind(tuple(load_oracle(member) for member in members))
    return load_oracle(table["name"], {k: v for k, v in table.items() if k != "name"})


def _load_from_file(source: str, arguments: dict[str, Any]) -> Oracle:
    path, separator, name = source.rpartition(":")
    if not separator or not name.isidentifier():
        raise InputError("file.py:name", repr(source), "Add a colon and the name of the oracle in the file.")
    module = load_module(Path(path))
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"an oracle or function {name} in {path}", "no such name", suggest(name, known))
    found = _build(getattr(module, name), source, arguments)
    # The absolute path, because a worker may start in another folder.
    object.__setattr__(found, "origin", Origin(f"{Path(path).resolve()}:{name}", arguments))
    return found


def _build(found: Any, source: str, arguments: dict[str, Any]) -> Oracle:
    """An oracle as it is, a class or factory called with the arguments, a plain function wrapped."""
    if isinstance(found, Oracle):
        if arguments:
            raise InputError(
                f"no arguments for {source}, which is an oracle already",
                f"{', '.join(arguments)}",
                "Make it a subclass of Oracle that takes them.",
            )
        return found
    if (isinstance(found, type) and issubclass(found, Oracle)) or inspect.ismethod(found):
        _check_arguments(found, source, arguments)
        return found(**arguments)
    if arguments:
        raise InputError(
            f"no arguments for {source}, which is a plain function",
            f"{', '.join(arguments)}",
            "Make it a subclass of Oracle that takes them.",
        )
    return FunctionOracle(found)


def _check_arguments(build: Callable[..., Any], source: str, arguments: dict[str, Any]) -> None:
    parameters = inspect.signature(build).parameters
    for name in arguments:
        if name not in parameters:
            raise InputError(f"an argument of the oracle {source}", repr(name), suggest(name, parameters))
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise InputError(
            f"the argument {missing[0]} for the oracle {source}",
            "none",
            f'Write {{name = "{source}", {missing[0]} = …}}.',
        )


def _resolve(reference: str) -> Any:
    module, _, path = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def load_module(path: Path) -> ModuleType:
    """Execute the operator's file as a module; the same content is executed once."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"a Python file {path}", f"the error: {error.strerror}", "Check the path; it is read from here."
        ) from error
    digest = hashlib.sha256(str(path.resolve()).encode() + content).hexdigest()[:16]
    name = f"nado_oracle_file_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise InputError("a Python file that ends in .py", f"{path}", "Rename it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses look their own module up
    try:
        # What was read and digested, not what a loader may have cached: it tells bytecode apart by the
        # second and size of its source alone, and an edit can keep both.
        exec(compile(content, str(path), "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise OracleError(
            f"the file {path} to run", f"{type(error).__name__}: {error}", "Run it with python to see where."
        ) from error
    return module


# --- with a guide -------------------------------------------------------------------------------------


def saved_oracle(folder: Path) -> Oracle | None:
    """The oracle a guide was trained for, if it is a shipped one; a Python file is not executed."""
    path = folder / "oracle.json"
    if not path.exists():
        return None
    table = read_json(path)["table"]
    return None if names_python(table) else load_oracle(table)


def names_python(table: Any) -> bool:
    """Whether an oracle's table names a Python file anywhere."""
    if isinstance(table, Mapping):
        return any(names_python(table[key]) for key in ("name", "all", "any", "not") if key in table)
    if isinstance(table, list):
        return any(names_python(each) for each in table)
    return isinstance(table, str) and is_python(table)


def is_python(name: str) -> bool:
    """Whether an oracle's name is that of a Python file, which would be executed."""
    return ".py:" in name or name.endswith(".py")
