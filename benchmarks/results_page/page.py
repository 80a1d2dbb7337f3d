"""The page of results: every record of a folder as a table, the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rankwise.lab.report import Table, table
from rankwise.lab.report.comparison import comparison, factorization, measured
from rankwise.lab.report.paper import ENWIK8_SRU, ENWIK8_TRANSFORMER_XL, WIKITEXT_103, PaperTable
from results_page import sections
from results_page.claims import claims
from results_page.figures import figures_of
from results_page.records import BENCHMARKS, gate_cells, is_run

Results = Mapping[str, Any]
KNOWN = (
    "enwik8-sru-10min", "table-ten-minutes", "enwik8-sru-30min", "table-half-hour", "table-enwik8-sru", "table-np-l0",
    "table-enwik8-transformer-xl", "table-words", "table-wikitext-2", "glue-mpnet", "glue-minilm", BENCHMARKS,
    "enwik8-small-sru", "methods-enwik8-transformer", "methods-enwik8-transformer-long", "arena-smollm2",
    "arena-smollm2-levels", "arena-smollm2-refined", "arena-gemma", "oneshot-smollm2-healed", "lagrangian-recipes",
    "gpu-decoder", "gpu-training", "gpu-training-compiled", "gpu-compress", "gpu-compress-offload", "fsdp-memory",
    "torture", "engines", "vllm-speed",
)  # fmt: skip
"""Names of records that a section below reads, or another page."""
HEAD = """# Results

