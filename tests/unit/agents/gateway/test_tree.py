"""The tree of an episode: each sampled token is trained in one segment, or its response never reached the client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from chat_templates import TOOL, text_processor
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vlmrl.agents.gateway.chat import Call, ChatInput, Tools
from vlmrl.agents.gateway.tree import Node, Reply, Tree
from vlmrl.config.data import Columns
from vlmrl.data.image_tokens import collapse
from vlmrl.data.media import Noise
from vlmrl.models.tiny import build
from vlmrl.plugins import Processor, processor
from vlmrl.types import Ints, Media, Prompt, Rollout

History = tuple[ChatInput, ...]
NO_TOOLS = Tools()


@dataclass
class Sampled:
    """What the engine sampled."""

    prompt: Ints
    tokens: list[int]
    logprobs: list[float]
    version: int


@dataclass
class Policy:
    """A tree whose responses are scripted, and what was sampled."""

    one: Processor
    tree: Tree = field(init=False)
    sampled: list[Sampled] = field(default_factory=list)
    opened: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = Tree(self.one, self.open)

    def open(self, messages: Sequence[ChatInput], tools: Tools, processor: Processor) -> Prompt:
        chat = [message.as_chat() for message in messages]
        media = tuple(item for message in messages for item in message.media)
        text = processor.render(
            chat, num_images=len(media), columns=Columns(), tools=list(tools.functions), literal=True
        )
        tokens, request = processor.encode(text, [item.size for item in media])
        return Prompt(3, "toy:3", text, tokens, request, None, media)

    def ask(
        self,
        messages: History,
        text: str = "yes",
        *,
        tools: Tools = NO_TOOLS,
        delivered: bool = True,
        cut: bool = False,
    ) -> Node:
        """Sample a response to this history."""
        place = self.tree.place(messages, tools)
        self.opened.append(self.tree.open(place))
        prompt = place.prompt
        assert int((self.one.token_types(prompt.request) == 1).sum()) == len(prompt.media)
        assert collapse(prompt.tokens, prompt.media, self.one).tolist() == prompt.request.tolist()
        response = self.one.tokenizer(text, add_special_tokens=False).input_ids
        response += [] if cut else [self.one.eos_token_ids[0]]
        number = len(self.sampled)
        logprobs = [-(number + k / 100) for k in range(1, len(response) + 1)]
        self.sampled.append(Sampled(prompt.tokens, response, logprobs, number))
        tokens = np.concatenate([prompt.tokens, np.array(response, dtype=np.int64)])
        start = len(prompt.tokens)
        rollout = Rollout.of_response(
            tokens,
            np.arange(len(tokens)) >= start,
            np.array([0.0] * start + logprobs, dtype=np.float32),
            text,
            "stop",
            number,
            prompt.media,
        )
        name, _, arguments = text.partition("(")
        is_call = bool(arguments)
        calls = (Call(f"call{number:05d}", name, arguments.removesuffix(")")),) if is_call else ()
        node = self.tree.add(place, rollout.segments[0], Reply("" if is_call else text, calls))
        node.is_delivered = delivered
        return node

    def check(self) -> None:
        """Sampled = trained in one segment + dropped."""
        segments = self.tree.segments()
        trained: dict[int, list[tuple[int, float]]] = {}
        for segment in segments:
            assert segment.turns, "a segment trains something"
            for turn in segment.turns:
                version = int(segment.versions[turn.start])
                assert version not in trained, "a response is trained once"
                one = self.sampled[version]
                trained[version] = list(
                    zip(
                        segment.tokens[turn.start : turn.end].tolist(),
                        segment.logprobs[turn.start : turn.end].tolist(),
                        strict=True,
                    )
                )
                assert segment.tokens[: turn.start].tolist() == one.prompt.tolist(), "it follows what it followed"
            assert not segment.logprobs[~segment.sampled].any()
            assert (segment.versions[~segment.sampled] == -1).all()
            num_patches = [self.one.num_tokens(item.size) for item in segment.media]
            assert int((self.one.token_types(segment.tokens) == 1).sum()) == sum(num_patches)
        dropped = {node.number for node in self.tree.dropped}
        assert dropped.isdisjoint(trained)
        assert dropped | trained.keys() == set(range(len(self.sampled)))
        for number, pairs in trained.items():
            one = self.sampled[number]
            assert [token for token, _ in pairs] == one.tokens
            assert np.allclose([p for _, p in pairs], one.logprobs)
        num_sampled = sum(len(one.tokens) for one in self.sampled)
        num_dropped = sum(len(node.tokens) for node in self.tree.dropped)
        assert sum(segment.num_sampled for segment in segments) + num_dropped == num_sampled


def user(*parts: str | Media) -> ChatInput:
    return ChatInput("user", parts)


def said(node: Node, **changes: Any) -> ChatInput:
    """The assistant message that a client makes of a response."""
    return replace(ChatInput("assistant", (node.reply.text,), node.reply.calls), **changes)


def result(node: Node, *parts: str | Media) -> ChatInput:
    return ChatInput("tool", parts, call_id=node.reply.calls[0].id, name=node.reply.calls[0].name)


QUESTION = (ChatInput("system", ("Be brief.",)), user("Which way?"))


@pytest.fixture(params=["chatml", "qwen3", "gemma"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return Policy(text_processor(request.param))


@pytest.fixture
def qwen() -> Policy:
    return Policy(text_processor("qwen3"))


def start(policy: Policy) -> History:
    """The first messages; Gemma's template takes no system message."""
    return QUESTION if policy.one.check_bridge().has_system_role else QUESTION[1:]


