"""What clients can do with a session: pause, branch, switch, pin, forget, schedule; and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.studio.conftest import PROMPT, Viewer, begin, order, play_to, same_memory, twin, wait_for, watch


def stored(live, branch, blocks):
    found = live.store.read_latents("main", branch, range(blocks))
    return torch.cat([found[index] for index in range(blocks)], dim=1)


def test_pause_stops_and_play_continues(client, studio):
    name = begin(client)
    live = play_to(client, studio, name, 3)
    count = live.next_block
    order(client, name, "playhead", second=100.0)
    studio.engine.call(lambda: None).result()
    assert live.next_block == count and not live.wants_block()
    order(client, name, "play")
    wait_for(lambda: live.next_block > count, "a block")


def test_a_branch_leaves_the_first_one_whole_and_both_can_be_continued(client, studio, backbone):
    name = begin(client)
    live = play_to(client, studio, name, 6)
    first = stored(live, 0, 6)
    made = order(client, name, "branch", second=1.4)
    assert made["branch"] == 1 and live.next_block == 3
    order(client, name, "prompt", text="two birds", playhead_s=1.4)
    order(client, name, "play")
    play_to(client, studio, name, 5)
    tree = client.get(f"/v1/sessions/{name}").json()["branches"]
    assert [(b["id"], b["parent"], b["fork_block"]) for b in tree] == [(0, None, 0), (1, 0, 3)]
    assert torch.equal(stored(live, 0, 6), first)
    plain = twin(live, backbone)
    for _ in range(3):
        plain.step()
    plain.prompt("two birds")
    other = torch.cat([first[:, :9], plain.step().latents, plain.step().latents], dim=1)
    assert torch.equal(stored(live, 1, 5), other)
    order(client, name, "switch", branch=0)
    assert live.next_block == 6
    plain = twin(live, backbone)
    for _ in range(6):
        plain.step()
    same_memory(live.tracks["main"].session, plain)
    assert [cue["prompt"] for cue in client.get(f"/v1/sessions/{name}").json()["cues"]] == [PROMPT]


def test_a_scheduled_prompt_waits_for_its_block_and_can_be_dropped(client, studio):
    name = begin(client)
    live = play_to(client, studio, name, 2)
    assert order(client, name, "prompt", text="two birds", at_s=2.0)["block"] == 3
    assert order(client, name, "prompt", text="a blue house", at_s=3.0)["block"] == 5
    order(client, name, "drop_cue", block=5)
    order(client, name, "play")
    play_to(client, studio, name, 6)
    prompts = [live.store.read_info("main", 0, index)["prompt"] for index in range(6)]
    assert prompts == [PROMPT] * 3 + ["two birds"] * 3
    assert order(client, name, "drop_cue", code=400, block=3)["field"] == "block"


def test_pins_and_forgotten_slots_hold_at_the_block_that_was_seen(client, studio, backbone):
    name = begin(client)
    live = play_to(client, studio, name, 4)
    seen = live.first_unseen - 1
    bank = live.store.read_info("main", 0, seen)["bank"]
    first, second = bank[0]["slot"], bank[1]["slot"]
    order(client, name, "pin", slots=[first], name="fox", block=seen)
    assert live.next_block == seen + 1
    # A second change at the same block keeps the first one.
    order(client, name, "forget", slots=[second], block=seen)
    told = client.get(f"/v1/sessions/{name}").json()
    assert told["cast"] == ["fox"] and [change["kind"] for change in told["changes"]] == ["pin", "forget"]
    order(client, name, "play")
    play_to(client, studio, name, seen + 3)
    plain = twin(live, backbone)
    for _ in range(seen + 1):
        plain.step()
    plain.pin([first], "fox")
    plain.forget([second])
    expected = [plain.step().latents for _ in range(2)]
    assert torch.equal(stored(live, 0, seen + 3)[:, -6:], torch.cat(expected, dim=1))
    assert order(client, name, "pin", code=400, slots=[10**6], block=seen)["field"] == "slots"


def test_a_pin_survives_a_prompt_that_drops_blocks_after_it(client, studio, backbone):
    name = begin(client)
    live = play_to(client, studio, name, 3)
    seen = live.first_unseen - 1
    slot = live.store.read_info("main", 0, seen)["bank"][0]["slot"]
    order(client, name, "pin", slots=[slot], name="fox", block=seen)
    order(client, name, "play")
    wait_for(lambda: live.next_block == seen + 3, "the lead")
    order(client, name, "pause")
    order(client, name, "prompt", text="two birds")
    assert live.next_block == seen + 1
    plain = twin(live, backbone)
    for _ in range(seen + 1):
        plain.step()
    plain.pin([slot], "fox")
    same_memory(live.tracks["main"].session, plain)


def test_a_refused_command_changes_nothing(client, studio):
    name = begin(client)
    live = play_to(client, studio, name, 4)
    before, record = stored(live, 0, 4), live.record.to_json()
    kept = live.tracks["main"].session.snapshot()
    for message, field in (
        ({"type": "prompt", "text": "  "}, "prompt"),
        ({"type": "prompt", "text": "x" * 501}, "prompt"),
        ({"type": "prompt", "text": "two birds", "cut": True, "reread": True}, "reread"),
        ({"type": "prompt", "text": "two birds", "at_s": -1.0}, "at_s"),
        ({"type": "prompt", "text": 7}, "prompt.text"),
        ({"type": "pin", "slots": []}, "slots"),
        ({"type": "pin", "slots": [0], "name": "../../etc"}, "name"),
        ({"type": "set"}, "set"),
        ({"type": "set", "reinforcement": -1.0}, "reinforcement"),
        ({"type": "switch", "branch": 9}, "branch"),
        ({"type": "drop_cast", "name": "nobody"}, "name"),
        ({"type": "dance"}, None),
        ({"type": "play", "v": 2}, "play.v"),
        ({"type": "play", "more": 1}, "play.more"),
    ):
        told = order(client, name, message.pop("type"), code=400, **message)
        assert told["type"] == "error" and told["text"] and told["remedy"], message
        assert field is None or told["field"] == field, told
    assert live.next_block == 4 and torch.equal(stored(live, 0, 4), before)
    assert live.record.to_json() == record
    assert live.tracks["main"].session.snapshot().cues == kept.cues
    order(client, name, "play")
    wait_for(lambda: live.next_block > 4 or not live.wants_block(), "a block")


def test_two_memories_generate_next_to_each_other(client, studio):
    name = begin(client, second_memory="sink")
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        viewer.until_block(1)
        viewer.until_block(1, "second")
        assert viewer.ask("prompt", text="two birds", playhead_s=0.0)["block"] == 1
        dropped = {e["track"] for e in viewer.events if e["type"] == "dropped"}
        assert dropped == {"main", "second"}
        for track in ("main", "second"):
            viewer.until(
                lambda e, t=track: e.get("type") == "block" and e["track"] == t and e["prompt"] == "two birds"
            )
        assert viewer.ask("set", reinforcement=2.0)["type"] == "done"
    live = studio.sessions[name]
    first = [live.store.read_latents(track, 0, [0])[0] for track in ("main", "second")]
    assert torch.equal(*first), "before anything is remembered, memories cannot differ"
    assert live.tracks["main"].config.memory.name != live.tracks["second"].config.memory.name


def test_a_failure_is_said_and_play_continues(client, studio, monkeypatch):
    name = begin(client)
    live = play_to(client, studio, name, 2)
    with watch(client, name) as socket:
        viewer = Viewer(socket)
        viewer.read()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(live.store, "write_block", full)
            viewer.say("play")
            viewer.say("playhead", second=1.0)
            told = viewer.until(lambda e: e.get("type") == "status" and e["state"] == "failed")
            assert "No space left" in told["message"] and "Traceback" not in told["message"]
            assert viewer.ask("prompt", text="two birds")["type"] == "error"
        count = live.store.count("main", 0)
        viewer.say("play")
        viewer.until_block(count)
    whole = stored(live, 0, count + 1)
    plain = twin(live, live.tracks["main"].session.backbone)
    assert torch.equal(whole, torch.cat([plain.step().latents for _ in range(count + 1)], dim=1))


@pytest.mark.parametrize("second", [-5.0, 0.0, 1e12])
def test_a_playhead_anywhere_is_only_what_could_be_seen(client, studio, second):
    name = begin(client)
    live = studio.sessions[name]
    wait_for(lambda: live.store.count("main", 0) == 2, "the lead")
    order(client, name, "playhead", second=second)
    assert 0 <= live.first_unseen - 1 <= 1


def test_what_a_branch_inherits_is_not_dropped_from_its_parent(client, studio):
    name = begin(client)
    live = play_to(client, studio, name, 4)
    unseen = live.next_block - 1
    assert live.first_unseen <= unseen
    before = stored(live, 0, live.next_block)
    order(client, name, "branch", second=live.clock.start_s(unseen) + 0.01)
    order(client, name, "switch", branch=0)
    order(client, name, "prompt", text="two birds")
    assert torch.equal(stored(live, 1, unseen + 1), before[:, : 3 * (unseen + 1)])


def test_a_change_that_makes_a_prompt_unreadable_is_refused(client, studio):
    """Without a cast @fox is plain text; once somebody is pinned it would have to be somebody."""
    name = begin(client)
    live = play_to(client, studio, name, 2)
    order(client, name, "prompt", text="@fox and two birds")
    slot = live.store.read_info("main", 0, live.first_unseen - 1)["bank"][0]["slot"]
    assert order(client, name, "pin", slots=[slot], name="bus", code=400)["field"] == "prompt"
    order(client, name, "pin", slots=[slot], name="fox")
    order(client, name, "play")
    count = live.next_block
    wait_for(lambda: live.next_block > count, "a block")
