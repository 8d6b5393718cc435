"""The README.md files: their links and names exist, and their commands are accepted."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from guide_commands import GUIDES, ROOT, commands

from vlmrl.config import plan
from vlmrl.config.load import load
from vlmrl.config.push import PushConfig, full_names
from vlmrl.config.report import ReportConfig, with_runs
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import RlConfig

DOCUMENTS = [*GUIDES, "CONTRIBUTING.md"]
SETTINGS = {name for verb in VERBS for name in verb.settings()}
SECTIONS = {section for verb in VERBS for section in verb.sections()}


def text(document: str) -> str:
    return (ROOT / document).read_text()


def prose(document: str) -> str:
    """A document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text(document), flags=re.DOTALL | re.MULTILINE)


def spans(document: str) -> list[str]:
    """The text in backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(document))]


def anchors(document: Path) -> set[str]:
    """The names that GitHub gives to the headings."""
    titles = re.findall(r"^#+ (.*)$", prose(str(document.relative_to(ROOT))), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


COMMANDS = [
    (guide, command.line) for guide in GUIDES for command in commands(guide) if not command.uses_files_of_the_page
]
"""Without those of datasets/README.md that use files of the page: see test_datasets_guide.py."""


def test_each_subject_has_its_guide() -> None:
    folders = ("agents", "algorithms", "rewards", "models", "config", "observe", "report", "verify")
    others = ("README.md", "examples/README.md", "datasets/README.md", "processors/README.md")
    wanted = {*others, *(f"vlmrl/{folder}/README.md" for folder in folders), "tests/benchmarks/README.md"}
    assert wanted <= set(GUIDES)
    assert not [guide for guide in wanted - {"README.md"} if f"]({guide})" not in text("README.md")]


def test_the_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) < 200


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_exist(document: str) -> None:
    folder = (ROOT / document).parent
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text(document)):
        if "://" not in target:
            path = (folder / target).resolve() if target else ROOT / document
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize(("guide", "command"), COMMANDS)
def test_commands_are_accepted_by_their_programs(
    guide: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run.yaml"
    run.write_text("actor: {model_name_or_path: m}\ndata: {prompt_dataset: gsm8k}\n")
    words = [str(run) if word == "run.yaml" else word for word in shlex.split(command)]
    words = words[next(i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)) :]
    program, rest = Path(words[0]).name, words[1:]
    if program == "vlmrl":
        check_vlmrl(rest)
    elif program == "python":
        assert find_spec(rest[1]) if rest[0] == "-m" else (ROOT / rest[0]).exists()
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", text("Makefile"), re.MULTILINE)
    else:
        # test_gateway_guide.py sends what curl would.
        assert program in {"source", "ray", "curl", "sbatch", "scancel", "kubectl"}


def check_vlmrl(words: list[str]) -> None:
    """Load the settings of a command like the program."""
    verb, *rest = words
    if verb == "doctor":
        flags = [word for word in rest if word not in ("--json", "--self-test")]
        kind = RlConfig
        if not flags:
            return
    else:
        kind = next(kind for kind in VERBS if words[: len(kind.verb.split())] == kind.verb.split())
        flags = [word for word in words[len(kind.verb.split()) :] if word != "--dry-run"]
        flags = full_names(flags) if kind is PushConfig else flags
        flags = plan.full_names(flags) if kind is plan.PlanConfig else flags
        if kind is ReportConfig:
            flags = with_runs(flags)
    load(kind, flags)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_that_are_named_exist(document: str) -> None:
    lists = (ROOT / "tests/unit/config").glob("*_[fs]*s.txt")
    of_others = {name for path in lists for name in path.read_text().split()}
    for span in spans(document):
        for dashes, name in re.findall(r"(?<![\w./-])(--)?((?:[a-z]\w*\.)+\w+)(?![\w./(])", span):
            section = name.partition(".")[0]
            if dashes or (section in SECTIONS and Path(name).suffix not in (".py", ".yaml", ".tsv", ".md", ".html")):
                assert name in SETTINGS | SECTIONS | of_others, f"{span}: no setting {name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    folders = r"(?:vlmrl|tests|examples|datasets|processors|assets)/"
    for span in spans(document):
        for path in re.findall(rf"(?<![\w./<-]){folders}[\w./]*\w", span):
            assert "<" in span or (ROOT / path).exists(), path


# ---- messages


def messages() -> Iterator[str]:
    """The strings of the source, pieces of one string joined."""
    for file in (ROOT / "vlmrl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_failed_checks_are_those_of_the_source() -> None:
    rows = [line.split(" | ")[0] for line in text("vlmrl/verify/README.md").splitlines() if line.startswith("| `")]
    section = text("vlmrl/verify/README.md").partition("## Weight sync")[2]
    quoted = {part for row in rows if row in section for part in re.findall(r"`([^`]+)`", row)}
    source = "\n".join(messages())
    assert len(quoted) > 25
    assert not [part for part in quoted if part not in source]
