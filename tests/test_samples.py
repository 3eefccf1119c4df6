"""Samples in memory and on disk: columns, weights, folders that are resumed, checked and never destroyed."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nado.errors import CoverageError, InputError, MismatchError, StorageError
from nado.samples import (
    LABEL_SCHEMA,
    SCHEMA,
    Ragged,
    Samples,
    join_samples,
    labels_folder,
    read_samples,
    samples_digest,
    samples_folder,
)

CONFIG = {"model": "m", "seed": 0, "proposal": {"components": [{"share": 1.0}], "uncorrected": False}}


def make_table(rows=(0, 1, 2), **columns):
    lengths = [1 + row % 3 for row in rows]
    table = {
        "row": list(rows),
        "prompt": ["x"] * len(rows),
        "condition": ["y"] * len(rows),
        "tokens": [[7] * length for length in lengths],
        "text": ["t" * length for length in lengths],
        "log_p": [[-1.0] * length for length in lengths],
        "log_proposal": [[-1.5] * length for length in lengths],
        "finished": [True] * len(rows),
        "proposal": ["p"] * len(rows),
        "prefix_length": [0] * len(rows),
        **columns,
    }
    return pa.table({name: pa.array(table[name], SCHEMA.field(name).type) for name in SCHEMA.names})


def write_run(path, shards=2, config=CONFIG):
    folder = samples_folder(path)
    manifest = folder.open(config, shards)
    for index in range(shards):
        folder.write(index, make_table((2 * index, 2 * index + 1)))
    return folder, folder.close(manifest, versions={})


def write_labels(path, digest, rows=((0, 1), (2, 3))):
    folder = labels_folder(path)
    manifest = folder.open({"oracle": "o", "samples": digest}, len(rows))
    for index, shard in enumerate(rows):
        columns = {
            "row": list(shard),
            "satisfied": [row % 2 == 0 for row in shard],
            "parts": [[row % 2 == 0] for row in shard],
            "stops": [[False] for _ in shard],
            "progress": [[False, True] for _ in shard],
        }
        folder.write(index, pa.table(columns).cast(LABEL_SCHEMA))
    folder.close(manifest)
    return folder


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --- columns and weights ------------------------------------------------------------------------------


def test_ragged_rows_and_sums():
    ragged = Ragged(np.array([1.0, 2.0, 4.0, -np.inf, 8.0], np.float32), np.array([0, 2, 2, 4, 5]))
    assert [ragged.row(i).tolist() for i in range(4)] == [[1, 2], [], [4, -np.inf], [8]]
    assert ragged.sums().tolist() == [3, 0, -np.inf, 8]  # an infinite row spoils no other
    assert Ragged(np.zeros(0), np.zeros(1, np.int64)).sums().tolist() == []


def test_columns_of_a_table_in_many_pieces():
    whole = make_table((0, 1, 2, 3, 4, 5))
    pieces = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 3), whole.slice(4, 2)])
    for samples in (Samples(whole), Samples(pieces)):
        assert samples.ragged("tokens").offsets.tolist() == [0, 1, 3, 6, 7, 9, 12]
        assert samples.ragged("tokens").row(2).tolist() == [7, 7, 7]
        assert samples.array("row").tolist() == [0, 1, 2, 3, 4, 5]
        assert samples.strings("text")[:3] == ["t", "tt", "ttt"]
        assert samples.log_weights().tolist() == [0.5, 1.0, 1.5, 0.5, 1.0, 1.5]
    assert Samples(whole.slice(0, 0)).ragged("log_p").offsets.tolist() == [0]
    assert Samples(whole).filter(np.array([False, True] * 3)).array("row").tolist() == [1, 3, 5]


def test_a_column_that_is_not_there():
    with pytest.raises(InputError) as raised:
        Samples(make_table()).array("satisfied")
    assert str(raised.value) == (
        f"expected samples with the column satisfied; found the columns {', '.join(SCHEMA.names)}. Label "
        "them first: nado label."
    )
    with pytest.raises(InputError) as raised:
        Samples(make_table().select(["row"])).ragged("tokens")
    assert str(raised.value) == (
        "expected samples with the column tokens; found the columns row. Draw them with nado draw."
    )


def test_uncorrected_samples_have_no_weights():
    with pytest.raises(CoverageError) as raised:
        Samples(make_table(), uncorrected=True).log_weights()
    assert str(raised.value) == (
        "expected samples of a proposal that can write everything p can; found samples stamped uncorrected, "
        "drawn for an ablation. Draw them from a proposal that covers p to use weights."
    )


def test_samples_of_an_unknown_proposal_have_no_weights():
    samples = Samples(make_table(log_proposal=[None, [-1.0, -1.0], None]))
    with pytest.raises(InputError) as raised:
        samples.log_weights()
    assert str(raised.value) == (
        "expected log_proposal of every sample; found 2 of 3 without it. They were imported, and what they "
        "were drawn from is unknown, so they have no weights: train without weights, or import them with "
        "drawn_from_p=True if p itself wrote them."
    )


def test_joining_keeps_the_stamp_and_refuses_half_labelled():
    one, two = Samples(make_table((0, 1))), Samples(make_table((2,)), uncorrected=True)
    assert len(join_samples([one, one])) == 4
    assert not join_samples([one, one]).uncorrected
    assert join_samples([one, two]).uncorrected
    labelled = Samples(one.table.append_column("satisfied", pa.array([True, False])))
    with pytest.raises(InputError) as raised:
        join_samples([one, labelled])
    assert str(raised.value) == (
        "expected samples that are all labelled, or all not; found 1 of 2 labelled. Label the rest first: "
        "nado label."
    )


# --- folders ------------------------------------------------------------------------------------------


def test_a_folder_comes_back(tmp_path):
    _, manifest = write_run(tmp_path / "s")
    samples = read_samples(tmp_path / "s")
    assert samples.table.equals(pa.concat_tables([make_table((0, 1)), make_table((2, 3))]))
    assert (samples.uncorrected, samples.labelled) == (False, False)
    assert [shard["rows"] for shard in manifest["shards"]] == [2, 2]


def test_the_uncorrected_stamp_is_read_back(tmp_path):
    write_run(tmp_path / "s", config={**CONFIG, "proposal": {"uncorrected": True}})
    assert read_samples(tmp_path / "s").uncorrected


def test_labels_are_joined(tmp_path):
    _, manifest = write_run(tmp_path / "s")
    write_labels(tmp_path / "s", samples_digest(manifest))
    samples = read_samples(tmp_path / "s")
    assert samples.array("satisfied").tolist() == [True, False, True, False]
    assert samples.ragged("progress").row(1).tolist() == [False, True]
    assert not read_samples(tmp_path / "s", labels=False).labelled


@pytest.mark.parametrize("rows", [((0, 1), (2, 3)), ((0, 1), (2, 4))])
def test_labels_of_other_samples_are_refused(tmp_path, rows):
    _, manifest = write_run(tmp_path / "s")
    digest = samples_digest(manifest) if rows[1] == (2, 4) else "other"
    labels = write_labels(tmp_path / "s", digest, rows)
    with pytest.raises(MismatchError) as raised:
        read_samples(tmp_path / "s")
    assert str(raised.value) == (
        f"expected labels of the samples in {tmp_path / 's'}; found labels of other samples. Delete "
        f"{labels.path} and label again."
    )


def test_a_run_is_resumed_by_what_is_on_disk(tmp_path):
    folder = samples_folder(tmp_path / "s")
    manifest = folder.open(CONFIG, 3)
    folder.write(1, make_table())
    (tmp_path / "s" / ".shard-00002.parquet-0.partial").write_text("half")
    again = folder.open(CONFIG, 3)
    assert again == manifest
    assert folder.missing(again) == [0, 2]
    assert not list(folder.path.glob(".*"))


def test_a_shard_that_was_deleted_is_missing_again(tmp_path):
    folder, complete = write_run(tmp_path / "s")
    folder.shard_path(1).unlink()
    manifest = folder.open(CONFIG, 2)
    assert manifest["shards"] == [complete["shards"][0], None]
    with pytest.raises(StorageError) as raised:
        read_samples(tmp_path / "s")
    assert str(raised.value) == (
        f"expected all 2 shards in {tmp_path / 's'}; found 1 missing, the first shard-00001.parquet. Run the "
        "command that began it again: it goes on where it stopped."
    )


def test_another_run_in_the_same_folder_is_named_by_what_differs(tmp_path):
    folder, _ = write_run(tmp_path / "s")
    before = contents(tmp_path)
    other = {
        "model": "n" * 50,
        "proposal": {"components": [{"share": 0.5}], "uncorrected": False},
        "batch_size": 8,
    }
    with pytest.raises(MismatchError) as raised:
        folder.open(other, 2)
    assert str(raised.value) == (
        f"expected {folder.path} to hold this same run; found another one, which differs in batch_size "
        f"(nothing there, 8 here), model (m there, {'n' * 37}… here), proposal.components.0.share (1.0 "
        "there, 0.5 here), seed (0 there, nothing here). Choose another folder, or delete this one."
    )
    assert contents(tmp_path) == before


def test_shards_without_a_manifest_are_left_alone(tmp_path):
    folder, _ = write_run(tmp_path / "s")
    folder.manifest_path.unlink()
    before = contents(tmp_path)
    with pytest.raises(MismatchError) as raised:
        folder.open(CONFIG, 2)
    assert str(raised.value) == (
        f"expected a new or resumable folder at {folder.path}; found shards without a manifest. Choose "
        "another folder, or delete this one."
    )
    with pytest.raises(StorageError) as raised:
        read_samples(folder.path)
    assert (
        str(raised.value) == f"expected a file {folder.manifest_path}; found none. Check the folder's name."
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"format": 1, "config"', "expected valid JSON in {manifest}; found the error: "),
        (
            '{"format": 2}',
            "expected a manifest of format 1 in {folder}; found another format. Use the nado that wrote it.",
        ),
        (
            "[]",
            "expected a manifest of format 1 in {folder}; found another format. Use the nado that wrote it.",
        ),
        (
            '{"format": 1, "config": {}}',
            "expected the fields config, config_digest and shards in {manifest}; found no config_digest and "
            "no shards. Restore the file, or start in a new folder.",
        ),
    ],
)
def test_a_damaged_manifest(tmp_path, text, expected):
    folder, _ = write_run(tmp_path / "s")
    folder.manifest_path.write_text(text)
    before = contents(tmp_path)
    for use in (lambda: read_samples(folder.path), lambda: folder.open(CONFIG, 2)):
        with pytest.raises(StorageError) as raised:
            use()
        message = expected.format(manifest=folder.manifest_path, folder=folder.path)
        assert str(raised.value).startswith(message)
    assert contents(tmp_path) == before


def damage_end(path):
    path.write_bytes(path.read_bytes()[:-20])


def damage_middle(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1  # one bit: Parquet itself would often not notice
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [damage_end, damage_middle])
def test_a_damaged_shard_is_named(tmp_path, damage):
    folder, _ = write_run(tmp_path / "s")
    damage(folder.shard_path(1))
    before = contents(tmp_path)
    with pytest.raises(StorageError) as raised:
        read_samples(folder.path)
    assert str(raised.value) == (
        f"expected a readable shard {folder.shard_path(1)}; found the error: its digest is not the one in "
        "the manifest. Delete that file and run the same command again: only this shard is made anew."
    )
    assert contents(tmp_path) == before


def test_a_damaged_shard_of_an_unfinished_run_is_named(tmp_path):
    folder = samples_folder(tmp_path / "s")
    manifest = folder.open(CONFIG, 1)
    folder.write(0, make_table())
    damage_end(folder.shard_path(0))
    for use in (folder.read, lambda: folder.close(manifest)):
        with pytest.raises(StorageError) as raised:
            use()
        assert str(raised.value).startswith(
            f"expected a readable shard {folder.shard_path(0)}; found the error: "
        )
        assert raised.value.hint == (
            "Delete that file and run the same command again: only this shard is made anew."
        )


def test_a_foreign_parquet_file_is_named(tmp_path):
    folder = samples_folder(tmp_path / "s")
    folder.open(CONFIG, 1)
    pq.write_table(pa.table({"a": [1]}), folder.shard_path(0))
    with pytest.raises(StorageError) as raised:
        folder.read()
    assert str(raised.value) == (
        f"expected the columns {', '.join(SCHEMA.names)} in {folder.shard_path(0)}; found a. This file was "
        "not written by nado: move it away."
    )


def test_a_manifest_is_plain_json(tmp_path):
    folder, manifest = write_run(tmp_path / "s")
    assert json.loads(folder.manifest_path.read_text(encoding="utf-8")) == manifest
    assert manifest["config"] == CONFIG
