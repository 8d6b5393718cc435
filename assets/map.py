"""Writes the map of files into README.md, from the first sentence of each file: `make map`."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FOLDERS = {
    "vlmrl": "the program",
    "processors": "model families, reachable as <code>vlmrl.processors</code>",
    "datasets": "datasets, reachable as <code>vlmrl.datasets</code>",
    "examples": "recipes",
}
START, END = "<!-- map: written by `make map` -->", "<!-- /map -->"


def sources(folder: str) -> list[Path]:
    """Source files of a top-level folder, relative to the root, packages' own first; links are not followed."""
    found = []
    for path in (ROOT / folder).rglob("*"):
        relative = path.relative_to(ROOT)
        parents = [ROOT / parent for parent in list(relative.parents)[:-1]]
        if path.suffix in {".py", ".yaml"} and not any(parent.is_symlink() for parent in parents):
            found.append(relative)
    return sorted(found, key=lambda path: (path.parent.parts, path.name != "__init__.py", path.name))


def idea(path: Path) -> str:
    """The first sentence of a file."""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        opening = ast.get_docstring(ast.parse(text)) or ""
    else:
        comments = re.match(r"(?:#.*\n)*", text)
        lines = [line.lstrip("# ").rstrip() for line in comments[0].splitlines()] if comments else []
        # A recipe opens with the command that runs it.
        opening = "\n".join(line for line in lines if not line.startswith("vlmrl "))
    paragraph = " ".join(opening.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.\d][.])(?<!Dr[.]) (?=[A-Z`\[])", paragraph + " ", maxsplit=1)[0].strip().rstrip(".")
    if not sentence:
        raise SystemExit(f"{path} does not open with its one idea: write a docstring, or a comment in YAML")
    return sentence.replace("|", "\\|")


def draw() -> str:
    """The map, as Markdown."""
    lines = [START]
    for folder, what in FOLDERS.items():
        files = sources(folder)
        lines += [
            f"<details><summary><b>{folder}/</b>: {what}, {len(files)} files</summary>",
            "",
            "| file | what |",
            "|---|---|",
        ]
        lines += [f"| `{path}` | {idea(path)} |" for path in files]
        lines += ["", "</details>"]
    return "\n".join([*lines, END])


def main() -> None:
    """Replace the map in README.md."""
    before, rest = README.read_text().split(START)
    after = rest.split(END)[1]
    README.write_text(before + draw() + after)


if __name__ == "__main__":
    sys.exit(main())
