"""What the server has done, as Prometheus reads it."""

import threading
from bisect import bisect_left
from collections import Counter

from nado.serving.engine import Engine

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Requests:
    """Requests counted by route and status, and how long they took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0

    def count(self, route: str, status: int, seconds: float) -> None:
        """One more request."""
        with self._lock:
            self._statuses[route, status] += 1
            self._buckets[bisect_left(_BOUNDS, seconds)] += 1
            self._seconds += seconds

    def lines(self) -> list[str]:
        """As Prometheus text."""
        with self._lock:
            statuses, buckets, seconds = dict(self._statuses), list(self._buckets), self._seconds
        lines = [
            "# HELP nado_requests_total Requests by route and status.",
            "# TYPE nado_requests_total counter",
        ]
        lines += [
            f'nado_requests_total{{route="{route}",status="{status}"}} {number}'
            for (route, status), number in sorted(statuses.items())
        ]
        lines += [
            "# HELP nado_request_seconds Seconds from a request to its whole answer.",
            "# TYPE nado_request_seconds histogram",
        ]
        total = 0
        for bound, number in zip([*map(str, _BOUNDS), "+Inf"], buckets, strict=True):
            total += number
            lines.append(f'nado_request_seconds_bucket{{le="{bound}"}} {total}')
        return [*lines, f"nado_request_seconds_sum {seconds:.6f}", f"nado_request_seconds_count {total}"]


def write_metrics(engine: Engine, requests: Requests) -> str:
    """The whole page."""
    tally = engine.tally
    counters = {
        "steps": (tally.steps, "Forward passes over a batch."),
        "tokens": (tally.tokens, "Tokens written."),
        "texts": (tally.texts, "Texts answered."),
        "verified": (tally.verified, "Texts an oracle said yes to before they were sent."),
        "not_found": (tally.not_found, "Verified texts that were not found within the budget."),
        "cancelled": (tally.cancelled, "Texts whose client left."),
        "late": (tally.late, "Requests past their deadline."),
        "failed": (tally.failed, "Texts lost to an error."),
        "busy_seconds": (round(tally.busy_seconds, 6), "Seconds spent writing."),
    }
    gauges = {
        "waiting": (engine.waiting, "Texts that have no row yet."),
        "running": (engine.running, "Texts being written."),
        "queue_size": (engine.config.queue_size, "Texts that may wait."),
        "up": (int(engine.alive), "Whether texts are being written."),
    }
    lines = []
    for name, (value, text) in counters.items():
        lines += [
            f"# HELP nado_{name}_total {text}",
            f"# TYPE nado_{name}_total counter",
            f"nado_{name}_total {value}",
        ]
    for name, (value, text) in gauges.items():
        lines += [f"# HELP nado_{name} {text}", f"# TYPE nado_{name} gauge", f"nado_{name} {value}"]
    return "\n".join([*lines, *requests.lines()]) + "\n"
