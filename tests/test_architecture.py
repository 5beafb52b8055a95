"""Who may import whom: the line of tiers in ARCHITECTURE.md, kept true."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from qconvert.core.extras import extra_of

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "qconvert"
# The only modules that stand in no package; the API has a tier.
_OUTSIDE = {"__init__", "__main__", "api"}

# Heavy libraries are imported where they are used, never when a module is.
_HEAVY = {"torch", "numpy", "transformers", "llmcompressor", "compressed_tensors", "triton",
          "safetensors", "huggingface_hub", "pydantic", "yaml", "tqdm", "rich", "datasets",
          "numba", "llvmlite", "ray"}  # fmt: skip
_QUESTIONS = ("What", "Whose", "Who", "Where", "How", "Whether", "Which")
_MODEL_LIBRARIES = {"transformers", "llmcompressor"}
# Kernels of torch and numba: they are imported where they run, and need those whole.
_KERNELS = (
    "validators/kernels/triton", "ops/compiled/loops/", "validators/compiled_loops/",
    "calibrate/triton_kernels.py", "runtimes/loader/server/",
)  # fmt: skip


def tiers() -> dict[str, int]:
    """A package's tier by its name, from the one line of ARCHITECTURE.md that has them."""
    text = (_ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("    core < "))
    return {name.strip(): n for n, tier in enumerate(line.split("<")) for name in tier.split(",")}


def imports(node: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Names of imported modules: of the module's own statements, or in functions too. What stands
    under `if TYPE_CHECKING:` is never run, and counts only `everywhere`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            parts = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from ([part for part in parts if part in _MODULES] or [child.module or ""])
        elif everywhere:
            yield from _named(child)
            yield from imports(child, everywhere=True)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child, everywhere=False)


def _named(node: ast.AST) -> Iterator[str]:
    """The module that `import_module("qconvert...")` names."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        name = node.args[0]
        if isinstance(name, ast.Constant) and str(name.value).startswith("qconvert."):
            yield str(name.value)


def test_an_import_by_a_string_is_seen() -> None:
    text = 'def late():\n    importlib.import_module("qconvert.layouts.derived.find")\n'
    assert [*imports(ast.parse(text), everywhere=True)] == ["qconvert.layouts.derived.find"]


def name_of(path: Path) -> str:
    return path.relative_to(_PACKAGE).as_posix()


def dotted(name: str) -> str:
    return "qconvert." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


_SOURCES = {name_of(path): path for path in sorted(_PACKAGE.rglob("*.py"))}
_MODULES = {dotted(name) for name in _SOURCES}


# Not when this module is imported: every process of the tests does that, and one reads 4 s of sources.
@cache
def trees() -> Mapping[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in _SOURCES.items()}


@cache
def at_import() -> Mapping[str, Sequence[str]]:
    return {name: [*imports(tree, everywhere=False)] for name, tree in trees().items()}


@cache
def in_all() -> Mapping[str, Sequence[str]]:
    return {name: [*imports(tree, everywhere=True)] for name, tree in trees().items()}


def test_every_module_stands_in_a_package() -> None:
    assert {name.partition("/")[0].removesuffix(".py") for name in _SOURCES} == (
        set(tiers()) | {"recipes"} | _OUTSIDE
    )


def _outside(names: Iterable[str]) -> set[str]:
    """Libraries among imported modules."""
    return {name.split(".")[0] for name in names}


def test_packages_import_lower_tiers_only() -> None:
    """Type checkers' imports count too. `recipes` holds no code."""
    rank, wrong = tiers(), []
    for name in _SOURCES:
        own = name.partition("/")[0].removesuffix(".py")
        for module in in_all()[name] if own in rank else ():
            package, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if package == "qconvert" and other and other != own and rank[other] >= rank[own]:
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_no_cycle_within_a_package() -> None:
    """A module does not lead back to itself, through whatever modules of its package."""
    leads = {dotted(n): [m for m in found if m in _MODULES] for n, found in at_import().items()}
    for own in leads:
        seen: set[str] = set()
        todo = list(leads[own])
        while todo:
            module = todo.pop()
            assert module != own, f"{own} leads back to itself"
            if module not in seen:
                seen.add(module)
                todo += leads[module]


def test_rooms_of_run_import_lower_ones_only() -> None:
    """One unit at a time, a folder, engines; what stands beside them is above all."""
    rooms, wrong = ("work", "folder", "engines"), []
    for name, found in in_all().items():
        own = name.split("/")[1] if name.startswith("run/") else None
        for module in found if own in rooms else ():
            other = module.split(".")[2:3] if module.startswith("qconvert.run") else []
            if other and (other[0] not in rooms or rooms.index(other[0]) > rooms.index(str(own))):
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_heavy_libraries_are_imported_where_used() -> None:
    wrong = {name: _outside(found) & _HEAVY for name, found in at_import().items()}
    assert {n: found for n, found in wrong.items() if found and not n.startswith(_KERNELS)} == {}


