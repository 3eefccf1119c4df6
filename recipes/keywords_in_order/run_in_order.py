"""The study in one command: adapt the base, draw, label, train guides in rounds, decode the test keys, score.

    python recipes/keywords_in_order/run_in_order.py --corpus yelp --data DATA --base smollm2.gguf \\
        --work WORK --output OUT --workers 14

DATA is what prepare_keys.py takes; with `--prepared` instead, the folder that it has written elsewhere.
Each stage leaves its result in WORK and is not done again when the command is repeated with the same
settings; one that was interrupted goes on. With `--deadline` guides are trained for as long as leaves time
for all the rest. `--later` says how many seconds a further call will have: guides are then trained for as
long as both allow, and what does not fit into this one is left for the other. OUT gets results, as JSON and
as tables (results.md), and every text after each guide, and the adapter.
"""

import argparse
import gzip
import json
import random
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import nearby  # noqa: F401  (finds stages, fine-tuning, decoding and recording)
import numpy as np
from dev_decoding import Written, write_base, write_guided
from fine_tuning import fine_tune, load_base, make_adapter
from guide_training import build_guide, leave_out_last, open_guide, share_time
from in_order_page import page
from key_guides import Learning, describe_guide
from key_samples import Making, read_folder, some_of
from key_settings import HINDSIGHT, REFERENCES, GuideStage, P, Q, read_key_settings
from key_table import KeyLine, describe_line, score_keyed
from ordered_keys import (
    DA,
    SEQ2SEQ,
    KeyedText,
    keys_in_texts,
    ordered_oracle,
    read_keyed,
    shorten_keys,
    write_keyed,
)
from prepare_keys import ABOUT, TEST, TRAIN, prepare_once
from progress_log import Clock, Stages
from run_commongen import pack
from side_work import Workers, run_with_workers
from study_settings import BASE, AdapterSettings, Row, RowSettings
from table_rows import score_log_p

from nado.errors import InputError
from nado.guide import Guide
from nado.guided import GuidedModel
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.huggingface.reading import HuggingFaceReader
from nado.prompts import Prompt
from nado.proposals import Proposal, guided_mixture, tempered
from nado.samples import Samples, join_samples
from nado.storage import digest_file, digest_json, read_json, write_bytes, write_json
from nado.versions import versions
from recording import record, write_page

# Seconds kept free before the deadline beside those in the settings: for reading samples, for the rest.
_DATA_SECONDS = 20.0
_LAST_SECONDS = 20.0
_FEWEST_SECONDS = 25.0  # with less left no further guide is begun
LineT = TypeVar("LineT")
KeyChooser: TypeAlias = Callable[[Sequence[str], int], list[tuple[str, ...]]]  # texts, seed → keys of each
_OWN = "own.jsonl.gz"
_TITLES = {SEQ2SEQ: "p, seq2seq", DA: "p, domain-adapted"}


