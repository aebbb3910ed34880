"""The embedded world: pictures, plans, prompts, grades, questions, data sets, tokenizer and template."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from janus_trl.tiny import (
    Scene,
    grade,
    parse_plan,
    plan_text,
    read_picture,
    render,
    sample_breaking,
    sample_fulfilling,
    sample_prompt,
    sample_question,
    sample_scene,
    tiny_dataset,
    tiny_sft_dataset,
)
from janus_trl.tiny.processor import BEGIN_OF_IMAGE, BOS, build_config, build_generation_config, build_processor
from janus_trl.tiny.prompts import CATEGORIES, fulfilling_scenes
from janus_trl.tiny.questions import KINDS, LETTERS
from janus_trl.tiny.world import BACKGROUND, CELLS, EMPTY, OBJECTS, SPLITS, UNREADABLE, render_batch, split_of

EXPLICIT = {"kind": "explicit", "objects": [["top-left", "red circle"], ["bottom-right", "blue square"]]}
COUNT = {"kind": "count", "number": 2, "object": "red circle"}
LEFT = {"kind": "relation", "relation": "left of", "objects": ["red circle", "blue square"]}
CORNERS = {"kind": "distinct", "relation": "in opposite corners", "objects": ["red circle", "blue square"]}
R, B, E = "red circle", "blue square", EMPTY


@pytest.fixture(scope="module")
def processor():
    return build_processor()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# Pictures and their reading


@pytest.mark.parametrize("jitter", [0.0, 0.25, 1.0])
def test_grader_reads_every_rendered_picture_right(rng, jitter):
    scenes = [Scene((name, E, E, name)) for name in OBJECTS] + [sample_scene(rng) for _ in range(300)]
    pictures = [Image.fromarray(array) for array in render_batch(scenes, rng, jitter)]
    assert [tuple(reading) for reading in read_picture(pictures)] == [scene.cells for scene in scenes]


def test_picture_is_a_function_of_scene_and_generator():
    scene = Scene((R, E, B, E))
    first, again, other = (np.asarray(render(scene, np.random.default_rng(seed))) for seed in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.shape == (32, 32, 3) and tuple(first[0, 31]) == BACKGROUND


def test_noise_flat_color_and_half_a_shape_are_unreadable(rng):
    noise = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))
    assert read_picture(noise) == [[UNREADABLE] * 4]
    assert read_picture(Image.new("RGB", (32, 32), (220, 40, 40))) == [[UNREADABLE] * 4]
    array = np.asarray(render(Scene((R, R, R, R)), rng)).copy()
    array[:8] = BACKGROUND
    assert read_picture(Image.fromarray(array)) == [[UNREADABLE, UNREADABLE, R, R]]
    assert read_picture(Image.new("RGB", (32, 32), BACKGROUND)) == [[E] * 4]


def test_enlarged_and_palette_pictures_are_read_too(rng):
    picture = render(Scene((R, E, E, B)), rng)
    assert read_picture([picture.resize((128, 128), Image.Resampling.NEAREST)]) == [[R, E, E, B]]
    assert read_picture(picture.convert("RGBA")) == [[R, E, E, B]]
    assert read_picture([]) == []


# Plans


def test_plan_names_each_object_and_parses_back(rng):
    assert plan_text(Scene((R, E, E, B))) == "top-left red circle, bottom-right blue square"
    assert parse_plan("  bottom-right blue square ,top-left red circle") == Scene((R, E, E, B))
    for scene in [Scene((E,) * 4), *(sample_scene(rng) for _ in range(100))]:
        assert parse_plan(plan_text(scene)) == scene


@pytest.mark.parametrize(
    "text", ["", "red circle", "top-left red", "top-left red circle, top-left blue square", "top-left red circle,"]
)
def test_text_that_is_no_plan_parses_to_none(text):
    assert parse_plan(text) is None


def test_scene_refuses_unknown_objects():
    with pytest.raises(ValueError, match="orange circle.*red, green"):
        Scene(("orange circle", E, E, E))


# Grades


@pytest.mark.parametrize(
    ("demands", "cells", "value"),
    [
        (EXPLICIT, (R, E, E, B), 1.0),
        (EXPLICIT, (E, E, E, E), 0.0),  # a blank picture earns nothing
        (EXPLICIT, (R, E, E, E), 2 / 3),
        (EXPLICIT, (R, B, E, E), 1 / 3),  # the square is in the wrong cell
        (EXPLICIT, (R, B, E, B), 2 / 3),
        (EXPLICIT, (R, UNREADABLE, E, B), 2 / 3),
        (EXPLICIT, ("red square", E, E, "blue circle"), 1 / 3),  # half of each object, and nothing asked for is drawn
        (EXPLICIT, (UNREADABLE, E, E, B), 2 / 3),
        (COUNT, (R, E, E, R), 1.0),
        (COUNT, (R, E, R, B), 0.5),
        (COUNT, (R, E, E, E), 0.5),
        (COUNT, (R, R, R, B), 0.0),
        (COUNT, (E, E, E, E), 0.0),
        (LEFT, (R, B, E, E), 1.0),
        (LEFT, (R, E, E, B), 1.0),
        (LEFT, (B, R, E, E), 0.75),
        (LEFT, (R, E, B, E), 0.75),  # one above the other
        (LEFT, (R, B, R, E), 0.75),  # one circle too many
        (LEFT, (R, E, E, E), 0.5),
        (LEFT, (E, E, E, "green cross"), 0.0),
        (CORNERS, (R, E, E, B), 1.0),
        (CORNERS, (R, B, E, E), 0.75),
    ],
)
def test_grade_is_the_share_of_demands_met(demands, cells, value):
    assert grade(demands, cells) == pytest.approx(value)
    assert grade(json.dumps(demands), list(cells)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("relation", "cells"),
    [("left of", (R, B, E, E)), ("right of", (B, R, E, E)), ("above", (R, E, B, E)), ("below", (B, E, R, E))],
)
def test_relation_holds_in_its_own_direction_only(relation, cells):
    demands = {"kind": "relation", "relation": relation, "objects": [R, B]}
    mirrored = tuple({R: B, B: R}.get(cell, cell) for cell in cells)
    assert grade(demands, cells) == 1.0 and grade(demands, mirrored) == 0.75


@pytest.mark.parametrize("category", CATEGORIES)
def test_sampled_scenes_meet_or_break_their_prompt(rng, category):
    for _ in range(60):
        prompt = sample_prompt(category, "train", rng)
        assert grade(prompt.demands, sample_fulfilling(prompt.demands, rng).cells) == 1.0
        assert grade(prompt.demands, sample_breaking(prompt.demands, rng).cells) < 1.0
        assert prompt.category == category and split_of(prompt.text) == "train"


def test_fulfilling_scenes_are_all_of_them():
    assert len(fulfilling_scenes(COUNT)) == 6  # 4 choose 2
    assert len(fulfilling_scenes(LEFT)) == 4
    assert set(fulfilling_scenes(CORNERS)) == {
        Scene((R, E, E, B)),
        Scene((B, E, E, R)),
        Scene((E, R, B, E)),
        Scene((E, B, R, E)),
    }


# Questions


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_one_choice_is_right_and_the_reasoning_leads_to_it(rng, kind):
    letters = set()
    for _ in range(150):
        scene = sample_scene(rng)
        question = sample_question(scene, rng, kind)
        value = question.choices[LETTERS.index(question.answer)]
        assert len(set(question.choices)) == 4 and question.category == kind
        assert question.completion == f"{value} <answer>{question.answer}</answer>"
        stated = dict(part.split(" is ") for part in question.reasoning.rstrip(".").split(", "))
        assert all(scene.objects.get(cell, E) == name for cell, name in stated.items())
        if kind == "count":
            assert set(stated) == set(CELLS)
        else:
            (name,) = stated.values()
            assert value in (name, *name.split())
        letters.add(question.answer)
    assert letters == set(LETTERS)


def test_count_question_counts_what_it_asks_for():
    rng, scene = np.random.default_rng(1), Scene((R, "red cross", "blue circle", E))
    truth = {"how many shapes": 3, "how many red": 2, "how many blue": 1, "how many circles": 2, "how many crosses": 1}
    numbers, asked = ("zero", "one", "two", "three", "four"), set()
    for _ in range(100):
        question = sample_question(scene, rng, "count")
        head = next((head for head in truth if question.prompt.startswith(head)), None)
        value = question.choices[LETTERS.index(question.answer)]
        assert value == numbers[truth.get(head, 0)]
        asked.add(head)
    assert asked == {*truth, None}


# Data sets


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_data_sets_repeat_for_a_seed_and_differ_between_seeds(task):
    first, again, other = (tiny_dataset(task, "test", size=24, seed=seed) for seed in (0, 0, 1))
    assert first["prompt"] == again["prompt"] != other["prompt"]
    assert len(set(first["category"])) == 4


def test_t2i_splits_share_no_prompt_and_all_words():
    texts = {split: set(tiny_dataset("t2i", split, size=400)["prompt"]) for split in SPLITS}
    assert not texts["train"] & texts["test"] and not texts["train"] & texts["validation"]
    assert not texts["validation"] & texts["test"]
    words = {split: set(" ".join(texts[split]).split()) for split in SPLITS}
    assert words["test"] <= words["train"]


def test_i2t_splits_share_no_layout():
    layouts = {}
    for split in SPLITS:
        pictures = [images[0] for images in tiny_dataset("i2t", split, size=200)["images"]]
        layouts[split] = {tuple(reading) for reading in read_picture(pictures)}
    assert not layouts["train"] & layouts["test"] and not layouts["validation"] & layouts["test"]
    assert not layouts["train"] & layouts["validation"]


def test_split_shares_are_70_15_15():
    counts = {split: 0 for split in SPLITS}
    for i in range(4000):
        counts[split_of(f"text {i}")] += 1
    assert counts == {split: pytest.approx(40 * share, abs=100) for split, share in SPLITS.items()}


def test_noise_breaks_its_share_of_scenes_while_plan_and_picture_agree():
    rows = tiny_sft_dataset("t2i", "train", size=200, noise=0.5)
    readings = read_picture([row["image"] for row in rows])
    grades = [grade(row["demands"], reading) for row, reading in zip(rows, readings)]
    assert [list(parse_plan(row["reasoning"]).cells) for row in rows] == readings
    assert sum(value < 1 for value in grades) == pytest.approx(100, abs=25)
    clean = tiny_sft_dataset("t2i", "train", size=50)
    assert all(
        grade(row["demands"], reading) == 1 for row, reading in zip(clean, read_picture([r["image"] for r in clean]))
    )


def test_noise_replaces_its_share_of_letters_at_random():
    def wrong(noise: float) -> float:
        rows = tiny_sft_dataset("i2t", "train", size=300, noise=noise, auxiliary=0.0)
        return np.mean([f"<answer>{row['answer']}</answer>" not in row["completion"] for row in rows])

    assert wrong(0.0) == 0.0
    assert wrong(1.0) == pytest.approx(0.75, abs=0.08)  # one random letter in four is the right one


def test_auxiliary_rows_describe_the_picture_or_list_the_choices():
    rows = tiny_sft_dataset("i2t", "train", size=60, auxiliary=1.0)
    assert set(rows["category"]) == {"caption", "choices"}
    for row, reading in zip(rows, read_picture([row["images"][0] for row in rows])):
        stated = dict(part.split(" is ") for part in row["completion"].rstrip(".").split(", "))
        if row["category"] == "caption":
            assert stated == dict(zip(CELLS, reading))
        else:
            assert {f"{letter}) {value}" for value, letter in stated.items()} == set(
                re.findall(r"[A-D]\) .*?(?= [A-D]\)|$)", row["prompt"])
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("t2l", "train"), "task='t2l'.*Did you mean 't2i'"),
        (("t2i", "tests"), "split='tests'.*'test'"),
        (("t2i", "test", 0), "size=0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_valid_ones(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_dataset(*arguments)
    with pytest.raises(ValueError, match="noise=1.5"):
        tiny_sft_dataset("t2i", "test", noise=1.5)


# Processor


@pytest.mark.parametrize("task", ["t2i", "i2t"])
def test_every_text_of_the_world_survives_encoding_and_decoding(processor, task):
    tokenizer = processor.tokenizer
    rows = tiny_sft_dataset(task, "train", size=400)
    texts = {row[name] for row in rows for name in ("prompt", "reasoning", "completion") if name in row}
    for text in sorted(texts):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id and tokenizer.unk_token_id not in ids, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) <= 110


def test_template_writes_the_turns_of_the_converted_checkpoints(processor):
    image, text = {"type": "image"}, {"type": "text", "text": " what is at top-left? "}
    user = {"role": "user", "content": [image, text]}
    reply = {"role": "assistant", "content": [{"type": "text", "text": "red circle"}]}
    eos = processor.tokenizer.eos_token

    def apply(messages, **kwargs):
        return processor.apply_chat_template(messages, **kwargs)

    question = "<|User|>: <image_placeholder>\n what is at top-left?\n\n"
    assert apply([user], add_generation_prompt=True) == question + "<|Assistant|>:"
    assert apply([user, reply]) == question + "<|Assistant|>: red circle"
    assert apply([user, reply, user]).startswith(question + f"<|Assistant|>: red circle{eos}<|User|>: ")
    plain = {"role": "user", "content": [{"type": "text", "text": " two red circles "}]}
    assert apply([plain], add_generation_prompt=True) == "<|User|>: two red circles\n\n<|Assistant|>:"
    last = {"role": "user", "content": [{"type": "text", "text": "shapes"}, image]}
    assert apply([last]) == "<|User|>: shapes\n<image_placeholder>"
    assert apply([{"role": "assistant", "content": [{"type": "text", "text": ""}]}]) == "<|Assistant|>:"


def test_saved_processor_loads_and_pads_left(processor, rng, tmp_path):
    processor.save_pretrained(tmp_path)
    loaded = type(processor).from_pretrained(tmp_path)
    texts = ["<|User|>: <image_placeholder>\nwhat is at top-left?\n\n<|Assistant|>:", "<|User|>: red\n\n<|Assistant|>:"]
    inputs = loaded(text=texts, images=[render(Scene((R, E, E, E)), rng)], padding=True)
    ids = inputs["input_ids"]
    assert (ids[0] == loaded.tokenizer.image_token_id).sum() == loaded.num_image_tokens == 64
    assert ids[1][0] == loaded.tokenizer.pad_token_id and ids[0][0] == loaded.tokenizer.convert_tokens_to_ids(BOS)
    assert inputs["attention_mask"][1].sum() == 7
    assert loaded.chat_template == processor.chat_template and not loaded.use_default_system_prompt
    with_image = loaded(text=["red"], generation_mode="image")["input_ids"][0]
    assert with_image[-1] == loaded.tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)


def test_configuration_names_the_special_ids_of_the_tokenizer(processor):
    tokenizer = processor.tokenizer
    config, generation = build_config(tokenizer), build_generation_config(tokenizer)
    assert config.text_config.vocab_size == len(tokenizer) and not config.tie_word_embeddings
    assert config.image_token_id == tokenizer.image_token_id
    assert config.vq_config.num_patches**2 == processor.num_image_tokens
    assert generation.generation_kwargs["boi_token_id"] == tokenizer.convert_tokens_to_ids(BEGIN_OF_IMAGE)
    for part in (config, config.text_config, generation):
        assert part.pad_token_id == tokenizer.pad_token_id and part.eos_token_id == tokenizer.eos_token_id
