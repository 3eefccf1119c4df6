"""The embedded base language model: fine-tune a teacher, draw from it, train the tiny model, measure.

    python recipes/tiny/train_base.py --teacher smollm2.gguf --prepared local/tiny --work WORK --output OUT

Each stage leaves its result in WORK and is not done again when the command is repeated with the same
settings. On one GPU with the defaults it takes about eight minutes; `--deadline` shortens the last training
so that all of it ends in time.
"""

import argparse
import gzip
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from card import write_card
from distillation import keep_good, keys_of, prompt_words
from documents import Batch, Documents, Words, batches, read_documents
from learning import Loss, Schedule, Slopes, learn, sparse_loss, total_loss, whole_loss
from measuring import measure
from sentences import Sentence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from nado.drawing import draw_rows
from nado.huggingface import CausalModel, load_model
from nado.prompts import Prompt
from nado.proposals import Proposal
from nado.samples import Samples
from nado.storage import digest_file, digest_json, read_json, write_atomically, write_json
from nado.versions import versions
from nado.warpers import Warpers

LENGTH_LIMIT = 32  # tokens of a drawn sentence, the end included
RESERVED = 45.0  # seconds kept before the deadline for measuring and saving
RANDOM = "random"  # a teacher that knows nothing, to try the whole path out


@dataclass(frozen=True)
class Settings:
    """Everything a result depends on beside the data."""

    teacher: str = field(metadata={"help": f'GGUF file or folder of the teacher; "{RANDOM}" to try it out'})
    epochs: float = field(default=3.0, metadata={"help": "passes of the teacher over the sentences"})
    teacher_rate: float = field(default=3e-4, metadata={"help": "the teacher's highest learning rate"})
    teacher_rows: int = field(default=32, metadata={"help": "rows in a batch of the teacher"})
    draws: int = field(default=1_500_000, metadata={"help": "sentences drawn from the teacher, at most"})
    draw_seconds: float = field(default=120.0, metadata={"help": "no more are drawn after this time"})
    draw_batch: int = field(default=8192, metadata={"help": "rows drawn side by side"})
    part: int = field(default=1 << 18, metadata={"help": "sentences drawn and saved at a time"})
    per_prompt: int = field(default=4, metadata={"help": "sentences drawn for a prompt"})
    temperature: float = field(
        default=0.9, metadata={"help": "of drawing: below 1 fewer slips, less variety"}
    )
    drop_unlikely: float = field(default=0.05, metadata={"help": "share dropped for a low mean log p"})
    hidden: int = field(default=256, metadata={"help": "width of the tiny model"})
    layers: int = field(default=6, metadata={"help": "its layers"})
    heads: int = field(default=8, metadata={"help": "its attention heads; half as many for keys and values"})
    intermediate: int = field(default=512, metadata={"help": "width inside its layers"})
    rate: float = field(default=3e-3, metadata={"help": "its highest learning rate"})
    rows: int = field(default=256, metadata={"help": "rows in a batch"})
    width: int = field(default=256, metadata={"help": "tokens in a row, of several documents"})
    seconds: float = field(default=240.0, metadata={"help": "how long it is trained"})
    steps: int = field(default=0, metadata={"help": "train this many steps instead"})
    real_repeats: int = field(default=2, metadata={"help": "how often a real sentence comes in a pass"})
    seed: int = field(default=0, metadata={"help": "of everything that is drawn"})


