"""`nado compare`: every method of a small study from the command line; files, resuming, budgets and tests."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nado.baselines import METHODS
from nado.cli import main
from nado.errors import InputError, MismatchError
from nado.guide import Guide
from nado.metrics import Comparison, Measure
from nado.metrics.resampling import Resampling
from nado.prompts import Prompt
from nado.report import Report, System, read_report
from nado.report.comparisons import describe_settings, report_from_comparison
from nado.report.tables import headline_table
from nado.study import read_study, run_study
from nado.study.comparison import Guided, GuidedBeams, compare_study, method_keys
from nado.study.pairing import adjust, compare_fluency, compare_satisfied, first_texts, measure_diversity
from nado.study.sections import CompareConfig, GenerateConfig
from nado.study.systems import Written, read_texts
from test_study import STUDY, make_study

TINY = """
[compare]
budgets = [1, 6]
tuning_prompts = 3
training_texts = 192
examples = 4
"""
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
NOT_AT_1X = {"q-beam-1x", "beam-1x", "beam-exact-end-1x", "best-of-n-1x", "neurologic-1x", "smc-1x"}
RUN = [
    *(
        "q",
        "q-exact-end",
        "q-tuned",
        "q-beam-6x",
        "base",
        "base-exact-end",
        "greedy",
        "beam-6x",
        "beam-exact-end-6x",
        "best-of-n-6x",
        "rejection-1x",
    ),
    *("rejection-6x", "fine-tuning", "lora", "fudge", "class-ratio", "keyword-boosting", "neurologic-6x"),
    "smc-6x",
]


def run(*arguments: object) -> tuple[int, str, str]:
    """A command as a process of its own: its exit code, stdout and stderr."""
    command = [sys.executable, "-m", "nado.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose comparison was run from a terminal: its file."""
    text = STUDY.replace("steps = 60", "steps = 30").replace("count = 8", "count = 2")
    file = make_study(tmp_path_factory.mktemp("compare"), text + TINY)
    code, out, err = run("compare", file, "--json")
    assert code == 0, err
    file.with_name("first.json").write_text(out)
    file.with_name("first.err").write_text(err)
    return file


@pytest.fixture
def copied(study: Path, tmp_path: Path) -> Path:
    """A compared study that may be changed: its file."""
    shutil.copytree(study.parent, tmp_path / "copy")
    return tmp_path / "copy" / "study.toml"


