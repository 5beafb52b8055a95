"""Signatures of a folder, as OpenSSF model signing makes and verifies them, with a key.

A signature is one JSON file: a Sigstore bundle of version 0.3 around a DSSE envelope (its signature is
over `DSSEv1 SIZE TYPE SIZE PAYLOAD`), whose payload is an in-toto statement of the predicate
https://model_signing/signature/v1.0. `resources` of the predicate are the name and SHA-256 of each file,
and the subject is the folder with the SHA-256 of all these hashes, one after another. Other keys of the
predicate are ignored by that version: `conversion` states what made the folder, as its manifest does.

Every file of the folder is signed but the signature itself and what version control and download clients
keep (`_LEFT`), which the statement lists as `ignore_paths`. Sources: model-signing
(`_signing/signing.py`, `_signing/sign_ec_key.py`, `_serialization/file.py`), in-toto's Statement v1,
DSSE 1.0. Keyless signing, which needs Sigstore's services, is not here.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from qconvert import __version__
from qconvert.checkpoint.checkpoint import MANIFEST, REPAIR_DIR, SIGNATURE, WORK_DIR
from qconvert.core.errors import CheckpointError, OutputError, PlanError
from qconvert.core.extras import require
from qconvert.core.json_text import parse_object
from qconvert.core.links import is_inside, open_inside, read_inside, read_regular, writing
from qconvert.core.manifest_keys import parse_manifest
from qconvert.core.shown import shortened
from qconvert.hub.compare import Digests

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey

_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
# Left out by model-signing itself, and the folder in which `hf download` notes what it fetched.
_LEFT = (".cache", ".git", ".gitattributes", ".github", ".gitignore")
# sglang's own list of files that its checksums leave out (`srt/utils/model_file_verifier.py`).
_NOT_SUMMED = ("README.", "LICENSE", "NOTICE", ".")
# Facts of a manifest that say what the folder was made of, and how.
_FACTS = ("identity", "passes", "lossy_steps", "dropped_files", "merge", "pair", "repaired")
_MOST_KEY = 1 << 16
_MOST_SIGNATURE = 64 << 20  # of 100,000 files: 20 MB
PASSWORD = "QCONVERT_KEY_PASSWORD"  # of a private key that is encrypted
_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}


@dataclass(frozen=True)
class Signed:
    """A folder whose `signature` was written. `files` are the SHA-256 of each, by its path below the
    folder; `key` is the SHA-256 of the public key as PEM, which the signature names; `checksums` is the
    file for sglang and `sbom` the bill of materials, if they were written."""

    folder: Path
    signature: Path
    files: Mapping[str, str]
    key: str
    checksums: Path | None = None
    sbom: Path | None = None


@dataclass(frozen=True)
class Verified:
    """A signature that is one of the key's, and in what the folder differs from what it signed: none of
    `changed`, `missing`, `extra` files where it is the same. `conversion` is what the signer stated of
    how the folder was made, empty where nothing."""

    folder: Path
    signature: Path
    files: int
    key: str
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    conversion: Mapping[str, Any]

    @property
    def is_same(self) -> bool:
        """Return whether each file is what was signed, and there is no other."""
        return not (self.changed or self.missing or self.extra)


def sign_folder(
    folder: Path,
    key: Path,
    signature: Path | None = None,
    *,
    checksums: Path | None = None,
    sbom: Path | None = None,
    started: Callable[[int], None] = lambda _: None,
    wrote: Callable[[int], None] = lambda _: None,
) -> Signed:
    """Sign a folder with a private key (PEM, of P-256, P-384 or P-521; one that is encrypted by the
    password in the variable PASSWORD), and write the signature (None: model.sig in the folder).
    `checksums`: a file that sglang compares with by --model-checksum; `sbom`: a bill of materials
    (CycloneDX 1.6); they are signed too, if they lie in the folder. `started` is told how many bytes are
    read, `wrote` of those that were.

    Raises PlanError where cryptography is missing, OutputError for a folder with links or an unfinished
    conversion, CheckpointError for what is no such key.
    """
    made, sealing = _private(key)
    place = folder / SIGNATURE if signature is None else signature
    left = {*_LEFT, *_inside(folder, place)}
    later = _inside(folder, checksums) | _inside(folder, sbom)
    files = {path: size for path, size in _files(folder, left, links="no") if path not in later}
    started(sum(files.values()))
    digests = Digests(folder, wrote)
    digests.of((path, "sha256") for path in files)
    hashes = {path: digests.known[path, "sha256"] for path in files}
    listed = {checksums: _checksums(files, hashes), sbom: bill(folder, hashes)}
    for file, data in listed.items():
        if file is not None:
            _write(file, data)
            hashes |= dict.fromkeys(_inside(folder, file), sha256(data).hexdigest())
    payload = json.dumps(statement(folder, hashes, left), separators=(",", ":")).encode()
    public = made.public_key()
    bundle = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hint(public)}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [
                {
                    "sig": b64encode(made.sign(pre_authentication(payload), sealing)).decode(),
                    "keyid": "",
                }
            ],
        },
    }
    _write(place, json.dumps(bundle, separators=(",", ":")).encode())
    return Signed(folder, place, hashes, hint(public), checksums, sbom)


def verify_folder(
    folder: Path,
    key: Path,
    signature: Path | None = None,
    *,
    follow_links: bool = False,
    started: Callable[[int], None] = lambda _: None,
    wrote: Callable[[int], None] = lambda _: None,
) -> Verified:
    """Compare a folder with its signature, of whichever tool, by a public key (PEM). Links are read
    where they lead to the folder or, in the Hub's cache, to the blobs of its repo; elsewhere only with
    `follow_links`.

    Raises CheckpointError for a signature that is not one of this key, or that cannot be read, and
    PlanError and CheckpointError as `sign_folder` does.
    """
    public, sealing = _public(key)
    place = folder / SIGNATURE if signature is None else signature
    try:
        data = read_regular(place, _MOST_SIGNATURE)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: is missing; name it by --signature FILE") from None
    stated = _authentic(parse_object(data, place), public, sealing, place)
    predicate = stated["predicate"]
    wanted = _resources(stated, place)
    ignored = _texts(predicate["serialization"].get("ignore_paths", []), place)
    left = {
        name for name in _LEFT if not any(PurePosixPath(p).is_relative_to(name) for p in wanted)
    }
    left |= {*ignored, *_inside(folder, place)}
    there = dict(_files(folder, left, links="follow" if follow_links else "inside"))
    both = sorted(wanted.keys() & there.keys())
    started(sum(there[path] for path in both))
    digests = Digests(folder, wrote, follow_links=follow_links)
    digests.of((path, "sha256") for path in both)
    conversion = predicate.get("conversion")
    return Verified(
        folder, place, len(wanted), hint(public),
        tuple(path for path in both if digests.known[path, "sha256"] != wanted[path]),
        tuple(sorted(wanted.keys() - there.keys())), tuple(sorted(there.keys() - wanted.keys())),
        conversion if isinstance(conversion, Mapping) else {},
    )  # fmt: skip


# The statement.


def statement(folder: Path, hashes: Mapping[str, str], left: set[str]) -> dict[str, Any]:
    """The in-toto statement of a folder's files, given the SHA-256 of each in hex, and the paths that
    are left out."""
    ordered = sorted(hashes, key=lambda path: PurePosixPath(path).parts)
    predicate: dict[str, Any] = {
        "serialization": {
            "method": "files", "hash_type": "sha256", "allow_symlinks": False,
            "ignore_paths": sorted(left),
        },
        "resources": [
            {"name": path, "algorithm": "sha256", "digest": hashes[path]} for path in ordered
        ],
        "conversion": _conversion(folder),
    }  # fmt: skip
    root = root_of([hashes[path] for path in ordered])
    return {
        "_type": _STATEMENT,
        "subject": [{"name": folder.resolve().name, "digest": {"sha256": root}}],
        "predicateType": _PREDICATE,
        "predicate": predicate,
    }


def root_of(hashes: Sequence[str]) -> str:
    """The SHA-256 of hashes one after another, as bytes; all in hex."""
    return sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()


def pre_authentication(payload: bytes) -> bytes:
    """Return what a DSSE signature is over: the type and the payload, each with its size in bytes."""
    return f"DSSEv1 {len(_PAYLOAD)} {_PAYLOAD} {len(payload)} ".encode() + payload


def _conversion(folder: Path) -> dict[str, Any]:
    """Facts of the folder's manifest; the hashes of each tensor and of the source's bytes are in the
    receipt, which is one of the files."""
    try:
        data = read_inside(folder, MANIFEST, error=OutputError)
    except FileNotFoundError:
        return {"signed_by": f"qconvert {__version__}"}
    manifest = parse_manifest(data, folder / MANIFEST)
    facts = {name: manifest[name] for name in _FACTS if name in manifest}
    return {"signed_by": f"qconvert {__version__}", **facts}


def _checksums(files: Mapping[str, int], hashes: Mapping[str, str]) -> bytes:
    """The file that sglang's --model-checksum names: hash and size of each file at the top of the folder
    that it loads."""
    found = {
        path: {"sha256": hashes[path], "size": size}
        for path, size in files.items()
        if "/" not in path and not path.startswith(_NOT_SUMMED) and not path.endswith(".lock")
    }
    return json.dumps({"files": found}, indent=2, sort_keys=True).encode()


def bill(folder: Path, hashes: Mapping[str, str]) -> bytes:
    """A bill of materials, CycloneDX 1.6 in JSON: the model with its class, the model that it was made
    from and by which steps, and its files. Without a time or a random number: the same folder has the
    same bill. Format source: cyclonedx.org, schema/bom-1.6.schema.json."""
    made = _conversion(folder)
    try:
        config = parse_object(read_inside(folder, "config.json", error=OutputError), "config.json")
    except FileNotFoundError:
        config = {}
    named = config.get("architectures")
    classes = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    model: dict[str, Any] = {
        "type": "machine-learning-model", "bom-ref": "model", "name": folder.resolve().name,
    }  # fmt: skip
    if classes:
        model["modelCard"] = {"modelParameters": {"modelArchitecture": classes[0]}}
    source = made.get("identity", {}).get("source")
    if source is not None:  # a digest of the source's headers and config
        ancestor = {"type": "machine-learning-model", "name": "source", "version": source}
        model["pedigree"] = {"ancestors": [ancestor]}
    if "passes" in made:
        steps = [json.dumps(one, sort_keys=True) for one in made["passes"]]
        model["properties"] = [{"name": "qconvert:pass", "value": step} for step in steps]
    tool = {"type": "application", "name": "qconvert", "version": __version__}
    files = [
        {"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": hashes[path]}]}
        for path in sorted(hashes)
    ]
    found = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX",
        "specVersion": "1.6", "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": model}, "components": files,
    }  # fmt: skip
    return json.dumps(found, indent=2).encode()


def _authentic(
    bundle: Mapping[str, Any], public: EllipticCurvePublicKey, sealing: ECDSA, place: Path
) -> dict[str, Any]:
    """The statement of a bundle, if the key signed it. Raises CheckpointError."""
    from cryptography.exceptions import InvalidSignature

    try:
        kind, envelope = bundle["mediaType"], bundle["dsseEnvelope"]
        named = bundle["verificationMaterial"]["publicKey"].get("hint")
        (signature,) = envelope["signatures"]
        payload = b64decode(envelope["payload"], validate=True)
        raw = b64decode(signature["sig"], validate=True)
        kinds = kind, envelope["payloadType"]
    except (KeyError, TypeError, ValueError, AttributeError, NotBase64) as error:
        raise CheckpointError(
            f"{place}: expected a Sigstore bundle with a DSSE envelope, one signature and a public key, "
            f"found another form ({type(error).__name__}: {shortened(str(error), 80)}); signatures "
            "without a key are not verified here"
        ) from error
    if kinds != (_BUNDLE, _PAYLOAD):
        raise CheckpointError(
            f"{place}: expected {_BUNDLE} of {_PAYLOAD}, found {shortened(repr(kinds), 200)}"
        )
    if named is not None and named != hint(public):
        raise CheckpointError(
            f"{place}: was signed with the key {shortened(str(named), 80)}, and the given one is "
            f"{hint(public)}; name the signer's public key"
        )
    try:
        public.verify(raw, pre_authentication(payload), sealing)
    except InvalidSignature:
        raise CheckpointError(
            f"{place}: is no signature of this key: it was changed, or made with another one; do not "
            "trust the folder"
        ) from None
    stated = parse_object(payload, f"{place}, its statement")
    if (stated.get("_type"), stated.get("predicateType")) != (_STATEMENT, _PREDICATE):
        raise CheckpointError(f"{place}: expected a statement of {_PREDICATE}, found another kind")
    return stated


def _resources(stated: Mapping[str, Any], place: Path) -> dict[str, str]:
    """SHA-256 of each signed file, in hex. Raises CheckpointError for files that are not hashed whole
    by SHA-256, for names that lead out of the folder, and for a subject that is not of these files."""
    try:
        serialization, listed = (
            stated["predicate"]["serialization"],
            stated["predicate"]["resources"],
        )
        (subject,) = stated["subject"]
        root = subject["digest"]["sha256"]
        kinds = {serialization["method"], *(one["algorithm"] for one in listed)}
        files = {str(one["name"]): bytes.fromhex(one["digest"]).hex() for one in listed}
        sound = root == root_of([one["digest"] for one in listed]) and len(files) == len(listed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{place}: expected files with their hashes in the statement, found another form "
            f"({type(error).__name__}: {shortened(str(error), 80)})"
        ) from error
    if not kinds <= {"files", "sha256"}:
        raise CheckpointError(
            f"{place}: expected files hashed whole by sha256, found "
            f"{', '.join(sorted(map(str, kinds)))}; verify it with the tool that signed it"
        )
    bad = next((name for name in files if not is_inside(name)), None)
    if bad is not None or not sound:
        what = "its subject is not the hash of its files" if bad is None else f"names {bad!r}"
        raise CheckpointError(f"{place}: {what}; do not trust the folder")
    return files


def _texts(value: Any, place: Path) -> list[str]:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return [PurePosixPath(one).as_posix() for one in value]
    raise CheckpointError(f"{place}: expected ignore_paths to be a list of paths")


# Files and keys.


def _inside(folder: Path, file: Path | None) -> set[str]:
    """The path of a file below the folder; none, if it lies elsewhere."""
    if file is None:
        return set()
    real, home = Path(os.path.realpath(file.parent)) / file.name, Path(os.path.realpath(folder))
    return {real.relative_to(home).as_posix()} if real.is_relative_to(home) else set()


def _files(
    folder: Path, left: set[str], *, links: Literal["no", "inside", "follow"]
) -> Iterator[tuple[str, int]]:
    """Paths below a folder with their sizes, sorted, but those that are left out, or lie below one.
    Raises OutputError for an unfinished conversion, for what is no file, and for links that may not be
    read."""
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder")
    for name in (WORK_DIR, REPAIR_DIR):
        if os.path.lexists(folder / name):
            raise OutputError(
                f"{folder}: {name}/ exists: a conversion or repair is unfinished; run its command "
                "again, or drop it with qconvert clean"
            )
    found = list[str]()
    for base, folders, names in os.walk(folder, onerror=_unreadable):
        at = PurePosixPath(Path(base).relative_to(folder).as_posix())
        linked = [name for name in folders if (Path(base) / name).is_symlink()]
        folders[:] = [name for name in folders if (at / name).as_posix() not in left]
        found += [(at / name).as_posix() for name in (*names, *linked)]
    for path in sorted(set(found) - left):
        if links == "no" and (folder / path).is_symlink():
            raise OutputError(
                f"{folder / path}: is a link (a Hub cache, or a copy by links); sign a folder of its "
                "own, as `hf download` to a local folder makes one"
            )
        fd = open_inside(folder, path, follow_links=links == "follow", error=OutputError)
        size = os.fstat(fd).st_size
        os.close(fd)
        yield path, size


def _unreadable(error: OSError) -> None:
    raise OutputError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _write(file: Path, data: bytes) -> None:
    """Write a file of our own: a link under its name is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with writing(file), os.fdopen(os.open(file, flags, 0o666), "wb") as stream:
        stream.write(data)


