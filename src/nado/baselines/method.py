"""What every method of a comparison is given, and what it gives back: the interface that q has, too.

A method is prepared for a task with some settings, and is then a system: prompts in, one text for each out,
with what that took of the base. Methods that train get the very draws and labels that the guide learned from;
methods that spend their work while decoding get as many base tokens a returned text as q took, or a stated
multiple of that.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from nado.drawing import default_batch_size, draw_rows
from nado.errors import InputError
from nado.labeling import label
from nado.language_model import LanguageModel
from nado.oracles.protocol import BoolArray, Oracle
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples

Settings: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

SHARED = "shared "  # begins the keys of what several methods ask for
_ATTEMPTS = 32  # bits of a row's number below that of its attempt


class Row(NamedTuple):
    """One text as tokens."""

    tokens: list[int]  # EOS included when the text ended itself
    finished: bool
    log_q: float | None = None  # of the whole text, where it was sampled from a known distribution


@dataclass(frozen=True)
class Texts:
    """One text for each prompt, and the tokens that the base, or a model as large, was run for."""

    rows: list[Row]
    base_tokens: int


@dataclass(frozen=True)
class Training:
    """What preparing a system took."""

    texts: int  # read, repeats counted
    tokens: int
    seconds: float

    def plus(self, other: "Training") -> "Training":
        """Both of them."""
        return Training(self.texts + other.texts, self.tokens + other.tokens, self.seconds + other.seconds)


class System(Protocol):
    """Something that writes texts."""

    @property
    def training(self) -> Training | None:
        """What it was trained with; None for one that was not."""
        ...

    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """One text for each prompt; a pure function of the prompts, their order and the seed."""
        ...


@dataclass(frozen=True)
class Provisions:
    """What every method is given: the same for all of them, but for the budget."""

    base: LanguageModel[Any]
    oracle: Oracle
    budget: float  # base tokens for each returned text
    text_length: float  # tokens of a text of the base, on average
    samples: Samples | None = None  # the guide's labelled training draws
    training_texts: int = 8000  # a trained method reads, repeats counted
    batch_size: int | None = None
    seed: int = 0  # of training
    memory: dict[str, Any] = field(default_factory=dict, compare=False)  # what several methods share

    def __post_init__(self) -> None:
        for name in ("budget", "text_length"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(
                    f"a {name.replace('_', ' ')} above 0, in tokens",
                    f"{value:g}",
                    "Let the guided model and the base write some texts first: it is their mean length.",
                )

    @property
    def draws(self) -> int:
        """Texts of the base that the budget pays for, at least one."""
        return max(1, int(self.budget / self.text_length + 1e-9))

    @property
    def rows(self) -> int:
        """Texts that are written side by side."""
        return self.batch_size or default_batch_size(self.base)

    @cached_property
    def tells_conditions(self) -> bool:
        """Whether trained models have to be told conditions: they vary, and prompts do not say them."""
        if self.samples is None:
            return False
        pairs = set(zip(self.samples.strings("prompt"), self.samples.strings("condition"), strict=True))
        varies = len({condition for _, condition in pairs}) > 1
        return varies and not all(_says(prompt, condition) for prompt, condition in pairs)

    def read_as(self, prompt: Prompt) -> Prompt:
        """What a model that was trained for the task reads for a prompt."""
        if not self.tells_conditions:
            return prompt
        return Prompt(f"{prompt.condition}: {prompt.prompt}", prompt.condition)

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """What `make` gives, made once: two settings, or two methods, may need the same trained model."""
        if key not in self.memory:
            self.memory[key] = make()
        found: T = self.memory[key]
        return found

    def forget(self) -> None:
        """Drop what no other method will ask for: trained models take room."""
        for key in [key for key in self.memory if not key.startswith(SHARED)]:
            del self.memory[key]


def _says(prompt: str, condition: str) -> bool:
    pieces = [piece.strip().lower() for piece in condition.split(",")]
    return all(piece in prompt.lower() for piece in pieces)


class Method:
    """A way to write texts that satisfy an oracle. Subclasses are named in `nado.baselines.METHODS`."""

    name: ClassVar[str]
    source: ClassVar[str]  # who proposed it
    sized: ClassVar[bool] = (
        False  # it takes as much budget as it is given, so that several are worth measuring
    )
    trained: ClassVar[bool] = False  # it learns from the guide's draws and labels
    one_text: ClassVar[bool] = False  # it writes the same text of a prompt every time

    def obstacle(self, given: Provisions) -> str | None:
        """Why it cannot be used here; None where it can."""
        return None

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """The settings it is tuned over, the usual one first."""
        return [{}]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The method with these settings, trained where it needs to be."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(given, settings)")


@dataclass(frozen=True)
class Sampled:
    """A system that samples from a language model, which may be guided, tuned or a product of several."""

    model: LanguageModel[Any]
    batch_size: int
    passes: int = 1  # of models as large as the base, for one token
    training: Training | None = None
    read_as: Callable[[Prompt], Prompt] | None = None  # what the model reads in place of the base's prompt

    def write(self, prompts: Sequence[Prompt], seed: int) -> Texts:
        """Texts drawn with the noise that every other sampling system gets for the same row."""
        asked = prompts if self.read_as is None else [self.read_as(each) for each in prompts]
        rows = draw_texts(self.model, asked, seed, self.batch_size)
        return Texts(rows, self.passes * count_tokens(rows))


def draw_texts(
    model: LanguageModel[Any],
    prompts: Sequence[Prompt],
    seed: int,
    batch_size: int,
    numbers: Sequence[int] | None = None,
) -> list[Row]:
    """One text for each prompt from a language model; `numbers` choose each row's noise."""
    numbers = range(len(prompts)) if numbers is None else numbers
    table = draw_rows(model, list(prompts), numbers, proposal=Proposal(), seed=seed, batch_size=batch_size)
    columns = (table[name].to_pylist() for name in ("tokens", "finished", "log_p"))
    return [Row(tokens, ended, float(sum(log_p))) for tokens, ended, log_p in zip(*columns, strict=True)]


