"""A study: one TOML file, from drawing to evaluation.

    study = read_study("study.toml")
    evaluation = run_study(study, "runs/study")

Only what reads the file is imported with the package; the rest needs torch and comes when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nado.study.reading import Study, parse_study, read_study

if TYPE_CHECKING:
    from nado.study.running import run_study

__all__ = ["Study", "parse_study", "read_study", "run_study"]


def __getattr__(name: str) -> Any:
    if name == "run_study":
        return import_module("nado.study.running").run_study
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