@pytest.fixture
def comparison(study: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(study.with_name("first.json").read_text())
    return found


# --- from the command line ------------------------------------------------------------------------------


def test_every_method_has_a_row_or_a_reason(study: Path, comparison: dict[str, Any]) -> None:
    assert [row["key"] for row in comparison["systems"]] == RUN
    assert {row["key"] for row in comparison["left_out"]} == NOT_AT_1X
    assert all("the budget pays for one" in row["reason"] for row in comparison["left_out"])
    progress = study.with_name("first.err").read_text().splitlines()
    assert [line.split(":")[0] for line in progress if ": " in line][3:] == [
        *("q", "base", *[key for key in RUN if key not in ("q", "base")]),
        "the page",
    ]


def test_files_hold_the_texts_that_were_measured(study: Path, comparison: dict[str, Any]) -> None:
    folder = study.with_suffix("") / "compare"
    assert json.loads((folder / "comparison.json").read_text()) == comparison
    for row in comparison["systems"]:
        texts = read_texts(folder / row["key"] / "texts.jsonl")
        single = row["key"] in ("q-beam-6x", "greedy", "beam-6x", "beam-exact-end-6x", "neurologic-6x")
        assert len(texts) == row["texts"] == (9 if single else 18)
        share = np.mean([bool(each.satisfied) for each in texts])
        assert row["measures"]["satisfied"]["value"] == pytest.approx(share)
        scored = json.loads((folder / row["key"] / "log_p.json").read_text())
        assert [len(each) for each in scored] == [len(each.tokens) for each in texts]
        settled = [each.finished and all(each.parts.values()) for each in texts]
        assert settled == [each.satisfied for each in texts]
    assert {each.name for each in folder.iterdir() if each.is_file()} == {
        *("comparison.json", "report.html", "report.json", "report.md")
    }


def test_only_what_was_sampled_from_known_probabilities_has_a_divergence(comparison: dict[str, Any]) -> None:
    sampled = {row["key"] for row in comparison["systems"] if "KL(q‖p)" in row["measures"]}
    assert sampled == {
        *(
            "q",
            "q-exact-end",
            "q-tuned",
            "base",
            "base-exact-end",
            "fine-tuning",
            "lora",
            "fudge",
            "class-ratio",
        ),
        "keyword-boosting",
    }
    base = next(row for row in comparison["systems"] if row["key"] == "base")
    assert base["measures"]["KL(q‖p)"]["value"] == pytest.approx(0.0, abs=1e-4)


def test_budgets_are_multiples_of_what_q_took(comparison: dict[str, Any]) -> None:
    rows = {row["key"]: row for row in comparison["systems"]}
    budget = comparison["budget"]["base_tokens_a_text"]
    assert budget == pytest.approx(rows["q"]["base_tokens"] / rows["q"]["texts"])
    length = comparison["budget"]["base_text_length"]
    draws = int(6 * budget / length + 1e-9)
    assert rows["best-of-n-6x"]["settings"]["n"] == draws
    assert rows["smc-6x"]["settings"]["particles"] == draws
    # Draws are of random length; the budget is kept on average.
    assert rows["best-of-n-6x"]["base_tokens"] == pytest.approx(18 * 6 * budget, rel=0.4)
    assert rows["rejection-6x"]["base_tokens"] < 18 * 6 * budget + 18 * 12
    assert rows["class-ratio"]["base_tokens"] % 3 == 0


def test_methods_that_train_say_what_they_read_and_all_say_how_they_were_tuned(
    comparison: dict[str, Any],
) -> None:
    for row in comparison["systems"]:
        trained = row["key"] in (
            "q",
            "q-exact-end",
            "q-tuned",
            "q-beam-6x",
            "fine-tuning",
            "lora",
            "fudge",
            "class-ratio",
        )
        assert (row["training"] is not None) == trained
        assert row["sees_training_draws"] == trained
        assert len(row["tried"]) != 1
        assert (row["tuning"]["base_tokens"] > 0) == bool(row["tried"])
        if row["tried"]:
            assert row["settings"] in [each["settings"] for each in row["tried"]]
    assert comparison["training_draws"]["texts"] == 27 * 32
    assert comparison["tuning"] == {
        "prompts": 3,
        "source": "training prompts",
        "criterion": "most texts that satisfy, among settings whose perplexity under the base is at most 2 "
        "times that of base sampling; where none is, the least perplexing",
    }


def test_every_method_is_tested_against_q_and_few_prompts_are_said_to_be_few(
    study: Path, comparison: dict[str, Any]
) -> None:
    names = [row["system"] for row in comparison["systems"] if row["key"] != "q"]
    pairs = comparison["pairs"]
    assert [each["first"] for each in pairs] == [*names, *names]
    assert {each["second"] for each in pairs} == {"q"}
    assert [each["result"]["name"] for each in pairs] == ["satisfied"] * len(names) + ["log p a token"] * len(
        names
    )
    assert all("n too small" in each["result"]["note"] for each in pairs)  # nine prompts
    report = read_report(study.with_suffix("") / "compare")
    assert [system.name for system in report.systems] == ["q", *names]
    assert len(report.pairs) == len(pairs)
    page = (study.with_suffix("") / "compare" / "report.html").read_text()
    assert "n too small" in page
    for name in names:
        assert name.replace("&", "&amp;") in page
    assert "Not run: best of n, 1× budget: the budget pays for one draw" in page
    assert not re.findall(r"(?:src|href)=[\"']https?:", page)  # nothing is fetched
    markdown = (study.with_suffix("") / "compare" / "report.md").read_text()
    assert "tuning + run" in markdown
    assert "training draws + run" in markdown


def test_examples_show_every_system_and_the_guides_view_of_two(study: Path) -> None:
    examples = read_report(study.with_suffix("") / "compare").examples
    assert examples is not None
    assert "chosen by seed 0; none replaced" in examples.how
    assert len(examples.examples) == 4
    for example in examples.examples:
        assert len(example.texts) == len(RUN)
        assert {text.system for text in example.texts if text.tokens} == {"q", "base sampling"}


def test_a_second_run_reuses_every_method_and_prints_tables(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied.with_suffix("") / "compare"
    (folder / "greedy" / "texts.jsonl").unlink()  # as if the run had been stopped there
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("texts.jsonl")}
    monkeypatch.setattr(sys, "argv", ["nado", "compare", str(copied)])
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code in (0, None), err
    assert err.count("reused from") == 3 + len(RUN) - 1
    assert "greedy: 9 texts in" in err
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert "\x1b" not in out
    for column in ("satisfied", "− q", "perplexity", "distinct-2", "self-BLEU-4", "KL(q‖p)", "tuning + run"):
        assert column in out
    assert out.count("n too small") >= len(RUN) - 1
    assert "Not run: SMC without a guide, 1× budget" in out
    assert out.splitlines()[-1] == str(folder / "report.html")


# --- in this process ------------------------------------------------------------------------------------


def test_other_prompts_are_refused_or_made_again_by_force(copied: Path) -> None:
    study, folder = read_study(copied), copied.with_suffix("")
    with pytest.raises(MismatchError) as caught:
        compare_study(study, folder, only=["greedy"], limit=4)
    assert "differs in prompts" in str(caught.value)
    said: list[str] = []
    found = compare_study(study, folder, only=["greedy"], limit=4, force=True, say=said.append)
    assert [row["key"] for row in found["systems"]] == ["q", "base", "greedy"]
    assert [row["texts"] for row in found["systems"]] == [8, 8, 4]
    assert found["prompts"] == 4
    assert sum("reused" in line for line in said) == 3  # the study's own stages
    assert found["tuning"]["source"] == "held-out prompts that are not evaluated"


def test_one_prompt_is_compared_and_said_to_be_one(copied: Path) -> None:
    found = compare_study(read_study(copied), copied.with_suffix(""), only=["rejection"], limit=1, force=True)
    for row in found["systems"]:
        assert "one prompt" in row["measures"]["satisfied"]["note"]
        assert "n too small" in row["measures"]["perplexity"]["note"]
    assert all(each["result"]["p_value"] is None for each in found["pairs"])


def test_methods_without_keywords_are_named_and_not_dropped(copied: Path) -> None:
    text = copied.read_text()
    oracle = '[oracle]\nname = "keywords"\ninflections = false\nat_least = 1\n'
    assert oracle in text
    copied.write_text(text.replace(oracle, '[oracle]\nname = "length"\nmaximum = 5\n'))
    found = compare_study(
        read_study(copied), copied.parent / "other", only=["keyword-boosting", "neurologic"], limit=3
    )
    reasons = {row["key"]: row["reason"] for row in found["left_out"]}
    assert set(reasons) == {"keyword-boosting", "neurologic-1x", "neurologic-6x"}
    assert set(reasons.values()) == {"the oracle length asks for no keywords"}
    notes = report_from_comparison(found).notes
    assert sum("asks for no keywords" in note for note in notes) == 3


def test_rounds_lend_their_draws_too(copied: Path) -> None:
    text = copied.read_text().replace("steps = 30", "steps = 5") + "[rounds]\nsamples = [8, 8]\n"
    copied.write_text(text)
    found = compare_study(read_study(copied), copied.parent / "rounds", only=["fine-tuning"], limit=3)
    assert found["training_draws"]["texts"] == 27 * 16
    row = next(row for row in found["systems"] if row["key"] == "fine-tuning")
    assert row["training"]["texts"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"only": ["fugde"]}, "expected names of methods; found 'fugde'. Did you mean fudge?"),
        ({"limit": 0}, "expected a limit of at least 1 prompt; found 0."),
    ],
)
def test_wrong_use_is_found_before_anything_is_run(
    copied: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        compare_study(read_study(copied), copied.parent / "nothing", **arguments)
    assert str(caught.value).startswith(words)
    assert not (copied.parent / "nothing").exists()


def test_a_comparison_needs_a_trained_guide_of_the_same_study(copied: Path) -> None:
    study = read_study(copied, ["train.seed=5"])
    with pytest.raises(MismatchError, match=r"differs in train\.seed"):
        compare_study(study, copied.with_suffix(""), only=["greedy"])


def test_a_study_that_was_only_drawn_is_trained_first(copied: Path) -> None:
    folder = copied.parent / "fresh"
    run_study(read_study(copied), folder, until="label")
    found = compare_study(read_study(copied), folder, only=["base"], limit=2)
    assert [row["key"] for row in found["systems"]] == ["q", "base"]
    assert (folder / "train" / "config.json").exists()


# --- pieces ---------------------------------------------------------------------------------------------


def written(prompt: str, satisfied: bool, text: str = "a b c") -> Written:
    return Written(prompt, prompt, text, [1, 2], finished=True, satisfied=satisfied)


def several(rates: list[list[bool]]) -> list[Written]:
    return [written(f"prompt {number}", hit) for number, hits in enumerate(rates) for hit in hits]


def test_systems_with_different_numbers_of_texts_are_paired_by_prompt() -> None:
    generator = np.random.default_rng(0)
    many = several([[bool(hit) for hit in generator.random(4) < 0.7] for _ in range(60)])
    single = several([[bool(generator.random() < 0.3)] for _ in range(60)])
    found = compare_satisfied(single, many, Resampling())
    rates = [np.mean([bool(each.satisfied) for each in texts]) for texts in (single, many)]
    assert found.difference == pytest.approx(rates[0] - rates[1])
    assert found.n == 60
    assert found.p_value is not None
    assert found.p_value < 0.01
    assert "over prompts" in found.method
    one_each = compare_satisfied(single, several([[True]] * 60), Resampling())
    assert "McNemar" in one_each.method
    nothing = compare_satisfied(many, many, Resampling())
    assert (nothing.difference, nothing.p_value) == (0.0, 1.0)


def test_texts_the_base_cannot_write_have_no_difference_in_fluency() -> None:
    texts = several([[True]] * 30)
    fine = [np.array([-1.0, -2.0], dtype=np.float32)] * 30
    worse = [np.array([-2.0, -2.0], dtype=np.float32)] * 30
    found = compare_fluency((texts, worse), (texts, fine), Resampling())
    assert found.difference == pytest.approx(-0.5)
    broken = [np.array([-1.0, -math.inf], dtype=np.float32), *fine[1:]]
    lost = compare_fluency((texts, broken), (texts, fine), Resampling())
    assert (lost.difference, lost.note) == (None, "the base cannot write 1 of 30 texts")


def test_p_values_are_adjusted_for_the_number_of_methods() -> None:
    rows = [Comparison("satisfied", 0.1, p_value, 40) for p_value in (0.01, 0.04, None)]
    notes = [each.note for each in adjust(rows)]
    assert notes == ["p = 0.02 after Holm for 2 methods", "p = 0.04 after Holm for 2 methods", None]


def test_diversity_counts_one_text_a_prompt_so_that_systems_can_be_compared() -> None:
    texts = [written("x", True, "a b c"), written("x", True, "a b c"), written("y", True, "a b d")]
    assert [each.text for each in first_texts(texts).values()] == ["a b c", "a b d"]
    assert list(first_texts(texts)) == [Prompt("x", "x"), Prompt("y", "y")]
    measures = {each.name: each for each in measure_diversity(texts, Resampling())}
    assert measures["distinct-2"].value == pytest.approx(3 / 4)
    single = {each.name: each for each in measure_diversity(texts[1:], Resampling())}
    assert single["self-BLEU-4"].value is None


def test_remarks_about_many_systems_count_them() -> None:
    noted = Measure("KL(q‖p)", 1.0, 9, note="few texts")
    plain = Measure("KL(q‖p)", 1.0, 9)
    rows = [System(f"system {number}", measures=(noted,)) for number in range(7)]
    every = headline_table(Report("x", systems=tuple(rows)))
    assert every.caveats == ("KL(q‖p) (all 7 systems): few texts",)
    some = headline_table(Report("x", systems=(*rows, System("other", measures=(plain,)))))
    assert some.caveats == ("KL(q‖p) (7 of 8 systems): few texts",)
    two = headline_table(Report("x", systems=tuple(rows[:2])))
    assert two.caveats == ("KL(q‖p) (system 0, system 1): few texts",)


def test_no_texts_are_an_error() -> None:
    with pytest.raises(InputError, match="at least one text"):
        measure_diversity([], Resampling())


def test_settings_in_words() -> None:
    assert describe_settings({"top_k": 200, "strength": 2.0, "missing_only": True}) == (
        "top k 200, strength 2, missing only true"
    )
    assert describe_settings({}) == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"budgets": ()}, "expected budgets above 0"),
        ({"budgets": (1.0, -2.0)}, "expected budgets above 0"),
        ({"tuning_prompts": 0}, "expected tuning_prompts of at least 1"),
        ({"most_perplexity": math.nan}, "expected most_perplexity of at least 1"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(CompareConfig(), **values)
    assert str(caught.value).startswith(words)


def no_guide() -> Guide:
    raise AssertionError("settings are known before a guide is loaded")


def test_what_q_is_tuned_over_does_not_hang_on_the_study() -> None:
    """And what does is told: settings are all that says which texts were written how."""
    given: Any = None
    several = [Guided("q-tuned", no_guide, GenerateConfig(doubt=doubt)) for doubt in (0.0, 0.1)]
    assert several[0].grid(given) == several[1].grid(given)
    assert all(each.guidance.doubt == 0 for each in several)
    assert Guided("q", no_guide, GenerateConfig(doubt=0.1, strength=2.0)).grid(given) == [
        {"strength": 2.0, "doubt": 0.1}
    ]
    assert GuidedBeams(no_guide, GenerateConfig(doubt=0.1)).guidance.doubt == 0.1


def test_every_method_can_be_named() -> None:
    assert method_keys() == ["q", "q-exact-end", "q-tuned", "q-beam", *METHODS]
