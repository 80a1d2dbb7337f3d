"""benchmarks/jobs.py and gpu_queue.py: what was measured is kept however a queue ends, and nothing is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_queue
import gpu_tests
import jobs
import pytest
import torch
from harness import Record
from jobs import Job, Queue, processes_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
MEASURE = """
import json, sys, time
from pathlib import Path
file, last = Path(sys.argv[1]), int(sys.argv[2])
rows = json.loads(file.read_text())["rows"] if file.exists() else []
while len(rows) < last:
    time.sleep(0.05)
    rows.append({"name": len(rows)})
    file.with_suffix(".part").write_text(json.dumps({"rows": rows}))
    file.with_suffix(".part").replace(file)
"""
"""Measures a row in a twentieth of a second, until there are so many."""
FAMILY = """
import subprocess, sys, time
ignores = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {ignores!r}]); {ignores}"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
subprocess.Popen([sys.executable, "-c", ignores])
time.sleep(0.5)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
exec(ignores)
"""
"""Has children and grandchildren, one of them in a session of its own, and ignores Ctrl-C, or ends before they do."""


def job(code: str, *words: object, seconds: int = 60, record: str = "rows.json", **settings: Any) -> Job:
    given = " ".join(map(str, words))
    command = f"{sys.executable} -c {jobs.shlex.quote(code.replace('{', '{{').replace('}', '}}'))} {given}"
    return Job(command=command, toy="", seconds=seconds, record=record, least=0, **settings)


def begun(job: Job, out: Path, work: Path) -> subprocess.Popen[bytes]:
    """A queue of one job, in a process of its own."""
    script = (
        "import sys, time; from pathlib import Path; from jobs import Job, Queue\n"
        "job = Job(command=sys.argv[1], toy='', seconds=60, record='rows.json', least=0)\n"
        "Queue(Path(sys.argv[2]), Path(sys.argv[3])).run({'rows': job}, time.monotonic() + 60)\n"
    )
    path = os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT / "src")))
    words = [sys.executable, "-c", script, job.command, str(out), str(work)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path})


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def rows_in(out: Path) -> int:
    try:
        with zipfile.ZipFile(out / "queue.zip") as packed:
            return len(json.loads(packed.read("records/rows.json"))["rows"])
    except (FileNotFoundError, KeyError):
        return 0


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "GRACE", 0.3)


def test_a_queue_that_is_killed_has_packed_its_rows_and_the_same_again_measures_the_rest(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    queue = begun(job(MEASURE, "{records}/rows.json", 10_000), out, work)
    try:
        wait_until(lambda: rows_in(out) >= 3)
    finally:
        queue.kill()
        queue.wait()
    before = rows_in(out)
    assert sorted(file.name for file in out.iterdir() if file.name[0] != ".") == ["logs.txt", "queue.zip"]
    # where its jobs are left, the next one ends them
    again = Queue(out, work)
    assert processes_of(f"{work}:") == []
    again.run({"rows": job(MEASURE, "{records}/rows.json", before + 3)}, time.monotonic() + 60)
    assert again.ended("rows") == "well" and rows_in(out) >= before + 3


def test_a_job_that_fails_or_lasts_too_long_stops_no_other_and_leaves_no_process(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "out", tmp_path / "work")
    given = {
        "fails": job(FAMILY, 3, record="a.json"),
        "lasts": job(FAMILY, seconds=2, record="b.json"),
        "leaves": job(FAMILY, 0, record="c.json"),
        "rows": job(MEASURE, "{records}/rows.json", 2),
    }
    queue.run(given, time.monotonic() + 60)
    ends = {name: queue.ended(name) for name in given}
    assert ends == {"fails": "with exit code 3", "lasts": "at its limit, 2 s", "leaves": "well", "rows": "well"}
    assert processes_of(f"{queue.work}:") == []
    assert rows_in(tmp_path / "out") == 2


def test_the_same_again_runs_what_is_not_done_and_what_failed_last(tmp_path: Path) -> None:
    note = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); sys.exit(int(sys.argv[3]))"
    order = "{records}/order.txt"
    given = {
        "fails": job(note, order, "fails", 1),
        "works": job(note, order, "works", 0),
        "data": job(note, order, "data", 0, "{data}", needs="work*"),
    }
    for _ in range(2):
        Queue(tmp_path / "out", tmp_path / "work").run(given, time.monotonic() + 60)
    given["other"] = job(note, order, "other", 0)
    Queue(tmp_path / "out", tmp_path / "work", data=tmp_path).run(given, time.monotonic() + 60)
    text = (tmp_path / "work/records/order.txt").read_text()
    assert text == "fails works fails data other fails "


def test_what_hangs_is_tried_after_all_others_and_what_the_time_of_all_ended_in_its_place(tmp_path: Path) -> None:
    hang = "import sys, time; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); time.sleep(int(sys.argv[3]))"
    order = "{records}/order.txt"
    given = {
        "hangs": job(hang, order, "hangs", 600, seconds=1),
        "lasts": job(hang, order, "lasts", 600, seconds=600),
    }
    Queue(tmp_path / "out", tmp_path / "work").run(given, time.monotonic() + 3)
    given["works"] = job(hang, order, "works", 0)
    queue = Queue(tmp_path / "out", tmp_path / "work")
    given["lasts"] = job(hang, order, "lasts", 0)
    queue.run(given, time.monotonic() + 60)
    assert (queue.records / "order.txt").read_text() == "hangs lasts lasts works hangs "


def test_a_job_waits_until_the_one_that_it_goes_by_has_ended_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue(tmp_path / "out", tmp_path / "work")
    note = "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); sys.exit(int(sys.argv[3]))"
    order = "{records}/order.txt"
    for code in (1, 0):
        given = {"first": job(note, order, "first", code), "second": job(note, order, "second", 0, after="first")}
        queue.run(given, time.monotonic() + 60)
    assert (queue.records / "order.txt").read_text() == "first first second "
    assert capsys.readouterr().out.count("second: left out, because first has not ended well") == 1


def test_an_attempt_has_another_number_also_where_the_one_before_was_killed_with_the_queue(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    code = "import sys, time; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); time.sleep(600)"
    for number in (1, 2):
        queue = begun(job(code, numbers, "{attempt}"), tmp_path / "out", tmp_path / "work")
        try:
            wait_until(lambda number=number: numbers.exists() and len(numbers.read_text().split()) == number)
        finally:
            queue.kill()
            queue.wait()
    # ends what was left
    Queue(tmp_path / "out", tmp_path / "work")
    assert len(set(numbers.read_text().split())) == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "tests,inferense"], "--only must name jobs .* but has 'inferense'"),
        (["--show"], "the folder of a queue must have queue.zip, but .* has not"),
        (["--toy", "--data", "nowhere"], "--data must be a folder, but nowhere is none"),
        pytest.param([], "there must be a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has one")),
    ],
)
def test_a_queue_that_would_measure_nothing_is_refused_at_once(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_queue.main([str(tmp_path), "--work", str(tmp_path / "work"), *words])
    assert re.search(said, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_begun_that_would_not_measure_anything_in_time(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "out", tmp_path / "work")
    few = Job(command=sys.executable, toy="", seconds=90, record="rows.json", least=30)
    queue.run({"rows": few}, time.monotonic() + 20)
    assert queue.ended("rows") == "not yet"


def test_what_runs_beside_others_does_so_only_while_no_job_is_timed(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "out", tmp_path / "work")
    ask = (
        "import sys; from jobs import processes_of; "
        "open(sys.argv[1], 'a').write(f'{len(processes_of(sys.argv[2])) > 0} ')"
    )
    words = ("{records}/seen.txt", f"{queue.work}:beside:")
    given = {name: job(ask, *words, timed=timed) for name, timed in (("a", False), ("b", True), ("c", False))}
    queue.run(given, time.monotonic() + 60, job("import time; time.sleep(600)", timed=False))
    assert (queue.records / "seen.txt").read_text() == "True False True "
    assert queue.ended("beside") == "with the others" and queue.jobs["beside"]["attempts"] == 2


def test_neighbours_that_are_not_timed_run_at_once_and_timed_ones_alone(tmp_path: Path) -> None:
    """The first two wait for each other; what runs when one begins is what has begun and has not ended."""
    queue = Queue(tmp_path / "out", tmp_path / "work")
    code = (
        "import sys, time; from pathlib import Path; place, name, other = Path(sys.argv[1]), *sys.argv[2:]\n"
        "begun, ended = (sorted(each.stem for each in place.glob(f'*.{end}')) for end in ('begun', 'ended'))\n"
        "(place / f'{name}.begun').touch()\n"
        "end = time.monotonic() + 30\n"
        "while other != 'nobody' and not (place / f'{other}.begun').exists() and time.monotonic() < end: pass\n"
        "met = other == 'nobody' or (place / f'{other}.begun').exists()\n"
        "(place / f'{name}.seen').write_text(f'{met} {sorted(set(begun) - set(ended))}')\n"
        "(place / f'{name}.ended').touch()"
    )
    (place := tmp_path / "place").mkdir()
    others, timed = {"a": "b", "b": "a", "c": "nobody", "d": "nobody"}, {"c"}
    given = {
        name: job(code, place, name, other, timed=name in timed, after="c" if name == "d" else "", record=name)
        for name, other in others.items()
    }
    queue.run(given, time.monotonic() + 100)
    assert all(queue.ended(name) == "well" for name in given)
    seen = {name: (place / f"{name}.seen").read_text() for name in given}
    assert all(text.startswith("True") for text in seen.values())
    assert seen["c"] == seen["d"] == "True []"


def test_a_job_goes_on_from_the_record_that_is_in_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results/rows.json").write_text(json.dumps({"rows": [{"name": "older"}]}))
    given = {"rows": job(MEASURE, "{records}/rows.json", 3, goes_on=True)}
    for _ in range(2):
        queue = Queue(tmp_path / "out", tmp_path / "work")
        queue.run(given, time.monotonic() + 60)
    rows = json.loads((queue.records / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["older", 1, 2]


def test_records_are_taken_into_results_and_those_of_other_machines_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    root = tmp_path / "root"
    for name in ("results", "benchmarks"):
        (root / name).mkdir(parents=True)
    queue = Queue(out, tmp_path / "work")

    def parts(*engines: str) -> dict[str, Any]:
        return {"parts": [{"engine": each, "model": "m", "rows": [{}] * len(engines)} for each in engines]}

    (root / "results/engines.json").write_text(json.dumps(parts("torch", "cuda", "onnx")))
    (queue.records / "engines.json").write_text(json.dumps(parts("cuda")))
    (root / "benchmarks/results.csv").write_text("head\nold\n")
    (queue.records / "results.csv").write_text("head\nnew\n")
    for name in ("gpu-decoder", "gpu-training"):
        (queue.records / f"{name}.json").write_text('{"rows": [{}]}')
    for name in ("engines", "loop", "decoder"):
        queue.jobs[name] = {"ended": "well"}
    queue.jobs["plain-training"] = {"ended": "stopped after 9 s"}
    rows = [{"job": "row a", "failed": "too large"}, {"job": "row b", "failed": "gone"}, {"job": "row b"}]
    (queue.records / gpu_queue.ARENA).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (queue.work / "state.json").write_text(json.dumps(queue.state))
    queue.pack()
    found = gpu_queue.Packed(out)
    found.take(root)
    made = json.loads((root / "results/engines.json").read_text())["parts"]
    assert [(part["engine"], len(part["rows"])) for part in made] == [("torch", 3), ("cuda", 1), ("onnx", 3)]
    assert (root / "benchmarks/results.csv").read_text() == "head\nold\nnew\n"
    assert (root / "results/gpu-decoder.json").exists() and not (root / "results/gpu-training.json").exists()
    lines = found.summary().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["job", *gpu_queue.JOBS, "beside"]
    assert lines[-1] == "failed: row a: too large"


def test_every_job_has_a_script_a_dry_run_and_a_time() -> None:
    for each in (*gpu_queue.JOBS.values(), gpu_queue.FUZZ):
        for word in each.command.split():
            assert not word.endswith(".py") or (ROOT / word).exists()
        assert each.toy and each.least <= each.seconds


def test_a_row_of_fewer_cases_does_not_take_the_place_of_one_of_more() -> None:
    def record(**tried: int) -> str:
        return json.dumps({"rows": [{"name": name, "tried": number} for name, number in tried.items()]})

    found = json.loads(gpu_queue.merged("torture.json", record(fuzz=100, kills=5), record(fuzz=60, kills=7, disk=1)))
    assert {row["name"]: row["tried"] for row in found["rows"]} == {"fuzz": 100, "kills": 7, "disk": 1}


def test_tests_that_passed_are_not_run_again_and_a_failure_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert os.environ['FIXED'] == 'yes'\n"
        "@pytest.mark.skip\ndef test_is_skipped(): pass\n"
    )
    outcomes = tmp_path / "outcomes.jsonl"
    command = f"{sys.executable} -m pytest -p gpu_tests --outcomes {outcomes} --rootdir {tmp_path} test_toy.py"

    def run(fixed: str, code: int) -> str:
        settings = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "FIXED": fixed}
        done = subprocess.run(command.split(), cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert done.returncode == code
        return done.stdout

    assert run("no", 1).count("\nFAILED test_toy.py::test_fails\n") == 1
    assert gpu_tests.read(outcomes.read_text()) == {
        "test_toy.py::test_passes": "passed",
        "test_toy.py::test_fails": "failed",
        "test_toy.py::test_is_skipped": "skipped",
    }
    assert "1 passed, 2 deselected" in run("yes", 0)
    assert gpu_tests.read(outcomes.read_text())["test_toy.py::test_fails"] == "passed"
    assert "3 deselected" in run("yes", 0)


def test_a_test_that_kills_its_process_is_a_failure_and_all_others_run(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_toy.py").write_text(
        "import os, time, pytest\n"
        "@pytest.mark.parametrize('number', range(24))\n"
        "def test_toy(number):\n    time.sleep(0.1)\n    assert number != 9 or os._exit(1)\n"
    )
    outcomes = tmp_path / "outcomes.jsonl"
    command = f"{sys.executable} -m pytest -n 2 -p gpu_tests --outcomes {outcomes} --rootdir {tmp_path} test_toy.py"
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run(command.split(), cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    found = gpu_tests.read(outcomes.read_text())
    wanted = {f"test_toy.py::test_toy[{number}]": "failed" if number == 9 else "passed" for number in range(24)}
    assert found == wanted


def test_a_file_of_tests_that_cannot_be_imported_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_package\n")
    (tmp_path / "test_toy.py").write_text("def test_passes(): pass\n")
    outcomes = tmp_path / "outcomes.jsonl"
    command = f"{sys.executable} -m pytest -p gpu_tests --outcomes {outcomes} --rootdir {tmp_path} {tmp_path}"
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    for _ in range(2):
        done = subprocess.run(command.split(), cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert done.returncode == 1 and "no_such_package" in done.stdout, done.stdout
        assert gpu_tests.read(outcomes.read_text()) == {"test_toy.py::test_passes": "passed"}


def test_a_record_goes_on_with_rows_of_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    Record(file, "toy", {"size": 1, "record": file}).add({"name": "a", "value": 1})
    same = Record(file, "toy", {"size": 1, "record": file})
    assert same.row("a") == {"name": "a", "value": 1} and same.row("b") is None
    same.add({"name": "b"})
    same.add({"name": "a", "value": 2})
    assert json.loads(file.read_text())["rows"] == [{"name": "a", "value": 2}, {"name": "b"}]
    assert Record(file, "toy", {"size": 2}).rows == []
    # without a file nothing is kept, and rows are there all the same
    plain = Record(None, "toy", {})
    plain.add({"name": "a"})
    assert plain.rows == [{"name": "a"}]


def test_temporary_files_of_a_job_that_is_killed_are_removed(tmp_path: Path) -> None:
    code = (
        "import signal, sys, tempfile, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write(tempfile.mkdtemp()); time.sleep(600)"
    )
    queue = Queue(tmp_path / "out", tmp_path / "work")
    queue.run({"run": job(code, "{records}/said.txt", seconds=1)}, time.monotonic() + 60)
    assert not Path((queue.records / "said.txt").read_text()).exists()


def test_temporary_files_of_a_queue_that_is_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    code = "import sys, tempfile, time; open(sys.argv[1], 'w').write(tempfile.mkdtemp()); time.sleep(600)"
    said = tmp_path / "said"
    queue = begun(job(code, said), tmp_path / "out", tmp_path / "work")
    try:
        wait_until(lambda: said.exists() and said.read_text() != "")
    finally:
        queue.kill()
        queue.wait()
    assert Path(said.read_text()).exists()
    Queue(tmp_path / "out", tmp_path / "work")
    assert not Path(said.read_text()).exists()


def test_ctrl_c_reaches_a_job_before_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "try:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    open(sys.argv[1], 'w').write('kept')\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        queue = Queue(tmp_path / "out", tmp_path / "work")
        queue.run({"run": job(code, "{records}/said.txt", seconds=2)}, time.monotonic() + 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (queue.records / "said.txt").read_text() == "kept"
