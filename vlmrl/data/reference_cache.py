"""Log-probs of responses under a frozen reference, kept in a file: computed once per row, also if a run is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vlmrl.errors import ConfigError
from vlmrl.system.storage import writing
from vlmrl.types import Sample


class ReferenceCache:
    """Log-probs of responses, summed over each, by the content of prompt, images and response.

    The file has one JSON object per line: the reference, then `{"key": ..., "logprob": ..., "row": ...}`, and
    `{"rows": n, "data": ...}` once the first n rows of these data are all there.
    """

    def __init__(self, path: Path | None, *, reference: str) -> None:
        """Read `path` if it exists; None keeps the values in memory only. `reference` says which model it is, and in
        what numbers it computes.

        Raises:
            ConfigError: the file is damaged, or of another reference.
        """
        self._path = path
        self._values: dict[str, float] = {}
        self._complete: dict[str, int] = {}
        """Data -> number of their rows, from the first on, whose responses are all there."""
        if path is None:
            return
        if path.exists():
            self._read(path, reference)
        else:
            with writing(path.name, path.parent):
                path.write_text(json.dumps({"reference": reference}) + "\n")

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_rows(self) -> int:
        """The largest number of rows that were all there, of any data."""
        return max(self._complete.values(), default=0)

    def missing(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples without a value, each content once."""
        new = {key: sample for sample in samples if (key := sample_key(sample)) not in self._values}
        return list(new.values())

    def add(self, samples: Sequence[Sample], values: NDArray[np.float64]) -> None:
        """Keep the values of samples. Raises StorageError on a disk error."""
        lines = []
        for sample, value in zip(samples, values.tolist(), strict=True):
            key = sample_key(sample)
            self._values[key] = value
            lines.append(json.dumps({"key": key, "logprob": value, "row": sample.source}) + "\n")
        self._append("".join(lines))

    def is_complete(self, num_rows: int, *, data: str) -> bool:
        """Whether the responses of the first rows of these data are all there."""
        return self._complete.get(data, 0) >= num_rows

    def set_complete(self, num_rows: int, *, data: str) -> None:
        """Note that the responses of the first rows of these data are all there."""
        self._complete[data] = num_rows
        self._append(json.dumps({"rows": num_rows, "data": data}) + "\n")

    def values(self, samples: Sequence[Sample]) -> NDArray[np.float64]:
        """Return the values of samples: [N]. Raises KeyError for one without a value."""
        return np.array([self._values[sample_key(sample)] for sample in samples], dtype=np.float64)

    def _append(self, text: str) -> None:
        if self._path is not None and text:
            with writing(self._path.name, self._path.parent), self._path.open("a") as file:
                file.write(text)

    def _read(self, path: Path, reference: str) -> None:
        with writing(path.name, path.parent):
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # a killed run may have left half a line
                path.write_text(whole)
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            saved = first["reference"]
            for line in lines:
                if "rows" in line:
                    self._complete[line["data"]] = line["rows"]
                else:
                    self._values[line["key"]] = float(line["logprob"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): delete it, and the reference is computed again") from error
        if saved != reference:
            raise ConfigError(
                f"{path} was computed with {saved}, and this run's reference is {reference}: give the same model and "
                "types, or delete the file, and the reference is computed again"
            )


def sample_key(sample: Sample) -> str:
    """Digest of a sample's tokens, images and response, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (sample.tokens.tobytes(), sample.sampled.tobytes(), *(item.hash.encode() for item in sample.media)):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
