"""What holds of the code as a whole, and that pages name what is in it.

docs/architecture.md and gradient.md name functions, packages and few words: they exist, and the pages stay short.
docs/errors.md quotes messages: what is constant in each still stands in the code. Files are opened in one place.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpikv

OURS = Path(mpikv.__file__).parent
DOCS = OURS.parent / "docs"
PAGE = DOCS / "architecture.md"
MOST_WORDS_EXPLAINED = 25


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Each file of the package, read; not where this module is only collected."""
    return {str(path.relative_to(OURS)): ast.parse(path.read_text(encoding="utf-8")) for path in OURS.rglob("*.py")}


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
    module = str((folder / f"{parts[0]}.py").relative_to(OURS))
    if module not in modules() or len(parts) < 2:
        return False
    tree: ast.AST = modules()[module]
    for i, part in enumerate(parts[1:]):
        if part not in names(tree):
            return False
        if i + 2 < len(parts):
            tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == part)
    return True


def test_every_function_that_is_named_exists() -> None:
    # `module.Class.method`, with folders in front where there are some; `pyproject.toml` is none.
    pages = [PAGE, DOCS / "gradient.md"]
    found = [name for page in pages for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", page.read_text())]
    functions = [name for name in found if not name.endswith((".py", ".toml", ".md")) and name != "store.push"]
    assert len(functions) > 25
    assert [name for name in functions if not exists(name)] == []
    assert not exists("kvstore.KVStore.no_such_method")
    assert not exists("no_such_module.function")


def test_the_picture_is_what_the_code_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a circle of imports is refused."""
    monkeypatch.syspath_prepend(OURS.parent / "scripts")
    import draw_rooms

    named = {f"mpikv.{path[:-3].replace('/', '.')}": tree for path, tree in sorted(modules().items())}
    del named["mpikv.__init__"]
    monkeypatch.setattr(draw_rooms, "modules", lambda: named)
    assert draw_rooms.picture() == draw_rooms.PICTURE.read_text(), "python scripts/draw_rooms.py"
    assert draw_rooms.beneath("a", {"a": {"b"}, "b": {"c"}, "c": set()}) == {"b", "c"}
    with pytest.raises(ValueError, match="a -> b -> a"):
        draw_rooms.beneath("a", {"a": {"b"}, "b": {"a"}})


def test_a_class_name_stands_for_one_thing() -> None:
    named = Counter(node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef))
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


# --- docs/errors.md


def quoted() -> list[str]:
    """The parts of all quoted messages of mpikv's own, between the dots."""
    text = (DOCS / "errors.md").read_text()
    text = text[text.index("## Messages") : text.index("## Which error")]
    cells = re.findall(r"^\| (`.+?`[^|]*) \|", text, re.MULTILINE)
    ours = [cell for cell in cells if not cell.endswith(("(Open MPI)", "(PyTorch)"))]
    return [part.strip() for cell in ours for span in re.findall(r"`([^`]+)`", cell) for part in span.split("...")]


def texts() -> Iterator[str]:
    """Every text of the package, those with values in them with an ellipsis in their places."""
    for node in (node for tree in modules().values() for node in ast.walk(tree)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_quoted_messages_are_in_the_code() -> None:
    whole, parts = "\n".join(texts()), quoted()
    assert len(parts) > 25
    assert [part for part in parts if len(part) > 8 and part not in whole] == []


# --- files are opened by mpikv.common.files, which knows what may lie at a path that somebody else may have chosen

OPENS = {
    *("fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "FileHandler", "savefig"),
    *("memmap", "open_memmap", "fromfile", "tofile", "loadtxt", "savetxt", "genfromtxt", "savez", "savez_compressed"),
    *("ZipFile", "GzipFile", "BZ2File", "LZMAFile", "TarFile", "copyfile", "copy2", "copytree"),
}
OF_LIBRARIES = {f"{module}.{name}" for module in ("np", "numpy", "torch", "cupy") for name in ("load", "save")}
ALLOWED = {
    "common/files.py": {"open", "os.open"},  # the place
    "commands/launch/batch.py": {"(TEMPLATES / name).read_text", "file.write_text"},  # the package's, the repository's
    "commands/launch/rank.py": {"os.open"},  # os.devnull
    "data/image_records.py": {"Image.open"},  # bytes in memory
    "commands/launch/watch.py": {"self._connections.open"},  # of another kind
    "runtime/cuda_aware.py": {"out.open", "err.open", "out.read_text", "err.read_text"},  # in a new folder of its own
    "runtime/cuda_driver.py": {"Path(KERNEL_MODULE).read_text"},  # below /proc
    "runtime/interface.py": {"(sysfs / name / 'dev_port').read_text"},  # below /sys
}


def opening(tree: ast.Module) -> Iterator[str]:
    """What in a module opens files by their paths, as text: calls, and functions that are kept to be called."""
    harmless = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and is_harmless(node)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in harmless:
            text = ast.unparse(node)
            method = node.attr if isinstance(node, ast.Attribute) else ""
            if text == "open" or method == "open" or method in OPENS or text in OF_LIBRARIES:
                yield text


def is_harmless(call: ast.Call) -> bool:
    """Whether it opens what only the system can have made, or is given a file that is open."""
    words = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    given = [*call.args[:1], *(one.value for one in call.keywords if one.arg == "fileobj")]
    is_open = any(isinstance(one, ast.Name) and one.id == "file" for one in given)
    return is_open or any(word.startswith(("/proc/", "/sys/", "/dev/null")) for word in words)


def test_files_are_opened_in_one_place() -> None:
    assert {path: calls for path, tree in modules().items() if (calls := {*opening(tree)})} == ALLOWED
