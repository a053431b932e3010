"""`make test-gpu` finds every test for a GPU, needs no package that such a machine may lack, and keeps its log."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import find_marked

ROOT = Path(__file__).resolve().parents[2]
# What a machine for computing does not have: it has torch, Triton, OpenCV, numpy, safetensors and pytest.
ABSENT = ("av", "diffusers", "typer", "rich", "fastapi", "uvicorn", "websockets", "ray", "ftfy", "playwright")


def in_a_process(program: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
def test_all_its_files_are_collected_without_the_packages_of_other_tests():
    done = in_a_process(
        f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        "import pytest\nfrom tests.gpu import Outcomes, find_marked\n"
        "seen = Outcomes()\n"
        "pytest.main(['--collect-only', '-q', '-m', 'cuda', *map(str, find_marked())], plugins=[seen])\n"
        "print('REMARKS', *seen.remarks, sep='\\n')"
    )
    remarks = done.stdout.partition("REMARKS\n")[2].splitlines()
    # Helios is diffusers' own model; compiled kernels need Triton, which machines with a GPU have.
    allowed = re.compile(r"skipped .*(could not import 'diffusers'|could not import 'triton')")
    assert done.returncode == 0, done.stderr
    assert [line for line in remarks if not allowed.match(line)] == []
    assert len(re.findall(r"^tests/.*: \d+$", done.stdout, flags=re.MULTILINE)) > 10


@pytest.mark.slow
def test_the_log_says_what_ran_where_and_why_something_did_not(tmp_path):
    (tmp_path / "test_marked.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.cuda\n"
        "def test_right(): pass\n"
        "def test_wrong():\n"
        "    try:\n"
        "        raise MemoryError('no room')\n"
        "    finally:\n"
        "        raise RuntimeError('cannot end it')\n"
        "def test_absent(): pytest.skip('no such card')\n"
        "@pytest.fixture\ndef broken(): raise OSError('gone')\n"
        "def test_broken(broken): pass\n"
    )
    (tmp_path / "test_lacking.py").write_text(
        "import pytest\npytestmark = pytest.mark.cuda\npytest.importorskip('no_such_package')\n"
    )
    (tmp_path / "test_other.py").write_text("import no_such_package\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    assert find_marked(tmp_path) == [tmp_path / "test_lacking.py", tmp_path / "test_marked.py"]
    log = tmp_path / "gpu.txt"
    done = in_a_process(
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.gpu import run\n"
        f"sys.exit(run(Path({str(tmp_path)!r}), Path({str(log)!r}), 'abc1234', 3))",
        tmp_path,
    )
    assert done.returncode == 1, done.stderr
    text = log.read_text()
    assert "commit   abc1234\n" in text and "result   1 passed, 2 skipped, 1 failed, 1 error\n" in text
    assert re.search(r"date     \d{4}-\d\d-\d\d", text) and "torch" in text
    assert "test_absent: Skipped: no such card" in text and "test_marked.py: " in text
    # What an error hides is told before it.
    wrong = next(line for line in text.splitlines() if "::test_wrong" in line)
    assert re.search(r"MemoryError: no room -> test_marked.py:\d+: RuntimeError: cannot end it$", wrong), (
        wrong
    )
    assert "::test_broken: test_marked.py:" in text and "OSError: gone" in text


@pytest.mark.slow
def test_where_nothing_ran_the_run_has_not_passed(tmp_path):
    (tmp_path / "test_unmarked.py").write_text("def test_right(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    program = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.gpu import run\n"
        f"sys.exit(run(Path({str(tmp_path)!r}), Path({str(tmp_path / 'gpu.txt')!r}), 'abc1234', 1))"
    )
    assert in_a_process(program, tmp_path).returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    # Killed by a signal whose number is that of the code above.
    (tmp_path / "test_marked.py").write_text(
        "import os, pytest\n\n@pytest.mark.cuda\ndef test_dies(): os.kill(os.getpid(), 5)\n"
    )
    done = in_a_process(program, tmp_path)
    assert done.returncode == 128 + 5, done.stderr
    assert "one of the processes ended with -5" in (tmp_path / "gpu.txt").read_text()


def test_the_target_needs_no_environment_of_ours():
    target = re.search(r"^test-gpu:(.*)\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert target is not None
    assert target[1].strip() == "" and ".venv" not in target[2] and "$(PYTHON) -m tests.gpu" in target[2]
