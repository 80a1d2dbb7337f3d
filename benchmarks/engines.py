"""Our defaults on every engine that we name, in one table: `python benchmarks/engines.py results/engines.json`.

A decoder of the width of Qwen3-0.6B and an encoder of the width of BERT-base, a layer of each, with random weights
whose singular values fall as those of trained ones do. Each is compressed by `rankwise.compress` with the defaults for
the target of an engine, 20, 30 and 50% of its matrices removed, and runs beside the dense one in the same engine and
precision, in turns: one token, and a batch. The table has how many times faster the small model is by the medians, the
spread of that ratio over rounds (20% to 80%), and whether the command that meets the engine prints a line because the
small model is slower. The goal: nothing is slower than 0.97x without such a line.

    torch     float32, `rankwise compress`             onnx, openvino            float32, `rankwise export --dense`
    bfloat16  `rankwise.deploy.bfloat16`, `bench`      onnx-int8, openvino-int8  8-bit matrices, `rankwise export`
    int8      `rankwise.deploy.int8`, `bench`          cuda, graph               bfloat16, `compress` and `bench`

The file keeps every engine and model as it is finished, with hardware, versions and commit. The same command goes on
from there, `--engines torch,onnx` measures only these, `--again` measures them anew. `--page docs/deploy.md`
writes its table into that page. `--toy` is a dry run with tiny models, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from harness import interleaved, spread
from models import draw_falling
from torch import nn

import rankwise as rw
from rankwise.core.budget import SizeReport
from rankwise.deploy import bfloat16, example_inputs, fuse_layers, int8
from rankwise.deploy.bench import engine
from rankwise.deploy.compressed import Compressed
from rankwise.deploy.export import FORMATS
from rankwise.deploy.quantize import can_multiply_bfloat16
from rankwise.files import write_json
from rankwise.kernels.int8 import can_multiply_bytes
from rankwise.lab.report.tables import Table
from rankwise.measure import TOLERATED, slower_than_dense
from rankwise.surroundings import surroundings
from rankwise.swap import copied

GOAL = 1 / TOLERATED
REMOVED = (0.2, 0.3, 0.5)
WORDS = 4096
"""Few, so that what is timed is the layers that are compressed."""
SHAPES: dict[str, dict[str, Any]] = {
    "decoder": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
}
TOY: dict[str, dict[str, Any]] = {
    "decoder": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "encoder": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4},
}
KINDS = {
    "decoder": (hf.Qwen3Config, hf.AutoModelForCausalLM),
    "encoder": (hf.BertConfig, hf.AutoModelForMaskedLM),
}
ENGINES = {
    "torch": "cpu",
    "bfloat16": "cpu",
    "int8": "cpu",
    "onnx": "onnx",
    "onnx-int8": "onnx",
    "openvino": "openvino",
    "openvino-int8": "openvino",
    "cuda": "cuda",
    "graph": "cuda",
}
"""The target whose defaults each engine is measured with."""
MARKS = ("<!-- engines -->", "<!-- /engines -->")
WORDS_FOR = {
    "torch": "PyTorch, CPU, float32",
    "bfloat16": "PyTorch, CPU, bfloat16",
    "int8": "PyTorch, CPU, int8",
    "onnx": "ONNX Runtime, float32",
    "onnx-int8": "ONNX Runtime, int8",
    "openvino": "OpenVINO, float32",
    "openvino-int8": "OpenVINO, int8",
    "cuda": "PyTorch, GPU, bfloat16",
    "graph": "CUDA graph, bfloat16",
}
Run = Callable[[dict[str, Any]], object]
"""A model in an engine, called with inputs by name."""


def build(kind: str, layers: int, *, toy: bool) -> nn.Module:
    """A dense model whose matrices have falling singular values."""
    torch.manual_seed(0)
    config, auto = KINDS[kind]
    shape = (TOY if toy else SHAPES)[kind]
    settings = {"num_hidden_layers": layers, "vocab_size": WORDS, "use_cache": False}
    model: nn.Module = auto.from_config(config(**shape, **settings))
    draw_falling(model)
    return model.eval()


def missing(name: str) -> str | None:
    """Why an engine cannot be measured here."""
    if ENGINES[name] == "cuda":
        return None if torch.cuda.is_available() else "there is no GPU"
    if name == "bfloat16" and not can_multiply_bfloat16():
        return "this processor has no instructions for bfloat16"
    if name == "int8" and not can_multiply_bytes():
        return "this processor has no instructions for int8"
    if ENGINES[name] in FORMATS:
        made = FORMATS[ENGINES[name]]
        packages = [*made.packages, *((made.int8_packages or ()) if name.endswith("int8") else ())]
        absent = [package for package in packages if find_spec(package) is None]
        return f"{' and '.join(absent)} must be installed" if absent else None
    return None


def prepared(name: str, model: nn.Module, folder: Path, tokens: int) -> Run:
    """A model in an engine. A GPU gets a copy in bfloat16 with layers fused that read the same input."""
    if ENGINES[name] in FORMATS:
        made = FORMATS[ENGINES[name]]
        int8_matrices = name.endswith("int8")
        # random weights give logits near zero, of which rounding changes a larger share than of a trained model's
        tolerance = 0.5 if int8_matrices else None
        made.export(model, example_inputs(model, 2, 16), folder, int8=int8_matrices, tolerance=tolerance)
        run = made.load(folder)
        return lambda inputs: run(**inputs)
    if ENGINES[name] == "cuda":
        model = fuse_layers(copied(model).to("cuda", torch.bfloat16))
    elif name in ("bfloat16", "int8"):
        model = {"bfloat16": bfloat16, "int8": int8}[name](model, tokens=tokens)

    @torch.inference_mode()
    def call(inputs: dict[str, Any]) -> object:
        return model(**inputs)

    return call


def call_of(name: str, run: Run, inputs: dict[str, Any]) -> Callable[[], object]:
    """What is timed: `run` on inputs that are where they are needed, for "graph" replayed as a CUDA graph."""
    if ENGINES[name] == "cuda":
        # without a mask, which transformers would look at from the host
        inputs = {"input_ids": inputs["input_ids"].cuda()}
    if name != "graph":
        return lambda: run(inputs)

    class Whole(nn.Module):
        def forward(self, *given: torch.Tensor) -> object:
            return run(dict(zip(inputs, given, strict=True)))

    return engine("graph", "cuda").prepare(Whole(), tuple(inputs.values()))


def printed(name: str, tokens: int, dense: float, small: float, size: SizeReport) -> str | None:
    """The line that a user gets from the command that meets this engine; times in milliseconds."""
    if name in ("torch", "cuda"):
        lines = Compressed(**vars(size), speed={tokens: (dense, small)}, device=name).remarks()
        return lines[0] if lines else None
    return slower_than_dense(f"The model in {name}", small, dense)


def measure(name: str, models: dict[float, nn.Module], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of an engine and a kind of model; `models` by the share removed, 0 for dense."""
    runs: dict[float, Run] = {}
    for batch, length in ((1, 1), (options.batch, options.length)):
        inputs = example_inputs(models[0.0], batch, length)
        # which pairs are worth two products in 8 or 16 bits depends on the number of tokens
        if not runs or name in ("bfloat16", "int8"):
            with tempfile.TemporaryDirectory() as scratch:
                for removed, model in models.items():
                    runs[removed] = prepared(name, model, Path(scratch) / str(removed), batch * length)
        calls = {str(removed): call_of(name, run, inputs) for removed, run in runs.items()}
        times = interleaved(calls, options.repeats)
        before = times.pop("0.0")
        for removed, taken in zip(REMOVED, times.values(), strict=True):
            ratios = spread([one / other for one, other in zip(before, taken, strict=True)])
            dense_ms, small_ms = (1000 * statistics.median(each) for each in (before, taken))
            dense_size, size = rw.count(models[0.0]), rw.count(models[removed])
            report = SizeReport(dense=dense_size, budget=size, expected=size, exported=size, prunable=dense_size)
            yield {
                "removed": removed, "batch": batch, "length": length, "parameters": size,
                "dense_ms": dense_ms, "small_ms": small_ms, "p20": ratios["p20"], "p80": ratios["p80"],
                "line": printed(name, batch * length, dense_ms, small_ms, report),
            }  # fmt: skip


