"""What larger runs would take, from measured rates: `python benchmarks/scaling.py` prints docs/scaling.md's tables.

Every figure is a formula on rows of results.csv, on the shapes of models, and on the assumptions below, or stands in
results/fsdp-memory.json; nothing is run.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from rankwise.lab.experiments.presets import RAMP, preset

RESULTS = Path(__file__).parent / "results.csv"
MEMORY_RECORD = Path(__file__).parents[1] / "results" / "fsdp-memory.json"
PEAK, MEMORY, LINK = 989e12, 141e9, 450e9
"""Of one H200, by its data sheet: bf16 FLOP/s, bytes, bytes/s of NVLink each way."""
LINK_SHARE = 0.6
"""Assumed: the share of the link's speed that an all-reduce reaches."""
GPUS = 8
BATCH_7B = 16 * 2048
"""Assumed: tokens that one GPU reads in a step of the 7B model."""
RAMP_7B = 1_000
"""Assumed: steps in which it is brought to its size."""


def measured(benchmark: str, case: str) -> float:
    """The last row of a case."""
    with RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if (row["benchmark"], row["case"]) == (benchmark, case)]
    return float(rows[-1]["value"])


@dataclass(frozen=True)
class Run:
    """A published run: tokens of its dense phase, of its ramp, and after it; measured rates; parameters."""

    name: str
    dense: float
    ramp: float
    after: float
    rates: tuple[float, float]
    """Tokens per second on one GPU, dense and with a fifth of the components open."""
    parameters: int
    tokens_per_step: int

    @property
    def seconds(self) -> tuple[float, float, float]:
        """On one GPU: dense phase, ramp (taken at the dense rate), the rest."""
        dense, pruned = self.rates
        return self.dense / dense, self.ramp / dense, self.after / pruned


def runs() -> list[Run]:
    found = []
    for name, key, model in (
        ("SRU, enwik8", "enwik8-sru", "sru"),
        ("Transformer-XL, enwik8", "enwik8-transformer-xl", "transformer-xl"),
    ):
        experiment = preset(f"{key}-flop-l0-80")
        base, training = experiment.base, experiment.training
        sizes = [phase.steps * phase.batch_size * phase.window for phase in (base, training)]
        ramp = min(RAMP, training.steps) * training.batch_size * training.window
        rates = measured(f"{model} loop", "dense"), measured(f"{model} loop", "20% open")
        parameters = experiment.size_preview().parameters
        tokens = base.batch_size * base.window
        found.append(Run(name, sizes[0], ramp, sizes[1] - ramp, rates, parameters, tokens))
    return found


def all_reduce(parameters: float, bytes_each: int = 4) -> tuple[float, float]:
    """Bytes that each GPU sends in a ring all-reduce, 2 (n - 1) / n of the gradients, and its seconds."""
    sent = 2 * (GPUS - 1) / GPUS * parameters * bytes_each
    return sent, sent / (LINK_SHARE * LINK)


def full_runs() -> list[list[str]]:
    rows = [["", "tokens", "dense phase", "ramp", "after it", "one H200", "eight", "all-reduce a step", "efficiency"]]
    for run in runs():
        step = run.tokens_per_step / run.rates[0]
        sent, wait = all_reduce(run.parameters)
        efficiency = step / (step + wait)
        total = sum(run.seconds)
        rows.append(
            [
                run.name,
                f"{(run.dense + run.ramp + run.after) / 1e9:.1f}G",
                *(clock(part) for part in run.seconds),
                clock(total),
                clock(total / (GPUS * efficiency)),
                f"{sent / 1e6:.0f} MB, {1e3 * wait:.1f} of {1e3 * step:.1f} ms",
                f"{efficiency:.0%}",
            ]
        )
    return rows


@dataclass(frozen=True)
class Decoder:
    """A decoder of LLaMA's kind with 7B parameters."""

    width: int = 4096
    inner: int = 11008
    layers: int = 32
    words: int = 32_000

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return 4 * [(self.width, self.width)] + 3 * [(self.inner, self.width)]

    @property
    def dense(self) -> int:
        """In the layers."""
        return self.layers * sum(o * i for o, i in self.shapes)

    @property
    def gated(self) -> int:
        """The same as pairs of full rank."""
        return self.layers * sum(min(o, i) * (o + i) for o, i in self.shapes)

    @property
    def components(self) -> int:
        return self.layers * sum(min(shape) for shape in self.shapes)

    @property
    def head(self) -> int:
        return self.words * self.width

    @property
    def svd(self) -> int:
        """Operations of an SVD of everything, up to a constant."""
        return self.layers * sum(min(shape) ** 2 * max(shape) for shape in self.shapes)


CASES_1B = ("dense", "gated, full rank", "gated, half the ranks")
DECODER_1B = Decoder(layers=4)
"""1.07B parameters."""
TOKENS_1B = (4, 2048)
"""Tokens of one GPU in a step of it."""


def utilization() -> float:
    """The share of the card's peak that the dense SRU reaches: 6 FLOP a prunable parameter and character."""
    return 6 * preset("enwik8-sru-flop-l0-80").size_preview().prunable * measured("sru loop", "dense") / PEAK


