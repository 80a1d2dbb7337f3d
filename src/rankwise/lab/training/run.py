"""The state of a run, and its moves: one step, one evaluation, one checkpoint. `loop.py` says when."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rankwise.errors import CheckpointError, InvalidValueError, RankwiseError
from rankwise.kernels.device import HAS_TRITON
from rankwise.lab.data.corpus import Corpus
from rankwise.lab.data.windows import Evaluation, Windows
from rankwise.lab.kernels.adamw import ClippedAdamW
from rankwise.lab.training.accelerator import make_accelerator
from rankwise.lab.training.batches import BatchMemory, parts_of
from rankwise.lab.training.checkpoint import Checkpoint, Checkpoints, check_same
from rankwise.lab.training.config import TrainingConfig, binding
from rankwise.lab.training.evaluate import Quality, evaluate
from rankwise.lab.training.graph import StepGraph
from rankwise.lab.training.histograms import gate_histograms
from rankwise.lab.training.language import LanguageModel, State, Words, carry, shape_of
from rankwise.lab.training.records import RunFolder
from rankwise.lab.training.resume import (
    load_optimizer,
    load_random,
    load_states,
    optimizer_tensors,
    random_tensors,
    state_tensors,
)
from rankwise.lab.training.teacher import Teacher, distillation_loss
from rankwise.pruner import Pruner

MakePruner: TypeAlias = Callable[[nn.Module], Pruner]


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation of a model of the size asked for."""

    step: int
    loss: float


