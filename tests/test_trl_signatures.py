"""The parts of TRL and transformers that are relied on."""

import inspect

import pytest
import transformers
import trl
import trl.data_utils
import trl.kernels
import trl.models.utils
import trl.trainer.utils

SIGNATURES = {
    "trl.GRPOTrainer._get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values "
        "image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
        "mm_token_type_ids image_position_ids"
    ),
    "trl.GRPOTrainer._calculate_rewards": "self inputs prompts completions completion_ids_list",
    "trl.GRPOTrainer._get_train_sampler": "self dataset",
    "trl.GRPOTrainer._compute_loss": "self model inputs",
    "trl.GRPOTrainer._generate": "self prompts",
    "trl.GRPOTrainer._save_checkpoint": "self model trial",
    "transformers.Trainer._init_training_state": (
        "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"
    ),
    "trl.GRPOTrainer._generate_and_score_completions": "self inputs",
    "trl.GRPOTrainer.log": "self logs start_time",
    "trl.GRPOTrainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "trl.GRPOTrainer.training_step": "self model inputs num_items_in_batch",
    "transformers.Trainer._get_grad_norm": "self model grad_norm",
    "transformers.Trainer._run_epoch": (
        "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
        "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
    ),
    "transformers.Trainer._get_dataloader": "self dataset description batch_size sampler_fn is_training dataloader_key",
    "transformers.Trainer.evaluation_loop": (
        "self dataloader description prediction_loss_only ignore_keys metric_key_prefix"
    ),
    "transformers.Trainer.get_eval_dataloader": "self eval_dataset",
    "transformers.Trainer._get_eval_sampler": "self eval_dataset",
    "transformers.Trainer._get_train_sampler": "self train_dataset",
    "transformers.Trainer._save": "self output_dir state_dict",
    "transformers.Trainer._save_checkpoint": "self model trial",
    "transformers.Trainer._save_optimizer_and_scheduler": "self output_dir",
    "transformers.Trainer._get_output_dir": "self trial",
    "transformers.Trainer._get_learning_rate": "self",
    "transformers.Trainer._prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    "transformers.Trainer._maybe_log_save_evaluate": (
        "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "transformers.Trainer._push_from_checkpoint": "self checkpoint_folder",
    "transformers.Trainer._finish_current_push": "self",
    "transformers.trainer_utils.rotate_checkpoints": (
        "output_dir save_total_limit best_model_checkpoint use_mtime checkpoint_prefix"
    ),
    "trl.data_utils.prepare_multimodal_messages": "messages images",
    "trl.trainer.utils.RepeatSampler": "data_source mini_repeat_count batch_size repeat_count shuffle seed",
    "trl.trainer.utils.nanstd": "tensor dim keepdim",
    "trl.trainer.utils.pad": "tensors padding_value padding_side pad_to_multiple_of",
    "trl.kernels.ChunkedLogProbFunction.forward": (
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
    ),
    "trl.trainer.utils.create_model_from_path": "model_id architecture kwargs",
    "trl.trainer.utils.maybe_gather_lm_head_ctx": "params",
    "trl.models.utils.unwrap_model_for_generation": (
        "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs"
    ),
    "trl.trainer.utils.get_callable_name": "func",
    "trl.trainer.utils.is_async_callable": "func",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_that_are_relied_on(name):
    parts = name.split(".")[1:]
    found = {"trl": trl, "transformers": transformers}[name.split(".")[0]]
    for part in parts:
        found = getattr(found, part)
    found = inspect.unwrap(found)
    assert list(inspect.signature(found).parameters) == SIGNATURES[name].split()


def test_the_calls_that_are_relied_on_are_in_the_source_of_trl():
    scoring = inspect.getsource(inspect.unwrap(trl.GRPOTrainer._get_per_token_logps_and_entropies))
    assert "labels=labels, fused_lm_head=True)" in scoring and "outputs.log_probs" in scoring
    generate = inspect.getsource(trl.GRPOTrainer._generate)
    assert "self.rollout_func(prompts, self)" in generate and 'extra_fields.pop("env_mask", None)' in generate
    assert "rollout_func" in inspect.signature(trl.GRPOTrainer.__init__).parameters
    prepare = inspect.getsource(inspect.unwrap(trl.GRPOTrainer._prepare_inputs))  # rows are shuffled after sampling
    assert prepare.index("self._generate_and_score_completions(generation_batch)") < prepare.index("shuffle_sequence")
    assert "if advantages.dim() == 1:" in inspect.getsource(trl.GRPOTrainer._compute_loss)  # [B, C] is let through


def test_rows_that_no_reward_scores_leave_their_group_in_trl():
    reward = inspect.getsource(inspect.unwrap(trl.GRPOTrainer._calculate_rewards))
    assert "torch.tensor(output_reward_func, dtype=torch.float32" in reward and "return rewards_per_func" in reward
    assert "isinf" not in reward and "isfinite" not in reward  # infinities mark faults on their way through it
    assert reward.count("gather(rewards_per_func)") == 1
    scoring = inspect.getsource(inspect.unwrap(trl.GRPOTrainer._generate_and_score_completions))
    assert "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)" in scoring


def test_trl_clears_the_metrics_before_it_writes_the_table_of_completions():
    log = inspect.getsource(trl.GRPOTrainer.log)
    first, second = log.split("self._metrics[mode].clear()")
    assert "super().log(logs, start_time)" in first and "to_parquet" in second and "to_parquet" not in first


def test_the_loss_asks_for_scores_before_it_reads_what_janus_trl_completes():
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    asked = source.index("self._get_per_token_logps_and_entropies(")
    for read in ('inputs["advantages"]', 'inputs.get("old_per_token_logps")', 'inputs["ref_per_token_logps"]',
                 'inputs.get("importance_sampling_ratio")', "self.epsilon_low", "self.epsilon_high"):  # fmt: skip
        assert source.index(read) > asked


def test_what_a_rollout_hands_to_the_metrics_of_truncation():
    source = inspect.getsource(trl.GRPOTrainer._generate)
    assert "return prompt_ids, completion_ids, tool_mask, " in source
    assert '["completions/clipped_ratio"].append(' in source


def test_the_order_of_a_save_that_is_relied_on():
    """Optimizer after model, push and rotation last; GRPO keeps its counter and its rollout in these attributes."""
    save = inspect.getsource(transformers.Trainer._save_checkpoint)
    calls = ["self._get_output_dir(trial=trial)", "self.save_model(output_dir, _internal_call=True)",
             "self._save_optimizer_and_scheduler(output_dir)", "self._save_rng_state(output_dir)",
             "self._push_from_checkpoint(output_dir)", "rotate_checkpoints("]  # fmt: skip
    places = [save.index(call) for call in calls]
    assert places == sorted(places)
    prepare = inspect.getsource(inspect.unwrap(trl.GRPOTrainer._prepare_inputs))
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in prepare
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in prepare
