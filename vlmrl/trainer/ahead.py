"""Rollouts that run ahead: engines sample the responses of later steps while the trainer learns from earlier ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from vlmrl.config.changes import plain_settings
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import EngineLossError
from vlmrl.system import stops
from vlmrl.trainer.protocols import Prompts, QueueingEngine, Report, Rewarder
from vlmrl.trainer.rollouts import training_sampling
from vlmrl.trainer.saved_groups import Plain, can_save, decode, encode, oldest_version
from vlmrl.trainer.schedule import Schedule
from vlmrl.types import Group, Metrics, Prompt

_CLOSE_S = 5.0
_POLL_S = 0.5
"""Interval at which a wait looks for a request to stop."""
_SAMPLED_BY = ("data.", "rollout.", "agent.", "gateway.", "train.agent_func_path", "train.seed")
"""Settings that responses depend on, besides the weights: these sections and names, without `rollout.batch_size`."""


class Ahead:
    """Rollouts of up to `train.async_queue_size` batches ahead of the step that trains on them; see `Schedule`.

    A thread draws prompts, starts them, and starts to score each group once it is complete. The loop waits in `take`
    for the groups of its step. Without `train.partial_rollout_enable` it also waits in `settle` until no response is
    under way, so that each is sampled from one version, and which one depends on nothing but the settings. With it,
    responses go on across weight syncs, and each of their tokens carries its own version.
    """

    def __init__(
        self,
        config: RlConfig,
        *,
        prompts: Prompts,
        engine: QueueingEngine,
        rewarder: Rewarder,
        report: Report,
        timeout_s: float,
    ) -> None:
        """Start nothing yet.

        Args:
            timeout_s: limit of the wait for the next group.
        """
        self._config, self._prompts, self._engine, self._rewarder = config, prompts, engine, rewarder
        self._report, self._timeout_s = report, timeout_s
        self._sampling = training_sampling(config)
        self._sampled_by = {
            name: value
            for name, value in plain_settings(config).items()
            if name.startswith(_SAMPLED_BY) and name != "rollout.batch_size"
        }
        self._thread: threading.Thread | None = None
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the thread does next; None ends it."""
        self._changed = threading.Condition()
        """Guards all fields below."""
        self._schedule: Schedule[Group] | None = None
        self._error: BaseException | None = None
        self._rows: dict[int, Prompt] = {}
        """Position -> the prompt of the row, of groups that no step has taken."""
        self._marks: list[tuple[int, dict[str, Any]]] = []
        """(position of a prompt, state of the stream before it), in order; the last is of the next prompt to draw."""
        self._saved: dict[int, Plain] = {}
        """Groups of the checkpoint whose prompts have not been drawn yet, by position."""
        self._taken = 0
        self._metrics: Metrics = {}

    def begin(self, *, last_step: int, num_prompts: int, version: int) -> None:
        """Begin a run, or resume it after `load_state`: its next step is `version + 1`.

        Groups of the checkpoint that the settings have made too old are sampled again.
        """
        schedule = self._schedule = Schedule(
            batch_size=self._config.rollout.batch_size,
            queue_size=self._config.train.queue_size,
            last_step=last_step,
            end=num_prompts,
            taken=self._taken,
            version=version,
        )
        self._saved = {
            position: group
            for position, group in self._saved.items()
            if schedule.is_fresh(position, oldest_version(group))
        }
        self._mark()
        self._thread = threading.Thread(target=self._dispatch, name="vlmrl-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. What is under way is abandoned."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    # ---- for the loop

    def take(self, count: int) -> tuple[list[Group], Metrics]:
        """Wait for the next `count` groups. Raises the errors of engines and data."""
        schedule = self._started()
        with self._report.phase("rollout"):
            with self._changed:
                schedule.admit(count)
            self._events.put(self._start)
            # Meanwhile the trainer does nothing, and holds the weights that an engine needs that starts again.
            self._wait_until(partial(schedule.is_ready, count), repairs=True)
        with self._changed:
            groups = schedule.take(count)
            self._taken = schedule.taken
            self._rows = {position: row for position, row in self._rows.items() if position >= self._taken}
            while len(self._marks) > 1 and self._marks[1][0] <= self._taken:
                del self._marks[0]
            metrics = self._metrics
            self._metrics = metrics | {"media/bytes_moved": 0.0}
            waiting = len(schedule.finished)
        return groups, metrics | {"async/groups_ahead": float(waiting)}

    def settle(self) -> None:
        """Wait for what is under way. A run that was asked to stop abandons it instead: it is sampled again after a
        resume, as after a kill. If all engines have died, what is under way waits for the next weights. Errors are
        left to `take`, so that the step that has been trained is finished first."""
        schedule = self._started()
        if not self._config.train.partial_rollout_enable:
            with self._report.phase("settle"):
                self._wait_until(
                    lambda: (
                        schedule.is_settled or self._error is not None or stops.is_stopping() or self._engine.is_down
                    )
                )
            if stops.is_stopping():
                self._events.put(None)  # what ends from now on has tokens of two versions

    def published(self, version: int) -> None:
        with self._changed:
            self._started().published(version)
        self._events.put(self._start)

    def _wait_until(self, is_done: Callable[[], bool], *, repairs: bool = False) -> None:
        """Wait until `is_done`. With `repairs`, engines that die meanwhile are started again."""
        last_change = time.monotonic()
        while True:
            with stops.interruptible_wait(), self._changed:
                if is_done():
                    return
                if self._error is not None:
                    raise self._error
                if self._changed.wait(_POLL_S):
                    last_change = time.monotonic()
            if repairs and self._engine.needs_repair:
                self._engine.repair()
                last_change = time.monotonic()
            if time.monotonic() - last_change > self._timeout_s:
                raise EngineLossError(
                    f"no engine finished a response within {self._timeout_s:.0f} s: raise "
                    "--vllm.generate_timeout_s or lower --rollout.max_new_tokens"
                )

    def _started(self) -> Schedule[Group]:
        assert self._schedule is not None, "the run has not begun"
        return self._schedule

    # ---- for checkpoints

    @property
    def num_rows(self) -> int:
        return self._prompts.num_rows

    def state(self) -> dict[str, Any]:
        """Return the finished groups, and the place in the stream from which the others are drawn again."""
        if self._schedule is None:
            self._mark()
        with self._changed:
            finished = {} if self._schedule is None else self._schedule.finished
            saved = {
                position: encode(group) for position, group in finished.items() if can_save(group, self._rows[position])
            } | self._saved
            return {
                "position": self._taken,
                "ahead": {
                    "stream": self._marks[0][1],
                    "sampled_by": self._sampled_by,
                    "groups": {str(place): saved[place] for place in sorted(saved)},
                },
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of this class, or of `InTurn`. Groups of other settings are sampled again."""
        ahead = state.get("ahead", {})
        self._prompts.load_state(ahead.get("stream", state))
        self._taken, self._marks = state["position"], []
        groups = ahead.get("groups", {}) if ahead.get("sampled_by") == self._sampled_by else {}
        self._saved = {int(position): group for position, group in groups.items()}

    def _mark(self) -> None:
        """Note the state of the stream before the next prompt."""
        state = self._prompts.state()
        with self._changed:
            if not self._marks or self._marks[-1][0] != state["position"]:
                self._marks.append((state["position"], state))

    # ---- in the thread

    def _dispatch(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                event()
        except BaseException as error:  # raised again in the loop's thread, which waits for groups
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _start(self) -> None:
        """Draw the prompts of all groups that may start, and start them. Groups of the checkpoint are finished already.

        The first prompts after a resume may be of groups that steps took before the checkpoint.
        """
        schedule = self._started()
        while (count := schedule.limit - self._marks[-1][0]) > 0:
            prompts, metrics = self._prompts.draw(min(count, self._config.rollout.batch_size))
            self._mark()
            with self._changed:
                bytes_moved = self._metrics.get("media/bytes_moved", 0.0) + metrics["media/bytes_moved"]
                self._metrics = metrics | {"media/bytes_moved": bytes_moved}
            for prompt in prompts:
                if prompt.index >= schedule.taken:
                    self._start_group(prompt)

    def _start_group(self, prompt: Prompt) -> None:
        with self._changed:
            self._rows[prompt.index] = prompt
        group = self._restored(prompt)
        if group is not None:
            self._finish(prompt.index, lambda: group)
            return
        self._engine.submit(
            prompt, self._sampling, lambda result: self._events.put(partial(self._finish, prompt.index, result))
        )

    def _restored(self, prompt: Prompt) -> Group | None:
        """Return the group of the checkpoint for this prompt; None without one."""
        with self._changed:
            saved = self._saved.pop(prompt.index, None)
        return None if saved is None else decode(saved, prompt)

    def _finish(self, position: int, result: Callable[[], Group | None]) -> None:
        group = result()
        if group is not None:
            self._rewarder.begin(group)
        with self._changed:
            if group is not None:
                self._started().finish(position, group)
            self._changed.notify_all()
