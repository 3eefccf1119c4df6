"""The translation study: its parts, and all of it on a CPU with an invented language pair."""

import gzip
import json
import random
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from archives import unpack
from nado.errors import InputError
from nado.huggingface import load_model
from nado.metrics import mean
from nado.oracles import load_oracle
from nado.proposals import summarise_weights
from nado.storage import read_json
from nado.study import read_study

RECIPE = Path(__file__).parents[1] / "recipes" / "formality_mt"
sys.path.insert(0, str(RECIPE))

import fisher_scores  # noqa: E402
import formality_page  # noqa: E402
import guide_variants  # noqa: E402
import learning  # noqa: E402
import paper_table  # noqa: E402
import prepare_translation  # noqa: E402
import run_formality  # noqa: E402
import score_formality  # noqa: E402
import train_translator  # noqa: E402
import tuned_lines  # noqa: E402
from drawn_texts import read_chunks  # noqa: E402
from formality_classifiers import auc, rank, spearman  # noqa: E402
from formality_data import Rated, detokenise, halve  # noqa: E402
from formality_oracle import FormalityOracle, RememberedFormality, spell_out  # noqa: E402
from packing import pack_in_pieces  # noqa: E402
from raw_files import read_records, write_records  # noqa: E402
from style_judge import StyleJudge, habits_of, runs_of  # noqa: E402
from table_settings import Row, read_table  # noqa: E402
from translation_data import as_spoken, key_of  # noqa: E402
from translator import Pairs, _cut  # noqa: E402
from vocabulary import PAD_ID, UNKNOWN_ID, train_vocabulary  # noqa: E402

NOUNS = {"perro": "dog", "gato": "cat", "niño": "child", "coche": "car", "árbol": "tree", "libro": "book"}
VERBS = {"mira": "watches", "busca": "seeks", "pinta": "paints", "lleva": "carries"}
INFORMAL = 0.65  # share of the base's training translations

TABLE = """
[search]
beams = 2
batch = 64
[best_of]
count = 4
[fudge]
texts = 400
strengths = [1.0]
[verified]
guide = "t1"
budget = 4
[guides.t1]
title = "NADO, T = 1"
doubts = [0.0, 0.1]
plausibles = [0.0, 1.0]
beam_strengths = [1.0]
beam_doubts = [0.0, 1.0]
[guides.again]
title = "NADO, T = 1, a round"
learning_rate = 1e-3
[guides.again.round]
start = "t1"
texts = 6
mean_prefix = 4.0
[guides.warm]
title = "NADO, T = 2"
temperature = 2.0
consistency_weight = 1.0
"""
SETTINGS = {
    "base.length_limit": "16",
    "draw.samples_per_prompt": "20",
    "draw.batch_size": "256",
    "oracle.threshold": "0.5",
    "guide.size": "32",
    "guide.heads": "4",
    "guide.layers": "1",
    "data.held_out": "0.2",
    "train.steps": "150",
    "train.batch_size": "64",
    "train.learning_rate": "3e-3",
}

TRAINING = ["--size", "48", "--heads", "4", "--feed-forward", "96", "--encoder-layers", "1"]
TRAINING += ["--decoder-layers", "1", "--dropout", "0.0", "--label-smoothing", "0.0"]
TRAINING += ["--steps", "300", "--tokens", "1200", "--warm-up", "20", "--rate", "5e-3", "--beams", "2"]


def sentences() -> list[tuple[str, str]]:
    """Spanish and formal English, every one there is."""
    return [
        (f"El {one} {verb} el {other}.", f"The {NOUNS[one]} {VERBS[verb]} the {NOUNS[other]}.")
        for one in NOUNS
        for verb in VERBS
        for other in NOUNS
        if one != other
    ]


def informally(english: str) -> str:
    return f"yeah {english.lower()[:-1]}..."


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, records)


