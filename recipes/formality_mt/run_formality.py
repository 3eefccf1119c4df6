"""The study in one command: draw, label, train guides, decode Fisher test, score.

    python recipes/formality_mt/run_formality.py --data DATA --work WORK --output OUT
    python recipes/formality_mt/run_formality.py --prepared local/formality_mt/study --work WORK --output OUT

DATA is what prepare_translation.py takes: files are prepared and a base is trained first, unless another one
is named (`--set base.name=…`); a deadline counts from the first of that. PREPARED is what
prepare_translation.py has made, with a base in the folder beside it.
study.toml says what a guide is and how it is trained, table.toml what is varied. Each stage leaves its result
in WORK and is not done again when the command is repeated with the same settings; one that was interrupted
goes on. With `--deadline` guides are trained for as long as leaves time for all the rest. OUT gets run.json
and every text as soon as they are there, and the scores and their tables (results.md) at the end, or later,
with score_formality.py.
"""

import argparse
import gzip
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import neighbours  # noqa: F401  (finds the clock and the stages of the CommonGen recipe)
import numpy as np
from drawn_texts import Chunk, draw_chunks, read_chunks
from formality_oracle import RememberedFormality
from formality_page import results
from fudge_texts import Fudge
from guide_training import leave_out_last, open_guide, share_time
from guide_variants import VariantTexts, begun_by, fresh_guide, train_variant
from packing import pack_in_pieces
from prepare_translation import CORPUS, STUDY, prepare_once
from progress_log import Clock, Stages
from results_envelope import envelope
from score_formality import score_run
from side_work import TextMaker, Workers, label_folder
from table_settings import (
    BASE,
    BEAM,
    BEST_OF,
    FUDGE,
    GREEDY,
    SAMPLE,
    VERIFIED,
    GuideVariant,
    RoundSettings,
    Row,
    TableSettings,
    read_table,
)
from table_texts import Lines, best_of_texts, search_texts, verified_texts
from train_translator import BASE_FACTS, train_base

from nado.errors import InputError, NadoError
from nado.guidance import Guidance
from nado.guide import Guide
from nado.guided_language_model import GuidedLanguageModel
from nado.oracles import audit, load_oracle
from nado.proposals import Proposal, tempered
from nado.samples import Samples, join_samples
from nado.storage import digest_json, read_json, write_bytes, write_json
from nado.study import Study, read_study
from nado.study.materials import Materials, digest_base, digest_prompts
from nado.study.sections import describe_section
from nado.study.systems import System, read_texts, save_texts
from nado.versions import versions
from recording import write_page

SOURCES, ORACLE = "sources.jsonl", "oracle"  # in the prepared folder
# Seconds kept free before the deadline: for a line of the table, for a guide's own files, for the rest.
_ROW_SECONDS = {GREEDY: 5.0, BEAM: 35.0, SAMPLE: 80.0}  # the oracle is asked about every beam at every token
_FILE_SECONDS = 12.0
_ROUND_SECONDS = 65.0  # texts that a guide begins
_LAST_SECONDS = 30.0
_CHUNK = 16_384  # texts that are labelled together


