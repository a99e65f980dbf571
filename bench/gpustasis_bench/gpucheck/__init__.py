# SPDX-License-Identifier: Apache-2.0
"""What `ci/gpu-check` runs: see how the CUDA driver behaves, then checkpoint and restore on it.

`python -m gpustasis_bench.gpucheck` takes a trace of a CUDA process under the driver's checkpoint
API (what it holds before and after each call, how long each takes, which error answers which
mistake), and then checkpoints and restores real programs with CRIU. A trace is one JSON object;
`facts` reduces it to what must not differ between a GPU and the driver emulator.
"""
