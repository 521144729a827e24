"""What MkDocs does not do by itself: pages for files that lie outside of docs/.

README.md becomes the front page, CHANGELOG.md a page of its own. A program, a script or a folder that a document links
to becomes a page that shows its text, or what lies in it. So one link serves a reader of the repository and one of the
site. A link to a file that does not exist stays as it is, and MkDocs complains of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}  # in the repository, and on the site
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def page_of(path: Path) -> str:
    """The place on the site of a file or folder of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return DOCUMENTS.get(name, f"source/{name}.md")


def targets(text: str, folder: Path) -> dict[str, Path]:
    """The links of a document in `folder` that lead to a file or folder of the repository."""
    found = {link: Path(os.path.normpath(folder / link)) for link in LINK.findall(text)}
    return {link: path for link, path in found.items() if path.exists() and path.is_relative_to(ROOT)}


def moved(text: str, folder: Path, page: str) -> str:
    """The text of a document in `folder` for its place on the site."""
    places = {
        link: os.path.relpath(page_of(path), os.path.dirname(page) or ".")
        for link, path in targets(text, folder).items()
    }
    return LINK.sub(lambda match: places.get(match[1], match[1]), text)


def shown(path: Path) -> str:
    """A page with the text of a file, or with links to the files of a folder."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.is_file())
        return title + "".join(f"- [{one.name}]({path.name}/{one.name}.md)\n" for one in files)
    text = path.read_text()
    language = "python" if path.suffix == ".py" else "sh" if text.startswith("#!") else "text"
    return f"{title}````{language}\n{text}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the front page, the changelog and the pages of linked files."""
    texts = [(ROOT / name, page) for name, page in DOCUMENTS.items()]
    for name in ("iframe-worker.js", "lines.css"):
        files.append(File.generated(config, f"assets/{name}", content=(ROOT / "docs/site" / name).read_text()))
    sources: set[Path] = set()
    for path, page in [*texts, *((Path(str(one.abs_src_path)), one.src_uri) for one in files.documentation_pages())]:
        text = path.read_text()
        linked = {one for one in targets(text, path.parent).values() if not one.is_relative_to(DOCS)}
        sources |= {one for one in linked if one.relative_to(ROOT).as_posix() not in DOCUMENTS}
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, page, content=moved(text, path.parent, page)))
    sources |= {one for path in sources if path.is_dir() for one in path.iterdir() if one.is_file()}
    for path in sources:
        page = File.generated(config, page_of(path), content=shown(path))
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of the documents in docs/ to these pages."""
    path = DOCS / page.file.src_uri
    return moved(markdown, path.parent, page.file.src_uri) if path.exists() else markdown
