"""A Hugging Face checkpoint on disk, known from its headers alone.

Opening reads config.json, the index and every shard's header, and cross-checks them; no tensor data
is touched, no pickle opened, no remote code run.
"""

from __future__ import annotations

import os
import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from hashlib import sha256
from pathlib import Path, PurePosixPath
from struct import unpack
from typing import Any, BinaryIO, NamedTuple, TypeVar

import xxhash

from qconvert.checkpoint.hub_cache import cached_folder, parse_repo
from qconvert.checkpoint.mlx_config import MLX, experts_apart
from qconvert.checkpoint.prepared import says_prepared
from qconvert.checkpoint.ranks import is_of_ranks, part_name, ranks_of
from qconvert.checkpoint.reading import Reading, of_manifest, read_family, stated
from qconvert.checkpoint.safetensors import MAX_HEADER, Header, read_header
from qconvert.checkpoint.stated_as import as_stated
from qconvert.checkpoint.store import RemoteObject, Store, StoredObject, mirrored_at, named
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.family import (
    MTP_COUNTS,
    QUANTIZATION_KEYS,
    Family,
    RoleIndex,
    is_mlx,
    role_index,
    text_config,
)
from qconvert.core.graph import Source
from qconvert.core.json_text import parse_object
from qconvert.core.links import (
    PER_TENSOR,
    SMALL,
    is_inside,
    open_inside,
    open_regular,
    read_inside,
    reading,
    resolved,
)
from qconvert.core.manifest_keys import DRAFT, RANK, parse_manifest
from qconvert.core.names import parse
from qconvert.core.roles import Kind
from qconvert.core.shown import count

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WORK_DIR = ".qconvert"
REPAIR_DIR = ".qconvert-repair"
MANIFEST = "qconvert.json"
RECEIPT = "qconvert.receipt.jsonl"
SIGNATURE = "model.sig"  # of hub/signing.py, made when all else is
HF_QUANT_CONFIG = "hf_quant_config.json"

# Side files are copied unless denied by name: an unknown processor file must not be lost. Denied
# are weights in other formats (pickles above all, which are never opened), files that qconvert
# regenerates, and version control.
DENIED_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack",
    ".gguf", ".onnx", ".onnx_data", ".npz", ".npy", ".tflite", ".ot", ".partial", ".incomplete",
)  # fmt: skip
# An adapter's weights are not copied either: with its config transformers would look for them.
ADAPTER_CONFIG = "adapter_config.json"
DENIED_PATHS = frozenset({INDEX, MANIFEST, RECEIPT, SIGNATURE, "config.json", ADAPTER_CONFIG})
# The Hub's own files, and files that may hold tokens.
DENIED_NAMES = frozenset({".gitattributes", ".env"})
_DENIED_FOLDERS = frozenset({".git", ".cache", "__pycache__", ".ipynb_checkpoints"})

# Of each shard, for Checkpoint.sample_digest: 10 MB in all for the 163 shards of DeepSeek-V3.
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_SAMPLERS = 16

# The shortest entry of a tensor in a header: `"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}`.
_LEAST_ENTRY = 50
# Of two million tensors; the largest index published has 92,000. Read, it takes four times the memory.
_MOST_INDEX = 256 << 20

# msmodelslim's description of a folder, and the quant_method of runtimes that read it.
DESCRIPTION, ASCEND = "quant_model_description", "ascend"
# Of the JSON of a matrix of bitsandbytes': 170 bytes are usual.
_SMALL_TENSOR = 4096

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file, with the size and times it had when its header was read: a source that
    changes during a run is refused by them. `real` is its resolved path, which is what gets opened; it
    is never a link. The bytes of one with a `remote` lie in a store: its file is a header and a hole,
    and its times are 0, since the object's mark tells what they would."""

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int = 0
    inode: int = 0
    real: Path | None = None
    remote: RemoteObject | None = None

    @property
    def name(self) -> str:
        """Return what to call it in a message."""
        return str(self.path) if self.remote is None else self.remote.url

    @property
    def stat(self) -> list[int | str]:
        """Return what tells it from the file that it was."""
        return [self.size, self.mtime_ns if self.remote is None else self.remote.object.mark]

    @property
    def seen(self) -> list[int | str]:
        """Return what tells that it was written to, even where `stat` is as it was."""
        if self.remote is not None:
            return [self.remote.object.time, 0]
        return [self.ctime_ns, self.inode]

    def open(self) -> int:
        """A descriptor to read it with. Raises CheckpointError if it is gone or is no longer a regular
        file, or if its bytes are not on this machine."""
        if self.remote is not None:
            raise CheckpointError(f"{self.name}: is not a file of this machine; copy the folder")
        with reading(self.path):
            return open_regular(self.real or self.path, follow=self.real is None)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """One quantization block and where it stands, e.g. `config.json: quantization_config`."""

    where: str
    block: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.block.get("quant_method", ""))