class Run:
    """A model in training."""

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        config: TrainingConfig,
        folder: str | os.PathLike[str],
        pruner: Pruner | MakePruner | None,
        about: Mapping[str, Any],
        trackers: Sequence[str],
        teacher: nn.Module | None = None,
    ) -> None:
        if isinstance(pruner, Pruner) and (config.dense_steps or pruner.model is not model):
            raise InvalidValueError(
                "A `pruner` must have gated `model` already, and then `dense_steps` must be 0. "
                "Pass a function that makes the pruner instead: it is called when pruning begins."
            )
        if pruner is None and config.dense_steps:
            raise InvalidValueError(f"`dense_steps` must be 0 without a `pruner`, but is {config.dense_steps} instead.")
        if teacher is model:
            raise InvalidValueError(
                "`teacher` must be another module than `model`, which is trained. Pass a copy of it."
            )
        if (teacher is None) != (config.distill == 0):
            raise InvalidValueError(
                f"A `teacher` goes with a share of the loss in `distill`, but that is {config.distill:g} "
                f"{'without one' if teacher is None else 'with one'}. Give both, or neither."
            )
        self.windows = Windows(corpus.train, batch=config.batch_size, unroll=config.window, seed=config.seed)
        self.valid = config.evaluation(corpus.valid)
        as_evaluated = len(Evaluation(corpus.valid, unroll=config.window))
        self.reset_every = as_evaluated if config.reset_every is None else config.reset_every
        self.model, self.corpus, self.config = model, corpus, config
        self.folder = RunFolder(folder)
        self.checkpoints = Checkpoints(self.folder.path / "checkpoints", config.keep)
        self.accelerator = make_accelerator(config, self.folder.path, trackers)
        self.device: torch.device = self.accelerator.device
        # not by `prepare_model`, which would turn the states that are carried into float32
        self.language = LanguageModel(model).to(self.device)
        self.teacher = None if teacher is None else Teacher(teacher, self.device, num_parts=config.accumulate)
        self.make_pruner: MakePruner | None = None if pruner is None or isinstance(pruner, Pruner) else pruner
        self.pruner = pruner if isinstance(pruner, Pruner) else None
        # as JSON gives it back: a tuple is a list there
        settings = {"training": dataclasses.asdict(config), "about": about, "corpus": corpus.fingerprint}
        self.configuration: dict[str, Any] = json.loads(json.dumps({**settings, "prunes": pruner is not None}))
        self.step = 0
        self.pending = False
        """Whether the evaluation and the metrics of `step` are still to be done."""
        self.best: Best | None = None
        self.seconds = 0.0
        self.states: list[State | None] = [None] * config.accumulate
        self.optimizer = self._make_optimizer()
        self.parts: Sequence[tuple[Words, Words]] = ()
        """Of the batch of this step."""
        self.memory: BatchMemory | None = None
        self.graph = self._make_graph()
        self.gate_grads: dict[nn.Module, Tensor | None] = {}
        self.sums = torch.zeros(2, device=self.device)
        """Losses and gradient norms since the last line of metrics."""
        self.logged = 0
        """The step of that line."""
        if self.pruner is not None:
            self._warn_if_too_short(self.pruner)

    @property
    def pruning(self) -> bool:
        return self.pruner is not None

    def begin_pruning(self) -> None:
        """Where the dense phase ends, gate the model; its new parameters get a new optimizer."""
        if self.make_pruner is None or self.pruner is not None:
            return
        self.pruner = self.make_pruner(self.model)
        if self.pruner.model is not self.model:
            raise RankwiseError("`pruner` must gate the model that it is called with, but gated another one.")
        self.optimizer = self._make_optimizer()
        if self.graph is not None:
            self.graph.forget()
            self.graph = self._make_graph()
        self._warn_if_too_short(self.pruner)

    def _warn_if_too_short(self, pruner: Pruner) -> None:
        remaining = self.config.steps - self.config.dense_steps
        if pruner.steps + remaining < pruner.controller.anneal_steps:
            warnings.warn(
                f"pruning has only {remaining} steps, and its target does not reach the budget in them: no evaluation "
                "is of the size asked for. Raise `steps` or lower `anneal_steps`.",
                stacklevel=5,
            )

    def train_step(self) -> None:
        """One optimizer step on one batch, in `accumulate` parts that carry a state each."""
        self._set_lr(self.config.lr_at(self.step + 1, pruning=self.pruning))
        if not self.language.training:
            self.language.train()
        self._reset_states()
        batch = self.windows.at(self.step)
        if self.graph is None:
            self.parts = parts_of(batch, self.config.accumulate)
            self._move_weights()
        else:
            self.parts = self._fill_memory(batch)
            self._move_weights_by_graph(self.graph)
        if self.pruner is not None:
            self.pruner.step()
        self.step += 1
        self.pending = True

    def _reset_states(self) -> None:
        """Let the streams whose turn it is begin anew, in the memory that a graph knows."""
        every, size = self.reset_every, self.config.batch_size
        if not every:
            return
        turn = self.step % every
        for stream in range(-(-turn * size // every), -(-(turn + 1) * size // every)):
            part, row = divmod(stream, size // self.config.accumulate)
            self.language.empty(self.states[part], row)
            if self.teacher is not None:
                self.teacher.language.empty(self.teacher.states[part], row)

    def _move_weights(self) -> None:
        """Gradients of all `parts`, clipped, and a step of the optimizer. States that are carried keep their memory."""
        config, num_parts = self.config, self.config.accumulate
        self.optimizer.zero_grad()
        for i, (x, y) in enumerate(self.parts):
            with self.accelerator.autocast():
                if self.teacher is None:
                    loss, state = self.language(x, y, self.states[i])
                    on_text = loss.detach()
                else:
                    assert isinstance(x, Tensor) and isinstance(y, Tensor)
                    logits_BTV, state = self.language.logits(x, self.states[i])
                    loss, on_text = distillation_loss(logits_BTV, self.teacher.logits(x, i), y, config.distill)
            self.accelerator.backward(loss / num_parts)
            self.states[i] = carry(self.states[i], state)
            self.sums[0] += on_text / num_parts
        if config.clip is None:
            self.optimizer.step()
        elif isinstance(self.optimizer, ClippedAdamW):
            self.sums[1] += self.optimizer.clipped_step(config.clip)
        else:
            self.sums[1] += self.accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
            self.optimizer.step()

    def _move_weights_by_graph(self, graph: StepGraph) -> None:
        controller = None if self.pruner is None else self.pruner.controller
        carried = self.states if self.teacher is None else [*self.states, *self.teacher.states]
        shapes = tuple(shape_of(state) for state in carried)
        replayed = graph.run((shapes, None if controller is None else controller.mask_signature()))
        if not replayed:
            self.gate_grads.clear()
        elif controller is not None:
            for gate in controller.gates:
                if gate.z is not None:
                    # taken away by every step of the pruner, and written to by the graph where it first lay
                    gate.z.grad = self.gate_grads.setdefault(gate, gate.z.grad)

    def training_metrics(self) -> dict[str, Any]:
        """Means since the last line, and how large the model is."""
        num_steps = self.step - self.logged
        loss, norm = (self.finite_sums() / num_steps).tolist()
        mean = Quality(loss=loss, num_targets=num_steps * self.windows.tokens_per_step, unit=self.corpus.unit)
        line: dict[str, Any] = {"loss": loss, mean.measure: mean.value}
        line["lr"] = self.config.lr_at(self.step, pruning=self.pruning)
        if self.config.clip is not None:
            line["gradient_norm"] = norm
        if self.pruner is not None:
            line["target_size"] = self.pruner.controller.target_size()
            line["expected_size"] = self.pruner.controller.expected_size()
            line |= gate_histograms(self.pruner, self.config.steps, self.logged - self.config.dense_steps)
        return line

    def forget_sums(self) -> None:
        """Begin new means."""
        self.sums.zero_()
        self.logged = self.step

    def finite_sums(self) -> Tensor:
        """The sums, if training is still sound."""
        self._check_finite(float(self.sums.sum()))
        return self.sums

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise RankwiseError(
                f"The loss must stay finite, but is not any more at step {self.step}. Lower `lr`, set `clip`, or "
                f"raise `warmup_steps`; the checkpoints in {self.checkpoints.folder} are from before."
            )

    def evaluate(self, check: Callable[[], None]) -> Quality:
        """Quality on the validation text, of what would be exported now."""
        with self.accelerator.autocast():
            quality = evaluate(self.language, self.valid, self.corpus.unit, check=check)
        self._check_finite(quality.loss)
        return quality

    def is_new_best(self, quality: Quality) -> bool:
        """Take note of an evaluation; it counts only once the target has reached the budget."""
        if self.pruner is None:
            at_size = self.make_pruner is None
        else:
            at_size = self.pruner.controller.target_size() <= self.pruner.limit
        if not at_size or not (self.best is None or quality.loss < self.best.loss):
            return False
        self.best = Best(self.step, quality.loss)
        return True

    def save(self) -> None:
        """Write a checkpoint of now."""
        self.finite_sums()
        training = {**optimizer_tensors(self.optimizer), **state_tensors(self.states), **random_tensors(self.device)}
        training["sums"] = self.sums
        if self.teacher is not None:
            training |= state_tensors(self.teacher.states, "teacher")
        about = {
            "configuration": self.configuration,
            "pruner": self.describe_pruner(),
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "logged": self.logged,
            "seconds": self.seconds,
        }
        checkpoint = Checkpoint(self.step, not self.pending, dict(self.model.state_dict()), training, about)
        self.checkpoints.save(checkpoint, None if self.best is None else self.best.step)

    def restore(self) -> bool:
        """Go on from the last checkpoint, if there is one of this very run."""
        self.checkpoints.sweep()
        for checkpoint in self.checkpoints.latest_first():
            about = checkpoint.about
            check_same(binding(about["configuration"]), binding(self.configuration), self.folder.path)
            if self.checkpoints.has_best(checkpoint):
                break
            self.checkpoints.remove(checkpoint)
        else:
            torch.manual_seed(self.config.seed)
            return False
        if about["pruner"] is not None:
            with warnings.catch_warnings():
                # what was said when pruning began need not be said again
                warnings.simplefilter("ignore")
                self.begin_pruning()
        check_same({"pruner": about["pruner"]}, {"pruner": self.describe_pruner()}, self.folder.path)
        self.load_model(checkpoint)
        load_optimizer(self.optimizer, checkpoint.training)
        self.states = load_states(checkpoint.training, self.config.accumulate, self.device)
        if self.teacher is not None:
            self.teacher.states = load_states(checkpoint.training, self.config.accumulate, self.device, "teacher")
        self.sums.copy_(checkpoint.training["sums"])
        self.step, self.pending = checkpoint.step, not checkpoint.evaluated
        self.logged, self.seconds = about["logged"], about["seconds"]
        self.best = None if about["best"] is None else Best(**about["best"])
        # last: making a pruner may draw numbers
        load_random(checkpoint.training, self.device)
        return True

    def load_model(self, checkpoint: Checkpoint) -> None:
        """Take weights, gates and multipliers from a checkpoint."""
        try:
            self.model.load_state_dict(checkpoint.model)
        except RuntimeError as error:
            detail = " ".join(str(error).split("\n")[1:2]).strip()
            raise CheckpointError(
                f"The checkpoints in {self.folder.path} must be of this model, but are of another: {detail} "
                "Choose another folder."
            ) from error

    def describe_pruner(self) -> dict[str, Any] | None:
        """What must be the same when a run goes on."""
        if self.pruner is None:
            return None
        method = self.pruner.method
        settings = json.loads(json.dumps(dataclasses.asdict(method)))
        return {"method": method.name, "parameters": self.pruner.limit, "settings": settings}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        betas, decay = self.config.betas, self.config.weight_decay
        if self.device.type != "cuda":
            return torch.optim.AdamW(self.model.parameters(), lr=self.config.lr, betas=betas, weight_decay=decay)
        # with its learning rate on the GPU, as a graph needs it
        lr = torch.tensor(self.config.lr, device=self.device)
        if HAS_TRITON:
            return ClippedAdamW(self.model.parameters(), lr, betas=betas, weight_decay=decay)
        return torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=betas, weight_decay=decay, fused=True, capturable=True
        )

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _make_graph(self) -> StepGraph | None:
        # a teacher asks for logits of all words, for which an adaptive softmax sorts them itself
        fits = self.language.has_fixed_shapes and (self.teacher is None or self.language.adaptive is None)
        return StepGraph(self._move_weights) if fits and self.device.type == "cuda" else None

    def _fill_memory(self, batch: tuple[Tensor, Tensor]) -> Sequence[tuple[Words, Words]]:
        if self.memory is None:
            steps, num_parts = self.config.steps, self.config.accumulate
            self.memory = BatchMemory(self.language, self.windows, steps=steps, num_parts=num_parts)
        self.memory.fill(batch)
        return self.memory.parts
