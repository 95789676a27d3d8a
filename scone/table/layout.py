"""How rows lie in a shard: element type, stride, sampled rows, and bfloat16 bits in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from scone.errors import ConfigError

TableDtype = Literal["bf16", "fp32"]

MAX_SAMPLES_PER_SHARD = 64
_PAGE_BYTES = 4096
_ELEMENTS: dict[str, np.dtype] = {"bf16": np.dtype("<u2"), "fp32": np.dtype("<f4")}


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Width and element type of a table's rows, and what follows from them.

    Raises:
        ConfigError: The width is not positive, or the type is not one that a table can hold.
    """

    width: int
    dtype: TableDtype = "bf16"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"a table needs rows of width 1 or more, got {self.width}")
        if self.dtype not in _ELEMENTS:
            raise ConfigError(f"a table holds {' or '.join(get_args(TableDtype))} rows, got {self.dtype!r}")

    @property
    def element(self) -> np.dtype:
        """What one element is in numpy: the bits of a bfloat16 as uint16, or float32."""
        return _ELEMENTS[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.width * self.element.itemsize

    @property
    def stride_bytes(self) -> int:
        return stride_of(self.row_bytes)

    @property
    def stride_elements(self) -> int:
        return self.stride_bytes // self.element.itemsize

    def encode(self, rows: NDArray[np.float32]) -> NDArray:
        """Rows [n, width] as they are stored: [n, stride_elements] of `element`, padded with zeros."""
        stored = np.zeros((len(rows), self.stride_elements), self.element)
        stored[:, : self.width] = float32_to_bfloat16(rows) if self.dtype == "bf16" else rows
        return stored

    def decode(self, stored: NDArray) -> NDArray[np.float32]:
        """Stored rows [n, stride_elements] or looked-up rows [n, width] as float32 [n, width]."""
        elements = stored[:, : self.width]
        return bfloat16_to_float32(elements) if self.dtype == "bf16" else elements.astype(np.float32)


def stride_of(row_bytes: int) -> int:
    """Distance between rows: the next power of two up to a page of 4,096 bytes, whole pages beyond.

    A row then never straddles more pages than it has to: one read from disk per row of up to 4,096 bytes.
    """
    if row_bytes > _PAGE_BYTES:
        return -(-row_bytes // _PAGE_BYTES) * _PAGE_BYTES
    return 1 << (row_bytes - 1).bit_length()


def sample_rows(num_rows: int) -> NDArray[np.int64]:
    """Which rows of a shard are sampled: up to 64, evenly spaced, the first and the last among them."""
    count = min(num_rows, MAX_SAMPLES_PER_SHARD)
    return np.arange(count, dtype=np.int64) * (num_rows - 1) // max(count - 1, 1)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even, as hardware and torch round; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
