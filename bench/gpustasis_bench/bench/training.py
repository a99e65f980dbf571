"""Steps of training, and the tensors that one keeps for its way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8
_DECAY = 0.01


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
