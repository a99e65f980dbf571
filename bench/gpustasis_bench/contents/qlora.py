# SPDX-License-Identifier: Apache-2.0
"""QLoRA: a frozen 4-bit base, fp16 adapters in its last layers, their AdamW state.

The layers below the adapters never change, so each is made, quantised and computed through once,
for all sequences that are trained on; the training itself runs through the last layers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpustasis_bench.contents.layout import ContentWriter
from gpustasis_bench.contents.network import (
    MATRICES,
    AdamW,
    Shape,
    Weights,
    batches,
    embed,
    initial_layer,
    initial_outer,
    linear,
    loss_of,
    read_corpus,
    run_layer,
    saved_tensors,
    tensor_bytes,
    tokens_of,
    width_for,
)

STEPS_BETWEEN = 10  # steps of training from one checkpoint to the next
_STATES = 11  # a full checkpoint and a chain of ten
_BASE = 0.90  # share of the memory
_ADAPTERS = 0.03  # share of adapters, gradients and moments; the rest is activations
_ADAPTED_LAYERS = 2
_LAYERS_AIM = 64
_BASE_BYTES = 0.5 + 4 / 64  # of a number: code and scale
_ADAPTER_BYTES = 2 + 2 + 4 + 4
_SEQUENCES, _LENGTH = 12, 128  # trained on over and over, as small data sets are
_RATE = 1e-3


# NF4: four bits a number, BLOCK numbers to a scale. Source: Dettmers et al., "QLoRA", appendix E
# (the 16 values) and section 3.
BLOCK = 64
_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(slots=True)
class _Tuning:
    """The trained end of the network. inputs: the residual stream below it, for each sequence."""

    shape: Shape
    outer: Weights
    base: Weights
    adapters: dict[str, Tensor]
    inputs: Tensor
    targets: Tensor
    scale: float

    @property
    def frozen(self) -> list[Tensor]:
        return [*self.outer.values(), *self.base.values(), self.inputs]

    def loss(self, sequences: slice) -> Tensor:
        x = self.inputs[sequences]
        for layer in range(self.shape.layers - _ADAPTED_LAYERS, self.shape.layers):
            x = run_layer(self.base, layer, x, self._linear)
        return loss_of(self.outer, x, self.targets[sequences])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        down = self.adapters[f"{name}.a"].to(torch.bfloat16)
        up = self.adapters[f"{name}.b"].to(torch.bfloat16)
        whole = linear(x, self.base[name])
        return whole + linear(linear(x, down), up) * self.scale


def fill_qlora(writer: ContentWriter, size: int, seed: int) -> None:
    """State 0 is before the first step, each later one STEPS_BETWEEN steps on."""
    width = width_for(size * _BASE / _BASE_BYTES, _LAYERS_AIM)
    layer_bytes = 12 * width * width * _BASE_BYTES
    layers = max(_ADAPTED_LAYERS + 1, int(size * _BASE / layer_bytes))
    shape = Shape(width=width, layers=layers, context=_LENGTH)
    generator = torch.Generator().manual_seed(seed)
    tuning = _make_base(writer, shape, size, generator)
    adam = AdamW(tuning.adapters, _RATE)
    # Before the first step there are gradients of an earlier, discarded one: a warm-up.
    tuning.loss(slice(0, 1)).backward()
    state = _state(tuning, adam)
    for name, (part, tensor) in state.items():
        writer.add(name, part, tensor_bytes(tensor))
    places = _fill_with_activations(writer, tuning, size)
    losses = []
    for number in range(1, _STATES):
        for step in range(STEPS_BETWEEN):
            at = ((number - 1) * STEPS_BETWEEN + step) % _SEQUENCES
            adam.clear()
            loss = tuning.loss(slice(at, at + 1))
            loss.backward()
            adam.step()
            losses.append(float(loss.detach()))
        writer.next_state()
        for name, (_, tensor) in _state(tuning, adam).items():
            writer.change(name, tensor_bytes(tensor))
        # As much as was there at first, of another batch.
        shown = 0
        for tensor in _activations(tuning, number, len(places)):
            if shown < len(places) and tensor.nbytes == places[shown]:
                writer.change(f"activation {shown}", tensor_bytes(tensor))
                shown += 1
        if shown != len(places):
            raise AssertionError(f"{shown} activations of {len(places)} in state {number}")
    writer.facts |= {
        "torch": torch.__version__,
        "base_weights": shape.layer_weights * layers,
        "adapter_weights": sum(tensor.numel() for tensor in tuning.adapters.values()),
        "width": width,
        "layers": layers,
        "adapted_layers": _ADAPTED_LAYERS,
        "rank": next(iter(tuning.adapters.values())).shape[0],
        "steps": STEPS_BETWEEN * (_STATES - 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


def _make_base(
    writer: ContentWriter, shape: Shape, size: int, generator: torch.Generator
) -> _Tuning:
    """Make, quantise and write layer after layer; keep only what training needs."""
    outer = initial_outer(shape, generator)
    for name, tensor in outer.items():
        writer.add(f"base {name}", "bf16 embeddings and norms", tensor_bytes(tensor))
    batch = next(batches(read_corpus(), _SEQUENCES, _LENGTH))
    inputs, targets = tokens_of(batch)
    tuning = _Tuning(shape, outer, {}, {}, embed(outer, inputs), targets, 1.0)
    for layer in range(shape.layers):
        made = initial_layer(shape, layer, generator)
        for name in MATRICES:
            quantised = quantise(made[f"{layer}.{name}"])
            _write_quantised(writer, f"base {layer}.{name}", quantised)
            made[f"{layer}.{name}"] = dequantise(quantised)
        for name in ("norm1", "norm2"):
            writer.add(
                f"base {layer}.{name}",
                "bf16 embeddings and norms",
                tensor_bytes(made[f"{layer}.{name}"]),
            )
        if layer >= shape.layers - _ADAPTED_LAYERS:
            tuning.base |= made
            continue
        with torch.no_grad():
            tuning.inputs = run_layer(made, layer, tuning.inputs, _Apply(made))
    rank_share = size * _ADAPTERS / (_ADAPTER_BYTES * _ADAPTED_LAYERS * 18 * shape.width)
    rank = max(4, int(rank_share) // 4 * 4)
    tuning.scale = 2.0 / rank
    _make_adapters(tuning, rank, generator)
    return tuning


@dataclass(frozen=True, slots=True)
class _Apply:
    """A layer's matrices, as they are."""

    weights: Weights

    def __call__(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[name])


