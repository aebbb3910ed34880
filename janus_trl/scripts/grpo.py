"""Train with GRPO: `accelerate launch … -m janus_trl.scripts.grpo --config recipe.yaml [--key value …]`."""

import sys
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import JanusConfig, JanusProcessor
from trl import ModelConfig

from janus_trl.callbacks import CurveCallback, SampleGridCallback
from janus_trl.config_checks import check_reward_options
from janus_trl.configs import JanusGRPOConfig
from janus_trl.data_report import first_prompt_lines, prompt_room, validated
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.loss_checks import check_entropy_targets
from janus_trl.memory_plan import plan_memory
from janus_trl.memory_setup import Run, longest_prompt, machine_from, reward_bytes, visible_gpu_gib
from janus_trl.prompts import bind_prompt_template
from janus_trl.recipe import or_exit, parse_recipe, resolve_model
from janus_trl.reporting import SampleSender
from janus_trl.rewards import RewardSet, check_reward_rows, get_reward_funcs
from janus_trl.rewards.by_task import get_rewards_by_task
from janus_trl.rewards.calling import wrapped_reward
from janus_trl.sampling_checks import TASKS
from janus_trl.script_arguments import JanusScriptArguments, lora_config
from janus_trl.scripts.run import check_start, ended_early, finish, keep_recipe, model_kwargs, training_splits

MODULE = "janus_trl.scripts.grpo"


@dataclass
class GRPORun:
    """Everything a run needs, checked; no weights are loaded yet. `train` and `test` have the rows of each task."""

    script: JanusScriptArguments
    args: JanusGRPOConfig
    model: ModelConfig
    train: dict[str, Dataset]
    test: dict[str, Dataset]
    rewards: RewardSet
    report: list[str]


def configure(argv: list[str]) -> GRPORun:
    """Parse and check.

    Raises:
        ValueError: what is wrong and how to mend it.
    """
    script, args, model = parse_recipe((JanusScriptArguments, JanusGRPOConfig, ModelConfig), argv)
    lora_config(model)
    check_start(args, script)
    if script.dry_run:
        machine_from(script.accelerate_config, script.num_processes)
    model.model_name_or_path = resolve_model(model.model_name_or_path, model.model_revision)
    tasks = TASKS if args.task == "both" else (args.task,)
    train, test, report = {}, {}, []
    for task in tasks:
        splits = training_splits(script, task)
        splits, lines = check_rows(splits, task, script, args, model)
        report += lines
        train[task] = splits["train"]
        if splits["test"] is not None:
            test[task] = splits["test"]
    if len(test) == 1 < len(tasks):
        missing = next(task for task in tasks if task not in test)
        raise ValueError(f"there are held-out rows, but none of {missing}. Set a test split for it, or for no task.")
    rewards = check_rewards(script, args, train)
    for task, rows in train.items():
        check_enough_rows(rows, task, args)
    return GRPORun(script, args, model, train, test, rewards, report)


def check_rewards(script: JanusScriptArguments, args: JanusGRPOConfig, train: dict[str, Dataset]) -> RewardSet:
    """The rewards, with their weights in `args`, checked against the rows that they will score."""
    if not script.reward_funcs:
        raise ValueError("reward_funcs is not set. Name at least one reward, e.g. reward_funcs: [pickscore].")
    columns = {task: rows.column_names for task, rows in train.items()}
    if args.task == "both":
        rewards, specs = get_rewards_by_task(script.reward_funcs, columns, script.reward_batch_size)
    else:
        rewards = get_reward_funcs(script.reward_funcs, args.task, columns[args.task], script.reward_batch_size)
        specs = {args.task: script.reward_funcs}
    if args.reward_weights is None:
        args.reward_weights = rewards.weights
    elif any(weight != 1 for weight in rewards.weights):
        raise ValueError(
            f"reward_weights = {args.reward_weights} and weights inside reward_funcs {rewards.weights} are both set. "
            "Keep one of them."
        )
    if len(args.reward_weights) != len(rewards.funcs):
        raise ValueError(
            f"reward_weights has {len(args.reward_weights)} values for {len(rewards.funcs)} rewards "
            f"({', '.join(rewards.names)}). Give one weight per reward."
        )
    check_reward_options(args)
    for function in rewards.funcs if args.max_reasoning_length == 0 else []:
        if getattr(wrapped_reward(function), "reward_prompt", "prompt") == "reasoning":
            raise ValueError(
                f"reward '{function.__name__}': reward_prompt is 'reasoning', but max_reasoning_length = 0: there "
                "is no text to compare pictures with. Set max_reasoning_length, or reward_prompt: prompt."
            )
    for task, rows in train.items():
        check_reward_rows(specs[task], rows)
    return rewards


