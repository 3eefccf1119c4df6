"""Clusters that cannot be reached or have no room, and shards that fail, in words; no Ray is started here."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from nado.cli import main
from nado.distributed import EngineError, shards
from nado.distributed.cluster import Place, connect, find_place, local_cores, require_reachable
from nado.distributed.errors import describe_failure, explain, to_error
from nado.distributed.shards import ShardTask
from nado.errors import InputError, MissingPackageError, NadoError, StorageError
from nado.samples import Folder
from nado.study.sections import DistributedConfig

HOST = socket.gethostname()
KEPT = "Finished shards are kept: the same command goes on."


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which nobody listens, and nobody else will meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_head_node_that_cannot_be_reached_is_one_line_and_soon(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed: pip install 'nado-lm[ray]'")
    (tmp_path / "prompts.txt").write_text("dog\ncat\n")
    sections = '[base]\nname = "tiny"\nlength_limit = 8\n[oracle]\nname = "keywords"\n[prompts]\n'
    (tmp_path / "study.toml").write_text(sections + 'file = "prompts.txt"\n')
    words = ["nado", "run", str(tmp_path / "study.toml"), "--engine", "ray"]
    monkeypatch.setattr(sys, "argv", [*words, "--address", f"127.0.0.1:{closed_port}"])
    began = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert time.monotonic() - began < 30
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: expected a Ray head node at 127.0.0.1:{closed_port}; found the error: Connection refused. "
        "Start one with `ray start --head --port 6379`, or leave the address out for this machine alone."
    )


def test_an_address_that_is_none_is_refused() -> None:
    for address in ("head", "head:", ":6379", "ray://head"):
        with pytest.raises(InputError, match="expected the address of a Ray head node as host:port"):
            require_reachable(address)
    require_reachable("auto")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(MissingPackageError) as caught, connect(DistributedConfig(engine="ray")):
        pass
    assert str(caught.value) == (
        "expected the package ray for the engine ray; found that it is not installed. "
        "Install it with: pip install 'nado-lm[ray]'"
    )


def test_usage_is_reported_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    with pytest.raises(MissingPackageError), connect(DistributedConfig(engine="ray")):
        pass
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


# --- room ---------------------------------------------------------------------------------------------


def nodes(*resources: dict[str, float]) -> Any:
    """As much of Ray as is asked where there is room; the last node is dead."""
    found = [{"Resources": each, "Alive": True} for each in resources]
    return SimpleNamespace(nodes=lambda: [*found, {"Resources": {"CPU": 1e6, "GPU": 1e6}, "Alive": False}])


@pytest.mark.parametrize(
    ("config", "shards", "expected"),
    [
        (DistributedConfig(), 100, (7, 1.0, 1.0)),  # one a GPU; the second node has fewer cores than GPUs
        (DistributedConfig(gpus=0), 100, (19, 1.0, 0.0)),  # one a core
        (DistributedConfig(gpus=0, cpus=4), 100, (4, 4.0, 0.0)),  # 16 // 4 + 3 // 4
        (DistributedConfig(gpus=0.5), 100, (11, 1.0, 0.5)),  # min(16, 8) + min(3, 16)
        (DistributedConfig(), 3, (3, 1.0, 1.0)),
        (DistributedConfig(actors=2), 100, (2, 1.0, 1.0)),
    ],
)
def test_there_are_as_many_actors_as_have_room_and_work(
    config: DistributedConfig, shards: int, expected: tuple[int, float, float]
) -> None:
    cluster = nodes({"CPU": 16, "GPU": 4}, {"CPU": 3, "GPU": 8})
    assert find_place(cluster, config, shards) == Place(*expected)


def test_actors_that_label_take_no_gpu_unless_they_are_to() -> None:
    cluster = nodes({"CPU": 16, "GPU": 4})
    assert find_place(cluster, DistributedConfig(), 100, gpus=0.0).actors == 16
    assert find_place(cluster, DistributedConfig(gpus=1), 100, gpus=0.0).actors == 4


def test_actors_that_no_node_has_room_for_are_refused() -> None:
    with pytest.raises(EngineError) as caught:
        find_place(nodes({"CPU": 8}, {"CPU": 2}), DistributedConfig(cpus=4, gpus=1), 10)
    assert str(caught.value) == (
        "expected a node with 4 cores and 1 GPUs for an actor; "
        "found 2 nodes with at most 8 cores and 0 GPUs. Ask for less with cpus and gpus, or add such a node."
    )


def test_a_cluster_of_this_machine_has_the_cores_its_actors_need() -> None:
    assert local_cores(DistributedConfig(actors=3, cpus=2)) == 6
    assert local_cores(DistributedConfig(actors=3, cpus=0.5)) == 2
    assert local_cores(DistributedConfig()) == os.cpu_count()


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"actors": 0}, "0"),
        ({"cpus": 0}, "0 and None"),
        ({"gpus": -1}, "1.0 and -1"),
        ({"shares": 3, "processes": 2}, "3"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(wrong: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError) as caught:
        DistributedConfig(**wrong)
    assert caught.value.found == found


# --- shards -------------------------------------------------------------------------------------------

SCHEMA = pa.schema([("row", pa.int64())])


@dataclass
class Task(ShardTask):
    """Makes a shard of two rows, or raises."""

    error: Exception | None = None

    def make(self, entry: dict[str, Any]) -> pa.Table:
        if self.error is not None:
            raise self.error
        return pa.table({"row": [entry["shard"], 7]}, SCHEMA)


def test_a_shard_is_written_and_told_of(tmp_path: Path) -> None:
    target = Folder(tmp_path, SCHEMA)
    reply = Task(target, 3).run({"shard": 4})
    assert reply == {"shard": 4, "rows": 2, "tokens": 0, "node": HOST, "failure": ""}
    assert target.read_shard(4)["row"].to_pylist() == [4, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00004.parquet"]


def test_a_shard_whose_maker_died_before_saying_so_is_not_made_again(tmp_path: Path) -> None:
    Task(Folder(tmp_path, SCHEMA), 3).run({"shard": 0})
    reply = Task(Folder(tmp_path, SCHEMA), 3, error=ValueError("made again")).run({"shard": 0})
    assert (reply["rows"], reply["failure"]) == (2, "")


def test_the_last_of_three_deaths_over_a_shard_is_an_error(tmp_path: Path) -> None:
    task = Task(Folder(tmp_path, SCHEMA), 3)
    for _ in range(3):
        assert task._note_attempt(6).exists()  # and then the process dies
    assert task.run({"shard": 5})["failure"] == ""
    error = to_error(task.run({"shard": 6})["failure"], "shard 6, on a")
    assert type(error) is EngineError
    assert str(error) == (
        "expected an actor that lives until shard-00006.parquet is made; "
        f"found 3 that died over it on {HOST}, most likely for want of memory (shard 6, on a). "
        f"Lower batch_size, or give each actor more cores so that fewer share a node. {KEPT}"
    )
    assert task.run({"shard": 6})["failure"] == ""  # a new run begins to count anew


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            StorageError("to write it", "a full disk", "Free some space."),
            StorageError,
            f"expected to write it; found a full disk (here). Free some space. {KEPT}",
        ),
        (
            MissingPackageError("spacy", "oracles", "lemmas"),
            MissingPackageError,
            "expected the package spacy for lemmas; found that it is not installed (here). "
            f"Install it with: pip install 'nado-lm[oracles]' {KEPT}",
        ),
        (
            MemoryError("Unable to allocate 8.00 TiB\nfor an array"),
            EngineError,
            "expected enough memory for an actor; found Unable to allocate 8.00 TiB (here). "
            f"Lower batch_size, or give each actor more cores so that fewer share a node. {KEPT}",
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
            EngineError,
            "expected enough memory for an actor; "
            "found [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory (here). "
            f"Lower batch_size, or give each actor more cores so that fewer share a node. {KEPT}",
        ),
        (
            KeyError("condition"),
            EngineError,
            "expected work that ends without an error; found KeyError: 'condition' (here). "
            f"Its trace is below. {KEPT}",
        ),
    ],
)
def test_errors_survive_the_journey(
    tmp_path: Path, error: Exception, kind: type[NadoError], text: str
) -> None:
    reply = Task(Folder(tmp_path, SCHEMA), 3, error=error).run({"shard": 0})
    there = to_error(json.loads(json.dumps(reply))["failure"], "here")
    assert type(there) is kind
    assert str(there) == text
    assert "in make" in there.__notes__[0]
    assert list(tmp_path.iterdir()) == []  # nothing that looks like a death


def test_a_shard_that_cannot_be_seen_here_means_a_folder_that_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_SEEN_S", 0.0)
    monkeypatch.setattr(
        shards,
        "_replies",
        lambda *_: iter([{"shard": 0, "rows": 2, "tokens": 0, "node": "far", "failure": ""}]),
    )
    with pytest.raises(StorageError, match="Choose a folder on a file system that all nodes share"):
        shards.make_shards(Task(Folder(tmp_path, SCHEMA), 3), [], None, lambda made: None)  # type: ignore[arg-type]


def test_an_error_of_rays_is_told_by_its_last_line() -> None:
    class RayTaskError(Exception):
        pass

    error = RayTaskError("ray::f() (pid=1, ip=10.0.0.1)\n  File x\nModuleNotFoundError: No module named 'y'")
    assert explain(error) == "RayTaskError: ModuleNotFoundError: No module named 'y'"
    assert explain(OSError("first\nsecond")) == "OSError: first"
    assert "OSError" in describe_failure(OSError("x"))
