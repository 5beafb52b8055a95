"""Import what all classes of transformers share, without what no calibration uses of it.

transformers imports optional packages where they are installed: scipy for losses of object
detection, scikit-learn for assisted generation, torchvision for images, torchaudio for sound, accelerate
for models on several devices. `from_config` of Qwen3-MoE took 4.0 s of CPU after `import torch`, 0.7 s
of it scipy and accelerate, and more where scikit-learn and torchvision are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from qconvert.core import own_process

_UNUSED = ("accelerate", "scipy", "sklearn", "torchaudio", "torchvision")
# A class's own module is imported afterwards, and finds what it asks for.
_SHARED = (
    "transformers.generation.utils",
    "transformers.masking_utils",
    "transformers.processing_utils",
    "transformers.modeling_layers",
)


def load_shared() -> None:
    """Import it. Only a process of our own goes without: there nobody else asks transformers for what it
    then lacks."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    loaded = any(name in sys.modules for name in ("transformers.modeling_utils", "llmcompressor"))
    if loaded or not own_process.is_own():
        return
    with _absent(_UNUSED), _listed_once():
        for name in _SHARED:
            import_module(name)


@contextmanager
def _absent(packages: tuple[str, ...]) -> Iterator[None]:
    """Let transformers find none of these packages for a while. Where its functions are others than
    those of its release here, it finds them all."""
    asked: Any = import_module("transformers.utils.import_utils")
    find = getattr(asked, "_is_package_available", None)
    answers: list[Any] = [getattr(asked, f"is_{name}_available", None) for name in packages]
    if find is None or not all(hasattr(one, "cache_clear") for one in answers):
        yield
        return

    def found(name: str, return_version: bool = False) -> Any:
        if name in packages:
            return False, "N/A" if return_version else None
        return find(name, return_version)

    def forget() -> None:
        for one in answers:
            one.cache_clear()

    forget()
    asked._is_package_available = found
    try:
        yield
    finally:
        asked._is_package_available = find
        forget()


@contextmanager
def _listed_once() -> Iterator[None]:
    """Let `transformers.models` have the list of all classes, which `transformers` has read already:
    from 3,000 files, 0.6 s of CPU. It keeps what it read of 128 folders of 500, and would read again."""
    asked: Any = import_module("transformers.utils.import_utils")
    read: Any = getattr(asked, "define_import_structure", None)
    if not hasattr(read, "cache_info"):
        yield
        return

    def known(path: Any, prefix: str | None = None) -> Any:
        folder = Path(path).parent
        if prefix is not None or folder != Path(asked.__file__).parent.parent / "models":
            return read(path, prefix)
        # As transformers itself has asked, which then adds what is not of its models.
        whole = read(folder, prefix="models")
        return {
            needs: {
                name.removeprefix("models."): names
                for name, names in modules.items()
                if name.startswith("models.")
            }
            for needs, modules in whole.items()
        }

    asked.define_import_structure = known
    try:
        yield
    finally:
        asked.define_import_structure = read