def test_a_history_continues_the_sampled_tokens_in_one_segment(policy: Policy) -> None:
    history = start(policy)
    first = policy.ask(history, " left ")
    history = (*history, said(first), user("Next?"))
    second = policy.ask(history, "right", cut=True)
    policy.ask((*history, said(second, parts=("right\n",)), user("And then?")), "up")
    policy.check()
    (segment,) = policy.tree.segments()
    assert len(segment.turns) == 3
    assert policy.opened == ["start", None, None]


def test_calls_are_matched_by_id_whatever_the_client_makes_of_their_json(qwen: Policy) -> None:
    tools = Tools((TOOL,))
    one = qwen.ask(QUESTION, 'zoom({"x": 1, "y": 2})', tools=tools)
    two = qwen.ask(QUESTION, 'zoom({"x": 1, "y": 2})', tools=tools)
    again = replace(two.reply.calls[0], arguments='{"y":2,"x":1}')
    qwen.ask((*QUESTION, said(two, calls=(again,)), result(two, "nothing")), "done", tools=tools)
    assert qwen.tree.nodes[-1].parent is two
    qwen.ask((*QUESTION, said(one, parts=()), result(one, "nothing")), "done", tools=tools)
    assert qwen.tree.nodes[-1].parent is one
    qwen.check()
    assert [len(segment.turns) for segment in qwen.tree.segments()] == [2, 2]


def test_branches_share_what_they_have_in_common(policy: Policy) -> None:
    history = start(policy)
    first = policy.ask(history, "left")
    one = policy.ask((*history, said(first), user("One?")), "1")
    two = policy.ask((*history, said(first), user("Two?")), "2")
    again = policy.ask((*history, said(first), user("Two?")), "three")
    assert one.parent is two.parent is again.parent is first
    policy.check()
    segments = policy.tree.segments()
    assert [len(segment.turns) for segment in segments] == [2, 1, 1]
    assert policy.one.decode(segments[1].tokens).count("left") == 1, "context in the later segment"
    texts = [message.text for message in policy.tree.messages(with_first_prompt=False)]
    assert texts == ["left", "One?", "1", "Two?", "2", "Two?", "three"]


def test_a_reply_that_never_reached_the_client_is_dropped_unless_it_is_continued(policy: Policy) -> None:
    history = start(policy)
    policy.ask(history, "lost", delivered=False)
    first = policy.ask(history, "left", delivered=False)
    assert policy.tree.segments() == ()
    assert [node.reply.text for node in policy.tree.dropped] == ["lost", "left"]
    policy.ask((*history, said(first), user("Next?")), "right", delivered=False)
    policy.check()
    (segment,) = policy.tree.segments()
    assert len(segment.turns) == 1
    assert [node.reply.text for node in policy.tree.dropped] == ["lost", "right"]


def test_why_a_conversation_is_opened(qwen: Policy) -> None:
    first = qwen.ask(QUESTION, "left")
    ask: Callable[..., Node] = lambda *messages, **more: qwen.ask(messages, "yes", **more)  # noqa: E731
    ask(*QUESTION, said(first, parts=("I said right.",)), user("Next?"))
    ask(QUESTION[0], user("Which way, sir?"), said(first), user("Next?"))
    ask(*QUESTION, said(first), user("Next?"), tools=Tools((TOOL,)))
    ask(*QUESTION, said(first), ChatInput("system", ("Be long.",)), user("Next?"))
    ask(*QUESTION, user("More."))
    assert qwen.opened == ["start", "edited", "history", "tools", "roles", "start"]
    before = len(qwen.opened)
    ask(*QUESTION, said(first, parts=("I said right.",)), user("Next?"))
    assert qwen.opened[before:] == [None], "the same request again is a second response to the same prompt"
    qwen.check()


