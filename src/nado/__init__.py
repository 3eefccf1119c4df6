"""nado: steer language models by any yes/no question about the finished text."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names and the modules that hold them. They are imported when first used, so that `import nado`
# costs nothing and a machine without transformers' extras can still read samples or ask oracles.
_HOMES = {
    "CausalModel": "nado.huggingface",
    "EncoderDecoderModel": "nado.huggingface",
    "LanguageModel": "nado.language_model",
    "NadoError": "nado.errors",
    "Oracle": "nado.oracles",
    "Prompt": "nado.prompts",
    "Proposal": "nado.proposals",
    "Samples": "nado.samples",
    "TabularModel": "nado.exact",
    "Warpers": "nado.warpers",
    "audit": "nado.oracles",
    "draw": "nado.drawing",
    "guided_mixture": "nado.proposals",
    "import_samples": "nado.importing",
    "label_samples": "nado.sample_labels",
    "load_model": "nado.huggingface",
    "load_oracle": "nado.oracles",
    "oracle": "nado.oracles",
    "progress_bar": "nado.progress",
    "read_prompts": "nado.prompts",
    "read_samples": "nado.samples",
    "tempered": "nado.proposals",
}

__all__ = [
    "CausalModel",
    "EncoderDecoderModel",
    "LanguageModel",
    "NadoError",
    "Oracle",
    "Prompt",
    "Proposal",
    "Samples",
    "TabularModel",
    "Warpers",
    "__version__",
    "audit",
    "draw",
    "guided_mixture",
    "import_samples",
    "label_samples",
    "load_model",
    "load_oracle",
    "oracle",
    "progress_bar",
    "read_prompts",
    "read_samples",
    "tempered",
]

if TYPE_CHECKING:
    from nado.drawing import draw
    from nado.errors import NadoError
    from nado.exact import TabularModel
    from nado.huggingface import CausalModel, EncoderDecoderModel, load_model
    from nado.importing import import_samples
    from nado.language_model import LanguageModel
    from nado.oracles import Oracle, audit, load_oracle, oracle
    from nado.progress import progress_bar
    from nado.prompts import Prompt, read_prompts
    from nado.proposals import Proposal, guided_mixture, tempered
    from nado.sample_labels import label_samples
    from nado.samples import Samples, read_samples
    from nado.warpers import Warpers


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nado' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
