"""Settings of the memory change while it works, and subjects are kept and cast."""

from __future__ import annotations

import pytest
import torch

from recap.io.cast import read_cast, write_cast
from recap.studio import messages as say
from recap.types import Role
from tests.studio.conftest import begin, order, play_to, same_memory, twin, wait_for


def test_lambda_and_capacity_change_at_the_block_that_was_not_seen_and_after_a_restart(
    client, studio, backbone
):
    name = begin(client)
    live = play_to(client, studio, name, 4)
    done = order(client, name, "set", reinforcement=2.0, capacity_frames=2.0)
    at = done["block"]
    assert at == live.next_block == live.first_unseen
    order(client, name, "play")
    play_to(client, studio, name, at + 3)
    assert client.get(f"/v1/sessions/{name}").json()["settings"] == {
        "reinforcement": 2.0,
        "capacity_frames": 2.0,
        "admission": "flow",
    }
    count = live.next_block
    studio.close_session(name)
    again = studio.open(name)
    studio.command(again, say.PauseMessage()).result()
    plain = twin(again, backbone)
    for block in range(again.next_block):
        if block == at:
            plain.set(reinforcement=2.0, capacity_frames=2.0)
        plain.step()
    assert again.next_block >= count
    same_memory(again.tracks["main"].session, plain)


def test_another_rule_fills_the_bank_again_as_if_it_had_always_been_there(client, studio, backbone):
    name = begin(client)
    live = play_to(client, studio, name, 4)
    at = order(client, name, "set", admission="recent")["block"]
    known = live.store.read_latents("main", 0, range(at))
    plain = twin(live, backbone, admission="recent")
    for block in range(at):
        plain.step(known[block])
    same_memory(live.tracks["main"].session, plain)
    order(client, name, "play")
    play_to(client, studio, name, at + 2)
    studio.close_session(name)
    again = studio.open(name)
    assert again.summary()["settings"]["admission"] == "recent"
    studio.command(again, say.PauseMessage()).result()
    for _ in range(again.next_block - at):
        plain.step()
    same_memory(again.tracks["main"].session, plain)


def test_another_rule_is_refused_where_slots_were_pinned(client, studio):
    name = begin(client)
    live = play_to(client, studio, name, 3)
    slot = live.store.read_info("main", 0, live.first_unseen - 1)["bank"][0]["slot"]
    order(client, name, "pin", slots=[slot])
    told = order(client, name, "set", admission="recent", code=400)
    assert told["field"] == "admission" and live.branch.rule == ""
    assert "known" in order(client, name, "set", admission="os:system", code=400)["text"]


def keep(client, session, code=201, **more):
    answer = client.post(f"/v1/sessions/{session}/casts", json=more)
    assert answer.status_code == code, answer.text
    return answer.json()


def test_a_subject_is_kept_from_a_box_or_from_slots_and_joins_another_session(client, studio):
    name = begin(client)
    live = play_to(client, studio, name, 3)
    told = keep(client, name, name="fox", box=[0, 0, 40, 20], second=1.0, words="a red fox")
    assert told["name"] == "fox" and told["tokens"] >= 1 and told["thumbnail"].startswith("data:image/jpeg")
    bank = live.store.read_info("main", 0, 2)["bank"]
    kept = keep(client, name, name="bus", slots=[slot["slot"] for slot in bank[:4]], block=2)
    assert 1 <= kept["tokens"] <= 4
    assert {cast["name"] for cast in client.get("/v1/casts").json()["casts"]} == {"fox", "bus"}
    path = studio.folder.root / "casts" / "fox.cast"
    (subject,) = read_cast(path)
    assert subject.about["second"] == pytest.approx(1.0, abs=0.25)
    assert torch.equal(subject.latents, live.store.read_latents("main", 0, [1])[1][0])
    assert client.get("/v1/casts/fox.cast").content == path.read_bytes()

    other = begin(client, prompt="@fox and two birds", seed=3, cast=["fox"])
    second = play_to(client, studio, other, 2)
    assert second.store.read_info("main", 0, 0)["tokens"][Role.CAST] == subject.num_tokens
    order(client, other, "cast", name="bus")
    order(client, other, "prompt", text="@bus and @fox")
    assert client.get(f"/v1/sessions/{other}").json()["cast"] == ["fox", "bus"]
    assert client.delete("/v1/casts/bus").status_code == client.delete("/v1/casts/fox").status_code == 200
    # The session has its own copies.
    studio.close_session(other)
    again = studio.open(other)
    order(client, other, "play")
    wait_for(lambda: again.store.count("main", 0) >= 3, "a block")
    order(client, other, "pause")
    tokens = again.store.read_info("main", 0, again.store.count("main", 0) - 1)["tokens"]
    assert tokens[Role.CAST] == subject.num_tokens + kept["tokens"]
    order(client, other, "drop_cast", name="fox", code=400)
    order(client, other, "prompt", text="@bus")
    order(client, other, "drop_cast", name="fox")
    assert client.get(f"/v1/sessions/{other}").json()["cast"] == ["bus"]


def test_what_cannot_be_a_subject_is_refused(client, studio, tmp_path):
    name = begin(client)
    play_to(client, studio, name, 2)
    for message, field in (
        ({"name": "fox"}, "subject"),
        ({"name": "fox", "slots": [0], "box": [0, 0, 9, 9]}, "subject"),
        ({"name": "../fox", "box": [0, 0, 40, 40], "second": 0.1}, "name"),
        ({"name": "fox", "box": [0, 0, 1, 1], "second": 0.1}, "box"),
        ({"name": "fox", "box": [0, 0], "second": 0.1}, "box"),
        ({"name": "fox", "box": [0, 0, 40, 40], "second": 99.0}, "second"),
        ({"name": "fox", "slots": []}, "slots"),
        ({"name": "fox", "slots": [0], "block": -4}, "block"),
        ({"name": "fox", "slots": [-1]}, "slots"),
    ):
        assert keep(client, name, 400, **message)["field"] == field, message
    assert client.get("/v1/casts").json()["casts"] == []
    for path in ("/v1/casts/nobody.cast", "/v1/casts/..%2f..%2fetc.cast"):
        assert client.get(path).status_code == 404
    assert client.post("/v1/sessions", json={"prompt": "two birds", "cast": ["nobody"]}).status_code == 404


def test_an_uploaded_cast_is_read_by_its_bytes_alone(client, studio):
    name = begin(client)
    play_to(client, studio, name, 2)
    keep(client, name, name="fox", box=[0, 0, 40, 20], second=1.0)
    data = client.get("/v1/casts/fox.cast").content
    assert client.post("/v1/casts", content=data).json()["field"] == "name", "the name is in use"
    client.delete("/v1/casts/fox")
    assert client.post("/v1/casts", content=data).status_code == 201
    for bad in (b"", b"nonsense", data[:-9], data.replace(b"recap.cast", b"recap.tsac")):
        answer = client.post("/v1/casts", content=bad)
        assert answer.status_code == 400 and answer.json()["field"] == "upload"
        assert str(studio.folder.root) not in answer.text and "/tmp" not in answer.text
    write_cast(studio.folder.root / "x.cast", read_cast(studio.folder.root / "casts" / "fox.cast"))
    assert [cast["name"] for cast in client.get("/v1/casts").json()["casts"]] == ["fox"]
