"""The command line: a whole study through subprocesses, and every verb, exit code and wrong use."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import small_models
from nado.cli import VERBS, load_verb, main
from nado.cli.run import as_settings
from nado.cli.settings import Settings
from nado.study.reading import apply_settings
from test_study import STUDY, make_study

ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
Invoke = Callable[..., tuple[int, str, str]]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "nado.cli", *map(str, arguments)]


def run(*arguments: object, text: str | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """A command as a process of its own: its exit code, stdout and stderr."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, input=text, cwd=cwd, env=ENVIRONMENT, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was run from a terminal: its file."""
    file = make_study(tmp_path_factory.mktemp("cli"))
    code, out, err = run("run", file, "--json")
    assert code == 0, err
    file.with_name("first.json").write_text(out)
    file.with_name("first.err").write_text(err)
    return file


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Invoke:
    """Commands in this very process, through `main`: as `run`, without the seconds that imports take."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object, text: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nado", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, out, err

    return call


def failed(answer: tuple[int, str, str]) -> str:
    """The one line of a command that failed with exit code 1 and gave no data."""
    code, out, err = answer
    assert (code, out) == (1, ""), err
    assert err.startswith("error: expected "), err
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").strip()


# --- a whole study ------------------------------------------------------------------------------------


def test_a_study_runs_from_toml_to_evaluation(study: Path) -> None:
    evaluation = json.loads(study.with_name("first.json").read_text())
    folder = study.with_suffix("")
    assert json.loads((folder / "evaluate" / "evaluation.json").read_text()) == evaluation
    rates = {(row["system"], row["exact_end"]): row["measures"]["satisfied"] for row in evaluation["systems"]}
    assert rates["trained guide", False]["low"] > rates["base", False]["high"]
    progress = study.with_name("first.err").read_text().splitlines()
    assert [line.split(" ")[0] for line in progress] == [
        "draw:",
        "label:",
        "train:",
        "generate:",
        "evaluate:",
    ]
    assert {each.name for each in (folder / "train").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "README.md",
        "training.json",
        "calibration.json",
        "held_out.parquet",
        "oracle.json",
        "base.json",
        "stage.json",
    }


def test_a_second_run_reuses_everything_and_prints_a_table(study: Path, invoke: Invoke) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in study.with_suffix("").rglob("*") if path.is_file()}
    code, out, err = invoke("run", study)
    assert code == 0
    assert err.count("reused") == 5
    assert "\x1b" not in out  # no colour where there is no terminal
    assert "trained guide" in out
    assert out.splitlines()[-1] == str(study.with_suffix("") / "evaluate" / "evaluation.json")
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_a_run_that_is_killed_is_taken_up_where_it_stopped(
    study: Path, tmp_path: Path, invoke: Invoke
) -> None:
    folder = tmp_path / "killed"
    settings = [
        "--folder",
        folder,
        "--until",
        "train",
        "--set",
        "train.steps=120",
        "--set",
        "train.save_every=5",
    ]
    process = subprocess.Popen(
        command("run", study, *settings), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    latest = folder / "train" / "checkpoints" / "latest.json"
    until = time.monotonic() + 60
    while not latest.exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    began = json.loads(latest.read_text())["step"]
    assert 5 <= began < 120
    stage = json.loads((folder / "train" / "stage.json").read_text())
    assert stage["finished"] is False
    code, out, err = invoke("run", study, *settings)
    assert (code, out.strip()) == (0, str(folder / "train"))
    assert "draw: reused" in err
    assert "train: taken up" in err
    history = json.loads(latest.read_text())["history"]
    assert [row["step"] for row in history] == list(range(1, 121))


def test_an_interrupt_is_exit_code_130(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    process = subprocess.Popen(
        command("run", study, "--folder", folder, "--set", "train.steps=100000"),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores interrupts, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("draw: begun")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_another_config_is_refused_and_nothing_is_lost(study: Path, invoke: Invoke) -> None:
    line = failed(invoke("run", study, "--set", "draw.seed=1"))
    assert "differs in draw.seed. Use --force" in line
    assert (study.with_suffix("") / "evaluate" / "evaluation.json").exists()


# --- verb by verb -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small base and prompts."""
    return make_study(tmp_path_factory.mktemp("verbs")).parent


