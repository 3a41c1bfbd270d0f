"""A program with a session on a cluster, in a process of its own that a test may suspend.

Its rhythm is quicker than users have it, so that a short suspension is a long one.
"""

import os

import torch

import stratagem as sg
from tests.cluster.task_program import main

session: sg.Session | None = None


def begin(target: str) -> str:
    """Opens a session on a task, or on a server of this process if there is no target."""
    global session, placeholder, doubled, more  # noqa: PLW0603
    os.environ["STRATAGEM_HEARTBEAT_TIMEOUT"] = "2"
    with sg.Graph() as graph:
        placeholder = sg.placeholder(torch.float32, [2])
        doubled = placeholder * 2
        total = sg.get_variable("total", initializer=0.0)
        more = sg.assign(total, total + 1)
    session = sg.Session(target or sg.Server.create_local_server().target, graph)
    return "begun"


def run() -> list[float]:
    assert session is not None
    found: list[float] = session.run(doubled, {placeholder: [1.0, 2.0]}).tolist()
    return found


def add() -> float:
    """Adds 1 to a variable that other sessions have too."""
    assert session is not None
    return float(session.run(more))


def add_forever() -> None:
    """The same until somebody ends this process."""
    while True:
        add()


if __name__ == "__main__":
    main(globals())
