"""The protocol: what goes in, what comes out, and the algebra."""

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nado.errors import InputError, OracleError
from nado.oracles import (
    AllOf,
    HuggingFaceClassifier,
    Keywords,
    Length,
    Oracle,
    Pattern,
    StartsWith,
    check_oracle,
    huggingface_classifier,
    load_oracle,
    oracle,
)
from nado.storage import digest_file


@oracle
def mentions(condition, text):
    return condition in text


@oracle(cheap=True, name="short")
def is_short(text):
    return len(text) < LIMIT


LIMIT = 10


class Counting(Oracle):
    """Remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def judge(self, conditions, texts):
        self.asked.append(list(texts))
        return np.array(["x" in text for text in texts])


def message(raised):
    return str(raised.value)


def test_a_function_of_text_or_of_condition_and_text_becomes_an_oracle():
    assert is_short(["", ""], ["short", "much too long for it"]).tolist() == [True, False]
    assert mentions(["a", "b"], ["cat", "cat"]).tolist() == [True, False]
    assert (is_short.name, is_short.cheap, mentions.name, mentions.cheap) == (
        "short",
        True,
        "mentions",
        False,
    )


def test_a_batch_function_gets_lists():
    by_batch = oracle(batch=True)(
        lambda conditions, texts: [c in t for c, t in zip(conditions, texts, strict=True)]
    )
    assert by_batch(["a", "b"], ["cat", "cat"]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda: True, "found <lambda>(). Give further arguments a default value."),
        (lambda a, b, c: True, "found <lambda>(a, b, c). Give further arguments a default value."),
        (lambda *args: True, "found <lambda>(*args). Name its arguments."),
        (lambda text, condition: True, "The condition comes first: swap the two arguments."),
        (lambda texts: True, "Write it for one text, or say @oracle(batch=True) when it takes lists."),
        ("not a function", "found str. Pass a function or an Oracle."),
    ],
)
def test_an_unclear_signature_is_refused(function, found):
    with pytest.raises(InputError) as raised:
        oracle(function)
    assert message(raised).startswith("expected a function of (text) or (condition, text); found ")
    assert message(raised).endswith(found)


def test_an_async_function_is_sent_to_remote():
    async def judge(text):
        return True

    with pytest.raises(InputError) as raised:
        oracle(judge)
    assert message(raised) == (
        "expected a function of (text) or (condition, text); found the async function judge. "
        "Wrap it with remote(...) instead."
    )


def test_a_default_argument_does_not_count():
    def long_enough(text, limit=3):
        return len(text) >= limit

    assert oracle(long_enough)([""], ["abcd"]).tolist() == [True]


@pytest.mark.parametrize(
    ("conditions", "texts", "expected"),
    [
        (
            ["c"],
            "a text",
            "expected a list of texts for the oracle mentions; found the single string 'a text'. "
            "Put it into a list: [text].",
        ),
        (
            "c",
            ["a text"],
            "expected a list of conditions for the oracle mentions; found the single string 'c'. "
            "Put it into a list: [condition].",
        ),
        (
            ["c"],
            ["a", "b"],
            "expected one condition for each text for the oracle mentions; found 1 conditions and 2 texts. "
            "Repeat the condition for every text it belongs to.",
        ),
        (
            ["c", "c"],
            ["a", 3],
            "expected strings as texts for the oracle mentions; found int at position 1. "
            "Decode tokens and turn columns into lists of str first.",
        ),
    ],
)
def test_what_goes_in_is_checked(conditions, texts, expected):
    for ask in (mentions, mentions.parts, mentions.progress):
        with pytest.raises(InputError) as raised:
            ask(conditions, texts)
        assert message(raised) == expected


@pytest.mark.parametrize("answer", [0.7, 1, None, "yes"])
def test_only_a_boolean_is_an_answer(answer):
    scorer = oracle(lambda text: answer)
    with pytest.raises(OracleError) as raised:
        scorer([""], ["some text"])
    assert message(raised) == (
        f"expected True or False from the oracle <lambda>; found {answer!r} ({type(answer).__name__}) "
        "for the text 'some text'. Return a bool; compare a score with a threshold first."
    )


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([0.2, 0.9], "list of float64 with shape (2,)"),
        ([True], "list of bool with shape (1,)"),
        (True, "bool of bool with shape ()"),
        (np.ones((2, 1), dtype=bool), "ndarray of bool with shape (2, 1)"),
    ],
)
def test_what_comes_out_of_a_batch_is_checked(answers, found):
    with pytest.raises(OracleError) as raised:
        oracle(batch=True)(lambda texts: answers)(["", ""], ["a", "b"])
    assert message(raised) == (
        f"expected one boolean for each of 2 texts from the oracle <lambda>; found {found}. "
        "Return a list or array of bool; compare a score with a threshold first."
    )


def test_no_texts_give_no_answers():
    assert mentions([], []).tolist() == []
    assert (is_short & mentions).parts([], []) == []


TEXTS = st.lists(st.text("ab x", max_size=8), max_size=6)


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_algebra_is_boolean_algebra(texts):
    a, b, c = Pattern("a"), Pattern("b"), Length(minimum=1, maximum=2)
    conditions = [""] * len(texts)
    truth = {question: question(conditions, texts) for question in (a, b, c)}
    assert ((a & b & c)(conditions, texts) == (truth[a] & truth[b] & truth[c])).all()
    assert ((a | b | c)(conditions, texts) == (truth[a] | truth[b] | truth[c])).all()
    assert ((~a)(conditions, texts) == ~truth[a]).all()
    assert ((~(a | b))(conditions, texts) == ~(truth[a] | truth[b])).all()
    assert ((~(a & b))(conditions, texts) == ~(truth[a] & truth[b])).all()


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_the_contract_holds_for_every_combination(texts):
    a, b = Pattern("a"), Length(minimum=1, maximum=2)
    for question in (
        a & b,
        a | b,
        ~(a | b),
        ~(a & b),
        StartsWith("ab") & ~a,
        Keywords("a, b", at_least=1) & b,
    ):
        check_oracle(question, [""] * len(texts), texts)


def test_a_conjunction_concatenates_parts_and_progress():
    question = Keywords("dog, ball", inflections=False) & StartsWith("A") & Length(maximum=3)
    assert question.part_names("") == ["dog", "ball", "starts_with", "at most 3 words"]
    assert question.parts([""], ["A dog"])[0].tolist() == [True, False, True, True]
    assert question.progress_names("") == [
        "dog",
        "ball",
        "starts_with",
        "may still start so",
        "at most 3 words",
    ]
    bits, stops = question.read_prefixes([""] * 2, ["", "A dog ball"])
    assert [row.tolist() for row in bits] == [
        [False, False, False, True, True],
        [True, True, True, True, True],
    ]
    assert stops.tolist() == [False, True]


def test_parts_may_differ_in_number_from_row_to_row():
    parts = Keywords(inflections=False).parts(["dog", "dog, ball"], ["dog", "dog"])
    assert [row.tolist() for row in parts] == [[True], [True, False]]


def test_any_oracle_has_the_one_bit_would_it_hold_if_the_text_ended_here():
    bits, stops = mentions.read_prefixes(["cat"] * 3, ["c", "cat", "catnip"])
    assert [row.tolist() for row in bits] == [[False], [True], [True]]
    assert stops.tolist() == [False, True, True]


def test_nested_conjunctions_are_flat_and_double_negation_is_none():
    a, b, c = Pattern("a"), Pattern("b"), Pattern("c")
    assert (a & (b & c)) == AllOf((a, b, c)) == ((a & b) & c)
    assert ~~a is a
    assert ~(a | b) == ~a & ~b
    assert ((a & b) | ~c).name == "((pattern & pattern) | ~pattern)"


def test_a_slow_member_is_asked_only_about_rows_left_open():
    slow = Counting()
    texts = ["ax", "a", "b", "bx"]
    assert (slow & Pattern("a"))([""] * 4, texts).tolist() == [True, False, False, False]
    assert (slow | Pattern("a"))([""] * 4, texts).tolist() == [True, True, False, True]
    assert slow.asked == [["ax", "a"], ["b", "bx"]]


def test_only_oracles_combine():
    with pytest.raises(TypeError):
        Pattern("a") & (lambda text: True)


def test_cheap_is_what_every_member_is():
    assert (Pattern("a") & Length(maximum=3)).cheap
    assert not (Pattern("a") & Counting()).cheap
    assert not (~Counting()).cheap


def test_fingerprints_follow_the_question():
    def above(limit):
        return oracle(lambda text: len(text) > limit)

    same_line = [oracle(lambda text: len(text) > 3), oracle(lambda text: len(text) > 5)]
    questions = [above(3), above(4), *same_line, mentions, is_short, Pattern("a"), Pattern("a", whole=True)]
    questions += [Pattern("a") & Pattern("b"), Pattern("a") | Pattern("b"), ~Pattern("a")]
    assert len({question.fingerprint for question in questions}) == len(questions)
    assert above(3).fingerprint == above(3).fingerprint
    assert Pattern("a").spec == "Pattern(pattern='a', whole=False, ignore_case=False)"


def test_a_fingerprint_sees_constants_and_helpers_of_the_module(tmp_path):
    source = "from nado.oracles import oracle\nLIMIT = {0}\ndef helper(t):\n    return len(t) > {1}\n"
    source += (
        "@oracle\ndef question(text):\n    return all([helper(t) for t in [text]]) and len(text) < LIMIT\n"
    )
    seen = []
    for i, numbers in enumerate([(9, 1), (8, 1), (9, 2), (9, 1)]):
        path = tmp_path / f"file_{i}.py"
        path.write_text(source.format(*numbers))
        seen.append(load_oracle(f"{path}:question").fingerprint)
    assert len(set(seen)) == 3
    assert seen[0] == seen[3]


def test_fingerprints_are_equal_in_every_process():
    code = (
        "from nado.oracles import *\n"
        "print(oracle(lambda text: text in {'a', 'b', 'c'}).fingerprint)\n"
        "forms = {'dog': {'dogs', 'dog'}, 'a': ['a']}\n"
        "print((Keywords(forms=forms) & ~Pattern('x')).fingerprint)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout != ""


def test_a_classifier_s_folder_is_read_again_only_when_it_has_changed(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        huggingface_classifier, "digest_file", lambda path: read.append(path.name) or digest_file(path)
    )
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    sad = HuggingFaceClassifier(str(tmp_path), label="sad")
    first = sad.fingerprint
    assert (sad & Pattern("a")).fingerprint != sad.fingerprint == first
    assert HuggingFaceClassifier(str(tmp_path), label="calm").fingerprint != first
    assert read == ["config.json", "model.safetensors"]
    (tmp_path / "model.safetensors").write_bytes(b"heavier")
    assert sad.fingerprint != first
    assert len(read) == 4
    (tmp_path / "config.json").unlink()
    assert sad.fingerprint != first
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert sad.fingerprint == first


def test_oracles_reach_another_process():
    for question in (mentions, is_short, Keywords("dog") & ~Pattern("a"), oracle(inspect.isclass)):
        again = pickle.loads(pickle.dumps(question))
        assert again.fingerprint == question.fingerprint


def test_an_oracle_no_worker_can_find_says_so():
    with pytest.raises(OracleError) as raised:
        pickle.dumps(oracle(lambda text: True))
    assert message(raised) == (
        "expected an oracle that worker processes can find again; found <lambda>, defined inside a function "
        "or at a prompt. Define it at the top of a module, or label with workers=1 and no timeout."
    )


def test_a_class_is_known_by_its_methods():
    def judge_otherwise(self, conditions, texts):
        return np.array(["y" in text for text in texts])

    other = type("Counting", (Counting,), {"judge": judge_otherwise, "__qualname__": "Counting"})
    assert Counting().fingerprint == Counting().fingerprint != other().fingerprint


class WrongParts(Oracle):
    def judge(self, conditions, texts):
        return np.ones(len(texts), dtype=bool)

    def judge_parts(self, conditions, texts):
        return [np.array([False]) for _ in texts]


class WrongNames(WrongParts):
    def judge_parts(self, conditions, texts):
        return [np.array([True, True]) for _ in texts]


class ListParts(WrongParts):
    def judge_parts(self, conditions, texts):
        return [[True] for _ in texts]


class SortsItsTexts(Oracle):
    def judge(self, conditions, texts):
        texts.sort()
        return np.ones(len(texts), dtype=bool)


class DependsOnTheBatch(Oracle):
    def judge(self, conditions, texts):
        return np.arange(len(texts)) % 2 == 0


class TakesAnything(Oracle):
    def __call__(self, conditions, texts):
        return np.array(["a" in text for text in texts])


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (
            WrongParts(),
            "expected parts of the oracle WrongParts whose conjunction is its answer; found parts [False] "
            "and answer True for the text 'b'. Report as parts only what must all hold; other facts belong "
            "to progress.",
        ),
        (
            WrongNames(),
            "expected one name for each part of the oracle WrongNames; found 1 names and 2 values under the "
            "condition ''. Their number may depend on the condition only, and names and values must agree.",
        ),
        (
            ListParts(),
            "expected a one-dimensional boolean array as the parts of each text from the oracle ListParts; "
            "found list at position 0. Return np.array([...], dtype=bool) for each row.",
        ),
        (
            SortsItsTexts(),
            "expected arguments that come back unchanged from the oracle SortsItsTexts; found changed lists. "
            "Copy a list before sorting or filling it.",
        ),
        (
            DependsOnTheBatch(),
            "expected the same answers from the oracle DependsOnTheBatch when the batch is reversed; "
            "found 2 of 2 differ, the first for the text 'b'. An answer may depend on its own condition and "
            "text only.",
        ),
        (
            TakesAnything(),
            "expected the oracle TakesAnything to refuse a bare string; found an answer. "
            "Define judge and leave __call__, which checks, as it is.",
        ),
    ],
)
def test_a_broken_contract_is_named(broken, expected):
    with pytest.raises((OracleError, InputError)) as raised:
        check_oracle(broken, ["", ""], ["b", "a"])
    assert message(raised) == expected


def test_check_oracle_wants_an_oracle():
    with pytest.raises(
        InputError, match=r"expected an Oracle; found function\. Wrap a function with @oracle\."
    ):
        check_oracle(test_check_oracle_wants_an_oracle, [], [])


def test_importing_oracles_imports_nothing_heavy():
    code = (
        "import sys, nado.oracles\n"
        "nado.oracles.Keywords(forms={'dog': ['dogs']})(['dog'], ['dogs'])\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'lemminflect', 'vaderSentiment', 'py3langid'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
