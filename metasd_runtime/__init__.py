"""Target, drafters, verification and the decode loop: MetaSD on PyTorch and transformers."""
