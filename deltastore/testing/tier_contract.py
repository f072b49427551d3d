"""What every tier must do, as tests: subclass :class:`TierContract`, give it a ``tier`` fixture, and pytest runs them.

::

    class TestMyTier(TierContract):
        @pytest.fixture
        def tier(self, tmp_path):
            return MyTier(tmp_path / "store")      # not yet created
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltastore.errors import AlreadyExists, Backend, Conflict, Corruption, InvalidInput, NotFound
from deltastore.tiers.base import Buffer, FileInfo, Staged, Tier

SESSION = "00112233aabbccdd"
PACK = "packs/e1-0-0-ab.zip"


class TierContract:
    """The contract of :mod:`deltastore.tiers.base`.

    A subclass gives the fixture ``tier``, a place where no store is yet, and overrides ``again`` if another object
    for the same place is made otherwise than by the class and the url.
    """

    @pytest.fixture
    def tier(self) -> Tier:
        """Return a tier where no store is yet."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tier: Tier) -> Tier:
        """Return the tier, created."""
        tier.create()
        return tier

    def again(self, tier: Tier) -> Tier:
        """Return another object for the same place."""
        return tier

    def test_a_new_place_holds_nothing(self, tier: Tier) -> None:
        """Reading where there is no store neither fails oddly nor makes one."""
        tier.check_writable()
        assert not tier.exists()
        assert tier.list("packs") == [] == tier.list("tags")
        tier.sync("packs")
        tier.delete(PACK)
        with pytest.raises(NotFound):
            tier.read("FORMAT.json")
        assert not tier.exists()

    def test_nothing_is_staged_before_create(self, tier: Tier) -> None:
        """A root that is gone is not made anew by a write."""
        with pytest.raises(Backend) as caught:
            tier.stage(PACK, [b"x"], SESSION)
        assert caught.value.errno == errno.ENOENT
        assert not tier.exists()

    def test_create_twice(self, made: Tier) -> None:
        """Creating again keeps what is there."""
        made.publish_new(PACK, [b"x"], SESSION)
        made.create()
        made.check_writable()
        assert made.exists()
        assert self.again(made).exists()
        assert made.read(PACK) == b"x"

    def test_published_whole(self, made: Tier) -> None:
        """A file is what its parts were, of any kind and any number, and has its size."""
        parts: list[Buffer] = [
            b"ab",
            b"",
            bytearray(b"cd"),
            memoryview(b"xefx")[1:3],
            *(b"%d" % i for i in range(3000)),
        ]
        parts.append(memoryview(bytearray(8)).cast("I"))
        expected = b"".join(bytes(part) for part in parts)
        assert made.publish_new(PACK, parts, SESSION) == len(expected)
        assert made.read(PACK) == expected
        assert made.list("packs") == [FileInfo(PACK, len(expected))]
        assert self.again(made).read(PACK) == expected

    def test_an_empty_file(self, made: Tier) -> None:
        """No parts make an empty file."""
        assert made.publish_new(PACK, [], SESSION) == 0
        with made.open(PACK) as file:
            assert file.size == 0
            assert file.read(0, 0) == b""
            file.readinto(0, [])

    def test_staged_is_invisible(self, made: Tier) -> None:
        """Only publish makes a file visible."""
        staged = made.stage(PACK, [b"abc"], SESSION)
        assert (staged.name, staged.size) == (PACK, 3)
        assert made.list("packs") == []
        with pytest.raises(NotFound):
            made.open(PACK)
        made.publish(staged)
        assert made.read(PACK) == b"abc"

    def test_what_was_given_is_copied(self, made: Tier) -> None:
        """Neither the caller's array nor what is read is part of the store."""
        source = bytearray(b"before")
        staged = made.stage(PACK, [source], SESSION)
        source[:] = b"after!"
        made.publish(staged)
        with made.open(PACK) as file:
            target = bytearray(6)
            file.readinto(0, [memoryview(target)])
            target[:] = b"target"
        assert made.read(PACK) == b"before"

    def test_discard(self, made: Tier) -> None:
        """What is discarded is not published, twice is fine, and a published file stays."""
        staged = made.stage(PACK, [b"abc"], SESSION)
        made.discard(staged)
        made.discard(staged)
        with pytest.raises(Backend):
            made.publish(staged)
        assert made.list("packs") == []
        published = made.stage(PACK, [b"abc"], SESSION)
        made.publish(published)
        made.discard(published)
        assert made.read(PACK) == b"abc"

    def test_a_name_is_taken_once(self, made: Tier) -> None:
        """The second of one name is refused and changes nothing."""
        first, second = made.stage(PACK, [b"1"], SESSION), made.stage(PACK, [b"2"], SESSION)
        made.publish(first)
        for staged in (second, first):
            with pytest.raises(AlreadyExists):
                made.publish(staged)
        with pytest.raises(AlreadyExists):
            made.publish_new(PACK, [b"3"], SESSION)
        assert made.read(PACK) == b"1"

    def test_one_of_many_threads_wins(self, made: Tier) -> None:
        """Of several threads that publish one name exactly one succeeds, and its bytes are there."""
        barrier = threading.Barrier(8)

        def race(number: int) -> int | None:
            staged = made.stage(PACK, [b"%d" % number], SESSION)
            barrier.wait(30)
            try:
                made.publish(staged)
            except AlreadyExists:
                made.discard(staged)
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [number for number in pool.map(race, range(8)) if number is not None]
        assert len(winners) == 1
        assert made.read(PACK) == b"%d" % winners[0]

    @pytest.mark.parametrize("error", [ValueError("mine"), OSError(errno.EIO, "theirs"), KeyboardInterrupt()])
    def test_parts_that_fail_leave_nothing(self, made: Tier, error: BaseException) -> None:
        """An error of the caller's parts passes through; one of the system becomes Backend with its errno."""

        def parts() -> Iterator[bytes]:
            yield b"x" * 100_000
            raise error

        kind = Backend if isinstance(error, OSError) else type(error)
        with pytest.raises(kind) as caught:
            made.publish_new(PACK, parts(), SESSION)
        if isinstance(caught.value, Backend):
            assert caught.value.errno == errno.EIO
        assert made.list("") == [] or [info.name for info in made.list("")] == [f"tmp/{SESSION}/OWNER"]
        made.publish_new(PACK, [b"again"], SESSION)
        assert made.read(PACK) == b"again"

    @pytest.mark.parametrize(
        "name", ["", "/etc/passwd", "../x", "packs/../../x", "packs//x", "packs/", ".", "a\0b", "packs/x\n", "é", "a b"]
    )
    def test_bad_names(self, made: Tier, name: str) -> None:
        """A name that could lead out of the store, or that not every tier can hold, is refused everywhere."""
        for call in (made.read, made.open, made.delete):
            with pytest.raises(InvalidInput):
                call(name)
        with pytest.raises(InvalidInput):
            made.stage(name, [b"x"], SESSION)
        with pytest.raises(InvalidInput):
            made.publish(Staged(name, 1, "tmp/s/0-x"))
        if name:
            with pytest.raises(InvalidInput):
                made.list(name)
            with pytest.raises(InvalidInput):
                made.sync(name)
        with pytest.raises(InvalidInput):
            made.stage(PACK, [b"x"], name or "a/b")

    @pytest.mark.parametrize("name", ["LOCK", "tmp/x", "tmp"])
    def test_the_tiers_own_names(self, made: Tier, name: str) -> None:
        """LOCK and tmp are neither published nor deleted."""
        with pytest.raises(InvalidInput):
            made.stage(name, [b"x"], SESSION)
        with pytest.raises(InvalidInput):
            made.delete(name)

    def test_list(self, made: Tier) -> None:
        """Files of a folder and of those below it, sorted, with full names; others and unknown folders not."""
        names = ["tags/b/2.json", "tags/b/10.json", "tags/a/1.json", "epochs/1.json", "FORMAT.json"]
        for size, name in enumerate(names):
            made.publish_new(name, [bytes(size)], SESSION)
        assert made.list("tags") == [
            FileInfo("tags/a/1.json", 2),
            FileInfo("tags/b/10.json", 1),
            FileInfo("tags/b/2.json", 0),
        ]
        assert [info.name for info in made.list("tags/b")] == ["tags/b/10.json", "tags/b/2.json"]
        assert made.list("tag") == [] == made.list("packs") == made.list("cache")
        assert set(names) <= {info.name for info in made.list("")}

    def test_folders_are_made(self, made: Tier) -> None:
        """A file may go into a folder that ``create`` did not make, however deep."""
        for name in ("cache/a", "tags/x/y/z"):
            made.publish_new(name, [b"x"], SESSION)
            assert made.read(name) == b"x"

    def test_ranges(self, made: Tier) -> None:
        """Any range, into any number of buffers, in any order."""
        data = bytes(range(256)) * 40
        made.publish_new(PACK, [data], SESSION)
        with made.open(PACK) as file:
            assert file.size == len(data)
            assert file.read(1000, 17) == data[1000:1017]
            assert file.read(len(data), 0) == b""
            buffers = [bytearray(3), bytearray(0), bytearray(256), *(bytearray(1) for _ in range(2500))]
            file.readinto(5, [memoryview(buffer) for buffer in buffers])
            assert b"".join(buffers) == data[5 : 5 + 259 + 2500]
            words = memoryview(bytearray(64)).cast("Q")
            file.readinto(64, [words])
            assert bytes(words) == data[64:128]

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (11, 0), (-1, 2), (3, -1), (1 << 62, 1 << 62)])
    def test_short_is_corruption(self, made: Tier, offset: int, length: int) -> None:
        """Bytes that are not there are an error that says where, never zeros; nothing large is allocated before."""
        made.publish_new(PACK, [bytes(10)], SESSION)
        with made.open(PACK) as file:
            with pytest.raises(Corruption) as caught:
                file.read(offset, length)
            assert PACK in str(caught.value)
            assert (caught.value.offset, caught.value.expected) == (offset, length)
            assert 0 <= caught.value.found <= 10
            if 0 <= length < 100:
                with pytest.raises(Corruption):
                    file.readinto(offset, [memoryview(bytearray(length))] if length else [])

    def test_an_open_file_outlives_its_name(self, made: Tier) -> None:
        """A reader keeps what it holds open when retention deletes it."""
        made.publish_new(PACK, [b"still here"], SESSION)
        with made.open(PACK) as file:
            made.delete(PACK)
            made.delete(PACK)
            assert file.read(6, 4) == b"here"
        with pytest.raises(NotFound):
            made.open(PACK)
        assert made.list("packs") == []
        made.publish_new(PACK, [b"new"], SESSION)
        assert made.read(PACK) == b"new"

    def test_a_closed_file(self, made: Tier) -> None:
        """Closing twice is fine, reading after it is the caller's mistake."""
        made.publish_new(PACK, [b"abc"], SESSION)
        file = made.open(PACK)
        file.close()
        file.close()
        with pytest.raises(InvalidInput):
            file.read(0, 1)

    def test_many_readers_of_one_file(self, made: Tier) -> None:
        """Threads share an open file without moving each other's place."""
        data = bytes(range(256)) * 256
        made.publish_new(PACK, [data], SESSION)
        with made.open(PACK) as file, ThreadPoolExecutor(4) as pool:
            offsets = [(i * 7919) % 60_000 for i in range(200)]
            assert list(pool.map(lambda at: file.read(at, 999), offsets)) == [data[at : at + 999] for at in offsets]

    def test_sync(self, made: Tier) -> None:
        """Every folder may be synced, the root too."""
        made.publish_new("tags/a/1.json", [b"x"], SESSION)
        for folder in ("packs", "epochs", "tags", "tags/a", "", "cache"):
            made.sync(folder)

    def test_free_bytes(self, made: Tier) -> None:
        """Known and positive, or not known."""
        free = made.free_bytes()
        assert free is None or free > 0

    def test_one_writer(self, made: Tier) -> None:
        """The second writer is told who the first is; when that one has gone, the next comes in."""
        lock = made.lock({"session": SESSION})
        assert lock.held()
        with pytest.raises(Conflict) as caught:
            self.again(made).lock({"session": "other"})
        assert caught.value.host == lock.owner["host"]
        assert caught.value.pid == lock.owner["pid"]
        assert caught.value.owner["session"] == SESSION
        assert str(caught.value.pid) in str(caught.value)
        assert caught.value.host in str(caught.value)
        lock.release()
        lock.release()
        assert not lock.held()
        with self.again(made).lock({"session": "next"}) as following:
            assert following.held()
            lock.release()
            assert following.held()
            with pytest.raises(Conflict):
                made.lock({})

    def test_clean_keeps_the_living(self, made: Tier) -> None:
        """What a live session has staged can still be published after a clean by another."""
        staged = made.stage(PACK, [b"abc"], SESSION)
        assert self.again(made).clean("other") == []
        made.publish(staged)
        assert made.read(PACK) == b"abc"

    def test_end_session(self, made: Tier) -> None:
        """A session that ends takes its leftovers along, nobody else's; twice is fine, and it may go on."""
        mine, others = made.stage(PACK, [b"a"], SESSION), made.stage("packs/x", [b"b"], "other")
        made.end_session(SESSION)
        made.end_session(SESSION)
        with pytest.raises(Backend):
            made.publish(mine)
        made.publish(others)
        made.publish_new(PACK, [b"c"], SESSION)
        assert [info.name for info in made.list("packs")] == [PACK, "packs/x"]
