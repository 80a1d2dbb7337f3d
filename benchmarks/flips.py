"""Single flipped bits of models and checkpoints, and whether they are noticed. `torture.py flips` runs them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import torch
from children import Case, Outcome

import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.lab.training.checkpoint import Checkpoints


def flips(work: Path) -> Case:
    """One bit: noticed, or without meaning (white space in JSON)."""
    known = fuzz.subjects(work / "subjects")
    read: dict[str, Callable[[Path], Any]] = {
        "load sru": rw.load,
        "load mlp np-l0": lambda path: known["load mlp np-l0"].read(path),
        "from_pretrained llama": lambda path: _llama().from_pretrained(path),
        "checkpoint": lambda path: _checkpoint_of(path),
    }
    expected = {name: _state(load(known[name].folder)) for name, load in read.items()}

    def run(case: int, scratch: Path) -> Outcome:
        draw, name = random.Random(case), list(read)[case % len(read)]
        folder = scratch / "flipped" / "step-4"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(known[name].folder, folder)
        path = draw.choice(sorted(path for path in folder.iterdir() if path.name != "generation_config.json"))
        content, bit = bytearray(path.read_bytes()), draw.randrange(8 * path.stat().st_size)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        wrong, noticed = None, True
        try:
            with _warnings() as told:
                same = _same(_state(read[name](folder)), expected[name])
            noticed = bool(told)
            wrong = None if same or told else "another model, and no word"
        except RankwiseError:
            pass
        except Exception as error:
            # a configuration of transformers may be one of another library after a flip
            known_error = isinstance(error, OSError | ValueError) and name.startswith("from_pretrained")
            wrong = None if known_error else f"{type(error).__name__}: {error}"
        told_of = f"{case} {name} {path.name}, bit {bit}"
        return told_of, wrong, {"noticed": noticed}

    return run


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is said about a configuration that changed, which may be on purpose."""
    from rankwise.hf import bounds

    told: list[str] = []
    before, bounds.logger.warning = bounds.logger.warning, told.append
    try:
        yield told
    finally:
        bounds.logger.warning = before


def _llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM


def _checkpoint_of(path: Path) -> Any:
    found = Checkpoints(path.parent, keep=1).load(4)
    return {**found.model, **found.training, "about": torch.tensor(list(json.dumps(found.about).encode()))}


def _state(found: Any) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in (found if isinstance(found, dict) else found.state_dict()).items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
