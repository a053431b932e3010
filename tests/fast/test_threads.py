"""There are as many threads as can run at once, unless the user sets another number."""

from __future__ import annotations

import os

import pytest
import torch

from recap.fast.threads import fair_threads, use_fair_threads


@pytest.mark.parametrize(
    ("content", "expected"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None)],
)
def test_a_container_s_share_is_kept(tmp_path, content, expected):
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 64
    assert fair_threads(64, {}, quota) == min(64, cores, expected or 64)


def test_without_such_a_file_the_cores_count(tmp_path):
    assert fair_threads(1, {}, tmp_path / "none") == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_user_s_setting_takes_precedence(tmp_path, name):
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert fair_threads(8, {name: "8"}, tmp_path / "cpu.max") == 8


def test_never_more_than_torch_would_take():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        use_fair_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
