"""Raw bytes seen as torch tensors, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from qconvert.spec import Shape


def typed(data: memoryview, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """A writable tensor over `data`, which must hold exactly that many bytes, suitably aligned."""
    import torch

    return torch.frombuffer(data, dtype=dtype).view(shape)
