"""The attacks A9 to A11 on parameters that workers of one machine share: nobody else can find or open them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from tests.cluster.tasks import listening_at

NOBODY = 65534
# Run by somebody else: what can it open of all that some processes have?
LOOK = """
import os, sys
opened = []
for pid in sys.argv[1:]:
    for place in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files", f"/proc/{pid}/mem", f"/proc/{pid}/environ"):
        try:
            names = [f"{place}/{name}" for name in os.listdir(place)] if os.path.isdir(place) else [place]
            for name in names:
                open(name, "rb").close()
                opened.append(name)
        except PermissionError:
            pass
print(*opened)
"""


@pytest.fixture
def strategy(four_cpus: None) -> Iterator[sg.ParameterServerStrategy]:
    before = os.umask(0)  # a user who does not care
    try:
        with sg.ParameterServerStrategy(1) as made:
            yield made
    finally:
        os.umask(before)


def named() -> set[str]:
    """What has a name that others could guess, or take first."""
    folders = [Path("/dev/shm"), Path("/dev/mqueue"), Path(tempfile.gettempdir()), Path("/var/lock"), Path("/run/lock")]
    unix = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7}
    return {str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()} | unix


def test_parameters_have_no_name_no_port_and_no_reader(strategy: sg.ParameterServerStrategy) -> None:
    names, ports = named(), listening_at(os.getpid())
    with strategy.scope():
        model = nn.Linear(300, 300)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> int:
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        return os.getpid()

    ((worker,),) = [strategy.local_results(strategy.run(step))]
    found = {name for name in named() - names if "stratagem" in name or "torch" in name or "psm" in name}
    assert not found
    assert listening_at(os.getpid()) | listening_at(worker) == ports
    looking = subprocess.run(
        [
            "setpriv",
            "--reuid",
            str(NOBODY),
            "--clear-groups",
            sys.executable,
            "-c",
            LOOK,
            str(os.getpid()),
            str(worker),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert looking.returncode == 0, looking.stderr
    assert not looking.stdout.split()
