"""The shape of the repository: folders, links, imports, sizes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("vlmrl", "processors", "datasets", "examples")
PLUGINS = ("processors", "datasets")


def _python(code: str) -> str:
    """The output of a fresh interpreter in the root of the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _files(folder: str) -> list[Path]:
    """Source files of a top-level folder, relative to the root; links are not followed."""
    result = []
    for path in sorted((ROOT / folder).rglob("*")):
        relative = path.relative_to(ROOT)
        through_link = any((ROOT / Path(*relative.parts[: n + 1])).is_symlink() for n in range(len(relative.parts)))
        if path.is_file() and not through_link and path.suffix in {".py", ".yaml", ".md", ".typed"}:
            result.append(relative)
    return result


def _imports(path: Path) -> set[str]:
    """All modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_datasets_is_hugging_faces_in_the_repository() -> None:
    pytest.importorskip("datasets")
    assert _python("import datasets; print(datasets.load_dataset.__module__, datasets.__file__)").startswith(
        "datasets.load "
    )


@pytest.mark.parametrize("folder", PLUGINS)
def test_plugin_folders_are_no_packages_and_reachable_through_relative_links(folder: str) -> None:
    link = ROOT / "vlmrl" / folder
    assert not (ROOT / folder / "__init__.py").exists()
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("module", ["vlmrl", "vlmrl.config", "vlmrl.config.load", "vlmrl.cli", "vlmrl.startup"])
def test_reading_a_command_line_imports_nothing_heavy(module: str) -> None:
    heavy = {"torch", "transformers", "datasets", "ray", "vllm", "deepspeed", "torchvision"}
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {heavy!r}))"
    assert _python(code) == "[]"


def test_plugins_import_neither_a_framework_nor_a_role() -> None:
    roles = "agents|cluster|learning|rollout|rewards|trainer|verify|commands|cli"
    banned = re.compile(rf"^(ray|vllm|deepspeed|vlmrl\.({roles}))(\.|$)")
    for folder in PLUGINS:
        for path in _files(folder):
            if path.suffix == ".py":
                assert not [name for name in _imports(path) if banned.match(name)], path


def test_plugins_are_looked_up_by_name_never_imported_by_another_part() -> None:
    for path in _files("vlmrl"):
        if path.suffix == ".py":
            named = [name for name in _imports(path) if re.match(r"vlmrl\.(processors|datasets)(\.|$)", name)]
            assert not named, f"{path} imports {named}: ask vlmrl.plugins for it"


def test_the_top_level_holds_no_other_folder() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    folders = {path.split("/")[0] for path in tracked if "/" in path}
    assert folders <= {"vlmrl", "processors", "datasets", "examples", "tests", "assets", ".ci", ".github"}


def test_the_root_of_the_package_holds_what_every_part_uses() -> None:
    names = {path.stem for path in (ROOT / "vlmrl").glob("*.py")}
    assert names == {"__init__", "__main__", "cli", "errors", "parallel", "plugins", "types", "video_size"}


def test_modules_are_short() -> None:
    long = {str(path): n for folder in SOURCES for path in _files(folder) if (n := _num_lines(path)) > 400}
    assert not long


def test_no_module_has_a_generic_name() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    assert not [path for folder in SOURCES for path in _files(folder) if path.stem in vague]


def _num_lines(path: Path) -> int:
    return len((ROOT / path).read_text().splitlines())
