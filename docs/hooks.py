"""Hook of mkdocs: link pictures of `eval/results` within the site."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the path of the GPU plot, which `offload-rt eval gpu-readme` writes relative to the repository."""
    return markdown.replace("](../../eval/results/gpu/", "](pictures/")
