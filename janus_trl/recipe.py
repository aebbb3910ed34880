"""Recipe YAML and command line -> checked arguments, with one clear message where something is wrong."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import PretrainedConfig
from trl import TrlParser

from .adapter_files import is_adapter
from .config_checks import check_batch_sizes, did_you_mean, started_processes

# Hub ids of converted checkpoints, for who comes with an original one.
CONVERTED = "deepseek-community/Janus-Pro-1B or deepseek-community/Janus-Pro-7B"
# In which it ends the other processes of a machine when one has failed.
SECONDS_OF_THE_LAUNCHER = 3.0


class RecipeParser(TrlParser):
    """`TrlParser` whose errors are exceptions, which suggests the nearest name for an unknown option."""

    def __init__(self, classes):
        super().__init__(classes, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse_known_args(self, args=None, namespace=None):
        namespace, unknown = super().parse_known_args(args, namespace)
        if flags := [word for word in unknown if word.startswith("--")]:
            raise ValueError(unknown_option(flags[0].lstrip("-").split("=")[0], vars(namespace), "command line"))
        dry_run, started = getattr(namespace, "dry_run", False), started_processes()
        if dry_run and started > 1 and hasattr(namespace, "num_processes"):
            if namespace.num_processes not in (None, started):
                raise ValueError(
                    f"num_processes = {namespace.num_processes}, but {started} processes were started. Leave it unset, "
                    "or check in one process, without a launcher."
                )
            namespace.num_processes = started
        if dry_run and getattr(namespace, "accelerate_config", None) and not namespace.num_processes:
            from .memory_setup import machine_from  # imports TRL's trainers, which other scripts need not wait for

            namespace.num_processes = machine_from(namespace.accelerate_config, None).processes
        processes = getattr(namespace, "num_processes", None)
        if processes and dry_run and started == 1 and hasattr(namespace, "num_generations"):
            # One plain process checks the batch of the run that `processes` will do: here it holds their rows.
            check_batch_sizes(
                processes=processes,
                per_device=namespace.per_device_train_batch_size,
                accumulation=namespace.gradient_accumulation_steps,
                steps_per_generation=namespace.steps_per_generation,
                generation_batch_size=namespace.generation_batch_size,
                num_generations=namespace.num_generations,
            )
            namespace.per_device_train_batch_size *= processes
        return namespace, unknown


def unknown_option(name: str, known: dict[str, Any], where: str) -> str:
    """The message for an option that does not exist."""
    hint = did_you_mean(name.replace("-", "_"), known) or " `--help` lists all options."
    return f"{where}: there is no option {name!r}.{hint}"


def parse_recipe(classes: tuple[type, ...], argv: list[str]) -> tuple[Any, ...]:
    """One instance of each dataclass, from `--config recipe.yaml` and `--key value` overrides.

    Raises:
        ValueError: on a missing file, an unknown option (with the nearest one) or a value that does not fit.
    """
    argv = config_apart(argv)
    names = {field.name: None for cls in classes for field in fields(cls) if field.init}
    if "--config" in argv:
        where = argv.index("--config") + 1
        if where == len(argv):
            raise ValueError("--config needs the path of a recipe, e.g. --config recipes/tiny/t2i.yaml.")
        for key in read_recipe(argv[where]):
            if key not in names and key != "env":
                raise ValueError(unknown_option(str(key), names, argv[where]))
    return RecipeParser(classes).parse_args_and_config(argv)


def config_apart(argv: list[str]) -> list[str]:
    """`argv` with `--config=PATH` as two words."""
    return [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]


def read_recipe(path: str) -> dict[str, Any]:
    """The mapping in a recipe file.

    Raises:
        ValueError: if it does not exist (listing those that do), or is no YAML mapping.
    """
    if not Path(path).is_file():
        present = sorted(str(p) for p in Path("recipes").rglob("*.yaml"))
        raise ValueError(f"config = {path}: there is no such file. Recipes here: {', '.join(present) or 'none'}.")
    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} must hold `key: value` lines, but holds a {type(recipe).__name__}.")
    return recipe


def resolve_model(name: str | None, revision: str | None = None) -> str:
    """Path or Hub id of a Janus checkpoint; `tiny` is the one in the package. Reads the config, no weights.

    Raises:
        ValueError: if it is missing, not a Janus, an adapter, or an original `multi_modality` checkpoint.
    """
    if not name:
        raise ValueError("model_name_or_path is not set. Use a folder, a Hub id, or `tiny` for the embedded world.")
    if name == "tiny":
        name = str(Path(__file__).parent / "tiny" / "checkpoint")
    try:
        config, _ = PretrainedConfig.get_config_dict(name, revision=revision)
        if not config:
            raise OSError("it has no config.json")
    except OSError as error:
        if is_adapter(name, revision):
            raise ValueError(
                f"model_name_or_path = {name} is an adapter; a run starts from a whole model. Merge it first: python "
                f"-m janus_trl.scripts.merge --adapter {name} --output_dir {Path(name).name}-merged"
            ) from error
        raise ValueError(
            f"model_name_or_path = {name}: no checkpoint found ({str(error).splitlines()[0]}). Give a folder with a "
            "config.json or the Hub id of a converted Janus, and check the network for the latter."
        ) from error
    kind = config.get("model_type")
    if kind == "multi_modality":
        raise ValueError(
            f"model_name_or_path = {name} is an original DeepSeek checkpoint (model_type multi_modality), which "
            f"transformers does not load. Use a converted one: {CONVERTED}; or convert it: "
            f"python -m janus_trl.scripts.convert --input {name} --output {Path(name).name}-converted"
        )
    if kind != "janus":
        raise ValueError(f"model_name_or_path = {name} has model_type {kind!r}; it must be 'janus', e.g. {CONVERTED}.")
    return name


def refuse_launcher(script: str, work: str, hint: str = "") -> None:
    """For scripts that do not share their work among processes.

    Args:
        script: its name.
        work: what each process would do.
        hint: what else is possible.

    Raises:
        ValueError: a launcher started several processes.
    """
    if (started := started_processes()) > 1:
        raise ValueError(
            f"{started} processes were started, and each would {work}. Start {script} without a launcher{hint}."
        )


def or_exit(configure: Callable[[list[str]], Any], argv: list[str] | None) -> Any:
    """Run `configure(argv)`; what it refuses is one message on stderr and exit code 2, without a traceback.

    The first process of a machine speaks for the others: they wait, until the launcher ends them, and speak only if it
    found nothing wrong.
    """
    try:
        return configure(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(SECONDS_OF_THE_LAUNCHER)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
