"""A hook of MkDocs: links to files outside ``docs/`` become plain text, as a site lacks them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's text without links that lead outside."""
    docs, place = Path(config["docs_dir"]), Path(page.file.abs_src_path).parent

    def kept(link: re.Match[str]) -> str:
        inside = (place / link[2]).resolve().is_relative_to(docs)
        return link[0] if inside else link[1]

    return LINK.sub(kept, markdown)
