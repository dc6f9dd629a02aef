"""The public names of funcrl, and what their source files say of them."""

import ast
import enum
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import funcrl

# What public functions take or return and the root does not show, by the modules to import it from.
INNER = {
    "funcrl.core.arguments": (
        "Count", "Natural", "Positive", "NotNegative", "Finite", "FinitePositive",
        "FiniteNotNegative", "Fraction", "TensorTree", "Mask",
    ),
    "funcrl.generators.contract": ("Prompts",),
    "funcrl.loop.evaluate": ("Evaluation",),
    "funcrl.loop.parity": ("Parity", "ParityConfig"),
    "funcrl.loop.build": ("Parts",),
    "funcrl.loop.choose": ("Chosen",),
    "funcrl.loop.export": ("Trained",),
    "funcrl.optim.schedules": ("LearningRate", "Schedule"),
    "funcrl.run.memory": ("MemoryProfiler",),
    "funcrl.tasks.contracts": ("TaskLike", "TokenizerLike"),
}  # fmt: skip
ROOT = Path(funcrl.__file__).parents[1]


class Source(NamedTuple):
    """A file of the package, parsed."""

    lines: list[str]
    nodes: dict[str, ast.stmt]  # what the file defines, by name
    docs: dict[str, str]  # the docstrings that stand below assignments
    imports: dict[str, str]  # the modules that names come from


def is_public(name: str) -> bool:
    """Return whether a name is not hidden."""
    return not name.startswith("_")


def assigned(node: ast.stmt) -> str:
    """Return the name that a statement assigns to; '' where it is no such statement."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def definitions(body: list[ast.stmt]) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """Return what a body defines, by name, and the docstrings below its assignments."""
    nodes: dict[str, ast.stmt] = {}
    docs: dict[str, str] = {}
    for before, node in zip([None, *body], body, strict=False):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and assigned(node):
            nodes[assigned(node)] = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and before:
            docs[assigned(before)] = inspect.cleandoc(str(node.value.value))
    return nodes, docs


@functools.cache
def source_of(module: str) -> Source:
    """Return the file of a module."""
    text = Path(str(sys.modules[module].__file__)).read_text()
    tree = ast.parse(text)
    imports = {
        alias.name: str(node.module)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return Source(text.splitlines(), *definitions(tree.body), imports)


def home(module: str, name: str) -> str:
    """Return the module that defines a name which a module shows; '' where it is none of ours."""
    source = source_of(module)
    origin = source.imports.get(name, "")
    if name in source.nodes:
        return module
    ours = origin.startswith("funcrl") and origin != module  # a package imports its own modules
    return home(origin, name) if ours else ""


def shown(module: ModuleType) -> Iterator[str]:
    """Yield the public names of a module: its `__all__`, or else all that its file defines."""
    yield from getattr(module, "__all__", filter(is_public, source_of(module.__name__).nodes))


class Public(NamedTuple):
    """A public function, class or value."""

    module: str  # as a user writes it: "funcrl.losses"
    name: str
    value: Any
    home: str  # the module that defines it: "funcrl.rl.losses"

    @property
    def full(self) -> str:
        """The name that a user writes."""
        return f"{self.module}.{self.name}"


@functools.cache
def public_modules() -> dict[str, ModuleType]:
    """Return the public modules by the names that a user writes."""
    values = {f"funcrl.{name}": getattr(funcrl, name) for name in funcrl.__all__}
    return {"funcrl": funcrl} | {n: each for n, each in values.items() if inspect.ismodule(each)}


@functools.cache
def public_names() -> dict[str, Public]:
    """Return all public names; one object may have several."""
    return {
        f"{module}.{name}": Public(module, name, getattr(value, name), home(value.__name__, name))
        for module, value in public_modules().items()
        for name in shown(value)
        if f"{module}.{name}" not in public_modules()
    }


@functools.cache
def entries() -> dict[tuple[str, str], Public]:
    """Return the one name under which each object is described, by where it is defined.

    It is the name at the root, or in the module that has the object's own file.
    """
    found: dict[tuple[str, str], Public] = {}
    for public in public_names().values():
        key = (public.home, public.name)
        own = public.home.startswith(public_modules()[public.module].__name__)
        if key not in found or (own and found[key].module != "funcrl"):
            found[key] = public
    for module, names in INNER.items():
        for name in names:
            place = home(module, name)
            found[place, name] = Public(module, name, getattr(sys.modules[place], name), place)
    return found


def aliases() -> dict[str, str]:
    """Return the other public names of described objects."""
    chosen = {
        full: entries()[public.home, public.name].full for full, public in public_names().items()
    }
    return {full: entry for full, entry in chosen.items() if full != entry}


def find(name: str, module: str) -> Public | None:
    """Return the public object that a name means where a module's file mentions it."""
    first, _, rest = name.removeprefix("funcrl.").partition(".")
    if rest:
        public = public_names().get(f"funcrl.{first}.{rest}")
    elif name.startswith("funcrl."):
        public = public_names().get(name)
    else:
        return entries().get((home(module, first), first))
    return entries()[public.home, public.name] if public else None


def is_enum(value: Any) -> bool:
    """Return whether a value is an enumeration."""
    return inspect.isclass(value) and issubclass(value, enum.Enum)
