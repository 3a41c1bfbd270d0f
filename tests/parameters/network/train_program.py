"""A program for `stratagem run --ps`: a worker is killed, then a server and a worker at once; or one dies always."""

import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
with open(FOLDER / name, "a") as starts:
    starts.write(f"{os.getpid()}\n")
if MODE == "loop" and name == "worker-1":
    os.kill(os.getpid(), signal.SIGKILL)

import torch  # noqa: E402

import stratagem as sg  # noqa: E402
from stratagem.training.checkpoints import load_latest, save_checkpoint  # noqa: E402

PATIENCE_S = 40.0
LAST = 60


def lives(of: str) -> list[int]:
    path = FOLDER / of
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def main() -> None:
    deadline = time.monotonic() + PATIENCE_S
    with sg.ParameterServerStrategy() as strategy:
        with strategy.scope():
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        found = load_latest(FOLDER / "checkpoints")
        if found is not None:
            strategy.load_state_dict(found[1]["strategy"])
        strategy.run(step, args=(torch.ones(2, 4),))
        print(f"{strategy.task} goes on after {found[1]['strategy']['version'] if found else None}", flush=True)
        while strategy.version < LAST and time.monotonic() < deadline:
            strategy.run(step, args=(torch.ones(2, 4),))
            if MODE == "once" and name == "worker-1" and len(lives(name)) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if MODE == "once" and strategy.is_chief and len(lives("worker-1")) == 2 and found is None:
                state = strategy.state_dict()  # others go on meanwhile: it is of the version that it says
                save_checkpoint(FOLDER / "checkpoints", state["version"], {"strategy": state})
                for victim in (lives("ps-0")[0], lives("worker-1")[1]):
                    os.kill(victim, signal.SIGKILL)
            elif found is None:
                time.sleep(0.1)
        print(f"{strategy.task} ends at {strategy.version >= LAST}", flush=True)


main()
