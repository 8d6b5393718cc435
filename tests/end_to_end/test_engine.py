"""Real vLLM on CPU: its answers are the trainer's, before and after every publish, and faults do not pass unseen."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from vlmrl import plugins
from vlmrl.config.data import Columns
from vlmrl.config.vllm import Vllm
from vlmrl.data.media import InlineMedia
from vlmrl.errors import ClusterError, ConfigError, DataError, SyncError
from vlmrl.models import tiny
from vlmrl.models.weights import digest, fingerprint, pack_bucket
from vlmrl.rollout.engine import RolloutEngine
from vlmrl.rollout.sampling import Sampling
from vlmrl.types import Floats, Group, Prompt, Rollout

COLUMNS = Columns(max_pixels=200 * 200)
TEMPERATURE = 0.7
SAMPLING = Sampling(n=3, temperature=TEMPERATURE, top_p=1.0, max_new_tokens=12, seed=0)
EXACT = 5e-5
"""fp32 noise of small random models is 1e-6; the smallest real fault below is 1e-3."""

MODELS = [
    *[("qwen3", True), ("qwen3", False)],
    *[("qwen3_vl", True), ("qwen3_vl", False)],
    *[("qwen2_5_vl", True), ("qwen2_5_vl", False)],
]
"""Family, and whether the embeddings are tied. The last is the one that the other tests go on with."""


def rollout_engine(model: Path | str, **vllm: Any) -> RolloutEngine:
    return RolloutEngine(
        model=str(model),
        vllm=Vllm(**({"cpu_kv_cache_gib": 0.25} | vllm)),
        columns=COLUMNS,
        trust_remote_code=False,
        dtype="fp32",
        max_model_len=640,
        top_p=1.0,
        name="engine-0",
    )


class Trainer:
    """The trainer's side, in its plainest form: a Transformers model, one forward pass per answer."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.tools = plugins.processor(str(model), min_pixels=COLUMNS.min_pixels, max_pixels=COLUMNS.max_pixels)
        factory: Any = AutoModelForCausalLM if self.tools.resize_factor is None else AutoModelForImageTextToText
        self.net = factory.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()

    def prompt(self, index: int, question: str, *, images: int = 0, tools: plugins.Processor | None = None) -> Prompt:
        """A prompt whose images follow from `index`: asked again, it is the same prompt with the same image hashes."""
        tools = tools or self.tools
        rng = np.random.default_rng(index)
        side = tools.resize_factor or 0
        sizes = [(side * (4 + i), side * 4) for i in range(images)] if side else []
        media = tuple(
            InlineMedia(f"{index}.{i}", (w, h), rng.integers(0, 255, (h, w, 3), dtype=np.uint8))
            for i, (w, h) in enumerate(sizes)
        )
        text = tools.render(question, num_images=len(media), columns=COLUMNS)
        tokens, request = tools.encode(text, sizes)
        return Prompt(index, f"test:{index}", text, tokens, request, label=None, media=media)

    def prompts(self) -> list[Prompt]:
        return [self.prompt(i, "how many dots?", images=n) for i, n in enumerate((1, 0, 3))]

    @torch.no_grad()
    def logprobs(self, group: Group, rollout: Rollout) -> Floats:
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(rollout.tokens)[None]}
        if group.prompt.media:
            inputs |= self.tools.pixel_inputs(group.prompt.media)
            inputs["mm_token_type_ids"] = torch.from_numpy(self.tools.token_types(rollout.tokens))[None]
        logits = self.net(**inputs).logits[0]
        logits[:, list(self.tools.banned_tokens)] -= 100.0
        seen = torch.log_softmax(logits[:-1] / TEMPERATURE, dim=-1)
        found = seen.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
        return np.concatenate([[0.0], found.numpy()]) * rollout.sampled

    def difference(self, groups: Sequence[Group]) -> float:
        """The largest difference between the engine's log-probs and ours."""
        pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
        return max(float(np.abs(self.logprobs(g, r) - r.logprobs).max()) for g, r in pairs)

    @torch.no_grad()
    def change(self, part: str, *, by: float = 0.1) -> bool:
        """Add noise to `vision`, `projector`, `language` layers, `embeddings` or `everything`. Whether anything
        matched.
        """
        found = False
        for name, parameter in self.net.named_parameters():
            is_embedding = "embed_tokens" in name or "lm_head" in name
            group = "embeddings" if is_embedding else self.tools.parameter_group(name)
            if part in (group, "everything"):
                found = True
                parameter.add_(torch.randn_like(parameter) * by * max(float(parameter.std()), 0.01))
        return found

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.net.named_parameters())


