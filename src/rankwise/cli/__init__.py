"""The command line: `rankwise COMMAND`. Thin: parse, call, print."""

from rankwise.cli.app import main as main
