import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vlmrl.errors import ConfigError
from vlmrl.hub.upload import Upload, check_complete, plan_upload

CARD = """---
{metadata}
library_name: transformers
tags: [vlmrl]
---
# A model

The licence of the base model is not known here: see its model card before you share this model.

load("path/to/this/folder")
"""


def model(folder: Path, *, metadata: str = "") -> Path:
    folder.mkdir(parents=True)
    save_file({"a": np.zeros(8, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(CARD.format(metadata=metadata))
    return folder


def adapter(folder: Path, base: str, *, metadata: str = "") -> Path:
    folder.mkdir(parents=True)
    save_file({"a": np.zeros(8, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 8}))
    (folder / "README.md").write_text(CARD.format(metadata=metadata))
    return folder


def plan(folder: Path, *, base: str | None = None, licence: dict[str, str] | None = None) -> Upload:
    return plan_upload(folder, repo="me/mine", base=base, licence=licence or {})


def content(upload: Upload, name: str) -> str:
    file = upload.files[name]
    return file.decode() if isinstance(file, bytes) else file.read_text()


def test_only_files_of_a_model_are_uploaded(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "optimizer.pt").touch()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    (folder / "global_step").mkdir()
    (folder / "global_step" / "mp_rank_00_model_states.pt").touch()
    (folder / "global_step" / "config.json").write_text("{}")
    for name in ("notes.txt", "wandb.json"):
        (folder / name).write_text("mine")
    (folder / "merges.txt").symlink_to("/etc/hostname")
    upload = plan(folder)
    assert sorted(upload.files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    states = {"global_step/mp_rank_00_model_states.pt", "global_step/config.json"}
    assert set(upload.left_out) == states | {"optimizer.pt", ".cache/x.json", "notes.txt", "wandb.json", "merges.txt"}
    assert upload.sizes()["tokenizer.json"] == 2
    assert upload.weights == {"model.safetensors"}


def cached(folder: Path, cache: Path) -> Path:
    """Make a folder as a snapshot in the Hub's cache: links to files whose names are hashes."""
    blobs = cache / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:0{64 if file.suffix == '.safetensors' else 40}x}"
        file.rename(blob)
        file.symlink_to(blob)
    return folder


def test_a_folder_of_links_into_the_cache_of_the_hub_is_uploaded_as_files(tmp_path: Path) -> None:
    folder = cached(model(tmp_path / "model"), tmp_path / "hub")
    (folder / "merges.txt").symlink_to(tmp_path / "hub" / "models--owner--name" / "notes.txt")
    (tmp_path / "hub" / "models--owner--name" / "notes.txt").touch()
    (folder / "vocab.json").symlink_to(tmp_path / "hub" / "models--owner--name" / "blobs" / ("f" * 40))  # pruned
    upload = plan(folder)
    assert sorted(upload.files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert upload.left_out == ("merges.txt", "vocab.json")
    assert upload.sizes()["config.json"] == len('{"model_type": "qwen3"}')
    assert content(upload, "tokenizer.json") == "{}"


def test_a_folder_of_links_to_another_models_files_is_uploaded_as_files(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    folder = tmp_path / "model"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "vocab.json").symlink_to(base / "tokenizer.json")  # not what its name says
    upload = plan(folder)
    assert sorted(upload.files) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert upload.left_out == ("vocab.json",)


def test_a_link_to_a_file_of_no_model_is_never_uploaded(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    names = ("tokenizer.json", "README.md", "extra.safetensors", "chat_template.jinja")
    for name in names:
        (private / name).write_text('{"token": "geheim"}')
    (private / "config.json").write_text('{"auths": {"registry": "geheim"}}')
    folder = model(tmp_path / "model")
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(private / name)
    upload = plan(folder)
    assert sorted(upload.files) == ["config.json", "model.safetensors"]
    assert set(upload.left_out) == set(names)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(private / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json is a link to .*, which is no file of a model: put the file"):
        plan(folder)


def test_files_of_tokens_are_known_by_name(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    for name in ("special_tokens_map.json", "added_tokens.json", "api_tokens.json"):
        (folder / name).write_text("{}")
    upload = plan(folder)
    assert {"special_tokens_map.json", "added_tokens.json"} < upload.files.keys()
    assert upload.left_out == ("api_tokens.json",)


def test_the_card_gets_the_name_of_the_repository_the_base_and_its_licence(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    card = content(plan(folder, base="owner/base", licence={"license": "mit"}), "README.md")
    assert 'load("me/mine")' in card
    assert "base_model: owner/base" in card
    assert "license: mit" in card
    assert "Licence of the base model: `mit`." in card
    assert "not known here" not in card
    assert "path/to/this/folder" in (folder / "README.md").read_text(), "the file here stays as it is"


def test_a_licence_in_the_card_stays(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", metadata="license: apache-2.0")
    assert "license: apache-2.0" in content(plan(folder, licence={"license": "mit"}), "README.md")


def test_an_adapter_names_its_base_on_the_hub(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", str(tmp_path / "base"))
    with pytest.raises(ConfigError, match="give the name of the same model on the Hub with --base"):
        plan(folder)
    upload = plan(folder, base="owner/base")
    assert json.loads(content(upload, "adapter_config.json")) == {"base_model_name_or_path": "owner/base", "r": 8}
    named = adapter(tmp_path / "named", str(tmp_path / "base"), metadata="base_model: owner/other")
    assert json.loads(content(plan(named), "adapter_config.json"))["base_model_name_or_path"] == "owner/other"
    on_hub = adapter(tmp_path / "on_hub", "owner/base")
    assert isinstance(plan(on_hub).files["adapter_config.json"], Path), "it is uploaded as it is"


def test_paths_of_this_machine_are_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "geheim-0123456789")
    folder = model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"_name_or_path": str(tmp_path / "base"), "a": 1}))
    nested = {
        "text_config": {"_name_or_path": str(tmp_path), "b": [{"name_or_path": "./x"}, 1]},
        "_name_or_path": "a/b",
    }
    (folder / "generation_config.json").write_text(json.dumps(nested))
    (folder / "README.md").write_text("---\ntags: [x]\n---\ngeheim-0123456789\n")
    upload = plan(folder)
    assert json.loads(content(upload, "config.json")) == {"a": 1}
    public = {"text_config": {"b": [{}, 1]}, "_name_or_path": "a/b"}
    assert json.loads(content(upload, "generation_config.json")) == public
    with_base = plan(folder, base="owner/base")
    assert json.loads(content(with_base, "config.json")) == {"_name_or_path": "owner/base", "a": 1}
    assert json.loads(content(with_base, "generation_config.json")) == public, "parts are not the base"
    assert "geheim" not in content(upload, "README.md")


def test_incomplete_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        check_complete(tmp_path / "empty")
    folder = model(tmp_path / "model")
    check_complete(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for part in (b"", whole[:8], whole[:-1], whole + b"x", b"\xff" * 20, whole[:8] + b"x" * len(whole[8:])):
        weights.write_bytes(part)
        with pytest.raises(ConfigError, match=r"model.safetensors is damaged: .*; write the model again"):
            check_complete(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        check_complete(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="pickled weights"):
        check_complete(folder)


def test_all_shards_must_be_there(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_complete(folder)
    save_file({"b": np.zeros(8, np.float32)}, folder / names["b"])
    check_complete(folder)
    assert plan(folder).weights == {*names.values(), index.name}
    index.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_complete(folder)


def test_metadata_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / "README.md").write_text("---\n- a\n- b\n---\n# x\n")
    with pytest.raises(ConfigError, match="its metadata is not valid"):
        plan(folder)
    (folder / "README.md").unlink()
    assert "README.md" not in plan(folder).files
