"""The serving engine: rows that come and go, each written as if it were alone."""

import queue
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import small_models
from nado.drawing import draw_rows
from nado.errors import InfeasibleError, InputError, OracleError
from nado.exact_sampling import verified
from nado.guidance import Guidance
from nado.guide import Conditions
from nado.guided_language_model import GuidedLanguageModel
from nado.huggingface import CausalModel
from nado.huggingface.reading import HuggingFaceReader
from nado.oracles import Keywords, Length
from nado.oracles.protocol import BoolArray
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.serving.engine import Engine, QueueFullError, StoppingError, same_in_any_place, widest_prompt
from nado.serving.jobs import Answer, DeadlineError, Delta, Event, Failure, Job, ServingConfig
from nado.serving.joining import group, measure, rows_together
from nado.serving.models import ServedModel, default_sources
from nado.serving.pool import Row
from nado.serving.reading import _require_condition
from nado.serving.text_stream import TextStream
from nado.serving.voices import Member, Voice
from nado.tiny import locate_guide
from random_guides import random_guide

LIMIT = 12
ORACLE = Keywords(inflections=False, at_least=1)


class Moody(Keywords):
    """Keywords, but one text drives it mad."""

    def read_prefixes(
        self, conditions: Sequence[str], prefixes: Sequence[str]
    ) -> tuple[list[BoolArray], BoolArray]:
        pairs = zip(conditions, prefixes, strict=True)
        if any("mad" in condition and len(prefix) > 8 for condition, prefix in pairs):
            raise RuntimeError("a secret of the operator")
        return super().read_prefixes(conditions, prefixes)


@pytest.fixture(scope="module")
def reader() -> HuggingFaceReader:
    base = CausalModel(small_models.build("llama", 3), small_models.tokenizer(), length_limit=LIMIT)
    return HuggingFaceReader(base)


def make_served(reader: HuggingFaceReader, oracle: Keywords = ORACLE) -> ServedModel:
    first = random_guide(reader, 0, progress_bits=4, named_parts=True)
    second = random_guide(reader, 1, reads="light")
    assert isinstance(reader.model, CausalModel)
    return ServedModel(
        "small", reader.model, (Member("first", first, oracle), Member("second", second, oracle))
    )


@pytest.fixture(scope="module")
def served(reader: HuggingFaceReader) -> ServedModel:
    return make_served(reader)


CONFIG = ServingConfig(batch_size=8, max_prompt_tokens=24, max_condition_tokens=12, queue_size=64, budget=8)


@pytest.fixture
def engine(served: ServedModel) -> Iterator[Engine]:
    made = Engine(served, CONFIG)
    made.start()
    yield made
    assert made.stop(30)


def make_job(**changes: Any) -> Job:
    count = changes.pop("n", 1)
    job = {
        "prompts": (changes.pop("prompt", "a man sees"),) * count,
        "conditions": (changes.pop("condition", "ball, park"),) * count,
        "guides": ("first",),
        "voice": Voice((1.0,)),
        "seed": 0,
        "max_tokens": LIMIT,
    }
    return Job(**{**job, **changes})


