"""Ray's cluster: reached or started, and what an actor may have of it.

Ray is asked not to report usage to anybody, to need no network of its own, and to keep its own log lines to
itself: progress and errors are nado's.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from nado.distributed.errors import EngineError, first_line
from nado.errors import InputError, MissingPackageError
from nado.study.sections import DistributedConfig

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# Prompts go through Ray's store, texts do not: actors write those themselves.
_STORE_BYTES = 128 * 2**20
_REACH_S = 5.0


@dataclass(frozen=True)
class Place:
    """What one actor is given, and how many there are at a time."""

    actors: int
    cpus: float
    gpus: float


@contextmanager
def connect(config: DistributedConfig) -> Iterator[Any]:
    """The module `ray`, connected to a cluster meanwhile: the one at the address, or one of this machine.

    A connection that is there already is used and left as it is.
    """
    for name, value in _ENVIRONMENT.items():  # some of it is read when Ray is imported
        os.environ.setdefault(name, value)
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = config.address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": local_cores(config),
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
        }
    else:
        require_reachable(address)
        options["address"] = address
    try:
        ray.init(**options)
    except Exception as error:
        raise EngineError(
            f"a Ray cluster {'on this machine' if address is None else f'at {address}'}",
            f"the error: {first_line(error)}",
            "Check that its nodes run this version of Ray and Python, then run the same command again.",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """The package, with Ray Data; or what to install."""
    try:
        import_module("ray.data")
        return import_module("ray")
    except ImportError as error:
        raise MissingPackageError("ray", "ray", "the engine ray") from error


def local_cores(config: DistributedConfig) -> int:
    """Cores of a cluster that is this machine alone: those its actors are to have, or all."""
    if config.actors is None:
        return os.cpu_count() or 1
    return max(1, -int(-config.actors * config.cpus // 1))


def require_reachable(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would try for minutes and then end the process."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        raise InputError(
            "the address of a Ray head node as host:port", repr(address), "Write 10.0.0.1:6379, for instance."
        )
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise EngineError(
            f"a Ray head node at {address}",
            f"the error: {error.strerror or error}",
            "Start one with `ray start --head --port 6379`, or leave the address out for this machine alone.",
        ) from error


def find_place(ray: Any, config: DistributedConfig, shards: int, *, gpus: float | None = None) -> Place:
    """How many actors there is work and room for; `gpus` an actor, where the config does not say.

    Refuses actors that no node has room for: Ray would wait for such a node for ever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most_gpus = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    asked = config.gpus if config.gpus is not None else gpus
    each = (1.0 if most_gpus else 0.0) if asked is None else asked
    room = sum(_fitting(node, config.cpus, each) for node in nodes)
    if room == 0:
        most = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        raise EngineError(
            f"a node with {config.cpus:g} cores and {each:g} GPUs for an actor",
            f"{len(nodes)} nodes with at most {most:g} cores and {most_gpus:g} GPUs",
            "Ask for less with cpus and gpus, or add such a node.",
        )
    return Place(max(1, min(room, config.actors or room, shards)), config.cpus, each)


def _fitting(node: dict[str, float], cpus: float, gpus: float) -> int:
    """How many actors a node has room for."""
    by_core = node.get("CPU", 0.0) // cpus
    return int(by_core if gpus == 0 else min(by_core, node.get("GPU", 0.0) // gpus))
