"""What the README shows runs as it stands, with a small model in place of the hub's."""

import re
from pathlib import Path

import pytest

import small_models

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 1
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert name in blocks[0]
    folder = small_models.save("llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks[0].replace(name, str(folder)), "README.md", "exec"), {})
    assert re.fullmatch(
        r"\d+\.\d% of p's texts end within 32 tokens and have all keywords\n", capsys.readouterr().out
    )


def test_every_file_the_readme_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
