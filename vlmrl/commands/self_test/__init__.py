"""`vlmrl doctor --self-test`: proves on this machine, with tiny models made on the spot, what a run relies on."""
