"""`qconvert sign` and `verify`: each changed byte of a folder or its signature is found, the statement
is what in-toto and DSSE define, and hashes are those of hashlib. model-signing (OpenSSF) verifies what
`sign` signs, and `verify` what it signs: `pytest -m peer tests/test_sign.py`."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bf16_moe, convert, fp8_moe, ran, run_cli
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)
from hub_client import hub_and_client

from qconvert import api
from qconvert.core.errors import CheckpointError, OutputError

HASHES: dict[str, Any] = {"P-256": hashes.SHA256, "P-384": hashes.SHA384, "P-521": hashes.SHA512}
CURVES: dict[str, Any] = {"P-256": ec.SECP256R1, "P-384": ec.SECP384R1, "P-521": ec.SECP521R1}


def keys(room: Path, made: Any = None, password: bytes | None = None) -> tuple[Path, Path]:
    """A private and a public key in PEM."""
    private = made or ec.generate_private_key(ec.SECP256R1())
    locked = BestAvailableEncryption(password) if password else NoEncryption()
    files = room / "key.pem", room / "key.pub"
    files[0].write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    files[1].write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion, not signed yet."""
    room = tmp_path_factory.mktemp("sign")
    fp8_moe().write(room / "source")
    convert("dequant", room / "source", room / "made")
    return room / "made"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


def statement_of(signature: Path) -> dict[str, Any]:
    envelope = json.loads(signature.read_bytes())["dsseEnvelope"]
    found: dict[str, Any] = json.loads(b64decode(envelope["payload"]))
    return found


