"""q behind the protocol: the same as p·R computed for whole texts, whatever happens to the rows."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import small_models
from nado.composition import Composable, combine
from nado.decomposition import close_at_limit, negate
from nado.drawing import draw_rows
from nado.errors import CoverageError, InputError, MismatchError
from nado.exact import TabularModel, exact_log_q, exact_log_r, finish_log_r
from nado.following import TabularFollower
from nado.guidance import Guidance, guide_step
from nado.guide import Conditions, Guide, GuideConfig
from nado.guided import GuidedModel
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords, Length, Oracle, Pattern
from nado.prefixes import JointReader, PrefixReader, told_by
from nado.prompts import Prompt
from nado.proposals import Proposal, guided_mixture
from nado.testing import check_language_model
from random_guides import random_guide

PROMPTS = ["the dog", "a cat sees the", "ball"]
CONDITIONS = ["dog, ball", "cat", "beach, park, man"]
LIMIT = 6


def load(kind: str, **choices: Any) -> CausalModel | EncoderDecoderModel:
    is_causal = kind in small_models.CAUSAL
    tokenizer = small_models.tokenizer(appends_eos=not is_causal)
    adapter = CausalModel if is_causal else EncoderDecoderModel
    return adapter(small_models.build(kind), tokenizer, length_limit=LIMIT, **choices)


def whole_log_q(
    reader: HuggingFaceReader, guides: list[Guide], formula: Composable, tokens: Tensor, oracle: Keywords
) -> Tensor:
    """log q of each token by reading whole texts at once: the definition, written down without any state."""
    lengths = torch.full((len(tokens),), tokens.shape[1])
    states = reader.read(PROMPTS, tokens, lengths)
    written = torch.arange(tokens.shape[1]).expand_as(tokens)
    last = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    log_p = reader.logits(states.flatten(0, 1), written.reshape(-1)).log_softmax(-1)
    bits = max(guide.config.progress_bits for guide in guides)
    prefixes = PrefixReader(oracle, reader.model.decode, bits)
    read = [prefixes.read(CONDITIONS, tokens[:, :i].tolist()).progress for i in range(tokens.shape[1])]
    progress = torch.stack(read, dim=1) if bits else None
    parts = []
    for guide in guides:
        names = oracle.progress_names if guide.config.named_parts else None
        conditions = Conditions.encode(reader, CONDITIONS, names)
        features = guide.features(
            states, last, LIMIT - written, conditions, progress if guide.config.progress_bits else None
        )
        parts.append(guide.log_r(guide.scores(features.flatten(0, 1)), log_p, written.reshape(-1)))
    log_r = close_at_limit(combine(formula, parts), reader.model.eos_id, written.reshape(-1) == LIMIT - 1)
    log_q = guide_step(log_p, log_r, Guidance()).log_q.view(*tokens.shape, -1)
    return log_q.gather(-1, tokens[..., None]).squeeze(-1)


KINDS = ["gpt2", "llama", "gemma", "mistral", "marian", "t5"]
CHOICES: dict[str, dict[str, Any]] = {
    "states": {},
    "tokens": {"reads": "tokens"},
    "light": {"reads": "light"},
    "norm": {"head": "norm"},
    "low rank": {"matrix": "low_rank", "rank": 8},
    "progress": {"progress_bits": 3, "named_parts": True},
    "light progress": {"reads": "light", "progress_bits": 4},
}
CASES = [(kind, "progress") for kind in KINDS] + [("llama", name) for name in CHOICES if name != "progress"]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_stepping_gives_what_reading_whole_texts_gives(kind: str, name: str) -> None:
    reader = HuggingFaceReader(load(kind))
    guide = random_guide(reader, **CHOICES[name])
    oracle = Keywords()
    guided = GuidedLanguageModel(reader.model, guide, oracle=oracle)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = small_models.EOS
    found = guided.score(PROMPTS, tokens, torch.full((3,), LIMIT), CONDITIONS)
    with torch.no_grad():
        expected = whole_log_q(reader, [guide], guide, tokens, oracle)
    assert (found - expected).abs().max() < 1e-4
    plain = reader.model.score(PROMPTS, tokens, torch.full((3,), LIMIT))
    assert (found - plain).abs().max() > 0.1  # the guide does something


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_is_a_language_model(kind: str, name: str) -> None:
    reader = HuggingFaceReader(load(kind))
    guide = random_guide(reader, **CHOICES[name])
    for guidance in (Guidance(), Guidance(exact_end=True), Guidance(strength=2.0, doubt=0.1)):
        guided = GuidedLanguageModel(reader.model, guide, guidance=guidance, oracle=Keywords())
        check_language_model(guided, PROMPTS, CONDITIONS)


def test_a_formula_over_guides() -> None:
    reader = HuggingFaceReader(load("llama"))
    first, second = random_guide(reader, 1), random_guide(reader, 2, reads="light")
    formula = (first & ~second) | second
    guided = GuidedLanguageModel(reader.model, formula)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    found = guided.score(PROMPTS, tokens, torch.full((3,), LIMIT), CONDITIONS)
    with torch.no_grad():
        expected = whole_log_q(reader, [first, second, second], formula, tokens, Keywords())
    live = found.isfinite()
    assert live[:, :-1].all()
    assert (found - expected)[live].abs().max() < 1e-4
    check_language_model(guided, PROMPTS, CONDITIONS)


@pytest.mark.parametrize("swapped", [False, True])
def test_each_guide_of_a_formula_is_told_the_progress_of_its_own_oracle(swapped: bool) -> None:
    reader = HuggingFaceReader(load("llama"))
    several: list[tuple[Guide, Oracle]] = []
    for seed, oracle in enumerate([Keywords(), Length(minimum=3)]):
        choices: dict[str, Any] = {"progress_bits": 3 - 2 * seed, "named_parts": not seed}
        own = {"oracle_fingerprint": oracle.fingerprint, "oracle_name": oracle.name}
        several.append((random_guide(reader, seed, **choices, **own), oracle))
    (first, keywords), (second, length) = several
    joined = length & ~keywords if swapped else ~keywords & length
    guidance = Guidance(exact_end=True)
    guided = GuidedLanguageModel(reader.model, first & second, guidance=guidance, oracle=joined)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    state = guided.start(PROMPTS, CONDITIONS)
    alone = [GuidedLanguageModel(reader.model, guide, oracle=own) for guide, own in several]
    states = [each.start(PROMPTS, CONDITIONS) for each in alone]
    for position in range(LIMIT):
        expected = sum(each.step.log_factor for each in states)
        ends = torch.arange(small_models.V) == small_models.EOS
        factors, wanted = (each[:, ~ends] for each in (state.step.log_factor, torch.as_tensor(expected)))
        assert torch.equal(factors.isneginf(), wanted.isneginf())
        assert (factors - wanted).nan_to_num(0).abs().max() < 1e-4
        prefixes = guided.decode(tokens[:, :position].tolist())
        may_end = state.step.log_factor[:, small_models.EOS] == 0
        assert may_end.tolist() == joined(CONDITIONS, prefixes).tolist()
        state = guided.step(state, tokens[:, position])
        states = [one.step(own, tokens[:, position]) for one, own in zip(alone, states, strict=True)]
    assert guided.prefixes is not None
    assert guided.prefixes.calls > 0
    # transformers' generate is told the same
    model = GuidedModel(reader.model, first & second, guidance=guidance, oracle=joined)
    output = model.generate(
        prompts=PROMPTS, conditions=CONDITIONS, output_logits=True, return_dict_in_generate=True
    )
    written = output.sequences[:, -len(output.logits) :]
    trace = model.inspect(PROMPTS, CONDITIONS, written.tolist())
    logits = torch.stack(output.logits, dim=1).log_softmax(-1)
    found = logits.gather(-1, written[..., None]).squeeze(-1)[:, : trace.log_q.shape[1]]
    assert (found - trace.log_q)[trace.log_q != 0].abs().max() < 1e-4


def test_a_guide_is_told_of_the_part_of_an_oracle_that_it_was_trained_for() -> None:
    reader = HuggingFaceReader(load("llama"))
    keywords, length = Keywords(), Length(minimum=3)
    guide = random_guide(reader, progress_bits=3, oracle_fingerprint=keywords.fingerprint)
    stricter = GuidedLanguageModel(reader.model, guide, oracle=length & keywords)
    alone = GuidedLanguageModel(reader.model, guide, oracle=keywords)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((3,), LIMIT)
    found = stricter.score(PROMPTS, tokens, lengths, CONDITIONS)
    assert torch.equal(found, alone.score(PROMPTS, tokens, lengths, CONDITIONS))
    nameless = random_guide(reader, progress_bits=1)
    with pytest.raises(MismatchError) as raised:
        GuidedLanguageModel(reader.model, guide & nameless, oracle=length & keywords)
    assert str(raised.value) == (
        "expected guides trained for parts of (length & keywords), whose progress they are told; found one "
        "that does not say what it was trained for. Join the oracles they were trained for; a guide's own is "
        "its config's oracle_fingerprint."
    )


A, B, C = Keywords(), Length(minimum=3), Pattern("the")
JOINED: dict[str, tuple[Oracle, Oracle]] = {  # what a guide was trained for, and what it is used with
    "first": (A & B, (A & B) & C),
    "last": (A & B, C & (A & B)),
    "in the middle": (A & B, C & (A & B) & C),
    "either": (A | B, (A | B) | C),
    "denied": (A | B, C & ~(A | B)),
    "all of it denied": (A | B, ~(A | B)),
    "denied in part": (A | ~B, ~(A | ~B | C)),
    "denied twice": (A | B, ~(~(A | B) | C)),
}


@pytest.mark.parametrize(("own", "asked"), JOINED.values(), ids=JOINED)
def test_what_was_joined_may_be_joined_further(own: Oracle, asked: Oracle) -> None:
    """`(a & b) & c` is kept as `a & b & c`, and `~(a | b)` as `~a & ~b`."""
    reader = HuggingFaceReader(load("llama"))
    choices: dict[str, Any] = {"progress_bits": 4, "named_parts": True}
    guide = random_guide(reader, **choices, oracle_fingerprint=own.fingerprint)
    other = random_guide(reader, 1, progress_bits=1, oracle_fingerprint=C.fingerprint)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((3,), LIMIT)
    found, expected = (
        GuidedLanguageModel(reader.model, guide, oracle=oracle).score(PROMPTS, tokens, lengths, CONDITIONS)
        for oracle in (asked, own)
    )
    assert torch.equal(found, expected)
    told = told_by([guide, guide, other], C & asked)
    assert [each.fingerprint for each in told] == [own.fingerprint, own.fingerprint, C.fingerprint]
    assert told[0] is told[1]  # so that it is asked once for both


@pytest.mark.parametrize("denied", [False, True])
def test_guides_of_a_formula_are_not_told_of_an_oracle_that_is_not_theirs(denied: bool) -> None:
    reader = HuggingFaceReader(load("llama"))
    keywords, length = Keywords(), Length(minimum=3)
    oracle: Oracle = ~keywords if denied else keywords
    own = {"oracle_fingerprint": keywords.fingerprint, "oracle_name": keywords.name}
    other = {"oracle_fingerprint": length.fingerprint, "oracle_name": length.name}
    guide = random_guide(reader, 0, progress_bits=3, **own)
    stranger = random_guide(reader, 1, progress_bits=1, **other)
    with pytest.raises(MismatchError) as raised:
        GuidedLanguageModel(reader.model, guide & stranger, oracle=oracle)
    assert str(raised.value) == (
        f"expected guides trained for {oracle.name}, whose progress they are told; found one trained for "
        "length. Join the oracles they were trained for; a guide's own is its config's oracle_fingerprint."
    )
    # One that is told nothing may be for anything, and one that does not say for what is told of this.
    for second in (random_guide(reader, 1, **other), random_guide(reader, 1, progress_bits=3)):
        GuidedLanguageModel(reader.model, guide & second, oracle=oracle).start(PROMPTS, CONDITIONS)


class Described(Keywords):
    """Counts how often it is asked what it is: a classifier reads all of its weights to say so."""

    told = 0

    @property
    def spec(self) -> str:
        Described.told += 1
        return super().spec


def test_an_oracle_is_described_once_however_often_texts_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, oracle = HuggingFaceReader(load("llama")), Described() & Length(minimum=3)
    own = Described().fingerprint
    guide = random_guide(reader, progress_bits=3, oracle_fingerprint=own)
    monkeypatch.setattr(Described, "told", 0)
    model = GuidedModel(reader.model, guide, oracle=oracle)
    known = Described.told
    assert known > 0
    for guidance in (None, Guidance(exact_end=True), Guidance(strength=2.0)):
        model.generate_texts(PROMPTS, CONDITIONS, guidance=guidance)
        model.search_texts(PROMPTS, CONDITIONS, beams=2, guidance=guidance)
    assert Described.told == known
    # Nobody is told anything, or there is nobody else to be told of anything else.
    nothing = random_guide(reader, oracle_fingerprint=own)
    for formula, asked in ((nothing & nothing, oracle), (guide, Described()), (nothing, oracle)):
        monkeypatch.setattr(Described, "told", 0)
        GuidedModel(reader.model, formula, oracle=asked).generate_texts(PROMPTS, CONDITIONS)
        assert Described.told == 0


def test_each_prefix_is_decoded_and_counted_once_however_many_oracles_are_asked() -> None:
    reader = HuggingFaceReader(load("llama"))
    first, second = Keywords(), Length(minimum=3)
    decoded: list[int] = []

    def decode(tokens: Any) -> list[str]:
        decoded.append(len(tokens))
        return reader.model.decode(tokens)

    prefixes = JointReader(first & second, [(first, 3), (second, 1), (first, 3)], decode, ends=True)
    for tokens in ([[4, 5]], [[4, 5], [6]], [[6], [6], [4, 5]]):
        found = prefixes.read(["dog"] * len(tokens), tokens)
        assert found.progress.shape == (len(tokens), 7)
    assert decoded == [1, 2, 3]
    assert prefixes.calls == 2
    assert prefixes.read(["cat"], [[6]]).stops.tolist() == [False]
    assert prefixes.calls == 3


def test_rows_keep_nothing_as_wide_as_the_vocabulary_that_nobody_asks_for() -> None:
    reader = HuggingFaceReader(load("llama"))
    guide = random_guide(reader)
    for guidance in (Guidance(), Guidance(strength=2.0), Guidance(strength=2.0, floor=0.1)):
        model = GuidedLanguageModel(reader.model, guide, guidance=guidance)
        state = model.start(PROMPTS, CONDITIONS)
        assert state.log_p.shape == (3, small_models.V)
        kept = model.select(state, torch.tensor([2, 0]))
        for rows, each in ((3, state), (2, kept)):
            own = {name: value for name, value in vars(each).items() if isinstance(value, Tensor)}
            wide = [name for name, value in own.items() if value.shape == (rows, small_models.V)]
            assert wide == ["base_log_p"]
            assert (each.log_chance is None) == (guidance.floor == 0)
        if state.log_chance is not None and kept.log_chance is not None:
            assert torch.equal(kept.log_chance, state.log_chance[[2, 0]])
            log_r = state.step.log_factor / 2
            assert torch.allclose(state.log_chance, (state.log_p_base + log_r).logsumexp(-1))
        state = model.step(state, torch.tensor([4, 5, 6]))
        assert state.log_chance is None


def test_a_row_at_its_last_position_is_rewound_to_where_it_was() -> None:
    """A condition and the limit fill the guide's cache exactly: looked at twice, the last row is the same."""
    reader = HuggingFaceReader(load("llama"))
    guide = random_guide(reader)
    guided = GuidedLanguageModel(reader.model, guide)
    condition = " ".join(["dog"] * (16 - LIMIT))
    assert len(reader.encode_conditions([condition])[0]) + LIMIT == 16
    state = guided.start(["the dog"] * 2, [condition] * 2)
    for token in range(4, 4 + LIMIT - 1):
        state = guided.step(state, torch.tensor([token, token]))
    before = state.log_p[0].clone()
    state = guided.refill(state, torch.tensor([1]), ["the dog"], [condition])
    assert torch.equal(state.log_p[0], before)


