"""Media in: what rows point at becomes bounded, checked content. So far documents of text and HTML."""

from longbatch.media.documents import load_document

__all__ = ["load_document"]
