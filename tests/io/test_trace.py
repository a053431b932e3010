"""The trace: what is written is what is read, older files are read or refused, and the bank replays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from recap.io.files import append_line
from recap.io.trace import (
    BlockTrace,
    bank_before,
    pictures_of_frames,
    read_seconds,
    read_trace,
    replay_bank,
)
from recap.types import Block, Candidates, GeneratedBlock, MemoryTrace, Role


def made(index: int = 1) -> GeneratedBlock:
    """A block of two rows with everything that a trace can have; only the sink's share was measured."""
    source = torch.tensor([[[4, 0, 0], [4, 0, 1], [4, 1, 0], [4, 1, 1]]] * 2)
    offered = Candidates(source, torch.tensor([[0.5, 0.25, 0.0, 1.0], [0.0, 0.0, 2.0, 0.5]]))
    slots = Candidates(source[:, :2], torch.tensor([[0.5, -1.0], [0.0, 0.5]]))
    memory = MemoryTrace(
        {Role.SINK: 4, Role.CURRENT: 12},
        admitted=slots,
        evicted=Candidates(source[:, :1], torch.full((2, 1), -1.0)),
        fired=torch.tensor([[0, 3, 1], [0, 2, 0]]),
        offered=offered,
        edge_share=torch.tensor([0.5, 0.25]),
        notes={"folded_frames": 2},
    )
    block = Block(index, 3 * index, 3, ("a boat", "a house"), clears_prior=True)
    shares = {Role.SINK: torch.tensor([0.5, 0.25])}
    starts = tuple(12 * index + 4 * frame - 3 for frame in range(3))
    pixels = torch.zeros(2, 12, 3, 1, 1)
    return GeneratedBlock(block, torch.zeros(2, 3, 1, 1, 1), pixels, memory, shares, {0: shares}, starts)


@pytest.mark.parametrize("offered", [False, True])
def test_a_line_is_read_as_it_was_written(offered):
    trace = BlockTrace.of(made(), offered=offered)
    line = json.loads(json.dumps(trace.to_json()))
    assert BlockTrace.from_json(line) == trace
    assert ("offered" in line) == offered
    assert line["admitted"] == [[[4, 0, 0, 0.5]], [[4, 0, 0, 0.0], [4, 0, 1, 0.5]]]


def test_a_role_that_was_not_measured_is_none_and_not_zero():
    trace = BlockTrace.of(made())
    assert trace.shares == {Role.SINK: [0.5, 0.25], Role.CURRENT: None}
    assert trace.to_json()["attention_share"] == {"sink": [0.5, 0.25]}


def test_a_row_is_the_trace_of_a_run_of_its_own():
    row = BlockTrace.of(made(), offered=True).row(1)
    assert row.prompts == ("a house",) and row.fired == [[0, 2, 0]] and row.edge_share == [0.25]
    assert row.shares == row.stage_shares[0] == {Role.SINK: [0.25], Role.CURRENT: None}
    assert row.admitted == [{(4, 0, 0): 0.0, (4, 0, 1): 0.5}] and row.evicted == [{}]
    assert row.candidates() == {(4, 0, 0): 0.0, (4, 0, 1): 0.0, (4, 1, 0): 2.0, (4, 1, 1): 0.5}


def test_the_bank_replays_block_by_block():
    first, second, third = (replace(BlockTrace.of(made(i)), admitted=None, evicted=None) for i in range(3))
    trace = [
        replace(first, admitted=[{(0, 0, 0): 1.0, (1, 0, 0): 0.5}]),
        second,
        replace(third, admitted=[{(7, 1, 1): 2.0}], evicted=[{(1, 0, 0): 0.5}]),
    ]
    early, late = {(0, 0, 0): 1.0, (1, 0, 0): 0.5}, {(0, 0, 0): 1.0, (7, 1, 1): 2.0}
    assert list(replay_bank(trace)) == [early, early, late]
    assert [bank_before(trace, block) for block in range(4)] == [{}, early, early, late]


def lines(num: int) -> list[dict]:
    return [json.loads(json.dumps(BlockTrace.of(made(index)).to_json())) for index in range(1, num + 1)]


def test_lines_of_an_older_version_are_counted_by_those_that_follow(tmp_path):
    for line in lines(3):
        del line["num_pictures"]
        append_line(tmp_path / "trace.jsonl", line)
    trace = read_trace(tmp_path / "trace.jsonl")
    assert [line.num_pictures for line in trace] == [12, 12, 12]
    assert pictures_of_frames(trace) == {3 + i: range(9 + 4 * i, 13 + 4 * i) for i in range(9)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line.pop("first_pictures"), "block 1.*older version wrote it.*generate the run again"),
        (lambda line: line.pop("prompts"), "block 1.*not a line of a trace.*prompts"),
        (lambda line: line.update(admitted=[[[1, 2]]]), "not a line of a trace"),
        (lambda line: line.update(attended_tokens={"attic": 3}), "not a line of a trace.*attic"),
        (lambda line: line.update(attention_share=None), "not a line of a trace"),
    ],
)
def test_what_cannot_be_read_is_refused_by_block(tmp_path, damage, message):
    (line,) = lines(1)
    damage(line)
    append_line(tmp_path / "trace.jsonl", line)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "trace.jsonl")


def test_times_are_apart_from_the_trace(tmp_path):
    append_line(tmp_path / "timing.jsonl", {"block": 0, "seconds": 1.5})
    assert read_seconds(tmp_path / "timing.jsonl") == [1.5]
