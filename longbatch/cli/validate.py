"""`longbatch validate`."""

from __future__ import annotations

from longbatch.cli.options import Sources, print_json, settings_flags
from longbatch.config import Settings
from longbatch.errors import ExitCode

# Settings that `ManifestOptions` has under the same names.
_READ = (
    "task",
    "prompt",
    "system",
    "keep_columns",
    "ignore_unsupported",
    "media_root",
    "max_row_bytes",
    "limit",
    "only",
)


@settings_flags(*_READ, "json")
def validate(sources: Sources, settings: Settings) -> ExitCode:
    """Report all faults of a manifest at once. Reads every row; needs no model and no GPU."""
    from longbatch.manifest import Manifest, ManifestOptions
    from longbatch.manifest import validate as validate_manifest

    options = ManifestOptions(**{name: getattr(settings, name) for name in _READ})
    report = validate_manifest(Manifest.open(sources, options))
    if settings.json:
        print_json(report.as_dict())
    else:
        print("\n".join(report.render()))
    if report.num_ok == 0:
        return ExitCode.MANIFEST
    return ExitCode.FAILED_ROWS if report.num_failed else ExitCode.OK
