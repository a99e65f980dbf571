# SPDX-License-Identifier: Apache-2.0
"""Installing, and undoing it. Both may be killed at any moment and run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from gpustasis.errors import InstallError
from gpustasis.install import bundle, layout, record
from gpustasis.install.bundle import Bundle
from gpustasis.install.change import (
    MAX_CONFIGURATION,
    Action,
    Change,
    cut_block,
    digest,
    find_block,
    of_file,
    of_lines,
)
from gpustasis.install.record import Entry, Record
from gpustasis.install.root import Root

Report = Callable[[Change], None]


def install(
    root: Root,
    version: str,
    python: str,
    report: Report,
    dry_run: bool = False,
    tree: Bundle | None = None,
) -> tuple[str, ...]:
    """Bring the root to what this version installs; the directories that were missing.

    version: of gpustasis. python: the hook's interpreter, as a path in the root. report: is called
    for each path, before anything is done to it. tree: this program's own, to be put there too.

    Everything is looked at before anything is changed. Raises InstallError that names every
    obstacle, or that the kernel refuses something half-way: what was done is on record then, so
    install() can go on from there and uninstall() undo it.
    """
    if not dry_run:
        record.clean(root)
    old = record.load(root)
    recorded = old.bundle if old else ()
    if recorded and not dry_run:
        with _naming(layout.BUNDLE, "nothing was changed"):
            bundle.discard_part(root)
    changes, top = _plan(root, old, python, tree)
    if dry_run:
        for change in (*top, *changes):
            report(change)
        return ()
    made = old.directories if old else ()
    paths = [change.path for change in changes if change.data is not None]
    directories = _missing(root, [*(change.path for change in top), *paths])
    if any(change.entry for change in changes):
        directories += [one for one in _missing(root, [record.RECORD]) if one not in directories]
    wanted = Record(
        version,
        (*made, *(one for one in sorted(directories) if one not in made)),
        tuple(change.entry for change in changes if change.entry is not None),
        (tree.sha256,) if tree else recorded,
    )
    again = 'run it again when that is mended, or undo it with "gpustasis uninstall"'
    if wanted != old:
        with _naming(record.RECORD, "nothing was changed"):
            record.store(root, _both(old, wanted))
    for change in (*top, *changes):
        report(change)
        with _naming(change.path, f"what was done until then is on record: {again}"):
            if change not in top:
                _carry_out(root, change, old)
            elif tree and change.action is not Action.UNCHANGED:
                _make_directories(root, change.path)
                bundle.put(root, tree)
    if wanted != old:
        with _naming(record.RECORD, again):
            record.store(root, wanted)
    return tuple(directories)


def uninstall(root: Root, report: Report, dry_run: bool = False) -> bool:
    """Undo what the record speaks of. What was changed since is left, and the report says so.

    Returns False if nothing is installed. Raises InstallError if the record is unfit, if containers
    could not start without the hook, or if the kernel refuses something: the record stays then.
    """
    if not dry_run:
        record.clean(root)
    found = record.load(root)
    if found is None:
        return False
    with _naming(layout.CONTAINERD, "nothing was changed"):
        bound = list(layout.bound_to_hook(root))
    if bound:
        raise InstallError("\n".join(bound) + "\nnothing was changed")
    for entry in reversed(found.entries):
        with _naming(entry.path, "run it again when that is mended"):
            report(_undo(root, entry, dry_run))
    if found.bundle:
        with _naming(layout.BUNDLE, "run it again when that is mended"):
            report(bundle.remove(root, found.bundle, dry_run))
    if dry_run:
        return True
    for directory in reversed(found.directories):
        above_record = record.RECORD.startswith(f"{directory}/")
        with _naming(directory, "run it again when that is mended"):
            if not above_record and not root.remove_directory(directory):
                report(Change(directory, Action.KEEP, "it is not empty"))
    with _naming(record.RECORD, "run it again when that is mended"):
        record.discard(root, found)
    return True


def _plan(
    root: Root, old: Record | None, python: str, tree: Bundle | None
) -> tuple[list[Change], list[Change]]:
    """What is to be done, and what with the tree."""
    changes: list[Change] = []
    top: list[Change] = []
    obstacles: list[str] = []
    ours = layout.files(python)
    wanted: list[layout.File | layout.Lines] = [*ours, *layout.lines()]
    recorded = old.bundle if old else ()
    if tree:
        wanted += layout.commands()
        try:
            top.append(bundle.plan(root, tree, recorded))
        except InstallError as exc:
            obstacles.append(str(exc))
        except OSError as exc:
            obstacles.append(_unreadable(layout.BUNDLE, exc))
    for one in wanted:
        entry = old.entry(one.path) if old else None
        try:
            if isinstance(one, layout.File):
                changes.append(of_file(root, one, entry))
            else:
                changes.append(of_lines(root, one, entry))
        except InstallError as exc:
            obstacles.append(str(exc))
        except OSError as exc:
            obstacles.append(_unreadable(one.path, exc))
    unsafe = layout.unsafe_hook(root, python)
    plugin = b"".join(one.data for one in ours if one.path == layout.PLUGIN)
    obstacles += [*_beside_plugin(root), *unsafe, *layout.old_libc(root, plugin)]
    if obstacles:
        raise InstallError("\n".join(obstacles) + "\nnothing was changed")
    present = {one.path for one in wanted}
    for entry in old.entries if old else ():
        if recorded and entry.path in layout.COMMAND_PATHS and entry.path not in present:
            changes.append(Change(entry.path, Action.UNCHANGED, "", entry))
        elif entry.path not in present:
            changes.append(Change(entry.path, Action.REMOVE, "this version does not need it"))
    return changes, top


def _beside_plugin(root: Root) -> list[str]:
    """What criu would load as well; one sentence, or none."""
    name = layout.PLUGIN.rpartition("/")[2]
    try:
        names = root.listing(layout.PLUGIN_DIRECTORY)
    except OSError as exc:
        return [_unreadable(layout.PLUGIN_DIRECTORY, exc)]
    others = [item for item in names if item.endswith(".so") and item != name]
    if not others:
        return []
    text = f"{layout.PLUGIN_DIRECTORY} holds {', '.join(others)}, which criu would load as well"
    return [f"{text}; move that elsewhere"]


def _unreadable(path: str, exc: OSError) -> str:
    return f"cannot read {path}: {exc.strerror}; run it as root"


def _missing(root: Root, paths: list[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        found += [one for one in root.missing_directories(path) if one not in found]
    return found


def _both(old: Record | None, wanted: Record) -> Record:
    """What may be on the host until everything is done."""
    if old is None:
        return wanted
    entries = []
    for entry in wanted.entries:
        known = old.entry(entry.path)
        others = tuple(one for one in known.ours if one not in entry.ours) if known else ()
        entries.append(replace(entry, ours=entry.ours + others))
    gone = [entry for entry in old.entries if wanted.entry(entry.path) is None]
    trees = (*wanted.bundle, *(one for one in old.bundle if one not in wanted.bundle))
    return replace(wanted, entries=(*entries, *gone), bundle=trees)


def _make_directories(root: Root, path: str) -> None:
    """Those above it."""
    for directory in root.missing_directories(path):
        root.make_directory(directory)


def _carry_out(root: Root, change: Change, old: Record | None) -> None:
    root.remove_part(change.path)
    if change.data is not None:
        _make_directories(root, change.path)
        change.apply(root)
    elif change.action is Action.REMOVE and old is not None:
        entry = old.entry(change.path)
        if entry is not None:
            _undo(root, entry, dry_run=False)


@contextlib.contextmanager
def _naming(path: str, remedy: str) -> Iterator[None]:
    """What the kernel refuses becomes an InstallError that names the path."""
    try:
        yield
    except OSError as exc:
        raise InstallError(f"cannot change {path}: {exc.strerror}; {remedy}") from exc


def _undo(root: Root, entry: Entry, dry_run: bool) -> Change:
    """Put one path back as it was, unless it was changed since."""
    if not dry_run:
        root.remove_part(entry.path)
    try:
        return (
            _undo_block(root, entry, dry_run) if entry.block else _undo_file(root, entry, dry_run)
        )
    except InstallError as exc:  # it is no regular file any more
        return Change(entry.path, Action.KEEP, str(exc))


def _undo_file(root: Root, entry: Entry, dry_run: bool) -> Change:
    found = root.read(entry.path)
    if found is None:
        return Change(entry.path, Action.SKIP, "it is not there")
    if digest(found.data) not in entry.ours:
        return Change(entry.path, Action.KEEP, "it was changed since; remove it yourself")
    if not dry_run:
        root.remove(entry.path)
    return Change(entry.path, Action.REMOVE)


def _undo_block(root: Root, entry: Entry, dry_run: bool) -> Change:
    found = root.read(entry.path, MAX_CONFIGURATION)
    if found is None:
        return Change(entry.path, Action.SKIP, "it is not there")
    place = find_block(found.data, entry.path)
    if place is None:
        return Change(entry.path, Action.SKIP, "our lines are not in it")
    if digest(found.data[place.start : place.end]) not in entry.ours:
        text = f"lines {place.lines[0]} to {place.lines[1]} were changed since"
        return Change(entry.path, Action.KEEP, f"{text}; remove them yourself")
    rest, glued = cut_block(found.data, place)
    if entry.before is None and not rest:
        if not dry_run:
            root.remove(entry.path)
        return Change(entry.path, Action.REMOVE)
    before = entry.before
    was = next(
        (one for one in (rest, glued) if before is not None and digest(one) == before.sha256), None
    )
    if not dry_run:
        with contextlib.suppress(FileNotFoundError):
            if was is not None and before is not None:
                root.write(entry.path, was, 0, found, before.mtime_ns)
            else:
                root.write(entry.path, rest, 0, found)
    note = "" if was is not None else "what was written there since stays"
    return Change(entry.path, Action.RESTORE, note)
