"""Labelling: in this process and in others, and what is kept when the oracle fails."""

import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from commongen import FORMS, read_pairs
from nado.errors import InputError, OracleError
from nado.labeling import Labels, Rows, join_labels, label, label_batches
from nado.oracles import Keywords, Length, Oracle, load_oracle, oracle, remote

CONDITIONS, TEXTS = read_pairs()
QUESTION = Keywords(forms=FORMS) & Length(maximum=12)


def rows_of(texts, **more):
    return Rows([""] * len(texts), list(texts), np.ones(len(texts), dtype=bool), **more)


def collect(batches, kept):
    for labels in batches:
        kept.append(labels.satisfied.tolist())


def assert_equal(first, second):
    assert (first.satisfied == second.satisfied).all()
    for name in ("parts", "progress", "stops"):
        a, b = getattr(first, name), getattr(second, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.values == b.values).all()
            assert (a.offsets == b.offsets).all()


# Oracles at the top of a module: worker processes find them by name.
@oracle
def picky(text):
    if text == "bad":
        raise ValueError("cannot read this")
    return "a" in text


def refuses(text):
    if text == "bad":
        raise ConnectionError("refused")
    return "a" in text


@oracle(cheap=True)
def ends_in_a_dot(text):
    return text[-1] == "."


@oracle
def half_sure(text):
    return 0.5


@oracle
def sleepy(text):
    if text == "bad":
        time.sleep(60)
    return "a" in text


@oracle
def slow_then_picky(text):
    time.sleep(1.0 if text == "slow" else 0.0)
    return picky([""], [text])[0]


@oracle
def deadly(text):
    if text == "bad":
        os._exit(7)
    return "a" in text


@oracle(batch=True)
def dislikes_large_batches(texts):
    if len(texts) > 2:
        raise MemoryError("too many")
    return ["a" in text for text in texts]


def test_labels_are_the_oracles_answers_with_parts():
    labels = label(QUESTION, CONDITIONS, TEXTS, batch_size=64)
    assert (labels.satisfied == QUESTION(CONDITIONS, TEXTS)).all()
    for i, row in enumerate(QUESTION.parts(CONDITIONS, TEXTS)):
        assert labels.parts.row(i).tolist() == row.tolist()


def test_an_unfinished_text_is_unsatisfied_whatever_it_says():
    labels = label(picky, ["", ""], ["has an a", "has an a"], finished=[True, False])
    assert labels.satisfied.tolist() == [True, False]
    assert labels.parts.row(1).tolist() == [True]  # its parts stay as judged


def test_without_parts_an_unfinished_text_is_not_even_asked_about():
    asked = []

    @oracle
    def slow(text):
        asked.append(text)
        return True

    labels = label(slow, ["", ""], ["one", "two"], finished=[False, True], parts=False)
    assert (labels.satisfied.tolist(), labels.parts, asked) == ([False, True], None, ["two"])


def test_progress_and_stop_labels_at_every_prefix():
    prefixes = [["", "A dog", "A dog and a ball"], ["", "Balls"]]
    labels = label(Keywords(), ["dog, ball", "ball, dog"], [p[-1] for p in prefixes], prefixes=prefixes)
    assert labels.progress_of(0).tolist() == [[False, False], [True, False], [True, True]]
    assert labels.progress_of(1).tolist() == [[False, False], [True, False]]
    assert labels.stops.row(0).tolist() == [False, False, True]
    assert labels.stops.row(1).tolist() == [False, False]


def test_progress_is_what_decoding_will_read():
    prefixes = [[text[:cut] for cut in range(0, len(text), 7)] for text in TEXTS[:20]]
    labels = label(QUESTION, CONDITIONS[:20], TEXTS[:20], prefixes=prefixes, batch_size=6)
    for i, row in enumerate(prefixes):
        bits, stops = QUESTION.read_prefixes([CONDITIONS[i]] * len(row), row)
        assert labels.progress_of(i).tolist() == [b.tolist() for b in bits]
        assert labels.stops.row(i).tolist() == stops.tolist()


