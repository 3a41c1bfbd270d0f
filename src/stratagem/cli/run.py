"""`stratagem run`: starts a program, as one process or as the tasks of a cluster."""

import dataclasses
import functools
import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from stratagem import _env
from stratagem.cluster.launch.user_program import UserProgram
from stratagem.errors import LaunchError
from stratagem.processes.early_server import start_early

if TYPE_CHECKING:
    from stratagem.cluster.launch.launching import LaunchOutcome
    from stratagem.cluster.launch.output import Screen
    from stratagem.cluster.launch.plan import LaunchPlan

SETTINGS = {"allow_interspersed_args": False}
"""For typer: what follows the program's name is the program's own."""

# Shares of the CPU can always be had, so that nothing needs to be looked up, which would load torch.
_SHARES_OF_CPU = re.compile(r"cpu:[1-9][0-9]{0,3}")
_ONE_DEVICE = re.compile(r"[a-z]+:1", re.IGNORECASE)
_SHOWN = re.compile(r"all|([0-9]+|(chief|worker|ps|evaluator)/[0-9]+)(,([0-9]+|(chief|worker|ps|evaluator)/[0-9]+))*")

_in_cluster = functools.partial(typer.Option, rich_help_panel="Cluster")
_in_output = functools.partial(typer.Option, rich_help_panel="Output")
_in_machines = functools.partial(typer.Option, rich_help_panel="Several machines")
_in_ray = functools.partial(typer.Option, rich_help_panel="Ray")

_RAY_ADDRESS = re.compile(r"auto|ray://\S+|[^\s/]+:[0-9]+")


class RunCommand(TyperCommand):
    """Lets --ray be followed by an address, or by something else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes `--ray ADDRESS` as `--ray=ADDRESS`, and `--ray` alone as `--ray=`, in what is not the program's."""
        alone = {name for each in self.params if getattr(each, "is_flag", False) for name in each.opts}
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            if args[place] == "--ray":
                address = args[place + 1 : place + 2]
                has_address = bool(address and _RAY_ADDRESS.fullmatch(address[0]))
                args[place : place + 1 + has_address] = [f"--ray={address[0] if has_address else ''}"]
            place += 1 if args[place] in alone or "=" in args[place] else 2
        return super().parse_args(ctx, args)


