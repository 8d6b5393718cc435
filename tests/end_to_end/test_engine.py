"""Real vLLM on CPU: its log-probs equal the trainer's before and after every weight sync, and faults are detected."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engine_pair import (
    COLUMNS,
    EXACT,
    SAMPLING,
    Engines,
    Pair,
    PlantableEngine,
    Trainer,
    rollout_engine,
    sync,
)
from processes import command_line, engine_processes

from vlmrl import plugins
from vlmrl.config.vllm import Vllm
from vlmrl.data.media import InlineMedia
from vlmrl.errors import ClusterError, ConfigError, DataError, SyncError
from vlmrl.learning.weights import checkpoint_names
from vlmrl.models.weight_buckets import digest, fingerprint, pack_bucket
from vlmrl.rollout.settings import EngineSettings
from vlmrl.types import Group, Prompt, Segment

MODELS = [
    ("internvl", False),
    *[("qwen3_moe", False), ("qwen3_vl_moe", True)],
    *[("qwen3", True), ("qwen3", False)],
    *[("qwen3_vl", True), ("qwen3_vl", False)],
    *[("qwen2_5_vl", True), ("qwen2_5_vl", False)],
]
"""Family, and whether the embeddings are tied. The last is the one that the other tests use."""
OTHERS = [*[("glm4v", tied) for tied in (True, False)], ("smolvlm", True)]
"""Families whose proofs take longer than `make test` may."""
EXPERT_FAULTS = {
    "qwen3_moe": [
        ("PacksExpertsOnce", r"\S+experts\.\S+ holds \S+"),
        ("ScalesAnExpert", r"\S+layers\.1\.mlp\.experts\.2\.up_proj\.weight is scaled by 1\.01$"),
    ],
    "qwen3_vl_moe": [
        ("KeepsTheExperts", r"\S+layers\.0\.mlp\.experts\.gate_up_proj holds the weights from before$"),
        ("SwapsTwoExperts", r"\S+layers\.1\.mlp\.experts\.down_proj holds its own rows in another order"),
    ],
}
PAUSES_S = (0.1, 0.03, 0.3, 0.01, 1.0)
"""Tried in turn before a sync that is to find responses under way: how many tokens that is depends on the machine."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.stop()


@pytest.fixture
def vision(engines: Engines) -> Pair:
    return engines.pair("qwen2_5_vl")


# ---------------------------------------------------------------- the same function on both sides


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *[pytest.param(f, t, id=f"{f}-{'tied' if t else 'untied'}", marks=pytest.mark.prove) for f, t in OTHERS],
        *[pytest.param(f, t, id=f"{f}-{'tied' if t else 'untied'}") for f, t in MODELS],
    ],
)
def test_engine_and_trainer_agree_before_and_after_each_of_five_syncs(
    engines: Engines, family: str, tied: bool
) -> None:
    check_syncs(engines.pair(family, tied), family, tied=tied)


