"""The conversations of an episode as a tree: each request continues what was sampled, or opens a conversation.

A client sends its whole history with every request. Where that history is a path of the tree, the next response
continues the tokens that were sampled on the path; they are not rendered or tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from vlmrl.agents.conversation import Conversation
from vlmrl.agents.gateway.chat import Call, ChatInput, Tools, keys_of
from vlmrl.plugins import Processor
from vlmrl.types import ChatMessage, Floats, Ints, Prompt, Segment, Turn

Reason = Literal["start", "edited", "history", "tools", "roles", "ambiguous"]
"""Why a request opens a conversation of its own.

`start`: it has no history. `edited`: an assistant message of its history was not sampled: the client has changed or
written it. `history`: earlier messages or images are others than those that its responses followed. `tools`: the tools
are others. `roles`: other messages than those of users and tools follow the last response. `ambiguous`: several
responses with different tokens look the same to the client.
"""
_BRIDGED = frozenset({"user", "tool"})
"""Roles of messages behind a response that continue its conversation."""

Open = Callable[[Sequence[ChatInput], Tools, Processor], Prompt]
"""Render the prompt of a new conversation. Raises DataError."""
Find = Callable[[Processor], "Place"]
"""Tokenize what is new in a request, and return where its response goes. Raises DataError."""


class Reply(NamedTuple):
    """A response as its client sees it."""

    text: str
    calls: tuple[Call, ...] = ()


@dataclass(eq=False)
class Node:
    """A response of the policy, with all that it followed."""

    number: int
    """In the order of sampling, over the tree."""
    parent: Node | None
    tools: str
    """Key of the tools."""
    before: tuple[ChatInput, ...]
    """Messages between the parent and this response; all messages of the prompt if there is no parent."""
    conversation: Conversation
    """All tokens up to the end of the response."""
    reply: Reply
    is_delivered: bool = False
    """It has reached the client: it was written to a client that was there, or a later request continues it."""
    reward: float = 0.0
    children: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = keys_of(self.before)

    @property
    def tokens(self) -> Ints:
        """The sampled tokens."""
        return self.conversation.last_response

    @property
    def logprobs(self) -> Floats:
        """Log-probs of the sampled tokens."""
        return self.conversation.last_logprobs

    @property
    def path(self) -> list[Node]:
        """The responses of its conversation, the first one first."""
        nodes: list[Node] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def matches(self, message: ChatInput) -> Literal["ids", "text"] | None:
        """Whether the client's assistant message is this response: by the ids of its calls, or by what it says.

        Text may differ in the spaces at its ends, and may be missing beside calls, as some clients drop it.
        """
        calls = self.reply.calls
        text, own = message.text.strip(), self.reply.text.strip()
        if [call.meaning for call in message.calls] != [call.meaning for call in calls]:
            return None
        if message.media or (text != own and (text or not calls)):
            return None
        has_ids = bool(calls) and [call.id for call in message.calls] == [call.id for call in calls]
        return "ids" if has_ids else "text"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where the next response goes."""

    prompt: Prompt
    """What the engine is to continue."""
    conversation: Conversation
    """The same, for `Tree.add`, which leaves it as it is."""
    parent: Node | None
    tools: str
    before: tuple[ChatInput, ...]
    reason: Reason | None
    """Why this is a new conversation; None if it is none."""