def test_a_negated_norm_guide_leaves_every_text_within_reach() -> None:
    """R of a norm head is never 1: ~R is never 0 where p is not, so weights see all of p's texts."""
    reader = HuggingFaceReader(load("llama", completion="limit"))
    guide = random_guide(reader, head="norm")
    torch.nn.init.constant_(guide.head.bias.bias, 5.0)
    state = GuidedLanguageModel(reader.model, ~guide).start(PROMPTS, CONDITIONS)
    assert (guide_one := GuidedLanguageModel(reader.model, guide).start(PROMPTS, CONDITIONS)).step is not None
    assert guide_one.step.log_factor.max() > -1e-5  # clamped somewhere
    assert not (state.log_p.isneginf() & ~state.log_p_base.isneginf()).any()


def test_a_negated_guide_lets_no_text_go_on_past_the_limit() -> None:
    """R of ~A is R_F − R_A: at step L a text that does not end itself satisfies neither."""
    reader = HuggingFaceReader(load("llama"))
    guide = random_guide(reader, 1)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    found = GuidedLanguageModel(reader.model, ~guide).score(
        PROMPTS, tokens, torch.full((3,), LIMIT), CONDITIONS
    )
    with torch.no_grad():
        expected = whole_log_q(reader, [guide], ~guide, tokens, Keywords())
    assert found[:, -1].isneginf().all()
    assert (found - expected)[:, :-1].abs().max() < 1e-4