class InOrder:
    """One call of the script."""

    alone_if_unseen = True  # a base that is never shown a key need not learn to read any

    def __init__(self, options: argparse.Namespace, workers: Workers) -> None:
        self.settings = read_key_settings(options.settings or _settings_of(options.corpus))
        self.name, self.base, self.output = options.name or options.corpus, options.base, options.output
        self.reads_keys = options.only != DA or not self.alone_if_unseen
        if options.only:
            self.settings = self.settings.of_base(options.only)
            self.name += f"-{options.only}"
        self.trained = read_given(options.trained)
        self.settings = self.settings.with_given(self.trained)
        if options.guides:
            self.settings = self.settings.of_guides(options.guides.split(","))
        require_lessons(self.settings.guides, self.trained)
        self.workers, self.later = workers, options.later
        self.given: Path | None = options.adapter
        self.clock = Clock(options.output / "run.log", deadline=options.deadline)
        prepared = options.prepared
        if prepared is None:
            prepared = prepare_once(options.corpus, options.data, options.work / "prepared")
        inputs = [Path(self.base).name, self.settings.base.length_limit]
        inputs += [digest_file(prepared / name) for name in self.read(prepared)]
        conditions = {each.prompt.condition for each in (*self.training, *self.tested)}
        self.bits = max(len(self.oracle.progress_names(each)) for each in conditions)
        work = options.work if self.reads_keys else options.work / DA  # it has another p
        self.stages = Stages(work, digest_json(inputs), self.clock)
        self.scores: dict[Row, Future[Any]] = {}
        self.written: dict[Row, tuple[Written, list[Any]]] = {}
        self.left_out: list[str] = []

    def read(self, folder: Path) -> Sequence[str]:
        """Texts, test lists and the question asked of them; returns the files that they are made of."""
        self.training, self.tested = read_prepared(folder)
        self.about = read_json(folder / ABOUT)
        self.oracle = ordered_oracle()
        return TRAIN, TEST

    def run(self) -> None:
        """Everything; results are on disk after every guide."""
        self.clock.say(f"{len(self.training):,} training texts, {len(self.tested):,} test lists")
        self.adapt()
        for base in (SEQ2SEQ, DA):
            self.decode(base, base, [BASE])
        if self.written:  # settings may ask for no line of p
            self.write()
        waiting = list(self.settings.guides)
        while waiting := self.fitting(waiting):
            if not self.learn(waiting):
                self.left_out = [each.name for each in waiting] + self.left_out
                break
            stage = waiting.pop(0)
            self.decode(stage.name, stage.base, [f"guide-{stage.name}"])
            self.write()
        self.write()
        self.clock.say("done" if not self.left_out else f"left for the next call: {', '.join(self.left_out)}")

    # --- p ----------------------------------------------------------------------------------------------

    def adapt(self) -> None:
        """One adapter for both bases: every text is learned after each of its lists, and once by itself.

        Where settings ask for texts of p's own, these too, after keys that are in them. Where the base that
        sees no key is all that is asked for, it learns the texts alone.
        """

        def tune(folder: Path) -> dict[str, Any]:
            dev: Any = self.tested  # behind their keys, as most of what is learned
            train: Any = [*self.training, *self.alone()]
            if own is not None:
                train += read_own(self.stages.folder / own)
            settings, limit = self.settings.adapter, self.settings.base.length_limit
            if settings.epochs < 1:  # what is not learned need not be tokenised
                train = [train[at] for at in some_of(round(settings.epochs * len(train)), len(train), 0)]
                settings = replace(settings, epochs=1.0)
            return fine_tune(self.clock, self.base, train, dev, folder, settings, length_limit=limit)

        own, learned, work = None, self.settings.adapter, tune
        if not self.reads_keys:
            learned, work = self.adapter_alone, self.tune_alone
        elif self.settings.own.count and self.given is None:
            own = self.write_own()
        config = {"adapter": asdict(learned), "reads_keys": self.reads_keys}
        place = make_adapter(self.stages, config, self.given, work, [] if own is None else [own])
        self.stages.run(BASE, asdict(self.settings.base), ["adapter"], lambda folder: {})
        pack(place, self.output / "adapter.tar")

    def alone(self) -> list[KeyedText]:
        """Every training text once, for a base that sees no key."""
        return list({each.text: replace(each, sees=False) for each in self.training}.values())

    @property
    def adapter_alone(self) -> AdapterSettings:
        """How the texts alone are learned."""
        return replace(self.settings.adapter, epochs=self.settings.own.epochs)

    def tune_alone(self, folder: Path) -> dict[str, Any]:
        """An adapter that has learned the texts alone."""
        alone: Any = self.alone()
        tested: Any = [replace(each, sees=False) for each in self.tested]
        limit = self.settings.base.length_limit
        return fine_tune(self.clock, self.base, alone, tested, folder, self.adapter_alone, length_limit=limit)

    def write_own(self) -> str:
        """Texts of a p that has learned the corpus alone, with keys in them; returns the stage's name.

        In one pass none of them is read twice: what p learns from them is to read keys, and no text by
        heart.
        """
        own, draw = self.settings.own, self.settings.draw

        def tune(folder: Path) -> dict[str, Any]:
            return self.tune_alone(folder / "adapter")

        first = self.stages.run("first_adapter", asdict(self.adapter_alone), [], tune) / "adapter"

        def write(folder: Path) -> dict[str, Any]:
            model = load_base(self.base, first, self.settings.base, device=self.clock.device)
            making = Making(self.clock, model, self.oracle, self.workers, draw)
            drawn = making.write_freely(own.count, folder / "drawn", own.seed, tempered(own.temperature))
            texts = [text.strip() for text in drawn.strings("text")]
            counts = [len(each.keys) for each in self.training]
            chosen = self.in_pieces(partial(keys_in_texts, counts=counts), texts, own.seed)
            pairs = zip(texts, chosen, strict=True)
            records = [{"text": text, "keys": list(keys)} for text, keys in pairs if keys]
            write_keyed(folder / _OWN, records)
            return {"texts": len(records)}

        config = {"own": asdict(own), "batch": draw.batch, "chunk": draw.chunk}
        self.stages.run("own_texts", config, ["first_adapter"], write)
        return "own_texts"

    @cached_property
    def model(self) -> CausalModel:
        """p: with keys for a prompt the seq2seq base, with none the domain-adapted one."""
        folder = self.stages.folder / "adapter" / "adapter"
        return load_base(self.base, folder, self.settings.base, device=self.clock.device)

    @cached_property
    def reader(self) -> HuggingFaceReader:
        """p as guides read it."""
        return HuggingFaceReader(self.model)

    # --- samples ----------------------------------------------------------------------------------------

    @property
    def making(self) -> Making:
        """What it takes to make samples."""
        return Making(self.clock, self.model, self.oracle, self.workers, self.settings.draw)

    def prompts(self, base: str, count: int, seed: int) -> list[Prompt]:
        """Prompts of training lists, and of lists that p's own texts have where these are asked for."""
        several = dict.fromkeys(each.keys for each in self.training)
        if self.settings.draw.own_lists:
            conditions = self.samples(self.look_back()).strings("condition")
            several |= dict.fromkeys(tuple(each.split(", ")) for each in conditions)
        pool, chooser = list(several), random.Random(seed)
        shorter = self.settings.draw.shorter if base == SEQ2SEQ else 0.0
        chosen: dict[tuple[str, ...], None] = {}
        for at in some_of(len(pool), len(pool), seed):
            if len(chosen) == count:
                break
            chosen.setdefault(shorten_keys(pool[at], shorter, chooser))
        return [KeyedText(0, keys, "", sees=base == SEQ2SEQ).prompt for keys in chosen]

    def sample_p(self, base: str) -> str:
        """Texts of p for training lists; returns the stage's name."""
        draw = self.settings.draw
        name = samples_name(P, base)

        def work(folder: Path) -> dict[str, Any]:
            prompts = self.prompts(base, draw.lists, draw.seed)
            return self.making.draw(prompts, draw.samples, folder, Proposal(), draw.seed)

        after = [self.look_back()] if draw.own_lists else [BASE]
        self.stages.run(name, asdict(draw), after, work)
        return name

    def bring_references(self, base: str) -> str:
        """Training texts with their own keys; returns the stage's name."""
        draw = self.settings.draw
        name = samples_name(REFERENCES, base)

        def work(folder: Path) -> dict[str, Any]:
            chosen = some_of(draw.references, len(self.training), draw.seed + 1)
            texts = [replace(self.training[at], sees=base == SEQ2SEQ) for at in chosen]
            return self.making.bring(texts, folder)

        self.stages.run(name, asdict(draw), [BASE], work)
        return name

    def look_back(self) -> str:
        """Texts of the p that sees no keys, with keys that are in them; returns the stage's name.

        Given its keys such a text is a draw from q*, but for how they were chosen, and there is no waiting
        for one.
        """
        draw, name = self.settings.draw, samples_name(HINDSIGHT, DA)

        def work(folder: Path) -> dict[str, Any]:
            drawn = self.making.write_freely(draw.hindsight, folder / "drawn", draw.seed + 3)
            texts = [text.strip() for text in drawn.strings("text")]
            several = join_samples([drawn] * draw.hindsight_lists)
            keys = self.in_pieces(self.chooser, texts * draw.hindsight_lists, draw.seed)
            conditions = [KeyedText(0, each, "", sees=False).prompt.condition for each in keys]
            return self.making.keep(several, conditions, folder)

        self.stages.run(name, asdict(draw), [BASE], work)
        return name

    @property
    def chooser(self) -> KeyChooser:
        """What finds keys that texts happen to have, as many as some test list, in any process."""
        return partial(keys_in_texts, counts=[len(each.keys) for each in self.tested])

    def in_pieces(self, chooser: KeyChooser, texts: Sequence[str], seed: int) -> list[tuple[str, ...]]:
        """Keys of each text, found by all processes."""
        size = self.settings.draw.chunk
        pieces = [texts[at : at + size] for at in range(0, len(texts), size)]
        chosen = [self.workers.submit(chooser, piece, seed + number) for number, piece in enumerate(pieces)]
        return [found for each in chosen for found in each.result()]

    def sample_q(self, stage: GuideStage) -> str:
        """Texts that the guide so far begins; returns the stage's name."""
        draw, name = self.settings.draw, f"round-{stage.name}"

        def work(folder: Path) -> dict[str, Any]:
            q_hat = GuidedLanguageModel(self.model, self.guide(stage.start), oracle=self.oracle)
            proposal = guided_mixture(
                q_hat,
                draw.guided_share,
                complete_from_p=stage.complete_from_p,
                mean_prefix=draw.mean_prefix if stage.complete_from_p else None,
            )
            prompts = self.prompts(stage.base, draw.guided, draw.seed + 2)
            return self.making.draw(prompts, 1, folder, proposal, draw.seed + 2)

        config = {"draw": asdict(draw), "complete_from_p": stage.complete_from_p}
        self.stages.run(name, config, [f"guide-{stage.start}"], work)
        return name

    def sources(self, stage: GuideStage) -> list[str]:
        """The stages whose samples a guide learns from, made where they are not there yet."""
        makers = {
            P: lambda: self.sample_p(stage.base),
            Q: lambda: self.sample_q(stage),
            REFERENCES: lambda: self.bring_references(stage.base),
            HINDSIGHT: self.look_back,
        }
        return [makers[each]() for each in stage.learn]

    def samples(self, name: str) -> Samples:
        """Labelled samples of a stage."""
        return read_folder(self.stages.folder / name)

    # --- guides -----------------------------------------------------------------------------------------

    def fitting(self, waiting: Sequence[GuideStage]) -> list[GuideStage]:
        """The guides that there is time for, in this call and in a further one."""
        given = [each for each in waiting if each.name in self.trained]

        def too_short(begun: Sequence[GuideStage]) -> bool:
            # Of what is given only the lines take time.
            return share_time(self.budget, begun, self.reserve([*begun, *given])) < begun[0].seconds / 2

        kept, others = leave_out_last(waiting, self._is_trained, too_short)
        self.left_out = [each.name for each in others] + self.left_out
        return kept

    def _is_trained(self, stage: GuideStage) -> bool:
        return stage.name in self.trained or self.stages.is_done(f"guide-{stage.name}")

    def learn(self, waiting: Sequence[GuideStage]) -> bool:
        """Train the first of the waiting guides, for its share of the time left; whether there was time."""
        stage = waiting[0]
        if stage.name in self.trained:
            self.take(stage, self.trained[stage.name])
            return True
        shapes = [each.shape(self.settings.shape) for each in waiting if each.name not in self.trained]
        seconds = share_time(self.budget, shapes, self.reserve(waiting))
        if not self._is_trained(stage) and self.clock.left < self.needed(stage, seconds):
            return False
        sources = self.sources(stage)

        def work(folder: Path) -> dict[str, Any]:
            learning = Learning(self.clock, self.reader, self.oracle, stage, shapes[0])
            draw = self.settings.draw
            several = [self.samples(each) for each in sources]
            data = learning.gather(several, self.bits, draw.held_out, draw.seed)
            arguments: Any = (self.reader, self.oracle, shapes[0], data, Path(self.base).name)
            guide = self.guide(stage.start) if stage.start else build_guide(*arguments)
            guide.config.cut_share = data.cut_share
            facts = learning.train(guide, build_guide(*arguments), data, folder, seconds)
            return {**facts, "learned_from": sources}

        config = {**asdict(stage), "shape": asdict(self.settings.shape), "bits": self.bits}
        after = [*sources, f"guide-{stage.start}"] if stage.start else sources
        self.stages.run(f"guide-{stage.name}", config, after, work)
        return True

    def take(self, stage: GuideStage, trained: Path) -> None:
        """The stage of a guide that an earlier run has trained."""

        def work(folder: Path) -> dict[str, Any]:
            shutil.copytree(trained, folder / "guide", dirs_exist_ok=True)
            facts = describe_guide(read_json(trained / "training.json")["summary"], stage.objective)
            return {**facts, "learned_from": ["an earlier run"]}

        files = [*sorted(trained.glob("*.safetensors")), trained / "config.json"]
        self.stages.run(f"guide-{stage.name}", {"given": [digest_file(each) for each in files]}, [BASE], work)

    @property
    def budget(self) -> Any:
        """A clock that also counts what a further call will have."""
        return SimpleNamespace(left=self.clock.left + self.later)

    def needed(self, stage: GuideStage, seconds: float) -> float:
        """Seconds before the deadline without which a guide is not begun."""
        if not self.later:  # there is no other call to leave it to, but also no use in too short a time
            return _FEWEST_SECONDS + _LAST_SECONDS
        reserved = self.settings.reserved
        drawing = reserved.round if Q in stage.learn else reserved.samples
        return drawing + _DATA_SECONDS + seconds + self.row_seconds([stage]) + _LAST_SECONDS

    def row_seconds(self, several: Sequence[GuideStage]) -> float:
        """Seconds that the lines of guides will take."""
        rows = [row for each in several for row, _ in self.settings.rows_of(each.name)]
        return float(sum(getattr(self.settings.reserved, row.kind) for row in rows))

    def reserve(self, waiting: Sequence[GuideStage]) -> float:
        """Seconds that everything but training will take from now on."""
        reserved = self.settings.reserved
        rounds = sum(Q in each.learn for each in waiting)
        names = {samples_name(kind, each.base) for each in waiting for kind in each.learn if kind != Q}
        fresh = sum(not self.stages.is_done(name) for name in names)
        return (
            self.row_seconds(waiting)
            + reserved.round * rounds
            + reserved.samples * fresh
            + _DATA_SECONDS * sum(each.name not in self.trained for each in waiting)
            + _LAST_SECONDS
        )

    def guide(self, name: str) -> Guide:
        """A trained guide as it was saved."""
        return open_guide(self.stages.folder / f"guide-{name}", self.reader, self.oracle)

    # --- the table --------------------------------------------------------------------------------------

    def decode(self, system: str, base: str, after: Sequence[str]) -> None:
        """Write the texts of all lines of one system; processes score them meanwhile."""
        asked: Any = [replace(each, sees=base == SEQ2SEQ) for each in self.tested]
        guided: list[GuidedModel] = []  # made for the first line that is not there yet

        def work(row: Row, settings: RowSettings, folder: Path) -> dict[str, Any]:
            if system == base:
                written = write_base(self.model, asked, row, settings)
            else:
                if not guided:
                    guided.append(GuidedModel(self.model, self.guide(system), oracle=self.oracle))
                written = write_guided(guided[0], asked, row, settings)
            log_p = [each.tolist() for each in score_log_p(self.model, asked, written)]
            write_json(folder / "texts.json", {"written": written.describe(), "log_p": log_p})
            return {"seconds": written.seconds, "oracle_seconds": written.oracle_seconds}

        for row, settings in self.settings.rows_of(system):
            config = {**asdict(row), "beams": settings.beams}
            folder = self.stages.run(f"rows/{row.name}", config, after, partial(work, row, settings))
            found = read_json(folder / "texts.json")
            written = Written(**found["written"])
            log_p = [np.array(each, dtype=np.float32) for each in found["log_p"]]
            self.written[row] = (written, log_p)
            self.scores[row] = self.score(written.texts)

    def score(self, texts: list[str]) -> "Future[Any]":
        """What texts for the test lists come to, on its way."""
        return self.workers.submit(score_keyed, self.tested, texts)

    def title(self, system: str) -> str:
        """What a system is, in words."""
        return _TITLES.get(system) or self.settings.stage(system).title

    def base_of(self, system: str) -> str:
        """The base that a system guides, or is."""
        return system if system in _TITLES else self.settings.stage(system).base

    def lines(self) -> dict[Row, KeyLine]:
        """All lines there are, scored."""
        return {
            row: KeyLine(self.scores[row].result(), written, log_p)
            for row, (written, log_p) in self.written.items()
        }

    # --- results ----------------------------------------------------------------------------------------

    def write(self) -> None:
        """Results so far, and the texts they were measured on."""
        lines = self.lines()
        rows = [
            describe_line(self.title(row.system), row, line, self._base_line(row, lines))
            for row, line in lines.items()
        ]
        facts = {name: each for name, each in self.stages.facts.items() if not name.startswith("rows")}
        found = {
            "about": self.about,
            "rows": [{**each, "base": self.base_of(each["system"])} for each in rows],
            "stages": facts,
            "settings": {**self.settings.describe(), "base_model": Path(self.base).name},
            "left_out": self.left_out,
            "versions": versions(),
            "seconds": self.stages.seconds,
        }
        path = self.output / f"keywords_in_order-{self.name}.json"
        path.unlink(missing_ok=True)  # a run is recorded whole, and not joined to an earlier one
        record("keywords_in_order", {self.name: found}, output=path)
        write_page(self.output, page([read_json(path)]))
        write_lines(self.output / f"texts-{self.name}.jsonl.gz", self.tested, lines)

    def _base_line(self, row: Row, lines: dict[Row, LineT]) -> LineT | None:
        """p under the same decoding, or however it was decoded; None for p itself."""
        base = self.base_of(row.system)
        if row.system == base:
            return None
        several = {each.decoding: line for each, line in lines.items() if each.system == base}
        return several.get(row.decoding) or next(iter(several.values()), None)


