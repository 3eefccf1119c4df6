"""A study's guide against what a user would have done instead: the same prompts, seeds and budget for all.

The guided model writes first; what it took of the base for each text is the budget of methods that do their
work while decoding, or a stated multiple of that. Methods that train get the guide's own training draws and
labels. The settings of every method are chosen on prompts that are not evaluated. Each method's texts are
kept in a folder of their own, and are made again only where something they depend on has changed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nado.baselines import METHODS, Method, Provisions, Sampled, System, Training
from nado.baselines.greedy import Searched
from nado.baselines.method import SHARED, Settings, Stopwatch
from nado.baselines.tuning import choose_settings, describe_criterion
from nado.errors import InputError
from nado.guidance import Guidance
from nado.guide import Guide
from nado.guide_files import load_guide
from nado.guided_language_model import GuidedLanguageModel
from nado.metrics.likelihood import LogP
from nado.metrics.resampling import Resampling
from nado.oracles.suggestion import suggest
from nado.prompts import Prompt
from nado.report import Examples, choose_rows, pair_examples, write_report
from nado.report.comparisons import report_from_comparison
from nado.report.content import ExampleText
from nado.samples import Samples, join_samples, read_samples
from nado.storage import hold, read_json, write_json
from nado.study.evaluation import describe_evaluation, measure_texts, score_texts
from nado.study.materials import Materials, digest_prompts
from nado.study.pairing import adjust, compare_fluency, compare_satisfied, first_texts, measure_diversity
from nado.study.reading import Study
from nado.study.reporting import trace_written
from nado.study.running import Run, run_study
from nado.study.sections import GenerateConfig
from nado.study.stages import Stage, require_same
from nado.study.systems import Written, judge_texts, read_texts, save_texts

REFERENCE, SEARCHED = "q", "q-beam"
GUIDED = {REFERENCE: "q", "q-exact-end": "q, exact end", "q-tuned": "q, tuned", SEARCHED: "q, beams"}
STRENGTHS = (1.0, 1.5, 2.0, 3.0)
DOUBT = 0.03
Say = Callable[[str], None]


class Guided(Method):
    """The guided model itself, behind the interface of the methods it is compared with."""

    source = "NADO, Meng et al. 2022"
    trained = True

    def __init__(self, key: str, load: Callable[[], Guide], config: GenerateConfig) -> None:
        self._key, self._load = key, load
        exact_end, self._tuned = key == "q-exact-end", key == "q-tuned"
        if exact_end:
            config = replace(config, target_rate=1.0)
        if self._tuned:
            config = replace(config, doubt=0.0)
        self.guidance = config.guidance(exact_end=exact_end)

    @property
    def name(self) -> str:  # type: ignore[override]
        """q, with how it differs from the study's."""
        return GUIDED[self._key]

    def obstacle(self, given: Provisions) -> str | None:
        """An exact end needs an oracle that can be asked at every step, a strength a rate of 1."""
        if self._tuned and self.guidance.soft:
            return "a target rate leaves no strength to be tuned"
        return METHODS["base-exact-end"].obstacle(given) if self.guidance.exact_end else None

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """The study's own settings, or several strengths, with and without doubt."""
        if self._tuned:
            settings = [{"strength": strength} for strength in STRENGTHS]
            return settings + [{**each, "doubt": DOUBT} for each in settings]
        usual, chosen = Guidance(), self.guidance
        names = ("strength", "target_rate", "doubt", "plausible")
        return [
            {name: getattr(chosen, name) for name in names if getattr(chosen, name) != getattr(usual, name)}
        ]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The guided model."""
        guidance = replace(self.guidance, **settings)
        model = GuidedLanguageModel(given.base, self._load(), guidance=guidance, oracle=given.oracle)
        return Sampled(model, given.rows)


class GuidedBeams(Guided):
    """The guided model searched by p·R, with an exact end where the oracle can be asked for one."""

    sized = True
    one_text = True

    def __init__(self, load: Callable[[], Guide], config: GenerateConfig) -> None:
        super().__init__(SEARCHED, load, replace(config, target_rate=1.0))

    def obstacle(self, given: Provisions) -> str | None:
        """That of the base's own beams."""
        return METHODS["beam"].obstacle(given)

    def grid(self, given: Provisions) -> list[dict[str, Any]]:
        """What the base's own beams are tuned over."""
        (own,) = super().grid(given)
        own = {"exact_end": METHODS["base-exact-end"].obstacle(given) is None, **own}
        return [{**each, **own} for each in METHODS["beam"].grid(given)]

    def prepare(self, given: Provisions, settings: Settings) -> System:
        """The search."""
        guidance = replace(self.guidance, exact_end=settings["exact_end"])
        model = GuidedLanguageModel(given.base, self._load(), guidance=guidance, oracle=given.oracle)
        return Searched(model, settings["beams"], settings["length_penalty"], given.rows)


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: a method, at one budget where it takes what it is given."""

    key: str  # of its folder
    method: Method
    multiple: float = 1.0

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.method.name}, {self.multiple:g}× budget" if self.method.sized else self.method.name


def compare_study(
    study: Study,
    folder: str | Path,
    *,
    only: Sequence[str] | None = None,
    limit: int | None = None,
    force: bool = False,
    say: Say | None = None,
) -> dict[str, Any]:
    """Compare a study's guide with the other methods, in `folder`/compare; returns what was measured.

    The study is run as far as its guide, where that is not there yet. `only` names methods; q and base
    sampling are always among them, since budgets and tests refer to them. `limit` evaluates that many prompts
    only.
    """
    folder, tell = Path(folder), say or (lambda text: None)
    keys = _choose_keys(only)
    if limit is not None and limit < 1:
        raise InputError("a limit of at least 1 prompt", f"{limit}", "Leave --limit out for all of them.")
    run_study(study, folder, force=force, until="train", say=tell)
    comparing = Comparing(study, folder, limit)
    with hold(folder / "compare"):
        return comparing.run(keys, force=force, say=tell)


def method_keys() -> list[str]:
    """The names of all methods, q's among them."""
    return [*GUIDED, *METHODS]


