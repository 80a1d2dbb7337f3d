"""The commands of SLURM that submitit calls, on this machine: jobs are processes, kept in the folder $FAKE_SLURM."""

from __future__ import annotations

from pathlib import Path

START = 'SLURM_JOB_ID=$id setsid sh "$FAKE_SLURM/$id.sh" >"$FAKE_SLURM/$id.out" 2>&1 & echo $! >"$FAKE_SLURM/$id.pid"'
COMMANDS = {
    "sbatch": f'id=$((100 + $(ls "$FAKE_SLURM" | grep -c sh$))); cp "$1" "$FAKE_SLURM/$id.sh"\n{START}\n'
    'echo "Submitted batch job $id"',
    # --unbuffered --output FILE --error FILE
    "srun": 'shift 5; exec "$@"',
    "sacct": 'echo "JobID|State|NodeList"; for file in "$FAKE_SLURM"/*.pid; do id=$(basename "$file" .pid)\n'
    'kill -0 "$(cat "$file")" 2>/dev/null && state=RUNNING || state=COMPLETED; echo "$id|$state|here"; done',
    "scancel": 'kill -TERM "-$(cat "$FAKE_SLURM/$1.pid")"',
    # requeue ID
    "scontrol": f"id=$2; {START}",
}


def install(folder: Path) -> Path:
    """Write the commands; the folder to be put on the PATH."""
    for name, text in COMMANDS.items():
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return folder / "bin"
