"""Oracles by name and from files."""

import pickle

import pytest

from nado.errors import InputError, OracleError
from nado.oracles import AllOf, AnyOf, Keywords, Length, load_oracle
from nado.oracles.loading import SHIPPED

FILE = """
from dataclasses import dataclass
import numpy as np
from nado.oracles import Keywords, Oracle, oracle

def plain(text):
    return "a" in text

@oracle
def decorated(condition, text):
    return condition in text

both = Keywords("dog") & decorated

@dataclass(frozen=True)
class Longer(Oracle):
    limit: int

    def judge(self, conditions, texts):
        return np.array([len(text) > self.limit for text in texts])
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_every_shipped_name_resolves():
    from nado.oracles.loading import _resolve

    assert all(callable(_resolve(reference)) for reference in SHIPPED.values())


def test_a_shipped_name_with_arguments():
    assert load_oracle("keywords") == Keywords()
    assert load_oracle({"name": "keywords", "at_least": 2}) == Keywords(at_least=2)
    assert load_oracle("length", {"maximum": 3}) == Length(maximum=3)
    assert load_oracle('{name = "length", maximum = 3}') == Length(maximum=3)


def test_tables_combine():
    short = Length(maximum=3)
    table = {"name": "length", "maximum": 3}
    assert load_oracle({"all": ["keywords", table]}) == AllOf((Keywords(), short))
    assert load_oracle({"any": ["keywords", {"not": table}]}) == AnyOf((Keywords(), ~short))


@pytest.mark.parametrize("name", ["plain", "decorated", "both"])
def test_what_a_file_defines(file, name):
    loaded = load_oracle(f"{file}:{name}")
    assert loaded(["a"], ["a dog"]).tolist() == [True]
    again = pickle.loads(pickle.dumps(loaded))  # as a worker process would get it
    assert again.fingerprint == loaded.fingerprint


def test_a_class_takes_the_arguments(file):
    loaded = load_oracle({"name": f"{file}:Longer", "limit": 3})
    assert loaded(["", ""], ["abc", "abcd"]).tolist() == [False, True]
    assert pickle.loads(pickle.dumps(loaded)).limit == 3


def test_a_changed_file_is_read_again(file):
    first = load_oracle(f"{file}:plain")
    file.write_text(FILE.replace('"a" in text', '"b" in text'))
    second = load_oracle(f"{file}:plain")
    assert (first([""], ["b"])[0], second([""], ["b"])[0]) == (False, True)
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("keyword", {}, "expected a shipped oracle or file.py:name; found 'keyword'. Did you mean keywords?"),
        (
            "{FILE}",
            {},
            "expected file.py:name; found '{FILE}'. Add a colon and the name of the oracle in the file.",
        ),
        (
            "{FILE}:plane",
            {},
            "expected an oracle or function plane in {FILE}; found no such name. Did you mean plain?",
        ),
        (
            "{FILE}:both",
            {"limit": 1},
            "expected no arguments for {FILE}:both, which is an oracle already; found limit. "
            "Make it a subclass of Oracle that takes them.",
        ),
        (
            "{FILE}:plain",
            {"limit": 1},
            "expected no arguments for {FILE}:plain, which is a plain function; found limit. "
            "Make it a subclass of Oracle that takes them.",
        ),
        (
            "length",
            {"maximun": 1},
            "expected an argument of the oracle length; found 'maximun'. Did you mean maximum?",
        ),
        (
            "pattern",
            {},
            "expected the argument pattern for the oracle pattern; found none. "
            'Write {name = "pattern", pattern = …}.',
        ),
        (
            "{oops",
            {},
            "expected an oracle as a TOML inline table; found '{oops': Expected '=' after a key in a "
            'key/value pair (at end of document). Write {name = "keywords", at_least = 2}.',
        ),
    ],
)
def test_mistakes_are_named(file, source, arguments, expected):
    with pytest.raises(InputError) as raised:
        load_oracle(source.replace("{FILE}", str(file)), arguments)
    assert str(raised.value) == expected.replace("{FILE}", str(file))


def test_tables_without_sense():
    for table in ({}, {"all": ["keywords"], "any": ["keywords"]}, {"all": ["keywords"], "limit": 3}):
        with pytest.raises(
            InputError, match="expected an oracle table with a name and its arguments, or with one of"
        ):
            load_oracle(table)
    with pytest.raises(
        InputError, match=r"expected a list of oracles under all; found \[\]\. Name at least one\."
    ):
        load_oracle({"all": []})


def test_a_missing_or_broken_file(tmp_path):
    with pytest.raises(InputError) as raised:
        load_oracle(f"{tmp_path}/none.py:f")
    assert str(raised.value) == (
        f"expected a Python file {tmp_path}/none.py; found the error: No such file or directory. "
        "Check the path; it is read from here."
    )
    broken = tmp_path / "broken.py"
    broken.write_text("import does_not_exist")
    with pytest.raises(OracleError) as raised:
        load_oracle(f"{broken}:f")
    assert str(raised.value) == (
        f"expected the file {broken} to run; found ModuleNotFoundError: No module named 'does_not_exist'. "
        "Run it with python to see where."
    )
