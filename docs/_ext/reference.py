"""Pages of the API reference: a block ```{api} funcrl.module``` becomes entries from docstrings.

The block may name the entries that it holds; else it holds all others of the module. Each entry is
written twice from the same parts: as a directive of Sphinx, and as plain Markdown for the twin.
"""

import ast
import functools
import inspect
import re
from typing import NamedTuple

from docstrings import arguments_in, arguments_of, outside_code, parts_of
from docutils import nodes
from names import (
    ROOT,
    Public,
    aliases,
    definitions,
    entries,
    find,
    is_enum,
    is_public,
    public_modules,
    public_names,
    source_of,
)
from sphinx import addnodes

BLOCK = re.compile(r"^```\{api\} (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUALIFIED = re.compile(r"(?<![\w.])funcrl\.(?:\w+\.)?(?=\w)")
PAGE = re.compile(r"\b(docs/([\w-]+\.md))")
MENTION = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(\(\))?`(?!`)")


class Entry(NamedTuple):
    """A public name, or a member of a public class."""

    kind: str  # a directive of Sphinx's domain for Python, without "py:"
    module: str  # as a user writes it; '' of a member
    name: str
    signature: str
    options: dict[str, str]
    docstring: str
    home: str  # the module that defines it
    members: tuple["Entry", ...] = ()


class Types(ast.NodeTransformer):
    """Replaces the public names in an annotation by their full ones, which Sphinx links."""

    def __init__(self, home: str) -> None:
        self.home = home

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return a name, in full where it is public."""
        public = find(node.id, self.home)
        return ast.parse(public.full, mode="eval").body if public else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Return a type that stands in quotes as one without."""
        if isinstance(node.value, str):  # "Tensor | Absent", a type that is named too early
            return self.visit(ast.parse(node.value, mode="eval").body)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Return a type with its arguments; those of Literal are no types."""
        plain = ast.unparse(node.value) in ("Literal", "Annotated")
        return node if plain else self.generic_visit(node)


def type_of(annotation: ast.expr, home: str) -> str:
    """Return an annotation as Sphinx reads it."""
    return ast.unparse(Types(home).visit(ast.parse(ast.unparse(annotation), mode="eval").body))


def signature_of(node: ast.FunctionDef, home: str, without_self: bool = False) -> str:
    """Return a function's arguments and what it returns, as its file has them."""
    copy = ast.parse(ast.unparse(node)).body[0]
    arguments = copy.args
    if without_self:
        del (arguments.posonlyargs or arguments.args)[0]
    rest = [each for each in (arguments.vararg, arguments.kwarg) if each]
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest]:
        if each.annotation:
            each.annotation = Types(home).visit(each.annotation)
    returns = f" -> {type_of(node.returns, home)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def comment_of(node: ast.stmt, lines: list[str]) -> str:
    """Return the comment beside a statement, or else the one above it."""
    beside = lines[node.end_lineno - 1][node.end_col_offset :].strip()
    if beside.startswith("# ") and not beside.startswith("# fmt:"):
        return beside.removeprefix("# ")
    above, number = [], node.lineno - 2
    while lines[number].strip().startswith("# "):
        above.insert(0, lines[number].strip().removeprefix("# "))
        number -= 1
    return " ".join(above)


def members_of(public: Public) -> tuple[Entry, ...]:
    """Return the fields, properties and methods that a class does not hide, its bases' too."""
    found: dict[str, Entry] = {}
    for base in public.value.__mro__:
        if not base.__module__.startswith("funcrl"):
            continue
        source = source_of(base.__module__)
        nodes, docs = definitions(source.nodes[base.__name__].body)
        for name, node in nodes.items():
            if is_public(name) and name not in found:
                member = member_of(name, node, docs.get(name, ""), base.__module__)
                if member.docstring or base is public.value:
                    found[name] = member
    return tuple(found.values())


def member_of(name: str, node: ast.stmt, below: str, home: str) -> Entry:
    """Return the entry of a statement in a class's body."""
    if isinstance(node, ast.FunctionDef):
        docstring = ast.get_docstring(node) or ""
        marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        if marks & {"property", "cached_property"}:
            options = {"type": type_of(node.returns, home)} if node.returns else {}
            return Entry("property", "", name, "", options, docstring, home)
        options = {mark: "" for mark in ("classmethod", "staticmethod") if mark in marks}
        signature = signature_of(node, home, without_self="staticmethod" not in marks)
        return Entry("method", "", name, signature, options, docstring, home)
    options = {}
    if isinstance(node, ast.AnnAssign):
        options["type"] = type_of(node.annotation, home)
    if getattr(node, "value", None) is not None:
        options["value"] = ast.unparse(node.value)
    docstring = below or comment_of(node, source_of(home).lines)
    return Entry("attribute", "", name, "", options, docstring, home)


def class_signature(public: Public, members: tuple[Entry, ...]) -> str:
    """Return how an object of a class is made."""
    kind = public.value
    if getattr(kind, "_is_protocol", False) or is_enum(kind):
        return ""
    if issubclass(kind, tuple):
        return f"({', '.join(each.name for each in members if each.kind == 'attribute')})"
    for base in kind.__mro__:
        if base.__module__.startswith("funcrl"):
            nodes, _ = definitions(source_of(base.__module__).nodes[base.__name__].body)
            if "__init__" in nodes:
                made = signature_of(nodes["__init__"], base.__module__, without_self=True)
                return made.removesuffix(" -> None")
    return ""


def entry_of(public: Public) -> Entry:
    """Return the entry of a public name."""
    source = source_of(public.home)
    node = source.nodes[public.name]
    place = (public.module, public.name)
    if isinstance(node, ast.FunctionDef):
        docstring = ast.get_docstring(node) or ""
        return Entry(
            "function", *place, signature_of(node, public.home), {}, docstring, public.home
        )
    if isinstance(node, ast.ClassDef):
        described = dict(arguments_in(ast.get_docstring(node)))
        members = tuple(
            each._replace(docstring=each.docstring or described.get(each.name, ""))
            for each in members_of(public)
        )
        docstring = ast.get_docstring(node) or ""
        signature = class_signature(public, members)
        return Entry("class", *place, signature, {}, docstring, public.home, members)
    docstring = source.docs.get(public.name) or comment_of(node, source.lines)
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        base, words = bounds_of(node.value)
        options = {"value": type_of(base, public.home)}
        return Entry("data", *place, "", options, words or docstring, public.home)
    text = ast.unparse(node.value)
    return Entry(
        "data", *place, "", {"value": text} if len(text) < 300 else {}, docstring, public.home
    )


def bounds_of(value: ast.expr) -> tuple[ast.expr, str]:
    """Return the type of `Annotated[type, number("a number above 0", ...)]` and these words."""
    if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Annotated":
        base, call = value.slice.elts
        return base, call.args[0].value
    return value, ""


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
