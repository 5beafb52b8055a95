"""Registry of formats: what each states is complete, and known without numpy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.names import parameters
from qconvert.formats.base import Format
from qconvert.formats.registry import formats

every = pytest.mark.parametrize("form", formats().values(), ids=lambda form: form.name)


@every
def test_its_names_are_known(form: Format) -> None:
    assert form.read is None or set(form.parameters) <= parameters()
    assert set(form.codes) <= DTYPE_BITS.keys()
    assert form.equals
    assert form.title


def test_what_has_an_encoder_states_its_config() -> None:
    made = {form.name: form for form in formats().values() if form.encode is not None}
    assert {"mxfp4", "mxfp8"} <= set(made)
    for form in made.values():
        assert form.encode is not None
        assert form.config_group is not None
        assert form.config_group(["Linear"])["targets"] == ["Linear"]
        assert form.encode().loss(*_matrix()) is not None
        assert len(form.encode().infer(*_matrix())) == len(form.parameters)


def _matrix() -> tuple[TensorType]:
    return (TensorType("BF16", (256, 256)),)


def test_those_without_a_global_scale_are_asked_last() -> None:
    order = {form.name: at for at, form in enumerate(formats().values())}
    assert order["fp8-block"] < order["nvfp4"] < order["int-packed"] < order["mxfp4"]
    assert order["awq"] < order["gptq"]


def test_they_are_listed_without_numpy() -> None:
    code = (
        "import sys; from qconvert import api; assert api.formats()['mxfp4'].parameters; "
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