@dataclasses.dataclass
class Pair:
    """An engine and a trainer of the same model, and the event loop that the engine lives in."""

    engine: RolloutEngine
    trainer: Trainer
    runner: asyncio.Runner

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def answers(self, prompts: Sequence[Prompt], sampling: Sampling = SAMPLING) -> list[Group]:
        async def ask() -> list[Group]:
            return await asyncio.gather(*(self.engine.generate(prompt, sampling) for prompt in prompts))

        return self.run(ask())

    def difference(self) -> float:
        return self.trainer.difference(self.answers(self.trainer.prompts()))

    def publish(self, *, version: int | None = None, vision_changed: bool = True, skip: str = "") -> str:
        """Send all weights, in three buckets, but for those whose name ends in `skip`."""
        weights = [(name, w) for name, w in self.trainer.weights() if not (skip and name.endswith(skip))]
        return self.run(
            publish(self.engine, weights, version or self.engine.version + 1, vision_changed=vision_changed)
        )


async def publish(engine: RolloutEngine, weights: Any, version: int, *, vision_changed: bool = True) -> str:
    await engine.begin_update(version)
    third = -(-len(weights) // 3)
    for start in range(0, len(weights), third):
        await engine.load_bucket(pack_bucket(weights[start : start + third]))
    return await engine.finish_update(vision_changed=vision_changed)


class Engines:
    """One engine at a time: asked for another, it stops the one before."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._key: tuple[str, bool] | None = None
        self._pair: Pair | None = None

    def folder(self, family: Any, tied: bool = False) -> Path:
        out = self._root / f"{family}-{tied}"
        return out if out.exists() else tiny.build(family, out, tied=tied, size="micro")

    def pair(self, family: str, tied: bool = False) -> Pair:
        if self._pair is None or self._key != (family, tied):
            self.stop()
            torch.manual_seed(0)
            model = self.folder(family, tied)
            pair = Pair(rollout_engine(model), Trainer(model), asyncio.Runner())
            pair.run(pair.engine.start())
            self._key, self._pair = (family, tied), pair
        return self._pair

    def stop(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.run(pair.engine.shutdown())
            pair.runner.close()
            assert not engine_processes(psutil.Process()), "an engine that was shut down left a process"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.stop()


@pytest.fixture
def vision(engines: Engines) -> Pair:
    return engines.pair("qwen2_5_vl")


# ---------------------------------------------------------------- the same function on both sides


@pytest.mark.parametrize(("family", "tied"), MODELS, ids=[f"{f}-{'tied' if t else 'untied'}" for f, t in MODELS])
def test_engine_and_trainer_agree_before_and_after_each_of_five_publishes(
    engines: Engines, family: str, tied: bool
) -> None:
    each = engines.pair(family, tied)
    assert each.difference() < EXACT
    last, num_asked = "", 3
    for version, part in enumerate(("vision", "projector", "language", "embeddings", "everything"), start=1):
        is_there = each.trainer.change(part)
        if is_there:
            assert each.difference() > 1e-3, f"a change of {part} must show before it is published"
        num_asked += 3 * (1 + is_there)
        said = each.publish()
        assert said == fingerprint({name: digest(name, w.detach()) for name, w in each.trainer.weights()})
        assert (said != last) == (is_there or not last)
        last = said
        groups = each.answers(each.trainer.prompts())
        assert each.trainer.difference(groups) < EXACT, part
        assert {rollout.version for group in groups for rollout in group.rollouts} == {version}
    status = each.run(each.engine.status())
    assert (status["version"], status["fingerprint"], status["num_running"]) == (5, last, 0)
    assert status["num_groups"] == num_asked


def test_an_answer_ends_with_its_end_token_or_at_its_length(vision: Pair) -> None:
    groups = vision.answers([vision.trainer.prompt(i, "?") for i in range(64)], dataclasses.replace(SAMPLING, n=4))
    reasons = set()
    for group in groups:
        length = len(group.prompt.tokens)
        for rollout in group.rollouts:
            answer = rollout.tokens[length:]
            assert np.array_equal(rollout.tokens[:length], group.prompt.tokens)
            assert rollout.sampled.tolist() == [False] * length + [True] * len(answer)
            assert (rollout.finish_reason == "stop") == (answer[-1] in vision.trainer.tools.eos_token_ids)
            assert not set(answer[:-1].tolist()) & set(vision.trainer.tools.eos_token_ids)
            assert len(answer) == SAMPLING.max_new_tokens or rollout.finish_reason == "stop"
            assert rollout.text == vision.trainer.tools.decode(answer)
            reasons.add(rollout.finish_reason)
    assert reasons == {"stop", "length"}


def test_vision_tokens_are_never_sampled_however_likely(vision: Pair) -> None:
    banned = list(vision.trainer.tools.banned_tokens)
    head = vision.trainer.net.lm_head.weight
    with torch.no_grad():
        kept = head[banned].clone()
        head[banned] *= 40.0
    vision.publish()
    groups = vision.answers([vision.trainer.prompt(i, "which?") for i in range(8)])
    assert not {int(t) for g in groups for r in g.rollouts for t in r.tokens[r.sampled]} & set(banned)
    assert vision.trainer.difference(groups) < EXACT
    with torch.no_grad():
        head[banned] = kept
    vision.publish()


def test_the_same_seed_and_prompt_give_the_same_answers_and_others_do_not(vision: Pair) -> None:
    def told(group: Group) -> list[list[int]]:
        return [rollout.tokens[rollout.sampled].tolist() for rollout in group.rollouts]

    one, two = vision.trainer.prompt(1, "same?"), dataclasses.replace(vision.trainer.prompt(1, "same?"), index=2)
    first, second = (told(g) for g in vision.answers([one, two]))
    assert len({tuple(answer) for answer in first + second}) == 6
    assert told(vision.answers([one])[0]) == first
    assert told(vision.answers([one], dataclasses.replace(SAMPLING, seed=1))[0]) != first
    greedy = dataclasses.replace(SAMPLING, n=1, temperature=0.0)
    assert told(vision.answers([one], greedy)[0]) == told(vision.answers([two], greedy)[0])


def test_long_prompts_that_are_prefilled_in_pieces_draw_the_same_answers(vision: Pair) -> None:
    prompts = [vision.trainer.prompt(50 + i, "long " * 100, images=1) for i in range(8)]
    first, again = vision.answers(prompts), vision.answers(prompts)
    for a, b in zip(first, again, strict=True):
        assert [r.tokens.tolist() for r in a.rollouts] == [r.tokens.tolist() for r in b.rollouts]
    assert vision.trainer.difference(first) < EXACT


def test_a_request_in_flight_survives_a_publish_and_says_its_older_version(vision: Pair) -> None:
    before = vision.engine.version
    prompts = [vision.trainer.prompt(80 + i, "go on", images=1) for i in range(4)]
    long = dataclasses.replace(SAMPLING, max_new_tokens=400)
    vision.trainer.change("everything")

    async def both() -> list[Group]:
        asking = [asyncio.ensure_future(vision.engine.generate(prompt, long)) for prompt in prompts]
        while (await vision.engine.status())["num_running"] < len(prompts):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await publish(vision.engine, vision.trainer.weights(), before + 1)
        late = asyncio.ensure_future(vision.engine.generate(vision.trainer.prompt(90, "late"), SAMPLING))
        return await asyncio.gather(*asking, late)

    *early, late = vision.run(both())
    assert {r.version for r in late.rollouts} == {before + 1}
    assert before in {r.version for group in early for r in group.rollouts}
    assert vision.run(vision.engine.status())["num_mixed_groups"] >= 1
    assert vision.difference() < EXACT


# ---------------------------------------------------------------- planted faults


def test_a_publish_that_skips_a_tensor_is_refused_until_one_is_whole(vision: Pair) -> None:
    before = vision.engine.version
    vision.trainer.change("everything")
    with pytest.raises(
        SyncError, match=r"no weights came for .*layers\.1\.self_attn\.qkv_proj \(\d+ of \d+ elements\)"
    ):
        vision.publish(skip="layers.1.self_attn.k_proj.weight")
    assert vision.engine.version == before
    with pytest.raises(SyncError, match=rf"publishing version {before + 1} to rollout engine engine-0 failed"):
        vision.answers(vision.trainer.prompts())
    vision.publish()
    assert vision.difference() < EXACT
    with pytest.raises(SyncError, match=r"no weights came for visual\.patch_embed\.proj"):
        vision.publish(skip="visual.patch_embed.proj.weight")
    vision.publish()
    assert vision.difference() < EXACT


def test_a_tensor_that_the_engine_has_no_place_for_is_refused(vision: Pair) -> None:
    weights = [*vision.trainer.weights(), ("model.language_model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))]
    with pytest.raises(SyncError, match="failed"):
        vision.run(publish(vision.engine, weights, vision.engine.version + 1))
    vision.publish()
    assert vision.difference() < EXACT


def test_weights_without_a_beginning_are_refused(vision: Pair) -> None:
    with pytest.raises(SyncError, match="without the beginning of an update"):
        vision.run(vision.engine.load_bucket(pack_bucket(vision.trainer.weights()[:1])))


def test_an_update_that_never_ended_does_not_hinder_the_next(vision: Pair) -> None:
    async def broken_off() -> None:
        await vision.engine.begin_update(99)
        await vision.engine.load_bucket(pack_bucket(vision.trainer.weights()[:5]))

    vision.run(broken_off())
    vision.publish()
    assert vision.difference() < EXACT


def test_a_stale_encoder_cache_shows_as_a_difference(vision: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget() -> None:
        """The planted fault: the engine keeps the embeddings of the old tower."""

    assert vision.difference() < EXACT
    vision.trainer.change("vision", by=0.5)
    with monkeypatch.context() as planted:
        planted.setattr(vision.engine, "_reset_encoder_cache", forget)
        vision.publish()
        assert vision.difference() > 1e-3
    vision.publish()
    assert vision.difference() < EXACT


def test_the_engine_sees_a_changed_tower_even_when_the_trainer_says_it_is_frozen(vision: Pair) -> None:
    vision.trainer.change("vision", by=0.5)
    vision.publish(vision_changed=False)
    assert vision.difference() < EXACT


def test_other_pixel_bounds_on_one_side_are_an_error(vision: Pair, engines: Engines) -> None:
    tools = plugins.processor(str(engines.folder("qwen2_5_vl")), min_pixels=3136, max_pixels=400 * 400)
    side = tools.resize_factor or 0
    size = (side * 10, side * 9)
    assert size[0] * size[1] > COLUMNS.max_pixels
    text = tools.render("how many dots?", num_images=1, columns=COLUMNS)
    tokens, request = tools.encode(text, [size])
    media = InlineMedia("big", size, np.zeros((size[1], size[0], 3), dtype=np.uint8))
    prompt = Prompt(0, "test:7", text, tokens, request, label=None, media=(media,))
    with pytest.raises(
        SyncError, match=rf"test:7: vLLM read \d+ tokens where the trainer reads {len(tokens)}; its 1 images"
    ):
        vision.answers([prompt])


def test_dropped_pixels_are_an_error(vision: Pair) -> None:
    blind = dataclasses.replace(vision.trainer.prompt(3, "how many dots?", images=1), media=())
    with pytest.raises(SyncError, match=rf"test:3: vLLM read \d+ tokens where the trainer reads {len(blind.tokens)}"):
        vision.answers([blind])


def test_a_prompt_that_does_not_fit_is_named(vision: Pair) -> None:
    with pytest.raises(DataError, match="test:4: vLLM refused the prompt: "):
        vision.answers([vision.trainer.prompt(4, "long " * 200)])


def test_a_nucleus_is_reported_by_the_log_probs_of_the_model_itself(engines: Engines) -> None:
    engine = RolloutEngine(
        model=str(engines.folder("qwen3")),
        vllm=Vllm(),
        columns=COLUMNS,
        trust_remote_code=False,
        dtype="fp32",
        max_model_len=64,
        name="engine-0",
        top_p=0.9,
    )
    assert engine.arguments()["logprobs_mode"] == "raw_logprobs"


# ---------------------------------------------------------------- life and death


def test_a_model_that_cannot_be_loaded_is_one_line(engines: Engines, capfd: pytest.CaptureFixture[str]) -> None:
    model = engines.folder("qwen3")
    others = engine_processes(psutil.Process())
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    try:
        with pytest.raises(ClusterError, match=r"engine-0 \(.*\) could not start: .*[Ss]afe") as caught:
            asyncio.run(rollout_engine(model).start())
    finally:
        (model / "model.safetensors").write_bytes(weights)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in "".join(capfd.readouterr())
    assert engine_processes(psutil.Process()) == others


def test_a_model_that_is_not_there_is_the_settings_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        asyncio.run(rollout_engine(tmp_path / "nothing").start())


def test_an_engine_that_takes_too_long_to_start_is_stopped(engines: Engines) -> None:
    others = engine_processes(psutil.Process())
    with pytest.raises(ClusterError, match=r"did not start within 2\.5 s; raise vllm\.start_timeout_s"):
        asyncio.run(rollout_engine(engines.folder("qwen3"), start_timeout_s=2.5).start())
    assert engine_processes(psutil.Process()) == others


def test_an_engine_whose_owner_is_killed_goes_with_it_and_leaves_nothing(engines: Engines) -> None:
    before = segments()
    command = [sys.executable, __file__, str(engines.folder("qwen3"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().strip() == "ready"
        cores = engine_processes(psutil.Process(owner.pid))
        assert cores
        owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(cores, timeout=10)
    assert not alive
    assert segments() <= before


def test_an_engine_that_dies_says_so(engines: Engines) -> None:
    vision = engines.pair("qwen2_5_vl")
    long = dataclasses.replace(SAMPLING, max_new_tokens=500)

    async def ask() -> None:
        asking = asyncio.ensure_future(vision.engine.generate(vision.trainer.prompt(0, "go on"), long))
        await asyncio.sleep(0.2)
        for process in engine_processes(psutil.Process()):
            process.kill()
        await asking

    with pytest.raises(ClusterError, match="rollout engine engine-0 has died"):
        vision.run(ask())
    engines.stop()


def segments() -> set[str]:
    """Shared memory with a name: vLLM's (psm_) and ours. Other programs of the machine may come and go beside it."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "vllm", "vlmrl"))}


def engine_processes(parent: psutil.Process) -> list[psutil.Process]:
    """What `parent` started for an engine: not Ray, which other tests of this session may have left running."""
    return [
        process
        for child in parent.children()
        if any(word in " ".join(child.cmdline()) for word in ("multiprocessing.spawn", "VLLM"))
        for process in (child, *child.children(recursive=True))
    ]


async def be_busy(model: str) -> None:
    """What the process that gets killed does: an engine that answers, in the middle of an update."""
    engine = rollout_engine(model)
    await engine.start()
    trainer = Trainer(Path(model))
    long = dataclasses.replace(SAMPLING, max_new_tokens=500, n=16)
    asking = [asyncio.ensure_future(engine.generate(trainer.prompt(i, "go on"), long)) for i in range(4)]
    await asyncio.sleep(0.5)
    await engine.begin_update(1)
    await engine.load_bucket(pack_bucket(trainer.weights()))
    print("ready", flush=True)
    await asyncio.gather(*asking)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(be_busy(sys.argv[1]))
