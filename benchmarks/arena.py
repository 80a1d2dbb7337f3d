"""One-shot compression under one protocol: ours and the ideas of its peers, on and off the calibration text.

    python benchmarks/arena_texts.py DATA TEXTS
    python benchmarks/arena.py tokenize MODEL TOKENS.npz train=TEXTS/train.txt valid=... test=... other=...
    python benchmarks/arena.py run MODEL TOKENS.npz OUT.json --removed 0.2,0.3 --rows svd-llm,ours --refine 250

MODEL is a folder that `from_pretrained` loads, or one with a GGUF file. Perplexity is per token of the model's own
tokenizer on the first `--windows` windows of each of `--texts`, each from its second token on. Every row has the same
number of parameters, up to one component of each matrix. `--calibrate` names texts of TOKENS.npz, each of which gives
equally many windows; `generated` is what `arena.py generate MODEL TOKENS.npz` adds to it, text of the model's own.
`--seeds` are calibration samples. `--polish STEPS` trains the whole small model on the calibration windows towards the
dense model's answers, `--heal STEPS` by `rankwise heal` on the file `--text`. `arena_queue.py` runs many of these.

Peers (`arena_peers.py`) are written from their papers: SVD-LLM (whitening, the same share everywhere), ASVD (inputs
scaled by the square root of their mean size, the same share), ZS-SVD (whitening, signed first-order loss, one choice of
components over the model that keeps the sum of the loss changes near zero), AA-SVD (inputs of the compressed model,
outputs of the dense one, the same share, then blocks refined by their plain squared error).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from arena_peers import asvd, zs_svd
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.documents import SpecialTokens
from rankwise.distill import Distillation, distillation_loss
from rankwise.hf.generated import generated
from rankwise.oneshot import Refinement, Smoothing

EVEN: dict[str, Any] = {"layout": "pair", "embeddings": False, "target": "cpu", "loss": None, "ranks": "even"}
ROWS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "svd-llm": ("SVD whitened by calibration data, the same share of every layer", EVEN),
    "asvd": ("SVD with inputs scaled by their mean size, the same share of every layer", None),
    "zs-svd": ("whitened SVD, components over the whole model by the first-order change of the loss", None),
    "aa-svd": (
        "whitened SVD towards the dense model's outputs, the same share of every layer",
        {**EVEN, "anchor": True},
    ),
    "ours": ("ours, pivot layout: ranks by what the model's answers lose, word table included", {"target": "size"}),
    "ours-anchored": ("the same, towards the dense model's outputs", {"target": "size", "anchor": True}),
    "ours-pairs": ("ours, pairs", {"target": "cpu"}),
    "ours-gpu": ("ours, pairs whose ranks are fast on a GPU", {"target": "cuda"}),
}
Texts = Mapping[str, Tensor]
MOST_LOSS_WINDOWS = 1024
"""Of the calibration windows, those by which the loss weighs errors."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all rows share."""

    texts: tuple[str, ...] = ("test", "other")
    """Perplexity is measured on these."""
    windows: int = 64
    length: int = 512
    bos: int | None = None
    """A token before every window."""
    device: str = "cpu"

    def begun(self, window: Tensor) -> Tensor:
        return window if self.bos is None else torch.cat([window.new_tensor([self.bos]), window])

    def room(self, length: int) -> int:
        """Tokens of a window without BOS."""
        return length - (self.bos is not None)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How a row is made."""

    name: str
    removed: float
    seed: int = 0
    calibrate: str = "train"
    """Texts of which each gives equally many calibration windows, joined by "+"; twice as many if named twice."""
    calibration_windows: int = 256
    calibration_length: int = 256
    smoothing: str = ""
    """Of inputs, outputs and words (`Smoothing`), as "0.1,0,1"."""
    rank_multiple: int | None = None
    refine: int = 0
    refine_lr: float = Refinement.learning_rate
    polish: int = 0
    polish_lr: float = 1e-4
    heal: int = 0
    heal_generated: bool = False
    """Whether it is healed once more, at the same rate, with text that the dense model generates beside the file."""

    @property
    def settings(self) -> dict[str, Any]:
        """Those that are not the default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(type(self), name, None)}


