"""The processes (ranks) that train one model together: what they exchange, and what only the first of them does.

Every rank has a copy of the model, takes its share of every batch, and gradients are averaged. The first rank decides
what depends on files, evaluates, writes and prints; the others wait for its messages, however long they take. Ranks
are started by `torchrun`, `accelerate launch` or anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
or by `torch.distributed.init_process_group` before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rankwise.core.distributed import DistributedGroup, check_same, checksum
from rankwise.errors import InvalidValueError, RankwiseError, first_line
from rankwise.lab.training.watchdog import STORE_TIMEOUT, Watchdog
from rankwise.pruner import Pruner

BUCKET = 2**24
"""Numbers that are averaged by one call."""
LONGEST_DELAY = timedelta(hours=1)
"""How far a living rank may be behind the others, such as one that still downloads its data."""
LONGEST_NAP = 0.2
"""Seconds between two looks of a rank that waits for the first one."""
OTHER_SCHEMES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
"""What `accelerate launch` may be asked for beside plain data parallelism."""

T = TypeVar("T")


class FirstRankError(RankwiseError):
    """The first rank, which the others wait for, has failed; with the message of its error."""


class Ranks:
    """The ranks of this run, as one of them sees them. Alone, a rank does everything itself and waits for nobody."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._messages = self._depth = self._calls = 0
        if self.count == 1:
            return
        # on the host, also where the default group is one of GPUs
        self._host = dist.new_group(backend="gloo", timeout=LONGEST_DELAY)
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = [0]
        if self.is_first:
            self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
            port = [self._store.port]
        dist.broadcast_object_list(port, 0, group=self._host, device=torch.device("cpu"))
        if not self.is_first:
            self._store = TCPStore(address, port[0], is_master=False, timeout=STORE_TIMEOUT)
        self.watchdog = Watchdog(self._store, self.rank, self.count)
        self.watchdog.start()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_led(self) -> bool:
        """Whether the ranks are inside `together` already."""
        return self._depth > 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, a rank that dies ends all of them, and an error of the first rank reaches those that wait for it."""
        if self.count == 1:
            yield
            return
        self._calls += self._depth == 0
        self._depth += 1
        self.watchdog.judges = True
        try:
            yield
        except BaseException as error:
            if self._depth == 1 and self.is_first:
                self._store.set(f"ended/{self._calls}", _described(error))
            raise
        finally:
            self._depth -= 1
            self.watchdog.judges = self._depth > 0

    # messages of the first rank

    def first(self, function: Callable[[], T], signal: Callable[[], int | None] = lambda: None) -> T:
        """What a function returns on the first rank, for all; if it fails there, the others get a `FirstRankError`.

        `signal` gives the signal by which a waiting rank was asked to stop; the function learns of it by `signalled`.
        """
        if self.count == 1:
            return function()
        if not self.is_first:
            found: T = self.hear(signal)
            return found
        try:
            value = function()
        except BaseException as error:
            self._store.set(f"message/{self._messages}", _described(error))
            self._messages += 1
            raise
        self.tell(value)
        return value

    def tell(self, value: object) -> None:
        """Send the others a value, which they receive by `hear`."""
        self._store.set(f"message/{self._messages}", "")
        self._exchange([value])

    def signalled(self) -> int | None:
        """The signal by which a rank that waits for this one was asked to stop."""
        key = f"signal/{self._messages}"
        return int(self._store.get(key)) if self.count > 1 and self._store.check([key]) else None

    def hear(self, signal: Callable[[], int | None] = lambda: None) -> Any:
        """The next value that the first rank tells, however long that takes; `signal` as in `first`."""
        message, end, nap = f"message/{self._messages}", f"ended/{self._calls}", 1e-3
        with ranks_alive():
            while not self._store.check([message]):
                if self._store.check([end]):
                    # its last message comes before its end, but perhaps after the first look
                    message = message if self._store.check([message]) else end
                    break
                if (number := signal()) is not None:
                    self._store.set(f"signal/{self._messages}", str(number))
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)
            said = self._store.get(message)
        if not said:
            (value,) = self._exchange([None])
            return value
        self._messages += message != end
        failure = json.loads(said)
        if failure["interrupted"]:
            raise KeyboardInterrupt(failure["message"])
        raise FirstRankError(failure["message"])

    def _exchange(self, value: list[Any]) -> list[Any]:
        self._messages += 1
        with ranks_alive():
            dist.broadcast_object_list(value, 0, group=self._host, device=torch.device("cpu"))
        return value

    # numbers

    def largest(self, value: int) -> int:
        """The largest of a number of each rank; no rank goes on before all have come here."""
        if self.count == 1:
            return value
        found = torch.tensor([value])
        with ranks_alive():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._host)
        return int(found)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of each rank, all of one shape, on the host."""
        own = tensor.detach().cpu().contiguous()
        if self.count == 1:
            return [own]
        found = [torch.empty_like(own) for _ in range(self.count)]
        with ranks_alive():
            dist.all_gather(found, own, group=self._host)
        return found

    def share(self, number: int) -> range:
        """The places of this rank's share of so many rows, in order."""
        return range(number * self.rank // self.count, number * (self.rank + 1) // self.count)

    def rows(self, batch: Mapping[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], float]:
        """This rank's rows of a batch on its device, and how much their mean counts in the mean of all ranks.

        The last batch of an epoch may have no row for a rank, which then takes one that does not count.
        """
        number = len(next(iter(batch.values())))
        places = self.share(number)
        rows = slice(places.start, places.stop) if places else slice(0, 1)
        own = {name: tensor[rows].to(device) for name, tensor in batch.items()}
        return own, len(places) * self.count / number

    def seed(self, seed: int, step: int = 0) -> int:
        """A seed of this rank's own, so that ranks draw other numbers; that of the first is the seed itself."""
        return (seed + self.rank * 0x9E3779B97F4A7C15 + (step << 20 if self.rank else 0)) % 2**63

    # models

    def send_model(self, model: nn.Module) -> None:
        """Give all ranks the weights and buffers of the first; refuse models of different layers."""
        if self.count == 1:
            return
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        layout = torch.tensor([ord(c) for c in repr([(name, tuple(t.shape)) for name, t in tensors.items()])])
        check_same("arguments", [int(each) for each in self.gather(torch.tensor(checksum(layout)))])
        for tensor in tensors.values():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            with ranks_alive():
                dist.broadcast(flat, 0)
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))

    def join_pruner(self, pruner: Pruner) -> None:
        """Let a pruner average the gradients of its gates over all ranks."""
        if self.count > 1:
            pruner.controller.distributed = DistributedGroup(dist.group.WORLD)

    def average(self, parameters: Iterable[nn.Parameter], numbers: Tensor) -> None:
        """Average the gradients of parameters over all ranks, and further numbers, in place.

        Where only some ranks have a gradient of a parameter, that of the others is 0; where none has, there is none.
        """
        if self.count == 1:
            return
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        missing = [place for place, parameter in enumerate(trained) if parameter.grad is None]
        for place in missing:
            trained[place].grad = torch.zeros_like(trained[place])
        has_grad = numbers.new_ones(len(trained))
        if missing:
            has_grad[missing] = 0
        for bucket in _buckets([numbers, has_grad, *(p.grad for p in trained if p.grad is not None)]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with ranks_alive():
                dist.all_reduce(flat)
            flat /= self.count
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])
        for place in missing:
            if not has_grad[place]:
                trained[place].grad = None

    # the end

    def may_report(self) -> bool:
        """Whether this rank is the first to fail, and so the one that prints its error; the others end too."""
        return self.count == 1 or self.watchdog.fail()

    def leave(self, code: int) -> None:
        """Leave the other ranks; after an error, end this process, so that they do not wait for it."""
        if self.count == 1:
            return
        self.watchdog.leave()
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        dist.destroy_process_group()


