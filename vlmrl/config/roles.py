"""Sets of roles that share devices (`pools`, for `cluster/placement.py`), and checks across roles: critic, reward
models, moving average, best model, and shared devices."""

from collections.abc import Mapping

from vlmrl.config.adapters import conflicts_of_storage, reason_to_merge
from vlmrl.config.algo import Advantage
from vlmrl.config.base import Unread
from vlmrl.config.built_in import CRITIC_ESTIMATORS, ESTIMATORS
from vlmrl.config.ckpt import Ckpt
from vlmrl.config.critic import Critic
from vlmrl.config.ds import Ds, conflicts_of_offload, conflicts_of_optimizer
from vlmrl.config.names import settings
from vlmrl.config.optimizer import unread_of_optimizer
from vlmrl.config.rollout import Eval, EvalRows
from vlmrl.config.train import EvalLoop, SampledLoop, TrainRl
from vlmrl.config.vllm import Vllm

REWARD_MODELS = ("reward_model", "process_model")
"""The roles that `reward.num_gpus_per_node` applies to; they share their devices."""


def pools(train: TrainRl, *, critic_is_with_actor: bool) -> list[frozenset[str]]:
    """Sets of roles that share devices. A critic in the actor's processes is not a separate role."""
    if train.colocate_all:
        return [frozenset({"actor", "ref", "teacher", "vllm", *REWARD_MODELS})]
    with_actor = {"ref": train.colocate_actor_ref, "teacher": train.colocate_actor_teacher}
    trained = {"actor", *(role for role, is_with_actor in with_actor.items() if is_with_actor)}
    reward_models = set(REWARD_MODELS)
    if train.colocate_critic_reward and critic_is_with_actor:
        return [frozenset(trained | reward_models)]
    with_reward = reward_models | {"critic"} if train.colocate_critic_reward else reward_models
    return [frozenset(trained), frozenset(with_reward)]


def pools_of_evaluation(train: EvalLoop) -> list[frozenset[str]]:
    """The same for verbs that sample and score responses without training."""
    models = frozenset(REWARD_MODELS)
    return [models | {"vllm"} if train.colocate_all else models]


def unread_of_critic(critic: Critic, *, estimator: str, exists: bool, is_with_actor: bool) -> Unread:
    if not exists:
        names = (*settings(Critic, "critic."), "train.colocate_actor_critic", "train.colocate_critic_reward")
        exception = "unless critic.model_name_or_path gives its initial model"
        if estimator in ESTIMATORS:
            exception = f"{', '.join(CRITIC_ESTIMATORS)} has"
        return dict.fromkeys(names, f"algo.advantage.estimator {estimator} has no critic, {exception}")
    unread = unread_of_optimizer("critic", critic)
    if is_with_actor:
        reason = "the critic lives in the actor's processes (train.colocate_actor_critic, train.colocate_all)"
        unread |= {"critic.num_nodes": reason, "critic.num_gpus_per_node": reason}
    return unread


def unread_of_sharing(train: TrainRl, *, has_reward_model: bool) -> Unread:
    unread: Unread = {}
    if not has_reward_model:
        unread["train.colocate_critic_reward"] = "there is no reward model"
    if train.colocate_all:
        names = ("colocate_actor_ref", "colocate_actor_teacher", "colocate_actor_critic", "colocate_critic_reward")
        unread |= dict.fromkeys((f"train.{name}" for name in names), "train.colocate_all includes it")
    return unread


def unread_of_average(train: TrainRl) -> Unread:
    return {} if train.enable_ema else {"train.ema_beta": "train.enable_ema is off"}


def unread_of_best(*, evaluates: bool) -> Unread:
    reason = "nothing is evaluated without eval.dataset or data.eval_fraction"
    return {} if evaluates else {"ckpt.best_metric_key": reason}


def conflicts_of_best(ckpt: Ckpt, evaluation: Eval | EvalRows, *, evaluates: bool) -> list[str]:
    if ckpt.best_metric_key is None or not evaluates or evaluation.steps > 0:
        return []
    return ["ckpt.best_metric_key compares evaluations, and eval.steps -1 makes none during training: set eval.steps"]