def read_given(words: Sequence[str]) -> dict[str, Path]:
    """Guides that were trained before, by name: `rounds=FOLDER`."""
    pairs = [each.partition("=") for each in words]
    for name, _, folder in pairs:
        path = Path(folder) / "training.json"
        if not path.is_file() or not read_json(path).get("summary"):
            bare = ", saved without a summary of its training" if path.is_file() else ""
            raise InputError(
                f"a trained guide in {name}=FOLDER",
                f"{folder or 'none'}{bare}",
                "Name what a run left in guide-NAME/guide.",
            )
    return {name: Path(folder) for name, _, folder in pairs}


def require_lessons(stages: Sequence[GuideStage], trained: Collection[str]) -> None:
    """A guide that settings give nothing to learn from has to be a trained one."""
    for each in stages:
        if not each.learn and each.name not in trained:
            raise InputError(
                f"texts that the guide {each.name} learns from",
                "none in its settings",
                f"Say --trained {each.name}=FOLDER, or leave it out by --guides.",
            )


def samples_name(kind: str, base: str) -> str:
    """The stage that makes samples of one kind for a base."""
    return f"{'samples' if kind == P else kind}-{base}"


def _settings_of(corpus: str) -> Path:
    return Path(__file__).parent / f"{corpus}.toml"


