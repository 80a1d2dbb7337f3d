"""A plugin of pytest for runs that may be cut short: `PYTHONPATH=benchmarks pytest -p gpu_tests --outcomes FILE`.

Each test adds a line to FILE as it ends, and what fails is printed at once. The same command goes on with the tests of
which FILE does not say that they passed or were skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcomes", type=Path, required=True, metavar="FILE", help="outcomes of tests, a line each")


def read(text: str) -> dict[str, str]:
    """The last outcome of every test."""
    return {line["test"]: line["outcome"] for line in map(json.loads, text.splitlines())}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    done = [item for item in items if item.nodeid in config.done]
    items[:] = [item for item in items if item.nodeid not in config.done]
    config.hook.pytest_deselected(items=done)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    # nothing is left to be run, which pytest calls 5
    if exitstatus == 5 and session.config.getoption("outcomes").exists():
        session.exitstatus = 0


def pytest_configure(config: Any) -> None:
    if hasattr(config, "workerinput"):
        config.done = config.workerinput["done"]
        return
    # one file that lacks a package here must not keep all others from being run
    config.option.continue_on_collection_errors = True
    # of several processes, the one that hears of all tests
    file = config.getoption("outcomes")
    known = read(file.read_text(encoding="utf-8")) if file.exists() else {}
    config.done = {test: outcome for test, outcome in known.items() if outcome != "failed"}
    config.pluginmanager.register(_Outcomes(file))


class _Outcomes:
    def __init__(self, file: Path) -> None:
        self.file = file

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        # a process that takes the place of one that died must collect the same tests, whatever has passed meanwhile
        node.workerinput["done"] = node.config.done

    def pytest_runtest_logreport(self, report: Any) -> None:
        # a test that passes has a report for its setup and its teardown too
        if report.when != "call" and report.passed:
            return
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")
        if report.failed:
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)
