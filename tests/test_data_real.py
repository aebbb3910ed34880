"""Real prompts and pictures: every file loads through the fields of a recipe and is trained on for one step."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, concatenate_datasets

from janus_trl.configs import JanusSFTConfig
from janus_trl.data import load_training_dataset
from janus_trl.data_report import prompt_room, validated
from janus_trl.script_arguments import JanusScriptArguments
from tests.grpo import steps

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real prompts and pictures is absent")
PROMPTS = {
    "geneval_official.jsonl": (553, "geneval"),
    "geneval_metadata.jsonl": (2212, "geneval"),
    "geneval_object_names.txt": (308, None),
    "ocr_prompts.txt": (300, "prompts"),
    "t2i_r1.jsonl": (7222, "t2i_r1"),
    "t2i_compbench_val/3d_spatial.txt": (300, None),
    "t2i_compbench_val/color.txt": (300, None),
    "t2i_compbench_val/complex.txt": (300, "reasongen_rl"),
    "t2i_compbench_val/non_spatial.txt": (300, None),
    "t2i_compbench_val/numeracy.txt": (300, None),
    "t2i_compbench_val/shape.txt": (300, None),
    "t2i_compbench_val/spatial.txt": (300, None),
    "t2i_compbench_val/texture.txt": (300, None),
}
EXPECTED_COLUMNS = {
    None: {"prompt"},
    "prompts": {"prompt"},
    "reasongen_rl": {"prompt"},
    "geneval": {"prompt", "tag", "include", "exclude"},
    "t2i_r1": {"prompt", "task_type", "nouns", "attr_nouns", "spatial_info", "numeracy_info"},
}


def load(task: str = "t2i", stage: str = "grpo", **fields) -> Dataset:
    return load_training_dataset(JanusScriptArguments(**fields), task, stage)["train"]


def test_the_table_has_every_prompt_file():
    files = {str(path.relative_to(SHARED / "prompts")) for path in (SHARED / "prompts").rglob("*") if path.is_file()}
    assert files == set(PROMPTS)


@pytest.fixture(scope="module")
def loaded() -> dict[str, Dataset]:
    """Every prompt file, loaded through the fields of a recipe."""
    return {
        name: load(dataset_name=str(SHARED / "prompts" / name), dataset_format=layout)
        for name, (_, layout) in PROMPTS.items()
    }


def test_every_prompt_file_has_all_its_rows_and_columns(loaded, processor):
    for name, (rows, layout) in PROMPTS.items():
        dataset = loaded[name]
        assert abs(len(dataset) - rows) <= 1, name
        assert set(dataset.column_names) == EXPECTED_COLUMNS[layout], name
        _, report = validated(dataset, "t2i", processor, name=name, rows=50)
        assert report.control_rows == 0 and report.checked == 50, name


def test_a_step_on_prompts_of_every_file(loaded, trainer_of, processor, model):
    rows = concatenate_datasets([dataset.with_format(None).select(range(5)) for dataset in loaded.values()])
    # A letter is a token here, so that some prompts are too long for the context.
    kept, _ = validated(rows, "t2i", processor, room=prompt_room(model.config, "t2i", 0), bad_rows="skip")
    position = {prompt: i for i, prompt in enumerate(kept["prompt"])}
    firsts = [next(p for p in dataset["prompt"][:5] if p in position) for dataset in loaded.values()]
    dataset = kept.select([position[prompt] for prompt in firsts])
    seen = {}

    def reward(prompts, completions, include, spatial_info, **columns):
        seen.update(zip(prompts, zip(include, spatial_info)))
        return [float(i % 4) for i in range(len(prompts))]

    trainer = trainer_of(reward, dataset=dataset, per_device_train_batch_size=4 * len(firsts))
    trainer.train()
    assert steps(trainer)[0]["grad_norm"] > 0
    assert set(seen) == set(firsts) and len(seen) == len(PROMPTS)
    include, spatial_info = zip(*(seen[prompt] for prompt in firsts))
    assert json.loads(include[0]) and json.loads(spatial_info[list(PROMPTS).index("t2i_r1.jsonl")])


def test_prompt_files_of_several_layouts_are_one_mixture(processor):
    names = ["geneval_official.jsonl", "ocr_prompts.txt", "t2i_compbench_val/color.txt"]
    entries = [{"name": str(SHARED / "prompts" / name), "format": PROMPTS[name][1]} for name in names]
    dataset = load(dataset_mixture=entries)
    prompts = set(dataset["prompt"])
    assert len(prompts) > 1000 and len(dataset) > sum(PROMPTS[name][0] for name in names)
    assert validated(dataset, "t2i", processor, rows=50)[1].bad_rows == []


@pytest.fixture
def picture_rows(tmp_path) -> str:
    """A question on each real picture."""
    answers = {"equation.png": "a formula", "pie_chart.png": "B", "logo.png": "3"}
    rows = [
        {"question": f"What is this ({name})?", "options": ["a formula", "a chart", "a logo"], "answer": answer}
        | {"image": str(SHARED / "images" / name)}
        for name, answer in answers.items()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def test_real_pictures_are_asked_about(picture_rows, trainer_of, processor):
    dataset = load("i2t", dataset_name=picture_rows, dataset_format="vqa")
    kept, report = validated(dataset, "i2t", processor, rows=-1)
    assert report.pictures == 3 and len(kept) == 3
    trainer = trainer_of(dataset=kept, task="i2t", per_device_train_batch_size=12)
    trainer.train()
    assert steps(trainer)[0]["grad_norm"] > 0


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_real_pictures_are_learned_from(picture_rows, task, janus_folder, processor, tmp_path):
    from janus_trl.sft_trainer import JanusSFTTrainer

    columns = {"text_column": "question"} if task == "t2i" else {"dataset_format": "vqa"}
    dataset = load(task, "sft", dataset_name=picture_rows, **columns)
    kept, _ = validated(dataset, task, processor, stage="sft", rows=-1)
    settings = {"report_to": "none", "max_steps": 1, "per_device_train_batch_size": 3, "save_strategy": "no"}
    settings |= {"disable_tqdm": True, "logging_steps": 1, "gradient_checkpointing": False}
    args = JanusSFTConfig(output_dir=str(tmp_path), codes_cache_dir=str(tmp_path / "codes"), **settings)
    trainer = JanusSFTTrainer(janus_folder, args, kept)
    trainer.train()
    assert steps(trainer)[0]["loss"] > 0
