"""`egeria_lab.data.activation_cache`, its store and its reading thread; no model is needed here."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from egeria_lab.data import activation_store, prefetch
from egeria_lab.data.activation_cache import ActivationCache, CachedPrefix
from egeria_lab.data.activation_store import CacheStore
from egeria_lab.data.prefetch import Prefetcher
from egeria_lab.data.row_format import RowFormat
from egeria_lab.errors import InvalidSettingError

Events = list[tuple[str, str]]


def values(ids: Tensor, views: Tensor, width: int = 6) -> Tensor:
    """What a prefix would give: another row for each (id, view)."""
    return torch.sin(ids[:, None] * 7.3 + views[:, None] * 3.1 + torch.arange(width) * 0.9)


def zeros(ids: Tensor) -> Tensor:
    return torch.zeros_like(ids)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[CachedPrefix, Events]]]:
    opened: list[CachedPrefix] = []

    def build(num_samples: int = 100, views: int = 1, **settings: Any) -> tuple[CachedPrefix, Events]:
        events: Events = []
        settings.setdefault("directory", tmp_path / "cache")
        cache = CachedPrefix(
            ActivationCache(**settings),
            num_samples=num_samples,
            views=views,
            on_event=lambda kind, message: events.append((kind, message)),
        )
        opened.append(cache)
        return cache, events

    yield build
    for cache in opened:
        cache.close()


def kinds(events: Events) -> list[str]:
    return [kind for kind, _ in events]


IDS = torch.arange(20)


# --- rows ------------------------------------------------------------------------------------------------


def test_rows_come_back_by_id_and_view(make: Any) -> None:
    cache, events = make(views=3)
    views = IDS % 3
    cache.put(1, IDS, views, [values(IDS, views)])
    order = torch.randperm(20)
    tensors, hit = cache.fetch(1, order, order % 3)
    assert bool(hit.all())
    assert torch.equal(tensors[0], values(order, order % 3))
    _, hit = cache.fetch(1, order, (order + 1) % 3)
    assert not bool(hit.any())
    assert kinds(events) == ["built"]


def test_missing_rows_are_marked(make: Any) -> None:
    cache, _ = make()
    cache.put(0, IDS, zeros(IDS), [values(IDS, zeros(IDS))], mask=IDS < 5)
    tensors, hit = cache.fetch(0, IDS, zeros(IDS))
    assert hit.tolist() == [True] * 5 + [False] * 15
    assert torch.equal(tensors[0][:5], values(IDS[:5], zeros(IDS[:5])))
    assert (cache.statistics.hits, cache.statistics.misses, cache.statistics.rows) == (5, 15, 5)
    nothing, hit = cache.fetch(3, IDS, zeros(IDS))
    assert nothing is None
    assert not bool(hit.any())


def test_a_sample_twice_in_a_batch(make: Any) -> None:
    cache, _ = make()
    twice = torch.tensor([4, 4, 9])
    cache.put(0, twice, zeros(twice), [values(twice, zeros(twice))])
    assert cache.statistics.rows == 2
    tensors, hit = cache.fetch(0, twice, zeros(twice))
    assert bool(hit.all())
    assert torch.equal(tensors[0], values(twice, zeros(twice)))


TENSORS = {
    "matrix": [torch.randn(4, 7)],
    "images": [torch.randn(4, 3, 5, 2)],
    "channels last": [torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)],
    "one channel": [torch.randn(4, 1, 5, 2)],
    "transposed": [torch.randn(4, 6, 5).transpose(1, 2)],
    "batch inside": [torch.randn(5, 4, 6).transpose(0, 1)],
    "numbers": [torch.randn(4)],
    "several": [torch.randn(4, 3), torch.randint(9, (4, 2, 2)), torch.tensor([True, False, True, True])],
    "float64": [torch.randn(4, 3, dtype=torch.float64)],
    "bfloat16": [torch.randn(4, 3).bfloat16()],
    "odd bytes": [torch.randint(9, (4, 3), dtype=torch.uint8), torch.randn(4, 3, dtype=torch.float64)],
    "empty": [torch.randn(4, 0), torch.randn(4, 2)],
}


@pytest.mark.parametrize("name", TENSORS)
def test_exact_rows_keep_bits_dtype_and_memory_order(name: str) -> None:
    tensors = TENSORS[name]
    form = RowFormat(tensors)
    back = form.decode(form.encode(tensors))
    for was, now in zip(tensors, back, strict=True):
        assert was.dtype == now.dtype
        assert torch.equal(was, now)
        assert was.stride() == now.stride() or was.numel() == 0
    assert form.fits(back)
    assert not form.fits([x[:, None] for x in tensors])


def test_nan_and_infinity_survive() -> None:
    tensor = torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-42]])
    back = RowFormat([tensor]).decode(RowFormat([tensor]).encode([tensor]))[0]
    assert tensor.view(torch.int32).tolist() == back.view(torch.int32).tolist()
    lossy = RowFormat([tensor], "int8")
    assert bool(lossy.decode(lossy.encode([tensor]))[0][0].isnan().all())


@pytest.mark.parametrize(("dtype", "bound", "size"), [("float16", 5e-4, 2), ("bfloat16", 4e-3, 2), ("int8", 1e-2, 1)])
def test_small_dtypes_round_and_say_how_much(make: Any, dtype: str, bound: float, size: int) -> None:
    cache, _ = make(dtype=dtype)
    data = torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None]  # a scale for each sample
    counts = torch.randint(1000, (20, 3))
    cache.put(0, IDS, zeros(IDS), [data, counts])
    tensors, hit = cache.fetch(0, IDS, zeros(IDS))
    assert bool(hit.all())
    assert torch.equal(tensors[1], counts)  # integers are kept
    error = (tensors[0] - data).norm(dim=1) / data.norm(dim=1)
    assert 0 < float(error.max()) < bound
    assert 0 < cache.statistics.relative_error < bound
    assert RowFormat([data], dtype).num_bytes <= 64 * size + 4


def test_rows_of_another_shape_are_not_mixed_in(make: Any) -> None:
    cache, _ = make()
    cache.put(0, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    cache.put(0, IDS + 20, zeros(IDS), [values(IDS, zeros(IDS), width=9)])
    assert cache.statistics.rows == 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float8"},
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"prefetch_batches": -1},
        {"self_profiling": 1},
        {"directory": 3},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError, match=next(iter(wrong))):
        ActivationCache(**wrong)


# --- budget, boundaries, generations ---------------------------------------------------------------------


def test_a_budget_keeps_whole_rows_first_come(make: Any, tmp_path: Path) -> None:
    cache, events = make(max_bytes=24 * 7 + 5)
    for _ in range(2):
        for ids in IDS.split(5):
            cache.put(0, ids, zeros(ids), [values(ids, zeros(ids))])
    _, hit = cache.fetch(0, IDS, zeros(IDS))
    assert hit.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert kinds(events) == ["built", "full"]
    assert "7 rows" in events[1][1]
    assert cache.statistics.num_bytes <= 24 * 7 + 5
    taken = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("rows"))
    assert taken <= 4096


def test_the_nearest_boundary_feeds_the_gap_until_it_is_replaced(make: Any) -> None:
    cache, _ = make()
    assert cache.nearest(5) is None
    cache.put(1, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    assert (cache.nearest(0), cache.nearest(1), cache.nearest(4)) == (None, 1, 1)
    cache.put(3, IDS[:8], zeros(IDS[:8]), [values(IDS[:8], zeros(IDS[:8]), 2)])
    assert (cache.nearest(2), cache.nearest(3)) == (1, 3)
    cache.put(3, IDS[8:], zeros(IDS[8:]), [values(IDS[8:], zeros(IDS[8:]), 2)])
    assert cache.nearest(2) is None  # every row has moved on
    assert cache.nearest(3) == 3


def test_a_new_boundary_takes_the_budget_of_the_old_one(make: Any) -> None:
    cache, _ = make(max_bytes=24 * 20)
    cache.put(1, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    cache.put(2, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    assert cache.nearest(1) is None
    assert cache.statistics.rows == 20
    assert cache.statistics.num_bytes <= 24 * 20


def test_invalidation_forgets_everything_at_once(make: Any, tmp_path: Path) -> None:
    cache, events = make()
    cache.announce([(IDS, zeros(IDS))] * 5)
    cache.put(1, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    cache.fetch(1, IDS, zeros(IDS))  # now the thread has read ahead
    generation = cache.generation
    cache.invalidate("layers were thawed")
    assert cache.generation == generation + 1
    assert not bool(cache.fetch(1, IDS, zeros(IDS))[1].any())
    assert events[-1] == ("invalidated", "the activation cache forgot 20 rows: layers were thawed.")
    cache.put(1, IDS, zeros(IDS), [values(IDS + 1, zeros(IDS))])
    assert torch.equal(cache.fetch(1, IDS, zeros(IDS))[0][0], values(IDS + 1, zeros(IDS)))


# --- reading ahead ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_batches_are_read_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "SMALL_BATCH_BYTES", 0)


def run_epochs(cache: CachedPrefix, epochs: int, told: Callable[[list[Tensor]], Any] = lambda b: b) -> int:
    read = 0
    for epoch in range(epochs):
        order = torch.randperm(100, generator=torch.Generator().manual_seed(epoch)).split(16)
        batches = [(ids, zeros(ids)) for ids in order]
        cache.announce(told(batches))
        for ids, views in batches:
            tensors, hit = cache.fetch(0, ids, views)
            if tensors is not None:
                assert torch.equal(tensors[0][hit], values(ids, views)[hit])
                read += int(hit.sum())
            cache.put(0, ids, views, [values(ids, views)], mask=~hit)
    return read


@pytest.mark.parametrize("ahead", [0, 1, 4, 50])
def test_reading_ahead_gives_the_same_rows(make: Any, ahead: int) -> None:
    cache, _ = make(prefetch_batches=ahead)
    assert run_epochs(cache, 3) == 200
    assert ahead or cache.statistics.read_seconds == 0


def test_the_other_thread_does_the_reading() -> None:
    store = CacheStore(None, num_keys=100, row_bytes=8, max_bytes=10_000)
    keys = np.arange(100)
    rows = np.arange(800, dtype=np.int64).astype(np.uint8).reshape(100, 8)
    store.write(keys, rows)
    prefetcher = Prefetcher()
    for part in np.split(keys, 4):
        prefetcher.give(store, part)
    end = time.perf_counter() + 10
    while prefetcher._todo and time.perf_counter() < end:
        time.sleep(0.001)
    for part in np.split(keys, 4)[1:]:  # the first batch is passed over
        coming = prefetcher.take(store, part)
        assert coming is not None
        coming.read()
        assert coming.background_seconds > 0
        assert np.array_equal(coming.rows, rows[part])
    assert prefetcher.take(store, keys[:25]) is None
    prefetcher.close()
    store.close()


@pytest.mark.parametrize(
    "told",
    [
        lambda batches: [],
        lambda batches: batches[::-1],
        lambda batches: batches[2:],
        lambda batches: batches[::2],
        lambda batches: [(ids + 1) % 100 for ids, _ in batches] and [(ids.flip(0), v) for ids, v in batches],
        lambda batches: iter(batches),
    ],
)
def test_a_wrong_announcement_does_no_harm(make: Any, told: Any) -> None:
    cache, _ = make(prefetch_batches=3)
    assert run_epochs(cache, 3, told) == 200


def test_batches_are_drawn_only_as_far_as_needed(make: Any) -> None:
    cache, _ = make(prefetch_batches=2)
    drawn: list[int] = []

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            drawn.append(len(drawn))
            yield IDS + len(drawn) - 1, zeros(IDS)

    cache.announce(endless())
    for step in range(5):
        cache.fetch(0, IDS + step, zeros(IDS))
    assert len(drawn) == 7  # five that came and two ahead


# --- self-profiling --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "off"), [(1e-12, True), (10.0, False)])
def test_it_turns_itself_off_when_loading_is_slower(make: Any, tmp_path: Path, seconds: float, off: bool) -> None:
    cache, events = make()
    cache.put(2, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    for _ in range(20):
        cache.note_recompute(seconds, 20)
        cache.fetch(2, IDS, zeros(IDS))
    assert cache.is_off(2) == off
    assert kinds(events) == (["built", "off"] if off else ["built"])
    if off:
        assert "µs a sample" in events[1][1]
        assert not list(tmp_path.rglob("rows"))
        cache.put(2, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
        assert cache.statistics.rows == 0
        assert not cache.is_off(3)  # tried again where more is saved


# --- the disk --------------------------------------------------------------------------------------------


def use(cache: CachedPrefix, rounds: int = 3) -> list[int]:
    """Put and fetch as training does; returns the hits of each round."""
    hits = []
    for _ in range(rounds):
        tensors, hit = cache.fetch(0, IDS, zeros(IDS))
        if tensors is not None:
            assert torch.equal(tensors[0][hit], values(IDS, zeros(IDS))[hit])
        cache.put(0, IDS, zeros(IDS), [values(IDS, zeros(IDS))], mask=~hit)
        hits.append(int(hit.sum()))
    return hits


def test_a_place_that_cannot_be_written(make: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    cache, events = make(directory=tmp_path / "file" / "cache")
    assert use(cache) == [0, 0, 0]
    assert kinds(events) == ["lost"]
    assert "ActivationCache(directory=" in events[0][1]


def test_a_read_only_disk(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    cache, events = make()
    assert use(cache) == [0, 0, 0]
    assert kinds(events) == ["lost"]
    assert "Read-only file system" in events[0][1]


def test_a_disk_that_is_full_at_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(activation_store, "reserve_blocks", full)
    cache, events = make()
    assert use(cache) == [0, 0, 0]
    assert kinds(events) == ["built", "full"]
    assert "No space left" in events[1][1]


def test_a_disk_that_fills_up_keeps_what_it_has(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, limit = activation_store.reserve_blocks, 24 * 7

    def nearly_full(file: int, start: int, count: int) -> None:
        if start + count > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(file, start, count)

    monkeypatch.setattr(activation_store, "reserve_blocks", nearly_full)
    cache, events = make()
    cache.put(0, IDS[:5], zeros(IDS[:5]), [values(IDS[:5], zeros(IDS[:5]))])
    assert use(cache) == [5, 5, 5]
    assert kinds(events) == ["built", "full"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_a_file_size_limit_of_the_system(tmp_path: Path) -> None:
    """A real refusal by the kernel, in a process of its own: no crash, one sentence, right rows."""
    code = f"""
        import resource, torch
        from egeria_lab.data.activation_cache import ActivationCache, CachedPrefix
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        events = []
        cache = CachedPrefix(ActivationCache(directory={str(tmp_path)!r}), num_samples=10000,
                             on_event=lambda *event: events.append(event[0]))
        ids = torch.arange(10000)
        for _ in range(2):
            cache.put(0, ids, ids * 0, [torch.ones(10000, 4)])
            cache.fetch(0, ids, ids * 0)
        cache.close()
        print(events)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['lost']"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["deleted", "cut off"])
