"""Names of settings in older OpenRLHF, in TRL and in Hugging Face's Trainer, with their names here."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vlmrl.config.openrlhf import REFUSED
from vlmrl.config.openrlhf_stages import RENAMED
from vlmrl.config.trl_preferences import PREFERENCES


class Alias(NamedTuple):
    """The counterpart of another library's setting."""

    ours: tuple[str, ...]
    """Settings here, or names in `REFUSED`; the first that the verb has is meant. Empty: there is none."""
    note: str = ""
    """An explanation of the new name; without a counterpart, the reason."""


def _is(ours: str, note: str = "") -> Alias:
    return Alias(tuple(ours.split()), note)


def _none(reason: str) -> Alias:
    return Alias((), reason)


def _table(text: str) -> dict[str, Alias]:
    """Read lines of a foreign name and its counterparts."""
    rows = (line.split() for line in text.strip().splitlines())
    return {name: Alias(tuple(ours)) for name, *ours in rows}


_EPOCHS = "train.num_episodes train.max_epochs"
_OPTIMIZER_BATCH = (
    "it counts the samples of one optimizer step over all ranks: per_device_train_batch_size x "
    "gradient_accumulation_steps x ranks"
)
_ENGINES_ONLY = "never: every response comes from vLLM, and vllm.* configures it"
_PROMPTS = "it limits the prompt, image tokens included; rollout.max_new_tokens limits the response"
_FROM_ENVIRONMENT = "a project turns W&B on, and the key comes from the environment variable WANDB_API_KEY"
_REPORT_TO = (
    "a project turns W&B on, as in logger.trackio and logger.swanlab, and logger.mlflow.experiment MLflow; TensorBoard "
    "and metrics.jsonl are always written"
)
_CHAT_TOKENS = "never: a model's own chat template and tokenizer are used as they are"
_UPLOAD = "a model is uploaded after its run, with its card: vlmrl push RUN --repo NAME"
_NO_TRUNCATION = "never: a prompt that is too long is dropped and counted, not cut (data.max_len)"
_LAUNCHER = "never: there is no outside launcher; vlmrl starts actor.num_nodes x actor.num_gpus_per_node ranks"