def utterances(pairs: list[tuple[str, str]], name: str, references: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name} {number}",
            "es_oracle": as_spoken(spanish),
            "es_asr": as_spoken(spanish).replace("el ", "un ", 1),
            "en_refs": [informally(english)] * references,
        }
        for number, (spanish, english) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpora's own formats, in a language of six nouns and four verbs."""
    folder, chooser = tmp_path_factory.mktemp("raw"), random.Random(0)
    pairs = sentences()
    chooser.shuffle(pairs)
    learned, dev, test = pairs[:70], pairs[70:95], pairs[95:]
    both = [
        (informally(english) if chooser.random() < INFORMAL else english, spanish)
        for spanish, english in learned
        for _ in range(6)
    ]
    tatoeba = folder / "tatoeba_spa_eng"
    tatoeba.mkdir()
    rows = [*both, *((english, spanish.upper()) for spanish, english in test[:3])]  # which must be left out
    lines = "".join(f"{english}\t{spanish}\n" for english, spanish in rows)
    (tatoeba / "spa-eng.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    lines = "".join(f"{english}\t{spanish}\n" for spanish, english in test)
    name = "tatoeba-challenge-test-v2023-09-26.eng-spa.tsv.gz"
    (tatoeba / name).write_bytes(gzip.compress(lines.encode()))
    speech = folder / "fisher_callhome"
    parts = {"callhome_train": learned[:20], "fisher_dev2": learned[20:40], "fisher_dev": dev}
    parts |= {"callhome_devtest": learned[40:], "callhome_evltest": dev[:5], "fisher_test": test}
    for part, several in parts.items():
        spoken = utterances(several, part, 4 if "fisher" in part else 1)
        spoken[-1] |= {"es_oracle": ""} if part == "fisher_test" else {}  # nothing was recognised
        write(speech / f"{part}.jsonl", spoken)
    fluent = [
        {"id": f"fisher_test {number}", "fluent_refs": ["None" if number % 8 == 0 else english, "None"]}
        for number, (_, english) in enumerate(test)
    ]
    write(folder / "fluent_fisher" / "test.jsonl", fluent)
    outputs = [
        {"id": f"fisher_test {number}", "marian_base": informally(english), "nado_T0.80": english}
        for number, (_, english) in enumerate(test)
    ]
    write(folder / "nado_mt_dumps" / "fisher_test_outputs.jsonl", outputs)
    write(folder / "pavlick_formality" / "pavlick_formality.jsonl", rated(chooser))
    return folder


def rated(chooser: random.Random) -> list[dict[str, Any]]:
    """Sentences like those that are translated, formal ones rated above 0."""
    found = []
    for spanish, english in sentences():
        formal = chooser.random() < 0.5
        text = english if formal else informally(english)
        if chooser.random() < 0.5:
            text = text.replace("the", "a", 1)
        score = 1.0 if formal else -1.0
        found.append({"domain": "news", "score": score, "ratings": [score], "id": spanish, "text": text})
    return found


@pytest.fixture(scope="module")
def prepared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared")
    words = ["--data", str(data), "--output", str(output), "--vocabulary", "90"]
    assert prepare_translation.main(words) == 0
    return output


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train_translator.main(train_words(prepared, folder)) == 0
    return folder


def train_words(prepared: Path, folder: Path) -> list[str]:
    words = [
        "--corpus",
        str(prepared / "corpus"),
        "--work",
        str(folder / "work"),
        "--output",
        str(folder / "out"),
    ]
    return [*words, *TRAINING]


def run_words(prepared: Path, trained: Path, folder: Path) -> list[str]:
    (folder / "table.toml").write_text(TABLE, encoding="utf-8")
    study = prepared / "study"
    settings = {
        **SETTINGS,
        "base.name": str(trained / "work" / "base" / "model"),
    }
    words = ["--prepared", str(study), "--work", str(folder / "work"), "--output", str(folder / "out")]
    words += ["--table", str(folder / "table.toml")]
    return words + [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def finished(data: Path, prepared: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it by one command; what it does first was done before, and is not done again."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "work").mkdir()
    (folder / "work" / "prepared").symlink_to(prepared)
    (folder / "work" / "translator").symlink_to(trained / "work")
    words = run_words(prepared, trained, folder)
    words[:2] = ["--data", str(data)]
    at = next(at for at, word in enumerate(words) if word.startswith("base.name="))
    del words[at - 1 : at + 1]
    words += ["--prepare", "--vocabulary 90", "--train", " ".join(TRAINING)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_translation, "prepare", None)
        patch.setattr(train_translator, "train_stage", None)
        assert run_formality.main([*words, "--keep", "t1", "--workers", "1"]) == 0
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in read_json(folder / "out" / "formality_mt.json")["metrics"]["rows"]}


def test_one_command_leads_from_data_to_the_tables(finished: Path) -> None:
    text = (finished / "out" / "results.md").read_text(encoding="utf-8")
    assert f"| base | greedy | – | – | – | {rows_of(finished)['base-greedy']['bleu_fluent']:.2f}" in text
    assert "Base: " in text  # how it was trained


# --- data ---------------------------------------------------------------------------------------------


def test_no_sentence_of_the_test_is_learned_in_either_language(prepared: Path) -> None:
    corpus = prepared / "corpus"
    pairs = read_records(corpus / "pairs.jsonl.gz", "pairs")
    tests = read_records(corpus / "tatoeba_test.jsonl.gz", "a test set")
    for side in ("es", "en"):
        shared = {key_of(each[side]) for each in pairs} & {key_of(each[side]) for each in tests}
        assert not shared
    spoken = [each["es"] for each in pairs if each["es"].islower()]
    assert len(spoken) > len(pairs) / 3  # every written sentence is learned as a recogniser writes it, too


def test_sources_are_of_speech_and_none_is_of_the_test(prepared: Path) -> None:
    records = read_records(prepared / "study" / "sources.jsonl", "sources")
    parts = {
        split: [each["prompt"] for each in records if each["split"] == split] for split in ("train", "test")
    }
    assert len(parts["train"]) > 40
    assert not set(parts["train"]) & set(parts["test"])
    learned = {each["es"] for each in read_records(prepared / "corpus" / "pairs.jsonl.gz", "pairs")}
    known = [source in learned for source in parts["train"]]
    assert known == sorted(known)  # what the base has been trained on comes last


def test_the_literal_none_is_no_reference(prepared: Path) -> None:
    tested = read_records(prepared / "study" / "test.jsonl.gz", "the test set")
    assert not any("None" in each["fluent"] for each in tested)
    assert sum(not each["fluent"] for each in tested) == len(tested[::8])
    assert "fluent" not in read_records(prepared / "corpus" / "fisher_test.jsonl.gz", "the test set")[0]


def test_missing_data_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_translation.main(["--data", str(tmp_path), "--output", str(tmp_path / "out")]) == 1
    found = capsys.readouterr().err.strip()
    path = tmp_path / "fluent_fisher" / "test.jsonl"
    assert found == (
        f"error: expected fluent references of Fisher test in {path}; found no such file. Get Fluent Fisher, "
        "fluent references of Fisher dev and test (no licence: local use only) and put it into "
        f"{path.parent}."
    )


def test_a_run_without_prepared_files_or_base_says_what_to_do(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--work", str(tmp_path), "--output", str(tmp_path)]
    empty = ["--set", f"prompts.file={tmp_path / 'none.jsonl'}"]
    assert run_formality.main(["--prepared", str(tmp_path), *words, *empty]) == 1
    found = capsys.readouterr().err
    assert f"the prepared file {tmp_path / 'none.jsonl'}; found none. Run prepare_translation.py" in found
    study = prepared / "study"
    given = ["--set", f"prompts.file={study / 'sources.jsonl'}", "--set", f"oracle.folder={study / 'oracle'}"]
    given += ["--set", f"base.name={tmp_path / 'nobody'}"]
    assert run_formality.main(["--prepared", str(study), *words, *given]) == 1
    assert "no such folder. Train it with train_translator.py and unpack it there" in capsys.readouterr().err
    assert run_formality.main(["--data", str(tmp_path / "nothing"), *words]) == 1
    assert "Get Fluent Fisher" in capsys.readouterr().err
    assert train_translator.main(["--corpus", str(tmp_path), *words]) == 1
    assert "what prepare_translation.py writes in" in capsys.readouterr().err


def test_spoken_forms_have_no_case_and_no_marks() -> None:
    assert as_spoken("¿Qué tal, «amigo»? Well-known: it's ok!") == "qué tal amigo well-known it's ok"
    assert key_of("¡Hola,  Mundo!") == key_of("hola mundo")


def test_the_vocabulary_is_sentencepieces_own(prepared: Path, tmp_path: Path) -> None:
    import sentencepiece

    texts = [text for pair in sentences() for text in pair]
    tokenizer = train_vocabulary(texts, 70, tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sentencepiece.model"))
    ours = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [list(row) for row in ours] == pieces.encode(texts)
    assert [tokenizer.decode(row) for row in ours] == texts
    assert tokenizer(texts[0])["input_ids"][-1] == tokenizer.eos_token_id
    assert read_json(tmp_path / "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


# --- classifiers --------------------------------------------------------------------------------------


def test_tokens_are_written_as_people_write() -> None:
    assert detokenise("that 's bull , is n't it ?") == "that's bull, isn't it?"
    assert detokenise('He said " go on " ( twice ) .') == 'He said "go on" (twice).'


def test_halves_share_nothing() -> None:
    sentences_ = [Rated(str(number), 1.0, "news") for number in range(11)]
    first, second = halve(sentences_, seed=1)
    assert {each.text for each in first} | {each.text for each in second} == {
        each.text for each in sentences_
    }
    assert not set(first) & set(second)


def test_marks_and_capitals_are_spelled_out() -> None:
    assert spell_out("I don't know... OK") == "capstart wordI don joint know markdots OK allcaps"
    assert spell_out("") == "lowstart"
    assert spell_out("ok, 3 dogs!") == "lowstart ok markcomma number dogs markshout"


def test_the_oracle_of_the_study_file_is_the_prepared_one(prepared: Path) -> None:
    study = read_study(RECIPE / "study.toml", [f"oracle.folder={prepared / 'study' / 'oracle'}"])
    oracle: Any = load_oracle(study.oracle)
    answers = oracle(["", ""], ["The dog watches the tree.", "yeah the dog watches the tree..."])
    assert answers.tolist() == [True, False]
    assert oracle.cheap
    other = FormalityOracle(prepared / "study" / "oracle", threshold=0.9)
    assert other.fingerprint != oracle.fingerprint
    assert study.train.consistency_weight == 0.1
    assert study.guide.layers == 3


def test_a_remembered_oracle_is_the_same_and_looks_at_a_text_once(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = FormalityOracle(prepared / "study" / "oracle")
    remembered = RememberedFormality(oracle)
    assert remembered.fingerprint == oracle.fingerprint
    assert remembered.progress_names("x") == oracle.progress_names("x")
    texts = ["The dog watches the tree.", "yeah the dog...", "The dog watches the tree.", ""]
    looked: list[str] = []
    probabilities = oracle.probabilities
    monkeypatch.setattr(
        FormalityOracle,
        "probabilities",
        lambda self, some: (looked.extend(some), self.classifier.probabilities(map(spell_out, some)))[1],
    )
    for several in (texts, texts[::-1], [*texts, "A cat."]):
        expected = probabilities(several) >= 0.5
        assert remembered([""] * len(several), several).tolist() == expected.tolist()
    assert looked == ["The dog watches the tree.", "yeah the dog...", "", "A cat."]
    monkeypatch.setattr("formality_oracle._REMEMBERED", 3)
    assert remembered([""] * 4, texts).tolist() == (probabilities(texts) >= 0.5).tolist()
    assert len(remembered._found) == 3


def test_the_oracle_says_how_formal_a_prefix_is(prepared: Path) -> None:
    folder = prepared / "study" / "oracle"
    plain, stepped = FormalityOracle(folder), FormalityOracle(folder, steps=(0.2, 0.5, 0.9))
    assert stepped.fingerprint != plain.fingerprint
    texts = ["", "The dog", "The dog watches the tree.", "yeah the dog...", "yeah"]
    found = plain.probabilities(texts)
    for oracle in (stepped, RememberedFormality(stepped)):
        bits, ends = oracle.read_prefixes([""] * 5, texts)
        assert ends.tolist() == (found >= 0.5).tolist() == plain([""] * 5, texts).tolist()
        assert np.array_equal(np.stack(bits), found[:, None] >= [0.2, 0.5, 0.9])
        assert np.array_equal(np.stack(bits), np.stack(oracle.progress([""] * 5, texts)))
        assert oracle.progress_names("x") == ["formality 0.2", "formality 0.5", "formality 0.9"]
    bits, ends = plain.read_prefixes([""] * 5, texts)
    assert [each.tolist() for each in bits] == [[each] for each in ends.tolist()]
    assert plain.progress_names("x") == ["formality"]


def test_the_judge_scores_as_it_was_fitted(tmp_path: Path) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [text for _, english in sentences()[::3] for text in (english, informally(english))]
    labels = [text[0] == "T" for text in texts]
    judge = StyleJudge.fit(texts, labels)
    judge.save(tmp_path)
    again = StyleJudge.load(tmp_path)
    unseen = [text for _, english in sentences()[1::3] for text in (english, informally(english))]
    found = again.probabilities(unseen)
    assert np.array_equal(found, judge.probabilities(unseen))
    assert auc(found, [text[0] == "T" for text in unseen]) > 0.99
    # The same number by scikit-learn's own features.
    vectoriser = TfidfVectorizer(analyzer=runs_of, vocabulary=list(judge.runs), sublinear_tf=True)
    vectoriser.idf_ = judge.idf.astype(np.float64)
    centre, spread, weight = judge.habits
    habits = ((np.array([habits_of(text) for text in unseen]) - centre) / spread) @ weight
    log_odds = vectoriser.transform(unseen) @ judge.weights + habits + judge.bias
    assert np.allclose(found, 1 / (1 + np.exp(-log_odds)), atol=1e-5)


def test_ranks_correlations_and_areas_by_hand() -> None:
    assert rank([3.0, 1.0, 3.0]).tolist() == [2.5, 1.0, 2.5]
    assert auc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auc([0.5, 0.5], [True, False]) == 0.5
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)


# --- the base -----------------------------------------------------------------------------------------


def test_batches_hold_every_pair_once_within_their_size() -> None:
    sides = [
        [[5] * length + [1] for length in range(1, 40)],
        [[6] * (40 - length) + [1] for length in range(1, 40)],
    ]
    pairs = Pairs(sides, torch.device("cpu"))
    source, seen = pairs.batches(120, torch.Generator().manual_seed(0)), []
    while len(seen) < len(pairs):
        batch = next(source)
        assert batch.tokens.numel() <= 120
        assert batch.labels.numel() <= 120
        assert (batch.inputs[:, 0] == PAD_ID).all()
        shifted = batch.labels[:, :-1].masked_fill(batch.labels[:, :-1] < 0, PAD_ID)
        kept = batch.inputs[:, 1:].masked_fill(batch.labels[:, 1:] < 0, PAD_ID)
        assert torch.equal(kept, shifted.masked_fill(batch.labels[:, 1:] < 0, PAD_ID))
        seen += batch.mask.sum(dim=1).tolist()
    assert sorted(seen) == [length + 1 for length in range(1, 40)]


def test_no_cut_is_too_large() -> None:
    lengths = torch.tensor([1, 3, 2, 5, 4, 9, 8])
    cuts = _cut(lengths, 10)
    assert [row for cut in cuts for row in range(cut.start, cut.stop)] == list(range(7))
    assert all(int(lengths[cut].max()) * (cut.stop - cut.start) <= 10 for cut in cuts)


def test_a_variant_has_the_studys_weights_but_for_its_own() -> None:
    materials: Any = SimpleNamespace(
        study=read_study(RECIPE / "study.toml", []), base=SimpleNamespace(device=torch.device("cpu"))
    )
    guides = read_table(RECIPE / "table.toml").guides
    found = {name: guide_variants.training_config(materials, each, 60) for name, each in guides.items()}
    weights = {name: (each.consistency_weight, each.log_consistency_weight) for name, each in found.items()}
    assert weights["t1"] == weights["t54"] == weights["t53"] == (0.1, 0.0)
    assert (weights["loose"], weights["tight"], weights["logs"]) == ((0.01, 0.0), (1.0, 0.0), (0.1, 0.1))


def test_a_round_goes_on_from_a_guide_with_texts_that_it_begins(finished: Path) -> None:
    stages = read_json(finished / "out" / "formality_mt.json")["metrics"]["stages"]
    drawn, begun = stages["samples-1"], stages["round-again"]
    assert begun["texts"] == drawn["texts"] * 6 // 20
    assert begun["satisfied_as_drawn"] > drawn["satisfied_as_drawn"] + 0.1  # q̂ and a sharper p lead them
    assert stages["guide-again"]["texts"] == stages["guide-t1"]["texts"] * 26 // 20
    rows = rows_of(finished)
    assert rows["again-greedy"]["satisfied"] > rows["base-greedy"]["satisfied"] + 0.3


def test_a_round_names_a_guide_before_it_of_its_temperature(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    late = TABLE.replace("[guides.t1]", "[guides.late]").replace('guide = "t1"', 'guide = "late"')
    path.write_text(late, encoding="utf-8")
    with pytest.raises(InputError) as failure:
        read_table(path)
    assert str(failure.value) == (
        "expected a guide before again, of the same temperature, to start from; found t1. "
        "Name one of these: late."
    )
    path.write_text(TABLE + '[guides.warm.round]\nstart = "t1"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"found t1\. Put it behind such a guide\."):
        read_table(path)


def test_slopes_by_compiled_layers_go_on_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said, asked = torch.nn.Linear(3, 1), [], []

    class Compiled(torch.nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            asked.append(len(batch))
            if len(batch) > 2:
                raise RuntimeError("no code for this shape")
            return torch.as_tensor(model(batch))

    monkeypatch.setattr(learning, "compile_layers", lambda model: Compiled())
    slopes = learning.FusedSlopes(model, lambda runs: lambda batch: runs(batch).sum(), said.append)
    for rows in (2, 4, 3):
        batch: Any = torch.ones(rows, 3)
        assert float(slopes(batch)) == pytest.approx(model(batch).sum().item())
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[rows] * 3]
    assert asked == [2, 4]  # and is not asked again
    assert said == ["  layers are not compiled any more: no code for this shape"]


def test_the_base_translates_and_can_write_neither_padding_nor_unknown_pieces(trained: Path) -> None:
    model: Any = load_model(trained / "work" / "base" / "model", length_limit=16)
    state = model.start(["el perro mira el gato"])
    assert state.log_p[0, [PAD_ID, UNKNOWN_ID]].exp().max() == 0
    scores = read_json(trained / "out" / "base.json")["metrics"]["base_scores"]
    assert scores["fisher_test_greedy"]["value"] > 50  # unseen sentences of known words
    assert scores["fisher_test_greedy"]["n"] == 25


def test_the_base_comes_back_from_its_pieces(trained: Path, tmp_path: Path) -> None:
    pieces = sorted((trained / "out").glob("base.tar.*"))
    (tmp_path / "base.tar").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(tmp_path / "base.tar") as archive:
        unpack(archive, tmp_path)
    for path in (trained / "work" / "base" / "model").iterdir():
        assert (tmp_path / "base" / path.name).read_bytes() == path.read_bytes()


def test_pieces_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packing.PIECE", 5000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(12_000))
    pieces = pack_in_pieces(tmp_path / "folder", tmp_path / "out", "name")
    assert len(pieces) == 5  # 12,000 bytes and what a tar file adds, rounded up to 20 blocks of 512 each
    assert max(piece.stat().st_size for piece in pieces) == 5000


# --- the study ----------------------------------------------------------------------------------------


def test_guides_raise_formality_and_everything_is_in_the_table(finished: Path) -> None:
    rows = rows_of(finished)
    assert list(rows) == [
        "base-greedy",
        "base-beam",
        "best_of-sample",
        "fudge-greedy",
        "fudge-beam",
        "t1-greedy",
        "t1-greedy-doubt0.1",
        "t1-greedy-plausible1",
        "t1-greedy-doubt0.1-plausible1",
        "t1-beam",
        "t1-beam-doubt1",
        "verified-sample",
        "again-greedy",
        "warm-greedy",
    ]
    base, guided = rows["base-greedy"], rows["t1-greedy"]
    assert base["satisfied"] < 0.5  # the base was taught to be informal, most of the time
    assert guided["satisfied"] > base["satisfied"] + 0.3
    assert guided["formality_judge"] > base["formality_judge"] + 0.2  # which no guide was trained for
    against = guided["against_base"]["formality_judge"]
    assert against["low"] > 0
    assert against["difference"] == pytest.approx(guided["formality_judge"] - base["formality_judge"])
    assert guided["bleu_fluent"] > base["bleu_fluent"]
    doubted = rows["t1-greedy-doubt0.1"]
    assert base["satisfied"] <= doubted["satisfied"] < guided["satisfied"]
    assert doubted["against_base"]["satisfied"]["difference"] == doubted["satisfied"] - base["satisfied"]
    assert "against_fudge" in doubted
    # Of the likeliest token alone there is nothing to choose.
    assert rows["t1-greedy-plausible1"]["against_base"]["same_texts"] == 1
    assert "against_fudge" in rows["t1-greedy-plausible1"]
    assert rows["t1-beam"]["against_base"]["same_texts"] < 1
    assert rows["t1-beam-doubt1"]["against_base"]["same_texts"] == 1  # wholly doubted the guide has no say
    assert rows["verified-sample"]["satisfied"] >= rows["verified-sample"]["verified"] > 0.9
    assert "against_fudge" in guided
    assert (finished / "out" / "guide-t1.tar.00").stat().st_size > 10_000
    assert "against_base" not in base


def test_tempered_samples_are_weighted_back_to_p(finished: Path) -> None:
    stages = read_json(finished / "out" / "formality_mt.json")["metrics"]["stages"]
    plain, warm = stages["samples-1"], stages["samples-2"]
    assert plain["effective_share"] == pytest.approx(1.0)
    assert plain["satisfied_under_p"] == pytest.approx(plain["satisfied_as_drawn"])
    samples = read_chunks(finished / "work" / "draws-2")
    columns = [samples.ragged(name) for name in ("log_p", "log_proposal")]
    sums = [[float(column.row(row).sum()) for row in range(len(samples))] for column in columns]
    log_weights = np.array(sums[0]) - np.array(sums[1])
    # A mean four standard errors away from 1 is warned of; so it is with the ratio upside down.
    assert summarise_weights(log_weights, warn=False).warnings() == []
    assert summarise_weights(-log_weights, warn=False).warnings() != []
    weights = np.exp(np.minimum(log_weights, np.log(10)))
    satisfied = samples.array("satisfied")
    assert warm["satisfied_under_p"] == pytest.approx(float(weights[satisfied].sum() / weights.sum()))
    assert (
        warm["satisfied_under_p"] < warm["satisfied_as_drawn"]
    )  # heat makes the rarer, formal ones likelier
    assert stages["guide-warm"]["ess"] < 0.9
    assert stages["audit"]["audit"]["passed"]


def test_scores_are_those_of_the_texts(finished: Path, prepared: Path) -> None:
    import sacrebleu

    tested = read_records(prepared / "study" / "test.jsonl.gz", "the test set")
    texts = {
        each["source"]: each["text"]
        for each in read_records(finished / "out" / "texts.jsonl.gz", "texts")
        if each["row"] == "t1-greedy"
    }
    row = rows_of(finished)["t1-greedy"]
    told = [each for each in tested if each["fluent"]]
    bleu = sacrebleu.corpus_bleu(
        [texts[each["source"]] for each in told], [[each["fluent"][0] for each in told]]
    )
    assert row["bleu_fluent"] == pytest.approx(bleu.score)
    oracle = FormalityOracle(prepared / "study" / "oracle", 0.5)
    found = oracle.probabilities([texts[each["source"]] for each in tested])
    assert row["formality_oracle"] == pytest.approx(float(found.mean()))


def test_a_second_run_does_nothing_again(
    prepared: Path, trained: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_json(finished / "out" / "formality_mt.json")["metrics"]["rows"]
    texts = finished / "work" / "rows" / "base-greedy" / "texts.jsonl"
    stamp = texts.stat().st_mtime_ns
    assert run_formality.main(run_words(prepared, trained, finished)) == 0
    said = capsys.readouterr().out
    assert said.count("done before") == 14 + 2 + 2 + 1 + 3 + 1  # lines, draws, labels, round, guides, audit
    assert texts.stat().st_mtime_ns == stamp
    assert read_json(finished / "out" / "formality_mt.json")["metrics"]["rows"] == before
    assert train_translator.main(train_words(prepared, trained)) == 0
    assert capsys.readouterr().out.count("done before") == 2


def test_a_line_that_was_interrupted_is_made_again_and_is_the_same(
    prepared: Path, trained: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished / "work" / "rows" / "t1-greedy"
    before = (folder / "texts.jsonl").read_bytes()
    record = read_json(folder / "stage.json")
    del record["facts"]  # as it stands while a stage is at work
    (folder / "stage.json").write_text(json.dumps(record), encoding="utf-8")
    (folder / "texts.jsonl").unlink()
    assert run_formality.main([*run_words(prepared, trained, finished), "--no-score"]) == 0
    assert capsys.readouterr().out.count("done before") == 22
    assert (folder / "texts.jsonl").read_bytes() == before


def test_results_fill_the_readme_and_go_on_record(
    finished: Path, prepared: Path, trained: Path, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        f"before\n{formality_page.BEGIN}\nold\n{formality_page.FINISH}\nafter\n", encoding="utf-8"
    )
    words = [str(finished / "out"), "--prepared", str(prepared / "study"), "--readme", str(readme)]
    words += ["--base", str(trained / "out" / "base.json"), "--record", "--results", str(tmp_path)]
    assert score_formality.main(words) == 0
    text = readme.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "| NADO, T = 1 | greedy | 1 |" in text
    assert "Each method with the setting" in text
    assert "Audit of the oracle on" in text
    recorded = read_json(tmp_path / "formality_mt.json")
    assert set(recorded) == {"date", "machine", "command", "commit", "metrics", "runs"}
    assert "examples" not in recorded["metrics"]
    assert "translator" in recorded["metrics"]
    assert str(tmp_path) not in json.dumps(recorded)
    with pytest.raises(InputError, match="the marks"):
        formality_page.fill(tmp_path / "formality_mt.json", "text")


def test_where_time_is_short_the_last_guides_are_left_out() -> None:
    run = object.__new__(run_formality.Run)
    run.table, run.left_out = read_table(RECIPE / "table.toml"), {}
    done: set[str] = set()
    run.stages = SimpleNamespace(is_done=lambda name: name in done)  # type: ignore[assignment]

    def fit(left: float) -> list[str]:
        run.clock = SimpleNamespace(left=left, say=lambda text: None)  # type: ignore[assignment]
        return run.fitting(names)

    names = list(run.table.guides)
    assert fit(float("inf")) == names
    assert run.left_out == {}
    kept = fit(run.reserve(names[:3]) + 3 * 60)
    assert names[:3] == kept[:3] != names[:1]
    assert set(run.left_out) == set(names) - set(kept)
    assert fit(20.0) == []
    assert set(run.left_out) == set(names)
    done.add(f"guide-{names[0]}")  # what is trained already is decoded
    assert fit(20.0) == names[:1]


def test_a_round_that_is_drawn_takes_no_share_of_its_guides_time() -> None:
    run = object.__new__(run_formality.Run)
    run.table = read_table(RECIPE / "table.toml")
    done: set[str] = set()
    run.stages = SimpleNamespace(is_done=lambda name: name in done)  # type: ignore[assignment]
    before = run.reserve(["round", "t54"])
    done.add("round-round")
    assert before - run.reserve(["round", "t54"]) == run_formality._ROUND_SECONDS
    assert run.reserve(["t54"]) < run.reserve(["round", "t54"])


def test_a_guide_without_lines_is_said_to_be_left_out() -> None:
    metrics = {
        "rows": [{"system": "base"}, {"system": "one"}],
        "table": {"guides": {"one": {}, "two": {}, "three": {}}},
        "left_out": {"three": "no time", "fudge-greedy": "no samples"},
    }
    assert score_formality.left_out(metrics) == {
        "two": "no line of it is there",
        "three": "no time",
        "fudge-greedy": "no samples",
    }


TUNED_SOURCES = [f"source {number}" for number in range(60)] + ["source 0", "source 1"]


def chooses(source: str) -> bool:
    return bool(tuned_lines._inside([source], chooses=True)[0])


def scored_line(bleu: float, formality: float, elsewhere: float) -> fisher_scores.Scored:
    """Values on the sources that choose; on the others everything is `elsewhere`. BLEU is of some of them."""
    groups = {"bleu_fluent": TUNED_SOURCES[5:], "formality_oracle": TUNED_SOURCES}
    values = {"bleu_fluent": bleu, "formality_oracle": formality}
    metrics = {
        name: mean(name, [values[name] if chooses(source) else elsewhere for source in sources])
        for name, sources in groups.items()
    }
    return fisher_scores.Scored(TUNED_SOURCES, metrics, groups)


def test_a_setting_is_chosen_on_some_sources_and_reported_on_the_others() -> None:
    lines = {
        Row("base", "base", "greedy"): scored_line(10.0, 0.2, 0.0),
        Row("fudge", "FUDGE", "greedy"): scored_line(9.9, 0.3, 1.0),
        Row("one", "one", "greedy"): scored_line(9.8, 0.4, 2.0),
        Row("one", "one", "greedy", 2.0, 0.1): scored_line(9.71, 0.5, 3.0),
        Row("one", "one", "greedy", 3.0): scored_line(9.69, 0.9, 4.0),
        Row("poor", "poor", "greedy"): scored_line(5.0, 0.9, 5.0),
        Row("poor", "poor", "greedy", 2.0): scored_line(4.0, 0.95, 6.0),
    }
    scored = {row.name: line for row, line in lines.items()}
    tuned = tuned_lines.tune([{**asdict(row), "name": row.name} for row in lines], scored)
    found = {each["system"]: each for each in tuned["lines"]}
    assert {name: (each["strength"], each["doubt"], each["tried"]) for name, each in found.items()} == {
        "fudge": (1.0, 0.0, 1),
        "one": (2.0, 0.1, 3),  # the third is more formal, but too far from the base
        "poor": (1.0, 0.0, 2),  # none is near it: the best BLEU
    }
    assert found["one"]["against_base"]["bleu_fluent"]["difference"] == pytest.approx(3.0)
    assert found["one"]["against_fudge"]["formality_oracle"]["difference"] == pytest.approx(2.0)
    assert "against_fudge" not in found["fudge"]
    reporting = [source for source in TUNED_SOURCES if not chooses(source)]
    assert found["one"]["utterances"] == len(reporting)
    assert 0 < len(reporting) < len(TUNED_SOURCES)
    part = tuned_lines.part_of(scored["one-greedy"], chooses=False)
    assert part.texts == part.groups["formality_oracle"] == reporting
    assert part.groups["bleu_fluent"] == [source for source in TUNED_SOURCES[5:] if not chooses(source)]
    assert len(part.metrics["bleu_fluent"].rows) == len(part.groups["bleu_fluent"])


def test_unknown_names_in_the_table_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text('[guides.one]\ntitle = "one"\ntemprature = 2.0\n', encoding="utf-8")
    with pytest.raises(InputError, match="temprature"):
        read_table(path)
    path.write_text('[guides.one]\ntitle = "one"\n[verified]\nguide = "two"\n', encoding="utf-8")
    with pytest.raises(InputError, match="one of the guides one; found two"):
        read_table(path)
    assert read_table(RECIPE / "table.toml").temperatures == [1.0, 1.25, pytest.approx(5 / 3)]


# --- the paper's table --------------------------------------------------------------------------------


def test_the_page_compares_the_published_outputs_like_for_like(data: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert paper_table.main(["--data", str(data), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    # The invented NADO writes the fluent references themselves, its base what the original ones say.
    line = next(line for line in text.splitlines() if "both fluent references, “None” dropped" in line)
    assert "| 21 |" in line
    assert "| 100.00 |" in line
    assert "in 4 of these 5 comparisons" in text
    assert "| `.` |" in text  # two marks less in every text
    assert "| A, E, I, T, W, Y: counted | 0 | 25 | +1.0000" in text  # "The …" where the base has "yeah the …"
    assert paper_table.main(["--data", str(tmp_path), "--page", str(page)]) == 1
