"""The run directory: write, read, summarise.

History of the format (``schema`` in run.json)
    1  run.json (RunManifest) and one append-only rank-NNNNN.jsonl per rank. Each line is an object
       with a ``record`` key: start, begin, phase, step, times, anatomy, time_breakdown, warning,
       failure, end (by the rank) and exit (by the rank's parent process); begin and warning were
       added later, and readers skip what they do not know. Memory is written when it is read;
       times follow one step later. Beside a long rank file lie its columns (``kept_columns``),
       derived from it.
"""

from fsdp_doctor.runs.reader import load_launches, load_run
from fsdp_doctor.runs.writer import SCHEMA, RankWriter, write_manifest

__all__ = ["SCHEMA", "RankWriter", "load_launches", "load_run", "write_manifest"]
