"""`longbatch models`: list, pull, check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longbatch.errors import ExitCode

app = typer.Typer(
    help="List, fetch and check models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_models() -> ExitCode:
    """List the models on this machine. Each can be named with --model; supported architectures follow."""
    from longbatch.models.local import local_models
    from longbatch.models.registry import ARCHITECTURES

    found = local_models()
    for model in found:
        print(f"{model.name}  {model.architecture}  {model.folder}")
    if not found:
        print("no models here; fetch one with `longbatch models pull ORGANIZATION/NAME`")
    print(f"supported: {', '.join(ARCHITECTURES)}")
    return ExitCode.OK


@app.command("pull")
def pull(
    model: Annotated[str, typer.Argument(metavar="ID", help="hub id, ORGANIZATION/NAME")],
    revision: Annotated[str, typer.Option("--revision", metavar="NAME", help="branch, tag or commit")] = "main",
    folder: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="folder to fetch into; the hub's cache if not given")
    ] = None,
) -> ExitCode:
    """Fetch a model from the hub. Safetensors, settings and tokenizer are fetched, never code."""
    from longbatch.models.hub import pull as pull_model

    path, source = pull_model(model, revision, folder)
    print(f"{path}: {source.repo_id} at {source.commit}, licence {source.license or 'not stated'}")
    return ExitCode.OK


@app.command("check")
def check(
    model: Annotated[str, typer.Argument(metavar="FOLDER|ID", help="model folder, or hub id that was pulled")],
) -> ExitCode:
    """Check that a model can be loaded. Config, every tensor, tokenizer and chat template, without loading it."""
    from longbatch.models.checkpoint import checkpoint_files, stored_tensors
    from longbatch.models.hub import resolve
    from longbatch.models.matching import match_tensors
    from longbatch.models.quantized import read_scheme
    from longbatch.models.registry import read_json, read_spec
    from longbatch.prompt import ChatTemplate, Tokenizer

    folder = resolve(model)
    spec, scheme = read_spec(folder), read_scheme(read_json(folder / "config.json"))
    stored = stored_tensors(checkpoint_files(folder))
    matches = match_tensors(spec, stored, scheme)
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder)
    print(f"{folder}: {spec.architecture}, {spec.num_parameters / 1e6:,.0f} M parameters in {len(spec.layers)} layers")
    print(f"longest sequence {spec.max_length:,} tokens, {spec.kv_entries_per_token:,} K/V numbers a token")
    if scheme is not None:
        num_quantized = sum(match.quantized for match in matches)
        print(f"{num_quantized} of {len(matches)} weights quantized ({scheme.title}), dequantized when they are loaded")
    print(f"{len(stored)} tensors, {tokenizer.vocab_size:,} tokens, {'a' if template else 'no'} chat template")
    return ExitCode.OK
