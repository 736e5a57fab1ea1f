"""Notebooks as pages: their text, and their code as blocks."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "notebooks"


def pages() -> dict[str, str]:
    """Markdown by place, with a link to the notebook itself."""
    markdown = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        parts = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts.insert(1, f"[Download the notebook]({path.name})")
        markdown[f"notebooks/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return markdown
