"""Snapshot stores keep what they are given or say that it is damaged; a session belongs to who opened it last."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi")

from recap.cli.main import app
from recap.errors import RecapError
from recap.io.files import LOCK, alone_in
from recap.session import Session
from recap.studio import messages as say
from recap.studio.cluster.replica import PREFIX, ReplicaStudio, clear_abandoned
from recap.studio.cluster.settings import ClusterSettings
from recap.studio.cluster.shared import SharedFolder, SharedShelf, pack_block, unpack_block
from recap.studio.cluster.snapshots import FolderStore, open_store
from recap.studio.store import INFO, LATENTS, MEDIA, STRIP
from tests.studio.clusters import check_same
from tests.studio.conftest import PROMPT, wait_for

STEP = Session.step


@pytest.fixture(params=["folder", "address"])
def store(request, tmp_path):
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    pytest.importorskip("fsspec")
    return open_store(f"memory://{tmp_path.name}/store")


def test_a_store_keeps_lists_and_deletes(store):
    assert store.read("a/b") is None and store.names("a") == [] and store.children("a") == []
    store.write("a/b", b"one")
    store.write("a/c/d", b"")
    store.write("a/b", b"two")
    assert store.read("a/b") == b"two" and store.read("a/c/d") == b""
    assert store.names("a") == ["a/b", "a/c/d"] and store.children("a") == ["b", "c"]
    store.delete("a/b")
    store.delete("a/b")
    assert store.names("a") == ["a/c/d"]
    store.delete_all("a")
    store.delete_all("a")
    assert store.names("a") == []


def test_damage_is_found_and_named(tmp_path):
    store = FolderStore(tmp_path)
    store.write("sessions/x", b"some latents")
    whole = (tmp_path / "sessions" / "x").read_bytes()
    for damaged in (whole[:-1], whole[:40], b"", whole + b"!", whole.replace(b"s", b"z", 1)):
        (tmp_path / "sessions" / "x").write_bytes(damaged)
        with pytest.raises(RecapError, match=r"sessions/x.*damaged"):
            store.read("sessions/x")


def test_an_unknown_address_is_refused_in_words():
    pytest.importorskip("fsspec")
    with pytest.raises(RecapError, match=r"--store.*fsspec cannot open it"):
        open_store("nosuch://place")


def test_the_files_of_a_block_are_one_object():
    files = {LATENTS: b"abc", MEDIA: bytes(range(256)), STRIP: b"", INFO: b"{}"}
    assert unpack_block(pack_block(files)) == files


@pytest.mark.parametrize(("name", "value"), [("replicas", 0), ("sessions", 0), ("queue", -1), ("idle_s", 0)])
def test_settings_out_of_bounds_are_refused(name, value):
    with pytest.raises(RecapError, match=f"--{name.removesuffix('_s')} is {value}"):
        ClusterSettings("store", **{name: value})
    with pytest.raises(RecapError, match="below --replicas"):
        ClusterSettings("store", replicas=3, most_replicas=2)


@pytest.fixture
def replica(settings, store, tmp_path):
    """Makes studios that share a store, each with a folder of its own."""
    made = []

    def make(batch=1):
        place = tmp_path / f"replica-{len(made)}"
        own = dataclasses.replace(settings, folder=place, batch=batch)
        folder = SharedFolder(place, own.limits.disk_bytes, store, 2**30)
        made.append(ReplicaStudio(own, folder, SharedShelf(place / "casts", 100, store)))
        return made[-1]

    yield make
    for studio in made:
        studio.close()


def watch(live, blocks):
    """Look at everything that comes until there are so many blocks."""

    def there():
        live.see(1e6)
        live._engine.call(lambda: None).result()
        return live.store.count("main", live.record.current) >= blocks or live.message

    wait_for(there, "blocks", 60)


def test_a_session_goes_on_elsewhere_and_who_had_it_writes_no_more(replica, store, tmp_path, backbone):
    first, second = replica(), replica()
    live = first.create(say.NewSession(prompt=PROMPT, seed=3))
    watch(live, 3)
    first.command(live, say.PromptMessage(text="two birds")).result()
    # The first replica lives on, and does not know that it was given up.
    taken = second.open(live.record.id)
    watch(taken, 6)
    watch(live, 99)
    assert "another replica" in live.message
    assert taken.message == ""
    second.close_session(live.record.id)
    assert not (second.folder.root / "sessions" / live.record.id).exists()
    session = second.folder.load(live.record.id)
    assert check_same(session, backbone) >= 6
    # Asked for it again, the first one fetches what the second one made, with the state that it left.
    blocks = session.count("main", 0)
    assert any("/state-" in name for name in store.names("sessions"))
    again = first.open(live.record.id)
    assert again is not live and again.next_block >= blocks and again.message == ""
    first.delete(live.record.id)
    assert store.names("sessions") == []


def test_the_store_says_from_which_block_on_a_server_of_another_batch_had_a_session(replica, store, backbone):
    first, second = replica(batch=3), replica(batch=4)
    live = first.create(say.NewSession(prompt=PROMPT, seed=3))
    watch(live, 3)
    # The first one is lost as it is, so the memory is made again from latents, in three rows.
    taken = second.open(live.record.id)
    moved = taken.next_block
    assert taken.branch.rows == {0: 3, moved: 4} and "--batch 3" in taken.message
    second.engine.call(taken.play).result()
    watch(taken, moved + 2)
    second.close_session(live.record.id)
    session = second.folder.load(live.record.id)
    assert session.record.branches[0].rows == {0: 3, moved: 4}
    assert check_same(session, backbone) >= moved + 2


def test_of_the_last_blocks_states_are_kept_more_often(replica, store, monkeypatch):
    for module in ("store", "track"):
        monkeypatch.setattr(f"recap.studio.{module}.STATE_EVERY", 2)
        monkeypatch.setattr(f"recap.studio.{module}.LASTING_EVERY", 6)
    first, second = replica(), replica()
    live = first.create(say.NewSession(prompt=PROMPT))
    watch(live, 11)
    first.command(live, say.PauseMessage()).result()
    live.settle()
    first.folder.do(lambda: None).result()
    last = live.next_block // 2 * 2
    expected = {n for n in range(2, last + 1, 2) if n % 6 == 0 or n >= last - 2}

    def numbers(names):
        return {int(name.split("state-")[1].split("-")[0]) for name in names if "state-" in name}

    assert numbers(path.name for path in live.store.folder.rglob("state-*")) == expected
    assert numbers(store.names("sessions")) == expected
    # Whoever goes on reads what came after the last state alone.
    read = []
    monkeypatch.setattr(
        "recap.session.Session.step",
        lambda self, latents=None: (read.append(latents), STEP(self, latents))[1],
    )
    taken = second.open(live.record.id)
    assert sum(latents is not None for latents in read) == taken.next_block - last <= 1


def test_a_damaged_snapshot_is_not_generated_from(replica, tmp_path):
    studio = replica()
    live = studio.create(say.NewSession(prompt=PROMPT))
    if not isinstance(studio.folder.store, FolderStore):
        pytest.skip("its bytes are in a folder")
    watch(live, 3)
    studio.close_session(live.record.id)
    place = tmp_path / "store" / "sessions" / live.record.id / "tracks" / "main" / "0" / "000001.block"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(RecapError, match=r"000001.block.*damaged"):
        studio.open(live.record.id)
    assert not (studio.folder.root / "sessions" / live.record.id).exists()


def test_ray_serve_takes_the_settings_of_replicas():
    serve = pytest.importorskip("ray.serve")
    from recap.studio.cluster.deploy import deployment_options
    from recap.studio.cluster.replica import Replica

    fixed = serve.deployment(
        Replica, **deployment_options(ClusterSettings("store", replicas=3, sessions=5, queue=7))
    )
    assert (fixed.num_replicas, fixed.max_ongoing_requests, fixed.max_queued_requests) == (3, 5, 7)
    scaled = ClusterSettings("store", replicas=1, most_replicas=4, sessions=4, gpus=1)
    made = serve.deployment(Replica, **deployment_options(scaled))
    rules = made._deployment_config.autoscaling_config
    assert (rules.min_replicas, rules.max_replicas, rules.target_ongoing_requests) == (1, 4, 3.0)
    assert made.ray_actor_options["num_gpus"] == 1 and scaled.seats == 16


def test_only_the_folders_of_replicas_that_are_gone_are_deleted(tmp_path):
    killed, living, beginning = (tmp_path / f"{PREFIX}{name}" for name in ("killed", "living", "beginning"))
    for folder in (killed, living, beginning, tmp_path / "else"):
        (folder / "sessions").mkdir(parents=True)
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "else")
    for folder in (killed, tmp_path / "else"):
        # The file of a lock that nobody holds any more, as a killed process leaves it.
        (folder / LOCK).touch()
    with alone_in(living, "folder", "is in use", "wait"):
        clear_abandoned(tmp_path)
        assert not killed.exists() and (living / "sessions").is_dir() and (beginning / "sessions").is_dir()
    assert (tmp_path / "else" / LOCK).is_file()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--backbone", "nope"), "backbone is 'nope': no such name"),
        (("--precision", "fp4"), "precision is 'fp4': no such name"),
        (("--precision", ""), "precision is '': no such name"),
        (("--low-memory", "yes"), "low_memory is 'yes': no such name"),
        (("--backbone", "helios-base", "--precision", "int8"), "only the models of the Wan family"),
        (("--store", "file/below"), "nothing can be kept there"),
        (("--store", "nowhere://at/all"), "fsspec cannot open it"),
    ],
)
def test_what_no_replica_could_use_is_refused_before_one_is_started(words, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("recap.cli.serve.Cluster", lambda *_: pytest.fail("a cluster was started"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    answer = CliRunner().invoke(app, ["serve", "--port", "0", *words])
    said = str(answer.exception) + answer.output
    assert answer.exit_code != 0 and reason in " ".join(said.split())
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").rglob("*.*"))
