# SPDX-License-Identifier: Apache-2.0
"""The OCI hook: at createRuntime a policy file is made of annotations, at poststop it goes again.

The runtime gives the container's state as JSON on stdin (OCI runtime specification, "State" and
"Hooks"). At createRuntime a status other than 0 stops the start of the container, and what stands
on stderr is shown to the user. At poststop runtimes go on whatever happens.

crun gives hooks /dev/null as stderr, and says only that one failed. It was itself given a log by
the engine, `--log FILE --log-format=json`, and a stderr. Podman shows what either of them says;
CRI-O shows stderr. So the sentence is written to both. It also stays beside the policies as
ID.refused until the container is started again.

Hooks do not run at a checkpoint, and crun runs none at a restore. So a policy file outlives the
container if it ended by a checkpoint: the plugin leaves a mark beside the file then, and the next
poststop takes the mark instead of the file. A container that comes back under its id finds its
policy there. That of a rank of a job stays in any case: a restore that is refused, or fails, ends
with a poststop as well, and the next one would not be known for a rank's.

A container without our annotations waits for the start of Python and a look at the state: what is
imported, is imported late.
"""

from __future__ import annotations

import itertools
import os
import sys

from gpustasis import files, policy
from gpustasis.errors import CheckpointError, PolicyError
from gpustasis.text import safe_lines

