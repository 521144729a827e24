"""The examples in docstrings, as blocks of code: in Markdown, `>>>` is a quotation within two others."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to the next empty line


class Examples(griffe.Extension):
    """Rewrites docstrings once they are read."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        """Called by griffe with every module, class, function and attribute."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