def load(folder: Path, device: str) -> Any:
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    given: dict[str, Any] = {"gguf_file": gguf.name} if gguf else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.use_cache = False
    return model.to(device).eval()


def read_tokens(path: Path) -> dict[str, Tensor]:
    """The texts of a file, and what the model generated, which is beside it."""
    beside = path.with_suffix(".generated.npz")
    files = [path, *([beside] if beside.exists() else [])]
    return {name: torch.from_numpy(text).long() for file in files for name, text in np.load(file).items()}


def calibration(texts: Texts, cell: Cell, protocol: Protocol) -> Tensor:
    """Windows of the texts, mixed: at equal distances from a place that the seed decides, or whole generated ones."""
    names, length = cell.calibrate.split("+"), protocol.room(cell.calibration_length)
    found: list[Tensor] = []
    for name, times in Counter(names).items():
        text, number = texts[name], times * cell.calibration_windows // len(names)
        if text.dim() == 2:
            found += text[(torch.arange(number) + cell.seed * number) % len(text), :length]
        else:
            step = len(text) // number
            start = cell.seed * 977 % max(step - length, 1)
            found += [text[i * step + start :][:length] for i in range(number)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.stack([protocol.begun(found[i]) for i in (order if len(set(names)) > 1 else range(len(found)))])


def batches(windows: Tensor, words: int, device: str, most_logits: int = 2**30) -> list[dict[str, Tensor]]:
    most = max(1, min(16, most_logits // (words * windows.shape[1])))
    return [{"input_ids": part.to(device)} for part in windows.split(most)]


@torch.no_grad()
def perplexity(model: Any, text: Tensor, protocol: Protocol) -> float:
    """Of the first windows, each from its second token on."""
    length = protocol.room(protocol.length)
    number = min(len(text) // length, protocol.windows)
    windows = torch.stack([protocol.begun(window) for window in text[: number * length].view(number, length)])
    total = 0.0
    for batch in batches(windows, model.config.get_text_config().vocab_size, protocol.device, 2**27):
        logits = model(**batch).logits[:, :-1].float().flatten(0, 1)
        total += F.cross_entropy(logits, batch["input_ids"][:, 1:].flatten(), reduction="sum").item()
    return math.exp(min(total / (number * (protocol.length - 1)), 700))


def measured(model: Any, texts: Texts, protocol: Protocol) -> dict[str, float]:
    return {name: perplexity(model, texts[name], protocol) for name in protocol.texts}


def compressed(cell: Cell, model: Any, windows: Tensor, device: str) -> Any:
    words = model.config.get_text_config().vocab_size
    data = batches(windows, words, device)
    refinement = Refinement(steps=cell.refine, learning_rate=cell.refine_lr, seed=cell.seed)
    settings = ROWS[cell.name][1]
    if settings is None:
        return {"asvd": asvd, "zs-svd": zs_svd}[cell.name](model, cell.removed, data, refinement)
    shares = map(float, cell.smoothing.split(",")) if cell.smoothing else ()
    smoothing = Smoothing(**dict(zip(("inputs", "outputs", "words"), shares, strict=bool(cell.smoothing))))
    return rw.compress(
        model,
        rw.Budget(removed=cell.removed),
        data,
        # logits with gradients take several times their memory, and twice the time
        loss_batches=batches(windows[:MOST_LOSS_WINDOWS], words, device, 2**28),
        refinement=refinement,
        smoothing=smoothing,
        rank_multiple=cell.rank_multiple,
        **settings,
    )


def polish(small: Any, dense: Any, windows: Tensor, cell: Cell, device: str) -> None:
    """AdamW on the calibration windows, towards the dense model's answers; a cosine to zero."""
    loss = distillation_loss(dense, Distillation(labels=0, hidden=0, temperature=1))
    optimizer = torch.optim.AdamW(small.parameters(), lr=cell.polish_lr, weight_decay=0.0, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(cell.seed)
    words = small.config.get_text_config().vocab_size
    cuda = device.startswith("cuda")
    for step in range(cell.polish):
        for group in optimizer.param_groups:
            rise, fall = min(1, (step + 1) / 20), 0.5 * (1 + math.cos(math.pi * step / cell.polish))
            group["lr"] = cell.polish_lr * rise * fall
        chosen = windows[torch.randint(len(windows), (16,), generator=generator)]
        parts = batches(chosen, words, device, 2**29)
        for batch in parts:
            with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16, enabled=cuda):
                (loss(small, batch) / len(parts)).backward()
        nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def heal(
    small: Any, dense: Path, text: Path, steps: int, device: str, *, own: bool = False, lr: float | None = None
) -> tuple[Any, dict[str, Any]]:
    """By `rankwise heal`: the healed model, and what was done."""
    from rankwise.hf import save_pretrained
    from rankwise.hf.loading import load_model
    from rankwise.lab.experiments.healing import heal_folder

    with TemporaryDirectory() as place:
        tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
        save_pretrained(small, f"{place}/small", tokenizer=tokenizer)
        kind: Any = "auto" if device.startswith("cuda") else "cpu"
        how: Any = {"steps": steps, "generated": own, "device": kind, "lr": lr}
        done = heal_folder(f"{place}/small", dense, [text], f"{place}/healed", **how)
        healed: Any = load_model(f"{place}/healed")
    about = {
        "lr": done.lr,
        "rates": done.rates,
        "steps": done.steps,
        "tokens": done.tokens,
        "seconds": round(done.seconds, 1),
    }
    return healed.float().to(device).eval(), about


def row(cell: Cell, model: Any, folder: Path, texts: Texts, protocol: Protocol, text: Path | None) -> dict[str, Any]:
    """Size, seconds, memory and perplexity of a row, and those of the polished or healed model."""
    cuda = protocol.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    windows = calibration(texts, cell, protocol)
    # it may have been a teacher before
    model.requires_grad_(True)
    start = time.perf_counter()
    small = compressed(cell, model, windows, protocol.device)
    if cuda:
        torch.cuda.synchronize()
    made: dict[str, Any] = {**cell.settings, "seed": cell.seed, "parameters": rw.count(small)}
    made["seconds"] = round(time.perf_counter() - start, 1)
    made["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1) if cuda else None
    made |= measured(small, texts, protocol)
    # training takes longer, and may be stopped
    print(json.dumps(made), flush=True)
    if cell.polish:
        start = time.perf_counter()
        polish(small, model, windows, cell, protocol.device)
        made["polished"] = measured(small, texts, protocol)
        made["polished"]["seconds"] = round(time.perf_counter() - start, 1)
    lr = None
    for name, asked in {"healed": cell.heal, "healed, generated": cell.heal_generated}.items():
        if asked:
            assert text is not None
            healed, about = heal(small, folder, text, cell.heal, protocol.device, own=name != "healed", lr=lr)
            made[name] = {**measured(healed, texts, protocol), **about}
            lr = about["lr"]
    return made


def new_record(folder: Path, protocol: Protocol, settings: Mapping[str, Any], dense: Mapping[str, Any]) -> Any:
    split = "test" if "test" in protocol.texts else protocol.texts[0]
    return {
        "name": "arena",
        "model": folder.name,
        "settings": {"split": split, **asdict(protocol), **settings},
        "dense": dense,
        "rows": [],
        "date": date.today().isoformat(),
        "hardware": harness.hardware(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rankwise": rw.__version__,
        "commit": harness.commit(),
    }


def run(options: argparse.Namespace) -> None:
    texts = read_tokens(options.tokens)
    model = load(options.model, options.device)
    names = ("windows", "length", "bos", "device")
    protocol = Protocol(texts=tuple(options.texts.split(",")), **{name: getattr(options, name) for name in names})
    fields = ("calibrate", "calibration_windows", "calibration_length", "smoothing", "rank_multiple", "refine")
    fields += ("refine_lr", "polish", "polish_lr", "heal")
    settings = {name: getattr(options, name) for name in fields}
    dense = {"parameters": rw.count(model), **measured(model, texts, protocol)}
    record = new_record(options.model, protocol, settings, dense)
    print("dense", dense, flush=True)
    every = product(options.seeds.split(","), options.removed.split(","), options.rows.split(","))
    for seed, removed, name in every:
        cell = Cell(name=name, removed=float(removed), seed=int(seed), **settings)
        record["rows"].append(made := row(cell, model, options.model, texts, protocol, options.text))
        print({name: made[name] for name in ("polished", "healed") if name in made}, flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def tokenize(model: Path, out: Path, texts: Sequence[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    found = {}
    for text in texts:
        name, file = text.split("=", 1)
        whole = Path(file).read_text(encoding="utf-8")
        # a tokenizer takes long for one long text
        parts = [whole[i : i + 1_000_000] for i in range(0, len(whole), 1_000_000)]
        ids = [i for part in parts for i in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]]
        found[name] = np.array(ids, dtype=np.int32)
        print(name, len(ids))
    np.savez_compressed(out, **found)


def generate(folder: Path, tokens: Path, number: int, length: int, device: str) -> None:
    """Windows that the model generates from BOS on, without it."""
    model = load(folder, device)
    first = SpecialTokens((int(model.config.bos_token_id),))
    found = {"generated": generated(model, number, length + 1, first)[:, 1:].int().numpy()}
    # whole or not at all: other processes wait for it
    unfinished = tokens.with_suffix(".unfinished.npz")
    np.savez_compressed(unfinished, **found)
    unfinished.replace(tokens.with_suffix(".generated.npz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    device = {"default": "cuda" if torch.cuda.is_available() else "cpu"}
    one = commands.add_parser("tokenize")
    one.add_argument("model", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("texts", nargs="+", metavar="NAME=FILE")
    two = commands.add_parser("generate")
    two.add_argument("model", type=Path)
    two.add_argument("tokens", type=Path)
    two.add_argument("--number", type=int, default=1024)
    two.add_argument("--length", type=int, default=256)
    two.add_argument("--device", **device)
    three = commands.add_parser("run")
    three.add_argument("model", type=Path)
    three.add_argument("tokens", type=Path)
    three.add_argument("out", type=Path)
    three.add_argument("--removed", default="0.2,0.3,0.4")
    three.add_argument("--rows", default=",".join(ROWS))
    three.add_argument("--seeds", default="0")
    three.add_argument("--texts", default="test,other")
    three.add_argument("--windows", type=int, default=64)
    three.add_argument("--length", type=int, default=512)
    three.add_argument("--bos", type=int, help="a token before every window")
    three.add_argument("--text", type=Path, help="the file that a model is healed with")
    three.add_argument("--device", **device)
    for name in ("calibration-windows", "calibration-length", "refine", "polish", "heal", "rank-multiple"):
        three.add_argument(f"--{name}", type=int, default=getattr(Cell, name.replace("-", "_")))
    for name in ("refine-lr", "polish-lr"):
        three.add_argument(f"--{name}", type=float, default=getattr(Cell, name.replace("-", "_")))
    for name in ("calibrate", "smoothing"):
        three.add_argument(f"--{name}", default=getattr(Cell, name))
    options = parser.parse_args()
    if options.command == "tokenize":
        tokenize(options.model, options.out, options.texts)
    elif options.command == "generate":
        generate(options.model, options.tokens, options.number, options.length, options.device)
    else:
        run(options)


if __name__ == "__main__":
    main()
