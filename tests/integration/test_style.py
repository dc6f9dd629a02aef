"""The house rules that a machine can check: layers, documentation, suppressions."""

import ast
import re
from pathlib import Path

import pytest
from surface import public_functions

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "funcrl"
FILES = sorted(PACKAGE.rglob("*.py"))

# Folders of the package: each imports only from those before it.
LAYERS = [
    {"core"},
    {"parallel"},
    {"config", "ops", "optim"},
    {"models"},
    {"graph", "rl", "weights"},
    {"generators"},
    {"tasks"},
    {"run"},
    {"loop"},
    {"serve"},
    {"cli"},
]


def unit(path: Path) -> str:
    """The folder of the package that a file belongs to; the root itself is ''."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first in ("__init__.py", "__main__.py") else first


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(name: str) -> int:
    return next(level for level, names in enumerate(LAYERS) if name in names)


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            deep = node.module.split(".")
            names = [node.module]
            if deep == ["funcrl"]:
                names = [f"funcrl.{alias.name}" for alias in node.names]
        else:
            continue
        units |= {name.split(".")[1] for name in names if name.startswith("funcrl.")}
    return units


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path):
    own = unit(path)
    if own == "":
        return  # the root only gathers names, and starts the command line
    for other in imported_units(path) - {own}:
        assert layer(other) < layer(own), f"{own} imports {other}"


def test_only_the_command_line_reads_argv_and_the_environment():
    # A process of vLLM's hears from its environment which run it is of.
    # torchrun and accelerate say there how many processes they have started.
    for path in [each for each in FILES if each.name not in ("receiver.py", "process.py")]:
        if unit(path) != "cli":
            assert not re.search(r"sys\.argv|os\.environ|os\.getenv", path.read_text()), path


def test_torch_compile_has_one_door():
    doors = [path for path in FILES if "torch.compile(" in path.read_text()]
    assert all(path == PACKAGE / "graph" / "compilation.py" for path in doors)


FACTORIES = {
    "Generator", "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
# A module is made on the meta device, or by vLLM, which says where.
MADE_BY_OTHERS = {
    "models/layers.py": 5,
    "models/recurrent.py": 2,
    "generators/vllm/plugin/unified.py": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_new_tensors_name_their_device(path):
    """Without one they are on torch's default device, which a notebook may have set."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    nameless = 0
    for call in calls:
        name = ast.unparse(call.func)
        keywords = {keyword.arg for keyword in call.keywords}
        if name.startswith("torch.") and name.removeprefix("torch.") in FACTORIES:
            nameless += not keywords & {"device", None}
    assert nameless == MADE_BY_OTHERS.get(str(path.relative_to(PACKAGE)), 0)


PUBLIC = {(function.__module__, function.__name__) for function in public_functions().values()}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_are_documented_and_public_ones_with_an_example(path):
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module), path
    if unit(path) == "cli":
        return  # programs: their examples are commands
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            docstring = ast.get_docstring(node) or ""
            assert docstring, f"{node.name} has no docstring"
            public = (module_name(path), node.name) in PUBLIC
            assert ">>>" in docstring or not public, f"{node.name} has no example"
            arguments = [a.arg for a in node.args.args + node.args.kwonlyargs]
            if "Args:" in docstring:
                for name in arguments:
                    assert re.search(rf"^\s+{name}:", docstring, re.M), f"{node.name}: {name}"


def test_suppressions_are_few_and_have_reasons():
    found = []
    for path in [*FILES, *(ROOT / "examples").glob("*.py")]:
        for line in path.read_text().splitlines():
            if re.search(r"#\s*(noqa|type:\s*ignore)", line):
                found.append(line)
                assert re.search(r"\(.+\)\s*$", line), f"no reason: {path}: {line.strip()}"
    assert len(found) <= 20


def test_no_marks_of_unfinished_work():
    for path in [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        marks = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"])
        assert not re.search(rf"\b({marks})\b", path.read_text()), path
