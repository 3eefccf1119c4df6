"""Running a study: draw, label, train, generate, evaluate, each stage in a folder of its own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nado.errors import InputError
from nado.guide import Guide
from nado.guide_files import load_guide, save_guide
from nado.oracles import load_oracle
from nado.progress import progress_bar
from nado.proposals import tempered
from nado.rounds import train_in_rounds
from nado.sample_labels import label_samples
from nado.samples import read_samples
from nado.storage import hold, read_json, write_json
from nado.study.evaluation import describe_evaluation, measure_texts
from nado.study.guides import build_guide, part_names, save_usage, train_guide, untrained_like
from nado.study.materials import Materials, digest_base, digest_prompts, draw_with, load_base
from nado.study.reading import Study
from nado.study.reporting import save_history, save_insights
from nado.study.sections import DistributedConfig, describe_section
from nado.study.stages import Stage, require_same
from nado.study.systems import Written, list_systems, read_texts, write_systems
from nado.trackers import training_bar

StageName = Literal["draw", "label", "train", "generate", "evaluate"]
STAGES: tuple[StageName, ...] = ("draw", "label", "train", "generate", "evaluate")


def run_study(
    study: Study,
    folder: str | Path,
    *,
    force: bool = False,
    until: StageName = "evaluate",
    say: Callable[[str], None] | None = None,
    distributed: DistributedConfig | None = None,
) -> dict[str, Any] | None:
    """Run a study's stages in `folder` and return its evaluation, or None where it ends before.

    Finished stages are reused and begun ones taken up. A stage that was made from another config, other
    prompts, another base or oracle is refused before anything is run, unless `force`: then it, and what
    follows from it, is made again. `distributed` goes before what the study says about who draws, labels and
    trains.
    """
    folder = Path(folder)
    run = Run(study, folder, distributed)
    stages = [stage for stage in run.stages() if STAGES.index(stage.name) <= STAGES.index(until)]
    tell = say or (lambda text: None)
    with hold(folder):
        require_same(stages, force=force)
        for stage in stages:
            standing = stage.standing()
            if standing == "finished":
                tell(f"{stage.name}: reused from {stage.folder}")
                continue
            tell(f"{stage.name}: {'taken up' if standing == 'begun' else 'begun'} in {stage.folder}")
            stage.run(run.work[stage.name])
    if until != "evaluate":
        return None
    found: dict[str, Any] = read_json(folder / "evaluate" / "evaluation.json")
    return found


class Run:
    """A study in a folder: what its stages are made from, and the work of each."""

    def __init__(self, study: Study, folder: Path, distributed: DistributedConfig | None = None) -> None:
        self.study, self.folder = study, folder
        self.distributed = distributed if distributed is not None else study.distributed
        _require_no_rounds(study, self.distributed)
        self.materials = Materials(study)
        self.work: dict[str, Callable[[], dict[str, Any]]] = {
            "draw": self.draw,
            "label": self.label,
            "train": self.train,
            "generate": self.generate,
            "evaluate": self.evaluate,
        }

    def stages(self) -> list[Stage]:
        """The stages with their digests, in order. Training in rounds draws and labels for itself."""
        study, tasks = self.study, self.materials.tasks
        source = {"base": digest_base(study.base), "prompts": digest_prompts(tasks.training)}
        oracle = self.materials.oracle.fingerprint
        stages = []
        if study.rounds is None:
            stages = [
                self._stage("draw", describe_section(study.draw), source),
                self._stage(
                    "label",
                    describe_section(study.label, "workers", "timeout", "batch_size"),
                    {"oracle": oracle},
                    owned=(self.folder / "draw" / "labels",),
                ),
            ]
            stages[1] = _after(stages[0], stages[1])
        train = self._stage(
            "train",
            self._train_config(),
            {"conditions": digest_prompts(tasks.held_out)},
            ("config.json", "oracle.json", "base.json"),
        )
        if study.rounds is not None:
            train = replace(train, inputs=train.inputs | source | {"oracle": oracle})
        generate = self._stage("generate", describe_section(study.generate), {})
        evaluate = self._stage("evaluate", describe_section(study.evaluate), {}, ("evaluation.json",))
        for stage in (train, generate, evaluate):
            stages.append(_after(stages[-1], stage) if stages else stage)
        return stages

    def _stage(
        self,
        name: str,
        config: dict[str, Any],
        inputs: dict[str, Any],
        files: tuple[str, ...] = (),
        owned: tuple[Path, ...] = (),
    ) -> Stage:
        return Stage(name, self.folder / name, config, inputs, files, owned)

    def _train_config(self) -> dict[str, Any]:
        study = self.study
        config = {f"guide.{name}": value for name, value in describe_section(study.guide).items()}
        config |= {f"data.{name}": value for name, value in describe_section(study.data).items()}
        # What is logged and how often is saved may change from one start to the next.
        config |= describe_section(study.train, "trackers", "save_every")
        if self.distributed.shares is not None:  # another order of the texts
            config["shares"] = self.distributed.shares
        if study.rounds is not None:
            config |= {f"rounds.{name}": value for name, value in describe_section(study.rounds).items()}
        return config | {"template": study.prompts.template}

    # --- the stages -----------------------------------------------------------------------------------

    def draw(self) -> dict[str, Any]:
        """Draw texts from the base."""
        config, prompts, folder = self.study.draw, self.materials.tasks.training, self.folder / "draw"
        with progress_bar("drawing") as listener:
            choices: dict[str, Any] = {
                "samples_per_prompt": config.samples_per_prompt,
                "proposal": tempered(config.proposal_temperature),
                "seed": config.seed,
                "batch_size": config.batch_size,
                "on_progress": listener,
            }
            if self.distributed.engine == "ray":
                from nado.distributed import draw_on_cluster

                load = partial(load_base, self.study.base)
                return draw_on_cluster(load, prompts, folder, self.distributed, **choices)
            draw = draw_with(self.distributed.engine, self.study.base)
            samples = draw(self.materials.base, prompts=prompts, folder=folder, **choices)
        return {"texts": len(samples), "finished": float(samples.array("finished").mean())}

    def label(self) -> dict[str, Any]:
        """Ask the oracle about every text."""
        config, folder = self.study.label, self.folder / "draw"
        prefixes = self.materials.prefixes
        with progress_bar("labelling") as listener:
            choices: dict[str, Any] = {
                "parts": config.parts,
                "timeout": config.timeout,
                "batch_size": config.batch_size,
                "on_progress": listener,
            }
            if self.distributed.engine == "ray":
                from nado.distributed import label_on_cluster
                from nado.distributed.decoding import load_decoder

                load = partial(load_oracle, self.study.oracle)
                decoder = partial(load_decoder, self.study.base) if prefixes else None
                return label_on_cluster(folder, load, self.distributed, load_decoder=decoder, **choices)
            samples = label_samples(
                folder,
                self.materials.oracle,
                model=self.materials.base if prefixes else None,
                prefixes=prefixes,
                workers=config.workers,
                **choices,
            )
        return {"texts": len(samples), "satisfied": float(samples.array("satisfied").mean())}

    def train(self) -> dict[str, Any]:
        """Train a guide on the labelled texts, or in rounds, and save it."""
        if self.distributed.in_processes:
            from nado.distributed.training import train_in_processes

            return train_in_processes(self.study, self.folder, self.distributed)
        study, folder = self.study, self.folder / "train"
        oracle, reader = self.materials.oracle, self.materials.reader
        if study.rounds is not None:
            guide = self.untrained()
            rounds = train_in_rounds(
                guide,
                reader,
                oracle,
                self.materials.tasks.training,
                folder / "rounds",
                study.rounds,
                study.train,
                prefixes=self.materials.prefixes,
            )
            save_guide(guide, folder, summary=rounds[-1].training, part_names=part_names(guide, oracle))
            save_history(folder, {f"round {each.number}": each.training.history for each in rounds})
            summary = {"rounds": [each.describe() for each in rounds]}
        else:
            samples = read_samples(self.folder / "draw")
            guide = self.untrained(float(1 - samples.array("finished").mean()))
            with training_bar(study.train.steps) as on_step:
                trained = train_guide(
                    guide, reader, oracle, samples, folder, study.data, study.train, on_step=on_step
                )
            save_history(folder, {"": trained.history})
            summary = trained.describe()
        save_usage(folder, study.base, study.oracle, study.prompts.template)
        return summary

    def untrained(self, cut_share: float = 0.0) -> Guide:
        """The guide before training."""
        return build_guide(
            self.materials.reader,
            self.materials.oracle,
            self.materials.tasks.conditions,
            self.study.guide,
            base_name=self.study.base.name,
            prefixes=self.materials.prefixes,
            cut_share=cut_share,
        )

    def generate(self) -> dict[str, Any]:
        """Let every system write about held-out prompts."""
        oracle, config = self.materials.oracle, self.study.generate
        trained = load_guide(self.folder / "train", self.materials.reader, part_names=oracle.progress_names)
        untrained = untrained_like(trained, self.study.guide.seed)
        systems = list_systems(self.materials.base, oracle, untrained, trained, config)
        prompts = self.materials.tasks.held_out[: config.prompts]
        costs = [
            cost for _, cost in write_systems(systems, prompts, config, self.folder / "generate", untrained)
        ]
        return {"systems": [system.key for system in systems], "costs": costs}

    def evaluate(self) -> dict[str, Any]:
        """Measure the texts of every system."""
        generated = read_json(self.folder / "generate" / "stage.json")["summary"]
        texts = {key: read_texts(self.folder / "generate" / f"{key}.jsonl") for key in generated["systems"]}
        rows = [
            {**cost, "measures": measure_texts(own, self.materials.base, self.study.evaluate)}
            for own, cost in zip(texts.values(), generated["costs"], strict=True)
        ]
        tasks = self.materials.tasks
        evaluation = describe_evaluation(
            self.study.base.name,
            self.materials.base,
            self.materials.oracle,
            len(tasks.held_out[: self.study.generate.prompts]),
            self.study.generate,
            rows,
            seen=tasks.seen,
        )
        write_json(self.folder / "evaluate" / "evaluation.json", evaluation)
        self._save_insights(texts)
        return {"satisfied": {row["system"]: row["measures"]["satisfied"]["value"] for row in rows}}

    def _save_insights(self, texts: dict[str, list[Written]]) -> None:
        """What the trained guide thinks of its own texts and of the base's, exact end off if it can be."""
        oracle, config = self.materials.oracle, self.study.generate
        trained = load_guide(self.folder / "train", self.materials.reader, part_names=oracle.progress_names)
        systems = list_systems(self.materials.base, oracle, trained, trained, config)
        base, guided = (
            next(each for each in systems if each.name == name) for name in ("base", "trained guide")
        )
        shown = {each.name: texts[each.key] for each in (base, guided)}
        save_insights(self.folder / "evaluate", guided.sampler(), shown, guided.name, config.seed)


def _require_no_rounds(study: Study, distributed: DistributedConfig) -> None:
    if study.rounds is not None and (distributed.engine != "local" or distributed.in_processes):
        raise InputError(
            "a study without [rounds], to run on several processes",
            "one with it",
            "Rounds draw from the guide as it is trained: run it with the engine local and one process.",
        )


def _after(earlier: Stage, stage: Stage) -> Stage:
    """A stage that is made from an earlier one."""
    return replace(stage, inputs=stage.inputs | {f"the stage {earlier.name}": earlier.digest})
