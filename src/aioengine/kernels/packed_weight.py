"""A matrix of weights in the layout that a device's products read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8", "int4"]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What `Operations.pack` makes, and only the operations of the same implementation can read.

    Attributes:
        values: in any shape and dtype.
        scales: of quantised values, in any shape; None: the values are not quantised.
        shape: of the dense matrix, (out_features, in_features).
        dtype: of what it is multiplied with and of its embeddings; of the dense matrix, if it is not quantised.
        layout: what ``values`` and ``scales`` look like; "rows": ``values`` is the dense matrix itself.
    """

    values: Tensor
    scales: Tensor | None
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)
