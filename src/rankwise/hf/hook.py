"""Joining transformers as soon as it is there, without importing it.

transformers offers packages no entry point. So `import rankwise` waits for the module that every model of transformers
needs: one finder in front of the others, which leaves when it is done and changes nothing for any other module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MODELS = "transformers.modeling_utils"


class _Waiting:
    """Lets the finders behind it find the module, and joins when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_join(module: ModuleType) -> None:
                run(module)
                _join()

            # on this one loader, which serves this one module
            spec.loader.exec_module = run_and_join  # type: ignore[method-assign]
        return spec


def join_when_imported() -> None:
    """Join transformers now if it is imported, else as soon as it is."""
    if MODELS in sys.modules:
        _join()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _join() -> None:
    try:
        from rankwise.hf.register import register

        register()
    except (ImportError, AttributeError) as error:
        import warnings

        # never a reason for `import transformers` to fail
        warnings.warn(
            f"rankwise cannot load its models with this version of transformers: {error}.", RuntimeWarning, stacklevel=2
        )
