"""`vlmrl push`: upload a model of a run to the Hugging Face Hub, with its model card."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from rich.console import Console

from vlmrl.config.dump import HEADER
from vlmrl.config.load import load
from vlmrl.config.push import Push, PushConfig
from vlmrl.config.stages import DpoConfig, RmConfig, SftConfig
from vlmrl.config.verbs import RlConfig
from vlmrl.errors import ConfigError
from vlmrl.hub.base_model import CARD, is_hub_id, license_of, read_metadata
from vlmrl.hub.model_card import TrainedBy, write_cards
from vlmrl.hub.upload import Upload, check_complete, is_weights, plan_upload
from vlmrl.observe.lock import refuse_if_locked
from vlmrl.observe.run_folder import RunFolder
from vlmrl.plugins import ADAPTER_CONFIG, first_line
from vlmrl.system.atomic_folders import checkpoints
from vlmrl.system.plain_text import one_line, print_line
from vlmrl.system.storage import format_bytes

_MODELS = ("model", "adapter", "best", "critic", "model_ema", "adapter_ema")
_HttpError: type[Exception] = vars(hub_errors)["HTTPError"]
"""Of httpx or httpx2, whichever the Hub's client uses."""
_KINDS: tuple[type[TrainedBy], ...] = (RlConfig, SftConfig, RmConfig, DpoConfig)
_TOKEN_HINT = "set HF_TOKEN to a token with write permission (huggingface.co/settings/tokens), or run `hf auth login`"


def push(config: PushConfig, *, dry_run: bool = False) -> None:
    """Upload the model in one commit; with `dry_run` list the files only, without a token or the network.

    Raises ConfigError when the model is not complete, or the Hub refuses the upload.
    """
    console, settings = Console(), config.push
    try:
        validate_repo_id(settings.repo)
    except HFValidationError as error:
        raise ConfigError(f"push.repo: {first_line(error)}") from error
    if settings.base is not None and not is_hub_id(settings.base):
        raise ConfigError(f"push.base: {settings.base} is not a name on the Hub: give owner/name")
    folder = _model_folder(settings)
    check_complete(folder)
    if not (folder / CARD).exists():
        _write_missing_card(folder, console)
    if dry_run:
        upload = plan_upload(folder, repo=settings.repo, base=settings.base, licence={})
        _show(upload, folder, settings.repo, console)
        print_line(console, "dry run: nothing was uploaded")
        return
    token = _token()
    api = HfApi(token=token)
    with _explained(settings.repo, token):
        licence = _licence(api, settings.base or read_metadata(folder / CARD).get("base_model"))
        repo = _repository(api, settings)
        upload = plan_upload(folder, repo=repo, base=settings.base, licence=licence)
        _show(upload, folder, repo, console)
        commit = api.create_commit(repo, _operations(api, repo, upload), commit_message="Upload by vlmrl push")
    print_line(console, f"pushed: {commit.repo_url}")


def _model_folder(settings: Push) -> Path:
    """Return the folder of the model that the settings name. Raises ConfigError if there is none."""
    root = Path(settings.run).expanduser()
    if not root.is_dir():
        raise ConfigError(f"push.run: there is no folder {root}")
    if settings.model is not None and settings.model not in _MODELS:
        raise ConfigError(f"push.model {settings.model}: a run has {', '.join(_MODELS)}")
    is_model = (root / "config.json").is_file() or (root / ADAPTER_CONFIG).is_file()
    if is_model and settings.model is None:
        whole = root.resolve()
        if whole in RunFolder(whole.parent).models:
            refuse_if_locked(whole.parent)
        return root
    refuse_if_locked(root)
    existing = [name for name in _MODELS if (root / name).is_dir()]
    wanted = [settings.model] if settings.model is not None else ["model", "adapter"]
    for name in wanted:
        if name in existing:
            return root / name
    raise ConfigError(f"push.run: {root} has no {' or '.join(wanted)}: {_hint(root, existing)}")