def speed(row: Mapping[str, Any]) -> float:
    """How many times faster than dense."""
    return float(row["dense_ms"] / row["small_ms"])


def is_silent(row: Mapping[str, Any]) -> bool:
    """Whether a row misses the goal: slower than it, and no line says so."""
    return speed(row) < GOAL and row["line"] is None


def table(record: Mapping[str, Any]) -> Table:
    """Every engine, model and number of tokens; a dagger where a line is printed because the small model is slower."""
    shares = sorted({row["removed"] for part in record["parts"] for row in part["rows"]})
    rows = []
    for part in sorted(record["parts"], key=lambda part: (list(ENGINES).index(part["engine"]), part["model"])):
        cases = dict.fromkeys((row["batch"], row["length"]) for row in part["rows"])
        for batch, length in cases:
            found = {row["removed"]: row for row in part["rows"] if (row["batch"], row["length"]) == (batch, length)}
            dense = statistics.median(row["dense_ms"] for row in found.values())
            cells = [
                f"{speed(row):.2f}x{'' if speed(row) >= GOAL else ' SILENT' if is_silent(row) else ' †'}"
                for row in (found[share] for share in shares)
            ]
            tokens = "one" if batch * length == 1 else f"{batch} x {length}"
            rows.append((WORDS_FOR[part["engine"]], part["model"], tokens, f"{dense:.2f}", *cells))
    columns = ("engine", "model", "tokens", "dense ms", *(f"{share:.0%} removed" for share in shares))
    return Table(columns, tuple(rows), tuple(dict.fromkeys(map(_where, record["parts"]))))