class Run:
    """One call of the script: settings, folders, device, and a clock that says where the time went."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.perf_counter()
        names = Settings.__dataclass_fields__
        self.settings = Settings(**{name: getattr(options, name) for name in names})
        self.prepared, self.work, self.output = options.prepared, options.work, options.output
        self.deadline = options.deadline
        self.compiled = not options.no_compile and torch.cuda.is_available()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.work.mkdir(parents=True, exist_ok=True)
        tables = read_json(self.prepared / "words.json")
        self.words = Words(tables["lemmas"], tables["names"])
        self.forms: dict[str, list[str]] = tables["forms"]
        self.train, self.valid = (
            read_sentences(self.prepared / f"{name}.jsonl.gz") for name in ("train", "valid")
        )
        files = sorted(path for path in self.prepared.rglob("*") if path.is_file())
        self.data_digest = digest_json([digest_file(path) for path in files])
        self.facts: dict[str, Any] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def stage(self, name: str, used: Iterable[str], work: Callable[[Path], dict[str, Any]]) -> Path:
        """The folder of a stage, made by `work` unless it is there already, from these settings and data."""
        folder: Path = self.work / name
        values = asdict(self.settings)
        settings = {"data": self.data_digest, **{key: values[key] for key in used}}
        marker = folder / "done.json"
        if marker.is_file() and read_json(marker)["settings"] == settings:
            self.facts[name] = read_json(marker)["facts"]
            self.say(f"{name}: done before")
            return folder
        self.say(f"{name}: begins")
        marker.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        torch.compiler.reset()  # what earlier stages compiled is of no use to this one
        before = self.elapsed
        facts = {**work(folder), "stage_seconds": round(self.elapsed - before, 1)}
        write_json(marker, {"settings": settings, "facts": facts})
        self.facts[name] = facts
        self.say(f"{name}: {json.dumps(facts)}")
        return folder

    def generator(self, stage: int) -> torch.Generator:
        """Random numbers of one stage, whatever the others used."""
        return torch.Generator(self.device).manual_seed(1000 * self.settings.seed + stage)


def main(arguments: Sequence[str] | None = None) -> None:
    """All stages, one after the other."""
    run = Run(_parse(arguments))
    run.say(f"{len(run.train)} sentences, {len(run.valid)} held out, {run.device}")
    of_teacher = ["teacher", "epochs", "teacher_rate", "teacher_rows", "width", "seed"]
    of_drawing = [*of_teacher, "draws", "draw_seconds", "draw_batch", "part", "per_prompt", "temperature"]
    teacher = run.stage("teacher", of_teacher, lambda folder: fine_tune(run, folder))
    distilled = run.stage(
        "distilled", [*of_drawing, "drop_unlikely"], lambda folder: distil(run, teacher, folder)
    )
    everything = list(Settings.__dataclass_fields__)
    tiny = run.stage("tiny", everything, lambda folder: train_tiny(run, distilled, folder))
    finish(run, teacher, distilled, tiny)
    run.say("done")


# --- stages -------------------------------------------------------------------------------------------


def fine_tune(run: Run, folder: Path) -> dict[str, Any]:
    """Teach the teacher the sentences, after keywords and by themselves."""
    settings = run.settings
    model, tokenizer = open_teacher(run)
    run.say("teacher: loaded")
    documents = read_documents(run.train, tokenizer, run.words, run.device)
    pool = torch.arange(len(documents), device=run.device)
    generator = run.generator(1)
    in_a_pass = len(documents.stream(pool, settings.width, generator))
    steps = max(1, int(settings.epochs * in_a_pass / settings.teacher_rows))
    schedule = Schedule(settings.teacher_rate, max(1, steps // 20), steps=steps)
    source = batches(documents, pool, settings.teacher_rows, settings.width, generator)
    loss_of = with_compiled_layers(run, model, next(source)) if run.compiled else plain(model, sparse_loss)
    facts = learn(
        model,
        source,
        Slopes(model, loss_of),
        schedule,
        decay=0.01,
        report=lambda step, loss: run.say(f"  {step}/{steps} {loss:.3f}"),
    )
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    save_whole(folder, model.to(torch.bfloat16), tokenizer)
    return facts


def distil(run: Run, teacher: Path, folder: Path) -> dict[str, Any]:
    """Draw from the teacher part by part, each saved when it is done, then keep the good ones."""
    settings = run.settings
    parts = (
        folder / digest_json([run.facts["teacher"], settings.temperature, settings.part, run.data_digest])[:8]
    )
    model = load_teacher(run, teacher, temperature=settings.temperature, compiled=run.compiled)
    documents = read_documents(run.train, model.tokenizer, run.words, run.device)
    words = prompt_words(documents, -(-settings.draws // settings.per_prompt), run.generator(2))
    prompts = [Prompt(prompt, prompt[:-2].replace(" ", ", ")) for prompt in documents.prompts(words)]
    began, tokens = time.perf_counter(), 0
    for first in range(0, settings.draws, settings.part):
        path = parts / f"part-{first // settings.part:04d}.parquet"
        if not path.is_file():
            if time.perf_counter() - began > settings.draw_seconds:
                break
            rows = range(first, min(first + settings.part, settings.draws))
            table, count = draw_part(model, prompts, rows, settings)
            require_endings(table)
            write_table(path, table)
            tokens += count
        run.say(f"  {path.name}: {tokens / (time.perf_counter() - began):,.0f} tokens/s")
    drawn = pa.concat_tables(pq.read_table(path) for path in sorted(parts.glob("part-*.parquet")))
    known = keys_of(pa.array([each.text for each in [*run.train, *run.valid]]))
    kept, left = keep_good(drawn, known, run.words.names, drop_unlikely=settings.drop_unlikely)
    write_table(folder / "kept.parquet", pa.table({"text": kept}))
    shown = drawn["text"].slice(0, 50).to_pylist()
    return {"left": left, "prompts": len(prompts), "first_drawn": [text.strip() for text in shown]}


def require_endings(table: pa.Table) -> None:
    """Stop before minutes are spent on texts that no filter will let through."""
    ended = float(np.mean(table["finished"].to_numpy()))
    if ended < 0.5:
        raise SystemExit(
            f"only {ended:.1%} of the teacher's sentences end: it was taught another end token than it is "
            f"asked for. The first one: {table['text'][0].as_py()!r}"
        )


def draw_part(
    model: CausalModel, prompts: list[Prompt], rows: range, settings: Settings
) -> tuple[pa.Table, int]:
    """Texts with what the filters look at, and how many tokens they have."""
    asked = [prompts[row // settings.per_prompt] for row in rows]
    table = draw_rows(
        model, asked, rows, proposal=Proposal(), seed=settings.seed, batch_size=settings.draw_batch
    )
    log_p = Samples(table).ragged("log_p")
    mean = log_p.sums() / np.maximum(1, np.diff(log_p.offsets))
    return pa.table({"text": table["text"], "finished": table["finished"], "log_p": mean}), len(log_p.values)


def train_tiny(run: Run, distilled: Path, folder: Path) -> dict[str, Any]:
    """Train the small model on real and drawn sentences."""
    settings = run.settings
    tokenizer = AutoTokenizer.from_pretrained(run.prepared / "tokenizer")
    texts = pq.read_table(distilled / "kept.parquet")["text"].to_pylist()
    sentences = [*run.train, *(Sentence(text, "drawn") for text in texts)]
    documents = read_documents(sentences, tokenizer, run.words, run.device)
    run.say(
        f"  {len(sentences)} sentences of {int(documents.pieces.length[-len(sentences) :].sum()):,} tokens"
    )
    model: Any = make_tiny(settings, tokenizer)
    model.to(run.device)
    real = torch.arange(len(run.train), device=run.device)
    drawn = torch.arange(len(run.train), len(sentences), device=run.device)
    pool = torch.cat([real.repeat(settings.real_repeats), drawn])
    source = batches(documents, pool, settings.rows, settings.width, run.generator(3))
    held_out = read_documents(run.valid, tokenizer, run.words, run.device)
    loss_of = compiled_loss(run, model, next(source)) if run.compiled else plain(model, whole_loss)
    warm_up = min(200, settings.steps // 10 + 1) if settings.steps else 200
    schedule = Schedule(settings.rate, warm_up, steps=settings.steps, seconds=training_time(run))
    losses: list[tuple[int, float, float]] = []

    def report(step: int, loss: float) -> None:
        if (
            step == 1
            or schedule.done
            or (schedule.steps and step % max(200, schedule.steps // 8 // 200 * 200) == 0)
        ):
            losses.append((step, loss, held_out_loss(model, held_out)))
            run.say(f"  {step}/{schedule.steps}: {loss:.3f}, held out {losses[-1][2]:.3f}")

    facts = learn(model, source, Slopes(model, loss_of), schedule, decay=0.1, report=report)
    save_whole(folder, model, tokenizer)
    speed = facts["tokens"] / max(facts["seconds"], 1e-9)
    parameters = sum(each.numel() for each in model.parameters())
    return {
        **facts,
        "tokens_per_s": speed,
        "parameters": parameters,
        "sentences": len(sentences),
        "losses": losses,
    }


def finish(run: Run, teacher: Path, distilled: Path, tiny: Path) -> None:
    """Write the model as it ships, measure that, and describe it."""
    run.output.mkdir(parents=True, exist_ok=True)
    export(tiny, run.output)
    report: dict[str, Any] = {
        "settings": {**asdict(run.settings), "teacher": Path(run.settings.teacher).name},
        "versions": versions(),
        "device": torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu",
        "data": run.data_digest,
        "train_sentences": len(run.train),
        "stages": run.facts,
        "vocabulary": read_json(run.output / "config.json")["vocab_size"],
    }
    models: dict[str, Any] = {
        "tiny": load_model(run.output, length_limit=LENGTH_LIMIT, dtype=torch.float32),
        "teacher": load_teacher(run, teacher, temperature=1.0, compiled=False),
    }
    for name, model in models.items():
        report[name] = measure(model, run.valid, run.words, run.forms, seed=run.settings.seed)
        short = {key: value for key, value in report[name].items() if not key.endswith("samples")}
        run.say(f"{name}: {json.dumps(short)}")
    report["bytes"] = {path.name: path.stat().st_size for path in sorted(run.output.iterdir())}
    report["seconds"] = round(run.elapsed, 1)
    write_json(run.output / "report.json", report)
    write_card(run.output / "README.md", report)


# --- models -------------------------------------------------------------------------------------------


def open_teacher(run: Run) -> tuple[Any, PreTrainedTokenizerBase]:
    """The teacher in float32, to be trained."""
    if run.settings.teacher == RANDOM:
        tokenizer = AutoTokenizer.from_pretrained(run.prepared / "tokenizer")
        model: Any = make_tiny(run.settings, tokenizer)
        return model.to(run.device), tokenizer
    loaded = load_model(
        run.settings.teacher,
        length_limit=LENGTH_LIMIT,
        dtype=torch.float32,
        device=run.device,
        cuda_graphs=False,
    )
    loaded.model.set_attn_implementation("sdpa")
    # A converted tokenizer may name another token than the one the model ends its texts with.
    loaded.tokenizer.eos_token = loaded.tokenizer.convert_ids_to_tokens(loaded.eos_id)
    return loaded.model.requires_grad_(True), loaded.tokenizer


def load_teacher(run: Run, folder: Path, *, temperature: float, compiled: bool) -> CausalModel:
    """The fine-tuned teacher, to be drawn from."""
    warpers = Warpers(temperature=temperature)
    model = load_model(
        folder, length_limit=LENGTH_LIMIT, warpers=warpers, device=run.device, compiled=compiled
    )
    assert isinstance(model, CausalModel)
    return model


def make_tiny(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """The small model with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=settings.hidden, intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers, num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads // 2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # what is added to the stream, by as much less as there are layers
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight.data /= (2 * settings.layers) ** 0.5
    return model


