"""What goes wrong on a cluster, in words; and how an error travels from a node to whoever asked."""

import json
import traceback
from typing import Any

import nado.errors
from nado.errors import NadoError

KEPT = "Finished shards are kept: the same command goes on."
_MEMORY_HINT = "Lower batch_size, or give each actor more cores so that fewer share a node."


class EngineError(NadoError, RuntimeError):
    """A cluster that cannot be reached, or that lost a piece of work for good."""


def describe_failure(error: Exception) -> str:
    """An error as text that crosses machines: exceptions themselves do not all survive being sent."""
    if isinstance(error, NadoError):
        parts = (type(error).__name__, error.expected, error.found, error.hint)
    elif is_out_of_memory(error):
        parts = (EngineError.__name__, "enough memory for an actor", first_line(error), _MEMORY_HINT)
    else:
        found = f"{type(error).__name__}: {first_line(error)}"
        parts = (EngineError.__name__, "work that ends without an error", found, "Its trace is below.")
    return json.dumps({"error": parts, "trace": "".join(traceback.format_exception(error))})


def to_error(failure: str, where: str, kept: str = KEPT) -> NadoError:
    """The error that `describe_failure` described; `where` says which piece of work, on which node."""
    told: dict[str, Any] = json.loads(failure)
    kind, expected, found, hint = told["error"]
    leaf = getattr(nado.errors, kind, EngineError)
    # Not leaf(…): not every leaf is made from these three parts.
    error: NadoError = leaf.__new__(leaf)
    NadoError.__init__(error, expected, f"{found} ({where})", f"{hint} {kept}")
    error.add_note(told["trace"])
    return error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is torch's or Python's way of saying that memory ran out, on a GPU or a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def explain(error: BaseException) -> str:
    """An error of Ray's in a line: one from inside a task has its cause at the end of a long trace."""
    lines = str(error).strip().splitlines()
    inside = type(error).__name__.startswith("RayTaskError") and lines
    return f"{type(error).__name__}: {lines[-1][:300].rstrip('.') if inside else first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, cut to a readable length."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".")
