"""Classifiers and small language tools as oracles; the packages they need."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertForSequenceClassification

from nado import tiny
from nado.errors import InputError
from nado.oracles import (
    HuggingFaceClassifier,
    Language,
    LinearClassifier,
    Oracle,
    Readability,
    ScoredOracle,
    Sentiment,
    SklearnClassifier,
    check_oracle,
    load_oracle,
)
from small_models import V, tokenizer

FORMAL = ["I would like to enquire about it.", "We regret to inform you.", "Yours sincerely, Dr Smith"] * 4
CASUAL = ["hey whats up", "gonna grab some food lol", "nah, dunno man"] * 4
TEXTS, LABELS = FORMAL + CASUAL, [True] * 12 + [False] * 12
NEW = ["We regret the delay, sincerely.", "lol dunno", "", "Completely unknown vocabulary"]


def pipeline():
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    fitted = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(max_iter=1000))
    return fitted.fit(TEXTS, LABELS)


def test_a_linear_classifier_gives_scikit_learns_probabilities_without_it():
    linear = LinearClassifier.fit(TEXTS, LABELS)
    assert linear.probabilities(NEW) == pytest.approx(pipeline().predict_proba(NEW)[:, 1], abs=1e-5)
    assert linear(["", ""], NEW[:2]).tolist() == [True, False]
    check_oracle(linear, [""] * 4, NEW)


def test_a_linear_classifier_is_saved_as_safetensors_and_json(tmp_path):
    linear = LinearClassifier.fit(TEXTS, LABELS, threshold=0.6, max_ngram=1)
    linear.save(tmp_path / "formal")
    assert sorted(p.name for p in (tmp_path / "formal").iterdir()) == [
        "classifier.json",
        "classifier.safetensors",
    ]
    again = LinearClassifier.load(tmp_path / "formal")
    assert again.fingerprint == linear.fingerprint
    assert (again.probabilities(NEW) == linear.probabilities(NEW)).all()
    by_name = load_oracle({"name": "linear_classifier", "folder": str(tmp_path / "formal"), "threshold": 0.9})
    assert by_name.threshold == 0.9
    assert by_name.fingerprint != linear.fingerprint


def test_a_damaged_classifier_is_refused(tmp_path):
    linear = LinearClassifier.fit(TEXTS, LABELS)
    linear.save(tmp_path)
    config = json.loads((tmp_path / "classifier.json").read_text())
    (tmp_path / "classifier.json").write_text(json.dumps({**config, "format": 9}))
    with pytest.raises(InputError) as raised:
        LinearClassifier.load(tmp_path)
    assert str(raised.value) == (
        f"expected a folder with classifier.json and classifier.safetensors; found {tmp_path}: ValueError: "
        "format 9. Make one with LinearClassifier.fit(...).save(folder)."
    )
    (tmp_path / "classifier.json").write_text(json.dumps({**config, "vocabulary": config["vocabulary"][1:]}))
    with pytest.raises(InputError, match="expected one idf and one weight for each term; found"):
        LinearClassifier.load(tmp_path)
    (tmp_path / "classifier.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(InputError, match="SafetensorError"):
        LinearClassifier.load(tmp_path)
    with pytest.raises(InputError, match="FileNotFoundError"):
        LinearClassifier.load(tmp_path / "nowhere")


def test_fitting_needs_both_kinds():
    with pytest.raises(InputError, match=r"expected texts of both kinds; found one kind only\."):
        LinearClassifier.fit(FORMAL, [True] * len(FORMAL))


def test_any_fitted_estimator_can_be_wrapped():
    wrapped = SklearnClassifier(pipeline(), threshold=0.5)
    assert wrapped([""] * 2, NEW[:2]).tolist() == [True, False]
    check_oracle(wrapped, [""] * 4, NEW)
    with pytest.raises(InputError, match=r"expected a label among False, True; found 'formal'\."):
        SklearnClassifier(pipeline(), label="formal")
    with pytest.raises(InputError, match=r"expected a fitted estimator with predict_proba; found object\."):
        SklearnClassifier(object())
    with pytest.raises(InputError, match=r"expected a threshold between 0 and 1; found 50\."):
        SklearnClassifier(pipeline(), threshold=50)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT classifier with random weights, saved as a user would have it."""
    folder = tmp_path_factory.mktemp("bert")
    names = {0: "calm", 1: "happy", 2: "sad"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(
        vocab_size=V, num_labels=3, id2label=names, label2id={n: i for i, n in names.items()}, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = BertForSequenceClassification(config)
        for parameter in network.parameters():
            parameter.data.normal_(0, 0.5)
    network.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


SENTENCES = [
    "the dog runs",
    "a cat sees the old man and the red ball on the beach",
    "park",
    "the woman throws !",
]


def test_a_hugging_face_classifier(bert):
    network = BertForSequenceClassification.from_pretrained(bert).eval()
    inner = tokenizer()
    with torch.no_grad():
        alone = [network(**inner(text, return_tensors="pt")).logits.softmax(-1)[0] for text in SENTENCES]
    for label, column in (("calm", 0), ("happy", 1), ("sad", 2)):
        expected = [bool(row[column] >= 0.4) for row in alone]
        question = HuggingFaceClassifier(bert, label=label, threshold=0.4, batch_size=3, device="cpu")
        assert question([""] * 4, SENTENCES).tolist() == expected
        assert HuggingFaceClassifier(bert, threshold=0.4)([label] * 4, SENTENCES).tolist() == expected
    check_oracle(question, [""] * 4, SENTENCES)
    assert np.concatenate(alone).size == 12


def test_a_hugging_face_classifier_is_known_by_its_weights(bert, tmp_path):
    first = HuggingFaceClassifier(bert, label="sad")
    assert first.fingerprint == HuggingFaceClassifier(bert, label="sad", batch_size=8).fingerprint
    assert first.fingerprint != HuggingFaceClassifier(bert, label="calm").fingerprint


def test_a_hugging_face_classifier_names_what_is_wrong(bert, tmp_path):
    with pytest.raises(InputError) as raised:
        HuggingFaceClassifier(bert, label="hapy")([""], ["text"])
    assert str(raised.value) == (
        f"expected a label of the classifier {bert}; found 'hapy'. Did you mean happy?"
    )
    with pytest.raises(InputError, match="expected a sequence classifier with safetensors weights; found"):
        HuggingFaceClassifier(str(tmp_path), label="x")([""], ["text"])


def test_sentiment():
    texts = ["What a wonderful, lovely day!", "This is horrible and sad.", "The train leaves at nine."]
    assert Sentiment("positive")([""] * 3, texts).tolist() == [True, False, False]
    assert Sentiment()(["positive", "negative", "neutral"], texts).tolist() == [True, True, True]
    check_oracle(Sentiment("positive"), [""] * 3, texts)
    with pytest.raises(
        InputError, match=r"expected a known sentiment; found 'positiv'\. Did you mean positive\?"
    ):
        Sentiment("positiv")


def test_language():
    texts = ["This is certainly an English sentence.", "Esta es sin duda una frase en español."]
    assert Language("en")([""] * 2, texts).tolist() == [True, False]
    assert Language()(["en", "es"], texts).tolist() == [True, True]
    assert Language("en")([""], [""]).tolist() == [False]
    with pytest.raises(InputError, match=r"expected a known language; found 'english'\."):
        Language("english")([""], ["text"])


@pytest.mark.parametrize(
    ("package", "shown", "use", "feature"),
    [
        ("vaderSentiment", "vaderSentiment", "Sentiment('positive')([''], ['a'])", "the sentiment oracle"),
        ("py3langid", "py3langid", "Language('en')([''], ['a'])", "the language oracle"),
        ("sklearn", "scikit-learn", "LinearClassifier.fit(['a'], [True])", "fitting a classifier"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, shown, use, feature):
    code = (
        f"import sys\nsys.modules[{package!r}] = None\nfrom nado.oracles import *\n"
        f"try:\n    {use}\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"expected the package {shown} for {feature}; found that it is not installed. "
        "Install it with: pip install 'nado-lm[oracles]'\n"
    )


# --- scores of prefixes -------------------------------------------------------------------------------


class Words(ScoredOracle):
    """Ten words or more."""

    threshold = 10

    def __init__(self, *steps: float) -> None:
        self.steps = steps

    def scores(self, conditions: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
        return np.array([len(text.split()) for text in texts], dtype=np.float64)


def test_a_score_is_read_at_its_steps() -> None:
    texts = ["a " * count for count in (0, 3, 7, 10)]
    stepped, plain = Words(3, 7, 10), Words()
    for each in (stepped, plain):
        assert each([""] * 4, texts).tolist() == [False, False, False, True]
        assert each.read_prefixes([""] * 4, texts)[1].tolist() == [False, False, False, True]
    bits = [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
    assert [row.tolist() for row in stepped.progress([""] * 4, texts)] == bits
    assert [row.tolist() for row in stepped.read_prefixes([""] * 4, texts)[0]] == bits
    assert stepped.progress_names("") == ["Words 3", "Words 7", "Words 10"]
    assert [row.tolist() for row in plain.progress([""] * 4, texts)] == [[False], [False], [False], [True]]
    assert plain.progress_names("") == ["Words"]
    assert stepped.parts([""], texts[3:])[0].tolist() == [True]  # progress is no part: one question, one part
    assert (~stepped).read_prefixes([""], texts[:1])[1].tolist() == [True]


def test_steps_of_a_class_tell_it_from_another() -> None:
    class Few(Words):
        steps = (3.0, 5.0)

        def __init__(self) -> None:
            pass

    first = Few().fingerprint
    Few.steps = (3.0, 6.0)
    assert Few().fingerprint != first


def test_a_classifier_says_how_far_a_prefix_is(tmp_path: Path) -> None:
    plain = LinearClassifier.fit(TEXTS, LABELS)
    plain.save(tmp_path)
    stepped = LinearClassifier.load(tmp_path, steps=[0.25, 0.5, 0.75])
    assert stepped.fingerprint != plain.fingerprint == LinearClassifier.load(tmp_path).fingerprint
    bits = np.stack(stepped.progress([""] * len(TEXTS), TEXTS))
    wanted = plain.probabilities(TEXTS)[:, None] >= np.array([0.25, 0.5, 0.75])
    assert (bits == wanted).all()
    assert stepped.progress_names("") == [f"linear_classifier {step}" for step in (0.25, 0.5, 0.75)]
    named: Oracle = load_oracle(
        {"name": "linear_classifier", "folder": str(tmp_path), "steps": [0.25, 0.5, 0.75]}
    )
    assert named.fingerprint == stepped.fingerprint
    with pytest.raises(InputError, match="expected steps between 0 and 1; found 25"):
        LinearClassifier.load(tmp_path, steps=[25])


def test_every_oracle_that_rests_on_a_score_can_say_how_far_a_prefix_is(bert):
    happy = "What a wonderful, lovely day!"
    several = [
        (Sentiment("positive"), Sentiment("positive", steps=(-0.5, 0.05, 0.5)), [happy, "a lovely", "awful"]),
        (Sentiment("neutral"), Sentiment("neutral", steps=(-0.5, 0.05)), [happy, "a", "awful, horrible"]),
        (Readability(minimum=80), Readability(minimum=80, steps=(0, 80)), ["a dog", "unimaginable", ""]),
        (
            HuggingFaceClassifier(bert, label="sad"),
            HuggingFaceClassifier(bert, label="sad", steps=(0.1, 0.4)),
            SENTENCES,
        ),
        (SklearnClassifier(pipeline()), SklearnClassifier(pipeline(), steps=[0.4, 0.6]), NEW),
    ]
    for plain, stepped, texts in several:
        conditions = [""] * len(texts)
        bits, stops = stepped.read_prefixes(conditions, texts)
        scores = stepped.scores(conditions, texts)
        assert np.array_equal(np.stack(bits), scores[:, None] >= np.array(stepped.steps))
        assert len({tuple(row.tolist()) for row in bits}) > 1  # so that the texts tell steps apart
        assert stops.tolist() == plain(conditions, texts).tolist() == stepped(conditions, texts).tolist()
        assert [row.tolist() for row in plain.progress(conditions, texts)] == [[each] for each in stops]
        assert stepped.fingerprint != plain.fingerprint
        assert len(stepped.progress_names("")) == len(stepped.steps)
        check_oracle(stepped, conditions, texts)
    named = load_oracle({"name": "sentiment", "sentiment": "positive", "steps": [-0.5, 0.05, 0.5]})
    assert named == several[0][1]
    with pytest.raises(InputError, match=r"expected steps between -1 and 1; found 5\. They are scores"):
        Sentiment("positive", steps=(0.05, 5))
    for wrong in (0.5, "0.5", ["a"], [True]):
        with pytest.raises(InputError, match="expected numbers as steps; found "):
            load_oracle({"name": "sentiment", "sentiment": "positive", "steps": wrong})
    with pytest.raises(InputError, match="expected steps in ascending order, each once"):
        Sentiment("positive", steps=(0.5, 0.05))


def test_steps_are_numbers_however_they_are_given(tmp_path):
    given = [(0.0, 1.0), (0, 1), [0, 1], range(2), np.array([0, 1]), np.array([0.0, 1.0], dtype=np.float32)]
    several = [Sentiment("positive", steps=each) for each in given]
    assert all(each == several[0] and each.steps == (0.0, 1.0) for each in several)
    assert {type(step) for each in several for step in each.steps} == {float}
    # A guide that was trained with steps has this fingerprint in its config.
    assert {each.fingerprint for each in several} == {"c0d4d52ec0b22ec46e6f1ed336858396"}
    LinearClassifier.fit(TEXTS, LABELS).save(tmp_path)
    loaded = [LinearClassifier.load(tmp_path, steps=each) for each in given]
    assert len({each.fingerprint for each in loaded}) == 1
    for wrong in ("", b"\x00\x01", np.array([True]), np.array(0.5), np.array([[0.5]]), {0.5}):
        with pytest.raises(InputError, match="expected numbers as steps; found "):
            Sentiment("positive", steps=wrong)


def test_oracles_without_steps_ask_what_they_asked_before_there_were_any():
    assert "steps" not in Sentiment("positive").spec + Readability(minimum=80).spec
    trained = json.loads((Path(tiny.__file__).parent / "positive" / "config.json").read_text())
    assert Sentiment("positive").fingerprint == trained["oracle_fingerprint"]