def plain(model: Any, loss: Callable[[Any, Batch], torch.Tensor]) -> Loss:
    """The loss of this model, uncompiled."""
    return lambda batch: loss(model, batch)


def compiled_loss(run: Run, model: Any, batch: Batch) -> Loss:
    """The loss as one compiled function of fixed shapes; as it is, where compiling fails."""
    loss_of = torch.compile(plain(model, whole_loss), dynamic=False)
    return loss_of if compiles(run, model, loss_of, batch) else plain(model, whole_loss)


def with_compiled_layers(run: Run, model: Any, batch: Batch) -> Loss:
    """The loss with layers compiled one by one: they are alike, so that it is done once and takes seconds."""
    loss_of = plain(model, sparse_loss)
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    if not compiles(run, model, loss_of, batch):
        for layer in model.model.layers:
            layer._compiled_call_impl = None
    return loss_of


def compiles(run: Run, model: Any, loss_of: Loss, batch: Batch) -> bool:
    """Try forward and backward once. A fault of the compiler costs speed, never the run."""
    before = run.elapsed
    try:
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            model.train()
            loss_of(batch).backward()
    except Exception as error:
        run.say(f"  goes on uncompiled: {type(error).__name__}: {str(error)[:300]}")
        return False
    finally:
        model.zero_grad(set_to_none=True)
    run.say(f"  compiled in {run.elapsed - before:.1f} s")
    return True


