"""An episode behind the gateway: the requests of one key, within the limits of a conversation."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from vlmrl.agents.gateway.bodies import ChatBody, RawMessage, RefusedError, read_body
from vlmrl.agents.gateway.chat import Call, ChatInput, Tools
from vlmrl.agents.gateway.images import Images
from vlmrl.agents.gateway.replies import Choice, Completion
from vlmrl.agents.gateway.serving import Serving
from vlmrl.agents.gateway.tree import Node, Place, Reply, Tree, count_tokens
from vlmrl.agents.tool_calls import ToolCall, ToolCallParser
from vlmrl.data.conversations import with_media
from vlmrl.errors import ConfigError, DataError, VlmrlError
from vlmrl.plugins import Processor
from vlmrl.rewards.bounds import problem_of_reward
from vlmrl.types import Prompt, Rollout, Sampling, StopReason

NUM_LARGE_BODIES = 4
"""Large requests of an episode that are in memory at a time, until they are parsed; others wait."""
_CHARS_OF_PART = 16
"""A message or part takes about as long to render as so many characters."""
_BYTES_OF_TOKEN = 40
"""Memory of a token of a conversation: its id twice, log-prob, version and mark."""


@dataclass(eq=False)
class Pending:
    """A request that is in progress, or has been responded to."""

    body: ChatBody
    """Without messages."""
    digest: bytes
    """Of the request as it was sent."""
    id: str
    created: int
    begun: asyncio.Future[None]
    """Done when the engine begins to respond."""
    task: asyncio.Task[Completion]
    num_waiting: int = 0
    """Clients that wait for it."""
    is_delivered: bool = False


class BusyClock:
    """Seconds in which at least one of an episode's requests was with the engine."""

    def __init__(self) -> None:
        self._num_running, self._since, self._total = 0, 0.0, 0.0

    def __enter__(self) -> None:
        if not self._num_running:
            self._since = time.monotonic()
        self._num_running += 1

    def __exit__(self, *_: object) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._total += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._total + (time.monotonic() - self._since if self._num_running else 0.0)