def _where(part: Mapping[str, Any]) -> str:
    """Where a part was measured, for a note below the table."""
    hardware, settings = part["hardware"], part["settings"]
    place = hardware["device"] if part["engine"] in ("cuda", "graph") else f"{hardware['processor']}, CPU"
    threads = "" if part["engine"] in ("cuda", "graph") else f", {settings['threads']} threads"
    return f"{place}{threads}; torch {part['versions']['torch']}; medians of {settings['repeats']} rounds."


def shown(page: str, text: str) -> str:
    """The page with `text` between its marks."""
    before, rest = page.split(f"{MARKS[0]}\n")
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="the file of all measurements, such as results/engines.json")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--page", type=Path, help="write the table of the file into this page, and measure nothing")
    parser.add_argument("--toy", action="store_true", help="a dry run with tiny models")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    for name in options.engines:
        if name not in ENGINES:
            parser.error(f"an engine must be one of {', '.join(ENGINES)}, but is {name!r}")
    return options


def main() -> None:
    options = parse()
    record = json.loads(options.record.read_text()) if options.record.exists() else {"name": "engines", "parts": []}
    if options.page is not None:
        options.page.write_text(shown(options.page.read_text(), table(record).markdown()))
        return
    torch.set_num_threads(options.threads)
    able = [name for name in options.engines if missing(name) is None]
    for name in options.engines:
        if name not in able:
            print(f"Not measured: {name}, because {missing(name)}.", flush=True)
    settings = {key: getattr(options, key) for key in ("layers", "batch", "length", "repeats", "threads", "toy")}
    for kind in options.kinds.split(","):
        models: dict[str, dict[float, nn.Module]] = {}
        for name in able:
            own = {"engine": name, "model": kind, "settings": settings}
            if not options.again and any(own.items() <= part.items() for part in record["parts"]):
                print(f"Measured before: {name}, {kind}.", flush=True)
                continue
            target = ENGINES[name]
            if target not in models:
                dense = build(kind, options.layers, toy=options.toy)
                budgets = {removed: rw.Budget(removed=removed, of="prunable") for removed in REMOVED}
                small = {r: rw.compress(dense, budget, target=target).eval() for r, budget in budgets.items()}
                models = {target: {0.0: dense, **small}}
            rows = list(measure(name, models[target], options))
            device = torch.device("cuda" if target == "cuda" else "cpu")
            part = {**own, "rows": rows, "measured": date.today().isoformat(), **surroundings(device)}
            others = [each for each in record["parts"] if (each["engine"], each["model"]) != (name, kind)]
            record["parts"] = [*others, part]
            write_json(options.record, record)
            print(table({"parts": [part]}).markdown(), flush=True)
    number = sum(is_silent(row) for part in record["parts"] for row in part["rows"])
    print(f"\nSlower than {GOAL:.2f}x without a line: {number} of the cases in {options.record}.")


if __name__ == "__main__":
    main()