def resigned(signature: Path, private: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The signature of another statement, by the same key."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    bundle, statement = json.loads(signature.read_bytes()), statement_of(signature)
    change(statement)
    payload = json.dumps(statement).encode()
    kind = bundle["dsseEnvelope"]["payloadType"]
    over = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    key: Any = load_pem_private_key(private.read_bytes(), None)
    bundle["dsseEnvelope"]["payload"] = b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = b64encode(
        key.sign(over, ec.ECDSA(hashes.SHA256()))
    ).decode()
    signature.write_text(json.dumps(bundle))


# --- What is signed --------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", CURVES)
def test_a_signed_folder_is_verified(curve: str, folder: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, ec.generate_private_key(CURVES[curve]()))
    said = ran("sign", folder, "--key", private).out
    files = sorted(file.name for file in folder.iterdir() if file.name != "model.sig")
    assert f"model.sig: signed {len(files)} files of {folder}" in said
    assert (
        f"{len(files)} files match the signature (key "
        in ran("verify", folder, "--key", public).out
    )
    envelope = json.loads((folder / "model.sig").read_bytes())["dsseEnvelope"]
    payload, sig = (
        b64decode(text) for text in (envelope["payload"], envelope["signatures"][0]["sig"])
    )
    key: Any = load_pem_public_key(public.read_bytes())
    over = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    key.verify(sig, over, ec.ECDSA(HASHES[curve]()))  # raises
    statement = statement_of(folder / "model.sig")
    listed = statement["predicate"]["resources"]
    assert [one["name"] for one in listed] == files
    for one in listed:
        assert one["digest"] == sha256((folder / one["name"]).read_bytes()).hexdigest()
    whole = sha256(b"".join(bytes.fromhex(one["digest"]) for one in listed)).hexdigest()
    assert statement["subject"] == [{"name": "made", "digest": {"sha256": whole}}]
    assert statement["predicate"]["conversion"]["passes"][0]["name"] == "dequant"
    manifest = json.loads((folder / "qconvert.json").read_bytes())
    assert statement["predicate"]["conversion"]["identity"] == manifest["identity"]


def test_folders_below_and_their_order(folder: Path, tmp_path: Path) -> None:
    """By the parts of a path: `a/z` before `a-b`. What download clients and git keep is left out."""
    private, public = keys(tmp_path)
    for name in ("a/z", "a-b", ".cache/huggingface/x", ".gitattributes", "b/.gitattributes"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(name)
    signed = api.sign(folder, private)
    names = [one["name"] for one in statement_of(signed.signature)["predicate"]["resources"]]
    assert names[:3] == ["README.md", "a/z", "a-b"]
    assert {"b/.gitattributes"} == {name for name in names if name.rpartition("/")[2][0] == "."}
    assert api.verify(folder, public).is_same


def test_a_signature_elsewhere_and_sglang_s_checksums(folder: Path, tmp_path: Path) -> None:
    """The file that is written into the folder is signed, too, and not in itself."""
    private, public = keys(tmp_path)
    sums = folder / "checksums.json"
    words = ("--key", private, "--signature", tmp_path / "made.sig", "--checksums", sums)
    told = json.loads(ran("sign", folder, *words, "--json").out)
    assert not (folder / "model.sig").exists()
    assert told["files"]["checksums.json"] == sha256(sums.read_bytes()).hexdigest()
    listed = json.loads(sums.read_bytes())["files"]
    assert set(listed) == set(told["files"]) - {"checksums.json", "README.md"}
    for name, about in listed.items():
        data = (folder / name).read_bytes()
        assert about == {"sha256": sha256(data).hexdigest(), "size": len(data)}
    found = api.verify(folder, public, signature=tmp_path / "made.sig")
    assert (found.is_same, found.files) == (True, len(told["files"]))


def test_a_bill_of_materials(folder: Path, tmp_path: Path) -> None:
    """Each signed file with its hash, the class, the source and the steps; twice the same bytes."""
    private, public = keys(tmp_path)
    bills = []
    for name in ("one.cdx.json", "two.cdx.json"):
        words = ("--key", private, "--signature", tmp_path / "made.sig", "--sbom", tmp_path / name)
        told = json.loads(ran("sign", folder, *words, "--json").out)
        bills.append((tmp_path / name).read_bytes())
    assert bills[0] == bills[1]
    bill = json.loads(bills[0])
    listed = {one["name"]: one["hashes"][0]["content"] for one in bill["components"]}
    assert listed == told["files"]
    model = bill["metadata"]["component"]
    manifest = json.loads((folder / "qconvert.json").read_bytes())
    assert model["pedigree"]["ancestors"][0]["version"] == manifest["identity"]["source"]
    steps = [json.loads(one["value"]) for one in model["properties"]]
    assert steps == manifest["passes"]
    inside = folder / "bom.cdx.json"
    api.sign(folder, private, sbom=inside)
    assert "bom.cdx.json" not in {
        one["name"] for one in json.loads(inside.read_bytes())["components"]
    }
    assert api.verify(folder, public).is_same


@pytest.mark.peer
def test_the_bill_is_valid(folder: Path, tmp_path: Path) -> None:
    """By CycloneDX's own library and schema; one without a file's hash is not."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    private, _ = keys(tmp_path)
    file = tmp_path / "bom.cdx.json"
    api.sign(folder, private, signature=tmp_path / "made.sig", sbom=file)
    validator, text = JsonStrictValidator(SchemaVersion.V1_6), file.read_text()
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace("SHA-256", "SHA-257")) is not None


def test_an_encrypted_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, public = keys(tmp_path, password=b"secret")
    done = run_cli("sign", folder, "--key", private)
    assert done.code == 1
    assert "the password is read from QCONVERT_KEY_PASSWORD" in done.err
    monkeypatch.setenv("QCONVERT_KEY_PASSWORD", "secret")
    api.sign(folder, private)
    assert api.verify(folder, public).is_same
    monkeypatch.setenv("QCONVERT_KEY_PASSWORD", "wrong")
    with pytest.raises(CheckpointError, match="expected a private key of an elliptic curve in PEM"):
        api.sign(folder, private)


# --- What goes with a signature --------------------------------------------------------------------


def test_a_signed_folder_is_valid_and_its_signature_is_not_copied(
    made: Path, folder: Path, tmp_path: Path
) -> None:
    """Neither is it taken for a stray file, nor for one of the conversion that is made of it."""
    private, _ = keys(tmp_path)
    api.sign(folder, private, level="full")
    report = api.validate(folder, level="full")
    assert report.findings == []
    api.run("copy", folder, tmp_path / "copied", jobs=1)
    assert not (tmp_path / "copied" / "model.sig").exists()
    done = ran("dequant", made.parent / "source", folder, "--jobs", "1")
    assert "already" in done.out + done.err
    assert (folder / "model.sig").is_file()
    assert api.validate(tmp_path / "copied", folder, level="full").errors == 0


def test_uploaded_signed_and_uploaded_again(folder: Path, tmp_path: Path) -> None:
    """The first upload writes the card, the second changes nothing and sends the signature."""
    private, public = keys(tmp_path)
    with hub_and_client(tmp_path / "hub") as (hub, _):
        assert run_cli("upload", folder, "org/made").code == 0
        api.sign(folder, private)
        assert run_cli("upload", folder, "org/made").code == 0
        there = hub.repos["org/made"].tree()
    assert api.verify(folder, public).is_same
    fetched = tmp_path / "fetched"
    for name, blob in there.items():
        (fetched / name).parent.mkdir(parents=True, exist_ok=True)
        (fetched / name).write_bytes(blob.data)
    assert api.verify(fetched, public).is_same


def test_a_broken_folder_is_not_signed(folder: Path, tmp_path: Path) -> None:
    private, _ = keys(tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(OutputError, match=r"fails validation .*, so it is not signed: QC"):
        api.sign(folder, private)
    assert not (folder / "model.sig").exists()


def test_links_and_unfinished_conversions_are_not_signed(folder: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    signed = api.sign(folder, private)
    real = folder / "config.json"
    real.rename(folder / "other.json")
    real.symlink_to("other.json")
    done = run_cli("sign", folder, "--key", private)
    assert (done.code, "is a link" in done.err) == (1, True), done.err
    found = api.verify(folder, public)  # its bytes are those that were signed
    assert (found.changed, found.extra) == ((), ("other.json",))
    (folder / ".qconvert").mkdir()
    for words in (("sign", private), ("verify", public)):
        done = run_cli(words[0], folder, "--key", words[1])
        assert (done.code, "unfinished" in done.err) == (1, True), done.err
    assert signed.signature.is_file()


# --- What is found ---------------------------------------------------------------------------------


def test_each_changed_file_is_named(folder: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    api.sign(folder, private)
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (folder / "config.json").unlink()
    (folder / "modeling_evil.py").write_text("import os\n")
    done = run_cli("verify", folder, "--key", public)
    assert done.code == 3
    assert done.out.splitlines()[:3] == [
        f"{shard.name}: was changed", "config.json: is missing", "modeling_evil.py: was not signed",
    ]  # fmt: skip
    told = json.loads(run_cli("verify", folder, "--key", public, "--json").out)
    assert (told["same"], told["changed"], told["missing"]) == (
        False,
        [shard.name],
        ["config.json"],
    )


def test_no_changed_bit_of_a_signature_is_accepted(folder: Path, tmp_path: Path) -> None:
    """Of any byte, in turn: what is accepted has the same statement, as a bit in a text's spelling."""
    private, public = keys(tmp_path)
    signature = api.sign(folder, private).signature
    whole, stated = signature.read_bytes(), statement_of(signature)
    accepted = 0
    for at in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 7
        signature.write_bytes(changed)
        try:
            found = api.verify(folder, public)
        except CheckpointError:
            continue
        accepted += 1
        assert found.is_same
        assert statement_of(signature) == stated
    assert accepted <= len(whole) // 7 // 20


def test_another_key_is_no_signer(folder: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    signature = api.sign(folder, private).signature
    (tmp_path / "other").mkdir()
    _, other = keys(tmp_path / "other")
    done = run_cli("verify", folder, "--key", other)
    assert (done.code, "name the signer's public key" in done.err) == (1, True), done.err
    bundle = json.loads(signature.read_bytes())
    bundle["verificationMaterial"]["publicKey"] = {}  # as the first versions wrote it
    signature.write_text(json.dumps(bundle))
    with pytest.raises(CheckpointError, match="is no signature of this key"):
        api.verify(folder, other)
    assert api.verify(folder, public).is_same


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["predicate"]["resources"].pop(), "is not the hash of its files"),
        (lambda s: s["predicate"]["resources"][0].update(name="../x"), "names '../x'"),
        (lambda s: s["predicate"]["resources"][0].update(algorithm="blake3"), "blake3"),
        (lambda s: s["predicate"]["serialization"].update(method="shards"), "shards"),
        (lambda s: s["predicate"]["serialization"].update(ignore_paths=3), "ignore_paths"),
        (lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"), "another kind"),
        (lambda s: s.update(subject=[]), "found another form"),
        (lambda s: s["predicate"]["resources"][0].update(digest="zz"), "found another form"),
    ],
)
def test_a_signed_statement_of_another_form_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, folder: Path, tmp_path: Path
) -> None:
    """By the same key: a signer may err, too."""
    private, public = keys(tmp_path)
    signature = api.sign(folder, private).signature
    resigned(signature, private, change)
    with pytest.raises(CheckpointError, match=said):
        api.verify(folder, public)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mediaType": 1}', '{"dsseEnvelope": []}'])
