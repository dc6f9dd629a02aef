"""Pages that are HTML already, such as the reports of runs: copied as they are, linked as pages."""

import re
import shutil
from pathlib import Path

LINK = re.compile(r"\]\((?!https?:)([\w./-]+\.html)\)")


def link_reports(app, docname: str, source: list[str]) -> None:
    """Let links to them stay as they are written; Sphinx would offer the files as downloads."""
    del app, docname
    source[0] = LINK.sub(r"](\1){.external}", source[0])


def copy_reports(app, exception: Exception | None) -> None:
    """Copy them to the place in the site that they have among the pages."""
    if exception or app.builder.name != "html":
        return
    for path in Path(app.srcdir).glob("[!_]*/**/*.html"):
        target = Path(app.outdir) / path.relative_to(app.srcdir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def setup(app) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", link_reports)
    app.connect("build-finished", copy_reports)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
