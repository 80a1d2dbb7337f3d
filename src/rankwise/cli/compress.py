"""`rankwise compress`: a model made smaller without training."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, number, one_of, whole_number
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from rankwise.core.budget import Budget, SizeReport


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a folder of transformers, of a run or of `rankwise.save`; or a name on the hub",
    )
    add("--out", metavar="FOLDER", required=True, help="where the compressed model is written; it must be new")
    add("--removed", type=number, metavar="FRACTION", help="budget: fraction of the parameters to remove")
    add("--params", type=whole_number, metavar="N", help="budget: parameters of the compressed model")
    add("--megabytes", type=number, metavar="N", help="budget: 10^6 bytes of saved tensors")
    add("--calibration", type=Path, metavar="FILE", help="a text like those the model is for; without it plain SVD")
    add("--windows", type=whole_number, default=64, metavar="N", help="windows of it that are read (default: 64)")
    add("--window", type=whole_number, default=256, metavar="N", help="tokens of a window (default: 256)")
    add(
        "--layout",
        type=one_of("pair", "pivot"),
        default="pivot",
        metavar="LAYOUT",
        help="pair or pivot (default: pivot)",
    )
    add("--embeddings", action="store_true", help="compress tables of words too, and output layers tied to them")
    add("--exclude", action="append", default=[], metavar="NAME", help="leave out layers of this name; repeatable")
    add("--overwrite", action="store_true", help="replace a model that was saved in FOLDER before")
    add("--json", action="store_true", help="print the sizes as JSON")


def compress(options: Options) -> None:
    from rankwise.hf.names import check_name

    # before anything slow is imported
    check_name(options.model)
    from rankwise.cli.folders import open_own
    from rankwise.core.budget import Budget
    from rankwise.deploy.compress import Calibration, compress_saved

    sizes = {name: getattr(options, name) for name in ("removed", "params", "megabytes")}
    given = {name: value for name, value in sizes.items() if value is not None}
    if len(given) != 1:
        said = " and ".join(f"--{name}" for name in given) or "none"
        raise RankwiseError(f"`rankwise compress` takes one budget, but got {said}. Example: --removed 0.3.")
    settings: dict[str, Any] = {
        "calibration": None,
        **{name: getattr(options, name) for name in ("layout", "embeddings", "exclude", "overwrite")},
    }
    if options.calibration is not None:
        settings["calibration"] = Calibration(
            file=options.calibration, num_windows=options.windows, window=options.window
        )
    own = open_own(Path(options.model))
    if own is not None:
        settings |= {"vocabulary": own.vocabulary, "beside": own.beside}
        size = compress_saved(own.model, Budget(**given), options.out, **settings)
    else:
        size = _compress_pretrained(options.model, Budget(**given), options.out, settings)
    if options.json:
        print(json.dumps({"folder": options.out, **dataclasses.asdict(size)}, indent=1))
    else:
        print(
            f"{options.out}: {size.exported:,} of {size.dense:,} parameters, {size.removed:.2%} removed "
            f"(at most {size.budget:,} were asked for)"
        )


def _compress_pretrained(model: str, budget: Budget, out: str, settings: dict[str, Any]) -> SizeReport:
    try:
        from transformers.utils import logging

        from rankwise.hf.compress import compress_pretrained
    except ImportError:
        raise ImportError(
            '`rankwise compress` needs transformers, which is not installed. pip install "rankwise[hf]".'
        ) from None
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return compress_pretrained(model, budget, out, **settings)


COMPRESS = Command(
    name="compress",
    usage="MODEL --removed FRACTION [--calibration FILE] --out FOLDER ...",
    about="Make a model smaller at once, without training.",
    details="""\
Layer by layer and in place, in little more memory than the model itself. Ranks are shared out by what the
model's answers lose; with --calibration outputs are measured on that text. `from_pretrained` loads the folder
after `import rankwise`; a model of a run, or of `rankwise.save`, gives a folder for `rankwise.load`; that of
a run can be evaluated and sampled from as before.

example: rankwise compress my-model --removed 0.3 --calibration text.txt --out my-model-small""",
    arguments=add_arguments,
    run=compress,
)