def held_out_loss(model: Any, documents: Documents) -> float:
    """Mean loss a token on held-out sentences after their keywords."""
    model.eval()
    batch = documents.pad(
        documents.compose(torch.arange(len(documents), device=documents.given.device), documents.given)
    )
    total = float(total_loss(model, batch).sum())
    model.train()
    return total / int((batch.labels >= 0).sum())


def training_time(run: Run) -> float:
    """Seconds the tiny model is trained: those asked for, or those that are left before the deadline."""
    if not run.deadline:
        return run.settings.seconds
    left: float = run.deadline - run.elapsed - RESERVED
    return max(20.0, min(run.settings.seconds, left))


# --- files --------------------------------------------------------------------------------------------


def read_sentences(path: Path) -> list[Sentence]:
    """Sentences that `prepare.py` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [Sentence(each["text"], each["source"], tuple(each["words"])) for each in records]


def write_table(path: Path, table: pa.Table) -> None:
    """A Parquet file that is whole or not there."""
    write_atomically(path, lambda partial: pq.write_table(table, partial))


def save_whole(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Model and tokenizer as a folder that transformers loads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export(tiny: Path, output: Path) -> None:
    """The trained model as it ships: float16 on disk, float32 when loaded."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id,
        do_sample=True, top_k=0,
    )  # fmt: skip
    model.half().save_pretrained(output)
    settings = read_json(output / "config.json")
    write_json(output / "config.json", {**settings, "dtype": "float32"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, output / name)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepared", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="where stages leave their results")
    parser.add_argument("--output", type=Path, required=True, help="where the finished model goes")
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds after which all is to be done")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing on a GPU either")
    for name, each in Settings.__dataclass_fields__.items():
        option = f"--{name.replace('_', '-')}"
        if name == "teacher":
            parser.add_argument(option, required=True, help=each.metadata["help"])
        else:
            kind: Any = type(each.default)
            parser.add_argument(option, type=kind, default=each.default, help=each.metadata["help"])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
