"""A small GPT over bytes, in PyTorch, computed in bfloat16: what the contents come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY = 256
HEAD = 64  # width of an attention head
MATRICES = ("q", "k", "v", "o", "up", "down")

Linear = Callable[[str, Tensor], Tensor]
Weights = dict[str, Tensor]


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
    """The greatest width with which the matrices of `layers` layers have at most so many numbers."""
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


def run_layer(weights: Weights, layer: int, x: Tensor, linear: Linear) -> Tensor:
    """One layer of the residual stream; `linear` applies the matrix of that name."""
    width = x.shape[-1]
    shape = (*x.shape[:2], width // HEAD, HEAD)
    inner = functional.layer_norm(x, (width,), weights[f"{layer}.norm1"])
    q, k, v = (linear(f"{layer}.{name}", inner).view(shape).transpose(1, 2) for name in "qkv")
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + linear(f"{layer}.o", mixed.transpose(1, 2).reshape(x.shape))
    inner = functional.layer_norm(x, (width,), weights[f"{layer}.norm2"])
    return x + linear(f"{layer}.down", functional.gelu(linear(f"{layer}.up", inner)))


def loss_of(weights: Weights, x: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next byte, from the residual stream after the last layer."""
    x = functional.layer_norm(x, (x.shape[-1],), weights["norm"])
    logits = functional.linear(x, weights["tokens"])
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _normal(size: tuple[int, ...], deviation: float, generator: torch.Generator) -> Tensor:
    values = torch.empty(size).normal_(0, deviation, generator=generator)
    return values.to(torch.bfloat16)