def _choose_keys(only: Sequence[str] | None) -> list[str]:
    known = method_keys()
    for name in only or ():
        if name not in known:
            raise InputError("names of methods", repr(name), suggest(name, known))
    asked = known if only is None else [REFERENCE, "base", *only]
    return [name for name in known if name in asked]


class Comparing:
    """A study's comparison: what its methods are given, and the work of each."""

    def __init__(self, study: Study, folder: Path, limit: int | None) -> None:
        self.study, self.folder = study, folder
        self.place = folder / "compare"
        self.materials = Materials(study)
        self.generate = replace(study.generate, search="sample")
        held_out = self.materials.tasks.held_out
        self.prompts = held_out[: self.generate.prompts][:limit]
        self.tuning, self.tuning_source = self._choose_tuning(held_out[len(self.prompts) :])
        stages = Run(study, folder).stages()
        self.train_stage = next(stage for stage in stages if stage.name == "train")

    def _choose_tuning(self, rest: Sequence[Prompt]) -> tuple[list[Prompt], str]:
        """Prompts to tune on: held-out ones that are not evaluated, or, where those are few, of training."""
        count = self.study.compare.tuning_prompts
        if len(rest) >= count and not self.materials.tasks.seen:
            return list(rest[:count]), "held-out prompts that are not evaluated"
        return self.materials.tasks.training[-count:], "training prompts"

    # --- what everybody gets --------------------------------------------------------------------------

    @cached_property
    def guide(self) -> Guide:
        """The trained guide."""
        names = self.materials.oracle.progress_names
        return load_guide(self.folder / "train", self.materials.reader, part_names=names)

    @cached_property
    def samples(self) -> Samples:
        """The guide's training draws with their labels."""
        if self.study.rounds is None:
            return read_samples(self.folder / "draw")
        count = len(self.study.rounds.samples)
        folders = [self.folder / "train" / "rounds" / f"round-{number + 1}" for number in range(count)]
        return join_samples([read_samples(each) for each in folders])

    def _given(self, budget: float, text_length: float) -> Provisions:
        return Provisions(
            self.materials.base,
            self.materials.oracle,
            budget,
            text_length,
            samples=self.samples,
            training_texts=self.study.compare.training_texts,
            batch_size=self.generate.batch_size,
            seed=self.generate.seed,
        )

    def _entries(self, keys: Iterable[str]) -> list[Entry]:
        entries = []
        for key in keys:
            method = self._method(key)
            if method.sized:
                several = self.study.compare.budgets
                entries += [Entry(f"{key}-{multiple:g}x", method, multiple) for multiple in several]
            else:
                entries.append(Entry(key, method))
        return entries

    def _method(self, key: str) -> Method:
        if key == SEARCHED:
            return GuidedBeams(lambda: self.guide, self.generate)
        return Guided(key, lambda: self.guide, self.generate) if key in GUIDED else METHODS[key]

    # --- running ----------------------------------------------------------------------------------------

    def run(self, keys: Sequence[str], *, force: bool, say: Say) -> dict[str, Any]:
        """Every method's texts, then what they come to."""
        entries = self._entries(keys)
        first = [each for each in entries if each.key in (REFERENCE, "base")]
        given = self._given(1.0, 1.0)  # neither of these two has a use for a budget
        self._write_all(first, given, force=force, say=say)
        costs = {each.key: self._summary(each) for each in first}
        per_text = {key: cost["base_tokens"] / cost["texts"] for key, cost in costs.items()}
        given = replace(given, budget=per_text[REFERENCE], text_length=per_text["base"])
        left_out = self._write_all(
            [each for each in entries if each not in first], given, force=force, say=say
        )
        done = [each for each in entries if each.key not in {row["key"] for row in left_out}]
        comparison = self._measure(done, given, left_out)
        write_json(self.place / "comparison.json", comparison)
        say("the page: " + str(self._report(comparison, done)))
        return comparison

    def _write_all(
        self, entries: Sequence[Entry], given: Provisions, *, force: bool, say: Say
    ) -> list[dict[str, str]]:
        """Write the texts that are not there yet; returns the methods that cannot be used, and why."""
        left_out, usable = [], []
        for entry in entries:
            own = self._provide(entry, given)
            reason = entry.method.obstacle(own)
            if reason is None:
                usable.append((entry, own, self._stage(entry, own)))
            else:
                left_out.append({"key": entry.key, "name": entry.name, "reason": reason})
        require_same([stage for _, _, stage in usable], force=force)
        for entry, own, stage in usable:
            if stage.standing() != "finished":
                stage.run(lambda entry=entry, own=own: self._write(entry, own))  # type: ignore[misc]
                own.forget()
                say(f"{entry.key}: {self._describe(entry)}")
            else:
                say(f"{entry.key}: reused from {stage.folder}")
        return left_out

    def _provide(self, entry: Entry, given: Provisions) -> Provisions:
        return replace(given, budget=given.budget * entry.multiple)

    def _stage(self, entry: Entry, own: Provisions) -> Stage:
        config: dict[str, Any] = {
            "grid": entry.method.grid(own),
            "count": self.generate.count,
            "seed": self.generate.seed,
            "most_perplexity": self.study.compare.most_perplexity,
        }
        if entry.method.sized:
            config["budget"] = round(own.budget, 6)
        if entry.method.trained:
            config["training_texts"] = own.training_texts
        inputs = {
            "the stage train": self.train_stage.digest,
            "prompts": digest_prompts(self.prompts),
            "tuning prompts": digest_prompts(self.tuning),
        }
        files = ("texts.jsonl", "log_p.json")
        return Stage(f"compare {entry.key}", self.place / entry.key, config, inputs, files)

    def _summary(self, entry: Entry) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self.place / entry.key / "stage.json")["summary"]
        return found

    def _describe(self, entry: Entry) -> str:
        found = self._summary(entry)
        tuned = f", tuned over {len(found['tried'])} settings" if len(found["tried"]) > 1 else ""
        return f"{found['texts']} texts in {found['seconds']:.1f} s{tuned}"

    def _write(self, entry: Entry, own: Provisions) -> dict[str, Any]:
        """Tune a method, let it write, judge and keep its texts."""
        settings, tuning = self._tune(entry.method, own)
        system = entry.method.prepare(own, settings)
        count = 1 if entry.method.one_text else self.generate.count
        asked = [each for each in self.prompts for _ in range(count)]
        watch = Stopwatch()
        written, tokens = self._ask(system, asked, self.generate.seed)
        seconds = watch.seconds
        folder = self.place / entry.key
        log_p = score_texts(written, self.materials.base, self.study.evaluate.batch_size)
        write_json(folder / "log_p.json", [row.tolist() for row in log_p])
        save_texts(written, folder / "texts.jsonl")
        training = self._guide_training() if isinstance(entry.method, Guided) else system.training
        return {
            "settings": dict(settings),
            **tuning,
            "texts": len(written),
            "base_tokens": tokens,
            "seconds": seconds,
            "training": None if training is None else vars(training),
        }

    def _ask(self, system: System, asked: Sequence[Prompt], seed: int) -> tuple[list[Written], int]:
        found = system.write(asked, seed)
        texts = self.materials.base.decode([row.tokens for row in found.rows])
        written = [
            Written(each.prompt, each.condition, text, row.tokens, row.finished, log_q=row.log_q)
            for each, text, row in zip(asked, texts, found.rows, strict=True)
        ]
        return judge_texts(written, self.materials.oracle), found.base_tokens

    def _guide_training(self) -> Training:
        """What the guide's own training read."""
        summary = read_json(self.train_stage.record)["summary"]
        runs = [each["training"] for each in summary["rounds"]] if "rounds" in summary else [summary]
        texts = sum(each["steps"] * each["config"]["batch_size"] for each in runs)
        return Training(texts, sum(each["tokens"] for each in runs), sum(each["seconds"] for each in runs))

    # --- tuning -----------------------------------------------------------------------------------------

    def _tune(self, method: Method, own: Provisions) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings that do best on the tuning prompts, and what it took to find them."""
        grid, watch, tokens, tried = method.grid(own), Stopwatch(), 0, []
        for settings in grid if len(grid) > 1 else ():
            system = method.prepare(own, settings)
            written, spent = self._ask(system, self.tuning, self.generate.seed + 1)
            tokens += spent
            tried.append({"settings": settings, **self._score(written)})
        chosen = choose_settings(tried, self._base_perplexity(own)) if tried else grid[0]
        tuning = {"base_tokens": tokens, "seconds": watch.seconds if tried else 0.0}
        return chosen, {"tried": tried, "tuning": tuning}

    def _score(self, written: Sequence[Written]) -> dict[str, float | None]:
        log_p = score_texts(written, self.materials.base, self.study.evaluate.batch_size)
        total = sum(float(row.sum(dtype=np.float64)) for row in log_p) / sum(len(row) for row in log_p)
        satisfied = float(np.mean([bool(each.satisfied) for each in written]))
        return {"satisfied": satisfied, "perplexity": float(np.exp(-total)) if np.isfinite(total) else None}

    def _base_perplexity(self, own: Provisions) -> float:
        """The most perplexity that texts of chosen settings may have on the tuning prompts."""

        def measure() -> float:
            system = METHODS["base"].prepare(own, {})
            written, _ = self._ask(system, self.tuning, self.generate.seed + 1)
            return (self._score(written)["perplexity"] or np.inf) * self.study.compare.most_perplexity

        return own.remember(f"{SHARED}tuning perplexity", measure)

    # --- measuring --------------------------------------------------------------------------------------

    def _measure(
        self, entries: Sequence[Entry], given: Provisions, left_out: list[dict[str, str]]
    ) -> dict[str, Any]:
        kept = {each.key: self._read(each) for each in entries}
        rows = [self._row(each, *kept[each.key]) for each in entries]
        tasks = self.materials.tasks
        found = describe_evaluation(
            self.study.base.name,
            self.materials.base,
            self.materials.oracle,
            len(self.prompts),
            self.generate,
            rows,
            seen=tasks.seen,
        )
        tokens = len(self.samples.ragged("tokens").values)
        return found | {
            "reference": REFERENCE,
            "budget": {
                "base_tokens_a_text": given.budget,
                "base_text_length": given.text_length,
                "multiples": list(self.study.compare.budgets),
            },
            "tuning": {
                "prompts": len(self.tuning),
                "source": self.tuning_source,
                "criterion": describe_criterion(self.study.compare.most_perplexity),
            },
            "training_draws": {
                "texts": len(self.samples),
                "tokens": tokens,
                "satisfied": float(self.samples.array("satisfied").mean()),
            },
            "pairs": self._pairs(entries, kept),
            "left_out": left_out,
        }

    def _read(self, entry: Entry) -> tuple[list[Written], list[LogP]]:
        folder = self.place / entry.key
        log_p = json.loads((folder / "log_p.json").read_text(encoding="utf-8"))
        return read_texts(folder / "texts.jsonl"), [np.array(row, dtype=np.float32) for row in log_p]

    def _row(self, entry: Entry, written: list[Written], log_p: list[LogP]) -> dict[str, Any]:
        evaluate = self.study.evaluate
        measures = measure_texts(written, self.materials.base, evaluate, log_p)
        for each in measure_diversity(written, Resampling(confidence=evaluate.confidence)):
            measures[each.name] = each.describe()
        return {
            "system": entry.name,
            "key": entry.key,
            "source": entry.method.source,
            "exact_end": False,  # the name says it
            "sees_training_draws": entry.method.trained,
            **self._summary(entry),
            "measures": measures,
        }

    def _pairs(
        self, entries: Sequence[Entry], kept: dict[str, tuple[list[Written], list[LogP]]]
    ) -> list[dict[str, Any]]:
        """Every method minus q, on the same prompts: satisfaction, and log p a token of the base."""
        resampling = Resampling(confidence=self.study.evaluate.confidence)
        others = [each for each in entries if each.key != REFERENCE]
        satisfied = [compare_satisfied(kept[each.key][0], kept[REFERENCE][0], resampling) for each in others]
        fluency = [compare_fluency(kept[each.key], kept[REFERENCE], resampling) for each in others]
        return [
            {"first": each.name, "second": REFERENCE, "result": result.describe()}
            for results in (adjust(satisfied), adjust(fluency))
            for each, result in zip(others, results, strict=True)
        ]

    # --- the page ---------------------------------------------------------------------------------------

    def _report(self, comparison: dict[str, Any], entries: Sequence[Entry]) -> Path:
        """The page; the guide's view of q's and the base's tokens, and every other text as it is."""
        texts = {each.key: first_texts(read_texts(self.place / each.key / "texts.jsonl")) for each in entries}
        rows, how = choose_rows(len(self.prompts), self.study.compare.examples, self.generate.seed)
        chosen = [self.prompts[row] for row in rows]
        model = GuidedLanguageModel(self.materials.base, self.guide, oracle=self.materials.oracle)
        columns = []
        for entry in entries:
            own = [texts[entry.key][prompt] for prompt in chosen]
            traced = entry.key in (REFERENCE, "base")
            columns.append(trace_written(model, entry.name, own) if traced else _plain(entry.name, own))
        examples = Examples(how, pair_examples(*zip(*chosen, strict=True), *columns))
        return write_report(report_from_comparison(comparison, examples=examples), self.place)


# --- examples ------------------------------------------------------------------------------------------


def _plain(name: str, own: Sequence[Written]) -> list[ExampleText]:
    return [ExampleText(name, each.text, each.satisfied, each.finished) for each in own]
