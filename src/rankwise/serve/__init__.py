"""Serving engines: the plugin by which vLLM serves folders of compact models (`vllm serve FOLDER`).

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins` in `pyproject.toml`.
"""

from __future__ import annotations

import logging

METHOD = "rankwise"
"""The name that `config.json` has under `quant_method`; nothing is quantized."""


def register() -> None:
    """Tell vLLM how to load folders of rankwise.

    A vLLM without the interface that we need gets a line in its log: other people's models must still be served.
    """
    try:
        from rankwise.serve.config import register_with_vllm
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.rankwise").warning(
            f"Folders of rankwise must be served by vLLM 0.32 or newer, but this one has no such interface: {error}. "
            "Upgrade vLLM."
        )
    else:
        register_with_vllm()


__all__ = ["register"]