class Tree:
    """The responses of one episode."""

    def __init__(self, processor: Processor, open_prompt: Open) -> None:
        self._processor, self._open_prompt = processor, open_prompt
        self._prompts: dict[tuple[str, Hashable], Prompt] = {}
        """(tools, messages) -> prompt of a conversation."""
        self._first: list[Node] = []
        """The first responses of all conversations."""
        self.nodes: list[Node] = []
        """All responses, in the order of sampling."""

    def place(self, messages: Sequence[ChatInput], tools: Tools) -> Place:
        """Find where the response to this request goes. Raises DataError if the chat template rejects the messages."""
        return self.find(messages, tools)(self._processor)

    def find(self, messages: Sequence[ChatInput], tools: Tools) -> Find:
        """Find where the response to this request goes. The last message is not the assistant's.

        What is returned tokenizes; it may be called in another thread, with a processor that is that thread's own.
        """
        parent = self._match(messages, tools.key)
        if isinstance(parent, Node):
            _note_delivered(parent)
            return lambda processor: _continued(parent, messages, tools, processor)
        return lambda processor: self._opened(messages, tools, parent, processor)

    def open(self, place: Place) -> Reason | None:
        """Note that a response to this request is sampled. Returns why it opens a conversation, None if it opens none:
        another response to a prompt is a branch."""
        key = place.tools, keys_of(place.before)
        if place.parent is not None or key in self._prompts:
            return None
        self._prompts[key] = place.prompt
        return place.reason

    def add(self, place: Place, response: Segment, reply: Reply) -> Node:
        """Add a response: `response` is the engine's segment of the place's prompt and what it sampled."""
        conversation = place.conversation.copy()
        conversation.add_response(response)
        node = Node(len(self.nodes), place.parent, place.tools, place.before, conversation, reply)
        (self._first if place.parent is None else place.parent.children).append(node)
        self.nodes.append(node)
        return node

    @property
    def delivered(self) -> list[Node]:
        """The responses that reached the client, in the order of sampling: they are trained."""
        return [node for node in self.nodes if node.is_delivered]

    @property
    def dropped(self) -> list[Node]:
        """The responses that never reached the client."""
        return [node for node in self.nodes if not node.is_delivered]

    def segments(self) -> tuple[Segment, ...]:
        """Return a segment for each response that no other continues, the oldest first.

        A response is trained in the first segment that holds it, and is context in the others.
        """
        trained: set[int] = set()
        return tuple(_segment(leaf, trained) for leaf in self._leaves())

    def first_prompts(self) -> list[Prompt]:
        """Return the prompt with which each segment begins."""
        return [self._prompts[leaf.tools, leaf.path[0].keys] for leaf in self._leaves()]

    def messages(self, *, with_first_prompt: bool) -> tuple[ChatMessage, ...]:
        """Return the messages segment by segment, each once, for users; with or without those of the first prompt."""
        shown: set[int] = set()
        messages: list[ChatMessage] = []
        for leaf in self._leaves():
            for node in leaf.path:
                if node.number in shown:
                    continue
                if shown or with_first_prompt:
                    messages += [message.as_message() for message in node.before]
                shown.add(node.number)
                reply = ChatInput("assistant", (node.reply.text,), node.reply.calls)
                messages.append(reply.as_message(reward=node.reward))
        return tuple(messages)

    def _opened(
        self, messages: Sequence[ChatInput], tools: Tools, reason: Reason | None, processor: Processor
    ) -> Place:
        prompt = self._prompts.get((tools.key, keys_of(messages)))
        if prompt is None:
            prompt = self._open_prompt(messages, tools, processor)
        return Place(prompt, Conversation(prompt, self._processor), None, tools.key, tuple(messages), reason)

    def _leaves(self) -> Iterator[Node]:
        # A response that was continued has been delivered, so those that were not are leaves.
        return (node for node in self.nodes if node.is_delivered and not any(c.is_delivered for c in node.children))

    def _match(self, messages: Sequence[ChatInput], tools: str) -> Node | Reason:
        """Return the response that a request continues; else why there is none."""
        places = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not places:
            return "start"
        rest = messages[places[-1] + 1 :]
        if ends := self._ends(messages, places[-1], tools):
            if any(message.role not in _BRIDGED for message in rest):
                return "roles"
            return _choose(ends)
        if self._ends(messages, places[-1], None):
            return "tools"
        if all(any(node.matches(messages[i]) for node in self.nodes) for i in places):
            return "history"
        return "edited"

    def _ends(self, messages: Sequence[ChatInput], last: int, tools: str | None) -> list[Node]:
        """Return the responses that message `last` is, at the ends of paths that hold all messages up to it. `tools`
        None: with whatever tools."""
        keys = keys_of(messages[: last + 1])
        ends: list[Node] = []
        open_paths = [(0, [node for node in self._first if tools is None or node.tools == tools])]
        while open_paths:
            start, siblings = open_paths.pop()
            followed: dict[int, list[Node]] = {}
            """Position behind a response -> the responses that end there."""
            for node in siblings:
                place = start + len(node.before)
                if place <= last and messages[place].role == "assistant" and keys[start:place] == node.keys:
                    followed.setdefault(place, []).append(node)
            for place, nodes in followed.items():
                matched = _matching(nodes, messages[place])
                if place == last:
                    ends += matched
                else:
                    open_paths += [(place + 1, node.children) for node in matched]
        return ends


def _matching(siblings: Sequence[Node], message: ChatInput) -> list[Node]:
    """Return the siblings that an assistant message is: those with its ids, if there are any."""
    by = [(node, node.matches(message)) for node in siblings]
    return [node for node, match in by if match == "ids"] or [node for node, match in by if match]


def _choose(ends: Sequence[Node]) -> Node | Reason:
    """Return the response with the longest sampled path; of those the first, if they have equal tokens."""
    longest = max(len(node.path) for node in ends)
    ends = [node for node in ends if len(node.path) == longest]
    ends = [node for node in ends if node.is_delivered] or ends
    first = ends[0].conversation.tokens
    return ends[0] if all(np.array_equal(node.conversation.tokens, first) for node in ends[1:]) else "ambiguous"


def _continued(parent: Node, messages: Sequence[ChatInput], tools: Tools, processor: Processor) -> Place:
    num_before = sum(len(node.before) + 1 for node in parent.path)
    before = tuple(messages[num_before:])
    conversation = parent.conversation.copy()
    conversation.add(conversation.feedback([message.as_feedback() for message in before], processor))
    return Place(conversation.next_prompt, conversation, parent, tools.key, before, None)


def _note_delivered(node: Node) -> None:
    for earlier in node.path:
        earlier.is_delivered = True


def _segment(leaf: Node, trained: set[int]) -> Segment:
    """Return the sequence up to a response, without sampled tokens where responses are `trained` already; add the
    others to these."""
    path = leaf.path
    (whole,) = leaf.conversation.segments([node.reward for node in path])
    sampled = np.zeros_like(whole.sampled)
    turns: list[Turn] = []
    for node, turn in zip(path, whole.turns, strict=True):
        if node.number not in trained:
            sampled[turn.start : turn.end] = True
            turns.append(turn)
    trained.update(node.number for node in path)
    return replace(
        whole,
        sampled=sampled,
        logprobs=np.where(sampled, whole.logprobs, 0).astype(np.float32),
        versions=np.where(sampled, whole.versions, -1),
        turns=tuple(turns),
    )


def count_tokens(nodes: Sequence[Node]) -> int:
    """Return the number of sampled tokens of responses."""
    return sum(len(node.tokens) for node in nodes)