class _Index(NamedTuple):
    """Content of an index: a file for each tensor, and a total size (unchecked)."""

    weight_map: dict[str, str]
    total_size: Any


@dataclass(frozen=True)
class Checkpoint(Mapping[str, Source]):
    """Tensor names to Sources, in natural order of the shards, with config and side files.

    `side_files` are relative paths that are copied byte for byte; `denied_files` are not copied.
    `warnings` are irregularities that do not stop a conversion. `follow_links` says that links may
    point out of the folder (qconvert/core/links.py). `asked` is whose layout the user says it has,
    `stated_as` how it is stored, of which the config then has a block (checkpoint/stated_as.py).
    `apart`: stacks of experts in the shards are several tensors here (mlx_config.py).
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
    follow_links: bool = False
    asked: Reading | None = None
    apart: bool = False
    stated_as: str = ""

    def __getitem__(self, name: str) -> Source:
        return self.sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __contains__(self, name: object) -> bool:
        return name in self.sources  # Mapping's own asks for the item, and catches the KeyError

    def __len__(self) -> int:
        return len(self.sources)

    # Mapping's own views ask __getitem__ for each tensor: 2.4 million times for Kimi-K2 to AMX.
    def items(self) -> ItemsView[str, Source]:
        return self.sources.items()

    def values(self) -> ValuesView[Source]:
        return self.sources.values()

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def open(
        cls, where: str | Path, *, follow_links: bool = False, config_name: str = "config.json"
    ) -> Checkpoint:
        """Open a folder, one .safetensors file, or a repo in the local Hub cache (ORG/NAME, with
        @REVISION, hf:// before it, or both). `follow_links` lets links point out of the folder. An
        adapter's config has another name, and need not exist.

        Raises UsageError for a name that is empty or not a repo id, and CheckpointError for anything
        invalid: see qconvert.checkpoint.safetensors, and here: a missing or
        broken config.json, an index naming a missing file or a path outside the folder, a tensor
        in two shards, an index and headers that disagree, a link out of the folder.
        """
        root, only = _locate(where)
        config_bytes = b"{}"
        if config_name == "config.json" or os.path.lexists(root / config_name):
            config_bytes = _read_needed(root, config_name, SMALL, follow_links=follow_links)
        config = parse_object(config_bytes, root / config_name)
        files, index, warnings = _shard_files(root, only, follow_links=follow_links)
        weight_map = index.weight_map if index is not None else None
        shards: list[Shard] = []
        sources: dict[str, Source] = {}
        metadata: dict[str, str] = {}
        digest = sha256()
        mirrored = mirrored_at(root)
        ranks = ranks_of(file.name for file in files) if only is None else {}
        for number, file in enumerate(files):
            name = file.relative_to(root).as_posix()
            # A file that the user named may be a link, as a folder may.
            named = file == only
            real = None if named else resolved(root, name, follow_links=follow_links)
            before = _stat(file)
            header = read_header(file, real)
            digest.update(header.raw)
            if mirrored is None:
                shards.append(_shard(file, header.file_size, before, real))
            else:
                shards.append(Shard(file, header.file_size, 0, 0, 0, real, mirrored.remote(name)))
            metadata.update(header.metadata)
            for entry in header.entries:
                own = part_name(entry.name, ranks.get(file.name))
                if own in sources:
                    other = shards[sources[own].shard].path.name
                    raise CheckpointError(
                        f"tensor {own!r} is in both {other} and {file.name}; "
                        "remove the shard that does not belong"
                    )
                sources[own] = Source(own, entry.type, number, entry.offset)
            if weight_map is not None:
                _check_shard_against_index(file, root, header, weight_map)
        if weight_map is not None:
            _check_index_complete(root, weight_map, sources)
        if not sources:
            raise CheckpointError(f"{root}: its safetensors files hold no tensors")
        side, denied = _side_files(
            root, {file.relative_to(root).as_posix() for file in files}, follow_links=follow_links
        )
        apart = experts_apart(config, sources)
        found = cls(
            root, tuple(shards), apart or sources, config, config_bytes, side, denied,
            digest.hexdigest(), index is not None, metadata,
            tuple(warnings + _total_size(index, sources)), follow_links, stated(), apart is not None,
        )  # fmt: skip
        return as_stated(found)

    @property
    def name(self) -> str:
        """Return what the user calls it: its folder, or its URL; of all stages of a split (open.py) the
        folder that holds them."""
        parents = {shard.path.parent for shard in self.shards}
        of_stages = len(parents) > 1 and "stage" in (self.manifest or {})
        return named(str(self.root.parent if of_stages else self.root))

    def real(self, name: str) -> Path:
        """The path of the file of that name below the folder; it need not exist. Raises
        CheckpointError for one that must not be read (qconvert/core/links.py)."""
        return resolved(self.root, name, follow_links=self.follow_links)

    def there(self, name: str) -> os.stat_result | None:
        """The size and times of a regular file of that name, None if there is none or it must not
        be read."""
        try:
            real = self.real(name)
            return real.stat() if real.is_file() else None
        except (CheckpointError, OSError):
            return None

    def open_file(self, name: str) -> BinaryIO:
        """A regular file of the folder, for reading in pieces. Raises CheckpointError as `real` does,
        and if it cannot be opened."""
        with reading(self.root / name):
            return os.fdopen(open_inside(self.root, name, follow_links=self.follow_links), "rb")

    def read(self, name: str, limit: int = SMALL) -> bytes | None:
        """A small file of the folder, None if missing. Raises CheckpointError for anything that is not
        a regular file, is larger than `limit` bytes, or must not be read."""
        try:
            return read_inside(self.root, name, limit, follow_links=self.follow_links)
        except FileNotFoundError:
            return None

    @property
    def receipt_limit(self) -> int:
        """Largest allowed receipt in bytes: one line per tensor, which names every tensor stacked into
        it."""
        rows = (s.type.shape[0] if len(s.type.shape) > 2 else 1 for s in self.sources.values())
        return SMALL + PER_TENSOR * sum(rows)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum([source.type.nbytes for source in self.sources.values()])

    @cached_property
    def says_prepared(self) -> bool:
        """Return whether anything in the folder says that experts were prepared for one kernel
        library."""
        return says_prepared(self)

    @cached_property
    def ends(self) -> frozenset[str]:
        """Return how names end: last components, each with the dot before it. There are few, and whether
        any name has a certain one is asked by many rules."""
        return frozenset(map("".join, {name.rpartition(".")[1:] for name in self.sources}))

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of all tensors."""
        return frozenset({source.type.dtype for source in self.sources.values()})

    @cached_property
    def reading(self) -> Reading | None:
        """Return whose layout it has, by the user or by the manifest; None: the config says it."""
        return self.asked or of_manifest(self.manifest)

    @cached_property
    def family(self) -> Family:
        made = self.manifest is not None
        return read_family(self.reading, self.config, self.sources, made=made)

    @cached_property
    def role_index(self) -> RoleIndex:
        """Every tensor sorted by role."""
        return role_index(self.family, self.config, self.sources)

    @property
    def strictest_mode(self) -> int:
        """Permissions that all of its shards give: what is made of them gives no more."""
        return reduce(lambda mode, shard: mode & shard.path.stat().st_mode, self.shards, 0o666)

    @property
    def added(self) -> str:
        """Words on what lies beside its own tensors, "" where nothing does."""
        return ""

    @property
    def model_line(self) -> str:
        """`deepseek_v3: 61 layers, 256 experts, 1 MTP layer`."""
        dims, family = self.role_index.dims, self.family
        parts = [count(dims.num_layers, "layer")]
        if dims.num_experts:
            parts.append(count(dims.num_experts, "expert"))
        if family.any_mtp(self, dims):
            parts.append(count(dims.mtp_layers or 1, "MTP layer"))
        else:
            counted = count(dims.mtp_layers, "MTP layer")
            stated = any(key in text_config(self.config) for key in MTP_COUNTS)
            missed = dims.mtp_layers and stated  # else the class assumes one
            parts.append(f"none of the config's {counted}" if missed else "no MTP tensors")
        kind = self.config.get("model_type")
        label = family.name if family.name == kind else f"{kind} (family {family.name})"
        return f"{label}: {', '.join(parts)}"

    def absent(self) -> list[str]:
        """Names of tensors that the family requires and this folder lacks. A pipeline stage's folder
        must only hold what that stage needs: its layers; embeddings in the first stage; the final norm,
        the head and MTP layers in the last. A draft's folder must hold its layers and what it shares. A
        folder of experts for CPU kernels need hold none of them, because a family describes none of its
        tensors."""
        if "amx" in (self.manifest or {}) or RANK in (self.manifest or {}):
            return []
        # A layer whose experts were prepared for TensorRT-LLM's kernels stores them under other names.
        ends = (".experts.w13_weight", ".experts.w13_weight_packed") if self.says_prepared else ()
        prepared = {parse(name).layer for name in self if name.endswith(ends)}
        found = [
            name
            for name in self.role_index.absent()
            if not (".experts." in name and parse(name).layer in prepared)
        ]
        draft = (self.manifest or {}).get(DRAFT)
        if draft is not None:
            dims = self.role_index.dims
            shared = [name for name in draft["shared"] if name not in self]
            return [*shared, *(name for name in found if self.family.is_mtp(name, dims))]
        stage = (self.manifest or {}).get("stage")
        if stage is None:
            return found
        first, stop = stage["layers"]
        last = stage["number"] == stage["of"] - 1

        def held(name: str) -> bool:
            layer = parse(name).layer
            if self.family.is_mtp(name, self.role_index.dims):
                return bool(last)
            if layer is not None:
                return bool(first <= layer < stop)
            place = self.family.place(name, self.role_index.dims)
            if place is not None and place.role.kind is Kind.EMBEDDING:
                return bool(stage["number"] == 0)
            return bool(last)

        return [name for name in found if held(name)]

    @cached_property
    def quantization_configs(self) -> tuple[QuantConfig, ...]:
        """Every quantization block: root, nested configs, and modelopt's hf_quant_config.json.

        All of them matter: a stale nested block overrides the root's in some runtimes.
        """
        extra = self.root / HF_QUANT_CONFIG
        data = self.read(HF_QUANT_CONFIG)
        found = quantization_in(
            self.config, None if data is None else parse_object(data, extra), extra
        )
        return (*found, *self._described())

    def _described(self) -> Iterator[QuantConfig]:
        """msmodelslim's description: a type for each tensor, beside config.json."""
        for name in filter(is_description, self.side_files):
            data = self.read(name, self._manifest_limit)
            if data is not None:
                stated = parse_object(data, self.root / name)
                yield QuantConfig(name, {"quant_method": ASCEND, **stated})

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """qconvert.json of a folder that qconvert made, else None. Raises CheckpointError if it is
        broken or belongs to another program."""
        data = self.manifest_bytes
        return None if data is None else parse_manifest(data, self.root / MANIFEST)

    @property
    def manifest_bytes(self) -> bytes | None:
        """qconvert.json unparsed, None if missing."""
        return self.read(MANIFEST, self._manifest_limit)

    @property
    def _manifest_limit(self) -> int:
        """Largest allowed manifest: it names every dropped tensor, for a folder of experts all
        others."""
        return 4 * SMALL + PER_TENSOR * len(self.sources)

    @property
    def sample_digest(self) -> str:
        """A hash of evenly spaced blocks of every shard and of all side files. Two fine-tunes of one
        base have the same headers; this tells them apart without reading everything. Raises
        CheckpointError naming a file that cannot be read."""
        return self._sampled[0]

    @property
    def side_digests(self) -> Mapping[str, str]:
        """xxh3-128 of each side file, from the same read as `sample_digest`."""
        return self._sampled[1]

    @cached_property
    def _sampled(self) -> tuple[str, dict[str, str]]:
        digest = xxhash.xxh3_128()
        with ThreadPoolExecutor(_SAMPLERS) as pool:
            far = [shard for shard in self.shards if shard.remote is not None]
            # All are asked for at once: one after another, the samples of 163 shards would take minutes.
            ahead = pool.map(_blocks, far)
            for shard in self.shards:
                for block in next(ahead) if shard.remote is not None else _blocks(shard):
                    digest.update(block)
        sides: dict[str, str] = {}
        for name in self.side_files:
            side = xxhash.xxh3_128()
            with reading(self.root / name), self.open_file(name) as stream:
                digest.update(name.encode())
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
                    side.update(chunk)
            sides[name] = side.hexdigest()
        return digest.hexdigest(), sides

    def read_scalar(self, source: Source) -> bytes:
        """The bytes of a one-element tensor, to tell whether per-tensor scales are equal. Raises
        CheckpointError if it cannot be read."""
        assert source.type.numel == 1
        return self.read_small(source)

    def read_shape(self, source: Source) -> tuple[int, int] | None:
        """The two integers of a tensor that holds a shape, which planning may read, too; None for one of
        another type, and where no data is at hand: in memory, not written yet, or a request away. Raises
        CheckpointError if they cannot be read."""
        kind = {"I64": "<2q", "I32": "<2i"}.get(source.type.dtype)
        if kind is None or source.type.shape != (2,) or source.shard >= len(self.shards):
            return None
        if self.shards[source.shard].remote is not None:
            return None
        rows, columns = unpack(kind, self.read_small(source))
        return rows, columns

    def read_small(self, source: Source) -> bytes:
        """The bytes of a small tensor: a scalar, a shape, or bitsandbytes' JSON. They are the only data
        of tensors that planning may read. Raises CheckpointError if it is large or cannot be read."""
        if source.type.nbytes > _SMALL_TENSOR:
            raise CheckpointError(
                f"{source.name!r}: expected {_SMALL_TENSOR} bytes at most, found {source.type}"
            )
        shard = self.shards[source.shard]
        if shard.remote is not None:
            return shard.remote.read(source.offset, source.offset + source.type.nbytes)
        with reading(shard.path), os.fdopen(shard.open(), "rb") as stream:
            stream.seek(source.offset)
            return stream.read(source.type.nbytes)

    def look_again(self) -> tuple[Shard, ...]:
        """The shards as they are now. Raises CheckpointError if one cannot be read."""
        return as_they_are(self.shards)

    def check_unchanged(
        self, since: Sequence[Shard] | None = None, *, linked: bool = False
    ) -> tuple[Shard, ...]:
        """The shards as they are now. Raises CheckpointError if one is not what it was when its header
        was read, or `since` (an earlier answer): its size, its modification time, its mark in a store,
        or its change time and inode, which show a change after which the modification time was set
        back. Where files were `linked` by us, which changes that time, without it."""
        found = self.look_again()
        for before, now in zip(since or self.shards, found, strict=True):
            same = now == before
            if linked and now.remote is None:
                same = (now.stat, now.inode) == (before.stat, before.inode)
            if not same:
                raise CheckpointError(
                    f"{now.name} changed while it was being converted; leave the source alone "
                    "and start again (qconvert clean OUT first)"
                )
        return found


def imports_of(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Modules that readers of these shards import."""
    stores = {shard.remote.store for shard in shards if shard.remote is not None}
    return tuple(sorted({name for store in stores for name in store.imports}))


C = TypeVar("C", bound=Checkpoint)


def extended(
    kind: type[C],
    model: Checkpoint,
    shards: Sequence[Shard],
    sources: Mapping[str, Source],
    digests: Iterable[str],
    **changes: Any,
) -> C:
    """A checkpoint as a class that adds to it: `shards` of other folders behind its own, the `sources`
    in them, and hashes of those folders."""
    digest = sha256("".join((model.header_digest, *digests)).encode()).hexdigest()
    inherited = {each.name: getattr(model, each.name) for each in fields(Checkpoint)}
    added = {
        "shards": (*model.shards, *shards),
        "sources": {**model.sources, **sources},
        "header_digest": digest,
    }
    return kind(**{**inherited, **added, **changes})


def as_they_are(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Shards as they are now. Raises CheckpointError if one cannot be read."""
    stores = {shard.remote.store for shard in shards if shard.remote is not None}
    now = {(store, each.name): each for store in stores for each in store.listed()}
    return tuple(
        _shard(shard.path, None, _stat(shard.path), shard.real)
        if shard.remote is None
        else _far(shard, shard.remote, now)
        for shard in shards
    )


def file_size(file: Path) -> int:
    """Size in bytes. Raises CheckpointError if the file cannot be read (a dangling link, for
    example)."""
    return _stat(file).st_size


def shard_of(file: Path) -> Shard:
    """A file of weights as it is now. Raises CheckpointError if it cannot be read."""
    return _shard(file, None, _stat(file), None)


def _shard(file: Path, size: int | None, status: os.stat_result, real: Path | None) -> Shard:
    size = status.st_size if size is None else size
    return Shard(file, size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, real)


def _far(
    shard: Shard, remote: RemoteObject, now: Mapping[tuple[Store, str], StoredObject]
) -> Shard:
    """A shard in a store as it is now."""
    found = now.get((remote.store, remote.object.name))
    if found is None:
        raise CheckpointError(f"{shard.name}: is gone since its header was read")
    return replace(shard, size=found.size, remote=replace(remote, object=found))


def _blocks(shard: Shard) -> list[bytes]:
    """Evenly spaced blocks of a shard."""
    step = max(_SAMPLE_BYTES, shard.size // _SAMPLES)
    starts = range(0, shard.size, step)
    if shard.remote is not None:
        ends = [min(shard.size, start + _SAMPLE_BYTES) for start in starts]
        return [shard.remote.read(*ends) for ends in zip(starts, ends, strict=True)]
    with reading(shard.path), os.fdopen(shard.open(), "rb", buffering=0) as stream:
        return [os.pread(stream.fileno(), _SAMPLE_BYTES, start) for start in starts]


def _stat(file: Path) -> os.stat_result:
    with reading(file):
        return file.stat()


def _locate(where: str | Path) -> tuple[Path, Path | None]:
    """The checkpoint's folder and, where a single file was named, that file."""
    if not str(where):  # an unset shell variable; as a path it would be the current folder
        raise UsageError("the source's name is empty; name a folder")
    path = Path(where)
    with reading(path):  # a name too long, a folder that may not be entered
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        return path, None
    if is_file:
        if path.suffix != ".safetensors":
            if path.suffix.lower() == ".gguf":
                raise CheckpointError(f"{path} is a GGUF file: a source to convert, and no result")
            raise CheckpointError(f"{path} is not a .safetensors file; pickles are never opened")
        return path.parent, path
    repo = parse_repo(str(where))
    if repo is not None:
        return cached_folder(repo, str(where)), None
    raise CheckpointError(f"{path}: no such file or folder")


def _read_needed(root: Path, name: str, limit: int, *, follow_links: bool) -> bytes:
    try:
        return read_inside(root, name, limit, follow_links=follow_links)
    except FileNotFoundError:
        if (root / WORK_DIR).is_dir():
            raise CheckpointError(
                f"{root}: its conversion is unfinished ({WORK_DIR}/ exists), and {name} comes last; "
                "`qconvert status` says what is done; run the same command again to finish it"
            ) from None
        gguf = sorted(root.glob("*.gguf"))
        if gguf:
            raise CheckpointError(
                f"{root}: is no checkpoint of transformers; name a GGUF file, as {gguf[0]}"
            ) from None
        raise CheckpointError(
            f"{root / name} is missing; a checkpoint cannot be read without it"
        ) from None


def _shard_files(
    root: Path, only: Path | None, *, follow_links: bool
) -> tuple[list[Path], _Index | None, list[str]]:
    """The files to read, the index where there is one, and warnings."""
    if only is not None:
        return [only], None, []
    of_ranks = sorted(root.glob("*-TP-*.safetensors")) if is_of_ranks(root) else []
    if of_ranks and not os.path.lexists(root / INDEX):
        return of_ranks, None, []
    if os.path.lexists(root / INDEX):
        raw = _read_needed(
            root, INDEX, index_limit(root, follow_links=follow_links), follow_links=follow_links
        )
        table = parse_object(raw, root / INDEX)
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
            if file.exists() and not file.is_file():
                raise CheckpointError(f"{file}: is not a regular file, and {INDEX} names it")
            if not file.is_file():
                raise CheckpointError(
                    f"{root / INDEX} names {name}, which is missing: the download is incomplete, "
                    "or the index is wrong"
                )
            if of_ranks and file not in of_ranks:
                raise CheckpointError(
                    f"{root / INDEX} names {name}, and weights are in files of ranks (*-TP-*); remove "
                    "what does not belong there"
                )
            files.append(file)
        if of_ranks:  # the index has one place for a name, and ranks have a file each
            return of_ranks, None, []
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return files, _Index(weight_map, total), []
    found = sorted(root.glob("*.safetensors"))
    if len(found) > 1:
        counts = {match.group(2) for f in found if (match := _SHARD.search(f.name))}
        if len(counts) != 1 or int(counts.pop()) != len(found):
            raise CheckpointError(
                f"{root}: found {len(found)} .safetensors files without {INDEX}, and their names do "
                "not form one complete set; download the index, or name one file"
            )
        return (
            found,
            None,
            [f"{INDEX} is missing; headers of {count(len(found), 'shard')} were used"],
        )
    if not found:
        gguf = sorted(root.glob("*.gguf"))
        if gguf:
            raise CheckpointError(f"{root}: no .safetensors file; name a GGUF file, as {gguf[0]}")
        raise CheckpointError(
            f"{root}: no .safetensors file; pickle checkpoints (.bin, .pt) are never opened: "
            "convert them with safetensors first"
        )
    return found, None, []


def index_limit(root: Path, *, follow_links: bool) -> int:
    """Largest allowed index in bytes: it has one line per tensor, and the header lengths of the shards
    next to it bound how many there can be. What a shard claims beyond its own size is no header."""
    tensors = 0
    for file in root.glob("*.safetensors"):
        with suppress(CheckpointError, FileNotFoundError):  # for the header's reader to name
            real = resolved(root, file.name, follow_links=follow_links)
            with reading(file), os.fdopen(open_regular(real, follow=False), "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                size = os.fstat(stream.fileno()).st_size
            if length <= min(MAX_HEADER, size - 8):
                tensors += length // _LEAST_ENTRY
    return min(_MOST_INDEX, SMALL + PER_TENSOR * tensors)


def _inside(root: Path, tensor: str, file: Any) -> str:
    if not isinstance(file, str) or not is_inside(file) or "\\" in file:
        raise CheckpointError(
            f"{root / INDEX}: expected {tensor!r} to be in a file inside the folder, found {file!r}; "
            "download the index again"
        )
    path = PurePosixPath(file)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{root / INDEX}: expected {tensor!r} to be in a .safetensors file, found {file!r}; "
            "pickles are never opened"
        )
    return str(path)


def _check_shard_against_index(
    file: Path, root: Path, header: Header, weight_map: Mapping[str, str]
) -> None:
    name = file.relative_to(root).as_posix()
    told = [weight_map.get(entry.name) for entry in header.entries]
    if told.count(name) == len(told):
        return
    for entry in header.entries:
        said = weight_map.get(entry.name)
        if said != name:
            where = "does not name it" if said is None else f"puts it in {said}"
            raise CheckpointError(
                f"tensor {entry.name!r} is in {name}, but {INDEX} {where}; `qconvert repair` makes the "
                "index anew, where the shards are whole; else download both again"
            )


def _check_index_complete(
    root: Path, weight_map: Mapping[str, str], sources: Mapping[str, Source]
) -> None:
    for name, file in weight_map.items():
        if name not in sources:
            raise CheckpointError(
                f"{root / INDEX} puts tensor {name!r} in {file}, but that file's header has no such "
                "tensor; `qconvert repair` makes the index anew, where the shards are whole; else "
                "download both again"
            )


def _total_size(index: _Index | None, sources: Mapping[str, Source]) -> list[str]:
    """Published indexes are often wrong here and no loader checks it, so it is only a warning."""
    if index is None or index.total_size is None:
        return []
    true = sum(source.type.nbytes for source in sources.values())
    if index.total_size == true:
        return []
    return [f"{INDEX} states total_size {index.total_size}, but the tensors add up to {true}"]


def _side_files(
    root: Path, shards: set[str], *, follow_links: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files to copy and files not to copy, both as sorted relative paths. Raises CheckpointError for a
    file that would be copied and is a link out of the folder, or whose name is not valid
    text."""
    kept: list[str] = []
    denied: list[str] = []
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=False):
        base = Path(folder).relative_to(root)
        # Following a folder link might never end; it is listed by name, so that nothing is lost
        # silently.
        shut = {f for f in folders if is_denied_folder(f) or (Path(folder) / f).is_symlink()}
        denied += [f"{(base / f).as_posix()}/" for f in shut]
        folders[:] = sorted(set(folders) - shut)
        for name in names:
            path = (base / name).as_posix()
            if path in shards or path in ("config.json", INDEX):
                continue
            if _is_denied(path):
                denied.append(path)
                continue
            if _is_special(resolved(root, path, follow_links=follow_links)):
                denied.append(path)
                continue
            try:
                path.encode()
            except UnicodeEncodeError as error:
                raise CheckpointError(
                    f"{root / path}: its name is not valid UTF-8, so JSON and repos cannot hold it; "
                    "rename or remove it"
                ) from error
            kept.append(path)
    return tuple(sorted(kept)), tuple(sorted(denied))


def _unreadable(error: OSError) -> None:
    raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _is_denied(path: str) -> bool:
    """Return whether a file, at `path` below the root, is left behind. Only the root's own config.json
    and manifest are regenerated: a nested config.json belongs to something else."""
    name = path.rpartition("/")[2]
    # A worktree's .git is a file, and a file .qconvert would be in the way of the work folder.
    if path in DENIED_PATHS or name in DENIED_NAMES or is_denied_folder(name):
        return True
    if name.endswith(".index.json"):
        return True
    return name.lower().endswith(DENIED_SUFFIXES)


def is_denied_folder(name: str) -> bool:
    """Return whether a folder of this name is left behind: caches, version control, and all that
    qconvert keeps beside its results. A later command would take up what lies there as its own, so none
    comes from a source, on file systems that do not tell cases apart neither."""
    return name in _DENIED_FOLDERS or name.lower().startswith(WORK_DIR)


def _is_special(real: Path) -> bool:
    """Return whether something is not a readable file: a pipe, a socket, a device."""
    return real.exists() and not real.is_file()


def is_description(name: str) -> bool:
    """Return whether a side file is msmodelslim's description of the folder's tensors."""
    return name.startswith(DESCRIPTION) and name.endswith(".json")


def quantization_in(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None, where: Path
) -> tuple[QuantConfig, ...]:
    """Quantization blocks of a config.json and, if present, of modelopt's file, which is at
    `where`. Raises CheckpointError for one that is not an object."""
    found = list(_nested_quantization(config, "config.json"))
    if modelopt is not None:
        inner = modelopt.get("quantization", modelopt)
        if not isinstance(inner, dict):
            raise CheckpointError(f"{where}: `quantization` must be an object")
        found.append(QuantConfig(HF_QUANT_CONFIG, {"quant_method": "modelopt", **inner}))
    return tuple(found)


def _nested_quantization(block: Mapping[str, Any], where: str) -> Iterator[QuantConfig]:
    for key, value in block.items():
        if not isinstance(value, dict):
            continue
        if is_mlx(value) and key in QUANTIZATION_KEYS:
            yield QuantConfig(f"{where}: {key}", {"quant_method": MLX, **value})
        elif key in QUANTIZATION_KEYS[:2]:
            yield QuantConfig(f"{where}: {key}", value)
        elif key.endswith("_config"):
            yield from _nested_quantization(value, f"{where}: {key}")
