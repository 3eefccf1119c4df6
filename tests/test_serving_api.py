"""The endpoint: OpenAI's own client, errors in its shape, limits, hostile and vanishing clients."""

import http.client
import inspect
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from nado.cli import main
from nado.cli.serve import serve_command
from nado.errors import InputError, MissingPackageError
from nado.huggingface import CausalModel
from nado.serving.engine import Engine
from nado.serving.gates import Gate
from nado.serving.jobs import ServingConfig
from nado.serving.models import GuideSource, ServedModel, load_served
from nado.serving.reading import read_chat
from nado.serving.refusals import RefusalError, refuse
from nado.serving.schema import ChatRequest
from nado.serving.server import is_loopback, require_packages, serve
from serving_app import LIMIT, ORACLE, Running, build_served, running
from test_study import make_study

ASK = {"prompt": "a man sees", "condition": "ball, park", "seed": 7}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(build_served()) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: Running, path: str = "/v1/completions", **body: Any) -> Any:
    return httpx.post(server.url + path, json=body, timeout=60)


def refused(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


def test_a_guide_without_a_scale_is_neither_doubted_nor_rated(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    (member,) = server.engine.model.choose(("first",))
    monkeypatch.setattr(member.guide.config, "shape_only", True)
    for name, value in (("doubt", 0.1), ("target_rate", 0.5)):
        error = refused(post(server, **ASK, **{name: value}), 400)
        assert error["param"] == name
        assert error["message"].startswith(
            f"expected a guide whose R is a probability, which {name} is compared"
        )
    assert post(server, **ASK, plausible=0.1).status_code == 200


# --- OpenAI's client ----------------------------------------------------------------------------------


def test_a_completion(client: Any) -> None:
    made = client.completions.create(
        model="small", prompt="a man sees", seed=7, extra_body={"condition": "ball"}
    )
    (choice,) = made.choices
    assert (made.object, made.model) == ("text_completion", "small")
    assert choice.finish_reason in ("stop", "length")
    assert made.usage.prompt_tokens == 3
    assert made.usage.total_tokens == 3 + made.usage.completion_tokens
    assert choice.logprobs is None


def test_several_choices_differ_and_come_in_order(client: Any) -> None:
    made = client.completions.create(
        model="small", prompt=["a man sees", "the dog"], n=4, seed=7, extra_body={"condition": "ball"}
    )
    assert [choice.index for choice in made.choices] == list(range(8))
    assert len({choice.text for choice in made.choices}) > 3


def test_the_same_seed_gives_the_same_text(client: Any) -> None:
    texts = [
        client.completions.create(model="small", prompt="the dog", seed=5, n=3).choices for _ in range(2)
    ]
    assert [choice.text for choice in texts[0]] == [choice.text for choice in texts[1]]
    unseeded = client.completions.create(model="small", prompt="the dog", n=4)
    again = client.completions.create(model="small", prompt="the dog", n=4, seed=unseeded.seed)
    assert [choice.text for choice in again.choices] == [choice.text for choice in unseeded.choices]


def test_a_temperature_too_small_to_divide_by_is_0(server: Running) -> None:
    """log q over 1e-39 is no number, and token 0 was written for it."""
    found = [post(server, **ASK, temperature=temperature).json() for temperature in (0, 1e-39)]
    assert found[0]["choices"][0]["text"] == found[1]["choices"][0]["text"]


def test_a_stream_is_the_same_text(client: Any) -> None:
    body = {"model": "small", "prompt": "a man sees", "seed": 7, "n": 2, "extra_body": {"condition": "ball"}}
    whole = client.completions.create(**body)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_stop_sequences_and_max_tokens(client: Any) -> None:
    body = {"model": "small", "prompt": "a man sees", "n": 8, "seed": 7, "extra_body": {"condition": "ball"}}
    texts = [choice.text for choice in client.completions.create(**body).choices]
    stop = next(text for text in texts if len(text.split()) > 3).split()[1]
    cut = client.completions.create(**body, stop=[f" {stop}"]).choices
    assert [choice.text for choice in cut] == [text.split(f" {stop}")[0] for text in texts]
    short = client.completions.create(**body, max_tokens=2)
    assert all(len(choice.text.split()) <= 2 for choice in short.choices)
    assert "length" in {choice.finish_reason for choice in short.choices}
    assert client.completions.create(**body, max_tokens=10_000).choices[0].text == texts[0]


def test_logprobs_of_a_completion(client: Any) -> None:
    made = client.completions.create(
        model="small", prompt="a man sees", seed=7, logprobs=3, extra_body={"condition": "ball"}
    )
    (choice,) = made.choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert len(found.tokens) == made.usage.completion_tokens
    assert all(value <= 0 for value in found.token_logprobs)
    assert all(len(top) <= 3 for top in found.top_logprobs)
    assert [choice.text[at:] for at in found.text_offset[:1]] == [choice.text]


def test_a_chat(client: Any) -> None:
    made = client.chat.completions.create(
        model="small",
        messages=[{"role": "system", "content": "a"}, {"role": "user", "content": "man sees"}],
        logprobs=True,
        top_logprobs=2,
        seed=7,
        extra_body={"condition": "ball"},
    )
    same = client.completions.create(
        model="small", prompt="a man sees ", seed=7, extra_body={"condition": "ball"}
    )
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content) == ("assistant", same.choices[0].text)
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert all(len(token.top_logprobs) <= 2 for token in choice.logprobs.content)


def test_a_chat_streams(client: Any) -> None:
    body: dict[str, Any] = {
        "model": "small",
        "messages": [{"role": "user", "content": "a man sees"}],
        "seed": 3,
    }
    chunks = list(client.chat.completions.create(**body, stream=True))
    whole = client.chat.completions.create(**body).choices[0]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content for chunk in chunks for choice in chunk.choices)
    assert text == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "small"
    assert [guide["name"] for guide in model.guides] == ["first", "second"]
    assert client.models.retrieve("small").limits["tokens"] == LIMIT
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here") as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="small", prompt="a", temperature=-1)


