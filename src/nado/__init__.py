"""nado: steer language models by any yes/no question about the finished text."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names and the modules that hold them. They are imported when first used, so that `import nado`
# costs nothing and a machine without transformers' extras can still read samples or ask oracles.
_HOMES = {
    "CausalModel": "nado.huggingface",
    "Dial": "nado.dial",
    "EncoderDecoderModel": "nado.huggingface",
    "Guidance": "nado.guidance",
    "Guide": "nado.guide",
    "GuideConfig": "nado.guide",
    "GuidedLanguageModel": "nado.guided_language_model",
    "GuidedModel": "nado.guided",
    "HuggingFaceReader": "nado.huggingface.reading",
    "LanguageModel": "nado.language_model",
    "NadoError": "nado.errors",
    "Oracle": "nado.oracles",
    "Prompt": "nado.prompts",
    "Proposal": "nado.proposals",
    "RoundsConfig": "nado.rounds",
    "Samples": "nado.samples",
    "TabularModel": "nado.exact",
    "TrainingConfig": "nado.training",
    "TrainingData": "nado.training_data",
    "Warpers": "nado.warpers",
    "audit": "nado.oracles",
    "curriculum": "nado.rounds",
    "diagnose": "nado.exact_sampling",
    "draw": "nado.drawing",
    "draw_dialled": "nado.dial",
    "draw_weighted": "nado.exact_sampling",
    "guided_mixture": "nado.proposals",
    "import_samples": "nado.importing",
    "label_samples": "nado.sample_labels",
    "load": "nado.study.guides",
    "load_guide": "nado.guide_files",
    "load_model": "nado.huggingface",
    "load_oracle": "nado.oracles",
    "measure_dial": "nado.dial",
    "measure_stop": "nado.dial",
    "oracle": "nado.oracles",
    "progress_bar": "nado.progress",
    "read_prompts": "nado.prompts",
    "read_samples": "nado.samples",
    "reject": "nado.exact_sampling",
    "resample": "nado.exact_sampling",
    "save_guide": "nado.guide_files",
    "search_beams": "nado.beam_search",
    "smc": "nado.exact_sampling",
    "split_by_prompt": "nado.training_data",
    "tempered": "nado.proposals",
    "train": "nado.training",
    "train_in_rounds": "nado.rounds",
    "training_bar": "nado.trackers",
    "verified": "nado.exact_sampling",
}

__all__ = [
    "CausalModel",
    "Dial",
    "EncoderDecoderModel",
    "Guidance",
    "Guide",
    "GuideConfig",
    "GuidedLanguageModel",
    "GuidedModel",
    "HuggingFaceReader",
    "LanguageModel",
    "NadoError",
    "Oracle",
    "Prompt",
    "Proposal",
    "RoundsConfig",
    "Samples",
    "TabularModel",
    "TrainingConfig",
    "TrainingData",
    "Warpers",
    "__version__",
    "audit",
    "curriculum",
    "diagnose",
    "draw",
    "draw_dialled",
    "draw_weighted",
    "guided_mixture",
    "import_samples",
    "label_samples",
    "load",
    "load_guide",
    "load_model",
    "load_oracle",
    "measure_dial",
    "measure_stop",
    "oracle",
    "progress_bar",
    "read_prompts",
    "read_samples",
    "reject",
    "resample",
    "save_guide",
    "search_beams",
    "smc",
    "split_by_prompt",
    "tempered",
    "train",
    "train_in_rounds",
    "training_bar",
    "verified",
]

if TYPE_CHECKING:
    from nado.beam_search import search_beams
    from nado.dial import Dial, draw_dialled, measure_dial, measure_stop
    from nado.drawing import draw
    from nado.errors import NadoError
    from nado.exact import TabularModel
    from nado.exact_sampling import diagnose, draw_weighted, reject, resample, smc, verified
    from nado.guidance import Guidance
    from nado.guide import Guide, GuideConfig
    from nado.guide_files import load_guide, save_guide
    from nado.guided import GuidedModel
    from nado.guided_language_model import GuidedLanguageModel
    from nado.huggingface import CausalModel, EncoderDecoderModel, load_model
    from nado.huggingface.reading import HuggingFaceReader
    from nado.importing import import_samples
    from nado.language_model import LanguageModel
    from nado.oracles import Oracle, audit, load_oracle, oracle
    from nado.progress import progress_bar
    from nado.prompts import Prompt, read_prompts
    from nado.proposals import Proposal, guided_mixture, tempered
    from nado.rounds import RoundsConfig, curriculum, train_in_rounds
    from nado.sample_labels import label_samples
    from nado.samples import Samples, read_samples
    from nado.study.guides import load
    from nado.trackers import training_bar
    from nado.training import TrainingConfig, train
    from nado.training_data import TrainingData, split_by_prompt
    from nado.warpers import Warpers


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nado' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