def test_draw_label_train_generate_evaluate_one_after_the_other(workplace: Path, invoke: Invoke) -> None:
    where, folder = Path.cwd(), workplace
    drawing = ["draw", "--base", folder / "base", "--length-limit", 12, "--prompts", folder / "prompts.txt"]
    drawing += ["--template", "a {condition}", "--samples-per-prompt", 16, "--out", "samples"]
    code, out, _ = invoke(*drawing, "--json")
    assert code == 0
    assert json.loads(out)["texts"] == 36 * 16
    assert "differs in seed" in failed_after_progress(invoke(*drawing, "--seed", 3))
    assert invoke(*drawing, "--seed", 3, "--force")[0] == 0
    assert invoke(*drawing, "--force")[0] == 0

    oracle = '{name = "keywords", inflections = false, at_least = 1}'
    code, out, _ = invoke("label", "samples", "--oracle", oracle, "--json")
    labelled = json.loads(out)
    assert (code, labelled["texts"]) == (0, 576)
    assert 0.1 < labelled["value"] < 0.4

    training = ["train", "samples", "--out", "guide", "--size", 32, "--layers", 1, "--heads", 2]
    training += ["--steps", 40, "--learning-rate", "6e-3", "--ramp-steps", 5, "--batch-size", 256]
    code, out, _ = invoke(*training, "--json")
    assert (code, json.loads(out)["steps"]) == (0, 40)
    code, out, err = invoke(*training)
    assert (code, err) == (0, "reused: guide holds this very guide\n")
    assert "differs in train.seed. Use --force" in failed(invoke(*training, "--seed", 1))

    code, out, _ = invoke(
        "evaluate", "--guide", "guide", "--prompts", folder / "prompts.txt", "--out", "e", "--json"
    )
    evaluation = json.loads(out)
    assert (code, evaluation["prompts"], len(evaluation["systems"])) == (0, 36, 6)
    assert json.loads((where / "e" / "evaluation.json").read_text()) == evaluation


def failed_after_progress(answer: tuple[int, str, str]) -> str:
    """The error of a command that had begun."""
    code, out, err = answer
    assert (code, out) == (1, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("error: expected ")
    return last


def test_draw_prints_samples_on_stdout(workplace: Path, invoke: Invoke) -> None:
    base = ["--base", workplace / "base", "--length-limit", 6, "--samples-per-prompt", 2]
    code, out, _ = invoke("draw", *base, "--prompts", "-", "--out", "-", text="the dog\na cat\n")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row["prompt"] for row in rows]) == (0, ["the dog", "the dog", "a cat", "a cat"])
    assert all(len(row["tokens"]) == len(row["log_p"]) <= 6 for row in rows)
    _, again, _ = invoke("draw", *base, "--prompts", "-", "--out", "-", text='{"prompt": "the dog"}\n')
    assert [json.loads(line)["text"] for line in again.splitlines()] == [row["text"] for row in rows[:2]]


def test_label_reads_texts_from_stdin_and_prints_them_with_answers(invoke: Invoke) -> None:
    lines = '{"text": "a dog", "condition": "dog, cat"}\n'
    lines += '{"text": "a cat and dogs", "condition": "dog, cat", "n": 1}\n'
    code, out, _ = invoke("label", "-", "--oracle", "keywords", text=lines)
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["satisfied"], first["parts"]) == (False, [True, False])
    assert (second["satisfied"], second["parts"], second["n"]) == (True, [True, True], 1)


