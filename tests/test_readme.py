"""What the README shows runs as it stands, with a small model in place of the hub's."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import small_models
from nado.oracles import check_oracle, load_oracle
from nado.oracles.loading import SHIPPED, _resolve
from nado.study import parse_study, read_study, run_study

README = Path(__file__).resolve().parent.parent / "README.md"
GENERATING = README.parent / "docs" / "generating.md"
ORACLES = README.parent / "docs" / "oracles.md"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def python_of(page: Path) -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run_python_of(page: Path, folder: Path) -> None:
    """Run the page's block of Python that names the hub's model, with a small one in its place."""
    (block,) = [each for each in python_of(page) if HUB_NAME in each]
    model = small_models.save("llama", folder / "model")
    exec(compile(block.replace(HUB_NAME, str(model)), page.name, "exec"), {})


def test_the_quickstart_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    block = python_of(README)[0]
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 15
    exec(compile(block, README.name, "exec"), {})
    *sampled, greedy = capsys.readouterr().out.splitlines()
    assert len(sampled) == 3
    assert all(line.startswith(("True ", "False ")) for line in sampled)
    assert re.search(r"\. \[\d+(, \d+)+\]$", greedy)


def test_the_picture_of_the_readme_can_be_made_again(tmp_path: Path) -> None:
    sys.path.insert(0, str(README.parent / "docs" / "pictures"))
    import draw_guidance

    draw_guidance.main(["cook, food, kitchen, pan", "--output", str(tmp_path / "again.svg")])
    again = (tmp_path / "again.svg").read_text(encoding="utf-8")
    for expected in ("does not have them all", "has all of them", "<polyline"):
        assert expected in again
        assert expected in (README.parent / "docs" / "pictures" / "guidance.svg").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python_of(README, tmp_path)
    assert re.fullmatch(
        r"\d+\.\d% of p's texts end within 32 tokens and have all keywords\n", capsys.readouterr().out
    )


def test_the_python_of_the_page_on_generating_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python_of(GENERATING, tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("dog") + printed.count("False") >= 4
    assert "verified" in printed or "not found" in printed


def test_the_dial_of_the_page_on_generating_turns(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [each for each in python_of(GENERATING) if "measure_dial" in each]
    exec(compile(block, GENERATING.name, "exec"), {})
    assert re.match(r"70\.0% expected \[.*dog.*pan.*\]\n", capsys.readouterr().out)


def test_the_study_of_the_readme_has_no_mistakes(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "study.toml").write_text(block, encoding="utf-8")
    study, problems = parse_study(tmp_path / "study.toml", [])
    assert not problems
    assert study is not None
    assert study.train.steps == 2000


def test_every_study_of_the_readme_has_a_folder_of_its_own() -> None:
    """A folder that another command has filled is refused."""
    runs = re.findall(r"^nado run (\S+)\.toml([^#\n]*)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(runs) >= 2
    named = [re.search(r"--folder (\S+)", options) for _, options in runs]
    folders = [own.group(1) if own else stem for own, (stem, _) in zip(named, runs, strict=True)]
    assert len(set(folders)) == len(folders)


def test_the_oracle_of_the_readme_is_one() -> None:
    (block,) = [each for each in python_of(README) if "@nado.oracle" in each]
    found: dict[str, Any] = {}
    exec(compile(block, README.name, "exec"), found)
    texts = ["A dog and a cat.", "A dog sees the cat.", ""]
    assert found["no_word_twice"]([""] * 3, texts).tolist() == [False, True, True]


def test_the_oracles_of_the_page_on_them_are_oracles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, scored = python_of(ORACLES)
    monkeypatch.chdir(tmp_path)
    Path("my_oracle.py").write_text(own, encoding="utf-8")
    first, says = load_oracle("my_oracle.py:no_word_twice"), load_oracle("my_oracle.py:says")
    assert first.cheap
    assert not says.cheap
    texts = ["A dog, a cat.", "", "Dog"]
    assert says(["dog"] * 3, texts).tolist() == [True, False, True]
    found: dict[str, Any] = {}
    exec(compile(scored, ORACLES.name, "exec"), found)
    short = found["ShortWords"]()
    for each in (first, says, short):
        check_oracle(each, ["dog"] * 3, texts)
    assert [row.tolist() for row in short.progress([""], ["a dog beautifully"])] == [
        [True, False, False, False]
    ]


def test_the_first_study_of_the_page_on_oracles_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", ORACLES.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "my_oracle.py").write_text(python_of(ORACLES)[0], encoding="utf-8")
    (tmp_path / "prompts.txt").write_text(
        "dog, ball\nman, park\ncat, tree\nwoman, street\n", encoding="utf-8"
    )
    (tmp_path / "no_word_twice.toml").write_text(block, encoding="utf-8")
    few = ["train.steps=2", "train.batch_size=8", "generate.prompts=1", "generate.count=1"]
    study = read_study(tmp_path / "no_word_twice.toml", few)
    found = run_study(study, tmp_path / "study")
    assert found is not None
    assert {each["exact_end"] for each in found["systems"]} == {False, True}  # it is cheap


def test_the_shipped_oracles_and_their_arguments_are_all_there() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| .* \| (.*) \|$", ORACLES.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name for name, _, _ in rows} == set(SHIPPED)
    for name, kind, arguments in rows:
        reference = SHIPPED[name]
        assert reference.partition(":")[2].split(".")[0] == kind
        parameters = inspect.signature(_resolve(reference)).parameters.values()
        named = [
            f"**`{each.name}`**" if each.default is each.empty else f"`{each.name}`" for each in parameters
        ]
        assert arguments.split(", ") == named, name


def test_every_file_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
