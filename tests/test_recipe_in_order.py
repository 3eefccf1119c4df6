"""Keywords in order: its parts, and all of it on a CPU with a random base of two layers."""

import gzip
import json
import random
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from nado.errors import InputError
from nado.guided import GuidedModel
from nado.samples import read_samples
from nado.storage import read_json
from small_models import EOS, save

RECIPE = Path(__file__).parents[1] / "recipes" / "keywords_in_order"
sys.path.insert(0, str(RECIPE))

import in_order_page  # noqa: E402
import prepare_keys  # noqa: E402
import run_in_order  # noqa: E402
from dev_decoding import Written, _drawn_from, write_guided  # noqa: E402
from final_texts import final_rows  # noqa: E402
from key_corpora import cut_passages, like_pointer, shares_run  # noqa: E402
from key_settings import read_key_settings  # noqa: E402
from key_table import KeyLine, against_base, score_keyed  # noqa: E402
from ordered_keys import (  # noqa: E402
    KeyedText,
    choose_keys,
    draw_count,
    ordered_oracle,
    read_keyed,
    shorten_keys,
)
from study_settings import FinalSettings, Row, RowSettings, require_decoding  # noqa: E402

NOUNS = ["dog", "cat", "ball", "beach", "man", "woman", "park"]
SETTINGS = """
[base]
length_limit = 12
[adapter]
epochs = 8.0
rank = 4
rows = 6
width = 64
learning_rate = 1e-2
[own]
count = 80
epochs = 2.0
[draw]
lists = 60
own_lists = true
shorter = 0.3
samples = 16
references = 80
hindsight = 200
hindsight_lists = 2
guided = 120
mean_prefix = 4.0
batch = 128
chunk = 256
held_out = 0.1
[shape]
size = 32
layers = 1
heads = 4
batch = 64
[[guides]]
name = "nado"
title = "NADO"
base = "seq2seq"
learn = ["p"]
learning_rate = 1e-2
steps = 150
whole = true
[[guides]]
name = "rounds"
title = "a round"
base = "seq2seq"
start = "nado"
learn = ["p", "q"]
steps = 10
[[guides]]
name = "warm"
title = "warm-up"
base = "da"
learn = ["references"]
objective = "warm_up"
learning_rate = 3e-3
steps = 60
whole = true
[[guides]]
name = "warm_rounds"
title = "warm-up, a round"
base = "da"
start = "warm"
learn = ["references", "hindsight", "q"]
objective = "warm_up"
complete_from_p = false
steps = 10
[[guides]]
name = "da_nado"
title = "warm-up, then NADO"
base = "da"
start = "warm_rounds"
learn = ["q"]
learning_rate = 1e-5
steps = 4
[[rows]]
systems = ["seq2seq", "nado"]
[[rows]]
systems = ["da"]
decodings = ["sample"]
[[rows]]
systems = ["rounds"]
exact_end = [true]
[[rows]]
systems = ["rounds"]
doubts = [0.1]
[[rows]]
systems = ["warm", "warm_rounds", "da_nado"]
"""


def sentence(chooser: random.Random) -> str:
    one, two, three = chooser.sample(NOUNS, 3)
    return f"the {one} {chooser.choice(['sees', 'throws'])} a {two} on the {three} ."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shippable corpus in its own format: documents of sentences."""
    folder, chooser = tmp_path_factory.mktemp("raw") / "ccby_reviews", random.Random(0)
    folder.mkdir()
    records = [
        {"doc": f"cv{number // 3:03d}", "label": "pos", "text": sentence(chooser)} for number in range(240)
    ]
    content = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "movie_review_sentences.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    return folder.parent


@pytest.fixture(scope="module")
def place(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of sentences that a random base can write, and that base."""
    folder, chooser = tmp_path_factory.mktemp("in_order"), random.Random(1)
    save("llama", folder / "base", tie_word_embeddings=True)
    (folder / "small.toml").write_text(SETTINGS, encoding="utf-8")
    texts = list(dict.fromkeys(sentence(chooser) for _ in range(160)))
    records = prepare_keys.draw_keys(texts[40:], 3, lists=2, fewer=0.2, chooser=chooser)
    tested = [
        {"id": number, "keys": list(choose_keys(text, 3, chooser)), "text": text}
        for number, text in enumerate(texts[:40])
    ]
    prepared = folder / "prepared"
    run_in_order.write_json(prepared / "about.json", {"corpus": "small", "keys": 3})
    prepare_keys.write_keyed(prepared / "train.jsonl.gz", records)
    prepare_keys.write_keyed(prepared / "test.jsonl.gz", tested)
    return folder


