"""The oracle: a yes/no question about a finished text, asked of a batch, and its algebra.

    satisfied = oracle(conditions, texts)        # one boolean a text

An oracle is a black box that may volunteer more:

- `parts`: the truth of each member of a conjunction, so that ``all(parts) == satisfied`` always.
- `progress`: what a prefix already settles, as booleans whose number depends on the condition alone.
  It need not be monotone: "dog" may become "dogma".

An oracle without them works: its one part is its answer, and its one bit of progress is whether it
would hold if the text ended here. Training and decoding both read prefixes through `read_prefixes`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nado.errors import InputError, OracleError
from nado.oracles.description import describe_object

if TYPE_CHECKING:
    from nado.oracles.loading import Origin

BoolArray = NDArray[np.bool_]


class Oracle:
    """The question C(condition, text). Subclasses write `judge`, and more where they know more.

    Called, it checks what goes in and what comes out, so that a string in place of a list, or a score
    in place of a boolean, is found at the first call and not after training.
    """

    #: Whether it may be asked at every step of decoding; a subclass says so when it is quick.
    cheap: bool = False
    #: Where `load_oracle` found it, so that a worker process can find it again.
    origin: Origin | None = None

    @property
    def name(self) -> str:
        """What errors and reports call it."""
        return type(self).__name__

    @property
    def spec(self) -> str:
        """A description that is equal in every process and changes whenever the question does."""
        return describe_object(self)

    @property
    def fingerprint(self) -> str:
        """A digest of `spec`, for manifests and caches."""
        return hashlib.sha256(self.spec.encode()).hexdigest()[:32]

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """The answers; the arguments are already checked. This is what a subclass writes."""
        raise NotImplementedError(f"{type(self).__name__} must define judge(conditions, texts)")

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        """The parts of each row; override together with `part_names`. ``all(parts)`` is the answer."""
        return list(self(conditions, texts).reshape(-1, 1))

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """The progress of each row; override together with `progress_names`."""
        return self.parts(conditions, prefixes)

    def part_names(self, condition: str) -> list[str]:
        """A name for each part under this condition."""
        return [self.name]

    def progress_names(self, condition: str) -> list[str]:
        """A name for each bit of progress under this condition."""
        return self.part_names(condition)

    def __call__(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """One boolean a text."""
        check_rows(conditions, texts, self.name)
        return check_answers(self.judge(conditions, texts), len(texts), self.name)

    def parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        """For each row, the truth of every member of the conjunction this oracle is."""
        check_rows(conditions, texts, self.name)
        return check_ragged(self.judge_parts(conditions, texts), len(texts), self.name, "parts")

    def progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """For each row, what the prefix settles so far."""
        check_rows(conditions, prefixes, self.name)
        return check_ragged(self.judge_progress(conditions, prefixes), len(prefixes), self.name, "progress")

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        """Progress, and the stop label: would it hold if the text ended here, R(y ⊕ EOS) = C(y)?

        Labelling and decoding both call this one function, so that a guide is asked with exactly the
        bits it was trained on.
        """
        bits = self.progress(conditions, prefixes)
        if type(self).judge_progress is Oracle.judge_progress:
            # Progress is the parts, and the parts settle the answer: no need to ask again.
            return bits, hold_together(bits)
        return bits, self(conditions, prefixes)

    def __and__(self, other: Oracle) -> AllOf:
        return AllOf((self, other)) if isinstance(other, Oracle) else NotImplemented

    def __or__(self, other: Oracle) -> AnyOf:
        return AnyOf((self, other)) if isinstance(other, Oracle) else NotImplemented

    def __invert__(self) -> Oracle:
        return Not(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """How worker processes of this program get a copy; nothing pickled is read from disk."""
        if self.origin is not None:
            return self.origin.reload, ()
        if dataclasses.is_dataclass(self):
            # Rebuilt from its arguments, so that caches and compiled patterns are not sent along.
            arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
            return rebuild, (type(self), arguments)
        return super().__reduce_ex__(protocol)


def rebuild(kind: Callable[..., Oracle], arguments: dict[str, Any]) -> Oracle:
    """An oracle from its class and arguments."""
    return kind(**arguments)


@dataclasses.dataclass(frozen=True)
class Combination(Oracle):
    """What conjunction and disjunction share: their members' progress, one after the other."""

    members: tuple[Oracle, ...]
    symbol: ClassVar[str]

    def __post_init__(self) -> None:
        flat: list[Oracle] = []
        for member in self.members:
            flat += member.members if isinstance(member, type(self)) else (member,)
        object.__setattr__(self, "members", tuple(flat))

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        """Cheap when every member is."""
        return all(member.cheap for member in self.members)

    @property
    def name(self) -> str:
        """The members' names joined by the operator."""
        return "(" + f" {self.symbol} ".join(member.name for member in self.members) + ")"

    @property
    def spec(self) -> str:
        """The members' specs joined by the operator."""
        return "(" + f" {self.symbol} ".join(member.spec for member in self.members) + ")"

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """The members' progress, concatenated: how far each of them has come."""
        return _concatenate([member.progress(conditions, prefixes) for member in self.members])

    def progress_names(self, condition: str) -> list[str]:
        """The members' progress names, in order."""
        return [name for member in self.members for name in member.progress_names(condition)]

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        """Each member reads the prefixes once; their stop labels are combined."""
        read = [member.read_prefixes(conditions, prefixes) for member in self.members]
        return _concatenate([bits for bits, _ in read]), self._combine([stops for _, stops in read])

    def _combine(self, answers: list[BoolArray]) -> BoolArray:
        raise NotImplementedError

    def _ask_in_turn(self, conditions: Sequence[str], texts: Sequence[str], undecided: bool) -> BoolArray:
        """Cheap members first; each is asked only about rows whose answer so far is `undecided`."""
        answers = np.full(len(texts), undecided)
        for member in sorted(self.members, key=lambda member: not member.cheap):
            rows: list[int] = np.flatnonzero(answers == undecided).tolist()
            if len(rows) == len(texts):
                answers[:] = member(conditions, texts)
            elif rows:
                answers[rows] = member([conditions[i] for i in rows], [texts[i] for i in rows])
        return answers


