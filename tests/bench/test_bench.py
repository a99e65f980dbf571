# SPDX-License-Identifier: Apache-2.0
"""The benchmark itself, short, with a real criu on the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator
from gpustasis_bench.bench import cpu_memory, running
from gpustasis_bench.bench.ciphers import end_agent, make_keys
from gpustasis_bench.bench.contenders import CONTENDERS, OURS
from gpustasis_bench.bench.content import Content, make_content, read_content
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.markdown import (
    BEGIN,
    DOWNTIME_BEGIN,
    DOWNTIME_END,
    END,
    require_place,
    write_page,
)
from gpustasis_bench.bench.medium import Medium, remove_leftovers
from gpustasis_bench.contents.layout import ContentWriter
from gpustasis_bench.errors import BenchError, WrongMemoryError
from gpustasis_bench.roots import require_root
from support.bench import run_bench

MIB = 1 << 20
TMPFS = Path("/dev/shm")
DOWNTIME = f"{DOWNTIME_BEGIN}\nof another run\n{DOWNTIME_END}\n"


def test_a_short_run(emulator_environ: dict[str, str], tmp_path: Path, repository: Path) -> None:
    whole = run_bench(
        emulator_environ,
        tmp_path,
        *("--workloads", "random,zeros", "--media", "tmpfs"),
        *("--contenders", "ours,stock,stock+lz4", "--no-running"),
    )
    assert (whole["complete"], whole["failures"], whole["backend"]) == (True, [], "emulator")
    assert whole["usable"] is (whole["not_usable_because"] == [])
    assert whole["restored_bit_exact"] is True
    size = 32 * MIB
    found = {(each["workload"], each["contender"]): each for each in whole["results"]}
    names = ("ours", "stock", "stock+sync", "stock+lz4")
    assert set(found) == {(load, name) for load in ("random", "zeros") for name in names}
    for each in found.values():
        assert 0 < each["frozen_seconds"] < each["dump_seconds"]
        assert each["restore_seconds"] > 0
        assert 0 < each["peak_rss_bytes"] < 256 * MIB
        assert min(each["driver_seconds"].values()) > 0
        for name in ("dump_seconds", "frozen_seconds", "restore_seconds"):
            assert each["with_driver"][name] > each[name]
    assert size < found["random", "ours"]["stored_bytes"] < size * 1.02
    assert found["zeros", "ours"]["stored_bytes"] < MIB
    assert found["zeros", "stock"]["stored_bytes"] > size
    assert found["zeros", "stock+lz4"]["stored_bytes"] < MIB
    assert found["random", "stock+lz4"]["stored_bytes"] > size
    stock, synced = found["random", "stock"], found["random", "stock+sync"]
    assert synced["dump_seconds"] > stock["dump_seconds"]
    assert synced["restore_seconds"] == stock["restore_seconds"]
    limits = whole["limits"]
    assert min(*limits["tmpfs"]["write"].values(), *limits["read_process"].values()) > 0
    assert {
        "random dump, stock over ours",
        "hooks, for a process of 1,000 threads without CUDA, us",
    } <= {bound["name"] for bound in whole["bounds"]}
    assert not list(TMPFS.glob(f"gpustasis-bench-{os.getpid()}-*"))

    page = tmp_path / "page.md"
    page.write_text(f"before\n{DOWNTIME}<!-- bench:begin -->\nstale\n<!-- bench:end -->\nafter\n")
    for _ in range(2):  # again over what it wrote
        write_page(whole, page, Path("plot.svg"))
    text = page.read_text()
    assert text.startswith(f"before\n{DOWNTIME}<!-- bench:begin -->\nTaken on ")
    assert text.endswith("<!-- bench:end -->\nafter\n")
    assert "stale" not in text
    assert text.count("| random | ours |") == 1
    assert "**emulator**" in text
    # The page in the tree has its places.
    require_place(repository / "docs/performance.md", BEGIN, END)
    require_place(repository / "docs/performance.md", DOWNTIME_BEGIN, DOWNTIME_END)


def test_cpu_memory_is_stored_by_ours_and_comes_back(
    emulator_environ: dict[str, str], tmp_path: Path
) -> None:
    whole = run_bench(
        emulator_environ,
        tmp_path,
        *("--workloads", "cpu,mixed", "--media", "tmpfs"),
        *("--no-running", "--no-limits", "--no-trees"),
    )
    assert (whole["failures"], whole["restored_bit_exact"]) == ([], True)
    found = {each["workload"]: each for each in whole["cpu_memory"]}
    for each in found.values():
        for one in each["contenders"].values():
            assert 0 < one["frozen_seconds"] < one["dump_seconds"]
            assert one["restore_seconds"] > 0
            assert one["downtime_seconds"] > 0  # it was held against the same dump's frozen time
            assert 0.9 < one["rss_share"] < 1.1
    size = 32 * MIB
    for name, share in (("cpu", 0.5), ("mixed", 0.75)):  # of mixed, half is noise on the GPU
        ours, stock = (
            found[name]["contenders"][each]["stored_bytes"] for each in ("ours", "stock")
        )
        assert size * share < ours < size * share + 6 * MIB
        assert size < stock < size + 10 * MIB
    assert "memory of cpu after the restore, over before" in {
        bound["name"] for bound in whole["bounds"]
    }
    page = tmp_path / "page.md"
    page.write_text(f"{DOWNTIME}<!-- bench:begin -->\n<!-- bench:end -->\n")
    write_page(whole, page, Path("plot.svg"))
    assert page.read_text().count("| cpu | ours | tmpfs |") == 1


def test_sealed_checkpoints_are_measured_beside_packed_ones_and_others(
    emulator_environ: dict[str, str], tmp_path: Path
) -> None:
    whole = run_bench(
        emulator_environ,
        tmp_path,
        *("--workloads", "sealed", "--media", "tmpfs", "--no-running", "--no-limits"),
    )
    assert (whole["failures"], whole["restored_bit_exact"]) == ([], True)
    (found,) = whole["sealing"]
    others = {f"stock, {name}" for name in ("age", "gpg", "openssl enc")}
    assert set(found["contenders"]) == {"packed", "sealed"} | others
    assert set(found["ratios"]) == {"sealed"} | others
    size = 32 * MIB
    packed = found["contenders"]["packed"]["stored_bytes"]
    assert packed < found["contenders"]["sealed"]["stored_bytes"] < packed * 1.02 + MIB
    for name in others:  # encrypted, and nothing in the clear beside it
        assert size < found["contenders"][name]["stored_bytes"] < size + 10 * MIB
    names = {bound["name"] for bound in whole["bounds"]}
    stages = ("dump", "restore")
    assert {f"sealed {stage}, over one that is packed alone" for stage in stages} <= names
    page = tmp_path / "page.md"
    page.write_text(f"{DOWNTIME}<!-- bench:begin -->\n<!-- bench:end -->\n")
    write_page(whole, page, Path("plot.svg"))
    assert page.read_text().count("| stock, openssl enc | tmpfs |") == 1


def test_a_program_that_encrypts_leaves_no_image_in_the_clear(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    try:
        for name, cipher in keys.ciphers.items():
            images = tmp_path / name
            images.mkdir()
            content = os.urandom(MIB)
            (images / "pages-1.img").write_bytes(content)
            cipher.pack(images, tmp_path / "log")
            assert [path.name for path in images.iterdir()] == ["checkpoint.tar.sealed"]
            assert content[:64] not in (images / "checkpoint.tar.sealed").read_bytes()
            cipher.unpack(images, tmp_path / "log")
            assert (images / "pages-1.img").read_bytes() == content
            assert cipher.version() != "unknown"
            (images / "checkpoint.tar.sealed").write_bytes(b"cut")
            with pytest.raises(BenchError):
                cipher.unpack(images, tmp_path / "log")
    finally:
        end_agent(keys)


def test_a_tree_without_cuda_is_dumped_by_both(course: Course, medium: Medium) -> None:
    found = cpu_memory.measure_trees(course, medium, 1, (3,))
    assert [each["processes"] for each in found] == [3]
    assert all(one["restore_seconds"] > 0 for one in found[0]["contenders"].values())


def test_a_page_without_a_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    with pytest.raises(BenchError, match="no place for results"):
        write_page({}, page, Path("plot.svg"))
    assert page.read_text() == "nothing here\n"


def test_without_its_root_computed_contents_are_refused(
    emulator_environ: dict[str, str], tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gpustasis_bench.bench", "--workloads", "random,inference"],
        env=emulator_environ | {"GPUSTASIS_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 20
    assert f"there is no root {tmp_path}/roots/torch; ci/test-root torch makes it" in ended.stderr
    assert "inference" in ended.stderr


def test_a_content_made_in_a_debian_root_is_the_same(tmp_path: Path) -> None:
    """The way of those that PyTorch computes; engines is a root with Python as well."""
    made = [
        make_content("random", 5 * MIB, 7, tmp_path / name, root)
        for name, root in (("here", None), ("there", require_root("engines")))
    ]
    here, there = ((each.folder / "tensors.bin").read_bytes() for each in made)
    assert len(here) == 5 * MIB
    assert here == there
    assert here.count(0) < len(here) / 100
    layouts = [each.layout(0).read_text().splitlines() for each in made]
    assert layouts[0][1:] == layouts[1][1:]
    for each, lines in zip(made, layouts, strict=True):
        assert lines[0] == f"file {each.folder}/tensors.bin"
    again = make_content("random", 5 * MIB, 7, tmp_path / "there", require_root("engines"))
    assert again == made[1]


def test_a_content_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"(?s)inference was not made.*No module named 'torch'"):
        make_content("inference", 5 * MIB, 7, tmp_path, require_root("engines"))
    assert not list(tmp_path.glob("inference-*k-7"))


def fill_two_states(writer: ContentWriter) -> None:
    writer.add("first", "noise", os.urandom(3 * MIB))
    writer.add("second", "noise", os.urandom(1000))
    writer.add_untouched("third", "nothing", 12 * MIB)
    writer.next_state()
    writer.change("second", os.urandom(1000))


@pytest.fixture
def content(tmp_path: Path) -> Content:
    folder = tmp_path / "contents" / "sample"
    folder.mkdir(parents=True)
    writer = ContentWriter(folder)
    fill_two_states(writer)
    writer.finish("sample", folder)
    made = read_content(folder)
    assert made is not None
    return made


def test_content_is_read_as_it_was_written(content: Content, tmp_path: Path) -> None:
    assert (content.segments, content.states, content.tensors) == (2, 2, 3)
    assert content.gpu_bytes == (20 + 2) * MIB  # the third lies beside the first
    assert read_content(tmp_path / "contents" / "other") is None


def test_the_target_holds_what_it_is_told_to(course: Course, content: Content) -> None:
    with course.target(content) as target:
        first = target.digest()
        assert first.endswith(f" {content.gpu_bytes}")
        target.load(content.layout(1))
        assert target.digest() != first
        target.load(content.layout(0))
        assert target.digest() == first
        with pytest.raises(BenchError, match="cannot open"):
            target.load(content.folder / "none.layout")


def test_a_restored_process_that_differs_is_told(
    course: Course, content: Content, medium: Medium
) -> None:
    ours = CONTENDERS[OURS]
    with course.target(content) as target, course.images(medium) as images:
        wanted = target.digests()
        dumped = course.checkpointing.dump(target, images, ours)
        assert dumped.staged_bytes >= content.gpu_bytes
        (whole,) = wanted
        wrong = ("1" if whole[0] == "0" else "0") + whole[1:]
        with pytest.raises(WrongMemoryError, match="ours: restored, the memory is"):
            course.restore(target, [wrong], medium, [images], ours)
        target.kill()
        course.restore(target, wanted, medium, [images], ours)


def test_a_second_checkpoint_refers_to_the_first(
    course: Course, content: Content, medium: Medium
) -> None:
    ours = CONTENDERS[OURS]
    with (
        course.target(content) as target,
        course.images(medium) as first,
        course.images(medium) as second,
    ):
        course.checkpointing.dump(target, first, ours, leave_running=True)
        target.load(content.layout(1))
        wanted = target.digests()
        dumped = course.checkpointing.dump(target, second, ours, first)
        assert dumped.count("ref") >= 12
        assert dumped.count("raw") + dumped.count("lz4") == 1
        course.restore(target, wanted, medium, [first, second], ours)


def test_a_job_left_running_says_how_long_it_stood_still(
    course: Course, content: Content, medium: Medium, emulator: Emulator
) -> None:
    emulator.set("d2h_ms_per_gib", "20000")  # 430 ms for 22 MiB
    found = running.measure_content(course, content, medium, 1)
    for one in found["contenders"].values():
        assert 0.4 < one["driver_seconds"] < one["downtime_seconds"] < 20
        assert one["driver_seconds"] <= one["hook_seconds"]
    assert found["ratio"]["pairs"] == 1


def test_gpus_of_a_task_copy_side_by_side_and_tasks_are_a_tree(
    course: Course, medium: Medium, emulator: Emulator
) -> None:
    emulator.set("d2h_ms_per_gib", "200000")
    with course.tree(2) as target:
        target.spread(2, 16 * MIB)
        wanted = target.digests()
        assert len({digest.split()[0] for digest in wanted}) == 2
        assert all(digest.endswith(f" {32 * MIB}") for digest in wanted)
        target.watch()
        with course.images(medium) as images:
            dumped = course.checkpointing.dump(target, images, CONTENDERS[OURS], leave_running=True)
        assert target.gap_seconds() > 3
        assert target.digests() == wanted
    one_gpu = 200.0 * 16 / 1024
    phases = [task["phases_ms"]["driver_checkpoint"] / 1000 for task in dumped.record["tasks"]]
    assert len(phases) == 2
    # What was waited for one task after the other: they are checkpointed side by side, too.
    assert sum(phases) < 2 * one_gpu, "two GPUs take as long as one"


def test_a_dump_that_fails_says_why(course: Course, content: Content, medium: Medium) -> None:
    with (
        course.target(content) as target,
        course.images(medium) as images,
        pytest.raises(BenchError, match="cannot open the parent"),
    ):
        course.checkpointing.dump(target, images, CONTENDERS[OURS], medium.folder / "none")


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        (tmp_path / f"gpustasis-bench-{owner}-disk" / "images-0").mkdir(parents=True)
    remove_leftovers(tmp_path, "gpustasis-bench-*-*")
    assert [each.name for each in tmp_path.iterdir()] == [f"gpustasis-bench-{os.getpid()}-disk"]
