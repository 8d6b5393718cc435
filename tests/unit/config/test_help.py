import pytest

from vlmrl.config.help import help_text
from vlmrl.config.verb_base import VerbConfig
from vlmrl.config.verb_list import VERBS
from vlmrl.config.verbs import EvalConfig, RlConfig


@pytest.mark.parametrize("kind", VERBS)
def test_help_lists_every_setting_once_with_its_docstring(
    kind: type[VerbConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text(kind)
    assert max(map(len, text.splitlines())) < 120
    flat = " ".join(text.split())
    for name, field in kind.settings().items():
        assert text.count(f"  --{name} ") == 1
        assert field.description, f"{name} has no docstring"
        assert " ".join(field.description.split()) in flat
    assert "--dry-run" not in text


def test_help_shows_type_and_default() -> None:
    text = help_text(RlConfig, switches=("--dry-run", "--quiet"))
    assert "--dry-run" in text
    assert "  --actor.model_name_or_path TEXT  (required)\n" in text
    assert "  --actor.adam.lr NUMBER = 1e-06\n" in text
    assert "  --actor.adam.betas NUMBER NUMBER = 0.9 0.95\n" in text
    assert "  --actor.eps_clip_low_high NUMBER NUMBER\n" in text
    assert "  --data.prompt_probs NUMBER ...\n" in text
    assert "  --train.colocate_all [true|false] = false\n" in text
    assert "  --ds.zero_stage 0|1|2|3 = 2\n" in text
    assert "  --reward.functions JSON = '{\"math\": 1.0}'\n" in text
    assert "  --ckpt.save_steps INT = -1\n" in text


def test_omitted_settings_are_not_in_the_help() -> None:
    text = help_text(EvalConfig, switches=("--dry-run", "--quiet"))
    assert "adam" not in text
    assert "bucket_mib" not in text
