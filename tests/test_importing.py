"""Samples drawn elsewhere: read, held to the limit, re-scored under p, and honest about what is unknown."""

import json

import numpy as np
import pytest
import torch

import small_models
from nado.drawing import draw_rows
from nado.errors import InputError, MismatchError, StorageError
from nado.exact import TabularModel
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.importing import import_samples
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import read_samples, samples_folder
from nado.warpers import Warpers

EOS = small_models.EOS


def real(kind="gpt2", limit=6, **more):
    seq2seq = kind in small_models.SEQ2SEQ
    adapter = EncoderDecoderModel if seq2seq else CausalModel
    tokenizer = small_models.tokenizer(appends_eos=seq2seq)
    return adapter(small_models.build(kind), tokenizer, length_limit=limit, **more)


def tabular(completion="eos"):
    return TabularModel.random(
        ("one", "two"), vocabulary_size=4, length_limit=3, completion=completion, seed=5
    )


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows(samples, name="tokens"):
    return samples.table[name].to_pylist()


@pytest.mark.parametrize("kind", ["gpt2", "marian"])
def test_texts_come_back_scored_under_p(tmp_path, kind):
    model = real(kind)
    records = [
        {"prompt": "the old man", "condition": "dog", "text": "the dog runs"},
        {"prompt": "a", "text": ""},
        {"prompt": "the", "text": "a cat sees the red ball on the beach"},
    ]
    samples = import_samples(model, write(tmp_path / "in.jsonl", records), tmp_path / "s", batch_size=2)
    the, dog, run, a, cat, see, red = (
        small_models.VOCABULARY.index(word) for word in ("the", "dog", "runs", "a", "cat", "sees", "red")
    )
    assert rows(samples) == [[the, dog, run, EOS], [EOS], [a, cat, see, the, red, 8]]
    assert samples.strings("text") == ["the dog runs", "", "a cat sees the red ball"]
    assert samples.array("finished").tolist() == [True, True, False]  # the last one is cut, as p would have
    assert samples.strings("condition") == ["dog", "a", "the"]
    for row, tokens in enumerate(rows(samples)):
        scored = model.score([records[row]["prompt"]], torch.tensor([tokens]), torch.tensor([len(tokens)]))
        assert np.abs(scored[0].numpy() - samples.ragged("log_p").row(row)).max() < 1e-4
    assert set(samples.strings("proposal")) == {"imported"}


def test_what_was_drawn_here_can_be_imported(tmp_path):
    for model in (tabular(), tabular("limit"), real("llama")):
        prompts = [Prompt("one", "one"), Prompt("two", "two")] * 20
        drawn = draw_rows(model, prompts, range(40), proposal=Proposal(), seed=1, batch_size=16)
        records = [
            {name: row[name] for name in ("prompt", "condition", "tokens")} for row in drawn.to_pylist()
        ]
        path = write(tmp_path / f"{model.fingerprint}.jsonl", records)
        samples = import_samples(model, path, tmp_path / model.fingerprint, drawn_from_p=True)
        for name in ("row", "prompt", "condition", "tokens", "text", "finished", "prefix_length"):
            assert samples.table[name].to_pylist() == drawn[name].to_pylist()
        log_p = np.concatenate(drawn["log_p"].to_pylist())
        assert np.abs(samples.ragged("log_p").values - log_p).max() < 1e-4
        assert set(samples.strings("proposal")) == {"imported, from p"}
        assert not samples.log_weights().any()


def test_an_unknown_proposal_has_no_weights(tmp_path):
    path = write(
        tmp_path / "in.jsonl", [{"prompt": "one", "tokens": [0, 3]}, {"prompt": "two", "tokens": [3]}]
    )
    import_samples(tabular(), path, tmp_path / "s")
    samples = read_samples(tmp_path / "s")
    assert rows(samples, "log_proposal") == [None, None]
    assert samples.array("prefix_length").tolist() == [2, 1]
    with pytest.raises(InputError, match=r"expected log_proposal of every sample; found 2 of 2 without it\."):
        samples.log_weights()


@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_the_limit_counts_eos(tmp_path, completion):
    model = tabular(completion)
    records = [
        {"prompt": "one", "tokens": [0, 1, 3]},  # EOS as the last token allowed
        {"prompt": "one", "tokens": [0, 1, 2]},  # cut at the limit
        {"prompt": "one", "tokens": [0, 1, 2, 3]},  # one too long: p would have cut it
        {"prompt": "one", "tokens": [0, 1, 2], "finished": True},
        {"prompt": "one", "tokens": [0], "finished": True},  # its EOS was left out
        {"prompt": "one", "tokens": [0, 1, 2, 0, 1], "finished": False},
    ]
    samples = import_samples(model, write(tmp_path / "in.jsonl", records), tmp_path / "s")
    cut = [0, 1, 2]
    assert rows(samples) == [[0, 1, 3], cut, cut, cut, [0, 3], cut]
    finished = [True, False, False, False, True, False] if completion == "eos" else [True] * 6
    assert samples.array("finished").tolist() == finished


def test_other_eos_ids_count_as_the_first(tmp_path):
    base = small_models.build("gpt2")
    base.generation_config.eos_token_id = [EOS, 21]
    model = CausalModel(base, small_models.tokenizer(), length_limit=6)
    path = write(
        tmp_path / "in.jsonl", [{"prompt": "a", "tokens": [5, 21]}, {"prompt": "a", "tokens": [5, EOS]}]
    )
    samples = import_samples(model, path, tmp_path / "s")
    assert rows(samples) == [[5, EOS], [5, EOS]]


