"""The base: a small `MarianMTModel` of our own, how it is trained and what it translates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import neighbours  # noqa: F401  (finds the training loop of the tiny recipe)
import torch
from learning import FusedSlopes, Schedule, Slopes, half, learn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerFast
from vocabulary import END_ID, PAD_ID, UNKNOWN_ID, save_tokenizer

from nado.huggingface import EncoderDecoderModel

SHARD = "15MB"
_IGNORED = -100
_IMPOSSIBLE = -1e4  # a logit whose probability is 0 in any arithmetic, and that float16 can hold
_POSITIONS = 512  # tokens that either side may have: sinusoids cost nothing, and a test source has 372


@dataclass(frozen=True)
class TranslatorSettings:
    """The shape of the base and how it is trained."""

    size: int = 384
    encoder_layers: int = 6
    decoder_layers: int = 4
    heads: int = 6
    feed_forward: int = 1536
    dropout: float = 0.2
    label_smoothing: float = 0.1
    spread: float = 0.4  # of the layers' first weights, times size^-1/2: what a layer adds must begin small
    rate: float = 1e-3
    warm_up: int = 1000
    decay: float = 0.01
    tokens: int = 32_768  # of the longer side of a batch, padding included
    seconds: float = 330.0
    steps: int = 0  # train this many instead
    seed: int = 0


class Batch(NamedTuple):
    """Pairs of about equal length, padded on the right."""

    tokens: Tensor  # (B, S) Spanish
    mask: Tensor  # (B, S)
    inputs: Tensor  # (B, T) what the decoder reads: the start, then English
    labels: Tensor  # (B, T) English and its end


class Pairs:
    """All pairs as tokens on one device, and batches of them that are made there."""

    def __init__(self, sides: Sequence[Sequence[Sequence[int]]], device: torch.device) -> None:
        """`sides` are the Spanish and the English tokens, ends included."""
        self.device = device
        self.lengths = [torch.tensor([len(row) for row in side]) for side in sides]
        self._starts = [(lengths.cumsum(0) - lengths).to(device) for lengths in self.lengths]
        self._values = [
            torch.tensor([token for row in side for token in row], dtype=torch.int32, device=device)
            for side in sides
        ]

    def __len__(self) -> int:
        return len(self.lengths[0])

    def batches(self, most: int, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of at most `most` tokens a side, for ever; other ones in every pass."""
        longest = torch.maximum(*self.lengths)
        while True:
            # Pairs of near-equal length meet, but not always the same ones.
            noise = torch.rand(len(self), generator=generator)
            order = (longest + 2 * noise + self.lengths[0] / 1000).argsort()
            cuts = _cut(longest[order], most)
            for place in torch.randperm(len(cuts), generator=generator).tolist():
                yield self.batch(order[cuts[place]])

    def batch(self, rows: Tensor) -> Batch:
        """The given pairs."""
        spanish, english = (self._pad(side, rows) for side in (0, 1))
        inputs = torch.nn.functional.pad(english[:, :-1], (1, 0), value=PAD_ID)
        return Batch(
            spanish,
            (spanish != PAD_ID).long(),
            inputs,
            english.masked_fill(english == PAD_ID, _IGNORED),
        )

    def _pad(self, side: int, rows: Tensor) -> Tensor:
        lengths = self.lengths[side][rows].to(self.device)
        steps = torch.arange(int(self.lengths[side][rows].max()), device=self.device)
        inside = steps[None, :] < lengths[:, None]
        places = self._starts[side][rows.to(self.device)][:, None] + steps[None, :]
        values = self._values[side][places.clamp(max=len(self._values[side]) - 1)]
        return values.masked_fill(~inside, PAD_ID).long()  # (B, T)


