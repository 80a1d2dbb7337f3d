"""A run that is killed or interrupted at any moment goes on, and ends with the same weights bit for bit."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise.lab.tasks.language as streams
from rankwise.errors import CheckpointError
from rankwise.lab.training import Interrupted, Outcome, Progress
from rankwise.lab.training.records import RunFolder
from tests.lab.training import training_toys
from tests.lab.training.training_toys import CONFIG, At, KillError, kill, make_corpus, make_model, run

TIMED = ("seconds", "tokens_per_second")


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMED} for line in RunFolder(folder).lines()]


def assert_same(one: Outcome, other: Outcome) -> None:
    expected = one.model.state_dict()
    assert expected.keys() == other.model.state_dict().keys()
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert one.best == other.best
    assert metrics(one.folder) == metrics(other.folder)


@pytest.mark.parametrize("kind", ["sru", "txl", "adaptive"])
@pytest.mark.parametrize("method", [None, "flop-l0", "flop-agp"])
def test_a_run_killed_at_every_step_ends_with_the_same_weights(kind: str, method: str | None, tmp_path: Path) -> None:
    config = dataclasses.replace(
        CONFIG, dense_steps=4 if method else 0, accumulate=2, checkpoint_every=3, reset_every=5
    )
    whole = run(kind, method, tmp_path / "whole", config=config)
    for step in range(1, config.steps + 1):
        with pytest.raises(KillError):
            run(kind, method, tmp_path / "killed", config=config, progress=At(step, kill))
    assert_same(whole, run(kind, method, tmp_path / "killed", config=config))


@pytest.mark.parametrize("method", ["dense", "fac", "np-l0", "agp"])
def test_the_other_methods_go_on_too(method: str, tmp_path: Path) -> None:
    whole = run("sru", method, tmp_path / "whole")
    for step in (3, 5, 7, 10):
        with pytest.raises(KillError):
            run("sru", method, tmp_path / "killed", progress=At(step, kill))
    assert_same(whole, run("sru", method, tmp_path / "killed"))


@pytest.mark.parametrize("method", [None, "flop-l0"])
def test_a_run_with_a_teacher_goes_on_too(method: str | None, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, dense_steps=0, accumulate=2, checkpoint_every=3, reset_every=5, distill=0.5)

    def once(name: str, progress: Progress | None = None) -> Outcome:
        teacher = make_model("sru", len(make_corpus(tmp_path / "data").vocabulary))
        return run("sru", method, tmp_path / name, config=config, progress=progress, teacher=teacher)

    whole = once("whole")
    for step in (2, 4, 7, 11):
        with pytest.raises(KillError):
            once("killed", At(step, kill))
    assert_same(whole, once("killed"))


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, other = (
        run("sru", "flop-l0", tmp_path / str(seed), config=dataclasses.replace(CONFIG, seed=seed)) for seed in (0, 1)
    )
    assert one.best != other.best


def test_lines_of_metrics_have_no_gap_and_no_duplicate_after_kills(tmp_path: Path) -> None:
    for step in (3, 5, 8, 11, None):
        progress = Progress() if step is None else At(step, kill)
        try:
            run("sru", "flop-l0", tmp_path / "run", progress=progress)
        except KillError:
            # a line that was being written
            with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
                file.write('{"step": 99, "lo')
    due = [s for s in range(1, 13) if s % CONFIG.log_every == 0 or s % CONFIG.eval_every == 0]
    assert [line["step"] for line in RunFolder(tmp_path / "run").lines()] == due


def in_a_process(folder: Path, event: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("training_toys.py")), "sru", "flop-l0", str(folder), event]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_sigkill_in_a_step_and_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    folder = tmp_path / "killed"
    assert in_a_process(folder, "step=7").returncode == -signal.SIGKILL
    assert (folder / "checkpoints" / "step-6").is_dir()
    assert in_a_process(folder, "write=1").returncode == -signal.SIGKILL
    names = sorted(entry.name for entry in (folder / "checkpoints").iterdir())
    assert any(name.startswith(".step-") for name in names)
    assert_same(whole, run("sru", "flop-l0", folder))
    assert not [entry for entry in (folder / "checkpoints").iterdir() if entry.name.startswith(".")]


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    folder = tmp_path / "full"
    with pytest.raises(KillError):
        run("sru", "flop-l0", folder, progress=At(7, kill))
    done = in_a_process(folder, "disk=4000")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("CheckpointError: The checkpoint of step 8 must be written to")
    assert line.endswith("The last one, of step 6, is untouched; free some space and run again.")
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert_same(whole, run("sru", "flop-l0", folder))


@pytest.mark.parametrize("step", [1, 4, 5, 12])
def test_ctrl_c_leaves_a_run_that_goes_on_where_it_stopped(step: int, tmp_path: Path) -> None:
    """In the dense phase, at its end, in pruning, and at the very end."""
    whole = run("txl", "flop-l0", tmp_path / "whole")
    config = dataclasses.replace(CONFIG, checkpoint_every=100)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"Stopped after step {step} of 12; run the same again") as stopped:
        run("txl", "flop-l0", tmp_path / "run", config=config, progress=At(step, press_ctrl_c))
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    began = []
    progress = Progress()
    progress.begin = lambda step, steps: began.append(step)  # type: ignore[method-assign]
    assert_same(whole, run("txl", "flop-l0", tmp_path / "run", config=config, progress=progress))
    assert began == [step]


def test_ctrl_c_in_an_evaluation_repeats_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    real, calls = streams.evaluate, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            press_ctrl_c()
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(streams, "evaluate", interrupted)
        with pytest.raises(Interrupted, match="step 4"):
            run("sru", "flop-l0", tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-4-unevaluated").is_dir()
    assert_same(whole, run("sru", "flop-l0", tmp_path / "run"))


def test_a_scheduler_that_ends_the_job_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    config = dataclasses.replace(CONFIG, checkpoint_every=100)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="Stopped after step 7 of 12; run the same again") as stopped:
        run(
            "sru",
            "flop-l0",
            tmp_path / "run",
            config=config,
            progress=At(7, lambda: signal.raise_signal(signal.SIGTERM)),
        )
    assert stopped.value.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert_same(whole, run("sru", "flop-l0", tmp_path / "run", config=config))


def test_a_second_ctrl_c_ends_the_program_at_once(tmp_path: Path) -> None:
    def press_twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt) as stopped:
        run("sru", None, tmp_path / "run", config=DENSE, progress=At(3, press_twice))
    assert not isinstance(stopped.value, Interrupted)
    assert_same(run("sru", None, tmp_path / "whole", config=DENSE), run("sru", None, tmp_path / "run", config=DENSE))


DENSE = dataclasses.replace(CONFIG, dense_steps=0)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = run("sru", "flop-l0", tmp_path / "run")
    again = run("sru", "flop-l0", tmp_path / "run", progress=At(13, kill))
    assert_same(first, again)
    assert again.record == first.record


@pytest.mark.parametrize(
    "change, says",
    [
        ({"config": dataclasses.replace(CONFIG, lr=0.5)}, "`lr` was 0.01 and is now 0.5"),
        ({"about": {"preset": "other"}}, '`preset` was "demo" and is now "other"'),
        ({"method": "flop-agp"}, '`method` was "flop-l0" and is now "flop-agp"'),
        ({"method": None, "config": DENSE}, "`prunes` was true and is now false"),
        ({"kind": "adaptive"}, "`corpus` was"),
        ({"kind": "txl"}, "`parameters` was 722 and is now 946"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"kind": "sru", "method": "flop-l0", "about": {"preset": "demo"}}
    with pytest.raises(KillError):
        run(**arguments, folder=tmp_path / "run", progress=At(9, kill))
    before = {path: path.read_bytes() for path in tmp_path.glob("run/**/*") if path.is_file()}
    with pytest.raises(CheckpointError, match=says) as refused:
        run(**{**arguments, **change}, folder=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("run/**/*") if path.is_file()}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KillError):
        run("sru", "flop-l0", tmp_path / "run", progress=At(3, kill))
    with pytest.raises(CheckpointError, match="must be of this model, but are of another: Missing key") as refused:
        run("txl", "flop-l0", tmp_path / "run")
    assert "\n" not in str(refused.value)


def test_how_often_checkpoints_are_written_may_change(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    with pytest.raises(KillError):
        run("sru", "flop-l0", tmp_path / "run", progress=At(9, kill))
    other = dataclasses.replace(CONFIG, checkpoint_every=1, keep=1)
    assert_same(whole, run("sru", "flop-l0", tmp_path / "run", config=other))
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-12"]


def test_a_damaged_checkpoint_is_refused_with_a_remedy(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    with pytest.raises(KillError):
        run("sru", "flop-l0", tmp_path / "run", progress=At(9, kill))
    last = tmp_path / "run" / "checkpoints" / "step-8"
    weights = last / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="step-8 is not: .* Remove that folder; the run continues from .* step 6"):
        run("sru", "flop-l0", tmp_path / "run")
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    assert_same(whole, run("sru", "flop-l0", tmp_path / "run"))


def test_a_run_whose_best_checkpoint_is_gone_goes_on_from_before_it(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, lr=1.0, clip=None, dense_steps=0, keep=1)
    whole = run("sru", None, tmp_path / "whole", config=config)
    assert whole.best is not None and whole.best.step < config.steps
    folder = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", folder)
    best = folder / f"checkpoints/step-{whole.best.step}"
    (best / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="Remove that folder; the run starts again"):
        run("sru", None, folder, config=config)
    shutil.rmtree(best)
    assert_same(whole, run("sru", None, folder, config=config))


def test_a_second_process_in_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    whole = run("sru", "flop-l0", tmp_path / "whole")
    command = [sys.executable, training_toys.__file__, "sru", "flop-l0", str(tmp_path / "run")]
    others = []

    def start_another() -> None:
        others.append(subprocess.run(command, capture_output=True, text=True, check=False))

    assert_same(whole, run("sru", "flop-l0", tmp_path / "run", progress=At(1, start_another)))
    assert others[0].returncode != 0
    assert f"another one is running in {tmp_path / 'run'}. Wait until it has ended" in others[0].stderr
    # and is let in afterwards
    assert subprocess.run(command, check=False).returncode == 0


def test_nothing_that_is_written_can_run_code(tmp_path: Path) -> None:
    run("adaptive", "flop-l0", tmp_path / "run")
    written = {path.suffix for path in (tmp_path / "run").glob("**/*") if path.is_file() and path.stat().st_size}
    assert written == {".json", ".jsonl", ".safetensors"}
