from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import evaluated, group, image_name, make_run, save_image, write_lines

from vlmrl.report.embedding import embedded_size
from vlmrl.report.followed import followed_prompts
from vlmrl.report.rollouts import MAX_STEPS, evenly, shown_rollouts
from vlmrl.report.transcript_lines import TRAINING, read_groups, transcript_files
from vlmrl.system.masking import Mask


def test_steps_are_the_first_the_last_and_some_evenly_between() -> None:
    assert evenly(range(11), 3) == [0, 5, 10]
    assert evenly([1, 2], 3) == [1, 2]


def test_the_best_the_worst_and_the_most_mixed_group_come_first(tmp_path: Path) -> None:
    groups = [group(1, number, responses=2, text="x") for number in range(30)]  # all mixed: rewards 1 and 0
    for number, rewards in ((7, (1.0, 1.0)), (11, (0.0, 0.0)), (13, (5.0, -5.0))):
        for response, reward in zip(groups[number]["responses"], rewards, strict=True):
            response["reward"] = reward
    groups[3]["left_out"] = True
    write_lines(tmp_path / "step_000001.jsonl", groups)
    shown = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({}))
    assert [g["index"] for g in shown.groups] == [0, 1, 2, 4, 5, 6, 7, 8, 11, 13]
    assert shown.notes == ["10 of the 30 prompts of these steps are shown"]


def test_evaluations_show_the_same_prompts_gained_and_lost(tmp_path: Path) -> None:
    for step in (0, 5):
        # Prompt 40 gains, prompt 41 loses, all others stay as they are.
        scores = {40: float(step > 0), 41: float(step == 0)}
        lines = [evaluated(step, number, score=scores.get(number, 0.5), text="x") for number in range(50)]
        write_lines(tmp_path / f"eval_a%2Fb_step_{step:06d}.jsonl", lines)
    shown = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({}))
    assert shown.changes == {"a/b": {"first_step": 0, "last_step": 5, "total": 50, "gained": 1, "lost": 1}}
    before, after = ([g["index"] for g in shown.groups if g["step"] == step] for step in (0, 5))
    assert before == after
    assert {40, 41, 0} <= set(before)


def test_a_long_run_shows_both_ends_and_says_what_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=200, prompts=1)
    shown = shown_rollouts(folder / "rollouts", max_bytes=10**7, max_side=64, mask=Mask({}))
    steps = {g["step"] for g in shown.groups if g["set"] == TRAINING}
    assert {1, 200} <= steps
    assert f"{MAX_STEPS} of 200 steps are shown, evenly spread" in shown.notes


def test_a_text_that_is_too_long_loses_its_middle(tmp_path: Path) -> None:
    line = group(1, 0, responses=1, text="x")
    line["responses"][0]["text"] = "a" * 10_000 + "b" * 10_000
    write_lines(tmp_path / "step_000001.jsonl", [line])
    (shown,) = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({})).groups
    text = shown["responses"][0]["text"]
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "[8,000 characters are not shown]" in text


def test_prompts_that_come_up_again_are_followed(tmp_path: Path) -> None:
    # Prompt 5 comes up at steps 3 and 90 and gains; prompts of other steps come up once.
    for step in range(1, 101):
        lines = [group(step, 1000 + step, responses=2, text="x")]
        if step in (3, 90):
            lines.append(group(step, 5, responses=1, text="x"))
            lines[-1]["responses"][0]["reward"] = float(step == 90)
        write_lines(tmp_path / f"step_{step:06d}.jsonl", lines)
    followed = followed_prompts([file for file in transcript_files(tmp_path) if file.set == TRAINING])
    assert {source: [file.step for file in files] for source, files in followed.items()} == {"toy:5": [3, 90]}
    shown = shown_rollouts(tmp_path, max_bytes=10**7, max_side=64, mask=Mask({}))
    assert [g["step"] for g in shown.groups if g["source"] == "toy:5"] == [3, 90]