def test_a_tokenizer_that_changes_a_text_is_said(tmp_path, caplog):
    path = write(
        tmp_path / "in.jsonl", [{"prompt": "a", "text": "the zebra"}, {"prompt": "a", "text": "the  dog"}]
    )
    samples = import_samples(real(), path, tmp_path / "s")
    assert [record.message for record in caplog.records] == [
        "1 of 2 texts read otherwise once this model's tokenizer has seen them, the first 'the zebra': "
        "samples keep what the tokenizer made of them"
    ]
    assert samples.strings("text") == ["the", "the dog"]


def test_an_import_is_resumed_and_another_one_refused(tmp_path):
    records = [{"prompt": "one", "tokens": [row % 3, 3]} for row in range(10)]
    path = write(tmp_path / "in.jsonl", records)
    first = import_samples(tabular(), path, tmp_path / "s", shard_rows=3, batch_size=2)
    folder = samples_folder(tmp_path / "s")
    before = folder.manifest_path.read_bytes()
    folder.shard_path(1).unlink()
    seen = []
    again = import_samples(
        tabular(), path, tmp_path / "s", shard_rows=3, batch_size=2, on_progress=seen.append
    )
    assert again.table.equals(first.table)
    assert folder.manifest_path.read_bytes() == before
    assert [(now.rows, now.resumed_rows) for now in seen] == [(9, 7), (10, 7)]
    with pytest.raises(
        MismatchError, match=r"differs in file \(\w+ there, \w+ here\)\. Choose another folder"
    ):
        import_samples(tabular(), write(path, records[:9]), tmp_path / "s", shard_rows=3, batch_size=2)


REFUSED = [
    (
        [{"prompt": "one", "text": "ab"}],
        "expected a model that can make tokens of texts; found TabularModel, which has no encode_texts. Give "
        "the tokens of each sample instead of its text.",
    ),
    (
        [{"prompt": "one"}],
        "expected either a string text or a list tokens in {file}, line 1; found the fields ['prompt']. "
        'Write {{"prompt": "…", "text": "…"}}.',
    ),
    (
        [{"prompt": "one", "text": "a", "tokens": [0]}],
        "expected either a string text or a list tokens in {file}, line 1; found the fields ['prompt', "
        '\'text\', \'tokens\']. Write {{"prompt": "…", "text": "…"}}.',
    ),
    (
        [{"prompt": "one", "tokens": [0, 3]}, {"prompt": "one", "tokens": [0, 4]}],
        "expected token ids from 0 to 3 in {file}, line 2; found [0, 4]. Use the ids of this model's own "
        "tokenizer.",
    ),
    (
        [{"prompt": "one", "tokens": "abc"}],
        "expected token ids from 0 to 3 in {file}, line 1; found abc. Use the ids of this model's own "
        "tokenizer.",
    ),
    (
        [{"prompt": "one", "tokens": [0, 3, 1]}],
        "expected EOS only at the end in {file}, line 1; found tokens after it. Drop what follows it.",
    ),
    (
        [{"prompt": "one", "tokens": [0, 1]}],
        "expected a text that ended itself, or one of at least 3 tokens, in {file}, line 1; found one cut "
        "off after 2. Nobody knows how p would have gone on: import it for a lower length limit, or draw "
        "it anew.",
    ),
    (
        [{"prompt": "one", "tokens": [0, 3], "finished": "yes"}],
        "expected finished as true or false in {file}, line 1, and true where the tokens end with EOS; found "
        "'yes'. Leave it out where the text ended itself.",
    ),
    (
        [{"prompt": "one", "tokens": [0, 3], "finished": False}],
        "expected finished as true or false in {file}, line 1, and true where the tokens end with EOS; found "
        "False. Leave it out where the text ended itself.",
    ),
    ([], 'expected at least one sample in {file}; found none. Write {{"prompt": "…", "text": "…"}}.'),
    (
        [{"text": "a"}],
        "expected a model that can make tokens of texts; found TabularModel, which has no encode_texts. Give "
        "the tokens of each sample instead of its text.",
    ),
    (
        [{"tokens": [3]}],
        "expected a field prompt or condition in {file}, line 1; found the fields ['tokens']. Rename the "
        "field the base should read to prompt.",
    ),
]


@pytest.mark.parametrize(("records", "message"), REFUSED)
def test_what_is_refused(tmp_path, records, message):
    path = write(tmp_path / "in.jsonl", records)
    with pytest.raises(InputError) as raised:
        import_samples(tabular(), path, tmp_path / "s")
    assert str(raised.value) == message.format(file=path)
    assert not (tmp_path / "s").exists()


def test_a_text_that_p_cannot_write_is_named(tmp_path):
    model = real(warpers=Warpers(forbidden=(7,)))
    path = write(
        tmp_path / "in.jsonl", [{"prompt": "a", "text": "the dog"}, {"prompt": "a", "text": "the cat"}]
    )
    with pytest.raises(InputError) as raised:
        import_samples(model, path, tmp_path / "s")
    assert str(raised.value) == (
        f"expected a text that p can write in {path}, line 2; found log p = -inf of its token 2, number 7. "
        "Drop the record, or load the model with the warpers it was drawn with."
    )


def test_sizes_and_files_that_make_no_sense(tmp_path):
    with pytest.raises(InputError, match=r"expected shard_rows of at least 1; found 0\. Ask for 1 or more\."):
        import_samples(tabular(), tmp_path / "in.jsonl", tmp_path / "s", shard_rows=0)
    with pytest.raises(InputError, match="expected a file of records; found nothing at"):
        import_samples(tabular(), tmp_path / "in.jsonl", tmp_path / "s")
    (tmp_path / "file").touch()
    path = write(tmp_path / "in.jsonl", [{"prompt": "one", "tokens": [3]}])
    with pytest.raises(StorageError, match="expected a folder at"):
        import_samples(tabular(), path, tmp_path / "file" / "s")
