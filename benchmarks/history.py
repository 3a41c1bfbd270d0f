"""Keeps the ratios of each version, and says which have fallen since the last one.

`record` takes the ratios that benchmarks have written to `results/` into one file for the version of this tree, in
`history/`; what was not measured again stays as it was. `compare` holds what is in `results/` against the last version.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stratagem
from benchmarks.measure import RESULTS
from benchmarks.tables import show

HISTORY = Path(__file__).parent / "history"

Ratios = dict[str, dict[str, dict[str, Any]]]
"""By benchmark and what was measured: the value, the least and the most of its rounds, and whether less is better."""


def measured(folder: Path = RESULTS) -> Ratios:
    """The ratios that benchmarks have written."""
    found: Ratios = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        targets = content.get("targets", []) if isinstance(content, dict) else content
        ratios = {
            each["what"]: {key: each[key] for key in ("value", "spread", "at_most")}
            for each in targets
            if isinstance(each, dict) and each.get("value") is not None
        }
        if ratios:
            found[path.stem] = ratios
    return found


def newest(folder: Path = HISTORY) -> Ratios:
    """The ratios of the last version; nothing if there is none."""
    files = _files(folder)
    return json.loads(files[-1].read_text()) if files else {}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])


def fell(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a ratio is worse than before in every round: what rounds share is noise."""
    (least, most), (low, high) = (each["spread"] or (each["value"], each["value"]) for each in (before, now))
    return bool(low > most if now["at_most"] else high < least)


def rows(before: Ratios, now: Ratios) -> list[list[str]]:
    """A line for each ratio that both have, the fallen ones first."""
    both = [
        (name, what, before[name][what], ratio)
        for name, ratios in now.items()
        for what, ratio in ratios.items()
        if what in before.get(name, {})
    ]
    both.sort(key=lambda each: not fell(each[2], each[3]))
    return [
        [f"{name}: {what}", *(_cell(each) for each in (then, ratio)), "NO" if fell(then, ratio) else "yes"]
        for name, what, then, ratio in both
    ]


def _cell(ratio: Mapping[str, Any]) -> str:
    spread = ratio["spread"]
    return f"{ratio['value']:.2f}" + (f" ({spread[0]:.2f}..{spread[1]:.2f})" if spread else "")


def record(version: str, folder: Path = HISTORY, results: Path = RESULTS) -> Path:
    """Takes what was measured into the file of a version."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{version}.json"
    kept: Ratios = json.loads(path.read_text()) if path.exists() else {}
    for name, ratios in measured(results).items():
        kept[name] = kept.get(name, {}) | ratios
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    return path


def main() -> None:
    """Records, or compares with the newest file in `history/`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("--version", default=stratagem.__version__, help="whose file is written")
    options = parser.parse_args()
    if options.what == "record":
        print(f"ratios of version {options.version} in {record(options.version)}")
        return
    files = _files(HISTORY)
    if not files or not measured():
        raise SystemExit("there is nothing to compare: `make bench` measures")
    found = rows(newest(), measured())
    show(f"ratios of this tree against {files[-1].stem}", ("ratio", "then", "now", "holds"), found)
    fallen = sum(row[-1] == "NO" for row in found)
    print(f"{fallen} of {len(found)} ratios fell in every round")
    raise SystemExit(fallen > 0)


if __name__ == "__main__":
    main()
