"""Every function and test that the documents on the mathematics name exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["paper_map.md", "reinforcement_learning.md"]


def missing_names(text: str) -> list[str]:
    """The names in backticks, `nado.module.name` and `test_file.py::test_name`, that do not exist."""
    functions = re.findall(r"`(nado(?:\.\w+)+)\.(\w+)`", text)
    missing = [f"{module}.{name}" for module, name in functions if not _has(module, name)]
    tests = re.findall(r"`(test_\w+\.py)::(\w+)`", text)
    return missing + [f"{file}::{name}" for file, name in tests if name not in _tests_of(file)]


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def _tests_of(file: str) -> set[str]:
    path = ROOT / "tests" / file
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_documents_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(re.findall(r"`nado\.\w+\.\w+`", text)) > 5
    assert len(re.findall(r"`test_\w+\.py::\w+`", text)) > 5
    assert missing_names(text) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_test_like_name_is_written_in_the_form_that_is_checked(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    loose = re.findall(r"(?<!::)\btest_\w+\b(?!\.py)", text)
    assert loose == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`nado.exact.no_such`, `nado.nowhere.f`, `test_exact.py::test_nothing`, `test_no.py::test_x`"
    assert missing_names(text) == [
        "nado.exact.no_such",
        "nado.nowhere.f",
        "test_exact.py::test_nothing",
        "test_no.py::test_x",
    ]
    assert missing_names("`nado.exact.exact_log_r`, `test_docs.py::missing_names`") == []