STAGES = ("createRuntime", "poststop")
MAX_STATE_BYTES = 1 << 20
REFUSAL_SUFFIX = ".refused"  # why a container did not start
MARK_SUFFIX = ".checkpointed"  # of a container that ended by a checkpoint; the plugin makes it
_MAX_CGROUP_BYTES = 1 << 20
_MAX_COMMAND_BYTES = 1 << 16


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. arguments: nothing, or the stage; without it the state tells."""
    words = sys.argv[1:] if arguments is None else arguments
    raw = sys.stdin.buffer.read(MAX_STATE_BYTES + 1)
    if words in ([], ["createRuntime"]) and _has_nothing_of_ours(raw):
        return 0
    state, stage = None, ""
    try:
        if len(words) > 1 or (words and words[0] not in STAGES):
            raise CheckpointError(f"usage: oci-hook [{'|'.join(STAGES)}] <STATE")
        state = read_state(raw)
        # At a restore runc says "stopped" too, but of a container that has a process.
        stage = words[0] if words else STAGES[state.status == "stopped" and state.pid == 0]
        if stage == "createRuntime":
            keep_policy(state)
        elif (keep := drop_policy(state)) is not None:
            apply_retention(state.container_id, keep)
    except CheckpointError as exc:
        print(safe_lines(f"gpustasis: {exc}"), file=sys.stderr)
        if _is_discarded():
            _tell_runtime(f"gpustasis: {exc}")
        if state is not None and stage == "createRuntime":
            keep_refusal(state, str(exc))
        return 1
    return 0


def _has_nothing_of_ours(raw: bytes) -> bool:
    r"""Whether it can be told without reading the JSON, which may write any letter as \uXXXX, that
    there is no annotation of ours, and that this is not the end of a container."""
    whole = len(raw) <= MAX_STATE_BYTES
    return whole and b"gpustasis" not in raw and b"\\u" not in raw and b'"stopped"' not in raw


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


def read_state(raw: bytes) -> State:
    """Raises PolicyError if this is no state of at most MAX_STATE_BYTES bytes."""
    import json

    if len(raw) > MAX_STATE_BYTES:
        raise PolicyError(f"the state on stdin is longer than {MAX_STATE_BYTES} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise PolicyError(f"the state on stdin is no JSON: {policy.shown(exc)}") from exc
    if not isinstance(found, dict):
        raise PolicyError("the state on stdin is no JSON object")
    container_id, status = found.get("id"), found.get("status")
    pid, annotations = found.get("pid", 0), found.get("annotations")
    if not isinstance(container_id, str) or not isinstance(status, str):
        raise PolicyError("the state on stdin has no id or no status")
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 <= pid < 2**31:
        raise PolicyError(f"the state on stdin: pid = {policy.shown(pid)}: is no process id")
    if annotations is None:
        annotations = {}
    if not isinstance(annotations, dict):
        raise PolicyError("the state on stdin: annotations is no JSON object")
    return State(container_id, status, pid, annotations)


def keep_policy(state: State) -> None:
    """Write the policy file of a container with annotations of ours; do nothing for another.

    Raises PolicyError: the container must not start.
    """
    wanted = policy.parse_annotations(state.annotations)
    if wanted is None:
        return
    if not policy.is_container_id(state.container_id):
        raise PolicyError(
            f'container "{policy.shown(state.container_id)}": annotations {policy.PREFIX}* need an '
            "id of 64 hex digits, by which a checkpoint finds what they say"
        )
    _require_cgroup(state)
    encoded = policy.format_policy(wanted, state.container_id).encode()
    if len(encoded) > policy.MAX_FILE_BYTES:
        raise PolicyError(
            f"the annotations {policy.PREFIX}* need more than {policy.MAX_FILE_BYTES} bytes"
        )
    directory = _open_policies(make=True)
    try:
        _write(directory, f"{state.container_id}.toml", encoded)
        for suffix in (REFUSAL_SUFFIX, MARK_SUFFIX):  # of an earlier life of it
            _remove(directory, state.container_id + suffix)
    finally:
        os.close(directory)


def keep_refusal(state: State, sentence: str) -> None:
    """Leave the sentence where it can be found, if it can be left; whatever was there of an earlier
    start of this container goes."""
    if not policy.is_container_id(state.container_id):
        return
    try:
        directory = _open_policies(make=True)
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
    """Remove the policy file, if there is one, unless the container ended by a checkpoint, or is a
    rank of a job; and the mark. Return its `keep`. Raises PolicyError."""
    if not policy.is_container_id(state.container_id):
        return None
    try:
        directory = _open_policies(make=False)
    except FileNotFoundError:
        return None
    name = f"{state.container_id}.toml"
    try:
        text = _read(directory, name)
        if not _remove(directory, state.container_id + MARK_SUFFIX) and not _is_ranks(text):
            _remove(directory, name)
    finally:
        os.close(directory)
    if text is None:
        return None
    try:
        return policy.keep_of(text)
    except PolicyError as exc:
        raise PolicyError(f"{policy.POLICY_DIRECTORY}/{name}: {exc}") from exc


def _is_ranks(text: str | None) -> bool:
    try:
        return text is not None and policy.rank_of(text) is not None
    except PolicyError:
        return False


def apply_retention(container_id: str, keep: int) -> None:
    """Let the newest `keep` checkpoints of the container's store stay, and what they are built on.

    Raises CheckpointError, also where the store is a link, or others could write there.
    """
    place = f"{policy.STORE_DIRECTORY}/{container_id}"
    try:  # the same look as the plugin's
        os.close(files.open_own_directory(place, 3))
    except FileNotFoundError:
        return
    except OSError as exc:
        raise CheckpointError(f"cannot use {exc.filename}: {exc.strerror}") from exc
    from pathlib import Path

    from gpustasis.image.directory import allow_many_files
    from gpustasis.image.prune import Rules, prune

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
            f"checkpoint finds what its annotations {policy.PREFIX}* say"
        )


def _open_policies(*, make: bool) -> int:
    """Raises FileNotFoundError if the directory is missing and not to be made; PolicyError."""
    try:
        return files.open_own_directory(policy.POLICY_DIRECTORY, 2, 0o700 if make else None)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and not make:
            raise
        raise PolicyError(f"cannot use {exc.filename}: {exc.strerror}") from exc


def _write(directory: int, name: str, text: bytes) -> None:
    """Under its name it is whole. Synced it need not be: it does not outlive the machine."""
    try:
        files.replace_file(directory, name, text, 0o600, durable=False)
    except OSError as exc:
        raise PolicyError(f"cannot write {policy.POLICY_DIRECTORY}/{name}: {exc.strerror}") from exc


def _read(directory: int, name: str) -> str | None:
    """None: it is not there. Raises PolicyError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(name, flags, dir_fd=directory), "rb") as file:
            return file.read(policy.MAX_FILE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise PolicyError(f"cannot read {policy.POLICY_DIRECTORY}/{name}: {exc.strerror}") from exc


def _remove(directory: int, name: str) -> bool:
    """Whether it was there. Raises PolicyError."""
    try:
        return files.remove(directory, name)
    except OSError as exc:
        path = f"{policy.POLICY_DIRECTORY}/{name}"
        raise PolicyError(f"cannot remove {path}: {exc.strerror}") from exc


def _is_discarded() -> bool:
    """Whether stderr is /dev/null."""
    try:
        return os.fstat(2).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


def _tell_runtime(sentence: str) -> None:
    """Write it to the log and to the stderr of the parent process, if they are there. What of this
    cannot be done is left: the start is refused all the same."""
    import json

    parent = os.getppid()
    log = _log_of(parent)
    if log is not None:
        entry = {"msg": sentence, "level": "error"}
        _append(log, json.dumps(entry) + "\n", os.O_NOFOLLOW)
    _append(f"/proc/{parent}/fd/2", sentence + "\n", 0)


def _log_of(pid: int) -> str | None:
    """The JSON log that a runtime was given on its command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = os.fsdecode(file.read(_MAX_COMMAND_BYTES)).split("\0")
    except OSError:
        return None
    if "--log-format=json" not in words:
        return None
    for word, following in itertools.pairwise(words):
        if word == "--log":
            return following
        if word.startswith("--log="):
            return word.removeprefix("--log=")
    return None


def _append(path: str, text: str, flags: int) -> None:
    """Without waiting for a reader, and without making a file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError:
        return
    try:
        os.write(descriptor, text.encode())
    except OSError:
        pass
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
