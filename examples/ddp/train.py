# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch DDP on the processor: two ranks learn the parity of bits. Nothing here knows of
checkpoints. Rank 0 prints the loss of each step with all its digits, and a digest of what was
learnt."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BITS, BATCH = 12, 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = nn.Linear(BITS, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)

    for step in range(1, steps + 1):
        bits = torch.randint(0, 2, (BATCH, BITS), generator=data)
        loss = nn.functional.cross_entropy(model(bits.float()), bits[:, :4].sum(1) % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    if rank == 0:
        digest = hashlib.sha256()
        for weights in model.parameters():
            digest.update(weights.detach().numpy().tobytes())
        print(f"weights {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
