"""How answers are drawn, and which seed each request carries."""

import hashlib
from dataclasses import dataclass

from vlmrl.errors import ConfigError

_LARGEST_SEED = 2**62 - 1
"""vLLM gives answer k of a request the seed + k, as a signed 64-bit number: this leaves room for every k."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answers to one prompt are drawn.

    Raises ConfigError for values that no engine can sample with.
    """

    n: int
    """Answers per prompt."""
    temperature: float
    """Divides the logits; 0 is greedy."""
    top_p: float
    """Nucleus: the smallest set of tokens with this probability mass is sampled from."""
    max_new_tokens: int
    """Longest answer, in tokens, the end token included."""
    seed: int
    """Of the run, or of one evaluation: requests with equal seed and equal prompt index draw equal noise."""

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_new_tokens < 1:
            raise ConfigError(
                f"cannot sample {self.n} answers of {self.max_new_tokens} tokens: both must be at least 1"
            )
        if self.n > 1 and self.temperature == 0.0:
            raise ConfigError(
                f"temperature 0 gives {self.n} times the same answer: ask for one, or raise the temperature"
            )
        if self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"cannot sample with temperature {self.temperature} and top_p {self.top_p}: "
                "temperature is 0 or above, top_p in (0, 1]"
            )

    def request_seed(self, index: int) -> int:
        """Seed of the request for the prompt with this index, in [0, 2**62).

        A hash and not `seed + index`: sums would give answer 1 of one prompt the noise of answer 0 of the next.
        """
        name = f"{self.seed}/{index}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") & _LARGEST_SEED
