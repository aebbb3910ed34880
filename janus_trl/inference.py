"""A checkpoint ready to sample outside of training: model, processor, decode engine, and which process this is."""

import hashlib
from pathlib import Path

import torch
from accelerate import PartialState
from peft import PeftModel
from transformers import JanusProcessor

from .adapter_files import adapter_base, adapter_folder, is_adapter, model_file
from .checkpoints import MANIFEST, read_manifest
from .config_checks import started_processes
from .engine import DecodeEngine
from .engine_buffers import supports
from .modeling import JanusForInterleavedGeneration, bind_special_ids
from .picture_decoder import PictureDecoder
from .prompts import bind_prompt_template
from .recipe import resolve_model

SAMPLE_BYTES = 65536  # of each weight file, for the fingerprint
# Text tokens at most: in general, and of the embedded model or data (as in recipes/tiny).
TEXT_LENGTHS = {"t2i": (0, 24), "i2t": (256, 40)}


def trained_length(name: str | None, task: str) -> int | None:
    """Text tokens at most with which a checkpoint of ours (folder or Hub id) was trained; None where it says none."""
    manifest = model_file(name, MANIFEST)
    sampling = read_manifest(manifest.parent).get("sampling", {}) if manifest else {}
    return sampling.get({"t2i": "max_reasoning_length", "i2t": "max_completion_length"}[task])


def usual_text_length(name: str | None, task: str, tiny: bool) -> int:
    """Text tokens at most where none are asked for: those of the training, else the usual ones of the task."""
    trained = trained_length(name, task)  # 0: the image at once
    return TEXT_LENGTHS[task][tiny] if trained is None else trained


def base_checkpoint(name: str | None) -> str:
    """The checkpoint that `name` is, or that an adapter (folder or Hub id) belongs to; reads no weights.

    Raises:
        ValueError: see `resolve_model`.
    """
    return resolve_model(adapter_base(name) if is_adapter(name) else name)


def load(name: str, base: str, template: str | None = None) -> tuple[JanusForInterleavedGeneration, JanusProcessor]:
    """The model (adapter merged; bfloat16 on a GPU, float32 on CPU) and its processor, with a prompt template."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    # A trainer saves the processor, with the template of the training, beside an adapter too.
    adapter = adapter_folder(name)
    with_processor = adapter and (Path(adapter) / "processor_config.json").is_file()
    processor = JanusProcessor.from_pretrained(adapter if with_processor else base)
    bind_prompt_template(processor, template)
    model = JanusForInterleavedGeneration.from_pretrained(base, dtype=dtype)
    model = PeftModel.from_pretrained(model, adapter).merge_and_unload() if adapter else model
    bind_special_ids(model, processor)
    return model.to(device).eval(), processor


def decode_engine(model: JanusForInterleavedGeneration, use_cuda_graphs: bool = True) -> DecodeEngine | None:
    """The engine that training samples with, holding the weights of `model`; None where the plain path samples."""
    if model.device.type != "cuda" or not supports(model):
        return None
    engine = DecodeEngine(model.lm_head.weight.dtype, use_cuda_graphs)
    engine.load_weights(model)
    return engine


def picture_decoder(model: JanusForInterleavedGeneration) -> PictureDecoder:
    """Pictures in float32, as training makes them by default: what is shown is what was rewarded (DanceGRPO#117)."""
    return PictureDecoder(model, torch.float32)


def this_process() -> tuple[int, int]:
    """Index of this process and their number, as started by `accelerate launch`; selects the GPU of this process."""
    if started_processes() == 1:
        return 0, 1
    state = PartialState(cpu=not torch.cuda.is_available())
    return state.process_index, state.num_processes


def wait_for_all() -> None:
    """A barrier, where several processes were started."""
    if this_process()[1] > 1:
        PartialState().wait_for_everyone()


def leave() -> None:
    """End the process group of several processes; each may end when it is done."""
    if this_process()[1] > 1:
        PartialState().destroy_process_group()


def weights_fingerprint(*folders: str) -> str:
    """A digest of the weight files in local folders (sizes, and their beginning, middle and end).

    It tells a folder that was trained further from what it was; of a Hub id, which keeps its weights, it is empty.
    """
    digest = hashlib.blake2b(digest_size=8)
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.safetensors"))]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as opened:
            for start in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
                opened.seek(start)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""
