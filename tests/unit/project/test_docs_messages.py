"""Test that messages quoted on the troubleshooting page occur in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "pages" / "troubleshooting.md"


def string_value(node: ast.expr) -> str:
    """Return the text of a string expression, with a NUL character in place of each formatted value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(string_value(part) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return string_value(node.left) + string_value(node.right)
    return "\0"


def test_quoted_messages_occur_in_the_code() -> None:
    sources = [*(ROOT / "offload_rt").rglob("*.py"), *(ROOT / "skewing").glob("*.py")]
    strings = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                strings.add(" ".join(string_value(node).split()))
    quoted = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            quoted += re.findall(r"``? ?(.+?) ?``?(?=[,| ]|$)", line.split(" | ")[0][2:])
    assert len(quoted) > 15
    missing = []
    for message in quoted:
        parts = [part.strip(" `") for part in message.split("…") if len(part.strip(" `;,.:")) > 3]
        if not any(all(part in text for part in parts) for text in strings):
            missing.append(message)
    assert not missing, f"docs/pages/troubleshooting.md quotes messages that no code contains: {missing}"
