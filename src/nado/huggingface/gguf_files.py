"""GGUF files as ordinary checkpoints: converted once, kept as safetensors."""

import hashlib
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from nado.errors import InputError, MissingPackageError

_SAMPLE = 1 << 20


def converted_gguf(file: Path) -> Path:
    """The folder that holds `file` as safetensors, made on first use (seconds to minutes)."""
    if not file.is_file():
        raise InputError("a GGUF file", f"nothing at {file}", "Check the path.")
    folder = _cache_root() / f"{file.stem}-{_digest(file)}"
    if not (folder / "config.json").is_file():
        _convert(file, folder)
    return folder


def _cache_root() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nado"
    return Path(os.environ.get("NADO_CACHE", default)) / "gguf"


def _digest(file: Path) -> str:
    """Size, first and last megabyte: enough to tell files apart without reading tens of gigabytes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _convert(file: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise MissingPackageError("gguf", "gguf", "reading GGUF files")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and moved there whole: a killed conversion leaves no half checkpoint.
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        model.save_pretrained(building)
        tokenizer.save_pretrained(building)
        if not folder.exists():
            building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
