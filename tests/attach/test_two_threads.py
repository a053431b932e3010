"""Two threads and one pipeline: one of them works, the other is refused by a message, and no hook stays."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from pipelines import generate, layers_of, make

from recap import attach

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "backbones" / "helios"))

RACES = 500
OTHER_THREAD = r"thread is '.*': another thread generates through this pipeline; generate one video at a time"


def at_once(*works):
    """Run functions in threads of their own; returns what each returned or raised."""
    results = [None] * len(works)

    def run(index):
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def often():
    """Let threads alternate as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hooks_on(pipeline):
    owners = [pipeline.generator, *layers_of(pipeline)]
    return [owner for owner in owners if "forward" in vars(owner)] + [
        name for name in vars(pipeline.vae) if name == "decode_to_pixel"
    ]


def race(pipeline, hooks, times):
    """Attach from two threads at once; how often did both try while one was attached?"""
    refused, barrier, luck = 0, threading.Barrier(2), random.Random(0)

    def work(pause):
        barrier.wait()
        with attach(pipeline, "none") as attached:
            assert hooks(pipeline)
            time.sleep(pause)
            return attached

    for _ in range(times):
        pauses = [luck.choice((0.0, 0.001, 0.002)) for _ in range(2)]
        results = at_once(*(lambda pause=pause: work(pause) for pause in pauses))
        assert not hooks(pipeline), "a hook stays after both have ended"
        errors = [found for found in results if isinstance(found, Exception)]
        assert len(errors) < 2, "one of two must work"
        for error in errors:
            assert isinstance(error, ValueError), repr(error)
            assert "a memory is attached to it already; leave the other `with` first" in str(error)
        refused += len(errors)
    return refused


@pytest.mark.parametrize("kind", ["self-forcing", "longlive-1.0"])
def test_two_threads_that_attach_to_one_pipeline(kind, often):
    pipeline = make(kind)
    _, expected = generate(pipeline, blocks=2)
    assert race(pipeline, hooks_on, RACES // 2) > 0
    assert torch.equal(generate(pipeline, blocks=2)[1], expected)


def test_two_threads_that_attach_to_one_helios_pipeline(often):
    from helios_fakes import make_pipeline

    def hooks(pipeline):
        own = [name for name in ("check_inputs",) if name in vars(pipeline)]
        own += [name for name in ("decode",) if name in vars(pipeline.vae)]
        return [*own, *pipeline.transformer._forward_pre_hooks, *pipeline.transformer._forward_hooks]

    assert race(make_pipeline("distilled"), hooks, 50) > 0


def test_pipelines_of_their_own_do_not_disturb_each_other(often):
    pipelines = [make("self-forcing") for _ in range(2)]
    for _ in range(20):

        def enter(pipeline):
            with attach(pipeline, "none") as attached:
                return attached.checkout

        assert at_once(*(lambda p=p: enter(p) for p in pipelines)) == ["self-forcing"] * 2
    assert not any(map(hooks_on, pipelines))


def test_pipelines_that_share_an_autoencoder_take_turns():
    """Both would exchange its method, and whoever left first would put back the other's."""
    one, other = make("self-forcing"), make("self-forcing")
    other.vae = one.vae
    first, second = attach(one, "none"), attach(other, "none")
    first.__enter__()
    with pytest.raises(ValueError, match="attached to it already"):
        second.__enter__()
    assert not any("forward" in vars(owner) for owner in (other.generator, *layers_of(other)))
    first.__exit__(None, None, None)
    with attach(other, "none"):
        generate(other, blocks=1)
    assert not hooks_on(one) and not hooks_on(other)


def paused(owner, name, at):
    """Make a method wait, in another thread than this one, when it is called for the `at`-th time there."""
    original, reached, go = getattr(owner, name), threading.Event(), threading.Event()
    here, calls = threading.get_ident(), []

    def method(*args, **kwargs):
        if threading.get_ident() != here:
            calls.append(1)
            if len(calls) == at:
                reached.set()
                assert go.wait(60)
        return original(*args, **kwargs)

    return method, reached, go


@pytest.mark.parametrize("kind", ["self-forcing", "longlive-1.0"])
@pytest.mark.parametrize("at", [1, 7], ids=["its first block", "its second block"])
def test_a_video_while_another_thread_is_between_two_calls_ends_the_other(kind, at, monkeypatch):
    """The later video is whole; the earlier one, whose cache upstream has emptied, is refused at its next call."""
    alone, pipeline = make(kind), make(kind)
    with attach(alone, "recap", flow="classical"):
        _, expected = generate(alone, blocks=3)
    method, reached, go = paused(torch, "randn_like", at)
    with attach(pipeline, "recap", flow="classical") as attached:
        monkeypatch.setattr(torch, "randn_like", method)
        results = []
        thread = threading.Thread(
            target=lambda: results.extend(at_once(lambda: generate(pipeline, blocks=3)))
        )
        thread.start()
        assert reached.wait(60)
        _, latents = generate(pipeline, blocks=3)
        go.set()
        thread.join()
    assert torch.equal(latents, expected)
    (error,) = results
    with pytest.raises(ValueError, match=OTHER_THREAD):
        raise error
    assert [line.block for line in attached.trace][-3:] == [0, 1, 2]
    assert not hooks_on(pipeline)


@pytest.mark.parametrize("at", [1, 12])
def test_a_video_during_a_call_of_another_thread_is_refused(at):
    """The other one continues, or is refused too where upstream has emptied its cache: never a video of two."""
    alone, pipeline = make("self-forcing"), make("self-forcing")
    with attach(alone, "recap", flow="classical"):
        _, expected = generate(alone, blocks=3)
    layer = layers_of(pipeline)[1]
    method, reached, go = paused(layer.q, "forward", at)
    layer.q.forward = method
    with attach(pipeline, "recap", flow="classical"):
        results = []
        thread = threading.Thread(
            target=lambda: results.extend(at_once(lambda: generate(pipeline, blocks=3)))
        )
        thread.start()
        assert reached.wait(60)
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match=OTHER_THREAD):
            generate(pipeline, blocks=3)
        torch.set_rng_state(state)
        go.set()
        thread.join()
    (found,) = results
    if at == 1:
        assert torch.equal(found[1], expected)
    else:
        with pytest.raises(ValueError, match=r"kv_cache is 0: it was emptied.*one video at a time"):
            raise found


