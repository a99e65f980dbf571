# SPDX-License-Identifier: Apache-2.0
"""The two workloads in which all weights are trained or were: fine-tuning, and inference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpustasis_bench.contents.layout import ContentWriter
from gpustasis_bench.contents.network import (
    AdamW,
    Shape,
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

_LAYERS = 8
_LENGTH = 256  # bytes of a sequence
_RATE = 1e-4
_INFERENCE_WEIGHTS = 0.4  # share of the memory; the rest is the pool
_INFERENCE_STEPS, _INFERENCE_SEQUENCES = 3, 1
_TUNING_STATE = 0.8  # share of weights, gradients and moments; the rest is activations
_TUNING_STEPS, _TUNING_SEQUENCES = 10, 2
_BF16, _FP32 = 2, 4  # bytes


@dataclass(slots=True)
class _Model:
    shape: Shape
    weights: dict[str, Tensor]
    batches: Iterator[list[bytes]]

    def loss(self, batch: list[bytes]) -> Tensor:
        inputs, targets = tokens_of(batch)
        x = embed(self.weights, inputs)
        for layer in range(self.shape.layers):
            x = run_layer(
                self.weights,
                layer,
                x,
                lambda name, value: linear(value, self.weights[name]),
            )
        return loss_of(self.weights, x, targets)


def fill_inference(writer: ContentWriter, size: int, seed: int) -> None:
    """bf16 weights in 40 % of the memory, a KV pool that nothing was put into in the rest."""
    model, _ = _train(
        writer, size * _INFERENCE_WEIGHTS / _BF16, seed, _INFERENCE_STEPS, _INFERENCE_SEQUENCES
    )
    for name, tensor in model.weights.items():
        writer.add(f"weights {name}", "bf16 weights", tensor_bytes(tensor))
    pool = max(size - writer.reserved, 0)
    pools = 2 * model.shape.layers  # keys and values of each layer
    for index in range(pools):
        share = pool // pools // 512 * 512
        if share:
            writer.add_untouched(f"pool {index}", "untouched KV pool", share)


def fill_finetuning(writer: ContentWriter, size: int, seed: int) -> None:
    """All of a training of bf16 weights: gradients, AdamW's moments, one batch's activations."""
    each = _BF16 + _BF16 + _FP32 + _FP32
    model, adam = _train(
        writer, size * _TUNING_STATE / each, seed, _TUNING_STEPS, _TUNING_SEQUENCES
    )
    for name, tensor in model.weights.items():
        writer.add(f"weights {name}", "bf16 weights", tensor_bytes(tensor))
    for name in model.weights:
        writer.add(f"first moment {name}", "fp32 moments", tensor_bytes(adam.first[name]))
        writer.add(f"second moment {name}", "fp32 moments", tensor_bytes(adam.second[name]))
    for name, tensor in model.weights.items():
        writer.add(f"gradient {name}", "bf16 gradients", tensor_bytes(tensor.grad))
    count = 0
    excluded = list(model.weights.values())
    while writer.reserved < size:  # more sequences of one batch
        with saved_tensors(excluded) as kept:
            model.loss(next(model.batches)[:1])
        for tensor in kept:
            if writer.reserved >= size:
                break
            writer.add(f"activation {count}", "activations", tensor_bytes(tensor))
            count += 1


def _train(
    writer: ContentWriter, weights: float, seed: int, steps: int, sequences: int
) -> tuple[_Model, AdamW]:
    """A model of about so many weights after some steps; its gradients are the last step's."""
    shape = Shape(width=width_for(weights, _LAYERS), layers=_LAYERS, context=_LENGTH)
    generator = torch.Generator().manual_seed(seed)
    found = initial_outer(shape, generator)
    for layer in range(shape.layers):
        found |= initial_layer(shape, layer, generator)
    for tensor in found.values():
        tensor.requires_grad_(True)
    model = _Model(shape, found, batches(read_corpus(), sequences, _LENGTH))
    adam = AdamW(found, _RATE)
    losses = []
    for _ in range(steps):
        adam.clear()
        loss = model.loss(next(model.batches))
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    writer.facts |= {
        "torch": torch.__version__,
        "weights": sum(tensor.numel() for tensor in found.values()),
        "width": shape.width,
        "layers": shape.layers,
        "steps": steps,
        "bytes_per_step": sequences * _LENGTH,
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }
    return model, adam