_OPENRLHF = _table("""
    actor_num_nodes                     actor.num_nodes
    actor_num_gpus_per_node             actor.num_gpus_per_node
    actor_learning_rate                 actor.adam.lr
    adam_betas                          actor.adam.betas
    adam_offload                        ds.adam_offload
    advantage_estimator                 algo.advantage.estimator
    agent_func_path                     train.agent_func_path
    apply_chat_template                 data.apply_chat_template
    async_queue_size                    train.async_queue_size
    async_train                         train.async_enable
    attn_implementation                 ds.attn_implementation
    aux_loss_coef                       actor.aux_loss_coef
    best_metric_key                     ckpt.best_metric_key
    best_of_n                           rollout.best_of
    ckpt_path                           ckpt.path
    colocate_actor_ref                  train.colocate_actor_ref
    colocate_all_models                 train.colocate_all
    colocate_critic_reward              train.colocate_critic_reward
    critic_learning_rate                critic.adam.lr
    critic_num_gpus_per_node            critic.num_gpus_per_node
    critic_num_nodes                    critic.num_nodes
    critic_pretrain                     critic.model_name_or_path
    dataset                             data.prompt_dataset eval.dataset
    dataset_probs                       data.prompt_probs
    dataset_split                       data.prompt_split eval.split
    deepcompile                         ds.deepcompile
    deepspeed_enable_sleep              ds.enable_sleep
    disable_ds_ckpt                     ckpt.disable_ds
    disable_fast_tokenizer              data.disable_fast_tokenizer
    ds_tensor_parallel_size             ds.tensor_parallel_size
    dual_clip                           actor.dual_clip
    dynamic_filtering                   algo.dynamic_filtering_enable
    dynamic_filtering_reward_range      algo.dynamic_filtering_range
    ema_beta                            train.ema_beta
    enable_ema                          train.enable_ema
    enable_prefix_caching               vllm.enable_prefix_caching
    enable_vllm_is_correction           algo.advantage.is_correction_enable
    enforce_eager                       vllm.enforce_eager
    entropy_loss_coef                   actor.entropy_coef
    eps_clip                            actor.eps_clip
    eps_clip_low_high                   actor.eps_clip_low_high
    eval_dataset                        eval.dataset
    eval_n_samples_per_prompt           eval.n_samples_per_prompt
    eval_split                          eval.split
    eval_steps                          eval.steps
    eval_temperature                    eval.temperature
    freeze_visual_encoder               actor.freeze_visual_encoder
    freezing_actor_steps                critic.freezing_steps
    full_determinism                    train.full_determinism_enable
    gamma                               algo.advantage.gamma
    generate_max_len                    rollout.max_new_tokens
    grad_accum_dtype                    ds.grad_accum_dtype
    gradient_checkpointing              actor.gradient_checkpointing_enable
    gradient_checkpointing_use_reentrant  actor.gradient_checkpointing_reentrant
    image_key                           data.image_key
    init_kl_coef                        algo.kl.init_coef
    input_key                           data.input_key
    input_template                      data.input_template
    kl_estimator                        algo.kl.estimator
    kl_horizon                          algo.kl.horizon
    kl_target                           algo.kl.target
    l2                                  actor.adam.weight_decay
    label_key                           data.label_key
    lambd                               algo.advantage.lambd
    load_checkpoint                     ckpt.load_enable
    load_in_4bit                        ds.load_in_4bit
    local_rank                          local_rank
    logging_steps                       logger.logging_steps
    lora_alpha                          ds.lora.alpha
    lora_dropout                        ds.lora.dropout
    lora_rank                           ds.lora.rank
    lr_scheduler                        actor.lr_scheduler
    lr_warmup_ratio                     actor.lr_warmup_ratio
    max_ckpt_mem                        ckpt.max_mem
    max_ckpt_num                        ckpt.max_num
    max_epochs                          train.max_epochs
    max_images_per_prompt               data.max_images_per_prompt
    max_len                             data.max_len
    max_new_tokens                      rollout.max_new_tokens
    max_norm                            actor.max_norm
    max_samples                         data.max_samples eval.max_samples
    micro_rollout_batch_size            rollout.micro_batch_size
    micro_train_batch_size              train.micro_batch_size
    min_lr_ratio                        actor.min_lr_ratio
    n_samples_per_prompt                rollout.n_samples_per_prompt eval.n_samples_per_prompt
    no_advantage_std_norm               algo.advantage.no_std_norm
    normalize_reward                    reward.normalize_enable
    num_episodes                        train.num_episodes
    output_key                          data.output_key
    overlap_comm                        ds.overlap_comm
    overlong_buffer_len                 reward.overlong_buffer_len
    overlong_penalty_factor             reward.overlong_penalty_factor
    packing_samples                     ds.packing_samples
    partial_rollout                     train.partial_rollout_enable
    policy_loss_type                    actor.policy_loss_type
    pretrain                            actor.model_name_or_path merge.model_name_or_path reward.model_name_or_path
    prompt_data                         data.prompt_dataset
    prompt_data_probs                   data.prompt_probs
    prompt_split                        data.prompt_split
    ref_num_gpus_per_node               ref.num_gpus_per_node
    ref_num_nodes                       ref.num_nodes
    ref_pretrain                        ref.model_name_or_path
    remote_rm_url                       reward.remote_url
    reward_clip_range                   reward.clip_range
    reward_num_gpus_per_node            reward.num_gpus_per_node
    reward_num_nodes                    reward.num_nodes
    reward_pretrain                     reward.model_name_or_path
    ring_attn_size                      ds.sequence_parallel_size
    ring_head_stride                    ds.ring_attn_head_stride
    rollout_batch_size                  rollout.batch_size
    rollout_max_tokens_per_gpu          rollout.max_tokens_per_gpu
    save_hf_ckpt                        ckpt.save_hf
    save_path                           ckpt.output_dir merge.output
    save_steps                          ckpt.save_steps
    save_value_network                  critic.save_value_network
    seed                                train.seed
    stop_properly_penalty_coef          reward.stop_properly_penalty_coef
    target_modules                      ds.lora.target_modules
    temperature                         rollout.temperature eval.temperature
    top_p                               rollout.top_p
    train_batch_size                    train.batch_size
    train_max_tokens_per_gpu            train.max_tokens_per_gpu
    train_split                         data.prompt_split
    use_ds_universal_ckpt               ds.use_universal_ckpt
    use_dynamic_batch                   train.dynamic_batch_enable
    use_kl_loss                         algo.kl.use_loss
    use_liger_kernel                    ds.use_liger_kernel
    use_ms                              use_ms
    use_tensorboard                     logger.tensorboard_dir
    value_clip                          critic.value_clip
    value_head_prefix                   ds.value_head_prefix
    vllm_enable_sleep                   vllm.enable_sleep
    vllm_generate_batch_size            rollout.vllm_generate_batch_size
    vllm_gpu_memory_utilization         vllm.gpu_memory_utilization
    vllm_num_engines                    vllm.num_engines
    vllm_sync_backend                   vllm.sync_backend
    vllm_sync_with_ray                  vllm.sync_with_ray
    vllm_tensor_parallel_size           vllm.tensor_parallel_size
    wandb_group                         logger.wandb.group
    wandb_org                           logger.wandb.org
    wandb_project                       logger.wandb.project
    wandb_run_name                      logger.wandb.run_name
    zero_stage                          ds.zero_stage
    zpg                                 ds.zpg
""") | {
    "actor_init_on_gpu": _none("never: weights are loaded directly on the training device"),
    "disable_trace_cache": _none("never: DeepSpeed's trace cache follows ds.zero_stage"),
    "flash_attn": _is("ds.attn_implementation", "auto chooses the kernel by device, without the package flash-attn"),
    "perf": _none("never: time per phase is always in metrics.jsonl"),
    "pretrain_mode": _none("never: vlmrl sft trains on the responses, not on the prompts"),
    "prompt_max_len": _is("data.max_len", _PROMPTS),
    "ptx_coef": _none("not built yet: a pre-training loss in addition to the policy's"),
    "ref_reward_offload": _is(
        "reward.offload", "a reference has its own devices (ref.num_gpus_per_node), or none with ds.lora.rank"
    ),
    "rollout_tasks_per_gpu": _is("vllm.max_num_seqs", "by default the number of concurrent requests of the run"),
    "tokenizer_chat_template": _none(_CHAT_TOKENS),
    "use_wandb": _is("logger.wandb.project", _FROM_ENVIRONMENT),
    "vllm_is_truncated_threshold": _is(
        "algo.advantage.is_correction_threshold", "it takes the smallest and the largest ratio, such as 0 2"
    ),
}
"""The flags of OpenRLHF 0.8 and 0.9, before they had sections."""