def test_generate_by_keywords_and_prompts_in_every_way(study: Path, invoke: Invoke) -> None:
    guide = study.with_suffix("") / "train"
    dogs = ["generate", "--guide", guide, "--keywords", "dog,  ball"]
    code, out, err = invoke(*dogs)
    assert (code, len(out.splitlines())) == (0, 4)
    satisfied = sum(bool({"dog", "ball"} & set(line.split())) for line in out.splitlines())
    assert re.fullmatch(rf"[0-{satisfied}] of 4 satisfy keywords \(exact end on\)\n", err)
    assert invoke(*dogs)[1] == out
    assert invoke(*dogs, "--seed", 1)[1] != out

    code, out, _ = invoke(*dogs, "--greedy", "--inspect", "--json")
    row = json.loads(out)
    assert (row["prompt"], row["condition"], row["exact_end"]) == ("a dog, ball", "dog, ball", True)
    assert len(row["inspect"]) == len(row["tokens"])
    for step in row["inspect"]:
        assert step["q"] == pytest.approx(step["p"] * step["R"] / step["S"], rel=1e-3)
    assert "the base's choice" in invoke(*dogs, "--greedy", "--inspect")[1]

    code, out, err = invoke(*dogs, "--beams", 3, "--count", 2, "--no-exact-end", "--json")
    assert [json.loads(line)["exact_end"] for line in out.splitlines()] == [False, False]

    code, out, _ = invoke(
        "generate", "--guide", guide, "--prompts", "-", "--count", 3, "--json", text="dog, cat\nred, old\n"
    )
    assert [json.loads(line)["condition"] for line in out.splitlines()] == ["dog, cat"] * 3 + ["red, old"] * 3

    code, out, err = invoke(*dogs, "--verified", "--count", 2, "--json")
    assert code == 0
    for line in out.splitlines():
        row = json.loads(line)
        assert row["status"] == "verified"
        assert {"dog", "ball"} & set(row["text"].split())

    code, out, _ = invoke(*dogs, "--count", 60, "--strength", 0, "--no-exact-end", "--json")
    alone = sum(json.loads(line)["satisfied"] for line in out.splitlines())
    code, out, _ = invoke(*dogs, "--count", 60, "--no-exact-end", "--json")
    assert sum(json.loads(line)["satisfied"] for line in out.splitlines()) > alone + 15


