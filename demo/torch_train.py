# SPDX-License-Identifier: Apache-2.0
"""A PyTorch training loop that repeats to the bit, with the options and the result of demo/train.

It knows nothing of checkpoints. Needs PyTorch with CUDA.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import time
from pathlib import Path

# Both before torch is imported: cuBLAS is deterministic only with a fixed workspace, and asking
# NVML whether there is CUDA would leave its descriptors behind.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "0")

import torch

SAMPLES, FEATURES, HIDDEN, CLASSES, BATCH = 65536, 256, 2048, 16, 256
POOL_BYTES = 512 << 20


def main() -> None:
    """Train, and write what came out."""
    arguments = parse_arguments()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    gpu = torch.device("cuda:0")
    teacher = torch.randn(FEATURES, CLASSES)
    samples = torch.randn(SAMPLES, FEATURES)
    labels = (samples @ teacher).argmax(dim=1).to(gpu)
    data = samples.to(gpu)
    pool = torch.zeros(POOL_BYTES, dtype=torch.uint8, device=gpu)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    ).to(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[str] = []
    half_time = time.monotonic()
    for step in range(1, arguments.steps + 1):
        if step == arguments.steps // 2 + 1:
            half_time = time.monotonic()
        at = (step - 1) * BATCH % SAMPLES
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(data[at : at + BATCH])
        loss = torch.nn.functional.cross_entropy(outputs.float(), labels[at : at + BATCH])
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        if step % arguments.report_every == 0 or step == arguments.steps:
            print(f"step {step} of {arguments.steps}: loss {loss.item():.6f}", flush=True)
        if step == arguments.mark_step:
            publish(arguments.mark_file, f"{step}\n")
    # Of the second half: the first pays for loading kernels.
    step_seconds = (time.monotonic() - half_time) / (arguments.steps - arguments.steps // 2)
    moments = [
        optimizer.state[parameter][key]
        for parameter in model.parameters()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    result = {
        "gpu": torch.cuda.get_device_name(gpu),
        "torch": torch.__version__,
        "steps": arguments.steps,
        "step_seconds": step_seconds,
        "weights_sha256": digest(list(model.parameters())),
        "moments_sha256": digest(moments),
        "data_intact": bool(torch.equal(data.cpu(), samples)),
        "pool_zero": not bool(pool.any()),
        "losses": losses,
    }
    if arguments.result:
        publish(arguments.result, json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line; --help explains it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--report-every", type=int, default=1)
    parser.add_argument("--mark-step", type=int, default=0)
    parser.add_argument("--mark-file", type=Path)
    parser.add_argument("--result", type=Path)
    return parser.parse_args()


def digest(tensors: list[torch.Tensor]) -> str:
    """SHA-256 over the tensors' bytes, in order."""
    hash_ = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        hash_.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    return hash_.hexdigest()


def publish(path: Path, text: str) -> None:
    """Write a file so that nobody sees half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="ascii")
    part.replace(path)


if __name__ == "__main__":
    main()
