"""`vlmrl doctor --self-test`: check on this machine, with tiny models, the capabilities that runs rely on."""