def test_a_dial_is_measured_once_and_any_rate_can_be_asked_for(study: Path, invoke: Invoke) -> None:
    guide, asked = study.with_suffix("") / "train", "dog, cat\nred, old\n"
    measure = [
        "dial",
        "--guide",
        guide,
        "--prompts",
        "-",
        "--count",
        100,
        "--strengths",
        "1,2,4",
        "--out",
        "d",
    ]
    code, out, err = invoke(*measure, text=asked)
    assert code == 0, err
    assert err.splitlines()[-1] == "written to d"
    assert re.search(r"0 \(p itself\) +│ \d+\.\d% \[.* │ 0\.00 +│ yes", out)
    again = invoke(*measure, "--json", text=asked)
    assert json.loads(again[1]) == json.loads(Path("d").read_text())
    assert again[2].splitlines() == ["4 strengths were measured before", "written to d"]
    two = invoke(*measure[:-4], "--strengths", "2", "--out", "two", "--json", text=asked)
    more = invoke(*measure[:-4], "--strengths", "1,4", "--out", "two", "--json", text=asked)
    assert [line.split(":")[0] for line in two[2].splitlines()[:2]] == ["strength 0", "strength 2"]
    assert [line.split(":")[0] for line in more[2].splitlines()[:2]] == ["strength 1", "strength 4"]
    assert json.loads(more[1]) == json.loads(again[1])
    other = invoke(*measure[:-1], "two", "--seed", 5, text=asked)
    assert "the dial that was there was measured in another way: it is replaced" in other[2]
    Path("no_dial").write_text("{}")
    assert invoke(*measure[:-1], "no_dial", text=asked)[2].splitlines()[-1] == "written to no_dial"
    stops = sorted(json.loads(Path("d").read_text())["measured"], key=lambda stop: stop["rate"])
    assert stops[0]["strength"] == 0
    assert {stop["strength"] for stop in stops} == {0, 1, 2, 4}
    rate = (stops[0]["rate"] + stops[-1]["rate"]) / 2

    words = [
        "generate",
        "--guide",
        guide,
        "--prompts",
        "-",
        "--dial",
        "d",
        "--target-rate",
        rate,
        "--count",
        200,
    ]
    code, out, err = invoke(*words, "--json", text=asked)
    rows = [json.loads(line) for line in out.splitlines()]
    got = sum(row["satisfied"] for row in rows) / len(rows)
    assert abs(got - rate) < 0.15  # of 400 texts, beside stops of 200 each: four standard errors
    assert err.startswith(f"expected to satisfy: {rate:.1%} [")
    assert {row["exact_end"] for row in rows} == {False}

    for more, found in (
        (["--greedy", "--count", 1], "found greedy search"),
        (["--inspect"], "found --inspect"),
        (["--exact-end"], "found --exact-end"),
        (["--strength", 2], "found a strength of 2"),
        (["--doubt", 0.1], "expected the doubt this dial was measured with, 0; found 0.1"),
        (
            ["--oracle", '{name = "keywords", at_least = 1}'],
            "expected the oracle this dial was measured with",
        ),
    ):
        assert found in failed(invoke(*words, *more, text=asked))
    unsaid = [word for word in words if word not in ("--target-rate", rate)]
    assert "expected --target-rate with --dial" in failed(invoke(*unsaid, text=asked))
    Path("rate.toml").write_text(f"[generate]\ntarget_rate = {rate}\n")
    assert invoke(*unsaid, "--config", "rate.toml", text=asked)[2] == err
    assert invoke(*measure, "--config", "rate.toml", text=asked)[0] == 0  # whose rate is not a dial's
    assert "found '1;2'" in failed(invoke(*measure, "--strengths", "1;2", text=asked))
    Path("folder").mkdir()
    assert "to write the file folder; found a folder" in failed(invoke(*measure[:-1], "folder", text=asked))

    # What a dial was measured with need not be said again.
    assert invoke(*measure, "--doubt", 0.05, text=asked)[0] == 0
    assert invoke(*words, text=asked)[0] == 0
    assert "expected the doubt this dial was measured with, 0.05; found 0" in failed(
        invoke(*words, "--doubt", 0, text=asked)
    )
    embedded = ["dial", "--guide", "keywords", "--prompts", "-"]
    assert "expected --out with an embedded guide" in failed(invoke(*embedded, text=asked))


def test_a_soft_rate_is_for_sampling(study: Path, invoke: Invoke) -> None:
    dogs = [
        "generate",
        "--guide",
        study.with_suffix("") / "train",
        "--keywords",
        "dog, ball",
        "--target-rate",
        0.5,
    ]
    assert invoke(*dogs)[0] == 0
    assert "expected sampling for a target rate of 0.5" in failed(invoke(*dogs, "--greedy"))
    assert "expected no exact end with a target rate below 1" in failed(invoke(*dogs, "--exact-end"))


def test_a_guide_with_a_python_oracle_needs_it_named(workplace: Path, invoke: Invoke) -> None:
    Path("mine.py").write_text(
        "from nado.oracles import oracle\n\n\n@oracle\ndef short(text):\n    return len(text.split()) < 5\n"
    )
    Path("s.toml").write_text(
        STUDY.split("[oracle]")[0].replace('"base"', f'"{workplace}/base"')
        + f'[oracle]\nname = "mine.py:short"\n[prompts]\nfile = "{workplace}/prompts.txt"\n'
        + "[label]\nprefixes = true\n[draw]\nsamples_per_prompt = 4\n"
        + "[guide]\nsize = 16\nlayers = 1\nheads = 2\n"
        + "[train]\nsteps = 3\n"
    )
    assert invoke("run", "s.toml", "--until", "train")[0] == 0
    asked = ["generate", "--guide", "s/train", "--prompts", "-"]
    assert failed(invoke(*asked, text="dog, cat\n")) == (
        "expected the oracle short, whose progress this guide reads; found only the name of its Python file. "
        "Name it: --oracle file.py:name. No file is executed that you have not named."
    )
    assert invoke(*asked, "--oracle", "mine.py:short", text="dog, cat\n")[0] == 0


