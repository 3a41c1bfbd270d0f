"""The file with the secret: who may read it, and that it never shows."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from stratagem import _env
from stratagem.cluster import token as tokens
from stratagem.errors import TokenError
from tests.cluster import nursery

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user for a while")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_token_is_made_on_first_use_for_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0)
    try:
        first = tokens.load()
    finally:
        os.umask(before)
    path = tmp_path / ".stratagem" / "token"
    assert first.path == path
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    assert len(path.read_bytes().strip()) == 64
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]
    assert tokens.load().sign(b"x") == first.sign(b"x")
    assert len(first.sign(b"x")) == 32


def test_two_tokens_are_different_and_none_is_overwritten(tmp_path: Path) -> None:
    tokens.create(tmp_path / "a")
    tokens.create(tmp_path / "b")
    content = (tmp_path / "a").read_bytes()
    assert content != (tmp_path / "b").read_bytes()
    with pytest.raises(FileExistsError):
        tokens.create(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content
    assert tokens.load(tmp_path / "a").sign(b"") != tokens.load(tmp_path / "b").sign(b"")


def test_many_processes_that_come_first_at_once_have_one_token(tmp_path: Path, forked_tasks: None) -> None:
    program = "from stratagem.cluster import token; print(token.load().sign(b'').hex())"
    environment = {**os.environ, "HOME": str(tmp_path)}
    started = [nursery.Program(["-c", program], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outcomes = {process.communicate(timeout=50)[0] for process in started}
    assert len(outcomes) == 1
    assert "" not in outcomes


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o644])
def test_token_that_others_can_read_or_write_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(TokenError) as caught:
        tokens.load()
    assert f"{str(token_file)!r} has mode {mode:04o}: others can read or write it" in str(caught.value)
    assert str(caught.value).endswith(f"; run chmod 600 {token_file}")


def test_token_in_a_folder_that_others_can_write_is_refused(token_file: Path) -> None:
    token_file.parent.chmod(0o777)
    with pytest.raises(TokenError, match=f"run chmod 700 {token_file.parent}"):
        tokens.load()


def test_token_that_is_a_link_is_refused(token_file: Path) -> None:
    link = token_file.with_name("link")
    link.symlink_to(token_file)
    with pytest.raises(TokenError, match="is a symbolic link; name the file itself in STRATAGEM_TOKEN_FILE"):
        tokens.load(link)
    with pytest.raises(FileExistsError):
        tokens.create(link)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b" \n", "is empty"), (b"short", "5 characters")])
def test_token_without_a_secret_is_refused(token_file: Path, content: bytes, message: str) -> None:
    token_file.write_bytes(content)
    with pytest.raises(TokenError, match=message):
        tokens.load()


def test_token_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(TokenError, match="is not a regular file"):
        tokens.load(tmp_path / "pipe")
    with pytest.raises(TokenError, match="is not a regular file"):
        tokens.load(tmp_path)


def test_named_token_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.TOKEN_FILE, str(tmp_path / "absent"))
    with pytest.raises(TokenError, match=r"there is no token file .*; copy there .*umask 077"):
        tokens.load()
    assert not (tmp_path / "absent").exists()


def test_advice_for_a_missing_token_makes_one_that_works(tmp_path: Path) -> None:
    with pytest.raises(TokenError) as caught:
        tokens.load(tmp_path / "token")
    recipe = str(caught.value).rpartition(" by ")[2]
    subprocess.run(["sh", "-c", recipe], check=True, timeout=20)
    assert len(tokens.load(tmp_path / "token").sign(b"")) == 32


@as_root
def test_token_of_another_user_is_refused_and_others_cannot_read_ours(token_file: Path) -> None:
    os.chown(token_file, NOBODY, NOBODY)
    with pytest.raises(TokenError, match=rf"belongs to user {NOBODY}, not to user 0, who reads it; run chown 0 "):
        tokens.load()
    os.chown(token_file, 0, 0)
    for folder in token_file.parents[1], token_file.parent:
        folder.chmod(0o711)
    reading = subprocess.run(
        ["setpriv", "--reuid", str(NOBODY), "--clear-groups", "cat", str(token_file)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert reading.returncode != 0
    assert "Permission denied" in reading.stderr


def test_secret_never_shows(token_file: Path) -> None:
    secret = token_file.read_text().strip()
    token = tokens.load()
    assert secret not in repr(token) + str(token) + repr(vars(type(token)))
    with pytest.raises(TokenError, match="not sent to other processes"):
        token.__reduce__()
    token_file.write_text(f"{secret[:20]}\n")
    with pytest.raises(TokenError) as caught:
        tokens.load()
    assert secret[:20] not in str(caught.value)
