"""Keeps what a launch has on disk: the token of the run, and the logs.

Owns the folder (mode 0700), who removes what when, and the guard that does so if this process is
killed. Logs outlive a run that did not succeed; everything else ends with it.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self, final

from stratagem.cluster.launch import guard
from stratagem.errors import LaunchError

_GUARD_TIMEOUT_S = 5.0


@final
class RunDirectory:
    """The folder of one launch, while it is entered.

    Args:
        log_dir: Where the user wants the logs, for good; by default they are in the folder itself.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self._log_dir = log_dir
        self.succeeded = False

    def __enter__(self) -> Self:
        self._root = Path(tempfile.mkdtemp(prefix="stratagem-run-"))
        self.token = self._root / "token"
        self.logs = self._log_dir or self._root / "logs"
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.logs / ".probe").touch()
            (self.logs / ".probe").unlink()
        except OSError as error:
            shutil.rmtree(self._root)
            raise LaunchError(
                f"logs cannot be written to {str(self.logs)!r}: {error.strerror}; name another --log-dir"
            ) from error
        own = (self.token, self._root / "logs", self._root)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, *map(str, own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._guard.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()
        try:
            self._guard.wait(_GUARD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self.succeeded:
            shutil.rmtree(self._root, ignore_errors=True)

    def kept_logs(self) -> Path | None:
        """Where logs will be when this folder has been left, if any are."""
        kept = self._log_dir is not None or (not self.succeeded and any(self.logs.iterdir()))
        return self.logs if kept else None

    def watch(self, pid: int) -> None:
        """Has a process group killed if this process dies."""
        self._tell(f"+{pid}")

    def release(self, pid: int) -> None:
        """Says that a process group has ended."""
        self._tell(f"-{pid}")

    def _tell(self, line: str) -> None:
        if self._guard.stdin:
            with contextlib.suppress(BrokenPipeError):  # without the guard, the kernel still ends the tasks
                self._guard.stdin.write(f"{line}\n".encode())
                self._guard.stdin.flush()
