"""A plug-in with which vLLM serves a guided model: `vllm serve FOLDER`, FOLDER written by `save_for_vllm`.

vLLM finds `register` by its entry point in every process it starts, whatever is served there, so that nothing
is imported here before it is needed. A folder's config.json names an architecture, "NadoGuided" before the
base's own name; vLLM then takes its class from `models.py`, which adds the guide to the base's logits.

The guide has to be stateless: light, without progress. All it reads beside the hidden state is the last
token, how many are left, and the condition. A request gives a condition, strength, doubt and
share of plausible tokens of its own (`rows.py`).
"""

import logging

log = logging.getLogger(__name__)

PREFIX = "NadoGuided"  # before the architecture of the base
_HOME = "nado.vllm_plugin.models"


def register() -> None:
    """Tell vLLM of a guided architecture for each of its own; called by vLLM, any number of times.

    Another vLLM than this was written for must not be kept from serving something else.
    """
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from nado.vllm_plugin.settings import GuidedSettings
    except ImportError as error:
        log.warning("guided models cannot be served with this vLLM; nado is written for 0.32 (%s)", error)
        return
    for architecture in list(ModelRegistry.get_supported_archs()):
        if architecture.startswith(PREFIX):
            continue
        guided = PREFIX + architecture
        ModelRegistry.register_model(guided, f"{_HOME}:{guided}")
        MODELS_CONFIG_MAP[guided] = GuidedSettings
