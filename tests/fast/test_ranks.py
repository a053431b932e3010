"""Several processes generate what one does, bit for bit; a process that dies leaves a run that can be resumed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import CASES, prove
from recap.attach import attach
from recap.backbones.wan.backbone import build_untrained
from recap.contracts import MemoryPolicy
from recap.errors import RecapError
from recap.fast.ranks.backbone import split_backbone
from recap.fast.ranks.group import LONE, Ranks
from recap.fast.ranks.states import split_memory
from recap.rollout import _LoneBlock

# One of each way to look across heads: shares, a measured sink, summed queries, mean keys, keys of the rule.
QUICK = ["sink, by head", "recap flow+keys", "deep-forcing, paper", "relax-forcing"]
RESULTS = ("latents.safetensors", "trace.jsonl", "state.safetensors")
SCRIPT = '[{"prompt": "a red boat", "seconds": 3}, {"prompt": "a blue house", "seconds": 3}]'


@pytest.mark.slow
def test_two_processes_generate_what_one_does() -> None:
    assert prove(QUICK, "cpu", "float64", 2)


# All of them take ten minutes on two cores: RECAP_RANKS=full.
EVERY = [(count, dtype) for count in (1, 2, 3, 4, 6) for dtype in ("float64", "float32")]
TRIED = EVERY if os.environ.get("RECAP_RANKS") == "full" else [(3, "float64"), (2, "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "dtype"), TRIED)
def test_any_number_of_processes_generates_what_one_does(count: int, dtype: str) -> None:
    assert prove(list(CASES), "cpu", dtype, count)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_on_one_gpu_generate_what_one_does() -> None:
    assert prove(list(CASES), "cuda", "float64", 2)


def start(count: int, *words: str | Path) -> list[subprocess.Popen[str]]:
    """Start `recap` in so many processes."""
    return launch(count, "-m", "recap", *words)


def launch(count: int, *words: str | Path) -> list[subprocess.Popen[str]]:
    """Start Python in so many processes, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            env={**os.environ, **common, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]], code: int = 0) -> list[str]:
    """Wait for processes that end with this code; returns what they wrote to standard error."""
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), errors
    return errors


def begin(script: Path, out: Path, count: int) -> list[subprocess.Popen[str]]:
    script.write_text(SCRIPT)
    how = ("--backbone", "untrained", "--flow", "classical", "--rows", "2", "--out", out)
    return start(count, "generate", "--script", script, *how)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_whose_process_dies_says_so_and_can_be_resumed(tmp_path: Path, victim: int) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    processes = begin(tmp_path / "script.json", two, 2)
    limit = time.monotonic() + 200
    while not (two / "state.safetensors").exists():
        assert time.monotonic() < limit and all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[victim].send_signal(signal.SIGKILL)
    (errors,) = finish([processes[1 - victim]], 2)
    processes[victim].communicate()
    last = errors.strip().splitlines()[-1]
    assert f"rank is {1 - victim}: another of the 2 processes has ended" in last
    assert f"--resume {two}" in last
    # By two processes again, or by one.
    finish(start(2 - victim, "generate", "--resume", two))
    finish(begin(tmp_path / "script.json", one, 1))
    for name in RESULTS:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.slow
def test_followers_leave_with_a_leader_who_refuses(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    leader, follower = start(2, "generate", "a boat", "--backbone", "untrained", "--out", tmp_path)
    (said,) = finish([leader], 2)
    assert "already exists" in said
    assert finish([follower]) == [""]


@pytest.mark.slow
@pytest.mark.parametrize("extra", [("--from-block", "2"), ()])
def test_blocks_can_be_generated_again_by_several_processes(tmp_path: Path, extra: tuple[str, ...]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    finish(begin(tmp_path / "script.json", one, 1))
    processes = begin(tmp_path / "script.json", two, 2)
    while len(list(two.glob("work/*.safetensors"))) < 3:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[0].send_signal(signal.SIGTERM)
    for process in processes:
        process.communicate()
    finish(start(4, "generate", "--resume", two, *extra))
    for name in RESULTS:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("total", [6, 7, 24, 72, 1560, 4680])
def test_every_token_has_one_process(count: int, total: int) -> None:
    sizes = Ranks(0, count).tokens(total)
    assert sum(sizes) == total and len(sizes) == count and min(sizes) > 0
    if total >= 4 * count:
        assert all(size % 4 == 0 for size in sizes[:-1])
        assert max(sizes) - min(sizes) <= 4 + total % 4


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(RecapError, match="the 4 heads of untrained are split evenly; start 1, 2, 4"):
        split_backbone(build_untrained(), Ranks(0, 3))


def test_a_backbone_of_another_family_is_refused() -> None:
    class Other:
        spec = replace(build_untrained().spec, name="stranger")

    with pytest.raises(RecapError, match=r"stranger.*only the models of the Wan family and Helios"):
        split_backbone(Other(), Ranks(0, 2))  # type: ignore[arg-type]


def test_a_memory_that_does_not_name_its_heads_is_refused() -> None:
    policy: MemoryPolicy = _LoneBlock()
    assert split_memory(policy, LONE) is policy
    with pytest.raises(RecapError, match="does not say what of its state belongs to which heads"):
        split_memory(policy, Ranks(0, 2))


def test_a_gpu_is_not_chosen_by_number(tmp_path: Path) -> None:
    with pytest.raises(RecapError, match="device is 'cuda:1': each process takes the GPU of its own number"):
        Ranks(0, 2).begin({"device": "cuda:1"}, tmp_path, fresh=True)


@pytest.mark.slow
def test_attach_refuses_in_each_of_several_processes() -> None:
    code = """
import torch.distributed as dist
from recap.attach import attach
from recap.errors import RecapError
dist.init_process_group("gloo")
try:
    with attach(object()):
        pass
except RecapError as error:
    raise SystemExit(str(error))
"""
    for said in finish(launch(2, "-c", code), 1):
        assert "number of processes is 2: an attached pipeline keeps" in said
        assert "Traceback" not in said


def test_attach_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with (
        pytest.raises(RecapError, match="number of processes is 2: an attached pipeline keeps"),
        attach(object()),
    ):
        pass
