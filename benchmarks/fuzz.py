"""Seeded mutations of what rankwise reads from others, and what became of each: an answer, or one clear error.

A case is a number: it chooses a subject (a folder and how it is opened), a file of it and a change. Most changes are
sealed again with right checksums, because otherwise the checksums would catch them all. `torture.py fuzz` runs them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rankwise as rw
from rankwise.errors import RankwiseError
from rankwise.files import CHECKSUM, FILES, sealed
from rankwise.lab.training.checkpoint import Checkpoint, Checkpoints
from rankwise.methods import make_method

CPU_SECONDS, WALL_SECONDS, MEGABYTES, LETTERS = 2.0, 30, 1_000, 1_000
"""What a case may take, and how long its message may be. Seconds are of the processor: others may run beside."""
NO_MEMORY = re.compile("MemoryError|allocate memory")
"""What an error says after memory ran out: where there is more, the same case takes all of it."""
SLOW = "slow: "
is_tracing = False
"""Whether unexpected errors are printed with their traceback."""
DEEP = "[" * 3_000 + "]" * 3_000
EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1_000, 10**9, 10**12, 2**31, 2**62, 2**63, 10**30, 0.5, -0.0, 1e-300, 1e300,
    "", "a", "pipeline", "PreTrainedModel", "../../etc/passwd", "/dev/zero", "\ud800", "\udcff", "\x00", "x" * 5_000,
    "1", "None", "float32", "int8", [], {}, [[]], {"": {}}, [None], list(range(300)), {"a": {"b": {"c": 1}}},
)  # fmt: skip
RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "9" * 5_000, DEEP, '{"a":' * 900 + "1" + "}" * 900, '"\\ud83d"',
    "nul", "'",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A folder, the files that are changed, and what reads it."""

    folder: Path
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    seal: str | None = None
    """The file that holds the checksums, under `key` if that is not empty."""
    key: str = ""


class TooLongError(BaseException):
    """A case was still running after `WALL_SECONDS`."""


def run_case(number: int, subjects: dict[str, Subject], scratch: Path) -> tuple[str, str | None]:
    """Run a case; what it did, and what was wrong with the outcome, if anything."""
    told, wrong = _run_once(number, subjects, scratch)
    # what a case takes by itself it takes again; a machine without free memory makes any case slow
    return _run_once(number, subjects, scratch) if wrong is not None and wrong.startswith(SLOW) else (told, wrong)


