"""Demonstrations are what an episode with the environment's best responses would be, token by token."""

from pathlib import Path

import numpy as np
import pytest

from vlmrl.agents.conversation import Conversation, Message, first_prompt
from vlmrl.config.data import Data
from vlmrl.data.columns import RowRequirements
from vlmrl.data.media import make_row_media
from vlmrl.data.rows import load_rows
from vlmrl.data.source import Source
from vlmrl.errors import ConfigError
from vlmrl.models.tiny import build
from vlmrl.types import Rollout

ENVIRONMENT = Path(__file__).parents[3] / "examples" / "agents" / "steer.py"
SPEC = f"demonstrations?environment={ENVIRONMENT}:make_small&size=200"


def test_rows_end_with_a_response_at_any_turn() -> None:
    rows = load_rows(SPEC, split="train", max_samples=999, seed=0)
    lengths = set()
    for row in rows:
        messages = row["input"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert {m["content"] for m in messages[1::2]} <= {"up", "down", "left", "right"}
        assert len(row["images"]) == len(messages) // 2
        lengths.add(len(row["images"]))
    assert {1, 2, 3, 4} <= lengths


def test_no_episode_is_in_two_splits() -> None:
    first = {
        split: {row["images"][0].tobytes() + str(row["input"]).encode() for row in rows}
        for split in ("train", "test")
        for rows in [load_rows(SPEC, split=split, max_samples=20, seed=0)]
    }
    again = load_rows(SPEC, split="train", max_samples=20, seed=0)
    assert {row["images"][0].tobytes() + str(row["input"]).encode() for row in again} == first["train"]
    assert first["train"] != first["test"]


def test_samples_have_the_tokens_of_the_episode(tmp_path: Path) -> None:
    model = str(build("qwen2_5_vl", tmp_path / "model", size="micro"))
    data = Data(prompt_dataset=SPEC, max_len=768, max_images_per_prompt=12)
    source = Source(
        model=model,
        trust_remote_code=False,
        data=data,
        evaluation=None,
        seed=0,
        requirements=RowRequirements(answer=True),
    )
    rows = load_rows(SPEC, split="train", max_samples=200, seed=0)
    prompts, _ = source.draw(20)
    processor = source.processor
    num_turns = set()
    for prompt in prompts:
        row = rows[int(prompt.source.rpartition(":")[2])]
        *messages, target = row["input"]
        images = iter(make_row_media(row["images"], processor=processor, columns=data))
        parts = [[p.get("text") or next(images) for p in m["content"]] for m in messages[::2]]
        start = first_prompt(parts[0], processor=processor, columns=data, index=0, source="")
        conversation = Conversation(start, processor, history="keep")
        for message, content in zip(messages[1::2], parts[1:], strict=True):
            ids = [*processor.tokenizer(message["content"]).input_ids, processor.eos_token_ids[0]]
            tokens = np.concatenate([conversation.next_prompt.tokens, ids])
            sampled = np.arange(len(tokens)) >= len(tokens) - len(ids)
            media = conversation.next_prompt.media
            logprobs = np.zeros(len(tokens), dtype=np.float32)
            rollout = Rollout.of_response(
                tokens, sampled, logprobs, version=0, text="", finish_reason="stop", media=media
            )
            conversation.add_response(rollout.segments[0])
            conversation.add(conversation.feedback([Message(content)]))
        assert conversation.next_prompt.tokens.tolist() == prompt.tokens.tolist()
        assert [m.hash for m in conversation.next_prompt.media] == [m.hash for m in prompt.media]
        assert prompt.answer == target["content"]
        num_turns.add(len(parts))
    assert len(num_turns) > 2


def test_an_environment_without_demonstrations_is_refused() -> None:
    spec = f"demonstrations?environment={ENVIRONMENT.with_name('text_game.py')}:make"
    with pytest.raises(ConfigError, match="has no method best"):
        load_rows(spec, split="train", max_samples=9, seed=0)
