"""The documentation site: `sphinx-build -E -W -b html docs build/site`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import funcrl

project = "funcrl"
author = "the authors of funcrl"
project_copyright = author
release = version = funcrl.__version__

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "reference",
    "formulas",
    "reports",
    "scripts",
    "twins",
]
exclude_patterns = ["**/.ipynb_checkpoints"]
templates_path = ["_templates"]

# Pages are CommonMark with anchors as repositories make them; what has no language is a command,
# a formula or output.
myst_enable_extensions = ["attrs_block", "attrs_inline", "dollarmath"]
myst_heading_anchors = 4
myst_update_mathjax = False
highlight_language = "none"
pygments_dark_style = "github-dark"
smartquotes = False
nb_execution_mode = "off"  # notebooks are shown as they were committed
nb_ipywidgets_js = {}  # else each page would fetch scripts from elsewhere

maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "funcrl"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_logo = html_favicon = "_static/logo.svg"
html_copy_source = False  # each page has a twin in Markdown instead
html_show_sphinx = False
html_theme_options = {
    "top_of_page_buttons": ["view"],
    "light_css_variables": {
        "color-api-name": "var(--color-foreground-primary)",
        "color-api-pre-name": "var(--color-foreground-muted)",
        "api-font-size": "var(--font-size--small)",
    },
    "dark_css_variables": {
        "color-api-name": "var(--color-foreground-primary)",
        "color-api-pre-name": "var(--color-foreground-muted)",
    },
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