def run(
    program: Annotated[
        str | None, typer.Argument(metavar="PROGRAM", help="A Python file, or a module with -m.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The arguments of the program.")
    ] = None,
    *,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module, as in python -m.")] = False,
    devices: Annotated[
        str | None, typer.Option(metavar="KIND:N", help="Devices that each process sees: cpu:4, gpu:2, gpu:all.")
    ] = None,
    workers: Annotated[int | None, _in_cluster(metavar="N", help="Start a cluster of N workers.")] = None,
    ps: Annotated[int, _in_cluster(metavar="N", help="Start N parameter servers.")] = 0,
    chief: Annotated[bool, _in_cluster("--chief", help="Start a chief beside the workers.")] = False,
    evaluator: Annotated[bool, _in_cluster("--evaluator", help="Start an evaluator.")] = False,
    max_restarts: Annotated[
        int, _in_cluster(metavar="N", help="Start all tasks again after a failure, up to N times.")
    ] = 0,
    grace: Annotated[float, _in_cluster(metavar="S", help="Seconds that tasks have to end after SIGTERM.")] = 10.0,
    heartbeat_timeout: Annotated[
        float | None,
        _in_cluster(
            metavar="S", help="Seconds without heartbeats before a task is lost whose machine answers; 30 by default."
        ),
    ] = None,
    evaluator_grace: Annotated[
        float, _in_cluster(metavar="S", help="Seconds that the evaluator may go on after training.")
    ] = 60.0,
    log_dir: Annotated[
        Path | None,
        _in_output(
            metavar="DIR",
            help="Keep the output of every task here; it replaces that of an earlier run. By default it is kept only "
            "if the run fails.",
        ),
    ] = None,
    show: Annotated[
        str | None,
        _in_output(
            metavar="TASKS",
            help="Whose output is shown, with names in front: all, 1 (worker/1), ps/0,worker/1. By default that of "
            "the first task, as it is.",
        ),
    ] = None,
    verbose: Annotated[bool, _in_output("--verbose", "-v", help="The same as --show all.")] = False,
    dry_run: Annotated[bool, _in_output("--dry-run", help="Start nothing; say which tasks would run where.")] = False,
    explain: Annotated[bool, _in_output("--explain", help="The same as --dry-run, with the reasons.")] = False,
    as_json: Annotated[bool, _in_output("--json", help="Print JSON, with --dry-run or --explain.")] = False,
    nnodes: Annotated[int, _in_machines(metavar="N", help="The number of machines.")] = 1,
    node_rank: Annotated[int, _in_machines(metavar="N", help="The number of this machine, from 0.")] = 0,
    rdzv_endpoint: Annotated[str, _in_machines(metavar="HOST:PORT", help="The address at which machine 0 waits.")] = "",
    local_addr: Annotated[str, _in_machines(metavar="HOST", help="The address of this machine for others.")] = "",
    join_timeout: Annotated[float, _in_machines(metavar="S", help="Seconds to wait for all machines.")] = 60.0,
    ray: Annotated[
        str | None,
        _in_ray(
            metavar="[ADDRESS]",
            help="Let Ray start the tasks: at host:port, at auto (one on this machine), or without an address in a "
            "new Ray of this machine alone. By default one worker on each of its machines.",
        ),
    ] = None,
    cpus_per_worker: Annotated[float | None, _in_ray(metavar="N", help="CPUs that Ray reserves for each task.")] = None,
    gpus_per_worker: Annotated[float | None, _in_ray(metavar="N", help="GPUs that Ray reserves for each task.")] = None,
) -> None:
    """Run a program on the devices named, as one process or as the tasks of a cluster.

    With --workers, each task runs the program with TF_CONFIG and torchrun's variables in its environment.
    """
    only_says = dry_run or explain
    if as_json and not only_says:
        raise LaunchError("--json goes with --dry-run or --explain; a run shows what the program prints")
    if program is None and explain:
        _explain_surroundings()
        return
    if program is None:
        raise LaunchError("no program was named; write stratagem run [OPTIONS] PROGRAM [ARGS]...")
    named = UserProgram(program, tuple(arguments or ()), is_module=module)
    in_cluster = workers is not None or ps or chief or evaluator or nnodes != 1 or ray is not None
    if ray is None and (cpus_per_worker is not None or gpus_per_worker is not None):
        raise LaunchError("--cpus-per-worker and --gpus-per-worker go with --ray; devices are named with --devices")
    supervised = in_cluster or max_restarts or log_dir or show or verbose or heartbeat_timeout is not None
    if not (only_says or supervised):
        _execute(named, devices)
    # Imported here, for torch takes over a second and a program that is merely executed must not wait for it.
    from stratagem.cluster.launch.agent import Patience
    from stratagem.cluster.launch.launching import Launching
    from stratagem.cluster.launch.local_launcher import launch_here
    from stratagem.cluster.launch.plan import Machine, Order, make_plan
    from stratagem.devices.inventory import this_process

    order = Order(
        named,
        devices=devices,
        num_workers=workers,
        num_ps=ps,
        chief=chief,
        evaluator=evaluator,
        max_restarts=max_restarts,
        machine=Machine(node_rank, nnodes, rdzv_endpoint, local_addr, join_timeout),
        heartbeat_timeout_s=heartbeat_timeout,
    )
    screen = _screen("all" if verbose else show)
    if ray is not None:
        from stratagem.cluster.ray.ray_launcher import RayOrder, launch_on_ray, make_ray_plan

        asked = RayOrder(ray or None, cpus_per_worker, gpus_per_worker, join_timeout)
    plan = make_plan(order, this_process()) if ray is None else make_ray_plan(order)
    if only_says:
        _tell(plan, screen, why=explain, as_json=as_json)
        return
    how = Launching(screen, _say, log_dir, Patience(grace_s=grace, evaluator_s=evaluator_grace))
    outcome = launch_here(plan, how) if ray is None else launch_on_ray(order, asked, how)
    if outcome.stopped_by is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is ending already
    _report(outcome)
    raise typer.Exit(outcome.code)


