# SPDX-License-Identifier: Apache-2.0
"""What the engines add to a checkpoint: the same job with GPU memory, dumped by criu itself, by
`podman container checkpoint`, and by a kubelet over a container runtime.

    PYTHONPATH=tests python -m campaigns.engine_times [--mib 1024] [--pairs N]
        [--docs docs/performance.md]

With our plugin, and with GPU memory left to CRIU (`externalize = false`), in turns; the job runs on
each time. Archives are not compressed by the engine; everything is in a tmpfs. With --docs the
figures go between two marks of that page. Needs root, and what ci/kubernetes makes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpustasis.emulator import find_directory
from gpustasis_bench.bench.markdown import replace_between, require_place
from support.containerd_node import ContainerdNode
from support.crio_node import CrioNode
from support.engine_gpu import SteadyContainer, write_config
from support.engine_image import import_image
from support.kubernetes_node import ADDRESS, KubernetesNode, node_root
from support.kubernetes_objects import PLACE

REPOSITORY = Path(__file__).resolve().parent.parent.parent
BEGIN, END = "<!-- engines:begin -->", "<!-- engines:end -->"
CONTENDERS = {"ours": (), "stock": ("externalize = false",)}
TIMEOUT_S = 300.0
_LOG = "/tmp/job.log"
_MIB = 1 << 20

Way = Callable[[], float]
Times = dict[tuple[str, str], list[float]]  # way, contender -> seconds


class _Containerd(ContainerdNode):
    gpu_memory = "4GiB"


class _Crio(CrioNode):
    gpu_memory = "4GiB"


def compile_job(work: Path) -> Path:
    """tests/programs/steady_job.c; cuda.h is in $CUDA_INCLUDE."""
    program = work / "steady_job"
    subprocess.run(
        [
            *("cc", "-std=gnu11", "-O2", "-pthread", "-isystem", os.environ["CUDA_INCLUDE"]),
            *("-o", program, REPOSITORY / "tests/programs/steady_job.c"),
            *(f"-L{find_directory()}", "-l:libcuda.so.1"),
        ],
        check=True,
    )
    return program


def timed(cluster: KubernetesNode, *words: str | Path) -> float:
    begin = time.monotonic()
    cluster.root.run(*words, timeout_s=TIMEOUT_S)
    return time.monotonic() - begin


def by_criu(cluster: KubernetesNode, program: Path, mib: int) -> Way:
    """The job is no container."""
    root = cluster.root
    inside = Path("/usr/local/bin") / program.name
    root.path(inside).write_bytes(program.read_bytes())
    root.path(inside).chmod(0o755)
    environ = {"LD_LIBRARY_PATH": str(find_directory())}
    script = f"setsid {inside} --mib {mib} >{_LOG} 2>&1 </dev/null &"
    root.run("sh", "-c", script, environ=environ)
    pid = root.run("pgrep", "-x", program.name).stdout.strip()
    wait_for_steps(lambda: root.path(_LOG).read_text())

    def way() -> float:
        root.run("sh", "-c", "rm -rf /tmp/images && mkdir /tmp/images")
        words = ("criu", "dump", "--tree", pid, "--images-dir", "/tmp/images", "--leave-running")
        return timed(cluster, *words, "--manage-cgroups=ignore")

    return way


def by_podman(cluster: KubernetesNode, program: Path, mib: int) -> Way:
    root = cluster.root
    import_image(root, [program])
    container = SteadyContainer.run(root, "timed", "runc", mib=mib)
    wait_for_steps(container.output)

    def way() -> float:
        root.path("/tmp/timed.tar").unlink(missing_ok=True)
        words = ("podman", "container", "checkpoint", "--leave-running", "--compress", "none")
        return timed(cluster, *words, "--export", "/tmp/timed.tar", container.name)

    return way


def by_kubelet(cluster: KubernetesNode, mib: int) -> Way:
    pod = cluster.job("timed", "--mib", str(mib))

    def way() -> float:
        cluster.root.run("sh", "-c", "rm -f /var/lib/kubelet/checkpoints/*")
        return timed(
            cluster,
            *("curl", "--silent", "--fail-with-body", "--request", "POST"),
            *("--cacert", PLACE / "ca.pem", "--cert", PLACE / "admin-client.pem"),
            *("--key", PLACE / "admin-client.key"),
            f"https://{ADDRESS}:10250/checkpoint/{pod.path}",
        )

    return way


def wait_for_steps(output: Callable[[], str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while output().count(" ok\n") < 2:
        assert time.monotonic() < deadline, output()[-2000:]
        time.sleep(0.1)


def measure(cluster: KubernetesNode, name: str, way: Way, pairs: int, found: Times) -> None:
    """In turns; the first of each contender counts for nothing."""
    for turn in range(pairs + 1):
        for contender in list(CONTENDERS)[:: -1 if turn % 2 else 1]:
            write_config(cluster.root, *CONTENDERS[contender])
            seconds = way()
            print(f"{name}, {contender}: {seconds:.2f} s", flush=True)
            if turn:
                found.setdefault((name, contender), []).append(seconds)
    cluster.root.run("pkill", "-KILL", "-x", "steady_job", check=False)


def run(mib: int, pairs: int, work: Path) -> Times:
    """All ways, the kubelet's with each runtime."""
    found: Times = {}
    program = compile_job(work)
    runtimes: tuple[type[_Containerd | _Crio], ...] = (_Containerd, _Crio)
    for runtime in runtimes:
        place, secrets = (Path(tempfile.mkdtemp(dir=work)) for _ in range(2))
        tests = REPOSITORY / "tests"
        with (
            node_root(place, tests) as root,
            KubernetesNode(root, program, secrets, tests, runtime) as cluster,
        ):
            if runtime is _Containerd:
                measure(cluster, "criu", by_criu(cluster, program, mib), pairs, found)
                measure(cluster, "Podman", by_podman(cluster, program, mib), pairs, found)
                root.run("podman", "rm", "--force", "--time", "0", "timed")
            way = by_kubelet(cluster, mib)
            measure(cluster, f"a kubelet, {runtime.name}", way, pairs, found)
            cluster.delete_all_pods()
    return found


