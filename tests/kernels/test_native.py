"""Libraries in the cache: only what nobody else can have written is opened."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rankwise.kernels import native

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="rights of files are checked where they are bits of a file"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
]
OWN, PLANTED = 42, 7
SOURCE = f"int answer(void) {{ return {OWN}; }}\n"
# what is opened runs, whether anybody calls it or not
TRAP = f"""
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{ fclose(fopen(MARK, "w")); }}
int answer(void) {{ return {PLANTED}; }}
"""


class Place:
    """A kernel, the cache it is kept in, and a library planted there under its name."""

    def __init__(self, folder: Path) -> None:
        # the name of the folder is in that of the library, and a process opens a name once
        self.source = folder / f"kernel-{folder.name}" / "small.c"
        self.source.parent.mkdir()
        self.source.write_text(SOURCE)
        self.folder, self.mark = folder / "cache" / "kernels", folder / "planted"
        self.folder.mkdir(parents=True, mode=0o700)
        fingerprint = native._fingerprint(self.source, [str(COMPILER)])
        self.file = self.folder / f"{self.source.parent.name}-small-{fingerprint}.so"
        trap = folder / "trap.c"
        trap.write_text(TRAP)
        mark = f'-DMARK="{self.mark}"'
        subprocess.run([str(COMPILER), mark, "-shared", "-fPIC", "-o", str(self.file), str(trap)], check=True)
        self.file.chmod(0o755)

    def answer(self) -> int:
        found: int = native.library.__wrapped__(self.source).answer()
        assert self.mark.exists() == (found == PLANTED)
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("RANKWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return Place(tmp_path)


def given_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 65534, 65534)


def linked(path: Path) -> None:
    elsewhere = path.parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


RIGHTS: dict[str, Callable[[Path], None]] = {
    "of another user": given_away,
    "the group may write": lambda path: path.chmod(0o775),
    "all may write": lambda path: path.chmod(0o757),
}


def test_what_is_the_user_s_own_is_opened(place: Place) -> None:
    assert place.answer() == PLANTED


@pytest.mark.parametrize("how", [*RIGHTS, "a link"])
def test_a_library_that_others_may_have_written_is_built_anew_in_its_place(how: str, place: Place) -> None:
    (RIGHTS | {"a link": linked})[how](place.file)
    assert place.answer() == OWN
    status = place.file.lstat()
    assert (status.st_uid, status.st_mode & 0o022) == (os.geteuid(), 0)
    assert [path.name for path in place.folder.iterdir()] == [place.file.name]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("how", RIGHTS)
def test_nothing_is_opened_in_a_folder_that_others_may_write_to(how: str, link: bool, place: Place) -> None:
    folder, before = place.folder, place.file.read_bytes()
    if link:
        linked(folder)
    RIGHTS[how](folder.resolve())
    with pytest.warns(RuntimeWarning, match=f"must be yours, and writable by nobody else, but {folder} is not"):
        assert place.answer() == OWN
    assert place.file.read_bytes() == before
    assert [path.name for path in place.folder.iterdir()] == [place.file.name]


def test_a_link_to_a_folder_of_the_user_s_own_is_as_good(place: Place) -> None:
    linked(place.folder)
    assert place.answer() == PLANTED


def test_what_is_built_can_be_written_by_nobody_else_whatever_the_umask(place: Place) -> None:
    shutil.rmtree(place.folder.parent)
    before = os.umask(0)
    try:
        assert place.answer() == OWN
    finally:
        os.umask(before)
    for path in (place.folder, place.file):
        assert path.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs a system that shows descriptors as files")
def test_a_folder_that_is_exchanged_after_it_was_checked_is_not_opened(place: Place, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    with native._open_store(place.folder) as store:
        assert store is not None
        place.folder.rename(mine)
        place.folder.mkdir()
        (place.folder / place.file.name).write_bytes(b"theirs")
        assert store.load(place.file.name).answer() == PLANTED
        (tmp_path / place.file.name).write_bytes(b"new")
        store.keep(tmp_path / place.file.name)
    assert place.file.read_bytes() == b"theirs"
    assert (mine / place.file.name).read_bytes() == b"new"
