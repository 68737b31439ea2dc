"""``metasd bench``: methods side by side on the same prompts; ``metasd report`` shows them again.

``suite`` says what is to be measured, ``tasks`` reads its prompts, ``methods`` makes what decodes
them, ``run`` decodes and records, ``results`` reads the records back; ``tables``, ``pictures`` and
``page`` show them.
"""
