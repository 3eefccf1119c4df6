"""Labels on disk: the oracle's answers beside the samples, resumable, tied to oracle and samples."""

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import small_models
from nado.drawing import draw
from nado.errors import InputError, MismatchError, OracleError, StorageError
from nado.exact import TabularModel
from nado.huggingface import CausalModel
from nado.oracles import Length, Pattern, StartsWith, oracle
from nado.prompts import Prompt
from nado.sample_labels import decode_prefixes, label_samples
from nado.samples import Ragged, labels_folder, read_samples, samples_folder
from nado.storage import hold

QUESTION = Pattern("a") & Length(minimum=2, unit="characters")
MODEL = TabularModel.random(("one", "two"), vocabulary_size=4, length_limit=4, seed=5)


# At the top of the module: worker processes find it by name.
@oracle
def fails_on_aab(text):
    if text == "aab":
        raise ValueError("no")
    return "a" in text


def draw_small(folder, model=MODEL, prompts=("one", "two"), **more):
    arguments = {"samples_per_prompt": 50, "seed": 4, "batch_size": 8, "shard_rows": 16, **more}
    return draw(model, [Prompt(text, text) for text in prompts], folder, **arguments)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts_of_prefixes(samples, model):
    """Every prefix's text, decoded one at a time."""
    tokens = samples.ragged("tokens")
    return [
        [model.decode([tokens.row(row)[:i].tolist()])[0] for i in range(len(tokens.row(row)))]
        for row in range(len(samples))
    ]


# --- what the labels are ------------------------------------------------------------------------------


def test_labels_are_the_oracles_answers(tmp_path):
    drawn = draw_small(tmp_path / "s")
    samples = label_samples(tmp_path / "s", QUESTION, batch_size=5)
    assert samples.table.select(drawn.table.column_names).equals(drawn.table)
    texts, conditions = samples.strings("text"), samples.strings("condition")
    expected = QUESTION(conditions, texts) & samples.array("finished")
    assert samples.array("satisfied").tolist() == expected.tolist()
    parts = samples.ragged("parts")
    for row, answers in enumerate(QUESTION.parts(conditions, texts)):
        assert parts.row(row).tolist() == answers.tolist()
    assert read_samples(tmp_path / "s").table.equals(samples.table)


def test_a_text_that_was_cut_is_unsatisfied(tmp_path):
    draw_small(tmp_path / "s")
    samples = label_samples(tmp_path / "s", Pattern(""))
    assert samples.array("satisfied").tolist() == samples.array("finished").tolist()
    assert not samples.array("finished").all()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_prefix_is_read_by_the_function_that_decoding_uses(tmp_path, workers):
    draw_small(tmp_path / "s")
    question = QUESTION & StartsWith("b")
    samples = label_samples(
        tmp_path / "s", question, model=MODEL, prefixes=True, batch_size=13, workers=workers
    )
    stops, progress = samples.ragged("stops"), samples.ragged("progress")
    rows = zip(texts_of_prefixes(samples, MODEL), samples.strings("condition"), strict=True)
    for row, (prefixes, condition) in enumerate(rows):
        assert prefixes[0] == ""
        assert len(prefixes) == len(samples.ragged("tokens").row(row))
        bits, answers = question.read_prefixes([condition] * len(prefixes), prefixes)
        assert stops.row(row).tolist() == answers.tolist()
        assert progress.row(row).tolist() == np.concatenate(bits).tolist()
    # The last prefix of a text that ended itself is the text.
    ended = [tokens[-1] == MODEL.eos_id for tokens in samples.table["tokens"].to_pylist()]
    last = np.array([stops.row(row)[-1] for row in range(len(samples))])
    assert (last == samples.array("satisfied"))[ended].all()


def test_without_prefixes_and_parts_their_columns_are_empty(tmp_path):
    draw_small(tmp_path / "s")
    samples = label_samples(tmp_path / "s", QUESTION, parts=False)
    for name, hint in (("parts", "parts"), ("stops", "prefixes"), ("progress", "prefixes")):
        with pytest.raises(InputError) as raised:
            samples.ragged(name)
        assert str(raised.value) == (
            f"expected {name} of every sample; found 100 of 100 without it. Label the samples with {hint}."
        )


