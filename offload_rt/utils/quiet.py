"""Reduce the output of transformers in our own commands. `LLM` does not change these settings."""

from __future__ import annotations

import os
import sys


def quiet_transformers() -> None:
    """Make transformers log only errors, and disable its progress bars.

    If transformers has not been imported yet, the user's environment variables take precedence.
    """
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    else:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
