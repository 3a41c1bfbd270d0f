"""A program with a session on a cluster, in a process of its own that a test may suspend.

Its rhythm is quicker than users have it, so that a short suspension is a long one.
"""

import torch

import stratagem as sg
from stratagem.graphs.sessions import task_connection, task_service
from tests.cluster.task_program import main

session: sg.Session | None = None


def begin(target: str) -> str:
    """Opens a session on a task, or on a server of this process if there is no target."""
    global session, placeholder, doubled  # noqa: PLW0603
    task_connection.HEARTBEAT_S = 0.5  # type: ignore[misc]
    task_connection.SILENCE_S = task_service.SILENCE_S = 2.0  # type: ignore[misc]
    with sg.Graph() as graph:
        placeholder = sg.placeholder(torch.float32, [2])
        doubled = placeholder * 2
    session = sg.Session(target or sg.Server.create_local_server().target, graph)
    return "begun"


def run() -> list[float]:
    assert session is not None
    found: list[float] = session.run(doubled, {placeholder: [1.0, 2.0]}).tolist()
    return found


if __name__ == "__main__":
    main(globals())
