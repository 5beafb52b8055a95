"""Who may import whom, read from the sources: the map in ARCHITECTURE.md, kept true."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "qconvert"

# A module imports only from rooms of a lower number, or from its own. Of calibration, plans know what
# is asked for and which data that is, and nothing of what computes it.
_RANK = {
    "errors": 0, "spec": 1, "names": 1, "graph": 2, "header": 2, "family": 3, "layouts": 4,
    "layout": 3, "rows": 4, "consumers": 4, "checkpoint": 5, "ops": 5, "quantization": 6, "plan": 7,
    "ignore": 8, "units": 8, "formats": 6, "integers": 7, "kt": 8, "linears": 8, "roles": 1,
    "beside": 8, "causes": 8, "weights": 8, "experts": 9, "passes": 10, "input_scales": 6, "relabel": 8,
    "nvfp4_beside": 9, "nvfp4_weights": 9, "stored": 8, "made": 1,
    "stages": 9, "pair": 11, "recipe": 11, "recipes": 11, "run": 11,
    "findings": 1, "tasks": 12, "validation": 13, "sample": 11, "diff": 12, "validators": 14,
    "judgement": 14,
    "reports": 14, "report": 13, "demo": 15, "commands": 16, "cli": 17, "__main__": 18, "__init__": 0,
    "plugins": 0,
    "repo": 1, "manifest": 8, "card": 10, "hub": 14,
    "patterns": 1,
    "shown": 0, "say": 1, "sizes": 1, "regular": 1, "links": 2, "json_text": 1, "manifest_keys": 2,
    "receipt": 3, "yaml_lines": 1, "foreign_options": 7, "foreign_recipe": 8,
    "calibrate": 12, "calibrate.data": 4, "calibrate.samples": 4, "calibrate.tokenizer": 4,
    "calibration": 6,
}  # fmt: skip

# Heavy libraries are imported where they are used, never when a module is.
_HEAVY = {"torch", "numpy", "transformers", "llmcompressor", "compressed_tensors", "triton",
          "safetensors", "huggingface_hub", "pydantic", "yaml", "tqdm", "rich", "datasets"}  # fmt: skip
_MODEL_LIBRARIES = {"transformers", "llmcompressor"}
_FOUNDATION = (
    "errors",
    "spec",
    "names",
    "roles",
    "graph",
    "header",
    "shown",
    "say",
    "sizes",
    "regular",
    "links",
    "json_text",
    "patterns",
    "manifest_keys",
)


def modules() -> list[Path]:
    """Every source of the package, the linked rooms included."""
    found = [*_PACKAGE.glob("*.py")]
    rooms = (
        "commands", "formats", "ops", "passes", "run", "layouts", "validators", "recipes", "reports",
        "hub", "card", "calibrate", "plugins",
    )  # fmt: skip
    for room in rooms:
        found += (_PACKAGE / room).glob("*.py")
    return sorted(found)


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Names of imported modules: of the module's own statements, or in functions too. What stands
    under `if TYPE_CHECKING:` is never run and does not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, everywhere=everywhere)


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    relative = path.relative_to(_PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def rank(module: str) -> int:
    """A module's number by its name below the package: its own, where it has one in its room."""
    parts = module.split(".")
    return _RANK.get(".".join(parts[:2]), _RANK[parts[0]])


def name_of(path: Path) -> str:
    return path.relative_to(_PACKAGE).as_posix()


every_module = pytest.mark.parametrize("path", modules(), ids=name_of)


def test_every_room_is_seen() -> None:
    assert {room(path) for path in modules()} == {name for name in _RANK if "." not in name}


@every_module
def test_rooms_import_downwards(path: Path) -> None:
    own = name_of(path).removesuffix(".py").replace("/", ".")
    for name in imports(parsed(path), everywhere=True):
        package, _, module = name.partition(".")
        if package != "qconvert" or not module:
            continue
        beside = module.split(".")[0] == room(path) and rank(module) == rank(own)
        assert beside or rank(module) < rank(own), f"{own} imports {name}"


@every_module
def test_heavy_libraries_are_imported_where_used(path: Path) -> None:
    at_import = {name.split(".")[0] for name in imports(parsed(path), everywhere=False)}
    assert not at_import & _HEAVY


@every_module
def test_model_libraries_stay_in_their_rooms(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(parsed(path), everywhere=True)}
    allowed = room(path) == "calibrate" or name_of(path) == "validators/logits.py"
    assert allowed or not used & _MODEL_LIBRARIES


@every_module
def test_the_foundation_is_standard_library(path: Path) -> None:
    if path.stem not in _FOUNDATION or path.parent != _PACKAGE:
        return
    used = {name.split(".")[0] for name in imports(parsed(path), everywhere=True)}
    assert used <= set(sys.stdlib_module_names) | {"qconvert"}


def test_validators_do_not_import_what_made_the_output() -> None:
    makers = ("qconvert.passes", "qconvert.run.executor", "qconvert.run.unit_runner")
    for path in (_PACKAGE / "validators").glob("*.py"):
        used = list(imports(parsed(path), everywhere=True))
        assert not [name for name in used if name.startswith(makers)], path.name


@pytest.mark.parametrize("name", ["layouts", "validators", "recipes"])
def test_top_level_rooms_refuse_their_folder_name(name: str) -> None:
    """Imported as `layouts` they would be a second module whose classes equal none of ours."""
    source = (_ROOT / name / "__init__.py").read_text(encoding="utf-8")
    with pytest.raises(ImportError, match=rf"import qconvert\.{name}, not {name}"):
        exec(compile(source, "init", "exec"), {"__name__": name})
