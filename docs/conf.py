"""How Sphinx makes the site; `make docs` calls it through `make_site.py`."""

import os
import subprocess
import sys
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import stratagem

os.environ.setdefault("KERAS_BACKEND", "torch")

project = "stratagem"
author = "the authors of stratagem"
copyright = author
version = release = stratagem.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_templates", "**/.ipynb_checkpoints"]
templates_path = ["_templates"]
suppress_warnings = ["toc.empty_glob"]  # guides and notebooks may be few

# Markdown and notebooks. Notebooks keep their outputs in their files.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True

# The reference. Types stay in the signatures; docstrings have the form of Google's.
autosummary_generate = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
default_role = "py:obj"  # names in docstrings stand between single backquotes
# Names of Python, torch, Keras and private modules have no page here. Links between pages are checked all the same.
nitpick_ignore_regex = [(r"py:.*", r".*")]

html_theme = "pydata_sphinx_theme"
html_title = "stratagem"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options: dict[str, Any] = {
    "logo": {"text": "stratagem"},
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["license"],
    "footer_end": [],
}
html_sidebars = {"index": []}
copybutton_exclude = ".linenos, .gp, .go"


class CommandOutput(Directive):
    """What a command of stratagem prints, as it is when the site is made: `{command-output} run --help`."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The output, as a block of text."""
        arguments = self.arguments[0].split()
        plain = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
        program = "import sys; sys.argv[0] = 'stratagem'; from stratagem.cli import main; main()"
        command = [sys.executable, "-c", program, *arguments]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env=plain).stdout
        shown = "\n".join(line.rstrip() for line in printed.strip().splitlines())
        block = nodes.literal_block(shown, shown)
        block["language"] = "text"
        return [block]


# Members that other parts of the library call, and programs do not.
FOR_THE_LIBRARY = frozenset(
    [
        "call_in_children",
        "close_idle",
        "compare_data",
        "draw_alike",
        "handle",
        "held",
        "input_pipeline",
        "is_any",
        "is_in_step",
        "is_open",
        "nodes",
        "output_by_name",
        "part",
        "replicas_here",
        "require_call",
        "require_usable",
        "take",
        "tell_others",
        "thread",
        "token",
        "updates",
    ]
)


def leave_out(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Keeps what is for the library out of the pages of classes."""
    return True if what == "class" and name in FOR_THE_LIBRARY else None


def drop_of_modules(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Leaves out what a module says of itself: it is for people who change the library."""
    if what == "module":
        lines.clear()


def show_public_base(app: Sphinx, name: str, thing: type, options: Any, bases: list[Any]) -> None:
    """Puts the nearest class that users know in the place of bases that are the library's own."""
    public = {id(getattr(stratagem, each)) for each in stratagem.__all__}
    public |= {id(each) for each in vars(stratagem.errors).values()}

    def is_known(base: type) -> bool:
        return id(base) in public or not base.__module__.startswith("stratagem")

    if not all(isinstance(base, type) and is_known(base) for base in bases):
        bases[:] = [next(base for base in thing.__mro__[1:] if is_known(base))]


def shorten(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Leads `sg.NAME`, as docstrings write it, to `stratagem.NAME`."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("sg."):
        return None
    domain = env.get_domain("py")
    full = "stratagem." + target.removeprefix("sg.")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what is above."""
    app.add_directive("command-output", CommandOutput)
    app.connect("missing-reference", shorten)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-bases", show_public_base)
    app.connect("autodoc-process-docstring", drop_of_modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
