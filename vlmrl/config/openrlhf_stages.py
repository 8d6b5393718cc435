"""Flags of OpenRLHF's other programs (`train_sft`, `train_rm`, `train_dpo`, ...) that have other names here."""

from typing import NamedTuple


class Renamed(NamedTuple):
    """The counterpart of a flag."""

    ours: tuple[str, ...]
    """Settings here, or names in `REFUSED`; the first that the verb has is meant. Empty: there is none."""
    note: str = ""
    """An explanation of the new name; without a counterpart, the reason."""


def _table(text: str) -> dict[str, Renamed]:
    rows = (line.split() for line in text.strip().splitlines())
    return {name: Renamed(tuple(ours)) for name, *ours in rows}


RENAMED: dict[str, Renamed] = _table("""
    adam.betas                              actor.adam.betas
    adam.eps                                actor.adam.eps
    adam.lr                                 actor.adam.lr
    adam.weight_decay                       actor.adam.weight_decay
    data.dataset                            data.prompt_dataset
    data.dataset_probs                      data.prompt_probs
    data.dataset_split                      data.prompt_split
    data.prompt_key                         data.input_key
    host                                    serve.host
    model.aux_loss_coef                     actor.aux_loss_coef
    model.beta                              dpo.beta
    model.gradient_checkpointing_enable     actor.gradient_checkpointing_enable
    model.gradient_checkpointing_reentrant  actor.gradient_checkpointing_reentrant
    model.label_smoothing                   dpo.label_smoothing
    model.loss_type                         rm.loss_type
    model.model_name_or_path                actor.model_name_or_path
    model.nll_loss_coef                     dpo.nll_loss_coef
    model.pretrain_mode_enable              sft.pretrain_mode
    model_path                              merge.model_name_or_path actor.model_name_or_path
    muon.lr                                 actor.muon.lr
    muon.momentum                           actor.muon.momentum
    muon.nesterov                           actor.muon.nesterov
    muon.no_nesterov                        actor.muon.no_nesterov
    muon.ns_steps                           actor.muon.ns_steps
    output_path                             merge.output
    port                                    serve.port
""") | {
    "batch_size": Renamed(("serve.max_batch", "train.batch_size")),
    "is_rm": Renamed((), "never: the adapter's own files say whether it belongs to a reward model"),
    "model.compute_fp32_loss_enable": Renamed((), "never: scores and losses are always computed in fp32"),
    "model.ipo_enable": Renamed(("dpo.loss",), "its value is ipo"),
    "model.margin_loss_enable": Renamed(("data.margin_key",), "it names the column, which is `margin` in OpenRLHF"),
    "muon.weight_decay": Renamed(("actor.adam.weight_decay",), "it is that of all weights"),
}
"""OpenRLHF's full name of a flag -> its counterpart."""

REFUSED_BY_VERB: dict[str, dict[str, str]] = {
    "serve-rm": {
        "ds.experts_implementation": "never: the kernel of experts changes no score; Transformers chooses it",
        "ds.load_in_4bit": "never: 4 bits would change the scores; ds.param_dtype bf16 halves the memory of fp32",
        "ds.packing_samples": "never: responses are scored in one row each, which is right for every model",
    },
}
"""Verb -> OpenRLHF's flag of its program -> why that verb refuses it."""