_TRL = _table("""
    adapter_name_or_path                actor.adapter_name_or_path merge.adapter
    dataset_name                        data.prompt_dataset eval.dataset
    dataset_test_split                  eval.split
    dataset_train_split                 data.prompt_split
    delta                               actor.dual_clip
    epsilon                             actor.eps_clip
    epsilon_low                         actor.eps_clip
    kl_coef                             algo.kl.init_coef
    lam                                 algo.advantage.lambd
    lora_path                           actor.adapter_name_or_path merge.adapter
    lora_r                              ds.lora.rank
    lora_target_modules                 ds.lora.target_modules
    max_completion_length               rollout.max_new_tokens
    model_name_or_path                  actor.model_name_or_path merge.model_name_or_path reward.model_name_or_path
    num_generations                     rollout.n_samples_per_prompt
    num_generations_eval                eval.n_samples_per_prompt
    num_iterations                      train.max_epochs
    num_ppo_epochs                      train.max_epochs
    ref_model                           ref.model_name_or_path
    response_length                     rollout.max_new_tokens
    teacher_model                       algo.distill.teacher_model_name_or_path sft.teacher_model_name_or_path
    teacher_model_name_or_path          algo.distill.teacher_model_name_or_path sft.teacher_model_name_or_path
    reward_model_name_or_path           reward.model_name_or_path
    reward_model_path                   reward.model_name_or_path
    rloo_k                              rollout.n_samples_per_prompt
    torch_dtype                         ds.param_dtype
    dtype                               ds.param_dtype
    trust_remote_code                   actor.trust_remote_code merge.trust_remote_code
    use_dora                            ds.lora.use_dora
    use_rslora                          ds.lora.use_rslora
    vllm_enable_sleep_mode              vllm.enable_sleep
    vllm_importance_sampling_correction algo.advantage.is_correction_enable
    vllm_importance_sampling_mode       algo.advantage.is_correction_type
""") | {
    "assistant_only_loss": _none("never: vlmrl sft always trains on the responses only"),
    "chat_template_path": _none(_CHAT_TOKENS),
    "completion_only_loss": _none("never: vlmrl sft always trains on the responses only"),
    "dataset_config": _is("data.prompt_dataset", "the configuration belongs to the name: owner/name?name=CONFIG"),
    "dataset_text_field": _is("data.input_key data.output_key", "data.output_key names the response's column"),
    "disable_dropout": _none("never: dropout of the model is always off; ds.lora.dropout is an adapter's"),
    "eos_token": _none(_CHAT_TOKENS),
    "epsilon_high": _is("actor.eps_clip_low_high", "it takes both bounds, such as 0.2 0.28"),
    "generation_batch_size": _is("rollout.batch_size", "it counts prompts, each with rollout.n_samples_per_prompt"),
    "importance_sampling_level": _is("actor.policy_loss_type", "gspo has one ratio per response, ppo one per token"),
    "log_completions": _is("logger.rollouts", "every prompt and response is written to rollouts/, by default"),
    "loss_type": _is(
        "algo.loss_agg dpo.loss",
        "dapo is token, grpo is sequence, dr_grpo is constant with algo.advantage.estimator dr_grpo; cispo is "
        "actor.policy_loss_type cispo; in dpo, sigmoid and robust are dpo, bco_pair is bco, and several are mpo",
    ),
    "mask_truncated_completions": _is(
        "reward.stop_properly_penalty_coef", "truncated responses are penalised by it, and not masked"
    ),
    "max_length": _is("data.max_len", "prompt, image tokens included; a longer row is dropped and counted, not cut"),
    "max_prompt_length": _is("data.max_len", _PROMPTS),
    "max_seq_length": _is("data.max_len", "a longer row is dropped and counted, not cut"),
    "min_p": _none("not built yet: min-p sampling; rollout.temperature and rollout.top_p shape it"),
    "packing": _is("train.layout", "samples are always packed unless it is padded"),
    "pad_token": _none(_CHAT_TOKENS),
    "padding_free": _is("train.layout", "samples are always packed unless it is padded"),
    "repetition_penalty": _none("never: responses would come from a different distribution than the trained one"),
    "reward_funcs": _is("reward.functions", "set your own function with reward.remote_url path/to/file.py:function"),
    "reward_weights": _is("reward.functions", 'it holds the weights: \'{"math": 1, "format": 0.1}\''),
    "scale_rewards": _is(
        "algo.advantage.estimator", "group_norm divides by the group's deviation, dr_grpo does not divide"
    ),
    "shuffle_dataset": _none("never: rows are always shuffled, by train.seed"),
    "steps_per_generation": _is(
        "train.batch_size", "a step has rollout.batch_size x n_samples_per_prompt / train.batch_size updates"
    ),
    "sync_ref_model": _none("not built yet: a reference that follows the policy"),
    "top_k": _none("not built yet: top-k sampling; rollout.temperature and rollout.top_p shape it"),
    "use_peft": _is("ds.lora.rank", "a rank above 0 trains adapters"),
    "use_vllm": _none(_ENGINES_ONLY),
    "vllm_max_model_length": _is("data.max_len", "engines take data.max_len + rollout.max_new_tokens by themselves"),
    "vllm_mode": _is("train.colocate_all", "it shares the devices of trainer and engines (TRL's colocate)"),
    "vllm_server_host": _none("never: vlmrl starts its engines itself (vllm.num_engines)"),
    "vllm_server_port": _none("never: vlmrl starts its engines itself (vllm.num_engines)"),
}
"""TRL's GRPO, RLOO, PPO and SFT settings, and those of its scripts."""