def arguments(place: Path, *more: str) -> list[str]:
    paths = {
        "prepared": "prepared",
        "base": "base",
        "work": "work",
        "output": "out",
        "settings": "small.toml",
    }
    words = [word for name, path in paths.items() for word in (f"--{name}", str(place / path))]
    return ["--corpus", "small", *words, *more]


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    assert run_in_order.main(arguments(place)) == 0
    return place


def taken_up(place: Path) -> run_in_order.InOrder:
    """The study as it stands, with p at hand."""
    study = run_in_order.InOrder(run_in_order._parse(arguments(place)), run_in_order.Workers(0))
    study.adapt()
    return study


def results(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(place / "out" / "keywords_in_order-small.json")["metrics"]["small"]
    return found


def line(place: Path, system: str) -> dict[str, Any]:
    return next(each for each in results(place)["rows"] if each["system"] == system)


# --- all of it ----------------------------------------------------------------------------------------


def test_every_line_of_the_table_is_there(finished: Path) -> None:
    rows = results(finished)["rows"]
    systems = ["seq2seq", "da", "nado", "rounds", "rounds", "warm", "warm_rounds", "da_nado"]
    assert [each["system"] for each in rows] == systems
    assert [each["doubt"] for each in rows] == [0, 0, 0, 0, 0.1, 0, 0, 0]
    for each in rows:
        assert each["lists"] == 40
        low, high = each["interval"]["in_order"]
        assert low - 1e-9 <= each["in_order"] <= high + 1e-9
        assert ("against_base" in each) == (each["system"] not in ("seq2seq", "da"))
    assert {each["base"] for each in rows} == {"seq2seq", "da"}


def test_the_domain_adapted_base_never_sees_a_key(finished: Path) -> None:
    for chunk in (finished / "work" / "references-da").glob("chunk-*"):
        samples = read_samples(chunk)
        assert set(samples.strings("prompt")) == {""}
        assert samples.array("satisfied").mean() > 0.95  # references have their keys; a few are cut
    seen = read_samples(finished / "work" / "samples-seq2seq" / "chunk-000")
    for prompt, condition in zip(seen.strings("prompt")[:5], seen.strings("condition")[:5], strict=True):
        assert prompt == condition.replace(",", "") + " ="


def test_p_writes_also_for_keys_of_its_own_texts(finished: Path) -> None:
    drawn = sorted((finished / "work" / "samples-seq2seq").glob("chunk-*"))
    asked = {condition for each in drawn for condition in read_samples(each).strings("condition")}
    assert len(asked) == 60  # as many as the settings ask for, cut ones among them
    learned = {
        ", ".join(keys)
        for record in read_keyed(finished / "prepared" / "train.jsonl.gz")
        for keys in record["keys"]
    }
    chunks = sorted((finished / "work" / "hindsight-da").glob("chunk-*"))
    own = {condition for each in chunks for condition in read_samples(each).strings("condition")}
    assert (asked - learned) & own
    # The rest are such lists without some of their keys.
    lists = [each.split(", ") for each in (*learned, *own)]
    cut = asked - learned - own
    assert cut
    for condition in cut:
        keys = condition.split(", ")
        assert any(len(keys) < len(whole) and is_within(keys, whole) for whole in lists)


def test_a_text_in_hindsight_comes_with_several_lists_of_its_keys(finished: Path) -> None:
    found: dict[tuple[int, ...], list[str]] = {}
    for chunk in sorted((finished / "work" / "hindsight-da").glob("chunk-*")):
        samples = read_samples(chunk)
        tokens = samples.ragged("tokens")
        for number, condition in enumerate(samples.strings("condition")):
            found.setdefault(tuple(tokens.row(number).tolist()), []).append(condition)
    assert all(len(lists) % 2 == 0 for lists in found.values())  # a text that is drawn twice comes four times
    assert any(len(set(lists)) > 1 for lists in found.values())


def test_no_text_is_both_learned_and_held_out_in_a_warm_up(finished: Path) -> None:
    study = taken_up(finished)
    stage = study.settings.stage("warm")
    learning = run_in_order.Learning(
        study.clock, study.reader, study.oracle, stage, stage.shape(study.settings.shape)
    )
    data = learning.gather(
        [study.samples("references-da"), study.samples("hindsight-da")], study.bits, 0.2, 0
    )
    learned, held = (
        {tuple(row[:length]) for row, length in zip(each.tokens.tolist(), each.lengths.tolist(), strict=True)}
        for each in (data.learned, data.judged)
    )
    assert held
    assert not held & learned


def test_p_learns_to_read_keys_from_texts_of_its_own(finished: Path) -> None:
    own = read_keyed(finished / "work" / "own_texts" / "own.jsonl.gz")
    stages = results(finished)["stages"]
    assert 0 < stages["own_texts"]["texts"] == len(own) <= 80
    assert ordered_oracle()([", ".join(each["keys"]) for each in own], [each["text"] for each in own]).all()
    learned = {record["text"] for record in read_keyed(finished / "prepared" / "train.jsonl.gz")}
    assert {each["text"] for each in own} - learned
    drawn = read_samples(finished / "work" / "own_texts" / "drawn")
    assert set(drawn.strings("proposal")) == {"p at temperature 0.9"}


def test_one_base_alone_is_a_study_of_its_own(finished: Path) -> None:
    words = arguments(finished, "--only", "da")
    words[words.index("--output") + 1] = str(finished / "alone")
    assert run_in_order.main(words) == 0
    run = read_json(finished / "alone" / "keywords_in_order-small-da.json")
    rows = run["metrics"]["small-da"]["rows"]
    both = results(finished)
    lines = [(each["system"], each["decoding"]) for each in rows]
    assert lines == [(each["system"], each["decoding"]) for each in both["rows"] if each["base"] == "da"]
    # Its p has learned the texts by themselves, as the one did that writes texts of its own for the other.
    learned, facts = both["stages"]["first_adapter"], run["metrics"]["small-da"]["stages"]["adapter"]
    assert {each: facts[each] for each in ("steps", "tokens", "dev_loss")} == {
        each: learned[each] for each in ("steps", "tokens", "dev_loss")
    }
    assert len(in_order_page.papers("yelp-da", {"da"})) == 2
    assert len(in_order_page.papers("yelp", {"da", "seq2seq"})) == 4


def test_some_guides_alone() -> None:
    settings = read_key_settings(RECIPE / "yelp.toml")
    chosen = settings.of_base("da").of_guides(["warm"])
    assert [each.name for each in chosen.guides] == ["warm"]
    assert {system for each in chosen.rows for system in each.systems} == {"da", "warm"}
    with pytest.raises(InputError, match="some of the guides warm, warm_rounds, da_nado; found nado"):
        settings.of_base("da").of_guides(["warm", "nado"])
    with pytest.raises(InputError, match="an earlier guide of the base da that warm_rounds starts from"):
        settings.of_guides(["warm_rounds"])


def test_without_a_further_call_the_last_guides_are_left_out(place: Path) -> None:
    settings = read_key_settings(RECIPE / "yelp.toml")

    class Short(run_in_order.InOrder):
        def __init__(self, left: float, later: float) -> None:
            self.settings, self.later, self.left_out = settings, later, []
            self.trained = trained
            self.clock: Any = SimpleNamespace(left=left)
            self.stages: Any = SimpleNamespace(is_done=done.__contains__)

    done: set[str] = set()
    trained: dict[str, Path] = {}
    guides = list(settings.guides)
    kept = [len(Short(left, 0.0).fitting(guides)) for left in range(50, 3000, 50)]
    assert kept == sorted(kept)  # the more time, the more guides, one by one
    assert set(kept) == set(range(len(guides) + 1))
    short = Short(700.0, 0.0)
    first = short.fitting(guides)
    assert [each.name for each in first] + short.left_out == [each.name for each in guides]
    assert Short(50.0, 5000.0).fitting(guides) == guides  # another call goes on with them
    assert Short(50.0, 100.0).fitting(guides) == []  # but not if that one has no time, either
    done |= {"guide-warm", "guide-nado"}  # what is trained is never left out
    assert [each.name for each in Short(50.0, 0.0).fitting(guides)] == ["nado", "warm"]
    done.clear()
    without = Short(1000.0, 0.0).reserve(guides)
    done.add("hindsight-da")  # what is drawn is not drawn again
    assert Short(1000.0, 0.0).reserve(guides) == without - settings.reserved.samples


def test_a_guide_that_is_given_takes_the_time_of_its_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never left out for want of time, and no share of the others' time is kept for it."""
    settings = read_key_settings(RECIPE / "yelp.toml")
    names = [each.name for each in settings.guides]
    asked: list[list[str]] = []

    def share(clock: Any, waiting: list[Any], reserve: float) -> float:
        asked.append([each.title for each in waiting])
        return run_share(clock, waiting, reserve)

    def study(left: float, *given: str) -> Any:
        found: Any = run_in_order.InOrder.__new__(run_in_order.InOrder)
        found.settings, found.trained = settings.with_given(given), dict.fromkeys(given, Path("somewhere"))
        found.clock, found.later, found.left_out = SimpleNamespace(left=left), 100.0, []
        found.stages = SimpleNamespace(is_done=lambda name: False)
        return found

    run_share = run_in_order.share_time
    monkeypatch.setattr(run_in_order, "share_time", share)
    every = study(-100.0, *names)
    assert every.fitting(every.settings.guides) == list(every.settings.guides)
    some = study(-100.0, "rounds", "warm")
    assert [each.name for each in some.fitting(some.settings.guides)] == ["rounds", "warm"]
    assert some.left_out == ["nado", "warm_rounds", "da_nado"]
    # Nothing is drawn and no data is read for it, but its lines are written.
    alone, beside = study(0.0, *names), study(0.0, "nado", "rounds")
    rows = alone.row_seconds(alone.settings.guides)
    assert alone.reserve(alone.settings.guides) == rows + run_in_order._LAST_SECONDS
    first, *others = beside.settings.guides[2:]
    assert not beside.learn([first, *others, *beside.settings.guides[:2]])  # there is no time left at all
    assert asked[-1] == [each.title for each in (first, *others)]


def test_lines_are_guided_with_their_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def write(*asked: Any, guidance: Any, **more: Any) -> Any:
        seen.append(guidance)
        return SimpleNamespace(texts=[], oracle_calls=0, oracle_seconds=0.0)

    base = SimpleNamespace(device=torch.device("cpu"))
    model: Any = SimpleNamespace(base=base, generate_texts=write, guides=[None], oracle=ordered_oracle())
    asked: Any = [KeyedText(0, ("dog", "cat"), "")]
    row = Row("rounds", "greedy", 2.0, exact_end=False, doubt=0.1)
    write_guided(model, asked, row, RowSettings(("rounds",)))
    monkeypatch.setattr("dev_decoding.GuidedLanguageModel", write)
    _drawn_from(model, row, asked)
    assert [(each.strength, each.doubt) for each in seen] == [(2.0, 0.1)] * 2
    assert row.name == "rounds-greedy-strength2-doubt0.1-free"
    chosen = {"strength": 2.0, "doubt": 0.1}
    assert final_rows(chosen, FinalSettings())["q"].doubt == 0.1


def test_greedy_texts_can_be_kept_from_repeating_themselves(finished: Path) -> None:
    """A text that has missed its key goes round in circles up to the limit."""
    study = taken_up(finished)
    asked = [replace(each, sees=False) for each in study.tested]
    model = GuidedModel(study.model, study.guide("warm"), oracle=study.oracle)
    repeated = []
    for decoding in ("greedy", "greedy2"):
        row = Row("warm", decoding, 1.5, False)
        assert (row.kind, row.base_decoding) == ("greedy", decoding)
        written = write_guided(model, asked, row, RowSettings(("warm",)))
        pairs = [list(pairwise(tokens)) for tokens in written.tokens]
        repeated.append(sum(len(each) > len(set(each)) for each in pairs))
    assert repeated[0] > repeated[1] == 0
    with pytest.raises(InputError, match="one of the decodings greedy, greedy4, beam"):
        require_decoding(Row("warm", "greedy1", 1.5, False))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("hindsight_lists = 2", "hindsight_lists = 0", "hindsight_lists of 1 or more; found 0"),
        ("doubts = [0.1]", 'decodings = ["verified"]', "kinds greedy, sample, beam, search; found verified"),
    ],
)
def test_settings_that_could_only_fail_later_are_refused(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    (tmp_path / "wrong.toml").write_text(SETTINGS.replace(before, after), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_key_settings(tmp_path / "wrong.toml")


def is_within(keys: list[str], whole: list[str]) -> bool:
    """Whether keys stand in a list one after the other."""
    rest = iter(whole)
    return all(key in rest for key in keys)


def test_guides_cover_more_than_their_bases(finished: Path) -> None:
    """A warm-up alone lifts a base that knows no keys; NADO lifts one that reads them."""
    assert line(finished, "warm")["coverage"] > line(finished, "da")["coverage"] + 10
    assert line(finished, "warm")["against_base"]["missed_removed"]["value"] > 10
    assert line(finished, "nado")["coverage"] > line(finished, "seq2seq")["coverage"] + 5


def test_a_round_begins_with_the_guide_before_it(finished: Path) -> None:
    stages = results(finished)["stages"]
    assert stages["guide-rounds"]["learned_from"] == ["samples-seq2seq", "round-rounds"]
    sources = ["references-da", "hindsight-da", "round-warm_rounds"]
    assert stages["guide-warm_rounds"]["learned_from"] == sources
    assert stages["hindsight-da"]["satisfied"] == 1  # keys that are in a text, in the order they have there
    assert stages["guide-warm"]["satisfied"] == 1
    proposals = set(read_samples(finished / "work" / "round-rounds" / "chunk-000").strings("proposal"))
    assert all("guided" in each and each.endswith("then p") for each in proposals)


def test_with_an_exact_end_finished_texts_have_all_keys_in_order(finished: Path) -> None:
    row = line(finished, "rounds")
    assert row["exact_end"]
    assert row["in_order"] >= row["finished"]


def test_a_second_call_does_nothing_again(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = results(finished)["rows"]
    for name in ("fine_tune", "write_guided", "write_base", "Learning"):
        monkeypatch.setattr(run_in_order, name, None)
    assert run_in_order.main(arguments(finished)) == 0
    said = capsys.readouterr().out
    # Two adapters, p's own texts between them, p, the lines, the guides, and the samples once for every guide
    # that learns from them (texts in hindsight also where others are drawn for keys in them).
    assert said.count("done before") == 4 + len(before) + 5 + 8 + 2
    assert results(finished)["rows"] == before


def test_guides_that_were_trained_before_are_taken(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """p and a guide of an earlier run write the same lines, and nothing is drawn or trained for them."""
    for name in ("fine_tune", "Learning", "Making"):
        monkeypatch.setattr(run_in_order, name, None)
    work = finished / "work"
    words = arguments(finished, "--adapter", str(work / "adapter" / "adapter"), "--guides", "rounds")
    words += ["--trained", f"rounds={work / 'guide-rounds' / 'guide'}"]
    words[words.index("--work") + 1] = str(finished / "taken")
    words[words.index("--output") + 1] = str(finished / "taken_out")
    assert run_in_order.main(words) == 0
    found = read_json(finished / "taken_out" / "keywords_in_order-small.json")["metrics"]["small"]
    before, now = (
        [
            {name: value for name, value in row.items() if "seconds" not in name}
            for row in several["rows"]
            if row["system"] in ("seq2seq", "da", "rounds")
        ]
        for several in (results(finished), found)
    )
    assert now == before
    facts = {**results(finished)["stages"]["guide-rounds"], "learned_from": ["an earlier run"]}
    assert found["stages"]["guide-rounds"].items() <= {**facts, "stage_seconds": ANY}.items()
    assert "an earlier run" in in_order_page.stages_table(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rounds", r"a trained guide in rounds=FOLDER; found none"),
        ("rounds=nowhere", r"a trained guide in rounds=FOLDER; found nowhere"),
        ("rounds=bare", r"in rounds=FOLDER; found bare, saved without a summary of its training\. Name what"),
        ("round=work/guide-rounds/guide", r"some of the guides nado, .*; found round"),
    ],
)
def test_a_trained_guide_that_is_not_there_is_refused(
    finished: Path,
    given: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(finished)
    (finished / "bare").mkdir(exist_ok=True)
    # As `save_guide` leaves it that is told of no training.
    (finished / "bare" / "training.json").write_text('{"summary": null}', encoding="utf-8")
    assert run_in_order.main(arguments(finished, "--trained", given)) == 1
    assert re.search(message, capsys.readouterr().err)


def test_a_guide_with_nothing_to_learn_from_has_to_be_a_trained_one(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(finished)
    words[words.index("--settings") + 1] = str(RECIPE / "few_lines.toml")
    assert run_in_order.main(words) == 1
    found = capsys.readouterr().err
    assert "texts that the guide rounds learns from; found none in its settings" in found
    assert "--trained rounds=FOLDER" in found


def test_what_does_not_fit_is_left_for_a_further_call(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No second is left before the deadline: what was made before is shown, nothing is begun."""
    text = (finished / "small.toml").read_text(encoding="utf-8").replace("steps = 60", "steps = 61")
    (finished / "other.toml").write_text(text, encoding="utf-8")
    words = arguments(finished, "--deadline", "1", "--later", "100")
    words[words.index("--settings") + 1] = str(finished / "other.toml")
    words[words.index("--output") + 1] = str(finished / "other")
    record = finished / "work" / "guide-warm" / "stage.json"
    kept = record.read_text(encoding="utf-8")
    record.write_text("{}", encoding="utf-8")
    assert run_in_order.main(words) == 0
    record.write_text(kept, encoding="utf-8")
    assert "left for the next call: warm, warm_rounds, da_nado" in capsys.readouterr().out
    found = read_json(finished / "other" / "keywords_in_order-small.json")["metrics"]["small"]
    assert found["left_out"] == ["warm", "warm_rounds", "da_nado"]


def test_the_readme_and_the_record_are_filled(finished: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((RECIPE / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    words = [str(finished / "out"), "--readme", str(readme), "--record", "--results", str(tmp_path)]
    in_order_page.main(words)
    in_order_page.main(words)  # twice is as once
    text = readme.read_text(encoding="utf-8")
    row = line(finished, "warm")
    assert text.count(f"| warm-up | da | greedy | 1 | off | {row['coverage']:.1f}") == 1
    recorded = read_json(tmp_path / "keywords_in_order.json")
    assert recorded["metrics"]["small"]["rows"] == results(finished)["rows"]
    assert "texts" not in json.dumps(recorded["metrics"]["small"]["rows"])


def test_a_table_says_which_guides_are_missing(finished: Path) -> None:
    """Also of a run that was stopped, which had no time to say so itself."""
    run = read_json(finished / "out" / "keywords_in_order-small.json")
    assert "Not trained" not in in_order_page.page([run])
    del run["metrics"]["small"]["stages"]["guide-da_nado"]
    assert in_order_page.page([run]).endswith("\n\nNot trained in this run: da_nado.")


def test_tables_show_all_that_is_on_record(finished: Path, tmp_path: Path) -> None:
    run = read_json(finished / "out" / "keywords_in_order-small.json")
    earlier = {**run, "commit": "aaa", "metrics": {"another": run["metrics"]["small"]}}
    earlier["runs"] = [{**run["runs"][0], "commit": "aaa", "metrics": ["another"]}]
    run_in_order.write_json(tmp_path / "keywords_in_order.json", earlier)
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- results: written by this recipe's page script -->\n<!-- end of results -->\n", encoding="utf-8"
    )
    in_order_page.main(
        [str(finished / "out"), "--readme", str(readme), "--record", "--results", str(tmp_path)]
    )
    text = readme.read_text(encoding="utf-8")
    assert text.index("### another") < text.index("commit aaa") < text.index("### small")
    assert text.count("### ") == 2


def test_one_command_leads_from_data_to_the_tables(
    place: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("key_corpora._TESTED", 40)
    settings = SETTINGS.partition("[[guides]]")[0]
    lines = '[[rows]]\nsystems = ["seq2seq"]\n'
    (tmp_path / "few.toml").write_text(settings.replace("epochs = 8.0", "epochs = 1.0") + lines, "utf-8")
    words = ["--corpus", "reviews", "--data", str(data), "--base", str(place / "base")]
    words += ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    words += ["--settings", str(tmp_path / "few.toml")]
    learned: list[list[KeyedText]] = []
    tune = run_in_order.fine_tune

    def watched(clock: Any, base: str, train: Any, *rest: Any, **more: Any) -> Any:
        learned.append(train)
        return tune(clock, base, train, *rest, **more)

    monkeypatch.setattr(run_in_order, "fine_tune", watched)
    assert run_in_order.main(words) == 0
    assert not any(each.sees for each in learned[0])  # first the texts alone
    own = {each["text"] for each in read_keyed(tmp_path / "work" / "own_texts" / "own.jsonl.gz")}
    real = {each["text"] for each in read_keyed(tmp_path / "work" / "prepared" / "train.jsonl.gz")}
    assert {each.text for each in learned[1] if each.sees} == own | real
    assert {each.text for each in learned[1] if not each.sees} == real
    found = read_json(tmp_path / "out" / "keywords_in_order-reviews.json")["metrics"]["reviews"]
    assert found["about"]["test_lists"] == 40
    text = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert f"| p, seq2seq | seq2seq | greedy | – | – | {found['rows'][0]['coverage']:.1f}" in text
    monkeypatch.setattr(prepare_keys, "prepare", None)
    monkeypatch.setattr(run_in_order, "fine_tune", None)
    assert run_in_order.main(words) == 0  # nothing is done again


# --- its parts ----------------------------------------------------------------------------------------


def test_the_corpus_is_prepared_without_leaks(data: Path, tmp_path: Path) -> None:
    # Three nouns and a verb to choose from: four keys each.
    words = ["--corpus", "reviews", "--data", str(data), "--output", str(tmp_path / "reviews")]
    assert prepare_keys.main(words) == 0
    train, tested = (read_keyed(tmp_path / "reviews" / name) for name in ("train.jsonl.gz", "test.jsonl.gz"))
    assert len(tested) == 240  # fewer than 1,000: all of them are tested, nothing is left to learn
    assert not train
    oracle = ordered_oracle()
    assert oracle([", ".join(each["keys"]) for each in tested], [each["text"] for each in tested]).all()


def test_missing_data_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_keys.main(["--corpus", "yelp", "--data", str(tmp_path), "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Get test.jsonl: POINTER's 1,000 Yelp key lists and references (local use only)" in said
    assert prepare_keys.main(["--corpus", "yelp!", "--data", str(tmp_path), "--output", str(tmp_path)]) == 1
    assert "yelp, news, reviews" in capsys.readouterr().err
    words = ["--corpus", "news", "--prepared", str(tmp_path / "no"), "--base", "b"]
    assert run_in_order.main([*words, "--work", str(tmp_path), "--output", str(tmp_path)]) == 1
    assert "Make it with prepare_keys.py." in capsys.readouterr().err


def test_keys_stand_in_their_text_in_order() -> None:
    text, chooser = "Greece , Greece and well-made food don't please the Greece of 2015 .", random.Random(0)
    for count in range(1, 6):
        keys = choose_keys(text, count, chooser)
        assert len(keys) == count
        assert ordered_oracle()([", ".join(keys)], [text]).all()
    assert set(choose_keys(text, 9, chooser)) == {"greece", "food", "please"}
    assert not ordered_oracle()(["food, greece, greece"], [text]).any()
    counts = [draw_count(7, 0.5, chooser) for _ in range(400)]
    assert set(counts) == {2, 3, 4, 5, 6, 7}
    assert 0.4 < np.mean(np.array(counts) == 7) < 0.6
    cut = [shorten_keys(tuple("abcd"), 0.5, chooser) for _ in range(400)]
    assert {len(each) for each in cut} == {2, 3, 4}
    assert 0.4 < np.mean([each == tuple("abcd") for each in cut]) < 0.6
    assert all(list(each) == sorted(each) for each in cut)
    assert shorten_keys(("a", "b"), 1.0, chooser) == ("a", "b")


def test_reviews_are_written_as_the_test_references_are() -> None:
    assert like_pointer("Don't go...\nIt's $5, REALLY!! (no)") == "don t go . it s $5 , really ! ( no )"
    words = " ".join(f"word{n % 7} ." if n % 9 == 8 else f"word{n % 7}" for n in range(300))
    passages = list(cut_passages(words, random.Random(0)))
    assert len(passages) > 3
    assert all(15 <= len(each.split()) <= 78 for each in passages)
    assert all(each.endswith(".") for each in passages[:-1])


def test_texts_that_share_ten_words_are_found() -> None:
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    known = {words}
    assert shares_run("zero One two, three four five six seven eight nine ten eleven", known)
    assert not shares_run("one two three four five six seven eight nine eleven ten", known)


def test_missed_keys_removed_counts_exact_forms_anywhere() -> None:
    tested = [KeyedText(at, ("dog", "cat"), "the dog sees the cat") for at in range(40)]

    def scored(texts: list[str]) -> KeyLine:
        written = Written(texts, [[4, EOS]] * len(texts), [True] * len(texts), 0, 0.0, 0.0)
        return KeyLine(score_keyed(tested, texts), written, [np.zeros(2, np.float32)] * len(texts))

    base = scored(["the dogs sleep"] * 20 + ["a cat"] * 20)  # 25 % of the keys
    ours = scored(["the cat sees the dog"] * 20 + ["the dog sees the cat"] * 20)
    assert base.coverage.value == pytest.approx(25)
    assert ours.coverage.value == pytest.approx(100)
    assert ours.measures()["in_order"].value == pytest.approx(0.5)
    found = against_base(ours, base)
    assert found["missed_removed"]["value"] == pytest.approx(100)
    assert found["bleu2"]["difference"] > 0


@pytest.mark.parametrize("name", ["yelp", "news", "reviews"])
def test_the_settings_of_every_corpus_are_read(name: str) -> None:
    settings = read_key_settings(RECIPE / f"{name}.toml")
    rows = [row for section in settings.rows for row in section.rows()]
    guides = [each.name for each in settings.guides]
    assert guides == ["nado", "rounds", "warm", "warm_rounds", "da_nado"]
    assert len(rows) == len(set(rows))
    assert {row.system for row in rows} == {"seq2seq", "da", *guides}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[draw]\nsample = 3\n", "found sample"),
        ('[[rows]]\nsystems = ["mian"]\n', "found mian"),
        ('[[guides]]\nname = "a"\ntitle = "a"\nbase = "da"\nlearn = ["q"]\n', "found none"),
        ('[[guides]]\nname = "a"\ntitle = "a"\nbase = "ad"\nlearn = ["p"]\n', "found ad"),
        ('[[guides]]\nname = "a"\ntitle = "a"\nbase = "da"\nlearn = ["hindsight"]\n', "found nado beside da"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=found):
        read_key_settings(path)