def test_what_is_no_bundle_is_refused(text: str, folder: Path, tmp_path: Path) -> None:
    _, public = keys(tmp_path)
    (folder / "model.sig").write_text(text)
    done = run_cli("verify", folder, "--key", public)
    assert (done.code, "model.sig" in done.err) == (1, True)
    (folder / "model.sig").unlink()
    done = run_cli("verify", folder, "--key", public)
    assert (done.code, "is missing; name it by --signature FILE" in done.err) == (1, True)


def test_keys_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path, ed25519.Ed25519PrivateKey.generate())
    for name, key in (("sign", private), ("verify", public)):
        done = run_cli(name, folder, "--key", key)
        assert (done.code, "expected a key of P-256, P-384 or P-521" in done.err) == (1, True)
    for name in ("sign", "verify"):
        done = run_cli(name, folder, "--key", tmp_path / "none.pem")
        assert (done.code, "no such file; name a key in PEM" in done.err) == (1, True)
        done = run_cli(name, folder, "--key", folder / "config.json")
        assert (done.code, "key" in done.err) == (1, True)


def test_a_folder_that_qconvert_did_not_make(tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    bf16_moe().write(tmp_path / "source")
    signed = api.sign(tmp_path / "source", private)
    assert list(statement_of(signed.signature)["predicate"]["conversion"]) == ["signed_by"]
    assert api.verify(tmp_path / "source", public).is_same


# --- model-signing ---------------------------------------------------------------------------------


def their_verdict(folder: Path, public: Path, signature: Path) -> str:
    """ "" where model-signing accepts a folder, else what it says."""
    verifying = pytest.importorskip("model_signing").verifying
    config = verifying.Config().use_elliptic_key_verifier(public_key=public)
    try:
        config.verify(folder, signature)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.peer
@pytest.mark.parametrize("curve", CURVES)
def test_model_signing_accepts_what_is_signed(curve: str, folder: Path, tmp_path: Path) -> None:
    """And finds each change that `verify` finds, by the same names."""
    private, public = keys(tmp_path, ec.generate_private_key(CURVES[curve]()))
    for name in ("a/z", "a-b", ".cache/huggingface/x", ".gitattributes"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(name)
    signature = api.sign(folder, private).signature
    assert their_verdict(folder, public, signature) == ""
    (folder / "a-b").write_text("changed")
    assert "a-b" in their_verdict(folder, public, signature)
    assert api.verify(folder, public).changed == ("a-b",)
    (folder / "a-b").unlink()
    (folder / "new.py").write_text("import os")
    assert all(name in their_verdict(folder, public, signature) for name in ("a-b", "new.py"))
    found = api.verify(folder, public)
    assert (found.missing, found.extra) == (("a-b",), ("new.py",))


@pytest.mark.peer
@pytest.mark.parametrize("inside", [True, False])
def test_what_model_signing_signs_is_verified(inside: bool, folder: Path, tmp_path: Path) -> None:
    signing = pytest.importorskip("model_signing").signing
    hashing = pytest.importorskip("model_signing").hashing
    private, public = keys(tmp_path)
    signature = folder / "model.sig" if inside else tmp_path / "other.sig"
    left = hashing.Config().set_ignored_paths(paths=[signature], ignore_git_paths=True)
    config = signing.Config().use_elliptic_key_signer(private_key=private)
    config.set_hashing_config(left).sign(folder, signature)
    theirs = statement_of(signature)
    found = api.verify(folder, public, signature=signature)
    assert (found.is_same, found.conversion) == (True, {})
    # The same files in the same order, so the same name of the whole.
    ours = statement_of(api.sign(folder, private, signature=signature).signature)
    assert ours["subject"] == theirs["subject"]
    assert ours["predicate"]["resources"] == theirs["predicate"]["resources"]
