import pytest
import torch
from torch import nn

from vlmrl.config.actor import Model
from vlmrl.config.ds import Ds
from vlmrl.errors import ClusterError, ConfigError
from vlmrl.learning.deepspeed_engine import device, engine_config, sharded_loading
from vlmrl.startup import driver


def test_the_gradient_is_clipped_once() -> None:
    module, actor = nn.Linear(2, 2), Model(model_name_or_path="x", max_norm=0.5)
    plain = engine_config(module, actor=actor, ds=Ds(zero_stage=0, param_dtype="fp32"))
    sharded = engine_config(module, actor=actor, ds=Ds(zero_stage=2, param_dtype="fp32"))
    assert (plain["gradient_clipping"], sharded["gradient_clipping"]) == (0.0, 0.5)


def test_bf16_accumulates_in_fp32() -> None:
    config = engine_config(nn.Linear(2, 2), actor=Model(model_name_or_path="x"), ds=Ds(param_dtype="bf16"))
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_offload_without_a_sharded_optimizer_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"ds\.adam_offload needs .* ds\.zero_stage"):
        engine_config(nn.Linear(2, 2), actor=Model(model_name_or_path="x"), ds=Ds(zero_stage=0, adam_offload=True))


def test_weights_go_to_main_memory_with_the_optimizer_if_they_are_sharded() -> None:
    module, actor = nn.Linear(2, 2), Model(model_name_or_path="x")
    zero = engine_config(module, actor=actor, ds=Ds(zero_stage=3, adam_offload=True, offload="cpu"))
    parts = zero["zero_optimization"]
    assert parts["offload_param"]["device"] == parts["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in engine_config(module, actor=actor, ds=Ds(zero_stage=3))["zero_optimization"]
    with pytest.raises(ConfigError, match=r"ds\.offload cpu needs .* ds\.zero_stage"):
        engine_config(module, actor=actor, ds=Ds(zero_stage=2, adam_offload=True, offload="cpu"))


def test_the_gradient_bucket_is_no_larger_than_the_gradients() -> None:
    module, actor = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), Model(model_name_or_path="x")
    module[0].requires_grad_(False)
    assert engine_config(module, actor=actor, ds=Ds())["zero_optimization"]["reduce_bucket_size"] == 4 * 5 + 5
    with torch.device("meta"):
        huge = nn.Linear(100_000, 100_000)
    assert engine_config(huge, actor=actor, ds=Ds())["zero_optimization"]["reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize("offload", [False, True])
def test_an_offloaded_model_is_loaded_into_shards_in_main_memory(offload: bool) -> None:
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    with sharded_loading(Ds(zero_stage=3, param_dtype="fp32"), offload=offload):
        zero = deepspeed_config()["zero_optimization"]
        assert zero.get("offload_param", {}).get("device") == ("cpu" if offload else None)
    assert not is_deepspeed_zero3_enabled()


def test_a_rank_with_a_gpu_never_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(driver, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ClusterError, match=r"torch (is )?built for"):
        device()
    monkeypatch.setattr(driver, "has_gpu", lambda: False)
    assert device() == torch.device("cpu")