def _run_once(number: int, subjects: dict[str, Subject], scratch: Path) -> tuple[str, str | None]:
    draw = random.Random(number)
    name = draw.choice(list(subjects))
    subject, folder = subjects[name], scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(subject.folder, folder, symlinks=True)
    told = f"{number} {name}: {change(draw, subject, folder)}"
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrong = None
    try:
        with _alarm(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            subject.read(folder)
    except RankwiseError as error:
        text = str(error)
        if "\n" in text or not text.strip() or len(text) > LETTERS:
            wrong = f"{len(text)} letters in {len(text.splitlines())} lines: {text[:300]!r}"
        if NO_MEMORY.search(text):
            wrong = f"no memory: {text[:300]}"
    except TooLongError:
        wrong = f"{SLOW}not done after {WALL_SECONDS} s"
    # anything else is a traceback for the user
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
        if is_tracing:
            traceback.print_exc()
    spent, grown = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if wrong is None and spent > CPU_SECONDS:
        wrong = f"{SLOW}took {spent:.1f} s"
    if wrong is None and grown > MEGABYTES * 1_000:
        wrong = f"took {grown / 1_000:.0f} MB"
    return told, wrong


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(*args: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(WALL_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def change(draw: random.Random, subject: Subject, folder: Path) -> str:
    """Change a file of the folder; in words."""
    path = folder / draw.choice(subject.files)
    kind = draw.choices(("json", "raw", "bytes", "file"), (14, 3, 3, 1))[0]
    if kind == "file":
        return f"{path.name} is {_replace(draw, path)}"
    if kind == "bytes":
        what = _bytes(draw, path)
    elif path.suffix == ".safetensors":
        what = _header(draw, path)
    else:
        what = _json(draw, path, raw=kind == "raw")
    if subject.seal is not None and draw.random() < 0.85:
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError):
            _seal_again(folder / subject.seal, subject.key)
            what += ", sealed"
    return f"{path.name}: {what}"


def _replace(draw: random.Random, path: Path) -> str:
    what = draw.choice(("gone", "empty", "a folder", "a pipe", "a device", "a loop", "a long file"))
    path.unlink()
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what in ("a device", "a loop"):
        path.symlink_to("/dev/zero" if what == "a device" else path)
    elif what != "gone":
        with path.open("wb") as file:
            file.truncate((1 << 36) * (what == "a long file"))
    return what


def _bytes(draw: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    how = draw.choice(("flip", "cut", "insert", "repeat"))
    place = draw.randrange(max(len(content), 1))
    if how == "flip" and content:
        for _ in range(draw.choice((1, 1, 3, 30))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "insert":
        content[place:place] = draw.randbytes(draw.choice((1, 8, 100)))
    else:
        content += content[place:]
    path.write_bytes(content)
    return f"{how} at {place}"


def _header(draw: random.Random, path: Path) -> str:
    """Change the JSON in a file of weights, or the number that says how long it is."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header, what = _mutated(draw, header)
    text = json.dumps(header).encode()
    size = draw.choice((len(text),) * 8 + (0, 1, len(text) + 1, 2**31, 2**63))
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return f"header {what}, length {size}"


def _json(draw: random.Random, path: Path, raw: bool) -> str:
    content = json.loads(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        content, what = _mutated(draw, content, mark=raw)
    text = json.dumps(content)
    if raw:
        value = draw.choice(RAW)
        text, what = text.replace(f'"{MARK}"', value), f"{what} {value[:20]}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return what


MARK = "here-goes-what-json-cannot-write"


def _mutated(draw: random.Random, content: Any, mark: bool = False) -> tuple[Any, str]:
    """A copy with one change somewhere."""
    content = copy.deepcopy(content)
    places: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        here = waiting.pop()
        pairs = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in pairs:
            places.append((here, key))
            waiting.append(value)
    if not places:
        return (MARK if mark else draw.choice(EXTREMES)), "all of it"
    # the few entries at the top are as likely as the many below
    here, key = draw.choice(places if draw.random() < 0.7 else places[: max(len(content), 1)])
    old = here[key]
    how = draw.choice(("value", "value", "value", "nudge", "remove", "add", "swap"))
    if mark:
        here[key] = MARK
    elif how == "nudge" and isinstance(old, int | float):
        here[key] = draw.choice((old + 1, old - 1, -old, old * 2, old * 1_000_000, float(old)))
    elif how == "remove":
        del here[key]
    elif how == "add" and isinstance(here, dict):
        here[draw.choice((f"{key}x", "", "0", "\ud800", "weight", "x" * 3_000))] = copy.deepcopy(old)
    elif how == "swap":
        other, place = draw.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            here[key] = copy.deepcopy(other[place])
    else:
        here[key] = copy.deepcopy(draw.choice(EXTREMES))
    shown = here.get(key, "gone") if isinstance(here, dict) else "changed"
    return content, f"{how} {str(key)[:30]!r} -> {str(shown)[:40]!r}"


def _seal_again(path: Path, key: str) -> None:
    """Give a changed file the checksums that it would have had."""
    whole = json.loads(path.read_bytes())
    entry = whole[key] if key else whole
    files = [path.with_name(name) for name in entry.get(FILES, {})]
    plain = {name: value for name, value in entry.items() if name not in (CHECKSUM, FILES)}
    entry = sealed(plain, [file for file in files if file.is_file()])
    path.write_text(json.dumps({**whole, key: entry} if key else entry))


def subjects(folder: Path) -> dict[str, Subject]:
    """Everything that a stranger can send."""
    return {**_saved(folder), **_runs(folder), **_pretrained(folder), "checkpoint": _checkpoint(folder)}


def _saved(folder: Path) -> dict[str, Subject]:
    from rankwise.lab.models.adaptive import Clusters
    from rankwise.lab.models.sru import SRUConfig, SRULanguageModel
    from rankwise.lab.models.transformer_xl import TransformerXL, TransformerXLConfig
    from tests.deploy.saved_toys import MODELS, compact

    found = {}
    files = ("rankwise.json", "rankwise.json", "model.safetensors")
    txl = TransformerXLConfig(num_words=9, width=8, num_heads=2, head_width=4, inner=8, num_layers=2, memory_length=4)
    sru = SRUConfig(
        num_words=9, embedding_width=8, width=8, num_layers=2, rank=6, clusters=Clusters(cutoffs=(4,), widths=(6, 4))
    )
    for name, model in (("txl", TransformerXL(txl)), ("sru", SRULanguageModel(sru))):
        small = rw.compress(model, rw.Budget(removed=0.3), embeddings=True, layout="pivot")
        rw.save(small, folder / name)
        found[f"load {name}"] = Subject(folder / name, files, rw.load, files[0])
    for name, method in (("mlp", "np-l0"), ("tied", "flop-l0 pivot"), ("low-rank", "svd"), ("buffered", "svd pivot")):
        build, inputs = MODELS[name]
        rw.save(compact(build, inputs(), method), folder / name)
        read = lambda path, build=build: rw.load(path, build())  # noqa: E731
        found[f"load {name} {method}"] = Subject(folder / name, files, read, files[0])
    return found


def _runs(folder: Path) -> dict[str, Subject]:
    """The folder of a run, read by the commands."""
    from rankwise.lab.experiments.pipeline import run
    from tests.lab.experiments.experiment_toys import toy

    place = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    run(toy(folder, method=make_method("fac")), place)
    method = "fac"
    files = (
        "experiment.json", "record.json", f"{method}/experiment.json", f"{method}/vocabulary.json",
        f"{method}/export.json", f"{method}/model/rankwise.json", f"{method}/model/model.safetensors",
    )  # fmt: skip
    commands = {
        "report": "report {}",
        "report part": f"report {{}}/{method}",
        "sample": f"sample {{}}/{method} --length 3",
        "sample run": "sample {} --length 3 --top-k 2",
        "plan": "plan {} --removed 0.2",
        "plan model": f"plan {{}}/{method}/model --json",
        "evaluate": f"evaluate {{}}/{method} --corpus.name {folder / 'letters.txt'} --corpus.cache {folder / 'cache'}",
        "help": "evaluate {} --help",
        "bench": f"bench {{}}/{method} --batch 1 --threads 1 --repeats 1 --length 3",
        "compress": f"compress {{}}/{method} --removed 0.1 --out {{}}-small --overwrite",
    }
    seal = f"{method}/model/rankwise.json"
    return {
        f"cli {name}": Subject(place, files, lambda path, words=words: _command(words, path), seal)
        for name, words in commands.items()
    }


class CommandError(Exception):
    """A command ended otherwise than with an answer or one line."""


def _command(words: str, path: Path) -> None:
    from rankwise.cli.app import run

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run([word.replace("{}", str(path)) for word in words.split()])
    lines = [line for line in said.getvalue().splitlines() if line.startswith("rankwise: ")]
    errors = [line for line in lines if not line.startswith("rankwise: warning")]
    is_clear = all(len(line) <= LETTERS and not NO_MEMORY.search(line) for line in errors)
    if code not in (0, 1, 2) or len(errors) != (code != 0) or not is_clear:
        raise CommandError(f"code {code}: {said.getvalue()[:300]!r}")


COMMANDS = (
    "plan {} --removed 0.1",
    "compress {} --removed 0.1 --out {}-small --overwrite --device cpu",
    "bench {} --batch 1 --threads 1 --repeats 1 --length 3",
)
"""What is done with folders of transformers."""


def _pretrained(folder: Path) -> dict[str, Subject]:
    import transformers as hf

    from rankwise.hf.loading import load_model

    hf.utils.logging.set_verbosity(hf.logging.CRITICAL)
    hf.utils.logging.disable_progress_bar()
    shared: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shared |= {"intermediate_size": 24, "max_position_embeddings": 32}
    models = {
        "bert": hf.BertForSequenceClassification(hf.BertConfig(**shared)),
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**shared, num_key_value_heads=1, tie_word_embeddings=True)),
    }
    found = {}
    files = ("config.json", "config.json", "model.safetensors")
    for name, model in models.items():
        model.save_pretrained(folder / f"dense-{name}")
        found[f"from_pretrained dense {name}"] = Subject(
            folder / f"dense-{name}", files, lambda path: load_model(str(path))
        )
        small = rw.compress(model.eval(), rw.Budget(removed=0.2), embeddings=True, layout="pivot")
        small.save_pretrained(folder / name)
        stock = partial(_stock, type(model))
        for how, read in (("", stock), (" by command", lambda path: load_model(str(path)))):
            found[f"from_pretrained {name}{how}"] = Subject(folder / name, files, read, files[0], "quantization_config")
        more = (*files, "generation_config.json") if name == "llama" else files
        for words in COMMANDS:
            command = partial(_command, words)
            subject = Subject(folder / name, more, command, files[0], "quantization_config")
            found[f"cli {words.split()[0]} {name}"] = subject
    return found


def _stock(kind: Any, path: Path) -> None:
    # a folder that does not speak of rankwise is a matter of transformers alone
    if not (path / "config.json").is_file():
        return
    with (path / "config.json").open("rb") as file:
        is_ours = b'"rankwise"' in file.read(1 << 20)
    if is_ours:
        kind.from_pretrained(path)


def _checkpoint(folder: Path) -> Subject:
    weight = torch.randn(3, 2)
    about = {"configuration": {"training": {"lr": 0.1}}, "best": {"step": 4, "loss": 1.0}, "logged": 4, "seconds": 0.5}
    state = Checkpoint(4, True, {"weight": weight, "same": weight}, {"random.cpu": torch.get_rng_state()}, about)
    Checkpoints(folder / "checkpoints", keep=2).save(state, None)

    def read(path: Path) -> None:
        shutil.rmtree(path.parent / "read", ignore_errors=True)
        (path.parent / "read").mkdir()
        path.rename(path.parent / "read" / "step-4")
        Checkpoints(path.parent / "read", keep=2).load(4)

    files = ("checkpoint.json", "checkpoint.json", "model.safetensors", "training.safetensors")
    return Subject(folder / "checkpoints" / "step-4", files, read, files[0])