def _cut(lengths: Tensor, most: int) -> list[slice]:
    """Slices of rows in order of length, none of more than `most` tokens with its padding."""
    cuts, first = [], 0
    while first < len(lengths):
        # Lengths rise, but for the noise they were sorted with: the last of a slice is nearly its longest.
        count = max(1, most // int(lengths[first]))
        while count > 1 and int(lengths[first : first + count].max()) * count > most:
            count = max(1, most // int(lengths[first : first + count].max()))
        cuts.append(slice(first, min(first + count, len(lengths))))
        first += count
    return cuts


def build_translator(settings: TranslatorSettings, vocabulary: int) -> MarianMTModel:
    """An untrained model, the same for the same settings."""
    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=settings.size,
        encoder_layers=settings.encoder_layers,
        decoder_layers=settings.decoder_layers,
        encoder_attention_heads=settings.heads,
        decoder_attention_heads=settings.heads,
        encoder_ffn_dim=settings.feed_forward,
        decoder_ffn_dim=settings.feed_forward,
        dropout=settings.dropout,
        attention_dropout=settings.dropout / 3,
        activation_dropout=settings.dropout / 3,
        activation_function="gelu",
        max_position_embeddings=_POSITIONS,
        scale_embedding=True,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        bos_token_id=None,
        decoder_start_token_id=PAD_ID,
        forced_eos_token_id=None,
        init_std=settings.spread * settings.size**-0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        model = MarianMTModel(config)
        embeddings = model.get_input_embeddings().weight
        torch.nn.init.normal_(embeddings, std=settings.size**-0.5)  # as large as positions, when scaled
    model.generation_config = GenerationConfig(
        eos_token_id=END_ID, pad_token_id=PAD_ID, decoder_start_token_id=PAD_ID
    )
    return model


def train_translator(
    model: Any,
    pairs: Pairs,
    settings: TranslatorSettings,
    *,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Train the model in place, for a number of steps or of seconds."""

    def loss_by(runs: Any) -> Callable[[Any], Tensor]:
        return lambda batch: cross_entropy(
            _logits(runs, batch).flatten(0, 1).float(),  # (B·T, V)
            batch.labels.flatten(),
            ignore_index=_IGNORED,
            label_smoothing=settings.label_smoothing,
        )

    def report(step: int, loss: float) -> None:
        say(f"  {step}: {loss:.3f}")

    schedule = Schedule(settings.rate, settings.warm_up, steps=settings.steps, seconds=seconds)
    source: Any = pairs.batches(settings.tokens, torch.Generator().manual_seed(settings.seed))
    cuda = [pairs.device] if pairs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # of dropout
        torch.manual_seed(settings.seed)
        slopes = FusedSlopes(model, loss_by, say) if cuda else Slopes(model, loss_by(model))
        return learn(model, source, slopes, schedule, decay=settings.decay, report=report)


@torch.no_grad()
def mean_loss(model: Any, pairs: Pairs, tokens: int) -> float:
    """Mean loss a token of pairs, without smoothing: what says whether more training would help."""
    total, count, seen = 0.0, 0, 0
    source = pairs.batches(tokens, torch.Generator().manual_seed(0))
    while seen < len(pairs):
        batch = next(source)
        seen += len(batch.tokens)
        with half(batch.tokens.device):
            logits = _logits(model, batch)
        labels = batch.labels.flatten()
        total += float(
            cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=_IGNORED, reduction="sum")
        )
        count += int((labels != _IGNORED).sum())
    return total / max(1, count)


def _logits(model: Any, batch: Any) -> Tensor:
    """(B, T, V)."""
    output = model(
        input_ids=batch.tokens, attention_mask=batch.mask, decoder_input_ids=batch.inputs, use_cache=False
    )
    return torch.as_tensor(output.logits)


def save_translator(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A plain Hugging Face folder in float16; padding and unknown pieces can never be written."""
    with torch.no_grad():
        model.final_logits_bias[:, [PAD_ID, UNKNOWN_ID]] = _IMPOSSIBLE
    model.half().save_pretrained(folder, max_shard_size=SHARD)
    save_tokenizer(tokenizer, folder)


@torch.no_grad()
def translate(
    model: EncoderDecoderModel, sources: Sequence[str], *, beams: int = 1, batch: int = 1024
) -> dict[str, str]:
    """What the base alone makes of each different source: its own `generate`."""
    distinct = sorted(dict.fromkeys(sources), key=lambda source: (len(source.split()), source))
    found: dict[str, str] = {}
    for first in range(0, len(distinct), batch):
        some = distinct[first : first + batch]
        rows = model.encode(some)
        width = max(map(len, rows))
        ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows], device=model.device)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        written = model.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=(torch.arange(width, device=model.device)[None, :] < lengths[:, None]).long(),
            max_new_tokens=model.length_limit,
            do_sample=False,
            num_beams=beams,
        )
        found |= zip(some, model.decode(written[:, 1:].tolist()), strict=True)
    return found
