"""The page of `rankwise compare` and its server, for this machine alone.

It listens on 127.0.0.1, answers only under its own name (a foreign site that is rebound to 127.0.0.1 has another) and
only to who knows the key in its address. It reads no file but its own page. One question is answered at a time.
"""

from __future__ import annotations

import errno
import json
import secrets
import socketserver
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from rankwise.errors import RankwiseError, first_line

if TYPE_CHECKING:
    from rankwise.lab.experiments.compare import Comparison

HOST = "127.0.0.1"
KEY = "X-Rankwise-Key"
"""The header of a question that carries the key; a foreign page cannot set it without asking, which is not granted."""
LONGEST_PROMPT = 20_000
"""Characters."""
LONGEST_ANSWER = 2_000
"""Tokens."""
LARGEST_QUESTION = 8 * LONGEST_PROMPT
"""Bytes of a question, with room for what JSON escapes."""
MOST_WAITING = 4
"""Questions that wait while one is answered."""
SECONDS = 30
"""How long a silent client is waited for, and an answer that is to stop."""
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class RefusedError(Exception):
    """A request that is not answered, and its HTTP status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_request(prompt: str, length: int) -> None:
    """Refuse a prompt or an answer that is too long."""
    if len(prompt) > LONGEST_PROMPT:
        raise RankwiseError(
            f"`prompt` must have at most {LONGEST_PROMPT:,} characters, but has {len(prompt):,}. Give a shorter one."
        )
    if length > LONGEST_ANSWER:
        raise RankwiseError(f"`length` must be at most {LONGEST_ANSWER:,}, but is {length:,} instead.")


class PageServer(ThreadingHTTPServer):
    """Serves the page at `address` once `comparison` and `settings`, the page's first values, are set."""

    comparison: Comparison
    settings: dict[str, Any]
    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.key = secrets.token_urlsafe(24)
        self.answering = threading.Lock()
        self.places = threading.BoundedSemaphore(1 + MOST_WAITING)
        self.stopping = threading.Event()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror or error}"
            raise RankwiseError(
                f"`--port` must be free, but {port} {why}. Choose another, or leave it out and get a free one."
            ) from None

    def server_bind(self) -> None:
        # that of HTTPServer asks the network for a name
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a client that went away, or is silent, is no error of ours
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/?key={self.key}"

    def stop(self) -> None:
        """Let the answer in progress end at its next token."""
        self.stopping.set()
        self.answering.acquire(timeout=SECONDS)


class _Handler(BaseHTTPRequestHandler):
    # the end of an answer is the end of its connection
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "rankwise", ""
    timeout = SECONDS
    server: PageServer

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
            self._check(address.path, "/", (parse_qs(address.query).get("key") or [""])[0])
        except RefusedError as error:
            self._refuse(error)
            return
        nonce = secrets.token_urlsafe(16)
        content = _page(self.server, nonce).encode()
        self._head(HTTPStatus.OK, "text/html", POLICY.format(nonce=nonce))
        self.wfile.write(content)

    def do_POST(self) -> None:
        try:
            self._check(urlsplit(self.path).path, "/answer", self.headers.get(KEY, ""))
            prompt, settings = self._question()
            if not self.server.places.acquire(blocking=False):
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "Too many questions at a time. Ask again.")
        except RefusedError as error:
            self._refuse(error)
            return
        try:
            self._answer(prompt, settings)
        finally:
            self.server.places.release()

    def _check(self, path: str, expected: str, key: str) -> None:
        own = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        if self.headers.get("Host") not in own:
            raise RefusedError(HTTPStatus.MISDIRECTED_REQUEST, f"This server answers only as {own[0]}.")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{name}" for name in own]:
            raise RefusedError(HTTPStatus.FORBIDDEN, "This server answers only its own page.")
        if path != expected:
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is nothing here.")
        if not secrets.compare_digest(key.encode(errors="replace"), self.server.key.encode()):
            raise RefusedError(HTTPStatus.FORBIDDEN, "The key is missing or wrong. Use the address as printed.")

    def _question(self) -> tuple[str, dict[str, Any]]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "A question must say its length.")
        # int() of very many digits is refused by Python
        if len(length) > len(str(LARGEST_QUESTION)) or int(length) > LARGEST_QUESTION:
            limit = f"A question must have at most {LARGEST_QUESTION:,} bytes, but has {length[:20]}."
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, limit)
        try:
            asked = json.loads(self.rfile.read(int(length)))
            prompt, number, heat, seed = (asked[name] for name in ("prompt", "length", "temperature", "seed"))
            numeric = type(number) is int and type(heat) in (int, float) and type(seed) is int
            # surrogates cannot be written as UTF-8
            prompt.encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            numeric = False
        if not numeric:
            why = "A question must be JSON: a text `prompt`, whole numbers `length` and `seed`, a number `temperature`."
            raise RefusedError(HTTPStatus.BAD_REQUEST, why)
        try:
            check_request(prompt, number)
        except RankwiseError as error:
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from None
        return prompt, {"length": number, "temperature": heat, "seed": seed}

    def _answer(self, prompt: str, settings: dict[str, Any]) -> None:
        """Events, a line of JSON each; the last one is `done` or `error`."""
        self._head(HTTPStatus.OK, "application/x-ndjson")
        if not self.server.answering.acquire(blocking=False):
            self._send({"kind": "waiting"})
            self.server.answering.acquire()
        try:
            for event in self._events(prompt, settings):
                self._send(event)
                if self.server.stopping.is_set():
                    return
        finally:
            self.server.answering.release()

    def _events(self, prompt: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            yield from self.server.comparison.answers(prompt, **settings)
            yield {"kind": "done"}
        except RankwiseError as error:
            yield {"kind": "error", "message": str(error)}
        # such as memory that does not suffice: the page must not wait for ever, and the next question may be shorter
        except RuntimeError as error:
            yield {"kind": "error", "message": f"The models stopped: {first_line(error)}"}

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")

    def _refuse(self, error: RefusedError) -> None:
        self._head(error.status, "text/plain")
        self.wfile.write(f"{error}\n".encode())

    def _head(self, status: HTTPStatus, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their address holds the key."""


def _page(server: PageServer, nonce: str) -> str:
    """One HTML file: the look of the report, and all that the page needs to know as JSON."""
    content = {
        **server.comparison.about(),
        "settings": server.settings,
        "key": server.key,
        "header": KEY,
        "longest": {"prompt": LONGEST_PROMPT, "answer": LONGEST_ANSWER},
    }
    look = files("rankwise.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    page = files("rankwise.cli").joinpath("compare.html").read_text(encoding="utf-8")
    # the content last: it may hold anything
    known = {"nonce": nonce, "css": look, "content": json.dumps(content).replace("<", "\\u003c")}
    for name, text in known.items():
        page = page.replace(f"[[ {name} ]]", text)
    return page
