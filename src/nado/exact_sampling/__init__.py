"""Exact sampling on top of any guide: weights, SMC, rejection, verified texts, and what they say about q.

    weighted = draw_weighted(model, prompts, conditions, oracle, count=256)
    print(diagnose(weighted))                        # ESS, R(x), KL(q*‖q), KL(q‖p), with intervals
    texts = resample(weighted).texts                 # about q*: importance resampling
    texts = reject(weighted, bound=2.0).texts        # q* itself where no weight exceeds the bound

    runs = smc(model, prompts, conditions, oracle, particles=64)
    texts = resample(runs.particles).texts

    for each in verified(model, prompts, conditions, oracle, budget=16):
        print(each.text if each.status == "verified" else each.partial)

`model` is a `GuidedLanguageModel`. Whatever its guide has learned, w = p·C / q is right: a bad guide costs
effective samples, not exactness. Everything is a pure function of its arguments and the seed.
"""

from nado.exact_sampling.diagnostics import Diagnostics, diagnose
from nado.exact_sampling.particles import ParticleRuns, smc
from nado.exact_sampling.rejection import Rejection, reject
from nado.exact_sampling.verification import Partial, Verified, verified
from nado.exact_sampling.weighted import Chosen, WeightedTexts, draw_weighted, resample

__all__ = [
    "Chosen",
    "Diagnostics",
    "Partial",
    "ParticleRuns",
    "Rejection",
    "Verified",
    "WeightedTexts",
    "diagnose",
    "draw_weighted",
    "reject",
    "resample",
    "smc",
    "verified",
]
