"""A Hugging Face checkpoint on disk, known from its headers alone.

Opening reads config.json, the index and every shard's header, and cross-checks them; no tensor data
is touched, no pickle opened, no remote code run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import xxhash

from qconvert.checkpoint.family import Census, Family, census, family_for
from qconvert.checkpoint.hub_cache import cached_folder, parse_repo
from qconvert.checkpoint.safetensors import Header, read_header
from qconvert.core.errors import CheckpointError
from qconvert.core.graph import Source
from qconvert.core.names import parse

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WORK_DIR = ".qconvert"
MANIFEST = "qconvert.json"
RECEIPT = "qconvert.receipt.jsonl"

# Side files are copied by deny-list: a processor file nobody thought of must survive. What is
# denied is weights in other formats (pickles above all, which are never opened), what qconvert
# itself regenerates, and version control.
DENIED_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack",
    ".gguf", ".onnx", ".onnx_data", ".npz", ".npy", ".tflite", ".ot", ".partial", ".incomplete",
)  # fmt: skip
DENIED_PATHS = frozenset({INDEX, MANIFEST, RECEIPT, "config.json"})
# The Hub's own, and what may hold tokens.
DENIED_NAMES = frozenset({".gitattributes", ".env"})
DENIED_FOLDERS = frozenset({WORK_DIR, ".git", ".cache", "__pycache__", ".ipynb_checkpoints"})

# Of each shard, for Checkpoint.sample_digest: 10 MB in all for the 163 shards of DeepSeek-V3.
_SAMPLES, _SAMPLE_BYTES = 16, 4096

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file. `size` and `mtime_ns` are what it had when its header was read: a
    source that changes during a run is refused by them."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """One quantization block and where it stands, e.g. `config.json: quantization_config`."""

    where: str
    block: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.block.get("quant_method", ""))


class _Index(NamedTuple):
    """What an index says: a file for each tensor, and (whatever it may be) a total size."""

    weight_map: dict[str, str]
    total_size: Any


@dataclass(frozen=True)
class Checkpoint(Mapping[str, Source]):
    """Tensor names to Sources, in natural order of the shards, with config and side files.

    `side_files` are relative paths that travel along byte for byte; `denied_files` those that do
    not. `warnings` are oddities that do not stop a conversion.
    """

    root: Path
    shards: tuple[Shard, ...]
    sources: Mapping[str, Source]
    config: Mapping[str, Any]
    config_bytes: bytes
    side_files: tuple[str, ...]
    denied_files: tuple[str, ...]
    header_digest: str
    indexed: bool
    metadata: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Source:
        return self.sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def open(cls, where: str | Path) -> Checkpoint:
        """Open a folder, one .safetensors file, or a repo in the local Hub cache (ORG/NAME, with
        @REVISION, hf:// before it, or both).

        Raises CheckpointError for anything unsound: see qconvert.checkpoint.safetensors, and here: a
        missing or broken config.json, an index naming a missing file or a path outside the folder, a
        tensor in two shards, an index and headers that disagree.
        """
        root, only = _locate(where)
        config, config_bytes = _read_config(root)
        files, index, warnings = _shard_files(root, only)
        weight_map = index.weight_map if index is not None else None
        shards: list[Shard] = []
        sources: dict[str, Source] = {}
        metadata: dict[str, str] = {}
        digest = sha256()
        for number, file in enumerate(files):
            before = _stat(file)
            header = read_header(file)
            digest.update(header.raw)
            shards.append(Shard(file, header.file_size, before.st_mtime_ns))
            metadata.update(header.metadata)
            for entry in header.entries:
                if entry.name in sources:
                    other = shards[sources[entry.name].shard].path.name
                    raise CheckpointError(
                        f"tensor {entry.name!r} is in both {other} and {file.name}; "
                        "remove the shard that does not belong"
                    )
                sources[entry.name] = Source(entry.name, entry.type, number, entry.offset)
            if weight_map is not None:
                _check_shard_against_index(file, root, header, weight_map)
        if weight_map is not None:
            _check_index_complete(root, weight_map, sources)
        if not sources:
            raise CheckpointError(f"{root}: its safetensors files hold no tensor")
        side, denied = _side_files(root, {file.relative_to(root).as_posix() for file in files})
        return cls(
            root, tuple(shards), sources, config, config_bytes, side, denied, digest.hexdigest(),
            index is not None, metadata, tuple(warnings + _total_size(index, sources)),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(source.type.nbytes for source in self.sources.values())

    @cached_property
    def family(self) -> Family:
        return family_for(self.config, self.sources)

    @cached_property
    def census(self) -> Census:
        """Every tensor sorted by role."""
        return census(self.family, self.config, self.sources)

    @property
    def model_line(self) -> str:
        """`deepseek_v3: 61 layers, 256 experts, 1 MTP layer`."""
        dims, family = self.census.dims, self.family
        parts = [f"{dims.num_layers} layers"]
        if dims.num_experts:
            parts.append(f"{dims.num_experts} experts")
        if any(family.is_mtp(name, dims) for name in self):
            parts.append(f"{dims.mtp_layers or 1} MTP layer{'s' if dims.mtp_layers > 1 else ''}")
        else:
            parts.append("no MTP tensors")
        kind = self.config.get("model_type")
        label = family.name if family.name == kind else f"{kind} (family {family.name})"
        return f"{label}: {', '.join(parts)}"

    def absent(self) -> list[str]:
        """Names of tensors that the family requires and this folder lacks. Of a pipeline stage's
        folder only what that stage must hold is asked for: its layers; embeddings in the first
        stage; the final norm, the head and MTP layers in the last. Of a folder of experts for CPU
        kernels nothing is, for a family knows none of its tensors."""
        if "amx" in (self.manifest or {}):
            return []
        found = self.census.absent()
        stage = (self.manifest or {}).get("stage")
        if stage is None:
            return found
        first, stop = stage["layers"]
        last = stage["number"] == stage["of"] - 1

        def held(name: str) -> bool:
            layer = parse(name).layer
            if self.family.is_mtp(name, self.census.dims):
                return bool(last)
            if layer is not None:
                return bool(first <= layer < stop)
            return stage["number"] == 0 if "embed_tokens" in name else bool(last)

        return [name for name in found if held(name)]

    @cached_property
    def quantization_configs(self) -> tuple[QuantConfig, ...]:
        """Every quantization block: root, nested configs, and modelopt's hf_quant_config.json.

        All of them matter: a stale nested block overrides the root's in some runtimes.
        """
        found = list(_nested_quantization(self.config, "config.json"))
        extra = self.root / "hf_quant_config.json"
        if extra.is_file():
            block = _read_json(extra)
            inner = block.get("quantization", block)
            if not isinstance(inner, dict):
                raise CheckpointError(f"{extra}: `quantization` must be an object")
            found.append(QuantConfig("hf_quant_config.json", {"quant_method": "modelopt", **inner}))
        return tuple(found)

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """qconvert.json of a folder that qconvert made, else None. Raises CheckpointError if it is
        broken, or another program's."""
        file = self.root / MANIFEST
        return _read_manifest(file) if file.is_file() else None

    @cached_property
    def sample_digest(self) -> str:
        """A hash of evenly spread blocks of every shard and of all side files. Two fine-tunes of one
        base have the same headers; this tells them apart without reading everything."""
        digest = xxhash.xxh3_128()
        for shard in self.shards:
            step = max(_SAMPLE_BYTES, shard.size // _SAMPLES)
            with shard.path.open("rb", buffering=0) as stream:
                for start in range(0, shard.size, step):
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLE_BYTES))
        for name in self.side_files:
            with (self.root / name).open("rb") as stream:
                digest.update(name.encode())
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        return digest.hexdigest()

    def read_scalar(self, source: Source) -> bytes:
        """The bytes of a one-element tensor: the one thing a plan may read beyond headers, to tell
        whether per-tensor scales are equal. Raises CheckpointError if it cannot be read."""
        assert source.type.numel == 1
        path = self.shards[source.shard].path
        try:
            with path.open("rb") as stream:
                stream.seek(source.offset)
                return stream.read(source.type.nbytes)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a shard's size or modification time is not what it was."""
        for shard in self.shards:
            now = _stat(shard.path)
            if (now.st_size, now.st_mtime_ns) != (shard.size, shard.mtime_ns):
                raise CheckpointError(
                    f"{shard.path} changed while it was being converted; leave the source alone "
                    "and start again (qconvert clean OUT first)"
                )


