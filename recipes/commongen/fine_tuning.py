"""p: the base with a LoRA adapter that has learned CommonGen's training sentences."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import siblings  # noqa: F401  (finds the modules of the tiny recipe)
import torch
from concept_sets import ConceptSet
from documents import Batch, Documents, Pieces, batches
from learning import Schedule, learn, record_slopes, sparse_loss, total_loss, whole_loss
from progress_log import Clock, Stages
from study_settings import AdapterSettings, BaseSettings
from torch import Tensor

from nado.huggingface import CausalModel, load_model
from nado.storage import digest_file
from nado.warpers import Warpers

_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_DECAY = 0.01


@dataclass(frozen=True)
class Sentences(Documents):
    """Documents of a prompt, a sentence and the end each: always with their own concepts."""

    composed: Tensor  # (N, 3) numbers of pieces

    def stream(
        self, sentences: Tensor, width: int, generator: torch.Generator, *, keyword_share: float = 1.0
    ) -> Batch:
        """The given documents as rows of `width` tokens."""
        return self.pack(self.composed[sentences], width)


def read_sentences(sets: Sequence[ConceptSet], model: CausalModel) -> Sentences:
    """Every target of every set, in the tokens that drawing will read and write."""
    prompts = model.encode([each.prompt.prompt for each in sets])
    texts = model.encode_texts([f" {target}" for each in sets for target in each.targets])
    rows = [*prompts, *texts, [model.eos_id]]
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int32, device=model.device)
    owners = [number for number, each in enumerate(sets) for _ in each.targets]
    owner = torch.tensor(owners, device=model.device)
    text = torch.arange(len(texts), device=model.device) + len(prompts)
    composed = torch.stack([owner, text, torch.full_like(text, len(rows) - 1)], dim=1)
    nothing = torch.zeros(0, dtype=torch.long, device=model.device)
    pieces = Pieces(values, lengths.cumsum(0) - lengths, lengths)
    return Sentences(pieces, [], nothing, nothing, nothing, composed)


def fine_tune(
    clock: Clock,
    base: str,
    train: Sequence[ConceptSet],
    dev: Sequence[ConceptSet],
    folder: Path,
    settings: AdapterSettings,
    *,
    length_limit: int,
) -> dict[str, Any]:
    """Train an adapter, save it in `folder`; returns how it went."""
    device = clock.device
    loaded = load_model(
        base, length_limit=length_limit, dtype=torch.float32, device=device, cuda_graphs=False
    )
    assert isinstance(loaded, CausalModel)
    clock.say("  base loaded")
    documents, held_out = read_sentences(train, loaded), read_sentences(dev, loaded)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # of the adapter's first weights, and of dropout
        torch.manual_seed(settings.seed)
        adapted = add_adapter(loaded.model, settings)
        facts = _learn(clock, adapted.get_base_model(), documents, settings)
    facts["dev_loss"] = mean_loss(adapted.get_base_model(), held_out)
    facts["parameters"] = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    adapted.peft_config["default"].base_model_name_or_path = Path(base).name  # and not where it was converted
    adapted.to(torch.bfloat16).save_pretrained(folder, save_embedding_layers=False)
    return facts


def make_adapter(
    stages: Stages,
    config: dict[str, Any],
    given: Path | None,
    tune: Callable[[Path], dict[str, Any]],
    after: Sequence[str] = (),
) -> Path:
    """The stage of p's adapter, which `tune` trains in a folder, or which is `given`; returns where it is."""

    def work(folder: Path) -> dict[str, Any]:
        if given is None:
            return tune(folder / "adapter")
        shutil.copytree(given, folder / "adapter", dirs_exist_ok=True)
        return {"given": given.name}

    known = {} if given is None else {"given": digest_file(given / "adapter_model.safetensors")}
    return stages.run("adapter", {**config, **known}, after, work) / "adapter"


def add_adapter(model: Any, settings: AdapterSettings) -> Any:
    """The model with an untrained adapter in it, which alone can learn."""
    from peft import LoraConfig, get_peft_model

    model.set_attn_implementation("sdpa")  # drawing's own attention has no backward pass
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        lora_dropout=settings.dropout,
        target_modules=_LAYERS,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _learn(clock: Clock, model: Any, documents: Sentences, settings: AdapterSettings) -> dict[str, Any]:
    device = documents.composed.device
    generator = torch.Generator(device).manual_seed(settings.seed)
    pool = torch.arange(len(documents.composed), device=device)
    in_a_pass = len(documents.stream(pool, settings.width, generator))
    steps = max(1, int(settings.epochs * in_a_pass / settings.rows))
    source = batches(documents, pool, settings.rows, settings.width, generator)
    # What is recorded has one shape in every step: logits of all tokens, also of those that are only read.
    loss = whole_loss if device.type == "cuda" else sparse_loss
    first = next(source)
    slopes = record_slopes(model, lambda batch: loss(model, batch), first, clock.say)
    facts: dict[str, Any] = learn(
        model,
        chain([first], source),
        slopes,
        Schedule(settings.learning_rate, max(1, steps // 20), steps=steps),
        decay=_DECAY,
        report=lambda step, loss: clock.say(f"  {step}/{steps}: {loss:.3f}"),
    )
    return facts


def mean_loss(model: Any, documents: Sentences) -> float:
    """Mean loss a token, the end included, of sentences after their concepts."""
    batch = documents.pad(documents.composed)
    return float(total_loss(model, batch).sum()) / int((batch.labels >= 0).sum())


def load_base(base: str, adapter: Path, settings: BaseSettings, *, device: torch.device) -> CausalModel:
    """p as it is drawn from and guided: the adapter merged into the base, at p's temperature."""
    warpers = Warpers(temperature=settings.temperature)
    limit = settings.length_limit
    dtype = torch.bfloat16 if settings.half else None
    model = load_model(base, adapter=adapter, length_limit=limit, warpers=warpers, device=device, dtype=dtype)
    assert isinstance(model, CausalModel)
    # A converted tokenizer may name another token than the one the model ends its texts with.
    model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(model.eos_id)
    return model
