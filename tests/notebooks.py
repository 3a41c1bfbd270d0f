"""Runs the notebooks of `examples/notebooks`, each in a Jupyter kernel that is forked from one process.

python -m tests.notebooks [NAME ...]     # runs them, or all, and keeps their new outputs in their files
"""

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_core.utils import ensure_event_loop

from tests.cluster.nursery import Nursery, Program
from tests.guards import adopt_orphans

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))
# What they import; a kernel that is forked has it already.
_MODULES = (
    *("ipykernel.kernelapp", "ipykernel.ipkernel", "stratagem.placement.pictures_png"),
    *("keras", "stratagem.training.keras.keras_objects", "stratagem.training.keras.steps"),
)
# On a busy machine any replica may be the slowest.
_QUIET = [option for replica in range(3) for option in ("-W", f"ignore:replica {replica} is the slowest")]
_CELL_S = 150.0
_OUTPUTS = ("stream", "display_data", "execute_result", "error")


@contextlib.contextmanager
def kernels() -> Iterator[Nursery]:
    """What kernels are forked from; and the event loop in which this process talks with them."""
    loop = ensure_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        made = Nursery.start(*_MODULES)
    yield made
    made.close()
    loop.close()


def execute(file: Path, kernels: Nursery) -> Any:
    """The notebook with the outputs that its cells give now."""
    notebook = read(file)
    execute_cells(notebook, kernels, file.parent)
    return notebook


def execute_cells(notebook: Any, kernels: Nursery, folder: Path) -> None:
    """Gives the cells of a notebook the outputs that they give now, in a kernel that works in a folder."""
    with _kernel(kernels, folder) as client:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                _execute(cell, client)


def read(file: Path) -> Any:
    """The notebook as it is kept."""
    return nbformat.read(file, as_version=4)


def text_of(cell: Any) -> str:
    """What a cell has printed or returned."""
    return "".join(each.get("text") or each["data"]["text/plain"] for each in cell.get("outputs", ()))


def _execute(cell: Any, client: BlockingKernelClient) -> None:
    outputs: list[Any] = []

    def take(message: Any) -> None:
        if message["header"]["msg_type"] in _OUTPUTS:
            output = nbformat.v4.output_from_msg(message)
            last = outputs[-1] if outputs else {}
            if output.output_type == "stream" and output.name == last.get("name"):
                last.text += output.text
            else:
                outputs.append(output)

    reply = client.execute_interactive(cell.source, allow_stdin=False, output_hook=take, timeout=_CELL_S)["content"]
    if reply["status"] != "ok":
        raise RuntimeError(f"{cell.source}\n\n" + "\n".join(reply["traceback"]))
    cell.outputs, cell.execution_count = outputs, reply["execution_count"]


@contextlib.contextmanager
def _kernel(kernels: Nursery, folder: Path) -> Iterator[BlockingKernelClient]:
    """A kernel that reads and writes nothing of the user's own Jupyter."""
    with tempfile.TemporaryDirectory() as own:
        key = secrets.token_hex().encode()
        file, _ = write_connection_file(f"{own}/kernel.json", ip=f"{own}/kernel", transport="ipc", key=key)
        places = {f"JUPYTER_{kind}_DIR": own for kind in ("CONFIG", "DATA", "RUNTIME")}
        environment = {**os.environ, **places, "IPYTHONDIR": own, "COLUMNS": "100"}
        command = [*_QUIET, "-m", "ipykernel_launcher", "-f", file, "--HistoryManager.enabled=False"]
        program = Program(command, nursery=kernels, env=environment, cwd=folder, stdout=DEVNULL)
        client = BlockingKernelClient(connection_file=file)
        client.load_connection_file()
        client.start_channels(hb=False)
        try:
            client.wait_for_ready(timeout=60)
            # As a kernel does by itself, unless matplotlib has been imported before it.
            client.execute_interactive("%matplotlib inline", silent=True, timeout=_CELL_S)
            yield client
            # Asked on the control channel, ipykernel may wait for ever: a thread of its writes to one that ended.
            client.execute("exit", silent=True)
            program.wait(60)
        finally:
            client.stop_channels()
            client.context.destroy(linger=0)
            if program.poll() is None:
                program.kill()
                program.wait()


def _main(names: list[str]) -> None:
    adopt_orphans()
    with kernels() as nursery:
        for file in FILES:
            if not names or file.stem in names:
                print(file.name, flush=True)
                nbformat.write(execute(file, nursery), file)


if __name__ == "__main__":
    _main(sys.argv[1:])