# --- guidance -----------------------------------------------------------------------------------------


def test_guidance_is_told_token_by_token(server: Running) -> None:
    choice = post(server, **ASK, return_guidance=True).json()["choices"][0]
    tokens = choice["guidance"]
    assert "".join(token["token"] for token in tokens) == choice["text"]
    for token in tokens:
        assert set(token) == {"token", "p", "q", "R", "S", "base_choice", "p_base_choice", "ends"}
        assert all(0 <= token[key] <= 1 for key in ("p", "q", "R", "S", "p_base_choice"))
        assert token["p"] <= token["p_base_choice"] + 1e-9
    assert choice["satisfied"] is bool(ORACLE(["ball, park"], [choice["text"]])[0])


def test_an_exact_end_is_kept_where_the_oracle_is_cheap(server: Running) -> None:
    made = post(server, **ASK, n=16, return_guidance=True).json()["choices"]
    ended = [choice for choice in made if choice["finish_reason"] == "stop"]
    assert ended
    assert all(choice["satisfied"] for choice in ended)
    alone = post(server, **ASK, n=16, guides={"first": 0}, return_guidance=True).json()["choices"]
    assert not all(choice["satisfied"] for choice in alone)


def test_strength_0_is_the_base_and_no_guides_are_too(server: Running) -> None:
    zero = post(server, **ASK, n=4, guides={"first": 0}).json()["choices"]
    none = post(server, **ASK, n=4, guides={}, return_guidance=True).json()["choices"]
    assert [choice["text"] for choice in zero] == [choice["text"] for choice in none]
    assert all(token["R"] is None for choice in none for token in choice["guidance"])
    assert "satisfied" not in none[0]


