"""The audit: what an oracle really answers to, found before anything is trained on it.

An oracle that iterates over a string instead of a list scores single characters, and a guide trained on
it raises exactly that: the method works, the question was wrong. So the audit asks about a sample of
texts and looks for answers that something trivial explains: length, single characters, the first word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from nado.errors import InputError, NadoError
from nado.oracles.checking import ask_one_by_one, check_parts_and_progress
from nado.oracles.function import FunctionOracle
from nado.oracles.probes import MINIMUM_PER_CLASS, PROBES, Evidence
from nado.oracles.protocol import BoolArray, Oracle, check_rows, shorten

Status = Literal["ok", "warn", "fail", "skipped"]

#: A trivial feature that separates the answers this well on unseen texts is reported.
WARN_AT_AUC = 0.9
# Oracles called cheap may be asked at every decoding step; below this many texts/s they slow it down.
CHEAP_TEXTS_PER_S = 5_000
_ONE_BY_ONE = 200
_EDGE_TEXTS = ("", " ", "\n", "a", "é", "😀", "狗", "\u200d", "0", "word " * 2000)


@dataclass(frozen=True)
class Finding:
    """One line of the audit."""

    check: str
    status: Status
    value: str
    message: str = ""


@dataclass(frozen=True)
class Audit:
    """What the audit found."""

    oracle: str
    fingerprint: str
    texts: int
    satisfied: int | None
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed; warnings are for a person to judge."""
        return all(finding.status != "fail" for finding in self.findings)

    @property
    def clean(self) -> bool:
        """Whether nothing failed and nothing was warned of."""
        return self.passed and all(finding.status != "warn" for finding in self.findings)

    def finding(self, check: str) -> Finding:
        """The line of one check."""
        return next(finding for finding in self.findings if finding.check == check)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {**asdict(self), "passed": self.passed, "clean": self.clean}


def audit(
    oracle: Oracle | Callable[..., Any],
    texts: Sequence[str],
    conditions: Sequence[str] | None = None,
    *,
    limit: int = 2000,
) -> Audit:
    """Ask about at most `limit` of the texts, evenly spaced, and report what was seen.

    Nothing is raised for what the oracle does: that is a finding. Without `conditions` they are empty.
    """
    if not isinstance(oracle, Oracle):
        oracle = FunctionOracle(oracle)
    if conditions is None:
        conditions = [""] * len(texts)
    check_rows(conditions, texts, oracle.name)
    if not len(texts):
        raise InputError("texts to ask about", "none", "Give some hundred texts of the kind to be written.")
    rows = np.linspace(0, len(texts) - 1, min(limit, len(texts))).astype(int).tolist()
    return _Auditor(oracle, [conditions[i] for i in rows], [texts[i] for i in rows]).run()