def test_model_libraries_stay_in_their_packages() -> None:
    allowed = (
        "calibrate/", "samples/tokenizer.py",
        "layouts/derived/transformers_class.py", "checkpoint/gguf/source.py",  # a process of its own
    )  # fmt: skip
    wrong = {name: _outside(found) & _MODEL_LIBRARIES for name, found in in_all().items()}
    assert {n: found for n, found in wrong.items() if found and not n.startswith(allowed)} == {}


def test_packages_of_extras_stay_where_they_are_asked_for() -> None:
    """Each of these is reached only after core/extras.py was asked. What any other file needs is a core
    requirement, or the file's own callers have to ask, and it stands here."""
    asked = (
        "calibrate/", "evaluate/", "samples/data.py", "samples/tokenizer.py",  # calibration, eval
        "fit/measure.py",  # fit
        "layouts/derived/transformers_class.py", "layouts/derived/running.py",  # a process of its own
        "validators/kernels/", "validators/amx/amx_client.py",
        "validators/amx/kt_forward.py", "compiled/", "run/engines/ray.py",
        "checkpoint/fsspec_store.py", "cli/demo.py", "hub/signing.py",
        "checkpoint/gguf/source.py",  # a process of its own
        "contrib/trtllm_gen/sglang_plugin.py",  # in sglang's own process
        "runtimes/loader/server/",  # in the runtime's own process
    )  # fmt: skip
    found = {name for name, imports in in_all().items() if any(map(extra_of, _outside(imports)))}
    assert {name for name in found if not name.startswith(asked)} == set()
    assert {one for one in asked if not any(name.startswith(one) for name in found)} == set()


def test_core_is_standard_library() -> None:
    ours = set(sys.stdlib_module_names) | {"qconvert"}
    wrong = {n: _outside(f) - ours for n, f in at_import().items() if n.startswith("core/")}
    assert {name: found for name, found in wrong.items() if found} == {}


# All that validators may take from below: what a folder holds and which model it is of, bytes of it,
# and how rules are run. Not how a pass reads, resolves, orders or rounds: it would agree with itself.
_FOR_VALIDATORS = {
    "qconvert", "qconvert.checkpoint.checkpoint", "qconvert.core.family",
    "qconvert.checkpoint.adapter",
    "qconvert.checkpoint.open", "qconvert.checkpoint.receipt", "qconvert.checkpoint.safetensors",
    # Statements about a GGUF file's tensors, in its config.
    "qconvert.checkpoint.gguf.stated",
    # Names under which parts of tensor-parallel ranks are held: which is which, not where it lies.
    "qconvert.checkpoint.ranks",
    "qconvert.core.discovery", "qconvert.core.dtypes", "qconvert.core.errors", "qconvert.core.graph",
    "qconvert.core.arrays", "qconvert.core.json_text",
    "qconvert.core.names", "qconvert.core.patterns", "qconvert.core.roles", "qconvert.core.shown",
    "qconvert.core.yaml_lines",
    "qconvert.run.work.reader", "qconvert.runtimes.pipeline",
    # How numba compiles a loop: no arithmetic.
    "qconvert.compiled.jit",
    # Which packages are installed, and which versions facts hold for.
    "qconvert.core.extras", "qconvert.core.versions",
    # How another interpreter is started.
    "qconvert.core.own_process",
    # Names that a manifest has: facts, no code that makes a folder.
    "qconvert.core.manifest_keys",
    # The simulator of a runtime's loader, and that loader itself, which know nothing of how a
    # folder was made.
    "qconvert.runtimes.advisories", "qconvert.runtimes.serving",
    "qconvert.runtimes.loader.ask",
    "qconvert.runtimes.loading.load_weights", "qconvert.runtimes.loading.setting",
}  # fmt: skip
_OF_VALIDATORS = (
    "qconvert.validation.", "qconvert.validators.", "qconvert.contrib.trtllm_gen.prepared_"
)  # fmt: skip


def test_validators_stand_on_their_own_reader() -> None:
    wrong = []
    for name, found in in_all().items():
        if name.startswith(("validators/", "contrib/trtllm_gen/prepared_")):
            ours = [m for m in found if m.split(".")[0] == "qconvert" and m not in _FOR_VALIDATORS]
            wrong += [f"{name} imports {m}" for m in ours if not m.startswith(_OF_VALIDATORS)]
    assert wrong == []


@pytest.mark.parametrize("name", ["layouts", "validators", "recipes"])
def test_linked_packages_refuse_their_folder_name(name: str) -> None:
    """Imported as `layouts` they would be a second module whose classes equal none of ours."""
    source = (_ROOT / name / "__init__.py").read_text(encoding="utf-8")
    with pytest.raises(ImportError, match=rf"import qconvert\.{name}, not {name}"):
        exec(compile(source, "init", "exec"), {"__name__": name})


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    for file in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").partition(" ")[0]
                assert first not in _QUESTIONS, (file.name, getattr(node, "name", ""))
