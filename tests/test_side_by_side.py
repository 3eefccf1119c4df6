"""Several studies at once: `recipes/side_by_side.sh`."""

import os
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "recipes" / "side_by_side.sh"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, env=os.environ | environment
    )


def test_all_commands_run_at_once_and_know_what_is_left(tmp_path: Path) -> None:
    """Each of the two waits for what the other has written: one after the other they would never end."""
    commands = [
        f"touch {tmp_path}/{own}; until [ -e {tmp_path}/{other} ]; do sleep 0.05; done; left"
        for own, other in (("a", "b"), ("b", "a"))
    ]
    assert run("100", str(tmp_path / "logs"), *commands).returncode == 0
    for number in (1, 2):
        assert 90 <= int((tmp_path / "logs" / f"{number}.log").read_text()) <= 100


def test_what_failed_is_said(tmp_path: Path) -> None:
    done = run("100", str(tmp_path), "echo well", "echo 'error: no data' >&2; exit 3")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["failed: echo 'error: no data' >&2; exit 3", "error: no data"]
    assert (tmp_path / "1.log").read_text() == "well\n"


def test_the_gpu_is_shared_where_it_can_be(tmp_path: Path) -> None:
    """With a stand-in for NVIDIA's daemon: started once, before the commands, and stopped after them."""
    stand_in = tmp_path / "nvidia-cuda-mps-control"
    stand_in.write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo on >> {tmp_path}/said || cat >> {tmp_path}/said\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    look = f'cat {tmp_path}/said; test -d "$CUDA_MPS_PIPE_DIRECTORY"'
    assert run("100", str(tmp_path / "logs"), look, PATH=path).returncode == 0
    assert (tmp_path / "logs" / "1.log").read_text() == "on\n"
    assert (tmp_path / "said").read_text() == "on\nquit\n"


def test_what_is_stopped_leaves_nothing_running(tmp_path: Path) -> None:
    command = f"echo $$ > {tmp_path}/first; sleep 60 & echo $! > {tmp_path}/second; wait"
    running = subprocess.Popen(["bash", str(SCRIPT), "100", str(tmp_path / "logs"), command])
    while not (tmp_path / "second").is_file() or not (tmp_path / "second").read_text():
        time.sleep(0.05)
    running.terminate()
    assert running.wait(timeout=10) == 130
    for name in ("first", "second"):
        number = (tmp_path / name).read_text().strip()
        ended = not Path(f"/proc/{number}").exists() or "\nState:\tZ" in Path(
            f"/proc/{number}/status"
        ).read_text(encoding="utf-8")
        assert ended


def test_no_time_is_not_endless_time(tmp_path: Path) -> None:
    assert run("0", str(tmp_path), "left").returncode == 0
    assert (tmp_path / "1.log").read_text() == "1\n"


def test_how_it_is_called() -> None:
    done = run("soon", "logs", "true")
    assert (done.returncode, done.stderr.strip()) == (
        64,
        "usage: side_by_side.sh SECONDS LOGS COMMAND [COMMAND …]",
    )