class AllOf(Combination):
    """A conjunction: its parts are those of its members, one after the other."""

    symbol = "&"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether every member holds."""
        return self._ask_in_turn(conditions, texts, undecided=True)

    def judge_parts(self, conditions: Sequence[str], texts: Sequence[str]) -> list[BoolArray]:
        """The members' parts, concatenated."""
        return _concatenate([member.parts(conditions, texts) for member in self.members])

    def part_names(self, condition: str) -> list[str]:
        """The members' part names, in order."""
        return [name for member in self.members for name in member.part_names(condition)]

    def _combine(self, answers: list[BoolArray]) -> BoolArray:
        combined: BoolArray = np.logical_and.reduce(answers)
        return combined


class AnyOf(Combination):
    """A disjunction. It has one part, its answer."""

    symbol = "|"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """Whether any member holds."""
        return self._ask_in_turn(conditions, texts, undecided=False)

    def __invert__(self) -> Oracle:
        # De Morgan: the negation of a disjunction is a conjunction, and a conjunction has parts.
        return AllOf(tuple(~member for member in self.members))

    def _combine(self, answers: list[BoolArray]) -> BoolArray:
        combined: BoolArray = np.logical_or.reduce(answers)
        return combined


@dataclasses.dataclass(frozen=True)
class Not(Oracle):
    """A negation. It has one part, its answer; its progress is that of what it negates."""

    operand: Oracle

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        """Cheap when what it negates is."""
        return self.operand.cheap

    @property
    def name(self) -> str:
        """``~`` and the name of what it negates."""
        return f"~{self.operand.name}"

    @property
    def spec(self) -> str:
        """``~`` and the spec of what it negates."""
        return f"~{self.operand.spec}"

    def judge(self, conditions: Sequence[str], texts: Sequence[str]) -> BoolArray:
        """The opposite answer."""
        return ~self.operand(conditions, texts)

    def judge_progress(self, conditions: Sequence[str], prefixes: Sequence[str]) -> list[BoolArray]:
        """The progress of what it negates: the same facts about the prefix."""
        return self.operand.progress(conditions, prefixes)

    def progress_names(self, condition: str) -> list[str]:
        """The progress names of what it negates."""
        return self.operand.progress_names(condition)

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        """The operand's progress, and the opposite stop label."""
        bits, stops = self.operand.read_prefixes(conditions, prefixes)
        return bits, ~stops

    def __invert__(self) -> Oracle:
        return self.operand


