"""What the placement log says, as lines, records, tables and pictures."""

import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import DeviceTypeError
from stratagem.placement.log import PlacementLog
from stratagem.placement.log_layout import MOST_BOXES, arrange, heaviest
from tests.cluster import nursery

pytestmark = pytest.mark.usefixtures("gpus")

TASK = "/job:localhost/replica:0/task:0"


def test_lines_have_the_form_of_tensorflow(capsys: pytest.CaptureFixture[str]) -> None:
    sg.config.set_log_device_placement(True)
    assert sg.config.get_log_device_placement()
    products = []
    for name in ("/gpu:2", "/gpu:3"):
        with sg.device(name):
            a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
            products.append(torch.matmul(a, b))
    with sg.device("/cpu:0"):
        total = products[0] + products[1]
    sg.config.set_log_device_placement(False)
    torch.ones(2)
    assert total.item() == 22
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Device mapping:", f"{TASK}/device:GPU:0 -> device: 0, name: simulated GPU"]
    assert lines[5:] == [
        f"Const: {TASK}/device:GPU:2",
        f"Const_1: {TASK}/device:GPU:2",
        f"MatMul: {TASK}/device:GPU:2",
        f"Const_2: {TASK}/device:GPU:3",
        f"Const_3: {TASK}/device:GPU:3",
        f"MatMul_1: {TASK}/device:GPU:3",
        f"Add: {TASK}/device:CPU:0",
    ]


def make_log(num_steps: int = 1) -> PlacementLog:
    model = sg.place(nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 2)), {"0": "/gpu:0", "2": "/gpu:1"})
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.ones(8, 4)
    with sg.log_placement() as log:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
    return log


def test_record_has_operation_device_reason_copies_and_line() -> None:
    log = make_log()
    second = next(record for record in log if record.name == "Linear_1")
    assert (second.operation, second.requested, second.device) == ("Linear", None, "/device:GPU:1")
    assert second.why == "follows its parameters"
    assert second.inputs == ("Relu",)
    (copy,) = second.copies
    assert (copy.source, copy.target, copy.maker) == ("/device:GPU:0", "/device:GPU:1", "Relu")
    assert copy.num_bytes == second.num_bytes_copied == 8 * 256 * 4
    assert Path(second.file) == Path(__file__)
    assert "model(data).sum()" in Path(__file__).read_text().splitlines()[second.line - 1]


def test_record_says_what_a_scope_asked_for() -> None:
    with sg.log_placement() as log, sg.device("/gpu:1"):
        torch.ones(2)
    (record,) = log
    assert (record.requested, record.device, record.why, record.copies) == (
        "/device:GPU:1",
        "/device:GPU:1",
        "scope",
        (),
    )


def test_gradients_that_go_back_are_copies_too() -> None:
    record = next(record for record in make_log() if record.operation == "Gradient")
    assert record.name == "gradients/Linear_1"
    (copy,) = record.copies
    assert (copy.source, copy.target, copy.num_bytes) == ("/device:GPU:1", "/device:GPU:0", 8 * 256 * 4)


def test_log_ends_with_its_block_and_starts_names_anew() -> None:
    for _ in range(2):
        with sg.log_placement() as outer:
            torch.ones(2)
            with sg.log_placement() as inner:
                torch.ones(2)
        torch.ones(2)
        assert [record.name for record in outer] == ["Ones", "Ones_1"]
        assert [record.name for record in inner] == ["Ones"]


def test_tables_and_json_have_all_records() -> None:
    log = make_log()
    lines = log.table().splitlines()
    assert len([line for line in lines[2:] if "test_log.py" in line]) >= len(log)
    assert lines[0].split() == ["operation", "device", "asked", "for", "why", "copied", "from", "line"]
    assert lines[lines.index("heaviest copies") + 3].split()[:5] == ["8", "KiB", "GPU:0", "GPU:1", "Relu"]
    records = json.loads(log.to_json())
    assert [each["name"] for each in records] == [each.name for each in log]
    assert sum(each["num_bytes_copied"] for each in records) == 2 * 8 * 256 * 4 + 8 * 4 * 4


def test_heaviest_copies_come_first_and_repeated_ones_together() -> None:
    first, second, *_ = heaviest(make_log(num_steps=3).records)
    assert (first.maker, first.taker, first.times, first.num_bytes) == ("Relu", "Linear", 3, 3 * 8 * 256 * 4)
    assert second.taker == "Gradient"


