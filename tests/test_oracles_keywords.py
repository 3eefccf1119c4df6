"""Keywords: inflections, phrases, order, other scripts, prepared forms, speed."""

import itertools
import json
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commongen import FORMS, read_pairs
from nado.errors import InputError
from nado.oracles import ForbiddenWords, Keywords, check_oracle, prepare_forms
from nado.oracles.inflection import form_by_rule, inflect
from nado.oracles.keywords import _find_in_order
from nado.oracles.words import normalise, split_words


def parts(condition, text, **arguments):
    return Keywords(**arguments).parts([condition], [text])[0].tolist()


@pytest.mark.parametrize(
    ("keyword", "text", "found"),
    [
        ("dog", "Two DOGS bark.", True),
        ("dog", "a dogma", False),
        ("dogs", "one dog", True),  # an inflected keyword stands for its lemma
        ("run", "he ran off", True),
        ("good", "the best of all", True),
        ("child", "children", True),
        ("saw", "they see it", False),  # saw is a word of its own
        ("accessory", "three accessories", True),  # the dictionary knows it in one form only
        ("blorf", "they blorfed and blorfs", True),  # no dictionary knows it
        ("blog", "blogging", True),
        ("can", "I can't", False),
        ("don't", "I don’t know", True),
        ("dog", "the dog's tail", False),
        ("dog", "'dog'", True),
        ("New York", "in new\n  york today", True),
        ("New York", "newer yorks", False),  # a capital marks a name
        ("give up", "she gave up", True),
        ("traffic light", "two traffic lights", True),
        ("traffic light", "traffic, light", False),
        ("t-shirt", "red T-Shirts", True),
        ("C++", "in C++, of course", True),
        ("C++", "C+", False),
        ("3", "3 of 4", True),
        ("3", "33", False),
        ("3.5", "it is 3.5 m", True),
        ("café", "two CAFE\u0301S", True),  # composed and decomposed are one
        ("Straße", "STRASSE", True),
        ("😀", "ok 😀!", True),
        ("👩", "an astronaut 👩\u200d🚀", False),  # part of another emoji
        ("❤", "I ❤\ufe0f you", True),
        ("狗", "我的狗很好", True),
        ("AI", "AIを使う", True),
        ("हिन", "हिन्दी", False),  # a vowel sign does not end a word
        ("हिन्दी", "मैं हिन्दी बोलता हूँ", True),
        ("собака", "Моя СОБАКА спит", True),
        ("!", "stop!", True),
    ],
)
def test_what_counts_as_containing_a_keyword(keyword, text, found):
    assert parts(keyword, text) == [found]


def test_exact_forms_only():
    assert parts("dog, Ball", "dogs and a ball", inflections=False) == [False, True]


def test_each_keyword_is_a_part_and_their_conjunction_the_answer():
    keywords = Keywords()
    assert keywords.part_names("dog, ball , New York,") == ["dog", "ball", "New York"]
    assert parts("dog, ball, New York", "A dog in New York") == [True, False, True]
    assert not keywords(["dog, ball"], ["A dog"])[0]


def test_in_order():
    assert parts("cat, dog", "dog cat dog", in_order=True) == [True, True]
    assert parts("cat, dog", "a dog, a cat", in_order=True) == [True, False]
    assert parts("dog, dog", "one dog", in_order=True) == [True, False]  # each needs a place of its own
    assert parts("cat, dog, ball", "dog ball", in_order=True) == [False, False, False]
    # The earliest end must be taken: "a b c" would swallow the b that the second keyword needs.
    forms = {"key": ["a b c", "b"], "c": ["c"]}
    assert parts("key, c", "a b c", in_order=True, forms=forms) == [True, True]


def test_n_of_m_has_one_part_and_more_progress():
    keywords = Keywords(at_least=2)
    assert keywords(["dog, cat, ball"] * 2, ["dog ball", "dog"]).tolist() == [True, False]
    assert keywords.part_names("dog, cat, ball") == ["keywords"]
    bits, stops = keywords.read_prefixes(["dog, cat, ball"] * 2, ["dog", "dog ball"])
    assert [row.tolist() for row in bits] == [[True, False, False, False], [True, False, True, True]]
    assert stops.tolist() == [False, True]
    check_oracle(keywords, ["dog, cat, ball"] * 2, ["dog ball", "dog"])


def test_progress_need_not_be_monotone():
    bits = Keywords().progress(["dog"] * 3, ["a", "a dog", "a dogma"])
    assert [row.tolist() for row in bits] == [[False], [True], [False]]


def test_fixed_words_ignore_the_condition():
    assert Keywords("dog, ball")(["cat"], ["dogs and balls"]).tolist() == [True]
    assert Keywords(["dog", "ball"])(["cat"], ["dogs"]).tolist() == [False]


def test_forbidden_words():
    assert ForbiddenWords("bad, worse")(["", ""], ["all good", "It got WORSE."]).tolist() == [True, False]
    assert ForbiddenWords("bad")([""], ["badly"]).tolist() == [True]
    assert ForbiddenWords(inflections=True)(["run"], ["he ran"]).tolist() == [False]
    check_oracle(ForbiddenWords("bad"), ["", ""], ["bad", "good"])


@pytest.mark.parametrize("condition", ["", " , ", ","])
def test_a_condition_without_keywords_is_an_error(condition):
    with pytest.raises(InputError) as raised:
        Keywords()([condition], ["text"])
    assert str(raised.value) == (
        f"expected at least 1 keywords separated by commas; found {condition!r}. "
        'Write the condition as "dog, ball, New York".'
    )


