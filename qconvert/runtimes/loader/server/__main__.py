"""Start: PYTHON .../runtimes/loader/server/__main__.py sglang --capability 9.0 --at SOCKET.

The folder of this file is made a package of another name, so that its modules find each other without
qconvert, and `sglang` and `vllm` stay the runtimes' own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_NAME = "qconvert_loader_server"


def main() -> None:
    """Become the server of the runtime that the first argument names."""
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
