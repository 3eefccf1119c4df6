"""What vLLM is set to for a guided architecture, and which of its settings a guide cannot go along with."""

from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from nado.errors import InputError
from nado.vllm_plugin import PREFIX
from nado.vllm_plugin.served import GUIDE, Served

_HINT = "Start vLLM without it, or serve the guide with nado serve."


class GuidedSettings(VerifyAndUpdateConfig):  # type: ignore[misc]
    """vLLM's hook for an architecture: called once its settings are read, before anything is loaded."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """What the base's own architecture asks for."""
        own = MODELS_CONFIG_MAP.get(model_config.architecture.removeprefix(PREFIX))
        if own is not None:
            own.verify_and_update_model_config(model_config)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """What the base's own architecture asks for; then requests are read by our own processor."""
        model = vllm_config.model_config
        own = MODELS_CONFIG_MAP.get(model.architecture.removeprefix(PREFIX))
        if own is not None:
            own.verify_and_update_config(vllm_config)
        served = Served.read(getattr(model.hf_config, "nado", None))
        if not (Path(model.model) / GUIDE / "config.json").is_file():
            raise InputError(
                f"a local folder with a guide in {GUIDE}/", f"{model.model}", "Write one: save_for_vllm."
            )
        require_plain(vllm_config)
        reader = f"nado.vllm_plugin.models:{requests_name(served)}"
        model.logits_processors = [*(model.logits_processors or []), reader]


def requests_name(served: Served) -> str:
    """The processor's class for a folder: only its name reaches the process that looks at requests first."""
    conditioned = "" if served.condition is not None else "Conditioned"
    return f"Requests{served.length_limit}{conditioned}{'Unscaled' if served.shape_only else ''}"


def require_plain(vllm_config: Any) -> None:
    """Refuse what would let the guide read something else than it was trained on."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    wrong = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA adapters": vllm_config.lora_config is not None,
        "quantised weights": model.quantization is not None,
        "prompts given as embeddings": bool(model.enable_prompt_embeds),
        "tensor parallelism": parallel.tensor_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "inputs other than text": bool(model.is_multimodal_model),
    }
    for name, found in wrong.items():
        if found:
            raise InputError("a plain base on one device, for a guide in vLLM", name, _HINT)
    if vllm_config.use_v2_model_runner:
        raise InputError(
            "vLLM's first model runner, whose rows are the requests in their order",
            "its second",
            "Set VLLM_USE_V2_MODEL_RUNNER=0.",
        )
