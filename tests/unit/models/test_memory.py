"""Memory estimates against numbers worked out by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.config.lora import Lora
from vlmrl.config.vllm import Vllm
from vlmrl.models import tiny
from vlmrl.models.adapter_plan import AdapterPlan
from vlmrl.models.load import skeleton
from vlmrl.models.memory import (
    engine_memory,
    pinned_bytes,
    reward_model_memory,
    saved_bytes,
    saved_per_token,
    sequence_bytes,
    trainer_memory,
)
from vlmrl.models.memory_parts import RoleMemory
from vlmrl.models.quantize import quantized_layers
from vlmrl.models.sizes import Blocks, Recurrence, Sizes, model_sizes, num_adapter_parameters, with_value_head
from vlmrl.plugins import ParameterGroup, plugin

GIB = 2**30
ARCHITECTURES = Path(__file__).with_name("architectures")

BLOCKS = Blocks(layers=2, hidden=4, intermediate=8, queries=4, keys=2)
RECURRENCE = Recurrence(layers=1, heads=2, keys=3, values=5, queries=6, taps=4)
SIZE = Sizes(
    parameters={"vision": 200, "language": 1000},
    quantized=600,
    linears={"q": (4, 6), "v": (2, 6)},
    vocabulary=16,
    text=BLOCKS,
    tower=Blocks(layers=1, hidden=2, intermediate=2, queries=2, keys=2),
    experts=300,
)
ADAPTER = AdapterPlan(
    rank=3,
    alpha=6.0,
    dropout=0.0,
    is_rank_stabilized=False,
    has_magnitude=False,
    targets=("q", "v"),
    groups=frozenset({"language"}),
)


def parts(
    ds: Ds,
    *,
    adapter: AdapterPlan | None = None,
    ranks: int = 1,
    tokens: int = 1,
    patches: int = 0,
    device: str = "cpu",
    **model: bool | str,
) -> dict[str, float]:
    made = Model.model_validate({"model_name_or_path": "m", **model})
    role = trainer_memory(
        SIZE, model=made, ds=ds, adapter=adapter, ranks=ranks, tokens=tokens, patches=patches, device=device
    )
    return {part.name: part.num_bytes for part in role.parts}


def test_a_layer_saves_per_token_what_its_backward_pass_reads() -> None:
    # Two norms: input in fp32, and result. Queries, keys, values, output, and the output laid out anew. Two inputs of
    # projections; gate, activated gate, up and product.
    assert saved_per_token(BLOCKS, 4, adapted=False) == 2 * 4 * (4 + 4) + 4 * (3 * 4 + 2 * 2) + 4 * (2 * 4 + 4 * 8)
    # Norms that do not train save their input only.
    assert saved_per_token(BLOCKS, 2, adapted=True) == 2 * 4 * 4 + 2 * (3 * 4 + 2 * 2) + 2 * (2 * 4 + 4 * 8)


def test_a_layer_with_linear_attention_saves_its_chunks_and_the_stack_counts_both_kinds() -> None:
    hybrid = replace(BLOCKS, recurrence=RECURRENCE)
    # For 2 heads in fp32: 8 x 3 of keys, 6 x 5 of values, 5 x 64 of a chunk's matrices, and 3 x 5 / 64 of a state; in
    # bf16 twice the 6 queries and keys, five times the 2 x 5 values. Norms, inputs and feed-forward as in every layer.
    linear = 4 * 2 * (24 + 30 + 320 + 15 / 64) + 2 * (2 * 6 + 5 * 10) + 2 * 4 * 4 + 2 * (2 * 4 + 4 * 8)
    assert saved_per_token(hybrid, 2, adapted=True) == linear
    attention = saved_per_token(BLOCKS, 2, adapted=True)
    model = Model(model_name_or_path="m")
    assert saved_bytes(hybrid, 100, 2, model=model, adapted=True) == 100 * (attention + linear)
    recomputing = Model(model_name_or_path="m", gradient_checkpointing_enable=True)
    assert saved_bytes(hybrid, 100, 2, model=recomputing, adapted=True) == 100 * (2 * 4 * 2 + linear)


def test_linear_attention_saves_as_much_as_is_counted() -> None:
    shape = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
    config = Qwen3_5TextConfig(hidden_size=64, layer_types=["linear_attention"], num_hidden_layers=1, **shape)
    layer = Qwen3_5GatedDeltaNet(config, 0).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(1, 512, 64, dtype=torch.bfloat16, requires_grad=True))
    saved = sum(storage.nbytes() for storage in storages.values()) / 512
    recurrence = Recurrence(layers=1, heads=4, keys=128, values=128, queries=512, taps=4)
    blocks = Blocks(layers=1, hidden=64, intermediate=0, queries=0, keys=0, recurrence=recurrence)
    # Counted besides: two norms, and the inputs of the feed-forward.
    counted = saved_per_token(blocks, 2, adapted=True) - 2 * 64 * 4 - 2 * 64
    assert counted == pytest.approx(saved, rel=0.02)


def test_a_sequence_has_keys_and_values_in_attention_layers_and_states_in_the_others() -> None:
    vllm, ds = Vllm(), Ds(param_dtype="bf16")
    assert sequence_bytes(SIZE, vllm=vllm, ds=ds, tokens=10) == 2 * 2 * 2 * 2 * 10
    hybrid = replace(SIZE, text=replace(BLOCKS, recurrence=RECURRENCE))
    # One attention layer of 2 keys and 2 values; 3 inputs of 6 + 2 x 5 channels in bf16, 2 states of 3 x 5 in fp32.
    assert sequence_bytes(hybrid, vllm=vllm, ds=ds, tokens=10) == 2 * 2 * 2 * 10 + 3 * 16 * 2 + 2 * 15 * 4


def test_sizes_of_a_hybrid_model_are_read_off_its_configuration(tmp_path: Path) -> None:
    net = skeleton(str(tiny.build("qwen3_5", tmp_path / "tiny")))
    text = model_sizes(net, lambda name: "vision" if "visual" in name else "language").text
    assert text.recurrence == Recurrence(layers=2, heads=4, keys=64, values=64, queries=2 * 2 * 64, taps=4)
    assert (text.layers, text.attention_layers, text.keys) == (3, 1, 2 * 32)


def test_plain_fp32_has_weights_gradients_and_two_moments() -> None:
    estimate = parts(Ds(param_dtype="fp32", zero_stage=0))
    assert (estimate["weights"], estimate["gradients"], estimate["optimizer"]) == (4 * 1200, 4 * 1200, 8 * 1200)


def test_zero_shards_by_stage() -> None:
    # bf16 on two ranks: half of the fp32 gradients and a full bucket in bf16; half of fp32 copy and moments.
    estimate = parts(Ds(zero_stage=2), ranks=2)
    assert (estimate["weights"], estimate["gradients"], estimate["optimizer"]) == (2400, 4 * 600 + 2 * 1200, 12 * 600)
    # Stage 1 does not shard gradients; stage 3 shards the weights, and keeps gathered ones.
    assert parts(Ds(zero_stage=1), ranks=2)["gradients"] == 4 * 1200 + 4 * 1200
    assert parts(Ds(zero_stage=3), ranks=2)["weights"] == 2400 / 2 + 2400
    assert parts(Ds(zero_stage=3), ranks=1)["weights"] == 2400


def test_offloaded_weights_gradients_and_optimizer_are_in_main_memory() -> None:
    def by_place(**offload: Any) -> list[dict[str, float]]:
        model = Model(model_name_or_path="m")
        role = trainer_memory(
            SIZE, model=model, ds=Ds(zero_stage=3, **offload), adapter=None, ranks=2, tokens=1, patches=0, device="cuda"
        )
        return [{p.name: p.num_bytes for p in role.parts if p.in_host_memory == host} for host in (False, True)]

    device, host = by_place(adam_offload=True)
    # On the GPU the bucket of gradients and the weights; in main memory 12 bytes of the optimizer, and twice the sums.
    assert (device["weights"], device["gradients"]) == (2400 / 2 + 2400, 2 * 1200)
    assert (host["optimizer"], host["sums of gradients"]) == (12 * 600, 2 * 4 * 600)
    assert "update" not in device
    device, host = by_place(adam_offload=True, offload="cpu")
    assert (device["gathered weights"], host["weights"]) == (2400, 2400 / 2)
    assert "weights" not in device


def test_a_stage_of_a_pipeline_has_its_layers_the_tower_and_an_end() -> None:
    whole = engine_memory(SIZE, vllm=Vllm(), ds=Ds(), adapter=None, device="cpu")
    stages = Vllm(pipeline_parallel_size=2)
    half = engine_memory(SIZE, vllm=stages, ds=Ds(), adapter=None, device="cpu")
    embedding = SIZE.vocabulary * SIZE.text.hidden
    language = SIZE.parameters["language"]
    inside = language - embedding - SIZE.output
    assert whole.parts[0].num_bytes == 2 * SIZE.total
    assert half.parts[0].num_bytes == pytest.approx(2 * (SIZE.total - language + embedding + inside / 2))
    one, two = (sequence_bytes(SIZE, vllm=vllm, ds=Ds(), tokens=10) for vllm in (Vllm(), stages))
    assert one == 2 * two


def test_an_engine_in_fp8_has_a_byte_per_parameter_of_the_language_layers() -> None:
    role = engine_memory(SIZE, vllm=Vllm(quantization="fp8"), ds=Ds(), adapter=None, device="cuda", device_bytes=GIB)
    assert role.parts[0].num_bytes == SIZE.quantized + 2 * (SIZE.total - SIZE.quantized)


def test_frozen_parts_have_no_gradient_and_no_optimizer_state() -> None:
    estimate = parts(Ds(param_dtype="fp32", zero_stage=0), freeze_visual_encoder=True)
    assert (estimate["weights"], estimate["gradients"], estimate["optimizer"]) == (4800, 4000, 8000)


def test_with_adapters_only_they_have_gradients_and_optimizer_state() -> None:
    numbers = 3 * (4 + 6) + 3 * (2 + 6)
    assert num_adapter_parameters(SIZE, ADAPTER) == numbers
    estimate = parts(Ds(param_dtype="fp32", zero_stage=0, lora=Lora(rank=3)), adapter=ADAPTER)
    assert (estimate["weights"], estimate["adapters"]) == (4800, 4 * numbers)
    assert (estimate["gradients"], estimate["optimizer"]) == (4 * numbers, 8 * numbers)


def test_in_4_bits_layers_of_the_language_model_take_half_a_byte_and_scales() -> None:
    estimate = parts(Ds(load_in_4bit=True, lora=Lora(rank=3)), adapter=ADAPTER)
    assert estimate["weights"] == pytest.approx(600 * 0.515875 + 600 * 2)


def test_8_bit_adam_has_moments_of_a_byte_each() -> None:
    assert parts(Ds(zero_stage=2), optim="adam_8bit")["optimizer"] == (4 + 2) * 1200


def test_muon_has_one_moment_of_the_matrices_inside_the_layers() -> None:
    # q and v have 4 * 6 + 2 * 6 numbers; the other 1164 have AdamW's two moments. All have the copy that is updated.
    assert parts(Ds(zero_stage=2), optim="muon")["optimizer"] == pytest.approx(4 * 1200 + 4 * 36 + 8 * 1164)
    adapters = parts(Ds(zero_stage=2, lora=Lora(rank=3)), adapter=ADAPTER, optim="muon")["optimizer"]
    assert adapters == (4 + 4) * num_adapter_parameters(SIZE, ADAPTER)


def test_checkpointing_saves_the_input_of_each_layer() -> None:
    ds = Ds(param_dtype="fp32")
    each, head = saved_per_token(BLOCKS, 4, adapted=False), 12 * 100 * 16
    passing = max(100 * each, head)
    assert parts(ds, tokens=100)["activations"] == 100 * 2 * each + passing
    with_it = parts(ds, tokens=100, gradient_checkpointing_enable=True)["activations"]
    assert with_it == 100 * (2 * 4 * 4 + each) + passing


def test_ranks_that_share_tokens_save_activations_of_their_own_and_of_all_images() -> None:
    # The key head is repeated for each rank.
    each, head = saved_per_token(replace(BLOCKS, repeats=3), 4, adapted=False), 12 * 34 * 16
    tower = SIZE.tower
    assert tower is not None
    # 100 tokens on three ranks are 34 on each; ten patches are encoded by every rank.
    estimate = parts(Ds(param_dtype="fp32", sequence_parallel_size=3), ranks=3, tokens=100, patches=10)
    with_tower = 34 * 2 * each + max(34 * each, head) + 10 * saved_per_token(tower, 4, adapted=False)
    # Each rank holds the embeddings of all tokens, with the images in them.
    assert estimate["activations"] == with_tower + 4 * 4 * 100
    # Queries, keys and values of 4, 2 and 2 channels, and the keys and values twice more in fp32.
    repeated = saved_per_token(replace(BLOCKS, repeats=3), 4, adapted=False)
    assert repeated == saved_per_token(BLOCKS, 4, adapted=False) + 4 * 2 * (2 + 2)


def test_ranks_that_share_experts_hold_their_weights_and_gradients_once() -> None:
    for stage, weights, gradients in ((1, 900, 900), (2, 900, 0), (3, 0, 0)):
        whole, shared = (
            parts(Ds(param_dtype="fp32", zero_stage=stage, expert_parallel_size=size), ranks=4)  # type: ignore[arg-type]
            for size in (1, 4)
        )
        # Of 300 parameters, three quarters are on other ranks, in 4 bytes each.
        assert (whole["weights"] - shared["weights"], whole["gradients"] - shared["gradients"]) == (weights, gradients)
        assert whole["optimizer"] == shared["optimizer"], "sharded over all ranks before"


def test_a_trainable_tower_saves_activations_and_a_frozen_one_none() -> None:
    ds = Ds(param_dtype="fp32")
    frozen: dict[str, Any] = {"freeze_visual_encoder": True, "freeze_projector": True}
    text = parts(ds, tokens=100)["activations"]
    tower = SIZE.tower
    assert tower is not None
    assert parts(ds, tokens=100, patches=10)["activations"] == text + 10 * saved_per_token(tower, 4, adapted=False)
    assert parts(ds, tokens=100, patches=10, **frozen)["activations"] == text


def test_with_a_short_pack_the_update_is_the_peak() -> None:
    estimate = parts(Ds(zero_stage=2), tokens=1)
    # A flat fp32 copy of the gradient, minus the freed bf16 bucket and activations.
    assert estimate["update"] == 4 * 1200 - 2 * 1200 - estimate["activations"]
    assert "update" not in parts(Ds(zero_stage=2), tokens=1000)


def test_an_engine_has_the_model_slots_for_adapters_and_its_cache() -> None:
    role = engine_memory(SIZE, vllm=Vllm(cpu_kv_cache_gib=0.5), ds=Ds(), adapter=ADAPTER, device="cpu")
    # vLLM rounds a rank of 3 up to 8.
    assert [part.num_bytes for part in role.parts] == [2400, 2 * 8 * (4 + 6 + 2 + 6), GIB / 2]
    on_gpu = engine_memory(
        SIZE, vllm=Vllm(gpu_memory_utilization=0.5), ds=Ds(), adapter=None, device="cuda", device_bytes=80 * GIB
    )
    assert on_gpu.num_bytes() == 40 * GIB


MIB = 2**20


def test_sleeping_weights_are_pinned_in_blocks_of_powers_of_two() -> None:
    linears = {
        # One layer in vLLM: 4096 x (4096 + 512 + 512) numbers of 2 bytes are 40 MiB, in a block of 64.
        "l.q_proj": (4096, 4096),
        "l.k_proj": (512, 4096),
        "l.v_proj": (512, 4096),
        # 32 MiB, in a block of 32.
        "l.o_proj": (4096, 4096),
        # 2 x 86 MiB, in a block of 256.
        "l.gate_proj": (11008, 4096),
        "l.up_proj": (11008, 4096),
        # 5 MiB share blocks of 20 MiB with others, each of which is pinned as 32: 8 MiB.
        "v.fc1": (2560, 1024),
        # The embedding itself.
        "lm_head": (32000, 4096),
    }
    blocks = replace(BLOCKS, hidden=4096)
    total = 4096 * (5120 + 4096 + 2 * 11008) + 2560 * 1024 + 32000 * 4096 + 1000
    size = Sizes({"language": total}, 0, linears, vocabulary=32000, text=blocks, tower=None)
    # The embedding has 250 MiB. The thousand parameters of norms and biases share other blocks.
    assert pinned_bytes(size, 2.0) == (64 + 32 + 256 + 8 + 256) * MIB + 2000
    # An untied output layer is another 250 MiB.
    more = replace(size, parameters={"language": total + 32000 * 4096}, output=32000 * 4096)
    assert pinned_bytes(more, 2.0) == (64 + 32 + 256 + 8 + 256 + 256) * MIB + 2000
    # On two GPUs each engine's worker has half: 20, 16, 86, 2.5 and 125 MiB.
    assert pinned_bytes(size, 1.0) == (32 + 16 + 128 + 4 + 128) * MIB + 1000


def test_only_an_engine_that_sleeps_takes_pinned_memory() -> None:
    def beside(device: str, **options: bool) -> float:
        return engine_memory(SIZE, vllm=Vllm.model_validate(options), ds=Ds(), adapter=None, device=device).num_bytes(
            on_device=False
        )

    assert beside("cuda", enable_sleep=True) == 2400
    assert beside("cuda") == beside("cpu", enable_sleep=True) == 0


def test_an_optimizer_that_sleeps_takes_pinned_memory() -> None:
    big = replace(SIZE, parameters={"language": 5 * MIB})
    made = Model.model_validate({"model_name_or_path": "m"})

    def beside(ds: Ds, ranks: int = 1, device: str = "cuda") -> tuple[float, bool]:
        role = trainer_memory(big, model=made, ds=ds, adapter=None, ranks=ranks, tokens=1, patches=0, device=device)
        (optimizer,) = (part for part in role.parts if part.name == "optimizer")
        return role.num_bytes(on_device=False), optimizer.stays

    # The copy and two moments of 20 MiB each, in blocks of 32; on two ranks of 10 MiB, in blocks of 16.
    assert beside(Ds(enable_sleep=True)) == (3 * 32 * MIB, False)
    assert beside(Ds(enable_sleep=True), ranks=2) == (3 * 16 * MIB, False)
    assert beside(Ds()) == (0, True)
    assert beside(Ds(enable_sleep=True), device="cpu")[0] == 0


def test_only_stage_3_keeps_gradients_between_updates() -> None:
    made = Model.model_validate({"model_name_or_path": "m"})
    for stage, stays in ((0, False), (1, False), (2, False), (3, True)):
        ds = Ds.model_validate({"zero_stage": stage})
        role = trainer_memory(SIZE, model=made, ds=ds, adapter=None, ranks=1, tokens=1, patches=0, device="cuda")
        assert [part.stays for part in role.parts if part.name == "gradients"] == [stays]
        assert not any(part.stays for part in role.parts if part.name in ("activations", "update"))


def architecture(name: str) -> tuple[Sizes, AdapterPlan]:
    """Sizes of a published model from its configuration, and an adapter of rank 32 on its language model."""
    processors = plugin("processors", "qwen_vl")

    def group(parameter: str) -> ParameterGroup:
        group: ParameterGroup = processors.QwenVlProcessor.parameter_group(None, parameter)
        return group

    config = AutoConfig.for_model(**json.loads((ARCHITECTURES / f"{name}.json").read_text()))
    with torch.device("meta"):
        net = AutoModelForImageTextToText.from_config(config)
    plan = AdapterPlan(
        rank=32,
        alpha=64.0,
        dropout=0.0,
        is_rank_stabilized=False,
        has_magnitude=False,
        targets=tuple(quantized_layers(net, group)),
        groups=frozenset({"language"}),
    )
    return model_sizes(net, group), plan


def published(name: str, method: str, *, ranks: int = 1) -> RoleMemory:
    """A cell of the guide's table: bf16, ZeRO-2, checkpointing, 16384 tokens, half of them for 32768 patches."""
    size, plan = architecture(name)
    ds = Ds(lora=Lora(rank=0 if method == "full" else 32), load_in_4bit=method == "qlora")
    model = Model(model_name_or_path="m", gradient_checkpointing_enable=True)
    return trainer_memory(
        size,
        model=model,
        ds=ds,
        adapter=None if method == "full" else plan,
        ranks=ranks,
        tokens=16384,
        patches=32768,
        device="cuda",
    )


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2_5_vl_3b", 3.75), ("qwen2_5_vl_7b", 8.29), ("qwen3_vl_8b", 8.77)]
)
def test_published_models_have_the_sizes_of_their_model_cards(name: str, billions: float) -> None:
    size, _ = architecture(name)
    assert size.total / 1e9 == pytest.approx(billions, abs=0.01)
    assert {"vision", "projector", "language"} == set(size.parameters)


