"""The commands in the guides: the lines of their code blocks, and whether they need GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = [
    folder
    for pattern in ("[a-z]*/", "vlmrl/*/", "vlmrl/agents/*/", "tests/*/", "examples/*/")
    for folder in ROOT.glob(pattern)
    if not folder.is_symlink()
]
GUIDES = sorted(
    str(path.relative_to(ROOT)) for path in (folder / "README.md" for folder in (ROOT, *_FOLDERS)) if path.exists()
)
_BLOCK = re.compile(r"^```(bash|sh)( needs-gpus)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """A command of a guide, on one line."""

    guide: str
    line: str
    needs_gpus: bool
    """Its block begins with three backticks and `bash needs-gpus`."""
    uses_files_of_the_page: bool
    """In datasets/README.md: its `bash` blocks are run with the files of the page, its `sh` blocks are not."""


def commands(guide: str) -> list[Command]:
    """Return the lines of a guide's code blocks, joined at backslashes, without comments."""
    text = (ROOT / guide).read_text()
    found = []
    for language, mark, block in _BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        stripped = (" ".join(line.partition(" #")[0].split()) for line in lines if not line.startswith("#"))
        of_the_page = guide == "datasets/README.md" and language == "bash"
        found += [Command(guide, line, bool(mark), of_the_page) for line in stripped if line]
    return found


def texts_before_gpu_blocks(guide: str) -> list[str]:
    """Return what a reader sees of each block that needs GPUs: its heading, the text since then, and its comments."""
    text = (ROOT / guide).read_text()
    found = []
    for match in _BLOCK.finditer(text):
        if match[2]:
            section = re.split(r"^(?=#+ )", text[: match.start()], flags=re.MULTILINE)[-1]
            found.append("\n".join([section, *re.findall(r"^#.*$", match[3], re.MULTILINE)]))
    return found
