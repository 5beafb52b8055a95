"""The runtimes' interpreter of the tests (`make loaders`), and what the product asks it with."""

from __future__ import annotations

from pathlib import Path

from qconvert.runtimes.loader.client import Loaded, Rank, Server

PYTHON = Path(__file__).parent.parent.parent / ".venv-loaders" / "bin" / "python"

__all__ = ["PYTHON", "Loaded", "Rank", "Server"]
