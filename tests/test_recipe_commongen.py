"""The CommonGen study: its parts, and all of it on a CPU with a random base of two layers."""

import gzip
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from archives import unpack
from nado.errors import InputError
from nado.guide import Guide
from nado.huggingface import CausalModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.samples import read_samples
from nado.storage import read_json, write_json
from nado.study.systems import Written as Text
from nado.study.systems import save_texts
from nado.warpers import Warpers
from small_models import EOS, WORDS, save

RECIPE = Path(__file__).parents[1] / "recipes" / "commongen"
sys.path.insert(0, str(RECIPE))

import collect_guide  # noqa: E402
import comparison_rows  # noqa: E402
import concept_sets  # noqa: E402
import looks_plot  # noqa: E402
import results_page  # noqa: E402
import run_commongen  # noqa: E402
import run_rounds  # noqa: E402
from concept_sets import ConceptSet, as_sentence, learned_sets, read_sets, recombine  # noqa: E402
from dev_decoding import Written, write_base  # noqa: E402
from documents import batches  # noqa: E402
from drawn_texts import cut_chunks, require_endings  # noqa: E402
from final_texts import choose_line, final_rows  # noqa: E402
from fine_tuning import add_adapter, load_base, read_sentences  # noqa: E402
from guide_training import plan_steps, share_time, training_config  # noqa: E402
from key_samples import read_folder  # noqa: E402
from key_settings import WARM_UP, read_key_settings  # noqa: E402
from learning import record_slopes, sparse_loss, whole_loss  # noqa: E402
from progress_log import Clock, Stages  # noqa: E402
from sampling_costs import choose  # noqa: E402
from side_work import TextMaker, score_texts  # noqa: E402
from study_settings import (  # noqa: E402
    SEARCH,
    AdapterSettings,
    BaseSettings,
    DrawSettings,
    FinalSettings,
    GuideSettings,
    Row,
    RowSettings,
    TextSettings,
    read_settings,
)
from table_rows import Scored, against  # noqa: E402

CONCEPTS = ["dog", "cat", "ball", "beach", "man", "woman", "park"]
SETTINGS = """
[base]
length_limit = 10
[adapter]
epochs = 8.0
rank = 4
rows = 4
width = 48
learning_rate = 1e-2
[draw]
samples = 32
large = 2
samples_large = 64
batch = 256
chunk = 500
held_out = 0.2
dev_samples = 16
[guides.main]
title = "a guide of two layers"
size = 32
layers = 2
heads = 4
batch = 64
steps = 150
learning_rate = 3e-3
[guides.light]
title = "a light guide"
reads = "light"
size = 32
batch = 64
steps = 100
learning_rate = 3e-3
[guides.bare]
title = "a bare guide"
size = 32
layers = 1
heads = 4
bare = true
batch = 64
steps = 6
[[rows]]
systems = ["base"]
decodings = ["greedy", "beam", "search0.5", "searchx3"]
beams = 2
[[rows]]
systems = ["untrained", "main", "light"]
exact_end = [false, true]
[[rows]]
systems = ["main"]
decodings = ["beam", "search0.5", "sample"]
strengths = [2.0]
beams = 2
[[rows]]
systems = ["main"]
decodings = ["searchx3"]
exact_end = [true]
[[rows]]
systems = ["bare"]
[[rows]]
systems = ["base"]
decodings = ["sample"]
[[rows]]
systems = ["main"]
decodings = ["sample", "verified", "smc4"]
exact_end = [true]
budget = 3
[final]
decoding = "verified"
unseen = [["dog", "zebra"]]
[costs]
rare = [0.0, 1.0]
rare_samples = 4
middle = [0.0, 1.0]
rates = [0.5]
rate_samples = 2
batch = 64
"""


def write_data(folder: Path) -> Path:
    """Sets of one and two concepts, with sentences in the tiny models' vocabulary."""
    folder.mkdir()
    pairs = [*((word,) for word in CONCEPTS), *itertools.combinations(CONCEPTS, 2)]
    records = [
        {
            "id": number,
            "concepts": list(words),
            "targets": [f"the {' and the '.join(words)} .", f"a {' sees a '.join(words)} ."],
        }
        for number, words in enumerate(pairs)
    ]
    train, dev = records[:20], [{**each, "id": at} for at, each in enumerate(records[3:])]
    lines = {name: "".join(json.dumps(each) + "\n" for each in some) for name, some in
             (("train", train), ("dev", dev))}  # fmt: skip
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(lines["train"].encode()))
    (folder / "dev.jsonl").write_text(lines["dev"], encoding="utf-8")
    forms = {word: [word, f"{word}s"] for word in CONCEPTS}
    asked = [{"id": 7, "concepts": ["cat", "park"]}, {"id": 8, "concepts": ["dog", "man"]}]
    (folder / "test_inputs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    (folder / "concept_forms.json").write_text(json.dumps(forms), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commongen")
    save("llama", folder / "base", tie_word_embeddings=True)
    write_data(folder / "data")
    (folder / "small.toml").write_text(SETTINGS, encoding="utf-8")
    return folder


def arguments(place: Path, *more: str) -> list[str]:
    paths = {"base": "base", "data": "data", "work": "work", "output": "out", "settings": "small.toml"}
    return [*(word for name, path in paths.items() for word in (f"--{name}", str(place / path))), *more]


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    run_commongen.main(arguments(place))
    return place


