from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from made_runs import SETTINGS, evaluated, group, make_run, write_lines

from vlmrl.errors import ConfigError
from vlmrl.report.page import report, write_report
from vlmrl.report.transcript_lines import TRAINING

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}{% for %}\u2028\x1b[31m<!--"


class Page(HTMLParser):
    """Counts the elements of a page, and keeps the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        values = dict(attrs)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and data.strip():
            self.scripts.append(data)


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    loaded: dict[str, Any] = json.loads(match[1])
    return loaded


def test_the_page_holds_curves_responses_and_settings_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", images=2)
    size = write_report([folder], folder / "report.html", max_mib=15)
    assert (folder / "report.html").stat().st_size == size
    (run,) = data_of((folder / "report.html").read_text())["runs"]
    assert (run["name"], run["verb"], run["step"]) == ("run", "rl", 4)
    assert run["curves"]["reward/mean"] == [[1, 2, 3, 4], [0.25, 0.5, 0.75, 1], [], []]
    assert [(h["metric"], h["before"], h["now"]) for h in run["headlines"]] == [
        ("eval/toy/pass@1", 0.25, 0.75),
        ("reward/mean", 0.25, 1.0),
    ]
    assert run["changes"] == {"toy": {"first_step": 0, "last_step": 4, "total": 2, "gained": 2, "lost": 0}}
    assert {(g["set"], g["step"]) for g in run["groups"]} == {(TRAINING, s) for s in (1, 2, 3, 4)} | {
        ("toy", 0),
        ("toy", 4),
    }
    assert len(run["images"]) == 2
    changed = {s["name"]: s for s in run["settings"] if s["changed"]}
    assert changed["actor.adam.lr"]["value"] == "0.0001"
    assert "train.seed" not in changed


def test_hostile_text_is_data_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", text=HOSTILE.replace("{", "{{").replace("}", "}}"))
    line = group(4, 0, responses=1, text="x")
    line |= {
        "source": HOSTILE,
        "prompt": HOSTILE,
        "label": HOSTILE,
        "metadata": {HOSTILE: HOSTILE},
        "images": [HOSTILE],
    }
    line["responses"][0] |= {"parts": {HOSTILE: 1.0}, "problem": HOSTILE, "stop": HOSTILE, "text": HOSTILE}
    line["responses"][0]["messages"] = [{"role": HOSTILE, "text": HOSTILE, "images": [HOSTILE]}]
    write_lines(folder / "rollouts" / "step_000004.jsonl", [line])
    (folder / "config.yaml").write_text(f"{SETTINGS}eval:\n  dataset: {json.dumps(HOSTILE)}\n")
    (folder / "facts.json").write_text(
        json.dumps({"placement": [[HOSTILE] * 3], "end": {"state": "failed", "reason": HOSTILE}})
    )
    clean, hostile = Page(report([make_run(tmp_path / "clean")], max_mib=15)), Page(report([folder], max_mib=15))
    assert hostile.tags == clean.tags
    assert hostile.attributes == clean.attributes
    (run,) = json.loads(hostile.scripts[0])["runs"]
    shown = next(g for g in run["groups"] if g["step"] == 4)
    assert shown["responses"][0]["text"] == HOSTILE
    assert shown["source"] == HOSTILE


def test_a_hostile_name_of_the_folder_is_escaped(tmp_path: Path) -> None:
    page = Page(report([make_run(tmp_path / "a<img src=x onerror=alert(1)>")], max_mib=15))
    assert "img" not in page.tags


def test_the_policy_of_the_page_allows_its_own_scripts_and_no_request(tmp_path: Path) -> None:
    text = report([make_run(tmp_path / "run")], max_mib=15)
    page = Page(text)
    _, *scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts]
    assert len(scripts) == 2
    assert f"script-src {' '.join(hashes)};" in page.policy
    assert page.policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline';")
    assert "src" not in page.attributes


def test_the_scripts_never_parse_markup() -> None:
    assets = Path(report.__code__.co_filename).parent / "assets"
    for script in assets.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script.read_text()
        )


def test_secrets_of_urls_and_of_the_environment_are_not_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "0123456789abcdef")
    settings = SETTINGS.replace("remote_url: null", "remote_url: https://joe:hunter22@host/score?token=t0p5ecret")
    folder = make_run(tmp_path / "run", settings=settings, text="it is 0123456789abcdef {}")
    page = report([folder], max_mib=15)
    assert not [secret for secret in ("0123456789abcdef", "hunter22", "t0p5ecret") if secret in page]
    assert "it is •••" in page


SECRET = 'sk-a&b<c>\\"9'


def test_a_secret_with_characters_of_markup_is_in_no_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    folder = make_run(tmp_path / f"run {SECRET}", steps=1)
    line = group(1, 0, responses=1, text="x")
    line |= dict.fromkeys(("source", "prompt", "label"), SECRET) | {"metadata": {"a": [SECRET], "b": SECRET}}
    line["responses"][0] |= dict.fromkeys(("text", "problem", "stop"), SECRET)
    line["responses"][0] |= {"messages": [{"role": "user", "text": SECRET}]}
    line["responses"][0] |= {"trace": {"tokens": [*SECRET], "logprob": [-1.0] * len(SECRET)}}
    write_lines(folder / "rollouts" / "step_000001.jsonl", [line])
    (folder / "config.yaml").write_text(f"{SETTINGS}eval:\n  dataset: {json.dumps(SECRET)}\n")
    end = {"state": "failed", "reason": SECRET}
    (folder / "facts.json").write_text(json.dumps({"placement": [[SECRET] * 3], "versions": {"a": SECRET}, "end": end}))
    page = report([folder], max_mib=15)
    texts = [page, html.unescape(page), *_strings(data_of(page))]
    assert not [text for text in texts if SECRET in text or "sk-a" in text]
    assert "<title>run ••• · vlmrl</title>" in page


@pytest.mark.parametrize("secret", [SECRET, "https://joe:hunter22@host/a", "http://host/a?api_key=hunter22&b=1"])
def test_secrets_are_in_no_text_and_no_name_of_a_response(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    folder = make_run(tmp_path / "run", steps=13)
    line = group(1, 0, responses=2, text="x")
    line |= dict.fromkeys(("source", "prompt", "label"), secret) | {"metadata": {secret: [secret], "b": secret}}
    response = line["responses"][0]
    response |= dict.fromkeys(("text", "problem", "stop", "failure"), secret) | {"parts": {secret: 1.0}}
    response |= {"messages": [{"role": secret, "text": secret}, {"role": "assistant", "text": "x"}]}
    response |= {"trace": {"tokens": [*secret], "logprob": [-1.0] * len(secret)}}
    line["responses"][1]["trace"] = {"tokens": [f"see {secret}, x"], "logprob": [-1.0]}
    write_lines(folder / "rollouts" / "step_000001.jsonl", [line])
    for step in range(14):
        lines = [evaluated(step, 0, score=float(step), text="x")]
        write_lines(folder / "rollouts" / f"eval_{quote(secret, safe='')}_step_{step:06d}.jsonl", lines)
    page = report([folder], max_mib=15)
    texts = [page, html.unescape(page), *_strings(data_of(page))]
    assert not [text for text in texts if "sk-a" in text or "hunter22" in text]
    (run,) = data_of(page)["runs"]
    name = next(name for name in run["changes"] if name != "toy")
    assert "•••" in name
    assert f"12 of 14 evaluations of {name} are shown, evenly spread" in run["notes"]
    assert name in {g["set"] for g in run["groups"]}
    shown = next(g for g in run["groups"] if g["set"] == TRAINING and g["step"] == 1)["responses"][0]
    assert [message["role"] == "assistant" for message in shown["messages"]] == [False, True]
    assert list(shown["parts"].values()) == [1.0]


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in (*value, *value.values()) for text in _strings(item)]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else [str(value)]


@pytest.mark.parametrize("secret", ["images", "response", "responses", "0.0001", "finished", "base64"])
def test_a_secret_that_is_an_ordinary_word_leaves_the_page_whole(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", images=1, metrics={"policy/lr": 0.0001})
    (folder / "facts.json").write_text('{"end": {"state": "finished"}}')
    (before,) = data_of(report([folder], max_mib=15))["runs"]
    monkeypatch.setenv("POSTGRES_PASSWORD", secret)
    (run,) = data_of(report([folder], max_mib=15))["runs"]
    assert [run[name] for name in ("curves", "groups", "images", "status")] == [
        before[name] for name in ("curves", "groups", "images", "status")
    ]
    changed = [s["name"] for s, t in zip(run["settings"], before["settings"], strict=True) if s != t]
    assert changed == (["actor.adam.lr"] if secret == "0.0001" else [])


def test_a_page_of_text_that_grows_when_embedded_stays_below_its_limit(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, prompts=8, responses=8, text="<é" * 2000 + "{}")
    size = write_report([folder], tmp_path / "small.html", max_mib=1)
    assert 0.8 * 2**20 < size <= 2**20


def test_a_page_stays_below_its_limit(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=30, prompts=8, responses=16, images=8, text="word " * 400 + "{}")
    size = write_report([folder], tmp_path / "small.html", max_mib=1)
    assert 0.5 * 2**20 < size <= 2**20
    (run,) = data_of((tmp_path / "small.html").read_text())["runs"]
    steps = {g["step"] for g in run["groups"] if g["set"] == TRAINING}
    assert {1, 30} <= steps, "both ends of the run come first"
    assert any("prompts" in note for note in run["notes"])


def test_several_runs_get_names_that_tell_them_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "rl") for name in ("a", "b")]
    assert [run["name"] for run in data_of(report(folders, max_mib=15))["runs"]] == ["a/rl", "b/rl"]


def test_a_folder_without_a_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        report([tmp_path / "none"], max_mib=15)
    with pytest.raises(ConfigError, match="holds no run"):
        report([tmp_path], max_mib=15)


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2, images=1)
    with (folder / "rollouts" / "step_000001.jsonl").open("ab") as lines:
        lines.write(b'{"step": 1, "responses": [{"te\n\xff\xfe\n[]\n')
    (folder / "rollouts" / "media" / f"{0:032x}.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (folder / "config.yaml").write_text("# Written by vlmrl: vlmrl rl --config config.yaml repeats the run\n: {[\n")
    (folder / "facts.json").write_text("[1]")
    (folder / "parameters.tsv").write_text("part\ttrainable\tall\nvision\tx\t3\nlanguage\t1\t2\n")
    (run,) = data_of(report([folder], max_mib=15))["runs"]
    assert "3 lines of the transcripts cannot be read" in run["notes"]
    assert set(run["images"].values()) == {""}
    assert run["parameters"] == [["language", 1, 2]]


@pytest.mark.parametrize(
    ("facts", "has_model", "state"),
    [
        (None, True, "finished"),  # of a version without facts
        (None, False, "stopped"),
        ({"total_steps": 4}, False, "stopped"),  # killed
        ({"total_steps": 500}, True, "stopped"),  # killed; the model is of a run of fewer steps
        ({"total_steps": 4, "end": {"state": "finished"}}, True, "finished"),
    ],
)
def test_a_run_is_finished_only_if_it_says_so(
    facts: dict[str, Any] | None, has_model: bool, state: str, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run")
    if facts is not None:
        (folder / "facts.json").write_text(json.dumps(facts))
    if has_model:
        (folder / "model").mkdir()
    (run,) = data_of(report([folder], max_mib=15))["runs"]
    assert run["status"]["state"] == state


def test_a_write_that_fails_leaves_the_older_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    out = tmp_path / "out.html"
    out.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_report([folder], out, max_mib=15)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_assets_are_in_the_wheel() -> None:
    # The page is read from the package: what package-data leaves out is missing from an installed wheel.
    import tomllib

    root = Path(__file__).resolve().parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["vlmrl"]
    listed = {path for pattern in patterns for path in (root / "vlmrl").glob(pattern) if path.is_file()}
    assert {path for path in (root / "vlmrl" / "report" / "assets").rglob("*") if path.is_file()} <= listed


@pytest.mark.prove
def test_a_long_run_takes_seconds_and_little_memory(tmp_path: Path) -> None:
    metrics = {f"time/p{number}_s": float(number) for number in range(80)}
    text = "word " * 120 + "{}"
    folder = make_run(tmp_path / "run", steps=1000, prompts=32, responses=8, images=32, text=text, metrics=metrics)
    code = (
        "import resource, sys, time; from pathlib import Path; from vlmrl.report.page import write_report; "
        "begun = time.monotonic(); write_report([Path(sys.argv[1])], Path(sys.argv[2]), max_mib=15); "
        "print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)"
    )
    words = [sys.executable, "-c", code, str(folder), str(tmp_path / "report.html")]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    seconds, mib = map(float, out.split())
    print(f"{seconds:.1f} s, {mib:.0f} MiB")
    assert seconds < 20
    assert mib < 1024