def file_size(file: Path) -> int:
    """Size in bytes. Raises CheckpointError if the file cannot be read (a broken link, say)."""
    return _stat(file).st_size


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def _locate(where: str | Path) -> tuple[Path, Path | None]:
    """The checkpoint's folder and, where a single file was named, that file."""
    if not str(where):  # an unset shell variable; as a path it would be the current folder
        raise CheckpointError("the source's name is empty; name a folder")
    path = Path(where)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_folder:
        return path, None
    if is_file:
        if path.suffix != ".safetensors":
            raise CheckpointError(f"{path} is not a .safetensors file; pickles are never opened")
        return path.parent, path
    repo = parse_repo(str(where))
    if repo is not None:
        return cached_folder(repo, str(where)), None
    raise CheckpointError(f"{path}: no such file or folder")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; no checkpoint can be read without it") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_manifest(file: Path) -> dict[str, Any]:
    found = _read_json(file)
    kinds = {"identity": dict, "passes": list, "dropped": dict, "dropped_files": dict}
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise CheckpointError(f"{file}: its {key!r} is missing or broken; not qconvert's file")
    if any(not isinstance(step, dict) or "spec" not in step for step in found["passes"]):
        raise CheckpointError(f"{file}: its 'passes' are broken; not qconvert's file")
    if any(not isinstance(names, list) for names in found["dropped"].values()):
        raise CheckpointError(f"{file}: its 'dropped' is broken; not qconvert's file")
    return found


