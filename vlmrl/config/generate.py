"""The rows that `vlmrl generate` reads and writes, and their checks."""

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.config.base import NonNegativeFloat, PositiveInt, Section, Text, Unread
from vlmrl.config.built_in import REWARD_FUNCTIONS
from vlmrl.config.data import Columns
from vlmrl.config.reward import Reward, has_source, rewards_vary
from vlmrl.config.rollout import Rollout

OUTPUT_SUFFIXES = (".jsonl", ".parquet")


class Generate(Section):
    """The rows that are written."""

    output: Text | None = None
    """File of the rows, .jsonl or .parquet; by default `generated.jsonl` in `ckpt.output_dir`. Images lie beside it, in
    `images/`. The file appears when all responses are complete; until then they are in `ckpt.output_dir`, and the same
    command goes on after a kill."""
    keep: Literal["all", "best", "pairs", "labels"] | None = None
    """Rows made of the responses to a prompt. `all`: every response is a row, in the column `answer`; `best`: the one
    with the highest score, the first of equals, in `answer` (for `sft`); `pairs`: the best and the worst in `chosen`
    and `rejected` if their scores differ (for preferences); `labels`: every response in `answer`, with a `label` that
    says whether it is good (for KTO). Responses that were cut at `rollout.max_new_tokens` are rows of `all` only, with
    `truncated` true. By default `best` with `rollout.best_of`, else `all`. It may be changed later without sampling
    again, if the reward settings stay the same."""
    min_score: float | None = None
    """With `generate.keep best` and `pairs`, prompts whose best response has a lower score make no row."""
    label_threshold: float | None = None
    """With `generate.keep labels`, a response is good if its score is above this. By default, if it is correct: as
    pass@1 counts, by the reward that checks it (`math`, `exact`), else by a score above 0.5."""


class GenerateData(Columns):
    """The dataset whose rows are responded to, in their order."""

    prompt_dataset: Text
    """Dataset, named as for `vlmrl rl`; several are separated by commas."""
    prompt_split: str = "train"
    """Split of the dataset."""
    max_samples: PositiveInt = 100_000_000
    """Use at most this many rows of each dataset."""


class GenerateRollout(Rollout):
    """Sampling of responses."""

    batch_size: PositiveInt = 128
    """Prompts that are responded to before their responses are written; those of an unfinished batch are sampled again
    after a kill."""
    n_samples_per_prompt: PositiveInt = 1
    """Responses per prompt."""
    best_of: Annotated[int, Field(ge=2)] | None = None
    """Rejection sampling: sample so many responses per prompt, and write the one with the highest score."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling."""


def keep_of(generate: Generate, rollout: GenerateRollout) -> Literal["all", "best", "pairs", "labels"]:
    """Return `generate.keep` with its default filled in."""
    return generate.keep or ("all" if rollout.best_of is None else "best")


def needs_scores(generate: Generate, rollout: GenerateRollout) -> bool:
    """Whether the rows depend on the scores of responses."""
    return keep_of(generate, rollout) != "all"


def num_responses(rollout: GenerateRollout) -> int:
    """Return the responses per prompt."""
    return rollout.best_of or rollout.n_samples_per_prompt


def unread_of_generate(generate: Generate, rollout: GenerateRollout) -> Unread:
    unread, keep = {}, keep_of(generate, rollout)
    if keep not in ("best", "pairs"):
        unread["generate.min_score"] = f"generate.keep is {keep}"
    if keep != "labels":
        unread["generate.label_threshold"] = f"generate.keep is {keep}"
    if rollout.best_of is not None:
        unread["rollout.n_samples_per_prompt"] = "rollout.best_of is the number of responses per prompt"
    return unread


def conflicts_of_videos(columns: Columns) -> list[str]:
    return [] if columns.video_key is None else ["data.video_key is set, but vlmrl generate writes no videos yet"]


def conflicts_of_generate(generate: Generate, rollout: GenerateRollout, reward: Reward) -> list[str]:
    conflicts = []
    count, keep = num_responses(rollout), keep_of(generate, rollout)
    if generate.output is not None and not generate.output.endswith(OUTPUT_SUFFIXES):
        conflicts.append(f"generate.output {generate.output}: its name must end in {' or '.join(OUTPUT_SUFFIXES)}")
    if rollout.best_of is not None and keep != "best":
        conflicts.append(
            f"rollout.best_of keeps the best response and generate.keep is {keep}: set rollout.n_samples_per_prompt "
            "instead"
        )
    if keep == "pairs" and count == 1:
        conflicts.append("generate.keep pairs needs two responses per prompt: raise rollout.n_samples_per_prompt")
    if rollout.temperature == 0 and count > 1:
        conflicts.append(f"rollout.temperature 0 gives the same response {count} times: raise it")
    if keep == "all":
        return conflicts
    if not has_source(reward, has_agent=False):
        conflicts.append(
            f"generate.keep {keep} needs scores: set reward.functions, reward.remote_url or reward.model_name_or_path"
        )
    elif not rewards_vary(reward, has_agent=False):
        conflicts.append(
            f"generate.keep {keep} needs scores that differ, and every reward has weight 0: give one of them another"
        )
    checks = any(REWARD_FUNCTIONS[name].checks_response for name in reward.functions)
    has_scorer = reward.model_name_or_path is not None and reward.model_weight != 0
    if keep == "labels" and generate.label_threshold is None and has_scorer and not checks:
        conflicts.append(
            "generate.keep labels: the scores of reward.model_name_or_path do not say from where on a response is "
            "good: set generate.label_threshold"
        )
    return conflicts
