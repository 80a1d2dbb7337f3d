"""What a model is called: a path that leads nowhere is refused at once, and the hub is asked once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from rankwise.cli.app import run
from rankwise.errors import CheckpointError, RankwiseError
from rankwise.hf.loading import load_model
from rankwise.hf.loading import load_tokenizer as load_calibration_tokenizer
from rankwise.hub import check_name, source_of
from rankwise.lab.data.glue import task_named
from rankwise.lab.tasks.pretrained import load_tokenizer
from rankwise.lab.tasks.sentences import check_encoder


class Hub(BaseHTTPRequestHandler):
    """Knows no model, or breaks off before it answers."""

    asked: list[str]
    silent: bool

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        if not self.silent:
            self.send_error(404)

    def log_message(self, format: str, *words: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.asked, Hub.silent = [], False
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    # tests may run where there is no network, and be told so
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


PATHS = ["./missing", "../missing", "~/missing", "/missing", "/no/such/model", "a/b/c", "here/missing", "C:\\x"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cwd"
    (folder / "here").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_leads_nowhere_is_refused_and_the_hub_not_asked(
    path: str, here: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    message = (
        "must be a folder that exists, or a name on the hub such as org/name, but there is no '.*'. Check the path"
    )
    with pytest.raises(CheckpointError, match=f"^MODEL {message}"):
        load_model(path)
    for call in (load_tokenizer, lambda name: check_encoder(name, task_named("mrpc"), 128)):
        with pytest.raises(CheckpointError, match=f"^`model.name` {message}"):
            call(path)
    assert run(["compress", path, "--removed", "0.3", "--out", "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "MODEL must be a folder that exists" in line
    assert hub.asked == []


@pytest.mark.parametrize("name", ["bert-base-uncased", "org/name", "there/missing", "."])
def test_what_may_be_a_name_or_exists_is_let_through(name: str, here: Path) -> None:
    check_name(name)


def test_a_hub_that_does_not_answer_is_asked_once(here: Path, hub: type[Hub]) -> None:
    hub.silent = True
    with pytest.raises(CheckpointError, match="no such folder, and the hub gave no such model: We couldn't connect"):
        load_model("org/name")
    assert hub.asked == ["/org/name/resolve/main/config.json"]
    hub.asked.clear()
    with pytest.raises(CheckpointError, match="MODEL must be .* but 'org/name' is not: there is no such folder"):
        load_calibration_tokenizer("org/name", needed=True)
    hub.asked.clear()
    with pytest.raises(RankwiseError, match=r"`model.name` must be a folder with a model, .* but org/name is neither"):
        check_encoder("org/name", task_named("mrpc"), 128)
    assert len(hub.asked) == 1


def test_a_hub_that_answers_is_asked_by_transformers(here: Path, hub: type[Hub]) -> None:
    assert source_of("org/name") == {}
    with pytest.raises(CheckpointError, match="but 'org/name' is not: "):
        load_model("org/name")


def test_offline_mode_asks_nobody(here: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert source_of("org/name") == {"local_files_only": True}
    with pytest.raises(CheckpointError, match="but 'org/name' is not: "):
        load_model("org/name")
    assert hub.asked == []


def test_a_folder_asks_nobody(here: Path, hub: type[Hub]) -> None:
    with pytest.raises(CheckpointError, match="but 'here' is not: "):
        load_model("here")
    assert hub.asked == []
