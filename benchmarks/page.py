"""Print the page of this repository's results, and draw its figures.

python benchmarks/page.py results benchmarks/results.csv --figures docs/figures > docs/results.md
python benchmarks/page.py results benchmarks/results.csv --headline    # the table of the README
"""

from __future__ import annotations

import argparse
from pathlib import Path

from results_page.figures import figures_of
from results_page.headline import headline
from results_page.page import page
from results_page.records import read_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, help="JSON and CSV files, or folders of them")
    parser.add_argument("--figures", type=Path, help="a folder for the figures, as SVG")
    parser.add_argument("--headline", action="store_true", help="print the short table of the README instead")
    options = parser.parse_args()
    found = read_results(options.records)
    print(headline(found).markdown() if options.headline else page(found))
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
        for figure in figures_of(found):
            (options.figures / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")


if __name__ == "__main__":
    main()
