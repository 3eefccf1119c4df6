"""Files that are whole or not there, and folders that one run at a time may write."""

import os
import stat

import pytest

from nado.errors import StorageError
from nado.storage import (
    digest_file,
    digest_json,
    hold,
    read_json,
    remove_partial_files,
    write_atomically,
    write_json,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_json_comes_back_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "deep" / "down" / "value.json"
    write_json(path, {"letters": "äß", "number": 1.5})
    assert read_json(path) == {"letters": "äß", "number": 1.5}
    assert names(path.parent) == ["value.json"]


def test_a_file_has_the_permissions_the_system_gives_new_files(tmp_path):
    (tmp_path / "plain").touch()
    write_json(tmp_path / "value.json", 1)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "value.json")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_no_half_one(tmp_path, error):
    path = tmp_path / "value.json"
    write_json(path, "old")

    def fail(partial):
        partial.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert read_json(path) == "old"
    assert names(tmp_path) == ["value.json"]


def test_an_error_of_the_system_says_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "folder" / "value.json"
    with pytest.raises(StorageError) as raised:
        write_json(path, 1)
    assert str(raised.value) == (
        f"expected to write {path}; found the error: Not a directory. Free some space or choose another "
        "folder, then run the same command again: what is already written is kept."
    )


def test_json_that_is_not_there_or_damaged(tmp_path):
    path = tmp_path / "value.json"
    with pytest.raises(StorageError) as raised:
        read_json(path)
    assert str(raised.value) == f"expected a file {path}; found none. Check the folder's name."
    path.write_text("{")
    with pytest.raises(StorageError) as raised:
        read_json(path)
    assert str(raised.value) == (
        f"expected valid JSON in {path}; found the error: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1). Restore the file, or start in a new folder."
    )


def test_digests_depend_on_values_alone(tmp_path):
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1}) != digest_json({"a": 1, "b": 3})
    for name, text in (("one", "same"), ("two", "same"), ("three", "other")):
        (tmp_path / name).write_text(text)
    one, two, three = (digest_file(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(tmp_path):
    for name in (".shard-00000.parquet-12ab34cd.partial", "shard-00000.parquet", "notes.partial"):
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    assert names(tmp_path) == ["notes.partial", "shard-00000.parquet"]


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX")
def test_two_runs_cannot_write_one_folder(tmp_path):
    folder = tmp_path / "run"
    with hold(folder):
        with pytest.raises(StorageError) as raised, hold(folder):
            raise AssertionError("held twice")
        assert str(raised.value) == (
            f"expected {folder} to be free; found another run that is writing to it. Wait until it ends, or "
            "choose another folder."
        )
    with hold(folder):
        pass
    assert names(folder) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as raised, hold(tmp_path / "file" / "run"):
        pass
    assert str(raised.value) == (
        f"expected a folder at {tmp_path / 'file' / 'run'}; found the error: Not a directory. Choose a "
        "folder that can be made and written."
    )
