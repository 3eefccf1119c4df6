"""The embedded model: there, small enough, and loadable by anyone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nado
import nado.tiny
from nado.errors import InputError
from nado.guidance import Guidance
from nado.huggingface import load_model
from nado.study.guides import use_guide
from nado.study.reading import make_section
from nado.tiny import GUIDES, locate_base, locate_guide

HERE = Path(nado.tiny.__file__).parent


def test_all_of_it_takes_at_most_16_megabytes():
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < 16e6


def test_names_stand_for_folders_and_paths_for_themselves(tmp_path):
    assert locate_base("tiny") == HERE / "base"
    assert locate_base("./tiny") == "./tiny"
    assert locate_guide() == locate_guide("keywords") == HERE / "keywords"
    assert locate_guide(tmp_path) == tmp_path
    assert locate_guide("not/there") == Path("not/there")


@pytest.mark.parametrize("name", GUIDES)
def test_a_folder_of_that_name_comes_before_an_embedded_guide(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert locate_guide(name) == Path(name)


@pytest.mark.parametrize("name", GUIDES)
def test_an_embedded_guide_finds_its_base_wherever_it_is_asked_for(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for model in (nado.load(name, device="cpu"), nado.load(name, base="tiny", device="cpu")):
        assert model.guides[0].config.base_fingerprint == model.base.fingerprint
    assert use_guide(locate_guide(name), device="cpu").guide.config.base_name == "tiny"


def test_a_study_beside_a_folder_of_that_name_means_the_embedded_base(tmp_path):
    for name in ("tiny", "mine"):
        (tmp_path / name).mkdir()
    found = [
        make_section("base", {"name": name, "length_limit": 8}, tmp_path, []) for name in ("tiny", "mine")
    ]
    assert [each.name for each in found] == ["tiny", str(tmp_path / "mine")]


def test_a_base_that_cannot_be_loaded_is_one_error_for_everyone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "vit"}')
    for name, named in (("empty", tmp_path / "empty"), (tmp_path / "other", tmp_path / "other")):
        for load in (
            lambda name=name: nado.load("keywords", base=name),
            lambda name=name: use_guide(locate_guide("keywords"), name=str(name)),
            lambda named=named: load_model(named, length_limit=32),
        ):
            with pytest.raises(InputError) as error:
                load()
            assert str(error.value).startswith(
                f"expected a base that can be loaded as {str(named)!r}; found the error: "
            )
            assert str(error.value).endswith(
                "Give a folder or .gguf file that is there, or a hub name that can be reached."
            )


def test_a_base_with_code_of_its_own_is_not_run(tmp_path):
    code = {"AutoConfig": "homemade.HomemadeConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "homemade", "auto_map": code}))
    (tmp_path / "homemade.py").write_text("raise SystemExit('executed')\n")
    with pytest.raises(InputError) as error:
        nado.load("keywords", base=tmp_path)
    assert str(error.value) == (
        f"expected a base that transformers has the code of; found code of its own in {tmp_path}. "
        "Read it; load_model(…, trust_remote_code=True) runs it."
    )


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


# --- its guides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_small_and_knows_its_base_and_its_oracle(name):
    model = nado.load(name, device="cpu")
    assert sum(each.numel() for each in model.guides[0].parameters()) < 1.3e6
    assert model.guides[0].config.base_fingerprint == model.base.fingerprint
    assert model.guides[0].config.oracle_fingerprint == model.oracle.fingerprint
    assert all(each.dtype == torch.float32 for each in model.guides[0].parameters())


@pytest.mark.parametrize(("name", "least"), [("keywords", 0.08), ("positive", 0.35)])
def test_a_guide_raises_what_its_oracle_asks_for(name, least):
    """120 texts with and without, no exact end: 15 and 55 points were measured, the error is about 6."""
    model = nado.load(name, device="cpu")
    sets = ["dog, ball, beach", "girl, horse, jump, fence", "man, guitar, stage", "cook, food, kitchen, pan"]
    conditions = [each for each in sets for _ in range(30)]
    prompts = [f"{each.replace(', ', ' ')} =" for each in conditions]
    found = []
    for strength in (0.0, 1.0):
        torch.manual_seed(0)
        texts = model.generate_texts(
            prompts,
            conditions,
            guidance=Guidance(strength=strength, exact_end=False),
            do_sample=True,
        )
        found.append(sum(bool(each.satisfied) for each in texts) / len(texts))
    assert found[1] > found[0] + least
