# SPDX-License-Identifier: Apache-2.0
"""`ci/soak [--seed N] [--fresh] [--docs] [CAMPAIGN...]`: run the long campaigns.

Each campaign's result is kept in build/soak/; one that has a result for the same seed and the same
tree (sources, tests and what is installed) is not run again, unless it is named, so that what was
broken off can be taken up. The report is build/soak.json; --docs puts it into docs/soak.json, which
holds each campaign as it was last run, and writes docs/soak.md from that, and what job-faults,
recovery and job-cost have found into docs/reliability.md. Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpustasis
from campaigns.rig import GPU_MEMORY, Programs, Rig
from campaigns.tally import Tally
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import PLUGIN_NAME, plugin_directory
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of, library_directory
from gpustasis_bench.bench.programs import compile_program as compile_packaged
from soak import job_table, report
from soak.bench import Bench
from soak.plan import CAMPAIGNS, REPOSITORY
from support.criu_roots import criu_versions
from support.kernels import compile_kernels

DRIVER = "580.95.05"
PROGRAMS = REPOSITORY / "tests" / "programs"
WORK = REPOSITORY / "build" / "soak"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> int:
    arguments = parse_arguments()
    # A restored job's parent, criu, ends at once; then the job is ours, so that its end is seen.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")
    results = WORK / "results"
    if arguments.fresh:
        shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    identity = {"seed": arguments.seed, "tree": tree_digest()}
    versions = criu_versions()
    if not versions:
        raise SystemExit("no CRIU was found: ci/test-root all")
    print(f"soak on the emulator: seed {arguments.seed}, CRIU {', '.join(texts(versions))}")
    for name in arguments.campaigns or CAMPAIGNS:
        stored = results / f"{name}.json"
        if not arguments.campaigns and read_result(stored, identity) is not None:
            print(f"  {name}: has a result already")
            continue
        with bench(versions, arguments.seed) as place:
            parts = run_campaign(name, place)
        stored.write_text(json.dumps(identity | {"parts": parts}), encoding="utf-8")
    found = {name: read_result(results / f"{name}.json", identity) for name in CAMPAIGNS}
    whole = {
        "version": report.VERSION,
        "seed": arguments.seed,
        "machine": report.describe_machine(texts(versions), DRIVER, gpustasis.__version__),
        "campaigns": {name: parts for name, parts in found.items() if parts is not None},
        "missing": [name for name, parts in found.items() if parts is None],
    }
    report.write_json(REPOSITORY / "build" / "soak.json", whole)
    if arguments.docs:
        docs = REPOSITORY / "docs"
        report.write_markdown(docs / "soak.md", report.remember(docs / "soak.json", whole))
        job_table.write(docs / "reliability.md", whole)
    failed = sum(len(part["failures"]) for parts in found.values() for part in parts or [])
    missing = f", not run: {', '.join(whole['missing'])}" if whole["missing"] else ""
    print(f"soak on the emulator: {failed} failures{missing}; report: build/soak.json")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--docs", action="store_true", help="write the pages of docs too")
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=", ".join(CAMPAIGNS))
    arguments = parser.parse_args()
    if unknown := set(arguments.campaigns) - set(CAMPAIGNS):
        parser.error(f"no such campaign: {', '.join(sorted(unknown))}")
    return arguments


def run_campaign(name: str, place: Bench) -> list[dict[str, Any]]:
    parts = []
    begin = time.monotonic()
    for part, tally in counted(guarded(CAMPAIGNS[name][1](place))):
        seconds = time.monotonic() - begin
        parts.append(report.describe_part(part, tally, seconds))
        failed = len(tally.failures)
        print(f"  {name}, {part}: {tally.trials} trials, {failed} failed, {seconds:.0f} s")
        for failure in tally.failures:
            print("    " + failure.replace("\n", "\n    "))
        sys.stdout.flush()
        begin = time.monotonic()
    return parts


def guarded(parts: Iterator[tuple[str, Tally]]) -> Iterator[tuple[str, Tally]]:
    """A campaign that cannot go on has failed; the others are run all the same."""
    try:
        yield from parts
    except (AssertionError, OSError, subprocess.SubprocessError) as broken:
        yield report.BROKEN_OFF, Tally(Counter(trials=1), [f"{type(broken).__name__}: {broken}"])


def counted(parts: Iterator[tuple[str, Tally]]) -> Iterator[tuple[str, Tally]]:
    """What has tried nothing has failed: no failure of it would say anything."""
    none = True
    for part, tally in parts:
        none = False
        if not tally.trials:
            tally.failures.append("no trial was made")
        yield part, tally
    if none:
        yield "nothing", Tally(failures=["no part of it can be run here"])


def read_result(path: Path, identity: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The parts of a campaign that was run like this; None: it was not."""
    if not path.exists():
        return None
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if any(stored[key] != value for key, value in identity.items()):
        return None
    parts: list[dict[str, Any]] = stored["parts"]
    return parts


def tree_digest() -> str:
    """Of every file that git knows or would add, docs aside, and of the plugin that is
    installed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", ":!docs", ":!*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    digest = hashlib.sha256((plugin_directory() / PLUGIN_NAME).read_bytes())
    for name in sorted(os.fsdecode(word) for word in listed.stdout.split(b"\0") if word):
        path = REPOSITORY / name
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def texts(versions: tuple[Criu, ...]) -> list[str]:
    return [criu.version_text for criu in versions]


@contextmanager
def bench(versions: tuple[Criu, ...], seed: int) -> Iterator[Bench]:
    """A fresh place to work with an emulator of its own; what is in it is removed afterwards."""
    scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=WORK))  # campaigns may run side by side
    library = library_directory(api_version_of(DRIVER))
    cuda = [f"-isystem{os.environ['CUDA_INCLUDE']}", f"-L{library}", "-l:libcuda.so.1"]
    job = compile_program("steady_job", scratch, *cuda)
    marked = compile_program("marked_job", scratch, *cuda)
    tiny = compile_program("tiny_job", scratch, "-static")
    killer = compile_program("kill_at_syscall", scratch)
    kernels = compile_kernels(PROGRAMS / "steady_kernels.cu", scratch)
    programs = Programs(job=job, kernels=kernels, killer=killer, marked=marked, tiny=tiny)
    cost = compile_packaged("hook_cost", scratch)
    emulator = Emulator(path=scratch / "emulator" / "socket")
    emulator.start(Options(gpus=2, memory_bytes=GPU_MEMORY, driver=DRIVER, rates=RATES_OFF))
    environ = dict(os.environ) | emulator.environment(api_version_of(DRIVER))
    rigs = []
    for criu in versions:
        place = scratch / criu.version_text
        place.mkdir()
        rigs.append(Rig(criu, emulator, environ, programs, place))
    try:
        yield Bench(tuple(rigs), cost, seed)
    finally:
        emulator.stop()
    shutil.rmtree(scratch)


def compile_program(name: str, folder: Path, *flags: str) -> Path:
    program = folder / name
    subprocess.run(
        ["cc", "-O1", "-g", "-Wall", "-Wextra", "-o", program, PROGRAMS / f"{name}.c", *flags],
        check=True,
    )
    return program


if __name__ == "__main__":
    sys.exit(main())
