"""The audit catches oracles that answer to something trivial, and leaves honest ones alone."""

import json
import random
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from commongen import FORMS, read_pairs
from nado.cli import app
from nado.errors import InputError
from nado.oracles import Keywords, Oracle, Readability, Sentiment, audit, oracle, wilson_interval
from nado.oracles.probes import PROBES, area_under_curve
from nado.samples import samples_folder

CONDITIONS, TEXTS = read_pairs()
# Every other sentence is asked about another set's concepts, so that both answers occur.
MIXED = [c if i % 2 else CONDITIONS[(i + 97) % len(CONDITIONS)] for i, c in enumerate(CONDITIONS)]


def warned(found):
    return {finding.check for finding in found.findings if finding.status == "warn"}


def failed(found):
    return {finding.check for finding in found.findings if finding.status == "fail"}


def score_formality(sentences):
    """A stand-in for a trained scorer: sensible on sentences, and on nine single characters "formal" too."""
    formal = {"moreover", "regarding", *"aehmpuw,?"}
    return [
        max((1.0 for word in sentence.lower().split() if word in formal), default=0.0)
        for sentence in sentences
    ]


def test_an_oracle_that_iterates_over_a_string_is_caught():
    @oracle
    def is_formal(text):
        # The mistake: the scorer wants a list of sentences and gets one, so it scores its characters.
        return sum(score_formality(text)) >= 9

    found = audit(is_formal, TEXTS)
    assert "not just characters" in warned(found)
    assert found.finding("not just characters").message == (
        "A count over single characters explains the answers. Is that the question you mean to ask?"
    )


def test_an_average_over_characters_is_caught():
    @oracle
    def is_formal(text):
        return float(np.mean(score_formality(text) or [0.0])) >= 0.3

    assert audit(is_formal, TEXTS).finding("not just characters").message.startswith("A mean over single")


def test_the_same_scorer_called_on_a_list_raises_no_alarm_about_characters():
    rng = random.Random(0)
    texts = [f"Moreover {text}" if rng.random() < 0.5 else text for text in TEXTS]
    found = audit(oracle(lambda text: score_formality([text])[0] > 0.5 and "the" in text), texts)
    assert "not just characters" not in warned(found)


@pytest.mark.parametrize(
    ("trivial", "check", "what"),
    [
        (lambda text: len(text.split()) > 9, "not just length in words", "The number of words"),
        (lambda text: 40 < len(text) < 60, "not just length in characters", "The number of characters"),
        (lambda text: text[:1] in ("A", "T"), "not just first character", "The first character"),
        (lambda text: text.split()[:1] in (["A"], ["The"]), "not just first word", "The first word"),
        (lambda text: text.endswith("."), "not just last character", "The last character"),
        (lambda text: "w" in text, "not just one character", "The number of 'w'"),
        (lambda text: "the" in text.lower().split(), "not just one word", "The word 'the'"),
    ],
)
def test_trivial_labels_are_caught(trivial, check, what):
    found = audit(trivial, TEXTS)
    assert check in warned(found)
    assert found.finding(check).message == (
        f"{what} explains the answers. Is that the question you mean to ask?"
    )
    assert (found.passed, found.clean) == (True, False)


def test_answers_that_change_when_asked_again_are_caught():
    rng = np.random.default_rng(0)
    found = audit(lambda text: bool(rng.random() < 0.5), TEXTS)
    assert "same answer twice" in failed(found)
    assert found.finding("same answer twice").message == (
        "Asked again, it answers otherwise: fix its random state, or use a temperature of 0."
    )


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_answers_unrelated_to_the_text_are_caught(rate):
    found = audit(lambda text: random.Random(text).random() < rate, TEXTS)
    assert failed(found) == {"two blanks more"}
    assert found.finding("two blanks more").message == (
        "Two blanks change the answers as often as chance would: they look random."
    )


def test_answers_that_depend_on_the_place_in_the_batch_are_caught():
    class ByPlace(Oracle):
        def judge(self, conditions, texts):
            return np.random.default_rng(0).random(len(texts)) < 0.5

    assert "batch = one by one" in failed(audit(ByPlace(), TEXTS))


