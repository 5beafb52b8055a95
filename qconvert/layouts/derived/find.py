"""The derived family of a checkpoint: from the package's own data, from an earlier answer on this
machine, or from the class itself, built in a process of its own where transformers is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from qconvert.core import own_process
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.extras import pip_line
from qconvert.core.family import (
    Config,
    Dims,
    Family,
    answering,
    families,
    generic,
    generic_dims,
    without_quantization,
)
from qconvert.core.json_text import parse_object
from qconvert.core.names import parse, split_parameter
from qconvert.layouts.derived.description import (
    Description,
    described,
    family_of,
    parsed,
    unresolved,
    without_prefix,
)

# Of CPU: imports and the meta device take 5 to 20, and the clock says nothing under load. Nothing waits
# on purpose in the process; one that hangs is ended in the end.
_SECONDS, _MOST_WAIT = 120, 3600
# A class is built layer by layer, and its experts one by one in a few: no model has more.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_BYTES = 1024, 4096, 16 << 30
_FORM = 6  # of the answers; those of another form are asked for anew
_FAILED = "failed"  # the key of what is no answer, and is not kept
_FOREIGN = "its tensors have no name that its class in transformers has"
_MODULE = "qconvert.layouts.derived.transformers_class"
_MODEL_TYPE = re.compile(r"\w[\w.-]*", re.ASCII)  # a file's name, and no path
_ROW = re.compile(r'\("([\w.-]+)", "(\w+)"\)')  # of transformers' tables: model_type, class


def family_for(config: Config, names: Iterable[str]) -> Family:
    """The family that answers to the config's model_type (root first, then text_config) and to the
    names, else one derived from the class that transformers has for it, else a generic one made from the
    names."""
    names = list(names)
    family = answering(config)
    if family is not None and family.describes(names):
        return _with_towers(family, config, names)
    derived = derive(config, names)
    return derived if isinstance(derived, Family) else generic(names, derived)


def _with_towers(family: Family, config: Config, names: list[str]) -> Family:
    """The family of a text model with the towers of the class that holds it, where that is another one:
    MiniCPM-V holds Qwen3.5."""
    if config.get("model_type") in family.model_types:
        return family
    strange = {parse(name).template for name in names if not family.candidates(name)[0]}
    derived = derive(config, names) if strange else ""
    if isinstance(derived, str):
        return family
    towers = [
        role
        for role in derived.roles
        if role.vision and any(split_parameter(template)[0] == role.module for template in strange)
    ]
    if not towers:
        return family
    dims, more = family.dims, derived.dims

    def both(config: Config) -> Dims:
        own, groups = dims(config), more(config).groups
        return replace(
            own, groups={**{r.layers: groups.get(r.layers, ()) for r in towers}, **own.groups}
        )

    return replace(family, roles=(*family.roles, *towers), dims=both)


def derive(config: Config, names: Iterable[str]) -> Family | str:
    """The family of a model that no file of `layouts/` describes, or why there is none."""
    names = list(names)
    shipped = _shipped(str(config.get("model_type", "")))
    layers = generic_dims(config).num_layers
    for known in () if shipped is None else (shipped, without_prefix(shipped)):
        if not unresolved(known, names, layers):
            return family_of(known, names)
    answer = _asked(config, names) if shipped is None or _akin(shipped, names) else _FOREIGN
    if isinstance(answer, Description):
        found = answer
    elif shipped is None or not _any(shipped, names):
        return answer
    else:
        found = shipped
    return family_of(found, names)


def class_of(config: Config, names: Iterable[str], *, built: bool = False) -> Description | str:
    """The description of the class that transformers has for a config, or why there is none; `built`
    for this very config, not for its class's usual sizes. It says nothing of the `names`, which may be
    another class's."""
    kind = str(config.get("model_type", ""))
    return (None if built else _shipped(kind)) or _asked(config, list(names))


def architecture(name: str) -> tuple[str, str]:
    """The model_type and the class that a name stands for: a model_type or a class, of the package's own
    descriptions and families or of the installed transformers. Raises UsageError."""
    shipped = _shipped(name)
    if shipped is not None:
        return name, shipped.class_name
    by_class = _classes()
    if name in by_class:
        return by_class[name], name
    if any(name in family.model_types for family in families()):
        return name, ""
    for text in _tables():
        for model_type, class_name in _ROW.findall(text):
            if name == model_type:
                return name, ""
            if name == class_name and "For" in name:
                return model_type, name
    raise UsageError(
        f"--architecture {name!r}: no model_type or class of that name is known; write one as "
        "config.json does, as qwen3_moe or Qwen3MoeForCausalLM"
    )


@lru_cache(maxsize=1)
def _classes() -> Mapping[str, str]:
    """The model_type of every class that a description is of."""
    folder = resources.files("qconvert.layouts.derived").joinpath("classes")
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        answer = parse_object(file.read_bytes(), file)
        found.setdefault(str(answer["class"]), str(answer["model_type"]))
    return found


def _akin(description: Description, names: Iterable[str]) -> bool:
    """Return whether any module is called as one of the class: a folder of kernels' tiles holds none,
    and a class takes seconds to build."""
    known = {module.rpartition(".")[2] for module in description.modules}
    return any(split_parameter(name)[0].rpartition(".")[2] in known for name in names)


def _any(description: Description, names: Iterable[str]) -> bool:
    """Return whether any module of a layer is described: names of another order of things are not its
    own."""
    templates = {parse(name).template for name in names}
    return any("{L}" in template and described(description, template) for template in templates)