def test_a_directory_that_vanishes_mid_run(make: Any, tmp_path: Path, how: str) -> None:
    cache, events = make()
    assert use(cache, 2) == [0, 20]
    if how == "deleted":
        shutil.rmtree(tmp_path / "cache")
    else:
        os.truncate(next(tmp_path.rglob("rows")), 10)
    assert use(cache) == [0, 0, 0]
    assert kinds(events) == ["built", "lost"]
    assert how in events[1][1]
    assert "training goes on" in events[1][1]


def test_a_loss_while_reading_ahead(make: Any, tmp_path: Path) -> None:
    cache, events = make(prefetch_batches=2)
    cache.announce([(IDS, zeros(IDS))] * 9)
    use(cache, 2)
    shutil.rmtree(tmp_path / "cache")
    use(cache, 5)
    assert kinds(events) == ["built", "lost"]


# --- living together -------------------------------------------------------------------------------------


def test_two_sessions_in_one_directory(make: Any, tmp_path: Path) -> None:
    one, _ = make()
    two, _ = make()
    one.put(0, IDS, zeros(IDS), [values(IDS, zeros(IDS))])
    assert not bool(two.fetch(0, IDS, zeros(IDS))[1].any())  # reuses nothing
    two.put(0, IDS, zeros(IDS), [values(IDS + 50, zeros(IDS))])
    assert torch.equal(one.fetch(0, IDS, zeros(IDS))[0][0], values(IDS, zeros(IDS)))
    assert torch.equal(two.fetch(0, IDS, zeros(IDS))[0][0], values(IDS + 50, zeros(IDS)))
    homes = sorted((tmp_path / "cache").iterdir())
    assert len(homes) == 2
    assert json.loads((homes[0] / "owner").read_text())["pid"] == os.getpid()
    one.close()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert torch.equal(two.fetch(0, IDS, zeros(IDS))[0][0], values(IDS + 50, zeros(IDS)))