def test_an_untrained_guide_leaves_p_as_it_is_until_the_last_step() -> None:
    reader = HuggingFaceReader(load("llama"))
    guide = Guide(GuideConfig.for_reader(reader, size=24, layers=1, heads=2)).attach(reader)
    tokens = torch.randint(4, small_models.V, (3, LIMIT), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((3,), LIMIT)
    q = GuidedLanguageModel(reader.model, guide).score(PROMPTS, tokens, lengths)
    p = reader.model.score(PROMPTS, tokens, lengths)
    assert (q - p)[:, :-1].abs().max() < 1e-5
    assert q[:, -1].isneginf().all()  # a text that does not end itself by step L is lost


def test_refilled_rows_are_drawn_as_if_alone() -> None:
    """Through the drawing loop: refilling, shrinking and decoding do not change what is drawn."""
    reader = HuggingFaceReader(load("llama"))
    guide = random_guide(reader, progress_bits=3, named_parts=True)
    guided = GuidedLanguageModel(reader.model, guide, oracle=Keywords())
    prompts = [Prompt(*pair) for pair in zip(PROMPTS, CONDITIONS, strict=True)] * 8
    tables = [
        draw_rows(guided, prompts, range(len(prompts)), proposal=Proposal(), seed=3, batch_size=size)
        for size in (3, 24)
    ]
    assert tables[0]["tokens"].to_pylist() == tables[1]["tokens"].to_pylist()
    gaps = [
        np.abs(np.array(a) - np.array(b)).max()
        for a, b in zip(*(table["log_p"].to_pylist() for table in tables), strict=True)
    ]
    assert max(gaps) < 1e-4


# --- tabular: against enumeration ---------------------------------------------------------------------


def has_ab(conditions: list[str], texts: list[str]) -> np.ndarray:
    return np.array(["a" in text and "b" in text for text in texts])


@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_the_exact_r_gives_the_exact_q(completion: Any) -> None:
    model = TabularModel.random(["x"], vocabulary_size=4, length_limit=4, completion=completion, seed=1)
    table = exact_log_r(model, has_ab, "x", "x")
    guided = GuidedLanguageModel(model, TabularFollower({("x", "x"): table}))
    outcomes = model.outcomes("x")
    found = guided.score(["x"] * len(outcomes.texts), outcomes.tokens, outcomes.lengths).double().sum(1)
    expected = exact_log_q(model, has_ab, "x")
    possible = ~expected.isneginf()
    assert (found.exp()[~possible] == 0).all()
    assert (found - expected)[possible].abs().max() < 1e-5


def test_a_soft_rate_is_met_exactly() -> None:
    model = TabularModel.random(["x"], vocabulary_size=4, length_limit=4, completion="limit", seed=1)
    tables = {("x", "x"): exact_log_r(model, has_ab, "x", "x")}
    outcomes = model.outcomes("x")
    hit = torch.from_numpy(has_ab([], outcomes.texts))
    for rate in (0.0, 0.2, 0.9):
        guided = GuidedLanguageModel(model, TabularFollower(tables), guidance=Guidance(target_rate=rate))
        log_q = guided.score(["x"] * len(hit), outcomes.tokens, outcomes.lengths).double().sum(1)
        assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-5)
        assert float(log_q.exp()[hit].sum()) == pytest.approx(rate, abs=1e-5)