@lru_cache(maxsize=8)
def _shipped(model_type: str) -> Description | None:
    if _MODEL_TYPE.fullmatch(model_type) is None:
        return None
    file = resources.files("qconvert.layouts.derived").joinpath("classes", f"{model_type}.json")
    return parsed(parse_object(file.read_bytes(), file)) if file.is_file() else None


def _asked(config: Config, names: list[str]) -> Description | str:
    """Return what the class in the installed transformers says of these names, or why nothing."""
    kind = config.get("model_type")
    unknown = f"model_type {kind!r} is not known"
    from importlib import metadata

    try:
        version = metadata.version("transformers")
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return f"{unknown}, and its class cannot be read without transformers ({pip_line('calibrate')})"
    if not _has_class(str(kind)):
        return unknown
    if (excess := _excess(config)) is not None:
        return f"{unknown}, and its class is not built with {excess}"
    # How weights are encoded says nothing of the class: a conversion's folder needs no other answer.
    request = {"config": without_quantization(config), "names": representatives(names)}
    text = json.dumps(request, sort_keys=True)
    digest = hashlib.sha256(f"{_FORM} {version} {text}".encode()).hexdigest()
    file = _cache() / f"{digest}.json"
    answer = _kept(file)
    if answer is None:
        answer = _run(text)
        if _FAILED in answer:  # it says nothing of the class: the next time it may be another
            return (
                f"{unknown}, and its class in transformers {version} was not described this time "
                f"({answer[_FAILED]}): run the command again"
            )
        _keep(file, answer)
    if "cannot" in answer:
        return f"transformers {version} cannot build model_type {kind!r} ({answer['cannot']})"
    return parsed(answer)


@lru_cache(maxsize=8)
def _has_class(model_type: str) -> bool:
    """Return whether the installed transformers names the model_type in its tables, read as text:
    importing them takes seconds, and most models that are not known are not known there either."""
    return any(f'("{model_type}", ' in text for text in _tables())


def _tables() -> Iterator[str]:
    found = importlib.util.find_spec("transformers")
    for folder in [] if found is None else found.submodule_search_locations or []:
        for file in sorted(Path(folder, "models", "auto").glob("*.py")):
            yield file.read_text()


def representatives(names: Iterable[str]) -> list[str]:
    """A weight's name for each module template: encodings add parameters that a class has not
    (weight_scale_inv, weight_packed), and most names differ in numbers alone."""
    found: dict[str, str] = {}
    for name in names:
        template, _, _ = parse(name)
        module, parameter = split_parameter(template)
        if not parameter:
            for suffix in ("_scale_inv", "_scale"):
                module = module.removesuffix(suffix)
        own, _ = split_parameter(name)
        bare = own.removesuffix("_scale_inv").removesuffix("_scale") if not parameter else own
        found.setdefault(module, f"{bare}.weight" if parameter else bare)
    return sorted(found.values())


def _excess(config: Mapping[str, Any]) -> str | None:
    """A setting that would make a class of a size that no model has."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            found = _excess(value)
            if found is not None:
                return found
        most = _MOST_LAYERS if "layer" in key or key == "depth" else _MOST_EXPERTS
        counts = "layer" in key or key == "depth" or "expert" in key
        if counts and isinstance(value, int) and value > most and "size" not in key:
            return f"{key} {value}"
        if isinstance(value, list) and len(value) > _MOST_EXPERTS:
            return f"{len(value)} entries of {key}"
    return None


def _run(request: str) -> Mapping[str, Any]:
    """The answer of the class's process: a description, or why it `cannot` be built; or why there is no
    answer (_FAILED)."""
    # No GPU is asked for: its driver maps more addresses than the process may have.
    words = ["-m", _MODULE, str(_MOST_BYTES), str(_SECONDS)]
    start = own_process.python(*words, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    try:
        done = subprocess.run(
            **start, input=request, capture_output=True, text=True, timeout=_MOST_WAIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {_FAILED: f"it waited for more than {_MOST_WAIT} s"}
    except OSError as error:
        return {_FAILED: f"no process could be started: {error.strerror or error}"}
    if done.returncode:
        return {_FAILED: _why_ended(done.returncode, done.stderr)}
    try:
        return parse_object(done.stdout, "the class's description")
    except CheckpointError as error:
        return {_FAILED: str(error)}


def _why_ended(code: int, stderr: str) -> str:
    """Why the class's process ended before it answered."""
    if code == -signal.SIGXCPU:
        return f"it took more than {_SECONDS} s of CPU"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        memory = ", as where the machine's memory runs out" if code == -signal.SIGKILL else ""
        return f"it was killed by {name}{memory}"
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    if last.startswith("MemoryError") or re.search("(allocate|out of|not enough) memory", last):
        return f"it had too little memory: {last}"
    if last.startswith(("ImportError", "ModuleNotFoundError")):
        return f"what it imports is not as installed: {last}"
    return f"exit status {code}: {last}"


def _kept(file: Path) -> Mapping[str, Any] | None:
    """An earlier answer; None where there is none, or where the file holds no answer (of a machine that
    lost its power, or a full disk): then the class is asked anew, and the file is written over."""
    try:
        answer = parse_object(file.read_bytes(), file)
        if "cannot" not in answer:
            parsed(answer)
    except (OSError, CheckpointError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return answer


def _cache() -> Path:
    return own_process.cache_root() / "families"


def _keep(file: Path, answer: Mapping[str, Any]) -> None:
    """For the next time. A folder that cannot be written only costs that time."""
    own = file.with_suffix(f".{os.getpid()}")
    try:
        own_process.make_private(file.parent)
        own.write_text(json.dumps(answer))
        own.replace(file)
    except OSError:
        own.unlink(missing_ok=True)
