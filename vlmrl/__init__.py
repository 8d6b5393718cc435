"""vlmrl: reinforcement learning of language and vision-language models, on Ray, vLLM and DeepSpeed."""

__version__ = "0.1.0"
