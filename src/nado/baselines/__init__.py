"""Baselines: what a user would have done without a guide, each behind the interface that q has.

    given = Provisions(base, oracle, budget=96.0, text_length=12.0, samples=samples)
    system = METHODS["best-of-n"].prepare(given, {"n": 8, "among_equals": "first"})
    texts = system.write(prompts, seed=0)             # one text a prompt, and what it took

Each is written from its paper, which its file names. `nado compare` runs all of them on the same prompts,
seeds and budget; `docs/comparing.md` says what is fair about that and what is not.
"""

from nado.baselines.beam import Beam
from nado.baselines.best_of_n import BestOfN
from nado.baselines.class_ratio import ClassRatio, RatioModel
from nado.baselines.exact_end import BaseExactEnd, BeamExactEnd
from nado.baselines.fine_tuning import FineTuning
from nado.baselines.fudge import Fudge, FudgeFollower
from nado.baselines.greedy import Greedy
from nado.baselines.keyword_boosting import KeywordBoosting
from nado.baselines.lora import LowRankTuning
from nado.baselines.method import Method, Provisions, Row, Sampled, System, Texts, Training
from nado.baselines.neurologic import NeuroLogic
from nado.baselines.rejection import Rejection
from nado.baselines.sampling import BaseSampling
from nado.baselines.smc import OracleParticles

# The name of each on the command line and in folders.
METHODS: dict[str, Method] = {
    "base": BaseSampling(),
    "base-exact-end": BaseExactEnd(),
    "greedy": Greedy(),
    "beam": Beam(),
    "beam-exact-end": BeamExactEnd(),
    "best-of-n": BestOfN(),
    "rejection": Rejection(),
    "fine-tuning": FineTuning(),
    "lora": LowRankTuning(),
    "fudge": Fudge(),
    "class-ratio": ClassRatio(),
    "keyword-boosting": KeywordBoosting(),
    "neurologic": NeuroLogic(),
    "smc": OracleParticles(),
}

__all__ = [
    "METHODS",
    "BaseExactEnd",
    "BaseSampling",
    "Beam",
    "BeamExactEnd",
    "BestOfN",
    "ClassRatio",
    "FineTuning",
    "Fudge",
    "FudgeFollower",
    "Greedy",
    "KeywordBoosting",
    "LowRankTuning",
    "Method",
    "NeuroLogic",
    "OracleParticles",
    "Provisions",
    "RatioModel",
    "Rejection",
    "Row",
    "Sampled",
    "System",
    "Texts",
    "Training",
]
