"""Ray's actors draw and label what one process does, row for row, whatever dies on the way."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import small_models
from nado.cli import app
from nado.distributed import EngineError, draw_on_cluster, label_on_cluster
from nado.distributed.cluster import connect
from nado.drawing import draw
from nado.errors import MismatchError, OracleError
from nado.exact import TabularModel
from nado.oracles import Oracle, load_oracle
from nado.prompts import Prompt
from nado.proposals import tempered
from nado.sample_labels import label_samples
from nado.storage import read_json
from nado.study.sections import DistributedConfig

ray = pytest.importorskip("ray", reason="the extra ray is not installed: pip install 'nado-lm[ray]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own deprecations, of many kinds

PROMPTS = [Prompt(prompt, condition) for prompt in "xyz" for condition in "ab"]
CLUSTER = DistributedConfig(engine="ray", actors=2)
# 48 rows in six shards, of which most begin inside a prompt's texts.
SIZES: dict[str, Any] = {"samples_per_prompt": 8, "batch_size": 4, "shard_rows": 9, "seed": 3}
ORACLE = """
import os
from pathlib import Path

HERE = Path(__file__).parent


def has_letter(condition, text):
    if (HERE / "trouble").exists():  # the first node to see this is the one in trouble
        (HERE / "trouble").rename(HERE / f"trouble-{os.getpid()}")
    if (HERE / f"trouble-{os.getpid()}").exists():
        raise OSError("no dictionary on this node")
    return condition in text
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DistributedConfig]:
    """One small cluster for all tests of this file."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this file
    with connect(CLUSTER):
        yield CLUSTER
    assert not ray.is_initialized()


def load(seed: int = 5) -> TabularModel:
    return TabularModel.random(list("xyz"), vocabulary_size=4, length_limit=5, seed=seed)


def troubled(folder: Path, trouble: Callable[[Path], None]) -> TabularModel:
    """A model that gets into trouble with the second step of a text about y."""
    model = load()
    start, step = model.start, model.step
    about_y = False

    def note_and_start(prompts: Any, conditions: Any = None) -> Any:
        nonlocal about_y
        about_y = "y" in prompts
        return start(prompts, conditions)

    def step_into_trouble(state: Any, tokens: Any) -> Any:
        if about_y:
            trouble(folder)
        return step(state, tokens)

    model.start, model.step = note_and_start, step_into_trouble  # type: ignore[method-assign]
    return model


def die_once(folder: Path) -> None:
    if not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die_while_trouble_lasts(folder: Path) -> None:
    if (folder / "trouble").exists():
        os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(folder: Path) -> None:
    if (folder / "trouble").exists():
        raise MemoryError("Unable to allocate 8.00 TiB")


def shards(folder: Path) -> list[pa.Table]:
    return [pq.read_table(path) for path in sorted(folder.glob("shard-*.parquet"))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def draw_on_ray(folder: Path, make: Any = load, **choices: Any) -> dict[str, Any]:
    return draw_on_cluster(make, PROMPTS, folder, CLUSTER, **SIZES | choices)


def require_same(there: Path, here: Path) -> None:
    """Row for row, digest for digest, and no file more or less."""
    assert len(shards(here)) == 6
    assert shards(there) == shards(here)
    assert read_json(there / "manifest.json") == read_json(here / "manifest.json")
    assert names(there) == names(here)


# --- drawing ------------------------------------------------------------------------------------------


def test_two_actors_draw_what_one_process_draws(cluster: DistributedConfig, tmp_path: Path) -> None:
    told: list[Any] = []
    proposal = tempered(1.5)
    draw(load(), PROMPTS, tmp_path / "local", **SIZES, proposal=proposal)
    summary = draw_on_ray(tmp_path / "ray", proposal=proposal, on_progress=told.append)
    require_same(tmp_path / "ray", tmp_path / "local")
    local = shards(tmp_path / "local")
    assert summary["texts"] == told[-1].rows == told[-1].total_rows == 48
    assert told[-1].tokens == sum(len(row) for table in local for row in table["tokens"].to_pylist())


def test_an_actor_killed_in_the_middle_loses_and_doubles_nothing(
    cluster: DistributedConfig, tmp_path: Path
) -> None:
    draw(load(), PROMPTS, tmp_path / "local", **SIZES)
    draw_on_ray(tmp_path / "ray", functools.partial(troubled, tmp_path, die_once))
    assert (tmp_path / "died").exists()
    require_same(tmp_path / "ray", tmp_path / "local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "found"),
    [
        (die_while_trouble_lasts, "3 that died over it on {host}, most likely for want of memory"),
        (run_out_of_memory, "Unable to allocate 8.00 TiB"),
    ],
)
def test_an_actor_out_of_memory_ends_the_run_and_finished_shards_are_kept(
    cluster: DistributedConfig, tmp_path: Path, trouble: Callable[[Path], None], found: str
) -> None:
    (tmp_path / "trouble").touch()
    model = functools.partial(troubled, tmp_path, trouble)
    with pytest.raises(EngineError) as caught:
        draw_on_ray(tmp_path / "ray", model)
    assert found.format(host=os.uname().nodename) in caught.value.found
    assert caught.value.hint == (
        "Lower batch_size, or give each actor more cores so that fewer share a node. "
        "Finished shards are kept: the same command goes on."
    )
    assert "\n" not in str(caught.value)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ray").glob("shard-*")}
    assert 0 < len(before) < 6
    (tmp_path / "trouble").unlink()
    draw_on_ray(tmp_path / "ray", model)
    draw(load(), PROMPTS, tmp_path / "local", **SIZES)
    require_same(tmp_path / "ray", tmp_path / "local")
    after = {name: (tmp_path / "ray" / name).stat().st_mtime_ns for name in before}
    assert after == before


@pytest.mark.slow
def test_engines_may_take_turns_but_another_run_is_refused(
    cluster: DistributedConfig, tmp_path: Path
) -> None:
    draw(load(), PROMPTS, tmp_path / "local", **SIZES)
    draw(load(), PROMPTS, tmp_path / "ray", **SIZES)
    for index in (1, 4):
        (tmp_path / "ray" / f"shard-{index:05d}.parquet").unlink()
    draw_on_ray(tmp_path / "ray")
    require_same(tmp_path / "ray", tmp_path / "local")
    with pytest.raises(MismatchError, match="another one, which differs in seed"):
        draw_on_ray(tmp_path / "ray", seed=4)


def other_model_for_the_second(folder: Path) -> TabularModel:
    """The scout's model, and the actors' another one: as on nodes with other files."""
    first = not (folder / "loaded").exists()
    (folder / "loaded").touch()
    return load(5 if first else 6)


@pytest.mark.slow
def test_a_node_with_another_base_is_refused(cluster: DistributedConfig, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="expected the same base on every node"):
        draw_on_ray(tmp_path / "ray", functools.partial(other_model_for_the_second, tmp_path))
    assert shards(tmp_path / "ray") == []


def test_actors_no_node_has_room_for_are_refused(cluster: DistributedConfig, tmp_path: Path) -> None:
    wide = DistributedConfig(engine="ray", cpus=64, gpus=2)
    with pytest.raises(EngineError) as caught:
        draw_on_cluster(load, PROMPTS, tmp_path, wide, **SIZES)
    assert str(caught.value) == (
        "expected a node with 64 cores and 2 GPUs for an actor; "
        "found 1 nodes with at most 2 cores and 0 GPUs. Ask for less with cpus and gpus, or add such a node."
    )


# --- labelling ----------------------------------------------------------------------------------------


@pytest.fixture
def oracle_file(tmp_path: Path) -> Path:
    path = tmp_path / "letters.py"
    path.write_text(ORACLE)
    return path


def ask(path: Path) -> Oracle:
    return load_oracle(f"{path}:has_letter")


def test_two_actors_label_what_one_process_labels(
    cluster: DistributedConfig, tmp_path: Path, oracle_file: Path
) -> None:
    told: list[Any] = []
    for name in ("local", "ray"):
        draw(load(), PROMPTS, tmp_path / name, **SIZES)
    label_samples(tmp_path / "local", ask(oracle_file), model=load(), prefixes=True, batch_size=4)
    summary = label_on_cluster(
        tmp_path / "ray",
        functools.partial(ask, oracle_file),
        cluster,
        load_decoder=load,
        batch_size=4,
        on_progress=told.append,
    )
    require_same(tmp_path / "ray" / "labels", tmp_path / "local" / "labels")
    assert summary["texts"] == told[-1].rows == told[-1].total_rows == 48
    assert 0 < summary["satisfied"] < 1


@pytest.mark.slow
def test_an_oracle_that_fails_on_one_node_is_named_and_finished_shards_are_kept(
    cluster: DistributedConfig, tmp_path: Path, oracle_file: Path
) -> None:
    for name in ("local", "ray"):
        draw(load(), PROMPTS, tmp_path / name, **SIZES)
    label_samples(tmp_path / "local", ask(oracle_file))
    (tmp_path / "trouble").touch()
    with pytest.raises(OracleError) as caught:
        label_on_cluster(tmp_path / "ray", functools.partial(ask, oracle_file), cluster)
    assert caught.value.expected == "an answer from the oracle has_letter"
    assert "OSError: no dictionary on this node for the text" in caught.value.found
    assert f", on {os.uname().nodename})" in caught.value.found
    assert caught.value.hint == (
        f"Mend that node. A mended oracle is another: for one, delete {tmp_path / 'ray' / 'labels'} first. "
        "Finished shards are kept: the same command goes on."
    )
    assert "\n" not in str(caught.value)
    for path in tmp_path.glob("trouble*"):
        path.unlink()
    label_on_cluster(tmp_path / "ray", functools.partial(ask, oracle_file), cluster)
    require_same(tmp_path / "ray" / "labels", tmp_path / "local" / "labels")


# --- a whole study ------------------------------------------------------------------------------------

STUDY = """
[base]
name = "base"
length_limit = 8
device = "cpu"
[oracle]
name = "keywords"
inflections = false
at_least = 1
[prompts]
file = "prompts.txt"
template = "a {condition}"
[draw]
samples_per_prompt = 40
batch_size = 4
"""


@pytest.mark.slow
def test_nado_run_with_ray_draws_and_labels_what_it_does_without(
    cluster: DistributedConfig, tmp_path: Path
) -> None:
    """The base is loaded by the actors, its tokenizer alone by those that label its prefixes."""
    small_models.save("llama", tmp_path / "base")
    (tmp_path / "prompts.txt").write_text("\n".join(["dog", "cat", "ball", "beach", "man", "woman", "park"]))
    (tmp_path / "study.toml").write_text(STUDY)
    for name, words in (("local", []), ("ray", ["--engine", "ray", "--actors", "2"])):
        place = ["--folder", str(tmp_path / name), "--until", "label"]
        done = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml"), *place, *words])
        assert done.exit_code == 0, done.output
    for folder in ("draw", "draw/labels"):
        there, here = tmp_path / "ray" / folder, tmp_path / "local" / folder
        assert len(shards(here)) == 4
        assert shards(there) == shards(here)
        assert read_json(there / "manifest.json") == read_json(here / "manifest.json")
    assert shards(tmp_path / "ray" / "draw" / "labels")[0]["stops"].null_count == 0
    for stage in ("draw", "label"):
        records = [read_json(tmp_path / name / stage / "stage.json") for name in ("ray", "local")]
        assert records[0]["digest"] == records[1]["digest"]
        assert records[0]["summary"] == records[1]["summary"]
