# SPDX-License-Identifier: Apache-2.0
"""The emulator's declarations of the CUDA driver API against the real cuda.h."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from gpustasis.emulator import library_directory

PROGRAMS = Path(__file__).resolve().parent / "programs"
OUR_MARK = "gpustasis_driver_emulator"  # by which the plugin knows it from the real driver


def test_values_and_layouts_are_those_of_cuda_h(repository: Path, cuda_include: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "no C++ compiler; run ci/setup"
    argv = [compiler, "-std=c++20", "-fsyntax-only", f"-isystem{cuda_include}"]
    argv += [f"-I{repository / 'src'}", str(PROGRAMS / "abi.cpp")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_every_entry_point_is_one_of_cuda_h(cuda_include: Path) -> None:
    library = library_directory(13040) / "libcuda.so.1"
    argv = ["nm", "-D", "--defined-only", str(library)]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in text.splitlines()} - {OUR_MARK}
    header = (cuda_include / "cuda.h").read_text()
    declared = set(re.findall(r"\b(cu[A-Z]\w+)\b", header))
    newer = {"cuCheckpointOperationComplete", "cuStreamGetCtx_v2", "cuCtxCreate_v4"}
    newer |= {"cuEventElapsedTime_v2", "cuCtxGetDevice_v2", "cuCtxSynchronize_v2"}
    removed = {"cuCtxCreate_v3", "cuDeviceComputeCapability"}
    assert len(symbols) > 150
    assert symbols - declared - newer - removed == set()


def test_every_function_of_the_emulator_is_found_by_its_base_name(repository: Path) -> None:
    """What is exported and what cuGetProcAddress knows are the same."""
    library = library_directory(13040) / "libcuda.so.1"
    argv = ["nm", "-D", "--defined-only", str(library)]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in text.splitlines()} - {OUR_MARK}
    table = (repository / "src/driver_emulator/driver/proc_address.cpp").read_text()
    known = {entry for _, entry in re.findall(r"X\((\w+), \d+, (\w+)\)", table)}
    assert symbols == known
