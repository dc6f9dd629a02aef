"""What the source says of a public name: its signature, its fields, its docstring."""

import ast
from typing import NamedTuple

from docstrings import arguments_in
from names import Public, definitions, find, is_enum, is_public, source_of


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
