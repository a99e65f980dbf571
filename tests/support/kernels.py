# SPDX-License-Identifier: Apache-2.0
"""Kernel files compiled as modules of the driver emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from gpustasis.emulator import find_directory


def compile_kernels(source: Path, folder: Path) -> Path:
    """The module of a .cu file, made in `folder`. Fails with what the compiler says."""
    module = folder / f"{source.stem}.so"
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "no C++ compiler; run ci/setup"
    argv = [compiler, "-x", "c++", "-std=c++17", "-O2", "-ffp-contract=off"]
    argv += ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared"]
    argv += [f"-I{find_directory() / 'include'}", "-o", str(module), str(source)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return module
