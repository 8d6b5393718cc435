"""The training data of verbs that learn from pairs of responses."""

from vlmrl.config.data import Data


class PairData(Data):
    """Rows with a chosen and a rejected response."""

    chosen_key: str = "chosen"
    """Column of the better response: a text, or a conversation that ends with it, whose other messages are the
    question."""
    rejected_key: str = "rejected"
    """Column of the worse response, like `data.chosen_key`. Conversations may have their own questions and images."""
    margin_key: str | None = None
    """Column of the number by which the chosen response is better."""


PAIR_KEYS: dict[str, str | None] = {
    name: PairData.model_fields[name].default for name in ("chosen_key", "rejected_key", "margin_key")
}
"""Settings that name a column of pairs -> their defaults."""
