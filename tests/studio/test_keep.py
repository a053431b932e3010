"""What a session generated can be taken along: as a video, as a run folder; and a run folder opens as a session."""

from __future__ import annotations

import io
import json
import zipfile

import av
import pytest
import torch
from safetensors.torch import load_file

from recap.config import RunConfig
from recap.io.report import SILENT
from recap.plan import Shot
from recap.run import generate, resume
from recap.studio.messages import PauseMessage
from tests.studio.conftest import PROMPT, begin, order, play_to, wait_for


def pictures(data):
    with av.open(io.BytesIO(data)) as container:
        return [frame.time for frame in container.decode(video=0)]


def config_of(shots):
    plain = {"backbone": "untrained", "flow": "classical"}
    return RunConfig.from_dict(
        {**plain, "shots": [{"prompt": p, "seconds": s, "cut": c} for p, s, c in shots]}
    )


def zipped(folder):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in folder.rglob("*"):
            archive.write(path, path.relative_to(folder.parent))
    return out.getvalue()


def test_the_video_has_every_picture_of_its_branch(client, studio):
    name = begin(client)
    play_to(client, studio, name, 4)
    answer = client.get(f"/v1/sessions/{name}/video.mp4")
    assert answer.headers["content-type"] == "video/mp4"
    count = len(pictures(answer.content))
    assert count == studio.sessions[name].clock.first_picture(studio.sessions[name].next_block)
    order(client, name, "branch", second=0.1)
    assert len(pictures(client.get(f"/v1/sessions/{name}/video.mp4?branch=1").content)) == 9
    assert len(pictures(client.get(f"/v1/sessions/{name}/video.mp4?branch=0").content)) == count
    assert client.get(f"/v1/sessions/{name}/video.mp4?branch=7").json()["field"] == "branch"
    assert client.get(f"/v1/sessions/{name}/video.mp4?track=no").json()["field"] == "track"


def test_a_downloaded_run_is_resumed_to_what_an_undisturbed_run_generates(client, studio, tmp_path):
    name = begin(client)
    play_to(client, studio, name, 2)
    at = order(client, name, "prompt", text="two birds", cut=True, at_s=1.5)["block"]
    order(client, name, "play")
    live = play_to(client, studio, name, at + 2)
    blocks = live.next_block
    data = client.get(f"/v1/sessions/{name}/run.zip?more_s=1.5").content
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(tmp_path / "out")
    folder = tmp_path / "out" / "run"
    record = resume(folder, reporter=SILENT)
    assert record.num_blocks == blocks + 2
    whole = config_of([(PROMPT, 0.75 * at, False), ("two birds", 0.75 * (blocks + 2 - at), True)])
    generate(whole, tmp_path / "plain", reporter=SILENT)
    one, other = (load_file(place / "latents.safetensors") for place in (folder, tmp_path / "plain"))
    assert torch.equal(one["latents"], other["latents"])
    lines = [(place / "trace.jsonl").read_text() for place in (folder, tmp_path / "plain")]
    assert lines[0] == lines[1]
    assert (folder / "video.mp4").is_file()


def test_a_run_folder_cannot_say_what_was_pinned(client, studio):
    name = begin(client)
    play_to(client, studio, name, 3)
    order(client, name, "set", reinforcement=2.0)
    answer = client.get(f"/v1/sessions/{name}/run.zip")
    assert answer.status_code == 400 and "set" in answer.json()["limit"]


@pytest.mark.parametrize("finished", [True, False])
def test_an_uploaded_run_opens_and_continues_as_the_run_would(client, studio, tmp_path, finished):
    shots = [(PROMPT, 1.5, False), ("two birds", 1.5, False)]
    generate(config_of(shots), tmp_path / "run", reporter=SILENT)
    latents = load_file(tmp_path / "run" / "latents.safetensors")["latents"]
    if not finished:
        # As a killed run leaves it: a file a block, here of two blocks.
        (tmp_path / "run" / "latents.safetensors").unlink()
        (tmp_path / "run" / "work").mkdir()
        from safetensors.torch import save_file

        for block in range(2):
            path = tmp_path / "run" / "work" / f"{block:06d}.safetensors"
            save_file({"latents": latents[:, 3 * block : 3 * block + 3].contiguous()}, path)
    answer = client.post("/v1/sessions/upload-run", content=zipped(tmp_path / "run"))
    assert answer.status_code == 201, answer.text
    name = answer.json()["session"]
    live = studio.sessions[name]
    # Of a finished run there are four, and one more must have been generated before it is paused.
    wait_for(lambda: live.store.count("main", 0) >= (5 if finished else 4), "blocks")
    studio.command(live, PauseMessage()).result()
    own = live.store.read_latents("main", 0, range(4))
    assert torch.equal(torch.cat([own[index] for index in range(4)], dim=1), latents)
    info = live.store.read_info("main", 0, 1)
    assert info["shares"]["sink"] > 0 and info["prompt"] == PROMPT
    assert [cue["prompt"] for cue in client.get(f"/v1/sessions/{name}").json()["cues"]] == [
        PROMPT,
        "two birds",
    ]
    if finished:
        whole = config_of([shots[0], ("two birds", 3.0, False)])
        generate(whole, tmp_path / "longer", reporter=SILENT)
        wait_for(lambda: live.store.count("main", 0) == live.next_block, "blocks")
        longer = load_file(tmp_path / "longer" / "latents.safetensors")["latents"]
        count = live.next_block
        own = live.store.read_latents("main", 0, range(count))
        assert count > 4
        assert torch.equal(torch.cat(list(own.values()), dim=1), longer[:, : 3 * count])


