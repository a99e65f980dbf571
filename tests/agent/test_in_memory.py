# SPDX-License-Identifier: Apache-2.0
"""What the agent's dumps have in memory: given back before their directories are removed, and never
taken for broken off, or for drained, where that cannot be told."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import gpustasis
from gpustasis._core import ARENA_MARKER, MANIFEST_NAME, ImageReader
from gpustasis.agent.config import Config, Target
from gpustasis.agent.drains import Drains
from gpustasis.agent.operations import Operation
from gpustasis.agent.subjects import Subject, held
from gpustasis.agent.work import REQUESTED, TARGETS, Work, remove_failed, require_whole
from gpustasis.criu.run import Run
from gpustasis.draining.drain import drain
from gpustasis.errors import AgentError, ImageError
from gpustasis.image.arena import Tier, tier_of
from support import local_checkpoints
from support.arena_by_hand import BOOT, Local, dropped, locked, make_drainable, make_local, names
from support.inventory import write_inventory
from support.priorities import priority

NAME = "20260101T000000.0-0123456789abcdef"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a target of the agent's."""
    found = tmp_path / "store/targets/train"
    found.mkdir(parents=True)
    return found


@pytest.fixture
def made(arena: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The arena; nobody is waited for long."""
    arena.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr("gpustasis.agent.work._REFILL_S", 0.2)
    return arena


def tidy(directory: Path) -> None:
    """As after a success."""
    Work(Operation(subject=Subject(pid=1), uid=0), Config(), None)._tidy(directory)


def test_what_is_removed_has_no_memory_any_more(made: Path, directory: Path) -> None:
    """Without its directory nobody would know whose it is."""
    local = make_local(made, directory / NAME, 1)
    assert remove_failed(local.images)
    assert names(made) == [] and not local.images.exists()


def test_only_a_log_stays_of_one_that_had_memory(made: Path, directory: Path) -> None:
    local = make_local(made, directory / NAME, 1)
    local.break_off()
    (local.images / "dump.log").touch()
    remove_failed(local.images, keep_log=True)
    assert names(made) == [] and [one.name for one in local.images.iterdir()] == ["dump.log"]


def test_a_failure_that_says_nothing_is_one(
    made: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_local(made, directory / NAME, 1)

    def fail(_: Path) -> None:
        raise NotImplementedError

    monkeypatch.setattr("gpustasis.agent.in_memory.give_up", fail)
    assert not remove_failed(local.images)
    assert local.images.exists() and names(made) == [local.stored.name]


def test_a_damaged_one_in_memory_is_removed_with_it(made: Path, directory: Path) -> None:
    images = directory / NAME
    image = local_checkpoints.make_local(images, made) / "gpustasis-7.img"
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        file.write(bytes([os.pread(file.fileno(), 1, file.tell())[0] ^ 1]))
    with pytest.raises((AgentError, ImageError), match="it was removed"):
        require_whole(images, keep=False)
    assert names(made) == [] and not images.exists()


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def lack_memory(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fail", [refuse, lack_memory])
def test_what_cannot_be_read_is_not_damaged(
    made: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[..., None],
    times: int,
) -> None:
    """A disk that does not answer, memory that is short: the only copy may be in memory. The first
    look fails, or the second one too."""
    images, failed = directory / NAME, list[int]()
    stored = local_checkpoints.make_local(images, made)

    class Failing:
        @staticmethod
        def open(path: Path) -> ImageReader:
            failed.append(1)
            if len(failed) < times:
                refuse()  # then all is read again
            if len(failed) == times:
                fail()
            return ImageReader.open(path)

    monkeypatch.setattr("gpustasis.image.checkpoint.ImageReader", Failing)
    with pytest.raises(AgentError, match=r"^whether .* cannot be told: .*it was left there"):
        require_whole(images, keep=False)
    monkeypatch.undo()
    assert names(made) == [stored.name] and tier_of(images) is Tier.LOCAL
    require_whole(images, keep=False)


def test_what_is_locked_is_not_damaged(
    made: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = directory / NAME
    stored = local_checkpoints.make_local(images, made)
    monkeypatch.setattr("gpustasis.image.directory.PATIENCE_S", 0.1)
    with (
        locked(stored, fcntl.LOCK_EX),
        pytest.raises(AgentError, match=r"cannot be told: .* locked for 0\.1 s.*left there"),
    ):
        require_whole(images, keep=False)
    assert names(made) == [stored.name] and tier_of(images) is Tier.LOCAL


def test_one_that_was_made_is_not_removed_as_a_failed_one(
    made: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be read when it was checked, and no more when it is looked what is left."""
    images, pid = directory / NAME, os.getpid()

    def dump(_: int, place: Path, **__: object) -> gpustasis.Checkpoint:
        place.rmdir()
        local_checkpoints.make_local(place, made)
        run = Run(pid=pid, criu_version="4.3", log=place, seconds=1.0, statistics=None)
        return gpustasis.Checkpoint(place, dump=run)

    def fail(_: Path) -> None:
        try:
            refuse()
        except OSError as exc:
            raise ImageError(str(exc)) from exc

    monkeypatch.setattr("gpustasis.checkpoint", dump)
    monkeypatch.setattr("gpustasis.agent.work.require_not_ours", lambda _: None)
    target = Target(name="train", pidfile=Path("/x"), verify=True)
    operation = Operation(subject=Subject(pid=pid), uid=0, place=str(images))
    with held(pid) as process:
        work = Work(operation, Config(tier="ram"), target, process)
        with monkeypatch.context() as patch:
            patch.setattr("gpustasis.image.store.is_file", refuse)
            patch.setattr("gpustasis.image.verification.inventory_plugins", fail)
            with pytest.raises(AgentError, match=r"cannot be told: .*it was left there"):
                work.run()
            work.discard()
    assert len(names(made)) == 1 and tier_of(images) is Tier.LOCAL


def test_what_somebody_is_at_work_on_stays_as_it_is(
    made: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_local(made, directory / NAME, 1)
    before = sorted(os.listdir(local.images))
    for place, how in [(local.images / ARENA_MARKER, fcntl.LOCK_EX), (local.stored, fcntl.LOCK_SH)]:
        with locked(place, how):
            assert not remove_failed(local.images)
    with dropped(os.getpid(), local, local.stored):  # its memory may be put back from there
        assert not remove_failed(local.images, keep_log=True)
        monkeypatch.setattr("gpustasis.agent.work._REFILL_S", 1e9)
        assert not remove_failed(local.images, at_once=True)
        with locked(local.stored, fcntl.LOCK_SH):
            assert not remove_failed(local.images, at_once=True)
    assert sorted(os.listdir(local.images)) == before and tier_of(local.images) is Tier.LOCAL
    assert remove_failed(local.images)
    assert names(made) == []


def test_a_dump_that_was_killed_before_its_marker_leaves_no_memory(
    made: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'arena = "{made}"\n')
    monkeypatch.setenv("GPUSTASIS_CONFIG", str(config))
    local = make_local(made, directory / NAME, 1)
    local.break_off()
    (local.images / ARENA_MARKER).unlink()
    (local.stored / MANIFEST_NAME).unlink()
    tidy(directory)
    assert names(made) == [] and not local.images.exists()


def test_one_that_was_broken_off_goes_with_its_memory(made: Path, directory: Path) -> None:
    local = make_local(made, directory / NAME, 1)
    local.break_off()
    with locked(local.images / ARENA_MARKER, fcntl.LOCK_EX):  # its dump is at work
        tidy(directory)
        assert local.images.exists() and names(made) == [local.stored.name]
    tidy(directory)
    assert names(made) == [] and not local.images.exists()


def hide(local: Local) -> None:
    local.stored.parent.rename(local.stored.parent.with_name("elsewhere"))


def open_to_all(local: Local) -> None:
    local.stored.chmod(0o755)


def make_newer(local: Local) -> None:
    marker = local.images / ARENA_MARKER
    marker.write_text(marker.read_text().replace("gpustasis-arena 1", "gpustasis-arena 999"))


def lose_image(local: Local) -> None:
    (local.stored / "gpustasis-7.img").unlink()


@pytest.mark.parametrize("act", [hide, open_to_all, make_newer, lose_image])
def test_what_cannot_be_read_is_not_removed_as_broken_off(
    made: Path, directory: Path, act: Callable[[Local], None]
) -> None:
    local = make_local(made, directory / NAME, 1)
    act(local)
    before = sorted(os.listdir(local.images))
    tidy(directory)
    assert sorted(os.listdir(local.images)) == before
    assert any(local.stored.parent.parent.glob(f"*/{local.stored.name}"))


def test_a_manifest_of_a_later_version_is_one(made: Path, directory: Path) -> None:
    place = directory / NAME
    place.mkdir()
    (place / MANIFEST_NAME).write_bytes(b"of a later version")
    write_inventory(place, "gpustasis")
    tidy(directory)
    assert (place / MANIFEST_NAME).exists()


def test_a_disk_that_does_not_answer_loses_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = directory / NAME
    place.mkdir()

    def fail(_: Path) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("gpustasis.image.store.stored_directory", fail)
        tidy(directory)
    assert place.exists()
    tidy(directory)
    assert not place.exists()


def of_another_boot(local: Local) -> None:
    marker = local.images / ARENA_MARKER
    marker.write_text(marker.read_text().replace(BOOT, "0" * len(BOOT)))


def test_what_was_lost_with_another_boot_is_removed(made: Path, directory: Path) -> None:
    local = make_local(made, directory / NAME, 1)
    of_another_boot(local)
    tidy(directory)
    assert not local.images.exists()


Told = list[tuple[Path, Tier | None]]


def drains_of(directory: Path, told: Told) -> Drains:
    store = directory.parent.parent
    return Drains(Config(store=store), lambda place, tier: told.append((place, tier)))


def drained_at_once(directory: Path) -> tuple[bool, int, Told]:
    """Whether all is on the disk when they are closed, how many are not, and who was told of."""
    told: Told = []
    drains = drains_of(directory, told)
    drains.start(lambda _: False)
    return drains.close(30.0), drains.count(), told


@pytest.mark.parametrize("act", [hide, open_to_all, make_newer, lose_image])
def test_what_cannot_be_drained_now_stays_to_be_drained(
    made: Path, directory: Path, act: Callable[[Local], None]
) -> None:
    """The last look before a reboot must not say that all is on the disk."""
    act(make_local(made, directory / NAME, 1))
    assert drained_at_once(directory) == (False, 1, [])


def forget(local: Local) -> None:
    local.stored.rename(local.stored.parent.with_name(local.stored.name))


def empty_marker(local: Local) -> None:
    os.truncate(local.images / ARENA_MARKER, 0)


def test_a_drain_whose_failure_says_nothing_has_failed(
    made: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drainable(made, directory / NAME)

    def fail(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr("gpustasis.agent.drains.drain", fail)
    assert drained_at_once(directory) == (False, 1, [])


@pytest.mark.parametrize("act", [of_another_boot, forget, empty_marker, Local.break_off])
def test_what_is_lost_for_certain_holds_up_nothing(
    made: Path, directory: Path, act: Callable[[Local], None]
) -> None:
    act(make_local(made, directory / NAME, 1))
    assert drained_at_once(directory) == (True, 0, [(directory / NAME, None)])


def test_the_oldest_is_drained_first_and_in_no_jobs_way(made: Path, tmp_path: Path) -> None:
    """Whichever of the agent's directories it is in."""
    store, found = tmp_path / "store", list[tuple[Path, str]]()
    places = [
        store / TARGETS / "train" / NAME.replace("2026", "2024"),
        store / REQUESTED / "0/7" / NAME.replace("2026", "2025"),
        store / TARGETS / "eval" / NAME,
    ]
    for place in places:
        place.parent.mkdir(parents=True)
        local_checkpoints.make_local(place, made)
    drains = Drains(Config(store=store), lambda place, _: found.append((place, priority())))
    drains.start(lambda _: False)
    assert drains.close(60.0)
    assert found == [(place, "nice 19, disk 2/7") for place in places]
    assert {tier_of(place) for place in places} == {Tier.DURABLE}


def test_what_is_not_settled_counts_until_it_is_drained(made: Path, directory: Path) -> None:
    """Its dump has not ended when the agent starts."""
    images, told = directory / NAME, Told()
    make_drainable(made, images)
    drains = drains_of(directory, told)
    drains.start(lambda _: True)
    assert drains.count() == 1
    drains.add(images)
    assert drains.close(60.0)
    assert tier_of(images) is Tier.DURABLE and told == [(images, Tier.DURABLE)]
    make_drainable(made, directory / "another")
    drains = drains_of(directory, told)
    drains.start(lambda _: True)
    assert not drains.close(30.0)


def test_what_others_have_drained_is_told(made: Path, directory: Path) -> None:
    """Before the agent was started, and after."""
    images, told = directory / NAME, Told()
    make_drainable(made, images)
    drain(images)
    drains = drains_of(directory, told)
    drains.start(lambda _: False, [images, directory / "pruned"])
    assert drains.close(30.0)
    assert told == [(images, Tier.DURABLE), (directory / "pruned", None)]