def _hint(root: Path, existing: list[str]) -> str:
    if existing:
        return f"it has {', '.join(existing)}: name one with --model"
    if checkpoints(RunFolder(root).checkpoints):
        return "the run has not ended; resume it with --ckpt.load_enable"
    return "give the output folder of a run of rl, sft, rm or dpo, or the folder of a model"


def _write_missing_card(folder: Path, console: Console) -> None:
    """Write the card that an older version or a killed run has not written. Those of the run's other models stay."""
    absolute = folder.absolute()
    run = RunFolder(absolute.parent)
    verb = _verb(run.config)
    kind = next((kind for kind in _KINDS if kind.verb == verb), None)
    if kind is not None and absolute in run.models:
        try:
            config = load(kind, ["--config", str(run.config)])
            write_cards(config, run, console.print, needs_card=lambda model: model == absolute)
        except ConfigError as error:  # settings of another version
            print_line(console, f"{run.config}: {first_line(error)}")
    if not (folder / CARD).exists():
        print_line(console, f"{folder} has no model card ({CARD}): it is uploaded without")


def _verb(config: Path) -> str | None:
    """Return the verb of a run by its settings; None without a file that a run has written."""
    if not config.is_file():
        return None
    match = re.match(rf"{re.escape(HEADER)}vlmrl (\S+) ", config.read_text(encoding="utf-8", errors="replace"))
    return None if match is None else match[1]


def _show(upload: Upload, folder: Path, repo: str, console: Console) -> None:
    sizes = upload.sizes()
    print_line(console, f"{folder} -> {repo}: {len(sizes)} files, {format_bytes(sum(sizes.values()))}, in bytes:")
    for name, size in sizes.items():
        print_line(console, f"  {size:>15,}  {name}")
    if upload.left_out:
        print_line(console, f"not of a model, and left out: {', '.join(upload.left_out)}")


def _token() -> str:
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("the environment variable HF_HUB_OFFLINE is set: unset it")
    token = get_token()
    if token is None:
        raise ConfigError(f"there is no token of the Hub: {_TOKEN_HINT}")
    return token


def _licence(api: HfApi, base: Any) -> dict[str, str]:
    """Return the fields of the base's licence on the Hub; {} where it cannot be read, as of a gated model."""
    if not is_hub_id(base):
        return {}
    try:
        data = api.model_info(base).card_data
    except HfHubHTTPError:  # gated, renamed or private: the card then has no licence, and says so
        return {}
    return {} if data is None else license_of(vars(data))


def _repository(api: HfApi, settings: Push) -> str:
    """Make the repository unless it exists, and return its full name.

    Raises ConfigError when an existing one is public and `push.private` is set.
    """
    repo = api.create_repo(settings.repo, private=settings.private or None, exist_ok=True).repo_id
    if settings.private and not api.model_info(repo).private:
        raise ConfigError(
            f"push.private: {repo} exists and is public: make it private on the Hub, or take another name"
        )
    return repo


def _operations(api: HfApi, repo: str, upload: Upload) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Add all files, and delete weights of an earlier push, which loaders would prefer to the new ones."""
    added = [CommitOperationAdd(name, content) for name, content in upload.files.items()]
    old = {name for name in api.list_repo_files(repo) if is_weights(name)} - upload.weights
    return [*added, *(CommitOperationDelete(name) for name in sorted(old))]


@contextmanager
def _explained(repo: str, token: str) -> Iterator[None]:
    """Turn errors of the Hub and the network into one line without the token."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = one_line((error.server_message or first_line(error)).replace(token, "..."), max_chars=300)
        hints = {401: _TOKEN_HINT, 403: f"this token may not write to {repo}: {_TOKEN_HINT}"}
        raise ConfigError(f"the Hub refuses it ({status}): {reason}: {hints.get(status, 'try again')}") from None
    except ValueError as error:
        raise ConfigError(f"the Hub refuses it: {one_line(error, max_chars=300)}: mend the file") from None
    except (_HttpError, OSError, RuntimeError) as error:  # RuntimeError: of hf_xet, which uploads large files
        reason = one_line(first_line(error).replace(token, "..."), max_chars=300)
        raise ConfigError(f"the upload to {constants.ENDPOINT} failed: {reason}: try again") from None
