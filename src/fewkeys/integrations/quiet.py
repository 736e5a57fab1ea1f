"""Keep transformers and its hub client from printing while we work; their problems become our errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines, progress bars or warnings of transformers and huggingface_hub; their settings come back after."""
    import huggingface_hub.utils
    from transformers.utils import logging

    silent = 50  # logging.CRITICAL
    ours: Any = logging
    hub: Any = huggingface_hub.utils
    level, hub_level = ours.get_verbosity(), hub.logging.get_verbosity()
    bars, hub_bars = ours.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    ours.set_verbosity(silent)
    hub.logging.set_verbosity(silent)
    ours.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hub.disable_progress_bars()
            yield
    finally:
        ours.set_verbosity(level)
        hub.logging.set_verbosity(hub_level)
        if bars:
            ours.enable_progress_bar()
        if hub_bars:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hub.enable_progress_bars()
