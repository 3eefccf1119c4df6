"""The embedded model: there, small enough, and loadable by anyone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nado.tiny
from nado.errors import InputError
from nado.huggingface import load_model
from nado.tiny import locate_base, locate_guide

HERE = Path(nado.tiny.__file__).parent


def test_all_of_it_takes_at_most_16_megabytes():
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 16e6


def test_names_stand_for_folders_and_paths_for_themselves(monkeypatch, tmp_path):
    assert locate_base("tiny") == HERE / "base"
    assert locate_base("./tiny") == "./tiny"
    (tmp_path / "keywords").mkdir()
    monkeypatch.setattr(nado.tiny, "_HERE", tmp_path)
    assert locate_guide() == locate_guide("keywords") == tmp_path / "keywords"
    assert locate_guide(tmp_path) == tmp_path
    assert locate_guide("not/there") == Path("not/there")


def test_a_guide_that_is_not_installed_is_missed_clearly(monkeypatch, tmp_path):
    monkeypatch.setattr(nado.tiny, "_HERE", tmp_path)
    with pytest.raises(InputError, match="expected the embedded guide 'positive'; found none"):
        locate_guide("positive")


def test_the_base_loads_with_transformers_alone():
    model = AutoModelForCausalLM.from_pretrained(HERE / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(HERE / "base")
    asked = tokenizer("dog ball beach =", return_tensors="pt")
    written = model.generate(**asked, max_new_tokens=32, do_sample=False)
    text = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "dog" in text.lower()
    assert text.endswith(".")


def test_its_weights_are_half_floats_on_disk_and_float32_in_memory():
    model = load_model("tiny", length_limit=32, device="cpu")
    assert model.model.dtype == torch.float32
    rounded = {name: value.half().float() for name, value in model.model.state_dict().items()}
    assert all(torch.equal(value, rounded[name]) for name, value in model.model.state_dict().items())


def test_the_card_names_sources_and_licences():
    card = (HERE / "base" / "README.md").read_text(encoding="utf-8")
    licences = ("MIT", "CC BY 2.0 FR", "CC BY 4.0", "Apache-2.0")
    for source in ("CommonGen", "Tatoeba", "COCO", "SmolLM2", *licences):
        assert source in card