def test_rows_may_have_different_numbers_of_parts_and_prefixes():
    labels = label(Keywords(), ["dog", "dog, cat, ball"], ["dog", "cat"], prefixes=[[], ["", "cat"]])
    assert labels.parts.offsets.tolist() == [0, 1, 4]
    assert labels.progress_of(1).shape == (2, 3)
    assert len(labels.stops.row(0)) == 0


def test_nothing_to_label():
    labels = label(QUESTION, [], [])
    assert (len(labels), labels.parts.offsets.tolist()) == (0, [0])


def test_labels_without_progress_say_so():
    with pytest.raises(
        InputError, match=r"expected labels with progress; found labels without\. Label with prefixes\."
    ):
        Labels(np.zeros(1, dtype=bool)).progress_of(0)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(InputError) as raised:
        label(QUESTION, ["dog"], ["a dog"], prefixes=[[], []])
    assert str(raised.value) == (
        "expected as many conditions, finished flags and prefix lists as texts; found 1 conditions, 1 texts, "
        "1 flags, 2 prefix lists. Give one of each for every text."
    )


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_give_the_same_labels_in_the_same_order(method):
    prefixes = [[text[:5], text] for text in TEXTS]
    here = label(QUESTION, CONDITIONS, TEXTS, prefixes=prefixes)
    rows = Rows(CONDITIONS, TEXTS, np.ones(len(TEXTS), dtype=bool), prefixes)
    batches = [rows.part(slice(i, i + 37)) for i in range(0, len(TEXTS), 37)]
    there = list(label_batches(QUESTION, batches, workers=2, start_method=method))
    assert [len(labels) for labels in there] == [len(batch) for batch in batches]
    assert_equal(here, join_labels(there))


