"""Prompts: tokenizer, chat template, and the token ids that the model reads for each request."""

from longbatch.prompt.builder import PromptBuilder
from longbatch.prompt.reasoning import split_reasoning
from longbatch.prompt.template import ChatTemplate
from longbatch.prompt.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "PromptBuilder", "Tokenizer", "split_reasoning"]