def parts(model: Decoder, case: str, tokens: int) -> dict[str, float]:
    """Bytes that a training run holds on all GPUs together, by what for; `tokens` of each GPU in a step."""
    gated, components = model.gated, model.components
    sizes = {"dense": model.dense, "gated, full rank": gated, "gated, half the ranks": gated // 2}
    gates = {"dense": 0, "gated, full rank": components, "gated, half the ranks": components // 2}
    size = sizes[case] + 2 * model.head
    return {
        "weights, float32": 4 * size,
        "gradients, float32": 4 * size,
        "Adam's moments": 8 * size,
        # alpha, two moments, z and its gradient, on every GPU
        "gates": 20 * gates[case],
        "activations kept, one per layer, bf16": tokens * model.width * 2 * model.layers,
    }


def memory_7b() -> list[list[str]]:
    model = Decoder()
    found = [parts(model, case, BATCH_7B) for case in CASES_1B]
    rows = [["GB", *CASES_1B]]
    for name in found[0]:
        digits = 2 if name == "gates" else 0
        rows.append([name, *(f"{each[name] / 1e9:.{digits}f}" for each in found)])
    kept = found[0]["activations kept, one per layer, bf16"]
    totals = [sum(each.values()) for each in found]
    rows.append(["in all", *(f"{n / 1e9:.0f}" for n in totals)])
    rows.append(
        [f"of eight x {MEMORY / 1e9:.0f} GB, sharded", *(f"{(n + 7 * kept) / (GPUS * MEMORY):.0%}" for n in totals)]
    )
    return rows


def memory_1b() -> list[list[str]]:
    """The same formulas for a decoder of 1.07B parameters on one GPU, beside what was measured there."""
    rows = [["GB, derived / measured", *CASES_1B]]
    found = [parts(DECODER_1B, case, TOKENS_1B[0] * TOKENS_1B[1]) for case in CASES_1B]
    for name in ("weights, float32", "gradients, float32", "Adam's moments"):
        pairs = zip(CASES_1B, found, strict=True)
        rows.append([name, *(f"{each[name] / 1e9:.1f} / {of_1b(case, name)}" for case, each in pairs)])
    totals = zip(CASES_1B, (sum(each.values()) for each in found), strict=True)
    cells = (f"{n / 1e9:.1f} / {of_1b(case, 'peak of a step')}" for case, n in totals)
    rows.append(["in all, and the peak of a step", *cells])
    return rows


def of_1b(case: str, name: str) -> str:
    """Gigabytes by `fsdp_memory.py`, or a hyphen before it was run."""
    rows = json.loads(MEMORY_RECORD.read_text())["rows"] if MEMORY_RECORD.exists() else []
    found = [row["bytes"][name] for row in rows if row["name"] == case]
    return f"{found[0] / 1e9:.1f}" if found else "-"


def time_7b() -> list[list[str]]:
    model, speed = Decoder(), utilization() * PEAK
    rows, hours = [["", "GFLOP a token", "hours for 1G tokens, one H200", "eight"]], {}
    cases = {
        "dense": model.dense,
        "gated, all open": model.gated,
        "20% open": 0.2 * model.dense,
    }
    for name, parameters in cases.items():
        # forward, backward, and the forward pass again for what was not kept
        work = 8 * (parameters + model.head)
        seconds = 1e9 * work / speed
        step = BATCH_7B * work / speed
        # closed components are trained no more, but their gradients, zeros, are still sent
        held = model.dense if name == "dense" else model.gated
        wait = all_reduce(held + 2 * model.head)[1]
        eight = seconds / (GPUS * step / (step + wait))
        hours[name] = eight / 3600
        rows.append([name, f"{work / 1e9:.0f}", f"{seconds / 3600:.1f}", f"{hours[name]:.1f}"])
    ramp = RAMP_7B * GPUS * BATCH_7B / 1e9
    whole = ramp * hours["gated, all open"] + (1 - ramp) * hours["20% open"]
    rows.append([f"a ramp of {RAMP_7B:,} steps, {ramp:.2f}G tokens, then 20% open", "", "", f"{whole:.1f}"])
    return rows


def once_7b() -> list[list[str]]:
    """What comes before the first step, and one-shot compression."""
    model = Decoder()
    encoder = 12 * (4 * 768**3 + 2 * 768**2 * 3072)
    svd = measured("factorize", "110M encoder, full-rank SVD") * model.svd / encoder
    oneshot = measured("oneshot-memory", "smollm2, without them") * 4 * (model.dense + 2 * model.head)
    return [
        ["", "derived", "from"],
        ["SVD of every matrix, two CPU cores", clock(svd), f'row "factorize", operations x {model.svd / encoder:.0f}'],
        ["memory of one-shot compression, float32", f"{oneshot / 1e9:.0f} GB", 'row "oneshot-memory, without them"'],
    ]


def clock(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


TABLES = {
    "full runs": full_runs,
    "7B memory": memory_7b,
    "1B memory": memory_1b,
    "7B time": time_7b,
    "7B once": once_7b,
}


def markdown(rows: list[list[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


if __name__ == "__main__":
    for name, make in TABLES.items():
        print(f"<!-- {name} -->\n{markdown(make())}\n<!-- /{name} -->\n")
    print(f"share of the peak that the SRU reaches: {utilization():.1%}")
