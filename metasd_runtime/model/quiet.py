"""Loading models without the library's progress bars; its warnings stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Switch the progress bars of ``transformers`` off, and back as they were."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
