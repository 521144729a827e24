"""Draw docs/rooms.svg: the packages of mpikv, what each is for, and which imports which, read from the code.

    python scripts/draw_rooms.py            write the picture anew
    python scripts/draw_rooms.py --check    say whether it is what the code gives, and end with status 1 where it is not

A package stands above all that it imports. An arrow goes from a package to one that it imports; where it imports
another one by way of that, too, the second arrow is left out. The sentence is the first line of the package's
docstring.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "rooms.svg"
ABOVE_ALL = "mpikv.server.__main__"  # a command, as `mpikv.__main__` is
LEFT_OUT = ("_version", "__init__")
CHARACTER, ROW, BOX_HEIGHT, GAP, MARGIN = 6.3, 78, 44, 24, 20  # pixels; a character of the font below is less wide


def modules() -> dict[str, ast.Module]:
    """Each module of the package by its dotted name, read."""
    paths = [path for path in sorted((ROOT / "mpikv").rglob("*.py")) if path != ROOT / "mpikv" / "__init__.py"]
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name: ast.parse(path.read_text()) for path, name in dotted.items()}


def room_of(module: str) -> str:
    """The package, or the file, at the top level of mpikv that a module is in."""
    return module.split(".")[1]


def imported(tree: ast.Module) -> set[str]:
    """The modules of ours that a module names in its imports, wherever in it they stand."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "mpikv":
            found |= {f"mpikv.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpikv."):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("mpikv.")}
    return found


def rooms() -> tuple[dict[str, str], dict[str, set[str]]]:
    """What each room is for, and which rooms it imports."""
    read = modules()
    names = {room_of(module) for module in read} - set(LEFT_OUT)
    purpose, below = {}, {name: set[str]() for name in sorted(names)}
    for module, tree in read.items():
        if module.count(".") == 1 or (module.endswith(".__init__") and module.count(".") == 2):
            purpose[room_of(module)] = (ast.get_docstring(tree) or "").partition("\n")[0]
        if room_of(module) in names and module != ABOVE_ALL:
            below[room_of(module)] |= {room_of(name) for name in imported(tree)} & names - {room_of(module)}
    return purpose, below


def beneath(room: str, below: dict[str, set[str]], above: tuple[str, ...] = ()) -> set[str]:
    """All rooms that a room imports, by way of others, too. Raises ValueError where it imports itself so."""
    if room in above:
        raise ValueError(f"a circle of imports: {' -> '.join([*above, room])}")
    return below[room].union(*(beneath(name, below, (*above, room)) for name in below[room]))


def picture() -> str:
    """The SVG."""
    purpose, below = rooms()
    under = {room: beneath(room, below) for room in below}
    arrows = {
        room: sorted(name for name in names if not any(name in under[other] for other in names))
        for room, names in below.items()
    }
    rows: list[list[str]] = []
    while len(placed := {room for row in rows for room in row}) < len(below):  # the highest first
        rows.append(
            sorted(r for r in below if r not in placed and all(r not in below[o] or o in placed for o in below))
        )
    widths = {room: CHARACTER * max(len(purpose[room]), 12) + 16 for room in below}
    total = max(sum(widths[room] + GAP for room in row) for row in rows) + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}  # the left upper corner of each box
    for number, row in enumerate(rows):
        x = (total - sum(widths[room] + GAP for room in row) + GAP) / 2
        for room in row:
            at[room] = (x, MARGIN + number * ROW)
            x += widths[room] + GAP
    lines = []
    for room, names in arrows.items():
        for name in names:
            (x, y), (to_x, to_y) = at[room], at[name]
            start, end = (x + widths[room] / 2, y + BOX_HEIGHT), (to_x + widths[name] / 2, to_y - 5)
            bend = (end[1] - start[1]) / 2
            lines.append(
                f'<path d="M{start[0]:.0f},{start[1]:.0f} C{start[0]:.0f},{start[1] + bend:.0f} '
                f'{end[0]:.0f},{end[1] - bend:.0f} {end[0]:.0f},{end[1]:.0f}" marker-end="url(#tip)"/>'
            )
    boxes = []
    for room, (x, y) in sorted(at.items(), key=lambda item: item[1][::-1]):
        middle = x + widths[room] / 2
        boxes.append(f'<rect x="{x:.0f}" y="{y}" width="{widths[room]:.0f}" height="{BOX_HEIGHT}" rx="6"/>')
        boxes.append(f'<text x="{middle:.0f}" y="{y + 18}" class="name">{escape(room)}</text>')
        boxes.append(f'<text x="{middle:.0f}" y="{y + 35}">{escape(purpose[room])}</text>')
    height = MARGIN + len(rows) * ROW - (ROW - BOX_HEIGHT) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {height}" role="img">',
            "<title>The packages of mpikv and which imports which</title>",
            "<style>text{font:11px sans-serif;text-anchor:middle;fill:#222}.name{font-weight:bold;font-size:13px}"
            "rect{fill:#eef3fa;stroke:#51719c}path{fill:none;stroke:#888}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z" style="fill:#888;stroke:none"/></marker></defs>',
            f'<rect width="{total:.0f}" height="{height}" style="fill:#fff;stroke:none"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the picture, or compare it."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    drawn = picture()
    if sys.argv[1:]:
        same = PICTURE.exists() and PICTURE.read_text() == drawn
        print("docs/rooms.svg is up to date" if same else "docs/rooms.svg is not what the code gives: draw it anew")
        return 0 if same else 1
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
