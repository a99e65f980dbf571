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
from collections.abc import Callable, Iterator
from pathlib import Path

# Both before torch is imported: cuBLAS is deterministic only with a fixed workspace, and asking
# NVML whether there is CUDA would leave its descriptors behind.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "0")

import torch

SAMPLES, FEATURES, HIDDEN, CLASSES, BATCH = 65536, 256, 2048, 16, 256
POOL_BYTES = 512 << 20

Batch = tuple[torch.Tensor, torch.Tensor]
StepOn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=arguments.graph)
    forward = torch.compile(model) if arguments.compile else model

    def step_on(features: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=not arguments.graph):
            outputs = forward(features)
        loss = torch.nn.functional.cross_entropy(outputs.float(), wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run_step = recorded(step_on, data[:BATCH], labels[:BATCH]) if arguments.graph else step_on
    if arguments.workers:
        batches = loaded(samples, labels.cpu(), arguments.workers, gpu)
    else:
        batches = sliced(data, labels)
    losses: list[str] = []
    half_time = time.monotonic()
    for step in range(1, arguments.steps + 1):
        if step == arguments.steps // 2 + 1:
            half_time = time.monotonic()
        loss = run_step(*next(batches))
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


def sliced(data: torch.Tensor, labels: torch.Tensor) -> Iterator[Batch]:
    """Batches that lie on the GPU already, round and round."""
    while True:
        for at in range(0, SAMPLES, BATCH):
            yield data[at : at + BATCH], labels[at : at + BATCH]


def loaded(
    samples: torch.Tensor, labels: torch.Tensor, workers: int, gpu: torch.device
) -> Iterator[Batch]:
    """The same batches, from processes of a DataLoader, through page-locked memory."""
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(samples, labels),
        batch_size=BATCH,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
    )
    while True:
        for features, wanted in loader:
            yield features.to(gpu, non_blocking=True), wanted.to(gpu, non_blocking=True)


def recorded(step_on: StepOn, features: torch.Tensor, wanted: torch.Tensor) -> StepOn:
    """The step as a CUDA graph that is replayed on other batches of the same shape."""
    at_features, at_wanted = features.clone(), wanted.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # PyTorch asks for warm-up on a stream of its own
            step_on(at_features, at_wanted)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step_on(at_features, at_wanted)

    def replay(features: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        at_features.copy_(features)
        at_wanted.copy_(wanted)
        graph.replay()
        return loss

    return replay


def parse_arguments() -> argparse.Namespace:
    """The command line; --help explains it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--report-every", type=int, default=1)
    parser.add_argument("--mark-step", type=int, default=0)
    parser.add_argument("--mark-file", type=Path)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph of the step")
    parser.add_argument("--compile", action="store_true", help="have torch.compile translate it")
    parser.add_argument("--workers", type=int, default=0, help="processes that load batches")
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
