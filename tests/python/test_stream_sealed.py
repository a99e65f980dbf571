# SPDX-License-Identifier: Apache-2.0
"""Streams of sealed checkpoints without CRIU: what a receiver opens, and what it refuses.
tests/integration/test_sealed_streams.py has the real one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from shutil import rmtree

import pytest

from gpustasis._core import PACK_NAME, DataKey, Encoding, FreshKey, ImageReader, write_sealed
from gpustasis.criu.run import Run
from gpustasis.errors import CheckpointError, CriuError, SealError, StreamError
from gpustasis.image.checkpoint import CheckpointFiles
from gpustasis.sealing.keys import KeyCommand, KeyFile, KeySource, Remembered, configured_key
from gpustasis.streaming import receive, sealed
from gpustasis.streaming.answers import Answers, Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import ANSWER_MAGIC, SEALED, Decoder, Header, Kind
from gpustasis.streaming.send import Target, send
from support.certificates import Pair
from support.image_samples import make_checkpoint, mixture
from support.job import TIMEOUT_S
from support.recipients import make_recipient
from support.streams import FILES, INVENTORY, PSTREE, stream_of, write_images

ENVELOPE, FILE_1 = "gpustasis-sealed.cms", "gpustasis-sealed.img"
SECRET = b"what nobody may see" * 40


@pytest.fixture
def me(tmp_path: Path) -> Pair:
    return make_recipient(tmp_path)


def seal(place: Path, pair: Pair, **more: bytes) -> dict[str, bytes]:
    """A small checkpoint of CRIU's alone, as a dump with recipients leaves it."""
    plain = {"pstree.img": PSTREE, "inventory.img": INVENTORY, "core-5.img": SECRET}
    plain["pages-1.img"] = SECRET * 12  # frames that nobody reads but to check them
    source, target = place / "plain", place / "sealed"
    source.mkdir(parents=True)
    target.mkdir()
    for name, content in (plain | {f"{name}.img": one for name, one in more.items()}).items():
        (source / name).write_bytes(content)
    key = FreshKey()
    names = sorted(path.name for path in source.iterdir())
    write_sealed(key, source, names, target, frame_size=4096)
    envelope = key.key.wrap([pair.certificate.read_bytes()])
    clear = {name: plain[name] for name in ("pstree.img", "inventory.img")}
    return {ENVELOPE: envelope, FILE_1: (target / FILE_1).read_bytes(), **clear}


@dataclass
class Taken:
    """What became of a stream: what was looked at before it was ready, and restored."""

    looked: bytes | None = None
    restored: bool = False


def take(files: dict[str, bytes], at: Path, key: KeySource | None, features: int = SEALED) -> Taken:
    found = Taken()

    def require(files: CheckpointFiles) -> None:
        found.looked = files.read("core-5.img")

    def restore(directory: Path) -> Run:
        found.restored = True
        written = {path.name for path in directory.iterdir()}
        assert written == set(files)
        return Run(pid=5, criu_version="4.3", log=at, seconds=0.0, statistics=None)

    (at / "job.gps").write_bytes(stream_of(files, Kind.RELEASED, required_features=features))
    with (
        (at / "job.gps").open("rb") as file,
        closing(Descriptor(file.fileno(), "it", writing=False)) as stream,
    ):
        source = receive.Source(
            stream=stream,
            replies=Replies(None, 5),
            program="a test",
            place=at / "in",
            timeout_s=5,
            require=require,
            key=key,
        )
        receive.receive(source, restore)
    return found


def refused(
    files: dict[str, bytes], at: Path, key: KeySource | None, features: int = SEALED
) -> CheckpointError:
    with pytest.raises(CheckpointError) as why:
        take(files, at, key, features)
    assert not (at / "in").exists()
    assert not list(at.glob(".in*"))
    return why.value


def test_who_has_the_key_looks_into_it_before_it_is_ready(tmp_path: Path, me: Pair) -> None:
    files = seal(tmp_path, me)
    found = take(files, tmp_path, KeyFile(me.key))
    assert found == Taken(looked=SECRET, restored=True)
    for path in (tmp_path / "in").iterdir():
        assert SECRET[:16] not in path.read_bytes()


def test_without_a_key_or_with_another(tmp_path: Path, me: Pair) -> None:
    files = seal(tmp_path, me)
    why = refused(files, tmp_path, None)
    assert isinstance(why, SealError)
    assert "there is no key: --key FILE, --key-command" in str(why)
    why = refused(files, tmp_path, KeyFile(make_recipient(tmp_path, "other").key))
    assert isinstance(why, SealError)
    assert "it: gpustasis-sealed.cms: " in str(why)


