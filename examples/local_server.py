"""Runs a graph on a cluster of one task, which is this very process.

python examples/local_server.py
"""

import stratagem as sg


def main() -> None:
    """Runs the program of the notes."""
    c = sg.constant("hello, distributed stratagem")
    with sg.Server.create_local_server() as server, sg.Session(server.target) as session:
        print(session.run(c))


if __name__ == "__main__":
    main()
