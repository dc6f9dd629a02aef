"""A twin in Markdown of every page, and the site in Markdown for language models: llms.txt.

page.html has page.md beside it. llms.txt lists the twins as llmstxt.org proposes, in the sections
and with the descriptions of the front page; llms-full.txt holds all of them.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import reference
import scripts

# "* [Title](page.md): what it is about"
LINE = re.compile(r"^[*-] \[([^\]]+)\]\(([^):#]+)\.(?:md|ipynb)\): (.+(?:\n  \S.*)*)", re.MULTILINE)
SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
DIRECTIVE = re.compile(r"^(`{3,})\{(?:toctree|div|raw)\}.*?^\1\n?", re.DOTALL | re.MULTILINE)
ATTRIBUTES = re.compile(r"^\{[.#][^}]*\}\n", re.MULTILINE)
IMAGE = re.compile(r"(!\[[^\]]*\]\()([^):]+)\)")


def notebook_text(text: str) -> str:
    """Return a notebook in Markdown, with what its cells printed but without its figures."""
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            pieces.append(source)
            continue
        pieces.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            shown = "".join(output.get("text") or data.get("text/plain", ""))
            if shown and "image/png" not in data:
                pieces.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(pieces)


def twin_of(env, docname: str) -> str:
    """Return a page in plain Markdown."""
    path = Path(env.doc2path(docname))
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = notebook_text(text)
    text = reference.expand(scripts.expand(text, docname), for_sphinx=False)
    text = ATTRIBUTES.sub("", DIRECTIVE.sub("", text)).replace(".ipynb)", ".md)")

    def image(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(docname), match[2]))
        return f"{match[1]}{'../' * docname.count('/')}_images/{env.images[file][1]})"

    return IMAGE.sub(image, text).strip() + "\n"


def listed(env, docname: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each section of a page with the title, name and description of pages listed there."""
    _, *pieces = SECTION.split(Path(env.doc2path(docname)).read_text())
    for heading, text in zip(pieces[::2], pieces[1::2], strict=True):
        lines = [
            (title, posixpath.join(posixpath.dirname(docname), page), " ".join(words.split()))
            for title, page, words in LINE.findall(text)
        ]
        if lines:
            yield heading, lines


def index_of(env) -> str:
    """Return llms.txt: a title, a summary, and a line for each page."""
    front = Path(env.doc2path("index")).read_text().split("\n\n")
    pieces = [front[0], f"> {' '.join(front[1].split())}"]
    reference_pages = [("API reference", lines) for _, lines in listed(env, "api/index")]
    for heading, lines in [*listed(env, "index"), *reference_pages]:
        pieces.append(f"## {heading}")
        pieces.append("\n".join(f"- [{title}]({page}.md): {words}" for title, page, words in lines))
    return "\n\n".join(pieces) + "\n"


def descriptions(env) -> dict[str, str]:
    """Return what the front page and the one of the reference say of each page."""
    sections = [*listed(env, "index"), *listed(env, "api/index")]
    return {page: words for _, lines in sections for _, page, words in lines}


def write_twins(app, exception: Exception | None) -> None:
    """Write a twin beside each page, llms.txt and llms-full.txt."""
    if exception or app.builder.name != "html":
        return
    out = Path(app.outdir)
    twins = {docname: twin_of(app.env, docname) for docname in sorted(app.env.found_docs)}
    for docname, text in twins.items():
        (out / f"{docname}.md").write_text(text)
    (out / "llms.txt").write_text(index_of(app.env))
    order = dict.fromkeys(["index", *descriptions(app.env), *twins])
    pieces = [f"<!-- {docname}.md -->\n\n{twins[docname]}" for docname in order]
    (out / "llms-full.txt").write_text("\n".join(pieces))


def describe_page(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Give a page's head its description and the address of its twin."""
    del templatename, doctree
    if pagename in app.env.found_docs:
        words = descriptions(app.env).get(pagename, "")
        plain = re.sub(r"[`*$]|\[([^\]]*)\]\([^)]*\)", r"\1", words).replace('"', "&quot;")
        twin = context["pathto"](f"{pagename}.md", 1)
        context["twin"] = twin
        context["metatags"] += f'\n<link rel="alternate" type="text/markdown" href="{twin}">'
        context["metatags"] += f'\n<meta name="description" content="{plain}">' if plain else ""


def setup(app) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("html-page-context", describe_page)
    app.connect("build-finished", write_twins)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
