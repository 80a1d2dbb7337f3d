"""A process that looks like that of a cell and trains nothing, so that it starts in no time.

python toy_cell.py FOLDER SEED NAME [WITHOUT ...]; NAME begins with "bad" to fail, with "slow" to wait for a signal.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from pathlib import Path


def stop(number: int, frame: object) -> None:
    print("stopped", flush=True)
    sys.exit(128 + number)


def main(place: str, seed: str, name: str, *without: str) -> None:
    folder, made = Path(place), Path(place, f"seed-{seed}", name)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    print("started", flush=True)
    if name.startswith("bad"):
        sys.exit("ValueError: it is bad")
    while name.startswith("slow") and not (folder / "hurry").exists():
        time.sleep(0.01)
    made.mkdir(parents=True, exist_ok=True)
    (made / "export.json").write_text("{}")
    plan = hashlib.sha256((folder / "workers" / "plan.json").read_bytes()).hexdigest()
    word = {"plan": f"sha256:{plan}", "without": without}
    (folder / "workers" / f"seed-{seed}" / f"{name}.json").write_text(json.dumps(word))
    print("finished", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
