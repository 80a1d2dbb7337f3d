"""The page of results: the paper's figures are the paper's, ours are ours, and what was not run is empty."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from results_page.claims import claims
from results_page.figures import figures_of
from results_page.page import page
from results_page.records import read_results
from results_page.sections import cluster_parameters, gpu_timing, within_minutes

from rankwise.errors import CheckpointError
from rankwise.lab.report import paper
from rankwise.lab.report.comparison import cells, comparison, factorization, measured

SOURCE = Path(__file__).parents[3] / "shared/paper/structured-pruning-of-large-language-models.tex"
BITS = "bits_per_character"


def row(name: str, test: float, measure: str = BITS, **more: Any) -> dict[str, Any]:
    quality = {measure: test}
    plain = {"parameters": 1000, "removed": 0.7, "removed_of_prunable": 0.8, "nonzeros": False, "steps": 30}
    return {"name": name, "method": name, "valid": quality, "test": quality, **plain, **more}


def run(name: str, seed: int, *rows: dict[str, Any], measure: str = BITS) -> dict[str, Any]:
    experiment = {
        "base": {"schedule": "cosine"}, "training": {"steps": 30}, "method": {"anneal_steps": 7},
        "model": {"dropout": 0.1},
    }  # fmt: skip
    base = row("dense", 3.0, measure, steps=20)
    return {"name": name, "seed": seed, "experiment": experiment, "base": base, "rows": list(rows)}


def test_every_figure_is_the_one_that_the_paper_prints() -> None:
    if not SOURCE.exists():
        pytest.skip("the paper's source is not beside the checkout")
    text = re.sub(r"\\ |\\bf|\\ourmethod|\\lzero|[{}$\s]", "", SOURCE.read_text())
    for table in (paper.ENWIK8_SRU, paper.ENWIK8_TRANSFORMER_XL, paper.WIKITEXT_103):
        for (level, method), figure in table.rows.items():
            name = {"np-l0": "NP-", "flop-agp": "-AGP", "flop-l0": "-"}.get(method, method.upper())
            assert f"{name}&{figure.size}&{level}\\%&{figure.value:g}" in text
    for _, values in paper.FACTORIZATION.values():
        for value in values.values():
            assert f"&{value:.2f}(-" in text


def test_losses_of_the_paper_are_against_the_model_that_was_pruned() -> None:
    """The paper prints those of FLOP-L0 and of NP-L0, from figures with more digits."""
    printed = {
        (70, "flop-l0"): 0.8,
        (80, "flop-l0"): 2.4,
        (90, "flop-l0"): 7.3,
        (80, "np-l0"): 3.2,
        (90, "np-l0"): 10.0,
    }
    for (level, method), percent in printed.items():
        lost = paper.ENWIK8_SRU.lost(level, method)
        assert lost is not None and 100 * lost == pytest.approx(percent, abs=0.2)
    assert paper.WIKITEXT_103.lost(80, "np-l0") is None
    assert paper.ENWIK8_SRU.lost(50, "fac") is None


def test_ours_stands_beside_the_papers_and_is_compared_with_its_own_control() -> None:
    first = run(
        "enwik8-sru",
        0,
        row("flop-l0-80", 2.2, dropout=0.05),
        row("dense", 2.0, dropout=0.1),
        row("fac-80", 2.5),
        row("dense-distilled", 1.9),
    )
    other = run("enwik8-sru", 1, row("dense", 4.0), row("flop-l0-80", 4.8))
    # a later stretch: the base was trained again, the control is the first one's
    later = run("enwik8-sru", 0, row("flop-l0-90", 3.0))
    plain = {"runs": [run("plain", 0, row("dense", 5.0), row("np-l0-80", 6.0))]}
    made = comparison(paper.ENWIK8_SRU, ({"runs": [first, other, later]}, "enwik8-sru"), (plain, "plain"), BITS)
    rows = {found[:2]: found[2:] for found in made.rows}
    assert rows["flop-l0", "80%"][:3] == ("8M", "1.27", "+2.4%")
    assert rows["flop-l0", "80%"][5:] == ("3.5000 ± 1.8385", "+15.0 ± 7.1%")
    assert rows["flop-l0", "90%"][5:] == ("3.0000", "+50.0%")
    assert rows["fac, from the base", "80%"] == ("", "", "", "1,000", "2.5000", "2.5000", "+25.0%")
    assert rows["np-l0", "80%"][5:] == ("6.0000", "+20.0%")
    assert rows["fac, from scratch", "80%"] == ("8M", "1.38", "+11.3%", "", "", "", "")
    assert rows["dense", ""][-1] == ""
    assert rows["dense, distilled", ""] == ("", "", "", "1,000", "1.9000", "1.9000", "-5.0%")
    assert "whose learning rate follows the schedule *cosine*" in made.notes[0]
    assert "sizes are reached after 7; dropout 0.1 of the dense model, down to 0.05 of the smallest;" in made.notes[0]
    assert "trained again" in made.notes[0]
    assert "trained again" not in made.notes[1]


def test_before_anything_is_run_only_the_paper_speaks() -> None:
    made = comparison(paper.WIKITEXT_103, (None, "x"), (None, "x"), "perplexity")
    assert all(found[5:] == ("", "", "", "") for found in made.rows)
    assert len(made.rows) == 16 and made.notes == ()
    own = [found for found in factorization((None, ""), (None, ""), (None, "")).rows if found[1] == "ours"]
    assert len(own) == 3 and all(set(found[2:]) == {""} for found in own)
    assert page({}).count("\n## ") == 5


def test_parameters_of_clusters_add_up() -> None:
    matrices = {
        "embedding.clusters.0": [100, 60],
        "embedding.clusters.1": [50, 5],
        "sru.layers.0.projection": [30, 10],
        "sru.layers.1.projection": [40, 20],
    }
    found = cluster_parameters(matrices)
    assert found == {"words, cluster 1": (100, 60), "words, cluster 2": (50, 5), "layers": (70, 30)}


def test_figures_are_drawn_where_there_is_data() -> None:
    gates = {"steps": [10, 20], "histograms": {"first": [[0] * 19 + [4], [3] + [0] * 18 + [1]], "last": [[1] * 20] * 2}}
    words = row("flop-l0-70", 9.0, "perplexity", matrices={"embedding.clusters.0": [10, 5], "sru.layers.0": [9, 3]})
    found = {
        "table-enwik8-sru": {"runs": [run("enwik8-sru", 0, row("flop-l0-80", 2.0, gates=gates))]},
        "table-words": {"runs": [run("enwik8-words", 0, words, measure="perplexity")]},
        "stranger": {},
    }
    figures = {figure.name: figure.svg for figure in figures_of(found)}
    assert list(figures) == ["gates-enwik8-sru", "word-clusters"]
    boxes = [part for part in ET.fromstring(figures["gates-enwik8-sru"]) if part.get("fill-opacity")]
    # a box for every bin that holds a gate: 1 + 2 of the first matrix, 20 + 20 of the last
    assert len(boxes) == 43
    ET.fromstring(figures["word-clusters"])
    text = page(found)
    assert "(figures/gates-enwik8-sru.svg)" in text and "(figures/word-clusters.svg)" in text
    assert "| enwik8-sru, flop-l0-80 | first | 20 | 75% | 0% | 25% |" in text
    assert "| words, cluster 1 | 10 | 5 (50%) |" in text
    assert "no table here: `stranger`" in text


def test_seeds_of_the_ten_minutes_stand_apart_from_the_first_run() -> None:
    table = {"runs": [run("enwik8-sru-10min", s, row("flop-l0-80", 1.5 + s), row("dense", 1.0 + s)) for s in (0, 1, 2)]}
    made = within_minutes("enwik8-sru-10min", {"seed": 0, "rows": [row("flop-l0", 1.4)]}, table)
    assert made.rows[0][4] == "1.4000"
    by_name = {cells[0]: cells[4:] for cells in made.rows}
    assert by_name["flop-l0"] == ("2.5000 ± 1.0000", "+30.6 ± 17.3%", "3")


def test_a_record_is_found_by_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "table-x.json").write_text(json.dumps({"runs": []}))
    (tmp_path / "speed.csv").write_text("benchmark,case\na,b\n")
    assert set(read_results([tmp_path])) == {"table-x", "benchmarks"}
    (tmp_path / "broken.json").write_text("[]")
    with pytest.raises(CheckpointError, match="broken.json must be a record of results"):
        read_results([tmp_path / "broken.json"])
    assert cells(None, "a", "b") == []


def test_a_text_that_the_paper_does_not_have_shows_ours_alone() -> None:
    rows = (row("dense", 10.0, "perplexity"), row("flop-l0-70", 12.0, "perplexity"))
    record = {"runs": [run("other", 0, *rows, measure="perplexity")]}
    table = measured((record, "other"), (50, 70), "perplexity")
    assert table.rows == (
        ("dense", "", "1,000", "10.00", "10.00", ""),
        ("flop-l0", "70%", "1,000", "12.00", "12.00", "+20.0%"),
    )
    assert not any("paper" in column for column in table.columns)


def test_speeds_on_a_gpu_stand_by_model_precision_and_batch() -> None:
    figures = {"dense": 4.0, "80%": 2.0, "90%": 1.0, "speed of 80% / dense": 2.0, "speed of 90% / dense": 4.0}
    benchmarks = [
        {"benchmark": "gpu inference", "case": f"txl bfloat16, batch 16, {how}: {what}", "value": str(factor * value)}
        for how, factor in (("torch", 1), ("graph", 2))
        for what, value in figures.items()
    ]
    expected = ("4.00 ms", "2.00x", "4.00x", "8.00 ms", "4.00x", "8.00x")
    assert gpu_timing(benchmarks).rows == (("Transformer-XL", "bfloat16", "16", *expected),)


def test_a_claim_holds_by_what_was_measured() -> None:
    """Of two methods the one that loses less is better, by more than seeds differ; what was not run has no verdict."""
    assert {line[3] for line in claims({}).rows} == {"not run"}
    for agp, verdict in ((1.60, "1 better"), (1.40, "1 worse"), (1.501, "1 equal")):
        rows = row("dense", 1.40), row("flop-l0-80", 1.50), row("agp-80", agp)
        found = {"table-enwik8-sru": {"runs": [run("enwik8-sru", 0, *rows)]}}
        assert [line[3] for line in claims(found).rows if "(AGP)" in line[0]] == [verdict]
