"""Settings of a run, and where each value came from. Torch-free."""

from longbatch.config.settings import Settings, choices, flag_name, help_text, is_switch
from longbatch.config.sources import OTHER_VARIABLES, PREFIX, Resolved, resolve

__all__ = [
    "OTHER_VARIABLES",
    "PREFIX",
    "Resolved",
    "Settings",
    "choices",
    "flag_name",
    "help_text",
    "is_switch",
    "resolve",
]
