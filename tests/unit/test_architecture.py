"""docs/architecture.md and gradient.md name functions, packages and few words: they exist, and the pages stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import mpikv

OURS = Path(mpikv.__file__).parent
PAGE = OURS.parent / "docs" / "architecture.md"
MOST_WORDS_EXPLAINED = 25


def names(tree: ast.AST) -> set[str]:
    """What a module or a class defines; attributes that a method sets are among those of its class."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def exists(name: str) -> bool:
    """Whether `package.module.Class.method` does."""
    parts, folder = name.split("."), OURS
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    module = folder / f"{parts[0]}.py"
    if not module.exists() or len(parts) < 2:
        return False
    tree: ast.AST = ast.parse(module.read_text())
    for i, part in enumerate(parts[1:]):
        if part not in names(tree):
            return False
        if i + 2 < len(parts):
            tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == part)
    return True


def test_every_function_that_is_named_exists() -> None:
    # `module.Class.method`, with folders in front where there are some; `pyproject.toml` is none.
    pages = [PAGE, PAGE.parent / "gradient.md"]
    found = [name for page in pages for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", page.read_text())]
    functions = [name for name in found if not name.endswith((".py", ".toml", ".md")) and name != "store.push"]
    assert len(functions) > 25
    assert [name for name in functions if not exists(name)] == []
    assert not exists("kvstore.KVStore.no_such_method")
    assert not exists("no_such_module.function")


def test_the_picture_is_what_the_code_gives() -> None:
    drawn = subprocess.run([sys.executable, "scripts/draw_rooms.py", "--check"], cwd=OURS.parent, check=False)
    assert drawn.returncode == 0, "python scripts/draw_rooms.py"


def test_a_circle_of_imports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OURS.parent / "scripts")
    import draw_rooms

    assert draw_rooms.beneath("a", {"a": {"b"}, "b": {"c"}, "c": set()}) == {"b", "c"}
    with pytest.raises(ValueError, match="a -> b -> a"):
        draw_rooms.beneath("a", {"a": {"b"}, "b": {"a"}})


def test_a_class_name_stands_for_one_thing() -> None:
    texts = (path.read_text() for path in OURS.rglob("*.py"))
    named = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))
    assert len(named) > 400
    assert [name for name, times in named.items() if times > 1] == []


def test_every_room_has_its_line() -> None:
    """But those that only look after others."""
    text = PAGE.read_text()
    packages = {path.name for path in OURS.iterdir() if (path / "__init__.py").exists()}
    rows = " ".join(re.findall(r"^\|[^|]*\|(.*)\|$", text, re.MULTILINE))
    unnamed = {name for name in packages if f"`{name}/" not in rows}
    assert unnamed <= {"arrays", "common", "engine", "groups", "observe", "strategies", "testing"}


def test_the_glossary_is_short() -> None:
    words = PAGE.read_text().split("## Words")[1].strip().splitlines()
    assert 0 < len([line for line in words if line.startswith("- ")]) <= MOST_WORDS_EXPLAINED