def _read_config(root: Path) -> tuple[dict[str, Any], bytes]:
    config = _read_json(root / "config.json")
    try:
        json.dumps(config, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{root / 'config.json'}: holds text that cannot be written again: {error.reason}"
        ) from error
    return config, (root / "config.json").read_bytes()


def _shard_files(root: Path, only: Path | None) -> tuple[list[Path], _Index | None, list[str]]:
    """The files to read, the index where there is one, and warnings."""
    if only is not None:
        return [only], None, []
    if (root / INDEX).is_file():
        table = _read_json(root / INDEX)
        weight_map, metadata = table.get("weight_map"), table.get("metadata")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{root / INDEX}: has no weight_map")
        names: dict[str, str] = {}
        for tensor, said in weight_map.items():
            if not isinstance(said, str) or said not in names:
                names[said] = _inside(root, tensor, said)
        files = []
        for name in sorted(set(names.values())):
            file = root / name
            if not file.is_file():
                raise CheckpointError(
                    f"{root / INDEX} names {name}, which is missing; the download is incomplete"
                )
            files.append(file)
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return files, _Index(weight_map, total), []
    found = sorted(root.glob("*.safetensors"))
    if len(found) > 1:
        counts = {match.group(2) for f in found if (match := _SHARD.search(f.name))}
        if len(counts) != 1 or int(counts.pop()) != len(found):
            raise CheckpointError(
                f"{root}: {len(found)} .safetensors files, no {INDEX}, and their names do not form "
                "one complete set; fetch the index, or name one file"
            )
        return found, None, [f"{INDEX} is missing; the {len(found)} shards' headers were used"]
    if not found:
        raise CheckpointError(
            f"{root}: no .safetensors file; pickle checkpoints (.bin, .pt) are never opened: "
            "convert them with safetensors first"
        )
    return found, None, []