def read_prepared(folder: Path) -> tuple[list[KeyedText], list[KeyedText]]:
    """Training texts, once for each of their lists of keys, and the test lists."""
    records = read_keyed(folder / TRAIN)
    pairs = [(keys, record["text"]) for record in records for keys in record["keys"]]
    training = [KeyedText(number, tuple(keys), text) for number, (keys, text) in enumerate(pairs)]
    tested = [KeyedText(each["id"], tuple(each["keys"]), each["text"]) for each in read_keyed(folder / TEST)]
    if not training or not tested:
        raise InputError(f"texts and test lists in {folder}", "none", "Run prepare_keys.py again.")
    return training, tested


def read_own(folder: Path) -> list[KeyedText]:
    """p's own texts with their keys, as a stage has left them."""
    several = enumerate(read_keyed(folder / _OWN))
    return [KeyedText(number, tuple(each["keys"]), each["text"]) for number, each in several]


def write_lines(path: Path, tested: Sequence[KeyedText], lines: dict[Row, KeyLine]) -> None:
    """Every text of every line, none selected."""
    records = [
        {"row": row.name, "id": each.number, "keys": list(each.keys), "text": text}
        for row, line in lines.items()
        for each, text in zip(tested, line.written.texts, strict=True)
    ]
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    packed = gzip.compress(content, mtime=0)
    write_bytes(path, packed)


