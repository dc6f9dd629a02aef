"""Formulas as MathML, made when the site is built: a browser needs no script to show them."""

from docutils import nodes
from latex2mathml.converter import convert


def visit_inline(writer, node: nodes.math) -> None:
    """Write a formula within a line."""
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_block(writer, node: nodes.math_block) -> None:
    """Write a formula on lines of its own, with its anchor."""
    anchor = f' id="equation-{node["label"]}"' if node.get("label") else ""
    formula = convert(node.astext(), display="block")
    writer.body.append(f'<div class="math"{anchor}>{formula}</div>\n')
    raise nodes.SkipNode


def setup(app) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
