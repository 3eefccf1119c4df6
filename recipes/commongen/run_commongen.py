"""The CommonGen study in one command: fine-tune, draw, label, train guides, decode dev, score, measure costs.

    python recipes/commongen/run_commongen.py --base smollm2.gguf --data DATA --work WORK --output OUT

Each stage leaves its result in WORK and is not done again when the command is repeated with the same
settings; one that was interrupted goes on. With `--deadline` guides are trained for as long as leaves time
for everything else. What is small goes to OUT as soon as it is there: results, texts, adapter, light guide,
and what the configuration chosen on dev writes for the test sets and for words that nobody has learned.
"""

import argparse
import gzip
import json
import tarfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from concept_sets import ConceptSet, learned_sets, read_sets, recombine
from dev_decoding import Written, write_base, write_guided
from drawn_texts import cut_chunks, describe, draw_chunks, draw_labelled, rates, read_chunks
from final_texts import choose_line, final_rows, final_sets, write_outputs
from fine_tuning import fine_tune, load_base, make_adapter
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
from progress_log import Clock, Stages
from results_page import envelope
from sampling_costs import choose, compare_with_rejection, measure_soft_rates
from side_work import TextMaker, TextScores, Workers, label_folder, score_texts
from study_settings import BASE, UNTRAINED, CostSettings, GuideSettings, Row, RowSettings, read_settings
from table_rows import Scored, gain_share, score_log_p, table_row

from nado.calibration import Calibration, recalibrate
from nado.guide import Guide
from nado.guided import GuidedModel
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords
from nado.oracles.inflection import read_forms
from nado.samples import Samples, read_samples
from nado.storage import digest_file, digest_json, read_json, write_atomically, write_json
from nado.versions import versions

# Seconds kept free before the deadline: for a line of the table, for each guide's files, for the rest.
_ROW_SECONDS = {"greedy": 2.5, "beam": 11.0, "search": 6.0, "sample": 3.0, "verified": 10.0, "smc": 13.0}
_FILE_SECONDS = 18.0
_LAST_SECONDS = 30.0
_FINAL_SECONDS = 45.0
_COST_SECONDS = 45.0