class Inbox:
    """What the engine delivers for one job."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.job, self.events = job, queue.Queue[Event]()
        job.deliver = self.events.put
        engine.submit(job)

    def wait(self) -> tuple[list[Answer], list[Delta]]:
        answers: list[Answer] = []
        deltas = []
        while len(answers) < len(self.job.prompts):
            event = self.events.get(timeout=60)
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, Answer):
                answers.append(event)
            else:
                deltas.append(event)
        return sorted(answers, key=lambda answer: answer.index), deltas


def ask(engine: Engine, **changes: Any) -> list[Answer]:
    return Inbox(engine, make_job(**changes)).wait()[0]


def draw(model: Any, count: int, seed: int) -> list[list[int]]:
    asked = [Prompt("a man sees", "ball, park")] * count
    table = draw_rows(model, asked, range(count), proposal=Proposal(), seed=seed, batch_size=8)
    tokens: list[list[int]] = table["tokens"].to_pylist()
    return tokens


# --- what is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("voice", "guidance"),
    [
        (Voice((1.0,)), Guidance()),
        (Voice((2.5,)), Guidance(2.5)),
        (Voice((0.0,)), Guidance(0.0)),
        (Voice((1.0,), 0.3), Guidance(target_rate=0.3)),
        (Voice((1.0,), 1.0, True), Guidance(exact_end=True)),
        (Voice((2.0,), doubt=0.3), Guidance(2.0, doubt=0.3)),
        (Voice((2.0,), plausible=0.3), Guidance(2.0, plausible=0.3)),
        (Voice((2.0,), 1.0, True, plausible=0.3), Guidance(2.0, exact_end=True, plausible=0.3)),
    ],
)
def test_the_engine_writes_what_drawing_writes(
    engine: Engine, reader: HuggingFaceReader, voice: Voice, guidance: Guidance
) -> None:
    member = engine.model.members[0]
    model = GuidedLanguageModel(reader.model, member.guide, guidance=guidance, oracle=ORACLE)
    expected = draw(model, 6, seed=5)
    assert [list(answer.tokens) for answer in ask(engine, n=6, seed=5, voice=voice)] == expected
    assert len({tuple(row) for row in expected}) > 2


def test_without_guides_the_base_itself_is_drawn_from(engine: Engine, reader: HuggingFaceReader) -> None:
    answers = ask(engine, n=6, seed=2, guides=(), voice=Voice())
    assert [list(answer.tokens) for answer in answers] == draw(reader.model, 6, seed=2)


def test_two_guides_of_strength_1_are_their_conjunction(engine: Engine, reader: HuggingFaceReader) -> None:
    first, second = engine.model.members
    model = GuidedLanguageModel(reader.model, first.guide & second.guide, oracle=ORACLE)
    answers = ask(engine, n=6, seed=4, guides=("first", "second"), voice=Voice((1.0, 1.0)))
    assert [list(answer.tokens) for answer in answers] == draw(model, 6, seed=4)


def test_a_guide_that_is_served_with_a_stricter_oracle_is_told_of_its_own(
    served: ServedModel, reader: HuggingFaceReader
) -> None:
    own = {"progress_bits": 4, "named_parts": True, "oracle_fingerprint": ORACLE.fingerprint}
    guide = random_guide(reader, 0, **own)
    found = []
    for oracle in (ORACLE, Length(maximum=LIMIT) & ORACLE):
        member = Member("first", guide, oracle)
        made = Engine(replace(served, members=(member,)), CONFIG)
        made.start()
        found.append([answer.tokens for answer in ask(made, n=6, seed=5, condition="ball, park, man")])
        assert made.stop(30)
        measured = measure(reader.model, [member], "the", "ball, park", 16)  # type: ignore[arg-type]
        assert measured == measure(reader.model, [Member("", guide, ORACLE)], "the", "ball, park", 16)  # type: ignore[arg-type]
        _require_condition(member, ["ball, park, man"], 12)
    assert found[0] == found[1]


def test_what_a_guide_is_not_told_is_asked_only_where_ends_are_exact(
    served: ServedModel, reader: HuggingFaceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Slow(Length):
        def read_prefixes(
            self, conditions: Sequence[str], prefixes: Sequence[str]
        ) -> tuple[list[BoolArray], BoolArray]:
            asked.append(len(prefixes))
            return super().read_prefixes(conditions, prefixes)

    own = {"progress_bits": 4, "named_parts": True, "oracle_fingerprint": ORACLE.fingerprint}
    member = Member("first", random_guide(reader, 0, **own), Slow(maximum=LIMIT) & ORACLE)
    made = Engine(replace(served, members=(member,)), CONFIG)
    made.start()
    ask(made, n=3, seed=5)
    assert not asked
    both = [Inbox(made, make_job(n=2, seed=5, voice=Voice((1.0,), 1.0, exact))) for exact in (False, True)]
    assert all(inbox.wait() for inbox in both)
    assert made.stop(30)
    assert 0 < max(asked) <= 2  # of the four rows side by side


def test_a_guide_of_strength_0_beside_another_is_left_out(engine: Engine) -> None:
    both = ask(engine, n=4, guides=("first", "second"), voice=Voice((1.0, 0.0)))
    alone = ask(engine, n=4, guides=("first",), voice=Voice((1.0,)))
    assert [answer.tokens for answer in both] == [answer.tokens for answer in alone]


def test_each_of_two_guides_is_doubted(engine: Engine) -> None:
    """Whatever their strengths: nothing changes all at once where one of them leaves 1."""
    settings: dict[str, Any] = {"n": 6, "seed": 3, "guides": ("first", "second")}
    one, near = (ask(engine, **settings, voice=Voice((1.0, each), doubt=0.5)) for each in (1.0, 1.0001))
    assert [answer.tokens for answer in one] == [answer.tokens for answer in near]
    certain = ask(engine, **settings, voice=Voice((1.0, 1.0)))
    assert [answer.tokens for answer in one] != [answer.tokens for answer in certain]


def test_temperature_0_takes_the_likeliest_token(engine: Engine) -> None:
    first, second = ask(engine, n=2, temperature=0.0, top_logprobs=1)
    assert first.tokens == second.tokens
    assert all(record.top[0][1] == record.log_q for record in first.records)


def test_a_small_top_p_takes_the_likeliest_token_too(engine: Engine) -> None:
    greedy = ask(engine, temperature=0.0)[0].tokens
    assert ask(engine, top_p=1e-6, seed=9)[0].tokens == greedy
    assert ask(engine, temperature=0.01, seed=9)[0].tokens == greedy


def test_log_probabilities_are_those_of_q(engine: Engine, reader: HuggingFaceReader) -> None:
    (answer,) = ask(engine, seed=7, voice=Voice((2.0,)), top_logprobs=3, guidance=True)
    model = GuidedLanguageModel(
        reader.model, engine.model.members[0].guide, guidance=Guidance(2.0), oracle=ORACLE
    )
    trace = model.trace_rows(["a man sees"], [answer.tokens], ["ball, park"])
    for name in ("log_q", "log_p", "log_s", "log_p_base_choice"):
        found = torch.tensor([getattr(record, name) for record in answer.records])
        assert torch.allclose(found, getattr(trace, name)[0], atol=1e-5), name
    log_r = torch.tensor([record.log_r for record in answer.records])
    assert torch.allclose(2 * log_r, trace.log_factor[0], atol=1e-4)  # R itself, whatever the strength


# --- alone and in company -----------------------------------------------------------------------------


def varied_jobs() -> list[dict[str, Any]]:
    prompts = ["a man sees", "the dog", "the old woman", "a cat", "a red ball and a dog on the beach"]
    conditions = ["ball, park", "beach", "man, woman, dog", "dog, cat"]
    settings: list[dict[str, Any]] = [
        {},
        {"voice": Voice((2.0,))},
        {"voice": Voice((1.0,), 0.4)},
        {"voice": Voice((1.0,), doubt=0.4)},
        {"voice": Voice((1.0,), plausible=0.4)},
        {"voice": Voice((1.0,), 1.0, True)},
        {"voice": Voice((0.0,)), "guidance": True},
        {"guides": (), "voice": Voice()},
        {"guides": ("first", "second"), "voice": Voice((1.0, 0.5))},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"stops": ("dog", "man")},
        {"verified": True},
        {"top_logprobs": 5, "n": 3},
        {"stream": True, "max_tokens": 5},
    ]
    return [
        {
            "prompt": prompts[number % len(prompts)],
            "condition": conditions[number % len(conditions)],
            "seed": number,
            "top_logprobs": 0,  # log q of every token is compared, bit by bit: it shows what tokens hide
            **settings[number % len(settings)],
        }
        for number in range(3 * len(settings))
    ]


def test_a_request_is_answered_the_same_alone_and_in_any_company(served: ServedModel) -> None:
    """To the last bit: tokens, text and every number that is told."""
    jobs = varied_jobs()
    alone = []
    for job in jobs:
        engine = Engine(served, CONFIG)
        engine.start()
        alone.append(ask(engine, **job))
        assert engine.stop(30)
    for seed in range(2):
        engine = Engine(served, CONFIG)
        engine.start()
        order = random.Random(seed).sample(range(len(jobs)), len(jobs))
        inboxes = {}
        for number in order:
            inboxes[number] = Inbox(engine, make_job(**jobs[number]))
            time.sleep(0.002 * (number % 3))
        found = [inboxes[number].wait()[0] for number in range(len(jobs))]
        assert engine.stop(30)
        for mine, expected, job in zip(found, alone, jobs, strict=True):
            assert [answer.tokens for answer in mine] == [answer.tokens for answer in expected], job
            if not job.get("stream"):
                assert mine == expected, job


def test_rows_are_read_together_only_if_their_sizes_are_equal() -> None:
    shapes = [(3, 2), (4, 2), (3, 2), (3, 3), (3, 2)]
    assert group(shapes, 8) == [[0, 2, 4], [1], [3]]
    assert group([(3, 2)] * 10, 8) == [list(range(8)), [8, 9]]
    assert [rows_together((tokens,), 64) for tokens in (1, 32, 33, 64, 200, 1000)] == [8, 8, 4, 4, 1, 1]
    assert rows_together((1,), 3) == 2


def test_sizes_are_rounded_up_but_never_past_the_room_there_is(served: ServedModel) -> None:
    members = served.members[:1]
    short, longer = "a man sees", " ".join(["a"] * 23)
    one, other = (measure(served.base, members, prompt, "ball, park", 24) for prompt in (short, longer))
    assert one == (8, 8, 8)  # the prompt, the condition, the names of its parts
    assert other == (24, 8, 8)
    assert measure(served.base, members, longer, "ball", 23)[0] == 23


def test_padding_a_condition_changes_nothing_but_its_size(reader: HuggingFaceReader) -> None:
    guide = random_guide(reader, 0, progress_bits=4, named_parts=True)
    plain = Conditions.encode(reader, ["ball, park", "dog"], ORACLE.progress_names)
    wide = plain.rounded(8, 4)
    assert wide.tokens.shape == (2, 8)
    assert wide.parts is not None
    assert wide.parts.shape == (2, 4, 8)
    states, last = torch.randn(2, 3, reader.state_size), torch.full((2, 3), 5)
    left, progress = torch.full((2, 3), 4), torch.zeros(2, 3, 4, dtype=torch.int8)
    with torch.no_grad():
        features = [guide.features(states, last, left, each, progress) for each in (plain, wide)]
    assert torch.allclose(*features, atol=1e-5)


def test_new_rows_wait_a_few_steps_for_company_but_not_on_an_idle_server(served: ServedModel) -> None:
    engine = Engine(served, replace(CONFIG, batch_size=16))
    pool = engine._pool(("first",))
    with torch.inference_mode():
        pool.waiting.append(Row(make_job(), 0))
        pool.advance()
        assert pool.running == 1
        pool.waiting.append(Row(make_job(seed=1), 0))
        running = []
        for _ in range(4):
            pool.advance()
            running.append(pool.running)
        assert running == [1, 1, 1, 2]
        pool.waiting.extend(Row(make_job(seed=seed), 0) for seed in range(2, 10))
        pool.advance()
        assert pool.running == 10  # as many as a pass takes do not wait


def test_a_text_is_the_same_in_every_place_of_a_batch(engine: Engine) -> None:
    assert same_in_any_place(engine)


# --- verified -----------------------------------------------------------------------------------------


def test_verified_texts_are_those_of_the_library(engine: Engine, reader: HuggingFaceReader) -> None:
    model = GuidedLanguageModel(reader.model, engine.model.members[0].guide, oracle=ORACLE)
    prompts, conditions = ["a man sees"] * 6, ["dog, red"] * 6
    expected = verified(model, prompts, conditions, ORACLE, budget=8, seed=3, batch_size=8)
    answers = ask(engine, n=6, seed=3, condition="dog, red", verified=True)
    for answer, found in zip(answers, expected, strict=True):
        assert answer.text == (found.text or "")
        assert answer.draws == found.draws
        assert answer.satisfied == (found.text is not None)
    assert any(answer.draws > 1 for answer in answers)


def test_a_text_that_is_not_found_is_not_sent(engine: Engine) -> None:
    answers = ask(engine, n=2, condition="zebra", verified=True, stream=True)
    for answer in answers:
        assert (answer.text, answer.rest, answer.tokens, answer.satisfied) == ("", "", (), False)
        assert (answer.reason, answer.draws, answer.missing) == ("content_filter", 8, ("keywords",))
        assert answer.drawn_tokens > 0


def test_a_verified_stream_says_nothing_before_the_check(engine: Engine) -> None:
    answers, deltas = Inbox(
        engine, make_job(n=8, verified=True, stream=True, guidance=True, condition="a, the, and")
    ).wait()
    assert deltas == []
    assert all(ORACLE(["a, the, and"], [answer.text])[0] for answer in answers if answer.satisfied)
    assert any(answer.satisfied and answer.draws > 1 for answer in answers)


def test_a_text_cut_by_the_client_is_not_verified(engine: Engine) -> None:
    (answer,) = ask(engine, condition="a, the, man", verified=True, max_tokens=1, seed=1)
    assert answer.satisfied is False or answer.tokens == (small_models.EOS,)


# --- streams and stop sequences -----------------------------------------------------------------------


def test_a_stream_adds_up_to_the_answer(engine: Engine) -> None:
    (answer,), deltas = Inbox(engine, make_job(seed=7, stream=True, guidance=True)).wait()
    (whole,) = ask(engine, seed=7, guidance=True)
    assert "".join(delta.text for delta in deltas) + answer.rest == whole.text == answer.text
    assert [record for delta in deltas for record in delta.records] + [*answer.records] == [*whole.records]
    assert len(deltas) > 2


def test_a_stop_sequence_ends_the_text_before_it(engine: Engine) -> None:
    texts = [answer.text for answer in ask(engine, n=8, seed=7)]
    stop = next(text for text in texts if len(text.split()) > 4).split()[2]
    (stopped,), deltas = Inbox(engine, make_job(seed=7, stops=(f" {stop} ", f" {stop}"), stream=True)).wait()
    assert stop not in stopped.text.split()[1:]
    assert "".join(delta.text for delta in deltas) + stopped.rest == stopped.text
    cut = ask(engine, n=8, seed=7, stops=(f" {stop}",))
    assert [answer.text for answer in cut] == [text.split(f" {stop}")[0] for text in texts]
    assert "stop" in {answer.reason for answer in cut}


@given(
    text=st.text(alphabet="abé€🙂 ", max_size=12),
    stops=st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=3), max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_streamed_pieces_are_the_text_up_to_the_first_stop(text: str, stops: list[str]) -> None:
    """Bytes as tokens: every character but the plain ones comes in parts."""
    # The one that is complete first ends the text; of several the one that began first.
    places = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    expected = text[: places[0][1]] if places else text
    stream, sent = TextStream(stops), ""
    tokens = text.encode()
    for count in range(1, len(tokens) + 1):
        last = count == len(tokens)
        stream.add(tokens[:count].decode("utf-8", "replace"), last=last)
        new = "".join(stream.pieces[place] for place in stream.release(last=last))
        assert "�" not in new
        sent += new
        assert expected.startswith(sent)
        if stream.stopped:
            break
    assert sent == expected == stream.text == "".join(stream.pieces)
    assert stream.stopped == bool(places)


def test_a_real_replacement_character_is_kept() -> None:
    stream = TextStream()
    for text in ("a", "a�", "a�b", "a�b�"):
        stream.add(text, last=text.endswith("b�"))
    assert stream.pieces == ["a", "", "�b", "�"]


# --- the queue ----------------------------------------------------------------------------------------


def test_a_full_queue_turns_requests_away(served: ServedModel) -> None:
    engine = Engine(served, ServingConfig(batch_size=2, max_prompt_tokens=24, queue_size=3))
    first = Inbox(engine, make_job(n=2))  # the thread is not there yet: nothing leaves the queue
    with pytest.raises(QueueFullError, match="expected at most 3 waiting texts; found 2 already"):
        engine.submit(make_job(n=2))
    engine.start()
    assert len(first.wait()[0]) == 2
    for _ in range(100):
        if engine.waiting == 0:
            break
        time.sleep(0.01)
    assert len(ask(engine, n=3)) == 3
    assert engine.stop(30)


def test_a_request_that_is_late_fails_and_leaves(engine: Engine) -> None:
    late = Inbox(engine, make_job(n=3, deadline=time.monotonic() - 1))
    with pytest.raises(DeadlineError):
        late.wait()
    assert len(ask(engine)) == 1
    assert (engine.waiting, engine.running, engine.tally.late) == (0, 0, 1)


def test_a_request_that_is_given_up_makes_room(served: ServedModel) -> None:
    engine = Engine(served, ServingConfig(batch_size=1, max_prompt_tokens=24))
    inboxes = [Inbox(engine, make_job(n=4, seed=number)) for number in range(5)]
    for inbox in inboxes[:-1]:
        inbox.job.cancel()
    engine.start()
    assert len(inboxes[-1].wait()[0]) == 4
    assert all(inbox.events.empty() for inbox in inboxes[:-1])
    assert engine.tally.cancelled == 16
    assert engine.stop(30)


def test_stopping_finishes_what_is_there_and_takes_no_more(served: ServedModel) -> None:
    engine = Engine(served, CONFIG)
    engine.start()
    inboxes = [Inbox(engine, make_job(n=8, seed=number)) for number in range(4)]
    assert engine.stop(60)
    assert [len(inbox.wait()[0]) for inbox in inboxes] == [8] * 4
    assert not engine.alive
    with pytest.raises(StoppingError):
        engine.submit(make_job())


def test_idle_combinations_are_forgotten(served: ServedModel) -> None:
    engine = Engine(served, ServingConfig(batch_size=2, max_prompt_tokens=24, max_pools=1))
    engine.start()
    first = ask(engine, n=2)
    ask(engine, guides=(), voice=Voice())
    assert ask(engine, n=2) == first
    assert engine.stop(30)
    assert len(engine._pools) == 1


# --- what fails, fails alone --------------------------------------------------------------------------


def test_an_impossible_rate_is_an_error_of_that_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    softly = Voice((1.0,), 0.5)
    expected = [ask(engine, seed=number, voice=softly) for number in range(3)]
    pool = engine._pools[("first",)]
    log_parts = pool.model.joint.log_parts

    def never(state: Any, standing: Any) -> list[torch.Tensor]:
        parts = log_parts(state, standing)
        for slot, row in enumerate(pool.rows):
            if row is not None and row.condition == "never":
                parts[0][slot] = -torch.inf
        return parts

    monkeypatch.setattr(pool.model.joint, "log_parts", never)
    others = [Inbox(engine, make_job(seed=number, voice=softly)) for number in range(3)]
    impossible = Inbox(engine, make_job(voice=softly, condition="never"))
    with pytest.raises(InfeasibleError, match=r"R\(x\) = 0 and target rate 0\.5"):
        impossible.wait()
    assert [inbox.wait()[0] for inbox in others] == expected


def test_an_oracle_that_raises_spoils_only_its_own_text(reader: HuggingFaceReader) -> None:
    moody = make_served(reader, Moody(inflections=False, at_least=1))
    engine = Engine(moody, CONFIG)
    engine.start()
    good = [Inbox(engine, make_job(seed=number)) for number in range(4)]
    bad = [Inbox(engine, make_job(seed=number, condition="mad, ball", n=4)) for number in range(2)]
    assert all(len(inbox.wait()[0]) == 1 for inbox in good)
    for inbox in bad:
        with pytest.raises(
            OracleError, match="expected an answer from the oracle keywords; found a RuntimeError"
        ):
            inbox.wait()
    assert len(ask(engine)) == 1
    assert engine.stop(30)


def test_a_step_that_fails_loses_its_requests_and_no_others(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(served, CONFIG)
    engine.start()
    expected = ask(engine, n=2)
    pool = engine._pools[("first",)]
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_choose", lambda state: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(engine)
        assert len(ask(engine, guides=(), voice=Voice())) == 1
    assert ask(engine, n=2) == expected
    with monkeypatch.context() as patch:
        patch.setattr("nado.serving.pool.measure", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(engine)
    assert ask(engine, n=2) == expected
    assert engine.stop(30)


# --- what is served -----------------------------------------------------------------------------------


def test_guides_are_chosen_by_name(served: ServedModel) -> None:
    assert [each.name for each in served.choose(["second", "first"])] == ["second", "first"]
    with pytest.raises(InputError) as error:
        served.choose(["third"])
    assert str(error.value) == (
        "expected guides that are served here (first, second); found 'third'. Name one of them."
    )


def test_a_base_whose_rows_cannot_come_and_go_is_refused() -> None:
    base = CausalModel(small_models.build("mistral"), small_models.tokenizer(), length_limit=LIMIT)
    with pytest.raises(InputError) as error:
        ServedModel("m", base, ())
    assert str(error.value) == (
        "expected a base whose rows can be replaced while others go on (a causal model with full attention); "
        "found MistralForCausalLM. Serve another base; this one can be used with nado generate."
    )


def test_two_guides_of_one_name_are_refused(served: ServedModel) -> None:
    with pytest.raises(InputError, match="found 'first' twice"):
        ServedModel("m", served.base, (served.members[0],) * 2)


def test_the_widest_prompt_fits_the_base(served: ServedModel) -> None:
    prompt, count = widest_prompt(served.base, 1000)
    assert count == small_models.CONTEXT - LIMIT
    assert len(served.base.encode([prompt])[0]) == count
    assert widest_prompt(served.base, 5)[1] == 5


def test_the_embedded_guides_are_served_where_none_is_named() -> None:
    assert default_sources() == [(name, locate_guide(name), None) for name in ("keywords", "positive")]
