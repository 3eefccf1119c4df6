"""The recipe of the embedded model: clean sentences, the documents made of them, the whole path on a CPU."""

import gzip
import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import nado
from nado.errors import InputError
from nado.huggingface import load_model
from nado.storage import read_json
from nado.tiny import locate_guide

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny"
sys.path.insert(0, str(RECIPE))

import card  # noqa: E402
import install_guide  # noqa: E402
import prepare  # noqa: E402
import train_base  # noqa: E402
from distillation import keep_good, keys_of, prompt_words, repeats  # noqa: E402
from documents import IGNORED, Batch, Documents, Words, batches, openings, read_documents  # noqa: E402
from learning import Schedule, sparse_loss, total_loss, whole_loss  # noqa: E402
from measuring import coverage  # noqa: E402
from sentences import Sentence, clean, find_names, tidy  # noqa: E402
from word_choice import find_candidates  # noqa: E402

NOUNS = [
    "dog",
    "cat",
    "ball",
    "beach",
    "house",
    "car",
    "tree",
    "boat",
    "bird",
    "street",
    "garden",
    "river",
    "table",
    "window",
    "train",
]
VERBS = {"chase": "chases", "watch": "watches", "find": "finds", "paint": "paints", "carry": "carries"}
PLACES = ["park", "city", "village", "forest", "kitchen", "school", "market", "station"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred sentences in the three corpora's own formats, with their usual blemishes."""
    folder = tmp_path_factory.mktemp("raw")
    for name in ("commongen", "tatoeba_spa_eng", "coco_captions"):
        (folder / name).mkdir()
    chooser = random.Random(0)
    records = []
    for noun in NOUNS:
        for verb, third in VERBS.items():
            other, place = chooser.choice([each for each in NOUNS if each != noun]), chooser.choice(PLACES)
            texts = [f"a {noun} {third} the {other} in the {place} .", f"The {noun} {third} a {other}."]
            records.append({"concepts": [other, verb, noun], "targets": texts})
    lines = "".join(json.dumps(each) + "\n" for each in records)
    (folder / "commongen" / "train.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "commongen" / "dev.jsonl").write_text(
        json.dumps({"concepts": records[0]["concepts"][::-1]}) + "\n"
    )
    forms = {word: [word, VERBS.get(word, f"{word}s")] for word in [*NOUNS, *VERBS, *PLACES]}
    (folder / "commongen" / "concept_forms.json").write_text(json.dumps(forms))
    pairs = [f"Tom went to Boston with a {noun} near the {place}.\tx" for noun in NOUNS for place in PLACES]
    pairs += [f"I don’t like Tom's {noun}.\tx" for noun in NOUNS] * 2
    (folder / "tatoeba_spa_eng" / "spa-eng.tsv.gz").write_bytes(gzip.compress("\n".join(pairs).encode()))
    captions = [f"a {noun} in front of a {place} in boston" for noun in NOUNS for place in PLACES]
    (folder / "coco_captions" / "train.txt").write_text("\n".join(captions))
    return folder


@pytest.fixture(scope="module")
def prepared(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    arguments = ["--data", str(data), "--output", str(folder), "--vocabulary", "400", "--held-out", "12"]
    prepare.main(arguments)
    return folder


@pytest.fixture(scope="module")
def documents(prepared: Path) -> tuple[Documents, list[Sentence]]:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    sentences = train_base.read_sentences(prepared / "train.jsonl.gz")
    return read_documents(sentences, tokenizer, words_of(prepared), torch.device("cpu")), sentences


def words_of(prepared: Path) -> Words:
    tables = read_json(prepared / "words.json")
    return Words(tables["lemmas"], tables["names"])


# --- sentences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("a man in paris , eating  bread .", "A man in Paris, eating bread."),
        ("woman paddling canoe on a lake", "Woman paddling canoe on a lake."),
        ("i think i'm late , i do n't know", "I think I'm late, I don't know."),
        ("Don’t go – it’s late…", "Don't go - it's late..."),
        ('a note that reads " please sit " .', 'A note that reads "please sit".'),
        ("Tom's here!", "Tom's here!"),
    ],
)
def test_texts_get_ordinary_casing_and_punctuation(raw: str, wanted: str) -> None:
    assert tidy(raw, {"paris": "Paris"}) == wanted


