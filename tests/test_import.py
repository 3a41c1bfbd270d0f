import json
import subprocess
import sys

import pytest

import stratagem

_PROGRAM = """
import json, os, sys, threading
import stratagem
bare = {"torch": "torch" in sys.modules}
stratagem.config
import torch
print(json.dumps({
    **bare,
    "threads": threading.active_count(),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "sockets": [link for link in map(os.readlink, (f"/proc/self/fd/{n}" for n in (3, 4, 5)
                if os.path.exists(f"/proc/self/fd/{n}"))) if link.startswith("socket")],
    "cuda": torch.cuda.is_initialized(),
    "environment_changed": dict(os.environ) != before,
}))
"""


@pytest.mark.slow
def test_import_starts_nothing_and_does_not_touch_cuda() -> None:
    program = "import os; before = dict(os.environ)" + _PROGRAM
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert json.loads(done.stdout) == {
        "torch": False,
        "threads": 1,
        "children": [],
        "sockets": [],
        "cuda": False,
        "environment_changed": False,
    }
    assert done.stderr == ""


def test_every_public_name_can_be_used() -> None:
    for name in stratagem.__all__:
        assert getattr(stratagem, name) is not None
        assert name in dir(stratagem)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'MirorredStrategy'"):
        _ = stratagem.MirorredStrategy
