"""Networks of other people's packages, small and untrained; those of packages that are not installed are left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from experiments.zoo_plain import ROWS, Given, Subject, classes, images, integers, mlp, numbers, per_token, randn, tokens


def _logits(found: Any) -> Tensor:
    return found.logits


def available(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def _torchvision(name: str, size: int = 32, **settings: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        from torchvision import models

        return images(getattr(models, name)(weights=None, num_classes=3, **settings), size)

    return make


def _vision_transformer() -> Subject:
    from torchvision.models import VisionTransformer

    return images(VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3), 32)


def _swin() -> Subject:
    from torchvision.models import SwinTransformer

    return images(SwinTransformer([4, 4], 12, [1, 1], [2, 2], [2, 2], num_classes=3, stochastic_depth_prob=0.1), 32)


def _densenet() -> Subject:
    from torchvision.models import DenseNet

    return images(DenseNet(8, (2, 2), 8, num_classes=3, memory_efficient=True), 32)


TORCHVISION = {
    "ResNet-18": _torchvision("resnet18"),
    "SqueezeNet": _torchvision("squeezenet1_1"),
    "ShuffleNet": _torchvision("shufflenet_v2_x0_5"),
    "MobileNet v2": _torchvision("mobilenet_v2", width_mult=0.25),
    "MobileNet v3": _torchvision("mobilenet_v3_small"),
    "MNASNet": _torchvision("mnasnet0_5"),
    "RegNet": _torchvision("regnet_y_400mf"),
    "GoogLeNet": _torchvision("googlenet", aux_logits=False, init_weights=False),
    "DenseNet, checkpointed": _densenet,
    "VisionTransformer": _vision_transformer,
    "SwinTransformer": _swin,
}


def _timm(name: str, size: int = 32, **settings: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        import timm

        return images(timm.create_model(name, num_classes=3, **settings), size)

    return make


def _timm_class(module: str, name: str, **settings: Any) -> Callable[[], Subject]:
    return lambda: images(getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=3, **settings), 32)


TIMM = {
    "ResNet-10t": _timm("resnet10t"),
    "ViT": _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24),
    "DeiT 3": _timm("deit3_small_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=3),
    "MLP-Mixer": _timm_class("mlp_mixer", "MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=16),
    "ConvNeXt": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "ConvMixer": _timm_class("convmixer", "ConvMixer", dim=16, depth=2),
    "LCNet": _timm("lcnet_035"),
    "GhostNet": _timm("ghostnet_050"),
    "TinyNet": _timm("tinynet_e"),
    "PoolFormer": _timm_class("metaformer", "MetaFormer", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "EfficientViT": _timm("efficientvit_b0"),
    "NFNet": _timm("nf_regnet_b0", width_factor=0.25),
}


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
_TEXTS = {"max_position_embeddings": 32, "num_labels": 3}


def _hugging_face(name: str, task: str = "SequenceClassification", **settings: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        import transformers

        per_word = task in ("TokenClassification", "CausalLM", "MaskedLM")
        words = 10 if task in ("CausalLM", "MaskedLM") else 40
        config = getattr(transformers, f"{name}Config")(**{"pad_token_id": 0, **settings, "vocab_size": words})
        kind = "GPT2LMHeadModel" if (name, task) == ("GPT2", "CausalLM") else f"{name}For{task}"
        network = getattr(transformers, kind)(config)
        made = (per_token if per_word else tokens)(network, words, 6, 10 if words == 10 else 3, output=_logits)
        ids = made.x.clamp_min(1)  # no padding
        return made._replace(x={"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    return make


def _checkpointed_bert() -> Subject:
    made = _hugging_face("Bert", **_SMALL, **_TEXTS)()
    made.network.gradient_checkpointing_enable()
    return made


def _pictures(name: str, task: str = "ImageClassification", **settings: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        import transformers

        config = getattr(transformers, f"{name}Config")(num_labels=3, image_size=32, **settings)
        made = images(getattr(transformers, f"{name}For{task}")(config), 32, output=_logits)
        return made._replace(x={"pixel_values": made.x})

    return make


def _segformer() -> Subject:
    import transformers

    sizes = {"depths": [1, 1], "hidden_sizes": [8, 8], "num_attention_heads": [1, 1], "sr_ratios": [2, 1]}
    stages = {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8}
    network = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_labels=3, **sizes, **stages))
    made = images(network, 32)
    y = integers(3, ROWS, 8, 8)
    return made._replace(x={"pixel_values": made.x}, y=y, output=lambda found: found.logits.movedim(1, -1))


def _wav2vec() -> Subject:
    import transformers

    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=3, classifier_proj_size=8,
        mask_time_prob=0.3, mask_time_length=2,
    )  # fmt: skip
    return classes(transformers.Wav2Vec2ForSequenceClassification(config), {"input_values": randn(ROWS, 200)}, output=_logits)


def _t5() -> Subject:
    import transformers

    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    encoder = transformers.T5EncoderModel(config)
    return tokens(
        Given(lambda m, x: m.head(m.body(input_ids=x).last_hidden_state.mean(1)), body=encoder, head=nn.Linear(16, 3)), 40
    )


_LLAMA = {**_SMALL, **_TEXTS, "num_key_value_heads": 1}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 32, "num_labels": 3}

TRANSFORMERS = {
    "BERT": _hugging_face("Bert", **_SMALL, **_TEXTS),
    "BERT, checkpointed": _checkpointed_bert,
    "BERT, words": _hugging_face("Bert", "TokenClassification", **_SMALL, **_TEXTS),
    "BERT, masked": _hugging_face("Bert", "MaskedLM", **_SMALL, **_TEXTS),
    "RoBERTa": _hugging_face("Roberta", **_SMALL, **_TEXTS),
    "ELECTRA": _hugging_face("Electra", embedding_size=8, **_SMALL, **_TEXTS),
    "ALBERT": _hugging_face("Albert", embedding_size=8, **_SMALL, **_TEXTS),
    "DeBERTa": _hugging_face("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], **_SMALL, **_TEXTS),
    "DistilBERT": _hugging_face(
        "DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=40, max_position_embeddings=32, num_labels=3
    ),
    "GPT-2": _hugging_face("GPT2", **_GPT2),
    "GPT-2, language model": _hugging_face("GPT2", "CausalLM", **_GPT2),
    "OPT": _hugging_face(
        "OPT", ffn_dim=24, word_embed_proj_dim=16, **{k: v for k, v in _SMALL.items() if k != "intermediate_size"}, **_TEXTS
    ),
    "GPT-NeoX": _hugging_face("GPTNeoX", **_SMALL, **_TEXTS),
    "Llama": _hugging_face("Llama", **_LLAMA),
    "Llama, language model": _hugging_face("Llama", "CausalLM", **_LLAMA),
    "Mistral": _hugging_face("Mistral", sliding_window=4, **_LLAMA),
    "Mixtral": _hugging_face("Mixtral", num_local_experts=2, num_experts_per_tok=1, **_LLAMA),
    "Qwen 2": _hugging_face("Qwen2", **_LLAMA),
    "Gemma": _hugging_face("Gemma", head_dim=8, **_LLAMA),
    "Mamba": _hugging_face("Mamba", "CausalLM", hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=40, num_labels=3),
    "T5, encoder": _t5,
    "ViT": _pictures("ViT", patch_size=8, **{k: v for k, v in _SMALL.items() if k != "vocab_size"}),
    "ConvNeXt": _pictures("ConvNext", hidden_sizes=[8, 8], depths=[1, 1], num_stages=2),
    "Swin": _pictures("Swin", embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, patch_size=4),
    "ResNet": _pictures("ResNet", embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"),
    "SegFormer": _segformer,
    "wav2vec 2": _wav2vec,
}


def _peft(config: str, base: str = "BERT", **settings: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        import peft

        made = TRANSFORMERS[base]()
        return made._replace(network=peft.get_peft_model(made.network, getattr(peft, config)(task_type="SEQ_CLS", **settings)))

    return make


PEFT = {
    "LoRA": _peft("LoraConfig", r=2, target_modules=["query", "value"]),
    "LoRA of GPT-2": _peft("LoraConfig", base="GPT-2", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "DoRA": _peft("LoraConfig", r=2, target_modules=["query", "value"], use_dora=True),
    "IA³": _peft("IA3Config", target_modules=["key", "value"], feedforward_modules=[]),
    "prompts": _peft("PromptTuningConfig", num_virtual_tokens=2),
    "bottleneck of OFT": _peft("OFTConfig", target_modules=["query"], r=0, oft_block_size=4),
}


# ---------------------------------------------------------------------------------------------------------------------
# Graphs and differential equations

_EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])


def _one_graph(layer: str, **settings: Any) -> Callable[[], Subject]:
    """Signals on the nodes of one graph."""

    def make() -> Subject:
        from torch_geometric import nn as geometric

        first = getattr(geometric, layer)(3, 6, **settings)
        network = Given(
            lambda m, x: m.head(m.first(x, m.edges).relu()).mean(1), first=first, head=nn.Linear(6, 1), edges=_EDGES
        )
        return numbers(network, randn(ROWS, 4, 3))

    return make


def _dense_graph(layer: str, **settings: Any) -> Callable[[], Subject]:
    """A graph for each example, as a matrix."""

    def make() -> Subject:
        from torch_geometric import nn as geometric

        inner = {"nn": mlp(3, 6)} if layer == "DenseGINConv" else {"in_channels": 3, "out_channels": 6}
        network = Given(
            lambda m, x, adj: m.head(m.first(x, adj).relu().mean(1)),
            first=getattr(geometric, layer)(**inner, **settings),
            head=nn.Linear(6, 1),
        )
        return numbers(network, {"x": randn(ROWS, 4, 3), "adj": (randn(ROWS, 4, 4) > 0).float()})

    return make


def _batched_graphs() -> Subject:
    """All graphs in one: an example has no row of its own, and refusing it is right."""
    from torch_geometric import nn as geometric
    from torch_geometric.data import Batch, Data

    graphs = Batch.from_data_list([Data(x=randn(4, 3), edge_index=_EDGES) for _ in range(ROWS)])
    network = Given(lambda m, g: geometric.global_mean_pool(m.first(g.x, g.edge_index), g.batch), first=geometric.GCNConv(3, 1))
    return Subject(network, graphs, randn(ROWS, 1))


GEOMETRIC = {
    "GCN, one graph": _one_graph("GCNConv"),
    "GraphSAGE, one graph": _one_graph("SAGEConv"),
    "Chebyshev, one graph": _one_graph("ChebConv", K=2),
    "GraphConv, one graph": _one_graph("GraphConv"),
    "GCN, dense": _dense_graph("DenseGCNConv"),
    "GraphSAGE, dense": _dense_graph("DenseSAGEConv"),
    "GIN, dense": _dense_graph("DenseGINConv"),
    "GAT, dense": _dense_graph("DenseGATConv", heads=2, concat=False),
    "graphs in one batch": _batched_graphs,
}


def _ode(solver: str, method: str) -> Callable[[], Subject]:
    def make() -> Subject:
        import torchdiffeq

        class Field(nn.Module):
            """Dy/dt."""

            def __init__(self) -> None:
                super().__init__()
                self.net = mlp(3, 3)

            def forward(self, t: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002
                """The same at all times."""
                return self.net(y)

        times = torch.tensor([0.0, 0.5])
        solve = getattr(torchdiffeq, solver)
        return numbers(
            Given(
                lambda m, x: m.head(solve(m.field, x, m.times, method=method)[-1]),
                field=Field(),
                head=nn.Linear(3, 1),
                times=times,
            )
        )

    return make


DIFFERENTIAL = {
    "Runge-Kutta": _ode("odeint", "rk4"),
    "Dormand-Prince": _ode("odeint", "dopri5"),
    "adjoint, Runge-Kutta": _ode("odeint_adjoint", "rk4"),
    "adjoint, Dormand-Prince": _ode("odeint_adjoint", "dopri5"),
}

PACKAGES = {
    "torchvision": TORCHVISION,
    "timm": TIMM,
    "transformers": TRANSFORMERS,
    "peft": PEFT,
    "torch_geometric": GEOMETRIC,
    "torchdiffeq": DIFFERENTIAL,
}
"""Package → name → what makes the network and its data."""
