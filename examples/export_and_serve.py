"""Export a compact model to ONNX and answer requests with it, without PyTorch's modules in the way.

python examples/export_and_serve.py

The server is Python's own, on the loopback address only, to show the way from a request to an answer. For a language
model in production: `vllm serve FOLDER` (docs/serving.md).
"""

import argparse
import json
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from torch import Tensor, nn

import rankwise as rw
from rankwise.deploy.export import Runner, onnx

LENGTH = 32


class Classifier(nn.Module):
    """Three classes of texts, read as bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        self.output = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layers(self.embedding(tokens)).mean(dim=1))


def encode(text: str) -> Tensor:
    return torch.tensor([list(text.encode()[:LENGTH].ljust(LENGTH))])


def make_handler(run: Runner) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            (logits,) = run(tokens=encode(text)).values()
            answer = json.dumps({"class": logits.argmax().item()}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    small = rw.compress(Classifier(), rw.Budget(removed=0.5), embeddings=True).eval()
    with tempfile.TemporaryDirectory() as folder:
        # two texts, so that the size of a batch stays open
        made = onnx.export(small, {"tokens": encode("a").repeat(2, 1)}, f"{folder}/onnx")
        print(f"exported: {made.bytes:,} bytes, {made.difference:.0e} from torch")
        server = HTTPServer(("127.0.0.1", 0), make_handler(onnx.load(f"{folder}/onnx")))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(url, data=b"is this a question?") as answer:
            given = json.load(answer)["class"]
        server.shutdown()
        server.server_close()
    with torch.inference_mode():
        print(f"served: class {given}; PyTorch says class {small(encode('is this a question?')).argmax().item()}")


if __name__ == "__main__":
    main()
