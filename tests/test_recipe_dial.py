"""The dial: its parts, and all of it on the embedded model with a guide that hardly learns anything."""

import gzip
import json
import math
import pickle
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nado import dial
from nado.dial import Dial, Stop
from nado.errors import InputError
from nado.metrics import share
from nado.oracles import ForbiddenWords, Keywords, Sentiment
from nado.oracles.linear_classifier import LinearClassifier
from nado.samples import read_samples
from nado.storage import read_json, write_json
from nado.training_data import split_by_prompt

RECIPE = Path(__file__).parents[1] / "recipes" / "dial"
sys.path.insert(0, str(RECIPE))

import dial_page  # noqa: E402
import prepare_dial  # noqa: E402
import run_dial  # noqa: E402
from dial_curve import chance_of_one, compare_start, least_kl  # noqa: E402
from dial_data import OPENINGS, read_openings  # noqa: E402
from dial_settings import RATES, read_dial_settings  # noqa: E402
from gauges import Gauged, Reaches, SentimentGauge, ToxicityGauge, compose  # noqa: E402
from side_work import Workers  # noqa: E402

SETTINGS = """
[base]
length_limit = 8
[draw]
prompts = 16
samples = 12
batch = 96
chunk = 192
held_out = 0.2
[guide]
title = "a guide of one layer"
size = 32
layers = 1
heads = 2
learning_rate = 1e-2
batch = 32
steps = 30
[curve]
rates = [0.0, 0.5, 1.0]
prompts = 16
texts = 4
base_texts = 4
batch = 64
[dial]
strengths = [-2, 2]
rates = [0.1, 0.5, 1.0]
prompts = 8
texts = 8
[[formulas]]
formula = "positive & clean"
stops = true
[[formulas]]
formula = "~positive"
"""
DIALS = 3 * (3 + 1 + 3)  # of each question and of a formula: stops, the dial of them, a point at each rate
MOVIES = ["film", "story", "cast", "plot", "music", "ending", "dialogue", "scene", "actor", "script"]
KINDS = ["good", "bad", "long", "fine", "slow", "dull", "clever", "funny", "poor", "new"]
RUDE = ["stupid", "idiot", "damn", "moron"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpora's own formats, with few words."""
    folder, chooser = tmp_path_factory.mktemp("raw"), random.Random(0)
    reviews = [
        {"label": "pos", "text": f"the {kind} {thing} of the year is here and we like it ."}
        for thing in MOVIES
        for kind in KINDS
    ]
    pairs = [
        {
            "toxic": f"you {chooser.choice(RUDE)} , the {thing} is {kind}",
            "neutral": [f"friend , the {thing} is {kind}"],
        }
        for thing in MOVIES
        for kind in KINDS
    ]
    prompts = [
        {"prompt": {"text": f"He said that the {thing} was {kind}"}} for thing in MOVIES for kind in KINDS
    ]
    write(folder / "ccby_reviews" / "sentence_polarity.jsonl", reviews)
    write(folder / "ccby_reviews" / "product_review_sentences.jsonl", reviews[:3])
    write(folder / "paradetox" / "paradetox.jsonl", pairs)
    write(folder / "real_toxicity_prompts" / "val5000.jsonl.gz", prompts)
    return folder


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(each) + "\n" for each in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(scope="module")
def place(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dial")
    words = ["--data", str(data), "--output", str(folder / "prepared"), "--train", "30", "--test", "20"]
    assert prepare_dial.main(words) == 0
    # A classifier that asks for a common word: the embedded model is too well-behaved for the real one.
    vocabulary = ["the", "to", "in", "was"]
    weights = np.array([6.0, 6.0, -6.0, -6.0], dtype=np.float32)
    LinearClassifier(vocabulary, np.ones(4, np.float32), weights, -1.0).save(folder / "prepared" / "toxicity")
    (folder / "small.toml").write_text(SETTINGS, encoding="utf-8")
    return folder


def arguments(place: Path, *more: str) -> list[str]:
    paths = {"settings": "small.toml", "prepared": "prepared", "work": "work", "output": "out"}
    return [*(word for name, path in paths.items() for word in (f"--{name}", str(place / path))), *more]


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    assert run_dial.main(arguments(place)) == 0
    return place


def metrics(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(place / "out" / "dial-small.json")["metrics"]
    return found


def texts_at(place: Path, formula: str, rate: str, how: str = "curve") -> list[dict[str, Any]]:
    packed = (place / "work" / how / formula / rate / "texts.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]


# --- all of it ----------------------------------------------------------------------------------------


def test_every_rate_of_every_question_is_measured(finished: Path) -> None:
    curves = metrics(finished)["curves"]
    assert list(curves) == ["positive", "clean", "positive & clean", "~positive"]
    for name, curve in curves.items():
        asked = [each["asked"] for each in curve["points"]]
        assert asked == ([0.0, 0.5, 1.0] if name in ("positive", "clean") else [1.0])
        for each in curve["points"]:
            assert each["got"]["low"] - 1e-9 <= each["got"]["value"] <= each["got"]["high"] + 1e-9
            assert each["perplexity"]["value"] > 1
            assert each["texts"] == 64


def test_the_rates_are_those_of_the_oracle_on_what_follows_the_prompt(finished: Path) -> None:
    rows = texts_at(finished, "positive", "0.5")
    answers = Sentiment("positive")([""] * len(rows), [each["text"] for each in rows])
    assert answers.tolist() == [each["satisfied"] for each in rows]
    point = metrics(finished)["curves"]["positive"]["points"][1]
    found = share("rate", answers, [each["prompt"] for each in rows])
    assert point["got"] == {"value": found.value, "low": found.low, "high": found.high}


@pytest.mark.parametrize(("rate", "wanted"), [("1", True), ("0", False)])
def test_chosen_by_weight_a_text_is_as_asked_wherever_there_is_one(
    finished: Path, rate: str, wanted: bool
) -> None:
    rows = texts_at(finished, "clean", rate)
    right = np.array([each["satisfied"] == wanted for each in rows]).reshape(-1, 4)
    weights = np.array([each["log_weight"] is not None for each in rows]).reshape(-1, 4)
    assert (weights == right).all()  # what is not asked for weighs nothing
    points = metrics(finished)["curves"]["clean"]["points"]
    point = next(each for each in points if f"{each['asked']:g}" == rate)
    hits = float(right.any(axis=1).mean())
    assert point["corrected"]["value"] == pytest.approx(hits if wanted else 1 - hits)


def test_a_rate_is_also_a_mixture_of_the_two_ends(finished: Path) -> None:
    curve = metrics(finished)["curves"]["clean"]
    none, _, all_ = curve["points"]
    for each in curve["mixed"]:
        for name in ("got", "corrected"):
            ends = (none[name]["value"], all_[name]["value"])
            assert each[name]["value"] == pytest.approx(
                (1 - each["asked"]) * ends[0] + each["asked"] * ends[1]
            )
    errors = [abs(each["corrected"]["value"] - each["asked"]) for each in curve["mixed"]]
    assert curve["largest_error_mixed"]["corrected"] == pytest.approx(max(errors))
    verified = curve["p_verified"]  # all four of p's texts are asked about: has one of them the answer?
    samples = read_samples(finished / "work" / "base" / "clean" / "p")
    answers = samples.array("satisfied").reshape(-1, 4)
    assert verified["rate_1"] == pytest.approx(answers.any(axis=1).mean())
    assert verified["rate_0"] == pytest.approx(answers.all(axis=1).mean())
    assert chance_of_one(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert "mixed" not in metrics(finished)["curves"]["positive & clean"]


@pytest.mark.parametrize("formula", ["clean", "positive & clean"])
def test_stops_are_measured_on_prompts_the_guide_has_not_seen_and_turned_on_the_tests(
    finished: Path, formula: str
) -> None:
    curve = metrics(finished)["curves"][formula]
    dial = Dial.read(curve["dial"])
    assert [each.strength for each in dial.measured] == [-2, 0, 2]
    assert (dial.prompts, dial.texts) == (8, 64)
    assert [each["asked"] for each in curve["turned"]] == [0.1, 0.5, 1.0]
    for each in curve["turned"]:
        assert each["expected"] == pytest.approx(dial.at(each["asked"]).rate)
        assert sum(each["stops"].values()) == pytest.approx(1)
        rows = texts_at(
            finished, formula.replace("&", "and").replace(" ", "_"), f"{each['asked']:g}", "turned"
        )
        assert each["got"]["value"] == pytest.approx(np.mean([row["satisfied"] for row in rows]))
        assert each["kl"]["value"] > -0.2
    assert curve["largest_error_turned"] == max(
        abs(each["got"]["value"] - each["asked"]) for each in curve["turned"]
    )
    text = (finished / "out" / "results.md").read_text(encoding="utf-8")
    assert text.count("By a dial of measured stops") == 3
    assert "**`positive & clean`**. By a dial of measured stops" in text
    assert "turned" not in metrics(finished)["curves"]["~positive"]


@pytest.mark.parametrize("prompts", [0, 8, 1000])
def test_stops_take_held_out_prompts_first_and_then_such_that_nothing_was_drawn_for(
    finished: Path, prompts: int
) -> None:
    """Fourteen of thirty training prompts of a kind were not drawn for."""
    text = SETTINGS.replace("prompts = 8\n", f"prompts = {prompts}\n")
    (finished / "more.toml").write_text(text, encoding="utf-8")
    options = run_dial._parse([*arguments(finished), "--settings", str(finished / "more.toml")])
    with Workers(0) as workers:
        run = run_dial.DialRun(options, workers)
        run.draw()
        found = run.unseen_prompts("clean")
        learned = set(split_by_prompt(run.samples("clean"), 0.2, 0)[0].strings("prompt"))
    assert len(set(found)) == len(found)
    assert not set(found) & learned
    drawn = {each.prompt for each in run.training_prompts()}
    held_out = sum(each in drawn for each in found)
    assert held_out > 0
    assert not set(found[held_out:]) & drawn
    assert len(found) == min(max(prompts, held_out), held_out + 14)


@pytest.mark.parametrize("way", ["points", "turned"])
def test_asking_for_more_gives_more(finished: Path, way: str) -> None:
    """Of the question that a few steps are enough to learn; seen as soft rates: 0.23, 0.51, 0.93."""
    none, half, all_ = (each["got"]["value"] for each in metrics(finished)["curves"]["clean"][way])
    assert none + 0.1 < half < all_ - 0.1


def test_both_guides_learn_from_the_same_texts_of_the_same_prompts(finished: Path) -> None:
    one, other = (
        read_samples(finished / "work" / f"samples-{name}" / "chunk-000") for name in ("positive", "clean")
    )
    assert one.strings("text") == other.strings("text")
    assert one.array("satisfied").tolist() != other.array("satisfied").tolist()
    prompts = set(one.strings("prompt")) | set(
        read_samples(finished / "work" / "samples-positive" / "chunk-001").strings("prompt")
    )
    assert len(prompts) == 32  # sixteen of each kind
    tested = {each.prompt for each in read_openings(finished / "prepared" / "openings.jsonl")[:20]}
    assert not prompts & tested
    audits = [each["audit"] for each in metrics(finished)["guides"].values()]
    assert all(each["texts"] > 100 for each in audits)


def test_a_second_call_does_nothing_again_and_a_deadline_leaves_points(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = metrics(finished)["curves"]
    for name in ("measure_point", "train_guide", "prepare", "open_guide", "split_by_prompt"):
        monkeypatch.setattr(run_dial, name, None)
    assert run_dial.main(arguments(finished)) == 0
    assert capsys.readouterr().out.count("done before") == 2 + 2 + 2 + 4 + 3 + 3 + 1 + 1 + DIALS
    assert metrics(finished)["curves"] == before
    text = (finished / "small.toml").read_text(encoding="utf-8").replace("0.5, 1.0]", "0.5, 0.9, 1.0]")
    (finished / "small.toml").write_text(text, encoding="utf-8")
    words = arguments(finished, "--deadline", "1e-3")
    words[words.index("--output") + 1] = str(finished / "late")
    words[words.index("--work") + 1] = str(finished / "late-work")
    (finished / "late-work").mkdir()
    for name in (f"{what}-{of}" for what in ("samples", "guide", "audit") for of in ("positive", "clean")):
        (finished / "late-work" / name).symlink_to(finished / "work" / name)
    assert run_dial.main(words) == 0
    (finished / "small.toml").write_text(SETTINGS, encoding="utf-8")
    assert "left for the next call: 35 points" in capsys.readouterr().out


def test_one_more_strength_is_one_more_stop(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but that stop, and the rates that a new dial is turned to, is there already."""
    shutil.copytree(finished / "work", tmp_path / "work")
    text = SETTINGS.replace("strengths = [-2, 2]", "strengths = [-2, 2, 3]")
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    measured: list[float] = []

    def measure_stop(model: Any, strength: float, **how: Any) -> Stop:
        measured.append(strength)
        return dial.measure_stop(model, strength, **how)

    monkeypatch.setattr(run_dial, "measure_stop", measure_stop)
    for name in ("measure_point", "train_guide", "prepare"):
        monkeypatch.setattr(run_dial, name, None)
    words = [*arguments(tmp_path), "--prepared", str(finished / "prepared")]
    assert run_dial.main(words) == 0
    assert measured == [3.0] * 3  # of each question and of a formula
    before, after = (
        Dial.read(metrics(place)["curves"]["positive & clean"]["dial"]) for place in (finished, tmp_path)
    )
    assert [each.strength for each in after.measured] == [-2, 0, 2, 3]
    assert after.measured[:3] == before.measured


def test_the_readme_its_picture_and_the_record_are_made(finished: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((RECIPE / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    (other,) = (finished / "out").glob("dial-*.json")
    earlier = read_json(other)
    names = {"metrics": {"dial-earlier": metrics(finished)}}
    write_json(tmp_path / "dial.json", earlier | names | {"runs": [earlier | {"metrics": ["dial-earlier"]}]})
    words = [str(finished / "out"), "--readme", str(readme), "--record", "--results", str(tmp_path)]
    dial_page.main(words)
    once = readme.read_text(encoding="utf-8"), (tmp_path / "dial-small.svg").read_bytes()
    dial_page.main(words)
    assert once[0] == readme.read_text(encoding="utf-8")
    assert once[1].count(b"<path") > 50
    point = metrics(finished)["curves"]["clean"]["points"][2]
    assert f"| 1 | {point['got']['value']:.3f} [" in once[0]
    assert "`positive & clean`" in once[0]
    assert read_json(tmp_path / "dial.json")["metrics"]["dial-small"] == metrics(finished)
    # What was on record before is shown as well, whoever measured it.
    assert all(f"### dial-{name}\n" in once[0] for name in ("earlier", "small"))
    assert (tmp_path / "dial-earlier.svg").read_bytes().count(b"<path") > 50
    dial_page.main(words[1:3] + words[-2:])  # and without a run: the pages of what is on record
    assert once[0] == readme.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="none in"):
        dial_page.main([str(tmp_path / "nothing")])


def test_one_command_leads_from_data_to_the_tables(
    finished: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was prepared in the usual way before is not prepared again; here it is what others left there."""
    text = (finished / "out" / "results.md").read_text(encoding="utf-8")
    point = metrics(finished)["curves"]["clean"]["points"][2]
    assert f"| 1 | {point['got']['value']:.3f} [" in text
    assert "![asked for and got](dial-small.svg)" in text
    assert (finished / "out" / "dial-small.svg").is_file()
    words = arguments(finished)
    at = words.index("--prepared")
    words[at : at + 2] = ["--data", str(data)]
    (finished / "work" / "prepared").symlink_to(finished / "prepared")
    monkeypatch.setattr(prepare_dial, "prepare", None)
    assert run_dial.main(words) == 0
    assert capsys.readouterr().out.count("done before") == 2 + 2 + 2 + 4 + 3 + 3 + 1 + 1 + DIALS


# --- its parts ----------------------------------------------------------------------------------------


def test_gauges_are_read_at_their_steps_and_the_question_stays_what_it_is() -> None:
    classifier = LinearClassifier(["awful"], np.ones(1, np.float32), np.array([4.0], np.float32), -2.0)
    gauges = (SentimentGauge((-0.3, 0.05, 0.6)), ToxicityGauge(classifier, (0.5,)))
    texts = ["", "a good film", "an awful film", "a great, wonderful, excellent film"]
    question = Reaches(gauges[0], 0.05)
    assert question([""] * 4, texts).tolist() == Sentiment("positive", 0.05)([""] * 4, texts).tolist()
    oracle = pickle.loads(pickle.dumps(Gauged(question, gauges)))  # as worker processes get it
    assert oracle.fingerprint == Gauged(question, gauges).fingerprint
    bits, stops = oracle.read_prefixes([""] * 4, texts)
    assert [each.tolist() for each in bits] == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, False, True],
        [True, True, True, False],
    ]
    assert stops.tolist() == [False, True, False, True]
    assert oracle.progress_names("") == ["sentiment -0.3", "sentiment 0.05", "sentiment 0.6", "toxicity 0.5"]
    assert oracle.fingerprint != Gauged(question, gauges[:1]).fingerprint
    assert oracle.fingerprint != Gauged(~question, gauges).fingerprint
    assert oracle.fingerprint != Gauged(Reaches(gauges[1], 0.05), gauges).fingerprint
    bare = Gauged(question, ())
    assert [each.tolist() for each in bare.read_prefixes([""] * 4, texts)[0]] == [
        [False],
        [True],
        [False],
        [True],
    ]


def test_formulas_are_those_of_the_oracles() -> None:
    named = {"dog": Keywords("dog"), "cat": Keywords("cat"), "red": ForbiddenWords("red")}
    texts = ["a dog", "a cat", "a red dog and a cat", "nothing"]
    found = compose("(dog | cat) & ~(dog & cat) & red", named)([""] * 4, texts)
    assert found.tolist() == [True, True, False, False]
    for wrong in ("dog +", "dog & mouse", "dog + cat", "__import__('os')"):
        with pytest.raises(InputError, match=r"a formula of dog, cat, red with &, \| and ~"):
            compose(wrong, named)


def test_the_least_divergence_is_that_of_two_coins() -> None:
    rates = np.array([0.2, 0.5])
    assert least_kl(rates, 0.2) == pytest.approx((0 + _coins(0.2, 0.5)) / 2)
    assert least_kl(rates, 1.0) == pytest.approx((-math.log(0.2) - math.log(0.5)) / 2)
    assert least_kl(rates, 0.0) == pytest.approx((-math.log(0.8) - math.log(0.5)) / 2)


def _coins(r: float, p: float) -> float:
    return r * math.log(r / p) + (1 - r) * math.log((1 - r) / (1 - p))


def test_predicted_start_rates_are_compared_with_observed_ones() -> None:
    found = compare_start(np.array([0.25, 0.75]), np.array([0, 0, 0, 1, 1, 1, 1, 1], dtype=bool), 4)
    assert found["predicted"] == pytest.approx(0.5)
    assert found["observed"] == pytest.approx(0.625)


def test_prompts_are_prepared_apart_and_the_classifier_is_rated(data: Path, tmp_path: Path) -> None:
    words = ["--data", str(data), "--output", str(tmp_path), "--train", "40", "--test", "30"]
    assert prepare_dial.main(words) == 0
    found = read_openings(tmp_path / "openings.jsonl")
    for kind in ("review", "toxicity"):
        parts = [{each.prompt for each in found if (each.kind, each.split) == (kind, split)} for split in
                 ("train", "test")]  # fmt: skip
        assert len(parts[1]) == 30
        assert not parts[0] & parts[1]
    assert all(3 <= len(each.prompt.split()) <= 5 for each in found if each.kind == "review")
    about = read_json(tmp_path / "about.json")
    assert about["held_out_auc"] == 1.0
    assert about["held_out_by_threshold"]["0.5"] == {"toxic_found": 1.0, "neutral_passed": 1.0}


def test_missing_data_is_named_in_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare_dial.main(["--data", str(tmp_path), "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Get sentence_polarity and product_reviews of NLTK's corpora (CC BY 4.0), as .jsonl" in said
    assert prepare_dial.main(["--data", str(data), "--output", str(tmp_path), "--test", "5000"]) == 1
    assert "Get the whole corpus, or test on fewer." in capsys.readouterr().err
    words = ["--settings", str(RECIPE / "smollm2.toml"), "--work", str(tmp_path), "--output", str(tmp_path)]
    assert run_dial.main(words) == 1
    said = capsys.readouterr().err
    assert "expected --data or --prepared, because these settings ask about toxicity; found neither." in said
    assert run_dial.main([*words, "--data", str(tmp_path / "nothing")]) == 1
    assert "Get sentence_polarity and product_reviews" in capsys.readouterr().err


def test_openings_that_are_shipped_and_settings_are_read(tmp_path: Path) -> None:
    openings = read_openings(OPENINGS)
    assert len({each.prompt for each in openings}) == len(openings) == 1628
    assert {each.split for each in openings} == {"train", "test"}
    assert read_dial_settings(RECIPE / "embedded.toml").questions == ("positive",)
    full, small = (read_dial_settings(RECIPE / name) for name in ("smollm2.toml", "smollm2_small.toml"))
    assert full.dial.rates == small.dial.rates == RATES
    for each in (full, small):
        assert {0.0, 1.0} <= set(each.curve.rates) < set(RATES)  # both ends, which are mixed
    assert len(full.formulas) == 3
    assert small.half
    path = tmp_path / "wrong.toml"
    for text, found in (
        ("[draw]\nsample = 3\n", "found sample"),
        ('[base]\nquestions = ["positive"]\n[[formulas]]\nformula = "clean"\n', "found clean"),
        ('[base]\nquestions = ["polite"]\n', "found polite"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=found):
            read_dial_settings(path)
