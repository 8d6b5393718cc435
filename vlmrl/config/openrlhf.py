"""OpenRLHF's flags that vlmrl refuses, each with the reason. All others have the same name here."""

REFUSED: dict[str, str] = {
    "ds.value_head_prefix": "never: a value head is called score, as in Transformers' classifiers",
    **{
        f"{role}.muon.{name}": "never: DeepSpeed's Muon takes five Newton-Schulz steps with Nesterov momentum"
        for role in ("actor", "critic")
        for name in ("ns_steps", "nesterov", "no_nesterov")
    },
    "train.dynamic_batch_enable": "replaced by train.max_tokens_per_gpu: micro-batches are always cut by tokens",
    "rollout.micro_batch_size": "replaced by rollout.max_tokens_per_gpu: passes without gradient are cut by tokens",
    "rollout.vllm_generate_batch_size": "replaced by rollout.batch_size: the engines get all prompts of a step at once",
    "ds.zpg": "not built yet: ZeRO++ partitions; ds.zero_stage 3 shards over all ranks",
    "ds.deepcompile": "not built yet: compiled DeepSpeed passes",
    "ds.tensor_parallel_size": "not built yet: tensor parallel training; ds.zero_stage 3 shards the weights",
    "ds.ring_attn_head_stride": "never: ds.sequence_parallel_size exchanges tokens for heads; there is no ring",
    "ds.grad_accum_dtype": "never: gradients are always accumulated in fp32",
    "ds.use_universal_ckpt": "not built yet: resuming with another number of ranks",
    "ref.offload": "not built yet: a reference in CPU memory; give it its own devices with ref.num_gpus_per_node",
    "vllm.sync_with_ray": "never: weights do not go through Ray's collectives; vllm.sync_backend is how they are sent",
    "ckpt.path": "replaced by ckpt.output_dir: checkpoints lie in its folder checkpoints/",
    "ckpt.save_hf": "never: the final model is always written in Hugging Face's format, to model/ in ckpt.output_dir",
    "ckpt.disable_ds": "replaced by ckpt.save_steps -1: a checkpoint is what a run resumes from",
    "ckpt.max_mem": "replaced by ckpt.max_num: the number of checkpoints that are kept bounds their size",
    "data.disable_fast_tokenizer": "never: Transformers 5 has one tokenizer for each model",
    "data.dataloader_num_workers": "never: prompts are read by a separate process, not by a data loader",
    "logger.wandb.key": "never: a key on a command line ends up in logs; set the environment variable WANDB_API_KEY",
    "local_rank": "never: there is no outside launcher; vlmrl starts actor.num_nodes x actor.num_gpus_per_node ranks",
    "use_ms": "never: download from ModelScope first, and give the folder as actor.model_name_or_path",
}
"""OpenRLHF's name -> why it is refused."""

_KERNELS = "replaced by varlen on CUDA, which needs no flash-attn package, or by auto, which chooses"

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "ds.attn_implementation": {"flash_attention_2": _KERNELS, "flash_attention_3": _KERNELS},
    "ds.experts_implementation": {"deepgemm": "not built yet: needs a package of kernels; grouped_mm is PyTorch's own"},
    "ds.param_dtype": {"fp16": "never: fp16 loses small gradients without loss scaling; use bf16 or fp32"},
    "vllm.sync_backend": {"gloo": "replaced by shm, which takes weights through main memory without a process group"},
}
"""Setting -> OpenRLHF's value -> why it is refused."""
