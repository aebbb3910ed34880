"""Both trainers: which models they take, and where the processor comes from."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import JanusForConditionalGeneration

from janus_trl.configs import JanusGRPOConfig, JanusSFTConfig
from janus_trl.grpo_trainer import JanusGRPOTrainer
from janus_trl.loading import check_model, processor_for
from janus_trl.sft_trainer import JanusSFTTrainer
from tests.grpo import ascending, prompts_dataset

QUIET = {"report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False}


def grpo(model, folder, **kwargs):
    args = JanusGRPOConfig(output_dir=folder, per_device_train_batch_size=4, num_generations=4, **QUIET)
    return JanusGRPOTrainer(model, ascending, args, prompts_dataset(), **kwargs)


def sft(model, folder, **kwargs):
    rows = Dataset.from_list([{"prompt": "q", "image_codes": list(range(16))}])
    return JanusSFTTrainer(model, JanusSFTConfig(output_dir=folder, **QUIET), rows, **kwargs)


@pytest.mark.parametrize("build", [grpo, sft])
def test_a_stock_model_is_refused_with_the_class_to_load_instead(build, janus_folder, processor, tmp_path):
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"JanusForConditionalGeneration.*load with JanusForInterleavedGeneration.from_pretrained"
    ):
        build(stock, str(tmp_path), processing_class=processor)


@pytest.mark.parametrize("build", [grpo, sft])
def test_a_model_built_in_memory_needs_a_processor(build, model, processor, tmp_path):
    model.config._name_or_path = ""
    with pytest.raises(ValueError, match=r"processing_class is not set.*Pass processing_class=JanusProcessor"):
        build(model, str(tmp_path))
    assert build(model, str(tmp_path), processing_class=processor).processing_class is processor


@pytest.mark.parametrize("build", [grpo, sft])
def test_a_loaded_model_brings_the_processor_of_its_folder(build, model, processor, tmp_path):
    trainer = build(model, str(tmp_path))
    assert trainer.processing_class.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_a_model_inside_an_adapter_is_judged_by_its_class(model, processor, janus_folder):
    config = LoraConfig(r=2, target_modules=["q_proj"])
    check_model(get_peft_model(model, config))
    stock = JanusForConditionalGeneration.from_pretrained(janus_folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="model is a JanusForConditionalGeneration"):
        check_model(get_peft_model(stock, config))
    assert processor_for(janus_folder, processor) is processor
