"""The report: the same numbers in JSON, Markdown and on the page, nothing that escapes, nothing made up.

What is shown comes from a small study that is really run: a random Llama with 24 words, a guide trained on
what it writes, and texts of five systems on the same prompts.
"""

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import small_models
from nado.calibration import calibration_table
from nado.drawing import draw_rows
from nado.errors import InputError, MismatchError
from nado.exact_sampling import diagnose, draw_weighted
from nado.guidance import Guidance
from nado.guide import Guide, GuideConfig
from nado.guided_language_model import GuidedLanguageModel, Trace
from nado.huggingface import CausalModel
from nado.huggingface.reading import HuggingFaceReader
from nado.language_model import LanguageModel
from nado.metrics import (
    Bin,
    Measure,
    calibration_by,
    compare_shares,
    kl_from_base,
    length,
    mean,
    perplexity_of_log_p,
    reliability,
    score_tokens,
    share,
)
from nado.oracles import Keywords
from nado.prompts import Prompt
from nado.proposals import Proposal, summarise_weights
from nado.report import (
    Calibration,
    Chart,
    Curve,
    Example,
    Examples,
    ExampleText,
    Fact,
    Histogram,
    Pair,
    Point,
    Rate,
    Report,
    System,
    TokenTrace,
    calibration_from_reliability,
    calibration_from_table,
    choose_rows,
    consistency_chart,
    consistency_curve,
    cost_from_texts,
    cut_text,
    pair_examples,
    read_report,
    render_markdown,
    render_page,
    report_from_evaluation,
    rounds_from_summaries,
    system_from_measures,
    text_from_trace,
    trace_texts,
    training_charts,
    weights_from_summary,
    weights_from_texts,
    write_report,
)
from nado.report.highlights import describe_token, level, show_text
from nado.report.numbers import style_of, style_of_measures, write_chance, write_factor, write_p_value
from nado.report.svg import span, ticks, widen
from nado.report.tables import headline_table
from nado.report.traces import trace_tokens
from nado.rounds import RoundsConfig, train_in_rounds
from nado.samples import Samples
from nado.training import Objective, TrainingConfig, TrainingSummary, train
from nado.training_data import TrainingData
from nado.versions import versions

LIMIT = 12
ORACLE = Keywords(inflections=False)
PROMPTS = [
    Prompt(start, word)
    for start in ("the dog", "a man sees", "the old woman", "a cat", "the park", "a red ball")
    for word in ("ball", "beach", "park", "man")
]
PER_PROMPT = 20
STEPS = 240


# --- a small study, really run ------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """What one system wrote: `PER_PROMPT` texts for each prompt."""

    prompts: list[Prompt]
    texts: list[str]
    tokens: list[list[int]]
    satisfied: np.ndarray
    log_q: np.ndarray

    @property
    def groups(self) -> list[tuple[str, str]]:
        return [(each.prompt, each.condition) for each in self.prompts]


def write(model: LanguageModel[Any], seed: int, count: int = PER_PROMPT) -> Texts:
    asked = [each for each in PROMPTS for _ in range(count)]
    table = draw_rows(model, asked, range(len(asked)), proposal=Proposal(), seed=seed, batch_size=1024)
    texts = table["text"].to_pylist()
    satisfied = ORACLE([each.condition for each in asked], texts)
    log_q = np.array([sum(row) for row in table["log_p"].to_pylist()])
    return Texts(asked, texts, table["tokens"].to_pylist(), np.asarray(satisfied), log_q)


def sample(model: LanguageModel[Any], seed: int, count: int) -> Samples:
    import pyarrow as pa

    asked = [each for each in PROMPTS for _ in range(count)]
    table = draw_rows(model, asked, range(len(asked)), proposal=Proposal(), seed=seed, batch_size=1024)
    hit = ORACLE(table["condition"].to_pylist(), table["text"].to_pylist())
    satisfied = hit & table["finished"].to_numpy(zero_copy_only=False)
    return Samples(table.append_column("satisfied", pa.array(satisfied)))


@dataclass(frozen=True)
class Study:
    """Everything the small study made."""

    reader: HuggingFaceReader
    guide: Guide
    training: TrainingSummary
    held_out: TrainingData
    written: dict[str, Texts]
    report: Report


def make_guide(reader: HuggingFaceReader, seed: int) -> Guide:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = GuideConfig.for_reader(reader, size=32, layers=1, heads=2)
        return Guide(config).attach(reader)


def measures_of(base: CausalModel, written: Texts) -> list[Measure]:
    groups = written.groups
    log_p = score_tokens(
        base,
        [each.prompt for each in written.prompts],
        written.tokens,
        conditions=[each.condition for each in written.prompts],
        batch_size=512,
    )
    totals = np.array([float(row.sum()) for row in log_p])
    return [
        share("satisfied", written.satisfied, groups),
        perplexity_of_log_p(log_p).measure(groups),
        mean("length", [len(row) for row in written.tokens], unit="tokens").measure(groups),
        kl_from_base(written.log_q, totals, groups),
        share("part: ends itself", [len(row) < LIMIT for row in written.tokens], groups),
    ]


