"""The public face: few names, each explained; a light import; folders that know only what they may."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankwise

SOURCE = Path(rankwise.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = sorted(name for name in dir(rankwise) if not name.startswith("_"))
# running it is what it is for
MODULES = [m.name for m in pkgutil.walk_packages([str(SOURCE)], "rankwise.") if not m.name.endswith("__main__")]


def test_there_are_few_public_names() -> None:
    assert 0 < len(NAMES) <= 20


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_explained(name: str) -> None:
    value = getattr(rankwise, name)
    assert value.__doc__
    # what `dataclass` writes where nobody wrote anything
    assert not value.__doc__.startswith(f"{name}(")


def public_members() -> list[str]:
    return [
        f"{name}.{member}"
        for name in NAMES
        if inspect.isclass(value := getattr(rankwise, name))
        for member, thing in vars(value).items()
        if not member.startswith("_") and (inspect.isfunction(thing) or isinstance(thing, property))
    ]


@pytest.mark.parametrize("name", public_members())
def test_every_public_method_is_explained(name: str) -> None:
    owner, member = name.split(".")
    assert inspect.getdoc(inspect.getattr_static(getattr(rankwise, owner), member))


def test_the_readme_of_the_design_runs_on_these_names() -> None:
    """The names that DESIGN.md, section 4, hands to users."""
    promised = {"Pruner", "Budget", "compress", "count", "save", "load", "find_plan", "Plan", "SizeReport"}
    errors = {"RankwiseError", "BudgetError", "PlanError", "CheckpointError", "DataError"}
    assert promised | errors <= set(NAMES)
    assert all(issubclass(getattr(rankwise, name), rankwise.RankwiseError) for name in errors)


def test_readers_of_types_see_the_names_that_are_there() -> None:
    branch = next(node for node in ast.parse(Path(rankwise.__file__).read_text()).body if isinstance(node, ast.If))
    imports = [node for node in branch.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == {name: f"rankwise.{home}" for name, home in rankwise._HOMES.items()}
    assert {*seen, "VERSION"} == set(NAMES)
    for name, home in seen.items():
        assert getattr(rankwise, name) is getattr(sys.modules[home], name)


ADDRESSES = {
    "rankwise.deploy": [
        "int8",
        "bfloat16",
        "meet_latency",
        "example_inputs",
        "compress_folder",
        "Calibration",
        "ENGINES",
    ],
    "rankwise.deploy.export": ["onnx", "openvino", "pt2"],
    "rankwise.hf": ["PruningCallback", "Distillation", "distillation_loss", "find_plan", "save_pretrained"],
    "rankwise.lab": ["fit"],
}


@pytest.mark.parametrize("package", ADDRESSES)
def test_what_the_docs_mention_has_a_public_address(package: str) -> None:
    if package == "rankwise.hf":
        pytest.importorskip("transformers")
    found = importlib.import_module(package)
    assert all(getattr(found, name).__doc__ for name in ADDRESSES[package])


def test_a_name_that_is_not_there_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'rankwise' has no attribute 'Prunner'"):
        rankwise.Prunner  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Prunner' from 'rankwise'"):
        exec("from rankwise import Prunner")


IMPORT = """
import json, sys
import rankwise
light = sorted(sys.modules)
import torch
started = []
sys.addaudithook(lambda event, _: started.append(event) if event in WATCHED else None)
before = set(sys.modules)
for name in dir(rankwise):
    getattr(rankwise, name)
print(json.dumps({
    "light": light,
    "cuda": torch.cuda.is_initialized(),
    "modules": sorted(set(sys.modules) - before),
    "all": sorted(sys.modules),
    "started": started,
}))
"""
WATCHED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "socket.connect")
HEAVY = ("triton", "transformers", "accelerate", "rich", "matplotlib", "pandas", "datasets", "lightning")


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    """What `import rankwise` and the use of all its names do in a fresh interpreter."""
    code = IMPORT.replace("WATCHED", repr(WATCHED))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_alone_is_quick(imported: dict[str, list[str]]) -> None:
    assert "rankwise.version" in imported["light"]
    assert not {"torch", "numpy", "safetensors"} & set(imported["light"])


def test_importing_touches_no_gpu(imported: dict[str, object]) -> None:
    assert imported["cuda"] is False


@pytest.mark.parametrize("name", HEAVY)
def test_importing_loads_nothing_heavy(imported: dict[str, list[str]], name: str) -> None:
    assert "rankwise.pruner" in imported["modules"]
    assert not [module for module in imported["all"] if module.split(".")[0] == name]


def test_importing_starts_no_compiler(imported: dict[str, list[str]]) -> None:
    assert imported["started"] == []
    compilers = ("torch.utils.cpp_extension", "torch._inductor", "torch._dynamo", "torch.distributed.run")
    assert not [module for module in imported["modules"] if module.startswith(compilers)]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    if name in ("rankwise.serve.config", "rankwise.serve.methods"):
        pytest.importorskip("vllm", reason="these are imported by vLLM alone: make test-vllm")
    assert importlib.import_module(name).__doc__


def test_the_folders_import_only_what_they_may() -> None:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if program is None:
        pytest.skip("import-linter is not installed")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("the contracts are in the repository's pyproject.toml")
    done = subprocess.run([program, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_file_is_long(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400


def dangers(tree: ast.AST) -> list[str]:
    """Whatever could run code that was read from a file."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [a.name for a in names if a.name.split(".")[0] in PICKLES]
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] * (module.split(".")[0] in PICKLES)
                found += [f"torch.{a.name}" for a in names if module == "torch" and a.name in ("load", "save")]
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as name):
                found.append(f"torch.{name}")
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(name)
            case ast.keyword(arg="allow_pickle" | "trust_remote_code" as name, value=ast.Constant(value=True)):
                found.append(name)
    return found


PICKLES = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_nothing_we_write_or_load_can_run_code(file: Path) -> None:
    assert dangers(ast.parse(file.read_text())) == []


CODE = ["import pickle", "from pickle import loads", "torch.load(f)", "from torch import load", "f = torch.save"]


@pytest.mark.parametrize("code", [*CODE, "eval(text)", "np.load(f, allow_pickle=True)"])
def test_what_could_run_code_is_seen(code: str) -> None:
    assert dangers(ast.parse(code))
