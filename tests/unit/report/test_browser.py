"""The page in a real browser: it opens from disk, asks nobody for anything, and text of models does nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from made_runs import evaluated, group, make_run, served, write_lines

from vlmrl.observe.lock import run_lock
from vlmrl.report.page import write_report
from vlmrl.report.server import LivePage, Server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

ATTACK = "document.title='pwned'"
HOSTILE = f"</script><script>{ATTACK}</script><img src=x onerror={ATTACK}>{{{{7*7}}}}\u2028\x1b[31m\u202e"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def quiet(browser: Browser) -> Iterator[Browser]:
    """The browser, which must not complain, and must ask for nothing but the page itself."""
    browser.requests.clear()
    browser.complaints.clear()
    yield browser
    assert browser.complaints == []
    assert len(set(browser.requests)) == 1
    assert browser.requests[0].startswith("file:///")


@pytest.fixture
def following(browser: Browser) -> Iterator[Browser]:
    """The browser, which leaves a page that reloads itself before the next test."""
    yield browser
    browser.open("about:blank")


def page_of(tmp_path: Path, *runs: Path) -> str:
    out = tmp_path / "report.html"
    write_report(runs, out, max_mib=15)
    return out.as_uri()


def test_the_overview_says_what_the_run_learnt(tmp_path: Path, quiet: Browser) -> None:
    quiet.open(page_of(tmp_path, make_run(tmp_path / "run", images=2)))
    assert quiet.texts(".main .figure") == ["25 %", "75 %"]
    assert quiet.texts(".main .pill") == ["+50 points"]
    assert len(quiet.texts(".example")) == 2
    quiet.wait("[...document.images].every(i => i.complete && i.naturalWidth === 64)")


def test_a_single_evaluation_is_no_result_of_training(tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/toy/pass@1": 0.375, "time/step_s": 20.0}\n')
    quiet.open(page_of(tmp_path, folder))
    assert quiet.texts(".head .figure") == ["38 %"]
    assert quiet.texts(".head .when") == ["before training"]
    assert quiet.texts(".head .arrow, .head .pill, .head svg") == []


def test_times_are_those_of_the_logged_steps(tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(tmp_path / "run")
    lines = [f'{{"step": {step}, "reward/mean": 0.5, "time/step_s": 10.0}}\n' for step in (10, 20, 30)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    quiet.open(page_of(tmp_path, folder))
    assert "30 s in the 3 logged steps of 30" in quiet.texts("main")[0]


def test_several_runs_differ_in_settings_within_a_verb(tmp_path: Path, quiet: Browser) -> None:
    def settings(verb: str, seed: int, dataset: str) -> str:
        line = f"# Written by vlmrl: vlmrl {verb} --config config.yaml repeats the run\n"
        return f"{line}train: {{seed: {seed}}}\n{verb}: {{only: {seed}}}\neval: {{dataset: {dataset}}}\n"

    runs = [
        make_run(tmp_path / name, settings=settings(verb, seed, dataset))
        for name, verb, seed, dataset in (("a", "rl", 1, "x"), ("b", "rl", 2, "x"), ("c", "sft", 3, "y"))
    ]
    quiet.open(page_of(tmp_path, *runs))
    titles = quiet.texts("main h2")
    assert titles[0] == "Runs"
    assert titles[-1] == "Settings that differ"
    assert quiet.evaluate("document.querySelector('.differing').open") is False
    assert quiet.texts(".differing th") == ["setting", "a", "b"]
    assert quiet.texts(".differing td") == ["train.seed", "1", "2", "rl.only", "1", "2"]
    assert "may be of different prompts: the runs differ in eval.dataset" in quiet.texts("main .card")[0]
    quiet.click("nav.runs button", "c")
    assert quiet.texts(".differing") == []


def test_examples_show_what_happened_to_more_prompts_first(tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    # Prompts 0 and 1 gain, 2 to 5 lose, 6 stays.
    for step in (0, 1):
        scores = [float((number < 2) == (step == 1)) if number < 6 else 0.5 for number in range(7)]
        lines = [evaluated(step, number, score=score, text="x") for number, score in enumerate(scores)]
        write_lines(folder / "rollouts" / f"eval_toy_step_{step:06d}.jsonl", lines)
    quiet.open(page_of(tmp_path, folder))
    rewards = [text.split(" ")[-1] for text in quiet.texts(".example .bubble .small")]
    assert rewards == ["1", "0", "0", "1", "1", "0", "0.5", "0.5"]


def test_curves_are_drawn_smoothed_filtered_and_zoomed(tmp_path: Path, quiet: Browser) -> None:
    quiet.open(page_of(tmp_path, make_run(tmp_path / "a", steps=60), make_run(tmp_path / "b", steps=30)) + "#curves")
    quiet.wait("document.querySelectorAll('.uplot canvas').length >= 3")
    assert "reward/mean" in " ".join(quiet.texts(".curve .name"))
    quiet.enter("input[type=search]", "pass@1")
    quiet.wait("document.querySelectorAll('.curve').length === 1")
    quiet.enter("#smooth", "0.2")
    quiet.click("#log")
    quiet.wait("document.querySelectorAll('.uplot canvas').length === 1")
    pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    assert quiet.evaluate(f"(c => {pixels}.some(v => v > 0))(document.querySelector('canvas'))")


def spiky_run(folder: Path, *, steps: int) -> Path:
    """A run in which one reward in ten is 1, and all others are 0, but for the last one, which is 0.25."""
    make_run(folder)
    rewards = [float(step % 10 == 7) for step in range(1, steps)] + [0.25]
    lines = [json.dumps({"step": step, "reward/mean": reward}) for step, reward in enumerate(rewards, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_long_curves_are_smoothed_to_their_mean(tmp_path: Path, quiet: Browser) -> None:
    quiet.open(page_of(tmp_path, spiky_run(tmp_path / "run", steps=5000)))
    quiet.click("nav button", "Curves")
    quiet.wait("document.querySelectorAll('.uplot canvas').length === 1")
    assert quiet.texts(".reading") == ["0.25"]
    assert any("mean of each stretch" in text for text in quiet.texts("main p"))
    quiet.evaluate("document.querySelector('canvas').id = 'old'")
    quiet.enter("#smooth", "0.3")
    quiet.wait("document.querySelector('canvas:not(#old)') !== null")
    box = "document.querySelector('.u-over').getBoundingClientRect()"
    x, y = quiet.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
    quiet.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    quiet.wait("document.querySelector('.reading').textContent.startsWith('step ')")
    smooth = float(quiet.texts(".reading")[0].rpartition(" ")[2])
    assert abs(smooth - 0.1) < 0.01


def test_figures_of_several_runs_have_the_colours_of_their_runs(tmp_path: Path, quiet: Browser) -> None:
    runs = [make_run(tmp_path / name, metrics=metrics) for name, metrics in (("a", {}), ("b", {"x/only": 0.5}))]
    quiet.open(page_of(tmp_path, *runs) + "#curves")
    quiet.enter("input[type=search]", "x/only")
    quiet.wait("document.querySelectorAll('.curve').length === 1")
    assert quiet.evaluate("[...document.querySelectorAll('.reading .entry')].map(e => e.title)") == ["b"]
    assert quiet.evaluate("document.querySelector('.reading .dot').style.background") == "var(--orange)"


def test_rollouts_are_browsed_and_filtered(tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(tmp_path / "run", steps=3, prompts=2, responses=4, images=2)
    failed = group(3, 5, responses=2, text="odd one {}")
    failed["responses"][0] |= {
        "failure": "response",
        "problem": "ValueError: no",
        "finish_reason": "length",
        "tokens": 99,
    }
    write_lines(folder / "rollouts" / "step_000003.jsonl", [group(3, 0, responses=4, text="the answer is {}"), failed])
    quiet.open(page_of(tmp_path, folder) + "#rollouts")
    assert quiet.texts(".controls .step") == ["step 3"]
    assert quiet.texts(".count") == ["2 of 2 prompts, 6 responses"]
    quiet.enter("input[aria-label='search text']", "odd one 6")
    assert quiet.texts(".count") == ["1 of 2 prompts, 1 responses"]
    quiet.enter("input[aria-label='search text']", "")
    quiet.enter("select[aria-label='which']", "failed")
    assert quiet.texts(".problem") == ["ValueError: no"]
    quiet.enter("select[aria-label='which']", "truncated")
    assert quiet.texts(".count") == ["1 of 2 prompts, 1 responses"]
    quiet.enter("select[aria-label='which']", "")
    quiet.enter(".range input", "0.5")
    assert quiet.texts(".count") == ["2 of 2 prompts, 3 responses"]
    quiet.enter(".range input", "")
    quiet.click("button[aria-label='earlier step']")
    assert quiet.texts(".controls .step") == ["step 2"]
    quiet.click(".group-card button", "this prompt at 3 steps")
    assert [text for text in quiet.texts(".meta") if "toy:0" not in text] == []
    assert len(quiet.texts(".group-card")) == 3
    quiet.click(".banner button")
    quiet.enter("select[aria-label='set']", "toy")
    assert quiet.texts(".count") == ["2 of 2 prompts, 2 responses"]
    quiet.click(".picture")
    assert quiet.evaluate("document.querySelector('dialog').open")


def test_tokens_are_shaded(tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    line = group(1, 0, responses=1, text="ab")
    line["responses"][0]["trace"] = {
        "tokens": ["a", "", "</b>"],
        "logprob": [-0.1, -3.0, None],
        "trainer": [-0.1, -2.0, None],
        "advantage": [1.0, -1.0, 0.0],
    }
    write_lines(folder / "rollouts" / "step_000001.jsonl", [line])
    quiet.open(page_of(tmp_path, folder) + "#rollouts")
    quiet.enter("select[aria-label='shading of tokens']", "gap")
    assert quiet.texts(".tokens span")[2] == "</b>"
    shades = quiet.evaluate("[...document.querySelectorAll('.tokens span')].map(e => e.style.background !== '')")
    assert shades == [True, True, False]
    assert "log-prob, engine: -3" in quiet.evaluate("document.querySelectorAll('.tokens span')[1].title")


@contextmanager
def going_on(run: Path, *, follow_s: float) -> Iterator[Server]:
    """Serve the page of a run that is not finished."""
    page = LivePage([run], max_mib=15, follow_s=follow_s)
    with run_lock(run, on_lost=pytest.fail, notify=pytest.fail), served(page) as server:
        yield server


def test_a_served_page_follows_the_run_and_keeps_the_readers_place(tmp_path: Path, following: Browser) -> None:
    run = make_run(tmp_path / "run")
    with going_on(run, follow_s=4.0) as server:
        following.open(f"{server.url}#curves")
        following.wait("document.querySelectorAll('.curve').length > 1")
        following.click(".group summary", "Time")
        following.enter("input[type=search]", "later")
        following.wait("document.querySelectorAll('.curve').length === 0")
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 9, "later/metric": 1.0}\n{"step": 10, "later/metric": 2.0}\n')
        following.wait("document.querySelectorAll('.curve').length === 1")
        assert following.evaluate("document.querySelector('input[type=search]').value") == "later"
        following.enter("input[type=search]", "")
        following.wait("document.querySelectorAll('.group').length > 1")
        following.wait(
            "[...document.querySelectorAll('.group')].some(e => !e.open && e.textContent.startsWith('Time'))"
        )


def test_a_served_page_waits_while_the_reader_types(tmp_path: Path, following: Browser) -> None:
    run = make_run(tmp_path / "run")
    with going_on(run, follow_s=0.5) as server:
        following.open(f"{server.url}#rollouts")
        following.wait("document.querySelector('input[type=search]') !== null")
        following.evaluate("document.querySelector('input[type=search]').focus()")
        following.send("Input.insertText", text="half a wo")
        time.sleep(2)
        assert following.evaluate("document.querySelector('input[type=search]').value") == "half a wo"
        following.evaluate("window.before = true; document.activeElement.blur()")
        following.wait("window.before === undefined")
        following.wait("document.querySelector('input[type=search]').value === 'half a wo'")


def test_hostile_text_is_inert_in_every_tab(tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(
        tmp_path / "run",
        steps=1,
        settings=f"# Written by vlmrl: vlmrl rl --config c\ndata: {{input_key: {json.dumps(HOSTILE)}}}\n",
    )
    line = group(1, 0, responses=1, text="x") | dict.fromkeys(("source", "prompt", "label"), HOSTILE)
    line |= {"metadata": {HOSTILE: HOSTILE}, "images": [HOSTILE]}
    line["responses"][0] |= {"text": HOSTILE, "problem": HOSTILE, "stop": HOSTILE, "parts": {HOSTILE: 1.0}}
    talk = {**line["responses"][0], "messages": [{"role": HOSTILE, "text": HOSTILE, "images": [HOSTILE]}]}
    line["responses"].append(talk)
    write_lines(folder / "rollouts" / "step_000001.jsonl", [line])
    write_lines(folder / "rollouts" / "eval_toy_step_000000.jsonl", [line])
    write_lines(folder / "rollouts" / "eval_toy_step_000001.jsonl", [line])
    facts = {
        "placement": [[HOSTILE] * 3],
        "versions": {HOSTILE: HOSTILE},
        "end": {"state": "failed", "reason": HOSTILE},
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    page = page_of(tmp_path, folder)
    for tab in ("overview", "curves", "rollouts", "settings"):
        quiet.open("about:blank")
        quiet.open(f"{page}#{tab}")
        assert quiet.evaluate("document.title") == "run · vlmrl"
        assert quiet.evaluate("document.scripts.length") == 3
        assert quiet.evaluate("[...document.images].every(i => i.src.startsWith('data:'))")
    quiet.requests[:] = [url.partition("#")[0] for url in quiet.requests if url != "about:blank"]
    assert "{{7*7}}" in quiet.evaluate("document.body.textContent")
    assert "\u241b[31m\u27e8202e\u27e9" in quiet.evaluate("document.body.textContent")


def test_the_page_fits_a_phone_in_both_themes(tmp_path: Path, quiet: Browser) -> None:
    page = page_of(tmp_path, make_run(tmp_path / "run", steps=3, images=2))
    quiet.resize(390, 800)
    for tab in ("overview", "curves", "rollouts", "settings"):
        quiet.open("about:blank")
        quiet.open(f"{page}#{tab}")
        assert quiet.evaluate("document.documentElement.scrollWidth") <= 390, tab
    light = quiet.evaluate("getComputedStyle(document.body).backgroundColor")
    quiet.click("header button[aria-label='light or dark']")
    assert quiet.evaluate("getComputedStyle(document.body).backgroundColor") != light
    quiet.resize(1300, 900)
    quiet.requests[:] = [url.partition("#")[0] for url in quiet.requests if url != "about:blank"]


@pytest.mark.parametrize(("steps", "limit_s"), [(100, 1.0), (5000, 2.0)])
@pytest.mark.prove
def test_long_runs_open_fast(steps: int, limit_s: float, tmp_path: Path, quiet: Browser) -> None:
    folder = make_run(
        tmp_path / "run",
        steps=steps,
        prompts=8,
        responses=8,
        images=8,
        metrics={f"time/p{i}_s": 1.0 * i for i in range(80)},
    )
    page = page_of(tmp_path, folder)
    for tab in ("overview", "curves", "rollouts"):
        quiet.open("about:blank")
        quiet.open(f"{page}#{tab}")
        quiet.wait("document.querySelector('main').children.length > 0")
        taken = quiet.scripting_s()
        print(f"{steps} steps, {tab}: {taken:.2f} s of scripting")
        assert taken < limit_s
    quiet.requests[:] = [url.partition("#")[0] for url in quiet.requests if url != "about:blank"]
