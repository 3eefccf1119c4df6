"""The sampling loop: honest frequencies and log-probs, the same rows again, nothing lost when killed."""

import os
import resource
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
import torch

import small_models
from frequencies import FALSE_ALARM, enumerate_log_p, fit_p_value, outcome_log_p, rows_of
from nado.drawing import DrawingError, Progress, default_batch_size, draw, draw_rows
from nado.errors import InputError, MismatchError, StorageError
from nado.exact import TabularModel, exact_log_r, guided_model
from nado.huggingface import CausalModel, EncoderDecoderModel
from nado.noise import sample, uniforms
from nado.progress import describe_speed, progress_bar
from nado.prompts import Prompt
from nado.proposals import Proposal, guided_mixture, tempered
from nado.samples import SCHEMA, Samples, read_samples, samples_folder
from nado.warpers import Warpers
from strategies import RandomOracle, perturbed

PROMPTS = ("one", "two")
FAMILIES = ("gpt2", "llama", "marian", "t5")
TEXTS = ["the dog", "a", "the old man sees the red ball on the beach", "woman ,", "cat"]


class WholeBatches(TabularModel):
    """A tabular model that, like an encoder–decoder, starts new rows only when all the others are done."""

    refillable = False


def tabular(kind=TabularModel, completion="eos", **more):
    sizes = {"vocabulary_size": 4, "length_limit": 4, "seed": 5, "zeros": 0.15, **more}
    return kind.random(PROMPTS, completion=completion, **sizes)


def real(kind, limit=6, **more):
    """A Hugging Face model of the given family with random weights."""
    seq2seq = kind in small_models.SEQ2SEQ
    adapter = EncoderDecoderModel if seq2seq else CausalModel
    tokenizer = small_models.tokenizer(appends_eos=seq2seq)
    return adapter(small_models.build(kind), tokenizer, length_limit=limit, **more)


def draw_many(model, prompts, rows, *, proposal=None, seed=3, batch_size=64, numbers=None):
    asked = [Prompt(prompts[row % len(prompts)], prompts[row % len(prompts)]) for row in range(rows)]
    numbers = range(rows) if numbers is None else numbers
    proposal = Proposal() if proposal is None else proposal
    return Samples(draw_rows(model, asked, numbers, proposal=proposal, seed=seed, batch_size=batch_size))


def texts_of(samples, prompt):
    rows = rows_of(samples.ragged("tokens"))
    return [row for row, own in zip(rows, samples.strings("prompt"), strict=True) if own == prompt]


# --- frequencies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TabularModel, WholeBatches])
@pytest.mark.parametrize("completion", ["eos", "limit"])
@pytest.mark.parametrize("batch_size", [17, 256, 100_000])
def test_drawn_frequencies_are_those_of_p(kind, completion, batch_size):
    model = tabular(kind, completion)
    samples = draw_many(model, PROMPTS, 8000, batch_size=batch_size)
    for prompt in PROMPTS:
        assert fit_p_value(texts_of(samples, prompt), outcome_log_p(model, prompt)) > FALSE_ALARM


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_drawn_frequencies_of_a_real_model_are_those_of_p(kind):
    model = real(kind, limit=2)
    samples = draw_many(model, TEXTS[:2], 12_000, batch_size=512)
    for prompt in TEXTS[:2]:
        assert fit_p_value(texts_of(samples, prompt), enumerate_log_p(model, prompt)) > FALSE_ALARM


def test_warpers_are_part_of_p():
    model = real("gpt2", limit=2, warpers=Warpers(temperature=0.7, top_k=6, forbidden=(4,)))
    samples = draw_many(model, TEXTS[:1], 8000, batch_size=512)
    assert fit_p_value(texts_of(samples, TEXTS[0]), enumerate_log_p(model, TEXTS[0])) > FALSE_ALARM


def without_eos_at_first(model):
    """The model, unable to end a text before its second token."""
    tables = {prompt: model.table(prompt).clone() for prompt in PROMPTS}
    for table in tables.values():
        table[0, -1] = -torch.inf
        table[0] = table[0].log_softmax(dim=-1)
    return TabularModel(tables, length_limit=model.length_limit)


