"""The book-keeping of a store of blocks: who must go when it is full; and the leaves of a store on disk."""

from __future__ import annotations

import os

import pytest

from kvsched.connector.disk import DiskTier, disk_key, path_of, scan, write_atomically
from kvsched.connector.host import HostTier
from kvsched.connector.store import StoreIndex, checksum


def filled(*keys: bytes, capacity: int = 30) -> StoreIndex:
    """An index with keys of 10 bytes each, entered in order."""
    index = StoreIndex(capacity)
    for key in keys:
        assert index.add(key, 10) == ()
    return index


def test_the_longest_unused_goes_first():
    index = filled(b"a", b"b", b"c")
    index.use([b"a"])
    assert index.add(b"d", 10) == (b"b",)
    assert list(index) == [b"c", b"a", b"d"]
    assert index.used_bytes == 30
    assert index.add(b"e", 25) == (b"c", b"a", b"d")
    assert index.used_bytes == 25


def test_a_chain_is_evicted_from_its_tail():
    index = filled(b"head", b"middle", b"tail")
    index.use([b"head", b"middle", b"tail"])
    assert index.add(b"x", 10) == (b"tail",)
    assert index.add(b"y", 10) == (b"middle",)


def test_pinned_keys_stay_and_a_full_store_changes_nothing():
    index = filled(b"a", b"b", b"c")
    index.pin([b"a", b"b"])
    index.pin([b"a"])
    assert index.add(b"d", 10) == (b"c",)
    assert index.add(b"e", 20) is None
    assert list(index) == [b"a", b"b", b"d"]
    index.unpin([b"a", b"b"])
    assert index.add(b"e", 10) == (b"b",)  # a is pinned once more
    index.unpin([b"a"])
    assert index.add(b"f", 10) == (b"a",)
    with pytest.raises(AssertionError, match="more often"):
        index.unpin([b"a"])


def test_what_is_dropped_gives_its_bytes_back():
    index = filled(b"a", b"b")
    assert index.drop(b"a")
    assert not index.drop(b"a")
    assert (index.used_bytes, b"a" in index, len(index)) == (10, False, 1)


def test_a_checksum_sees_one_flipped_bit():
    data = bytearray(range(256)) * 40
    before = checksum(data)
    data[5000] ^= 1
    assert checksum(data) != before


@pytest.mark.parametrize("options", [{"capacity_bytes": 0}, {"min_tokens_to_load": -1}])
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        HostTier(**options)
    with pytest.raises(ValueError, match=next(iter(options))):
        DiskTier(folder="x", **options)
    with pytest.raises(ValueError, match="capacity_bytes"):
        StoreIndex(0)


def test_the_key_on_disk_covers_weights_layout_and_content():
    keys = {disk_key(w, layout, h) for w in ("w", "w1") for layout in ("l", "1l") for h in (b"h", b"i")}
    assert len(keys) == 8
    assert all(len(key) == 16 for key in keys)


def test_files_appear_complete_or_not_at_all(tmp_path):
    key = bytes(16)

    def fails(path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path, key, fails)
    assert list(tmp_path.iterdir()) == []
    write_atomically(tmp_path, key, lambda path: path.write_bytes(b"one") and None)
    write_atomically(tmp_path, key, lambda path: path.write_bytes(b"two") and None)
    assert path_of(tmp_path, key).read_bytes() == b"two"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_scan_orders_by_last_use_and_skips_what_is_not_ours(tmp_path):
    for age, name in ((1, "b"), (3, "a"), (2, "c")):
        path = path_of(tmp_path, name.encode() * 16)
        path.write_bytes(name.encode() * age)
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".lock").touch()
    (tmp_path / ".partial-1-abc").write_bytes(b"half")
    found = scan(tmp_path, lambda path: "damaged" if path.read_bytes() == b"cc" else None)
    assert found.stored == ((b"a" * 16, 3), (b"b" * 16, 1))
    assert found.skipped == ((path_of(tmp_path, b"c" * 16).name, "damaged"), ("notes.txt", "not the name of a block"))
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / ".partial-1-abc").exists()
