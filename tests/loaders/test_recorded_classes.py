"""Tables of the runtimes' classes are what the installed runtimes make: a sample is made anew and
compared byte for byte. `make check` does some of them, QCONVERT_ALL=1 all that there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sampled import thinned

from loaders.client import PYTHON, Server
from loaders.record_classes import RUNTIMES, TABLES, folder_of, record_of, writer_of
from loaders.recorded_tables import written
from loaders.small_models import LIKE
from qconvert.runtimes.classes.record import whole

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]
_TABLES = sorted(
    (runtime, file.stem)
    for runtime in RUNTIMES
    for file in folder_of(runtime).glob("*.json")
    if file.stem != "not_recorded"
)


@pytest.mark.parametrize(("runtime", "architecture"), thinned(_TABLES, 24))
def test_a_table_is_made_anew(
    runtime: str, architecture: str, hopper: Server, vllm: Server, tmp_path: Path
) -> None:
    file = folder_of(runtime) / f"{architecture}.json"
    there = whole(file)
    there.pop("agrees", None)
    server = {"sglang": hopper, "vllm": vllm}[runtime]
    name = architecture.removesuffix(".draft")
    draft = there.get("draft", False)
    writer = writer_of(tmp_path, name if name in LIKE else there["model_type"], draft=draft)
    made = record_of(writer, server, runtime)
    assert written(made) == written(there)


def test_what_is_not_recorded_has_a_cause() -> None:
    for runtime in RUNTIMES:
        causes = json.loads((folder_of(runtime) / "not_recorded.json").read_bytes())
        recorded = {file.stem for file in folder_of(runtime).glob("*.json")}
        assert all(causes.values())
        assert not recorded & set(causes)
    assert TABLES.is_dir()
