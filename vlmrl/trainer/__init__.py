"""Training loops over Protocols, free of Ray, DeepSpeed and vLLM."""