def test_negation_is_exact() -> None:
    model = TabularModel.random(["x"], vocabulary_size=3, length_limit=4, completion="limit", seed=2)
    log_r = exact_log_r(model, has_ab, "x", "x")
    opposite = exact_log_r(model, lambda conditions, texts: ~has_ab(conditions, texts), "x", "x")
    both = ~opposite.isneginf()
    assert (negate(log_r, finish_log_r(model, "x")).exp() - opposite.exp())[both].abs().max() < 1e-9


# --- what is refused ----------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    reader = HuggingFaceReader(load("llama"))
    other = HuggingFaceReader(load("llama"))
    guide = random_guide(reader, progress_bits=2)
    with pytest.raises(InputError, match="the oracle, because this guide was trained with its progress"):
        GuidedLanguageModel(reader.model, guide)
    with pytest.raises(InputError, match="the oracle, because exact_end is on"):
        GuidedLanguageModel(reader.model, random_guide(reader), guidance=Guidance(exact_end=True))
    with pytest.raises(MismatchError, match="guides attached to this very base"):
        GuidedLanguageModel(other.model, guide, oracle=Keywords())
    with pytest.raises(InputError, match="at most 2 bits of progress"):
        GuidedLanguageModel(reader.model, guide, oracle=Keywords()).start(["the"], ["dog, cat, man"]).log_p  # noqa: B018
    with pytest.raises(InputError, match="strength 1 with a target rate below 1"):
        Guidance(strength=2, target_rate=0.5)
    with pytest.raises(InputError, match="no doubt with a target rate below 1"):
        Guidance(target_rate=0.5, doubt=0.1)
    with pytest.raises(InputError, match="doubt between 0 and 1"):
        Guidance(doubt=-0.1)
    with pytest.raises(InputError, match="no exact end with a target rate below 1"):
        Guidance(target_rate=0.5, exact_end=True)
    limited = HuggingFaceReader(load("llama", completion="limit"))
    with pytest.raises(InputError, match='completion "eos" for an exact end'):
        GuidedLanguageModel(
            limited.model, random_guide(limited), guidance=Guidance(exact_end=True), oracle=Keywords()
        )


