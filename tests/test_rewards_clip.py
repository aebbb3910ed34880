"""Rewards on open_clip models, small random weights: formulas, files, placement, self-test."""

import inspect

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from janus_trl.rewards import get_reward_funcs
from janus_trl.rewards.captions import captions_of
from janus_trl.rewards.placement import FrozenModel, Placement, preprocess
from janus_trl.rewards.registry import REGISTERED_REWARDS
from janus_trl.rewards.targets import import_target
from tests.clip import OPEN_CLIP_NAME, pictures, register_open_clip, save_clip

LONG = "a very long caption about a red cat " * 20
PROMPTS = ["a red cat", "two dogs", "", LONG, "a red cat", "fog over a harbour"]
REQUIRED = inspect.Parameter.empty
CALL = dict(prompts=PROMPTS, completions=["x"] * len(PROMPTS), demands=PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clip_rewards")


@pytest.fixture(scope="module")
def open_model(folder):
    return register_open_clip(folder)


@pytest.fixture(scope="module")
def weights(folder, open_model) -> str:
    """The weights in the layout in which HPSv2.1 is published."""
    path = folder / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 3, "name": "hps", "state_dict": open_model.state_dict()}, path)
    return str(path)


@pytest.fixture(scope="module")
def clip_folder(folder) -> str:
    return save_clip(str(folder / "clip"))


def build(name: str, **args):
    return get_reward_funcs({"name": name, "args": args}, "t2i", ["prompt"])


def score(rewards, prompts=PROMPTS) -> list[float]:
    call = dict(prompts=prompts, completions=["x"] * len(prompts), generated_images=pictures(len(prompts)))
    return rewards.funcs[0](**call)


@torch.no_grad()
def direct_cosines(model, prompts=PROMPTS) -> list[float]:
    """As in open_clip's README: its own transform and tokenizer, one pair at a time."""
    _, _, transform = open_clip.create_model_and_transforms(OPEN_CLIP_NAME)
    tokenizer = open_clip.get_tokenizer(OPEN_CLIP_NAME)
    cosines = []
    for prompt, picture in zip(prompts, pictures(len(prompts)), strict=True):
        image = model.encode_image(transform(picture)[None])
        text = model.encode_text(tokenizer([prompt]))
        cosines.append(torch.nn.functional.cosine_similarity(image, text).item())
    return cosines


# ---------------------------------------------------------------------------------------------------------- open_clip


def test_hps_v2_is_the_cosine_of_a_published_state_dict(open_model, weights):
    expected = direct_cosines(open_model)
    assert score(build("hps_v2", checkpoint=weights, model=OPEN_CLIP_NAME)) == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 0.05  # the comparison can tell rows apart


@pytest.mark.parametrize("layout", ["plain", "module", "safetensors"])
def test_other_layouts_of_the_weights_give_the_same_scores(open_model, weights, folder, layout):
    state, path = open_model.state_dict(), folder / f"{layout}.pt"
    if layout == "safetensors":
        from safetensors.torch import save_file

        path = folder / "weights.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save({f"module.{name}": w for name, w in state.items()} if layout == "module" else state, path)
    ours = score(build("hps_v2", checkpoint=str(path), model=OPEN_CLIP_NAME))
    assert ours == score(build("hps_v2", checkpoint=weights, model=OPEN_CLIP_NAME))


def test_clip_score_is_a_hundred_times_the_positive_cosine(open_model, weights, tmp_path):
    expected = direct_cosines(open_model)
    ours = score(build("clip_score", model=OPEN_CLIP_NAME, checkpoint=weights))
    assert [value / 100 for value in ours] == pytest.approx(expected, abs=1e-5) and min(ours) > 1
    opposite = {name: -w if name == "text_projection" else w for name, w in open_model.state_dict().items()}
    torch.save(opposite, tmp_path / "opposite.pt")
    negative = build("clip_score", model=OPEN_CLIP_NAME, checkpoint=str(tmp_path / "opposite.pt"))
    assert score(negative) == [0.0] * len(PROMPTS)