def test_check_prints_every_mistake_or_an_estimate(study: Path, invoke: Invoke) -> None:
    code, out, _ = invoke("check", study, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    assert found["estimate"]["basis"] == "estimate"
    code, out, err = invoke("check", study, "--set", "train.stepz=3", "--set", "oracle.name=keywrds")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "[train]: expected a known key; found 'stepz'. Did you mean steps?",
        "[oracle]: expected a shipped oracle or file.py:name; found 'keywrds'. Did you mean keywords?",
    ]


# --- wrong usage --------------------------------------------------------------------------------------


def test_empty_unknown_and_too_many_keywords(study: Path, invoke: Invoke) -> None:
    guide = ["generate", "--guide", study.with_suffix("") / "train"]
    assert failed(invoke(*guide, "--keywords", " , ")) == (
        "expected at least one keyword; found ' , '. Write --keywords \"dog, ball, beach\"."
    )
    assert failed(invoke(*guide, "--keywords", "🐶, ball")) == (
        "expected keywords that the base can write; found '🐶'. Its vocabulary has no tokens for it: use "
        "words."
    )
    many = ", ".join(["dog"] * 10_000)
    line = failed(invoke(*guide, "--keywords", many))
    assert line.startswith(
        "expected prompts of at most 52 tokens (the model's context less the length limit of 12)"
    )
    assert len(line) < 300
    assert "expected conditions with at most 3 bits of progress" in failed(
        invoke(*guide, "--keywords", "dog, a, the")
    )
    assert failed(invoke(*guide)) == (
        'expected either --keywords or --prompts; found neither. Write --keywords "dog, ball, beach".'
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["run", "none.toml"],
            "expected a study file none.toml; found the error: No such file or directory.",
        ),
        (["run", "broken.toml"], "expected valid TOML in broken.toml; found the error: "),
        (["run", "long.toml"], "expected prompts of at most 52 tokens"),
        (
            ["run", "unknown.toml"],
            "expected a shipped oracle or file.py:name; found 'keywrds'. Did you mean keywords?",
        ),
        (
            ["run", "positive.toml"],
            "expected samples of both kinds to learn from; found no satisfied text among",
        ),
        (["label", "nothing", "--oracle", "keywords"], "expected a folder of samples at nothing; found"),
        (["label", "-"], "expected an oracle; found none. Name it: --oracle keywords."),
        (["label", "-", "--oracle", "{name = }"], "expected an oracle as a TOML inline table"),
        (
            ["train", "nothing", "--out", "g", "--oracle", "keywords"],
            "expected a folder of samples at nothing; found none.",
        ),
        (["generate", "--guide", "nothing", "--keywords", "dog"], "expected a guide in the folder nothing"),
        (
            ["generate", "--guide", "g", "--keywords", "a", "--greedy", "--beams", "2"],
            "expected one of --sample,",
        ),
        (
            ["draw", "--base", "base", "--length-limit", "x12", "--prompts", "p", "--out", "o"],
            None,
        ),
        (
            ["draw", "--base", "base", "--length-limit", "5", "--prompts", "none.txt", "--out", "o"],
            "expected a file of records; found nothing at",
        ),
        (
            [
                "draw",
                "--base",
                "base",
                "--length-limit",
                "5",
                "--completion",
                "eso",
                "--prompts",
                "p",
                "--out",
                "o",
            ],
            "expected 'eos' or 'limit' as completion ([base]); found 'eso'. Did you mean eos?",
        ),
        (["steer"], None),
        (["run"], None),
        (["generate"], "expected either --keywords or --prompts; found neither."),
    ],
)
def test_wrong_usage_is_one_helpful_line(
    workplace: Path, invoke: Invoke, arguments: list[str], expected: str | None
) -> None:
    here = STUDY.replace('"base"', f'"{workplace}/base"').replace(
        '"prompts.txt"', f'"{workplace}/prompts.txt"'
    )
    Path("broken.toml").write_text("[base\n")
    Path("long.txt").write_text("dog\n" + "dog, " * 60 + "\n")
    Path("long.toml").write_text(here.replace(f"{workplace}/prompts.txt", "long.txt").replace("0.25", "0"))
    Path("unknown.toml").write_text(here.replace("keywords", "keywrds"))
    Path("positive.toml").write_text(here.replace('name = "keywords"', 'name = "keywords"\nwords = "zebra"'))
    code, out, err = invoke(*arguments)
    if expected is None:
        assert (code, out) == (2, "")
    else:
        assert (code, out) == (1, "")
        assert "Traceback" not in err
        assert err.splitlines()[-1].startswith(f"error: {expected}"), err


