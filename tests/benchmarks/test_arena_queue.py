"""benchmarks/arena_queue.py: what a row keeps of how it was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import arena_queue
import arena_toys
from arena_plans import TEXTS, Job, ours
from harness import commit


@pytest.mark.filterwarnings("ignore:These layers are left as they are")
def test_a_row_says_its_commit_and_how_many_others_were_measured_beside_it(tmp_path: Path) -> None:
    arena_toys.make(tmp_path, TEXTS)
    dense, row = (
        {**arena_queue.perform(job, tmp_path, "cpu", toy=True), "job": job.key, "model": job.model, "kind": job.kind}
        for job in (Job(model="smollm2", kind="dense"), ours("smollm2", 0.2, calibrate="train"))
    )
    # a queue goes on at another commit with what was measured before
    dense["about"]["commit"] = "an earlier one"
    rows = [dense, {**row, "beside": 3}]
    (tmp_path / arena_queue.ROWS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arena_queue.write_records(tmp_path)
    record = json.loads((tmp_path / "arena-smollm2.json").read_text())
    (made,) = record["rows"]
    assert (record["commit"], made["commit"], made["beside"]) == ("an earlier one", commit(), 3)
