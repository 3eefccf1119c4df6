"""A dial: any share of satisfied texts, by a coin between two settings whose shares were measured.

A target rate (`Guidance.target_rate`) makes its factors from R(x) and is as good as R: what a guide does not
know pulls every rate towards p's own. A dial has asked the oracle instead, once: texts of several strengths
were drawn for prompts at hand and judged. A rate between two of these *stops* is then a mixture, in which a
coin decides which of the two writes a text. No finished text is judged for that any more.

The target at rate r is itself such a mixture, r·p(·|C) + (1 − r)·p(·|¬C), and where all prompts are alike one
of p and one of these two as well. As KL(·‖p) is convex, a mixture costs at most the mean of what its stops
cost. The lower convex hull of (rate, KL) has the stops for which that bound is least at every rate; others
are left out.

What is reached is the share of all texts together, for prompts like those that it was measured on: a prompt
that satisfies often by itself does so more often than others at every rate.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nado.composition import Composable, Composition
from nado.drawing import default_batch_size, draw_rows, require_prompts
from nado.errors import CoverageError, InputError, MismatchError, require_at_least
from nado.following import GuideFollower
from nado.guided_language_model import GuidedLanguageModel
from nado.labeling import label
from nado.language_model import LanguageModel
from nado.metrics import share
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt
from nado.proposals import Component, Guided, Proposal, Tempered
from nado.samples import Samples
from nado.storage import digest_json

STRENGTHS = (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)

_FORMAT = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stop:
    """One setting that was measured. A strength below 0 leads away: the guide of ¬C to that power."""

    strength: float  # 0 is p itself
    rate: float  # share of satisfied texts, with its 95 % interval
    low: float
    high: float
    kl: float  # KL(q‖p) in nats a text


@dataclass(frozen=True)
class Turn:
    """Where a dial stands: which two stops write the texts, and how many of them the second one does."""

    lower: Stop
    upper: Stop
    share: float  # of the upper one

    @property
    def rate(self) -> float:
        """The share of satisfied texts that is to be expected."""
        return self._mixed(self.lower.rate, self.upper.rate)

    @property
    def interval(self) -> tuple[float, float]:
        """Where that share lies: the stops' own 95 % intervals, mixed."""
        return self._mixed(self.lower.low, self.upper.low), self._mixed(self.lower.high, self.upper.high)

    @property
    def stops(self) -> list[tuple[float, Stop]]:
        """The stops that write at least some texts, with their shares."""
        both = ((1 - self.share, self.lower), (self.share, self.upper))
        return [(part, stop) for part, stop in both if part > 0]

    def _mixed(self, lower: float, upper: float) -> float:
        return (1 - self.share) * lower + self.share * upper