def test_siblings_that_look_the_same_are_continued_if_their_tokens_are(qwen: Policy) -> None:
    one, two = qwen.ask(QUESTION, "left"), qwen.ask(QUESTION, "left")
    following = qwen.ask((*QUESTION, said(two), user("Next?")), "right")
    assert following.parent is one
    assert qwen.opened == ["start", None, None]
    qwen.ask(QUESTION, "left ")
    qwen.ask((*QUESTION, said(two), user("Next?")), "right")
    assert qwen.opened[-1] == "ambiguous"
    qwen.check()


def test_the_longest_sampled_history_is_continued(qwen: Policy) -> None:
    written = (user("Which way?"), ChatInput("assistant", ("left",)), user("Next?"))
    foreign = qwen.ask(written, "right")
    assert qwen.opened == ["edited"]
    first = qwen.ask(written[:1], "left")
    second = qwen.ask((written[0], said(first), written[2]), "right")
    assert second.parent is first
    third = qwen.ask((written[0], said(first), written[2], said(second), user("And?")), "up")
    assert third.parent is second
    assert foreign.children == []
    qwen.check()


@pytest.mark.parametrize("style", ["chatml", "qwen2_5_vl", "gemma"])
def test_a_new_conversation_shows_calls_and_results_as_sampled_ones_do(style: str) -> None:
    """These templates show no calls and take no results: both are text."""
    policy = Policy(text_processor(style))
    call = Call("call00001", "zoom", '{"x": 1}')
    place = policy.tree.place((user("Which way?"),), NO_TOOLS)
    text = '<tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call>'
    node = policy.ask((user("Which way?"),), text)
    node.reply = Reply("", (call,))
    history = (user("Which way?"), said(node), result(node, "nothing"))
    assert place.parent is None
    continued = policy.tree.place(history, NO_TOOLS)
    assert continued.parent is node
    written = policy.open(history, NO_TOOLS, policy.one)
    assert written.tokens.tolist() == continued.prompt.tokens.tolist()


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    folder = build("qwen2_5_vl", tmp_path_factory.mktemp("models") / "vlm", size="micro")
    return processor(str(folder), min_pixels=784, max_pixels=150_000)


def test_images_are_matched_by_hash_and_lie_in_order(vlm: Processor) -> None:
    policy = Policy(vlm)
    side = vlm.resize_factor or 0
    red, blue = Noise("red", (side, side)), Noise("blue", (2 * side, side))
    first = policy.ask((user("Look: ", red),), 'zoom({"x": 1})')
    history = (user("Look: ", red), said(first))
    second = policy.ask((*history, result(first, "here", blue)), "green")
    assert second.parent is first
    assert [item.hash for item in policy.tree.segments()[0].media] == ["red", "blue"]
    policy.ask((user("Look: ", blue), said(first), user("Next?")), "no")
    assert policy.opened == ["start", None, "history"]
    policy.check()


WORDS = ("yes", "no", "left ", 'zoom({"x": 1})', 'zoom({"x":  1})')


@hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_sampled_tokens_are_trained_once_or_dropped(vlm: Processor, data: st.DataObject) -> None:
    policy = Policy(vlm)
    side = vlm.resize_factor or 0
    pictures = [Noise(f"noise{k}", (k * side, side)) for k in (1, 2)]
    histories: list[History] = [(user("One?"),), (ChatInput("system", ("Short.",)), user("Two?", pictures[0]))]
    pick = lambda options: data.draw(st.sampled_from(options))  # noqa: E731
    for _ in range(data.draw(st.integers(1, 12))):
        history = pick(histories)
        node = policy.ask(
            history,
            pick(WORDS),
            tools=pick([NO_TOOLS, NO_TOOLS, Tools((TOOL,))]),
            delivered=pick([True, True, False]),
            cut=pick([True, False]),
        )
        reply = said(node)
        change = pick(["none", "none", "edited", "other arguments", "dropped text", "other ids", "earlier"])
        if change == "edited":
            reply = replace(reply, parts=("I never said so.",))
        elif change == "other arguments" and reply.calls:
            reply = replace(reply, calls=(replace(reply.calls[0], arguments='{"x": 2}'),))
        elif change == "dropped text" and reply.calls:
            reply = replace(reply, parts=())
        elif change == "other ids" and reply.calls:
            reply = replace(reply, calls=(replace(reply.calls[0], id="mine"),))
        elif change == "earlier":
            history = (user("Another question?"), *history[1:])
        follows = (
            result(node, *pick([("found",), ("found", pictures[1]), (pictures[0],)]))
            if reply.calls
            else user(*pick([("Next?",), (pictures[1], "Next?")]))
        )
        histories.append((*history, reply, follows))
    policy.check()
    assert policy.tree.segments() == () or len(policy.tree.delivered) > 0
