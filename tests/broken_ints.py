"""Broken repos of packed integers: see tests/broken_repos.py. Each is what the real command made, or a
copy of that with a part of another conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gdn_models
import numpy as np
from broken_contents import unhashed
from broken_repos import (
    Bench,
    Repo,
    broken,
    change,
    edit_config,
    edit_manifest,
    overwrite,
    sound,
)
from checkpoints import Tensor, read_tensors, run_cli

from qconvert.samples.request import Calibration, fact

UP = "model.layers.1.mlp.experts.1.up_proj"


# --- Sound repos, by the real commands -----------------------------------------------------------


def rounded(*options: str) -> Callable[[Bench, Path], None]:
    def make(bench: Bench, out: Path) -> None:
        made = run_cli("w4a16", bench.sound("experts"), out, "--rtn", *options, "--jobs", "1")
        assert made.code == 0, made.err

    return make


@sound("experts")
def _int4_64(bench: Bench, out: Path) -> None:
    rounded("--group-size", "64", "--tp", "4")(bench, out)


@sound("experts")
def _int4_row(bench: Bench, out: Path) -> None:
    rounded("--group-size", "channel")(bench, out)


@sound("experts")
def _int4_asymmetric(bench: Bench, out: Path) -> None:
    rounded("--group-size", "32", "--asymmetric")(bench, out)


@sound("experts")
def _int8(bench: Bench, out: Path) -> None:
    rounded("--bits", "8")(bench, out)


@sound("experts")
def _int8_asymmetric_row(bench: Bench, out: Path) -> None:
    rounded("--bits", "8", "--asymmetric", "--group-size", "channel")(bench, out)


@sound("experts")
def _gptq(bench: Bench, out: Path) -> None:
    rounded("--group-size", "32", "--packing", "gptq")(bench, out)


@sound("experts")
def _gptq_int8(bench: Bench, out: Path) -> None:
    rounded("--bits", "8", "--group-size", "channel", "--packing", "gptq")(bench, out)


@sound("experts")
def _gptq_v2(bench: Bench, out: Path) -> None:
    rounded("--group-size", "32", "--packing", "gptq-v2", "--asymmetric")(bench, out)


@sound("experts")
def _gptq_v2_symmetric(bench: Bench, out: Path) -> None:
    rounded("--packing", "gptq-v2")(bench, out)


@sound("gptq")
def _gptq_copied(bench: Bench, out: Path) -> None:
    made = run_cli("run", "copy", bench.sound("gptq"), out, "--jobs", "1")
    assert made.code == 0, made.err


# --- Zero points ---------------------------------------------------------------------------------


def state(folder: Path, **more: Any) -> Repo:
    """Say something else in the quantization block."""
    return Repo(edit_config(folder, lambda config: config["quantization_config"].update(more)))


def state_weights(folder: Path, **more: Any) -> Repo:
    """Say something else of compressed-tensors' weights."""

    def edit(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(more)

    return Repo(edit_config(folder, edit))


@broken("QC087", level="sample")
def _first_version_called_the_second(bench: Bench) -> Repo:
    """Kernels that read zero points take 7 for the middle, those that do not are right."""
    return state(unhashed(bench.copy("gptq")), checkpoint_format="gptq_v2")


@broken("QC087", level="sample")
def _second_version_called_the_first(bench: Bench) -> Repo:
    return state(unhashed(bench.copy("gptq_v2_symmetric")), checkpoint_format="gptq")


@broken("QC087", level="sample")
def _no_version_said_of_the_second(bench: Bench) -> Repo:
    """Who does not know checkpoint_format means the first."""

    def forget(config: dict[str, Any]) -> None:
        del config["quantization_config"]["checkpoint_format"]

    return Repo(edit_config(unhashed(bench.copy("gptq_v2_symmetric")), forget))


@broken("QC087", level="sample")
def _asymmetric_called_symmetric(bench: Bench) -> Repo:
    return state(unhashed(bench.copy("gptq_v2")), sym=True)


@broken("QC087", level="sample")
def _a_zero_point_of_0_in_the_first_version(bench: Bench) -> Repo:
    """Stored as 15."""
    folder = unhashed(state(bench.copy("gptq_v2"), checkpoint_format="gptq").folder)
    name = f"{UP}.qzeros"
    words = np.frombuffer(read_tensors(folder)[name].data, "<u4")
    return Repo(overwrite(folder, name, (words | 0xF0).tobytes()))


@broken("QC060", level="full")
def _zero_points_of_other_rows(bench: Bench) -> Repo:
    folder, name = unhashed(bench.copy("int4_asymmetric")), f"{UP}.weight_zero_point"
    words = np.frombuffer(read_tensors(folder)[name].data, "<u4").reshape(-1, 4)
    return Repo(overwrite(folder, name, np.roll(words, 1, 0).tobytes()), bench.sound("experts"))


@broken("QC060", level="full", beside=["QC087"])
def _zero_points_stored_less_one_twice(bench: Bench) -> Repo:
    folder, name = unhashed(bench.copy("gptq")), f"{UP}.qzeros"
    words = np.frombuffer(read_tensors(folder)[name].data, "<u4")
    return Repo(overwrite(folder, name, (words - 0x11111111).tobytes()), bench.sound("experts"))


@broken("QC060", level="full")
def _codes_of_the_next_group(bench: Bench) -> Repo:
    """Scales stay where they are."""
    folder, name = unhashed(bench.copy("gptq")), f"{UP}.qweight"
    words = np.frombuffer(read_tensors(folder)[name].data, "<u4").reshape(16, -1)
    return Repo(overwrite(folder, name, np.roll(words, 4, 0).tobytes()), bench.sound("experts"))


# --- Parts ---------------------------------------------------------------------------------------


@broken("QC088")
def _zero_points_nobody_states(bench: Bench) -> Repo:
    return state_weights(bench.copy("int4_asymmetric"), symmetric=True)


@broken("QC088")
def _zero_points_left_out(bench: Bench) -> Repo:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_zero_point")]:
            del tensors[name]

    return Repo(change(bench.copy("int4_asymmetric"), drop))


@broken("QC088")
def _an_order_stated_that_is_not_there(bench: Bench) -> Repo:
    return state_weights(bench.copy("int4_64"), actorder="group")


@broken("QC088")
def _no_scales_beside_a_qweight(bench: Bench) -> Repo:
    return Repo(change(bench.copy("gptq"), lambda tensors: tensors.pop(f"{UP}.scales")))


@broken("QC089")
def _another_group_size_than_the_scales(bench: Bench) -> Repo:
    return state(bench.copy("gptq"), group_size=64)


@broken("QC089")
def _eight_bits_said_of_four(bench: Bench) -> Repo:
    return state(bench.copy("gptq"), bits=8)


@broken("QC089")
def _a_group_size_of_none(bench: Bench) -> Repo:
    return state(bench.copy("gptq"), group_size=0)


@broken("QC089")
def _zero_points_not_packed(bench: Bench) -> Repo:
    def unpack(tensors: dict[str, Tensor]) -> None:
        name = f"{UP}.weight_zero_point"
        tensors[name] = Tensor("I8", (256, 4), bytes(1024))

    return Repo(change(bench.copy("int4_asymmetric"), unpack))


# --- Groups of columns ---------------------------------------------------------------------------


def index(*groups: int) -> bytes:
    return np.repeat(np.array(groups, "<i4"), 32).tobytes()


@broken("QC090", level="sample")
def _columns_in_an_order_nobody_states(bench: Bench) -> Repo:
    return Repo(overwrite(unhashed(bench.copy("gptq")), f"{UP}.g_idx", index(1, 0, 2, 3)))


@broken("QC090", level="sample")
def _groups_counted_from_one(bench: Bench) -> Repo:
    folder = state(unhashed(bench.copy("gptq")), desc_act=True).folder
    return Repo(overwrite(folder, f"{UP}.g_idx", index(1, 2, 3, 4)))


@broken("QC090", level="sample")
def _groups_of_unequal_sizes(bench: Bench) -> Repo:
    folder = state(unhashed(bench.copy("gptq")), desc_act=True).folder
    return Repo(overwrite(folder, f"{UP}.g_idx", index(0, 0, 2, 3)))


# --- Experts, and what the manifest says ---------------------------------------------------------


@broken("QC091")
def _one_expert_left_as_it_was(bench: Bench) -> Repo:
    """And listed so, which no kernel for experts looks at."""

    def restore(tensors: dict[str, Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = gdn_models.bf16(gdn_models.numbers(UP, 256, 128))

    folder = change(bench.copy("int4_64"), restore)
    return Repo(
        edit_config(folder, lambda config: config["quantization_config"]["ignore"].append(UP))
    )


@broken("QC092")
def _more_ranks_than_groups(bench: Bench) -> Repo:
    """256 columns of down in groups of 64, and eight ranks."""

    def edit(manifest: dict[str, Any]) -> None:
        manifest["passes"][0]["options"]["tp"] = 8

    return Repo(edit_manifest(bench.copy("int4_64"), edit))


def calibrated_by(folder: Path, said: Any) -> Repo:
    return Repo(edit_manifest(folder, lambda manifest: manifest.update(calibration=said)))


@broken("QC093", severity="warning")
def _calibrated_on_made_up_tokens(bench: Bench) -> Repo:
    said = fact(Calibration(synthetic=True), "0" * 32)
    return calibrated_by(bench.copy("int4_64"), said)


@broken("QC094")
def _a_calibration_without_data(bench: Bench) -> Repo:
    said = fact(Calibration(data="x.txt"), "0" * 32)
    return calibrated_by(bench.copy("int4_64"), said | {"data": "chats.jsonl"})


@broken("QC094")
def _codes_calibrated_with_nothing(bench: Bench) -> Repo:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["amx"]["rounding"] = "gptq"

    return Repo(edit_manifest(bench.copy("cpu"), edit))


@broken("QC094")
def _codes_calibrated_and_rounded(bench: Bench) -> Repo:
    return calibrated_by(bench.copy("cpu"), fact(Calibration(data="x.txt"), "0" * 32))
