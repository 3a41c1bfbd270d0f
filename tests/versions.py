"""Runs a choice of tests with the oldest and the newest Python, torch and other packages that are promised.

Each combination gets an environment of its own, in `.venv-versions`; it is removed after its tests unless `--keep` is
given. Packages come from the index that pip uses, torch among them with all that it needs there: some gigabytes for
each combination where the index has no build for the CPU alone. What cannot be had on this machine is a row of the
table that says so, and a failure.

python -m tests.versions [--only 3.11-oldest] [--keep] [--minutes 10]
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_FOLDER = ROOT / ".venv-versions"
_NEEDED_BYTES = 12 * 10**9
_INSTALL_LIMIT_S = 1800

# What differs between versions of torch, Keras, numpy and Python shows here first. About five minutes on two cores.
TESTS = (
    *("tests/contracts/test_strategies.py", "tests/contracts/test_collectives.py", "tests/training/keras/test_fit.py"),
    *("tests/engine/test_gradients.py", "tests/engine/test_run.py", "tests/parameters/network/test_network.py"),
    *("tests/training/estimator/test_estimator.py", "tests/foreign/test_torch_gradients.py"),
    *("tests/devices", "tests/placement", "tests/graphs", "tests/objects", "tests/inputs", "tests/variables"),
    *("tests/test_config.py", "tests/test_import.py", "tests/test_tree.py"),
)
SHOWN = ("torch", "keras", "numpy", "ray")


@dataclasses.dataclass(frozen=True)
class Combination:
    """Versions that are tried together.

    Args:
        python: Two numbers, such as 3.11.
        packages: `oldest`, the lower bounds in `pyproject.toml`; or `newest`, what pip takes without bounds.
    """

    python: str
    packages: str

    def __str__(self) -> str:
        return f"{self.python}-{self.packages}"


# numpy 1.26, the oldest that is promised, has no build for Python 3.13.
COMBINATIONS = (Combination("3.11", "oldest"), Combination("3.11", "newest"), Combination("3.13", "newest"))


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of a combination: its versions, how its tests ended, and for how long they ran."""

    combination: Combination
    versions: dict[str, str]
    outcome: str
    passed: bool
    time_s: float = 0.0


class NotHereError(Exception):
    """Says why a combination cannot be tried on this machine, and what to do."""


def requirements(packages: str) -> list[str]:
    """What pip installs beside the project itself: what the library uses, as old as promised, and the test tools."""
    extras = PROJECT["optional-dependencies"]
    used = [*PROJECT["dependencies"], *extras["keras"], *extras["tensorboard"], *extras["ray"]]
    if packages == "newest":
        return extras["dev"]
    names = {_name(each) for each in used}
    return [
        *(each.replace(">=", "==") for each in used),  # to pip 3 and 3.0.0 are the same version
        *(each for each in extras["dev"] if _name(each) not in names),
    ]


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


def find_python(version: str) -> str:
    """A Python of that version: on PATH, or in a folder of pyenv or uv."""
    for candidate in _candidates(version):
        command = [candidate, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        try:
            printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError):  # a shim of pyenv for a version that is not chosen, say
            continue
        if printed.strip() == version:
            return candidate
    raise NotHereError(f"there is no Python {version} with venv; install it so that python{version} is on PATH")


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    uv = Path.home() / ".local" / "share" / "uv" / "python"
    for folder in (*sorted(pyenv.glob(f"versions/{version}.*")), *sorted(uv.glob(f"cpython-{version}.*"))):
        yield str(folder / "bin" / "python3")


def make_environment(combination: Combination, folder: Path) -> Path:
    """The Python of a new environment with the project and the packages of a combination."""
    python = find_python(combination.python)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise NotHereError(
            f"it may need {_NEEDED_BYTES // 10**9} GB of disk, and {free // 10**9} GB are free; make room"
        )
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    command = [*install, "--editable", str(ROOT), *requirements(combination.packages)]
    done = run_bounded(command, _INSTALL_LIMIT_S, show=False)
    if done.code != 0:
        reasons = [line for line in done.output.splitlines() if line.startswith("ERROR")] or ["it took too long"]
        raise NotHereError(f"pip could not install it: {reasons[-1]}")
    return folder / "bin" / "python"


def versions_in(python: Path) -> dict[str, str]:
    """The versions of Python and of the packages that matter most."""
    program = (
        "import importlib.metadata as m, json, platform;"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: m.version(n) for n in {SHOWN!r}}}}}))"
    )
    return dict(json.loads(subprocess.run([python, "-c", program], capture_output=True, check=True).stdout))


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended: its exit code, `None` if it had to be stopped, and what it printed."""

    code: int | None
    output: str


def run_bounded(command: Sequence[str], limit_s: float, *, show: bool) -> Done:
    """Runs a command, and ends it with all that it started when its time is over or Ctrl-C comes."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    is_late = False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if show:
        print(output)
    return Done(None if is_late else process.returncode, output)


def run_tests(combination: Combination, python: Path, limit_s: float) -> Row:
    """Runs the tests in an environment."""
    versions = versions_in(python)
    since = time.monotonic()
    pytest = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    done = run_bounded([*pytest, *TESTS], limit_s, show=True)
    lasted_s = time.monotonic() - since
    if done.code is None:
        return Row(combination, versions, f"stopped after {limit_s / 60:g} minutes", passed=False, time_s=lasted_s)
    return Row(combination, versions, summary_of(done.output), passed=done.code == 0, time_s=lasted_s)


def summary_of(output: str) -> str:
    """How many tests passed and failed, from the last line of pytest."""
    lines = re.findall(r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s", output, re.MULTILINE)
    return lines[-1].strip() if lines else "pytest did not end with a summary"


def try_out(combination: Combination, limit_s: float, *, keep: bool) -> Row:
    """Makes the environment of a combination, runs the tests in it and removes it."""
    folder = _FOLDER / str(combination)
    try:
        return run_tests(combination, make_environment(combination, folder), limit_s)
    except NotHereError as error:
        return Row(combination, {}, f"not run: {error}", passed=False)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def table(rows: Sequence[Row]) -> str:
    """One line for each combination."""
    lines = [("python", "packages", *SHOWN, "time", "tests")]
    for row in rows:
        minutes, seconds = divmod(round(row.time_s), 60)
        lines.append(
            (
                row.versions.get("python", row.combination.python),
                row.combination.packages,
                *(row.versions.get(name, "-") for name in SHOWN),
                f"{minutes}:{seconds:02}" if row.time_s else "-",
                row.outcome,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """How many combinations did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [str(each) for each in COMBINATIONS]
    parser.add_argument("--only", choices=names, action="append", help="try this combination alone; may be repeated")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .venv-versions")
    parser.add_argument("--minutes", type=float, default=10, help="how long the tests of a combination may take")
    chosen = parser.parse_args(arguments)
    rows = []
    for combination in COMBINATIONS:
        if chosen.only is None or str(combination) in chosen.only:
            print(f"Python {combination.python} with the {combination.packages} packages", flush=True)
            rows.append(try_out(combination, chosen.minutes * 60, keep=chosen.keep))
    print(table(rows))
    return sum(not row.passed for row in rows)


if __name__ == "__main__":
    sys.exit(main())
