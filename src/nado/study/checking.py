"""Every mistake in a study that can be found before a model is loaded."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nado.errors import InputError, MismatchError, NadoError, OracleError, StorageError
from nado.oracles import Oracle, load_oracle
from nado.storage import read_json
from nado.study.estimate import Estimate, Outline, describe_bytes, estimate, measure_drawing
from nado.study.materials import Tasks, digest_base, load_base, read_tasks
from nado.study.reading import Study, apply_settings, make_sections, read_tables, with_local_base
from nado.study.sections import BaseConfig, GenerateConfig, LabelConfig, PromptsConfig
from nado.study.tables import Problem, salvage


@dataclass
class Check:
    """What was found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    estimate: Estimate | None = None

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ok": not self.problems,
            "problems": [each.describe() for each in self.problems],
            "notes": self.notes,
            "estimate": None if self.estimate is None else self.estimate.describe(),
        }


def check_study(
    path: Path,
    folder: Path,
    settings: list[str] | None = None,
    *,
    guide: Path | None = None,
    force: bool = False,
    measure: bool = False,
) -> Check:
    """Look for every mistake; with `measure` the base is loaded and a few texts are drawn, to time it.

    `guide` is one that shall be used beside the study's base. Without `force`, stages in `folder` that were
    made from something else are mistakes too.
    """
    check = Check()
    with _blaming(check, str(path)):
        tables = read_tables(path)
        apply_settings(tables, settings or ())
        place = path.resolve().parent
        sections = make_sections(tables, place, str(path), check.problems)
        _salvage(sections, tables, place)
        _look(check, sections, place, folder, guide, force=force, measure=measure)
    return check


def _salvage(sections: dict[str, Any], tables: dict[str, Any], place: Path) -> None:
    """Make what can be made of sections with mistakes, so that one mistake does not hide another."""
    if sections["base"] is None and isinstance(tables.get("base"), dict):
        found = salvage(BaseConfig, tables["base"], place, length_limit=1)
        sections["base"] = None if found is None else with_local_base(found, place)
    if sections["prompts"] is None and isinstance(tables.get("prompts"), dict):
        sections["prompts"] = salvage(PromptsConfig, tables["prompts"], place)


def _look(
    check: Check,
    sections: dict[str, Any],
    place: Path,
    folder: Path,
    guide: Path | None,
    *,
    force: bool,
    measure: bool,
) -> None:
    """Each section by itself as far as it goes, then what holds them together."""
    base, label = sections["base"], sections["label"]
    tasks = _try(check, "[prompts]", lambda: read_tasks(sections["prompts"]), sections["prompts"])
    oracle = _try(check, "[oracle]", lambda: _load_oracle(sections["oracle"]), sections["oracle"])
    outline = _try(check, "[base]", lambda: Outline.read(base), base)
    if tasks is not None and tasks.seen:
        check.notes.append("evaluation uses prompts of training: there are none to hold out")
    if oracle is not None and tasks is not None:
        with _blaming(check, "[oracle]"):
            _require_conditions(oracle, tasks)
    if oracle is not None and base is not None and sections["generate"] is not None:
        with _blaming(check, "[generate]"):
            sections["generate"].ends(oracle, base.completion)
    if outline is not None and tasks is not None:
        with _blaming(check, "[prompts]"):
            _require_room(outline, base, tasks)
    if guide is not None and base is not None:
        with _blaming(check, str(guide)):
            require_guide_of(guide, base)
    _check_training(check, sections)
    if sections["generate"] is not None:
        with _blaming(check, "[generate]"):
            _require_guidance(sections["generate"])
    if check.problems or tasks is None or oracle is None or outline is None:
        return
    study = Study(folder=place, **sections)
    prefixes = _asks_prefixes(label, oracle)
    with _blaming(check, "[guide]"):
        outline.require_guide(study.guide, oracle, tasks.conditions, base.length_limit, prefixes=prefixes)
    if not force:
        with _blaming(check, str(folder)):
            _require_same_stages(study, folder)
    if not check.problems:
        with _blaming(check, "[base]"):
            speed = measure_drawing(load_base(base), tasks.training, study.draw) if measure else None
            check.estimate = estimate(study, tasks, oracle, outline, prefixes=prefixes, speed=speed)
    if check.estimate is not None:
        with _blaming(check, str(folder)):
            _require_space(check.estimate, folder)


@contextmanager
def _blaming(check: Check, where: str) -> Iterator[None]:
    try:
        yield
    except NadoError as error:
        check.problems.append(Problem(where, error))


def _try(check: Check, where: str, make: Callable[[], Any], config: Any) -> Any:
    """What `make` gives, or None when it fails or there is nothing to make it from."""
    found = None
    if config is not None:
        with _blaming(check, where):
            found = make()
    return found