def test_a_verified_answer_was_checked(server: Running) -> None:
    made = post(server, **ASK, n=4, verified=True).json()["choices"]
    for choice in made:
        assert choice["verified"] == (choice["finish_reason"] == "stop")
        assert not choice["verified"] or ORACLE(["ball, park"], [choice["text"]])[0]
    body = {"prompt": "a man sees", "condition": "zebra", "verified": True}
    (lost,) = post(server, **body).json()["choices"]
    assert (lost["text"], lost["verified"], lost["finish_reason"]) == ("", False, "content_filter")
    assert (lost["draws"], lost["missing_parts"]) == (16, ["keywords"])


def test_a_verified_stream_comes_after_the_check(server: Running) -> None:
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**ASK, "verified": True, "stream": True}
    ) as got:
        lines = [line for line in got.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    (chunk,) = [json.loads(line[6:]) for line in lines[:-1]]
    assert chunk["choices"][0]["verified"] is True
    assert ORACLE(["ball, park"], [chunk["choices"][0]["text"]])[0]


def test_without_a_prompt_the_guides_own_form_is_used(server: Running) -> None:
    made = post(server, condition="ball", seed=1, n=3).json()["choices"]
    same = post(server, prompt="a ball", condition="ball", seed=1, n=3).json()["choices"]
    assert made == same


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (
            {**ASK, "guides": {"first": 2}, "target_rate": 0.5},
            "target_rate",
            "expected strength 1 with a target rate below 1; found strength 2 and target rate 0.5. "
            "A target rate is defined for R itself: use one of the two.",
        ),
        ({**ASK, "guides": {}, "target_rate": 0.5}, "target_rate", "A target rate needs a guide."),
        ({**ASK, "verified": True, "target_rate": 0.5}, "target_rate", None),
        (
            {**ASK, "doubt": 0.1, "target_rate": 0.5},
            "target_rate",
            "expected no doubt with a target rate below 1; found doubt 0.1 and target rate 0.5. "
            "A rate below 1 lets unsatisfied texts be already: use one of the two.",
        ),
        ({**ASK, "doubt": 1.5}, "doubt", None),
        ({**ASK, "guides": {}, "doubt": 0.1}, "doubt", "There is nothing to doubt without a guide."),
        ({**ASK, "plausible": 1.5}, "plausible", None),
        ({**ASK, "guides": {}, "plausible": 0.1}, "plausible", "Without a guide, use top_p."),
        ({**ASK, "temperature": 0.5, "target_rate": 0.5}, "target_rate", None),
        (
            {**ASK, "guides": {"second": 1}, "verified": True},
            "verified",
            "Verified texts need a guide whose oracle is loaded.",
        ),
        (
            {**ASK, "guides": {"/etc/passwd": 1}},
            "guides",
            "expected guides that are served here (first, second); found '/etc/passwd'. Name one of them.",
        ),
        ({**ASK, "condition": " , "}, "condition", None),
        (
            {**ASK, "condition": "dog, cat, ball, man, park"},
            "condition",
            "A condition of the guide first may have 4 parts; this one has 6.",
        ),
        ({**ASK, "prompt": "a " * 25}, "prompt", "A prompt may have 24 tokens; this one has 25."),
        ({**ASK, "prompt": "a " * 200}, "prompt", None),
        ({**ASK, "condition": "a " * 100}, "condition", None),
        ({**ASK, "n": 17}, "n", "A request may ask for 16 texts."),
        ({}, "prompt", "Give a prompt, a condition, or both."),
        ({**ASK, "oracle": "file.py:judge"}, "oracle", "oracle: Extra inputs are not permitted"),
        ({**ASK, "stop": ["a"] * 5}, None, None),
        ({**ASK, "echo": True}, "echo", None),
        ({**ASK, "guides": {"first": math.pi**10}}, "guides.first", None),
    ],
)
def test_what_cannot_be_answered_is_refused(
    server: Running, body: dict[str, Any], param: str | None, message: str | None
) -> None:
    error = refused(post(server, **body), 400)
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert message is None or error["message"] == message


