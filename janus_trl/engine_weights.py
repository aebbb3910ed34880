"""The weights that the decode engine reads: fused, of one dtype, at fixed addresses, LoRA merged."""

from dataclasses import dataclass, field

import torch
from trl.trainer.utils import maybe_gather_lm_head_ctx as gathered

from .modeling import JanusForInterleavedGeneration


@dataclass
class EngineWeights:
    """Weights by name (`0.qkv`, `norm`, `vision_head.bias`, …).

    Attributes:
        dtype: of all weights.
        copies: names of the weights that are not the model's own storage.
        moved: whether a weight has another address since the last `load`; captured graphs are void then.
    """

    dtype: torch.dtype
    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    moved: bool = False

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.by_name[name]

    @torch.no_grad()
    def load(self, model: JanusForInterleavedGeneration, with_text: bool = True) -> None:
        """Bring all weights up to date: copied once per rollout, LoRA merged on the way.

        Without text no text is sampled, and text head and text embeddings are left out.

        Where the model's own storage can be used (same dtype, not sharded, no adapter), the fused matrices become
        that storage: the parameters turn into views of them, and later calls copy nothing. Under ZeRO-3 one matrix at
        a time is gathered into the engine's own, so a GPU holds one copy of the weights and not two; collective.
        """
        self.moved = False
        lm, head = model.model.language_model, model.model.generation_head
        for i, layer in enumerate(lm.layers):
            attention, mlp = layer.self_attn, layer.mlp
            self._load(f"{i}.qkv", [attention.q_proj, attention.k_proj, attention.v_proj])
            self._load(f"{i}.o", [attention.o_proj])
            self._load(f"{i}.gate_up", [mlp.gate_proj, mlp.up_proj])
            self._load(f"{i}.down", [mlp.down_proj])
            self._load(f"{i}.norm1", [layer.input_layernorm])
            self._load(f"{i}.norm2", [layer.post_attention_layernorm])
        self._load("norm", [lm.norm])
        if with_text:
            self._load("lm_head", [model.lm_head])
            self._load("embed", [lm.embed_tokens])
        for name, module in (("proj_out", head.proj_out), ("vision_head", head.vision_head)):
            self._load(name, [module])
            with gathered(module.bias):
                self._store(f"{name}.bias", module.bias)
        codes = torch.arange(head.vision_head.out_features, device=model.lm_head.weight.device)
        self._store("codes", model.prepare_embeddings_for_image_generation(codes))  # [codebook, H]

    def release(self) -> None:
        """Free the copies; what is the model's own storage stays."""
        self.by_name = {name: weight for name, weight in self.by_name.items() if name not in self.copies}
        self.copies.clear()

    def _load(self, name: str, modules: list[torch.nn.Module]) -> None:
        with gathered(*(parameter for module in modules for parameter in module.parameters())):
            self._load_whole(name, modules)

    def _load_whole(self, name: str, modules: list[torch.nn.Module]) -> None:
        sources = [_merged_weight(module) for module in modules]
        parameters = [getattr(module, "weight", None) for module in modules]
        mine = all(s is p and _plain(p, self.dtype) for s, p in zip(sources, parameters, strict=True))
        if name in self.by_name and mine == (name in self.copies):  # an adapter was switched on or off
            del self.by_name[name]  # else merged weights would be written into the model's own
            self.copies.discard(name)
            self.moved = True
        if mine and len(sources) == 1:
            if name in self.by_name and self.by_name[name].data_ptr() != sources[0].data_ptr():
                self.moved = True
            self.by_name[name] = sources[0].detach()
            return
        if name not in self.by_name:
            rows = sum(len(source) for source in sources)
            self.by_name[name] = sources[0].new_empty(rows, *sources[0].shape[1:], dtype=self.dtype)
        if not mine:
            self.copies.add(name)
        start = 0
        for source, parameter in zip(sources, parameters, strict=True):
            target = self.by_name[name][start : start + len(source)]
            start += len(source)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
                if mine:
                    parameter.data = target

    def _store(self, name: str, value: torch.Tensor) -> None:
        if name in self.by_name:
            self.by_name[name].copy_(value)
        else:
            self.by_name[name] = value.detach().to(self.dtype, copy=True)
            self.copies.add(name)


def _plain(parameter: torch.nn.Parameter | None, dtype: torch.dtype) -> bool:
    """Whether the parameter's own storage can serve: this dtype, and not sharded by ZeRO-3."""
    return parameter is not None and parameter.dtype == dtype and not hasattr(parameter, "ds_id")


def _merged_weight(module: torch.nn.Module) -> torch.Tensor:
    """The weight of a module, with active LoRA adapters added.

    DoRA (Liu et al. 2024, arXiv 2402.09353, equation 5) gives every row of the sum a trained length.
    """
    base = getattr(module, "base_layer", None)
    if base is None:
        return module.weight
    if module.disable_adapters or module.merged:
        return base.weight
    weight = frozen = base.weight.float()
    for adapter in module.active_adapters:
        if adapter in module.lora_A:
            delta = module.get_delta_weight(adapter).float()
            if adapter in module.lora_magnitude_vector:
                dora = module.lora_magnitude_vector[adapter]
                factor = dora.weight.float() / dora.get_weight_norm(frozen, delta, scaling=1)
                delta = factor.unsqueeze(1) * (frozen + delta) - frozen
            weight = weight + delta
    return weight