Printed by `python benchmarks/page.py results benchmarks/results.csv --figures docs/figures` from the records in
`results/`; a test keeps this page in step with them. Figures from the paper are in columns or rows labelled *paper*;
everything else was measured here with the command given. *Removed* is the fraction of the prunable weights. *Lost* is
relative to each model's own dense model: for the paper, the one that it prints; for ours, a dense control that
continued from the same base for as many steps. Cells that have not been run are empty. Test texts are read once per
model, and checkpoints are selected on validation text."""


def page(found: Results) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for title, about, make in SECTIONS:
        made = make(found)
        if made is None:
            continue
        drawn = [f"![{figure.title}](figures/{figure.name}.svg)" for figure in figures_of(found) if figure.of == title]
        parts.append("\n\n".join([f"## {title}", about, *drawn, made if isinstance(made, str) else made.markdown()]))
    others = {name: record for name, record in found.items() if name not in KNOWN}
    parts += [f"## {name}\n\n{table(record).markdown()}" for name, record in others.items() if is_run(record)]
    strangers = [f"`{name}`" for name, record in others.items() if not is_run(record)]
    if strangers:
        parts.append(f"Records that have no table here: {', '.join(strangers)}.")
    return "\n\n".join(parts)


def _compared(paper: PaperTable, stem: str, base: str, plain: str, measure: str) -> Callable[[Results], Table | None]:
    def make(found: Results) -> Table | None:
        plain_record = found.get("table-np-l0" if stem == "table-enwik8-sru" else stem)
        return comparison(paper, (found.get(stem), base), (plain_record, plain), measure)

    return make


def _wikitext_2(found: Results) -> Table | None:
    stem = "table-wikitext-2"
    return measured((found[stem], "wikitext-2"), (50, 70, 80), "perplexity") if stem in found else None


def _factorization(found: Results) -> Table:
    plain = found.get("table-np-l0")
    own = (found.get("table-enwik8-sru"), "enwik8-sru")
    return factorization(own, (plain, "enwik8-sru-plain-1536"), (plain, "enwik8-sru-plain-2048"))


def _within_minutes(minutes: int, table: str) -> Callable[[Results], Table | None]:
    def make(found: Results) -> Table | None:
        name = f"enwik8-sru-{minutes}min"
        made = sections.within_minutes(name, found.get(name), found.get(table))
        return made if made.rows else None

    return make


def _of(stem: str, make: Callable[[Any], Table]) -> Callable[[Results], Table | None]:
    return lambda found: make(found[stem]) if stem in found else None


def _clusters(found: Results) -> Table | None:
    made = sections.clusters(found.get("table-words"), "enwik8-words")
    return made if made.rows else None


def _methods(found: Results) -> str | None:
    stems = ("methods-enwik8-transformer", "methods-enwik8-transformer-long")
    made = [sections.methods(found[stem]).markdown() for stem in stems if stem in found]
    return "\n\n".join(made) or None


def _cpu(found: Results) -> str | None:
    made = (sections.timing, sections.more_timing)
    return "\n\n".join(make(found[BENCHMARKS]).markdown() for make in made) if BENCHMARKS in found else None


def _gates(found: Results) -> Table | None:
    lines = tuple(_decided(found))
    return Table(("", "matrix", "step", "nearly closed", "between", "nearly open"), lines) if lines else None


def _decided(found: Results) -> Iterator[tuple[str, ...]]:
    """Shares of the first, the middle and the last two histograms of each matrix."""
    for table_name, name, gates in gate_cells(found):
        steps = gates["steps"]
        for matrix, histograms in gates["histograms"].items():
            for i in sorted({0, len(steps) // 2, max(len(steps) - 2, 0), len(steps) - 1}):
                counts, total = histograms[i], sum(histograms[i])
                shares = (counts[0], total - counts[0] - counts[-1], counts[-1])
                yield f"{table_name}, {name}", matrix, f"{steps[i]:,}", *(f"{share / total:.0%}" for share in shares)


SECTIONS: tuple[tuple[str, str, Callable[[Results], Table | str | None]], ...] = (
    (
        "Ten minutes",
        "The 35M SRU on enwik8, from random weights to an evaluated compact model in ten minutes on one H200: "
        "`rankwise run enwik8-sru-10min`. `python benchmarks/tables.py ten-minutes` adds seeds and a dense control, "
        "whose time is extra. The paper's released code, given ten minutes on the same card, reaches 1.53 with "
        "tuned learning rates and 2.67 with its own ([the log](log/methods.md)).",
        _within_minutes(10, "table-ten-minutes"),
    ),
    (
        "Half an hour",
        "The same in 27 minutes, where the paper's own figure after 130 passes over the text is 1.27: `rankwise run "
        "enwik8-sru-30min`, and `python benchmarks/tables.py half-hour` for a dense control.",
        _within_minutes(30, "table-half-hour"),
    ),
    (
        "enwik8, SRU",
        "`python benchmarks/tables.py enwik8-sru`, one H200. Ours read the text three times, the paper's 130 times. "
        "The paper's FAC is trained from scratch; ours also starts from the SVD of the base. np-l0 prunes a plain "
        "model of 37M parameters and is compared with that model's own dense control (`python benchmarks/tables.py "
        "np-l0`; the paper's is 1.30).",
        _compared(ENWIK8_SRU, "table-enwik8-sru", "enwik8-sru", "enwik8-sru-plain-1536", sections.BITS),
    ),
    (
        "enwik8, Transformer-XL",
        "`python benchmarks/tables.py enwik8-transformer-xl`, one H200.",
        _compared(ENWIK8_TRANSFORMER_XL, "table-enwik8-transformer-xl", "enwik8-transformer-xl", "", sections.BITS),
    ),
    (
        "Word level",
        '`python benchmarks/tables.py words`, one H200: adaptive embedding and softmax on "enwik8 words", the '
        "text of enwik8 without its markup (12.3 million words). The paper's figures are for WikiText-103, "
        "a different text and a different model, so only the losses can be compared.",
        _compared(WIKITEXT_103, "table-words", "enwik8-words", "enwik8-words-plain", "perplexity"),
    ),
    (
        "Word level, WikiText-2",
        "`python benchmarks/tables.py wikitext-2`, one H200; 2.1 million words. Every model overfits, the dense one "
        "most; the best checkpoint on validation text is used. The paper has no such row.",
        _wikitext_2,
    ),
    (
        "What the paper claims",
        "One by one, as it held here: losses against each one's own dense model, *better* where a loss is smaller "
        "by at least 0.4 points, which is what seeds differ by. Every figure and verdict is made from the records, and "
        "most cells have one seed.",
        claims,
    ),
    (
        "Word clusters",
        "How many parameters flop-l0 keeps in each cluster of words and in the layers; cluster 1 holds the most "
        "frequent words.",
        _clusters,
    ),
    (
        "Factorization or inputs",
        "Bits per character, with the loss in parentheses. `python benchmarks/tables.py enwik8-sru np-l0`",
        _factorization,
    ),
    (
        "How gates decide",
        "Components of the first and the last matrix by how far their gates are open: at the first line of metrics, "
        "midway, and at the last two lines. At the end of the ramp the selection is fixed and gates stay open or "
        "closed; the line before that shows whether they had already decided.",
        _gates,
    ),
    (
        "Fine-tuning",
        "`python benchmarks/glue.py results/glue-mpnet.json --preset glue-mpnet --model FOLDER --data GLUE`, one "
        "H200; development sets; the mean of each task's metrics; our QNLI is trained on 2,000 rows. The paper's "
        "model is RoBERTa-base and ours MPNet-base, so only the losses can be compared. The number in a name is the "
        "percentage removed from the whole model; *control* is the dense model trained for as long as ours; the "
        "rows from paper-60 on add one part of the recipe at a time ([glue.md](glue.md)). *Of dense* is relative to "
        "the dense models of the same tasks and seeds.",
        _of("glue-mpnet", sections.fine_tuning),
    ),
    (
        "Fine-tuning, a small encoder on a CPU",
        "All-MiniLM-L6, two cores; no setting was selected on these rows. *control* is the dense model trained for as "
        "long. `python benchmarks/glue.py results/glue-minilm.json --preset glue-minilm --model FOLDER --data GLUE "
        "--tasks mrpc --rows dense,control,ours-60,ours-35 --seeds 0,1,2 --precision bf16 --device cpu`",
        _of("glue-minilm", sections.fine_tuned),
    ),
    (
        "Inference on a CPU",
        "Speed relative to dense, then relative to the published implementations and in int8. `python "
        "benchmarks/cpu_inference.py --record` on an AMD EPYC, batch 1, as ratios within one run; more in "
        "[inference.md](inference.md).",
        _cpu,
    ),
    (
        "Training on a GPU",
        "One H200, the real training loop (data, logging, clipping, gate updates), bf16, median over 30 s; *open* "
        "is the share of components whose gates are open. The paper's released code in its fastest mode on the same "
        "card: 0.64M, 0.64M and 0.72M for the SRU; the original Transformer-XL: 0.04M ([the "
        "log](log/speed-gpu.md)). `python benchmarks/lm_speed.py loop`",
        _of(BENCHMARKS, sections.training_speed),
    ),
    (
        "Inference on a GPU",
        "Speed relative to dense on one H200, windows of 256 characters (SRU) and 512 (Transformer-XL), launched "
        "kernel by kernel and replayed as a CUDA graph; bfloat16 by autocast. `python benchmarks/gpu_inference.py "
        "--record`; more in [inference.md](inference.md).",
        _of(BENCHMARKS, sections.gpu_timing),
    ),
    (
        "A large decoder on a GPU",
        "Four layers of the 7B shape (width 4096, inner 11008, 32,000 words) in bfloat16, random weights with a "
        "falling spectrum, compressed by `rankwise.compress` without calibration; one H200, compiled by "
        "`torch.compile` and replayed as CUDA graphs, median and spread (20% to 80%) of the ratios within one run. "
        "Layers that read the same input are fused by `rankwise.deploy.fuse_layers` in the dense model too, unless "
        "the row says otherwise. `python benchmarks/gpu_decoder.py --layers 4 --record results/gpu-decoder.json`",
        _of("gpu-decoder", sections.gpu_decoder),
    ),
    (
        "Training a large decoder on a GPU",
        "The same decoder with weights in float32, 4 x 1024 tokens, autocast to bfloat16 and fused AdamW. *Committed* "
        "is after the ramp, when the gates stay; then `pruner.drop_closed(optimizer)` drops what they closed. One "
        "H200, median of ten steps and its spread (20% to 80%). "
        "`python benchmarks/gpu_training.py --record results/gpu-training.json`",
        _of("gpu-training", sections.gpu_training),
    ),
    (
        "Training a large decoder on a GPU, compiled",
        "The same with every model, the dense one too, compiled by `torch.compile`, from matrices of half their rank. "
        "`python benchmarks/gpu_training.py --compile --max-rank 2048 --record results/gpu-training-compiled.json`",
        _of("gpu-training-compiled", sections.gpu_training),
    ),
    (
        "Compressing a large decoder on a GPU",
        "`rankwise.compress` of a decoder of 32 such layers in place, ranks by the loss, calibrated on 16 windows of "
        "2048 random tokens. `python benchmarks/gpu_compress.py --record results/gpu-compress.json`",
        _of("gpu-compress", sections.gpu_compress),
    ),
    (
        "Compressing a large decoder on a small GPU",
        "The same from disk, block by block, on a GPU that pretends to have 8 GiB. `python benchmarks/gpu_compress.py "
        "--offload --cap 8 --record results/gpu-compress-offload.json`",
        _of("gpu-compress-offload", sections.gpu_offload),
    ),
    (
        "Serving with vLLM on a CPU",
        "Tokens per second of a random decoder of the Llama shape, compressed by `rankwise.compress` without "
        "calibration with ranks in multiples of 16, and the speed relative to dense: the median of all rounds, in "
        "which the folders take turns, and of each round. On two cores; `.venv-vllm/bin/python "
        "benchmarks/vllm_speed.py --record results/vllm-speed.json`",
        _of("vllm-speed", sections.vllm_speed),
    ),
    (
        "A small SRU on a CPU",
        "A run of minutes on two cores: 2M parameters, 425 steps for the base and 1,275 for every row. *Removed* is "
        "the fraction of the whole model, and all rows are compared with the first. `python benchmarks/small_sru.py "
        "DATA OUT.json --seeds 0,1`",
        _of("enwik8-small-sru", table),
    ),
    (
        "All methods from one base, transformer",
        "A 19M-parameter character transformer on enwik8: 4,000 steps of training, then 2,000 more in which 80% of "
        "the attention and feed-forward weights are removed; one H200, one seed. `fac` starts from the truncated "
        "SVD of the trained base, which is much stronger than the paper's FAC from scratch. `agp` is unstructured: "
        "its matrices keep their shape and are no faster. `python benchmarks/methods.py enwik8 out.json`",
        _methods,
    ),
    (
        "Without training: SmolLM2-135M",
        "A fraction of the whole model removed; perplexity per token on the first 64 windows of 512 tokens of "
        "WikiText-2's test text, and of Python's `pydoc` topics as a text of another kind, calibrated on 256 windows "
        "of 256 tokens of WikiText-2's training text. Peers are their ideas as published, written anew. *Refined* are "
        "steps for each block. `python benchmarks/arena.py run MODEL TOKENS.npz results/arena-smollm2.json`",
        _of("arena-smollm2", sections.arena),
    ),
    (
        "Without training: SmolLM2-135M, three sizes",
        "The same for three sizes, not refined but for one row, with ZS-SVD's idea: `python benchmarks/arena_queue.py "
        "FOLDER OUT 2`, of which these jobs came to their end.",
        _of("arena-smollm2-levels", sections.arena),
    ),
    (
        "With refinement and with a little training: SmolLM2-135M",
        "Calibrated on windows of WikiText-2's training text and as many that the dense model generates, blocks "
        "refined, and then healed by 300 steps of 16 windows of 512 tokens of that text (2.5 million tokens) at a rate "
        "that short trials chose. Steps, rate and windows of the refinement are those of the rows that are best on "
        "validation text; peers are refined alike. Mean and standard deviation over samples, which are other windows "
        "of both kinds, and in brackets against dense. `python benchmarks/arena_queue.py FOLDER OUT run`; healed rows "
        "are of ab36b44, where trials were a tenth of the steps and nothing generated healed.",
        _of("arena-smollm2-refined", sections.arena),
    ),
    (
        "Without training: Gemma-3-270M",
        "The same without refinement, with BOS before every window, 128 windows of each kind. `python "
        "benchmarks/arena_queue.py FOLDER OUT run`",
        _of("arena-gemma", sections.arena),
    ),
    (
        "With a little training",
        "SmolLM2-135M on one H200 by the one-shot compression of an earlier commit (see the record), then 300 steps of "
        "16 windows of training text (2.5 million tokens) of distillation from the dense model; the learning rate is "
        "selected on validation text (3e-4 wherever two were tried; [the log](log/one-shot.md)). Now: `python "
        "benchmarks/arena.py run MODEL TOKENS.npz OUT.json --heal 300 --text FILE`, or `rankwise heal`.",
        _of("oneshot-smollm2-healed", sections.oneshot),
    ),
    (
        "Does the size hold?",
        "A small model on which the published recipe stalls, from scratch: 3 targets x 3 gate learning rates x 3 "
        "multiplier learning rates x 3 seeds. *Extra bits* are per character, for the exported model, against the "
        "best setting of any recipe at the same target. `python benchmarks/lagrangian.py enwik8 "
        "results/lagrangian-recipes.csv`",
        _of("lagrangian-recipes", sections.recipes),
    ),
)
"""Title, description with the command, and table of each section; a section without its record is left out."""
