"""The maps beside the code name files, classes and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rankwise

SOURCE = Path(rankwise.__file__).parent


@pytest.mark.parametrize("folder", ["core", "methods"])
def test_every_name_of_the_readme_is_in_the_code(folder: str) -> None:
    text = (SOURCE / folder / "README.md").read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    code = "\n".join(file.read_text() for file in SOURCE.rglob("*.py"))
    names = set(re.findall(r"`(?:\w+\.)*(\w+)(?:\(\w*\))?`", prose)) - {"py", "md"}
    assert len(names) > 10
    assert not [name for name in names if not re.search(rf"\b{name}\b", code)]
    files = set(re.findall(r"(?<![\w/])\w+\.py\b", text))
    assert not [file for file in files if not (SOURCE / folder / file).exists() and not (SOURCE / file).exists()]
