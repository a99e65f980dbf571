# SPDX-License-Identifier: Apache-2.0
"""What annotations of a container ask of its checkpoints: names, values, and the policy file.

The OCI hook checks the annotations with this when a container starts, and leaves a policy file for
the plugin, which reads it at each dump (src/cuda_plugin/policy.hpp). docs/operating.md, "Policy per
container", is the table for users. Every start of a container with an annotation waits for this
module: it imports next to nothing.
"""

from __future__ import annotations

from gpustasis.errors import PolicyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "io.gpustasis."
POLICY_DIRECTORY = "/run/gpustasis/policy"
STORE_DIRECTORY = "/var/lib/gpustasis/containers"
MAX_FILE_BYTES = 64 << 10  # of a policy file; the plugin refuses a longer one

MAX_THREADS = 1024
MAX_KEEP = 100_000
MAX_TIMEOUT_MS = 2**31 - 1
MAX_PATH_BYTES = 4095
MAX_WORLD = 1 << 20
_MAX_JOB = 128
_ID_LENGTH = 64
_SHOWN = 80  # characters of a wrong value in a message
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000}

Value = bool | int | str


class Rank:
    """A container that is rank `rank` of the `world` ranks of a job."""

    __slots__ = ("job", "rank", "world")

    def __init__(self, job: str, rank: int, world: int) -> None:
        self.job = job
        self.rank = rank
        self.world = world


class Policy:
    """settings: keys of the plugin's configuration, with their values. keep: how many checkpoints
    of the container's store stay; None: all. rank: of a job, whose ranks are checkpointed together;
    None: it is none. annotations: what was said, ours only."""

    __slots__ = ("annotations", "keep", "rank", "settings")

    def __init__(
        self,
        settings: dict[str, Value],
        keep: int | None,
        rank: Rank | None,
        annotations: dict[str, str],
    ) -> None:
        self.settings = settings
        self.keep = keep
        self.rank = rank
        self.annotations = annotations


class Annotation:
    """One name below PREFIX. key: the plugin's configuration key that it sets; "": none, it is for
    the hook. allowed: what may be said, in words. parse: raises ValueError."""

    __slots__ = ("allowed", "key", "meaning", "parse")

    def __init__(self, key: str, allowed: str, meaning: str, parse: Callable[[str], Value]) -> None:
        self.key = key
        self.allowed = allowed
        self.meaning = meaning
        self.parse = parse


def _compress(text: str) -> str:
    if text not in ("lz4", "none"):
        raise ValueError
    return text


def _cpu_memory(text: str) -> str:
    if text not in ("criu", "ours", "auto"):
        raise ValueError
    return text


def _layout(text: str) -> str:
    if text not in ("criu", "packed"):
        raise ValueError
    return text


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _number(text: str, least: int, most: int) -> int:
    # int() takes more than digits: signs, spaces, underscores, and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        raise ValueError
    if not least <= (number := int(text)) <= most:
        raise ValueError
    return number


def _threads(text: str) -> int:
    return _number(text, 0, MAX_THREADS)


def _keep(text: str) -> int:
    return _number(text, 1, MAX_KEEP)


def _job(text: str) -> str:
    plain = text.isascii() and text[:1].isalnum() and text.replace("_", "a").replace("-", "a")
    if not plain or not plain.replace(".", "a").isalnum() or len(text) > _MAX_JOB:
        raise ValueError
    return text


def _rank(text: str) -> int:
    return _number(text, 0, MAX_WORLD - 1)


def _world(text: str) -> int:
    return _number(text, 1, MAX_WORLD)


def _timeout(text: str) -> int:
    """Milliseconds."""
    digits = text.rstrip("ms")
    milliseconds = _number(digits, 1, MAX_TIMEOUT_MS) * _MILLISECONDS.get(text[len(digits) :], 0)
    if not 1 <= milliseconds <= MAX_TIMEOUT_MS:
        raise ValueError
    return milliseconds


def _path(text: str) -> str:
    if not text.startswith("/") or ".." in text.split("/"):
        raise ValueError
    if len(text.encode()) > MAX_PATH_BYTES or not text.isprintable():  # UnicodeError: ValueError
        raise ValueError
    return text


