# SPDX-License-Identifier: Apache-2.0
"""What the wheels in build/dist hold: the product's what a node needs, gpustasis-bench's the
rest."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

# Bytes of the product's wheel. 2.4 MiB of it are OpenSSL's libcrypto: in the extension, and in the
# plugin, which seals a checkpoint while it is made.
_LIMIT = 6 << 20
# Every file of the product's wheel is of one of these kinds.
_KINDS = {
    "Python modules of the product": re.compile(r"gpustasis/[a-z_/]+\.py"),
    "types of the extension, and of the package": re.compile(
        r"gpustasis/(_core(_arena|_dirty|_requirements|_seal|_signature)?\.pyi|py\.typed)"
    ),
    "what --json prints": re.compile(r"gpustasis/cli/output\.schema\.json"),
    "man pages and completion": re.compile(
        r"gpustasis-[0-9.]+\.data/data/share/(man/man1/gpustasis[a-z-]*\.1"
        r"|bash-completion/completions/gpustasis|zsh/site-functions/_gpustasis"
        r"|fish/vendor_completions\.d/gpustasis\.fish)"
    ),
    "the Python extension": re.compile(r"gpustasis/_core\.[a-z0-9_-]+\.so"),
    "the CRIU plugin": re.compile(r"gpustasis/plugin/cuda_plugin\.so"),
    "CRIU's action script": re.compile(r"gpustasis/libexec/rank-script"),
    "what install puts on a host": re.compile(r"gpustasis/runtime-hooks/[a-z]+/[a-z0-9.-]+"),
    "libraries of the driver emulator": re.compile(
        r"gpustasis/emulator/(cuda-13\.4/)?(libcuda|libnvidia-ml)\.so\.1"
    ),
    "the emulator's daemon": re.compile(r"gpustasis/emulator/gpustasis-gpu-emulator"),
    "the header of emulated kernels": re.compile(r"gpustasis/emulator/include/[a-z_]+\.h"),
    "what Python wants to know of a wheel": re.compile(
        r"gpustasis-[0-9.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/[A-Z]+)"
    ),
}
_NOT_THE_PRODUCTS = re.compile(r"(^|/)(bench|demo|gpucheck|tests?)(/|\.py$)|torch|matplotlib")


def wheel(repository: Path, name: str) -> Path:
    (found,) = (repository / "build/dist").glob(f"{name}-*.whl")
    return found


def members(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def of_no_kind(names: list[str]) -> list[str]:
    return [name for name in names if not any(kind.fullmatch(name) for kind in _KINDS.values())]


def test_the_product_holds_what_a_node_needs(repository: Path) -> None:
    path = wheel(repository, "gpustasis")
    names = members(path)
    assert of_no_kind(names) == []
    assert [name for name in names if _NOT_THE_PRODUCTS.search(name)] == []
    assert path.stat().st_size <= _LIMIT
    programs = ("the Python extension", "the CRIU plugin", "CRIU's action script")
    for kind in (*programs, "the emulator's daemon"):
        assert sum(bool(_KINDS[kind].fullmatch(name)) for name in names) == 1, kind


@pytest.mark.parametrize(
    "name",
    [
        "gpustasis/bench/target.c",
        "gpustasis/plugin/cuda_plugin.so.debug",
        "gpustasis/data/model.bin",
        "tests/conftest.py",
    ],
)
def test_other_kinds_are_told(name: str) -> None:
    assert of_no_kind(["gpustasis/driver.py", name]) == [name]


def test_openssl_is_within_and_nowhere_else(repository: Path, tmp_path: Path) -> None:
    """A machine needs no libcrypto, and no other library meets the one that is linked in."""
    with zipfile.ZipFile(wheel(repository, "gpustasis")) as archive:
        (name,) = [n for n in archive.namelist() if _KINDS["the Python extension"].fullmatch(n)]
        raw = archive.read(name)
    found = ELFFile(io.BytesIO(raw))
    dynamic, names = found.get_section_by_name(".dynamic"), found.get_section_by_name(".dynsym")
    assert isinstance(dynamic, DynamicSection)
    assert isinstance(names, SymbolTableSection)
    needed = [str(vars(tag)["needed"]) for tag in dynamic.iter_tags("DT_NEEDED")]
    assert needed
    assert not [library for library in needed if "crypto" in library or "ssl" in library]
    symbols = [
        symbol.name
        for symbol in names.iter_symbols()
        if re.match(r"(EVP|CMS|OPENSSL|CRYPTO|X509|ossl)_", symbol.name)
    ]
    assert symbols == []
    assert b"AES-256-GCM" in raw


def test_the_bench_is_a_wheel_of_its_own(repository: Path) -> None:
    names = members(wheel(repository, "gpustasis_bench"))
    assert {name.split("/")[1] for name in names if name.count("/") > 1} == {
        *("bench", "contents", "demo", "gpucheck")
    }
    assert {"gpustasis_bench/bench/target.c", "gpustasis_bench/bench/hook_cost.c"} <= set(names)
