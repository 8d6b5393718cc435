"""The loops, over Protocols: no Ray, DeepSpeed or vLLM in them."""
