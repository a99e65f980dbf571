# SPDX-License-Identifier: Apache-2.0
"""What is asked of NVML, by a library that answers as its header says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpustasis import nvml
from gpustasis.errors import DriverError

SOURCE = """
struct rates { unsigned int gpu, memory; };
#ifdef WAITS
#include <unistd.h>
int nvmlInit_v2(void) { while (access(WAITS, F_OK) == 0) usleep(10000); return 0; }
#else
int nvmlInit_v2(void) { return 0; }
#endif
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
    *device = (void*)(unsigned long)(index + 1);
    return 0;
}
#ifdef PERSISTENT
int nvmlDeviceGetPersistenceMode(void* device, int* mode) {
    *mode = (unsigned long)device <= PERSISTENT;
    return 0;
}
#endif
#ifdef RATES
int nvmlDeviceGetUtilizationRates(void* device, struct rates* rates) {
    static const unsigned int busy[] = {0, 12, 80, 37};
    rates->gpu = busy[(unsigned long)device];
    rates->memory = 99;
#ifdef UNKNOWN
    if ((unsigned long)device == UNKNOWN)
        return 3;
#endif
    return RATES;
}
#endif
"""


def library(directory: Path, *words: str) -> str:
    place = directory / "nvml.so"
    argv = ["cc", "-shared", "-fPIC", *words, "-x", "c", "-", "-o", place]
    subprocess.run(argv, input=SOURCE, text=True, check=True)
    return str(place)


def test_the_busiest_of_all_gpus_counts(tmp_path: Path) -> None:
    assert nvml.busiest(library(tmp_path, "-DRATES=0")) == 0.8


def test_a_gpu_of_which_it_cannot_be_told_hides_no_other(tmp_path: Path) -> None:
    """As one with MIG."""
    assert nvml.busiest(library(tmp_path, "-DRATES=0", "-DUNKNOWN=1")) == 0.8


@pytest.mark.parametrize(("persistent", "all_are"), [(0, False), (2, False), (3, True)])
def test_persistence_mode_is_that_of_all_gpus(
    tmp_path: Path, persistent: int, all_are: bool
) -> None:
    assert nvml.persistence_mode(library(tmp_path, f"-DPERSISTENT={persistent}")) is all_are


def test_a_library_without_persistence_mode_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="this NVML has none"):
        nvml.persistence_mode(library(tmp_path))


def test_what_does_not_answer_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "held"
    held.touch()
    place = library(tmp_path, "-DRATES=0", f'-DWAITS="{held}"')  # while that is there
    try:
        with monkeypatch.context() as patch:
            patch.setattr(nvml, "ANSWER_S", 0.1)
            for said in ("no answer within 0.1 s", "has not answered yet", "has not answered yet"):
                with pytest.raises(DriverError, match=said):
                    nvml.busiest(place)
    finally:
        held.unlink()
    (left,) = nvml._left_behind
    assert left.wait(60)
    assert nvml.busiest(place) == 0.8  # it is back


@pytest.mark.parametrize(
    ("words", "said"), [(["-DRATES=3"], "NVML error 3"), ([], "this NVML has none")]
)
def test_what_cannot_be_told_is_an_error(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(DriverError, match=said):
        nvml.busiest(library(tmp_path, *words))
