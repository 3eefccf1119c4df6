"""Studies: from a TOML file to an evaluation; mistakes, reuse, resuming, what a check finds."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import small_models
from nado.cli import app
from nado.errors import InputError, MismatchError, NadoError, StorageError
from nado.guide import UNCALIBRATED
from nado.guided import GuidedModel
from nado.huggingface import CausalModel, load_model
from nado.options import option, read_options, required
from nado.oracles.loading import names_python, saved_oracle
from nado.prompts import Prompt
from nado.rounds import RoundsConfig
from nado.serving.models import GuideSource, load_served
from nado.study import parse_study, read_study, run_study
from nado.study.checking import check_study
from nado.study.evaluation import table_rows
from nado.study.guides import hold_out, load, use_guide
from nado.study.materials import read_tasks
from nado.study.reading import SECTIONS, resolve_oracle, section_class
from nado.study.running import Run
from nado.study.sections import BaseConfig, PromptsConfig, fill_template
from nado.study.stages import Stage, require_same
from nado.study.systems import Written, read_texts, save_texts
from nado.training import TrainingConfig
from nado.warpers import Warpers

WORDS = ["dog", "cat", "ball", "beach", "man", "woman", "park", "old", "red"]
STUDY = """
[base]
name = "base"
length_limit = 12
[oracle]
name = "keywords"
inflections = false
at_least = 1
[prompts]
file = "prompts.txt"
held_out = 0.25
template = "a {condition}"
[draw]
samples_per_prompt = 32
batch_size = 256
[guide]
size = 32
layers = 1
heads = 2
[train]
steps = 60
batch_size = 256
learning_rate = 6e-3
ramp_steps = 5
evaluate_every = 20
save_every = 10
[generate]
count = 8
"""


def make_study(folder: Path, text: str = STUDY) -> Path:
    """A study of a small base in `folder`; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base").exists():
        small_models.save("llama", folder / "base")
    pairs = itertools.combinations(WORDS, 2)
    (folder / "prompts.txt").write_text("".join(f"{a}, {b}\n" for a, b in pairs))
    (folder / "study.toml").write_text(text)
    return folder / "study.toml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A study's file, its folder and its evaluation."""
    file = make_study(tmp_path_factory.mktemp("study"))
    evaluation = run_study(read_study(file), file.with_suffix(""))
    assert evaluation is not None
    return file, file.with_suffix(""), evaluation


