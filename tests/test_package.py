"""The package itself: import, public names, command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import nado

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )


def test_every_public_name_is_there_and_documented() -> None:
    for name in nado.__all__:
        assert getattr(nado, name) is not None
        assert name == "__version__" or getattr(nado, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'nado' has no attribute 'steer'"):
        nado.steer  # noqa: B018


def test_importing_touches_no_global_state_and_takes_under_a_second_beyond_torch() -> None:
    script = """
import json, logging, os, random, time, warnings
import numpy, torch
# What these do when they are imported, and how long they take, is not ours.
import accelerate.utils, matplotlib, pyarrow.parquet, sacrebleu
from transformers import (AutoModelForCausalLM, DynamicCache, GenerationMixin, LlamaForCausalLM,
                          PreTrainedModel, PreTrainedTokenizerFast)
def state():
    return [repr(random.getstate()), repr(numpy.random.get_state()), repr(torch.get_rng_state().tolist()),
            repr(torch.get_default_dtype()), torch.get_num_threads(), repr(warnings.filters),
            repr(dict(os.environ)), logging.getLogger().level, len(logging.getLogger().handlers)]
before = state()
began = time.perf_counter()
import nado
for name in nado.__all__:
    getattr(nado, name)
print(json.dumps({"seconds": time.perf_counter() - began, "same": before == state()}))
"""
    seconds = []
    while len(seconds) < 5 and min(seconds, default=1.0) >= 1.0:  # other work may share the machine
        result = run("-c", script)
        assert result.returncode == 0, result.stderr
        measured = json.loads(result.stdout)
        assert measured["same"]
        seconds.append(measured["seconds"])
    assert min(seconds) < 1.0


def test_version_and_help() -> None:
    version = run("-m", "nado.cli", "--version")
    assert (version.returncode, version.stdout) == (0, f"nado {nado.__version__}\n")
    help_page = run("-m", "nado.cli", "--help")
    assert help_page.returncode == 0
    assert "yes/no question about the finished text" in " ".join(help_page.stdout.split())
    assert "audit" in help_page.stdout


def test_wrong_usage_exits_with_2_and_an_error_of_ours_with_1_on_one_line() -> None:
    assert run("-m", "nado.cli", "steer").returncode == 2
    failed = run("-m", "nado.cli", "audit", "--oracle", "missing.py:fn", "--texts", "README.md")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: expected ")
    assert failed.stderr.count("\n") == 1


def test_the_exact_example_runs() -> None:
    example = run("-m", "nado.exact")
    assert example.returncode == 0, example.stderr
    assert example.stderr == ""
    assert "satisfied under q*                 1.000000" in example.stdout
