"""From an experiment to a table: a dense base, then every method from the same base, each exported and evaluated.

Every part is kept as it is finished, so the same call again goes on where it was stopped. The validation text chooses
among checkpoints; the test text is read once per exported model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.deploy.architectures import build
from rankwise.deploy.load import load
from rankwise.deploy.save import save
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.data.text import Progress
from rankwise.lab.data.windows import Windows
from rankwise.lab.experiments.arms import FORMAT, VERSION, Arm, Watcher
from rankwise.lab.experiments.at_once import compress_at_once
from rankwise.lab.experiments.books import analysis, sizes
from rankwise.lab.experiments.config import Experiment
from rankwise.lab.experiments.fields import to_json
from rankwise.lab.experiments.folder import (
    BASE,
    EXPERIMENT,
    EXPORT,
    MODEL,
    RECORD,
    VOCABULARY,
    check_part,
    check_vocabulary,
    claim,
    has_models,
    is_of,
    read_vocabulary,
    write,
    write_experiment,
)
from rankwise.lab.experiments.latency import FILE as LATENCY
from rankwise.lab.experiments.latency import Latency, find_latency
from rankwise.lab.experiments.outline import outline
from rankwise.lab.experiments.parts import of_arm, of_base
from rankwise.lab.training import TrainingConfig, fit
from rankwise.lab.training.accelerator import check_trackers
from rankwise.lab.training.evaluate import Quality, evaluate
from rankwise.lab.training.language import LanguageModel
from rankwise.lab.training.records import FORMAT as TRAINED
from rankwise.lab.training.records import surroundings
from rankwise.measure import Timing, time_together
from rankwise.methods.svd import Svd
from rankwise.pruner import Pruner

CONTROL = "dense"
"""The arm that trains the base on, with nothing removed."""
REPEATS = 30
"""Of every model, when they are timed."""


@dataclass(frozen=True, eq=False)
class Stage:
    """What all parts of an experiment share."""

    corpus: Corpus
    folder: Path
    watcher: Watcher
    trackers: Sequence[str]


def run_arms(
    experiment: Experiment,
    arms: Sequence[Arm[Experiment]],
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Several methods from the base of one experiment."""
    path = Path(folder)
    finished = claim(path, FORMAT)
    wanted = [arm.name for arm in arms]
    described = describe(experiment)
    stage = _begin(experiment, path, watcher, trackers)
    if (
        finished is not None
        and is_of(finished, described, wanted, stage.corpus.fingerprint)
        and has_models(path, finished["rows"], EXPERIMENT, VOCABULARY)
    ):
        return finished
    latency = _latency(stage, experiment, path)
    if latency is not None:
        arms = [Arm(arm.name, latency.applied(arm.experiment)) for arm in arms]
    for arm in arms:
        _check(arm.experiment, stage.corpus)
        if arm.name == CONTROL and arm.experiment.training.distill:
            raise RankwiseError("`training.distill` must be 0 with the method dense: it is the teacher. Leave it out.")
    taught = any(arm.experiment.training.distill for arm in arms)
    control = [Arm(CONTROL, experiment.with_method("dense"))] if taught else []
    _check_parts(stage, experiment, [*control, *arms])
    _announce(experiment, path, latency)
    base = None if experiment.base is None else _train_base(stage, experiment)
    first = _train_teacher(stage, experiment, path / BASE) if taught else base
    rows = [] if first is None or any(arm.name == CONTROL for arm in arms) else [first]
    teacher = path / CONTROL / MODEL if taught else None
    # an arm without a base starts from fresh weights, beside those that share one
    rows += [_run_arm(stage, arm, None if arm.experiment.base is None else path / BASE, teacher) for arm in arms]
    rows.sort(key=lambda row: row["method"] != "dense")
    stage.watcher.phase("timing")
    device = device_of(experiment.training)
    _add_timings(rows, path, stage.corpus, experiment.training.window, device)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "name": experiment.name,
        "seed": experiment.seed,
        "experiment": described,
        "arms": wanted,
        "corpus": stage.corpus.record(),
        "base": base,
        "rows": rows,
        **({} if latency is None else {"latency": latency.record()}),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **surroundings(device),
    }
    write_experiment(path, experiment)
    write(path / RECORD, record)
    return record


def describe(experiment: Experiment) -> dict[str, Any]:
    """An experiment as its record has it: where the corpus lies on this machine is no part of it."""
    portable = replace(experiment, corpus=replace(experiment.corpus, data=None, cache=None))
    described: dict[str, Any] = json.loads(json.dumps(to_json(portable)))
    return described


