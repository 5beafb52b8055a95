"""Start: PYTHON .../runtimes/loader/server/__main__.py sglang --capability 9.0 --at SOCKET. With
`versions` alone it prints which runtimes the interpreter has.

The folder of this file is made a package of another name, so that its modules find each other without
qconvert, and `sglang` and `vllm` stay the runtimes' own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_NAME = "qconvert_loader_server"


def versions() -> dict[str, str]:
    """Versions of the runtimes that this interpreter has, by name."""
    found: dict[str, str] = {}
    # vLLM may lie apart (vllm_loader.py).
    for name, apart in (("sglang", ""), ("vllm", str(Path(sys.prefix) / "vllm"))):
        for one in importlib.metadata.distributions(name=name, path=[*sys.path, apart]):
            found.setdefault(name, one.version)
    return found


def main() -> None:
    """Become the server of the runtime that the first argument names."""
    if sys.argv[1:] == ["versions"]:
        json.dump(versions(), sys.stdout)
        return
    sys.path[:] = [at for at in sys.path if Path(at or ".").resolve() != _HERE.resolve()]
    spec = importlib.util.spec_from_file_location(
        _NAME, _HERE / "__init__.py", submodule_search_locations=[str(_HERE)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_NAME] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    importlib.import_module(f"{_NAME}.{sys.argv.pop(1)}_loader").main()


if __name__ == "__main__":
    main()