class Study:
    """One call of the script: settings, data, stages, and what was found so far."""

    def __init__(self, options: argparse.Namespace, workers: Workers) -> None:
        self.settings = read_settings(options.settings)
        self.base, self.output, self.workers = options.base, options.output, workers
        self.given: Path | None = options.adapter
        self.finals = final_sets(options.data, self.settings.final)
        self.clock = Clock(options.output / "run.log", deadline=options.deadline)
        self.train, self.dev = (read_sets(options.data / name) for name in ("train.jsonl.gz", "dev.jsonl"))
        self.train = self.train[: self.settings.draw.sets or None]
        self.forms = read_forms(options.data / "concept_forms.json")
        self.oracle = Keywords(forms=self.forms)
        inputs = [digest_json([Path(self.base).name, self.settings.base.length_limit])]
        inputs += [digest_file(options.data / name) for name in _FILES]
        self.stages = Stages(options.work, digest_json(inputs), self.clock)
        self.reported = np.array([each.reported for each in self.dev])
        self.scores: dict[Row, Future[TextScores]] = {}
        self.written: dict[Row, tuple[Written, list[Any]]] = {}
        self.labels: list[Future[float]] = []
        self.costs: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._guided: dict[str, GuidedModel] = {}

    def run(self) -> None:
        """Everything, in an order that keeps the GPU busy while processes label."""
        self.clock.say(f"{len(self.train):,} training sets, {len(self.dev):,} dev sets, {self.clock.device}")
        self.adapt()
        if self.settings.guides:
            self.draw()
        self.decode(BASE)
        if self.settings.guides:
            self.draw_dev()
            self.decode(UNTRAINED)
        self.left_out = list(self.settings.guides)
        while self.left_out and self.train_one(self.left_out):
            self.decode(self.left_out.pop(0))
            self.write_results()
        self.finish()
        self.measure_costs()
        self.write_results()
        self.clock.say("done")

    # --- p ----------------------------------------------------------------------------------------------

    def adapt(self) -> None:
        """Fine-tune the base, or take the adapter that was given."""
        config = {"adapter": asdict(self.settings.adapter), "texts": asdict(self.settings.texts)}
        place = make_adapter(
            self.stages,
            config,
            self.given,
            lambda folder: fine_tune(
                self.clock,
                self.base,
                learned_sets(self.train, self.settings.texts, self.forms),
                self.dev,
                folder,
                self.settings.adapter,
                length_limit=self.settings.base.length_limit,
            ),
        )
        self.stages.run(BASE, asdict(self.settings.base), ["adapter"], lambda folder: {})
        pack(place, self.output / "adapter.tar")

    @cached_property
    def model(self) -> Any:
        """p."""
        folder = self.stages.folder / "adapter" / "adapter"
        return load_base(self.base, folder, self.settings.base, device=self.clock.device)

    @cached_property
    def reader(self) -> HuggingFaceReader:
        """p as guides read it."""
        return HuggingFaceReader(self.model)

    # --- samples ----------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw from p for the guides to learn from; labels are on their way when this returns."""
        wanted = self.settings.draw
        sets = self.train
        if wanted.new_sets:
            sets = recombine(self.train, wanted.new_sets, wanted.seed, but=self.dev)
        chunks = cut_chunks(sets, wanted)

        def label(place: Path) -> "Future[float]":
            return self.workers.submit(label_folder, place, self.oracle, TextMaker(self.model))

        def work(folder: Path) -> dict[str, Any]:
            self.labels = draw_chunks(
                self.clock,
                self.model,
                chunks,
                folder,
                label,
                seed=wanted.seed,
                batch=wanted.batch,
                proposal=wanted.proposal,
            )
            return {"chunks": len(chunks)}

        folder = self.stages.run(wanted.stage, asdict(wanted), [BASE], work)
        if not self.labels:  # drawn before, but perhaps not labelled
            self.labels = [label(each) for each in sorted(folder.glob("chunk-*"))]

    def draw_dev(self) -> None:
        """Draw from p for the dev sets."""
        settings = self.settings.draw

        def work(folder: Path) -> dict[str, Any]:
            samples = draw_labelled(
                self.model,
                [each.prompt for each in self.dev],
                folder / "p",
                self.oracle,
                samples=settings.dev_samples,
                seed=settings.seed + 1,
                batch=settings.batch,
            )
            return describe(samples)

        self.stages.run("dev_samples", asdict(settings), [BASE], work)

    @cached_property
    def samples(self) -> Samples:
        """Labelled samples of p for the training sets."""
        for each in self.labels:
            each.result()
        samples = read_chunks(self.stages.folder / self.settings.draw.stage)
        self.clock.say(f"labelled: {json.dumps(describe(samples))}")
        return samples

    @cached_property
    def data(self) -> GuideData:
        """What guides learn from."""
        draw = self.settings.draw
        found = prepare(self.samples, self.reader, self.oracle, held_out=draw.held_out, seed=draw.seed)
        self.clock.say(f"  {len(found.learned):,} texts to learn from, {len(found.judged):,} held out")
        return found

    # --- guides -----------------------------------------------------------------------------------------

    def train_one(self, waiting: Sequence[str]) -> bool:
        """Train the first of the waiting guides for its share of the time; False where that is too little."""
        name = waiting[0]
        settings, stage = self.settings.guides[name], f"guide-{name}"
        if not self.stages.is_done(stage) and not self.has_time(waiting):
            self.clock.say(f"{name}: left out, {self.clock.left:.0f} s before the deadline")
            return False

        def work(folder: Path) -> dict[str, Any]:
            data = self.data.told_to(settings)
            a_step = seconds_a_step(self.fresh_guide(settings, data), self.reader, data, settings)
            seconds = self.time_for(waiting)
            steps = plan_steps(folder, settings, seconds, a_step)
            self.clock.say(f"{name}: {steps} steps of {1e3 * a_step:.1f} ms in {seconds:.0f} s")
            guide = self.fresh_guide(settings, data)
            shared = (self.reader, data, self.oracle, settings, steps, folder)
            return train_guide(self.clock, guide, *shared, measure=self.measure)

        folder = self.stages.run(stage, asdict(settings), [self.settings.draw.stage], work)
        if self.settings.costs is not None and name == self.settings.costs.light:
            pack(folder / "guide", self.output / f"guide-{name}.tar")
        return True

    def has_time(self, waiting: Sequence[str]) -> bool:
        """Whether the first of the guides that wait can be trained for long enough."""
        _ = self.data  # made ready before the clock is read: that takes time as well
        return self.time_for(waiting) >= self.settings.guides[waiting[0]].fewest_seconds

    def time_for(self, waiting: Sequence[str]) -> float:
        """Seconds for the first of the guides that wait: its share, or all there are where it needs all."""
        several = [self.settings.guides[each] for each in waiting]
        if several[0].whole:
            several, waiting = several[:1], waiting[:1]
        return share_time(self.clock, several, self.reserve(waiting))

    def measure(self, guide: Guide) -> dict[str, float]:
        """What a guide in training writes for the dev sets, greedily."""
        row, settings = Row("", "greedy", 1.0, exact_end=False), RowSettings(("",))
        written = write_guided(GuidedModel(self.model, guide, oracle=self.oracle), self.dev, row, settings)
        found = Scored(score_texts(self.dev, written.texts, self.oracle), written, [])
        metrics = {"coverage": found.coverage(self.reported), "bleu4": found.bleu(self.reported, 4)}
        return {name: each.value or 0.0 for name, each in metrics.items()}

    def reserve(self, waiting: Sequence[str]) -> float:
        """Seconds that everything but training will take from now on."""
        rows = [row for name in waiting for row, _ in self.settings.rows_of(name)]
        decoding = sum(_ROW_SECONDS[row.kind] for row in rows)
        final = 0.0 if self.settings.final is None else _FINAL_SECONDS
        costs = 0.0 if self.settings.costs is None else _COST_SECONDS
        return decoding + final + costs + _FILE_SECONDS * len(waiting) + _LAST_SECONDS

    def fresh_guide(self, settings: GuideSettings, data: GuideData) -> Guide:
        """An untrained guide."""
        return build_guide(self.reader, self.oracle, settings, data, Path(self.base).name)

    def guide(self, system: str) -> Guide:
        """The guide of a system, as it was saved; the untrained one has the first guide's shape."""
        if system == UNTRAINED:
            settings = next(iter(self.settings.guides.values()))
            return self.fresh_guide(settings, self.data.told_to(settings))
        return open_guide(self.stages.folder / f"guide-{system}", self.reader, self.oracle)

    # --- the table --------------------------------------------------------------------------------------

    def decode(self, system: str) -> None:
        """Write the texts of all lines of one system; processes score them meanwhile."""

        def work(row: Row, settings: RowSettings, folder: Path) -> dict[str, Any]:
            written = self.write(self.dev, row, settings)
            log_p = [each.tolist() for each in score_log_p(self.model, self.dev, written)]
            write_json(folder / "texts.json", {"written": written.describe(), "log_p": log_p})
            return {"seconds": written.seconds, "oracle_seconds": written.oracle_seconds}

        drawn = self.settings.draw.stage
        before = BASE if system == BASE else drawn if system == UNTRAINED else f"guide-{system}"
        for row, settings in self.settings.rows_of(system):
            config = {**asdict(row), "beams": settings.beams}
            folder = self.stages.run(
                f"rows/{row.name}",
                config,
                [before],
                partial(work, row, settings),
            )
            found = read_json(folder / "texts.json")
            written = Written(**found["written"])
            log_p = [np.array(each, dtype=np.float32) for each in found["log_p"]]
            self.written[row] = (written, log_p)
            self.scores[row] = self.workers.submit(score_texts, self.dev, written.texts, self.oracle)

    def write(self, sets: Sequence[ConceptSet], row: Row, settings: RowSettings) -> Written:
        """What a line's system writes for some sets; its guide is read once, for all lines in a row."""
        if row.system == BASE:
            return write_base(self.model, sets, row, settings)
        if row.system not in self._guided:
            self._guided = {row.system: GuidedModel(self.model, self.guide(row.system), oracle=self.oracle)}
        return write_guided(self._guided[row.system], sets, row, settings)

    def scored(self) -> dict[Row, Scored]:
        """All lines there are, scored."""
        return {
            row: Scored(self.scores[row].result(), written, log_p)
            for row, (written, log_p) in self.written.items()
        }

    def title(self, system: str) -> str:
        """What a system is, in words."""
        words = {BASE: "p, fine-tuned with LoRA", UNTRAINED: "untrained guide"}
        return words.get(system) or self.settings.guides[system].title

    def finish(self) -> None:
        """Let the choosing sets choose, and what they chose write for sets without references."""
        settings = self.settings.final
        if settings is None:
            return
        chosen = choose_line(self.lines(self.scored()), settings)
        if chosen is None:
            self.clock.say(f"final: no line of {settings.system} by {settings.decoding} to choose from")
            return
        rows = final_rows(chosen, settings)

        def work(folder: Path) -> dict[str, Any]:
            for kind, sets in self.finals.items():
                write_outputs(sets, rows, self.settings, self.write, folder, kind)
            return {name: row.name for name, row in rows.items()}

        config = {**asdict(settings), "strength": chosen["strength"]}
        config["sets"] = digest_json([[each.concepts for each in sets] for sets in self.finals.values()])
        folder = self.stages.run("final", config, [f"guide-{settings.system}"], work)
        pack(folder, self.output / "final.tar")

    # --- costs ------------------------------------------------------------------------------------------

    def measure_costs(self) -> None:
        """Base tokens for a satisfying text, and soft rates."""
        settings = self.settings.costs
        if settings is None:
            return
        if self.clock.left < _COST_SECONDS / 2 or settings.guide in self.left_out:
            self.clock.say(f"costs: left out, {self.clock.left:.0f} s before the deadline")
            return
        after = ["dev_samples", f"guide-{settings.guide}"]
        self.stages.run("costs", asdict(settings), after, lambda folder: self._costs(folder, settings))
        self.costs = self.stages.facts["costs"]

    def _costs(self, folder: Path, settings: CostSettings) -> dict[str, Any]:
        drawn = read_samples(self.stages.folder / "dev_samples" / "p")
        found = rates(drawn, self.settings.draw.dev_samples)
        rare = choose(self.dev, found, settings.rare, inclusive=True)
        middle = choose(self.dev, found, settings.middle, inclusive=False)
        self.clock.say(f"  {len(rare)} rare and {len(middle)} middling dev sets")
        guide = self.guide(settings.guide)
        shared = (self.model, guide, self.oracle)
        costs: dict[str, Any] = {"rejection": None, "soft_rates": [], "soft_rates_calibrated": []}
        if rare:
            costs["rejection"] = compare_with_rejection(*shared, rare, folder, settings)
        if middle:
            costs["soft_rates"] = measure_soft_rates(*shared, middle, folder / "as_trained", settings)
            mended = self.stages.facts[f"guide-{settings.guide}"]["calibration"]
            if mended is not None:
                recalibrate(guide, Calibration(**mended))
                place = folder / "calibrated"
                costs["soft_rates_calibrated"] = measure_soft_rates(*shared, middle, place, settings)
        return costs

    # --- results ----------------------------------------------------------------------------------------

    def write_results(self) -> None:
        """Results, and the texts they were measured on."""
        scored = self.scored()
        metrics = {
            "rows": self.lines(scored),
            "stages": {name: each for name, each in self.stages.facts.items() if not name.startswith("rows")},
            "settings": {**self.settings.describe(), "base": Path(self.base).name},
            "left_out": self.left_out,
            "versions": versions(),
            "seconds": round(self.clock.elapsed, 1),
        }
        write_json(self.output / "commongen.json", envelope(metrics))
        write_json(self.output / "overhead.json", envelope(self.overhead(scored)))
        write_texts(self.output / "texts.jsonl.gz", self.dev, scored)

    def lines(self, scored: dict[Row, Scored]) -> list[dict[str, Any]]:
        """The table, as it is recorded."""
        bases = {(row.decoding, row.seed): each for row, each in scored.items() if row.system == BASE}
        command = envelope({})["command"]
        lines = []
        for row, each in scored.items():
            base = None if row.system == BASE else bases.get((row.base_decoding, row.seed))
            shared = (base, self.reported, command)
            lines.append(table_row(row, self.title(row.system), each, *shared, group=self.settings.group))
        return lines

    def overhead(self, scored: dict[Row, Scored]) -> dict[str, Any]:
        """What belongs to the benchmark of what guidance costs."""
        settings = self.settings.costs
        if settings is None:
            return {}
        found: dict[str, Any] = {}
        rejection = self.costs.get("rejection")
        if rejection is not None:
            found = {
                "base_tokens_ratio_vs_rejection_commongen": rejection["ratio"]["value"],
                "rejection_h200" if self.clock.device.type == "cuda" else "rejection_cpu": rejection,
            }
        for name in ("soft_rates", "soft_rates_calibrated"):
            found |= {name: self.costs[name]} if self.costs.get(name) else {}
        names = (settings.light, settings.guide, BASE)
        three = [scored.get(Row(name, "greedy", 1.0, exact_end=False)) for name in names]
        light, main, base = three
        if light is not None and main is not None and base is not None:
            gain = gain_share(light, main, base, self.reported)
            found |= {"light_gain_share": gain["value"], "light_gain_share_interval": gain}
        return found


