"""Builds the site of these documents, strictly: a warning or a dead local link is a failure.

Nothing is written into the source: the pages are gathered in a folder of their own, with the notebooks of `examples/`,
and Sphinx makes the site of that.

python docs/make_site.py [--output build/docs] [--serve [PORT]]
"""

import argparse
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LEFT_OUT = shutil.ignore_patterns("__pycache__", "__init__.py", "make_site.py", "draw_pictures.py")
FILES = ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE")
INCLUDED = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "examples/data/README.md": "example_data.md",
}
FOLDERS = ("src", "tests", "examples", "benchmarks")


class Anchors(HTMLParser):
    """What a page links to, and what in it can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the links and names of one element."""
        for name, value in attrs:
            if value is not None and name in ("id", "name"):
                self.names.add(value)
            elif value is not None and name in ("href", "src"):
                self.links.append(value)


def gather(tree: Path) -> Path:
    """Puts the pages where Sphinx reads them: beside links to what they refer to, and with the notebooks."""
    shutil.rmtree(tree, ignore_errors=True)
    pages = tree / "docs"
    shutil.copytree(DOCS, pages, ignore=LEFT_OUT)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    for page in pages.rglob("*.md"):
        page.write_text(with_links_to_pages(page.read_text(), page.relative_to(pages).parent))
    for name, page in INCLUDED.items():
        (pages / page).write_text(with_links_from_docs(ROOT / name))
    for name in FOLDERS:
        (tree / name).symlink_to(ROOT / name)
    (pages / "notebooks").mkdir()
    for notebook in sorted((ROOT / "examples").rglob("[!.]*.ipynb")):
        content = json.loads(re.sub(r"\]\(\.\./", "](../../examples/", notebook.read_text()))
        content["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}  # for lines with !
        (pages / "notebooks" / notebook.name).write_text(json.dumps(content))
    return pages


def with_links_from_docs(file: Path) -> str:
    """The text of a file elsewhere, with links as a page of `docs/` has them."""

    def moved(link: re.Match[str]) -> str:
        path = (file.parent / link[1]).relative_to(ROOT)
        if str(path) in INCLUDED:
            return f"]({INCLUDED[str(path)]}"
        if path.parts[:2] == ("examples", "notebooks"):
            inside = Path("notebooks", *path.parts[2:])
            return f"]({inside}" if inside.suffix else "](notebooks.md"
        return f"]({path.relative_to('docs')}" if path.parts[0] == "docs" else f"](../{path}"

    return re.sub(r"\]\(([^)#:]+)(?=[)#])", moved, file.read_text())


def with_links_to_pages(text: str, folder: Path) -> str:
    """The text of a page in a folder of `docs/`, with links to files elsewhere as links to the site's pages of them."""
    up = "../" * len(folder.parts)
    for name, page in INCLUDED.items():
        text = re.sub(rf"\]\({re.escape(up)}\.\./{re.escape(name)}(?=[)#])", f"]({up}{page}", text)
    return text


def dead_links(site: Path) -> list[str]:
    """The links of a site that lead to no file of it, or to no place in that file."""
    pages: dict[Path, Anchors] = {}
    for file in sorted(site.rglob("*.html")):
        if "_static" in file.parts:  # templates of the theme
            continue
        pages[file] = Anchors()
        pages[file].feed(file.read_text())
    return [
        f"{file.relative_to(site)}: {link}"
        for file, page in pages.items()
        for link in page.links
        if not _leads_somewhere(file, link, pages)
    ]


def _leads_somewhere(file: Path, link: str, pages: dict[Path, Anchors]) -> bool:
    address, anchor = urldefrag(link)
    if urlsplit(link).scheme or link.startswith("//"):
        return True  # another site
    target = (file.parent / unquote(urlsplit(address).path)).resolve() if address else file
    if target not in pages or not anchor:
        return target.is_file()
    return unquote(anchor) in pages[target].names


def build(output: Path) -> int:
    """Makes the site, and says what is wrong with it."""
    pages = gather(output / "tree")
    site = output / "html"
    options = ["-b", "html", "-W", "--keep-going", "-n", "-q", "-j", "auto", "-d", output / "doctrees"]
    shutil.rmtree(site, ignore_errors=True)
    if code := subprocess.run([sys.executable, "-m", "sphinx", *options, pages, site], check=False).returncode:
        return code
    for dead in (found := dead_links(site)):
        print(f"dead link: {dead}", file=sys.stderr)
    print(f"the site is in {site}")
    return 1 if found else 0


def serve(site: Path, port: int) -> None:
    """Shows the site to browsers of this machine until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port} until Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main() -> None:
    """Builds, and serves where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "docs", help="where everything goes")
    parser.add_argument("--serve", type=int, nargs="?", const=8000, metavar="PORT", help="show the site afterwards")
    options = parser.parse_args()
    output = options.output.resolve()
    if code := build(output):
        sys.exit(code)
    if options.serve is not None:
        serve(output / "html", options.serve)


if __name__ == "__main__":
    main()
