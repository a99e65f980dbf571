# SPDX-License-Identifier: Apache-2.0
"""The shape of the source tree: who may use whom, how large a file may be, what must not be in
it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
MAX_LINES = 400
PACKAGES = ("gpustasis", "gpustasis_bench")
OWN = tuple(f"{name}." for name in PACKAGES)

# Folder of src/ -> the folders of src/ that it may include.
CPP_ARROWS = {
    "core": {"core"},
    "tracee": {"tracee", "core"},
    "dirty_tracker": {"dirty_tracker", "tracee", "core"},
    "dropped_memory": {"dropped_memory", "tracee", "core"},
    "seal": {"seal", "core"},
    "bindings": {
        *("bindings", "device_memory", "dirty_tracker", "dropped_memory", "seal", "core"),
    },
    "device_memory": {"device_memory", "core"},
    "cuda_plugin": {"cuda_plugin", "device_memory", "dropped_memory", "seal", "tracee", "core"},
    "rank_script": {"rank_script", "tracee", "core"},
    "driver_emulator": {"driver_emulator"},
}
# What core may include beyond itself, the standard library and the system: bytes only.
CORE_LIBRARIES = {"lz4.h", "xxhash.h"}
FOREIGN_HEADERS = ("cuda", "nvml", "criu", "compel", "Python", "pybind11", "toml", "nlohmann")

# Module or package of gpustasis -> what of gpustasis it may import. What is not named may import
# only errors; text all may import; cli may import everything, and nothing imports it.
PYTHON_ARROWS = {
    "errors": set[str](),
    "text": set[str](),
    "__init__": {"api", "errors", "criu", "image", "recovery"},
    "api": {
        *("errors", "archive", "criu", "driver", "dump_records", "dumped", "image", "recovery"),
        "sealing",
    },
    "__main__": {"cli"},
    "checkpointctl": {"errors", "cli"},
    "process": {"errors"},
    "answering": {"errors"},
    "declared": set[str](),
    "driver": {"errors", "answering", "declared"},
    "nvml": {"errors", "answering", "declared"},
    "nccl": set[str](),
    "job": {"errors"},
    "task": {"errors"},
    "_core": {
        "_core_arena",
        "_core_dirty",
        "_core_requirements",
        "_core_seal",
        "_core_signature",
    },  # stubs only
    "watching": {"errors", "_core", "planning"},
    "planning": set[str](),
    "verifying": {"errors"},
    "intervals": set[str](),
    "dump_time": {"text"},
    "locked_file": set[str](),
    "image": {"errors", "_core", "criu", "files"},
    "draining": {"errors", "_core", "criu", "files", "image", "process"},
    "peers": {"errors", "_core", "criu", "files", "image", "draining", "streaming"},
    "archive": {"errors", "_core", "image", "criu", "process", "files"},
    "sealing": {"errors", "_core", "image", "criu", "process", "files", "draining"},
    "streaming": {
        *("errors", "_core", "image", "criu", "files", "task", "recovery", "sealing"),
        "dump_records",
    },
    "criu": {"errors", "process", "driver", "nvml", "files"},
    "runtimes": {"errors", "criu", "image", "archive", "_core", "task", "files", "process"},
    "files": set[str](),
    "policy": {"errors"},
    "oci_hook": {"errors", "files", "policy", "image"},
    "install": {"errors", "files", "process", "criu"},
    "recovery": {"errors", "driver", "dumped", "task", "_core", "dump_records"},
    "dump_records": {"errors", "task", "_core"},
    "dumped": {"errors", "_core", "criu", "dump_records"},
    "emulator": {"errors", "files", "process"},
    "jobs": {
        *("errors", "files", "criu", "driver", "image", "_core", "process", "recovery", "task"),
        *("streaming", "verifying", "nvml", "intervals", "nccl", "job", "dump_time"),
        *("locked_file", "answering", "draining", "peers", "dump_records"),
    },
    "preemption": {
        "dump_records",
        *("errors", "_core", "criu", "files", "image", "nvml", "process", "recovery", "task"),
        *("verifying", "intervals", "dump_time", "locked_file"),
    },
    "jit": {"cli"},
    "agent": {
        *(
            "__init__",
            "answering",
            "errors",
            "files",
            "task",
            "process",
            "nvml",
            "criu",
            "image",
            "streaming",
        ),
        *(
            "runtimes",
            "jobs",
            "recovery",
            "dump_records",
            "intervals",
            "policy",
            "draining",
            "_core",
        ),
    },
    "diagnosis": {
        "dump_records",
        *("errors", "process", "driver", "nvml", "criu", "emulator", "install", "task", "text"),
        *("archive", "image", "_core", "policy", "nccl", "answering"),
    },
    "cli": {
        *("__init__", "errors", "process", "driver", "nvml", "image", "criu"),
        *("recovery", "emulator", "diagnosis", "_core", "files", "preemption", "agent"),
        *("watching", "archive", "install", "runtimes", "sealing", "streaming", "text"),
        *("planning", "jobs", "verifying", "intervals", "nccl", "draining", "peers"),
    },
}
# The same for the parts of gpustasis_bench. What of gpustasis they may use has no name of a part of
# theirs; gpustasis uses nothing of gpustasis_bench.
BENCH_ARROWS = {
    "__init__": set[str](),
    "roots": {"errors"},
    "contents": set[str](),
    "machine": {"errors", "process", "emulator"},
    "demo": {"errors", "criu", "machine"},
    "gpucheck": {"errors", "process", "nvml", "criu", "machine", "demo"},
    "bench": {
        *("__init__", "errors", "process", "criu", "_core", "emulator", "draining"),
        *("contents", "roots", "machine"),
    },
}
# Running a program to its end is process.run's alone. These keep one running beside them.
PROGRAM_KEEPERS = {
    *("process.py", "streaming/ssh.py", "emulator/__init__.py", "demo/training.py"),
    *("gpucheck/caller.py", "gpucheck/mistakes.py", "gpucheck/target.py"),
    *("gpucheck/cuda_process.py", "gpucheck/checkpoints.py"),
}

# Pieces put together here, so that this file passes its own test.
REGISTRY_HOSTS = ["deb." + "debian.org", "pypi." + "org", "pythonhosted." + "org", "npmjs." + "org"]
MACHINE_PATHS = re.compile(r"(^|[^A-Za-z0-9_.])/(wo" + r"rk|fa" + r"rm|ro" + r"ot)/[a-z.]")


@cache
def tracked_files() -> tuple[Path, ...]:
    """What is in the repository: tracked, or new and not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = (REPOSITORY / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


def below(folder: str, *suffixes: str) -> list[Path]:
    top = REPOSITORY / folder
    return [p for p in tracked_files() if p.is_relative_to(top) and p.suffix in suffixes]


def includes(path: Path) -> list[tuple[str, str]]:
    """(quote, header) of every #include."""
    return re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', path.read_text(), re.MULTILINE)


def cpp_sources() -> list[Path]:
    return below("src", ".cpp", ".hpp", ".c", ".h")


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", cpp_sources(), ids=relative)
def test_cpp_arrows_hold(path: Path) -> None:
    folder = path.relative_to(REPOSITORY / "src").parts[0]
    for quote, header in includes(path):
        target = header.split("/")[0]
        if target in CPP_ARROWS:
            assert target in CPP_ARROWS[folder], f"{folder} includes {header}"
        elif folder == "core":
            assert quote == "<", f"core includes {header}, which is neither its own nor a system's"
            assert not header.startswith(FOREIGN_HEADERS), f"core includes {header}"
            allowed = "/" not in header or header.startswith(("sys/", "linux/"))
            assert allowed or header in CORE_LIBRARIES, f"core includes {header}"


def test_every_folder_of_src_has_its_arrows() -> None:
    assert {path.relative_to(REPOSITORY / "src").parts[0] for path in cpp_sources()} <= set(
        CPP_ARROWS
    )


def python_sources() -> list[Path]:
    return below("python/gpustasis", ".py", ".pyi") + below("bench/gpustasis_bench", ".py")


def package_path(path: Path) -> Path:
    """Where a module of either package lies in it."""
    return Path(*path.relative_to(REPOSITORY).parts[2:])


def imported_parts(path: Path) -> set[str]:
    """First part after the package's name of everything that a file imports of the two."""
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in PACKAGES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith(OWN)}
    return {"__init__" if part.startswith("__version") else part for part in parts}