def rows_of(place: Path) -> dict[str, dict[str, Any]]:
    found = read_json(place / "out" / "commongen.json")["metrics"]["rows"]
    names = (Row(e["system"], e["decoding"], e["strength"], e["exact_end"], e["seed"]).name for e in found)
    return dict(zip(names, found, strict=True))


# --- all of it ----------------------------------------------------------------------------------------


def test_all_of_it_gives_every_line_of_the_table(finished: Path) -> None:
    rows = rows_of(finished)
    settings = read_settings(finished / "small.toml")
    assert set(rows) == {row.name for section in settings.rows for row in section.rows()}
    for row in rows.values():
        assert row["sets"] == 20
        assert row["sets_in_all"] == 25
        assert 0 <= row["coverage"] <= 100
        assert row["perplexity"] > 1
        low, high = row["interval"]["all_covered"]
        assert low <= row["all_covered"] <= high
        assert ("against_base" in row) == (row["system"] != "base")


def test_an_untrained_guide_writes_what_the_base_writes(finished: Path) -> None:
    """Up to the last step, where only the end can still satisfy anything."""
    base, untrained = (
        read_json(finished / "work" / "rows" / name / "texts.json")["written"]
        for name in ("base-greedy", "untrained-greedy-strength1-free")
    )
    assert sum(base["finished"]) > 10
    for one, other in zip(base["tokens"], untrained["tokens"], strict=True):
        assert one[:9] == other[:9]


def test_with_an_exact_end_every_finished_text_covers_its_concepts(finished: Path) -> None:
    for name in ("untrained", "main", "light"):
        row = rows_of(finished)[f"{name}-greedy-strength1-exact"]
        assert row["all_sets"]["all_covered"] >= row["all_sets"]["finished"]


def test_verified_texts_hold_and_say_how_many_draws_they_took(finished: Path) -> None:
    row = rows_of(finished)["main-verified-strength1-exact-seed0"]
    folder = finished / "work" / "rows" / "main-verified-strength1-exact-seed0"
    written = read_json(folder / "texts.json")["written"]
    assert row["all_sets"]["all_covered"] >= 100 * np.mean(written["finished"])
    assert 1 <= row["draws_a_text"] <= 3
    assert row["base_tokens_a_text"] > row["all_sets"]["tokens"]
    assert rows_of(finished)["main-greedy-strength1-free"]["draws_a_text"] is None


def test_particles_satisfy_more_often_than_single_draws(finished: Path) -> None:
    rows = rows_of(finished)
    one, four = (rows[f"main-{kind}-strength1-exact-seed0"] for kind in ("sample", "smc4"))
    assert four["draws_a_text"] == 4
    assert four["all_sets"]["all_covered"] > one["all_sets"]["all_covered"]


def test_the_chosen_configuration_writes_for_sets_without_references(finished: Path) -> None:
    with tarfile.open(finished / "out" / "final.tar") as archive:
        names = {Path(each.name).name for each in archive}
    kinds = {f"{kind}.{name}.jsonl" for kind in ("test", "unseen") for name in ("p", "q", "verified")}
    assert names == kinds | {"stage.json"}
    lines = (finished / "work" / "final" / "test.verified.jsonl").read_text().splitlines()
    assert [json.loads(line)["concepts"] for line in lines] == [["cat", "park"], ["dog", "man"]]
    assert json.loads(lines[0]).keys() == {"id", "concepts", "text"}


def test_the_choosing_sets_choose_and_no_others() -> None:
    def line(strength: float, coverage: float, bleu: float, system: str = "main") -> dict[str, Any]:
        choosing = {"coverage": coverage, "bleu4": bleu}
        return {"system": system, "decoding": "beam", "exact_end": True, "strength": strength,
                "choosing_sets": choosing, "coverage": 0.0, "bleu4": 0.0}  # fmt: skip

    lines = [line(1.0, 96.0, 30.0), line(1.5, 97.5, 25.0), line(2.0, 98.5, 24.0), line(1.0, 99, 99, "bare")]
    settings = FinalSettings()
    chosen = choose_line(lines, settings)
    assert chosen is lines[1]
    assert choose_line(lines[:1], settings) is lines[0]
    assert choose_line(lines[3:], settings) is None
    rows = final_rows(chosen, settings)
    assert [row.name for row in rows.values()] == [
        "base-beam", "main-beam-strength1.5-exact", "main-verified-strength1-exact-seed0"
    ]  # fmt: skip


def test_the_guide_covers_more_than_the_base(finished: Path) -> None:
    main, base = (rows_of(finished)[name] for name in ("main-greedy-strength1-free", "base-greedy"))
    assert main["coverage"] > base["coverage"]
    found = read_json(finished / "out" / "overhead.json")["metrics"]
    assert found["light_gain_share"] == pytest.approx(
        (rows_of(finished)["light-greedy-strength1-free"]["coverage"] - base["coverage"])
        / (main["coverage"] - base["coverage"])
    )


def test_costs_are_those_of_fresh_draws(finished: Path) -> None:
    found = read_json(finished / "out" / "overhead.json")["metrics"]
    sums = {}
    for name in "pq":
        samples = read_samples(finished / "work" / "costs" / name)
        sums[name] = len(samples.ragged("tokens").values) / samples.array("satisfied").sum()
    assert found["base_tokens_ratio_vs_rejection_commongen"] == pytest.approx(sums["p"] / sums["q"])
    assert found["rejection_cpu"]["p"]["tokens_per_satisfying_text"]["value"] == pytest.approx(sums["p"])
    assert [each["asked"] for each in found["soft_rates"]] == [0.5]
    assert found["soft_rates"][0]["low"] <= found["soft_rates"][0]["got"] <= found["soft_rates"][0]["high"]