def _load_oracle(table: dict[str, Any]) -> Oracle:
    try:
        return load_oracle(table)
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, NadoError):
            raise
        raise InputError(
            "an oracle that can be made", f"{type(error).__name__}: {error}", "Mend it."
        ) from error


def _asks_prefixes(label: LabelConfig, oracle: Oracle) -> bool:
    return oracle.cheap if label.prefixes == "auto" else label.prefixes


def _require_conditions(oracle: Oracle, tasks: Tasks) -> None:
    """Every condition must be one the oracle understands; it is asked about an empty text, too."""
    try:
        for condition in tasks.conditions:
            oracle.progress_names(condition)
        oracle(tasks.conditions[:8], [""] * len(tasks.conditions[:8]))
    except NadoError:
        raise
    except Exception as error:
        raise OracleError(
            f"an answer from the oracle {oracle.name} about the empty text",
            f"{type(error).__name__}: {error}",
            "Mend it: a base may write nothing at all, and every text begins with it.",
        ) from error


def _require_room(outline: Outline, base: BaseConfig, tasks: Tasks) -> None:
    room = outline.prompt_room(base.length_limit)
    if room is None:
        return
    if room < 1:
        raise InputError(
            f"length_limit below the {room + base.length_limit} tokens that the base reads at most",
            f"{base.length_limit}",
            "Lower length_limit: prompt and text have to fit together.",
        )
    prompts = list(dict.fromkeys(each.prompt for each in [*tasks.training, *tasks.held_out]))
    long = [(length, prompt) for prompt, length in outline.lengths(prompts, chat=base.chat) if length > room]
    if long:
        length, prompt = max(long)
        raise InputError(
            f"prompts of at most {room} tokens",
            f"{len(long)} longer ones, the longest {length} tokens, beginning {prompt[:40]!r}",
            "Shorten them, or lower length_limit.",
        )


def require_guide_of(folder: Path, base: BaseConfig) -> None:
    """Refuse a guide that was trained for another base, as far as its files tell."""
    if not (folder / "config.json").is_file():
        raise InputError(f"a guide in {folder}", "no config.json there", "Give a guide's folder.")
    config = read_json(folder / "config.json")
    for name in ("length_limit", "completion"):
        if config.get(name) != getattr(base, name):
            raise MismatchError(
                f"a guide with {name.replace('_', ' ')} {getattr(base, name)}",
                f"{config.get(name)}",
                f"Set {name} = {config.get(name)!r} in [base], or train another guide.",
            )
    saved = read_json(folder / "base.json").get("digest") if (folder / "base.json").exists() else None
    mine = digest_base(base)
    if saved is not None and saved != mine:
        names = [name for name in mine if saved.get(name) != mine[name]]
        raise MismatchError(
            f"a guide of the base {base.name}",
            f"one of another base, which differs in {', '.join(names)}",
            "Name the base it was trained for, or train another guide.",
        )


def _check_training(check: Check, sections: dict[str, Any]) -> None:
    train, data = sections["train"], sections["data"]
    if train is not None:
        from nado.trackers import require_trackers

        with _blaming(check, "[train]"):
            require_trackers(train.trackers)
    if train is not None and data is not None and train.patience and not data.held_out:
        error = InputError(
            "held-out texts, which patience needs", "held_out 0 in [data]", "Try held_out = 0.1."
        )
        check.problems.append(Problem("[train]", error))
    if train is not None and train.warm_up:
        check.notes.append("warm_up fixes only the shape of R: rates and calibration will mean nothing")
        if sections["generate"] is not None:
            check.problems += _unscaled(sections["generate"])


def _unscaled(generate: GenerateConfig) -> list[Problem]:
    """What a guide that was only warmed up will be refused for, once it is trained."""
    asked = {
        'search = "beam"': generate.search == "beam",
        "doubt": generate.doubt > 0,
        "a target_rate below 1": generate.target_rate < 1,
    }
    found = "warm_up = true in [train], which leaves R known up to a factor at every prefix"
    instead = "Train without warm_up ([rounds] can begin with one: warm_up_steps)"
    return [
        Problem(
            "[generate]",
            InputError(
                f"a guide whose R is a probability, for {name}", found, f"{instead}, or leave {name} out."
            ),
        )
        for name, wanted in asked.items()
        if wanted
    ]


def _require_guidance(generate: GenerateConfig) -> None:
    """Refuse what the guided model would refuse, once it is trained."""
    from nado.beam_search import require_searchable

    guidance = generate.guidance()
    if generate.search == "beam":
        require_searchable(guidance)


def _require_same_stages(study: Study, folder: Path) -> None:
    from nado.study.running import Run
    from nado.study.stages import refuse_changed

    refuse_changed(Run(study, folder).stages())


def _require_space(found: Estimate, folder: Path) -> None:
    there = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < found.disk_bytes:
        raise StorageError(
            f"{describe_bytes(found.disk_bytes)} free at {there}",
            describe_bytes(free),
            "Free some space, choose another --folder, or draw fewer texts.",
        )
