"""The model of a run that samples without training: the actor, with its adapter merged into a folder of the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from vlmrl.config.merge import Merge
from vlmrl.config.verbs import EvalConfig, MergeConfig
from vlmrl.errors import ConfigError
from vlmrl.observe.run_folder import RunFolder

_FLAG = "actor.adapter_name_or_path"

_Config = TypeVar("_Config", bound=EvalConfig)


def check_adapter(config: EvalConfig) -> None:
    """Check that the actor's adapter, if there is one, belongs to its model.

    Raises:
        ConfigError: there is no such adapter, it was trained on another model, or it is a reward model's.
    """
    folder = config.actor.adapter_name_or_path
    if folder is None:
        return
    # Here: it imports torch.
    from vlmrl.commands.merge import whole_tensors
    from vlmrl.models.adapter_files import check_base, read_adapter
    from vlmrl.models.value_head import HEAD

    stored = read_adapter(folder, flag=_FLAG)
    check_base(stored, config.actor.model_name_or_path, folder=folder, flag=_FLAG)
    if HEAD in whole_tensors(stored):
        raise ConfigError(f"{_FLAG}: {folder} is the adapter of a reward model, which gives no responses")


def with_merged_actor(config: _Config, folder: RunFolder, stack: ExitStack, say: Callable[[str], None]) -> _Config:
    """Merge the actor's adapter, if there is one, and return the settings with the merged model as the actor.

    Any adapter can be merged; vLLM applies only some kinds exactly. The model is removed when `stack` closes.

    Raises:
        ConfigError: the adapter does not fit the model.
        StorageError: the merged model cannot be written.
    """
    actor = config.actor
    if actor.adapter_name_or_path is None:
        return config
    from transformers.utils import logging

    from vlmrl.commands.merge import write_merged
    from vlmrl.models.adapter_files import read_adapter

    logging.disable_progress_bar()  # it would be shown among the lines of the run
    stored = read_adapter(actor.adapter_name_or_path, flag=_FLAG)
    remove = partial(shutil.rmtree, folder.merged, ignore_errors=True)
    remove()  # of a run that was killed
    stack.callback(remove)
    merge = Merge(
        adapter=actor.adapter_name_or_path,
        output=str(folder.merged),
        model_name_or_path=actor.model_name_or_path,
        trust_remote_code=actor.trust_remote_code,
    )
    write_merged(MergeConfig(merge=merge), stored, actor.model_name_or_path, folder.merged)
    say(f"adapter: {len(stored.targets)} layers of {actor.adapter_name_or_path} merged into the engines' model")
    merged = actor.model_copy(update={"model_name_or_path": str(folder.merged), "adapter_name_or_path": None})
    return config.model_copy(update={"actor": merged})
