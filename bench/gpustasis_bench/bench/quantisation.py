"""NF4: four bits a number, 64 numbers to a scale, as QLoRA quantises its frozen base.

Source: Dettmers et al., "QLoRA", appendix E (the 16 values) and section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """codes: two numbers a byte, the first in the upper half. scales: fp32, one for each block."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]


def quantise(matrix: Tensor) -> Quantised:
    """The nearest of the 16 values for each number of a bf16 matrix, over its block's greatest and
    rounded to bf16. The count of numbers must be a multiple of BLOCK."""
    blocks = matrix.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp_(min=1e-12)
    # A bf16 has 16 bits: all of them are looked up in a table, which is fast.
    bits = (blocks / scales).view(torch.int16).int().bitwise_and_(0xFFFF)
    codes = _code_of_bits().index_select(0, bits.view(-1)).view(-1, 2)
    rows, columns = matrix.shape
    return Quantised(
        codes=codes[:, 0] << 4 | codes[:, 1],
        scales=scales.reshape(-1).float(),
        shape=(rows, columns),
    )


def dequantise(quantised: Quantised) -> Tensor:
    """The bf16 matrix that the codes stand for."""
    # All 256 bytes as pairs of bf16 in one word: a look-up gives two numbers.
    values = torch.tensor(_VALUES).to(torch.bfloat16)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
    words = pairs.view(torch.int32).reshape(-1)
    numbers = words.index_select(0, quantised.codes.int()).view(torch.bfloat16)
    scales = quantised.scales[:, None].to(torch.bfloat16)
    return (numbers.reshape(-1, BLOCK) * scales).reshape(quantised.shape)


def _code_of_bits() -> Tensor:
    """For each of the 65536 bf16 numbers, by its bits, the nearest value's code."""
    values = torch.tensor(_VALUES)
    borders = (values[1:] + values[:-1]) / 2
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).float().nan_to_num()
    return torch.bucketize(numbers, borders).to(torch.uint8)
