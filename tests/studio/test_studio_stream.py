"""A session is streamed, directed and watched by several; what was not seen is dropped, and nothing grows."""

from __future__ import annotations

import asyncio
import io

import av
import pytest
import torch

from recap.studio.hub import WAITING_EVENTS, Hub, Subscriber
from tests.studio.conftest import PROMPT, Viewer, begin, twin, wait_for, watch


def decoded(pieces):
    with av.open(io.BytesIO(b"".join(pieces)), format="mp4") as container:
        return [frame.time for frame in container.decode(video=0)]


def test_a_session_streams_its_beginning_and_its_blocks(client):
    name = begin(client)
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        hello = viewer.read()
        assert hello["type"] == "hello" and hello["session"] == name
        assert hello["cues"][0]["prompt"] == PROMPT
        viewer.watch_to(0.0)
        block = viewer.until_block(2)
        assert block["start_s"] == pytest.approx(21 / 16) and block["end_s"] == pytest.approx(33 / 16)
        viewer.until(lambda e: e.get("kind") == "media" and e["block"] == 2)
        kinds = [header["kind"] for header, _ in viewer.media]
        assert kinds.count("init") == 1 and kinds[0] == "init"
    base = f"/v1/sessions/{name}/tracks/main/branches/0"
    whole = [client.get(f"{base}/init.mp4").content]
    whole += [client.get(f"{base}/blocks/{index}.m4s").content for index in range(3)]
    times = decoded(whole)
    assert times == pytest.approx([index / 16 for index in range(33)])
    info = client.get(f"{base}/blocks/2.json").json()
    assert {slot["slot"] for slot in info["bank"]} and info["shares"]["sink"] > 0
    assert client.get(f"{base}/blocks/2.jpg").content[:2] == b"\xff\xd8"


def test_the_lead_is_bounded(client, studio):
    name = begin(client)
    live = studio.sessions[name]
    wait_for(lambda: live.next_block == 2, "the lead")
    studio.engine.call(lambda: None).result()
    assert not live.wants_block() and live.next_block == 2
    wait_for(lambda: live.store.count("main", 0) == 2, "the disk")
    answer = client.post(f"/v1/sessions/{name}/commands", json={"type": "playhead", "second": 1.0})
    assert answer.status_code == 200, answer.text
    wait_for(lambda: live.next_block == 4, "the lead")
    studio.engine.call(lambda: None).result()
    assert live.next_block == 4


@pytest.mark.parametrize("memory", ["recap", "recap-plus", "deep-forcing"])
def test_a_prompt_drops_what_was_not_seen_and_the_memory_never_saw_it(client, studio, backbone, memory):
    name = begin(client, memory=memory)
    live = studio.sessions[name]
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        viewer.watch_to(0.6)
        viewer.until_block(3)
        viewer.say("pause")
        assert viewer.ask("prompt", text="two birds", playhead_s=0.7)["type"] == "done"
        dropped = next(e for e in viewer.events if e["type"] == "dropped")
        assert dropped["from_block"] == 2 and dropped["branch"] == 0
        cue = next(e for e in viewer.events if e["type"] == "cue")
        assert [(c["block"], c["prompt"]) for c in cue["cues"]] == [(0, PROMPT), (2, "two birds")]
        kept = live.tracks["main"].session.snapshot()
        viewer.say("play")
        assert viewer.until_block(2)["prompt"] == "two birds"
    never = twin(live, backbone)
    never.step(), never.step()
    never.prompt("two birds")
    for part in ("policy", "decoder"):
        own, other = (getattr(state.memory, part) for state in (kept, never.snapshot()))
        assert own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)
    latents = live.store.read_latents("main", 0, [2])[2]
    assert torch.equal(latents, never.step().latents)


def test_several_watch_one_session_and_a_newcomer_gets_all_that_was(client):
    name = begin(client)
    with watch(client, name) as one, watch(client, name) as two:
        first, second = Viewer(one), Viewer(two)
        first.watch_to(0.6)
        first.until_block(3), second.until_block(3)
        assert first.ask("prompt", text="two birds", playhead_s=0.6)["block"] == 2
        assert second.until("dropped")["from_block"] == 2
        assert second.until("cue")["cues"][-1]["prompt"] == "two birds"
        second.until_block(2)
    # Both tabs are closed; the session lives on, and a reloaded one is told everything.
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        hello = viewer.read()
        assert hello["cues"][-1]["prompt"] == "two birds" and hello["seen_s"] == pytest.approx(9 / 16)
        assert [block["index"] for block in hello["blocks"]["main"]] == list(
            range(len(hello["blocks"]["main"]))
        )
        assert viewer.read()["kind"] == "init"
        viewer.say("playhead", second=hello["blocks"]["main"][-1]["start_s"])
        viewer.until_block(len(hello["blocks"]["main"]))


def test_one_who_does_not_listen_is_let_go_and_the_others_are_not(studio):
    async def run():
        loop = asyncio.get_running_loop()
        hub, slow, quick = Hub(2), Subscriber(loop), Subscriber(loop)
        hub.join(slow), hub.join(quick)
        with pytest.raises(ValueError, match="at most 2 subscribers"):
            hub.join(Subscriber(loop))
        got = []
        for number in range(3 * WAITING_EVENTS):
            hub.publish({"type": "notice", "number": number})
            got.append(await quick.next())
        assert len(got) == 3 * WAITING_EVENTS and None not in got
        kept = 0
        while await slow.next() is not None:
            kept += 1
        assert kept <= WAITING_EVENTS

    asyncio.run(run())
