"""The model card of an adapter that was merged into its base."""

from __future__ import annotations

import shutil
from pathlib import Path

from vlmrl.hub.base_model import CARD, read_base, read_metadata
from vlmrl.hub.privacy import public_value, without_secrets

_CURVES = "curves.png"
_OF_THE_RUN = "## Results"
"""The first section of an adapter's card that is as true of the merged model."""
_USE, _AFTER_USE = "## Use", "## How it was verified"


def write_merged_card(adapter: Path, base: str, output: Path) -> None:
    """Write the card of the merged model: what the adapter's card says of its run, with the base's licence."""
    from huggingface_hub import ModelCardData

    model, metadata = read_base(base), read_metadata(adapter / CARD)
    data = ModelCardData(
        base_model=model.hub_id,
        datasets=metadata.get("datasets"),
        library_name="transformers",
        pipeline_tag=metadata.get("pipeline_tag"),
        tags=metadata.get("tags") or ["vlmrl"],
        license=model.license.get("license"),
        license_name=model.license.get("license_name"),
        license_link=model.license.get("license_link"),
    )
    name = public_value(str(adapter.absolute()))
    text = f"---\n{data.to_yaml()}\n---\n\n# {output.absolute().name}\n\n"
    text += f"The adapter `{name}`, merged into `{model.name}` by `vlmrl merge`.\n"
    (output / CARD).write_text(without_secrets(text + _sections_of_the_run(adapter / CARD)), encoding="utf-8")
    if (adapter / _CURVES).is_file():
        shutil.copyfile(adapter / _CURVES, output / _CURVES)


def _sections_of_the_run(card: Path) -> str:
    """Return results, verification, data and settings of the adapter's run; empty for an adapter of other programs."""
    if not card.is_file():
        return ""
    _, found, sections = card.read_text(encoding="utf-8").partition(f"\n{_OF_THE_RUN}\n")
    before, used, after = sections.partition(f"\n{_USE}\n")
    if not (found and used and _AFTER_USE in after):
        return ""
    return f"\n{_OF_THE_RUN}\n{before}\n{_AFTER_USE}{after.partition(_AFTER_USE)[2]}"
