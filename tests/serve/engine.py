"""Loads folders in vLLM one after the other and writes what it says: `python engine.py JOBS.json ANSWERS.json`.

A job is a folder and settings of `vllm.LLM`; its answer is the tokens after each prompt, with the logprobs of the
likeliest ones, or the error. One process for all, because to import vLLM takes longer than to load a tiny model.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

NEW_TOKENS = 10
LIKELIEST = 5


def answer(folder: str, prompts: list[list[int]], **settings: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 64, "max_num_seqs": 4}
    llm = LLM(folder, skip_tokenizer_init=True, disable_log_stats=True, **{"enforce_eager": True, **sizes, **settings})
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=LIKELIEST, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(each.token_ids) for each in found],
        "logprobs": [[{word: each.logprob for word, each in step.items()} for step in one.logprobs] for one in found],
    }


def too_old() -> dict[str, Any]:
    """What the plugin says to a vLLM that lacks a part of the interface."""
    import logging

    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    import rankwise.serve

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.rankwise").addHandler(handler)
    present = QuantizeMethodBase.tie_weights
    del QuantizeMethodBase.tie_weights
    try:
        rankwise.serve.register()
    finally:
        QuantizeMethodBase.tie_weights = present
    return {"said": said}


def main(jobs: Path, answers: Path) -> None:
    found: dict[str, Any] = {"too old": too_old()}
    for name, job in json.loads(jobs.read_text()).items():
        try:
            found[name] = answer(**job)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        finally:
            from vllm.distributed import cleanup_dist_env_and_memory

            gc.collect()
            cleanup_dist_env_and_memory()
        answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