def test_names_are_learned_where_they_do_not_begin_a_sentence() -> None:
    texts = ["We saw Paris.", "He saw May in may.", "Yes. Dogs saw us."] * 9
    assert find_names(texts) == {"paris": "Paris"}


def test_unfit_texts_and_copies_are_left_out() -> None:
    raw = [
        "a dog runs .", "A dog runs!", "Hi.", "football player runs .", "the the dog runs", "Él corre.",
        "What the fuck is it?", "word " * 26, "She said that that was fine.", 'An "open quote is bad.',
    ]  # fmt: skip
    kept = [each.text for each in clean((Sentence(text, "commongen") for text in raw), {})]
    assert kept == ["A dog runs.", "She said that that was fine."]


# --- what prepare.py writes ---------------------------------------------------------------------------


def test_held_out_sets_and_sentences_are_not_in_training(prepared: Path, data: Path) -> None:
    train, valid = (train_base.read_sentences(prepared / f"{name}.jsonl.gz") for name in ("train", "valid"))
    assert (
        {each.source for each in train} == {each.source for each in valid} == {"commongen", "coco", "tatoeba"}
    )
    assert {each.key for each in train}.isdisjoint(each.key for each in valid)
    sets = {frozenset(each.words) for each in valid if each.source == "commongen"}
    assert len(sets) == 12
    assert sets.isdisjoint(frozenset(each.words) for each in train)
    reported = prepare.read_sets(data / "commongen" / "dev.jsonl")
    assert reported.isdisjoint(frozenset(each.words) for each in [*train, *valid])
    assert all(each.words for each in valid)
    assert "A dog in front of a park in Boston." in {each.text for each in [*train, *valid]}


