"""Draws the pictures of the documents as SVG files: boxes, arrows and words, at fixed places.

A test holds that the files in `docs/images` are what this draws.

python docs/draw_pictures.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"

INK, GREY = "#1f2933", "#66707a"
WHITE, SAND, SKY, LEAF, ROSE = "#ffffff", "#fdf3dc", "#dceafa", "#def3e2", "#fbe0de"
LINE_HEIGHT = 18

Point = tuple[float, float]


@dataclass
class Drawing:
    """A picture under way."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, *lines: str, fill: str = WHITE) -> None:
        """A box with words in its middle; a first line with * in front is bold."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{INK}"/>'
        )
        self.words(x + width / 2, y + height / 2, *lines)

    def frame(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """A dashed border around what belongs together, with its name above."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" fill="none" '
            f'stroke="{GREY}" stroke-dasharray="5 4"/>'
        )
        self.words(x + 12, y - 9, label, anchor="start", color=GREY)

    def words(self, x: float, y: float, *lines: str, anchor: str = "middle", color: str = INK) -> None:
        """Lines of text around a height."""
        top = y - (len(lines) - 1) * LINE_HEIGHT / 2 + 4.5
        for number, line in enumerate(lines):
            weight = ' font-weight="bold"' if line.startswith("*") else ""
            self.parts.append(
                f'<text x="{x}" y="{top + number * LINE_HEIGHT}" text-anchor="{anchor}" fill="{color}"{weight}>'
                f"{escape(line.removeprefix('*'))}</text>"
            )

    def arrow(
        self, *points: Point, both: bool = False, dashed: bool = False, label: str = "", at: Point = (0, 0)
    ) -> None:
        """A line through points with a head at its end, or at both."""
        path = " ".join(f"{x},{y}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5" '
            f'marker-end="url(#head)"{start}{dashes}/>'
        )
        if label:
            self.words(*at, *label.split("\n"), color=GREY)

    def svg(self) -> str:
        """The text of the file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="Helvetica, Arial, sans-serif" font-size="14">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="{WHITE}"/>\n{body}\n</svg>\n'
        )


def choosing_a_strategy() -> Drawing:
    """Questions from top to bottom; an answer leads to the right, to a strategy."""
    drawing = Drawing(820, 560, "Which strategy to take")
    questions: Sequence[tuple[tuple[str, ...], tuple[str, ...], str]] = (
        (("Do you have one device,", "or look for a mistake?"), ("*OneDeviceStrategy", "the reference"), LEAF),
        (
            ("Is it one machine, and does a copy", "of the model fit on each device?"),
            ("*MirroredStrategy", "a copy of the variables on each device"),
            LEAF,
        ),
        (
            ("Is it one machine, but variables and", "optimizer state are too large?"),
            ("*CentralStorageStrategy", "variables once, in memory of the host"),
            LEAF,
        ),
        (
            ("Are the machines equally fast,", "and is the network fast?"),
            ("*MultiWorkerMirroredStrategy", "equal to one device, step by step"),
            SKY,
        ),
        (("Is it only the network", "that is slow?"), ("*LocalSGDStrategy", "agrees every 100 steps or so"), SKY),
    )
    for number, (question, strategy, fill) in enumerate(questions):
        y = 20 + number * 95
        drawing.box(30, y, 290, 60, *question, fill=SAND)
        drawing.arrow((320, y + 30), (470, y + 30), label="yes", at=(393, y + 18))
        drawing.box(470, y, 320, 60, *strategy, fill=fill)
        drawing.arrow((175, y + 60), (175, y + 95), label="no", at=(195, y + 76))
    drawing.box(30, 495, 290, 50, "Machines are uneven, or come and go.", fill=SAND)
    drawing.arrow((320, 520), (470, 520))
    drawing.box(470, 490, 320, 60, "*ParameterServerStrategy", "nobody waits for the slowest", fill=ROSE)
    return drawing


def a_step() -> Drawing:
    """One call of `strategy.run` on three devices of one machine."""
    drawing = Drawing(860, 470, "A step on one machine")
    drawing.box(330, 15, 200, 44, "*global batch of 96 rows", fill=SAND)
    for number in range(3):
        x = 40 + number * 275
        who = ("*replica 0", "your program") if number == 0 else (f"*replica {number}", "a child process")
        drawing.arrow((430, 59), (x + 115, 100), label="32 rows" if number == 1 else "", at=(465, 84))
        drawing.box(x, 100, 230, 46, *who, fill=SKY)
        drawing.arrow((x + 115, 146), (x + 115, 166))
        drawing.box(x, 166, 230, 40, "loss.backward(): own gradients")
        drawing.arrow((x + 115, 206), (x + 115, 236))
        drawing.arrow((x + 115, 286), (x + 115, 316))
        drawing.box(x, 316, 230, 46, "optimizer.step():", "updates its third of the weights")
        drawing.arrow((x + 115, 362), (x + 115, 400))
    drawing.box(
        40,
        236,
        780,
        50,
        "*shared memory: sum of the gradients, weighted by rows",
        "in windows of 8 MB; each replica sums its own part",
        fill=LEAF,
    )
    drawing.box(40, 400, 780, 50, "*shared memory: weights", "every replica reads the same pages", fill=LEAF)
    return drawing


def several_machines() -> Drawing:
    """Two machines with two replicas each."""
    drawing = Drawing(860, 420, "Several machines")
    for number, x in enumerate((30, 470)):
        drawing.frame(x, 40, 360, 250, f"machine {number}: the same program, task worker/{number}")
        drawing.box(x + 20, 60, 150, 60, "*replica 0", "main program", fill=SKY)
        drawing.box(x + 190, 60, 150, 60, "*replica 1", "child process", fill=SKY)
        drawing.arrow((x + 95, 120), (x + 95, 160))
        drawing.arrow((x + 265, 120), (x + 265, 160))
        drawing.box(x + 20, 160, 320, 46, "*1. sum inside the machine", "shared memory", fill=LEAF)
        drawing.arrow((x + 180, 206), (x + 180, 236))
        drawing.box(x + 20, 236, 320, 40, "3. update, split over the replicas")
    drawing.arrow((370, 183), (490, 183), both=True)
    drawing.words(430, 148, "2. once per", "machine", color=GREY)
    drawing.box(
        250,
        330,
        360,
        70,
        "*membership, kept by worker/0",
        "who is there, signs of life, the store",
        "control messages are authenticated",
        fill=SAND,
    )
    drawing.arrow((210, 290), (300, 330), both=True, dashed=True)
    drawing.arrow((650, 290), (560, 330), both=True, dashed=True)
    return drawing


def parameter_server() -> Drawing:
    """Two servers and three workers of different speed."""
    drawing = Drawing(860, 400, "Parameter servers")
    drawing.box(120, 20, 280, 70, "*ps/0", "weights and optimizer state", "of one half of the variables", fill=LEAF)
    drawing.box(460, 20, 280, 70, "*ps/1", "weights and optimizer state", "of the other half", fill=LEAF)
    speeds = ("fast", "fast", "three times slower")
    for number, speed in enumerate(speeds):
        x = 40 + number * 270
        drawing.box(
            x, 220, 240, 70, f"*worker/{number}, {speed}", "pull, compute, push,", "and on without waiting", fill=SKY
        )
        drawing.arrow((x + 90, 220), (230 + 30 * number, 90), both=True)
        drawing.arrow((x + 150, 220), (570 + 30 * number, 90), both=True)
    drawing.words(60, 150, "push gradients,", "pull values", color=GREY, anchor="start")
    drawing.box(
        *(40, 320, 780, 60),
        "*staleness: how many pushes of others came between a worker's pull and its push",
        "Async(): any · BoundedStaleness(k): at most k · Synchronous(backup_workers=b): none, the slowest b dropped",
        fill=SAND,
    )
    return drawing


def placement() -> Drawing:
    """The way of one operation from the program to a device and back."""
    drawing = Drawing(860, 350, "Placement")
    drawing.box(20, 30, 260, 60, 'with sg.device("/gpu:1"):', "    y = x @ w", fill=SAND)
    drawing.arrow((280, 60), (330, 60))
    drawing.box(
        330,
        20,
        240,
        80,
        "*where does it run?",
        "1. what the scopes ask for",
        "2. else where its parameters are",
        "3. else where its inputs are",
    )
    drawing.arrow((570, 60), (620, 60))
    drawing.box(620, 30, 220, 60, "*is it there?", "no: error with what exists,", "or the nearest (soft)")
    drawing.arrow((730, 90), (730, 150), label="yes", at=(750, 120))
    drawing.box(620, 150, 220, 60, "*copy inputs from elsewhere", "above autograd", fill=LEAF)
    drawing.arrow((620, 180), (570, 180))
    drawing.box(330, 150, 240, 60, "*run it on /gpu:1", "and mark the result", fill=SKY)
    drawing.arrow((330, 180), (280, 180))
    drawing.box(
        20, 150, 260, 60, "*write it down", "operation, asked, actual, why,", "bytes copied, file and line", fill=SAND
    )
    drawing.arrow((450, 260), (450, 210), dashed=True)
    drawing.box(230, 260, 440, 60, "*backward()", "gradients flow back through the copies to where w is", fill=LEAF)
    return drawing


def failures() -> Drawing:
    """From a fault to what the program sees."""
    drawing = Drawing(860, 430, "Failures")
    rows = (
        ("a replica raises an exception", "its answer", "the exception, with its own traceback;\nthe strategy goes on"),
        (
            "a replica dies",
            "the end of its process, at once",
            "ReplicaDiedError; weights of the last\nwhole step; all children end",
        ),
        ("a replica stops", "no progress for stall_timeout_s", "ReplicaStalledError, with the stacks"),
        (
            "a task dies",
            "the end of its connection, at once",
            "TaskLostError in all others;\n--max-restarts starts them again",
        ),
        (
            "a machine or its network is gone",
            "no sign of life for 4 s",
            "TaskLostError; the task is fenced\nand does not come back unnoticed",
        ),
    )
    for x, head in ((20, "what happens"), (300, "how it is noticed"), (580, "what the program sees")):
        drawing.words(x + 120, 22, "*" + head)
    for number, (fault, sign, seen) in enumerate(rows):
        y = 42 + number * 76
        drawing.box(20, y, 240, 58, fault, fill=ROSE)
        drawing.arrow((260, y + 29), (300, y + 29))
        drawing.box(300, y, 240, 58, sign, fill=SAND)
        drawing.arrow((540, y + 29), (570, y + 29))
        drawing.box(570, y, 275, 58, *seen.split("\n"), fill=LEAF)
    return drawing


def security() -> Drawing:
    """What crosses which border, and what protects it."""
    drawing = Drawing(860, 420, "Security")
    drawing.frame(30, 40, 330, 210, "machine 0, one user")
    drawing.box(50, 60, 290, 44, "*main program", fill=SKY)
    drawing.arrow((110, 104), (110, 150), both=True, label="inherited pipe,\nmemory without a name", at=(220, 127))
    drawing.box(50, 150, 290, 44, "*replicas: child processes", fill=SKY)
    drawing.words(195, 222, "no port is opened; objects may travel", color=GREY)
    drawing.frame(500, 40, 330, 210, "machine 1, the same token file (0600)")
    drawing.box(520, 60, 290, 44, "*another task", "listens on its own address only", fill=SKY)
    drawing.box(520, 120, 290, 44, "*parameter server", fill=SKY)
    drawing.box(520, 180, 290, 44, "*session's task", "known operations only", fill=SKY)
    drawing.arrow((340, 76), (520, 76), both=True, label="HMAC by the token", at=(430, 62))
    drawing.arrow((340, 92), (430, 142), (520, 142), both=True, label="AES-256-GCM", at=(456, 128))
    drawing.arrow((340, 180), (430, 202), (520, 202), both=True, label="HMAC", at=(475, 190))
    drawing.box(
        *(30, 285, 800, 110),
        "*nothing that comes from a network is unpickled or executed",
        "Both sides prove that they have the token before anything with a length or a meaning is read.",
        "Messages are JSON with fixed fields, or bytes whose size the receiver knows already.",
        "Gradients between workers are not encrypted: use a private network.",
        fill=SAND,
    )
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "choosing_a_strategy": choosing_a_strategy,
    "a_step": a_step,
    "several_machines": several_machines,
    "parameter_server_tasks": parameter_server,
    "placement": placement,
    "failures": failures,
    "security": security,
}


def main() -> None:
    """Writes all of them."""
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
