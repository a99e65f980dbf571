# SPDX-License-Identifier: Apache-2.0
"""The part of docs/performance.md that ci/bench-podman writes."""

from __future__ import annotations

from typing import Any

BEGIN, END = "<!-- podman:begin -->", "<!-- podman:end -->"
_NAMES = {
    "ours": "with the plugin",
    "ours, incremental": "with it, incremental, {changed} % changed since the last",
    "stock": "GPU memory left to CRIU (`externalize = false`)",
}
_MIB = 1 << 20


def page_text(podman: dict[str, Any]) -> str:
    """The section `podman` of a report, in Markdown."""
    changed = podman["changed_percent"]
    found = {(one["contender"], one["compress"]): one for one in podman["results"]}
    compressions = list(dict.fromkeys(compress for _, compress in found))
    rows = [
        "| | " + " | ".join(f"`--compress {compress}`" for compress in compressions) + " |",
        "| --- |" + " --- |" * len(compressions),
    ]
    for contender, name in _NAMES.items():
        cells = [_cell(found[contender, compress]) for compress in compressions]
        rows.append(f"| {name.format(changed=changed)} | " + " | ".join(cells) + " |")
    drivers = [one["driver_seconds"] for one in podman["results"]]
    base = podman["base"]
    shares = [
        f"{_NAMES[contender].format(changed=changed)}: {one['seconds_of_stock']:.2f} of the time "
        f"and {one['bytes_of_stock']:.2f} of the space"
        for (contender, compress), one in found.items()
        if contender != base["contender"] and compress == base["compress"]
    ]
    how = (
        f"{podman['gpu_bytes'] / _MIB:.0f} MiB of GPU memory, contents `{podman['workload']}`. "
        "Before "
        f"every export the container overwrites {changed} % of it "
        f"({podman['changed_bytes'] / _MIB:.0f} MiB), always the same blocks of 2 MiB, with noise "
        "that "
        "does not compress.\nAn incremental export stores what has changed: a job that writes to "
        "more "
        "of its memory gains less, one that writes to all of it nothing.\n"
        f"Median of {podman['pairs']}, in a tmpfs, driver **emulator**, load average "
        f"{podman['load_average']:.1f}; {', '.join(podman['versions'])}."
    )
    against = (
        f"Of each, {min(drivers):.1f} to {max(drivers):.1f} s are the emulator's copy to host "
        "memory. "
        f"With `--compress {base['compress']}`, against {_NAMES[base['contender']]}:\n"
        + ";\n".join(shares)
        + "."
    )
    return "\n\n".join([how, "\n".join(rows), against]) + "\n"


def _cell(one: dict[str, Any]) -> str:
    return f"{one['seconds']:.1f} s, {one['bytes'] / 1e6:.0f} MB"
