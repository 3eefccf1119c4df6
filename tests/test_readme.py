"""What the README shows runs as it stands, with a small model in place of the hub's."""

import re
import sys
from pathlib import Path

import pytest

import small_models
from nado.study import parse_study

README = Path(__file__).resolve().parent.parent / "README.md"
GENERATING = README.parent / "docs" / "generating.md"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def python_of(page: Path) -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run_python_of(page: Path, folder: Path) -> None:
    """Run the page's last block of Python with a small model in place of the hub's."""
    block = python_of(page)[-1]
    assert HUB_NAME in block
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


def test_the_study_of_the_readme_has_no_mistakes(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "study.toml").write_text(block, encoding="utf-8")
    study, problems = parse_study(tmp_path / "study.toml", [])
    assert not problems
    assert study is not None
    assert study.train.steps == 2000


def test_every_file_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
