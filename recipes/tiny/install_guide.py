"""A trained guide as part of the package: weights in half precision, without what only training needs.

python recipes/tiny/install_guide.py STUDY/train src/nado/tiny/keywords
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from nado.storage import write_atomically

_COPIED = ("config.json", "base.json", "oracle.json", "README.md", "training.json")
_WEIGHTS = "model.safetensors"


def install(source: Path, target: Path) -> None:
    """Write the files of a guide's folder that its users need; weights are read as float32 again."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous() for name, value in load_file(source / _WEIGHTS).items()}
    write_atomically(target / _WEIGHTS, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    for name in _COPIED:
        shutil.copyfile(source / name, target / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Install one guide."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the folder `train` of a study")
    parser.add_argument("target", type=Path, help="where the guide is kept in the package")
    options = parser.parse_args(arguments)
    install(options.source, options.target)


if __name__ == "__main__":
    main()
