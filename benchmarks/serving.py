"""What batching gives a server: 64 clients at once against one request after the other, over loopback HTTP.

    python benchmarks/serving.py [--guide FOLDER] [--clients 64] [--requests 4]

Requests are mixed: conditions, strengths, target rates, verified texts, streams. Three things are measured.

- Throughput of 64 clients over that of one client who waits for each answer. That client is given a server of
  its own with batch size 1, which is the fastest there is for it: the batched server pays for all its rows
  even when a single one is used. The ratio to that, which is larger, is recorded too.
- The slowest answers, and errors of the server.
- Crossed answers: requests are sent alone and then all at once, and tell the log-probability of every token;
  an answer that differs in any token or any digit counts.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recording import record

WORDS = ["dog", "ball", "beach", "man", "woman", "park", "run", "throw", "car", "tree", "water", "guitar"]
KINDS: list[dict[str, Any]] = [
    {},
    {"strength": 2.0},
    {"target_rate": 0.7},
    {"strength": 0.0},
    {"verified": True},
    {"temperature": 0.8},
    {"stream": True},
    {"n": 2},
]


class Reply(NamedTuple):
    """What came of a request."""

    status: int
    choices: Any  # by index: text, reason, and log-probabilities where they were asked for
    seconds: float


def main() -> None:
    options = parse()
    total = options.clients * options.requests
    with serving(options, options.batch_size) as port:
        guide = first_guide(port)
        plain = [make_request(number, guide, options.keywords) for number in range(total)]
        detailed = [{**body, "logprobs": 0} for body in plain[: options.clients]]
        warm_up(port, plain)
        alone, _ = send_all(port, detailed, 1)
        together, _ = send_all(port, detailed, options.clients)
        crossed = sum(one[:2] != other[:2] for one, other in zip(alone, together, strict=True))
        quick, seconds = send_all(port, plain, options.clients)
        again, seconds_same = send_all(port, plain[: options.sequential], 1)
        crossed += sum(one[:2] != other[:2] for one, other in zip(again, quick, strict=False))
    with serving(options, 1) as port:
        warm_up(port, plain[:8])
        single, seconds_single = send_all(port, plain[: options.sequential], 1)
    replies = [*alone, *together, *quick, *again, *single]
    for reply in replies:
        if reply.status != 200:
            print(f"not answered: {reply.status} {reply.choices}", file=sys.stderr)
            break
    rates = [total / seconds, options.sequential / seconds_single, options.sequential / seconds_same]
    metrics = {
        "throughput_ratio_64_clients": round(rates[0] / rates[1], 2),
        "throughput_ratio_same_server": round(rates[0] / rates[2], 2),
        "requests_per_second_64_clients": round(rates[0], 2),
        "requests_per_second_one_at_a_time": round(rates[1], 2),
        "p50_s": round(float(np.quantile([reply.seconds for reply in quick], 0.5)), 3),
        "p99_s": round(float(np.quantile([reply.seconds for reply in quick], 0.99)), 3),
        "five_hundreds": sum(reply.status >= 500 for reply in replies),
        "not_answered": sum(reply.status != 200 for reply in replies),
        "crossed_answers": crossed,
        "compared_answers": len(detailed) + len(again),
        "batch_size": options.batch_size,
    }
    print(json.dumps(metrics, indent=2))
    if not options.dry:
        record("serving", metrics, output=options.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guide", help="a guide's folder (default: the embedded one)")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--sequential", type=int, default=64, help="requests of the client that is alone")
    parser.add_argument("--keywords", type=int, default=3, help="at most so many in a condition")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def make_request(number: int, guide: str, most: int) -> dict[str, Any]:
    count = 1 + number % most
    words = [WORDS[(5 * number + 7 * part + number // 12) % len(WORDS)] for part in range(count)]
    kind = dict(KINDS[number % len(KINDS)])
    body = {"condition": ", ".join(dict.fromkeys(words)), "seed": number, **kind}
    body["guides"] = {guide: body.pop("strength", 1.0)}
    return body


@contextmanager
def serving(options: argparse.Namespace, batch_size: int) -> Iterator[int]:
    """A server of its own process, on a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    words = ["serve", "--port", str(port), "--batch-size", str(batch_size), "--queue-size", "4096"]
    words += ["--guide", options.guide] if options.guide else []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nado.cli", *words],
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
        try:
            wait_for(port, process)
            yield port
        finally:
            process.terminate()
            process.wait(60)


def wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the server ended before it answered: run nado serve to see why")
        try:
            get(port, "/healthz")
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server does not answer")


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def first_guide(port: int) -> str:
    return str(get(port, "/v1/models")["data"][0]["guides"][0]["name"])


def warm_up(port: int, bodies: Sequence[dict[str, Any]]) -> None:
    send_all(port, bodies[:8], 8)


def send_all(port: int, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[list[Reply], float]:
    """Replies in the order of the requests, and the seconds that all of them took together."""
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=600) for _ in range(clients)]

    def work(client: int) -> list[Reply]:
        return [send(connections[client], body) for body in bodies[client::clients]]

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        found = list(threads.map(work, range(clients)))
    seconds = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return [found[number % clients][number // clients] for number in range(len(bodies))], seconds


def send(connection: http.client.HTTPConnection, body: dict[str, Any]) -> Reply:
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    seconds = time.perf_counter() - began
    if response.status != 200:
        return Reply(response.status, data.decode(), seconds)
    return Reply(200, join(read_chunks(data) if body.get("stream") else [json.loads(data)]), seconds)


def read_chunks(data: bytes) -> list[dict[str, Any]]:
    events = data.decode().strip().split("\n\n")
    if events[-1] != "data: [DONE]":
        raise SystemExit(f"a stream was broken off: {events[-1][:200]}")
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def join(documents: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """Each choice's text, tokens, log-probabilities and end, streamed or not."""
    found: dict[int, Any] = {}
    for choice in (choice for document in documents for choice in document["choices"]):
        text, tokens, values, reason = found.get(choice["index"], ("", [], [], None))
        told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
        found[choice["index"]] = (
            text + choice["text"],
            tokens + told["tokens"],
            values + told["token_logprobs"],
            choice["finish_reason"] or reason,
        )
    return found


if __name__ == "__main__":
    main()