def _write_quantised(writer: ContentWriter, name: str, quantised: Quantised) -> None:
    writer.add(f"{name} codes", "4-bit base", tensor_bytes(quantised.codes))
    writer.add(f"{name} scales", "4-bit base", tensor_bytes(quantised.scales))


def _make_adapters(tuning: _Tuning, rank: int, generator: torch.Generator) -> None:
    """A normal, B zero, as LoRA begins."""
    for name, matrix in tuning.base.items():
        if matrix.dim() != 2:
            continue
        rows, columns = matrix.shape
        a = torch.empty(rank, columns).normal_(0, 1 / rank, generator=generator)
        tuning.adapters[f"{name}.a"] = a.requires_grad_(True)
        tuning.adapters[f"{name}.b"] = torch.zeros(rows, rank).requires_grad_(True)


def _state(tuning: _Tuning, adam: AdamW) -> dict[str, tuple[str, Tensor]]:
    """What a step changes, but for activations: name -> what it is, its value."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in tuning.adapters.items():
        found[f"adapter {name}"] = ("fp16 adapters", tensor.detach().to(torch.float16))
        found[f"adapter gradient {name}"] = ("fp16 gradients", tensor.grad.to(torch.float16))
        found[f"adapter first {name}"] = ("fp32 moments", adam.first[name])
        found[f"adapter second {name}"] = ("fp32 moments", adam.second[name])
    return found


def _fill_with_activations(writer: ContentWriter, tuning: _Tuning, size: int) -> list[int]:
    """Until the memory is full, or the data set at its end: their sizes."""
    sizes: list[int] = []
    for tensor in _activations(tuning, 0, 1 << 30):
        if writer.reserved >= size:
            break
        writer.add(f"activation {len(sizes)}", "activations", tensor_bytes(tensor))
        sizes.append(tensor.nbytes)
    return sizes


def _activations(tuning: _Tuning, state: int, wanted: int) -> list[Tensor]:
    """At most so many, sequence after sequence, each state's beginning with another one."""
    found: list[Tensor] = []
    for index in range(_SEQUENCES):
        at = (state + index) % _SEQUENCES
        with saved_tensors(tuning.frozen) as kept:
            tuning.loss(slice(at, at + 1))
        found += kept
        if len(found) >= wanted:
            break
    return found[:wanted]


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