def _described(error: BaseException) -> str:
    """An error of the first rank, for those who wait for it."""
    interrupted, message = isinstance(error, KeyboardInterrupt), str(error) or type(error).__name__
    return json.dumps({"interrupted": interrupted, "message": message})


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, and of so many numbers together that one call pays."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    yield bucket


@contextmanager
def ranks_alive() -> Iterator[None]:
    """Turn the failure of a call among ranks into an error that says what to do."""
    try:
        yield
    except RuntimeError as error:
        raise RankwiseError(
            "All processes of a run must go on together, but one of them has ended or cannot be reached. "
            "Start the same command again: it goes on from the last checkpoint."
        ) from error


_JOINED: list[Ranks] = []
"""The ranks that this process has found itself among."""


def has_joined() -> bool:
    """Whether this process has joined others."""
    return bool(_JOINED) and _JOINED[-1].count > 1


def own_ranks() -> Ranks:
    """The ranks that this process was started with, joined when this is first called; itself, if it is alone."""
    if has_joined():
        return _JOINED[-1]
    launched = _launched("WORLD_SIZE", 1)
    if dist.is_available() and not dist.is_initialized() and launched > 1:
        _join(launched)
    if not _JOINED or dist.is_initialized():
        _JOINED[:] = [Ranks()]
    return _JOINED[-1]


