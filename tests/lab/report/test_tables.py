"""Tables say what the records say."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rankwise.lab.report import table


def row(name: str, method: str, test: float, **more: Any) -> dict[str, Any]:
    quality = {"perplexity": test, "loss": 1.0}
    timing = {"median": 10.0, "p20": 9.0, "p80": 11.0}
    plain = {"parameters": 1000, "removed": 0.25, "nonzeros": False, "speedup": 2.0}
    return {"name": name, "method": method, "valid": quality, "test": quality, "milliseconds": timing, **plain, **more}


def test_losses_are_against_the_dense_model_of_the_same_seed() -> None:
    runs = [
        {"rows": [row("dense", "dense", 10.0), row("fac-80", "fac", 11.0)]},
        {"rows": [row("dense", "dense", 20.0), row("fac-80", "fac", 26.0)]},
    ]
    found = table({"runs": runs})
    assert found.columns[4] == "test perplexity"
    dense, fac = found.rows
    assert dense[5] == ""
    assert fac[4] == "18.5000 ± 10.6066"
    assert fac[5] == "+20.0 ± 14.1%"
    assert found.notes == ("over 2 seeds: mean ± standard deviation",)


def test_what_learned_from_the_control_is_compared_with_a_dense_model_that_did_too() -> None:
    rows = [
        row("dense", "dense", 10.0),
        row("taught", "dense", 9.0, distill=0.8),
        row("flop", "flop-l0", 9.9, distill=0.8),
        row("fac", "fac", 11.0),
    ]
    found = table({"rows": rows})
    assert [line[5] for line in found.rows] == ["", "", "+10.0%", "+10.0%"]
    assert found.notes == ("rows that learn from dense are compared with taught: a dense model that does so too",)
    # without one, with what there is
    assert [line[5] for line in table({"rows": [rows[0], rows[2]]}).rows] == ["", "-1.0%"]


def test_nothing_is_counted_against_a_base() -> None:
    rows = [row("base", "dense", 10.0), row("fac-80", "fac", 11.0)]
    assert [line[5] for line in table({"rows": rows}).rows] == ["", ""]


def test_one_run_has_no_spread_and_a_star_for_non_zeros() -> None:
    found = table({"rows": [row("dense", "dense", 10.0), row("agp", "agp", 10.5, nonzeros=True)]})
    assert found.rows[1] == ("agp", "1,000 *", "25.0%", "10.5000", "10.5000", "+5.0%", "10.0", "2.00x")
    assert found.notes == ("* non-zero parameters: the matrices keep their shape",)
    assert found.markdown().splitlines()[1] == "|---" * 8 + "|"
    assert "| agp | 1,000 * | 25.0% |" in found.markdown()


@pytest.mark.parametrize("package", ["torch", "rich"])
def test_reports_need_no_torch(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import rankwise.lab.report"
    if package == "torch":
        code += "; assert 'rankwise.core' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
