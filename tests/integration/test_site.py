"""The documentation site: built without a warning, every public name, links that lead somewhere."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.util.inventory import InventoryFile
from surface import public_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The anchors of a page, where it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        elif tag == "link" and found.get("href"):
            self.loads.add(found["href"])
        elif found.get("src"):
            self.loads.add(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = [str(DOCS), str(out / "html"), "-d", str(out / "doctrees")]
    built = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def sources() -> list[Path]:
    """The pages that were written, and the notebooks, without their endings."""
    found = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    return [path.relative_to(DOCS).with_suffix("") for path in found]


def test_every_public_name_has_an_entry(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    kinds = [kind for kind in inventory.data if kind.startswith("py:")]
    described = {name for kind in kinds for name in inventory.data[kind]}
    assert public_names() - described == set()
    assert not [name for name in described if re.search(r"\._", name)]


def test_every_page_has_a_twin_and_is_in_llms_txt(site):
    listed = set(re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .", (site / "llms.txt").read_text(), re.M))
    written = {f"{page}.md" for page in sources()} - {"index.md"}
    assert listed == written
    for page in ["index.md", *sorted(written)]:
        twin = site / page
        assert twin.with_suffix(".html").exists()
        assert twin.read_text().startswith("# "), page
        assert "```{" not in twin.read_text(), page
        assert twin.read_text() in (site / "llms-full.txt").read_text()
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", twin.read_text()):
            assert (twin.parent / target).exists(), f"{page}: {target}"


def test_guides_and_reference_stand_above_the_notebooks(site):
    captions = re.findall(r'class="caption-text">([^<]+)<', (site / "index.html").read_text())
    assert captions == ["Start", "Guides", "Understanding", "Reference", "Notebooks"]


@pytest.mark.parametrize(
    ("word", "page"),
    [("multi-gpu", "scaling"), ("multi-turn", "training"), ("sft", "training"),
     ("torchrun", "scaling"), ("sweep", "faq"), ("fsdp", "scaling"), ("lora", "models")],
)  # fmt: skip
def test_the_search_index_leads_from_a_users_word_to_its_page(site, word, page):
    """The index has stems of words as they are written, cut at hyphens."""
    index = json.loads(
        (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    )
    number = index["docnames"].index(page)
    for part in word.split("-"):
        found = [index[kind].get(part, []) for kind in ("terms", "titleterms")]
        pages = {each for pages in found for each in ([pages] if type(pages) is int else pages)}
        assert number in pages, part


def test_every_entry_says_something(site):
    for path in (site / "api").glob("*.md"):
        for entry in path.read_text().split("\n### funcrl.")[1:]:
            signature, words = entry.split("\n```\n", 1)
            assert not words.strip().startswith("Defined in"), signature


def test_a_twin_of_the_reference_has_the_docstring(site):
    text = (site / "api" / "optim.md").read_text()
    entry = text.split("### funcrl.optim.sgd\n")[1].split("\n### ")[0]
    assert "- `momentum`: " in entry
    assert "```pycon\n>>> " in entry


def test_nothing_is_loaded_from_another_host(site, pages):
    for path, page in pages.items():
        for target in page.loads:
            address = urlsplit(target)
            if address.scheme != "data":
                assert not address.scheme + address.netloc, target
                assert (path.parent / unquote(address.path)).exists(), target
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        fetched = r"@import\s|url\(\s*[\"']?(?:https?:)?//|\bimport\(|importScripts\("
        assert not re.search(fetched, path.read_text()), path


def test_every_link_and_anchor_leads_somewhere(pages):
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            assert target.exists(), f"{path.name}: {link}"
            if address.fragment and target.suffix == ".html":
                assert unquote(address.fragment) in pages[target].anchors, f"{path.name}: {link}"


def test_anchors_in_links_of_the_readme_exist(site, pages):
    links = re.findall(r"\]\(docs/([\w/.-]+)\.md#([\w-]+)\)", (ROOT / "README.md").read_text())
    for page, anchor in links:
        assert anchor in pages[site / f"{page}.html"].anchors, f"{page}#{anchor}"


def test_formulas_are_mathml(site):
    """Each is an element of the page, which needs no script, and no command is left in it."""
    for source in DOCS.glob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", source.read_text(), flags=re.DOTALL)
        html = (site / f"{source.stem}.html").read_text()
        formulas = re.findall(r"<math.*?</math>", html, re.DOTALL)
        blocks = [formula for formula in formulas if 'display="block"' in formula]
        assert len(blocks) == len(re.findall(r"\$\$.+?\$\$", text, re.DOTALL)), source.name
        assert not [formula for formula in formulas if "\\" in formula], source.name