def number_attempts(row: int, attempt: int) -> int:
    """The number of a row's noise at an attempt; the first has that of plain sampling."""
    return row + (attempt << _ATTEMPTS)


def count_tokens(rows: Sequence[Row]) -> int:
    """Tokens written."""
    return sum(len(row.tokens) for row in rows)


class Judged(NamedTuple):
    """What the oracle says of texts."""

    satisfied: BoolArray
    parts: "np.ndarray[Any, np.dtype[np.float64]]"  # share of the parts that hold


def judge(given: Provisions, prompts: Sequence[Prompt], rows: Sequence[Row]) -> Judged:
    """Whether each text satisfies the oracle, and how many of its parts hold."""
    labels = label(
        given.oracle,
        [each.condition for each in prompts],
        given.base.decode([row.tokens for row in rows]),
        finished=[row.finished for row in rows],
    )
    assert labels.parts is not None
    shares = [
        float(np.mean(labels.parts.row(row))) if len(labels.parts.row(row)) else 1.0
        for row in range(len(rows))
    ]
    return Judged(labels.satisfied, np.array(shares))


def require_samples(given: Provisions) -> Samples:
    """The labelled draws; methods that train are not prepared without."""
    if given.samples is None or not given.samples.labelled or not len(given.samples):
        raise InputError("labelled training draws", "none", "Give samples= with labels, those the guide had.")
    return given.samples


def missing_labels(given: Provisions, *, both: bool) -> str | None:
    """Why nothing can be learned from the draws; `both`: texts that fail are needed, too."""
    if given.samples is None or not given.samples.labelled or not len(given.samples):
        return "there are no labelled training draws to learn from"
    satisfied = given.samples.array("satisfied")
    if not satisfied.any():
        return f"none of the {len(satisfied):,} training draws satisfies the oracle"
    if both and satisfied.all():
        return f"all of the {len(satisfied):,} training draws satisfy the oracle"
    return None


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._began
