import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scripted_episodes import failed_rollout, make_episode_rollout, make_segment

from vlmrl.observe.transcripts import Transcripts
from vlmrl.types import ChatMessage, Episode, Floats, Group, Media, Pixels, Prompt, Rollout, Score


class Picture:
    size = (1, 1)

    def __init__(self, digest: str) -> None:
        self.hash = digest

    def fetch(self) -> Pixels:
        raise AssertionError("transcripts must not fetch pixels")


class MediaRecorder:
    """Records the images that it is asked to save."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, list[str]]] = []

    def __call__(self, folder: Path, media: Sequence[Media]) -> None:
        self.saved.append((folder.name, [item.hash for item in media]))


def group(index: int, texts: Sequence[str], *, media: tuple[Media, ...] = ()) -> Group:
    tokens = np.array([5, 6], np.int64)
    prompt = Prompt(index, f"shapes:{index}", "how many?", tokens, tokens, "4", media, {"family": "count"})
    return Group(prompt, tuple(response(text) for text in texts))


def response(text: str) -> Rollout:
    return Rollout.of_response(
        tokens=np.array([5, 6, 7, 2], np.int64),
        sampled=np.array([False, False, True, True]),
        logprobs=np.zeros(4, np.float32),
        text=text,
        finish_reason="stop",
        version=3,
    )


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_response_has_its_own_score_reward_and_advantage(tmp_path: Path) -> None:
    groups = [group(0, ["4", "5"]), group(1, ["six", "4"])]
    scores = [[Score(1.0, {"exact": 1.0}), Score(0.0, {"exact": 0.0})], [Score(0.0, failure="response"), Score(1.0)]]
    rewards = [floats(1, 0), floats(-0.5, 1)]
    advantages = [floats(0, 0, a, a) for a in (0.5, -0.5, -0.75, 0.75)]
    file = Transcripts(tmp_path / "rollouts", MediaRecorder()).write(7, groups, scores, rewards, advantages)
    assert file == tmp_path / "rollouts" / "step_000007.jsonl"
    first, second = lines(file)
    assert first == {
        "step": 7,
        "index": 0,
        "source": "shapes:0",
        "prompt": "how many?",
        "label": "4",
        "images": [],
        "metadata": {"family": "count"},
        "left_out": False,
        "responses": [
            {
                "text": text,
                "score": score,
                "parts": {"exact": score},
                "failure": None,
                "problem": None,
                "reward": score,
                "advantage": advantage,
                "tokens": 2,
                "finish_reason": "stop",
                "version": 3,
            }
            for text, score, advantage in (("4", 1.0, 0.5), ("5", 0.0, -0.5))
        ],
    }
    shown = [(a["reward"], a["advantage"], a["failure"]) for a in second["responses"]]  # type: ignore[attr-defined]
    assert shown == [(-0.5, -0.75, "response"), (1.0, 0.75, None)]


def test_groups_left_out_by_filtering_are_written_and_marked(tmp_path: Path) -> None:
    recorder, picture = MediaRecorder(), Picture("a")
    left_out = [(group(1, ["4", "5"], media=(picture,)), [Score(1.0), Score(1.0)], floats(1, 1))]
    scores = [[Score(1.0), Score(0.0, failure="infrastructure")]]
    file = Transcripts(tmp_path, recorder).write(
        7, [group(0, ["4", "5"])], scores, [floats(1, float("nan"))], [floats(0, 0, 1, 1)] * 2, left_out=left_out
    )
    kept, dropped = lines(file)
    assert (kept["left_out"], dropped["left_out"]) == (False, True)
    shown = [(a["score"], a["reward"], a["failure"]) for a in kept["responses"]]  # type: ignore[attr-defined]
    assert shown == [(1.0, 1.0, None), (None, None, "infrastructure")]
    assert [a["reward"] for a in dropped["responses"]] == [1.0, 1.0]  # type: ignore[attr-defined]
    assert "advantage" not in dropped["responses"][0]  # type: ignore[index]
    assert recorder.saved == [("media", ["a"])]


def test_each_image_is_saved_once(tmp_path: Path) -> None:
    recorder = MediaRecorder()
    transcripts = Transcripts(tmp_path, recorder)
    a, b, c = Picture("a"), Picture("b"), Picture("c")
    zero = [[Score(0.0)]] * 2
    first = transcripts.write_evaluation(
        0, "x", [group(0, ["1"], media=(a, b)), group(1, ["1"], media=(Picture("a"),))], zero
    )
    transcripts.write_evaluation(1, "x", [group(2, ["1"], media=(b,)), group(3, ["1"], media=(c,))], zero)
    transcripts.write_evaluation(2, "x", [group(4, ["1"], media=(c,))], zero[:1])
    assert recorder.saved == [("media", ["a", "b"]), ("media", ["c"])]
    assert [line["images"] for line in lines(first)] == [["a", "b"], ["a"]]


def test_an_evaluation_has_its_own_file_whatever_the_name_of_its_set(tmp_path: Path) -> None:
    file = Transcripts(tmp_path, MediaRecorder()).write_evaluation(
        20, "some/set?split=1", [group(0, ["4"])], [[Score(1.0)]]
    )
    assert file == tmp_path / "eval_some%2Fset%3Fsplit%3D1_step_000020.jsonl"
    assert "advantage" not in lines(file)[0]["responses"][0]  # type: ignore[index]


def test_responses_that_nothing_scored_have_no_score(tmp_path: Path) -> None:
    file = Transcripts(tmp_path, MediaRecorder()).write_evaluation(1, "generated", [group(0, ["4", "5"])], None)
    responses = lines(file)[0]["responses"]
    assert [(r["text"], r["score"], r["failure"]) for r in responses] == [("4", None, None), ("5", None, None)]  # type: ignore[index,attr-defined]


def test_evaluation_sets_with_similar_names_do_not_share_a_file(tmp_path: Path) -> None:
    transcripts = Transcripts(tmp_path, MediaRecorder())
    names = ["a/b", "a_b", "a%2Fb", "a:b", "a@b", "a__b", "a_b_step_000020"]
    for name in names:
        transcripts.write_evaluation(20, name, [group(0, [name])], [[Score(1.0)]])
    written = [lines(file)[0]["responses"][0]["text"] for file in tmp_path.iterdir()]  # type: ignore[index]
    assert sorted(written) == sorted(names)


def test_a_repeated_step_replaces_its_file(tmp_path: Path) -> None:
    transcripts = Transcripts(tmp_path, MediaRecorder())
    for text in ("first", "second"):
        transcripts.write_evaluation(1, "x", [group(0, [text])], [[Score(0.0)]])
    (file,) = tmp_path.iterdir()
    assert lines(file)[0]["responses"][0]["text"] == "second"  # type: ignore[index]


def test_any_response_text_gives_valid_json(tmp_path: Path) -> None:
    text = 'half \ud800, "quotes"\n\x00 \u2028 é'
    file = Transcripts(tmp_path, MediaRecorder()).write_evaluation(1, "x", [group(0, [text])], [[Score(0.0)]])
    (line,) = file.read_bytes().decode("utf-8").strip("\n").split("\n")
    assert json.loads(line)["responses"][0]["text"] == text


def test_a_conversation_is_written_turn_by_turn_with_its_images_and_rewards(tmp_path: Path) -> None:
    recorder, start, later = MediaRecorder(), Picture("a"), Picture("b")
    tokens = np.array([5, 6], np.int64)
    prompt = Prompt(0, "steer:0", "which way?", tokens, tokens, None, (start,))
    messages = (
        ChatMessage("assistant", ("left",), reward=0.5),
        ChatMessage("user", (later, "next?")),
        ChatMessage("assistant", ("stop",), reward=1.0),
    )
    segments = (
        make_segment([[5, 6], [7, 7]], [0.5], version=3, media=(start,)),
        make_segment([[5, 6, 8], [9]], [1.0], version=4, media=(start, later)),
    )
    rollouts = (
        replace(make_episode_rollout(*segments), episode=Episode("done", messages)),
        make_episode_rollout(make_segment([[5, 6], [4]], version=3), stop="raised", failure="response"),
        failed_rollout(prompt),
    )
    scores = [Score(1.5), Score(0.0, failure="response", problem="KeyError"), Score(0.0, failure="infrastructure")]
    advantages = [floats(0, 0, 1, 2), floats(0, 0, 0, 6), floats(0, 0, -1), floats(0, 0)]
    rewards = floats(1.5, 0, float("nan"))
    file = Transcripts(tmp_path, recorder).write(3, [Group(prompt, rollouts)], [scores], [rewards], advantages)
    (line,) = lines(file)
    done, raised, failed = line["responses"]  # type: ignore[misc]
    assert done["messages"] == [
        {"role": "assistant", "text": "left", "images": [], "reward": 0.5},
        {"role": "user", "text": "<image>next?", "images": ["b"], "reward": None},
        {"role": "assistant", "text": "stop", "images": [], "reward": 1.0},
    ]
    assert (done["advantage"], done["tokens"], done["versions"], done["stop"]) == (3.0, 3, [3, 4], "done")
    assert (raised["stop"], raised["problem"], raised["advantage"]) == ("raised", "KeyError", -1.0)
    assert (failed["stop"], failed["score"], failed["reward"], failed["tokens"]) == ("failed", None, None, 0)
    assert (failed["version"], failed["versions"]) == (None, [])
    assert recorder.saved == [("media", ["a", "b"])]