@pytest.mark.prove
def test_on_a_cpu_gemma_agrees_but_for_the_direction_of_images(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's attention on CPUs is causal over images, which is refused; with a trainer alike all else is equal."""
    with pytest.raises(ConfigError, match="is causal over"):
        engines.pair("gemma3", True)
    engines.stop()
    monkeypatch.setattr(plugins.plugin("processors", "gemma3").Gemma3Processor, "attends_both_ways", False)
    # vLLM knows the tower's weights by the names in files only.
    monkeypatch.setattr(Trainer, "weights", lambda self: checkpoint_names(self.net, [*self.net.named_parameters()]))
    check_syncs(engines.pair("gemma3", True), "gemma3", tied=True)


def check_syncs(pair: Pair, family: str, *, tied: bool) -> None:
    """Check that log-probs agree before and after syncs in which each part of the model has changed."""
    assert pair.difference() < EXACT
    last, num_groups = "", 3
    for version, part in enumerate(("vision", "projector", "language", "embeddings", "everything"), start=1):
        is_there = pair.trainer.change(part)
        if is_there:
            assert pair.difference() > 1e-3, f"a change of {part} must show before it is synced"
        num_groups += 3 * (1 + is_there)
        synced = pair.sync()
        assert synced == fingerprint({name: digest(name, w.detach()) for name, w in pair.trainer.weights()})
        assert (synced != last) == (is_there or not last)
        last = synced
        groups = pair.generate(pair.trainer.prompts())
        assert pair.trainer.difference(groups) < EXACT, part
        assert {v for group in groups for rollout in group.rollouts for v in rollout.versions} == {version}
    status = pair.run(pair.engine.status())
    assert (status["version"], status["fingerprint"], status["num_running"]) == (5, last, 0)
    assert status["num_groups"] == num_groups
    (read,) = pair.run(pair.engine.readback())
    assert (read["unread"], read["wrong"]) == ([], [])
    assert read["layers"] >= 18, "all of the smallest model"
    if family in EXPERT_FAULTS:
        check_faults(pair, EXPERT_FAULTS[family])
    elif tied:
        check_faults(pair, [("LeavesTheHeadBehind", r"\S+embed_tokens\.weight holds the weights from before$")])


def check_faults(pair: Pair, faults: Sequence[tuple[str, str]]) -> None:
    """Check that the readback detects each fault, and that the next correct weight sync succeeds."""
    for fault, message in faults:
        before = pair.engine.version
        pair.trainer.change("everything", by=0.02)
        pair.plant(fault)
        with pytest.raises(
            SyncError, match=rf"version {before + 1} to .* failed: read back from the layers.*, {message}"
        ):
            pair.sync()
        with pytest.raises(SyncError, match="read back from the layers"):
            pair.generate(pair.trainer.prompts())
        assert pair.engine.version == before
        pair.plant("Sound")
        pair.sync()


def test_a_response_ends_with_its_end_token_or_at_its_length(vision: Pair) -> None:
    groups = vision.generate([vision.trainer.prompt(i, "?") for i in range(64)], dataclasses.replace(SAMPLING, n=4))
    reasons = set()
    for group in groups:
        length = len(group.prompt.tokens)
        for rollout in group.rollouts:
            (segment,) = rollout.segments
            response = segment.tokens[length:]
            assert np.array_equal(segment.tokens[:length], group.prompt.tokens)
            assert segment.sampled.tolist() == [False] * length + [True] * len(response)
            assert (rollout.finish_reason == "stop") == (response[-1] in vision.trainer.tools.eos_token_ids)
            assert not set(response[:-1].tolist()) & set(vision.trainer.tools.eos_token_ids)
            assert len(response) == SAMPLING.max_new_tokens or rollout.finish_reason == "stop"
            assert rollout.text == vision.trainer.tools.decode(response)
            reasons.add(rollout.finish_reason)
    assert reasons == {"stop", "length"}


def test_vision_tokens_are_never_sampled_however_likely(vision: Pair) -> None:
    banned = list(vision.trainer.tools.banned_tokens)
    head = vision.trainer.net.lm_head.weight
    with torch.no_grad():
        kept = head[banned].clone()
        head[banned] *= 40.0
    vision.sync()
    groups = vision.generate([vision.trainer.prompt(i, "which?") for i in range(8)])
    assert not {int(t) for g in groups for r in g.segments for t in r.tokens[r.sampled]} & set(banned)
    assert vision.trainer.difference(groups) < EXACT
    with torch.no_grad():
        head[banned] = kept
    vision.sync()


def test_the_same_seed_and_prompt_give_the_same_responses_and_others_do_not(vision: Pair) -> None:
    def tokens_of(group: Group) -> list[list[int]]:
        return [segment.tokens[segment.sampled].tolist() for segment in group.segments]

    one, two = vision.trainer.prompt(1, "same?"), dataclasses.replace(vision.trainer.prompt(1, "same?"), index=2)
    first, second = (tokens_of(g) for g in vision.generate([one, two]))
    assert len({tuple(response) for response in first + second}) == 6
    assert tokens_of(vision.generate([one])[0]) == first
    assert tokens_of(vision.generate([one], dataclasses.replace(SAMPLING, seed=1))[0]) != first
    greedy = dataclasses.replace(SAMPLING, n=1, temperature=0.0)
    assert tokens_of(vision.generate([one], greedy)[0]) == tokens_of(vision.generate([two], greedy)[0])


def test_long_prompts_that_are_prefilled_in_pieces_draw_the_same_responses(vision: Pair) -> None:
    prompts = [vision.trainer.prompt(50 + i, "long " * 100, images=1) for i in range(8)]
    first, again = vision.generate(prompts), vision.generate(prompts)
    for a, b in zip(first, again, strict=True):
        assert [r.tokens.tolist() for r in a.segments] == [r.tokens.tolist() for r in b.segments]
    assert vision.trainer.difference(first) < EXACT


def test_a_request_in_flight_survives_a_sync_and_reports_its_older_version(vision: Pair) -> None:
    prompts = [vision.trainer.prompt(80 + i, "go on", images=1) for i in range(4)]
    # Their images are in the prefix cache at first, but no longer when the requests restart after the sync.
    vision.generate(prompts)
    long = dataclasses.replace(SAMPLING, max_new_tokens=400)

    async def both(before: int, pause_s: float) -> list[Group]:
        asking = [asyncio.ensure_future(vision.engine.generate(prompt, long)) for prompt in prompts]
        while (await vision.engine.status())["num_running"] < len(prompts):
            await asyncio.sleep(0.01)
        await asyncio.sleep(pause_s)
        await sync(vision.engine, vision.trainer.weights(), before + 1)
        late = asyncio.ensure_future(vision.engine.generate(vision.trainer.prompt(90, "late"), SAMPLING))
        return await asyncio.gather(*asking, late)

    for pause_s in PAUSES_S:
        before = vision.engine.version
        vision.trainer.change("everything")
        *early, late = vision.run(both(before, pause_s))
        if before in {v for group in early for r in group.rollouts for v in r.versions} and any(
            before + 1 in {v for r in group.rollouts for v in r.versions} for group in early
        ):
            break
    assert {v for r in late.rollouts for v in r.versions} == {before + 1}
    assert before in {v for group in early for r in group.rollouts for v in r.versions}
    assert vision.run(vision.engine.status())["num_mixed_groups"] >= 1
    assert vision.difference() < EXACT


def test_log_probs_go_before_responses_that_wait_to_begin(vision: Pair) -> None:
    """The engine decodes 128 responses at a time: of 400, more than 128 have not begun when the log-probs arrive."""
    prompts = [vision.trainer.prompt(170 + i, "go on", images=0) for i in range(100)]
    (group,) = vision.generate(prompts[:1])

    async def score_among() -> int:
        many = dataclasses.replace(SAMPLING, n=4, max_new_tokens=16)
        asking = [asyncio.ensure_future(vision.engine.generate(prompt, many)) for prompt in prompts]
        while (await vision.engine.status())["num_running"] < len(prompts):
            await asyncio.sleep(0.01)
        await vision.engine.score(group)
        waiting = sum(not task.done() for task in asking)
        await asyncio.gather(*asking)
        return waiting

    assert vision.run(score_among()) > 100 - 2 * 128 / 4


def interrupted_twice(vision: Pair, pause_s: float) -> tuple[list[Segment], dict[int, dict[str, torch.Tensor]]]:
    """Return responses during which two syncs came, with a pause before each, and the weights of each version."""
    first = vision.engine.version
    snapshots = {first: {name: weight.detach().clone() for name, weight in vision.trainer.weights()}}
    prompts = [vision.trainer.prompt(70 + i, "go on", images=1) for i in range(4)]
    long = dataclasses.replace(SAMPLING, max_new_tokens=400)

    async def interrupted() -> list[Group]:
        asking = [asyncio.ensure_future(vision.engine.generate(prompt, long)) for prompt in prompts]
        while (await vision.engine.status())["num_running"] < len(prompts):
            await asyncio.sleep(0.01)
        for version in (first + 1, first + 2):
            await asyncio.sleep(pause_s)
            vision.trainer.change("everything")
            snapshots[version] = {name: weight.detach().clone() for name, weight in vision.trainer.weights()}
            await sync(vision.engine, vision.trainer.weights(), version)
        return await asyncio.gather(*asking)

    return [segment for group in vision.run(interrupted()) for segment in group.segments], snapshots


def across_two_syncs(vision: Pair) -> float:
    """Return the largest difference between the log-prob of a token, in responses that two syncs interrupt, and that of
    the trainer with the weights of the token's version.
    """
    for pause_s in PAUSES_S:
        segments, snapshots = interrupted_twice(vision, pause_s)
        if any(set(segment.versions[segment.sampled]) == snapshots.keys() for segment in segments):
            break
    else:
        pytest.fail("no response was under way at both syncs")
    worst = 0.0
    for version, weights in snapshots.items():
        vision.trainer.load(weights)
        for segment in segments:
            gaps = np.abs(vision.trainer.logprobs(segment) - segment.logprobs)[segment.versions == version]
            worst = max(worst, float(gaps.max(initial=0.0)))
    return worst


def test_a_response_across_two_syncs_has_the_log_probs_of_each_tokens_version(
    vision: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision.sync()
    assert across_two_syncs(vision) < 1e-5

    async def keep() -> None:
        """Planted fault: requests go on with the keys and values of the old weights."""

    with monkeypatch.context() as planted:
        planted.setattr(vision.engine, "_reset_prefix_cache", keep)
        assert across_two_syncs(vision) > 1e-3
    vision.sync()
    assert vision.difference() < EXACT


# ---------------------------------------------------------------- planted faults


def test_a_sync_that_skips_a_tensor_is_refused_until_one_is_whole(vision: Pair) -> None:
    before = vision.engine.version
    vision.trainer.change("everything")
    with pytest.raises(
        SyncError, match=r"no weights arrived for .*layers\.1\.self_attn\.qkv_proj \(\d+ of \d+ elements\)"
    ):
        vision.sync(skip="layers.1.self_attn.k_proj.weight")
    assert vision.engine.version == before
    with pytest.raises(SyncError, match=rf"sync of version {before + 1} to rollout engine engine-0 failed"):
        vision.generate(vision.trainer.prompts())
    vision.sync()
    assert vision.difference() < EXACT
    with pytest.raises(SyncError, match=r"no weights arrived for visual\.patch_embed\.proj"):
        vision.sync(skip="visual.patch_embed.proj.weight")
    vision.sync()
    assert vision.difference() < EXACT


def test_a_tensor_that_the_engine_has_no_place_for_is_refused(vision: Pair) -> None:
    weights = [*vision.trainer.weights(), ("model.language_model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))]
    with pytest.raises(SyncError, match="failed"):
        vision.run(sync(vision.engine, weights, vision.engine.version + 1))
    vision.sync()
    assert vision.difference() < EXACT


LAYER_FAULTS = [
    ("Scales", r"\S+layers\.1\.mlp\.down_proj\.weight is scaled by 1\.01$"),
    ("KeepsALayer", r"\S+layers\.0\.self_attn\.o_proj\.weight holds the weights from before$"),
    ("KeepsTheTower", r"\S*visual\.\S+ holds the weights from before, and \d\d more are not as sent$"),
    ("SwapsKeysAndValues", r"\S+k_proj\.weight holds another layer's weights: \S+v_proj\.weight, and 1 more"),
    ("SwapsQueriesAndKeysOfTheTower", r"\S+attn\.qkv\.weight holds its own rows in another order$"),
]


def test_layers_that_do_not_hold_what_came_are_refused(vision: Pair) -> None:
    """A layer scaled by 1.01 after its digest was computed changes log-probs by less than the bounds."""
    vision.plant("Sound")
    vision.sync()
    check_faults(vision, LAYER_FAULTS)
    assert vision.difference() < EXACT


def test_in_bf16_columns_tell_what_a_product_cannot(engines: Engines) -> None:
    engines.stop()
    model = engines.folder("qwen2_5_vl", True)
    half = Half(model)
    with asyncio.Runner() as runner:
        pair = Pair(rollout_engine(model, kind=PlantableEngine, dtype="bf16"), half, runner)
        pair.run(pair.engine.start())
        for _ in range(3):
            half.change("everything", by=0.02)
            pair.sync()
        check_faults(pair, [*LAYER_FAULTS, ("LeavesTheHeadBehind", r"\S+embed_tokens\.weight holds the weights from")])
        pair.run(pair.engine.shutdown())


class Half(Trainer):
    """A trainer that sends its weights in bf16."""

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, weight.detach().bfloat16()) for name, weight in super().weights()]


def test_weights_without_a_beginning_are_refused(vision: Pair) -> None:
    with pytest.raises(SyncError, match="outside of an update"):
        vision.run(vision.engine.load_bucket(pack_bucket(vision.trainer.weights()[:1])))


def test_an_update_that_never_ended_does_not_hinder_the_next(vision: Pair) -> None:
    async def broken_off() -> None:
        await vision.engine.begin_update(99)
        await vision.engine.load_bucket(pack_bucket(vision.trainer.weights()[:5]))

    vision.run(broken_off())
    vision.sync()
    assert vision.difference() < EXACT


def test_a_stale_encoder_cache_shows_as_a_difference(vision: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget() -> None:
        """Planted fault: the engine keeps the embeddings of the old tower."""

    assert vision.difference() < EXACT
    vision.trainer.change("vision", by=0.5)
    with monkeypatch.context() as planted:
        planted.setattr(vision.engine, "_reset_encoder_cache", forget)
        vision.sync()
        assert vision.difference() > 1e-3
    vision.sync()
    assert vision.difference() < EXACT


def test_the_engine_sees_a_changed_tower_even_when_the_trainer_says_it_is_frozen(vision: Pair) -> None:
    vision.trainer.change("vision", by=0.5)
    vision.sync(vision_changed=False)
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
        vision.generate([prompt])


def test_dropped_pixels_are_an_error(vision: Pair) -> None:
    blind = dataclasses.replace(vision.trainer.prompt(3, "how many dots?", images=1), media=())
    with pytest.raises(SyncError, match=rf"test:3: vLLM read \d+ tokens where the trainer reads {len(blind.tokens)}"):
        vision.generate([blind])


def test_a_prompt_that_does_not_fit_is_named(vision: Pair) -> None:
    with pytest.raises(DataError, match="test:4: vLLM refused the prompt: "):
        vision.generate([vision.trainer.prompt(4, "long " * 200)])


def test_a_nucleus_is_reported_by_the_log_probs_of_the_model_itself(engines: Engines) -> None:
    engine = EngineSettings(
        model=str(engines.folder("qwen3")),
        vllm=Vllm(),
        columns=COLUMNS,
        trust_remote_code=False,
        dtype="fp32",
        max_model_len=64,
        name="engine-0",
        top_p=0.9,
    ).build()
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
    with pytest.raises(ClusterError, match=r"did not start within 0\.5 s; raise vllm\.start_timeout_s"):
        asyncio.run(rollout_engine(engines.folder("qwen3"), start_timeout_s=0.5).start())
    assert engine_processes(psutil.Process()) == others


def test_an_engine_whose_owner_is_killed_goes_with_it_and_leaves_nothing(engines: Engines) -> None:
    before, others = abandoned_segments(), set(psutil.Process().children(recursive=True))
    command = [sys.executable, __file__, str(engines.folder("qwen3"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().strip() == "ready"
        # The engine core may be a fork of the tests' fork server.
        started = set(psutil.Process().children(recursive=True)) - others
        assert any("VLLM" in command_line(process) for process in started)
        owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    assert abandoned_segments() <= before


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


def abandoned_segments() -> set[Path]:
    """Return named shared memory of vLLM and vlmrl that no running process maps: other runs may use theirs."""
    named = {path for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "vllm", "vlmrl"))}
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended, or belongs to another user
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            named -= {path for path in named if str(path) in maps}
    return {path for path in named if path.exists()}


async def be_busy(model: str) -> None:
    """Run an engine with requests in flight and an update in progress, until the process is killed."""
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