def main(arguments: Sequence[str] | None = None) -> int:
    """All stages, one after the other."""
    return run_with_workers(InOrder, _parse(arguments))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", required=True, help="yelp, news or reviews: names results and settings")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--data", type=Path, help="the folder of the corpora")
    given.add_argument("--prepared", type=Path, help="what prepare_keys.py has made of them")
    parser.add_argument("--settings", type=Path, help="what is done (default: CORPUS.toml beside this file)")
    parser.add_argument("--name", default="", help="what results are called (default: as the corpus)")
    add_options(parser)
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every study in rounds is told."""
    parser.add_argument("--base", required=True, help="GGUF file or folder of the base model")
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--output", type=Path, required=True, help="where what is small goes")
    parser.add_argument("--adapter", type=Path, help="an adapter to take instead of fine-tuning one")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which all is to be done")
    parser.add_argument("--only", choices=[SEQ2SEQ, DA], default="", help="guides of this base alone")
    parser.add_argument("--guides", default="", help="these guides alone, as warm,warm_rounds")
    parser.add_argument(
        "--trained",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a guide to take instead of training it (WORK/guide-NAME/guide of an earlier run)",
    )
    parser.add_argument("--later", type=float, default=0.0, help="seconds that a further call will have")
    parser.add_argument("--workers", type=int, default=0, help="processes that label and score")


if __name__ == "__main__":
    sys.exit(main())