ANNOTATIONS: dict[str, Annotation] = {
    "compress": Annotation(
        "compress", '"lz4" or "none"', "whether chunks of memory are compressed", _compress
    ),
    "cpu-memory": Annotation(
        "cpu_memory",
        '"criu", "ours" or "auto"',
        "who stores the memory of processes that is not the GPU's",
        _cpu_memory,
    ),
    "externalize": Annotation(
        "externalize",
        '"true" or "false"',
        "whether GPU memory is taken out of CRIU's own images",
        _flag,
    ),
    "incremental": Annotation(
        "incremental",
        '"true" or "false"',
        "whether each checkpoint is built on the one before",
        _flag,
    ),
    "layout": Annotation(
        "layout",
        '"criu" or "packed"',
        "whether CRIU's images are packed into one file",
        _layout,
    ),
    "parent": Annotation(
        "parent",
        'an absolute path without ".."',
        "directory of the checkpoint to build on",
        _path,
    ),
    "threads": Annotation(
        "threads",
        f"a number from 0 to {MAX_THREADS}",
        "threads that read, hash, compress and write; 0: as many as processors",
        _threads,
    ),
    "timeout": Annotation(
        "lock_timeout_ms",
        'a whole number of "ms", "s" or "m", such as "10s", up to 2147483647 ms',
        "how long submitted GPU work may take to drain",
        _timeout,
    ),
    "keep": Annotation(
        "",
        f"a number from 1 to {MAX_KEEP}",
        "how many checkpoints of the container's store stay when it ends",
        _keep,
    ),
    "job": Annotation(
        "",
        f'letters, digits, ".", "_" and "-", at most {_MAX_JOB}',
        "the job that the container is a rank of",
        _job,
    ),
    "rank": Annotation(
        "", f"a number from 0 to {MAX_WORLD - 1}", "which rank of the job it is", _rank
    ),
    "world": Annotation(
        "", f"a number from 1 to {MAX_WORLD}", "how many ranks the job has", _world
    ),
}
_OF_RANK = ("job", "rank", "world")
# By which CRI-O and containerd say of a container that it holds a pod's namespaces.
_CONTAINER_TYPES = ("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri.container-type")
# Refused by name, with what to do instead.
REFUSED = {
    "encrypt": "the host's configuration says for whom its checkpoints are sealed (recipients), "
    "and no annotation does"
}


def parse_annotations(annotations: Mapping[str, object]) -> Policy | None:
    """The policy of a container with all of these annotations; None: none of them is ours.

    Raises PolicyError: one sentence that names annotation, value and what is allowed.
    """
    settings: dict[str, Value] = {}
    others: dict[str, Value] = {}
    ours: dict[str, str] = {}
    for full_name in sorted(name for name in annotations if name.startswith(PREFIX)):
        text = annotations[full_name]
        name = full_name.removeprefix(PREFIX)
        if name in REFUSED:
            raise _wrong(full_name, text, REFUSED[name])
        known = ANNOTATIONS.get(name)
        if known is None:
            known_names = ", ".join(PREFIX + other for other in ANNOTATIONS)
            raise _wrong(full_name, text, f"there is no such annotation, only {known_names}")
        if not isinstance(text, str):
            raise _wrong(full_name, text, f"must be {known.allowed}")
        try:
            value = known.parse(text)
        except ValueError:
            raise _wrong(full_name, text, f"must be {known.allowed}") from None
        ours[full_name] = text
        if known.key:
            settings[known.key] = value
        else:
            others[name] = value
    _check_together(settings, ours)
    rank = _rank_of(others, ours)
    if any(annotations.get(name) == "sandbox" for name in _CONTAINER_TYPES):
        rank = None  # it has what its pod's containers have, and is never checkpointed
    if rank is not None:
        # The agent locks the GPUs of all ranks before any criu begins.
        settings["found_locked"] = "dump"
    keep = int(others["keep"]) if "keep" in others else None
    return Policy(settings, keep, rank, ours) if ours else None


