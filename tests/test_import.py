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


_TRAINING = """
import json, sys
import torch
import stratagem as sg

HEAVY = ("torch._dynamo", "sympy")
sg.config.set_logical_device_configuration("cpu:0", [sg.config.LogicalDeviceConfiguration()] * 2)
made = MAKE
with made as strategy:
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        return " ".join(name for name in HEAVY if name in sys.modules)

    batches = strategy.distribute((torch.ones(4, 2),), global_batch_size=4)
    first = [list(strategy.local_results(strategy.run(step, args=batch))) for batch in batches]
    loaded = [name for name in HEAVY if name in sys.modules]
    bare = torch.optim.Optimizer.zero_grad.__wrapped__
    import torch._dynamo
    optimizer.zero_grad()  # from here on torch's own
    is_torchs = torch._dynamo.is_dynamo_supported() and "_call_bare" not in repr(getattr(bare, "__dynamo_disable"))
    optimizer.state_dict()
print(json.dumps({"replicas": first, "main": loaded, "is_torchs": is_torchs}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_results"),
    [("sg.MirroredStrategy()", 2), ("sg.ParameterServerStrategy(2)", 1)],
    ids=["mirrored", "ps"],
)
def test_a_first_step_loads_neither_torchs_compiler_nor_sympy(make: str, num_results: int) -> None:
    program = _TRAINING.replace("MAKE", make)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert json.loads(done.stdout) == {"replicas": [[""] * num_results], "main": [], "is_torchs": True}
