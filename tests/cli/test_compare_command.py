"""`rankwise compare`: once in the terminal, and a page for this machine alone, over real HTTP and in a real browser."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from rankwise.cli.app import run
from rankwise.cli.compare import printable
from rankwise.cli.compare_server import HOST, KEY, LARGEST_QUESTION, LONGEST_ANSWER, LONGEST_PROMPT, PageServer
from rankwise.lab.experiments.compare import Comparison, find_pair, open_answering
from tests.cli.cli_toys import refusal
from tests.lab.report.browser import Tab, chromium

QUESTION: dict[str, Any] = {"prompt": "abc", "length": 20, "temperature": 0.0, "seed": 0}
MARKUP = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


@pytest.fixture(scope="module")
def server(finished: Path) -> Iterator[PageServer]:
    dense, small = (str(folder) for folder in find_pair(finished))
    with PageServer(0) as server:
        # a folder may be called anything
        server.comparison = Comparison(open_answering(dense, f"dense: {MARKUP}"), open_answering(small, "small"))
        server.settings = {"length": 20, "temperature": 0.0, "seed": 0}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: PageServer, question: Any = QUESTION, path: str = "/answer", **headers: str | None) -> HTTPResponse:
    """The response to a question; a header that is None is left out."""
    body = question if isinstance(question, bytes) else json.dumps(question).encode()
    sent = {"Host": f"{HOST}:{server.server_port}", KEY: server.key, "Content-Length": str(len(body))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
    client = HTTPConnection(HOST, server.server_port, timeout=30)
    client.putrequest("POST", path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            client.putheader(name, value)
    client.endheaders(body)
    return client.getresponse()


def got(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    client = HTTPConnection(HOST, server.server_port, timeout=30)
    client.request("GET", path, headers={"Host": host or f"{HOST}:{server.server_port}"})
    response = client.getresponse()
    return response.status, response.read().decode()


def events(response: HTTPResponse) -> list[dict[str, Any]]:
    assert response.status == 200
    return [json.loads(line) for line in response.read().splitlines()]


def test_answers_arrive_as_events_and_are_those_of_sample(
    server: PageServer, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = events(asked(server))
    assert [event["kind"] for event in found if event["kind"] != "text"] == ["prompt"] * 2 + ["answer"] * 2 + ["done"]
    assert [event["model"] for event in found if event["kind"] == "text"] == sorted([0, 1] * 21)
    for place, folder in enumerate(find_pair(finished)):
        assert run(["sample", str(folder), "--prompt", "abc", "--length", "20", "--temperature", "0"]) == 0
        (answer,) = (event for event in found if event["kind"] == "answer" and event["model"] == place)
        assert capsys.readouterr().out == f"abc{answer['text']}\n"


def test_it_listens_on_this_machine_only(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.address.startswith(f"http://127.0.0.1:{server.server_port}/")


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1", "example.com:{}", "127.0.0.1.evil:{}", "0.0.0.0:{}"])
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    host = host.format(server.server_port)
    assert asked(server, Host=host).status == 421
    status, text = got(server, f"/?key={server.key}", host)
    assert status == 421
    assert server.key not in text


def test_without_a_host_nothing_is_answered(server: PageServer) -> None:
    assert asked(server, Host=None).status == 421


@pytest.mark.parametrize("key", [None, "", "wrong", "\xe9"])
def test_without_the_key_nothing_is_answered(server: PageServer, key: str | None) -> None:
    response = asked(server, **{KEY: key})
    assert response.status == 403
    assert b"The key is missing or wrong." in response.read()
    for path in ("/", "/?key=", "/?key=wrong", "/?key=%C3%A9"):
        status, text = got(server, path)
        assert status == 403
        assert server.key not in text


def test_the_page_of_another_origin_is_refused(server: PageServer) -> None:
    assert asked(server, Origin="http://example.com").status == 403
    assert asked(server, Origin="null").status == 403
    assert events(asked(server, Origin=f"http://{HOST}:{server.server_port}"))[-1] == {"kind": "done"}


@pytest.mark.parametrize("path", ["/pyproject.toml", "/../../etc/passwd", "/%2e%2e/x", "//etc/passwd", "/answer"])
def test_no_file_is_served(server: PageServer, path: str) -> None:
    assert got(server, f"{path}?key={server.key}") == (404, "There is nothing here.\n")
    if path != "/answer":
        assert asked(server, path=path).status == 404


def test_the_page_is_whole_and_may_load_nothing(server: PageServer) -> None:
    client = HTTPConnection(HOST, server.server_port, timeout=30)
    client.request("GET", f"/?key={server.key}")
    response = client.getresponse()
    policy, page = response.getheader("Content-Security-Policy") or "", response.read().decode()
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy
    assert page.count(policy.split("'nonce-")[1].split("'")[0]) == 2
    assert "[[" not in page
    assert "<img" not in page
    assert response.getheader("Cache-Control") == "no-store"


@pytest.mark.parametrize(
    "question, status, words",
    [
        ({**QUESTION, "prompt": "a" * (LONGEST_PROMPT + 1)}, 413, "at most 20,000 characters, but has 20,001"),
        ({**QUESTION, "length": LONGEST_ANSWER + 1}, 413, "`length` must be at most 2,000, but is 2,001"),
        (b" " * (LARGEST_QUESTION + 1), 413, f"at most {LARGEST_QUESTION:,} bytes, but has {LARGEST_QUESTION + 1}"),
        (b"", 400, "A question must be JSON"),
        (b"[" * 50_000, 400, "A question must be JSON"),
        (b"\xff", 400, "A question must be JSON"),
        ([], 400, "A question must be JSON"),
        ({"prompt": "abc"}, 400, "A question must be JSON"),
        ({**QUESTION, "prompt": 3}, 400, "A question must be JSON"),
        ({**QUESTION, "prompt": "\ud800"}, 400, "A question must be JSON"),
        ({**QUESTION, "length": "20"}, 400, "A question must be JSON"),
        ({**QUESTION, "seed": True}, 400, "A question must be JSON"),
    ],
    ids=str,
)
def test_a_question_out_of_bounds_is_refused(server: PageServer, question: Any, status: int, words: str) -> None:
    response = asked(server, question)
    assert (response.status, response.getheader("Content-Type")) == (status, "text/plain; charset=utf-8")
    assert words in response.read().decode()


@pytest.mark.parametrize("length, status", [(None, 411), ("-1", 411), ("x", 411), ("9" * 5_000, 413)])
def test_a_question_says_its_length(server: PageServer, length: str | None, status: int) -> None:
    assert asked(server, b"", Content_Length=length).status == status


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"prompt": ""}, "`prompt` must hold at least one token"),
        ({"prompt": MARKUP}, "dense: .* must be written in the 8 characters of the corpus, but has '<'"),
        ({"length": 0}, "`length` must be at least 1, but is 0"),
        ({"temperature": float("inf")}, "`temperature` must be at least 0 and finite, but is inf"),
        ({"seed": 2**64}, "`seed` must be a whole number of 64 bits, but is 18446744073709551616"),
    ],
)
def test_what_the_models_refuse_is_told(server: PageServer, changes: dict[str, Any], words: str) -> None:
    (event,) = events(asked(server, {**QUESTION, **changes}))
    assert event["kind"] == "error"
    assert re.search(words, event["message"])


def test_one_question_is_answered_at_a_time_and_others_wait(server: PageServer) -> None:
    alone = [event for event in events(asked(server)) if event["kind"] == "text"]
    with server.answering:
        responses = [asked(server) for _ in range(2)]
        assert [json.loads(response.readline()) for response in responses] == [{"kind": "waiting"}] * 2
    for response in responses:
        found = events(response)
        assert [event for event in found if event["kind"] == "text"] == alone
        assert found[-1] == {"kind": "done"}


def test_too_many_questions_get_a_line(server: PageServer) -> None:
    held = 0
    while server.places.acquire(blocking=False):
        held += 1
    response = asked(server)
    server.places.release(held)
    assert (response.status, response.read()) == (503, b"Too many questions at a time. Ask again.\n")
    assert events(asked(server))[-1] == {"kind": "done"}


def test_a_client_that_goes_away_leaves_the_server_free(server: PageServer) -> None:
    response = asked(server, {**QUESTION, "length": LONGEST_ANSWER})
    response.readline()
    response.close()
    assert events(asked(server))[-1] == {"kind": "done"}


def test_ctrl_c_stops_it_with_one_line(finished: Path) -> None:
    # a shell that starts the tests in the background has its children ignore Ctrl-C
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = [sys.executable, "-c", f"{heard}; from rankwise.cli import main; main()", "compare", str(finished)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("The page is at http://127.0.0.1:")
        assert process.stdout.readline() == "Ctrl-C stops it.\n"
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "\nStopped.\n")
    assert "Traceback" not in err


def test_a_port_in_use_is_one_line_before_anything_is_loaded(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        line = refusal(capsys, "compare", finished, "--port", port)
    assert f"`--port` must be free, but {port} is in use." in line


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "needs two models, or the folder of a run that holds both, but nowhere is neither"),
        (["a", "b", "c"], "takes two models, but got 3"),
        (["{}", "nowhere", "--prompt", "a"], "nowhere"),
        (["{}", "--json"], "`--json` must go with `--prompt`"),
        (["{}", "--prompt", "a", "--open"], "`--open` is for the page"),
        (["{}", "--prompt", "a", "--port", "8000"], "`--port` is for the page"),
        (["{}", "--port", "0"], "`--port` must be from 1 to 65535, but is 0"),
        (["{}", "--port", "65536"], "`--port` must be from 1 to 65535, but is 65536"),
        (["{}", "--length", "2001"], "`length` must be at most 2,000, but is 2,001"),
        (["{}", "--length", "0"], "`length` must be at least 1, but is 0"),
        (["{}", "--temperature", "-1"], "`temperature` must be at least 0 and finite, but is -1.0"),
        (["{}", "--prompt", "XYZ"], "must be written in the 8 characters of the corpus, but has 'X'"),
        (["{}", "--prompt", "a" * 20_001], "at most 20,000 characters, but has 20,001"),
        (["{}", "--device", "nothing", "--prompt", "a"], "`device` must be one that torch has here.*'nothing'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", *(word.format(finished) for word in arguments)]) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("Loading ")]
    assert (said.out, len(lines)) == ("", 1)
    assert re.search(words, lines[0])


def test_a_prompt_is_answered_in_the_terminal(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["compare", str(finished), "--prompt", "abc", "--length", "200"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompt"], found["unit"], len(found["models"])) == ("abc", "nats per token", 2)
    dense, small = found["models"]
    assert dense["parameters"] > small["parameters"]
    for row in found["models"]:
        assert row["bytes"] == 4 * row["parameters"]
        assert len(row["answer"]["text"]) == row["answer"]["tokens"] == 200
        assert f"abc{row['answer']['text']}" in shown.replace("\n", "")
        assert f"{row['prompt']['mean']:.4f}" in shown
        assert f"{row['answer']['mean']:.4f}" in shown


def test_nothing_that_a_model_writes_steers_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\u202ee\x00é") == "a\\x1b[2Jb\tc\nd\\u202ee\\x00é"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def tab(browser: Any, server: PageServer) -> Iterator[Tab]:
    """The page on a phone, about which the browser must have nothing to say at the end."""
    tab = Tab(browser, server.address, "#go", viewport={"width": 400, "height": 800})
    yield tab
    assert tab.said == []
    own = f"http://{HOST}:{server.server_port}/"
    assert {address for address in tab.asked if not address.startswith("data:")} <= {server.address, f"{own}answer"}
    tab.context.close()


def ask(tab: Tab, prompt: str) -> None:
    """By keyboard alone."""
    tab.page.locator("#prompt").focus()
    tab.page.keyboard.press("Control+A")
    tab.page.keyboard.type(prompt)
    tab.page.keyboard.press("Control+Enter")
    tab.page.wait_for_selector("#go:enabled")


def test_a_prompt_is_typed_and_both_models_answer(tab: Tab, server: PageServer) -> None:
    ask(tab, "abcabc")
    assert tab.text("#status") == "Done."
    wanted = [
        event["text"] for event in events(asked(server, {**QUESTION, "prompt": "abcabc"})) if event["kind"] == "answer"
    ]
    assert tab.page.locator(".written").all_text_contents() == wanted
    assert tab.page.locator(".given").all_text_contents() == ["abcabc"] * 2
    rows = [row.split("\t") for row in tab.page.locator("#figures").inner_text().splitlines()]
    about = server.comparison.about()["models"]
    assert [row[1] for row in rows] == [f"{model['parameters']:,}" for model in about]
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[3:])
    # what a folder is called is text
    assert MARKUP in tab.text("h2")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_tokens_are_read_by_keyboard_and_by_pointer(tab: Tab, server: PageServer) -> None:
    ask(tab, "abc")
    (answer, _) = (event for event in events(asked(server)) if event["kind"] == "answer")
    tab.page.locator(".answer").first.focus()
    tab.page.keyboard.press("Home")
    assert tab.page.locator(".detail").first.inner_text() == '"a": not predicted under the dense model'
    tab.page.keyboard.press("End")
    last = answer["pieces"][-1]
    about = f'"{last["text"]}": loss {last["loss"]:.3f} nats under the small model'
    assert tab.page.locator(".detail").first.inner_text() == about
    tab.page.locator(".written").first.locator(".token").first.hover()
    first = answer["pieces"][0]
    assert f'"{first["text"]}": loss {first["loss"]:.3f}' in tab.page.locator(".detail").first.inner_text()


def test_a_refusal_is_shown_as_text(tab: Tab) -> None:
    ask(tab, "<b>x</b>")
    assert "must be written in the 8 characters of the corpus, but has '<'" in tab.text("#status")
    ask(tab, "abc")
    assert tab.text("#status") == "Done."


def test_dark_is_dark(browser: Any, server: PageServer) -> None:
    found = []
    for scheme in ("light", "dark"):
        tab = Tab(browser, server.address, "#go", color_scheme=scheme)
        found.append(tab.page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        tab.context.close()
    light, dark = (sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) / 3 for colour in found)
    assert light > 200 > 100 > dark
