"""core/encodings.py says where each encoding is decoded and made: here that these places exist, and
that none is left out."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

import qconvert.matrices.encodings as decoders
from qconvert.core.encodings import CODES, ENCODINGS, Encoding
from qconvert.core.names import PARAMETERS


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_its_places_exist(encoding: Encoding) -> None:
    assert callable(
        getattr(import_module(f"qconvert.{encoding.decoder}"), "read", None)
        or import_module(f"qconvert.{encoding.decoder}").plain
    )
    if encoding.encoder:
        import_module(f"qconvert.{encoding.encoder}")
    if encoding.config:
        module, _, function = encoding.config.rpartition(".")
        assert callable(getattr(import_module(f"qconvert.{module}"), function))
    assert encoding.equals


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_its_names_are_known(encoding: Encoding) -> None:
    stacked = encoding.parameters[0].startswith("_")
    assert stacked or encoding.parameters[0] in CODES
    assert stacked or set(encoding.parameters) <= PARAMETERS


def test_no_decoder_is_left_out() -> None:
    there = {f"matrices.encodings.{one.name}" for one in pkgutil.iter_modules(decoders.__path__)}
    assert there == {encoding.decoder for encoding in ENCODINGS}


def test_no_encoder_is_left_out() -> None:
    """Every module of formats/ that makes weights for runtimes with GPUs."""
    made = {encoding.encoder for encoding in ENCODINGS if encoding.encoder}
    assert made == {
        "formats.fp8.encode", "formats.fp8.tensor", "formats.int_packed.packers",
        "formats.nvfp4.encode", "formats.mx.encode", "formats.floats.decode",
    }  # fmt: skip