def test_every_byte_that_was_changed_is_found_before_it_is_ready(tmp_path: Path, me: Pair) -> None:
    """By somebody who makes the hashes of the stream right."""
    files, key = seal(tmp_path, me), Remembered(KeyFile(me.key))
    random = Random(3)
    for name, content in files.items():
        places = {0, len(content) - 1, *(random.randrange(len(content)) for _ in range(40))}
        for at in sorted(places):
            changed = bytearray(content)
            changed[at] ^= 1 << random.randrange(8)
            refused(files | {name: bytes(changed)}, tmp_path, key)
        refused(files | {name: content[:-1]}, tmp_path, key)
        refused({one: files[one] for one in files if one != name}, tmp_path, key)
    assert take(files, tmp_path, key).restored


def test_files_of_another_checkpoint(tmp_path: Path, me: Pair) -> None:
    files, other = seal(tmp_path / "a", me), seal(tmp_path / "b", me)
    key = KeyFile(me.key)
    for name in (ENVELOPE, FILE_1):
        refused(files | {name: other[name]}, tmp_path, key)
    added = files | {"gpustasis-sealed-2.img": other[FILE_1]}
    assert "is not listed" in str(refused(added, tmp_path, key))
    ids = files | {"ids-5.img": b"added"}
    assert "is not the one that was sealed" in str(refused(ids, tmp_path, key))


def test_an_image_that_no_manifest_names(tmp_path: Path, me: Pair) -> None:
    files = seal(tmp_path, me, **{"gpustasis-5": b"of what?"})
    why = refused(files, tmp_path, KeyFile(me.key))
    assert "gpustasis-5.img: not named by the manifest" in str(why)


def test_chunks_are_checked_behind_the_seal(tmp_path: Path, me: Pair) -> None:
    """What was damaged before it was sealed is sealed whole."""
    whole = tmp_path / "whole"
    whole.mkdir()
    make_checkpoint(whole, {7: mixture()})
    more = {path.stem: path.read_bytes() for path in whole.iterdir()}
    key = KeyFile(me.key)
    found = take(seal(tmp_path / "a", me, **more), tmp_path, key)
    assert found.restored
    rmtree(tmp_path / "in")
    image = ImageReader.open(whole / "gpustasis-7.img")
    (index,) = [i for i in range(len(image)) if image.chunk(i).encoding == Encoding.RAW][:1]
    changed = bytearray(more["gpustasis-7"])
    changed[image.chunk(index).offset + 5] ^= 1
    damaged = seal(tmp_path / "b", me, **(more | {"gpustasis-7": bytes(changed)}))
    why = refused(damaged, tmp_path, key)
    assert "gpustasis-7.img" in str(why)
    assert "chunk" in str(why)
    del more["gpustasis-7"]
    missing = refused(seal(tmp_path / "c", me, **more), tmp_path, key)
    assert "gpustasis-7.img: missing: no sealed file holds it" in str(missing)


def test_nothing_in_the_clear_may_come_with_it(tmp_path: Path, me: Pair) -> None:
    files, key = seal(tmp_path, me), KeyFile(me.key)
    for name in ("gpustasis-5.img", "gpustasis-manifest.img", PACK_NAME, "core-6.img"):
        why = refused(files | {name: b"clear"}, tmp_path, key)
        assert f"{name} is in the clear" in str(why)


def test_which_files_fit() -> None:
    """Whatever else is sealed of it."""
    sealed.require_fit("core-5.img", True)
    for name in ("gpustasis-5.img", "gpustasis-memory-5.img", "gpustasis-manifest.img", PACK_NAME):
        sealed.require_fit(name, False)
        with pytest.raises(StreamError, match="is in the clear, in a stream of what is sealed"):
            sealed.require_fit(name, True)


def test_the_envelope_comes_first(tmp_path: Path, me: Pair) -> None:
    files = seal(tmp_path, me)
    last = {name: files[name] for name in reversed(files)}
    why = refused(last, tmp_path, KeyFile(me.key))
    assert "does not begin with gpustasis-sealed.cms" in str(why)


def test_one_that_does_not_say_that_it_is_sealed(tmp_path: Path, me: Pair) -> None:
    why = refused(seal(tmp_path, me), tmp_path, KeyFile(me.key), features=0)
    assert "in a stream that does not say so" in str(why)


def test_one_that_holds_nothing_sealed(tmp_path: Path, me: Pair) -> None:
    plain = {"pstree.img": PSTREE, "inventory.img": INVENTORY}
    assert "does not begin with" in str(refused(plain, tmp_path, KeyFile(me.key)))


