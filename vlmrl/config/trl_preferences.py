"""Names of settings in TRL's DPO, KTO, ORPO, CPO, BCO, reward and SFT trainers, with their names here."""

from typing import NamedTuple


class Counterpart(NamedTuple):
    """The counterpart of a setting of TRL."""

    ours: tuple[str, ...]
    """Settings here; the first that the verb has is meant. Empty: there is none."""
    note: str = ""
    """An explanation of the new name; without a counterpart, the reason."""


def _is(ours: str, note: str = "") -> Counterpart:
    return Counterpart(tuple(ours.split()), note)


def _none(reason: str) -> Counterpart:
    return Counterpart((), reason)


_LENGTH = "it limits prompt and response together; a longer row is dropped and counted"
_MOVING_REFERENCE = "not built yet: a reference that follows the policy"
_DIVERGENCE = "not built yet: other divergences than the reverse KL (f-DPO)"
_VOCABULARY = "never: a model's own tokenizer is used as it is"

PREFERENCES: dict[str, Counterpart] = {
    "activation_offloading": _is("actor.gradient_checkpointing_enable", "activations are computed again, not moved"),
    "beta": _is("algo.kl.init_coef dpo.beta"),
    "center_rewards_coefficient": _none(
        "not built yet: a penalty on large scores; reward.normalize_enable centres them when they are used"
    ),
    "cpo_alpha": _is("dpo.nll_loss_coef", "with dpo.loss simpo that is CPO-SimPO"),
    "dataset_kwargs": _none("never: rows are read by the settings of data.*"),
    "dataset_num_proc": _is("data.dataloader_num_workers"),
    "desirable_weight": _is("dpo.kto_desirable_weight"),
    "discopop_tau": _none("not built yet: DiscoPOP"),
    "eval_packing": _is("train.layout", "training and evaluation are packed alike"),
    "f_alpha_divergence_coef": _none(_DIVERGENCE),
    "f_divergence_type": _none(_DIVERGENCE),
    "force_use_ref_model": _is("ref.model_name_or_path", "it names the reference, also where adapters train"),
    "generate_during_eval": _is("eval.generate_enable", "responses to held-out questions are also scored"),
    "label_pad_token_id": _none("never: which tokens are learned is known without a label"),
    "label_smoothing": _is("dpo.label_smoothing", "it is cDPO, where TRL has robust DPO"),
    "ld_alpha": _none("not built yet: less weight for the longer response's last tokens (LD-DPO)"),
    "loss_weights": _is("dpo.mpo_weights", "of DPO and BCO; that of the likelihood is dpo.nll_loss_coef"),
    "packing_strategy": _is("train.layout", "packs are filled with whole samples, which do not see each other"),
    "pad_to_multiple_of": _none("never: rows are packed, not padded"),
    "precompute_ref_batch_size": _is("train.max_tokens_per_gpu", "passes are packed by tokens"),
    "precompute_ref_log_probs": _is("dpo.precompute_reference"),
    "ref_adapter_name": _is("ref.model_name_or_path", "merge the adapter first (vlmrl merge)"),
    "ref_model_mixup_alpha": _none(_MOVING_REFERENCE),
    "ref_model_sync_steps": _none(_MOVING_REFERENCE),
    "reference_free": _is("dpo.loss", "simpo and orpo have no reference"),
    "router_aux_loss_coef": _is("actor.aux_loss_coef"),
    "rpo_alpha": _is("dpo.nll_loss_coef", "it is the weight of the chosen responses' likelihood"),
    "simpo_gamma": _is("dpo.simpo_gamma", "the same number"),
    "tokenizer_name_or_path": _none(_VOCABULARY),
    "truncation_mode": _none("never: a row that is too long is dropped and counted, not cut (data.max_len)"),
    "undesirable_weight": _is("dpo.kto_undesirable_weight"),
    "use_weighting": _none("not built yet: weights by the policy's probability of a pair (WPO)"),
}
"""TRL's name -> its counterpart here."""
