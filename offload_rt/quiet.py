"""Programs of our own say themselves what goes on; transformers' messages and bars beside theirs are too many. `LLM` in
somebody else's program leaves them as they are set."""

from __future__ import annotations

import os
import sys


def quiet_transformers() -> None:
    """Lets transformers say only errors, and show no progress bars. Where it is not imported yet it is told by the
    environment, unless that says otherwise."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    else:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