def test_picture_joins_what_is_alike_and_has_a_column_for_each_device() -> None:
    log = make_log(num_steps=3)
    assert len(log) > MOST_BOXES
    picture = arrange(log.records)
    assert picture.devices == ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]
    assert len(picture.boxes) <= MOST_BOXES
    heavy = picture.arrows[0]
    assert (heavy.tail.title, heavy.tail.times, heavy.head.title) == ("Relu", 3, "Linear")
    assert heavy.head.row > heavy.tail.row
    assert len({(box.column, box.row) for box in picture.boxes}) == len(picture.boxes)


def test_picture_leaves_out_what_does_not_fit() -> None:
    with sg.log_placement() as log:
        x = torch.ones(2)
        for name in (name for name in dir(torch.Tensor) if name in _UNARY):
            getattr(x, name)()
    assert len(log) > MOST_BOXES
    picture = arrange(log.records)
    assert len(picture.boxes) == MOST_BOXES
    assert picture.num_hidden == len(log) - MOST_BOXES


_UNARY = set(
    "abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor "
    "frac i0 isfinite isinf isnan lgamma log log10 log1p log2 logit neg positive rad2deg reciprocal round rsqrt sgn "
    "sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc sum mean prod std var".split()
)


class Page(HTMLParser):
    """Counts tags; fails on text that was not escaped."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_log_is_saved_as_page_picture_json_and_text(tmp_path: Path) -> None:
    log = make_log()
    page = Page()
    text = log.save(tmp_path / "placement.html").read_text()
    page.feed(text)
    picture = arrange(log.records)
    assert page.tags.count("rect") == len(picture.boxes) > 20
    assert page.tags.count("circle") == 3  # the copies
    assert text.index("8 KiB") < text.index("<svg") < text.index("<details>")
    assert "src=" not in text
    image = log.save(tmp_path / "placement.png")
    assert image.read_bytes().startswith(b"\x89PNG")
    assert json.loads(log.save(tmp_path / "placement.json").read_text()) == json.loads(log.to_json())
    assert log.save(str(tmp_path / "placement.txt")).read_text() == log.table() + "\n"
    with pytest.raises(DeviceTypeError, match="a placement log is saved to a path, got NoneType None"):
        log.save(None)  # type: ignore[arg-type]
    with pytest.raises(DeviceTypeError, match=r"\.html, \.png, \.json or \.txt, got 'placement.pdf'"):
        log.save("placement.pdf")


def test_empty_log_can_be_shown_too(tmp_path: Path) -> None:
    with sg.log_placement() as log:
        pass
    assert len(log) == 0
    assert log.table().startswith("operation")
    assert "Nothing was copied" in log.save(tmp_path / "empty.html").read_text()
    assert log.save(tmp_path / "empty.png").stat().st_size > 0


def test_names_of_the_program_are_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("cost in $", "$\\frac{1$", "red \x1b[31m", "half \ud800", "<b>")
    with sg.Graph() as graph:
        made = [sg.constant(1.0, name=name) for name in names]
    config = sg.SessionConfig(log_device_placement=True)
    with sg.Session(graph, config=config) as session, sg.log_placement() as log:
        session.run(made)
    shown = ("cost in $", "$\\frac{1$", r"red \x1b[31m", r"half \ud800", "<b>")
    printed = capsys.readouterr().out
    for text in (log.table(), log.save(tmp_path / "log.txt").read_text(), printed):
        assert "\x1b" not in text
        assert all(name in text for name in shown)
    assert r"half \ud800" in log.save(tmp_path / "log.html").read_text()
    assert log.save(tmp_path / "log.png").stat().st_size > 0
    assert [record["name"] for record in json.loads(log.save(tmp_path / "log.json").read_text())] == list(names)


_IN_CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in (
    "import torch, stratagem as sg",
    "with sg.log_placement() as log:\\n    torch.ones(2)\\nprint([record.where for record in log])",
    "with sg.Graph() as graph:\\n    c = sg.constant([1.0])\\nprint(graph.nodes[0].line)",
):
    shell.run_cell(cell, store_history=True).raise_error()
"""


@pytest.mark.slow
def test_line_of_a_cell_is_named_as_notebooks_name_it(forked_tasks: None, tmp_path: Path) -> None:
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    done = nursery.run(["-c", _IN_CELLS], 50, environment)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ["['In[2]:2']", "In[3]:2"], "")