def test_a_key_is_asked_for_once(tmp_path: Path, me: Pair) -> None:
    class Counting:
        calls = 0

        def unwrap(self, envelope: bytes, place: str) -> DataKey:
            self.calls += 1
            return KeyFile(me.key).unwrap(envelope, place)

    counting = Counting()
    source = Remembered(counting)
    first, second = (seal(tmp_path / name, me)[ENVELOPE] for name in "ab")
    assert source.unwrap(first, "").sealed_id == source.unwrap(first, "").sealed_id
    assert counting.calls == 1
    assert source.unwrap(second, "").sealed_id != source.unwrap(first, "").sealed_id
    assert counting.calls == 2


def test_a_key_command_is_not_waited_for_once_somebody_says_stop(tmp_path: Path, me: Pair) -> None:
    files, said = seal(tmp_path, me), tmp_path / "pid"
    program = KeyCommand(["sh", "-c", f"echo $$ >{said}.part; mv {said}.part {said}; sleep 50"])

    def stop() -> None:
        end = time.monotonic() + TIMEOUT_S
        while not said.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = time.monotonic()
    stopping = threading.Thread(target=stop)
    stopping.start()
    why = refused(files, tmp_path, program)
    stopping.join()
    assert str(why) == "stopped by SIGTERM"
    assert time.monotonic() - before < 40
    assert not Path(f"/proc/{said.read_text().strip()}").exists()


def test_the_key_that_the_configuration_names(tmp_path: Path) -> None:
    config, overrides = tmp_path / "config.toml", tmp_path / "overrides.toml"
    environ = {"GPUSTASIS_CONFIG": str(config)}
    config.write_text('private_key = "/of/the/host.key"\n')
    assert configured_key(environ) == KeyFile(Path("/of/the/host.key"))
    overrides.write_text('private_key = "fd:7"\n')
    assert configured_key(environ | {"GPUSTASIS_OVERRIDES": str(overrides)}) is None


@pytest.mark.parametrize("said", [{}, {"sealed": False}, {"sealed": "yes"}, {"sealed": True}])
def test_what_a_receiver_says_of_its_keys(said: dict[str, object]) -> None:
    near, far = socket.socketpair()
    with (
        near,
        far,
        closing(Descriptor(far.fileno(), "far", writing=True)) as out,
        closing(Descriptor(near.fileno(), "the receiver", writing=False)) as back,
        closing(Answers(back, 5)) as answers,
    ):
        Replies(out, 5).tell(Kind.HELLO, program="another", **said)
        answers.hello(lambda: None)
        if said == {"sealed": True}:
            sealed.require_opened(answers)
        else:
            with pytest.raises(StreamError, match="opens nothing that is sealed"):
                sealed.require_opened(answers)


def test_a_dump_that_was_to_be_sealed_and_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as job:

        def dump(images: Path, words: Sequence[str]) -> Run:
            write_images(images, FILES)
            environ = os.environ | {"CRTOOLS_SCRIPT_ACTION": "post-dump"}
            asked = subprocess.run([words[1]], env=environ, check=False, timeout=60)
            raise CriuError(f"the script said {asked.returncode}")

        with (tmp_path / "out").open("wb") as file:
            out = Descriptor(file.fileno(), "out", writing=True)
            with pytest.raises(StreamError, match="was to be sealed, and is not; the job runs on"):
                send(dump, job.pid, Target(out=out), is_sealed=True, place=tmp_path / "spool")
        assert job.poll() is None
        job.kill()
    assert b"pstree.img" not in (tmp_path / "out").read_bytes()


def test_an_answer_is_not_sealed() -> None:
    raw = memoryview(Header(required_features=SEALED).pack(ANSWER_MAGIC))

    def read(space: memoryview) -> None:
        space[:] = raw[: len(space)]

    with pytest.raises(StreamError, match="its header holds what it may not"):
        Decoder(read, ANSWER_MAGIC, "it").header()


def test_what_goes_first_while_the_dump_is_at_work() -> None:
    names = ("gpustasis-sealed-2.img", FILE_1, ".gpustasis-sealed-3.img.part", "core-5.img")
    paths = [Path(name) for name in names]
    assert sealed.next_files(paths, True) == []
    found = sealed.next_files([*paths, Path(ENVELOPE)], True)
    assert [path.name for path in found] == [ENVELOPE, "gpustasis-sealed-2.img"]
    rest = sealed.in_order([Path("inventory.img"), *paths, Path(ENVELOPE)])
    assert (rest[0].name, rest[-1].name) == (ENVELOPE, "inventory.img")
