"""A folder as a few files of at most 15 MiB, for machines that hand back no more."""

import io
import tarfile
from pathlib import Path

from nado.storage import write_bytes

PIECE = 15 * 2**20


def pack_in_pieces(folder: Path, output: Path, name: str) -> list[Path]:
    """The folder's files as `output/name.tar.00` and so on; `cat name.tar.* | tar x` gives `name` back."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for each in sorted(path for path in folder.iterdir() if path.is_file()):
            archive.add(each, arcname=f"{name}/{each.name}")
    content, pieces = packed.getvalue(), []
    for number, at in enumerate(range(0, len(content), PIECE)):
        pieces.append(output / f"{name}.tar.{number:02d}")
        write_bytes(pieces[-1], content[at : at + PIECE])
    return pieces