GUIDE = Path(__file__).parents[3] / "vlmrl/models/README.md"
README = {
    name.lower().translate(str.maketrans(".-", "__")): tuple(map(int, cells))
    for name, *cells in re.findall(r"^\| (Qwen\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", GUIDE.read_text(), re.M)
}
"""GiB of a trainer rank: full on 1 and on 8 GPUs, LoRA and QLoRA on 1."""


def test_the_readme_has_a_table_of_three_models() -> None:
    assert sorted(README) == ["qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen3_vl_8b"]


@pytest.mark.parametrize("name", README)
def test_the_table_of_the_readme(name: str) -> None:
    roles = (
        published(name, "full"),
        published(name, "full", ranks=8),
        published(name, "lora"),
        published(name, "qlora"),
    )
    assert tuple(round(role.num_bytes() / GIB) for role in roles) == README[name]


def test_a_value_head_replaces_the_output_layer() -> None:
    # 16 rows of 4 are replaced by one.
    untied = with_value_head(replace(SIZE, output=64))
    assert untied.parameters == {"vision": 200, "language": 1000 - 64 + 4}
    # A tied embedding stays.
    assert with_value_head(SIZE).parameters["language"] == 1004
    # Logits are 1 per token instead of 16, so that one layer is the largest transient part.
    assert untied.vocabulary == 1


def test_a_reward_model_is_sharded_under_zero_3_only() -> None:
    size = with_value_head(SIZE)

    def weights(ds: Ds, **options: bool) -> tuple[float, bool]:
        role = reward_model_memory(
            "reward_model",
            size,
            ds=ds,
            ranks=2,
            tokens=1,
            device="cuda",
            is_offloaded=options.get("is_offloaded", False),
        )
        (part,) = (part for part in role.parts if part.name == "weights")
        return part.num_bytes, part.in_host_memory

    assert weights(Ds(zero_stage=2)) == (2 * 1204, False)
    assert weights(Ds(zero_stage=3)) == (2 * 1204 / 2 + 2 * 1204, False)
    assert weights(Ds(zero_stage=2), is_offloaded=True) == (2 * 1204, True)
    # Never in 4 bits.
    assert weights(Ds(zero_stage=2, load_in_4bit=True, lora=Lora(rank=3))) == (2 * 1204, False)
