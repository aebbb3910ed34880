"""What both trainers check about the model they are given, and where its processor comes from."""

from accelerate.utils import is_peft_model
from transformers import JanusConfig, JanusProcessor, PreTrainedModel

from .modeling import JanusForInterleavedGeneration


def processor_for(model: str | PreTrainedModel, processing_class: JanusProcessor | None) -> JanusProcessor:
    """`processing_class`, or the processor in the folder or Hub id that `model` is or was loaded from.

    Raises:
        ValueError: if a loaded model is of another class, or was built in memory and comes without a processor.
    """
    check_model(model)
    name = model_name(model)
    if processing_class is None and not name:
        raise ValueError(
            "processing_class is not set, and the model was built in memory, so there is no folder to read it from. "
            "Pass processing_class=JanusProcessor.from_pretrained(…)."
        )
    return processing_class or JanusProcessor.from_pretrained(name)


def model_name(model: str | PreTrainedModel) -> str:
    """Folder or Hub id of a model; empty if it was built in memory."""
    return model if isinstance(model, str) else model.config._name_or_path


def model_config(model: str | PreTrainedModel, init_kwargs: dict | None = None) -> JanusConfig:
    """The config of a model, or of the folder or Hub id that it will be loaded from, without its weights."""
    if not isinstance(model, str):
        return model.config
    return JanusConfig.from_pretrained(model, revision=(init_kwargs or {}).get("revision"))


def check_model(model: str | PreTrainedModel) -> None:
    """Refuse a loaded model that cannot score joint ids.

    Raises:
        ValueError: naming its class and how to load it instead.
    """
    if isinstance(model, str):
        return
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, JanusForInterleavedGeneration):
        raise ValueError(
            f"model is a {type(base).__name__}, which cannot score image codes. Pass the folder or Hub id, or load "
            "with JanusForInterleavedGeneration.from_pretrained(…), which reads the same checkpoints."
        )
