"""What the workers of `tests.distributed_launch` share: their command line, and a file of results from each rank."""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def worker_arguments() -> argparse.ArgumentParser:
    """The options that every worker has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    return parser


def run_scenarios(names: Iterable[str], run: Callable[[str, str, Path, int], dict]) -> None:
    """Run the scenarios named on the command line one after another, in the same processes.

    Each rank writes what it saw, with the `seconds` it took, to `<output>/<scenario>.rank<rank>.json`.

    Args:
        names: of the scenarios that there are.
        run: gets a name, the folder of the model, the output folder and the number of processes.
    """
    parser = worker_arguments()
    parser.add_argument("--processes", required=True, type=int)
    parser.add_argument("scenarios", nargs="+", choices=list(names))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.scenarios:
        start = time.perf_counter()
        result = run(name, options.model, options.output, options.processes)
        result["seconds"] = time.perf_counter() - start
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (options.output / f"{name}.rank{rank}.json").write_text(json.dumps(result))
