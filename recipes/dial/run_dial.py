"""The dial in one command: draw, label, train a guide for each question, measure every requested rate.

    python recipes/dial/run_dial.py --work WORK --output OUT                          # the embedded model
    python recipes/dial/run_dial.py --settings recipes/dial/smollm2.toml --base smollm2.gguf \\
        --data DATA --work WORK --output OUT --workers 14 --deadline 560

DATA is what prepare_dial.py takes; with `--prepared` instead, the folder that it has written elsewhere.
Each stage leaves its result in WORK and is not done again when the command is repeated with the same
settings; one that was interrupted goes on. With `--deadline` guides are trained for as long as leaves time
for the curves, and points for which there is no time any more are left for the next call. OUT gets
dial-embedded.json or dial-smollm2.json (named after the settings) after every point, and at the end the
picture and results.md.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import around  # noqa: F401  (finds stages, guides and recording)
import numpy as np
import torch
from dial_curve import (
    Dialled,
    chance_of_one,
    compare_start,
    least_kl,
    measure_point,
    measure_turned,
    mix_ends,
    start_rates,
)
from dial_data import OPENINGS, REVIEW, TOXICITY, Opening, read_openings
from dial_page import illustrated_page
from dial_settings import CurveSettings, StopSettings, read_dial_settings
from drawn_texts import Chunk, describe, draw_chunks, read_chunks
from gauges import (
    CLEAN,
    POSITIVE,
    Gauged,
    Reaches,
    SentimentGauge,
    ToxicityGauge,
    compose,
    names_in,
)
from guide_training import (
    GuideData,
    build_guide,
    open_guide,
    plan_steps,
    prepare,
    seconds_a_step,
    share_time,
    train_guide,
)
from prepare_dial import ABOUT, CLASSIFIER, prepare_once
from progress_log import Clock, Stages
from side_work import TextMaker, Workers, label_folder, run_with_workers

from nado.calibration import Calibration, recalibrate
from nado.dial import Dial, Stop, measure_dial, measure_stop
from nado.drawing import draw
from nado.errors import InputError
from nado.huggingface import CausalModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.metrics import perplexity_of_log_p, share
from nado.oracles import Sentiment, audit
from nado.oracles.linear_classifier import LinearClassifier
from nado.oracles.protocol import Oracle
from nado.prompts import Prompt
from nado.samples import Samples, read_samples
from nado.storage import digest_json, read_json
from nado.training_data import split_by_prompt
from nado.versions import versions
from recording import record, write_page

KINDS = {POSITIVE: REVIEW, CLEAN: TOXICITY}  # whose held-out prompts a question's curve is measured on
_LAST_SECONDS = 20.0  # kept free before the deadline


class DialRun:
    """One call of the script."""

    def __init__(self, options: argparse.Namespace, workers: Workers) -> None:
        self.settings = read_dial_settings(options.settings)
        self.name = f"dial-{options.settings.stem}"
        self.base, self.output, self.workers = options.base, options.output, workers
        self.clock = Clock(options.output / "run.log", deadline=options.deadline)
        prepared = options.prepared
        if options.data is not None:
            prepared = prepare_once(options.data, options.work / "prepared")
        self.openings = read_openings(OPENINGS if prepared is None else prepared / "openings.jsonl")
        self.about = {} if prepared is None else read_json(prepared / ABOUT)
        self.questions = self._ask(prepared)
        inputs = [Path(self.base).name, self.settings.length_limit, [asdict(each) for each in self.openings]]
        inputs += [each.fingerprint for each in self.oracles.values()]
        self.stages = Stages(options.work, digest_json(inputs), self.clock)
        self.labels: dict[str, list[Future[float]]] = {}
        self._unseen: dict[str, list[str]] = {}
        self.left_out: list[str] = []

    def run(self) -> None:
        """Everything; results are on disk after every point."""
        self.clock.say(f"{len(self.openings):,} prompts, {self.clock.device}")
        self.draw()
        waiting = list(self.questions)
        while waiting:
            self.train(waiting)
            self.audit(waiting.pop(0))
        for name in self.questions:
            self.measure(name, self.settings.curve.rates, stops=True)
        for each in self.settings.formulas:
            self.measure(each.formula, each.rates, stops=each.stops)
        self.write()
        self.show()
        self.clock.say(
            "done" if not self.left_out else f"left for the next call: {len(self.left_out)} points"
        )

    # --- what is asked ----------------------------------------------------------------------------------

    def _ask(self, prepared: Path | None) -> dict[str, Oracle]:
        """The questions by name, and the gauges that all of them share."""
        settings, wanted = self.settings.oracles, self.settings.questions
        sentiment = SentimentGauge(settings.sentiment_steps)
        known: dict[str, Oracle] = {POSITIVE: Reaches(sentiment, settings.positive_from)}
        self.plain: dict[str, Oracle] = {POSITIVE: Sentiment("positive", settings.positive_from)}
        self.gauges: tuple[Any, ...] = (sentiment,) if settings.sentiment_steps else ()
        if CLEAN in wanted:
            if prepared is None:
                raise InputError(
                    "--data or --prepared, because these settings ask about toxicity",
                    "neither",
                    "The help of prepare_dial.py says what to get.",
                )
            classifier = LinearClassifier.load(prepared / CLASSIFIER, threshold=settings.toxic_from)
            toxicity = ToxicityGauge(classifier, settings.toxicity_steps)
            self.plain[CLEAN] = ~classifier
            known[CLEAN] = ~Reaches(toxicity, settings.toxic_from)
            self.gauges += (toxicity,) if settings.toxicity_steps else ()
        return {name: known[name] for name in wanted}

    @cached_property
    def oracles(self) -> dict[str, Gauged]:
        """The questions as guides are trained for them."""
        return {name: Gauged(each, self.gauges) for name, each in self.questions.items()}

    def oracle_of(self, formula: str) -> Oracle:
        """A formula's question, of the oracles that its guides were trained for."""
        found: Oracle = compose(formula, self.oracles)
        return found

    # --- p, its samples ---------------------------------------------------------------------------------

    @cached_property
    def model(self) -> CausalModel:
        """p: the base as it is, every text judged as it stands when it has ended or is cut."""
        loaded = load_model(
            self.base,
            length_limit=self.settings.length_limit,
            completion="limit",
            device=self.clock.device,
            dtype=torch.bfloat16 if self.settings.half else None,
        )
        assert isinstance(loaded, CausalModel)
        return loaded

    @cached_property
    def reader(self) -> HuggingFaceReader:
        """p as guides read it."""
        return HuggingFaceReader(self.model)

    def training_prompts(self) -> list[Prompt]:
        """The union of all kinds' training prompts: every guide learns on all of them."""
        limit = self.settings.draw.prompts or None
        kinds = [KINDS[name] for name in self.questions]
        return [
            Prompt(each.prompt, each.prompt)
            for kind in kinds
            for each in _of(self.openings, kind, "train")[:limit]
        ]

    def prompts_of(self, formula: str) -> list[str]:
        """The test prompts a curve is measured on: a question's own kind, and some of each for a formula."""
        count = self.settings.curve.prompts
        if formula in self.questions:
            return [each.prompt for each in _of(self.openings, KINDS[formula], "test")[:count]]
        return _spread([each for name in self.questions for each in self.prompts_of(name)], count)

    def draw(self) -> None:
        """Draw from p once, label for every question: labels are on their way when this returns."""
        settings, first = self.settings.draw, next(iter(self.questions))
        prompts = self.training_prompts()
        size = max(1, settings.chunk // settings.samples)
        chunks = [Chunk(prompts[at : at + size], settings.samples) for at in range(0, len(prompts), size)]

        def label(name: str, place: Path) -> "Future[float]":
            return self.workers.submit(label_folder, place, self.oracles[name], TextMaker(self.model))

        def work(folder: Path) -> dict[str, Any]:
            self.labels[first] = draw_chunks(
                self.clock,
                self.model,
                chunks,
                folder,
                partial(label, first),
                seed=settings.seed,
                batch=settings.batch,
            )
            return {"chunks": len(chunks), "prompts": len(prompts)}

        folder = self.stages.run(f"samples-{first}", asdict(settings), [], work)
        for name in self.oracles:
            if name in self.labels:
                continue
            if name != first:
                self.stages.run(f"samples-{name}", {}, [f"samples-{first}"], partial(_copy_samples, folder))
            places = sorted((self.stages.folder / f"samples-{name}").glob("chunk-*"))
            self.labels[name] = [label(name, each) for each in places]

    def samples(self, name: str) -> Samples:
        """Labelled samples of p."""
        for each in self.labels[name]:
            each.result()
        samples = read_chunks(self.stages.folder / f"samples-{name}")
        self.clock.say(f"labelled for {name}: {describe(samples)}")
        return samples

    # --- guides -----------------------------------------------------------------------------------------

    def train(self, waiting: Sequence[str]) -> None:
        """Train the first of the waiting guides, for its share of the time that is left."""
        name, settings = waiting[0], self.settings.guide

        def work(folder: Path) -> dict[str, Any]:
            samples, oracle = self.samples(name), self.oracles[name]
            draw_settings = self.settings.draw
            data = prepare(
                samples, self.reader, oracle, held_out=draw_settings.held_out, seed=draw_settings.seed
            )
            a_step = seconds_a_step(self._fresh(name, data), self.reader, data, settings)
            seconds = share_time(self.clock, [settings] * len(waiting), self.reserve(waiting))
            steps = plan_steps(folder, settings, seconds, a_step)
            self.clock.say(f"{name}: {steps} steps of {1e3 * a_step:.1f} ms in {seconds:.0f} s")
            trained = train_guide(
                self.clock, self._fresh(name, data), self.reader, data, oracle, settings, steps, folder
            )
            return {**trained, "drawn": describe(samples)}

        self.stages.run(f"guide-{name}", asdict(settings), [f"samples-{name}"], work)

    def audit(self, name: str) -> None:
        """What a question really answers to, on texts of p; asked afresh each time, nothing is remembered."""

        def work(folder: Path) -> dict[str, Any]:
            samples = read_chunks(self.stages.folder / f"samples-{name}")
            texts, conditions = samples.strings("text"), samples.strings("condition")
            return {"audit": audit(self.plain[name], texts, conditions).to_json()}

        self.stages.run(f"audit-{name}", self.plain[name].fingerprint, [f"samples-{name}"], work)

    def _fresh(self, name: str, data: GuideData) -> Any:
        oracle: Any = self.oracles[name]
        return build_guide(self.reader, oracle, self.settings.guide, data, Path(self.base).name)

    def reserve(self, waiting: Sequence[str]) -> float:
        """Seconds that everything but training will take from now on."""
        curve, dial = self.settings.curve, self.settings.dial
        turned = len(dial.rates) + len(self.strengths)
        points = len(self.questions) * (len(curve.rates) + turned + 1)
        points += sum(len(each.rates) + turned * each.stops + 1 for each in self.settings.formulas)
        return points * curve.seconds + 15.0 * len(waiting) + _LAST_SECONDS

    @cached_property
    def guides(self) -> dict[str, Any]:
        """All guides, calibrated on held-out training prompts."""
        found = {}
        for name, oracle in self.oracles.items():
            guide = open_guide(self.stages.folder / f"guide-{name}", self.reader, oracle)
            mended = self.stages.facts[f"guide-{name}"]["calibration"]
            if mended is not None:
                recalibrate(guide, Calibration(**mended))
            found[name] = guide
        return found

    # --- curves -----------------------------------------------------------------------------------------

    def measure(self, formula: str, rates: Sequence[float], *, stops: bool) -> None:
        """All points of a question or a formula."""
        self.measure_base(formula)
        self.measure_curve(formula, rates)
        if stops:
            self.measure_stops(formula)
            self.measure_turns(formula)

    def measure_base(self, formula: str) -> None:
        """How often p itself satisfies a formula, and what its guides say of that."""
        curve, prompts = self.settings.curve, self.prompts_of(formula)
        asked = sorted({*curve.rates, *self.settings.dial.rates})

        def work(folder: Path) -> dict[str, Any]:
            pairs = [Prompt(each, each) for each in prompts]
            draw(
                self.model,
                pairs,
                folder / "p",
                samples_per_prompt=curve.base_texts,
                seed=curve.seed + 7,
                batch_size=curve.batch,
            )
            oracle = self.oracle_of(formula)
            label_folder(folder / "p", oracle, None)  # type: ignore[arg-type]
            samples = read_samples(folder / "p")
            rates = start_rates(self.dialled(formula), prompts, curve.batch)
            satisfied = samples.array("satisfied")
            got = share("rate", satisfied, samples.strings("prompt"))
            log_p = _rows(samples, "log_p")
            surprise = perplexity_of_log_p(log_p).measure(samples.strings("prompt"))
            return {
                "got": {"value": got.value, "low": got.low, "high": got.high},
                "perplexity": {"value": surprise.value, "low": surprise.low, "high": surprise.high},
                "start": compare_start(rates, satisfied, curve.base_texts),
                "least_kl": {f"{rate:g}": least_kl(rates, rate) for rate in asked},
                "texts": len(samples),
                "prompts": len(prompts),
            }

        self.point(f"base/{_place(formula)}", formula, [_drawn(curve, "texts"), asked], work)

    def measure_curve(self, formula: str, rates: Sequence[float]) -> None:
        """Every requested rate as a soft rate."""
        for rate in rates:
            name = f"curve/{_place(formula)}/{rate:g}"
            work = partial(self._measure, formula, rate)
            self.point(name, formula, _drawn(self.settings.curve, "base_texts"), work)
            self.write()

    def _measure(self, formula: str, rate: float, folder: Path) -> dict[str, Any]:
        prompts = self.prompts_of(formula)
        return measure_point(self.dialled(formula), prompts, rate, self.settings.curve, folder)

    # --- the dial of measured stops ---------------------------------------------------------------------

    def measure_stops(self, formula: str) -> None:
        """How often texts of every strength satisfy, on training prompts that no guide has seen."""
        for strength in self.strengths:
            work = partial(self._measure_stop, formula, strength)
            config = [_drawn(self.settings.dial, "strengths"), self.settings.curve.batch]
            self.point(_stop_place(formula, strength), formula, config, work)
        places = [_stop_place(formula, strength) for strength in self.strengths]
        if all(each in self.stages.facts for each in places):
            stops = [_read_stop(self.stages.facts[each]) for each in places]
            self.stages.run(f"dial/{_place(formula)}", [], places, partial(self._make_dial, formula, stops))

    @property
    def strengths(self) -> list[float]:
        """What stops are measured at, p itself among them."""
        return sorted({0.0, *self.settings.dial.strengths})

    def _measure_stop(self, formula: str, strength: float, folder: Path) -> dict[str, Any]:
        return asdict(measure_stop(self.dialled(formula).plain, strength, **self._stops_are_drawn(formula)))

    def _make_dial(self, formula: str, stops: Sequence[Stop], folder: Path) -> dict[str, Any]:
        how = self._stops_are_drawn(formula)
        dial = measure_dial(self.dialled(formula).plain, strengths=self.strengths, known=stops, **how)
        return {"dial": dial.describe()}

    def _stops_are_drawn(self, formula: str) -> dict[str, Any]:
        """For which prompts, how often, and who judges."""
        settings = self.settings.dial
        return {
            "prompts": [Prompt(each, each) for each in self.unseen_prompts(formula)],
            "oracle": compose(formula, self.plain),
            "count": settings.texts,
            "seed": settings.seed,
            "batch_size": self.settings.curve.batch,
        }

    def unseen_prompts(self, formula: str) -> list[str]:
        """Training prompts that no guide has seen: those held out, then such that nothing was drawn for."""
        if formula not in self._unseen:  # every stop asks, and all samples are read for the answer
            self._unseen[formula] = self._find_unseen(formula)
        return self._unseen[formula]

    def _find_unseen(self, formula: str) -> list[str]:
        if formula not in self.questions:
            several = [self.unseen_prompts(name) for name in self.questions]
            return _spread([each for some in several for each in some], max(map(len, several)))
        settings = self.settings.draw
        _, held = split_by_prompt(self.samples(formula), settings.held_out, settings.seed)
        own = [each.prompt for each in _of(self.openings, KINDS[formula], "train")]
        held_out = set(held.strings("prompt"))
        found = [each for each in own if each in held_out]
        wanted = max(self.settings.dial.prompts, len(found))
        not_drawn = own[settings.prompts :] if settings.prompts else []
        return [*found, *not_drawn][:wanted]

    def measure_turns(self, formula: str) -> None:
        """Every rate by the dial, on the test prompts."""
        facts = self.stages.facts.get(f"dial/{_place(formula)}")
        if facts is None:
            self.left_out += [f"turned/{_place(formula)}/{rate:g}" for rate in self.settings.dial.rates]
            return
        dial = Dial.read(facts["dial"])
        for rate in self.settings.dial.rates:
            work = partial(self._measure_turned, formula, dial, rate)
            config = [_drawn(self.settings.curve, "base_texts"), facts["dial"]]
            self.point(f"turned/{_place(formula)}/{rate:g}", formula, config, work)
            self.write()

    def _measure_turned(self, formula: str, dial: Dial, rate: float, folder: Path) -> dict[str, Any]:
        prompts = self.prompts_of(formula)
        return measure_turned(self.dialled(formula), dial, prompts, rate, self.settings.curve, folder)

    def dialled(self, formula: str) -> Dialled:
        """What a formula's points are drawn from."""
        return Dialled(self.model, compose(formula, self.guides), self.oracle_of(formula))

    def point(self, name: str, formula: str, config: Any, work: Any) -> None:
        """A point as a stage, unless the deadline is too near."""
        if self.clock.left < self.settings.curve.seconds + 5 and not self.done_before(name):
            self.left_out.append(name)
            return
        after = [f"guide-{each}" for each in sorted(names_in(formula))]
        self.stages.run(name, [formula, config], after, work)

    def done_before(self, name: str) -> bool:
        """Whether a stage has left its record; if of other settings, it is only begun a little late."""
        record = self.stages.folder / name / "stage.json"
        return record.is_file() and "facts" in read_json(record)

    # --- results ----------------------------------------------------------------------------------------

    def write(self) -> None:
        """What is known so far."""
        facts = self.stages.facts
        titles = [*self.questions, *(each.formula for each in self.settings.formulas)]
        curves = {}
        for title in titles:
            place = f"curve/{_place(title)}/"
            points = [each for name, each in facts.items() if name.startswith(place)]
            base = facts.get(f"base/{_place(title)}")
            if points and base is not None:
                curves[title] = {"base": base, "points": points, "largest_error": _largest_error(points)}
                curves[title] |= self._mixed(place, [each["asked"] for each in points])
                curves[title]["p_verified"] = self._verify_p(title)
                curves[title] |= self._turned(title)
        metrics = {
            "curves": curves,
            "guides": {
                name: {**facts[f"guide-{name}"], **facts.get(f"audit-{name}", {})}
                for name in self.questions
                if f"guide-{name}" in facts
            },
            "classifier": self.about,
            "settings": {**self.settings.describe(), "base": Path(self.base).name},
            "left_out": self.left_out,
            "versions": versions(),
            "seconds": self.stages.seconds,
        }
        path = self.output / f"{self.name}.json"
        path.unlink(missing_ok=True)  # a run is recorded whole, and not joined to an earlier one
        record(self.name, metrics, output=path)

    def show(self) -> None:
        """What is known as a picture and tables, once a point of a curve is."""
        found = read_json(self.output / f"{self.name}.json")
        if not found["metrics"]["curves"]:
            return
        write_page(self.output, illustrated_page(found, self.name, self.output))

    def _mixed(self, place: str, rates: Sequence[float]) -> dict[str, Any]:
        """The same rates from the two ends alone, once both are there."""
        ends = [f"{place}{end}" for end in ("0", "1")]
        if not all(end in self.stages.facts for end in ends):
            return {}
        mixed = mix_ends(*(self.stages.folder / end for end in ends), rates)
        return {"mixed": mixed, "largest_error_mixed": _largest_error(mixed)}

    def _turned(self, title: str) -> dict[str, Any]:
        """The dial of measured stops and its points, once there are any."""
        place = f"turned/{_place(title)}/"
        points = [each for name, each in self.stages.facts.items() if name.startswith(place)]
        if not points:
            return {}
        errors = [abs(each["got"]["value"] - each["asked"]) for each in points]
        dial = self.stages.facts[f"dial/{_place(title)}"]["dial"]
        return {"dial": dial, "turned": points, "largest_error_turned": max(errors)}

    def _verify_p(self, formula: str) -> dict[str, Any]:
        """What p alone comes to at both ends, when as many of its texts are asked about as of the guide's."""
        samples = read_samples(self.stages.folder / "base" / _place(formula) / "p")
        curve = self.settings.curve
        hits = samples.array("satisfied").reshape(-1, curve.base_texts).sum(axis=1)
        return {
            "texts": curve.texts,
            "rate_1": float(np.mean([chance_of_one(int(k), curve.base_texts, curve.texts) for k in hits])),
            "rate_0": float(
                np.mean(
                    [
                        1 - chance_of_one(curve.base_texts - int(k), curve.base_texts, curve.texts)
                        for k in hits
                    ]
                )
            ),
        }


def _of(openings: Sequence[Opening], kind: str, split: str) -> list[Opening]:
    found = [each for each in openings if (each.kind, each.split) == (kind, split)]
    if not found:
        raise InputError(
            f"{kind} prompts to {split}", "none", "Run prepare_dial.py without --without-toxicity."
        )
    return found


def _spread(prompts: Sequence[str], count: int) -> list[str]:
    """At most `count` of the prompts, evenly spaced, so that all kinds are among them."""
    places = np.linspace(0, len(prompts) - 1, min(count, len(prompts))).astype(int)
    return [prompts[place] for place in places.tolist()]


def _copy_samples(source: Path, folder: Path) -> dict[str, Any]:
    """The same samples again, for another oracle's labels."""
    chunks = sorted(source.glob("chunk-*"))
    for each in chunks:
        shutil.copytree(each, folder / each.name, ignore=shutil.ignore_patterns("labels"), dirs_exist_ok=True)
    return {"chunks": len(chunks)}


def _drawn(settings: CurveSettings | StopSettings, *left_out: str) -> dict[str, Any]:
    """What the texts of one point depend on: neither on other points, nor on the time kept free for one."""
    others = {"rates", "seconds", *left_out}
    return {name: value for name, value in asdict(settings).items() if name not in others}


def _stop_place(formula: str, strength: float) -> str:
    return f"stops/{_place(formula)}/{strength:g}"


def _read_stop(facts: dict[str, Any]) -> Stop:
    return Stop(**{name: value for name, value in facts.items() if name != "stage_seconds"})


def _rows(samples: Samples, name: str) -> list[Any]:
    column = samples.ragged(name)
    return [column.row(row) for row in range(len(samples))]


def _place(formula: str) -> str:
    """A formula as the name of a folder."""
    return formula.replace("~", "not-").replace("&", "and").replace("|", "or").replace(" ", "_")


def _largest_error(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        name: max(abs(each[name]["value"] - each["asked"]) for each in points)
        for name in ("got", "corrected")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """All stages, one after the other."""
    return run_with_workers(DialRun, _parse(arguments))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--base", default="tiny", help="GGUF file, folder or name of the base model")
    parser.add_argument("--settings", type=Path, default=here / "embedded.toml", help="what is done")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--data", type=Path, help="the folder of the corpora")
    given.add_argument("--prepared", type=Path, help="what prepare_dial.py has made of them")
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--output", type=Path, required=True, help="where what is small goes")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which all is to be done")
    parser.add_argument("--workers", type=int, default=0, help="processes that label")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
