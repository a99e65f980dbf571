# SPDX-License-Identifier: Apache-2.0
"""How long `podman container checkpoint --export` takes for a container with GPU memory, and how
large its archive is: with our plugin, the first time and on top of an earlier one, and with GPU
memory left to CRIU, as the stock plugin has it.

    PYTHONPATH=tests python -m campaigns.podman_export [--size GIB] [--pairs N] [--changed PERCENT]
        [--out bench.json] [--docs docs/performance.md]

Before every export, whoever makes it, the container overwrites the same PERCENT of its GPU memory
with new noise: so much an incremental export has to store, and all find memory of the same kind.

The figures become the section `podman` of the file that `gpustasis-bench` has written, or of a new
one, and with --docs what stands between two marks of that page. Everything is measured in turns, in
a tmpfs, on the driver emulator, with runc, with archives as Podman compresses them by default and
not compressed. Needs root, and the roots of ci/test-root engines and torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.podman_page import BEGIN, END, page_text
from gpustasis_bench.bench.content import WORKLOADS, Content, obtain_content
from gpustasis_bench.bench.markdown import replace_between, require_place
from gpustasis_bench.bench.programs import compile_program
from gpustasis_bench.bench.report import write_json
from support.engine_gpu import DEVICE, add_gpus, write_config
from support.engine_image import IMAGE, import_image
from support.engine_root import EngineRoot

REPOSITORY = Path(__file__).resolve().parent.parent.parent
INCREMENTAL = "ours, incremental"
CONTENDERS = {
    "ours": (),
    INCREMENTAL: ("incremental = true",),  # the container has been exported once before
    "stock": ("externalize = false",),
}
COMPRESSIONS = ("none", "zstd")
PODMAN_DEFAULT = "zstd"
BOUND = 0.5  # of stock with Podman's default
CHANGED = 10  # percent
_UNCOUNTED = 8 << 20  # bytes: what an incremental export may store beyond what was changed
WORK = "/mnt/work"
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Target:
    """The container that runs bench/gpustasis_bench/bench/target.c, which says how it is asked."""

    root: EngineRoot
    changed: int  # percent of its memory, before each export
    name: str = "target"
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def start(self, content: Content) -> None:
        self.root.path(WORK).mkdir()
        self.root.run(
            *["podman", "--runtime", "runc", "run", "--detach", "--name", self.name],
            *["--network", "none", "--device", DEVICE, "--workdir", WORK],
            *["--volume", f"{WORK}:{WORK}", "--volume", f"{content.folder}:{content.folder}:ro"],
            *[IMAGE, "/bin/target"],
        )
        self._await_answer()
        self.ask(f"load {content.layout(0)}")

    def change(self) -> int:
        """Overwrite its share of the memory; how many bytes that is."""
        return int(self.ask(f"change {self.changed} {next(self._seeds)}"))

    def ask(self, request: str) -> str:
        folder = self.root.path(WORK)
        (folder / "answer").unlink()
        (folder / "request").write_text(request + "\n")
        self.root.run("podman", "kill", "--signal", "USR1", self.name)
        return self._await_answer()

    def _await_answer(self) -> str:
        path = self.root.path(WORK) / "answer"
        deadline = time.monotonic() + TIMEOUT_S
        while not path.exists():
            assert time.monotonic() < deadline, "the target gives no answer"
            time.sleep(0.01)
        word, _, rest = path.read_text().strip().partition(" ")
        assert word == "ok", rest
        return rest


def measure(root: EngineRoot, target: Target, contender: str, compress: str) -> dict[str, Any]:
    """Change memory, and export it. The container is restored in place then, for the next; neither
    counts. Raises AssertionError if anything fails, or the memory is not what it was."""
    write_config(root, *CONTENDERS[contender])
    archive = f"/var/lib/containers/{contender}.tar"
    # Podman packs what another dump has left there as well.
    root.run(
        "sh", "-c", "rm -rf /var/lib/containers/storage/overlay-containers/*/userdata/checkpoint"
    )
    changed = target.change()
    digest = target.ask("hash")
    os.sync()
    begin = time.monotonic()
    root.run(
        *["podman", "container", "checkpoint", "--keep", "--compress", compress],
        *["--export", archive, target.name],
        timeout_s=TIMEOUT_S,
    )
    seconds = time.monotonic() - begin
    path = root.path(archive)
    storage = root.path("/var/lib/containers/storage/overlay-containers")
    (said,) = storage.glob("*/userdata/checkpoint/gpustasis-dump.json")
    dump = json.loads(said.read_text())
    (task,) = dump["tasks"]
    found = {
        "seconds": seconds,
        # The driver's copy to host memory, which no way of storing it avoids.
        "driver_seconds": task["phases_ms"]["driver_checkpoint"] / 1000,
        "bytes": path.stat().st_size,
        "changed_bytes": changed,
        # Of the memory, what is not zero and not an earlier checkpoint's.
        "stored_plain_bytes": sum(task[kind]["plain_bytes"] for kind in ("lz4", "raw")),
        "incremental": dump["parent"] is not None,
    }
    path.unlink()
    root.run("podman", "container", "restore", target.name, timeout_s=TIMEOUT_S)
    assert target.ask("hash") == digest, "GPU memory is not what it was"
    return found


def run(content: Content, work: Path, pairs: int, changed: int) -> dict[str, Any]:
    """Raises AssertionError as measure."""
    place = Path(tempfile.mkdtemp(prefix="engines-", dir=work))
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with EngineRoot(place, binds={str(content.folder): content.folder}) as root:
        import_image(root, [compile_program("target", work)])
        add_gpus(root, gpus=1, memory=str(2 * content.gpu_bytes))
        target = Target(root, changed)
        target.start(content)
        measure(root, target, INCREMENTAL, "none")  # the parent, which counts for nothing
        for turn in range(pairs):
            for compress in COMPRESSIONS:
                # Whoever is second finds the machine as the first has left it.
                for contender in list(CONTENDERS)[:: -1 if turn % 2 else 1]:
                    one = measure(root, target, contender, compress)
                    print(f"{contender} {compress}: {one['seconds']:.2f} s, {one['bytes']} bytes")
                    require_honest(contender, one)
                    found.setdefault((contender, compress), []).append(one)
        versions = root.run("sh", "-c", "podman --version; runc --version; criu --version").stdout
    place.rmdir()
    return report(content, found, pairs, changed, versions)


def require_honest(contender: str, one: dict[str, Any]) -> None:
    """Raises AssertionError if this export was not of what it is counted as."""
    assert one["incremental"] == (contender == INCREMENTAL), f"{contender}: {one}"
    if contender == INCREMENTAL:
        # What was changed was stored, and nothing like all memory.
        stored, changed = one["stored_plain_bytes"], one["changed_bytes"]
        assert changed <= stored <= changed + _UNCOUNTED, (
            f"{stored} bytes stored, {changed} changed"
        )


def report(
    content: Content,
    found: dict[tuple[str, str], list[dict[str, Any]]],
    pairs: int,
    changed: int,
    versions: str,
) -> dict[str, Any]:
    """The section: the median of each, and each as a share of stock with Podman's default."""
    results = [
        {
            "contender": contender,
            "compress": compress,
            "seconds": statistics.median(one["seconds"] for one in ones),
            "seconds_least": min(one["seconds"] for one in ones),
            "driver_seconds": statistics.median(one["driver_seconds"] for one in ones),
            "seconds_all": [one["seconds"] for one in ones],
            "bytes": round(statistics.median(one["bytes"] for one in ones)),
            "stored_plain_bytes": round(
                statistics.median(one["stored_plain_bytes"] for one in ones)
            ),
        }
        for (contender, compress), ones in found.items()
    ]
    base = _find(results, "stock", PODMAN_DEFAULT)
    for one in results:
        one["seconds_of_stock"] = one["seconds"] / base["seconds"]
        one["bytes_of_stock"] = one["bytes"] / base["bytes"]
    best = {
        contender: min(
            (one for one in results if one["contender"] == contender),
            key=lambda one: one["seconds"],
        )
        for contender in CONTENDERS
        if contender != "stock"
    }
    return {
        "workload": content.workload,
        "gpu_bytes": content.gpu_bytes,
        "changed_percent": changed,  # of it, before each export
        "changed_bytes": max(one["changed_bytes"] for ones in found.values() for one in ones),
        "backend": "emulator",
        "pairs": pairs,
        "load_average": os.getloadavg()[2],
        "versions": [
            line.replace("Version:", "criu version")
            for line in versions.splitlines()
            if "ersion" in line
        ],
        "base": {"contender": "stock", "compress": PODMAN_DEFAULT},
        "bounds": [
            {
                "contender": contender,
                "compress": one["compress"],
                "what": key,
                "bound": BOUND,
                "measured": one[f"{key}_of_stock"],
                "met": one[f"{key}_of_stock"] <= BOUND,
            }
            for contender, one in best.items()
            for key in ("seconds", "bytes")
        ],
        "results": results,
    }