def _rank_of(others: Mapping[str, Value], ours: Mapping[str, str]) -> Rank | None:
    """Raises PolicyError if it is said in part."""
    said = [name for name in _OF_RANK if name in others]
    if not said:
        return None
    missing = [name for name in _OF_RANK if name not in others]
    name = PREFIX + said[0]
    if missing:
        raise _wrong(name, ours[name], f"needs {PREFIX}{missing[0]} as well")
    rank = Rank(str(others["job"]), int(others["rank"]), int(others["world"]))
    if rank.rank >= rank.world:
        name = f"{PREFIX}rank"
        raise _wrong(name, ours[name], f"must be 0 to {rank.world - 1}, by {PREFIX}world")
    return rank


def _check_together(settings: Mapping[str, Value], ours: Mapping[str, str]) -> None:
    """What each is right, but not all of it at once."""
    for name in ("incremental", "parent"):
        if not settings.get(name) or settings.get("externalize") is not False:
            continue
        if settings.get("cpu_memory") not in ("ours", "auto"):
            raise _wrong(
                PREFIX + name, ours[PREFIX + name], f'needs {PREFIX}externalize, which is "false"'
            )
    if "parent" in settings and settings.get("incremental"):
        raise _wrong(
            f"{PREFIX}parent",
            ours[f"{PREFIX}parent"],
            f'not together with {PREFIX}incremental = "true", which chooses the parent itself',
        )


def _wrong(name: str, value: object, why: str) -> PolicyError:
    return PolicyError(f"annotation {shown(name)} = {shown(value, quoted=True)}: {why}")


def shown(value: object, *, quoted: bool = False) -> str:
    """`value` for a message: on one line, and not longer than a line."""
    text = value if isinstance(value, str) else str(value)
    text = ascii(text[:_SHOWN])[1:-1] + ("…" if len(text) > _SHOWN else "")
    return f'"{text}"' if quoted and isinstance(value, str) else text


def is_container_id(text: str) -> bool:
    """Whether this is an id as engines make them, 64 lowercase hex digits: as such the plugin finds
    it in the name of a cgroup, and it is safe as a file name."""
    return len(text) == _ID_LENGTH and all(char in "0123456789abcdef" for char in text)


def format_policy(policy: Policy, container_id: str) -> str:
    """The text of the container's policy file: TOML, the plugin's keys, then a table [container]
    with id, keep and rank if there are any, and the annotations that it comes from."""
    lines = ["# Made by the OCI hook of gpustasis from the annotations of the container."]
    lines += [f"{key} = {_toml(value)}" for key, value in policy.settings.items()]
    lines += ["", "[container]", f"id = {_toml(container_id)}"]
    if policy.keep is not None:
        lines.append(f"keep = {policy.keep}")
    if (rank := policy.rank) is not None:
        lines += ["", "[container.rank]", f"job = {_toml(rank.job)}"]
        lines += [f"rank = {rank.rank}", f"world = {rank.world}"]
    lines += ["", "[container.annotations]"]
    lines += [f"{_toml(name)} = {_toml(text)}" for name, text in policy.annotations.items()]
    return "\n".join(lines) + "\n"


def keep_of(text: str) -> int | None:
    """`keep` in the text of a policy file; None: all stay. Raises PolicyError."""
    import tomllib  # only when a container with a policy ends

    try:
        container = tomllib.loads(text)["container"]
        keep = container.get("keep")
    except (ValueError, KeyError, AttributeError) as exc:
        raise PolicyError(f"it is no policy file: {exc}") from exc
    if keep is None:
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= MAX_KEEP:
        raise PolicyError(f"keep = {shown(keep)}: must be a number from 1 to {MAX_KEEP}")
    return keep


def rank_of(text: str) -> Rank | None:
    """The rank in the text of a policy file; None: the container is none. Raises PolicyError."""
    import tomllib

    try:
        found = tomllib.loads(text)["container"].get("rank")
        if found is None:
            return None
        job, rank, world = (found[name] for name in _OF_RANK)
        if type(rank) is not int or type(world) is not int or not 0 <= rank < world <= MAX_WORLD:
            raise ValueError(f"rank {rank!r} of {world!r}")
        return Rank(_job(job), rank, world)
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise PolicyError(f"it is no policy file: {exc!r}") from exc


def _toml(value: Value) -> str:
    """Strings have been found printable: only quotes and backslashes need care."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