@dataclass(frozen=True)
class Dial:
    """What was measured: one stop a strength, for one base, guide and oracle."""

    measured: tuple[Stop, ...]
    prompts: int
    texts: int  # of each stop
    model: str  # a digest of base and guide
    oracle: str  # fingerprint of who judged
    doubt: float = 0.0  # of the guidance, at every stop
    plausible: float = 0.0
    drawn: str = ""  # a digest of the prompts, texts a prompt and seed

    def __post_init__(self) -> None:
        if len({stop.rate for stop in self.measured}) < 2:
            raise InputError(
                "stops of at least two different rates",
                f"{sorted({stop.rate for stop in self.measured})}",
                "Measure more strengths; a guide that changes nothing has no dial.",
            )

    @cached_property
    def stops(self) -> tuple[Stop, ...]:
        """Those that are used, by their rates: the lower convex hull of (rate, KL)."""
        return tuple(lower_hull(self.measured))

    def at(self, rate: float) -> Turn:
        """Where to turn the dial for a rate; beyond the outermost stop is that stop."""
        if not 0 <= rate <= 1:
            raise InputError("a rate between 0 and 1", f"{rate}", "Give a share of texts: 0.8 is 80 %.")
        first, last = self.stops[0], self.stops[-1]
        for end, beyond in ((first, rate < first.rate), (last, rate > last.rate)):
            if beyond:
                return Turn(end, end, 1.0)
        lower, upper = next(pair for pair in pairwise(self.stops) if rate <= pair[1].rate)
        return Turn(lower, upper, (rate - lower.rate) / (upper.rate - lower.rate))

    def reaches(self, rate: float) -> bool:
        """Whether a rate lies between the outermost stops, or within the interval of one of them."""
        return self.stops[0].low <= rate <= self.stops[-1].high

    def was_measured(self, how: dict[str, Any]) -> bool:
        """Whether its stops were measured like this."""
        return all(getattr(self, name) == value for name, value in how.items())

    def describe(self) -> dict[str, Any]:
        """As JSON-ready values; `Dial.read` takes them."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Dial":
        """A dial that was described."""
        found = values.get("format") if isinstance(values, dict) else None
        if found != _FORMAT:
            raise InputError(f"a dial of format {_FORMAT}", f"format {found}", "Measure it again.")
        known = {name: value for name, value in values.items() if name != "format"}
        try:
            return cls(**{**known, "measured": tuple(Stop(**each) for each in known["measured"])})
        except (KeyError, TypeError) as error:
            raise InputError("a dial as it was written", f"another: {error}", "Measure it again.") from error


def lower_hull(stops: Iterable[Stop]) -> list[Stop]:
    """The stops from the least rate to the greatest between which mixtures cost least, by rate."""
    hull: list[Stop] = []
    for stop in sorted(stops, key=lambda each: (each.rate, each.kl)):
        if hull and stop.rate == hull[-1].rate:
            continue  # no nearer to any rate, and dearer
        while len(hull) > 1 and not _below(hull[-1], hull[-2], stop):
            hull.pop()
        hull.append(stop)
    return hull


def _below(middle: Stop, left: Stop, right: Stop) -> bool:
    """Whether the stop in the middle costs less than a mixture of the two beside it at its rate."""
    share = (middle.rate - left.rate) / (right.rate - left.rate)
    return middle.kl < (1 - share) * left.kl + share * right.kl


def measure_dial(
    model: GuidedLanguageModel,
    prompts: Sequence[Prompt],
    oracle: Oracle,
    *,
    strengths: Sequence[float] | None = None,
    count: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
    known: Iterable[Stop] = (),
    earlier: Dial | None = None,
    on_stop: Callable[[Stop], None] | None = None,
) -> Dial:
    """Draw `count` texts a prompt at every strength, ask the oracle about them, and make a dial of that.

    Take prompts that the guide was not trained on. Without `strengths`: from −4 to 4, or from 0 where the
    guide cannot be negated, so that rates below p's own are out of reach. p itself is always a stop. Stops in
    `known` were measured before in the same way (`measure_stop`), and are not again. An `earlier` dial knows
    how it was measured: where that was in the same way, its stops stay and none is measured again.
    """
    require_prompts(prompts)
    require_at_least(1, count=count, batch_size=batch_size)
    _require_turnable(model)
    how = _how_measured(model, prompts, oracle, count, seed)
    kept = earlier.measured if earlier is not None and earlier.was_measured(how) else ()
    asked = _reachable(model) if strengths is None else strengths
    wanted = sorted({0.0, *asked, *(stop.strength for stop in kept)})
    found = {stop.strength: stop for stop in (*known, *kept)}
    for strength in wanted:  # refused before one is drawn
        _component(model, strength)
    for strength in wanted:
        if strength in found:
            continue
        found[strength] = measure_stop(
            model, strength, prompts, oracle, count=count, seed=seed, batch_size=batch_size
        )
        if on_stop is not None:
            on_stop(found[strength])
    return Dial(tuple(found[strength] for strength in wanted), **how)


def _how_measured(
    model: GuidedLanguageModel, prompts: Sequence[Prompt], oracle: Oracle, count: int, seed: int
) -> dict[str, Any]:
    """All of a dial but its stops."""
    return {
        "prompts": len(set(prompts)),
        "texts": count * len(prompts),
        "model": _identify(model),
        "oracle": oracle.fingerprint,
        "doubt": model.guidance.doubt,
        "plausible": model.guidance.plausible,
        "drawn": digest_json([[list(each) for each in prompts], count, seed]),
    }


def measure_stop(
    model: GuidedLanguageModel,
    strength: float,
    prompts: Sequence[Prompt],
    oracle: Oracle,
    *,
    count: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
) -> Stop:
    """One stop of a dial, for whoever keeps each as soon as it is there; `measure_dial` measures them all."""
    require_prompts(prompts)
    require_at_least(1, count=count, batch_size=batch_size)
    _require_turnable(model)
    asked = [each for each in prompts for _ in range(count)]
    samples = _draw(model, Proposal((_component(model, strength),)), asked, seed, batch_size)
    conditions, finished = samples.strings("condition"), samples.array("finished")
    answers = label(oracle, conditions, samples.strings("text"), finished=finished, parts=False).satisfied
    found = share("rate", answers, list(zip(samples.strings("prompt"), conditions, strict=True)))
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    kl = float(np.mean(log_ratios(samples)))
    return Stop(strength, found.value, found.low, found.high, max(0.0, kl))


def draw_dialled(
    model: GuidedLanguageModel,
    dial: Dial,
    rate: float,
    prompts: Sequence[Prompt],
    *,
    seed: int = 0,
    batch_size: int | None = None,
) -> Samples:
    """One text for each prompt, of which the given share shall satisfy the oracle; none of them is judged.

    `log_proposal` is that of the mixture: either stop may have written a text. Where it does not cover p the
    samples say so, and are neither weighted nor trained on.
    """
    require_prompts(prompts)
    return _draw(model, turn_dial(model, dial, rate), prompts, seed, batch_size)


def turn_dial(model: GuidedLanguageModel, dial: Dial, rate: float) -> Proposal:
    """What texts at a rate are drawn from: a mixture of the two stops beside it.

    A rate that the dial does not reach gives its outermost stop alone, with a warning.
    """
    _require_turnable(model)
    _require_measured(dial, model)
    turn = dial.at(rate)
    if not dial.reaches(rate):
        _log.warning("a rate of %g is out of this dial's reach: %.3f is nearest", rate, turn.rate)
    stops = turn.stops
    parts = tuple(_component(model, stop.strength) for _, stop in stops)
    return Proposal(parts, tuple(part for part, _ in stops))


def _draw(
    model: GuidedLanguageModel,
    proposal: Proposal,
    prompts: Sequence[Prompt],
    seed: int,
    batch_size: int | None,
) -> Samples:
    size = batch_size or default_batch_size(model)
    table = draw_rows(model.base, prompts, range(len(prompts)), proposal=proposal, seed=seed, batch_size=size)
    return Samples(table, covers=_covers(proposal, model.base))


def _covers(proposal: Proposal, base: LanguageModel[Any]) -> bool:
    try:
        proposal.require_covers(base)
    except CoverageError:
        return False
    return True


def log_ratios(samples: Samples) -> NDArray[np.float64]:
    """log m − log p of every text: their mean estimates KL(m‖p)."""
    return samples.ragged("log_proposal").sums() - samples.ragged("log_p").sums()


# --- what stops are made of ---------------------------------------------------------------------------


def _component(model: GuidedLanguageModel, strength: float) -> Component:
    if strength == 0:
        return Tempered()
    guide = _formula(model)
    guidance = replace(model.guidance, strength=abs(strength))
    led = guide if strength > 0 else _away(guide)
    return Guided(GuidedLanguageModel(model.base, led, guidance=guidance, oracle=model.oracle))


def _formula(model: GuidedLanguageModel) -> Composable:
    assert isinstance(model.follower, GuideFollower)
    return model.follower.formula


def _away(guide: Composable) -> Composition:
    """¬C, even where training texts were cut at the limit: whatever that leads to is measured."""
    return Composition("~", (guide,), measured=True)


def _reachable(model: GuidedLanguageModel) -> tuple[float, ...]:
    try:
        _away(_formula(model))
    except InputError as error:
        _log.warning("rates below p's own are out of reach, since the guide cannot be negated: %s", error)
        return tuple(strength for strength in STRENGTHS if strength >= 0)
    return STRENGTHS


def _require_turnable(model: GuidedLanguageModel) -> None:
    """Refuse what no guide leads, and guidance with a rate of its own or that asks for C at every stop."""
    if not isinstance(model.follower, GuideFollower):
        raise InputError(
            "a model led by a guide or a formula over guides",
            f"one led by a {type(model.follower).__name__}",
            "A dial turns guides.",
        )
    guidance = model.guidance
    own = {
        "an exact end": guidance.exact_end,
        f"a floor of {guidance.floor:g}": guidance.floor > 0,
        f"a target rate of {guidance.target_rate:g}": guidance.soft,
        f"a strength of {guidance.strength:g}": guidance.strength != 1,
    }
    if found := [what for what, wanted in own.items() if wanted]:
        raise InputError(
            "guidance of strength 1 with nothing but a doubt or plausible tokens",
            found[0],
            "A dial has strengths of its own, and stops that lead away from what the oracle asks for.",
        )


def _identify(model: GuidedLanguageModel) -> str:
    """What a dial belongs to, but for the guidance, which it names by itself."""
    assert isinstance(model.follower, GuideFollower)
    told = [oracle.fingerprint for oracle, bits in model.follower.told if bits]
    parts = [model.base.fingerprint, model.follower.fingerprint, *told]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]


def _require_measured(dial: Dial, model: GuidedLanguageModel) -> None:
    """Refuse a dial of another base, guide or guidance."""
    if dial.model != _identify(model):
        raise MismatchError("the base and guide this dial was measured with", "others", "Measure it again.")
    for name in ("doubt", "plausible"):
        mine, found = getattr(dial, name), getattr(model.guidance, name)
        if mine != found:
            hint = f"Take {mine:g}, or measure it again."
            raise MismatchError(f"the {name} this dial was measured with, {mine:g}", f"{found:g}", hint)
