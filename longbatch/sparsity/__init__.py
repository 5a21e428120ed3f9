"""Which sparse pattern each attention head uses: pattern names and budgets, and the profile that assigns them."""

from longbatch.sparsity.minference import import_minference
from longbatch.sparsity.patterns import PATTERNS, LayerPatterns, Parameter, PatternInfo, PatternSpec
from longbatch.sparsity.profile import HeadChoice, LayerChoices, Profile, ProfileError

__all__ = [
    "PATTERNS",
    "HeadChoice",
    "LayerChoices",
    "LayerPatterns",
    "Parameter",
    "PatternInfo",
    "PatternSpec",
    "Profile",
    "ProfileError",
    "import_minference",
]
