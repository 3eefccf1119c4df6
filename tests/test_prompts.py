"""Prompts and conditions from files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nado.errors import InputError
from nado.prompts import Prompt, read_prompts

RECORDS = [
    {"prompt": "dog ball =", "condition": "dog, ball", "split": "train"},
    {"prompt": "", "condition": "cat", "split": "test"},
    {"condition": "beach", "split": "train"},
    {"prompt": "red", "split": None},
]
PROMPTS = [
    Prompt("dog ball =", "dog, ball"),
    Prompt("", "cat"),
    Prompt("beach", "beach"),
    Prompt("red", "red"),
]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path, records):
    names = ("prompt", "condition", "split")
    pq.write_table(pa.table({name: [record.get(name) for record in records] for name in names}), path)
    return path


def message(path, **arguments):
    with pytest.raises(InputError) as raised:
        read_prompts(path, **arguments)
    return str(raised.value)


def test_the_same_prompts_from_jsonl_and_parquet(tmp_path):
    assert read_prompts(write_jsonl(tmp_path / "a.jsonl", RECORDS)) == PROMPTS
    assert read_prompts(write_parquet(tmp_path / "a.parquet", RECORDS)) == PROMPTS


def test_a_split_is_chosen_by_its_name(tmp_path):
    for path in (write_jsonl(tmp_path / "a.jsonl", RECORDS), write_parquet(tmp_path / "a.parquet", RECORDS)):
        assert read_prompts(path, split="train") == [PROMPTS[0], PROMPTS[2]]
        assert read_prompts(str(path), "test") == [PROMPTS[1]]


def test_a_text_file_has_one_prompt_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffthe dog \r\n\n  a cat\nball".encode())
    texts = ["the dog ", "  a cat", "ball"]
    assert read_prompts(path) == [Prompt(text, text) for text in texts]


def test_a_split_nobody_has(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    assert message(path, split="dev") == (
        f"expected prompts of split 'dev'; found test, train in {path}. Check the file and the name of the "
        "split."
    )


def test_an_empty_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n")
    assert message(path) == (
        f"expected at least one prompt; found no split names in {path}. Check the file and the name of the "
        "split."
    )


def test_no_file(tmp_path):
    path = tmp_path / "a.txt"
    assert message(path) == (
        f"expected a file of records; found nothing at {path}. Give a .jsonl, .parquet or .txt file."
    )


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_a_file_of_another_kind_is_not_taken_for_lines_of_text(tmp_path, name):
    (tmp_path / name).write_text('[{"prompt": "dog"}]')
    assert message(tmp_path / name) == (
        f"expected a .jsonl, .parquet or .txt file; found {name}. Rename it, if it is one of these; "
        "otherwise write one JSON object a line."
    )


def test_a_line_that_is_no_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "dog"}\n\n{"prompt": \n')
    assert message(path) == (
        f"expected a JSON object in {path}, line 3; found '{{\"prompt\":'. Expecting value: line 1 column 12 "
        "(char 11)."
    )
    path.write_text('["dog"]\n')
    assert message(path) == (
        f'expected a JSON object in {path}, line 1; found \'["dog"]\'. Write {{"prompt": "…"}}.'
    )


def test_a_record_without_prompt_and_one_with_a_list(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "dog", "id": 1}])
    assert message(path) == (
        f"expected a field prompt or condition in {path}, line 1; found the fields ['id', 'text']. Rename "
        "the field the base should read to prompt."
    )
    write_jsonl(path, [{"prompt": "dog", "condition": ["dog", "cat"]}])
    assert message(path) == (
        f"expected a string as condition in {path}, line 1; found list. Join lists into one string: keywords "
        "are separated by commas."
    )


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9\n")
    assert message(path) == (
        f"expected a readable UTF-8 file {path}; found the error: 'utf-8' codec can't decode byte 0xe9 in "
        "position 3: invalid continuation byte. Write it anew, or give another file."
    )
    path = tmp_path / "a.parquet"
    path.write_bytes(b"nothing")
    assert message(path).startswith(f"expected a readable Parquet file {path}; found the error: ")
