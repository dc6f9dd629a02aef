"""Pages of the API reference: a block ```{api} funcrl.module``` becomes entries from docstrings.

The block may name the entries that it holds; else it holds all others of the module. Each entry is
written twice from the same parts: as a directive of Sphinx, and as plain Markdown for the twin.
"""

import ast
import functools
import inspect
import re

from described import Entry, entry_of
from docstrings import arguments_in, arguments_of, outside_code, parts_of
from docutils import nodes
from names import (
    ROOT,
    Public,
    aliases,
    entries,
    find,
    public_modules,
    public_names,
    source_of,
)
from sphinx import addnodes

BLOCK = re.compile(r"^```\{api\} (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUALIFIED = re.compile(r"(?<![\w.])funcrl\.(?:\w+\.)?(?=\w)")
PAGE = re.compile(r"\b(docs/([\w-]+\.md))")
MENTION = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(\(\))?`(?!`)")


def linked(text: str, entry: Entry) -> str:
    """Return Markdown in which public names are links, for Sphinx."""

    def link(match: re.Match[str]) -> str:
        if match[1] in public_modules():
            return f"{{py:mod}}`{match[1]}`"
        public = find(match[1], entry.home)
        if public is None or (public.module, public.name) == (entry.module, entry.name):
            return match[0]
        return f"{{py:obj}}`{match[1]}{match[2] or ''} <{public.full}>`"

    return outside_code(MENTION, link, outside_code(PAGE, r"[\1](../\2)", text))


def body_of(entry: Entry) -> list[str]:
    """Return an entry's docstring in Markdown, without its heading."""
    body = []
    for part in parts_of(entry.docstring):
        if part.kind == "Args":
            pairs = [each for pair in arguments_of(part.text) for each in options_of(pair, entry)]
            fields = {each.name for each in entry.members if each.kind == "attribute"}
            lines = [f"- `{name}`: {words}" for name, words in pairs if name not in fields]
            body += ["\n".join(lines)] if lines else []
        else:
            body.append(f"Returns {part.text}" if part.kind == "Returns" else part.text)
    return body


def options_of(argument: tuple[str, str], entry: Entry) -> list[tuple[str, str]]:
    """Return an argument, or those that `**argument: Unpack[Options]` stands for."""
    options = re.search(rf"\*\*{argument[0]}: Unpack\[(\w+)\]", entry.signature)
    if not options:
        return [argument]
    return arguments_in(ast.get_docstring(source_of(entry.home).nodes[options[1]]))


def as_directive(entry: Entry, depth: int = 0) -> str:
    """Return an entry as a directive of Sphinx, its members within."""
    fence = "`" * (6 - depth)
    options = dict(entry.options)
    if entry.module:
        options["module"] = entry.module
    if depth:
        options["no-contents-entry"] = ""
    body = [linked(text, entry) for text in body_of(entry)]
    body += [as_directive(each, depth + 1) for each in entry.members]
    if entry.module:
        body.append(f"```{{container}} defined-in\n{file_of(entry.home)}\n```")
    head = [f"{fence}{{py:{entry.kind}}} {entry.name}{entry.signature}"]
    head += [f":{name}: {value}".rstrip() for name, value in options.items()]
    return "\n".join([*head, "", "\n\n".join(body), fence])


def as_markdown(entry: Entry) -> str:
    """Return an entry as plain Markdown."""
    shown = f"{entry.module}.{entry.name}".removeprefix(".") + QUALIFIED.sub("", entry.signature)
    shown += f": {QUALIFIED.sub('', entry.options['type'])}" if "type" in entry.options else ""
    shown += f" = {entry.options['value']}" if "value" in entry.options else ""
    body = body_of(entry)
    if not entry.module:
        return f"- `{shown}`" + (f": {' '.join(body[0].split())}" if body else "")
    if entry.members:
        body.append("\n".join(as_markdown(each) for each in entry.members))
    heading = [f"### {entry.module}.{entry.name}", f"```python\n{shown}\n```"]
    return "\n\n".join([*heading, *body, f"Defined in `{file_of(entry.home)}`."])


def file_of(module: str) -> str:
    """Return a module's file from the root of the repository."""
    return str(inspect.getfile(__import__(module, fromlist=["_"]))).removeprefix(f"{ROOT}/")


def expand(text: str, for_sphinx: bool) -> str:
    """Return a page whose blocks of the reference are written out."""
    named = {f"{match[1]}.{name}" for match in BLOCK.finditer(text) for name in match[2].split()}

    def block(match: re.Match[str]) -> str:
        module, names = match[1], match[2].split()
        chosen = [entries_by_name()[f"{module}.{name}"] for name in names] or [
            public
            for full, public in entries_by_name().items()
            if public.module == module and full not in named
        ]
        show = as_directive if for_sphinx else as_markdown
        pieces = [] if names else [heading_of(module, for_sphinx)]
        return "\n\n".join([*pieces, *(show(entry_of(each)) for each in chosen)])

    return BLOCK.sub(block, text)


def heading_of(module: str, for_sphinx: bool) -> str:
    """Return what begins the entries of a module: its docstring."""
    value = public_modules()[module]
    entry = Entry("module", module, "", "", {}, value.__doc__ or "", value.__name__)
    words = "\n\n".join(part.text for part in parts_of(entry.docstring))
    if for_sphinx:
        return f"```{{py:module}} {module}\n```\n\n{linked(words, entry)}"
    return words


@functools.cache
def entries_by_name() -> dict[str, Public]:
    """Return what is described, by the name that a user writes."""
    return {public.full: public for public in entries().values()}


def expand_source(app, docname: str, source: list[str]) -> None:
    """Write out the blocks of a page before Sphinx reads it."""
    del app, docname
    source[0] = expand(source[0], for_sphinx=True)


def link_names(app, doctree: nodes.document) -> None:
    """Let each public name that a page writes as code lead to its entry."""
    del app
    for node in list(doctree.findall(nodes.literal)):
        name = f"funcrl.{node.astext().removesuffix('()').removeprefix('funcrl.')}"
        known = name in public_names() or name in public_modules()
        written = "." in node.astext() and not isinstance(node.parent, addnodes.pending_xref)
        if known and written and not isinstance(node.parent, nodes.reference | nodes.title):
            options = {"refdomain": "py", "reftype": "obj", "reftarget": name}
            link = addnodes.pending_xref("", node.deepcopy(), **options)
            node.replace_self(link)


def note_aliases(app, env) -> None:
    """Let the other names of an object lead to its entry."""
    del app
    objects = env.domains.python_domain.objects
    for alias, full in aliases().items():
        if full in objects:
            objects[alias] = objects[full]._replace(aliased=True)


def setup(app) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", expand_source)
    app.connect("doctree-read", link_names)
    app.connect("env-updated", note_aliases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
