"""Makes what other folders of the repository offer importable: stages, training, decoding, recording."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT / "recipes" / "commongen", ROOT / "recipes" / "tiny", ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
