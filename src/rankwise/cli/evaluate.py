"""`rankwise evaluate`: how well a model predicts; of a run on its own data, of transformers on a text and on tasks."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rankwise.cli.command import DTYPE, Argument, Options, UsageError, command, dtype_of, no_such_option
from rankwise.cli.runs import refuse_settings
from rankwise.cli.tables import print_table, say
from rankwise.errors import CheckpointError, DataError, RankwiseError
from rankwise.lab.report import MEASURES

if TYPE_CHECKING:
    from rankwise.lab.tasks.base import Experiment

CHANGEABLE = ("corpus", "training", "data", "valid", "test", "text", "device")
"""Settings that do not change what the model is."""
OF_PRETRAINED = ("tasks", "window", "include", "limit", "batch_size", "dtype", "out")
"""Options that a run has no use for."""
WINDOW = 1024
"""Tokens of a window, where nobody says how many and the model reads as many."""


def of_model(options: Options) -> Experiment | None:
    """The experiment of a run, whose settings may be changed; None for a model of transformers."""
    from rankwise.lab.experiments.run_folder import EXPERIMENT, find_run
    from rankwise.lab.experiments.saved_models import kind_of

    folder = Path(options.subject)
    if not (folder / EXPERIMENT).is_file():
        if options.tasks is not None or options.text is not None or kind_of(folder) == "pretrained":
            return None
    else:
        for name in OF_PRETRAINED:
            if getattr(options, name) is not None:
                raise UsageError(
                    f"`--{name.replace('_', '-')}` needs a model of transformers, but {folder} is the folder of a run. "
                    "Leave it out, or give the folder of a model that `save_pretrained` wrote."
                )
    refuse_settings(options, lambda group: group not in CHANGEABLE, "the model is trained already")
    if not folder.exists():
        raise CheckpointError(
            f"There is nothing at {folder}. Give the folder of a run or of transformers, or a name on the hub with "
            "--text or --tasks."
        )
    experiment = find_run(folder).experiment
    own = [field.name for field in dataclasses.fields(experiment)]
    if options.text is not None and "text" not in own:
        remedy = "Name the text by --corpus.name FILE." if "corpus" in own else "Leave it out."
        raise UsageError(f"`--text` is for folders of transformers, but {folder} is that of a run. {remedy}")
    settings = {"text": options.text, "device" if "device" in own else "training.device": options.device}
    options.given += [(name, str(value)) for name, value in settings.items() if value is not None]
    return experiment


@command(
    Argument("MODEL", "A folder of a run or of transformers, or a name on the hub.", required=True),
    Argument("--tasks NAMES", "Tasks of lm-eval, with commas.", tuple[str, ...]),
    Argument("--text FILE", 'A text in UTF-8, or JSONL with "text" or "messages", for its perplexity.', Path),
    Argument("--window N", f"Tokens of a window of the text. Default: {WINDOW}, or all that the model reads.", int),
    Argument("--include FOLDER", "Task files of your own. They can run code: use only those you trust.", Path),
    Argument("--limit N", "At most N questions of a task and N windows of the text.", int),
    Argument("--batch-size N", "Questions or windows at a time. Default: 1.", int),
    Argument("--device DEVICE", "Such as cpu or cuda:1. Default: a GPU on which it fits."),
    DTYPE,
    Argument("--out FILE", "Write the results there too, as JSON; the file must be new."),
    Argument("--split SPLIT", "Of a run's data: valid, the default, or test.", Literal["valid", "test"]),
    Argument("--json", "Print JSON."),
    experiment=of_model,
)
def evaluate(options: Options) -> None:
    """Measure how well a model predicts.

    A model of transformers, dense or compressed, on the tasks of lm-eval (--tasks) and on a text (--text). Perplexity
    is per token of the model's own tokenizer, over windows that do not overlap, BOS first where the model expects it;
    the first token of a window is not predicted. Bits per byte compare models of different tokenizers.

    A model of a run on the text that it was trained on, from your cache, or on a published one. A folder may come from
    someone else, so paths that it names are not opened: name a text of your own that is not in the cache by
    --corpus.name FILE, a folder with a published text by --corpus.data FOLDER, and another cache by --corpus.cache
    FOLDER. Another text is read by the model's vocabulary; valid and test are its last two twentieths, or files of a
    folder.

    example: rankwise evaluate my-llama-small --tasks hellaswag,arc_easy --limit 200
    example: rankwise evaluate my-llama-small --text wiki.txt --window 1024
    example: rankwise evaluate runs/demo/flop-l0 --split test
    """
    if options.experiment is not None:
        _evaluate_run(options)
        return
    for name, _ in options.given:
        raise no_such_option(f"--{name}", options.known)
    if options.tasks is None and options.text is None:
        raise UsageError(
            f"A model of transformers needs --tasks NAMES or --text FILE, but got neither for {options.subject}."
        )
    alone = {"window": "text", "include": "tasks"}
    for name, other in alone.items():
        if getattr(options, name) is not None and getattr(options, other) is None:
            raise UsageError(f"`--{name}` must go with `--{other}`, but stands alone. Leave it out.")
    if options.split is not None:
        raise UsageError(f"`--split` is for the data of a run, but {options.subject} is none. Leave it out.")
    _evaluate_pretrained(options)


def _evaluate_run(options: Options) -> None:
    from rankwise.cli.progress import watching
    from rankwise.core.budget import count
    from rankwise.lab.experiments.run_folder import find_run

    split = options.split or "valid"
    saved = find_run(Path(options.subject))
    experiment = options.experiment.for_saved(saved)
    with watching() as watcher:
        watcher.phase(f"reading {experiment.reads}")
        data = experiment.read_to_evaluate(saved, dict(options.given), split, watcher.read)
        watcher.phase(f"evaluating {saved.folder}")
        task = experiment.make_task(data)
        model = task.load(saved.path).eval()
        quality = task.evaluate(model, split)
    if quality is None:
        raise DataError(f"There are no {split} data: `held_out` is 0. Give --split test.")
    parameters = count(model)
    if options.json:
        answer = {"folder": str(saved.folder), "split": split, "parameters": parameters, **quality}
        print(json.dumps(answer, indent=1))
    else:
        figures = ", ".join(f"{quality[name]:.4f} {words}" for name, words in MEASURES.items() if name in quality)
        say(f"{saved.folder}: {parameters:,} parameters, {split} {figures}")


def _evaluate_pretrained(options: Options) -> None:
    """All that can be wrong is looked at before the weights are read."""
    for name in ("limit", "batch_size", "window"):
        value = getattr(options, name)
        if value is not None and value < 1:
            label = name.replace("_", "-")
            raise UsageError(f"`--{label}` must be a whole number of at least 1, but is {value} instead.")
    out = _check_out(options.out)
    _check_model(name := options.subject)
    from torch import nn

    from rankwise.deploy.devices import find_device
    from rankwise.hf.evaluation import Tasks, TextWindows, check_predicts
    from rankwise.hf.loading import default_window, load_model, load_tokenizer

    if options.device is not None:
        find_device(options.device, nn.Identity())
    config = check_predicts(name, text=options.text is not None)
    tokenizer = load_tokenizer(name, needed=True, what="`rankwise evaluate`")
    text = None
    if options.text is not None:
        window = options.window or default_window(config, WINDOW)
        text = TextWindows(options.text, tokenizer, config, window, options.limit)
    tasks = None if options.tasks is None else Tasks(options.tasks, options.include)
    print(f"Loading {name}", file=sys.stderr)
    model: Any = load_model(name)
    model.to(device=find_device(options.device or "auto", model), dtype=dtype_of(options))
    answer = _about(name, model)
    batch_size = options.batch_size or 1
    if text is not None:
        quality = text.measure(model, batch_size)
        answer["text"] = quality.to_json()
    if tasks is not None:
        answer["tasks"] = tasks.measure(model, tokenizer, batch_size=batch_size, limit=options.limit)
    written = json.dumps(answer, indent=1)
    if out is not None:
        out.write_text(written + "\n", encoding="utf-8")
    print(written) if options.json else _show(answer)


def _check_model(name: str) -> None:
    from rankwise.hub import check_name

    check_name(name)
    from rankwise.lab.experiments.saved_models import kind_of

    if Path(name).is_dir() and kind_of(Path(name)) != "pretrained":
        raise CheckpointError(f"--tasks and --text need a model of transformers, but {name} holds no config.json.")


def _check_out(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.exists():
        raise RankwiseError(f"`--out` must be a new file, but {path} exists. Choose another name.")
    if not path.parent.is_dir():
        raise RankwiseError(f"`--out` must be in a folder that exists, but there is no {path.parent}.")
    return path


def _about(name: str, model: Any) -> dict[str, Any]:
    from rankwise.core.budget import count
    from rankwise.deploy.save import dtype_name

    about = {"model": name, "parameters": count(model), "dtype": dtype_name(model.dtype)}
    return {**about, "device": str(model.device)}


def _show(answer: dict[str, Any]) -> None:
    from rankwise.hf.evaluation import figures_of

    say(f"{answer['model']}: {answer['parameters']:,} parameters, {answer['dtype']} on {answer['device']}")
    if (text := answer.get("text")) is not None:
        bits = "" if text["bits_per_byte"] is None else f", {text['bits_per_byte']:.4f} bits per byte"
        say(f"{text['file']}: perplexity {text['perplexity']:.4f}{bits} ({text['windows']:,} windows)")
        say(text["convention"])
    if (tasks := answer.get("tasks")) is not None:
        cells = []
        for task, metric, value, error in figures_of(tasks):
            number = tasks.get("n-samples", {}).get(task, {}).get("effective")
            cells.append((task, metric, f"{value:.4f}", "" if error is None else f"{error:.4f}", f"{number or ''}"))
        print_table(("task", "metric", "value", "standard error", "questions"), cells, words=("task", "metric"))
        limited = "" if tasks["limit"] is None else f" At most {tasks['limit']} questions of a task: no final figures."
        say(f"lm-eval {tasks['lm_eval']}.{limited}")
