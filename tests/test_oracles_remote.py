"""Slow oracles: cached, limited, tried again."""

import asyncio
import sqlite3
import threading
import time

import pytest

from nado.errors import InputError, OracleError, StorageError
from nado.oracles import check_oracle, remote

TEXTS = [f"text {i}" for i in range(20)]
NONE = [""] * 20


class Judge:
    """A judge that counts its calls, and how many run at a time."""

    def __init__(self, fail_first=0, fail_on=None):
        self.calls, self.running, self.most = [], 0, 0
        self.lock = threading.Lock()
        self.fail_first, self.fail_on = fail_first, fail_on

    def __call__(self, text):
        with self.lock:
            self.calls.append(text)
            self.running += 1
            self.most = max(self.most, self.running)
            attempt = self.calls.count(text)
        time.sleep(0.002)
        with self.lock:
            self.running -= 1
        if attempt <= self.fail_first or text == self.fail_on:
            raise ConnectionError("busy")
        return text.endswith(("1", "3"))


EXPECTED = [text.endswith(("1", "3")) for text in TEXTS]


def asynchronous(judge):
    async def ask(text):
        await asyncio.sleep(0)
        return await asyncio.to_thread(judge, text)

    return ask


@pytest.mark.parametrize("wrap", [lambda judge: judge, asynchronous])
def test_answers_concurrency_and_cache(wrap, tmp_path):
    judge = Judge()
    question = remote(wrap(judge), cache=tmp_path / "new" / "answers.sqlite", concurrency=3, version="1")
    assert question(NONE, TEXTS).tolist() == EXPECTED
    assert (len(judge.calls), judge.most <= 3) == (20, True)
    assert question(NONE, TEXTS[::-1]).tolist() == EXPECTED[::-1]
    assert len(judge.calls) == 20
    again = Judge()
    assert (
        remote(wrap(again), cache=question.cache, name=question.name, version="1")(NONE, TEXTS).tolist()
        == EXPECTED
    )
    assert again.calls == []
    remote(wrap(again), cache=question.cache, name=question.name, version="2")(NONE[:2], TEXTS[:2])
    assert len(again.calls) == 2


@pytest.mark.parametrize("wrap", [lambda judge: judge, asynchronous])
def test_failures_are_tried_again(wrap):
    judge = Judge(fail_first=2)
    assert remote(wrap(judge), retries=2, backoff=0.001)(NONE, TEXTS).tolist() == EXPECTED
    assert len(judge.calls) == 60


@pytest.mark.parametrize("wrap", [lambda judge: judge, asynchronous])
def test_giving_up_names_the_text_and_keeps_the_answers(wrap, tmp_path):
    judge = Judge(fail_on="text 7")
    cache = tmp_path / "answers.sqlite"
    question = remote(
        wrap(judge), cache=cache, concurrency=1, retries=1, backoff=0.001, name="judge", version="1"
    )
    with pytest.raises(OracleError) as raised:
        question(NONE, TEXTS)
    assert str(raised.value) == (
        "expected an answer from the remote oracle judge; found ConnectionError: busy after 2 attempts for "
        "the text 'text 7'. Answers so far are kept in the cache; run the same command again."
    )
    assert sqlite3.connect(cache).execute("SELECT COUNT(*) FROM answers").fetchone() == (7,)
    assert len(judge.calls) == 9
    mended = Judge()
    remote(wrap(mended), cache=cache, name="judge", version="1")(NONE, TEXTS)
    assert sorted(mended.calls) == sorted(TEXTS[7:])


def test_without_a_cache_the_hint_is_to_have_one():
    with pytest.raises(OracleError, match="Give it a cache file so that answers are kept between runs"):
        remote(Judge(fail_on="a"), retries=0)([""], ["a"])


def test_the_pause_doubles():
    question = remote(Judge(), backoff=1.0)
    assert [round(question._pause(attempt) / 2**attempt) for attempt in range(4)] == [1, 1, 1, 1]


def test_equal_rows_are_asked_once_and_conditions_are_part_of_the_question():
    asked = []

    def judge(condition, text):
        asked.append((condition, text))
        return condition == text

    rows = [("a", "a"), ("b", "a"), ("a", "a")]
    assert remote(judge)([c for c, _ in rows], [t for _, t in rows]).tolist() == [True, False, True]
    assert sorted(asked) == [("a", "a"), ("b", "a")]


def test_an_answer_that_is_no_boolean_is_not_tried_again():
    calls = []

    def judge(text):
        calls.append(text)
        return 0.7

    with pytest.raises(
        OracleError, match=r"expected True or False from the oracle judge; found 0\.7 \(float\)"
    ):
        remote(judge, backoff=0.001)([""], ["a"])
    assert calls == ["a"]


def test_it_runs_inside_a_running_loop():
    async def judge(text):
        return True

    async def notebook():
        return remote(judge)([""], ["a"]).tolist()

    assert asyncio.run(notebook()) == [True]


def test_a_file_that_is_no_cache(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a database " * 50)
    with pytest.raises(StorageError) as raised:
        remote(Judge(), cache=path)([""], ["a"])
    assert str(raised.value) == (
        f"expected a readable and writable cache of answers at {path}; found the error: file is not a "
        "database. Choose another file; delete this one only if its answers may be lost."
    )
    assert path.read_text().startswith("these are notes")


def test_settings_without_sense():
    with pytest.raises(
        InputError, match="expected concurrency of 1 or more, retries and backoff of 0 or more"
    ):
        remote(Judge(), concurrency=0)


def test_the_contract_holds():
    check_oracle(remote(Judge()), NONE, TEXTS)