def check_enough_rows(rows: Dataset, task: str, args: JanusGRPOConfig) -> None:
    """Refuse too few rows: the sampler drops what does not fill a rollout, and the run would end without a step."""
    prompts = args.generation_batch_size // args.num_generations
    if len(rows) < prompts:
        of_task = f" of {task}" if args.task == "both" else ""
        raise ValueError(
            f"{len(rows)} training rows{of_task} are fewer than the {prompts} prompts of a rollout "
            f"({args.generation_batch_size} completions / num_generations {args.num_generations}). Use more rows, or "
            "lower per_device_train_batch_size or gradient_accumulation_steps."
        )


def check_rows(splits: dict, task: str, script: JanusScriptArguments, args: JanusGRPOConfig, model: ModelConfig):
    """The splits as they are safe to train on, and a report of a few lines (with the first prompt in a dry run)."""
    processor = JanusProcessor.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    bind_prompt_template(processor, args.prompt_template)
    config = JanusConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    check_entropy_targets(args, config)
    text_length = args.max_completion_length if task == "i2t" else args.max_reasoning_length
    room = prompt_room(config, task, text_length)
    checked, lines = {}, []
    for name, rows in splits.items():
        if rows is not None:
            options = {"rows": script.validate_rows, "bad_rows": script.bad_rows, "room": room}
            label = f"{task}, {name}" if args.task == "both" else name
            rows, report = validated(rows, task, processor, name=label, **options)
            lines += report.lines()
        checked[name] = rows
    if script.dry_run:
        lines += first_prompt_lines(checked["train"], processor, draws=task == "t2i")
    return checked, lines


def summary(run: GRPORun) -> str:
    """One line: what a step is."""
    args = run.args
    size, group = args.generation_batch_size, args.num_generations
    held_out = f", {sum(map(len, run.test.values()))} held-out rows" if run.test else ""
    tasks = ", ".join(f"{task} {share:.0%}" for task, share in (args.task_proportions or {}).items())
    return (
        f"{tasks or args.task}: {size // group} prompts x {group} completions = {size} a rollout, "
        f"{sum(map(len, run.train.values()))} training rows{held_out}, rewards: {', '.join(run.rewards.names)}"
    )


def memory_lines(run: GRPORun) -> list[str]:
    """The planned memory of the run on each GPU (see `memory_plan`); nothing for a run on CPUs."""
    script, args, model = run.script, run.args, run.model
    machine = machine_from(script.accelerate_config, script.num_processes)
    if not machine.gpu:
        return []
    gib = script.gpu_memory_gib or visible_gpu_gib()
    if gib is None and script.accelerate_config is None:
        return ["No GPU here: for the planned memory of a run on GPUs add --accelerate_config, e.g. zero3."]
    processor = JanusProcessor.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    bind_prompt_template(processor, args.prompt_template)
    config = JanusConfig.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    lines = []
    for task, rows in run.train.items():
        planned = Run.of(
            args,
            model,
            prompt_length=longest_prompt(rows, processor, draws=task == "t2i"),
            rows=args.generation_batch_size // machine.processes,
            # One plain process checks the batch of all (see `RecipeParser`).
            micro_batch=args.per_device_train_batch_size * args.world_size // machine.processes,
            task=task,
            reward_bytes=reward_bytes(script.reward_funcs),
        )
        lines += [f"Batches of {task}:"] if len(run.train) > 1 else []
        lines += plan_memory(config, planned, machine).lines(gib)
    return lines


def train(run: GRPORun, argv: list[str]) -> JanusGRPOTrainer:
    """Load, train, evaluate, save."""
    run.args.model_init_kwargs = model_kwargs(run.model)
    trainer = JanusGRPOTrainer(
        model=run.model.model_name_or_path,
        reward_funcs=run.rewards.funcs,
        args=run.args,
        train_dataset=_of_run(run.train, run.args.task),
        eval_dataset=_of_run(run.test, run.args.task),
        peft_config=lora_config(run.model),
    )
    # A reward model that does not load, or fails its self-test, ends the run here, not after the first rollout.
    or_exit(lambda _: run.rewards.load(), argv)
    keep_recipe(trainer, argv)
    trainer.add_callback(CurveCallback())
    if run.test and run.args.num_samples:
        trainer.add_callback(
            SampleGridCallback(
                lambda step: [] if trainer.interrupted else trainer.sample_rows(run.args.num_samples),
                every=run.args.sample_steps,
                send=SampleSender(trainer),
            )
        )
    trainer.train(resume_from_checkpoint=run.args.resume_from_checkpoint)
    if not ended_early(trainer, MODULE, argv):
        finish(trainer)
    return trainer


def _of_run(rows: dict[str, Dataset], task: str) -> Dataset | dict[str, Dataset] | None:
    return (rows or None) if task == "both" else rows.get(task)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    argv = sys.argv[1:] if argv is None else argv
    run = or_exit(configure, argv)
    if run.args.process_index == 0:
        memory = memory_lines(run) if run.script.dry_run else []
        print("\n".join([*run.report, *memory, summary(run)]))
    if run.script.dry_run:
        if run.args.process_index == 0:
            print(f"The recipe is fine; a run writes to {Path(run.args.output_dir)}.")
        return
    train(run, argv)


if __name__ == "__main__":
    main()
