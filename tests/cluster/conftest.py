"""A process that no starter has started, with a token of its own."""

import os
from pathlib import Path

import pytest

from stratagem import _env
from stratagem.cluster import token as tokens


@pytest.fixture(autouse=True)
def no_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (_env.TF_CONFIG, _env.TOKEN_FILE, _env.PORT, _env.NUM_TASKS, _env.SERVICE)
    slurm = [name for name in os.environ if name.startswith(_env.SLURM_PREFIX)]
    for name in (*own, *_env.TORCHRUN, *_env.KUBERNETES, *slurm):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def module_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for tasks that outlive a test."""
    path = tmp_path_factory.mktemp("session") / "secrets" / "token"
    tokens.create(path)
    return path


@pytest.fixture
def known_token(no_starter: None, module_token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and those that it starts use it."""
    monkeypatch.setenv(_env.TOKEN_FILE, str(module_token))


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token that this process and those that it starts use."""
    path = tmp_path / "secrets" / "token"
    tokens.create(path)
    monkeypatch.setenv(_env.TOKEN_FILE, str(path))
    return path