def _launched(name: str, usual: int) -> int:
    """A number that a launcher sets in the environment."""
    text = os.environ.get(name) or str(usual)
    if not text.isdecimal():
        raise RankwiseError(
            f"{name} must be a whole number, as launchers set it, but is {text!r} instead. Start the processes by "
            "`torchrun`, or unset it for one process."
        )
    return int(text)


def _join(launched: int) -> None:
    for scheme in OTHER_SCHEMES:
        if os.environ.get(f"ACCELERATE_USE_{scheme}", "false").lower() in ("true", "1"):
            raise RankwiseError(
                f"`rankwise run` trains a whole copy of the model on every GPU, but {scheme} was asked for. Start it "
                "without, or use your own loop, in which a Pruner works with FSDP2 (docs/scaling.md)."
            )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RankwiseError(
            f"A launcher must set RANK, MASTER_ADDR and MASTER_PORT for {launched} processes (WORLD_SIZE), but "
            f"{', '.join(missing)} is not set. Start them by `torchrun`, or unset WORLD_SIZE for one process."
        )
    local = _launched("LOCAL_RANK", 0)
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    # `torchrun` keeps the store itself, and all the addresses of processes that it has restarted since
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keeps_store = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(address, int(port), launched, keeps_store, timeout=STORE_TIMEOUT)
        own = PrefixStore(f"rankwise/{restarts}", store)
        dist.init_process_group(store=own, rank=int(rank), world_size=launched)
    except (RuntimeError, ValueError) as error:
        raise RankwiseError(
            f"{launched} processes must find each other at {address}:{port}, but did not: "
            f"{first_line(error)} Start all of them, by `torchrun` or another launcher."
        ) from error


def check_share(ranks: Ranks, batch_size: int, accumulate: int, device: torch.device) -> None:
    """Refuse a batch that cannot be shared out, and GPUs that are fewer than the processes of this machine."""
    if ranks.count == 1:
        return
    if batch_size % (ranks.count * accumulate):
        parts = f"{ranks.count} processes" + (f" x {accumulate} parts (`accumulate`)" if accumulate > 1 else "")
        raise InvalidValueError(
            f"`batch_size` counts the streams or examples of all processes together, so it must be a multiple of "
            f"{parts}, but is {batch_size} instead. Change it, or the number of processes."
        )
    here, gpus = _launched("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if device.type == "cuda" and here > gpus:
        raise RankwiseError(
            f"Every process needs a GPU of its own, but {here} were started on a machine with {gpus}. "
            f"Start {gpus}, or set `device` to cpu."
        )


def refuse_several(what: str) -> None:
    """Refuse to do in several processes what only one can do."""
    count = dist.get_world_size() if dist.is_initialized() else _launched("WORLD_SIZE", 1)
    if count > 1:
        raise RankwiseError(f"{what} must run in one process, but was started in {count}. Start it without a launcher.")
