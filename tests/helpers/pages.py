"""What a report's page has beside the run's own text."""

import re
from pathlib import Path

from funcrl.run import report

SCRIPT = (Path(report.__file__).parent / "page.js").read_text()


def without_own_scripts(text):
    """The page without its one script and without its data, in which no element can begin."""
    assert text.count(f"<script>{SCRIPT}</script>") == 1
    text = text.replace(f"<script>{SCRIPT}</script>", "")
    return re.sub(r'<script type="application/json" id="[a-z-]+">[^<]*</script>', "", text)