def test_a_base_without_a_template_does_not_chat() -> None:
    with running(build_served(chat=False)) as server:
        body = {"messages": [{"role": "user", "content": "a man"}]}
        error = refused(post(server, "/v1/chat/completions", **body), 400)
        assert error["code"] == "no_chat_template"
        assert post(server, **ASK).status_code == 200


def test_a_base_that_wraps_prompts_itself_takes_single_messages() -> None:
    plain = build_served()
    wrapping = CausalModel(plain.base.model, plain.base.tokenizer, length_limit=LIMIT, chat=True)
    engine = Engine(ServedModel("small", wrapping, ()))
    user = {"role": "user", "content": "a man sees"}
    job = read_chat(ChatRequest(messages=[user]), engine, seed=0)
    assert (job.prompts, job.conditions, job.guides) == (("a man sees",), ("a man sees",), ())
    for messages in ([user, user], [{"role": "system", "content": "a"}]):
        with pytest.raises(RefusalError, match="send one message, of the user"):
            read_chat(ChatRequest(messages=messages), engine, seed=0)


# --- limits, tokens, hosts ----------------------------------------------------------------------------


def test_routes_that_are_not_there(server: Running) -> None:
    assert refused(httpx.get(f"{server.url}/v1/files"), 404)["type"] == "not_found_error"
    refused(httpx.get(f"{server.url}/v1/completions"), 405)
    refused(httpx.get(f"{server.url}/docs"), 404)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "prompt": 5}',
        b'{"prompt": "a", "n": 1.5}',
        b'{"prompt": {"a": "b"}}',
        b'{"prompt": [1, 2, 3]}',
    ],
)
def test_broken_bodies_are_refused(server: Running, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    refused(response, 400)
    assert post(server, **ASK).status_code == 200


def test_control_characters_and_other_scripts_are_only_text(server: Running) -> None:
    for prompt in ("\x00\x01", "dog\u202eball", "犬🙂", "<script>alert(1)</script>", "'; DROP TABLE"):
        assert post(server, prompt=prompt, condition="ball").status_code == 200


def test_a_large_body_is_refused_before_it_is_read(server: Running) -> None:
    assert refused(post(server, prompt="a" * 100_000), 413)["code"] == "body_too_large"

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"a" * 4096

    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=endless(), headers=headers)
    refused(response, 413)


def test_only_local_hosts_are_answered(server: Running) -> None:
    for host, status in (("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 400)):
        found = httpx.get(f"{server.url}/healthz", headers={"host": host})
        assert found.status_code == status, host
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_token_is_asked_for() -> None:
    token = "correct horse battery"
    with running(build_served(), token=token) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {token}"}):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                error = refused(httpx.get(server.url + path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert httpx.get(server.url).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=token) as client:
            assert client.completions.create(model="small", prompt="the dog").choices
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="no") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda first, second: compared.append((first, second)) or False
    )
    with pytest.raises(RefusalError):
        Gate(10, 1.0, "secret").require({"path": "/v1/models", "headers": [(b"authorization", b"Bearer x")]})
    assert compared == [(b"Bearer x", b"Bearer secret")]


def test_health_and_metrics(server: Running) -> None:
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok"}
    before = read_metrics(server)
    texts = post(server, **ASK, n=3).json()
    after = read_metrics(server)
    assert after["nado_texts_total"] - before["nado_texts_total"] == 3
    grown = after["nado_tokens_total"] - before["nado_tokens_total"]
    assert grown == texts["usage"]["completion_tokens"]
    httpx.get(f"{server.url}/healthz", headers={"host": "evil.example"})
    assert read_metrics(server)['nado_requests_total{route="other",status="400"}'] >= 1
    name = 'nado_requests_total{route="/v1/completions",status="200"}'
    assert after[name] - before.get(name, 0) == 1
    assert after["nado_request_seconds_count"] == after['nado_request_seconds_bucket{le="+Inf"}']
    assert after["nado_up"] == 1