def test_an_evaluation_set_called_training_is_no_training(tmp_path: Path) -> None:
    write_lines(tmp_path / "step_000001.jsonl", [group(1, 0, responses=1, text="x")])
    write_lines(tmp_path / "eval_training_step_000001.jsonl", [evaluated(1, 0, score=1.0, text="x")])
    shown = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({}))
    assert [g["set"] for g in shown.groups] == [TRAINING, "training"]


def test_steps_of_an_earlier_attempt_are_not_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    shown = shown_rollouts(folder / "rollouts", max_bytes=10**6, max_side=64, mask=Mask({}), until=3)
    assert {(g["set"], g["step"]) for g in shown.groups} == {(TRAINING, 1), (TRAINING, 2), (TRAINING, 3), ("toy", 0)}
    assert shown.changes == {}


def talk(number: int, images: Sequence[str]) -> dict[str, Any]:
    """A prompt with a conversation of a turn per image."""
    line = group(1, number, responses=1, text="x")
    line["responses"][0]["messages"] = [{"role": "user", "text": "<image>", "images": [name]} for name in images]
    return line


def test_images_of_messages_that_are_left_out_take_no_room(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for number in range(200):
        save_image(tmp_path / "media" / f"{image_name(number)}.png", seed=number, side=16)
    write_lines(tmp_path / "step_000001.jsonl", [talk(0, [image_name(number) for number in range(200)])])
    shown = shown_rollouts(tmp_path, max_bytes=10**7, max_side=64, mask=Mask({}))
    assert set(shown.images) == {image_name(n) for n in (*range(30), *range(170, 200))}


def test_images_of_turns_do_not_crowd_out_prompts(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for number in range(40):
        save_image(tmp_path / "media" / f"{image_name(number)}.png", seed=number)
    lines = [talk(number, [image_name(n) for n in range(10 * number, 10 * number + 10)]) for number in range(4)]
    write_lines(tmp_path / "step_000001.jsonl", lines)
    max_bytes = 100_000  # an image is 10 kB and more
    shown = shown_rollouts(tmp_path, max_bytes=max_bytes, max_side=64, mask=Mask({}))
    assert len(shown.groups) == 4
    assert shown.notes == [f"{40 - len(shown.images)} images of turns are not shown"]
    used = embedded_size([shown.groups, shown.images, shown.notes, shown.changes])
    assert used <= shown.num_bytes <= max_bytes
    assert max_bytes - shown.num_bytes < 20_000, "images of turns fill what is left"


def test_one_step_is_in_memory_at_a_time(tmp_path: Path) -> None:
    text = "a" * 30_000
    for step in range(1, 21):  # 48 MB in 20 steps, of which 10 prompts of 12 kB per response are kept
        groups = [group(step, number, responses=4, text=text) for number in range(20)]
        write_lines(tmp_path / f"step_{step:06d}.jsonl", groups)
    tracemalloc.start()
    shown = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {g["step"] for g in shown.groups} >= {1, 20}
    assert peak < 20e6


def long_talk(number: int, *, responses: int, turns: int, chars: int) -> dict[str, Any]:
    """A prompt with conversations of many long turns."""
    line = group(1, number, responses=responses, text="x")
    for r, response in enumerate(line["responses"]):
        roles = ("assistant", "user")
        text = "w" * (chars - 5)
        response["messages"] = [{"role": roles[t % 2], "text": f"{r:02d} {t:02d}{text}"} for t in range(turns)]
    return line


def test_of_long_conversations_a_page_keeps_parts(tmp_path: Path) -> None:
    for step in range(1, 4):  # 26 MB in 18 prompts
        groups = [long_talk(number, responses=8, turns=30, chars=6000) for number in range(6)]
        write_lines(tmp_path / f"step_{step:06d}.jsonl", groups)
    tracemalloc.start()
    shown = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6  # 18 prompts of 65 kB, one of 1.4 MB as read, and its JSON
    assert {g["step"] for g in shown.groups} == {1, 2, 3}
    sizes = [embedded_size(g) for g in shown.groups]
    assert max(sizes) <= 2**16
    assert len(shown.groups) == 18


def test_a_group_that_is_too_large_loses_middles_then_responses(tmp_path: Path) -> None:
    talk = long_talk(0, responses=20, turns=30, chars=6000)
    talk["responses"][0]["trace"] = {"tokens": ["x"] * 2000, "logprob": [-1.0] * 2000}
    talk["metadata"] = {f"name {number}": "y" * 100 for number in range(300)}
    talk |= {"source": "s" * 1000, "prompt": "p" * 300}
    write_lines(tmp_path / "step_000001.jsonl", [talk])
    (shown,) = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({})).groups
    trace = shown["responses"][0].pop("trace")
    assert len(trace["tokens"]) == 2000, "the step has no other"
    assert embedded_size(shown) <= 2**16
    assert shown["source"] == "s" * 1000
    assert len(shown["metadata"]) == 20
    assert len(shown["responses"]) == 8
    assert shown["more"] == 12
    first, *_, last = shown["responses"][0]["messages"]
    assert first["text"] == "00 00" + "w" * 195 + "\n[5,600 characters are not shown]\n" + "w" * 200
    assert last["text"].startswith("00 29")
    assert shown["responses"][0]["messages"][6]["text"] == "[18 messages are not shown]"


def test_traces_beyond_all_measure_are_left_out(tmp_path: Path) -> None:
    line = group(1, 0, responses=1, text="x")
    line["responses"][0]["trace"] = {"tokens": ["x"] * 50_000, "logprob": [-1.0] * 50_000}
    write_lines(tmp_path / "step_000001.jsonl", [line])
    (shown,) = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({})).groups
    assert "trace" not in shown["responses"][0]


