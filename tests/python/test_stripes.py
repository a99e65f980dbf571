"""Images with stripes: what the Python side makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner

from gpustasis._core import CorruptDataError, ImageReader, UnsupportedDataError, image_name
from gpustasis.cli.inspect import command as inspect
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.flatten import flatten
from gpustasis.image.inspection import inspect_directory
from gpustasis.image.plain_reader import PlainImage, PlainSource
from gpustasis.image.verification import verify_directory
from support.chains import contents, make_chain, make_link, memory_of

STRIPE = image_name(7, 1)


def plain_reader(directory: Path) -> PlainImage:
    def read_source(source: PlainSource) -> bytes:
        assert source.depth == 0
        return (directory / image_name(source.pid, source.stripe)).read_bytes()

    return PlainImage((directory / image_name(7)).read_bytes(), read_source)


def verdict(read: Callable[[], object]) -> str:
    try:
        read()
    except (CorruptDataError, ImageError):
        return "corrupt"
    except (UnsupportedDataError, UnsupportedError):
        return "unsupported"
    return "whole"


def sealed_stripe(file: bytearray) -> bytes:
    """`file` with its own checksums made right."""
    file[80:96] = xxhash.xxh3_128_digest(file[:80])
    file[-40:-24] = file[80:96]
    file[-16:] = xxhash.xxh3_128_digest(file[-64:-16])
    return bytes(file)


def test_both_readers_refuse_the_same_stripes(tmp_path: Path) -> None:
    """One byte changed in header, padding, chunk data or trailer, checksums made right or not. The
    digest that the image holds makes all of it corrupt but what has no meaning and no effect."""
    (directory,) = make_chain(tmp_path, 0, stripes=2)
    whole = (directory / STRIPE).read_bytes()
    generator = random.Random(3)
    places = [*range(128), *range(len(whole) - 64, len(whole))]
    places += generator.choices(range(128, len(whole) - 64), k=50)
    seen = set()
    for at in places:
        file = bytearray(whole)
        file[at] = generator.choice([0, 1, 2, 4, 255, file[at] ^ 1])
        damaged = sealed_stripe(file) if generator.random() < 0.8 else bytes(file)
        (directory / STRIPE).write_bytes(damaged)
        core = verdict(lambda: ImageReader.open(directory / image_name(7)).verify(1))
        plain = verdict(lambda: plain_reader(directory).verify())
        assert {core, plain} <= {"corrupt", "unsupported"} or core == plain == "whole", at
        assert (core == "whole") == (damaged == whole), at
        seen.add(core)
    assert {"corrupt", "whole"} <= seen


def test_verify_names_what_is_wrong_with_a_stripe(tmp_path: Path) -> None:
    (directory,) = make_chain(tmp_path, 0, stripes=3)
    assert verify_directory(directory).problems == []
    path = directory / image_name(7, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    (problem,) = verify_directory(directory).problems
    assert f"{path.name}: is {len(whole) - 1} bytes long" in problem
    path.unlink()
    (problem,) = verify_directory(directory).problems
    assert path.name in problem
    assert "No such file" in problem
    path.write_bytes(whole)
    (directory / image_name(7, 3)).write_bytes(whole)  # one that is not of this image
    (problem,) = verify_directory(directory).problems
    assert f"{image_name(7, 3)}: not named" in problem


def test_flatten_makes_one_file_of_stripes(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2, stripes=3)
    done = flatten(chain[-1], tmp_path / "flat")
    assert done.images == 1
    names = {path.name for path in (tmp_path / "flat").glob("gpustasis-*")}
    assert names == {"gpustasis-manifest.img", image_name(7)}
    assert contents(tmp_path / "flat") == contents(chain[-1])
    assert verify_directory(tmp_path / "flat").problems == []


def test_a_stripe_of_an_earlier_checkpoint_is_needed(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2, stripes=2)
    found = verify_directory(chain[-1])
    assert (found.problems, found.earlier_checkpoints) == ([], 2)
    (chain[0] / STRIPE).rename(chain[0] / "elsewhere")
    (problem,) = verify_directory(chain[-1]).problems
    assert f"{STRIPE} of checkpoint" in problem
    states = {
        (source.depth, source.stripe): source.state
        for process in inspect_directory(chain[-1]).processes
        if process.cuda is not None and process.cuda.image is not None
        for source in process.cuda.image.sources
    }
    assert states[2, 1] == "missing"
    assert {state for place, state in states.items() if place != (2, 1)} == {"right"}


def test_inspect_counts_stripes(tmp_path: Path) -> None:
    (directory,) = make_chain(tmp_path, 0, stripes=3)
    found = inspect_directory(directory)
    (image,) = (p.cuda.image for p in found.processes if p.cuda is not None)
    assert image is not None
    files = [directory / image_name(7, stripe) for stripe in range(3)]
    assert image.file_bytes == found.gpu_image_bytes == sum(f.stat().st_size for f in files)
    manifest, inventory = directory / "gpustasis-manifest.img", directory / "inventory.img"
    assert found.other_bytes == manifest.stat().st_size + inventory.stat().st_size
    text = CliRunner().invoke(inspect, [str(directory)]).output
    assert "chunk data in 3 files" in text
    assert "from " not in text


@pytest.mark.parametrize("stripes", [0, 1])
def test_a_small_image_is_one_file(tmp_path: Path, stripes: int) -> None:
    make_link(tmp_path / "c", {7: memory_of(["A", "b", "0"])}, stripes=stripes)
    assert not list((tmp_path / "c").glob("gpustasis-7.*.img"))


def test_too_many_stripes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stripes out of range: 17"):
        make_link(tmp_path / "c", {7: memory_of(["A"])}, stripes=17)
    assert not (tmp_path / "c" / image_name(7)).exists()
