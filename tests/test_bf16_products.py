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


def test_a_measurement_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the shortest run of each way."""
    choice.bf16_is_slow.cache_clear()
    for first, slower in ((2.0, True), (0.5, False)):
        took = iter([9.0, first, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0])
        with monkeypatch.context() as patched:
            patched.setattr(choice, "_seconds", lambda way, took=took: next(took))
            assert choice.bf16_is_slow() is slower
        choice.bf16_is_slow.cache_clear()


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
