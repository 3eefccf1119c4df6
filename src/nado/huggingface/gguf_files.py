"""GGUF files as ordinary checkpoints: converted once, kept as safetensors."""

import os
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from nado.errors import InputError, MissingPackageError, StorageError
from nado.storage import digest_ends

_BUILDING = ".building-"
_ABANDONED_AFTER = 3600.0  # seconds


def converted_gguf(file: Path) -> Path:
    """The folder that holds `file` as safetensors, made on first use (seconds to minutes)."""
    if not file.is_file():
        raise InputError("a GGUF file", f"nothing at {file}", "Check the path.")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise InputError("a GGUF file", f"something else in {file}", "Download it again.")
    folder = _cache_root() / f"{file.stem}-{digest_ends(file)[:16]}"
    if not (folder / "config.json").is_file():
        _convert(file, folder)
    return folder


def _cache_root() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nado"
    return Path(os.environ.get("NADO_CACHE", default)) / "gguf"


def _convert(file: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise MissingPackageError("gguf", "gguf", "reading GGUF files")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        # Built beside its final place and moved there whole: a killed conversion leaves no half checkpoint.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_BUILDING) as building:
            checkpoint = Path(building) / folder.name
            model.save_pretrained(checkpoint)
            tokenizer.save_pretrained(checkpoint)
            _move(checkpoint, folder)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"to write {folder}",
            f"the error: {getattr(error, 'strerror', None) or error}",
            "Free some space, or name another folder in the environment variable NADO_CACHE.",
        ) from error


def _move(checkpoint: Path, folder: Path) -> None:
    try:
        checkpoint.rename(folder)
    except OSError:
        # Another process may have finished first: then its folder is as good as ours.
        if not (folder / "config.json").is_file():
            raise


def _remove_abandoned(root: Path) -> None:
    """Delete what killed conversions left. One that was written to lately may still be going on."""
    for building in root.glob(f"{_BUILDING}*"):
        if time.time() - building.stat().st_mtime > _ABANDONED_AFTER:
            shutil.rmtree(building, ignore_errors=True)