def run_study(folder: Path) -> Study:
    base = CausalModel(
        small_models.build("llama", 3), small_models.tokenizer(), length_limit=LIMIT, completion="limit"
    )
    reader = HuggingFaceReader(base)
    data = TrainingData.from_samples(sample(base, 1, 400), reader)
    held_out = TrainingData.from_samples(sample(base, 2, 40), reader)
    guide, untrained = make_guide(reader, 0), make_guide(reader, 0)
    data.keep_states(reader)
    config = TrainingConfig(
        steps=STEPS, batch_size=256, learning_rate=5e-3, ramp_steps=20, evaluate_every=40, measure_every=80
    )

    def satisfaction(trained: Guide) -> dict[str, float]:
        return {"satisfied": float(write(GuidedLanguageModel(base, trained), 9, 4).satisfied.mean())}

    summary = train(guide, reader, data, config, held_out=held_out, measure=satisfaction)
    guided = GuidedLanguageModel(base, guide)
    models: dict[str, LanguageModel[Any]] = {
        "base": base,
        "untrained guide": GuidedLanguageModel(base, untrained),
        "trained guide": guided,
        "strength 0.5": GuidedLanguageModel(base, guide, guidance=Guidance(strength=0.5)),
        "strength 2": GuidedLanguageModel(base, guide, guidance=Guidance(strength=2.0)),
    }
    written = {name: write(model, seed=5) for name, model in models.items()}
    report = Report(
        title="A keyword in a random Llama’s texts",
        summary=f"A guide of one layer, trained for {STEPS} steps on the base’s texts, asked for one word.",
        facts=(
            Fact("base", "Llama, 2 layers, random weights"),
            Fact("oracle", ORACLE.name),
            Fact("prompts", f"{len(PROMPTS)}, seen in training"),
            Fact("texts a prompt", str(PER_PROMPT)),
            Fact("length limit", f"{LIMIT} tokens, completion 'limit'"),
            Fact("seed", "5"),
        ),
        systems=systems_of(base, guided, written),
        pairs=pairs_of(written),
        training=training_charts(summary),
        rounds=rounds_of(reader, folder),
        rates=rates_of(base, guide),
        calibration=calibration_of(guided, held_out, guide, reader),
        consistency=consistency_of(guided, written),
        examples=examples_of(guided, written),
        notes=("The base has random weights: its texts mean nothing, its numbers do.",),
        versions=tuple(Fact(name, value) for name, value in versions().items()),
    )
    return Study(reader, guide, summary, held_out, written, report)


def systems_of(
    base: CausalModel, guided: GuidedLanguageModel, written: dict[str, Texts]
) -> tuple[System, ...]:
    weighted = draw_weighted(
        guided, [each.prompt for each in PROMPTS], [each.condition for each in PROMPTS], ORACLE, count=40
    )
    weights = {"trained guide": weights_from_texts(weighted, diagnose(weighted))}
    return tuple(
        system_from_measures(
            name,
            measures_of(base, each),
            cost=cost_from_texts(
                each.satisfied.tolist(), [len(row) for row in each.tokens], prompts=each.groups
            ),
            weights=weights.get(name),
        )
        for name, each in written.items()
    )


def pairs_of(written: dict[str, Texts]) -> tuple[Pair, ...]:
    first, groups = written["trained guide"], written["base"].groups
    return tuple(
        Pair(
            "trained guide",
            name,
            compare_shares("satisfied", first.satisfied, written[name].satisfied, groups),
        )
        for name in ("base", "untrained guide")
    )


def rounds_of(reader: HuggingFaceReader, folder: Path) -> Any:
    guide, after = make_guide(reader, 1), []
    training = TrainingConfig(steps=40, batch_size=128, learning_rate=5e-3, ramp_steps=10, evaluate_every=0)

    def look(_: Any) -> None:
        texts = write(GuidedLanguageModel(reader.model, guide), 8, 10)
        after.append(share("satisfied", texts.satisfied, texts.groups))

    config = RoundsConfig(samples=(40, 30))
    summaries = train_in_rounds(guide, reader, ORACLE, PROMPTS, folder, config, training, on_round=look)
    return rounds_from_summaries(summaries, after)


def rates_of(base: CausalModel, guide: Guide) -> tuple[Rate, ...]:
    found = []
    for rate in (0.25, 0.5, 0.75):
        texts = write(GuidedLanguageModel(base, guide, guidance=Guidance(target_rate=rate)), 6, 10)
        found.append(Rate("trained guide", rate, share("satisfied", texts.satisfied, texts.groups)))
    return tuple(found)


def calibration_of(
    guided: GuidedLanguageModel, held_out: TrainingData, guide: Guide, reader: HuggingFaceReader
) -> tuple[Calibration, ...]:
    """R along texts of the base, against what became of them."""
    texts = write(guided.base, 7)
    trace, lengths = trace_tokens(
        guided,
        [each.prompt for each in texts.prompts],
        texts.tokens,
        [each.condition for each in texts.prompts],
    )
    rows = [(text, place) for text, count in enumerate(lengths.tolist()) for place in range(count)]
    chances = [float(trace.log_factor[text, place].exp()) for text, place in rows]
    outcomes, owners = [bool(texts.satisfied[text]) for text, _ in rows], [text for text, _ in rows]
    found = reliability(chances, outcomes, owners)
    starts = [float(value) for value in trace.log_s[:, 0].exp()]
    keys = [f"{prompt} · {condition}" for prompt, condition in texts.groups]
    return (
        calibration_from_reliability(
            "trained guide",
            found,
            positions=calibration_by([place + 1 for _, place in rows], chances, outcomes, owners),
            prompts=calibration_by(keys, starts, texts.satisfied.tolist()),
        ),
    )


def consistency_of(guided: GuidedLanguageModel, written: dict[str, Texts]) -> Chart:
    curves = []
    for name in ("base", "trained guide"):
        texts = written[name]
        traced = trace_tokens(
            guided,
            [each.prompt for each in texts.prompts],
            texts.tokens,
            [each.condition for each in texts.prompts],
        )
        curves.append(consistency_curve(f"on texts of: {name}", *traced, guided.guidance))
    return consistency_chart(*curves)


def examples_of(guided: GuidedLanguageModel, written: dict[str, Texts]) -> Examples:
    rows, how = choose_rows(len(written["base"].texts))
    prompts = [written["base"].prompts[row].prompt for row in rows]
    conditions = [written["base"].prompts[row].condition for row in rows]
    columns = [
        trace_texts(
            guided,
            name,
            prompts,
            [written[name].tokens[row] for row in rows],
            conditions,
            satisfied=[bool(written[name].satisfied[row]) for row in rows],
        )
        for name in ("base", "trained guide")
    ]
    return Examples(how, pair_examples(prompts, conditions, *columns))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def report(study: Study) -> Report:
    return study.report


# --- reading pages ------------------------------------------------------------------------------------

VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """The elements of a page, the numbers in its tables and the texts it shows."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []  # of the examples
        self.cells: list[tuple[str | None, str]] = []  # value and shown text of each number
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag in VOID:
            return
        self.open.append((tag, dict(attributes)))
        if self._within("class", "text") and self.open[-1][1].get("class") == "text":
            self.texts.append("")
        if tag == "data":
            self.cells.append((self.open[-1][1]["value"], ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inside = [name for name, _ in self.open]
        if "script" in inside:
            self.scripts.append(data)
        elif "style" not in inside:
            self.words.append(data)
        if self._within("class", "text"):
            self.texts[-1] += data
        if inside and inside[-1] == "data":
            self.cells[-1] = (self.cells[-1][0], self.cells[-1][1] + data)

    def _within(self, name: str, value: str) -> bool:
        return any(attributes.get(name) == value for _, attributes in self.open)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.words).split())


def measures_shown(report: Report) -> Iterator[tuple[str, Measure]]:
    for system in report.systems:
        weights = () if system.weights is None else system.weights.measures
        for measure in (*system.measures, *system.cost, *weights):
            yield system.name, measure


# --- content ------------------------------------------------------------------------------------------


def test_a_report_is_the_same_after_a_trip_through_json(report: Report) -> None:
    text = json.dumps(report.to_json(), allow_nan=False)
    assert Report.from_json(json.loads(text)) == report


def test_a_report_is_the_same_after_a_trip_through_files(report: Report, tmp_path: Path) -> None:
    page = write_report(report, tmp_path / "new" / "folder")
    assert sorted(each.name for each in page.parent.iterdir()) == ["report.html", "report.json", "report.md"]
    assert read_report(page.parent) == read_report(page.parent / "report.json") == report
    first = {each.name: each.read_bytes() for each in page.parent.iterdir()}
    write_report(read_report(page.parent), page.parent)
    assert first == {each.name: each.read_bytes() for each in page.parent.iterdir()}


def test_json_says_which_schema_it_has_and_another_is_refused(report: Report) -> None:
    record = report.to_json()
    assert record["schema"] == 1
    with pytest.raises(InputError) as caught:
        Report.from_json({**record, "schema": 2})
    assert str(caught.value) == (
        "expected a report of schema 1; found schema 2. "
        "Read it with the version of nado that wrote it, or make it again."
    )
    with pytest.raises(InputError, match="expected a report as JSON; found something else"):
        Report.from_json([])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("title",), 3, "expected a string at report.title; found 3. "),
        (("systems", 0, "colour"), "red", "at report.systems[0]; found 'colour'. "),
        (
            ("systems", 0, "measures", 0, "n"),
            1.5,
            "a whole number at report.systems[0].measures[0].n; found 1.5",
        ),
        (("systems", 0, "measures", 0, "low"), "x", "a finite number at report.systems[0].measures[0].low; "),
        (("systems",), {}, "expected a list at report.systems; found {}. "),
        (
            ("examples", "examples", 0, "texts", 0, "satisfied"),
            1,
            "true or false at report.examples.examples[0]",
        ),
        (("examples",), "none", "expected an object at report.examples; found 'none'. "),
    ],
)
def test_json_that_is_no_report_is_refused_with_its_place(
    report: Report, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    record: Any = json.loads(json.dumps(report.to_json()))
    inner = record
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(InputError) as caught:
        Report.from_json(record)
    assert message in str(caught.value)


def test_a_missing_key_is_refused(report: Report) -> None:
    record = json.loads(json.dumps(report.to_json()))
    del record["systems"][1]["name"]
    with pytest.raises(InputError, match=r"at report.systems\[1\]; found no 'name'"):
        Report.from_json(record)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused_and_leave_older_files_alone(tmp_path: Path, bad: float) -> None:
    good = Report("good", systems=(System("base", measures=(Measure("satisfied", 0.5, 10),)),))
    write_report(good, tmp_path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    wrong = replace(good, systems=(System("base", measures=(Measure("satisfied", bad, 10),)),))
    with pytest.raises(InputError) as caught:
        write_report(wrong, tmp_path)
    assert str(caught.value) == (
        f"expected finite numbers in a report; found {bad} at report.systems[0].measures[0].value. "
        "Leave out what has no value: None says so."
    )
    assert before == {each.name: each.read_bytes() for each in tmp_path.iterdir()}


def test_systems_have_names_of_their_own() -> None:
    with pytest.raises(InputError) as caught:
        Report("x", systems=(System("a"), System("a")))
    assert str(caught.value) == (
        "expected a name of its own for every system; found 'a' twice. Say in it what differs."
    )


def test_tokens_must_make_up_their_text() -> None:
    with pytest.raises(MismatchError, match="expected tokens that make up the text 'a b'; found 'a'"):
        ExampleText("base", "a b", tokens=(TokenTrace("a", -1.0, -1.0),))


def test_a_histogram_has_one_edge_more_than_counts() -> None:
    with pytest.raises(InputError, match="found 2 edges and 2 counts"):
        Histogram("w", "x", (0.0, 1.0), (1, 2))


# --- no drift: all three formats say the same ---------------------------------------------------------


def test_the_page_holds_every_measure_of_the_json_to_the_last_digit(report: Report) -> None:
    page = Page(render_page(report))
    shown = {value for value, _ in page.cells}
    record = json.loads(json.dumps(report.to_json()))
    values = [
        measure["value"]
        for system in record["systems"]
        for measure in (
            *system["measures"],
            *system["cost"],
            *system.get("weights", {"measures": []})["measures"],
        )
    ]
    values += [pair["result"]["difference"] for pair in record["pairs"]]
    values += [rate["achieved"]["value"] for rate in record["rates"]]
    values += [each["before"]["value"] for each in record["rounds"]]
    values += [each["after"]["value"] for each in record["rounds"]]
    values += [each["rate"] for each in record["calibration"][0]["bins"]]
    values += [point["y"] for curve in record["consistency"]["curves"] for point in curve["points"]]
    assert len(values) > 60
    assert {str(float(value)) for value in values} <= {str(float(value or "nan")) for value in shown}


def test_what_is_read_is_the_number_behind_it(report: Report) -> None:
    for value, text in Page(render_page(report)).cells:
        plain = text.replace("−", "-").replace(",", "").removeprefix("< ")
        number = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
        decimals = len(plain.removesuffix("%").partition(".")[2]) + (2 if plain.endswith("%") else 0)
        # A difference of shares is written in percentage points, without a sign for it.
        close = [abs(number * scale - float(value or "nan")) <= 0.51 * 10.0**-decimals for scale in (1, 0.01)]
        assert any(close) or text == "< 0.001", (value, text)


def test_the_headline_of_page_and_markdown_is_the_same(report: Report) -> None:
    page, text = Page(render_page(report)).said, render_markdown(report)
    table = headline_table(report)
    assert len(table.rows) == 5
    for row in table.rows:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row[0].text} |"))
        for cell in row[1:]:
            assert f"{cell.text} {cell.detail}" in page
            assert f" {cell.text} {cell.detail} " in line


def test_a_changed_number_changes_page_and_markdown(report: Report) -> None:
    base = report.systems[0]
    other = replace(base, measures=(replace(base.measures[0], value=0.123456), *base.measures[1:]))
    changed = replace(report, systems=(other, *report.systems[1:]))
    for render in (render_page, render_markdown):
        assert "12.3%" in render(changed)
        assert "12.3%" not in render(report)
    assert '<data value="0.123456">' in render_page(changed)


def test_texts_are_shown_as_they_are(report: Report) -> None:
    assert report.examples is not None
    page = Page(render_page(report))
    written = [text for example in report.examples.examples for text in example.texts]
    assert len(written) == len(page.texts) == 40
    for text, shown in zip(written, page.texts, strict=True):
        ended = text.tokens[-1].ends
        marks = shown.removesuffix(" end") if ended else shown
        assert marks.replace("·", "") == text.text
        assert shown.endswith("end") == ended
    markdown = render_markdown(report)
    assert all(text.text in markdown.replace("\\", "") for text in written)


def test_both_formats_name_every_system_and_every_part_of_the_study(report: Report) -> None:
    for text in (Page(render_page(report)).said, render_markdown(report)):
        for name in ("base", "untrained guide", "trained guide", "strength 0.5", "strength 2"):
            assert name in text
        for title in ("Results", "Differences", "Training", "Rounds", "Requested rates", "Calibration"):
            assert title in text
        for title in ("Consistency", "Weights", "Cost", "Texts"):
            assert title in text
        assert "Not measured" not in text
        assert "20 of 480, chosen by seed 0; none replaced" in text


def test_the_page_of_a_study_is_small(report: Report) -> None:
    assert len(render_page(report).encode()) < 1_000_000


def test_twenty_pairs_of_long_texts_stay_below_a_megabyte() -> None:
    token = TokenTrace(" something", -3.21098, -1.23456, -0.98765, " alternative", -0.54321)
    text = ExampleText("guided", token.text * 110, True, True, (token,) * 110, True, -2.0)
    report = Report("x", examples=Examples("all", (Example("p", "c", (text, text)),) * 20))
    assert 500_000 < len(render_page(report).encode()) < 1_000_000


def test_very_long_texts_are_cut_on_the_page_and_say_so() -> None:
    token = TokenTrace(" word", -1.0, -1.0)
    text = ExampleText("guided", token.text * 1234, tokens=(token,) * 1234)
    report = Report("x", examples=Examples("all", (Example("p", "c", (text,)),)))
    assert "… 1,034 more tokens in report.json" in Page(render_page(report)).said
    assert Report.from_json(report.to_json()) == report


# --- what is missing, and what is small ---------------------------------------------------------------

ALL = (
    "results, paired differences, training curves, rounds, requested rates, calibration, consistency, "
    "weights, cost, example texts"
)


def test_an_empty_report_says_that_nothing_was_measured(tmp_path: Path) -> None:
    report = Report("Nothing yet")
    page = Page(render_page(report))
    assert f"Not measured: {ALL}." in page.said
    assert f"Not measured: {ALL}." in render_markdown(report)
    assert not [tag for tag, _ in page.elements if tag in ("table", "svg", "section")]
    assert read_report(write_report(report, tmp_path).parent) == report


PARTS = {
    "systems": "results, weights, cost",
    "pairs": "paired differences",
    "training": "training curves",
    "rounds": "rounds",
    "rates": "requested rates",
    "calibration": "calibration",
    "consistency": "consistency",
    "examples": "example texts",
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_missing_is_left_out_and_named(report: Report, part: str) -> None:
    empty = replace(report, **{part: None if part in ("consistency", "examples") else ()})
    page = Page(render_page(empty))
    assert f"Not measured: {PARTS[part]}." in page.said
    assert f"Not measured: {PARTS[part]}." in render_markdown(empty)
    keys = {attributes["id"] for tag, attributes in page.elements if tag == "section"}
    links = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    assert links == {f"#{key}" for key in keys}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_alone_makes_a_page(report: Report, part: str) -> None:
    alone = Report("One part", **{part: getattr(report, part)})
    page = Page(render_page(alone))
    assert "Not measured:" in page.said
    assert [tag for tag, _ in page.elements if tag == "section"]
    assert render_markdown(alone).startswith("# One part\n")
    assert Report.from_json(json.loads(json.dumps(alone.to_json()))) == alone


@pytest.mark.parametrize("count", [1, 5])
def test_one_system_and_five_share_a_page(report: Report, count: int) -> None:
    some = replace(report, systems=report.systems[:count], pairs=())
    page = Page(render_page(some))
    bars = [each for _, each in page.elements if each.get("class") == "bar"]
    dots = [each for _, each in page.elements if each.get("class") == "dot"]
    assert len(bars) == len(dots) == count
    assert len(headline_table(some).rows) == count


def test_a_measure_that_a_system_has_not_is_a_dash() -> None:
    both = (
        System("a", measures=(Measure("satisfied", 0.5, 30, unit="share"), Measure("BLEU", 31.4159, 30))),
        System("b", measures=(Measure("satisfied", 0.7, 30, unit="share"),)),
    )
    rows = headline_table(Report("x", systems=both)).rows
    assert [cell.text for cell in rows[0]] == ["a", "50.0%", "31.42"]
    assert [cell.text for cell in rows[1]] == ["b", "70.0%", "–"]
    assert rows[1][2].hover == "not measured"


def test_small_n_and_missing_values_are_said() -> None:
    measures = (
        share("satisfied", [True, False, True]),
        mean("length", [3.0, 4.0], unit="tokens").measure(),
        Measure("self-BLEU", None, 40, note="every prompt has one text"),
    )
    report = Report("x", systems=(System("base", measures=measures),))
    row = headline_table(report).rows[0]
    assert [cell.badge for cell in row] == ["", "n too small", "n too small", ""]
    assert (row[3].text, row[3].detail) == ("–", "not defined")
    for text in (Page(render_page(report)).said, render_markdown(report)):
        assert text.count("n too small") >= 3
        assert "length (base): n too small for a bootstrap interval: 2 of the 20 texts it needs" in text
        assert "self-BLEU (base): every prompt has one text" in text


def test_a_bin_without_interval_and_a_point_without_neighbours_are_drawn() -> None:
    bins = (Bin("0–1", 1, 0.3, 1.0, None, None),)
    report = Report(
        "x",
        calibration=(Calibration("guided", bins, "one bin", positions=bins, prompts=bins),),
        consistency=consistency_chart(Curve("guided", (Point(1.0, 0.25),))),
        training=(Chart("Loss", "step", "loss", (Curve("training", (Point(1.0, 0.7),)),)),),
    )
    page = render_page(report)
    assert "nan" not in page.lower().replace("nando", "")
    assert 'class="mark s0 hollow"' in page


# --- nothing escapes ----------------------------------------------------------------------------------

EVIL = [
    "<script>document.body.dataset.hacked = 1</script>",
    '"\'><img src=x onerror="document.body.dataset.hacked = 1">',
    "</style></title></script><b onmouseover=alert(1)>&amp;",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "a | b * c _ d ` e # f [g](h)\n- i\n\n| j |",
    "👩‍👩‍👧‍👦 emoji é\u0301",
    "עברית ثم نص عربي",
    "\u202e\u2066 turned round \x00\x07\x1b[31m",
    "x" * 10_000,
    "]]><!-- --><svg onload=alert(1)>",
]


def evil_report(evil: str) -> Report:
    """The same words at every place where a report has words."""
    measure = Measure(evil, 0.5, 40, 0.4, 0.6, 40, evil, evil, evil)
    shares = replace(measure, unit="share")
    bins = (Bin(evil, 40, 0.5, 0.5, 0.4, 0.6),)
    curves = (Curve(evil, (Point(0.0, 1.0), Point(1.0, 2.0))), Curve(evil + "2", (Point(0.0, 1.0),)))
    chart = Chart(evil, evil, evil, curves, evil, (evil, evil))
    token = TokenTrace(evil, -1.0, None, -1.0, evil, -0.5)
    text = ExampleText(evil, evil, True, False, (token,), True, -1.0)
    return Report(
        evil,
        evil,
        (Fact(evil, evil),),
        (System(evil, evil, (measure,), (measure,)),),
        (),
        (Pair(evil, evil, compare_shares(evil, [True] * 30, [False] * 30)),),
        (chart,),
        rates=(Rate(evil, 0.5, shares),),
        calibration=(Calibration(evil, bins, evil, shares, shares, bins, bins),),
        consistency=chart,
        examples=Examples(evil, (Example(evil, evil + "c", (text, ExampleText("plain", evil))),)),
        notes=(evil,),
        versions=(Fact(evil, evil),),
    )


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_no_word_of_a_report_becomes_markup(evil: str) -> None:
    page, harmless = Page(render_page(evil_report(evil))), Page(render_page(evil_report("harmless")))
    if "\n" not in evil:  # line ends are shown by a mark of their own
        assert [tag for tag, _ in page.elements] == [tag for tag, _ in harmless.elements]
    assert page.scripts == harmless.scripts
    for tag, attributes in page.elements:
        assert tag != "img"
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#x").startswith(("#", "data:,"))
        assert "src" not in attributes
    words = re.findall(r"\w{3,}", evil) or ["a | b"]
    assert words[0][:60] in page.said  # it is shown, not dropped


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_no_word_of_a_report_becomes_markdown_or_html_in_markdown(evil: str) -> None:
    text, harmless = render_markdown(evil_report(evil)), render_markdown(evil_report("harmless"))
    assert re.findall(r"<[a-z/!]", text, re.I) == []

    def structure(markdown: str) -> list[tuple[str, int]]:
        bars = re.compile(r"(?<!\\)\|")
        return [
            (line[:1] if line[:1] in "#>|-" else "", len(bars.findall(line)))
            for line in markdown.splitlines()
        ]

    assert structure(text) == structure(harmless)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_token_of_ten_thousand_characters_is_cut_and_says_so() -> None:
    page = render_page(evil_report("x" * 10_000))
    assert "(9,940 more characters)" in page
    token = re.search(r'<span class="t[^>]*title="([^"]*)"', page)
    assert token is not None
    assert len(token[1]) < 500


def test_lone_surrogates_do_not_stop_a_page(tmp_path: Path) -> None:
    text = ExampleText("base", "a\ud800b", tokens=(TokenTrace("a\ud800b", -1.0, -1.0),))
    page = render_page(Report("x", examples=Examples("all", (Example("p", "p", (text,)),))))
    assert "a\ufffdb" in page
    page.encode("utf-8")


def test_the_page_refers_to_nothing_outside_itself(report: Report) -> None:
    page = render_page(report)
    assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", page) == []
    assert "@import" not in page
    assert "url(" not in page
    elements = Page(page).elements
    policy = next(each["content"] for tag, each in elements if each.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "script-src 'unsafe-inline'" not in policy


def test_colours_are_not_the_only_sign() -> None:
    """Raised and lowered differ in the kind of underline as well, series in dashes and markers."""
    style = (Path(__file__).parent.parent / "src/nado/report/templates/style.css").read_text(encoding="utf-8")
    assert re.search(r"\.u2, \.u3, \.u4 \{ text-decoration: underline solid", style)
    assert re.search(r"\.d2, \.d3, \.d4 \{ text-decoration: underline dotted", style)
    assert len(re.findall(r"\.line\.s[1-5] \{ stroke-dasharray", style)) == 5


# --- adapters -----------------------------------------------------------------------------------------


def decode_bytes(rows: Any) -> list[str]:
    return [bytes(row).decode("utf-8", errors="replace") for row in rows]


@pytest.mark.parametrize("text", ["", "plain", "é", "a👩‍👧b", "שלום\n", "x\x00y"])
def test_a_text_is_cut_into_the_pieces_of_its_tokens(text: str) -> None:
    tokens = list(text.encode())
    pieces = cut_text(decode_bytes, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text
    if text == "é":
        assert pieces == ["", "é"]  # the character belongs to the token that completes it


def test_a_text_that_ends_within_a_character_is_cut_too() -> None:
    pieces = cut_text(decode_bytes, list("é".encode())[:1])
    assert pieces == ["\ufffd"]


def test_an_example_holds_what_the_trace_says(study: Study) -> None:
    base, written = study.reader.model, study.written["trained guide"]
    guided = GuidedLanguageModel(base, study.guide)
    rows = [0, 57, 200]
    tokens = [written.tokens[row] for row in rows]
    prompts, conditions = [[getattr(written.prompts[r], n) for r in rows] for n in ("prompt", "condition")]
    trace, lengths = trace_tokens(guided, prompts, tokens, conditions)
    assert lengths.tolist() == [len(row) for row in tokens]
    found = trace_texts(guided, "guided", prompts, tokens, conditions)
    for row, text in enumerate(found):
        assert text.text == written.texts[rows[row]]
        assert len(text.tokens) == len(tokens[row])
        assert text.log_r_start == pytest.approx(float(trace.log_s[row, 0]), abs=1e-5)
        for place, token in enumerate(text.tokens):
            assert token.log_p == pytest.approx(float(trace.log_p[row, place]), abs=1e-5)
            assert token.log_q == pytest.approx(float(trace.log_q[row, place]), abs=1e-5)
            assert token.log_r == pytest.approx(float(trace.log_factor[row, place]), abs=1e-5)
            choice = int(trace.base_choice[row, place])
            expected = "⟨end⟩" if choice == base.eos_id else base.decode([[choice]])[0]
            assert token.base_choice == expected
            assert token.ends == (tokens[row][place] == base.eos_id)
    # log q of the text is what it was drawn with.
    total = sum(token.log_q or 0.0 for token in found[1].tokens)
    assert total == pytest.approx(float(written.log_q[57]), abs=1e-3)


def test_r_is_what_it_is_at_another_strength_and_is_not_shown_at_a_soft_rate_or_in_doubt(
    study: Study,
) -> None:
    base, written = study.reader.model, study.written["base"]
    arguments = (["the dog"], [written.tokens[0]], ["ball"])
    models = [
        GuidedLanguageModel(base, study.guide, guidance=guidance)
        for guidance in (Guidance(), Guidance(strength=2.0), Guidance(target_rate=0.5), Guidance(doubt=0.1))
    ]
    plain, strong, soft, doubted = (trace_texts(model, "guided", *arguments)[0] for model in models)
    assert [token.log_r for token in plain.tokens] == pytest.approx(
        [token.log_r for token in strong.tokens], abs=1e-4
    )
    assert (plain.has_r, strong.has_r, soft.has_r, doubted.has_r) == (True, True, False, False)
    assert plain.log_r_start is not None
    assert strong.log_r_start is soft.log_r_start is None
    assert "--a:" not in show_text(soft)
    assert "R " not in describe_token(soft.tokens[0], has_r=soft.has_r)


def made_trace(**columns: list[float]) -> Trace:
    zeros = [0.0] * len(next(iter(columns.values())))
    names = ("log_q", "log_p", "log_factor", "log_s", "base_choice", "log_p_base_choice")
    return Trace(*(torch.tensor([columns.get(name, zeros)]) for name in names))


def test_a_chance_of_nothing_is_kept_and_said() -> None:
    trace = made_trace(log_p=[-1.0, -2.0], log_q=[-math.inf, -2.0], log_factor=[-math.inf, -0.5])
    text = text_from_trace(trace, 0, ["no", " way"], ["yes", "way"], system="base")
    assert text.tokens[0].log_q is None
    assert text.tokens[0].log_r is None
    assert level(text.tokens[0]) == -4
    said = "“no” lowered ×0: base 36.8% → guided 0% · R 0% · base alone: “yes” 100.0%"
    assert describe_token(text.tokens[0], has_r=True) == said
    assert Report.from_json(Report("x", examples=Examples("", (Example("", "", (text,)),))).to_json())


def test_a_trace_that_is_no_number_is_refused() -> None:
    trace = made_trace(log_p=[math.nan])
    with pytest.raises(InputError, match="expected logs of probabilities in a trace; found nan"):
        text_from_trace(trace, 0, ["a"], ["b"], system="base")


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.0, 0), (1.2, 0), (1.3, 1), (2.1, 2), (5.1, 3), (21, 4), (0.9, 0), (0.79, -1), (0.49, -2), (0.04, -4)],
)
def test_tokens_are_marked_by_how_far_they_were_moved(factor: float, expected: int) -> None:
    token = TokenTrace("a", -5.0, -5.0 + math.log(factor))
    assert level(token) == expected
    shown = show_text(ExampleText("s", "a", tokens=(token,)))
    mark = f"u{expected}" if expected > 0 else f"d{-expected}"
    assert (f'class="t {mark}"' in shown) == (expected != 0)


def test_the_curve_runs_from_r_of_the_prompt_to_r_of_the_text() -> None:
    tokens = tuple(TokenTrace(f" {k}", -1.0, -1.0, math.log(k / 4)) for k in (2, 3, 4))
    text = ExampleText("s", " 2 3 4", tokens=tokens, has_r=True, log_r_start=math.log(0.25))
    heights = re.findall(r"--a:([\d.]+);--b:([\d.]+)", show_text(text))
    assert heights == [("0.25", "0.5"), ("0.5", "0.75"), ("0.75", "1")]


def test_rows_are_chosen_by_a_seed_alone() -> None:
    rows, how = choose_rows(480)
    assert rows == choose_rows(480)[0] != choose_rows(480, seed=1)[0]
    assert len(set(rows)) == 20
    assert rows == sorted(rows)
    assert how == "20 of 480, chosen by seed 0; none replaced"
    assert choose_rows(3) == ([0, 1, 2], "all 3 that were written")
    with pytest.raises(InputError, match="found 20 of 0"):
        choose_rows(0)


def test_pairs_need_as_many_texts_as_prompts() -> None:
    with pytest.raises(InputError, match="2 prompts and 1"):
        pair_examples(["a", "b"], ["a", "b"], [ExampleText("base", "x")])


def test_consistency_is_what_a_loop_finds(study: Study) -> None:
    written = study.written["base"]
    guided = GuidedLanguageModel(study.reader.model, study.guide)
    prompts = [each.prompt for each in written.prompts]
    trace, lengths = trace_tokens(
        guided, prompts, written.tokens, [each.condition for each in written.prompts]
    )
    curve = consistency_curve("base", trace, lengths)
    for point in curve.points:
        i = int(point.x)
        gaps = [
            abs(math.exp(trace.log_s[row, i]) - math.exp(trace.log_factor[row, i - 1]))
            for row in range(len(prompts))
            if lengths[row] > i
        ]
        assert point.n == len(gaps)
        assert point.y == pytest.approx(np.mean(gaps), abs=1e-6)
    assert len(curve.points) == LIMIT - 1
    with pytest.raises(
        InputError, match="expected a trace in which R itself was multiplied in; found strength 2"
    ):
        consistency_curve("base", trace, lengths, Guidance(strength=2.0))


def test_texts_of_one_token_have_no_consistency() -> None:
    assert consistency_curve("x", made_trace(log_s=[0.0, 0.0]), [1]) == Curve("x", ())


def test_training_curves_are_the_history_in_groups(study: Study) -> None:
    charts = {chart.title: chart for chart in training_charts(study.training)}
    history = study.training.history
    assert set(charts) == {
        "Loss",
        "Calibration error while training",
        "Consistency while training",
        "Guided text while training: satisfied",
    }
    loss, held_out = charts["Loss"].curves
    assert len(loss.points) == 120
    assert loss.points[0].y == pytest.approx((history[0]["loss"] + history[1]["loss"]) / 2, rel=1e-5)
    assert loss.points[0].x == 1.5
    assert charts["Loss"].note == "Each point is the mean of up to 2 steps."
    assert [point.x for point in held_out.points] == [40, 80, 120, 160, 200, 240]
    assert held_out.points[-1].y == pytest.approx(history[-1]["held_out_loss"], rel=1e-5)
    both = training_charts({"a": study.training, "b": study.training})
    assert [curve.name for curve in both[0].curves] == [
        *("a · training", "a · held out"),
        *("b · training", "b · held out"),
    ]


def test_a_calibration_table_becomes_bins(study: Study) -> None:
    objective = Objective(study.guide, study.reader, study.training.config)
    table = calibration_table(objective, study.held_out)
    found = calibration_from_table("guided", table)
    assert [each.rate for each in found.bins] == [row["observed"] for row in table["bins"]]
    assert [each.predicted for each in found.prompts] == [row["r_start"] for row in table["prompts"]]
    assert found.positions[0].name == "0"
    assert found.positions[2].name == "2–3"
    assert found.ece is not None
    assert found.ece.value == table["calibration_error"]
    page = render_page(Report("x", calibration=(found,)))
    assert "the dog · ball" in page
    assert "R(x) by prompt" in page


def test_weights_keep_every_text(study: Study, report: Report) -> None:
    weights = report.systems[2].weights
    assert weights is not None
    assert weights.histogram is not None
    assert sum(weights.histogram.counts) + weights.histogram.zeros == 40 * len(PROMPTS)
    assert [measure.name for measure in weights.measures][:2] == ["ESS", "mean weight"]
    summary = summarise_weights(np.log(np.array([1.0, 2.0, 0.5])), warn=False)
    ess, average, largest = weights_from_summary(summary).measures
    assert ess.value == pytest.approx(3.5**2 / 5.25)
    assert (average.value, largest.value) == pytest.approx((3.5 / 3, 2.0))


def test_weights_that_are_all_zero_have_no_histogram(study: Study) -> None:
    guided = GuidedLanguageModel(study.reader.model, study.guide)
    weighted = draw_weighted(guided, ["the dog"], ["elephant"], ORACLE, count=32)
    weights = weights_from_texts(weighted)
    assert weights.histogram is None
    system = System("guided", weights=weights)
    text = render_markdown(Report("x", systems=(system,)))
    assert "no text satisfies" in text


def test_cost_is_tokens_over_satisfying_texts() -> None:
    found = {each.name: each for each in cost_from_texts([True, False, True], [4, 5, 6], seconds=3.0)}
    assert found["base tokens"].value == 15
    assert found["base tokens a satisfying text"].value == 7.5
    assert found["seconds a satisfying text"].value == 1.5
    none = {each.name: each for each in cost_from_texts([False], [4], seconds=3.0)}
    assert none["seconds a satisfying text"].value is None
    assert none["seconds a satisfying text"].note == "no text satisfies"


def test_an_evaluation_becomes_a_report() -> None:
    satisfied = share("satisfied", [True] * 30 + [False] * 10)
    row = {
        "system": "trained guide",
        "guidance": {"strength": 2.0, "target_rate": 1.0},
        "exact_end": True,
        "texts": 40,
        "base_tokens": 600,
        "seconds": 3.0,
        "measures": {"satisfied": satisfied.describe(), "length": length(["a b"] * 40).measure().describe()},
    }
    evaluation = {
        "base": "tiny",
        "oracle": "keywords",
        "length_limit": 32,
        "completion": "eos",
        "prompts": 40,
        "prompts_seen_in_training": False,
        "texts_per_prompt": 1,
        "search": "sample",
        "systems": [row],
        "versions": {"nado": "0"},
    }
    report = report_from_evaluation(evaluation, notes=("a note",))
    assert report.title == "keywords on tiny"
    (system,) = report.systems
    assert (system.name, system.detail) == ("trained guide, exact end", "strength 2")
    assert system.measures[0] == satisfied
    assert {each.name: each.value for each in system.cost}["base tokens a satisfying text"] == 20
    assert Fact("prompts", "40, held out") in report.facts
    assert "75.0% [59.8, 85.8]" in render_markdown(report)


# --- numbers and axes ---------------------------------------------------------------------------------


def test_numbers_have_the_digits_that_mean_something() -> None:
    assert style_of([0.5, 0.25], "share").write(0.4567) == "45.7%"
    assert style_of([31.4159]).write(31.4159) == "31.42"
    assert style_of([0.04]).write(0.04) == "0.0400"
    assert style_of([123.45]).write(123.45) == "123.5"
    assert style_of([12345.6]).write(12345.6) == "12,346"
    assert style_of([5.0, 7.0]).write(5.0) == "5"
    assert style_of([1.234e-7]).write(1.234e-7) == "1.23e−07"
    assert style_of([-1.5, 2.25]).write(-1.5) == "−1.50"
    assert style_of([1.0, -0.001, 1.5]).write(-0.001) == "0.00"
    assert style_of([]).write(0.0) == "0"
    assert style_of_measures([None]).write(3.0) == "3"
    assert [write_p_value(value) for value in (0.0001, 0.04, None)] == ["< 0.001", "0.040", "–"]
    assert [write_chance(value) for value in (0.0, math.log(0.25), -10.0, None)] == [
        "100.0%",
        "25.0%",
        "5e−5",
        "0%",
    ]
    assert [write_factor(value) for value in (0.0, math.log(3), -math.inf, 20.0)] == [
        "×1",
        "×3",
        "×0",
        "×5e+08",
    ]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.0, 0.0371), (-3.2, 4.7), (5.0, 5.0), (0.0, 3e-17), (0.0, 0.0), (0.0, 48213.0)],
)
def test_ticks_are_few_round_numbers_inside_the_range(low: float, high: float) -> None:
    start, end = span([low, high])
    assert start < end
    found = ticks(start, end)
    assert 2 <= len(found) <= 8
    slack = 1e-6 * (end - start)
    assert start - slack <= found[0]
    assert found[-1] <= end + slack
    step = found[1] - found[0]
    assert f"{step:.0e}"[0] in "125"
    wide = widen(start, end)
    inside = ticks(*wide, 5)
    assert wide[0] <= start
    assert wide[1] >= end
    assert (inside[0], inside[-1]) == pytest.approx(wide, abs=slack)


# --- in a real browser --------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
    # The browser's own calls go nowhere; what a page asks of this machine would be heard.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--enable-logging=stderr",
]


def browse(page: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """What the browser prints, and the console messages of the page."""
    assert BROWSER is not None
    profile = folder / f"profile-{len(list(folder.iterdir()))}"
    found = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
        env={**os.environ, "HOME": str(folder)},
        check=True,
    )
    return found.stdout, [line for line in found.stderr.splitlines() if "CONSOLE" in line]


@in_browser
def test_a_browser_shows_the_page_without_a_complaint(report: Report, tmp_path: Path) -> None:
    page = write_report(report, tmp_path / "report")
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert console == []
    tokens = sum(len(text.tokens) for example in report.examples.examples for text in example.texts)
    assert dom.count("data-tip=") == tokens  # the script ran


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_fits_the_page_into_its_window(
    report: Report, tmp_path: Path, width: int, scheme: str
) -> None:
    """At the width of a desk and of a phone nothing sticks out, and the paper is light or dark as asked."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render_page(report))
    # A window has a least width of its own, a frame has not.
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{escape(html)}"></iframe>'
    probe = (
        "<script>onload = () => { const page = frames[0].document; document.body.dataset.probe = ["
        "page.documentElement.scrollWidth, frames[0].innerWidth, page.querySelectorAll('[data-tip]').length,"
        "frames[0].getComputedStyle(page.body).backgroundColor].join(';') }</script>"
    )
    page = tmp_path / "probed.html"
    page.write_text(f"<!doctype html><body style='margin:0'>{frame}{probe}", encoding="utf-8")
    size = f"--window-size={width},900"
    colours = f"--blink-settings=preferredColorScheme={'0' if scheme == 'dark' else '1'}"
    dom, _ = browse(page, tmp_path, size, colours, "--dump-dom")
    found = re.search(r'data-probe="(\d+);(\d+);(\d+);rgb\((\d+)', dom)
    assert found is not None
    assert int(found[1]) == int(found[2]) == width
    assert int(found[3]) > 300
    assert (int(found[4]) < 64) == (scheme == "dark")
    picture = tmp_path / "page.png"
    browse(write_report(report, tmp_path / "report"), tmp_path, size, colours, f"--screenshot={picture}")
    assert picture.read_bytes()[16:20] == width.to_bytes(4, "big")  # a PNG says its width there
    assert picture.stat().st_size > 10_000