def test_videos_at_once_are_never_mixed(often):
    """Whatever the order of two threads, each generates a whole video or is refused by a message."""
    pipeline, refused = make("self-forcing"), 0
    # Upstream's first video allocates its caches, and is not safe in two threads by itself.
    generate(pipeline, blocks=1)
    with attach(pipeline, "none") as attached:
        for _ in range(10):
            begun = len(attached.trace)
            results = at_once(*[lambda: generate(pipeline, blocks=2)] * 2)
            errors = [found for found in results if isinstance(found, Exception)]
            for error in errors:
                assert isinstance(error, ValueError) and "one video at a time" in str(error), repr(error)
            refused += len(errors)
            whole = sum(line.block == 1 for line in attached.trace[begun:])
            assert whole == 2 - len(errors)
    assert refused


def test_helios_refuses_a_second_thread():
    from helios_fakes import call, make_pipeline

    pipeline = make_pipeline("distilled")
    expected = call(pipeline, "distilled", chunks=2)
    method, reached, go = paused(pipeline.scheduler, "step", 1)
    pipeline.scheduler.step = method
    with attach(pipeline, "none") as attached:
        results = []
        works = [lambda: call(pipeline, "distilled", chunks=2)]
        thread = threading.Thread(target=lambda: results.extend(at_once(*works)))
        thread.start()
        assert reached.wait(60)
        begun = attached.videos
        call(pipeline, "distilled", chunks=2)
        assert [line.video for line in attached.trace] == [begun, begun]
        go.set()
        thread.join()
        with pytest.raises(ValueError, match=OTHER_THREAD):
            raise results[0]
        assert torch.equal(call(pipeline, "distilled", chunks=2), expected)
    assert len(attached.trace) == 4
