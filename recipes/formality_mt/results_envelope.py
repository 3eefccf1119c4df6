"""Metrics with date, machine, command and commit, in the form of `benchmarks/results`."""

import sys
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401  (finds what benchmarks share)

import recording

# Where files were says nothing about the numbers.
_PRIVATE = ("--output", "--work", "--data", "--corpus", "--prepared", "--base")


def envelope(metrics: dict[str, Any], script: str) -> dict[str, Any]:
    """Metrics of a run of `script`, as `recording.merge` puts them on record."""
    return recording.envelope(metrics, command(script))


def command(script: str) -> str:
    """The command that is running, without folders; absolute paths are cut to their last part."""
    words, kept = (sys.argv[1:] if Path(sys.argv[0]).name == script else []), []
    for at, word in enumerate(words):
        if word in _PRIVATE or (at and words[at - 1] in _PRIVATE):
            continue
        name, equals, value = word.rpartition("=")
        kept.append(f"{name}{equals}{Path(value).name}" if Path(value).is_absolute() else word)
    return " ".join(["python", f"recipes/formality_mt/{script}", *kept])
