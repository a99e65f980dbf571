"""What the OCI hook does for one container: its policy file, and retention in its store."""

from __future__ import annotations

import json
import os
import stat

from gpustasis.errors import CheckpointError, PolicyError
from gpustasis.policy import (
    MAX_FILE_BYTES,
    POLICY_DIRECTORY,
    PREFIX,
    STORE_DIRECTORY,
    format_policy,
    is_container_id,
    keep_of,
    parse_annotations,
    shown,
)

REFUSAL_SUFFIX = ".refused"  # why a container did not start
MARK_SUFFIX = ".checkpointed"  # of a container that ended by a checkpoint; the plugin makes it
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_CGROUP_BYTES = 1 << 20


class State:
    """Of the runtime's state only this. pid: 0: no process."""

    __slots__ = ("annotations", "container_id", "pid", "status")

    def __init__(
        self, container_id: str, status: str, pid: int, annotations: dict[str, object]
    ) -> None:
        self.container_id = container_id
        self.status = status
        self.pid = pid
        self.annotations = annotations


def read_state(raw: bytes, limit: int) -> State:
    """Raises PolicyError if this is no state of at most `limit` bytes."""
    if len(raw) > limit:
        raise PolicyError(f"the state on stdin is longer than {limit} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise PolicyError(f"the state on stdin is no JSON: {shown(exc)}") from exc
    if not isinstance(found, dict):
        raise PolicyError("the state on stdin is no JSON object")
    container_id, status = found.get("id"), found.get("status")
    pid, annotations = found.get("pid", 0), found.get("annotations")
    if not isinstance(container_id, str) or not isinstance(status, str):
        raise PolicyError("the state on stdin has no id or no status")
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 <= pid < 2**31:
        raise PolicyError(f"the state on stdin: pid = {shown(pid)}: is no process id")
    if annotations is None:
        annotations = {}
    if not isinstance(annotations, dict):
        raise PolicyError("the state on stdin: annotations is no JSON object")
    return State(container_id, status, pid, annotations)


def keep_policy(state: State) -> None:
    """Write the policy file of a container with annotations of ours; do nothing for another.

    Raises PolicyError: the container must not start.
    """
    policy = parse_annotations(state.annotations)
    if policy is None:
        return
    if not is_container_id(state.container_id):
        raise PolicyError(
            f'container "{shown(state.container_id)}": annotations {PREFIX}* need an id of 64 hex '
            "digits, by which a checkpoint finds what they say"
        )
    _require_cgroup(state)
    text = format_policy(policy, state.container_id)
    if len(encoded := text.encode()) > MAX_FILE_BYTES:
        raise PolicyError(f"the annotations {PREFIX}* need more than {MAX_FILE_BYTES} bytes")
    directory = _open_directory(POLICY_DIRECTORY, make=True)
    try:
        _write(directory, f"{state.container_id}.toml", encoded)
        for suffix in (REFUSAL_SUFFIX, MARK_SUFFIX):  # of an earlier life of it
            _remove(directory, state.container_id + suffix)
    finally:
        os.close(directory)


def keep_refusal(state: State, sentence: str) -> None:
    """Leave the sentence where it can be found, if it can be left; whatever was there of an earlier
    start of this container goes."""
    if not is_container_id(state.container_id):
        return
    try:
        directory = _open_directory(POLICY_DIRECTORY, make=True)
    except PolicyError:  # the sentence is perhaps about this very place
        return
    try:
        _remove(directory, f"{state.container_id}.toml")
        _write(directory, state.container_id + REFUSAL_SUFFIX, f"{sentence}\n".encode())
    except CheckpointError:
        pass
    finally:
        os.close(directory)


def drop_policy(state: State) -> int | None:
    """Remove the policy file, if there is one, unless the container ended by a checkpoint; then
    only the mark. Return its `keep`. Raises PolicyError."""
    if not is_container_id(state.container_id):
        return None
    try:
        directory = _open_directory(POLICY_DIRECTORY, make=False)
    except FileNotFoundError:
        return None
    name = f"{state.container_id}.toml"
    try:
        text = _read(directory, name)
        if not _remove(directory, state.container_id + MARK_SUFFIX):
            _remove(directory, name)
    finally:
        os.close(directory)
    if text is None:
        return None
    try:
        return keep_of(text)
    except PolicyError as exc:
        raise PolicyError(f"{POLICY_DIRECTORY}/{name}: {exc}") from exc


def apply_retention(container_id: str, keep: int) -> None:
    """Let the newest `keep` checkpoints of the container's store stay, and what they are built on.

    Raises CheckpointError.
    """
    place = f"{STORE_DIRECTORY}/{container_id}"
    if not os.path.isdir(place):
        return
    from pathlib import Path

    from gpustasis.image.lock import allow_many_files
    from gpustasis.store.prune import prune
    from gpustasis.store.retention import Rules

    allow_many_files()
    prune(Path(place), Rules(last=keep))


def _require_cgroup(state: State) -> None:
    """Raises PolicyError if the container's process is in no cgroup that carries its id."""
    path = f"/proc/{state.pid}/cgroup"
    try:
        with open(path, "rb") as file:
            found = file.read(_MAX_CGROUP_BYTES)
    except OSError as exc:
        raise PolicyError(f"cannot read {path}: {exc.strerror}") from exc
    if state.container_id.encode() not in found:
        raise PolicyError(
            f"container {state.container_id}: no cgroup of its process carries its id, by which a "
            f"checkpoint finds what its annotations {PREFIX}* say"
        )


def _open_directory(path: str, *, make: bool) -> int:
    """A descriptor; the last two parts are ours: no links, and nobody else can write there.

    Raises FileNotFoundError if it is missing and not to be made; PolicyError.
    """
    parent, name = os.path.split(path)
    base, parent_name = os.path.split(parent)
    try:
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise PolicyError(f"cannot open {base}: {exc.strerror}") from exc
    for part, whole in ((parent_name, parent), (name, path)):
        above = descriptor
        try:
            if make:
                _make_directory(above, part)
            descriptor = os.open(part, _DIRECTORY, dir_fd=above)
        except OSError as exc:
            if isinstance(exc, FileNotFoundError) and not make:
                raise
            raise PolicyError(f"cannot open {whole}: {exc.strerror}") from exc
        finally:
            os.close(above)
        _require_ours(descriptor, whole)
    return descriptor


def _make_directory(above: int, name: str) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        pass


def _require_ours(descriptor: int, path: str) -> None:
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        os.close(descriptor)
        raise PolicyError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: "
            "others could write there"
        )


def _write(directory: int, name: str, text: bytes) -> None:
    """Under its name it is whole. Synced it need not be: it does not outlive the machine."""
    part = f".{name}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    _remove(directory, part)
    try:
        descriptor = os.open(part, flags, 0o600, dir_fd=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(text)
            os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            _remove(directory, part)
            raise
    except OSError as exc:
        raise PolicyError(f"cannot write {POLICY_DIRECTORY}/{name}: {exc.strerror}") from exc


def _read(directory: int, name: str) -> str | None:
    """None: it is not there. Raises CheckpointError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(name, flags, dir_fd=directory), "rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise CheckpointError(f"cannot read {POLICY_DIRECTORY}/{name}: {exc.strerror}") from exc


def _remove(directory: int, name: str) -> bool:
    """Whether it was there. Raises CheckpointError."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise CheckpointError(f"cannot remove {POLICY_DIRECTORY}/{name}: {exc.strerror}") from exc
    return True