_HUGGING_FACE = _table("""
    adam_epsilon                        actor.adam.eps
    data_seed                           train.seed
    learning_rate                       actor.adam.lr
    lr                                  actor.adam.lr
    max_grad_norm                       actor.max_norm
    max_steps                           train.max_steps
    metric_for_best_model               ckpt.best_metric_key
    optim                               actor.optim
    output_dir                          ckpt.output_dir merge.output
    run_name                            logger.wandb.run_name
    save_total_limit                    ckpt.max_num
    warmup_ratio                        actor.lr_warmup_ratio
    weight_decay                        actor.adam.weight_decay
""") | {
    "adam_beta1": _is("actor.adam.betas", "it takes both, such as 0.9 0.95"),
    "adam_beta2": _is("actor.adam.betas", "it takes both, such as 0.9 0.95"),
    "bf16": _is("ds.param_dtype", "bf16 is the default"),
    "dataloader_num_workers": _is("data.dataloader_num_workers"),
    "ddp_timeout": _is("train.timeout_s"),
    "deepspeed": _is("ds.zero_stage", "DeepSpeed's configuration is made from ds.*; there is no JSON file"),
    "do_eval": _is("eval.dataset", "naming evaluation data turns evaluation on"),
    "do_train": _none("never: vlmrl rl and vlmrl sft train, vlmrl eval evaluates"),
    "eval_on_start": _is("eval.dataset", "the sets that it names are evaluated before and after training"),
    "eval_strategy": _is("eval.steps", "a number of steps, or -1 for before and after training only"),
    "evaluation_strategy": _is("eval.steps", "a number of steps, or -1 for before and after training only"),
    "fp16": _is("ds.param_dtype", "bf16 or fp32; fp16 loses small gradients without loss scaling"),
    "fsdp": _is("ds.zero_stage", "3 shards weights, gradients and optimizer"),
    "gradient_accumulation_steps": _is("train.batch_size", _OPTIMIZER_BATCH),
    "gradient_checkpointing_kwargs": _is("actor.gradient_checkpointing_reentrant"),
    "hub_model_id": _is("push.repo", _UPLOAD),
    "load_best_model_at_end": _is("ckpt.best_metric_key", "the best model by that metric stays in best/"),
    "load_in_8bit": _is("ds.load_in_4bit", "there is no training on 8 bits"),
    "logging_dir": _is("logger.tensorboard_dir"),
    "logging_strategy": _is("logger.logging_steps"),
    "lr_scheduler_kwargs": _is("actor.min_lr_ratio"),
    "lr_scheduler_type": _is("actor.lr_scheduler"),
    "model": _is("actor.model_name_or_path merge.model_name_or_path reward.model_name_or_path"),
    "nproc_per_node": _none(_LAUNCHER),
    "num_processes": _none(_LAUNCHER),
    "num_train_epochs": _is(_EPOCHS),
    "num_epochs": _is(_EPOCHS),
    "epochs": _is(_EPOCHS),
    "overwrite_output_dir": _none("never: a folder that holds a run is not written over; give another ckpt.output_dir"),
    "per_device_eval_batch_size": _none("never: all evaluation prompts go to the engines at once"),
    "per_device_train_batch_size": _is("train.batch_size", _OPTIMIZER_BATCH),
    "push_to_hub": _is("push.repo", _UPLOAD),
    "remove_unused_columns": _none("never: other columns go to the reward function as metadata"),
    "report_to": _is("logger.wandb.project", _REPORT_TO),
    "resume_from_checkpoint": _is("ckpt.load_enable", "it continues from the last checkpoint in ckpt.output_dir"),
    "save_only_model": _none("never: a checkpoint is what a run resumes from; the final model is in model/"),
    "save_strategy": _is("ckpt.save_steps", "a number of steps, or -1 for never"),
    "torch_compile": _is("ds.deepcompile"),
    "truncation": _none(_NO_TRUNCATION),
    "use_cpu": _none("never: a machine without a GPU is used as it is; CUDA_VISIBLE_DEVICES= hides GPUs"),
    "warmup_steps": _is("actor.lr_warmup_ratio", "a share of the optimizer steps"),
}
"""`transformers.TrainingArguments`, and common additions of training scripts."""