def _inside(root: Path, tensor: str, file: Any) -> str:
    path = PurePosixPath(file) if isinstance(file, str) else None
    if path is None or path.is_absolute() or ".." in path.parts or "\\" in file or not path.parts:
        raise CheckpointError(
            f"{root / INDEX}: tensor {tensor!r} is said to be in {file!r}, which is not a file "
            "inside the folder"
        )
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{root / INDEX}: tensor {tensor!r} is said to be in {file!r}, which is not a "
            ".safetensors file; pickles are never opened"
        )
    return str(path)


def _check_shard_against_index(
    file: Path, root: Path, header: Header, weight_map: Mapping[str, str]
) -> None:
    name = file.relative_to(root).as_posix()
    for entry in header.entries:
        said = weight_map.get(entry.name)
        if said != name:
            where = "does not name it" if said is None else f"puts it in {said}"
            raise CheckpointError(
                f"tensor {entry.name!r} is in {name}, but {INDEX} {where}; fetch both again"
            )


def _check_index_complete(
    root: Path, weight_map: Mapping[str, str], sources: Mapping[str, Source]
) -> None:
    for name, file in weight_map.items():
        if name not in sources:
            raise CheckpointError(
                f"{root / INDEX} puts tensor {name!r} in {file}, whose header lacks it; "
                "fetch both again"
            )


def _total_size(index: _Index | None, sources: Mapping[str, Source]) -> list[str]:
    """Published indexes are often wrong here and no loader minds, so it is only a warning."""
    if index is None or index.total_size is None:
        return []
    true = sum(source.type.nbytes for source in sources.values())
    if index.total_size == true:
        return []
    return [f"{INDEX} says total_size {index.total_size}, the tensors add up to {true}"]


def _side_files(root: Path, shards: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files to carry along and files not to, both as sorted relative paths."""
    kept: list[str] = []
    denied: list[str] = []
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=False):
        base = Path(folder).relative_to(root)
        # Walking into a link might never end; it is named, so that nothing is lost in silence.
        shut = {f for f in folders if f in DENIED_FOLDERS or (Path(folder) / f).is_symlink()}
        denied += [f"{(base / f).as_posix()}/" for f in shut]
        folders[:] = sorted(set(folders) - shut)
        for name in names:
            path = (base / name).as_posix()
            if path in shards or path in ("config.json", INDEX):
                continue
            (denied if _is_denied(Path(folder) / name, path) else kept).append(path)
    return tuple(sorted(kept)), tuple(sorted(denied))


def _unreadable(error: OSError) -> None:
    raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _is_denied(file: Path, path: str) -> bool:
    """Whether a file, at `path` below the root, stays behind. Only the root's own config.json and
    manifest are made anew: a nested config.json is somebody's."""
    name = path.rpartition("/")[2]
    # A worktree's .git is a file, and a file .qconvert would stand where our workroom stands.
    if path in DENIED_PATHS or name in DENIED_NAMES | DENIED_FOLDERS:
        return True
    if name.endswith(".index.json"):
        return True
    special = file.exists() and not file.is_file()  # a pipe, a socket
    return special or name.lower().endswith(DENIED_SUFFIXES)


def _nested_quantization(block: Mapping[str, Any], where: str) -> Iterator[QuantConfig]:
    for key, value in block.items():
        if not isinstance(value, dict):
            continue
        if key in ("quantization_config", "compression_config"):
            yield QuantConfig(f"{where}: {key}", value)
        elif key.endswith("_config"):
            yield from _nested_quantization(value, f"{where}: {key}")


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every quantization block taken out, nested ones too."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config") and isinstance(value, dict):
            continue
        nested = isinstance(value, dict) and key.endswith("_config")
        kept[key] = without_quantization(value) if nested else value
    return kept
