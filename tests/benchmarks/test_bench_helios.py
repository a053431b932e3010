"""The benchmark of Helios runs to its JSON line at its tiny size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.helios import main

pytest.importorskip("diffusers")


def test_tiny_size_runs_to_its_json_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.helios", "--size", "tiny", "--chunks", "2", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["to_off"]["recap"]["without_decode_ms"] > 0
    assert set(result["by_memory"]["recap"]["sink_share_by_stage"]) == {"0", "1", "2"}


def test_missing_diffusers_is_refused_with_a_remedy():
    program = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "diffusers":
            raise ImportError("diffusers is not here")
sys.meta_path.insert(0, Without())
sys.argv = ["helios", "--size", "tiny"]
from benchmarks.helios import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and "PYTHONPATH" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chunks", "0"], "--chunks is 0"),
        (["--memories", ""], "memory is ''"),
        (["--device", "tpu"], "device is 'tpu'"),
    ],
)
def test_bad_options_are_refused_in_one_line(monkeypatch, words, message):
    monkeypatch.setattr("sys.argv", ["helios", "--size", "tiny", *words])
    with pytest.raises(SystemExit, match=message):
        main()
