"""Rows in: manifests of every dialect and file format become `Request`s, and what cannot becomes a `Fault`."""

from longbatch.manifest.manifest import Manifest
from longbatch.manifest.options import ManifestOptions
from longbatch.manifest.sources import Source
from longbatch.manifest.validate import ValidationReport, validate

__all__ = ["Manifest", "ManifestOptions", "Source", "ValidationReport", "validate"]
