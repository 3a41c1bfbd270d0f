import json
import subprocess
import sys

import pytest

import stratagem

_PROGRAM = """
import json, os, sys
import stratagem
bare = {"torch": "torch" in sys.modules}
import torch
tasks = set(os.listdir("/proc/self/task"))  # libraries under torch start some
touched = []
torch.cuda._lazy_init = torch._C._cuda_init = lambda: touched.append("initialised")
stratagem.config.list_physical_devices()
stratagem.config.list_logical_devices()

def links():
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            yield os.readlink(f"/proc/self/fd/{name}")

print(json.dumps({
    **bare,
    "threads": sorted(set(os.listdir("/proc/self/task")) - tasks),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split(),
    "sockets": [link for link in links() if link.startswith("socket")],
    "cuda": touched,
    "environment_changed": dict(os.environ) != before,
}))
"""


@pytest.mark.slow
def test_import_starts_nothing_and_does_not_touch_cuda() -> None:
    program = "import os; before = dict(os.environ)" + _PROGRAM
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert json.loads(done.stdout) == {
        "torch": False,
        "threads": [],
        "children": [],
        "sockets": [],
        "cuda": [],
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