def test_preparing_again_gives_the_same_bytes(prepared: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(data), "--output", str(tmp_path), "--vocabulary", "400", "--held-out", "12"]
    prepare.main(arguments)
    names = [path.relative_to(prepared) for path in prepared.rglob("*") if path.is_file()]
    assert len(names) == 5
    assert all((prepared / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    "text",
    [
        "Any text, I'm sure.",
        " leading",
        "two  spaces\n\tand tabs ",
        "naïve 你好 🙂👩‍👩‍👧 \u0000 é",
        "x" * 300,
        "",
    ],
)
def test_the_tokenizer_gives_every_text_back(prepared: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


# --- keywords -----------------------------------------------------------------------------------------


def test_candidates_are_content_words_each_once_with_names_as_they_are() -> None:
    texts = pa.array(
        ["Dogs and Tom chase the DOGS and Tom.", "It is so.", "The dogs don't bark at Boston's cat."]
    )
    found = find_candidates(texts, {"dogs": "dog"}, {"tom": "Tom"}, ["zebra"])
    rows = [sorted(found.words[at] for at in row if at >= 0) for row in found.table]
    assert rows == [["Tom", "chase", "dogs"], [], ["bark", "cat", "dogs"]]
    lemmas = {word: found.words[found.lemma[at]] for at, word in enumerate(found.words)}
    assert lemmas["dogs"] == "dog"
    assert lemmas["zebra"] == "zebra"


def test_chosen_words_are_the_sentences_own_or_given(documents: tuple[Documents, list[Sentence]]) -> None:
    table, sentences = documents
    rows = torch.arange(len(sentences)).repeat(20)
    words = table.choose_words(rows, torch.Generator().manual_seed(0))
    prompts = table.prompts(words)
    as_given = 0
    for row, prompt in zip(rows.tolist(), prompts, strict=True):
        asked = prompt.removesuffix("=").split()
        sentence = sentences[row]
        own = [table.words[at] for at in table.candidates[row].tolist() if at >= 0]
        allowed = {
            *own,
            *sentence.words,
            *(table.words[table.lemma[at]] for at in table.candidates[row] if at >= 0),
        }
        assert set(asked) <= allowed
        assert 1 <= len(asked) <= 5
        as_given += sorted(asked) == sorted(sentence.words)
    with_sets = sum(bool(sentences[row].words) for row in rows.tolist())
    assert 0.6 < as_given / with_sets < 0.95  # 0.7 as they are, and some by chance


# --- documents ----------------------------------------------------------------------------------------


def expected_tokens(tokenizer: object, prompt: str, text: str) -> tuple[list[int], list[int]]:
    start = list(tokenizer(prompt)["input_ids"])  # type: ignore[operator]
    own = tokenizer(f" {text}" if prompt else text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    return start, [*own, tokenizer.eos_token_id]  # type: ignore[attr-defined]


def test_documents_are_what_the_tokenizer_makes_of_them(
    prepared: Path, documents: tuple[Documents, list[Sentence]]
) -> None:
    table, sentences = documents
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    rows = torch.arange(len(sentences))
    words = table.choose_words(rows, torch.Generator().manual_seed(1))
    words[::3] = -1
    padded = table.pad(table.compose(rows, words))
    prompts = table.prompts(words)
    for row, sentence in enumerate(sentences):
        start, rest = expected_tokens(tokenizer, prompts[row], sentence.text)
        whole = start + rest
        assert padded.tokens[row, : len(whole)].tolist() == whole
        labels = [IGNORED] * (len(start) - 1) + rest
        assert padded.labels[row].tolist() == labels + [IGNORED] * (padded.labels.shape[1] - len(labels))
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert table.prompt_lengths(words).tolist() == lengths
    assert prompts[0] == ""
    assert prompts[1].endswith(" =")


def test_packed_rows_have_the_same_tokens_and_learn_only_whole_beginnings(
    documents: tuple[Documents, list[Sentence]],
) -> None:
    table, sentences = documents
    rows = torch.arange(len(sentences))
    composed = table.compose(rows, table.choose_words(rows, torch.Generator().manual_seed(2)))
    padded, packed = table.pad(composed), table.pack(composed, 64)
    lengths = table.pieces.length[composed].sum(dim=1)
    flat = torch.cat([row[:length] for row, length in zip(padded.tokens, lengths, strict=True)])
    assert torch.equal(packed.tokens.flatten(), flat[: packed.tokens.numel()])
    begins = torch.cat([torch.arange(length) for length in lengths])[: packed.tokens.numel()]
    assert torch.equal(packed.position.flatten(), begins)
    labels = torch.cat([row[:length] for row, length in zip(padded.labels, lengths, strict=True)])
    seen = begins <= torch.arange(len(begins)) % 64  # the document begins in this row
    wanted = torch.where(seen, labels[: len(begins)], IGNORED)
    assert torch.equal(packed.labels.flatten(), wanted)
    assert 0 < int((~seen).sum()) < len(seen) / 4


def test_the_loss_of_packed_documents_is_that_of_each_alone(
    prepared: Path, documents: tuple[Documents, list[Sentence]]
) -> None:
    table, _ = documents
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    settings = train_base.Settings(teacher="random", hidden=32, layers=2, heads=4, intermediate=48)
    model = train_base.make_tiny(settings, tokenizer).eval()
    rows = torch.arange(8)
    composed = table.compose(rows, table.choose_words(rows, torch.Generator().manual_seed(3)))
    padded = table.pad(composed)
    width = (
        int(table.pieces.length[composed].sum()) - 1
    )  # all of them in one row; a last token predicts nothing
    packed = table.pack(composed, width)
    assert len(packed) == 1
    mean = float(total_loss(model, padded, rows=3).sum()) / int((padded.labels >= 0).sum())
    assert float(whole_loss(model, packed).detach()) == pytest.approx(mean, rel=1e-5)
    assert float(sparse_loss(model, packed).detach()) == pytest.approx(mean, rel=1e-5)
    blind = Batch(packed.tokens, packed.labels, torch.zeros_like(packed.document), packed.position)
    assert float(whole_loss(model, blind).detach()) != pytest.approx(mean, rel=1e-5)


def test_batches_go_through_all_sentences_in_every_pass(documents: tuple[Documents, list[Sentence]]) -> None:
    table, sentences = documents
    pool = torch.arange(len(sentences))
    source = batches(table, pool, 2, 32, torch.Generator().manual_seed(0), chunk=100)
    in_a_pass = len(table.stream(pool, 32, torch.Generator().manual_seed(0)))
    found = [next(source) for _ in range(in_a_pass // 2)]
    assert all(each.tokens.shape == (2, 32) for each in found)
    ends = sum(int((each.labels == 1).sum()) for each in found)  # one an unbroken sentence
    assert ends > 0.5 * len(sentences)


def test_a_tokenizer_that_joins_words_is_refused() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = {letter: at for at, letter in enumerate("<>= abcdog")}
    inner = Tokenizer(BPE({**letters, "g ": len(letters)}, [("g", " ")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=">", bos_token="<")
    with pytest.raises(InputError, match="a tokenizer that parts words at spaces"):
        read_documents([Sentence("dog bad", "x")], tokenizer, Words({}, {}), torch.device("cpu"))


def test_openings_are_what_stands_before_a_prompt(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    assert openings(tokenizer) == ([tokenizer.bos_token_id], [tokenizer.bos_token_id])


# --- distillation -------------------------------------------------------------------------------------


def test_prompts_for_the_teacher_are_of_all_kinds(documents: tuple[Documents, list[Sentence]]) -> None:
    table, sentences = documents
    words = prompt_words(table, 2000, torch.Generator().manual_seed(0))
    prompts = table.prompts(words)
    empty = sum(prompt == "" for prompt in prompts) / len(prompts)
    assert 0.22 < empty < 0.5  # those meant to be empty, and a few too long for the small vocabulary
    sets = {tuple(sorted(each.words)) for each in sentences if each.words}
    asked = {tuple(sorted(prompt.split()[:-1])) for prompt in prompts}
    assert len(asked & sets) > len(sets) / 2
    assert len(asked - sets) > 100
    assert int(table.prompt_lengths(words).max()) <= 16
    absent = words < 0
    assert not bool((absent[:, :-1] & ~absent[:, 1:]).any())  # no gap between keywords


def test_only_good_new_sentences_are_kept() -> None:
    texts = [
        " A dog runs home.", "A dog runs home!", " A dog sees a dog.", "It is is late.", "no capital here.",
        "A held out sentence.", "Cut off in the", " He sat on the red chair.", "Hm .",
        "Fine, he said.", "Odd.", "A naked man ran.", "Tom saw Tom.",
    ]  # fmt: skip
    finished = [text != "Cut off in the" for text in texts]
    log_p = np.linspace(-1.0, -2.0, len(texts))
    drawn = pa.table({"text": texts, "finished": finished, "log_p": log_p})
    known = keys_of(pa.array(["a held out sentence"]))
    kept, left = keep_good(drawn, known, {"tom": "Tom"}, drop_unlikely=0.0)
    assert kept.to_pylist() == ["A dog runs home.", "He sat on the red chair.", "Fine, he said."]
    assert list(left.values()) == [13, 12, 8, 5, 4, 3, 3]
    fewer, _ = keep_good(drawn, known, {"tom": "Tom"}, drop_unlikely=0.4)
    assert fewer.to_pylist() == ["A dog runs home.", "He sat on the red chair."]


def test_keys_are_those_of_sentences() -> None:
    texts = ["A dog, isn't it?", "12 o'clock!", "“Hm”"]
    assert keys_of(pa.array(texts)).to_pylist() == [Sentence(text, "x").key for text in texts]


def test_repetition_is_of_neighbours_or_content_words() -> None:
    texts = pa.array(
        ["The cat and the dog.", "The the cat.", "A cat and a Cat.", "", "It was a day. A day off."]
    )
    assert repeats(texts, {}).tolist() == [False, True, True, False, True]


# --- the schedule, and measuring ----------------------------------------------------------------------


def test_a_counted_schedule_rises_and_falls() -> None:
    schedule = Schedule(1.0, 4, steps=100)
    rates = []
    while not schedule.done:
        rates.append(schedule.rate)
        schedule.advance(lambda: None)
    assert len(rates) == 100
    assert rates[0] < rates[3] > rates[50] > rates[99]
    assert rates[3] == pytest.approx(1.0, abs=0.01)
    assert rates[99] == pytest.approx(0.01, abs=0.001)


def test_a_timed_schedule_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("learning.time.perf_counter", lambda: clock[0])
    schedule = Schedule(1.0, 10, seconds=100.0)
    while not schedule.done:
        clock[0] += 30.0 if schedule.step == 0 else 0.05 if schedule.step < 900 else 0.1
        schedule.advance(lambda: None)
    assert clock[0] - 30.0 == pytest.approx(100.0, rel=0.03)  # compiling, in the first step, does not count
    assert schedule.rate < 0.02


def test_coverage_takes_any_form_but_whole_words_only() -> None:
    forms = {"run": ["run", "ran"], "dog": ["dog", "dogs"]}
    assert coverage("The dogs ran.", ("run", "dog"), forms) == 1.0
    assert coverage("Doghouses run!", ("run", "dog"), forms) == 0.5
    assert coverage("", ("cat",), forms) == 0.0


# --- the whole path -----------------------------------------------------------------------------------

SMALL = {
    "teacher": "random", "epochs": 12, "teacher_rate": 1e-2, "teacher_rows": 8, "draws": 300,
    "draw_batch": 64, "part": 150, "hidden": 48, "layers": 2, "heads": 4, "intermediate": 96, "rows": 8,
    "width": 64, "steps": 150, "rate": 1e-2,
}  # fmt: skip


def arguments_for(prepared: Path, folder: Path, **changed: object) -> list[str]:
    settings = {**SMALL, **changed, "prepared": prepared, "work": folder / "work", "output": folder / "out"}
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_base.main(arguments_for(prepared, folder))
    return folder


def test_the_model_loads_in_plain_transformers_and_in_nado(trained: Path) -> None:
    model, tokenizer = (
        each.from_pretrained(trained / "out") for each in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.dtype == torch.float32
    inputs = tokenizer("dog ball =", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        direct = model(**inputs).logits[0, -1].log_softmax(-1)
    loaded = load_model(trained / "out", length_limit=8)
    assert torch.allclose(loaded.start(["dog ball ="]).log_p[0], direct, atol=1e-4)
    assert loaded.encode([""]) == [[tokenizer.bos_token_id]]
    assert loaded.refillable
    stored = trained / "out" / "model.safetensors"
    parameters = sum(each.numel() for each in model.parameters())
    assert stored.stat().st_size < 2 * parameters + 10_000  # float16, the tied matrix once


def test_it_learned_and_the_report_says_so(trained: Path) -> None:
    report = read_json(trained / "out" / "report.json")
    first, last = report["stages"]["tiny"]["losses"][0], report["stages"]["tiny"]["losses"][-1]
    assert last[2] < first[2] - 1.0  # on held-out sentences
    for name in ("tiny", "teacher"):
        for form in ("after_keywords", "free"):
            assert 1.0 < report[name][form]["token"] < report[name][form]["word"] < 400
    assert (
        report["tiny"]["after_keywords"]["token"] < report["tiny"]["free"]["token"]
    )  # keywords tell something
    assert len(report["tiny"]["free_samples"]) == 50
    assert report["stages"]["distilled"]["left"]["drawn"] == 300
    assert report["stages"]["distilled"]["left"]["likely"] > 0
    assert "/" not in report["settings"]["teacher"]
    names = {path.name for path in (trained / "out").iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "report.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_perplexity_is_that_of_nados_own_scores(trained: Path, prepared: Path) -> None:
    """The report's number again, from `LanguageModel.score` instead of the training code."""
    valid = train_base.read_sentences(prepared / "valid.jsonl.gz")
    model = load_model(trained / "out", length_limit=64)
    total, count = 0.0, 0
    for each in valid:
        rows = model.encode_texts([f" {each.text}"])[0]
        tokens = torch.tensor([[*rows, model.eos_id]])
        scores = model.score([f"{' '.join(each.words)} ="], tokens, torch.tensor([tokens.shape[1]]))
        total, count = total + float(scores.sum()), count + tokens.shape[1]
    report = read_json(trained / "out" / "report.json")
    assert np.exp(-total / count) == pytest.approx(report["tiny"]["after_keywords"]["token"], rel=1e-3)


def test_a_repeated_command_does_nothing_again_and_a_changed_one_what_it_must(
    trained: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = (trained / "out" / "model.safetensors").read_bytes()
    shutil.copytree(trained / "work", tmp_path / "work")
    train_base.main(arguments_for(prepared, tmp_path))
    assert re.findall(r"(\w+): done before", capsys.readouterr().out) == ["teacher", "distilled", "tiny"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    train_base.main(arguments_for(prepared, tmp_path, steps=3))
    assert re.findall(r"(\w+): done before", capsys.readouterr().out) == ["teacher", "distilled"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != weights


def test_the_readme_and_the_card_take_their_numbers_from_the_report(trained: Path, tmp_path: Path) -> None:
    report = read_json(trained / "out" / "report.json")
    readme = tmp_path / "README.md"
    readme.write_text((RECIPE / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    for _ in range(2):  # filling it again replaces what was there
        card.main(
            [str(trained / "out" / "report.json"), "--readme", str(readme), "--card", str(tmp_path / "card")]
        )
    text = readme.read_text(encoding="utf-8")
    assert text.count(f"50. {report['tiny']['free_samples'][49]}") == 1
    assert f"{report['tiny']['after_keywords']['word']:.1f}" in text
    model_card = (tmp_path / "card").read_text(encoding="utf-8")
    assert f"{report['tiny']['parameters']:,} parameters" in model_card
    for licence in ("MIT", "CC BY 2.0", "CC BY 4.0", "Apache-2.0"):
        assert licence in model_card
    readme.write_text("nothing to fill", encoding="utf-8")
    with pytest.raises(InputError, match="Put them back"):
        card.fill(readme, report)


def test_a_trained_guide_is_installed_in_half_precision(tmp_path: Path) -> None:
    source = locate_guide("positive")
    trained = tmp_path / "train"
    shutil.copytree(source, trained)
    weights = {name: value.float() + 1e-5 for name, value in load_file(source / "model.safetensors").items()}
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    (trained / "held_out.parquet").write_bytes(b"what only training needs")
    install_guide.main([str(trained), str(tmp_path / "package")])
    installed = load_file(tmp_path / "package" / "model.safetensors")
    assert all(torch.equal(value, weights[name].half()) for name, value in installed.items())
    assert not (tmp_path / "package" / "held_out.parquet").exists()
    guide = nado.load(tmp_path / "package", device="cpu").guides[0]
    assert all(each.dtype == torch.float32 for each in guide.parameters())