def _find(results: list[dict[str, Any]], contender: str, compress: str) -> dict[str, Any]:
    return next(
        one for one in results if (one["contender"], one["compress"]) == (contender, compress)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=float, default=1.0, help="GiB of GPU memory")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--workload", default="inference", choices=list(WORKLOADS))
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/bench")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build/bench.json")
    parser.add_argument(
        "--changed", type=int, default=CHANGED, help="percent of it, before each export"
    )
    parser.add_argument("--docs", type=Path, help="the page that shows the figures")
    given = parser.parse_args()
    if given.docs is not None:
        require_place(given.docs, BEGIN, END)
    given.work.mkdir(parents=True, exist_ok=True)
    size = int(given.size * (1 << 30))
    content = obtain_content(WORKLOADS[given.workload], size, 1, given.work / "content")
    whole = json.loads(given.out.read_text()) if given.out.exists() else {}
    whole["podman"] = run(content, given.work, given.pairs, given.changed)
    write_json(whole, given.out)
    if given.docs is not None:
        replace_between(given.docs, BEGIN, END, page_text(whole["podman"]))
    for bound in whole["podman"]["bounds"]:
        print(
            f"podman: {bound['contender']}, --compress {bound['compress']}: {bound['what']} "
            f"{bound['measured']:.2f} of stock's (bound {bound['bound']})"
        )


if __name__ == "__main__":
    main()
