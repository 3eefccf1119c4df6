"""A trained guide of any size as a few files of at most 15 MiB: float16, packed, cut into pieces.

python recipes/commongen/collect_guide.py --work WORK --guide main --output OUT
cat OUT/guide-main.tar.* | tar x          # puts it together again, wherever OUT has gone
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_commongen import pack

from nado.guide import Guide

_PIECE = 15 * 2**20


def collect(folder: Path, output: Path) -> list[Path]:
    """The guide in `folder` as pieces in `output`, named after the folder that holds it."""
    name = folder.parent.name
    with tempfile.TemporaryDirectory() as place:
        smaller = Path(place) / "guide"
        guide: Any = Guide.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        guide.half().save_pretrained(smaller)
        for each in folder.iterdir():
            if each.is_file() and not each.name.startswith(("model", "config")):
                shutil.copyfile(each, smaller / each.name)
        archive = Path(place) / f"{name}.tar"
        pack(smaller, archive)
        content = archive.read_bytes()
    output.mkdir(parents=True, exist_ok=True)
    pieces = []
    for number, at in enumerate(range(0, len(content), _PIECE)):
        pieces.append(output / f"{name}.tar.{number:02d}")
        pieces[-1].write_bytes(content[at : at + _PIECE])
    return pieces


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect one guide."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="--work of run_commongen.py")
    parser.add_argument("--guide", default="main", help="its name in the settings")
    parser.add_argument("--output", type=Path, required=True, help="where the pieces go")
    options = parser.parse_args(arguments)
    for piece in collect(options.work / f"guide-{options.guide}" / "guide", options.output):
        print(f"{piece.name}: {piece.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