class Listener:
    """A port of this machine that counts who calls."""

    def __enter__(self) -> "Listener":
        import socket
        import threading

        self.calls = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._count, daemon=True).start()
        return self

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.calls += 1
            connection.close()

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@in_browser
def test_no_request_leaves_even_a_page_that_markup_was_put_into(tmp_path: Path) -> None:
    with Listener() as listener:
        call = f'<img src="http://127.0.0.1:{listener.port}/a">'
        run = "<script>document.body.dataset.hacked = 1</script>"
        control = tmp_path / "control.html"
        control.write_text(f"<!doctype html><body>{call}{run}", encoding="utf-8")
        dom, _ = browse(control, tmp_path, "--dump-dom")
        assert listener.calls > 0
        assert "data-hacked" in dom
        listener.calls = 0
        page = write_report(evil_report(call + run), tmp_path / "report")
        dom, console = browse(page, tmp_path, "--dump-dom")
        assert (listener.calls, console) == (0, [])
        assert "data-hacked" not in dom
        # Were something not escaped, the page's policy would still stop it.
        torn = page.with_name("torn.html")
        torn.write_text(
            page.read_text(encoding="utf-8").replace("<body>", f"<body>{call}{run}"), encoding="utf-8"
        )
        dom, console = browse(torn, tmp_path, "--dump-dom")
        assert listener.calls == 0
        assert "data-hacked" not in dom
        assert len(console) >= 2
