"""The demo: its oracle, what it promises, and the whole of it with settings too small to keep that."""

import sys
from pathlib import Path

import numpy as np
import pytest

from nado.oracles import load_oracle
from nado.oracles.checking import check_oracle
from nado.storage import read_json

DEMO = Path(__file__).parents[1] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import run_demo  # noqa: E402

SMALL = (
    "draw.samples_per_prompt=1",
    "train.steps=2",
    "train.batch_size=32",
    "train.evaluate_every=0",
    "generate.prompts=6",
)


def test_words_in_fours():
    oracle = load_oracle(f"{DEMO / 'word_count.py'}:WordsInFours")
    texts = ["Four words are here.", "Only three here.", "", "One two three four five six seven eight"]
    check_oracle(oracle, [""] * 4, texts)
    assert oracle([""] * 4, texts).tolist() == [True, False, False, True]
    progress = np.stack(oracle.progress([""] * 4, texts))
    assert progress.argmax(axis=1).tolist() == [0, 3, 0, 0]
    assert (progress.sum(axis=1) == 1).all()
    assert len(oracle.progress_names("")) == progress.shape[1]


@pytest.mark.parametrize(
    ("base", "guided", "auc", "broken"),
    [
        (0.25, 0.85, 0.55, None),
        (0.31, 0.85, 0.55, "the base satisfies the oracle in under 30 %"),
        (0.25, 0.79, 0.55, "the trained guide does in over 80 %"),
        (0.25, 0.85, 0.76, "no token's presence reaches an AUC of 0.75"),
    ],
)
def test_what_it_promises(base, guided, auc, broken, capsys):
    held = run_demo.promise_held({"base": base, "trained guide": guided}, auc)
    assert held is (broken is None)
    told = capsys.readouterr().err
    assert (broken in told) if broken else told == ""


def test_all_of_it_and_a_promise_that_is_not_kept_is_a_failure(tmp_path, capsys):
    arguments = [word for each in SMALL for word in ("--set", each)]
    assert run_demo.main(["--folder", str(tmp_path / "demo"), *arguments]) == 1
    out, err = capsys.readouterr()
    assert "not so: the trained guide does in over 80 %" in err
    for expected in ("trained guide", "KL(q‖p)", " words  ", "No single token decides", "nado serve"):
        assert expected in out
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    assert (
        f"--oracle {run_demo.ORACLE}" in out
    )  # a guide names its oracle's file, but nothing is executed unasked
    assert load_oracle(str(DEMO.parents[1] / run_demo.ORACLE)).name == "words in fours"
    found = read_json(tmp_path / "demo" / "evaluate" / "evaluation.json")
    assert found["prompts"] == 6
    assert not found["prompts_seen_in_training"]


def test_another_study_in_its_folder_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "draw").mkdir()
    (tmp_path / "draw" / "stage.json").write_text('{"finished": true}')
    assert run_demo.main(["--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: expected")