def test_numbers_that_are_none_and_traces_of_another_form_are_left_out(tmp_path: Path) -> None:
    line = group(1, 0, responses=3, text="x")
    line["responses"][0] |= {"score": "nan", "reward": "inf", "advantage": None, "messages": [{"reward": "-inf"}]}
    line["responses"][1]["trace"] = {"tokens": ["a", "b"], "logprob": [-1, None], "trainer": [1], "value": ["x", {}]}
    line["responses"][2]["trace"] = {"tokens": "ab", "logprob": [-1, 2]}
    write_lines(tmp_path / "step_000001.jsonl", [line])
    (shown,) = shown_rollouts(tmp_path, max_bytes=10**6, max_side=64, mask=Mask({})).groups
    assert not {"score", "reward", "advantage"} & set(shown["responses"][0])
    assert [r.get("trace") for r in shown["responses"]] == [None, {"tokens": ["a", "b"], "logprob": [-1, None]}, None]


def test_lone_surrogates_are_read_and_odd_lines_are_not(tmp_path: Path) -> None:
    good = group(1, 0, responses=1, text="x") | {"prompt": "a\ud800b"}
    deep = '{"metadata": {"a": ' + "[" * 10**5 + "]" * 10**5 + "}}"
    (tmp_path / "step_000001.jsonl").write_bytes(f"{json.dumps(good)}\n{deep}\n[]\n".encode() + b'{"prompt": "\xff"}\n')
    first, *others = read_groups(tmp_path / "step_000001.jsonl")
    assert first is not None
    assert first.prompt == "a\ud800b"
    assert others == [None, None, None]
    assert followed_prompts([*transcript_files(tmp_path)] * 2) == {}


@pytest.mark.parametrize("name", ["../secret", "a/b", "", "x" * 300])
def test_an_image_is_a_name_in_the_folder_and_not_a_path(name: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, images=1)
    (folder / "rollouts" / "secret.png").write_bytes((folder / "rollouts" / "media" / f"{0:032x}.png").read_bytes())
    write_lines(folder / "rollouts" / "step_000001.jsonl", [group(1, 0, responses=1, text="x", images=[name])])
    assert shown_rollouts(folder / "rollouts", max_bytes=10**6, max_side=64, mask=Mask({})).images[name] == ""
