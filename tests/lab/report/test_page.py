"""A page says what the records say, holds nothing that runs or loads, and leaves gaps where there are no runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rankwise.errors import MissingPackageError
from rankwise.lab.report import page as pages
from rankwise.lab.report.comparison import paper_tables
from rankwise.lab.report.found import Run, read
from rankwise.lab.report.page import Page, make_page, write_page

MARKUP = "<img src=x onerror=alert(1)></script><b>"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def page(runs: Path) -> Page:
    return make_page([runs / name for name in ("sweep", "words", "attention", "compressed")])


def test_a_page_refers_to_nothing_outside_of_itself(page: Page) -> None:
    for tag, attributes in Elements(page.html()).found:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attributes.get(name) in (None, "data:,"), (tag, attributes)
    css = pages.files("rankwise.lab.report").joinpath("page.css").read_text()
    assert "url(" not in css and "@import" not in css


def test_the_library_is_there_once_and_the_page_is_small(page: Page) -> None:
    html = page.html()
    assert html.count("window.vegaEmbed=") == 1
    assert len(html) < 3_000_000


def test_names_with_markup_are_escaped(runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / "words" / "record.json").read_text())
    record["rows"][1]["name"] = record["rows"][1]["method"] = MARKUP
    record["rows"][1]["ranks"] = {MARKUP: [4, 4, 2, 4]}
    record["experiment"]["method"]["name"] = MARKUP
    record["experiment"][MARKUP] = MARKUP
    record["hardware"]["device"] = MARKUP
    (folder := tmp_path / "<i>odd").mkdir()
    (folder / "record.json").write_text(json.dumps(record))
    html = make_page([folder, tmp_path / "<u>gone"]).html()
    tags = [tag for tag, _ in Elements(html).found]
    assert not {"img", "b", "i", "u"} & set(tags)
    assert html.count("</script") == tags.count("script")
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


def test_the_headline_is_one_sentence_with_the_figures_of_the_record(runs: Path) -> None:
    record = json.loads((runs / "words" / "record.json").read_text())
    dense, small = ({row["name"]: row for row in record["rows"]}[name] for name in ("dense", "flop-l0"))
    sentence = make_page([runs / "words"]).headline.sentence
    assert sentence.count(". ") == 0 and sentence.endswith(".")
    for part in (
        f"{small['parameters']:,} of {dense['parameters']:,} parameters",
        "asked for: 50% of the prunable parameters removed",
        f"achieved: {small['removed_of_prunable']:.1%}",
        f"{small['test']['perplexity']:.4g} instead of {dense['test']['perplexity']:.4g}",
        f"{small['milliseconds']['median']:.3g} ms instead of {dense['milliseconds']['median']:.3g} ms",
    ):
        assert part in sentence


def test_a_row_that_was_taught_is_compared_with_one_model_everywhere(runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / "words" / "record.json").read_text())
    dense, small = ({row["name"]: row for row in record["rows"]}[name] for name in ("dense", "flop-l0"))
    small["distill"] = 0.5
    half = {"perplexity": small["test"]["perplexity"] / 2}
    record["rows"].append({**dense, "name": "taught", "distill": 0.5, "test": half})
    (folder := tmp_path / "run").mkdir()
    (folder / "record.json").write_text(json.dumps(record))
    page = make_page([folder])
    assert f"instead of {half['perplexity']:.4g} of taught (+100.0%)" in page.headline.sentence
    quality = page.datasets["quality"]
    assert quality["lost"][quality["model"].index("flop-l0")] == "+100.0%"
    (line,) = (row for _, table in page.tables for row in table.rows if row[0] == "flop-l0")
    assert "+100.0%" in line


def test_a_matrix_that_keeps_its_shape_is_not_called_smaller(runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / "words" / "record.json").read_text())
    dense, small = ({row["name"]: row for row in record["rows"]}[name] for name in ("dense", "flop-l0"))
    small["nonzeros"] = True
    (tmp_path / "record.json").write_text(json.dumps(record))
    headline = make_page([tmp_path]).headline
    assert "smaller" not in headline.sentence
    assert f"{small['parameters']:,} of {dense['parameters']:,} parameters are not zero" in headline.sentence
    assert headline.tiles[0].title == "non-zero parameters"


def test_windows_kept_back_are_not_called_test_data(runs: Path, tmp_path: Path) -> None:
    record = json.loads((runs / "compressed" / "compression.json").read_text())
    record["quality"] = {"measure": "perplexity", "dense": 20.0, "small": 25.0}
    (tmp_path / "compression.json").write_text(json.dumps(record))
    page = make_page([tmp_path])
    assert "with kept-back perplexity of 25 instead of 20 (+25.0%)" in page.headline.sentence
    assert any("kept-back perplexity" in table.columns for _, table in page.tables)
    assert "test perplexity" not in page.html()


def test_seeds_are_a_mean_and_a_spread(page: Page, runs: Path) -> None:
    record = json.loads((runs / "sweep" / "record.json").read_text())
    rows = [row for run in record["runs"] for row in run["rows"] if row["name"] == "fac-70"]
    values = [row["test"]["bits_per_character"] for row in rows]
    columns = page.datasets["quality"]
    place = columns["model"].index("fac-70")
    assert columns["value"][place] == pytest.approx(sum(values) / 2)
    assert (columns["low"][place], columns["high"][place]) == (min(values), max(values))


def test_the_map_holds_the_ranks_of_the_saved_model(page: Page, runs: Path) -> None:
    structure = json.loads((runs / "attention" / "flop-l0" / "model" / "rankwise.json").read_text())["layers"]
    data = next(columns for name, columns in page.datasets.items()
                if name.startswith("network") and any("attention.qkv" in kind for kind in columns["kind"]))  # fmt: skip
    ranks = {
        name: rank
        for name, rank, model in zip(data["name"], data["rank"], data["model"], strict=True)
        if "flop" in model
    }
    found = {name: layer["rank"] for name, layer in structure.items() if "rank" in layer and name in ranks}
    assert found and {name: ranks[name] for name in found} == found


def test_word_clusters_are_parts_of_their_own(page: Page) -> None:
    parts = {part for name, columns in page.datasets.items() if name.startswith("parts") for part in columns["part"]}
    assert {"words, cluster 1", "words, cluster 2", "recurrent", "attention", "feed-forward"} <= parts


@pytest.mark.parametrize("form", ["svg", "png"])
def test_every_figure_is_a_picture(page: Page, form: str) -> None:
    made = page.pictures(form)
    assert len(made) == sum(len(figure.charts) for figure in page.figures)
    for name, content in made.items():
        if form == "svg":
            marks = [e for e in ElementTree.fromstring(content).iter() if e.tag.endswith(("path", "text"))]
            assert len(marks) > 3, name
            assert b"var(" not in content
        else:
            assert content.startswith(b"\x89PNG") and len(content) > 1_000


def enwik8_run(**rows: float) -> Run:
    model = {"architecture": "sru", "num_layers": 6, "width": 3056, "rank": 512}
    experiment = {"corpus": {"name": "enwik8"}, "model": model, "method": {"name": "flop-l0"}}
    made = [
        {"name": name.replace("_", "-"), "method": "fac", "parameters": 7, "removed": 0.8, "nonzeros": False,
         "valid": {"bits_per_character": value}, "test": {"bits_per_character": value}}
        for name, value in rows.items()
    ]  # fmt: skip
    return Run("mine", None, {"name": "mine", "seed": 0, "experiment": experiment, "rows": made})


def test_a_table_of_the_paper_has_gaps_where_there_is_no_run() -> None:
    ((title, table),) = paper_tables([enwik8_run(dense=1.5, fac_80=1.8)])
    assert title == "SRU"
    rows = {row[:2]: row for row in table.rows}
    ours, theirs = rows["fac, from the base", "80%"], rows["flop-l0", "80%"]
    assert ours[2:5] == ("", "", "") and ours[7:] == ("1.8000", "+20.0%")
    assert theirs[2:5] == ("8M", "1.27", "+2.4%") and theirs[5:] == ("", "", "", "")


def test_another_model_is_not_in_a_table_of_the_paper() -> None:
    run = enwik8_run(dense=1.5)
    run.record["experiment"]["model"]["width"] = 3055
    assert not list(paper_tables([run]))


def test_a_share_of_the_whole_model_is_not_in_a_row_of_the_paper_which_prunes_a_part() -> None:
    run = enwik8_run(dense=1.5, fac=1.8)
    run.rows[0]["method"] = "dense"  # type: ignore[index]
    for of, number in (("prunable", 1), ("model", 0)):
        run.record["experiment"]["budget"] = {"removed": 0.8, "of": of}
        ((_, table),) = paper_tables([run])
        rows = {row[:2]: row for row in table.rows}
        assert rows["dense", ""][7] == "1.5000"
        assert [row[7] for row in table.rows].count("1.8000") == number, of


def test_columns_and_tables_without_anything_are_not_shown(runs: Path) -> None:
    page = make_page([runs / "compressed"])
    ((_, table),) = page.tables
    assert all(any(row[i] for row in table.rows) for i in range(len(table.columns)))
    without = Elements(Page(read([runs / "compressed"]), page.headline, [], {}, []).html())
    assert "table" not in [tag for tag, _ in without.found]
    assert not list(paper_tables([enwik8_run()]))


def test_a_page_is_replaced_as_a_whole(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.html"
    page = make_page([runs / "words"])
    for _ in range(2):
        write_page(page, file)
        assert file.read_text().endswith("</html>\n") or file.read_text().endswith("</html>")
    assert [found.name for found in file.parent.iterdir()] == ["report.html"]


def test_what_is_missing_is_said_in_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str, found: Any = pages.find_spec) -> Any:
        return None if name == "vl_convert" else found(name)

    monkeypatch.setattr(pages, "find_spec", find)
    with pytest.raises(MissingPackageError, match="A page needs vl_convert, not installed here. Install .*vl-convert"):
        make_page([runs / "words"])


def test_how_to_use_it_names_the_model_that_is_there(runs: Path) -> None:
    html = make_page([runs / "words"]).html()
    (place,) = re.findall(r"rw\.load\(&#34;(.*?)&#34;\)", html)
    assert (Path(place) / "rankwise.json").is_file()
    assert f"rankwise sample {Path(place).parent}" in html
