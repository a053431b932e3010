"""The package needs nothing that only POSIX systems have: what Windows lacks is taken away, and a run still works."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What Python's documentation marks as available on Unix alone, as far as a package like this might use it.
ABSENT = {
    "os": (
        "fork", "forkpty", "nice", "sched_getaffinity", "sched_setaffinity", "getuid", "geteuid", "getgid", "getpgid",
        "killpg", "setsid", "mkfifo", "sync", "statvfs", "fstatvfs", "uname", "chown", "chroot", "wait", "wait3",
        "getloadavg", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_SYNC", "O_NONBLOCK", "fchmod", "fchown", "sysconf",
        "posix_fallocate", "posix_fadvise", "openpty", "getrandom", "fdatasync", "lockf", "WNOHANG", "WIFEXITED",
    ),
    "signal": ("SIGPIPE", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "setitimer", "alarm", "sigwait"),
}  # fmt: skip
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
# Signals and `fork` are also used by Python's own modules, which are therefore imported before they are taken away.
WINDOWS = f"""
import asyncio, fcntl, multiprocessing.forkserver, os, shutil, signal, subprocess, sys, tempfile
import av, cv2, numpy, torch

flags, fsync = fcntl.fcntl, os.fsync


def flush(number):
    if flags(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    fsync(number)


os.fsync = flush
for name in {ABSENT["os"]!r}:
    vars(os).pop(name, None)
for name in {ABSENT["signal"]!r}:
    vars(signal).pop(name, None)
sys.modules.update(dict.fromkeys({MODULES!r}))
"""


def on_windows(program: str, folder) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS + program], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_is_generated_resumed_and_shown(tmp_path):
    generate = ["generate", "a boat", "--seconds", "1.5", "--backbone", "untrained", "--flow", "classical"]
    calls = [[*generate, "--out", "run"], ["generate", "--resume", "run"], ["show", "run"], ["list"]]
    on_windows(
        "from recap.cli.main import main\n"
        f"for words in {calls!r}:\n"
        "    sys.argv = ['recap', *words]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, words\n",
        tmp_path,
    )
    assert (tmp_path / "run" / "video.mp4").is_file() and (tmp_path / "run" / "index.html").is_file()


def test_every_module_is_imported(tmp_path):
    found = on_windows(
        "import importlib, pkgutil, recap\n"
        "names = [m.name for m in pkgutil.walk_packages(recap.__path__, 'recap.')]\n"
        "kernels = ('kernels', '__main__')\n"
        "for name in names:\n"
        "    if not name.endswith(kernels):\n"
        "        importlib.import_module(name)\n"
        "print(len(names))\n",
        tmp_path,
    )
    assert int(found.split()[-1]) > 100


@pytest.mark.parametrize("name", ["O_NOFOLLOW", "fcntl"])
def test_what_was_taken_away_is_missed(tmp_path, name):
    program = "os.O_NOFOLLOW" if name == "O_NOFOLLOW" else "import fcntl"
    with pytest.raises(AssertionError, match=name):
        on_windows(program, tmp_path)
