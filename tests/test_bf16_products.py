"""Products of BF16 on CPUs without units for them: in float32, rounded once, in all of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import calibrate_models as models
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from qconvert import api
from qconvert.calibrate import kernel_choice as choice
from qconvert.calibrate.settings import Settings
from qconvert.core.int_scheme import IntScheme

Rows = torch.Tensor


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies BF16 slower than float32."""
    monkeypatch.setattr(choice, "bf16_is_slow", lambda: True)


def rows(*shape: int) -> Rows:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


class NoneOfBf16(TorchDispatchMode):
    """Raises for a product of BF16 matrices, however a class spells it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        name = function.overloadpacket.__name__
        if "mm" in name or "scaled_dot_product" in name or name == "linear":
            self.products += 1
            kinds = {one.dtype for one in args if isinstance(one, torch.Tensor)}
            assert torch.bfloat16 not in kinds, f"{name} of {kinds}"
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("slow")
def test_products_are_those_of_float32_rounded_once() -> None:
    a, b = rows(7, 64), rows(9, 64)
    wanted = (a.float() @ b.float().T).bfloat16()
    into = torch.empty(7, 9, dtype=torch.bfloat16)
    assert choice.linear(a, b, into).equal(wanted)
    assert into.equal(wanted)
    functional: Any = torch.nn.functional
    ways: Sequence[Callable[[], Rows]] = (
        lambda: choice.linear(a, b),
        lambda: functional.linear(a, b),
        lambda: a @ b.T,
        lambda: torch.matmul(a, b.T),
        lambda: torch.einsum("tk,nk->tn", a, b),
        lambda: torch.bmm(a[None], b.T[None])[0],
    )
    for way in ways:
        with choice.forward_of(a), NoneOfBf16() as seen:
            found = way()
        assert seen.products == 1
        assert found.equal(wanted)
    q, k, v = (rows(1, 2, size, 16) for size in (5, 6, 6))
    attended = functional.scaled_dot_product_attention
    with choice.forward_of(q):
        found = attended(q, k, v)
        assert functional.linear(a.float(), b.float()).dtype is torch.float32
    assert found.equal(attended(q.float(), k.float(), v.float()).bfloat16())
    assert not torch.is_grad_enabled() or found.requires_grad is False


INTEL = "processor : 0\nvendor_id : GenuineIntel\nflags : fpu avx512_bf16{more}\n\nprocessor : 1\n"
AMD = (
    "processor : 0\nvendor_id : AuthenticAMD\nflags : fpu{more}\n\nprocessor : 1\nflags : amx_bf16"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd{more}\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(
    ("said", "more", "fast"),
    [
        (INTEL, "", False), (INTEL, " amx_bf16 amx_tile", True),
        (AMD, "", False), (AMD, " avx512_bf16", True),
        (ARM, "", False), (ARM, " bf16 i8mm", True),
        ("", "", False),
    ],
)  # fmt: skip
def test_what_a_cpu_has_decides(said: str, more: str, fast: bool) -> None:
    assert choice.multiplies_bf16(said.format(more=more)) is fast


@pytest.mark.parametrize(
    ("isa", "slow"),
    [
        ("", False),
        ("all", False),
        ("AVX512_CORE_AMX", False),
        ("AVX512_CORE", True),
        ("AVX2", True),
    ],
)
def test_torch_may_be_held_to_less(isa: str, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    monkeypatch.setattr(choice, "multiplies_bf16", lambda said: True)
    decides: Any = choice.bf16_is_slow
    assert decides.__wrapped__() is slow


MAKES = (models.qwen3_moe, models.qwen3_next, models.deepseek_v3, models.llama)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("make", MAKES)
def test_no_layer_multiplies_bf16(make: models.Make, tmp_path: Path) -> None:
    """An evaluation of a model beside itself: the same hidden states, and none by a product of BF16."""
    folder = models.saved(make(), tmp_path / "model")
    file = tmp_path / "ids.jsonl"
    file.write_text(f'{{"input_ids": {models.samples(1, 24)[0].tolist()}}}\n')
    with NoneOfBf16() as seen:
        found = api.evaluate(folder, folder, file, devices=["cpu"])
    assert seen.products > 20
    assert found.logits is not None
    assert found.logits.kl == 0


def test_codes_lose_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other codes, as on another CPU: their error is that of the others, matrix by matrix."""
    folder = models.saved(models.qwen3_moe(num_hidden_layers=1), tmp_path / "model")
    scheme, tokens = IntScheme(4, 32), models.samples(4, 64)
    made = []
    for number, slow in enumerate((False, True)):
        monkeypatch.setattr(choice, "bf16_is_slow", lambda slow=slow: slow)
        room = tmp_path / str(number)
        settings = Settings(min_tokens=1, solver="best")
        made.append(models.calibrated(folder, room, tokens, [scheme], settings).made)
    source = load_file(folder / "model.safetensors")
    assert made[0].keys() == made[1].keys()
    for layer, expert, kind in made[0]:
        name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"
        weight = source[name].float()
        lost = [
            float((models.meant(one[layer, expert, kind][0], scheme).float() - weight).norm())
            for one in made
        ]
        assert lost[1] == pytest.approx(lost[0], rel=0.05)
