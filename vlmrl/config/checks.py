"""What settings say about each other: which contradict, and which the run would never read.

Each function answers for the sections that it is given, and names settings in full: that is how a message finds back to
the flag or the line of YAML that a setting came from.
"""

from collections.abc import Iterable

from vlmrl.config.actor import Actor, Model, Ref
from vlmrl.config.algo import Algo
from vlmrl.config.base import ConflictError, Section
from vlmrl.config.ckpt import Ckpt, Logger
from vlmrl.config.data import Columns, Data
from vlmrl.config.ds import Ds
from vlmrl.config.names import is_given, settings
from vlmrl.config.reward import Reward, Scoring
from vlmrl.config.rollout import Eval, Rollout
from vlmrl.config.train import Layout, Loop, TrainRl
from vlmrl.config.vllm import Vllm

Unread = dict[str, str]
"""Full name of a setting -> why the run does not read it."""


def refuse(config: Section, *, conflicts: Iterable[str], unread: Unread) -> None:
    """Raise all of it at once: contradictions, and settings that were given but would not be read."""
    dead = [f"{name} would not be read: {reason}" for name, reason in unread.items() if is_given(config, name)]
    lines = [*conflicts, *dead]
    if lines:
        raise ConflictError(lines)


def unread_of_model(model: Model) -> Unread:
    found: Unread = {}
    if model.lr_scheduler != "cosine_with_min_lr":
        found["actor.min_lr_ratio"] = "actor.lr_scheduler cosine_with_min_lr alone has a floor"
    if model.lr_scheduler == "constant":
        found["actor.lr_warmup_ratio"] = "actor.lr_scheduler constant does not warm up (constant_with_warmup does)"
    if not model.gradient_checkpointing_enable:
        found["actor.gradient_checkpointing_reentrant"] = "actor.gradient_checkpointing_enable is off"
    return found


def unread_of_actor(actor: Actor) -> Unread:
    if actor.eps_clip_low_high is None:
        return {}
    return {"actor.eps_clip": "actor.eps_clip_low_high is given and takes its place"}


def unread_of_algo(algo: Algo) -> Unread:
    found: Unread = {}
    if algo.advantage.estimator != "reinforce_baseline":
        reason = (
            f"algo.advantage.estimator reinforce_baseline alone reads it, and here it is {algo.advantage.estimator}"
        )
        found |= {"algo.advantage.gamma": reason, "algo.advantage.no_std_norm": reason}
    if algo.kl.init_coef == 0:
        reason = "algo.kl.init_coef is 0, so there is no reference model"
        found |= dict.fromkeys((*settings(Ref, "ref."), "algo.kl.estimator", "algo.kl.use_loss"), reason)
        found["train.colocate_actor_ref"] = reason
    return found


def unread_of_train(train: TrainRl) -> Unread:
    return {"train.colocate_actor_ref": "train.colocate_all includes it"} if train.colocate_all else {}


def unread_of_columns(columns: Columns) -> Unread:
    if not columns.apply_chat_template:
        return {}
    return {"data.input_template": "data.apply_chat_template is on, and the model's chat template takes its place"}


def unread_of_user_reward(reward: Scoring) -> Unread:
    return {} if reward.remote_url else {"reward.remote_weight": "there is no reward.remote_url"}


def unread_of_reward(reward: Reward) -> Unread:
    if reward.overlong_buffer_len is not None:
        return {}
    return {"reward.overlong_penalty_factor": "there is no penalty without reward.overlong_buffer_len"}


def unread_of_eval(evaluation: Eval) -> Unread:
    if evaluation.dataset is not None:
        return {}
    names = [name for name in settings(Eval, "eval.") if name != "eval.dataset"]
    return dict.fromkeys(names, "nothing is evaluated without eval.dataset")


def unread_of_output(ckpt: Ckpt, logger: Logger) -> Unread:
    found: Unread = {}
    if ckpt.save_steps == -1:
        found["ckpt.max_num"] = "no checkpoint is written while ckpt.save_steps is -1"
    if logger.wandb.project is None:
        names = ("logger.wandb.org", "logger.wandb.group", "logger.wandb.run_name")
        found |= dict.fromkeys(names, "W&B is off without logger.wandb.project")
    return found


