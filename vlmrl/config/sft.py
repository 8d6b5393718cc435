"""Supervised fine-tuning."""

from vlmrl.config.base import Unread
from vlmrl.config.data import Data
from vlmrl.config.distill import SftDistill
from vlmrl.config.sampled_eval import SampledEval


class Sft(SftDistill):
    """What supervised fine-tuning learns."""

    pretrain_mode: bool = False
    """Learn whole texts, without questions: rows have their text in `data.input_key`, with `<image>` in place of each
    image, and all tokens but those of images enter the loss. OpenRLHF's `model.pretrain_mode_enable`."""


class SftData(Data):
    """The training data of supervised fine-tuning."""

    multiturn: bool = False
    """Learn all responses of a conversation, not only the last. Where the chat template rewrites earlier responses
    (Qwen3 removes their thinking), each is learned in the history that the template renders for it."""
    truncate_enable: bool = False
    """Cut a row that is longer than `max_len` at its end, as OpenRLHF does, instead of dropping it (`data/rows_cut`). A
    row whose responses all lie beyond is dropped, and a response that is cut has no end token."""


_OF_CONVERSATIONS = (
    *("data.output_key", "data.label_key", "data.multiturn", "data.system_prompt"),
    *("data.apply_chat_template", "data.input_template"),
)


def unread_of_sft(sft: Sft) -> Unread:
    if not sft.pretrain_mode:
        return {}
    return dict.fromkeys(_OF_CONVERSATIONS, "sft.pretrain_mode learns texts, without questions and responses")


def conflicts_of_generation(evaluation: SampledEval, sft: Sft) -> list[str]:
    if not evaluation.generate_enable or not sft.pretrain_mode:
        return []
    return ["eval.generate_enable samples responses, and texts have no questions (sft.pretrain_mode): leave one out"]


def conflicts_of_turns(data: SftData, sft: Sft) -> list[str]:
    if sft.pretrain_mode or not data.multiturn or data.apply_chat_template:
        return []
    return ["data.multiturn learns responses in conversations, which need data.apply_chat_template: turn it on"]