class GatewayEpisode:
    """The requests of one key, and the tree of their conversations. Belongs to one event loop.

    Args:
        row: the data's row: index, source, label and metadata of all prompts.
        sampling: settings of all responses.
        number: the episode in its group.
        attempt: how many times it was played before.
    """

    def __init__(self, serving: Serving, row: Prompt, sampling: Sampling, *, number: int = 0, attempt: int = 0) -> None:
        self._serving, self._row, self._sampling = serving, row, sampling
        self._number, self._attempt = number, attempt
        self.tree = Tree(serving.processor, self._open)
        self.counts: Counter[str] = Counter()
        self.clock = BusyClock()
        self.limit: StopReason | None = None
        """The limit that a request would have exceeded."""
        self.failure: asyncio.Future[VlmrlError] = asyncio.get_running_loop().create_future()
        """An error of the engine, which no request can survive."""
        self._ids = itertools.count()
        self._pending: dict[str, Pending] = {}
        """Id of a completion -> its request, unless that has failed."""
        self.large_bodies = asyncio.Semaphore(NUM_LARGE_BODIES)
        self._num_reading = self._num_running = self._num_responses = self._num_tokens = 0
        self._asked: Counter[bytes] = Counter()
        """How often each prompt was asked."""
        self._images = Images(serving)
        self._finish_reasons: dict[int, str] = {}
        self._is_closed = False

    @property
    def num_running(self) -> int:
        """Requests in progress."""
        return self._num_running

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that its conversations and images take."""
        return _BYTES_OF_TOKEN * self._num_tokens + self._images.num_bytes

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a request whose body is on its way. Raises RefusedError if too many are."""
        self._check_flood(self._num_reading)
        self._num_reading += 1
        try:
            yield
        finally:
            self._num_reading -= 1

    async def request(self, content: bytes, *, is_retry: bool) -> Pending:
        """Begin to respond to a request. One that a client's library sends again joins the first, or gets its reply.

        Raises:
            RefusedError: the request cannot be responded to.
        """
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if is_retry and (earlier := self._earlier(digest)) is not None:
            self.counts["replayed"] += 1
            return earlier
        self._check_flood(self._num_running)
        self._num_running += 1
        try:
            read = asyncio.to_thread(
                read_body, content, self._sampling, other_settings=self._serving.gateway.other_settings
            )
            body = await read
            self._check_open()
            created = int(time.time())
            completion_id = f"chatcmpl-{next(self._ids)}"
            begun = asyncio.get_running_loop().create_future()
            messages = list(body.messages)
            body = replace(body, messages=())
            task = asyncio.create_task(self._respond(body, messages, completion_id, created, begun))
        except BaseException:
            self._num_running -= 1
            raise
        pending = Pending(body, digest, completion_id, created, begun, task)
        self._pending[completion_id] = pending
        task.add_done_callback(lambda _: self._note_end(pending))
        return pending

    def add_reward(self, reward: float, completion_id: str | None) -> None:
        """Add a reward to the responses' last one, or to that of a completion. Raises RefusedError."""
        self._check_open()
        if completion_id is None:
            node = self.last
        else:
            pending = self._pending.get(completion_id)
            if pending is None or not pending.task.done():
                raise RefusedError(404, f"there is no response {completion_id}", param="response_id")
            node = pending.task.result().choices[-1].node
        if node is None:
            raise RefusedError(400, "there is no response yet that could have a reward")
        total = node.reward + reward
        if problem := problem_of_reward(total):
            raise RefusedError(400, f"the sum of the rewards is {total:g}, {problem}", param="reward")
        node.reward += reward

    def mark_delivered(self, pending: Pending) -> None:
        """Note that a client has the response, unless the episode has ended: what was dropped is counted by then."""
        if not self._is_closed:
            pending.is_delivered = True
            pending.task.result().mark_delivered()

    @property
    def last(self) -> Node | None:
        """The last response that reached the client; None if none did."""
        return self.tree.delivered[-1] if self.tree.delivered else None

    @property
    def last_is_cut(self) -> bool:
        """The last response that reached the client was cut at its longest length."""
        return self.last is not None and self._finish_reasons[self.last.number] == "length"

    @property
    def rendered(self) -> str:
        """The conversation of that response as one text with control tokens; empty without one."""
        if self.last is None:
            return ""
        conversation = self.last.conversation
        return conversation.rendered(self._serving.processor.decode(conversation.last_response))

    async def close(self) -> None:
        """End all requests in progress; count what was dropped. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        running = [one.task for one in self._pending.values() if not one.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.counts["dropped/aborted"] += len(running)
        self.counts["dropped/undelivered"] += len(self.tree.dropped)
        self.counts["dropped_tokens"] += count_tokens(self.tree.dropped)

    # ---- internals

    def _check_open(self) -> None:
        if self._is_closed:
            raise RefusedError(401, "the episode of this key is over", code="invalid_api_key")

    def _check_flood(self, num_requests: int) -> None:
        limit = self._serving.gateway.max_concurrent
        if num_requests >= limit:
            raise RefusedError(
                429,
                f"{limit} requests of this episode are in progress, as many as gateway.max_concurrent allows",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    def _earlier(self, digest: bytes) -> Pending | None:
        """Return the request that this is a retry of: rather one whose reply nobody has or waits for."""
        same = [one for one in self._pending.values() if one.digest == digest and not _failed(one.task)]
        return min(same, key=lambda one: (one.is_delivered, one.num_waiting), default=None)

    def _note_end(self, pending: Pending) -> None:
        self._num_running -= 1
        # Asks for the exception, too: asyncio would report that nobody has, where the client has disconnected.
        if _failed(pending.task):
            self._pending.pop(pending.id, None)

    async def _respond(
        self,
        body: ChatBody,
        messages: list[RawMessage],
        completion_id: str,
        created: int,
        begun: asyncio.Future[None],
    ) -> Completion:
        try:
            num_chars = self._measured(messages, body.tools)
            decoded = await self._images.decode(messages)
            messages.clear()  # they may be large, and the engine takes its time
            find = self.tree.find(decoded.messages, body.tools)
            place = await self._serving.contents.tokenize(num_chars, find)
            parser = self._serving.parser_of(body.tools) if body.parses_calls else None
            sampling = self._sampling_of(place.prompt, body)
        except (DataError, ConfigError) as error:
            raise RefusedError(400, str(error), param="messages") from error
        except RecursionError as error:
            raise RefusedError(400, "the request is nested too deeply") from error
        self.counts.update(f"overridden/{name}" for name in body.overridden)
        # What has been refused leaves nothing behind, however often it comes.
        self._images.keep(decoded.images)
        if (reason := self.tree.open(place)) is not None:
            self.counts[f"opened/{reason}"] += 1
        self._num_responses += body.n
        begun.set_result(None)
        try:
            with self.clock:
                group = await self._serving.sample(place.prompt, sampling)
            choices = tuple(self._choice(place, rollout, parser, body.stop) for rollout in group.rollouts)
        except DataError as error:
            raise RefusedError(400, str(error), param="messages") from error
        except VlmrlError as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise RefusedError(503, "the engine has failed") from error
        version = min((v for rollout in group.rollouts for v in rollout.versions), default=0)
        return Completion(completion_id, created, version, len(place.prompt.tokens), choices)

    def _choice(self, place: Place, rollout: Rollout, parser: ToolCallParser | None, stop: Sequence[str]) -> Choice:
        segment = rollout.segments[0]
        response = segment.tokens[len(place.prompt.tokens) :]
        text = rollout.text
        calls: tuple[Call, ...] = ()
        if parser is not None:
            parsed = parser.parse(response, prompt=place.prompt.request)
            self.counts["tool_errors"] += parsed.problem is not None
            self.counts["tool_calls"] += len(parsed.calls)
            calls = tuple(self._call(call, i, parser.text(response)) for i, call in enumerate(parsed.calls))
            text = parser.text_before(response) if calls else text
        ends = [place for place in (text.find(one) for one in stop) if place >= 0]
        node = self.tree.add(place, segment, Reply(text[: min(ends)] if ends else text, calls))
        self._finish_reasons[node.number] = rollout.finish_reason
        self._num_tokens += len(segment.tokens)
        return Choice(node, rollout.finish_reason)

    def _call(self, call: ToolCall, i: int, text: str) -> Call:
        """Return a call as the client sees it: with the id that the model wrote, else nine letters and digits."""
        name = f"{len(self.tree.nodes)}/{i}".encode()
        call_id = call.id if call.id in text else hashlib.blake2b(name, digest_size=5).hexdigest()[:9]
        return Call(call_id, call.name, json.dumps(call.arguments, ensure_ascii=False))

    def _measured(self, messages: Sequence[RawMessage], tools: Tools) -> int:
        """Return the number of characters of a request. Raises RefusedError if its text or its images cannot fit, which
        nobody need decode or tokenize then."""
        parts = [part for message in messages for part in message.parts]
        texts = [part for part in parts if isinstance(part, str)]
        words = [word for message in messages for word in message.words]
        num_chars, num_images = sum(map(len, [*texts, *words, tools.key])), len(parts) - len(texts)
        if not self._serving.contents.may_fit(num_chars):
            problem = f"{num_chars} characters, for which agent.context_len {self._serving.context_len} has no room"
            raise self._limited("context", f"the conversation has {problem}", "context_length_exceeded")
        if num_images and self._serving.processor.resize_factor is None:
            raise RefusedError(400, "the model takes text only, and no images", param="messages")
        if num_images > self._serving.max_images:
            raise self._too_many(num_images)
        return num_chars + _CHARS_OF_PART * (len(parts) + len(messages))

    def _open(self, messages: Sequence[ChatInput], tools: Tools, processor: Processor) -> Prompt:
        """Render the prompt of a new conversation. Raises DataError."""
        columns, media = self._serving.columns, tuple(item for message in messages for item in message.media)
        chat, num_images = [message.as_chat() for message in messages], len(media)
        rendered = processor.render(chat, num_images=num_images, columns=columns, tools=tools.functions, literal=True)
        tokens, request = processor.encode(rendered, [item.size for item in media])
        return replace(
            self._row,
            text=processor.readable(rendered),
            tokens=tokens,
            request=request,
            media=media,
            is_chat=True,
            messages=with_media(processor.messages(chat, num_images=num_images, columns=columns, literal=True), media),
        )

    def _sampling_of(self, prompt: Prompt, body: ChatBody) -> Sampling:
        """Return the settings of this prompt's responses. Raises RefusedError where limits leave room for none."""
        serving = self._serving
        room = serving.context_len - len(prompt.tokens)
        if room < 1:
            raise self._limited(
                "context",
                f"the conversation has {len(prompt.tokens)} tokens; agent.context_len {serving.context_len} leaves no "
                "room for a response",
                "context_length_exceeded",
            )
        if self._num_responses + body.n > serving.max_turns:
            raise self._limited(
                "turns",
                f"the episode has {self._num_responses} responses; agent.max_turns is {serving.max_turns}",
                "turn_limit_exceeded",
            )
        asked = hashlib.blake2b(prompt.tokens.tobytes(), digest_size=16).digest()
        name = asked + self._asked[asked].to_bytes(4, "little")
        self._asked[asked] += 1
        turn = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        room = min(room, body.max_tokens or room)
        seeded = self._sampling.of_turn(episode=self._number, attempt=self._attempt, turn=turn, max_new_tokens=room)
        return replace(seeded, n=body.n, stop=body.stop)

    def _too_many(self, num_images: int) -> RefusedError:
        problem = f"{num_images} images, more than agent.max_images {self._serving.max_images}"
        return self._limited("images", f"the conversation has {problem}", "image_limit_exceeded")

    def _limited(self, limit: StopReason, message: str, code: str) -> RefusedError:
        self.limit = limit
        return RefusedError(400, message, param="messages", code=code)


def _failed(task: asyncio.Task[Completion]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
