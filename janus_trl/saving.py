"""Saving and resuming of both trainers: a checkpoint is checked, then appears at once, and is restored as a whole."""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.trainer_utils import rotate_checkpoints

from .checkpoints import (
    UNFINISHED,
    CheckpointError,
    find_resume_point,
    newest_whole,
    publish,
    publish_files,
    sampling_facts,
    write_manifest,
)
from .hub import HubPushing
from .restoring import (
    changed,
    fingerprints,
    mid_cycle_file,
    mismatch_message,
    read_state,
    to_cpu,
    to_device,
    write_state,
)
from .signals import Stop, stop_on_sigterm
from .weight_files import check_moved, check_weights, hub_id, mend_adapter_config, uses_lora

logger = logging.getLogger(__name__)


class Checkpointing(HubPushing):
    """Mixin that stands before a trainer of TRL in the bases of ours.

    `extra_state` and `load_extra_state` are where a trainer keeps more than weights, optimizer, schedule and random
    states: what the first returns reaches the second when a run is resumed.
    """

    interrupted = False  # whether `train` ended because of SIGTERM
    _stop: Stop | None = None
    _unfinished: Path | None = None  # where the checkpoint in the making is
    _save_error: Exception | None = None
    _updated = False  # whether an update moved weights
    _warned: frozenset[str] = frozenset()

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint stores for `load_extra_state`, as JSON allows; that of rank 0 is kept."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `extra_state` returned; called on every rank of a resumed run, before its first step."""

    # Train -----------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """As in transformers; True: the newest whole checkpoint, `auto`: that or the start. SIGTERM saves and ends."""
        point, lines = find_resume_point(
            resume_from_checkpoint, self.args.output_dir, self.args.world_size, self.is_deepspeed_enabled
        )
        if self.accelerator.is_main_process and lines:
            print("\n".join(lines), flush=True)
        if point is not None:
            expected = read_state(point).get("fingerprints", {})
            known = {name for name, _ in self.model.named_parameters()}
            if missing := [name for name in expected if name not in known]:  # the optimizer state would not fit either
                raise CheckpointError(mismatch_message(point, self.model, [], missing))
        self.interrupted = False  # of an earlier call
        with stop_on_sigterm() as self._stop:
            return super().train(point, *args, **kwargs)

    def _run_epoch(self, *args, **kwargs):
        """Nothing, where the checkpoint is that of the last step: transformers would train one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        # All ranks end at the same step. After it, transformers calls this once more, at the end of the epoch.
        if self._stop is not None and not self.interrupted and self._any(self._stop.requested):
            self.interrupted = True
            self.control.should_save = self.control.should_training_stop = True
            self.control.should_evaluate = False
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self._updated and norm is not None and float(norm) > 0 and self._get_learning_rate() > 0:
            self._updated = True
        return norm

    def _any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; collective."""
        return bool(self.accelerator.gather(torch.tensor([flag], device=self.accelerator.device)).any())

    # Save ------------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model aside, check it, and only then replace the older one; every rank calls it."""
        if self._unfinished is not None:  # a part of a checkpoint
            super().save_model(output_dir, _internal_call=True)
            return
        push = self.args.push_to_hub and not _internal_call
        final = Path(output_dir or self.args.output_dir)
        if not push or final != Path(self.args.output_dir):
            unfinished = final / UNFINISHED / "model"
            self._make_empty(unfinished)
            super().save_model(str(unfinished), _internal_call=True)
            self._stop_if_not_saved(unfinished)
            if self.args.should_save:
                write_manifest(unfinished, **self._facts())
                publish_files(unfinished, final)
            self.accelerator.wait_for_everyone()
        if push:  # saves the output folder first
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write weights and what belongs beside them, and check them; a failure waits until all ranks hear of it."""
        token, self.args.hub_token = self.args.hub_token, None  # transformers pickles the arguments into the folder
        try:
            super()._save(output_dir, state_dict)
            if self.args.should_save:
                self._complete(Path(output_dir or self.args.output_dir))
        except Exception as error:  # raised by `_stop_if_not_saved`, on all ranks
            self._save_error = error
        finally:
            self.args.hub_token = token

    def _complete(self, folder: Path) -> None:
        """Put recipe and generation config beside the weights, and check those."""
        recipe = Path(self.args.output_dir) / "recipe.yaml"
        if recipe.is_file() and recipe.parent != folder:
            shutil.copy(recipe, folder)
        if is_peft_model(self.model):
            self.base_model.generation_config.save_pretrained(folder)
            base = hub_id(self.base_model, self.args.base_model_id)
            mend_adapter_config(folder, base)
            if base is None:
                self._warn_once(
                    f"The base of the adapter is the folder {self.base_model.config._name_or_path}, which others do "
                    "not have. If it is on the Hub, name it: base_model_id: owner/name."
                )
        check_weights(folder, self.model)
        if self._updated and uses_lora(self.model) and (warning := check_moved(folder)):
            self._warn_once(warning)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._stop_if_not_saved(Path(output_dir))  # before the collectives of DeepSpeed
        super()._save_optimizer_and_scheduler(output_dir)

    def _get_output_dir(self, trial) -> str:
        return str(self._unfinished.parent) if self._unfinished is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial) -> None:
        run_dir = Path(super()._get_output_dir(trial))
        final = run_dir / f"checkpoint-{self.state.global_step}"
        unfinished = run_dir / UNFINISHED / final.name
        self._make_empty(unfinished)
        self._unfinished = unfinished
        try:
            super()._save_checkpoint(model, trial)
            self._save_state(unfinished)
        except CheckpointError:  # raised on every rank
            raise
        except Exception as error:
            if self.is_deepspeed_enabled:  # the others wait in a collective of DeepSpeed: the launcher ends them
                raise self._failure(error) from error
            self._save_error = error
        finally:
            self._unfinished = None
        self._stop_if_not_saved(unfinished)
        self._publish(unfinished, final)

    def _publish(self, unfinished: Path, final: Path) -> None:
        """The checkpoint is complete on all ranks: let it appear, delete older ones, push."""
        if self.state.best_model_checkpoint == str(unfinished):
            self.state.best_model_checkpoint = str(final)
        if self.args.should_save:
            self.state.save_to_json(str(unfinished / "trainer_state.json"))
            write_manifest(
                unfinished, step=self.state.global_step, weights_only=self.args.save_only_model, **self._facts()
            )
            publish(unfinished, final)
            rotate_checkpoints(
                output_dir=str(final.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not self.interrupted:
            super()._push_from_checkpoint(str(final))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """transformers calls it before the checkpoint is published; it is pushed then."""

    def _save_state(self, folder: Path) -> None:
        """Write what is ours, beside what transformers writes; every rank calls it."""
        prints = fingerprints(self.model)
        state = {"fingerprints": prints, "progress": self._progress(), "extra": self.extra_state()}
        rank_state = self._rank_state()
        if rank_state is not None:
            torch.save(to_cpu(rank_state), mid_cycle_file(folder, self.args.process_index))
        if self.args.should_save:
            write_state(folder, state)

    def _facts(self) -> dict[str, Any]:
        base = hub_id(self.base_model, self.args.base_model_id)
        facts = {"base_model": base, "adapter": is_peft_model(self.model), "processes": self.args.world_size}
        return {**facts, **sampling_facts(self.args), "task": getattr(self, "task", None), "method": self._name}

    def _make_empty(self, folder: Path) -> None:
        """Remove what a killed run left there; collective."""
        self._save_error = None
        if self.args.should_save:
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()

    def _stop_if_not_saved(self, folder: Path) -> None:
        """Raise on every rank if writing failed on any; collective."""
        if not self._any(self._save_error is not None):
            return
        if self.args.should_save:
            shutil.rmtree(folder.parent, ignore_errors=True)  # frees a full disk
        raise self._failure(self._save_error) from self._save_error

    def _failure(self, error: Exception | None) -> CheckpointError:
        kept, _ = newest_whole(self.args.output_dir)
        go_on = f"{kept} is kept: mend the cause and go on with --resume_from_checkpoint true." if kept else ""
        reason = "another rank could not write" if error is None else f"{type(error).__name__}: {error}"
        return CheckpointError(f"Saving step {self.state.global_step} failed ({reason}). {go_on}".strip())

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned |= {message}
            logger.warning(message)

    # Resume ----------------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._restore(resume_from_checkpoint)
        return prepared

    def _restore(self, folder: str) -> None:
        """Compare the weights with those that were saved, and take over the rest; every rank calls it.

        Raises:
            CheckpointError: weights differ, e.g. the base under an adapter is another one.
        """
        state = read_state(folder)
        other, missing = changed(self.model, state.get("fingerprints", {}))
        if self._any(bool(other or missing)):
            message = mismatch_message(folder, self.model, other, missing) if other or missing else ""
            raise CheckpointError(message or f"resume_from_checkpoint = {folder}: weights differ on another rank.")
        path, rank_state = mid_cycle_file(folder, self.args.process_index), None
        if path.is_file():
            rank_state = to_device(torch.load(path, map_location="cpu", weights_only=True), self.accelerator.device)
        everywhere = not self._any(rank_state is None)
        self._load_progress(state.get("progress", {}), rank_state if everywhere else None)
        self.load_extra_state(state.get("extra", {}))

    def _progress(self) -> dict[str, Any]:
        """Counters of the trainer of TRL that it does not save itself."""
        return {}

    def _rank_state(self) -> Any:
        """Tensors that this rank needs to go on from here; None if there are none."""
        return None

    def _load_progress(self, progress: dict[str, Any], rank_state: Any) -> None:
        """Take over what `_progress` and `_rank_state` returned; the latter is None where not all ranks have it."""


class RolloutCheckpointing(Checkpointing):
    """With the position of GRPO inside a rollout: TRL restores neither the counter nor the rollout (trl#3148)."""

    def _progress(self) -> dict[str, Any]:
        rollout = {"micro_steps_per_rollout": self._micro_steps_per_rollout, "processes": self.args.world_size}
        return {"micro_step": self._step, **rollout}

    @property
    def _micro_steps_per_rollout(self) -> int:
        return self.args.steps_per_generation * self.num_iterations

    def _rank_state(self) -> Any:
        return self._buffered_inputs if self._step % self._micro_steps_per_rollout else None

    def _load_progress(self, progress: dict[str, Any], rank_state: Any) -> None:
        """Without its tensors (another number of processes) the rollout is made again, with the same prompts."""
        accumulation = self.args.gradient_accumulation_steps
        self._step = progress.get("micro_step", self.state.global_step * accumulation)
        now = self._progress()
        same = all(progress.get(name) == now[name] for name in ("micro_steps_per_rollout", "processes"))
        self._buffered_inputs = rank_state if same else None
