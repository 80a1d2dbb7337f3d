"""Pruning under the stock `Trainer`: one callback, nothing subclassed.

Gates, multipliers and step lie in buffers of the model, so the Trainer's own checkpoints hold them, and
`trainer.train(resume_from_checkpoint=...)` continues as if it had not been stopped.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.modeling_utils import unwrap_model

from rankwise.core.sharding import mesh_of
from rankwise.errors import InvalidTypeError, RankwiseError
from rankwise.pruner import Pruner


class PruningCallback(TrainerCallback):
    """Moves the gates of `pruner` after each step of the Trainer's optimizer, and logs the size.

    Make the pruner first, then `Trainer(model=pruner.model, callbacks=[PruningCallback(pruner)])`. Accumulated
    gradients make one step; the scale of fp16 losses is taken out. After the ramp, closed components are dropped with
    their optimizer state (`Pruner.drop_closed`), unless the model is in DDP or sharded (FSDP2). While the target size
    is still on its way down, no checkpoint counts as the best one (`load_best_model_at_end`): it would be one of a
    larger model.
    """

    def __init__(self, pruner: Pruner) -> None:
        if not isinstance(pruner, Pruner):
            raise InvalidTypeError(f"`pruner` must be a rankwise.Pruner, but is a {type(pruner).__name__} instead.")
        self.pruner = pruner
        self._scale = 1.0
        self._has_dropped = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what would fail when the Trainer prepares the model."""
        if args.deepspeed:
            raise RankwiseError("Gated models train on one device, in DDP or in FSDP2, but DeepSpeed is set. Unset it.")
        settings = getattr(args, "fsdp_plugin_args", None) or {}
        # what `accelerate launch` was configured with
        is_launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if not args.fsdp and not is_launched:
            return
        version = settings.get("fsdp_version", os.environ.get("FSDP_VERSION", "1") if is_launched else 2)
        if int(version) != 2:
            raise RankwiseError(f"Gated models are sharded by FSDP2, but FSDP{version} is set. Set `fsdp_version: 2`.")
        on_launch = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true"
        if settings.get("cpu_ram_efficient_loading", on_launch):
            raise RankwiseError(
                "Gated models have buffers, which Accelerate does not send to other ranks, but "
                "`cpu_ram_efficient_loading` is set. Set it to false, and load the model on every rank."
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse settings that would not train the pruner's model."""
        model = kwargs.get("model")
        if not isinstance(model, nn.Module) or unwrap_model(model) is not self.pruner.model:
            raise RankwiseError(
                "The Trainer must train the pruner's model, but got another one. Make the pruner first, then "
                "Trainer(model=pruner.model, ...), without `model_init`."
            )
        if args.n_gpu > 1:
            raise RankwiseError(
                f"One process must drive one GPU, but this one drives {args.n_gpu}. Start it with `torchrun` or "
                "`accelerate launch`, or set CUDA_VISIBLE_DEVICES."
            )
        self.on_init_end(args, state, control)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the loss scale of these gradients: the optimizer's step may change it."""
        scaler = getattr(kwargs.get("optimizer"), "scaler", None)
        self._scale = 1.0 if scaler is None else float(scaler.get_scale())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the gates; once they stay, drop what they closed."""
        self.pruner.step(grad_scale=self._scale)
        controller, optimizer = self.pruner.controller, kwargs.get("optimizer")
        is_wrapped = controller.distributed.is_wrapped or mesh_of(self.pruner.weight_parameters()) is not None
        if controller.has_committed and not self._has_dropped and not is_wrapped:
            self._has_dropped = True
            self.pruner.drop_closed(*([] if optimizer is None else [optimizer]))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the expected size, the target of this step and the budget, in parameters, to what is logged."""
        controller = self.pruner.controller
        sizes = {
            "expected_size": round(controller.expected_size()),
            "target_size": controller.target_size(),
            "budget": self.pruner.limit,
        }
        if logs is not None:
            logs.update(sizes)
        if state.log_history:
            state.log_history[-1].update(sizes)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let only checkpoints of the final size count as the best one."""
        if self.pruner.controller.target_size() > self.pruner.limit:
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    on_save = on_step_begin