def conflicts_of_critic(critic: Critic, train: TrainRl, ds: Ds) -> list[str]:
    conflicts = []
    if train.max_steps is not None and critic.freezing_steps >= train.max_steps:
        conflicts.append(
            f"critic.freezing_steps {critic.freezing_steps} leaves the actor none of train.max_steps "
            f"{train.max_steps}: lower it"
        )
    if ds.adam_offload and critic.zero_stage == 0:
        conflicts.append("ds.adam_offload needs a sharded optimizer: set critic.zero_stage to 1, 2 or 3")
    if critic.zero_stage not in (None, ds.zero_stage):
        conflicts += conflicts_of_offload(ds, flag="critic.zero_stage", stage=critic.zero_stage)
    if ds.lora.rank and "vision" in ds.lora.target_modules:
        frozen = [flag for flag in ("freeze_visual_encoder", "freeze_projector") if getattr(critic, flag)]
        conflicts += [
            f"ds.lora.target_modules vision would change what critic.{flag} freezes: leave one of them out"
            for flag in frozen
        ]
    if critic.zero_stage not in (None, ds.zero_stage):
        conflicts += conflicts_of_storage(ds, flag="critic.zero_stage", stage=critic.zero_stage)
    return [*conflicts, *conflicts_of_optimizer("critic", critic, ds)]


def conflicts_of_sleep(ds: Ds, train: TrainRl, trained: Mapping[str, tuple[int | None, str]]) -> list[str]:
    """`trained`: for each trained model, the setting of its ZeRO stage -> that stage, and the optimizer."""
    if not ds.enable_sleep:
        return []
    conflicts = []
    if not train.colocate_all:
        conflicts.append("ds.enable_sleep frees memory for engines on the same GPUs: it needs train.colocate_all")
    if ds.adam_offload:
        conflicts.append(
            "ds.adam_offload always keeps the optimizer's state in CPU memory: leave it or ds.enable_sleep out"
        )
    for flag, (stage, optim) in trained.items():
        if stage != 2:
            conflicts.append(f"ds.enable_sleep: DeepSpeed cannot move the optimizer with {flag} {stage}: set it to 2")
        if "paged" in optim:
            conflicts.append(
                f"ds.enable_sleep cannot move {optim}, whose pages CUDA moves itself: leave one of them out"
            )
    return conflicts


def conflicts_of_devices(vllm: Vllm, train: TrainRl | SampledLoop | EvalLoop) -> list[str]:
    conflicts = []
    if vllm.enable_sleep and not train.colocate_all:
        conflicts.append("vllm.enable_sleep frees memory for models on the same GPUs: it needs train.colocate_all")
    if vllm.sync_backend == "ipc" and not train.colocate_all:
        conflicts.append(
            "vllm.sync_backend ipc sends weights within a GPU: it needs train.colocate_all (or use nccl, or shm)"
        )
    if vllm.sync_backend == "nccl" and train.colocate_all:
        conflicts.append(
            "vllm.sync_backend nccl cannot connect trainer and engines on the same GPU, where train.colocate_all "
            "places them: use ipc or shm"
        )
    return conflicts


def conflicts_of_quantization(vllm: Vllm, ds: Ds, advantage: Advantage) -> list[str]:
    if vllm.quantization == "none":
        return []
    flag = f"vllm.quantization {vllm.quantization}"
    conflicts = []
    if not advantage.is_correction_enable:
        conflicts.append(
            f"{flag} samples from a rounded model, not from the one that is trained, which needs importance "
            "correction: set algo.advantage.is_correction_enable"
        )
    if ds.param_dtype == "fp32":
        conflicts.append(f"{flag} needs activations of half precision: set ds.param_dtype bf16")
    if ds.lora.rank and reason_to_merge(ds.lora) is None:
        conflicts.append(
            f"{flag} with adapters that are synced without the base is not built: leave ds.lora.rank or "
            "vllm.quantization out"
        )
    return conflicts


def conflicts_of_async(train: TrainRl, vllm: Vllm, ds: Ds, advantage: Advantage) -> list[str]:
    if not train.queue_size:
        return []
    ahead = f"train.async_enable with train.async_queue_size {train.queue_size}"
    conflicts = []
    if train.colocate_all:
        conflicts.append(
            f"{ahead} samples while the trainer learns, and train.colocate_all places both on the same devices, which "
            "they use in turn: leave one of them out"
        )
    conflicts += [
        f"{ahead} samples while the trainer learns, and {flag} frees the memory of one of them meanwhile: leave one of "
        "them out"
        for flag, section in (("vllm.enable_sleep", vllm), ("ds.enable_sleep", ds))
        if section.enable_sleep
    ]
    if not advantage.is_correction_enable:
        conflicts.append(
            f"{ahead} trains on responses of older weights, which needs importance correction (a Qwen3-0.6B one step "
            "behind completed 2 of 128 GSM8K problems without it, 98 with it: marin-community/marin#8955): set "
            "algo.advantage.is_correction_enable"
        )
    return conflicts
