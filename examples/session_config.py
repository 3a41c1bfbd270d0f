"""Shows the settings of a session: soft placement, memory that grows, and a part of each GPU's memory.

python examples/session_config.py
"""

import warnings

import torch

import stratagem as sg


def soft_placement() -> None:
    """A variable is placed on a GPU that does not exist."""
    sg.reset_default_graph()
    a_cpu = sg.get_variable("a_cpu", initializer=0)
    with sg.device("/gpu:7"):
        a_gpu = sg.get_variable("a_gpu", initializer=0)

    with sg.Session(config=sg.SessionConfig(allow_soft_placement=False)) as session:
        try:
            session.run(a_gpu)
        except sg.errors.DeviceNotFoundError as error:
            print("refused:", str(error).partition(";")[0])

    config = sg.SessionConfig(allow_soft_placement=True, log_device_placement=True)
    with sg.Session(config=config) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session.run(sg.global_variables_initializer())
        print([each.item() for each in session.run([a_cpu, a_gpu])])
    print("told:", told[0].message)


def memory() -> None:
    """Memory is taken when needed; or no more than a part of each GPU's."""
    sg.reset_default_graph()
    with sg.device("/gpu:0"):
        x = sg.placeholder(torch.float32, [2**20])
        y = torch.cat([x, x])

    config = sg.SessionConfig()
    config.gpu_options.allow_growth = True
    with sg.Session(config=config) as session:
        print("with growth:", session.run(y, {x: torch.ones(2**20)}).numel(), "numbers")

    gpu_options = sg.GPUOptions(per_process_gpu_memory_fraction=0.4)
    with sg.Session(config=sg.SessionConfig(gpu_options=gpu_options)) as session:
        try:
            session.run(y, {x: torch.ones(2**20)})
        except sg.OutOfMemoryError as error:
            print("with 40%:", error)


def main() -> None:
    """Runs the programs of the notes."""
    sg.config.simulate_devices("GPU", 2, memory_limit=16)
    soft_placement()
    memory()


if __name__ == "__main__":
    main()