MAKE_AND = """
    import os, sys, torch
    from egeria_lab.data.activation_cache import ActivationCache, CachedPrefix
    cache = CachedPrefix(ActivationCache(directory=sys.argv[1]), num_samples=9)
    ids = torch.arange(9)
    cache.announce([(ids, ids * 0)] * 9)
    cache.put(0, ids, ids * 0, [torch.ones(9, 4)])
    cache.fetch(0, ids, ids * 0)
"""


def child(tmp_path: Path, ending: str) -> None:
    code = textwrap.dedent(MAKE_AND) + ending
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)


def test_files_go_with_the_process(tmp_path: Path) -> None:
    child(tmp_path, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs file locks")
def test_leftovers_of_a_killed_process_are_removed_by_the_next(make: Any, tmp_path: Path) -> None:
    child(tmp_path, "os._exit(9)")
    assert len(list(tmp_path.iterdir())) == 1
    cache, _ = make(directory=tmp_path)
    use(cache)
    assert len(list(tmp_path.iterdir())) == 1  # its own
    cache.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_files_alone(tmp_path: Path) -> None:
    child(
        tmp_path,
        "pid = os.fork()\n"
        "if pid:\n"
        "    os.waitpid(pid, 0)\n"
        "    assert bool(cache.fetch(0, ids, ids * 0)[1].all())\n"
        "    open(sys.argv[1] + '/fine', 'w').close()\n"
        "else:\n"
        "    cache._finalize.detach(); del cache\n"
        "    import gc; gc.collect()\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["fine"]


def test_files_and_thread_go_with_the_last_reference(tmp_path: Path) -> None:
    cache = CachedPrefix(ActivationCache(directory=tmp_path), num_samples=20)
    cache.announce([(IDS, zeros(IDS))] * 9)
    use(cache)
    thread = cache._prefetcher._thread
    assert thread is not None
    assert thread.is_alive()
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert list(tmp_path.iterdir()) == []
    thread.join(5)
    assert not thread.is_alive()


def test_closing_twice_and_using_a_closed_cache(make: Any) -> None:
    cache, _ = make()
    use(cache)
    cache.close()
    cache.close()
    assert cache.statistics.rows == 0
    assert use(cache, 2) == [0, 0]
    assert cache.statistics.rows == 0


def test_a_closed_store_raises() -> None:
    store = CacheStore(None, num_keys=4, row_bytes=2, max_bytes=100)
    keys = np.array([1])
    store.write(keys, np.zeros((1, 2), dtype=np.uint8))
    store.close()
    with pytest.raises(OSError, match="deleted"):
        store.read(keys, np.zeros((1, 2), dtype=np.uint8))


def test_memory_stays_flat(make: Any) -> None:
    """Row 131: nothing piles up over many steps."""
    resource = pytest.importorskip("resource")
    cache, _ = make(num_samples=1000, prefetch_batches=4)
    ids = torch.arange(1000)
    data = values(ids, zeros(ids), width=2000)
    batches = [(part, zeros(part)) for part in ids.split(100)]

    def steps(count: int) -> None:
        for _ in range(count):
            cache.announce(batches)
            for part, views in batches:
                _, hit = cache.fetch(0, part, views)
                cache.put(0, part, views, [data[part]], mask=~hit)

    steps(5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    while time.perf_counter() - start < 0.5:
        steps(1)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 20 * 2**20  # kilobytes on Linux; a leak of one batch a step would be far more
