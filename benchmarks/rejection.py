"""Base tokens for a satisfying text where p seldom writes one: guided, by rejection, and by the best of n.

The embedded base and its guide for a positive sentiment, on prompts the guide has not seen (concept sets of
CommonGen's dev part) and for which p seldom satisfies the oracle. They are chosen by draws that are not
used again; then p and q write anew, exact end off. The best of n is given as many draws of p as it needs to
satisfy the oracle as often as q does.

    python benchmarks/rejection.py [--prompts FILE.jsonl] [--guide positive]
"""

import argparse
import json
import sys
import tempfile
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nado.prompts import read_prompts
from nado.samples import Samples, read_samples
from nado.study.guides import use_guide
from nado.study.materials import fill
from nado.tiny import locate_guide
from recording import record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes" / "commongen"))

from drawn_texts import draw_labelled, rates  # noqa: E402
from sampling_costs import compare_with_rejection  # noqa: E402
from study_settings import CostSettings  # noqa: E402


def main() -> None:
    options = parse()
    used = use_guide(locate_guide(options.guide))
    assert used.oracle is not None
    prompts = fill(read_prompts(options.prompts, options.split), used.template)[: options.most]
    settings = CostSettings(rare_samples=options.samples, batch=options.batch)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first = draw_labelled(
            used.base,
            prompts,
            place / "first",
            used.oracle,
            samples=options.samples,
            seed=0,
            batch=options.batch,
        )
        found = rates(first, options.samples)
        low, high = options.rare
        rare = [prompt for prompt, rate in zip(prompts, found, strict=True) if low <= rate <= high]
        costs = compare_with_rejection(used.base, used.guide, used.oracle, rare, place, settings)
        costs["best_of_n"] = best_of_n(read_samples(place / "p"), read_samples(place / "q"), options.samples)
    metrics = {
        "base_tokens_ratio_vs_rejection": costs["ratio"]["value"],
        "rejection_embedded": {"guide": options.guide, "chosen_from": len(prompts), **costs},
    }
    print(json.dumps(metrics, indent=2))
    record("overhead", metrics, output=options.output)


def best_of_n(p: Samples, q: Samples, per_prompt: int) -> dict[str, Any]:
    """The smallest n whose best draw of p satisfies the oracle as often as a draw of q, and what it costs."""
    wanted = float(q.array("satisfied").mean())
    hits = p.array("satisfied").reshape(-1, per_prompt).sum(axis=1)
    found = [success_of_best(hits, per_prompt, n) for n in range(1, per_prompt + 1)]
    enough = next((n for n, rate in enumerate(found, start=1) if rate >= wanted), None)
    lengths = {
        name: float(np.diff(each.ragged("tokens").offsets).mean()) for name, each in (("p", p), ("q", q))
    }
    ratio = None if enough is None else enough * lengths["p"] / lengths["q"]
    return {"q_satisfied": wanted, "n": enough, "base_tokens_ratio": ratio}


def success_of_best(hits: NDArray[np.int64], drawn: int, n: int) -> float:
    """How often one of n draws is a hit, of prompts with so many hits among `drawn`; none is used twice."""
    missed = [comb(drawn - int(each), n) / comb(drawn, n) for each in hits]
    return 1 - sum(missed) / len(missed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ROOT / "recipes" / "tiny" / "comparison_prompts.jsonl"
    parser.add_argument("--prompts", type=Path, default=default, help="keyword sets, a record each")
    parser.add_argument("--split", default="dev", help="of these prompts")
    parser.add_argument("--guide", default="positive", help="an embedded guide, or the folder of another")
    parser.add_argument("--most", type=int, default=400, help="prompts that are tried")
    parser.add_argument("--samples", type=int, default=64, help="draws a prompt, each time")
    parser.add_argument(
        "--rare", type=float, nargs=2, default=(0.01, 0.08), help="share of p's first draws that satisfy"
    )
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