@pytest.mark.slow
def test_a_bad_upload_is_refused_in_words_and_leaves_nothing(client, studio, tmp_path):
    generate(config_of([(PROMPT, 1.5, False)]), tmp_path / "run", reporter=SILENT)
    good = tmp_path / "run"

    def archive(**changes):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as made:
            for path in (good / "run.json", good / "latents.safetensors", good / "trace.jsonl"):
                made.writestr(f"run/{path.name}", changes.pop(path.stem, path.read_bytes()))
            for entry, data in changes.items():
                made.writestr(entry, data)
        return out.getvalue()

    about = json.loads((good / "run.json").read_text())
    code = {**about, "config": {**about["config"], "memory": {"name": "os:system"}}}
    rows = {**about, "config": {**about["config"], "seeds": [0, 1]}}
    other = {**about, "config": {**about["config"], "backbone": "embedded"}}
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as made:
        for number in range(5):
            made.writestr(f"run/{number}", bytes(2**28))
    before = sorted(path for path in (studio.folder.root).rglob("*"))
    for bad in (
        b"",
        b"PK nonsense",
        archive()[:-40],
        archive(run=b"{}"),
        archive(run=b"[" * 10**5),
        archive(run=json.dumps(code).encode()),
        archive(run=json.dumps(rows).encode()),
        archive(run=json.dumps(other).encode()),
        archive(latents=b"nonsense"),
        archive(latents=b""),
        bomb.getvalue(),
    ):
        answer = client.post("/v1/sessions/upload-run", content=bad)
        assert answer.status_code == 400 and answer.json()["field"] == "upload", answer.text
        assert "Traceback" not in answer.text
    assert sorted(path for path in (studio.folder.root).rglob("*")) == before
    evil = archive(**{"run/../../../escaped": b"x", "/escaped": b"x"})
    assert client.post("/v1/sessions/upload-run", content=evil).status_code == 201
    assert not list(tmp_path.rglob("escaped"))


def make_video(client, code=202, **more):
    answer = client.post("/v1/videos", json={"prompt": PROMPT, **more})
    assert answer.status_code == code, answer.text
    return answer.json()


def test_a_program_asks_for_a_video_polls_and_downloads_it(client, studio):
    asked = make_video(client, seconds=2.0, seed=3)
    assert asked["status"] in ("queued", "in_progress") and asked["progress"] < 100
    second = make_video(client, seconds=1.0)["id"]
    name = asked["id"]
    wait_for(lambda: client.get(f"/v1/videos/{second}").json()["status"] == "completed", "the video")
    done = client.get(f"/v1/videos/{name}").json()
    assert done["status"] == "completed" and done["progress"] == 100
    plain = config_of([(PROMPT, 2.0, False)])
    assert len(pictures(client.get(f"/v1/videos/{name}/content").content)) == 9 + 2 * 12
    assert plain.shots == (Shot(PROMPT, 2.0, False),)
    assert client.delete(f"/v1/videos/{name}").status_code == 200
    assert client.get(f"/v1/videos/{name}").status_code == 404
    assert not (studio.folder.root / "videos" / name).exists()


def test_the_queue_is_bounded_and_says_how_many_wait(client, studio):
    studio.engine.call(lambda: studio.engine.remove(studio.videos)).result()
    most = studio.settings.limits.waiting_videos
    names = [make_video(client, seconds=1.0)["id"] for _ in range(most)]
    told = make_video(client, 400, seconds=1.0)
    assert f"{most} videos wait" in told["text"]
    assert client.get(f"/v1/videos/{names[0]}/content").json()["limit"] == "it is queued"
    for bad in (
        {"seconds": 0.0},
        {"seconds": 1e9},
        {"seconds": "5"},
        {"memory": "os:system"},
        {"prompt": " "},
    ):
        assert make_video(client, 400, **bad)["type"] == "error"
    client.delete(f"/v1/videos/{names[0]}")
    make_video(client, seconds=1.0)


def test_videos_that_were_asked_for_are_made_by_the_next_server(settings):
    from recap.studio.messages import NewVideo
    from recap.studio.studio import Studio

    first = Studio(settings)
    first.engine.call(lambda: first.engine.remove(first.videos)).result()
    name = first.create_video(NewVideo(prompt=PROMPT, seconds=1.0))["id"]
    first.close()
    second = Studio(settings)
    try:
        wait_for(lambda: second.videos.find(name).status == "completed", "the video")
        assert len(pictures(second.videos.content(name))) == 9
    finally:
        second.close()