def test_captions_beyond_the_text_tower_are_cut_before_their_end_token_and_counted(open_model, weights):
    reward = build("clip_score", model=OPEN_CLIP_NAME, checkpoint=weights)
    longer = [LONG, LONG + "and more", "a cat"]
    picture = [pictures(1)[0]] * 3
    values = reward.funcs[0](prompts=longer, completions=[""] * 3, generated_images=picture)
    assert values[0] == values[1] and values.counts == {"truncated": 2}
    tokens = open_clip.get_tokenizer(OPEN_CLIP_NAME)([LONG])
    assert tokens[0, -1] == open_clip.get_tokenizer(OPEN_CLIP_NAME).eot_token_id


def test_micro_batches_and_repeated_captions_change_nothing(weights, monkeypatch):
    whole = score(build("hps_v2", checkpoint=weights, model=OPEN_CLIP_NAME))
    rewards = build("hps_v2", checkpoint=weights, model=OPEN_CLIP_NAME, batch_size=4)
    rewards.load()
    reward = rewards.funcs[0].wrapped_reward
    with reward.clip.ready() as clip:
        sizes = {"encode_text": [], "encode_image": []}
        for name, seen in sizes.items():
            original = getattr(clip.module, name)
            monkeypatch.setattr(
                clip.module, name, lambda x, seen=seen, original=original: seen.append(len(x)) or original(x)
            )
    assert score(rewards) == pytest.approx(whole, abs=1e-5)
    assert sizes == {"encode_text": [4, 1], "encode_image": [4, 2]}  # five different captions, six pictures


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("hps_v2", {}, "missing argument 'checkpoint'"),
        (
            "hps_v2",
            {"checkpoint": "nowhere.pt"},
            "checkpoint is 'nowhere.pt'; there is no such file. Download it first",
        ),
        ("hps_v2", {"checkpoint": "laion2b_s32b_b79k"}, "checkpoint is 'laion2b_s32b_b79k'; there is no such file"),
        ("clip_score", {"model": "ViT-B-32", "checkpoint": "nowhere.pt"}, "no such file. .*tags of ViT-B-32"),
        ("clip_score", {"model": "ViT-B-23", "checkpoint": "x"}, "does not know; did you mean .*ViT-B-32"),
        ("clip_score", {"model": "ViT-B-32"}, "missing argument 'checkpoint'"),
        ("clip_score", {"model": "ViT-B-32", "checkpoint": "laion2b", "device": "cuda:1"}, "every rank on one card"),
        ("hps_v2", {"checkpoint": "x", "batch_size": "many"}, "argument 'batch_size' is 'many'"),
        (
            "hps_v2",
            {"checkpoint": "x", "reward_prompt": "all"},
            "'reward_prompt' is 'all'; valid: both, prompt, reasoning",
        ),
        ("aesthetic", {"head": "nowhere.pth"}, "head is 'nowhere.pth'; there is no such file"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_loaded(name, args, message):
    with pytest.raises(ValueError, match=message):
        build(name, **args)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("clip_score", {"model": REQUIRED, "checkpoint": REQUIRED}),
        ("hps_v2", {"checkpoint": REQUIRED, "model": "ViT-H-14"}),
        ("pickscore", {"model": "yuvalkirstain/PickScore_v1", "processor": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"}),
    ],
)
def test_rewards_for_captions_share_their_arguments_and_defaults(name, own):
    shared = {"device": "auto", "dtype": "float32", "batch_size": 8, "offload": False, "reward_prompt": "prompt"}
    parameters = inspect.signature(import_target(REGISTERED_REWARDS[name].target, ())).parameters
    assert {key: p.default for key, p in parameters.items() if key != "raw"} == own | shared


def test_weights_of_another_model_or_no_weights_at_all_end_the_start(open_model, folder):
    state = open_model.state_dict()
    wrong, no = folder / "wrong.pt", folder / "no.pt"
    torch.save({name: tensor for name, tensor in state.items() if name != "text_projection"}, wrong)
    no.write_bytes(b"not a checkpoint")
    for path, message in ((wrong, "text_projection"), (no, "cannot be read")):
        with pytest.raises(ValueError, match=f"reward 'hps_v2': checkpoint .*{message}") as error:
            build("hps_v2", checkpoint=str(path), model=OPEN_CLIP_NAME).load()
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------- captions


def test_the_caption_is_the_users_text_or_what_was_asked_for():
    prompts = ["a cat.", [{"role": "user", "content": [{"type": "text", "text": "a dog"}]}], "fog"]
    completions = [" whiskers ", [{"role": "assistant", "content": "four legs"}], ""]
    assert captions_of(prompts, None, "prompt") == ["a cat.", "a dog", "fog"]
    assert captions_of(prompts, completions, "reasoning") == ["whiskers", "four legs", ""]
    assert captions_of(prompts, completions, "both") == ["a cat. whiskers", "a dog. four legs", "fog"]
    with pytest.raises(ValueError, match="needs the completions"):
        captions_of(prompts, None, "both")


def test_reward_prompt_changes_what_a_picture_is_compared_with(open_model, weights):
    args = dict(checkpoint=weights, model=OPEN_CLIP_NAME)
    given = dict(prompts=["a cat"], completions=["a red cat"], generated_images=pictures(1))
    values = {
        kind: build("hps_v2", reward_prompt=kind, **args).funcs[0](**given)[0]
        for kind in ("prompt", "reasoning", "both")
    }
    assert values["prompt"] == pytest.approx(direct_cosines(open_model, ["a cat"])[0], abs=1e-5)
    assert values["reasoning"] == pytest.approx(direct_cosines(open_model, ["a red cat"])[0], abs=1e-5)
    assert values["both"] == pytest.approx(direct_cosines(open_model, ["a cat. a red cat"])[0], abs=1e-5)


# --------------------------------------------------------------------------------------------------------- placement


def test_a_model_is_offloaded_between_calls(weights, monkeypatch):
    moves = []
    rewards = build("hps_v2", checkpoint=weights, model=OPEN_CLIP_NAME, offload=True)
    plain = score(rewards)
    module = rewards.funcs[0].wrapped_reward.clip._scorer.module
    monkeypatch.setattr(Placement, "target", torch.device("cuda"))
    monkeypatch.setattr(module, "to", lambda device: moves.append(str(device)))
    with rewards.funcs[0].wrapped_reward.clip.ready():
        assert moves == ["cuda"]
    assert moves == ["cuda", "cpu"]
    with pytest.raises(KeyError), rewards.funcs[0].wrapped_reward.clip.ready():
        raise KeyError
    assert moves == ["cuda", "cpu"] * 2
    monkeypatch.undo()
    assert score(rewards) == plain


def test_threads_keep_the_order_of_the_pictures(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    pixels = preprocess(list(range(10)), lambda part: torch.tensor([[float(i)] for i in part]))
    assert pixels.flatten().tolist() == list(range(10))


def test_a_sharded_model_is_refused_with_the_rewards_name():
    class Loaded:
        module = torch.nn.Linear(2, 2)

    Loaded.module.weight.data = torch.empty(0)
    with pytest.raises(ValueError, match="reward 'mine': parameter 'weight' has shape"):
        FrozenModel(Placement("mine"), Loaded).load()


# --------------------------------------------------------------------------------------------------------- self-test


def test_neural_rewards_are_tested_on_two_pictures_before_training(weights, open_model, tmp_path):
    build("hps_v2", checkpoint=weights, model=OPEN_CLIP_NAME).load()
    state = {name: tensor.clone() for name, tensor in open_model.state_dict().items()}
    state["visual.proj"].zero_()
    torch.save(state, tmp_path / "blind.pt")
    with pytest.raises(ValueError, match="reward 'hps_v2' failed its self-test .*: both score 0.0"):
        build("hps_v2", checkpoint=str(tmp_path / "blind.pt"), model=OPEN_CLIP_NAME).load()
    state["visual.proj"].fill_(float("nan"))
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(ValueError, match=r"failed its self-test .*: the scores are \[nan, nan\]"):
        build("hps_v2", checkpoint=str(tmp_path / "nan.pt"), model=OPEN_CLIP_NAME).load()


def test_blank_pictures_alone_do_not_fail(weights):
    rewards = build("clip_score", model=OPEN_CLIP_NAME, checkpoint=weights)
    blank = [Image.new("RGB", (384, 384))] * 2
    assert len(rewards.funcs[0](prompts=["", "a"], completions=["", ""], generated_images=blank)) == 2
