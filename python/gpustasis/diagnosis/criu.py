"""CRIU, and our plugin as it would load it."""

from __future__ import annotations

from collections.abc import Mapping

from gpustasis import process
from gpustasis.criu import run
from gpustasis.criu.find import Criu, choose, find_all
from gpustasis.criu.plugin import PLUGIN_NAME, find_config, plugin_directory, read_config
from gpustasis.diagnosis.finding import Finding, note, ok, problem
from gpustasis.errors import CheckpointError, CriuError, UnsupportedError

_LINES_SHOWN = 3


def check(environ: Mapping[str, str], explicit: str | None) -> list[Finding]:
    """explicit: as for find_all."""
    candidates = find_all(environ, explicit)
    try:
        chosen = choose(candidates)
    except CriuError as exc:
        install = "install criu >= 4.1, or name one with --criu or GPUSTASIS_CRIU"
        return [problem("CRIU", str(exc), install), _configuration(environ)]
    findings = [ok("CRIU", f"{chosen.version_text}, {chosen.program} ({chosen.origin})")]
    findings += [_passed_over(other) for other in candidates if not other.usable]
    return [
        *findings,
        _self_check(chosen, environ),
        _plugin(chosen, environ),
        _configuration(environ),
    ]


def _passed_over(criu: Criu) -> Finding:
    reason = criu.problem or f"version {criu.version_text} is too old"
    return note("CRIU", f"{criu.program} is not used: {reason}")


def _self_check(criu: Criu, environ: Mapping[str, str]) -> Finding:
    name = "criu check"
    try:
        ended = run.check(criu, environ)
    except OSError as exc:
        return problem(name, str(exc), "see whether criu runs at all")
    if ended.status == 0:
        return ok(name, "Looks good.")
    lines = [line for line in ended.output.splitlines() if "Error" in line]
    text = "; ".join(lines[:_LINES_SHOWN]) or ended.ending
    return problem(name, text, "run as root; else the kernel lacks what is named here")


def _plugin(criu: Criu, environ: Mapping[str, str]) -> Finding:
    name = "plugin"
    try:
        directory = plugin_directory(environ)
    except UnsupportedError as exc:
        return problem(name, str(exc), "install gpustasis anew")
    plugin = directory / PLUGIN_NAME
    others = sorted(item.name for item in directory.glob("*.so") if item != plugin)
    if others:
        text = f"{directory} holds {', '.join(others)} as well, which criu would load too"
        return problem(name, text, "keep the plugin in a directory of its own")
    ended = process.run([*criu.loader(environ), "--list", str(plugin)], timeout_s=60)
    lacking = [line.strip() for line in ended.output.splitlines() if "not found" in line]
    if ended.status != 0 or lacking:
        text = "; ".join(lacking) or ended.output.strip() or ended.ending
        return problem(name, f"{plugin} does not load: {text}", "install what is not found")
    return ok(name, str(plugin))


def _configuration(environ: Mapping[str, str]) -> Finding:
    name = "configuration"
    path = find_config(environ)
    if path is None:
        return ok(name, "defaults; there is no file")
    try:
        read_config(path)
    except CheckpointError as exc:
        return problem(name, str(exc), "mend the file; docs/operating.md explains every key")
    return ok(name, str(path))
