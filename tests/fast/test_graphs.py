from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from recap.fast.graphs import Graphed, RecordingRoom, no_collection


class Sum:
    """Adds its input to a total that it keeps in place."""

    def __init__(self, device: str) -> None:
        self.total = torch.zeros(3, device=device)
        self.calls = 0

    def __call__(self, given: Tensor) -> Tensor:
        self.calls += 1
        self.total += given
        return self.total * 2


def test_on_the_cpu_it_is_a_plain_call() -> None:
    kept = Sum("cpu")
    graphed = Graphed(kept)
    for count in range(1, 5):
        assert torch.equal(graphed(torch.ones(3)), torch.full((3,), 2.0 * count))
    assert kept.calls == 4


def test_nothing_is_collected_amid_a_recording() -> None:
    """Garbage that only a collection finds may be an older recording, whose end would spoil the one that is made."""

    class Knot:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with no_collection():
            knot = weakref.ref(Knot())
            kept = [[each] for each in range(1000)]
            assert knot() is not None and len(kept) == 1000
        assert gc.isenabled()
        with pytest.raises(RuntimeError, match="spoilt"), no_collection():
            raise RuntimeError("spoilt")
        assert gc.isenabled()
        gc.disable()
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*before)


@pytest.mark.parametrize("ends", [True, False])
def test_a_recording_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Whatever fails within it leaves a recording that cannot be ended, and the error of that says nothing."""

    @contextmanager
    def taking(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            if not ends:
                raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {"graph": taking, "Stream": object, "CUDAGraph": lambda: Sum("cpu"), "graph_pool_handle": int}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    room = RecordingRoom()

    def work() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        room.record(work)
    if ends:
        assert room.record(lambda: 3)[1] == 3
    else:
        with pytest.raises(RuntimeError, match="previous error"):
            room.record(lambda: 3)
    assert gc.isenabled()


@pytest.mark.cuda
def test_a_recording_survives_garbage_of_older_ones() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(1, 1, 1)
        for count in range(1, 6):
            older = Graphed(Sum("cuda"))
            for _ in range(3):
                older(torch.ones(3, device="cuda"))
            # Only a collection finds it.
            older.itself = older  # type: ignore[attr-defined]
            newer = Graphed(Sum("cuda"))
            del older
            for call in range(1, 5):
                assert (
                    newer(torch.full((3,), float(count), device="cuda")).tolist() == [2.0 * count * call] * 3
                )
    finally:
        gc.set_threshold(*before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph")
def test_every_call_counts_once_and_python_runs_twice() -> None:
    """Warm-up, recording and replays: a total kept in place shows which of them did the work."""
    kept = Sum("cuda")
    graphed = Graphed(kept)
    for count in range(1, 6):
        given = torch.full((3,), float(count), device="cuda")
        assert graphed(given).tolist() == [count * (count + 1.0)] * 3
    assert kept.calls == 2
    with pytest.raises(RuntimeError):
        graphed(torch.ones(2, device="cuda"))  # another shape is another recording, and this sum has three


def widen(given: Tensor) -> Tensor:
    """Needs 96 MB for a moment, and returns one number."""
    return given.repeat(1 << 22).mul(2).sum()


WIDE_BYTES = 3 * (1 << 22) * 4


@pytest.mark.cuda
def test_recordings_share_what_they_need_only_while_they_run() -> None:
    given = torch.ones(3, device="cuda")
    graphed = [Graphed(widen) for _ in range(4)]
    reserved = []
    for one in graphed:
        results = [float(one(given)) for _ in range(3)]
        assert results == pytest.approx([2.0 * WIDE_BYTES / 4] * 3)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] - reserved[0] < WIDE_BYTES / 2
    # In any order, each result read before the next replay.
    for one, value in zip([*graphed, *graphed[::-1]], range(8), strict=True):
        assert float(one(given * value)) == pytest.approx(2.0 * value * WIDE_BYTES / 4)


@pytest.mark.cuda
def test_memory_of_recordings_that_are_all_gone_is_given_back_and_recording_goes_on() -> None:
    given = torch.ones(3, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        graphed = Graphed(widen)
        for _ in range(3):
            graphed(given)
        del graphed
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before < WIDE_BYTES / 2


@pytest.mark.cuda
def test_work_on_another_stream_has_a_room_of_its_own() -> None:
    here = RecordingRoom.current()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert RecordingRoom.current() is not here
    assert RecordingRoom.current() is here
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(RecordingRoom.current).result() is not here
