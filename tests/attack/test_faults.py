"""Faults of machines, networks and estimators are refused in words, in good time."""

from __future__ import annotations

import io
import os
import pickle
import time
import zipfile
from pathlib import Path

import pytest
import torch

from recap.admission.flow import FlowNoveltyConfig
from recap.cli import main as cli
from recap.contracts import Flow
from recap.errors import RecapError
from recap.io.trace import BlockTrace
from recap.io.weights import LARGEST_PICKLE, load_pickle
from recap.memory.recap import RecapConfig
from recap.plan import Shot, make_plan
from recap.rollout import rollout
from recap.tables.executors import OnRay, Processes
from recap.tables.generating import generate_and_score
from recap.types import Candidates


class BrokenFlow:
    """Gives no motion but for one value in one pair of pictures of the second call."""

    def __init__(self, bad: float, pair: int) -> None:
        self.bad, self.pair, self.calls = bad, pair, 0

    def __call__(self, pictures: torch.Tensor) -> Flow:
        forward = torch.zeros_like(pictures[:, 1:, :2])
        if self.calls == 1:
            forward[0, self.pair, 1, 3, 3] = self.bad
        self.calls += 1
        return Flow(forward, torch.zeros_like(forward))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_flow_that_is_not_finite_is_refused_with_its_picture(backbone, bad: float) -> None:
    flow = BrokenFlow(bad, pair=5)
    policy = RecapConfig().build(backbone.spec, lambda: FlowNoveltyConfig().build(backbone.spec, flow))
    plan = make_plan([[Shot("a red boat", 3.0)]], backbone.spec)
    with pytest.raises(RecapError, match=r"flow is .*picture 5 of the block.*--flow classical"):
        list(rollout(backbone, policy, plan, seeds=[0]))


def test_scores_that_are_not_finite_are_refused_where_the_trace_is_read(backbone) -> None:
    """On a GPU the flow itself is not read, so the trace is the place."""
    from dataclasses import replace

    policy = RecapConfig().build(
        backbone.spec, lambda: FlowNoveltyConfig().build(backbone.spec, BrokenFlow(0.0, 0))
    )
    plan = make_plan([[Shot("a red boat", 1.0)]], backbone.spec)
    made = next(iter(rollout(backbone, policy, plan, seeds=[0])))
    offered = made.memory.offered
    assert offered is not None
    BlockTrace.of(made)
    bad = Candidates(offered.source, offered.score.clone().fill_(float("nan")))
    with pytest.raises(RecapError, match="block 0 holds NaN or infinity"):
        BlockTrace.of(replace(made, memory=replace(made.memory, offered=bad)))


@pytest.mark.parametrize(
    "address", ["badaddress.invalid:1", "127.0.0.1:1", "127.0.0.1:99999999", "host:port"]
)
def test_an_address_where_no_ray_answers_is_refused_within_ten_seconds(tmp_path: Path, address: str) -> None:
    pytest.importorskip("ray")
    began = time.monotonic()
    with pytest.raises(RecapError, match=r"--ray is .*nobody answers there"):
        OnRay(generate_and_score, tmp_path, address=address)
    assert time.monotonic() - began < 10


def test_a_pickle_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, saved)
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                data = pickle.dumps(bytes(LARGEST_PICKLE + 1), protocol=2)
            target.writestr(entry.filename, data)
    assert bomb.stat().st_size < 1 << 18
    began = time.monotonic()
    with pytest.raises(RecapError, match="unpacks to"):
        load_pickle(bomb, "checkpoint")
    assert time.monotonic() - began < 2


def test_a_killed_server_of_workers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Processes(generate_and_score, tmp_path, 1)

    class Dead:
        def start(self) -> None:
            raise EOFError

    monkeypatch.setattr(pool._context, "Process", lambda **_: Dead())
    with pytest.raises(RecapError, match=r"worker is missing: the server process .* was killed"):
        pool._start()


def test_the_end_of_a_pipe_is_not_called_aborted(monkeypatch, capsys) -> None:
    def ends(**_: object) -> None:
        raise EOFError

    monkeypatch.setattr("sys.argv", ["recap", "list"])
    for command in cli.app.registered_commands:
        if command.name == "list":
            monkeypatch.setattr(command, "callback", lambda: ends())
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2 and "helper process is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("ENOSPC", "make room there"),
        ("EDQUOT", "quota"),
        ("EROFS", "can be written"),
        ("EIO", "check the disk"),
        ("EFBIG", "larger files"),
        ("EACCES", "check the path"),
    ],
)
def test_disk_faults_name_file_reason_and_remedy(capsys, number: str, words: str) -> None:
    import errno

    def fails() -> None:
        code = getattr(errno, number)
        raise OSError(code, os.strerror(code), "some/file")

    with pytest.raises(SystemExit) as stopped:
        cli.run_safely(fails)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1
    assert "some/file" in message and words in message