def train(
    experiment: Experiment,
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """The dense base alone, in `folder`/base; its row."""
    if experiment.base is None:
        raise CheckpointError(
            f"{experiment.name} starts from fresh weights, so it has no base to train. "
            "Run it whole, with `rankwise run`."
        )
    path = Path(folder)
    claim(path, FORMAT)
    stage = _begin(experiment, path, watcher, trackers)
    latency = _latency(stage, experiment, path)
    _check(experiment if latency is None else latency.applied(experiment), stage.corpus)
    _check_parts(stage, experiment, [])
    _announce(experiment, path, latency)
    return _train_base(stage, experiment)


def prune(
    experiment: Experiment,
    base: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    watcher: Watcher | None = None,
    trackers: Sequence[str] = (),
    read: Callable[[Progress], Corpus] | None = None,
) -> dict[str, Any]:
    """Prune the base that was trained in the folder `base`; the row of the model in `folder`.

    `read` gives the corpus, where it is not to be read as the experiment says.
    """
    path, base = Path(folder), Path(base)
    claim(path, TRAINED)
    vocabulary = read_vocabulary(base)
    if vocabulary is None or not (base / MODEL).is_dir():
        raise CheckpointError(
            f"A base must be trained before it is pruned, but there is no model in {base}. Run `rankwise train` first."
        )
    stage = _begin(experiment, path.parent, watcher, trackers, read)
    check_vocabulary(stage.corpus, vocabulary)
    latency = _latency(stage, experiment, path)
    experiment = experiment if latency is None else latency.applied(experiment)
    _check(experiment, stage.corpus)
    taught = experiment.training.distill > 0
    check_part(path, of_arm(experiment, base, stage.corpus))
    if taught:
        check_part(path / CONTROL, of_arm(experiment.with_method("dense"), base, stage.corpus))
    if latency is not None:
        write(path / LATENCY, latency.record())
    if taught:
        _train_teacher(replace(stage, folder=path), experiment, base)
    return _run_arm(stage, Arm(path.name, experiment), base, path / CONTROL / MODEL if taught else None)


def device_of(config: TrainingConfig) -> torch.device:
    """Where a model is evaluated and timed: as it was trained."""
    return torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu")


def quality_of(model: nn.Module, corpus: Corpus, split: str, config: TrainingConfig) -> Quality:
    """Quality of an exported model on a split: in float32, its products on a GPU in TF32."""
    language = LanguageModel(model.to(device_of(config)))
    return evaluate(language, config.evaluation(getattr(corpus, split)), corpus.unit)


def _begin(
    experiment: Experiment,
    folder: Path,
    watcher: Watcher | None,
    trackers: Sequence[str],
    read: Callable[[Progress], Corpus] | None = None,
) -> Stage:
    check_trackers(trackers)
    watcher = watcher or Watcher()
    watcher.phase(f"reading {experiment.corpus.name}")
    return Stage((read or experiment.corpus.load)(watcher.read), folder, watcher, trackers)


def _latency(stage: Stage, experiment: Experiment, folder: Path) -> Latency | None:
    """The size for a time, where the budget is one: of a fresh dense model, which is as fast as a trained one."""
    if experiment.budget is None or experiment.budget.latency_ms is None:
        return None
    stage.watcher.phase(f"finding the size for {experiment.budget.latency_ms:g} ms")
    device = device_of(experiment.training)
    model = build(replace(experiment.model, num_words=len(stage.corpus.vocabulary))).to(device)
    inputs = {"tokens_BT": _one_window(stage.corpus, experiment.training.window, device)}
    return find_latency(experiment, model, experiment.plan(model), inputs, folder)


def _announce(experiment: Experiment, folder: Path, latency: Latency | None) -> None:
    """Say what will be run, unless an earlier run has: another one may yet be refused."""
    if not (folder / EXPERIMENT).exists():
        write_experiment(folder, experiment)
    if latency is not None:
        write(folder / LATENCY, latency.record())


def _check(experiment: Experiment, corpus: Corpus) -> None:
    """Refuse what would fail after hours of training: a budget out of reach, a text shorter than a window."""
    outline(replace(experiment, model=replace(experiment.model, num_words=len(corpus.vocabulary))))
    for phase in (experiment.base, experiment.training):
        if phase is not None:
            Windows(corpus.train, batch=phase.batch_size, unroll=phase.window)
            phase.evaluation(corpus.valid)
            phase.evaluation(corpus.test)


def _check_parts(stage: Stage, experiment: Experiment, arms: Sequence[Arm[Experiment]]) -> None:
    """Refuse a folder whose base or arms were made otherwise, before any of them is trained."""
    base = stage.folder / BASE
    if experiment.base is not None:
        check_part(base, of_base(experiment, stage.corpus))
    for arm in arms:
        of = of_arm(arm.experiment, None if arm.experiment.base is None else base, stage.corpus)
        check_part(stage.folder / arm.name, of)


def _train_base(stage: Stage, experiment: Experiment) -> dict[str, Any]:
    config = experiment.base_training
    assert config is not None

    def make() -> nn.Module:
        torch.manual_seed(experiment.seed)
        return build(replace(experiment.model, num_words=len(stage.corpus.vocabulary)))

    stage.watcher.phase("training the dense model")
    of = of_base(experiment, stage.corpus)
    return _finish(stage, Arm(BASE, experiment.with_method("dense")), of, config, make, None)


def _train_teacher(stage: Stage, experiment: Experiment, base: Path) -> dict[str, Any]:
    """The dense control, trained on from the base as long as those whom it teaches; its row."""
    return _run_arm(stage, Arm(CONTROL, experiment.with_method("dense")), base)


def _run_arm(stage: Stage, arm: Arm[Experiment], base: Path | None, teacher: Path | None = None) -> dict[str, Any]:
    experiment, corpus = arm.experiment, stage.corpus

    def make() -> nn.Module:
        torch.manual_seed(experiment.seed)
        config = replace(experiment.pruned_model, num_words=len(corpus.vocabulary))
        if base is None:
            return build(config)
        with torch.device("meta"):
            skeleton = build(config)
        return load(base / MODEL, skeleton)

    def gate(model: nn.Module) -> Pruner:
        assert experiment.budget is not None
        plan = experiment.plan(model)
        return Pruner(
            model, experiment.budget, experiment.method, plan=plan, init=experiment.init, seed=experiment.seed
        )

    def compressed() -> nn.Module:
        stage.watcher.phase(f"compressing for {arm.name}")
        small = compress_at_once(experiment, make().to(device_of(experiment.training)), corpus.train)
        stage.watcher.phase(f"training {arm.name}")
        return small

    of, config = of_arm(experiment, base, corpus), experiment.pruning_training
    teacher = teacher if config.distill else None
    if base is not None and isinstance(experiment.method, Svd):
        return _finish(stage, arm, of, config, compressed, None, teacher)
    dense = experiment.method.name == "dense"
    stage.watcher.phase("training the dense model on" if dense else f"pruning with {arm.name}")
    return _finish(stage, arm, of, config, make, None if dense else gate, teacher)


def _finish(
    stage: Stage,
    arm: Arm[Experiment],
    of: dict[str, Any],
    config: TrainingConfig,
    make: Callable[[], nn.Module],
    gate: Callable[[nn.Module], Pruner] | None,
    teacher: Path | None = None,
) -> dict[str, Any]:
    """Train, export and evaluate one model, unless that is done already; its row of the table."""
    corpus, folder = stage.corpus, stage.folder / arm.name
    done = check_part(folder, of)
    if done is not None and has_models(stage.folder, [done["row"]], EXPERIMENT, VOCABULARY):
        row: dict[str, Any] = done["row"]
        return row
    outcome = fit(
        make(),
        corpus,
        config,
        folder,
        pruner=gate,
        teacher=None if teacher is None else load(teacher),
        about=of["about"],
        trackers=stage.trackers,
        progress=stage.watcher,
    )
    stage.watcher.phase(f"evaluating {arm.name}")
    small = outcome.model if outcome.pruner is None else outcome.pruner.compact()
    small = small.eval()
    save(small, folder / MODEL, overwrite=True)
    write(folder / VOCABULARY, corpus.vocabulary.to_json())
    write_experiment(folder, arm.experiment, corpus.fingerprint)
    row = {
        "name": arm.name,
        "method": arm.experiment.method.name,
        "dropout": arm.experiment.pruned_model.dropout,
        **sizes(arm.experiment, outcome, small, len(corpus.vocabulary)),
        "valid": quality_of(small, corpus, "valid", config).record(),
        "test": quality_of(small, corpus, "test", config).record(),
        "steps": config.steps,
        "tokens": outcome.record["tokens"],
        "seconds": outcome.record["seconds"],
        "folder": arm.name,
        **analysis(arm.experiment, outcome, small, len(corpus.vocabulary)),
    }
    write(folder / EXPORT, {"of": of, "row": row})
    return row


def _add_timings(rows: list[dict[str, Any]], folder: Path, corpus: Corpus, window: int, device: torch.device) -> None:
    """Milliseconds for one window of text, batch 1, and how much faster than the first row that is."""
    models = {row["folder"]: load(folder / row["folder"] / MODEL).to(device).eval() for row in rows}
    tokens = _one_window(corpus, window, device)

    def call(model: nn.Module) -> Callable[[], object]:
        @torch.inference_mode()
        def forward() -> object:
            return model(tokens)

        return forward

    timings = time_together({name: call(m) for name, m in models.items()}, repeats=REPEATS, device=device)
    first: Timing = timings[rows[0]["folder"]]
    for row in rows:
        timing = timings[row["folder"]]
        row["milliseconds"] = asdict(timing)
        row["speedup"] = first.median / timing.median


def _one_window(corpus: Corpus, window: int, device: torch.device) -> Tensor:
    """What models are timed on."""
    return torch.from_numpy(corpus.valid[: min(window, len(corpus.valid))].astype("int64"))[None].to(device)
