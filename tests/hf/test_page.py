"""docs/huggingface.md is true today: its code runs, in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rankwise as rw
from tests.hf.hf_families import QUIET, batch, build, logits

pytestmark = [
    *QUIET,
    pytest.mark.filterwarnings("ignore:gates cannot decide"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true:UserWarning"),
]
PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the page is in the repository")
def test_the_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bert: Any = build("bert")
    bert.bert.save_pretrained("my-bert")
    llama = build("llama")
    llama.save_pretrained("my-llama")
    rows = batch(bert, size=16)
    names: dict[str, Any] = {
        "train_dataset": [{name: value[i] for name, value in rows.items()} for i in range(16)],
        "batches": [batch(bert, seed=i) for i in range(4)],
        "text_batches": [batch(llama, seed=i) for i in range(4)],
    }
    parts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(parts) == 7
    sizes = []
    for part in parts:
        code = part.replace("=300", "=3").replace("=500", "=4").replace('"runs"', '"runs", use_cpu=True')
        exec(code, names)
        sizes.append(rw.count(names["small"]))
    assert "quantization_config" not in Path("my-llama-narrow/config.json").read_text()
    both = AutoModelForCausalLM.from_pretrained("my-llama-both")
    assert rw.count(both) == rw.count(names["both"]) <= names["size"] < names["dense"]
    dense = names["pruner"].account.dense
    assert max(sizes) <= 0.65 * dense
    planned = {use.name.rpartition(".")[2] for site in names["plan"].sites for use in site.uses}
    assert planned == {"query", "key", "value", "dense"}
    assert "bert.pooler.dense" in {item.name for item in names["plan"].left_out}
    tokens = torch.arange(6).unsqueeze(0)
    assert logits(names["model"], input_ids=tokens).isfinite().all()
    with torch.no_grad():
        want = names["model"].bert(tokens).last_hidden_state
        torch.testing.assert_close(names["encoder"](tokens).last_hidden_state, want, rtol=1e-5, atol=1e-5)
