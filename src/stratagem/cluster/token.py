"""Keeps the secret that the tasks of a cluster share: whoever has it may take part.

Owns the file that holds it and the rules for that file. The secret never leaves this file's objects:
messages are signed here, and only the path is ever shown, passed on or logged.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final, final

from stratagem import _env
from stratagem.errors import TokenError

_NUM_BYTES: Final = 32
_FEWEST_CHARACTERS, _MOST_CHARACTERS = 32, 4096
_DEFAULT: Final = "~/.stratagem/token"


@final
class Token:
    """The secret of a cluster; shows its path, never itself.

    Args:
        secret: What only the tasks of the cluster know.
        path: Where it was read.
    """

    __slots__ = ("_secret", "path")

    def __init__(self, secret: bytes, path: Path) -> None:
        self._secret = secret
        self.path = path

    def sign(self, message: bytes) -> bytes:
        """32 bytes that only somebody with the same secret can make of this message."""
        return hmac.digest(self._secret, message, hashlib.sha256)

    def __repr__(self) -> str:
        return f"<Token of {str(self.path)!r}>"

    def __reduce__(self) -> str:
        raise TokenError("a token is not sent to other processes; each reads it from its file")


def load(path: str | Path | None = None) -> Token:
    """The secret in a file.

    Args:
        path: By default `STRATAGEM_TOKEN_FILE`, or `~/.stratagem/token`, which is made when it is first used.

    Raises:
        TokenError: The file is not there, or others could have read or written it.
    """
    named = _env.token_file() if path is None else str(path)
    if named:
        return _read(Path(named).absolute())
    default = Path(_DEFAULT).expanduser()
    with contextlib.suppress(FileExistsError):
        create(default)
    return _read(default)


def create(path: str | Path) -> None:
    """Makes a file with a new secret, which only its user can read; its folder too, if it is not there.

    Raises:
        FileExistsError: There is something at that path already, which is left as it is.
        TokenError: The file cannot be made.
    """
    path = Path(path).absolute()
    if os.path.lexists(path):
        raise FileExistsError(f"{str(path)!r} exists")
    # The secret is written under another name first: whoever sees the file sees all of it.
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_hex(_NUM_BYTES).encode() + b"\n")
            os.link(draft, path)
        finally:
            draft.unlink()
    except FileExistsError:
        raise
    except OSError as error:
        raise TokenError(f"the token file {str(path)!r} cannot be made: {error.strerror}") from None


def _read(path: Path) -> Token:
    """Reads a file that nobody else can read, write or replace."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TokenError(_why_not_opened(path, error)) from None
    try:
        _check(path, os.fstat(descriptor), os.stat(path.parent))
        content = os.read(descriptor, _MOST_CHARACTERS + 1).strip()
    finally:
        os.close(descriptor)
    if not content:
        raise TokenError(f"the token file {str(path)!r} is empty; remove it, and copy the one that the other tasks use")
    if not _FEWEST_CHARACTERS <= len(content) <= _MOST_CHARACTERS:
        raise TokenError(
            f"the token file {str(path)!r} holds {len(content)} characters; a token has {_FEWEST_CHARACTERS} to "
            f"{_MOST_CHARACTERS}. Make one by {_recipe(path)}"
        )
    return Token(content, path)


def _check(path: Path, status: os.stat_result, folder: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TokenError(f"{str(path)!r} is not a regular file; a token is kept in one")
    if status.st_uid != os.geteuid():
        raise TokenError(
            f"the token file {str(path)!r} belongs to user {status.st_uid}, not to user {os.geteuid()}, who reads it; "
            f"run chown {os.geteuid()} {path}"
        )
    if status.st_mode & 0o077:
        raise TokenError(
            f"the token file {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}: others can read or write it; "
            f"run chmod 600 {path}"
        )
    if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
        raise TokenError(
            f"the folder of the token file {str(path)!r} has mode {stat.S_IMODE(folder.st_mode):04o}: others can "
            f"replace the file; run chmod 700 {path.parent}"
        )


def _why_not_opened(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return f"the token file {str(path)!r} is a symbolic link; name the file itself in {_env.TOKEN_FILE}"
    if isinstance(error, FileNotFoundError):
        return (
            f"there is no token file {str(path)!r}; copy there the one that the other tasks use, or make the first by "
            f"{_recipe(path)}"
        )
    return f"the token file {str(path)!r} cannot be read: {error.strerror}"


def _recipe(path: Path) -> str:
    return f"(umask 077; head -c 32 /dev/urandom | base64 > {path})"