_FILES = ("train.jsonl.gz", "dev.jsonl", "concept_forms.json")


def write_texts(path: Path, dev: Sequence[ConceptSet], scored: dict[Row, Scored]) -> None:
    """Every text of every line, none selected."""
    lines = [
        {"row": row.name, "id": each.number, "concepts": list(each.concepts), "text": text}
        for row, found in scored.items()
        for each, text in zip(dev, found.written.texts, strict=True)
    ]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomically(path, lambda partial: _write(partial, gzip.compress(content.encode("utf-8"), mtime=0)))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def pack(folder: Path, path: Path) -> None:
    """A folder's files as one."""

    def write(partial: Path) -> None:
        with tarfile.open(partial, "w") as archive:
            for each in sorted(folder.iterdir()):
                archive.add(each, arcname=f"{path.stem}/{each.name}")

    write_atomically(path, write)


def main(arguments: Sequence[str] | None = None) -> None:
    """All stages, one after the other."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with Workers(options.workers) as workers:
        Study(options, workers).run()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--base", required=True, help="GGUF file or folder of the base model")
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {', '.join(_FILES)}")
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--output", type=Path, required=True, help="where what is small goes")
    parser.add_argument("--settings", type=Path, default=here / "main.toml", help="what is done")
    parser.add_argument("--adapter", type=Path, help="an adapter to take instead of fine-tuning one")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which all is to be done")
    parser.add_argument("--workers", type=int, default=0, help="processes that label and score")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