def _concatenate(columns: Sequence[list[BoolArray]]) -> list[BoolArray]:
    """Row by row, the bits of every member in one array."""
    return columns[0] if len(columns) == 1 else [np.concatenate(row) for row in zip(*columns, strict=True)]


def hold_together(rows: Sequence[BoolArray]) -> BoolArray:
    """For each row of parts whether all of them hold; none at all hold trivially."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    if not len(rows) or not lengths.all():
        return np.array([row.all() for row in rows], dtype=bool)
    starts = np.cumsum(lengths) - lengths
    together: BoolArray = np.logical_and.reduceat(np.concatenate(rows), starts)  # one pass in C
    return together


def check_rows(conditions: Sequence[str], texts: Sequence[str], name: str) -> None:
    """Refuse anything but two lists of strings of one length.

    A string is itself a sequence of strings, so without this an oracle called on one text would judge
    its characters and nobody would see it.
    """
    for what, rows in (("conditions", conditions), ("texts", texts)):
        if isinstance(rows, (str, bytes)):
            raise InputError(
                f"a list of {what} for the oracle {name}",
                f"the single string {shorten(rows)}",
                f"Put it into a list: [{what[:-1]}].",
            )
        if not set(map(type, rows)) <= {str}:  # one pass in C; the exact position only when needed
            _refuse_other_than_strings(what, rows, name)
    if len(conditions) != len(texts):
        raise InputError(
            f"one condition for each text for the oracle {name}",
            f"{len(conditions)} conditions and {len(texts)} texts",
            "Repeat the condition for every text it belongs to.",
        )


def _refuse_other_than_strings(what: str, rows: Sequence[Any], name: str) -> None:
    for i, row in enumerate(rows):
        if not isinstance(row, str):
            raise InputError(
                f"strings as {what} for the oracle {name}",
                f"{type(row).__name__} at position {i}",
                "Decode tokens and turn columns into lists of str first.",
            )


def check_answers(answers: Any, count: int, name: str) -> BoolArray:
    """The answers as a boolean array (count,), or an error that says what came back instead."""
    array = np.asarray(answers)
    if array.size == 0 and count == 0:
        return np.zeros(0, dtype=bool)
    if array.dtype != np.bool_ or array.shape != (count,):
        raise OracleError(
            f"one boolean for each of {count} texts from the oracle {name}",
            f"{type(answers).__name__} of {array.dtype} with shape {array.shape}",
            "Return a list or array of bool; compare a score with a threshold first.",
        )
    return array


def check_ragged(rows: Any, count: int, name: str, what: str) -> list[BoolArray]:
    """One boolean vector a row, for parts and progress."""
    if not isinstance(rows, list) or len(rows) != count:
        found = f"a list of {len(rows)}" if isinstance(rows, list) else type(rows).__name__
        raise OracleError(
            f"a list with the {what} of each of {count} texts from the oracle {name}",
            found,
            "Return one boolean array a row.",
        )
    for i, row in enumerate(rows):
        if not (isinstance(row, np.ndarray) and row.dtype == np.bool_ and row.ndim == 1):
            raise OracleError(
                f"a one-dimensional boolean array as the {what} of each text from the oracle {name}",
                f"{type(row).__name__} at position {i}",
                "Return np.array([...], dtype=bool) for each row.",
            )
    return rows


def check_threshold(threshold: float) -> None:
    """Refuse what is no probability."""
    if not 0 <= threshold <= 1:
        raise InputError("a threshold between 0 and 1", f"{threshold}", "It is a probability; 0.5 is usual.")


def shorten(text: str | bytes, limit: int = 60) -> str:
    """A text as an error quotes it: escaped, and cut where it is long."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}… ({len(text)} characters)"
