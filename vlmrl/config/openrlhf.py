"""OpenRLHF's flags. One that vlmrl carries has the same name here; every other one is refused with a reason."""

_PPO = "not built yet: PPO with a critic; algo.advantage.estimator group_norm, dr_grpo and rloo do without"
_REWARD_MODEL = "not built yet: reward models; answers are scored by reward.functions and by reward.remote_url"
_MUON = "not built yet: the Muon optimizer; the optimizer is AdamW, actor.adam.*"
_ASYNC = "not built yet: asynchronous rollouts; engines and trainer take turns"
_CORRECTION = "not built yet: rollout correction; a gap above vllm.max_logprob_diff stops the run"
_ADAPTIVE_KL = "not built yet: the adaptive KL controller; algo.kl.init_coef stays as it is"
_FILTERING = "not built yet: dynamic filtering; groups whose rewards are all equal have advantage 0"
_RING = "not built yet: ring attention; a sequence stays on one rank"
_EMA = "not built yet: the moving average of the weights"
_BEST = "not built yet: keeping the best checkpoint; the newest ckpt.max_num are kept"
_EXPERTS = "not built yet: settings for mixtures of experts"

_MUON_SETTINGS = ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")
_CRITIC_SETTINGS = (
    *(
        "num_nodes",
        "num_gpus_per_node",
        "model_name_or_path",
        "value_clip",
        "freezing_steps",
        "save_value_network",
        "optim",
    ),
    *("adam.lr", "adam.betas", "adam.eps", "adam.weight_decay", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio"),
    *("max_norm", *(f"muon.{setting}" for setting in _MUON_SETTINGS)),
)

REFUSED: dict[str, str] = {
    **{f"critic.{setting}": _PPO for setting in _CRITIC_SETTINGS},
    "algo.advantage.lambd": _PPO,
    "ds.value_head_prefix": _PPO,
    "train.colocate_critic_reward": _PPO,
    "reward.model_name_or_path": _REWARD_MODEL,
    "reward.num_nodes": _REWARD_MODEL,
    "reward.num_gpus_per_node": _REWARD_MODEL,
    "reward.offload": _REWARD_MODEL,
    "reward.normalize_enable": _REWARD_MODEL,
    **{f"actor.muon.{setting}": _MUON for setting in _MUON_SETTINGS},
    "actor.aux_loss_coef": _EXPERTS,
    "ds.experts_implementation": _EXPERTS,
    "actor.entropy_coef": "not built yet: the entropy bonus; policy/entropy is measured on every step",
    "algo.advantage.is_correction_enable": _CORRECTION,
    "algo.advantage.is_correction_threshold": _CORRECTION,
    "algo.advantage.is_correction_type": _CORRECTION,
    "algo.kl.target": _ADAPTIVE_KL,
    "algo.kl.horizon": _ADAPTIVE_KL,
    "algo.dynamic_filtering_enable": _FILTERING,
    "algo.dynamic_filtering_range": _FILTERING,
    "train.async_enable": _ASYNC,
    "train.async_queue_size": _ASYNC,
    "train.partial_rollout_enable": _ASYNC,
    "train.agent_func_path": "not built yet: agents; an answer is one turn, and reward.remote_url scores it",
    "train.enable_ema": _EMA,
    "train.ema_beta": _EMA,
    "train.dynamic_batch_enable": "replaced by train.max_tokens_per_gpu: micro-batches are always cut by tokens",
    "rollout.micro_batch_size": "replaced by rollout.max_tokens_per_gpu: passes without gradient are cut by tokens",
    "rollout.vllm_generate_batch_size": "replaced by rollout.batch_size: the engines get all prompts of a step at once",
    "ds.enable_sleep": "not built yet: a trainer that sleeps; engines do, with vllm.enable_sleep",
    "ds.zpg": "not built yet: ZeRO++ partitions; ds.zero_stage 3 shards over all ranks",
    "ds.deepcompile": "not built yet: compiled DeepSpeed passes",
    "ds.tensor_parallel_size": "not built yet: tensor parallel training; ds.zero_stage 3 shards the weights",
    "ds.ring_attn_size": _RING,
    "ds.ring_attn_head_stride": _RING,
    "ds.grad_accum_dtype": "never: gradients are accumulated in fp32, whatever ds.param_dtype is",
    "ds.use_universal_ckpt": "not built yet: resuming with another number of ranks",
    "ref.offload": "not built yet: a reference in CPU memory; give it devices of its own with ref.num_gpus_per_node",
    "vllm.sync_with_ray": "never: weights do not travel through Ray's collectives; vllm.sync_backend says how they do",
    "ckpt.path": "replaced by ckpt.output_dir: checkpoints lie in its folder checkpoints/",
    "ckpt.save_hf": "never: the final model is always written in Hugging Face's format, to model/ in ckpt.output_dir",
    "ckpt.disable_ds": "replaced by ckpt.save_steps -1: a checkpoint is what a run resumes from",
    "ckpt.max_mem": "replaced by ckpt.max_num: the number of checkpoints that are kept bounds their size",
    "ckpt.best_metric_key": _BEST,
    "data.disable_fast_tokenizer": "never: Transformers 5 has one tokenizer for each model",
    "data.dataloader_num_workers": "never: prompts are read by a process of their own, not by a data loader",
    "logger.wandb.key": "never: a key on a command line ends up in logs; set the environment variable WANDB_API_KEY",
    "local_rank": "never: there is no outside launcher; vlmrl starts actor.num_nodes x actor.num_gpus_per_node ranks",
    "use_ms": "never: download from ModelScope first, and give the folder as actor.model_name_or_path",
}
"""OpenRLHF's name -> why it is refused."""

_NO_BASELINE = "not built yet: reinforce; reinforce_baseline is REINFORCE++ with a group baseline"
_KERNELS = "replaced by varlen on CUDA, which needs no flash-attn package, and by auto, which chooses"

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "algo.advantage.estimator": {"gae": _PPO, "reinforce": _NO_BASELINE},
    "actor.policy_loss_type": {name: f"not built yet: {name}; there is ppo" for name in ("gspo", "cispo")},
    "actor.optim": {"muon": _MUON},
    "ds.attn_implementation": {"flash_attention_2": _KERNELS, "flash_attention_3": _KERNELS},
    "ds.param_dtype": {"fp16": "never: fp16 loses small gradients without loss scaling; use bf16 or fp32"},
    "vllm.sync_backend": {"gloo": "replaced by shm, which takes weights through main memory without a process group"},
}
"""Setting -> OpenRLHF's value -> why it is refused."""
