"""Makes what other folders of the repository offer importable: training, studies in rounds, recording."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT / "recipes" / "tiny", ROOT / "recipes" / "keywords_in_order", ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