class _Auditor:
    """One audit in progress: the rows, the first answers, and the findings so far."""

    def __init__(self, oracle: Oracle, conditions: list[str], texts: list[str]) -> None:
        self.oracle, self.conditions, self.texts = oracle, conditions, texts
        self.findings: list[Finding] = []

    def run(self) -> Audit:
        self._check_conditions()
        answers = self._check_answers()
        if answers is not None:
            if self._is_deterministic(answers):  # else every comparison below would fail for that reason
                self._check_batches(answers)
                self._check_parts()
            self._check_edge_texts()
            self._check_rate(answers)
            self._check_noise(answers)
            self._probe(answers)
        satisfied = None if answers is None else int(answers.sum())
        return Audit(
            self.oracle.name, self.oracle.fingerprint, len(self.texts), satisfied, tuple(self.findings)
        )

    def _report(self, check: str, status: Status, value: str, message: str = "") -> None:
        self.findings.append(Finding(check, status, value, "" if status == "ok" else message))

    def _check_conditions(self) -> None:
        """Without conditions an oracle that reads them answers something, and nobody sees to what."""
        if getattr(self.oracle, "takes", None) == "condition and text" and not any(self.conditions):
            message = (
                "It takes a condition and a text, and no text has a condition: give the conditions, too."
            )
            self._report("conditions", "warn", "none", message)

    def _check_answers(self) -> BoolArray | None:
        try:
            answers = self.oracle(self.conditions, self.texts)
        except Exception as error:
            found = str(error) if isinstance(error, NadoError) else f"{type(error).__name__}: {error}"
            self._report("one boolean a text", "fail", "error", found)
            return None
        self._report("one boolean a text", "ok", f"{len(answers)} of {len(self.texts)}")
        return answers

    def _is_deterministic(self, answers: BoolArray) -> bool:
        start = time.perf_counter()
        again = self.oracle(self.conditions, self.texts)
        speed = len(self.texts) / max(time.perf_counter() - start, 1e-9)
        differing = int((again != answers).sum())
        self._report(
            "same answer twice",
            "fail" if differing else "ok",
            f"{differing} of {len(answers)} differ",
            "Asked again, it answers otherwise: fix its random state, or use a temperature of 0.",
        )
        slow = self.oracle.cheap and speed < CHEAP_TEXTS_PER_S
        self._report(
            "speed",
            "warn" if slow else "ok",
            f"{speed:,.0f} texts/s",
            "It is declared cheap, and decoding would ask it at every step: declare cheap=False.",
        )
        return not differing

    def _check_batches(self, answers: BoolArray) -> None:
        rows = np.linspace(0, len(answers) - 1, min(_ONE_BY_ONE, len(answers))).astype(int)
        conditions, texts = [self.conditions[i] for i in rows], [self.texts[i] for i in rows]
        alone = ask_one_by_one(self.oracle, conditions, texts)
        backwards = self.oracle(self.conditions[::-1], self.texts[::-1])[::-1]
        differing = int((alone != answers[rows]).sum()) + int((backwards != answers).sum())
        self._report(
            "batch = one by one",
            "fail" if differing else "ok",
            f"{differing} differ",
            "An answer depends on the other texts of its batch, or on its place in it.",
        )

    def _check_parts(self) -> None:
        rows = slice(0, 50)
        try:
            check_parts_and_progress(self.oracle, self.conditions[rows], self.texts[rows])
        except Exception as error:
            self._report("parts and progress", "fail", "error", f"{error}")
        else:
            parts = len(self.oracle.part_names(self.conditions[0]))
            self._report("parts and progress", "ok", f"{parts} part{'s' if parts > 1 else ''}")

    def _check_edge_texts(self) -> None:
        failing = []
        for text in _EDGE_TEXTS:
            try:
                self.oracle(self.conditions[:1], [text])
            except Exception as error:
                failing.append(f"{shorten(text, 20)} raises {type(error.__cause__ or error).__name__}")
        self._report(
            "edge texts",
            "fail" if failing else "ok",
            f"{len(_EDGE_TEXTS) - len(failing)} of {len(_EDGE_TEXTS)} answered",
            f"A prefix can be anything, and {', '.join(failing)}.",
        )

    def _check_rate(self, answers: BoolArray) -> None:
        low, high = wilson_interval(int(answers.sum()), len(answers))
        value = f"{answers.mean():.1%} [{low:.1%}, {high:.1%}]"
        if answers.all() or not answers.any():
            which = "satisfied" if answers.all() else "unsatisfied"
            message = f"Every text is {which}: there is nothing to learn from such texts."
            self._report("label rate", "fail", value, message)
        else:
            rare = min(answers.mean(), 1 - answers.mean()) < 0.01
            message = "One class is rare: plan for many samples, or for a better proposal."
            self._report("label rate", "warn" if rare else "ok", value, message)

    def _check_noise(self, answers: BoolArray) -> None:
        # As little as can be: an honest answer hardly moves, one that ignores the meaning is drawn anew.
        spaced = [text.replace(" ", "  ", 1) + " " for text in self.texts]
        lowered = [text.lower() for text in self.texts]
        for check, noisy_texts in (("two blanks more", spaced), ("case lowered", lowered)):
            noisy = self.oracle(self.conditions, noisy_texts)
            value = f"{(noisy == answers).mean():.1%} unchanged"
            if check == "two blanks more" and _unrelated(answers, noisy):
                message = "Two blanks change the answers as often as chance would: they look random."
                self._report(check, "fail", value, message)
            else:
                message = "Such noise should seldom matter; check that it is meant to."
                self._report(check, "warn" if (noisy != answers).mean() > 0.1 else "ok", value, message)

    def _probe(self, answers: BoolArray) -> None:
        counts = int(answers.sum()), int((~answers).sum())
        for name, probe in PROBES.items():
            if min(counts) < MINIMUM_PER_CLASS:
                message = f"Needs {MINIMUM_PER_CLASS} texts of each class."
                self._report(f"not just {name}", "skipped", f"{min(counts)} texts", message)
                continue
            evidence: Evidence = probe(self.texts, answers)
            found = evidence.auc >= WARN_AT_AUC
            message = f"{evidence.what} explains the answers. Is that the question you mean to ask?"
            self._report(f"not just {name}", "warn" if found else "ok", f"AUC {evidence.auc:.2f}", message)


def _unrelated(answers: BoolArray, noisy: BoolArray) -> bool:
    """Whether the second answers hardly depend on the first, though both kinds still occur in them.

    A rule about blanks turns all answers one way instead; that is strange, but not random.
    """
    kinds = (answers, ~answers, noisy, ~noisy)
    return all(kind.sum() >= 5 for kind in kinds) and bool(
        noisy[answers].mean() - noisy[~answers].mean() < 0.3
    )


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a rate: 95 % by default, inside [0, 1], right for rare events too.

    The rate is in it, also where all or none succeeded and rounding would leave it out.
    """
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * ((rate * (1 - rate) + z * z / (4 * trials)) / trials) ** 0.5
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))
