"""Environment variables that count as secrets."""

import pytest

from vlmrl.system.environment_variables import hide_secrets, is_secret, secret_values


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "RAY_AUTH_TOKEN", "VLMRL_RM_TOKEN"),
        *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_TOKEN", "PGPASSWORD", "DB_PASS", "ghtoken"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "GITHUB_PAT", "MYSQL_PWD", "SENTRY_DSN"),
        *("APP_SECRETS", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_a_secret_is_recognised_by_its_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "TOKENIZERS_PARALLELISM",
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "KEYBOARD",
        "AUTHOR",
        "HF_HOME",
        "PWD",
        "OLDPWD",
        "MAX_TOKENS",
    ],
)
def test_no_other_name_is_a_secret(name: str) -> None:
    assert not is_secret(name)


def test_values_of_secrets_come_longest_first_without_short_ones() -> None:
    environment = {"MY_KEY": "abcdef", "HF_TOKEN": "abcdefgh\n", "GITHUB_PAT": "true", "PATH": "/usr/local/bin"}
    assert secret_values(environment) == ["abcdefgh", "abcdef"]


def test_all_secrets_but_the_kept_are_hidden() -> None:
    environment = {"HF_TOKEN": "a", "MY_KEY": "b", "PATH": "c"}
    hide_secrets(environment, keep=["MY_KEY"])
    assert environment == {"MY_KEY": "b", "PATH": "c"}
