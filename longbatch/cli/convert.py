"""`longbatch convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longbatch.errors import ExitCode


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a .gguf file")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="model folder to write")],
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="float32|bfloat16|float16", help="number format of the weights written")
    ] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a model folder that is there")] = False,
) -> ExitCode:
    """Turn a GGUF file into a model folder. Config, weights, tokenizer and chat template are written."""
    from longbatch.models.gguf import convert as convert_file

    print(convert_file(file, folder, overwrite=overwrite, dtype=dtype))
    return ExitCode.OK