_PREFERENCES = {name: Alias(*counterpart) for name, counterpart in PREFERENCES.items()}

ALIASES: dict[str, Alias] = _HUGGING_FACE | _PREFERENCES | _TRL | _OPENRLHF
"""Another library's name, with underscores -> its counterpart here."""


def alias_of(name: str, known: Iterable[str]) -> Alias | None:
    """Find the alias for a name as the user wrote it, with underscores or hyphens, also in a section:
    `train.learning_rate`.

    `known` are the verb's settings. None for an unknown name, and for the name of a setting in any of our sections.
    """
    renamed = RENAMED.get(name.replace("-", "_"))
    if renamed is not None:
        return Alias(*renamed)
    section, _, last = name.replace("-", "_").rpartition(".")
    # An alias means the actor's setting, and the critic has its own.
    if section and (section.startswith("critic") or last in {other.rpartition(".")[2] for other in known}):
        return None
    return ALIASES.get(last)


def explain(alias: Alias, *, verb: str, dashes: str, has: Mapping[str, Iterable[str]]) -> tuple[str, str | None]:
    """Explain the alias to a user of `verb`, and return the intended setting of the verb, if there is one.

    Args:
        dashes: prefix of settings where the name was written: `--`, or nothing in a file.
        has: the settings of each verb.
    """
    if not alias.ours:
        return alias.note, None
    note = f": {alias.note}" if alias.note else ""
    here = [name for name in alias.ours if name in has[verb]]
    if here:
        return f"is {dashes}{here[0]} here{note}", here[0]
    if alias.ours[0] in REFUSED:
        return REFUSED[alias.ours[0]], None
    name = alias.ours[0]
    other = next(other for other, settings in has.items() if name in settings)
    return f"is {dashes}{name} in vlmrl {other}; vlmrl {verb} does not have it", None
