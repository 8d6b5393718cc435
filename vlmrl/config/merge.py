"""Input and output of `vlmrl merge`."""

from vlmrl.config.base import Section, Text


class Merge(Section):
    """Adapter, base model, and output folder."""

    adapter: Text
    """Folder of the adapter, in PEFT's format: adapter/ of a run with `ds.lora.rank`. The merged model has that run's
    dtype, unless `ds.param_dtype` is given."""
    output: Text
    """Folder for the merged model; it must not exist yet, or be empty."""
    model_name_or_path: Text | None = None
    """Local folder or Hub id of the base; without it `merge` asks at the terminal whether to use the one
    that the adapter names."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose author you trust."""