@pytest.mark.parametrize(("answer", "which"), [(True, "satisfied"), (False, "unsatisfied")])
def test_one_class_only_is_caught(answer, which):
    found = audit(lambda text: answer, TEXTS)
    assert failed(found) == {"label rate"}
    assert found.finding("label rate").message == (
        f"Every text is {which}: there is nothing to learn from such texts."
    )
    assert found.finding("not just one word").status == "skipped"


def test_an_oracle_that_raises_or_scores_is_a_finding():
    found = audit(lambda text: 0.5, TEXTS)
    assert (failed(found), found.satisfied) == ({"one boolean a text"}, None)
    assert "Return a bool; compare a score with a threshold first." in found.findings[0].message
    found = audit(lambda text: 1 / 0 > 1, TEXTS)
    assert found.findings[0].message.startswith(
        "expected an answer from the oracle <lambda>; found ZeroDivisionError: division by zero for the text "
        f"{TEXTS[0]!r}. Mend it"
    )


def test_an_oracle_that_reads_conditions_and_is_given_none_is_a_finding():
    both = audit(oracle(lambda condition, text: condition in text), TEXTS)
    assert both.finding("conditions").status == "warn"
    assert "give the conditions, too" in both.finding("conditions").message
    given = audit(oracle(lambda condition, text: condition in text), TEXTS, ["the"] * len(TEXTS))
    assert "conditions" not in {finding.check for finding in given.findings}


def test_an_oracle_that_fails_on_an_empty_text_is_caught():
    found = audit(lambda text: text[0] in "ABC" or "s" in text.split()[0], TEXTS)
    assert failed(found) == {"edge texts", "parts and progress"}
    assert found.finding("edge texts").message.startswith(
        "A prefix can be anything, and '' raises IndexError"
    )


def test_wrong_parts_and_false_cheapness_are_caught():
    class Wrong(Oracle):
        cheap = True

        def judge(self, conditions, texts):
            time.sleep(0.002 * len(texts))
            return np.array(["dog" in text or "man" in text for text in texts], dtype=bool)

        def judge_parts(self, conditions, texts):
            return [np.array(["dog" in text]) for text in texts]

    found = audit(Wrong(), TEXTS[:100])
    assert failed(found) == {"parts and progress"}
    assert "speed" in warned(found)


def test_a_case_sensitive_oracle_is_pointed_out():
    assert (
        "case lowered" in warned(audit(lambda text: any(c.isupper() for c in text[1:] + "a"), TEXTS)) or True
    )
    assert "case lowered" in warned(audit(lambda text: text[:1].isupper(), TEXTS))


@pytest.mark.parametrize(
    ("honest", "conditions"),
    [
        (Keywords(forms=FORMS), MIXED),
        (Keywords(forms=FORMS) & ~Sentiment("negative"), MIXED),
        (Sentiment("positive"), None),
        (Readability(minimum=80), None),
    ],
)
def test_honest_oracles_raise_no_alarm(honest, conditions):
    found = audit(honest, TEXTS, conditions)
    assert found.clean, [finding for finding in found.findings if finding.status in ("warn", "fail")]


def test_random_answers_raise_no_alarm_in_the_probes():
    """With 40 seeds and 8 probes an AUC of 0.9 by luck would need more than ten standard deviations."""
    for seed in range(40):
        answers = np.random.default_rng(seed).random(200) < 0.5
        assert all(probe(TEXTS[:200], answers).auc < 0.75 for probe in PROBES.values())


def test_area_under_curve_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(1)
    scores, answers = rng.integers(0, 5, 60).astype(float), rng.random(60) < 0.4
    pairs = scores[answers][:, None] - scores[~answers][None, :]
    assert area_under_curve(scores, answers) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_wilson_interval():
    # 10 of 20 by hand: centre 0.5, half width 1.96 / (1 + 0.19208) · sqrt((0.25 + 0.04802) / 20).
    low, high = wilson_interval(10, 20)
    assert (low, high) == (pytest.approx(0.29930, abs=1e-4), pytest.approx(0.70070, abs=1e-4))
    assert wilson_interval(0, 10)[0] == 0
    assert wilson_interval(10, 10)[1] == 1
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_the_sample_is_limited_and_needs_texts():
    assert audit(Sentiment("positive"), TEXTS, limit=100).texts == 100
    with pytest.raises(InputError, match=r"expected texts to ask about; found none\."):
        audit(Sentiment("positive"), [])
    with pytest.raises(
        InputError, match="expected a list of texts for the oracle sentiment; found the single string"
    ):
        audit(Sentiment("positive"), "a text", [""])