def page_text(found: Mapping[tuple[str, str], list[float]], mib: int) -> str:
    """The figures, in Markdown."""
    rows = [
        "| by | with the plugin, s | GPU memory left to CRIU, s | more than criu alone, s |",
        "| --- | --- | --- | --- |",
    ]
    base = {name: statistics.median(found["criu", name]) for name in CONTENDERS}
    for way in dict.fromkeys(name for name, _ in found):
        cells = [cell(found[way, contender]) for contender in CONTENDERS]
        more = [statistics.median(found[way, name]) - base[name] for name in CONTENDERS]
        rows.append(f"| {way} | {' | '.join(cells)} | {more[0]:+.2f} and {more[1]:+.2f} |")
    pairs = len(found["criu", "ours"])
    how = (
        f"{mib} MiB of GPU memory, on the driver **emulator** without its time for copies. Medians "
        f"of {pairs}, least and most in brackets; *more than criu alone* is the difference of "
        "medians, with the plugin and without."
    )
    return f"{how}\n\n" + "\n".join(rows) + "\n"


def cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} ... {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024, help="of GPU memory")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/engine-times")
    parser.add_argument("--docs", type=Path, help="the page that shows the figures")
    given = parser.parse_args()
    if given.docs is not None:
        require_place(given.docs, BEGIN, END)
    given.work.mkdir(parents=True, exist_ok=True)
    text = page_text(run(given.mib, given.pairs, given.work), given.mib)
    print(text)
    if given.docs is not None:
        replace_between(given.docs, BEGIN, END, text)


if __name__ == "__main__":
    main()