def read_metrics(server: Running) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    line = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [0-9.e+-]+')
    samples = [each for each in text.splitlines() if not each.startswith("#")]
    assert all(line.fullmatch(each) for each in samples)
    return {name: float(value) for name, value in (each.rsplit(" ", 1) for each in samples)}


# --- load, and clients that leave ---------------------------------------------------------------------


def test_a_full_queue_is_429_and_nothing_is_lost() -> None:
    config = ServingConfig(batch_size=2, max_prompt_tokens=24, queue_size=4)
    with running(build_served(), config) as server:
        expected = {seed: post(server, **{**ASK, "seed": seed}).json()["choices"] for seed in range(24)}
        with ThreadPoolExecutor(24) as threads:
            answers = list(threads.map(lambda seed: post(server, **{**ASK, "seed": seed}), range(24)))
        for seed, answer in enumerate(answers):
            if answer.status_code == 429:
                assert refused(answer, 429)["type"] == "rate_limit_error"
                assert answer.headers["retry-after"] == "1"
            else:
                assert answer.json()["choices"] == expected[seed]
        assert {answer.status_code for answer in answers} == {200, 429}


def test_mixed_requests_at_once_get_their_own_answers(server: Running) -> None:
    bodies: list[dict[str, Any]] = [
        {**ASK, "seed": seed, "prompt": prompt, "condition": condition, **more}
        for seed, more in enumerate(
            [{}, {"guides": {"first": 3}}, {"target_rate": 0.4}, {"verified": True}, {"guides": {}}]
        )
        for prompt in ("a man sees", "the dog")
        for condition in ("ball", "park, man", "red, dog, cat")
    ]
    alone = [post(server, **body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = list(threads.map(lambda body: post(server, **body).json()["choices"], bodies))
    assert together == alone


def test_a_late_request_is_408() -> None:
    config = ServingConfig(batch_size=1, max_prompt_tokens=24, deadline=0.0)
    with running(build_served(), config) as server:
        assert refused(post(server, **ASK), 408)["code"] == "deadline"
        assert refused(post(server, **ASK, stream=True), 408)["code"] == "deadline"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_makes_room(stream: bool) -> None:
    with running(build_served(), ServingConfig(batch_size=1, max_prompt_tokens=24)) as server:
        post(server, **ASK)
        slow = slow_down(server)
        body = json.dumps({**ASK, "n": 16, "stream": stream}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        until(lambda: server.engine.running > 0)
        connection.close()
        if stream:
            connection.sock = None
        until(lambda: server.engine.running + server.engine.waiting == 0)
        assert server.engine.tally.cancelled > 0
        slow.clear()
        assert post(server, **ASK).status_code == 200


def slow_down(server: Running) -> threading.Event:
    """Make every step take a while."""
    slow = threading.Event()
    slow.set()
    advance = server.engine._advance

    def slowly(pool: Any) -> None:
        advance(pool)
        if slow.is_set():
            time.sleep(0.05)

    server.engine._advance = slowly  # type: ignore[method-assign]
    return slow


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_clients_that_dawdle_or_die_do_not_stop_the_others() -> None:
    config = ServingConfig(batch_size=8, max_prompt_tokens=24, body_seconds=0.3)
    with running(build_served(), config) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        open_sockets = []
        for sent in (b"", b"PO", head, head + b"Content-Length: 50\r\n\r\n{", b"\x16\x03\x01garbage\r\n\r\n"):
            made = socket.create_connection(("127.0.0.1", server.port))
            made.sendall(sent)
            open_sockets.append(made)
        assert post(server, **ASK).status_code == 200
        dawdler = open_sockets[3]
        dawdler.settimeout(10)
        assert b"408" in dawdler.recv(4096).split(b"\r\n")[0]
        for made in open_sockets:
            made.close()
        assert post(server, **ASK).status_code == 200


# --- from the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guide's folder, as training leaves it."""
    from nado.study import read_study, run_study

    file = make_study(tmp_path_factory.mktemp("serve"))
    run_study(read_study(file), file.with_suffix(""))
    return file.with_suffix("") / "train"


def test_guides_are_loaded_beside_one_base(trained: Path) -> None:
    served = load_served([GuideSource("a", trained), GuideSource("b", trained)], name="mine")
    assert isinstance(served, ServedModel)
    assert served.name == "mine"
    assert [each.guide.reader.model for each in served.members] == [served.base] * 2  # type: ignore[union-attr]
    assert all(each.oracle is not None for each in served.members)
    assert served.template == "a {condition}"


def test_nado_serve_answers_and_finishes_what_is_running(trained: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NADO_TOKEN": "x" * 20}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    arguments = ["serve", "--guide", str(trained), "--port", str(port), "--batch-size", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nado.cli", *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url) or process.poll() is not None, 60)
        assert process.poll() is None
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x" * 20, max_retries=0) as client:
            body = {"model": "train", "prompt": None, "n": 16, "extra_body": {"condition": "dog, ball"}}
            with ThreadPoolExecutor(1) as threads:
                running_request = threads.submit(client.completions.create, **body)
                headers = {"authorization": "Bearer " + "x" * 20}
                until(lambda: "nado_running 0" not in httpx.get(f"{url}/metrics", headers=headers).text)
                process.send_signal(signal.SIGTERM)
                assert len(running_request.result(60).choices) == 16
        assert process.wait(60) == 0
    finally:
        process.kill()
        _, err = process.communicate()
    assert err.startswith(f"train at http://127.0.0.1:{port}/ (API: http://127.0.0.1:{port}/v1)\n")
    assert "Traceback" not in err


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/healthz").status_code == 200)
    except httpx.TransportError:
        return False


def test_mistakes_on_the_command_line_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, expected in {
        ("serve", "--guide", str(tmp_path)): "no config.json there",
        ("serve", "--token-file", str(tmp_path / "none")): "expected a token in",
    }.items():
        monkeypatch.setattr(sys, "argv", ["nado", *arguments])
        monkeypatch.setenv("COLUMNS", "300")
        monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")
        with pytest.raises(SystemExit) as ended:
            main()
        err = capsys.readouterr().err
        assert ended.value.code == 1
        assert err.startswith("error: ")
        assert expected in err


def test_a_short_token_and_missing_packages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected a token of at least 16 characters; found one of 3"):
        serve(build_served(), token="abc")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'nado-lm\[serve\]'"):
        require_packages()


def test_options_and_config_have_the_same_defaults() -> None:
    offered = inspect.signature(serve_command).parameters
    for name, default in vars(ServingConfig()).items():
        assert name not in offered or offered[name].default == default, name
    assert set(vars(ServingConfig())) - set(offered) == {
        "max_condition_tokens",
        "max_body",
        "body_seconds",
        "max_pools",
    }


def test_our_own_errors_tell_a_client_nothing() -> None:
    refusal = refuse(ZeroDivisionError("/home/operator/secret.py"))
    assert (refusal.status, refusal.message) == (500, "The server failed; its log says why.")


def test_a_failure_of_ours_is_told_in_openais_shape(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("nado.serving.pool.measure", lambda *arguments: 1 / 0)
        error = refused(post(server, **ASK), 500)
    assert error["message"] == "The server failed; its log says why."
    assert post(server, **ASK).status_code == 200


# --- fuzzing ------------------------------------------------------------------------------------------


def test_no_fuzzed_request_is_a_server_error(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    tried = 0
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(
            max_examples=40,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        def try_out(case: Any) -> None:
            nonlocal tried
            tried += 1
            case.call_and_validate(checks=checks, timeout=30)

        try_out()
    assert tried > 100
    assert httpx.get(f"{server.url}/healthz").json() == {"status": "ok"}
