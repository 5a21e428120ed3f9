"""Numbers as short text: counts, bytes, times."""

from __future__ import annotations

import math


def count_text(value: float) -> str:
    """A count in at most about four characters: 950, 1.2k, 41k, 3.1M."""
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        # Rounded values decide, so that 999,999 is 1.0M and not 1000k.
        if round(value / divisor) < 1000 or limit == math.inf:
            scaled = value / divisor
            digits = 1 if divisor > 1 and scaled < 9.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    raise AssertionError("the last limit is infinite")


def rate_text(value: float) -> str:
    """A rate per second, with a decimal where it is small: 0.31, 3.1, 41k."""
    if value < 9.95:
        return f"{value:.2g}"
    return count_text(value)


def bytes_text(value: float) -> str:
    """A number of bytes in binary units: 512 B, 1.5 GiB."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(value) >= 1024 and len(units) > 1:
        units.pop()
        value /= 1024
    whole = units[-1] == "B" or abs(value) >= 99.95
    return f"{value:.{0 if whole else 1}f} {units[-1]}"


def seconds_text(value: float) -> str:
    """A time by its two largest units: 0.4s, 12s, 3m05s, 2h10m, 3d04h."""
    if value < 9.95:
        return f"{value:.1f}s"
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def money_text(value: float) -> str:
    """An amount in whatever currency the price was given in: 0.042, 12.30, 1,234.00."""
    return f"{value:,.2f}" if value == 0 or value >= 0.1 else f"{value:.2g}"
