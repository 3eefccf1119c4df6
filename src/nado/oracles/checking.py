"""Checks of the oracle contract that anyone can run on a class of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nado.errors import InputError, OracleError
from nado.oracles.protocol import BoolArray, Oracle, check_rows, shorten


def check_oracle(oracle: Oracle, conditions: Sequence[str], texts: Sequence[str]) -> None:
    """Raise an error that says which promise of `Oracle` is broken, on which text; else do nothing.

    Checked: one boolean a text, no answer to a bare string, nothing for nothing, the same answer twice,
    for one text as in a batch and in any order, arguments unchanged, parts whose conjunction is the
    answer, progress of a width that depends on the condition alone, a stable fingerprint.
    """
    if not isinstance(oracle, Oracle):
        raise InputError("an Oracle", type(oracle).__name__, "Wrap a function with @oracle.")
    check_rows(conditions, texts, oracle.name)
    conditions, texts = list(conditions), list(texts)
    before = list(conditions), list(texts)
    answers = oracle(conditions, texts)
    if (conditions, texts) != before:
        raise OracleError(
            f"arguments that come back unchanged from the oracle {oracle.name}",
            "changed lists",
            "Copy a list before sorting or filling it.",
        )
    _check_refusals(oracle)
    _check_repeats(oracle, conditions, texts, answers)
    check_parts_and_progress(oracle, conditions, texts)
    if oracle.fingerprint != oracle.fingerprint or not oracle.spec:
        raise OracleError(
            f"a stable fingerprint of the oracle {oracle.name}",
            "two different ones",
            "Describe its arguments only.",
        )


def check_parts_and_progress(oracle: Oracle, conditions: Sequence[str], texts: Sequence[str]) -> None:
    """The promises about parts, progress and stop labels."""
    _check_parts(oracle, conditions, texts)
    _check_progress(oracle, conditions, texts)


def _check_refusals(oracle: Oracle) -> None:
    if oracle([], []).shape != (0,):
        raise OracleError(
            f"no answers for no texts from the oracle {oracle.name}", "some", "Handle empty lists."
        )
    for bad in (("condition", ["a text"]), (["condition"], "a text")):
        try:
            oracle(*bad)
        except InputError:
            continue
        raise OracleError(
            f"the oracle {oracle.name} to refuse a bare string",
            "an answer",
            "Define judge and leave __call__, which checks, as it is.",
        )


def _check_repeats(oracle: Oracle, conditions: list[str], texts: list[str], answers: BoolArray) -> None:
    again = oracle(conditions, texts)
    _refuse_difference(oracle, texts, answers, again, "when asked again")
    backwards = oracle(conditions[::-1], texts[::-1])[::-1]
    _refuse_difference(oracle, texts, answers, backwards, "when the batch is reversed")
    alone = ask_one_by_one(oracle, conditions, texts)
    _refuse_difference(oracle, texts, answers, alone, "when asked alone")


def _check_parts(oracle: Oracle, conditions: Sequence[str], texts: Sequence[str]) -> None:
    answers = oracle(conditions, texts)
    parts = oracle.parts(conditions, texts)
    for condition, text, row, answer in zip(conditions, texts, parts, answers, strict=True):
        names = oracle.part_names(condition)
        _refuse_width(oracle, "part", names, row, condition)
        if bool(row.all()) != bool(answer):
            raise OracleError(
                f"parts of the oracle {oracle.name} whose conjunction is its answer",
                f"parts {row.tolist()} and answer {bool(answer)} for the text {shorten(text)}",
                "Report as parts only what must all hold; other facts belong to progress.",
            )


def _check_progress(oracle: Oracle, conditions: Sequence[str], texts: Sequence[str]) -> None:
    for condition, text in zip(conditions, texts, strict=True):
        names = oracle.progress_names(condition)
        prefixes = [text[:cut] for cut in sorted({0, len(text) // 2, len(text)})]
        repeated = [condition] * len(prefixes)
        bits, stops = oracle.read_prefixes(repeated, prefixes)
        for row in bits:
            _refuse_width(oracle, "progress bit", names, row, condition)
        _refuse_difference(oracle, prefixes, oracle(repeated, prefixes), stops, "in its stop labels")


def _refuse_width(oracle: Oracle, what: str, names: list[str], row: BoolArray, condition: str) -> None:
    if len(names) != len(row):
        raise OracleError(
            f"one name for each {what} of the oracle {oracle.name}",
            f"{len(names)} names and {len(row)} values under the condition {shorten(condition)}",
            "Their number may depend on the condition only, and names and values must agree.",
        )


def _refuse_difference(
    oracle: Oracle, texts: Sequence[str], first: BoolArray, second: BoolArray, when: str
) -> None:
    differing = np.flatnonzero(first != second)
    if len(differing):
        raise OracleError(
            f"the same answers from the oracle {oracle.name} {when}",
            f"{len(differing)} of {len(texts)} differ, the first for the text {shorten(texts[differing[0]])}",
            "An answer may depend on its own condition and text only.",
        )


def ask_one_by_one(
    oracle: Callable[..., BoolArray], conditions: Sequence[str], texts: Sequence[str]
) -> BoolArray:
    """The answers to the same rows, each in a batch of one."""
    rows = zip(conditions, texts, strict=True)
    return np.array([oracle([condition], [text])[0] for condition, text in rows], dtype=bool)