def hint(public: EllipticCurvePublicKey) -> str:
    """Return what a bundle names a key by: the SHA-256 of its PEM, in hex."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return sha256(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _pem(key: Path) -> bytes:
    require("sign", "signatures are made and verified with ECDSA", error=PlanError)
    try:
        return read_regular(key, _MOST_KEY, error=CheckpointError)
    except FileNotFoundError:
        raise CheckpointError(f"{key}: no such file; name a key in PEM") from None


def _private(key: Path) -> tuple[Any, ECDSA]:
    """A private key, and how it signs. Raises CheckpointError for a file that holds none."""
    data = _pem(key)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    password = os.environ.get(PASSWORD)
    try:
        made = load_pem_private_key(data, password.encode() if password else None)
    except TypeError as error:  # encrypted without a password, or a password without need
        raise CheckpointError(f"{key}: {error}; the password is read from {PASSWORD}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CheckpointError(
            f"{key}: expected a private key of an elliptic curve in PEM (openssl ecparam -name "
            f"prime256v1 -genkey -noout), found none that can be read with this password"
        ) from error
    return made, _sealing(made, key)


def _public(key: Path) -> tuple[EllipticCurvePublicKey, ECDSA]:
    """A public key, and how its signatures are verified. Raises CheckpointError for a file that holds
    none."""
    data = _pem(key)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        found: Any = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CheckpointError(
            f"{key}: expected a public key in PEM (openssl ec -in KEY -pubout), found none"
        ) from error
    return found, _sealing(found, key)


def _sealing(key: Any, file: Path) -> ECDSA:
    """ECDSA with the hash that goes with a key's curve (sigstore's protobuf-specs). Raises
    CheckpointError."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    curve = getattr(getattr(key, "curve", None), "name", type(key).__name__)
    if curve not in _CURVES:
        raise CheckpointError(f"{file}: expected a key of P-256, P-384 or P-521, found {curve}")
    return ECDSA(getattr(hashes, _CURVES[curve])())
