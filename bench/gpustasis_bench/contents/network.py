# SPDX-License-Identifier: Apache-2.0
"""A small GPT over bytes, in PyTorch, computed in bfloat16; its training, and what it trains on."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY = 256
HEAD = 64  # width of an attention head
MATRICES = ("q", "k", "v", "o", "up", "down")
_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_DECAY = 0.01
_CORPUS = 4 << 20  # bytes

Linear = Callable[[str, Tensor], Tensor]
Weights = dict[str, Tensor]


class _Product(torch.autograd.Function):  # type: ignore[misc]  # PyTorch is not there to be read
    """All three products row by row, which PyTorch has a fast way for. Of one whose second factor
    lies the other way, as on the way back, it takes 20 times as long where the processor has no
    bf16 (PyTorch 2.14, AVX2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = functional.linear(gradient, weight.T.contiguous())
        if ctx.needs_input_grad[1]:
            rows, columns = (each.flatten(0, -2).T.contiguous() for each in (gradient, x))
            of_weight = functional.linear(rows, columns)
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Each row of `x` with each row of `weight`, both bf16; so is what it returns."""
    return cast(Tensor, _Product.apply(x, weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """width: a multiple of HEAD. context: the most bytes of a sequence."""

    width: int
    layers: int
    context: int = 256

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        return 12 * self.width * self.width

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows (out) and columns (in) of a layer's matrix."""
        wide = 4 * self.width
        return {"up": (wide, self.width), "down": (self.width, wide)}.get(
            name, (self.width, self.width)
        )


def width_for(weights: float, layers: int) -> int:
    """The greatest width with which the matrices of `layers` layers have at most so many
    numbers."""
    width = int(math.sqrt(weights / (12 * layers)))
    return max(HEAD, width // HEAD * HEAD)


def initial_outer(shape: Shape, generator: torch.Generator) -> Weights:
    """What is not in a layer: embeddings (that of tokens is the output's too) and the last norm."""
    return {
        "tokens": _normal((VOCABULARY, shape.width), 0.02, generator),
        "positions": _normal((shape.context, shape.width), 0.01, generator),
        "norm": torch.ones(shape.width, dtype=torch.bfloat16),
    }


def initial_layer(shape: Shape, layer: int, generator: torch.Generator) -> Weights:
    """As GPT-2 begins: normal, 0.02; what leads back into the residual stream smaller."""
    found = {
        f"{layer}.norm1": torch.ones(shape.width, dtype=torch.bfloat16),
        f"{layer}.norm2": torch.ones(shape.width, dtype=torch.bfloat16),
    }
    for name in MATRICES:
        deviation = 0.02 / math.sqrt(2 * shape.layers) if name in ("o", "down") else 0.02
        found[f"{layer}.{name}"] = _normal(shape.matrix(name), deviation, generator)
    return found


def embed(weights: Weights, tokens: Tensor) -> Tensor:
    """tokens: sequences x length."""
    return weights["tokens"][tokens] + weights["positions"][: tokens.shape[1]]


def run_layer(weights: Weights, layer: int, x: Tensor, apply: Linear) -> Tensor:
    """One layer of the residual stream; `apply` applies the matrix of that name."""
    width = x.shape[-1]
    shape = (*x.shape[:2], width // HEAD, HEAD)
    inner = functional.layer_norm(x, (width,), weights[f"{layer}.norm1"])
    q, k, v = (apply(f"{layer}.{name}", inner).view(shape).transpose(1, 2) for name in "qkv")
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + apply(f"{layer}.o", mixed.transpose(1, 2).reshape(x.shape))
    inner = functional.layer_norm(x, (width,), weights[f"{layer}.norm2"])
    return x + apply(f"{layer}.down", functional.gelu(apply(f"{layer}.up", inner)))


def loss_of(weights: Weights, x: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next byte, from the residual stream after the last layer."""
    x = functional.layer_norm(x, (x.shape[-1],), weights["norm"])
    logits = linear(x, weights["tokens"])
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _normal(size: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    values = torch.empty(size).normal_(0, deviation, generator=generator)
    return values.to(torch.bfloat16)


@dataclass(slots=True)
class AdamW:
    """Parameters of any precision with moments of 32 bits."""

    parameters: dict[str, Tensor]
    rate: float
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            self.first[name] = torch.zeros(parameter.shape, dtype=torch.float32)
            self.second[name] = torch.zeros(parameter.shape, dtype=torch.float32)

    def step(self) -> None:
        """Change the parameters by their gradients, which stay as they are."""
        self.steps += 1
        correction1 = 1 - _BETAS[0] ** self.steps
        correction2 = 1 - _BETAS[1] ** self.steps
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                gradient = parameter.grad.float()
                first, second = self.first[name], self.second[name]
                first.lerp_(gradient, 1 - _BETAS[0])
                second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
                root = (second / correction2).sqrt_().add_(_EPSILON)
                value = parameter.float()
                value.mul_(1 - self.rate * _DECAY)
                value.addcdiv_(first, root, value=-self.rate / correction1)
                parameter.copy_(value)

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


@contextmanager
def saved_tensors(excluded: list[Tensor]) -> Iterator[list[Tensor]]:
    """Inside: the tensors that autograd saves for the way back, each once, without `excluded`
    (weights, which are there anyway). They are what one calls activations."""
    kept: list[Tensor] = []
    known = {each.untyped_storage().data_ptr() for each in excluded}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known and tensor.numel() > 1:
            known.add(address)
            kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Its bytes as they would lie in memory."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def tokens_of(batch: list[bytes]) -> tuple[Tensor, Tensor]:
    """Inputs and targets: the same stretches, one byte apart."""
    rows = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in batch])
    return rows[:, :-1].long(), rows[:, 1:].long()


def read_corpus() -> bytes:
    """Up to 4 MiB of the sources of Python's standard library: text that every machine has, the
    same for the same Python. Raises OSError if there are too few."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS:
            break
    if len(text) < _CORPUS // 16:
        raise FileNotFoundError(f"{library} holds too few sources to train on")
    return bytes(text[:_CORPUS])


def batches(text: bytes, sequences: int, length: int) -> Iterator[list[bytes]]:
    """Without end: stretches of `length` + 1 bytes, one after the other, from the start again."""
    at = 0
    while True:
        batch = []
        for _ in range(sequences):
            if at + length + 1 > len(text):
                at = 0
            batch.append(text[at : at + length + 1])
            at += length
        yield batch