def test_a_damaged_guide_or_a_guide_of_another_base_is_refused(
    study: Path, invoke: Invoke, tmp_path: Path
) -> None:
    guide = shutil.copytree(study.with_suffix("") / "train", tmp_path / "guide")
    small_models.save("llama", tmp_path / "other", seed=3)
    asked = ["generate", "--guide", guide, "--keywords", "dog, ball"]
    assert "expected the base this guide was trained for" in failed(
        invoke(*asked, "--base", tmp_path / "other")
    )
    code, _, _ = invoke(*asked, "--base", tmp_path / "other", "--allow-other-base")
    assert code == 0
    (guide / "model.safetensors").unlink()
    assert "expected weights as safetensors" in failed(invoke(*asked))


# --- the whole ----------------------------------------------------------------------------------------


def test_every_verb_is_listed_with_the_first_line_of_its_own_help() -> None:
    for name, text in VERBS.items():
        own = " ".join((load_verb(name).help or "").split("\n\n")[0].split())
        assert own == text, name


def test_help_of_options_comes_from_the_config_classes(invoke: Invoke) -> None:
    for verb, expected in (
        ("train", "Optimiser steps in all (default: 1000)."),
        ("draw", "Texts drawn for each prompt (default: 32)."),
        ("evaluate", "Share of texts that shall satisfy the oracle (default: 1.0)."),
        ("generate", "R to this power: 0 is the base alone, above 1 pulls harder (default: 1.0)."),
        ("label", "Processes that ask (default: 1)."),
    ):
        code, out, _ = invoke(verb, "--help")
        assert code == 0
        assert expected in " ".join(re.sub("[│┃|]", " ", out).split()), verb


def test_the_command_line_is_imported_in_well_under_a_second_and_without_torch() -> None:
    script = (
        "import sys, time; began = time.perf_counter(); import nado.cli; "
        "print(time.perf_counter() - began, 'torch' in sys.modules)"
    )
    fastest = 9.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        seconds, torch = done.stdout.split()
        assert torch == "False"
        fastest = min(fastest, float(seconds))
    assert fastest < 1.0


def test_a_reader_that_has_enough_is_no_error(workplace: Path) -> None:
    arguments = ["draw", "--base", workplace / "base", "--length-limit", 6, "--out", "-"]
    arguments += ["--samples-per-prompt", 100, "--prompts", workplace / "prompts.txt"]
    process = subprocess.Popen(
        command(*arguments), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b'{"row": 0')
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    process.wait(timeout=60)
    assert errors == "drawing 100 texts for each of 36 prompts\n"


def test_stages_are_described_for_whoever_looks(study: Path) -> None:
    record: dict[str, Any] = json.loads((study.with_suffix("") / "train" / "stage.json").read_text())
    assert record["finished"] is True
    assert record["config"]["steps"] == 60
    assert record["versions"]["nado"]
    assert set(record["inputs"]) == {"conditions", "the stage label"}


def test_options_of_run_replace_what_the_study_says() -> None:
    asked = Settings({"distributed": {"engine": "ray", "shares": 4, "divide_base": True}}, None)
    tables: dict[str, Any] = {"distributed": {"engine": "local", "processes": 2}}
    apply_settings(tables, as_settings(asked))
    assert tables == {"distributed": {"engine": "ray", "processes": 2, "shares": 4, "divide_base": True}}