def _explain_surroundings() -> None:
    """Says in which cluster this process is, and why."""
    from stratagem.cluster.resolvers.detection import found

    typer.echo(found().explain())


def _execute(program: UserProgram, devices: str | None) -> None:
    """Turns this process into the program; comes back only by an error."""
    program.check()
    if devices is None:
        program.execute({})
    if not _SHARES_OF_CPU.fullmatch(devices):
        from stratagem.cluster.launch.plan import check_devices
        from stratagem.devices.inventory import this_process

        check_devices(devices, this_process())
    changes = {_env.DEVICES: devices}
    if not _ONE_DEVICE.fullmatch(devices):
        changes |= start_early(_env.for_process(changes))
    program.execute(changes)


def _screen(show: str | None) -> "Screen":
    from rich.console import Console

    from stratagem.cluster.launch.output import Screen

    if show is not None and not _SHOWN.fullmatch(show):
        raise LaunchError(f"--show takes all, or tasks such as 1 or ps/0,worker/1, got {show!r}")
    words = show.split(",") if show else []
    names = frozenset(f"worker/{word}" if word.isdigit() else word for word in words) or None
    console = Console()
    return Screen(sys.stdout.buffer, sys.stderr.buffer, names, coloured=console.is_terminal and not console.no_color)


def _say(text: str) -> None:
    typer.echo(f"stratagem: {text}", err=True)


def _report(outcome: "LaunchOutcome") -> None:
    """Says how a run ended, if there is more to say than the program did itself."""
    *earlier, last = outcome.failures or (None,)
    if outcome.stopped_by is not None:
        _say(f"stopped by {outcome.stopped_by.name}")
    elif outcome.code == 0 and last is not None:
        _say(f"succeeded after {len(outcome.failures)} restart(s)")
    elif last is not None:
        _say(f"{last.describe()}{'; its output is above' if last.shown else ''}")
        if last.traceback and not last.shown:
            typer.echo(last.traceback, err=True)
        if earlier:
            _say(f"gave up after {len(earlier)} restart(s):")
            for each in outcome.failures:
                when = time.strftime("%H:%M:%S", time.localtime(each.at))
                typer.echo(f"  {when}  {each.describe()}", err=True)
    if outcome.code != 0 and outcome.logs is not None:
        _say(f"the output of all tasks is in {outcome.logs}")


def _tell(plan: "LaunchPlan", screen: "Screen", *, why: bool, as_json: bool) -> None:
    """Says what would be started where, and why so."""
    from stratagem.cli.tables import ranges, show, table
    from stratagem.cluster.resolvers.detection import found
    from stratagem.devices.inventory import this_process

    command = plan.order.program.command
    # Tasks of a cluster that is started here are told by TF_CONFIG, whatever surrounds the launcher.
    cluster = ["each task is told its place by TF_CONFIG"] if plan.order.is_cluster else found().explain().splitlines()
    reasons = [*plan.reasons, *cluster] if why else []
    tasks = list(zip(plan.names(), plan.seats, strict=True))
    if as_json:
        described = [{"task": name, **dataclasses.asdict(seat)} for name, seat in tasks]
        typer.echo(json.dumps({"command": command, "tasks": described, "reasons": reasons}, indent=2))
        return
    gpus = "all" if this_process().physical("GPU") else "none"
    rows = [
        [
            name,
            ranges(seat.cores) or "all",
            gpus if seat.gpus is None else ",".join(seat.gpus) or "none",
            plan.order.devices if seat.trains and plan.order.devices else "all",
            "shown" if screen.shows(name, number) else "log",
        ]
        for number, (name, seat) in enumerate(tasks)
    ]
    typer.echo(f"would run: {shlex.join(command)}")
    show(table("", ["task", "cores", "GPUs", "devices", "output"], rows))
    for line in reasons:
        typer.echo(line)