def unread_of_vision(model: Model, *, reached_by_adapters: bool | None, has_reference: bool) -> Unread:
    """`reached_by_adapters` is None where there are none, and the model itself trains."""
    if has_reference or reached_by_adapters is False:
        return {}
    if reached_by_adapters:
        return {"vision.cache_gib": "ds.lora.target_modules reach the tower, so what it makes changes"}
    if model.freeze_visual_encoder and model.freeze_projector:
        return {}
    reason = "actor.freeze_visual_encoder and actor.freeze_projector are not both on, so what the tower makes changes"
    return {"vision.cache_gib": reason}


def unread_of_ds(ds: Ds) -> Unread:
    return {} if ds.zero_stage else {"ds.overlap_comm": "ds.zero_stage 0 communicates once, after the backward pass"}


def conflicts_of_ds(ds: Ds, train: Loop) -> list[str]:
    found = []
    if ds.adam_offload and ds.zero_stage == 0:
        found.append("ds.adam_offload needs a sharded optimizer: set ds.zero_stage to 1, 2 or 3")
    packs = train.layout != "padded"
    if is_given(train, "layout") and ds.packing_samples not in (None, packs):
        flag, meant = str(ds.packing_samples).lower(), layout(not packs)
        found.append(
            f"ds.packing_samples {flag} means train.layout {meant}, and it is {train.layout}: give one of them"
        )
    if train.layout == "shared" and ds.packing_samples is not False and ds.attn_implementation in ("sdpa", "eager"):
        found.append(
            f"ds.attn_implementation {ds.attn_implementation} does not know of prompts that answers share: set "
            "train.layout packed or padded, or ds.attn_implementation auto"
        )
    return found


def conflicts_of_data(data: Data) -> list[str]:
    if data.prompt_probs is None:
        return []
    num_datasets = sum(bool(part.strip()) for part in data.prompt_dataset.split(","))
    if len(data.prompt_probs) == num_datasets:
        return []
    return [f"data.prompt_probs has {len(data.prompt_probs)} shares for the {num_datasets} of data.prompt_dataset"]


def conflicts_of_batch(rollout: Rollout, train: TrainRl, algo: Algo) -> list[str]:
    n, found = rollout.n_samples_per_prompt, []
    if n < 2:
        found.append(
            f"rollout.n_samples_per_prompt {n} leaves algo.advantage.estimator {algo.advantage.estimator} "
            "without a group to compare an answer with: use 2 or more"
        )
    num_answers = rollout.batch_size * n
    if num_answers % train.batch_size:
        found.append(
            f"train.batch_size {train.batch_size} does not divide the {num_answers} answers of a step "
            f"(rollout.batch_size {rollout.batch_size} x rollout.n_samples_per_prompt {n})"
        )
    if train.batch_size % n:
        found.append(
            f"train.batch_size {train.batch_size} is not a multiple of rollout.n_samples_per_prompt {n}: "
            "an optimizer step takes whole groups"
        )
    return found


def conflicts_of_sampling(rollout: Rollout, reward: Reward) -> list[str]:
    found = []
    if rollout.top_p < 1 and rollout.temperature != 1:
        found.append(
            f"rollout.top_p {rollout.top_p:g} needs rollout.temperature 1, not {rollout.temperature:g}: "
            "below top_p 1 the engine knows the log-probs of the untempered model alone"
        )
    buffer = reward.overlong_buffer_len
    if buffer is not None and buffer > rollout.max_new_tokens:
        found.append(
            f"reward.overlong_buffer_len {buffer} is longer than the longest answer, rollout.max_new_tokens "
            f"{rollout.max_new_tokens}"
        )
    return found


def conflicts_of_placement(vllm: Vllm, train: TrainRl) -> list[str]:
    found = []
    if vllm.enable_sleep and not train.colocate_all:
        found.append("vllm.enable_sleep frees memory for a trainer on the same GPUs: it needs train.colocate_all")
    if vllm.sync_backend == "ipc" and not train.colocate_all:
        found.append(
            "vllm.sync_backend ipc hands weights over within a GPU: it needs train.colocate_all (or use nccl, or shm)"
        )
    if vllm.sync_backend == "nccl" and train.colocate_all:
        found.append(
            "vllm.sync_backend nccl cannot join trainer and engines on the same GPU, where train.colocate_all puts "
            "them: use ipc or shm"
        )
    return found


def layout(packing_samples: bool) -> Layout:
    """What OpenRLHF's `ds.packing_samples` says in `train.layout`."""
    return "shared" if packing_samples else "padded"