@pytest.fixture
def copied(finished: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A finished study that may be changed: its file."""
    shutil.copytree(finished[0].parent, tmp_path / "copy")
    return tmp_path / "copy" / "study.toml"


# --- from file to evaluation --------------------------------------------------------------------------


def test_a_study_ends_in_an_evaluation_that_shows_what_training_did(
    finished: tuple[Path, Path, dict[str, Any]],
) -> None:
    _, folder, evaluation = finished
    systems = {(row["system"], row["exact_end"]): row for row in evaluation["systems"]}
    assert len(systems) == 6
    assert (evaluation["prompts"], evaluation["prompts_seen_in_training"]) == (9, False)

    def satisfied(name: str, exact_end: bool = False) -> dict[str, Any]:
        measure: dict[str, Any] = systems[name, exact_end]["measures"]["satisfied"]
        return measure

    base, trained = satisfied("base"), satisfied("trained guide")
    # 72 texts of 9 prompts each: the intervals are far apart, and the seeds fixed.
    assert base["value"] < 0.35
    assert trained["value"] > base["value"] + 0.3
    assert trained["low"] > base["high"]
    assert "Wilson" in trained["method"]
    for row in evaluation["systems"]:
        texts = read_texts(folder / "generate" / f"{_key(row)}.jsonl")
        assert (row["texts"], len(texts)) == (72, 72)
        assert row["base_tokens"] == sum(len(each.tokens) for each in texts)
        assert row["measures"]["length"]["value"] == pytest.approx(row["base_tokens"] / 72)
        right = [
            each.finished and any(word in each.text.split() for word in each.condition.split(", "))
            for each in texts
        ]
        assert right == [each.satisfied for each in texts]
        assert row["measures"]["satisfied"]["value"] == pytest.approx(sum(right) / 72)
        assert row["seconds"] > 0
        assert row["measures"]["perplexity"]["value"] > 1
    assert systems["base", False]["measures"]["KL(q‖p)"]["value"] == pytest.approx(0, abs=1e-4)
    assert systems["trained guide", False]["measures"]["KL(q‖p)"]["value"] > 0.5


def _key(row: dict[str, Any]) -> str:
    return row["system"].replace(" ", "-") + ("-exact-end" if row["exact_end"] else "")


def test_training_and_evaluation_share_no_prompt(finished: tuple[Path, Path, dict[str, Any]]) -> None:
    from nado.samples import read_samples

    _, folder, _ = finished
    drawn = set(read_samples(folder / "draw").strings("condition"))
    judged = {each.condition for each in read_texts(folder / "generate" / "base.jsonl")}
    assert (len(drawn), len(judged), drawn & judged) == (27, 9, set())
    assert all(
        each.prompt == f"a {each.condition}" for each in read_texts(folder / "generate" / "base.jsonl")
    )


def test_the_guide_loads_with_its_base_and_oracle(finished: tuple[Path, Path, dict[str, Any]]) -> None:
    file, folder, _ = finished
    used = use_guide(folder / "train")
    assert used.template == "a {condition}"
    assert used.oracle is not None
    assert used.oracle.fingerprint == used.guide.config.oracle_fingerprint
    assert used.guide.config.base_name == str(file.parent / "base")
    assert used.guide.config.progress_bits == 3  # two keywords, and whether they are enough
    assert used.guide.config.named_parts
    assert used.guide.config.calibration != UNCALIBRATED
    assert 0 < used.guide.config.cut_share < 0.6


def test_a_guides_folder_says_how_its_base_was_made(copied: Path, tmp_path: Path) -> None:
    guide = copied.with_suffix("") / "train"
    saved = json.loads((guide / "base.json").read_text())
    assert load(guide).base.warpers == Warpers()
    # another p is refused by the guide's own record of it, so the warpers have come from the folder
    (guide / "base.json").write_text(json.dumps({**saved, "base": {**saved["base"], "top_k": 3}}))
    with pytest.raises(MismatchError, match="warpers"):
        load(guide)
    table = {"name": "keywords", "inflections": False, "at_least": 1}
    (guide / "base.json").write_text(json.dumps(saved))
    assert load(guide, oracle=table).oracle == load(guide).oracle
    with pytest.raises(InputError) as error:
        load("keyword")
    assert str(error.value) == (
        "expected a guide in the folder keyword; found no config.json there. Give what nado train has "
        "written, or an embedded guide. Did you mean keywords?"
    )
    with pytest.raises(InputError, match=f"Give {copied.with_suffix('')}/train."):
        load(copied.with_suffix(""))
    with pytest.raises(InputError, match="a base that can be loaded as 'nope'"):
        load_model("nope", length_limit=8)


def test_a_guide_of_another_oracle_is_said_to_be_one(
    finished: tuple[Path, Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    guide = finished[1] / "train"
    own = {"name": "keywords", "inflections": False, "at_least": 1}
    length = {"name": "length", "minimum": 2}
    for oracle, warned in ((own, False), ({"all": [length, own]}, False), ({"not": length}, True)):
        caplog.clear()
        load(guide, oracle=oracle)
        assert ("another oracle than this ~length, and what it is told" in caplog.text) == warned


def test_a_finished_study_is_reused_without_loading_the_base(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nado.study.materials

    def refuse(config: BaseConfig) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(nado.study.materials, "load_base", refuse)
    said: list[str] = []
    assert run_study(read_study(copied), copied.with_suffix(""), say=said.append) is not None
    assert [line.split(" from ")[0] for line in said] == [
        f"{name}: reused" for name in ("draw", "label", "train", "generate", "evaluate")
    ]


def test_a_changed_stage_is_refused_before_anything_runs_and_made_again_by_force(copied: Path) -> None:
    folder = copied.with_suffix("")
    study = read_study(copied, ["generate.count=2", "evaluate.perplexity=false"])
    before = (folder / "generate" / "base.jsonl").read_text()
    with pytest.raises(MismatchError) as error:
        run_study(study, folder)
    assert str(error.value) == (
        f"expected {folder}/generate to hold this same study; found another one, which differs in "
        "generate.count. Use --force to make it and what follows from it again, or choose another folder."
    )
    assert (folder / "generate" / "base.jsonl").read_text() == before
    said: list[str] = []
    evaluation = run_study(study, folder, force=True, say=said.append)
    assert [line.split(" ")[1] for line in said] == ["reused", "reused", "reused", "begun", "begun"]
    assert evaluation is not None
    assert {row["texts"] for row in evaluation["systems"]} == {18}
    assert "perplexity" not in evaluation["systems"][0]["measures"]


@pytest.mark.parametrize(
    ("settings", "stage", "reason"),
    [
        (["draw.seed=1"], "draw", "draw.seed"),
        (["base.temperature=0.9"], "draw", "base"),
        (["prompts.held_out=0.5"], "draw", "prompts"),
        (["label.parts=false"], "label", "label.parts"),
        (["oracle.at_least=2"], "label", "oracle"),
        (["train.steps=61"], "train", "train.steps"),
        (["guide.size=64"], "train", "train.guide.size"),
        (["evaluate.confidence=0.9"], "evaluate", "evaluate.confidence"),
    ],
)
def test_what_changes_a_result_changes_the_digest_of_its_stage(
    finished: tuple[Path, Path, dict[str, Any]], settings: list[str], stage: str, reason: str
) -> None:
    file, folder, _ = finished
    stages = Run(read_study(file, settings), folder).stages()
    first = next(each for each in stages if each.standing() == "changed")
    assert (first.name, first.differences()) == (stage, reason)


def test_what_does_not_change_a_result_does_not(finished: tuple[Path, Path, dict[str, Any]]) -> None:
    file, folder, _ = finished
    study = read_study(file, ["train.save_every=7", "base.device=cpu", "label.workers=2"])
    assert {each.standing() for each in Run(study, folder).stages()} == {"finished"}


def test_other_weights_in_the_base_s_folder_are_another_base(copied: Path) -> None:
    shutil.rmtree(copied.parent / "base")
    small_models.save("llama", copied.parent / "base", seed=5)
    with pytest.raises(MismatchError, match=r"differs in base\."):
        run_study(read_study(copied), copied.with_suffix(""))


def test_an_interrupted_study_goes_on_and_ends_the_same(
    finished: tuple[Path, Path, dict[str, Any]], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nado.study.guides

    whole = load_file(finished[1] / "train" / "model.safetensors")
    folder = copied.with_name("again")
    real = nado.study.guides.train

    def stop_at(step: int, row: dict[str, float]) -> None:
        if step == 35:
            raise KeyboardInterrupt

    def interrupted(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **(options | {"on_step": stop_at}))

    monkeypatch.setattr(nado.study.guides, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(read_study(copied), folder)
    monkeypatch.undo()
    assert json.loads((folder / "train" / "checkpoints" / "latest.json").read_text())["step"] == 30
    said: list[str] = []
    run_study(read_study(copied), folder, until="train", say=said.append)
    assert [line.split(" in ")[0].split(" from ")[0] for line in said] == [
        "draw: reused",
        "label: reused",
        "train: taken up",
    ]
    again = load_file(folder / "train" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_a_study_in_rounds_draws_for_itself(
    finished: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = finished[0]
    rounds = file.with_name("rounds.toml")
    rounds.write_text(STUDY + "\n[rounds]\nsamples = [8, 8]\n")
    settings = ["train.steps=5", "generate.exact_end=off", "generate.count=1"]
    evaluation = run_study(read_study(rounds, settings), tmp_path / "rounds")
    assert evaluation is not None
    assert [row["system"] for row in evaluation["systems"]] == ["base", "untrained guide", "trained guide"]
    assert not (tmp_path / "rounds" / "draw").exists()
    assert (tmp_path / "rounds" / "train" / "rounds" / "round-2").is_dir()
    assert read_study(rounds).rounds == RoundsConfig(samples=(8, 8))


def test_greedy_and_beam_search_write_one_text_for_every_prompt(copied: Path) -> None:
    for search in ("greedy", "beam"):
        settings = [f"generate.search={search}", "generate.count=1", "generate.beams=3"]
        evaluation = run_study(read_study(copied, settings), copied.with_suffix(""), force=True)
        assert evaluation is not None
        assert {row["texts"] for row in evaluation["systems"]} == {9}
        assert "KL(q‖p)" not in evaluation["systems"][0]["measures"]  # not of what a search finds
    texts = read_texts(copied.with_suffix("") / "generate" / "base.jsonl")
    assert {each.log_q for each in texts} == {None}


def test_guided_text_is_measured_during_training_where_that_is_asked_for(copied: Path) -> None:
    settings = ["train.measure_every=5", "train.steps=5"]
    run_study(read_study(copied, settings), copied.with_suffix(""), force=True, until="train")
    summary = json.loads((copied.with_suffix("") / "train" / "stage.json").read_text())["summary"]
    assert 0 <= summary["last"]["guided_satisfied"] <= 1


def test_no_positives_is_one_helpful_error_and_the_samples_are_kept(tmp_path: Path, copied: Path) -> None:
    settings = ["oracle.words=zebra"]
    with pytest.raises(InputError) as error:
        run_study(read_study(copied, settings), tmp_path / "none")
    assert "expected samples of both kinds to learn from; found no satisfied text among" in str(error.value)
    assert json.loads((tmp_path / "none" / "draw" / "stage.json").read_text())["finished"]
    assert json.loads((tmp_path / "none" / "label" / "stage.json").read_text())["finished"]


# --- reading ------------------------------------------------------------------------------------------


def problems_of(folder: Path, text: str) -> list[str]:
    path = folder / "wrong.toml"
    path.write_text(text)
    study, problems = parse_study(path)
    assert (study is None) == bool(problems)
    return [str(each).replace(str(path), "wrong.toml") for each in problems]


NEEDED = '[base]\nname = "base"\nlength_limit = 12\n[oracle]\nname = "keywords"\n[prompts]\nfile = "p.txt"\n'


def test_every_mistake_in_a_file_is_found_at_once(tmp_path: Path) -> None:
    text = NEEDED + (
        '[trian]\nsteps = 5\n[train]\nstepz = 5\nbatch_size = 0\nlearning_rate = "fast"\n'
        '[guide]\nreads = "state"\n[label]\nprefixes = "autp"\n[draw]\nsamples_per_prompt = true\n'
    )
    assert problems_of(tmp_path, text) == [
        "wrong.toml: expected a known section; found [trian]. Did you mean train?",
        "[draw]: expected a whole number as samples_per_prompt; found True. Write samples_per_prompt = 10.",
        "[label]: expected true or false or 'auto' as prefixes; found 'autp'. Did you mean auto?",
        "[guide]: expected 'states' or 'tokens' or 'light' as reads; found 'state'. Did you mean states?",
        "[train]: expected a known key; found 'stepz'. Did you mean steps?",
        "[train]: expected a number as learning_rate; found 'fast'. Write learning_rate = 0.5.",
        "[train]: expected batch_size of at least 1; found 0. Ask for 1 or more.",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "wrong.toml: expected a section [base]; found none. Add [base]."),
        (
            NEEDED.replace("length_limit = 12\n", ""),
            "[base]: expected the key length_limit; found none. Give most tokens of a text, its end",
        ),
        ("draw = 3\n" + NEEDED, "[draw]: expected a table [draw]; found 3. Write [draw] on a line."),
        (
            NEEDED + '[generate]\nsearch = "greedy"\n',
            "[generate]: expected count 1 with greedy search; found 4. They would be the same text.",
        ),
        (
            NEEDED.replace('name = "base"', 'name = "base"\ntop_k = 5\ncheckpoint_warpers = true'),
            "[base]: expected either checkpoint_warpers or temperature, top_k, top_p, forced, forbidden; "
            "found both. Leave one of them out.",
        ),
        (
            NEEDED + "[rounds]\nsamples = 8\n",
            "[rounds]: expected a list of whole numbers as samples; found 8. Write samples = [1, 2].",
        ),
        (
            NEEDED.replace('file = "p.txt"', 'file = "p.txt"\nheld_out = 1'),
            "[prompts]: expected held_out of at least 0 and below 1; found 1.0. Try 0.1.",
        ),
        (
            NEEDED.replace('file = "p.txt"', 'file = "p.txt"\ntemplate = "{word} ="'),
            "[prompts]: expected {condition} and {words} in the template; found {word}. Did you mean {words}",
        ),
        (
            NEEDED.replace('name = "base"', 'name = "base"\ntop_p = 5'),
            "[base]: expected top_p in (0, 1]; found 5. Use 1 to keep the whole vocabulary.",
        ),
        (
            NEEDED.replace('name = "base"', 'name = "base"\ntemperature = 0'),
            "[base]: expected a temperature above 0; found 0. Use 1 to leave p as it is.",
        ),
        (
            NEEDED + "[train]\nlearning_rate = -1\n",
            "[train]: expected learning_rate of 0 or more; found -1. Leave it out for 0.0003.",
        ),
        (
            NEEDED + "[train]\nconsistency_weight = -1\n",
            "[train]: expected consistency_weight of 0 or more; found -1. Leave it out for 1.",
        ),
    ],
)
def test_a_mistake_says_where_it_is_and_what_to_do(tmp_path: Path, text: str, expected: str) -> None:
    assert any(each.startswith(expected) for each in problems_of(tmp_path, text))


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("int main() {} // {words}", "int main() {} // dog ball"),
        ('{"keywords": "{condition}", "meta": {}} ->', '{"keywords": "dog, ball", "meta": {}} ->'),
        ("\\emph{content} {words} =", "\\emph{content} dog ball ="),
        ("one prompt for all", "one prompt for all"),
    ],
)
def test_braces_of_a_template_that_stand_for_nothing_are_text(template: str, filled: str) -> None:
    assert fill_template(PromptsConfig(file=Path("p.txt"), template=template).template, "dog, ball") == filled


@pytest.mark.parametrize(
    ("template", "found", "hint"),
    [
        ("{word} {condition}", "{word}", "Did you mean {words}?"),
        ("{words} = {Conditions}", "{Conditions}", "Did you mean {condition}?"),
        ("{keywords}, not {condition}", "{keywords}", "Did you mean {words}?"),
        ("{text} =", "{text}", "Known: {condition}, {words}."),
        ("{} =", "{}", "Known: {condition}, {words}."),
    ],
)
def test_a_misspelled_word_of_a_template_is_refused(template: str, found: str, hint: str) -> None:
    with pytest.raises(InputError) as raised:
        PromptsConfig(file=Path("p.txt"), template=template)
    assert str(raised.value) == f"expected {{condition}} and {{words}} in the template; found {found}. {hint}"


def test_the_first_mistake_is_an_error_that_counts_the_others(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(NEEDED + "[train]\nstepz = 5\nbatch_size = 0\n")
    with pytest.raises(InputError) as error:
        read_study(tmp_path / "s.toml")
    assert str(error.value) == (
        "expected a known key in [train]; found 'stepz'. Did you mean steps? "
        f"(1 more: nado check {tmp_path}/s.toml shows all)"
    )


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a study file .*none.toml; found the error: No such file"):
        read_study(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[base\n")
    with pytest.raises(InputError, match=r"expected valid TOML in .*broken.toml; found the error: .*line 1"):
        read_study(tmp_path / "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b"[base]\nname = 'caf\xe9'\n")
    with pytest.raises(InputError, match="expected a study file"):
        read_study(tmp_path / "latin.toml")


def test_values_paths_and_settings_are_read_as_the_file_means_them(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "s.toml").write_text(NEEDED + '[train]\ntrackers = ["wandb"]\n')
    study = read_study(
        tmp_path / "s.toml",
        [
            "train.steps=7",
            "train.learning_rate=1e-5",
            "base.forced=3,4",
            "guide.progress_bits=2",
            "draw.seed = 9",
        ],
    )
    assert study.prompts.file == tmp_path / "p.txt"
    assert study.base.name == str(tmp_path / "base")
    assert (study.train.steps, study.train.learning_rate, study.train.trackers) == (7, 1e-5, ("wandb",))
    assert (study.base.forced, study.guide.progress_bits, study.draw.seed) == ((3, 4), 2, 9)
    assert read_study(tmp_path / "s.toml", ["base.name=hub/name"]).base.name == "hub/name"
    with pytest.raises(InputError, match=r"expected a setting as section.key=value; found 'steps=7'"):
        read_study(tmp_path / "s.toml", ["steps=7"])


def test_oracles_of_a_file_are_found_beside_it_and_known_to_execute(tmp_path: Path) -> None:
    table = {"all": ["mine.py:polite", {"name": "keywords", "forms": "forms.json", "words": "a.py:b"}]}
    found = resolve_oracle(table, tmp_path)
    assert found == {
        "all": [
            f"{tmp_path}/mine.py:polite",
            {"name": "keywords", "forms": f"{tmp_path}/forms.json", "words": "a.py:b"},
        ]
    }
    assert names_python(found)
    assert names_python({"not": {"name": "x.py:f"}})
    assert not names_python({"any": ["keywords", {"name": "pattern", "pattern": "a.py:b"}]})


def test_every_option_of_every_section_says_what_it_is() -> None:
    for name in SECTIONS:
        for each in read_options(section_class(name)):
            assert each.text, (name, each.name)


def test_options_carry_their_descriptions() -> None:
    import dataclasses

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        size: int = required("how large")
        often: bool = option(False, "whether often", flag="very_often")

    first, second = read_options(Config)
    assert (first.help, first.default) == ("how large", dataclasses.MISSING)
    assert (second.flag, second.help) == ("very-often", "whether often (default: false)")
    steps = next(each for each in read_options(TrainingConfig) if each.name == "steps")
    assert steps.help == "optimiser steps in all (default: 1000)"


def test_prompts_are_divided_without_overlap_and_always_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("".join(f"p{number}\n" for number in [*range(20), *range(5)]))
    config = PromptsConfig(file=tmp_path / "p.txt", held_out=0.2)
    tasks = read_tasks(config)
    assert (len(tasks.training), len(tasks.held_out), tasks.seen) == (16, 4, False)
    assert not set(tasks.training) & set(tasks.held_out)
    assert read_tasks(config) == tasks
    one = tmp_path / "one.txt"
    one.write_text("only\n")
    assert read_tasks(PromptsConfig(file=one)).seen
    (tmp_path / "s.jsonl").write_text(
        '{"condition": "a", "split": "train"}\n{"condition": "b", "split": "dev"}\n'
        '{"condition": "c", "split": "train"}\n'
    )
    split = PromptsConfig(
        file=tmp_path / "s.jsonl", split="train", held_out_split="dev", template="x {condition}"
    )
    assert read_tasks(split).held_out == [Prompt("x b", "b")]
    assert read_tasks(split).training == [Prompt("x a", "a"), Prompt("x c", "c")]


def test_texts_survive_being_written(tmp_path: Path) -> None:
    texts = [Written("p", "c", "line\u2028and\nline 🐶", [1, 2], True, True, {"a": False}, -1.5)]
    save_texts(texts, tmp_path / "t.jsonl")
    assert read_texts(tmp_path / "t.jsonl") == texts


def test_texts_of_a_single_prompt_are_held_out_by_text(finished: tuple[Path, Path, dict[str, Any]]) -> None:
    from nado.samples import read_samples

    samples = read_samples(finished[1] / "draw")
    first = samples.strings("condition")[0]
    one = samples.filter(samples.table["condition"].to_numpy(zero_copy_only=False) == first)
    kept, held = hold_out(one, 0.25, seed=0)
    assert held is not None
    assert (len(kept), len(held)) == (24, 8)
    assert not set(kept.array("row")) & set(held.array("row"))
    assert hold_out(one, 0.0, seed=0)[1] is None


# --- stages -------------------------------------------------------------------------------------------


def test_a_stage_is_finished_only_with_its_files(tmp_path: Path) -> None:
    stage = Stage("train", tmp_path / "train", {"steps": 1}, {"base": "x"}, files=("guide",))
    assert stage.standing() == "new"

    def fail() -> dict[str, Any]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        stage.run(fail)
    assert stage.standing() == "begun"
    stage.run(lambda: (stage.folder / "guide").write_text("x") and {})
    assert stage.standing() == "finished"
    (stage.folder / "guide").unlink()
    assert stage.standing() == "begun"


def test_a_stage_that_failed_at_once_does_not_stand_in_the_way_of_a_mended_one(tmp_path: Path) -> None:
    labels = tmp_path / "draw" / "labels"

    def stage(oracle: str) -> Stage:
        return Stage("label", tmp_path / "label", {}, {"oracle": oracle}, owned=(labels,))

    def fail() -> dict[str, Any]:
        labels.mkdir(parents=True)
        (labels / "manifest.json").write_text("{}")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        stage("wrong").run(fail)
    assert stage("mended").standing() == "changed"  # something was labelled
    shutil.rmtree(labels)
    assert stage("mended").standing() == "new"
    stage("mended").run(dict)
    assert stage("mended").standing() == "finished"
    assert stage("wrong").standing() == "changed"


def test_a_misspelled_base_is_mended_and_the_study_run(tmp_path: Path) -> None:
    file = make_study(tmp_path, STUDY.replace('name = "base"', 'name = "bass"'))
    with pytest.raises(InputError, match="a base that can be loaded as 'bass'"):
        run_study(read_study(file), file.with_suffix(""), until="draw")
    make_study(tmp_path)
    assert checked(file) == []
    run_study(read_study(file), file.with_suffix(""), until="draw")


def test_force_deletes_only_what_was_made_from_something_else(tmp_path: Path) -> None:
    one = Stage("draw", tmp_path / "draw", {"seed": 1}, {})
    two = Stage("label", tmp_path / "label", {"seed": 1}, {}, owned=(tmp_path / "draw" / "labels",))
    for stage in (one, two):
        stage.run(dict)
    (tmp_path / "draw" / "labels").mkdir()
    other = Stage("label", tmp_path / "label", {"seed": 2}, {}, owned=(tmp_path / "draw" / "labels",))
    with pytest.raises(MismatchError, match=r"differs in label\.seed\."):
        require_same([one, other], force=False)
    require_same([one, other], force=True)
    assert one.standing() == "finished"
    assert not (tmp_path / "label").exists()
    assert not (tmp_path / "draw" / "labels").exists()


# --- checking -----------------------------------------------------------------------------------------


def checked(file: Path, **options: Any) -> list[str]:
    found = check_study(file, file.with_suffix(""), **options)
    return [str(each) for each in found.problems]


def test_a_right_study_has_an_estimate(copied: Path) -> None:
    found = check_study(copied, copied.with_suffix(""))
    assert not found.problems
    assert found.estimate is not None
    base = small_models.build("llama")
    guide = use_guide(copied.with_suffix("") / "train").guide
    assert found.estimate.basis == "estimate"
    assert found.estimate.base_parameters == sum(each.numel() for each in base.parameters())
    assert found.estimate.guide_parameters == sum(each.numel() for each in guide.parameters())
    assert found.estimate.texts == 27 * 32
    assert found.estimate.tokens == 27 * 32 * 12
    measured = check_study(copied, copied.with_suffix(""), measure=True).estimate
    assert measured is not None
    assert measured.basis == "measured"
    assert 2 < measured.tokens / measured.texts < 12
    assert all(0 < seconds < 3600 for seconds in measured.seconds.values())


def test_a_check_finds_mistakes_of_every_kind_at_once(tmp_path: Path) -> None:
    file = make_study(
        tmp_path,
        STUDY.replace('file = "prompts.txt"', 'file = "none.txt"')
        .replace('name = "keywords"', 'name = "keywrds"')
        .replace("length_limit = 12", "length_limit = 12.5")
        .replace("steps = 60", "steps = 60\npatience = 2")
        + "[data]\nheld_out = 0\n",
    )
    shutil.rmtree(tmp_path / "base")
    found = checked(file)
    assert found[:3] == [
        "[base]: expected a whole number as length_limit; found 12.5. Write length_limit = 10.",
        f"[prompts]: expected a file of records; found nothing at {tmp_path}/none.txt. Give a .jsonl, "
        ".parquet or .txt file.",
        "[oracle]: expected a shipped oracle or file.py:name; found 'keywrds'. Did you mean keywords?",
    ]
    assert found[3].startswith("[base]: expected a base that can be loaded as 'base'; found the error: ")
    assert found[4:] == [
        "[train]: expected held-out texts, which patience needs; found held_out 0 in [data]. "
        "Try held_out = 0.1."
    ]
    hidden = STUDY.replace("held_out = 0.25", "held_out = 1.2").replace("prompts.txt", "none.txt")
    assert [each.split(";")[0] for each in checked(make_study(tmp_path, hidden))] == [
        "[prompts]: expected held_out of at least 0 and below 1",
        "[prompts]: expected a file of records",
    ]


def test_a_check_finds_oracles_that_do_not_import_and_conditions_they_do_not_take(tmp_path: Path) -> None:
    file = make_study(
        tmp_path,
        STUDY.split("[oracle]")[0] + '[oracle]\nname = "mine.py:long"\n[prompts]\nfile = "prompts.txt"\n',
    )
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    assert checked(file) == [
        f"[oracle]: expected the file {tmp_path}/mine.py to run; found ModuleNotFoundError: No module named "
        "'nothing_of_this_name'. Run it with python to see where."
    ]
    (tmp_path / "mine.py").write_text("def long(text):\n    return len(text) > 9\n")
    assert checked(file) == []
    slow = '[generate]\nexact_end = "on"\n'
    assert checked(make_study(tmp_path, file.read_text() + slow)) == [
        '[generate]: expected a cheap oracle, completion "eos" and target rate 1 for an exact end; found '
        'long, which is not cheap, completion "eos" and target rate 1. Set exact_end = "off" in [generate].'
    ]
    make_study(tmp_path, file.read_text().removesuffix(slow))
    (tmp_path / "mine.py").write_text("def long(text):\n    return text[-1] == '.'\n")
    assert checked(file) == [
        "[oracle]: expected an answer from the oracle long; found IndexError: string index out of range for "
        "the text ''. Mend it: any text may come, the empty one too, and for a cheap oracle every prefix."
    ]
    make_study(tmp_path)
    (tmp_path / "prompts.txt").write_text("dog\n,\n")
    assert checked(file) == [
        "[oracle]: expected at least 1 keywords separated by commas; found ','. "
        'Write the condition as "dog, ball, New York".'
    ]


def test_a_check_finds_prompts_that_are_too_long(tmp_path: Path) -> None:
    file = make_study(tmp_path)
    (tmp_path / "prompts.txt").write_text("dog\n" + "dog, " * 40 + "\n")
    assert checked(file) == [
        "[prompts]: expected prompts of at most 52 tokens; found 1 longer ones, the longest 81 tokens, "
        "beginning 'a dog, dog, dog, dog, dog, dog, dog, dog'. Shorten them, or lower length_limit."
    ]
    make_study(tmp_path, STUDY.replace("length_limit = 12", "length_limit = 100000"))
    assert checked(file) == [
        "[prompts]: expected length_limit below the 64 tokens that the base reads at most; found 100000. "
        "Lower length_limit: prompt and text have to fit together."
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("doubt = 5", "expected doubt between 0 and 1; found 5"),
        ("doubt = 0.1\ntarget_rate = 0.5", "expected no doubt with a target rate below 1"),
        ('target_rate = 0.5\nsearch = "beam"\nbeams = 8', "expected sampling for a target rate of 0.5"),
        ("strength = 2\ntarget_rate = 0.5", "expected strength 1 with a target rate below 1"),
        ('exact_end = "on"\ntarget_rate = 0.5', 'expected a cheap oracle, completion "eos" and target'),
    ],
)
def test_a_check_finds_guidance_that_would_be_refused(tmp_path: Path, settings: str, expected: str) -> None:
    file = make_study(tmp_path, STUDY.replace("[generate]\n", f"[generate]\n{settings}\n"))
    (problem,) = checked(file)
    assert problem.startswith(f"[generate]: {expected}")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ('search = "beam"\nbeams = 8', 'search = "beam"'),
        ("doubt = 0.1", "doubt"),
        ("target_rate = 0.5", "a target_rate below 1"),
    ],
)
def test_a_check_finds_what_a_guide_that_was_only_warmed_up_will_be_refused_for(
    tmp_path: Path, settings: str, name: str
) -> None:
    """It would be refused after all its training."""
    asked = STUDY.replace("[generate]\n", f"[generate]\n{settings}\n")
    assert checked(make_study(tmp_path, asked)) == []
    assert checked(make_study(tmp_path, asked.replace("[train]\n", "[train]\nwarm_up = true\n"))) == [
        f"[generate]: expected a guide whose R is a probability, for {name}; found warm_up = true in "
        "[train], which leaves R known up to a factor at every prefix. Train without warm_up ([rounds] can "
        f"begin with one: warm_up_steps), or leave {name} out."
    ]


def test_a_warm_up_that_is_sampled_from_has_nothing_to_be_refused_for(tmp_path: Path) -> None:
    text = STUDY.replace("[train]\n", "[train]\nwarm_up = true\n")
    found = check_study(make_study(tmp_path, text), tmp_path / "study")
    assert not found.problems
    assert found.notes == ["warm_up fixes only the shape of R: rates and calibration will mean nothing"]


def test_a_check_finds_a_guide_of_another_base(copied: Path, tmp_path: Path) -> None:
    guide = copied.with_suffix("") / "train"
    assert checked(copied, guide=guide) == []
    longer = checked(copied, guide=guide, settings=["base.length_limit=13"], force=True)
    assert longer == [
        f"{guide}: expected a guide with length limit 13; found 12. Set length_limit = 12 in [base], or "
        "train another guide."
    ]
    small_models.save("llama", tmp_path / "other", seed=3)
    other = checked(copied, guide=guide, settings=[f"base.name={tmp_path}/other"], force=True)
    assert other == [
        f"{guide}: expected a guide of the base {tmp_path}/other; found one of another base, which differs "
        "in model. Name the base it was trained for, or train another guide."
    ]


def test_a_check_finds_stages_of_another_study_and_a_full_disk(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied.with_suffix("")
    assert "differs in train.steps. Use --force" in checked(copied, settings=["train.steps=61"])[0]
    assert checked(copied, settings=["train.steps=61"], force=True) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    assert checked(copied)[0] == (
        f"{folder}: expected 917.6 kB free at {folder}; found 1.0 kB. "
        "Free some space, choose another --folder, or draw fewer texts."
    )


# --- what is executed ---------------------------------------------------------------------------------


def test_a_python_oracle_is_never_executed_from_a_guide_s_folder(copied: Path, tmp_path: Path) -> None:
    guide = copied.with_suffix("") / "train"
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('executed')\n")
    (guide / "oracle.json").write_text(json.dumps({"table": {"name": f"{trap}:f"}}))
    assert saved_oracle(guide) is None
    with pytest.raises(NadoError) as error:
        use_guide(guide)
    assert str(error.value) == (
        "expected the oracle keywords, whose progress this guide reads; found only the name of its Python "
        "file. Name it: --oracle file.py:name. No file is executed that you have not named."
    )


def test_storage_errors_name_the_file(tmp_path: Path) -> None:
    stage = Stage("draw", tmp_path, {}, {})
    (tmp_path / "stage.json").write_text("{")
    with pytest.raises(StorageError, match="valid JSON"):
        stage.standing()


# --- the page -----------------------------------------------------------------------------------------


def test_a_study_is_reported_as_a_page(finished: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    """On a real evaluation: what it measured is on the page."""
    _, folder, evaluation = finished
    shown = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "page")])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip() == str(tmp_path / "page" / "report.html")
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    for row in evaluation["systems"]:
        assert f'value="{row["measures"]["satisfied"]["value"]!r}"' in page
    again = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "page")])
    assert isinstance(again.exception, InputError)
    missing = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "no evaluation.json" in str(missing.exception)


# --- beside another base ------------------------------------------------------------------------------


def test_a_guide_is_measured_beside_another_base_by_its_own_part_of_a_stricter_oracle(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide, other = copied.with_suffix("") / "train", copied.parent / "other"
    small_models.save("llama", other, seed=5)
    own = {"name": "keywords", "inflections": False, "at_least": 1}
    stricter = {"all": [{"name": "length", "minimum": 2}, own]}
    found = []
    for oracle in (own, stricter):
        caplog.clear()
        used = use_guide(guide, oracle=oracle, allow_other_base=True, name=str(other))
        assert isinstance(used.base, CausalModel)
        GuidedModel.from_pretrained(used.base, guide, oracle=used.oracle, allow_other_base=True)
        sources = [GuideSource(name, guide, oracle) for name in ("first", "second")]
        load_served(sources, allow_other_base=True, base={"name": str(other)})
        found.append([each for each in caplog.messages if "held-out texts success" in each])
    assert len(found[0]) == 4
    assert found[0] == found[1]


def test_a_guide_of_what_an_oracle_denies_is_said_to_be_one(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads the same of prefixes, but leads to the opposite."""
    guide = copied.with_suffix("") / "train"
    own = {"name": "keywords", "inflections": False, "at_least": 1}
    load(guide, oracle={"not": own})
    assert caplog.messages == ["the guide was trained for another oracle than this ~keywords"]


def test_the_short_table_has_no_negative_zero() -> None:
    measure = {"value": 0.5, "low": None, "high": None}
    measures = {"satisfied": measure, "parts": measure, "length": measure, "KL(q‖p)": {"value": -0.001}}
    system = {"system": "base", "exact_end": False, "measures": measures, "base_tokens": 1200, "seconds": 1.0}
    heads, (row,) = table_rows({"systems": [system]})
    assert row == ["base", "off", "50.0%", "50.0%", "0.5", "–", "0.00", "1,200", "1.0"]
    assert len(heads) == len(row)
