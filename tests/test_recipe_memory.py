"""The memory that the headers of the recipes state is what the plan says, and it fits the hardware they name."""

import re
import sys
from pathlib import Path

import pytest
from transformers import JanusConfig
from trl import ModelConfig

from janus_trl.configs import JanusGRPOConfig
from janus_trl.memory_plan import OUTSIDE_GIB, PHASES, Plan, plan_memory
from janus_trl.memory_setup import GIB, Run, machine_from, reward_bytes
from janus_trl.recipe import parse_recipe
from janus_trl.script_arguments import JanusScriptArguments
from janus_trl.tiny.processor import build_processor

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path for size in ("1b", "7b") for path in (ROOT / "recipes" / f"janus_pro_{size}").glob("*.yaml"))
PROMPT = {"t2i": 64, "i2t": 704}  # ids of a prompt; with a picture 576 + 2 of them
MEMORY = re.compile(r"^# Memory:    peak (\d+) GiB a GPU \(in (\w+)\), planned", re.M)

PLANS: dict[Path, Plan] = {}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def shapes() -> dict[str, JanusConfig]:
    """The configurations of Janus-Pro, from the benchmarks."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from shapes import _config

    return {size: _config(size, build_processor()) for size in ("1b", "7b")}


def launch(path: Path) -> tuple[str, int]:
    """Accelerate file and number of processes of the recipe's launch command."""
    text = path.read_text()
    command = text[text.index("# Launch:") : text.index("# Override:")]
    if "accelerate launch" in command:
        return re.search(r"(accelerate_configs/\w+\.yaml)", command)[1], int(
            re.search(r"num_processes=(\d+)", command)[1]
        )
    named = re.search(r"ACCELERATE=(\w+)", command)
    count = re.search(r"NUM_PROCESSES=(\d+)", command)
    return named[1] if named else "single_gpu", int(count[1]) if count else 1


def planned(path: Path, shapes: dict[str, JanusConfig]) -> Plan:
    if path not in PLANS:
        PLANS[path] = make_plan(path, shapes)
    return PLANS[path]


def make_plan(path: Path, shapes: dict[str, JanusConfig]) -> Plan:
    script, args, model = parse_recipe((JanusScriptArguments, JanusGRPOConfig, ModelConfig), ["--config", str(path)])
    accelerate, processes = launch(path)
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    run = Run.of(
        args, model, PROMPT[args.task], per_step, args.per_device_train_batch_size,
        reward_bytes=reward_bytes(script.reward_funcs),
    )  # fmt: skip
    return plan_memory(shapes["1b" if "_1b" in path.parent.name else "7b"], run, machine_from(accelerate, processes))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_the_header_states_the_planned_peak_and_its_phase(path, shapes):
    plan = planned(path, shapes)
    phase = max(PHASES, key=plan.total)
    stated = MEMORY.search(path.read_text())
    assert stated, (
        f"# Memory:    peak {plan.peak / GIB:.0f} GiB a GPU (in {phase}), planned by the dry run, not measured."
    )
    assert abs(int(stated[1]) - plan.peak / GIB) <= 1 and stated[2] == phase, (plan.peak / GIB, phase)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_the_plan_fits_the_hardware_in_the_header(path, shapes):
    (hardware,) = [line for line in path.read_text().splitlines() if line.startswith("# Hardware:")]
    card = int(re.search(r"(\d+) GB", hardware)[1])
    assert planned(path, shapes).peak / GIB + OUTSIDE_GIB <= 0.98 * card  # a card of 80 GB shows 79 GiB


def test_there_is_a_recipe_for_each_model_task_and_kind_and_for_one_two_and_eight_gpus():
    kinds, gpus = set(), set()
    for path in RECIPES:
        _, args, model = parse_recipe((JanusScriptArguments, JanusGRPOConfig, ModelConfig), ["--config", str(path)])
        kinds.add((path.parent.name, args.task, "lora" if model.use_peft else "full"))
        gpus.add(launch(path)[1])
    sizes = ("janus_pro_1b", "janus_pro_7b")
    assert kinds == {(size, task, kind) for size in sizes for task in ("t2i", "i2t") for kind in ("lora", "full")}
    assert gpus >= {1, 2, 8, 16}


def test_every_launch_names_an_accelerate_file_that_exists():
    for path in RECIPES:
        machine_from(*launch(path))


def test_two_machines_are_launched_with_the_file_for_several():
    path = ROOT / "recipes/janus_pro_7b/t2i_pickscore_two_nodes.yaml"
    assert launch(path) == ("accelerate_configs/zero3_multinode.yaml", 16)
    text = path.read_text()
    assert "--num_machines=2" in text and "--machine_rank" in text and "--main_process_ip" in text