def test_what_goes_out_is_small_and_can_be_used(finished: Path, tmp_path: Path) -> None:
    out = finished / "out"
    files = {"commongen.json", "overhead.json", "texts.jsonl.gz", "run.log"}
    packed = {"adapter.tar", "guide-light.tar", "final.tar"}
    assert {each.name for each in out.iterdir()} == files | packed
    for name in ("adapter", "guide-light"):
        with tarfile.open(out / f"{name}.tar") as archive:
            unpack(archive, tmp_path)
    model = load_model(finished / "base", adapter=tmp_path / "adapter", length_limit=10)
    config = read_json(tmp_path / "guide-light" / "config.json")
    assert config["base_fingerprint"] == model.fingerprint
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {each.dtype for each in weights.values()} == {torch.bfloat16}
    lines = gzip.decompress((out / "texts.jsonl.gz").read_bytes()).decode().splitlines()
    assert len(lines) == 25 * len(rows_of(finished))


def test_a_second_call_does_nothing_again(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_json(finished / "out" / "commongen.json")["metrics"]["rows"]
    for name in ("fine_tune", "train_guide", "write_guided", "write_base", "prepare"):
        monkeypatch.setattr(run_commongen, name, None)
    run_commongen.main(arguments(finished))
    said = capsys.readouterr().out
    assert said.count("done before") == 4 + 3 + len(before) + 1 + 1
    assert read_json(finished / "out" / "commongen.json")["metrics"]["rows"] == before


def test_guides_that_have_no_time_are_left_out(finished: Path, tmp_path: Path) -> None:
    """The guide of a moment would stand in the table as if it said something."""
    shutil.copytree(finished / "work", tmp_path / "work", ignore=shutil.ignore_patterns("guide-*", "final"))
    own = {"--work": tmp_path / "work", "--output": tmp_path / "out", "--deadline": 0.1}
    run_commongen.main(arguments(finished, *(str(word) for pair in own.items() for word in pair)))
    found = read_json(tmp_path / "out" / "commongen.json")["metrics"]
    assert found["left_out"] == ["main", "light", "bare"]
    assert {row["system"] for row in found["rows"]} == {"base", "untrained"}
    assert not list((tmp_path / "work").glob("guide-*"))


def test_a_guide_that_needs_all_its_time_does_not_share(tmp_path: Path) -> None:
    shared, whole = (GuideSettings("", seconds=40.0, whole=whole) for whole in (False, True))
    assert (shared.fewest_seconds, whole.fewest_seconds) == (20.0, 40.0)
    study = object.__new__(run_commongen.Study)
    study.clock = Clock(tmp_path / "log", deadline=100.0)
    study.settings = replace(read_settings(RECIPE / "top_p.toml"), guides={"a": shared, "b": shared}, rows=())
    assert study.time_for(["a", "b"]) == pytest.approx((100 - 30 - 2 * 18) / 2, abs=1)
    study.settings = replace(study.settings, guides={"a": whole, "b": whole})
    assert study.time_for(["a", "b"]) == 40
    assert plan_steps(tmp_path, replace(whole, steps=500), 40.0, 1.0) == 500  # all of them, on a slow day too


def test_what_guidance_costs_is_measured_on_the_main_runs_own_guide() -> None:
    main, costs = (read_settings(RECIPE / name) for name in ("main.toml", "costs.toml"))
    assert costs.guides["main"] == main.guides["main"]
    assert (costs.adapter, costs.draw) == (main.adapter, main.draw)
    assert set(costs.guides) == {"main", "light"}


def test_a_guide_of_any_size_comes_out_in_pieces(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_guide, "_PIECE", 20_000)
    collect_guide.main(["--work", str(finished / "work"), "--guide", "main", "--output", str(tmp_path)])
    pieces = sorted(tmp_path.glob("guide-main.tar.*"))
    assert len(pieces) > 1
    (tmp_path / "whole.tar").write_bytes(b"".join(each.read_bytes() for each in pieces))
    with tarfile.open(tmp_path / "whole.tar") as archive:
        unpack(archive, tmp_path)
    saved, kept = (
        Guide.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (finished / "work" / "guide-main" / "guide", tmp_path / "guide-main")
    )
    assert all(torch.equal(kept[name], value.half().float()) for name, value in saved.items())


def test_a_further_run_adds_its_lines_and_those_of_p_stay_single(finished: Path) -> None:
    one = read_json(finished / "out" / "commongen.json")
    other = json.loads(json.dumps(one))
    other["command"] = "another"
    for row in other["metrics"]["rows"]:
        row["setting"] = row["setting"] if row["system"] == "base" else "an ablation"
    joined = results_page.join_runs([one, other])["metrics"]
    settings = [row["setting"] for row in joined["rows"]]
    guided = [row for row in one["metrics"]["rows"] if row["system"] != "base"]
    assert settings.count("an ablation") == len(guided)
    assert len(settings) == len(one["metrics"]["rows"]) + len(guided)
    assert [run["command"] for run in joined["runs"]] == [one["command"], "another"]
    other["metrics"]["stages"]["guide-main"]["steps"] += 1
    with pytest.raises(InputError, match="the guide main in one run; found two that differ"):
        results_page.join_runs([one, other])
    again = json.loads(json.dumps(one))
    line = next(row for row in again["metrics"]["rows"] if "against_base" in row)
    line["coverage"] += 1
    with pytest.raises(InputError, match=r"the line .* in one run; found two that differ"):
        results_page.join_runs([one, again])


def test_without_guides_nothing_is_drawn_and_lines_go_into_a_table_of_their_own(
    finished: Path, tmp_path: Path
) -> None:
    alone = ['like = "small.toml"', 'group = "A base alone:"', "[adapter]", "epochs = 1.0"]
    alone += ["[[rows]]", 'systems = ["base"]']
    (finished / "alone.toml").write_text("\n".join(alone), encoding="utf-8")
    own = {"--settings": finished / "alone.toml", "--work": tmp_path / "work", "--output": tmp_path / "out"}
    run_commongen.main(arguments(finished, *(str(word) for pair in own.items() for word in pair)))
    assert sorted(each.name for each in (tmp_path / "work").iterdir()) == ["adapter", "base", "rows"]
    runs = [read_json(folder / "out" / "commongen.json") for folder in (finished, tmp_path)]
    joined = results_page.join_runs(runs)
    assert len(joined["metrics"]["rows"]) == len(runs[0]["metrics"]["rows"]) + 1  # p's line is another p's
    text = results_page.results(joined, read_json(finished / "out" / "overhead.json"))
    assert text.count("\n\nA base alone:\n\n| system | decoding |") == 1


def test_an_adapter_that_is_given_is_taken_as_it_is(finished: Path, tmp_path: Path) -> None:
    lines = ['like = "small.toml"', "[adapter]", "epochs = 0.1", "[[rows]]", 'systems = ["base"]']
    (finished / "given.toml").write_text("\n".join(lines), encoding="utf-8")
    adapter = finished / "work" / "adapter" / "adapter"
    own = {"--settings": finished / "given.toml", "--work": tmp_path / "work", "--output": tmp_path / "out"}
    own["--adapter"] = adapter
    run_commongen.main(arguments(finished, *(str(word) for pair in own.items() for word in pair)))
    one, other = (read_json(each / "out" / "commongen.json")["metrics"] for each in (finished, tmp_path))
    assert other["stages"]["adapter"]["given"] == "adapter"
    p_lines = [next(row for row in each["rows"] if row["system"] == "base") for each in (one, other)]
    assert p_lines[0]["perplexity"] == p_lines[1]["perplexity"]
    assert read_json(adapter / "adapter_config.json")["base_model_name_or_path"] == "base"


@pytest.mark.parametrize(("half", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_guides_compute_as_the_base_does(finished: Path, half: bool, dtype: torch.dtype) -> None:
    settings, adapter = BaseSettings(length_limit=8, half=half), finished / "work" / "adapter" / "adapter"
    model = load_base(str(finished / "base"), adapter, settings, device=torch.device("cpu"))
    assert model.model.dtype == dtype
    assert training_config(GuideSettings("a guide"), 10, HuggingFaceReader(model)).half == half


def test_the_adapter_on_record_belongs_to_the_study() -> None:
    config = read_json(RECIPE / "adapter" / "adapter_config.json")
    settings = read_settings(RECIPE / "main.toml").adapter
    assert (config["r"], config["lora_dropout"]) == (settings.rank, settings.dropout)
    weights = load_file(RECIPE / "adapter" / "adapter_model.safetensors")
    recorded = read_json(RECIPE.parents[1] / "benchmarks" / "results" / "commongen.json")["metrics"]["stages"]
    assert sum(each.numel() for each in weights.values()) == recorded["adapter"]["parameters"]


def test_a_comparisons_methods_become_lines(place: Path, tmp_path: Path) -> None:
    """One text a set, beside p's own of the same kind."""
    sets = read_sets(place / "data" / "dev.jsonl")
    whole = [f"the {' '.join(each.concepts)} ." for each in sets]
    written = {"base": ["the ."] * len(sets), "q": whole, "greedy": whole, "beam-4x": whole}
    for key, texts in written.items():
        two = [
            Text(each.prompt.prompt, each.prompt.condition, text, [1, 2, EOS], finished=True)
            for each, first in zip(sets, texts, strict=True)
            for text in (first, "another")
        ]
        (tmp_path / "compare" / key).mkdir(parents=True)
        save_texts(two, tmp_path / "compare" / key / "texts.jsonl")
        write_json(tmp_path / "compare" / key / "log_p.json", [[-1.0, -1.0, -1.0]] * len(two))
    facts = {"settings": {"strength": 2.0}, "seconds": 8.0, "base_tokens": 300}
    rows = [{"key": key, "system": f"the method {key}", **facts} for key in written]
    write_json(tmp_path / "compare" / "comparison.json", {"systems": rows})
    where = ["--data", str(place / "data"), "--output", str(tmp_path / "out"), "--about", "Others:"]
    assert comparison_rows.main([str(tmp_path), *where]) == 0
    found = {row["system"]: row for row in read_json(tmp_path / "out" / "commongen.json")["metrics"]["rows"]}
    assert [row["decoding"] for row in found.values()] == ["sample", "sample", "search", "search"]
    assert found["base"]["coverage"] == 0
    assert found["q"]["coverage"] == 100
    assert found["q"]["against_base"]["missed_removed"]["value"] == 100
    assert found["beam-4x"]["against_base"]["coverage"]["difference"] == 0  # beside p's own search
    assert "against_base" not in found["greedy"]
    assert found["q"]["base_tokens_a_text"] == 6
    assert {row["group"] for row in found.values()} == {"Others:"}


def test_a_comparison_on_other_prompts_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare" / "q").mkdir(parents=True)
    save_texts([Text("", "a zebra", "a", [EOS], finished=True)], tmp_path / "compare" / "q" / "texts.jsonl")
    write_json(tmp_path / "compare" / "q" / "log_p.json", [[-1.0]])
    rows = [{"key": "q", "system": "q", "settings": {}, "seconds": 1.0, "base_tokens": 1}]
    write_json(tmp_path / "compare" / "comparison.json", {"systems": rows})
    where = ["--data", str(place / "data"), "--output", str(tmp_path / "out")]
    assert comparison_rows.main([str(tmp_path), *where]) == 1
    assert "found one for a zebra" in capsys.readouterr().err


def test_what_was_measured_along_training_is_drawn(tmp_path: Path) -> None:
    looks = [{"step": 10.0, "guided_coverage": 50.0, "guided_bleu4": 3.0}, {"step": 20.0}]
    guides = {"main": {"title": "a guide of two layers", "batch": 8}}
    metrics = {"settings": {"guides": guides}, "stages": {"guide-main": {"looks": looks}}}
    assert looks_plot.draw_looks(metrics, tmp_path / "looks.svg")
    assert "a guide of two layers" in (tmp_path / "looks.svg").read_text(encoding="utf-8")
    metrics["stages"] = {"guide-main": {"looks": looks[1:]}}
    assert not looks_plot.draw_looks(metrics, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_the_readme_is_filled_from_the_results(finished: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((RECIPE / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    page = [str(finished / "out"), "--readme", str(readme), "--record", "--results", str(tmp_path)]
    page += ["--outputs", str(tmp_path / "outputs")]
    (tmp_path / "overhead.json").write_text(
        json.dumps({"metrics": {"time": 1, "light_gain_share": 9}, "runs": [
            {"machine": "another", "metrics": ["time", "light_gain_share"]}]})
    )  # fmt: skip
    results_page.main(page)
    results_page.main(page)  # twice is as once
    text = readme.read_text(encoding="utf-8")
    row = rows_of(finished)["main-greedy-strength1-free"]
    assert text.count("| a guide of two layers | greedy | 1 | off |") == 1
    assert f"| a guide of two layers | greedy | 1 | off | {row['coverage']:.1f} " in text
    assert "| all covered, verified | ≥ 99.5 % in ≤ 4 draws |" in text
    assert "| dog, zebra | " in text
    assert len((tmp_path / "outputs" / "test.q.jsonl").read_text().splitlines()) == 2
    merged = read_json(tmp_path / "overhead.json")
    assert merged["metrics"]["time"] == 1
    assert merged["metrics"]["light_gain_share"] != 9
    assert merged["runs"][0]["metrics"] == ["time"]
    recorded = read_json(tmp_path / "commongen.json")
    results_page.main([str(tmp_path), *page[1:]])  # what is on record stands for its runs
    assert read_json(tmp_path / "commongen.json") == recorded
    assert read_json(tmp_path / "overhead.json") == merged
    assert "| dog, zebra | " in readme.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="not one of each"):
        results_page.fill(finished / "small.toml", "")


# --- in rounds ----------------------------------------------------------------------------------------

ROUNDS = """
group = "In rounds:"
[base]
length_limit = 14
[adapter]
epochs = 6.0
rank = 4
rows = 8
width = 64
learning_rate = 1e-2
[draw]
lists = 15
samples = 12
references = 60
hindsight = 400
guided = 40
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
name = "warm_nado"
title = "seq2seq p + NADO"
base = "seq2seq"
learn = ["p"]
learning_rate = 3e-3
steps = 40
[[guides]]
name = "da_warm"
title = "domain-adapted p + warm-up"
base = "da"
learn = ["references"]
objective = "warm_up"
learning_rate = 3e-3
steps = 100
[[guides]]
name = "da_hindsight"
title = "domain-adapted p + its own texts"
base = "da"
learn = ["hindsight"]
objective = "warm_up"
learning_rate = 3e-3
steps = 100
[[guides]]
name = "da_nado"
title = "domain-adapted p + warm-up + NADO"
base = "da"
start = "da_warm"
learn = ["q"]
learning_rate = 1e-5
steps = 4
[[rows]]
systems = ["seq2seq", "da", "warm_nado", "da_warm", "da_hindsight", "da_nado"]
"""


@pytest.fixture(scope="module")
def in_rounds(place: Path) -> Path:
    data = place / "triples"
    data.mkdir()
    several = [*itertools.combinations(CONCEPTS, 2), *itertools.combinations(CONCEPTS, 3)]
    records = [
        {"id": at, "concepts": list(words), "targets": [f"the {' and the '.join(words)} ."]}
        for at, words in enumerate(several)
    ]
    for name, some in (("train", records[::2]), ("dev", records[1::6])):
        lines = "".join(json.dumps(each) + "\n" for each in some).encode()
        path = data / {"train": "train.jsonl.gz", "dev": "dev.jsonl"}[name]
        path.write_bytes(gzip.compress(lines) if name == "train" else lines)
    (data / "concept_forms.json").write_text(json.dumps({word: [word] for word in CONCEPTS}))
    (place / "rounds.toml").write_text(ROUNDS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concept_sets, "_SIZES", (2, 3))
        paths = {"base": "base", "data": "triples", "work": "rounds", "output": "rounds-out"}
        words = [word for name, path in paths.items() for word in (f"--{name}", str(place / path))]
        assert run_rounds.main([*words, "--settings", str(place / "rounds.toml")]) == 0
    return place / "rounds-out"


def test_a_base_that_sees_no_concepts_learns_to_cover_them(in_rounds: Path) -> None:
    rows = {row["system"]: row for row in read_json(in_rounds / "commongen.json")["metrics"]["rows"]}
    assert set(rows) == {"seq2seq", "da", "warm_nado", "da_warm", "da_hindsight", "da_nado"}
    for name in ("da_warm", "da_hindsight"):
        assert rows[name]["coverage"] > rows["da"]["coverage"] + 10
    assert "against_base" not in rows["da"]
    gain = rows["da_warm"]["against_base"]["coverage"]["difference"]
    assert gain == pytest.approx(rows["da_warm"]["coverage"] - rows["da"]["coverage"])
    assert rows["da_nado"]["all_sets"].keys() >= {"coverage", "bleu4", "all_covered"}


def test_results_in_rounds_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--base", "base", "--data", "data", "--work", "work", "--output", "out"]
    assert run_rounds._parse(words).output == Path("out")
    with pytest.raises(SystemExit):
        run_rounds._parse([*words, "--name", "another"])
    assert "unrecognized arguments: --name another" in capsys.readouterr().err


def test_only_guides_that_know_what_r_is_are_searched_by_it() -> None:
    own = (RECIPE / "rounds.toml", RECIPE / "warm_up.toml")
    for path in (*own, *(RECIPE.parent / "keywords_in_order").glob("*.toml")):
        settings = read_key_settings(path)
        warm = {each.name for each in settings.guides if each.objective == WARM_UP}
        rows = [row for section in settings.rows for row in section.rows()]
        assert len(rows) == len(set(rows))
        assert not [row.name for row in rows if row.system in warm and row.kind == SEARCH]
        assert warm <= {row.system for row in rows}


def test_in_hindsight_a_text_has_all_its_concepts_and_p_saw_none(in_rounds: Path, place: Path) -> None:
    samples = read_folder(place / "rounds" / "hindsight-da")
    assert samples.array("satisfied").all()
    assert set(samples.strings("prompt")) == {""}
    drawn = read_samples(place / "rounds" / "hindsight-da" / "drawn")
    assert len(drawn) == 400
    assert {text.strip() for text in samples.strings("text")} <= {t.strip() for t in drawn.strings("text")}
    assert {len(each.split(",")) for each in samples.strings("condition")} == {2, 3}


def test_lines_in_rounds_stand_in_the_main_runs_table(finished: Path, in_rounds: Path) -> None:
    runs = [read_json(folder / "commongen.json") for folder in (finished / "out", in_rounds)]
    text = results_page.results(results_page.join_runs(runs), read_json(finished / "out" / "overhead.json"))
    assert text.count("| p, domain-adapted | greedy | – | – |") == 1
    assert text.count("\n\nIn rounds:\n\n") == 1
    assert "| domain-adapted base, coverage, exact end off | ≥ 90 |" in text


# --- its parts ----------------------------------------------------------------------------------------


def test_sentences_are_learned_as_they_are_drawn(place: Path) -> None:
    """A prompt as drawing encodes it, the sentence, the model's own end; only the last two are learned."""
    model = load_model(place / "base", length_limit=10)
    assert isinstance(model, CausalModel)
    sets = read_sets(place / "data" / "train.jsonl.gz")[6:8]
    documents = read_sentences(sets, model)
    batch = documents.pad(documents.composed)
    pairs = [(each.prompt.prompt, target) for each in sets for target in each.targets]
    for row, (asked, target) in enumerate(pairs):
        prompt = model.encode([asked])[0]
        text = model.encode_texts([target])[0]
        whole = [*prompt, *text, EOS]
        assert batch.tokens[row, : len(whole)].tolist() == whole
        learned = batch.labels[row][batch.labels[row] >= 0].tolist()
        assert learned == [*text, EOS]


@pytest.mark.parametrize("decoding", ["greedy", "beam", "sample"])
def test_p_has_its_temperature_however_it_writes(place: Path, decoding: str) -> None:
    """As a model whose logits are larger by themselves; greedy texts alone are those of the raw model."""
    sets = read_sets(place / "data" / "dev.jsonl")
    row, settings = Row("base", decoding, 1.0, exact_end=False), RowSettings(("base",), beams=3)
    raw, sharp, scaled = (load(place / "base", temperature) for temperature in (1.0, 0.2, 1.0))
    with torch.no_grad():
        scaled.model.model.norm.weight.div_(0.2)  # type: ignore[union-attr,operator]
    texts = [write_base(model, sets, row, settings).tokens for model in (raw, sharp, scaled)]
    assert texts[1] == texts[2]
    assert (texts[0] == texts[1]) == (decoding == "greedy")


def load(base: Path, temperature: float) -> CausalModel:
    model = load_model(base, length_limit=10, warpers=Warpers(temperature=temperature))
    assert isinstance(model, CausalModel)
    return model


class Asked(TorchDispatchMode):
    """Operations for which the host would have to wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = args[1] if function is torch.ops.aten.index.Tensor else ()
        masked = any(each is not None and each.dtype is torch.bool for each in chosen)
        if masked or function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("loss", "waits"), [(whole_loss, False), (sparse_loss, True)])
def test_a_step_that_is_recorded_never_waits_for_the_device(place: Path, loss: Any, waits: bool) -> None:
    model: Any = load_model(place / "base", length_limit=10)
    sentences = read_sentences(read_sets(place / "data" / "train.jsonl.gz"), model)
    adapted = add_adapter(model.model, AdapterSettings(rank=4, dropout=0.1)).get_base_model()
    pool = torch.arange(len(sentences.composed))
    source = batches(sentences, pool, 4, 48, torch.Generator().manual_seed(0))
    first, second = next(source), next(source)
    assert first.tokens.shape == second.tokens.shape == (4, 48)
    slopes = record_slopes(adapted, lambda batch: loss(adapted, batch), first, print)
    with Asked() as asked:
        slopes(first)
    assert bool(asked.found) == waits
    learned = [each for each in adapted.parameters() if each.requires_grad]
    assert learned
    assert all(each.grad is not None for each in learned)
    before = [each.grad.clone() for each in learned]
    slopes(first)  # dropout aside the same again, not added up
    assert sum(float(each.grad.abs().sum()) for each in learned) < 1.5 * sum(
        float(each.abs().sum()) for each in before
    )


def test_large_sets_get_more_samples_and_every_prompt_is_drawn_once() -> None:
    sets = [ConceptSet(at, ("dog", "cat", "man", "park")[: 3 + at % 2], ()) for at in range(3)]
    sets += [ConceptSet(9 + at, (str(at),), ()) for at in range(10)]
    chunks = cut_chunks(sets, DrawSettings(samples=2, large=4, samples_large=6, chunk=8))
    drawn = [(prompt.condition, chunk.samples) for chunk in chunks for prompt in chunk.prompts]
    assert dict(drawn)["dog, cat, man, park"] == 6
    assert dict(drawn)["dog, cat, man"] == 2
    assert len(drawn) == len(dict(drawn)) == 12
    assert max(len(chunk.prompts) * chunk.samples for chunk in chunks) == 8


def test_texts_that_do_not_end_stop_the_run_at_once(place: Path) -> None:
    class Endless:
        def array(self, name: str) -> np.ndarray:
            return np.array([False, False, True])

        def strings(self, name: str) -> list[str]:
            return ["a dog and a dog", "", ""]

    with pytest.raises(SystemExit, match=r"only 33.3% of the texts end by themselves: .* 'a dog and a dog'"):
        require_endings(Endless())  # type: ignore[arg-type]


def test_what_is_sent_to_other_processes_decodes_as_the_model_does(place: Path, tmp_path: Path) -> None:
    """In a process of its own, without the model's weights."""
    model = load_model(place / "base", length_limit=10)
    assert isinstance(model, CausalModel)
    rows = [[5, 6, 7, EOS, 9], [], [8, 3, 11]]
    torch.save(TextMaker(model), tmp_path / "maker")
    code = (
        f"import sys, torch; sys.path.insert(0, {str(RECIPE)!r})\n"
        f"maker = torch.load({str(tmp_path / 'maker')!r}, weights_only=False)\n"
        f"print([maker.fingerprint, *maker.decode({rows})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([model.fingerprint, *model.decode(rows)])


def test_time_is_shared_and_steps_are_settled_once(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "log", deadline=1000.0)
    guides = [GuideSettings("a", seconds=300), GuideSettings("b", seconds=100)]
    assert share_time(clock, guides, reserve=100.0) == 300
    assert share_time(clock, guides, reserve=800.0) == pytest.approx(150, abs=2)
    assert share_time(clock, guides, reserve=2000.0) == 0
    assert plan_steps(tmp_path, guides[0], 10.0, 0.1) == 100
    assert plan_steps(tmp_path, guides[0], 99.0, 0.1) == 100
    assert plan_steps(tmp_path / "other", guides[0], 0.0, 0.1) == 20


def test_a_stage_is_done_again_when_what_it_is_made_from_changes(tmp_path: Path) -> None:
    done: list[str] = []

    def run(first: int, second: int) -> None:
        stages = Stages(tmp_path, "data", Clock(tmp_path / "log"))
        for name, config, after in (("one", first, []), ("two", second, ["one"])):
            stages.run(name, config, after, lambda folder, name=name: done.append(name) or {"n": len(done)})

    run(1, 1)
    run(1, 1)
    assert done == ["one", "two"]
    run(1, 2)
    assert done == ["one", "two", "two"]
    run(2, 2)
    assert done == ["one", "two", "two", "one", "two"]


def test_a_stage_that_broke_off_keeps_its_files(tmp_path: Path) -> None:
    def broken(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("")
        raise KeyError("power")

    stages = Stages(tmp_path, "data", Clock(tmp_path / "log"))
    with pytest.raises(KeyError):
        stages.run("one", 1, [], broken)
    stages.run("one", 1, [], lambda folder: {"half": (folder / "half").exists()})
    assert stages.facts["one"]["half"]


def test_missed_concepts_removed_and_paired_differences() -> None:
    sets = [ConceptSet(at, ("dog", "cat"), ("the dog and the cat sleep here",)) for at in range(40)]

    def scored(texts: list[str]) -> Scored:
        written = Written(texts, [[4, EOS]] * len(texts), [True] * len(texts), 0, 0.0, 0.0)
        oracle = run_commongen.Keywords(forms={"dog": ["dog", "dogs"], "cat": ["cat"]})
        scores = score_texts(sets, texts, oracle)
        return Scored(scores, written, [np.zeros(2, np.float32)] * len(texts))

    base = scored(["the dogs sleep"] * 20 + ["nothing"] * 20)  # coverage 25 %
    ours = scored(["the dog and the cat sleep here"] * 20 + ["a dog"] * 20)  # coverage 75 %
    found = against(ours, base, np.ones(40, dtype=bool))
    assert found["coverage"]["difference"] == pytest.approx(50)
    assert found["missed_removed"]["value"] == pytest.approx(100 * 50 / 75)
    assert found["bleu4"]["difference"] > 0
    assert found["same_texts"] == 0
    half = np.arange(40) < 20
    assert against(ours, base, half)["missed_removed"]["value"] == pytest.approx(100)


def test_dev_sets_are_chosen_by_their_rate() -> None:
    sets = [ConceptSet(at, (WORDS[at],), ()) for at in range(4)]
    found = np.array([0.0, 0.02, 0.1, 0.9])
    assert [p.condition for p in choose(sets, found, (0.02, 0.1), inclusive=True)] == WORDS[1:3]
    assert choose(sets, found, (0.1, 0.9), inclusive=False) == []


def test_a_misspelt_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[draw]\nsample = 3\n")
    with pytest.raises(InputError, match="found sample"):
        read_settings(path)
    path.write_text('[[rows]]\nsystems = ["mian"]\n')
    with pytest.raises(InputError, match="found mian"):
        read_settings(path)


def test_the_main_configuration_is_read() -> None:
    settings = read_settings(RECIPE / "main.toml")
    rows = [row.name for section in settings.rows for row in section.rows()]
    assert len(rows) == len(set(rows)) == 41
    assert settings.guides["bare"].bare
    assert isinstance(settings.rows[0], RowSettings)


def test_ablations_are_of_the_main_runs_base_and_samples_and_differ_in_one_thing() -> None:
    main, ablations = (read_settings(RECIPE / f"{name}.toml") for name in ("main", "ablations"))
    for name in ("base", "texts", "adapter", "draw"):
        assert getattr(ablations, name) == getattr(main, name)
    reference = vars(ablations.guides["reference"])
    for name, guide in ablations.guides.items():
        other = {key for key, value in vars(guide).items() if value != reference[key]} - {"title", "measured"}
        assert len(other) == (name != "reference")
    cut = read_settings(RECIPE / "top_p.toml")
    assert cut.draw.stage == "samples-top0.8"
    assert replace(cut.draw, top_p=1.0) == main.draw
    assert replace(cut.guides["top_p"], title="", measured=True) == replace(
        ablations.guides["reference"], title=""
    )


def test_captions_are_made_sentences_and_come_again_after_others_of_their_concepts() -> None:
    several = [
        ConceptSet(0, ("ski", "skier"), ("skier skis down the snowy mountain", "A skier skis .")),
        ConceptSet(1, ("mountain", "snow", "tree"), ("Snowy trees.",)),
    ]
    forms = {"ski": ["skis"], "tree": ["trees"], "snow": ["snowy"], "elsewhere": ["down"]}
    assert learned_sets(several, TextSettings(), forms) == several
    found = learned_sets(several, TextSettings(sentences=True, turns=9), forms)
    first, again = found[:2], found[2:]
    assert first[0].targets == ("Skier skis down the snowy mountain.", "A skier skis.")
    assert [each.concepts for each in first] == [each.concepts for each in several]
    assert [each.targets for each in again[:3]] == [(text,) for each in first for text in each.targets]
    assert len(again) == 8 * 3
    rich = [each.concepts for each in again[::3]]
    assert {frozenset(each) for each in rich} <= {
        frozenset(some)
        for count in (3, 4)
        for some in itertools.combinations(("skier", "ski", "snow", "mountain"), count)
    }
    assert len(set(rich)) > 4
    assert {frozenset(each.concepts) for each in again[1::3]} == {frozenset(("ski", "skier"))}  # too few


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a man  walks .", "A man walks."),
        ("Already one.", "Already one."),
        ("is it ?", "Is it?"),
        ("tracks,", "Tracks."),
        ("", "."),
    ],
)
def test_a_caption_as_a_sentence(text: str, sentence: str) -> None:
    assert as_sentence(text) == sentence


def test_recombined_sets_are_new_and_of_the_sizes_of_dev() -> None:
    words = [f"w{number}" for number in range(40)]
    several = [ConceptSet(at, tuple(words[at : at + 3]), ("x",)) for at in range(0, 36, 2)]
    found = recombine(several, 60, 0)
    assert found == recombine(several, 60, 0)
    assert len({frozenset(each.concepts) for each in found}) == 60
    assert not {frozenset(each.concepts) for each in found} & {frozenset(each.concepts) for each in several}
    assert {len(each.concepts) for each in found} == {3, 4, 5}
    assert all(not each.targets for each in found)
    with pytest.raises(InputError, match=r"expected 60 new sets of 1 training sets; found 0 after"):
        recombine(several[:1], 60, 0)
    others = recombine(several, 60, 0, but=found[:30])
    assert not {frozenset(each.concepts) for each in others} & {
        frozenset(each.concepts) for each in found[:30]
    }
