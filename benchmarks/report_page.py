"""Build the page of many long runs, and time it: how long, how large, and when a browser first paints it.

python benchmarks/report_page.py                       # 100 runs of 10,000 logged steps: under 20 s, 15 MB, 2 s
python benchmarks/report_page.py --runs 5 --steps 500  # a try
python benchmarks/report_page.py --keep /tmp/page      # leave the runs and the page there

The runs are made up: the files of real ones, with random numbers in them. Chromium and playwright are needed for the
paint; without them it is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rankwise.lab.report.page import make_page, write_page

LAYERS, BINS, POINTS = 12, 20, 40
METHODS = ("flop-l0", "fac", "np-l0", "flop-agp")
LIMITS = {"seconds": 20.0, "megabytes": 15.0, "first paint, seconds": 2.0}


def make_run(folder: Path, number: int, steps: int) -> None:
    """A finished run of one method, with its record, its configuration and a line of metrics for every step."""
    draw, method = random.Random(number), METHODS[number % len(METHODS)]
    part = folder / method
    part.mkdir(parents=True)
    names = [f"layers.{layer}.{kind}" for layer in range(LAYERS) for kind in ("attention.qkv", "feed_forward.first")]
    with (part / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(line_of(step, steps, names, draw)) + "\n")
    settings = {"method": {"name": method}, "budget": {"removed": 0.8, "of": "model"}, "seed": number}
    (part / "config.json").write_text(json.dumps({"about": settings, "training": {"steps": steps}, "prunes": True}))
    shape = [512, 512]
    ranks = {name: [*shape, draw.randrange(1, 256), 512] for name in names}
    matrices = {name: [shape[0] * shape[1], rank[2] * sum(shape)] for name, rank in ranks.items()}
    dense = len(names) * shape[0] * shape[1] + 100_000
    rows = [
        row("dense", dense, dense, 1.2, draw),
        {**row(method, dense, 100_000 + sum(m[1] for m in matrices.values()), 1.3 + 0.1 * draw.random(), draw),
         "ranks": ranks, "matrices": matrices},
    ]  # fmt: skip
    record = {
        "format": "rankwise-experiment", "version": 1, "name": f"run {number}", "seed": 0, "experiment": settings,
        "corpus": {"name": "made up", "fingerprint": "made up"}, "rows": rows, "versions": {"rankwise": "0"},
        "hardware": {"device": "none"},
    }  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))


def line_of(step: int, steps: int, names: list[str], draw: random.Random) -> dict[str, Any]:
    """A line of metrics as a training writes it; a few of them hold histograms."""
    ramp = min(1.0, 4 * step / steps)
    line: dict[str, Any] = {
        "step": step, "seconds": step / 10, "loss": 1 + math.exp(-5 * step / steps) + 0.05 * draw.random(),
        "bits_per_character": 1.5, "lr": 1e-3, "gradient_norm": draw.random(), "target_size": 6e6 - 5e6 * ramp,
        "expected_size": 6e6 - 5e6 * ramp + 1e5 * draw.random(),
        "tokens_per_second": 1e5 * (1 + ramp + 0.3 * draw.random()),
    }  # fmt: skip
    if step % max(1, steps // POINTS) == 0:
        line["gates"] = {name: [draw.randrange(50) for _ in range(BINS)] for name in names}
    if step % max(1, steps // 50) == 0:
        line |= {"valid_loss": line["loss"] + 0.1, "valid_bits_per_character": 1.6, "is_best": True}
    return line


def row(name: str, dense: int, parameters: int, value: float, draw: random.Random) -> dict[str, Any]:
    quality = {"loss": value * math.log(2), "bits_per_character": value}
    return {
        "name": name, "method": name, "parameters": parameters, "removed": 1 - parameters / dense, "nonzeros": False,
        "valid": quality, "test": quality, "milliseconds": {"median": 2.0 + draw.random()}, "speedup": 1.0,
        "folder": name,
    }  # fmt: skip


def first_paint(file: Path, repeats: int = 3) -> dict[str, float] | None:
    """Seconds until the browser first paints words, and until all figures are drawn; medians."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        return None
    paints, drawn = [], []
    with sync_playwright() as driver:
        for _ in range(repeats):
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page()
            began = time.perf_counter()
            page.goto(file.as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-drawn=yes]", timeout=120_000)
            drawn.append(time.perf_counter() - began)
            script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            paints.append(page.evaluate(script) / 1000)
            browser.close()
    return {"first paint, seconds": statistics.median(paints), "all drawn, seconds": statistics.median(drawn)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs and the page")
    options = parser.parse_args()
    place = options.keep or Path(tempfile.mkdtemp())
    try:
        for number in range(options.runs):
            make_run(place / "runs" / f"run-{number:03}", number, options.steps)
        began = time.perf_counter()
        write_page(make_page([place / "runs"]), place / "report.html")
        found = {"seconds": time.perf_counter() - began, "megabytes": (place / "report.html").stat().st_size / 1e6}
        paint = first_paint(place / "report.html")
        if paint is None:
            print("Chromium or playwright is missing: nothing is painted.", file=sys.stderr)
        for name, value in {**found, **(paint or {})}.items():
            print(f"{name:22} {value:8.2f}{f'   at most {LIMITS[name]:g}' if name in LIMITS else ''}")
    finally:
        if options.keep is None:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