@pytest.mark.parametrize("path", python_sources(), ids=relative)
def test_python_arrows_hold(path: Path) -> None:
    part = package_path(path).parts[0].split(".")[0]
    of_bench = path.is_relative_to(REPOSITORY / "bench")
    allowed = (BENCH_ARROWS if of_bench else PYTHON_ARROWS).get(part, {"errors"}) | {part, "text"}
    assert imported_parts(path) <= allowed
    assert of_bench or "gpustasis_bench" not in path.read_text()


@pytest.mark.parametrize("path", python_sources(), ids=relative)
def test_programs_are_run_through_one_door(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"subprocess\.(run|call|check_|getoutput)|os\.(system|popen)\b", text)
    name = str(package_path(path))
    assert name in PROGRAM_KEEPERS or not re.search(
        r"^\s*(import|from) subprocess", text, re.MULTILINE
    )


# Text leaves the program here only, made harmless: the command line, the OCI hook's reason on
# stderr, and one constant that checkpointctl asks for.
PRINTERS = {"cli/output.py", "oci_hook.py", "checkpointctl.py"}


@pytest.mark.parametrize("path", python_sources(), ids=relative)
def test_nothing_is_printed_past_the_sanitizer(path: Path) -> None:
    if path.is_relative_to(REPOSITORY / "bench") or str(package_path(path)) in PRINTERS:
        return
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name("print")):
                found.append(f"{node.lineno}: print")
            case ast.Attribute(
                ast.Name("click"), "echo" | "secho" | "echo_via_pager" | "progressbar"
            ):
                found.append(f"{node.lineno}: click.{node.attr}")
            case ast.Attribute(ast.Name("sys"), "stdout" | "stderr" | "__stdout__" | "__stderr__"):
                found.append(f"{node.lineno}: sys.{node.attr}")
            case ast.Import() if any(name.name.split(".")[0] == "rich" for name in node.names):
                found.append(f"{node.lineno}: rich")
            case ast.ImportFrom() if (node.module or "").split(".")[0] == "rich":
                found.append(f"{node.lineno}: rich")
            case ast.ImportFrom(module="click" | "sys") if {"echo", "secho", "stdout", "stderr"} & {
                name.name for name in node.names
            }:
                found.append(f"{node.lineno}: {node.module}")
    assert found == [], "text for people goes through gpustasis.cli.output"


def source_files() -> list[Path]:
    folders = ("src", "python", "bench", "tests", "ci", "demo", "runtime-hooks")
    suffixes = (".cpp", ".hpp", ".c", ".h", ".cu", ".py", ".pyi", ".sh", "")
    return [path for folder in folders for path in below(folder, *suffixes)]


@pytest.mark.parametrize("path", source_files(), ids=relative)
def test_no_file_is_too_long(path: Path) -> None:
    lines = path.read_bytes().count(b"\n")
    assert lines <= MAX_LINES, f"{lines} lines"


def test_no_registry_and_no_machine_is_named() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if any(host in line for host in REGISTRY_HOSTS) or MACHINE_PATHS.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    assert found == []


def test_the_table_of_errors_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, REPOSITORY / "ci/gen-errors"], capture_output=True, check=True, text=True
    ).stdout
    assert (REPOSITORY / "docs/errors.md").read_text() == made, "ci/gen-errors > docs/errors.md"