def test_prefixes_of_a_real_model():
    model = CausalModel(small_models.build("gpt2"), small_models.tokenizer(), length_limit=8)
    rows = [[4, 6, 10, 1], [4, 6, 11, 4, 3, 7, 8], [1], [4, 6, 10, 9]]
    tokens = Ragged(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    texts = decode_prefixes(model, tokens)
    assert texts == [model.decode([row[:i] for i in range(len(row))]) for row in rows]
    assert texts[0] == ["", "the", "the dog", "the dog runs"]


def test_many_prefixes_are_decoded_in_chunks(monkeypatch):
    monkeypatch.setattr("nado.sample_labels._DECODED_TOKENS", 5)
    tokens = Ragged(np.array([0, 1, 2, 3, 0, 1, 3, 2, 2, 2, 2]), np.array([0, 4, 7, 11]))
    assert decode_prefixes(MODEL, tokens) == [["", "a", "ab", "abc"], ["", "a", "ab"], ["", "c", "cc", "ccc"]]


# --- manifest -----------------------------------------------------------------------------------------


def test_the_manifest_says_how_often(tmp_path, caplog):
    draw_small(tmp_path / "s")
    samples = label_samples(tmp_path / "s", QUESTION)
    manifest = labels_folder(tmp_path / "s").manifest()
    satisfied = int(samples.array("satisfied").sum())
    assert 0 < satisfied < 100
    assert (manifest["rows"], manifest["satisfied"], manifest["rate"]) == (100, satisfied, satisfied / 100)
    assert (manifest["oracle"], manifest["notes"]) == (QUESTION.name, [])
    assert manifest["config"]["oracle"] == QUESTION.fingerprint
    assert not caplog.records


@pytest.mark.parametrize(("pattern", "kind"), [("z", "no"), ("", "every")])
def test_one_answer_only_is_noted_and_said(tmp_path, caplog, pattern, kind):
    model = TabularModel.random(("one", "two"), vocabulary_size=4, length_limit=4, completion="limit")
    draw_small(tmp_path / "s", model)
    label_samples(tmp_path / "s", Pattern(pattern))
    note = (
        f"{kind} text of 100 satisfies pattern: a guide needs both kinds. Audit the oracle, draw more "
        "samples, or draw from a proposal nearer to what is rare."
    )
    assert labels_folder(tmp_path / "s").manifest()["notes"] == [note]
    assert [record.message for record in caplog.records] == [note]


def test_of_a_part_of_the_samples_one_answer_only_is_noted_but_not_said(tmp_path, caplog):
    model = TabularModel.random(("one", "two"), vocabulary_size=4, length_limit=4, completion="limit")
    draw_small(tmp_path / "s", model)
    label_samples(tmp_path / "s", Pattern(""), quiet=True)
    (note,) = labels_folder(tmp_path / "s").manifest()["notes"]
    assert note.startswith("every text of 100 satisfies pattern")
    assert not caplog.records


def test_progress_is_told(tmp_path):
    draw_small(tmp_path / "s")
    seen = []
    label_samples(
        tmp_path / "s", QUESTION, on_progress=lambda now: seen.append((threading.current_thread(), now))
    )
    assert [now.rows for _, now in seen] == [16, 32, 48, 64, 80, 96, 100]
    assert {thread for thread, _ in seen} == {threading.current_thread()}


# --- stopping and going on ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_an_oracle_that_fails_keeps_whole_shards(tmp_path, workers):
    drawn = draw_small(tmp_path / "s")
    first_bad = drawn.strings("text").index("aab") // 16
    assert first_bad > 0  # a good shard comes first
    with pytest.raises(OracleError) as raised:
        label_samples(tmp_path / "s", fails_on_aab, batch_size=4, workers=workers)
    assert raised.value.expected == "an answer from the oracle fails_on_aab"
    assert raised.value.found.startswith("ValueError: no for the text 'aab' under")
    labels = labels_folder(tmp_path / "s")
    assert raised.value.hint == (
        "Shards before it are kept for the same oracle. A mended one is another: "
        f"delete {labels.path} and label again."
    )
    written = [index for index in range(7) if labels.shard_path(index).exists()]
    assert written == list(range(first_bad))
    with pytest.raises(StorageError) as raised:
        read_samples(tmp_path / "s")
    assert str(raised.value) == (
        f"expected all 7 shards in {labels.path}; found {7 - first_bad} missing, the first "
        f"shard-{first_bad:05d}.parquet. Run the command that began it again: it goes on where it stopped."
    )
    # Samples can be had, and drawing is still complete.
    assert read_samples(tmp_path / "s", labels=False).table.equals(drawn.table)
    assert draw_small(tmp_path / "s").table.equals(drawn.table)


def test_only_what_is_missing_is_asked_again(tmp_path):
    draw_small(tmp_path / "s")
    first = label_samples(tmp_path / "s", QUESTION)
    before = contents(tmp_path / "s")
    seen = []
    label_samples(tmp_path / "s", QUESTION, on_progress=seen.append)
    assert seen == []
    labels_folder(tmp_path / "s").shard_path(6).unlink()
    again = label_samples(tmp_path / "s", QUESTION, on_progress=seen.append)
    assert again.table.equals(first.table)
    assert [(now.rows, now.resumed_rows) for now in seen] == [(100, 96)]
    assert contents(tmp_path / "s") == before


def test_killed_at_every_touch_of_the_disk_and_resumed(tmp_path):
    draw_small(tmp_path / "samples")
    script = """
    import os, shutil, signal, sys
    from pathlib import Path
    import pyarrow.compute
    from nado.exact import TabularModel
    from nado.oracles import Pattern
    from nado.sample_labels import label_samples

    base = Path(sys.argv[1])
    model = TabularModel.random(("one", "two"), vocabulary_size=4, length_limit=4, seed=5)

    def run(folder, limit=None):
        seen = 0
        def count(event, arguments):
            nonlocal seen
            if event in ("open", "os.rename", "os.remove") and str(folder / "labels") in str(arguments[0]):
                seen += 1
                if seen == limit:
                    os.kill(os.getpid(), signal.SIGKILL)
        child = os.fork()
        if child == 0:
            try:
                sys.addaudithook(count)
                label_samples(folder, Pattern("a"), model=model, prefixes=True, batch_size=8)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def contents(folder):
        return {path.name: path.read_bytes() for path in (folder / "labels").iterdir()}

    whole, folder = base / "whole", base / "run"
    shutil.copytree(base / "samples", whole)
    shutil.copytree(base / "samples", folder)
    assert run(whole) == 0
    for k in range(1, 1000, 3):
        first = run(folder, k)
        if first == 0:
            break
        assert first == -signal.SIGKILL, first
        assert run(folder) == 0
        assert contents(folder) == contents(whole), k
        shutil.rmtree(folder / "labels")
    print(k)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 20


# --- what is refused ----------------------------------------------------------------------------------


def test_labels_of_another_oracle_are_refused(tmp_path):
    draw_small(tmp_path / "s")
    label_samples(tmp_path / "s", QUESTION)
    before = contents(tmp_path / "s")
    for change, difference in (
        ({"oracle": Pattern("b")}, "oracle ("),
        ({"prefixes": True, "model": MODEL}, "prefixes (False there, True here)"),
        ({"parts": False}, "parts (True there, False here)"),
    ):
        with pytest.raises(MismatchError) as raised:
            label_samples(tmp_path / "s", **{"oracle": QUESTION, **change})
        assert raised.value.expected == f"{tmp_path / 's' / 'labels'} to hold this same run"
        assert raised.value.found.startswith(f"another one, which differs in {difference}")
        assert raised.value.hint == "Choose another folder, or delete this one."
    assert contents(tmp_path / "s") == before


def test_labels_of_samples_that_were_drawn_anew_are_refused(tmp_path):
    draw_small(tmp_path / "s")
    label_samples(tmp_path / "s", QUESTION)
    for path in (tmp_path / "s").glob("*.*"):
        path.unlink()
    draw_small(tmp_path / "s", seed=5)
    with pytest.raises(MismatchError, match="found labels of other samples"):
        read_samples(tmp_path / "s")
    with pytest.raises(MismatchError, match=r"which differs in samples \("):
        label_samples(tmp_path / "s", QUESTION)


def test_prefixes_need_the_model_the_samples_were_drawn_from(tmp_path):
    draw_small(tmp_path / "s")
    with pytest.raises(InputError) as raised:
        label_samples(tmp_path / "s", QUESTION, prefixes=True)
    assert str(raised.value) == (
        "expected the model the samples were drawn from, because prefixes are asked for; found none. Give "
        "model=, or leave prefixes out."
    )
    other = TabularModel.random(("one",), seed=6)
    with pytest.raises(MismatchError) as raised:
        label_samples(tmp_path / "s", QUESTION, model=other, prefixes=True)
    assert str(raised.value) == (
        f"expected the model the samples were drawn from, {MODEL.fingerprint}; found {other.fingerprint}. "
        "Load that model with its own warpers, limit and completion."
    )
    assert not (tmp_path / "s" / "labels").exists()


def test_samples_that_are_not_complete_are_not_labelled(tmp_path):
    draw_small(tmp_path / "s")
    folder = samples_folder(tmp_path / "s")
    manifest = folder.manifest()
    folder.shard_path(2).unlink()
    with pytest.raises(
        StorageError, match=r"expected all 7 shards in .*; found 1 missing, the first shard-00002"
    ):
        label_samples(tmp_path / "s", QUESTION)
    folder.manifest_path.unlink()
    with pytest.raises(StorageError, match="expected a file"):
        label_samples(tmp_path / "s", QUESTION)
    for path in folder.path.glob("shard*"):
        path.unlink()
    folder.open(manifest["config"], 1)
    folder.write(0, folder.schema.empty_table())
    with pytest.raises(MismatchError) as raised:
        label_samples(tmp_path / "s", QUESTION)
    assert str(raised.value) == (
        f"expected a complete run in {folder.path}; found one whose last step was interrupted. Run the "
        "command that drew it again, then label."
    )


def test_two_runs_cannot_label_at_once(tmp_path):
    draw_small(tmp_path / "s")
    labels = labels_folder(tmp_path / "s")
    with hold(labels.path), pytest.raises(StorageError, match="found another run that is writing to it"):
        label_samples(tmp_path / "s", QUESTION)


def test_a_batch_size_that_makes_no_sense(tmp_path):
    with pytest.raises(InputError) as raised:
        label_samples(tmp_path, QUESTION, batch_size=0)
    assert str(raised.value) == "expected batch_size of at least 1; found 0. Ask for 1 or more."