def test_workers_load_an_oracle_from_its_file_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def question(text):\n    return 'dog' in text\n")
    loaded = load_oracle(f"{path}:question")
    assert label(loaded, ["", ""], ["dog", "cat"], workers=2, batch_size=1).satisfied.tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_oracle_that_raises_is_named_with_its_text_and_earlier_batches_are_kept(workers):
    batches = [rows_of(["a", "b"]), rows_of(["c", "a"]), rows_of(["a", "bad", "b"]), rows_of(["a"])]
    kept = []
    with pytest.raises(OracleError) as raised:
        collect(label_batches(picky, batches, workers=workers), kept)
    assert kept == [[True, False], [False, True]]
    assert str(raised.value) == (
        "expected an answer from the oracle picky; found ValueError: cannot read this for the text 'bad' "
        "under the condition ''. Mend it: any text may come, the empty one too, and for a cheap oracle every "
        "prefix. Batches before it are kept; mend the oracle and run the same command again."
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_an_oracle_s_own_error_keeps_what_it_says_and_its_hint(workers, tmp_path):
    judge = remote(refuses, retries=1, backoff=0.001, cache=tmp_path / "answers.sqlite")
    with pytest.raises(OracleError) as raised:
        collect(label_batches(judge, [rows_of(["a", "bad"])], workers=workers), [])
    assert str(raised.value) == (
        "expected an answer from the oracle refuses; found ConnectionError: refused after 2 attempts for the "
        "text 'bad' under the condition ''. Answers so far are kept in the cache; run the same command "
        "again. Batches before it are kept; mend the oracle and run the same command again."
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_of_a_text_that_is_answered_the_prefix_that_fails_is_named(workers):
    rows = Rows(["", ""], ["a dog.", "b"], np.ones(2, dtype=bool), [["a", "a dog"], ["", "b"]])
    with pytest.raises(OracleError) as raised:
        collect(label_batches(ends_in_a_dot, [rows], workers=workers), [])
    assert raised.value.found == (
        "IndexError: string index out of range for the prefix '' under the condition ''"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_an_answer_that_is_no_boolean_is_named_once_and_with_what_to_do(workers):
    with pytest.raises(OracleError) as raised:
        collect(label_batches(half_sure, [rows_of(["a", "b"])], workers=workers), [])
    assert str(raised.value) == (
        "expected an answer from the oracle half_sure; found 0.5 (float) for the text 'a' under the "
        "condition ''. Return a bool; compare a score with a threshold first. Batches before it are kept; "
        "mend the oracle and run the same command again."
    )


def test_a_batch_still_in_a_workers_hands_does_not_shift_the_blame():
    """Once, the text after the failing one was named: a busy worker's answer was to another batch."""
    for order in (["bad"], ["slow"]), (["slow"], ["bad"]):
        batches = [rows_of([*texts, "a", "b"]) for texts in order]
        with pytest.raises(OracleError) as raised:
            list(label_batches(slow_then_picky, [*batches, rows_of(["a"])], workers=2))
        assert raised.value.found == "ValueError: cannot read this for the text 'bad' under the condition ''"


def test_an_oracle_that_hangs_is_stopped_and_named():
    start = time.monotonic()
    kept = []
    with pytest.raises(OracleError) as raised:
        collect(label_batches(sleepy, [rows_of(["a", "b"]), rows_of(["a", "bad"])], timeout=1), kept)
    assert kept == [[True, False]]
    assert str(raised.value) == (
        "expected an answer from the oracle sleepy; found no answer within 1 s for the text 'bad' under the "
        "condition ''. Batches before it are kept; mend the oracle and run the same command again."
    )
    assert time.monotonic() - start < 15
    assert multiprocessing.active_children() == []


def test_an_oracle_that_brings_its_process_down_is_named():
    with pytest.raises(OracleError) as raised:
        list(label_batches(deadly, [rows_of(["a", "bad"])], workers=2))
    assert str(raised.value) == (
        "expected an answer from the oracle deadly; found that its process ended with exit code 7 for the "
        "text 'bad' under the condition ''. Batches before it are kept; mend the oracle and run the same "
        "command again."
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_that_no_single_text_explains(workers):
    with pytest.raises(OracleError) as raised:
        list(label_batches(dislikes_large_batches, [rows_of(["a", "b", "c"])], workers=workers))
    assert str(raised.value) == (
        "expected an answer from the oracle dislikes_large_batches; found MemoryError: too many for a batch "
        "of 3 texts that begins with 'a'. No single text explains it: use smaller batches or a longer "
        "timeout. Batches before it are kept; mend the oracle and run the same command again."
    )


def test_an_error_of_the_input_names_the_text_too():
    with pytest.raises(OracleError, match="at least 1 keywords separated by commas; found ''"):
        label(Keywords(), ["dog", ""], ["a dog", "a cat"])


def test_workers_are_stopped_when_nobody_wants_more():
    some = label_batches(QUESTION, (rows_of(["a dog"]) for _ in range(10_000)), workers=2)
    with pytest.raises(OracleError):  # its condition is empty
        next(some)
    more = label_batches(picky, (rows_of(["a dog"]) for _ in range(10_000)), workers=2)
    next(more)
    more.close()
    assert multiprocessing.active_children() == []


def test_batches_are_read_only_as_they_are_needed():
    drawn = []

    def batches():
        for i in range(1000):
            drawn.append(i)
            yield rows_of(["a"])

    some = label_batches(picky, batches(), workers=2)
    next(some)
    some.close()
    assert len(drawn) <= 12


def test_an_oracle_that_cannot_travel_says_so():
    class Holds(Oracle):
        def __init__(self):
            self.lock = __import__("threading").Lock()

        def judge(self, conditions, texts):
            return np.ones(len(texts), dtype=bool)

    with pytest.raises(OracleError) as raised:
        label(Holds(), [""], ["a"], workers=2)
    assert str(raised.value).startswith(
        "expected an oracle that can be sent to worker processes; found Holds: "
    )
    with pytest.raises(
        OracleError, match="expected an oracle that worker processes can find again; found <lambda>"
    ):
        label(oracle(lambda text: True), [""], ["a"], workers=2)


def test_workers_and_timeout_must_make_sense():
    for wrong in ({"workers": 0}, {"timeout": 0}):
        with pytest.raises(
            InputError, match="expected one worker or more, and a timeout above 0; found workers="
        ):
            label(picky, [""], ["a"], **wrong)


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from nado.labeling import label\nfrom nado.oracles import Pattern\n"
        "print(label(Pattern('a'), [''], ['a'], workers=2).satisfied)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "does so under `if __name__ == '__main__':`." in done.stderr
    script.write_text(
        "if __name__ == '__main__':\n" + "".join(f"    {x}\n" for x in script.read_text().splitlines())
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[ True]\n")