def draw_with_one_noise_a_row(model, prompt, rows):
    """A loop with a bug: every step of a row sees the noise of its first."""
    noise = uniforms(3, torch.arange(rows), torch.zeros(rows, dtype=torch.long))
    state, columns = model.start([prompt] * rows), []
    for _ in range(model.length_limit):
        columns.append(sample(state.log_p, noise))
        state = model.step(state, columns[-1])
    texts = torch.stack(columns, dim=1).tolist()
    return [tuple(row[: row.index(model.eos_id) + 1] if model.eos_id in row else row) for row in texts]


def test_wrong_samplers_are_rejected():
    model = tabular()
    log_p = outcome_log_p(model, "one")
    warm = draw_many(model, ("one",), 8000, proposal=tempered(1.15))
    skipping = draw_many(without_eos_at_first(model), ("one",), 8000)
    repeating = draw_many(model, ("one",), 8000, numbers=[row // 5 for row in range(8000)])
    for samples in (warm, skipping, repeating):
        assert fit_p_value(texts_of(samples, "one"), log_p) < FALSE_ALARM
    assert fit_p_value(draw_with_one_noise_a_row(model, "one", 8000), log_p) < FALSE_ALARM


# --- log-probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("proposal", [Proposal(), tempered(1.4)], ids=["p", "tempered"])
def test_recorded_log_probs_are_those_of_a_teacher_forced_pass(kind, proposal):
    model = real(kind)
    samples = draw_many(model, TEXTS, 60, proposal=proposal, batch_size=16)
    tokens, log_p = samples.ragged("tokens"), samples.ragged("log_p")
    lengths = np.diff(tokens.offsets)
    for row, prompt in enumerate(samples.strings("prompt")):  # one by one: no padding at all
        own = torch.from_numpy(tokens.row(row).astype(np.int64))[None]
        scored = model.score([prompt], own, torch.tensor([lengths[row]]))[0]
        assert np.abs(scored.numpy() - log_p.row(row)).max() < 1e-4
    assert len(set(lengths.tolist())) > 1
    assert samples.strings("text") == model.decode(rows_of(tokens))


# --- the same rows again ------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch():
    model = tabular()
    proposal = guided_mixture(
        guided_model(
            model, {(p, p): perturbed(exact_log_r(model, RandomOracle(1, 0.5), p), 1) for p in PROMPTS}
        ),
        complete_from_p=True,
    )
    for chosen in (Proposal(), proposal):
        whole = draw_many(model, PROMPTS, 400, proposal=chosen, batch_size=64).table
        for size in (1, 7, 400):
            assert draw_many(model, PROMPTS, 400, proposal=chosen, batch_size=size).table.equals(whole)
        order = np.random.default_rng(0).permutation(400)
        asked = [Prompt(PROMPTS[row % 2], PROMPTS[row % 2]) for row in order]
        shuffled = draw_rows(model, asked, order.tolist(), proposal=chosen, seed=3, batch_size=32)
        assert shuffled.equals(whole.take(order))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_real_model_gives_identical_bits_at_one_batch_size(kind):
    model = real(kind)
    first = draw_many(model, TEXTS, 50, batch_size=8).table
    draw_many(model, TEXTS[:1], 3)  # whatever else happens in between
    assert draw_many(real(kind), TEXTS, 50, batch_size=8).table.equals(first)
    assert draw_many(model, TEXTS, 50, batch_size=8).table.equals(first)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_real_model_gives_the_same_texts_at_any_batch_size(kind):
    # On a CPU, in float32, rounding moves log p by 1e-6; no noise of these rows falls that near an edge.
    model = real(kind)
    texts = [draw_many(model, TEXTS, 50, batch_size=size).strings("text") for size in (1, 8, 50)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("proposal", [Proposal(), tempered(1.3)], ids=["p", "tempered"])
def test_a_gpu_gives_the_rows_of_a_cpu_but_for_rounding(proposal):
    # Prompts grow: slots are widened, and steps captured anew, while finished rows are being read.
    prompts = [" ".join(["dog"] * (1 + row // 100)) for row in range(2000)]
    here, there = real("llama", limit=20), real("llama", limit=20)
    there.model.to("cuda")
    expected = draw_many(here, prompts, 2000, proposal=proposal, batch_size=64)
    for batch_size in (64, 512):
        samples = draw_many(there, prompts, 2000, proposal=proposal, batch_size=batch_size)
        same = [a == b for a, b in zip(expected.strings("text"), samples.strings("text"), strict=True)]
        assert np.mean(same) > 0.99
        rows = np.flatnonzero(same)
        near = expected.ragged("log_p").sums()[rows] - samples.ragged("log_p").sums()[rows]
        assert np.abs(near).max() < 1e-2


def test_seeds_and_rows_differ():
    model = real("gpt2")
    one, two = (draw_many(model, TEXTS[:1], 50, seed=seed).strings("text") for seed in (0, 1))
    assert len(set(one)) > 40
    assert sum(a != b for a, b in zip(one, two, strict=True)) > 40


def test_shards_are_drawn_as_if_they_were_alone(tmp_path):
    model = real("gpt2")
    prompts = [Prompt(text, text) for text in TEXTS]
    samples = draw(model, prompts, tmp_path / "s", samples_per_prompt=8, batch_size=4, shard_rows=16, seed=2)
    asked = [prompt for prompt in prompts for _ in range(8)]
    alone = draw_rows(model, asked[16:32], range(16, 32), proposal=Proposal(), seed=2, batch_size=4)
    assert samples.table.slice(16, 16).combine_chunks().equals(alone.combine_chunks())
    assert samples.strings("prompt") == [prompt.prompt for prompt in asked]
    assert samples.array("row").tolist() == list(range(40))


# --- ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", ["eos", "limit"])
def test_the_limit_counts_eos_and_a_cut_text_is_finished_by_the_mode(completion):
    model = tabular(completion=completion)
    samples = draw_many(model, PROMPTS, 2000)
    for row, finished in zip(rows_of(samples.ragged("tokens")), samples.array("finished"), strict=True):
        ended = row[-1] == model.eos_id
        assert model.eos_id not in row[:-1]
        assert len(row) == 4 or (ended and len(row) < 4)
        assert finished == (ended or completion == "limit")
    cut = [row for row in rows_of(samples.ragged("tokens")) if row[-1] != model.eos_id]
    at_limit = [row for row in rows_of(samples.ragged("tokens")) if len(row) == 4 and row not in cut]
    assert cut
    assert at_limit  # EOS as the L-th token still ends a text


def test_a_limit_of_one_token():
    model = tabular(length_limit=1)
    samples = draw_many(model, PROMPTS, 500)
    assert set(np.diff(samples.ragged("tokens").offsets)) == {1}
    for prompt in PROMPTS:
        assert fit_p_value(texts_of(samples, prompt), outcome_log_p(model, prompt)) > FALSE_ALARM


# --- on disk ------------------------------------------------------------------------------------------


def draw_small(folder, model=None, **more):
    """A run of seven shards."""
    arguments = {"samples_per_prompt": 50, "seed": 4, "batch_size": 8, "shard_rows": 16, **more}
    model = tabular() if model is None else model
    return draw(model, [Prompt(text, text) for text in PROMPTS], folder, **arguments)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_that_is_complete_is_only_read(tmp_path):
    first = draw_small(tmp_path / "s")
    before = contents(tmp_path / "s")
    assert draw_small(tmp_path / "s").table.equals(first.table)
    assert draw_small(tmp_path / "s", batch_size=None, shard_rows=None).table.equals(first.table)
    assert read_samples(tmp_path / "s").table.equals(first.table)
    assert contents(tmp_path / "s") == before


def test_only_what_is_missing_is_drawn_again(tmp_path):
    first = draw_small(tmp_path / "s", proposal=tempered(1.2))
    before = contents(tmp_path / "s")
    for name in ("shard-00002.parquet", "shard-00006.parquet"):
        (tmp_path / "s" / name).unlink()
    seen = []
    again = draw_small(tmp_path / "s", proposal=tempered(1.2), on_progress=seen.append)
    assert again.table.equals(first.table)
    assert contents(tmp_path / "s") == before
    assert (seen[0].resumed_rows, seen[-1].rows, seen[-1].total_rows) == (100 - 16 - 4, 100, 100)


def test_the_manifest_says_what_was_drawn(tmp_path):
    draw_small(tmp_path / "s", proposal=tempered(1.2))
    manifest = samples_folder(tmp_path / "s").manifest()
    config = manifest["config"]
    assert (config["seed"], config["batch_size"], config["shard_rows"]) == (4, 8, 16)
    assert config["model"] == tabular().fingerprint
    assert config["proposal"]["components"] == [{"share": 1.0, "kind": "tempered", "temperature": 1.2}]
    assert [shard["rows"] for shard in manifest["shards"]] == [16] * 6 + [4]
    assert {"nado", "python", "torch", "numpy", "pyarrow"} <= set(manifest["versions"])
    assert manifest["weights"]["samples"] == 100
    draw_small(tmp_path / "p")
    assert "weights" not in samples_folder(tmp_path / "p").manifest()


def test_a_weight_collapse_is_said_at_the_end_of_drawing(tmp_path, caplog):
    draw_small(tmp_path / "s", proposal=tempered(0.05))
    assert [record.message.split(":")[0] for record in caplog.records if record.name == "nado.proposals"]
    assert samples_folder(tmp_path / "s").manifest()["weights"]["mean"] < 0.9


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 5}, "seed (4 there, 5 here)"),
        ({"proposal": tempered(1.2)}, "proposal.components.0.temperature (1.0 there, 1.2 here)"),
        ({"samples_per_prompt": 51}, "samples_per_prompt (50 there, 51 here)"),
        ({"batch_size": 9}, "batch_size (8 there, 9 here)"),
        ({"shard_rows": 17}, "shard_rows (16 there, 17 here)"),
        ({"model": tabular(completion="limit")}, "model ("),
    ],
)
def test_another_run_in_the_same_folder_is_refused(tmp_path, change, difference):
    draw_small(tmp_path / "s")
    before = contents(tmp_path / "s")
    with pytest.raises(MismatchError) as raised:
        draw_small(tmp_path / "s", **change)
    assert raised.value.expected == f"{tmp_path / 's'} to hold this same run"
    assert raised.value.found.startswith(f"another one, which differs in {difference}")
    assert raised.value.hint == "Choose another folder, or delete this one."
    assert contents(tmp_path / "s") == before


def test_other_prompts_in_the_same_folder_are_refused(tmp_path):
    draw_small(tmp_path / "s")
    with pytest.raises(MismatchError, match=r"which differs in prompts \("):
        draw(tabular(), [Prompt("one", "two")], tmp_path / "s")


def test_a_damaged_shard_is_named_and_made_anew(tmp_path):
    first = draw_small(tmp_path / "s")
    path = tmp_path / "s" / "shard-00003.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StorageError) as raised:
        draw_small(tmp_path / "s")
    assert str(raised.value) == (
        f"expected a readable shard {path}; found the error: its digest is not the one in the manifest. "
        "Delete that file and run the same command again: only this shard is made anew."
    )
    path.unlink()
    assert draw_small(tmp_path / "s").table.equals(first.table)


@contextmanager
def file_size_limit(size):
    """No file larger than `size`: to whoever writes, the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_nothing_that_was_written(tmp_path):
    expected = draw_small(tmp_path / "whole", samples_per_prompt=2000, batch_size=500, shard_rows=1500)
    largest = max(map(len, contents(tmp_path / "whole").values()))
    with pytest.raises(StorageError) as raised, file_size_limit(largest - 200):
        draw_small(tmp_path / "s", samples_per_prompt=2000, batch_size=500, shard_rows=1500)
    assert raised.value.expected.startswith(f"to write {tmp_path / 's' / 'shard-0000'}")
    assert "File too large" in raised.value.found
    assert raised.value.hint == (
        "Free some space or choose another folder, then run the same command again: what is already written "
        "is kept."
    )
    assert not list((tmp_path / "s").glob(".*"))
    again = draw_small(tmp_path / "s", samples_per_prompt=2000, batch_size=500, shard_rows=1500)
    assert again.table.equals(expected.table)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


PRELUDE = """
    import os, random, shutil, signal, sys, time
    import pyarrow.compute, concurrent.futures.thread  # once here, not in every fork
    from pathlib import Path
    from nado.drawing import draw
    from nado.exact import TabularModel
    from nado.prompts import Prompt
    from nado.proposals import tempered

    base = Path(sys.argv[1])

    def run(folder):
        model = TabularModel.random(("one", "two"), vocabulary_size=4, length_limit=4, seed=5)
        prompts = [Prompt("one", "one"), Prompt("two", "two")]
        sizes = {"samples_per_prompt": 24, "batch_size": 8, "shard_rows": 16}
        draw(model, prompts, folder, proposal=tempered(1.3), **sizes)

    def fork(work):
        # This process itself never draws: it has no threads that a fork would tear apart.
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException as error:
                print(type(error).__name__, error, sep=": ", flush=True)
                os._exit(1)
            os._exit(0)
        return child

    def wait(child):
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run_script(script, folder):
    """A script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


def test_killed_at_every_touch_of_the_disk_and_resumed(tmp_path):
    """Two kills a run, the first at its k-th file operation, for every k; then a run to the end."""
    script = """
    EVENTS = {"open", "os.rename", "os.remove", "os.mkdir"}

    def run_until(folder, limit):
        seen = 0
        def count(event, arguments):
            nonlocal seen
            if event in EVENTS and str(folder) in str(arguments[0]):
                seen += 1
                if seen == limit:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        run(folder)

    def contents(folder):
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    whole = base / "whole"
    assert wait(fork(lambda: run(whole))) == 0
    kills = 0
    for k in range(1, 1000):
        folder = base / "run"
        first = wait(fork(lambda: run_until(folder, k)))
        if first == 0:
            break
        assert first == -signal.SIGKILL, first
        second = wait(fork(lambda: run_until(folder, 1 + k % 9)))
        kills += 1 + (second != 0)
        assert second in (0, -signal.SIGKILL), second
        assert wait(fork(lambda: run(folder))) == 0
        assert contents(folder) == contents(whole), (k, sorted(contents(folder)))
        shutil.rmtree(folder)
    print(k, kills)
    """
    points, kills = map(int, run_script(script, tmp_path)[-1].split())
    assert points > 15  # manifest, 3 shards, manifest: flush, move, clean up and flush the folder, each
    assert kills > points


def test_killed_at_random_moments_and_resumed(tmp_path):
    script = """
    whole, folder = base / "whole", base / "run"
    began = time.monotonic()
    assert wait(fork(lambda: run(whole))) == 0
    took = time.monotonic() - began
    chance, kills = random.Random(0), 0
    for attempt in range(12):
        child = fork(lambda: run(folder))
        time.sleep(chance.uniform(0.05, 0.6) * took)  # the first run was a little slower
        os.kill(child, signal.SIGKILL)
        kills += wait(child) == -signal.SIGKILL
        if attempt % 4 == 3:
            assert wait(fork(lambda: run(folder))) == 0
            assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
                p.name: p.read_bytes() for p in whole.iterdir()
            }
            shutil.rmtree(folder)
    print(kills)
    """
    assert int(run_script(script, tmp_path)[-1]) >= 3


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
def test_a_folder_that_may_not_be_written(tmp_path):
    script = """
    import tempfile

    place = Path(tempfile.mkdtemp())
    (place / "run").mkdir()
    place.chmod(0o755)
    (place / "run").chmod(0o555)

    def attempt():
        if os.getuid() == 0:
            os.setuid(65534)  # the superuser may write anywhere
        run(place / "run")

    wait(fork(attempt))
    assert list((place / "run").iterdir()) == []
    (place / "run").rmdir()
    place.rmdir()
    print(place, flush=True)
    """
    message, place = run_script(script, tmp_path)
    assert message == (
        f"StorageError: expected to write {place}/run/manifest.json; found the error: Permission denied. "
        "Free some space or choose another folder, then run the same command again: what is already written "
        "is kept."
    )


# --- what is refused ----------------------------------------------------------------------------------


def test_a_model_that_overflows_is_named():
    for kind in ("gpt2", "t5"):
        model = real(kind)
        with torch.no_grad():
            model.model.get_output_embeddings().weight[5] = torch.nan
        with pytest.raises(DrawingError) as raised:
            draw_many(model, TEXTS, 10, batch_size=4)
        assert raised.value.expected == "finite log-probabilities for every drawn token"
        assert raised.value.found.endswith(" that are not")
        assert raised.value.hint == (
            "The model overflowed: load it in float32 or bfloat16 and check its weights."
        )
    assert threading.active_count() < 10  # threads end with the loop


def test_an_error_is_raised_soon_and_not_at_the_end_of_the_shard():
    model = real("gpt2")
    with torch.no_grad():
        model.model.get_output_embeddings().weight[5] = torch.nan
    counted = []
    asked = [Prompt("the dog", "the dog")] * 5000
    with pytest.raises(DrawingError):
        draw_rows(
            model,
            asked,
            range(5000),
            proposal=Proposal(),
            seed=0,
            batch_size=8,
            on_rows=lambda rows, tokens: counted.append(rows),
        )
    assert sum(counted) == 0


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        ([], {}, "expected at least one prompt; found none. Give prompts, for instance read_prompts(file)."),
        (
            ["one"],
            {},
            "expected prompts as Prompt(prompt, condition); found 'one'. Wrap them: Prompt(text, text).",
        ),
        (
            [Prompt("one", "one"), Prompt("one", 2)],
            {},
            "expected prompts as Prompt(prompt, condition); found Prompt(prompt='one', condition=2). Wrap "
            "them: Prompt(text, text).",
        ),
        (
            "one",
            {},
            "expected prompts as Prompt(prompt, condition); found 'o'. Wrap them: Prompt(text, text).",
        ),
        (
            [Prompt("one", "one")],
            {"samples_per_prompt": 0},
            "expected samples_per_prompt of at least 1; found 0. Ask for 1 or more.",
        ),
        (
            [Prompt("one", "one")],
            {"batch_size": -1},
            "expected batch_size of at least 1; found -1. Ask for 1 or more.",
        ),
        (
            [Prompt("one", "one")],
            {"shard_rows": 0},
            "expected shard_rows of at least 1; found 0. Ask for 1 or more.",
        ),
    ],
)
def test_arguments_that_make_no_sense(tmp_path, prompts, more, message):
    with pytest.raises(InputError) as raised:
        draw(tabular(), prompts, tmp_path / "s", **more)
    assert str(raised.value) == message
    assert not (tmp_path / "s").exists()


def test_no_rows_are_an_empty_table():
    table = draw_rows(tabular(), [], [], proposal=Proposal(), seed=0, batch_size=8)
    assert (table.num_rows, table.schema) == (0, SCHEMA)


def test_the_default_batch_size_on_a_cpu():
    assert default_batch_size(tabular()) == 64


def test_more_prompts_than_are_read_ahead_at_once():
    # Symptom: what a model could not read ahead was offered again and again, whole.
    model = real("gpt2", limit=3)
    words = small_models.WORDS
    prompts = [f"{a} {b} {c}" for a in words for b in words for c in words[:11]]  # 4,400 different ones
    samples = draw_many(model, prompts, len(prompts), batch_size=256)
    rows = range(0, len(prompts), 400)
    alone = draw_rows(
        model, [Prompt(prompts[row], "") for row in rows], rows, proposal=Proposal(), seed=3, batch_size=64
    )
    assert [samples.strings("text")[row] for row in rows] == alone["text"].to_pylist()


# --- progress -----------------------------------------------------------------------------------------


def test_progress_is_told_in_the_callers_thread(tmp_path):
    seen = []
    draw_small(tmp_path / "s", on_progress=lambda now: seen.append((threading.current_thread(), now)))
    assert {thread for thread, _ in seen} == {threading.current_thread()}
    rows = [now.rows for _, now in seen]
    assert rows == sorted(rows)
    last = seen[-1][1]
    tokens = len(read_samples(tmp_path / "s").ragged("tokens").values)
    assert (last.rows, last.total_rows, last.tokens, last.resumed_rows) == (100, 100, tokens, 0)


def test_a_listener_that_raises_stops_the_run(tmp_path):
    class StopError(Exception):
        pass

    def stop(now):
        raise StopError

    with pytest.raises(StopError):
        draw_small(tmp_path / "s", on_progress=stop)
    assert draw_small(tmp_path / "s").table.equals(draw_small(tmp_path / "other").table)


def test_speed_in_words():
    now = Progress(rows=3000, total_rows=10_000, tokens=40_000, seconds=2.0, resumed_rows=1000)
    assert describe_speed(now) == "1,000 samples/s · 20,000 tokens/s · 0:00:07 left"
    assert describe_speed(Progress(0, 10, 0, 1.0)) == "0 samples/s"


def test_the_bar_is_silent_off_a_terminal_and_speaks_on_stderr(capsys):
    now = Progress(rows=50, total_rows=100, tokens=700, seconds=1.0)
    with progress_bar() as listener:
        listener(now)
    assert capsys.readouterr() == ("", "")
    with progress_bar("drawing", force=True) as listener:
        listener(now)
    out, err = capsys.readouterr()
    assert out == ""
    assert "50/100" in err
    assert "50 samples/s · 700 tokens/s · 0:00:01 left" in err.replace("\n", " ")


def test_tables_have_the_schema_they_promise():
    assert draw_many(tabular(), PROMPTS, 20).table.schema == SCHEMA
    assert isinstance(draw_many(tabular(), PROMPTS, 20).table, pa.Table)