def test_mistakes_in_arguments_are_found_when_the_oracle_is_made():
    with pytest.raises(InputError, match=r"expected at least 3 keywords separated by commas; found 'a, b'\."):
        Keywords("a, b", at_least=3)
    with pytest.raises(InputError) as raised:
        Keywords(at_least=2, in_order=True)
    assert str(raised.value) == (
        "expected at_least of 1 or more, and not together with in_order; found at_least=2, in_order=True. "
        "Leave one of the two out."
    )
    with pytest.raises(InputError) as raised:
        Keywords(forms={"dog": "dogs"})
    assert str(raised.value) == (
        "expected word forms as a mapping from a word to a list of forms; found dict. "
        'Write {"dog": ["dog", "dogs"]}.'
    )
    with pytest.raises(
        InputError, match=r"expected a JSON file that maps words to their forms; found nowhere"
    ):
        Keywords(forms="nowhere.json")


def test_prepared_forms_replace_the_dictionary(tmp_path):
    forms = {"dog": ["dog", "hound"], "bookshelf": ["bookshelf", "book shelves"]}
    assert parts("dog, bookshelf, blorf", "Hounds? A hound, book shelves, blorfs.", forms=forms) == [True] * 3
    path = tmp_path / "forms.json"
    path.write_text(json.dumps(forms))
    assert Keywords(forms=path).fingerprint == Keywords(forms=forms).fingerprint
    assert Keywords(forms=path).fingerprint != Keywords(forms={"dog": ["dog"]}).fingerprint


def test_prepared_forms_need_no_dictionary_at_all():
    code = (
        "import sys\n"
        "sys.modules['lemminflect'] = None\n"  # importing it now fails, as where it is not installed
        "from nado.oracles import Keywords\n"
        "print(Keywords(forms={'run': ['run', 'ran']})(['run, blorf'], ['ran blorfs'])[0])\n"
        "try:\n    Keywords()(['run'], ['ran'])\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "True\n"
        "expected the package lemminflect for inflected keywords without prepared forms; found that it is "
        "not installed. Install it with: pip install 'nado-lm[oracles]'\n"
    )


def test_prepare_forms():
    assert prepare_forms(["ball", "run"]) == {
        "ball": ["ball", "balled", "balling", "balls"],
        "run": ["ran", "run", "running", "runs"],
    }


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("box", {"box", "boxes", "boxed", "boxing"}),
        ("berry", {"berry", "berries", "berried", "berrying"}),
        ("play", {"play", "plays", "played", "playing"}),
        ("bake", {"bake", "bakes", "baked", "baking"}),
        ("a", {"a"}),  # "as" is another word
        ("狗", {"狗"}),
    ],
)
def test_forms_by_rule(word, forms):
    assert form_by_rule(word) == forms


def test_human_references_satisfy_their_concepts():
    conditions, texts = read_pairs()
    keywords = Keywords(forms=FORMS)
    assert (len(texts), int(keywords(conditions, texts).sum())) == (740, 735)
    shares = [row.mean() for row in keywords.parts(conditions, texts)]
    assert sum(shares) / len(shares) == pytest.approx(0.99775, abs=1e-5)


def test_prepared_forms_agree_with_the_dictionary():
    prepared = json.loads(FORMS.read_text(encoding="utf-8"))
    assert sum(set(forms) <= inflect(word) for word, forms in prepared.items()) / len(prepared) > 0.95


WORDS = st.text("ab' _-é狗1.\n", max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | WORDS)
def test_the_quick_way_to_split_words_is_the_slow_way(text):
    if text.isascii():
        assert split_words(text) == re.findall(r"\w+(?:'\w+)*", text.lower())
    assert all(word in normalise(text) for word in split_words(text))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["dog", "dogs", "cat", "New York", "new", "york", "dogma", "狗", "don't"]), max_size=6
    )
)
def test_keywords_agree_with_looking_at_every_word(words):
    text = " ".join(words)
    question = Keywords(inflections=False)
    tokens = text.lower().split()
    assert question(["dog, cat"], [text])[0] == ("dog" in tokens and "cat" in tokens)
    assert question(["New York"], [text])[0] == (("new", "york") in itertools.pairwise(tokens))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), min_size=1, max_size=4))
def test_in_order_is_a_subsequence(words, keys):
    rest = iter(words)
    expected = all(key in rest for key in keys)
    assert Keywords(in_order=True, inflections=False)([", ".join(keys)], [" ".join(words)])[0] == expected


PIECES = ["dog", "dogs", "Dog's", "don't", "café", "CAFE", "dog-cat", "cat,", "’tis", "日本", "3"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.lists(st.sampled_from(PIECES[:6]), min_size=1, max_size=4),
)
def test_single_words_in_order_are_found_as_by_their_places(words, keys):
    question = Keywords(in_order=True)
    plain = [question._key(key) for key in keys]
    never = [key._replace(patterns=(re.compile("(?!)"),)) for key in plain]  # which takes the general way
    text = " ".join(words)
    assert _find_in_order(plain, text) == _find_in_order(never, text)


def test_arguments_come_back_unchanged():
    conditions, texts = ["dog, ball"], ["A Dog"]
    Keywords()(conditions, texts)
    assert (conditions, texts) == (["dog, ball"], ["A Dog"])


def test_keywords_are_quick():
    """The recorded speed is in benchmarks/results; a tenth of it here means that something broke."""
    conditions, texts = read_pairs()
    keywords = Keywords(forms=FORMS)
    keywords(conditions, texts)
    start = time.perf_counter()
    for _ in range(20):
        keywords(conditions, texts)
    assert 20 * len(texts) / (time.perf_counter() - start) > 40_000
