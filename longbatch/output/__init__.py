"""Results out: journal, parts, what is done, merge, verify, export."""

from longbatch.output.done import Done, Match, RowState, scan
from longbatch.output.export import FORMATS as EXPORT_FORMATS
from longbatch.output.export import export
from longbatch.output.fidelity import Fidelity, fidelity, ran_sparse, read_gaps, verify_folder
from longbatch.output.folder import RunFolder
from longbatch.output.keys import KeyTable
from longbatch.output.merge import MergeSummary, merge, read_success, result_files
from longbatch.output.parts import Damage, Published, recover, set_aside
from longbatch.output.rows import Placement
from longbatch.output.schema import SCHEMA_VERSION, result_schema
from longbatch.output.verify import VerifyReport, verify
from longbatch.output.writer import ResultWriter

__all__ = [
    "EXPORT_FORMATS",
    "SCHEMA_VERSION",
    "Damage",
    "Done",
    "Fidelity",
    "KeyTable",
    "Match",
    "MergeSummary",
    "Placement",
    "Published",
    "ResultWriter",
    "RowState",
    "RunFolder",
    "VerifyReport",
    "export",
    "fidelity",
    "merge",
    "ran_sparse",
    "read_gaps",
    "read_success",
    "recover",
    "result_files",
    "result_schema",
    "scan",
    "set_aside",
    "verify",
    "verify_folder",
]
