"""Makes what other folders of the repository offer importable: stages, guides, settings, recording."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_RECIPES = ROOT / "recipes"

for folder in (
    _RECIPES / "keywords_in_order",
    _RECIPES / "commongen",
    _RECIPES / "tiny",
    ROOT / "benchmarks",
):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
