"""The OCI hook: at createRuntime a policy file is made of annotations, at poststop it goes again.

The runtime gives the container's state as JSON on stdin (OCI runtime specification, "State" and
"Hooks"). At createRuntime a status other than 0 stops the start of the container, and what stands
on stderr is shown to the user. At poststop runtimes go on whatever happens.

crun gives hooks no stderr; how the sentence gets out then is in runtime_log.py. It also stays
beside the policies as ID.refused until the container is started again.

Hooks do not run at a checkpoint, and crun runs none at a restore. So a policy file outlives the
container if it ended by a checkpoint: the plugin leaves a mark beside the file then, and the next
poststop takes the mark instead of the file. A container that comes back under its id finds its
policy there.

A container without our annotations waits for the start of Python and a look at the state: what is
imported, is imported late.
"""

from __future__ import annotations

import sys

STAGES = ("createRuntime", "poststop")
MAX_STATE_BYTES = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. arguments: nothing, or the stage; without it the state tells."""
    words = sys.argv[1:] if arguments is None else arguments
    raw = sys.stdin.buffer.read(MAX_STATE_BYTES + 1)
    if words in ([], ["createRuntime"]) and _has_nothing_of_ours(raw):
        return 0

    from gpustasis.errors import CheckpointError
    from gpustasis.hooks.container import (
        apply_retention,
        drop_policy,
        keep_policy,
        keep_refusal,
        read_state,
    )
    from gpustasis.hooks.runtime_log import discarded, tell_runtime

    state, stage = None, ""
    try:
        if len(words) > 1 or (words and words[0] not in STAGES):
            raise CheckpointError(f"usage: oci-hook [{'|'.join(STAGES)}] <STATE")
        state = read_state(raw, MAX_STATE_BYTES)
        # At a restore runc says "stopped" too, but of a container that has a process.
        stage = words[0] if words else STAGES[state.status == "stopped" and state.pid == 0]
        if stage == "createRuntime":
            keep_policy(state)
        elif (keep := drop_policy(state)) is not None:
            apply_retention(state.container_id, keep)
    except CheckpointError as exc:
        print(f"gpustasis: {exc}", file=sys.stderr)
        if discarded():
            tell_runtime(f"gpustasis: {exc}")
        if state is not None and stage == "createRuntime":
            keep_refusal(state, str(exc))
        return 1
    return 0


def _has_nothing_of_ours(raw: bytes) -> bool:
    """Whether it can be told without reading the JSON, which may write any letter as \\uXXXX, that
    there is no annotation of ours, and that this is not the end of a container."""
    return b"gpustasis" not in raw and b"\\u" not in raw and b'"stopped"' not in raw


if __name__ == "__main__":
    sys.exit(main())
