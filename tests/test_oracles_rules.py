"""Rules about the text alone."""

import math

import pytest

from nado.errors import InputError
from nado.oracles import EndsWith, Json, Length, Pattern, Readability, StartsWith, check_oracle
from nado.oracles.readability import count_syllables, flesch


def ask(oracle, *texts, condition=""):
    return oracle([condition] * len(texts), list(texts)).tolist()


def test_pattern():
    assert ask(Pattern(r"\bdog\b"), "a dog", "dogma", "DOG") == [True, False, False]
    assert ask(Pattern(r"dog", whole=True), "dog", "a dog") == [True, False]
    assert ask(Pattern(r"dog", ignore_case=True), "DOG") == [True]
    with pytest.raises(InputError) as raised:
        Pattern("(")
    assert str(raised.value) == (
        "expected a regular expression; found '(': missing ), unterminated subpattern at position 0. "
        "See the documentation of Python's re."
    )


def test_length_in_words_characters_and_sentences():
    assert ask(Length(2, 3), "one", "one two", "don't stop it now") == [False, True, False]
    assert ask(Length(maximum=3, unit="characters"), "abc", "abcd") == [True, False]
    sentences = Length(2, 2, unit="sentences")
    assert ask(sentences, "One. Two!", "Only one", 'He said "no." Then he left', "Pi is 3.14. So?") == [
        True,
        False,
        True,
        True,
    ]
    assert ask(Length(2, unit="sentences"), "我是。你好！") == [True]
    assert Length(2, 3).parts([""], ["one"])[0].tolist() == [False, True]
    assert Length(2, 3).part_names("") == ["at least 2 words", "at most 3 words"]
    check_oracle(Length(2, 3), [""] * 3, ["one", "one two", "a b c d"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "expected a minimum or a maximum length; found neither. Give at least one of them."),
        (
            {"minimum": 3, "maximum": 2},
            "expected a minimum that is not above the maximum; found minimum 3 and maximum 2. Swap them.",
        ),
        (
            {"minimum": 3, "unit": "pages"},
            "expected a unit among words, characters, sentences; found 'pages'. Choose one of them.",
        ),
    ],
)
def test_length_without_sense(arguments, expected):
    with pytest.raises(InputError) as raised:
        Length(**arguments)
    assert str(raised.value) == expected


def test_starts_and_ends():
    assert ask(StartsWith("Dear"), " Dear Ann", "dear Ann", "De") == [True, False, False]
    assert ask(StartsWith("Dear", ignore_case=True), "dear Ann") == [True]
    assert ask(StartsWith(), "Hello you", condition="Hello") == [True]
    assert ask(EndsWith("bye."), "Good bye. ", "bye") == [True, False]
    assert ask(EndsWith(ignore_case=True), "Good BYE.", condition="bye.") == [True]


def test_starts_with_knows_whether_it_still_can():
    bits = StartsWith("Dear").progress([""] * 3, ["", "Dea", "Day"])
    assert [row.tolist() for row in bits] == [[False, True], [False, True], [False, False]]
    check_oracle(StartsWith("Dear"), [""] * 3, ["Dear Ann", "Dea", "Day"])


def test_json():
    assert ask(Json(), '{"a": 1}', "[1, 2]", "{", '{"a": NaN}', '{"a": 1} and more', "") == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert ask(Json(keys=["a"]), '{"a": 1}', '{"b": 1}', '["a"]') == [True, False, False]
    assert ask(Json(), "[" * 100_000) == [False]  # deeper than Python's stack
    with pytest.raises(
        InputError, match=r"expected a list of keys; found the single string 'a'\. Put it into a list\."
    ):
        Json(keys="a")


SYLLABLES = """
    dog 1 table 2 make 1 makes 1 played 1 wanted 2 lion 2 video 3 nation 2 social 2 beautiful 3 usual 3
    people 2 the 1 be 1 apple 2 happiness 3 readability 5 syllable 3 houses 2 boxes 2 watched 1 called 1
    settled 2 university 5 communication 5 language 2 tables 2 horses 2 radio 3 serious 3 gracious 2
    don't 1 rhythm 1
"""


def test_syllables_of_common_words():
    pairs = SYLLABLES.split()
    expected = dict(zip(pairs[::2], map(int, pairs[1::2]), strict=True))
    assert {word: count_syllables(word) for word in expected} == expected


def test_flesch_formulas():
    # 6 words, 1 sentence, 6 syllables.
    assert flesch("The cat sat on the mat.") == pytest.approx(206.835 - 1.015 * 6 - 84.6)
    assert flesch("The cat sat on the mat.", "grade") == pytest.approx(0.39 * 6 + 11.8 - 15.59)
    assert math.isnan(flesch("..."))


def test_readability():
    easy = "The cat sat on the mat. It was fat."
    hard = "Notwithstanding considerable institutional opposition, bureaucratic reorganisation continued."
    assert ask(Readability(minimum=80), easy, hard, "") == [True, False, False]
    assert ask(Readability(maximum=5, measure="grade"), easy, hard, "") == [True, False, False]
    with pytest.raises(
        InputError, match=r"expected a measure among ease, grade; found 'fog'\. Choose one of them\."
    ):
        Readability(minimum=3, measure="fog")
