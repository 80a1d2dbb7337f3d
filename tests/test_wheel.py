"""The wheel holds all that is needed: installed alone, without the checkout, it runs."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from rankwise.version import VERSION

ROOT = Path(__file__).parent.parent
SMALL = {
    "model.width": 12, "model.embedding_width": 8, "model.num_layers": 1, "model.rank": 4, "method.anneal_steps": 2,
    "both.steps": 4, "both.warmup_steps": 1, "both.batch_size": 4, "both.window": 8, "both.eval_every": 4,
    "both.log_every": 2, "both.checkpoint_every": 4, "both.device": "cpu", "compare": "",
}  # fmt: skip


def told(*words: str | Path, **settings: object) -> str:
    """What a program prints; it must end well."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    told(*pip, "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, and sees the packages of this one but not its rankwise."""
    folder = tmp_path_factory.mktemp("environment")
    told(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    told(*pip, "--no-deps", "--no-index", wheel)
    # folders that a .pth file names are searched, but .pth files in them (of an editable install) are not read
    (site,) = folder.glob("lib/*/site-packages")
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "others.pth").write_text("\n".join(others))
    return folder


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, object]:
    """How to start a program elsewhere, with nothing of the checkout around it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
    return {"cwd": tmp_path, "env": {**kept, "RANKWISE_CACHE": str(tmp_path / "cache"), "COLUMNS": "80"}}


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.startswith(f"rankwise-{VERSION}.dist-info/")}
    files = (path for path in (ROOT / "src" / "rankwise").rglob("*") if path.is_file())
    assert names == {path.relative_to(ROOT / "src").as_posix() for path in files if path.parent.name != "__pycache__"}
    assert "rankwise/py.typed" in names
    assert {Path(name).suffix for name in names if name.startswith("rankwise/lab/kernels/sru/")} >= {".py", ".c", ".h"}


def test_it_runs_outside_of_the_checkout(installed: Path, alone: dict[str, object], tmp_path: Path) -> None:
    rankwise = installed / "bin" / "rankwise"
    where = "import sys, rankwise; print(rankwise.__file__, *sys.path, sep='\\n')"
    file, *path = told(installed / "bin" / "python", "-c", where, **alone).splitlines()
    assert installed.resolve() in Path(file).resolve().parents
    assert not [each for each in path if each and Path(each).resolve() in (ROOT, ROOT / "src")]
    assert told(rankwise, "--version", **alone) == f"rankwise {VERSION}\n"
    assert "demo" in told(rankwise, "presets", **alone)

    draw = random.Random(0)
    (tmp_path / "text.txt").write_text("".join(draw.choices("abcdefgh", k=2_000)))
    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    shown = told(rankwise, "run", "demo", "--corpus.name", "text.txt", *words, "--out", "run", **alone)
    assert "flop-l0" in shown
    assert (tmp_path / "run" / "flop-l0" / "model").is_dir()
    # the kernels are built from the sources that the wheel holds
    if shutil.which("cc"):
        assert list((tmp_path / "cache").rglob("*.so"))