class Run:
    """One call of the script."""

    def __init__(
        self, study: Study, table: TableSettings, work: Path, output: Path, clock: Clock, workers: Workers
    ) -> None:
        self.study, self.table, self.output, self.clock = study, table, output, clock
        self.workers = workers
        self.labels: dict[float, list[Future[float]]] = {}
        self.materials = Materials(study)
        inputs = [
            digest_base(study.base),
            self.materials.oracle.fingerprint,
            digest_prompts(self.materials.tasks.training),
            digest_prompts(self.materials.tasks.held_out),
        ]
        self.stages = Stages(work, digest_json(inputs), clock)
        self.lines: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self._texts: dict[str, dict[str, str]] = {}
        self._ready: tuple[float, VariantTexts] | None = None

    def run(self) -> None:
        """Everything; what was found so far is on disk after every step."""
        tasks = self.materials.tasks
        self.clock.say(
            f"{len(tasks.training):,} sources, {len(tasks.held_out):,} of the test, {self.clock.device}"
        )
        for temperature in self.table.temperatures:
            self.draw(temperature)
        self.decode_base()
        for temperature in self.table.temperatures:
            self.label(temperature)
        self.audit()
        self.decode_fudge()
        self.write()
        waiting = list(self.table.guides)
        while waiting := self.fitting(waiting):
            self.train(waiting)
            self.decode_guided(waiting.pop(0))
            self.write()
        self.clock.say("decoded")

    # --- samples ----------------------------------------------------------------------------------------

    def draw(self, temperature: float) -> None:
        """Draw at a temperature; labels, also of prefixes, are on their way when this returns."""
        settings = self.study.draw

        def work(folder: Path) -> dict[str, Any]:
            count, seed = settings.samples_per_prompt, settings.seed
            self.labels[temperature] = self._draw(folder, count, seed, tempered(temperature))
            return {"texts": count * len(self.materials.tasks.training)}

        config = {"draw": describe_section(settings), "temperature": temperature}
        self.stages.run(_drawn_name(temperature), config, [], work)

    def _draw(self, folder: Path, count: int, seed: int, proposal: Proposal) -> "list[Future[float]]":
        """So many texts of every training source; each chunk is labelled while the next is drawn."""
        prompts, size = self.materials.tasks.training, max(1, _CHUNK // count)
        chunks = [Chunk(prompts[at : at + size], count) for at in range(0, len(prompts), size)]
        return draw_chunks(
            self.clock,
            self.materials.base,
            chunks,
            folder,
            self._hand_in,
            seed=seed,
            batch=self.study.draw.batch_size,
            proposal=proposal,
        )

    def label(self, temperature: float) -> None:
        """Wait for the labels; say what was drawn."""

        def work(folder: Path) -> dict[str, Any]:
            waiting = self.labels.get(temperature)
            if waiting is None:  # drawn by an earlier call
                places = sorted((self.stages.folder / _drawn_name(temperature)).glob("chunk-*"))
                waiting = [self._hand_in(each) for each in places]
            for each in waiting:
                each.result()
            return describe_samples(self.samples(temperature))

        config = {"prefixes": self.materials.prefixes}
        self.stages.run(_samples_name(temperature), config, [_drawn_name(temperature)], work)

    def _hand_in(self, place: Path) -> "Future[float]":
        maker = TextMaker(self.materials.base) if self.materials.prefixes else None
        return self.workers.submit(label_texts, place, self.study.oracle, maker)

    def samples(self, temperature: float) -> Samples:
        """Labelled samples that were drawn at a temperature."""
        return read_chunks(self.stages.folder / _drawn_name(temperature))

    def draw_round(self, name: str, settings: RoundSettings) -> str:
        """Texts that the guide so far or a sharper p begins and p ends; returns the stage's name."""
        stage = _round_name(name)

        def work(folder: Path) -> dict[str, Any]:
            proposal = begun_by(self.q_hat(settings), settings)
            for each in self._draw(folder, settings.texts, settings.seed, proposal):
                each.result()
            return describe_samples(read_chunks(folder))

        config = {"round": asdict(settings), "prefixes": self.materials.prefixes}
        self.stages.run(stage, config, [f"guide-{settings.start}"], work)
        return stage

    def q_hat(self, settings: RoundSettings) -> GuidedLanguageModel:
        """The base under the guide that a round goes on from."""
        guidance = Guidance(strength=settings.strength, doubt=settings.doubt)
        guide = self.open(settings.start)
        return GuidedLanguageModel(self.materials.base, guide, guidance=guidance, oracle=self.remembered)

    def audit(self) -> None:
        """What the oracle really answers to, on texts of p."""

        def work(folder: Path) -> dict[str, Any]:
            samples = self.samples(self.table.temperatures[0])
            found = audit(self.materials.oracle, samples.strings("text"), samples.strings("condition"))
            return {"audit": found.to_json()}

        self.stages.run("audit", {}, [_samples_name(self.table.temperatures[0])], work)

    # --- guides -----------------------------------------------------------------------------------------

    def fitting(self, waiting: Sequence[str]) -> list[str]:
        """The guides that there is time for: rather than cutting all short, the last ones are left out."""
        kept, others = leave_out_last(waiting, self._is_trained, self._too_short)
        for name in reversed(others):
            self.left_out[name] = f"no time: {self.clock.left:.0f} s before the deadline"
            self.clock.say(f"guide-{name}: left out, {self.left_out[name]}")
        return kept

    def _is_trained(self, name: str) -> bool:
        return self.stages.is_done(f"guide-{name}")

    def _too_short(self, waiting: Sequence[str]) -> bool:
        several = [self.table.guides[each] for each in waiting]
        return share_time(self.clock, several, self.reserve(waiting)) < several[0].seconds / 2

    def train(self, waiting: Sequence[str]) -> None:
        """Train the first of the waiting guides, for its share of the time that is left."""
        name, several = waiting[0], [self.table.guides[each] for each in waiting]
        variant = several[0]
        after = [_samples_name(variant.temperature)]
        if variant.round is not None:
            after += [f"guide-{variant.round.start}", self.draw_round(name, variant.round)]

        def work(folder: Path) -> dict[str, Any]:
            seconds = share_time(self.clock, several, self.reserve(waiting))
            if variant.round is None:
                ready, start = self.ready(variant.temperature), None
            else:
                begun = read_chunks(self.stages.folder / _round_name(name))
                samples = join_samples([self.samples(variant.temperature), begun])
                ready, start = VariantTexts.prepare(self.materials, samples), self.open(variant.round.start)
            return train_variant(self.clock, self.materials, ready, variant, seconds, folder, start)

        config = {
            "guide": describe_section(self.study.guide),
            "train": describe_section(self.study.train, "trackers", "save_every"),
            "data": describe_section(self.study.data),
            "consistency_weight": variant.consistency_weight,
            "log_consistency_weight": variant.log_consistency_weight,
            "learning_rate": variant.learning_rate,
        }
        self.stages.run(f"guide-{name}", config, after, work)

    def ready(self, temperature: float) -> VariantTexts:
        """What guides of a temperature learn from; that of another one makes room for it."""
        if self._ready is None or self._ready[0] != temperature:
            self._ready = None
            found = VariantTexts.prepare(self.materials, self.samples(temperature))
            self._ready = (temperature, found)
        return self._ready[1]

    def reserve(self, waiting: Sequence[str]) -> float:
        """Seconds that everything but training will take from now on."""
        rows = [row for name in waiting for row in self.rows_of(name)]
        rounds = sum(
            self.table.guides[name].round is not None and not self.stages.is_done(_round_name(name))
            for name in waiting
        )
        files = _FILE_SECONDS * len(waiting) + _ROUND_SECONDS * rounds
        return sum(_ROW_SECONDS[row.decoding] for row in rows) + files + _LAST_SECONDS

    def rows_of(self, name: str) -> list[Row]:
        """The lines of one guide."""
        variant: GuideVariant = self.table.guides[name]
        greedy = product([GREEDY], variant.plausibles, variant.doubts, variant.strengths)
        beams = product([BEAM], [0.0], variant.beam_doubts, variant.beam_strengths)
        rows = [
            Row(name, variant.title, decoding, strength, doubt, plausible)
            for decoding, plausible, doubt, strength in (*greedy, *beams)
        ]
        chosen = self.table.verified
        if chosen is not None and chosen.guide == name:
            rows.append(Row(VERIFIED, f"{variant.title}, verified", SAMPLE))
        return rows

    def open(self, name: str) -> Guide:
        """A trained guide as it was saved."""
        return open_guide(self.stages.folder / f"guide-{name}", self.materials.reader, self.remembered)

    @cached_property
    def remembered(self) -> RememberedFormality:
        """The oracle for guided lines: it is asked about every prefix, and lines begin alike."""
        oracle: Any = self.materials.oracle
        return RememberedFormality(oracle)

    @cached_property
    def untrained(self) -> Guide:
        """A guide of strength 0 is the base: it lends `generate` its shape."""
        return fresh_guide(self.materials)

    # --- the table's texts ------------------------------------------------------------------------------

    def decode_base(self) -> None:
        """The base alone: greedy, beam, best of n."""
        system = System(BASE, self.materials.base, None, Guidance(), self.materials.oracle)
        for decoding in (GREEDY, BEAM):
            row = Row(BASE, "base", decoding)
            self.line(row, [], asdict(self.table.search), partial(self._search, system, row))
        settings = self.table.best_of
        if settings is not None:
            row = Row(BEST_OF, f"best of {settings.count}", SAMPLE)
            work = partial(best_of_texts, system, self.prompts, settings, self._draw_batch)
            self.line(row, [], asdict(settings), work)

    def decode_fudge(self) -> None:
        """FUDGE, which learns from the same samples as the guide of its temperature."""
        settings = self.table.fudge
        if settings is None:
            return
        trained: list[Fudge] = []  # made for the first line that is not there yet

        def work(row: Row) -> Lines:
            if not trained:
                samples = self.samples(settings.temperature)
                trained.append(Fudge(self.materials.base, self.materials.oracle, samples, settings))
            return trained[0].write(self.prompts, row, self.table.search)

        rows = [Row(FUDGE, "FUDGE", GREEDY, strength) for strength in settings.strengths]
        rows += [Row(FUDGE, "FUDGE", BEAM, strength) for strength in settings.beam_strengths]
        for row in rows:
            config = {**asdict(settings), **asdict(self.table.search)}
            try:
                self.line(row, [_samples_name(settings.temperature)], config, partial(work, row))
            except (ImportError, InputError) as error:
                self.left_out[row.name] = str(error)
                self.clock.say(f"{row.name}: left out: {error}")
                return

    def decode_guided(self, name: str) -> None:
        """The lines of one guide, and the verified one where it is due."""
        opened: list[System] = []  # loaded for the first line that is not there yet

        def system() -> System:
            if not opened:
                guide = self.open(name)
                opened.append(System(name, self.materials.base, guide, Guidance(), self.remembered))
            return opened[0]

        for row in self.rows_of(name):
            settings = self.table.verified
            if row.system == VERIFIED and settings is not None:
                config = asdict(settings)
                work = partial(self._verify, system)
            else:
                config, work = asdict(self.table.search), partial(self._search_guided, system, row)
            self.line(row, [f"guide-{name}"], config, work)

    def _search(self, system: System, row: Row) -> Lines:
        return search_texts(system, self.prompts, row, self.table.search, self.untrained)

    def _search_guided(self, system: Callable[[], System], row: Row) -> Lines:
        guidance = Guidance(strength=row.strength, doubt=row.doubt, plausible=row.plausible)
        return self._search(replace(system(), guidance=guidance), row)

    def _verify(self, system: Callable[[], System]) -> Lines:
        assert self.table.verified is not None
        return verified_texts(system(), self.prompts, self.table.verified, self._draw_batch)

    @property
    def prompts(self) -> list[Any]:
        """Every different source of the test."""
        return self.materials.tasks.held_out

    @property
    def _draw_batch(self) -> int:
        return self.study.draw.batch_size or self.table.search.batch

    def line(self, row: Row, after: Sequence[str], config: dict[str, Any], work: Callable[[], Lines]) -> None:
        """One line of the table as a stage."""

        def write(folder: Path) -> dict[str, Any]:
            found = work()
            save_texts(found.texts, folder / "texts.jsonl")
            return found.describe()

        folder = self.stages.run(f"rows/{row.name}", {**asdict(row), **config}, after, write)
        self.lines[row.name] = {**asdict(row), **self.stages.facts[f"rows/{row.name}"]}
        self._texts[row.name] = {each.prompt: each.text for each in read_texts(folder / "texts.jsonl")}

    # --- results ----------------------------------------------------------------------------------------

    def write(self) -> None:
        """What is known so far, and the texts."""
        metrics = {
            "rows": list(self.lines.values()),
            "left_out": self.left_out,
            "stages": {name: each for name, each in self.stages.facts.items() if not name.startswith("rows")},
            "table": self.table.describe(),
            "study": {
                "base": Path(self.study.base.name).name,
                "length_limit": self.study.base.length_limit,
                "threshold": self.study.oracle.get("threshold", 0.5),
                "guide": describe_section(self.study.guide),
                "train": describe_section(self.study.train),
                "draw": describe_section(self.study.draw),
            },
            "versions": versions(),
            "seconds": self.stages.seconds,
        }
        write_json(self.output / "run.json", envelope(metrics, "run_formality.py"))
        lines = [
            {"row": name, "source": source, "text": text}
            for name, texts in self._texts.items()
            for source, text in texts.items()
        ]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        packed = gzip.compress(content, mtime=0)
        write_bytes(self.output / "texts.jsonl.gz", packed)


def label_texts(folder: Path, oracle: dict[str, Any], model: TextMaker | None) -> float:
    """Label a folder of samples, in any process: the oracle is made there, from its section of the study."""
    return label_folder(folder, load_oracle(oracle), model)


def _drawn_name(temperature: float) -> str:
    return f"draws-{temperature:.3g}"


def _samples_name(temperature: float) -> str:
    return f"samples-{temperature:.3g}"


def _round_name(guide: str) -> str:
    return f"round-{guide}"


def describe_samples(samples: Samples) -> dict[str, Any]:
    """What was drawn, in numbers; `satisfied` is weighted back to p."""
    lengths = np.diff(samples.ragged("tokens").offsets)
    satisfied = samples.array("satisfied").astype(np.float64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    log_weights = np.zeros(len(lengths))
    difference = samples.ragged("log_p").values - samples.ragged("log_proposal").values
    np.add.at(log_weights, owner, difference.astype(np.float64))
    weights = np.exp(np.minimum(log_weights, np.log(10.0)))
    return {
        "texts": len(samples),
        "tokens": int(lengths.sum()),
        "finished": float(np.mean(samples.array("finished"))),
        "satisfied_as_drawn": float(satisfied.mean()),
        "satisfied_under_p": float((weights * satisfied).sum() / weights.sum()),
        "effective_share": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def require_prepared(study: Study, prepared: Path) -> None:
    """Say at once what is missing."""
    hint = "Run prepare_translation.py first; its help names the corpora it needs."
    for path in (
        study.prompts.file,
        Path(study.oracle.get("folder", prepared)) / "classifier.json",
        prepared / "test.jsonl.gz",
    ):
        if not Path(path).is_file():
            raise InputError(f"the prepared file {path}", "none", hint)
    name = study.base.name
    if name.startswith((".", "/")) and not Path(name).is_dir():
        raise InputError(
            f"a base in the folder {name}",
            "no such folder",
            "Train it with train_translator.py and unpack it there, or name another: --set base.name=NAME.",
        )


def begin_with_data(options: argparse.Namespace) -> None:
    """Prepare the files and train the base, where that was not done before; the rest goes on from there."""
    began, folder = time.perf_counter(), options.work / "prepared"

    def left() -> float:
        spent = time.perf_counter() - began
        return max(1.0, options.deadline - spent) if options.deadline else 0.0

    prepare_once(["--data", str(options.data), "--output", str(folder), *shlex.split(options.prepare)])
    options.prepared = folder / STUDY
    if not any(each.startswith("base.name=") for each in options.settings):
        places = {"corpus": folder / CORPUS, "work": options.work / "translator", "output": options.output}
        words = [word for name, path in places.items() for word in (f"--{name}", str(path))]
        model = train_base([*words, "--deadline", str(left()), *shlex.split(options.train)])
        options.settings.insert(0, f"base.name={model.absolute()}")
    options.deadline = left()


def main(arguments: Sequence[str] | None = None) -> int:
    """All stages, one after the other."""
    options = _parse(arguments)
    try:
        if options.data is not None:
            begin_with_data(options)
        there = {"prompts.file": options.prepared / SOURCES, "oracle.folder": options.prepared / ORACLE}
        prepared = [f"{name}={path.absolute()}" for name, path in there.items()]
        study = read_study(options.study, [*prepared, *options.settings])
        require_prepared(study, options.prepared)
        clock = Clock(options.output / "run.log", deadline=options.deadline)
        with Workers(options.workers) as workers:
            Run(study, read_table(options.table), options.work, options.output, clock, workers).run()
        if options.keep:
            pack_in_pieces(
                options.work / f"guide-{options.keep}" / "guide", options.output, f"guide-{options.keep}"
            )
        if options.score:
            found = score_run(options.output, options.prepared, clock.say)
            base = options.output / BASE_FACTS
            write_page(options.output, results(found, read_json(base) if base.is_file() else None))
    except NadoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).parent
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--data", type=Path, help="the folder of the raw corpora")
    given.add_argument("--prepared", type=Path, help="the folder study of prepare_translation.py")
    parser.add_argument(
        "--prepare",
        default="",
        help="with --data: options of prepare_translation.py, as --prepare='--sources 10000'",
    )
    parser.add_argument(
        "--train", default="", help="with --data: options of train_translator.py, as --train='--seconds 420'"
    )
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--output", type=Path, required=True, help="where what is small goes")
    parser.add_argument("--study", type=Path, default=here / "study.toml", help="the study")
    parser.add_argument("--table", type=Path, default=here / "table.toml", help="what is varied")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        help="replace a value of the study: train.steps=100",
    )
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which all is to be done")
    parser.add_argument("--keep", default="", help="a guide that is put into OUT, in pieces of 15 MiB")
    parser.add_argument("--workers", type=int, default=0, help="processes that label")
    parser.add_argument(
        "--no-score", dest="score", action="store_false", help="score later: score_formality.py"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