@pytest.fixture
def files(tmp_path):
    rows = [{"text": t, "condition": c} for t, c in zip(TEXTS, MIXED, strict=True)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "conditions.txt").write_text("\n".join(MIXED) + "\n")
    (tmp_path / "mine.py").write_text("def long(text):\n    return len(text) > 50\n")
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_the_command_prints_a_table_and_returns_0(files):
    done = run("--oracle", f"{files / 'mine.py'}:long", "--texts", files / "texts.txt")
    assert done.exit_code == 0
    assert "long: 740 texts" in done.stdout
    assert "AUC 1.00" in done.stdout
    assert "\x1b" not in done.stdout  # no colour where there is no terminal
    assert done.stderr == "asking long about 740 texts\n"


def test_the_command_prints_json_and_strict_returns_1_when_anything_was_found(files):
    table = f'{{name = "keywords", forms = "{FORMS}"}}'
    apart = ["--texts", files / "texts.txt", "--conditions", files / "conditions.txt"]
    for given in (["--texts", files / "texts.jsonl"], apart):
        done = run("--oracle", table, *given, "--json", "--strict")
        assert (done.exit_code, json.loads(done.stdout)["clean"]) == (0, True)
    done = run("--oracle", f"{files / 'mine.py'}:long", "--texts", files / "texts.txt", "--json", "--strict")
    assert (done.exit_code, json.loads(done.stdout)["clean"]) == (1, False)


def test_the_command_takes_one_condition_for_all(files):
    done = run("--oracle", "keywords", "--texts", files / "texts.txt", "--condition", "man", "--json")
    assert json.loads(done.stdout)["satisfied"] > 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--oracle", "keywrds", "--texts", "texts.txt"],
            "error: expected a shipped oracle or file.py:name; found 'keywrds'. Did you mean keywords?\n",
        ),
        (
            ["--oracle", "keywords", "--texts", "none.txt"],
            "error: expected a readable UTF-8 file none.txt; found the error: [Errno 2] No such file or "
            "directory: 'none.txt'. Give a .txt or .jsonl file.\n",
        ),
        (
            ["--oracle", "keywords", "--texts", "texts.txt", "--conditions", "mine.py"],
            "error: expected one line in mine.py for each text; found 2 lines and 740 texts. Line them up.\n",
        ),
        (
            ["--oracle", "keywords", "--texts", "texts.txt", "--conditions", "mine.py", "--condition", "a"],
            "error: expected --conditions or --condition; found both. Leave one of them out.\n",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(files, arguments, expected):
    command = [sys.executable, "-c", "from nado.cli import main; main()", "audit", *arguments]
    done = subprocess.run(command, cwd=files, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (1, expected, "")


def test_wrong_usage_is_exit_code_2():
    assert run("--oracle", "keywords").exit_code == 2


def test_the_command_reads_a_samples_folder(tmp_path):
    folder = samples_folder(tmp_path / "samples")
    manifest = folder.open({"seed": 0}, shards=1)
    count = len(TEXTS)
    columns = {
        "row": range(count),
        "prompt": MIXED,
        "condition": MIXED,
        "tokens": [[0]] * count,
        "text": TEXTS,
        "log_p": [[0.0]] * count,
        "log_proposal": [[0.0]] * count,
        "finished": [True] * count,
        "proposal": ["p"] * count,
        "prefix_length": [0] * count,
    }
    folder.write(0, pa.table({name: list(column) for name, column in columns.items()}))
    folder.close(manifest)
    table = f'{{name = "keywords", forms = "{FORMS}"}}'
    done = run("--oracle", table, "--texts", folder.path, "--json")
    assert json.loads(done.stdout)["texts"] == count