# --- as a proposal ------------------------------------------------------------------------------------


class Apart:
    """The same model under another name, so that nobody knows that it steps the base itself."""

    def __init__(self, model: GuidedLanguageModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name == "base":
            raise AttributeError(name)
        return getattr(self._model, name)


def test_drawing_steps_the_base_once_for_both() -> None:
    reader = HuggingFaceReader(load("llama"))
    guided = GuidedLanguageModel(reader.model, random_guide(reader))
    prompts = [Prompt(*pair) for pair in zip(PROMPTS, CONDITIONS, strict=True)] * 8
    tables = [
        draw_rows(reader.model, prompts, range(24), proposal=guided_mixture(model, 0.5), seed=3, batch_size=8)
        for model in (guided, Apart(guided))
    ]
    for name in ("tokens", "finished"):
        assert tables[0][name].to_pylist() == tables[1][name].to_pylist()
    for name in ("log_p", "log_proposal"):
        for one, other in zip(tables[0][name].to_pylist(), tables[1][name].to_pylist(), strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_a_proposal_that_the_oracle_masks_is_refused() -> None:
    reader = HuggingFaceReader(load("llama"))
    for guidance, found in (
        (Guidance(exact_end=True), "an exact end"),
        (Guidance(floor=0.1), "a floor of 0.1"),
        (Guidance(plausible=0.1), "plausible 0.1"),
    ):
        guided = GuidedLanguageModel(reader.model, random_guide(reader), guidance=guidance, oracle=Keywords())
        with pytest.raises(CoverageError, match=found):
            guided_mixture(guided).require_covers(reader.model)
