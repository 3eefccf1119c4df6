"""A folder that `vllm serve` can serve: the base's weights, the guide's beside them, and what p is.

config.json, *.safetensors   the base's, under the name of the guided architecture, with a table `nado`
generation_config.json       nothing that would change q; the length limit
guide/                       the guide as `save_guide` writes it

Weights are safetensors, nothing is pickled, and no code is loaded from the folder.
"""

from pathlib import Path
from typing import Any

from nado.errors import InputError, MismatchError, StorageError
from nado.guide import Guide
from nado.guide_files import save_guide
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.storage import read_json, write_json
from nado.vllm_plugin import PREFIX
from nado.vllm_plugin.served import GUIDE, Served


def save_for_vllm(
    base: CausalModel | EncoderDecoderModel,
    guide: Guide,
    folder: str | Path,
    *,
    condition: str | None = None,
    template: str | None = None,
) -> Path:
    """Write a folder that `vllm serve` can serve, from a base and a light guide attached to it; returns it.

    `condition` is used for requests that give none. The base is saved in the numbers it was loaded in.
    """
    require_light(guide.config)
    base = _require_pair(base, guide)
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"a new or empty folder at {folder}", "files in it", "Choose another folder.")
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    save_guide(guide, folder / GUIDE)
    served = Served(
        base.warpers,
        base.eos_ids,
        base.length_limit,
        base.completion,
        condition,
        template,
        base.fingerprint,
        guide.config.shape_only,
    )
    write_json(folder / "generation_config.json", _neutral_settings(base))
    # Last: a folder that was not finished is one that vLLM does not know.
    config = read_json(folder / "config.json")
    architecture = PREFIX + type(base.model).__name__
    write_json(folder / "config.json", {**config, "architectures": [architecture], "nado": served.describe()})
    return folder


def require_light(config: Any) -> None:
    """Refuse a guide that needs more than vLLM can tell it: attention of its own, or the oracle."""
    if config.reads != "light":
        raise InputError(
            'a light guide (reads="light"), for vLLM',
            f'one that reads "{config.reads}" and keeps keys and values of its own',
            'Train one with reads = "light" in [guide], or serve this one with nado serve.',
        )
    if config.progress_bits or config.named_parts:
        raise InputError(
            "a guide without progress, for vLLM",
            f"one that is told {config.progress_bits} bits of it by the oracle at every token",
            "Train one with progress_bits = 0 in [guide], or serve this one with nado serve.",
        )


def _require_pair(base: CausalModel | EncoderDecoderModel, guide: Guide) -> CausalModel:
    if not isinstance(base, CausalModel):
        raise InputError(
            "a causal base, for vLLM", type(base.model).__name__, "Serve this one with nado serve."
        )
    if guide.config.base_fingerprint != base.fingerprint:
        raise MismatchError(
            f"the base this guide was trained for, fingerprint {guide.config.base_fingerprint[:8]}",
            f"one with fingerprint {base.fingerprint[:8]}",
            "Load that base with the same warpers and limit.",
        )
    return base


def _neutral_settings(base: CausalModel) -> dict[str, Any]:
    """A generation config that leaves q alone; vLLM takes defaults and the most tokens from it."""
    return {
        "eos_token_id": base.eos_id,
        "bos_token_id": base.tokenizer.bos_token_id,
        "pad_token_id": base.eos_id if base.tokenizer.pad_token_id is None else base.tokenizer.pad_token_id,
        "max_new_tokens": base.length_limit,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
